"""A GNN: its specification, what its layers compute, and what they keep in memory.

    fields.py       what a user may say of it, with rule, default and meaning
    workload.py     the specification that a user gives, and which fields go together
    model.py        a model's layers, and the work of each
    kinds.py        what a kind of layer has and does, for the executor too
    layer.py        work and memory of a layer on any block, from its operations
    operations.py   what torch does for each operation, in both passes: work, and what is kept
    trace.py        how operations follow each other, and gradients go back through them
    rows.py         how input rows are stored, and their bytes
    products.py     products of rows with a matrix, and the shapes that oneDNN makes code for
    amounts.py      amounts that are linear in a block's rows, sources and edges
    codec.py        how rows cross, whole or packed: their bytes and work
    footprint.py    memory of each layer while it is trained
    counted.py      work and memory of a layer of the user's own, as counted by the executor

Imports `vocabulary` only."""
