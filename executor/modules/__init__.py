"""A user's own torch module, as a workload that every strategy can train.

Open
    read.py           for `with_user_module`: a file or a live module -> a problem
    make.py           for how a file is executed, and what a class is called with
    trace.py          for torch.fx's graph of `forward`
    follow.py         for how this graph becomes layers
    meet.py           for rows of all layers that meet at its end
    chain.py          for what is found: a chain of convolutions
    convolutions.py   for what each convolution of PyG and DGL is among our layers
    describe.py       for what these layers are as Workload fields
    parameters.py     for where our Net has which parameter, and a live module's file

It imports the planner, and no other room of the executor."""
