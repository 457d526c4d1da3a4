"""Ranks that torchrun or srun has started begin together, or refuse together.

A rank that refuses alone would leave the others waiting for it. So each writes what it has found of
its own server into the store where all meet, rank 0 reads all of it, and all are told the same.
"""

from __future__ import annotations

import json
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from torch.distributed import Store  # type: ignore[attr-defined]

from gnnplan.planner.vocabulary.errors import GnnplanError

PATIENCE = 2.0  # [s] that the host of the store waits until all have heard of a refusal


def begin_together(
    store: Store,
    env: Mapping[str, str],
    refused: GnnplanError | None,
    differs: Sequence[str],
    hosts_store: bool,
) -> list[str]:
    """Tell all ranks what this one has found.

    refused: why it cannot train. differs: what differs on its server. Returns what differs on any
    server, for rank 0 to say; other ranks get nothing. Raises `refused`, and where it is None but
    another rank refuses, what that one says.
    """
    rank, world = int(env["RANK"]), int(env["WORLD_SIZE"])
    own = {
        "host": socket.gethostname(),
        "differs": list(differs),
        "refused": str(refused) if refused else "",
        "exit_code": refused.exit_code if refused else 0,
    }
    store.set(f"found {rank}", json.dumps(own))
    if rank == 0:
        everyone = [json.loads(store.get(f"found {other}")) for other in range(world)]
        store.set("verdict", json.dumps(_refusal(everyone)))
    verdict = json.loads(store.get("verdict"))
    heard = store.add("heard", 1)
    if not verdict:
        return _by_host(everyone) if rank == 0 else []
    if hosts_store:
        with suppress(ValueError):  # only a main thread may ask for it
            # torchrun ends the other ranks as soon as it sees one end
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        end = time.monotonic() + PATIENCE
        while heard < world and time.monotonic() < end:
            time.sleep(0.02)
            heard = store.add("heard", 0)
    if refused is not None:
        raise refused
    error = GnnplanError(verdict["message"])
    error.exit_code = verdict["exit_code"]
    raise error


def _refusal(everyone: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What ranks that can begin are told of those that cannot; empty if all can."""
    refusing = [(r, found) for r, found in enumerate(everyone) if found["refused"]]
    if not refusing:
        return {}
    said: dict[tuple[str, str], int] = {}  # ranks of a server say the same
    for r, found in refusing:
        said.setdefault((found["host"], found["refused"]), r)
    words = [f"rank {r} ({host}) cannot train: {why}" for (host, why), r in said.items()]
    return {"message": "\n".join(words), "exit_code": refusing[0][1]["exit_code"]}


def _by_host(everyone: Sequence[Mapping[str, Any]]) -> list[str]:
    """What differs, once each; with the servers' names where it does not on all of them."""
    hosts = list(dict.fromkeys(found["host"] for found in everyone))
    where: dict[str, list[str]] = {}
    for found in everyone:
        for line in found["differs"]:
            if found["host"] not in (there := where.setdefault(line, [])):
                there.append(found["host"])
    return [
        line if len(there) == len(hosts) else f"{line} ({', '.join(there)})"
        for line, there in where.items()
    ]
