"""Many runs: errors, rankings and regret by hand, and a refit that finds what was made slower."""

import csv
import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from asked import changed

from gnnplan.planner.cluster import scaling as scaled
from gnnplan.planner.cluster.spec import Cluster, Link
from gnnplan.planner.decision.candidate import MARGIN, Candidate, missed
from gnnplan.planner.evidence.runs import Run, errors, noise, refit_cluster, same_shape, summarise
from gnnplan.planner.graph.load import load
from gnnplan.planner.problem.inputs import read_cluster
from gnnplan.planner.strategies import parse
from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.planner.vocabulary.schedule import Collective, Send
from gnnplan.testing.laws import problem_of

TRACES = Path(__file__).resolve().parents[2] / "traces" / "quoted"
GRAPH = load("synthetic:community?vertices=600&edges=6000&features=32&classes=4&seed=0")
SLOW = Link(bandwidth=1e8, latency=20e-6)  # decides
CLUSTER = changed(read_cluster("gnnpipe_a5000"), servers=2, gpus_per_server=2, inter_node=SLOW)


def run(
    strategy: str,
    measured: float,
    predicted: float | None = None,
    hidden: int = 16,
    epochs: Sequence[float] = (1.0,),
    operations: Sequence[dict[str, Any]] = (),
) -> Run:
    """A run as `gnnplan validate` tells of it."""
    problem = problem_of(GRAPH, CLUSTER, model="sage", hidden=hidden)
    chosen = parse(strategy).settle(problem)
    said = float(chosen.predict(problem).epoch_s) if predicted is None else predicted
    told = {
        "step": {"predicted_s": said, "simulated_s": said, "measured_s": measured},
        "operations": list(operations),
        "memory": {"of": "data", "predicted_bytes": 95.0, "measured_bytes": 100.0},
        "bytes": {"equal": True, "predicted": {"halo": 1, "all_reduce": 1}},
        "order": {"equal": strategy != "gnnpipe"},
    }
    lines = [{"epoch_s": epoch} for epoch in (0.0, 0.0, *epochs)]
    return Run.of(f"runs/{strategy}-{hidden}", Candidate.of(problem, chosen), told, lines)


def test_errors_are_of_what_was_measured():
    pairs = [(1.0, 2.0), (3.0, 2.0), (2.0, 2.0), (None, 1.0), (1.0, 0.0)]
    assert errors(pairs) == {"n": 3, "mean": pytest.approx(1 / 3), "p95": 0.5, "max": 0.5}
    assert errors([(None, 1.0)]) is None


def test_predictions_miss_as_plans_say_they_do():
    """Of the measured epochs that plans quote 80 % lie in the range that misses alone give.

    MISSES was found from these runs, so this holds the constant against its source. In later runs
    the ranges of plans held 92 % (docs/reference/measured-runs.md).
    """
    with (TRACES / "measured.csv").open(newline="") as file:
        rows = [(parse(r["strategy"]), r) for r in csv.DictReader(file)]
    inside = []
    for strategy, row in rows:
        factors = missed("cpu", strategy.family, strategy.exact)
        low, high = float(row["predicted_s"]) * np.quantile(factors, (MARGIN, 1 - MARGIN))
        inside.append(low <= float(row["measured_s"]) <= high)
    assert len(inside) == 146 and np.mean(inside) == pytest.approx(0.8, abs=0.05)


def test_regret_is_what_following_the_prediction_cost():
    runs = [run("graph_parallel", 1.2, 1.0), run("pipegcn", 1.0, 1.1), run("gnnpipe", 3.0, 2.0)]
    told = summarise(runs)
    [one] = told["rankings"]
    expected = {"choice": "graph_parallel", "fastest": "pipegcn", "strategies": 3, "right": False}
    assert expected.items() <= one.items()
    # two of three pairs in order
    assert one["regret"] == pytest.approx(0.2) and one["tau"] == pytest.approx(1 / 3)
    regret = one["regret"]
    mean = {"questions": 1, "tau": one["tau"], "regret": regret, "worst_regret": regret}
    assert told["ranking"] == mean | {"right": 0.0}
    assert (told["bytes_equal"], told["order_equal"]) == (3, 2)
    assert told["memory"]["mean"] == pytest.approx(0.05)


def test_what_ran_twice_is_ranked_by_its_medians_and_is_noise():
    """Each run was planned with its own constants: neither is more of a prediction."""
    seconds = {"graph_parallel": [(1.0, 0.8), (1.2, 1.4)], "pipegcn": [(1.05, 1.0)] * 2}
    runs = [run(name, *pair) for name, pairs in seconds.items() for pair in pairs]
    [one] = summarise(runs)["rankings"]
    # 1.0 before 1.1, 1.05 before 1.1
    assert (one["choice"], one["fastest"]) == ("pipegcn", "pipegcn")
    assert noise(runs) == pytest.approx((0.2 / 2**0.5 / 1.1 + 0.0) / 2)


def test_questions_are_not_mixed_and_one_strategy_is_no_ranking():
    other = [run("pipegcn", 1.0, 1.0, hidden=32), run("pipegcn", 1.1, 1.0, hidden=32)]
    told = summarise([run("graph_parallel", 1.0, 1.0), run("pipegcn", 2.0, 2.0), *other])
    [one] = told["rankings"]
    assert "sage 3x16, 2x2" in one["question"]
    assert one["tau"] == 1.0 and told["ranking"]["right"] == 1.0


def test_predictions_that_are_alike_have_no_order_and_the_document_is_json():
    """Kendall's tau of them is no number, which JSON does not have."""
    alike = [run("pipegcn", 1.0, 1.0), run("pipegcn_f", 1.1, 1.0)]
    told = summarise(alike)
    assert told["rankings"][0]["tau"] is None and told["ranking"]["tau"] is None
    ordered = [run("graph_parallel", 1.0, 1.0, hidden=32), run("pipegcn", 2.0, 2.0, hidden=32)]
    both = summarise([*alike, *ordered])
    assert both["ranking"]["tau"] == 1.0 and both["ranking"]["questions"] == 2
    json.dumps([told, both], allow_nan=False)


@pytest.mark.parametrize(
    ("mini", "names", "moved"),
    [
        (
            {"mode": "mini", "batch": 60, "fanout": (4, 4), "layers": 2},
            ("gsplit", "p3", "data_parallel(cache=1000,features='spread',structure='spread')"),
            {"ids", "ask_edges", "fetch", "pull"},
        ),
        ({"layers": 4}, ("graph_parallel", "gnnpipe(stages=2,chunks=4)"), {"pipeline", "halo"}),
    ],
    ids=["mini", "full"],
)
def test_every_transfer_of_a_schedule_is_one_when_constants_are_doubted(mini, names, moved):
    problem, everything = problem_of(GRAPH, CLUSTER, model="sage", hidden=16, **mini), set()
    for name in names:
        strategy = parse(name).settle(problem)
        tasks = strategy.schedule(problem, 1).tasks
        sent = {task.label.op for task in tasks if isinstance(task.work, Send | Collective)}
        assert sent == set(strategy.predict(problem).bytes)
        everything |= sent
    assert moved <= everything


def test_noise_is_that_of_repeated_runs_or_of_a_median():
    once = run("graph_parallel", 5.0, epochs=(1.0, 9.0))
    again = [run("pipegcn", 0.9), run("pipegcn", 1.1), once]
    assert noise(again) == pytest.approx(0.1 * 2**0.5)
    of_epochs = noise([run("pipegcn", 1.0, epochs=[1.0, 2.0, 3.0, 4.0, 5.0])])
    assert of_epochs == pytest.approx(1.25 * 2 / 1.35 / 5**0.5 / 3)
    twice = [run("graph_parallel", measured, 1.0) for measured in (1.1, 1.3)]
    within = summarise([*twice, run("pipegcn", 1.1, 1.2)])
    [one] = within["rankings"]
    assert one["within_noise"] and not one["right"] and within["ranking"]["right"] == 1.0


def test_doubt_falls_on_what_took_longer():
    rows = [
        {"operation": "forward", "predicted_s": 1.0, "simulated_s": 1.0, "measured_s": 1.1},
        {"operation": "halo:f", "predicted_s": 1.0, "simulated_s": 1.0, "measured_s": 3.0},
    ]
    first, second = summarise([run("graph_parallel", 5.0, operations=rows)])["doubt"]
    assert (first["constant"], first["slower"]) == ("between", 3.0)
    assert first["share"] == pytest.approx(0.4)
    assert second["constant"] == "computation" and second["share"] == pytest.approx(0.02)


@pytest.mark.slow
def test_a_refit_finds_what_is_slower_and_is_scored_on_other_questions():
    """The truth: half the computation, a third of the link between servers."""
    slow = scaled.messages(scaled.device(CLUSTER, 0.5), 1 / 3, "inter_node")
    names = "graph_parallel", "pipegcn", "granndis(depth=1)", "gnnpipe(stages=2,chunks=4)"
    runs = []
    for hidden, name in product((16, 256), names):
        planned = run(name, 1.0, hidden=hidden).planned
        there = replace(planned.problem, cluster=slow)
        truth = float(planned.strategy.predict(there).epoch_s)
        runs.append(run(name, truth, hidden=hidden))
    cluster, report = refit_cluster(runs)
    factors = report["factors"]
    assert factors["computation"] == pytest.approx(0.5, rel=0.05)
    assert factors["between"] == pytest.approx(1 / 3, rel=0.05)
    assert report["before"]["mean"] > 0.3 and report["after"]["max"] < 0.03
    assert not set(report["fitted"]) & set(report["scored"])
    assert len(report["fitted"]) == len(report["scored"]) == 4
    assert cluster.device.gemm == pytest.approx(CLUSTER.device.gemm * factors["computation"])
    assert "refit on 4 runs" in next(iter(cluster.provenance.values()))


def test_a_refit_needs_one_cluster_and_two_runs():
    one = run("pipegcn", 1.0)
    with pytest.raises(SpecError, match="at least 2 runs"):
        refit_cluster([one])
    elsewhere = replace(one.planned.problem, cluster=read_cluster("dgx_a100"))
    other = replace(one, planned=replace(one.planned, problem=elsewhere))
    with pytest.raises(SpecError, match="planned on one cluster file, and these were on 2"):
        refit_cluster([one, other])


def test_other_constants_keep_the_run_s_servers():
    link = Link(bandwidth=1e9)
    alone = Cluster(servers=1, gpus_per_server=4, device=CLUSTER.device, intra_node=link)
    with pytest.raises(SpecError, match="no inter_node link"):
        same_shape(alone, CLUSTER)
    assert same_shape(alone.model_copy(update={"inter_node": link}), CLUSTER).ranks == 4
    # `validate --cluster dgx_a100` of two ranks was an IndexError, over the lists of eight GPUs
    other = same_shape(read_cluster("dgx_a100"), CLUSTER)
    gpus = range(CLUSTER.gpus_per_server)
    assert other.nics and all(gpu in gpus for nic in other.nics for gpu in nic)
