"""One rank's arithmetic: the graph as tensors, hot operations, GNN layers and models.

Open
    models.py   for the layers (GCN, GraphSAGE, GCNII, GAT, GEN), batch norm, and the whole `Net`
    blocks.py   for features, labels, loss, and `weighted_block`: a layer's edges with weights
    kernels/    for the operations beneath: aggregation, attention, products, dropout

It imports the planner, and no other room of the executor."""
