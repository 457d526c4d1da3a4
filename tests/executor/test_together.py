"""Ranks of torchrun and srun refuse together what one of them finds."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import HashStore, PrefixStore

from gnnplan.cli import app
from gnnplan.executor.launch import together
from gnnplan.planner.vocabulary.errors import GnnplanError, SpecError

GRAPH = "synthetic:community?vertices=200&edges=1600&features=8&classes=4&seed=0"
Found = tuple[GnnplanError | None, list[str]]


class Slow(PrefixStore):  # type: ignore[misc]
    """The store as a rank far away reads it."""

    def get(self, key: str) -> bytes:
        time.sleep(0.3)
        return bytes(super().get(key))


def all_begin(*found: Found) -> list[list[str] | GnnplanError]:
    """What every rank gets or raises; the last one is the slowest."""
    store = HashStore()
    store.set_timeout(timedelta(seconds=20))

    def begin(rank: int) -> list[str] | GnnplanError:
        env = {"RANK": str(rank), "WORLD_SIZE": str(len(found))}
        own = (Slow if rank == len(found) - 1 else PrefixStore)("run", store)
        try:
            return together.begin_together(own, env, *found[rank], hosts_store=rank == 0)
        except GnnplanError as error:
            # the store ends with its host
            assert rank or own.add("heard", 0) == len(found), "rank 0 left before all had heard"
            return error

    with ThreadPoolExecutor(len(found)) as threads:
        return list(threads.map(begin, range(len(found))))


def test_what_differs_is_said_once_by_rank_0() -> None:
    assert all_begin((None, ["a"]), (None, ["a", "b"]), (None, ["a"])) == [["a", "b"], [], []]


def test_what_differs_on_one_server_names_it() -> None:

    everyone = [{"host": "first", "differs": ["a"]}, {"host": "second", "differs": ["a", "b"]}]
    assert together._by_host(everyone) == ["a", "b (second)"]


@pytest.mark.parametrize("refusing", [0, 2])
def test_what_one_refuses_all_refuse(refusing: int) -> None:
    error = SpecError("open files: too few")
    found: list[Found] = [(error if rank == refusing else None, []) for rank in range(3)]
    for rank, said in enumerate(all_begin(*found)):
        assert isinstance(said, GnnplanError) and said.exit_code == 2
        own, host = str(error), socket.gethostname()
        assert str(said) == (
            own if rank == refusing else f"rank {refusing} ({host}) cannot train: {own}"
        )


@pytest.mark.nightly
@pytest.mark.processes
@pytest.mark.timeout(120)
def test_ranks_of_srun_do_not_wait_for_one_that_refuses(tmp_path: Path) -> None:
    """Rank 0, whose plan is of other data, hosts the store where they meet. Rank 1 waited for it
    until --timeout, and then did not know why."""
    plan = tmp_path / "plan.json"
    words = ["--ranks", "2", "--strategy", "graph_parallel", "-o", str(plan)]
    app(["plan", "--graph", GRAPH, "--hidden", "8", *words], standalone_mode=False)
    document = json.loads(plan.read_text())
    document["graph"]["hash"] = "00"
    (tmp_path / "other.json").write_text(json.dumps(document))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    run = [sys.executable, "-m", "gnnplan", "run", "--timeout", "600", "--out", tmp_path / "out"]
    ranks = [
        subprocess.Popen(
            [*run, tmp_path / file],
            env=os.environ | env | {"RANK": str(rank), "CUDA_VISIBLE_DEVICES": ""},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, file in enumerate(("other.json", "plan.json"))
    ]
    try:
        said = [rank.communicate(timeout=90)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [2, 2], said
    why = (
        "graph: planned synthetic:.* hash 00, here hash .*; it was made for other data: plan again"
    )
    for rank, words_before in enumerate(("", r"rank 0 \(.*\) cannot train: ")):
        error = rf"error: rank {rank} \(.*\) in start: {words_before}{why}"
        assert any(re.fullmatch(error, line) for line in said[rank].splitlines()), said
    assert not (tmp_path / "out").exists()
