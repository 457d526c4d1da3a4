"""Arrays in .npy and .npz files: checked by their headers before anything is allocated."""

from __future__ import annotations

import io
import math
import zipfile
from typing import IO, Any, NamedTuple

import numpy as np

from gnnplan.planner.graph.graph import Array, must_fit
from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.planner.vocabulary.units import show_bytes

MOST_PACKED = 200  # times smaller than it is; zeros alone pack 230 to 1,030 times
MOST_SWOLLEN = 1 << 29  # [B] that may be smaller than that
LONGEST_HEADER = 1 << 14  # [B] of an npy header; numpy reads at most 10,000 characters


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


def typed(path: str, name: str, array: Array, kinds: str, ndim: tuple[int, ...]) -> Array:
    """The array. Raises SpecError unless its dtype kind and dimensions are as allowed."""
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
