"""Which rank owns which rows: counted on a graph, or estimated from its statistics.

    layout.py       layouts of the full graph, for graph parallelism at any depth; chunks of a
                    pipeline, each divided among the members of a stage
    parts.py        a folder with a part of the graph per rank: writing, reading as a layout
    minibatch.py    mini-batches, as layouts of sampled edges
    estimated.py    layouts and mini-batches of a graph known by statistics only
    profile.py      facts about partitions of a graph, for reports

Imports `vocabulary`, `gnn` for the workload, and `graph`."""
