"""The whole training: whether to distribute at all, on the full graph or on mini-batches."""

import json
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from examples import NIGHT
from pairwise import at_night

import gnnplan
from gnnplan.api.simulation import Playing
from gnnplan.planner.decision.objective import (
    NEAR,
    START_S,
    USUAL_PRICE,
    WAITING,
    Epochs,
    epochs_by_mode,
)
from gnnplan.planner.decision.plan import read
from gnnplan.planner.evidence.runs import objective_of
from gnnplan.planner.graph.load import load
from gnnplan.planner.ownership.estimated import expected_frontier
from gnnplan.planner.vocabulary.files import quoted
from gnnplan.planner.vocabulary.units import show_long
from gnnplan.simulator.replay import MOST_TASKS

ARXIV = ("ogbn-arxiv", "dgx_a100")  # two servers of eight
ONE_SERVER = "dgx_a100?servers=1"


@cache
def planned(graph: str, cluster: str, **fields: Any) -> gnnplan.Plan:
    return gnnplan.plan(graph, cluster, **fields)


@pytest.mark.slow
def test_a_small_graph_is_not_distributed():
    """The answer was all GPUs, to save 7.7 ms of an epoch."""
    plan = planned("ogbn-arxiv", ONE_SERVER)
    assert plan.best.gpus == 1 and plan.best.exact
    answer = plan.document["summary"]["answer"]
    assert answer.startswith("one NVIDIA A100 40GB is enough: 50 epochs of mini-batches in ")
    assert "; 8 would save " in answer and " times the GPU hours; 500 epochs of the f" in answer
    assert str(plan).index("answer:") < str(plan).index("use: ")


@pytest.mark.parametrize(
    ("graph", "cluster"),
    [
        ("friendster", "gsplit_p3_8xlarge?servers=1&gpus_per_server=1"),
        at_night("friendster", "gsplit_p3_8xlarge?servers=1&gpus_per_server=2"),
        at_night("friendster", "dgx_a100"),
        at_night("ogbn-papers100M", "dgx_a100"),
        at_night("friendster", "l4_box"),
    ],
)
@pytest.mark.slow
def test_a_large_graph_trains_on_mini_batches(graph, cluster):
    """The answer was a lossy strategy for the full graph, though everyone samples there."""
    plan = planned(graph, cluster)
    assert plan.workload.mode == "mini" and plan.best.exact
    assert plan.document["summary"]["answer"].count("mini-batches") == 1
    assert "frontiers are estimated" in plan.document["summary"]["inputs"]
    # surely: the full graph takes many times as long, however many epochs in doubt
    full, mini = (
        min((r["training_s"] for r in plan.document["sizes"] if r["mode"] == mode), default=np.inf)
        for mode in ("full", "mini")
    )
    assert full > 2 * mini


@pytest.mark.slow
def test_one_table_has_both_modes_and_all_sizes_with_the_whole_training():
    plan = planned("ogbn-arxiv", ONE_SERVER)
    rows = plan.document["sizes"]
    assert [(row["mode"], row["gpus"]) for row in rows] == [
        (mode, gpus) for mode in ("full", "mini") for gpus in (1, 2, 4, 8)
    ]
    for row in rows:
        assert row["training_s"] == pytest.approx(row["epochs"] * row["epoch_s"])
        assert row["gpu_hours"] == pytest.approx(row["gpus"] * row["training_s"] / 3600)
        assert row["joules"] == pytest.approx(400 * row["gpus"] * row["training_s"])
        assert row["training_low_s"] < row["training_s"] < row["training_high_s"]
    (chosen,) = (row for row in rows if row["recommended"])
    assert chosen["strategy"] == plan.best.strategy and chosen["gpus"] == plan.best.gpus
    # a run trains the epochs that the plan counts
    assert plan.workload.epochs == plan.document["epochs"]["mini"]["usual"] == 50
    assert plan.best.counted["training_s"] == pytest.approx(50 * plan.best.epoch_s)
    html = plan._repr_html_()
    assert html.count("<tr>") == 1 + len(rows) and "use this" in html and "fastest" in html


@pytest.mark.slow
@pytest.mark.parametrize(
    ("graph", "cluster"),
    [("ogbn-arxiv", ONE_SERVER), at_night("friendster", "dgx_a100")],
)
def test_the_smallest_size_within_a_tenth_of_the_best_value_is_named(graph, cluster):
    plan = planned(graph, cluster)
    rows = [row for row in plan.document["sizes"] if row["mode"] == "mini"]

    def value(row: dict[str, Any]) -> float:
        return float((row["training_s"] + START_S) * (WAITING + row["gpus"] * USUAL_PRICE))

    least = min(map(value, rows))
    near = [row["gpus"] for row in rows if value(row) <= (1 + NEAR) * least]
    assert plan.best.gpus == min(near)
    assert graph != "friendster" or min(near) < max(near)
    (chosen,) = (row for row in rows if row["recommended"])
    assert plan.best.counted["value"] == pytest.approx(value(chosen) / 3600)
    if NIGHT:  # all GPUs are the fastest, and are asked for by name
        assert planned(*ARXIV, objective="time").best.gpus == 16


@pytest.mark.slow
def test_a_price_decides_how_many_gpus_are_worth_it():
    """Servers are rented whole, so one of eight GPUs costs as much as all."""
    free = planned("ogbn-arxiv", ONE_SERVER)
    rented = planned("ogbn-arxiv", f"{ONE_SERVER}&price=2.50", mode="full")
    assert free.best.gpus == 1 and 1 <= rented.best.gpus <= 8
    by_gpus = {row["gpus"]: row for row in rented.document["sizes"]}
    assert by_gpus[1]["gpu_hours"] == pytest.approx(by_gpus[1]["training_s"] / 3600)
    assert by_gpus[1]["dollars"] == pytest.approx(8 * 2.5 * by_gpus[1]["gpu_hours"])
    assert "take 0." not in str(rented)  # fewer hours on more GPUs would contradict the answer
    assert "cheapest" in str(rented) and "cheapest" not in str(free)


@pytest.mark.nightly
def test_cheap_gpus_may_idle():
    longer: dict[str, Any] = {"mode": "mini", "epochs": 2000}
    pairs = "dgx_a100?gpus_per_server=2&servers=16"
    used = [
        planned("ogbn-papers100M", f"{pairs}&price={price}", **longer).best.gpus
        for price in (0.05, 2.5, 100)
    ]
    assert used == sorted(used, reverse=True) and used[0] > used[-1]


def test_epochs_are_the_users_or_those_of_print_with_doubt():
    asked = planned("ogbn-arxiv", "l4_box", mode="full", epochs=200).document
    (row,) = (row for row in asked["sizes"] if row["recommended"])
    assert row["epochs"] == 200 and asked["epochs"]["full"]["source"] == "as --epochs asks"
    assert {row["mode"] for row in asked["sizes"]} == {"full"}
    printed = epochs_by_mode("ogbn-arxiv", None, None)
    assert (printed["full"].usual, printed["mini"].usual) == (500, 50)
    assert "ogbn-arxiv" in printed["full"].source and printed["full"].spread > 0.5
    elsewhere = epochs_by_mode("shop", None, None)
    assert "other graphs" in elsewhere["full"].source
    every = [float(row["epochs"]) for row in quoted("epochs.csv") if row["mode"] == "mini"]
    assert min(every) < elsewhere["mini"].usual < max(every)
    # asked without a mode, they are of the full graph, and mini-batches have the same share
    both = epochs_by_mode("ogbn-arxiv", 100, None)
    assert both["full"] == Epochs(100.0, 0.0, "as --epochs asks")
    assert both["mini"].usual == 10 and both["mini"].spread == printed["mini"].spread
    alone = epochs_by_mode("ogbn-arxiv", 100, "mini")
    assert (alone["full"].usual, alone["mini"].usual) == (1000, 100)
    assert all(row["source"].count(" at ") == 1 for row in quoted("epochs.csv"))


def test_a_forced_strategy_says_which_mode_is_meant():
    """--strategy gsplit was refused without --mode mini."""
    plan = planned(*ARXIV, strategy="gsplit")
    assert plan.workload.mode == "mini" and plan.best.gpus == 16
    assert {row["mode"] for row in plan.document["sizes"]} == {"mini"}


@pytest.mark.nightly
def test_a_mode_in_which_nothing_fits_is_said():
    plan = planned("ogbn-papers100M", "pipegcn_2080ti?host_memory=100GB")
    assert plan.workload.mode == "mini"
    assert "the full graph were refused" not in plan.document["summary"]["answer"]
    assert "the full graph is refused: nothing fits" in plan.document["summary"]["answer"]


def test_a_rule_that_no_strategy_of_a_mode_keeps_is_said_once():
    """ "mini-batches are refused: nothing fits" was all of Cora's; --mode mini said it 13 times."""
    rule = "a batch is at most the training vertices (batch: 1,024, training vertices: 140)"
    pair = "l4_box?gpus_per_server=2"
    answer = planned("cora", pair).document["summary"]["answer"]
    assert answer.endswith(f"mini-batches are refused: {rule}; use --batch 140")
    fitting = planned("cora", pair, mode="mini")
    assert fitting.workload.batch == 140 and "a batch has all 140" in " ".join(fitting.notes)
    with pytest.raises(gnnplan.Infeasible) as alone:
        planned("cora", pair, mode="mini", batch=1024)
    assert str(alone.value).startswith(f"nothing fits: {rule}")
    assert str(alone.value).count("a batch is") == 1


@pytest.mark.slow
def test_a_mode_that_one_gpu_cannot_have_says_why():
    """On one GPU, and with --exact, it said 'nothing fits' of batches that were too large."""
    source = "synthetic:community?vertices=200&edges=1000&features=8&classes=4"
    plan = gnnplan.plan(source, "h200", layers=2, hidden=8)
    assert "use --batch 120" in plan.document["summary"]["answer"]


def test_the_epoch_alone_is_one_option():
    plan = planned(*ARXIV, per="epoch")
    assert plan.best.gpus == 16 and plan.workload.mode == "full"
    assert plan.document["objective"] == "time" and "sizes" not in plan.document
    assert "fastest" in plan.document["summary"]["sure"] and "leaders" in str(plan)


@pytest.mark.slow
def test_the_objective_of_a_written_plan_is_read_again(tmp_path):
    plan = planned("ogbn-arxiv", ONE_SERVER)
    plan.write(tmp_path / "plan.json")
    document = read(tmp_path / "plan.json")
    assert document["sizes"] == json.loads(json.dumps(plan.document["sizes"]))
    again = objective_of(document)
    assert again.of == "value" and again.epochs_by_mode == epochs_by_mode("ogbn-arxiv", None, None)
    other = gnnplan.load_plan(tmp_path / "plan.json").choose("NEXT")
    assert "sizes" not in other.document and "answer" not in other.document["summary"]
    if NIGHT:
        swept = plan.sweep({"device.memory": ["20GB", "36GB"]})
        assert [row["gpus"] for row in swept.rows] == [1, 1]


@pytest.mark.slow
def test_a_scale_counts_the_whole_training_too():
    found = gnnplan.scale("ogbn-arxiv", ONE_SERVER, gpus=[1, 2, 8])
    assert found.best == 1 and found.fastest == 8
    assert "use 1 GPU on mini-batches with data_parallel" in str(found)
    assert str(found).count("to the end; do not distribute") == 1
    saved = show_long(found.rows[0]["training_s"] - found.rows[-1]["training_s"])
    assert f"2 GPUs and more are not worth their price: 8 GPUs would save {saved}" in str(found)
    assert all(r["training_s"] == pytest.approx(r["epochs"] * r["epoch_s"]) for r in found.rows)


def test_a_simulation_says_what_no_longer_fits():
    """A device of 100 MB changed nothing: the plan needs 1.4 GB."""
    plan = planned(*ARXIV, strategy="graph_parallel")
    played = plan.simulate(overrides={"device.memory": "100MB"})
    assert "it would not run there: graph_parallel needs " in str(played)
    assert "has 100.00 MB" in played.document["too_little"]
    assert played.document["simulated"] == plan.simulate().document["simulated"]
    assert plan.simulate().document["too_little"] == ""


@pytest.mark.slow
def test_a_sweep_names_the_variant_that_it_plays():
    """18.1 ms of graph_parallel were 14.5 ms under its name: those of another variant."""
    swept = planned(*ARXIV, strategy="graph_parallel", per="epoch").sweep({"servers": [4]})
    (more,) = swept.rows
    assert more["plan"] == "graph_parallel(narrow=True)" and more["plan"] in str(swept)


def test_an_epoch_that_is_too_long_to_play_is_told_so():
    """--steps 1 was refused with 'use --steps 1 or less'."""
    playing = Playing(steps=1, jitter=0.0, stragglers={}, repetitions=20, seed=0)
    with pytest.raises(gnnplan.SpecError, match="are played, so not even --steps 1; take the plan"):
        playing.must_be_short(MOST_TASKS + 1)
    with pytest.raises(gnnplan.SpecError, match="use --steps 1 or less"):
        replace(playing, steps=2).must_be_short(MOST_TASKS)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"per": "year"}, "--per 'year' is unknown; allowed: training, epoch"),
        ({"per": "epoch", "objective": "value"}, "--objective value weighs a whole training"),
        ({"per": "training", "target_accuracy": 0.9}, "--per training and --target-accuracy 0.9"),
        ({"objective": "speed"}, "'speed' is unknown; allowed: value, time, cost, energy"),
        ({"epochs": 0}, "--epochs: must be greater than or equal to 1"),
    ],
)
def test_contradictions_are_told(options, told):
    with pytest.raises(gnnplan.SpecError, match=told):
        gnnplan.plan(*ARXIV, **options)


GRAPHS = "squirrel flickr ogbn-arxiv reddit yelp ogbn-products orkut ogbn-papers100M friendster uk-2006-05"
CLUSTERS = ("l4_box", "dgx_a100?servers=8", "dgx_h100?servers=2", "p3_p100")


@pytest.mark.nightly
@pytest.mark.parametrize("cluster", CLUSTERS)
@pytest.mark.parametrize("graph", GRAPHS.split())
def test_no_more_than_a_server_where_one_gpu_takes_minutes(graph, cluster):
    plan = planned(graph, cluster)
    alone = [row["training_s"] for row in plan.document["sizes"] if row["gpus"] == 1]
    if alone and min(alone) < 600:
        assert plan.best.gpus <= 8


def test_a_graph_that_is_known_as_directed_says_so():
    """Help says that graphs are made undirected, and of web graphs links are known one way only."""
    told = load("uk-union").notes
    assert any("with its edges' direction only (5,507,679,822)" in note for note in told)
    assert len(load("uk-union", directed=True).notes) == len(load("reddit").notes) == 1


def test_ogbn_papers100m_has_citations_both_ways():
    """It was the directed graph, whose batches reach a sixth of the 671,260 rows of GraphBolt's."""
    both, once = load("ogbn-papers100M"), load("ogbn-papers100M", directed=True)
    assert both.edges == pytest.approx(2 * once.edges, rel=0.002) and once.directed
    assert not both.directed and len(both.notes) == len(once.notes) == 1
    rows = [expected_frontier(stats, 1024, (10, 10, 10)).rows[0] for stats in (both, once)]
    assert rows[0] == pytest.approx(671e3, rel=0.05) and rows[1] < rows[0] / 6
