"""What is wrong before training starts is said in words, by all ranks alike."""

from __future__ import annotations

import errno
import socket
from typing import Any

import pytest
import torch
from ranks import Case

from gnnplan.executor.launch import preflight
from gnnplan.executor.launch.out_of_memory import ran_out
from gnnplan.executor.ranks.rank import Rank
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.vocabulary.errors import Infeasible, Mismatch, SpecError

CASE = Case(
    "graph_parallel",
    "synthetic:community?vertices=200&edges=1600&features=8&classes=4&seed=0",
    servers=2,
)
OURS = preflight.facts({"gnnplan": "1", "graph": "abc", "ranks": 2}, {"epochs": 3}, [10, 20])


def agree(
    monkeypatch: pytest.MonkeyPatch, problem: Problem, predicted: dict[str, float], **theirs: Any
) -> list[dict[str, Any]]:
    """As rank 0, where rank 1 says the same but for `theirs`."""
    monkeypatch.setattr(preflight, "gather_all", lambda mine, device: [mine, {**mine, **theirs}])
    return preflight.agree(Rank(0, 2, torch.device("cpu"), "gloo"), problem, OURS, predicted)


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
        preflight.facts({**asked, "workload.seed": 1}, {}, [])["plan"]
        != preflight.facts({**asked, "workload.seed": 2}, {}, [])["plan"]
    )
    assert (
        preflight.facts({**asked, "graph": "abd"}, {}, [])["plan"]
        == preflight.facts(asked, {}, [])["plan"]
    )


def test_what_cannot_fit_is_refused(problem: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "free_memory", lambda: 100e6)
    monkeypatch.setattr(preflight, "resident", lambda: 30e6)
    agree(monkeypatch, problem, {"features": 50e6, "runtime": 30e6})  # twice 50 MB more
    agree(monkeypatch, problem, {"features": 90e6, "runtime": 30e6}, host="elsewhere")
    # a launcher that shows each rank its own GPU calls all of them cuda:0
    agree(monkeypatch, problem, {"features": 90e6, "runtime": 30e6}, card="another")
    with pytest.raises(
        Infeasible,
        match=(
            r"2 ranks need 180(\.00)? MB more on \S+ cpu, where 100(\.00)? MB are free; stop what"
            r" fills it"
        ),
    ):
        agree(monkeypatch, problem, {"features": 90e6, "runtime": 30e6})


def test_interface_and_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    preflight.must_meet()
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    preflight.must_meet()
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,eth77")
    with pytest.raises(
        SpecError,
        match=r"GLOO_SOCKET_IFNAME names eth77, but \S+ has .*lo.*; set it to one of these",
    ):
        preflight.must_meet()
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    monkeypatch.setenv("RANK", "0")
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        monkeypatch.setenv("MASTER_PORT", str(taken.getsockname()[1]))
        with pytest.raises(SpecError, match=r"MASTER_PORT \d+ of \S+ is taken .*; choose another"):
            preflight.must_meet()
        monkeypatch.setenv("RANK", "1")
        preflight.must_meet()  # only rank 0 listens
    monkeypatch.setenv("RANK", "0")
    preflight.must_meet()
    monkeypatch.setenv("MASTER_PORT", "http")
    with pytest.raises(SpecError, match="MASTER_PORT is 'http'"):
        preflight.must_meet()


def test_what_memory_that_ran_out_looks_like() -> None:
    with pytest.raises(RuntimeError) as too_much:
        torch.empty(1 << 60)
    assert (
        ran_out(too_much.value)
        and ran_out(MemoryError())
        and ran_out(OSError(errno.ENOMEM, ""))
        and ran_out(torch.OutOfMemoryError())
    )
    assert not ran_out(RuntimeError("Connection closed by peer")) and not ran_out(
        OSError(errno.ENOSPC, "")
    )
