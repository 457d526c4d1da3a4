"""A training step as a CUDA graph: the host launches all of the step's kernels at once.

On a small graph, kernels run for less time than the host takes to launch them one by one. A CUDA
graph keeps private memory, so a step becomes one only if it fills a small share of the GPU's memory
(`SHARE`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
SHARE = 0.25  # largest share of the GPU's memory that a replayed step may fill


class Clocked(Protocol):
    """A worker that reads the step's number from `clock`, int64 [] on the device, if set."""

    clock: Tensor | None


class Replay(Generic[T]):
    """The CUDA graph of the kernels that `step` enqueues, replayed on the same tensors."""

    def __init__(self, worker: Clocked, step: Callable[[], T], device: torch.device) -> None:
        self.clock = worker.clock = torch.zeros((), dtype=torch.int64, device=device)
        try:
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.results: T = step()
        finally:
            worker.clock = None  # a step that is not replayed gets its number from the host

    def __call__(self, step: int) -> T:
        """Replay the step of this number; return its results, which the next replay overwrites."""
        self.clock.fill_(step)
        self.graph.replay()
        return self.results


def is_small(device: torch.device) -> bool:
    """Whether the peak of allocated memory is a small share of the GPU's memory."""
    total = torch.cuda.get_device_properties(device).total_memory
    return torch.cuda.max_memory_allocated(device) < SHARE * total
