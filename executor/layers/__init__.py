"""One rank's arithmetic: the graph as tensors, hot operations, GNN layers and models.

Open
    layer.py    for what a strategy needs of a layer, and the base class of all
    known.py    for layers of the kinds in planner/gnn/kinds.py
    models.py   for the whole `Net`
    norms.py    for batch norm over all ranks' rows
    count.py    for what a layer that is not in the planner's formulas does
    blocks.py   for features, and `weighted_block`: a layer's edges with weights
    targets.py  for labels and numbers that are learned, losses and metrics
    copies.py   for rows on their way between the server's memory and a GPU
    links.py    for the loss of link prediction, and how well edges rank
    kernels/    for the operations beneath: aggregation, attention, products, dropout

It imports the planner."""
