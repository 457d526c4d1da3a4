"""How ranks time something together, and what messages between them take.

Inside servers the ranks of every server talk at once. Exchanges between servers are among all
ranks, as in a training: the time that ranks wait for each other does not grow with the number of
peers.
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
from gnnplan.executor.ranks.device_clock import DeviceClock
from gnnplan.executor.ranks.rank import Rank

SIZES = tuple(2**k for k in range(10, 27))  # messages of 1 KiB to 64 MiB [B]
# Larger messages are left out when one takes more than this many times what is spent on a number.
LONGEST = 0.3
FEWEST = 6  # sizes that a fit needs, however slow the moment
ROW = 64  # numbers in an exchanged row

# how long an operation of a size took, and core-seconds of a group's ranks [s]
Sent = tuple[float, float]
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


class Messages:
    """One rank among those that measure.

    Every method is called by all ranks together, and returns what all of them found.
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
        """places: the server of every rank. one_machine: all servers are played by one machine.

        cores: that a machine's ranks have together, before each stays on its own.

        seconds: spent on each number. dtype: of rows that are measured besides those in float32.
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
        # ranks that have a core each
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
        return gather_all(own, self.me.groups.wire_device)

    def exchanges(self, where: str, sent: dict[int, list[Sent]]) -> None:
        """A round of exchanges of growing sizes, in all groups of a place at once.

        Adds what they took to `sent`, by size.
        """
        groups = self.groups[where]
        own_group = next(group for group in groups if self.rank in group)
        for size in (*sent,) or SIZES:  # those of the first round
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
        """What a way of an exchange there and back adds to a loop of computation [s].

        It is the mean of each group's ranks, and so includes the time that ranks wait for those
        that come later than usual, as in every layer of a training. Also what the cores of a
        group's ranks are busy with it, in all [s].
        """
        dist.barrier()
        begin = self._clock()
        self._disturb()
        work()
        slowest = max(self._gather(self._clock() - begin))
        # the same number on all ranks
        rounds = min(60, max(5, int(self.seconds / max(slowest, 1e-5)))) // self.rounds + 1
        alone = median(self._durations(self._disturb, min(rounds, 20)))
        dist.barrier()
        busy = 0.0

        def both() -> None:
            nonlocal busy
            self._disturb()
            before = time.process_time()
            work()
            busy += (time.process_time() - before) / 2

        samples = [max(duration - alone, 1e-7) / 2 for duration in self._durations(both, rounds)]
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
        """Every rank sends `size` bytes of scattered rows to every other, and gradients back."""
        rows = max(1, size // (4 * ROW))
        positions = np.random.default_rng(self.rank).permutation(4 * rows)[:rows]
        take = np.array([rows * (peer in group and peer != self.rank) for peer in self.everyone])
        exchange = Exchange(self.me, [positions[: take[peer]] for peer in self.everyone], take)
        x = torch.randn(4 * rows, ROW, device=self.device)
        return lambda: exchange.add_home(x, exchange.swap("b", exchange.forward(exchange.pack(x))))
