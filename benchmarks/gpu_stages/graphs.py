"""Graphs of any size that are drawn on the device, in seconds where a generator takes minutes."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from gnnplan.planner.graph.graph import Graph, GraphStats

HUBS = 100  # one vertex in so many is a hub: a sixth of all edges begin at one
NEAR, FAR = 2000, 0.3  # of local graphs: how far neighbours are [ids], and the share of others


def csr(device: torch.device, vertices: int, edges: int, local: bool) -> tuple[Tensor, Tensor]:
    """About so many edges by destination: indptr [N + 1], indices [E], int32.

    They are in both directions, sorted, without duplicates and self-loops. Neighbours are any, or
    most of them near each other.
    """
    draw = torch.Generator(device).manual_seed(0)

    def any_of(count: int) -> Tensor:
        return torch.randint(count, (edges // 2,), device=device, generator=draw)

    def drawn(share: float) -> Tensor:
        return torch.rand(edges // 2, device=device, generator=draw) < share

    one, other = any_of(vertices), any_of(vertices)
    one = torch.where(drawn(1 / 6), one // HUBS * HUBS, one)
    if local:
        steps = torch.randn(edges // 2, device=device, generator=draw).mul_(NEAR).long()
        other = torch.where(drawn(FAR), other, (one + steps) % vertices)
    differ = one != other
    one, other = one[differ], other[differ]
    keys = torch.cat([one * vertices + other, other * vertices + one]).unique()
    degree = torch.bincount(keys // vertices, minlength=vertices)
    indptr = torch.zeros(vertices + 1, dtype=torch.int32, device=device)
    indptr[1:] = degree.cumsum(0)
    return indptr, (keys % vertices).int()


def edge_index(graph: Graph) -> Tensor:
    """Sources and readers of all edges, int64 [2, E]."""
    readers = np.repeat(np.arange(graph.stats.vertices), graph.degree)
    return torch.from_numpy(np.stack([graph.indices, readers]))


def graph(device: torch.device, vertices: int, edges: int, features: int, classes: int) -> Graph:
    """A graph to train on: features and labels are random, half of the vertices are trained on."""
    draw = np.random.default_rng(0)
    indptr, indices = (each.cpu().numpy() for each in csr(device, vertices, edges, local=False))
    train = draw.random(vertices) < 0.5
    stats = GraphStats(
        name="drawn",
        source="drawn",
        vertices=vertices,
        edges=len(indices),
        features=features,
        classes=classes,
        train_vertices=int(train.sum()),
        multilabel=False,
        hash=f"drawn {vertices} {edges}",
    )
    x = torch.randn(vertices, features, device=device).cpu().numpy()
    y = draw.integers(0, classes, vertices)
    return Graph(stats, indptr.astype(np.int64), indices, x, y, train, ~train, ~train)
