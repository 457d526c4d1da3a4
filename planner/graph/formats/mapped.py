"""Writes folders: arrays that grow by rows, and our own folders of mapped ones (`convert`)."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import scipy.sparse as sp

from gnnplan.planner.graph.arrays import ENDS, read_own
from gnnplan.planner.graph.build import must_be_a_graph
from gnnplan.planner.graph.fields import EDGE, must_be_by_edge
from gnnplan.planner.graph.graph import AT_ONCE, Array
from gnnplan.planner.graph.npy import load_npy
from gnnplan.planner.graph.parts import (
    Parts,
    edge_pieces,
    feature_pieces,
    pieces_of,
    small_arrays,
)
from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.planner.vocabulary.files import cannot_write, must_have_a_place


class Rows:
    """A .npy file that grows by rows, in the narrowest type that holds all of them.

    numpy's headers leave room for their final number."""

    def __init__(self, path: Path, dtype: Any = bool) -> None:
        self.path, self.dtype = path, np.dtype(dtype)
        self.stream = open(path, "xb")  # noqa: SIM115
        self.shape = cast(tuple[int, ...], (0,))
        self._header()

    def append(self, rows: Array) -> None:
        if (both := np.result_type(self.dtype, rows.dtype)) != self.dtype:
            self._widen(both)
        self.shape = self.shape[0] + len(rows), *rows.shape[1:]
        if rows.size:  # tofile would not say why a disk refuses
            raw = np.ascontiguousarray(rows, self.dtype).reshape(-1)
            self.stream.write(raw.view(np.uint8).data)

    def _widen(self, dtype: np.dtype[Any]) -> None:
        """Go on in a type that holds more, with the rows before."""
        self.close()
        before = load_npy(self.path, self.path.name)
        self.path.unlink()
        self.__init__(self.path, dtype)  # type: ignore[misc]
        step = max(1, AT_ONCE // 8 // max(1, before[:1].size))
        for start in range(0, len(before), step):
            self.append(before[start : start + step])

    def _header(self) -> None:
        self.stream.seek(0)
        about = {"descr": np.lib.format.dtype_to_descr(self.dtype), "fortran_order": False}
        np.lib.format.write_array_header_1_0(self.stream, about | {"shape": self.shape})

    def close(self) -> None:
        self.stream.flush()
        self._header()
        self.stream.flush()
        os.fsync(self.stream.fileno())
        self.stream.close()


def write_rows(path: Path, pieces: Iterable[Array]) -> Rows:
    """Write an array piece by piece: what was written."""
    with contextlib.closing(Rows(path)) as rows:
        for piece in pieces:
            rows.append(piece)
    return rows


@contextlib.contextmanager
def complete(folder: Path) -> Iterator[Path]:
    """A temporary folder that becomes `folder` when all of it is written. Raises SpecError."""
    must_be_new(folder)
    try:
        with renamed(folder) as temporary:
            yield temporary
            must_be_new(folder)
    except OSError as error:
        raise cannot_write(folder, error) from error


@contextlib.contextmanager
def renamed(folder: Path) -> Iterator[Path]:
    """A new folder beside `folder`, which gets its name where nothing is raised."""
    temporary = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}")
    temporary.mkdir()
    try:
        yield temporary
        os.rename(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def write(parts: Parts, folder: Path) -> tuple[int, int]:
    """Write the parts as a folder that is complete or absent: (vertices, edges).

    Raises SpecError for what is no graph, and if the folder cannot be written."""
    with complete(folder) as temporary:
        try:
            _write(parts, temporary)
            written = replace(read_own(str(temporary)), path=parts.path, numbers=parts.numbers)
            return must_be_a_graph(written)
        except SpecError as error:  # of who reads what was written: it knows its source only
            raise SpecError(str(error).replace(str(temporary), parts.path)) from error


def must_be_new(folder: Path) -> None:
    """Raise SpecError if the folder, or anything of its name, is there."""
    if os.path.lexists(folder):
        raise SpecError(f"{folder}: is already there; give the name of a new folder")
    must_have_a_place(folder)


def _write(parts: Parts, folder: Path) -> None:
    names = [*ENDS, *(EDGE + name for name in parts.columns)]
    with contextlib.ExitStack() as stack:
        files = [
            stack.enter_context(contextlib.closing(Rows(folder / f"{name}.npy"))) for name in names
        ]
        for piece in edge_pieces(parts):
            for file, column in zip(files, piece, strict=True):
                file.append(column)
    for name, pieces in parts.edge_fields.items():
        read = pieces_of(parts.path, "its edges", pieces)
        rows = write_rows(folder / f"{EDGE}{name}.npy", read)
        must_be_by_edge(parts.path, name, rows.shape[0], files[0].shape[0])
    if parts.x is not None and not sp.issparse(parts.x):
        write_rows(folder / "x.npy", feature_pieces(parts.x_path or parts.path, parts.x))
    for name, array in small_arrays(parts).items():
        np.save(folder / f"{name}.npy", array, allow_pickle=False)
