"""GNNPipe: layers in a pipeline, the graph in chunks.

gnnpipe.py    the strategy, with a drawing; a stage's operations; division of layers by cost;
              memory of a rank, for all chunks
pipeline.py   knobs; layers of each stage; a rank's work on a chunk
"""
