"""Fields of vertices and edges: each format keeps them, whatever happens to the edges they are of."""

import importlib
import json
from pathlib import Path

import networkx as nx
import numpy as np
import pytest
import scipy.io
import scipy.sparse as sp
from hypothesis import given
from hypothesis import strategies as st
from written import (
    EDGES,
    METADATA,
    N,
    built,
    from_object,
    graphbolt,
    ogb_binary,
    ogb_text,
    quiet,
    zipped,
)

from gnnplan.planner.graph.fields import along
from gnnplan.planner.graph.formats import convert, parts_of, pyg
from gnnplan.planner.graph.graph import Graph, in_neighbours
from gnnplan.planner.graph.load import load
from gnnplan.planner.graph.sampling import hold_out
from gnnplan.planner.strategies.minibatch.adjacency_store import thinned
from gnnplan.planner.vocabulary.errors import SpecError

DRAW = np.random.default_rng(5)
WEIGHT = DRAW.permutation(90) / 8 + 0.25  # texts hold them exactly
ATTR = DRAW.permutation(180).reshape(90, 2) / 4 + 0.125
TYPE = DRAW.integers(0, 3, 90)
POS = DRAW.permutation(3 * N).reshape(N, 3) / 8 + 0.5
YEAR = DRAW.integers(1990, 2020, N)
ON_EDGES = {"edge_weight": WEIGHT, "edge_attr": ATTR, "edge_type": TYPE}
ON_VERTICES = {"pos": POS, "year": YEAR}
SRC, DST = EDGES


def torch_of(arrays: dict[str, np.ndarray]) -> dict:
    torch = quiet("torch")
    return {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}


def pyg_data() -> object:
    quiet("torch_geometric")
    data = importlib.import_module("torch_geometric.data").Data
    return data(edge_index=quiet("torch").from_numpy(EDGES), **torch_of(ON_EDGES | ON_VERTICES))


def pyg_pt(folder: Path) -> Path:
    quiet("torch").save(pyg_data(), folder / "data.pt")
    return folder / "data.pt"


def pyg_adjacency(folder: Path) -> Path:
    """As ToSparseTensor leaves it: rows are destinations, other fields in the matrix's order."""
    torch, order = quiet("torch"), np.lexsort([SRC, DST])
    ends = torch.from_numpy(EDGES[::-1, order].copy())
    with torch.sparse.check_sparse_tensor_invariants():
        matrix = torch.sparse_coo_tensor(ends, torch.from_numpy(WEIGHT[order]), (N, N)).coalesce()
    others = torch_of({"edge_attr": ATTR[order], "edge_type": TYPE[order]} | ON_VERTICES)
    torch.save({"adj_t": matrix, **others}, folder / "adj.pt")
    return folder / "adj.pt"


def dgl_graph() -> object:
    graph = quiet("dgl").graph((SRC, DST), num_nodes=N)
    graph.ndata.update(torch_of(ON_VERTICES))
    graph.edata.update(torch_of(ON_EDGES))
    return graph


def dgl_bin(folder: Path) -> Path:
    quiet("dgl").save_graphs(str(folder / "graph.bin"), [dgl_graph()])
    return folder / "graph.bin"


def own_npz(folder: Path) -> Path:
    np.savez(folder / "own.npz", src=SRC, dst=DST, **ON_EDGES, **ON_VERTICES)
    return folder / "own.npz"


def own_folder(folder: Path) -> Path:
    for name, array in ({"src": SRC, "dst": DST} | ON_EDGES | ON_VERTICES).items():
        np.save(folder / f"{name}.npy", array)
    return folder


def bolt(folder: Path, kind: str) -> Path:
    graphbolt(folder, kind)
    about = ""
    for domain, fields in (("node", ON_VERTICES), ("edge", ON_EDGES)):
        for name, array in fields.items():
            np.save(folder / f"{name}.npy", array)
            about += f"  - {{domain: {domain}, type: null, name: {name}, format: numpy,"
            about += f" path: {name}.npy}}\n"
    file = folder / "metadata.yaml"
    file.write_text(file.read_text().replace("\ntasks:", f"\n{about}tasks:"))
    assert METADATA and about in file.read_text()
    return folder


def ogb_in_text(folder: Path) -> Path:
    root = ogb_text(folder)
    zipped(root / "raw" / "edge-feat.csv.gz", ATTR, "%.9g")
    zipped(root / "raw" / "edge_type.csv.gz", TYPE[:, None])
    zipped(root / "raw" / "node_year.csv.gz", YEAR[:, None])
    return root


def ogb_in_binary(folder: Path) -> Path:
    file = ogb_binary(folder) / "raw" / "data.npz"
    more = {"edge_feat": ATTR, "edge_type": TYPE[:, None], "node_year": YEAR[:, None]}
    np.savez_compressed(file, **dict(np.load(file)), **more)
    return file.parents[1]


def table(folder: Path) -> Path:
    rows = zip(DST, WEIGHT, TYPE, SRC, strict=True)
    lines = [f"{v},{w},{t},road,{u}" for v, w, t, u in rows]
    (folder / "e.csv").write_text("\n".join(["target,Weight,edge_type,kind,source", *lines]))
    return folder / "e.csv"


def commented(folder: Path) -> Path:
    lines = [f"{u} {v} {t}" for u, v, t in zip(SRC, DST, TYPE, strict=True)]
    (folder / "e.txt").write_text("\n".join(["# u v edge_type", *lines]))
    return folder / "e.txt"


def parquet(folder: Path) -> Path:
    arrow, writer = quiet("pyarrow"), quiet("pyarrow.parquet")
    columns = {"src": SRC, "weight": WEIGHT, "dst": DST, "edge_type": TYPE, "kind": ["road"] * 90}
    writer.write_table(arrow.table(columns), folder / "e.parquet", row_group_size=40)
    return folder / "e.parquet"


def matrix() -> sp.coo_matrix:
    return sp.coo_matrix((WEIGHT, EDGES), shape=(N, N))


def matrix_market(folder: Path) -> Path:
    scipy.io.mmwrite(folder / "g.mtx", matrix())
    return folder / "g.mtx"


def scipy_npz(folder: Path) -> Path:
    sp.save_npz(folder / "g.npz", matrix().tocsr())
    return folder / "g.npz"


def networkx_graph() -> nx.DiGraph:
    graph = nx.DiGraph()
    graph.add_nodes_from((v, {"year": int(YEAR[v])}) for v in range(N))
    columns = zip(SRC, DST, WEIGHT, TYPE, strict=True)
    edges = [(int(u), int(v), {"weight": float(w), "edge_type": int(t)}) for u, v, w, t in columns]
    graph.add_edges_from(edges)
    return graph


def graphml(folder: Path) -> Path:
    nx.write_graphml(networkx_graph(), folder / "g.graphml")
    return folder / "g.graphml"


def must_have(graph: Graph, on_edges: dict, on_vertices: dict) -> None:
    """Each edge of a directed graph has the rows that were given for it."""
    assert graph.edge_fields.keys() == on_edges.keys()
    assert graph.vertex_fields.keys() == on_vertices.keys()
    place = {(u, v): i for i, (u, v) in enumerate(EDGES.T.tolist())}
    readers = np.repeat(np.arange(N), graph.degree)
    places = [place[pair] for pair in zip(graph.indices.tolist(), readers.tolist(), strict=True)]
    for name, array in on_edges.items():
        found = graph.edge_fields[name]
        assert np.array_equal(found.reshape(len(found), -1), array[places].reshape(len(found), -1))
        assert found.dtype.kind == array.dtype.kind and not found.flags.writeable, name
    for name, array in on_vertices.items():
        found = graph.vertex_fields[name]
        assert np.array_equal(found.reshape(N, -1), array.reshape(N, -1))
        assert found.dtype.kind == array.dtype.kind and not found.flags.writeable, name


def some(*names: str) -> dict[str, np.ndarray]:
    return {name: ON_EDGES[name] for name in names}


ALL = ON_EDGES, ON_VERTICES
TABLE = some("edge_weight", "edge_type"), {}
OGB = some("edge_attr", "edge_type"), {"node_year": YEAR}
ONE = some("edge_weight"), {}
WRITERS = [
    *((writer, *ALL) for writer in (pyg_pt, pyg_adjacency, own_npz, own_folder)),
    *((lambda folder, kind=kind: bolt(folder, kind), *ALL) for kind in ("csv", "numpy")),
    pytest.param(dgl_bin, *ALL, marks=pytest.mark.processes),
    *((writer, *OGB) for writer in (ogb_in_text, ogb_in_binary)),
    *((writer, *TABLE) for writer in (table, parquet)),
    (commented, some("edge_type"), {}),
    *((writer, *ONE) for writer in (matrix_market, scipy_npz)),
    (graphml, some("edge_weight", "edge_type"), {"year": YEAR}),
]


@pytest.mark.parametrize("write, on_edges, on_vertices", WRITERS)
def test_a_format_keeps_its_fields(tmp_path, write, on_edges, on_vertices):
    """As the file is read, and as the folder that it is converted to, of which vertices' fields
    stay in their files."""
    (tmp_path / "written").mkdir()
    path = str(write(tmp_path / "written"))
    read = load(path, directed=True)
    must_have(read, on_edges, on_vertices)
    convert(path, tmp_path / "folder")
    mapped = load(str(tmp_path / "folder"), directed=True)
    must_have(mapped, on_edges, on_vertices)
    assert mapped.stats.hash == read.stats.hash
    assert all(isinstance(field, np.memmap) for field in mapped.vertex_fields.values())


OBJECTS = [(pyg_data, *ALL), (dgl_graph, *ALL), (matrix, *ONE), (networkx_graph, *WRITERS[-1][1:])]


@pytest.mark.parametrize("make, on_edges, on_vertices", OBJECTS)
def test_an_object_keeps_its_fields(make, on_edges, on_vertices):
    must_have(from_object(make(), directed=True), on_edges, on_vertices)


@pytest.mark.parametrize("make", [scipy_npz, matrix_market, pyg_adjacency])
def test_a_matrix_of_ones_has_no_weights(tmp_path, make, monkeypatch):
    monkeypatch.setitem(globals(), "WEIGHT", np.ones(90))
    graph = load(str(make(tmp_path)), directed=True)
    assert "edge_weight" not in graph.edge_fields


def test_dgls_names_may_be_those_of_vertices_features_and_files(tmp_path):
    """They were one file of the converted folder, and DGL's own ids are no field."""
    torch, graph = quiet("torch"), quiet("dgl").graph((SRC, DST), num_nodes=N)
    both = {"x": torch.ones(90, 2), "h": torch.ones(90), "a/b": torch.ones(90)}
    graph.edata.update(both | {"_ID": torch.arange(90)})
    graph.ndata.update({"x": torch.ones(N, 4), "h": torch.zeros(N)})
    _, _, notes = convert(graph, tmp_path / "folder")
    assert notes == ["ignored: a/b"]
    found = load(str(tmp_path / "folder"), directed=True)
    assert found.edge_fields.keys() == {"x", "h"} and found.stats.features == 4
    assert found.vertex_fields["h"].sum() == 0


# -- edges that are sorted, dropped and turned -----------------------------------------------------

PAIRS = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=24)


@given(pairs=PAIRS, directed=st.booleans())
def test_rows_go_along_with_their_edges(pairs, directed):
    """One way: both directions have them. Both ways: each its own. Duplicates agree, or are refused
    (here each pair has one row)."""
    src, dst = np.array(pairs, np.int64).reshape(-1, 2).T
    rows = np.stack([10 * src + dst, src], 1)
    indptr, indices, _ = in_neighbours(src, dst, 6, directed)
    found, _ = along({"f": rows}, (src, dst), 6, directed)
    readers = np.repeat(np.arange(6), np.diff(indptr))
    for u, v, row in zip(indices.tolist(), readers.tolist(), found["f"].tolist(), strict=True):
        a, b = (u, v) if (u, v) in pairs else (v, u)
        assert row == [10 * a + b, a] and (not directed or (a, b) == (u, v))


def own(folder: Path, **arrays: object) -> str:
    np.savez(folder / "g.npz", **{"meta": json.dumps({"vertices": 9}), **arrays})
    return str(folder / "g.npz")


def test_what_happens_to_fields_is_said(tmp_path):
    src, dst = [0, 1, 1, 2, 3, 3], [1, 0, 2, 1, 3, 4]
    graph = load(own(tmp_path, src=src, dst=dst, edge_weight=[1.0, 2, 3, 3, 4, 5]))
    assert graph.indices.tolist() == [1, 0, 2, 1, 4, 3]
    assert graph.edge_fields["edge_weight"].tolist() == [2, 1, 3, 3, 5, 5]
    said = (
        "dropped edge_weight of 1 self-loops with them",
        "1 edges that are given one way have their edge_weight both ways",
        "edge_weight: 2 edges that are given both ways have other rows each way, and keep them",
    )
    assert set(said) <= set(graph.stats.notes)
    kept = load(own(tmp_path, src=src, dst=dst, edge_weight=[1.0, 2, 3, 3, 4, 5]), directed=True)
    assert not {*said[1:]} & {*kept.stats.notes}


def test_an_edge_that_is_given_twice_has_one_row(tmp_path):
    edges = {"src": [0, 0, 1, 0], "dst": [1, 1, 2, 1]}
    agreed = load(own(tmp_path, **edges, edge_attr=[[1, 2], [1, 2], [3, 4], [1, 2]]), directed=True)
    assert agreed.edge_fields["edge_attr"].tolist() == [[1, 2], [3, 4]]
    path = own(tmp_path, **edges, edge_attr=[[1, 2], [1, 2], [3, 4], [1, 9]])
    apart = load(path, directed=True)
    assert (
        not apart.edge_fields
        and (
            "left edge_attr out: an edge has one row, and 1 edges are given again with another,"
            " first 0 -> 1 with [1, 2] and [1, 9]; merge them to have it"
            " (torch_geometric.utils.coalesce, dgl.to_simple)"
        )
        in apart.stats.notes
    )


def test_fewer_edges_keep_their_rows(tmp_path):
    rng = np.random.default_rng(1)
    src, dst = rng.integers(0, 9, (2, 60))
    graph = load(own(tmp_path, src=src, dst=dst, edge_key=10 * src + dst), directed=True)

    def must_match(graph: Graph) -> None:
        readers = np.repeat(np.arange(9), graph.degree)
        assert np.array_equal(graph.edge_fields["edge_key"], 10 * graph.indices + readers)
        assert graph.whole.fields is graph.edge_fields

    left = hold_out(graph)
    assert 0 < left.indices.size < graph.indices.size
    for fewer in (graph, left, thinned(graph, np.arange(9) % 2 == 0)):
        must_match(fewer)


# -- the content's hash ----------------------------------------------------------------------------


def test_the_hash_knows_fields_and_their_names(tmp_path):
    edges = {"src": [0, 1], "dst": [1, 2]}
    some = [
        {},
        {"edge_weight": [1.0, 2.0]},
        {"edge_weight": [1.0, 3.0]},
        {"edge_attr": [1.0, 2.0]},
        {"pos": np.ones(9)},
        {"vertex.pos": np.zeros(9)},
        {"vertex.edge_weight": np.ones(9)},
    ]
    hashes = [load(own(tmp_path, **edges, **fields)).stats.hash for fields in some]
    assert len(set(hashes)) == len(some)
    named = load(own(tmp_path, **edges, **{"edge.edge_weight": [1.0, 2.0]})).stats.hash
    assert named == hashes[1]


# -- what is refused -------------------------------------------------------------------------------

FOUR = {"src": [0, 1, 2, 3], "dst": [1, 2, 3, 4]}
REFUSED = [
    (FOUR | {"edge_weight": [1.0]}, "edge_weight: has 1 rows, and there are 4 edges; give a row"),
    (FOUR | {"vertex.pos": np.ones(4)}, "must be given for the same number of vertices"),
    (FOUR | {"edge.t": np.ones(9)}, "edge.t: has shape [9], and there are 4 edges; give a row"),
    (FOUR | {"edge.t": list("abcd")}, "edge.t: must hold numbers or booleans, has dtype <U1"),
    (FOUR | {"edge_weight": [1, 2, np.nan, 4]}, "edge.edge_weight[2]: must be finite, found nan"),
    (FOUR | {"pos": np.full((9, 2), np.inf)}, "vertex.pos[0, 0]: must be finite, found inf (18"),
    (FOUR | {"edge_id": np.full(4, 2**63, np.uint64)}, "must be below 2^63, found 92233720368547"),
    (FOUR | {"t": [1] * 4, "edge.t": [1] * 4}, "t: is there as edge.t too; keep one"),
    (
        {"src": [*range(9)], "dst": [1] * 9, "t": [1] * 9},
        "t: has 9 rows, and there are as many vertices as edges; name it vertex.t or edge.t",
    ),
]


@pytest.mark.parametrize("arrays, words", REFUSED)
def test_bad_fields_are_named(tmp_path, arrays, words):
    path = own(tmp_path, **arrays)
    for read in (load, lambda path: convert(path, tmp_path / "folder")):
        with pytest.raises(SpecError) as refused:
            read(path)
        assert f"{path}: " in str(refused.value) and words in str(refused.value)
        assert refused.value.exit_code == 2
    assert not (tmp_path / "folder").exists()


@pytest.mark.parametrize("name", ["edge_attr", "edge_weight", "edge_type"])
def test_a_data_whose_edges_have_too_few_rows_is_refused(name):
    torch = quiet("torch")
    data = {"edge_index": torch.tensor([[0, 1, 2], [1, 2, 3]]), name: torch.ones(2)}
    with pytest.raises(SpecError, match=f"{name}: has 2 rows, and there are 3 edges"):
        pyg.of_mapping(data, "it")


def test_rows_beside_a_stream_of_edges_are_counted(tmp_path):
    """Of more, and of fewer, rows than edges; blocks of both files end anywhere."""
    for rows in (89, 91):
        folder = tmp_path / str(rows)
        folder.mkdir()
        root = ogb_text(folder)
        zipped(root / "raw" / "edge-feat.csv.gz", np.ones((rows, 2)))
        with pytest.raises(
            SpecError, match=rf"edge_attr: has shape \[{rows}, 2\], and there are 90 edges"
        ):
            load(str(root))


def test_blocks_of_two_files_end_anywhere(tmp_path, monkeypatch):
    root = ogb_in_text(tmp_path)
    whole = load(str(root)).stats.hash
    monkeypatch.setattr("gnnplan.planner.graph.formats.text.BLOCK", 64)
    assert load(str(root)).stats.hash == whole


def test_as_many_vertices_as_edges(tmp_path):
    """PyG's own rule for a Data, and it is said."""
    torch, ring = quiet("torch"), np.arange(9)
    ends = torch.from_numpy(np.stack([ring, (ring + 1) % 9]))
    data = {"edge_index": ends, "edge_weight": torch.ones(9), "pos": torch.ones(9, 2)}
    torch.save(data, tmp_path / "d.pt")
    parts = parts_of(str(tmp_path / "d.pt"))
    assert [*parts.edge_fields] == ["edge_weight"] and [*parts.vertex_fields] == ["pos"]
    assert parts.notes == [
        "pos is taken as of vertices, which are as many as edges; fields of edges have edge in"
        " their names"
    ]


def test_of_isolated_vertices_a_position_tells():
    """Edges alone said that there are three vertices."""
    torch = quiet("torch")
    data = {"edge_index": torch.tensor([[0], [2]]), "pos": torch.ones(5, 2)}
    assert built(pyg.of_mapping(data, "it")).stats.vertices == 5


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_columns_whose_names_say_nothing_are_said(tmp_path, ending):
    """Edges were numbers of edges and their sources, unsaid, and their targets a field."""
    (tmp_path / "e.csv").write_text("eid,node1,node2\n0,5,1\n1,1,2\n")
    if ending == "parquet":
        table = quiet("pyarrow.csv").read_csv(tmp_path / "e.csv")
        quiet("pyarrow.parquet").write_table(table, tmp_path / "e.parquet")
    notes = parts_of(str(tmp_path / f"e.{ending}")).notes
    assert notes == ["of 3 columns eid and node1 are taken, and 1 as fields"]


def test_columns_without_names_are_no_fields(tmp_path):
    (tmp_path / "e.txt").write_text("0 1 0.5\n1 2 0.25\n")
    graph = load(str(tmp_path / "e.txt"))
    assert not graph.edge_fields
    assert graph.stats.notes[0] == (
        "of 3 columns the first and the second are taken; columns that a first line names are"
        " fields of edges"
    )
