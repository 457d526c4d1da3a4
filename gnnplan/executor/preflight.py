"""Before ranks train: can they meet, do all train the same, is there room. Better words now than a hang or a wrong gradient later."""

from __future__ import annotations

import hashlib
import json
import os
import socket
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from gnnplan import __version__
from gnnplan.executor.memory import free_memory, resident
from gnnplan.executor.worker import Rank
from gnnplan.planner.errors import Infeasible, Mismatch, SpecError
from gnnplan.planner.job import Job
from gnnplan.planner.units import show_bytes

ROOM = 4096  # [B] that a rank's facts take
SLACK = 1.1  # predictions of memory err by less: what is refused cannot fit


def must_meet() -> None:
    """Whether this process can be reached at all. Raises SpecError."""
    wanted = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    there = [name for _, name in socket.if_nameindex()]
    if missing := [name for name in wanted if name not in there]:
        raise SpecError(f"GLOO_SOCKET_IFNAME names {', '.join(missing)}, but {socket.gethostname()} has {', '.join(there)}; set it to one "
                        "of these, or unset it")  # fmt: skip
    env = os.environ
    if env.get("RANK", env.get("SLURM_PROCID")) == "0" and "MASTER_PORT" in env and env.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        port = env["MASTER_PORT"]
        if not (port.isdecimal() and int(port) < 1 << 16):
            raise SpecError(f"MASTER_PORT is {port!r}; a port is a number below 65536, as 29500")
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server itself does: one that has just ended is no matter
            try:
                probe.bind(("", int(port)))
            except OSError as error:
                raise SpecError(f"MASTER_PORT {port} of {socket.gethostname()} is taken ({error.strerror}); choose another") from error


def facts(question: Mapping[str, Any], options: Mapping[str, Any], checkpoints: Sequence[int]) -> dict[str, Any]:
    """What all ranks must agree in, short enough to be sent around; and the checkpoints that this one has."""
    asked = {name: value for name, value in question.items() if name not in ("gnnplan", "graph")}
    return {"gnnplan": __version__, "torch": torch.__version__, "data": question["graph"], "plan": _hash(asked),
            "options": json.dumps(dict(options), sort_keys=True), "checkpoints": list(checkpoints)}  # fmt: skip


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]


def agree(rank: Rank, job: Job, mine: Mapping[str, Any], predicted: Mapping[str, float]) -> list[dict[str, Any]]:
    """Every rank's facts. Raises Mismatch where ranks would train different things, Infeasible where what the plan predicts for the
    fullest rank [B by use] does not fit; in all ranks alike."""
    all_ = _gathered(rank, {**mine, **_room(rank, job, predicted)})
    for name in ("gnnplan", "torch", "data", "plan", "options"):
        if odd := [r for r, theirs in enumerate(all_) if theirs[name] != all_[0][name]]:
            who = ", ".join(f"rank {r} (server {job.servers[r]}, {all_[r]['host']})" for r in odd[:4])
            raise Mismatch(f"ranks differ in {name}: {who} has {all_[odd[0]][name]}, rank 0 {all_[0][name]}; give all the same plan file, "
                           "options and versions")  # fmt: skip
    for place in dict.fromkeys((theirs["host"], theirs["device"]) for theirs in all_):
        here = [theirs for theirs in all_ if (theirs["host"], theirs["device"]) == place]
        needs, free = sum(theirs["needs"] for theirs in here), min(theirs["free"] for theirs in here)
        if needs > SLACK * free:
            raise Infeasible(f"{len(here)} ranks need {show_bytes(needs)} more on {' '.join(place)}, where {show_bytes(free)} are free; "
                             "stop what fills it, or plan again for more servers or a smaller workload")  # fmt: skip
    return all_


def _room(rank: Rank, job: Job, predicted: Mapping[str, float]) -> dict[str, Any]:
    """What this rank will still fill of its device's memory, and what is free there."""
    whole, runtime = sum(predicted.values()), predicted.get("runtime", 0.0)
    if rank.device.type == "cuda":  # the context is there already
        needs, free = whole - runtime, float(torch.cuda.mem_get_info(rank.device)[0])
    else:
        needs, free = whole - resident(), free_memory()
    if rank.device.type != job.cluster.device.kind:
        needs = 0.0  # planned for other devices
    return {"host": socket.gethostname(), "device": str(rank.device), "needs": max(needs, 0.0), "free": free}


def _gathered(rank: Rank, mine: Mapping[str, Any]) -> list[dict[str, Any]]:
    """As JSON: what comes from a network is not unpickled."""
    text = json.dumps(dict(mine)).encode()
    assert len(text) <= ROOM, f"facts of {len(text)} bytes"
    wire = torch.frombuffer(bytearray(text.ljust(ROOM)), dtype=torch.uint8).to(rank.wire_device)
    out = [torch.empty_like(wire) for _ in range(rank.world)]
    if rank.world > 1:
        dist.all_gather(out, wire)
    else:
        out = [wire]
    return [json.loads(bytes(each.cpu().numpy())) for each in out]
