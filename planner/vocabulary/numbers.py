"""The type `Number` (a float or an array), and arithmetic on numbers and arrays."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from statistics import mean, median
from typing import Any

import numpy as np
from numpy.typing import NDArray

# A float, or an array of them where several candidates are evaluated at once.
Number = float | NDArray[np.float64]

# Standard deviation of the logarithm of vertex degrees, for graphs whose degrees were not counted.
# It is the mean of ten real graphs, which range from 0.57 to 1.60 (tests/planner/test_cost.py).
SPREAD = 1.15


def largest(values: Iterable[Number], least: Number = 0.0) -> Number:
    """Return the element-wise maximum of the values and of `least`.

    >>> largest([1.0, 3.0, 2.0]), largest([], 5.0)
    (np.float64(3.0), 5.0)
    """
    out = least
    for value in values:
        out = np.maximum(out, value)
    return out


def total(values: Iterable[Number]) -> Number:
    """Return the element-wise sum of the values."""
    out: Number = 0.0
    for value in values:
        out = out + value
    return out


def slowest(seconds: Number) -> Number:
    """Return the maximum over ranks, the last axis: [ranks] -> a number, [.., ranks] -> [.., 1].

    >>> slowest(np.array([1.0, 3.0])), slowest(np.array([[1.0, 3.0], [2.0, 0.0]])).tolist()
    (np.float64(3.0), [[3.0], [2.0]])
    """
    out: Number = np.max(np.atleast_1d(seconds), axis=-1, keepdims=np.ndim(seconds) > 1)
    return out


def typical(values: Sequence[float], period: int = 1) -> float:
    """Return the median of a series; for a periodic series, the mean of the medians of its phases.

    >>> typical([1.0, 2.0, 9.0]), typical([1.0, 5.0, 1.0, 7.0, 3.0], period=2)
    (2.0, 3.5)
    """
    return mean(median(values[first::period]) for first in range(min(period, len(values))))


def ranges(starts: NDArray[Any], lengths: NDArray[Any]) -> NDArray[Any]:
    """Return the concatenation of the ranges start, start + 1, .. of the given lengths.

    >>> ranges(np.array([5, 0]), np.array([2, 3])).tolist()
    [5, 6, 0, 1, 2]
    """
    ends = np.cumsum(lengths)
    return np.repeat(starts - (ends - lengths), lengths) + np.arange(ends[-1] if ends.size else 0)


def runs(lengths: NDArray[Any], most: int) -> list[slice]:
    """Return slices that cover all rows, about `most` numbers each; row i has lengths[i] numbers.

    >>> runs(np.array([2, 2, 9, 1, 1]), 4)
    [slice(0, 2, None), slice(2, 3, None), slice(3, 5, None)]
    """
    ends = np.cumsum(lengths)
    cuts = np.searchsorted(ends, np.arange(most, ends[-1] if ends.size else 0, most)) + 1
    bounds = [0, *np.unique(cuts[cuts < ends.size]).tolist(), ends.size]
    return [slice(*pair) for pair in pairwise(bounds)]
