"""Our own folders of mapped arrays: what `convert` writes, piece by piece."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import scipy.sparse as sp

from gnnplan.planner.graph.arrays import ENDS, read_own
from gnnplan.planner.graph.build import must_be_a_graph
from gnnplan.planner.graph.fields import EDGE, must_be_by_edge
from gnnplan.planner.graph.graph import AT_ONCE, Array
from gnnplan.planner.graph.parts import (
    Parts,
    edge_pieces,
    feature_pieces,
    pieces_of,
    small_arrays,
)
from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.planner.vocabulary.files import must_have_a_place


class _Rows:
    """A .npy file that grows by rows. numpy's headers leave room for their final number."""

    def __init__(self, path: Path, dtype: Any) -> None:
        self.path = path
        self.stream = open(path, "xb")  # noqa: SIM115
        self.dtype = np.dtype(dtype)
        self.rows, self.row_shape = 0, cast(tuple[int, ...], ())
        self._header()
        self.begin = self.stream.tell()

    def append(self, rows: Array) -> None:
        if (both := np.result_type(self.dtype, rows.dtype)) != self.dtype:
            self._widen(both)
        self.row_shape = rows.shape[1:]
        self.rows += len(rows)
        np.ascontiguousarray(rows, self.dtype).tofile(self.stream)

    def _widen(self, dtype: np.dtype[Any]) -> None:
        """Go on in a type that holds more, with the rows before."""
        self.close()
        before = np.load(self.path, mmap_mode="r" if self.rows else None, allow_pickle=False)
        self.path.unlink()
        self.__init__(self.path, dtype)  # type: ignore[misc]
        step = max(1, AT_ONCE // 8 // max(1, before[:1].size))
        for start in range(0, len(before), step):
            self.append(before[start : start + step])

    def _header(self) -> None:
        self.stream.seek(0)
        np.lib.format.write_array_header_1_0(
            self.stream,
            {
                "descr": np.lib.format.dtype_to_descr(self.dtype),
                "fortran_order": False,
                "shape": (self.rows, *self.row_shape),
            },
        )

    def close(self) -> None:
        self.stream.flush()
        self._header()
        os.fsync(self.stream.fileno())
        self.stream.close()


def write(parts: Parts, folder: Path) -> tuple[int, int]:
    """Write the parts as a folder that is complete or absent: (vertices, edges).

    Raises SpecError for what is no graph, and if the folder cannot be written."""
    temporary = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}")
    try:
        temporary.mkdir()
    except OSError as error:
        raise SpecError(
            f"{folder}: cannot be written ({error.strerror or error}); choose another place"
        ) from error
    try:
        _write(parts, temporary)
        written = replace(read_own(str(temporary)), path=parts.path, numbers=parts.numbers)
        size = must_be_a_graph(written)
        must_be_new(folder)
        os.rename(temporary, folder)
    except OSError as error:
        raise SpecError(
            f"{folder}: cannot be written ({error.strerror or error}); choose another place or free"
            " it"
        ) from error
    except SpecError as error:  # of who reads what was written: the reader knows its source only
        raise SpecError(str(error).replace(str(temporary), parts.path)) from error
    finally:
        with contextlib.suppress(OSError):
            shutil.rmtree(temporary)
    return size


def must_be_new(folder: Path) -> None:
    """Raise SpecError if the folder, or anything of its name, is there."""
    if os.path.lexists(folder):
        raise SpecError(f"{folder}: is already there; give the name of a new folder")
    must_have_a_place(folder)


def _write(parts: Parts, folder: Path) -> None:
    names = [*ENDS, *(EDGE + name for name in parts.columns)]
    files = [_Rows(folder / f"{name}.npy", np.int32 if name in ENDS else bool) for name in names]
    with contextlib.ExitStack() as stack:
        for file in files:
            stack.callback(file.close)
        for piece in edge_pieces(parts):
            for file, column in zip(files, piece, strict=True):
                file.append(column)
    for name, pieces in parts.edge_fields.items():
        read = pieces_of(parts.path, "its edges", pieces)
        rows = _write_rows(folder / f"{EDGE}{name}.npy", bool, read)
        must_be_by_edge(parts.path, name, rows, files[0].rows)
    if parts.x is not None and not sp.issparse(parts.x):
        read = feature_pieces(parts.x_path or parts.path, parts.x)
        _write_rows(folder / "x.npy", np.float32, read)
    for name, array in small_arrays(parts).items():
        np.save(folder / f"{name}.npy", array, allow_pickle=False)


def _write_rows(path: Path, dtype: Any, pieces: Iterator[Array]) -> int:
    """Write an array piece by piece: how many rows it has."""
    with contextlib.closing(_Rows(path, dtype)) as rows:
        for piece in pieces:
            rows.append(piece)
    return rows.rows
