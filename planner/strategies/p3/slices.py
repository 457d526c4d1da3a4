"""P3's knobs: the feature columns of each rank, and the groups that sum partial rows.

    4 servers x 2 ranks, copies 2     columns 0 .. F/2      columns F/2 .. F
                                      server 0: ranks 0, 1  server 1: ranks 2, 3
                                      server 2: ranks 4, 5  server 3: ranks 6, 7
                                      rails (0, 2), (1, 3), (4, 6), (5, 7)
                                      twins (0, 1, 4, 5), (2, 3, 6, 7)

A rail is a group of peers that have all columns among them, and that send partial sums to each
other. Twins are ranks of different rails with the same columns. p3.py explains the strategy.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import numpy as np

from gnnplan.planner.gnn.kinds import KINDS
from gnnplan.planner.gnn.model import Model, layers_of
from gnnplan.planner.graph.graph import Graph
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies.base import Bytes, Example, Strategy
from gnnplan.planner.strategies.minibatch.adjacency_store import Lists, check_structure, hashed
from gnnplan.planner.strategies.minibatch.feature_store import (
    Features,
    Slice,
    check_store,
    feature_store,
)
from gnnplan.planner.strategies.minibatch.memory import all_rows_bytes
from gnnplan.planner.strategies.minibatch.on_batches import OnBatches
from gnnplan.planner.strategies.minibatch.proposals import (
    lists_cache,
    proposed_cache,
    with_enough_samplers,
    with_one_sampler,
)
from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.planner.vocabulary.numbers import sums
from gnnplan.planner.vocabulary.units import show_bytes

OVER = ("server", "rank")
# models whose first layer is a sum over feature columns (except for attention's softmax)
MODELS = [name for name, kind in KINDS.items() if kind.by_columns]
HIDDEN = (16, 32, 64, 128, 256, 512)  # widths as in P3's Fig. 15
DELAY = 3  # number of updates by which a pipelined batch's weights lag
HEADER = 3  # numbers before a pushed block: the numbers of sources, destinations and edges
INT = 4  # bytes of a pushed number


def columns(features: int, slices: int, i: int) -> range:
    """Return the columns of slice i, if `features` columns are divided into `slices` slices.

    >>> [columns(10, 3, i) for i in range(3)]
    [range(0, 3), range(3, 6), range(6, 10)]
    """
    return range(features * i // slices, features * (i + 1) // slices)


@dataclass(frozen=True)
class Slices(OnBatches):
    """The knobs of P3, and the columns, peers and twins of each rank.

    over: divide columns over each 'server' or each 'rank'; None: servers if there are several.
    pipelined: three batches in flight, on weights three updates old.
    prefetch: as in data parallelism, but loads stay in their step.
    structure, structure_cache: as in data parallelism; a list is at a server, or at a rank.
    copies: number of copies of all columns.
    cache: bytes of the hottest rows, in its columns, that each GPU caches.
    """

    over: str | None = None
    pipelined: bool = False
    prefetch: int = 0
    structure: str = "everywhere"
    structure_cache: Bytes = 0
    copies: int = 1
    cache: Bytes = 0

    family: ClassVar[str] = "p3"
    pushes: ClassVar[bool] = True
    executor: ClassVar[str] = "gnnplan.executor.strategies.p3"
    examples: ClassVar[tuple[Example, ...]] = (Example("p3"),)
    claim: ClassVar[float] = 0.10  # pipelined: transfers of several batches contend

    @property
    def exact(self) -> bool:
        return not self.pipelined

    @property
    def in_flight(self) -> int:
        """The number of batches between their load and the end of their backward pass."""
        return DELAY if self.pipelined else 1

    @property
    def carries(self) -> str:
        return "batches under way" if self.pipelined else ""

    @property
    def hands_over(self) -> bool:
        return not self.pipelined  # the gradients of batches in flight would be lost

    def approximates_as(self, other: Strategy) -> bool:
        return isinstance(other, Slices) and self.pipelined == other.pipelined

    @classmethod
    def candidates(cls, problem: Problem) -> Iterator[Strategy]:
        if problem.ranks > 1 and not _why_whole(problem):
            variants = (cls(copies=c, pipelined=p) for c in _copies(problem) for p in (True, False))
            for plain in dict.fromkeys(with_one_sampler(problem, variant) for variant in variants):
                cache = proposed_cache(problem, plain)
                for cached in [plain, replace(plain, cache=cache)] if cache else [plain]:
                    ahead = with_enough_samplers(problem, cached)
                    # if more samplers need fewer copies, that is another variant of this loop
                    yield ahead if ahead.copies == cached.copies else cached

    @classmethod
    def absent(cls, problem: Problem) -> str:
        if problem.ranks == 1:
            return "one rank: columns are divided over several ranks"
        return _why_whole(problem)

    @classmethod
    def explain(cls, problem: Problem, fastest: Self | None) -> list[str]:
        return _break_even(problem)

    def settle(self, problem: Problem) -> Self:
        return (
            self
            if self.over
            else replace(self, over="server" if len(set(problem.servers)) > 1 else "rank")
        )

    def check(self, problem: Problem) -> None:
        super().check(problem)
        if self.over not in OVER:
            raise SpecError(
                "p3: over is 'server' (its ranks share its columns) or 'rank' (each has its own),"
                f" not {self.over!r}"
            )
        if why := _why_whole(problem):
            raise SpecError(f"p3: {why}")
        check_structure(self.name, problem, self.structure, self.structure_cache)
        check_store(self.name, problem, self.cache)
        lines = _lines(problem.servers, self.over)
        holders = len(lines[0])
        if any(len(line) != holders for line in lines):
            raise SpecError(
                "p3: a rank has a peer on every server, so servers have equally many ranks; use"
                " over='rank', or as many GPUs of each server"
            )
        if holders == 1:
            raise SpecError(
                f"p3 divides columns over several {self.over}s (servers:"
                f" {len(set(problem.servers))}, ranks: {problem.ranks}, over: {self.over}); use"
                f" {'data_parallel' if problem.ranks == 1 else 'over=' + repr('rank')}"
            )
        if self.copies < 1 or holders % self.copies:
            fit = [c for c in range(1, holders + 1) if holders % c == 0]
            raise SpecError(
                f"p3: each copy of the columns is over equally many {self.over}s (copies:"
                f" {self.copies}, {self.over}s: {holders}); use one of {', '.join(map(str, fit))}"
            )
        if problem.stats.features < (slices := holders // self.copies):
            raise SpecError(
                "p3 needs a feature column for each slice (features:"
                f" {problem.stats.features}, slices: {slices}); use fewer {self.over}s, or more"
                " copies"
            )

    # -- columns, peers and twins --------------------------------------------------------------

    def rails(self, problem: Problem) -> list[tuple[int, ...]]:
        """Return the groups of peers: each has one rank per slice, in the order of slices.

        Peers are neighbours. Ranks fill servers in order, so with over='rank' and one copy per
        server, peers are in the same server.
        """
        lines = _lines(problem.servers, self.over)
        slices = len(lines[0]) // self.copies
        starts = range(0, len(lines[0]), slices)
        return [line[start : start + slices] for line in lines for start in starts]

    def rail_of(self, problem: Problem) -> np.ndarray:
        """Return the number of each rank's rail [ranks]."""
        numbers = {rank: i for i, rail in enumerate(self.rails(problem)) for rank in rail}
        return np.array([numbers[rank] for rank in range(problem.ranks)])

    def peer_sums(self, problem: Problem, *counts: np.ndarray) -> np.ndarray:
        """Return sums of counts over each rank's peers, with the rank itself [counts, ranks]."""
        return sums(self.rail_of(problem), np.array(counts, dtype=float))

    def slices(self, problem: Problem) -> tuple[Slice, ...]:
        """Return the peers of each rank, with the rank itself, and its feature columns [ranks]."""
        by_rank = {
            rank: Slice(rail, columns(problem.stats.features, len(rail), i))
            for rail in self.rails(problem)
            for i, rank in enumerate(rail)
        }
        return tuple(by_rank[rank] for rank in range(len(by_rank)))

    def rail(self, problem: Problem, rank: int) -> tuple[int, ...]:
        """Return the peers of a rank, with the rank itself."""
        return self.slices(problem)[rank].ranks

    def columns(self, problem: Problem, rank: int) -> range:
        """Return the feature columns of a rank."""
        return self.slices(problem)[rank].columns

    def all_twins(self, problem: Problem) -> list[tuple[int, ...]]:
        """Return the groups of ranks with the same columns, in the order of their first ranks."""
        return sorted(tuple(sorted(twins)) for twins in zip(*self.rails(problem), strict=True))

    def twins(self, problem: Problem, rank: int) -> tuple[int, ...]:
        """Return the ranks with the same columns as `rank`, with `rank` itself."""
        return next(twins for twins in self.all_twins(problem) if rank in twins)

    def sliced(self, problem: Problem, rank: int) -> Model:
        """Return the model of a rank, whose first layer reads the rank's columns only."""
        share = len(self.columns(problem, rank))
        inputs = problem.model.inputs.of_columns(share)
        layers = tuple(layers_of(problem.workload, inputs, problem.model.classes))
        return replace(problem.model, layers=layers, inputs=inputs)

    def features_on_host(self, problem: Problem) -> np.ndarray:
        columns_at: dict[int, set[range]] = {}
        for server, of_rank in zip(problem.servers, self.slices(problem), strict=True):
            columns_at.setdefault(server, set()).add(of_rank.columns)
        sizes = {each: all_columns(problem, each) for each in set().union(*columns_at.values())}
        return np.array([sum(sizes[c] for c in each) for each in columns_at.values()])

    def more_spread(self, problem: Problem) -> Iterator[Self]:
        """Yield variants with less graph data per server: lists are spread first, then fewer
        copies of the columns."""
        if len(set(problem.servers)) > 1:
            for copies in range(self.copies, 0, -1):
                if self.copies % copies == 0:
                    fewer = replace(self, copies=copies)
                    if fewer != self:
                        yield fewer
                    spread = replace(fewer, structure="spread", structure_cache=0)
                    yield replace(spread, structure_cache=lists_cache(problem, spread))

    def lists(self, problem: Problem) -> Lists | None:
        by_rank, batches = self.over == "rank", self.batches(problem)
        return hashed(problem, batches, self.structure, by_rank, self.structure_cache)

    def store(self, problem: Problem) -> Features:
        slices = self.slices(problem)
        return feature_store(problem, self.batches(problem), self.cache, slices=slices)

    def sliced_weights(self, problem: Problem) -> int:
        """Return how many of the first layer's weights are divided with the columns."""
        first = problem.model.layers[0]
        if first.counted:
            return first.counted.by_column * first.h_in
        return first.matrices * first.h_in * first.h_out

    def tied(self, problem: Problem) -> tuple[int, ...]:
        return problem.servers if self.over == "server" else ()


def all_columns(problem: Problem, columns: range) -> int:
    """Return the bytes of these columns of all vertices' features."""
    return all_rows_bytes(problem, lambda ids: problem.features_bytes(ids, columns))


def _copies(problem: Problem) -> list[int]:
    """Return the numbers of copies to propose: 1, and more if host memory may have room.

    Each copy is divided over equally many servers. As many copies as servers are not proposed,
    since P3 would be data parallelism.
    """
    servers = len(set(problem.servers))
    most = servers if problem.cluster.graph_memory < np.inf else 2
    return [c for c in range(1, max(most, 2)) if servers % c == 0]


def _why_whole(problem: Problem) -> str:
    """Return why layer 1 is no sum over feature columns; '' if it is."""
    model = problem.workload.model
    if problem.workload.norm == "batch":
        return (
            "layer 1 must be a sum over feature columns, and between batches under way no rank has"
            " batch norm's moments (norm: batch); use norm=layer, or data_parallel or gsplit"
        )
    first = problem.workload.module.layers[0] if problem.workload.module else None
    if model in MODELS or (first and first.half):
        return ""
    if problem.workload.is_cut:
        return (
            f"layer 1 must be a sum over feature columns, and {problem.workload.called} is run as"
            " it is written, on whole rows; use data_parallel or gsplit, which run any layer"
        )
    if problem.workload.module and model == "own":
        return (
            f"layer 1 must be a sum over feature columns, and {problem.workload.module.name} does"
            " not say how its is; give it by_columns, scatter, transform and apply"
            " (docs/how-to/bring-your-model.md), or use data_parallel or gsplit, which run any"
            " layer"
        )
    return (
        f"layer 1 must be a sum over feature columns, and that of {model}"
        f" {KINDS[model].lacks_columns}: it has no scatter, transform and apply of its own; use one"
        f" of {', '.join(MODELS)}, or data_parallel or gsplit, which run any layer"
    )


def _lines(servers: tuple[int, ...], over: str | None) -> list[tuple[int, ...]]:
    """Return groups of possible peers: ranks at the same position of every server, or all."""
    if over == "rank":
        return [tuple(range(len(servers)))]
    by_server: dict[int, list[int]] = {}
    for rank, server in enumerate(servers):
        by_server.setdefault(server, []).append(rank)
    most = max(map(len, by_server.values()))
    return [
        tuple(sorted(ranks[place] for ranks in by_server.values() if place < len(ranks)))
        for place in range(most)
    ]


def _break_even(problem: Problem) -> list[str]:
    """Return a note on the width up to which P3 sends fewer bytes than fetching features does.

    It is computed from the mean batch, as in P3's Fig. 15, and does not affect the plan. Empty on
    one rank, and if only statistics are known."""
    slices = len(set(problem.servers)) if len(set(problem.servers)) > 1 else problem.ranks
    if slices == 1 or not isinstance(problem.graph, Graph):
        return []
    batches = problem.minibatches(tuple(range(problem.ranks))).first()
    rows, inputs = np.mean(
        [(batch.facts(1).rows.sum(), batch.facts(1).sources.sum()) for batch in batches], axis=0
    ).tolist()
    itemsize = problem.model.itemsize
    # numbers per row that is sent
    width = max(1, round(float(problem.model.feature_transit_bytes(1.0)) / itemsize))
    even = inputs * width / (2 * slices * rows)
    fetched = (1 - 1 / slices) * inputs * width * itemsize
    sent = {hidden: 2 * (slices - 1) * rows * hidden * itemsize for hidden in HIDDEN}
    table = ", ".join(f"{hidden}: {show_bytes(nbytes)}" for hidden, nbytes in sent.items())
    # the option that sets the width of layer 1's rows
    name = "hidden" if problem.model.layers[0].h_out == problem.workload.hidden else "classes"
    return [
        f"P3 stops paying at {name} {even:.0f} (feature rows of {width} numbers; {rows:,.0f} rows"
        f" of layer 1, {inputs:,.0f} inputs a batch, columns on {slices}): by {name}, partial sums"
        f" take {table} per batch; features spread so would fetch {show_bytes(fetched)}"
    ]
