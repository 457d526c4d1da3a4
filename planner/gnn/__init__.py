"""A GNN: its specification, what its layers compute, and what they keep in memory.

    workload.py     the specification that a user gives, and its rules
    model.py        widths, parameters and work of each layer
    footprint.py    memory of each layer while it is trained

Imports `vocabulary` only."""
