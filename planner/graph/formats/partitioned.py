"""Graphs that other libraries have cut in parts: DistDGL's folders, and those of PyG's Partitioner.

All parts together are the graph, and its cut is theirs: a part per trainer, else per server. DGL
reads its own, in a process of its own (dgl_graphs.py)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from gnnplan.planner.graph.fields import VERTEX
from gnnplan.planner.graph.formats.pyg import load_tensors
from gnnplan.planner.graph.graph import Array
from gnnplan.planner.graph.ids import must_be_ids
from gnnplan.planner.graph.parts import (
    Parts,
    ignored,
    library,
    take_fields,
    take_vertex_data,
    tensor_array,
)
from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.planner.vocabulary.files import must_be_file, read_json

MOST = 1 << 28  # [B] of a description, of which DistDGL's has a list per part
OURS = ("orig_id", "trainer_id")  # of vertices: whose rows they are, no fields


class _Rows:
    """Rows of vertices, put together of parts."""

    def __init__(self, path: str, vertices: int) -> None:
        self.path, self.vertices = path, vertices
        self.found: dict[str, Array] = {}

    def put(self, name: str, ids: Array, rows: Array) -> None:
        must_be_ids(self.path, name, ids, self.vertices, 0)
        if name not in self.found:
            self.found[name] = np.zeros((self.vertices, *rows.shape[1:]), rows.dtype)
        self.found[name][ids] = rows


def is_distdgl(path: str) -> bool:
    return os.path.isfile(os.path.join(path, "part0", "graph.dgl"))


def read_distdgl(path: str) -> Parts:
    """A folder of dgl.distributed.partition_graph, as `emit` writes it. Runs DGL's code."""
    (described, *others) = sorted(Path(path).glob("*.json")) or [Path(path) / "graph.json"]
    about = read_json(described, MOST, "copy it there")
    if others or not {"num_parts", "num_nodes"} <= set(about):
        raise SpecError(
            f"{path}: must have one .json, which describes a graph's parts; keep DistDGL's alone"
        )
    load, vertices = library("dgl").distributed.load_partition, int(about["num_nodes"])
    rows, ends, left = _Rows(path, vertices), [], set()
    of_ids = np.arange(vertices)  # whose rows they are, by DGL's ids
    loaded = []
    for number in range(int(about["num_parts"])):
        must_be_file(Path(path) / f"part{number}" / "graph.dgl", "copy that part there")
        part, data, edges, *_ = load(str(described), number)
        inner = part.ndata["_ID"][part.ndata["inner_node"].bool()].numpy()
        data = {name.partition("/")[2]: tensor.numpy() for name, tensor in data.items()}
        if "orig_id" in data:
            of_ids[inner] = data["orig_id"]
        loaded.append((part, inner, data))
        left |= set(edges)
    for number, (part, inner, data) in enumerate(loaded):
        ids, own = of_ids[inner], part.edata["inner_edge"].bool()
        ends.append(tuple(of_ids[part.ndata["_ID"][end[own]].numpy()] for end in part.edges()))
        rows.put("part", ids, data.get("trainer_id", np.full(ids.size, number)))
        for name in data.keys() - set(OURS):
            rows.put(name, ids, data[name])
    return _put_together(rows, ends, left)


def read_pyg(path: str) -> Parts:
    """A folder of torch_geometric.distributed.Partitioner, with label.pt and split.pt."""
    folder = Path(path)
    about = read_json(folder / "META.json", MOST, "copy it there")
    if about.get("is_hetero"):
        raise SpecError(f"{path}: has several kinds of vertices or edges, one of each is needed")
    owner = tensor_array(path, "node_map", load_tensors(str(folder / "node_map.pt")))
    rows, ends, left = _Rows(path, len(owner)), [], set[str]()
    rows.put("part", np.arange(len(owner)), owner)
    for number in range(int(about["num_parts"])):
        part = folder / f"part_{number}"
        graph = load_tensors(str(part / "graph.pt"))
        ends.append(tuple(tensor_array(path, end, graph[end]) for end in ("row", "col")))
        stored = load_tensors(str(part / "node_feats.pt"))
        ids = tensor_array(path, "global_id", stored["global_id"])
        for name, tensor in (stored.get("feats") or {}).items():
            rows.put(name, ids, tensor_array(path, name, tensor))
        if (part / "edge_feats.pt").exists():
            left |= set((load_tensors(str(part / "edge_feats.pt")).get("feats") or {}).keys())
    everyone = np.arange(len(owner))
    if (folder / "label.pt").exists():
        y = load_tensors(str(folder / "label.pt"))
        rows.put("y", everyone, tensor_array(path, "label.pt", y))
    if (folder / "split.pt").exists():
        for name, mask in load_tensors(str(folder / "split.pt")).items():
            rows.put(name, everyone, tensor_array(path, name, mask))
    return _put_together(rows, ends, left)


def _put_together(rows: _Rows, ends: list[Any], left: set[str]) -> Parts:
    parts = Parts(rows.path, ends, rows.vertices, owner=rows.found.pop("part"))
    take_fields(parts, take_vertex_data(parts, rows.found), lambda name, count: VERTEX)
    parts.notes += ignored(left)
    return parts
