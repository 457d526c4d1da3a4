"""GNNPipe: layers in a pipeline, the graph in chunks.

gnnpipe.py    the strategy: what it does (with the drawing) and a stage's operations; layers by cost
pipeline.py   knobs; which rank has which layers, what it does with a chunk
memory.py     bytes that a rank holds, of all chunks
"""
