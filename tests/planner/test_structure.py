"""A structure that is spread: every list is somewhere, samplers ask there and nowhere else, and
each byte of it is counted."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import test_batchwise as batchwise

from gnnplan.planner.graph.sampling import frontier, seeds_of
from gnnplan.planner.ownership.minibatch import shares
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies import P3, DataParallel, GSplit
from gnnplan.planner.strategies.minibatch.adjacency_store import Structure, thinned
from gnnplan.planner.strategies.minibatch.feature_store import frequency

GRAPH = batchwise.GRAPHS[0]


def problem_of(servers: int = 2, gpus: int = 2, kind: str = "cuda", **workload: Any) -> Problem:
    asked = {"batch": 32, "model": "sage", **workload}
    made = batchwise.problem_of(GRAPH, servers, gpus, **asked)
    device = made.cluster.device.model_copy(update={"kind": kind})
    return replace(made, cluster=made.cluster.model_copy(update={"device": device}))


def spread(strategy: DataParallel | P3 | GSplit, problem: Problem) -> Structure:
    lists = strategy.lists(problem)
    return lists


CASES = [
    (DataParallel(structure="spread"), 2, 2),
    (DataParallel(structure="spread"), 1, 3),
    (P3("server", structure="spread"), 3, 2),
    (P3("rank", structure="spread"), 2, 2),
    (DataParallel(structure="spread", structure_cache=3000), 2, 2),
    (DataParallel(structure="spread", structure_cache=1000, hot="degree"), 3, 1),
    (P3("rank", structure="spread", structure_cache=500), 1, 2),
]


@pytest.mark.parametrize(("strategy", "servers", "gpus"), CASES, ids=str)
def test_every_list_is_at_home_and_cached_where_it_is_hot(strategy, servers, gpus):
    problem = problem_of(servers, gpus)
    lists, everyone = spread(strategy, problem), np.arange(400)
    by_rank = strategy.over == "rank" if isinstance(strategy, P3) else servers == 1
    places = range(problem.ranks) if by_rank else problem.servers
    assert lists.places == tuple(places)
    hot = getattr(strategy, "hot", "frequency")
    read = (
        frequency(problem.graph, problem.workload, problem.ranks)
        if hot == "frequency"
        else np.bincount(problem.graph.indices)
    )
    worth = read / (4 * problem.graph.degree + 8)
    order = np.lexsort((everyone, -worth))
    for place in set(places):
        away = [v for v in order.tolist() if v % len(set(places)) != place]
        cached = [v for v in away if lists.kept[place, v]]
        assert cached == away[: len(cached)] and lists.kept[place].sum() == 400 - len(away) + len(
            cached
        )
        fits = (4 * problem.graph.degree + 8)[away].cumsum() <= strategy.structure_cache
        assert len(cached) == fits.sum() and bool(cached) == bool(strategy.structure_cache)
    for rank, place in enumerate(places):
        provider = lists.provider(rank, everyone)
        here = lists.kept[place]
        assert (provider[here] == rank).all()
        for v, other in zip(everyone[~here].tolist(), provider[~here].tolist(), strict=True):
            assert places[other] == v % len(set(places))
        for home in set(places) - {place}:  # they share the work
            busy = np.bincount(provider[~here & (lists.home == home)], minlength=problem.ranks)[
                np.equal(places, home)
            ]
            assert busy.max() <= busy.min() + busy.sum() // 4


def test_bytes_by_hand():
    """8 for every id that its server has no list of and 8 to each other rank per layer; 4 for every
    neighbour drawn of those."""
    problem, strategy = problem_of(), DataParallel(structure="spread")
    w, asks, found, drawn = problem.workload, 0, 0, np.zeros(4, int)
    batches = seeds_of(GRAPH, w.batch, w.seed, 0)  # type: ignore[arg-type]
    for number, seeds in enumerate(batches):
        for rank, part in enumerate(shares(seeds, 4)):
            sampled = frontier(GRAPH, part, w.fanouts, w.seed, 0, number)  # type: ignore[arg-type]
            for layer in (1, 2, 3):
                rows, degree = (
                    sampled.nodes[layer].tolist(),
                    np.diff(sampled.edges[layer - 1][0]).tolist(),
                )
                away = [
                    n for v, n in zip(rows, degree, strict=True) if v % 2 != problem.servers[rank]
                ]
                asks, found = asks + 8 * (len(away) + 3), found + 4 * sum(away)
                for v, n in zip(rows, degree, strict=True):
                    home = v % 2
                    drawn[rank if home == problem.servers[rank] else 2 * home + v // 2 % 2] += n
    p, plain = strategy.predict(problem), DataParallel().predict(problem)
    assert p.bytes == {**plain.bytes, "ask_edges": asks, "edges": found} and asks > 0 < found
    tasks = strategy.schedule(problem, len(batches)).tasks
    assert [
        sum(t.work.edges for t in tasks if t.rank == rank and t.label.op == "draw")
        for rank in range(4)
    ] == drawn.tolist()  # type: ignore
    assert float(p.epoch_s) > float(plain.epoch_s)


def test_a_larger_cache_asks_for_less():
    asked = [
        DataParallel(structure="spread", structure_cache=room).predict(problem_of()).bytes["edges"]
        for room in (0, 2000, 10000, 10**6)
    ]
    assert asked[0] > asked[1] > asked[2] > asked[3] == 0


@pytest.mark.parametrize("group", ["server", "all"])
def test_owners_have_their_lists_and_nobody_asks(group):
    problem, strategy = problem_of(), GSplit(splitter="random", group=group, structure="spread")
    lists, member = spread(strategy, problem), strategy.batches(problem).member
    assert member is not None and not lists.asks
    place = (0, 1, 0, 1) if group == "server" else (0, 1, 2, 3)
    for rank in range(4):
        assert (lists.keeps(rank) == (member == place[rank])).all()
    plain = GSplit(splitter="random", group=group)
    assert strategy.predict(problem).bytes == plain.predict(problem).bytes
    assert [t.label for t in strategy.schedule(problem, 2).tasks] == [
        t.label for t in plain.schedule(problem, 2).tasks
    ]


def test_a_thinned_graph_has_the_lists_that_are_kept():
    keep = np.arange(400) % 3 == 1
    thin = thinned(GRAPH, keep)
    assert thin.indices.dtype == np.int32 and thin.indices.size == GRAPH.degree[keep].sum()
    for v in range(400):
        ours, theirs = (g.indices[g.indptr[v] : g.indptr[v + 1]].tolist() for g in (thin, GRAPH))
        assert ours == (theirs if keep[v] else [])


@pytest.mark.parametrize(
    "strategy",
    [
        DataParallel(),
        DataParallel(prefetch=1),
        GSplit(splitter="random"),
        P3("rank", pipelined=True),
    ],
    ids=str,
)
def test_its_copy_counts_where_ranks_share_the_servers_memory(strategy):
    """On a CPU a sampler's lists are a rank's own; beside a GPU they are elsewhere. Degrees count
    once."""
    apart: Any = replace(strategy, structure="spread")  # type: ignore[call-arg]
    for kind in ("cpu", "cuda"):
        problem = problem_of(1, 2, kind)
        more = apart.memory(problem)["graph"] - strategy.memory(problem)["graph"]
        lists = np.array(
            [int(GRAPH.degree[apart.lists(problem).keeps(rank)].sum()) for rank in (0, 1)]
        )  # type: ignore[union-attr]
        assert more.tolist() == ((4 * lists + 8 * 401).tolist() if kind == "cpu" else [0, 0])
