"""The only place where work becomes seconds: roofline for compute, alpha-beta over ports for transfers.

A transfer keeps *ports* busy. Which ones follows from where two GPUs sit:

    same island         the island's link, out of one GPU and into the other (NVLink)
    same server         the GPU's way out and in (PCIe), and the uplinks of their switches where these differ
    different servers   the network cards out and in, the uplink of a switch that does not have the card to itself, and the links of
                        the fabric on the way (topology.py)
    no peer access      all but islands: both GPUs' ways to their server's memory, and the bridge that they share
    ranks on a CPU      the cores of the machines at both ends too, which copy

Alone a transfer takes its latency plus its busiest port: no schedule can be faster than the sum of what has to pass a port,
and on a non-blocking fabric max-min fair flows come within 0.5 % of that bound. The simulator shares ports between transfers that
overlap. Ranks on a CPU share its cores as transfers share ports: with k at work on c cores each has min(1, c / k) of one, and where they
take turns each of them computes `crowding` times as long, and who has waited for a message `refill` seconds more. All-reduces visit
servers one after the other, in them islands, in them switches (collectives.py); where servers have several cards each has its share (as
NCCL does it).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, reduce
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import numpy as np
from scipy.special import ndtr, ndtri

from gnnplan.planner.collectives import Algorithm, AllReduce, Phase, all_reduce
from gnnplan.planner.graph import SPREAD
from gnnplan.planner.places import Places, Port, routes
from gnnplan.planner.schedule import WEIGHED, WORKED, Collective, Compute, Send
from gnnplan.planner.specs import Cluster, Fabric, HostWork, Link, Placement

Flows = tuple[np.ndarray, np.ndarray, np.ndarray]  # from rank, to rank, share of the hop's bytes
TILE = 128  # [B] of a row that an aggregation on a GPU takes at once, of all rows before the next: a warp's line (GE-SpMM, SC 2020)
COPIED = 1e9  # [B/s] that cores are said to copy at, each byte as many times as it takes (any number would do)
LEAST_WORK = 1e-13  # [s] of a core for a byte, where only messages were said to take some
HOST_RATE = 5e7  # [edges/s] of a sampler that nobody has measured: one core of an AMD EPYC (2026) draws 50 M, lays out 63 M
PICKED = 3.0  # times as long as bytes that are touched one after the other take, on a core, those of rows picked here and there
Number = Any  # float or numpy array: closed forms are evaluated over many candidates at once


class Transfer(NamedTuple):
    """`latency` [s], then every port is busy for its seconds when alone."""

    latency: Number
    busy: Mapping[Port, Number]

    @property
    def alone(self) -> Number:
        """Duration without contention [s]."""
        values = list(self.busy.values())
        several = np.ndarray in set(map(type, values))
        return self.latency + (reduce(np.maximum, values) if several else max(values, default=0.0))

    def load(self, ports: dict[Port, Number], times: int = 1) -> None:
        """Add what it keeps busy, so many times [s]."""
        for port, seconds in self.busy.items():
            ports[port] = ports.get(port, 0.0) + seconds * times


Passes = tuple[str, np.ndarray, np.ndarray, np.ndarray]  # port, messages that pass it, its numbers there, the share of their bytes


class Way(NamedTuple):
    """How messages keep ports of one kind busy."""

    kind: str
    link: Link
    hops: np.ndarray  # of these ports' links, that each message passes; 0: none [messages]
    passes: Callable[[], list[Passes]]
    summed: Callable[[np.ndarray], dict[str, np.ndarray]] | None = None  # faster than by passes: bytes -> port -> bytes by number

    def loads(self, nbytes: np.ndarray) -> dict[str, np.ndarray]:
        """Bytes of each message -> port -> bytes by its number."""
        if self.summed:
            return self.summed(nbytes)
        return {port: np.bincount(numbers, nbytes[messages] * shares) for port, messages, numbers, shares in self.passes()}


@dataclass(frozen=True)
class Cost:
    """A cluster's numbers, ready for hot loops. `seats[r]`: the GPU of rank r, counted over all servers."""

    cluster: Cluster
    seats: tuple[int, ...]
    spread: float = SPREAD  # of the graph's degrees

    @classmethod
    def of(cls, cluster: Cluster, seats: Sequence[int] = (), spread: float = SPREAD) -> Cost:
        """Without seats, ranks fill the servers in order: rank r sits on GPU r, server r // gpus_per_server."""
        return cls(cluster, tuple(seats) or tuple(range(cluster.ranks)), spread)

    @cached_property
    def places(self) -> Places:
        return Places.of(self.cluster, self.seats)

    @cached_property
    def servers(self) -> tuple[int, ...]:
        """The server of each rank."""
        return tuple(self.places.server.tolist())

    # -- cores -----------------------------------------------------------------------------------------------------

    @cached_property
    def machines(self) -> np.ndarray:
        """Of each rank, by number."""
        return self.places.server // (self.cluster.servers if self.cluster.one_machine else 1)

    @property
    def cores(self) -> int | None:
        """That the ranks of a machine share; None: they share none."""
        return self.cluster.cores if self.cluster.device.kind == "cpu" else None

    @cached_property
    def crowd(self) -> float:
        """How many times as long ranks compute, all at once."""
        return max(1.0, float(self._living.max()) * self._share) if self.cores else 1.0

    @cached_property
    def _share(self) -> float:
        """Of its machine's cores, that a rank keeps busy: more than one where they take turns, for its caches are then another's."""
        assert self.cores
        return (self.cluster.crowding if self._living.max() > self.cores else 1.0) / self.cores

    def together(self, seconds: Number) -> Number:
        """Ranks begin at once, each with so many seconds of a core or device to compute [.., ranks] -> when the last has ended [s]. Of
        those on a machine's c cores, k that are left have min(1, c / k) of a core each."""
        if self.cores is None or self.crowd == 1.0:
            return slowest(seconds)
        out: Number = 0.0
        each = np.broadcast_to(seconds, (*np.shape(seconds)[:-1], len(self.seats)))
        for machine in set(self.machines.tolist()):
            mine = np.sort(each[..., self.machines == machine], axis=-1)
            steps = np.diff(mine, axis=-1, prepend=0.0) * np.maximum(1.0, np.arange(mine.shape[-1], 0, -1) * self._share)
            out = np.maximum(out, steps.sum(-1, keepdims=np.ndim(seconds) > 1))
        return out

    def met(self, seconds: Number, crowd: Number, span: Number, copied: Number = 0.0) -> Number:
        """How many times as long a rank computes that meets others at work on its machine's cores, each for `seconds` [.., ranks] of a
        `span`, `crowd` times as long as alone, and messages, which are `copied` for so long: as they are spread over it at random, the
        mean number that share (mean value analysis)."""
        if not self.cores:
            return 1.0
        here = self.machines == int(np.argmax(self._living))
        mine = np.broadcast_to(seconds, (*np.shape(seconds)[:-1], len(self.seats)))[..., here]
        others = mine.sum(-1, keepdims=np.ndim(seconds) > 1) * (1 - 1 / mine.shape[-1])
        return np.maximum(1.0, (1.0 + (others * crowd + copied) / span) * self._share)

    def copied(self, ports: Mapping[Port, Number]) -> Number:
        """Seconds of a core that the messages which keep these ports busy take, of the machine that they take most of."""
        return reduce(np.maximum, (seconds for (kind, _), seconds in ports.items() if kind == "cores"), 0.0) * (self.cores or 0)

    def paces(self, transfer: Transfer) -> tuple[Number, Number]:
        """Rates of a transfer and of what all ranks of a machine compute beside it, each as a share of its rate alone. Every rank has a
        thread for either: who wants less than its share of the cores leaves the rest to others."""
        copying = reduce(np.maximum, (seconds for (kind, _), seconds in transfer.busy.items() if kind == "cores"), 0.0)
        if not self.cores or not np.any(copying):
            return 1.0, 1.0
        wanted = copying / np.maximum(transfer.alone - transfer.latency, 1e-30)
        computing = min(1.0, float(self._living.max()) * self._share)
        copied = np.minimum(wanted, max(0.5, 1.0 - computing))
        return copied / np.maximum(wanted, 1e-30), np.minimum(1.0, (1.0 - copied) / computing)

    def filled(self, seconds: Number) -> dict[Port, Number]:
        """Seconds that each machine's cores are busy while its ranks compute so long [.., ranks]."""
        if not self.cores:
            return {}
        shares, keep = np.broadcast_to(seconds, (*np.shape(seconds)[:-1], len(self.seats))) * self._share, np.ndim(seconds) > 1
        return {("cores", machine): shares[..., self.machines == machine].sum(-1, keepdims=keep) for machine in set(self.machines.tolist())}

    def _refilled(self, transfer: Transfer, waited: Sequence[int] | np.ndarray, times: int = 1) -> Transfer:
        """With what ranks that waited for it, so many times, then compute longer: others had their cores, and have filled the caches."""
        if not self.cores or not self.cluster.refill:
            return transfer
        busy = dict(transfer.busy)
        for machine, ranks in Counter(self.machines[np.unique(waited)].tolist()).items():
            if self._living[machine] > self.cores:
                busy["cores", machine] = busy.get(("cores", machine), 0.0) + times * ranks * self.cluster.refill / self.cores
        return transfer._replace(busy=busy)

    @cached_property
    def _living(self) -> np.ndarray:
        """Ranks of each machine."""
        return np.bincount(self.machines)

    def computing(self, rank: int, lane: str, seconds: float) -> Transfer | None:
        """Work of a rank's lane as what it keeps busy beside others; None: nothing that others use."""
        if not self.cores:
            return None
        return Transfer(0.0, {(f"lane {lane}", rank): seconds, ("cores", int(self.machines[rank])): seconds * self._share})

    # -- compute ---------------------------------------------------------------------------------------------------

    def compute_s(self, work: Compute) -> Number:
        """Roofline by kind of work, plus a fixed price per framework operation [s], of a rank that shares its core with none."""
        device, bandwidth = self.cluster.device, self.memory_rate(work.tensor)
        computing, reading = work.flops / device.gemm, work.streamed / bandwidth
        # a GPU has other warps that compute while some wait for memory (few columns: memory decides), a core does one after the other
        seconds = np.maximum(computing, reading) if device.kind == "cuda" else computing + reading
        seconds = seconds + work.touched / bandwidth + work.launches * device.launch
        seconds = seconds + work.worked / (device.hash_rate or device.memory_bandwidth / (WORKED * work.itemsize))
        seconds = seconds + work.weighed / (device.edge_rate or device.memory_bandwidth / (WEIGHED * work.itemsize))
        for rows, width, among, into in work.gathers:
            bytes_each, among = width * work.itemsize, np.maximum(among, 1.0)
            seconds = seconds + rows * bytes_each / self.gather_rate(width, among * self._at_once(bytes_each), rows / among)
            seconds = seconds + into * (device.row_latency + bytes_each / (device.row_bandwidth or np.inf))
        for rows, width, among in work.picked:  # a GPU has many on their way at once
            each = width * work.itemsize
            seconds = seconds + rows * each * (1 / bandwidth if device.kind == "cuda" else PICKED / self.memory_rate(among * each))
        return seconds + work.beside * device.overlap_tax / self.link("exchange", "intra_node").bandwidth

    def load_s(self, nbytes: Number) -> Number:
        """From the server's memory to the device, over the host link [s]."""
        link = self.cluster.host or self.cluster.intra_node
        return link.latency + link.stretched(nbytes) / link.bandwidth

    def host_s(self, what: HostWork, edges: Number) -> Number:
        """A sampler's work for one rank [s]."""
        return edges / self.cluster.host_rates.get(what, HOST_RATE)

    def memory_rate(self, tensor: Number) -> Number:
        """Of element-wise work on tensors of such a size [B/s]: small ones are still in a cache when the next operation reads them.
        Log-log between the sizes that were measured, flat outside."""
        if self._touched is None or (np.ndim(tensor) == 0 and not tensor):
            return self.cluster.device.memory_bandwidth
        return np.exp(np.interp(np.log(np.maximum(tensor, 1.0)), *self._touched))

    def gather_rate(self, width: int, among: Number = np.inf, times: Number = 1.0) -> Number:
        """Aggregation rate at a row width [B of gathered rows/s], of rows of `among` bytes in all, each read so many `times`. Log-log
        between the sizes and widths that were measured, flat outside.

        Where nobody measured it, a roofline of memory and cache, which keeps the rows that are read most. Rows are read by degree, and
        degrees are lognormal with this spread s: the share c that the cache holds is read in

            share(c) = Phi(s + Phi^-1(c))        (the Lorenz curve of a lognormal; c = 1: everything)

        of all readings; the rest, and every row the first time, comes from memory.
        """
        device = self.cluster.device
        if self._gathered:
            widths, curves = self._gathered
            place = float(np.interp(np.log(max(width, 1)), widths, np.arange(len(widths))))
            below, beyond = int(place), place % 1
            logs = [(share, np.interp(np.log(among), *curves[at])) for at, share in ((below, 1 - beyond), (below + 1, beyond)) if share]
            return np.exp(sum(share * rate for share, rate in logs))
        if device.cache:
            held = np.clip(device.cache / among, 1e-12, 1.0)
            missed = np.clip(np.maximum(1.0 - ndtr(self.spread + ndtri(held)), 1.0 / np.maximum(times, 1.0)), 0.0, 1.0)
            return 1.0 / np.maximum(missed / device.memory_bandwidth, 1.0 / (device.cache_bandwidth or 3 * device.memory_bandwidth))
        return device.memory_bandwidth / 2

    def _at_once(self, row: int) -> int:
        """Bytes of a row that are read before the next one's."""
        return row if self._gathered else min(row, TILE)

    @cached_property
    def _touched(self) -> tuple[np.ndarray, np.ndarray] | None:
        return _curve(self.cluster.device.memory_rates) if self.cluster.device.memory_rates else None

    @cached_property
    def _gathered(self) -> tuple[np.ndarray, list[tuple[np.ndarray, np.ndarray]]] | None:
        """What was measured of aggregation, in logarithms: widths, and of each sizes and rates."""
        points = self.cluster.device.gather
        return (np.log(sorted(points)), [_curve(points[width]) for width in sorted(points)]) if points else None

    # -- transfers -------------------------------------------------------------------------------------------------

    def link(self, op: str, where: Placement | Literal["switch"]) -> Link:
        """As measured for this operation there, else the link itself."""
        plain: Link | None = getattr(self.cluster, where)
        if where == "intra_node" and not self.cluster.peer_access:
            host = self.cluster.host or self.cluster.intra_node
            plain = host.model_copy(update={"latency": 2 * host.latency})  # up and down
        assert plain is not None  # specs: what has a place has a link
        return self.cluster.collectives.get(f"{op}.{where}", plain)

    def placement(self, a: int, b: int) -> Placement:
        at = self.places
        if at.server[a] != at.server[b]:
            return "inter_node"
        return "island" if at.island[a] == at.island[b] else "intra_node"

    def send(self, rank: int, work: Send) -> Transfer:
        alone = self._pairwise("send", np.array([rank]), np.array([work.peer]), np.array([work.nbytes]))
        return self._refilled(alone, [work.peer])

    def collective(self, parts: Mapping[int, Collective]) -> Transfer:
        """`parts`: every member's own share of one collective."""
        first = next(iter(parts.values()))
        if first.op == "all_reduce":
            return self.all_reduce(first.size, first.group)
        sent = np.zeros((len(self.seats),) * 2)
        for rank, part in parts.items():
            for peer, nbytes in part.sent:
                sent[rank, peer] = nbytes
        return self.exchange(sent)

    def exchange(self, sent: np.ndarray, group: Sequence[int] | None = None, messages: int = 1) -> Transfer:
        """Pairwise irregular all-to-all among `group` (all ranks), `sent[i, j]` bytes from its i-th to its j-th; each rank starts its
        messages one after the other. Or so many such exchanges alike in one, whose ports are all that is asked. Where all messages are
        equal, as those of graphs known by statistics are, who talks to whom is counted once."""
        talk, most = sent > 0, sent.max(initial=0)
        even = (sent == talk * most).all()
        key = talk.tobytes(), None if group is None else tuple(group)
        if not even or key not in self._even:
            source, target = np.nonzero(talk)
            nbytes = sent[source, target]
            if group is not None:
                source, target = np.asarray(group)[source], np.asarray(group)[target]
            if not even:
                return self._refilled(self._pairwise("exchange", source, target, nbytes, messages), target, messages)
            ways, one = self._ways("exchange", source, target), np.ones(source.size)
            self._even[key] = target, [(way.link, float(np.bincount(source, weights=way.hops).max()), way.loads(one)) for way in ways]
        latency: Number = 0.0
        busy: dict[Port, Number] = {}
        target, kinds = self._even[key]
        for link, starts, counts in kinds:
            latency = latency + starts * link.latency
            _add(busy, counts, float(link.stretched(float(most), messages)), link.bandwidth)
        return self._refilled(Transfer(latency, busy), target, messages)

    @cached_property
    def _even(self) -> dict[tuple[bytes, tuple[int, ...] | None], tuple[np.ndarray, list[tuple[Link, float, dict[str, np.ndarray]]]]]:
        """Who talks to whom -> the ranks that messages go to; and by kind of port its link, the most messages that a rank starts, and how
        many pass each port."""
        return {}

    def all_reduce(self, size: int, group: Sequence[int]) -> Transfer:
        """By the cluster's algorithm. NCCL takes what is faster, a ring or a tree: then ports carry the ring's bytes, whichever it is."""
        key = size, tuple(group)
        if key not in self._summed:
            self._summed[key] = self._refilled(self._all_reduced(*key), group) if len(group) > 1 else Transfer(0.0, {})
        return self._summed[key]

    def _all_reduced(self, size: int, group: tuple[int, ...]) -> Transfer:
        told, ring = self.cluster.all_reduce, self._reduced("ring", size, group)
        if told or self.cluster.device.kind == "cpu":
            return ring if told in (None, "ring") else self._reduced(told, size, group)
        tree = self._reduced("tree", size, group).alone
        return Transfer(np.minimum(ring.latency, np.maximum(tree - (ring.alone - ring.latency), 0.0)), ring.busy)

    @cached_property
    def _summed(self) -> dict[tuple[int, tuple[int, ...]], Transfer]:
        return {}

    def _reduced(self, algorithm: Algorithm, size: int, group: Sequence[int]) -> Transfer:
        """One after the other its steps, and what passes each port in all of them."""
        summed, flows = self._flows(algorithm, tuple(group))
        latency: Number = 0.0
        busy: dict[Port, Number] = {}
        for phase, (source, target, share) in zip(summed.phases, flows, strict=True):
            nbytes, longest = share * (phase.units * summed.unit * size), np.zeros(source.size)
            for way in self._ways("all_reduce", source, target):
                longest = longest + way.hops * way.link.latency
                for port, load in way.loads(way.link.stretched(nbytes, phase.messages)).items():
                    for i in np.flatnonzero(load).tolist():
                        busy[port, i] = busy.get((port, i), 0.0) + load[i] / way.link.bandwidth
            latency = latency + phase.steps * np.max(longest, axis=-1, initial=0.0, keepdims=np.ndim(longest) > 1)
        return Transfer(latency, busy)

    @cached_property
    def _known(self) -> dict[tuple[Algorithm, tuple[int, ...]], tuple[AllReduce, list[Flows]]]:
        return {}

    def _flows(self, algorithm: Algorithm, group: tuple[int, ...]) -> tuple[AllReduce, list[Flows]]:
        """Hops server by server, in them island by island and switch by switch; and of each phase what passes which cards."""
        if (algorithm, group) not in self._known:
            at, ranks = self.places, np.array(group)
            island = at.island if self.cluster.islands else np.zeros_like(at.island)
            order = ranks[np.lexsort((np.asarray(self.seats)[ranks], at.switch[ranks], island[ranks], at.server[ranks]))]
            by_server = np.split(order, np.flatnonzero(np.diff(at.server[order])) + 1)
            summed = all_reduce(algorithm, [some.tolist() for some in by_server])
            doors: dict[int, dict[int, int]] = {}  # server -> card -> the rank that uses it
            for rank in order.tolist():
                doors.setdefault(int(at.server[rank]), {}).setdefault(int(at.card[rank]), rank)
            self._known[algorithm, group] = summed, [self._by_doors(phase, doors) for phase in summed.phases]
        return self._known[algorithm, group]

    def _by_doors(self, phase: Phase, doors: Mapping[int, Mapping[int, int]]) -> Flows:
        """What leaves a server does so by all cards that its ranks have, equally (NCCL has a channel for each)."""
        servers, source, target, alone = self.places.server, phase.source, phase.target, np.ones(phase.source.size)
        within = (servers[source] == servers[target]) | phase.by_card
        apart = [(a, b, 1 / (len(doors[s]) * len(doors[t])))
                 for s, t in zip(servers[source[~within]].tolist(), servers[target[~within]].tolist(), strict=True)
                 for a in doors[s].values() for b in doors[t].values()]  # fmt: skip
        outs, ins, shares = np.array(apart).reshape(-1, 3).T
        return (np.append(source[within], outs.astype(np.int64)), np.append(target[within], ins.astype(np.int64)),
                np.append(alone[within], shares))  # fmt: skip

    def _pairwise(self, op: str, source: np.ndarray, target: np.ndarray, nbytes: np.ndarray, messages: int = 1) -> Transfer:
        latency: Number = 0.0
        busy: dict[Port, Number] = {}
        for _, link, starts, loads in self.loads(op, source, target, nbytes, messages):
            latency = latency + float(starts.max()) * link.latency
            _add(busy, loads, 1.0, link.bandwidth)
        return Transfer(latency, busy)

    def loads(self, op: str, source: np.ndarray, target: np.ndarray, nbytes: np.ndarray, messages: int = 1
              ) -> Iterator[tuple[str, Link, np.ndarray, dict[str, np.ndarray]]]:  # fmt: skip
        """By kind of port in use: its name, its link, the messages that each rank starts over it (times the links that they pass),
        bytes per port. Each pair's bytes go in so many messages."""
        for way in self._ways(op, source, target):
            yield way.kind, way.link, np.bincount(source, weights=way.hops), way.loads(way.link.stretched(nbytes, messages))

    def passes(self, op: str, source: np.ndarray, target: np.ndarray, nbytes: np.ndarray) -> tuple[list[Passes], dict[Port, float]]:
        """Which ports each message passes, with how much of it; and the bandwidth of those ports [B/s]."""
        passes: list[Passes] = []
        bandwidth: dict[Port, float] = {}
        for way in self._ways(op, source, target):
            longer = way.link.stretched(nbytes) / nbytes
            for port, messages, numbers, shares in way.passes():
                passes.append((port, messages, numbers, longer[messages] * shares))
                bandwidth.update(dict.fromkeys([(port, i) for i in np.unique(numbers).tolist()], float(way.link.bandwidth)))
        return passes, bandwidth

    def _ways(self, op: str, source: np.ndarray, target: np.ndarray) -> Iterator[Way]:
        """The kinds of port that messages from rank to rank [messages] pass."""
        at, cluster, ranks = self.places, self.cluster, np.arange(len(self.seats))
        within = at.server[source] == at.server[target]
        near = at.island[source] == at.island[target]
        inside, apart = within & ~near, ~within
        climbing = inside & (at.switch[source] != at.switch[target])
        moved, up, down = inside, climbing | apart & at.uplinked[source], climbing | apart & at.uplinked[target]
        if not cluster.peer_access:  # through memory: up the sender's host link, down the receiver's or out by a card
            moved = inside | apart
            up = down = moved if cluster.switches else np.zeros_like(moved)

        def way(kind: str, place: Placement | Literal["switch"], out: np.ndarray, into: np.ndarray, numbers: np.ndarray) -> Iterator[Way]:
            used = out | into
            if used.any():
                ends = ((f"{kind}_out", source, np.flatnonzero(out)), (f"{kind}_in", target, np.flatnonzero(into)))
                yield Way(kind, self.link(op, place), used,
                          lambda: [(port, those, numbers[end[those]], np.ones(1)) for port, end, those in ends])  # fmt: skip

        yield from way("island", "island", near, near, ranks)
        yield from way("gpu", "intra_node", moved, moved, ranks)
        yield from way("switch", "switch", up, down, at.switch)
        if cluster.bridge and moved.any():  # a server's memory has each byte written and read, the receiver's server's too
            ends = np.append(at.server[source[moved]], at.server[target[apart]])
            those = np.append(np.flatnonzero(moved), np.flatnonzero(apart))
            yield Way("bridge", cluster.bridge, moved, lambda: [("bridge", those, ends, np.full(1, 2.0))])
        yield from way("nic", "inter_node", apart, apart, at.card)
        if self.cores:  # of both ends
            places: tuple[tuple[Placement, np.ndarray], ...] = ("intra_node", ~apart), ("inter_node", apart)
            for place, copied in places:
                if copied.any() and ((link := self.link(op, place)).work or link.wake):
                    yield self._copies(link, source, target, np.flatnonzero(copied))
        if cluster.fabric and apart.any():
            ways, start, end = routes(cluster.fabric, cluster.servers), at.server[source], at.server[target]
            hops = np.where(apart, ways.hops[ways.at[start % cluster.servers], ways.at[end % cluster.servers]], 0)
            if hops.any():
                yield Way("fabric", self._between(op, cluster.fabric), hops, lambda: [("fabric", *ways.passes(start, end))],
                          lambda nbytes: {"fabric": ways.bytes_by_link(start[apart], end[apart], nbytes[apart])})  # fmt: skip

    def _copies(self, link: Link, source: np.ndarray, target: np.ndarray, copied: np.ndarray) -> Way:
        """What these messages ask of the cores at both ends."""
        assert self.cores
        ends, work = self.machines[np.append(source[copied], target[copied])], max(link.work, LEAST_WORK)
        those, halves = np.tile(copied, 2), np.full(2 * copied.size, work * COPIED / (2 * self.cores))
        return Way("cores", _woken(link.wake / work), np.zeros(source.size), lambda: [("cores", those, ends, halves)])

    def _between(self, op: str, fabric: Fabric) -> Link:
        """A leaf's uplinks together, or a cable of the ring: as wide as the cards below, but for its oversubscription."""
        card, width = self.link(op, "inter_node"), fabric.below * max(1, len(self.cluster.nics)) / fabric.oversubscription
        return card.model_copy(update={"bandwidth": card.bandwidth * width, "latency": fabric.latency, "efficiency": {}})

    def bytes_by_link(self, sent: np.ndarray, group: Sequence[int] | None = None) -> dict[Placement, int]:
        """Where the bytes of an exchange among `group` (all ranks) pass; `sent` as `exchange` takes it."""
        island, server = (place if group is None else place[list(group)] for place in (self.places.island, self.places.server))
        near, within = _among(sent, island), _among(sent, server)
        shares: dict[Placement, int] = {"island": near, "intra_node": within - near, "inter_node": int(sent.sum()) - within}
        return {where: nbytes for where, nbytes in shares.items() if nbytes}

    def reduced_by_link(self, wire: int, group: Sequence[int]) -> dict[Placement, int]:
        """Where the bytes of an all-reduce, `wire` over all hops, pass; whole bytes that add up. A ring's where NCCL may choose."""
        units: dict[Placement, int] = {"inter_node": 0, "island": 0, "intra_node": 0}
        at = self.places
        for phase in self._flows(self.cluster.all_reduce or "ring", tuple(group))[0].phases:
            within = at.server[phase.source] == at.server[phase.target]
            near = at.island[phase.source] == at.island[phase.target]
            for where, mask in zip(units, (~within, near, within & ~near), strict=True):
                units[where] += phase.units * int(mask.sum())
        kinds, total = [where for where in units if units[where]], sum(units.values())
        shares = {where: wire * units[where] // total for where in kinds[:-1]}
        return {**shares, **({kinds[-1]: wire - sum(shares.values())} if kinds else {})}


def _add(busy: dict[Port, Number], loads: Mapping[str, np.ndarray], times: float, bandwidth: Number) -> None:
    """Seconds of each port that is used, for `times` its load [B]; Python's own floats where there is one bandwidth."""
    for port, load in loads.items():
        seconds = {(port, i): nbytes * times / bandwidth for i, nbytes in enumerate(load.tolist()) if nbytes}
        if port == "cores":  # of messages inside servers and between them
            seconds = {key: busy.get(key, 0.0) + more for key, more in seconds.items()}
        busy.update(seconds)


def _curve(rates: Mapping[float, float]) -> tuple[np.ndarray, np.ndarray]:
    """Sizes and rates, in logarithms."""
    sizes, values = np.log(np.array(sorted(rates.items()))).T
    return sizes, values


@cache
def _woken(least: float) -> Link:
    """Cores that are busy with a message of n bytes as long as with copying n + `least`."""
    sizes = [2.0**power for power in range(41)] if least else []
    return Link(bandwidth=COPIED, latency=0.0, efficiency={size: size / (size + least) for size in sizes})


def slowest(seconds: Number) -> Number:
    """Over ranks (last axis)."""
    return np.max(np.atleast_1d(seconds), axis=-1, keepdims=np.ndim(seconds) > 1)


def _among(sent: np.ndarray, place: np.ndarray) -> int:
    """Bytes of `sent` [ranks, ranks] between ranks with the same number in `place` [ranks]."""
    order = np.argsort(place, kind="stable")
    if (np.diff(order) != 1).any():
        sent, place = sent[np.ix_(order, order)], place[order]
    bounds = [0, *(np.flatnonzero(np.diff(place)) + 1).tolist(), len(place)]
    return sum(int(sent[a:b, a:b].sum()) for a, b in pairwise(bounds) if b - a > 1)
