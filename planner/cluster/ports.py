"""Which ports messages pass, and how many bytes of each.

That follows from where the two ranks sit:

    same island         the island's link, out of one GPU and into the other (NVLink)
    same server         the GPUs' links out and in (PCIe), and the uplinks of their PCIe switches
                        where these differ
    different servers   the NICs out and in, the uplink of a PCIe switch that shares its NIC with
                        others, and the links of the fabric on the way (fabric.py)
    no peer access      except in islands: both GPUs' links to their server's memory, and the
                        bridge that they share
    ranks on a CPU      also the cores at both ends, which copy (shared_cores.py)

A `Transfer` (transfer.py) says how long messages keep these ports busy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from gnnplan.planner.cluster.alike import Alike, Ends
from gnnplan.planner.cluster.fabric import routes
from gnnplan.planner.cluster.places import Places, Port
from gnnplan.planner.cluster.shared_cores import SharedCores
from gnnplan.planner.cluster.spec import Cluster, Fabric, Link, LinkName
from gnnplan.planner.cluster.transfer import (
    Passes,
    PortLoads,
    PortSeconds,
    PortUse,
    Transfer,
    add,
    seconds_of,
)
from gnnplan.planner.vocabulary.numbers import Number, total
from gnnplan.planner.vocabulary.outer import Outer, Pairs


@dataclass(frozen=True, eq=False)
class MessagePorts:
    """The ports of a cluster whose ranks sit at these places."""

    cluster: Cluster
    places: Places
    cores: SharedCores
    # loads of an exchange (`Outer`) of a byte per message, by who talks to whom
    _alike: dict[tuple[object, ...], list[PortLoads]] = field(default_factory=dict)

    def link(self, op: str, where: LinkName | Literal["switch"]) -> Link:
        """The link there, as measured for this operation if it was."""
        plain: Link | None = getattr(self.cluster, where)
        if where == "intra_node" and not self.cluster.peer_access:
            host = self.cluster.host or self.cluster.intra_node
            plain = host.model_copy(update={"latency": 2 * host.latency})  # up and down
        assert plain is not None  # Cluster checks that every place has its link
        return self.cluster.collectives.get(f"{op}.{where}", plain)

    def fabric_link(self, op: str, fabric: Fabric) -> Link:
        """A leaf's uplinks together, or a cable of the ring.

        It is as wide as the NICs below it, divided by the oversubscription.
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

    def uses(self, op: str, source: np.ndarray, target: np.ndarray) -> Iterator[PortUse]:
        """How messages from rank to rank [messages] use the ports, kind by kind."""
        at, cluster = self.places, self.cluster
        ranks = np.arange(at.server.size)
        same_island = at.island[source] == at.island[target]
        between_servers = at.server[source] != at.server[target]
        over_gpu_links = ~between_servers & ~same_island
        between_switches = over_gpu_links & (at.switch[source] != at.switch[target])
        up = between_switches | between_servers & at.uplinked[source]
        down = between_switches | between_servers & at.uplinked[target]
        if not cluster.peer_access:
            # Through memory: up the sender's host link, then down the receiver's or out by a NIC.
            over_gpu_links = over_gpu_links | between_servers
            up = down = over_gpu_links if cluster.switches else np.zeros_like(over_gpu_links)

        def both_ends(
            kind: str,
            place: LinkName | Literal["switch"],
            out: np.ndarray,
            into: np.ndarray,
            numbers: np.ndarray,
        ) -> Iterator[PortUse]:
            """Ports that messages pass out of their source and into their target."""
            used = out | into
            if used.any():
                leaving, arriving = np.flatnonzero(out), np.flatnonzero(into)
                yield PortUse(
                    kind,
                    int(numbers.max()) + 1,
                    self.link(op, place),
                    used,
                    lambda: [
                        Passes(f"{kind}_out", leaving, numbers[source[leaving]], np.ones(1)),
                        Passes(f"{kind}_in", arriving, numbers[target[arriving]], np.ones(1)),
                    ],
                )

        yield from both_ends("island", "island", same_island, same_island, ranks)
        yield from both_ends("gpu", "intra_node", over_gpu_links, over_gpu_links, ranks)
        yield from both_ends("switch", "switch", up, down, at.switch)
        if cluster.bridge and over_gpu_links.any():
            # Each byte is written and read; between servers, in the receiver's memory too.
            servers = np.append(
                at.server[source[over_gpu_links]], at.server[target[between_servers]]
            )
            messages = np.append(np.flatnonzero(over_gpu_links), np.flatnonzero(between_servers))
            yield PortUse(
                "bridge",
                int(at.server.max()) + 1,
                cluster.bridge,
                over_gpu_links,
                lambda: [Passes("bridge", messages, servers, np.full(1, 2.0))],
            )
        yield from both_ends("nic", "inter_node", between_servers, between_servers, at.nic)
        yield from self.cores.copying(
            lambda place: self.link(op, place), source, target, between_servers
        )
        if cluster.fabric and between_servers.any():
            yield from self._fabric_use(op, cluster.fabric, source, target, between_servers)

    def _fabric_use(
        self,
        op: str,
        fabric: Fabric,
        source: np.ndarray,
        target: np.ndarray,
        between_servers: np.ndarray,
    ) -> Iterator[PortUse]:
        ways = routes(fabric, self.cluster.servers)
        start, end = self.places.server[source], self.places.server[target]
        hops = ways.hops(start, end)
        if hops.any():
            starts, ends = start[between_servers], end[between_servers]
            yield PortUse(
                "fabric",
                ways.links,
                self.fabric_link(op, fabric),
                hops,
                lambda: [Passes("fabric", *ways.passes(start, end))],
                lambda nbytes: {
                    "fabric": ways.bytes_by_link(starts, ends, nbytes[between_servers])
                },
            )

    def loads(
        self, op: str, source: np.ndarray, target: np.ndarray, nbytes: np.ndarray, messages: int = 1
    ) -> Iterator[PortLoads]:
        """What messages from rank to rank [messages] put on the ports, kind by kind.

        The bytes of each pair go in `messages` equal messages.
        """
        for use in self.uses(op, source, target):
            yield use.starting(source, use.loads(use.link.stretched(nbytes, messages)))

    def passes(
        self, op: str, source: np.ndarray, target: np.ndarray, nbytes: np.ndarray
    ) -> tuple[list[Passes], dict[Port, float]]:
        """Which ports each message passes, and the bandwidth of those ports [B/s]."""
        passes: list[Passes] = []
        bandwidth: dict[Port, float] = {}
        for use in self.uses(op, source, target):
            stretch = use.link.stretched(nbytes) / nbytes
            for passed in use.passes():
                shares = stretch[passed.messages] * passed.shares
                passes.append(passed._replace(shares=shares))
                for number in np.unique(passed.numbers).tolist():
                    bandwidth[passed.port, number] = float(use.link.bandwidth)
        return passes, bandwidth

    def messages(
        self, op: str, source: np.ndarray, target: np.ndarray, nbytes: np.ndarray
    ) -> tuple[np.ndarray, PortSeconds]:
        """Messages from rank to rank [messages], all started at once.

        The latency of each [.., messages] [s], and how long all of them keep ports busy [s].
        """
        latencies: np.ndarray = np.zeros(source.size)
        ports: dict[str, np.ndarray] = {}
        for use in self.uses(op, source, target):
            latencies = latencies + use.hops * use.link.latency
            loads = use.loads(use.link.stretched(nbytes))
            add(ports, seconds_of(loads, 1.0, use.link.bandwidth))
        return latencies, ports

    def exchange(
        self,
        sent: Pairs,
        group: Sequence[int] | None,
        messages: int = 1,
        itemsize: int = 1,
    ) -> Transfer:
        """An all-to-all of `sent[i, j]` items from the group's i-th rank to its j-th."""
        if isinstance(sent, Outer):
            return self._alike_exchange(sent, group, messages, itemsize)
        source, target = np.nonzero(sent)
        nbytes = sent[source, target] * itemsize
        if group is not None:
            source, target = np.asarray(group)[source], np.asarray(group)[target]
        return _transfer(self.loads("exchange", source, target, nbytes, messages))

    def _alike_exchange(
        self, sent: Outer, group: Sequence[int] | None, messages: int, itemsize: int
    ) -> Transfer:
        """The same where a number per sender and one per receiver say what is sent.

        Who talks to whom is counted once for all sizes of messages."""
        members = np.arange(self.places.server.size) if group is None else np.asarray(group)
        ports, starts = dict[str, np.ndarray](), dict[str, np.ndarray]()
        latency: dict[str, Number] = {}
        for pairs in sent.equal_pairs:
            ends = pairs.senders.tobytes(), pairs.receivers.tobytes()
            asked = sent.groups.tobytes(), sent.same, *ends, members.tobytes()
            if asked not in self._alike:
                alike = Alike(self.places.of_ranks(members), sent, pairs)
                self._alike[asked] = list(self._each_loads("exchange", alike, members))
            for use in self._alike[asked]:
                nbytes = float(use.link.stretched(float(pairs.value * itemsize), messages))
                add(ports, seconds_of(use.bytes_by_port, nbytes, use.link.bandwidth))
                add(starts, {use.kind: use.starts})
                latency[use.kind] = use.link.latency
        each = (float(starts[kind].max()) * seconds for kind, seconds in latency.items())
        return Transfer(total(each), ports)

    def _each_loads(self, op: str, alike: Alike, members: np.ndarray) -> Iterator[PortLoads]:
        """What messages of one byte put on the ports; `uses` has the same rules."""
        at, cluster, ranks = alike.at, self.cluster, self.places.server.size
        on_server, on_island = alike.within(at.server), alike.within(at.island)
        on_switch = alike.within(at.switch).less(alike.within(at.switch, at.island))
        between = alike.within().less(on_server)
        over_gpu_links = on_server.less(on_island)
        switched = over_gpu_links.less(on_switch)
        # of messages between servers, those that pass an uplink at this end, and at either
        uplinked = Ends(between.out * at.uplinked, between.into * at.uplinked)
        to_uplinked = alike.to(at.uplinked)
        either = np.where(
            at.uplinked, between.out, to_uplinked.within().out - to_uplinked.within(at.server).out
        )
        up_or_down, starting = switched.plus(uplinked), switched.out + either
        if not cluster.peer_access:
            over_gpu_links = over_gpu_links.plus(between)
            up_or_down = over_gpu_links.plus(over_gpu_links, -float(not cluster.switches))
            starting = up_or_down.out
        for kind, place, ends, starts, numbers, size in (
            ("island", "island", on_island, on_island.out, members, ranks),
            ("gpu", "intra_node", over_gpu_links, over_gpu_links.out, members, ranks),
            (
                "switch",
                "switch",
                up_or_down,
                starting,
                at.switch,
                int(self.places.switch.max()) + 1,
            ),
            ("nic", "inter_node", between, between.out, at.nic, int(self.places.nic.max()) + 1),
        ):
            if starts.any():
                loads = {
                    f"{kind}_{way}": np.bincount(numbers, each, size)
                    for way, each in (("out", ends.out), ("in", ends.into))
                }
                yield PortLoads(kind, self.link(op, place), starts, loads)  # type: ignore[arg-type]
        if cluster.bridge and over_gpu_links.out.any():
            passed, servers = (
                2.0 * (over_gpu_links.out + between.into),
                int(self.places.server.max()),
            )
            loads = {"bridge": np.bincount(at.server, passed, servers + 1)}
            yield PortLoads("bridge", cluster.bridge, over_gpu_links.out, loads)
        for where, ends in (("intra_node", on_server), ("inter_node", between)):
            if ends.out.any():
                of_rank = np.bincount(members, ends.out + ends.into, ranks)
                yield from self.cores.copied(self.link(op, where), of_rank)  # type: ignore[arg-type]
        if cluster.fabric and between.out.any():
            ways = routes(cluster.fabric, cluster.servers)
            point, points = ways.at[at.server], np.arange(ways.points)
            hops = ways.between(points[:, None], points)
            starts = (alike.reaching(point, ways.points) * hops[point]).sum(1)
            if starts.any():
                link = self.fabric_link(op, cluster.fabric)
                loads = {"fabric": ways.by_link(alike.between(point, ways.points))}
                yield PortLoads("fabric", link, starts, loads)


def _transfer(loads: Iterable[PortLoads]) -> Transfer:
    """The transfer of these loads; each rank starts its messages one after the other."""
    latency: Number = 0.0
    ports: dict[str, np.ndarray] = {}
    for _, link, starts, bytes_by_port in loads:
        latency = latency + float(starts.max()) * link.latency
        add(ports, seconds_of(bytes_by_port, 1.0, link.bandwidth))
    return Transfer(latency, ports)
