"""What the best has least of: time, cost or energy, per epoch or until a measured accuracy."""

import json
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from nightly import every

from gnnplan.planner.cluster.scaling import DRAWS, RANGES
from gnnplan.planner.decision import plan
from gnnplan.planner.decision.candidate import evaluate_or_save_memory, placed
from gnnplan.planner.decision.objective import (
    PRIOR,
    SEED_SPREAD,
    EpochsOfRuns,
    Objective,
    Target,
    Training,
)
from gnnplan.planner.decision.plan import take
from gnnplan.planner.decision.search import Search, SearchResult, parts, search
from gnnplan.planner.decision.search import families as families_of
from gnnplan.planner.decision.sweep import scale
from gnnplan.planner.evidence.runs import trainings
from gnnplan.planner.gnn.workload import Workload
from gnnplan.planner.graph.load import load
from gnnplan.planner.problem.inputs import apply_overrides, read_cluster
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies import parse
from gnnplan.planner.vocabulary.errors import GnnplanError, SpecError
from gnnplan.testing.laws import GRAPHS

GRAPH = GRAPHS[0]
STATS = GRAPH.stats


def problem_of(*settings: str, **workload: Any) -> Problem:
    """On two servers of two GPUs unless the settings say otherwise."""
    small = ["islands=[[0, 1]]", "nics=[[0, 1]]", "gpus_per_server=2"]
    asked = Workload.model_validate({"layers": 2, "hidden": 16} | workload)
    there, asked = apply_overrides(read_cluster("dgx_a100"), asked, [*small, *settings])
    return Problem(STATS, GRAPH, asked, there)


def training(
    strategy: str = "graph_parallel",
    *accuracies: tuple[int, float],
    ranks: int = 2,
    graph: str = STATS.hash,
    **workload: Any,
) -> Training:
    asked = Workload.model_validate({"layers": 2, "hidden": 16} | workload)
    return Training(f"runs/{strategy}", graph, asked, parse(strategy), ranks, accuracies)


REACHED = ((10, 0.5), (20, 0.8), (30, 0.91))


@pytest.mark.parametrize(
    ("of", "one", "whole"),
    [
        ("cost", 2 * 0.001 * 10, 4 * 0.001 * 10),
        ("energy", 300 * 10, 4 * 300 * 10),
        ("time", 10, 10),
    ],
)
def test_cost_is_of_the_servers_that_are_rented_and_energy_of_the_gpus_that_train(of, one, whole):
    problem, strategy = problem_of("price=3.6", "device.power=300W"), parse("graph_parallel")
    for there, expected in ((problem.placed((0,)), one), (problem, whole)):
        assert Objective(of).value(there, strategy, 10.0) == pytest.approx(expected)


@pytest.mark.parametrize("of", every(3, ["energy", "cost", "time"]))
def test_no_part_of_the_gpus_has_a_candidate_with_less(of):
    """Of time fewer GPUs are rarely less, of energy often: parts are left out by the objective."""
    problem, objective = problem_of("price=2"), Objective(of)
    found = search(problem, objective=objective)
    least = np.inf
    for gpus in [tuple(range(problem.ranks)), *parts(problem.cluster)]:
        part = problem.placed(gpus)
        for strategy in (s for family in families_of(part) for s in family.candidates(part)):
            with suppress(GnnplanError):
                one = evaluate_or_save_memory(placed(part, strategy), strategy, objective)
                least = min(least, one.value)
    values = [candidate.value for candidate in found.ranked]
    assert values == sorted(values) and values[0] == pytest.approx(least)


@pytest.mark.slow
def test_the_least_energy_is_on_fewer_gpus_and_the_plan_says_how_much():
    assert frugal().best.problem.ranks == 1
    document = plan.make(frugal())
    best = document["best"]
    assert document["objective"] == "energy" and "target_accuracy" not in document
    assert best["energy_j"] == pytest.approx(400 * best["epoch_s"])
    assert best["energy_low_j"] < best["energy_j"] < best["energy_high_j"]
    assert all(a["energy_j"] >= best["energy_j"] for a in document["alternatives"])
    assert "cost" not in best and "time_to_accuracy_s" not in best
    assert "energy per epoch: " in document["summary"]["range"]
    assert "cheapest in energy" in document["summary"]["sure"]
    assert any("dearer in energy" in line for line in document["explanation"])
    assert "energy_j" not in plan.make(search(problem_of(), forced=parse("graph_parallel")))["best"]
    # another of its answers keeps what the objective counts
    taken = take(document, problem_of(), "NEXT")
    assert taken["best"]["energy_j"] == document["alternatives"][0]["energy_j"]


@cache
def frugal() -> SearchResult:
    return search(problem_of(), objective=Objective("energy"))


def test_the_power_is_doubted_as_its_source_says():
    """All candidates have the same GPUs, so the doubt widens the range and changes no choice."""
    found = frugal()
    sure = search(problem_of("device.power=400"), objective=Objective("energy"))
    best, same = found.best, sure.best
    factor = best.drawn / best.drawn_s / (400 * best.problem.ranks)
    assert np.quantile(factor, (0.1, 0.9)) == pytest.approx(RANGES["datasheet"], rel=0.02)
    assert same.drawn == pytest.approx(400 * same.problem.ranks * same.drawn_s)
    assert best.strategy == same.strategy and best.value == pytest.approx(same.value)
    assert found.certainty.chance_fastest == sure.certainty.chance_fastest


@pytest.mark.parametrize(
    ("runs", "usual"), [([(50, 60)], 55.5), ([(59, 60)], 60), ([(39, 40), (89, 90)], 60)]
)
def test_epochs_are_the_geometric_mean_of_runs_in_the_middle_of_evaluations(runs, usual):
    assert EpochsOfRuns.of(runs, "").usual == pytest.approx(usual)


def test_epochs_are_as_doubtful_as_runs_are_few_and_far_apart():
    alone, three, scattered, coarse = (
        EpochsOfRuns.of(runs, "a")
        for runs in (
            [(59, 60)],
            [(59, 60)] * 3,
            [(29, 30), (59, 60), (119, 120)],
            [(50, 60)],  # one of ten epochs, nobody knows which
        )
    )
    assert alone.spread == pytest.approx(SEED_SPREAD * 2**0.5)
    assert three.spread == pytest.approx(SEED_SPREAD * (PRIOR / (PRIOR + 2) * 4 / 3) ** 0.5)
    assert scattered.spread > three.spread and coarse.spread > alone.spread
    low, median, high = np.quantile(alone.drawn, (0.1, 0.5, 0.9))
    assert median == pytest.approx(60, rel=0.01)
    assert np.log(high / low) / 2 / 1.2816 == pytest.approx(alone.spread, rel=0.02)
    assert alone.drawn.shape == (DRAWS,) and EpochsOfRuns.of([(0, 1)], "a").drawn.min() >= 1
    assert "from 1 run, so how far seeds differ is assumed" in str(alone)
    assert str(three).startswith("60 (") and str(three).endswith("from 3 runs")


def test_runs_of_any_exact_strategy_count_for_all_and_those_of_lossy_ones_for_themselves():
    problem = problem_of()  # 4 ranks
    exact = training("gnnpipe(stages=2,chunks=1)", *REACHED, seed=1, epochs=30)
    target = Target(0.9, [exact, training("pipegcn", (10, 0.95), ranks=4)])

    def usual(strategy: str, there: Problem = problem) -> float | None:
        epochs = target.epochs(there, parse(strategy).settle(there))
        return round(epochs.usual, 9) if epochs else None

    assert usual("graph_parallel") == usual("granndis(depth=1)") == 25.5
    assert usual("graph_parallel", problem.placed((0,))) == 25.5
    assert usual("pipegcn") == usual("pipegcn(narrow=True)") == 5.5
    assert usual("pipegcn", problem.placed((0, 1))) is None  # fewer parts have less stale rows
    assert usual("pipegcn_gf") is usual("bns(p=0.1)") is None
    # exact ones draw the same epochs, so nothing but the epoch tells them apart
    drawn = [
        target.epochs(problem, parse(name)).drawn / target.epochs(problem, parse(name)).usual
        for name in ("graph_parallel", "granndis", "pipegcn", "pipegcn(narrow=True)")
    ]
    assert (drawn[0] == drawn[1]).all() and (drawn[2] == drawn[3]).all()
    assert abs(np.corrcoef(drawn[0], drawn[2])[0, 1]) < 0.3


@pytest.mark.parametrize(
    "other",
    [
        training("graph_parallel", *REACHED, graph="other"),
        training("graph_parallel", *REACHED, hidden=32),
        training("graph_parallel", *REACHED, lr=0.1),
        training("graph_parallel", *REACHED, mode="mini"),
    ],
)
def test_a_run_of_another_question_says_nothing(other):
    problem = problem_of()
    assert Target(0.9, [other]).epochs(problem, parse("graph_parallel")) is None
    with pytest.raises(SpecError, match="1 of another graph, model or options"):
        search(problem, objective=Objective(target=Target(0.9, [other])))
    # options of mini-batches do not matter to the full graph
    same = training("graph_parallel", *REACHED, batch=7, fanout=(3, 3), seed=5, epochs=7)
    assert Target(0.9, [same]).epochs(problem, parse("granndis"))


def test_a_run_that_trained_as_long_and_did_not_get_there_says_that_it_is_not_always_reached():
    got, problem = training("graph_parallel", *REACHED, seed=0), problem_of()
    stopped = training("graph_parallel", (10, 0.5), (20, 0.7), seed=1)
    stuck = training("graph_parallel", (10, 0.5), (30, 0.7), seed=1)
    strategy = parse("graph_parallel")
    told = Target(0.9, [got, stopped]).epochs(problem, strategy)
    assert told == EpochsOfRuns.of([(20, 30)], "full exact")
    assert Target(0.9, [got, stuck]).epochs(problem, strategy) is None
    both = Target(0.65, [got, stopped]).epochs(problem, strategy)
    assert both == EpochsOfRuns.of([(10, 20), (10, 20)], "full exact")
    # the same seed again is the same training
    again = training("gnnpipe(stages=2,chunks=1)", *REACHED, seed=0)
    both = Target(0.9, [got, again]).epochs(problem, strategy)
    assert both and both.runs == 1


def test_a_lossy_strategy_wins_where_runs_show_that_it_takes_less_time():
    """Without evidence an exact one is preferred; with it, epochs decide."""
    problem = problem_of("inter_node.bandwidth=0.01GB/s", hidden=256)
    exact = training("graph_parallel", *REACHED, hidden=256)
    slow = training("pipegcn", (100, 0.5), (600, 0.9), ranks=4, hidden=256)
    fast = training("pipegcn", (4, 0.5), (5, 0.9), ranks=4, hidden=256)
    for stale, wins in ((slow, False), (fast, True)):
        objective = Objective(target=Target(0.9, [exact, stale]))
        found = search(problem, may_use_fewer=False, objective=objective)
        assert (not found.best.strategy.exact) == wins
        assert "pipegcn" in {candidate.strategy.name for candidate in found.ranked}
    document = plan.make(found)
    best, summary = document["best"], document["summary"]
    assert document["target_accuracy"] == 0.9
    assert document["evidence"] == ["runs/graph_parallel", "runs/pipegcn"]
    assert best["epochs_to_accuracy"] == pytest.approx(5)
    assert best["time_to_accuracy_s"] == pytest.approx(5 * best["epoch_s"])
    for what in ("time_to_accuracy", "epoch"):  # of an epoch as ever
        assert best[f"{what}_low_s"] < best[f"{what}_s"] < best[f"{what}_high_s"]
    assert "to an accuracy of 0.9" in summary["cost"]
    assert "from 1 run, so how far seeds differ is assumed" in summary["range"]


def test_a_strategy_that_no_run_tells_of_is_rejected_as_not_covered():
    target = Target(0.9, [training("graph_parallel", *REACHED)])
    found = search(problem_of(), objective=Objective("energy", target))
    assert all(candidate.strategy.exact for candidate in found.ranked)
    assert dict(found.rejected)["pipegcn"].startswith(
        "not covered: no run given of it on 4 ranks shows in how many epochs it reaches a"
        " validation accuracy of 0.9"
    )
    best = found.best
    energy = 25.5 * 400 * best.problem.ranks * float(best.predicted.epoch_s)
    assert best.value == pytest.approx(energy)


PIPE = "gnnpipe(stages=2,chunks=1)"


@pytest.mark.parametrize(
    ("runs", "words"),
    [
        ([], r"\(0 runs given\).*gnnplan plan --exact"),
        ([], "gnnplan run first.json --epochs 80 --eval-every 5 --out runs/first"),
        (
            [training(*("graph_parallel", *REACHED))],
            "accuracy is 0.9100, in runs/graph_parallel.*run --resume runs/graph_parallel --epochs 60",
        ),
        ([training("pipegcn", (10, 0.99))], "pipegcn on 2 ranks.*gnnplan plan --exact"),
        # where another seed got there, the run that did not is the one to go on with
        (
            [training("graph_parallel", (9, 0.96)), training(PIPE, (9, 0), seed=1)],
            "gnnplan run --resume 'runs/gnnpipe",
        ),
    ],
)
def test_a_target_that_nothing_covers_is_told_with_the_runs_that_would(runs, words):
    with pytest.raises(SpecError, match=f"(?s){words}"):
        search(problem_of(epochs=80), objective=Objective(target=Target(0.95, runs)))


def test_a_target_without_a_run_of_the_strategy_or_without_the_graph_is_told_so():
    problem, none = problem_of(), Objective(target=Target(0.9, []))
    with pytest.raises(SpecError, match="gnnplan plan --strategy 'pipegcn'"):
        search(problem, forced=parse("pipegcn"), objective=none)
    unknown = Problem(load("flickr"), None, problem.workload, problem.cluster)
    with pytest.raises(SpecError, match="give the graph itself"):
        search(unknown, objective=none)


def test_sizes_are_compared_until_the_accuracy():
    problem = problem_of("price=2")
    target = Target(0.9, [training("graph_parallel", *REACHED)])
    plain = scale(problem, [1, 4], Search(exact=True))
    for of in ("time", "cost", "energy"):
        found = scale(problem, [1, 4], Search(exact=True, objective=Objective(of, target)))
        expected = [25.5 * size.time_s for size in plain.sizes]
        assert [size.time_s for size in found.sizes] == pytest.approx(expected)
        assert found.best.best.value == min(size.best.value for size in found.sizes)
        larger = [size for size in found.sizes if size.gpus > found.best.gpus]
        assert found.worse_from is (larger[0] if larger else None)
    assert found.best.gpus == 1  # energy: nobody else is needed


@cache
def planned(strategy: str) -> dict[str, Any]:
    return plan.make(search(problem_of(seed=3), forced=parse(strategy)))


def run_of(folder: Path, *rows: object, strategy: str = "graph_parallel") -> Path:
    """A run's folder with these lines of metrics.jsonl."""
    folder.mkdir(parents=True)
    plan.write(folder / "plan.json", planned(strategy))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_runs_are_read_from_their_folders_or_from_a_folder_of_folders(tmp_path):
    rows = [{"epoch": n, "val_accuracy": 0.1 * n if n % 2 else None} for n in (1, 2, 3)]
    one = run_of(tmp_path / "runs" / "one", *rows)
    with (one / "metrics.jsonl").open("a") as file:
        file.write('{"epoch": 4, "val_acc')  # killed as it wrote: runs need not be finished
    run_of(tmp_path / "runs" / "two", {"epoch": 1, "val_accuracy": None})
    (tmp_path / "runs" / "notes").mkdir()
    [read] = trainings([tmp_path / "runs", one])
    assert (read.folder, read.ranks, read.workload.seed) == (str(one), 4, 3)
    assert read.accuracies == ((1, 0.1), (3, pytest.approx(0.3)))
    assert read.graph == STATS.hash and read.strategy == parse("graph_parallel")
    assert read.reached(0.2) == (1, 3) and read.reached(0.9) is None


def test_a_run_is_evidence_of_the_plan_that_it_began_with(tmp_path):
    """Until another went on: what that reached says nothing of either."""
    rows = [{"epoch": n, "val_accuracy": 0.1 * n} for n in (1, 2, 3, 4)]
    run = run_of(tmp_path / "run", *rows, strategy="pipegcn")
    for until, strategy in ((2, "graph_parallel"), (3, "granndis")):
        kept = run_of(tmp_path / strategy, strategy=strategy) / "plan.json"
        kept.rename(run / f"plan.until{until}.json")
    [read] = trainings([run])
    assert read.strategy == parse("graph_parallel") and read.accuracies == ((1, 0.1), (2, 0.2))


@pytest.mark.parametrize("rows", [["text"], [{"epoch": 2}, {"epoch": 1}], [{"val_accuracy": 1.0}]])
def test_what_is_no_run_and_no_metrics_is_told(tmp_path, rows):
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(SpecError, match="neither a run's folder"):
            trainings([path])
    with pytest.raises(SpecError, match=r"metrics\.jsonl: every line needs an epoch"):
        trainings([run_of(tmp_path / "run", *rows)])


FULL = training("graph_parallel", (10, 0.5), (300, 0.91))
QUICK = training("data_parallel", (1, 0.95), mode="mini", batch=64, fanout=(10, 10))
SLOW = training("data_parallel", (1, 0.5), (9000, 0.95), mode="mini", batch=64)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("runs", "forced", "mode"),
    [
        ([FULL], None, "full"),
        ([FULL, QUICK], None, "mini"),
        ([FULL, SLOW], None, "full"),
        ([FULL, QUICK], parse("graph_parallel"), "full"),
        (None, None, "full"),
    ],
    ids=["full", "quick batches", "slow batches", "forced", "no target"],
)
def test_a_size_has_the_better_of_full_graph_and_mini_batches(runs, forced, mode):
    """The table says where one takes over from the other; without runs of both it has one mode."""
    objective = Objective(target=Target(0.9, runs)) if runs else Objective()
    how = Search(exact=forced is None, forced=forced, objective=objective)
    found = scale(problem_of(batch=64), [1], how)
    assert [(size.gpus, size.problem.workload.mode) for size in found.sizes] == [(1, mode)]
