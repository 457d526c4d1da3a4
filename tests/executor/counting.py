"""What torch itself counts of its allocations, and which library multiplies on the CPU."""

from collections.abc import Callable
from typing import TypeVar

import numpy as np
import pytest
from torch.profiler import ProfilerActivity, profile

from gnnplan.executor.layers.kernels import matmul

T = TypeVar("T")


def counted(work: Callable[[], T]) -> tuple[T, int, int]:
    """What it gives; bytes left of what it allocated, and the most that were (torch's profiler)."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as found:
        result = work()
    events = [e for e in found.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = np.cumsum([event.nbytes() for event in sorted(events, key=lambda e: e.start_ns())])
    return result, int(held[-1]), int(held.max())


def multiply(monkeypatch: pytest.MonkeyPatch, in_place: bool) -> None:
    """By MKL, which writes products into place, or by oneDNN, which has ReLU inside."""
    if not in_place and not matmul.has_onednn():
        pytest.skip("this torch has no oneDNN product")
    monkeypatch.setattr(matmul, "by_onednn", lambda: not in_place)
