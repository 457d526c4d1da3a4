"""P3: layer 1 on a rank's columns of the features, for the blocks of all its peers.

planner/strategies/p3/ draws the pipeline.

    worker.py    a training step: front, body and tail of a batch; three batches at once
    sampler.py   batches whose first block is pushed to all peers
    learner.py   the update with the gradient of three batches ago
"""

from gnnplan.executor.strategies.p3.worker import Worker as open_worker

__all__ = ["open_worker"]
