"""Neighbour sampling on a device: the same draws as planner/sampling.py, from tensors. What is drawn goes to the host, where samplers lay
out blocks of it."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from gnnplan.executor.kernels import GOLDEN, mix
from gnnplan.planner.graph import Graph
from gnnplan.planner.sampling import Ids
from gnnplan.planner.specs import ALL


class Lists:
    """A graph's adjacency lists on a device."""

    def __init__(self, graph: Graph, device: torch.device) -> None:
        self.indptr, self.indices = torch.tensor(graph.indptr, device=device), torch.tensor(graph.indices, device=device)

    def draw(self, vertices: Ids, fanout: int, key: np.ndarray) -> tuple[Ids, np.ndarray]:
        """(indptr [V+1], neighbours drawn of these vertices); key: the word [1] that the layer's draws start from."""
        rows = torch.from_numpy(vertices).to(self.indptr.device)
        indptr, places = draw(self.indptr, rows, fanout, int(key.view(np.int64)[0]))
        return indptr.cpu().numpy(), self.indices[places].cpu().numpy()


def draw(indptr: Tensor, vertices: Tensor, fanout: int, key: int) -> tuple[Tensor, Tensor]:
    """At most `fanout` edges (ALL: every one) into each vertex -> (indptr [V+1], their places in the graph's indices [edges]), int64."""
    start, degree = indptr[vertices], indptr[vertices + 1] - indptr[vertices]
    taken = degree if fanout == ALL else degree.clamp(max=fanout)
    ends = torch.cumsum(taken, 0)
    starts = torch.cat([ends.new_zeros(1), ends])
    places = torch.repeat_interleave(start - starts[:-1], taken) + torch.arange(int(starts[-1]), device=start.device)
    crowded = (degree > taken).nonzero()[:, 0]
    if crowded.numel():
        keys = mix((vertices[crowded] + key) * GOLDEN)
        drawn = floyd(keys, degree[crowded], fanout)
        places[starts[crowded] + torch.arange(fanout, device=start.device)[:, None]] = start[crowded] + drawn
    return starts, places


def floyd(keys: Tensor, degree: Tensor, k: int) -> Tensor:
    """k different numbers below each degree (> k), uniformly: [k, V]. A word per number follows from the vertex's key [V]."""
    taken = torch.empty(k, degree.numel(), dtype=torch.int64, device=degree.device)
    words = keys.clone()
    for i in range(k):
        words += GOLDEN
        last = degree - (k - i)  # Floyd's j
        upper = (mix(words.clone()) >> 32) & (2**32 - 1)
        drawn = (upper * (last + 1)) >> 32
        taken[i] = torch.where((taken[:i] == drawn).any(0), last, drawn)
    return taken
