"""Where ranks sit, and the ports that what they send keeps busy: what every cost needs of a cluster's topology, without its graph."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from gnnplan.planner.specs import Cluster, Fabric

if TYPE_CHECKING:
    from gnnplan.planner.topology import Routes

Port = tuple[str, int]  # ('gpu_out', rank), ('island_out', rank), ('switch_out', switch), ('nic_out', card), the same with 'in';
# ('bridge', server), ('fabric', link)


class Places(NamedTuple):
    """Of every rank: what it shares with others, numbered over the whole cluster. int [ranks], but for `uplinked`."""

    server: np.ndarray
    island: np.ndarray
    switch: np.ndarray
    card: np.ndarray
    uplinked: np.ndarray  # bool: its way to the card leaves the switch

    @classmethod
    def of(cls, cluster: Cluster, seats: Sequence[int]) -> Places:
        each = cluster.gpus_per_server
        server, gpu = np.divmod(np.asarray(seats, dtype=np.int64), each)

        def numbered(lists: Sequence[Sequence[int]]) -> np.ndarray:
            where = np.zeros(each, dtype=np.int64)
            for number, gpus in enumerate(lists):
                where[list(gpus)] = number
            return np.asarray(server * len(lists) + where[gpu])

        everyone = (tuple(range(each)),)
        cards, switches = cluster.nics or everyone, cluster.switches or everyone
        own = [any(set(card) <= set(switch) for switch in switches) for card in cards]
        card = numbered(cards)
        return cls(server, numbered(cluster.islands or tuple((g,) for g in range(each))), numbered(switches), card,
                   ~np.asarray(own)[card % len(cards)])  # fmt: skip


@lru_cache(maxsize=32)
def routes(fabric: Fabric, servers: int) -> Routes:
    """The ways through a fabric. Ranks and clusters without one start sooner: networkx takes a tenth of that."""
    from gnnplan.planner.topology import Routes

    return Routes(fabric, servers)
