"""A GNN: its specification, the work of its layers, and their memory.

    fields.py       the options of a GNN and its training: rule, default and meaning
    workload.py     the specification of a GNN and its training, and checks across fields
    model.py        a model's layers, and the work and memory of each layer
    kinds.py        kinds of layers (GCN, GAT, ..), described once for planner and executor; a layer
                    of the user's own, as counted by the executor
    layer.py        work and memory of a layer on any block, from its operations in torch, forward
                    and backward
    trace.py        a recorder of operations, which replays them backward as autograd does; amounts
                    that are linear in a block's rows, sources and edges; products with matrices
    rows.py         storage formats of input rows (dense, CSR); encodings of rows that ranks send
                    (whole, averaged or packed); bytes and work

Imports `vocabulary` only."""
