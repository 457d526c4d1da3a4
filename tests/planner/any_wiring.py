"""Servers wired in any way, for laws that hold of all; and the whole cluster as a graph."""

from __future__ import annotations

from typing import Any

import networkx as nx
from hypothesis import strategies as st

from gnnplan.planner.cluster.places import Port
from gnnplan.planner.cluster.spec import Cluster, Link
from gnnplan.planner.cluster.topology import edges

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
