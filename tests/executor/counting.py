"""What torch itself counts of its allocations."""

from collections.abc import Callable
from typing import TypeVar

import numpy as np
from torch.profiler import ProfilerActivity, profile

T = TypeVar("T")


def counted(work: Callable[[], T]) -> tuple[T, int, int]:
    """What it gives; bytes left of what it allocated, and the most that were (torch's profiler)."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as found:
        result = work()
    events = [e for e in found.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = np.cumsum([event.nbytes() for event in sorted(events, key=lambda e: e.start_ns())])
    return result, int(held[-1]), int(held.max())
