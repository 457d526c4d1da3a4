"""The fields of a cluster, as a cluster file and --set give them.

The classes are frozen pydantic models, which validate their fields wherever the values come from.
`Cost` (cost.py) reads the numbers once and then works on arrays."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_args

import numpy as np
from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from gnnplan.planner.vocabulary.files import suggest
from gnnplan.planner.vocabulary.schedule import HostWork
from gnnplan.planner.vocabulary.spec import (
    Bandwidth,
    Bytes,
    Duration,
    Latency,
    Power,
    Rate,
    Rates,
    Share,
    Size,
    Spec,
    bounded,
)

OPERATIONS = ("all_reduce", "exchange", "send")  # operations that can be measured on a link
PLACES = ("intra_node", "inter_node", "island", "switch")
LINKS = ("intra_node", "inter_node", "island", "switch", "host", "bridge")
LISTS = ("islands", "switches", "nics")  # fields that list GPUs of a server
GEMMS = ("gemm", "gemm_bfloat16", "gemm_tf32")  # matrix-product rates of a device, by precision
# constants of a device that an epoch depends on; each has a range of uncertainty (scaling.py)
DOUBTED = ("gemm", "memory_bandwidth", "gather", "launch", "overlap_tax")
PRESETS = Path(__file__).resolve().parent / "presets"
LinkName = Literal["island", "intra_node", "inter_node"]  # fields of a Cluster
Algorithm = Literal["ring", "tree", "hierarchical"]  # of an all-reduce (cost.py)
MOST_RANKS = 8192
MOST_PAIRED = 1024  # ranks up to which a plan looks at every pair: half a GB of arrays
MOST_GPUS = 1024  # per server
MOST_POINTS = 512  # points of a fabric where servers are plugged in; all pairs' routes are stored


class Link(Spec):
    """A link in the alpha-beta model.

    A message of n bytes takes latency + n / (bandwidth * efficiency at n) seconds.
    """

    bandwidth: Bandwidth
    """Bandwidth that programs reach [B/s]."""
    latency: Latency = 10e-6
    """Latency of a message [s].  [default: 10us]"""
    efficiency: dict[Size, Share] = Field(default_factory=dict)
    """Message size: share of the bandwidth that messages of this size reach, interpolated log-log
    between sizes.  [default: 1]"""
    core_s_per_byte: Annotated[float, Field(ge=0.0, le=1e-3)] = 0.0
    """CPU ranks: core-seconds per byte sent, sender and receiver together."""

    def stretched(self, nbytes: Any, messages: int = 1) -> Any:
        """Return the bytes, a number or an array, that take as long at the full bandwidth [B].

        `nbytes` are sent in `messages` equal messages. The efficiency is interpolated log-log
        between the given sizes, and constant outside them.
        """
        if not self.efficiency:
            return nbytes
        sizes = sorted(self.efficiency)
        logs = np.log(np.maximum(nbytes / messages, 1.0))
        return nbytes / np.exp(
            np.interp(logs, np.log(sizes), np.log([self.efficiency[size] for size in sizes]))
        )

    @model_validator(mode="after")
    def _takes_longer_for_more(self) -> Link:
        sizes = sorted(self.efficiency)
        for less, more in pairwise(sizes):
            if less / self.efficiency[less] > more / self.efficiency[more] * (1 + 1e-9):
                both = ", ".join(
                    f"{self.efficiency[size]:g} at {size:g} B" for size in (less, more)
                )
                raise ValueError(
                    f"efficiency may grow no faster than the size ({both}): the larger message"
                    " would take less time; mend one of the two"
                )
        return self

    def differs(self, other: Link) -> bool:
        """Whether bandwidth or latency differ; a bandwidth may be a column, one row per cluster."""
        return bool(np.any(self.bandwidth != other.bandwidth)) or self.latency != other.latency

    def carried(self, old: Link, new: Link) -> Link:
        """Convert this operation, measured on the link `old`, to the link `new`.

        The time that the operation takes beyond its link (copies, software) stays. So a slower link
        slows all operations down, and on a faster link the copies remain. An operation that is
        faster than its link (by a reduction in a switch, for example) stays so in proportion.
        """

        def seconds(measured: float, before: float, after: float) -> float:
            if measured > before:
                return after + measured - before
            return after * measured / before if before else after

        per_byte = seconds(1 / self.bandwidth, 1 / old.bandwidth, 1 / new.bandwidth)
        return self.model_copy(
            update={
                "bandwidth": 1 / per_byte,
                "latency": seconds(self.latency, old.latency, new.latency),
            }
        )


Code = Annotated[float, bounded(0.0, 1e9, "machine code [B]", "B")]


class Device(Spec):
    """A GPU, or a CPU core that runs one rank. Rates are those that programs reach."""

    usual: ClassVar[Mapping[str, str]] = {"gpu": "cuda"}
    name: str = "unnamed"
    """Shown in plans."""
    kind: Literal["cpu", "cuda"] = "cuda"
    """cpu or cuda."""
    memory: Bytes
    """Memory that a rank may use [B]."""
    gemm: Rate
    """Rate of dense matrix products in fp32 that programs reach [flop/s]."""
    gemm_bfloat16: Rate | None = None
    """Rate of dense matrix products in bfloat16 [flop/s].  [default: as `gemm`]"""
    gemm_tf32: Rate | None = None
    """Rate of dense matrix products in TF32 [flop/s].  [default: as `gemm`]"""
    memory_bandwidth: Bandwidth
    """Rate of element-wise work, in bytes read plus written [B/s]."""
    product_bandwidth: Bandwidth | None = None
    """Rate at which a CPU core reads and writes the rows of matrix products, in bytes read plus
    written [B/s]; their arithmetic takes its time besides.  [default: as `memory_bandwidth`]"""
    hash_rate: Rate | None = None
    """Rate at which a CPU core drops numbers by their hash, or does as much for a number otherwise
    (an exponential) [1/s].  [default: one in the time of 24 B of `memory_bandwidth`]"""
    edge_rate: Rate | None = None
    """Rate at which a CPU core computes attention weights of edges, or their gradients [1/s].
    [default: one in the time of ten accesses at `memory_bandwidth`]"""
    gather: dict[Annotated[int, Field(ge=1)], Annotated[Rates, Field(min_length=1)]] = Field(
        default_factory=dict
    )
    """Rate of aggregation [B gathered/s], by row width and by the size of the source rows [B].
    [default: a cache model]"""
    gather_scattered: Rates = Field(default_factory=dict)
    """Rate of aggregation [B gathered/s] in a CPU's mini-batch, which reads rows in random order,
    by the size of the source rows [B].  [default: two thirds of `gather`]"""
    batch_slowdown: Annotated[float, Field(ge=0.1, le=10.0)] = 1.0
    """Seconds of a CPU core on a mini-batch's layers, whose rows are new in each step, divided by
    what its other numbers say."""
    gather_bfloat16: Annotated[float, Field(gt=0.0, le=100.0)] = 1.0
    """Rate of aggregation in bfloat16 [B/s], divided by the rate in float32."""
    row_latency: Duration = 0.0
    """Time per output row of an aggregation, in addition to gathering its source rows [s]."""
    row_bandwidth: Bandwidth | None = None
    """Rate of writing the output rows of an aggregation [B/s].  [default: included in `gather`]"""
    cache: Annotated[float, bounded(1e4, 1e10, "a cache [B]", "B")] | None = None
    """Size of the cache that the whole device shares (L2) [B].  [default: none]"""
    launch: Duration = 8e-6
    """Time of one framework operation, however small (a kernel launch) [s].  [default: 8us]"""
    product_code: Code = 0.0
    """Machine code that oneDNN caches for each shape of a matrix product [B], on AMD cores with
    AVX-512. 0: MKL computes products, and writes them into place."""
    product_code_bfloat16: Code = 0.0
    """The same as `product_code` for rows in bfloat16, on all cores with AVX-512."""
    power: Power | None = None
    """Power that the device draws while it trains (on a CPU, the share of one rank) [W];
    `--objective energy` needs it.  [default: none]"""
    # on GPUs the value fitted to PipeGCN's printed epochs (0.1 x 1.855, traces/quoted/fitted.csv)
    overlap_tax: float = Field(
        default_factory=lambda given: 0.185 if given.get("kind") == "cuda" else 0.0, ge=0.0, le=1.0
    )
    """Share of a transfer's seconds by which it delays the computation that it overlaps.  [default:
    0 on CPUs; 0.185 on GPUs, fitted to PipeGCN's figures]"""

    def multiplying(self, dtype: str) -> Device:
        """Return the device with `gemm` set to its rate of products in this type."""
        rate = getattr(self, f"gemm_{dtype}", None)
        return self if rate is None else self.model_copy(update={"gemm": rate})

    def code_of(self, itemsize: int) -> float:
        """Return the machine code cached per shape of a product of `itemsize`-byte numbers [B]."""
        return {2: self.product_code_bfloat16, 4: self.product_code}.get(itemsize, 0.0)

    def gathering(self, itemsize: int) -> float:
        """Return the rate of aggregation of `itemsize`-byte numbers over that of float32 [1]."""
        return self.gather_bfloat16 if itemsize == 2 else 1.0


def _lists(value: object) -> object:
    """Parse lists from the text that --set gives: '[[0, 1], [2, 3]]'."""
    lists: object = None
    with suppress(ValueError, RecursionError):
        lists = json.loads(value) if isinstance(value, str) else value
    if isinstance(lists, Sequence) and all(isinstance(gpus, Sequence) for gpus in lists):
        return lists
    raise ValueError(f"must be lists of GPUs such as [[0, 1], [2, 3]], not {value!r:.80}")


Factor = Annotated[float, Field(gt=0.0, le=1e3, allow_inf_nan=False)]
GPUs = Annotated[tuple[tuple[Annotated[int, Field(ge=0)], ...], ...], BeforeValidator(_lists)]


class Fabric(Spec):
    """The network between servers, if it is not one non-blocking switch.

    leaf_spine    The servers of a leaf switch share its uplinks to the spine.
    ring          A server has a cable to the next server and to the previous server. Bytes to other
                  servers pass the servers in between.

    The bandwidth of a leaf's uplinks together is that of its servers' NICs together, divided by
    `oversubscription`. The bandwidth of a ring's cable is that of one server's NICs, divided by
    `oversubscription`.
    """

    kind: Literal["leaf_spine", "ring"]
    """leaf_spine or ring."""
    servers_per_leaf: int | None = Field(None, ge=1)
    """Servers on each leaf switch; required for leaf_spine.  [default: none]"""
    oversubscription: float = Field(1.0, gt=0.0, le=1000.0)
    """Bandwidth of the NICs below a link of the fabric, divided by the bandwidth of this link."""
    latency: Latency = 1e-6
    """Latency of each link of the fabric that a message passes [s].  [default: 1us]"""

    @property
    def below(self) -> int:
        """Servers that are plugged in at the same point."""
        return self.servers_per_leaf or 1

    @model_validator(mode="after")
    def _says_what_a_leaf_holds(self) -> Fabric:
        if (self.kind == "leaf_spine") != (self.servers_per_leaf is not None):
            raise ValueError(
                "servers_per_leaf belongs to kind leaf_spine, which needs it: give both or neither"
                f" (kind: {self.kind}, servers_per_leaf: {self.servers_per_leaf})"
            )
        return self


# Rate of an unmeasured sampler [edges/s]. One core of an AMD EPYC (2026) draws 50 million
# neighbours per second and lays out 63 million edges; other measurements gave 25 to 41 million and
# 34 to 63 million.
HOST_RATE = 5e7


class Cluster(Spec):
    """Servers with equal GPUs.

    Lists of GPUs, numbered 0 to gpus_per_server - 1, describe the inside of a server. They hold for
    every server:

        islands: [[0, 1], [2, 3]]       GPUs that are joined by a fast link (NVLink)
        island: {bandwidth: 100GB/s}    this link
        switches: [[0, 1], [2, 3]]      GPUs behind a PCIe switch, whose uplink they share
        switch: {bandwidth: 12GB/s}     this uplink
        nics: [[0, 1], [2, 3]]          GPUs that share a NIC, as fast as inter_node

        peer_access: false              GPUs send through their server's memory, over `host` links;
        bridge: {bandwidth: 40GB/s}     the memory may be a bottleneck: each byte goes in and out

    The network between servers (absent: one non-blocking switch):

        fabric: {kind: leaf_spine, servers_per_leaf: 4, oversubscription: 3}
        fabric: {kind: ring}

    Servers are rented whole: an epoch costs the `price` of all GPUs of the servers that it uses.
    """

    name: str = "unnamed"
    """Shown in plans."""
    servers: int = Field(1, ge=1, le=100_000)
    """Number of servers."""
    gpus_per_server: int = Field(1, ge=1, le=MOST_GPUS)
    """Number of GPUs, or of CPU ranks, of each server."""
    device: Device
    """One GPU, or one CPU core that runs a rank (below)."""
    intra_node: Link
    """Link between GPUs of a server that are not in the same island."""
    inter_node: Link | None = None
    """Link between servers: one NIC per server, or one NIC per list of `nics`.  [default: none;
    required with several servers]"""
    host: Link | None = None
    """Link from a server's memory to a GPU.  [default: `intra_node`]"""
    host_memory: Bytes | None = None
    """Memory of a server for the features and adjacency lists of mini-batches, and for the rows
    that `offload` stores there [B]. For CPU ranks only `offload` uses it, since their `memory`
    holds graph data.  [default: enough for all; none for CPU ranks]"""
    islands: GPUs = ()
    """Lists of GPUs with NVLink between them.  [default: none]"""
    island: Link | None = None
    """Link between two GPUs of an island.  [default: none]"""
    switches: GPUs = ()
    """Lists of GPUs behind a PCIe switch.  [default: none]"""
    switch: Link | None = None
    """The uplink that the GPUs behind a switch share.  [default: none]"""
    nics: GPUs = ()
    """Lists of GPUs that share a NIC.  [default: one NIC per server]"""
    fabric: Fabric | None = None
    """The network between servers (below).  [default: one non-blocking switch]"""
    peer_access: bool = True
    """false: GPUs send through their server's memory, except inside islands."""
    bridge: Link | None = None
    """Without peer access: the server's memory, shared by all its GPUs and NICs.  [default: never
    the bottleneck]"""
    all_reduce: Algorithm | None = None
    """Algorithm: ring, tree or hierarchical.  [default: tree on GPUs, ring on CPUs]"""
    host_rates: Annotated[
        dict[HostWork, Annotated[float, Field(gt=0, le=1e15)]],
        AfterValidator(lambda rates: dict.fromkeys(get_args(HostWork), HOST_RATE) | rates),
    ] = Field({}, validate_default=True)
    """Edges per second of a sampler on one core: `draw` (draw neighbours) and `lay` (lay out
    blocks), on a graph of 80,000 vertices.  [default: 50 M each]"""
    host_slowdown: Annotated[float, Field(ge=0.1, le=100.0)] = 1.0
    """Seconds of a sampler for an edge of a graph of 2 million vertices, which caches do not hold,
    divided by its seconds for an edge of 80,000 vertices."""
    host_call: Latency = 1e-5
    """Time of a framework's call on a GPU's host that launches nothing [s]; a CPU rank's calls take
    `device.launch`.  [default: 10us]"""
    sampler: Literal["host", "device"] = "host"
    """Where neighbours are drawn: host or device. A device reads adjacency lists that do not fit
    its memory over the host link. Blocks of a rank that fetches nothing from other ranks are laid
    out there, too."""
    device_rates: dict[HostWork, Annotated[float, Field(gt=0, le=1e15)]] = Field(
        default_factory=dict
    )
    """Edges per second of a sampler on the device, for both `draw` and `lay`.  [default: computed
    from its kernel launches and the bytes that it reads and writes]"""
    cores: int | None = Field(None, ge=1, le=100_000)
    """Cores of a server, which its samplers or its CPU ranks share. Rates are those of a rank or
    sampler on a core of its own.  [default: GPUs: enough; CPUs: one core per rank]"""
    one_machine: bool = False
    """true: all servers are processes of one machine and share its cores."""
    collectives: dict[str, Link] = Field(default_factory=dict)
    """Operation and link, such as `all_reduce.inter_node`: the link as this operation was measured
    on it. Other operations use the link itself.  [default: from links]"""
    price: Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)] | None = Field(
        None, description="dollars per GPU and hour"
    )
    """Dollars per GPU and hour; servers are rented whole.  [default: none]"""
    provenance: dict[str, str] = Field(default_factory=dict)
    """Field: the source of its number, as 'measured 2026-11-20 on ...', 'datasheet' or 'assumed'.
    [default: empty]"""
    ranges: dict[str, tuple[Factor, Factor]] = Field(default_factory=dict)
    """Constant: the range of its true value, `[low, high]` times the given value (10th and 90th
    percentile).  [default: by its provenance]"""

    @property
    def ranks(self) -> int:
        return self.servers * self.gpus_per_server

    @property
    def device_sampler_rates(self) -> dict[HostWork, float]:
        """`device_rates` if the device samples, else empty."""
        return self.device_rates if self.sampler == "device" else {}

    @property
    def graph_memory(self) -> float:
        """Memory of a server for graph data [B].

        Infinite if it is not given, and on CPUs, where device.memory holds graph data too.
        """
        if self.host_memory is None or self.device.kind == "cpu":
            return float(np.inf)
        return self.host_memory

    def shaped(self, servers: int, gpus: int) -> Cluster:
        """Return the cluster with `servers` servers and the first `gpus` GPUs of each."""
        lists = {
            name: tuple(
                kept
                for group in getattr(self, name)
                if (kept := tuple(gpu for gpu in group if gpu < gpus))
            )
            for name in LISTS
        }
        return self.model_copy(update={"servers": servers, "gpus_per_server": gpus, **lists})

    def carried(self, old: Cluster, leave: Collection[str] = ()) -> Cluster:
        """Return the cluster with the `collectives` measured on `old`'s links converted to its own.

        Operations in `leave` stay as they are. See `Link.carried`.
        """
        measured = dict(self.collectives)
        for key, link in measured.items():
            place = key.rpartition(".")[2]
            before, now = getattr(old, place, None), getattr(self, place, None)
            if before and now and key not in leave and now.differs(before):
                measured[key] = link.carried(before, now)
        return self.model_copy(update={"collectives": measured})

    @model_validator(mode="after")
    def _knows_what_was_measured(self) -> Cluster:
        known = [f"{operation}.{place}" for operation in OPERATIONS for place in PLACES]
        for key in self.collectives:
            if key not in known:
                raise ValueError(f"collectives: no operation and link {key!r}{suggest(key, known)}")
        return self

    @model_validator(mode="after")
    def _ranges_hold_their_values(self) -> Cluster:
        known = [
            *(f"device.{name}" for name in (*DOUBTED, "power")),
            *(f"{link}.{name}" for link in LINKS for name in ("bandwidth", "latency")),
            *(f"collectives.{operation}" for operation in self.collectives),
            "host_rates",
            "device_rates",
        ]
        for constant, (low, high) in self.ranges.items():
            if constant not in known:
                raise ValueError(f"ranges: no constant {constant!r}{suggest(constant, known)}")
            if not low <= 1.0 <= high:
                raise ValueError(
                    f"ranges.{constant} must be factors low <= 1 <= high around the value (low:"
                    f" {low:g}, high: {high:g}); as [0.8, 1.25]"
                )
        return self

    @model_validator(mode="after")
    def _has_a_network(self) -> Cluster:
        if self.ranks > MOST_RANKS:
            raise ValueError(
                f"servers x gpus_per_server is {self.ranks:,}; at most {MOST_RANKS:,} ranks can be"
                " planned"
            )
        if self.servers > 1 and self.inter_node is None:
            raise ValueError(
                f"servers is {self.servers}, so inter_node (the link between servers) must be given"
            )
        if self.fabric and -(-self.servers // self.fabric.below) > MOST_POINTS:
            raise ValueError(
                f"a fabric has at most {MOST_POINTS} leaves, or servers in its ring (servers:"
                f" {self.servers}); use fewer servers, or leave fabric out"
            )
        return self

    @model_validator(mode="after")
    def _holds_every_gpu_once(self) -> Cluster:
        last = self.gpus_per_server - 1
        for name in LISTS:
            lists: tuple[tuple[int, ...], ...] = getattr(self, name)
            listed = [gpu for gpus in lists for gpu in gpus]
            if lists and sorted(listed) != list(range(last + 1)):
                faults = {
                    "twice": {gpu for gpu, times in Counter(listed).items() if times > 1},
                    "not there": {gpu for gpu in listed if gpu > last},
                    "missing": set(range(last + 1)) - set(listed),
                }
                shown = ", ".join(
                    f"{fault}: {', '.join(map(str, sorted(gpus)[:20]))}"
                    for fault, gpus in faults.items()
                    if gpus
                )
                raise ValueError(
                    f"{name} must hold each of a server's {last + 1} GPUs (0 to {last}) once"
                    f" ({shown}); mend the lists or gpus_per_server"
                )
            if not all(lists):
                raise ValueError(f"{name} has an empty list; leave it out")
        return self

    @model_validator(mode="after")
    def _lists_and_links_come_together(self) -> Cluster:
        for name, link in (("islands", "island"), ("switches", "switch")):
            lists = getattr(self, name)
            if bool(lists) != (getattr(self, link) is not None):
                absent, given = (link, name) if lists else (name, link)
                raise ValueError(
                    f"{given} is given, so {absent} must be given too ({name}: lists of GPUs,"
                    f" {link}: bandwidth and latency)"
                )
        if self.bridge and self.peer_access:
            raise ValueError(
                "bridge is given, and only bytes that go through a server's memory pass it; give"
                " peer_access: false too, or leave bridge out"
            )
        return self
