"""Reader of the folder of parts that `gnnplan partition` writes; rows are read on demand.

docs/reference/files.md describes the files. ids.npy of a part is in the order of place.npy;
order.npy is partition.locality_order; halo.npy is sorted by part and place, give.npy by part.

The `Graph` of a folder has arrays that behave as whole arrays. Rows selected by ids are read from
the parts that hold them; any other access assembles the whole array once. When a machine reads a
part's file for the first time, it compares the file with its digest."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import numpy as np
import scipy.sparse as sp
from numpy.lib.mixins import NDArrayOperatorsMixin
from numpy.typing import DTypeLike
from pydantic import TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from gnnplan.planner.graph.data import EDGE, VERTEX
from gnnplan.planner.graph.disk_cache import remembered, state_of
from gnnplan.planner.graph.graph import (
    IDS_REACH,
    MOST_VERTICES,
    Array,
    Cut,
    Features,
    Graph,
    GraphStats,
    Int32s,
    drop_pages,
    freeze,
    must_fit,
)
from gnnplan.planner.graph.npy import mapped_array
from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.planner.vocabulary.files import Json, must_be_file, read_bytes
from gnnplan.planner.vocabulary.numbers import Ints, offsets, ranges, runs
from gnnplan.planner.vocabulary.units import show_count

DESCRIPTION = "parts.json"  # its presence marks a folder of parts
OF_PART = "part.json"
SHARED = {"owner", "place", "order", "degree", "sends"}  # arrays in the folder itself
VERSION = 1  # of the folder's format: raise it when old folders can no longer be read
MOST_DESCRIBED = 64 << 20  # [B] of a .json file
AT_ONCE = 1 << 20  # edges, or numbers of sparse features, that are read at a time
AGAIN = "write the folder again with gnnplan partition"
T = TypeVar("T")
# (part, positions of rows in the part's arrays, positions of these rows in the result)
Span: TypeAlias = tuple[int, Array, Array]


@dataclass(frozen=True)
class Stored:
    """The description of a .npy file of a part, or of the folder."""

    shape: tuple[int, ...]
    dtype: str
    nbytes: int  # size of the file [B]
    digest: str  # digest of the file's bytes


@dataclass(frozen=True)
class Part:
    """The contents of a part's part.json."""

    cut: str  # identifier of the partition that the part belongs to (`Description.cut`)
    number: int
    vertices: int
    edges: int
    files: dict[str, Stored]


@dataclass(frozen=True)
class Description:
    """The contents of parts.json."""

    version: int
    gnnplan: str
    graph: GraphStats
    parts: int
    partitioner: str
    seed: int
    cut: str  # unique identifier of this graph's partition
    vertices: list[int]  # count per part
    edges: list[int]  # count per part
    halo: list[int]  # halo rows per part
    reached: list[int]  # count of vertices within 0, 1, .. hops upstream of training vertices
    files: dict[str, Stored]
    digests: list[str]  # digest of each part's part.json


def digest_of(path: Path) -> str:
    """Return a digest of a file's bytes."""
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, partial(blake2b, digest_size=16)).hexdigest()


def sealed(described: Json) -> Json:
    """Return the fields of a .json file with `digest`, the digest of all other fields."""
    fields = {name: value for name, value in described.items() if name != "digest"}
    text = json.dumps(fields, sort_keys=True).encode()
    return fields | {"digest": blake2b(text, digest_size=16).hexdigest()}


def parsed(kind: type[T], path: Path) -> T:
    """Read a file's JSON as a `kind`, one of the classes above. Raises SpecError.

    Files of the first folders have no `digest` of their fields (`sealed`)."""
    text = read_bytes(path, MOST_DESCRIBED, AGAIN)
    try:
        found = TypeAdapter(kind).validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = "".join(f"{name}: " for name in first["loc"])
        raise SpecError(
            f"{path}: {where}{first['msg']}, so it describes no parts; {AGAIN}"
        ) from error
    fields = json.loads(text)
    digest = sealed(fields)["digest"]
    if (told := fields.get("digest", digest)) != digest:
        raise SpecError(
            f"{path}: is not what was written (its fields have the digest {digest}, and had"
            f" {told}); copy it again, or {AGAIN}"
        )
    return found


class PartFolder:
    """A folder of parts, whose files are opened on first use. Raises SpecError."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        self.about = self._read()
        self.parts = [self._part(number) for number in range(self.about.parts)]
        self._open: dict[tuple[int | None, str], Array] = {}

    def _read(self) -> Description:
        """Read and check parts.json and the presence of the folder's own files."""
        path = self.path / DESCRIPTION
        about = parsed(Description, path)
        if about.version != VERSION:
            raise SpecError(
                f"{path}: is version {about.version} of such folders, this gnnplan reads {VERSION};"
                f" {AGAIN}"
            )
        if not 0 < about.parts == len(about.digests):
            raise SpecError(
                f"{path}: describes {len(about.digests):,} parts and says {about.parts:,}; {AGAIN}"
            )
        if about.graph.vertices > MOST_VERTICES:
            raise SpecError(f"{path}: {about.graph.vertices:,} vertices; {IDS_REACH}; take fewer")
        if lacking := SHARED - about.files.keys():
            raise SpecError(f"{path}: tells of no {min(lacking)}.npy; {AGAIN}")
        for what in ("vertices", "edges"):
            found, whole = sum(getattr(about, what)), getattr(about.graph, what)
            if found != whole:
                raise SpecError(
                    f"{path}: its parts have {found:,} {what}, and its graph {whole:,}; {AGAIN}"
                )
        self._must_be_there(self.path, about.files)
        return about

    def _part(self, number: int) -> Part:
        """Read and check part.json of a part and the presence of the part's files."""
        folder, about = self.path / f"part{number}", self.about
        if not folder.is_dir():
            raise SpecError(
                f"{folder}: part {number} of {about.parts} is missing; copy it there, or {AGAIN}"
            )
        part = parsed(Part, folder / OF_PART)
        if (part.cut, part.number) != (about.cut, number):
            whose = "another graph or another cut" if part.cut != about.cut else "this graph"
            raise SpecError(
                f"{folder}: holds part {part.number} of {whose}, and part {number} of"
                f" {about.graph.name} in {about.parts} belongs there; copy that one, or {AGAIN}"
            )
        if digest_of(folder / OF_PART) != about.digests[number]:
            raise SpecError(f"{folder / OF_PART}: is not what was written; {AGAIN}")
        self._must_be_there(folder, part.files)
        return part

    def _must_be_there(self, folder: Path, files: dict[str, Stored]) -> None:
        """Raise SpecError unless all files exist in their recorded sizes."""
        for name, stored in files.items():
            path = folder / f"{name}.npy"
            must_be_file(path, f"copy it there, or {AGAIN}")
            if (found := path.stat().st_size) != stored.nbytes:
                raise SpecError(
                    f"{path}: has {found:,} B, and {stored.nbytes:,} were written; copy it again,"
                    f" or {AGAIN}"
                )

    # -- files ----------------------------------------------------------------------------------

    def array(self, number: int | None, name: str) -> Array:
        """Return a mapped array of part `number`, or of the folder (None), after a digest check."""
        key = number, name
        if key not in self._open:
            folder, files = self.path, self.about.files
            if number is not None:
                folder, files = self.path / f"part{number}", self.parts[number].files
            path, digest = folder / f"{name}.npy", files[name].digest
            must_be_file(path, f"copy it there, or {AGAIN}")
            # a machine compares once, and caches on disk that the file is intact
            found, _ = remembered("parts", f"{state_of(path)} digest", lambda: digest_of(path))
            if found != digest:
                raise SpecError(
                    f"{path}: is damaged (its digest is not the one that was written); copy it"
                    f" again, or {AGAIN}"
                )
            # copy-on-write, since torch warns of read-only arrays; nobody writes to the pages
            self._open[key] = mapped_array(path, "c").view(np.ndarray)
        return self._open[key]

    @property
    def owner(self) -> Array:
        """The part of each vertex [N]."""
        return self.array(None, "owner")

    @property
    def place(self) -> Array:
        """The row of each vertex in its part's arrays [N]."""
        return self.array(None, "place")

    # -- rows -----------------------------------------------------------------------------------

    def _spans(self, ids: Array | None) -> list[Span]:
        """Return the span of each part that owns any of the vertices `ids`, or of all vertices."""
        ids = np.arange(self.about.graph.vertices) if ids is None else ids
        owner, place = self.owner[ids], self.place[ids]
        numbers = np.flatnonzero(np.bincount(owner)).tolist()
        found = ((number, np.flatnonzero(owner == number)) for number in numbers)
        return [(number, place[at], at) for number, at in found]

    def _gathered(
        self, names: Sequence[str], spans: Iterable[Span], count: int, pick: Any = ...
    ) -> list[Array]:
        """Gather rows of the parts' arrays, indexed by `pick` first, into arrays [count, ..]."""
        outs = []
        for stored in (self.parts[0].files[name] for name in names):
            row = np.empty((0, *stored.shape[1:]))[pick].shape[1:]
            outs.append(np.empty((count, *row), stored.dtype))
        must_fit(str(self.path), f"{names[0]} of {count:,} rows", sum(out.nbytes for out in outs))
        for number, here, there in spans:
            together = bool((np.diff(here) == 1).all()) and here.size > 0
            for name, out in zip(names, outs, strict=True):
                whole = self.array(number, name)
                if together:
                    out[there] = whole[pick][here[0] : here[-1] + 1]
                    drop_pages(whole.base)
                elif pick is ...:  # several times as fast as an index for rows of few bytes
                    out[there] = np.take(whole, here, axis=0)
                else:  # np.take would read all columns first
                    out[there] = whole[pick][here]
        return outs

    def rows(self, name: str, ids: Array | None = None, columns: slice | None = None) -> Array:
        """Return rows (or columns of rows) of the vertices `ids`, or of all vertices [ids, ..]."""
        spans, pick = self._spans(ids), ... if columns is None else np.s_[:, columns]
        count = sum(here.size for _, here, _ in spans)
        return self._gathered([name], spans, count, pick)[0]

    def ragged(self, ids: Array | None, pointers: str, *names: str) -> tuple[Array, list[Array]]:
        """Return the lengths of variable-length rows [ids], and their numbers, row after row.

        pointers: name of the array with the start of each row of a part, like a CSR's indptr.
        names: arrays with the numbers."""
        parts = self._spans(ids)
        begin, lengths = np.empty((2, sum(here.size for _, here, _ in parts)), np.int64)
        for number, here, there in parts:
            pointer = self.array(number, pointers)
            begin[there], lengths[there] = pointer[here], pointer[here + 1] - pointer[here]
        starts = offsets(lengths)
        spans = (
            (number, ranges(begin[some], lengths[some]), ranges(starts[some], lengths[some]))
            for number, _, at in parts
            for some in (at[run] for run in runs(lengths[at], AT_ONCE))
        )
        return lengths, self._gathered(names, spans, int(starts[-1]))

    def csr(self, ids: Array | None = None, columns: slice | None = None) -> Features:
        """Return features as CSR, of the vertices `ids` or of all, or columns of them."""
        lengths, (indices, data) = self.ragged(ids, "x_indptr", "x_indices", "x_data")
        shape = lengths.size, self.about.graph.features
        x = sp.csr_matrix((data, indices, offsets(lengths)), shape)
        return x if columns is None else x[:, columns]

    @property
    def indptr(self) -> Ints:
        """The indptr [N+1] of the whole graph's CSR."""
        return offsets(self.array(None, "degree"))

    def edges(self, name: str) -> Array:
        """Return an array of all edges [E, ..], in the order of the whole graph's CSR.

        Vertices are looked up some at a time, in less memory than the array's."""
        stored, indptr = self.parts[0].files[name], self.indptr
        out = np.empty((int(indptr[-1]), *stored.shape[1:]), stored.dtype)
        must_fit(str(self.path), f"{name} of all edges", out.nbytes)
        for run in runs(self.array(None, "degree"), AT_ONCE):
            ids = np.arange(run.start, run.stop)
            (out[indptr[run.start] : indptr[run.stop]],) = self.ragged(ids, "indptr", name)[1]
        return out


class Lazy(NDArrayOperatorsMixin):
    """An array that is assembled from the parts when it is first used as a whole.

    read: function that returns the whole array. by_rows: `read` also takes `ids` or `columns`, and
    then returns only these rows or columns."""

    def __init__(
        self, dtype: DTypeLike, shape: Sequence[int], read: Callable[..., Any], by_rows: bool
    ) -> None:
        self._like = np.broadcast_to(np.zeros((), dtype), shape)  # takes no memory
        self._read, self._by_rows = read, by_rows

    @cached_property
    def whole(self) -> Any:
        """The assembled array, read-only, or the assembled CSR matrix."""
        made = self._read()
        if isinstance(made, np.ndarray):
            freeze(made)
        return made

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> Array:
        return np.array(self.whole, dtype, copy=copy)

    def __array_ufunc__(self, ufunc: Any, method: str, *given: Any, **named: Any) -> Any:
        given = tuple(one.whole if isinstance(one, Lazy) else one for one in given)
        return getattr(ufunc, method)(*given, **named)

    def __getitem__(self, key: Any) -> Any:
        if self._by_rows and "whole" not in self.__dict__:
            if isinstance(key, np.ndarray) and key.ndim == 1 and key.dtype.kind in "iu":
                return self._read(ids=key)
            if isinstance(key, tuple) and len(key) == 2 and key[0] == slice(None):
                return self._read(columns=key[1])
        return self.whole[key]

    def __len__(self) -> int:
        return len(self._like)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        known = ("dtype", "nbytes", "ndim", "shape", "size")
        return getattr(self._like if name in known else self.whole, name)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class PartGraph(Graph):
    """A graph in a folder of parts, whose rows and edges are read on demand."""

    folder: PartFolder

    def neighbours(self, rows: Array) -> Int32s:
        return self.folder.ragged(rows, "indptr", "indices")[1][0]

    def degree_of(self, rows: Array) -> Ints:
        return np.asarray(self.degree[rows], np.int64)

    @property
    def degree(self) -> Array:
        return self.folder.array(None, "degree")

    @property
    def out_degree(self) -> Array:
        return self.folder.array(None, "out_degree" if self.stats.directed else "degree")

    @property
    def reached(self) -> Sequence[int]:
        return self.folder.about.reached


def read_parts(path: str, source: str, directed: bool = False) -> Graph:
    """Return the graph of a folder of parts. Raises SpecError.

    directed: refuse a folder whose edges were made undirected."""
    folder = PartFolder(path)
    about, first = folder.about, folder.parts[0]
    if directed and not about.graph.directed:
        raise SpecError(
            f"{source}: its edges lost their direction when it was written; partition the graph"
            " again with --directed, or leave that out"
        )
    how = f"{about.partitioner} (seed {about.seed})"
    told = f"{show_count(about.parts, 'part')} by {how}, cut of {about.graph.source}"
    stats = dataclasses.replace(about.graph, source=source, notes=(*about.graph.notes, told))

    def edges(name: str) -> Any:
        shape = stats.edges, *first.files[name].shape[1:]
        return Lazy(first.files[name].dtype, shape, partial(folder.edges, name), by_rows=False)

    def rows(name: str) -> Any:
        as_csr = name == "x" and not stats.dense
        stored = first.files["x_data" if as_csr else name]
        row = (stats.features,) if as_csr else stored.shape[1:]
        read = folder.csr if as_csr else partial(folder.rows, name)
        return Lazy(stored.dtype, (stats.vertices, *row), read, by_rows=True)

    def fields(of: str, make: Callable[[str], Any]) -> dict[str, Any]:
        return {name.removeprefix(of): make(name) for name in first.files if name.startswith(of)}

    x, y, train, val, test = map(rows, ("x", "y", "train", "val", "test"))
    indptr: Any = Lazy(np.int64, (stats.vertices + 1,), lambda: folder.indptr, by_rows=False)
    return PartGraph(
        *(stats, indptr, edges("indices"), x, y, train, val, test),
        vertex_fields=fields(VERTEX, rows),
        edge_fields=fields(EDGE, edges),
        cut=Cut(about.parts, about.partitioner, folder.owner, about.cut),
        folder=folder,
    )
