"""Strategies on mini-batches, and the storage of features and adjacency lists.

data_parallel.py     data parallelism: every rank samples and computes for its own seeds
gsplit.py            GSplit: a group of ranks splits one batch
on_batches.py        base classes of these strategies and of P3; the operations of one batch
supply.py            the operations before training: sampling, also on a GPU, and loading of
                     features
feature_store.py     which rows each rank caches, and which rank provides the others
adjacency_store.py   which samplers have which adjacency lists
proposals.py         numbers of samplers, sizes of caches and placement of data that a plan proposes
memory.py            memory of ranks, and graph data in a server's memory
profile.py           statistics of a graph's mini-batches (`gnnplan profile`)
"""
