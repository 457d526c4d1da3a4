"""Where ranks meet: a store at one address, which nobody reaches who need not.

Ranks of one machine meet on its loopback. Ranks of several servers meet at MASTER_ADDR, and where
that is a number rank 0's store listens there alone. A run has a name that others cannot guess where
the launcher gave it one; its digest lies open in the store, and its keys stand behind the name."""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from ipaddress import ip_address

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from gnnplan.planner.vocabulary.errors import SpecError

LOOPBACK = "127.0.0.1"
OWNER = "gnnplan run"  # the store's key with the digest of the run that it belongs to


def store_of_this_machine() -> TCPStore:
    """A store that this process hosts, on a port that the system chooses, for this machine."""
    listener = socket.create_server((LOOPBACK, 0))
    return TCPStore(
        LOOPBACK,
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def loopback_only() -> dict[str, str]:
    """The environment in which Gloo and NCCL listen on this machine's loopback alone."""
    names = [name for _, name in socket.if_nameindex()]
    for loopback in ("lo", "lo0"):
        if loopback in names:
            return {"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": loopback}
    return {}


def on_this_machine(port: int, run: str) -> dict[str, str]:
    """The environment of ranks of this machine alone, whose store is at `port`; `run` names it."""
    return {
        **loopback_only(),
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": run,
    }


def join(env: Mapping[str, str], attempt: str, limit: timedelta, hosts: bool = False) -> Store:
    """The store of this run and attempt, at MASTER_ADDR and MASTER_PORT.

    attempt: how often the launcher has restarted its ranks. hosts: this process offers the store.
    Raises SpecError if the store is another run's.
    """
    address, port = env["MASTER_ADDR"], int(env["MASTER_PORT"])
    listener = _listen(address, port) if hosts else None
    store = TCPStore(
        address,
        port,
        is_master=hosts,
        timeout=limit,
        wait_for_workers=False,
        master_listen_fd=listener.detach() if listener else None,
    )
    name = env.get("TORCHELASTIC_RUN_ID") or f"slurm {env.get('SLURM_JOB_ID')}"
    digest = hashlib.sha256(name.encode()).hexdigest()[:16]
    owner = store.compare_set(OWNER, "", digest).decode()
    if owner != digest:
        raise SpecError(
            f"the ranks that meet at {address} port {port} are another run's (its digest is"
            f" {owner}, this run's {digest}); choose another MASTER_PORT"
        )
    return PrefixStore(f"{name} attempt {attempt}", store)


def _listen(address: str, port: int) -> socket.socket | None:
    """A socket at this address alone; None, to listen on all, where that may not be the one.

    A name leads to other addresses on other servers (127.0.1.1 on its own, in Debian), and a
    container does not have the address that it is reached by.
    """
    with suppress(OSError, ValueError):
        family = socket.AF_INET if ip_address(address).version == 4 else socket.AF_INET6
        return socket.create_server((address, port), family=family)
    return None
