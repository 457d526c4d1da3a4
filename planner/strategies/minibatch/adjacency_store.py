"""The adjacency store (`structure`): which samplers have which vertices' adjacency lists.

    everywhere   every rank's sampler has all lists
    spread       data parallelism, P3: vertex v's list is on server v mod S, or, with one server,
                 on rank v mod M (a hash of the id, independent of edges)
                 GSplit: the vertex's owner, the only rank that samples the vertex, has the list
    cached       a server also has the lists of other servers with the most reads per byte
                 (P3, Table 5)

Features are placed independently (feature_store.py). All samplers draw the same neighbours from the
same list (planner/graph/sampling.py). So a sampler asks the ranks that have a list to draw from it:

    host |ask_edges L|draw L|edges L| .. |ask_edges 1|draw 1|edges 1|lay|

    ask_edges    ids to the ranks that have the lists: 8 bytes each, and 8 per rank for the number
    edges        drawn neighbours back: 4 bytes each

Every rank has the degrees [N]: layers' weights need them, and they tell how many neighbours an
answer has. For lists in a server's own cache nothing is sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from gnnplan.planner.graph.graph import Graph
from gnnplan.planner.graph.sampling import Ids, taken
from gnnplan.planner.ownership.estimated import EstimatedBatches
from gnnplan.planner.ownership.minibatch import Batches, MiniBatch, places_in
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies.minibatch.feature_store import fitting_prefix, heat, provider_of
from gnnplan.planner.vocabulary.numbers import Bools, Ints, Outer, PerRank, offsets

NEIGHBOUR = 4  # bytes of a neighbour's id, in a list or in an answer
ENTRY = 8  # bytes of a list's offset, or of its length


@dataclass(frozen=True, eq=False)
class Structure:
    """The places of adjacency lists, for a graph with known edges. A place is a server or a rank.

    places: the number of each rank's place [ranks].
    home: the place of each vertex's list [N].
    kept: whether a place has a list, as its home or in its cache [places, N].
    lengths: number of edges in each list [N].
    """

    places: PerRank
    home: NDArray[np.int32]
    kept: Bools
    lengths: NDArray[Any]

    def keeps(self, rank: int) -> Bools:
        """Return whether a rank's sampler has each list [N]."""
        return np.asarray(self.kept[self.places[rank]])

    def provider(self, rank: int, ids: Ids) -> NDArray[np.int32]:
        """Return the rank that draws neighbours of each vertex for the sampler of `rank` [R].

        That is `rank` itself if it has the list, else one of the ranks at the list's home.
        """
        # id mod places is the home of a spread list, so the quotient selects one of its ranks
        home = np.where(self.keeps(rank)[ids], self.places[rank], self.home[ids])
        return provider_of(self.places, rank, home, ids // len(self.kept))

    def of(self, batch: MiniBatch, layer: int, fanout: int) -> tuple[Ints, Ints, Ints]:
        """Return counts for a layer of a batch: ids that rank i sends to rank j, edges that rank i
        draws for j [ranks, ranks], and all edges that each rank draws [ranks]."""
        m = len(self.places)
        asked, drawn = np.zeros((2, m, m), np.int64)
        for rank in range(m):
            ids = batch.rows(rank, layer)
            provider, edges = self.provider(rank, ids), taken(batch.graph.degree_of(ids), fanout)
            asked[rank] = np.bincount(provider, minlength=m)
            drawn[rank] = np.bincount(provider, weights=edges, minlength=m)
        others = ~np.eye(m, dtype=bool)
        return asked * others, drawn.T * others, drawn.sum(0)

    def edges_at(self, ranks: Sequence[int]) -> float:
        """Return the number of edges in the lists that at least one of these ranks has."""
        return int(self.lengths[self.kept[[self.places[rank] for rank in ranks]].any(0)].sum())


@dataclass(frozen=True, eq=False)
class EstimatedStructure:
    """The places of adjacency lists, spread evenly, for a graph known by statistics.

    places: as in `Structure`.
    cached: the share of other places' lists that a place caches.
    edges: number of edges in all lists.
    """

    places: PerRank
    cached: float
    edges: int

    @property
    def _places(self) -> int:
        """The number of places."""
        return len(set(self.places))

    def of(self, batch: MiniBatch, layer: int, fanout: int) -> tuple[Outer, Outer, Ints]:
        """Return the counts of `Structure.of`."""
        facts, remote = batch.facts(layer), (1 - self.cached) * (1 - 1 / self._places)
        others = Outer.of(self.places, False, 1).sum(1)  # ranks at other places [ranks]
        share = np.where(others > 0, remote / np.maximum(others, 1), 0.0)  # for each of them
        asked, drawn = (
            Outer.of(self.places, False, np.rint(share * count).astype(np.int64))
            for count in (facts.rows, facts.edges)
        )
        return asked, drawn.T, facts.edges - drawn.sum(1) + drawn.sum(0)

    def edges_at(self, ranks: Sequence[int]) -> float:
        """Return the number of `Structure.edges_at`."""
        own = len({self.places[rank] for rank in ranks}) / self._places
        return self.edges * (own + self.cached * (1 - own))


Lists = Structure | EstimatedStructure


def bytes_at(problem: Problem, lists: Lists | None, ranks: Sequence[int]) -> float:
    """Return the bytes of one copy of these ranks' lists, of all offsets and of all degrees.

    lists: None if every rank has all lists."""
    stats = problem.stats
    edges = stats.edges if lists is None else lists.edges_at(ranks)
    offsets_and_degrees = stats.vertices + 1 + (1 + stats.directed) * stats.vertices
    return lists_bytes(edges, offsets_and_degrees)


Count = TypeVar("Count", float, Ints)


def lists_bytes(edges: Count, entries: int = 1) -> Count:
    """Return the bytes of lists of `edges` edges in all, and of `entries` offsets or degrees."""
    return NEIGHBOUR * edges + ENTRY * entries


def thinned(graph: Graph, keep: Bools) -> Graph:
    """Return the graph with the lists of the vertices in `keep` [N]; all other lists are empty."""
    degree, fields = np.where(keep, graph.degree, 0), {}
    if graph.edge_fields:
        kept = np.repeat(keep, graph.degree)
        fields = {name: field[kept] for name, field in graph.edge_fields.items()}
    indptr = offsets(degree)
    return graph.with_edges(indptr, graph.neighbours(np.flatnonzero(keep)), fields)


def hashed(
    problem: Problem,
    batches: Batches,
    structure: str,
    by_rank: bool,
    cache: int,
    hot: str,
) -> Lists | None:
    """Return lists spread by hash over ranks (`by_rank`) or servers; results are cached.

    cache: bytes of other places' lists that each place caches. hot: as the knob `hot`. None: every
    sampler has all lists.
    """
    places = (
        tuple(range(problem.ranks))
        if by_rank
        else tuple(np.unique(problem.servers, return_inverse=True)[1].tolist())
    )
    count = max(places) + 1
    if structure == "everywhere" or count == 1:
        return None

    def estimated() -> Lists:
        edges = problem.stats.edges
        others = lists_bytes(edges, problem.stats.vertices) * (count - 1) / count
        return EstimatedStructure(places, min(cache / others, 1.0), edges)

    def counted() -> Lists:
        graph = batches.graph
        home = (np.arange(graph.stats.vertices) % count).astype(np.int32)
        kept = home == np.arange(count)[:, None]
        if cache:
            # A hub's list is read often, but takes as many bytes as thousands of other lists.
            reads = heat(graph, batches.workload, hot, problem.ranks)
            sizes = lists_bytes(graph.degree)
            order = np.argsort(-reads / sizes, kind="stable")  # by reads per byte, the most first
            for place in range(count):
                others = order[home[order] != place]
                kept[place, fitting_prefix(others, sizes[others], cache)] = True
        return Structure(places, home, kept, graph.degree)

    make = estimated if isinstance(batches, EstimatedBatches) else counted
    return problem.cache.get(("adjacency store", batches, places, cache, hot), make)


def owned(batches: Batches, structure: str) -> Lists | None:
    """Return lists spread over the owners of vertices in each group (GSplit).

    None: every sampler has all lists.
    """
    if structure == "everywhere" or not batches.splits:
        return None
    places = tuple(places_in(batches.groups))
    if isinstance(batches, EstimatedBatches):
        return EstimatedStructure(places, 0.0, batches.stats.edges)
    kept = batches.member == np.arange(max(places) + 1)[:, None]
    return Structure(places, batches.member, kept, batches.graph.degree)
