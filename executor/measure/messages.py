"""Timing of operations on all ranks together, and of messages between ranks.

Exchanges inside servers run on all servers at once. Exchanges between servers involve all ranks, as
in a training: the time that ranks wait for each other does not grow with the number of peers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from gnnplan.executor.ranks.comm import Exchange, gather_all
from gnnplan.executor.ranks.rank import Rank
from gnnplan.executor.ranks.recorder import DeviceClock

SIZES = tuple(2**k for k in range(10, 27))  # message sizes, 1 KiB to 64 MiB [B]
# If a message takes more than this share of the seconds for a number, larger ones are left out.
LONGEST = 0.3
FEWEST = 6  # sizes that a fit needs, however slow the machine is
ROW = 64  # numbers per exchanged row

# seconds of an operation, and core-seconds that a group's ranks spend on it
Sent = tuple[float, float]
# [B] that pass through a rank's cache between two samples; more than a GPU's L2 holds
OTHER_BYTES = {"cpu": 2**24, "cuda": 2**27}
HEAD_START = 10_000_000  # cycles that a GPU idles while the host enqueues samples
TOGETHER = 10  # samples that the host enqueues at once
# All numbers are measured in several rounds, as a machine's speed changes for 10 s and longer.
ROUNDS = 3
HURRY = 0.1  # [s] per number, below which there is only one round

Group = tuple[int, ...]  # ranks


def medians(rounds: Sequence[Sequence[float]]) -> list[float]:
    """Return the median of each number over several rounds.

    Rounds that other processes disturb count too: trainings are disturbed as often.

    >>> medians([[1.0, 2.0], [1.1, 2.0], [1.5, 2.0]])
    [1.1, 2.0]
    """
    return [median(samples) for samples in zip(*rounds, strict=True)]


class Messages:
    """One of the measuring ranks, and the timing of messages.

    All ranks call every method together, and every rank gets the results of all ranks.
    """

    def __init__(
        self,
        me: Rank,
        places: Sequence[int],
        one_machine: bool,
        cores: int,
        seconds: float,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """places: the server of every rank. one_machine: whether one machine emulates all servers.

        cores: of a machine, for all its ranks, before each rank is pinned to a core.

        seconds: spent on each number. dtype: of rows that are measured in addition to float32.
        """
        self.me, self.rank, self.device, self.dtype = me, me.rank, me.device, dtype
        self.places, self.seconds = places, seconds
        self.rounds = 1 if seconds < HURRY else ROUNDS
        device = me.device
        each = None if device.type == "cuda" else cores
        self.other = torch.zeros(OTHER_BYTES[device.type] // 4, device=device)
        self.everyone = tuple(range(len(places)))
        members: dict[int, Group] = {
            server: tuple(r for r in self.everyone if places[r] == server) for server in places
        }
        machines = [self.everyone] if one_machine else [*members.values()]
        # ranks that have a core of their own
        self.apart = tuple(sorted(r for ranks in machines for r in ranks[:each]))
        self.groups: dict[str, list[Group]] = {
            "intra_node": [ranks for ranks in members.values() if len(ranks) > 1]
        }
        if len(members) > 1:
            self.groups["inter_node"] = [self.everyone]

    def _clock(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def _disturb(self) -> None:
        """Do what an epoch does between two uses of the same rows.

        Other data pass through the caches, and Gloo's threads go to sleep.
        """
        self.other.add_(1.0)

    def _time(self, work: Callable[[], Any], divide: int = 1) -> list[float]:
        """Return the median duration of `work` / divide [s], on every rank that has a core.

        All these ranks run `work` at the same time; the other ranks wait.
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
        """Return durations of the kernels without launches, as the host enqueues them ahead."""
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
        """Return the values of all ranks, by rank."""
        return gather_all(own, self.me.groups.wire_device)

    def exchanges(self, where: str, sent: dict[int, list[Sent]]) -> None:
        """Run a round of exchanges of growing sizes, in all groups of a kind at once.

        Adds their durations to `sent`, by size.
        """
        groups = self.groups[where]
        own_group = next(group for group in groups if self.rank in group)
        for size in (*sent,) or SIZES:  # later rounds repeat the sizes of the first
            if size * (len(groups[0]) - 1) > SIZES[-1]:
                break
            is_first = size not in sent
            work = self._exchange(size, own_group)
            rounds = sent.setdefault(size, [])
            if is_first:
                work()
            rounds.append(self._time_messages(work, groups))
            if len(sent) >= FEWEST and is_first and rounds[0][0] > LONGEST * self.seconds:
                break

    def _time_messages(self, work: Callable[[], Any], groups: Sequence[Group]) -> Sent:
        """Return the seconds that one direction of an exchange adds to a loop of computation, and
        the core-seconds that a group's ranks spend on it [s].

        The seconds are a mean over each group's ranks. So they include the time that ranks wait for
        late ranks, as in every layer of a training.
        """
        dist.barrier()
        begin = self._clock()
        self._disturb()
        work()
        slowest = max(self._gather(self._clock() - begin))
        # computed from `slowest`, so equal on all ranks
        rounds = min(60, max(5, int(self.seconds / max(slowest, 1e-5)))) // self.rounds + 1
        idle = median(self._durations(self._disturb, min(rounds, 20)))
        dist.barrier()
        busy = 0.0

        def loop() -> None:
            nonlocal busy
            self._disturb()
            before = time.process_time()
            work()
            busy += (time.process_time() - before) / 2

        samples = [max(duration - idle, 1e-7) / 2 for duration in self._durations(loop, rounds)]
        everyone = self._gather((samples, busy / rounds))
        by_group = [np.mean([everyone[rank][0] for rank in group], axis=0) for group in groups]
        return float(np.median(by_group)), sum(everyone[rank][1] for rank in groups[0])

    def _durations(self, work: Callable[[], None], rounds: int) -> list[float]:
        durations = []
        for _ in range(rounds):
            begin = self._clock()
            work()
            durations.append(self._clock() - begin)
        return durations

    def _exchange(self, size: int, group: Group) -> Callable[[], None]:
        """Return an exchange: each rank sends `size` bytes of rows to every peer, and gradients
        back."""
        rows = max(1, size // (4 * ROW))
        positions = np.random.default_rng(self.rank).permutation(4 * rows)[:rows]
        take = np.array([rows * (peer in group and peer != self.rank) for peer in self.everyone])
        exchange = Exchange(self.me, [positions[: take[peer]] for peer in self.everyone], take)
        x = torch.randn(4 * rows, ROW, device=self.device)
        return lambda: exchange.add_gradient(
            x, exchange.swap("b", exchange.forward(exchange.pack(x)))
        )
