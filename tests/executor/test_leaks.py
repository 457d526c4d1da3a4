"""Fifty epochs on four ranks: nobody hangs, and what a process holds does not grow."""

import pytest
from ranks import Case, Ranks

GRAPH = "synthetic:community?vertices=4000&edges=24000&features=16&classes=5"
DEEP = {"model": "gcnii", "layers": 4, "hidden": 48, "dropout": 0.5}
SAGE = {"model": "sage", "layers": 3, "hidden": 48, "dropout": 0.5}
CASES = [
    Case("graph_parallel", GRAPH, SAGE), Case("graph_parallel(checkpoint=True)", GRAPH, {**SAGE, "norm": "batch"}),
    Case("pipegcn", GRAPH, SAGE), Case("pipegcn_gf", GRAPH, SAGE),
    Case("gnnpipe(chunks=4)", GRAPH, DEEP), Case("gnnpipe(stages=2,chunks=4,historical_gradients=True)", GRAPH, DEEP),
    Case("granndis", GRAPH, SAGE, servers=2), Case("granndis(max_hop=1,fanout=5)", GRAPH, SAGE, servers=2),
    Case("granndis(batches=2)", GRAPH, SAGE, servers=2),
]  # fmt: skip
SETTLED, EPOCHS = 15, 50


@pytest.mark.timeout(120)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_memory_stays_flat(case: Case, run_ranks: Ranks) -> None:
    """A halo's rows kept from every epoch would be 12 MB and more in the end; pages that the allocator keeps come to 2 MB."""
    (result,) = run_ranks(4, [Case(**{**vars(case), "epochs": EPOCHS, "eval_every": 5})])
    assert len(result.losses) == EPOCHS
    for rank in range(4):
        resident = result.rank(rank)["rss_bytes"]
        assert len(resident) == EPOCHS
        assert max(resident[-5:]) - max(resident[SETTLED : SETTLED + 5]) < 5e6
