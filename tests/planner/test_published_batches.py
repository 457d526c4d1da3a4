"""Printed figures of mini-batch systems: what is asked, and how its parts are told apart."""

from functools import partial
from typing import Any

import pytest
from printed_rows import row

from gnnplan.papers import interpret
from gnnplan.papers.calibrate import scaled
from gnnplan.papers.figures import predict
from gnnplan.papers.interpret import question
from gnnplan.papers.question import Skip
from gnnplan.planner.cluster.spec import HOST_RATE
from gnnplan.planner.strategies import DataParallel, GSplit

P3 = row(
    "p3 p3_p100 ogbn-products sage 2x32 4x4 p3_push_pull",
    strategy_params={"batch": 1000, "fanout": [25, 10], "partitioner": "hash"},
)
SPLIT = row(
    "gsplit gsplit_p3_8xlarge orkut sage 3x256 1x4 gsplit",
    source="Table 3",
    strategy_params={"batch": 1024, "fanout": 15},
)
OTHERS = "testbed", "model", "hidden", "num_nodes", "gpus_per_node"
COUNTS = {**SPLIT, **dict.fromkeys(OTHERS, "")}


def told(row: dict[str, str], metric: str, **more: Any) -> float:
    return predict({**row, "metric": metric, **more})


CUT_BY_METIS = P3["strategy_params"].replace("hash", "metis")
P3S = ("dag_time_s", "copy_time_s", "compute_time_s")
GSPLITS = ("sample_time_s", "load_time_s", "forward_backward_time_s")
OF_P3 = ("dgl_data_parallel", "p3_push_pull", "p3_push_pull_nopipe")
OF_GSPLIT = (
    "dgl_data_parallel",
    "quiver",
    "p3star",
    *(f"gsplit{how}" for how in ("", "_edge", "_node", "_rand")),
)


@pytest.mark.parametrize(
    ("row", "parts", "strategy"),
    [*((P3, P3S, name) for name in OF_P3), *((SPLIT, GSPLITS, name) for name in OF_GSPLIT)],
)
def test_parts_are_their_epoch(row, parts, strategy):
    seconds = [told(row, metric, strategy=strategy) for metric in parts]
    assert min(seconds) > 0
    assert sum(seconds) == pytest.approx(told(row, "epoch_time_s", strategy=strategy))


def test_p3_counts_batches_by_trainer_and_gsplit_by_step():
    assert question({**P3, "metric": "epoch_time_s"}).problem.workload.batch == 16_000
    assert question({**SPLIT, "metric": "epoch_time_s"}).problem.workload.batch == 1024
    params = '{"batch": 1000, "fanout": [25, 10], "feature_dim": 50}'
    one = {"num_nodes": "4", "gpus_per_node": "", "hidden": "16", "strategy_params": params}
    asked = question({**P3, **one, "metric": "comm_volume_bytes"})
    assert asked.problem.stats.features == 50 and asked.problem.ranks == 4
    # P3 Sec. 3.2.2, forward only
    assert told(P3, "comm_volume_bytes", **one) == pytest.approx(3 * 24_703 * 16 * 4, rel=0.05)


def test_caches_are_in_the_memory_that_is_left():
    """GSplit Sec. 6.1: Orkut's features are cached, in P3* as columns; Friendster's do not fit."""
    quiver, split = (
        question({**SPLIT, "metric": "load_time_s", "strategy": name}).strategy
        for name in ("quiver", "gsplit")
    )
    assert isinstance(quiver, DataParallel) and quiver.shared_cache and isinstance(split, GSplit)
    assert split.cache == 3_072_441 * 512 * 4 // 4 + 1 and split.structure == "spread"

    def loaded_s(strategy: str, dataset: str = "orkut") -> float:
        return told(SPLIT, "load_time_s", strategy=strategy, dataset=dataset)

    assert 50 * loaded_s("gsplit") < loaded_s("dgl_data_parallel")
    for dataset, low, high in (("orkut", 0.0, 0.1), ("friendster", 0.9, 1.1)):
        plain = loaded_s("dgl_data_parallel", dataset)
        assert low * plain < loaded_s("p3star", dataset) < high * plain


def test_edges_between_owners():
    """GSplit Sec. 6.3: three quarters of a random split's; METIS leaves fewer."""
    row = {**COUNTS, "num_nodes": "1", "gpus_per_node": "4"}
    assert told(row, "cross_edge_ratio", strategy="gsplit_rand", dataset="ogbn-papers100M") == 0.75
    assert told(row, "cross_edge_ratio", dataset="ogbn-papers100M") == pytest.approx(0.05, abs=0.05)
    assert 0.1 < told(row, "cross_edge_ratio", dataset="orkut") < 0.75


def test_constants_of_code_host_and_sampler():
    row = {**SPLIT, "metric": "epoch_time_s", "strategy": "dgl_data_parallel"}
    plain, slower = interpret.testbed(row), scaled(row, {"host": 0.5, "code": 0.5, "sampler": 0.5})
    assert plain.device.launch > 0 and slower.device.launch == 2 * plain.device.launch
    assert slower.host.bandwidth == plain.host.bandwidth / 2
    assert slower.device.gemm == plain.device.gemm / 2
    assert slower.host_rates == {work: rate / 2 for work, rate in plain.host_rates.items()}
    assert scaled(P3, {"sampler": 0.5}).host_rates == {"draw": HOST_RATE / 2, "lay": HOST_RATE / 2}
    for factor in ("host", "code", "sampler"):
        assert predict(row, partial(scaled, factors={factor: 0.5})) > predict(row)


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"model": "sgcn", "hidden": ""}, "partial sums"),
        ({"model": "gat", "hidden": ""}, "hidden is not stated"),
        ({"strategy": "dgl_data_parallel", "strategy_params": CUT_BY_METIS}, "METIS"),
    ],
)
def test_what_is_not_stated(more, why):
    with pytest.raises(Skip, match=why):
        told(P3, "epoch_time_s", **more)
    assert told(P3, "dag_time_s", model="sgcn", hidden="") > 0
