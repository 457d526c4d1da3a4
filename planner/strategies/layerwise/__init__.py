"""Strategies that train on the full graph, layer by layer, all ranks together.

    exchange.py         which halo rows are fresh in a step, and what the others do
    on_parts.py         what strategies share that differ in that alone; rows that vanish
    graph_parallel.py   graph parallelism; with staleness 1 it is PipeGCN
    bns.py              graph parallelism with a sample of the halo in every epoch
    feature_parallel.py feature parallelism: sums over edges on columns of all rows
    columns.py          the operations of its step
    tensor3d.py         3D tensor parallelism: a tile of every tensor on each rank of a grid
    tiles.py            the operations of its step
    granndis.py         GraNNDis: servers recompute rows instead of receiving them
    offload.py          devices go chunk by chunk, with vertex data in servers' memories
    chunked.py          the operations of its step: their program, bytes and memory
    preloading.py       what that costs and saves, in sentences
    step.py             the operations of one step: their program
    buckets.py          gradients that ranks add up in buckets, beside the backward pass
    memory.py           bytes that the step's operations hold, and what stays from step to step

How rows are written that cross is a codec's (planner/gnn/codec.py), for pipelines have one too.
Mini-batch strategies begin with operations of their own and go on with the same `step`.
"""
