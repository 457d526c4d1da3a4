"""GNNPipe: a rank's share of a pipeline stage, chunk after chunk.

planner/strategies/gnnpipe/ draws the pipeline.

    worker.py   a training step: chunks through the stage, messages between stages and members
    layers.py   one layer on one chunk, forward and backward; rows cached from step to step
    inputs.py   layer 1 on constant features
    chunks.py   a sub-chunk: rows, edges, and exchanges with other members
"""

from gnnplan.executor.strategies.gnnpipe.worker import Worker as open_worker

__all__ = ["open_worker"]
