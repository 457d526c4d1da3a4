"""What is wrong before training starts is said in words, by all ranks alike."""

import json
import re
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from asked import on
from calls import free_port, planned
from torch.distributed import HashStore, PrefixStore

from gnnplan.executor.launch import rank_process
from gnnplan.executor.launch.rank_process import Agreement, Found, Ready
from gnnplan.executor.launch.run_request import Options, RunRequest
from gnnplan.executor.ranks.checkpoint import Checkpoints
from gnnplan.executor.ranks.rank import Rank
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.vocabulary.errors import GnnplanError, Infeasible, Mismatch, SpecError
from gnnplan.testing.ranks import Case

GRAPH = "synthetic:community?vertices=200&edges=1600&features=8&classes=4&seed=0"
CASE = Case("graph_parallel", GRAPH, servers=2)
CPU = torch.device("cpu")
ON_CPU, OTHER = (Rank(number, 2, CPU, "gloo") for number in (0, 1))
QUESTION = {"gnnplan": "1", "graph": "abc", "ranks": 2}


@pytest.fixture(scope="module")
def problem():
    return CASE.problem(2)


def found(
    problem: Problem,
    predicted: dict[str, float] | None = None,
    rank: Rank = ON_CPU,
    question: dict[str, Any] = QUESTION,
    **other: Any,
) -> Found:
    """What a rank says, but for what is `other`."""
    checkpoints = Checkpoints(Path(), rank.rank, 0, question)
    document = {"best": {"predicted": {"memory": predicted or {}}}}
    asked = RunRequest(document, Path(), Options(epochs=3), loaded=problem)
    return {**rank_process.found(rank, Ready(asked, checkpoints, [10, 20], {}, [])), **other}


def test_ranks_that_agree(problem):
    theirs = found(problem, rank=OTHER, checkpoints=[10], host="elsewhere")
    # processes are in the order of their GPUs
    agreed = rank_process.compare([theirs, found(problem)])
    assert agreed == Agreement([socket.gethostname(), "elsewhere"], 10, False, [])


@pytest.mark.parametrize("name", ["gnnplan", "torch", "data", "plan", "options"])
def test_ranks_that_differ(name, problem):
    theirs = found(problem, rank=OTHER, host="elsewhere", **{name: "other"})
    words = (
        rf"ranks differ in {name}: rank 1 \(server 1, elsewhere\) has other, rank 0 .*; give all"
    )
    with pytest.raises(Mismatch, match=words):
        rank_process.compare([found(problem), theirs])


def test_another_question_is_another_plan(problem):
    """Of the data and the version other facts tell."""

    def plan(**more: Any) -> str:
        return found(problem, question={**QUESTION, **more})["plan"]

    assert plan(**{"workload.seed": 1}) != plan(**{"workload.seed": 2})
    assert plan(graph="abd") == plan()


def test_what_does_not_fit_a_gpu_is_refused(monkeypatch):
    """Two ranks on one GPU, of which 100 MB are free."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (100e6, 200e6))
    planned = CASE.problem(2)
    problem = on(planned, kind="cuda")

    def both(problem: Problem, features: float, **theirs: Any) -> Agreement:
        predicted = {"features": features, "runtime": 30e6, "communicators": 20e6}
        of_one = [Rank(r, 2, torch.device("cuda", 0), "gloo", card="one") for r in (0, 1)]
        ranks = [found(problem, predicted, rank) for rank in of_one]
        return rank_process.compare([ranks[0], {**ranks[1], **theirs}])

    both(problem, 50e6)  # twice 50 MB more
    both(problem, 90e6, host="elsewhere")
    # a launcher that shows each rank its own GPU calls all of them cuda:0
    both(problem, 90e6, card="another")
    with pytest.raises(Infeasible, match=r"1 ranks need 120(\.00)? MB more"):  # over NCCL
        both(problem, 100e6, card="another")
    both(planned, 90e6)  # the prediction is for other devices
    words = r"2 ranks need 180(\.00)? MB more on \S+ cuda:0, where 100(\.00)? MB are free; stop the"
    with pytest.raises(Infeasible, match=words):
        both(problem, 90e6)


class Slow(PrefixStore):  # type: ignore[misc]
    """The store as a rank far away reads it."""

    def multi_get(self, keys: list[str]) -> list[bytes]:
        time.sleep(0.3)
        return list(super().multi_get(keys))


def all_begin(*everyone: Found) -> list[list[str] | GnnplanError]:
    """What every rank is told; the last one is the slowest."""
    store = HashStore()
    store.set_timeout(timedelta(seconds=20))

    def begin(rank: int) -> list[str] | GnnplanError:
        env = {"RANK": str(rank), "WORLD_SIZE": str(len(everyone))}
        own = (Slow if rank == len(everyone) - 1 else PrefixStore)("run", store)
        try:
            return rank_process.agree(own, env, everyone[rank]).differs
        except GnnplanError as error:
            # the store ends with its host
            heard = own.add("found/finished/num_members", 0)
            assert rank or heard == len(everyone), "rank 0 left before all had heard"
            return error

    with ThreadPoolExecutor(len(everyone)) as threads:
        return list(threads.map(begin, range(len(everyone))))


def test_what_differs_is_said_once(problem):
    everyone = [found(problem, differs=differs) for differs in (["a"], ["a", "b"], ["a"])]
    assert all_begin(*everyone) == [["a", "b"]] * 3
    everyone[1] = {**everyone[1], "host": "second"}
    assert rank_process.compare(everyone).differs == ["a", "b (second)"]


@pytest.mark.parametrize("refusing", [0, 2])
def test_what_one_refuses_all_refuse(refusing, problem):
    everyone = [found(problem)] * 3
    everyone[refusing] = rank_process.refusal(refusing, SpecError("open files: too few"))
    words = f"rank {refusing} ({socket.gethostname()}) cannot train: open files: too few"
    for said in all_begin(*everyone):
        assert isinstance(said, GnnplanError) and (said.exit_code, str(said)) == (2, words)


@pytest.mark.nightly
def test_ranks_of_srun_do_not_wait_for_one_that_refuses(tmp_path, fork_server):
    """Rank 0 hosts the store: rank 1 waited for it until --timeout, and did not know why."""
    how = "--hidden 8 --ranks 2 --strategy graph_parallel"
    plan = planned(tmp_path / "plan.json", "--graph", GRAPH, how)
    document = json.loads(plan.read_text())
    document["graph"]["hash"] = "00"
    (tmp_path / "other.json").write_text(json.dumps(document))
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    env["CUDA_VISIBLE_DEVICES"] = ""
    run = ["-m", "gnnplan", "run", "--timeout", "600", "--out", str(tmp_path / "out")]
    files = enumerate(("other.json", "plan.json"))
    ranks = [([*run, str(tmp_path / file)], env | {"RANK": str(rank)}) for rank, file in files]
    ended = fork_server.run(ranks, tmp_path)
    assert [rank.code for rank in ended] == [2, 2], ended
    why = "graph: planned synthetic:.* hash 00, here hash .*; it was made for other data.*"
    for rank, words_before in enumerate(("", r"rank 0 \(.*\) cannot train: ")):
        error = rf"error: rank {rank} \(.*\) in start: {words_before}{why}"
        assert any(re.fullmatch(error, line) for line in ended[rank].stderr.splitlines()), ended
    assert not (tmp_path / "out").exists()
