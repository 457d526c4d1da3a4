"""Which strategies `gnnplan tune` runs, and for how long (how runs are judged: test_halving.py)."""

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
from asked import changed, taking
from started import marked

from gnnplan.executor.launch import tune as tuning
from gnnplan.planner.cluster import scaling as scaled
from gnnplan.planner.cluster.spec import PRESETS
from gnnplan.planner.decision import plan
from gnnplan.planner.decision.candidate import Candidate
from gnnplan.planner.decision.objective import Objective
from gnnplan.planner.decision.search import SearchResult, search
from gnnplan.planner.evidence.runs import Run
from gnnplan.planner.gnn.workload import Workload
from gnnplan.planner.graph.load import load
from gnnplan.planner.problem.inputs import read_cluster
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies import parse
from gnnplan.planner.vocabulary.errors import SpecError

SOURCE = "synthetic:community?vertices=400&edges=3000&features=12&classes=4&seed=0"
GRAPH = load(SOURCE)
LOCAL = read_cluster(str(PRESETS / "local.yaml")).model_copy(update={"gpus_per_server": 2})
PROBLEM = Problem(GRAPH.stats, GRAPH, Workload(model="sage", layers=2, hidden=16), LOCAL)


def found(**epochs_s: float) -> SearchResult:
    """The search's candidates of these names, as if they had these epochs [s]."""
    names = {"exact": "graph_parallel", "lossy": "pipegcn", "slow": "gnnpipe(stages=2,chunks=8)"}
    ranked = [
        taking(search(PROBLEM, forced=parse(names[name])).ranked[0], epoch_s)
        for name, epoch_s in epochs_s.items()
    ]
    return SearchResult(PROBLEM, sorted(ranked, key=lambda c: float(c.predicted.epoch_s)))


def names(candidates: list[Candidate]) -> list[str]:
    return [candidate.strategy.name for candidate in candidates]


def test_strategies_within_doubt_are_run_and_the_budget_is_said_beforehand():
    ahead = tuning.prospect(found(lossy=1.0, exact=1.05, slow=2.5), 0.2, 1000)
    assert names(ahead.candidates) == ["graph_parallel", "pipegcn"]  # the recommended one first
    assert (ahead.budget_s, ahead.budget_epochs) == (pytest.approx(210), 200)
    assert "at most 210" in str(ahead) and "200 epochs" in str(ahead) and "pipegcn" in str(ahead)
    near = tuning.prospect(found(lossy=1.0, exact=1.05, slow=1.1), 0.2, 1000)
    assert len(near.candidates) == 3


def test_as_many_strategies_are_run_as_the_budget_is_for():
    three = found(lossy=1.0, exact=1.05, slow=1.2)
    assert [len(tuning.prospect(three, 0.1, n).candidates) for n in (100, 450, 5000)] == [1, 2, 3]
    many = replace(three, ranked=three.ranked * 3)
    assert len(tuning.prospect(many, 1.0, 10**6).candidates) == tuning.MOST


def test_the_best_of_the_other_kind_is_always_among_those_that_run():
    """An exact one that is behind several lossy ones is what they have to beat."""
    three = found(lossy=1.0, exact=1.25)
    lossy, exact = three.ranked
    ahead = tuning.prospect(replace(three, ranked=[lossy] * 5 + [exact]), 1.0, 10**6)
    assert names(ahead.candidates)[:2] == ["pipegcn", "graph_parallel"]


@pytest.mark.parametrize(
    ("result", "epochs", "why"),
    [
        (found(lossy=1.0, exact=1.05), 50, "training is too short: 10 % of 50 epochs are 5.25 s"),
        (
            found(exact=1.0, slow=9.0),
            10**6,
            "no other strategy is faster with a chance of 1 % or more",
        ),
        (search(PROBLEM, forced=parse("pipegcn")), 10**6, "--strategy names one"),
    ],
)
def test_where_there_is_nothing_to_tune_the_plan_says_why(result, epochs, why, tmp_path, capsys):
    """Once: standard error said it too, above the plan."""
    document = tuning.tune(result, tmp_path / "runs", epochs=epochs)
    told = document["summary"]["tuned"]
    assert told.startswith("not tuned: ") and why in told and why in document["tuned"]["why"]
    assert capsys.readouterr().err == ""
    assert document["tuned"]["strategies"] == [] and not (tmp_path / "runs").exists()
    untuned = plan.make(result)
    assert {**document, "summary": 0, "tuned": 0} == {**untuned, "summary": 0, "tuned": 0}


def test_training_that_is_said_to_be_long_enough_is():
    two = found(lossy=1.0, exact=1.05)
    why_not = tuning.prospect(two, 0.1, 50).why_not
    enough = int(why_not.partition("it pays from ")[2].partition(" epochs")[0].replace(",", ""))
    assert tuning.prospect(two, 0.1, enough).why_not == ""
    assert tuning.prospect(two, 0.1, enough - 1).why_not != ""


@pytest.mark.parametrize("share", [0.0, -1.0, 1.5, float("nan")])
def test_a_share_is_a_share(share):
    with pytest.raises(SpecError, match="above 0 and at most 1"):
        tuning.prospect(found(exact=1.0), share)


def test_seconds_of_this_machine_say_nothing_about_another():
    servers = LOCAL.model_copy(update={"servers": 2, "inter_node": LOCAL.intra_node})
    gpus = changed(LOCAL, kind="cuda")
    with pytest.raises(SpecError, match="2 servers, and tune runs on this machine alone"):
        tuning.must_be_this_machine(replace(PROBLEM, cluster=servers), 0.0)
    tuning.must_be_this_machine(replace(PROBLEM, cluster=servers), math.inf)
    with pytest.raises(SpecError, match="for 2 GPUs per server, and this machine has 0"):
        tuning.must_be_this_machine(replace(PROBLEM, cluster=gpus), 0.0)


@pytest.mark.nightly
def test_a_plan_is_asked_again_on_all_its_gpus():
    """Its best may use fewer of them, and its options hold."""
    cluster = read_cluster(str(PRESETS / "l4_box.yaml"))
    problem = Problem(GRAPH.stats, GRAPH, PROBLEM.workload, cluster)
    before = search(problem, exact=True)
    assert before.best.problem.ranks < problem.ranks
    again = tuning.asked(plan.make(before))
    assert again.problem.ranks == problem.ranks
    assert [str(c.strategy) for c in again.ranked] == [str(c.strategy) for c in before.ranked]
    only = search(PROBLEM, forced=parse("pipegcn"))
    assert tuning.asked(plan.make(only)).forced


def test_a_plan_is_tuned_by_its_objective():
    priced = replace(PROBLEM, cluster=LOCAL.model_copy(update={"price": 3.6}))
    before = search(priced, objective=Objective("cost"))
    again = tuning.asked(plan.make(before))
    assert again.objective.of == "cost" and again.best.value == pytest.approx(before.best.value)
    anew = tuning.on_cluster(again, again.best, scaled.device(priced.cluster, 0.5))
    assert anew.objective.of == "cost" and anew.best.value > again.best.value
    contender = tuning._contender(again.best)
    assert contender.rate == pytest.approx(2 * 3.6 / 3600)  # [$/s] of two ranks


def runs_of(slower: float) -> list[Run]:
    """Two runs of two strategies on a machine that is so much slower than LOCAL says."""
    there = replace(PROBLEM, cluster=scaled.device(LOCAL, 1 / slower))
    return [
        Run.of(
            name,
            Candidate.of(PROBLEM, strategy),
            {"step": {"measured_s": float(strategy.predict(there).epoch_s)}},
            [{"epoch_s": 1.0}] * 5,
        )
        for name in ("graph_parallel", "pipegcn", "pipegcn", "graph_parallel")
        for strategy in [parse(name).settle(PROBLEM)]
    ]


def test_constants_are_refitted_and_the_plan_is_of_them():
    cluster, report = tuning.refitted(LOCAL, runs_of(slower=2.0))
    assert report and report["kept"] and report["after"]["mean"] < 0.05 < report["before"]["mean"]
    before = search(PROBLEM)
    slowest = before.ranked[-1]
    after = tuning.on_cluster(before, slowest, cluster)
    assert after.best.strategy == slowest.strategy and after.problem.cluster == cluster
    assert float(after.best.predicted.epoch_s) > 1.5 * float(slowest.predicted.epoch_s)
    document = plan.make(after)
    assert plan.chosen(document) == slowest.strategy
    assert "as measured" in document["summary"]["use"]
    assert not any("within doubt" in words for words in document["explanation"])
    # runs that are as predicted leave the constants alone, and one run says nothing
    assert tuning.refitted(LOCAL, runs_of(slower=1.0))[0] == LOCAL
    assert tuning.refitted(LOCAL, runs_of(slower=2.0)[:1]) == (LOCAL, None)


def gnnplan(*words: object, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "gnnplan", *map(str, words)],
        capture_output=True,
        text=True,
        timeout=600,
        env=os.environ | env,
        check=False,
    )


@pytest.fixture
def plan_file(tmp_path):
    """Graph parallel and PipeGCN on two ranks, with `epochs` for a budget of minutes."""
    result = found(exact=1.0, lossy=1.0)
    plan.write(tmp_path / "plan.json", plan.make(result))
    return tmp_path / "plan.json"


@pytest.mark.nightly
@pytest.mark.processes
def test_tune_runs_what_is_in_doubt_and_writes_the_plan(plan_file, tmp_path):
    document = json.loads(plan_file.read_text())
    epoch_s = search(PROBLEM).best.predicted.epoch_s
    epochs = int(600 / float(epoch_s))  # 10 % of ten minutes
    out, tuned = tmp_path / "runs", tmp_path / "tuned.json"
    words = ["tune", plan_file, "--epochs", epochs, "--out", out, "-o", tuned, "--json"]
    done = gnnplan(*words)
    assert done.returncode == 0, done.stderr
    told: dict[str, Any] = json.loads(done.stdout)
    assert told == json.loads(tuned.read_text())
    assert "tuning takes at most" in done.stderr and "a turn of " in done.stderr
    evidence = told["tuned"]
    ran = [row for row in evidence["strategies"] if row["turns"]]
    assert ran and evidence["spent_s"] <= evidence["budget_s"] * 1.05
    assert all(row["measured_s"] > 0 and row["epochs"] >= 2 * row["turns"] for row in ran)
    folders = sorted(out.glob("[!.]*"))  # those of runs that were stopped are hidden
    assert len(ran) >= len(folders) >= 1
    assert gnnplan("validate", *folders).returncode == 0
    assert told["graph"]["hash"] == document["graph"]["hash"]
    assert gnnplan("run", tuned, "--epochs", 2, "--out", tmp_path / "run").returncode == 0


@pytest.mark.nightly
@pytest.mark.processes
def test_a_strategy_that_fails_is_left_out_with_its_words(plan_file, tmp_path):
    """Here all do, since no rank is told its threads: the error has the words of each."""
    words = ["tune", plan_file, "--epochs", 10**7, "--out", tmp_path / "runs"]
    done = gnnplan(*words, GNNPLAN_THREADS="x")
    assert done.returncode == 4, done.stderr
    assert "none of the strategies ran to its end" in done.stderr
    assert done.stderr.count("GNNPLAN_THREADS is 'x'") >= 2


@pytest.mark.nightly
@pytest.mark.processes
def test_a_run_that_is_interrupted_leaves_its_epochs_and_no_process(tmp_path, monkeypatch):
    monkeypatch.setenv("GNNPLAN_TEST_TUNE", "interrupted")
    candidates = found(exact=1.0).ranked
    runner = tuning._Runner(candidates, tmp_path / "runs", False, None)
    reading = runner(0, 10**7, 25.0)
    assert reading.failed == "" and reading.epochs_s and not runner.runs
    assert [path.name for path in (tmp_path / "runs").iterdir()] == [".01-graph_parallel"]
    assert not marked("GNNPLAN_TEST_TUNE=interrupted").keys() - {os.getpid()}
