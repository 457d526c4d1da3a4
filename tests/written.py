"""A small graph, and its files as other libraries write them; `quiet` imports what may lack."""

import gzip
import importlib
import json
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import networkx as nx
import numpy as np
import pytest
import scipy.io
import scipy.sparse as sp

from gnnplan.planner.graph.arrays import collect
from gnnplan.planner.graph.formats import of_object
from gnnplan.planner.graph.graph import Graph
from gnnplan.planner.graph.parts import Extras, Parts, build

N, WIDTH, CLASSES = 30, 5, 3
MASKS = ("train_mask", "val_mask", "test_mask")
ALL = {"x", "y", *MASKS}


def built(parts: Parts, directed: bool = False) -> Graph:
    """The graph of what a reader gives."""
    return build(collect(parts), parts.path, Extras(), directed)


def from_object(found: object, directed: bool = False) -> Graph:
    """The graph of another library's object, as `load` gives it of that library's file."""
    return built(of_object(found), directed)


def drawn() -> dict[str, np.ndarray]:
    """A directed graph without duplicates, in random order, one self-loop in it."""
    rng = np.random.default_rng(7)
    pairs = rng.choice(N * N, 90, replace=False)
    part = rng.permutation(np.arange(N) % 3)
    return {
        "src": pairs // N,
        "dst": pairs % N,
        "x": rng.standard_normal((N, WIDTH)).astype(np.float32),
        "y": rng.permutation(np.arange(N) % CLASSES),
        **{mask: part == i for i, mask in enumerate(MASKS)},
    }


GRAPH = drawn()
EDGES = np.stack([GRAPH["src"], GRAPH["dst"]])
SRC, DST = EDGES
DRAW = np.random.default_rng(5)
WEIGHT = DRAW.permutation(90) / 8 + 0.25  # texts hold them exactly
ATTR = (DRAW.permutation(180).reshape(90, 2) / 4 + 0.125).astype(np.float32)  # as OGB has them
TYPE = DRAW.integers(0, 3, 90)
POS = DRAW.permutation(3 * N).reshape(N, 3) / 8 + 0.5
YEAR = DRAW.integers(1990, 2020, N)
ON_EDGES = {"edge_weight": WEIGHT, "edge_attr": ATTR, "edge_type": TYPE}
ON_VERTICES = {"pos": POS, "year": YEAR}


def quiet(name: str) -> ModuleType:
    """A library, without the warnings of its import; skips where it is absent."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        os.environ.setdefault("DGLBACKEND", "pytorch")
        return pytest.importorskip(name, exc_type=ImportError)


def tensors(*names: str) -> dict:
    return torch_of({name: GRAPH[name] for name in names})


def torch_of(arrays: dict[str, np.ndarray]) -> dict:
    torch = quiet("torch")
    return {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}


def matrix(weight: np.ndarray = WEIGHT) -> sp.coo_matrix:
    return sp.coo_matrix((weight, EDGES), shape=(N, N))


def ids(mask: str) -> np.ndarray:
    return np.flatnonzero(GRAPH[mask])


def dgl_graph() -> object:
    graph = quiet("dgl").graph((GRAPH["src"], GRAPH["dst"]), num_nodes=N)
    data = tensors("x", "y", *MASKS)
    graph.ndata.update({"feat": data.pop("x"), "label": data.pop("y")} | data)
    graph.ndata.update(torch_of(ON_VERTICES))
    graph.edata.update(torch_of(ON_EDGES))
    return graph


def pyg_data() -> Any:
    quiet("torch_geometric")
    data = importlib.import_module("torch_geometric.data").Data
    held = tensors("x", "y", *MASKS) | torch_of(ON_EDGES | ON_VERTICES)
    return data(edge_index=edge_index(), **held, num_nodes=N)


def edge_index() -> object:
    return quiet("torch").from_numpy(EDGES.copy())


def networkx_graph(x: bool = True) -> nx.DiGraph:
    graph = nx.DiGraph()
    for v in range(N):
        of = {"y": int(GRAPH["y"][v]), "year": int(YEAR[v])}
        of |= {mask: bool(GRAPH[mask][v]) for mask in MASKS}
        graph.add_node(v, **of, **({"x": GRAPH["x"][v].tolist()} if x else {}))
    columns = zip(SRC, DST, WEIGHT, TYPE, strict=True)
    edges = [(int(u), int(v), {"weight": float(w), "edge_type": int(t)}) for u, v, w, t in columns]
    graph.add_edges_from(edges)
    return graph


def pyg_adjacency(folder: Path) -> Path:
    """As ToSparseTensor leaves it: rows are destinations, other fields in the matrix's order."""
    torch, order = quiet("torch"), np.lexsort([SRC, DST])
    ends = torch.from_numpy(EDGES[::-1, order].copy())
    with torch.sparse.check_sparse_tensor_invariants():
        turned = torch.sparse_coo_tensor(ends, torch.from_numpy(WEIGHT[order]), (N, N)).coalesce()
    others = torch_of({"edge_attr": ATTR[order], "edge_type": TYPE[order]} | ON_VERTICES)
    torch.save({"adj_t": turned, **tensors("x", "y", *MASKS), **others}, folder / "adj.pt")
    return folder / "adj.pt"


def zipped(path: Path, table: np.ndarray, fmt: str = "%d") -> None:
    with gzip.open(path, "wt") as stream:
        np.savetxt(stream, table, fmt=fmt, delimiter=",")


def ogb_text(folder: Path) -> Path:
    """The layout of https://ogb.stanford.edu/docs/nodeprop/ as downloaded: raw/ and split/."""
    root = folder / "ogbn_small"
    (root / "raw").mkdir(parents=True)
    (root / "split" / "time").mkdir(parents=True)
    zipped(root / "raw" / "edge.csv.gz", EDGES.T)
    zipped(root / "raw" / "node-feat.csv.gz", GRAPH["x"], "%.9g")
    zipped(root / "raw" / "node-label.csv.gz", GRAPH["y"][:, None])
    zipped(root / "raw" / "num-node-list.csv.gz", np.array([[N]]))
    zipped(root / "raw" / "num-edge-list.csv.gz", np.array([[90]]))
    zipped(root / "raw" / "edge-feat.csv.gz", ATTR, "%.9g")
    zipped(root / "raw" / "edge_type.csv.gz", TYPE[:, None])
    zipped(root / "raw" / "node_year.csv.gz", YEAR[:, None])
    for part, mask in zip(("train", "valid", "test"), MASKS, strict=True):
        zipped(root / "split" / "time" / f"{part}.csv.gz", ids(mask)[:, None])
    return root


def ogb_binary(folder: Path) -> Path:
    root = ogb_text(folder)
    for file in (root / "raw").iterdir():
        file.unlink()
    np.savez_compressed(
        root / "raw" / "data.npz",
        edge_index=EDGES,
        node_feat=GRAPH["x"],
        num_nodes_list=np.array([N]),
        num_edges_list=np.array([90]),
        edge_feat=ATTR,
        edge_type=TYPE[:, None],
        node_year=YEAR[:, None],
    )
    label = GRAPH["y"].astype(np.float32)[:, None]
    np.savez_compressed(root / "raw" / "node-label.npz", node_label=label)
    return root


METADATA = """
dataset_name: small
graph:
  nodes:
    - num: 30
  edges:
    - format: {kind}
      path: edges.{kind}
feature_data:
  - domain: node
    type: null
    name: feat
    format: numpy
    in_memory: false
    path: feat.npy
{fields}tasks:
  - name: node_classification
    num_classes: 3
"""


def graphbolt(folder: Path, kind: str) -> None:
    """The layout of https://docs.dgl.ai/stochastic_training/ondisk-dataset-specification.html."""
    fields = ""
    for domain, arrays in (("node", ON_VERTICES), ("edge", ON_EDGES)):
        for name, array in arrays.items():
            np.save(folder / f"{name}.npy", array)
            fields += f"  - {{domain: {domain}, type: null, name: {name}, format: numpy,"
            fields += f" path: {name}.npy}}\n"
    document = METADATA.format(kind=kind, fields=fields)
    for name, mask in zip(("train_set", "validation_set", "test_set"), MASKS, strict=True):
        document += f"    {name}:\n      - type: null\n        data:\n"
        for what, array in (("seeds", ids(mask)), ("labels", GRAPH["y"][ids(mask)])):
            np.save(folder / f"{name}_{what}.npy", array)
            document += f"          - name: {what}\n            format: numpy\n"
            document += f"            path: {name}_{what}.npy\n"
    (folder / "metadata.yaml").write_text(document)
    np.save(folder / "feat.npy", GRAPH["x"])
    if kind == "csv":
        np.savetxt(folder / "edges.csv", EDGES.T, "%d", ",")
    else:
        np.save(folder / "edges.numpy", EDGES)
        os.rename(folder / "edges.numpy.npy", folder / "edges.numpy")


def graphsaint(folder: Path) -> Path:
    sp.save_npz(folder / "adj_full.npz", matrix(np.ones(90)).tocsr())
    np.save(folder / "feats.npy", GRAPH["x"].astype(np.float64))
    classes = {str(v): int(y) for v, y in enumerate(GRAPH["y"])}
    (folder / "class_map.json").write_text(json.dumps(classes))
    roles = {role: ids(m).tolist() for role, m in zip(("tr", "va", "te"), MASKS, strict=True)}
    (folder / "role.json").write_text(json.dumps(roles))
    return folder


def csv_with_names(folder: Path) -> Path:
    """As pandas writes a table: an index, the columns in another order, fields and a text."""
    columns = enumerate(zip(DST, WEIGHT, TYPE, SRC, strict=True))
    rows = [f"{i},{v},{w},{t},road,{u}" for i, (v, w, t, u) in columns]
    (folder / "named").write_text("\n".join([",target,Weight,edge_type,kind,source", *rows]) + "\n")
    return folder / "named"


def commented(folder: Path) -> Path:
    lines = [f"{u} {v} {t}" for u, v, t in zip(SRC, DST, TYPE, strict=True)]
    (folder / "e.txt").write_text("\n".join(["# u v edge_type", *lines]))
    return folder / "e.txt"


def tsv(folder: Path) -> Path:
    """As SNAP has it: comments, tabs, no end of the last line."""
    rows = [f"{u}\t{v}" for u, v in EDGES.T]
    (folder / "snap.txt").write_text("\n".join(["# Nodes: 30", "# From\tTo", *rows]))
    return folder / "snap.txt"


def parquet(folder: Path) -> Path:
    arrow, writer = quiet("pyarrow"), quiet("pyarrow.parquet")
    columns = {"weight": WEIGHT, "dst": DST, "src": SRC, "edge_type": TYPE, "kind": ["road"] * 90}
    writer.write_table(arrow.table(columns), folder / "edges.parquet", row_group_size=40)
    return folder / "edges.parquet"


def own_folder(folder: Path) -> Path:
    for name, array in (GRAPH | ON_EDGES | ON_VERTICES).items():
        np.save(folder / f"{name}.npy", array)
    return folder


def to(name: str, write: Callable[[Path], object]) -> Callable[[Path], Path]:
    """A writer of this file in a folder, which gives its path."""

    def written(folder: Path) -> Path:
        write(folder / name)
        return folder / name

    written.__name__ = name
    return written


def saved(held: Callable[[], object], **how: object) -> Callable[[Path], object]:
    """torch.save of this."""
    return lambda path: quiet("torch").save(held(), path, **how)


def as_dictionary() -> dict:
    return {"edge_index": edge_index(), **tensors("x", "y", *MASKS)}


def as_in_memory_dataset() -> tuple:
    """As InMemoryDataset.save writes it: the dictionary, slices, the class."""
    data = pyg_data()
    return data.to_dict(), None, type(data)


csv = to("edges.csv", lambda path: np.savetxt(path, EDGES.T, "%d", ","))
csv_gz = to("edges.csv.gz", lambda path: zipped(path, EDGES.T))
matrix_market = to("graph.mtx", lambda path: scipy.io.mmwrite(path, matrix()))
scipy_csr = to("graph.npz", lambda path: sp.save_npz(path, matrix().tocsr()))
scipy_coo = to("graph.npz", lambda path: sp.save_npz(path, matrix()))
graphml = to("graph.graphml", lambda path: nx.write_graphml(networkx_graph(x=False), path))
npz = to("own.npz", lambda path: np.savez(path, **GRAPH, **ON_EDGES, **ON_VERTICES))
edge_index_npy = to("edges.npy", lambda path: np.save(path, EDGES))
edge_index_pt = to("edges.pt", saved(edge_index))
pyg_pt = to("data.pt", saved(pyg_data))
pyg_processed = to("data.pt", saved(as_in_memory_dataset))
old_pt = to("old.pt", saved(as_dictionary, _use_new_zipfile_serialization=False))
dgl_bin = to("graph.bin", lambda path: quiet("dgl").save_graphs(str(path), [dgl_graph()]))
graphbolt_csv = to("", lambda path: graphbolt(path, "csv"))
graphbolt_numpy = to("", lambda path: graphbolt(path, "numpy"))
