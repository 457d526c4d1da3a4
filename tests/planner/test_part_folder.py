"""Folders of parts: what is read back is the graph, and what is damaged or half-written is told."""

import os
import resource
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from calls import call, rewritten, turn_a_bit
from nightly import at_night

import gnnplan
from gnnplan.api.arguments import ask
from gnnplan.planner.decision import plan as documents
from gnnplan.planner.graph.formats import recognise
from gnnplan.planner.graph.graph import Graph
from gnnplan.planner.graph.load import load
from gnnplan.planner.graph.part_folder import PartFolder, digest_of
from gnnplan.planner.graph.partition import edges_between, partition, undirected
from gnnplan.planner.ownership import parts
from gnnplan.planner.ownership.layout import Layout, reached
from gnnplan.planner.ownership.parts import PartLayout, write_parts
from gnnplan.planner.vocabulary.errors import OtherData, SpecError
from gnnplan.planner.vocabulary.files import folder_lock

GRAPH = "synthetic:community?vertices=2500&edges=9000&features=7&classes=3&seed=1"
N = 60
pytestmark = pytest.mark.usefixtures("own_cache")


def arrays(kind: str) -> dict[str, np.ndarray]:
    """A graph of N vertices, directed, with fields, of a kind of features or labels."""
    rng = np.random.default_rng(5)
    src, dst = rng.integers(0, N, (2, 400))
    x, y = rng.standard_normal((N, 6)), rng.integers(0, 4, N)
    if kind == "sparse":
        x *= rng.random((N, 6)) < 0.08
    if kind == "float64":
        x += 1e6
    if kind == "labels":
        y = (rng.random((N, 4)) < 0.4).astype(np.uint8)
    train = np.arange(N) % 3
    masks = {f"{name}_mask": train == i for i, name in enumerate(("train", "val", "test"))}
    fields = {"vertex.time": rng.random(N).astype(np.float32), "edge.w": rng.random((400, 2))}
    narrow = x if kind == "float64" else x.astype(np.float32)
    return {"src": src, "dst": dst, "x": narrow, "y": y, **masks, **fields}


def a_graph(tmp_path: Path, kind: str, directed: bool = False) -> Graph:
    if kind == "generated":
        return load(GRAPH)
    np.savez(tmp_path / "graph.npz", **arrays(kind))
    return load(str(tmp_path / "graph.npz"), directed)


def must_equal(ours: object, theirs: object, *names: str) -> None:
    for name in names:
        assert np.array_equal(getattr(ours, name), getattr(theirs, name)), name


def written(graph: Graph, folder: Path, parts: int = 3, method: str = "metis") -> Path:
    write_parts(graph, partition(graph, parts, method), method, 0, folder)
    return folder


def dense(x: object) -> np.ndarray:
    return np.asarray(x.toarray() if hasattr(x, "toarray") else x)


KINDS = [("generated", False), ("sparse", True), ("float64", False), ("labels", True)]


@pytest.mark.parametrize(("kind", "directed"), KINDS)
def test_a_folder_of_parts_and_its_layout_are_those_of_the_graph(tmp_path, kind, directed):
    graph = a_graph(tmp_path, kind, directed)
    some = np.random.default_rng(0).permutation(graph.stats.vertices)[:41]
    found = load(str(written(graph, tmp_path / "parts")))
    assert np.array_equal(found.neighbours(some), graph.neighbours(some))
    for name in ("x", "y", "train", "val", "test"):
        ours, theirs = getattr(found, name), getattr(graph, name)
        assert np.array_equal(dense(ours[some]), dense(theirs[some])), name
        assert ours.dtype == theirs.dtype and np.array_equal(dense(ours), dense(theirs)), name
    must_equal(found, graph, "indptr", "indices", "degree", "out_degree")
    for fields in ("vertex_fields", "edge_fields"):
        ours, theirs = getattr(found, fields), getattr(graph, fields)
        assert ours.keys() == theirs.keys()
        assert all(np.array_equal(ours[name], theirs[name]) for name in ours)
    assert found.stats.hash == graph.stats.hash and found.stats.nonzeros == graph.stats.nonzeros
    assert found.stats.notes[:-1] == graph.stats.notes
    assert "3 parts by metis (seed 0), cut of " in found.stats.notes[-1]
    assert all(reached(found, hops) == reached(graph, hops) for hops in (0, 2, 20))
    args = (0, 1, 1), 2, 1  # servers, layers, first_varying
    ours = PartLayout(found, found.cut.owner, *args)
    theirs = Layout(graph, partition(graph, 3), *args)
    targets = np.asarray(graph.train)
    for mine, other in ((ours, theirs), (ours.needed(targets), theirs.needed(targets))):
        assert np.array_equal(mine.preloaded(), other.preloaded())
        for layer in (1, 2):
            must_equal(mine.facts(layer), other.facts(layer), "rows", "sources", "edges", "halo")
            for rank in range(3):
                assert np.array_equal(mine.rows(rank, layer), other.rows(rank, layer))
                pieces = mine.piece(rank, layer), other.piece(rank, layer)
                must_equal(*pieces, "halo", "received", "rows", "local", "edges")
                for arrays in ("sent", "block"):
                    pair = (getattr(each, arrays)(rank, layer) for each in (mine, other))
                    assert all(np.array_equal(*one) for one in zip(*pair, strict=True))


def test_a_cut_is_used_for_as_many_parts_and_no_others(tmp_path):
    graph = load(GRAPH)
    owner = partition(graph, 3, "random", seed=8)
    write_parts(graph, owner, "random", 8, tmp_path / "parts")
    found = load(str(tmp_path / "parts"))
    assert np.array_equal(partition(found, 3, "random"), owner)
    assert np.array_equal(partition(found, 4, "random"), partition(graph, 4, "random"))
    assert np.array_equal(partition(found, 3, "metis"), partition(graph, 3, "metis"))


TWO_GPUS = {"servers": 1, "gpus_per_server": 2}
TWO_GPUS |= {"device": {"memory": "24GB", "gemm": "10TFLOP/s", "memory_bandwidth": "500GB/s"}}
TWO_GPUS |= {"intra_node": {"bandwidth": "2GB/s"}, "inter_node": {"bandwidth": "1GB/s"}}


@pytest.mark.parametrize(
    ("cluster", "options", "words"),
    [
        ("local", {"ranks": 2}, r"a part for each of 3 ranks.*--ranks asks for 2.*-k 2"),
        ("local", {"partitioner": "random"}, r"cut by hash, and --partitioner names random"),
        (TWO_GPUS, {}, r"a part for each of 3 ranks: --ranks 3 asks.*-k 2"),
        ("local", {"directed": True}, "its edges lost their direction"),
        ("local", {"task": "none"}, "takes no parameters; give them to gnnplan partition"),
    ],
)
def test_a_plan_has_a_rank_per_part(tmp_path, cluster, options, words):
    folder = str(written(load(GRAPH), tmp_path / "parts", method="hash"))
    problem = ask(folder, "local", None, model="gcn", layers=2).problem
    assert problem.ranks == 3 and problem.method == "hash"
    assert isinstance(problem.layout(), PartLayout)
    with pytest.raises(SpecError, match=words):
        ask(folder, cluster, None, **options)


@pytest.mark.parametrize("directed", [False, True])
def test_the_edges_between_vertices_are_those_of_the_graph(tmp_path, directed):
    """Of a folder of parts as of the graph."""
    graph = a_graph(tmp_path, "sparse", directed)
    rows = np.flatnonzero(np.random.default_rng(2).random(N) < 0.7)
    both = undirected(graph)
    ones = np.ones(len(both.indices), bool)
    expected = sp.csr_matrix((ones, both.indices, both.indptr), shape=(N, N))[rows][:, rows]
    for one in (graph, load(str(written(graph, tmp_path / "parts")), directed)):
        must_equal(edges_between(one, rows), expected, "indptr", "indices")
    assert edges_between(graph, rows[:0]).shape == (0, 0)


def test_chunks_of_parts_that_a_plan_has_found_are_looked_up(tmp_path):
    """A rank read the edges of all parts to find again in which chunks they were cut."""
    folder = written(load(GRAPH), tmp_path / "parts")
    planned, again = (ask(str(folder), "local", None, model="gcn").problem for _ in range(2))
    chunks = planned.chunked(2)
    for path in folder.glob("part*/indices.npy"):
        path.unlink()
    found = again.chunked(2)
    assert np.array_equal(found.owner, chunks.owner)
    assert all(np.array_equal(found.rows(c, 1), chunks.rows(c, 1)) for c in range(6))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("sparse", {"mode": "full"}),
        ("generated", {"mode": "mini", "batch": 512}),
        at_night("sparse", {"mode": "mini", "batch": 64, "task": "link"}),
    ],
)
def test_every_strategy_is_predicted_as_on_the_graph(tmp_path, kind, fields):
    graph = a_graph(tmp_path, kind)
    folder = written(graph, tmp_path / "parts", 2)
    asked = {"model": "sage", "layers": 2, "per": "epoch", **fields}
    whole = gnnplan.plan(graph.stats.source, ranks=2, **asked).table
    parts = gnnplan.plan(folder, **asked).table
    assert {row["gpus"] for row in (*whole, *parts)} == {2}
    assert [row["strategy"] for row in parts] == [row["strategy"] for row in whole]
    # a batch's rows are looked up in parts; epochs of 10^8 edges took 1.4 s of 10 for that
    most = 1.02 if asked["mode"] == "mini" else 1.0
    for ours, theirs in zip(parts, whole, strict=True):
        assert theirs["epoch_s"] <= ours["epoch_s"] <= most * theirs["epoch_s"]
    # ranks map a graph's file together, but each that samples gathers adjacency lists from parts;
    # link prediction gathers the edges that are not held out from both
    lists = 4 * graph.stats.edges + 8 * (graph.stats.vertices + 1)
    gathered = lists * (asked["mode"] == "mini" and "task" not in asked)
    for ours, theirs in zip(parts, whole, strict=True):
        assert ours["memory_bytes"] == theirs["memory_bytes"] + gathered


def test_a_plan_is_of_its_parts(tmp_path):
    """The same graph, cut anew under the same name, would leave ranks with others' halos."""
    graph, folder = load(GRAPH), tmp_path / "parts"
    written(graph, folder, 2)
    document = gnnplan.plan(folder, model="gcn", layers=2, strategy="graph_parallel").document
    assert documents.question(document).ranks == 2
    shutil.rmtree(folder)
    written(graph, folder, 4)
    with pytest.raises(OtherData, match="made for other parts"):
        documents.question(document)


def changed(path: Path, **fields: object) -> None:
    """A file of the first folders, which has no digest of its fields."""
    with rewritten(path) as document:
        document |= fields
        document.pop("digest", None)


def edited(what: str, value: object) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        with rewritten(folder / "parts.json") as document:
            of = document["graph"] if what in document["graph"] else document
            assert of[what] != value
            of[what] = value

    return edit


def many_vertices(folder: Path) -> None:
    edited("vertices", 2**31)(folder)
    changed(folder / "parts.json")


def test_parts_of_another_graph_are_refused(tmp_path):
    mine = written(load(GRAPH), tmp_path / "mine")
    other = written(load(GRAPH.replace("seed=1", "seed=2")), tmp_path / "other")
    shutil.rmtree(mine / "part1")
    shutil.copytree(other / "part1", mine / "part1")
    with pytest.raises(SpecError, match=r"part1: holds part 1 of another graph.*copy that one"):
        load(str(mine))
    shutil.rmtree(other / "part1")
    shutil.copytree(other / "part2", other / "part1")
    with pytest.raises(SpecError, match=r"part1: holds part 2 of this graph"):
        load(str(other))


BREAK: dict[str, tuple[Callable[[Path], object], str]] = {
    "no part": (lambda f: shutil.rmtree(f / "part2"), r"part2: part 2 of 3 is missing; copy it"),
    "no file": (lambda f: (f / "part1/y.npy").unlink(), r"part1/y.npy: cannot be read \(No such"),
    "no owner": (lambda f: (f / "owner.npy").unlink(), r"owner.npy: cannot be read \(No such"),
    "torn": (lambda f: os.truncate(f / "part0/x.npy", 999), r"x.npy: has 999 B, and [\d,]+ were"),
    "no JSON": (lambda f: (f / "parts.json").write_text("{"), r"parts.json: .*describes no parts"),
    "no part's": (lambda f: changed(f / "part0/part.json", edges=1), "is not what was written"),
    "later": (lambda f: changed(f / "parts.json", version=2), "is version 2 of such folders"),
    "more": (lambda f: changed(f / "parts.json", parts=4), "describes 3 parts and says 4"),
    "many": (many_vertices, r"2,147,483,648 vertices; ids of 32 bits reach"),
    "none": (lambda f: changed(f / "parts.json", parts=0, digests=[]), "describes 0 parts"),
    "no files": (lambda f: changed(f / "parts.json", files={}), "tells of no degree.npy"),
    # each of these was planned for, and the run ended in a traceback or trained something else
    "features": (edited("features", 77), r"parts.json: is not what was written \(its fields have"),
    "classes": (edited("classes", 2), "parts.json: is not what was written"),
    "edges": (edited("edges", 7), "parts.json: is not what was written"),
    "halo": (edited("halo", [1, 1, 1]), "parts.json: is not what was written"),
    "fewer edges": (lambda f: changed(f / "parts.json", edges=[1, 1, 1]), "have 3 edges, and its"),
    "fewer": (lambda f: changed(f / "parts.json", vertices=[1, 1, 1]), "have 3 vertices, and its"),
    "bits": (
        lambda f: turn_a_bit(f / "part1/indices.npy"),
        r"indices.npy: is damaged \(its digest",
    ),
    "x bits": (lambda f: turn_a_bit(f / "part1/x.npy"), r"x.npy: is damaged \(its digest"),
}


@pytest.mark.parametrize("what", BREAK)
def test_damaged_parts_are_refused(tmp_path, what):
    folder = written(load(GRAPH), tmp_path / "parts")
    spoil, said = BREAK[what]
    spoil(folder)
    with pytest.raises(SpecError, match=said):
        graph = load(str(folder))
        everyone = np.arange(graph.stats.vertices)
        graph.neighbours(everyone)
        graph.features(everyone)


def test_the_first_folders_which_have_no_digest_of_a_description_are_read(tmp_path):
    folder = written(load(GRAPH), tmp_path / "parts")
    for part in folder.glob("part?"):
        changed(part / "part.json")
    digests = [digest_of(folder / f"part{part}" / "part.json") for part in range(3)]
    changed(folder / "parts.json", digests=digests)
    assert np.array_equal(load(str(folder)).indices, load(GRAPH).indices)


@contextmanager
def files_of_at_most(nbytes: int) -> Iterator[None]:
    """As on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_ids_beyond_32_bits_are_refused_and_nothing_is_left(tmp_path, gnnplan):
    np.savez(tmp_path / "g.npz", src=np.array([0, 2**31]), dst=np.array([1, 1]))
    answer = gnnplan("partition", tmp_path / "g.npz", "-k 2 -o", tmp_path / "parts")
    assert answer.code == 2 and "2,147,483,64" in answer.err
    assert not list(tmp_path.glob("*parts*")) and not list(tmp_path.glob(".parts*"))


def test_a_full_disk_leaves_nothing_half_written_and_the_next_attempt_goes_on(tmp_path, gnnplan):
    """The third part's features are the largest file, for it has most vertices."""
    graph, folder = load(GRAPH), tmp_path / "parts"
    with files_of_at_most(5_000):
        answer = gnnplan("partition", GRAPH, "-k 3 --partitioner hash -o", folder)
    assert answer.code == 2 and "cannot be written (File too large)" in answer.err
    assert not list(tmp_path.glob("*parts*")) and not list(tmp_path.glob(".parts*"))
    owner = np.repeat(np.int32([0, 1, 2]), [500, 500, 1500])
    kept = "2 of 3 parts are kept in .* goes on from there"
    # features of 500 vertices take 14 kB, those of 1,500 42
    with files_of_at_most(20_000), pytest.raises(SpecError, match=kept):
        write_parts(graph, owner, "hash", 0, folder)
    assert not folder.exists()
    begun = tmp_path / ".parts.begun"
    assert sorted(os.listdir(begun)) == ["part0", "part1"]

    def times(at: Path) -> list[int]:
        return [(at / part / "x.npy").stat().st_mtime_ns for part in ("part0", "part1")]

    before = times(begun)
    write_parts(graph, owner, "hash", 0, folder)
    assert not begun.exists() and np.array_equal(load(str(folder)).indices, graph.indices)
    assert times(folder) == before


@pytest.mark.parametrize("end", ["SIGTERM", "Ctrl-C"])
def test_who_ends_a_partition_is_told_what_is_kept(tmp_path, monkeypatch, capsys, end):
    """SIGTERM, as of a cluster whose time is up, ended it without a word."""
    folder, write, before = tmp_path / "parts", parts._write_part, signal.getsignal(signal.SIGTERM)

    def ended(layout: Layout, part: int, *how: Any) -> object:
        if part == 2 and end == "SIGTERM":
            os.kill(os.getpid(), signal.SIGTERM)
        elif part == 2:
            raise KeyboardInterrupt
        return write(layout, part, *how)

    with monkeypatch.context() as patch:
        patch.setattr(parts, "_write_part", ended)
        if end == "SIGTERM":  # which the verb unwinds
            with pytest.raises(SystemExit, match="143"):
                call("partition", GRAPH, "-k 3 -o", folder)
        else:
            with pytest.raises(KeyboardInterrupt):
                written(load(GRAPH), folder)
    assert signal.getsignal(signal.SIGTERM) == before
    said = capsys.readouterr().err
    assert "2 of 3 parts are kept in" in said and "the same command goes on from there" in said
    assert not folder.exists()
    assert np.array_equal(load(str(written(load(GRAPH), folder))).indices, load(GRAPH).indices)


def test_parts_of_another_cut_are_not_gone_on_with(tmp_path):
    graph, folder = load(GRAPH), tmp_path / "parts"
    begun = tmp_path / ".parts.begun"
    shutil.copytree(written(graph, tmp_path / "earlier", 2), begun)
    (begun / "part1").rename(begun / "part7")  # of a cut into more
    (begun / ".part0.c0ffee00").mkdir()  # of a writer that was killed; both stayed in the folder
    written(graph, folder)
    assert PartFolder(str(folder)).about.parts == 3
    folders = sorted(path.name for path in folder.iterdir() if path.is_dir())
    assert folders == ["part0", "part1", "part2"]
    assert np.array_equal(load(str(folder)).indices, graph.indices)


def test_a_kept_part_that_is_damaged_is_written_again(tmp_path):
    """Its part.json alone was read: a folder was complete, and no run could read it."""
    graph, folder, begun = load(GRAPH), tmp_path / "parts", tmp_path / ".parts.begun"
    whole = written(graph, tmp_path / "whole", 5)
    shutil.copytree(whole, begun)
    os.truncate(begun / "part0/x.npy", 999)
    turn_a_bit(begun / "part1/ids.npy")
    (begun / "part2/y.npy").unlink()
    with rewritten(begun / "part3/part.json") as document:
        document["vertices"] += 1
    kept = (begun / "part4/x.npy").stat().st_ino
    written(graph, folder, 5)
    assert (folder / "part4/x.npy").stat().st_ino == kept
    for path in whole.rglob("*.*"):
        assert (folder / path.relative_to(whole)).read_bytes() == path.read_bytes(), path


def test_one_partition_at_a_time_writes_a_folder(tmp_path):
    """Two that began together removed each other's parts, and both failed."""
    folder, begun = tmp_path / "parts", tmp_path / ".parts.begun"
    begun.mkdir()
    busy = r"another gnnplan partition writes in .*; wait for its end"
    with folder_lock(begun, "another", "wait"), pytest.raises(SpecError, match=busy):
        written(load(GRAPH), folder)
    assert begun.exists() and not folder.exists()
    written(load(GRAPH), folder)
    assert not begun.exists()


def test_a_folder_of_parts_is_neither_converted_nor_written_over(tmp_path):
    """It was said to be of no format that is read."""
    folder = written(load(GRAPH), tmp_path / "parts")
    before = (folder / "parts.json").read_bytes()
    with pytest.raises(SpecError, match="is already there"):
        written(load(GRAPH), folder, 2)
    assert (folder / "parts.json").read_bytes() == before
    with pytest.raises(SpecError, match=r"is a folder of parts.*give the graph that it was cut of"):
        recognise(str(folder)).read(str(folder))


def test_a_task_of_plans_is_refused_as_that(tmp_path):
    """`--task link` was refused with the advice to use link."""
    with pytest.raises(SpecError, match="--task link is what a plan trains"):
        call("partition", GRAPH, "-k 2 --task link -o", tmp_path / "parts")
