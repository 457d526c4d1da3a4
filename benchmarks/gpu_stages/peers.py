"""The full-batch epoch of one rank beside PyG's and DGL's, on the same device."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from gnnplan.executor.ranks.rank import open_rank
from gnnplan.executor.strategies import open_worker
from gnnplan.planner.gnn.workload import Workload
from gnnplan.planner.graph.graph import Graph
from gnnplan.planner.graph.load import load
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies import parse
from gpu_stages import question
from gpu_stages.clock import whole_s
from gpu_stages.kernels import imported
from gpu_stages.record import LeftOut, Record, Row, Setting

SYNTHETIC = "synthetic:community?vertices={}&edges={}&features=128&classes=16&seed=0"
GRAPHS = ((20_000, 1_000_000), (200_000, 4_000_000))
MODELS = ("gcn", "sage")
LR = 0.01


def run(setting: Setting, record: Record) -> None:
    device = setting.torch_device
    for vertices, edges in ((200, 2_000),) if setting.small else GRAPHS:
        for model in MODELS:
            for by in (ours, pyg, pyg_edges, dgl):
                what = f"{model} on {vertices} vertices by {by.__name__}"
                work = partial(_epoch, setting, device, by, vertices, edges, model)
                record.attempt(what, work)


def _epoch(
    setting: Setting,
    device: torch.device,
    by: Callable[..., Callable[[], Any]],
    vertices: int,
    edges: int,
    model: str,
) -> Row:
    graph = load(SYNTHETIC.format(vertices, edges))
    assert isinstance(graph, Graph)
    hidden = 8 if setting.small else 256
    torch.manual_seed(0)
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    epoch = by(setting, device, graph, model, hidden)
    seconds = whole_s(device, epoch, setting.small)
    memory = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    return {
        "by": by.__name__,
        "model": model,
        "vertices": vertices,
        "edges": edges,
        "hidden": hidden,
        "epoch_s": seconds,
        "memory_bytes": memory,
    }


def ours(
    setting: Setting, device: torch.device, graph: Graph, model: str, hidden: int
) -> Callable[[], None]:
    """graph_parallel(narrow=True): what one rank of a plan does."""
    workload = Workload(**question.workload(setting, model=model, hidden=hidden, dropout=0.0))
    problem = Problem(graph.stats, graph, workload, question.cluster(setting, 1))
    rank = open_rank(on_cpu=device.type == "cpu")
    rank.recording = False
    strategy = parse("graph_parallel(narrow=True)").settle(problem)
    worker = open_worker(rank, problem, strategy)
    learner = worker.open_learner()
    steps = itertools.count()

    def epoch() -> None:
        step = next(steps)
        learner.zero()
        worker.step(step)
        learner.update(step)

    return epoch


def _widths(graph: Graph, hidden: int) -> list[tuple[int, int]]:
    widths = [graph.stats.features, hidden, hidden, graph.stats.classes]
    return list(itertools.pairwise(widths))


def _training(
    device: torch.device, graph: Graph, layers: torch.nn.ModuleList, edges: object, first: bool
) -> Callable[[], None]:
    """An epoch as the libraries' examples have it. first: edges are a layer's first argument."""
    layers = layers.to(device)
    x = torch.tensor(graph.x, device=device)
    y = torch.tensor(graph.y, device=device).long()
    train = torch.tensor(graph.train, device=device).nonzero()[:, 0]
    optimizer = torch.optim.Adam(layers.parameters(), lr=LR)

    def apply(layer: torch.nn.Module, h: Tensor) -> Tensor:
        return layer(edges, h) if first else layer(h, edges)

    def epoch() -> None:
        h = x
        for layer in layers[:-1]:
            h = apply(layer, h).relu()
        loss = F.cross_entropy(apply(layers[-1], h)[train], y[train])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return epoch


def pyg(
    setting: Setting, device: torch.device, graph: Graph, model: str, hidden: int
) -> Callable[[], None]:
    """PyG on a torch.sparse CSR matrix, its quickest way without extensions."""
    from gnnplan.executor.layers.kernels.aggregation import no_beta_warning

    imported("torch_geometric")
    with no_beta_warning():
        edges = torch.sparse_csr_tensor(
            torch.tensor(graph.indptr).long(),
            torch.tensor(graph.indices).long(),
            torch.ones(len(graph.indices)),
            (graph.stats.vertices,) * 2,
            check_invariants=False,
        ).to(device)
    return _training(device, graph, _pyg_layers(graph, model, hidden), edges, first=False)


def pyg_edges(
    setting: Setting, device: torch.device, graph: Graph, model: str, hidden: int
) -> Callable[[], None]:
    """PyG on an edge index: a row per edge."""
    imported("torch_geometric")
    readers = torch.arange(graph.stats.vertices).repeat_interleave(
        torch.tensor(graph.indptr).diff().long()
    )
    edges = torch.stack([torch.tensor(graph.indices).long(), readers]).to(device)
    return _training(device, graph, _pyg_layers(graph, model, hidden), edges, first=False)


def _pyg_layers(graph: Graph, model: str, hidden: int) -> torch.nn.ModuleList:
    from torch_geometric.nn import GCNConv, SAGEConv

    kind = {
        "gcn": partial(GCNConv, cached=True),
        "sage": SAGEConv,
    }[model]
    return torch.nn.ModuleList(kind(a, b) for a, b in _widths(graph, hidden))


def dgl(
    setting: Setting, device: torch.device, graph: Graph, model: str, hidden: int
) -> Callable[[], None]:
    """DGL as its documentation has it; GCN on the graph with self-loops."""
    library = imported("dgl")
    convolutions = imported("dgl.nn")
    edges = library.graph(
        ("csc", (torch.tensor(graph.indptr).long(), torch.tensor(graph.indices).long(), [])),
        num_nodes=graph.stats.vertices,
    )
    if model == "gcn":
        edges = library.add_self_loop(edges)
    try:
        edges = edges.to(device)
    except Exception as error:  # DGLError: a build without CUDA
        raise LeftOut(f"DGL {library.__version__} cannot use this device ({error})") from error
    edges.create_formats_()
    kind = {
        "gcn": convolutions.GraphConv,
        "sage": partial(convolutions.SAGEConv, aggregator_type="mean"),
    }[model]
    layers = torch.nn.ModuleList(kind(a, b) for a, b in _widths(graph, hidden))
    return _training(device, graph, layers, edges, first=True)
