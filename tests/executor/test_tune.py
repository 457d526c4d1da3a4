"""Which strategies `gnnplan tune` runs, and for how long. How runs are judged, by successive halving, on
turns made up here: what it certifies, what it spends, what it prefers."""

import json
import math
import os
from collections.abc import Callable
from dataclasses import replace
from math import expm1

import numpy as np
import pytest
from asked import changed, taking
from calls import marked
from nightly import NIGHT, at_night

from gnnplan.executor.launch import tune as tuning
from gnnplan.planner.cluster import scaling as scaled
from gnnplan.planner.cluster.spec import PRESETS
from gnnplan.planner.decision import plan
from gnnplan.planner.decision.candidate import Candidate
from gnnplan.planner.decision.objective import Objective
from gnnplan.planner.decision.search import SearchResult, search
from gnnplan.planner.evidence.halving import (
    FIRST,
    MOST_RUNGS,
    START_S,
    WARM_UP,
    Contender,
    Reading,
    difference,
    halve,
    least_s,
)
from gnnplan.planner.evidence.runs import Run
from gnnplan.planner.gnn.workload import Workload
from gnnplan.planner.graph.load import load
from gnnplan.planner.problem.inputs import read_cluster
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies import parse
from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.planner.vocabulary.units import show_percent

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
    assert len(tuning.prospect(found(lossy=1.0, exact=1.05, slow=1.1), 0.2, 1000).candidates) == 3


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
    assert {**document, "summary": 0, "tuned": 0} == {**plan.make(result), "summary": 0, "tuned": 0}


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
    assert tuning.asked(plan.make(search(PROBLEM, forced=parse("pipegcn")))).forced


def test_a_plan_is_tuned_by_its_objective():
    priced = replace(PROBLEM, cluster=LOCAL.model_copy(update={"price": 3.6}))
    before = search(priced, objective=Objective("cost"))
    again = tuning.asked(plan.make(before))
    assert again.objective.of == "cost" and again.best.value == pytest.approx(before.best.value)
    anew = tuning.on_cluster(again, again.best, scaled.device(priced.cluster, 0.5))
    assert anew.objective.of == "cost" and anew.best.value > again.best.value
    assert tuning._contender(again.best).rate == pytest.approx(2 * 3.6 / 3600)  # [$/s] of two ranks


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


@pytest.fixture
def plan_file(tmp_path):
    """Graph parallel and PipeGCN on two ranks, with `epochs` for a budget of minutes."""
    plan.write(tmp_path / "plan.json", plan.make(found(exact=1.0, lossy=1.0)))
    return tmp_path / "plan.json"


@pytest.mark.nightly
@pytest.mark.processes
def test_tune_runs_what_is_in_doubt_and_writes_the_plan(plan_file, tmp_path, gnnplan):
    document = json.loads(plan_file.read_text())
    epochs = int(600 / float(search(PROBLEM).best.predicted.epoch_s))  # 10 % of ten minutes
    out, tuned = tmp_path / "runs", tmp_path / "tuned.json"
    answer = gnnplan("tune", plan_file, "--epochs", epochs, "--out", out, "-o", tuned, "--json")
    assert answer.code == 0, answer.err
    told = answer.document
    assert told == json.loads(tuned.read_text())
    assert "tuning takes at most" in answer.err and "a turn of " in answer.err
    evidence = told["tuned"]
    ran = [row for row in evidence["strategies"] if row["turns"]]
    assert ran and evidence["spent_s"] <= evidence["budget_s"] * 1.05
    assert all(row["measured_s"] > 0 and row["epochs"] >= 2 * row["turns"] for row in ran)
    folders = sorted(out.glob("[!.]*"))  # those of runs that were stopped are hidden
    assert sum(row["turns"] for row in ran) >= len(folders) >= 1
    assert gnnplan("validate", *folders).code == 0
    assert told["graph"]["hash"] == document["graph"]["hash"]
    assert gnnplan("run", tuned, "--epochs 2 --out", tmp_path / "run").code == 0


@pytest.mark.nightly
@pytest.mark.processes
def test_a_strategy_that_fails_is_left_out_with_its_words(
    plan_file, tmp_path, gnnplan, monkeypatch
):
    """Here all do, since no rank is told its threads: the error has the words of each."""
    monkeypatch.setenv("GNNPLAN_THREADS", "x")
    answer = gnnplan("tune", plan_file, "--epochs", 10**7, "--out", tmp_path / "runs")
    assert answer.code == 4 and "none of the strategies ran to its end" in answer.err, answer
    assert answer.err.count("GNNPLAN_THREADS is 'x'") >= 2


@pytest.mark.nightly
@pytest.mark.processes
def test_a_run_that_is_interrupted_leaves_its_epochs_and_no_process(tmp_path, monkeypatch):
    monkeypatch.setenv("GNNPLAN_TEST_TUNE", "interrupted")
    runner = tuning._Runner(found(exact=1.0).ranked, tmp_path / "runs", False, None)
    reading = runner(0, 10**7, 25.0)
    assert reading.failed == "" and reading.epochs_s and not runner.runs
    assert [path.name for path in (tmp_path / "runs").iterdir()] == [".01-graph_parallel"]
    assert not marked("GNNPLAN_TEST_TUNE=interrupted").keys() - {os.getpid()}


class Machine:
    """Gives contenders with epochs [s] their turns; `noise`: their deviation; `pace`: by turn."""

    def __init__(
        self,
        *epochs_s: float,
        noise: float = 0.01,
        start_s: float = START_S,
        pace: Callable[[int], float] = lambda turn: 1.0,
        failing: dict[int, str] | None = None,
    ) -> None:
        self.epochs_s, self.noise, self.start_s, self.pace = epochs_s, noise, start_s, pace
        self.failing = failing or {}
        self.turns: list[int] = []  # whose it was
        self.random = np.random.default_rng(0)

    def __call__(self, index: int, epochs: int, most_s: float) -> Reading:
        start_s = self.start_s
        self.turns.append(index)
        if index in self.failing:
            return Reading((), start_s, self.failing[index])
        pace = self.pace(len(self.turns)) * self.epochs_s[index]
        seconds = pace * (1 + self.noise * self.random.standard_normal(WARM_UP + epochs))
        in_time = seconds[start_s + np.cumsum(seconds) <= most_s]
        return Reading(tuple(in_time[WARM_UP:].tolist()), min(start_s + seconds.sum(), most_s))


def contenders(*exact: bool, predicted_s: float = 1.0) -> list[Contender]:
    return [Contender("abcdef"[i], one, predicted_s) for i, one in enumerate(exact)]


def test_it_stops_as_soon_as_the_order_is_certain():
    machine = Machine(1.5, 1.0, noise=0.0)
    result = halve(contenders(True, True), machine, 1e6)
    assert (result.best.name, result.is_certain) == ("b", True)
    assert machine.turns == [0, 1, 1, 0] * 2  # rounds in turned order
    turns_s = 4 * (2 + WARM_UP) * 1.5 + 4 * (2 + WARM_UP)
    assert result.spent_s == pytest.approx(8 * START_S + turns_s)
    assert "certainly the fastest: the next, a, was 50 %" in result.why()


@pytest.mark.parametrize(
    "epochs_s",
    [
        # the second was out after four rounds, by 2 %
        pytest.param((1.0, 1.02, 1.3), id="one that was left behind may be as fast"),
        # a run that was unlucky in where its memory lay was 1 % slower in all of its turns
        pytest.param((1.0, 1.01), id="more rounds do not make two equal runs differ"),
    ],
)
def test_what_may_be_as_fast_makes_nothing_certain(epochs_s):
    result = halve(contenders(*[True] * len(epochs_s)), Machine(*epochs_s, noise=0.0), 1e6)
    assert result.best.name == "a" and not result.is_certain


@pytest.mark.parametrize(("spread", "rungs"), [(0.0, 2), (0.3, MOST_RUNGS)])
def test_equals_are_run_until_rounds_tell_nothing_new(spread, rungs):
    """And no order is claimed. On a noisy machine the last rung comes first."""
    random = np.random.default_rng(1)
    pace = lambda turn: float(np.exp(spread * random.standard_normal()))  # noqa: E731
    machine = Machine(1.0, 1.0, noise=0.0, pace=pace)
    result = halve(contenders(True, True), machine, 1e6)
    assert not result.is_certain and len(machine.turns) == 2 * FIRST * 2 ** (rungs - 1)
    assert "not certainly" in result.why()


def test_the_slower_half_is_out_after_a_rung():
    machine = Machine(1.3, 1.02, 1.4, 1.0)
    halve(contenders(True, True, True, True), machine, 1e6)
    assert machine.turns[: 4 * FIRST] == [0, 1, 2, 3, 3, 2, 1, 0] * (FIRST // 2)
    assert set(machine.turns[4 * FIRST :]) == {1, 3}
    # an exact one stays as long as it may be as fast, where halving alone would keep two lossy ones
    machine = Machine(1.03, 1.0, 1.01, 1.02)
    result = halve(contenders(True, False, False, False), machine, 1e6)
    assert set(machine.turns[4 * FIRST :]) == {0, 1, 2}
    assert result.best.name == "a" and result.least.name == "b"


@pytest.mark.parametrize("budget_s", [0.0, 11.0, 30.0, 57.0, 90.0, 200.0])
@pytest.mark.parametrize("true_s", [1.0, 4.0])  # predicted 1 s
@pytest.mark.parametrize("start_s", [0.0, START_S, 4 * START_S])
def test_it_never_costs_more_than_its_share(budget_s, true_s, start_s):
    """However wrong the predictions of epochs and of the start are."""
    machine = Machine(true_s, 1.1 * true_s, start_s=start_s)
    result = halve(contenders(True, False), machine, budget_s)
    assert (result.spent_s if result else 0.0) <= budget_s
    if budget_s < START_S:
        assert not machine.turns


def test_the_least_that_is_asked_for_gives_two_rounds():
    them = contenders(True, False, True)
    machine = Machine(1.0, 0.6, 1.0, noise=0.0)
    result = halve(them, machine, least_s(them))
    assert result.is_certain and machine.turns[:6] == [0, 1, 2, 2, 1, 0]


def test_the_first_round_leaves_time_for_the_second():
    """Runs that start slower than expected took the whole share in one round."""
    them = contenders(True, True, True, True)
    machine = Machine(1.0, 1.4, 1.4, 1.4, start_s=2 * START_S)
    result = halve(them, machine, 1.2 * least_s(them))
    assert machine.turns[:4] == [0, 1, 1, 0] and result.is_certain
    assert [c.name for c in result.order] == ["a", "b", "c", "d"]


@pytest.mark.parametrize(
    ("lossy_s", "best"), [(1.0, "exact"), (0.99, "exact"), (0.9, "lossy"), (1.3, "exact")]
)
def test_an_exact_strategy_is_preferred_within_the_noise(lossy_s, best):
    them = [Contender("exact", True, 1.0), Contender("lossy", False, 0.9)]
    result = halve(them, Machine(1.0, lossy_s, noise=0.05), 400.0)
    assert result.best.name == best
    assert ("it is lossy" in result.why()) == (result.least is not result.best)


def test_what_counts_is_not_only_seconds():
    """Half of the GPUs, which take 1.5 times as long, draw three quarters of the energy."""
    them = [Contender("all", True, 1.0, rate=800.0), Contender("half", True, 1.5, rate=400.0)]
    result = halve(them, Machine(1.0, 1.5, noise=0.0), 1e6)
    assert (result.best.name, result.is_certain) == ("half", True)
    assert result.why(Objective("energy")) == (
        "half is certainly the cheapest in energy: the next, all, was"
        f" 33 % ± {show_percent(expm1(difference(*them).doubt))} dearer in energy"
    )


def test_a_contender_that_fails_is_out_with_its_words():
    them = contenders(True, False, True)
    machine = Machine(1.0, 1.0, 1.5, failing={1: "rank 1 was lost: memory ran out"})
    result = halve(them, machine, 1e6)
    assert result.best.name == "a" and result.order[-1].failed == "rank 1 was lost: memory ran out"
    assert machine.turns.count(1) == 1
    alone = halve(contenders(True, False), Machine(1, 1, failing={0: "lost"}), 1e6)
    assert alone.best.name == "b" and "only one that ran" in alone.why()
    assert halve(contenders(True, True), Machine(1, 1, failing={0: "x", 1: "y"}), 1e6) is None


def test_a_disturbance_in_one_turn_makes_nothing_certain():
    """Others took a third of the machine while b had its first turn."""
    machine = Machine(1.0, 1.0, noise=0.005, pace=lambda turn: 1.3 if turn == 2 else 1.0)
    readings: list[Reading] = []
    for _ in range(FIRST):
        readings += [machine(0, 3, 1e6), machine(1, 3, 1e6)]
        a, b = contenders(True, True)
        a.readings, b.readings = readings[0::2], readings[1::2]
        assert not difference(b, a).is_certain


@pytest.mark.parametrize(("spread", "most"), [at_night(0.02, 0.05), (0.05, 0.1)])
def test_equals_are_seldom_told_apart(spread, most):
    """On a machine whose pace changes so much from turn to turn, with a look after every rung."""
    random = np.random.default_rng(1)

    def told_apart() -> bool:
        machine = Machine(1, 1, pace=lambda turn: float(np.exp(spread * random.standard_normal())))
        return halve(contenders(True, True), machine, 1e6).is_certain

    times = 100 if NIGHT else 20
    assert sum(told_apart() for _ in range(times)) <= times * most
