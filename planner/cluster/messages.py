"""Sets of messages between ranks: `MessageList`, or counts of equal messages (`EqualMessages`).

Both classes have the same methods, with which ports.py counts the messages that pass a port. A
*count* of `MessageList` is an array [messages]: how often each message passes something. A count of
`EqualMessages` is an array [2, ranks]: how many of the messages that a rank sends pass it, and how
many of the messages that the rank receives. Counts can be added and subtracted.

An `Outer` (vocabulary/outer.py) is a traffic matrix that is given by a number per sender and a
number per receiver. The load of a port then follows from counts: how many of a rank's peers share
its island, its PCIe switch or its server. No list of messages is needed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gnnplan.planner.cluster.fabric import Routes
from gnnplan.planner.vocabulary.numbers import Number
from gnnplan.planner.vocabulary.outer import EqualPairs, Outer, cells

Count = np.ndarray


@dataclass(frozen=True, eq=False)
class MessageList:
    """Messages from rank `source[m]` to rank `target[m]`."""

    source: np.ndarray  # [messages]
    target: np.ndarray  # [messages]

    def within(self, *places: np.ndarray, to: np.ndarray | None = None) -> Count:
        """Count the messages whose two ranks are equal in each of `places` (arrays [ranks], such as
        the server of each rank); only those to the ranks `to` (bool [ranks]), if given."""
        out = np.ones(self.source.size) if to is None else 1.0 * to[self.target]
        for place in places:
            out = out * (place[self.source] == place[self.target])
        return out

    def sent_by(self, count: Count, some: np.ndarray) -> Count:
        """Restrict a count to messages that `some` ranks (bool [ranks]) send."""
        return np.asarray(count * some[self.source])

    def received_by(self, count: Count, some: np.ndarray) -> Count:
        """Restrict a count to messages that `some` ranks (bool [ranks]) receive."""
        return np.asarray(count * some[self.target])

    def sent_per_rank(self, count: Count) -> np.ndarray:
        """Return the number of messages that each rank sends [ranks]."""
        return np.bincount(self.source, count)

    def ends(self, numbers: np.ndarray, at_sender: bool) -> np.ndarray:
        """Return `numbers` [ranks] of each message's sender, or of its receiver [messages]."""
        return np.asarray(numbers[self.source if at_sender else self.target])

    def load(
        self, count: Count, numbers: np.ndarray, at_sender: bool, nbytes: Number
    ) -> np.ndarray:
        """Return the bytes that pass each port at the senders, or at the receivers [ports].

        `numbers` is the port of each rank [ranks]; `nbytes` are the bytes of each message [B].
        """
        passing = np.flatnonzero(count)
        at, size = self.ends(numbers, at_sender)[passing], int(numbers.max()) + 1
        return np.bincount(at, (count * nbytes)[passing], size)

    def hops(self, routes: Routes, point: np.ndarray) -> Count:
        """Count the links of a fabric that messages pass; `point` is each rank's point [ranks]."""
        return routes.between(point[self.source], point[self.target])

    def between(self, routes: Routes, point: np.ndarray, nbytes: Number) -> np.ndarray:
        """Return the bytes from point to point of a fabric [points, points]."""
        place = point[self.source] * routes.points + point[self.target]
        return np.bincount(place, nbytes, routes.points**2).reshape(routes.points, -1)


@dataclass(frozen=True, eq=False)
class EqualMessages:
    """Equal messages between `members`; the methods are those of `MessageList`."""

    members: np.ndarray  # ranks; their order is that of the rows of `pattern`
    pattern: Outer
    pairs: EqualPairs  # senders and receivers of the messages

    @property
    def _ends(self) -> tuple[np.ndarray, np.ndarray]:
        """1 for members that send, and 1 for members that receive, else 0 (each [members])."""
        return self.pairs.senders.astype(float), self.pairs.receivers.astype(float)

    def within(self, *places: np.ndarray, to: np.ndarray | None = None) -> Count:
        at, (senders, receivers) = [place[self.members] for place in places], self._ends
        if to is not None:
            receivers = receivers * to[self.members]
        reached, reaching = (self.pattern.reached(ends, *at) for ends in (receivers, senders))
        return np.stack([senders * reached, receivers * reaching])

    def sent_by(self, count: Count, some: np.ndarray) -> Count:
        return np.asarray(count * some[self.members])

    received_by = sent_by  # row 0 of a count is of messages sent, row 1 of messages received

    def sent_per_rank(self, count: Count) -> np.ndarray:
        return np.asarray(count[0])

    def load(
        self, count: Count, numbers: np.ndarray, at_sender: bool, nbytes: Number
    ) -> np.ndarray:
        messages, size = count[0 if at_sender else 1], int(numbers.max()) + 1
        return np.bincount(numbers[self.members], messages * nbytes, size)

    def hops(self, routes: Routes, point: np.ndarray) -> Count:
        senders, receivers = self._ends
        at, points = point[self.members], np.arange(routes.points)
        group, rank = cells(self.pattern.groups), np.arange(at.size)
        received = np.zeros((int(group.max()) + 1, routes.points))
        np.add.at(received, (group, at), receivers)
        reached = received[group]  # receivers at each point that a rank sends to [ranks, points]
        if self.pattern.same:
            reached[rank, at] -= receivers
        else:
            reached = received.sum(0) - reached
        passed = senders * (reached * routes.between(points[:, None], points)[at]).sum(1)
        return np.stack([passed, np.zeros_like(passed)])

    def between(self, routes: Routes, point: np.ndarray, nbytes: Number) -> np.ndarray:
        senders, receivers = self._ends
        at, group = point[self.members], cells(self.pattern.groups)
        table = (routes.points, int(group.max()) + 1)
        cell = np.ravel_multi_index((at, group), table)
        sent, received = (
            np.bincount(cell, ends, table[0] * table[1]).reshape(table)
            for ends in (senders, receivers)
        )
        grouped = sent @ received.T
        if not self.pattern.same:
            return np.asarray((np.outer(sent.sum(1), received.sum(1)) - grouped) * nbytes)
        own = np.bincount(at, senders * receivers, routes.points)
        return np.asarray((grouped - np.diag(own)) * nbytes)


Messages = MessageList | EqualMessages
