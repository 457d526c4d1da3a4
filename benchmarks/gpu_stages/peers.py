"""The full-batch epoch of one rank beside PyG's and DGL's, on the same device.

All begin with our weights, so that their losses must agree."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from gnnplan.executor.layers.models import Net
from gnnplan.executor.ranks.rank import open_rank
from gnnplan.executor.strategies import open_worker
from gnnplan.planner.gnn.workload import Workload
from gnnplan.planner.graph.graph import Graph
from gnnplan.planner.graph.load import load
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies import parse
from gpu_stages import question
from gpu_stages.clock import whole_s
from gpu_stages.kernels import csr, imported
from gpu_stages.record import LeftOut, Record, Row, Setting

SYNTHETIC = "synthetic:community?vertices={}&edges={}&features=128&classes=16&seed=0"
GRAPHS = ((20_000, 1_000_000), (200_000, 4_000_000))
MODELS = ("gcn", "sage")
EPOCHS = 3  # whose losses are compared
AGREE = 1e-4  # most that they may differ by, as a share
Epoch = Callable[[], Tensor]  # trains, and returns the loss before it


def run(setting: Setting, record: Record) -> None:
    device = setting.torch_device
    for vertices, edges in ((200, 2_000),) if setting.small else GRAPHS:
        for model in MODELS:
            for by in (ours, pyg, pyg_edges, dgl):
                what = f"{model} on {vertices} vertices by {by.__name__}"
                alike = [
                    row
                    for row in record.rows
                    if (row["model"], row["vertices"]) == (model, vertices)
                ]
                work = partial(_epoch, setting, device, by, vertices, edges, model, alike[:1])
                record.attempt(what, work)


def _epoch(
    setting: Setting,
    device: torch.device,
    by: Callable[[Problem, torch.device], Epoch],
    vertices: int,
    edges: int,
    model: str,
    first: list[Row],
) -> Row:
    """A row. first: ours, with whose losses these must agree."""
    graph = load(SYNTHETIC.format(vertices, edges))
    assert isinstance(graph, Graph)
    problem = _problem(setting, graph, model)
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    epoch = by(problem, device)
    losses = [float(epoch()) for _ in range(EPOCHS)]
    seconds = whole_s(device, epoch, setting.small)
    memory = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    return {
        "by": by.__name__,
        "model": model,
        "vertices": vertices,
        "edges": edges,
        "hidden": problem.workload.hidden,
        "epoch_s": seconds,
        "memory_bytes": memory,
        "losses": losses,
        "wrong": [
            f"losses {losses}, and {row['by']} has {row['losses']}"
            for row in first
            if not agree(losses, row["losses"])
        ],
    }


def agree(losses: list[float], others: list[float]) -> bool:
    """Whether trainings from the same weights are the same, to what fp32 adds up."""
    return all(abs(a - b) <= AGREE * abs(b) for a, b in zip(losses, others, strict=True))


def _problem(setting: Setting, graph: Graph, model: str) -> Problem:
    workload = Workload(**question.workload(setting, model=model, dropout=0.0))
    return Problem(graph.stats, graph, workload, question.cluster(setting, 1))


def ours(problem: Problem, device: torch.device) -> Epoch:
    """graph_parallel(narrow=True): what one rank of a plan does."""
    rank = open_rank(on_cpu=device.type == "cpu")
    rank.recording = False
    strategy = parse("graph_parallel(narrow=True)").settle(problem)
    worker = open_worker(rank, problem, strategy)
    learner = worker.open_learner()
    steps = itertools.count()

    def epoch() -> Tensor:
        step = next(steps)
        learner.zero()
        loss, _ = worker.step(step)
        learner.update(step)
        return loss

    return epoch


def _training(
    problem: Problem,
    device: torch.device,
    layers: list[torch.nn.Module],
    edges: object,
    first: bool = False,
) -> Epoch:
    """An epoch as the libraries' examples have it. first: edges are a layer's first argument."""
    graph = problem.graph
    assert graph is not None
    held = torch.nn.ModuleList(layers).to(device)
    x = torch.tensor(graph.x, device=device)
    y = torch.tensor(graph.y, device=device).long()
    train = torch.tensor(graph.train, device=device).nonzero()[:, 0]
    optimizer = torch.optim.Adam(held.parameters(), lr=problem.workload.lr)

    def apply(layer: torch.nn.Module, h: Tensor) -> Tensor:
        out: Tensor = layer(edges, h) if first else layer(h, edges)
        return out

    def epoch() -> Tensor:
        h = x
        for layer in layers[:-1]:
            h = apply(layer, h).relu()
        loss = F.cross_entropy(apply(layers[-1], h)[train], y[train])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return epoch


def pyg(problem: Problem, device: torch.device) -> Epoch:
    """PyG on a torch.sparse CSR matrix, its quickest way without extensions."""
    imported("torch_geometric")
    graph = problem.graph
    assert graph is not None
    indptr, indices = torch.tensor(graph.indptr), torch.tensor(graph.indices)
    edges = csr(indptr, indices, torch.ones(len(indices)), graph.stats.vertices)
    return _training(problem, device, _pyg_layers(problem), edges.to(device))


def pyg_edges(problem: Problem, device: torch.device) -> Epoch:
    """PyG on an edge index: a row per edge."""
    imported("torch_geometric")
    graph = problem.graph
    assert graph is not None
    readers = torch.arange(graph.stats.vertices).repeat_interleave(
        torch.tensor(graph.indptr).diff().long()
    )
    edges = torch.stack([torch.tensor(graph.indices).long(), readers]).to(device)
    return _training(problem, device, _pyg_layers(problem), edges)


def _pyg_layers(problem: Problem) -> list[torch.nn.Module]:
    from torch_geometric.nn import GCNConv, SAGEConv

    layers: list[torch.nn.Module] = []
    for layer in Net(problem.model, problem.workload).layers.values():
        width, before = layer.weight.shape
        if problem.workload.model == "gcn":
            conv = GCNConv(before, width, cached=True)
            conv.lin.weight, conv.bias = layer.weight, layer.bias
        else:
            conv = SAGEConv(before, width)
            conv.lin_l.weight, conv.lin_l.bias = layer.weight, layer.bias
            conv.lin_r.weight = layer.weight_self
        layers.append(conv)
    return layers


def dgl(problem: Problem, device: torch.device) -> Epoch:
    """DGL as its documentation has it; GCN on the graph with self-loops."""
    library = imported("dgl")
    edges = _dgl_graph(problem)
    if problem.workload.model == "gcn":
        edges = library.add_self_loop(edges)
    try:
        edges = edges.to(device)
    except Exception as error:  # DGLError: a build without CUDA
        raise LeftOut(f"DGL {library.__version__} cannot use this device ({error})") from error
    edges.create_formats_()
    return _training(problem, device, _dgl_layers(problem), edges, first=True)


def dgl_once(problem: Problem, device: torch.device) -> Epoch:
    """`dgl` of GraphSAGE, with layer 1's aggregate of the features made once (SAR, MLSys 2022)."""
    edges = _dgl_graph(problem)
    edges.create_formats_()
    first, *others = _dgl_layers(problem)
    assert problem.graph is not None
    mean = imported("dgl").ops.copy_u_mean(edges, torch.tensor(problem.graph.x))
    return _training(problem, device, [_Gathered(first, mean), *others], edges, first=True)


class _Gathered(torch.nn.Module):
    """DGL's SAGEConv on constant rows, whose means over neighbours are given."""

    def __init__(self, conv: torch.nn.Module, mean: Tensor) -> None:
        super().__init__()
        self.conv, self.mean = conv, mean

    def forward(self, _: object, h: Tensor) -> Tensor:
        out: Tensor = self.conv.fc_self(h) + self.conv.fc_neigh(self.mean)
        return out


def _dgl_graph(problem: Problem) -> Any:
    """The problem's graph as DGL has it, on the CPU."""
    graph = problem.graph
    assert graph is not None
    csc = torch.tensor(graph.indptr).long(), torch.tensor(graph.indices).long(), []
    return imported("dgl").graph(("csc", csc), num_nodes=graph.stats.vertices)


def _dgl_layers(problem: Problem) -> list[torch.nn.Module]:
    convolutions = imported("dgl.nn")
    layers: list[torch.nn.Module] = []
    for layer in Net(problem.model, problem.workload).layers.values():
        width, before = layer.weight.shape
        if problem.workload.model == "gcn":
            conv = convolutions.GraphConv(before, width)
            conv.weight, conv.bias = (
                torch.nn.Parameter(layer.weight.detach().t().clone()),
                layer.bias,
            )
        else:
            conv = convolutions.SAGEConv(before, width, "mean")
            conv.fc_neigh.weight = layer.weight
            conv.fc_self.weight, conv.fc_self.bias = layer.weight_self, layer.bias
        layers.append(conv)
    return layers
