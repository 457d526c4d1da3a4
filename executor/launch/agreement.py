"""What all ranks check together before they train: will all train the same, does it fit their GPUs?

A message now is better than a hang or a wrong gradient later. What one machine can check alone is
in preflight.py.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from gnnplan import __version__
from gnnplan.executor.launch.preflight import SLACK
from gnnplan.executor.ranks.checkpoint import fingerprint
from gnnplan.executor.ranks.gathered import gather_all
from gnnplan.executor.ranks.rank import Rank
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.vocabulary.errors import Infeasible, Mismatch
from gnnplan.planner.vocabulary.units import show_bytes

SHOWN = 4  # differing ranks that a message names


def facts(
    question: Mapping[str, Any],
    options: Mapping[str, Any],
    checkpoints: Sequence[int],
    handed_over: Mapping[int, Mapping[str, Any]] = MappingProxyType({}),
) -> dict[str, Any]:
    """What all ranks must agree in, as a short message, and the checkpoints that this rank has.

    question: what decides about the training (ranks/checkpoint.py). Graph and version are told
    apart from the rest, so that a message can name them. checkpoints: its own. handed_over: those
    of another plan, of all its ranks.
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
    """What this rank will still fill of its GPU's memory [B], and what is free there [B].

    A processor's memory was looked at before (preflight.py). A GPU's is known once ranks have it:
    another process would fill some of it to ask.
    """
    needs = free = 0.0
    if rank.device.type == "cuda":
        free = float(torch.cuda.mem_get_info(rank.device)[0])
        if problem.cluster.device.kind == "cuda":  # context and communicators are there already
            there = ("runtime", "communicators")
            needs = sum(nbytes for use, nbytes in predicted.items() if use not in there)
    return {
        "host": socket.gethostname(),
        "device": str(rank.device),
        "card": rank.card,  # a launcher may call every rank's GPU cuda:0
        "needs": needs,
        "free": free,
    }
