"""What is wrong before training starts is said in words, by all ranks alike."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from ranks import Case

from gnnplan.executor.launch import agreement
from gnnplan.executor.ranks.rank import Rank
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.vocabulary.errors import Infeasible, Mismatch

CASE = Case(
    "graph_parallel",
    "synthetic:community?vertices=200&edges=1600&features=8&classes=4&seed=0",
    servers=2,
)
ON_CPU = Rank(0, 2, torch.device("cpu"), "gloo")
OURS = agreement.facts({"gnnplan": "1", "graph": "abc", "ranks": 2}, {"epochs": 3}, [10, 20])


def agree(
    monkeypatch: pytest.MonkeyPatch,
    problem: Problem,
    predicted: dict[str, float],
    rank: Rank = ON_CPU,
    **theirs: Any,
) -> list[dict[str, Any]]:
    """As rank 0, where rank 1 says the same but for `theirs`."""
    monkeypatch.setattr(agreement, "gather_all", lambda mine, device: [mine, {**mine, **theirs}])
    return agreement.agree(rank, problem, OURS, predicted)


@pytest.fixture(scope="module")
def problem() -> Problem:
    return CASE.problem(2)


def test_ranks_that_agree(problem: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    both = agree(monkeypatch, problem, {"features": 1e6}, checkpoints=[10])
    assert [each["checkpoints"] for each in both] == [[10, 20], [10]]


@pytest.mark.parametrize("name", ["gnnplan", "torch", "data", "plan", "options"])
def test_ranks_that_differ(name: str, problem: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        Mismatch,
        match=(
            rf"ranks differ in {name}: rank 1 \(server 1, elsewhere\) has other, rank 0 .*; give"
            r" all the same"
        ),
    ):
        agree(monkeypatch, problem, {}, **{name: "other", "host": "elsewhere"})


def test_another_question_is_another_plan() -> None:
    """Of the data and the version other facts tell."""
    asked = {"gnnplan": "1", "graph": "abc", "ranks": 2}
    assert (
        agreement.facts({**asked, "workload.seed": 1}, {}, [])["plan"]
        != agreement.facts({**asked, "workload.seed": 2}, {}, [])["plan"]
    )
    assert (
        agreement.facts({**asked, "graph": "abd"}, {}, [])["plan"]
        == agreement.facts(asked, {}, [])["plan"]
    )


def test_what_does_not_fit_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks on one GPU, of which 100 MB are free."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (100e6, 200e6))
    planned = CASE.problem(2)
    gpus = planned.cluster.device.model_copy(update={"kind": "cuda"})
    problem = replace(planned, cluster=planned.cluster.model_copy(update={"device": gpus}))
    one = Rank(0, 2, torch.device("cuda", 0), "gloo")
    agree(monkeypatch, problem, {"features": 50e6, "runtime": 30e6}, one)  # twice 50 MB more
    agree(monkeypatch, problem, {"features": 90e6, "runtime": 30e6}, one, host="elsewhere")
    # a launcher that shows each rank its own GPU calls all of them cuda:0
    agree(monkeypatch, problem, {"features": 90e6, "runtime": 30e6}, one, card="another")
    # the prediction is for other devices
    agree(monkeypatch, planned, {"features": 90e6, "runtime": 30e6}, one)
    with pytest.raises(
        Infeasible,
        match=(
            r"2 ranks need 180(\.00)? MB more on \S+ cuda:0, where 100(\.00)? MB are free; stop what"
            r" fills it"
        ),
    ):
        agree(monkeypatch, problem, {"features": 90e6, "runtime": 30e6}, one)
