"""An emulated cluster: network namespaces on one Linux machine stand for the servers of a plan.

The servers are joined by a switch in a namespace of its own:

    server 0   10.77.0.1 -- eth0 ===== port0 -- switch -- port1 ===== eth0 -- 10.77.0.2   server 1

If a rate is asked for, both ends of a cable have a token bucket (tc tbf), which limits what a
server's NIC sends and what it receives. Ranks of one server talk over its loopback, unshaped.

A namespace lives as long as a process in it. The process that holds it dies with this process, so
nothing is left behind whatever ends it. No packet leaves the namespaces.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf

import torch

from gnnplan.planner.vocabulary.errors import SpecError

PORT = 29500  # port of the ranks' store; always free, as a namespace has no other processes
INTERFACES = {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "eth0"}
# [s] of traffic at full rate that fills a bucket. A shorter message passes faster than the NIC.
BURST_S = 0.001
PACKETS = (16_384, 65_536)  # [B] smallest and largest packet that the kernel gives a NIC
QUEUE = "200ms"  # longest wait for the bucket; TCP slows down when packets are dropped
DIES_WITH_US = ("setpriv", "--pdeathsig", "KILL")


@dataclass(frozen=True)
class Server:
    """A network namespace, kept alive by the sleeping process `holder`."""

    holder: int
    address: str

    @property
    def namespace(self) -> str:
        """The path of its network namespace."""
        return f"/proc/{self.holder}/ns/net"

    def inside(self, *command: str) -> list[str]:
        """Return the command line that runs `command` in this server."""
        return [*DIES_WITH_US, "nsenter", f"--net={self.namespace}", *command]


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
def lab(servers: int, rate: float = inf) -> Iterator[list[Server]]:
    """Emulate servers whose NICs carry `rate` [B/s] per direction, for a `with` block.

    inf: they are as fast as this machine copies. 0: there are no emulated servers. Raises
    SpecError.
    """
    if not rate:
        yield []
        return
    check()
    if not 1 <= servers <= 200:
        raise SpecError(f"{servers} emulated servers; an emulated cluster has 1 to 200")
    holders: list[subprocess.Popen[str]] = []
    try:
        for _ in range(servers + 1):
            # the echo tells that the namespace is ready
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
        emulated = [Server(holder.pid, f"10.77.0.{i + 1}") for i, holder in enumerate(holders[:-1])]
        _wire(Server(holders[-1].pid, ""), emulated, rate)
        yield emulated
    finally:
        for holder in holders:
            holder.kill()
            holder.communicate()


def _wire(switch: Server, servers: Sequence[Server], rate: float) -> None:
    """Connect every server to the switch, with a token bucket at both ends of each cable."""

    def bucket(interface: str) -> str:
        if rate == inf:
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
