"""Fifty faults: kinds x phases, in ranks and in the launcher (faults.py).

All fifty run at night, shared out among the strategies. Every time seen are a rank that is killed
(test_faults.py), a launcher that starts its ranks anew (test_restarted.py) and ends them
(test_lab.py), and that what is resumed is the unbroken training (test_conformance.py)."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
from faults import CASES, EVERY, PHASES, Fault, epochs_of, small_disk, train_through

from gnnplan.testing.ranks import Case, Ranks, Result

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        not Path("/proc/self/environ").exists(), reason="finds ranks by their environment in /proc"
    ),
]
ORDER = list(PHASES)
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
        mine = sorted(in_ranks[number::cases], key=lambda fault: ORDER.index(fault.phase))
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
    whole = replace(case, epochs=epochs_of(len(faults)), eval_every=EVERY)
    return run_ranks(2, [whole])[0]


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
