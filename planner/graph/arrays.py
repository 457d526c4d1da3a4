"""Reads a graph from a .npz file, or from a folder with one .npy file per array.

Every array is checked by its header before anything is allocated. Pickles are never read."""

from __future__ import annotations

import contextlib
import io
import math
import os
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from gnnplan.planner.graph.fields import (
    EDGE,
    NAME,
    NUMBERS,
    VERTEX,
    along,
    fields_in,
    kind_of,
)
from gnnplan.planner.graph.graph import (
    LARGEST_WHOLE,
    MOST_CLASSES,
    MOST_FEATURES,
    MOST_VERTICES,
    Array,
    Features,
    Graph,
    GraphStats,
    finish,
    in_neighbours,
    merging_note,
    must_fit,
    narrowed,
)
from gnnplan.planner.graph.masks import MASKS, as_mask, column, split_of
from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.planner.vocabulary.files import MOST_SHOWN, from_json, must_be_file
from gnnplan.planner.vocabulary.units import show_bytes, show_count

ARRAYS = (
    "src",
    "dst",
    "x",
    "x_indptr",
    "x_indices",
    "x_shape",
    "x_data",
    "y",
    *MASKS,
    "meta",
)
STAND_IN_FEATURES = 128
STAND_IN_CLASSES = 16
STAND_IN_LABELS = "STAND-IN LABELS"  # how the note of them begins
# what libraries write for no label, besides numbers below 0: the highest of a type
NO_LABEL = [2**bits - 1 for bits in (8, 16, 31, 32, 63, 64)]
MOST_PACKED = 200  # times smaller than it is; zeros alone pack 230 to 1,030 times
MOST_SWOLLEN = 1 << 29  # [B] that may be smaller than that
LONGEST_HEADER = 1 << 14  # [B] of an npy header; numpy reads at most 10,000 characters


def read_arrays(path: str) -> tuple[dict[str, Array], list[str]]:
    """Read the arrays of a file or a folder, and list the names of those that are not known.

    Known are ARRAYS, and fields, which get the names of fields.py: an array with a row for each
    vertex or edge is one. Features and fields of vertices in a folder are mapped. Raises
    SpecError."""
    folder = os.path.isdir(path)
    remedy = (
        "write each of its arrays with numpy.save"
        if folder
        else "write it with numpy.savez_compressed"
    )
    try:
        if folder and not path.endswith(".npz"):
            return _from_folder(path)
        if not os.path.lexists(path):
            raise SpecError(f"{path}: no such file")
        must_be_file(path, remedy)
        return _from_zip(path)
    except SpecError:
        raise
    except zipfile.BadZipFile as error:
        raise SpecError(f"{path}: not an npz file ({error}); {remedy}") from error
    except Exception as error:
        # a damaged file makes zlib, zipfile and numpy raise exceptions of many types
        raise SpecError(
            f"{path}: cannot be read ({type(error).__name__}: {error}); {remedy}"
        ) from error


def _from_zip(path: str) -> tuple[dict[str, Array], list[str]]:
    with zipfile.ZipFile(path) as archive:
        nbytes = 0

        def read(info: zipfile.ZipInfo) -> Array:
            nonlocal nbytes
            nbytes += check_member(path, archive, info).nbytes
            must_fit(path, "what it holds", nbytes)
            with archive.open(info) as stream:
                return np.asarray(np.lib.format.read_array(stream, allow_pickle=False))

        arrays: dict[str, Array] = {}
        others: dict[str, zipfile.ZipInfo] = {}
        for info in archive.infolist():
            name = info.filename.removesuffix(".npy")
            if not _is_known(name):
                others[name] = info
                continue
            if name in arrays:
                raise SpecError(f"{path}: {name}: is there twice; keep one")
            arrays[name] = read(info)
        headers = {}
        for name, info in others.items():
            with contextlib.suppress(Exception), archive.open(info) as stream:
                headers[name] = read_header(path, name, stream)
        for name, of in _fields_among(path, arrays, headers).items():
            arrays[of + name] = read(others.pop(name))
    return arrays, [*others]


def _from_folder(path: str) -> tuple[dict[str, Array], list[str]]:
    nbytes = 0

    def read(file: Path, is_mapped: bool) -> Array:
        nonlocal nbytes
        must_be_file(file)
        is_x = file.stem == "x"
        with file.open("rb") as stream:
            stored = file.stat().st_size
            size = check_header(path, file.stem, stream, stored, is_x, not is_mapped).nbytes
        nbytes += 0 if is_mapped else size
        must_fit(path, "what it holds", nbytes)
        is_mapped = is_mapped and (is_x or size > 0)
        return np.asanyarray(np.load(file, "r" if is_mapped else None, allow_pickle=False))

    arrays, others = {}, dict[str, Path]()
    for file in sorted(Path(path).iterdir()):
        if file.suffix == ".npy" and _is_known(file.stem):
            arrays[file.stem] = read(file, file.stem == "x" or file.stem.startswith(VERTEX))
        else:
            others[file.name] = file
    headers = {}
    for file in others.values():
        if file.suffix == ".npy":
            with contextlib.suppress(Exception), file.open("rb") as stream:
                headers[file.stem] = read_header(path, file.stem, stream)
    for name, of in _fields_among(path, arrays, headers).items():
        arrays[of + name] = read(others.pop(f"{name}.npy"), of == VERTEX)
    return arrays, [*others]


def _is_known(name: str) -> bool:
    """Whether an array of this name is read, however many rows it has."""
    prefix = next((prefix for prefix in (VERTEX, EDGE) if name.startswith(prefix)), None)
    return name in ARRAYS or (prefix and NAME.fullmatch(name.removeprefix(prefix))) is not None


def _fields_among(
    path: str, arrays: Mapping[str, Array], headers: Mapping[str, Header]
) -> dict[str, str]:
    """Which other arrays are fields, and whether of vertices or edges. Raises SpecError."""
    shapes = {
        name: header.shape
        for name, header in headers.items()
        if header.shape and all(header.shape[1:]) and header.dtype.kind in NUMBERS
        if NAME.fullmatch(name) and name != "edge_index"
    }
    if not shapes or not {"src", "dst"} <= arrays.keys():
        return {}
    src, dst = _edge_list(path, arrays, [])
    vertices, _ = _count(path, arrays, meta_of(path, arrays), src, dst)
    found = {}
    for name, (rows, *_) in shapes.items():
        of = kind_of(path, name, rows, vertices, len(src))
        if of == VERTEX and rows == len(src):
            raise SpecError(
                f"{path}: {name}: has {rows:,} rows, and there are as many vertices as edges; name"
                f" it {VERTEX}{name} or {EDGE}{name}"
            )
        if of and of + name in arrays:
            raise SpecError(f"{path}: {name}: is there as {of}{name} too; keep one")
        if of:
            found[name] = of
    return found


def must_not_swell(what: str, unpacked: float, packed: float, most: float = 1.0) -> None:
    """Raise SpecError for what a few megabytes were made to unpack into gigabytes.

    unpacked, packed: sizes [B]. most: the share of MOST_SWOLLEN that may be. Edges
    pack tenfold, labels that most vertices lack 60-fold."""
    if unpacked > most * MOST_SWOLLEN and unpacked > MOST_PACKED * packed:
        raise SpecError(
            f"{what}: unpacks to {show_bytes(unpacked)} from {show_bytes(packed)}, more than"
            f" {MOST_PACKED} times as much; if it is meant so, store it uncompressed"
        )


class Header(NamedTuple):
    """What an npy header says."""

    shape: tuple[int, ...]
    fortran: bool  # in Fortran order
    dtype: np.dtype[Any]
    begin: int  # its length [B]

    @property
    def nbytes(self) -> int:
        """Size of the array [B]."""
        return math.prod(self.shape) * self.dtype.itemsize


def read_header(path: str, name: str, stream: IO[bytes]) -> Header:
    """Read an npy header."""
    # at most LONGEST_HEADER bytes: a header may claim to be gigabytes long
    header = io.BytesIO(stream.read(LONGEST_HEADER))
    version = np.lib.format.read_magic(header)
    read = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }.get(version)
    if read is None:
        raise SpecError(
            f"{path}: {name}: npy format {version} is not read; save plain numbers with"
            " numpy.savez_compressed"
        )
    return Header(*read(header), header.tell())


def check_header(
    path: str, name: str, stream: IO[bytes], stored: int, mapped: bool = False, fits: bool = True
) -> Header:
    """Check an array by its header, before anything is allocated.

    fits: it must fit the memory, unless it is mapped. Raises SpecError for pickled objects, for a
    shape that does not fit what is stored, and for an array that cannot be mapped as it is."""
    header = shape, fortran, dtype, begin = read_header(path, name, stream)
    nbytes, stored = header.nbytes, stored - begin
    if dtype.hasobject:
        raise SpecError(
            f"{path}: {name}: holds pickled Python objects, which are never loaded; save it as"
            " plain numbers (x.astype(...))"
        )
    if any(size < 0 for size in shape):
        raise SpecError(
            f"{path}: {name}: negative size in shape {shape}; the file is damaged, write it again"
        )
    if mapped and (fortran or dtype not in (np.float32, np.float64) or len(shape) != 2):
        raise SpecError(
            f"{path}: {name}: is mapped, not read, so it must be float32 or float64 [vertices,"
            f" features] in C order, is {dtype} of shape {shape}{' in Fortran order' * fortran};"
            " save numpy.ascontiguousarray(x, numpy.float32)"
        )
    if fits and not mapped:
        must_fit(path, f"{name} of shape {shape}", nbytes)
    if nbytes != stored:
        raise SpecError(
            f"{path}: {name}: shape {shape} needs {nbytes:,} B but {'only ' * (nbytes > stored)}"
            f"{stored:,} B are stored; the file is damaged, write it again"
        )
    return header


def check_member(
    path: str, archive: zipfile.ZipFile, info: zipfile.ZipInfo, fits: bool = True
) -> Header:
    """Check an array of a .npz by its header, as `check_header` does. Raises SpecError."""
    name = info.filename.removesuffix(".npy")
    must_not_swell(f"{path}: {name}", info.file_size, info.compress_size)
    with archive.open(info) as stream:
        return check_header(path, name, stream, info.file_size, fits=fits)


def _typed(
    path: str, arrays: Mapping[str, Array], name: str, kinds: str, ndim: tuple[int, ...]
) -> Array:
    """The array `name`. Raises SpecError unless its dtype kind and dimensions are as allowed."""
    array = arrays[name]
    meanings = {
        "i": "integers",
        "u": "integers",
        "b": "booleans",
        "f": "real numbers",
        "U": "a JSON string",
    }
    if array.dtype.kind not in kinds:
        allowed = " or ".join(sorted({meanings[kind] for kind in kinds}))
        raise SpecError(
            f"{path}: {name}: must hold {allowed}, has dtype {array.dtype}; convert it with"
            f" {name}.astype(...)"
        )
    if array.ndim not in ndim:
        raise SpecError(
            f"{path}: {name}: must have {' or '.join(map(str, ndim))} dimension(s), has shape"
            f" {array.shape}; reshape it"
        )
    return array


@dataclass(frozen=True)
class MadeUp:
    """What is made up where a graph's arrays lack it, and what its labels are."""

    width: int = STAND_IN_FEATURES  # of stand-in features
    own_width: bool = False  # the user asked for that width
    labels: bool = False  # stand-in labels
    numbers: bool = False  # its labels are numbers to predict, whatever they look like
    seed: int = 0


def must_be_a_graph(
    path: str, arrays: Mapping[str, Array], others: list[str], numbers: bool = False
) -> tuple[int, int]:
    """Raise SpecError where `build` would, without the memory it takes: (vertices, edges).

    numbers: its labels are numbers to predict, whatever they look like."""
    src, dst = _edge_list(path, arrays, others)
    meta = meta_of(path, arrays)
    vertices, counted = _count(path, arrays, meta, src, dst)
    _check_ids(path, src, dst, vertices, counted)
    if "x" in arrays or "x_indptr" in arrays:
        own_features(path, arrays, vertices)
    fields_in(path, arrays, vertices, len(src))
    if {"y", *MASKS} & arrays.keys():  # of as many vertices
        found = read_labels(path, arrays, vertices, meta, numbers)
        rng, notes = np.random.default_rng(0), list[str]()
        split_of(path, _masks(path, arrays, notes), found.labelled, found.classes, rng, notes, 0)
    return vertices, len(src)


def build(
    source: str,
    path: str,
    arrays: dict[str, Array],
    others: list[str],
    made_up: MadeUp,
    directed: bool,
    said: Sequence[str] = (),
) -> Graph:
    """The graph of the arrays of `path`, with a note for everything that was changed or made up.

    others: names of arrays that were not read. said: notes of who read them. `arrays` loses its
    edge list. Raises SpecError that names the array, the rule and the offending number."""
    notes = [*said, *([f"ignored arrays: {shown(others, 8)}"] if others else [])]
    src, dst = _edge_list(path, arrays, others)
    meta = meta_of(path, arrays)
    vertices, counted = _count(path, arrays, meta, src, dst)
    if not counted:
        notes.append("vertex count taken from the highest edge id")
        if first := min(int(src.min()), int(dst.min())):
            notes.append(
                f"no edge has vertex 0: ids begin with {first:,}; if they count from 1, subtract 1"
            )
    _check_ids(path, src, dst, vertices, counted)
    vertex_fields, on_edges = fields_in(path, arrays, vertices, len(src))
    stand_in_width = 0 if "x" in arrays or "x_indptr" in arrays else made_up.width
    must_fit(
        source,
        (
            f"{vertices:,} vertices with {stand_in_width:,} stand-in features"
            if stand_in_width
            else f"{vertices:,} vertices"
        ),
        vertices * (20.0 + 8 * stand_in_width)
        + (120.0 if on_edges else 60.0) * len(src)
        + sum(2.0 * field.nbytes for field in on_edges.values()),
    )
    indptr, indices, changes = in_neighbours(src, dst, vertices, directed)
    edge_fields, moved = along(on_edges, (src, dst), (indptr, indices), directed)
    notes += [*changes, *moved] if len(indices) else [*changes, *moved, "the graph has no edges"]
    for name in ("src", "dst", *(EDGE + name for name in on_edges)):
        del arrays[name]  # they take as much memory as the graph
    del src, dst, on_edges

    rng = np.random.default_rng(made_up.seed)
    x: Features
    if not stand_in_width:
        if made_up.own_width:
            raise SpecError(
                f"{source}: features= is the width of stand-in features, but the file has its own;"
                " drop it"
            )
        x = own_features(path, arrays, vertices)
        notes += merging_note(x)
    else:
        x = _stand_in(indptr, stand_in_width, rng)
        notes.append(
            f"stand-in features: the file has none, so {stand_in_width} made by seed"
            f" {made_up.seed} (normal noise, one of log degree)"
        )
    y, classes, labelled, numbers = read_labels(path, arrays, vertices, meta, made_up.numbers)
    if numbers:
        several = show_count(classes, "number")
        notes.append(f"regression: y holds {several} per vertex to predict, no classes")
    if made_up.labels:
        if classes:
            raise SpecError(
                f"{source}: task none makes stand-in labels, but the graph has its own"
                f" ({classes:,} classes); drop --task none"
            )
        classes = meta.get("classes") or STAND_IN_CLASSES
        y = rng.integers(0, classes, vertices)
        notes.append(
            f"{STAND_IN_LABELS}: the graph has none, so {classes} classes were drawn by seed"
            f" {made_up.seed}; time, bytes and memory are real, losses and accuracy mean nothing"
        )
    given = _masks(path, arrays, notes)
    train, val, test = split_of(path, given, labelled, classes, rng, notes, made_up.seed)
    stats = GraphStats(
        name=Path(path).stem,
        source=source,
        vertices=vertices,
        edges=len(indices),
        features=x.shape[1],
        classes=classes,
        train_vertices=int(train.sum()),
        multilabel=y.ndim == 2 and not numbers,
        numbers=numbers,
        hash="",
        notes=tuple(notes),
        directed=directed,
    )
    return finish(
        stats,
        indptr,
        indices,
        x,
        y,
        train,
        val,
        test,
        vertex_fields=vertex_fields,
        edge_fields=edge_fields,
    )


def _masks(path: str, arrays: Mapping[str, Array], notes: list[str]) -> dict[str, Array]:
    """The masks among the arrays."""
    return {
        name: as_mask(path, name, _typed(path, arrays, name, "biuf", (1, 2)), notes)
        for name in MASKS
        if name in arrays
    }


def _edge_list(path: str, arrays: Mapping[str, Array], others: list[str]) -> tuple[Array, Array]:
    """The edge list src, dst (integers [E])."""
    for name in ("src", "dst"):
        if name not in arrays:
            if os.path.isdir(path):
                others = [file.removesuffix(".npy") for file in others if file.endswith(".npy")]
            raise SpecError(
                f"{path}: {name}: missing; an edge list src, dst (integers [E]) is required, found"
                f" {shown([*arrays, *others], 100) or 'nothing'}{_edge_index_remedy(path)}"
            )
    ends = {name: arrays[name] for name in ("src", "dst")}  # what is empty has no type
    ends = {name: ids if ids.size else ids.astype(np.int64) for name, ids in ends.items()}
    src, dst = (_typed(path, ends, name, "iu", (1,)) for name in ends)
    if len(src) != len(dst):
        raise SpecError(
            f"{path}: src, dst: must have the same length, have {len(src):,} and {len(dst):,};"
            " write both ends of every edge"
        )
    return src, dst


def _check_ids(path: str, src: Array, dst: Array, vertices: int, counted: str) -> None:
    """Raises SpecError for an id beyond the vertices; `counted` names what says how many."""
    for name, ids in (("src", src), ("dst", dst)):
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < vertices:
            bad = (ids < 0) | (ids >= vertices)
            first = int(np.flatnonzero(bad)[0])
            raise SpecError(
                f"{path}: {name}[{first}]: vertex ids must lie in [0, {vertices - 1:,}], found"
                f" {int(ids[first])} ({int(bad.sum()):,} such edges); ids count from 0, and"
                f" {counted or 'the edges'} give {vertices:,} vertices"
            )


def shown(names: Sequence[str], most: int) -> str:
    """At most `most` of the names, without control characters that a terminal would obey."""
    shown = [ascii(name)[1:-1][:MOST_SHOWN] for name in sorted(names)[:most]]
    return ", ".join(shown + [f"and {len(names) - most:,} others"] * (len(names) > most))


def _edge_index_remedy(path: str) -> str:
    """What to do with PyG's `edge_index` [2, E], where the file holds one."""
    try:
        if os.path.isdir(path):
            file = Path(path) / "edge_index.npy"
            must_be_file(file)
            with file.open("rb") as stream:
                shape = read_header(path, "edge_index", stream).shape
        else:
            with zipfile.ZipFile(path) as archive, archive.open("edge_index.npy") as stream:
                shape = read_header(path, "edge_index", stream).shape
    except Exception:  # absent or damaged: the caller reports what is missing anyway
        return ""
    if len(shape) != 2 or shape[0] != 2:
        return ""
    return "; save src=edge_index[0], dst=edge_index[1]"


def meta_of(path: str, arrays: Mapping[str, Array]) -> dict[str, Any]:
    """The JSON object `meta`, which may hold `vertices` and `classes`; {} if there is none."""
    if "meta" not in arrays:
        return {}
    meta = from_json(
        f"{path}: meta",
        str(_typed(path, arrays, "meta", "U", (0,))),
        "leave it out or write json.dumps(...)",
    )
    if not isinstance(meta, dict):
        raise SpecError(f"{path}: meta: must be a JSON object, is {type(meta).__name__}")
    for key in ("vertices", "classes"):
        if key in meta and (
            isinstance(meta[key], bool) or not isinstance(meta[key], int) or meta[key] < 0
        ):
            raise SpecError(
                f"{path}: meta.{key}: must be a whole number >= 0, is {str(meta[key])[:MOST_SHOWN]}"
            )
    if meta.get("classes", 0) > MOST_CLASSES:
        raise SpecError(
            f"{path}: meta.classes: must be at most {MOST_CLASSES:,}, is"
            f" {str(meta['classes'])[:MOST_SHOWN]}"
        )
    return meta


def _count(
    path: str, arrays: Mapping[str, Array], meta: Mapping[str, Any], src: Array, dst: Array
) -> tuple[int, str]:
    """The number of vertices, and the names of the arrays that say so ('' if only edges do)."""
    by_vertex = ("x", "y", *MASKS, *(name for name in arrays if name.startswith(VERTEX)))
    counts = {
        name: arrays[name].shape[0] for name in by_vertex if name in arrays and arrays[name].ndim
    }
    if "x_indptr" in arrays:
        counts["x_indptr"] = arrays["x_indptr"].size - 1
    if "vertices" in meta:
        counts["meta.vertices"] = meta["vertices"]
    if len(set(counts.values())) > 1:
        raise SpecError(
            f"{path}: {', '.join(counts)}: must be given for the same number of vertices, are for "
            f"{', '.join(f'{count:,}' for count in counts.values())}; give each a row per vertex"
        )
    vertices = (
        next(iter(counts.values()))
        if counts
        else max((int(ids.max()) for ids in (src, dst) if len(ids)), default=-1) + 1
    )
    if vertices < 1:
        raise SpecError(
            f"{path}: {', '.join(counts) or 'src, dst'}: the graph is empty (0 vertices); at least"
            " 1 is needed"
        )
    if vertices > MOST_VERTICES:
        raise SpecError(
            f"{path}: {', '.join(counts) or 'src, dst'}: {vertices:,} vertices; ids of 32 bits"
            f" reach {MOST_VERTICES:,}"
        )
    return vertices, " and ".join(counts)


def own_features(path: str, arrays: Mapping[str, Array], vertices: int) -> Features:
    """The features that the file holds: [N, F] or CSR.

    Raises SpecError for NaN, infinities and a broken CSR."""
    if "x" in arrays and "x_indptr" in arrays:
        raise SpecError(
            f"{path}: x, x_indptr: features are given twice, dense and sparse; keep one"
        )
    if "x" in arrays:
        x = _typed(path, arrays, "x", "fiub", (2,))
        if not isinstance(x, np.memmap):  # mapped features are checked when they are hashed
            x = np.ascontiguousarray(narrowed(path, "x", x))
        if not 1 <= x.shape[1] <= MOST_FEATURES:
            raise SpecError(
                f"{path}: x: must have 1 to {MOST_FEATURES:,} features, has shape {x.shape}; save"
                " [vertices, features], or leave it out"
            )
        return x
    return _sparse_features(path, arrays, vertices)


def _sparse_features(path: str, arrays: Mapping[str, Array], vertices: int) -> sp.csr_matrix:
    for name in ("x_indices", "x_shape"):
        if name not in arrays:
            raise SpecError(
                f"{path}: {name}: missing; sparse features need x_indptr, x_indices and x_shape"
            )
    indptr, indices, shape = (
        _typed(path, arrays, name, "iu", (1,)) for name in ("x_indptr", "x_indices", "x_shape")
    )
    if len(shape) != 2 or int(shape[0]) != vertices or not 1 <= int(shape[1]) <= MOST_FEATURES:
        raise SpecError(
            f"{path}: x_shape: must be [{vertices}, features] with 1 to {MOST_FEATURES:,} features,"
            f" is {shape[:4].tolist()}; save the matrix's shape"
        )
    if (
        int(indptr[0]) != 0
        or int(indptr[-1]) != len(indices)
        or bool((indptr[1:] < indptr[:-1]).any())
    ):
        raise SpecError(
            f"{path}: x_indptr: must rise from 0 to len(x_indices) = {len(indices):,}, goes from"
            f" {indptr[0]} to {indptr[-1]}; save the indptr of a scipy.sparse.csr_matrix"
        )
    if len(indices) and not 0 <= int(indices.min()) <= int(indices.max()) < int(shape[1]):
        raise SpecError(
            f"{path}: x_indices: columns must lie in [0, {int(shape[1]) - 1}], found"
            f" {indices.min()} to {indices.max()}; save its indices, or widen x_shape"
        )
    if "x_data" in arrays:
        data = narrowed(path, "x_data", _typed(path, arrays, "x_data", "fiub", (1,)))
        if len(data) != len(indices):
            raise SpecError(
                f"{path}: x_data: must be as long as x_indices ({len(indices):,}), is"
                f" {len(data):,}; save a number for each index"
            )
    else:
        data = np.ones(len(indices), np.float32)
    x = sp.csr_matrix(
        (data, indices.astype(np.int32), indptr.astype(np.int64)), shape=(vertices, int(shape[1]))
    )
    x.sum_duplicates()  # sorts too
    return x


def _stand_in(
    indptr: NDArray[np.int64], width: int, rng: np.random.Generator
) -> NDArray[np.float32]:
    """Made-up features [N, width], without regard to labels.

    They are normal noise, except for the last column, the standardised log degree."""
    x = rng.standard_normal((len(indptr) - 1, width), dtype=np.float32)
    degree = np.log1p(np.diff(indptr))
    spread = degree.std()
    x[:, -1] = (degree - degree.mean()) / spread if spread > 0 else 0
    return x


def class_ids(path: str, name: str, y: Array) -> Array:
    """Labels as class ids [N], integers, or targets [N, C], or what can be neither as it is.

    A single column is class ids, and NaN is no label. Raises SpecError for ids beyond float64."""
    y = column(y)
    if y.ndim != 1 or y.dtype.kind in "iu":
        return y
    whole = np.where(np.isnan(y), -1.0, y)
    if (whole != np.floor(whole)).any():
        return y
    if (bad := np.abs(whole) > LARGEST_WHOLE).any():
        first = int(np.flatnonzero(bad)[0])
        raise SpecError(
            f"{path}: {name}[{first}]: labels must be whole class ids (NaN or -1: none), found"
            f" {y[first]}; if they are numbers to predict, use --task regression"
        )
    return whole.astype(np.int64)


class Labels(NamedTuple):
    """Labels, the number of classes (0 without labels), and which vertices have one [N].

    Class ids are int64 [N], -1 for none. Multi-label targets are uint8 or float32 [N, C]. Numbers
    are float32 [N, C], NaN for none. Without labels all vertices count as labelled."""

    y: Array
    classes: int
    labelled: Array
    numbers: bool = False  # to predict, not classes


def read_labels(
    path: str,
    arrays: Mapping[str, Array],
    vertices: int,
    meta: Mapping[str, Any],
    numbers: bool = False,
) -> Labels:
    """The labels of a graph. numbers: they are numbers to predict, whatever they look like.

    Else only those are that can be no labels: fractions in one column, or beyond [0, 1] in several.
    Raises SpecError."""
    nothing = Labels(np.full(vertices, -1, np.int64), 0, np.ones(vertices, bool))
    if "y" not in arrays:
        return nothing
    y = _typed(path, arrays, "y", "iufb", (1, 2))
    if numbers or _are_numbers(y := class_ids(path, "y", y)):
        found = _numbers(path, y)
    elif y.ndim == 2:
        labelled = ~((y == -1) | np.isnan(y)).all(1)
        found = Labels(_targets(path, y, labelled), y.shape[1], labelled)
    else:
        found = Labels(y.astype(np.int64), _classes(path, y, meta), y >= 0)
    return found if found.labelled.any() else nothing


def _are_numbers(y: Array) -> bool:
    """Whether these can be no labels."""
    if y.dtype.kind != "f":
        return False
    known = y[np.isfinite(y)]
    beyond = y.ndim == 1 or bool(((known < 0) | (known > 1)).any())
    return beyond and bool((known != np.floor(known)).any())


def _numbers(path: str, y: Array) -> Labels:
    """Numbers to predict. Raises SpecError for infinities."""
    with np.errstate(over="ignore", invalid="ignore"):
        y = y.reshape(len(y), -1).astype(np.float32)
    if np.isinf(y).any():
        raise SpecError(
            f"{path}: y{np.argwhere(np.isinf(y))[0].tolist()}: numbers to predict must be finite in"
            " float32 (NaN: none); scale them"
        )
    return Labels(y, y.shape[1], ~np.isnan(y).any(1), numbers=True)


def _targets(path: str, y: Array, labelled: Array) -> Array:
    """Targets [N, C] in [0, 1]; 0 where a vertex has none. Raises SpecError."""
    with np.errstate(invalid="ignore"):
        bad = ~((y >= 0) & (y <= 1)) & labelled[:, None]
    if y.shape[1] < 1 or bad.any():
        first, found = np.argwhere(bad)[:1].tolist(), y[bad].ravel()[:1].tolist()
        raise SpecError(
            f"{path}: y{first[0] if first else ''}: multi-label targets [N, C] must lie in [0, 1],"
            f" found {found or f'shape {y.shape}'}; save 0 or 1 for each class, write -1 for all"
            " classes of a vertex without labels, or save class ids as integers [N]"
        )
    y = np.where(labelled[:, None], y, np.zeros(1, y.dtype))
    return y.astype(np.uint8 if np.isin(y, (0, 1)).all() else np.float32)


def _classes(path: str, y: Array, meta: Mapping[str, Any]) -> int:
    """The number of classes of the ids y [N]. Raises SpecError for what is no class id."""
    allowed = meta.get("classes") or MOST_VERTICES
    if (bad := (y < -1) | (y >= allowed)).any():
        first = int(np.flatnonzero(bad)[0])
        raise SpecError(
            f"{path}: y[{first}]: labels must be class ids 0 to {allowed - 1:,} (-1 = none), found"
            f" {int(y[first])}; {_remedy_of(int(y[first]))}"
        )
    if meta.get("classes"):
        return int(allowed)
    ids = np.unique(y[y >= 0])
    high = int(ids[-1]) if ids.size else -1
    marks = high in NO_LABEL and int(ids[-2:][0]) != high - 1
    if marks or high + 1 > 2 * ids.size:  # a stray id would widen the last layer, unseen
        raise SpecError(
            f"{path}: y[{int(y.argmax())}]: labels must be class ids 0 to C-1 without large gaps,"
            f" but the highest is {high:,} and only {ids.size:,} ids occur; {_remedy_of(high)}"
        )
    return high + 1


def _remedy_of(label: int) -> str:
    """What to do with a number that is no class id."""
    write = f"write -1 for no label: y = y.astype(int); y[y == {label}] = -1"
    if label < 0 or label in NO_LABEL:
        return write
    return (
        f"if {label} marks no label, {write}; else renumber them with y[y >= 0] ="
        " numpy.unique(y[y >= 0], return_inverse=True)[1]; for numbers to predict, use"
        " --task regression"
    )
