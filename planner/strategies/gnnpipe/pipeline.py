"""Knobs and structure of a pipeline: each rank's layers, and its work on a chunk.

    rank = stage * g + member      g ranks form a stage; member i owns sub-chunk i of every chunk
    piece                          layers that a stage does on a chunk without an exchange between
                                   them: all its layers if g = 1, else one layer (0: the encoder)

gnnpipe.py explains the strategy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import accumulate, pairwise
from operator import add
from typing import ClassVar

import numpy as np

from gnnplan.planner.gnn.model import Model
from gnnplan.planner.ownership.layout import ChunkCounts
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies.base import Example, Strategy, settled
from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.planner.vocabulary.numbers import RankMatrix
from gnnplan.planner.vocabulary.schedule import Compute

LOSSY = ("shuffle", "historical_gradients", "period", "bits")  # knobs that change the gradient
MOST_CHUNKS = 100_000
# limit of chunks times pairs of a stage's members; a candidate with more is slow to predict
MOST_PAIRS = 2**20


def chunk_order(seed: int, step: int, chunks: int, shuffle: bool) -> list[int]:
    """Return the order in which all stages process the chunks in a step."""
    return (
        np.random.default_rng([seed, step]).permutation(chunks).tolist()
        if shuffle
        else list(range(chunks))
    )


@dataclass(frozen=True)
class Pipeline(Strategy):
    """The knobs of GNNPipe, and the work of each stage.

    stages: number of stages, each of ranks / stages ranks; None: as many as the layers allow.
    chunks: number of chunks; None: 4 x stages.
    shuffle: draw a new order of chunks in every epoch.
    historical_gradients: add the previous epoch's gradients at historical rows.
    period: epochs between updates of the history (the paper's alpha); 1: every epoch.
    layers_per_stage: number of layers of each stage; None: divided by cost.
    checkpoint: keep a layer's inputs and gathered rows only, and recompute the rest in the
        backward pass; aggregation is not repeated.
    bits: 8, 4 or 2 bits per number of a row sent to the next stage; None: rows are not quantized.
    """

    stages: int | None = None
    chunks: int | None = None
    shuffle: bool = True
    historical_gradients: bool = False
    period: int = 23
    layers_per_stage: tuple[int, ...] | None = None
    checkpoint: bool = False
    bits: int | str | None = None

    family: ClassVar[str] = "gnnpipe"
    rounds_rows: ClassVar[bool] = True
    executor: ClassVar[str] = "gnnplan.executor.strategies.gnnpipe"
    examples: ClassVar[tuple[Example, ...]] = (
        Example("gnnpipe(stages=2,chunks=1)"),
        Example("gnnpipe(stages=2,chunks=3)"),
        Example("gnnpipe(stages=2,chunks=3,bits=4)"),
    )
    # pipelines: 0.05; members of hybrids contend for ports, and drift apart if they have few rows
    claim: ClassVar[float] = 0.20

    @property
    def exact(self) -> bool:
        return self.chunks == 1 and not self.codec.packs

    @property
    def carries(self) -> str:
        return "" if self.chunks == 1 else "historical rows"

    def approximates_as(self, other: Strategy) -> bool:
        return isinstance(other, Pipeline) and all(
            getattr(self, knob) == getattr(other, knob) for knob in LOSSY
        )

    @classmethod
    def candidates(cls, problem: Problem) -> Iterator[Strategy]:
        for stages in range(min(problem.ranks, problem.workload.layers), 1, -1):
            members, rest = divmod(problem.ranks, stages)
            if not rest:
                for chunks in dict.fromkeys((4 * stages, 4 * problem.ranks, 1)):
                    if chunks * members**2 <= MOST_PAIRS:
                        yield cls(stages, chunks)

    @classmethod
    def absent(cls, problem: Problem) -> str:
        if problem.ranks == 1:
            return "one rank: a pipeline needs at least two stages"
        return (
            "a pipeline needs two stages or more, each with a layer and equally many ranks "
            f"(layers: {problem.workload.layers}, ranks: {problem.ranks})"
        )

    def check(self, problem: Problem) -> None:
        self.check_mode(problem)
        self.codec.check(self.name, problem.workload.precision, adapts=False)
        stages, chunks = settled(self.stages), settled(self.chunks)
        per_stage = self.layers_per_stage
        layers, vertices = problem.workload.layers, problem.stats.vertices
        if stages < 1 or chunks < 1:
            raise SpecError(
                f"gnnpipe: stages and chunks are at least 1 (stages: {stages}, chunks:"
                f" {chunks}); leave them out"
            )
        if stages > layers:
            raise SpecError(
                f"gnnpipe needs a layer per stage (layers: {layers}, stages: {stages}); use"
                f" stages <= {layers}"
            )
        if problem.ranks % stages:
            fit = ", ".join(
                str(s) for s in range(1, min(problem.ranks, layers) + 1) if problem.ranks % s == 0
            )
            raise SpecError(
                f"gnnpipe gives every stage equally many ranks (stages: {stages}, ranks:"
                f" {problem.ranks}); use stages in {{{fit}}} or --ranks"
                f" {stages * max(1, problem.ranks // stages)}"
            )
        if chunks > MOST_CHUNKS:
            raise SpecError(
                f"gnnpipe: at most {MOST_CHUNKS:,} chunks are planned (chunks: {chunks:,});"
                " use fewer, as 4 per rank"
            )
        if chunks > vertices:
            raise SpecError(
                f"gnnpipe needs a vertex per chunk (vertices: {vertices}, chunks: {chunks});"
                " use fewer chunks"
            )
        if problem.ranks > vertices * stages:
            raise SpecError(
                f"gnnpipe needs a vertex per rank of a stage (vertices: {vertices}, ranks of a"
                f" stage: {problem.ranks // stages}); use --ranks"
                f" {vertices * stages} or less"
            )
        if per_stage is not None and (
            len(per_stage) != stages or min(per_stage) < 1 or sum(per_stage) != layers
        ):
            raise SpecError(
                f"gnnpipe: layers_per_stage gives each of {stages} stages a layer or more,"
                f" {layers} in all, not {per_stage}; leave it out to have them balanced by cost"
            )
        if per_stage is not None and (tied := _tied_across(problem, per_stage)):
            raise SpecError(
                f"gnnpipe: a stage trains the parameters of its own layers, and layers {tied[0]}"
                f" and {tied[1]} have some in common (layers_per_stage: {per_stage}); use"
                " stages=1, a layers_per_stage that keeps them in one stage, or graph_parallel"
            )
        if problem.model.norm == "batch":
            raise SpecError(
                "gnnpipe: a chunk does not have the rows of other chunks, so batch norm has no"
                " moments of all vertices; use norm=layer, or graph_parallel"
            )
        if self.historical_gradients and not problem.model.prepares_linearly:
            raise SpecError(
                "gnnpipe: historical_gradients would pass through a norm or ReLU at rows that no"
                " longer exist; use historical_gradients=False, or a model without norm"
            )
        if self.period < 1:
            raise SpecError(
                "gnnpipe: period (alpha) is at least 1 (1: the history is the last epoch's), not"
                f" {self.period}; use 1 or the paper's 23"
            )

    # -- stages and pieces ---------------------------------------------------------------------

    def members(self, problem: Problem) -> int:
        """Return g, the number of ranks of a stage."""
        return problem.ranks // settled(self.stages)

    def group(self, problem: Problem, stage: int) -> range:
        """Return the ranks of a stage."""
        g = self.members(problem)
        return range(stage * g, stage * g + g)

    def groups(self, problem: Problem) -> list[range]:
        """Return the ranks of each communicator: a stage, or sender and receiver of chunks."""
        g = self.members(problem)
        pairs = [range(rank, rank + g + 1, g) for rank in range(problem.ranks - g)]
        return [self.group(problem, stage) for stage in range(settled(self.stages))] + pairs

    def facts(self, problem: Problem) -> ChunkCounts:
        return problem.chunks(settled(self.chunks), self.members(problem))

    def shape(self, problem: Problem) -> tuple[Model, list[range]]:
        """Return the model, and each stage's layers (1-based).

        Layers aggregate before they multiply wherever the model allows, so that a row that several
        chunks read is multiplied once.
        """
        ends = accumulate([1, *settled(self.layers_per_stage)])
        return problem.model.aggregating_first, [range(a, b) for a, b in pairwise(ends)]

    def pieces(self, problem: Problem, stage: int) -> list[tuple[int, ...]]:
        """Return a stage's pieces: tuples of layers without an exchange inside; 0: the encoder."""
        model, stages = self.shape(problem)
        layers = ((0,) if model.encoder and stage == 0 else ()) + tuple(stages[stage])
        return [layers] if self.members(problem) == 1 else [(layer,) for layer in layers]

    def exchanged(self, problem: Problem, piece: tuple[int, ...]) -> int:
        """Return the width of rows exchanged before a piece (backward: after it), or 0."""
        model = problem.model.aggregating_first
        if self.members(problem) == 1 or piece[0] <= model.first_varying:
            return 0
        return model.input_width(piece[0])

    # -- work and bytes ------------------------------------------------------------------------

    def kind_of(self, problem: Problem, piece: tuple[int, ...]) -> object:
        """Return a key that is equal for pieces with equal work."""
        model = problem.model.aggregating_first
        return (
            piece[0] in (0, 1),
            len(model.layers) in piece,
            len(piece),
            tuple(model.layers[layer - 1] for layer in piece if layer),
        )

    def work(
        self, problem: Problem, piece: tuple[int, ...], facts: ChunkCounts
    ) -> tuple[Compute, Compute]:
        """Return forward and backward work of a piece; arrays over sub-chunks [chunks * g]."""
        rows, model = _floats(facts.rows), problem.model.aggregating_first
        # gives the sums the shape [chunks * g] even if no part computes anything
        parts = [(Compute(flops=0.0 * rows, itemsize=model.itemsize),) * 2]
        parts += [model.encode(rows)] if 0 in piece else []
        parts += [self._layer_work(problem, layer, facts) for layer in piece if layer]
        parts += [model.finish(rows)] if len(model.layers) in piece else []
        forward, backward = (reduce(add, works) for works in zip(*parts, strict=True))
        return forward, backward

    def _layer_work(
        self, problem: Problem, layer: int, facts: ChunkCounts
    ) -> tuple[Compute, Compute]:
        """Return forward and backward work of one layer."""
        rows, edges, sources = _floats(facts.rows), _floats(facts.edges), _floats(facts.sources)
        model = problem.model.aggregating_first
        b, spec, width = model.itemsize, model.layers[layer - 1], model.input_width(layer)
        varies = layer > model.first_varying
        projected = sources if spec.projects_first else rows
        forward = model.forward(layer, rows, projected, edges, read=sources)
        backward = model.backward(layer, rows, projected, edges, read=sources)
        if self.checkpoint and varies and layer < len(model.layers):
            recomputed = forward
            keeps_gathered = spec.gathers_linearly and not spec.projects_first
            backward = backward + (
                replace(recomputed, gathers=()) if keeps_gathered else recomputed
            )
        if not (model.aggregate_cached(layer) or model.rows(layer).multiplied_first):
            # gather the rows that the chunk reads from all rows that the member keeps
            forward = forward + Compute(
                random_rows=((sources, width),),
                elementwise_bytes=sources * width * b,
                launches=1,
                itemsize=b,
            )
        if varies:
            # scatter-add the gradients of the rows read to the rows that the member keeps
            scattered = sources - rows
            backward = backward + Compute(
                random_rows=((2.0 * scattered, width),),
                elementwise_bytes=(3.0 * rows + scattered) * width * b,
                launches=3,
                itemsize=b,
            )
        return forward, backward

    def boundary(self, problem: Problem, stage: int) -> int:
        """Return the width of the rows that `stage` sends to the next stage."""
        model, stages = self.shape(problem)
        return model.input_width(stages[stage + 1].start) + model.carried

    def weights(self, problem: Problem, stage: int) -> int:
        """Return the number of parameters of a stage."""
        model, stages = self.shape(problem)
        return model.weights_of(stages[stage])

    def inputs_sent(self, problem: Problem) -> RankMatrix:
        """Return the bytes of constant inputs that the first stage's members exchange [g, g]."""
        read: RankMatrix = self.facts(problem).sends.sum(0)
        if problem.model.first_varying == 0 or not read.any():
            nothing: RankMatrix = 0 * read
            return nothing
        if problem.graph is None:
            return (read * problem.model.feature_transit_bytes(1)).round().astype(np.int64)
        cut, members = problem.cut(settled(self.chunks), len(read)), range(len(read))
        received = [  # by each member, from each member
            np.bincount(cut.sub[halo] % len(read), problem.features_bytes(halo), len(read))
            for halo in map(cut.halo, members)
        ]
        return np.stack(received, 1)

    def kept(self, problem: Problem) -> list[int]:
        """Return the number of rows that each member keeps: own rows, and remote rows it reads."""
        facts = self.facts(problem)
        rows: list[int] = (facts.rows.sum(0) + facts.sends.sum(1).sum(0)).tolist()
        return rows

    def role(self, problem: Problem, rank: int) -> dict[str, int]:
        return {"stage": rank // self.members(problem)}


def _floats(counts: np.ndarray) -> np.ndarray:
    """Return counts [chunks, g] as floats [chunks * g]."""
    return counts.astype(float).ravel()


def _tied_across(problem: Problem, per_stage: Sequence[int]) -> tuple[int, int] | None:
    """Return two layers of a user's module that share parameters but not a stage, or None."""
    module = problem.workload.module
    stages = [stage for stage, layers in enumerate(per_stage) for _ in range(layers)]
    for number, layer in enumerate(module.layers if module else (), 1):
        if layer.shares and stages[layer.shares - 1] != stages[number - 1]:
            return layer.shares, number
    return None
