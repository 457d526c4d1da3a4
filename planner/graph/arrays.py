"""Reads a graph from a .npz file, or from a folder with one .npy file per array.

Every array is checked by its header before anything is allocated. Pickles are never read."""

from __future__ import annotations

import contextlib
import os
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gnnplan.planner.graph.features import own_features, stand_in
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
    MOST_CLASSES,
    MOST_VERTICES,
    Array,
    Features,
    Graph,
    GraphStats,
    finish,
    in_neighbours,
    merging_note,
    must_fit,
)
from gnnplan.planner.graph.ids import must_be_ids
from gnnplan.planner.graph.labels import read_labels
from gnnplan.planner.graph.masks import MASKS, as_mask, split_of
from gnnplan.planner.graph.npy import Header, check_header, check_member, read_header, typed
from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.planner.vocabulary.files import MOST_SHOWN, from_json, must_be_file
from gnnplan.planner.vocabulary.units import show_count

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
    src, _, meta, vertices, _ = _checked_edges(path, arrays, others)
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
    src, dst, meta, vertices, counted = _checked_edges(path, arrays, others)
    if not counted:
        notes.append("vertex count taken from the highest edge id")
        if first := min(int(src.min()), int(dst.min())):
            notes.append(
                f"no edge has vertex 0: ids begin with {first:,}; if they count from 1, subtract 1"
            )
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
        x = stand_in(indptr, stand_in_width, rng)
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
    masks = train, val, test
    return finish(Graph(stats, indptr, indices, x, y, *masks, (), vertex_fields, edge_fields))


def _masks(path: str, arrays: Mapping[str, Array], notes: list[str]) -> dict[str, Array]:
    """The masks among the arrays."""
    return {
        name: as_mask(path, name, typed(path, arrays, name, "biuf", (1, 2)), notes)
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
    src, dst = (typed(path, ends, name, "iu", (1,)) for name in ends)
    if len(src) != len(dst):
        raise SpecError(
            f"{path}: src, dst: must have the same length, have {len(src):,} and {len(dst):,};"
            " write both ends of every edge"
        )
    return src, dst


def _checked_edges(
    path: str, arrays: Mapping[str, Array], others: list[str]
) -> tuple[Array, Array, dict[str, Any], int, str]:
    """src, dst, meta, the number of vertices, and what says how many, as `_count` does.

    Raises SpecError for an id beyond the vertices."""
    src, dst = _edge_list(path, arrays, others)
    meta = meta_of(path, arrays)
    vertices, counted = _count(path, arrays, meta, src, dst)
    for name, ids in (("src", src), ("dst", dst)):
        must_be_ids(path, name, ids, vertices, counted=counted or "the edges")
    return src, dst, meta, vertices, counted


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
        str(typed(path, arrays, "meta", "U", (0,))),
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
