"""The only place where work becomes seconds: roofline for compute, alpha-beta over ports for transfers.

A transfer keeps *ports* busy: a GPU's way out and in inside its server, a server's network card out and in. Alone it
takes its latency plus its busiest port (the port bound, exact on a non-blocking fabric within 0.5 %); the simulator
shares ports between transfers that overlap.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, NamedTuple

import numpy as np

from gnnplan.planner.schedule import Collective, Compute, Send
from gnnplan.planner.specs import Cluster, Link, Placement

Port = tuple[str, int]  # ('gpu_out', rank) | ('gpu_in', rank) | ('nic_out', server) | ('nic_in', server)
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


@dataclass(frozen=True)
class Cost:
    """A cluster's numbers, ready for hot loops. `servers[r]` is the server of rank r."""

    cluster: Cluster
    servers: tuple[int, ...]

    @classmethod
    def of(cls, cluster: Cluster, ranks: int | None = None) -> Cost:
        """Ranks fill the servers in order: rank r sits on server r // gpus_per_server."""
        ranks = cluster.ranks if ranks is None else ranks
        return cls(cluster, tuple(r // cluster.gpus_per_server for r in range(ranks)))

    # -- compute ---------------------------------------------------------------------------------------------------

    def compute_s(self, work: Compute) -> Number:
        """Roofline by kind of work, plus a fixed price per framework operation [s]."""
        device = self.cluster.device
        seconds = work.flops / device.gemm + work.touched / device.memory_bandwidth + work.launches * device.launch
        for rows, width in work.gathers:
            seconds = seconds + rows * width * work.itemsize / self.gather_rate(width)
        return seconds + work.beside * device.overlap_tax / self.link("exchange", "intra_node").bandwidth

    def gather_rate(self, width: int) -> float:
        """Aggregation rate at a row width [B of gathered rows/s]: log-log between the measured widths, flat outside."""
        points = self.cluster.device.gather
        if not points:
            return self.cluster.device.memory_bandwidth / 2
        widths = sorted(points)
        return float(np.exp(np.interp(np.log(max(width, 1)), np.log(widths), np.log([points[w] for w in widths]))))

    # -- transfers -------------------------------------------------------------------------------------------------

    def link(self, op: str, placement: Placement) -> Link:
        """As measured for this operation there, else the link itself."""
        plain = self.cluster.intra_node if placement == "intra_node" else self.cluster.inter_node
        assert plain is not None  # specs: more than one server has an inter_node
        return self.cluster.collectives.get(f"{op}.{placement}", plain)

    def placement(self, a: int, b: int) -> Placement:
        return "intra_node" if self.servers[a] == self.servers[b] else "inter_node"

    def send(self, rank: int, work: Send) -> Transfer:
        return self._pairwise("send", np.array([rank]), np.array([work.peer]), np.array([work.nbytes]))

    def collective(self, parts: Mapping[int, Collective]) -> Transfer:
        """`parts`: every member's own share of one collective."""
        first = next(iter(parts.values()))
        if first.op == "all_reduce":
            return self.all_reduce(first.size, first.group)
        sent = np.zeros((len(self.servers),) * 2)
        for rank, part in parts.items():
            for peer, nbytes in part.sent:
                sent[rank, peer] = nbytes
        return self.exchange(sent)

    def exchange(self, sent: np.ndarray) -> Transfer:
        """Pairwise irregular all-to-all, `sent[i, j]` bytes from i to j; each rank starts its messages one after the other."""
        source, target = np.nonzero(sent)
        return self._pairwise("exchange", source, target, sent[source, target])

    def all_reduce(self, size: int, group: Sequence[int]) -> Transfer:
        """Ring: 2 (n-1) hops of size / n bytes; servers are visited one after the other, so a card carries the ring once."""
        n = len(group)
        if n == 1:
            return Transfer(0.0, {})
        wire, busy = 2 * (n - 1) / n * size, {}
        spans = len({self.servers[r] for r in group}) > 1
        inside, slowest = self.link("all_reduce", "intra_node"), self.link("all_reduce", "inter_node" if spans else "intra_node")
        for rank in group:
            busy[("gpu_out", rank)] = busy[("gpu_in", rank)] = wire / inside.bandwidth
        if spans:
            for server in {self.servers[r] for r in group}:
                busy[("nic_out", server)] = busy[("nic_in", server)] = wire / slowest.bandwidth
        return Transfer(2 * (n - 1) * slowest.latency, busy)

    def _pairwise(self, op: str, source: np.ndarray, target: np.ndarray, nbytes: np.ndarray) -> Transfer:
        server = np.asarray(self.servers)
        inside = server[source] == server[target]
        latency: Number = 0.0
        busy: dict[Port, Number] = {}
        for where, chosen, kind, at in (("intra_node", inside, "gpu", np.arange(len(server))), ("inter_node", ~inside, "nic", server)):
            if not chosen.any():
                continue
            link = self.link(op, where)  # type: ignore[arg-type]
            latency = latency + np.bincount(source[chosen]).max() * link.latency
            for way, end in (("out", source), ("in", target)):
                load = np.bincount(at[end[chosen]], weights=nbytes[chosen])
                busy.update({(f"{kind}_{way}", int(port)): load[port] / link.bandwidth for port in np.flatnonzero(load)})
        return Transfer(latency, busy)
