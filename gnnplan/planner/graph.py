"""A graph with its features, labels and masks: from a file, generated, or as statistics only.

Shapes: N vertices, E directed edges, F features, C classes. An edge src->dst means that dst aggregates from src.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from gnnplan.planner.errors import SpecError
from gnnplan.planner.files import MOST_SHOWN, cache_dir, from_json, must_be_file, read_yaml, suggest, write_atomically
from gnnplan.planner.units import show_bytes

Array = NDArray[Any]
DATASETS = Path(__file__).resolve().parent.parent / "datasets"
ARRAYS = ("src", "dst", "x", "x_indptr", "x_indices", "x_shape", "x_data", "y", "train_mask", "val_mask", "test_mask", "meta")
STAND_IN_FEATURES = 128
LARGEST_ARRAY = 64 << 30  # [B]
LONGEST_SOURCE = 4400  # a path of 4096, and parameters
LONGEST_HEADER = 1 << 14  # [B] of an npy file; numpy reads at most 10,000 characters
MOST_CLASSES = 1_000_000
MOST_VERTICES = 2**31 - 1  # ids are int32
MOST_FEATURES = 1_000_000
SPREAD = 1.15  # of a graph whose degrees nobody counted: mean of ten real ones, 0.57 to 1.60 (tests/planner/test_cost.py)
SPARSE = 0.1  # features with at most this share of numbers other than zero are kept sparse
AT_ONCE = 1 << 24  # [B] of an array looked at together


def datasets() -> list[str]:
    """Names of well-known graphs whose statistics are here."""
    return sorted(path.stem for path in DATASETS.glob("*.yaml"))


@dataclass(frozen=True)
class GraphStats:
    """Facts of a graph that a plan needs. `edges` are directed, after symmetrising, without self-loops."""

    name: str
    source: str  # what `load` was given
    vertices: int
    edges: int
    features: int
    classes: int  # 0: no labels, so it can be planned but not trained
    train_vertices: int
    multilabel: bool
    hash: str  # of the content, not of the file
    notes: tuple[str, ...] = ()  # what was changed or made up: 'made undirected', 'stand-in features'
    known: bool = True  # False: statistics only, there is no graph behind them
    directed: bool = False
    halo_rows: Mapping[int, int] = field(default_factory=dict, hash=False)  # statistics only: parts -> sum of halo rows
    nonzeros: int = 0  # numbers in sparse features; 0: they are dense
    spread: float = SPREAD  # standard deviation of log degrees: how unequal vertices are
    batch_spread: tuple[float, float] | None = None  # statistics only: of what is drawn and of what is reached (expected.py)
    train_popular: bool = False  # training vertices have many neighbours


@dataclass(frozen=True, eq=False)
class Graph:
    """CSR of in-neighbours: row v holds, sorted, the vertices that v aggregates from. No self-loops, no duplicates."""

    stats: GraphStats
    indptr: NDArray[np.int64]  # [N+1]
    indices: NDArray[np.int32]  # [E]
    x: NDArray[np.float32] | sp.csr_matrix  # [N, F]; numpy.memmap where they stay in their file
    y: Array  # int64 [N], -1 = no label; or uint8/float32 [N, C] for multi-label; int64 [N] of -1 when there are none
    train: NDArray[np.bool_]  # [N]
    val: NDArray[np.bool_]
    test: NDArray[np.bool_]

    def features(self, rows: Any = slice(None)) -> NDArray[np.float32]:
        """Dense features [len(rows), F] of `rows`: indices, a boolean mask or a slice."""
        picked = self.x[rows]
        return np.asarray(picked.toarray() if sp.issparse(picked) else picked, dtype=np.float32)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Numbers in each row of sparse features [N]."""
        assert not isinstance(self.x, np.ndarray)
        return np.asarray(np.diff(self.x.indptr), dtype=np.int64)

    @property
    def degree(self) -> NDArray[np.int64]:
        """In-degree [N]."""
        return np.diff(self.indptr)

    @property
    def adjacency(self) -> sp.csr_matrix:
        """The structure [N, N] as a boolean matrix that shares memory with the graph."""
        n = self.stats.vertices
        return sp.csr_matrix((np.ones(len(self.indices), bool), self.indices, self.indptr), shape=(n, n))


def load(source: str, directed: bool = False) -> Graph | GraphStats:
    """A graph from 'file.npz[?features=500&seed=0]', a folder with one .npy per array, whose features stay on disk,
    'synthetic:community?vertices=20000&...', or statistics from 'file.yaml' or of a well-known graph ('reddit').

    Makes it undirected unless `directed`, drops self-loops and duplicates, and notes what it changed.
    Raises SpecError naming the file, the array, the rule and the offending number.
    """
    if len(source) > LONGEST_SOURCE:
        raise SpecError(f"{source[:MOST_SHOWN]}...: a graph's name has at most {LONGEST_SOURCE:,} characters, this one "
                        f"{len(source):,}; shorten it")  # fmt: skip
    head, _, query = source.partition("?")
    if head.startswith("synthetic:"):
        kind = head.removeprefix("synthetic:")
        if kind != "community":
            raise SpecError(f"{source}: unknown generator {kind!r}{suggest(kind, ['community'])}")
        if directed:
            raise SpecError(f"{source}: generated graphs are undirected; drop the flag that keeps direction")
        return _community(source, _numbers(source, query, COMMUNITY))
    if head in datasets() and not query:
        return dataclasses.replace(_statistics(str(DATASETS / f"{head}.yaml"), directed), source=head)
    suffix = Path(head).suffix.lower()
    if suffix in (".yaml", ".yml"):
        if query:
            raise SpecError(f"{source}: a statistics file takes no parameters; write them into {head}")
        return _statistics(head, directed)
    if suffix == ".npz" or os.path.isdir(head):
        options = _numbers(source, query, {"features": (STAND_IN_FEATURES, 1, MOST_FEATURES), "seed": (0, 0, 2**31 - 1)})
        return _from_arrays(source, head, options, own_width="features=" in query, directed=directed)
    raise SpecError(f"{source}: a graph is a .npz file, a folder of .npy files, a .yaml file of statistics, the name of such a one that is "
                    f"here ({', '.join(datasets())}), or synthetic:community?vertices=...&edges=..."
                    f"{suggest(Path(head).name, datasets())}")  # fmt: skip


# --- parameters ------------------------------------------------------------------------------------------------------------------------

Ranges = Mapping[str, tuple[float, float, float]]  # name -> default, lowest, highest; an int default asks for an int


def _numbers(source: str, query: str, ranges: Ranges) -> dict[str, Any]:
    """Parameters 'a=1&b=2' checked against their ranges."""
    values: dict[str, Any] = {name: default for name, (default, _, _) in ranges.items()}
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query))
    except ValueError as error:
        raise SpecError(f"{source}: parameters must read name=value&name=value, got {query!r}") from error
    if len({name for name, _ in pairs}) < len(pairs):
        raise SpecError(f"{source}: a parameter is given twice; keep one")
    for name, text in pairs:
        if name not in ranges:
            raise SpecError(f"{source}: unknown parameter {name!r}{suggest(name, ranges)}")
        default, low, high = ranges[name]
        kind = type(default)
        try:
            value = kind(text)
        except ValueError as error:
            raise SpecError(f"{source}: {name} must be {'an integer' if kind is int else 'a number'}, got {text!r}") from error
        if not low <= value <= high:
            raise SpecError(f"{source}: {name} must lie in [{low:,}, {high:,}], got {value:,}")
        values[name] = value
    return values


def _must_fit(source: str, what: str, nbytes: float) -> None:
    """Refuse before allocating: a typo in a size must not bring the machine down."""
    limit = min(LARGEST_ARRAY, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    if nbytes > limit:
        raise SpecError(f"{source}: {what} would take {show_bytes(nbytes)}, more than {show_bytes(limit)} (memory of this machine, "
                        "at most 64 GiB); check the sizes, or give statistics only (.yaml)")


# --- structure -------------------------------------------------------------------------------------------------------------------------


def in_neighbours(src: Array, dst: Array, vertices: int, directed: bool) -> tuple[NDArray[np.int64], NDArray[np.int32], tuple[str, ...]]:
    """CSR (indptr [N+1], indices [E]) of an edge list, without self-loops and duplicates, made undirected unless `directed`; and notes."""
    loops = src == dst
    notes = []
    if dropped := np.count_nonzero(loops):
        src, dst = src[~loops], dst[~loops]
        notes.append(f"dropped {dropped:,} self-loops")
    rows = sp.csr_matrix((np.ones(len(src), bool), (dst, src)), shape=(vertices, vertices))  # sorted; duplicates become one
    if rows.nnz < len(src):
        notes.append(f"dropped {len(src) - rows.nnz:,} duplicate edges")
    if directed:
        notes.append("kept directed")
    else:
        before = rows.nnz
        rows = rows + rows.T
        if rows.nnz > before:
            notes.append(f"made undirected: {before:,} -> {rows.nnz:,} directed edges")
    return rows.indptr.astype(np.int64), rows.indices.astype(np.int32), tuple(notes)  # copies: scipy's may have room to spare


def _unique(keys: NDArray[np.int64]) -> NDArray[np.int64]:
    keys = np.sort(keys)  # np.unique goes through a hash table and is slower on edges
    return keys[np.concatenate([[True], keys[1:] != keys[:-1]])] if len(keys) else keys


def _finish(stats: GraphStats, indptr: NDArray[np.int64], indices: NDArray[np.int32], x: Any, y: Array, *masks: Array) -> Graph:
    """Hash the content, freeze the arrays, put the graph together."""
    structure, others = (indptr, indices), (y, *masks)
    if isinstance(x, np.memmap):
        digest, nonzeros = _remembered(stats, x, structure, others)
    else:
        sparse = sp.issparse(x)
        digest = _hash(stats.directed, (*structure, *((x.indptr, x.indices, x.data) if sparse else (x,)), *others))
        nonzeros = x.nnz if sparse else int(np.count_nonzero(x))
    few = 0 < nonzeros <= SPARSE * stats.vertices * stats.features
    if few and isinstance(x, np.memmap):
        few = False
        note = f"x.npy is mapped, so it stays dense, though only {nonzeros:,} numbers are not zero; x_indptr, x_indices, x_data are sparse"
        stats = dataclasses.replace(stats, notes=(*stats.notes, note))
    elif few and not sp.issparse(x):
        x = sp.csr_matrix(x)
    for array in (*structure, *((x.indptr, x.indices, x.data) if sp.issparse(x) else (x,)), *others):
        array.flags.writeable = False  # the hash must stay true
    told = dataclasses.replace(stats, hash=digest, nonzeros=nonzeros if few else 0, spread=_spread(np.diff(indptr)))
    return Graph(told, indptr, indices, x, y, *masks)


def _spread(degrees: NDArray[np.int64]) -> float:
    """Standard deviation of the logarithms of degrees that are not 0."""
    some = degrees[degrees > 0]
    return float(np.log(some).std()) if some.size else 0.0


def _hash(directed: bool, arrays: Iterable[Array]) -> str:
    digest = blake2b(f"{directed}".encode(), digest_size=16)
    for array in arrays:
        digest.update(f"{array.dtype.str}{array.shape}".encode())
        for piece in _pieces(array):
            digest.update(np.ascontiguousarray(piece).data)
    return digest.hexdigest()


def _pieces(array: Array) -> Iterator[Array]:
    """Some rows at a time. Of a mapped file they are read: pages looked at once need not stay with the process."""
    row = array[:1].nbytes
    step = max(1, AT_ONCE // max(row, 1))
    for start in range(0, len(array), step):
        piece = array[start : start + step]
        if isinstance(array, np.memmap):
            assert array.filename
            piece = np.fromfile(array.filename, array.dtype, piece.size, offset=array.offset + start * row).reshape(piece.shape)
        yield piece


def _remembered(stats: GraphStats, x: np.memmap, structure: tuple[Array, ...], others: tuple[Array, ...]) -> tuple[str, int]:
    """Hash of a graph with mapped features, and how many of these are not zero. The file is read through once, for its name, size and
    time; then it is known from disk by all who map it. Raises SpecError for NaN and infinities."""
    assert x.filename
    file = os.stat(x.filename)
    about = f"{x.filename} {file.st_dev} {file.st_ino} {file.st_size} {file.st_mtime_ns} {_hash(stats.directed, (*structure, *others))}"
    path = cache_dir() / "features" / f"{blake2b(about.encode(), digest_size=16).hexdigest()}.txt"
    with contextlib.suppress(OSError, ValueError):  # absent or damaged: look again
        digest, nonzeros = path.read_text().split()
        if len(digest) == 32:
            return digest, int(nonzeros)
    first = count = 0
    for piece in _pieces(x):
        _must_be_finite(stats.source, "x", piece, first)
        first, count = first + len(piece), count + int(np.count_nonzero(piece))
    digest = _hash(stats.directed, (*structure, x, *others))
    with contextlib.suppress(SpecError):  # a closed or full cache costs time, not the answer
        write_atomically(path, f"{digest} {count}\n", parents=True)
    return digest, count


def _split(labelled: Array, rng: np.random.Generator) -> tuple[Array, Array, Array]:
    """Masks [N] that split the labelled vertices 60/20/20."""
    order = rng.permutation(np.flatnonzero(labelled))
    cuts = [round(0.6 * len(order)), round(0.8 * len(order))]
    masks = []
    for ids in np.split(order, cuts):
        mask = np.zeros(len(labelled), bool)
        mask[ids] = True
        masks.append(mask)
    return masks[0], masks[1], masks[2]


# --- .npz, or a folder of .npy ---------------------------------------------------------------------------------------------------------


def _read_arrays(path: str) -> tuple[dict[str, Array], list[str]]:
    """The known arrays of an npz or a folder and the names of others; reads headers first, never pickles. A folder's x is mapped."""
    folder = os.path.isdir(path)
    how = "each of its arrays with numpy.save" if folder else "it with numpy.savez_compressed"
    try:
        if folder and not path.endswith(".npz"):
            return _from_folder(path)
        if not os.path.lexists(path):
            raise SpecError(f"{path}: no such file")
        must_be_file(path, f"write {how}")
        return _from_zip(path)
    except SpecError:
        raise
    except zipfile.BadZipFile as error:
        raise SpecError(f"{path}: not an npz file ({error}); write {how}") from error
    except Exception as error:  # whatever a damaged file makes zlib, zipfile or numpy raise is the file's fault
        raise SpecError(f"{path}: cannot be read ({type(error).__name__}: {error}); write {how}") from error


def _from_zip(path: str) -> tuple[dict[str, Array], list[str]]:
    arrays, others, nbytes = {}, [], 0
    with zipfile.ZipFile(path) as archive:
        for info in archive.infolist():
            name = info.filename.removesuffix(".npy")
            if name not in ARRAYS:
                others.append(name)
                continue
            if name in arrays:
                raise SpecError(f"{path}: {name}: is there twice; keep one")
            with archive.open(info) as stream:
                nbytes += _check_header(path, name, stream, info.file_size)
            _must_fit(path, "what it holds", nbytes)
            with archive.open(info) as stream:
                arrays[name] = np.lib.format.read_array(stream, allow_pickle=False)
    return arrays, others


def _from_folder(path: str) -> tuple[dict[str, Array], list[str]]:
    arrays, others, nbytes = {}, [], 0
    for file in sorted(Path(path).iterdir()):
        if file.suffix != ".npy" or file.stem not in ARRAYS:
            others.append(file.name)
            continue
        mapped = file.stem == "x"
        must_be_file(file)
        with file.open("rb") as stream:
            size = _check_header(path, file.stem, stream, file.stat().st_size, mapped)
        nbytes += 0 if mapped else size
        _must_fit(path, "what it holds", nbytes)
        arrays[file.stem] = np.load(file, mmap_mode="r" if mapped else None, allow_pickle=False)
    return arrays, others


def _check_header(path: str, name: str, stream: Any, stored: int, mapped: bool = False) -> int:
    """Its bytes. Refuse objects and sizes that lie, before anything is allocated; and what cannot be mapped as it is."""
    stream = io.BytesIO(stream.read(LONGEST_HEADER))  # a header may say that it is itself of gigabytes
    version = np.lib.format.read_magic(stream)
    read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}.get(version)
    if read is None:
        raise SpecError(f"{path}: {name}: npy format {version} is not read; save plain numbers with numpy.savez_compressed")
    shape, fortran, dtype = read(stream)
    if dtype.hasobject:
        raise SpecError(f"{path}: {name}: holds pickled Python objects, which are never loaded; save it as plain numbers (x.astype(...))")
    if any(size < 0 for size in shape):
        raise SpecError(f"{path}: {name}: negative size in shape {shape}")
    if mapped and (fortran or dtype != np.float32 or len(shape) != 2):
        raise SpecError(f"{path}: {name}: is mapped, not read, so it must be float32 [vertices, features] in C order, is {dtype} of shape "
                        f"{shape}{' in Fortran order' * fortran}; save numpy.ascontiguousarray(x, numpy.float32)")
    nbytes = dtype.itemsize
    for size in shape:
        nbytes *= size
    if not mapped:
        _must_fit(path, f"{name} of shape {shape}", nbytes)
    if nbytes > (stored := stored - stream.tell()):
        raise SpecError(f"{path}: {name}: shape {shape} needs {nbytes:,} B but only {stored:,} B are stored; the file is damaged")
    return int(nbytes)


def _typed(path: str, arrays: Mapping[str, Array], name: str, kinds: str, ndim: tuple[int, ...]) -> Array:
    """Array `name`, refused unless its dtype kind and dimensions are as allowed."""
    array = arrays[name]
    words = {"i": "integers", "u": "integers", "b": "booleans", "f": "real numbers", "U": "a JSON string"}
    if array.dtype.kind not in kinds:
        allowed = " or ".join(sorted({words[kind] for kind in kinds}))
        raise SpecError(f"{path}: {name}: must hold {allowed}, has dtype {array.dtype}; convert it with {name}.astype(...)")
    if array.ndim not in ndim:
        raise SpecError(f"{path}: {name}: must have {' or '.join(map(str, ndim))} dimension(s), has shape {array.shape}")
    return array


def _from_arrays(source: str, path: str, options: Mapping[str, Any], own_width: bool, directed: bool) -> Graph:
    arrays, others = _read_arrays(path)
    notes = [f"ignored arrays: {_named(others)}"] if others else []
    for name in ("src", "dst"):
        if name not in arrays:
            raise SpecError(f"{path}: {name}: missing; an edge list src, dst (integers [E]) is required, "
                            f"found {', '.join(sorted(arrays)) or 'nothing'}")
    src, dst = (_typed(path, arrays, name, "iu", (1,)) for name in ("src", "dst"))
    if len(src) != len(dst):
        raise SpecError(f"{path}: src, dst: must have the same length, have {len(src):,} and {len(dst):,}")
    meta = _meta(path, arrays)
    vertices, counted = _count(path, arrays, meta, src, dst)
    if not counted:
        notes.append("vertex count taken from the highest edge id")
    for name, ids in (("src", src), ("dst", dst)):
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < vertices:
            bad = (ids < 0) | (ids >= vertices)
            at = int(np.flatnonzero(bad)[0])
            raise SpecError(f"{path}: {name}[{at}]: vertex ids must lie in [0, {vertices - 1:,}], found {int(ids[at])} "
                            f"({int(bad.sum()):,} such edges); ids count from 0, and {counted or 'the edges'} give {vertices:,} vertices")
    made_up = 0 if "x" in arrays or "x_indptr" in arrays else options["features"]
    _must_fit(source, f"{vertices:,} vertices with {made_up:,} stand-in features" if made_up else f"{vertices:,} vertices",
              vertices * (20.0 + 8 * made_up) + 60.0 * len(src))
    indptr, indices, changes = in_neighbours(src, dst, vertices, directed)
    notes += changes
    del src, dst, arrays["src"], arrays["dst"]  # as large as the graph

    rng = np.random.default_rng(options["seed"])
    x: Any
    if not made_up:
        if own_width:
            raise SpecError(f"{source}: features= is the width of stand-in features, but the file has its own; drop it")
        x = _own_features(path, arrays, vertices)
    else:
        x = _stand_in(indptr, made_up, rng)
        notes.append(f"stand-in features: the file has none, so {made_up} made by seed {options['seed']} (normal noise, one of log degree)")
    y, classes = _labels(path, arrays, vertices, meta)
    train, val, test = _masks(path, arrays, y, classes, vertices, rng, notes, options["seed"])
    stats = GraphStats(name=Path(path).stem, source=source, vertices=vertices, edges=len(indices), features=x.shape[1], classes=classes,
                       train_vertices=int(train.sum()), multilabel=y.ndim == 2, hash="", notes=tuple(notes), directed=directed)
    return _finish(stats, indptr, indices, x, y, train, val, test)


def _named(others: list[str]) -> str:
    """Names that a file's author has chosen: some of them, and no control characters for a terminal."""
    told = [ascii(name)[1:-1][:MOST_SHOWN] for name in sorted(others)[:8]]
    return ", ".join(told + [f"and {len(others) - 8:,} others"] * (len(others) > 8))


def _meta(path: str, arrays: Mapping[str, Array]) -> dict[str, Any]:
    if "meta" not in arrays:
        return {}
    meta = from_json(f"{path}: meta", str(_typed(path, arrays, "meta", "U", (0,))), "leave it out or write json.dumps(...)")
    if not isinstance(meta, dict):
        raise SpecError(f"{path}: meta: must be a JSON object, is {type(meta).__name__}")
    for key in ("vertices", "classes"):
        if key in meta and (isinstance(meta[key], bool) or not isinstance(meta[key], int) or meta[key] < 0):
            raise SpecError(f"{path}: meta.{key}: must be a whole number >= 0, is {str(meta[key])[:MOST_SHOWN]}")
    if meta.get("classes", 0) > MOST_CLASSES:
        raise SpecError(f"{path}: meta.classes: must be at most {MOST_CLASSES:,}, is {str(meta['classes'])[:MOST_SHOWN]}")
    return meta


def _count(path: str, arrays: Mapping[str, Array], meta: Mapping[str, Any], src: Array, dst: Array) -> tuple[int, str]:
    """Vertices, and which arrays say so ('' if only the edges do)."""
    by_vertex = ("x", "y", "train_mask", "val_mask", "test_mask")
    counts = {name: arrays[name].shape[0] for name in by_vertex if name in arrays and arrays[name].ndim}
    if "x_indptr" in arrays:
        counts["x_indptr"] = arrays["x_indptr"].size - 1
    if "vertices" in meta:
        counts["meta.vertices"] = meta["vertices"]
    if len(set(counts.values())) > 1:
        raise SpecError(f"{path}: {', '.join(counts)}: must be given for the same number of vertices, are for "
                        f"{', '.join(f'{count:,}' for count in counts.values())}")
    vertices = next(iter(counts.values())) if counts else max((int(ids.max()) for ids in (src, dst) if len(ids)), default=-1) + 1
    if vertices < 1:
        raise SpecError(f"{path}: {', '.join(counts) or 'src, dst'}: the graph is empty (0 vertices); at least 1 is needed")
    if vertices > MOST_VERTICES:
        raise SpecError(f"{path}: {', '.join(counts) or 'src, dst'}: {vertices:,} vertices; ids of 32 bits reach {MOST_VERTICES:,}")
    return vertices, " and ".join(counts)


def _own_features(path: str, arrays: Mapping[str, Array], vertices: int) -> Any:
    """Features as stored: float32 [N, F] or CSR. Raises SpecError for NaN, infinities and broken CSR."""
    if "x" in arrays and "x_indptr" in arrays:
        raise SpecError(f"{path}: x, x_indptr: features are given twice, dense and sparse; keep one")
    if "x" in arrays:
        x = _typed(path, arrays, "x", "fiub", (2,))
        if not isinstance(x, np.memmap):  # a mapped one is looked at when it is hashed
            x = np.ascontiguousarray(_float32(path, "x", x))
        if not 1 <= x.shape[1] <= MOST_FEATURES:
            raise SpecError(f"{path}: x: must have 1 to {MOST_FEATURES:,} features, has shape {x.shape}")
        return x
    for name in ("x_indices", "x_shape"):
        if name not in arrays:
            raise SpecError(f"{path}: {name}: missing; sparse features need x_indptr, x_indices and x_shape")
    indptr, indices, shape = (_typed(path, arrays, name, "iu", (1,)) for name in ("x_indptr", "x_indices", "x_shape"))
    if len(shape) != 2 or int(shape[0]) != vertices or not 1 <= int(shape[1]) <= MOST_FEATURES:
        raise SpecError(f"{path}: x_shape: must be [{vertices}, features] with 1 to {MOST_FEATURES:,} features, is {shape[:4].tolist()}")
    if int(indptr[0]) != 0 or int(indptr[-1]) != len(indices) or bool((indptr[1:] < indptr[:-1]).any()):
        raise SpecError(f"{path}: x_indptr: must rise from 0 to len(x_indices) = {len(indices):,}, goes from {indptr[0]} to {indptr[-1]}")
    if len(indices) and not 0 <= int(indices.min()) <= int(indices.max()) < int(shape[1]):
        raise SpecError(f"{path}: x_indices: columns must lie in [0, {int(shape[1]) - 1}], found {indices.min()} to {indices.max()}")
    if "x_data" in arrays:
        data = _float32(path, "x_data", _typed(path, arrays, "x_data", "fiub", (1,)))
        if len(data) != len(indices):
            raise SpecError(f"{path}: x_data: must be as long as x_indices ({len(indices):,}), is {len(data):,}")
    else:
        data = np.ones(len(indices), np.float32)
    x = sp.csr_matrix((data, indices.astype(np.int32), indptr.astype(np.int64)), shape=(vertices, int(shape[1])))
    x.sum_duplicates()  # sorts too
    return x


def _float32(path: str, name: str, array: Array) -> NDArray[np.float32]:
    with np.errstate(over="ignore", invalid="ignore"):
        array = array.astype(np.float32, copy=False)
    _must_be_finite(path, name, array)
    return array


def _must_be_finite(path: str, name: str, array: Array, first: int = 0) -> None:
    """Raises SpecError for NaN and infinities; `first`: the row that the array begins with."""
    finite = np.isfinite(array)
    if not finite.all():
        at = np.argwhere(~finite)[0]
        found = array[tuple(at)]
        at[0] += first
        raise SpecError(f"{path}: {name}{at.tolist()}: features must be finite in float32, found {found} "
                        f"({int((~finite).sum()):,} such numbers); clean them with numpy.nan_to_num")


def _stand_in(indptr: NDArray[np.int64], width: int, rng: np.random.Generator) -> NDArray[np.float32]:
    """Made-up features [N, width]: normal noise and, last, the standardised log degree. Labels play no part."""
    x = rng.standard_normal((len(indptr) - 1, width), dtype=np.float32)
    degree = np.log1p(np.diff(indptr))
    spread = degree.std()
    x[:, -1] = (degree - degree.mean()) / spread if spread > 0 else 0
    return x


def _labels(path: str, arrays: Mapping[str, Array], vertices: int, meta: Mapping[str, Any]) -> tuple[Array, int]:
    """Labels as int64 [N] or uint8/float32 [N, C], and the number of classes (0 without labels)."""
    if "y" not in arrays:
        return np.full(vertices, -1, np.int64), 0
    y = _typed(path, arrays, "y", "iufb", (1, 2))
    if y.ndim == 2:
        with np.errstate(invalid="ignore"):
            bad = ~((y >= 0) & (y <= 1))
        if y.shape[1] < 1 or bad.any():
            found = y[bad].ravel()[:1].tolist()
            raise SpecError(f"{path}: y: multi-label targets [N, C] must lie in [0, 1], found {found or f'shape {y.shape}'}")
        return y.astype(np.float32 if y.dtype.kind == "f" else np.uint8), y.shape[1]
    _typed(path, arrays, "y", "iu", (1,))
    low, high = int(y.min()), int(y.max())
    if high < 0 <= low + 1:
        return y.astype(np.int64), 0
    allowed = meta.get("classes") or MOST_VERTICES
    if low < -1 or high >= allowed:
        at = int(np.flatnonzero((y < -1) | (y >= allowed))[0])
        raise SpecError(f"{path}: y[{at}]: labels must be class ids 0 to {allowed - 1:,} (-1 = none), found {int(y[at])}")
    if meta.get("classes"):
        return y.astype(np.int64), int(allowed)
    present = len(np.unique(y[y >= 0]))
    if high + 1 > 2 * present:  # a stray id would silently widen the last layer
        raise SpecError(f"{path}: y[{int(y.argmax())}]: labels must be class ids 0 to C-1 without large gaps, but the highest is {high:,} "
                        f"and only {present:,} ids occur; renumber them with numpy.unique(y, return_inverse=True)")
    return y.astype(np.int64), high + 1


def _masks(path: str, arrays: Mapping[str, Array], y: Array, classes: int, vertices: int, rng: np.random.Generator, notes: list[str],
           seed: int) -> list[Array]:
    """Training, validation and test masks [N]; a declared random split where labels come without one."""
    labelled = y >= 0 if y.ndim == 1 else np.ones(vertices, bool)
    if "train_mask" not in arrays:
        if classes == 0:
            notes.append("no labels: can be planned, not trained")
            return [np.zeros(vertices, bool) for _ in range(3)]
        notes.append(f"random 60/20/20 split by seed {seed}: the file has no train_mask")
        masks = list(_split(labelled, rng))
    else:
        names = ("train_mask", "val_mask", "test_mask")
        masks = [_typed(path, arrays, name, "b", (1,)) if name in arrays else np.zeros(vertices, bool) for name in names]
    train, val, test = masks
    if classes and not train.any():
        raise SpecError(f"{path}: train_mask: marks no vertex; at least 1 of {vertices:,} must be trained on")
    if classes and (bad := train & ~labelled).any():
        at = int(np.flatnonzero(bad)[0])
        raise SpecError(f"{path}: y[{at}]: a training vertex needs a label, found -1 ({int(bad.sum()):,} such vertices); "
                        "take them out of train_mask")
    if (both := train & test).any():
        raise SpecError(f"{path}: train_mask, test_mask: must not overlap, share {int(both.sum()):,} vertices "
                        f"(first: {int(np.flatnonzero(both)[0])})")
    if (train & val).any() or (val & test).any():
        notes.append("val_mask overlaps train_mask or test_mask")
    for name, i in (("val_mask", 1), ("test_mask", 2)):
        if classes and (unlabelled := int((masks[i] & ~labelled).sum())):
            masks[i] = masks[i] & labelled
            notes.append(f"took {unlabelled:,} vertices without label out of {name}")
    return masks


# --- generated -------------------------------------------------------------------------------------------------------------------------

COMMUNITY: Ranges = {
    "vertices": (20_000, 2, 100_000_000), "edges": (1_000_000, 0, 2_000_000_000), "features": (128, 1, 100_000),
    "classes": (16, 1, 100_000), "seed": (0, 0, 2**31 - 1), "communities": (0, 0, 1_000_000), "mixing": (0.2, 0.0, 1.0),
    "skew": (2.5, 1.5, 100.0), "noise": (1.0, 0.0, 100.0), "label_noise": (0.05, 0.0, 1.0),
}  # fmt: skip


def _community(source: str, given: Mapping[str, Any]) -> Graph:
    """A graph of communities with power-law degrees: features hint at the class of a vertex, neighbours hint more.

    mixing: share of edges drawn without regard to communities; skew: exponent of the degree distribution; noise: of the features
    around a class mean of length 1; label_noise: share of labels drawn at random. Vertex ids are shuffled, so that only a
    partitioner that looks at edges finds the communities.
    """
    vertices, edges, classes = given["vertices"], given["edges"], given["classes"]
    communities = given["communities"] or classes
    if edges > vertices * (vertices - 1):
        raise SpecError(f"{source}: edges must be at most vertices * (vertices - 1) = {vertices * (vertices - 1):,}, got {edges:,}")
    if not classes <= communities <= vertices:
        raise SpecError(f"{source}: needs classes <= communities <= vertices, got {classes:,}, {communities:,}, {vertices:,}")
    _must_fit(source, "the graph", 60.0 * edges + vertices * (100.0 + 8 * given["features"]))
    rng = np.random.default_rng(given["seed"])
    community = np.arange(vertices) * communities // vertices  # contiguous while edges are drawn, shuffled at the end
    pairs, filled = _pairs(rng, community, edges // 2, given["mixing"], given["skew"])
    new_id = rng.permutation(vertices)
    a, b = new_id[pairs // vertices], new_id[pairs % vertices]
    indptr, indices, _ = in_neighbours(np.concatenate([a, b]), np.concatenate([b, a]), vertices, directed=True)

    label = np.empty(vertices, np.int64)
    label[new_id] = community % classes
    means = rng.standard_normal((classes, given["features"]), dtype=np.float32)
    means /= np.linalg.norm(means, axis=1, keepdims=True)
    x = rng.standard_normal((vertices, given["features"]), dtype=np.float32)
    x *= np.float32(given["noise"])
    x += means[label]
    y = np.where(rng.random(vertices) < given["label_noise"], rng.integers(0, classes, vertices), label)
    masks = _split(np.ones(vertices, bool), rng)
    notes = ["generated"] + ([f"{filled:,} edges drawn uniformly: the communities were full"] if filled else [])
    stats = GraphStats(name="community", source=source, vertices=vertices, edges=len(indices), features=given["features"], classes=classes,
                       train_vertices=int(masks[0].sum()), multilabel=False, hash="", notes=tuple(notes))
    return _finish(stats, indptr, indices, x, y, *masks)


def _pairs(rng: np.random.Generator, community: Array, count: int, mixing: float, skew: float) -> tuple[NDArray[np.int64], int]:
    """`count` distinct pairs i < j as i * N + j, and how many edges had to be drawn uniformly.

    Both ends are drawn by weight, the second from the community of the first except in a share `mixing`.
    """
    n = len(community)
    weight = (1 - rng.random(n)) ** (-1 / (skew - 1))
    cumulative = np.concatenate([[0.0], np.cumsum(np.minimum(weight, 50 * weight.mean()))])  # no hub may swallow the graph
    first = np.searchsorted(community, np.arange(community[-1] + 1))
    bounds = cumulative[np.append(first, n)]
    pairs = np.empty(0, np.int64)
    for _ in range(8):
        if len(pairs) >= count:
            break
        draws = int(1.15 * (count - len(pairs))) + 64
        a = _pick(rng, cumulative, np.zeros(draws), np.full(draws, cumulative[-1]))
        anywhere = rng.random(draws) < mixing
        low, high = bounds[community[a]], bounds[community[a] + 1]
        b = _pick(rng, cumulative, np.where(anywhere, 0.0, low), np.where(anywhere, cumulative[-1], high))
        pairs = _add(pairs, a, b, n)
    filled = 0
    if len(pairs) < count:
        drawn = len(pairs)
        if n * (n - 1) // 2 <= 8 * count:  # so dense that drawing would not end: list what is missing
            i, j = np.triu_indices(n, 1)
            missing = np.setdiff1d(i.astype(np.int64) * n + j, pairs, assume_unique=True)
            pairs = np.concatenate([pairs, rng.choice(missing, count - len(pairs), replace=False)])
        while len(pairs) < count:
            draws = 2 * (count - len(pairs)) + 64
            pairs = _add(pairs, rng.integers(0, n, draws), rng.integers(0, n, draws), n)
        filled = 2 * (count - drawn)
    return pairs[rng.permutation(len(pairs))[:count]] if len(pairs) > count else pairs, filled


def _pick(rng: np.random.Generator, cumulative: Array, low: Array, high: Array) -> NDArray[np.int64]:
    """Vertices drawn by weight from the stretches [low, high) of the cumulative weight."""
    at = np.searchsorted(cumulative, low + rng.random(len(low)) * (high - low), side="right") - 1
    return np.asarray(np.minimum(at, len(cumulative) - 2))  # rounding may reach the end


def _add(pairs: NDArray[np.int64], a: Array, b: Array, n: int) -> NDArray[np.int64]:
    keys = (np.minimum(a, b) * n + np.maximum(a, b))[a != b]
    return _unique(np.concatenate([pairs, keys]))


# --- statistics only -------------------------------------------------------------------------------------------------------------------

_REQUIRED = ("vertices", "edges", "features", "classes")
_OPTIONAL = ("train_fraction", "name", "multilabel", "halo_rows", "spread", "batch_spread", "train_popular", "directed")


def _statistics(path: str, directed: bool) -> GraphStats:
    """A YAML of vertices, edges (directed, symmetrised), features, classes, train_fraction and, optional, name, multilabel, halo_rows,
    spread, batch_spread, train_popular, directed."""
    document = read_yaml(path)
    data = document.data
    for key in data:
        if key not in _REQUIRED + _OPTIONAL:
            raise document.error((key,), f"unknown field{suggest(str(key), _REQUIRED + _OPTIONAL)}")
    for key in _REQUIRED:
        if key not in data:
            raise document.error((key,), f"missing; a graph of statistics only needs {', '.join(_REQUIRED)}")

    def whole(where: tuple[str | int, ...], value: Any, low: int, high: int) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise document.error(where, f"must be a whole number in [{low:,}, {high:,}], got {str(value)[:MOST_SHOWN]}")
        return value

    vertices = whole(("vertices",), data["vertices"], 1, 10**12)
    edges = whole(("edges",), data["edges"], 0, min(vertices * (vertices - 1), 10**14))
    features = whole(("features",), data["features"], 1, MOST_FEATURES)
    classes = whole(("classes",), data["classes"], 0, MOST_CLASSES)
    fraction, name, multilabel = data.get("train_fraction", 0.6), data.get("name", Path(path).stem), data.get("multilabel", False)
    if isinstance(fraction, bool) or not isinstance(fraction, (int, float)) or not 0 < fraction <= 1:
        raise document.error(("train_fraction",), f"must be a number in (0, 1], got {fraction!r}")
    if not isinstance(name, str):
        raise document.error(("name",), f"must be text, got {name!r}")
    for flag in ("multilabel", "train_popular", "directed"):
        if not isinstance(data.get(flag, False), bool):
            raise document.error((flag,), f"must be true or false, got {data[flag]!r}")

    def is_spread(value: Any) -> bool:
        return not isinstance(value, bool) and isinstance(value, (int, float)) and 0 <= value <= 5

    spread = data.get("spread", SPREAD)
    if not is_spread(spread):
        raise document.error(("spread",), f"is the standard deviation of log degrees, in [0, 5], got {spread!r}")
    told = data.get("batch_spread")
    if told is not None and not (isinstance(told, list) and len(told) == 2 and all(map(is_spread, told))):
        raise document.error(("batch_spread",), f"are two spreads in [0, 5], of what is drawn and of what is reached, got {told!r}")
    drawn_reached = (float(told[0]), float(told[1])) if told else None
    popular, directed = data.get("train_popular", False), directed or data.get("directed", False)
    hints = data.get("halo_rows", {})
    if not isinstance(hints, dict):
        raise document.error(("halo_rows",), "must map parts to rows, as {2: 1000, 4: 2500}")
    halo = {whole(("halo_rows", parts), parts, 1, vertices): whole(("halo_rows", parts), rows, 0, vertices * (parts - 1))
            for parts, rows in hints.items()}  # fmt: skip
    facts = (name, vertices, edges, features, classes, float(fraction), multilabel, sorted(halo.items()), directed, float(spread),
             drawn_reached, popular)
    return GraphStats(name=name, source=path, vertices=vertices, edges=edges, features=features, classes=classes,
                      train_vertices=max(1, round(fraction * vertices)), multilabel=multilabel,
                      hash=blake2b(repr(facts).encode(), digest_size=16).hexdigest(), notes=("statistics only",),
                      known=False, directed=directed, halo_rows=halo, spread=float(spread),
                      batch_spread=drawn_reached, train_popular=popular)
