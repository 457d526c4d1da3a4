"""Graph data in servers' memories: counted as read, and more memory makes no plan slower."""

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from asked import on
from examples import NIGHT
from pairwise import at_night, covered

from gnnplan.planner.cluster.spec import Cluster, Device, Link
from gnnplan.planner.decision import plan
from gnnplan.planner.decision.candidate import evaluate
from gnnplan.planner.decision.search import recommend, search
from gnnplan.planner.gnn.workload import Workload
from gnnplan.planner.graph.load import load
from gnnplan.planner.problem.inputs import overridden, read_cluster, read_fitted
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies import P3, DataParallel, GSplit, Strategy, parse
from gnnplan.planner.strategies.minibatch.adjacency_store import thinned
from gnnplan.planner.strategies.minibatch.feature_store import HOST
from gnnplan.planner.strategies.minibatch.on_batches import fitting
from gnnplan.planner.vocabulary.errors import Infeasible

GRAPH = load("synthetic:community?vertices=40000&edges=400000&features=40&classes=5&seed=0")
ALL_ROWS = 40_000 * 40 * 4  # [B]
OFFSETS_AND_DEGREES = 8 * 40_001 + 8 * (1 + GRAPH.stats.directed) * 40_000  # [B]
ALL_LISTS = 4 * GRAPH.stats.edges + OFFSETS_AND_DEGREES  # [B]


def problem_of(
    servers: int = 2, gpus: int = 2, host_memory: float | None = None, **more: Any
) -> Problem:
    kind, known = more.pop("kind", "cuda"), more.pop("known", True)
    device = {"kind": kind, "memory": 1e12, "gemm": 1e12, "memory_bandwidth": 1e11}
    links = {"intra_node": Link(bandwidth=1e10), "inter_node": Link(bandwidth=1e9, latency=5e-5)}
    of = {"device": Device(**device), **links, "host_memory": host_memory}
    cluster = Cluster(servers=servers, gpus_per_server=gpus, **of)
    asked = {"mode": "mini", "layers": 2, "hidden": 16, "batch": 4000, "fanout": (4, 3), **more}
    graph = GRAPH if known else None
    return Problem(GRAPH.stats, graph, Workload(**asked), cluster, "random")


def printed(graph: str, hidden: int = 32, **settings: str) -> Problem:
    """P3's testbed, where its Table 4 was printed."""
    stats = load(graph, directed=graph == "ogbn-papers100M")  # as its print counts edges
    asked = {"layers": 2, "hidden": hidden, "mode": "mini", "batch": 1000, "fanout": (25, 10)}
    return Problem(stats, None, Workload(**asked), overridden(read_cluster("p3_p100"), settings))


READING = """
data_parallel data_parallel(features='spread') data_parallel(structure='spread') p3
data_parallel(features='spread',structure='spread',structure_cache=200000)
gsplit(group='server',splitter='random',features='spread',structure='spread')
gsplit(group='all',splitter='random',features='spread',structure='spread')
p3(copies=2,structure='spread') p3(over='rank',copies=2,structure='spread',structure_cache=100000)
"""


@pytest.mark.parametrize("text", READING.split())
def test_a_server_has_what_its_ranks_read_from_it(text):
    """The rows, columns and lists that stores and samplers of the executor take from there."""
    problem = problem_of(4, 2)
    strategy = parse(text).settle(problem)
    held, lists = strategy.host_memory(problem), strategy.lists(problem)
    everyone = np.arange(40_000)
    for server in range(4):
        ranks = [rank for rank in range(8) if problem.servers[rank] == server]
        if isinstance(strategy, P3):
            columns = {c for rank in ranks for c in strategy.slices(problem)[rank].columns}
            features = GRAPH.x[:, sorted(columns)].nbytes
        else:
            store = strategy.store(problem)
            read = np.any([store.of(rank, everyone)[0] == HOST for rank in ranks], axis=0)
            if "all" in text and store.home is not None:  # ranks of a group read what they own only
                read = store.home == server
            features = read.sum() * 40 * 4
        assert held["features"][server] == features
        kept = np.any([lists.keeps(rank) for rank in ranks], axis=0) if lists else everyone >= 0
        part = thinned(GRAPH, kept)
        neighbours = part.indices.astype(np.int32).nbytes + part.indptr.astype(np.int64).nbytes
        assert held["lists"][server] == neighbours + OFFSETS_AND_DEGREES - 8 * 40_001


@pytest.mark.parametrize("known", [True, False])
def test_everything_everywhere_and_spread_by_hand(known):
    problem = problem_of(4, 2, known=known)
    everywhere = DataParallel().on_fullest_server(problem)
    assert everywhere == {"features": ALL_ROWS, "lists": ALL_LISTS}
    spread = DataParallel(features="spread", structure="spread").on_fullest_server(problem)
    assert spread["features"] == pytest.approx(ALL_ROWS / 4, rel=0.01)
    assert spread["lists"] == pytest.approx(GRAPH.stats.edges + OFFSETS_AND_DEGREES, rel=0.01)
    assert P3(copies=2).on_fullest_server(problem)["features"] == ALL_ROWS / 2
    one = on(problem, servers=1)
    assert DataParallel(features="spread", structure="spread").on_fullest_server(one) == everywhere


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("strategy", [DataParallel(), P3(), GSplit(splitter="random")])
def test_batches_that_wait_are_in_the_servers_memory(strategy, known):
    """As many as are made at once, of all ranks of a server. They were nowhere."""
    problem = problem_of(2, 4, known=known)
    in_line, one, three = (replace(strategy, prefetch=k).host_memory(problem) for k in (0, 1, 3))
    assert "batches" not in in_line and one["batches"].shape == (2,)
    assert one["lists"].tolist() == in_line["lists"].tolist()
    assert three["batches"] == pytest.approx(3 * one["batches"])
    edges = max(
        sum(int(batch.sampled(layer).sum()) for layer in (1, 2))
        for batch in strategy.batches(problem).first()
    )
    places = 8 * (4 + 2) * 40_000
    assert 4 * edges < one["batches"].sum() - places < 200 * edges
    with pytest.raises(Infeasible, match=r"batches: .*host_memory\); use"):
        evaluate(problem_of(2, 4, 1e9, known=known), replace(strategy, prefetch=1000))


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("servers", [1, 2, 4])
def test_spreading_never_needs_more_memory(servers, known):
    problem = problem_of(servers, 2, known=known)
    plain: list[Strategy] = [DataParallel(), P3(), GSplit(splitter="random", group="all")]
    for strategy in plain:
        most = sum(strategy.on_fullest_server(problem).values())
        variants = list(strategy.more_spread(problem))
        assert bool(variants) == (servers > 1)
        for variant in (*variants, replace(strategy, structure="spread")):
            assert sum(variant.on_fullest_server(problem).values()) <= most * (1 + 1e-12)
    for copies in (1, 2) if servers == 4 else ():
        more = P3(copies=2 * copies).on_fullest_server(problem)["features"]
        assert P3(copies=copies).on_fullest_server(problem)["features"] == more / 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("graph", "rooms"),
    [
        at_night("ogbn-papers100M", (20e9, 60e9, 397e9)),
        ("facebook-darwini", (20e9, 397e9)),
        at_night("known", (2.7e6, 6e6, 1e7)),
    ],
)
def test_more_host_memory_is_never_slower(graph, rooms):
    problem = problem_of(4, 2) if graph == "known" else printed(graph)
    epochs = []
    for room in rooms:
        found = search(on(problem, host_memory=room), may_use_fewer=NIGHT and graph != "known")
        epochs.append(float(found.ranked[0].predicted.epoch_s))
    assert epochs == sorted(epochs, reverse=True)
    assert epochs[0] > epochs[-1] * (1.0 if graph == "known" else 1.1)


def test_candidates_spread_no_more_than_memory_asks():
    room = ALL_ROWS + ALL_LISTS
    waiting = DataParallel(prefetch=1).on_fullest_server(problem_of(4, 2))["batches"]
    for host_memory, strategy in (
        (None, DataParallel()),
        (room, DataParallel()),
        (room - 1, DataParallel(features="spread")),
        (ALL_ROWS / 4 * 1.02 + ALL_LISTS, DataParallel(features="spread")),
    ):
        problem = problem_of(4, 2, host_memory)
        assert fitting(problem, DataParallel()) == strategy
        ahead = problem_of(4, 2, host_memory and host_memory + waiting)
        assert next(DataParallel.candidates(ahead)) == replace(strategy, prefetch=1)
    tight = problem_of(4, 2, room := ALL_ROWS / 4 * 1.02 + 0.9 * ALL_LISTS)
    both = fitting(tight, DataParallel())
    assert (both.features, both.structure) == ("spread", "spread")
    left = room - sum(replace(both, structure_cache=0).on_fullest_server(tight).values())
    assert both.structure_cache == int(left) > 0  # caches fill what is left
    assert sum(both.on_fullest_server(tight).values()) <= room


def test_copies_of_columns_are_proposed_where_memory_is_known():
    def copies(servers: int, gpus: int, host_memory: float | None = None) -> set[int]:
        problem = problem_of(servers, gpus, known=False)
        if host_memory:
            host_memory += P3(prefetch=1).on_fullest_server(problem)["batches"]
            problem = problem_of(servers, gpus, host_memory, known=False)
        return {s.copies for s in P3.candidates(problem) if isinstance(s, P3)}

    assert copies(4, 2) == {1}
    assert copies(4, 2, ALL_ROWS + ALL_LISTS) == {1, 2}  # 4: data parallelism
    assert copies(4, 2, ALL_ROWS / 3 + ALL_LISTS) == {1, 2}  # with lists spread
    assert copies(4, 2, ALL_ROWS / 3 + ALL_LISTS / 2) == {1}
    assert copies(6, 1, ALL_ROWS + ALL_LISTS) == {1, 2, 3}


def test_on_cpus_graph_data_is_in_the_ranks_memory():
    problem = problem_of(2, 2, 1e6, kind="cpu")
    assert problem.cluster.graph_memory == np.inf
    assert evaluate(problem, DataParallel()).host_bytes == 0


LARGE = ["ogbn-products", "ogbn-papers100M", "facebook-darwini", "uk-2006-05", "uk-union"]


@pytest.mark.parametrize(("graph", "hidden"), covered(list(product(LARGE, (32, 512))), set))
def test_p3_is_recommended_over_distdgl_at_narrow_layers_only(graph, hidden):
    """P3's Table 4 and Fig. 15, on the constants that its figures gave."""
    stats, (cluster, _) = load(graph), read_fitted("p3_p100", "sage")
    asked = {"layers": 2, "hidden": hidden, "mode": "mini", "batch": 16_000, "fanout": (25, 10)}
    problem = Problem(stats, None, Workload(**asked), cluster)
    printed: list[Strategy] = [DataParallel(features="spread", structure="spread")]
    printed += [P3(structure="spread"), P3(structure="spread", pipelined=True)]
    best = recommend([evaluate(problem, strategy) for strategy in printed])
    assert isinstance(best.strategy, P3 if hidden == 32 else DataParallel)


@pytest.mark.slow
def test_a_strategy_that_does_not_fit_says_what_would():
    problem = printed("ogbn-papers100M", host_memory="32GB")
    with pytest.raises(Infeasible) as refused:
        search(problem, forced=DataParallel())
    rule = (
        "data_parallel has 65.99 GB of the graph in a server's memory (features: 56.86 GB, lists:"
    )
    rule += " 9.13 GB) but there is 32.00 GB (host_memory); use data_parallel(features='spread') or"
    rule += " --set host_memory=66.06GB; the smallest change that would fit: --set"
    assert str(refused.value).startswith(f"{rule} host_memory=66.06GB would fit data_parallel")
    enough = printed("ogbn-papers100M", host_memory="66.06GB")
    assert search(enough, forced=DataParallel()).best
    with pytest.raises(Infeasible, match=r"(?s)nothing fits.*--set host_memory=[\d.]+GB would fit"):
        search(printed("facebook-darwini", host_memory="10GB"))


@pytest.mark.parametrize(
    ("memory", "told"),
    [
        (32e9, "of 32.00 GB of graph data in the fullest server's memory"),
        (None, "; 23.34 GB of graph data in the fullest server's memory"),
    ],
)
def test_plans_tell_graph_data_in_servers(memory, told):
    problem = on(printed("ogbn-papers100M"), host_memory=memory)
    made = plan.make(search(problem, forced=P3(pipelined=True)))
    assert made["best"]["predicted"]["host_bytes"] == pytest.approx(23.3e9, rel=0.01)
    assert told in made["summary"]["cost"]
