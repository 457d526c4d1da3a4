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
from pathlib import Path

import networkx as nx
import numpy as np
import pytest
import scipy.io
import scipy.sparse as sp
from calls import allocations
from written import (
    ALL,
    EDGES,
    GRAPH,
    MASKS,
    ON_EDGES,
    ON_VERTICES,
    TYPE,
    WIDTH,
    YEAR,
    N,
    built,
    commented,
    csv,
    csv_gz,
    csv_with_names,
    dgl_bin,
    dgl_graph,
    edge_index,
    edge_index_npy,
    edge_index_pt,
    from_object,
    graphbolt_csv,
    graphbolt_numpy,
    graphml,
    graphsaint,
    ids,
    matrix,
    matrix_market,
    networkx_graph,
    npz,
    ogb_binary,
    ogb_text,
    old_pt,
    own_folder,
    parquet,
    pyg_adjacency,
    pyg_data,
    pyg_processed,
    pyg_pt,
    quiet,
    scipy_coo,
    scipy_csr,
    tensors,
    tsv,
    zipped,
)

from gnnplan.planner.graph import formats, npy
from gnnplan.planner.graph.arrays import collect
from gnnplan.planner.graph.formats import Extras, convert, parts_of, tables
from gnnplan.planner.graph.graph import Graph
from gnnplan.planner.graph.load import load, source_of
from gnnplan.planner.graph.parts import Parts, small_arrays
from gnnplan.planner.vocabulary.errors import SpecError

starts = pytest.mark.processes
AT_NIGHT = [starts, pytest.mark.nightly]
COLUMNS = {"edge_type": TYPE[:, None], "node_year": YEAR[:, None]}  # as OGB has them
VALUES = GRAPH | COLUMNS | ON_EDGES | ON_VERTICES
WHOLE = {*ALL, *ON_EDGES, *ON_VERTICES}
OF_OGB = {*ALL, "edge_attr", "edge_type", "node_year"}
OF_NETWORKX = {*ALL, "edge_weight", "edge_type", "year"}
# writer -> what its file holds beside the edges
WRITERS = [
    *((writer, WHOLE) for writer in (pyg_pt, pyg_processed, pyg_adjacency, npz, own_folder)),
    *((writer, WHOLE) for writer in (graphbolt_csv, graphbolt_numpy)),
    *((writer, OF_OGB) for writer in (ogb_text, ogb_binary)),
    *((writer, ALL) for writer in (old_pt, graphsaint)),
    (graphml, OF_NETWORKX - {"x"}),
    *((writer, {"edge_weight", "edge_type"}) for writer in (csv_with_names, parquet)),
    (commented, {"edge_type"}),
    *((writer, {"edge_weight"}) for writer in (matrix_market, scipy_csr, scipy_coo)),
    *((writer, set()) for writer in (csv, tsv, csv_gz, edge_index_pt, edge_index_npy)),
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
    assert graph.edge_fields.keys() == held & ON_EDGES.keys()
    assert graph.vertex_fields.keys() == held & {*ON_VERTICES, "node_year"}
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
    assert arrays.keys() & ALL == held & ALL
    for name in held & ALL:
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
    parts = parts_of(str(dgl_bin(place)))
    graph = built(parts, directed=True)
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
    graph = dgl_graph()
    graph.ndata["label"] = graph.ndata["label"] * 10 + 1990
    quiet("dgl").save_graphs(str(tmp_path / "graph.bin"), [graph])
    assert load(source_of(str(tmp_path / "graph.bin"), task="regression")).stats.numbers


def test_every_reader_has_a_file(tmp_path):
    """Who adds a reader adds a writer; those of partitions are tested with them."""
    read = {formats.PICKLE.name}  # is loaded for who trusts it, by `convert`
    writers = [*(writer for writer, _ in WRITERS), dgl_bin]
    for number, write in enumerate(writers):
        (tmp_path / str(number)).mkdir()
        read.add(formats.recognise(str(write(tmp_path / str(number)))).name)
    assert read == {form.name for form in formats.FORMATS if "parts" not in form.name}


OBJECTS = [
    *((dgl_graph, WHOLE), (pyg_data, WHOLE), (networkx_graph, OF_NETWORKX)),
    *((matrix, {"edge_weight"}), (lambda: matrix().tocsc(), {"edge_weight"})),
    *((edge_index, set()), (lambda: EDGES, set())),
]


@pytest.mark.parametrize("make, held", OBJECTS)
def test_an_object_is_the_graph_of_its_file(tmp_path, make, held):
    expected = load(reference(tmp_path, held), directed=True).stats
    graph = from_object(make(), directed=True)
    assert graph.stats.hash == expected.hash
    must_have_fields(graph, held)
    convert(make(), tmp_path / "mapped")
    assert load(str(tmp_path / "mapped"), directed=True).stats.hash == expected.hash


def test_no_object_of_ours_is_an_error():
    for wrong in ({"edges": []}, "text", [[0, 1], [1, 0]]):
        with pytest.raises(SpecError, match=r"a graph is a DGLGraph, a PyG Data"):
            from_object(wrong)
    with pytest.raises(SpecError, match=r"save edge_index\.T"):
        from_object(EDGES.T)
    with pytest.raises(SpecError, match=r"square"):
        from_object(sp.eye(3, 4))


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
    data = importlib.import_module("torch_geometric.data").Data(
        x=torch.ones(N, 2), edge_index=torch.from_numpy(EDGES), edge_attr=torch.rand(90, 1)
    )
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
    for saved in (data, data.to_dict()):
        torch.save(saved, path)
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
    for write in (csv, csv_with_names, tsv, csv_gz):
        arrays = arrays_of(parts_of(str(write(tmp_path))))
        assert np.array_equal(arrays["src"], GRAPH["src"])
        assert np.array_equal(arrays["dst"], GRAPH["dst"])
    (tmp_path / "long.csv").write_text("0,1\n0," + "1" * 200 + "\n")
    with pytest.raises(SpecError, match=r"long\.csv:2: a line has more than 64 characters"):
        arrays_of(parts_of(str(tmp_path / "long.csv")))


# -- what a bare edge list lacks -------------------------------------------------------------------


def lists(folder: Path, ending: str) -> Path:
    split = folder / "split"
    split.mkdir()
    for part, mask in zip(("train", "valid", "test"), MASKS, strict=True):
        if ending == "npy":
            np.save(split / f"{part}.npy", ids(mask))
        else:
            zipped(split / f"{part}.csv.gz", ids(mask)[:, None])
    return split


def extras_npy(folder: Path) -> tuple[Path, Path, Path]:
    np.save(folder / "x.npy", GRAPH["x"])
    np.save(folder / "y.npy", GRAPH["y"])
    np.savez(folder / "split.npz", **{mask: GRAPH[mask] for mask in MASKS})
    return folder / "x.npy", folder / "y.npy", folder / "split.npz"


def extras_text(folder: Path) -> tuple[Path, Path, Path]:
    names = ",".join(f"f{i}" for i in range(WIDTH))
    np.savetxt(folder / "x.csv", GRAPH["x"], "%.17g", ",", header=names, comments="")
    np.savetxt(folder / "y.txt", GRAPH["y"], "%d")
    return folder / "x.csv", folder / "y.txt", lists(folder, "csv.gz")


def extras_torch(folder: Path) -> tuple[Path, Path, Path]:
    torch, data = quiet("torch"), tensors("x", "y")
    parts = zip(("train", "valid", "test"), map(ids, MASKS), strict=True)
    data["split"] = {part: torch.from_numpy(chosen) for part, chosen in parts}
    paths = [folder / f"{name}.pt" for name in data]
    for path, held in zip(paths, data.values(), strict=True):
        torch.save(held, path)
    return tuple(paths)


def extras_json(folder: Path) -> tuple[Path, Path, Path]:
    x, _, _ = extras_npy(folder)
    (folder / "y.json").write_text(json.dumps(dict(enumerate(GRAPH["y"].tolist()))))
    roles = {role: ids(m).tolist() for role, m in zip(("tr", "va", "te"), MASKS, strict=True)}
    (folder / "role.json").write_text(json.dumps(roles))
    return x, folder / "y.json", folder / "role.json"


def extras_lists(folder: Path) -> tuple[Path, Path, Path]:
    """A list of labels was taken for names of columns above no rows."""
    x, y, roles = extras_json(folder)
    y.write_text(json.dumps(GRAPH["y"].tolist()))
    return x, y, roles


@pytest.mark.parametrize("make", [extras_npy, extras_text, extras_torch, extras_json, extras_lists])
def test_files_add_what_an_edge_list_lacks(tmp_path, make):
    odd = tmp_path / "a & b=c %41 ü"  # as names of files may be
    odd.mkdir()
    features, labels, split = map(str, make(odd))
    path = str(csv(tmp_path))
    expected = load(reference(tmp_path, ALL)).stats
    graph = load(source_of(path, features, labels, split))
    assert graph.stats.hash == expected.hash
    convert(path, tmp_path / "mapped", Extras(features, labels, split))
    assert load(str(tmp_path / "mapped")).stats.hash == expected.hash


def test_sparse_features_are_added_and_converted(tmp_path):
    x = sp.random(N, 200, 0.02, "csr", np.float32, 1)
    sp.save_npz(tmp_path / "x.npz", x)
    path = str(csv(tmp_path))
    graph = load(source_of(path, str(tmp_path / "x.npz")))
    assert sp.issparse(graph.x) and np.array_equal(graph.features(), x.toarray())
    convert(path, tmp_path / "mapped", Extras(str(tmp_path / "x.npz")))
    assert load(str(tmp_path / "mapped")).stats.hash == graph.stats.hash


def test_a_width_makes_stand_in_features_and_a_task_of_none_stand_in_labels(tmp_path):
    source = source_of(str(csv(tmp_path)), "7", task="none")
    graph = load(source)
    assert graph.features().shape == (N, 7)
    assert (graph.y >= 0).all() and graph.stats.classes == 16 and graph.train.any()
    assert any(note.startswith("STAND-IN LABELS") for note in graph.stats.notes)
    assert load(source).stats.hash == graph.stats.hash
    assert load(str(csv(tmp_path))).stats.classes == 0  # nothing is made up that was not asked for
    with pytest.raises(SpecError, match=r"the graph has its own \(3 classes\); drop --task none"):
        load(source_of(reference(tmp_path, ALL), task="none"))
    with pytest.raises(SpecError, match=r"task must be none"):
        load(source_of(str(csv(tmp_path)), task="links"))


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
    "no lists": ("split", lambda d: d.write(b"{}"), "a split needs train, val"),
    "binary junk": ("features", lambda d: d.write(b"\0\xff" * 40), "is no .npy"),
    "empty": ("labels", lambda d: d.write(b""), "vertices"),
}


@pytest.mark.parametrize("word, write, words", BAD_EXTRAS.values(), ids=BAD_EXTRAS)
def test_bad_files_beside_an_edge_list_are_named(tmp_path, word, write, words):
    np.save(tmp_path / "y.npy", GRAPH["y"])
    with open(tmp_path / "extra", "wb") as stream:
        write(stream)
    given = {word: str(tmp_path / "extra")}
    if word == "split":
        given["labels"] = str(tmp_path / "y.npy")
    if word != "features" or words == "same number of vertices":
        np.save(tmp_path / "good.npy", GRAPH["x"])
        given.setdefault("features", str(tmp_path / "good.npy"))
    if words == "same number of vertices":
        given["labels"] = str(tmp_path / "y.npy")
    path = str(csv(tmp_path))
    with pytest.raises(SpecError, match=words):
        load(source_of(path, **given))
    with pytest.raises(SpecError, match=words):
        convert(path, tmp_path / "mapped", Extras(**given))
    assert not (tmp_path / "mapped").exists()


def test_the_split_of_ogbs_saver_is_read(tmp_path):
    """A dictionary of tensors; of arrays it would need code of the file."""
    root = ogb_binary(tmp_path)
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
    root = ogb_text(tmp_path)
    other = Path(shutil.copytree(root / "split" / "time", root / "split" / "random"))
    zipped(other / "train.csv.gz", ids("train_mask")[:1, None])
    with pytest.raises(SpecError, match=f"2 splits, random, time; name one, as --split {other}"):
        load(str(root))
    assert load(source_of(str(root), split=str(other))).stats.train_vertices == 1


def test_what_a_graph_has_is_not_replaced(tmp_path):
    features, *_ = extras_npy(tmp_path)
    with pytest.raises(SpecError, match=r"has its own features, so --features .* leave it out"):
        load(source_of(reference(tmp_path, ALL), str(features)))


# -- bad input -------------------------------------------------------------------------------------


def put(content: bytes | str, name: str = "bad") -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
        return folder / name

    return write


def cut(write: Callable[[Path], Path], share: float = 0.6) -> Callable[[Path], Path]:
    """The file that `write` writes, without its end."""

    def shorten(folder: Path) -> Path:
        path = write(folder)
        raw = path.read_bytes()
        path.write_bytes(raw[: int(share * len(raw))])
        return path

    return shorten


def changed(write: Callable[[Path], Path], file: str, content: object) -> Callable[[Path], Path]:
    """The folder that `write` writes, with one file replaced, or removed (None)."""

    def change(folder: Path) -> Path:
        path = write(folder)
        if content is None:
            (path / file).unlink()
        elif isinstance(content, np.ndarray):
            if file.endswith(".gz"):
                zipped(path / file, content)
            else:
                np.save(path / file, content)
        elif isinstance(content, tuple):
            old, new = content
            (path / file).write_text((path / file).read_text().replace(old, new))
        else:
            (path / file).write_text(str(content))
        return path

    return change


def claiming(shape: tuple[int, ...], dtype: str = "<i8") -> bytes:
    """A .npy of 64 bytes whose header claims another shape."""
    body = io.BytesIO()
    header = {"descr": dtype, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(body, header)
    return body.getvalue() + bytes(64)


def lying_sparse(folder: Path) -> Path:
    sp.save_npz(folder / "good.npz", matrix().tocsr())
    members = unpacked(folder / "good.npz") | {"data.npy": claiming((2**50,), "<f8")}
    return packed(folder / "lie.npz", members)


def broken_pointers(folder: Path) -> Path:
    """scipy believes pointers, and would write outside of its memory."""
    np.savez(
        folder / "bad.npz",
        format=b"csr",
        shape=np.array([N, N]),
        data=np.ones(4),
        indices=np.zeros(4, np.int32),
        indptr=np.array([0, 2**30, *[4] * (N - 1)], np.int32),
    )
    return folder / "bad.npz"


def expanded_tensor(folder: Path) -> Path:
    """A file of one kilobyte whose tensor claims a petabyte."""
    torch = quiet("torch")
    torch.save(torch.zeros(1, dtype=torch.int64).expand(2, 2**46), folder / "wide.pt")
    return folder / "wide.pt"


def texts(folder: Path) -> Path:
    """convert ended in a traceback."""
    np.savez(folder / "bad.npz", src=[0], dst=[1], y=["a", "b"])
    return folder / "bad.npz"


def hostile_pt(folder: Path) -> Path:
    quiet("torch").save(Hostile(), folder / "hostile.pt")
    return folder / "hostile.pt"


class Hostile:
    """Its pickle makes a file when it is loaded."""

    def __reduce__(self) -> tuple:
        return exec, ("open('/tmp/gnnplan-hostile', 'w')",)


def instead(
    write: Callable[[Path], Path], file: str, make: Callable[[Path], object]
) -> Callable[[Path], Path]:
    """What `write` writes, with `make` in the place of one file ('': of all)."""

    def replace(folder: Path) -> Path:
        path = write(folder)
        (path / file).unlink()
        make(path / file)
        return path

    return replace


def sparse_of(**members: object) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        given = {"format": b"coo", "shape": [9, 9], "row": [0, 1], "col": [1, 2], "data": [1, 1]}
        np.savez(folder / "bad.npz", **(given | members))
        return folder / "bad.npz"

    return write


def longer(write: Callable[[Path], Path], file: str, size: int) -> Callable[[Path], Path]:
    """The file with a hole behind it, which takes no place on the disk."""

    def lengthen(folder: Path) -> Path:
        path = write(folder)
        os.truncate(path / file, size)
        return path

    return lengthen


def repeated_row(folder: Path) -> Path:
    """A few bytes whose tensor claims gigabytes: not too many for memory."""
    torch = quiet("torch")
    wide = torch.zeros(1).expand(N, 2**24)
    torch.save({"edge_index": edge_index(), "x": wide}, folder / "wide.pt")
    return folder / "wide.pt"


def two_dgl_graphs(folder: Path) -> Path:
    quiet("dgl").save_graphs(str(folder / "two.bin"), [dgl_graph(), dgl_graph()])
    return folder / "two.bin"


def lying_dgl(folder: Path) -> Path:
    """The number of graphs is 2**60: DGL's C++ throws what nobody catches, and its process ends."""
    raw = bytearray(dgl_bin(folder).read_bytes())
    raw[24:32] = struct.pack("<Q", 2**60)
    (folder / "lie.bin").write_bytes(raw)
    return folder / "lie.bin"


def several_graphs(folder: Path) -> Path:
    torch = quiet("torch")
    slices = {"x": torch.tensor([0, 4, 9])}
    torch.save(({"edge_index": edge_index()}, slices), folder / "several.pt")
    return folder / "several.pt"


def tuple_of_tensors(folder: Path) -> Path:
    torch = quiet("torch")
    torch.save((edge_index(), torch.ones(9, 4), torch.ones(9)), folder / "tuple.pt")
    return folder / "tuple.pt"


MORE = "".join(f'<!ENTITY {b} "{f"&{a};" * 16}">' for a, b in ("ab", "bc", "cd", "de", "ef", "fg"))
BOMB = f'<!DOCTYPE x [<!ENTITY a "ten bytes.">{MORE}]><graphml>&g;</graphml>'  # 168 MB


def ogb(name: str, content: object) -> Callable[[Path], Path]:
    array = None if content is None else np.array(content)
    return changed(ogb_text, f"raw/{name}.csv.gz", array)


def metadata(old: str, new: str) -> Callable[[Path], Path]:
    return changed(graphbolt_csv, "metadata.yaml", (old, new))


def mtx(text: str, kind: str = "coordinate") -> Callable[[Path], Path]:
    return put(f"%%MatrixMarket matrix {kind} real general\n{text}")


BAD = {
    "ogb: a pipe": (instead(ogb_text, "raw/node-feat.csv.gz", os.mkfifo), "node-feat.*Is a pipe"),
    "ogb: empty features": (
        instead(ogb_text, "raw/node-feat.csv.gz", Path.touch),
        "ogbn_small: x: holds no rows of features; give a row for each vertex",
    ),
    "ogb: an empty part": (
        instead(ogb_text, "split/time/valid.csv.gz", Path.touch),
        "time: val: holds no vertex; repeat the download",
    ),
    "ogb: too many vertices": (
        ogb("num-node-list", [[2**31 - 1]]),
        "same number of vertices, are for (30, )+2,147,483,647; give each a row",
    ),
    "graphbolt: a link to itself": (
        instead(graphbolt_csv, "edges.csv", lambda path: path.symlink_to(path)),
        "Symlink loop|Too many levels",
    ),
    "graphsaint: a pipe": (instead(graphsaint, "adj_full.npz", os.mkfifo), "adj_full.*Is a pipe"),
    "graphsaint: piped roles": (instead(graphsaint, "role.json", os.mkfifo), "role.*Is a pipe"),
    "graphsaint: a large list": (
        longer(graphsaint, "class_map.json", 10**10),
        r"class_map\.json: larger than 1\.07 GB",
    ),
    "graphml: large": (longer(graphml, "", 10**12), "NetworkX's objects of it would take"),
    "npz: fractions": (sparse_of(row=[0.5, 1.0]), "row: must hold integers, has dtype float64"),
    "npz: negative": (sparse_of(row=[0, -1]), "cannot be read as a sparse matrix"),
    "npz: diagonals": (
        sparse_of(format=b"dia", shape=[2**31 - 1] * 2, data=[[1.0]], offsets=[0]),
        "holds diagonals; save it with save_npz",
    ),
    "pt: one row many times": (repeated_row, r"x: shape .* needs 2,013,265,920 B but only 4 B"),
    "ogb: a split of nothing": (
        changed(ogb_text, "split/time/train.csv.gz", None),
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
    "gz: cut off": (cut(csv_gz), r"edges\.csv\.gz: cannot be read"),
    "mtx: cut off": (cut(matrix_market), r"graph\.mtx:?.*(header says 90 entries|must be)"),
    "mtx: not square": (mtx("2 3 1\n1 1 1\n"), "square, this one is 2 x 3"),
    "mtx: dense": (mtx("1 1\n1\n", "array"), "in coordinates, this one is array"),
    "mtx: petabytes": (mtx(f"9 9 {10**15}\n1 1 1\n"), "header says 1,000,000,000,000,000"),
    "mtx: ids from 0": (mtx("2 2 1\n0 1 1\n"), "ids of MatrixMarket count from 1, found 0; add 1"),
    "konect: ids from 0": (put("% sym\n1 0\n"), "ids of KONECT count from 1, found 0; add 1"),
    "parquet: cut off": (cut(parquet), "cannot be read as Parquet"),
    "npz: labels of text": (texts, "y: must hold .*, has dtype <U1"),
    "npz: petabytes": (lying_sparse, "would take"),
    "npz: pointers": (broken_pointers, "cannot be read as a sparse matrix"),
    "npy: petabytes": (put(claiming((2, 2**50))), "needs .* B but only 64 B are stored"),
    "npy: three columns": (put(claiming((2, 2, 2))), r"shape \[2, edges\], has \[2, 2, 2\]"),
    "npy: pickled": (put(claiming((2, 4), "|O")), "pickled Python objects, which are never loaded"),
    "pt: code": (hostile_pt, "only code of the file can make"),
    "pt: cut off": (cut(edge_index_pt), "cannot be read"),
    "pt: petabytes": (expanded_tensor, "would take"),
    "pt: several": (several_graphs, "holds several graphs"),
    "pt: a tuple": (tuple_of_tensors, "holds a tuple of Tensor, Tensor, Tensor; save a dictionary"),
    "pickle": (put(pickle.dumps(Hostile())), r"is a pickle.*--trust"),
    "graphml: entities": (put(BOMB), r"cannot be read as GraphML \(ParseError: limit on input"),
    "graphml: cut off": (cut(graphml), "cannot be read"),
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
        r"metadata\.yaml:\d+: graph\.nodes\.0\.num: must be a whole number, is text",
    ),
    "graphbolt: petabytes": (
        metadata("num: 30", f"num: {10**15}"),
        "whole number of 0 to 2,147,483",
    ),
    "graphbolt: fewer labels": (
        changed(graphbolt_csv, "train_set_labels.npy", np.zeros(3, np.int64)),
        r"must be as many as seeds \(10\), are 3",
    ),
    "graphbolt: links": (
        changed(graphbolt_csv, "train_set_seeds.npy", np.zeros((10, 2), np.int64)),
        "a list of vertex ids",
    ),
    "graphbolt: a file gone": (changed(graphbolt_csv, "feat.npy", None), "feat.*cannot be read"),
    "graphsaint: classes of strangers": (
        changed(graphsaint, "class_map.json", json.dumps({"77": 1})),
        r"class_map\[0\]: vertex ids must lie in",
    ),
    "graphsaint: no roles": (changed(graphsaint, "role.json", "[]"), "this is list; write"),
}
DGL = {  # its process takes seconds to start
    "dgl: cut off": (cut(dgl_bin), "cannot be read as a DGL graph|cannot be read as DGL's"),
    "dgl: two graphs": (two_dgl_graphs, "holds 2 graphs, one is needed"),
    "dgl: petabytes": (lying_dgl, r"DGL ended with|cannot be read as a DGL graph"),
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


def packed(path: Path, members: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, raw in members.items():
            archive.writestr(name, raw)
    return path


def unpacked(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def packed_npz(folder: Path) -> Path:
    return packed(folder / "g.npz", {"src.npy": zeros(), "dst.npy": zeros()})


def packed_sparse(folder: Path) -> Path:
    path = scipy_coo(folder)
    return packed(path, unpacked(path) | {"row.npy": zeros()})


def packed_ogb(folder: Path) -> Path:
    root = ogb_binary(folder)
    data = root / "raw" / "data.npz"
    packed(data, unpacked(data) | {"node_feat.npy": zeros((N, 2**16))})
    return root


def packed_pt(folder: Path) -> Path:
    """torch does not compress, and unpacks what others did."""
    quiet("torch").save(quiet("torch").zeros((2, 2**20), dtype=int), folder / "plain.pt")
    return packed(folder / "g.pt", unpacked(folder / "plain.pt"))


def packed_text(folder: Path) -> Path:
    (folder / "edges.csv.gz").write_bytes(gzip.compress(b"0,1\n" * 2**20))
    return folder / "edges.csv.gz"


def zeros(shape: tuple[int, ...] = (2**19,)) -> bytes:
    body = io.BytesIO()
    np.save(body, np.zeros(shape, np.int64))
    return body.getvalue()


@pytest.mark.parametrize("write", [packed_npz, packed_sparse, packed_ogb, packed_pt, packed_text])
def test_what_was_packed_to_fill_memory_is_not_unpacked(tmp_path, monkeypatch, write):
    path = write(tmp_path)
    monkeypatch.setattr(npy, "MOST_SWOLLEN", 1 << 20)  # for small files; real ones are larger
    with pytest.raises(SpecError, match=r"unpacks to .* MB from .* kB.*store it uncompressed"):
        load(str(path))


def test_vertices_that_an_edge_list_claims_take_no_memory_to_convert(tmp_path):
    (tmp_path / "edges.csv").write_text("0,1\n0,2147483640\n")
    with allocations() as most:
        assert convert(str(tmp_path / "edges.csv"), tmp_path / "g")[:2] == (2147483641, 2)
        assert most() < 64e6


def test_a_pickle_is_loaded_only_for_who_trusts_it(tmp_path):
    path = tmp_path / "graph.gpickle"
    path.write_bytes(pickle.dumps(networkx_graph()))
    with pytest.raises(SpecError, match=r"runs whatever code is in it.*convert .* FOLDER --trust"):
        convert(str(path), tmp_path / "mapped")
    convert(str(path), tmp_path / "mapped", trust=True)
    expected = load(reference(tmp_path, OF_NETWORKX)).stats.hash
    assert load(str(tmp_path / "mapped")).stats.hash == expected


@pytest.mark.parametrize("absent, write", [("pyarrow.parquet", parquet), ("torch", edge_index_pt)])
def test_an_absent_library_is_named_with_pips_command(tmp_path, monkeypatch, absent, write):
    path = str(write(tmp_path))
    monkeypatch.setitem(sys.modules, absent, None)
    with pytest.raises(SpecError, match=rf"{absent} is needed for this format and .*pip install"):
        load(path)


# -- the command -----------------------------------------------------------------------------------


def test_convert_says_what_it_found_and_where_it_is(tmp_path, gnnplan):
    features, labels, split = extras_npy(tmp_path)
    given = ("--features", features, "--labels", labels, "--split", split)
    code, out, _ = gnnplan("convert", csv(tmp_path), tmp_path / "g", *given)
    assert code == 0 and "(an edge list): 30 vertices, 90 edges" in out
    assert f"next: gnnplan plan --graph {tmp_path / 'g'}" in out
    document = json.loads(gnnplan("convert", csv(tmp_path), tmp_path / "h", "--json")[1])
    told = {"format": "an edge list", "vertices": 30, "edges": 90}
    assert told.items() <= document.items()
    for words, said in (
        ((tmp_path / "g",), "is already there; give the name of a new folder"),
        ((tmp_path / "no" / "g",), "does not exist; create it first"),
        ((tmp_path / "w", "--features", "16"), "a width of stand-in features"),
    ):
        code, _, err = gnnplan("convert", csv(tmp_path), *words)
        assert code == 2 and said in err


def test_a_plan_holds_all_files_that_it_was_made_of(tmp_path, gnnplan, monkeypatch):
    """It may be run from another folder."""
    extras_npy(tmp_path)
    csv(tmp_path)
    monkeypatch.chdir(tmp_path)
    words = ("--graph", "edges.csv", "--labels", "y.npy", "--split", "split.npz", "--ranks", "2")
    options = ("--features", "x.npy", "--hidden", "8", "--strategy", "graph_parallel", "--json")
    code, out, _ = gnnplan("plan", *words, *options)
    assert code == 0
    monkeypatch.chdir("/")
    source = json.loads(out)["graph"]["source"]
    assert load(source).stats.hash == load(reference(tmp_path, ALL)).stats.hash
