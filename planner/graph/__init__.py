"""A graph: read, generated or known by statistics; how it is partitioned, sampled and split.

    graph.py        the types Graph and GraphStats
    load.py         a graph by name, from one of the next three
    parts.py        what every source is read into, a piece at a time
    arrays.py       a table of arrays, which all sources become: in memory, or our own files
    part_folder.py  a graph cut in parts, of which rows are read as they are asked for
    build.py        a graph of parts, checked and completed
    npy.py          an array's header and ids, checked before anything is allocated
    labels.py       what vertices have: labels, masks, features; read, or made up
    fields.py       numbers of vertices and edges by name, which go along with their edges
    generator.py    generated graphs
    statistics.py   graphs of which only statistics are known (datasets/*.yaml)
    partition.py    the part of each vertex
    partitioners.py METIS and KaMinPar, which cut; training vertices evened out
    kept.py         what takes long to find, kept on disk
    sampling.py     what mini-batches draw: seeds, neighbours, edges and negatives
    splitting.py    the owner of each vertex of a mini-batch

Imports `vocabulary`, and `gnn` for the workload."""
