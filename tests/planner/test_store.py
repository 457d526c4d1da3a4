"""Stores of features and of the graph: every row and list is somewhere, caches hold the hottest, and what
is read elsewhere is counted."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import test_batchwise as batchwise
from asked import fullest_bytes, on
from hypothesis import given, settings
from hypothesis import strategies as st
from nightly import every, examples

from gnnplan.planner.graph.graph import Graph
from gnnplan.planner.graph.partition import BEFORE
from gnnplan.planner.graph.sampling import frontier, items_of
from gnnplan.planner.ownership.minibatch import MiniBatch
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies import P3, DataParallel, GSplit, Strategy
from gnnplan.planner.strategies.minibatch import feature_store as store_module
from gnnplan.planner.strategies.minibatch.feature_store import HIT, HOST, HOT, PEER, REMOTE, heat
from gnnplan.planner.strategies.minibatch.supply import OPENING
from gnnplan.planner.vocabulary.schedule import Collective, Copy
from gnnplan.simulator.player import play

ROW = 40 * 4  # [B]
GRAPH = batchwise.GRAPHS[0]


def problem_of(
    servers: int = 2, gpus: int = 2, graph: Graph = GRAPH, memory: float = 1e12, **workload: Any
) -> Problem:
    return on(batchwise.problem_of(graph, servers, gpus, **workload), memory=memory)


def rows_of_an_epoch(strategy: Strategy, problem: Problem) -> np.ndarray:
    """By rank and class [ranks, 4]."""
    store, batches = strategy.store(problem), strategy.batches(problem)
    return np.sum([store.loads(problem, batch).rows for batch in batches.first()], axis=0)


def laid_of(problem: Problem, batch: MiniBatch) -> np.ndarray:
    """Bytes of the batch's edges and of their sources' ids, which go to a GPU [ranks]."""
    facts = [batch.facts(layer) for layer in range(1, problem.workload.layers + 1)]
    return np.sum([laid_bytes(f.rows, f.sources, f.edges) for f in facts], axis=0)


def laid_bytes(rows: Any, sources: Any, edges: Any) -> Any:
    """Either way an edge's end, weight and place, and the rows' offsets; and the sources' ids."""
    return 20 * edges + 4 * (rows + 1) + 4 * (sources + 1) + 8 * sources


@st.composite
def stored(draw: st.DrawFn) -> tuple[Strategy, Problem]:
    problem = problem_of(draw(st.integers(1, 3)), draw(st.integers(1, 3)))
    if draw(st.booleans()):
        problem = problem.placed(tuple(draw(st.permutations(range(problem.ranks)))))
    knobs: dict[str, Any] = {
        "cache": draw(st.sampled_from([0, ROW, 50 * ROW + 7, 10**6])),
        "hot": draw(st.sampled_from(list(HOT))),
        "features": draw(st.sampled_from(["everywhere", "spread"])),
        "prefetch": draw(st.sampled_from([0, 2])),
    }
    if problem.ranks > 1 and draw(st.booleans()):
        group = draw(st.sampled_from(["server", "all"]))
        return GSplit(splitter="random", group=group, presample=1, **knobs), problem
    shared = bool(knobs["cache"]) and draw(st.booleans())
    return DataParallel(shared_cache=shared, **knobs), problem


@given(stored())
@settings(max_examples=examples(30))
def test_every_row_is_where_its_class_says(drawn):
    strategy, problem = drawn
    store, everyone = strategy.store(problem), np.arange(400)
    is_spread = strategy.features == "spread" and problem.cluster.servers > 1
    assert strategy.supply(problem).is_plain == (not store.caches and not is_spread)
    held = [set(ids.tolist()) for ids in store.cached]
    on_server = {s: [r for r, its in enumerate(problem.servers) if its == s] for s in range(3)}
    for rank, server in enumerate(problem.servers):
        kind, provider = store.of(rank, everyone)
        for v, k, p in zip(everyone.tolist(), kind.tolist(), provider.tolist(), strict=True):
            home = server if store.home is None else store.home[v]
            near = [other for other in on_server[server] if v in held[other]]
            if v in held[rank]:
                assert (k, p) == (HIT, rank)
            elif store.shared and near:
                assert (k, [p]) == (PEER, near)
            elif home == server:
                assert (k, p) == (HOST, rank)
            else:
                there = on_server[home]
                assert (k, p) == (REMOTE, there[v % len(there)])  # they share the work
            assert p == rank or store.asks[rank, p]


@given(stored())
@settings(max_examples=examples(20))
def test_prediction_schedule_and_simulation_agree(drawn):
    """All rows are counted once, bytes follow, and time is that of the simulation."""
    strategy, problem = drawn
    strategy.check(problem)
    steps, p = strategy.steps(problem), strategy.predict(problem)
    schedule = batchwise.must_be_as_simulated(strategy, problem)
    assert sum(schedule.bytes_by_op(schedule.setup).values()) == p.setup_bytes
    assert not p.setup_bytes or strategy.preparation(problem)["feature store"] > 0
    if strategy.supply(problem).is_plain:
        return
    unshared = {"shared_cache": False} if isinstance(strategy, DataParallel) else {}
    plain = replace(strategy, cache=0, features="everywhere", **unshared)
    loaded, whole = (
        sum(task.work.nbytes for task in each.tasks if isinstance(task.work, Copy))
        for each in (schedule, plain.schedule(problem, steps))
    )
    hit, peer, host, remote = rows_of_an_epoch(strategy, problem).sum(0)
    laid = sum(laid_of(problem, batch).sum() for batch in strategy.batches(problem).first())
    assert loaded == host * ROW + laid
    assert whole == (hit + peer + host + remote) * ROW + laid
    assert p.bytes.get("fetch", 0) == (peer + remote) * ROW
    asks = int(strategy.store(problem).asks.sum())
    assert p.bytes.get("ask", 0) == 8 * (peer + remote + steps * asks)
    meetings = {t.label.op for t in schedule.tasks if isinstance(t.work, Collective)}
    assert ({"ask", "fetch"} <= meetings) == bool(asks)


@pytest.mark.parametrize("cache", [ROW, 25 * ROW + 3, 80 * ROW])
def test_a_cache_is_the_hottest_rows_that_fit(cache):
    problem, room = problem_of(), cache // ROW
    order = store_module.hottest(GRAPH, problem.workload, "degree", 4)
    degree = np.bincount(GRAPH.indices, minlength=400)
    assert (np.diff(degree[order]) <= 0).all()
    alike = DataParallel(cache=cache, hot="degree").store(problem)
    assert all(ids.tolist() == order[:room].tolist() for ids in alike.cached)
    assert alike.held(problem).tolist() == [room * ROW] * 4
    dealt = DataParallel(cache=cache, hot="degree", shared_cache=True).store(problem).cached
    for first in (0, 2):  # each server
        ours = np.concatenate([dealt[first], dealt[first + 1]])
        assert sorted(ours.tolist()) == sorted(order[: 2 * room].tolist())
    strategy = GSplit(splitter="random", group="all", cache=cache, hot="degree")
    member, store = strategy.batches(problem).member, strategy.store(problem)
    for rank, ids in enumerate(store.cached):
        assert ids.tolist() == order[member[order] == rank][:room].tolist()
    assert strategy.memory(problem)["cache"].tolist() == store.held(problem).tolist()


@pytest.mark.parametrize("over", every(2, ["server", "rank"]))
def test_columns_are_cached_of_the_rows_that_are_read_most(over):
    """A rank caches its own columns, reads those of its peers' rows; an epoch is as simulated."""
    problem = problem_of(batch=48)
    order = store_module.hottest(GRAPH, problem.workload, "frequency", 4)
    width = {"server": 20, "rank": 10}[over] * 4  # [B] of a row's columns
    plain = P3(over=over)
    for rows in (0, 1, 25, 400):
        strategy = replace(plain, cache=rows * width + 3)
        strategy.check(problem)
        store = strategy.store(problem)
        assert all(ids.tolist() == order[:rows].tolist() for ids in store.cached)
        memory = strategy.memory(problem)
        assert memory["cache"].tolist() == store.held(problem).tolist() == [rows * width] * 4
        schedule = strategy.schedule(problem, strategy.steps(problem))
        done = {(t.label.step, t.rank, t.label.op): t.work for t in schedule.tasks}
        assert any(op == "pick" for _, _, op in done) == bool(rows)
        for step, batch in enumerate(strategy.batches(problem).first()):
            first = batch.facts(1)
            of_layer_1 = np.array([first.rows, first.sources, first.edges])
            for rank in range(4):
                peers = list(strategy.slices(problem)[rank].ranks)
                read = np.concatenate([batch.rows(peer, 0) for peer in peers])
                hits = int(np.isin(read, order[:rows]).sum())
                laid = laid_of(problem, batch)[rank] - laid_bytes(*of_layer_1[:, rank])
                laid += laid_bytes(*of_layer_1[:, peers].sum(1))
                copied = Copy(
                    (read.size - hits) * width + laid, laid, OPENING["cuda"], vertices=400
                )
                assert done[step, rank, "load"] == copied
                if rows:
                    ordered = read.size if 0 < hits < read.size else 0  # with rows of the server's
                    moved = 2 * (hits + ordered) * width
                    assert done[step, rank, "pick"].elementwise_bytes == moved
        played = play(schedule, problem.cost).end_s
        assert float(strategy.predict(problem).epoch_s) == pytest.approx(played, rel=1e-9)
    lossy, cached = (replace(plain, pipelined=True, cache=cache) for cache in (0, 10**6))
    assert float(cached.predict(problem).epoch_s) < float(lossy.predict(problem).epoch_s)


X = sp.random(400, 40, 0.05, "csr", np.float32, np.random.default_rng(0))
THIN = replace(GRAPH, x=X, stats=replace(GRAPH.stats, nonzeros=X.nnz, hash="sparse"))


def test_ranks_cache_as_many_rows_as_their_columns_leave_room_for():
    """Three ranks have 13, 13 and 14 of 40 columns; sparse rows take what their columns have."""
    strategy = P3(over="rank", cache=13 * 14 * 4)
    assert [ids.size for ids in strategy.store(problem_of(1, 3)).cached] == [14, 14, 13]
    problem = problem_of(1, 3, THIN)
    columns = strategy.slices(problem)[1].columns
    numbers = X[:, columns.start : columns.stop].nnz
    assert store_module.row_bytes(problem, np.arange(400), columns).sum() == 8 * numbers + 4 * 400
    held = strategy.store(problem).held(problem)
    assert (held > 0).all() and (held <= strategy.cache).all()


def test_a_plan_caches_columns_where_gpus_have_room():
    def proposed(**more: Any) -> set[int]:
        return {strategy.cache for strategy in P3.candidates(problem_of(batch=80, **more))}

    assert proposed() == {0, 400 * 20 * 4}  # all rows' columns
    alone = fullest_bytes(problem_of(memory=4e8, batch=80), P3("server", prefetch=1))
    assert max(proposed(memory=alone + 1000)) == 900  # nine tenths of what is left
    assert proposed(memory=alone * 0.9) == {0}


@pytest.mark.parametrize("cache", [0, 4, 100, 1000, 10**6])
def test_sparse_rows_take_what_they_have(cache):
    problem = problem_of(graph=THIN)
    cached = DataParallel(cache=cache, hot="degree").store(problem).cached[0]
    order, taken = store_module.hottest(THIN, problem.workload, "degree", 4), cached.size
    assert cached.tolist() == order[:taken].tolist()
    assert store_module.row_bytes(problem, order[:taken]).sum() <= cache
    assert taken == 400 or store_module.row_bytes(problem, order[: taken + 1]).sum() > cache
    assert store_module.row_bytes(problem, np.arange(400)).sum() == 8 * X.nnz + 4 * 400


def test_frequency_counts_what_is_read(monkeypatch):
    """A vertex once per batch and group that reads its row; found once, then from disk."""
    w, reads = problem_of().workload, np.zeros(400, int)
    for epoch in (BEFORE, BEFORE + 1):
        for number, seeds in enumerate(items_of(GRAPH, w, epoch)):
            for part in np.array_split(seeds, 3):
                found = frontier(GRAPH, part, w.fanouts, w.seed, epoch, number)
                reads[np.unique(found.nodes[0])] += 1
    assert store_module.heat(GRAPH, w, "frequency", 3, 2).tolist() == reads.tolist()
    monkeypatch.setattr(store_module, "frontiers", None)
    assert store_module.heat(GRAPH, w, "frequency", 3, 2).tolist() == reads.tolist()
    assert (np.diff(reads[store_module.hottest(GRAPH, w, "frequency", 3, 2)]) <= 0).all()


def test_remote_rows_are_those_of_the_formula():
    """P3 Sec. 3.2: (S-1)/S of the rows read, spread without regard to edges, none cached."""
    problem = replace(problem_of(4, 1, batch=64), method="random")
    strategy = DataParallel(features="spread")
    remote = (1 - 1 / 4) * int(rows_of_an_epoch(strategy, problem).sum()) * ROW
    assert strategy.predict(problem).bytes["fetch"] == pytest.approx(remote, rel=0.03)


SPREAD = [
    (DataParallel(structure="spread"), 2, 2),
    (DataParallel(structure="spread"), 1, 3),
    (P3("server", structure="spread"), 3, 2),
    (P3("rank", structure="spread"), 2, 2),
    (DataParallel(structure="spread", structure_cache=3000), 2, 2),
    (DataParallel(structure="spread", structure_cache=1000, hot="degree"), 3, 1),
    (P3("rank", structure="spread", structure_cache=500), 1, 2),
]


@pytest.mark.parametrize(("strategy", "servers", "gpus"), SPREAD, ids=str)
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
    apart, problem = replace(strategy, structure="spread"), on(problem_of(1, 2), kind=kind)
    more = apart.memory(problem)["lists"] - strategy.memory(problem)["lists"]
    lists = [GRAPH.degree[apart.lists(problem).keeps(rank)].sum() for rank in (0, 1)]
    expected = [4 * numbers + 8 * 401 for numbers in lists]
    assert more.tolist() == (expected if kind == "cpu" else [0, 0])
