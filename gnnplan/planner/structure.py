"""The structure: where a vertex's adjacency list is, independently of where its features are.

    everywhere   with every rank's sampler
    spread       data parallel, P3: at home on server v mod S, of one server on rank v mod M. Ids say nothing about edges: a hash as any
                 GSplit: with the vertex's owner, who alone samples it
    cached       with every server besides: of the lists that are at home elsewhere those read most for their bytes (P3 Table 5)

Whoever has a list draws the same neighbours from it (planner/sampling.py), so a sampler asks those who have what it lacks for their draws:

    host |ask_edges L|draw L|edges L| .. |ask_edges 1|draw 1|edges 1|lay|       ids there (8 bytes each, and per rank for how many),
                                                                                 neighbours back (4 bytes each)

Degrees [N] stay with everyone: layers' weights need them, and with them an answer needs no counts. Cached lists are read where a server
reads its own: nothing is sent for them before the first step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from gnnplan.planner.errors import SpecError
from gnnplan.planner.expected import EstimatedBatches
from gnnplan.planner.files import suggest
from gnnplan.planner.graph import Graph, GraphStats
from gnnplan.planner.job import Job
from gnnplan.planner.minibatch import Batches, MiniBatch
from gnnplan.planner.sampling import Ids, taken
from gnnplan.planner.specs import Workload
from gnnplan.planner.store import PLACES, heat, that_fit

NEIGHBOUR = 4  # [B] of a vertex in a list, and of a neighbour that was drawn
ENTRY = 8  # [B] of where a list is


@dataclass(frozen=True, eq=False)
class Structure:
    """`places`: of each rank, numbered: its server, or what else has lists of its own. `home`: the place [N] of a vertex's list. `kept`:
    the lists that are at a place, its own and cached ones [places, N]. `asks`: samplers may need others' lists."""

    places: tuple[int, ...]
    home: NDArray[np.int32]
    kept: NDArray[np.bool_]
    asks: bool

    def keeps(self, rank: int) -> NDArray[np.bool_]:
        """Lists that a rank's sampler has [N]."""
        return np.asarray(self.kept[self.places[rank]])

    def provider(self, rank: int, ids: Ids) -> NDArray[np.int32]:
        """The rank [R] that draws for these vertices: itself, or one of their home's, which share such work by id."""
        out = np.full(ids.size, rank, np.int32)
        away = np.flatnonzero(~self.keeps(rank)[ids])
        home, turn = self.home[ids[away]], ids[away] // len(self.kept)  # the remainder says the home
        for place in range(len(self.kept)):
            there, ranks = home == place, np.flatnonzero(np.equal(self.places, place))
            out[away[there]] = ranks[turn[there] % ranks.size]
        return out

    def draws(self, graph: Graph, rows: Sequence[Ids], fanout: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Ids that i asks of j, and edges that j draws for i, its own included [ranks, ranks], of the vertices [R] that each rank samples
        for a layer."""
        m = len(self.places)
        asked, drawn = np.zeros((2, m, m), np.int64)
        for rank, ids in enumerate(rows):
            provider = self.provider(rank, ids)
            asked[rank] = np.bincount(provider, minlength=m)
            drawn[rank] = np.bincount(provider, weights=taken(graph.indptr[ids + 1] - graph.indptr[ids], fanout), minlength=m)
        np.fill_diagonal(asked, 0)
        return asked, drawn

    def of(self, batch: MiniBatch, layer: int, fanout: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """`draws` for a layer of a batch."""
        return self.draws(batch.graph, [batch.rows(rank, layer) for rank in range(batch.ranks)], fanout)

    def copied(self, graph: Graph) -> NDArray[np.int64]:
        """Bytes of what each rank's sampler has in place of the whole structure [ranks]: its lists, where all are, and degrees."""
        n, lists = graph.stats.vertices, np.array([int(graph.degree[kept].sum()) for kept in self.kept])
        return np.asarray(NEIGHBOUR * lists + ENTRY * (n + 1) + ENTRY * (1 + graph.stats.directed) * n)[list(self.places)]


@dataclass(frozen=True, eq=False)
class EstimatedStructure:
    """The same of a graph known by statistics: lists are spread evenly, and so are those that a place has `cached` (a share of others')."""

    places: tuple[int, ...]
    cached: float
    asks: bool

    def of(self, batch: MiniBatch, layer: int, fanout: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        same = np.equal.outer(self.places, self.places)
        facts, away = batch.facts(layer), (1 - self.cached) * (1 - 1 / len(set(self.places)))
        to = np.where(same, 0.0, away / np.maximum((~same).sum(1, keepdims=True), 1))
        asked, drawn = (np.rint(to * count[:, None]).astype(np.int64) for count in (facts.rows, facts.edges))
        return asked, drawn + np.diag(facts.edges - drawn.sum(1))

    def copied(self, stats: GraphStats) -> NDArray[np.int64]:
        n, share = stats.vertices, (1 + self.cached * (len(set(self.places)) - 1)) / len(set(self.places))
        each = round(NEIGHBOUR * stats.edges * share) + ENTRY * (n + 1) + ENTRY * (1 + stats.directed) * n
        return np.full(len(self.places), each)


def list_bytes(graph: Graph, ids: Ids) -> NDArray[np.int64]:
    """What each of these vertices' lists takes in a cache [R]."""
    return np.asarray(NEIGHBOUR * (graph.indptr[ids + 1] - graph.indptr[ids]) + ENTRY)


def worth_keeping(graph: Graph, workload: Workload, hot: str, groups: int) -> Ids:
    """All vertices [N], first those whose lists are read most often for the bytes that they take: a hub's list is read often, but costs
    as much as thousands."""
    return np.argsort(-heat(graph, workload, hot, groups) / list_bytes(graph, np.arange(graph.stats.vertices)), kind="stable")


def thinned(graph: Graph, keep: NDArray[np.bool_]) -> Graph:
    """The graph with the lists of these vertices [N] only; the others' are empty."""
    degree = np.where(keep, graph.degree, 0)
    return replace(graph, indptr=np.concatenate([[0], np.cumsum(degree)]), indices=graph.indices[np.repeat(keep, graph.degree)])


def hashed(job: Job, batches: Batches, structure: str, by_rank: bool, cache: int = 0, hot: str = "frequency"
           ) -> Structure | EstimatedStructure | None:  # fmt: skip
    """A structure spread over servers, or ranks, by hash, each place caching so many bytes of others' lists. None where every sampler has
    all. Made once."""
    places = tuple(range(job.ranks)) if by_rank else tuple(np.unique(job.servers, return_inverse=True)[1].tolist())
    count = max(places) + 1
    if structure == "everywhere" or count == 1:
        return None
    key, known = (places, cache, hot), _known.setdefault(batches, {})
    if key not in known and isinstance(batches, EstimatedBatches):
        others = (NEIGHBOUR * job.stats.edges + ENTRY * job.stats.vertices) * (count - 1) / count
        known[key] = EstimatedStructure(places, min(cache / others, 1.0), asks=True)
    if key not in known:
        graph = batches.graph
        home = (np.arange(graph.stats.vertices) % count).astype(np.int32)
        kept = home == np.arange(count)[:, None]
        order = worth_keeping(graph, batches.workload, hot, job.ranks) if cache else home[:0]
        for place in range(count):
            others = order[home[order] != place]
            kept[place, that_fit(others, list_bytes(graph, others), cache)] = True
        known[key] = Structure(places, home, kept, asks=True)
    return known[key]


_known: WeakKeyDictionary[Batches, dict[object, Structure | EstimatedStructure]] = WeakKeyDictionary()


def owned(batches: Batches, structure: str) -> Structure | EstimatedStructure | None:
    """A structure spread over those who own a vertex in their group. None where every sampler has all."""
    groups = batches.groups
    if isinstance(batches, EstimatedBatches):
        places = tuple(groups[:rank].count(group) for rank, group in enumerate(groups))
        return EstimatedStructure(places, 0.0, asks=False) if structure == "spread" and max(places) else None
    member = batches.member
    if structure == "everywhere" or member is None:
        return None
    places = tuple(groups[:rank].count(group) for rank, group in enumerate(groups))
    return Structure(places, member.astype(np.int32), member == np.arange(max(places) + 1)[:, None], asks=False)


def check_structure(name: str, job: Job, structure: str, cache: int = 0) -> None:
    """Raises SpecError where a strategy's knobs make no structure."""
    if structure not in PLACES:
        raise SpecError(f"{name}: structure says who has adjacency lists, and {structure!r} is unknown{suggest(structure, PLACES)}")
    if cache < 0:
        raise SpecError(f"{name}: structure_cache is a number of bytes per server, 0 or more, not {cache:,}; use 0 for no cache")
    if cache and structure == "everywhere":
        raise SpecError(f"{name}: where every sampler has the whole structure there is nothing to cache of it (structure_cache: {cache:,}, "
                        "structure: everywhere); use structure='spread', or structure_cache=0")  # fmt: skip
