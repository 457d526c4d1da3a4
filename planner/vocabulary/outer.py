"""A matrix of what ranks send each other, kept as a number per sender and one per receiver.

Where a graph is known by statistics, all ranks of a group are given the same. Two vectors then say
what a matrix would, which has 67 million entries for 8,192 ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from gnnplan.planner.vocabulary.values import Value


class EqualPairs(NamedTuple):
    """Pairs of ranks of which one sends the other the same amount."""

    value: float | int
    senders: np.ndarray  # bool [ranks]
    receivers: np.ndarray  # bool [ranks]


@dataclass(frozen=True, eq=False)
class Outer(Value, NDArrayOperatorsMixin):
    """A matrix [ranks, ranks], or [chunks, ranks, ranks]: entry [i, j] is left[i] * right[j].

    It is so where the ranks i and j are different ones of one group, or (`same` false) in different
    groups; the other entries are 0. Where an array is asked for, it becomes one.

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
        """Each pair has this value [], or that of its sender [ranks]."""
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
        """From receivers to senders, in every chunk."""
        return replace(self, left=self.right, right=self.left)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        within = np.equal.outer(self.groups, self.groups)
        pairs = within & ~np.eye(self.groups.size, dtype=bool) if self.same else ~within
        dense = self.left[..., :, None] * self.right[..., None, :] * pairs
        return np.asarray(dense, dtype=dtype)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *operands: Any, **options: Any) -> Any:
        """Numbers times this are such a matrix again, all else is an array."""
        if ufunc is np.multiply and method == "__call__":
            factor, *others = (each for each in operands if each is not self)
            if not others and np.ndim(factor) < 2:
                if np.ndim(factor):  # of each receiver, as with arrays
                    return replace(self, right=self.right * factor)
                return replace(self, left=self.left * factor)
        dense = (np.asarray(each) if isinstance(each, Outer) else each for each in operands)
        return getattr(ufunc, method)(*dense, **options)

    def __getitem__(self, i: Any) -> Any:
        """That of a chunk; without chunks what the rank i sends each [ranks]."""
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
        """From receivers to senders, in every chunk."""
        return self.T

    def sum(self, axis: int | None = None) -> Any:
        """Of all entries; or over chunks, senders or receivers, which are the axes of an array."""
        if axis is None:
            return (self.left * self.reached(self.right)).sum()
        if axis == self.ndim - 1:
            return self.left * self.reached(self.right)
        if axis == self.ndim - 2:
            return self.right * self.reached(self.left)
        left, right = (p.sum(0) if p.ndim > 1 else p for p in (self.left, self.right))
        return replace(self, left=left, right=right)

    def mean(self, axis: int) -> Outer:
        """Over chunks, the first axis."""
        whole: Outer = self.sum(axis)
        return replace(whole, left=whole.left / len(self))

    def any(self) -> bool:
        return bool(self.sum())

    def round(self, decimals: int = 0, out: None = None) -> Outer:
        """Of entries that are those of the sender alone, or of the receiver alone."""
        if (self.right == 1).all():
            return replace(self, left=np.round(self.left))
        assert (self.left == 1).all(), "the entries of a row, or of a column, are all alike"
        return replace(self, right=np.round(self.right))

    def astype(self, dtype: Any) -> Outer:
        return replace(self, left=self.left.astype(dtype), right=self.right.astype(dtype))

    def setflags(self, write: bool) -> None:
        """Nobody writes to it."""

    # -- what it is made of

    def reached(self, numbers: np.ndarray, *places: np.ndarray) -> np.ndarray:
        """For each rank, the sum of the numbers [.., ranks] of all ranks that it exchanges with.

        places: each the place of every rank [ranks]; then only ranks in the same places count."""
        grouped = sums(cells(*places, self.groups), numbers)
        if self.same:
            return np.asarray(grouped - numbers)
        whole = sums(cells(*places), numbers) if places else numbers.sum(-1, keepdims=True)
        return np.asarray(whole - grouped)

    def within(self, place: np.ndarray) -> float:
        """The sum of all entries of ranks whose place [ranks] is the same."""
        return float((self.left * self.reached(self.right, place)).sum())

    @property
    def is_even(self) -> bool:
        """Whether everyone sends as much to everyone."""
        alone = self.groups.size < 2
        alike = all((part == part[..., :1]).all() for part in (self.left, self.right))
        everyone = self.same and bool((self.groups == self.groups[0]).all())
        return alone or not self.any() or (alike and everyone)

    @property
    def equal_pairs(self) -> list[EqualPairs]:
        """Entries that are not 0, by their value: a few, for ranks are mostly alike."""
        return [
            EqualPairs(a * b, self.left == a, self.right == b)
            for a in np.unique(self.left).tolist()
            for b in np.unique(self.right).tolist()
            if a * b
        ]


Pairs = np.ndarray | Outer  # of ranks: numbers from row to column


def cells(*places: np.ndarray) -> np.ndarray:
    """A number for each rank, the same for ranks that are alike in all these places [ranks].

    >>> cells(np.array([0, 0, 1, 1]), np.array([7, 8, 7, 7])).tolist()
    [0, 1, 2, 2]
    """
    cell = places[0]
    for place in places[1:]:
        cell = np.unique(cell * (place.max() + 1) + place, return_inverse=True)[1]
    return cell


def sums(cell: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """For each rank the sum of the numbers [.., ranks] in its cell."""
    flat = numbers.reshape(-1, cell.size)
    each = [np.bincount(cell, one)[cell] for one in flat]
    return np.reshape(each, numbers.shape).astype(numbers.dtype)
