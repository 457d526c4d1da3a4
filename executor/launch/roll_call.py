"""Which ranks are gone, where torchrun or srun has started them and no launcher of ours watches.

A rank whose peers do not answer writes its failure into the store in which all ranks met, and waits
a moment for what the others write there. Ranks that write nothing are lost, or still wait for one
that is.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import distributed_c10d

from gnnplan.executor.launch.blame import FAILED_WITH_OTHERS, Failure, kept
from gnnplan.executor.ranks.rank import Rank

PATIENCE = 2.0  # [s] in which ranks that are alive answer
TORCHRUN = "torchrun .. -m gnnplan run"


def roll_call(
    rank: Rank, failure: Failure, servers: Sequence[int], hosts: Sequence[str], out: Path
) -> str:
    """What this rank can say of the others after its own failure, and the remedy.

    servers, hosts: of every rank. Writes the failure for other ranks to read. A rank that failed by
    itself knows why, and does not wait.
    """
    with suppress(ValueError):  # only a main thread may ask for it
        # torchrun ends the other ranks as soon as it sees one die; they have something to say
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    consequence = failure.exit_code == FAILED_WITH_OTHERS
    answers = _answers(rank, failure, PATIENCE if consequence else 0.0)
    found = f". {_who(rank, answers, servers, hosts)}" if consequence else ""
    if failure.exit_code not in (4, FAILED_WITH_OTHERS):  # the message says what to change
        return found
    here = [r for r, host in enumerate(hosts) if host == hosts[rank.rank]]
    return f"{found}. {_remedy(out, here)}"


def _answers(rank: Rank, failure: Failure, patience: float) -> dict[int, dict[str, Any]] | None:
    """The failures of all ranks that say one in time; None if the store cannot be reached."""
    if rank.world == 1:
        return {}
    answers: dict[int, dict[str, Any]] = {rank.rank: asdict(failure)}
    try:
        store = distributed_c10d.PrefixStore("roll call", distributed_c10d._get_default_store())
        store.set_timeout(timedelta(seconds=PATIENCE))
        store.set(str(rank.rank), json.dumps(answers[rank.rank]))
        end = time.monotonic() + patience
        while len(answers) < rank.world and time.monotonic() < end:
            for other in range(rank.world):
                if other not in answers and store.check([str(other)]):
                    answers[other] = json.loads(store.get(str(other)))
            time.sleep(0.05)
    except (RuntimeError, ValueError):  # torch's errors of connections are RuntimeErrors
        return None
    return answers


def _who(
    rank: Rank,
    answers: dict[int, dict[str, Any]] | None,
    servers: Sequence[int],
    hosts: Sequence[str],
) -> str:
    """The ranks that failed by themselves, else those that do not answer."""

    def name(r: int) -> str:
        return f"rank {r} (server {servers[r]}, {hosts[r]})"

    if answers is None:
        return (
            "The store in which the ranks met does not answer: the process that holds it is gone"
            " (torchrun's on the first server; under srun that of the first rank,"
            f" {name(0)})"
        )
    guilty = [r for r, said in answers.items() if said["exit_code"] != FAILED_WITH_OTHERS]
    if guilty:
        first = answers[guilty[0]]
        return f"{name(guilty[0])} failed in {first['activity']}: {first['message']}"
    absent = [r for r in range(rank.world) if r not in answers]
    if not absent:
        return "All ranks are alive and wait for each other: is a link between them down?"
    if len(absent) == 1:
        return f"{name(absent[0])} was lost or stopped answering"
    listed = ", ".join(name(r) for r in absent)
    return f"These do not answer, because they were lost or wait for one that was: {listed}"


def _remedy(out: Path, here: Sequence[int]) -> str:
    """How to go on. here: the ranks whose checkpoints are on this machine's disk."""
    count = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    most = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
    if count.isdecimal() and most.isdecimal() and int(count) < int(most):
        return f"torchrun starts all ranks anew (restart {int(count) + 1} of {most})"
    safe = kept(out, here, TORCHRUN)
    if "--resume" in safe:
        return f"resume: {safe}"
    return f"{safe}; no checkpoint is there to resume from, start anew with another --out"
