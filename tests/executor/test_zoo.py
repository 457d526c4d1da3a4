"""A zoo of users' modules of PyG and DGL: each is carried and equals itself, or is refused by name.

Nothing is compared with us alone. The proof of a module is held against a graph that it has not
seen, and a training on two ranks against torch's own of the module itself, in one process."""

from __future__ import annotations

import importlib
import os
import re
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from ranks import Case, Ranks, with_fields
from torch import Tensor
from torch.nn import functional as F

from gnnplan.executor.layers.layer import Drop
from gnnplan.executor.modules.bind import shape_of
from gnnplan.executor.modules.prove import Shared, Small, prove
from gnnplan.executor.modules.read import GraphFields, UserModule, read, with_module
from gnnplan.executor.modules.structure import dgl_graph, edge_index_of
from gnnplan.planner.gnn.workload import Workload
from gnnplan.planner.graph.graph import Graph, Whole
from gnnplan.planner.graph.load import load
from gnnplan.planner.vocabulary.errors import SpecError

FEATURES, CLASSES = 12, 4  # of the graph `rough`
UNSEEN = 89  # vertices of a graph on which no module was looked at
HERE = Path(__file__).parent
KEEPERS = ("zoo", "zoo_dgl")
NAMES = [
    f"{keeper} {name}"
    for keeper in KEEPERS
    for name in re.findall(
        r"^@needs\(.*\)\n(?:class|def) (\w+)", (HERE / f"{keeper}.py").read_text(), re.M
    )
]
# of every way to be cut one: dropout on edges, fields, batch norm, DGL, several hops, own messages
TRAINED = (
    "zoo CoraGAT",
    "zoo WeightedGCN",
    "zoo DeeperGCN",
    "zoo EntityRGCN",
    "zoo PointNet",
    "zoo TiedWeights",
    "zoo TutorialGAT",
    "zoo ResGated",
    "zoo_dgl Gin",
    "zoo_dgl UserWeighted",
)


def keeper_of(name: str) -> tuple[ModuleType, str]:
    """The file that has a module, and the module's own name."""
    keeper, own = name.split()
    os.environ.setdefault("DGLBACKEND", "pytorch")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # at import, the libraries' own
        pytest.importorskip(
            "dgl" if keeper == "zoo_dgl" else "torch_geometric", exc_type=ImportError
        )
        return importlib.import_module(keeper), own


def shapes_of(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Fields of vertices and of edges that a module needs."""
    keeper, own = keeper_of(name)
    fields, zoo = keeper.FIELDS[own], keeper_of("zoo KipfGCN")[0]
    every = zoo.VERTEX, zoo.EDGE
    vertex, edge = ({n: shape for n, shape in some.items() if n in fields} for some in every)
    return vertex, edge


def verdict(name: str, directed: bool) -> str:
    """'carried', or the words of a refusal. Any other error is a fault, Unfit at last too."""
    vertex, edge = shapes_of(name)
    graph = GraphFields(FEATURES, CLASSES, directed, False, vertex, edge)
    keeper, own = keeper_of(name)
    try:
        user = read(f"{HERE / keeper.__name__}.py:{own}", Workload(dtype="float64"), graph)
    except SpecError as refused:
        return str(refused).partition(f" {own}: ")[2]
    if pieces := user.pieces:  # else our own layers are taken
        prove(user.module, pieces, Small(UNSEEN, FEATURES, vertex, edge, directed, pieces.loops))
    return "carried"


@pytest.mark.parametrize(
    ("directed", "names"),
    [
        pytest.param(False, NAMES[::3], id="every third"),
        pytest.param(False, NAMES, id="all", marks=pytest.mark.nightly),
        pytest.param(True, NAMES, id="edges one way", marks=pytest.mark.nightly),
    ],
)
@pytest.mark.timeout(300)
def test_every_module_is_carried_or_refused_as_it_should_be(
    directed: bool, names: list[str]
) -> None:
    counts: Counter[str] = Counter()
    wrong = {}
    for name in names:
        keeper, own = keeper_of(name)
        words, started = keeper.REFUSALS.get(own, "carried"), time.perf_counter()
        found = verdict(name, directed)
        kind = "carried" if found == "carried" else "refused"
        counts[kind] += 1
        print(f"{name:32} {time.perf_counter() - started:5.2f} s  {found}")
        if words not in found:
            wrong[name] = f"{found} (expected: {words})"
    print(dict(counts))
    assert not wrong
    assert counts["carried"] > len(names) / 2 and len(NAMES) > 100


# -- training --------------------------------------------------------------------------------------


def fields_of(name: str, graph: Graph, folder: Path) -> str:
    """A file of numbers for the fields that a module needs; '': it needs none."""
    vertex, edge = shapes_of(name)
    draw, stats = np.random.default_rng(11), graph.stats
    arrays = {f"vertex {n}": (stats.vertices, *sizes) for n, (sizes, *_) in vertex.items()}
    arrays |= {f"edge {n}": (stats.edges, *sizes) for n, (sizes, *_) in edge.items()}
    if not arrays:
        return ""
    kinds = {f"vertex {n}": kind for n, (_, kind, _) in vertex.items()}
    kinds |= {f"edge {n}": kind for n, (_, kind, _) in edge.items()}
    values = {
        n: draw.integers(0, 2, size) if "i" in kinds[n] else draw.random(size) + 0.25
        for n, size in arrays.items()
    }
    np.savez(folder / f"{name}.npz", **values)
    return str(folder / f"{name}.npz")


def of_file(name: str, graph: Graph, workload: Workload) -> UserModule:
    """The module as the command line reads it."""
    keeper, own = keeper_of(name)
    file = HERE / f"{keeper.__name__}.py"
    stats = graph.stats
    shapes = [
        {n: shape_of(v) for n, v in some.items()}
        for some in (graph.vertex_fields, graph.edge_fields)
    ]
    return read(
        f"{file}:{own}", workload, GraphFields(stats.features, stats.classes, False, False, *shapes)
    )


def by_torch(
    name: str, graph: Graph, workload: Workload, epochs: int
) -> tuple[list[float], Callable[[Any], Tensor]]:
    """Losses of the module itself in one process, and logits that it evaluates with a state."""
    user = of_file(name, graph, workload)
    module, pieces = user.module, user.pieces
    assert pieces is not None
    whole = Whole(graph.indptr, graph.indices, graph.edge_fields, pieces.loops)
    edges = edge_index_of(whole)
    on = {f"vertex {n}": tensor_of(v) for n, v in graph.vertex_fields.items()}
    of_edges = {n: tensor_of(v) for n, v in graph.edge_fields.items()}
    on |= {"vertex x": tensor_of(graph.features()), "edge_index": edges}
    on |= {f"edge {n}": v for n, v in of_edges.items()}
    if "g" in pieces.binding.inputs:
        on["g"] = dgl_graph(whole, edges, of_edges, None)
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    optimizer = torch.optim.Adam(trained, lr=workload.lr)
    train, y = torch.from_numpy(np.array(graph.train)), torch.from_numpy(np.array(graph.y))
    losses = []
    for epoch in range(epochs):
        with Shared(pieces, pieces.training, whole, Drop(0.0, workload.seed, epoch)):
            out = pieces.binding.call(module.train(), on)
        loss = F.cross_entropy(out[train], y[train])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())

    def logits(state: Any) -> Tensor:
        if state is not None:
            module.load_state_dict(state)
        with torch.no_grad():
            out: Tensor = pieces.binding.call(module.eval(), on)
        return out

    return losses, logits


def tensor_of(values: np.ndarray) -> Tensor:
    tensor = torch.from_numpy(np.array(values))
    return tensor.double() if tensor.is_floating_point() else tensor


MODES: dict[str, dict[str, Any]] = {
    "graph_parallel": {},
    "data_parallel": {"mode": "mini", "fanout": "full"},
}


def assert_trains_as_torch(
    name: str, graphs: dict[str, str], folder: Path, run_ranks: Ranks
) -> None:
    """Ten epochs of Adam, in float64, by graph_parallel and data_parallel on two ranks."""
    graph = load(graphs["rough"])
    assert isinstance(graph, Graph)
    file = fields_of(name, graph, folder)
    graph = with_fields(graph, file)
    epochs = 10
    losses: list[float] = []
    for strategy, mode in MODES.items():
        batch = {"batch": graph.stats.train_vertices} if mode else {}
        workload = Workload(dtype="float64", lr=0.01, **mode, **batch)
        user = of_file(name, graph, workload)
        if mode and user.fields["norm"] == "batch":
            continue  # its moments are of the rows that the batch needs, and not of all
        if user.pieces is None:
            pytest.skip("our own layers are taken, which test_user_modules.py compares")
        if not losses:
            losses, logits = by_torch(name, graph, workload, epochs)
            trained = logits(None)
        case = Case(
            strategy,
            graphs["rough"],
            with_module(workload, user, ()).model_dump(),
            epochs=epochs,
            fields=file,
        )
        (result,) = run_ranks(2, [case])
        assert result.losses == pytest.approx(losses, rel=1e-5), strategy
        found = logits(result.weights)
        torch.testing.assert_close(found, trained, rtol=1e-5, atol=1e-5, msg=strategy)
        last = result.metrics[-1]
        for mask, split in ((graph.val, "val"), (graph.test, "test")):
            right = found.argmax(1) == torch.from_numpy(np.array(graph.y))
            accuracy = right[torch.from_numpy(np.array(mask))].double().mean().item()
            assert last[f"{split}_accuracy"] == pytest.approx(accuracy), strategy


@pytest.mark.processes
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n in TRAINED else (pytest.mark.nightly,)) for n in NAMES],
)
def test_two_ranks_train_a_module_as_torch_does(
    name: str, graphs: dict[str, str], tmp_path: Path, run_ranks: Ranks
) -> None:
    keeper, own = keeper_of(name)
    if own in keeper.REFUSALS:
        pytest.skip("it is refused")
    assert_trains_as_torch(name, graphs, tmp_path, run_ranks)
