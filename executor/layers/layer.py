"""The interface between strategies and layers, and the base class of all layers.

A layer is split into four methods, so that a strategy can exchange rows between them:

    prepare   row-wise, on the layer's inputs: dropout, for instance
    project   row-wise: a matrix product before `gather`, and before the exchange if that makes the
              exchanged rows narrower (built-in layers only)
    gather    over the edges of a Block: reduces the rows of neighbours
    update    row-wise, on destinations: the rest of the layer

A layer with these four methods runs under every strategy, with two exceptions. P3 and snp also call
the methods of `ColumnLayer`, in layer 1. snp, feature_parallel and tensor3d take built-in layers
only.

Shapes: R destination rows, S source rows, H_in and H_out values per row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from gnnplan.executor.layers.kernels import Block, aggregate, dropout
from gnnplan.planner.graph.graph import CsrEdges

EDGES = ("gcn", "mean", "one", "loop")


@dataclass(frozen=True)
class Drop:
    """Dropout of rows [S, H_in] in one step.

    A vertex has the same mask on every rank: a hash of (seed, epoch, layer, vertex, column)."""

    p: float = 0.0
    seed: int = 0
    epoch: int | Tensor = 0
    layer: int = 0  # the layer whose inputs are dropped (0: encoder, L + 1: decoder)
    vertices: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))  # ids [S]
    first: int = 0  # the model's column that is column 0 of the rows (ranks may hold some columns)
    training: bool = True

    def __call__(self, rows: Tensor) -> Tensor:
        numbers = self.seed, self.epoch, self.layer, self.vertices, self.p, self.first
        return dropout(rows, *numbers)


no_dropout = Drop(training=False)  # drops nothing


class Layer(nn.Module):
    """A GNN layer. A subclass sets `edges`, defines parameters, and implements `update`.

    edges           the edges and weights of its Block: 'gcn' (symmetric norm, self edges), 'mean',
                    'one' (weight 1) or 'loop' (weight 1, self edges)
    projects_first  whether `project` is called before `gather`
    linear          whether `gather` is a weighted sum, whose gradient does not depend on the rows
    reads_whole     whether its blocks refer to the whole graph, as those of a user's module do
    by_columns      names of parameters [., H_in] of which P3 gives every rank some columns
    """

    edges: str
    projects_first: bool = False
    linear: bool = True
    reads_whole: bool = False
    by_columns: tuple[str, ...] = ()

    def prepare(self, x: Tensor, drop: Drop, moments: Tensor | None = None) -> Tensor:
        """Return the rows [S, H_in] that `project` and `gather` read; row-wise.

        moments [2, H_in]: the batch's mean and variance, for built-in layers with batch norm.
        """
        return drop(x)

    def possible(self, x: Tensor) -> Tensor:
        """Return x [S, H_in] mapped to numbers that the layer accepts as inputs."""
        return x

    def project(self, rows: Tensor) -> Tensor:
        """Multiply prepared rows [S, H_in] -> [S, width]; called only if `projects_first`."""
        raise NotImplementedError

    def gather(self, block: Block, rows: Tensor) -> Tensor:
        """Reduce prepared (and maybe projected) rows [S, width] over edges -> [R, width]."""
        return aggregate(block, rows)

    def gather_with_own(self, block: Block, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return `gather` of prepared rows [S, H_in], and the destinations' rows [R, H_in]."""
        return self.gather(block, self.gathers(rows)), block.own_rows(rows)

    def update(
        self, gathered: Tensor, rows: Tensor, x: Tensor, x0: Tensor | None, relu: bool
    ) -> Tensor:
        """Compute the layer's outputs from gathered [R, width] -> [R, H_out]; row-wise.

        rows [R, H_in]: the destinations' prepared rows. x [R, H_in]: their inputs. x0: their
        initial rows (GCNII). relu: end in ReLU.
        """
        raise NotImplementedError

    def finish(self, h: Tensor, drop: Drop, moments: Tensor | None = None) -> Tensor:
        """Return logits [R, C] from the last layer's outputs; row-wise."""
        return h

    def gathers(self, rows: Tensor) -> Tensor:
        """Return the rows that `gather` reads: projected ones if `projects_first`."""
        return self.project(rows) if self.projects_first else rows

    def on(self, indptr: np.ndarray, indices: np.ndarray) -> CsrEdges:
        """Return a graph with these edges, and placeholders for the fields that the layer reads."""
        return CsrEdges(indptr, indices)

    def open(self, block: Block) -> int:
        """Compute what depends on the edges of a block only; return the bytes that stay [B]."""
        return 0

    def during(self, drop: Drop) -> Layer:
        """Return the layer for one step: dropout in a user's module draws from `drop`."""
        return self

    def forward(
        self,
        block: Block,
        x: Tensor,
        drop: Drop = no_dropout,
        x0: Tensor | None = None,
        relu: bool = False,
        moments: Tensor | None = None,
    ) -> Tensor:
        """Compute x [S, H_in] -> [R, H_out]; the first R sources are the destinations."""
        rows = self.prepare(x, drop) if moments is None else self.prepare(x, drop, moments)
        gathered, own = self.gather_with_own(block, rows)
        return self.update(gathered, own, block.own_rows(x), x0, relu)


class ColumnLayer(Protocol):
    """The methods of a layer whose sums distribute over the columns of its input (P3).

    Sums of gcn, sage and sgc distribute over input rows too; snp calls the same methods.

    A rank builds the layer for its columns: H_in is their number, and `by_columns` names the
    parameters that are cut with them. The methods have the names of the P3 paper:

    partition   planner/strategies/minibatch/p3.py: assigns columns to ranks
    scatter     returns the row that each source sends along its edges
    gather      sums these rows over a block's edges, as in Layer
    transform   turns the sums into a partial sum of the output. If edges are assigned to ranks by
                their sources, a rank has own rows of the first destinations only, and adds nothing
                to the other destinations for their own rows
    sync        executor/strategies/p3.py: sums the partial sums of all columns, for `apply`; and
                inside `scatter`, if edges need more than a sum (attention)
    apply       computes the rest from the full sum; it hides torch's Module.apply, which is unused
    """

    def scatter(self, block: Block, x: Tensor, sync: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the rows [S, width] that sources send, from x [S, H_in]."""

    def gather(self, block: Block, rows: Tensor) -> Tensor:
        """Sum rows [S, width] over edges -> [R, width]."""

    def transform(self, gathered: Tensor, own: Tensor) -> Tensor:
        """Return partial sums [R, H_out] from sums [R, width] and own rows [., H_in]."""

    def apply(self, summed: Tensor, relu: bool) -> Tensor:
        """Return h_1 from the full sums [R, H_out]."""


def partial_sums(
    layer: ColumnLayer, block: Block, rows: Tensor, sync: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return the partial sums [R, H_out] for `apply`, from prepared rows [S, H_in]."""
    gathered = layer.gather(block, layer.scatter(block, rows, sync))
    return layer.transform(gathered, rows[: block.own])
