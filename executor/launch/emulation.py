"""An emulated cluster: the servers of a plan on one Linux machine, as network namespaces.

The servers are joined by a switch in a namespace of its own:

    server 0   10.77.0.1 -- eth0 ===== port0 -- switch -- port1 ===== eth0 -- 10.77.0.2   server 1

If a rate is asked for, both ends of a cable have a token bucket (tc tbf), which limits what a
server's NIC sends and what it receives. Ranks of one server talk over its loopback, unshaped.

A namespace lives as long as a process in it. The process that holds it dies with this process, so
nothing is left behind whatever ends it. No packet leaves the namespaces.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from gnnplan.planner.vocabulary.errors import GnnplanError, LostRank, SpecError

PORT = 29500  # where ranks meet: the namespace has no other processes
# [s] of traffic that a bucket lets pass at once. A message shorter than that would be faster than
# the NIC.
BURST_S = 0.001
PACKETS = (16_384, 65_536)  # [B] least and most that the kernel hands a NIC at once
QUEUE = "200ms"  # longest wait for the bucket; TCP slows down when packets are dropped
PATIENCE = 5.0  # [s] that the other ranks have to end when one has failed
DIES_WITH_US = ("setpriv", "--pdeathsig", "KILL")


@dataclass(frozen=True)
class Emulated:
    """Servers played by this machine, with NICs of `rate` [B/s]; None: unshaped."""

    rate: float | None


@dataclass(frozen=True)
class Server:
    """A namespace, held by a process that sleeps in it."""

    holder: int
    address: str

    def inside(self, *command: str) -> list[str]:
        """The command that runs `command` in this server."""
        return [*DIES_WITH_US, "nsenter", f"--net=/proc/{self.holder}/ns/net", *command]

    def cut(self) -> None:
        """Unplug the server: all packets are lost from now on."""
        _run(self.inside("ip", "link", "set", "eth0", "down"))


def check() -> None:
    """Raise SpecError if this machine cannot emulate servers."""
    if sys.platform != "linux":
        raise SpecError(
            f"an emulated cluster needs Linux (network namespaces), not {sys.platform}; use real"
            " servers and torchrun"
        )
    if absent := [
        tool for tool in ("ip", "tc", "nsenter", "unshare", "setpriv") if not shutil.which(tool)
    ]:
        raise SpecError(
            f"an emulated cluster needs {', '.join(absent)}; apt-get install iproute2 util-linux"
        )
    if os.geteuid():
        raise SpecError(
            "an emulated cluster needs root for its network namespaces (this is user"
            f" {os.geteuid()}); use sudo"
        )
    if torch.cuda.is_available():
        raise SpecError(
            "an emulated cluster's ranks are on the processor: NCCL would move what GPUs send past"
            " the emulated NICs; use CUDA_VISIBLE_DEVICES="
        )


@contextmanager
def lab(servers: int, rate: float | None = None) -> Iterator[list[Server]]:
    """Emulate servers whose NICs carry `rate` [B/s] each way, for the length of a `with` block.

    Without a rate they are as fast as this machine copies. Raises SpecError.
    """
    check()
    if not 1 <= servers <= 200:
        raise SpecError(f"{servers} emulated servers; an emulated cluster has 1 to 200")
    if rate is not None and rate < 1e5:
        raise SpecError(
            f"a NIC of {rate:g} B/s; the slowest that can be emulated is 0.8Mbit/s (100kB/s)"
        )
    holders: list[subprocess.Popen[str]] = []
    try:
        for _ in range(servers + 1):
            # it says so when its namespace is ready
            awake = "ip link set lo up && echo awake && exec sleep infinity"
            holders.append(
                subprocess.Popen(
                    [*DIES_WITH_US, "unshare", "--net", "sh", "-c", awake],
                    text=True,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                )
            )
        for holder in holders:
            assert holder.stdout and holder.stderr
            if holder.stdout.readline() != "awake\n":
                raise SpecError(
                    f"this machine allows no network namespaces ({holder.stderr.read().strip()});"
                    " in a container, start it with --cap-add NET_ADMIN --cap-add SYS_ADMIN"
                )
        made = [Server(holder.pid, f"10.77.0.{i + 1}") for i, holder in enumerate(holders[:-1])]
        _wire(Server(holders[-1].pid, ""), made, rate)
        yield made
    finally:
        for holder in holders:
            holder.kill()
            holder.communicate()


def _wire(switch: Server, servers: Sequence[Server], rate: float | None) -> None:
    """Lay a cable from every server to the switch, with a bucket at both ends."""

    def bucket(interface: str) -> str:
        if rate is None:
            return ""
        burst = max(PACKETS[0], int(rate * BURST_S))
        return (
            f"ip link set {interface} gso_max_size {min(burst, PACKETS[1])}\n"
            f"tc qdisc add dev {interface} root tbf rate {int(rate * 8)}bit burst {burst}b"
            f" latency {QUEUE}\n"
        )

    cables = "".join(
        f"ip link add port{i} type veth peer name eth0 netns {server.holder}\n"
        + bucket(f"port{i}")
        + f"ip link set port{i} master switch up\n"
        for i, server in enumerate(servers)
    )
    _run(
        switch.inside(
            "sh", "-ec", f"ip link add switch type bridge\nip link set switch up\n{cables}"
        )
    )
    for server in servers:
        _run(
            server.inside(
                "sh",
                "-ec",
                f"ip addr add {server.address}/24 dev eth0\n{bucket('eth0')}ip link set eth0 up",
            )
        )


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    if done.returncode:
        raise SpecError(
            f"the emulated cluster could not be made: {done.stderr.strip()} (in:"
            f" {' '.join(command[-1:])})"
        )


def run(
    arguments: Sequence[str],
    servers: int,
    places: Sequence[int],
    rate: float | None,
    restarts: int,
    blame: Callable[[dict[int, Any]], GnnplanError],
    announce_restart: Callable[[GnnplanError, int], None],
    watch: Callable[[Sequence[int]], Callable[[], None]],
) -> None:
    """Like agent.run, in emulated servers: the r-th process runs in server places[r]."""
    with lab(servers, rate) as made:
        for left in range(restarts, -1, -1):
            ranks = start(made, places, [sys.executable, *arguments], restarts - left)
            failed = wait(ranks, PATIENCE, watch([rank.pid for rank in ranks]))
            if not failed:
                return
            error = blame(dict(failed))
            if not left or not isinstance(error, LostRank):
                raise error
            announce_restart(error, left)


def start(
    servers: Sequence[Server],
    places: Sequence[int],
    command: Sequence[str],
    attempt: int = 0,
    stdout: int | None = None,
    stderr: int | None = None,
) -> list[subprocess.Popen[str]]:
    """Start the command as every rank, rank r in server places[r], and return the processes.

    places must ascend. Every process has the environment that torchrun would give it.
    """
    ranks, run = [], secrets.token_hex(16)
    for rank, server in enumerate(places):
        env = os.environ | {
            "RANK": str(rank),
            "WORLD_SIZE": str(len(places)),
            "LOCAL_RANK": str(places[:rank].count(server)),
            "LOCAL_WORLD_SIZE": str(places.count(server)),
            "GROUP_RANK": str(server),
            "MASTER_ADDR": servers[places[0]].address,
            "MASTER_PORT": str(PORT + attempt),
            "TORCHELASTIC_RESTART_COUNT": str(attempt),
            "TORCHELASTIC_RUN_ID": run,
            "GLOO_SOCKET_IFNAME": "eth0",
            "NCCL_SOCKET_IFNAME": "eth0",
            "OMP_NUM_THREADS": "1",
            "TORCH_CPP_LOG_LEVEL": "ERROR",
        }
        ranks.append(
            subprocess.Popen(
                servers[server].inside(*command),
                env=env,
                text=True,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
            )
        )
    return ranks


@dataclass(frozen=True)
class End:
    """How a rank ended, and when [s], with the names that torch's elastic agent uses."""

    exitcode: int
    timestamp: float


def wait(
    ranks: Sequence[subprocess.Popen[str]], patience: float, look: Callable[[], None] | None = None
) -> dict[int, End]:
    """Wait until all ranks have ended well or one has failed; return the ends of those that failed.

    After a failure the others have `patience` [s] to notice it; then they are killed, which their
    ends call SIGTERM, as torch's agent ends ranks: SIGKILL is the system's. `look` is called now
    and then.
    """
    ended: dict[int, End] = {}
    limit = float("inf")
    try:
        while len(ended) < len(ranks) and time.monotonic() < limit:
            if look is not None:
                look()
            for rank, process in enumerate(ranks):
                if rank not in ended and process.poll() is not None:
                    ended[rank] = End(process.returncode, time.time())
                    if process.returncode:
                        limit = min(limit, time.monotonic() + patience)
            time.sleep(0.05)
    finally:
        for rank, process in enumerate(ranks):
            code = process.poll()
            process.kill()
            process.wait()
            ended.setdefault(rank, End(-signal.SIGTERM if code is None else code, time.time()))
    return {rank: end for rank, end in ended.items() if end.exitcode}
