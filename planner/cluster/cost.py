"""The only place where work becomes seconds: what a cluster takes for computation and transfers.

`Cost` is the object that other rooms ask. It puts together

    compute.py        a roofline for each kind of work
    transfer.py       a transfer: a latency, then ports that are busy for some seconds
    ports.py          which ports a message passes, by where its two ranks sit
    collectives.py    algorithms of an all-reduce; all_reduce.py: what they take on a cluster
    shared_cores.py   what ranks on a CPU lose to each other; a GPU is not shared

whose objects are its `roofline`, `ports`, `all_reduces` and `cores`.

A transfer alone takes its latency plus its busiest port. No schedule can be faster than the sum of
what has to pass a port, and on a non-blocking fabric max-min fair flows come within 0.5 % of that
bound. The simulator shares ports between transfers that overlap."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gnnplan.planner.cluster.all_reduce import AllReduces
from gnnplan.planner.cluster.compute import Roofline
from gnnplan.planner.cluster.places import LINK_NAMES, Places
from gnnplan.planner.cluster.ports import MessagePorts
from gnnplan.planner.cluster.shared_cores import SharedCores
from gnnplan.planner.cluster.spec import Cluster, LinkName
from gnnplan.planner.cluster.transfer import Transfer
from gnnplan.planner.vocabulary.numbers import SPREAD, Number, slowest
from gnnplan.planner.vocabulary.outer import Outer, Pairs
from gnnplan.planner.vocabulary.schedule import (
    Compute,
    Copy,
    Exchange,
    HostWork,
    Local,
    Ring,
    Sampling,
    Send,
)

__all__ = ["Cost", "Transfer", "slowest"]

# [B/s] at which a core puts a batch's edges into one piece of page-locked memory: on the host of an
# H200 4.7 MB took 2.0 ms besides their copy (docs/gpu.md).
PACKING = 2.4e9


class Cost:
    """A cluster's numbers, ready for hot loops.

    Rank r sits on GPU `placement[r]`; GPUs are numbered over all servers. Without a placement,
    ranks fill the servers in order: rank r sits on GPU r. Wherever a `Number` comes in or goes out,
    an array of candidates may stand for it.

    spread: standard deviation of the logarithm of a vertex degree.
    """

    def __init__(
        self, cluster: Cluster, placement: Sequence[int] = (), spread: float = SPREAD
    ) -> None:
        self.cluster, self.spread = cluster, spread
        self.placement = tuple(placement) or tuple(range(cluster.ranks))
        self.places = Places.of(cluster, self.placement)  # what each rank shares with others
        self.servers: tuple[int, ...] = tuple(self.places.server.tolist())  # of each rank
        self.cores = SharedCores(cluster, self.places.server * (not cluster.one_machine))
        self.ports = MessagePorts(cluster, self.places, self.cores)
        self.all_reduces = AllReduces(self.ports, self.placement)
        bandwidth = self.ports.link("exchange", "intra_node").bandwidth
        self.roofline = Roofline(cluster.device, spread, bandwidth)
        self._all_reduce_transfers: dict[tuple[int, tuple[int, ...]], Transfer] = {}

    def link_name(self, a: int, b: int) -> LinkName:
        """The link between two ranks."""
        return LINK_NAMES[int(self.places.links(np.array([a]), np.array([b]))[0])]

    @property
    def cores_each(self) -> float:
        """Cores of a server for each of its ranks, where it has most of them."""
        if self.cluster.cores is None:
            return 1.0 if self.cluster.device.kind == "cpu" else np.inf
        return self.cluster.cores / int(self.cores.ranks_by_machine.max())

    # -- computation

    def seconds(self, work: Local) -> Number:
        """Duration of what ranks do by themselves [s]."""
        match work:
            case Compute():
                return self.compute_s(work)
            case Copy(nbytes, packed):
                return self.load_s(nbytes, packed)
            case Sampling(what, edges, samplers):
                return self.host_s(what, edges, samplers)
        raise AssertionError(f"{work} has no price")

    def compute_s(self, work: Compute) -> Number:
        """Duration of a rank's work on a device, or a core, of its own [s]."""
        return self.roofline.compute_s(work)

    def load_s(self, nbytes: Number, packed: Number = 0.0) -> Number:
        """Duration of a copy from the server's memory to the device [s].

        It goes over the host link, and so many bytes of it are `packed` before. A CPU rank has no
        such link: it reads every byte and writes it to memory that is in no cache, and so is read
        first.
        """
        device = self.cluster.device
        if device.kind == "cpu" and self.cluster.host is None:
            return device.launch + 3 * nbytes / device.memory_bandwidth
        link = self.cluster.host or self.cluster.intra_node
        return link.latency + link.stretched(nbytes) / link.bandwidth + packed / PACKING

    def host_s(self, work: HostWork, edges: Number, samplers: int = 1) -> Number:
        """Duration of a sampler's work for one rank, on so many edges [s].

        Each rank on a GPU has so many samplers at work. They share its server's cores, less one for
        each rank where there are more, unless GPUs that sample have rates of their own. What ranks
        on a CPU share is told apart.
        """
        if work in self.cluster.rates_there:
            return edges / self.cluster.rates_there[work]
        cores = max(self.cores_each - 1, min(self.cores_each, 1.0))
        shared = 1.0 if self.cores.count else max(1.0, samplers / cores)
        return shared * edges / self.cluster.host_rates[work]

    # -- transfers

    def send(self, rank: int, work: Send) -> Transfer:
        """One message from `rank` to a peer."""
        source, target, nbytes = (np.array([value]) for value in (rank, work.peer, work.nbytes))
        latency, ports = self.ports.sends(source, target, nbytes)
        return Transfer(slowest(latency) if np.ndim(latency) > 1 else float(latency[0]), ports)

    def collective(self, work: Exchange | Ring, group: Sequence[int]) -> Transfer:
        """A collective of a group."""
        if isinstance(work, Exchange):
            return self.exchange(work.items, group, itemsize=work.itemsize)
        return self.all_reduce(work.size, group)

    def exchange(
        self,
        sent: Pairs,
        group: Sequence[int] | None = None,
        messages: int = 1,
        itemsize: int = 1,
    ) -> Transfer:
        """An irregular all-to-all: `sent[i, j]` items from the i-th rank of `group` to its j-th.

        An item has `itemsize` bytes. Without a group all ranks take part. Each rank starts its
        messages one after the other. With `messages`, so many equal exchanges are one transfer: its
        ports carry the bytes of all, its latency is that of one.
        """
        return self.ports.exchange(sent, group, messages, itemsize)

    def all_reduce(self, size: int, group: Sequence[int]) -> Transfer:
        """An all-reduce of `size` bytes among `group`."""
        key = size, tuple(group)
        if key not in self._all_reduce_transfers:
            several = len(group) > 1
            taken = self.all_reduces.transfer(*key) if several else Transfer(0.0, {})
            self._all_reduce_transfers[key] = taken
        return self._all_reduce_transfers[key]

    def bytes_by_link(
        self, sent: Pairs, group: Sequence[int] | None = None, itemsize: int = 1
    ) -> dict[LinkName, int]:
        """Where the bytes of an exchange pass; arguments as in `exchange` [B]."""
        if sent.dtype.kind == "f":  # expected items, whose sums are cut to whole bytes
            sent, itemsize = sent * itemsize, 1
        members = slice(None) if group is None else list(group)
        in_islands = _within(sent, self.places.island[members])
        in_servers = _within(sent, self.places.server[members])
        items = int(sent.sum())
        shares: dict[LinkName, int] = {
            "island": in_islands * itemsize,
            "intra_node": (in_servers - in_islands) * itemsize,
            "inter_node": (items - in_servers) * itemsize,
        }
        return {where: nbytes for where, nbytes in shares.items() if nbytes}


def _within(sent: Pairs, place: np.ndarray) -> int:
    """Items of `sent` [ranks, ranks] between ranks whose `place` [ranks] is the same."""
    if isinstance(sent, Outer):
        return int(sent.within(place))
    return int(sent[np.equal.outer(place, place)].sum())
