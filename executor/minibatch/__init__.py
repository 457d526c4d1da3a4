"""Mini-batches for real: sampling, a rank's share of a batch, and the feature store.

Open
    sampler.py          for how a rank draws its share of every batch, alone or with its group
    arriving.py         for samplers in processes of their own, ahead of their rank
    source_sampler.py   for batches whose layer 1 is split by sources (SNP)
    device_sampling.py  for drawing neighbours on a GPU
    share.py            for `Share`: source rows, edges and exchanges of each layer
    feature_store.py    for reading features from caches, host memory and other ranks

It imports the planner, executor/layers and executor/ranks. What is drawn and where rows are stored
follows planner/graph/sampling.py and planner/strategies/minibatch."""
