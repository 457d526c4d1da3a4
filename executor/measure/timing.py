"""How ranks time something together."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from gnnplan.executor.ranks.device_clock import DeviceClock
from gnnplan.executor.ranks.gathered import gather_all
from gnnplan.executor.ranks.rank import Rank

# that pass through a rank's cache between two samples; more than a GPU's L2 holds
OTHER_BYTES = {"cpu": 2**24, "cuda": 2**27}
HEAD_START = 10_000_000  # cycles that a GPU idles, in which the host enqueues samples
TOGETHER = 10  # samples that the host enqueues at once
# Everything is timed in turn, in several rounds: a machine's pace changes for ten seconds and more.
ROUNDS = 3
HURRY = 0.1  # [s] on a number, below which one round is enough

Group = tuple[int, ...]  # ranks


def usual(rounds: Sequence[Sequence[float]]) -> list[float]:
    """The median over several rounds, of each number by itself.

    Rounds in which others had the machine count too: trainings meet them as often.

    >>> usual([[1.0, 2.0], [1.1, 2.0], [1.5, 2.0]])
    [1.1, 2.0]
    """
    return [median(samples) for samples in zip(*rounds, strict=True)]


class Timing:
    """One rank among those that measure.

    Every method is called by all ranks together, and returns what all of them found.
    """

    def __init__(
        self,
        rank: int,
        places: Sequence[int],
        device: torch.device,
        cores: int | None,
        one_machine: bool,
        seconds: float,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """places: the server of every rank. cores: that a machine's ranks share; None: a GPU each.

        one_machine: all servers are played by one machine. seconds: spent on each number.
        dtype: of rows that are measured besides those in float32.
        """
        self.dtype = dtype
        self.rank, self.places, self.device, self.seconds = rank, places, device, seconds
        self.rounds = 1 if seconds < HURRY else ROUNDS
        backend, group = dist.get_backend(), dist.new_group()
        streams = backend == "nccl"
        self.me = Rank(rank, len(places), device, backend, exchange_group=group, streams=streams)
        self.me.meet(group)
        self.other = torch.zeros(OTHER_BYTES[device.type] // 4, device=device)
        self.everyone = tuple(range(len(places)))
        members: dict[int, Group] = {
            server: tuple(r for r in self.everyone if places[r] == server) for server in places
        }
        machines = [self.everyone] if one_machine else [*members.values()]
        # ranks that have a core each
        self.apart = tuple(sorted(r for ranks in machines for r in ranks[:cores]))
        self.groups: dict[str, list[Group]] = {
            "intra_node": [ranks for ranks in members.values() if len(ranks) > 1]
        }
        if len(members) > 1:
            self.groups["inter_node"] = [tuple(ranks[0] for ranks in members.values())]

    def _clock(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def _disturb(self) -> None:
        """What an epoch does between two uses of the same rows.

        Other data pass through the caches, and Gloo's threads fall asleep.
        """
        self.other.add_(1.0)

    def _time(self, work: Callable[[], Any], divide: int = 1) -> list[float]:
        """Median duration of `work` / divide [s], on every rank that has a core.

        These ranks are all busy with it at once; the others wait.
        """
        duration, takes_part = float("nan"), self.rank in self.apart
        if takes_part:
            work()
        dist.barrier()
        if takes_part:
            samples: list[float] = []
            end = self._clock() + self.seconds / self.rounds
            while not samples or self._clock() < end:
                samples += self._on_gpu(work) if self.device.type == "cuda" else self._once(work)
            duration = median(samples) / divide
        durations = self._gather(duration)
        return [durations[rank] for rank in self.apart]

    def _once(self, work: Callable[[], Any]) -> list[float]:
        self._disturb()
        begin = self._clock()
        work()
        return [self._clock() - begin]

    def _on_gpu(self, work: Callable[[], Any]) -> list[float]:
        """Durations of the kernels alone: the host is ahead. Device.launch is what it takes."""
        clock, marks = DeviceClock(self.device), []
        torch.cuda._sleep(HEAD_START)  # type: ignore[no-untyped-call]
        for _ in range(TOGETHER):
            self._disturb()
            begin = clock.mark()
            work()
            marks.append((begin, clock.mark()))
        torch.cuda.synchronize()
        return [end.seconds - begin.seconds for begin, end in marks]

    def _gather(self, own: Any) -> list[Any]:
        """What every rank gives, by rank."""
        return gather_all(own, self.device)
