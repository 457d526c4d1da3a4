"""Data is read as it is meant, and alike in every format: masks, ids, labels, features, edges."""

import json
from pathlib import Path

import networkx as nx
import numpy as np
import pytest
import scipy.sparse as sp
from written import from_object, quiet

import gnnplan
from gnnplan.planner.gnn.workload import Module, ModuleLayer, Workload
from gnnplan.planner.graph import arrays as own_arrays
from gnnplan.planner.graph import graph as module
from gnnplan.planner.graph.data import read_labels
from gnnplan.planner.graph.formats import Extras, convert, of_object, tables
from gnnplan.planner.graph.graph import Graph
from gnnplan.planner.graph.load import load, source_of
from gnnplan.planner.ownership.parts import write_parts
from gnnplan.planner.problem.inputs import read_cluster
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.vocabulary.errors import SpecError

N = 20
RNG = np.random.default_rng(0)
SRC, DST = RNG.integers(0, N, (2, 60))
X = RNG.normal(size=(N, 4)).astype(np.float32)
Y = np.arange(N) % 2
TRAIN = np.arange(N) < 9
VAL = np.arange(N) >= 15
HOLDS = {"src": SRC, "dst": DST, "x": X, "y": Y, "train_mask": TRAIN}


def as_npz(folder: Path, arrays: dict) -> Graph:
    np.savez(folder / "g.npz", **arrays)
    return load(str(folder / "g.npz"))


def as_folder(folder: Path, arrays: dict) -> Graph:
    (folder / "g").mkdir()
    for name, array in arrays.items():
        np.save(folder / "g" / f"{name}.npy", array)
    return load(str(folder / "g"))


def tensors(arrays: dict) -> dict:
    torch = quiet("torch")
    held = {name: torch.from_numpy(np.array(array)) for name, array in arrays.items()}
    return held | {"edge_index": torch.stack([held.pop("src"), held.pop("dst")])}


def as_pt(folder: Path, arrays: dict) -> Graph:
    quiet("torch").save(tensors(arrays), folder / "g.pt")
    return load(str(folder / "g.pt"))


def as_dgl(folder: Path, arrays: dict) -> Graph:
    dgl = quiet("dgl")
    held = tensors(arrays)
    graph = dgl.graph(tuple(held.pop("edge_index")), num_nodes=N)
    graph.ndata.update({{"x": "feat", "y": "label"}.get(k, k): v for k, v in held.items()})
    return from_object(graph)


def as_converted(folder: Path, arrays: dict) -> Graph:
    np.savez(folder / "g.npz", **arrays)
    convert(str(folder / "g.npz"), folder / "g")
    return load(str(folder / "g"))


def edges_csv(folder: Path, src: np.ndarray = SRC, dst: np.ndarray = DST) -> str:
    lines = "".join(f"{a},{b}\n" for a, b in zip(src, dst, strict=True))
    (folder / "edges.csv").write_text("src,dst\n" + lines)
    return str(folder / "edges.csv")


def as_text(folder: Path, arrays: dict) -> Graph:
    """Edges, features and labels in text, masks in a .npz."""
    for name in ("x", "y"):
        np.savetxt(folder / f"{name}.csv", arrays[name], "%.17g", ",")
    np.savez(folder / "split.npz", **{k: v for k, v in arrays.items() if k.endswith("mask")})
    files = (str(folder / name) for name in ("x.csv", "y.csv", "split.npz"))
    return load(source_of(edges_csv(folder, arrays["src"], arrays["dst"]), *files))


ALIKE = [as_npz, as_folder, as_pt, as_dgl, as_converted, as_text]
every_format = pytest.mark.parametrize("written", ALIKE)


@every_format
@pytest.mark.parametrize("y", [Y[:, None], Y[:, None].astype("f4"), np.where(TRAIN, Y, np.nan)])
def test_columns_and_floats_are_class_ids_and_nan_is_none(tmp_path, written, y):
    graph = written(tmp_path, HOLDS | {"y": y})
    assert (graph.stats.classes, graph.stats.multilabel) == (2, False)
    expected = np.where(TRAIN, Y, -1) if np.isnan(y).any() else Y
    assert graph.y.dtype == np.int64 and np.array_equal(graph.y, expected)


@every_format
@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.int64])
def test_zeros_and_ones_are_masks(tmp_path, written, dtype):
    graph = written(tmp_path, HOLDS | {"train_mask": TRAIN.astype(dtype), "val_mask": VAL * 1})
    assert np.array_equal(graph.train, TRAIN) and np.array_equal(graph.val, VAL)


@pytest.mark.parametrize("written", ALIKE[:-1])
def test_of_several_splits_the_first_is_taken(tmp_path, written):
    graph = written(tmp_path, HOLDS | {"train_mask": np.stack([TRAIN, ~TRAIN], 1)})
    assert np.array_equal(graph.train, TRAIN)
    assert graph.stats.notes.count("train_mask holds 2 splits; the first is taken") == 1


@pytest.mark.parametrize("written", ALIKE[:-1])  # a split beside an edge list needs train
def test_masks_are_kept_where_train_is_missing(tmp_path, written):
    test = (np.arange(N) >= 12) & ~VAL
    held = {name: HOLDS[name] for name in ("src", "dst", "x")}
    graph = written(tmp_path, held | {"val_mask": VAL, "test_mask": test, "y": np.r_[-1, Y[1:]]})
    assert np.array_equal(graph.val, VAL) and np.array_equal(graph.test, test)
    assert np.flatnonzero(graph.train).tolist() == list(range(1, 12))
    assert any("11 vertices are trained on, all with a label" in n for n in graph.stats.notes)


@every_format
def test_a_graph_without_edges_is_a_graph(tmp_path, written):
    none = np.zeros(0, np.int64)
    graph = written(tmp_path, HOLDS | {"src": none, "dst": none})
    assert (graph.stats.vertices, graph.stats.edges) == (N, 0)
    assert "the graph has no edges" in graph.stats.notes


@pytest.mark.parametrize("empty", [nx.empty_graph(4), sp.csr_matrix((4, 4)), sp.coo_array((4, 4))])
def test_objects_without_edges_are_graphs(empty):
    assert (from_object(empty).stats.vertices, from_object(empty).stats.edges) == (4, 0)


def test_an_empty_tensor_or_array_has_no_type(tmp_path):
    graph = as_npz(tmp_path, {"src": np.array([]), "dst": np.array([]), "y": [0, 1, 0]})
    assert graph.stats.edges == 0
    torch = quiet("torch")
    torch.save({"edge_index": torch.tensor([[], []]), "x": torch.ones(3, 2)}, tmp_path / "g.pt")
    assert load(str(tmp_path / "g.pt")).stats.edges == 0


def test_a_graph_without_edges_is_planned(tmp_path):
    as_npz(tmp_path, HOLDS | {"src": [], "dst": []})
    for strategy in ("graph_parallel", "feature_parallel"):
        plan = gnnplan.plan(str(tmp_path / "g.npz"), strategy=strategy, ranks=2)
        assert plan.best.strategy.startswith(strategy)


@pytest.mark.parametrize(
    ("written", "marker"),
    [*((form, -100) for form in ALIKE), *((as_npz, n) for n in (255, -2, 65535, 2**31 - 1))],
)
def test_a_marker_of_no_label_is_told_to_become_minus_one(tmp_path, written, marker):
    y = np.where(TRAIN, np.arange(N) % 3, marker)
    with pytest.raises(SpecError, match=rf"found {marker}|highest is {marker:,}") as error:
        written(tmp_path, HOLDS | {"y": y})
    assert "write -1 for no label" in str(error.value) and "unique" not in str(error.value)
    assert f"y[y == {marker}] = -1" in str(error.value)


def test_255_among_many_classes_is_a_marker_unless_254_is_there_or_meta_says_so(tmp_path):
    ids = np.arange(400)
    held = {"src": [0], "dst": [1], "train_mask": ids < 9}
    with pytest.raises(SpecError, match=r"highest is 255 .*; write -1"):
        as_npz(tmp_path, held | {"y": np.where(ids < 300, ids % 150, 255).astype(np.uint8)})
    whole = as_npz(tmp_path, held | {"y": (ids % 256).astype(np.uint8)})
    said = as_npz(tmp_path, held | {"y": [255] * 400, "meta": json.dumps({"classes": 300})})
    assert (whole.stats.classes, said.stats.classes) == (256, 300)


TARGETS = np.eye(N, 3, dtype=int)


@every_format
@pytest.mark.parametrize("none", [np.nan, -1])
def test_missing_multi_labels_are_as_missing_labels(tmp_path, written, none):
    held = HOLDS | {"val_mask": ~TRAIN}
    graph = written(tmp_path, held | {"y": np.where(TRAIN[:, None], TARGETS * 1, none)})
    assert graph.stats.multilabel and graph.y.dtype == np.uint8
    assert np.array_equal(graph.y, np.where(TRAIN[:, None], TARGETS, 0))
    assert "took 11 vertices without label out of val_mask" in graph.stats.notes


def saint(folder: Path, labels: dict) -> str:
    sp.save_npz(folder / "adj_full.npz", sp.csr_matrix((np.ones(len(SRC)), (SRC, DST)), (N, N)))
    (folder / "class_map.json").write_text(json.dumps(labels))
    roles = {"tr": list(range(9)), "va": list(range(9, N)), "te": []}
    (folder / "role.json").write_text(json.dumps(roles))
    return str(folder)


@pytest.mark.parametrize("of", [lambda v: v % 2, lambda v: [v % 2, 1], lambda v: [v % 2]])
def test_a_class_map_that_lacks_a_vertex_lacks_its_label(tmp_path, of):
    graph = load(saint(tmp_path, {str(v): of(v) for v in range(12)}))
    assert "took 8 vertices without label out of val_mask" in graph.stats.notes
    with pytest.raises(SpecError, match=r"y\[0\]: a training vertex needs a label"):
        load(saint(tmp_path, {str(v): of(v) for v in range(1, N)}))


def test_networkx_nodes_may_lack_multi_labels():
    graph = nx.path_graph(4)
    for v in range(3):
        graph.nodes[v].update(y=[v % 2, 1])
    assert from_object(graph).y.tolist() == [[0, 1], [1, 1], [0, 1], [0, 0]]
    assert not (from_object(graph).train | from_object(graph).val | from_object(graph).test)[3]


def test_a_file_beside_the_edges_is_named(tmp_path):
    np.save(tmp_path / "labels.npy", np.where(TRAIN, Y, 255))
    np.save(tmp_path / "features.npy", np.where(TRAIN, 1.0, np.inf)[:, None])
    for given, words in (("labels", r"labels\.npy: y\[9\]"), ("features", r"\.npy: x\[9, 0\]")):
        with pytest.raises(SpecError, match=words):
            load(source_of(edges_csv(tmp_path), **{given: str(tmp_path / f"{given}.npy")}))


def split(folder: Path, **lists: np.ndarray) -> Graph:
    np.save(folder / "y.npy", Y)
    np.savez(folder / "split.npz", **lists)
    source = source_of(edges_csv(folder), None, str(folder / "y.npy"), str(folder / "split.npz"))
    return load(source)


@pytest.mark.parametrize("dtype", [bool, np.uint8, np.int8, np.int64, np.float32])
@pytest.mark.parametrize("shape", [(N,), (N, 1)])
def test_a_split_of_zeros_and_ones_is_masks(tmp_path, dtype, shape):
    graph = split(tmp_path, train=TRAIN.astype(dtype).reshape(shape), val=~TRAIN, test=0 * TRAIN)
    assert np.array_equal(graph.train, TRAIN) and np.array_equal(graph.val, ~TRAIN)
    assert not graph.test.any()


@pytest.mark.parametrize("kind", ["csv", "json", "pt"])
def test_masks_and_ids_in_other_files(tmp_path, kind):
    """The column of a 0/1 table, and lists of a .json, were lists of the ids 0 and 1."""
    val = [9, 1 + 9]
    if kind == "csv":
        path = tmp_path / "split"
        path.mkdir()
        np.savetxt(path / "train.csv", TRAIN)  # in NumPy's own format, 1.000000e+00
        np.savetxt(path / "valid.csv", val, "%d")
    elif kind == "json":
        path = tmp_path / "split.json"
        path.write_text(json.dumps({"train": (TRAIN * 1).tolist(), "valid": val}))
    else:
        path, torch = tmp_path / "split.pt", quiet("torch")
        torch.save({"train": torch.from_numpy(TRAIN).to(torch.uint8), "valid": val}, path)
    graph = load(source_of(edges_csv(tmp_path), None, None, str(path)))
    assert np.array_equal(graph.train, TRAIN) and np.flatnonzero(graph.val).tolist() == val


@pytest.mark.parametrize(
    ("train", "words"),
    [
        (np.r_[TRAIN, TRAIN] * 1, "train_mask: must name every vertex once, has 40 ids of 2"),
        (TRAIN * 3, "must name every vertex once, has 20 ids of 2 vertices; .* if it is a mask"),
        ([3, 5, 3], "has 3 ids of 2 vertices"),
        (TRAIN[:-1], "a value for each of 20 vertices"),
    ],
)
def test_what_is_neither_mask_nor_ids_is_refused(tmp_path, train, words):
    with pytest.raises(SpecError, match=words):
        split(tmp_path, train=train)


def test_what_may_be_mask_or_ids_is_refused(tmp_path):
    np.save(tmp_path / "e.npy", [[0], [1]])
    source = source_of(str(tmp_path / "e.npy"), split=str(tmp_path / "split.npz"))
    np.savez(tmp_path / "split.npz", train=[1, 1])
    assert load(source).train.all()
    np.savez(tmp_path / "split.npz", train=[0, 1])
    with pytest.raises(SpecError, match=r"\[0, 1\] may be ids .* or a mask of 2"):
        load(source)


def table(path: Path, names: str, *columns: np.ndarray, order: np.ndarray | None = None) -> str:
    rows = np.stack(columns, 1)[np.arange(len(columns[0])) if order is None else order]
    np.savetxt(path, rows, "%.9g", ",", header=names, comments="")
    return str(path)


@pytest.mark.parametrize("name", ["id", "node_id", "Vertex_ID", "", "index", "Unnamed: 0"])
def test_a_column_of_ids_says_whose_rows_are(tmp_path, name):
    order, ids = RNG.permutation(N), np.arange(N)
    x = table(tmp_path / "x.csv", f"f0,{name},f1", X[:, 0], ids, X[:, 1], order=order)
    y = table(tmp_path / "y.csv", f"{name},label", ids, Y, order=order)
    graph = load(source_of(edges_csv(tmp_path), x, y))
    assert np.allclose(graph.features(), X[:, :2], rtol=1e-6) and np.array_equal(graph.y, Y)


def test_names_may_stand_in_a_comment_and_labels_of_some_ids_are_labels_of_these(tmp_path):
    path, ids = tmp_path / "y.txt", np.arange(N)[TRAIN][::-1]
    np.savetxt(path, np.stack([ids, Y[ids]], 1), "%d", header="node label")
    found = load(source_of(edges_csv(tmp_path), labels=str(path))).y
    assert np.array_equal(found, np.where(TRAIN, Y, -1))


def test_pandas_numbers_of_rows_are_no_feature_and_no_end_of_an_edge(tmp_path):
    ids = np.arange(N)
    x = table(tmp_path / "x.csv", ",id,f0", ids[::-1], ids, X[:, 0])
    assert load(source_of(edges_csv(tmp_path), x)).stats.features == 1
    edges = table(tmp_path / "e.csv", ",a,b", np.arange(60), SRC, DST)
    assert load(edges).stats.hash == load(edges_csv(tmp_path)).stats.hash


@pytest.mark.parametrize("ids", [(), ("id",)])
@pytest.mark.parametrize("name", ["label", "Y", "class"])
def test_labels_and_masks_among_the_features_are_no_features(tmp_path, ids, name):
    """A column `label` was a feature, from which the model read the answers."""
    first, columns = [np.arange(N)] * len(ids), (X[:, 0], Y, X[:, 1], TRAIN)
    names = ",".join([*ids, "f0", name, "f1", "train_mask"])
    x = table(tmp_path / "x.csv", names, *first, *columns)
    graph = load(source_of(edges_csv(tmp_path), x))
    assert np.allclose(graph.features(), X[:, :2], rtol=1e-6)
    assert np.array_equal(graph.y, Y) and np.array_equal(graph.train, TRAIN)
    assert any(f"{name}, train_mask: read as labels or masks" in n for n in graph.stats.notes)
    np.save(tmp_path / "y.npy", 1 - Y)
    graph = load(source_of(edges_csv(tmp_path), x, str(tmp_path / "y.npy")))
    assert graph.stats.features == 2 and np.array_equal(graph.y, 1 - Y)
    assert any(f"{name}: left out, since" in n for n in graph.stats.notes)
    # and such a table as --labels: columns beside the label were more labels
    graph = load(source_of(edges_csv(tmp_path), "3", x))
    assert np.array_equal(graph.y, Y) and graph.stats.classes == 2
    convert(edges_csv(tmp_path), tmp_path / "g", Extras(features=x))
    assert np.array_equal(load(str(tmp_path / "g")).y, Y)


def test_features_and_labels_may_be_in_a_npz(tmp_path):
    """It was read as SciPy's matrix alone, and called damaged."""
    np.savez(tmp_path / "both.npz", x=X, y=Y)
    both = str(tmp_path / "both.npz")
    graph = load(source_of(edges_csv(tmp_path), both, both))
    assert np.array_equal(graph.features(), X) and np.array_equal(graph.y, Y)
    np.savez(tmp_path / "odd.npz", a=X, b=X)
    with pytest.raises(SpecError, match="the array x, or a single one, and it holds a, b; save"):
        load(source_of(edges_csv(tmp_path), str(tmp_path / "odd.npz")))


def test_a_place_is_features_and_labels_alone_are_none(tmp_path):
    place = table(tmp_path / "x.csv", "x,y,z", X[:, 0], X[:, 1], X[:, 2])
    assert load(source_of(edges_csv(tmp_path), place)).stats.features == 3
    alone = table(tmp_path / "y.csv", "id,label", np.arange(N), Y)
    with pytest.raises(SpecError, match="holds no feature beside labels or masks; use it as"):
        load(source_of(edges_csv(tmp_path), alone))


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        (np.r_[0, 0, 2:N], "its column id: must name every vertex once, has 20 ids of 19"),
        (np.r_[0.5, 1:N], "ids must be whole numbers, found 0.5"),
        (np.r_[-1, 1:N], r"its ids\[0\]: vertex ids must lie in \[0, .* found -1"),
        (np.r_[1 : N + 1], "vertex 0 has no row .1 such"),
        (np.r_[2**45, 1:N], r"its ids\[0\]: vertex ids must lie in"),
        (np.r_[2**31 - 2, 1:N], "would take"),
    ],
)
def test_wrong_ids_of_rows_are_named(tmp_path, ids, words, monkeypatch):
    monkeypatch.setattr(module, "LARGEST_ARRAY", 1 << 20)
    x = tmp_path / "x.csv"
    np.savetxt(x, np.stack([ids, X[:, 0]], 1), "%.17g", ",", header="id,f", comments="")
    with pytest.raises(SpecError, match=words):
        load(source_of(edges_csv(tmp_path), str(x)))


@pytest.mark.parametrize(
    ("names", "columns", "train"),
    [
        ("node_id", ([4, 2],), [2, 4]),
        (",node_id", ([0, 1], [4, 2]), [2, 4]),
        (",0", ([0, 1], [4, 2]), [2, 4]),
        ("label,id", ([5, 0], [4, 2]), [2, 4]),
        ("id,train", ([4, 2], [1, 0]), "may be a mask; keep the column"),
        ("a,b", ([4, 2], [5, 6]), "must hold one number per line, or name a column id, holds 2"),
    ],
)
def test_ids_of_a_split_stand_in_the_column_that_is_named_so(tmp_path, names, columns, train):
    (tmp_path / "split").mkdir()
    table(tmp_path / "split" / "train.csv", names, *map(np.array, columns))
    source = source_of(edges_csv(tmp_path), split=str(tmp_path / "split"))
    if isinstance(train, str):
        with pytest.raises(SpecError, match=train):
            load(source)
    else:
        assert np.flatnonzero(load(source).train).tolist() == train


@pytest.mark.parametrize("block", [tables.BLOCK, 8])
@pytest.mark.parametrize(
    ("start", "line"),
    [
        *(("0\n1\n\n", 3), ("\n", 1), ("label\n\n", 2), ("0\n# 1\n", 2), ("0\n \t\n", 2)),
        *(("# c\n\n", 2), ("0\n1\n0\n\n", 4)),
    ],
)
def test_a_line_without_numbers_shifts_no_row(tmp_path, start, line, block, monkeypatch):
    monkeypatch.setattr(tables, "BLOCK", block)
    path = tmp_path / "y.txt"
    path.write_text(start + "0\n" * N)
    for given in ("labels", "features"):
        with pytest.raises(SpecError, match=rf"y\.txt:{line}: every line is a row"):
            load(source_of(edges_csv(tmp_path), **{given: str(path)}))


def test_blank_lines_after_all_rows_and_between_edges_shift_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "BLOCK", 16)
    rows = "".join(f"{y}\n" for y in Y)
    (tmp_path / "y.txt").write_text(f"# of the\n# classes\n{rows}\n\n# written by hand\n\n")
    plain = load(edges_csv(tmp_path)).stats.hash
    assert np.array_equal(load(source_of(edges_csv(tmp_path), labels=str(tmp_path / "y.txt"))).y, Y)
    edges = Path(edges_csv(tmp_path))
    edges.write_text(edges.read_text().replace("\n", "\n\n"))
    assert load(str(edges)).stats.hash == plain


def test_columns_beside_both_ends_may_be_text(tmp_path):
    plain = load(edges_csv(tmp_path)).stats.hash
    ends = zip(SRC, DST, strict=True)
    (tmp_path / "e.tsv").write_text("".join(f"{a}\t{b}\tfriend\n" for a, b in ends))
    assert load(str(tmp_path / "e.tsv")).stats.hash == plain


@pytest.mark.parametrize("between", [" ", ","])
def test_a_list_of_neighbours_is_no_list_of_edges(tmp_path, between):
    """Each line a vertex and its neighbours: its first two columns are a fraction of the edges."""
    lines = [between.join(map(str, [v, *range(v)][:6])) for v in range(2, N)]
    (tmp_path / "g.txt").write_text("\n".join(lines) + "\n")
    with pytest.raises(SpecError, match=r"g.txt:2: .* as many columns as the first, 3, has 4"):
        load(str(tmp_path / "g.txt"))


def test_a_field_whose_first_number_is_missing_is_refused_and_text_is_not(tmp_path):
    rows = "src,dst,weight,name\n0,1,,a\n1,2,0.5,b\n"
    (tmp_path / "g.csv").write_text(rows)
    with pytest.raises(SpecError, match=r"g.csv:2: .* fields of edges numbers"):
        load(str(tmp_path / "g.csv"))
    (tmp_path / "g.csv").write_text(rows.replace(",0.5", ",high"))
    assert not load(str(tmp_path / "g.csv")).edge_fields


def test_konects_ids_count_from_one(tmp_path):
    path = tmp_path / "out.small"
    path.write_text("% sym unweighted\n% 3 3 3\n1 2\n2 3\n")
    graph = load(str(path))
    assert graph.stats.vertices == 3 and graph.indices.tolist() == [1, 0, 2, 1]
    assert "KONECT's ids count from 1, here from 0: its vertex 1 is vertex 0" in graph.stats.notes
    path.write_text("% bip unweighted\n1 1\n2 1\n")
    with pytest.raises(SpecError, match=r"small:1: .* two kinds of vertices, both counted from 1"):
        load(str(path))


FROM_ONE = "no edge has vertex 0: ids begin with 1; if they count from 1, subtract 1"
NO_CLASS_0 = "no vertex has class 0: y begins with 1; if it counts from 1, subtract 1"


@pytest.mark.parametrize(
    ("arrays", "said", "is_said"),
    [
        ({"src": [1, 2], "dst": [2, 3]}, FROM_ONE, True),
        ({"src": [0, 1], "dst": [1, 2]}, FROM_ONE, False),
        ({"src": [1], "dst": [2], "y": [0, 1, 1]}, FROM_ONE, False),  # y has a row for vertex 0
        # 1,000 times as many vertices as meant were planned for, and nothing said so
        ({"src": [0, 5000], "dst": [5000, 9000]}, "8,998 of 9,001 vertices have no edge; if", True),
        ({"src": [0, 1], "dst": [1, 2]}, "no edge", False),
        (HOLDS | {"y": Y + 1}, NO_CLASS_0, True),
        (HOLDS, NO_CLASS_0, False),
        (HOLDS | {"y": np.ones((N, 2))}, "exactly one", False),  # several labels are several
    ],
)
def test_what_may_be_a_mistake_is_said(tmp_path, arrays, said, is_said):
    assert any(said in note for note in as_npz(tmp_path, arrays).stats.notes) == is_said


def test_what_is_said_of_an_object_is_said_of_its_plan(own_cache):
    """It is written to a folder, which knows nothing of what no folder holds."""
    graph = nx.path_graph(6)
    nx.set_edge_attributes(graph, "road", "kind")
    plan = gnnplan.plan(graph, strategy="graph_parallel", ranks=2)
    assert of_object(graph).notes == ["ignored: kind"]
    assert "ignored: kind" in plan.document["graph"]["notes"]


TIMES = 1.7e9 + 10.0 * np.arange(N)[:, None]
IDS = (2**40 + np.arange(N))[:, None]
SAID = "different numbers of feature 0 apart; subtract their mean, or use --dtype float64"


@every_format
@pytest.mark.parametrize("x, told", [(TIMES, 2), (IDS, 1), ((IDS - 2**40 + 2**30), 1)])
def test_features_that_float32_does_not_tell_apart_are_kept_and_said(tmp_path, written, x, told):
    if written is as_folder and x.dtype != np.float64:
        pytest.skip("a folder's features are floats")
    graph = written(tmp_path, HOLDS | {"x": x})
    assert graph.x.dtype == np.float64 and np.array_equal(graph.features(), x)
    assert f"float32 tells {told} of 20 {SAID}" in graph.stats.notes
    problem = Problem(graph.stats, graph, Workload(), read_cluster("local"))
    kept = isinstance(graph.x, np.memmap)  # its file is not written again
    assert problem.graph.x.dtype == (np.float64 if kept else np.float32)
    exact = Problem(graph.stats, graph, Workload(dtype="float64"), read_cluster("local")).graph
    assert exact is graph


@every_format
def test_features_beyond_float32_are_kept_in_float64(tmp_path, written):
    """They were refused as -inf in every dtype, to be cleaned with nan_to_num."""
    x = X * np.float64(-1e39)
    graph = written(tmp_path, HOLDS | {"x": x})
    write_parts(graph, np.arange(N, dtype=np.int32) % 2, "hash", 0, tmp_path / "parts")
    rule = r"finite in float32, found magnitudes up to [\d.]+e\+39; scale them, or .*dtype float64"
    for found in (graph, load(str(tmp_path / "parts"))):
        assert found.x.dtype == np.float64 and np.array_equal(found.features(np.arange(N)), x)
        Problem(found.stats, found, Workload(dtype="float64"), read_cluster("local"))
        with pytest.raises(SpecError, match=rule):
            Problem(found.stats, found, Workload(), read_cluster("local"))


@every_format
def test_fields_beyond_float32_are_refused_where_a_module_reads_them(tmp_path, written):
    """They became infinite in float32 without a word, and the loss nan in the first epoch."""
    pos, edge_attr = X * np.float64(-1e39), np.full(len(SRC), 1e300)
    if written in (as_dgl, as_text):
        pytest.skip("text has no fields, and as_dgl writes none of edges")
    graph = written(tmp_path, HOLDS | {"pos": pos, "edge_attr": edge_attr})
    write_parts(graph, np.arange(N, dtype=np.int32) % 2, "hash", 0, tmp_path / "parts")
    layer = ModuleLayer(h_in=8, h_out=2)
    for found in (graph, load(str(tmp_path / "parts"))):
        assert Problem(found.stats, found, Workload(), read_cluster("local")).graph
        for told, fields in {
            r"pos: numbers .* up to [\d.]+e\+39; scale": {"inputs": (("x", 4), ("pos", 4))},
            "pos: numbers must be finite": {"vertex_fields": (("pos", (4,), "<f8", 0),)},
            r"edge_attr: .* 1e\+300; scale": {"edge_fields": (("edge_attr", (), "<f8", 0),)},
        }.items():
            facts = {"file": "m.py", "name": "M", "sha256": "", "features": 4, "classes": 2}
            module = Module(layers=(layer,), **facts, **fields)
            own = {"model": "own", "layers": 1, "hidden": 2, "module": module}
            with pytest.raises(SpecError, match=told):
                Problem(found.stats, found, Workload(**own), read_cluster("local"))
            exact = Workload(dtype="float64", **own)
            assert Problem(found.stats, found, exact, read_cluster("local")).graph


@every_format
@pytest.mark.parametrize("x", [X.astype(np.float64), X / 3 + 1e-9 * X, 10.0 + X])
def test_ordinary_features_in_float64_are_not_talked_about(tmp_path, written, x):
    graph = written(tmp_path, HOLDS | {"x": x})
    assert not any("apart" in note for note in graph.stats.notes)
    if written is not as_folder:
        assert graph.x.dtype == (np.float32 if np.array_equal(x, x.astype("f4")) else np.float64)


def test_a_million_numbers_may_be_rounded():
    x = np.random.default_rng(0).normal(size=(100_000, 2))
    assert module.merging_note(x) == []
    x[:, 1] += 1e6
    assert "of feature 1 apart" in module.merging_note(x)[0]


def test_sparse_features_are_kept_too(tmp_path):
    indptr = np.arange(N + 1)
    sparse = {"x_indptr": indptr, "x_indices": indptr[:-1], "x_data": TIMES[:, 0]}
    held = {name: HOLDS[name] for name in ("src", "dst", "y")}
    graph = as_npz(tmp_path, held | sparse | {"x_shape": [N, 40]})
    assert graph.x.dtype == np.float64 and np.array_equal(graph.features().max(1), TIMES[:, 0])
    assert "float32 tells 2 of 20 different numbers of features apart" in str(graph.stats.notes)
    problem = Problem(graph.stats, graph, Workload(), read_cluster("local"))
    assert problem.graph.x.dtype == np.float32


def test_a_folder_widens_where_a_later_row_needs_it(tmp_path, monkeypatch):
    monkeypatch.setattr(own_arrays, "AT_ONCE", 64)  # rows are written again a few at a time
    x = np.concatenate([X, TIMES * np.ones(4)])
    np.savetxt(tmp_path / "x.csv", x, "%.17g", ",")
    monkeypatch.setattr(tables, "BLOCK", 256)
    convert(edges_csv(tmp_path), tmp_path / "g", Extras(str(tmp_path / "x.csv")))
    assert np.array_equal(np.load(tmp_path / "g" / "x.npy"), x)
    assert sorted(p.name for p in (tmp_path / "g").iterdir()) == ["dst.npy", "src.npy", "x.npy"]


@every_format
def test_whole_numbers_beyond_float64_are_refused(tmp_path, written):
    if written in (as_folder, as_text):
        pytest.skip("floats already")
    with pytest.raises(SpecError, match=r"x\[0, 0\]: features must be whole numbers of at most"):
        written(tmp_path, HOLDS | {"x": (2**60 + np.arange(N))[:, None]})


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_ids_with_a_point_are_whole_numbers_and_lines_end_as_they_do(tmp_path, end):
    """pandas' 1.0 for an id was refused; lines that end in \\r were one line of names."""
    path, lines = tmp_path / "e.csv", Path(edges_csv(tmp_path, SRC + 0.0, DST + 0.0)).read_text()
    path.write_bytes(lines.replace("\n", end).encode())
    assert np.array_equal(load(str(path)).indices, load(edges_csv(tmp_path)).indices)
    np.savetxt(tmp_path / "g.csv", np.stack([SRC, DST], 1), delimiter=",")  # 1.000000e+00
    assert np.array_equal(load(str(tmp_path / "g.csv")).indices, load(edges_csv(tmp_path)).indices)
    path.write_bytes(path.read_bytes() + f"{end}1.5,2.0".encode())
    with pytest.raises(SpecError, match=r"e\.csv: ids must be whole numbers, found 1\.5"):
        load(str(path))


def test_ids_in_a_parquets_floats_are_whole_numbers_and_pandas_index_is_no_field(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    arrow = pytest.importorskip("pyarrow")
    held = {"__index_level_0__": np.arange(len(SRC)), "src": np.asarray(SRC, float), "dst": DST}
    parquet.write_table(arrow.table(held), tmp_path / "e.parquet")
    graph = load(str(tmp_path / "e.parquet"))
    assert np.array_equal(graph.indices, as_npz(tmp_path, {"src": SRC, "dst": DST}).indices)
    assert not graph.edge_fields


@every_format
def test_one_hot_labels_are_said_to_be_several_labels(tmp_path, written):
    """They train another loss than classes do."""
    said = "y holds 2 labels for each vertex, of which exactly one is 1"
    hot = written(tmp_path, HOLDS | {"y": np.eye(2)[Y]})
    assert hot.stats.multilabel and any(note.startswith(said) for note in hot.stats.notes)


@pytest.mark.parametrize("as_written", [as_npz, as_pt, as_dgl])
@pytest.mark.parametrize("dtype", [bool, int])  # ids: test_graph.py
def test_arrays_named_train_val_and_test_are_the_split(tmp_path, as_written, dtype):
    """They were fields, or ignored, and a random split took their place."""
    held = {name: HOLDS[name] for name in HOLDS if not name.endswith("mask")}
    graph = as_written(tmp_path, held | {"train": TRAIN.astype(dtype), "valid": VAL.astype(dtype)})
    assert np.array_equal(graph.train, TRAIN) and np.array_equal(graph.val, VAL)


@pytest.mark.parametrize(
    ("name", "array", "remedy"),
    [
        ("src", np.asarray(SRC, float), "src.astype(numpy.int64)"),
        ("y", Y.astype("S1"), "numpy.unique(y, return_inverse=True)[1]"),
        ("y", Y.astype(str), "numpy.unique(y, return_inverse=True)[1]"),
        ("y", Y.astype(object), "numpy.array(y.tolist())"),
    ],
)
def test_an_array_of_a_wrong_type_is_told_what_to_become(tmp_path, name, array, remedy):
    """The remedy was `y.astype(...)`, which nobody can type; of names it would fail."""
    with pytest.raises(SpecError) as refused:
        as_npz(tmp_path, HOLDS | {name: array})
    assert remedy in str(refused.value)
    as_npz(tmp_path, HOLDS | {name: eval(remedy, {name: array, "numpy": np})})


def test_a_folder_with_the_name_of_a_well_known_graph_is_said(tmp_path, monkeypatch):
    """Statistics were planned in place of the folder, and nothing said so."""
    monkeypatch.chdir(tmp_path)
    assert not any("lies here" in note for note in load("flickr").notes)
    (tmp_path / "flickr").mkdir()
    assert any("what lies here is ./flickr" in note for note in load("flickr").notes)


def test_a_misspelt_parameter_is_told_all_that_there_are(tmp_path):
    with pytest.raises(SpecError, match=r"did you mean labels\? Allowed: features, labels, split"):
        load(f"{edges_csv(tmp_path)}?label=y.npy")
    with pytest.raises(SpecError, match="a generated graph has labels of classes; leave --task"):
        load("synthetic:community?vertices=60&edges=240&task=none")


NUMBERS = {
    "fractions": ([0.5, -3.25, np.nan, 7.0], 1, "numbers"),
    "a column of fractions": ([[0.5], [2.0], [np.nan], [7.0]], 1, "numbers"),
    "several, beyond [0, 1]": ([[0.5, 2.0], [1.0, 0.0], [np.nan, 0.0], [-1.5, 0.0]], 2, "numbers"),
    "shares of labels": ([[0.5, 1.0], [1.0, 0.0], [0.0, 0.0], [0.25, 0.0]], 2, "labels"),
    "whole floats": ([0.0, 1.0, np.nan, 1.0], 2, "label"),
}


@pytest.mark.parametrize(("y", "outputs", "learned"), NUMBERS.values(), ids=NUMBERS)
@pytest.mark.parametrize("written", [as_npz, as_folder, as_pt])
def test_numbers_to_predict_are_what_can_be_no_labels(tmp_path, written, y, outputs, learned):
    """Unless the user says so: then all are, and no number is 'no label' but NaN."""
    path = {"src": np.array([0, 1, 2]), "dst": np.array([1, 2, 3])}
    found = written(tmp_path, path | {"y": np.array(y), "train_mask": np.arange(4) < 1})
    assert (found.stats.learned, found.stats.classes) == (learned, outputs)
    assert any("regression" in note for note in found.stats.notes) == (learned == "numbers")
    said = load(f"{found.stats.source}?task=regression")
    assert said.stats.learned == "numbers" and said.y.dtype == np.float32
    np.testing.assert_array_equal(said.y, np.array(y, np.float32).reshape(4, -1))


def test_numbers_to_predict_that_are_texts_are_refused():
    with pytest.raises(SpecError, match="y: "):
        read_labels("graph.npz", np.array(["a", "b"]), 2, None, numbers=True)
