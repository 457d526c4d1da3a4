"""The cost model: converts computation and transfers to seconds. No other place does.

Other rooms use `Cost`. It combines

    compute.py        `roofline`: a roofline model for each kind of work; `cores`: slowdown of CPU
                      ranks that share cores; GPUs are not shared
    ports.py          `ports`: which ports a message passes, by where its two ranks sit, and the
                      seconds for which a transfer occupies each
    all_reduce.py     `all_reduces`: their algorithms and transfers

Without contention a transfer takes its latency plus the seconds of its busiest port. No schedule
can be faster than the sum of all seconds of a port, and on a non-blocking fabric max-min fair flows
come within 0.5 % of that bound. The simulator shares ports between transfers that overlap."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gnnplan.planner.cluster.all_reduce import AllReduces
from gnnplan.planner.cluster.compute import Roofline, SharedCores
from gnnplan.planner.cluster.places import LINK_NAMES, Places
from gnnplan.planner.cluster.ports import MessagePorts, Transfer
from gnnplan.planner.cluster.spec import Cluster, LinkName
from gnnplan.planner.vocabulary.numbers import SPREAD, Number, slowest
from gnnplan.planner.vocabulary.outer import Outer, RankMatrix
from gnnplan.planner.vocabulary.schedule import (
    Compute,
    Copy,
    Exchange,
    HostWork,
    LocalWork,
    Ring,
    Sampling,
    Send,
)

__all__ = ["Cost", "Transfer", "slowest"]

# Rate at which a core packs a batch's edges into one buffer of page-locked memory [B/s]: on the
# host of an H200, 4.7 MB took 2.0 ms in addition to their copy (docs/gpu.md).
PACKING = 2.4e9
# Calls of numpy with which a sampler draws a layer or lays it out, of `Cost.call_s` each. From two
# sizes of batches of seven graphs on one core of an AMD EPYC, 2026-11-29.
CALLS: dict[HostWork, int] = {"draw": 18, "lay": 11}


class Cost:
    """The cost model of a cluster with placed ranks.

    Rank r sits on GPU `placement[r]`; GPUs are numbered over all servers. Without a placement,
    ranks fill the servers in order: rank r sits on GPU r. A `Number` is a float, or an array with
    one number per cluster or candidate.

    spread: standard deviation of the logarithm of a vertex degree.
    """

    def __init__(
        self, cluster: Cluster, placement: Sequence[int] = (), spread: float = SPREAD
    ) -> None:
        self.cluster, self.spread = cluster, spread
        self.placement = tuple(placement) or tuple(range(cluster.ranks))
        self.places = Places.of(cluster, self.placement)
        self.servers: tuple[int, ...] = tuple(self.places.server.tolist())  # the server per rank
        self.cores = SharedCores(cluster, self.places.server * (not cluster.one_machine))
        self.ports = MessagePorts(cluster, self.places, self.cores)
        self.all_reduces = AllReduces(self.ports, self.placement)
        bandwidth = self.ports.link("exchange", "intra_node").bandwidth
        self.roofline = Roofline(cluster.device, spread, bandwidth)
        self._all_reduce_transfers: dict[tuple[int, tuple[int, ...]], Transfer] = {}

    def link_name(self, a: int, b: int) -> LinkName:
        """Return the name of the link between ranks a and b."""
        return LINK_NAMES[int(self.places.links(np.array([a]), np.array([b]))[0])]

    @property
    def cores_each(self) -> float:
        """Cores per rank, on the server with the most ranks."""
        if self.cluster.cores is None:
            return 1.0 if self.cluster.device.kind == "cpu" else np.inf
        return self.cluster.cores / int(self.cores.ranks_by_machine.max())

    # -- computation

    @property
    def call_s(self) -> Number:
        """The duration of a call of the framework that launches no kernel on a GPU [s]."""
        cluster = self.cluster
        return cluster.device.launch if cluster.device.kind == "cpu" else cluster.host_call

    def seconds(self, work: LocalWork) -> Number:
        """Return the duration of a task without communication [s]."""
        match work:
            case Compute():
                return self.compute_s(work)
            case Copy(nbytes, packed, calls):
                return self.load_s(nbytes, packed, calls)
            case Sampling(what, edges, samplers, layers):
                return self.host_s(what, edges, samplers, layers)
        raise AssertionError(f"{work} has no price")

    def compute_s(self, work: Compute) -> Number:
        """Return the duration of a rank's work on a device, or a core, of its own [s]."""
        return self.roofline.compute_s(work)

    def load_s(self, nbytes: Number, packed: Number = 0.0, calls: int = 0) -> Number:
        """Return the duration of a copy from the server's memory to the device [s].

        `calls` of the framework come before it. A GPU copies over the host link, after a core has
        packed `packed` [B] of the bytes. A CPU rank without a host link reads every byte and writes
        it to uncached memory, which the write reads first: three accesses.
        """
        device, calls_s = self.cluster.device, calls * self.call_s
        if device.kind == "cpu" and self.cluster.host is None:
            return calls_s + device.launch + 3 * nbytes / device.memory_bandwidth
        link = self.cluster.host or self.cluster.intra_node
        copied_s = link.latency + link.stretched(nbytes) / link.bandwidth
        return calls_s + copied_s + packed / PACKING

    def host_s(self, work: HostWork, edges: Number, samplers: int = 1, layers: int = 0) -> Number:
        """Return the duration of a sampler's work for one rank on `edges` edges of `layers` [s].

        A layer takes `CALLS` of the framework, however few its edges. Each GPU rank has `samplers`
        samplers at work. The samplers share the cores of the server; if there are more cores than
        ranks, each rank keeps one core for itself. GPUs that sample have rates of their own
        (`device_rates`). `SharedCores` has the slowdown of CPU ranks.
        """
        if work in self.cluster.device_sampler_rates:
            return edges / self.cluster.device_sampler_rates[work]
        cores = max(self.cores_each - 1, min(self.cores_each, 1.0))
        shared = 1.0 if self.cores.count else max(1.0, samplers / cores)
        calls_s = layers * CALLS[work] * self.call_s
        return shared * (edges / self.cluster.host_rates[work] + calls_s)

    # -- transfers

    def send(self, rank: int, work: Send) -> Transfer:
        """Return the transfer of one message from `rank` to a peer."""
        source, target, nbytes = (np.array([value]) for value in (rank, work.peer, work.nbytes))
        latency, ports = self.ports.sends(source, target, nbytes)
        return Transfer(slowest(latency) if np.ndim(latency) > 1 else float(latency[0]), ports)

    def collective(self, work: Exchange | Ring, group: Sequence[int]) -> Transfer:
        """Return the transfer of a collective among the ranks of `group`."""
        if isinstance(work, Exchange):
            return self.exchange(work.items, group, itemsize=work.itemsize)
        return self.all_reduce(work.size, group)

    def exchange(
        self,
        sent: RankMatrix,
        group: Sequence[int] | None = None,
        messages: int = 1,
        itemsize: int = 1,
    ) -> Transfer:
        """Return the transfer of an irregular all-to-all among `group`, by default all ranks.

        The i-th rank of the group sends `sent[i, j]` items of `itemsize` bytes to the j-th rank.
        Each rank starts its messages one after the other. `messages` > 1 joins so many equal
        exchanges: the ports carry the bytes of all exchanges, the latency is that of one exchange.
        """
        return self.ports.exchange(sent, group, messages, itemsize)

    def all_reduce(self, size: int, group: Sequence[int]) -> Transfer:
        """Return the transfer of an all-reduce of `size` bytes among `group`."""
        key = size, tuple(group)
        if key not in self._all_reduce_transfers:
            has_peers = len(group) > 1
            transfer = self.all_reduces.transfer(*key) if has_peers else Transfer(0.0, {})
            self._all_reduce_transfers[key] = transfer
        return self._all_reduce_transfers[key]

    def bytes_by_link(
        self, sent: RankMatrix, group: Sequence[int] | None = None, itemsize: int = 1
    ) -> dict[LinkName, int]:
        """Return the bytes of an exchange per kind of link [B]; arguments as in `exchange`."""
        if sent.dtype.kind == "f":  # expected numbers of items; sums are truncated to whole bytes
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


def _within(sent: RankMatrix, place: np.ndarray) -> int:
    """Return the items of `sent` [ranks, ranks] between ranks with equal `place` [ranks]."""
    if isinstance(sent, Outer):
        return int(sent.within(place))
    return int(sent[np.equal.outer(place, place)].sum())
