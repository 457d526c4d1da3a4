"""A structure that is spread: every list is somewhere, samplers ask there, each byte counts."""

from dataclasses import replace

import numpy as np
import pytest
import test_batchwise as batchwise
from asked import on

from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies import P3, DataParallel, GSplit
from gnnplan.planner.strategies.minibatch.feature_store import heat

GRAPH = batchwise.GRAPHS[0]


def problem_of(servers: int = 2, gpus: int = 2, kind: str = "cuda") -> Problem:
    return on(batchwise.problem_of(GRAPH, servers, gpus, batch=32), kind=kind)


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
    lists, everyone = strategy.lists(problem), np.arange(400)
    by_rank = strategy.over == "rank" if isinstance(strategy, P3) else servers == 1
    places = range(problem.ranks) if by_rank else problem.servers
    assert lists.places == tuple(places)
    read, size = np.bincount(GRAPH.indices), 4 * GRAPH.degree + 8
    if getattr(strategy, "hot", "frequency") == "frequency":
        read = heat(problem.graph, problem.workload, "frequency", problem.ranks)
    order = np.lexsort((everyone, -read / size))
    for place in set(places):
        away = [v for v in order.tolist() if v % len(set(places)) != place]
        cached = [v for v in away if lists.kept[place, v]]
        assert cached == away[: len(cached)]
        assert lists.kept[place].sum() == 400 - len(away) + len(cached)
        fits = size[away].cumsum() <= strategy.structure_cache
        assert len(cached) == fits.sum() and bool(cached) == bool(strategy.structure_cache)
    for rank, place in enumerate(places):
        provider = lists.provider(rank, everyone)
        here = lists.kept[place]
        assert (provider[here] == rank).all()
        for v, other in zip(everyone[~here].tolist(), provider[~here].tolist(), strict=True):
            assert places[other] == v % len(set(places))
        for home in set(places) - {place}:  # they share the work
            asked = provider[~here & (lists.home == home)]
            busy = np.bincount(asked, minlength=problem.ranks)[np.equal(places, home)]
            assert busy.max() <= busy.min() + busy.sum() // 4


@pytest.mark.parametrize("group", ["server", "all"])
def test_owners_have_their_lists_and_nobody_asks(group):
    problem, strategy = problem_of(), GSplit(splitter="random", group=group, structure="spread")
    lists, member = strategy.lists(problem), strategy.batches(problem).member
    assert member is not None and not lists.asks
    place = (0, 1, 0, 1) if group == "server" else (0, 1, 2, 3)
    for rank in range(4):
        assert (lists.keeps(rank) == (member == place[rank])).all()
    plain = GSplit(splitter="random", group=group)
    assert strategy.predict(problem).bytes == plain.predict(problem).bytes
    assert [t.label for t in strategy.schedule(problem, 2).tasks] == [
        t.label for t in plain.schedule(problem, 2).tasks
    ]


@pytest.mark.parametrize(
    "strategy",
    [
        *(DataParallel(), DataParallel(prefetch=1), GSplit(splitter="random")),
        P3("rank", pipelined=True),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_its_copy_counts_where_ranks_share_the_servers_memory(strategy, kind):
    """On a CPU a sampler's lists are a rank's own; beside a GPU they are elsewhere."""
    apart, problem = replace(strategy, structure="spread"), problem_of(1, 2, kind)
    more = apart.memory(problem)["graph"] - strategy.memory(problem)["graph"]
    lists = [GRAPH.degree[apart.lists(problem).keeps(rank)].sum() for rank in (0, 1)]
    expected = [4 * numbers + 8 * 401 for numbers in lists]
    assert more.tolist() == (expected if kind == "cpu" else [0, 0])
