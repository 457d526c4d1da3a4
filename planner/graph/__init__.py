"""Graphs: read, generated or described by statistics; their partitions, samples and splits.

    graph.py        the types Graph and GraphStats
    load.py         finds a graph by the name that a user gives; graphs known by statistics only
                    (datasets/*.yaml)
    formats/        readers of other libraries' files
    parts.py        `Parts`: the contents of a source, read piece by piece; makes a checked and
                    completed `Graph` of them
    arrays.py       gnnplan's own files: a .npz, or a folder of .npy files
    part_folder.py  a folder of a partitioned graph, whose rows are read on demand
    npy.py          checks array headers and vertex ids before memory is allocated
    data.py         labels, masks, features and further fields (edge weights, positions)
    generator.py    generated graphs
    partition.py    the part of each vertex, by METIS or KaMinPar; balancing of training vertices;
                    the owner of each vertex of a mini-batch (split parallelism)
    disk_cache.py   the cache on disk for results that take long to compute
    sampling.py     mini-batch sampling: seeds, neighbours, edges and negatives

Imports `vocabulary`, and `gnn` for the workload."""
