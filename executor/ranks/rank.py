"""One rank: its place and device, its process groups and lanes, and what it records.

A process becomes a rank by `opening.open_rank`."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gnnplan.executor.layers.kernels import keep_until_used
from gnnplan.executor.ranks.lanes import Lanes
from gnnplan.executor.ranks.machine import MemoryWatch
from gnnplan.executor.ranks.recorder import Recorder

NCCL_LEAST_S = 600.0  # [s] as torch has it
LOOK_S = 50e-6  # [s] between two looks at a device that waits for peers
SPEAKS_FIRST_S = 30.0  # [s] by which torch is more patient than a rank that can say where it is


@dataclass
class Groups:
    """The process groups of rank `rank` of `world`."""

    rank: int
    world: int
    device: torch.device
    backend: str  # 'nccl' or 'gloo'
    settle: Callable[[], None]  # waits for the device
    timeout_s: float = 30.0  # how long a collective waits for its ranks
    nccl_least_s: float = NCCL_LEAST_S  # and at least so long over NCCL
    exchanges: dist.ProcessGroup | None = None  # in which all ranks exchange rows
    _made: dict[tuple[int, ...], dist.ProcessGroup] = field(default_factory=dict)

    @property
    def wire_device(self) -> torch.device:
        """Where communication reads and writes: the GPU under NCCL, host memory under Gloo."""
        return self.device if self.backend == "nccl" else torch.device("cpu")

    @property
    def patience(self) -> float:
        """How long a message may take [s].

        Over NCCL a host enqueues a step's messages ahead of it, so they wait for its computation.
        """
        return max(self.timeout_s, self.nccl_least_s if self.backend == "nccl" else 0.0)

    @property
    def limit(self) -> timedelta:
        """How long torch lets a message take."""
        later_s = SPEAKS_FIRST_S if self.backend == "nccl" else 0.0
        return timedelta(seconds=self.patience + later_s)

    def of(self, ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
        """The process group of some ranks; None is the group of all ranks.

        All ranks must first ask for the same groups in the same order.
        """
        if len(ranks) == self.world:
            return None
        if ranks not in self._made:
            self._made[ranks] = dist.new_group(
                list(ranks), backend=self.backend, timeout=self.limit
            )
            if self.rank in ranks:
                self.meet(self._made[ranks])
        return self._made[ranks]

    def open_pairs(self, distance: int) -> None:
        """Let ranks send messages to the one `distance` further on, and back. All ranks call this.

        Over NCCL two ranks get a communicator. In one of all ranks, a message that is received
        would wait for the one that is sent before it, to another rank.
        """
        if self.backend == "nccl":
            for first in range(self.world - distance):
                self.of((first, first + distance))

    def pair(self, peer: int) -> dist.ProcessGroup | None:
        """The group in which messages between this rank and the peer go (`open_pairs`)."""
        if self.backend == "nccl":
            return self.of((min(self.rank, peer), max(self.rank, peer)))
        return self.exchanges

    def await_all(self, group: dist.ProcessGroup | None) -> None:
        """A barrier of the group's ranks."""
        if self.world > 1:
            number = torch.zeros(1, device=self.wire_device)
            dist.all_reduce(number, group=group)
            self.settle()  # over NCCL the host has only enqueued the sum

    def meet(self, group: dist.ProcessGroup) -> None:
        """Connect a new group. All of its ranks call this.

        NCCL connects a group in its first call, which all ranks of the group must make. An exchange
        is no such call: ranks that have nothing to move take no part.
        """
        if self.backend == "nccl":
            self.await_all(group)


class Rank:
    """Rank `rank` of `world` on its device."""

    def __init__(
        self,
        rank: int,
        world: int,
        device: torch.device,
        backend: str,
        *,
        timeout_s: float = 30.0,
        traced: int = 60,
        card: str = "",
    ) -> None:
        """`backend`, `timeout_s` as of Groups, `traced` as of Recorder; `card`: a name that no
        other GPU has, "" without a GPU."""
        self.rank, self.world, self.device, self.card = rank, world, device, card
        self.groups = Groups(rank, world, device, backend, self.settle, timeout_s)
        self.lanes = Lanes(device, backend == "nccl")
        self.recorder = Recorder(rank, device, traced)
        self.watch: MemoryWatch | None = None  # of the memory that it fills
        self.staleness_errors = False  # measure how far stale rows and gradients are from true ones
        self.gradient_errors = False  # measure how far gradients of weights are from exact ones

    @property
    def backend(self) -> str:
        return self.groups.backend

    def communicate_over(self, backend: str) -> None:
        """Change the backend; no group has been made yet."""
        self.groups.backend, self.lanes.are_streams = backend, backend == "nccl"

    def in_server_memory(self) -> AbstractContextManager[None]:
        """A block; what it allocates and keeps is the server's memory and not the device's."""
        return nullcontext() if self.watch is None else self.watch.left_out()

    def staged(self, rows: Tensor) -> Tensor:
        """The rows where communication reads them, contiguous."""
        if rows.is_cuda:
            keep_until_used(torch.cuda.current_stream(self.device), rows)
        return rows.to(self.groups.wire_device).contiguous()

    def unstaged(self, rows: Tensor) -> Tensor:
        """The rows on the rank's device."""
        return rows.to(self.device)

    def settle(self, all_lanes: bool = False) -> None:
        """Wait until the device has done what the current stream was given.

        The recorder then has the spans that are over. all_lanes: wait for those of lanes as well.
        """
        if self.device.type != "cuda":
            return
        lanes = self.lanes.streams if all_lanes else ()
        for stream in (torch.cuda.current_stream(self.device), *lanes):
            self._await(stream)
        if all_lanes:
            torch.cuda.synchronize(self.device)
        self.recorder.read()

    def _await(self, stream: Any) -> None:
        """Wait until the device has done what a stream was given.

        NCCL's messages wait there, and of a peer that is lost it may never hear. Torch then ends
        this process, which says nothing. So the rank is less patient. Raises RuntimeError.
        """
        if self.backend != "nccl" or self.world == 1:
            stream.synchronize()
            return
        begun, looks, shown = time.monotonic(), 0, set[str]()
        while not stream.query():
            if (waited := time.monotonic() - begun) > looks:  # a second each
                looks, shown = looks + 1, shown | self.recorder.show_device()
            if waited > self.groups.patience:
                raise RuntimeError(f"NCCL timed out after {self.groups.patience:g} s")
            time.sleep(LOOK_S)
        for lane in shown:
            self.recorder.activity.end(lane)

    def anew(self) -> Rank:
        """The same rank with the same groups and lanes, which has recorded nothing yet."""
        other = copy(self)
        other.recorder = Recorder(self.rank, self.device, self.recorder.traced)
        other.recorder.activity = self.recorder.activity
        return other

    def close(self) -> None:
        """End the lanes' threads and the process groups."""
        self.lanes.close()
        if dist.is_initialized():
            dist.destroy_process_group()
