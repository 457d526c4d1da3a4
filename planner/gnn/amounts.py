"""Amounts (of work or memory) that are linear in a block's counts.

A block is the bipartite graph that a layer reads: R rows (destinations), S sources and E edges,
which include self edges if the layer has them. An amount is a sum of counts times factors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gnnplan.planner.vocabulary.numbers import Number

Block = Mapping[str, Number]  # name -> count of a block


def block_of(
    rows: Number,
    sources: Number,
    edges: Number,
    *,
    local: Number = 0.0,
    read: Number | None = None,
    away: Number = 0.0,
) -> Block:
    """Return the counts of a block by name.

    local: sources that this rank prepares. read: sources that the gather reads, if other ranks
    prepared some of them; default: all. away: destinations whose own row another rank has."""
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
    """Return torch's workspace on a GPU for the sum over `rows` rows of `width` numbers [B].

    Thread blocks share the rows. Each block writes its partial sums to the workspace, and the last
    block adds them up. A thread adds at least 16 rows, and at most 256 if there are many rows. The
    formulas are those of setReduceConfig in torch's aten/src/ATen/native/cuda/Reduce.cuh, with the
    threads of an H100. For 20,000 rows of 256 numbers an H200 allocated 41.03 MB.
    """
    vector = next(size for size in (4, 2, 1) if width % size == 0)  # columns per thread
    columns, threads = width // vector, 512 // vector
    across = min(32, 1 << columns.bit_length() - 1)
    each = np.ceil(rows / (threads // across))  # rows per thread if there were a single block
    fill = np.ceil(132 * (2048 // threads) / np.ceil(columns / across))  # blocks that fill the GPU
    blocks = np.maximum(np.minimum(fill, np.ceil(each / 16)), np.ceil(each / 256))
    return np.where(each < 256, 0.0, blocks * width * across * vector * itemsize)


class Term(NamedTuple):
    """A count of a block, a bounded count, or the workspace of a sum over counted rows."""

    name: str  # of a count (`block_of`)
    most: float = np.inf  # upper bound: an operation goes block by block
    summed: int = 0  # numbers per row, if the term is the workspace of their sum [B] (`summing`)
    itemsize: int = 0  # bytes per summed number [B]

    def on(self, block: Block) -> Number:
        """Return the term's value on a block."""
        count = block[self.name]
        if self.summed:
            return summing(count, self.summed, self.itemsize)
        return count if self.most == np.inf else np.minimum(count, self.most)


class Amount:
    """A sum of terms, each times a factor."""

    __array_ufunc__ = None  # makes numpy numbers defer + and * to this class

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
        """Return the amount with every count bounded by `most`."""
        return Amount({term._replace(most=most): factor for term, factor in self.terms.items()})

    def sum_workspace(self, width: int, itemsize: int) -> Amount:
        """Return the workspace for the sum over these rows, of `width` numbers (`summing`) [B]."""
        return Amount({term._replace(summed=width, itemsize=itemsize): 1.0 for term in self.terms})


class Amounts:
    """Several amounts, evaluated on a block in one matrix product.

    >>> Amounts((4 * ROWS + 3, 2 * EDGES)).on(block_of(10.0, 20.0, 100.0))
    array([ 43., 200.])
    """

    def __init__(self, amounts: Sequence[Amount]) -> None:
        self.terms = list(dict.fromkeys(term for amount in amounts for term in amount.terms))
        factors = [[amount.terms.get(term, 0.0) for term in self.terms] for amount in amounts]
        self.factors = np.array(factors).reshape(len(amounts), len(self.terms))

    def on(self, block: Block) -> NDArray[np.float64]:
        """Return the value of each amount on a block [amounts, ..]."""
        counts = [term.on(block) for term in self.terms]
        shape = np.broadcast_shapes(*map(np.shape, counts))
        table = np.empty((len(counts), *shape))
        for row, count in zip(table if shape else table[:, None], counts, strict=True):
            row[...] = count
        values: NDArray[np.float64] = self.factors @ table.reshape(len(counts), math.prod(shape))
        return values.reshape(len(self.factors), *shape)


NOTHING = Amount({})
ROWS, SOURCES, EDGES, LOCAL, READ, OWN = (
    Amount({Term(name): 1.0}) for name in ("rows", "sources", "edges", "local", "read", "own")
)
