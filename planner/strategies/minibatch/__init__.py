"""Strategies on mini-batches, and the storage of features and adjacency lists.

data_parallel.py     data parallelism: every rank samples and computes for its own seeds
gsplit.py            GSplit: a group of ranks splits one batch
p3.py                P3: layer 1 on feature columns, the other layers data parallel
on_batches.py        base classes of these strategies; the operations of one batch; numbers of
                     samplers, sizes of caches and placement of data that a plan proposes
supply.py            the operations before training: sampling, also on a GPU, and loading of
                     features; memory of ranks, and graph data in a server's memory
feature_store.py     which rows each rank caches, and which rank provides the others
adjacency_store.py   which samplers have which adjacency lists
profile.py           statistics of a graph's mini-batches (`gnnplan profile`)
"""
