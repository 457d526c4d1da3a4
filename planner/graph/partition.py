"""Partitioning: the part of each vertex, by a library or ignoring edges; owners of mini-batches.

The libraries are METIS, which is a dependency, and KaMinPar, which an extra installs. Both take a
symmetric CSR without self-loops and minimise the edge cut. KaMinPar takes less memory and time, and
its parts have fewer halo rows (docs/reference/partitioners.md). Partitions of libraries are cached
on disk, keyed by the hash of the graph's content (disk_cache.py)."""

from __future__ import annotations

import math
import os
import tempfile
from contextlib import nullcontext
from dataclasses import dataclass
from hashlib import blake2b
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

import numpy as np
import pymetis
import scipy.sparse as sp

from gnnplan.planner.gnn.workload import AUTO, Workload
from gnnplan.planner.graph.disk_cache import cached
from gnnplan.planner.graph.graph import (
    Array,
    Csr,
    Graph,
    GraphStats,
    Int32s,
    Owner,
    both_ways,
    matrix_of,
)
from gnnplan.planner.graph.part_folder import PartGraph
from gnnplan.planner.graph.sampling import GOLDEN, drawn_as, frontier, mix, presampled, seeds_in
from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.planner.vocabulary.files import cannot_write, one_of
from gnnplan.planner.vocabulary.numbers import Bools, Ints, offsets
from gnnplan.planner.vocabulary.progress import inner_phase
from gnnplan.planner.vocabulary.units import show_bytes, show_count

# -- partitioners ----------------------------------------------------------------------------------


METHODS = ("metis", "metis-volume", "kaminpar", "kaminpar-train", "hash", "random")
BLIND = ("hash", "random")  # methods that ignore edges
TOLD_EDGES = 1_000_000  # directed edges from which progress reports partitioning as a phase
MOST_EDGES = 80_000_000  # most directed edges passed to METIS; with the graph it then takes 11 GB
# [B] that METIS takes per directed edge: 64-bit numbers, and a graph per level. 76 to 120 were
# measured (docs/reference/mini-batches.md).
EDGE_BYTES = 120
IMBALANCE = 0.03  # share of the mean by which a part may be larger: METIS's default for k-way cuts
# KaMinPar's vertex weight is 1 + EDGE_SHARE * degree / mean degree. With equal weights one of 64
# parts of an R-MAT graph gets 14 times the mean number of edges, with these weights 2.1 times.
EDGE_SHARE = 0.25
MOST_MARKED = 1.08  # largest ratio of a part's (training) vertices to the mean over parts
CANDIDATES = 4  # vertices considered per vertex that moves: those with the fewest edges


def library_of(method: str) -> str:
    """Return the library of a method; blind methods use METIS to subdivide parts and cluster."""
    return "kaminpar" if method.startswith("kaminpar") else "metis"


def version_of(library: str) -> str:
    """Return the library's name and version for cache keys; versions give different partitions."""
    try:
        return f"{library} {version('pymetis' if library == 'metis' else library)}"
    except PackageNotFoundError:  # the call of the library raises the error that users read
        return library


def cut(
    method: str,
    edges: Csr,
    parts: int,
    seed: int,
    loads: Array | None = None,
    weights: Array | None = None,
    **options: int,
) -> Owner:
    """Return the part of each vertex of a symmetric CSR; contiguous parts in trivial cases.

    loads: whole numbers > 0 of vertices, whose sums per part are balanced; by default METIS counts
    vertices, and KaMinPar's loads grow with the degree. METIS also takes weights of edges and
    options."""
    vertices = len(edges.indptr) - 1
    if parts in (1, vertices) or not len(edges.indices):  # METIS divides by the number of edges
        return (np.arange(vertices) * parts // max(vertices, 1)).astype(np.int32)
    name = "KaMinPar" if library_of(method) == "kaminpar" else "METIS"
    told = inner_phase(f"partitioning into {show_count(parts, 'part')} by {name}")
    with told if len(edges.indices) >= TOLD_EDGES else nullcontext():
        if name == "KaMinPar":
            return repair(by_kaminpar(edges, parts, seed, loads), parts)
        options["objtype"] = int(method == "metis-volume")
        return repair(by_metis(edges, parts, seed, loads, weights, **options), parts)


def by_kaminpar(
    edges: Csr, parts: int, seed: int, loads: Array | None = None, threads: int = 1
) -> Owner:
    """Return KaMinPar's part of each vertex of a symmetric CSR.

    loads: weights of vertices, whole numbers; by default weights grow with the degree. With one
    thread the same seed gives the same parts, with several it does not. Raises SpecError if
    KaMinPar is not installed or the temporary file of the graph cannot be written."""
    try:
        import kaminpar
    except ImportError as error:
        raise SpecError(
            f"the partitioner kaminpar cannot be imported ({error}); pip install"
            " 'gnnplan[kaminpar]', or use --partitioner metis"
        ) from error
    # ParHIP's binary format: a header, the file offset of each row, edges, loads. Bits of the
    # header's first number mean that edges have no weights (1), and that ids (8) and weights of
    # vertices (16) are int32.
    degree = np.diff(edges.indptr)
    if loads is None:
        loads = np.rint(100 * (1 + EDGE_SHARE * degree / degree.mean()))
    parhip = (
        np.array([1 | 8 | 16, degree.size, len(edges.indices)], np.uint64),
        (8 * (3 + degree.size + 1) + 4 * edges.indptr.astype(np.int64)).astype(np.uint64),
        np.ascontiguousarray(edges.indices, np.uint32),
        loads.astype(np.uint32),
    )
    kaminpar.reseed(seed)
    cutter = kaminpar.KaMinPar(threads, kaminpar.default_context())
    try:  # KaMinPar's Python interface reads graphs from files only
        with tempfile.NamedTemporaryFile(prefix="gnnplan-", suffix=".parhip") as file:
            for array in parhip:
                file.write(array.data)
            file.flush()
            graph = kaminpar.load_graph(file.name, kaminpar.GraphFileFormat.PARHIP)
    except OSError as error:
        raise cannot_write(f"{tempfile.gettempdir()}: a graph for KaMinPar", error) from error
    return np.array(cutter.compute_partition(graph, parts, IMBALANCE), dtype=np.int32)


def even_out(edges: Csr, part: Owner, parts: int, marked: Bools) -> Owner:
    """Balance the `marked` vertices [N] in place, to at most MOST_MARKED times the mean per part.

    Marked vertices move from the fullest part to the emptiest, and as many unmarked vertices move
    back, if there are any. Vertices whose move increases the edge cut least go first."""
    adjacency = matrix_of(edges, np.ones(len(edges.indices), np.int8))
    degree, counts = np.diff(edges.indptr), np.bincount(part[marked], minlength=parts)
    most = math.ceil(MOST_MARKED * counts.mean())
    while counts.max() > most:
        full, empty = int(counts.argmax()), int(counts.argmin())
        count = int(min(counts[full] - most, most - counts[empty]))
        for here, there, which in ((full, empty, marked), (empty, full, ~marked)):
            rows = np.flatnonzero((part == here) & which)
            rows = rows[np.argsort(degree[rows], kind="stable")[: CANDIDATES * count]]
            gain = adjacency[rows] @ ((part == there).astype(np.int32) - (part == here))
            part[rows[np.argsort(-gain, kind="stable")[:count]]] = there
        counts[full] -= count
        counts[empty] += count
    return part


def by_metis(
    edges: Csr,
    parts: int,
    seed: int,
    loads: Array | None = None,
    weights: Array | None = None,
    **options: int,
) -> Owner:
    """Return METIS's part of each vertex of a symmetric CSR.

    loads: weights of vertices. weights: of edges."""
    adjacency, weights = for_metis(edges, weights)
    # C's generator gives the same random numbers for seeds 0 and 1
    chosen = pymetis.Options(seed=seed + 1, **options)
    try:
        found = pymetis.part_graph(
            parts, adjacency, vweights=loads, eweights=weights, recursive=False, options=chosen
        )
    except RuntimeError as error:  # METIS gives no reason
        raise SpecError(
            f"METIS failed on {len(edges.indices):,} directed edges ({error}), as it does where"
            " memory is short; use --partitioner kaminpar or hash (gsplit: splitter='random')"
        ) from error
    return np.asarray(found.vertex_part, dtype=np.int32)


def for_metis(
    edges: Csr, weights: Array | None = None
) -> tuple[pymetis.CSRAdjacency, Array | None]:
    """Return a symmetric CSR and its edge weights as 64-bit integers, METIS's own type.

    A CSR of more than MOST_EDGES edges is thinned. Raises SpecError if METIS would run out of
    memory."""
    indptr, indices = edges.indptr, edges.indices
    count = min(len(indices), MOST_EDGES)
    need, memory = EDGE_BYTES * count, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if need > memory:  # the system would kill the process without a message
        raise SpecError(
            f"METIS takes up to about {EDGE_BYTES} bytes per directed edge (edges: {count:,}, so"
            f" {show_bytes(need)}; memory of this machine: {show_bytes(memory)}); use the"
            " partitioner kaminpar, hash or random (gsplit: splitter='random'), or a machine with"
            " more memory"
        )
    if len(indices) > MOST_EDGES:
        kept = thinned(edges, MOST_EDGES)
        indptr = offsets(kept)[indptr]
        indices, weights = indices[kept], None if weights is None else weights[kept]
    adjacency = pymetis.CSRAdjacency(indptr.astype(np.int64), indices.astype(np.int64))
    return adjacency, None if weights is None else weights.astype(np.int64, copy=False)


def thinned(edges: Csr, most: int) -> Bools:
    """Return a mask [E] that keeps about `most` edges of a symmetric CSR.

    An edge is kept in both directions or in none, and the same edges are kept on every machine.
    Edge (u, v) is kept with probability min(1, c / min(degree u, degree v)). Edges between two hubs
    matter least to a cut, and no vertex loses all its neighbours. Sparsifiers sample by effective
    resistance, which is about 1 / degree (Spielman & Srivastava 2008)."""
    indices, degree = edges.indices, np.diff(edges.indptr).astype(np.int32)
    into = np.repeat(np.arange(len(degree), dtype=np.int32), degree)
    low = np.minimum(degree[into], degree[indices])
    counts, degrees = np.bincount(low), np.arange(low.max() + 1).clip(min=1)
    shares = np.cumsum(counts / degrees)
    # expected number of edges kept for c = 0, 1, 2, ..
    kept = np.cumsum(counts) + np.arange(counts.size) * (shares[-1] - shares)
    c = np.interp(most, kept, np.arange(counts.size))
    pair = np.minimum(into, indices).astype(np.uint64) << np.uint64(32) | np.maximum(
        into, indices
    ).astype(np.uint64)
    del into
    threshold = (np.minimum(1, c / degrees) * 2.0**32).astype(np.uint64)
    return np.asarray(mix(pair * GOLDEN) >> np.uint64(32) < threshold[low])


# -- partitions ------------------------------------------------------------------------------------


FEW_EDGES = 5_000_000  # directed edges up to which METIS takes only seconds
# Largest share of vertices that may change parts to balance training vertices. Few move where
# training vertices lie all over the graph: one of 64 parts of an R-MAT graph (2M edges) had 1.24 of
# the mean; to correct that, 0.1 % of the vertices move, for 0.02 % more halo rows.
FEW_MOVED = 0.005
CLUSTERS = 64  # groups of vertices that order the rows (locality_order)
# Vertices. All features of a smaller graph fit the processor's cache, so their order is irrelevant.
SMALL = 2_000


def chosen(method: str, graph: Graph | GraphStats) -> str:
    """Resolve the partitioner auto: METIS, or KaMinPar for a large graph if it is installed.

    A graph that comes with a partition keeps the partition's method. Raises SpecError for an
    unknown name."""
    if (method := one_of("--partitioner", method, (AUTO, *METHODS))) != AUTO:
        return method
    if isinstance(graph, Graph) and graph.cut is not None:
        return graph.cut.method
    large = isinstance(graph, Graph) and graph.stats.edges > FEW_EDGES
    return "kaminpar" if large and find_spec("kaminpar") else "metis"


def partition(graph: Graph | GraphStats, parts: int, method: str = "metis", seed: int = 0) -> Owner:
    """Return the part [N] of each vertex, in [0, parts), no part empty.

    method: 'metis' and 'kaminpar' minimise the edge cut, 'metis-volume' the rows sent;
    'kaminpar-train' also balances training vertices; 'hash' and 'random' ignore edges. Edge
    directions do not matter. A graph that comes with such a partition keeps it. Raises SpecError
    for more parts than vertices, an unknown method, or statistics only."""
    if not isinstance(graph, Graph):
        raise SpecError(
            f"{graph.source}: statistics only, so there is nothing to partition; give the graph"
            " itself (.npz or synthetic:...)"
        )
    method = one_of("partitioner", method, METHODS)
    vertices = graph.stats.vertices
    check_parts(parts, vertices, graph.stats.source)
    if parts == 1:
        return np.zeros(vertices, np.int32)
    if graph.cut is not None and (graph.cut.parts, graph.cut.method) == (parts, method):
        return graph.cut.owner
    if method == "hash":
        # Fibonacci hashing: the upper digits of id * 2**32 / golden ratio
        mixed = np.arange(vertices, dtype=np.uint64) * np.uint64(2654435769) & np.uint64(0xFFFFFFFF)
        return repair((mixed * np.uint64(parts) >> np.uint64(32)).astype(np.int32), parts)
    if method == "random":
        return (np.random.default_rng(seed).permutation(vertices) % parts).astype(np.int32)

    key = f"{version_of(library_of(method))} {graph.stats.hash} {parts} {method} {seed}"
    return cached(
        key, vertices, parts, lambda: evenly(method, undirected(graph), parts, seed, graph.train)
    )


def evenly(method: str, edges: Csr, parts: int, seed: int, train: Bools) -> Owner:
    """Partition a symmetric CSR by a library, and balance KaMinPar's parts."""
    part = cut(method, edges, parts, seed)
    if library_of(method) == "kaminpar":
        even_out(edges, part, parts, np.ones(part.size, bool))
        counts = np.bincount(part[train], minlength=parts)
        move = np.maximum(counts - MOST_MARKED * counts.mean(), 0).sum()
        if method == "kaminpar-train" or move <= FEW_MOVED * part.size:
            even_out(edges, part, parts, train)
    return part


def partition_weighted(
    edges: Csr, weights: Array | None, parts: int, method: str = "metis"
) -> Owner:
    """Return the part [n] of each vertex of a symmetric CSR without self-loops, by a library.

    The library minimises the edge cut and balances `weights` (whole numbers >= 0). Weights are
    ignored if they are so uneven that a part would hold fewer than three of the largest."""
    vertices, library, loads = len(edges.indptr) - 1, library_of(method), None
    check_parts(parts, vertices, "the subgraph")
    digest = blake2b(digest_size=16)
    for array in (edges.indptr, edges.indices, *(() if weights is None else (weights,))):
        digest.update(np.ascontiguousarray(array, dtype=np.int64).data)
    key = f"{version_of(library)} weighted {digest.hexdigest()} {parts} 0 {weights is None}"
    # METIS prints warnings and fails with weights of 0, and where a part would hold one or two
    # vertices. So weights are raised above 0, and ignored where a part would be that small.
    if weights is not None and (total := int(weights.sum())) >= 3 * parts * int(weights.max()) > 0:
        loads = 1 + max(1, min(1000, 2**30 // total)) * np.asarray(weights, np.int64)
    return cached(key, vertices, parts, lambda: cut(library, edges, parts, 0, loads))


def locality_order(graph: Graph, method: str = "metis") -> Owner:
    """Return each vertex's position [N] in an order that groups clusters of the method's library.

    In this order aggregation finds more rows in cache. A small graph keeps its order."""
    vertices, library = graph.stats.vertices, library_of(method)
    if isinstance(graph, PartGraph) and library_of(graph.folder.about.partitioner) == library:
        return graph.folder.array(None, "order")
    rank = np.arange(vertices, dtype=np.int32)
    if vertices >= SMALL:
        order = np.argsort(partition(graph, CLUSTERS, library), kind="stable")
        rank[order] = rank.copy()
    return rank


def undirected(graph: Graph) -> Csr:
    """Return the edges with every edge in both directions."""
    if not graph.stats.directed:
        return graph.csr_edges
    return both_ways(graph.adjacency)


def edges_between(graph: Graph, rows: Array) -> Csr:
    """Return the edges between the vertices `rows` (ascending) in both directions, [rows, rows].

    Of a partitioned folder only edges into these rows are read."""
    ends = graph.neighbours(rows)
    held = np.ones(ends.size, bool), ends, offsets(graph.degree_of(rows))
    edges = sp.csr_matrix(held, (rows.size, graph.stats.vertices))[:, rows]
    return both_ways(edges) if graph.stats.directed else edges


def repair(part: Owner, parts: int) -> Owner:
    """Fill empty parts, in place, and return the partition.

    METIS leaves some parts empty when parts are small. An empty part gets the last vertices of the
    largest part: an even share, but at most half of them.

    >>> repair(np.array([0, 0, 0, 0], np.int32), 2).tolist()
    [0, 0, 1, 1]
    """
    sizes = np.bincount(part, minlength=parts)
    for empty in np.flatnonzero(sizes == 0):
        largest = int(sizes.argmax())
        take = max(1, min(len(part) // parts, int(sizes[largest]) // 2))
        part[np.flatnonzero(part == largest)[-take:]] = empty
        sizes[largest] -= take
        sizes[empty] = take
    return part


def check_parts(parts: int, vertices: int, what: str) -> None:
    """Raise SpecError for more parts than vertices; `what` names the graph."""
    if not 1 <= parts <= vertices:
        raise SpecError(
            f"{what}: parts must lie in [1, {vertices:,}] (no more parts than vertices), got"
            f" {parts:,}; ask for {vertices:,} or fewer"
        )


# -- GSplit's owners -------------------------------------------------------------------------------

# GSplit's splitting functions give the GPU that owns each vertex of a mini-batch. Owners are
# computed once, before training. Pre-sampling runs the sampler for some epochs and counts how often
# the mini-batches use each vertex and edge:
#
#     w(v)      times that vertex v is in a layer's frontier
#     w(e)      times that edge e is drawn
#
#     gsplit    METIS: least cut of w(e), parts with equal sums of w(v)
#     node      METIS: least cut of edges, parts with equal sums of w(v)
#     edge      METIS without pre-sampling: least cut of edges, parts with equal sums of in-edges
#               and training vertices together
#     random    a random owner for every vertex
#
# Loads may differ: no part has more than 1 + imbalance times the mean (Eq. 2's tunable constant,
# METIS's ufactor). A looser balance leaves METIS more cuts to choose from. METIS balances the mean
# load that pre-sampling measures; the load of a single batch deviates from the mean.
#
# Paper: GSplit (arXiv 2303.13775) Sec. 4, with ten epochs of pre-sampling. METIS takes whole
# numbers and one weight per vertex. So weights are scaled; an edge has at least weight 1, for both
# directions together; and `edge` adds both loads, each scaled to the same sum.


SPLITTERS = {  # with what they balance
    "gsplit": "METIS on pre-sampled weights",
    "node": "METIS on weights of vertices only",
    "edge": "METIS without pre-sampling",
    "random": "without METIS",
}
EPOCHS = 10  # of pre-sampling, as in the paper
FINEST, LOOSEST = 0.001, 10.0  # allowed imbalances; ufactor is a whole number of thousandths
BEFORE = 1 << 20  # the first epoch number of pre-sampling; training never reaches it


@dataclass(frozen=True)
class Frequency:
    """Counts of how often pre-sampling drew each vertex [N] and each edge of graph.indices [E]."""

    vertices: Int32s
    edges: Int32s


def presample(graph: Graph, workload: Workload, epochs: int = EPOCHS) -> Frequency:
    """Run the training sampler with other random draws; count the sampled vertices and edges."""
    vertices = np.zeros(graph.stats.vertices, np.int32)
    edges = np.zeros(graph.indices.size, np.int32)
    for epoch in range(BEFORE, BEFORE + epochs):
        for number, items in enumerate(presampled(graph, workload, epoch)):
            seeds = seeds_in(graph, workload, items, epoch, number)
            found = frontier(graph, seeds, workload.fanouts, workload.seed, epoch, number)
            for nodes in found.nodes:
                vertices[nodes] += 1
            for _, places in found.edges:
                edges[places] += 1
    return Frequency(vertices, edges)


def owners(
    graph: Graph,
    parts: int,
    splitter: str,
    workload: Workload,
    epochs: int = EPOCHS,
    imbalance: float = IMBALANCE,
) -> Owner:
    """Return the owner [N] of each vertex for a workload's batches, cached on disk.

    epochs: of pre-sampling, if the splitter needs it. imbalance: as in `split`."""
    asked = f"{splitter} {parts} {epochs} {_ufactor(imbalance)}"
    key = f"{version_of('metis')} owners {drawn_as(graph, workload)} {asked}"

    def compute() -> Owner:
        counted = splitter in ("gsplit", "node")
        frequency = presample(graph, workload, epochs) if counted else None
        return split(graph, parts, splitter, workload.seed, frequency, imbalance)

    return cached(key, graph.stats.vertices, parts, compute)


def split(
    graph: Graph,
    parts: int,
    splitter: str,
    seed: int,
    frequency: Frequency | None = None,
    imbalance: float = IMBALANCE,
) -> Owner:
    """Return the owner [N] of each vertex, in [0, parts).

    imbalance: share by which a part's load may exceed the mean; random owners ignore it. gsplit and
    node balance the `frequency` of pre-sampling, edge balances in-edges and training vertices.
    Raises SpecError for an unknown splitter or more parts than vertices."""
    splitter = one_of("splitter", splitter, SPLITTERS)
    check_parts(parts, graph.stats.vertices, graph.stats.source)
    if splitter == "random":
        return np.random.default_rng(seed).integers(0, parts, graph.stats.vertices, dtype=np.int32)
    load = graph.degree / max(graph.degree.sum(), 1) + graph.train / max(graph.train.sum(), 1)
    drawn = np.ones(graph.indices.size, np.int32)
    if splitter != "edge" and frequency is not None:
        load = frequency.vertices.astype(float)
        if splitter == "gsplit":
            drawn += frequency.edges  # weight >= 1: unsampled edges also keep neighbours together
    both = both_ways(matrix_of(graph.csr_edges, drawn))
    del frequency, drawn  # METIS needs the memory
    weights = _whole(both.data, 2**30) if splitter == "gsplit" else None
    loads = _whole(load, 2**30 - load.size)
    return cut("metis", both, parts, seed, loads, weights, ufactor=_ufactor(imbalance))


def _ufactor(imbalance: float) -> int:
    """Return METIS's ufactor: the allowed excess load of a part in thousandths of the mean.

    >>> _ufactor(0.03), _ufactor(0.001)
    (30, 1)
    """
    return round(1000 * imbalance)


def _whole(weights: Array, most: float) -> Ints:
    """Scale the weights to whole numbers >= 1 whose sum is about `most` or less.

    If the sum allows it, the largest weight is 1001, so that shares keep three digits."""
    scale = min(
        1000 / max(float(weights.max(initial=0)), 1e-300), most / max(float(weights.sum()), 1e-300)
    )
    return (scale * weights).astype(np.int64) + 1
