"""A mini-batch over ranks: together they have the frontier, each edge once per group."""

import numpy as np
import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from gnnplan.planner.gnn.workload import ALL
from gnnplan.planner.graph.load import load
from gnnplan.planner.graph.sampling import frontier
from gnnplan.planner.ownership.minibatch import MiniBatch

GRAPH = load("synthetic:community?vertices=300&edges=5000&features=4&classes=3&seed=0")
GROUPS = {"one": (0,), "data parallel": (0, 1, 2), "split": (0, 0, 0), "hybrid": (0, 0, 1, 1)}
GROUPS |= {"hybrid, in turn": (0, 1, 0, 1)}


def batch(
    groups: tuple[int, ...], seeds: int = 40, fanouts: tuple[int, ...] = (5, 3, 2), seed: int = 0
) -> MiniBatch:
    """Seeds shared out over the groups, vertices owned at random."""
    n, count, size = GRAPH.stats.vertices, len(set(groups)), groups.count(0)
    chosen = np.random.default_rng(seed).permutation(n)[:seeds]
    parts = np.array_split(chosen, count)
    frontiers = [frontier(GRAPH, share, fanouts, seed, 0, 0) for share in parts]
    member = np.random.default_rng(seed + 1).integers(0, size, n) if size > 1 else None
    return MiniBatch(GRAPH, frontiers, groups, member, first_varying=1)


@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
@pytest.mark.parametrize("fanouts", [(5, 3, 2), (4,), (ALL, 2), (300, ALL)], ids=str)
def test_ranks_of_a_group_share_its_frontier(groups, fanouts):
    """And every halo row comes from its owner."""
    made = batch(groups, fanouts=fanouts)
    for group, found in enumerate(made._frontiers):
        ranks = [rank for rank, of in enumerate(groups) if of == group]
        for h, nodes in enumerate(found.nodes):
            together = np.concatenate([made.rows(rank, h) for rank in ranks])
            assert sorted(together.tolist()) == sorted(nodes.tolist())
        for layer, (indptr, places) in enumerate(found.edges, start=1):
            ends = np.repeat(found.nodes[layer], np.diff(indptr)), GRAPH.indices[places]
            expected, edges = sorted(zip(*map(np.ndarray.tolist, ends), strict=True)), []
            for rank in ranks:
                piece, rows = made.piece(rank, layer), made.rows(rank, layer)
                sources = np.concatenate([made.rows(rank, layer - 1), piece.halo])
                starts, local = made.block(rank, layer)
                assert sources[: rows.size].tolist() == rows.tolist()
                assert piece.edges == local.size
                ends = np.repeat(rows, np.diff(starts)), sources[local]
                edges += zip(*map(np.ndarray.tolist, ends), strict=True)
            assert sorted(edges) == expected
    for layer in range(1, made.layers + 1):
        sends = made.facts(layer).sends
        for rank in range(made.ranks):
            arriving = [
                made.rows(peer, layer - 1)[made.sent(peer, layer)[rank]]
                for peer in range(made.ranks)
            ]
            assert np.concatenate(arriving).tolist() == made.piece(rank, layer).halo.tolist()
            assert [rows.size for rows in arriving] == sends[:, rank].tolist()
            assert all(groups[peer] == groups[rank] for peer in np.flatnonzero(sends[:, rank]))
        assert len(set(groups)) < made.ranks or not sends.any()


@settings(max_examples=examples(30))
@given(seeds=st.integers(1, 200), ranks=st.integers(1, 5), seed=st.integers(0, 99))
def test_splitting_computes_each_row_once_and_data_parallel_never_fewer(seeds, ranks, seed):
    """GSplit Table 1: beyond the mini-batch there is what ranks of data parallelism share."""
    counts = []
    for groups in ((0,) * ranks, (0,), tuple(range(ranks))):
        made = batch(groups, max(seeds, ranks), seed=seed)
        edges = [int(made.facts(layer).edges.sum()) for layer in (1, 2, 3)]
        counts.append([*edges, sum(made.rows(rank, 0).size for rank in range(made.ranks))])
    split, alone, apart = counts
    assert split == alone and all(np.less_equal(alone, apart))
