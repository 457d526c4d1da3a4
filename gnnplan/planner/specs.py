"""What a question is made of: a cluster and a workload, as files and --set may say them.

Frozen pydantic models: they check themselves wherever they come from. Hot loops read numbers out of them
once (cost.py, profile.py) and then work on arrays.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection
from itertools import pairwise
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from gnnplan.planner.collectives import Algorithm
from gnnplan.planner.units import kind, quantity

HostWork = Literal["draw", "lay"]  # of a sampler: neighbours drawn, blocks laid out
Placement = Literal["island", "intra_node", "inter_node"]
ALL = -1  # a fanout: every neighbour
FANOUT = 10  # where none is given
MOST = 10**12  # of what is counted: vertices, seeds of a batch, epochs
MOST_BATCH_LAYERS = 1000  # of a mini-batch, which reaches a hop further by each
MOST_RANKS = 4096  # a plan looks at every pair of them
MOST_POINTS = 512  # of a fabric where servers are plugged in: ways between all pairs of them are kept


def _bounded(low: float, high: float, what: str, unit: str) -> BeforeValidator:
    """Parse a quantity and refuse what can only be a unit mix-up."""

    def check(value: str | float) -> float:
        number = quantity(value)
        if kind(value) not in ("", unit):
            raise ValueError(f"{what} is given in {unit}, but {value!r:.80} is in {kind(value)}. Check the unit")
        if not low <= number <= high:
            raise ValueError(f"{what} must lie in [{low:g}, {high:g}] (SI: B, s, flop); {value!r:.80} is {number:g}. Check the unit")
        return number

    return BeforeValidator(check)


Bandwidth = Annotated[float, _bounded(1e3, 1e14, "a bandwidth [B/s]", "B/s")]
Latency = Annotated[float, _bounded(0.0, 10.0, "a latency [s]", "s")]
Bytes = Annotated[float, _bounded(1e6, 1e15, "a memory size [B]", "B")]
Size = Annotated[float, _bounded(1.0, 1e13, "a size [B]", "B")]
PerSecond = Annotated[float, Field(ge=1e3, le=1e15)]
Share = Annotated[float, Field(gt=0.0, le=1.0)]
Rates = Annotated[dict[Size, Bandwidth], BeforeValidator(lambda told: told if isinstance(told, dict) else {1.0: told})]  # by size
Number = Any  # float or numpy array
Rate = Annotated[float, _bounded(1e6, 1e18, "a compute rate [flop/s]", "flop/s")]


class Spec(BaseModel):
    """Frozen, and unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Link(Spec):
    """Alpha-beta: a message of n bytes takes latency + n / (bandwidth * efficiency at n)."""

    bandwidth: Bandwidth
    latency: Latency = 10e-6
    efficiency: dict[Size, Share] = Field(default_factory=dict)  # size of a message -> share of the bandwidth that it reaches; empty: all
    work: Annotated[float, Field(ge=0.0, le=1e-3)] = 0.0  # of CPU ranks: seconds of a core that a byte takes, at both ends together
    wake: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0  # and a message, however small

    def stretched(self, nbytes: Number, messages: int = 1) -> Number:
        """So many bytes, in equal messages, take as long as how many at the whole bandwidth: log-log between the sizes told, flat
        outside [B]."""
        if not self.efficiency:
            return nbytes
        sizes = sorted(self.efficiency)
        logs = np.log(np.maximum(nbytes / messages, 1.0))
        return nbytes / np.exp(np.interp(logs, np.log(sizes), np.log([self.efficiency[size] for size in sizes])))

    @model_validator(mode="after")
    def _takes_longer_for_more(self) -> Link:
        sizes = sorted(self.efficiency)
        for less, more in pairwise(sizes):
            if less / self.efficiency[less] > more / self.efficiency[more] * (1 + 1e-9):
                told = ", ".join(f"{self.efficiency[size]:g} at {size:g} B" for size in (less, more))
                raise ValueError(f"efficiency may grow no faster than the size ({told}): the larger message would take less time; mend "
                                 "one of the two")  # fmt: skip
        return self

    def carried(self, old: Link, new: Link) -> Link:
        """An operation measured on the link `old`, on `new`: what it takes beyond its link (copies, software) stays.

        So a slower link is what it says for all, and a faster one leaves copies to wait for. An operation that beats its link
        (reduction in a switch) goes on doing so, in proportion.
        """
        def seconds(took: float, before: float, after: float) -> float:
            return after + took - before if took > before else after * took / before if before else after

        per_byte = seconds(1 / self.bandwidth, 1 / old.bandwidth, 1 / new.bandwidth)
        return self.model_copy(update={"bandwidth": 1 / per_byte, "latency": seconds(self.latency, old.latency, new.latency)})


class Device(Spec):
    """A GPU, or a CPU core that plays one rank."""

    name: str = "unnamed"
    kind: Literal["cpu", "cuda"] = "cuda"
    memory: Bytes  # [B] that a rank may fill
    gemm: Rate  # dense matrix product, fp32 [flop/s], as reached
    memory_bandwidth: Bandwidth  # element-wise work, bytes read plus written [B/s], as reached
    memory_rates: Rates = Field(default_factory=dict)  # the same by the size of a tensor; empty: memory_bandwidth at all sizes
    hash_rate: PerSecond | None = None  # dropout [numbers/s]; None: memory decides
    edge_rate: PerSecond | None = None  # attention, but for its sums [weights of an edge/s]; None: memory decides
    # row width -> bytes of the rows read from -> aggregation [B gathered/s]
    gather: dict[Annotated[int, Field(ge=1)], Annotated[Rates, Field(min_length=1)]] = Field(default_factory=dict)
    row_latency: Latency = 0.0  # besides, of each row that aggregation makes, however few it gathers for it [s]
    row_bandwidth: Bandwidth | None = None  # at which it writes these [B/s]; None: it is in what gathers take
    cache: Annotated[float, _bounded(1e4, 1e10, "a cache [B]", "B")] | None = None  # [B] that all of it shares (L2)
    cache_bandwidth: Bandwidth | None = None  # of rows that are there [B/s]; None: 3 x memory_bandwidth
    launch: Latency = 8e-6  # one framework operation, however small [s]
    overlap_tax: float = Field(0.0, ge=0.0, le=1.0)  # share of a transfer's seconds that computation beside it loses


def _lists(value: object) -> object:
    """--set gives them as text: '[[0, 1], [2, 3]]'."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        raise ValueError(f"must be lists of GPUs such as [[0, 1], [2, 3]], not {value!r:.80}") from None


GPUs = Annotated[tuple[tuple[Annotated[int, Field(ge=0)], ...], ...], BeforeValidator(_lists)]


class Fabric(Spec):
    """What lies between the cards of servers, where it is not one switch that never blocks.

        leaf_spine    the servers of a leaf switch share its uplinks to the spine
        ring          a server has a cable to the next one and to the one before; what goes further passes those between

    Both carry what the cards below carry (a leaf's servers', one server's), divided by `oversubscription`.
    """

    kind: Literal["leaf_spine", "ring"]
    servers_per_leaf: int | None = Field(None, ge=1)
    oversubscription: float = Field(1.0, gt=0.0, le=1000.0)
    latency: Latency = 1e-6  # of each link passed: a further switch, or server of the ring [s]

    @property
    def below(self) -> int:
        """Servers plugged in at the same point."""
        return self.servers_per_leaf or 1

    @model_validator(mode="after")
    def _says_what_a_leaf_holds(self) -> Fabric:
        if (self.kind == "leaf_spine") != (self.servers_per_leaf is not None):
            raise ValueError("servers_per_leaf belongs to kind leaf_spine, which needs it: give both or neither (kind: "
                             f"{self.kind}, servers_per_leaf: {self.servers_per_leaf})")  # fmt: skip
        return self


class Cluster(Spec):
    """Servers with equal GPUs. `collectives` holds what was measured, as 'all_reduce.intra_node'; links serve for the rest.

    What a server is made of may be told by lists of its GPUs (0 to gpus_per_server - 1), alike in every server:

        islands: [[0, 1], [2, 3]]         island: {bandwidth: 100GB/s}    GPUs of an island have this link between them (NVLink)
        switches: [[0, 1], [2, 3]]        switch: {bandwidth: 12GB/s}     what leaves a PCIe switch shares its uplink
        nics: [[0, 1], [2, 3]]            each list has a network card of inter_node's bandwidth of its own

        peer_access: false                                                what GPUs send goes over `host` links through memory,
        bridge: {bandwidth: 40GB/s}                                       which may be a bottleneck of its own: a byte in, a byte out

    What is between servers:

        fabric: {kind: leaf_spine, servers_per_leaf: 4, oversubscription: 3}     or {kind: ring}; absent: one switch that never blocks

    `price` is of a GPU; servers are rented whole, so an epoch costs that of all GPUs of the servers that a plan uses.
    """

    name: str = "unnamed"
    servers: int = Field(1, ge=1, le=100_000)
    gpus_per_server: int = Field(1, ge=1, le=1024)
    device: Device
    intra_node: Link  # between GPUs of a server that share no island
    inter_node: Link | None = None  # one network card per server, or one per list of nics
    host: Link | None = None  # from a server's memory to a GPU; absent: as intra_node
    islands: GPUs = ()
    island: Link | None = None
    switches: GPUs = ()
    switch: Link | None = None
    nics: GPUs = ()
    fabric: Fabric | None = None
    peer_access: bool = True  # false: what GPUs send goes through their server's memory, but inside islands
    bridge: Link | None = None  # without peer access: to and from a server's memory, all its GPUs and cards together
    all_reduce: Algorithm | None = None  # None: the faster one of ring and tree with NCCL, a ring with Gloo
    host_rates: dict[HostWork, Annotated[float, Field(gt=0, le=1e15)]] = Field(default_factory=dict)  # [edges/s] of a sampler
    sampler: Literal["host", "device"] = "host"  # who draws neighbours; lists that a device has no room for it reads over the host link
    cores: int | None = Field(None, ge=1, le=100_000)  # CPU ranks share these, per server; rates are of one that has its own
    crowding: Annotated[float, Field(ge=1.0, le=10.0)] = 1.0  # times as long a core computes whose ranks take turns: caches are another's
    refill: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0  # [s] that a core computes longer after waiting, where ranks take turns
    one_machine: bool = False  # all servers are played by one, whose cores they share
    collectives: dict[str, Link] = Field(default_factory=dict)
    price: Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)] | None = None  # [$/h]
    provenance: dict[str, str] = Field(default_factory=dict)  # field -> 'measured 2026-11-20 on ...' | 'datasheet' | 'assumed'

    @property
    def ranks(self) -> int:
        return self.servers * self.gpus_per_server

    def carried(self, old: Cluster, leave: Collection[str] = ()) -> Cluster:
        """With what was measured on `old`'s links carried over to this cluster's, but for the operations to leave."""
        measured = dict(self.collectives)
        for key, link in measured.items():
            place = key.rpartition(".")[2]
            before, now = getattr(old, place, None), getattr(self, place, None)
            if before and now and before != now and key not in leave:
                measured[key] = link.carried(before, now)
        return self.model_copy(update={"collectives": measured})

    @model_validator(mode="after")
    def _has_a_network(self) -> Cluster:
        if self.ranks > MOST_RANKS:
            raise ValueError(f"servers x gpus_per_server is {self.ranks:,}; at most {MOST_RANKS:,} ranks can be planned")
        if self.servers > 1 and self.inter_node is None:
            raise ValueError(f"servers is {self.servers}, so inter_node (the link between servers) must be given")
        if self.fabric and -(-self.servers // self.fabric.below) > MOST_POINTS:
            raise ValueError(f"a fabric has at most {MOST_POINTS} leaves, or servers in its ring (servers: {self.servers}); use fewer "
                             "servers, or leave fabric out")  # fmt: skip
        return self

    @model_validator(mode="after")
    def _holds_every_gpu_once(self) -> Cluster:
        """Raises ValueError where a list of GPUs is no partition of a server's, or where it and its link do not come together."""
        last = self.gpus_per_server - 1
        for name, lists in (("islands", self.islands), ("switches", self.switches), ("nics", self.nics)):
            named = [gpu for gpus in lists for gpu in gpus]
            if lists and sorted(named) != list(range(last + 1)):
                wrong = {"twice": {g for g, times in Counter(named).items() if times > 1}, "not there": {g for g in named if g > last},
                         "missing": set(range(last + 1)) - set(named)}  # fmt: skip
                told = ", ".join(f"{what}: {', '.join(map(str, sorted(gpus)[:20]))}" for what, gpus in wrong.items() if gpus)
                raise ValueError(f"{name} must hold each of a server's {last + 1} GPUs (0 to {last}) once ({told}); mend the lists or "
                                 "gpus_per_server")  # fmt: skip
            if not all(lists):
                raise ValueError(f"{name} has an empty list; leave it out")
        for name, lists, link in (("islands", self.islands, "island"), ("switches", self.switches, "switch")):
            if bool(lists) != (getattr(self, link) is not None):
                absent, given = (link, name) if lists else (name, link)
                raise ValueError(f"{given} is given, so {absent} must be given too ({name}: lists of GPUs, {link}: bandwidth and latency)")
        if self.bridge and self.peer_access:
            raise ValueError("bridge is given, and only bytes that go through a server's memory pass it; give peer_access: false too, "
                             "or leave bridge out")  # fmt: skip
        return self


class Workload(Spec):
    """A GNN and how it is trained."""

    model: Literal["gcn", "sage", "gcnii", "gat", "resgcn", "sgc"] = "sage"
    layers: int = Field(3, ge=1, le=10_000)
    hidden: int = Field(256, ge=1, le=1_000_000)  # SGC has none: it is as wide as there are classes
    dropout: float = Field(0.0, ge=0.0, lt=1.0)
    mode: Literal["full", "mini"] = "full"
    batch: int = Field(1024, ge=1, le=MOST)
    fanout: tuple[Annotated[int, Field(ge=1, le=MOST)], ...] | Literal["full"] | None = None  # seeds outwards; None: FANOUT per layer
    seed: int = Field(0, ge=0, lt=2**31)
    optimizer: Literal["adam", "sgd"] = "adam"
    lr: float = Field(0.01, gt=0.0, le=100.0)
    epochs: int = Field(50, ge=1, le=MOST)
    dtype: Literal["float32", "float64"] = "float32"
    alpha: float = Field(0.1, ge=0.0, le=1.0)  # GCNII: strength of the initial residual
    theta: float = Field(0.5, gt=0.0, le=1e6)  # GCNII: beta_l = log(theta / l + 1)
    heads: int = Field(4, ge=1, le=10_000)  # GAT: of hidden layers; the last has one
    aggregation: Literal["softmax", "sum"] = "softmax"  # ResGCN+
    norm: Literal["none", "layer", "batch"] | None = None  # before the activation of hidden layers; None: 'layer' for resgcn, else 'none'

    @model_validator(mode="after")
    def _is_a_model(self) -> Workload:
        if self.model == "gat" and self.layers > 1 and self.hidden % self.heads:
            fitting = max(n for n in range(1, self.heads + 1) if self.hidden % n == 0)
            raise ValueError(f"hidden must be a multiple of gat's heads (hidden: {self.hidden}, heads: {self.heads}); use heads={fitting}")
        if self.model in ("gcnii", "sgc") and self.norm in ("layer", "batch"):
            other = "resgcn for a deep model" if self.model == "gcnii" else "gcn for a model"
            raise ValueError(f"{self.model} is defined without a norm (norm: {self.norm}); use norm=none, or {other} with one")
        if self.mode == "mini" and isinstance(self.fanout, tuple) and len(self.fanout) != self.layers:
            raise ValueError(f"fanout has a number per layer, from the seeds outwards (fanout: {len(self.fanout)} numbers, layers: "
                             f"{self.layers}); use {self.layers} numbers, or fanout=full")  # fmt: skip
        if self.mode == "mini" and self.layers > MOST_BATCH_LAYERS:
            raise ValueError(f"a mini-batch reaches a hop further by every layer, and {MOST_BATCH_LAYERS:,} are the most (layers: "
                             f"{self.layers:,}); use fewer layers, or mode=full")  # fmt: skip
        if self.mode == "mini" and self.norm == "batch":
            raise ValueError("batch norm needs all vertices at once, and a mini-batch has some (norm: batch); use norm=layer or mode=full")
        return self

    @property
    def fanouts(self) -> tuple[int, ...]:
        """Neighbours drawn per layer, from the seeds outwards."""
        if isinstance(self.fanout, tuple):
            return self.fanout
        return (ALL if self.fanout == "full" else FANOUT,) * self.layers

    @property
    def itemsize(self) -> int:
        return 8 if self.dtype == "float64" else 4
