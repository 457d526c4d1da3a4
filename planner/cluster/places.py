"""Which server, island, PCIe switch and NIC each rank uses, and the names of ports.

    GPU ── island (NVLink)
     ├──── PCIe switch ── host bridge of the server
     └──── NIC ── the server's leaf switch, its router in the ring, or one switch for all NICs

    leaf_spine   leaf ── spine ── leaf: up the link of one leaf, then down that of another
    ring         server ── server ── server ── (the first): from router to router, forward or
                 back; to the opposite router half go each way

Tests build this graph, and follow routes in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from gnnplan.planner.cluster.spec import Cluster, Fabric, LinkName
from gnnplan.planner.vocabulary.numbers import ranges

# -- the network between servers -------------------------------------------------------------------


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


# -- places of ranks -------------------------------------------------------------------------------


# A part of the cluster that carries bytes at a limited rate; each direction is a port of its own:
#     ('gpu_out', rank), ('island_out', rank), ('switch_out', switch), ('nic_out', NIC)
#     ('gpu_in', rank), ('island_in', rank), ('switch_in', switch), ('nic_in', NIC)
#     ('bridge', server), ('fabric', link), ('cores', machine), ('device', rank): a sampling GPU
Port = tuple[str, int]
LINK_NAMES: tuple[LinkName, ...] = ("inter_node", "island", "intra_node")


class Places(NamedTuple):
    """Each rank's server, island, switch and NIC, int [ranks], numbered over the whole cluster."""

    server: np.ndarray
    island: np.ndarray
    switch: np.ndarray
    nic: np.ndarray
    uplinked: np.ndarray  # bool [ranks]: whether the path to the NIC passes the switch's uplink

    @classmethod
    def of(cls, cluster: Cluster, placement: Sequence[int]) -> Places:
        """Return the places of ranks, of which rank r sits on GPU `placement[r]`."""
        gpus_per_server = cluster.gpus_per_server
        server, gpu = np.divmod(np.asarray(placement, dtype=np.int64), gpus_per_server)

        def numbered(lists: Sequence[Sequence[int]]) -> np.ndarray:
            """Return the list that contains each rank's GPU, numbered over the cluster [ranks]."""
            list_of_gpu = np.zeros(gpus_per_server, dtype=np.int64)
            for number, gpus in enumerate(lists):
                list_of_gpu[list(gpus)] = number
            return np.asarray(server * len(lists) + list_of_gpu[gpu])

        all_gpus = (tuple(range(gpus_per_server)),)
        nics, switches = cluster.nics or all_gpus, cluster.switches or all_gpus
        within_switch = [any(set(gpus) <= set(switch) for switch in switches) for gpus in nics]
        nic = numbered(nics)
        return cls(
            server=server,
            island=numbered(cluster.islands or tuple((g,) for g in range(gpus_per_server))),
            switch=numbered(switches),
            nic=nic,
            uplinked=~np.asarray(within_switch)[nic % len(nics)],
        )

    def links(self, source: np.ndarray, target: np.ndarray) -> np.ndarray:
        """Return each message's kind of link, as an index of LINK_NAMES [messages]."""
        same_island = self.island[source] == self.island[target]
        between = self.server[source] != self.server[target]
        return np.asarray(np.where(between, 0, np.where(same_island, 1, 2)))


def describe_port(cluster: Cluster, placement: Sequence[int], port: Port) -> str:
    """Describe a port: a link, as 'leaf 0 -> spine 0', or the shared memory or cores."""
    kind, number = port
    if kind == "bridge":
        return f"the memory of server {number}"
    if kind == "cores":
        return "the cores of " + ("the machine" if cluster.one_machine else f"server {number}")
    if kind == "fabric" and cluster.fabric:
        ends = links(cluster.fabric, cluster.servers)[number]
    else:
        at, (what, direction) = Places.of(cluster, range(cluster.ranks)), kind.split("_")
        if what in ("gpu", "island"):
            gpu, above = placement[number], "island" if what == "island" else "switch"
            ends = ("GPU", gpu), (above, int(getattr(at, above)[gpu]))
        else:
            server = int(at.server[getattr(at, what) == number][0])
            ends = (
                (("switch", number), ("host", server))
                if what == "switch"
                else (("NIC", number), attached(cluster, server))
            )
        ends = ends if direction == "out" else ends[::-1]
    return " -> ".join(f"{name} {place}" for name, place in ends)


def attached(cluster: Cluster, server: int) -> Node:
    """Return the node of the fabric that a server's NICs are plugged into."""
    fabric = cluster.fabric
    if fabric is None:
        return ("network", 0)
    return ("leaf", server // fabric.below) if fabric.kind == "leaf_spine" else ("router", server)
