"""The papers' closed forms, one function each: what a textbook would print, nothing measured and
nothing decided.

Every argument may be a number or a numpy array; arrays broadcast, and whole numbers stay exact
(narrow integers are widened to 64 bits). Symbols: N vertices, E directed edges, L layers, H width
of hidden rows, F width of input features, M ranks, S servers of G GPUs, W parameters, b bytes per
number, B_i the halo of part i. Volumes are per epoch in steady state, all ranks together, each byte
counted once where it is sent. An argument outside a formula's domain is a ValueError.

Sources: GNNPipe (Chen et al. 2023), GraNNDis (Song et al. 2023), PipeGCN (Wan et al., ICLR 2022),
P3 (Gandhi and Iyer, OSDI 2021), GSplit (Polisetty et al. 2023), nccl-tests (PERFORMANCE.md)."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import numpy as np

Number = Any  # float, int or numpy array
Rule = tuple[str, Callable[[Any], Any]]
F = TypeVar("F", bound=Callable[..., Any])

NOT_NEGATIVE: Rule = ("at least 0", lambda x: x >= 0)
POSITIVE: Rule = ("above 0", lambda x: x > 0)
COUNT: Rule = ("at least 1", lambda x: x >= 1)
SHARE: Rule = ("between 0 and 1", lambda x: (x >= 0) & (x <= 1))
# by the name of an argument
RULES: dict[str, Rule] = {
    **dict.fromkeys(("vertices", "edges", "halo_rows", "rows", "inputs", "ids"), NOT_NEGATIVE),
    **dict.fromkeys(("group_halo", "parameters", "slowdown"), NOT_NEGATIVE),
    **dict.fromkeys(("exchange", "all_reduce", "kappa", "forward", "backward"), NOT_NEGATIVE),
    **dict.fromkeys(("parts", "ranks", "servers", "gpus", "stages", "layers", "chunks"), COUNT),
    **dict.fromkeys(("hidden", "features", "itemsize", "tensors", "ways", "copies"), COUNT),
    **dict.fromkeys(("max_hop", "fanout", "factor"), COUNT),
    **dict.fromkeys(("compute", "internal", "external", "growth", "per_layer"), POSITIVE),
    **dict.fromkeys(("own", "sampling", "preload", "degree"), POSITIVE),
    **dict.fromkeys(("edge_probability", "exponent"), SHARE),
}


def _wide(value: Any) -> Any:
    """Integers of numpy as int64: int32 row counts times bytes would wrap, and unsigned ones wrap
    at `parts - 1`."""
    if isinstance(value, (list, tuple)):
        return [_wide(v) for v in value]
    dtype = getattr(value, "dtype", None)
    return (
        value.astype(np.int64) if dtype is not None and np.issubdtype(dtype, np.integer) else value
    )


def _formula(function: F, **own: Rule) -> F:
    """Check the arguments by `own` rules or RULES and widen them; the body is the formula alone."""
    signature, rules = inspect.signature(function), RULES | own

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        for name, value in given.items():
            if name in rules and not np.all(rules[name][1](np.asarray(value))):
                rule = rules[name][0]
                raise ValueError(f"{function.__name__}: {name} must be {rule}, got {value!r}")
        return function(**{name: _wide(value) for name, value in given.items()})

    return cast(F, call)


# -- graph parallel: every rank fetches its halo before every layer


@_formula
def halo_bytes(halo_rows: Number, widths: Sequence[Number], itemsize: Number = 4) -> Number:
    """Hidden halo rows there and their gradients back [B/epoch]: `2 b sum_{l=1..L-1} H_l * sum_i
    |B_i|`.

    `halo_rows` = sum_i |B_i| [rows]; `widths` = H_1 .. H_{L-1} [numbers per row], one per exchange,
    each the width that is really sent (a layer that multiplies first may send the narrower side);
    `itemsize` [B per number]. Source: GNNPipe Sec. 3.1.1 (there forward only, L equal widths), with
    the input rows left out: they never change and their gradient is never needed, see
    `input_bytes`. Valid for exact and for stale halos alike.

    Squirrel in 8 METIS parts (volume objective: 10,968 halo rows), 32 layers of 1000; with the
    all-reduce 4.21 GiB, printed 4.43 (Table 4, which counts L widths).

    >>> halo = halo_bytes(10_968, [1000] * 31)
    >>> halo, round((halo + ring_all_reduce_bytes(8, 32_094_000)) / 2**30, 2)
    (2720064000, 4.21)
    """
    return sum((2 * itemsize * width * halo_rows for width in widths), 0 * itemsize * halo_rows)


@_formula
def halo_bytes_gnnpipe(
    halo_rows: Number, layers: Number, hidden: Number, itemsize: Number = 4
) -> Number:
    """The same as GNNPipe counts it [B/epoch]: `2 b L H sum_i |B_i|`, the input exchange taken for
    one more hidden one.

    `halo_rows` [rows], `layers` [layers], `hidden` [numbers per row], `itemsize` [B per number].
    Source: GNNPipe Sec. 3.1.1. Valid for comparison with GNNPipe Table 4 (graph parallel); L /
    (L-1) of `halo_bytes`, 3 % more at 32 layers.

    Squirrel, 8 METIS parts, with the all-reduce; printed 4.43 GiB (Table 4), between the two
    objectives of METIS (volume, cut).

    >>> reduced = ring_all_reduce_bytes(8, 32_094_000)
    >>> halos = [halo_bytes_gnnpipe(rows, 32, 1000) for rows in (10_968, 12_697)]
    >>> [round((halo + reduced) / 2**30, 2) for halo in halos]
    [4.29, 4.7]
    """
    return 2 * itemsize * layers * hidden * halo_rows


@_formula
def input_bytes(rows: Number, features: Number, itemsize: Number = 4) -> Number:
    """Input features that a rank or server takes from others once, before the first epoch [B]: `F b
    * rows`.

    `rows` [rows]: the halo of all parts (graph parallel), or GraNNDis' preload, sum over servers of
    the external vertices within L hops; `features` [numbers per row], `itemsize` [B per number].
    Source: GraNNDis Sec. 4.2 (text). Valid for constant features; set-up, not per epoch.

    >>> input_bytes(1000, 602)
    2408000
    """
    return itemsize * features * rows


@_formula
def worst_halo_rows(vertices: Number, parts: Number) -> Number:
    """Halo rows when every vertex is wanted by every other part [rows]: `sum_i |B_i| = N (M-1)`.

    `vertices` [rows], `parts` [parts]. Source: GNNPipe Sec. 3.1.1. Valid for every graph and
    partition as an upper bound.

    >>> worst_halo_rows(5201, 8)
    36407
    """
    return vertices * (parts - 1)


@_formula
def expected_halo_rows(vertices: Number, parts: Number, edge_probability: Number) -> Number:
    """Expected halo rows of a random graph [rows]: `M (N - N/M) (1 - (1-p)^(N/M))`.

    `vertices` [rows], `parts` [parts], `edge_probability` p [1] that two vertices are neighbours.
    Source: GNNPipe Sec. 3.1.1, E|B_i| summed over parts of N/M vertices each. Valid for independent
    edges, where no partitioner helps: real graphs lie below.

    The paper's example is 0.92 of the worst case, at a mean degree of 20:

    >>> round(float(expected_halo_rows(1e6, 8, 2e-5) / worst_halo_rows(1e6, 8)), 2)
    0.92
    """
    with np.errstate(divide="ignore"):  # p = 1: log 0 = -inf, and exp of that is the right 0
        return vertices * (parts - 1) * -np.expm1(vertices / parts * np.log1p(-edge_probability))


@_formula
def ring_all_reduce_bytes(ranks: Number, parameters: Number, itemsize: Number = 4) -> Number:
    """Weight gradients around the ring [B/step], all ranks: `2 (M-1) W b`.

    `ranks` [ranks], `parameters` W [numbers], `itemsize` [B per number]. Source: nccl-tests, bus
    factor 2(n-1)/n per rank. Valid for ring algorithms (trees send the same in all, differently
    spread).

    GCN on Squirrel has 2089*1000 + 30*1000*1000 + 1000*5 weights and GraphSAGE twice that. Printed
    volumes on 8 GPUs are 4.43 and 6.10 GiB (GNNPipe Table 4); this is their whole difference:

    >>> round(ring_all_reduce_bytes(8, 32_094_000) / 2**30, 2), round(6.10 - 4.43, 2)
    (1.67, 1.67)
    """
    return 2 * (ranks - 1) * parameters * itemsize


# -- PipeGCN: the halo of the epoch before, exchanged beside the computation


@functools.partial(_formula, compute=NOT_NEGATIVE)
def pipegcn_epoch(
    compute: Number,
    exchange: Number,
    all_reduce: Number = 0.0,
    slowdown: Number = 0.0,
    kappa: Number = 1.0,
) -> Number:
    """Epoch with a halo that is one epoch old [s]: `max((1+c) sum compute, kappa sum exchange) +
    all-reduce`.

    `compute`, `exchange`, `all_reduce` [s], summed over layers, as they take without overlap;
    `slowdown` c [1]: what the exchange takes from the computation; `kappa` [1]: below 1 where
    staging copies run side by side (one server), about 1 where a network card binds. Source: fitted
    to PipeGCN Tables 5 and 6, the paper has no formula. Valid in steady state with one
    communication stream: a layer's exchange has until the same layer of the next epoch.

    Reddit on 2 and 4 GPUs (Table 6: compute 0.17, 0.07; exchange 0.34, 0.40): printed 0.27 and 0.23
    s, with 0.00 and 0.10 s of exchange exposed. Papers100M on 32 GPUs (Table 5: 10.5 s, of which
    6.6 s exchange): printed 6.5 s.

    >>> compute, exchange = np.array([0.17, 0.07]), np.array([0.34, 0.40])
    >>> reduce = np.array([0.02, 0.03])
    >>> pipegcn_epoch(compute, exchange, reduce, slowdown=0.45, kappa=0.5).round(2).tolist()
    [0.27, 0.23]
    >>> alone = pipegcn_epoch(compute, 0, 0, slowdown=0.45)
    >>> exposed = pipegcn_epoch(compute, exchange, 0, slowdown=0.45, kappa=0.5) - alone
    >>> exposed.round(2).tolist()
    [0.0, 0.1]
    >>> float(pipegcn_epoch(10.5 - 6.6, 6.6))
    6.6
    """
    return np.maximum((1 + slowdown) * compute, kappa * exchange) + all_reduce


# -- GNNPipe: layers in a pipeline, graph in chunks


@_formula
def pipeline_bytes(
    stages: Number, vertices: Number, hidden: Number, itemsize: Number = 4, tensors: Number = 1
) -> Number:
    """Rows handed from stage to stage and gradients back [B/epoch]: `2 (stages-1) N H b`, once per
    tensor handed on.

    `stages` [stages], `vertices` [rows], `hidden` [numbers per row], `itemsize` [B per number],
    `tensors` [1]: 2 for GCNII, whose initial residual travels along. Source: GNNPipe Sec. 3.1.2
    (forward; the backward pass costs the same). Valid for equal widths at all stage boundaries, any
    number of chunks.

    Squirrel on 8 stages; printed 0.27 GiB, and 0.54 for GCNII (Table 4). Reddit: 1.22 and 2.43.

    >>> [round(pipeline_bytes(8, 5201, 1000, tensors=n) / 2**30, 2) for n in (1, 2)]
    [0.27, 0.54]
    >>> [round(pipeline_bytes(8, 232_965, 100, tensors=n) / 2**30, 2) for n in (1, 2)]
    [1.22, 2.43]
    """
    return 2 * (stages - 1) * vertices * hidden * itemsize * tensors


@_formula
def bubble_share(stages: Number, chunks: Number) -> Number:
    """Share of a stage's time in which it has no chunk [1]: `(stages-1) / (K + stages-1)`.

    `stages` [stages], `chunks` K [chunks]. Source: GPipe's bubble as used by GNNPipe Sec. 3.2 and
    4.6. Valid for equal stages and chunks, no communication: a lower bound (printed mean 26.5 %,
    Sec. 4.6, with unequal stages).

    >>> f"{bubble_share(8, 32):.1%}"
    '17.9%'
    """
    return (stages - 1) / (chunks + stages - 1)


@_formula
def pipeline_slots(stages: Number, chunks: Number) -> Number:
    """Chunk slots from the first chunk entering to the last leaving, one way [slots]: `K + stages -
    1`.

    `stages` [stages], `chunks` K [chunks]. Source: GNNPipe Sec. 3.2.2, Algorithm 1. Valid for equal
    stages and chunks; the backward pass takes as many.

    >>> pipeline_slots(8, 32)
    39
    """
    return chunks + stages - 1


@_formula
def pipeline_time(stages: Number, chunks: Number, forward: Number, backward: Number) -> Number:
    """Forward and backward pipeline of one epoch [s]: `(K + stages - 1) (t_f + t_b)`.

    `stages` [stages], `chunks` K [chunks], `forward`, `backward` [s]: one stage on one chunk.
    Source: GNNPipe Sec. 3.2.2, Algorithm 1. Valid for equal stages and chunks, no communication,
    and a backward pass that starts when the forward pass has drained.

    >>> pipeline_time(8, 32, 1.0, 2.0)
    117.0
    """
    return pipeline_slots(stages, chunks) * (forward + backward)


@_formula
def hybrid_bytes(
    stages: Number,
    vertices: Number,
    hidden: Number,
    layers: Number,
    group_halo: Number,
    gpus: Number,
    parameters: Number,
    itemsize: Number = 4,
    tensors: Number = 1,
) -> Number:
    """Pipeline of groups of g GPUs [B/epoch]: `2 (stages-1) N H b + 2 b L H halo + 2 (g-1) W b`.

    As `pipeline_bytes` and: `layers` L [layers], of all stages together; `group_halo` [rows]: rows
    that cross inside the group of one layer, in whichever chunk their neighbour is, summed over its
    GPUs (mean over groups where they differ; 0 for groups of one); `gpus` g [GPUs per group];
    `parameters` W [numbers], of all stages. A layer lives in one group only, so the sum over groups
    and their layers is L times one group's halo. Source: GNNPipe Sec. 3.2.3 (text; checked against
    Table 4). Valid for equal widths; L counts the input exchange as one more hidden one, use L-1
    for steady state.

    Squirrel, 4 stages of 2 GPUs, 32 METIS chunks cut in two each (4,275 rows cross); printed 1.38
    and 1.61 GiB for GCN and GraphSAGE.

    >>> [round(hybrid_bytes(4, 5201, 1000, 32, 4275, 2, n * 32_094_000) / 2**30, 2) for n in (1, 2)]
    [1.37, 1.61]
    """
    inside = 2 * itemsize * layers * hidden * group_halo
    return (
        pipeline_bytes(stages, vertices, hidden, itemsize, tensors)
        + inside
        + ring_all_reduce_bytes(gpus, parameters, itemsize)
    )


# -- GraNNDis: each server computes its surroundings too. Equations as printed: shown with a plan,
# never deciding
# `growth` is how many times larger a server's part becomes. As printed D^a L (`growth_printed`),
# measured 1 + external / own (`growth_measured`); every function takes either.


@_formula
def growth_printed(per_layer: Number, layers: Number) -> Number:
    """Growth of the dependency graph as the paper writes it [1]: the product `D^a L`.

    `per_layer` D^a [1], 1.5 to 2.0 in the paper; `layers` L [layers]. Source: GraNNDis Eq. 4, Sec.
    4.2: the text's example needs the product, the prose speaks of growth per layer, a power. Valid
    as printed only: it grows without bound.

    >>> growth_printed(2, 3)
    6
    """
    return per_layer * layers


@functools.partial(_formula, external=NOT_NEGATIVE)
def growth_measured(own: Number, external: Number) -> Number:
    """Growth of a server's part as counted on the graph [1]: `1 + external / own`.

    `own`, `external` [rows]: vertices of the server's part, and those of others that it computes or
    loads. Source: this project, in place of D^a L in GraNNDis Eq. 4. Valid for any depth, sampled
    or not; at most S for S equal parts.

    >>> growth_measured(250, 750)
    4.0
    """
    return 1 + external / own


@_formula
def growth_sampling(max_hop: Number, fanout: Number, exponent: Number) -> Number:
    """Growth under expansion-aware sampling as printed [1]: `m^a k`.

    `max_hop` m [hops], `fanout` k [neighbours], `exponent` a [1]. Source: GraNNDis Eq. 8, Sec. 4.3.
    Valid as printed only (the prose has m^(a k)).

    The paper's defaults, one hop and fanout 15:

    >>> growth_sampling(1, 15, 0.3)
    15.0
    """
    return max_hop**exponent * fanout


@_formula
def preload_in_range(growth: Number, servers: Number, gpus: Number) -> Number:
    """Whether the paper's model holds [bool]: `1 < D^a L <= S G`.

    `growth` [1], `servers` S [servers], `gpus` G [GPUs per server]. Source: GraNNDis Eq. 5. Valid
    as printed; it rules out deep models.

    On 4 servers of 4 GPUs, D^a = 2, with 3, 8 and 56 layers:

    >>> preload_in_range(growth_printed(2, np.array([3, 8, 56])), 4, 4).tolist()
    [True, True, False]
    """
    return (growth > 1) & (growth <= servers * gpus)


@_formula
def sampling_in_range(
    sampling: Number, preload: Number, servers: Number, gpus: Number, factor: Number = 1
) -> Number:
    """Whether the paper's model of sampling holds [bool]: `1 < m^a k << D^a L <= S G`.

    `sampling` m^a k and `preload` D^a L [1], `servers` S, `gpus` G [GPUs per server], `factor` [1]:
    how much less "<<" is (the paper does not say; 1 is the mildest reading, plain less). Source:
    GraNNDis Eq. 9. Valid as printed.

    It fails at the paper's own default (m = 1, k = 15) with three layers:

    >>> bool(sampling_in_range(growth_sampling(1, 15, 0.3), growth_printed(2, 3), 4, 4))
    False
    """
    return (sampling > 1) & (factor * sampling < preload) & (preload <= servers * gpus)


@_formula
def t_previous(
    vertices: Number,
    edges: Number,
    servers: Number,
    gpus: Number,
    compute: Number,
    internal: Number,
    external: Number,
) -> Number:
    """Graph parallel over servers [s]: `V/(S G C) + E/(S G) [((G-1)/(G S))/B_int + (1-1/S)/B_ext]`.

    `vertices` V, `edges` E [1], `servers` S, `gpus` G [GPUs per server], `compute` C, `internal`
    B_int, `external` B_ext [vertices/s per GPU]. Source: GraNNDis Eq. 3. Valid for equal widths,
    edges between random places (no partitioner), nothing overlapped but the all-reduce, which is
    left out.

    Mean degree 10, infinitely fast inside: three quarters of the edges cross between 4 servers.

    >>> t_previous(16, 160, 4, 4, compute=1, internal=np.inf, external=1)
    8.5
    """
    inside, across = (gpus - 1) / (gpus * servers) / internal, (1 - 1 / servers) / external
    return vertices / (servers * gpus * compute) + edges / (servers * gpus) * (inside + across)


@_formula
def t_preload(
    vertices: Number,
    edges: Number,
    servers: Number,
    gpus: Number,
    compute: Number,
    internal: Number,
    growth: Number,
) -> Number:
    """Shared preloading [s]: `V g/(S G C) + E g/(S G) [((G-1)/G)/B_int]`, g = D^a L as printed.

    As `t_previous`, and `growth` g [1], printed or measured. Source: GraNNDis Eq. 4 (Eq. 5 for its
    range, `preload_in_range`). Valid as Eq. 3; a measured growth, at most S, has no such range.

    The example of `t_previous` with D^a L = 6, and with every server holding the whole graph:

    >>> [t_preload(16, 160, 4, 4, compute=1, internal=np.inf, growth=growth) for growth in (6, 4)]
    [6.0, 4.0]
    """
    return growth * (
        vertices / (servers * gpus * compute)
        + edges / (servers * gpus) * ((gpus - 1) / gpus / internal)
    )


@_formula
def preload_difference(
    vertices: Number,
    edges: Number,
    servers: Number,
    gpus: Number,
    compute: Number,
    external: Number,
    growth: Number,
) -> Number:
    """What preloading costs over graph parallel, negative where it wins [s]: `(V g - V)/(S G C) -
    E/(S G B_ext)`.

    Arguments as `t_previous` and `t_preload`. Source: GraNNDis Eq. 6, which is Eq. 4 - Eq. 3 with
    1/B_int and 1/S taken for 0. Valid for many servers with fast links inside.

    >>> preload_difference(16, 160, 4, 4, compute=1, external=1, growth=6)
    -5.0
    """
    return (vertices * growth - vertices) / (servers * gpus * compute) - edges / (
        servers * gpus * external
    )


@_formula
def preload_threshold(growth: Number, degree: Number) -> Number:
    """C / B_ext above which preloading wins [1]: `(D^a L - 1) / D`.

    `growth` [1], printed or measured; `degree` D [edges per vertex]. Source: GraNNDis Eq. 7, Eq. 6
    with E = V D. Valid as Eq. 6.

    The text's example, "at least half": three layers, D^a = 2, D = 10.

    >>> preload_threshold(growth_printed(2, 3), 10)
    0.5
    """
    return (growth - 1) / degree


@_formula
def preload_wins(compute: Number, external: Number, growth: Number, degree: Number) -> Number:
    """Whether preloading beats graph parallel [bool]: `C / B_ext > (D^a L - 1) / D`.

    `compute` C, `external` B_ext [vertices/s per GPU], `growth` [1], printed or measured, `degree`
    D [edges per vertex]. Source: GraNNDis Eq. 7. Valid as Eq. 6.

    >>> preload_wins(np.array([4.0, 6.0]), 10.0, growth=6, degree=10).tolist()
    [False, True]
    """
    return compute / external > preload_threshold(growth, degree)


@_formula
def t_sampling(
    vertices: Number,
    edges: Number,
    servers: Number,
    gpus: Number,
    compute: Number,
    internal: Number,
    growth: Number,
) -> Number:
    """Expansion-aware sampling as printed [s]: `V g/(S G C) + E g/(S G) [(S G - 1)/B_int]`, g = m^a
    k.

    Arguments as `t_preload`. Source: GraNNDis Eq. 8 (Eq. 9 for its range, `sampling_in_range`).
    Valid as printed only: its bracket lacks the division that Eq. 4 has; use `t_preload` with the
    measured growth instead.

    On 4 servers of 4 GPUs the bracket is 15 where Eq. 4 has 3/4:

    >>> t_sampling(0, 16, 4, 4, 1, 1, growth=1) / t_preload(0, 16, 4, 4, 1, 1, growth=1)
    20.0
    """
    return growth * (
        vertices / (servers * gpus * compute)
        + edges / (servers * gpus) * ((servers * gpus - 1) / internal)
    )


@_formula
def in_server_halo_bytes(
    halo_rows: Sequence[Number], widths: Sequence[Number], itemsize: Number = 4
) -> Number:
    """Halos between the GPUs of each server in its enlarged graph [B/epoch]: `2 b sum_{l=1..L-1}
    H_l sum_servers sum_gpus |B_l|`.

    `halo_rows` [rows] and `widths` H_l [numbers per row], one per exchange l = 1 .. L-1: layer l is
    needed only within L-l hops of the server's part, so the halo shrinks with l; `itemsize` [B per
    number]. Source: GraNNDis Sec. 4.2 (text). Valid for full and partial preloads; nothing crosses
    servers but the all-reduce. The lengths must be equal.

    >>> in_server_halo_bytes([900, 400], [64, 64])
    665600
    """
    return sum(
        (2 * itemsize * width * rows for rows, width in zip(halo_rows, widths, strict=True)),
        0 * itemsize,
    )


# -- mini-batches


@_formula
def remote_feature_bytes(
    servers: Number, inputs: Number, features: Number, itemsize: Number = 4
) -> Number:
    """Features that data parallelism fetches from other servers [B/batch]: `(S-1)/S f2 F b`.

    `servers` S, `inputs` f2 [rows of the input frontier, all servers], `features` F [numbers per
    row], `itemsize` b [B per number]. Source: P3 Sec. 3.2. Valid for rows spread evenly and none
    cached.

    The paper's example counts all rows as remote: 188,339 rows of 100 numbers.

    >>> remote_feature_bytes(np.inf, 188_339, 100)
    75335600.0
    """
    return (1 - 1 / servers) * inputs * features * itemsize


@_formula
def p3_bytes(
    servers: Number,
    rows: Number,
    hidden: Number,
    itemsize: Number = 4,
    ways: Number = 2,
    copies: Number = 1,
) -> Number:
    """P3's partial sums of layer 1 between servers [B/batch]: `2 (S/c - 1) f1 H1 b`, without the
    pushed structure.

    `servers` S, `rows` f1 [rows of layer 1's output, all servers], `hidden` H1 [numbers per row],
    `itemsize` b [B per number], `ways` 2 [forward and backward], `copies` c [of every column].
    Source: P3 Sec. 3.2 and Table 5 (caching). Valid for features cut evenly over the servers.

    The paper's example, forward only: 24,703 rows, 16 numbers, 4 machines.

    >>> p3_bytes(4, 24_703, 16, ways=1)
    4742976.0
    """
    return ways * (servers / copies - 1) * rows * hidden * itemsize


@functools.partial(_formula, rows=POSITIVE)
def p3_break_even(servers: Number, inputs: Number, rows: Number, features: Number) -> Number:
    """H1 from which P3 sends more than data parallelism [numbers per row]: `f2 F / (2 S f1)`.

    `servers` S, `inputs` f2 and `rows` f1 [rows], `features` F [numbers per row]. Source:
    `p3_bytes` = `remote_feature_bytes`, P3 Fig. 15. Valid without caches on either side.

    The paper's example stops paying just below the width of its features, 100:

    >>> round(p3_break_even(4, 188_339, 24_703, 100), 1)
    95.3
    """
    return inputs * features / (2 * servers * rows)


@_formula
def split_bytes(
    remote_rows: Sequence[Number], widths: Sequence[Number], itemsize: Number = 4, ids: Number = 0
) -> Number:
    """GSplit's shuffles [B/batch]: `b (2 sum_{l=0..L-1} r_l H_l - r_0 H_0) + 8 ids`.

    `remote_rows` r_l [rows of h_l that other GPUs read] and `widths` H_l [numbers per row], l = 0
    .. L-1: input rows cross forward only; `itemsize` b [B per number], `ids` [vertex ids exchanged
    while sampling]. Source: GSplit Sec. 3. Valid for any splitting function. The lengths must be
    equal.

    >>> split_bytes([10, 5], [100, 16])
    4640
    """
    both = sum(
        (2 * itemsize * width * rows for rows, width in zip(remote_rows, widths, strict=True)),
        0 * itemsize,
    )
    return both - itemsize * remote_rows[0] * widths[0] + 8 * ids
