"""Readers of graphs of PyTorch Geometric, DGL and NetworkX: files, objects, folders of parts.

A .pt file is only read by torch.load(weights_only=True), which runs no code of the file. PyG's
classes in the file become `_Record`, so PyG itself is not imported. A damaged .bin makes DGL's C++
code end its process, so a separate process reads it. All parts in a folder of DistDGL, or of PyG's
Partitioner, are merged to one graph, which keeps their partition: a part per trainer if trainers
are recorded, else per server."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp

from gnnplan.planner.graph.arrays import read_own, write
from gnnplan.planner.graph.data import EDGE, MASKS, NAME, VERTEX, kind_of
from gnnplan.planner.graph.formats.tables import of_matrix
from gnnplan.planner.graph.graph import Array, must_fit
from gnnplan.planner.graph.npy import must_be_count, must_be_ids, must_not_swell, reading
from gnnplan.planner.graph.parts import (
    FEATURES,
    LABELS,
    Parts,
    endpoints,
    ignored,
    is_numbers,
    library,
    shown,
    take_fields,
    take_split,
    take_vertex_data,
    tensor_array,
    vertices_of,
)
from gnnplan.planner.vocabulary.errors import GnnplanError, SpecError
from gnnplan.planner.vocabulary.files import MOST_SHOWN, must_be_file, read_json

# -- PyTorch Geometric -----------------------------------------------------------------------------


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


def read_pt(path: str) -> Parts:
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


# -- NetworkX --------------------------------------------------------------------------------------


GRAPHML_PER_BYTE = 10  # lower bound: [B] of Python objects per byte of GraphML


def read_graphml(path: str) -> Parts:
    """Read a GraphML file by NetworkX. Raises SpecError if its objects would exceed memory."""
    networkx = library("networkx")
    with reading(path, "GraphML"):
        must_fit(path, "NetworkX's objects of it", GRAPHML_PER_BYTE * float(os.stat(path).st_size))
        return of_networkx(networkx.read_graphml(path), path)


def of_networkx(graph: Any, path: str) -> Parts:
    """Return the edges, in both directions if undirected, and the attributes of nodes and edges.

    Numeric attributes that all nodes, or all edges, have become fields; weight becomes edge_weight.
    Nodes named 0 to N-1, as numbers or as text, keep these ids; other nodes are numbered in the
    graph's order."""
    nodes, ways = list(graph.nodes), 1 if graph.is_directed() else 2
    texts = [str(node) for node in nodes]
    are_numbers = all(re.fullmatch("[0-9]{1,10}", text) for text in texts)
    if named := are_numbers and sorted(map(int, texts)) == list(range(len(nodes))):
        nodes.sort(key=int)
    number = {node: i for i, node in enumerate(nodes)}
    pairs = ((number[u], number[v]) for u, v in graph.edges())
    ends = np.fromiter(pairs, np.dtype((np.int64, 2)), graph.number_of_edges())
    src, dst = np.concatenate([ends, ends[:, ::-1]][:ways]).T
    parts = Parts(path, [(src, dst)], len(nodes))
    fields, left = _columns([of for *_, of in graph.edges(data=True)], ())
    for name, column in fields.items():
        both = np.concatenate([column] * ways)
        parts.edge_fields["edge_weight" if name == "weight" else name] = [both]
    on_nodes = [graph.nodes[node] for node in nodes]
    data: dict[str, Array] = {}  # attribute name -> values in the order of vertex ids
    for names in (FEATURES, LABELS, *zip(MASKS, strict=True)):
        name = next((name for name in names if any(name in of for of in on_nodes)), "")
        found = [of[name] for of in on_nodes if name in of]
        if len(found) < len(nodes) and name and names != LABELS:
            raise SpecError(
                f"{path}: {name}: {len(nodes) - len(found):,} of {len(nodes):,} nodes lack it; give"
                " it to all or to none"
            )
        # text, as in Gephi's attribute label, is no class label
        if found and not any(isinstance(value, str) for value in found):
            none = np.full(np.shape(found[0]), -1)
            rows = [np.asarray(of.get(name, none)).tolist() for of in on_nodes]
            array = tensor_array(path, name, rows)
            data[name] = array[:, None] if names == FEATURES and array.ndim == 1 else array
    take_vertex_data(parts, data)
    parts.vertex_fields, others = _columns(on_nodes, data)
    parts.notes += [] if named else ["vertices are numbered in the order of the nodes"]
    parts.notes += ignored([*left, *others])
    return parts


def _columns(
    rows: Sequence[Mapping[str, Any]], taken: Collection[str]
) -> tuple[dict[str, Array], list[str]]:
    """Return the attributes that are numbers in all rows, except `taken`; and all other names."""
    found: dict[str, Array] = {}
    names = dict.fromkeys(name for row in rows for name in row if name not in taken)
    for name in filter(NAME.fullmatch, map(str, names)):
        with suppress(ValueError, TypeError, OverflowError, KeyError):
            column = np.asarray([row[name] for row in rows])
            if is_numbers(column) and all(column.shape):
                found[name] = column
    return found, [name for name in map(str, names) if name not in found]


# -- DGL -------------------------------------------------------------------------------------------


MAGIC = (0xDD2E4FF046B4A13F).to_bytes(8, "little")
OWN_MEMORY = 16 << 30  # [B] of address space that the libraries reserve; they use far less memory
MOST = 1 << 28  # [B] of the .json description; DistDGL's has a list per part
OWNER = "gnnplan part of a cut"  # vertex field that passes the owners between the two processes
OURS = ("orig_id", "trainer_id")  # DistDGL's bookkeeping, which becomes no field
DGL_PER_BYTE = 8  # [B] of memory allowed per byte of the file


def of_dgl(graph: Any, path: str) -> Parts:
    """Return the `Parts` of a homogeneous graph: ndata has features, labels, masks and fields."""
    if not graph.is_homogeneous or len(graph.canonical_etypes) != 1:
        raise SpecError(
            f"{path}: has {len(graph.ntypes)} kinds of vertices and {len(graph.canonical_etypes)}"
            " of edges, one of each is needed; give dgl.to_homogeneous(graph)"
        )
    src, dst = (ids.cpu().numpy() for ids in graph.edges(order="eid"))
    parts = Parts(path, [(src, dst)], int(graph.num_nodes()))
    on_edges, left = dict(graph.edata), take_vertex_data(parts, dict(graph.ndata))
    on_vertices = take_split(parts, int(graph.num_nodes()), left)
    for data in (on_vertices, on_edges):
        data.pop("_ID", None)  # DGL's ids, which it adds in a part of a graph
    take_fields(parts, on_vertices, lambda name, rows: VERTEX)
    take_fields(parts, on_edges, lambda name, rows: EDGE)
    return parts


def read_dgl(path: str) -> Parts:
    """Read the graph of a .bin file, or of DistDGL's folder of parts, in a separate process.

    Raises SpecError, also if DGL ends that process."""
    with tempfile.TemporaryDirectory(prefix="gnnplan-") as folder:
        out = Path(folder) / "graph"
        # -P: a folder named gnnplan in the working directory must not hide the package
        command = [sys.executable, "-P", "-m", __name__, path, str(out)]
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
        )
        if done.returncode == SpecError.exit_code:
            raise SpecError(done.stderr.splitlines()[-1])
        if done.returncode:
            raise SpecError(
                f"{path}: cannot be read as a DGL graph (DGL ended with {done.returncode}); the"
                " file is damaged, save it again with dgl.save_graphs"
            )
        parts = replace(read_own(str(out)), path=path)
    if parts.x is not None:
        parts.x = np.asarray(parts.x)  # no longer np.memmap: the temporary file is deleted
    parts.vertex_fields = {name: np.asarray(field) for name, field in parts.vertex_fields.items()}
    parts.owner = parts.vertex_fields.pop(OWNER, None)
    parts.notes += [line.removeprefix("note: ") for line in done.stdout.splitlines() if line]
    return parts


def _main(path: str, out: str) -> None:
    """Read a .bin file or DistDGL's parts, and write the graph as a folder of .npy files."""
    import resource  # not on Windows

    files = Path(path).rglob("*") if os.path.isdir(path) else [Path(path)]
    limit = OWN_MEMORY + DGL_PER_BYTE * sum(file.stat().st_size for file in files)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    with reading(path, "a DGL graph"):
        parts = read_distdgl(path) if os.path.isdir(path) else _read_bin(path)
        if parts.owner is not None:
            parts.vertex_fields[OWNER] = parts.owner
        write(parts, Path(out), numbers=True)  # the parent process checks the labels
    print(*(f"note: {note}" for note in parts.notes), sep="\n")


def _read_bin(path: str) -> Parts:
    """Read the only graph of a .bin file. Raises SpecError for several graphs."""
    graphs, _ = library("dgl").load_graphs(path)
    if len(graphs) != 1:
        raise SpecError(
            f"{path}: holds {len(graphs)} graphs, one is needed; save it alone with"
            " dgl.save_graphs(path, [graph])"
        )
    return of_dgl(graphs[0], path)


def read_distdgl(path: str) -> Parts:
    """Read a folder of dgl.distributed.partition_graph (as `emit` writes too). Runs DGL's code."""
    (described, *others) = sorted(Path(path).glob("*.json")) or [Path(path) / "graph.json"]
    about = read_json(described, MOST, "copy it there")
    if others or not {"num_parts", "num_nodes"} <= set(about):
        raise SpecError(
            f"{path}: must have one .json, which describes a graph's parts; keep DistDGL's alone"
        )
    load, of_ids = library("dgl").distributed.load_partition, np.arange(int(about["num_nodes"]))
    given, ends, left = list[tuple[str, Array, Array]](), [], set()
    for number in range(int(about["num_parts"])):
        must_be_file(Path(path) / f"part{number}" / "graph.dgl", "copy that part there")
        part, data, edges, *_ = load(str(described), number)
        ids, own = part.ndata["_ID"], part.edata["inner_edge"].bool()
        inner = ids[part.ndata["inner_node"].bool()].numpy()
        ends.append(tuple(ids[end[own]].numpy() for end in part.edges()))
        data = {name.partition("/")[2]: tensor.numpy() for name, tensor in data.items()}
        of_ids[inner] = data.pop("orig_id", inner)
        given.append(("part", inner, data.pop("trainer_id", np.full(inner.size, number))))
        given += [(name, inner, rows) for name, rows in data.items()]
        left |= {name.partition("/")[2] for name in edges} - {*OURS}
    return _put_together(path, of_ids, ends, given, left)


def read_pyg(path: str) -> Parts:
    """Read a folder of torch_geometric.distributed.Partitioner, with label.pt and split.pt."""
    folder = Path(path)
    about = read_json(folder / "META.json", MOST, "copy it there")
    if about.get("is_hetero"):
        raise SpecError(f"{path}: has several kinds of vertices or edges, one of each is needed")

    def saved(file: Path, missing: Any = None) -> Any:
        return load_tensors(str(file)) if missing is None or file.exists() else missing

    everyone = np.arange(len(owner := saved(folder / "node_map.pt")))
    ends, left, given = [], set[str](), [("part", everyone, owner)]
    for number in range(int(about["num_parts"])):
        part = folder / f"part_{number}"
        graph, stored = saved(part / "graph.pt"), saved(part / "node_feats.pt")
        ends.append(tuple(tensor_array(path, end, graph[end]) for end in ("row", "col")))
        ids = tensor_array(path, "global_id", stored["global_id"])
        given += [(name, ids, rows) for name, rows in (stored.get("feats") or {}).items()]
        left |= set(saved(part / "edge_feats.pt", {}).get("feats") or {})
    if (folder / "label.pt").exists():
        given.append(("y", everyone, saved(folder / "label.pt")))
    given += [(name, everyone, mask) for name, mask in saved(folder / "split.pt", {}).items()]
    return _put_together(path, everyone, ends, given, left)


def _put_together(
    path: str,
    of_ids: Array,
    ends: list[Any],
    given: list[tuple[str, Array, Any]],
    left: set[str],
) -> Parts:
    """Merge the edges and rows of all parts.

    of_ids: the vertex of each of the parts' ids [N]. given: (name, ids, their rows) triples."""
    found: dict[str, Array] = {}
    for name, ids, tensor in given:
        must_be_ids(path, name, ids, len(of_ids), 0)
        rows = tensor_array(path, name, tensor)
        whole = found.setdefault(name, np.zeros((len(of_ids), *rows.shape[1:]), rows.dtype))
        whole[of_ids[ids]] = rows
    for ids in chain(*ends):
        must_be_ids(path, "edges", ids, len(of_ids))
    edges = [tuple(of_ids[ids] for ids in pair) for pair in ends]
    parts = Parts(path, edges, len(of_ids), owner=found.pop("part"))
    rest = take_split(parts, len(of_ids), take_vertex_data(parts, found))
    take_fields(parts, rest, lambda name, count: VERTEX)
    parts.notes += ignored(left)
    return parts


if __name__ == "__main__":
    try:
        _main(sys.argv[1], sys.argv[2])
    except GnnplanError as problem:
        print(problem, file=sys.stderr)
        sys.exit(SpecError.exit_code)
