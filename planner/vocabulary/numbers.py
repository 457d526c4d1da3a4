"""Numbers that may be arrays, their formats, values with array fields, rank-to-rank matrices."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from hashlib import blake2b
from itertools import pairwise
from statistics import mean, median
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin
from numpy.typing import NDArray

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
# A float, or an array of them where several candidates are evaluated at once.
Number = float | Floats
Group = tuple[int, ...]  # ranks that act together
PerRank = tuple[int, ...]  # a number for each rank: its server, its group or its GPU

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


def grouped(values: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Return key -> the values with this key, in their order.

    >>> grouped(["a", "bb", "c"], len)
    {1: ['a', 'c'], 2: ['bb']}
    """
    groups = defaultdict[K, list[T]](list)
    for value in values:
        groups[key(value)].append(value)
    return dict(groups)


def numbered(places: Iterable[Hashable]) -> PerRank:
    """Return a number for each place: equal places have one number, in the order of the first.

    >>> numbered("cca")
    (0, 0, 1)
    """
    numbers: dict[Hashable, int] = {}
    return tuple(numbers.setdefault(place, len(numbers)) for place in places)


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


def shares(total: Any, parts: int) -> NDArray[Any]:
    """Return the nearly equal whole numbers, larger ones first, that add up to `total` [.., parts].

    >>> shares(10, 4)
    array([3, 3, 2, 2])
    """
    each, rest = np.divmod(np.asarray(total)[..., None], parts)
    return np.asarray(each + (np.arange(parts) < rest))


def offsets(lengths: Any) -> NDArray[Any]:
    """Return where each of several consecutive pieces of these lengths begins, and their end.

    >>> offsets([2, 3]).tolist()
    [0, 2, 5]
    """
    return np.append(0, np.cumsum(lengths))


def split(array: NDArray[Any], lengths: Any) -> list[NDArray[Any]]:
    """Cut an array into consecutive pieces of these lengths."""
    return np.split(array, np.cumsum(lengths)[:-1])


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


# -- formats of numbers ----------------------------------------------------------------------------

# Everything that depends on the format of rows is here, or is looked up by the format's name in
# --dtype: a device has the rates gemm_NAME, gather_NAME and product_code_NAME for some formats
# (cluster/spec.py). Weights, the gradients of weights and the optimizer's state are float32 or
# float64 in every precision.


class Precision(NamedTuple):
    """A format of `itemsize` bytes per number, which is exact for whole numbers up to 2^digits."""

    name: str
    itemsize: int  # [B]
    digits: int  # of the significand, in bits
    rounds: str = ""  # sentence that a plan prints about rounding; '': rounds no more than float32

    @property
    def rounds_rows(self) -> bool:
        """Whether rows have fewer digits than the weights, which makes training lossy."""
        return self.itemsize < 4

    @property
    def torch(self) -> str:
        """The name of the torch dtype; TF32 is float32 in torch, with another matrix product."""
        return "float32" if self.itemsize == 4 else self.name

    @property
    def weights(self) -> Precision:
        """The precision of weights, of their gradients and of the loss."""
        return FLOAT64 if self == FLOAT64 else FLOAT32

    @property
    def coarseness(self) -> str:
        """The number of digits in words, for messages that refuse a sum in this precision."""
        return f"{self.name}'s {self.digits} bits"


FLOAT32 = Precision("float32", 4, 24)
FLOAT64 = Precision("float64", 8, 53)
ROUNDED_PRODUCTS = "Rows are float32, and GPUs round the factors of products to 10 bits (TF32)"
TF32 = Precision("tf32", 4, 24, ROUNDED_PRODUCTS)
HALF_ROWS = "Rows are bfloat16, half the bytes; weights, optimizer and all-reduces are float32"
BFLOAT16 = Precision("bfloat16", 2, 8, HALF_ROWS)
PRECISIONS = {each.name: each for each in (FLOAT32, FLOAT64, TF32, BFLOAT16)}


# -- values with array fields ----------------------------------------------------------------------


class ByContent:
    """The base of frozen dataclasses (`eq=False`) whose fields are arrays, or contain arrays.

    The arrays are not written to again. Values are equal if their arrays have the same digests.
    """

    @cached_property
    def _contents(self) -> tuple[object, ...]:
        """The contents of all fields as hashable values."""
        return tuple(_content(getattr(self, field.name)) for field in fields(self))  # type: ignore[arg-type]

    def __hash__(self) -> int:
        return hash(self._contents)

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self._contents == other._contents


def _content(value: object) -> object:
    """Return a hashable value that is equal for equal contents.

    >>> _content(np.arange(3)) == _content(np.arange(3)), _content(np.ones(1)) == _content(1.0)
    (True, False)
    """
    if isinstance(value, np.ndarray):
        return value.shape, value.dtype.str, blake2b(value.tobytes(), digest_size=16).digest()
    if isinstance(value, dict):
        return frozenset((key, _content(each)) for key, each in value.items())
    return tuple(map(_content, value)) if isinstance(value, tuple) else value


# -- amounts from rank to rank ---------------------------------------------------------------------

# Rank-to-rank matrices (amounts that each rank sends to each other) are stored as two vectors. For
# a graph known by statistics only, all ranks of a group get the same estimate. Two vectors then
# replace the matrix, which would have 67 million entries for 8,192 ranks.


class EqualPairs(NamedTuple):
    """Pairs of ranks with equal matrix entries: every sender sends `value` to every receiver."""

    value: float | int
    senders: np.ndarray  # bool [ranks]
    receivers: np.ndarray  # bool [ranks]


@dataclass(frozen=True, eq=False)
class Outer(ByContent, NDArrayOperatorsMixin):
    """A matrix [ranks, ranks], or [chunks, ranks, ranks]: entry [i, j] is left[i] * right[j] or 0.

    With `same`, the entries are nonzero for two different ranks i and j of one group; otherwise,
    for ranks of different groups. numpy functions convert the matrix to a dense array.

    left, right: [ranks], or one of them [chunks, ranks]. groups: the group of each rank, 0, 1, ..
    [ranks].

    >>> np.asarray(Outer.of((0, 0, 1), True, 5)).tolist()
    [[0, 5, 0], [5, 0, 0], [0, 0, 0]]
    """

    left: np.ndarray
    right: np.ndarray
    groups: np.ndarray
    same: bool = True

    @classmethod
    def of(cls, groups: Any, same: bool, value: float | np.ndarray) -> Outer:
        """Make a matrix whose nonzero entries are one value [], or a value per sender [ranks]."""
        group = np.asarray(groups, dtype=np.int64)
        one = np.ones(group.size, dtype=np.int64)
        return cls(value * one, one, group, same)

    # -- as an array

    @property
    def shape(self) -> tuple[int, ...]:
        leading = self.left.shape[:-1] or self.right.shape[:-1]
        return (*leading, self.groups.size, self.groups.size)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.result_type(self.left, self.right)

    @property
    def T(self) -> Outer:
        """The transpose over ranks (senders become receivers), in every chunk."""
        return replace(self, left=self.right, right=self.left)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        within = np.equal.outer(self.groups, self.groups)
        pairs = within & ~np.eye(self.groups.size, dtype=bool) if self.same else ~within
        dense = self.left[..., :, None] * self.right[..., None, :] * pairs
        return np.asarray(dense, dtype=dtype)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *operands: Any, **options: Any) -> Any:
        """Return an Outer for a product with a number or a vector; a dense array otherwise."""
        if ufunc is np.multiply and method == "__call__":
            factor, *others = (each for each in operands if each is not self)
            if not others and np.ndim(factor) < 2:
                if np.ndim(factor):  # a factor per receiver, by numpy's rules of broadcasting
                    return replace(self, right=self.right * factor)
                return replace(self, left=self.left * factor)
        dense = (np.asarray(each) if isinstance(each, Outer) else each for each in operands)
        return getattr(ufunc, method)(*dense, **options)

    def __getitem__(self, i: Any) -> Any:
        """Return the matrix of chunk i; without chunks, the amounts that rank i sends [ranks]."""
        if not isinstance(i, (int, np.integer)):
            return np.asarray(self)[i]
        if self.ndim == 2:
            reached = (self.groups == self.groups[i]) == self.same
            reached[i] = False
            return self.left[i] * self.right * reached
        left, right = (part[i] if part.ndim > 1 else part for part in (self.left, self.right))
        return replace(self, left=left, right=right)

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Iterator[Any]:
        return (self[i] for i in range(len(self)))

    def swapaxes(self, one: int, other: int) -> Outer:
        """Return the transpose over ranks; the two axes must be those of ranks."""
        return self.T

    def sum(self, axis: int | None = None) -> Any:
        """Return the sum of all entries, or over one axis: chunks (if any), senders, receivers."""
        if axis is None:
            return (self.left * self.reached(self.right)).sum()
        if axis == self.ndim - 1:
            return self.left * self.reached(self.right)
        if axis == self.ndim - 2:
            return self.right * self.reached(self.left)
        left, right = (p.sum(0) if p.ndim > 1 else p for p in (self.left, self.right))
        return replace(self, left=left, right=right)

    def mean(self, axis: int) -> Outer:
        """Return the mean over chunks, the first axis; `axis` must be 0."""
        whole: Outer = self.sum(axis)
        return replace(whole, left=whole.left / len(self))

    def any(self) -> bool:
        return bool(self.sum())

    def round(self, decimals: int = 0, out: None = None) -> Outer:
        """Round entries that depend on the sender alone, or on the receiver alone."""
        if (self.right == 1).all():
            return replace(self, left=np.round(self.left))
        assert (self.left == 1).all(), "the entries of a row, or of a column, must be equal"
        return replace(self, right=np.round(self.right))

    def astype(self, dtype: Any) -> Outer:
        return replace(self, left=self.left.astype(dtype), right=self.right.astype(dtype))

    # -- sums without the dense array

    def reached(self, numbers: np.ndarray, *places: np.ndarray) -> np.ndarray:
        """Return, per rank, the sum of `numbers` [.., ranks] over the ranks that it exchanges with.

        places: arrays with a place of each rank [ranks], such as its server; then only ranks in the
        same places count."""
        grouped = sums(cells(*places, self.groups), numbers)
        if self.same:
            return np.asarray(grouped - numbers)
        whole = sums(cells(*places), numbers) if places else numbers.sum(-1, keepdims=True)
        return np.asarray(whole - grouped)

    def within(self, place: np.ndarray) -> float:
        """Return the sum of all entries between ranks at the same place; place: [ranks]."""
        return float((self.left * self.reached(self.right, place)).sum())

    @property
    def is_even(self) -> bool:
        """Whether every rank sends the same amount to every other rank."""
        single = self.groups.size < 2
        equal = all((part == part[..., :1]).all() for part in (self.left, self.right))
        one_group = self.same and bool((self.groups == self.groups[0]).all())
        return single or not self.any() or (equal and one_group)

    @property
    def equal_pairs(self) -> list[EqualPairs]:
        """The nonzero entries, grouped by value; there are few groups, as most ranks are alike."""
        return [
            EqualPairs(a * b, self.left == a, self.right == b)
            for a in np.unique(self.left).tolist()
            for b in np.unique(self.right).tolist()
            if a * b
        ]


RankMatrix = np.ndarray | Outer  # amounts from rank (row) to rank (column)


def cells(*places: np.ndarray) -> np.ndarray:
    """Number the ranks by cell: ranks with equal entries in all `places` [ranks] share a cell.

    >>> cells(np.array([0, 0, 1, 1]), np.array([7, 8, 7, 7])).tolist()
    [0, 1, 2, 2]
    """
    cell = places[0]
    for place in places[1:]:
        cell = np.unique(cell * (place.max() + 1) + place, return_inverse=True)[1]
    return cell


def sums(cell: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """Return, per rank, the sum of `numbers` [.., ranks] over the ranks in its cell."""
    flat = numbers.reshape(-1, cell.size)
    totals = [np.bincount(cell, row)[cell] for row in flat]
    return np.reshape(totals, numbers.shape).astype(numbers.dtype)
