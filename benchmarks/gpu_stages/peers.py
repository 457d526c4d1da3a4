"""An epoch of one rank beside PyG's and DGL's, on the same device: full-graph and mini-batches.

Of the full graph all begin with our weights, so that their losses must agree. Vertices have random
neighbours, which is the worst that can be for all of them."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from gnnplan.executor.layers.kernels import Shapes
from gnnplan.executor.modules.read import net_of
from gnnplan.executor.ranks.rank import open_rank
from gnnplan.executor.strategies import open_worker
from gnnplan.executor.train import Replay, is_small
from gnnplan.planner.gnn.workload import Workload
from gnnplan.planner.graph.graph import Graph
from gnnplan.planner.ownership import layout
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies import parse
from gpu_stages import graphs, question
from gpu_stages.clock import whole_s
from gpu_stages.kernels import csr, imported
from gpu_stages.record import LeftOut, Record, Row, Setting

SMALL, LITTLE, MUCH, MOST = (200, 2_000), (20_000, 10**6), (200_000, 10**7), (2_000_000, 10**8)
# vertices and edges, model, dropout (losses with dropout are of other masks)
TRAININGS = (
    (MUCH, "sage", 0.0),
    (MUCH, "gcn", 0.0),
    (MUCH, "sage", 0.5),
    (LITTLE, "sage", 0.0),
    (LITTLE, "gcn", 0.0),
    (MOST, "sage", 0.0),
    (MUCH, "batches", 0.5),
    (MOST, "gcn", 0.0),
)
FEATURES, CLASSES = 128, 16
EPOCHS = 3  # whose losses are compared
AGREE = 1e-4  # most that they may differ by, as a share
WARM, BATCHES = 3, 15  # batches that are not timed, and those that are
Epoch = Callable[[], Tensor]  # trains, and returns the loss before it


def run(setting: Setting, record: Record) -> None:
    device = setting.torch_device
    drawn = lru_cache(1)(partial(graphs.graph, device, features=FEATURES, classes=CLASSES))
    small = ((SMALL, "sage", 0.0), (SMALL, "gcn", 0.0), (SMALL, "batches", 0.5))
    for size, model, dropout in small if setting.small else TRAININGS:
        graph = partial(drawn, *size)
        what = f"{model}, {size[1]} edges, dropout {dropout} by"
        if model == "batches":
            for loader in (ours_batches, ours_drawn_on_device, neighbor_loader):
                work = partial(_batches, setting, device, loader, graph)
                record.attempt(f"{what} {loader.__name__}", work)
            continue
        for by in (ours, pyg, pyg_edges, dgl):
            alike = (model, size[0], dropout)
            first = [
                row
                for row in record.rows
                if (row["model"], row["vertices"], row["dropout"]) == alike and not dropout
            ]
            work = partial(_epoch, setting, device, by, graph, model, dropout, first[:1])
            record.attempt(f"{what} {by.__name__}", work)


def _epoch(
    setting: Setting,
    device: torch.device,
    by: Callable[[Problem, torch.device], Epoch],
    drawn: Callable[[], Graph],
    model: str,
    dropout: float,
    first: list[Row],
) -> Row:
    """A row. first: ours, with whose losses these must agree."""
    problem = _problem(setting, drawn(), model=model, dropout=dropout)
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    began = time.monotonic()
    try:
        epoch = by(problem, device)
        set_up_s = time.monotonic() - began
        losses = [float(epoch()) for _ in range(EPOCHS)]
        seconds = whole_s(device, epoch, setting.small)
    except torch.cuda.OutOfMemoryError as error:
        if by is ours:
            raise
        raise LeftOut(str(error).partition(". GPU")[0]) from error
    memory = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    return {
        "by": by.__name__,
        "model": model,
        "vertices": problem.stats.vertices,
        "edges": problem.stats.edges,
        "hidden": problem.workload.hidden,
        "dropout": dropout,
        "epoch_s": seconds,
        "set_up_s": set_up_s,
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


def _problem(setting: Setting, graph: Graph, **more: Any) -> Problem:
    workload = Workload(**question.workload(setting, **more))
    return Problem(graph.stats, graph, workload, question.cluster(setting, 1))


def ours(problem: Problem, device: torch.device) -> Epoch:
    """graph_parallel(narrow=True): what one rank of a run does, after its first epochs."""
    rank = open_rank(on_cpu=device.type == "cpu")
    rank.recorder.recording = False
    strategy = parse("graph_parallel(narrow=True)").settle(problem)
    # METIS would take minutes to find that random neighbours have no order
    with patch.object(layout, "locality_order", lambda graph, _: np.arange(graph.stats.vertices)):
        worker = open_worker(rank, problem, strategy)
    learner = worker.open_learner()
    steps, replay = itertools.count(), list[Replay]()

    def enqueue(step: int) -> Tensor:
        learner.zero()
        loss, _ = worker.step(step)
        learner.update(step)
        return loss

    def epoch() -> Tensor:
        step = next(steps)
        if step >= EPOCHS and not replay and worker.uses_cuda_graph and is_small(device):
            replay.append(Replay(worker, partial(enqueue, step), device))
        return replay[0](step) if replay else enqueue(step)

    return epoch


def _training(
    problem: Problem,
    device: torch.device,
    layers: list[torch.nn.Module],
    edges: object,
    first: bool = False,
) -> Epoch:
    """An epoch of layers as the libraries' examples have them.

    first: edges are a layer's first argument."""
    held, dropout = torch.nn.ModuleList(layers).to(device), problem.workload.dropout

    def apply(layer: torch.nn.Module, h: Tensor) -> Tensor:
        h = F.dropout(h, dropout) if dropout else h
        out: Tensor = layer(edges, h) if first else layer(h, edges)
        return out

    def forward(h: Tensor) -> Tensor:
        for layer in layers[:-1]:
            h = apply(layer, h).relu()
        return apply(layers[-1], h)

    return examples_epoch(problem, device, held, forward)


def examples_epoch(
    problem: Problem,
    device: torch.device,
    held: torch.nn.Module,
    forward: Callable[[Tensor], Tensor],
) -> Epoch:
    """An epoch as the libraries' examples train. forward: from features to logits, by what is
    `held`."""
    graph = problem.data
    x = torch.tensor(graph.x, device=device)
    y = torch.tensor(graph.y, device=device).long()
    train = torch.tensor(graph.train, device=device).nonzero()[:, 0]
    optimizer = torch.optim.Adam(held.parameters(), lr=problem.workload.lr)

    def epoch() -> Tensor:
        loss = F.cross_entropy(forward(x)[train], y[train])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return epoch


def pyg(problem: Problem, device: torch.device) -> Epoch:
    """PyG on a torch.sparse CSR matrix, its quickest way without extensions."""
    imported("torch_geometric")
    graph = problem.data
    indptr, indices = torch.tensor(graph.indptr), torch.tensor(graph.indices)
    edges = csr(indptr, indices, torch.ones(len(indices)), graph.stats.vertices)
    return _training(problem, device, _pyg_layers(problem), edges.to(device))


def pyg_edges(problem: Problem, device: torch.device) -> Epoch:
    """PyG on an edge index: a row per edge."""
    imported("torch_geometric")
    edges = graphs.edge_index(problem.data).to(device)
    return _training(problem, device, _pyg_layers(problem), edges)


def _pyg_layers(problem: Problem) -> list[torch.nn.Module]:
    from torch_geometric.nn import GCNConv, SAGEConv

    layers: list[torch.nn.Module] = []
    for layer in net_of(problem.model, problem.workload).layers.values():
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
    mean = imported("dgl").ops.copy_u_mean(edges, torch.tensor(problem.data.x))
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
    graph = problem.data
    csc = torch.tensor(graph.indptr).long(), torch.tensor(graph.indices).long(), []
    return imported("dgl").graph(("csc", csc), num_nodes=graph.stats.vertices)


def _dgl_layers(problem: Problem) -> list[torch.nn.Module]:
    convolutions = imported("dgl.nn")
    layers: list[torch.nn.Module] = []
    for layer in net_of(problem.model, problem.workload).layers.values():
        width, before = layer.weight.shape
        if problem.workload.model == "gcn":
            conv = convolutions.GraphConv(before, width)
            conv.weight = torch.nn.Parameter(layer.weight.detach().t().clone())
            conv.bias = layer.bias
        else:
            conv = convolutions.SAGEConv(before, width, "mean")
            conv.fc_neigh.weight = layer.weight
            conv.fc_self.weight, conv.fc_self.bias = layer.weight_self, layer.bias
        layers.append(conv)
    return layers


# -- mini-batches ----------------------------------------------------------------------------------


def _batches(
    setting: Setting,
    device: torch.device,
    by: Callable[[Problem, torch.device], Iterator[Tensor]],
    drawn: Callable[[], Graph],
) -> Row:
    problem = _problem(setting, drawn(), **question.batches(setting))
    count = 2 if setting.small else BATCHES
    steps = by(problem, device)
    try:
        losses = [float(next(steps)) for _ in range(1 if setting.small else WARM)]
        began = time.perf_counter()
        trained = [next(steps) for _ in range(count)]
        losses += [float(loss) for loss in trained]  # waits for the last
        seconds = (time.perf_counter() - began) / count
    finally:
        steps.close()
    of_epoch = -(-problem.stats.train_vertices // problem.workload.batch)
    return {
        "by": by.__name__,
        "model": f"{problem.workload.model}, batches",
        "vertices": problem.stats.vertices,
        "edges": problem.stats.edges,
        "hidden": problem.workload.hidden,
        "dropout": problem.workload.dropout,
        "step_s": seconds,
        "epoch_s": seconds * of_epoch,
        "losses": losses,
    }


def ours_batches(problem: Problem, device: torch.device) -> Iterator[Tensor]:
    """data_parallel, whose sampler is a process of its own."""
    rank = open_rank(on_cpu=device.type == "cpu")
    rank.recorder.recording = False
    strategy = parse("data_parallel").settle(problem)
    with Shapes.varying(True):
        worker = open_worker(rank, problem, strategy)
        learner = worker.open_learner()
        try:
            for step in itertools.count():
                learner.zero()
                loss, _ = worker.step(step)
                learner.update(step)
                yield loss
        finally:
            worker.close()


def ours_drawn_on_device(problem: Problem, device: torch.device) -> Iterator[Tensor]:
    """The same, whose neighbours the GPU draws."""
    cluster = problem.cluster.model_copy(update={"sampler": "device"})
    return ours_batches(replace(problem, cluster=cluster), device)


def neighbor_loader(problem: Problem, device: torch.device) -> Iterator[Tensor]:
    """PyG's NeighborLoader with several workers, and its layers."""
    library = imported("torch_geometric")
    if not (library.typing.WITH_PYG_LIB or library.typing.WITH_TORCH_SPARSE):
        raise LeftOut("NeighborLoader needs pyg-lib or torch-sparse")
    from torch_geometric.loader import NeighborLoader

    graph, workload = problem.data, problem.workload
    x, y = torch.tensor(graph.x), torch.tensor(graph.y).long()
    loader = NeighborLoader(
        library.data.Data(x=x, y=y, edge_index=graphs.edge_index(graph)),
        num_neighbors=list(workload.fanouts),
        input_nodes=torch.tensor(graph.train),
        batch_size=workload.batch,
        shuffle=True,
        num_workers=min(8, (os.cpu_count() or 1) // 2),
        persistent_workers=True,
    )
    layers = torch.nn.ModuleList(_pyg_layers(problem)).to(device)
    optimizer = torch.optim.Adam(layers.parameters(), lr=workload.lr)
    while True:
        for batch in loader:
            batch = batch.to(device)
            h = batch.x
            for number, layer in enumerate(layers):
                h = h.relu() if number else h
                h = layer(F.dropout(h, workload.dropout), batch.edge_index)
            loss = F.cross_entropy(h[: batch.batch_size], batch.y[: batch.batch_size])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            yield loss.detach()
