"""Which rank owns which rows: counted on a graph, or estimated from its statistics.

    layout.py               graph parallelism at any depth
    parts.py                a folder with a part per rank: written, and read as a layout
    minibatch.py            mini-batches, as layouts of sampled edges
    chunks.py               chunks of a pipeline, each cut over the members of a stage
    estimated_layout.py     a layout where only statistics are known
    estimated_batches.py    mini-batches where only statistics are known
    profile.py              facts about partitions of a graph, for people

Imports `vocabulary`, `gnn` for the workload, and `graph`."""
