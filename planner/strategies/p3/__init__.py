"""P3: layer 1 on feature columns, the other layers data parallel, on mini-batches.

p3.py       the strategy, with a drawing; the operations of a batch, their order and memory
slices.py   knobs; the feature columns of each rank, and the groups that sum partial rows
"""
