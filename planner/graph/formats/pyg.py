"""Readers of PyTorch Geometric's graphs: .pt files, Data objects, edge_index tensors.

A .pt file is only read by torch.load(weights_only=True), which runs no code of the file. PyG's
classes in the file become `_Record`, so PyG itself is not imported."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import scipy.sparse as sp

from gnnplan.planner.graph.fields import VERTEX, kind_of
from gnnplan.planner.graph.formats.edge_lists import of_matrix
from gnnplan.planner.graph.npy import must_be_count, must_not_swell, reading
from gnnplan.planner.graph.parts import (
    Parts,
    endpoints,
    library,
    shown,
    take_fields,
    take_split,
    take_vertex_data,
    tensor_array,
    vertices_of,
)
from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.planner.vocabulary.files import MOST_SHOWN, must_be_file

PYG = (
    "torch_geometric.data.data.Data",
    "torch_geometric.data.data.DataEdgeAttr",
    "torch_geometric.data.data.DataTensorAttr",
    "torch_geometric.data.storage.GlobalStorage",
    "torch_geometric.data.storage.BaseStorage",
)
OTHERS = ("edge_index", "adj_t", "num_nodes")  # entries of Data that are no vertex or edge data
BY_VERTEX = ("pos", "batch")  # entries with a row per vertex, which give the number of vertices


class _Record:
    """A stand-in for an object of PyG: it has the object's attributes, but no code."""

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)


# types that PyG saves in its list of vertex attributes, for example after ToUndirected
ATTRIBUTES: tuple[tuple[Any, str], ...] = (
    (lambda factory=None: {}, "collections.defaultdict"),  # torch cannot fill a defaultdict
    (str, "torch_geometric.data.storage.AttrType"),
)


@contextmanager
def _only(serialization: Any, allowed: list[Any]) -> Iterator[None]:
    """Allow only these classes in files; an imported PyG registers more classes as safe."""
    before = serialization.get_safe_globals()
    serialization.clear_safe_globals()
    serialization.add_safe_globals(allowed)
    try:
        yield
    finally:
        serialization.clear_safe_globals()
        serialization.add_safe_globals(before)


def load_tensors(path: str) -> Any:
    """Load a .pt file: tensors, memory-mapped if possible, in plain containers.

    Raises SpecError for objects that need code to load."""
    torch = library("torch")
    must_be_file(path)
    if zipfile.is_zipfile(path):
        with reading(path, ".pt"), zipfile.ZipFile(path) as archive:
            for info in archive.infolist():  # torch does not compress, but decompresses others'
                must_not_swell(f"{path}: {info.filename}", info.file_size, info.compress_size)
    allowed = [*((_Record, name) for name in PYG), *ATTRIBUTES]
    error: Exception
    for mapped in (True, False):  # files of torch before 1.6 cannot be memory-mapped
        try:
            with _only(torch.serialization, allowed):
                return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
        except Exception as caught:
            error = caught
    text = " ".join(str(error).split())
    if "nsupported" in text or "eights only" in text or "weights_only" in text:
        if "HeteroData" in text or "NodeStorage" in text:
            raise of_several_kinds(path, "HeteroData") from error
        said = text.rpartition("WeightsUnpickler error: ")[2][: 2 * MOST_SHOWN]
        raise SpecError(
            f"{path}: holds objects that only code of the file can make, which is never run"
            f" ({said}); save tensors in dictionaries, as torch.save(data.to_dict(), ...) does"
        ) from error
    raise SpecError(
        f"{path}: cannot be read as .pt ({type(error).__name__}: {text[: 2 * MOST_SHOWN]}); the"
        " file is damaged, save it again"
    ) from error


def read(path: str) -> Parts:
    """Read a Data, its dictionary, an InMemoryDataset's triple of one graph, or an edge_index."""
    loaded = load_tensors(path)
    if isinstance(loaded, tuple | list) and loaded and not hasattr(loaded, "layout"):
        if len(loaded) > 1 and any(hasattr(each, "layout") for each in loaded):
            kinds = ", ".join(type(each).__name__ for each in loaded)
            raise SpecError(
                f"{path}: holds a {type(loaded).__name__} of {kinds}; save a dictionary that says"
                " which is which: torch.save({'edge_index': .., 'x': .., 'y': ..}, ..)"
            )
        if len(loaded) > 1 and loaded[1]:  # slices: the start of each of several graphs
            raise SpecError(
                f"{path}: holds several graphs; save one of them, torch.save(dataset[0], ...)"
            )
        loaded = loaded[0]
    if isinstance(loaded, _Record):
        store = vars(loaded).get("_store", loaded)
        loaded = vars(store).get("_mapping") or vars(loaded)
    if isinstance(loaded, Mapping):
        return of_mapping(loaded, path)
    return of_edge_index(loaded, path)


def of_several_kinds(path: str, name: str) -> SpecError:
    """Return the error for a graph with several kinds of vertices or edges."""
    return SpecError(
        f"{path}: {name} is not a graph of one kind of vertices and edges; give a Data"
        " (data.to_homogeneous())"
    )


def of_data(data: Any, path: str) -> Parts:
    """Return the `Parts` of a Data object. Raises SpecError for graphs of several kinds."""
    if type(data).__name__ in ("HeteroData", "Batch", "TemporalData"):
        raise of_several_kinds(path, type(data).__name__)
    return of_mapping({**data.to_dict(), "num_nodes": data.num_nodes}, path)


def of_mapping(data: Mapping[str, Any], path: str) -> Parts:
    """Return the `Parts` of a Data's dictionary. Raises SpecError."""
    edge_index, numbers = data.get("edge_index"), None
    if "_global_store" in data:
        raise of_several_kinds(path, "a HeteroData's dictionary")
    if edge_index is None:
        turned = data.get("adj_t")
        if turned is None:
            raise SpecError(
                f"{path}: edge_index: missing; edges [2, E] are required, found"
                f" {shown(data) or 'nothing'}"
            )
        if not str(getattr(turned, "layout", "")).startswith("torch.sparse"):
            raise SpecError(f"{path}: adj_t: cannot be read; save edge_index instead")
        turned = turned.to_sparse_coo().coalesce()
        edge_index = turned.indices().flip(0)  # rows are destinations
        numbers = tensor_array(path, "adj_t's numbers", turned.values())
    parts = of_edge_index(edge_index, path)
    if data.get("num_nodes") is not None:
        parts.vertices = must_be_count(path, "num_nodes", data["num_nodes"])
    src, dst, *_ = next(iter(parts.edges))
    if numbers is not None and data.get("edge_weight") is None and (numbers != 1).any():
        parts.edge_fields["edge_weight"] = [numbers]
    left = take_vertex_data(parts, {n: value for n, value in data.items() if n not in OTHERS})
    shapes: Any = (getattr(left[name], "shape", ()) for name in BY_VERTEX if name in left)
    said = [vertices_of(parts), *(int(shape[0]) for shape in shapes if len(shape))]
    vertices = next((count for count in said if count is not None), None)
    if vertices is None:
        vertices = max((int(ids.max()) + 1 for ids in (src, dst) if ids.size), default=0)

    def kind(name: str, rows: int) -> str | None:
        found = kind_of(path, name, rows, vertices, len(src))
        if found == VERTEX and rows == len(src):
            parts.notes.append(
                f"{name} is taken as of vertices, which are as many as edges; fields of edges have"
                " edge in their names"
            )
        return found

    take_fields(parts, take_split(parts, vertices, left), kind)
    return parts


def of_edge_index(edge_index: Any, path: str = "an edge_index") -> Parts:
    """Return the `Parts` of a tensor [2, E] of sources and destinations, or of a sparse one [N, N].

    Entry i, j of a sparse tensor is the edge i -> j, as in SciPy's. Raises SpecError."""
    if str(getattr(edge_index, "layout", "")).startswith("torch.sparse"):
        with reading(path, "a sparse tensor"):
            entries = edge_index.detach().cpu().to_sparse_coo().coalesce()
            held = entries.values().numpy(), entries.indices().numpy()
            return of_matrix(sp.coo_array(held, tuple(entries.shape)), path)
    return Parts(
        path, [endpoints(path, "edge_index", tensor_array(path, "edge_index", edge_index))]
    )
