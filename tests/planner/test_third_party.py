"""A strategy from another package: found by its entry point, planned, explained and trained."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import gnnplan
from gnnplan.executor.ranks.rank import Rank
from gnnplan.executor.train import train
from gnnplan.planner import strategies
from gnnplan.planner.decision.explain import explain
from gnnplan.planner.decision.search import search
from gnnplan.planner.graph.load import load
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.testing.laws import cluster, problem_of

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
PLANNER = """
from __future__ import annotations
from dataclasses import dataclass
from typing import ClassVar, Self
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies import Example, GraphParallel

@dataclass(frozen=True)
class Echo(GraphParallel):
    family: ClassVar[str] = "echo"
    names: ClassVar = {"loud_echo": {"narrow": True}}
    executor: ClassVar[str] = "echo_executor"
    examples: ClassVar = (Example("echo"),)

    @classmethod
    def explain(cls, problem: Problem, fastest: Self | None) -> list[str]:
        return [f"An echo of {problem.stats.vertices} vertices: {fastest}"]
"""
EXECUTOR = """
from gnnplan.executor.strategies.graph_parallel import open_worker as plainly

opened = []

def open_worker(rank, problem, strategy, first):
    opened.append(str(strategy))
    return plainly(rank, problem, strategy, first)
"""


def installed(
    folder: Path, patch: pytest.MonkeyPatch, family: str, point: str, **modules: str
) -> Iterator[Path]:
    """A folder of installed packages, with one of these modules that adds a family."""
    for name, text in modules.items():
        (folder / f"{name}.py").write_text(text)
    about = folder / f"{family}-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {family}\nVersion: 1\n")
    (about / "entry_points.txt").write_text(f"[gnnplan.strategies]\n{family} = {point}\n")
    patch.syspath_prepend(folder)
    forget()
    yield folder
    forget()
    for name in modules:
        sys.modules.pop(name, None)


@pytest.fixture
def install(tmp_path, monkeypatch):
    """The package `echo`."""
    modules = {"echo_planner": PLANNER, "echo_executor": EXECUTOR}
    yield from installed(tmp_path, monkeypatch, "echo", "echo_planner:Echo", **modules)


@pytest.fixture
def delayed(tmp_path, monkeypatch):
    """The package of examples/delayed, whose epochs differ."""
    text = (EXAMPLES / "delayed" / "gnnplan_delayed.py").read_text(encoding="utf-8")
    point = "gnnplan_delayed:Delayed"
    yield from installed(tmp_path, monkeypatch, "delayed", point, gnnplan_delayed=text)


def forget() -> None:
    strategies.families.cache_clear()


def problem(ranks: int) -> Problem:
    graph = load("synthetic:community?vertices=200&edges=1200&features=8&classes=3&seed=0")
    return problem_of(graph, cluster(1, ranks, intra=1e9, kind="cpu"), layers=2, hidden=8)


def test_it_is_a_candidate_and_trains(install):
    found = search(problem(2))
    assert {"echo", "graph_parallel"} <= {c.strategy.name for c in found.ranked}
    assert strategies.parse("loud_echo").knobs()["narrow"]
    assert str(strategies.parse("echo(narrow=True)")) == "loud_echo"
    alone = problem(1)
    strategy = strategies.parse("echo").settle(alone)
    train(Rank(0, 1, torch.device("cpu"), "gloo"), alone, strategy, None, 2)
    assert sys.modules["echo_executor"].opened == ["echo"]  # type: ignore[attr-defined]


def test_it_explains_itself(install):
    """Only families that `decision` knew by name could say anything of their own."""
    asked = problem(2)
    told = explain(search(asked), turning_points=[])
    assert sum(line.startswith("An echo of 200 vertices: echo") for line in told) == 1
    names = vars(sys.modules[explain.__module__])
    assert not [family.__name__ for family in strategies.FAMILIES if family.__name__ in names]


def test_epochs_that_differ_are_told_one_by_one(delayed):
    """A mean of three, rounded, was taken for each of them."""
    graph = "synthetic:community?vertices=200&edges=1200&features=8&classes=3&seed=0"
    fields = {"model": "gcn", "layers": 2, "hidden": 8, "strategy": "delayed(r=3)"}
    plan = gnnplan.plan(graph, "p3_p100?servers=1&gpus_per_server=2", **fields)
    predicted = plan.document["best"]["predicted"]
    each = [sum(epoch["bytes"].values()) for epoch in predicted["period"]]
    assert len(each) == 3 and len(set(each)) > 1
    assert predicted["bytes_total"] == pytest.approx(sum(each) / 3, abs=2)
    seconds = [epoch["epoch_s"] for epoch in predicted["period"]]
    assert predicted["epoch_s"] == pytest.approx(sum(seconds) / 3)
    played = plan.simulate(steps=6)
    told = played.document["epochs"]
    assert [row["epoch"] for row in told] == [2, 3, 4, 5, 6]
    for row in told:
        sent = each[(row["epoch"] - 1) % 3]
        assert row["predicted_bytes"] == row["simulated_bytes"] == sent
        assert row["simulated_s"] == pytest.approx(row["predicted_s"], rel=1e-6)
    assert "epochs differ, and repeat after 3" in str(played)
    assert played.epoch_s == pytest.approx(predicted["epoch_s"], rel=1e-6)
    few = plan.simulate(steps=2).document  # of one epoch alone, and so is the prediction
    assert few["simulated"]["epoch_s"] == pytest.approx(few["predicted"]["epoch_s"], rel=1e-6)
    assert few["predicted"]["bytes"] == few["simulated"]["bytes"]


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("raise ImportError('no numpy')", r"echo of the package echo cannot be loaded \(ImportErr"),
        ("Echo = 3", "is echo_planner:Echo, which is no class of a Strategy"),
        (PLANNER.replace("loud_echo", "pipegcn"), "has a name that is taken: pipegcn"),
        (PLANNER.replace("    executor", "    other"), "names no executor of its own"),
        (
            PLANNER.replace("from __future__ import annotations", "").replace(
                "    examples", "    loud: bool = False\n    examples"
            ),
            "needs 'from __future__ import annotations' in its file",
        ),
    ],
)
def test_a_broken_one_is_named_with_its_package(install, code, words):
    (install / "echo_planner.py").write_text(code)
    with pytest.raises(SpecError, match=words):
        strategies.families()
