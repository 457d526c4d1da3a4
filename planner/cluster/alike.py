"""Counts messages by where their ends sit, without a list of them (for ports.py).

An `Outer` says what ranks send each other by a number per sender and one per receiver. The load of
a port then follows from counts: how many of the ranks that a rank exchanges with share its island,
its PCIe switch or its server with it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from gnnplan.planner.cluster.places import Places
from gnnplan.planner.vocabulary.outer import EqualPairs, Outer, cells


class Ends(NamedTuple):
    """How many messages of each rank pass some link or port [ranks]."""

    out: np.ndarray  # that it sends
    into: np.ndarray  # that it receives

    def plus(self, other: Ends, times: float = 1.0) -> Ends:
        return Ends(self.out + times * other.out, self.into + times * other.into)

    def less(self, other: Ends) -> Ends:
        return self.plus(other, -1.0)


@dataclass(frozen=True)
class Alike:
    """Equal messages between some ranks of an `Outer`, counted by where both ends sit."""

    at: Places  # of the ranks that exchange
    pattern: Outer
    pairs: EqualPairs

    def within(self, *places: np.ndarray) -> Ends:
        """Messages between ranks that are alike in all these places, each numbered [ranks]."""
        senders, receivers = self._ends
        reached, reaching = (self.pattern.reached(ends, *places) for ends in (receivers, senders))
        return Ends(senders * reached, receivers * reaching)

    def to(self, receivers: np.ndarray) -> Alike:
        """Those to these receivers alone, bool [ranks]."""
        receivers = self.pairs.receivers & receivers
        return replace(self, pairs=self.pairs._replace(receivers=receivers))

    @property
    def _ends(self) -> tuple[np.ndarray, np.ndarray]:
        return self.pairs.senders.astype(float), self.pairs.receivers.astype(float)

    def between(self, place: np.ndarray, count: int) -> np.ndarray:
        """Messages from place to place [count, count]; `place`: that of each rank [ranks]."""
        senders, receivers = self._ends
        group = cells(self.pattern.groups)
        table = (count, int(group.max()) + 1)
        at = np.ravel_multi_index((place, group), table)
        given, taken = (
            np.bincount(at, ends, table[0] * table[1]).reshape(table)
            for ends in (senders, receivers)
        )
        grouped = given @ taken.T
        if not self.pattern.same:
            return np.asarray(np.outer(given.sum(1), taken.sum(1)) - grouped)
        return np.asarray(grouped - np.diag(np.bincount(place, senders * receivers, count)))

    def reaching(self, place: np.ndarray, count: int) -> np.ndarray:
        """Messages from each rank to each place [ranks, count]."""
        senders, receivers = self._ends
        group, rank = cells(self.pattern.groups), np.arange(place.size)
        taken = np.zeros((int(group.max()) + 1, count))
        np.add.at(taken, (group, place), receivers)
        reached = taken[group]
        if self.pattern.same:
            reached[rank, place] -= receivers
        else:
            reached = taken.sum(0) - reached
        return np.asarray(senders[:, None] * reached)
