"""A step as a CUDA graph: the host launches all of its kernels at once.

A small graph's kernels run for less time than the host takes to launch them one by one. What a
graph needs stays in memory of its own, so steps become one only while that is a small part of the
GPU's (`SHARE`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
SHARE = 0.25  # of the GPU's memory that a step may fill


class Clocked(Protocol):
    """What reads the number of its step from the device where it has a clock, int64 []."""

    clock: Tensor | None


class Replay(Generic[T]):
    """What `step` enqueues for a worker, to be done again and again on the same tensors."""

    def __init__(self, worker: Clocked, step: Callable[[], T], device: torch.device) -> None:
        self.clock = worker.clock = torch.zeros((), dtype=torch.int64, device=device)
        try:
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.results: T = step()
        finally:
            worker.clock = None  # a step that cannot be recorded is told its number again

    def __call__(self, step: int) -> T:
        """Do the step of this number -> what `step` returned, where the next one will put its."""
        self.clock.fill_(step)
        self.graph.replay()
        return self.results


def is_small(device: torch.device) -> bool:
    """Whether all that was allocated at the fullest moment is a small part of the GPU's memory."""
    total = torch.cuda.get_device_properties(device).total_memory
    return torch.cuda.max_memory_allocated(device) < SHARE * total
