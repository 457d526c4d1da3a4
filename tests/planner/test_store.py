"""The feature store: every row is somewhere, caches hold the hottest, and what no server's memory gives is counted elsewhere."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st

from gnnplan.planner import store as store_module
from gnnplan.planner.errors import SpecError
from gnnplan.planner.formulas import remote_feature_bytes
from gnnplan.planner.graph import Graph, load
from gnnplan.planner.job import Job
from gnnplan.planner.minibatch import shares
from gnnplan.planner.sampling import frontier, seeds_of
from gnnplan.planner.schedule import Collective, Load
from gnnplan.planner.specs import Cluster, Device, Link, Workload
from gnnplan.planner.splitting import BEFORE
from gnnplan.planner.store import HIT, HOST, HOT, PEER, REMOTE, Store, frequency, hottest, row_bytes
from gnnplan.planner.strategies import DataParallel, GSplit, parse
from gnnplan.simulator.player import play

ROW = 40 * 4  # [B]
GRAPH = load("synthetic:community?vertices=400&edges=6000&features=40&classes=5&seed=0")
assert isinstance(GRAPH, Graph)
Strategies = DataParallel | GSplit


def job_of(servers: int = 2, gpus: int = 2, graph: Graph = GRAPH, method: str = "metis", memory: float = 1e12, **workload: Any) -> Job:
    device = Device(memory=memory, gemm=1e11, memory_bandwidth=1e11, launch=1e-6)
    where = Cluster(servers=servers, gpus_per_server=gpus, device=device, intra_node=Link(bandwidth=1e10, latency=1e-6),
                    inter_node=Link(bandwidth=1e9, latency=1e-5), host_rates={"draw": 2e7, "lay": 4e7})  # fmt: skip
    asked = {"mode": "mini", "layers": 3, "hidden": 16, "batch": 16, "fanout": (4, 3, 2), **workload}
    return Job(graph.stats, graph, Workload(**asked), where, method)


def made(strategy: Strategies, job: Job) -> Store:
    store = strategy.store(job)
    assert store is not None
    return store


def rows_of_an_epoch(strategy: Strategies, job: Job) -> np.ndarray:
    """By rank and class [ranks, 4]."""
    store, batches = made(strategy, job), strategy.batches(job)
    return np.sum([store.loads_of(job, batch).rows for batch in batches.first()], axis=0)


@st.composite
def stored(draw: st.DrawFn) -> tuple[Strategies, Job]:
    job = job_of(draw(st.integers(1, 3)), draw(st.integers(1, 3)))
    if draw(st.booleans()):
        job = job.seated(tuple(draw(st.permutations(range(job.ranks)))))
    cache, hot = draw(st.sampled_from([0, ROW, 50 * ROW + 7, 10**6])), draw(st.sampled_from(HOT))
    features, shared = draw(st.sampled_from(["everywhere", "spread"])), bool(cache) and draw(st.booleans())
    prefetch = draw(st.sampled_from([0, 2]))
    if job.ranks > 1 and draw(st.booleans()):
        group = draw(st.sampled_from(["server", "all"]))
        return GSplit(splitter="random", group=group, presample=1, prefetch=prefetch, cache=cache, hot=hot, features=features), job
    return DataParallel(prefetch=prefetch, cache=cache, shared_cache=shared, hot=hot, features=features), job


@given(stored())
@settings(max_examples=30)
def test_every_row_is_where_its_class_says(drawn: tuple[Strategies, Job]) -> None:
    strategy, job = drawn
    store = strategy.store(job)
    if store is None:
        assert not strategy.cache and (strategy.features == "everywhere" or job.cluster.servers == 1)
        return
    everyone = np.arange(400)
    held = [set(ids.tolist()) for ids in store.cached]
    for rank, server in enumerate(job.servers):
        kind, provider = store.of(rank, everyone)
        for v, k, p in zip(everyone.tolist(), kind.tolist(), provider.tolist(), strict=True):
            home = server if store.home is None else store.home[v]
            near = [other for other, where in enumerate(job.servers) if where == server and v in held[other]]
            if v in held[rank]:
                assert (k, p) == (HIT, rank)
            elif store.shared and near:
                assert (k, [p]) == (PEER, near)
            elif home == server:
                assert (k, p) == (HOST, rank)
            else:
                there = [other for other, where in enumerate(job.servers) if where == home]
                assert (k, p) == (REMOTE, there[v % len(there)])  # they share the work
            assert p == rank or store.asks[rank, p]


@given(stored())
@settings(max_examples=20)
def test_prediction_schedule_and_simulation_agree(drawn: tuple[Strategies, Job]) -> None:
    """All rows are counted once, bytes follow, and time is that of the simulation (prefetch: of its claim)."""
    strategy, job = drawn
    strategy.check(job)
    steps, p = strategy.steps(job), strategy.predict(job)
    schedule, plain = strategy.schedule(job, steps), replace(strategy, cache=0, features="everywhere", **_unshared(strategy))
    assert {op: n for op, n in schedule.bytes_by_op().items() if n} == {op: n for op, n in p.bytes.items() if n}
    assert sum(schedule.bytes_by_op(schedule.setup).values()) == p.setup_bytes
    closed, played = float(p.epoch_s), play(schedule, job.cost).end_s
    if strategy.prefetch:
        assert closed <= played * (1 + 1e-9) <= 2 * closed * (1 + 1e-9)
    else:
        assert closed == pytest.approx(played, rel=1e-9)

    def loaded(of: Strategies) -> int:
        return sum(t.work.nbytes for t in of.schedule(job, steps).tasks if isinstance(t.work, Load))

    if strategy.store(job) is not None:
        hit, peer, host, remote = rows_of_an_epoch(strategy, job).sum(0)
        assert loaded(strategy) == host * ROW and loaded(plain) == (hit + peer + host + remote) * ROW
        assert p.bytes.get("fetch", 0) == (peer + remote) * ROW
        asks = int(made(strategy, job).asks.sum())
        assert p.bytes.get("ask", 0) == 8 * (peer + remote + steps * asks)
        meetings = {t.label.op for t in schedule.tasks if isinstance(t.work, Collective)}
        assert ({"ask", "fetch"} <= meetings) == bool(asks)


def _unshared(strategy: Strategies) -> dict[str, Any]:
    return {"shared_cache": False} if isinstance(strategy, DataParallel) else {}


@pytest.mark.parametrize("strategy", [
    DataParallel(), DataParallel(features="spread"), DataParallel(shared_cache=True), DataParallel(shared_cache=True, features="spread"),
    GSplit(splitter="random", presample=2), GSplit(splitter="random", presample=2, group="all", features="spread"),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("hot", HOT)
def test_a_larger_cache_has_more(strategy: Strategies, hot: str) -> None:
    """None at first, all at last, and in between each budget at least what a smaller one has: own rows, and with those of peers."""
    job = job_of()
    everything = rows_of_an_epoch(replace(strategy, cache=ROW), job).sum()
    rates = []
    for cache in (ROW - 1, 10 * ROW, 40 * ROW, 100 * ROW, 200 * ROW, 400 * ROW):
        found = rows_of_an_epoch(replace(strategy, cache=cache, hot=hot), job).sum(0)
        assert found.sum() == everything
        rates.append((found[HIT] / everything, (found[HIT] + found[PEER]) / everything))
        assert found[REMOTE] == 0 or (isinstance(strategy, DataParallel) and strategy.features == "spread")
    assert rates[0] == (0.0, 0.0) and rates[-1][1] == 1.0
    for smaller, larger in pairwise(rates):
        assert smaller <= larger and smaller[1] <= larger[1]
    assert rates[2][1] > 1.2 * 40 / 400  # better than chance: the hottest come first


@pytest.mark.parametrize("cache", [ROW, 25 * ROW + 3, 80 * ROW])
def test_a_cache_is_the_hottest_rows_that_fit(cache: int) -> None:
    job = job_of()
    order = hottest(GRAPH, job.workload, "degree", 4)
    degree = np.bincount(GRAPH.indices, minlength=400)
    assert (np.diff(degree[order]) <= 0).all()
    alike = made(DataParallel(cache=cache, hot="degree"), job)
    assert all(ids.tolist() == order[: cache // ROW].tolist() for ids in alike.cached)
    assert alike.held(job).tolist() == [cache // ROW * ROW] * 4
    dealt = made(DataParallel(cache=cache, hot="degree", shared_cache=True), job)
    for first in (0, 2):  # each server
        ours = np.concatenate([dealt.cached[first], dealt.cached[first + 1]])
        assert sorted(ours.tolist()) == sorted(order[: 2 * (cache // ROW)].tolist())
    strategy = GSplit(splitter="random", group="all", cache=cache, hot="degree")
    member = strategy.batches(job).member
    assert member is not None
    for rank, ids in enumerate(made(strategy, job).cached):
        assert ids.tolist() == order[member[order] == rank][: cache // ROW].tolist()
    assert strategy.memory(job)["cache"].tolist() == made(strategy, job).held(job).tolist()


def test_sparse_rows_take_what_they_have() -> None:
    x = sp.random(400, 40, 0.05, "csr", np.float32, np.random.default_rng(0))
    graph = replace(GRAPH, x=x, stats=replace(GRAPH.stats, nonzeros=x.nnz, hash="sparse"))
    job = job_of(graph=graph)
    for cache in (0, 4, 100, 1000, 10**6):
        store = DataParallel(cache=cache, hot="degree").store(job)
        if store is None:
            assert cache == 0
            continue
        order = hottest(graph, job.workload, "degree", 4)
        taken = store.cached[0].size
        assert store.cached[0].tolist() == order[:taken].tolist()
        assert row_bytes(job, order[:taken]).sum() <= cache
        assert taken == 400 or row_bytes(job, order[: taken + 1]).sum() > cache
    assert row_bytes(job, np.arange(400)).sum() == 8 * x.nnz + 4 * 400


def test_frequency_counts_what_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A vertex once per batch and group that reads its row; found once, then from disk."""
    w = job_of().workload
    heat = np.zeros(400, int)
    for epoch in (BEFORE, BEFORE + 1):
        for number, seeds in enumerate(seeds_of(GRAPH, w.batch, w.seed, epoch)):
            for part in shares(seeds, 3):
                for v in set(frontier(GRAPH, part, w.fanouts, w.seed, epoch, number).nodes[0].tolist()):
                    heat[v] += 1
    assert frequency(GRAPH, w, 3, 2).tolist() == heat.tolist()
    monkeypatch.setattr(store_module, "frontier", None)
    assert frequency(GRAPH, w, 3, 2).tolist() == heat.tolist()
    order = hottest(GRAPH, w, "frequency", 3, 2)
    assert (np.diff(heat[order]) <= 0).all()


def test_remote_rows_are_those_of_the_formula() -> None:
    """P3 Sec. 3.2: (S-1)/S of the rows that ranks read, where they are spread without regard to edges and none is cached."""
    job, strategy = job_of(4, 1, method="random", batch=64), DataParallel(features="spread")
    read = int(rows_of_an_epoch(strategy, job).sum())
    assert strategy.predict(job).bytes["fetch"] == pytest.approx(remote_feature_bytes(4, read, 40), rel=0.03)


def test_what_is_cached_from_elsewhere_is_sent_once() -> None:
    job = job_of()
    strategy = DataParallel(cache=30 * ROW, features="spread")
    store, p = made(strategy, job), strategy.predict(job)
    assert store.home is not None
    away = sum(int((store.home[ids] != job.servers[rank]).sum()) for rank, ids in enumerate(store.cached))
    assert p.setup_bytes == away * ROW > 0
    assert strategy.preparation(job)["feature store"] > 0
    assert DataParallel(cache=30 * ROW).predict(job).setup_bytes == 0


@pytest.mark.parametrize(("text", "rule"), [
    ("data_parallel(cache=-1)", "data_parallel: cache is a number of bytes per GPU, 0 or more, not -1; use 0 for no cache"),
    ("gsplit(cache=2000000000000)", r"the memory that it is in \(cache: 2.00 TB, device.memory: 1.00 TB\); use cache=500000000000 or less"),
    ("gsplit(hot='degrees')", "hot says which rows to cache, and 'degrees' is unknown; did you mean degree"),
    ("data_parallel(features='everwhere')", "features says whose memory has them, and 'everwhere' is unknown; did you mean everywhere"),
    ("data_parallel(shared_cache=True)", r"share their caches have some \(shared_cache: True, cache: 0\); use cache="),
    ("gsplit(shared_cache=True)", "gsplit has no knob 'shared_cache'"),
])  # fmt: skip
def test_what_cannot_be(text: str, rule: str) -> None:
    with pytest.raises(SpecError, match=rule):
        parse(text).check(job_of())
