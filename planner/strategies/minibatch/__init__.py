"""Strategies on mini-batches, and where features and adjacency lists are.

data_parallel.py     data parallelism: every rank samples and computes for its own seeds
gsplit.py            GSplit: a group of ranks splits one batch
on_batches.py        what these and P3 have in common
supply.py            who draws batches, and where lists and features are: what comes before training
step.py              the operations of one batch: their program
feature_store.py     which rows each rank caches, and who provides the others
adjacency_store.py   whose sampler has which adjacency lists
proposals.py         how many samplers and caches a plan proposes, and what it spreads
device_sampler.py    what GPUs take that draw and lay out batches
memory.py            bytes that a rank holds, and that a server's memory holds of the graph
profile.py           what a graph's mini-batches are like (`gnnplan profile`)
"""
