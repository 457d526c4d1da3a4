"""Seconds of work on a device, and of its kernels alone."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from gnnplan.executor.ranks.recorder import DeviceClock

HEAD_START = 10_000_000  # cycles that the GPU idles, in which the host enqueues samples
TOGETHER = 5  # samples that the host enqueues at once
SECONDS = 0.2  # spent on a number


def kernel_s(device: torch.device, work: Callable[[], Any], small: bool = False) -> float:
    """Median seconds of the work's kernels; on CUDA the host is ahead, so launches do not count."""
    if device.type != "cuda":
        return whole_s(device, work, small)
    for _ in range(2):
        work()
    clock, samples, end = DeviceClock(device), list[float](), time.monotonic() + SECONDS
    while not samples or time.monotonic() < end:
        torch.cuda._sleep(HEAD_START)
        marks = [clock.mark()]
        for _ in range(TOGETHER):
            work()
            marks.append(clock.mark())
        torch.cuda.synchronize(device)
        seconds = [mark.seconds for mark in marks]
        samples += [b - a for a, b in itertools.pairwise(seconds)]
    return median(samples)


def whole_s(device: torch.device, work: Callable[[], Any], small: bool = False) -> float:
    """Median seconds of the work, launches and the wait for its end included."""
    work()
    samples, end = list[float](), time.monotonic() + (0.0 if small else SECONDS)
    while len(samples) < 3 or time.monotonic() < end:
        torch.get_device_module(device).synchronize()
        begin = time.perf_counter()
        work()
        torch.get_device_module(device).synchronize()
        samples.append(time.perf_counter() - begin)
    return median(samples)
