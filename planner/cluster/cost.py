"""The only place where work becomes seconds: what a cluster takes for computation and transfers.

`Cost` is the object that other rooms ask. It puts together

    compute.py        a roofline for each kind of work
    transfer.py       a transfer: a latency, then ports that are busy for some seconds
    ports.py          which ports a message passes, by where its two ranks sit
    collectives.py    algorithms of an all-reduce; all_reduce.py: what they take on a cluster
    shared_cores.py   what ranks on a CPU lose to each other; a GPU is not shared

A transfer alone takes its latency plus its busiest port. No schedule can be faster than the sum of
what has to pass a port, and on a non-blocking fabric max-min fair flows come within 0.5 % of that
bound. The simulator shares ports between transfers that overlap."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

import numpy as np

from gnnplan.planner.cluster.all_reduce import AllReduces
from gnnplan.planner.cluster.compute import HOST_RATE, Roofline
from gnnplan.planner.cluster.places import Places, Port
from gnnplan.planner.cluster.ports import MessagePorts, PortLoads
from gnnplan.planner.cluster.shared_cores import SharedCores
from gnnplan.planner.cluster.spec import Cluster, Link, LinkName
from gnnplan.planner.cluster.transfer import Passes, PortSeconds, Transfer
from gnnplan.planner.vocabulary.numbers import SPREAD, Number, slowest
from gnnplan.planner.vocabulary.schedule import Collective, Compute, HostWork, Send

__all__ = ["HOST_RATE", "Cost", "Transfer", "slowest"]


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
        self._shared_cores: SharedCores | None = None  # each rank has a device of its own
        if cluster.cores is not None and cluster.device.kind == "cpu":
            machines = self.places.server // (cluster.servers if cluster.one_machine else 1)
            self._shared_cores = SharedCores(cluster, cluster.cores, machines)
        self._ports = MessagePorts(cluster, self.places, self._shared_cores)
        self._all_reduces = AllReduces(self._ports, self.placement)
        bandwidth = self.link("exchange", "intra_node").bandwidth
        self._roofline = Roofline(cluster.device, spread, bandwidth)
        self._all_reduce_transfers: dict[tuple[int, tuple[int, ...]], Transfer] = {}

    def link_name(self, a: int, b: int) -> LinkName:
        """The link between two ranks."""
        at = self.places
        if at.server[a] != at.server[b]:
            return "inter_node"
        return "island" if at.island[a] == at.island[b] else "intra_node"

    # -- computation

    def compute_s(self, work: Compute) -> Number:
        """Duration of a rank's work on a device, or a core, of its own [s]."""
        return self._roofline.compute_s(work)

    def memory_rate(self, tensor_bytes: Number) -> Number:
        """Rate of element-wise work on tensors of this size [B/s]."""
        return self._roofline.memory_rate(tensor_bytes)

    def gather_rate(self, width: int, source_bytes: Number = np.inf, reads: Number = 1.0) -> Number:
        """Rate of an aggregation [B of gathered rows/s]; see compute.py."""
        return self._roofline.gather_rate(width, source_bytes, reads)

    def load_s(self, nbytes: Number) -> Number:
        """Duration of a copy from the server's memory to the device [s].

        It goes over the host link. A CPU rank has no such link: it reads every byte and writes it
        to memory that is in no cache, and so is read first.
        """
        device = self.cluster.device
        if device.kind == "cpu" and self.cluster.host is None:
            return device.launch + 3 * nbytes / self.memory_rate(nbytes)
        link = self.cluster.host or self.cluster.intra_node
        return link.latency + link.stretched(nbytes) / link.bandwidth

    def host_s(self, work: HostWork, edges: Number, layers: int = 0) -> Number:
        """Duration of a sampler's work for one rank, on edges of so many layers [s]."""
        per_layer = self.cluster.host_latency.get(work, 0.0)
        return layers * per_layer + edges / self.cluster.host_rates.get(work, HOST_RATE)

    # -- transfers

    def link(self, op: str, where: LinkName | Literal["switch"]) -> Link:
        """The link there, as measured for this operation if it was."""
        return self._ports.link(op, where)

    def send(self, rank: int, work: Send) -> Transfer:
        """One message from `rank` to a peer."""
        source, target, nbytes = (np.array([value]) for value in (rank, work.peer, work.nbytes))
        latency, ports = self.sends(source, target, nbytes)
        return Transfer(slowest(latency) if np.ndim(latency) > 1 else float(latency[0]), ports)

    def sends(
        self, source: np.ndarray, target: np.ndarray, nbytes: np.ndarray
    ) -> tuple[np.ndarray, PortSeconds]:
        """Messages from ranks to peers at the same time, one of each rank [messages].

        The latency of each [.., messages] [s], and how long all of them keep ports busy [s].
        """
        latencies, ports = self._ports.messages("send", source, target, nbytes)
        if self._shared_cores:
            transfer = self._shared_cores.with_cold_caches(Transfer(0.0, ports), target)
            return latencies, transfer.ports
        return latencies, ports

    def collective(self, parts: Mapping[int, Collective]) -> Transfer:
        """One collective, from the part that each of its ranks has in it."""
        first = next(iter(parts.values()))
        if first.op == "all_reduce":
            return self.all_reduce(first.size, first.group)
        sent = np.zeros((len(self.placement),) * 2)
        for rank, part in parts.items():
            for peer, nbytes in part.sent:
                sent[rank, peer] = nbytes
        return self.exchange(sent)

    def exchange(
        self,
        sent: np.ndarray,
        group: Sequence[int] | None = None,
        messages: int = 1,
        itemsize: int = 1,
    ) -> Transfer:
        """An irregular all-to-all: `sent[i, j]` items from the i-th rank of `group` to its j-th.

        An item has `itemsize` bytes. Without a group all ranks take part. Each rank starts its
        messages one after the other. With `messages`, so many equal exchanges are one transfer: its
        ports carry the bytes of all, its latency is that of one.
        """
        transfer = self._ports.exchange(sent, group, messages, itemsize)
        if self._shared_cores and self._shared_cores.caches_go_cold:
            receivers = np.flatnonzero((sent > 0).any(axis=0))
            if group is not None:
                receivers = np.asarray(group)[receivers]
            return self._shared_cores.with_cold_caches(transfer, receivers, messages)
        return transfer

    def all_reduce(self, size: int, group: Sequence[int]) -> Transfer:
        """An all-reduce of `size` bytes among `group`."""
        key = size, tuple(group)
        if key not in self._all_reduce_transfers:
            transfer = Transfer(0.0, {})
            if len(group) > 1:
                transfer = self._all_reduces.transfer(*key)
                if self._shared_cores:
                    transfer = self._shared_cores.with_cold_caches(transfer, group)
            self._all_reduce_transfers[key] = transfer
        return self._all_reduce_transfers[key]

    def loads(
        self, op: str, source: np.ndarray, target: np.ndarray, nbytes: np.ndarray, messages: int = 1
    ) -> Iterator[PortLoads]:
        """What messages from rank to rank [messages] put on the ports, kind by kind."""
        return self._ports.loads(op, source, target, nbytes, messages)

    def passes(
        self, op: str, source: np.ndarray, target: np.ndarray, nbytes: np.ndarray
    ) -> tuple[list[Passes], dict[Port, float]]:
        """Which ports each message passes, and the bandwidth of those ports [B/s]."""
        return self._ports.passes(op, source, target, nbytes)

    def bytes_by_link(
        self, sent: np.ndarray, group: Sequence[int] | None = None, itemsize: int = 1
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

    def reduced_by_link(self, sent: int, group: Sequence[int]) -> dict[LinkName, int]:
        """Where the bytes of an all-reduce pass, `sent` over all hops [B]."""
        return self._all_reduces.bytes_by_link(sent, group)

    def reduced_between(self, sent: float, group: Sequence[int]) -> np.ndarray:
        """Bytes from rank to rank [ranks, ranks] of an all-reduce, `sent` over all hops [B]."""
        return self._all_reduces.between(sent, group)

    # -- ranks on a CPU, which share cores; shared_cores.py says how

    @property
    def cores(self) -> int | None:
        """Cores that the ranks of a machine share; None if they share none."""
        return self._shared_cores.cores if self._shared_cores else None

    @property
    def full_load_slowdown(self) -> float:
        """How many times as long a rank computes while all ranks compute."""
        return self._shared_cores.full_load_slowdown if self._shared_cores else 1.0

    def all_done_s(self, seconds: Number) -> Number:
        """When the last rank has computed, if all begin at once; alone [.., ranks] [s]."""
        return self._shared_cores.all_done_s(seconds) if self._shared_cores else slowest(seconds)

    def core_busy_s(self, seconds: Number) -> dict[str, np.ndarray]:
        """How long each machine's cores are busy while its ranks compute [.., ranks] [s]."""
        return {"cores": self._shared_cores.core_busy_s(seconds)} if self._shared_cores else {}

    def computing(self, rank: int, lane: str, seconds: float) -> dict[Port, float]:
        """Ports that a rank's computation shares with what overlaps it, and for how long [s]."""
        return self._shared_cores.computing(rank, lane, seconds) if self._shared_cores else {}


def _within(sent: np.ndarray, place: np.ndarray) -> int:
    """Items of `sent` [ranks, ranks] between ranks whose `place` [ranks] is the same."""
    order = np.argsort(place, kind="stable")
    if (np.diff(order) != 1).any():
        sent, place = sent[np.ix_(order, order)], place[order]
    first, members = np.unique(place, return_index=True, return_counts=True)[1:]
    total = 0
    for count in set(members.tolist()) - {1}:
        ranks = first[members == count][:, None] + np.arange(count)
        total += int(sent[ranks[:, :, None], ranks[:, None, :]].sum())
    return total
