"""The arithmetic of one rank: the graph as tensors, kernels, GNN layers and models.

Open
    layer.py    for the interface between strategies and layers, and the base class of all layers
    models.py   for `Net`, a whole model or a pipeline stage of it; layers of built-in kinds; layer
                norm, and batch norm over the rows of all ranks
    count.py    for counting the work and memory of a user's layer
    blocks.py   for features, and `weighted_block`: a layer's edges with weights
    targets.py  for labels and regression targets, losses and metrics; the loss of link prediction,
                and its AUC
    copies.py   for copying rows between the server's memory and a GPU
    kernels/    for the hot operations: aggregation, attention, matrix products, dropout

It imports the planner."""
