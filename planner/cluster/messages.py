"""Messages by where their two ends sit: told one by one, or counted where many are alike.

How many pass a port is asked of both in the same way (ports.py). A *count* says of each message
whether it passes something [messages], or of each rank how many do that it sends, and how many that
it receives [2, ranks]. Counts can be added and subtracted.

An `Outer` says what ranks send each other by a number per sender and one per receiver. The load of
a port then follows from counts: how many of the ranks that a rank exchanges with share its island,
its PCIe switch or its server with it. No list of messages is needed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gnnplan.planner.cluster.fabric import Routes
from gnnplan.planner.vocabulary.numbers import Number
from gnnplan.planner.vocabulary.outer import EqualPairs, Outer, cells

Count = np.ndarray


@dataclass(frozen=True, eq=False)
class Listed:
    """Messages from rank to rank [messages]."""

    source: np.ndarray
    target: np.ndarray

    def among(self, *places: np.ndarray, to: np.ndarray | None = None) -> Count:
        """Those between ranks that are alike in all these places, each numbered [ranks]; `to` some
        receivers alone, bool [ranks]."""
        out = np.ones(self.source.size) if to is None else 1.0 * to[self.target]
        for place in places:
            out = out * (place[self.source] == place[self.target])
        return out

    def leaving(self, count: Count, some: np.ndarray) -> Count:
        """Those that leave some of the ranks, bool [ranks]."""
        return np.asarray(count * some[self.source])

    def arriving(self, count: Count, some: np.ndarray) -> Count:
        """Those that arrive at some of the ranks."""
        return np.asarray(count * some[self.target])

    def started(self, count: Count) -> np.ndarray:
        """How many each rank starts [ranks]."""
        return np.bincount(self.source, count)

    def ends(self, numbers: np.ndarray, leave: bool) -> np.ndarray:
        """The number of the rank that each message leaves, or arrives at [messages]."""
        return np.asarray(numbers[self.source if leave else self.target])

    def load(self, count: Count, numbers: np.ndarray, leave: bool, nbytes: Number) -> np.ndarray:
        """Bytes that leave ranks, or arrive at them, by the ranks' numbers [ranks]."""
        passing = np.flatnonzero(count)
        at, size = self.ends(numbers, leave)[passing], int(numbers.max()) + 1
        return np.bincount(at, (count * nbytes)[passing], size)

    def hops(self, ways: Routes, point: np.ndarray) -> Count:
        """Links of a fabric on the way, where each rank is plugged in at a point [ranks]."""
        return ways.between(point[self.source], point[self.target])

    def between(self, ways: Routes, point: np.ndarray, nbytes: Number) -> np.ndarray:
        """Bytes from point to point of a fabric [points, points]."""
        place = point[self.source] * ways.points + point[self.target]
        return np.bincount(place, nbytes, ways.points**2).reshape(ways.points, -1)


@dataclass(frozen=True, eq=False)
class Alike:
    """Equal messages between some ranks, the `members` of an `Outer`; methods as of `Listed`."""

    members: np.ndarray
    pattern: Outer
    pairs: EqualPairs

    @property
    def _ends(self) -> tuple[np.ndarray, np.ndarray]:
        """Whether ranks send, and whether they receive [ranks]."""
        return self.pairs.senders.astype(float), self.pairs.receivers.astype(float)

    def among(self, *places: np.ndarray, to: np.ndarray | None = None) -> Count:
        at, (senders, receivers) = [place[self.members] for place in places], self._ends
        if to is not None:
            receivers = receivers * to[self.members]
        reached, reaching = (self.pattern.reached(ends, *at) for ends in (receivers, senders))
        return np.stack([senders * reached, receivers * reaching])

    def leaving(self, count: Count, some: np.ndarray) -> Count:
        return np.asarray(count * some[self.members])

    arriving = leaving  # of a count, that of what is sent leaves, the other arrives

    def started(self, count: Count) -> np.ndarray:
        return np.asarray(count[0])

    def load(self, count: Count, numbers: np.ndarray, leave: bool, nbytes: Number) -> np.ndarray:
        of_end, size = count[0 if leave else 1], int(numbers.max()) + 1
        return np.bincount(numbers[self.members], of_end * nbytes, size)

    def hops(self, ways: Routes, point: np.ndarray) -> Count:
        senders, receivers = self._ends
        at, points = point[self.members], np.arange(ways.points)
        group, rank = cells(self.pattern.groups), np.arange(at.size)
        taken = np.zeros((int(group.max()) + 1, ways.points))
        np.add.at(taken, (group, at), receivers)
        reached = taken[group]  # of each point, by each rank
        if self.pattern.same:
            reached[rank, at] -= receivers
        else:
            reached = taken.sum(0) - reached
        passed = senders * (reached * ways.between(points[:, None], points)[at]).sum(1)
        return np.stack([passed, np.zeros_like(passed)])

    def between(self, ways: Routes, point: np.ndarray, nbytes: Number) -> np.ndarray:
        senders, receivers = self._ends
        at, group = point[self.members], cells(self.pattern.groups)
        table = (ways.points, int(group.max()) + 1)
        cell = np.ravel_multi_index((at, group), table)
        given, taken = (
            np.bincount(cell, ends, table[0] * table[1]).reshape(table)
            for ends in (senders, receivers)
        )
        grouped = given @ taken.T
        if not self.pattern.same:
            return np.asarray((np.outer(given.sum(1), taken.sum(1)) - grouped) * nbytes)
        own = np.bincount(at, senders * receivers, ways.points)
        return np.asarray((grouped - np.diag(own)) * nbytes)


Messages = Listed | Alike
