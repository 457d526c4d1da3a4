"""Which ports messages pass, and how many bytes each port carries.

The ports follow from where the two ranks sit:

    same island         the island's link, out of one GPU and into the other (NVLink)
    same server         the GPUs' links out and in (PCIe), and the uplinks of their PCIe switches
                        if the switches differ
    different servers   the NICs out and in, the uplink of a PCIe switch that shares its NIC with
                        other switches, and the links of the fabric on the route (fabric.py)
    no peer access      except in islands: both GPUs' links to their server's memory, and the
                        bridge that all GPUs of the server share
    ranks on a CPU      also the cores at both ends, which copy (shared_cores.py)

A `Transfer` (transfer.py) has the seconds for which messages (messages.py) occupy these ports."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np

from gnnplan.planner.cluster.fabric import Routes
from gnnplan.planner.cluster.messages import Count, EqualMessages, MessageList, Messages
from gnnplan.planner.cluster.places import Places, Port
from gnnplan.planner.cluster.shared_cores import SharedCores
from gnnplan.planner.cluster.spec import Cluster, Fabric, Link, LinkName
from gnnplan.planner.cluster.transfer import PortSeconds, Transfer, add, seconds_of
from gnnplan.planner.vocabulary.numbers import Number, total
from gnnplan.planner.vocabulary.outer import Outer, RankMatrix


class Passes(NamedTuple):
    """Pairs of a message and a port that it passes, for ports of one name; arrays are [passes]."""

    port: str
    messages: np.ndarray  # index of the message
    numbers: np.ndarray  # number of the port
    shares: np.ndarray  # bytes on the port per byte of the message


class Part(NamedTuple):
    """Messages that pass the ports of one name at their sender, or at their receiver."""

    port: str
    passing: Count  # share of a message's bytes that passes the port
    numbers: np.ndarray  # the port of each rank [ranks]
    at_sender: bool


class PortLoads(NamedTuple):
    """Bytes that messages put on the ports of one kind."""

    kind: str
    link: Link
    starts: np.ndarray  # messages that each rank sends, times the links that they pass [ranks]
    bytes_by_port: dict[str, np.ndarray]  # port's name -> bytes on each port of this name


class PortUse(NamedTuple):
    """How messages use the ports of one kind."""

    kind: str
    link: Link
    messages: Messages
    hops: Count  # links of this kind on the route
    parts: tuple[Part, ...] = ()
    fabric: tuple[Routes, np.ndarray] | None = None  # routes, and the server of each rank

    def loads(self, nbytes: Number) -> dict[str, np.ndarray]:
        """Return the bytes on each port, by the port's name, from the bytes of each message."""
        if self.fabric:
            paths, server = self.fabric
            return {"fabric": paths.by_link(self.messages.between(paths, paths.at[server], nbytes))}
        out: dict[str, np.ndarray] = {}
        for port, count, numbers, at_sender in self.parts:
            add(out, {port: self.messages.load(count, numbers, at_sender, nbytes)})
        return out

    def passes(self) -> Iterator[Passes]:
        """Yield which of the listed messages pass which ports."""
        assert isinstance(self.messages, MessageList)
        if self.fabric:
            paths, server = self.fabric
            ends = (self.messages.ends(server, at_sender) for at_sender in (True, False))
            yield Passes("fabric", *paths.passes(*ends))
        for port, count, numbers, at_sender in self.parts:
            passing = np.flatnonzero(count)
            at = self.messages.ends(numbers, at_sender)[passing]
            yield Passes(port, passing, at, count[passing])


@dataclass(frozen=True, eq=False)
class MessagePorts:
    """The ports of a cluster, and the messages' use of them, for ranks that sit at `places`."""

    cluster: Cluster
    places: Places
    cores: SharedCores
    # loads of an exchange (`Outer`) with one byte per message, keyed by its pairs of ranks
    _loads_by_pattern: dict[tuple[object, ...], list[PortLoads]] = field(default_factory=dict)
    routes: Routes | None = field(init=False)

    def __post_init__(self) -> None:
        fabric = self.cluster.fabric
        routes = Routes(fabric, self.cluster.servers) if fabric else None
        object.__setattr__(self, "routes", routes)

    def link(self, op: str, where: LinkName | Literal["switch"]) -> Link:
        """Return the link `where`, as measured for operation `op` if the cluster has that."""
        plain: Link | None = getattr(self.cluster, where)
        if where == "intra_node" and not self.cluster.peer_access:
            host = self.cluster.host or self.cluster.intra_node
            plain = host.model_copy(update={"latency": 2 * host.latency})  # up and down
        assert plain is not None  # Cluster checks that every place has its link
        return self.cluster.collectives.get(f"{op}.{where}", plain)

    def fabric_link(self, op: str, fabric: Fabric) -> Link:
        """Return the link that a leaf's uplinks form together, or a cable of the ring.

        Its bandwidth is that of the NICs below it, divided by the oversubscription.
        """
        nic = self.link(op, "inter_node")
        nics_below = fabric.below * max(1, len(self.cluster.nics))
        return nic.model_copy(
            update={
                "bandwidth": nic.bandwidth * (nics_below / fabric.oversubscription),
                "latency": fabric.latency,
                "efficiency": {},
            }
        )

    def uses(self, op: str, messages: Messages) -> Iterator[PortUse]:
        """Yield how messages use the ports, one kind of port after the other."""
        at, cluster, ranks = self.places, self.cluster, np.arange(self.places.server.size)
        in_server, in_island = messages.within(at.server), messages.within(at.island)
        between, over_gpus = messages.within() - in_server, in_server - in_island
        if not cluster.peer_access:
            # through the server's memory: up the sender's host link, then down the receiver's host
            # link or out through a NIC
            over_gpus = over_gpus + between

        def use(
            kind: str,
            place: LinkName | Literal["switch"],
            hops: Count,
            numbers: np.ndarray,
            out: Count,
            into: Count,
        ) -> Iterator[PortUse]:
            if hops.any():
                parts = (
                    Part(f"{kind}_out", out, numbers, True),
                    Part(f"{kind}_in", into, numbers, False),
                )
                yield PortUse(kind, self.link(op, place), messages, hops, parts)

        yield from use("island", "island", in_island, ranks, in_island, in_island)
        yield from use("gpu", "intra_node", over_gpus, ranks, over_gpus, over_gpus)
        if cluster.switches and cluster.peer_access:
            same = messages.within(at.switch) - messages.within(at.switch, at.island)
            up = over_gpus - same + messages.sent_by(between, at.uplinked)
            down = over_gpus - same + messages.received_by(between, at.uplinked)
            arriving = messages.within(to=at.uplinked) - messages.within(at.server, to=at.uplinked)
            either = up + messages.sent_by(arriving, ~at.uplinked)
            yield from use("switch", "switch", either, at.switch, up, down)
        elif cluster.switches:
            yield from use("switch", "switch", over_gpus, at.switch, over_gpus, over_gpus)
        if cluster.bridge and over_gpus.any():
            # each byte is written and read; between servers, in the receiver's memory too
            parts = (
                Part("bridge", 2.0 * over_gpus, at.server, True),
                Part("bridge", 2.0 * between, at.server, False),
            )
            yield PortUse("bridge", cluster.bridge, messages, over_gpus, parts)
        yield from use("nic", "inter_node", between, at.nic, between, between)
        for place, count in (("intra_node", in_server), ("inter_node", between)):
            if count.any() and (copied := self.cores.copying(self.link(op, place))):  # type: ignore[arg-type]
                link, share = copied
                ends = (Part("cores", share * count, self.cores.machines, e) for e in (True, False))
                yield PortUse("cores", link, messages, 0.0 * count, tuple(ends))
        if cluster.fabric and self.routes and between.any():
            paths = self.routes
            hops = messages.hops(paths, paths.at[at.server])
            link = self.fabric_link(op, cluster.fabric)
            if hops.any():
                yield PortUse("fabric", link, messages, hops, fabric=(paths, at.server))

    def loads(
        self, op: str, source: np.ndarray, target: np.ndarray, nbytes: np.ndarray, messages: int = 1
    ) -> Iterator[PortLoads]:
        """Yield the bytes that messages put on the ports, one kind of port after the other.

        source, target, nbytes: [pairs]; each pair's bytes are sent in `messages` equal messages.
        """
        listed = MessageList(source, target)
        for use in self.uses(op, listed):
            loads = use.loads(use.link.stretched(nbytes, messages))
            yield PortLoads(use.kind, use.link, listed.sent_per_rank(use.hops), loads)

    def passes(
        self, op: str, source: np.ndarray, target: np.ndarray, nbytes: np.ndarray
    ) -> tuple[list[Passes], dict[Port, float]]:
        """Return which ports each message passes, and the bandwidth of these ports [B/s]."""
        passes: list[Passes] = []
        bandwidth: dict[Port, float] = {}
        for use in self.uses(op, MessageList(source, target)):
            stretch = use.link.stretched(nbytes) / nbytes
            for each in use.passes():
                shares = stretch[each.messages] * each.shares
                passes.append(each._replace(shares=shares))
                for number in np.unique(each.numbers).tolist():
                    bandwidth[each.port, number] = float(use.link.bandwidth)
        return passes, bandwidth

    def sends(
        self, source: np.ndarray, target: np.ndarray, nbytes: np.ndarray
    ) -> tuple[np.ndarray, PortSeconds]:
        """Return the latency of each message [.., messages] [s], and the busy seconds of ports [s].

        source, target, nbytes: [messages]; all messages start at the same time.
        """
        latencies: np.ndarray = np.zeros(source.size)
        ports: dict[str, np.ndarray] = {}
        for use in self.uses("send", MessageList(source, target)):
            latencies = latencies + use.hops * use.link.latency
            loads = use.loads(use.link.stretched(nbytes))
            add(ports, seconds_of(loads, 1.0, use.link.bandwidth))
        return latencies, ports

    def exchange(
        self,
        sent: RankMatrix,
        group: Sequence[int] | None,
        messages: int = 1,
        itemsize: int = 1,
    ) -> Transfer:
        """Return the transfer of an all-to-all; arguments as in `Cost.exchange`."""
        members = np.arange(self.places.server.size) if group is None else np.asarray(group)
        ports, starts = dict[str, np.ndarray](), dict[str, np.ndarray]()
        latency: dict[str, Number] = {}
        for each, times in self._loads_of(sent, members, messages, itemsize):
            add(ports, seconds_of(each.bytes_by_port, times, each.link.bandwidth))
            add(starts, {each.kind: each.starts})
            latency[each.kind] = each.link.latency
        each_s = (float(starts[kind].max()) * seconds for kind, seconds in latency.items())
        return Transfer(total(each_s), ports)

    def _loads_of(
        self, sent: RankMatrix, members: np.ndarray, messages: int, itemsize: int
    ) -> Iterator[tuple[PortLoads, float]]:
        """Yield the loads of an exchange on ports, each with a factor to multiply it by.

        The loads of an `Outer` are computed once per set of pairs, for messages of one byte."""
        if not isinstance(sent, Outer):
            source, target = np.nonzero(sent)
            nbytes = sent[source, target] * itemsize
            loads = self.loads("exchange", members[source], members[target], nbytes, messages)
            yield from ((each, 1.0) for each in loads)
            return
        for pairs in sent.equal_pairs:
            ends = pairs.senders.tobytes(), pairs.receivers.tobytes()
            key = sent.groups.tobytes(), sent.same, *ends, members.tobytes()
            if key not in self._loads_by_pattern:
                equal = EqualMessages(members, sent, pairs)
                self._loads_by_pattern[key] = [
                    PortLoads(use.kind, use.link, equal.sent_per_rank(use.hops), use.loads(1.0))
                    for use in self.uses("exchange", equal)
                ]
            for each in self._loads_by_pattern[key]:
                yield each, float(each.link.stretched(float(pairs.value * itemsize), messages))
