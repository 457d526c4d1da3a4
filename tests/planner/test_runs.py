"""One run against its prediction, and many: errors, rankings and regret by hand, and a refit that finds
what was made slower. Then numbers worked by hand, of places where other tests did not see the code
broken on purpose."""

import csv
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from math import exp
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from asked import changed

from gnnplan.api.validation import simulated_cell, times
from gnnplan.papers.full_graph import InOrder
from gnnplan.planner.cluster import scaling as scaled
from gnnplan.planner.cluster.cost import Cost
from gnnplan.planner.cluster.spec import HOST_RATE, Cluster, Link
from gnnplan.planner.decision.candidate import MARGIN, Candidate, missed
from gnnplan.planner.decision.explain import turning_sentences
from gnnplan.planner.decision.search import SearchResult
from gnnplan.planner.evidence.runs import (
    Run,
    errors,
    noise,
    question_name,
    refit_cluster,
    same_shape,
    summarise,
)
from gnnplan.planner.evidence.validate import (
    compare_memory,
    diagnose,
    first_order_difference,
    per_operation,
    share_of_step,
)
from gnnplan.planner.graph.load import load
from gnnplan.planner.ownership.estimated import EstimatedLayout, Mixing
from gnnplan.planner.ownership.layout import Expansion
from gnnplan.planner.problem.inputs import read_cluster
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies import parse
from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.planner.vocabulary.schedule import (
    Collective,
    Compute,
    Label,
    Sampling,
    Schedule,
    Send,
    Task,
)
from gnnplan.planner.vocabulary.trace import Span, transfer_times
from gnnplan.simulator.noise import Noise, epochs
from gnnplan.simulator.player import TaskGraph
from gnnplan.testing.laws import GRAPHS, cluster, problem_of

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
    with (Path(__file__).parents[2] / "traces/quoted/measured.csv").open(newline="") as file:
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
        runs.append(run(name, float(planned.strategy.predict(there).epoch_s), hidden=hidden))
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


def row(name: str, predicted: float | None, measured: float, simulated: float = 1.0) -> Any:
    return {
        "operation": name,
        "predicted_s": predicted,
        "simulated_s": simulated,
        "measured_s": measured,
        "predicted_error": None if predicted is None else predicted / measured - 1,
        "simulated_error": simulated / measured - 1,
    }


def test_what_only_waits_has_no_cost():
    spans = [
        Span("wait:s0", "wait", 0, "compute", 0.0, 5.0),
        Span("receive:f:c0:p1:s0", "receive", 0, "receive", 0.0, 5.0),
        Span("forward:l1:s0", "forward", 0, "compute", 5.0, 6.0),
    ]
    assert per_operation(spans, range(1)) == {"forward": 1.0}


def test_a_computation_counts_by_its_slowest_rank_and_median_step():
    spans = [
        Span(f"forward:l{layer}:s{step}", "forward", rank, "compute", 0.0, seconds, 0, step)
        for step, scale in ((0, 1.0), (1, 10.0), (2, 2.0))
        for layer in (1, 2)
        for rank, seconds in ((0, 1.0 * scale), (1, 3.0 * scale))
    ]
    # 6, 60 and 12 seconds of rank 1
    assert per_operation(spans, range(3)) == {"forward": 12.0}


def test_memory_is_that_of_the_fullest_rank():
    """Of its data where all ranks count that, else of its process, libraries included."""
    memory = {"features": np.array([60, 100]), "runtime": np.array([1000, 1000])}
    ranks: list[dict[str, Any]] = [
        {"peak_bytes": 80, "peak_rss_bytes": 1000},
        {"peak_bytes": 50, "peak_rss_bytes": 2200},
    ]
    told = {"of": "data", "predicted_bytes": 100, "measured_bytes": 80}
    assert compare_memory(memory, ranks) == told | {"error": pytest.approx(0.25)}
    ranks[0]["peak_bytes"] = None
    told = {"of": "process", "predicted_bytes": 1100, "measured_bytes": 2200}
    assert compare_memory(memory, ranks) == told | {"error": pytest.approx(-0.5)}


def test_a_small_operation_that_is_far_off_is_seen():
    """Errors were in per cent of the step: 30 times too long stood there as '+0%'."""
    step = row("step", 99.0, 100.0, simulated=99.0)
    operations = [row("update", None, 20.0), row("all_reduce", 3.0, 0.1)]
    told = {"replayed": False, "step": step, "operations": operations}
    _, update, cells = times(told, "epoch").rows
    assert cells[:5] == ["all_reduce", "3.00 s", "100.0 ms", "30x too long", "0 %"]
    assert update[1:5] == ["-", "20.00 s", "-", "20 %"]
    assert simulated_cell(step) == "" and simulated_cell(row("loss", 2.0, 2.0)) == "1.00 s"


def test_errors_are_weighed_by_the_step():
    assert share_of_step(row("update", 2.0, 1.0), row("step", 9.0, 10.0)) == 0.1
    assert share_of_step(row("update", None, 1.0), row("step", 9.0, 10.0)) is None


# operations: predicted, measured and, if not 1, simulated seconds -> what the diagnosis says
DIAGNOSES = """
step 105 100; all_reduce 5 1; forward 40 45 -> the prediction holds: no operation is off by more than 10 % of the step
step 80 100; all_reduce 5 1; forward 40 55 -> the prediction of `forward` is off most (-27 %, that is -15 % of the step): its cost, not its volume or order: the machine's pace or its constants; run `gnnplan measure`
step 77 100 77; halo:b 26 5; all_reduce 3 9.9 -> no operation is predicted too short by more than 10 % of the step, but the step is -23 % off: doubt its waiting and overlap
step 101 100; forward 40 55; backward 60 45 -> (-27 %, that is -15 % of the step): its cost, not its volume or order; the step itself is +1 % off
step 50 100 95; forward 40 40 -> but the step is -50 % off: the simulation has it right, so the closed form lacks waiting or contention; go by `gnnplan simulate`
step 82 100 82; forward 40 49; backward 42 51 -> no operation is off by more than 10 % of the step, but the step is -18 % off: many are, -18 % together: the machine's pace or its constants; run `gnnplan measure`
step 50 100 50; forward 40 40 -> but the step is -50 % off: doubt its waiting and overlap, not the cost of an operation
"""


@pytest.mark.parametrize("case", DIAGNOSES.strip().splitlines())
def test_the_diagnosis(case):
    """What is hidden behind computation is no reason why a step took longer."""
    told, words = case.split(" -> ")
    each = [one.split() for one in told.split("; ")]
    step, *rows = (row(name, *map(float, seconds)) for name, *seconds in each)
    assert words in diagnose(step, rows, volume_equal=True, disorder=None, same_device=True)


def test_volume_is_doubted_before_order_and_order_before_cost():
    step, rows = row("step", 9.0, 1.0), [row("forward", 9.0, 1.0)]
    disorder = "rank 0, lane comm, place 0: planned a, recorded b"

    def found(volume_equal: bool, disorder: str | None, same_device: bool) -> str:
        same = {"volume_equal": volume_equal, "same_device": same_device}
        return diagnose(step, rows, disorder=disorder, **same)

    assert found(False, disorder, False).startswith("the bytes counted")
    other = f"operations ran in another order than scheduled: {disorder}"
    assert found(True, disorder, False).startswith(other)
    assert found(True, None, False).startswith("volume and order are as planned")
    assert found(True, None, True).startswith("the prediction of `forward` is off most (9.0x")


@pytest.mark.parametrize(
    ("recorded", "disorder"),
    [
        (("forward:s0", "loss:s0"), None),
        (("loss:s0", "forward:s0"), "place 0: planned forward:s0, recorded loss:s0"),
        (("forward:s0",), "planned 2 operations, recorded 1"),
        (("forward:s0", "loss:s0", "update:s0"), "planned 2 operations, recorded 3"),
    ],
)
def test_a_lane_records_all_that_is_planned_and_nothing_else(recorded, disorder):
    tasks = [Task(Label(op, 0), 0, "compute", Compute()) for op in ("forward", "loss")]
    spans = [
        Span(label, label.partition(":")[0], 0, "compute", float(i), i + 1.0)
        for i, label in enumerate(recorded)
    ]
    found = first_order_difference(Schedule(1, 1, tasks), spans, 1)
    assert found is None if disorder is None else disorder in str(found)


def test_small_operations_do_not_stand_beside_the_step():
    """`loss` and `update`, off by 100 % and more, had as much weight as the epoch."""
    operations = [row("forward", 0.5, 0.6), row("loss", 0.03, 0.01), row("update", 0.001, 0.01)]
    step = row("step", 1.0, 1.0)
    table = times({"replayed": False, "step": step, "operations": operations}, "epoch")
    assert [cells[0] for cells in table.rows] == ["epoch", "forward", "2 small ones"]
    assert table.rows[2][1:3] == ["31.0 ms", "20.0 ms"]
    one = times({"replayed": False, "step": step, "operations": operations[:2]}, "epoch")
    assert one.rows[2][0] == "loss"


TWO_SERVERS = cluster(2, 1)


def problem(where: Cluster, **workload: Any) -> Problem:
    return problem_of(GRAPHS[1], where, **workload)


@pytest.mark.parametrize(
    ("servers", "told"), [(2, "sage 3x256, 2x1 at 400 Mbit/s"), (1, "sage 3x256, 1x2")]
)
def test_a_question_names_its_link_in_bits(servers, told):
    """50 MB/s are 400 Mbit/s."""
    where = cluster(servers, 2 // servers, inter=50e6)
    assert question_name(problem(where, model="sage", layers=3, hidden=256)).endswith(told)


def test_the_95th_percentile_of_three_errors():
    """Errors 0, 0.1 and 0.2: 0.95 of the way from the first to the last is 1.9 steps of two."""
    found = errors([(1.0, 1.0), (1.1, 1.0), (0.8, 1.0)])
    assert found == pytest.approx({"n": 3, "mean": 0.1, "p95": 0.19, "max": 0.2})


@dataclass(frozen=True)
class Timed:
    """A strategy of which nothing but the time is known: of one GB/s, and by the bandwidth."""

    name: str
    fixed_s: float
    sent: float  # [B] between servers
    exact = True
    family = "timed"

    def epoch_s(self, problem: Problem) -> Any:
        link = problem.cluster.inter_node
        assert link
        return self.fixed_s + self.sent / link.bandwidth

    def predict(self, problem: Problem) -> Any:
        return SimpleNamespace(epoch_s=self.epoch_s(problem))

    def __str__(self) -> str:
        return self.name


def test_the_bandwidth_below_which_another_strategy_wins():
    """At 1 GB/s one takes 1 s and the other 1.999 s; at half of it the first takes 2 s."""
    where = changed(TWO_SERVERS, ranges={"inter_node.bandwidth": (1.0, 1.0)})
    asked = problem(where, mode="mini", batch=10, fanout=(2, 2), layers=2)
    candidates = [
        Candidate(strategy, strategy.predict(asked), asked)
        for strategy in (Timed("chatty", 0.0, 1e9), Timed("silent", 1.999, 0.0))
    ]
    assert turning_sentences(SearchResult(asked, candidates))[:2] == [
        "twice the bandwidth between servers: -50 %",
        "below 0.5x of the bandwidth between servers (500.00 MB/s, now 1.00 GB/s) silent wins",
    ]


FIFTH = Mixing(((2, 0.2),))  # a fifth of the edges lead anywhere, the others stay in their part
OF_FOUR = 500 * (1 - exp(-4 / 2))
FIRST = 500 * (1 - exp(-1))  # 1 of a row's 10 edges leads to the other 500 rows


def test_rows_outside_have_their_neighbours_outside_when_surroundings_grow():
    """8 of 10 edges of a row outside stay there, and 2 lead anywhere."""
    layout = EstimatedLayout(1000, 10_000, (0, 1), 2, 0, 2, mixing=FIFTH)
    assert layout.region(1) == pytest.approx(500 + FIRST)
    second = (500 - FIRST) * (1 - exp(-(FIRST * 8 / 500 + FIRST * 2 / 1000)))
    assert layout.region(0) == pytest.approx(500 + FIRST + second)


@pytest.mark.parametrize(
    ("layout", "first", "drawn", "rel"),
    [
        (partial(EstimatedLayout, mixing=FIFTH), FIRST, 5, 0.01),
        # GraNNDis' code samples before it splits, servers share vertices at random
        (partial(InOrder, targets=500.0, metis=FIFTH, drawn=4.0), OF_FOUR, 4, 1e-3),
    ],
    ids=["ours", "granndis"],
)
def test_sampling_finds_most_neighbours_of_rows_outside_outside(layout, first, drawn, rel):
    """From the second hop on 9 of 10 neighbours are outside, of which 5 are drawn."""
    for hops, rows in ((1, first), (2, first + (500 - first) * (1 - exp(-first * drawn / 500)))):
        # all that a server may have: many layers reach it
        of_20 = layout(1000, 10_000, (0, 1), 20, 0, 0, Expansion(hops, 5, 0))
        assert of_20.region(0) - 500 == pytest.approx(rows, rel=rel)


@pytest.mark.parametrize(("straggler", "seconds"), [(0, 3.0), (1, 6.0)])
def test_a_stragglers_sampler_is_slow_too(straggler, seconds):
    """Rank 0 draws for one second, rank 1 for two."""
    schedule = Schedule(2, 1)
    for rank in (0, 1):
        work = Sampling("draw", (rank + 1) * HOST_RATE)
        schedule.tasks.append(Task(Label("draw", 0), rank, "host", work))
    tasks = TaskGraph(schedule, Cost(TWO_SERVERS))
    taken = epochs(tasks, 1, Noise(stragglers={straggler: 3.0}), 1)
    assert np.allclose(taken, seconds)


def test_a_ring_sends_a_message_per_step():
    """Of 40,000 B, four ranks send 2 (4 - 1) messages of 10,000 B, at what such messages reach."""
    link = Link(bandwidth=1e9, latency=0.0, efficiency={1e3: 0.5, 1e6: 1.0})
    where = changed(cluster(1, 4), intra_node=link, all_reduce="ring")
    reached = 0.5 * 10 ** (np.log10(2) / 3)  # log-log between 1 kB and 1 MB
    seconds = Cost(where).all_reduce(40_000, (0, 1, 2, 3)).alone
    assert seconds == pytest.approx(6 * 10_000 / (1e9 * reached))


def test_loading_to_the_device_is_no_transfer_between_ranks():
    """Two ranks load at once, under one label; each load is its rank's own."""
    spans = [Span("load:s0", "load", rank, "copy", 0.0, 1.0 + rank, 8, 0) for rank in (0, 1)]
    assert transfer_times(spans) == {}
