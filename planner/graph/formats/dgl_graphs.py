"""Readers of DGL graph objects, DGL's .bin files, and graphs that DGL or PyG partitioned.

All parts in a folder of DistDGL, or of PyG's Partitioner, are merged to one graph, which keeps
their partition: a part per trainer if trainers are recorded, else per server.

A damaged .bin makes DGL's C++ code end its process, so a separate process reads it."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from gnnplan.planner.graph.arrays import read_own, write
from gnnplan.planner.graph.fields import EDGE, VERTEX
from gnnplan.planner.graph.formats.pyg import load_tensors
from gnnplan.planner.graph.graph import Array
from gnnplan.planner.graph.npy import must_be_ids, reading
from gnnplan.planner.graph.parts import (
    Parts,
    ignored,
    library,
    take_fields,
    take_split,
    take_vertex_data,
    tensor_array,
)
from gnnplan.planner.vocabulary.errors import GnnplanError, SpecError
from gnnplan.planner.vocabulary.files import must_be_file, read_json

MAGIC = (0xDD2E4FF046B4A13F).to_bytes(8, "little")
OWN_MEMORY = 16 << 30  # [B] of address space that the libraries reserve; they use far less memory
MOST = 1 << 28  # [B] of the .json description; DistDGL's has a list per part
OWNER = "gnnplan part of a cut"  # vertex field that passes the owners between the two processes
OURS = ("orig_id", "trainer_id")  # DistDGL's bookkeeping, which becomes no field
PER_BYTE = 8  # [B] of memory allowed per byte of the file


def of_graph(graph: Any, path: str = "a DGLGraph") -> Parts:
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


def read(path: str) -> Parts:
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
    limit = OWN_MEMORY + PER_BYTE * sum(file.stat().st_size for file in files)
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
    return of_graph(graphs[0], path)


def read_distdgl(path: str) -> Parts:
    """Read a folder of dgl.distributed.partition_graph (as `emit` writes too). Runs DGL's code."""
    (described, *others) = sorted(Path(path).glob("*.json")) or [Path(path) / "graph.json"]
    about = read_json(described, MOST, "copy it there")
    if others or not {"num_parts", "num_nodes"} <= set(about):
        raise SpecError(
            f"{path}: must have one .json, which describes a graph's parts; keep DistDGL's alone"
        )
    load, vertices = library("dgl").distributed.load_partition, int(about["num_nodes"])
    given, ends, left = list[tuple[str, Array, Array]](), [], set()
    of_ids = np.arange(vertices)  # DGL's renumbered id -> original vertex id
    loaded = []
    for number in range(int(about["num_parts"])):
        must_be_file(Path(path) / f"part{number}" / "graph.dgl", "copy that part there")
        part, data, edges, *_ = load(str(described), number)
        inner = part.ndata["_ID"][part.ndata["inner_node"].bool()].numpy()
        data = {name.partition("/")[2]: tensor.numpy() for name, tensor in data.items()}
        if "orig_id" in data:
            of_ids[inner] = data["orig_id"]
        loaded.append((part, inner, data))
        left |= {name.partition("/")[2] for name in edges} - {*OURS}
    for number, (part, inner, data) in enumerate(loaded):
        ids, own = of_ids[inner], part.edata["inner_edge"].bool()
        ends.append(tuple(of_ids[part.ndata["_ID"][end[own]].numpy()] for end in part.edges()))
        given.append(("part", ids, data.get("trainer_id", np.full(ids.size, number))))
        given += [(name, ids, data[name]) for name in data.keys() - set(OURS)]
    return _put_together(path, vertices, ends, given, left)


def read_pyg(path: str) -> Parts:
    """Read a folder of torch_geometric.distributed.Partitioner, with label.pt and split.pt."""
    folder = Path(path)
    about = read_json(folder / "META.json", MOST, "copy it there")
    if about.get("is_hetero"):
        raise SpecError(f"{path}: has several kinds of vertices or edges, one of each is needed")
    owner = tensor_array(path, "node_map", load_tensors(str(folder / "node_map.pt")))
    everyone, ends, left = np.arange(len(owner)), [], set[str]()
    given = [("part", everyone, owner)]
    for number in range(int(about["num_parts"])):
        part = folder / f"part_{number}"
        graph = load_tensors(str(part / "graph.pt"))
        ends.append(tuple(tensor_array(path, end, graph[end]) for end in ("row", "col")))
        stored = load_tensors(str(part / "node_feats.pt"))
        ids = tensor_array(path, "global_id", stored["global_id"])
        for name, tensor in (stored.get("feats") or {}).items():
            given.append((name, ids, tensor_array(path, name, tensor)))
        if (part / "edge_feats.pt").exists():
            left |= set((load_tensors(str(part / "edge_feats.pt")).get("feats") or {}).keys())
    if (folder / "label.pt").exists():
        y = load_tensors(str(folder / "label.pt"))
        given.append(("y", everyone, tensor_array(path, "label.pt", y)))
    if (folder / "split.pt").exists():
        for name, mask in load_tensors(str(folder / "split.pt")).items():
            given.append((name, everyone, tensor_array(path, name, mask)))
    return _put_together(path, len(owner), ends, given, left)


def _put_together(
    path: str, vertices: int, ends: list[Any], given: list[tuple[str, Array, Array]], left: set[str]
) -> Parts:
    """Merge the edges and rows of all parts. given: (name, vertex ids, their rows) triples."""
    found: dict[str, Array] = {}
    for name, ids, rows in given:
        must_be_ids(path, name, ids, vertices, 0)
        if name not in found:
            found[name] = np.zeros((vertices, *rows.shape[1:]), rows.dtype)
        found[name][ids] = rows
    parts = Parts(path, ends, vertices, owner=found.pop("part"))
    rest = take_split(parts, vertices, take_vertex_data(parts, found))
    take_fields(parts, rest, lambda name, count: VERTEX)
    parts.notes += ignored(left)
    return parts


if __name__ == "__main__":
    try:
        _main(sys.argv[1], sys.argv[2])
    except GnnplanError as problem:
        print(problem, file=sys.stderr)
        sys.exit(SpecError.exit_code)
