"""The cluster as a graph of what bytes pass, and the ways through what is between its servers.

    GPU ── island (NVLink)                                          leaf_spine   leaf ── spine ── leaf
     ├──── PCIe switch ── host bridge of the server                 ring         server ── server ── server ── (the first)
     └──── network card ── its leaf, or its server's place in the ring, or the one switch that joins all cards

Every edge that can be busy carries the *port* that cost.py fills. `route` walks the whole graph from GPU to GPU. `Routes` has all pairs
of the fabric at once: shortest ways by networkx, split evenly where several are equally short (half way round a ring).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import Any

import networkx as nx
import numpy as np
from scipy.sparse import csr_array, identity
from scipy.sparse.linalg import splu

from gnnplan.planner.places import Places, Port
from gnnplan.planner.specs import Cluster, Fabric

Node = tuple[str, int]


def graph(cluster: Cluster) -> nx.DiGraph:
    """The whole: nodes ('gpu', g), ('island', i), ('switch', k), ('host', s), ('card', c) and those of the fabric, numbered over the
    cluster; edges with the `port` that they keep busy, or None. A server that names no switches has one, its host bridge."""
    return _graph(**{name: getattr(cluster, name) for name in ("servers", "gpus_per_server", "islands", "switches", "nics", "fabric")})


@lru_cache(maxsize=8)
def _graph(**shape: Any) -> nx.DiGraph:
    """Clusters of one shape have the same, whatever their links; a plan asks many times."""
    out, cluster = nx.DiGraph(), Cluster.model_construct(**shape)
    at = Places.of(cluster, range(cluster.ranks))
    for g, (server, island, switch, card) in enumerate(zip(*(numbers.tolist() for numbers in at[:4]), strict=True)):
        gpu, shared = ("gpu", g), bool(cluster.switches)
        for node, kind, number, busy in ((("island", island), "island", g, bool(cluster.islands)), (("switch", switch), "gpu", g, True),
                                         (("card", card), "switch", switch, bool(at.uplinked[g]))):  # fmt: skip
            _join(out, gpu, node, kind if busy else None, number)
        _join(out, ("switch", switch), ("host", server), "switch" if shared else None, switch)
        if cluster.servers > 1:
            _join(out, ("card", card), attached(cluster, server), "nic", card)
    if cluster.servers > 1:
        for number, (a, b) in enumerate(fabric_graph(cluster.fabric, cluster.servers).edges):
            out.add_edge(a, b, length=1, port=("fabric", number))
    return out


def told(cluster: Cluster, seats: Sequence[int], port: Port) -> str:
    """Which link a port is, in words: 'leaf 0 -> spine 0'; or what else is shared."""
    kind, number = port
    if kind == "bridge":
        return f"the memory of server {number}"
    if kind == "cores":
        return "the cores of the machine" if cluster.one_machine else f"the cores of server {number}"
    if kind.startswith(("gpu", "island")):
        number = seats[number]
    edges = [edge for *edge, busy in graph(cluster).edges(data="port") if busy == (kind, number)]
    edges.sort(key=lambda edge: {edge[0][0], edge[1][0]} == {"gpu", "card"})  # a switch's uplink, which is on the way to some cards too
    return " -> ".join(f"{what.replace('gpu', 'GPU')} {which}" for what, which in edges[0])


def _join(out: nx.DiGraph, below: Node, above: Node, kind: str | None, number: int) -> None:
    length = {"island": 1, "switch": 2, "host": 2}.get(above[0], 9)  # NVLink before PCIe; nothing turns round at a card
    out.add_edge(below, above, length=length, port=(f"{kind}_out", number) if kind else None)
    out.add_edge(above, below, length=length, port=(f"{kind}_in", number) if kind else None)


def attached(cluster: Cluster, server: int) -> Node:
    """Where a server's cards are plugged in."""
    fabric = cluster.fabric
    if fabric is None:
        return ("network", 0)
    return ("leaf", server // fabric.below) if fabric.kind == "leaf_spine" else ("router", server)


def fabric_graph(fabric: Fabric | None, servers: int) -> nx.DiGraph:
    """What is between the servers; its edges, in order, are the ports ('fabric', 0), ('fabric', 1), ... Spines count as one: ways
    over them are spread evenly."""
    out = nx.Graph()
    if fabric is None:
        out.add_node(("network", 0))
    elif fabric.kind == "leaf_spine":
        leaves = [("leaf", leaf) for leaf in range(-(-servers // fabric.below))]
        out.add_nodes_from(leaves)
        out.add_edges_from((leaf, ("spine", 0)) for leaf in leaves)
    else:
        around = [("router", server) for server in range(servers)]
        out.add_nodes_from(around)
        out.add_edges_from(nx.utils.pairwise(around, cyclic=servers > 2))
    return out.to_directed()


def route(cluster: Cluster, whole: nx.DiGraph, a: int, b: int) -> list[Port]:
    """The ports on a shortest way from GPU a to GPU b, no other GPU handing on what passes."""
    others = [node for node in whole if node[0] == "gpu" and node[1] not in (a, b)]
    path = nx.shortest_path(nx.restricted_view(whole, others, []), ("gpu", a), ("gpu", b), weight="length")
    return [port for hop in nx.utils.pairwise(path) if (port := whole.edges[hop]["port"])]


class Routes:
    """All shortest ways between the points of a fabric where servers are plugged in."""

    def __init__(self, fabric: Fabric, servers: int) -> None:
        whole = fabric_graph(fabric, servers)
        self.points = sum(node[0] != "spine" for node in whole)  # the first nodes
        self.at = np.arange(servers) // fabric.below
        self.links = whole.number_of_edges()
        self._nodes = whole.number_of_nodes()
        numbers, links = {node: i for i, node in enumerate(whole)}, {edge: i for i, edge in enumerate(whole.edges)}
        shares: list[tuple[int, int, int, float]] = []  # bytes for a node are bytes for the node before it: from, to, link, share
        self.hops = np.zeros((self.points, self.points), dtype=np.int64)  # links on the way from point to point
        for source in list(whole)[: self.points]:
            a = numbers[source]
            before, far = nx.predecessor(whole, source), nx.single_source_shortest_path_length(whole, source)
            for node, nearer in before.items():
                b = numbers[node]
                if b < self.points:
                    self.hops[a, b] = far[node]
                shares += [(a * self._nodes + b, a * self._nodes + numbers[near], links[near, node], 1 / len(nearer)) for near in nearer]
        columns = [np.array(column) for column in zip(*sorted(shares), strict=True)] or [np.zeros(0, dtype=np.int64)] * 4
        self._steps = columns[0], columns[1], columns[2], columns[3]

    @cached_property
    def _solver(self) -> tuple[object, csr_array]:
        """What passes a node is what is for it and what passes the nodes behind it: (I - T) x = b, x -> bytes by link."""
        behind, nearer, link, share = self._steps
        size = self.points * self._nodes
        handed_on = csr_array((share, (nearer, behind)), shape=(size, size))
        passing = csr_array((share, (link, behind)), shape=(self.links, size))
        return splu((identity(size, format="csc") - handed_on).tocsc(), permc_spec="NATURAL"), passing

    def bytes_by_link(self, source: np.ndarray, target: np.ndarray, nbytes: np.ndarray) -> np.ndarray:
        """Bytes from servers to servers as bytes on the fabric's links; servers beyond the last are those of a copy of the cluster,
        whose links follow. [messages] -> [copies * links]"""
        servers = self.at.size
        copy, copies = source // servers, int(source.max()) // servers + 1
        ends = self.at[source % servers] * self._nodes + self.at[target % servers]
        size = self.points * self._nodes
        asked = np.bincount(copy * size + ends, weights=nbytes, minlength=copies * size).reshape(copies, size)
        solver, passing = self._solver
        return np.asarray((passing @ solver.solve(asked.T)).T.ravel())  # type: ignore[attr-defined]

    def passes(self, source: np.ndarray, target: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Of messages between servers, step by step back from their ends: which passes which link with which share of it."""
        behind, nearer, link, share = self._steps
        message, part = np.arange(source.size), np.ones(source.size)
        here = self.at[source] * self._nodes + self.at[target]
        out = []
        while message.size:
            low, high = np.searchsorted(behind, here, "left"), np.searchsorted(behind, here, "right")
            ways = high - low
            step = np.repeat(low - np.cumsum(ways) + ways, ways) + np.arange(ways.sum())
            message, part, here = np.repeat(message, ways), np.repeat(part, ways) * share[step], nearer[step]
            out.append((message, link[step], part))
        messages, links, parts = (np.concatenate(column) for column in zip(*out, strict=True))
        return messages, links, parts
