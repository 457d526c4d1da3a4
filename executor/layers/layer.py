"""What a strategy needs of a layer, and the base class of layers that are written against it.

A layer is split where ranks may have to talk to each other:

    prepare   row-wise: what is done to the layer's inputs, dropout for instance
    project   row-wise: a product, before `gather`; before the exchange where that narrows the rows
              (layers of ours alone)
    gather    over the edges of a Block
    update    row-wise, on destinations: the rest

A layer with these four methods runs under every strategy but P3, which asks for those of
`ColumnLayer` in layer 1. So does snp, which takes layers of ours alone, as do feature_parallel and
tensor3d.

Shapes: R destination rows, S source rows, H_in and H_out values per row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from gnnplan.executor.layers.kernels import (
    Block,
    aggregate,
    dropout,
)
from gnnplan.planner.graph.graph import Whole

EDGES = ("gcn", "mean", "one", "loop")


@dataclass(frozen=True)
class Drop:
    """Dropout of rows [S, H_in] of some vertices in one step.

    A vertex has the same mask on any rank: a hash of (seed, epoch, layer, vertex, column)."""

    p: float = 0.0
    seed: int = 0
    epoch: int | Tensor = 0
    layer: int = 0  # before which rows are dropped (0: encoder, L + 1: decoder)
    vertices: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))  # [S]
    first: int = 0  # column of the model's row that they begin with
    training: bool = True

    def __call__(self, rows: Tensor) -> Tensor:
        numbers = self.seed, self.epoch, self.layer, self.vertices, self.p, self.first
        return dropout(rows, *numbers)


keep = Drop(training=False)  # drops nothing


class Layer(nn.Module):
    """A GNN layer. A subclass says `edges`, has parameters, and computes in `update`.

    edges           those of its Block: 'gcn' (symmetric norm, self edges), 'mean', 'one' (weight 1)
                    or 'loop' (weight 1, self edges)
    projects_first  whether `project` comes before `gather`
    linear          whether `gather` is a weighted sum, whose gradient needs no rows
    reads_whole     whether its blocks know the whole graph, as those of a user's module
    by_columns      names of parameters [., H_in], of which P3 gives every rank some columns
    """

    edges: str
    projects_first: bool = False
    linear: bool = True
    reads_whole: bool = False
    by_columns: tuple[str, ...] = ()

    def prepare(self, x: Tensor, drop: Drop, moments: Tensor | None = None) -> Tensor:
        """Row-wise [S, H_in] -> [S, H_in], before anything is read from neighbours.

        moments [2, H_in]: of batch norm (models.BatchNorm), which layers of ours may have.
        """
        return drop(x)

    def possible(self, x: Tensor) -> Tensor:
        """Of any numbers [S, H_in] such that the layer may be given."""
        return x

    def project(self, rows: Tensor) -> Tensor:
        """Row-wise, prepared [S, H_in] -> [S, width]; called only if projects_first."""
        raise NotImplementedError

    def gather(self, block: Block, rows: Tensor) -> Tensor:
        """Prepared, and perhaps projected, rows [S, width] -> [R, width]."""
        return aggregate(block, rows)

    def gather_beside(self, block: Block, rows: Tensor) -> tuple[Tensor, Tensor]:
        """`gather` of prepared rows [S, H_in], and those of the destinations [R, H_in]."""
        return self.gather(block, self.gathers(rows)), block.own_rows(rows)

    def update(
        self, gathered: Tensor, rows: Tensor, x: Tensor, x0: Tensor | None, relu: bool
    ) -> Tensor:
        """Row-wise, on destinations: gathered [R, width] -> [R, H_out], with ReLU if asked.

        rows [R, H_in] are the destinations' prepared rows, x [R, H_in] their inputs, x0 their
        initial rows (GCNII).
        """
        raise NotImplementedError

    def gathers(self, rows: Tensor) -> Tensor:
        """What `gather` reads of prepared rows."""
        if self.projects_first:
            return self.project(rows)
        return rows

    def on(self, indptr: np.ndarray, indices: np.ndarray) -> Whole:
        """A graph of these edges, with some numbers for the fields that the layer reads."""
        return Whole(indptr, indices)

    def open(self, block: Block) -> int:
        """Make what the layer reads of a block's edges alone; bytes that stay."""
        return 0

    def during(self, drop: Drop) -> Layer:
        """The layer in one step. A user's module, which drops anywhere, draws as `drop` says."""
        return self

    def forward(
        self,
        block: Block,
        x: Tensor,
        drop: Drop = keep,
        x0: Tensor | None = None,
        relu: bool = False,
        moments: Tensor | None = None,
    ) -> Tensor:
        """x [S, H_in] -> [R, H_out]; the first R sources are the destinations."""
        rows = self.prepare(x, drop) if moments is None else self.prepare(x, drop, moments)
        gathered, own = self.gather_beside(block, rows)
        return self.update(gathered, own, block.own_rows(x), x0, relu)


class ColumnLayer(Protocol):
    """P3's calls: a layer whose sums distribute over the columns of its input.

    Sums of gcn, sage and sgc distribute over its rows too, and snp makes them by the same calls.

    Such a layer is made for the columns that a rank has; H_in is their number, and `by_columns`
    names the parameters that are cut with them. The names of the calls are those of the P3 paper:

    partition   planner/strategies/p3/p3.py: which rank has which columns
    scatter     what each source row sends along its edges
    gather      summed over a block's edges, as in Layer
    transform   made a partial sum of the output. Where edges are shared out by their sources, only
                the first destinations may have their own rows here: the others' add nothing
    sync        executor/strategies/p3/: sums the partial sums of all columns, for `apply`; and
                inside `scatter`, where edges need more than a sum (attention)
    apply       what follows, on the whole sum; not torch's Module.apply, which nothing here calls
    """

    def scatter(self, block: Block, x: Tensor, sync: Callable[[Tensor], Tensor]) -> Tensor:
        """Tensor x [S, H_in] -> [S, width]."""

    def gather(self, block: Block, rows: Tensor) -> Tensor:
        """[S, width] -> [R, width]."""

    def transform(self, gathered: Tensor, own: Tensor) -> Tensor:
        """[R, width] and the first destinations' rows [., H_in] -> partial sums [R, H_out]."""

    def apply(self, summed: Tensor, relu: bool) -> Tensor:
        """[R, H_out] -> h_1."""


def partial_sums(
    layer: ColumnLayer, block: Block, rows: Tensor, sync: Callable[[Tensor], Tensor]
) -> Tensor:
    """A layer's sums over a block's edges [R, H_out], for `apply`; rows [S, H_in] are prepared."""
    gathered = layer.gather(block, layer.scatter(block, rows, sync))
    return layer.transform(gathered, rows[: block.own])
