"""Rows that cross between parts in few bits per number, written plainly: what a reader gets, and
what the owner gets of the reader's gradient.

Nothing of the executor's packing is used but the hash, which is part of the specification: 16 bits
of a function of (stream, seed, step, layer, way, vertex, column)."""

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gnnplan.executor.layers.kernels import GOLDEN, mix
from gnnplan.executor.layers.kernels.hashed_dropout import vertex_keys
from gnnplan.planner.graph.sampling import ROUNDING
from gnnplan.testing.plain import Plain

Round = Callable[[Tensor], Tensor]


def uniform(rows: Tensor, seed: int, step: int, layer: int, direction: str) -> Tensor:
    """Of every number of all N rows, in [0, 1)."""
    words = (rows.shape[1] + 3) // 4
    keys = vertex_keys(torch.arange(len(rows)), ROUNDING, seed, step, layer, "fb".index(direction))
    bits = mix(keys[:, None] + torch.arange(1, words + 1) * GOLDEN).view(torch.int16)
    return (bits[:, : rows.shape[1]].double() + 2**15 + 0.5) / 2**16


def coarser(x: np.ndarray, up: bool) -> np.ndarray:
    """The nearest number below (or above) that has 8 digits, as bfloat16 has."""
    power = 2.0 ** np.floor(np.log2(np.where(x == 0, 1.0, np.abs(x))) - 7)
    return (np.ceil if up else np.floor)(x / power) * power


def levels(rows: Tensor, bits: int | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Lowest number and spacing of the rows [N, H], both [N, 1]; bits: of all or of each [N, 1]."""
    x = rows.detach().numpy()
    lowest = coarser(x.min(1, keepdims=True), up=False)
    gap = (x.max(1, keepdims=True) - lowest) / (2**bits - 1)
    down, up = coarser(gap, up=False), coarser(gap, up=True)
    nearest = np.where(gap - down < up - gap, down, up)
    above = coarser(nearest * (1 + 2.0**-20), up=True)
    above[gap == 0] = 2.0**-126  # a row of equal numbers
    return lowest, above


def rounded(rows: Tensor, bits: int | np.ndarray, u: Tensor) -> Tensor:
    """What arrives of the rows [N, H]."""
    x, (lowest, above) = rows.detach().numpy(), levels(rows, bits)
    return torch.from_numpy(lowest + np.floor((x - lowest) / above + u.numpy()) * above)


class Whole:
    """What a reader gets of rows that cross, and their owner of the reader's gradient: all of it."""

    def over(self, rows: Tensor, step: int, layer: int, direction: str, reader: int) -> Tensor:
        return rows.detach()

    def crossed(self, rows: Tensor, step: int, layer: int, reader: int = 0) -> Tensor:
        """The rows as a reader has them; every reader asks for its own."""

        def over(direction: str) -> Round:
            return lambda x: self.over(x, step, layer, direction, reader)

        return Crossing.apply(rows, over("f"), over("b"))  # type: ignore[no-untyped-call]


class Uniform(Whole):
    """So many bits of every number."""

    def __init__(self, bits: int, seed: int) -> None:
        self.bits, self.seed = bits, seed

    def over(self, rows: Tensor, step: int, layer: int, direction: str, reader: int) -> Tensor:
        u = uniform(rows, self.seed, step, layer, direction)
        return rounded(rows, self.chosen(rows, layer, direction, reader), u)

    def chosen(self, rows: Tensor, layer: int, direction: str, reader: int) -> int | np.ndarray:
        return self.bits


class Adapting(Uniform):
    """Bits of every row, by reader, layer and way: 4 in the first exchange; then, anew every ten,
    those that keep the rounding of what crosses between two parts least in as many bytes."""

    def __init__(self, plain: Plain, part: np.ndarray) -> None:
        super().__init__(4, plain.workload.seed)
        operator = plain.operator.numpy() != 0
        parts = range(part.max() + 1)
        # the rows that cross between two parts
        self.cross = {
            to: [
                np.flatnonzero((part == of) & operator[part == to].any(0))
                for of in parts
                if of != to
            ]
            for to in parts
        }
        self.of_rows: dict[tuple[int, int, str], np.ndarray] = {}
        self.exchanges: dict[tuple[int, int, str], int] = {}
        # of the variance of a row that a part reads: squares of what it is multiplied by
        squares = plain.operator.numpy() ** 2
        self.weights = {r: squares[part == r].sum(0).astype(np.float32) for r in parts}

    def chosen(self, rows: Tensor, layer: int, direction: str, reader: int) -> np.ndarray:
        key = reader, layer, direction
        bits = self.of_rows.setdefault(key, np.full((len(rows), 1), 4))
        count = self.exchanges[key] = self.exchanges.get(key, 0) + 1
        if count % 10 == 1:
            ranges = (levels(rows, bits)[1] * (2.0**bits - 1))[:, 0]
            if direction == "f":
                ranges = ranges * self.weights[reader].astype(float) ** 0.5
            self.of_rows[key] = np.full((len(rows), 1), 4)
            for ids in self.cross[reader]:
                self.of_rows[key][ids, 0] = cheapest(ranges[ids])
        return bits


def cheapest(ranges: np.ndarray) -> np.ndarray:
    """Bits [n] with the least sum of (range / (2^bits - 1))^2 among those where the widest have 8,
    twice as many narrowest 2 and the others 4."""
    order, n = np.argsort(-ranges, kind="stable"), len(ranges)
    options = []
    for rise in range(n // 3 + 1):
        bits = np.full(n, 4)
        bits[order[:rise]], bits[order[n - 2 * rise :]] = 8, 2
        options.append(bits)
    exact = [Fraction(value) ** 2 for value in ranges.tolist()]  # floats would lose small ones

    def variance(bits: np.ndarray) -> Fraction:
        return sum(square / (2**b - 1) ** 2 for square, b in zip(exact, bits.tolist(), strict=True))

    return min(options, key=variance)


class Crossing(torch.autograd.Function):
    """Rows of all owners to one reader, and the gradient back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, forth: Round, back: Round) -> Tensor:
        ctx.back = back
        return forth(rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(gradient), None, None


def by_reader(operator: Tensor, part: np.ndarray) -> Tensor:
    """The operator [N, N] as [N, (1 + parts) N]: own rows, those that part 0 reads, part 1, ..."""
    same = torch.from_numpy(part[:, None] == part[None, :])
    readers = [torch.from_numpy(part == reader)[:, None] for reader in range(part.max() + 1)]
    return torch.cat([operator * same, *(operator * ~same * reads for reads in readers)], 1)
