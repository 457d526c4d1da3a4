"""Every format of a graph, from the file of its library to trained weights in that library's layers.

A library writes a directed graph (`written.py`) and reads it again. Beside it gnnplan plans the same
file and trains on two ranks. Compared with GraphSAGE of DGL or PyG, trained by torch on what the
library has read: the losses of all epochs, and the logits of the weights that the ranks leave. What
a format lacks comes from .npy files. `-rP` prints a row per format, as docs/reference/formats.md
has them."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.io
import scipy.sparse as sp
import torch
import written
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F
from written import CLASSES, EDGES, GRAPH, MASKS, WIDTH, N, ids, quiet

import gnnplan
from gnnplan.executor.modules.live import loaded as kept
from gnnplan.executor.modules.nets import net_of
from gnnplan.executor.modules.parameters import Parameters
from gnnplan.executor.ranks.rank import Rank
from gnnplan.executor.strategies.graph_parallel import worker_on
from gnnplan.planner.evidence.recorded import read_run
from gnnplan.planner.graph import formats
from gnnplan.planner.problem.problem import with_ranks
from gnnplan.planner.strategies.layerwise.exchange import ExchangeOptions
from gnnplan.testing.ranks import Case, Ranks

EPOCHS, HIDDEN, LR = 3, 16, 0.05
TABLE = Path(__file__).parents[2] / "docs" / "reference" / "formats.md"


@dataclass
class Theirs:
    """A graph as its library has read it. None: the format does not hold it."""

    edges: Any  # a DGLGraph, or an edge_index [2, E]
    x: Tensor | None = None
    y: Tensor | None = None
    masks: dict[str, Tensor] | None = None


# -- how the libraries read ------------------------------------------------------------------------


def dgl_loads(path: Path) -> Theirs:
    graphs, _ = quiet("dgl").load_graphs(str(path))
    return dgl_has(graphs[0])


def dgl_has(graph: Any) -> Theirs:
    data = graph.ndata
    masks = {mask: data[mask].bool() for mask in MASKS}  # files of DGL have no booleans
    return Theirs(graph, data["feat"], data["label"], masks)


def pyg_has(data: Any) -> Theirs:
    masks = {mask: data[mask].bool() for mask in MASKS if mask in data}
    return Theirs(data.edge_index, data.get("x"), data.get("y"), masks or None)


def torch_loads(path: Path) -> Theirs:
    return pyg_has(torch.load(path, weights_only=False))


def pyg_dataset_loads(path: Path) -> Theirs:
    quiet("torch_geometric")
    data, _, kind = torch.load(path, weights_only=False)
    return pyg_has(kind.from_dict(data))


def ogb_reads(folder: Path) -> Theirs:
    """By ogb's functions where ogb is installed, else by numpy."""
    raw = folder / "raw"
    try:
        with_ogb = importlib.import_module("ogb.io.read_graph_raw")
    except ImportError:
        if (raw / "data.npz").is_file():
            found = dict(np.load(raw / "data.npz"))
            y = np.load(raw / "node-label.npz")["node_label"]
        else:
            found = {"edge_index": np.loadtxt(raw / "edge.csv.gz", int, delimiter=",").T}
            found["node_feat"] = np.loadtxt(raw / "node-feat.csv.gz", np.float32, delimiter=",")
            y = np.loadtxt(raw / "node-label.csv.gz")
    else:
        binary = (raw / "data.npz").is_file()
        read = with_ogb.read_binary_graph_raw if binary else with_ogb.read_csv_graph_raw
        (found,) = read(str(raw))
        y = (
            np.load(raw / "node-label.npz")["node_label"]
            if binary
            else np.loadtxt(raw / "node-label.csv.gz")
        )
    (split,) = (folder / "split").iterdir()
    names = ("train", "valid", "test")
    if (split / "split_dict.pt").is_file():
        lists = torch.load(split / "split_dict.pt")
    else:
        lists = {name: np.loadtxt(split / f"{name}.csv.gz", int) for name in names}
    masks = {mask: of_ids(lists[name]) for mask, name in zip(MASKS, names, strict=True)}
    edges, x = (torch.from_numpy(found[name]) for name in ("edge_index", "node_feat"))
    return Theirs(edges, x, torch.from_numpy(y.ravel()).long(), masks)


def of_ids(ids: Any) -> Tensor:
    mask = torch.zeros(N, dtype=torch.bool)
    mask[torch.as_tensor(ids)] = True
    return mask


def graphbolt_reads(folder: Path) -> Theirs:
    """By numpy: DGL 1.1 has no GraphBolt. Its datasets are written by hand, as its guide says."""
    csv = folder / "edges.csv"
    edges = (
        np.loadtxt(csv, int, delimiter=",").T if csv.is_file() else np.load(folder / "edges.numpy")
    )
    y, masks = torch.full((N,), -1), {}
    for mask, name in zip(MASKS, ("train_set", "validation_set", "test_set"), strict=True):
        ids = np.load(folder / f"{name}_seeds.npy")
        masks[mask] = of_ids(ids)
        y[torch.from_numpy(ids)] = torch.from_numpy(np.load(folder / f"{name}_labels.npy"))
    graph = quiet("dgl").graph((edges[0], edges[1]), num_nodes=N)
    return Theirs(graph, torch.from_numpy(np.load(folder / "feat.npy")), y, masks)


def pyg_reads_graphsaint(folder: Path) -> Theirs:
    """By PyG's class of the dataset Flickr, which comes as such a folder."""
    raw = folder.parent / "dataset" / "raw"
    raw.parent.mkdir()
    raw.symlink_to(folder)
    quiet("torch_geometric")
    kind = importlib.import_module("torch_geometric.datasets").Flickr
    return pyg_has(kind(str(raw.parent))[0])


def of_table(table: np.ndarray) -> Theirs:
    """Of a table of edges [E, 2]."""
    return Theirs(torch.from_numpy(np.ascontiguousarray(table.T)).long())


def arrow_reads_csv(path: Path) -> Theirs:
    quiet("pyarrow")
    table = importlib.import_module("pyarrow.csv").read_csv(path)
    return of_arrow(table, "source", "target")


def arrow_reads_parquet(path: Path) -> Theirs:
    quiet("pyarrow")
    return of_arrow(importlib.import_module("pyarrow.parquet").read_table(path), "src", "dst")


def of_arrow(table: Any, *names: str) -> Theirs:
    return of_table(np.stack([table.column(name).to_numpy() for name in names], 1))


def pyg_takes_matrix(matrix: sp.spmatrix) -> Theirs:
    quiet("torch_geometric")
    utils = importlib.import_module("torch_geometric.utils")
    return Theirs(utils.from_scipy_sparse_matrix(sp.coo_matrix(matrix))[0])


def pyg_takes_networkx(graph: Any) -> Theirs:
    quiet("torch_geometric")
    return pyg_has(importlib.import_module("torch_geometric.utils").from_networkx(graph))


def numpy_reads(path: Path) -> Theirs:
    arrays = (
        {file.stem: np.load(file) for file in path.iterdir()} if path.is_dir() else np.load(path)
    )
    found = {name: torch.from_numpy(array) for name, array in arrays.items()}
    edges = torch.stack([found["src"], found["dst"]])
    return Theirs(edges, found["x"], found["y"], {mask: found[mask] for mask in MASKS})


# -- the formats -----------------------------------------------------------------------------------


def arrow_csv(folder: Path) -> Path:
    arrow, writer = quiet("pyarrow"), quiet("pyarrow.csv")
    columns = {"weight": np.ones(90), "target": GRAPH["dst"], "source": GRAPH["src"]}
    writer.write_csv(arrow.table(columns), folder / "edges.csv")
    return folder / "edges.csv"


def pyg_dataset(folder: Path) -> Path:
    """As InMemoryDataset leaves it in processed/."""
    quiet("torch_geometric")
    dataset = importlib.import_module("torch_geometric.data").InMemoryDataset
    dataset.save([written.pyg_data()], folder / "data.pt")
    return folder / "data.pt"


def own_folder(folder: Path) -> Path:
    for name, array in GRAPH.items():
        np.save(folder / f"{name}.npy", array)
    return folder


def ogb_saved(folder: Path) -> Path:
    """By ogb's DatasetSaver, which writes a binary folder beside `folder` and moves it."""
    quiet("ogb")
    saver = importlib.import_module("ogb.io").DatasetSaver("ogbn-small", False, 1, str(folder))
    graph = {"edge_index": EDGES, "num_nodes": N, "node_feat": GRAPH["x"]}
    saver.save_graph_list([graph])
    saver.save_target_labels(GRAPH["y"][:, None])
    parts = zip(("train", "valid", "test"), MASKS, strict=True)
    saver.save_split({part: torch.from_numpy(ids(mask)) for part, mask in parts}, "time")
    return Path(saver.dataset_dir)


@dataclass
class Format:
    """Who writes a graph, who reads it."""

    by: str  # written by
    write: Callable[[Path], Any]  # into a folder: the path, or the object
    reader: str  # read by
    read: Callable[[Any], Theirs]


def made(make: Callable[[], Any]) -> Callable[[Path], Any]:
    """What `make` makes, for whom no folder is needed."""
    return lambda _: make()


FORMATS = {
    "DGL `.bin`": Format("`dgl.save_graphs`", written.dgl_bin, "`dgl.load_graphs`", dgl_loads),
    "`DGLGraph` object": Format("`dgl.graph`", made(written.dgl_graph), "itself", dgl_has),
    "PyG `.pt` of a `Data`": Format("`torch.save`", written.pyg_pt, "`torch.load`", torch_loads),
    "PyG `processed/data.pt`": Format(
        "`InMemoryDataset.save`", pyg_dataset, "`Data.from_dict`", pyg_dataset_loads
    ),
    "PyG `Data` object": Format("`Data`", made(written.pyg_data), "itself", pyg_has),
    "OGB folder, `csv.gz`": Format(
        "hand, as downloaded", written.ogb_text, "`ogb`, or NumPy", ogb_reads
    ),
    "OGB folder, binary": Format(
        "hand, as downloaded", written.ogb_binary, "`ogb`, or NumPy", ogb_reads
    ),
    "OGB folder, saved": Format("ogb's `DatasetSaver`", ogb_saved, "`ogb`", ogb_reads),
    "GraphBolt folder, CSV": Format(
        "hand, by its guide", written.graphbolt_csv, "numpy, `dgl.graph`", graphbolt_reads
    ),
    "GraphBolt folder, NumPy": Format(
        "hand, by its guide", written.graphbolt_numpy, "numpy, `dgl.graph`", graphbolt_reads
    ),
    "GraphSAINT folder": Format(
        "SciPy, NumPy, json", written.graphsaint, "PyG's `Flickr`", pyg_reads_graphsaint
    ),
    "edge list, CSV": Format(
        "`pyarrow.csv.write_csv`", arrow_csv, "`pyarrow.csv.read_csv`", arrow_reads_csv
    ),
    "edge list, TSV": Format(
        "hand, as SNAP's",
        written.tsv,
        "`numpy.loadtxt`",
        lambda path: of_table(np.loadtxt(path, int)),
    ),
    "edge list, `.csv.gz`": Format(
        "`numpy.savetxt`",
        written.csv_gz,
        "`numpy.loadtxt`",
        lambda path: of_table(np.loadtxt(path, int, delimiter=",")),
    ),
    "edge list, Parquet": Format(
        "`pyarrow.parquet.write_table`",
        written.parquet,
        "`pyarrow.parquet.read_table`",
        arrow_reads_parquet,
    ),
    "MatrixMarket": Format(
        "`scipy.io.mmwrite`",
        written.matrix_market,
        "`scipy.io.mmread`",
        lambda path: pyg_takes_matrix(scipy.io.mmread(path)),
    ),
    "SciPy sparse `.npz`, CSR": Format(
        "`scipy.sparse.save_npz`",
        written.scipy_csr,
        "`scipy.sparse.load_npz`",
        lambda path: pyg_takes_matrix(sp.load_npz(path)),
    ),
    "SciPy sparse `.npz`, COO": Format(
        "`scipy.sparse.save_npz`",
        written.scipy_coo,
        "`scipy.sparse.load_npz`",
        lambda path: pyg_takes_matrix(sp.load_npz(path)),
    ),
    "SciPy sparse object": Format(
        "`scipy.sparse.coo_matrix`", made(written.matrix), "itself", pyg_takes_matrix
    ),
    "NetworkX GraphML": Format(
        "`networkx.write_graphml`",
        written.graphml,
        "`networkx.read_graphml`",
        lambda path: pyg_takes_networkx(written.nx.read_graphml(path)),
    ),
    "NetworkX object": Format(
        "`networkx.DiGraph`", made(written.networkx_graph), "itself", pyg_takes_networkx
    ),
    "`edge_index` in `.pt`": Format(
        "`torch.save`",
        written.edge_index_pt,
        "`torch.load`",
        lambda path: Theirs(torch.load(path, weights_only=True)),
    ),
    "`edge_index` in `.npy`": Format(
        "`numpy.save`",
        written.edge_index_npy,
        "`numpy.load`",
        lambda path: of_table(np.load(path).T),
    ),
    "`edge_index` object": Format("`torch.tensor`", made(written.edge_index), "itself", Theirs),
    "gnnplan's `.npz`": Format("`numpy.savez`", written.npz, "`numpy.load`", numpy_reads),
    "gnnplan's folder": Format("`numpy.save`", own_folder, "`numpy.load`", numpy_reads),
}
IN_THE_SUITE = ("edge list, CSV", "PyG `.pt` of a `Data`")


# -- the same GraphSAGE, here and there ------------------------------------------------------------


def dgl_sage() -> nn.Module:
    sage = quiet("dgl") and importlib.import_module("dgl.nn").SAGEConv

    class Sage(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = sage(WIDTH, HIDDEN, "mean", activation=F.relu)
            self.second = sage(HIDDEN, CLASSES, "mean")

        def forward(self, g: Any, x: Tensor) -> Tensor:
            return self.second(g, self.first(g, x))

    return Sage()


def pyg_sage() -> nn.Module:
    sage = quiet("torch_geometric") and importlib.import_module("torch_geometric.nn").SAGEConv

    class Sage(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = sage(WIDTH, HIDDEN), sage(HIDDEN, CLASSES)

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return self.second(self.first(x, edge_index).relu(), edge_index)

    return Sage()


def logits_of(module: nn.Module, theirs: Theirs) -> Tensor:
    """The library's own logits, without the self-loop that we drop, in float64."""
    assert theirs.x is not None
    x = theirs.x.double()
    if isinstance(theirs.edges, Tensor):
        loops = importlib.import_module("torch_geometric.utils").remove_self_loops
        return module(x, loops(theirs.edges)[0])
    return module(quiet("dgl").remove_self_loop(theirs.edges), x)


def trained_there(module: nn.Module, theirs: Theirs) -> list[float]:
    """Losses of the library's own training."""
    assert theirs.y is not None and theirs.masks is not None
    optimizer = torch.optim.Adam(module.parameters(), lr=LR)
    train, losses = theirs.masks["train_mask"], []
    for _ in range(EPOCHS):
        loss = F.cross_entropy(logits_of(module, theirs)[train], theirs.y[train])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def our_logits(plan: gnnplan.Plan, state: dict[str, Tensor]) -> Tensor:
    """By one process, of the graph as we read it."""
    problem = replace(plan.problem, cluster=with_ranks(plan.problem.cluster, 1))
    net = net_of(problem.model, problem.workload)
    assert problem.workload.module
    file = Path(problem.workload.module.file)
    Parameters(state, kept(file.read_bytes()).places).fill(net)
    rank = Rank(0, 1, torch.device("cpu"), "gloo")
    return worker_on(rank, problem, problem.layout(), ExchangeOptions(), net=net).evaluate(0)


def extras(folder: Path, theirs: Theirs) -> dict[str, str]:
    """Files of what the format lacks, which the other side gets too."""
    given = {}
    if theirs.x is None:
        theirs.x = torch.from_numpy(GRAPH["x"])
        given["features"] = GRAPH["x"]
    if theirs.y is None:
        theirs.y = torch.from_numpy(GRAPH["y"])
        given["labels"] = GRAPH["y"]
    for name, array in given.items():
        np.save(folder / f"{name}.npy", array)
    files = {name: str(folder / f"{name}.npy") for name in given}
    if theirs.masks is None:
        theirs.masks = {mask: torch.from_numpy(GRAPH[mask]) for mask in MASKS}
        np.savez(folder / "split.npz", **{mask: GRAPH[mask] for mask in MASKS})
        files["split"] = str(folder / "split.npz")
    return files


def by_the_launcher(plan: gnnplan.Plan, out: Path) -> Path:
    """Ranks of their own, as users have them, and `validate`."""
    run = plan.run(out, epochs=EPOCHS)
    volume = run.validate().document["bytes"]
    assert volume["equal"] and volume["counted"] == volume["predicted"]
    return run.out


def by_forks(run_ranks: Ranks, plan: gnnplan.Plan, out: Path) -> Path:
    """Ranks that need not import torch, for the suite."""
    source, workload = plan.problem.stats.source, plan.workload.model_dump()
    case = Case("graph_parallel", source, workload, epochs=EPOCHS, directed=True)
    return run_ranks(2, [case])[0].out


def check(name: str, folder: Path, train: Callable[[gnnplan.Plan, Path], Path]) -> None:
    """From the library's file to logits; prints the format's row of the table."""
    form, place = FORMATS[name], folder / "written"
    place.mkdir()
    found = form.write(place)
    theirs = form.read(found)
    of_dgl = not isinstance(theirs.edges, Tensor)
    files = extras(folder, theirs)
    torch.manual_seed(3)
    module = dgl_sage() if of_dgl else pyg_sage()

    options = {"dtype": "float64", "lr": LR, "epochs": EPOCHS, "model": module}
    plan = gnnplan.plan(
        found, ranks=2, strategy="graph_parallel", directed=True, **files, **options
    )
    out = train(plan, folder / "run")
    metrics, ranks = read_run(out)

    counted = sum(sum(rank["bytes"].values()) for rank in ranks)
    assert counted == EPOCHS * plan.best.predicted["bytes_total"] > 0
    set_up = sum(sum(rank["setup_bytes"].values()) for rank in ranks)
    assert set_up == plan.best.predicted["setup_bytes"]

    before, there = logits_of(module.double(), theirs), copy.deepcopy(module)
    losses = trained_there(there, theirs)
    assert [row["loss"] for row in metrics] == pytest.approx(losses, rel=1e-9)
    state = load_file(out / "weights.safetensors")
    module.load_state_dict(state)
    with torch.no_grad():
        after = logits_of(module, theirs)
    assert (after - before).abs().max() > 0.1  # it has learnt something
    torch.testing.assert_close(after, logits_of(there, theirs), rtol=1e-5, atol=1e-5)
    ours = our_logits(plan, state)
    torch.testing.assert_close(ours, after, rtol=1e-5, atol=1e-5)

    layer = "DGL" if of_dgl else "PyG"
    apart = float((ours - after).abs().max())
    print(f"| {name} | {form.by} | {form.reader} | {layer} | {counted:,} | {apart:.0e} |")


@pytest.fixture
def own_runs(own_cache: Path) -> None:
    """Modules and objects are kept in a cache of the test's own."""


@pytest.mark.parametrize("name", IN_THE_SUITE)
def test_two_ranks_train_a_librarys_file_as_the_library_does(
    name: str, tmp_path: Path, own_runs: None, run_ranks: Ranks
) -> None:
    check(name, tmp_path, partial(by_forks, run_ranks))


@pytest.mark.nightly
@pytest.mark.processes
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", FORMATS)
def test_from_any_format_to_logits(name: str, tmp_path: Path, own_runs: None) -> None:
    check(name, tmp_path, by_the_launcher)


def test_the_guide_has_a_row_for_every_format() -> None:
    guide = TABLE.read_text()
    for name, form in FORMATS.items():
        assert f"| {name} | {form.by} | {form.reader} |" in guide, name


def test_every_reader_has_a_case(tmp_path: Path) -> None:
    """Who adds a reader adds a row."""
    kinds = {formats.PICKLE.name}  # is loaded for who trusts it, by `convert`
    for i, form in enumerate(FORMATS.values()):
        (tmp_path / str(i)).mkdir()
        found = form.write(tmp_path / str(i))  # skips where a library is not installed
        if isinstance(found, Path):
            kinds.add(formats.recognise(str(found)).name)
    assert kinds == {form.name for form in formats.FORMATS}
