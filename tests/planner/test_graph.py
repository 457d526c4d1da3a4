"""Graphs: what is normalised, what is made up and said so, what is refused and how; and fields of vertices
and edges, whatever happens to the edges (each format's: test_formats.py)."""

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse as sp
import written
from asked import edges_of
from hypothesis import given, settings
from hypothesis import strategies as st
from nightly import examples
from written import DST, SRC, N, built, matrix, matrix_market, ogb_text, quiet, scipy_csr, zipped

from gnnplan.api.arguments import ask
from gnnplan.planner.graph import generator
from gnnplan.planner.graph import graph as module
from gnnplan.planner.graph.data import MASKS, along
from gnnplan.planner.graph.formats import Extras, convert, libraries, parts_of
from gnnplan.planner.graph.graph import GraphStats, in_neighbours
from gnnplan.planner.graph.load import load
from gnnplan.planner.graph.sampling import hold_out
from gnnplan.planner.strategies.minibatch.adjacency_store import thinned
from gnnplan.planner.vocabulary.errors import SpecError

SMALL = {"src": [0, 1, 1, 3, 2, 2], "dst": [1, 0, 2, 0, 2, 1], "x": np.eye(5, 3, dtype=np.float32)}
SMALL |= {"y": [0, 1, 0, 1, 0], "train_mask": [True, True, False, False, False]}
SMALL |= {"val_mask": [False, False, True, False, False]}
SMALL |= {"test_mask": [False, False, False, True, True]}


@pytest.fixture
def save(tmp_path):
    """save(x=..., y=None) writes SMALL with these changes (None: without the array) -> its path."""

    def write(**changes):
        arrays = {name: np.asarray(a) for name, a in (SMALL | changes).items() if a is not None}
        np.savez(tmp_path / "small.npz", **arrays)
        return str(tmp_path / "small.npz")

    return write


def test_small_graph_becomes_undirected_without_loops(save):
    graph = load(save())
    # vertex 4 is isolated, and that is fine
    assert edges_of(graph) == {(0, 1), (1, 0), (1, 2), (2, 1), (0, 3), (3, 0)}
    assert graph.stats.notes == ("dropped 1 self-loop", "made undirected: 5 -> 6 directed edges")
    assert dataclasses.astuple(graph.stats)[2:8] == (5, 6, 3, 2, 2, False)
    assert graph.degree.tolist() == [2, 2, 1, 1, 0] and not graph.x.flags.writeable
    # and keeps direction where it is asked to: rows have who points at them
    graph = load(save(), directed=True)
    assert edges_of(graph) == {(0, 1), (1, 0), (1, 2), (3, 0), (2, 1)}
    assert "kept directed" in graph.stats.notes


@settings(max_examples=examples(150))
@given(st.integers(1, 12), st.data(), st.booleans())
def test_normalisation_is_what_sets_say(vertices, data, directed):
    ids = st.integers(0, vertices - 1)
    edges = data.draw(st.lists(st.tuples(ids, ids), max_size=60))
    src, dst = np.array(edges, np.int32).reshape(-1, 2).T
    indptr, indices, _ = in_neighbours(src, dst, vertices, directed)
    expected = {(u, v) for u, v in edges if u != v}
    expected |= set() if directed else {(v, u) for u, v in expected}
    rows = np.repeat(np.arange(vertices), np.diff(indptr))
    found = list(zip(rows.tolist(), indices.tolist(), strict=True))
    assert found == sorted((v, u) for u, v in expected)  # sorted rows, no duplicates


REAL = """
squirrel 5201 396706 2089 5
cora 2708 10556 1433 7
citeseer 3327 9104 3703 6
tolokers 11758 1038000 10 2
amazon_photo 7650 238162 745 8
flickr 89250 899756 128 7 stand-ins
soc_slashdot0902 82168 1008460 128 0 stand-ins
"""  # vertices, edges, features, classes


@pytest.mark.parametrize("row", REAL.strip().splitlines())
def test_real_graphs_have_their_published_sizes(dataset, row):
    name, *sizes = row.split()
    stats = load(dataset(name)).stats
    found = (stats.vertices, stats.edges, stats.features, stats.classes)
    assert found == tuple(map(int, sizes[:4]))
    assert any("stand-in" in note for note in stats.notes) == (len(sizes) > 4)


def test_the_hash_is_of_the_content(save):
    same = load(
        save(src=SMALL["src"][::-1], dst=SMALL["dst"][::-1], meta=json.dumps({"vertices": 5}))
    ).stats.hash
    # neither the order of edges nor the file's other words count
    assert load(save()).stats.hash == same
    changed = [{"src": [0, 1, 1, 3, 2, 4]}, {"x": 2 * SMALL["x"]}, {"y": [0, 1, 1, 1, 0]}]
    changed += [{"test_mask": [False] * 5}, {"train_mask": [True, False, False, False, False]}]
    assert len({same, *(load(save(**change)).stats.hash for change in changed)}) == 6
    both = save(src=[0, 1], dst=[1, 0])
    assert load(both).stats.hash != load(both, directed=True).stats.hash


def compressed(x: np.ndarray) -> dict[str, object]:
    """Arrays of a file with compressed rows."""
    csr = sp.csr_matrix(x)
    arrays = {"x_indptr": csr.indptr, "x_indices": csr.indices, "x_data": csr.data}
    return {"x": None, "x_shape": csr.shape, **arrays}


def test_sparse_features_equal_dense_ones(save):
    dense = np.array([[0, 2, 0], [1, 0, 0], [0, 0, 0], [0, 0, 3], [4, 0, 5]], np.float32)
    graph = load(save(**compressed(dense)))
    assert np.array_equal(graph.features(), dense)
    assert np.array_equal(graph.features([3, 0]), dense[[3, 0]])
    assert graph.features([3]).dtype == np.float32
    ones = load(save(**compressed(dense) | {"x_data": None}))
    assert np.array_equal(ones.features(), dense > 0)  # without x_data all stored values are 1


def test_features_are_kept_sparse_by_their_numbers_however_they_come(save):
    """At most a tenth of them: 9 and 10 of 100, then 11, then none."""
    thin = np.zeros((5, 20), np.float32)
    thin[:, :2] = [[1, 2], [3, 4], [5, 6], [7, 8], [9, 0]]
    for graph in (load(save(**compressed(thin))), load(save(x=thin))):
        assert graph.stats.nonzeros == 9
        assert graph.lengths(np.arange(5)).tolist() == [2, 2, 2, 2, 1]
        assert np.array_equal(graph.features(), thin)
    thin[4, :3] = [9, 9, 0]
    assert load(save(x=thin)).stats.nonzeros == 10
    thin[4, 2] = 9
    for graph in (load(save(x=thin)), load(save(**compressed(thin)))):
        assert graph.stats.nonzeros == 0 and isinstance(graph.x, np.ndarray)
        assert graph.lengths(np.arange(2)).tolist() == [20, 20]
        assert np.array_equal(graph.features(), thin)
    assert load(save(x=0 * thin)).stats.nonzeros == 0  # none at all: nothing to multiply


def test_stand_in_features_are_declared_seeded_and_blind_to_labels(save):
    graph = load(save(x=None))
    assert graph.x.shape == (5, 128) and any("stand-in" in note for note in graph.stats.notes)
    assert np.array_equal(graph.x, load(save(x=None, y=[1, 0, 1, 0, 1])).x)
    wide = load(save(x=None) + "?features=7&seed=3")
    assert wide.x.shape == (5, 7) and wide.stats.features == 7
    assert not np.array_equal(wide.x, load(save(x=None) + "?features=7&seed=4").x)
    with pytest.raises(SpecError, match="the file has its own"):
        load(save() + "?features=7")
    # the last column is the degree's
    assert np.corrcoef(wide.x[:, -1], np.log1p(wide.degree))[0, 1] == pytest.approx(1)


def test_without_labels_it_can_be_planned(save):
    """With none, `trim` left all rows out: a plan took 3 % of the time it would with labels."""
    graph = load(save(y=None, **dict.fromkeys(MASKS)))
    assert (graph.stats.classes, graph.stats.train_vertices) == (0, 3)
    assert any("no labels" in note for note in graph.stats.notes)
    with pytest.raises(SpecError, match="marks no vertex"):
        load(save(y=None, train_mask=[False] * 5))


def test_labels_without_masks_get_a_declared_split(save):
    graph = load(save(y=[0, 1, 0, -1, 1], **dict.fromkeys(MASKS)))
    # of the four with a label
    assert [int(mask.sum()) for mask in (graph.train, graph.val, graph.test)] == [2, 1, 1]
    assert not (graph.train | graph.val | graph.test)[3]
    assert any("random 60/20/20" in note for note in graph.stats.notes)


@pytest.fixture
def save_folder(tmp_path):
    """As save, but a folder of .npy files; another call writes over it."""

    def write(**changes):
        folder = tmp_path / "small"
        folder.mkdir(exist_ok=True)
        for file in folder.iterdir():
            file.unlink()
        for name, array in (SMALL | changes).items():
            if array is not None:
                np.save(folder / f"{name}.npy", array)
        return str(folder)

    return write


def test_a_folders_sparse_or_missing_features_are_as_those_of_an_npz(save, save_folder):
    sparse = {"x": None, "x_indptr": [0, 1, 1, 2, 2, 2], "x_indices": [3, 9], "x_shape": [5, 40]}
    for changes in (sparse, {"x": None}):
        read, mapped = load(save(**changes)), load(save_folder(**changes))
        assert mapped.stats == dataclasses.replace(read.stats, source=mapped.stats.source)
        assert sp.issparse(mapped.x) == sp.issparse(read.x)


def test_mapped_features_are_looked_at_once_for_each_file(save_folder, own_cache, monkeypatch):
    path = save_folder()
    first = load(path)
    looked, pieces = [], module.some_rows

    def watched(array):
        looked.append(isinstance(array, np.memmap))
        return pieces(array)

    monkeypatch.setattr(module, "some_rows", watched)
    assert load(path).stats == first.stats and not any(looked)
    # another graph on the same features
    assert load(path, directed=True).stats.hash != first.stats.hash and any(looked)
    (known,) = (f for f in own_cache.glob("features/*.json") if first.stats.hash in f.read_text())
    for rubbish in ("", "rubbish", "[]", '{"key": 1}'):
        known.write_text(rubbish)
        assert load(path).stats == first.stats
    x = SMALL["x"].copy()
    x[4, 2] = 7
    assert load(save_folder(x=x)).stats.hash != first.stats.hash


def test_mapped_features_stay_dense_and_it_is_said(save_folder, monkeypatch):
    graph = load(save_folder(x=np.eye(5, 40, dtype=np.float32)))
    assert isinstance(graph.x, np.memmap) and graph.stats.nonzeros == 0
    said = "x.npy is mapped, so it stays dense, though only 5 numbers are not zero"
    assert said in graph.stats.notes[-1]
    # and beyond memory all the same
    monkeypatch.setattr(module, "LARGEST_ARRAY", 2_000)
    assert load(save_folder(x=np.ones((5, 1_000), np.float32))).x.nbytes == 20_000


MUST = "x: is mapped, not read, so it must be float32 or float64 .vertices, features. in C order, "


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"x": np.eye(5, 3, dtype=int)}, MUST + "is int64 of shape .5, 3.; save numpy.ascontig"),
        (
            {"x": np.asfortranarray(SMALL["x"])},
            MUST + "is float32 of shape .5, 3. in Fortran order",
        ),
        ({"x": np.ones(5, np.float32)}, MUST + "is float32 of shape .5,."),
        ({"x": np.full((5, 5), np.nan, np.float32)}, r"x\[0, 0\]: .*finite, found nan"),
        ({"y": np.array([None] * 5)}, "pickled"),
    ],
)
def test_bad_folders_are_named(save_folder, changes, words):
    with pytest.raises(SpecError, match=words) as error:
        load(save_folder(**changes))
    assert str(error.value).count("small") >= 1


def test_a_damaged_folder_is_named(save_folder):
    path = Path(save_folder()) / "x.npy"
    for damaged, words in (
        (path.read_bytes()[:-4], "needs 60 B but only 56 B are stored; the file is damaged"),
        (path.read_bytes() + bytes(4), "needs 60 B but 64 B are stored; the file is damaged"),
        (b"", "cannot be read"),
    ):
        path.write_bytes(damaged)
        with pytest.raises(SpecError, match=words):
            load(str(path.parent))


def test_a_folder_with_one_graph_in_it_is_told_to_give_that(save):
    """As the folder into which OGB or PyG downloads."""
    folder = Path(save()).parent
    (folder / "read.me").write_text("not a graph")
    with pytest.raises(SpecError, match=r"holds read.me, small.npz; .* give .*/small.npz"):
        load(str(folder))
    (folder / "small.npz").rename(folder / "one.npz")
    shutil.copy(folder / "one.npz", folder / "two.npz")
    with pytest.raises(SpecError, match=r"no format that is read; .* write the graph as one of"):
        load(str(folder))


NAN = np.where(np.eye(5, 3) > 0, np.nan, 0)
CSR = {"x": None, "x_indptr": [0, 1, 1, 1, 1, 1], "x_indices": [0], "x_shape": [5, 3]}
EDGES_ALONE = dict.fromkeys(SMALL) | {"src": [0], "dst": [1]}


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"src": None}, "small.npz: src: missing; an edge list"),
        ({"src": [0, 1]}, "src, dst: must have the same length, have 2 and 6"),
        ({"src": [0, 1, 1, 3, 2, 5]}, r"src\[5\]: .* must lie in \[0, 4\], found 5 \(1 such edges"),
        ({"dst": [-1, 0, 2, 0, 2, 1]}, r"dst\[0\]: vertex ids must lie in \[0, 4\], found -1"),
        ({"src": np.array([0, 1, 1, 3, 2, 2**64 - 1], np.uint64)}, "found 18446744073709551615"),
        ({"src": [0.0, 1, 1, 3, 2, 2]}, "src: must hold integers, has dtype float64"),
        ({"src": [[0, 1, 1, 3, 2, 2]]}, r"src: must have 1 dimension\(s\), has shape \(1, 6\)"),
        ({"x": np.eye(4, 3)}, "for the same number of vertices, are for 4, 5, 5, 5, 5"),
        ({"x": NAN}, r"x\[0, 0\]: features must be finite, found nan \(3 .*nan_to_num"),
        ({"x": np.full((5, 3), np.longdouble("1e400"))}, "features must be finite, found inf"),
        ({"x": np.zeros((5, 0))}, "x: must have 1 to"),
        ({"x": np.full((5, 3), "a")}, "x: must hold"),
        ({"x_indptr": np.zeros(6, int)}, "given twice, dense and sparse"),
        ({"x": None, "x_indptr": np.zeros(6, int)}, "x_indices: missing"),
        (CSR | {"x_indptr": np.zeros(6, int)}, r"x_indptr: must rise from 0 to len\(x_indices\)"),
        (CSR | {"x_indices": [3]}, r"cannot be read as a CSR .*must be < 3"),
        (CSR | {"x_shape": [5, 2**40]}, r"x_shape: must be \[5, features\] with 1 to"),
        (CSR | {"x_data": [np.inf]}, r"x_data\[0\]: features must"),
        ({"y": [0, 1, 0, -2, 0]}, r"y\[3\]: labels must be class ids .* found -2"),
        ({"y": [-1, 1, 0, 1, 0]}, r"y\[0\]: a training vertex needs a label, found none"),
        (
            {"y": [0, 1, 0, 1, 99]},
            r"y\[4\]: .*highest is 99 and only 3(?s:.*)if 99 marks no label, write -1",
        ),
        ({"y": [0, 1, 0, 1, 2], "meta": '{"classes": 2}'}, r"y\[4\]: .* ids 0 to 1 .* found 2"),
        ({"y": [2.0**60, 1, 0, 1, 0]}, r"y\[0\]: labels must be whole class ids .* 1\.15"),
        ({"y": [0.5, 1, 0, np.inf, 0]}, r"y\[3, 0\]: numbers to predict must be finite"),
        ({"y": [0.5, 1, 0, -1e39, 0]}, r"y\[3, 0\]: .* found -1e\+39; scale them"),
        ({"y": np.full((5, 2), 1e39)}, r"found \[1e\+39\]; .* for numbers to predict, use --task"),
        (
            {"y": NAN},
            r"y\[0, 0\]: multi-label targets \[N, C\] must lie in \[0, 1\], found \[nan(?s:.*)-1 for all",
        ),
        ({"y": [[-1, -1], *[[0, 1]] * 4]}, r"y\[0\]: a training vertex needs a label, found none"),
        ({"y": [[0, 0], [3, 3], [2, 2], [1, 1], [0, 0]]}, r"y\[1, 0\]: .* found \[3\]; save 0 or"),
        (
            {"src": None, "dst": None, "node_feat": np.eye(5)},
            r"edge_index .* found node_feat, .*x, y$",
        ),
        ({"train_mask": [False] * 5}, "train_mask: marks no vertex"),
        ({"train_mask": [0, 1, 2, 0, 0]}, r"train_mask\[2\]: must hold booleans, .* found 2"),
        ({"test_mask": SMALL["train_mask"]}, r"train_mask, test_mask: .*share 2 vertices"),
        ({"meta": "{"}, "meta: not JSON"),
        ({"meta": "[1]"}, "meta: must be a mapping of fields; give some of vertices, classes"),
        (
            {"meta": json.dumps({"vertices": -5})},
            "meta.vertices: must be greater than or equal to 0, not -5",
        ),
        ({"x": [[1, None]]}, "x: holds pickled Python objects, which are never loaded"),
        (EDGES_ALONE | {"src": [], "dst": []}, r"the graph is empty \(0 vertices\)"),
        (
            EDGES_ALONE | {"meta": '{"vertices": 1000000000000}'},
            "meta.vertices: must be less than or equal to 2147483647",
        ),
        (EDGES_ALONE | {"dst": [2**31 - 2]}, "vertices .* with 128 stand-in features would take"),
    ],
)
def test_bad_arrays_are_named(save, changes, words):
    with pytest.raises(SpecError, match=words) as error:
        load(save(**changes))
    assert "small.npz" in str(error.value)


def test_edge_index_of_pyg_is_read_as_both_ends(save, save_folder):
    """A PyG user saved `edge_index`, `x` and `y`, and was told to save its rows apart."""
    no_edges = {"src": None, "dst": None, "val_mask": None, "test_mask": None}
    edge_index = np.array([SMALL["src"], SMALL["dst"]])
    for write in (save, save_folder):
        expected = load(write(val_mask=None, test_mask=None)).stats.hash
        assert load(write(**no_edges, edge_index=edge_index)).stats.hash == expected
    with pytest.raises(SpecError, match=r"edge_index: must have shape .* save edge_index\.T"):
        load(save(**no_edges, edge_index=edge_index.T))


def test_features_labels_and_splits_have_the_names_of_other_libraries_too(save, save_folder):
    """`features`, `labels` and `train_idx` were left, and stand-ins were trained on."""
    renamed = {"features": SMALL["x"], "label": SMALL["y"], "x": None, "y": None}
    for part in ("train", "val", "test"):
        renamed |= {f"{part}_idx": np.flatnonzero(SMALL[f"{part}_mask"]), f"{part}_mask": None}
    for write in (save, save_folder):
        expected = load(write())
        found = load(write(**renamed))
        of_ogb = {"node_feat": SMALL["x"], "node_label": SMALL["y"], "x": None, "y": None}
        assert load(write(**of_ogb)).stats.hash == expected.stats.hash
        assert (found.stats.hash, found.stats.notes) == (expected.stats.hash, expected.stats.notes)
    own = load(save(features=SMALL["x"] + 1))  # a field beside features of ours
    np.testing.assert_array_equal(own.x, load(save()).x)
    assert [*own.vertex_fields] == ["features"]
    assert load(save(x=None, y=None, **dict.fromkeys(MASKS), num_nodes=7)).stats.vertices == 7
    with pytest.raises(SpecError, match=r"num_nodes: must be a whole number"):
        load(save(num_nodes=[3, 4]))
    with pytest.raises(SpecError, match=r"train_idx: .* ids of 1 vertices; write each once"):
        load(save(train_mask=None, train_idx=np.zeros(3, int)))


def test_the_default_graph():
    graph = load("synthetic:community")
    stats = graph.stats
    assert (stats.vertices, stats.edges, stats.features) == (20_000, 1_000_000, 128)
    assert (stats.classes, stats.train_vertices) == (16, 12_000)
    both = graph.adjacency
    assert (both != both.T).nnz == 0 and both.diagonal().sum() == 0
    degree = np.sort(graph.degree)
    assert degree[-200:].sum() > 5 * degree[:200].sum() and degree[-1] > 5 * degree.mean()  # skewed
    assert int(graph.train.sum() + graph.val.sum() + graph.test.sum()) == 20_000


def nearest_mean_accuracy(graph, x):
    """Of a classifier that knows the class means of the training vertices, on the test vertices."""
    means = np.stack([x[graph.train & (graph.y == c)].mean(axis=0) for c in np.unique(graph.y)])
    scores = x @ means.T - (means**2).sum(axis=1) / 2
    return float((scores.argmax(axis=1) == graph.y)[graph.test].mean())


def test_labels_can_be_learnt_better_from_neighbours():
    graph = load("synthetic:community?vertices=4000&edges=80000&features=32&classes=8")
    alone = nearest_mean_accuracy(graph, graph.x)
    mean = graph.adjacency.astype(np.float32) @ graph.x / np.maximum(graph.degree, 1)[:, None]
    assert 2 / 8 < alone < 0.8 < nearest_mean_accuracy(graph, mean) < 0.99


@settings(max_examples=examples(60))
@given(st.integers(2, 60), st.floats(0, 1), st.integers(1, 5), st.integers(0, 3), st.floats(0, 1))
def test_generated_graphs_have_the_edges_asked_for(vertices, density, classes, seed, mixing):
    edges = int(density * vertices * (vertices - 1))
    source = f"synthetic:community?vertices={vertices}&edges={edges}&seed={seed}&features=4"
    source += f"&classes={min(classes, vertices)}&mixing={mixing:.3f}"
    graph = load(source)
    assert graph.stats.edges == edges // 2 * 2
    assert (graph.adjacency != graph.adjacency.T).nnz == 0
    assert graph.stats.hash == load(source).stats.hash


@pytest.mark.parametrize(
    "query, words",
    [
        ("vertices=ten", "vertices: must be a whole number, as 2, not 'ten'"),
        ("vertices=6_0", "vertices: must be a number in the digits 0 to 9, as 2, not '6_0'"),
        ("vertices=1", "vertices: must be greater than or equal to 2, not 1"),
        ("vertexes=5", "vertexes: unknown field; did you mean vertices"),
        ("seed=1&seed=2", "given twice"),
        ("seed", "name=value"),
        ("vertices=10&edges=100&classes=2", "edges must be at most .* = 90, got 100"),
        ("mixing=nan", "mixing: must be less than or equal to 1, not nan"),
        ("vertices=10&edges=10", "needs classes <= communities <= vertices, got 16, 16, 10"),
        ("edges=1e6", "edges: must be a whole number"),
        ("vertices=100000000&features=100000", "more than"),
        ("a=0.6&b=0.4&c=0.3", r"a \+ b \+ c must be at most 1, are 1.3; lower one"),
    ],
)
def test_bad_parameters_are_named(query, words):
    with pytest.raises(SpecError, match=words):
        load(f"synthetic:{'rmat' if query.startswith('a=') else 'community'}?{query}")


RMAT = "synthetic:rmat?vertices=3000&edges=40000&features=4&classes=4&seed=1"


def test_an_rmat_graph_is_the_same_loaded_converted_and_drawn_on_any_cores(tmp_path, monkeypatch):
    monkeypatch.setattr(generator, "DRAWN_AT_ONCE", 700)
    graph = load(RMAT)
    assert convert(RMAT, tmp_path / "g")[:2] == (3000, 20_000)
    monkeypatch.setattr("os.cpu_count", lambda: 7)
    again, written = load(RMAT), load(str(tmp_path / "g"))
    assert graph.stats.hash == again.stats.hash == written.stats.hash
    assert graph.stats.hash != load(RMAT.replace("seed=1", "seed=2")).stats.hash


def test_a_quarter_of_the_matrix_has_the_share_of_edges_that_rmat_gives_it():
    asked = generator.RMat(edges=400_000, a=0.5, b=0.25, c=0.15)
    src, dst = np.concatenate(list(generator._cells(asked, np.arange(1000))), axis=1) >= 500
    found = [(src == row) & (dst == column) for row in (False, True) for column in (False, True)]
    assert np.mean(found, axis=1) == pytest.approx([0.5, 0.25, 0.15, 0.1], abs=0.004)


def test_statistics(tmp_path):
    path = tmp_path / "reddit.yaml"
    sizes = "vertices: 232965\nedges: 114615892\nfeatures: 602\nclasses: 41\n"
    path.write_text(sizes + "train_fraction: 0.66\nhalo_rows: {2: 1000, 8: 5000}\n")
    stats = load(str(path))
    assert isinstance(stats, GraphStats) and not stats.known and stats.name == "reddit"
    assert (stats.vertices, stats.train_vertices) == (232_965, 153_757)
    assert dict(stats.halo_rows) == {2: 1000, 8: 5000}


@pytest.mark.parametrize(
    "line, words",
    [
        ("nodes: 5", r"g.yaml:5: nodes: unknown field; .*llowed: vertices"),
        ("halo_rows: {2: x}", r"g.yaml:5: halo_rows.2: must be a whole number, as 2, not 'x'"),
        ("halo_rows: 3", r"g.yaml:5: halo_rows: must be a mapping \(key: value\), not 3"),
        ("train_fraction: 60", "g.yaml:5: train_fraction: must be less than or equal to 1, not 60"),
        ("vertices: 3", "g.yaml:5: vertices: given"),
        ("halo_rows: {2: 101}", r"must be a whole number in \[0, 100\], got 101"),
        ("multilabel: 2", "g.yaml:5: multilabel: must be true or false, not 2"),
        (
            "as_directed: {edgez: 1}",
            "g.yaml:5: as_directed.edgez.*: must be 'edges', .*not 'edgez'",
        ),
    ],
)
def test_bad_statistics_are_named(tmp_path, line, words):
    path = tmp_path / "g.yaml"
    path.write_text(f"vertices: 100\nedges: 500\nfeatures: 10\nclasses: 2\n{line}\n")
    with pytest.raises(SpecError, match=words):
        load(str(path))


def test_a_loss_of_numbers_says_that_labels_are_numbers(tmp_path):
    """Whole numbers with gaps are refused as classes, and the error says how to ask."""
    y = np.array([1999, 2003, 2010, -1])
    np.savez(tmp_path / "g.npz", src=[0, 1, 2], dst=[1, 2, 3], y=y)
    path = str(tmp_path / "g.npz")
    with pytest.raises(SpecError, match="for numbers to predict, use --task regression"):
        ask(path, "local", None)
    for fields, more in (
        ({"loss": "mse"}, {}),
        ({}, {"task": "regression"}),
        ({}, {"overrides": ["loss=mae"]}),
        ({}, {"overrides": {"loss": "mse"}, "task": "regression"}),
    ):
        problem = ask(path, "local", None, **fields, **more).problem
        assert problem.graph.y[:, 0].tolist() == y.tolist() and problem.metric == "mae"
        assert problem.model.classes == 1
    data = pytest.importorskip("torch_geometric.data")
    torch = pytest.importorskip("torch")
    edges = torch.tensor([[0, 1, 2], [1, 2, 3]])
    found = ask(data.Data(edge_index=edges, y=torch.tensor(y)), "local", None, task="regression")
    assert found.problem.graph.y[:, 0].tolist() == y.tolist()
    with pytest.raises(SpecError, match=r"the Data: y.*to predict, use --task regression"):
        ask(data.Data(edge_index=edges, y=torch.tensor(y)), "local", None)
    convert(path, tmp_path / "folder", Extras(numbers=True))
    assert load(f"{tmp_path / 'folder'}?task=regression").y[:, 0].tolist() == y.tolist()


@pytest.mark.parametrize("make", [scipy_csr, matrix_market])
def test_a_matrix_of_ones_has_no_weights(tmp_path, make, monkeypatch):
    monkeypatch.setattr(written, "matrix", lambda: matrix(np.ones(90)))
    assert "edge_weight" not in load(str(make(tmp_path)), directed=True).edge_fields


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
    apart = load(own(tmp_path, **edges, edge_attr=[[1, 2], [1, 2], [3, 4], [1, 9]]), directed=True)
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
    assert load(own(tmp_path, **edges, **{"edge.edge_weight": [1.0, 2.0]})).stats.hash == hashes[1]


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
