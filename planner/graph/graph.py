"""The types of a graph: `Graph` with features, labels and masks, and its `GraphStats`.

Shapes: N vertices, E directed edges, F features, C classes. An edge src -> dst means that dst
aggregates from src. load.py makes graphs; this file has the code that all sources share."""

from __future__ import annotations

import dataclasses
import mmap
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from math import inf
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from gnnplan.planner.graph.disk_cache import remembered, state_of
from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.planner.vocabulary.numbers import FLOAT64, SPREAD, Bools, Ints, Precision, ranges
from gnnplan.planner.vocabulary.units import show_bytes, show_count

Array = NDArray[Any]
Int32s = NDArray[np.int32]
Table = Mapping[str, Array]  # arrays by name
Owner: TypeAlias = Int32s  # the part of each vertex [N]
# [N, F] in float32, or in float64 if float32 cannot represent the values exactly; a numpy.memmap if
# the features stay in their file
Features: TypeAlias = NDArray[np.floating[Any]] | sp.csr_matrix
LARGEST_ARRAY = 64 << 30  # [B]
MOST_CLASSES = 1_000_000
MOST_VERTICES = 2**31 - 1  # ids are int32
IDS_REACH = f"ids of 32 bits reach {MOST_VERTICES:,}"
MOST_FEATURES = 1_000_000
SPARSE = 0.1  # features with at most this share of nonzero numbers are stored sparse
AT_ONCE = 1 << 24  # [B] of an array that are hashed and checked at a time
LARGEST_WHOLE = 1 << 53  # float64 represents all whole numbers up to this one exactly
COMPARED = 4096  # sample rows, the first and evenly spaced, that compare float32 with float64
FINITE = "features must be finite"
BEYOND_FLOAT32 = 2.0**128 - 2.0**103  # float32 rounds numbers from this one on to infinity
MERGED = 0.01  # share of distinct numbers that float32 may merge without a note


@dataclass(frozen=True)
class GraphStats:
    """The facts of a graph that a plan needs."""

    name: str
    source: str  # the argument of `load`
    vertices: int
    edges: int  # directed, after the graph was made undirected, without self-loops
    features: int
    classes: int  # 0: no labels, so it can be planned but not trained
    train_vertices: int
    multilabel: bool
    hash: str  # digest of the graph's content, not of its file
    # changes and additions made at loading, such as 'made undirected' or 'stand-in features'
    notes: tuple[str, ...] = ()
    known: bool = True  # False: only statistics are known, there are no edges
    directed: bool = False
    # statistics only: number of parts -> halo rows of all parts together
    halo_rows: Mapping[int, int] = field(default_factory=dict, hash=False)
    nonzeros: int = 0  # numbers in sparse features; 0: they are dense
    spread: float = SPREAD  # standard deviation of the logarithms of degrees
    # statistics only: spread of how many neighbours a vertex can sample, and of how many vertices
    # can sample it (ownership/estimated.py)
    batch_spread: tuple[float, float] | None = None
    near_seed: float = inf  # statistics only: vertices to which reads on behalf of a seed lead
    train_popular: bool = False  # vertices with many neighbours are training vertices more often
    packed: bool = False  # features are the concatenated inputs of a user's module (with_inputs)
    held_out: int = 0  # link prediction: directed held-out edges, not counted in `edges`
    numbers: bool = False  # regression: y holds numbers, `classes` of them per vertex
    beyond_float32: float = 0.0  # largest magnitude of the features, if it is infinite in float32
    # the same of fields, such as 'vertex pos' or 'edge edge_weight', that are infinite in float32
    fields_beyond_float32: Mapping[str, float] = field(default_factory=dict, hash=False)

    @property
    def dense(self) -> bool:
        """Whether features are stored dense, zeros included."""
        return not self.nonzeros

    @property
    def stored_per_row(self) -> float:
        """Mean count of stored numbers per row of sparse features; 0 for dense features."""
        return self.nonzeros / self.vertices

    def made_dense(self) -> GraphStats:
        """Return the statistics of the same graph with dense features."""
        return dataclasses.replace(self, nonzeros=0)

    @property
    def learned(self) -> Literal["label", "labels", "numbers"]:
        """The kind of target that is predicted for a vertex."""
        if self.numbers:
            return "numbers"
        return "labels" if self.multilabel else "label"


@dataclass(frozen=True, eq=False)
class CsrEdges:
    """All edges of a graph as CSR of in-neighbours, with their fields."""

    indptr: Ints  # [N+1]
    indices: Int32s  # [E]
    fields: Table = field(default_factory=dict)  # name -> numbers of edges [E, ..]
    loops: bool = False  # True: a self-loop per vertex follows all other edges

    @property
    def vertices(self) -> int:
        return len(self.indptr) - 1

    @cached_property
    def degrees(self) -> tuple[Ints, Ints]:
        """In-degrees and out-degrees [N], self-loops included."""
        outs = np.bincount(self.indices, minlength=self.vertices).astype(np.int64)
        return np.diff(self.indptr) + self.loops, outs + self.loops


Csr: TypeAlias = CsrEdges | sp.csr_matrix  # both have the arrays indptr and indices


@dataclass(frozen=True, eq=False)
class Cut:
    """A partition of the graph that was made before and came with its files."""

    parts: int
    method: str  # a value of --partitioner, or the name of the library that made the partition
    owner: Owner
    name: str  # unique identifier of this partition


@dataclass(frozen=True, eq=False)
class Graph:
    """A graph as CSR of in-neighbours: row v lists the vertices that v aggregates from.

    Rows are sorted; there are no self-loops and no duplicates."""

    stats: GraphStats
    indptr: Ints  # [N+1]
    indices: Int32s  # [E]
    x: Features
    # class ids, int64 [N], -1 = no label (all -1 in a graph without labels); or multi-label
    # targets, uint8 or float32 [N, C]; or regression targets, float32 [N, C], NaN = no target
    y: Array
    train: Bools  # [N]
    val: Bools
    test: Bools
    # link prediction: validation edges and test edges, (source, destination) int64 [2, edges] each
    held_out: tuple[Array, ...] = ()
    # name -> further numbers of vertices [N, ..], and of edges [E, ..] in the order of `indices`
    vertex_fields: Table = field(default_factory=dict)
    edge_fields: Table = field(default_factory=dict)
    loops: bool = False  # True: a DGL module gets a self-loop per vertex besides these edges
    cut: Cut | None = None

    @cached_property  # one object per graph, since user modules cache data keyed by this object
    def csr_edges(self) -> CsrEdges:
        """The graph's edges and edge fields."""
        return CsrEdges(
            np.asarray(self.indptr), np.asarray(self.indices), self.edge_fields, self.loops
        )

    def neighbours(self, rows: Array) -> Int32s:
        """Return the in-neighbours of the vertices `rows`, row after row [edges]."""
        return np.asarray(self.indices[ranges(self.indptr[rows], self.degree_of(rows))])

    def degree_of(self, rows: Array) -> Ints:
        """Return the in-degrees of the vertices `rows` [rows]."""
        return np.asarray(self.indptr[rows + 1] - self.indptr[rows])

    @property
    def reached(self) -> Sequence[int]:
        """Counts of vertices within 0, 1, .. hops upstream of training vertices; () if unknown."""
        return ()

    def features(self, rows: Any = slice(None)) -> NDArray[np.floating[Any]]:
        """Return dense features [len(rows), F] of `rows`: indices, a boolean mask or a slice."""
        x = self.x[rows]
        return np.asarray(x.toarray() if sp.issparse(x) else x)

    def in_float32(self, fields: Collection[str] = ()) -> Graph:
        """Return the graph with features in float32; features that stay in their file are kept.

        fields: those that a module reads, such as 'vertex pos'. Raises SpecError for features, and
        for such fields, that are infinite in float32."""
        beyond = {"vertex x": self.stats.beyond_float32, **self.stats.fields_beyond_float32}
        for name, found in beyond.items():
            if found and name in ("vertex x", *fields):
                what = "features" if name == "vertex x" else "numbers"
                raise SpecError(
                    f"{self.stats.source}: {name.partition(' ')[2]}: {what} must be finite in"
                    f" float32, found magnitudes up to {found:.6g}; scale them, or use --dtype"
                    " float64"
                )
        if self.x.dtype == np.float32 or not (type(self.x) is np.ndarray or sp.issparse(self.x)):
            return self
        x = self.x.astype(np.float32)
        freeze(*feature_arrays(x).values())
        return dataclasses.replace(self, x=x)

    def dense(self) -> Graph:
        """Return the graph with dense features. Raises SpecError if they do not fit the memory."""
        if isinstance(self.x, np.ndarray) or self.stats.dense:
            return self
        rows, columns = self.x.shape
        must_fit(self.stats.name, "features", rows * columns * self.x.dtype.itemsize)
        x = self.x.toarray()
        freeze(x)
        return dataclasses.replace(self, x=x, stats=self.stats.made_dense())

    def lengths(self, rows: Array) -> Ints:
        """Return the count of stored feature numbers of each vertex of `rows` [rows]."""
        if self.stats.dense:
            return np.full(rows.size, self.stats.features)
        x: Any = self.x
        return np.asarray(x.indptr[rows + 1] - x.indptr[rows], np.int64)

    @property
    def degree(self) -> Array:
        """In-degree of each vertex [N]."""
        return np.diff(self.indptr)

    @property
    def out_degree(self) -> Array:
        """Out-degree of each vertex [N]."""
        if not self.stats.directed:
            return self.degree
        return np.bincount(self.indices, minlength=self.stats.vertices)

    @property
    def adjacency(self) -> sp.csr_matrix:
        """The edges as a boolean matrix [N, N] that shares memory with the graph."""
        return matrix_of(self.csr_edges, np.ones(len(self.csr_edges.indices), bool))

    def with_edges(self, indptr: Array, indices: Array, fields: Table, **changes: Any) -> Graph:
        """Return the graph with these edges and edge fields, and with other fields changed."""
        known = {each.name: getattr(self, each.name) for each in dataclasses.fields(Graph)}
        edges = {"indptr": indptr, "indices": indices, "edge_fields": fields}
        return Graph(**known | edges | changes)


def matrix_of(edges: Csr, numbers: Array) -> sp.csr_matrix:
    """Return the edges, with one of `numbers` each, as a matrix [N, N] that shares their memory."""
    n = len(edges.indptr) - 1
    return sp.csr_matrix((numbers, edges.indices, edges.indptr), shape=(n, n))


def both_ways(edges: sp.csr_matrix) -> sp.csr_matrix:
    """Return the edges in both directions; numbers of opposite edges are summed."""
    return sp.csr_matrix(edges + edges.T)


def with_inputs(
    graph: Graph | None, stats: GraphStats, inputs: Sequence[tuple[str, int]], precision: Precision
) -> tuple[Graph | None, GraphStats]:
    """Return the graph with the vertex fields `inputs` (name, width) concatenated as features.

    precision: number format of the workload's rows. Raises SpecError for a field that the graph
    lacks, and for whole numbers that this format cannot represent exactly."""
    width = sum(columns for _, columns in inputs)
    if [name for name, _ in inputs] == ["x"] or stats.packed:
        return graph, stats
    stats = dataclasses.replace(stats, features=width, packed=True)
    if graph is None:
        return None, stats
    parts, own = [], graph.features()
    is_exact, dtype, most = precision == FLOAT64, precision.name, 1 << precision.digits
    kind = np.dtype(np.float64) if is_exact else own.dtype
    for name, columns in inputs:
        field = own if name == "x" else graph.vertex_fields.get(name)
        if field is None:
            raise SpecError(
                f"{stats.source}: the module reads {name} of vertices, which this graph lacks; use"
                " the graph that it was planned on"
            )
        if field.dtype.kind == "i" and (found := int(np.abs(field).max(initial=0))) > most:
            raise SpecError(
                f"{stats.source}: {name}: rows in {dtype} hold whole numbers up to {most:,}, found"
                f" {found:,}; number them anew (numpy.unique(..., return_inverse=True))"
                + ("" if is_exact else ", or use --dtype float64")
            )
        parts.append(np.asarray(field, kind).reshape(stats.vertices, columns))
    return dataclasses.replace(graph, x=np.concatenate(parts, 1), stats=stats), stats


def must_fit(source: str, what: str, nbytes: float) -> None:
    """Raise SpecError if `nbytes` [B] for `what` exceed the memory of this machine.

    Call it before an allocation, so that a typo in a size cannot bring the machine down."""
    limit = min(LARGEST_ARRAY, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    if nbytes > limit:
        raise SpecError(
            f"{source}: {what} would take {show_bytes(nbytes)}, more than {show_bytes(limit)}"
            " (memory of this machine, at most 64 GiB); check the sizes, or give statistics only"
            " (.yaml)"
        )


def in_neighbours(
    src: Array, dst: Array, vertices: int, directed: bool
) -> tuple[Ints, Int32s, tuple[str, ...]]:
    """Return the CSR (indptr [N+1], indices [E]) of an edge list, and notes on changes.

    Self-loops and duplicates are dropped. The graph is made undirected unless `directed`.

    >>> indptr, indices, notes = in_neighbours(np.array([0, 1, 2]), np.array([1, 2, 2]), 3, False)
    >>> indptr.tolist(), indices.tolist()
    ([0, 1, 3, 4], [1, 0, 2, 1])
    >>> notes
    ('dropped 1 self-loop', 'made undirected: 2 -> 4 directed edges')
    """
    loops = src == dst
    notes = []
    if dropped := int(np.count_nonzero(loops)):
        src, dst = src[~loops], dst[~loops]
        notes.append(f"dropped {show_count(dropped, 'self-loop')}")
    # scipy sorts the edges and merges duplicates
    rows = sp.csr_matrix((np.ones(len(src), bool), (dst, src)), shape=(vertices, vertices))
    if rows.nnz < len(src):
        notes.append(f"dropped {show_count(len(src) - rows.nnz, 'duplicate edge')}")
    if directed:
        notes.append("kept directed")
    else:
        before = rows.nnz
        rows = rows + rows.T
        if rows.nnz > before:
            notes.append(f"made undirected: {before:,} -> {rows.nnz:,} directed edges")
    # astype copies: scipy's arrays may be longer than needed
    return rows.indptr.astype(np.int64), rows.indices.astype(np.int32), tuple(notes)


def finish(graph: Graph) -> Graph:
    """Return the graph with the hash of its content and with read-only arrays.

    Features become sparse if and only if most numbers are zero; mapped features stay dense. A
    mapped file is read once: its hash and count of nonzeros are cached on disk for every process.
    Raises SpecError for mapped features that are not finite."""
    stats, x = graph.stats, graph.x
    structure = graph.indptr, graph.indices
    others = graph.y, graph.train, graph.val, graph.test
    fields = {f"vertex {name}": array for name, array in graph.vertex_fields.items()}
    fields |= {f"edge {name}": array for name, array in graph.edge_fields.items()}

    def hashed(*features: Array) -> str:
        return _hash(stats.directed, (*structure, *features, *others), fields)

    if mapped := isinstance(x, np.memmap):
        key = f"{state_of(Path(str(x.filename)))} {hashed()} largest"
        found = remembered("features", key, lambda: (hashed(x), *_counted(stats.source, x)))
        digest, nonzeros, beyond = found[0]
    else:
        arrays = [*feature_arrays(x).values()]
        digest, beyond = hashed(*arrays), _beyond_float32(arrays[-1])
        nonzeros = int(np.count_nonzero(x)) if isinstance(x, np.ndarray) else int(x.nnz)
    sparse = 0 < nonzeros <= SPARSE * stats.vertices * stats.features
    if sparse and mapped:
        sparse = False
        note = (
            f"x.npy is mapped, so it stays dense, though only {nonzeros:,} numbers are not zero;"
            " x_indptr, x_indices, x_data are sparse"
        )
        stats = dataclasses.replace(stats, notes=(*stats.notes, note))
    elif sparse:
        x = sp.csr_matrix(x)
    elif not isinstance(x, np.ndarray):
        must_fit(stats.name, "features", x.shape[0] * x.shape[1] * x.dtype.itemsize)
        x = x.toarray()
    # nobody may change the arrays, so the hash stays valid
    freeze(*structure, *feature_arrays(x).values(), *others, *fields.values())
    stats = dataclasses.replace(
        stats,
        hash=digest,
        nonzeros=nonzeros * sparse,
        spread=spread_of(graph.degree),
        beyond_float32=beyond,
        fields_beyond_float32={
            name: largest
            for name, array in fields.items()
            if array.dtype == np.float64 and (largest := _beyond_float32(array))
        },
    )
    return dataclasses.replace(graph, stats=stats, x=x)


def freeze(*arrays: Array) -> None:
    """Make the arrays read-only."""
    for array in arrays:
        array.flags.writeable = False


def feature_arrays(x: Any) -> dict[str, Any]:
    """Return the arrays that store the features, keyed by their names in gnnplan's files."""
    if sp.issparse(x):
        return {"x_indptr": x.indptr, "x_indices": x.indices, "x_data": x.data}
    return {"x": x}


def spread_of(degrees: Array) -> float:
    """Return the standard deviation of the logarithms of all degrees above 0."""
    positive = degrees[degrees > 0]
    return float(np.log(positive).std()) if positive.size else 0.0


def _hash(directed: bool, arrays: Iterable[Array], fields: Table) -> str:
    """Return a digest of a graph's content: types, shapes and bytes of arrays and named fields."""
    digest = blake2b(f"{directed}".encode(), digest_size=16)
    named = [*(("", array) for array in arrays), *sorted(fields.items())]
    for name, array in named:
        digest.update(f"{name}{array.dtype.str}{array.shape}".encode())
        for piece in some_rows(array):
            digest.update(np.ascontiguousarray(piece).data)
    return digest.hexdigest()


def some_rows(array: Array) -> Iterator[Array]:
    """Yield the array in pieces of some rows.

    Pages of a mapped file are dropped after use, or they would count as the process's memory."""
    step = max(1, AT_ONCE // max(array[:1].nbytes, 1))
    for start in range(0, len(array), step):
        yield array[start : start + step]
        drop_pages(array)


def drop_pages(array: Any) -> None:
    """Drop the pages of a mapped file from memory; they are read again when they are used."""
    if pages := getattr(array, "_mmap", None):
        pages.madvise(mmap.MADV_DONTNEED)


def _counted(source: str, x: Any) -> tuple[int, float]:
    """Return the number of nonzeros of mapped features, and `GraphStats.beyond_float32`.

    Raises SpecError for NaN and infinities."""
    first, count, beyond = 0, 0, 0.0
    for piece in some_rows(x):
        must_be_finite(source, "x", piece, first)
        first, count = first + len(piece), count + int(np.count_nonzero(piece))
        beyond = max(beyond, _beyond_float32(piece))
    return count, beyond


def _beyond_float32(numbers: Array) -> float:
    """Return the largest magnitude of finite numbers if it is infinite in float32, else 0."""
    if numbers.dtype == np.float32:
        return 0.0
    largest = float(max(numbers.max(initial=0.0), -numbers.min(initial=0.0)))
    return largest if largest >= BEYOND_FLOAT32 else 0.0


def narrowed(path: str, name: str, array: Array, first: int = 0) -> Array:
    """Return features as float32 if float32 represents each exactly, else as float64.

    first: row number of the first row, for messages. Raises SpecError for NaN, infinities, and
    whole numbers that float64 cannot represent exactly."""
    with np.errstate(over="ignore"):
        if array.dtype.itemsize > 8:
            array = array.astype(np.float64)
        narrow = array.astype(np.float32, copy=False)
    must_be_finite(path, name, array, first)
    if array.dtype == np.float32 or array.dtype.itemsize < 4:
        return narrow
    if array.dtype.kind in "iu" and (
        (bad := (array > LARGEST_WHOLE) | (array < -LARGEST_WHOLE)).any()
    ):
        row, *rest = np.argwhere(bad)[0].tolist()
        raise SpecError(
            f"{path}: {name}{[first + row, *rest]}: features must be whole numbers of at most"
            f" {LARGEST_WHOLE:,}, which float64 holds, found {array[bad][0]}; subtract the smallest"
        )
    wide = array.astype(np.float64, copy=False)
    return narrow if np.array_equal(narrow, wide) else wide


def merging_note(x: Features) -> list[str]:
    """Return a note if float32 merges distinct numbers of the features, else nothing."""
    if x.dtype == np.float32:
        return []
    count = min(x.shape[0], COMPARED, max(64, AT_ONCE // (8 * x.shape[1])))
    spread = np.linspace(0, x.shape[0] - 1, count).astype(np.int64)
    rows = x[np.unique(np.append(spread, np.arange(count)))]
    sparse = sp.issparse(rows)
    rows = rows.data[:, None] if sparse else rows
    with np.errstate(over="ignore"):
        both = (np.sort(each, axis=0) for each in (rows, rows.astype(np.float32)))
    before, after = (  # counts of distinct numbers per column, in float64 and in float32
        1 + np.count_nonzero(each[1:] != each[:-1], axis=0) for each in both
    )
    worst = int((after / before).argmin())
    if after[worst] >= (1 - MERGED) * before[worst]:
        return []
    which = "features" if sparse else f"feature {worst}"
    return [
        f"float32 tells {after[worst]:,} of {before[worst]:,} different numbers of {which} apart;"
        " subtract their mean, or use --dtype float64"
    ]


def must_be_finite(path: str, name: str, array: Array, first: int = 0, rule: str = FINITE) -> None:
    """Raise SpecError for NaN and infinities in an array whose first row is row `first`."""
    if (bad := ~np.isfinite(array)).any():
        row, *rest = np.argwhere(bad)[0].tolist()
        raise SpecError(
            f"{path}: {name}{[first + row, *rest]}: {rule}, found {array[bad][0]}"
            f" ({int(bad.sum()):,} such numbers); clean them with numpy.nan_to_num"
        )
