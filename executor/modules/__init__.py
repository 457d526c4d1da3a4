"""A user's own torch module, as a workload that every strategy can train.

Open
    read.py           for `read`: a file and a name in it -> Workload fields and weights
    follow.py         for how torch.fx's graph of `forward` becomes layers
    convolutions.py   for what each convolution of PyG and DGL is among our layers

It imports the planner, and no other room of the executor."""
