"""GNNPipe: layers in a pipeline, the graph in chunks.

gnnpipe.py    the strategy: what it does (with the drawing) and a stage's operations
pipeline.py   knobs; which rank has which layers, what it does with a chunk
balance.py    how many layers each stage gets
memory.py     bytes that a rank holds, of all chunks
"""
