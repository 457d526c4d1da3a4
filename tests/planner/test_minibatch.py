"""A mini-batch over ranks: each row and edge once per group."""

import numpy as np
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from gnnplan.planner.graph.load import load
from gnnplan.planner.graph.sampling import frontier
from gnnplan.planner.ownership.minibatch import MiniBatch

GRAPH = load("synthetic:community?vertices=300&edges=5000&features=4&classes=3&seed=0")


@settings(max_examples=examples(30))
@given(seeds=st.integers(1, 200), ranks=st.integers(1, 5), seed=st.integers(0, 99))
def test_splitting_computes_each_row_once_and_data_parallel_never_fewer(seeds, ranks, seed):
    """GSplit Table 1: beyond the mini-batch there is what ranks of data parallelism share."""
    chosen = np.random.default_rng(seed).permutation(300)[: max(seeds, ranks)]
    member, counts = np.random.default_rng(seed + 1).integers(0, ranks, 300), []
    for groups in ((0,) * ranks, (0,), tuple(range(ranks))):
        shares = np.array_split(chosen, len(set(groups)))
        frontiers = [frontier(GRAPH, share, (5, 3, 2), seed, 0, 0) for share in shares]
        owners = member if groups.count(0) > 1 else None
        made = MiniBatch(GRAPH, frontiers, groups, owners)
        edges = [int(made.facts(layer).edges.sum()) for layer in (1, 2, 3)]
        counts.append([*edges, sum(made.rows(rank, 0).size for rank in range(made.ranks))])
    split, alone, apart = counts
    assert split == alone and all(np.less_equal(alone, apart))
