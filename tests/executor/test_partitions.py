"""What other libraries' code reads of our partitions: the plan's assignment, rows and edges. And ranks
on a folder of parts open no rows of another part, and take little more than their own."""

import json
import shutil
import sys
import warnings
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from asked import edges_of
from calls import call, ended_well, planned, raising
from nightly import at_night

from gnnplan.executor.emit import partitions
from gnnplan.executor.layers.blocks import features
from gnnplan.executor.minibatch.share import share_of, targets_of
from gnnplan.planner.cluster.spec import Cluster
from gnnplan.planner.gnn.workload import Workload
from gnnplan.planner.graph.graph import Graph
from gnnplan.planner.graph.load import load
from gnnplan.planner.graph.partition import partition
from gnnplan.planner.ownership.parts import write_parts
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies import parse
from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.testing.ranks import Case

GRAPH = "synthetic:community?vertices=90&edges=600&features=5&classes=3&seed=1"
PLACEMENT = (0, 2, 3, 1)  # ranks 0 and 3 sit on server 0
DEVICE = {"memory": "24GB", "gemm": "10TFLOP/s", "memory_bandwidth": "500GB/s"}
LINKS = {"intra_node": {"bandwidth": "2GB/s"}, "inter_node": {"bandwidth": "1GB/s"}}
CLUSTER = Cluster.model_validate({"servers": 2, "gpus_per_server": 2, "device": DEVICE, **LINKS})


PARALLEL = parse("graph_parallel")


@pytest.fixture
def problem():
    graph = load(GRAPH)
    workload = Workload(model="gcn", layers=2, hidden=8)
    problem = Problem(graph.stats, graph, workload, CLUSTER, "metis", placement=PLACEMENT)
    with warnings.catch_warnings():  # of the libraries
        warnings.simplefilter("ignore")
        yield problem


def gpus(problem: Problem) -> np.ndarray:
    """The GPU of the rank that owns each vertex [N]."""
    return np.array(PLACEMENT)[partition(problem.graph, 4)]


def needed(name: str) -> ModuleType:
    try:
        return partitions.library(name)
    except SpecError as error:
        pytest.skip(str(error))


def test_dgl_reads_a_part_per_server_and_a_trainer_per_rank(problem, tmp_path):
    dgl = needed("dgl")
    assert partitions.distdgl(problem, PARALLEL, tmp_path / "parts") is None
    parts = [
        dgl.distributed.load_partition(str(tmp_path / "parts" / "graph.json"), server)
        for server in range(2)
    ]
    orig = np.concatenate([rows["_N/orig_id"].numpy() for _, rows, *_ in parts])  # by DGL's ids
    found = np.concatenate([rows["_N/trainer_id"].numpy() for _, rows, *_ in parts])
    assert np.array_equal(found, gpus(problem)[orig])
    edges: set[tuple[int, int]] = set()
    for server, (part, rows, _, book, *_) in enumerate(parts):
        inner = part.ndata["_ID"][part.ndata["inner_node"].bool()]
        assert (gpus(problem)[orig[inner]] // 2 == server).all()
        assert (book.nid2partid(inner) == server).all()
        graph = problem.graph
        for name, whole in {"feat": graph.x, "label": graph.y, "train_mask": graph.train}.items():
            assert np.array_equal(rows[f"_N/{name}"].numpy(), np.asarray(whole)[orig[inner]])
        own = part.edata["inner_edge"].bool()
        src, dst = (orig[part.ndata["_ID"][end[own]]].tolist() for end in part.edges())
        edges |= set(zip(src, dst, strict=True))
    assert edges == edges_of(problem.graph)


def test_pyg_reads_a_part_per_rank(problem, tmp_path):
    distributed = needed("torch_geometric.distributed")
    folder = tmp_path / "parts"
    assert partitions.pyg(problem, PARALLEL, folder) is None
    edges: list[tuple[int, int]] = []
    for part in range(4):
        store = distributed.LocalGraphStore.from_partition(str(folder), part)
        rows = distributed.LocalFeatureStore.from_partition(str(folder), part)
        assert np.array_equal(store.node_pb.numpy(), gpus(problem))
        ids = rows.get_global_id(group_name=None).numpy()
        assert sorted(ids) == np.flatnonzero(gpus(problem) == part).tolist()
        x = rows.get_tensor(group_name=None, attr_name="x").numpy()
        assert np.array_equal(x, problem.graph.x[ids])
        src, dst = store.get_edge_index(edge_type=None, layout="coo")
        assert (gpus(problem)[dst.numpy()] == part).all()
        edges += zip(src.tolist(), dst.tolist(), strict=True)
    assert len(edges) == len(set(edges)) and set(edges) == edges_of(problem.graph)
    assert np.array_equal(torch.load(folder / "label.pt").numpy(), problem.graph.y)
    assert np.array_equal(
        torch.load(folder / "split.pt")["train_mask"].numpy(), problem.graph.train
    )


@pytest.mark.processes
@pytest.mark.parametrize(
    ("name", "library"),
    [at_night("distdgl", "dgl"), ("pyg", "torch_geometric")],
)
def test_parts_of_others_are_read_again(problem, tmp_path, name, library):
    """The graph that was written, cut as it was; and so it can become a folder of our parts."""
    needed(library)
    folder = tmp_path / "parts"
    getattr(partitions, name)(problem, PARALLEL, folder)
    found, graph = load(str(folder)), problem.graph
    assert isinstance(found, Graph) and found.cut is not None
    assert found.stats.hash == graph.stats.hash
    assert not [note for note in found.stats.notes if "ignored" in note]  # they are all our own
    for array in ("indptr", "indices", "x", "y", "train", "val", "test"):
        assert np.array_equal(getattr(found, array), getattr(graph, array)), array
    assert np.array_equal(partition(found, 4), gpus(problem))
    write_parts(found, found.cut.owner, "metis", 0, tmp_path / "ours")
    ours = load(str(tmp_path / "ours"))
    assert isinstance(ours, Graph) and np.array_equal(partition(ours, 4), gpus(problem))
    part = {"distdgl": "part1/graph.dgl", "pyg": "part_1/graph.pt"}[name]
    (folder / part).unlink()
    with pytest.raises(SpecError, match=part):
        load(str(folder))


def test_what_fails_leaves_nothing(problem, tmp_path, monkeypatch):
    """And names the extra that is missing."""
    needed("torch_geometric")
    (tmp_path / "there").mkdir()
    with pytest.raises(SpecError, match="already there"):
        partitions.pyg(problem, PARALLEL, tmp_path / "there")
    # as torch says that the disk is full
    full = RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 832 vs 726")
    monkeypatch.setattr(torch, "save", raising(full))
    with pytest.raises(RuntimeError):
        partitions.pyg(problem, PARALLEL, tmp_path / "parts")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
    with pytest.raises(SpecError, match=r"cannot be written \(No space left on device\); free the"):
        partitions.pyg(problem, PARALLEL, tmp_path / "parts")
    assert [path.name for path in tmp_path.iterdir()] == ["there"]
    monkeypatch.setitem(sys.modules, "torch_geometric.data", None)
    with pytest.raises(SpecError, match=r"pip install 'gnnplan\[pyg\]'"):
        partitions.pyg(problem, PARALLEL, tmp_path / "parts")


def test_a_library_that_partitions_by_itself_is_refused(problem, tmp_path, monkeypatch):
    """A later version might not ask for the assignment where we give ours."""
    monkeypatch.setattr(needed("dgl").distributed, "partition_graph", lambda *_, **__: None)
    with pytest.raises(SpecError, match="this version of dgl partitions graphs in another way"):
        partitions.distdgl(problem, PARALLEL, tmp_path / "parts")
    assert not list(tmp_path.iterdir())


def test_a_strategy_that_owns_no_vertices_says_so(problem):
    assigned, told = partitions.assignment(problem, parse("gnnpipe(stages=4)"))
    assert np.array_equal(assigned, gpus(problem))
    assert told and "gnnpipe gives no rank vertices of its own" in told
    assigned, told = partitions.assignment(problem, parse("granndis").settle(problem))
    assert told is None and len(np.unique(assigned)) == 4


pytestmark = pytest.mark.timeout(170)

FULL = {"model": "gcn", "layers": 3, "hidden": 8, "dropout": 0.5, "lr": 0.05, "seed": 3}


def set_up(tmp_path: Path, name: str, source: str, dropout: float) -> tuple[list[int], float]:
    """Memory of each rank's process at the end of its set-up, and what a part takes [B]."""
    folder, plan, out = (tmp_path / f"{name}{end}" for end in ("", ".json", ".out"))
    call("partition", source, "-k 2 -o", folder)
    model = f"--strategy graph_parallel --layers 2 --hidden 8 --dropout {dropout}"
    planned(plan, "--graph", folder, model)
    ended_well(sys.executable, "-m", "gnnplan", "run", plan, "--epochs", "1", "--out", out)
    ranks = [json.loads((out / f"rank{rank}.json").read_text()) for rank in range(2)]
    use = json.loads(plan.read_text())["best"]["predicted"]["memory"]
    return [rank["setup_rss_bytes"] for rank in ranks], use["features"] + use["graph"]


@pytest.mark.nightly  # that a rank reads its own part only is tested every time
@pytest.mark.processes
@pytest.mark.parametrize(
    ("dropout", "features", "edges"),
    [
        pytest.param(0.0, 700, 400_000, id="aggregated once"),
        pytest.param(0.5, 700, 400_000, id="not"),
        pytest.param(0.5, 8, 5_000_000, id="edges"),
    ],
)
def test_the_set_up_of_a_rank_takes_little_more_than_its_part(tmp_path, dropout, features, edges):
    """Edges were there several times, as 64-bit numbers: 2.1 of a part's size."""
    sizes = "features={}&classes=4&seed=0&vertices={}&edges={}"
    small = "synthetic:community?" + sizes.format(8, 100, 400)
    large = "synthetic:community?" + sizes.format(features, 60_000, edges)
    (nothing, _), (taken, part) = (
        set_up(tmp_path, name, source, dropout)
        for name, source in (("small", small), ("large", large))
    )
    assert part > 50e6
    for before, after in zip(nothing, taken, strict=True):
        assert after - before <= 1.3 * part


def test_a_rank_reads_its_own_part_only(graphs, tmp_path):
    """The others' files are gone when it looks."""
    whole, folder = load(graphs["rough"]), tmp_path / "parts"
    write_parts(whole, partition(whole, 3), "metis", 0, folder)
    problem, me, device = Case("", str(folder), FULL).problem(3), 1, torch.device("cpu")
    for path in folder.glob("part[02]/*.npy"):
        path.unlink()
    share = share_of(problem.layout(), me, ["gcn"] * 3, problem.workload)
    targets_of(problem, share, device)
    rows = features(problem.data, share.own, problem.workload, device)
    assert np.array_equal(rows.numpy(), whole.features(share.own))
    assert set(share.own.tolist()) == set(np.flatnonzero(partition(whole, 3) == me).tolist())
