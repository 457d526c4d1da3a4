"""Readers of other libraries' graphs: files, folders and objects, recognised by their content.

FORMATS is the table: a format's name, its test and its reader. A reader returns `Parts`, which
`collect` checks and loads into memory, or `convert` writes as a folder of .npy files."""

from __future__ import annotations

import os
import pickle
import zipfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote
from typing import Any

import numpy as np

from gnnplan.planner.graph.arrays import collect, must_be_new, read_own, write
from gnnplan.planner.graph.formats import datasets, libraries, tables
from gnnplan.planner.graph.formats.extras import add, read_graphsaint
from gnnplan.planner.graph.generator import generated, is_generated
from gnnplan.planner.graph.graph import Graph
from gnnplan.planner.graph.npy import mapped_array, reading
from gnnplan.planner.graph.part_folder import DESCRIPTION
from gnnplan.planner.graph.parts import (
    GAPS,
    Extras,
    Parts,
    build,
    shown,
    tensor_array,
    vertices_of,
)
from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.planner.vocabulary.files import must_be_file

__all__ = ["FORMATS", "Extras", "convert", "parts_of", "recognise"]

OLD_TORCH = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."  # .pt of torch before 1.6
# first bytes of a compressed file -> the program that unpacks it
UNPACK = {tables.GZIP: "gunzip", b"BZh": "bunzip2", b"\xfd7zXZ": "unxz"}
UNPACK |= {b"\x28\xb5\x2f\xfd": "unzstd", b"PK\3\4": "unzip"}
NONE = Extras()
START = 512  # [B] at the start of a file that are read to recognise its format


@dataclass(frozen=True)
class _File:
    """The evidence for the format of a file or folder, read once."""

    path: str
    start: bytes  # first bytes of a file
    names: frozenset[str]  # names of a folder's entries, or of a zip archive's members

    def has(self, *names: str) -> bool:
        """Whether the folder or archive has all these names."""
        return self.names.issuperset(names)


@dataclass(frozen=True)
class Format:
    """A format: its name in messages, the test that recognises it, and its reader."""

    name: str
    is_it: Callable[[_File], bool]
    read: Callable[[str], Parts]


def _refused(said: str) -> Callable[[str], Parts]:
    """Return a reader that raises SpecError with `said`, in which {path} becomes the path."""

    def refuse(path: str) -> Parts:
        raise SpecError(f"{path}: {said.format(path=quote(path))}")

    return refuse


PICKLE = Format(
    "a pickle",
    lambda f: f.start[:1] == b"\x80" and f.start[1:2] in (b"\2", b"\3", b"\4", b"\5"),
    _refused(
        "is a pickle, and to load it runs whatever code is in it; if you trust who made it: gnnplan"
        " convert {path} FOLDER --trust"
    ),
)
OWN_FOLDER = Format("gnnplan's folder", lambda f: f.has("src.npy"), read_own)
OWN_FILE = Format("gnnplan's .npz", lambda f: any(n.endswith(".npy") for n in f.names), read_own)
# order matters: the first format whose test passes reads the path
FOLDERS: tuple[Format, ...] = (
    Format(
        "gnnplan's folder of parts",
        lambda f: f.has(DESCRIPTION),
        _refused(
            "is a folder of parts, which plan and partition read as it is; give the graph that it"
            f" was cut of ({{path}}/{DESCRIPTION} has its name)"
        ),
    ),
    OWN_FOLDER,
    Format("GraphBolt's dataset", lambda f: f.has(datasets.METADATA), datasets.read_graphbolt),
    Format("GraphSAINT's folder", lambda f: f.has("adj_full.npz"), read_graphsaint),
    Format(
        "DistDGL's parts", lambda f: os.path.isfile(f"{f.path}/part0/graph.dgl"), libraries.read_dgl
    ),
    Format("PyG's parts", lambda f: f.has("META.json", "node_map.pt"), libraries.read_pyg),
    Format("OGB's folder", lambda f: bool(datasets.raws_of(f.path)), datasets.read_ogb),
    replace(OWN_FOLDER, is_it=OWN_FILE.is_it),  # edge_index.npy, or the reader says what lacks
)
FILES: tuple[Format, ...] = (
    Format(
        "SciPy's sparse .npz",
        lambda f: f.has("format.npy", "shape.npy"),
        lambda p: tables.of_matrix(tables.load_matrix(p), p),
    ),
    Format(
        "PyTorch's .pt",
        lambda f: f.start.startswith(OLD_TORCH) or any(n.endswith("data.pkl") for n in f.names),
        libraries.read_pt,
    ),
    OWN_FILE,
    Format("DGL's .bin", lambda f: f.start.startswith(libraries.MAGIC), libraries.read_dgl),
    Format("Parquet", lambda f: f.start.startswith(b"PAR1"), tables.parquet),
    Format(
        "an edge_index in .npy",
        lambda f: f.start.startswith(b"\x93NUMPY"),
        lambda p: libraries.of_edge_index(mapped_array(p), p),
    ),
    Format(
        "GraphML",
        lambda f: f.start.lstrip()[:1] == b"<" and b"<graphml" in f.start,
        libraries.read_graphml,
    ),
    PICKLE,
    Format(
        "MatrixMarket",
        lambda f: (tables.start_of(f.path, START) or "").lower().startswith("%%matrixmarket"),
        tables.matrix_market,
    ),
    Format("an edge list", lambda f: tables.is_edge_list(f.path), tables.edge_list),
)
FORMATS = FOLDERS + FILES
GENERATED = Format("generated", lambda f: is_generated(f.path), generated)


def recognise(path: str) -> Format:
    """Return the format of a file or a folder, by its content. Raises SpecError if it has none."""
    if is_generated(path):
        return GENERATED
    with reading(path, "a graph"):
        file = _look_at(path)
        if (format := _format_of(file)) is not None:
            return format
        is_folder = os.path.isdir(path)
        inside = [f"{path}/{name}" for name in file.names if is_folder and _is_graph(path, name)]
    if not is_folder and not file.start:
        raise SpecError(f"{path}: is empty (0 bytes); give a graph's file")
    formats = FOLDERS if is_folder else FILES
    known = ", ".join(dict.fromkeys(format.name for format in formats if format != PICKLE))
    remedy = "write the graph as one of them, for instance as a CSV with src,dst above its edges"
    if len(inside) == 1:
        remedy = f"give {inside[0]}"
    elif packed := [tool for start, tool in UNPACK.items() if file.start.startswith(start)]:
        unpack = f"{packed[0]} {quote(path)}"
        remedy = f"only text may be compressed, by gzip: unpack it first ({unpack})"
    elif not is_folder and tables.start_of(path) is None:
        remedy = f"if it is text, save it in UTF-8; else {remedy}"
    if is_folder:
        raise SpecError(
            f"{path}: is a folder of no format that is read; it holds"
            f" {shown(file.names) or 'nothing'}; folders that are: {known}; {remedy}"
        )
    raise SpecError(
        f"{path}: its content is of no format that is read; files that are: {known}; {remedy}"
    )


def _look_at(path: str) -> _File:
    """Read the evidence for the format of a file or a folder."""
    if os.path.isdir(path):
        return _File(path, b"", frozenset(os.listdir(path)))
    must_be_file(path, "give a graph's file or folder")
    with open(path, "rb") as stream:
        start, members = stream.read(START), list[str]()
    if start.startswith(b"PK"):
        with zipfile.ZipFile(path) as archive:
            members = archive.namelist()
    return _File(path, start, frozenset(members))


def _format_of(file: _File) -> Format | None:
    """Return the first format whose test passes; None if there is none."""
    formats = FOLDERS if os.path.isdir(file.path) else FILES
    return next((format for format in formats if format.is_it(file)), None)


def _is_graph(folder: str, name: str) -> bool:
    """Whether an entry of a folder is of a format that is read."""
    with suppress(Exception):  # damaged, of several kinds, or not to be opened
        return _format_of(_look_at(os.path.join(folder, name))) is not None
    return False


def parts_of(path: str, extras: Extras = NONE, trust: bool = False) -> Parts:
    """Read a file or a folder, and add `extras`.

    trust: load a pickle, which may run any code. Raises SpecError."""
    format = recognise(path)
    with reading(path, format.name):
        if trust and format is PICKLE:
            with open(path, "rb") as stream:
                parts = of_object(pickle.load(stream), path)
        else:
            parts = format.read(path)
    add(parts, extras)
    return parts


def of_object(found: Any, path: str = "") -> Parts:
    """Return the `Parts` of a DGLGraph, PyG Data, networkx graph, sparse matrix or edge_index."""
    module = type(found).__module__.partition(".")[0]
    name = path or f"the {type(found).__name__}"
    pair = found if isinstance(found, list | tuple) and len(found) == 2 else ()
    if pair and all(hasattr(ids, "shape") for ids in pair):  # sources and destinations
        with reading(name, "sources and destinations"):
            found, module = np.stack([tensor_array(name, "its ids", ids) for ids in pair]), "numpy"
    readers: dict[str, Callable[[Any, str], Parts]] = {
        "dgl": libraries.of_dgl,
        "torch_geometric": libraries.of_data,
        "networkx": libraries.of_networkx,
        "scipy": tables.of_matrix,
        "torch": libraries.of_edge_index,
        "numpy": libraries.of_edge_index,
    }
    graph_like = ("ndata", "to_dict", "nodes", "tocoo", "shape")
    if module not in readers or not any(hasattr(found, name) for name in graph_like):
        raise SpecError(
            f"{name}: a graph is a DGLGraph, a PyG Data, a networkx Graph, a SciPy sparse matrix or"
            f" an edge_index [2, E], this is {type(found).__module__}.{type(found).__name__}; of a"
            " dataset give a graph (dataset[0]), of a DataFrame two columns (df.to_numpy().T)"
        )
    with reading(name, "a graph"):
        return readers[module](found, name)


def read(path: str, source: str, extras: Extras, directed: bool) -> Graph:
    """Return the graph of a file, a folder or a generator's name, with notes on changes.

    Features in gnnplan's own folder stay there, memory-mapped."""
    parts = parts_of(path, extras)
    if extras.files or recognise(path).read is not read_own:
        parts = collect(parts)
    return build(parts, source, extras, directed)


def convert(
    source: Any, folder: str | Path, extras: Extras = NONE, trust: bool = False
) -> tuple[int, int, list[str]]:
    """Write a graph as a folder of .npy files; return (vertices, edges, notes).

    source: a path, or an object that `of_object` accepts. The folder is complete or absent. Text,
    Parquet and OGB's files are read piece by piece, so they may exceed memory. Edges are written
    unchanged: `load` drops self-loops and duplicates and makes graphs undirected. trust: load a
    pickle, which may run any code. Raises SpecError."""
    folder = Path(folder)
    must_be_new(folder)
    if isinstance(source, str | Path):
        parts = parts_of(str(source), extras, trust)
    else:
        parts = of_object(source)
        add(parts, extras)
    vertices, edges = write(parts, folder, extras.numbers)
    if vertices_of(parts) is None and vertices > 4 * edges:
        parts.notes.append(
            f"at most {2 * edges:,} of {vertices:,} vertices, counted by the highest id, have an"
            f" edge; {GAPS}"
        )
    return vertices, edges, parts.notes
