"""Arithmetic on a Number: a float for one cluster, or an array for many clusters at once.

Seconds of a transfer are a float or an array [problems, 1]. Seconds of each rank are an array
[ranks] or [problems, ranks]. The last axis is therefore always the ranks' (or the chunks').
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from gnnplan.planner.vocabulary.numbers import Number


def largest(values: Iterable[Number], least: Number = 0.0) -> Number:
    """Element by element, the largest of these values and of `least`.

    >>> largest([1.0, 3.0, 2.0]), largest([], 5.0)
    (np.float64(3.0), 5.0)
    """
    out = least
    for value in values:
        out = np.maximum(out, value)
    return out


def total(values: Iterable[Number]) -> Number:
    """Element by element, the sum of these values."""
    out: Number = 0.0
    for value in values:
        out = out + value
    return out


def times(seconds: Number, count: int) -> Number:
    """A product that leaves the very same object where the count is 1."""
    return seconds if count == 1 else seconds * count
