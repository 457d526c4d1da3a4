"""Amounts that are linear in a block's counts.

A block has R rows (destinations), S sources and E edges, self edges among them where a layer has
these. What a layer works and holds is a sum of such counts, each times a factor."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gnnplan.planner.vocabulary.numbers import Number

Block = Mapping[str, Number]  # the counts of a block by name


def block_of(
    rows: Number,
    sources: Number,
    edges: Number,
    *,
    local: Number = 0.0,
    read: Number | None = None,
    away: Number = 0.0,
) -> Block:
    """local: sources that are prepared here; read: those that are gathered from, if others prepared
    some of them; away: destinations whose own row is with another rank."""
    return {
        "rows": rows,
        "sources": sources,
        "edges": edges,
        "local": local,
        "read": sources if read is None else read,
        "own": rows - away,
        "one": 1.0,
    }


def summing(rows: Number, width: int, itemsize: int) -> Number:
    """Room that torch takes on a GPU while it adds up rows of so many numbers [B].

    Blocks of threads share the rows, and leave their sums there for the last of them: each thread
    adds at least 16 rows, and at most 256 where rows are plenty. It is setReduceConfig of torch's
    aten/src/ATen/native/cuda/Reduce.cuh, with the threads of an H100. Of 20,000 rows of 256 numbers
    an H200 took 41.03 MB.
    """
    together = next(many for many in (4, 2, 1) if width % many == 0)  # columns of a thread
    columns, threads = width // together, 512 // together
    across = min(32, 1 << columns.bit_length() - 1)
    each = np.ceil(rows / (threads // across))  # rows of a thread, were there one block of them
    fill = np.ceil(132 * (2048 // threads) / np.ceil(columns / across))  # blocks that fill the GPU
    blocks = np.maximum(np.minimum(fill, np.ceil(each / 16)), np.ceil(each / 256))
    return np.where(each < 256, 0.0, blocks * width * across * together * itemsize)


class Term(NamedTuple):
    """A count of a block."""

    of: str
    most: float = np.inf  # so many of them at a time
    summed: int = 0  # numbers per row, if the room is meant that their sum takes [B]
    itemsize: int = 0  # [B] of these

    def on(self, block: Block) -> Number:
        count = block[self.of]
        if self.summed:
            return summing(count, self.summed, self.itemsize)
        return count if self.most == np.inf else np.minimum(count, self.most)


class Amount:
    """A sum of terms, each times a factor."""

    __array_ufunc__ = None  # numpy's numbers leave sums and products to it

    def __init__(self, terms: Mapping[Term, float]) -> None:
        self.terms = {term: factor for term, factor in terms.items() if factor}

    @staticmethod
    def of(number: Amount | float) -> Amount:
        return number if isinstance(number, Amount) else Amount({Term("one"): number})

    def __add__(self, other: Amount | float) -> Amount:
        terms = dict(self.terms)
        for term, factor in Amount.of(other).terms.items():
            terms[term] = terms.get(term, 0.0) + factor
        return Amount(terms)

    def __mul__(self, factor: float) -> Amount:
        return Amount({term: factor * own for term, own in self.terms.items()})

    def __sub__(self, other: Amount | float) -> Amount:
        return self + -1.0 * Amount.of(other)

    def __rsub__(self, other: float) -> Amount:
        return Amount.of(other) - self

    __radd__, __rmul__ = __add__, __mul__

    def at_most(self, most: float) -> Amount:
        """So many at a time."""
        return Amount({term._replace(most=most): factor for term, factor in self.terms.items()})

    def room_of_sum(self, width: int, itemsize: int) -> Amount:
        """Room of the sum of these rows (`summing`) [B]."""
        return Amount({term._replace(summed=width, itemsize=itemsize): 1.0 for term in self.terms})


@dataclass(frozen=True, eq=False)
class Amounts:
    """Several amounts, which are told of a block together.

    >>> Amounts((4 * ROWS + 3, 2 * EDGES)).on(block_of(10.0, 20.0, 100.0))
    array([ 43., 200.])
    """

    each: tuple[Amount, ...]

    @cached_property
    def _factors(self) -> tuple[tuple[Term, ...], NDArray[np.float64]]:
        """The terms, and their factors [amounts, terms]."""
        terms = tuple(dict.fromkeys(term for amount in self.each for term in amount.terms))
        factors = [[amount.terms.get(term, 0.0) for term in terms] for amount in self.each]
        return terms, np.array(factors).reshape(len(self.each), len(terms))

    def on(self, block: Block) -> NDArray[np.float64]:
        """[amounts, ..]"""
        terms, factors = self._factors
        counts = [term.on(block) for term in terms]
        shape = np.broadcast_shapes(*map(np.shape, counts))
        table = np.empty((len(terms), *shape))
        for row, count in zip(table if shape else table[:, None], counts, strict=True):
            row[...] = count
        told = factors @ table.reshape(len(terms), math.prod(shape))
        return told.reshape(len(self.each), *shape)


NOTHING = Amount({})
ROWS, SOURCES, EDGES, LOCAL, READ, OWN = (
    Amount({Term(of): 1.0}) for of in ("rows", "sources", "edges", "local", "read", "own")
)
