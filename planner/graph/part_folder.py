"""Reads a folder of parts, which `gnnplan partition` writes: rows as they are asked for.

    parts.json      the graph's statistics, how it was cut, and a digest of each part's part.json
    owner.npy       the part of each vertex [N]
    place.npy       its place among the rows of its part [N]
    order.npy       its place in the order in which rows lie in memory (partition.locality_order)
    degree.npy      in-degrees [N]; out_degree.npy, where edges have a direction
    sends.npy       rows of part i that edges of part j begin at [parts, parts]
    part3/part.json which part of which graph it is, and size and digest of its files
    part3/ids.npy   global ids of its vertices, in that order [n]
    part3/indptr, indices      the ids that they aggregate from, a CSR
    part3/x (x_indptr, x_indices, x_data if sparse), y, train, val, test, vertex.*, edge.*
    part3/halo.npy  ids of other parts' vertices that its edges begin at, by part and place
    part3/give.npy  places of its own rows that other parts read, part after part

A `Graph` of it has arrays that look whole. Rows that are asked for by their ids are read of the
parts that have them; what asks for more gets the whole array, put together once. A part's files
are compared with their digests when this machine reads them first."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import scipy.sparse as sp
from numpy.lib.mixins import NDArrayOperatorsMixin
from numpy.typing import DTypeLike, NDArray
from pydantic import TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from gnnplan.planner.graph.fields import EDGE, VERTEX
from gnnplan.planner.graph.graph import MOST_VERTICES, Array, Cut, Graph, GraphStats, must_fit
from gnnplan.planner.graph.npy import load_npy
from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.planner.vocabulary.files import cache_dir, must_be_file, read_bytes, write_atomically
from gnnplan.planner.vocabulary.numbers import ranges

DESCRIPTION = "parts.json"  # tells a folder of parts
OF_PART = "part.json"
SHARED = {"owner", "place", "order", "degree", "sends"}  # files of the folder itself
VERSION = 1  # of the folder: raise it when old ones can no longer be read
MOST_DESCRIBED = 64 << 20  # [B]
EDGES_AT_ONCE = 1 << 22  # that are put in their places at a time
AGAIN = "write the folder again with gnnplan partition"
T = TypeVar("T")


@dataclass(frozen=True)
class Stored:
    """A file of a part, or of the folder."""

    shape: tuple[int, ...]
    dtype: str
    nbytes: int  # of the file
    digest: str  # of its bytes


@dataclass(frozen=True)
class Part:
    """What a part's part.json says."""

    cut: str  # the name of the cut that it is of (`Description.cut`)
    number: int
    vertices: int
    edges: int
    files: dict[str, Stored]


@dataclass(frozen=True)
class Description:
    """What parts.json says."""

    version: int
    gnnplan: str
    graph: GraphStats
    parts: int
    partitioner: str
    seed: int
    cut: str  # a name that no other graph or assignment has
    vertices: list[int]  # of each part
    edges: list[int]
    halo: list[int]
    reached: list[int]  # vertices within 0, 1, .. hops of training vertices, against the edges
    files: dict[str, Stored]
    digests: list[str]  # of each part's part.json


def digest_of(path: Path) -> str:
    """A digest of a file's bytes."""
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, partial(blake2b, digest_size=16)).hexdigest()


def parsed(kind: type[T], path: Path, raw: bytes) -> T:
    """What the JSON of a file says, as one of the classes here. Raises SpecError."""
    try:
        return TypeAdapter(kind).validate_json(raw)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = "".join(f"{name}: " for name in first["loc"])
        raise SpecError(
            f"{path}: {where}{first['msg']}, so it describes no parts; {AGAIN}"
        ) from error


class PartFolder:
    """A folder of parts, of which files are opened when they are asked for. Raises SpecError."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        self.about = self._read()
        self.parts = [self._part(number) for number in range(self.about.parts)]
        self._open: dict[tuple[int | None, str], Array] = {}

    def _read(self) -> Description:
        path = self.path / DESCRIPTION
        raw = read_bytes(path, MOST_DESCRIBED, AGAIN)
        about = parsed(Description, path, raw)
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
            raise SpecError(
                f"{path}: {about.graph.vertices:,} vertices; ids of 32 bits reach"
                f" {MOST_VERTICES:,}; take fewer"
            )
        if lacking := SHARED - about.files.keys():
            raise SpecError(f"{path}: tells of no {min(lacking)}.npy; {AGAIN}")
        if (found := sum(about.vertices)) != about.graph.vertices:
            raise SpecError(
                f"{path}: its parts have {found:,} vertices, and its graph"
                f" {about.graph.vertices:,}; {AGAIN}"
            )
        self._must_be_there(self.path, about.files)
        return about

    def _part(self, number: int) -> Part:
        folder, about = self.path / f"part{number}", self.about
        if not folder.is_dir():
            raise SpecError(
                f"{folder}: part {number} of {about.parts} is missing; copy it there, or {AGAIN}"
            )
        raw = read_bytes(folder / OF_PART, MOST_DESCRIBED, AGAIN)
        part = parsed(Part, folder / OF_PART, raw)
        if (part.cut, part.number) != (about.cut, number):
            whose = "another graph or another cut" if part.cut != about.cut else "this graph"
            raise SpecError(
                f"{folder}: holds part {part.number} of {whose}, and part {number} of"
                f" {about.graph.name} in {about.parts} belongs there; copy that one, or {AGAIN}"
            )
        if blake2b(raw, digest_size=16).hexdigest() != about.digests[number]:
            raise SpecError(f"{folder / OF_PART}: is not what was written; {AGAIN}")
        self._must_be_there(folder, part.files)
        return part

    def _must_be_there(self, folder: Path, files: dict[str, Stored]) -> None:
        """Raise SpecError unless files of these sizes are there."""
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
        """An array of a part, or of the folder (None): mapped, and what was written."""
        key = number, name
        if key not in self._open:
            path, stored = self._file(number, name)
            _must_be_whole(path, stored)
            # pages that torch may take as its own; nobody writes them
            self._open[key] = load_npy(path, name, "c").view(np.ndarray)
        return self._open[key]

    def _file(self, number: int | None, name: str) -> tuple[Path, Stored]:
        if number is None:
            return self.path / f"{name}.npy", self.about.files[name]
        return self.path / f"part{number}" / f"{name}.npy", self.parts[number].files[name]

    def run(self, number: int, name: str, start: int, stop: int) -> Array:
        """Rows of a part's array that follow each other, read from the file.

        Pages of a mapped file would count as memory of the process beside its own copy."""
        path, stored = self._file(number, name)
        _must_be_whole(path, stored)
        dtype, (_, *row) = np.dtype(stored.dtype), stored.shape
        each = int(np.prod(row, dtype=np.int64))
        begin = stored.nbytes - stored.shape[0] * each * dtype.itemsize
        offset = begin + start * each * dtype.itemsize
        return np.fromfile(path, dtype, (stop - start) * each, offset=offset).reshape(-1, *row)

    @property
    def owner(self) -> Array:
        """The part of each vertex [N]."""
        return self.array(None, "owner")

    @property
    def place(self) -> Array:
        """The place of each vertex among the rows of its part [N]."""
        return self.array(None, "place")

    @property
    def degree(self) -> Array:
        """In-degrees [N]."""
        return self.array(None, "degree")

    @property
    def reached(self) -> Sequence[int]:
        """Vertices within 0, 1, .. hops of training vertices."""
        return self.about.reached

    @property
    def out_degree(self) -> Array:
        """Out-degrees [N]."""
        return self.array(None, "out_degree" if self.about.graph.directed else "degree")

    # -- rows -----------------------------------------------------------------------------------

    def by_part(self, ids: NDArray[Any]) -> Iterator[tuple[int, NDArray[Any], NDArray[Any]]]:
        """Each part that has some of these vertices: which of them, and their places there."""
        owner, place = self.owner[ids], self.place[ids]
        numbers = np.unique(owner)
        for number in numbers:
            at = np.flatnonzero(owner == number) if numbers.size > 1 else np.arange(ids.size)
            yield int(number), at, place[at] if numbers.size > 1 else place

    def rows(self, name: str, ids: NDArray[Any], shape: tuple[int, ...], dtype: Any) -> Array:
        """Rows of these vertices [ids, ..]."""
        out = np.empty((ids.size, *shape), dtype)
        for number, at, places in self.by_part(ids):
            some = self._some(number, name, places)
            if at.size == ids.size:
                return some
            out[at] = some
        return out

    def _some(self, number: int, name: str, places: NDArray[Any]) -> Array:
        if _follow_each_other(places):
            return self.run(number, name, int(places[0]), int(places[-1]) + 1)
        return np.asarray(self.array(number, name)[places])

    def sparse_rows(self, ids: NDArray[Any], columns: int) -> sp.csr_matrix:
        """Sparse features of these vertices."""
        found, where = [sp.csr_matrix((0, columns), dtype=self.dtype("x_data"))], [ids[:0]]
        for number, at, places in self.by_part(ids):
            found.append(self.sparse_part(number, columns)[places])
            where.append(at)
        both = sp.vstack(found, "csr")
        return both if len(found) == 2 else both[np.argsort(np.concatenate(where))]

    def sparse_part(self, number: int, columns: int) -> sp.csr_matrix:
        """Sparse features of a part's vertices."""
        arrays = (self.array(number, f"x_{name}") for name in ("data", "indices", "indptr"))
        return sp.csr_matrix(tuple(arrays), shape=(self.parts[number].vertices, columns))

    def neighbours(self, ids: NDArray[Any]) -> NDArray[np.int32]:
        """In-neighbours of these vertices, row after row."""
        degree = self.degree[ids]
        starts = np.cumsum(degree) - degree
        out = np.empty(int(degree.sum()), np.int32)
        for number, at, places in self.by_part(ids):
            indptr = self.array(number, "indptr")
            if _follow_each_other(places):
                begin, end = int(indptr[places[0]]), int(indptr[places[-1] + 1])
                found = self.run(number, "indices", begin, end)
            else:
                found = self.array(number, "indices")[ranges(indptr[places], degree[at])]
            if at.size == ids.size:
                return found
            out[ranges(starts[at], degree[at])] = found
        return out

    # -- whole arrays ---------------------------------------------------------------------------

    def dtype(self, name: str) -> np.dtype[Any]:
        return np.dtype(self.parts[0].files[name].dtype)

    def whole_rows(self, name: str, columns: slice = slice(None)) -> Array:
        """Rows of all vertices."""
        n, stored = self.about.graph.vertices, self.parts[0].files[name]
        shape = stored.shape[1:]
        if shape and columns != slice(None):
            shape = (len(range(shape[0])[columns]), *shape[1:])
        size = n * int(np.prod(shape, dtype=np.int64)) * np.dtype(stored.dtype).itemsize
        must_fit(str(self.path), f"{name} of all vertices", size)
        out = np.empty((n, *shape), stored.dtype)
        for number in range(self.about.parts):
            part = self.array(number, name)
            out[self.array(number, "ids")] = part if columns == slice(None) else part[:, columns]
        return _frozen(out)

    def whole_features(self, columns: int) -> sp.csr_matrix:
        """Sparse features of all vertices."""
        found = sp.vstack([self.sparse_part(k, columns) for k in range(self.about.parts)], "csr")
        ids = np.concatenate([self.array(k, "ids") for k in range(self.about.parts)])
        return found[np.argsort(ids)]

    @cached_property
    def indptr(self) -> NDArray[np.int64]:
        """The CSR of all edges: where rows begin."""
        return _frozen(np.concatenate([[0], np.cumsum(self.degree, dtype=np.int64)]))

    def whole_edges(self, name: str) -> Array:
        """What all edges have, in the order of the whole graph's CSR."""
        stored, indptr = self.parts[0].files[name], self.indptr
        out = np.empty((self.about.graph.edges, *stored.shape[1:]), stored.dtype)
        must_fit(str(self.path), f"{name} of all edges", out.nbytes)
        for number in range(self.about.parts):
            ids, ends = (self.array(number, name) for name in ("ids", "indptr"))
            part, first = self.array(number, name), 0
            while first < ids.size:
                last = int(np.searchsorted(ends, ends[first] + EDGES_AT_ONCE, side="right")) - 1
                last = min(max(last, first + 1), ids.size)
                degree = np.diff(ends[first : last + 1])
                out[ranges(indptr[ids[first:last]], degree)] = part[ends[first] : ends[last]]
                first = last
        return _frozen(out)


def _follow_each_other(places: NDArray[Any]) -> bool:
    """Whether these are places of rows in a file that lie side by side, in that order."""
    return places.size > 0 and np.array_equal(places, np.arange(places[0], places[0] + places.size))


def _must_be_whole(path: Path, stored: Stored) -> None:
    """Raise SpecError unless a file's bytes are those that were written.

    A machine reads them once for that. It notes in its cache the name, size and time of change of
    each file that was right."""
    must_be_file(path, f"copy it there, or {AGAIN}")
    file = path.stat()
    words = path.resolve(), file.st_dev, file.st_ino, file.st_size, file.st_mtime_ns, stored.digest
    name = blake2b(" ".join(map(str, words)).encode(), digest_size=16).hexdigest()
    note = cache_dir() / "parts" / name
    if name in _right or note.exists():
        _right.add(name)
        return
    if digest_of(path) != stored.digest:
        raise SpecError(
            f"{path}: is damaged (its digest is not the one that was written); copy it again, or"
            f" {AGAIN}"
        )
    _right.add(name)
    with contextlib.suppress(SpecError):  # a closed or full cache costs time, not the answer
        write_atomically(note, "", parents=True, at_once=True)


_right: set[str] = set()  # names of files that were right, in this process


def _frozen(array: Array) -> Array:
    array.flags.writeable = False
    return array


class Lazy(NDArrayOperatorsMixin):
    """An array that is put together of parts when it is asked for as a whole."""

    def __init__(self, dtype: DTypeLike, shape: Sequence[int], make: Callable[[], Array]) -> None:
        self.dtype, self.shape, self._make = np.dtype(dtype), tuple(shape), make

    @cached_property
    def whole(self) -> Array:
        return self._make()

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> Array:
        return np.array(self.whole, dtype, copy=copy)

    def __array_ufunc__(self, ufunc: Any, method: str, *given: Any, **named: Any) -> Any:
        given = tuple(one.whole if isinstance(one, Lazy) else one for one in given)
        return getattr(ufunc, method)(*given, **named)

    def __getitem__(self, key: Any) -> Any:
        return self.whole[key]

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.whole, name)


class ByRow(Lazy):
    """Rows of vertices [N, ..], of which those with some ids, or some columns, are read alone."""

    def __init__(self, folder: PartFolder, name: str) -> None:
        stored = folder.parts[0].files[name]
        shape = (folder.about.graph.vertices, *stored.shape[1:])
        super().__init__(stored.dtype, shape, lambda: folder.whole_rows(name))
        self.folder, self.name = folder, name

    def __getitem__(self, key: Any) -> Any:
        if "whole" in self.__dict__:
            return self.whole[key]
        if isinstance(key, np.ndarray) and key.ndim == 1 and key.dtype.kind in "iu":
            return self.folder.rows(self.name, key, self.shape[1:], self.dtype)
        if isinstance(key, tuple) and len(key) == 2 and key[0] == slice(None):
            return self.folder.whole_rows(self.name, key[1])
        return self.whole[key]


class SparseByRow(Lazy):
    """Sparse features, of which the rows with some ids are read alone."""

    def __init__(self, folder: PartFolder) -> None:
        shape = folder.about.graph.vertices, folder.about.graph.features
        super().__init__(folder.dtype("x_data"), shape, lambda: folder.whole_features(shape[1]))
        self.folder = folder

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, np.ndarray) and key.ndim == 1 and key.dtype.kind in "iu":
            return self.folder.sparse_rows(key, self.shape[1])
        return self.whole[key]


def is_part_folder(path: str) -> bool:
    """Whether it is a folder of parts."""
    return os.path.isfile(os.path.join(path, DESCRIPTION))


def read_parts(path: str, source: str, directed: bool = False) -> Graph:
    """The graph of a folder of parts. Raises SpecError.

    directed: refuse edges that have lost their direction."""
    folder = PartFolder(path)
    about, first = folder.about, folder.parts[0]
    if directed and not about.graph.directed:
        raise SpecError(
            f"{source}: its edges lost their direction when it was written; partition the graph"
            " again with --directed, or leave that out"
        )
    how = f"{about.partitioner} (seed {about.seed})"
    told = f"{about.parts} parts by {how}, cut of {about.graph.source}"
    stats = replace(about.graph, source=source, notes=(*about.graph.notes, told))

    def edges(name: str) -> Any:
        stored = first.files[name]
        shape = stats.edges, *stored.shape[1:]
        return Lazy(stored.dtype, shape, lambda: folder.whole_edges(name))

    def rows(name: str) -> Any:
        return ByRow(folder, name)

    def fields(of: str, make: Callable[[str], Any]) -> dict[str, Any]:
        return {name.removeprefix(of): make(name) for name in first.files if name.startswith(of)}

    indptr: Any = Lazy(np.int64, (stats.vertices + 1,), lambda: folder.indptr)
    return Graph(
        stats,
        indptr,
        edges("indices"),
        cast(Any, SparseByRow(folder)) if stats.nonzeros else rows("x"),
        rows("y"),
        rows("train"),
        rows("val"),
        rows("test"),
        vertex_fields=fields(VERTEX, rows),
        edge_fields=fields(EDGE, edges),
        cut=Cut(about.parts, about.partitioner, folder.owner, about.cut),
        folder=folder,
    )
