"""Servers wired in any way, for laws that hold of all; and the whole cluster as a graph."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import networkx as nx
from hypothesis import strategies as st

from gnnplan.planner.cluster.places import Node, Places, Port, attached, links
from gnnplan.planner.cluster.spec import Cluster, Fabric, Link

LINKS = st.builds(
    Link,
    bandwidth=st.sampled_from([1e7, 1e8, 7e8, 1e9, 1e10]),
    latency=st.sampled_from([0.0, 1e-6, 1e-3]),
)


def wiring(draw: st.DrawFn, gpus: int) -> dict[str, Any]:
    """Any links, and with them any lists of so many GPUs: the fields of a Cluster."""

    def parts() -> list[list[int]]:
        of = draw(st.lists(st.integers(0, 2), min_size=gpus, max_size=gpus))
        return [[g for g in range(gpus) if of[g] == i] for i in sorted(set(of))]

    more: dict[str, Any] = {"intra_node": draw(LINKS), "inter_node": draw(LINKS)}
    for lists, of in (("islands", "island"), ("switches", "switch"), ("nics", None)):
        if draw(st.booleans()):
            more[lists] = parts()
            if of:
                more[of] = draw(LINKS)
    return more


def between(draw: st.DrawFn, **fabric: Any) -> dict[str, Any]:
    """With and without peer access, and any fabric."""
    more: dict[str, Any] = {}
    if draw(st.booleans()):
        more |= {"peer_access": False, "host": draw(LINKS), "bridge": draw(st.none() | LINKS)}
    if kind := draw(st.sampled_from([None, "ring", "leaf_spine"])):
        per_leaf = draw(st.integers(1, 3)) if kind == "leaf_spine" else None
        more["fabric"] = Fabric(kind=kind, servers_per_leaf=per_leaf, **fabric)
    return more


class Edge(NamedTuple):
    """One way between two neighbours."""

    start: Node
    end: Node
    port: Port | None  # that it keeps busy


def edges(cluster: Cluster) -> Iterator[Edge]:
    """('gpu', g), ('island', i), ('switch', k), ('host', s), ('nic', c) and the fabric's nodes."""
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


def graph(cluster: Cluster) -> nx.DiGraph:
    """The graph of a cluster; every edge has the `port` that it keeps busy, or None."""
    out = nx.DiGraph()
    for start, end, port in edges(cluster):
        out.add_edge(start, end, port=port)
    return out


def route(whole: nx.DiGraph, a: int, b: int) -> list[Port]:
    """The ports on a shortest way from GPU a to GPU b that passes no other GPU."""

    def length(start: tuple[str, int], end: tuple[str, int], _: Any) -> int:
        """A route prefers NVLink to PCIe, and never turns round at a NIC."""
        kinds = {start[0], end[0]}
        return 9 if "nic" in kinds else 2 if "switch" in kinds else 1

    others = [node for node in whole if node[0] == "gpu" and node[1] not in (a, b)]
    passed = nx.restricted_view(whole, others, [])
    path = nx.shortest_path(passed, ("gpu", a), ("gpu", b), weight=length)
    return [port for hop in nx.utils.pairwise(path) if (port := whole.edges[hop]["port"])]
