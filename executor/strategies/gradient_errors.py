"""How far a step's gradient is from the exact one at the same weights.

After a step the same rank makes another pass with the same weights and dropout masks, whose
exchanges are synchronous. Its gradient is the exact one. Nothing that training uses changes.
"""

from __future__ import annotations

import torch

from gnnplan.executor.ranks.comm import total
from gnnplan.executor.ranks.learner import Gradients
from gnnplan.executor.strategies.layerwise import Worker

ALL = "all"  # the gradient of all parameters


class GradientErrors:
    """Measures a graph-parallel worker's gradients.

    `errors`: by parameter, and of all, per step |used - exact| and |exact|. All ranks have the
    same.
    """

    def __init__(self, worker: Worker, gradients: Gradients) -> None:
        self.worker, self.gradients = worker, gradients
        self.errors: dict[str, list[tuple[float, float]]] = {}

    def measure(self, step: int) -> None:
        """After the worker's step, before ranks sum its gradients."""
        worker, rank, flat = self.worker, self.worker.rank, self.gradients.flat
        worker.drain()  # its exchanges and those of the other pass would meet
        used, running = flat.clone(), [buffer.clone() for buffer in worker.net.buffers()]
        flat.zero_()
        rank.recorder.recording = False
        kept = worker.halo, worker.learner
        worker.halo, worker.learner = worker.plain_halo, None
        worker.step(step)
        worker.halo, worker.learner = kept
        rank.recorder.recording = True
        both = total(rank, torch.stack([used, flat])).double()
        flat.copy_(used)
        for buffer, before in zip(worker.net.buffers(), running, strict=True):
            buffer.copy_(before)
        gap, exact = both[0] - both[1], both[1]
        sizes = {name: each.numel() for name, each in worker.net.named_parameters()}
        parts = zip(
            *(torch.split(numbers, [*sizes.values()]) for numbers in (gap, exact)), strict=True
        )
        for name, (off, true) in (
            dict(zip(sizes, parts, strict=True)) | {ALL: (gap, exact)}
        ).items():
            self.errors.setdefault(name, []).append((float(off.norm()), float(true.norm())))
