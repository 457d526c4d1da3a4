"""The whole cluster as a graph, from GPU to GPU.

    GPU ── island (NVLink)
     ├──── PCIe switch ── host bridge of the server
     └──── NIC ── its leaf, or its server's place in the ring, or the one switch that joins all NICs

    leaf_spine   leaf ── spine ── leaf
    ring         server ── server ── server ── (the first)

Every edge that can be busy carries its *port* (places.py). Costs do not need this graph: ports.py
names ports by what two ranks share, and tests follow routes to check that the graph says the same.
It serves to describe ports to people. fabric.py has the part between servers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from gnnplan.planner.cluster.fabric import Node, links
from gnnplan.planner.cluster.places import Places, Port
from gnnplan.planner.cluster.spec import Cluster


class Edge(NamedTuple):
    """One way between two neighbours."""

    start: Node
    end: Node
    port: Port | None  # that it keeps busy


_WORDS = {"gpu": "GPU", "nic": "NIC"}


def edges(cluster: Cluster) -> Iterator[Edge]:
    """Nodes are ('gpu', g), ('island', i), ('switch', k), ('host', s), ('nic', c) and those of the
    fabric, numbered over the cluster. A server without `switches` has one, its host bridge."""
    at = Places.of(cluster, range(cluster.ranks))
    for g, (server, island, switch, nic) in enumerate(
        zip(*(numbers.tolist() for numbers in at[:4]), strict=True)
    ):
        gpu = ("gpu", g)
        yield from _both(gpu, ("island", island), "island" if cluster.islands else None, g)
        yield from _both(gpu, ("switch", switch), "gpu", g)
        yield from _both(gpu, ("nic", nic), "switch" if at.uplinked[g] else None, switch)
        uplink = "switch" if cluster.switches else None
        yield from _both(("switch", switch), ("host", server), uplink, switch)
        if cluster.servers > 1:
            yield from _both(("nic", nic), attached(cluster, server), "nic", nic)
    if cluster.servers > 1 and cluster.fabric:
        for number, (a, b) in enumerate(links(cluster.fabric, cluster.servers)):
            yield Edge(a, b, ("fabric", number))


def _both(below: Node, above: Node, kind: str | None, number: int) -> Iterator[Edge]:
    """Two edges, whose ports are (kind + '_out', number) up and (kind + '_in', number) down."""
    yield Edge(below, above, (f"{kind}_out", number) if kind else None)
    yield Edge(above, below, (f"{kind}_in", number) if kind else None)


def describe_port(cluster: Cluster, placement: Sequence[int], port: Port) -> str:
    """A port in words: the link, as 'leaf 0 -> spine 0', or the memory or cores that are shared."""
    kind, number = port
    if kind == "bridge":
        return f"the memory of server {number}"
    if kind == "cores":
        return (
            "the cores of the machine" if cluster.one_machine else f"the cores of server {number}"
        )
    if kind.startswith(("gpu", "island")):
        number = placement[number]
    named = [edge for edge in edges(cluster) if edge.port == (kind, number)]
    # A switch's uplink is also on edges between GPUs and NICs; the edge to the host is named first.
    named.sort(key=lambda edge: {edge.start[0], edge.end[0]} == {"gpu", "nic"})
    return " -> ".join(f"{_WORDS.get(node, node)} {number}" for node, number in named[0][:2])


def attached(cluster: Cluster, server: int) -> Node:
    """The node of the fabric that a server's NICs are plugged into."""
    fabric = cluster.fabric
    if fabric is None:
        return ("network", 0)
    return ("leaf", server // fabric.below) if fabric.kind == "leaf_spine" else ("router", server)
