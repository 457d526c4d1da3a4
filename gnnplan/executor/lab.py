"""An emulated cluster: the servers of a plan on one Linux machine, each a network namespace, joined by a switch in one of its own.

    server 0   10.77.0.1 -- eth0 ===== port0 -- switch -- port1 ===== eth0 -- 10.77.0.2   server 1

Where a rate is asked for, both ends of a cable have a token bucket (tc tbf), so that a server's card lets so much out and so much in.
Ranks of one server meet over its loopback, unshaped. A namespace lives as long as a process in it, and is held by one that dies with
this process: nothing is left behind whatever ends it, and no packet is seen outside.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from gnnplan.planner.errors import GnnplanError, LostRank, SpecError

PORT = 29500  # where ranks meet: nobody else lives in the namespace
BURST_S = 0.001  # [s] of the rate that a bucket lets pass at once; a message that rides on it would be faster than the card
PACKETS = (16_384, 65_536)  # [B] the kernel hands cards at least, at most so much at once
QUEUE = "200ms"  # what waits for the bucket at most, before TCP is told to slow down
PATIENCE = 5.0  # [s] that the others have to end when one rank has failed
DIES_WITH_US = ("setpriv", "--pdeathsig", "KILL")


@dataclass(frozen=True)
class Server:
    """A namespace, held by a process that sleeps in it."""

    holder: int
    address: str

    def inside(self, *command: str) -> list[str]:
        """The command, run in this server."""
        return [*DIES_WITH_US, "nsenter", f"--net=/proc/{self.holder}/ns/net", *command]

    def cut(self) -> None:
        """Pull the cable: what is sent from now on is lost."""
        _run(self.inside("ip", "link", "set", "eth0", "down"))


def check() -> None:
    """Raises SpecError where this machine cannot emulate servers."""
    if sys.platform != "linux":
        raise SpecError(f"an emulated cluster needs Linux (network namespaces), not {sys.platform}; use real servers and torchrun")
    if absent := [tool for tool in ("ip", "tc", "nsenter", "unshare", "setpriv") if not shutil.which(tool)]:
        raise SpecError(f"an emulated cluster needs {', '.join(absent)}; apt-get install iproute2 util-linux")
    if os.geteuid():
        raise SpecError(f"an emulated cluster needs root for its network namespaces (this is user {os.geteuid()}); use sudo")
    if torch.cuda.is_available():
        raise SpecError("an emulated cluster's ranks are on the processor: NCCL would move what GPUs send past the emulated cards; use "
                        "CUDA_VISIBLE_DEVICES=")  # fmt: skip


@contextmanager
def lab(servers: int, rate: float | None = None) -> Iterator[list[Server]]:
    """So many servers, whose cards move `rate` [B/s] each way (None: as fast as this machine copies). Raises SpecError."""
    check()
    if not 1 <= servers <= 200:
        raise SpecError(f"{servers} emulated servers; an emulated cluster has 1 to 200")
    if rate is not None and rate < 1e5:
        raise SpecError(f"a card of {rate:g} B/s; the slowest that can be emulated is 0.8Mbit/s (100kB/s)")
    holders: list[subprocess.Popen[str]] = []
    try:
        for _ in range(servers + 1):
            awake = "ip link set lo up && echo awake && exec sleep infinity"
            holders.append(subprocess.Popen([*DIES_WITH_US, "unshare", "--net", "sh", "-c", awake], text=True, stdin=subprocess.DEVNULL,
                                            stdout=subprocess.PIPE, stderr=subprocess.PIPE))  # fmt: skip
        for holder in holders:
            assert holder.stdout and holder.stderr
            if holder.stdout.readline() != "awake\n":
                raise SpecError(f"this machine allows no network namespaces ({holder.stderr.read().strip()}); in a container, "
                                "start it with --cap-add NET_ADMIN --cap-add SYS_ADMIN")  # fmt: skip
        made = [Server(holder.pid, f"10.77.0.{i + 1}") for i, holder in enumerate(holders[:-1])]
        _wire(Server(holders[-1].pid, ""), made, rate)
        yield made
    finally:
        for holder in holders:
            holder.kill()
            holder.communicate()


def _wire(switch: Server, servers: Sequence[Server], rate: float | None) -> None:
    """Cables from every server to the switch, with a bucket at both ends."""
    def bucket(card: str) -> str:
        if rate is None:
            return ""
        burst = max(PACKETS[0], int(rate * BURST_S))
        return (f"ip link set {card} gso_max_size {min(burst, PACKETS[1])}\n"
                f"tc qdisc add dev {card} root tbf rate {int(rate * 8)}bit burst {burst}b latency {QUEUE}\n")

    cables = "".join(f"ip link add port{i} type veth peer name eth0 netns {server.holder}\n" + bucket(f"port{i}")
                     + f"ip link set port{i} master switch up\n" for i, server in enumerate(servers))  # fmt: skip
    _run(switch.inside("sh", "-ec", f"ip link add switch type bridge\nip link set switch up\n{cables}"))
    for server in servers:
        _run(server.inside("sh", "-ec", f"ip addr add {server.address}/24 dev eth0\n{bucket('eth0')}ip link set eth0 up"))


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    if done.returncode:
        raise SpecError(f"the emulated cluster could not be made: {done.stderr.strip()} (in: {' '.join(command[-1:])})")


def run(arguments: Sequence[str], servers: int, places: Sequence[int], rate: float | None, restarts: int,
        blame: Callable[[dict[int, object]], GnnplanError], again: Callable[[GnnplanError, int], None]) -> None:  # fmt: skip
    """As agent.run, of Python in so many emulated servers, the r-th process in places[r]."""
    with lab(servers, rate) as made:
        for left in range(restarts, -1, -1):
            failed = wait(start(made, places, [sys.executable, *arguments], restarts - left), PATIENCE)
            if not failed:
                return
            error = blame(dict(failed))
            if not left or not isinstance(error, LostRank):
                raise error
            again(error, left)


def start(servers: Sequence[Server], places: Sequence[int], command: Sequence[str], attempt: int = 0, **streams: int
          ) -> list[subprocess.Popen[str]]:  # fmt: skip
    """The command as every rank, rank r in server places[r] (servers in order), in the environment that torchrun would give it."""
    ranks = []
    for rank, server in enumerate(places):
        env = os.environ | {
            "RANK": str(rank), "WORLD_SIZE": str(len(places)), "LOCAL_RANK": str(places[:rank].count(server)),
            "LOCAL_WORLD_SIZE": str(places.count(server)), "GROUP_RANK": str(server), "MASTER_ADDR": servers[places[0]].address,
            "MASTER_PORT": str(PORT + attempt), "TORCHELASTIC_RESTART_COUNT": str(attempt), "GLOO_SOCKET_IFNAME": "eth0",
            "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR",
        }  # fmt: skip
        inside = servers[server].inside(*command)
        ranks.append(subprocess.Popen(inside, env=env, text=True, stdin=subprocess.DEVNULL, **streams))  # type: ignore[call-overload]
    return ranks


@dataclass(frozen=True)
class End:
    """How a rank ended, and when [s]; as torch's launcher tells it."""

    exitcode: int
    timestamp: float


def wait(ranks: Sequence[subprocess.Popen[str]], patience: float) -> dict[int, End]:
    """Until all have ended well, or one has not: the others then have so long [s] to find out by themselves. Rank -> end, of those that
    failed; all have ended."""
    ended: dict[int, End] = {}
    limit = float("inf")
    try:
        while len(ended) < len(ranks) and time.monotonic() < limit:
            for rank, process in enumerate(ranks):
                if rank not in ended and process.poll() is not None:
                    ended[rank] = End(process.returncode, time.time())
                    if process.returncode:
                        limit = min(limit, time.monotonic() + patience)
            time.sleep(0.05)
    finally:
        for rank, process in enumerate(ranks):
            process.kill()
            process.wait()
            ended.setdefault(rank, End(process.returncode, time.time()))
    return {rank: end for rank, end in ended.items() if end.exitcode}
