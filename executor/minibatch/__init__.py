"""Mini-batches: sampling, a rank's share of a batch, and the feature store.

    sampler.py          a rank samples its share of every batch, alone or with its group;
                        `SourceSampler`: layer 1 is split by sources (SNP)
    share_queue.py      samplers in separate processes, ahead of their rank
    device_sampling.py  neighbour sampling on a GPU
    share.py            `Share`: source rows, edges and exchanges of each layer
    feature_store.py    features from caches, host memory and other ranks

This room imports the planner, executor/layers and executor/ranks. planner/graph/sampling.py defines
what is drawn, and planner/strategies/minibatch where rows are stored."""
