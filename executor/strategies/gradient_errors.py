"""The error of a step's gradient against the exact gradient at the same weights.

After a step, the ranks make a second pass with the same weights and dropout masks, but with
synchronous exchanges of whole rows. Its gradient is exact. The pass leaves training unchanged.
"""

from __future__ import annotations

import torch

from gnnplan.executor.ranks.comm import total
from gnnplan.executor.ranks.learner import Gradients
from gnnplan.executor.strategies.layerwise import Worker

ALL = "all"  # the gradient of all parameters


class GradientErrors:
    """Gradient errors of a graph-parallel worker.

    errors: parameter's name, or 'all' -> for each step |used - exact| and |exact|; the same on
    all ranks.
    """

    def __init__(self, worker: Worker, gradients: Gradients) -> None:
        self.worker, self.gradients = worker, gradients
        self.errors: dict[str, list[tuple[float, float]]] = {}

    def measure(self, step: int) -> None:
        """Measure a step's gradient. Call it after the step, before its gradient is all-reduced."""
        worker, rank, flat = self.worker, self.worker.rank, self.gradients.flat
        worker.drain()  # pending exchanges would mix with those of the second pass
        used, running = flat.clone(), [buffer.clone() for buffer in worker.net.buffers()]
        flat.zero_()
        rank.recorder.recording = False
        saved = worker.halo, worker.learner
        worker.halo, worker.learner = worker.plain_halo, None
        worker.step(step)
        worker.halo, worker.learner = saved
        rank.recorder.recording = True
        gradients = total(rank, torch.stack([used, flat])).double()
        flat.copy_(used)
        for buffer, before in zip(worker.net.buffers(), running, strict=True):
            buffer.copy_(before)
        gap, exact = gradients[0] - gradients[1], gradients[1]
        sizes = {name: each.numel() for name, each in worker.net.named_parameters()}
        parts = zip(
            *(torch.split(numbers, [*sizes.values()]) for numbers in (gap, exact)), strict=True
        )
        for name, (error, true) in (
            dict(zip(sizes, parts, strict=True)) | {ALL: (gap, exact)}
        ).items():
            self.errors.setdefault(name, []).append((float(error.norm()), float(true.norm())))
