"""Reads our own files: a .npz, or a folder with one .npy file per array.

Every array is checked by its header before anything is allocated. Pickles are never read."""

from __future__ import annotations

import contextlib
import os
import zipfile
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import scipy.sparse as sp

from gnnplan.planner.graph.build import count
from gnnplan.planner.graph.features import sparse_features
from gnnplan.planner.graph.fields import EDGE, NAME, NUMBERS, VERTEX, kind_of
from gnnplan.planner.graph.graph import MOST_CLASSES, Array
from gnnplan.planner.graph.masks import MASKS
from gnnplan.planner.graph.npy import Arrays, typed
from gnnplan.planner.graph.parts import Parts
from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.planner.vocabulary.files import MOST_SHOWN, from_json, must_be_file

ENDS = "src", "dst"
ARRAYS = (*ENDS, "x", "x_indptr", "x_indices", "x_shape", "x_data", "y", *MASKS, "meta")


def read_own(path: str) -> Parts:
    """What a file or a folder of ours holds; others of its arrays are noted.

    Fields are read under the names of fields.py, and under their own: an array with a row for each
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
            return _parts(path, Arrays(path))
        if not os.path.lexists(path):
            raise SpecError(f"{path}: no such file")
        must_be_file(path, remedy)
        with zipfile.ZipFile(path) as archive:
            return _parts(path, Arrays(path, archive))
    except SpecError:
        raise
    except zipfile.BadZipFile as error:
        raise SpecError(f"{path}: not an npz file ({error}); {remedy}") from error
    except Exception as error:
        # a damaged file makes zlib, zipfile and numpy raise exceptions of many types
        raise SpecError(
            f"{path}: cannot be read ({type(error).__name__}: {error}); {remedy}"
        ) from error


def _is_known(name: str) -> bool:
    """Whether an array of this name is read, however many rows it has."""
    prefix = next((prefix for prefix in (VERTEX, EDGE) if name.startswith(prefix)), None)
    return name in ARRAYS or (prefix and NAME.fullmatch(name.removeprefix(prefix))) is not None


def _parts(path: str, source: Arrays) -> Parts:
    for name in filter(_is_known, source.twice):
        raise SpecError(f"{path}: {name}: is there twice; keep one")
    if (
        "x" in source.files
        and source.archive is None
        and not (
            (header := source.check("x", fits=False)).dtype in (np.float32, np.float64)
            and len(header.shape) == 2
            and not header.fortran
        )
    ):
        raise SpecError(
            f"{path}: x: is mapped, not read, so it must be float32 or float64 [vertices, features]"
            f" in C order, is {header.dtype} of shape {header.shape}"
            f"{' in Fortran order' * header.fortran}; save numpy.ascontiguousarray(x,"
            " numpy.float32)"
        )
    arrays = {
        name: source.read(name, name == "x" or name.startswith(VERTEX))
        for name in source.files
        if _is_known(name)
    }
    src, dst = _edge_list(path, arrays, source)
    meta = _meta(path, arrays)
    fields = {
        of: {name.removeprefix(of): arrays[name] for name in arrays if name.startswith(of)}
        for of in (VERTEX, EDGE)
    }
    parts = Parts(
        path,
        [],
        meta.get("vertices"),
        meta.get("classes"),
        _features(path, arrays),
        arrays.get("y"),
        {name: arrays[name] for name in MASKS if name in arrays},
        vertex_fields=fields[VERTEX],
    )
    vertices, _ = count(parts, src, dst)
    ignored = [*source.others]
    for name in source.files.keys() - arrays.keys():
        of = _field_kind(path, name, source, vertices, len(src))
        if of is None:
            ignored.append(source.called(name))
        elif name in fields[of]:
            raise SpecError(f"{path}: {name}: is there as {of}{name} too; keep one")
        else:
            fields[of][name] = source.read(name, of == VERTEX)
    parts.notes += [f"ignored arrays: {shown(ignored, 8)}"] if ignored else []
    parts.edges = [(src, dst)]
    parts.edge_fields = {name: [rows] for name, rows in fields[EDGE].items()}
    return parts


def _field_kind(path: str, name: str, source: Arrays, vertices: int, edges: int) -> str | None:
    """VERTEX or EDGE, if an array is a field by its header; else None. Raises SpecError."""
    if name == "edge_index" or not NAME.fullmatch(name):
        return None
    try:
        shape, _, dtype, _ = source.header(name)
    except Exception:  # absent or damaged: it is no field
        return None
    if not shape or not all(shape[1:]) or dtype.kind not in NUMBERS:
        return None
    of = kind_of(path, name, shape[0], vertices, edges)
    if of == VERTEX and shape[0] == edges:
        raise SpecError(
            f"{path}: {name}: has {shape[0]:,} rows, and there are as many vertices as edges; name"
            f" it {VERTEX}{name} or {EDGE}{name}"
        )
    return of


def _features(path: str, arrays: Mapping[str, Array]) -> Array | sp.csr_matrix | None:
    """Features, dense or sparse. Raises SpecError."""
    if "x" in arrays and "x_indptr" in arrays:
        raise SpecError(
            f"{path}: x, x_indptr: features are given twice, dense and sparse; keep one"
        )
    if "x_indptr" not in arrays:
        return arrays.get("x")
    for name in ("x_indices", "x_shape"):
        if name not in arrays:
            raise SpecError(
                f"{path}: {name}: missing; sparse features need x_indptr, x_indices and x_shape"
            )
    indptr, indices, shape = (arrays[name] for name in ("x_indptr", "x_indices", "x_shape"))
    return sparse_features(path, indptr, indices, shape, arrays.get("x_data"))


def _edge_list(path: str, arrays: Mapping[str, Array], source: Arrays) -> tuple[Array, Array]:
    """The edge list src, dst (integers [E])."""
    for name in ENDS:
        if name not in arrays:
            raise SpecError(
                f"{path}: {name}: missing; an edge list src, dst (integers [E]) is required, found"
                f" {shown([*source.files], 100) or 'nothing'}{_edge_index_remedy(source)}"
            )
    ends = {name: arrays[name] for name in ENDS}  # what is empty has no type
    ends = {name: ids if ids.size else ids.astype(np.int64) for name, ids in ends.items()}
    src, dst = (typed(path, name, ids, "iu", (1,)) for name, ids in ends.items())
    if len(src) != len(dst):
        raise SpecError(
            f"{path}: src, dst: must have the same length, have {len(src):,} and {len(dst):,};"
            " write both ends of every edge"
        )
    return src, dst


def shown(names: Sequence[str], most: int) -> str:
    """At most `most` of the names, without control characters that a terminal would obey."""
    shown = [ascii(name)[1:-1][:MOST_SHOWN] for name in sorted(names)[:most]]
    return ", ".join(shown + [f"and {len(names) - most:,} others"] * (len(names) > most))


def _edge_index_remedy(source: Arrays) -> str:
    """What to do with PyG's `edge_index` [2, E], where the file holds one."""
    with contextlib.suppress(Exception):  # absent or damaged: the caller reports what is missing
        shape = source.header("edge_index").shape
        if len(shape) == 2 and shape[0] == 2:
            return "; save src=edge_index[0], dst=edge_index[1]"
    return ""


def _meta(path: str, arrays: Mapping[str, Array]) -> dict[str, Any]:
    """The JSON object `meta`, which may hold `vertices` and `classes`; {} if there is none."""
    if "meta" not in arrays:
        return {}
    meta = from_json(
        f"{path}: meta",
        str(typed(path, "meta", arrays["meta"], "U", (0,))),
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
