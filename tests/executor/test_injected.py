"""Fifty faults: kinds x phases, in ranks and in the launcher (faults.py).

All fifty run at night, shared out among the strategies. Every time seen are a rank that is killed
(test_faults.py), ranks that a launcher starts anew (test_resume.py) and ends
(test_lab.py), and that what is resumed is the unbroken training (test_conformance.py)."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from calls import planned
from faults import (
    CASES,
    EVERY,
    GRAPH,
    PATCH,
    PHASES,
    Fault,
    epochs_of,
    small_disk,
    train_through,
)
from nightly import at_night

from gnnplan.testing.ranks import Case, Ranks, Result

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        not Path("/proc/self/environ").exists(), reason="finds ranks by their environment in /proc"
    ),
]
IN_RANKS = [
    Fault(kind, phase)
    for phase in PHASES
    for kind in ("SIGKILL", "raises", "SIGTERM", "starves", "SIGSTOP")
    if (kind, phase) not in (("starves", "python"), ("SIGSTOP", "python"), ("SIGSTOP", "start"))
]
IN_LAUNCHER = [
    Fault(f"launcher {name}", phase)
    for name in ("SIGINT", "SIGTERM", "SIGKILL")
    for phase in ("exchange", "evaluation", "checkpoint")
][:8]


def shared_out(in_ranks: list[Fault], in_launcher: list[Fault], cases: int) -> list[list[Fault]]:
    """A chain per case: the end comes last, and the launcher is hit when there is a checkpoint."""
    chains = []
    for number in range(cases):
        mine = sorted(in_ranks[number::cases], key=lambda fault: [*PHASES].index(fault.phase))
        last = [fault for fault in mine if fault.phase == "end"]
        chains.append([*mine[: len(mine) - len(last)], *in_launcher[number::cases], *last])
    return chains


CHAINS = shared_out(IN_RANKS, IN_LAUNCHER, len(CASES))


def test_they_are_fifty():
    faults = [fault for chain in CHAINS for fault in chain]
    assert len(faults) == len(set(faults)) == 50
    assert {fault.phase for fault in faults} == set(PHASES)


def unbroken(case: Case, faults: list[Fault], run_ranks: Ranks) -> Result:
    """As many epochs as so many faults take, without any."""
    return run_ranks(2, replace(case, epochs=epochs_of(len(faults)), eval_every=EVERY))


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("case", "faults"),
    [*zip(CASES, CHAINS, strict=True)],
    ids=lambda value: value.strategy if isinstance(value, Case) else f"{len(value)} faults",
)
def test_a_training_that_is_hit_again_is_the_unbroken_one(case, faults, run_ranks, start, tmp_path):
    train_through(case, faults, unbroken(case, faults, run_ranks), start, tmp_path)


@pytest.mark.nightly
@pytest.mark.skipif(os.geteuid() != 0, reason="emulates servers, which takes root")
def test_restarts_outlast_a_link_that_is_down(run_ranks, start, tmp_path):
    """Twice, between servers that it plays: once of each of them."""
    case, faults = CASES[2], [Fault("no link", "exchange")] * 2
    whole = unbroken(case, faults, run_ranks)
    train_through(case, faults, whole, start, tmp_path, "--emulate", "unshaped")


@pytest.mark.nightly
@pytest.mark.skipif(os.geteuid() != 0, reason="makes a small disk, which takes root")
def test_a_disk_that_fills_amid_a_checkpoint(run_ranks, start, tmp_path):
    """And a rank that may open no more files: training goes on once there is room."""
    case, faults = CASES[0], [Fault("full disk", "checkpoint"), Fault("no files", "evaluation")]
    whole = unbroken(case, faults, run_ranks)
    with small_disk(tmp_path / "disk") as disk:
        train_through(case, faults, whole, start, tmp_path, out=disk / "run")


@pytest.mark.parametrize(
    "how",
    [
        "--strategy gnnpipe",
        at_night("--strategy graph_parallel"),
        at_night("--strategy feature_parallel"),
        at_night("--strategy gsplit(prefetch=2) --mode mini --batch 64 --fanout 3,3 --layers 2"),
    ],
)
def test_a_rank_may_read_its_part_for_longer_than_a_message_may_take(tmp_path, start, how):
    """With 10^8 edges and a slow disk, rank 1 gave up after 30 s: "rank 0 was lost"."""
    (tmp_path / "faults").mkdir()
    slow = {"rank": 0, "kind": "reads", "at": "^set-up$", "outlived": True, "away_s": 4}
    (tmp_path / "faults" / "0.json").write_text(json.dumps(slow))
    (tmp_path / "sitecustomize.py").write_text(PATCH)
    env = {"PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[2]}", "FAULTS": f"{tmp_path}/faults"}
    plan = planned(tmp_path / "plan.json", "--graph", GRAPH, "--ranks 2 --hidden 8", *how.split())
    run = start(plan, "--epochs", "2", "--timeout", "2", **env)
    assert run.ended() == 0, run.stderr
    assert (tmp_path / "faults" / "0.done").exists()
