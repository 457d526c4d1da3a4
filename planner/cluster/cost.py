"""The cost model: converts computation and transfers to seconds. No other place does.

Other rooms use `Cost`. It combines

    compute.py        `roofline`: a roofline model for each kind of work; `cores`: slowdown of CPU
                      ranks that share cores; GPUs are not shared
    ports.py          `ports`: which ports a message passes, by where its two ranks sit, and the
                      seconds for which a transfer occupies each
    AllReduces        `all_reduces`: their algorithms and transfers

Without contention a transfer takes its latency plus the seconds of its busiest port. No schedule
can be faster than the sum of all seconds of a port, and on a non-blocking fabric max-min fair flows
come within 0.5 % of that bound. The simulator shares ports between transfers that overlap."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import log
from typing import NamedTuple, get_args

import numpy as np

from gnnplan.planner.cluster.compute import Roofline, SharedCores
from gnnplan.planner.cluster.places import LINK_NAMES, Places
from gnnplan.planner.cluster.ports import MessageList, MessagePorts, Transfer, add, seconds_of
from gnnplan.planner.cluster.spec import Algorithm, Cluster, Link, LinkName
from gnnplan.planner.vocabulary.numbers import (
    SPREAD,
    Group,
    Number,
    Outer,
    PerRank,
    RankMatrix,
    largest,
    ranges,
    slowest,
    total,
)
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

# -- all-reduces -----------------------------------------------------------------------------------

# All-reduces: their algorithms, and the seconds for which their hops occupy ports (ports.py).
#
# An algorithm tells which rank sends how much of the buffer to which, in how many steps:
#
#     ring            Every rank sends 1/n of the buffer to the next rank, 2 (n-1) times. The ranks
#                     of a server follow each other.
#     hierarchical    A reduce-scatter in every server, a ring across servers for each rank's share,
#                     and an all-gather in every server.
#     tree            As hierarchical inside servers; between servers two binary trees, each with
#                     half of the buffer (NCCL since 2.4). Sums go up a tree, results come down. An
#                     inner node of one tree is a leaf of the other, so servers send as much as in a
#                     ring, but only log2(servers) messages wait for each other.
#
# All n ranks together send 2 (n-1) buffers. Chunks of the buffer are pipelined, so all links are
# busy at once. Hops visit servers one after the other, inside a server its islands, and inside an
# island its PCIe switches. Bytes between servers are spread over all NICs of the two servers, as in
# NCCL.


# -- algorithms ------------------------------------------------------------------------------------


class ReducePhase(NamedTuple):
    """Equal hops, each from rank `source[i]` to rank `target[i]`."""

    source: np.ndarray  # [hops]
    target: np.ndarray  # [hops]
    units: int  # units of the buffer (`AllReduce.unit`) that each hop sends
    messages: int  # messages in which a hop sends these units
    steps: int  # messages that wait for each other
    by_nic: bool = False  # each rank uses its own NIC, instead of all NICs of its server


class AllReduce(NamedTuple):
    """An all-reduce as phases, one after the other."""

    unit: float  # a unit, as a share of the buffer
    phases: tuple[ReducePhase, ...]


def all_reduce(algorithm: Algorithm, servers: Sequence[Sequence[int]]) -> AllReduce:
    """Return the phases of an all-reduce among the ranks of these servers.

    A server's ranks are in an order in which those of an island, and of a PCIe switch, follow each
    other. If servers have different numbers of ranks, the algorithm is a ring.
    """
    assert algorithm in get_args(Algorithm), algorithm
    if algorithm == "ring" or len({len(ranks) for ranks in servers}) > 1:
        order = np.concatenate([np.asarray(ranks) for ranks in servers])
        n = order.size
        phase = ReducePhase(order, np.roll(order, -1), 1, 2 * (n - 1), 2 * (n - 1))
        return AllReduce(2 * (n - 1) / n, (phase,) * (n > 1))
    at = np.asarray(servers)
    count, ranks = at.shape
    hops, rounds = 2 * (ranks - 1), 2 * (count - 1)
    inside = ReducePhase(
        at.ravel(), np.roll(at, -1, 1).ravel(), count * (ranks - 1), messages=hops, steps=hops
    )
    across = ReducePhase(
        at.ravel(), np.roll(at, -1, 0).ravel(), count - 1, rounds, rounds, by_nic=True
    )
    if algorithm == "tree":
        first, depth = at[:, 0], (count - 1).bit_length()
        across = ReducePhase(first, np.roll(first, -1), ranks * (count - 1), 2, 2 * depth)
    return AllReduce(2 / at.size, tuple(phase for phase in (inside, across) if phase.units))


# -- transfers -------------------------------------------------------------------------------------


class Flows(NamedTuple):
    """The messages of a phase's hops, from rank `source[i]` to rank `target[i]`."""

    source: np.ndarray  # [flows]
    target: np.ndarray  # [flows]
    share: np.ndarray  # share of a hop's bytes that the flow carries [flows]


class GroupPhase(NamedTuple):
    """A phase of an all-reduce in one group: its hops, flows, and loads on ports."""

    hops: ReducePhase
    flows: Flows
    kinds: list[tuple[str, Link]]  # each kind of port, and its link
    hop_s: Number  # latency of the links that a hop passes [s]
    # per kind: flow's share -> port -> bytes, per byte of a hop
    loads: list[dict[float, dict[str, np.ndarray]]]


@dataclass(frozen=True, eq=False)
class AllReduces:
    """All-reduces among groups of ranks; rank r sits on GPU `placement[r]`."""

    ports: MessagePorts
    placement: PerRank
    # -> a unit, as a share of the buffer, and the phases
    _known: dict[tuple[Algorithm, Group], tuple[float, list[GroupPhase]]] = field(
        default_factory=dict
    )

    def transfer(self, groups: Iterable[tuple[Group, int]]) -> Transfer:
        """Return the transfer of one all-reduce in each of the groups at once.

        groups: (ranks, size of the buffer [B]). The latency is that of all steps; the ports carry
        the bytes of all phases; on shared ports the bytes of groups add up. The algorithm is the
        cluster's. By default GPUs use a tree: NCCL chooses a ring or a tree, and here a tree is
        never slower. CPU ranks use a ring.
        """
        cluster = self.ports.cluster
        on_gpus = cluster.device.kind == "cuda"
        algorithm = cluster.all_reduce or ("tree" if on_gpus else "ring")
        latencies: list[Number] = []
        # (phase, kind of port, messages, bytes of a flow [B]) -> link, port -> bytes per byte
        together: dict[tuple[int, str, int, float], tuple[Link, dict[str, np.ndarray]]] = {}
        for group, size in groups:
            latency: Number = 0.0
            unit, phases = self.phases(algorithm, group)
            for number, (hops, _, kinds, hop_s, loads_by_kind) in enumerate(phases):
                nbytes = hops.units * unit * size
                for (kind, link), by_share in zip(kinds, loads_by_kind, strict=True):
                    for share, loads in by_share.items():
                        key = number, kind, hops.messages, share * nbytes
                        add(together.setdefault(key, (link, {}))[1], loads)
                latency = latency + hops.steps * hop_s
            latencies.append(latency)
        ports: dict[str, np.ndarray] = {}
        for (_, _, messages, nbytes), (link, loads) in together.items():
            sent = float(link.stretched(nbytes, messages))
            add(ports, seconds_of(loads, sent, link.bandwidth))
        return Transfer(largest(latencies), ports)

    def _in_group(self, phase: ReducePhase, users: np.ndarray) -> GroupPhase:
        """Return a phase with its flows; users: a rank on each NIC, server by server [NICs]."""
        source, target, share = flows = self._over_all_nics(phase, users)
        uses = list(self.ports.uses("all_reduce", MessageList(source, target)))
        hops = np.array([use.hops for use in uses]).reshape(len(uses), source.size)
        different = zip(np.unique(hops, axis=1), uses, strict=True)  # [different flows] of each
        return GroupPhase(
            phase,
            flows,
            [(use.kind, use.link) for use in uses],
            slowest(total(passes * use.link.latency for passes, use in different)),
            [{s: use.loads(1.0 * (share == s)) for s in np.unique(share)} for use in uses],
        )

    def phases(self, algorithm: Algorithm, group: Group) -> tuple[float, list[GroupPhase]]:
        """Return the unit (`AllReduce.unit`) and the phases of an all-reduce among `group`."""
        key = algorithm, group
        if key not in self._known:
            at, ranks = self.ports.places, np.array(group)
            island = at.island if self.ports.cluster.islands else np.zeros_like(at.island)
            gpus = np.asarray(self.placement)
            order = ranks[
                np.lexsort((gpus[ranks], at.switch[ranks], island[ranks], at.server[ranks]))
            ]
            by_server = np.split(order, np.flatnonzero(np.diff(at.server[order])) + 1)
            reduction = all_reduce(algorithm, [ranks.tolist() for ranks in by_server])
            first_of_nic = np.unique(at.nic[order], return_index=True)[1]
            users = order[np.sort(first_of_nic)]
            phases = [self._in_group(phase, users) for phase in reduction.phases]
            self._known[key] = reduction.unit, phases
        return self._known[key]

    def _over_all_nics(self, phase: ReducePhase, users: np.ndarray) -> Flows:
        """Return the flows of a phase, with hops between servers spread over all their NICs.

        NCCL has a channel per NIC. If each rank uses its own NIC (`by_nic`), a hop is one flow.
        """
        server, source, target = self.ports.places.server, phase.source, phase.target
        direct = (server[source] == server[target]) | phase.by_nic
        nics = np.bincount(server[users], minlength=int(server.max()) + 1)  # used by each server
        first, start, end = np.cumsum(nics) - nics, server[source[~direct]], server[target[~direct]]
        channels = nics[start] * nics[end]
        hop = np.repeat(np.arange(channels.size), channels)
        sender, receiver = np.divmod(ranges(np.zeros_like(channels), channels), nics[end[hop]])
        return Flows(
            np.append(source[direct], users[first[start[hop]] + sender]),
            np.append(target[direct], users[first[end[hop]] + receiver]),
            np.append(np.ones(int(direct.sum())), 1 / channels[hop]),
        )

    def between(self, sent: float, group: Sequence[int]) -> np.ndarray:
        """Return the bytes between ranks [ranks, ranks] of an all-reduce that sends `sent` [B]."""
        _, phases = self.phases(self.ports.cluster.all_reduce or "ring", tuple(group))
        out = np.zeros((len(self.placement),) * 2)
        for phase in phases:
            source, target, share = phase.flows
            np.add.at(out, (source, target), share * phase.hops.units)
        return np.asarray(out * (sent / max(out.sum(), 1.0)))

    def bytes_by_link(self, sent: int, group: Sequence[int]) -> dict[LinkName, int]:
        """Return the bytes per kind of link [B] of an all-reduce that sends `sent` bytes in total.

        They are integers that add up to `sent`. If the algorithm is not given, they are a ring's.
        """
        units = np.zeros(len(LINK_NAMES), dtype=np.int64)
        _, phases = self.phases(self.ports.cluster.all_reduce or "ring", tuple(group))
        for hops, *_ in phases:
            np.add.at(units, self.ports.places.links(hops.source, hops.target), hops.units)
        by_link = {where: n for where, n in zip(LINK_NAMES, units.tolist(), strict=True) if n}
        if not by_link:
            return {}
        *others, last = by_link
        shares = {where: sent * by_link[where] // sum(by_link.values()) for where in others}
        return {**shares, last: sent - sum(shares.values())}


# -- the cost model --------------------------------------------------------------------------------


__all__ = ["Cost", "Transfer", "slowest"]

# Rate at which a core packs a batch's edges into one buffer of page-locked memory [B/s]: on the
# host of an H200, 4.7 MB took 2.0 ms in addition to their copy (docs/gpu.md).
PACKING = 2.4e9
# Calls of numpy with which a sampler draws a layer or lays it out, of `Cost.call_s` each. From two
# sizes of batches of seven graphs on one core of an AMD EPYC, 2026-11-29.
CALLS: dict[HostWork, int] = {"draw": 18, "lay": 11}
# Vertices of the graphs that tell a sampler's `host_rates`, and their `host_slowdown`. Between them
# an edge takes longer with the logarithm of the vertices, and then no longer: the median draw and
# layout of random graphs of 0.02 to 20 million vertices on an AMD EPYC, 2026-11-30.
NEAR, FAR = 80_000, 2_000_000


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
        self.servers: PerRank = tuple(self.places.server.tolist())  # the server per rank
        self.cores = SharedCores(cluster, self.places.server * (not cluster.one_machine))
        self.ports = MessagePorts(cluster, self.places, self.cores)
        self.all_reduces = AllReduces(self.ports, self.placement)
        bandwidth = self.ports.link("exchange", "intra_node").bandwidth
        self.roofline = Roofline(cluster.device, spread, bandwidth, self.call_s)

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
            case Copy(nbytes, packed, calls, search, vertices, scattered):
                search_s = self.host_s("draw", search, vertices=vertices)
                return search_s + self.load_s(nbytes, packed, calls, scattered)
            case Sampling(what, edges, samplers, layers, vertices):
                return self.host_s(what, edges, samplers, layers, vertices)
        raise AssertionError(f"{work} has no price")

    def compute_s(self, work: Compute) -> Number:
        """Return the duration of a rank's work on a device, or a core, of its own [s]."""
        return self.roofline.compute_s(work)

    def load_s(
        self, nbytes: Number, packed: Number = 0.0, calls: int = 0, scattered: bool = False
    ) -> Number:
        """Return the duration of a copy from the server's memory to the device [s].

        `calls` of the framework come before it. A GPU copies over the host link, after a core has
        packed `packed` [B] of the bytes. A CPU rank without a host link reads every byte, of
        `scattered` rows at random places, and writes it to uncached memory, which the write reads
        first.
        """
        device, calls_s = self.cluster.device, calls * self.call_s
        if device.kind == "cpu" and self.cluster.host is None:
            bandwidth = device.memory_bandwidth
            read_s = nbytes / (self.roofline.random_rate if scattered else bandwidth)
            return calls_s + device.launch + read_s + 2 * nbytes / bandwidth
        link = self.cluster.host or self.cluster.intra_node
        copied_s: Number = link.latency + link.stretched(nbytes) / link.bandwidth
        return calls_s + copied_s + packed / PACKING

    def host_s(
        self,
        work: HostWork,
        edges: Number,
        samplers: int = 1,
        layers: int = 0,
        vertices: int = 0,
    ) -> Number:
        """Return the duration of a sampler's work for one rank on `edges` edges of `layers` [s].

        vertices: of the graph, of whose lists caches hold less the more there are.

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
        beyond = min(max(log(max(vertices, 1) / NEAR) / log(FAR / NEAR), 0.0), 1.0)
        edge_s: float = self.cluster.host_slowdown**beyond / self.cluster.host_rates[work]
        return shared * (edges * edge_s + calls_s)

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
        return self.all_reduces.transfer([(tuple(group), size)])

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
