"""Which ports messages pass, and how many bytes each port carries.

The ports follow from where the two ranks sit:

    same island         the island's link, out of one GPU and into the other (NVLink)
    same server         the GPUs' links out and in (PCIe), and the uplinks of their PCIe switches
                        if the switches differ
    different servers   the NICs out and in, the uplink of a PCIe switch that shares its NIC with
                        other switches, and the links of the fabric on the route (places.py)
    no peer access      except in islands: both GPUs' links to their server's memory, and the
                        bridge that all GPUs of the server share
    ranks on a CPU      also the cores at both ends, which copy (compute.py)

A `Transfer` has a latency, and the seconds for which messages occupy these ports.

Messages are a `MessageList`, or counts of equal messages (`EqualMessages`), with the same methods.
A *count* of `MessageList` is an array [messages]: how often each message passes something. A count
of `EqualMessages` is an array [2, ranks]: how many of the messages that a rank sends pass it, and
how many of the messages that the rank receives. Counts can be added and subtracted.

An `Outer` (vocabulary/numbers.py) is a traffic matrix that is given by a number per sender and a
number per receiver. The load of a port then follows from counts: how many of a rank's peers share
its island, its PCIe switch or its server. No list of messages is needed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np

from gnnplan.planner.cluster.compute import COPYING, SharedCores
from gnnplan.planner.cluster.places import Places, Port, Routes
from gnnplan.planner.cluster.spec import Cluster, Fabric, Link, LinkName
from gnnplan.planner.vocabulary.numbers import (
    ByContent,
    EqualPairs,
    Number,
    Outer,
    RankMatrix,
    cells,
    largest,
    total,
)

# -- the seconds for which a transfer occupies ports -----------------------------------------------


# Kind of port -> seconds for which each port of this kind is busy [.., ports] [s]
PortSeconds = Mapping[str, np.ndarray]


@dataclass(frozen=True, eq=False)
class Transfer(ByContent):
    """A latency [s], after which every port is busy for some seconds.

    A port's seconds hold without contention: when no other transfer passes the port.
    """

    latency: Number
    ports: PortSeconds

    @property
    def alone(self) -> Number:
        """Duration without contention: the latency plus the busiest port [s]."""
        return self.latency + busiest(self.ports)

    @property
    def busy(self) -> dict[Port, float]:
        """Port -> busy seconds, without idle ports; for a single cluster [s]."""
        return {
            (kind, number): float(seconds[number])
            for kind, seconds in self.ports.items()
            for number in np.flatnonzero(seconds).tolist()
        }


def busiest(ports: PortSeconds) -> Number:
    """Return the seconds of the busiest port [s]."""
    return largest(busy.max(-1, keepdims=busy.ndim > 1) for busy in ports.values())


def add(ports: dict[str, np.ndarray], more: PortSeconds, times: int = 1) -> None:
    """Add `times` the seconds in `more` to the seconds in `ports`, in place."""
    for kind, seconds in more.items():
        added = seconds if times == 1 else seconds * times
        ports[kind] = ports[kind] + added if kind in ports else added


def seconds_of(loads: Mapping[str, np.ndarray], times: float, bandwidth: Number) -> PortSeconds:
    """Return the seconds for which `times` these loads [B] occupy ports at a bandwidth [B/s].

    For several clusters at once, ports with equal loads are represented by one of them.
    """
    if isinstance(bandwidth, np.ndarray):  # [clusters, 1]
        few = {port: load[:1] if (load == load[0]).all() else load for port, load in loads.items()}
        return {port: (load[:, None] * times / bandwidth.T).T for port, load in few.items()}
    return {port: load * times / bandwidth for port, load in loads.items()}


# -- sets of messages between ranks ----------------------------------------------------------------


Count = np.ndarray


@dataclass(frozen=True, eq=False)
class MessageList:
    """Messages from rank `source[m]` to rank `target[m]`."""

    source: np.ndarray  # [messages]
    target: np.ndarray  # [messages]

    def within(self, *places: np.ndarray, to: np.ndarray | None = None) -> Count:
        """Count the messages whose two ranks are equal in each of `places` (arrays [ranks], such as
        the server of each rank); only those to the ranks `to` (bool [ranks]), if given."""
        out = np.ones(self.source.size) if to is None else 1.0 * to[self.target]
        for place in places:
            out = out * (place[self.source] == place[self.target])
        return out

    def sent_by(self, count: Count, some: np.ndarray) -> Count:
        """Restrict a count to messages that `some` ranks (bool [ranks]) send."""
        return np.asarray(count * some[self.source])

    def sent_per_rank(self, count: Count) -> np.ndarray:
        """Return the number of messages that each rank sends [ranks]."""
        return np.bincount(self.source, count)

    def ends(self, numbers: np.ndarray, at_sender: bool) -> np.ndarray:
        """Return `numbers` [ranks] of each message's sender, or of its receiver [messages]."""
        return np.asarray(numbers[self.source if at_sender else self.target])

    def load(
        self, count: Count, numbers: np.ndarray, at_sender: bool, nbytes: Number
    ) -> np.ndarray:
        """Return the bytes that pass each port at the senders, or at the receivers [ports].

        `numbers` is the port of each rank [ranks]; `nbytes` are the bytes of each message [B].
        """
        passing = np.flatnonzero(count)
        at, size = self.ends(numbers, at_sender)[passing], int(numbers.max()) + 1
        return np.bincount(at, (count * nbytes)[passing], size)

    def hops(self, routes: Routes, point: np.ndarray) -> Count:
        """Count the links of a fabric that messages pass; `point` is each rank's point [ranks]."""
        return routes.between(point[self.source], point[self.target])

    def between(self, routes: Routes, point: np.ndarray, nbytes: Number) -> np.ndarray:
        """Return the bytes from point to point of a fabric [points, points]."""
        place = point[self.source] * routes.points + point[self.target]
        return np.bincount(place, nbytes, routes.points**2).reshape(routes.points, -1)


@dataclass(frozen=True, eq=False)
class EqualMessages:
    """Equal messages between `members`; the methods are those of `MessageList`."""

    members: np.ndarray  # ranks; their order is that of the rows of `pattern`
    pattern: Outer
    pairs: EqualPairs  # senders and receivers of the messages

    @property
    def _ends(self) -> tuple[np.ndarray, np.ndarray]:
        """1 for members that send, and 1 for members that receive, else 0 (each [members])."""
        return self.pairs.senders.astype(float), self.pairs.receivers.astype(float)

    def within(self, *places: np.ndarray, to: np.ndarray | None = None) -> Count:
        at, (senders, receivers) = [place[self.members] for place in places], self._ends
        if to is not None:
            receivers = receivers * to[self.members]
        reached, reaching = (self.pattern.reached(ends, *at) for ends in (receivers, senders))
        return np.stack([senders * reached, receivers * reaching])

    def sent_by(self, count: Count, some: np.ndarray) -> Count:
        return np.asarray(count * some[self.members])

    def sent_per_rank(self, count: Count) -> np.ndarray:
        return np.asarray(count[0])

    def load(
        self, count: Count, numbers: np.ndarray, at_sender: bool, nbytes: Number
    ) -> np.ndarray:
        messages, size = count[0 if at_sender else 1], int(numbers.max()) + 1
        return np.bincount(numbers[self.members], messages * nbytes, size)

    def hops(self, routes: Routes, point: np.ndarray) -> Count:
        senders, receivers = self._ends
        at, points = point[self.members], np.arange(routes.points)
        group, rank = cells(self.pattern.groups), np.arange(at.size)
        received = np.zeros((int(group.max()) + 1, routes.points))
        np.add.at(received, (group, at), receivers)
        reached = received[group]  # receivers at each point that a rank sends to [ranks, points]
        if self.pattern.same:
            reached[rank, at] -= receivers
        else:
            reached = received.sum(0) - reached
        passed = senders * (reached * routes.between(points[:, None], points)[at]).sum(1)
        return np.stack([passed, np.zeros_like(passed)])

    def between(self, routes: Routes, point: np.ndarray, nbytes: Number) -> np.ndarray:
        senders, receivers = self._ends
        at, group = point[self.members], cells(self.pattern.groups)
        table = (routes.points, int(group.max()) + 1)
        cell = np.ravel_multi_index((at, group), table)
        sent, received = (
            np.bincount(cell, ends, table[0] * table[1]).reshape(table)
            for ends in (senders, receivers)
        )
        grouped = sent @ received.T
        if not self.pattern.same:
            return np.asarray((np.outer(sent.sum(1), received.sum(1)) - grouped) * nbytes)
        own = np.bincount(at, senders * receivers, routes.points)
        return np.asarray((grouped - np.diag(own)) * nbytes)


Messages = MessageList | EqualMessages


# -- ports of messages -----------------------------------------------------------------------------


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
            arriving = messages.within(to=at.uplinked) - messages.within(at.server, to=at.uplinked)
            up = over_gpus - same + messages.sent_by(between, at.uplinked)
            down = over_gpus - same + arriving
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
            if count.any() and (share := self.cores.copying(self.link(op, place))):  # type: ignore[arg-type]
                ends = (Part("cores", share * count, self.cores.machines, e) for e in (True, False))
                yield PortUse("cores", COPYING, messages, 0.0 * count, tuple(ends))
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
