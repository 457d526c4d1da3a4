"""Fifty epochs on several ranks: nobody hangs, and what a process holds does not grow."""

import pytest

from gnnplan.testing.ranks import Case

GRAPH = "synthetic:community?vertices=4000&edges=24000&features=16&classes=5"
DEEP = {"model": "gcnii", "layers": 4, "hidden": 48, "dropout": 0.5}
SAGE = {"model": "sage", "layers": 3, "hidden": 48, "dropout": 0.5}


CASES = [  # ranks, case
    (2, Case("gnnpipe(stages=2,chunks=4,historical_gradients=True)", GRAPH, DEEP)),
    (2, Case("graph_parallel(checkpoint=True)", GRAPH, {**SAGE, "norm": "batch"})),
    (2, Case("granndis(max_hop=1,fanout=5)", GRAPH, SAGE, servers=2)),
    (2, Case("feature_parallel", GRAPH, SAGE)),
    (4, Case("gnnpipe(stages=2,chunks=4,historical_gradients=True)", GRAPH, DEEP)),
    (2, Case("pipegcn_gf", GRAPH, SAGE)),
    (2, Case("tensor3d(x=1,y=2,z=1)", GRAPH, SAGE)),
    (2, Case("pipegcn(bits=2)", GRAPH, SAGE)),
    (2, Case("granndis(batches=2)", GRAPH, SAGE, servers=2)),
    (4, Case("graph_parallel", GRAPH, SAGE)),
    (4, Case("pipegcn", GRAPH, SAGE)),
    (4, Case("gnnpipe(chunks=4)", GRAPH, DEEP)),
    (4, Case("granndis", GRAPH, SAGE, servers=2)),
]
SETTLED, EPOCHS = 15, 50


@pytest.mark.nightly
@pytest.mark.parametrize(("world", "case"), CASES, ids=str)
def test_memory_stays_flat(world, case, run_ranks):
    """A halo's rows kept from every epoch would be 12 MB; pages the allocator keeps are 2 MB."""
    (result,) = run_ranks(world, [Case(**{**vars(case), "epochs": EPOCHS, "eval_every": 5})])
    assert len(result.losses) == EPOCHS
    for rank in range(world):
        resident = result.rank(rank)["rss_bytes"]
        assert len(resident) == EPOCHS
        assert max(resident[-5:]) - max(resident[SETTLED : SETTLED + 5]) < 5e6
