"""gnnplan's own files: a .npz, or a folder with one .npy file per array, which `convert` writes.

Every array header is checked before memory is allocated. Pickles are never read."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
from pydantic import Field

from gnnplan.planner.graph.data import EDGE, MASKS, NAME, NUMBERS, VERTEX, features_of, kind_of
from gnnplan.planner.graph.graph import AT_ONCE, MOST_CLASSES, MOST_VERTICES, Array, Table
from gnnplan.planner.graph.npy import Arrays, arrays_in, mapped_array, must_be_count, typed
from gnnplan.planner.graph.parts import (
    ENDS,
    FEATURES,
    IDS,
    LABELS,
    SETS,
    Parts,
    count,
    endpoints,
    gathered,
    ignored,
    must_be_a_graph,
    shown,
    small_arrays,
    streams,
    take_split,
)
from gnnplan.planner.vocabulary.errors import GnnplanError, SpecError
from gnnplan.planner.vocabulary.files import cannot_write, from_json, must_have_parent
from gnnplan.planner.vocabulary.spec import Spec, read_as

LEAST_ROOM = 1 << 16  # free bytes of a disk that is not full
ARRAYS = (*ENDS, "x", "x_indptr", "x_indices", "x_shape", "x_data", "y", *MASKS, "meta")
# names of arrays that are read, whatever their number of rows
KNOWN = re.compile(rf"{'|'.join(ARRAYS)}|(vertex|edge)\.{NAME.pattern}", re.ASCII)


def read_own(path: str) -> Parts:
    """Read a .npz or a folder of .npy files; unknown arrays become a note.

    Fields have the prefixed names of data.py, or plain names if they have a row for each vertex
    or edge. Features and vertex fields in a folder are memory-mapped. Raises SpecError."""
    with arrays_in(path) as source:
        for name in filter(KNOWN.fullmatch, source.twice):
            raise SpecError(f"{path}: {name}: is there twice; keep one")
        names = {name: name for name in filter(KNOWN.fullmatch, source.files)}  # ours -> the file's
        for of, others in (("x", FEATURES), ("y", LABELS)):
            if not any(name == of or name.startswith(f"{of}_") for name in names):
                names |= ((of, name) for name in reversed(others) if name in source.files)
        arrays = {
            of: source.read(name, of == "x" or of.startswith(VERTEX)) for of, name in names.items()
        }
        left = source.files.keys() - names.values()
        if "edge_index" in left and not names.keys() & {*ENDS}:
            both = typed(path, "edge_index", source.read("edge_index"), "iu", (2,))
            arrays |= zip(ENDS, endpoints(path, "edge_index", both), strict=True)
            left.remove("edge_index")
        for name in ENDS:
            if name not in arrays:
                raise SpecError(
                    f"{path}: {name}: missing; an edge list src, dst (integers [E]), or edge_index"
                    f" [2, E], is required, found {shown([*source.files], 100) or 'nothing'}"
                )
        parts = of_arrays(path, arrays)
        if parts.vertices is None and "num_nodes" in left:
            told = source.read("num_nodes")
            parts.vertices = must_be_count(
                path, "num_nodes", told.item() if told.size == 1 else told
            )
            left.remove("num_nodes")
        vertices, edges = count(parts)[0], len(arrays["src"])
        split = {name: source.read(name) for name in left & {*IDS, *SETS}}
        left -= split.keys() - take_split(parts, vertices, split).keys()
        unread = [*source.others]
        for name in left:
            kind = _field_kind(path, name, source, vertices, edges)
            if kind is None:
                unread.append(name)
            elif kind + name in arrays:
                raise SpecError(f"{path}: {name}: is there as {kind}{name} too; keep one")
            elif kind == VERTEX:
                parts.vertex_fields[name] = source.read(name, mapped=True)
            else:
                parts.edge_fields[name] = [source.read(name)]
        parts.notes += ignored(unread)
        return parts


def of_arrays(path: str, arrays: Table) -> Parts:
    """Return the `Parts` of whole arrays keyed by gnnplan's names. Raises SpecError."""
    ends = ((name, arrays[name]) for name in ENDS)
    src, dst = (  # empty arrays may have any type
        typed(path, name, ids if ids.size else ids.astype(np.int64), "iu", (1,))
        for name, ids in ends
    )
    if len(src) != len(dst):
        raise SpecError(
            f"{path}: src, dst: must have the same length, have {len(src):,} and {len(dst):,};"
            " write both ends of every edge"
        )
    fields, on_edges = (
        {name.removeprefix(of): array for name, array in arrays.items() if name.startswith(of)}
        for of in (VERTEX, EDGE)
    )
    meta = _meta(path, arrays)
    return Parts(
        path,
        [(src, dst)],
        meta.vertices,
        meta.classes,
        features_of(path, arrays),
        arrays.get("y"),
        {name: arrays[name] for name in MASKS if name in arrays},
        vertex_fields=fields,
        edge_fields={name: [array] for name, array in on_edges.items()},
    )


def collect(parts: Parts) -> Parts:
    """Read all pieces into memory, as one array per name. Raises SpecError."""
    arrays, x = small_arrays(parts), parts.x
    if isinstance(x, np.memmap) and x.dtype == np.float32 and x.ndim == 2 and x.flags.c_contiguous:
        arrays["x"], parts = x, replace(parts, x=None)  # mapped features stay in their file
    for names, pieces in streams(parts):
        arrays |= zip(names, gathered(names, parts.path, pieces), strict=True)
    return replace(of_arrays(parts.path, arrays), notes=parts.notes, owner=parts.owner)


def _field_kind(path: str, name: str, source: Arrays, vertices: int, edges: int) -> str | None:
    """Return VERTEX or EDGE if the array's header is that of a field, else None.

    Raises SpecError."""
    if name == "edge_index" or not NAME.fullmatch(name):
        return None
    try:
        shape, _, dtype, _ = source.header(name)
    except Exception:  # absent or damaged: no field
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


class _Meta(Spec, extra="ignore"):
    """What the JSON text `meta` may declare."""

    vertices: int | None = Field(None, ge=0, le=MOST_VERTICES)
    classes: int | None = Field(None, ge=0, le=MOST_CLASSES)


def _meta(path: str, arrays: Table) -> _Meta:
    if "meta" not in arrays:
        return _Meta()
    text = str(typed(path, "meta", arrays["meta"], "U", (0,)))
    given = from_json(f"{path}: meta", text, "leave it out or write json.dumps(...)")
    return read_as(_Meta, given, f"{path}: meta.")


class Rows:
    """A .npy file to which rows are appended, in the narrowest type that holds all rows.

    numpy's header format reserves space for the final number of rows."""

    def __init__(self, path: Path) -> None:
        self.path, self.shape = path, cast(tuple[int, ...], (0,))
        self.dtype: Any = None  # set by the first rows
        self.stream = open(path, "xb")  # noqa: SIM115
        self._header()

    def append(self, rows: Array) -> None:
        """Write rows to the end of the file; widen the file's type if it cannot hold them."""
        both = rows.dtype if self.dtype is None else np.result_type(self.dtype, rows.dtype)
        if self.dtype not in (None, both):
            self._widen(both)
        self.dtype = both
        self.shape = self.shape[0] + len(rows), *rows.shape[1:]
        if rows.size:  # stream.write, since ndarray.tofile hides the cause of a disk error
            raw = np.ascontiguousarray(rows, self.dtype).reshape(-1)
            self.stream.write(raw.view(np.uint8).data)

    def _widen(self, dtype: np.dtype[Any]) -> None:
        """Rewrite the rows so far in a wider type, and continue in this type."""
        self.close()
        before = mapped_array(self.path)
        self.path.unlink()
        self.__init__(self.path)  # type: ignore[misc]
        self.dtype = dtype
        step = max(1, AT_ONCE // 8 // max(1, before[:1].size))
        for start in range(0, len(before), step):
            self.append(before[start : start + step])

    def _header(self) -> None:
        """Write the header for the rows so far, at the start of the file."""
        self.stream.seek(0)
        kind = np.dtype(bool if self.dtype is None else self.dtype)
        about = {"descr": np.lib.format.dtype_to_descr(kind), "fortran_order": False}
        np.lib.format.write_array_header_1_0(self.stream, about | {"shape": self.shape})

    def close(self) -> None:
        """Write the final header, sync the file to disk, and close it, also if the disk is full."""
        with self.stream:
            self.stream.flush()
            self._header()
            self.stream.flush()
            os.fsync(self.stream.fileno())


@contextlib.contextmanager
def complete(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder that is renamed to `folder` at success. Raises SpecError."""
    must_be_new(folder)
    try:
        with renamed(folder) as temporary:
            try:
                yield temporary
            except Exception as error:  # torch and DGL do not say that the disk is full
                full = shutil.disk_usage(temporary).free < LEAST_ROOM
                if isinstance(error, GnnplanError) or not full:
                    raise
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from error
            must_be_new(folder)
    except OSError as error:
        raise cannot_write(folder, error) from error


@contextlib.contextmanager
def renamed(folder: Path) -> Iterator[Path]:
    """Yield a new folder beside `folder`, renamed to `folder` unless an exception is raised."""
    temporary = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}")
    temporary.mkdir()
    try:
        yield temporary
        os.rename(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def write(parts: Parts, folder: Path, numbers: bool = False) -> tuple[int, int]:
    """Write the parts as a folder that is complete or absent; return (vertices, edges).

    numbers: labels are regression targets, whatever they look like. Raises SpecError if the parts
    are no valid graph or the folder cannot be written."""
    with complete(folder) as temporary:
        for names, pieces in streams(parts):
            with contextlib.ExitStack() as stack:
                opened = (contextlib.closing(Rows(temporary / f"{name}.npy")) for name in names)
                files = [stack.enter_context(file) for file in opened]
                for piece in pieces:
                    for file, column in zip(files, piece, strict=True):
                        file.append(column)
        for name, array in small_arrays(parts).items():
            np.save(temporary / f"{name}.npy", array, allow_pickle=False)
        try:
            return must_be_a_graph(replace(read_own(str(temporary)), path=parts.path), numbers)
        except SpecError as error:  # the check reads the written copy; users know the source
            raise SpecError(str(error).replace(str(temporary), parts.path)) from error


def must_be_new(folder: Path) -> None:
    """Raise SpecError if a folder or file of this name exists."""
    if os.path.lexists(folder):
        raise SpecError(f"{folder}: is already there; give the name of a new folder")
    must_have_parent(folder)
