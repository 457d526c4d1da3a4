"""Fields of vertices and edges, whatever happens to the edges (each format's: test_formats.py)."""

import json
from pathlib import Path

import numpy as np
import pytest
import written
from hypothesis import given
from hypothesis import strategies as st
from written import DST, SRC, N, built, matrix, matrix_market, ogb_text, quiet, scipy_csr, zipped

from gnnplan.planner.graph.data import along
from gnnplan.planner.graph.formats import convert, libraries, parts_of
from gnnplan.planner.graph.graph import in_neighbours
from gnnplan.planner.graph.load import load
from gnnplan.planner.graph.sampling import hold_out
from gnnplan.planner.strategies.minibatch.adjacency_store import thinned
from gnnplan.planner.vocabulary.errors import SpecError


@pytest.mark.parametrize("make", [scipy_csr, matrix_market])
def test_a_matrix_of_ones_has_no_weights(tmp_path, make, monkeypatch):
    monkeypatch.setattr(written, "matrix", lambda: matrix(np.ones(90)))
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
        "dropped edge_weight of 1 self-loop with them",
        "1 edges are given in one direction only; their reverse edges have the same edge_weight",
        "2 edges are given in both directions with different values of edge_weight, and keep them",
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
    said = (
        "left edge_attr out: 1 edges are given again with different values, first 0 -> 1 with"
        " [1, 2] and [1, 9]; merge them to have it"
        " (torch_geometric.utils.coalesce, dgl.to_simple)"
    )
    assert not apart.edge_fields and said in apart.stats.notes


def test_fewer_edges_keep_their_rows(tmp_path):
    src, dst = np.random.default_rng(1).integers(0, 9, (2, 60))
    graph = load(own(tmp_path, src=src, dst=dst, edge_key=10 * src + dst), directed=True)
    left = hold_out(graph)
    assert 0 < left.indices.size < graph.indices.size
    for fewer in (graph, left, thinned(graph, np.arange(9) % 2 == 0)):
        readers = np.repeat(np.arange(9), fewer.degree)
        assert np.array_equal(fewer.edge_fields["edge_key"], 10 * fewer.indices + readers)
        assert fewer.csr_edges.fields is fewer.edge_fields


def test_the_hash_knows_fields_and_their_names(tmp_path):
    edges = {"src": [0, 1], "dst": [1, 2]}
    some = [{}, {"edge_weight": [1.0, 2.0]}, {"edge_weight": [1.0, 3.0]}, {"edge_attr": [1.0, 2.0]}]
    some += [{"pos": np.ones(9)}, {"vertex.pos": np.zeros(9)}, {"vertex.edge_weight": np.ones(9)}]
    hashes = [load(own(tmp_path, **edges, **fields)).stats.hash for fields in some]
    assert len(set(hashes)) == len(some)
    named = load(own(tmp_path, **edges, **{"edge.edge_weight": [1.0, 2.0]})).stats.hash
    assert named == hashes[1]


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
        libraries.of_mapping(data, "it")


@pytest.mark.parametrize("rows", [89, 91])
def test_rows_beside_a_stream_of_edges_are_counted(tmp_path, rows, monkeypatch):
    """Of fewer, and of more, rows than edges; blocks of both files end anywhere."""
    root = ogb_text(tmp_path)
    whole = load(str(root)).stats.hash
    monkeypatch.setattr("gnnplan.planner.graph.formats.tables.BLOCK", 64)
    assert load(str(root)).stats.hash == whole
    zipped(root / "raw" / "edge-feat.csv.gz", np.ones((rows, 2)))
    with pytest.raises(SpecError, match=rf"edge_attr: has shape \[{rows}, 2\], and there are 90"):
        load(str(root))


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
    assert built(libraries.of_mapping(data, "it")).stats.vertices == 5


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
