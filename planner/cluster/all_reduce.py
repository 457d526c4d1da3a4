"""All-reduces: their algorithms, and the seconds for which their hops occupy ports (ports.py).

An algorithm tells which rank sends how much of the buffer to which, in how many steps:

    ring            Every rank sends 1/n of the buffer to the next rank, 2 (n-1) times. The ranks of
                    a server follow each other.
    hierarchical    A reduce-scatter in every server, a ring across servers for each rank's share,
                    and an all-gather in every server.
    tree            As hierarchical inside servers; between servers two binary trees, each with half
                    of the buffer (NCCL since 2.4). Sums go up a tree, results come down. An inner
                    node of one tree is a leaf of the other, so servers send as much as in a ring,
                    but only log2(servers) messages wait for each other.

All n ranks together send 2 (n-1) buffers. Chunks of the buffer are pipelined, so all links are busy
at once. Hops visit servers one after the other, inside a server its islands, and inside an island
its PCIe switches. Bytes between servers are spread over all NICs of the two servers, as in NCCL."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, get_args

import numpy as np

from gnnplan.planner.cluster.places import LINK_NAMES
from gnnplan.planner.cluster.ports import MessageList, MessagePorts, Transfer, add, seconds_of
from gnnplan.planner.cluster.spec import Algorithm, Link, LinkName
from gnnplan.planner.vocabulary.numbers import Number, ranges, slowest, total

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
        return AllReduce(2 * (n - 1) / n, (phase,))
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


class PhaseLoads(NamedTuple):
    """The loads of a phase on ports, per byte of a hop."""

    links: list[Link]  # link of each kind of port
    starts: np.ndarray  # links of each kind that the different flows pass [kinds, different flows]
    loads: list[dict[float, dict[str, np.ndarray]]]  # per kind: flow's share -> port -> bytes


@dataclass(frozen=True, eq=False)
class AllReduces:
    """All-reduces among groups of ranks; rank r sits on GPU `placement[r]`."""

    ports: MessagePorts
    placement: tuple[int, ...]
    _hops: dict[tuple[Algorithm, tuple[int, ...]], tuple[AllReduce, list[Flows]]] = field(
        default_factory=dict
    )
    _loads: dict[tuple[Algorithm, tuple[int, ...]], list[PhaseLoads]] = field(default_factory=dict)

    def transfer(self, size: int, group: tuple[int, ...]) -> Transfer:
        """Return the transfer of an all-reduce of `size` bytes among `group`.

        The latency is that of all steps; the ports carry the bytes of all phases. The algorithm is
        the cluster's. By default GPUs use a tree: NCCL chooses a ring or a tree, and here a tree is
        never slower. CPU ranks use a ring.
        """
        cluster = self.ports.cluster
        on_gpus = cluster.device.kind == "cuda"
        algorithm = cluster.all_reduce or ("tree" if on_gpus else "ring")
        reduction, flows_by_phase = self.hops(algorithm, group)
        if (algorithm, group) not in self._loads:
            self._loads[algorithm, group] = list(map(self._phase_loads, flows_by_phase))
        latency: Number = 0.0
        ports: dict[str, np.ndarray] = {}
        for phase, each in zip(reduction.phases, self._loads[algorithm, group], strict=True):
            nbytes = phase.units * reduction.unit * size
            for link, by_share in zip(each.links, each.loads, strict=True):
                for share, loads in by_share.items():
                    sent = float(link.stretched(share * nbytes, phase.messages))
                    add(ports, seconds_of(loads, sent, link.bandwidth))
            starts = zip(each.starts, each.links, strict=True)
            hop_s = slowest(total(passes * link.latency for passes, link in starts))
            latency = latency + phase.steps * hop_s
        return Transfer(latency, ports)

    def _phase_loads(self, flows: Flows) -> PhaseLoads:
        """Return the loads of flows on ports."""
        source, target, share = flows
        uses = list(self.ports.uses("all_reduce", MessageList(source, target)))
        starts = np.array([use.hops for use in uses]).reshape(len(uses), source.size)
        return PhaseLoads(
            [use.link for use in uses],
            np.unique(starts, axis=1),
            [{s: use.loads(1.0 * (share == s)) for s in np.unique(share)} for use in uses],
        )

    def hops(self, algorithm: Algorithm, group: tuple[int, ...]) -> tuple[AllReduce, list[Flows]]:
        """Return the phases of an all-reduce among `group`, and the flows of each phase."""
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
            users = order[np.sort(first_of_nic)]  # a rank on each NIC, server by server [NICs]
            flows = [self._over_all_nics(phase, users) for phase in reduction.phases]
            self._hops[key] = reduction, flows
        return self._hops[key]

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
        reduction, flows_by_phase = self.hops(self.ports.cluster.all_reduce or "ring", tuple(group))
        out = np.zeros((len(self.placement),) * 2)
        for phase, (source, target, share) in zip(reduction.phases, flows_by_phase, strict=True):
            np.add.at(out, (source, target), share * phase.units)
        return np.asarray(out * (sent / max(out.sum(), 1.0)))

    def bytes_by_link(self, sent: int, group: Sequence[int]) -> dict[LinkName, int]:
        """Return the bytes per kind of link [B] of an all-reduce that sends `sent` bytes in total.

        They are integers that add up to `sent`. If the algorithm is not given, they are a ring's.
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
