"""The fabric between servers: its links, and which of them bytes pass on the shortest ways.

leaf_spine    up a leaf's link, then down another's
ring          on from router to router, or back; half way round, half of the bytes go either way
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from gnnplan.planner.cluster.spec import Fabric
from gnnplan.planner.vocabulary.numbers import ranges

Node = tuple[str, int]


def links(fabric: Fabric, servers: int) -> list[tuple[Node, Node]]:
    """The links between servers, which in this order are the ports ('fabric', 0), ('fabric', 1) ..

    First those up to the spine, or on in the ring; then the same ones down, or back. Spine switches
    count as one, because ways over them are spread evenly.
    """
    if fabric.kind == "leaf_spine":
        leaves = range(-(-servers // fabric.below))
        first: list[tuple[Node, Node]] = [(("leaf", leaf), ("spine", 0)) for leaf in leaves]
    else:
        cables = servers if servers > 2 else servers - 1
        first = [(("router", a), ("router", (a + 1) % servers)) for a in range(cables)]
    return first + [(end, start) for start, end in first]


class Routes:
    """All shortest ways between the *points* of a fabric, which are where servers are plugged in.

    Where two ways are equally short, each takes half of the bytes.
    """

    def __init__(self, fabric: Fabric, servers: int) -> None:
        self.is_ring = fabric.kind == "ring"
        self.at = np.arange(servers) // fabric.below  # the point of each server [servers]
        self.points = int(self.at[-1]) + 1
        self.links = len(links(fabric, servers))

    def between(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """Links on the way from points a to points b."""
        return np.asarray(np.minimum(*self._around(a, b)) if self.is_ring else 2 * (a != b))

    def _around(self, a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Links from a on to b, and from a back to b; two routers have one cable."""
        n, alone = self.points, self.points == 2
        return (b - a) % n + alone * (a > b), (a - b) % n + alone * (a < b)

    def by_link(self, between: np.ndarray) -> np.ndarray:
        """Bytes on each link [links], of those from point to point [points, points]."""
        if self.is_ring:
            mirrored = self._passing_on(between[::-1, ::-1])[::-1]
            both = self._passing_on(between), np.roll(mirrored, -1)
        else:
            np.fill_diagonal(between, 0.0)
            both = between.sum(1), between.sum(0)
        return np.concatenate([one_way[: self.links // 2] for one_way in both])

    def _passing_on(self, between: np.ndarray) -> np.ndarray:
        """Bytes on the cable from each router of a ring to the next [points]."""
        start = np.arange(self.points)
        cable = passing = np.zeros(self.points)
        for left in range(self.points // 2, 0, -1):  # cables that are left to pass
            end = (start + left) % self.points
            on, back = self._around(start, end)
            share = (on <= back) / (1.0 + (on == back))
            passing = np.roll(passing, 1) + share * between[start, end]
            cable = cable + passing
        return cable

    def passes(
        self, source: np.ndarray, target: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Which message between servers passes which link, with which share: three [passes]."""
        a, b = self.at[source], self.at[target]
        if not self.is_ring:
            away = np.flatnonzero(a != b)
            over = np.append(a[away], self.points + b[away])
            return np.tile(away, 2), over, np.ones(2 * away.size)
        on, back = self._around(a, b)
        lengths = np.append(np.where(on <= back, on, 0), np.where(back <= on, back, 0))
        link = ranges(np.append(a, b), lengths) % self.points
        link[lengths[: a.size].sum() :] += self.links // 2
        message = np.repeat(np.tile(np.arange(a.size), 2), lengths)
        return message, link, np.where(on == back, 0.5, 1.0)[message]


@lru_cache(maxsize=32)
def routes(fabric: Fabric, servers: int) -> Routes:
    """The ways through a fabric that joins so many servers."""
    return Routes(fabric, servers)
