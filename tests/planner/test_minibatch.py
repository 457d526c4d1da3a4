"""A mini-batch over ranks: together they have the frontier, each edge once per group, and every halo row comes from whoever has it."""

from dataclasses import replace

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st

from gnnplan.planner.graph import Graph, GraphStats, load
from gnnplan.planner.job import Job
from gnnplan.planner.layout import Layout
from gnnplan.planner.minibatch import MiniBatch, expected_frontier
from gnnplan.planner.sampling import frontier
from gnnplan.planner.schedule import Load
from gnnplan.planner.specs import ALL, Cluster, Device, Link, Workload
from gnnplan.planner.strategies import DataParallel
from gnnplan.simulator.player import play

GRAPH = load("synthetic:community?vertices=300&edges=5000&features=4&classes=3&seed=0")
assert isinstance(GRAPH, Graph)
GROUPS = {"one": (0,), "data parallel": (0, 1, 2), "split": (0, 0, 0), "hybrid": (0, 0, 1, 1), "hybrid, in turn": (0, 1, 0, 1)}


def batch(groups: tuple[int, ...], seeds: int = 40, fanouts: tuple[int, ...] = (5, 3, 2), seed: int = 0) -> MiniBatch:
    """Seeds shared out over the groups, vertices owned at random."""
    chosen = np.random.default_rng(seed).permutation(GRAPH.stats.vertices)[:seeds]
    count, size = len(set(groups)), groups.count(0)
    frontiers = [frontier(GRAPH, share, fanouts, seed, 0, 0) for share in np.array_split(chosen, count)]
    member = np.random.default_rng(seed + 1).integers(0, size, GRAPH.stats.vertices) if size > 1 else None
    return MiniBatch(GRAPH, frontiers, groups, member, first_varying=1)


@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
@pytest.mark.parametrize("fanouts", [(5, 3, 2), (4,), (ALL, 2), (300, ALL)], ids=str)
def test_ranks_of_a_group_share_its_frontier(groups: tuple[int, ...], fanouts: tuple[int, ...]) -> None:
    made = batch(groups, fanouts=fanouts)
    for group, found in enumerate(made._frontiers):
        ranks = [rank for rank, of in enumerate(groups) if of == group]
        for h, nodes in enumerate(found.nodes):
            assert sorted(np.concatenate([made.rows(rank, h) for rank in ranks]).tolist()) == sorted(nodes.tolist())
        for layer, (indptr, places) in enumerate(found.edges, start=1):
            expected = sorted(zip(np.repeat(found.nodes[layer], np.diff(indptr)).tolist(), GRAPH.indices[places].tolist(), strict=True))
            edges = []
            for rank in ranks:
                piece, rows = made.piece(rank, layer), made.rows(rank, layer)
                sources = np.concatenate([made.rows(rank, layer - 1), piece.halo])
                starts, local = made.block(rank, layer)
                assert sources[: rows.size].tolist() == rows.tolist()
                assert piece.edges == local.size
                edges += zip(np.repeat(rows, np.diff(starts)).tolist(), sources[local].tolist(), strict=True)
            assert sorted(edges) == expected


@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
def test_every_halo_row_comes_from_its_owner(groups: tuple[int, ...]) -> None:
    made = batch(groups)
    for layer in range(1, made.layers + 1):
        sends = made.facts(layer).sends
        for rank in range(made.ranks):
            arriving = [made.rows(peer, layer - 1)[made.sent(peer, layer)[rank]] for peer in range(made.ranks)]
            assert np.concatenate(arriving).tolist() == made.piece(rank, layer).halo.tolist()
            assert [rows.size for rows in arriving] == sends[:, rank].tolist()
            assert all(groups[peer] == groups[rank] for peer in np.flatnonzero(sends[:, rank]))
        if len(set(groups)) == made.ranks:
            assert not sends.any()


@settings(max_examples=30)
@given(seeds=st.integers(1, 200), ranks=st.integers(1, 5), seed=st.integers(0, 99))
def test_splitting_computes_each_row_once_and_data_parallel_never_fewer(seeds: int, ranks: int, seed: int) -> None:
    """GSplit Table 1: what data parallelism computes and loads beyond the mini-batch is what its ranks have in common."""
    seeds = max(seeds, ranks)
    split, apart, alone = batch((0,) * ranks, seeds, seed=seed), batch(tuple(range(ranks)), seeds, seed=seed), batch((0,), seeds, seed=seed)
    for layer in (1, 2, 3):
        edges = [int(made.facts(layer).edges.sum()) for made in (split, apart, alone)]
        assert edges[0] == edges[2] <= edges[1]
    loaded = [sum(made.rows(rank, 0).size for rank in range(made.ranks)) for made in (split, apart, alone)]
    assert loaded[0] == loaded[2] <= loaded[1]


def test_without_sampling_a_batch_is_the_whole_neighbourhood() -> None:
    """Fanout 'full' on one rank: GraNNDis' batch of the same targets (layout.py) has the same rows and edges."""
    seeds = np.arange(0, 300, 30)
    made = MiniBatch(GRAPH, [frontier(GRAPH, seeds, (ALL, ALL), 0, 0, 0)], (0,), None, first_varying=1)
    targets = np.zeros(300, dtype=bool)
    targets[seeds] = True
    whole = Layout(GRAPH, np.zeros(300, dtype=np.int32), (0,), 2, 1).batch(targets)
    for h in range(3):
        assert set(made.rows(0, h).tolist()) == set(whole.rows(0, h).tolist())
    for layer in (1, 2):
        assert made.facts(layer).edges.tolist() == whole.facts(layer).edges.tolist()


# -- statistics only -----------------------------------------------------------------------------------------------------------


def uniform(vertices: int, degree: int) -> Graph:
    """A graph whose edges join any two vertices equally likely, both ways."""
    a, b = np.random.default_rng(0).integers(0, vertices, (2, vertices * degree // 2))
    one = sp.csr_matrix((a != b, (a, b)), shape=(vertices, vertices))
    edges = sp.csr_matrix(one + one.T)
    edges.eliminate_zeros()
    edges.sort_indices()
    stats = replace(GRAPH.stats, vertices=vertices, edges=edges.nnz)
    return replace(GRAPH, stats=stats, indptr=edges.indptr.astype(np.int64), indices=edges.indices.astype(np.int32))


@pytest.mark.parametrize(("degree", "fanouts"), [
    *((degree, fanouts) for degree in (3, 8, 30) for fanouts in ((5, 10, 15), (ALL, ALL, ALL))), (8, (10, 5, 2)), (30, (10, 5, 2)),
])  # fmt: skip
def test_the_expected_frontier_is_that_of_a_uniform_graph(degree: int, fanouts: tuple[int, ...]) -> None:
    """Every layer's rows and edges to 5 %, at the mean of some batches."""
    graph, count = uniform(20_000, degree), 12
    drawn = [frontier(graph, np.random.default_rng(i).permutation(20_000)[:200], fanouts, 0, 0, i) for i in range(count)]
    nodes, edges = expected_frontier(graph.stats, np.array([200, 1]), fanouts)
    assert nodes[:, 0] == pytest.approx(np.mean([[rows.size for rows in one.nodes] for one in drawn], axis=0), rel=0.05)
    assert edges[:, 0] == pytest.approx(np.mean([[places.size for _, places in one.edges] for one in drawn], axis=0), rel=0.05)


def test_a_graph_that_is_skewed_has_smaller_frontiers() -> None:
    """Half of the edges lead to a hundred vertices."""
    rng = np.random.default_rng(0)
    a, b = rng.integers(0, 20_000, (2, 60_000))
    b[:30_000] %= 100
    one = sp.csr_matrix((np.ones(a.size), (a, b)), shape=(20_000, 20_000))
    edges = sp.csr_matrix(one + one.T)
    stats = replace(GRAPH.stats, vertices=20_000, edges=edges.nnz)
    graph = replace(GRAPH, stats=stats, indptr=edges.indptr.astype(np.int64), indices=edges.indices.astype(np.int32))
    found = frontier(graph, rng.permutation(20_000)[:200], (5, 5), 0, 0, 0)
    assert found.nodes[0].size < 0.9 * expected_frontier(stats, np.array([200]), (5, 5))[0][0, 0]


def stats_job(train: int, batch: int, ranks: int = 3) -> Job:
    stats = GraphStats("told", "told", 50_000, 400_000, 32, 5, train, False, "", known=False)
    where = Cluster(gpus_per_server=ranks, device=Device(memory=1e12, gemm=1e11, memory_bandwidth=1e11),
                    intra_node=Link(bandwidth=1e9, latency=1e-6))  # fmt: skip
    return Job(stats, None, Workload(mode="mini", layers=2, hidden=16, batch=batch, fanout=(4, 3)), where)


def test_batches_of_statistics() -> None:
    """An epoch has every training vertex once, its batches are shared out as real ones are, and it is predicted as it is simulated."""
    job, strategy = stats_job(train=10_000, batch=768), DataParallel()
    batches = strategy.batches(job)
    sizes = [[batches.at(step).own(rank).size for rank in range(3)] for step in range(batches.steps)]
    assert np.sum(sizes) == 10_000 and sizes[0] == [256, 256, 256] and sizes[-1] == [6, 5, 5] and sizes[0] == sizes[1]
    loaded = sum(t.work.nbytes for t in strategy.schedule(job, 1).tasks if isinstance(t.work, Load))
    assert loaded == sum(batches.at(0).rows(rank, 0).size for rank in range(3)) * 32 * 4
    end = play(strategy.schedule(job, batches.steps), job.cost).end_s
    assert float(strategy.predict(job).epoch_s) == pytest.approx(end, rel=1e-9)


def test_memory_of_more_batches_than_numpy_chooses_from() -> None:
    """np.choose takes less than 64."""
    few, many = (DataParallel().memory(stats_job(train, 100)) for train in (1_000, 10_000))
    assert few.keys() == many.keys() and all(np.array_equal(few[use], many[use]) for use in few)
