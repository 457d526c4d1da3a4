"""What the best has least of: time, cost or energy, per epoch or until an accuracy that runs
reached."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pairwise import every

from gnnplan.planner.cluster.doubt import DRAWS, RANGES
from gnnplan.planner.decision import plan
from gnnplan.planner.decision.answer import take
from gnnplan.planner.decision.candidate import evaluate_or_save_memory, placed
from gnnplan.planner.decision.objective import (
    PRIOR,
    SEED_SPREAD,
    EpochsOfRuns,
    Objective,
    Target,
    Training,
)
from gnnplan.planner.decision.scale import scale
from gnnplan.planner.decision.search import Search, bound_s, parts, search
from gnnplan.planner.decision.search import families as families_of
from gnnplan.planner.evidence.accuracy import trainings
from gnnplan.planner.gnn.workload import Workload
from gnnplan.planner.graph.graph import Graph
from gnnplan.planner.graph.load import load
from gnnplan.planner.problem.inputs import apply_overrides, read_cluster
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies import parse
from gnnplan.planner.vocabulary.errors import GnnplanError, SpecError

GRAPH = load("synthetic:community?vertices=400&edges=6000&features=40&classes=5&seed=0")
STATS = GRAPH.stats


def problem_of(*settings: str, cluster: str = "dgx_a100", **workload: Any) -> Problem:
    """On two servers of two GPUs unless the settings say otherwise."""
    small = ["islands=[[0, 1]]", "nics=[[0, 1]]", "gpus_per_server=2"]
    if cluster != "dgx_a100":
        small = []
    there, asked = apply_overrides(
        read_cluster(cluster),
        Workload.model_validate({"layers": 2, "hidden": 16} | workload),
        [*small, *settings],
    )
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


# -- cost and energy ------------------------------------------------------------------------------


def test_cost_is_of_the_servers_that_are_rented_and_energy_of_the_gpus_that_train():
    problem = problem_of("price=3.6", "device.power=300W", "gpus_per_server=2")
    one = problem.placed((0,))
    strategy = parse("graph_parallel")
    assert Objective("cost").value(one, strategy, 10.0) == pytest.approx(2 * 0.001 * 10)
    assert Objective("cost").value(problem, strategy, 10.0) == pytest.approx(4 * 0.001 * 10)
    assert Objective("energy").value(one, strategy, 10.0) == pytest.approx(300 * 10)
    assert Objective("energy").value(problem, strategy, 10.0) == pytest.approx(4 * 300 * 10)
    assert Objective().value(problem, strategy, 10.0) == 10.0


@pytest.mark.parametrize("of", every(2, ["time", "cost", "energy"]))
def test_no_part_of_the_gpus_has_a_candidate_with_less(of):
    """Of time fewer GPUs are rarely less, of energy often: parts are left out by the objective."""
    problem, objective = problem_of("price=2"), Objective(of)
    found = search(problem, objective=objective)
    least = np.inf
    for gpus in [tuple(range(problem.ranks)), *parts(problem.cluster)]:
        part = problem.placed(gpus)
        for family in families_of(part):
            for strategy in family.candidates(part):
                try:
                    there = placed(part, strategy)
                    one = evaluate_or_save_memory(there, strategy, objective)
                except GnnplanError:
                    continue
                least = min(least, one.value)
    assert found.ranked[0].value == pytest.approx(least)
    values = [candidate.value for candidate in found.ranked]
    assert values == sorted(values)


@pytest.mark.slow
def test_the_least_energy_is_on_fewer_gpus_and_the_plan_says_how_much():
    problem = problem_of()
    fast, frugal = search(problem), search(problem, objective=Objective("energy"))
    assert frugal.best.problem.ranks == 1
    document = plan.make(frugal)
    best = document["best"]
    assert document["objective"] == "energy" and "target_accuracy" not in document
    assert best["energy_j"] == pytest.approx(400 * best["epoch_s"])
    assert best["energy_low_j"] < best["energy_j"] < best["energy_high_j"]
    assert all(a["energy_j"] >= best["energy_j"] for a in document["alternatives"])
    assert "cost" not in best and "time_to_accuracy_s" not in best
    assert "energy per epoch: " in document["summary"]["range"]
    assert "cheapest in energy" in document["summary"]["sure"]
    assert any("dearer in energy" in line for line in document["explanation"])
    assert "energy_j" not in plan.make(fast)["best"]
    # another of its answers keeps what the objective counts
    taken = take(document, problem, "NEXT")
    assert taken["best"]["energy_j"] == document["alternatives"][0]["energy_j"]


def test_the_power_is_doubted_as_its_source_says():
    """All candidates have the same GPUs, so the doubt widens the range and changes no choice."""
    found = search(problem_of(), objective=Objective("energy"))
    sure = search(problem_of("device.power=400"), objective=Objective("energy"))
    best, same = found.best, sure.best
    factor = best.drawn / best.drawn_s / (400 * best.problem.ranks)
    assert np.quantile(factor, (0.1, 0.9)) == pytest.approx(RANGES["datasheet"], rel=0.02)
    assert same.drawn == pytest.approx(400 * same.problem.ranks * same.drawn_s)
    assert best.strategy == same.strategy and best.value == pytest.approx(same.value)
    assert found.certainty.chance_fastest == sure.certainty.chance_fastest


def test_a_power_has_watts():
    assert problem_of("device.power=0.3kW").cluster.device.power == 300
    for wrong in ("300GB", "300W/s", "0W", "1MW", "many"):
        with pytest.raises(SpecError, match=r"device\.power"):
            problem_of(f"device.power={wrong}")


# -- epochs to an accuracy ------------------------------------------------------------------------


def test_epochs_are_the_geometric_mean_of_runs_in_the_middle_of_evaluations():
    assert EpochsOfRuns.of([(50, 60)], "").usual == pytest.approx(55.5)
    assert EpochsOfRuns.of([(59, 60)], "").usual == pytest.approx(60)
    assert EpochsOfRuns.of([(39, 40), (89, 90)], "").usual == pytest.approx(60)


def test_epochs_are_as_doubtful_as_runs_are_few_and_far_apart():
    alone, three = EpochsOfRuns.of([(59, 60)], "a"), EpochsOfRuns.of([(59, 60)] * 3, "a")
    assert alone.spread == pytest.approx(SEED_SPREAD * 2**0.5)
    assert three.spread == pytest.approx(SEED_SPREAD * (PRIOR / (PRIOR + 2) * 4 / 3) ** 0.5)
    scattered = EpochsOfRuns.of([(29, 30), (59, 60), (119, 120)], "a")
    assert scattered.spread > three.spread
    assert (
        EpochsOfRuns.of([(50, 60)], "a").spread > alone.spread
    )  # one of ten epochs, nobody knows which
    assert np.median(alone.drawn) == pytest.approx(60, rel=0.01)
    low, high = np.quantile(alone.drawn, (0.1, 0.9))
    assert np.log(high / low) / 2 / 1.2816 == pytest.approx(alone.spread, rel=0.02)
    assert alone.drawn.shape == (DRAWS,) and EpochsOfRuns.of([(0, 1)], "a").drawn.min() >= 1
    assert "from 1 run, so how far seeds differ is assumed" in str(alone)
    assert str(three).startswith("60 (") and str(three).endswith("from 3 runs")


def test_runs_of_any_exact_strategy_count_for_all_and_those_of_lossy_ones_for_themselves():
    problem = problem_of()  # 4 ranks
    exact = training("gnnpipe(stages=2,chunks=1)", *REACHED, seed=1, epochs=30)
    stale = training("pipegcn", (10, 0.95), ranks=4)
    target = Target(0.9, [exact, stale])

    def usual(strategy: str, there: Problem = problem) -> float | None:
        epochs = target.epochs(there, parse(strategy).settle(there))
        return round(epochs.usual, 9) if epochs else None

    assert usual("graph_parallel") == usual("granndis(depth=1)") == 25.5
    assert usual("graph_parallel", problem.placed((0,))) == 25.5
    assert usual("pipegcn") == usual("pipegcn(narrow=True)") == 5.5
    assert usual("pipegcn", problem.placed((0, 1))) is None  # fewer parts have less stale rows
    assert usual("pipegcn_gf") is usual("bns(p=0.1)") is None
    # exact ones draw the same epochs, so nothing but the epoch tells them apart
    names = ("graph_parallel", "granndis", "pipegcn", "pipegcn(narrow=True)")
    drawn = [target.epochs(problem, parse(name)) for name in names]
    assert all(drawn)
    first, second, third, fourth = (one.drawn / one.usual for one in drawn if one)
    assert (first == second).all() and (third == fourth).all()
    assert abs(np.corrcoef(first, third)[0, 1]) < 0.3


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


def test_options_of_mini_batches_do_not_matter_to_the_full_graph():
    run = training("graph_parallel", *REACHED, batch=7, fanout=(3, 3), seed=5, epochs=7)
    assert Target(0.9, [run]).epochs(problem_of(), parse("granndis"))


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
        assert any(name == "pipegcn" for name in (c.strategy.name for c in found.ranked))
    document = plan.make(found)
    best = document["best"]
    assert document["target_accuracy"] == 0.9
    assert document["evidence"] == ["runs/graph_parallel", "runs/pipegcn"]
    assert best["epochs_to_accuracy"] == pytest.approx(5)
    assert best["time_to_accuracy_s"] == pytest.approx(5 * best["epoch_s"])
    assert best["time_to_accuracy_low_s"] < best["time_to_accuracy_s"]
    assert best["time_to_accuracy_s"] < best["time_to_accuracy_high_s"]
    assert best["epoch_low_s"] < best["epoch_s"] < best["epoch_high_s"]  # of an epoch as ever
    assert "to an accuracy of 0.9" in document["summary"]["cost"]
    assert "from 1 run, so how far seeds differ is assumed" in document["summary"]["range"]


def test_a_strategy_that_no_run_tells_of_is_rejected_as_not_covered():
    problem = problem_of()
    objective = Objective("energy", Target(0.9, [training("graph_parallel", *REACHED)]))
    found = search(problem, objective=objective)
    assert all(candidate.strategy.exact for candidate in found.ranked)
    reasons = dict(found.rejected)
    assert reasons["pipegcn"].startswith(
        "not covered: no run given of it on 4 ranks shows in how many epochs it reaches a"
        " validation accuracy of 0.9"
    )
    assert found.best.value == pytest.approx(
        25.5 * 400 * found.best.problem.ranks * float(found.best.predicted.epoch_s)
    )


def test_a_target_that_nothing_covers_is_told_with_the_runs_that_would():
    problem = problem_of(epochs=80)

    def told(*runs: Training, there: Problem = problem) -> str:
        with pytest.raises(SpecError) as error:
            search(there, objective=Objective(target=Target(0.95, runs)))
        return str(error.value)

    assert "(0 runs given)" in told()
    assert "gnnplan plan --exact" in told()
    assert "gnnplan run first.json --epochs 80 --eval-every 5 --out runs/first" in told()
    low = told(training("graph_parallel", *REACHED))
    assert "best accuracy is 0.9100, in runs/graph_parallel" in low
    assert "gnnplan run --resume runs/graph_parallel --epochs 60" in low
    elsewhere = told(training("pipegcn", (10, 0.99), ranks=2))
    assert "pipegcn on 2 ranks" in elsewhere and "gnnplan plan --exact" in elsewhere
    # where another seed got there, the run that did not is the one to go on with
    both = told(
        training("graph_parallel", (9, 0.96)),
        training("gnnpipe(stages=2,chunks=1)", (9, 0), seed=1),
    )
    assert "gnnplan run --resume runs/gnnpipe" in both
    with pytest.raises(SpecError, match="gnnplan plan --strategy 'pipegcn'"):
        search(problem, forced=parse("pipegcn"), objective=Objective(target=Target(0.9, [])))
    stats = load("flickr")
    assert not isinstance(stats, Graph)
    unknown = Problem(stats, None, problem.workload, problem.cluster)
    assert "give the graph itself" in told(there=unknown)


def test_sizes_are_compared_until_the_accuracy():
    problem = problem_of("price=2")
    target = Target(0.9, [training("graph_parallel", *REACHED)])
    plain = scale(problem, [1, 2, 4], Search(exact=True))
    for of in ("time", "cost", "energy"):
        found = scale(problem, [1, 2, 4], Search(exact=True, objective=Objective(of, target)))
        assert [size.time_s for size in found.sizes] == pytest.approx(
            [25.5 * size.time_s for size in plain.sizes]
        )
        assert found.best.best.value == min(size.best.value for size in found.sizes)
        larger = [size for size in found.sizes if size.gpus > found.best.gpus]
        assert found.worse_from is (larger[0] if larger else None)
    assert found.best.gpus == 1  # energy: nobody else is needed


# -- what runs left -------------------------------------------------------------------------------


def run_of(folder: Path, *rows: object, strategy: str = "graph_parallel") -> Path:
    """A run's folder with these lines of metrics.jsonl."""
    problem = problem_of(seed=3)
    found = search(problem, forced=parse(strategy))
    folder.mkdir(parents=True)
    plan.write(folder / "plan.json", plan.make(found))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_runs_are_read_from_their_folders_or_from_a_folder_of_folders(tmp_path):
    rows = [{"epoch": n, "val_accuracy": 0.1 * n if n % 2 else None} for n in (1, 2, 3)]
    one = run_of(tmp_path / "runs" / "one", *rows)
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
def test_lines_that_are_no_metrics_are_told(tmp_path, rows):
    with pytest.raises(SpecError, match=r"metrics\.jsonl: every line needs an epoch"):
        trainings([run_of(tmp_path / "run", *rows)])


def test_a_folder_without_runs_is_told(tmp_path):
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(SpecError, match="neither a run's folder"):
            trainings([path])


@pytest.mark.slow
def test_a_size_has_the_better_of_full_graph_and_mini_batches():
    """The table says where one takes over from the other; without runs of both it has one mode."""
    problem = problem_of(batch=64)
    full = training("graph_parallel", *REACHED)
    quick = training("data_parallel", (1, 0.95), mode="mini", batch=64, fanout=(10, 10))
    slow = training("data_parallel", (1, 0.5), (9000, 0.95), mode="mini", batch=64)
    for runs, mode in (([full], "full"), ([full, quick], "mini"), ([full, slow], "full")):
        objective = Objective(target=Target(0.9, runs))
        found = scale(problem, [1, 4], Search(exact=True, objective=objective))
        assert [(size.gpus, size.mode) for size in found.sizes] == [(1, mode), (4, mode)]
    assert scale(problem, [1, 4], Search(exact=True)).sizes[0].mode == "full"
    forced = Objective(target=Target(0.9, [full, quick]))
    found = scale(problem, [1], Search(forced=parse("graph_parallel"), objective=forced))
    assert found.sizes[0].mode == "full"


def test_fewer_gpus_are_asked_where_few_vertices_train():
    """The bound of smaller parts was an epoch of all rows, which trimmed ones do not compute: the
    part with the least energy was skipped."""
    stats = replace(problem_of().stats, train_vertices=20)
    problem = replace(problem_of(), stats=stats, graph=None)
    for part in range(1, problem.ranks + 1):
        alone = problem.placed(tuple(range(part)))
        trimmed = parse("graph_parallel(trim=True)")
        assert bound_s(alone, part) <= float(trimmed.predict(alone).epoch_s)
