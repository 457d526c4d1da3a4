"""Rendezvous: the environment that a launcher gives a process, and the store where ranks meet.

Ranks of one machine meet on its loopback. Ranks of several servers meet at MASTER_ADDR; if that is
an IP address, rank 0's store listens at this address only. A run has a name, which others cannot
guess if the launcher chose it: the store shows the name's digest, and its keys begin with the
name."""

from __future__ import annotations

import hashlib
import os
import re
import socket
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from ipaddress import ip_address

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from gnnplan.planner.vocabulary.errors import SpecError

LOOPBACK = "127.0.0.1"
OWNER = "gnnplan run"  # key of the digest of the run that owns the store


def store_of_this_machine() -> TCPStore:
    """Host a store for this machine only, at a port that the system chooses.

    Raises SpecError if the loopback is down, since ranks would wait for the store for minutes."""
    try:
        listener = socket.create_server((LOOPBACK, 0))
        with socket.create_connection(listener.getsockname(), timeout=5.0):
            listener.accept()[0].close()
    except OSError as error:
        raise SpecError(
            f"ranks of this machine meet on its loopback, and {LOOPBACK} cannot be reached"
            f" ({error.strerror or error}); bring it up: ip link set lo up, ip addr add"
            f" {LOOPBACK}/8 dev lo"
        ) from error
    return TCPStore(
        LOOPBACK,
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def loopback_only() -> dict[str, str]:
    """Return environment variables that make Gloo and NCCL use this machine's loopback only."""
    if "lo" not in [name for _, name in socket.if_nameindex()]:
        return {}
    return {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}


def on_this_machine(port: int, run: str) -> dict[str, str]:
    """Return the environment of ranks on this machine only. port: of their store. run: its name."""
    return {
        **loopback_only(),
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": run,
    }


def join(env: Mapping[str, str], limit: timedelta) -> Store:
    """Join the store of this run and attempt, at MASTER_ADDR and MASTER_PORT.

    Keys begin with the attempt, because the launcher's store outlives its ranks and keeps the
    addresses of lost ranks (torch 2.13 has one store for all attempts, without such a prefix).
    Raises SpecError if the store is another run's.
    """
    address, port, hosts = env["MASTER_ADDR"], int(env["MASTER_PORT"]), hosts_the_store(env)
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
    return PrefixStore(f"{name} attempt {attempt(env)}", store)


def _listen(address: str, port: int) -> socket.socket | None:
    """Return a socket that listens at this address only; None, to listen at all addresses.

    None is for addresses that this machine may not have: a host name can resolve differently on
    every server (127.0.1.1 on Debian's own), and a container is reached by its host's address.
    """
    with suppress(OSError, ValueError):
        family = socket.AF_INET if ip_address(address).version == 4 else socket.AF_INET6
        return socket.create_server((address, port), family=family)
    return None


def store_of_all(timeout_s: float) -> Store:
    """Join the store of all ranks of this attempt. Raises SpecError if it is another run's."""
    return join(launcher_env(), timedelta(seconds=timeout_s))


def hosts_the_store(env: Mapping[str, str]) -> bool:
    """Whether this process hosts the store: rank 0 does, unless the launcher itself hosts it."""
    return env.get("RANK") == "0" and env.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def attempt(env: Mapping[str, str]) -> str:
    """Return how often the launcher has restarted its ranks."""
    return env.get("TORCHELASTIC_RESTART_COUNT", "0")


def started_by_launcher() -> bool:
    """Whether torchrun or srun has started this process as one of several ranks.

    A batch script that calls torchrun or srun is not a rank. Raises SpecError if the launcher's
    environment is incomplete.
    """
    if not {"RANK", "WORLD_SIZE"}.intersection(os.environ) and (
        os.environ.get("SLURM_STEP_NUM_TASKS", "1") == "1"
    ):
        return False
    found = launcher_env()
    rank, world = found.get("RANK", "0"), found.get("WORLD_SIZE", "1")
    if {"RANK", "WORLD_SIZE"} <= found.keys() and int(rank) >= int(world):
        raise SpecError(
            f"RANK is {rank!r} and WORLD_SIZE is {world!r}, but ranks are numbered from 0 to"
            " WORLD_SIZE - 1; start ranks with torchrun, or unset both"
        )
    if absent := [
        name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if not found.get(name)
    ]:
        present = [name for name in ("RANK", "WORLD_SIZE") if name in found]
        raise SpecError(
            f"{' and '.join(present)} {'are' if len(present) > 1 else 'is'} set, but"
            f" {' and '.join(absent)} not; start ranks with torchrun, or unset"
            f" {'both' if len(present) > 1 else 'it'}"
        )
    return True


def _first_host(nodes: str) -> str:
    """Return the first host of a Slurm node list.

    >>> _first_host("gpu[07-12,20],login1"), _first_host("node3"), _first_host("b2u[05,02]n[3-4]")
    ('gpu07', 'node3', 'b2u05n3')
    """
    first = re.match(r"([^,\[]|\[[^\]]*\])*", nodes)
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first[0] if first else nodes)


def _tasks_of(node: int, per_node: str) -> str:
    """Return the number of ranks on a node, from Slurm's list with repetitions; "": not listed.

    >>> _tasks_of(0, "1(x2)"), _tasks_of(2, "4(x2),3"), _tasks_of(1, "2,1(x3)"), _tasks_of(0, "")
    ('1', '3', '1', '')
    """
    for tasks, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", per_node):
        node -= int(times or 1)
        if node < 0:
            return str(tasks)
    return ""


def launcher_env() -> dict[str, str]:
    """Return the environment with torchrun's variables, also if srun has started this process.

    Raises SpecError if a variable that must be a number is not.
    """
    env = dict(os.environ)
    if "RANK" not in env and "SLURM_STEP_NUM_TASKS" in env:
        names = {
            "RANK": "SLURM_PROCID",
            "WORLD_SIZE": "SLURM_STEP_NUM_TASKS",
            "LOCAL_RANK": "SLURM_LOCALID",
        }
        if absent := [name for name in names.values() if name not in env]:
            raise SpecError(
                f"SLURM_STEP_NUM_TASKS is set, but {' and '.join(absent)} not; start ranks with"
                " srun, or unset it"
            )
        job = count_of("SLURM_JOB_ID", env.get("SLURM_JOB_ID", "0"))
        node = env.get("SLURM_NODEID", "0")
        tasks = _tasks_of(count_of("SLURM_NODEID", node), env.get("SLURM_STEP_TASKS_PER_NODE", ""))
        usual = env.get("SLURM_NTASKS_PER_NODE", env["SLURM_STEP_NUM_TASKS"])
        slurm_env = {
            "GROUP_RANK": node,
            "LOCAL_WORLD_SIZE": tasks or usual,
            "MASTER_ADDR": _first_host(env.get("SLURM_STEP_NODELIST", "localhost")),
            "MASTER_PORT": str(20_000 + job % 10_000),
        }
        env = {**slurm_env, **env} | {name: env[slurm] for name, slurm in names.items()}
    for name in filter(env.__contains__, _COUNTS):
        count_of(name, env[name])
    return env


# launchers' variables whose values are numbers
_COUNTS = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "TORCHELASTIC_RESTART_COUNT",
)


def count_of(name: str, text: str) -> int:
    """Parse the number in an environment variable. Raises SpecError."""
    if not (text.isascii() and text.isdecimal() and len(text) < 10):
        raise SpecError(
            f"{name} is {text[:40]!r}, but must be a number of at most nine digits, as torchrun and"
            " srun set it; correct it, or unset it"
        )
    return int(text)
