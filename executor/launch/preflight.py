"""What all ranks check together before they train.

Can they meet, will all train the same, does it fit? A message now is better than a hang or a wrong
gradient later.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from gnnplan import __version__
from gnnplan.executor.ranks.checkpoint import fingerprint
from gnnplan.executor.ranks.gathered import gather_all
from gnnplan.executor.ranks.memory import free_memory, resident
from gnnplan.executor.ranks.rank import Rank, as_torchrun_has_it, hosts_the_store
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.vocabulary.errors import Infeasible, Mismatch, SpecError
from gnnplan.planner.vocabulary.units import show_bytes

# Predictions of memory are off by less than this factor, so what is refused cannot fit.
SLACK = 1.1
SHOWN = 4  # differing ranks that a message names


def must_meet() -> None:
    """Check that other ranks can reach this process. Raises SpecError."""
    wanted = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    present = [name for _, name in socket.if_nameindex()]
    if missing := [name for name in wanted if name not in present]:
        raise SpecError(
            f"GLOO_SOCKET_IFNAME names {', '.join(missing)}, but {socket.gethostname()} has"
            f" {', '.join(present)}; set it to one of these, or unset it"
        )
    env = as_torchrun_has_it()
    if hosts_the_store(env) and "MASTER_PORT" in env:
        _must_be_free(env["MASTER_PORT"])
    if "MASTER_ADDR" in env:
        _must_resolve(env["MASTER_ADDR"])


def _must_resolve(address: str) -> None:
    try:
        socket.getaddrinfo(address, None)
    except (OSError, UnicodeError) as error:
        raise SpecError(
            f"MASTER_ADDR {address[:80]!r} is no host that {socket.gethostname()} knows"
            f" ({getattr(error, 'strerror', None) or error}); use the address of rank 0's server"
        ) from error


def _must_be_free(port: str) -> None:
    if not (port.isascii() and port.isdecimal() and len(port) < 9 and int(port) < 1 << 16):
        raise SpecError(f"MASTER_PORT is {port!r}; a port is a number below 65536, as 29500")
    with socket.socket() as probe:
        # as the store does: the port of a server that has just ended may be taken again
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", int(port)))
        except OSError as error:
            raise SpecError(
                f"MASTER_PORT {port} of {socket.gethostname()} is taken ({error.strerror});"
                " choose another"
            ) from error


def facts(
    question: Mapping[str, Any],
    options: Mapping[str, Any],
    checkpoints: Sequence[int],
    handed_over: Mapping[int, Mapping[str, Any]] = MappingProxyType({}),
) -> dict[str, Any]:
    """What all ranks must agree in, as a short message, and the checkpoints that this rank has.

    checkpoints: its own. handed_over: those of another plan, of all its ranks.

    question: what decides about the training (ranks/checkpoint.py). Graph and version are told
    apart from the rest, so that a message can name them.
    """
    asked = {name: value for name, value in question.items() if name not in ("gnnplan", "graph")}
    return {
        "gnnplan": __version__,
        "torch": torch.__version__,
        "data": question["graph"],
        "plan": fingerprint(asked),
        "options": json.dumps(dict(options), sort_keys=True),
        "checkpoints": list(checkpoints),
        "handed_over": [[epoch, fingerprint(plan)] for epoch, plan in handed_over.items()],
    }


def agree(
    rank: Rank, problem: Problem, own: Mapping[str, Any], predicted: Mapping[str, float]
) -> list[dict[str, Any]]:
    """Exchange facts with all ranks, and return every rank's.

    own: this rank's facts. predicted: memory of the fullest rank by use [B]. Raises Mismatch if
    ranks would train different things, and Infeasible if the prediction does not fit. All ranks
    raise the same.
    """
    facts = {**own, **_room(rank, problem, predicted)}
    everyone = gather_all(facts, rank.wire_device) if rank.world > 1 else [facts]
    for name in ("gnnplan", "torch", "data", "plan", "options"):
        if odd := [r for r, other in enumerate(everyone) if other[name] != everyone[0][name]]:
            who = ", ".join(
                f"rank {r} (server {problem.servers[r]}, {everyone[r]['host']})"
                for r in odd[:SHOWN]
            )
            raise Mismatch(
                f"ranks differ in {name}: {who} has {everyone[odd[0]][name]}, rank 0"
                f" {everyone[0][name]}; give all the same plan file, options and versions"
            )
    places = [(other["host"], other["device"], other["card"]) for other in everyone]
    for place in dict.fromkeys(places):
        here = [other for other, at in zip(everyone, places, strict=True) if at == place]
        needs = sum(other["needs"] for other in here)
        free = min(other["free"] for other in here)
        if needs > SLACK * free:
            raise Infeasible(
                f"{len(here)} ranks need {show_bytes(needs)} more on {' '.join(place[:2])}, where"
                f" {show_bytes(free)} are free; stop what fills it, or plan again for more servers"
                " or a smaller workload"
            )
    return everyone


def _room(rank: Rank, problem: Problem, predicted: Mapping[str, float]) -> dict[str, Any]:
    """What this rank will still fill of its device's memory [B], and what is free there [B]."""
    total, runtime = sum(predicted.values()), predicted.get("runtime", 0.0)
    if rank.device.type == "cuda":  # the CUDA context is there already
        needs, free = total - runtime, float(torch.cuda.mem_get_info(rank.device)[0])
    else:
        needs, free = total - resident(), free_memory()
    if rank.device.type != problem.cluster.device.kind:
        needs = 0.0  # the prediction is for other devices
    return {
        "host": socket.gethostname(),
        "device": str(rank.device),
        "card": rank.card,  # a launcher may call every rank's GPU cuda:0
        "needs": max(needs, 0.0),
        "free": free,
    }
