"""One rank: its number and device, process groups, lanes and recorder.

`opening.open_rank` makes a process a rank."""

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

NCCL_LEAST_S = 600.0  # [s] torch's default timeout
LOOK_S = 50e-6  # [s] between two queries of a stream that waits for peers
SPEAKS_FIRST_S = 30.0  # [s] torch's timeout beyond the rank's own, whose error says more


@dataclass
class Groups:
    """The process groups of rank `rank` of `world`."""

    rank: int
    world: int
    device: torch.device
    backend: str  # 'nccl' or 'gloo'
    settle: Callable[[], None]  # waits for the device
    timeout_s: float = 30.0  # of a collective or message
    nccl_least_s: float = NCCL_LEAST_S  # least timeout over NCCL
    exchanges: dist.ProcessGroup | None = None  # of all ranks, for exchanges of rows
    _by_ranks: dict[tuple[int, ...], dist.ProcessGroup] = field(default_factory=dict)

    @property
    def wire_device(self) -> torch.device:
        """The device whose tensors the backend sends: the GPU for NCCL, the host for Gloo."""
        return self.device if self.backend == "nccl" else torch.device("cpu")

    @property
    def patience(self) -> float:
        """The timeout of a message [s].

        It is longer over NCCL, where the host enqueues messages ahead of the step's computation, so
        that messages wait for the computation, too.
        """
        return max(self.timeout_s, self.nccl_least_s if self.backend == "nccl" else 0.0)

    @property
    def limit(self) -> timedelta:
        """Torch's timeout of a message."""
        extra_s = SPEAKS_FIRST_S if self.backend == "nccl" else 0.0
        return timedelta(seconds=self.patience + extra_s)

    def of(self, ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
        """Return the process group of some ranks; None for all ranks.

        The first call for a group makes it, so all ranks must make these calls in the same order.
        """
        if len(ranks) == self.world:
            return None
        if ranks not in self._by_ranks:
            self._by_ranks[ranks] = dist.new_group(
                list(ranks), backend=self.backend, timeout=self.limit
            )
            if self.rank in ranks:
                self.meet(self._by_ranks[ranks])
        return self._by_ranks[ranks]

    def open_pairs(self, distance: int) -> None:
        """Open groups for messages between ranks r and r + distance. All ranks call this.

        Over NCCL each pair of ranks gets its own communicator. In a communicator of all ranks, a
        receive would wait for an earlier send to another rank.
        """
        if self.backend == "nccl":
            for first in range(self.world - distance):
                self.of((first, first + distance))

    def pair(self, peer: int) -> dist.ProcessGroup | None:
        """Return the group for messages between this rank and the peer (`open_pairs`)."""
        if self.backend == "nccl":
            return self.of((min(self.rank, peer), max(self.rank, peer)))
        return self.exchanges

    def await_all(self, group: dist.ProcessGroup | None) -> None:
        """Wait for all ranks of the group (a barrier)."""
        if self.world > 1:
            number = torch.zeros(1, device=self.wire_device)
            dist.all_reduce(number, group=group)
            self.settle()  # over NCCL the host has only enqueued the sum

    def meet(self, group: dist.ProcessGroup) -> None:
        """Connect a new group. All ranks of the group call this.

        NCCL connects a group in the group's first collective, which all its ranks must join. An
        exchange does not suffice: ranks without rows to exchange take no part in it.
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
        """backend, timeout_s: see Groups. traced: see Recorder. card: a unique name of the GPU, ""
        without a GPU."""
        self.rank, self.world, self.device, self.card = rank, world, device, card
        self.groups = Groups(rank, world, device, backend, self.settle, timeout_s)
        self.lanes = Lanes(device, backend == "nccl")
        self.recorder = Recorder(rank, device, traced)
        self.watch: MemoryWatch | None = None  # of this rank's peak memory
        self.staleness_errors = False  # measure errors of stale rows and gradients
        self.gradient_errors = False  # measure errors of the weights' gradients

    @property
    def backend(self) -> str:
        return self.groups.backend

    def communicate_over(self, backend: str) -> None:
        """Change the backend, before any group is made."""
        self.groups.backend, self.lanes.are_streams = backend, backend == "nccl"

    def in_server_memory(self) -> AbstractContextManager[None]:
        """Return a context whose allocations count as the server's memory, not the device's."""
        return nullcontext() if self.watch is None else self.watch.left_out()

    def staged(self, rows: Tensor) -> Tensor:
        """Return the rows contiguous and on the backend's device, ready to be sent."""
        if rows.is_cuda:
            keep_until_used(torch.cuda.current_stream(self.device), rows)
        return rows.to(self.groups.wire_device).contiguous()

    def unstaged(self, rows: Tensor) -> Tensor:
        """Return received rows on the rank's device."""
        return rows.to(self.device)

    def settle(self, all_lanes: bool = False) -> None:
        """Wait for the work of the current stream, and record spans that have ended.

        all_lanes: wait for the lanes' streams, too.
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
        """Wait for the work of a stream. Raises RuntimeError after the timeout over NCCL.

        An NCCL message from a lost peer never ends. Torch would kill this process without a note on
        the operation, so the rank times out before torch does.
        """
        if self.backend != "nccl" or self.world == 1:
            stream.synchronize()
            return
        started, looks, shown = time.monotonic(), 0, set[str]()
        while not stream.query():
            if (waited := time.monotonic() - started) > looks:  # once a second
                looks, shown = looks + 1, shown | self.recorder.show_device()
            if waited > self.groups.patience:
                raise RuntimeError(f"NCCL timed out after {self.groups.patience:g} s")
            time.sleep(LOOK_S)
        for lane in shown:
            self.recorder.activity.end(lane)

    def anew(self) -> Rank:
        """Return the same rank, groups and lanes with an empty recorder."""
        other = copy(self)
        other.recorder = Recorder(self.rank, self.device, self.recorder.traced)
        other.recorder.activity = self.recorder.activity
        return other

    def close(self) -> None:
        """End the lanes' threads and the process groups."""
        self.lanes.close()
        if dist.is_initialized():
            dist.destroy_process_group()
