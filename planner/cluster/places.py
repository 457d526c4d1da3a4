"""Which server, island, PCIe switch and NIC each rank uses, and the names of ports.

    GPU ── island (NVLink)
     ├──── PCIe switch ── host bridge of the server
     └──── NIC ── the server's leaf switch, its router in the ring, or one switch for all NICs

    leaf_spine   leaf ── spine ── leaf
    ring         server ── server ── server ── (the first)

fabric.py has the network between servers. Tests build this graph, and follow routes in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from gnnplan.planner.cluster.fabric import Node, links
from gnnplan.planner.cluster.spec import Cluster, LinkName

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
