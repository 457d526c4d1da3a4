"""GNNPipe: one rank's share of a stage of the pipeline, chunk after chunk.

planner/strategies/gnnpipe/ draws the pipeline. Which file to open:

    worker.py   a training step: chunks through the stage, messages between stages and members
    layers.py   one layer on one chunk, forward and backward; rows that stay from step to step
    inputs.py   layer 1 on constant features
    chunks.py   a sub-chunk: its rows, its edges, and who reads it
"""

from gnnplan.executor.strategies.gnnpipe.worker import Worker as open_worker

__all__ = ["open_worker"]
