"""Strategies that train on the full graph, layer by layer, all ranks together.

    exchange.py         policies: which halo rows are sent in a step, and the state of other rows;
                        all-reduces of gradients that overlap with the backward pass
    graph_parallel.py   base class of strategies that exchange halo rows; rows that vanish; graph
                        parallelism, which with staleness 1 is PipeGCN
    bns.py              BNS: graph parallelism with a sample of the halo in every epoch
    step.py             the operations of one step, their memory, and data that stays between steps
    granndis.py         GraNNDis: servers recompute rows instead of receiving them
    feature_parallel.py feature parallelism: aggregation on some columns of all rows
    tensor3d.py         3D tensor parallelism: a tile of every tensor on each rank of a grid
    offload.py          offload: chunk by chunk, with vertex data in the servers' memories

Codecs, which encode the rows that ranks send, are in planner/gnn/rows.py, because pipelines use
them too. Mini-batch strategies use the same `step` after sampling and loading.
"""
