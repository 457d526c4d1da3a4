"""One rank: its place and device, its process groups and lanes, and what it records.

A process becomes a rank by `opening.open_rank`."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gnnplan.executor.layers.kernels import keep_until_used
from gnnplan.executor.ranks.groups import Groups
from gnnplan.executor.ranks.lanes import Lanes
from gnnplan.executor.ranks.memory import MemoryWatch
from gnnplan.executor.ranks.recorder import Recorder

LOOK_S = 50e-6  # [s] between two looks at a device that waits for peers


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
