"""The fields of a cluster, as its file and --set give them.

They are frozen pydantic models, which check themselves wherever they come from. Costs read their
numbers once and then work on arrays (cost.py)."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, overload

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from gnnplan.planner.cluster.collectives import Algorithm
from gnnplan.planner.vocabulary.files import suggest
from gnnplan.planner.vocabulary.numbers import Number
from gnnplan.planner.vocabulary.schedule import HostWork
from gnnplan.planner.vocabulary.spec import (
    Bandwidth,
    Bytes,
    Latency,
    Power,
    Rate,
    Rates,
    Share,
    Size,
    Spec,
    bounded,
)

OPERATIONS = ("all_reduce", "exchange", "send")  # that links can be measured for
PLACES = ("intra_node", "inter_node", "island", "switch")
LINKS = ("intra_node", "inter_node", "island", "switch", "host", "bridge")
LISTS = ("islands", "switches", "nics")  # fields that list GPUs of a server
GEMMS = ("gemm", "gemm_bfloat16", "gemm_tf32")  # rates of a device's products, by precision
# of a device, constants that an epoch depends on, as they are doubted (doubt.py)
DOUBTED = ("gemm", "memory_bandwidth", "gather", "launch", "overlap_tax")
PRESETS = Path(__file__).resolve().parent / "presets"
LinkName = Literal["island", "intra_node", "inter_node"]  # fields of a Cluster
MOST_RANKS = 8192
MOST_PAIRED = 1024  # ranks of which a plan looks at every pair: half a GB of arrays
MOST_GPUS = 1024  # of a server
MOST_POINTS = 512  # of a fabric where servers are plugged in; ways between all pairs are kept


class Link(Spec):
    """A link by the alpha-beta model.

    A message of n bytes takes latency + n / (bandwidth * efficiency at n) seconds.
    """

    bandwidth: Bandwidth
    """As reached [B/s]."""
    latency: Latency = 10e-6
    """[s].  [default: 10us]"""
    efficiency: dict[Size, Share] = Field(default_factory=dict)
    """Message size: share of the bandwidth that it reaches, log-log between sizes.  [default: 1]"""
    core_s_per_byte: Annotated[float, Field(ge=0.0, le=1e-3)] = 0.0
    """CPU ranks: core-seconds that a byte takes, both ends together."""

    @overload
    def stretched(self, nbytes: float, messages: int = 1) -> float: ...
    @overload
    def stretched(self, nbytes: NDArray[Any], messages: int = 1) -> NDArray[np.float64]: ...
    @overload
    def stretched(self, nbytes: Number, messages: int = 1) -> Number: ...
    def stretched(self, nbytes: Number | NDArray[Any], messages: int = 1) -> Number:
        """The bytes that would take as long at the whole bandwidth [B].

        `nbytes` are sent in so many equal messages. The efficiency is interpolated log-log between
        the sizes that are given; outside them it is flat.
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
        """Whether bandwidth or latency do; a bandwidth may be a column: of many clusters."""
        return bool(np.any(self.bandwidth != other.bandwidth)) or self.latency != other.latency

    def carried(self, old: Link, new: Link) -> Link:
        """This operation, measured on the link `old`, as it would be on the link `new`.

        What the operation takes beyond its link (copies, software) stays. So a slower link slows
        all operations, and a faster one leaves their copies to wait for. An operation that beats
        its link, for example by a reduction in a switch, goes on doing so in proportion.
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
    """A GPU, or a CPU core that plays one rank. Rates are those that programs reach."""

    name: str = "unnamed"
    """Shown in plans."""
    kind: Literal["cpu", "cuda"] = "cuda"
    """cpu or cuda."""
    memory: Bytes
    """That a rank may fill [B]."""
    gemm: Rate
    """Dense matrix product in fp32, as reached [flop/s]."""
    gemm_bfloat16: Rate | None = None
    """All products of rows in bfloat16, as reached [flop/s].  [default: as `gemm`]"""
    gemm_tf32: Rate | None = None
    """All products of rows in TF32, as reached [flop/s].  [default: as `gemm`]"""
    memory_bandwidth: Bandwidth
    """Element-wise work, bytes read plus written [B/s]."""
    gather: dict[Annotated[int, Field(ge=1)], Annotated[Rates, Field(min_length=1)]] = Field(
        default_factory=dict
    )
    """Aggregation [B gathered/s] by row width and by bytes of the rows read from.  [default: a
    cache model]"""
    gather_bfloat16: Annotated[float, Field(gt=0.0, le=100.0)] = 1.0
    """Aggregation of rows in bfloat16: how many times as many bytes per second."""
    row_latency: Latency = 0.0
    """Of each row that aggregation makes, in addition to its gathers [s]."""
    row_bandwidth: Bandwidth | None = None
    """Writing these rows [B/s].  [default: contained in the rate of gathers]"""
    cache: Annotated[float, bounded(1e4, 1e10, "a cache [B]", "B")] | None = None
    """That all of the device shares (L2) [B].  [default: none]"""
    cache_bandwidth: Bandwidth | None = None
    """Rows that are in the cache [B/s].  [default: 3 x `memory_bandwidth`]"""
    launch: Latency = 8e-6
    """One framework operation, however small [s].  [default: 8us]"""
    product_code: Code = 0.0
    """Machine code that is kept for each shape of a product [B]; oneDNN keeps it, on AMD's cores
    with AVX-512. 0: MKL multiplies, and writes products into place."""
    product_code_bfloat16: Code = 0.0
    """The same of rows in bfloat16, on all cores with AVX-512."""
    power: Power | None = None
    """That it draws while it trains [W]; of a CPU, a rank's share; `--objective energy` needs it.
    [default: none]"""
    # on GPUs what was fitted to PipeGCN's printed epochs (0.1 x 1.855, traces/quoted/fitted.csv)
    overlap_tax: float = Field(
        default_factory=lambda given: 0.185 if given.get("kind") == "cuda" else 0.0, ge=0.0, le=1.0
    )
    """Share of a transfer's seconds that computation beside it loses.  [default: 0 on CPUs; 0.185
    on GPUs, as fitted to PipeGCN's figures]"""

    def multiplying(self, dtype: str) -> Device:
        """The device at the rates of products of rows in this type."""
        rate = getattr(self, f"gemm_{dtype}", None)
        return self if rate is None else self.model_copy(update={"gemm": rate})

    def code_of(self, itemsize: int) -> float:
        """Machine code that is kept for each shape of a product of numbers of so many bytes [B]."""
        return {2: self.product_code_bfloat16, 4: self.product_code}.get(itemsize, 0.0)

    def gathering(self, itemsize: int) -> float:
        """How many times float32's bytes per second aggregation reads of such numbers."""
        return self.gather_bfloat16 if itemsize == 2 else 1.0


def _lists(value: object) -> object:
    """Lists from the text that --set gives: '[[0, 1], [2, 3]]'."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        raise ValueError(
            f"must be lists of GPUs such as [[0, 1], [2, 3]], not {value!r:.80}"
        ) from None


Factor = Annotated[float, Field(gt=0.0, le=1e3, allow_inf_nan=False)]
GPUs = Annotated[tuple[tuple[Annotated[int, Field(ge=0)], ...], ...], BeforeValidator(_lists)]


class Fabric(Spec):
    """What joins the NICs of servers, if it is not one switch that never blocks.

    leaf_spine    The servers of a leaf switch share its uplinks to the spine.
    ring          A server has a cable to the next server and to the one before. Bytes that go
                  further pass the servers between.

    The uplinks of a leaf together carry what the NICs of its servers carry, divided by
    `oversubscription`. A cable of a ring carries what the NICs of one server carry, divided by it.
    """

    kind: Literal["leaf_spine", "ring"]
    """leaf_spine or ring."""
    servers_per_leaf: int | None = Field(None, ge=1)
    """Of leaf_spine, which needs it.  [default: none]"""
    oversubscription: float = Field(1.0, gt=0.0, le=1000.0)
    """How many times as many bytes per second the NICs carry together as what lies above them."""
    latency: Latency = 1e-6
    """Of each link passed [s].  [default: 1us]"""

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


# Rate of a sampler that nobody measured [edges/s]. One core of an AMD EPYC (2026) draws 50 million
# neighbours per second and lays out 63 million edges; measured were 25 to 41 and 34 to 63 million.
HOST_RATE = 5e7


class Cluster(Spec):
    """Servers with equal GPUs.

    Lists of a server's GPUs, 0 to gpus_per_server - 1, may say what a server is made of. They hold
    for every server:

        islands: [[0, 1], [2, 3]]       GPUs of an island have a link of their own (NVLink),
        island: {bandwidth: 100GB/s}    which is this
        switches: [[0, 1], [2, 3]]      what leaves a PCIe switch shares its uplink,
        switch: {bandwidth: 12GB/s}     which is this
        nics: [[0, 1], [2, 3]]          each list has a NIC of its own, as fast as inter_node

        peer_access: false              GPUs send through their server's memory, over `host` links;
        bridge: {bandwidth: 40GB/s}     the memory may be a bottleneck: each byte goes in and out

    What joins the servers (absent: one switch that never blocks):

        fabric: {kind: leaf_spine, servers_per_leaf: 4, oversubscription: 3}
        fabric: {kind: ring}

    Servers are rented whole: an epoch costs the `price` of all GPUs of the servers that it uses.
    """

    name: str = "unnamed"
    """Shown in plans."""
    servers: int = Field(1, ge=1, le=100_000)
    """How many."""
    gpus_per_server: int = Field(1, ge=1, le=MOST_GPUS)
    """How many."""
    device: Device
    """One GPU, or one CPU core that plays a rank (below)."""
    intra_node: Link
    """Link between GPUs of a server that share no island."""
    inter_node: Link | None = None
    """Link between servers: one NIC per server, or one per list of `nics`.  [default: none;
    required with several servers]"""
    host: Link | None = None
    """Link from a server's memory to a GPU.  [default: `intra_node`]"""
    host_memory: Bytes | None = None
    """Memory of a server for features and adjacency lists of mini-batches, and for what `offload`
    keeps there [B]; of CPU ranks, whose `memory` holds graph data, it is asked by `offload` alone.
    [default: enough for all; of CPU ranks none]"""
    islands: GPUs = ()
    """Lists of GPUs with NVLink between them.  [default: none]"""
    island: Link | None = None
    """That link.  [default: none]"""
    switches: GPUs = ()
    """Lists of GPUs behind a PCIe switch.  [default: none]"""
    switch: Link | None = None
    """The uplink that they share.  [default: none]"""
    nics: GPUs = ()
    """Lists of GPUs, each with a NIC of its own.  [default: one NIC per server]"""
    fabric: Fabric | None = None
    """What lies between servers (below).  [default: one switch that never blocks]"""
    peer_access: bool = True
    """false: what GPUs send passes their server's memory, except inside islands."""
    bridge: Link | None = None
    """Without peer access: the server's memory, shared by all its GPUs and NICs.  [default: never
    the bottleneck]"""
    all_reduce: Algorithm | None = None
    """ring, tree or hierarchical.  [default: tree on GPUs, ring on CPUs]"""
    host_rates: Annotated[
        dict[HostWork, Annotated[float, Field(gt=0, le=1e15)]],
        AfterValidator(lambda told: dict.fromkeys(get_args(HostWork), HOST_RATE) | told),
    ] = Field({}, validate_default=True)
    """Edges per second of a sampler, on one core: `draw` neighbours, `lay` blocks out.  [default:
    50 M each]"""
    sampler: Literal["host", "device"] = "host"
    """Who draws neighbours: host or device, which reads lists that its memory cannot hold over the
    host link. A rank that asks no other for anything lays its blocks out there, too."""
    device_rates: dict[HostWork, Annotated[float, Field(gt=0, le=1e15)]] = Field(
        default_factory=dict
    )
    """Edges per second of a sampler on the device, both `draw` and `lay`.  [default: from its
    launches and the bytes that it passes over]"""
    cores: int | None = Field(None, ge=1, le=100_000)
    """Cores of a server. Samplers of its GPUs' ranks share them, and its CPU ranks; rates are those
    of a rank with its own.  [default: of GPUs enough, a core for each CPU rank]"""
    one_machine: bool = False
    """One machine plays all servers, which share its cores."""
    collectives: dict[str, Link] = Field(default_factory=dict)
    """What was measured, such as `all_reduce.inter_node`: the link as it reaches it; links
    themselves serve for all other operations.  [default: from links]"""
    price: Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)] | None = None
    """Dollars per GPU and hour; servers are rented whole.  [default: none]"""
    provenance: dict[str, str] = Field(default_factory=dict)
    """Field: where its number is from, as 'measured 2026-11-20 on ...', 'datasheet' or 'assumed'.
    [default: empty]"""
    ranges: dict[str, tuple[Factor, Factor]] = Field(default_factory=dict)
    """Constant: how far it may be off, `[low, high]` times its value (10th and 90th percentile).
    [default: by its provenance]"""

    @property
    def ranks(self) -> int:
        return self.servers * self.gpus_per_server

    @property
    def rates_there(self) -> dict[HostWork, float]:
        """`device_rates`, where the device samples: they are of all that makes a batch."""
        return self.device_rates if self.sampler == "device" else {}

    @property
    def graph_room(self) -> float:
        """Memory of a server for graph data [B].

        Infinite where it is not given, and on CPUs, where device.memory holds graph data too.
        """
        if self.host_memory is None or self.device.kind == "cpu":
            return float(np.inf)
        return self.host_memory

    def carried(self, old: Cluster, leave: Collection[str] = ()) -> Cluster:
        """The cluster with what was measured on `old`'s links carried over to its own links.

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
