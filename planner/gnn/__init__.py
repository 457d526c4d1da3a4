"""A GNN: its specification, what its layers compute, and what they keep in memory.

    fields.py       what a user may say of it, with rule, default and meaning
    workload.py     the specification that a user gives, and which fields go together
    model.py        widths, parameters and work of each layer
    passes.py       how often element-wise operations pass over a layer's tensors
    few_bits.py     rows in few bits per number: their bytes and work
    footprint.py    memory of each layer while it is trained
    counted.py      work and memory of a layer of the user's own, as counted by the executor

Imports `vocabulary` only."""
