"""Messages between ranks through the store where they meet: before training, and after a failure.

If one rank refused to train by itself, the others would wait for it; ranks that train different
things would hang or learn something wrong. So every rank tells all others what it has found, and
all ranks reach the same conclusion: the epoch where they begin, or why they do not train.

If torchrun or srun has started the ranks, our launcher does not watch them. A rank whose peers do
not answer then writes its failure into the store, and waits a moment for the failures of others.
Ranks that write nothing are lost, or still wait for a lost rank.
"""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.elastic.utils.store import synchronize

from gnnplan import __version__
from gnnplan.executor.launch.failure import FAILED_WITH_OTHERS, Failure, error_of, kept, name_of
from gnnplan.executor.launch.preflight import SLACK
from gnnplan.executor.launch.run_request import RunRequest
from gnnplan.executor.ranks.checkpoint import Checkpoints, fingerprint, onwards
from gnnplan.executor.ranks.process import backend_of
from gnnplan.executor.ranks.rank import Rank
from gnnplan.planner.vocabulary.errors import GnnplanError, Infeasible, LostRank, Mismatch
from gnnplan.planner.vocabulary.units import show_bytes

PATIENCE = 2.0  # [s] in which living ranks answer
MUST_AGREE = ("gnnplan", "torch", "data", "plan", "options")
SHOWN = 4  # differing ranks that a message lists
TORCHRUN = "torchrun .. -m gnnplan run"
Found = Mapping[str, Any]  # a rank's message before training; JSON values


class Ready(NamedTuple):
    """A rank's state before it meets the others."""

    asked: RunRequest
    checkpoints: Checkpoints
    stored: list[int]  # epochs whose checkpoint this rank has
    others: dict[int, dict[str, Any]]  # epoch -> `question` of another plan that stored it
    differs: list[str]  # where this server differs from the one that the plan was made for


class Agreement(NamedTuple):
    """The conclusion of all ranks before training."""

    hosts: list[str]  # name of every rank's host
    last: int  # the epoch that all ranks continue from; 0: they begin
    of_another: bool  # whether the checkpoint of epoch `last` is of another plan
    differs: list[str]  # where servers differ from those that the plan was made for


# -- before training -------------------------------------------------------------------------------


def refusal(process: int, error: GnnplanError) -> Found:
    """Return the message of a process that cannot train."""
    return {
        "rank": process,
        "host": socket.gethostname(),
        "refused": str(error),
        "exit_code": error.exit_code,
    }


def found(rank: Rank, ready: Ready) -> Found:
    """Return the message of a rank that can train: what all ranks must agree on, and its resources.

    Graph and version are fields of their own, so that an error can name them; the rest of the
    training's question is one fingerprint. preflight.py has checked host memory. The memory of a
    GPU is asked for here, as another process that asks would occupy some of it.
    """
    problem, predicted = ready.asked.problem, ready.asked.predicted
    question = ready.checkpoints.question
    asked = {name: value for name, value in question.items() if name not in ("gnnplan", "graph")}
    needs = communicators = free = 0.0
    if rank.device.type == "cuda":
        free = float(torch.cuda.mem_get_info(rank.device)[0])
        if problem.cluster.device.kind == "cuda":
            communicators = predicted.get("communicators", 0.0)
            # the CUDA context is allocated already
            needs = sum(predicted.values()) - communicators - predicted.get("runtime", 0.0)
    return {
        "rank": rank.rank,
        "server": problem.servers[rank.rank],
        "host": socket.gethostname(),
        "gnnplan": __version__,
        "torch": torch.__version__,
        "data": question["graph"],
        "plan": fingerprint(asked),
        "options": json.dumps(asdict(ready.asked.options), sort_keys=True),
        "checkpoints": ready.stored,
        "handed_over": [[epoch, fingerprint(plan)] for epoch, plan in ready.others.items()],
        "differs": ready.differs,
        "device": str(rank.device),
        "card": rank.card,  # a launcher may call every rank's GPU cuda:0
        "needs": needs,  # [B] of GPU memory that the rank has yet to allocate
        "communicators": communicators,  # [B] in addition, if the backend is NCCL
        "free": free,  # [B] of GPU memory
    }


def agree(store: Store, env: Mapping[str, str], own: Found) -> Agreement:
    """Exchange this rank's message with all ranks. Raises what `compare` raises, on all ranks."""
    process, world = int(env.get("RANK", "0")), int(env.get("WORLD_SIZE", "1"))
    message = json.dumps(own).encode()
    timeout_s = store.timeout.total_seconds()  # type: ignore[attr-defined]
    messages = synchronize(store, message, process, world, "found", timeout_s)
    return compare([json.loads(words) for words in messages])


def compare(messages: Sequence[Found]) -> Agreement:
    """Return the conclusion from the messages of all ranks.

    Raises Mismatch if they would train different things, Infeasible if the predicted memory does
    not fit their GPUs, and the error of a rank that refuses.
    """
    refusals: dict[tuple[str, str], str] = {}  # ranks of one server report the same reason once
    for rank in messages:
        if why := rank.get("refused"):
            who = f"rank {rank['rank']} ({rank['host']})"
            refusals.setdefault((rank["host"], why), f"{who} cannot train: {why}")
    if refusals:
        code = next(rank["exit_code"] for rank in messages if "refused" in rank)
        raise error_of("\n".join(refusals.values()), code)
    messages = sorted(messages, key=lambda rank: rank["rank"])
    first = messages[0]
    for name in MUST_AGREE:
        if differing := [rank for rank in messages if rank[name] != first[name]]:
            who = ", ".join(
                name_of(rank["rank"], rank["server"], rank["host"]) for rank in differing[:SHOWN]
            )
            raise Mismatch(
                f"ranks differ in {name}: {who} has {differing[0][name]}, rank 0 {first[name]};"
                " give all the same plan file, options and versions"
            )
    over_nccl = backend_of([rank["card"] for rank in messages]) == "nccl"
    by_place: dict[tuple[str, str, str], list[Found]] = {}
    for rank in messages:
        by_place.setdefault((rank["host"], rank["device"], rank["card"]), []).append(rank)
    for (host, device, _), here in by_place.items():
        needs = sum(rank["needs"] + over_nccl * rank["communicators"] for rank in here)
        free = min(rank["free"] for rank in here)
        if needs > SLACK * free:
            raise Infeasible(
                f"{len(here)} ranks need {show_bytes(needs)} more on {host} {device}, where"
                f" {show_bytes(free)} are free; stop the processes that fill it, or plan again for"
                " more servers or a smaller workload"
            )
    last, of_another = onwards(
        (rank["checkpoints"] for rank in messages),
        ([(epoch, plan) for epoch, plan in rank["handed_over"]] for rank in messages),
    )
    return Agreement([rank["host"] for rank in messages], last, of_another, _by_host(messages))


def _by_host(messages: Sequence[Found]) -> list[str]:
    """Return each difference once, with the servers' names unless all servers have it."""
    hosts = {rank["host"] for rank in messages}
    where: dict[str, dict[str, None]] = {}
    for rank in messages:
        for line in rank["differs"]:
            where.setdefault(line, {})[rank["host"]] = None
    return [
        line if len(there) == len(hosts) else f"{line} ({', '.join(there)})"
        for line, there in where.items()
    ]


# -- after a failure -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Peers:
    """All ranks, as one rank knows them after they have met.

    rank: this rank. store: where ranks met. servers, hosts: of every rank.
    """

    rank: int
    store: Store
    servers: Sequence[int]
    hosts: Sequence[str]
    out: Path

    def roll_call(self, failure: Failure) -> str:
        """Return what a rank knows of the others after its own failure, and the remedy.

        Writes the failure for other ranks to read. A rank that failed by itself knows the reason,
        and does not wait for answers.
        """
        _outlive_the_others()  # torchrun must not end this process before it has reported
        answers: dict[int, Failure] | None = None
        with suppress(RuntimeError, ValueError):  # torch reports lost connections as RuntimeErrors
            answers = self._answers(PrefixStore("roll call", self.store), failure)
        others = f". {self._suspects(answers)}" if failure.is_consequence else ""
        if failure.exit_code not in (LostRank.exit_code, FAILED_WITH_OTHERS):
            return others  # the message says what to change
        return f"{others}. {self._remedy(self.hosts[self.rank])}"

    def _answers(self, store: Store, failure: Failure) -> dict[int, Failure]:
        """Return the failures that ranks report within `PATIENCE`, by rank."""
        keys = [str(rank) for rank in range(len(self.hosts))]
        store.set_timeout(timedelta(seconds=PATIENCE))
        store.set(keys[self.rank], json.dumps(asdict(failure)))
        if failure.is_consequence:
            with suppress(RuntimeError):  # time-out: some ranks report nothing
                store.wait(keys)
        reports = {rank: store.get(key) for rank, key in enumerate(keys) if store.check([key])}
        return {rank: Failure(**json.loads(report)) for rank, report in reports.items()}

    def _suspects(self, answers: Mapping[int, Failure] | None) -> str:
        """Return a sentence on the ranks that failed by themselves, else on the silent ranks.

        answers: None if the store cannot be reached.
        """
        if answers is None:
            return (
                "The store in which the ranks met does not answer: the process that holds it is"
                " gone (torchrun's on the first server; under srun that of the first rank,"
                f" {self._name(0)})"
            )
        for rank, failure in answers.items():
            if not failure.is_consequence:
                return f"{self._name(rank)} failed in {failure.activity}: {failure.message}"
        absent = [self._name(rank) for rank in range(len(self.hosts)) if rank not in answers]
        if not absent:
            return "All ranks are alive and wait for each other: is a link between them down?"
        if len(absent) == 1:
            return f"{absent[0]} was lost or stopped answering"
        listed = ", ".join(absent)
        return f"These do not answer, because they were lost or wait for one that was: {listed}"

    def _name(self, rank: int) -> str:
        return name_of(rank, self.servers[rank], self.hosts[rank])

    def _remedy(self, host: str) -> str:
        """Return how to continue, from the checkpoints on this host's disk."""
        count = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        most = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
        if count.isdecimal() and most.isdecimal() and int(count) < int(most):
            return f"torchrun starts all ranks anew (restart {int(count) + 1} of {most})"
        safe = kept(self.out, [r for r, other in enumerate(self.hosts) if other == host], TORCHRUN)
        if "--resume" in safe:
            return f"resume: {safe}"
        return f"{safe}; no checkpoint is there to resume from, start anew with another --out"


def _outlive_the_others() -> None:
    """Ignore SIGTERM, which torchrun sends to the other ranks as soon as one ends."""
    with suppress(ValueError):  # only the main thread may set a handler
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
