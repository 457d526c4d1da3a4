"""Graphs of other libraries: each file is written by its library, and read edge for edge; what is
damaged, hostile or of another kind is refused with its place and a remedy."""

import bz2
import gzip
import importlib
import io
import json
import os
import pickle
import shutil
import struct
import sys
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np
import pytest
import scipy.io
import scipy.sparse as sp
import written as w
from calls import allocations
from written import EDGES, GRAPH, MASKS, N, ids, quiet, saved, to

from gnnplan.planner.graph import formats, npy
from gnnplan.planner.graph.arrays import collect
from gnnplan.planner.graph.formats import Extras, convert, parts_of, tables
from gnnplan.planner.graph.graph import Graph
from gnnplan.planner.graph.load import load, source_of
from gnnplan.planner.graph.parts import Parts, small_arrays
from gnnplan.planner.vocabulary.errors import SpecError

Make = Callable[[Path], Path]
starts = pytest.mark.processes
AT_NIGHT = [starts, pytest.mark.nightly]
COLUMNS = {"edge_type": w.TYPE[:, None], "node_year": w.YEAR[:, None]}  # as OGB has them
VALUES = GRAPH | COLUMNS | w.ON_EDGES | w.ON_VERTICES
WHOLE = {*w.ALL, *w.ON_EDGES, *w.ON_VERTICES}
OF_OGB = {*w.ALL, "edge_attr", "edge_type", "node_year"}
OF_NETWORKX = {*w.ALL, "edge_weight", "edge_type", "year"}
# writer -> what its file holds beside the edges
WRITERS = [
    *((writer, WHOLE) for writer in (w.pyg_pt, w.pyg_processed, w.pyg_adjacency, w.npz)),
    *((writer, WHOLE) for writer in (w.own_folder, w.graphbolt_csv, w.graphbolt_numpy)),
    *((writer, OF_OGB) for writer in (w.ogb_text, w.ogb_binary)),
    *((writer, w.ALL) for writer in (w.old_pt, w.graphsaint)),
    (w.graphml, OF_NETWORKX - {"x"}),
    *((writer, {"edge_weight", "edge_type"}) for writer in (w.csv_with_names, w.parquet)),
    (w.commented, {"edge_type"}),
    *((writer, {"edge_weight"}) for writer in (w.matrix_market, w.scipy_csr, w.scipy_coo)),
    *((writer, set()) for writer in (w.csv, w.tsv, w.csv_gz, w.edge_index_pt, w.edge_index_npy)),
]


def in_order(arrays: dict[str, np.ndarray]) -> np.ndarray:
    """Edges by source, then by destination: libraries that keep matrices keep no other order."""
    edges = np.stack([arrays["src"], arrays["dst"]])
    return edges[:, np.lexsort(edges[::-1])]


def arrays_of(parts: Parts) -> dict[str, np.ndarray]:
    whole = collect(parts)
    ((src, dst),) = whole.edges
    dense = {"x": whole.x} if isinstance(whole.x, np.ndarray) else {}
    return {"src": src, "dst": dst, **dense, **small_arrays(whole)}


def reference(folder: Path, held: set[str]) -> str:
    """A .npz with the edges, and what else is held; vertices are counted, as all formats do."""
    values = VALUES | COLUMNS if "node_year" in held else VALUES
    arrays = {name: values[name] for name in ("src", "dst", *held)}
    np.savez(folder / "reference.npz", **arrays, meta=json.dumps({"vertices": N}))
    return str(folder / "reference.npz")


@pytest.fixture
def place(tmp_path):
    """An empty folder for a writer, beside which the test has its own files."""
    (tmp_path / "written").mkdir()
    return tmp_path / "written"


def must_have_fields(graph: Graph, held: set[str]) -> None:
    """Each edge of a directed graph has the rows that were given for it, and each vertex."""
    assert graph.edge_fields.keys() == held & w.ON_EDGES.keys()
    assert graph.vertex_fields.keys() == held & {*w.ON_VERTICES, "node_year"}
    place = {(u, v): i for i, (u, v) in enumerate(EDGES.T.tolist())}
    readers = np.repeat(np.arange(N), graph.degree).tolist()
    places = [place[pair] for pair in zip(graph.indices.tolist(), readers, strict=True)]
    for fields, rows in ((graph.edge_fields, places), (graph.vertex_fields, np.arange(N))):
        for name, found in fields.items():
            given = VALUES[name][rows]
            assert np.array_equal(found.reshape(given.shape), given), name
            assert found.dtype.kind == given.dtype.kind and not found.flags.writeable, name


@pytest.mark.parametrize("write, held", WRITERS)
def test_a_librarys_file_is_the_graph_that_was_written(tmp_path, place, write, held):
    """As the file is read, and as the folder that it is converted to, of which features and
    vertices' fields stay in their files."""
    path = str(write(place))
    vertices, edges, _ = convert(path, tmp_path / "mapped")
    assert (vertices, edges) == (N, 90)
    arrays = arrays_of(parts_of(path))
    assert np.array_equal(in_order(arrays), in_order(GRAPH))
    assert arrays.keys() & w.ALL == held & w.ALL
    for name in held & w.ALL:
        assert np.array_equal(arrays[name], GRAPH[name]), name
        assert arrays[name].dtype.kind == GRAPH[name].dtype.kind
    assert sorted(os.listdir(tmp_path)) == ["mapped", "written"]  # no temporary folder is left
    mapped, read = (load(str(at), directed=True) for at in (tmp_path / "mapped", path))
    expected = load(reference(tmp_path, held), directed=True).stats.hash
    assert mapped.stats.hash == read.stats.hash == expected
    for graph in (mapped, read):
        must_have_fields(graph, held)
    in_files = [*mapped.vertex_fields.values(), *([mapped.x] if "x" in held else [])]
    assert all(isinstance(array, np.memmap) for array in in_files)


@starts
def test_dgls_file_is_loaded_and_converted(tmp_path, place):
    """It is read by a process of its own, which takes seconds: once is enough for both."""
    parts = parts_of(str(w.dgl_bin(place)))
    graph = w.built(parts, directed=True)
    assert graph.stats.hash == load(reference(tmp_path, WHOLE), directed=True).stats.hash
    formats.write(parts, tmp_path / "mapped")
    mapped = load(str(tmp_path / "mapped"), directed=True)
    assert mapped.stats.hash == graph.stats.hash and isinstance(mapped.x, np.memmap)
    must_have_fields(mapped, WHOLE)
    assert sorted(os.listdir(place)) == ["graph.bin"]


@starts
@pytest.mark.nightly  # its process takes seconds to start; other formats: test_graph.py
def test_dgls_labels_may_be_whole_numbers_to_predict(tmp_path):
    """They were refused as classes with gaps, before anybody was asked what they are."""
    graph = w.dgl_graph()
    graph.ndata["label"] = graph.ndata["label"] * 10 + 1990
    quiet("dgl").save_graphs(str(tmp_path / "graph.bin"), [graph])
    assert load(source_of(str(tmp_path / "graph.bin"), task="regression")).stats.numbers


def test_every_reader_has_a_file(tmp_path):
    """Who adds a reader adds a writer; those of partitions are tested with them."""
    read = {formats.PICKLE.name}  # is loaded for who trusts it, by `convert`
    for number, write in enumerate([*(writer for writer, _ in WRITERS), w.dgl_bin]):
        (tmp_path / str(number)).mkdir()
        read.add(formats.recognise(str(write(tmp_path / str(number)))).name)
    assert read == {form.name for form in formats.FORMATS if "parts" not in form.name}


OBJECTS = [
    *((w.dgl_graph, WHOLE), (w.pyg_data, WHOLE), (w.networkx_graph, OF_NETWORKX)),
    *((w.matrix, {"edge_weight"}), (lambda: w.matrix().tocsc(), {"edge_weight"})),
    *((w.edge_index, set()), (lambda: EDGES, set())),
]


@pytest.mark.parametrize("make, held", OBJECTS)
def test_an_object_is_the_graph_of_its_file(tmp_path, make, held):
    expected = load(reference(tmp_path, held), directed=True).stats
    graph = w.from_object(make(), directed=True)
    assert graph.stats.hash == expected.hash
    must_have_fields(graph, held)
    convert(make(), tmp_path / "mapped")
    assert load(str(tmp_path / "mapped"), directed=True).stats.hash == expected.hash


def test_no_object_of_ours_is_an_error():
    for wrong in ({"edges": []}, "text", [[0, 1], [1, 0]]):
        with pytest.raises(SpecError, match=r"a graph is a DGLGraph, a PyG Data"):
            w.from_object(wrong)
    with pytest.raises(SpecError, match=r"save edge_index\.T"):
        w.from_object(EDGES.T)
    with pytest.raises(SpecError, match=r"square"):
        w.from_object(sp.eye(3, 4))


def test_undirected_sources_have_their_edges_both_ways(tmp_path):
    path = nx.path_graph(4)
    expected = [(0, 1), (1, 0), (1, 2), (2, 1), (2, 3), (3, 2)]
    assert in_order(arrays_of(formats.of_object(path))).T.tolist() == [list(e) for e in expected]
    symmetric = sp.coo_matrix(nx.to_scipy_sparse_array(path))
    scipy.io.mmwrite(tmp_path / "s.mtx", symmetric, symmetry="symmetric")
    arrays = arrays_of(parts_of(str(tmp_path / "s.mtx")))
    assert in_order(arrays).T.tolist() == [list(e) for e in expected]


def test_nodes_with_names_are_numbered_in_their_order():
    graph = nx.DiGraph([("b", "a"), ("a", "c")])
    nx.set_node_attributes(graph, {"b": "a name"}, "label")
    parts = formats.of_object(graph)
    assert in_order(arrays_of(parts)).T.tolist() == [[0, 1], [1, 2]]
    assert "vertices are numbered in the order of the nodes" in parts.notes
    assert "ignored: label" in parts.notes


def test_zeros_that_fill_up_blocks_are_no_edges():
    """A matrix of 3 edges in blocks of 2 by 2 had 12."""
    blocks = sp.csr_matrix(([1.0, 1.0, 2.0], ([0, 2, 3], [1, 0, 3])), shape=(4, 4)).tobsr((2, 2))
    ((src, dst),) = collect(formats.of_object(blocks)).edges
    assert (src.tolist(), dst.tolist()) == ([0, 2, 3], [1, 0, 3])


def test_of_two_names_of_labels_the_second_is_a_field():
    """It was dropped, unsaid; of a Data and a DGLGraph it is a field."""
    graph = nx.DiGraph([(0, 1), (1, 2)])
    nx.set_node_attributes(graph, {0: 1, 1: 0, 2: 1}, "y")
    nx.set_node_attributes(graph, {0: 0.5, 1: 1.5, 2: 2.5}, "label")
    parts = formats.of_object(graph)
    assert parts.y is not None and parts.y.tolist() == [1, 0, 1]
    assert parts.vertex_fields["label"].tolist() == [0.5, 1.5, 2.5]


def test_what_pyg_keeps_after_a_transform_is_no_object_of_unknown_code(tmp_path):
    """ToUndirected, subgraph and is_node_attr leave a defaultdict of enums in the Data."""
    quiet("torch_geometric")
    torch, path = quiet("torch"), tmp_path / "data.pt"
    held = {"x": torch.ones(N, 2), "edge_index": w.edge_index(), "edge_attr": torch.rand(90, 1)}
    data = importlib.import_module("torch_geometric.data").Data(**held)
    assert data.is_node_attr("x") and data.is_edge_attr("edge_attr")
    torch.save(data, path)
    parts = formats.libraries.read_pt(str(path))
    assert np.array_equal(in_order(arrays_of(parts)), in_order(GRAPH))
    assert parts.notes == [] and [*parts.edge_fields] == ["edge_attr"]


def test_a_graph_of_several_kinds_is_told_what_to_become(tmp_path):
    """Its remedy was to save a dictionary, whose remedy was an edge_index."""
    quiet("torch_geometric")
    torch, path = quiet("torch"), str(tmp_path / "data.pt")
    data = importlib.import_module("torch_geometric.data").HeteroData()
    data["a"].x = torch.ones(3, 2)
    for held in (data, data.to_dict()):
        torch.save(held, path)
        with pytest.raises(SpecError, match=r"to_homogeneous\(\)"):
            formats.libraries.read_pt(path)


def test_numbers_in_quotes_are_numbers(tmp_path):
    """As Python's csv.QUOTE_ALL writes them: the first line of them was refused."""
    (tmp_path / "e.csv").write_text('"src","dst","weight"\n"0","1","0.5"\n"1","2","1.5"\n')
    graph = load(str(tmp_path / "e.csv"), directed=True)
    assert graph.indices.tolist() == [0, 1]
    assert graph.edge_fields["edge_weight"].tolist() == [0.5, 1.5]


def test_text_is_read_in_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "BLOCK", 64)
    for write in (w.csv, w.csv_with_names, w.tsv, w.csv_gz):
        arrays = arrays_of(parts_of(str(write(tmp_path))))
        assert np.array_equal(arrays["src"], GRAPH["src"])
        assert np.array_equal(arrays["dst"], GRAPH["dst"])
    (tmp_path / "long.csv").write_text("0,1\n0," + "1" * 200 + "\n")
    with pytest.raises(SpecError, match=r"long\.csv:2: a line has more than 64 characters"):
        arrays_of(parts_of(str(tmp_path / "long.csv")))


def lists(folder: Path, ending: str) -> Path:
    split = folder / "split"
    split.mkdir()
    for part, mask in zip(("train", "valid", "test"), MASKS, strict=True):
        if ending == "npy":
            np.save(split / f"{part}.npy", ids(mask))
        else:
            w.zipped(split / f"{part}.csv.gz", ids(mask)[:, None])
    return split


def extras_npy(folder: Path) -> tuple[Path, Path, Path]:
    np.save(folder / "x.npy", GRAPH["x"])
    np.save(folder / "y.npy", GRAPH["y"])
    np.savez(folder / "split.npz", **{mask: GRAPH[mask] for mask in MASKS})
    return folder / "x.npy", folder / "y.npy", folder / "split.npz"


def extras_text(folder: Path) -> tuple[Path, Path, Path]:
    names = ",".join(f"f{i}" for i in range(w.WIDTH))
    np.savetxt(folder / "x.csv", GRAPH["x"], "%.17g", ",", header=names, comments="")
    np.savetxt(folder / "y.txt", GRAPH["y"], "%d")
    return folder / "x.csv", folder / "y.txt", lists(folder, "csv.gz")


def extras_torch(folder: Path) -> tuple[Path, Path, Path]:
    torch, data = quiet("torch"), w.tensors("x", "y")
    parts = zip(("train", "valid", "test"), map(ids, MASKS), strict=True)
    data["split"] = {part: torch.from_numpy(chosen) for part, chosen in parts}
    paths = [folder / f"{name}.pt" for name in data]
    for path, held in zip(paths, data.values(), strict=True):
        torch.save(held, path)
    return tuple(paths)


def extras_json(folder: Path, of: Callable[[list], object] = list) -> tuple[Path, Path, Path]:
    """A list of labels was taken for names of columns above no rows."""
    x, _, _ = extras_npy(folder)
    (folder / "y.json").write_text(json.dumps(of(GRAPH["y"].tolist())))
    roles = {role: ids(m).tolist() for role, m in zip(("tr", "va", "te"), MASKS, strict=True)}
    (folder / "role.json").write_text(json.dumps(roles))
    return x, folder / "y.json", folder / "role.json"


MAPPING = partial(extras_json, of=lambda labels: dict(enumerate(labels)))


@pytest.mark.parametrize("make", [extras_npy, extras_text, extras_torch, extras_json, MAPPING])
def test_files_add_what_an_edge_list_lacks(tmp_path, make):
    odd = tmp_path / "a & b=c %41 ü"  # as names of files may be
    odd.mkdir()
    features, labels, split = map(str, make(odd))
    path = str(w.csv(tmp_path))
    expected = load(reference(tmp_path, w.ALL)).stats
    assert load(source_of(path, features, labels, split)).stats.hash == expected.hash
    convert(path, tmp_path / "mapped", Extras(features, labels, split))
    assert load(str(tmp_path / "mapped")).stats.hash == expected.hash


def test_sparse_features_are_added_and_converted(tmp_path):
    x = sp.random(N, 200, 0.02, "csr", np.float32, 1)
    sp.save_npz(tmp_path / "x.npz", x)
    path = str(w.csv(tmp_path))
    graph = load(source_of(path, str(tmp_path / "x.npz")))
    assert sp.issparse(graph.x) and np.array_equal(graph.features(), x.toarray())
    convert(path, tmp_path / "mapped", Extras(str(tmp_path / "x.npz")))
    assert load(str(tmp_path / "mapped")).stats.hash == graph.stats.hash


def test_a_width_makes_stand_in_features_and_a_task_of_none_stand_in_labels(tmp_path):
    source = source_of(str(w.csv(tmp_path)), "7", task="none")
    graph = load(source)
    assert graph.features().shape == (N, 7)
    assert (graph.y >= 0).all() and graph.stats.classes == 16 and graph.train.any()
    assert any(note.startswith("STAND-IN LABELS") for note in graph.stats.notes)
    assert load(source).stats.hash == graph.stats.hash
    # nothing is made up that was not asked for
    assert load(str(w.csv(tmp_path))).stats.classes == 0
    with pytest.raises(SpecError, match=r"the graph has its own \(3 classes\); drop --task none"):
        load(source_of(reference(tmp_path, w.ALL), task="none"))
    with pytest.raises(SpecError, match="task: must be 'none' or 'regression', not 'links'"):
        load(source_of(str(w.csv(tmp_path)), task="links"))


BAD_EXTRAS = {
    "too short": ("features", lambda d: np.save(d, np.ones((N - 1, 2))), "same number of vertices"),
    "an infinity": ("features", lambda d: np.save(d, np.full((N, 2), np.inf)), "must be finite"),
    "a vector": ("features", lambda d: np.save(d, np.ones(N)), r"\[vertices, features\]"),
    "objects": ("features", lambda d: np.save(d, np.array([{}]), allow_pickle=True), "pickled"),
    "infinity": ("labels", lambda d: np.save(d, np.append(np.full(N - 1, 0.5), np.inf)), "finite"),
    "a gap": ("labels", lambda d: np.save(d, np.where(np.arange(N) == 4, 90, 0)), "large gaps"),
    "ids beyond": ("split", lambda d: np.savez(d, train=[N]), r"train_mask\[0\].*\[0, 29\]"),
    "masks short": ("split", lambda d: np.savez(d, train=[True]), "a value for each of 30"),
    "no training": ("split", lambda d: np.savez(d, test=[1]), "needs train"),
    # ignored: no vertex was evaluated on
    "a misspelt set": (
        *("split", lambda d: d.write(b'{"train": [0], "vaild": [1]}')),
        "extra: set 'vaild' is unknown; did you mean valid",
    ),
    "no lists": ("split", lambda d: d.write(b"{}"), "a split needs train, val"),
    "binary junk": ("features", lambda d: d.write(b"\0\xff" * 40), "is no .npy"),
    "empty": ("labels", lambda d: d.write(b""), "vertices"),
}


@pytest.mark.parametrize("word, write, words", BAD_EXTRAS.values(), ids=BAD_EXTRAS)
def test_bad_files_beside_an_edge_list_are_named(tmp_path, word, write, words):
    features, labels, _ = map(str, extras_npy(tmp_path))
    with open(tmp_path / "extra", "wb") as stream:
        write(stream)
    given = {"features": features, "labels": labels} | {word: str(tmp_path / "extra")}
    path = str(w.csv(tmp_path))
    with pytest.raises(SpecError, match=words):
        load(source_of(path, **given))
    with pytest.raises(SpecError, match=words):
        convert(path, tmp_path / "mapped", Extras(**given))
    assert not (tmp_path / "mapped").exists()


def test_the_split_of_ogbs_saver_is_read(tmp_path):
    """A dictionary of tensors; of arrays it would need code of the file."""
    root = w.ogb_binary(tmp_path)
    expected = load(str(root)).stats.hash
    for file in (root / "split" / "time").iterdir():
        file.unlink()
    torch, path = quiet("torch"), root / "split" / "time" / "split_dict.pt"
    lists = dict(zip(("train", "valid", "test"), map(ids, MASKS), strict=True))
    torch.save({part: torch.from_numpy(chosen) for part, chosen in lists.items()}, path)
    graph = load(str(root))
    assert graph.stats.hash == expected and "the official split by time" in graph.stats.notes
    torch.save({"train": torch.tensor([0])}, path)
    with pytest.raises(SpecError, match=r"split_dict\.pt: val: holds no vertex; repeat"):
        load(str(root))
    torch.save(lists, path)
    with pytest.raises(SpecError, match=r"only code of the file can make.* save tensors"):
        load(str(root))


def test_one_of_several_splits_of_ogb_is_named_by_the_user(tmp_path):
    """It was asked for, and --split refused beside it."""
    root = w.ogb_text(tmp_path)
    other = Path(shutil.copytree(root / "split" / "time", root / "split" / "random"))
    w.zipped(other / "train.csv.gz", ids("train_mask")[:1, None])
    with pytest.raises(SpecError, match=f"2 splits, random, time; name one, as --split {other}"):
        load(str(root))
    assert load(source_of(str(root), split=str(other))).stats.train_vertices == 1


def test_what_a_graph_has_is_not_replaced(tmp_path):
    features, *_ = extras_npy(tmp_path)
    with pytest.raises(SpecError, match=r"has its own features, so --features .* leave it out"):
        load(source_of(reference(tmp_path, w.ALL), str(features)))


def put(content: bytes | str, name: str = "bad") -> Make:
    raw = content if isinstance(content, bytes) else content.encode()
    return to(name, lambda path: path.write_bytes(raw))


def then(write: Make, change: Callable[[Path], object], file: str = "") -> Make:
    """What `write` writes, with one file changed ('': all of it)."""

    def made(folder: Path) -> Path:
        path = write(folder)
        change(path / file)
        return path

    return made


def cut(write: Make) -> Make:
    """The file that `write` writes, without its end."""
    return then(write, lambda path: os.truncate(path, int(0.6 * path.stat().st_size)))


def instead(make: Callable[[Path], object]) -> Callable[[Path], object]:
    """A change: this in the file's place."""
    return lambda path: (path.unlink(), make(path))


def claiming(shape: tuple[int, ...], dtype: str = "<i8") -> bytes:
    """A .npy of 64 bytes whose header claims another shape."""
    body = io.BytesIO()
    header = {"descr": dtype, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(body, header)
    return body.getvalue() + bytes(64)


def holding(**members: bytes) -> Callable[[Path], object]:
    """A change: other files in an archive, compressed."""

    def change(path: Path) -> None:
        with zipfile.ZipFile(path) as archive:
            held = {name: archive.read(name) for name in archive.namelist()}
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, raw in (held | {f"{name}.npy": raw for name, raw in members.items()}).items():
                archive.writestr(name, raw)

    return change


def sparse_of(**members: object) -> Make:
    given = {"format": b"coo", "shape": [9, 9], "row": [0, 1], "col": [1, 2], "data": [1, 1]}
    return to("bad.npz", lambda path: np.savez(path, **(given | members)))


class Hostile:
    """Its pickle makes a file when it is loaded."""

    def __reduce__(self) -> tuple:
        return exec, ("open('/tmp/gnnplan-hostile', 'w')",)


def tensor(held: Callable[[Any], object]) -> Make:
    """A file of torch's with this."""
    return to("bad.pt", saved(lambda: held(quiet("torch"))))


def lie(path: Path) -> None:
    """The number of graphs is 2**60: DGL's C++ throws what nobody catches, and its process ends."""
    raw = bytearray(path.read_bytes())
    raw[24:32] = struct.pack("<Q", 2**60)
    path.write_bytes(raw)


MORE = "".join(f'<!ENTITY {b} "{f"&{a};" * 16}">' for a, b in ("ab", "bc", "cd", "de", "ef", "fg"))
BOMB = f'<!DOCTYPE x [<!ENTITY a "ten bytes.">{MORE}]><graphml>&g;</graphml>'  # 168 MB


def ogb(name: str, content: object) -> Make:
    path, array = f"raw/{name}.csv.gz", np.array(content)
    return then(w.ogb_text, Path.unlink if content is None else lambda p: w.zipped(p, array), path)


def graphbolt(file: str, content: np.ndarray) -> Make:
    return then(w.graphbolt_csv, lambda path: np.save(path, content), file)


def metadata(old: str, new: str) -> Make:
    def change(path: Path) -> None:
        path.write_text(path.read_text().replace(old, new))

    return then(w.graphbolt_csv, change, "metadata.yaml")


def mtx(text: str, kind: str = "coordinate") -> Make:
    return put(f"%%MatrixMarket matrix {kind} real general\n{text}")


X = "raw/node-feat.csv.gz"
POINTERS = {"indices": np.zeros(4, np.int32)}
POINTERS |= {"indptr": np.array([0, 2**30, *[4] * (N - 1)], np.int32)}
pipe, empty = instead(os.mkfifo), instead(Path.touch)
saint, ogb_file = partial(then, w.graphsaint), partial(then, w.ogb_text)
BAD = {
    "ogb: a pipe": (ogb_file(pipe, X), "node-feat.*Is a pipe"),
    "ogb: empty features": (ogb_file(empty, X), "ogbn_small: x: holds no rows of features; give a"),
    "ogb: an empty part": (ogb_file(empty, "split/time/valid.csv.gz"), "val: holds no vertex"),
    "ogb: too many vertices": (
        ogb("num-node-list", [[2**31 - 1]]),
        "same number of vertices, are for (30, )+2,147,483,647; give each a row",
    ),
    "graphbolt: a link to itself": (
        then(w.graphbolt_csv, instead(lambda path: path.symlink_to(path)), "edges.csv"),
        "Symlink loop|Too many levels",
    ),
    "graphsaint: a pipe": (saint(pipe, "adj_full.npz"), "adj_full.*Is a pipe"),
    "graphsaint: piped roles": (saint(pipe, "role.json"), "role.*Is a pipe"),
    "graphsaint: a large list": (
        saint(lambda path: os.truncate(path, 10**10), "class_map.json"),
        r"class_map\.json: larger than 1\.07 GB",
    ),
    "graphml: large": (then(w.graphml, lambda path: os.truncate(path, 10**12)), "would take"),
    "npz: fractions": (sparse_of(row=[0.5, 1.0]), "row: must hold integers, has dtype float64"),
    "npz: negative": (sparse_of(row=[0, -1]), "cannot be read as a sparse matrix"),
    "npz: diagonals": (
        sparse_of(format=b"dia", shape=[2**31 - 1] * 2, data=[[1.0]], offsets=[0]),
        "holds diagonals; save it with save_npz",
    ),
    "pt: one row many times": (  # a few bytes whose tensor claims gigabytes, not too many for memory
        tensor(lambda torch: {"edge_index": w.edge_index(), "x": torch.zeros(1).expand(N, 2**24)}),
        r"x: shape .* needs 2,013,265,920 B but only 4 B",
    ),
    "ogb: a split of nothing": (
        ogb_file(Path.unlink, "split/time/train.csv.gz"),
        "one split is needed, a folder with train.csv.gz or split_dict.pt, found none",
    ),
    "absent": (lambda d: d / "none.csv", r"a graph is a \.npz file"),
    "empty file": (put("", "e.csv"), r"is empty \(0 bytes\)"),
    "json": (put('{"nodes": []}', "g.json"), "a CSV with src,dst above its edges"),
    "packed otherwise": (put(bz2.compress(b"0,1\n")), r"unpack it first \(bunzip2 .*bad\)"),
    "packed": (put(gzip.compress(b"PK\0\0", mtime=0), "g.pt.gz"), r"unpack it first \(gunzip"),
    "junk": (put(bytes(range(128, 256))), "of no format that is read"),
    "prose": (put("Call me Ishmael.\nSome years ago"), "of no format that is read"),
    "empty folder": (lambda d: d, "no format that is read; it holds nothing"),
    "csv: a name": (put("src,dst\n0,1\n1,alice\n"), r"bad:3: .*found '1,alice'"),
    "csv: names first": (  # factorize of each column gives one vertex two numbers
        put("source,target\nbob,alice\n"),
        r"bad:2: .*found 'bob,alice'(?s:.*)factorize\(pandas\.concat\(\[sources, targets\]\)\)",
    ),
    "metis": (put("3 2\n2 3\n1\n1\n"), "bad:3: .*found '1'; .* write a line per edge"),
    "csv: a line too short": (put("0,1\n1,2\n3\n4,5\n"), r"bad:3: .*found '3'"),
    "csv: R's names of rows": (put("src dst\n1 0 1\n"), r"bad:2: .* in 2 columns .*'1 0 1'"),
    "csv: neighbours": (put("0 1\n1 2 3\n"), r"bad:2: .* in 2 columns as above, found '1 2 3'"),
    "csv: a fraction": (put("# x\n\n0 1\n1.5 2\n"), r"bad:4: .*found '1\.5 2'"),
    "csv: a negative id": (put("0,1\n0,-1\n"), r"dst\[1\].*found -1; ids count from 0"),
    "csv: a huge id": (put("0,1\n0,4294967296\n"), r"dst\[1\].*found 4294967296.*unique\("),
    "csv: beyond 64 bits": (put(f"0,1\n0,{10**30}\n"), r"bad:2: "),
    "csv: vertices for petabytes": (put("0,2147483640\n"), "would take"),
    "csv: not UTF-8": (put(b"0,1\n\xff\xfe,2\n"), "of no format.* save it in UTF-8"),
    "gz: cut off": (cut(w.csv_gz), r"edges\.csv\.gz: cannot be read"),
    "mtx: cut off": (cut(w.matrix_market), r"graph\.mtx:?.*(header says 90 entries|must be)"),
    "mtx: not square": (mtx("2 3 1\n1 1 1\n"), "square, this one is 2 x 3"),
    "mtx: dense": (mtx("1 1\n1\n", "array"), "in coordinates, this one is array"),
    "mtx: petabytes": (mtx(f"9 9 {10**15}\n1 1 1\n"), "header says 1,000,000,000,000,000"),
    "mtx: ids from 0": (mtx("2 2 1\n0 1 1\n"), "ids of MatrixMarket count from 1, found 0; add 1"),
    "konect: ids from 0": (put("% sym\n1 0\n"), "ids of KONECT count from 1, found 0; add 1"),
    "parquet: cut off": (cut(w.parquet), "cannot be read as Parquet"),
    "npz: labels of text": (  # convert ended in a traceback
        to("bad.npz", lambda path: np.savez(path, src=[0], dst=[1], y=["a", "b"])),
        "y: must hold .*, has dtype <U1",
    ),
    "npz: petabytes": (then(w.scipy_csr, holding(data=claiming((2**50,), "<f8"))), "would take"),
    "npz: pointers": (  # scipy believes them, and would write outside of its memory
        sparse_of(format=b"csr", shape=[N, N], data=np.ones(4), **POINTERS),
        "cannot be read as a sparse matrix",
    ),
    "npy: petabytes": (put(claiming((2, 2**50))), "needs .* B but only 64 B are stored"),
    "npy: three columns": (put(claiming((2, 2, 2))), r"shape \[2, edges\], has \[2, 2, 2\]"),
    "npy: pickled": (put(claiming((2, 4), "|O")), "pickled Python objects, which are never loaded"),
    "pt: code": (tensor(lambda torch: Hostile()), "only code of the file can make"),
    "pt: cut off": (cut(w.edge_index_pt), "cannot be read"),
    "pt: petabytes": (tensor(lambda torch: torch.zeros(1).long().expand(2, 2**46)), "would take"),
    "pt: several": (
        tensor(lambda torch: ({"edge_index": w.edge_index()}, {"x": torch.tensor([0, 4, 9])})),
        "holds several graphs",
    ),
    "pt: a tuple": (
        tensor(lambda torch: (w.edge_index(), torch.ones(9, 4), torch.ones(9))),
        "holds a tuple of Tensor, Tensor, Tensor; save a dictionary",
    ),
    "pickle": (put(pickle.dumps(Hostile())), r"is a pickle.*--trust"),
    "graphml: entities": (put(BOMB), r"cannot be read as GraphML \(ParseError: limit on input"),
    "graphml: cut off": (cut(w.graphml), "cannot be read"),
    "ogb: an edge is gone": (ogb("num-edge-list", [[91]]), "says 91 edges, but 90 are there"),
    "ogb: two graphs": (ogb("num-node-list", [[N], [N]]), "one graph, this folder 2"),
    "ogb: features short": (ogb("node-feat", np.ones((N - 1, 2))), "same number of vertices"),
    "ogb: a file is gone": (ogb("num-node-list", None), r"num-node-list.* \(No such file"),
    "ogb: no edges": (ogb("edge", None), "no format that is read; it holds raw, split; "),
    "graphbolt: outside": (
        metadata("path: edges.csv", "path: ../../etc/passwd"),
        r"metadata\.yaml:\d+: graph\.edges\.0\.path: must lie in the dataset's folder",
    ),
    "graphbolt: kinds": (
        metadata("    - num: 30", "    - num: 30\n    - num: 4"),
        "one kind of vertices and one of edges are read, found 2",
    ),
    "graphbolt: no number": (
        metadata("num: 30", "num: many"),
        r"metadata\.yaml:\d+: graph\.nodes\.0\.num: must be a whole number, as 2, not 'many'",
    ),
    "graphbolt: petabytes": (metadata("num: 30", f"num: {10**15}"), "number of 0 to 2,147,483"),
    "graphbolt: fewer labels": (
        graphbolt("train_set_labels.npy", np.zeros(3, np.int64)),
        r"must be as many as seeds \(10\), are 3",
    ),
    "graphbolt: links": (graphbolt("train_set_seeds.npy", np.zeros((10, 2), int)), "of vertex ids"),
    "graphbolt: no rows": (then(w.graphbolt_csv, Path.unlink, "feat.npy"), "feat.*cannot be read"),
    "graphsaint: classes of strangers": (
        saint(lambda path: path.write_text('{"77": 1}'), "class_map.json"),
        r"class_map\[0\]: vertex ids must lie in",
    ),
    "graphsaint: no roles": (saint(lambda p: p.write_text("[]"), "role.json"), "is list; write"),
}
DGL = {  # its process takes seconds to start
    "dgl: cut off": (cut(w.dgl_bin), "cannot be read as a DGL graph|cannot be read as DGL's"),
    "dgl: two graphs": (
        to("two.bin", lambda path: quiet("dgl").save_graphs(str(path), [w.dgl_graph()] * 2)),
        "holds 2 graphs, one is needed",
    ),
    "dgl: petabytes": (then(w.dgl_bin, lie), r"DGL ended with|cannot be read as a DGL graph"),
}


@pytest.mark.parametrize(
    "write, words",
    [
        *(pytest.param(*case, id=name) for name, case in BAD.items()),
        *(pytest.param(*case, id=name, marks=AT_NIGHT) for name, case in DGL.items()),
    ],
)
def test_bad_input_is_named_and_leaves_nothing(tmp_path, place, write, words):
    path = write(place)
    before = sorted(place.rglob("*"))
    with pytest.raises(SpecError, match=words) as refused:
        load(str(path))
    assert "\x1b" not in str(refused.value)
    if path.exists() and "would take" not in words and path != place and path.suffix != ".bin":
        with pytest.raises(SpecError):
            convert(str(path), tmp_path / "mapped")
        assert sorted(os.listdir(tmp_path)) == ["written"]
    assert sorted(place.rglob("*")) == before and not os.path.exists("/tmp/gnnplan-hostile")


def zeros(*shape: int) -> bytes:
    body = io.BytesIO()
    np.save(body, np.zeros(shape, np.int64))
    return body.getvalue()


PACKED = {
    "npz": then(w.npz, holding(src=zeros(2**19), dst=zeros(2**19))),
    "sparse": then(w.scipy_coo, holding(row=zeros(2**19))),
    "ogb": then(w.ogb_binary, holding(node_feat=zeros(N, 2**16)), "raw/data.npz"),
    # torch does not compress, and unpacks what others did
    "pt": then(tensor(lambda torch: torch.zeros((2, 2**20), dtype=int)), holding()),
    "text": put(gzip.compress(b"0,1\n" * 2**20), "edges.csv.gz"),
}


@pytest.mark.parametrize("write", PACKED.values(), ids=PACKED)
def test_what_was_packed_to_fill_memory_is_not_unpacked(tmp_path, monkeypatch, write):
    path = write(tmp_path)
    monkeypatch.setattr(npy, "MOST_SWOLLEN", 1 << 20)  # for small files; real ones are larger
    with pytest.raises(SpecError, match=r"unpacks to .* MB from .* kB.*store it uncompressed"):
        load(str(path))


def test_vertices_that_an_edge_list_claims_take_no_memory_to_convert(tmp_path):
    (tmp_path / "edges.csv").write_text("0,1\n0,2147483640\n")
    with allocations() as most:
        vertices, edges, notes = convert(str(tmp_path / "edges.csv"), tmp_path / "g")
        assert (vertices, edges) == (2147483641, 2) and most() < 64e6
    # a folder of two billion vertices was written without a word
    assert any("at most 4 of 2,147,483,641 vertices" in n and "ids have gaps" in n for n in notes)


def test_a_pickle_is_loaded_only_for_who_trusts_it(tmp_path):
    path = tmp_path / "graph.gpickle"
    path.write_bytes(pickle.dumps(w.networkx_graph()))
    with pytest.raises(SpecError, match=r"runs whatever code is in it.*convert .* FOLDER --trust"):
        convert(str(path), tmp_path / "mapped")
    convert(str(path), tmp_path / "mapped", trust=True)
    expected = load(reference(tmp_path, OF_NETWORKX)).stats.hash
    assert load(str(tmp_path / "mapped")).stats.hash == expected


@pytest.mark.parametrize(
    "absent, write", [("pyarrow.parquet", w.parquet), ("torch", w.edge_index_pt)]
)
def test_an_absent_library_is_named_with_pips_command(tmp_path, monkeypatch, absent, write):
    path = str(write(tmp_path))
    monkeypatch.setitem(sys.modules, absent, None)
    with pytest.raises(SpecError, match=rf"{absent} is needed for this format and .*pip install"):
        load(path)


def test_convert_says_what_it_found_and_where_it_is(tmp_path, gnnplan):
    features, labels, split = extras_npy(tmp_path)
    given = ("--features", features, "--labels", labels, "--split", split)
    code, out, _ = gnnplan("convert", w.csv(tmp_path), tmp_path / "g", *given)
    assert code == 0 and "(an edge list): 30 vertices, 90 edges" in out
    assert f"next: gnnplan plan --graph {tmp_path / 'g'}" in out
    document = json.loads(gnnplan("convert", w.csv(tmp_path), tmp_path / "h", "--json")[1])
    assert {"format": "an edge list", "vertices": 30, "edges": 90}.items() <= document.items()
    for words, said in (
        ((tmp_path / "g",), "is already there; give the name of a new folder"),
        ((tmp_path / "no" / "g",), "does not exist; create it first"),
        ((tmp_path / "w", "--features", "16"), "a width of stand-in features"),
    ):
        code, _, err = gnnplan("convert", w.csv(tmp_path), *words)
        assert code == 2 and said in err


def test_a_plan_holds_all_files_that_it_was_made_of(tmp_path, gnnplan, monkeypatch):
    """It may be run from another folder."""
    extras_npy(tmp_path)
    w.csv(tmp_path)
    monkeypatch.chdir(tmp_path)
    words = ("--graph", "edges.csv", "--labels", "y.npy", "--split", "split.npz", "--ranks", "2")
    options = ("--features", "x.npy", "--hidden", "8", "--strategy", "graph_parallel", "--json")
    code, out, _ = gnnplan("plan", *words, *options)
    assert code == 0
    monkeypatch.chdir("/")
    source = json.loads(out)["graph"]["source"]
    assert load(source).stats.hash == load(reference(tmp_path, w.ALL)).stats.hash
