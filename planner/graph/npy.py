"""Arrays in .npy and .npz files, whose headers are checked before memory is allocated.

Vertex ids count from 0 and are below the number of vertices, which fits int32."""

from __future__ import annotations

import io
import math
import os
import warnings
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple

import numpy as np

from gnnplan.planner.graph.graph import MOST_VERTICES, Array, must_fit
from gnnplan.planner.vocabulary.errors import GnnplanError, SpecError
from gnnplan.planner.vocabulary.files import MOST_SHOWN, must_be_file, refusal, remedy_of
from gnnplan.planner.vocabulary.units import show_bytes

MOST_PACKED = 200  # largest compression ratio; zeros alone compress 230 to 1,030 times
MOST_SWOLLEN = 1 << 29  # [B] unpacked size up to which any ratio is allowed
KINDS = {"i": "integers", "b": "booleans", "f": "real numbers", "U": "a JSON string"}
RENUMBER = "number the vertices from 0 (numpy.unique(..., return_inverse=True))"
LONGEST_HEADER = 1 << 14  # [B] read of an npy header; numpy accepts at most 10,000 characters


@contextmanager
def reading(path: str, what: str) -> Iterator[None]:
    """Turn any exception of a library inside this context into a SpecError for a damaged file."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except GnnplanError:
        raise
    except Exception as error:
        if refused := refusal(error):
            raise SpecError(
                f"{refused.filename or path}: cannot be read ({refused.strerror});"
                f" {remedy_of(refused)}"
            ) from error
        text = " ".join(str(error).split())[: 3 * MOST_SHOWN]
        raise SpecError(
            f"{path}: cannot be read as {what} ({type(error).__name__}: {text}); the file is"
            " damaged or of another kind, write it again"
        ) from error


def must_not_swell(what: str, unpacked: float, packed: float, most: float = 1.0) -> None:
    """Raise SpecError for a decompression bomb: megabytes that unpack into gigabytes.

    unpacked, packed: sizes [B]. most: share of MOST_SWOLLEN that is always allowed. Edges compress
    tenfold, labels that most vertices lack 60-fold."""
    if unpacked > most * MOST_SWOLLEN and unpacked > MOST_PACKED * packed:
        raise SpecError(
            f"{what}: unpacks to {show_bytes(unpacked)} from {show_bytes(packed)}, more than"
            f" {MOST_PACKED} times as much; if it is meant so, store it uncompressed"
        )


class Header(NamedTuple):
    """The contents of an npy header."""

    shape: tuple[int, ...]
    fortran: bool  # array is in Fortran order
    dtype: np.dtype[Any]
    begin: int  # length of the header, where the array's data begin [B]

    @property
    def nbytes(self) -> int:
        """Size of the array [B]."""
        return math.prod(self.shape) * self.dtype.itemsize


def read_header(path: str, name: str, stream: IO[bytes]) -> Header:
    """Read an npy header. Raises SpecError for an unknown format version."""
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


def check_header(path: str, name: str, stream: IO[bytes], stored: int, fits: bool = True) -> Header:
    """Check an array's header before memory is allocated, and return the header.

    stored: size of the file [B]. fits: the array must fit the memory. Raises SpecError for pickled
    objects, and for a shape that contradicts the stored size."""
    header = shape, _, dtype, begin = read_header(path, name, stream)
    nbytes, stored = header.nbytes, stored - begin
    if dtype.hasobject:
        raise SpecError(
            f"{path}: {name}: holds pickled Python objects, which are never loaded; save it as"
            f" plain numbers, as numpy.array({name}.tolist())"
        )
    if any(size < 0 for size in shape):
        raise SpecError(
            f"{path}: {name}: negative size in shape {shape}; the file is damaged, write it again"
        )
    if fits:
        must_fit(path, f"{name} of shape {shape}", nbytes)
    if nbytes != stored:
        raise SpecError(
            f"{path}: {name}: shape {shape} needs {nbytes:,} B but {'only ' * (nbytes > stored)}"
            f"{stored:,} B are stored; the file is damaged, write it again"
        )
    return header


def mapped_array(path: str | Path, mode: Literal["r", "c"] = "r") -> Array:
    """Return the array of a .npy file, memory-mapped unless empty. Raises SpecError.

    mode: as in numpy.load: read-only (r) or copy-on-write (c) pages."""
    path, name = str(path), Path(path).stem
    must_be_file(path, f"it should hold {name}.npy")
    with reading(path, ".npy"), open(path, "rb") as stream:
        nbytes = check_header(path, name, stream, os.stat(path).st_size, fits=False).nbytes
        return np.asanyarray(np.load(path, mode if nbytes else None, allow_pickle=False))


class Arrays:
    """The arrays of a .npz or of a folder of .npy files, by name; reading an array checks it."""

    def __init__(self, path: str, archive: zipfile.ZipFile | None = None) -> None:
        self.path, self.archive, self.nbytes = path, archive, 0
        self.files: dict[str, Any] = {}  # paths, or members of the archive
        self.others: list[str] = []  # names of files that hold no array
        self.twice: list[str] = []  # names that the archive holds twice
        for info in archive.infolist() if archive else ():
            name = info.filename.removesuffix(".npy")
            self.twice += [name] * (name in self.files)
            self.files[name] = info
        for file in () if archive else sorted(Path(path).iterdir()):
            if file.suffix == ".npy":
                self.files[file.stem] = file
            else:
                self.others.append(file.name)

    def open(self, name: str) -> IO[bytes]:
        """Open an array's .npy bytes as a stream."""
        if self.archive:
            return self.archive.open(self.files[name])
        must_be_file(self.files[name])
        return open(self.files[name], "rb")

    def header(self, name: str) -> Header:
        """Return an array's header without checks."""
        with self.open(name) as stream:
            return read_header(self.path, name, stream)

    def check(self, name: str, fits: bool = True) -> Header:
        """Check an array's header and return it. Raises SpecError."""
        file = self.files[name]
        if self.archive:
            must_not_swell(f"{self.path}: {name}", file.file_size, file.compress_size)
        with self.open(name) as stream:
            stored = file.file_size if self.archive else file.stat().st_size
            return check_header(self.path, name, stream, stored, fits)

    def read(self, name: str, mapped: bool = False) -> Array:
        """Return an array. mapped: memory-map it if the source is a folder.

        Raises SpecError, also if all arrays read so far would exceed the memory."""
        mapped = mapped and self.archive is None
        header = self.check(name, fits=not mapped)
        if mapped:
            return mapped_array(self.files[name])
        self.nbytes += header.nbytes
        must_fit(self.path, "what it holds", self.nbytes)
        with self.open(name) as stream:
            return np.asarray(np.lib.format.read_array(stream, allow_pickle=False))


@contextmanager
def arrays_in(path: str) -> Iterator[Arrays]:
    """Open the arrays of a .npz, or of a folder of .npy files. Raises SpecError."""
    with reading(path, "arrays"):
        if os.path.isdir(path):
            yield Arrays(path)
            return
        must_be_file(path)
        with zipfile.ZipFile(path) as archive:
            yield Arrays(path, archive)


def typed(path: str, name: str, array: Array, kinds: str, ndim: tuple[int, ...]) -> Array:
    """Return the array. Raises SpecError unless its dtype kind and dimensions are allowed."""
    if array.dtype.kind not in kinds:
        allowed = " or ".join(sorted({KINDS[kind] for kind in kinds.replace("u", "")}))
        remedy = f"save {name}.astype(numpy.{'float32' if 'f' in kinds else 'int64'})"
        if array.dtype.kind in "SU":
            remedy = f"save numbers; of names, numpy.unique({name}, return_inverse=True)[1]"
        raise SpecError(f"{path}: {name}: must hold {allowed}, has dtype {array.dtype}; {remedy}")
    if array.ndim not in ndim:
        raise SpecError(
            f"{path}: {name}: must have {' or '.join(map(str, ndim))} dimension(s), has shape"
            f" {array.shape}; reshape it"
        )
    return array


def must_be_ids(
    path: str, name: str, ids: Array, vertices: int, first: int = 0, counted: str = ""
) -> None:
    """Raise SpecError for ids beyond the vertices.

    first: position of ids[0] in the whole array. counted: name of the array that gives the number
    of vertices."""
    if ids.dtype.kind not in "iu":
        raise SpecError(
            f"{path}: {name}: vertex ids must be integers, have dtype {ids.dtype}; {RENUMBER}"
        )
    if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < vertices:
        bad = np.flatnonzero((ids < 0) | (ids >= vertices))
        at, many = first + int(bad[0]), f" ({bad.size:,} such edges)" if counted else ""
        said = f", and {counted} give" if counted else ", and there are"
        raise SpecError(
            f"{path}: {name}[{at:,}]: vertex ids must lie in [0, {vertices - 1:,}],"
            f" found {int(ids[bad[0]])}{many}; ids count from 0"
            + (f"; {RENUMBER}" if vertices == MOST_VERTICES else f"{said} {vertices:,} vertices")
        )


def must_be_count(path: str, name: str, value: Any, most: int = MOST_VERTICES) -> int:
    """Return a number of vertices or classes that a file declares. Raises SpecError."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not 0 <= value <= most:
        raise SpecError(
            f"{path}: {name}: must be a whole number of 0 to {most:,}, is"
            f" {str(value)[:MOST_SHOWN]}; write the file again"
        )
    return int(value)
