"""GNNPipe: layers in a pipeline, the graph in chunks.

gnnpipe.py    the strategy, with a drawing; a stage's operations; division of layers by cost
pipeline.py   knobs; layers of each stage; a rank's work on a chunk
memory.py     memory of a rank, for all chunks
"""
