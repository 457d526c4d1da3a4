"""The fabric between servers as a graph, and all shortest ways through it at once.

networkx and sparse solvers are imported only where a cluster has a fabric, so that ranks and other
clusters start sooner."""

from __future__ import annotations

from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

import numpy as np

from gnnplan.planner.cluster.spec import Fabric

if TYPE_CHECKING:
    import networkx as nx
    from scipy.sparse import csr_array
    from scipy.sparse.linalg import SuperLU


def fabric_graph(fabric: Fabric, servers: int) -> nx.DiGraph:
    """The graph between servers; its edges, in order, are the ports ('fabric', 0), ('fabric', 1) ..

    Spine switches count as one, because ways over them are spread evenly.
    """
    import networkx as nx

    out = nx.Graph()
    if fabric.kind == "leaf_spine":
        leaves = [("leaf", leaf) for leaf in range(-(-servers // fabric.below))]
        out.add_nodes_from(leaves)
        out.add_edges_from((leaf, ("spine", 0)) for leaf in leaves)
    else:
        routers = [("router", server) for server in range(servers)]
        out.add_nodes_from(routers)
        out.add_edges_from(nx.utils.pairwise(routers, cyclic=servers > 2))
    return out.to_directed()


class Routes:
    """All shortest ways between the *points* of a fabric, which are where servers are plugged in.

    Where several ways are equally short, each takes an equal share of the bytes.
    """

    def __init__(self, fabric: Fabric, servers: int) -> None:
        import networkx as nx

        graph = fabric_graph(fabric, servers)
        self.points = sum(node[0] != "spine" for node in graph)  # they are the first nodes
        self.at = np.arange(servers) // fabric.below  # the point of each server [servers]
        self.links = graph.number_of_edges()
        self._nodes = graph.number_of_nodes()
        number = {node: i for i, node in enumerate(graph)}
        link_number = {edge: i for i, edge in enumerate(graph.edges)}
        # Links on the way from point to point.
        self.hops = np.zeros((self.points, self.points), dtype=np.int64)
        # Bytes from a point to a node pass the nodes before it: what goes to the state
        # (point, node) goes to (point, node before), over this link, with this share.
        steps: list[tuple[int, int, int, float]] = []
        for point in list(graph)[: self.points]:
            first = number[point] * self._nodes
            before = nx.predecessor(graph, point)
            distance = nx.single_source_shortest_path_length(graph, point)
            for node, nearer in before.items():
                if number[node] < self.points:
                    self.hops[number[point], number[node]] = distance[node]
                for near in nearer:
                    link = link_number[near, node]
                    steps.append(
                        (first + number[node], first + number[near], link, 1 / len(nearer))
                    )
        columns = [np.array(column) for column in zip(*sorted(steps), strict=True)] or [
            np.zeros(0, dtype=np.int64)
        ] * 4
        self._steps = columns[0], columns[1], columns[2], columns[3]

    @cached_property
    def _solver(self) -> tuple[SuperLU, csr_array]:
        """Two matrices that turn bytes by destination into bytes by link.

        What passes a state, x, is what is destined for it, b, and what passes the states behind it:
        (I - T) x = b. The second matrix sums x by link.
        """
        from scipy.sparse import csr_array, identity
        from scipy.sparse.linalg import splu

        behind, nearer, link, share = self._steps
        size = self.points * self._nodes
        handed_on = csr_array((share, (nearer, behind)), shape=(size, size))
        by_link = csr_array((share, (link, behind)), shape=(self.links, size))
        system = (identity(size, format="csc") - handed_on).tocsc()
        return splu(system, permc_spec="NATURAL"), by_link

    def bytes_by_link(
        self, source: np.ndarray, target: np.ndarray, nbytes: np.ndarray
    ) -> np.ndarray:
        """Bytes on each link of the fabric [copies * links], from messages between servers [B].

        Servers beyond the last are those of a copy of the cluster, whose links follow.
        """
        servers = self.at.size
        copy, copies = source // servers, int(source.max()) // servers + 1
        ends = self.at[source % servers] * self._nodes + self.at[target % servers]
        size = self.points * self._nodes
        by_destination = np.bincount(
            copy * size + ends, weights=nbytes, minlength=copies * size
        ).reshape(copies, size)
        solver, by_link = self._solver
        return np.asarray((by_link @ solver.solve(by_destination.T)).T.ravel())

    def passes(
        self, source: np.ndarray, target: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Which message between servers passes which link with which share of it: three [passes].

        All messages go back from their ends at once, a link at a time.
        """
        behind, nearer, link, share = self._steps
        message, part = np.arange(source.size), np.ones(source.size)
        state = self.at[source] * self._nodes + self.at[target]
        found = []
        while message.size:
            low = np.searchsorted(behind, state, "left")
            ways = np.searchsorted(behind, state, "right") - low
            step = np.repeat(low - np.cumsum(ways) + ways, ways) + np.arange(ways.sum())
            message = np.repeat(message, ways)
            part = np.repeat(part, ways) * share[step]
            state = nearer[step]
            found.append((message, link[step], part))
        messages, links, parts = (np.concatenate(column) for column in zip(*found, strict=True))
        return messages, links, parts


@lru_cache(maxsize=32)
def routes(fabric: Fabric, servers: int) -> Routes:
    """The ways through a fabric that joins so many servers."""
    return Routes(fabric, servers)
