"""Training that was broken off and went on from its last checkpoint is, to the bit, the training that was not."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from ranks import Case, Ranks, Result

from gnnplan.executor.checkpoint import KEPT, Checkpoints, header, latest
from gnnplan.planner.errors import SpecError
from gnnplan.planner.trace import recorded_order

pytestmark = pytest.mark.timeout(110)

FULL = {"model": "sage", "layers": 3, "hidden": 6, "dropout": 0.3}
MINI = {"mode": "mini", "batch": 8, "fanout": "3,2", "layers": 2, "hidden": 6, "dropout": 0.3}
CASES = [
    Case("graph_parallel", "rough", FULL),
    Case("graph_parallel(narrow=True,checkpoint=True)", "rough", {**FULL, "model": "gcn", "norm": "batch"}),
    *(Case(name, "rough", FULL, staleness_errors=True) for name in ("pipegcn", "pipegcn_f", "pipegcn_g", "pipegcn_gf")),
    Case("pipegcn_gf", "rough", {**FULL, "model": "gcnii"}),
    Case("gnnpipe(stages=2,chunks=4)", "rough", FULL),
    Case("gnnpipe(stages=2,chunks=4,period=3,historical_gradients=True)", "rough", {**FULL, "model": "gat", "heads": 2}),
    Case("gnnpipe(stages=1,chunks=3)", "rough", {**FULL, "model": "gcnii"}),
    Case("granndis", "rough", FULL, servers=2),
    Case("granndis(max_hop=1,fanout=3,batches=3)", "rough", FULL, servers=2),
    Case("data_parallel(prefetch=2)", "rough", MINI),
    Case("data_parallel(cache=2KB)", "rough", MINI),
    Case("gsplit", "rough", MINI),
    Case("p3", "rough", MINI),
    Case("p3(pipelined=True)", "rough", MINI),
    Case("p3(pipelined=True,prefetch=2)", "rough", {**MINI, "model": "gat", "heads": 2}),
    Case("p3(pipelined=True)", "rough", {**MINI, "batch": 100}),  # one batch per epoch: batches under way are of several epochs
]  # fmt: skip


def same(broken: Result, unbroken: Result) -> None:
    """In weights, and in all that a run leaves but its times."""
    weights = unbroken.weights
    assert broken.weights.keys() == weights.keys() and all(torch.equal(broken.weights[name], p) for name, p in weights.items())
    timeless = [[{name: value for name, value in row.items() if name != "epoch_s"} for row in run.metrics] for run in (broken, unbroken)]
    assert timeless[0] == timeless[1]
    for rank in range(unbroken.world):
        one, other = broken.rank(rank), unbroken.rank(rank)
        assert len(one["rss_bytes"]) == one["epochs"] == other["epochs"]
        assert all(one[name] == other[name] for name in ("bytes", "setup_bytes", "rows", "staleness"))
        for lane in ("compute", "comm", "reduce"):
            assert recorded_order(broken.spans, rank, lane) == recorded_order(unbroken.spans, rank, lane)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.strategy}-{case.workload.get('model', 'gcn')}-{case.workload.get('batch')}")
def test_broken_off_and_resumed_is_unbroken(case: Case, run_ranks: Ranks, graphs: dict[str, str]) -> None:
    """Checkpoints of epochs 2 and 4, broken off after 5: the fifth is trained again."""
    case = replace(case, graph=graphs[case.graph])
    unbroken, broken = run_ranks(2, [replace(case, epochs=7), replace(case, epochs=5, checkpoint_every=2)])
    before = unbroken.weights
    assert not all(torch.equal(broken.weights[name], p) for name, p in before.items())  # there is something left to learn
    resumed = run_ranks(2, [replace(case, epochs=7, resume=str(broken.out))])[0]
    same(resumed, unbroken)
