"""GNNPipe: layers in a pipeline, the graph in chunks.

gnnpipe.py    the strategy: what it does (with the drawing), schedule, traffic
pipeline.py   knobs; which rank has which layers, what it does with a chunk, how many bytes
flowshop.py   seconds in closed form; how many layers each stage gets
memory.py     bytes that a rank holds
"""
