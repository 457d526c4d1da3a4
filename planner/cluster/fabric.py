"""The fabric between servers: its links, and the links that bytes pass on shortest routes.

leaf_spine    up the link of one leaf, then down the link of another leaf
ring          from router to router, forward or back; to the opposite router half go each way
"""

from __future__ import annotations

import numpy as np

from gnnplan.planner.cluster.spec import Fabric
from gnnplan.planner.vocabulary.numbers import ranges

Node = tuple[str, int]


def links(fabric: Fabric, servers: int) -> list[tuple[Node, Node]]:
    """Return the links between servers; link i is the port ('fabric', i).

    Links up to the spine, or forward in the ring, come first; then the same links in the opposite
    direction. Spine switches count as one switch, because traffic is spread evenly over them.
    """
    if fabric.kind == "leaf_spine":
        leaves = range(-(-servers // fabric.below))
        first: list[tuple[Node, Node]] = [(("leaf", leaf), ("spine", 0)) for leaf in leaves]
    else:
        cables = servers if servers > 2 else servers - 1
        first = [(("router", a), ("router", (a + 1) % servers)) for a in range(cables)]
    return first + [(end, start) for start, end in first]


class Routes:
    """All shortest routes between the *points* of a fabric, where servers are plugged in.

    If two routes are equally short, each carries half of the bytes.
    """

    def __init__(self, fabric: Fabric, servers: int) -> None:
        self.is_ring = fabric.kind == "ring"
        self.at = np.arange(servers) // fabric.below  # the point of each server [servers]
        self.points = int(self.at[-1]) + 1
        self.links = len(links(fabric, servers))

    def between(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """Return the number of links from points a to points b."""
        return np.asarray(np.minimum(*self._around(a, b)) if self.is_ring else 2 * (a != b))

    def _around(self, a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the links from a to b forward, and backward; two routers have one cable."""
        n, one_cable = self.points, self.points == 2
        return (b - a) % n + one_cable * (a > b), (a - b) % n + one_cable * (a < b)

    def by_link(self, between: np.ndarray) -> np.ndarray:
        """Return the bytes on each link [links], from bytes between points [points, points]."""
        if self.is_ring:
            mirrored = self._bytes_forward(between[::-1, ::-1])[::-1]
            both = self._bytes_forward(between), np.roll(mirrored, -1)
        else:
            np.fill_diagonal(between, 0.0)
            both = between.sum(1), between.sum(0)
        return np.concatenate([each[: self.links // 2] for each in both])

    def _bytes_forward(self, between: np.ndarray) -> np.ndarray:
        """Return the bytes on the cable from each router of a ring to the next [points]."""
        start = np.arange(self.points)
        cable = passing = np.zeros(self.points)
        for left in range(self.points // 2, 0, -1):  # cables from here to the destination
            end = (start + left) % self.points
            forward, back = self._around(start, end)
            share = (forward <= back) / (1.0 + (forward == back))
            passing = np.roll(passing, 1) + share * between[start, end]
            cable = cable + passing
        return cable

    def passes(
        self, source: np.ndarray, target: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return (message, link, share of the bytes) of each pass of a message over a link.

        source, target: the servers of each message [messages]. Returned arrays are [passes].
        """
        a, b = self.at[source], self.at[target]
        if not self.is_ring:
            away = np.flatnonzero(a != b)
            link = np.append(a[away], self.points + b[away])
            return np.tile(away, 2), link, np.ones(2 * away.size)
        forward, back = self._around(a, b)
        lengths = np.append(forward * (forward <= back), back * (back <= forward))
        link = ranges(np.append(a, b), lengths) % self.points
        link[lengths[: a.size].sum() :] += self.links // 2
        message = np.repeat(np.tile(np.arange(a.size), 2), lengths)
        return message, link, np.where(forward == back, 0.5, 1.0)[message]
