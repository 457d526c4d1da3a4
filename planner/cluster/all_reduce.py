"""What an all-reduce keeps busy: the hops of its algorithm (collectives.py) over ports (ports.py).

Hops visit servers one after the other, in them islands, and in these PCIe switches. What leaves a
server with several NICs is shared among these, as NCCL does it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from gnnplan.planner.cluster.collectives import Algorithm, AllReduce, ReducePhase, all_reduce
from gnnplan.planner.cluster.messages import Listed
from gnnplan.planner.cluster.places import LINK_NAMES
from gnnplan.planner.cluster.ports import MessagePorts
from gnnplan.planner.cluster.spec import Link, LinkName
from gnnplan.planner.cluster.transfer import Transfer, add, seconds_of
from gnnplan.planner.vocabulary.numbers import Number, ranges, slowest, total


class Flows(NamedTuple):
    """What the hops of a phase send from rank to rank [flows]."""

    source: np.ndarray
    target: np.ndarray
    share: np.ndarray  # of a hop's bytes


class Passed(NamedTuple):
    """What passes the ports in a phase, for each byte of a hop."""

    links: list[Link]  # of the kinds of ports
    starts: np.ndarray  # of unlike flows, the links of each kind that they pass [kinds, unlike]
    loads: list[dict[float, dict[str, np.ndarray]]]  # of each kind, by the share of a hop's bytes


@dataclass(frozen=True, eq=False)
class AllReduces:
    """All-reduces among groups of ranks; rank r sits on GPU `placement[r]`."""

    ports: MessagePorts
    placement: tuple[int, ...]
    _hops: dict[tuple[Algorithm, tuple[int, ...]], tuple[AllReduce, list[Flows]]] = field(
        default_factory=dict
    )
    _passed: dict[tuple[Algorithm, tuple[int, ...]], list[Passed]] = field(default_factory=dict)

    def transfer(self, size: int, group: tuple[int, ...]) -> Transfer:
        """An all-reduce of `size` bytes: its steps one after the other, and what passes each port
        in all of them.

        It is by the cluster's algorithm. Where that is not given, GPUs take a tree: NCCL takes a
        ring or a tree, and a tree is never slower here. Ranks on CPUs take a ring.
        """
        cluster = self.ports.cluster
        on_gpus = cluster.device.kind == "cuda"
        algorithm = cluster.all_reduce or ("tree" if on_gpus else "ring")
        reduction, flows_by_phase = self.hops(algorithm, group)
        if (algorithm, group) not in self._passed:
            self._passed[algorithm, group] = list(map(self._passing, flows_by_phase))
        latency: Number = 0.0
        ports: dict[str, np.ndarray] = {}
        for phase, passed in zip(reduction.phases, self._passed[algorithm, group], strict=True):
            nbytes = phase.units * reduction.unit * size
            for link, by_share in zip(passed.links, passed.loads, strict=True):
                for share, loads in by_share.items():
                    sent = float(link.stretched(share * nbytes, phase.messages))
                    add(ports, seconds_of(loads, sent, link.bandwidth))
            starts = zip(passed.starts, passed.links, strict=True)
            hop_s = slowest(total(passes * link.latency for passes, link in starts))
            latency = latency + phase.steps * hop_s
        return Transfer(latency, ports)

    def _passing(self, flows: Flows) -> Passed:
        """What passes the ports; flows that are alike are counted once, whatever they carry."""
        source, target, share = flows
        uses = list(self.ports.uses("all_reduce", Listed(source, target)))
        starts = np.array([use.hops for use in uses]).reshape(len(uses), source.size)
        return Passed(
            [use.link for use in uses],
            np.unique(starts, axis=1),
            [{one: use.loads(1.0 * (share == one)) for one in np.unique(share)} for use in uses],
        )

    def hops(self, algorithm: Algorithm, group: tuple[int, ...]) -> tuple[AllReduce, list[Flows]]:
        """The phases of an all-reduce, and for each what it sends from rank to rank."""
        key = algorithm, group
        if key not in self._hops:
            at, ranks = self.ports.places, np.array(group)
            island = at.island if self.ports.cluster.islands else np.zeros_like(at.island)
            gpus = np.asarray(self.placement)
            order = ranks[
                np.lexsort((gpus[ranks], at.switch[ranks], island[ranks], at.server[ranks]))
            ]
            by_server = np.split(order, np.flatnonzero(np.diff(at.server[order])) + 1)
            reduction = all_reduce(algorithm, [ranks.tolist() for ranks in by_server])
            first_of_nic = np.unique(at.nic[order], return_index=True)[1]
            users = order[np.sort(first_of_nic)]  # the rank that uses each NIC, server by server
            flows = [self._over_all_nics(phase, users) for phase in reduction.phases]
            self._hops[key] = reduction, flows
        return self._hops[key]

    def _over_all_nics(self, phase: ReducePhase, users: np.ndarray) -> Flows:
        """The hops of a phase; those between servers use all NICs of both servers equally.

        NCCL has a channel for each NIC. A phase in which each rank uses its own NIC stays as it is.
        """
        server, source, target = self.ports.places.server, phase.source, phase.target
        direct = (server[source] == server[target]) | phase.by_nic
        nics = np.bincount(server[users], minlength=int(server.max()) + 1)  # in use, of each server
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
        """Bytes from rank to rank [ranks, ranks] of an all-reduce, `sent` over all hops [B]."""
        reduction, flows_by_phase = self.hops(self.ports.cluster.all_reduce or "ring", tuple(group))
        out = np.zeros((len(self.placement),) * 2)
        for phase, (source, target, share) in zip(reduction.phases, flows_by_phase, strict=True):
            np.add.at(out, (source, target), share * phase.units)
        return np.asarray(out * (sent / max(out.sum(), 1.0)))

    def bytes_by_link(self, sent: int, group: Sequence[int]) -> dict[LinkName, int]:
        """Where the bytes of an all-reduce pass, `sent` over all hops [B].

        They are whole bytes that add up to `sent`. Where NCCL may choose, they are a ring's.
        """
        units = np.zeros(len(LINK_NAMES), dtype=np.int64)
        reduction, _ = self.hops(self.ports.cluster.all_reduce or "ring", tuple(group))
        for phase in reduction.phases:
            np.add.at(units, self.ports.places.links(phase.source, phase.target), phase.units)
        by_link = {where: n for where, n in zip(LINK_NAMES, units.tolist(), strict=True) if n}
        if not by_link:
            return {}
        *others, last = by_link
        shares = {where: sent * by_link[where] // sum(by_link.values()) for where in others}
        return {**shares, last: sent - sum(shares.values())}
