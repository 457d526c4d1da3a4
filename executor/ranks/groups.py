"""The process groups of a rank, and how long it waits for a message."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist

NCCL_LEAST_S = 600.0  # [s] as torch has it
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
