"""The only place where work becomes seconds: roofline for compute, alpha-beta over ports for transfers.

A transfer keeps *ports* busy. Which ones follows from where two GPUs sit:

    same island         the island's link, out of one GPU and into the other (NVLink)
    same server         the GPU's way out and in (PCIe), and the uplinks of their switches where these differ
    different servers   the network cards out and in, and the uplink of a switch that does not have the card to itself

Alone a transfer takes its latency plus its busiest port: no schedule can be faster than the sum of what has to pass a port,
and on a non-blocking fabric max-min fair flows come within 0.5 % of that bound. The simulator shares ports between transfers that
overlap. An all-reduce is a ring that visits servers one after the other, in them islands, in them switches; where servers have
several cards there is a ring per card, each with its share (as NCCL does it).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import Any, Literal, NamedTuple

import numpy as np
from scipy.special import ndtr, ndtri

from gnnplan.planner.graph import SPREAD
from gnnplan.planner.schedule import Collective, Compute, Send
from gnnplan.planner.specs import Cluster, HostWork, Link, Placement

Port = tuple[str, int]  # ('gpu_out', rank), ('island_out', rank), ('switch_out', switch), ('nic_out', card), and the same with 'in'
HOST_RATE = 5e7  # [edges/s] of a sampler that nobody has measured: one core of an AMD EPYC (2026) draws 50 M, lays out 63 M
Number = Any  # float or numpy array: closed forms are evaluated over many candidates at once


class Transfer(NamedTuple):
    """`latency` [s], then every port is busy for its seconds when alone."""

    latency: Number
    busy: Mapping[Port, Number]

    @property
    def alone(self) -> Number:
        """Duration without contention [s]."""
        values = list(self.busy.values())
        return self.latency + (reduce(np.maximum, values) if any(map(np.ndim, values)) else max(values, default=0.0))


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

    # -- compute ---------------------------------------------------------------------------------------------------

    def compute_s(self, work: Compute) -> Number:
        """Roofline by kind of work, plus a fixed price per framework operation [s]."""
        device = self.cluster.device
        seconds = work.flops / device.gemm + work.touched / device.memory_bandwidth + work.launches * device.launch
        for rows, width, distinct in work.gathers:
            bytes_each, distinct = width * work.itemsize, np.maximum(distinct, 1.0)
            seconds = seconds + rows * bytes_each / self.gather_rate(width, distinct * bytes_each, rows / distinct)
        return seconds + work.beside * device.overlap_tax / self.link("exchange", "intra_node").bandwidth

    def load_s(self, nbytes: Number) -> Number:
        """From the server's memory to the device, over the host link [s]."""
        link = self.cluster.host or self.cluster.intra_node
        return link.latency + nbytes / link.bandwidth

    def host_s(self, what: HostWork, edges: Number) -> Number:
        """A sampler's work for one rank [s]."""
        return edges / self.cluster.host_rates.get(what, HOST_RATE)

    def gather_rate(self, width: int, among: Number = np.inf, times: Number = 1.0) -> Number:
        """Aggregation rate at a row width [B of gathered rows/s]: log-log between the measured widths, flat outside.

        Where nobody measured it, a roofline of memory and cache, which keeps the rows that are read most. Rows are read by degree, and
        degrees are lognormal with this spread s: of `among` bytes, each read so many `times`, the share c that the cache holds is read in

            share(c) = Phi(s + Phi^-1(c))        (the Lorenz curve of a lognormal; c = 1: everything)

        of all readings; the rest, and every row the first time, comes from memory.
        """
        device = self.cluster.device
        points = device.gather
        if not points and device.cache:
            held = np.clip(device.cache / among, 1e-12, 1.0)
            missed = np.clip(np.maximum(1.0 - ndtr(self.spread + ndtri(held)), 1.0 / np.maximum(times, 1.0)), 0.0, 1.0)
            return 1.0 / np.maximum(missed / device.memory_bandwidth, 1.0 / (device.cache_bandwidth or 3 * device.memory_bandwidth))
        if not points:
            return device.memory_bandwidth / 2
        widths = sorted(points)
        return float(np.exp(np.interp(np.log(max(width, 1)), np.log(widths), np.log([points[w] for w in widths]))))

    # -- transfers -------------------------------------------------------------------------------------------------

    def link(self, op: str, where: Placement | Literal["switch"]) -> Link:
        """As measured for this operation there, else the link itself."""
        plain: Link | None = getattr(self.cluster, where)
        assert plain is not None  # specs: what has a place has a link
        return self.cluster.collectives.get(f"{op}.{where}", plain)

    def placement(self, a: int, b: int) -> Placement:
        at = self.places
        if at.server[a] != at.server[b]:
            return "inter_node"
        return "island" if at.island[a] == at.island[b] else "intra_node"

    def send(self, rank: int, work: Send) -> Transfer:
        return self._pairwise("send", np.array([rank]), np.array([work.peer]), np.array([work.nbytes]))

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

    def exchange(self, sent: np.ndarray, group: Sequence[int] | None = None) -> Transfer:
        """Pairwise irregular all-to-all among `group` (all ranks), `sent[i, j]` bytes from its i-th to its j-th; each rank starts its
        messages one after the other."""
        source, target = np.nonzero(sent)
        nbytes = sent[source, target]
        if group is not None:
            source, target = np.asarray(group)[source], np.asarray(group)[target]
        return self._pairwise("exchange", source, target, nbytes)

    def ring(self, group: Sequence[int]) -> list[tuple[int, int]]:
        """The hops of an all-reduce: server by server, in them island by island and switch by switch."""
        at, islands = self.places, bool(self.cluster.islands)
        order = sorted(group, key=lambda r: (at.server[r], at.island[r] if islands else 0, at.switch[r], self.seats[r]))
        return [(a, order[(i + 1) % len(order)]) for i, a in enumerate(order)]

    def all_reduce(self, size: int, group: Sequence[int]) -> Transfer:
        """Ring: 2 (n-1) hops of size / n bytes, so that 2 (n-1) / n size pass between every two neighbours."""
        n, at = len(group), self.places
        if n == 1:
            return Transfer(0.0, {})
        wire = 2 * (n - 1) / n * size
        busy: dict[Port, Number] = {}
        latency: Number = 0.0

        def load(port: str, number: int, nbytes: float, link: Link) -> None:
            busy[port, number] = busy.get((port, number), 0.0) + nbytes / link.bandwidth

        ring = self.ring(group)
        for a, b in ring:
            where = self.placement(a, b)
            link = self.link("all_reduce", where)
            hop = link.latency
            if where != "inter_node":
                port = "gpu" if where == "intra_node" else "island"
                load(f"{port}_out", a, wire, link)
                load(f"{port}_in", b, wire, link)
                if where == "intra_node" and at.switch[a] != at.switch[b]:
                    uplink = self.link("all_reduce", "switch")
                    load("switch_out", int(at.switch[a]), wire, uplink)
                    load("switch_in", int(at.switch[b]), wire, uplink)
                    hop = hop + uplink.latency
            latency = np.maximum(latency, hop)
        if len({self.servers[r] for r in group}) > 1:
            doors: dict[int, dict[int, int]] = {}  # server -> card -> the rank that uses it
            for rank, _ in ring:
                doors.setdefault(self.servers[rank], {}).setdefault(int(at.card[rank]), rank)
            for door in doors.values():
                for card, rank in door.items():
                    for way in ("out", "in"):
                        load(f"nic_{way}", card, wire / len(door), self.link("all_reduce", "inter_node"))
                        if at.uplinked[rank]:
                            load(f"switch_{way}", int(at.switch[rank]), wire / len(door), self.link("all_reduce", "switch"))
        return Transfer(2 * (n - 1) * latency, busy)

    def _pairwise(self, op: str, source: np.ndarray, target: np.ndarray, nbytes: np.ndarray) -> Transfer:
        latency: Number = 0.0
        busy: dict[Port, Number] = {}
        for port, link, starts, loads in self.loads(op, source, target, nbytes):
            latency = latency + int(starts.max()) * link.latency
            for way, load in loads.items():
                busy.update({(f"{port}_{way}", int(i)): load[i] / link.bandwidth for i in np.flatnonzero(load)})
        return Transfer(latency, busy)

    def loads(self, op: str, source: np.ndarray, target: np.ndarray, nbytes: np.ndarray,
              ) -> Iterator[tuple[str, Link, np.ndarray, dict[str, np.ndarray]]]:  # fmt: skip
        """By kind of port in use: its name, its link, the messages that each rank starts over it, bytes per port out and in."""
        at, everyone = self.places, np.arange(len(self.seats))
        within = at.server[source] == at.server[target]
        near = at.island[source] == at.island[target]
        climbing = within & ~near & (at.switch[source] != at.switch[target])
        where: tuple[tuple[str, Placement | Literal["switch"], np.ndarray, np.ndarray, np.ndarray], ...] = (
            ("island", "island", near, near, everyone),
            ("gpu", "intra_node", within & ~near, within & ~near, everyone),
            ("switch", "switch", climbing | ~within & at.uplinked[source], climbing | ~within & at.uplinked[target], at.switch),
            ("nic", "inter_node", ~within, ~within, at.card),
        )
        for port, place, out, into, numbers in where:
            used = out | into
            if used.any():
                yield port, self.link(op, place), np.bincount(source[used]), {
                    "out": np.bincount(numbers[source[out]], weights=nbytes[out]),
                    "in": np.bincount(numbers[target[into]], weights=nbytes[into]),
                }  # fmt: skip

    def bytes_by_link(self, sent: np.ndarray) -> dict[Placement, int]:
        """Where the bytes of an exchange [ranks, ranks] pass."""
        at = self.places
        within, near = np.equal.outer(at.server, at.server), np.equal.outer(at.island, at.island)
        shares: dict[Placement, int] = {"island": int(sent[near].sum()), "intra_node": int(sent[within & ~near].sum()),
                                        "inter_node": int(sent[~within].sum())}  # fmt: skip
        return {where: nbytes for where, nbytes in shares.items() if nbytes}

    def ring_by_link(self, wire: int, group: Sequence[int]) -> dict[Placement, int]:
        """Where the bytes of an all-reduce, `wire` over all hops, pass; whole bytes that add up."""
        hops = [self.placement(a, b) for a, b in self.ring(group)]
        shares: dict[Placement, int] = {}
        order: tuple[Placement, ...] = ("inter_node", "island", "intra_node")
        kinds = [where for where in order if where in hops]
        for where in kinds[:-1]:
            shares[where] = wire * hops.count(where) // len(hops)
        return {**shares, kinds[-1]: wire - sum(shares.values())}
