"""Neighbour sampling from tensors on a device, with the same draws as planner/graph/sampling.py.

What is drawn goes to the host, where the sampler lays out blocks of it."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gnnplan.executor.layers.kernels import GOLDEN, mix
from gnnplan.planner.gnn.workload import ALL
from gnnplan.planner.graph.graph import Graph
from gnnplan.planner.graph.sampling import Ids


class Lists:
    """A graph's adjacency lists on a device."""

    def __init__(self, graph: Graph, device: torch.device) -> None:
        self.indptr = torch.tensor(graph.indptr, device=device)
        self.indices = torch.tensor(graph.indices, device=device)

    def draw(
        self, vertices: Ids, fanout: int, key: NDArray[np.uint64]
    ) -> tuple[Ids, NDArray[np.int32]]:
        """Neighbours drawn of these vertices [V] -> (indptr [V + 1], neighbours [edges]).

        key: the word [1] that the layer's draws start from (sampling.key_of).
        """
        rows = torch.from_numpy(vertices).to(self.indptr.device)
        indptr, places = draw(self.indptr, rows, fanout, int(key.view(np.int64)[0]))
        return indptr.cpu().numpy(), self.indices[places].cpu().numpy()


def draw(indptr: Tensor, vertices: Tensor, fanout: int, key: int) -> tuple[Tensor, Tensor]:
    """At most `fanout` edges (ALL: every one) into each vertex, int64.

    -> (indptr [V + 1], places [edges] of the drawn edges in the graph's indices)
    """
    start, degree = indptr[vertices], indptr[vertices + 1] - indptr[vertices]
    taken = degree if fanout == ALL else degree.clamp(max=fanout)
    ends = torch.cumsum(taken, 0)
    starts = torch.cat([ends.new_zeros(1), ends])
    # the first edges of each vertex: right where all are taken
    places = torch.repeat_interleave(start - starts[:-1], taken) + torch.arange(
        int(starts[-1]), device=start.device
    )
    crowded = (degree > taken).nonzero()[:, 0]
    if crowded.numel():
        keys = mix((vertices[crowded] + key) * GOLDEN)
        drawn = floyd(keys, degree[crowded], fanout)
        places[starts[crowded] + torch.arange(fanout, device=start.device)[:, None]] = (
            start[crowded] + drawn
        )
    return starts, places


def floyd(keys: Tensor, degree: Tensor, k: int) -> Tensor:
    """k different numbers below each degree (> k), uniformly: [k, V].

    Floyd's algorithm, as in planner/graph/sampling.py. The words of a vertex follow from its key
    [V].
    """
    taken = torch.empty(k, degree.numel(), dtype=torch.int64, device=degree.device)
    words = keys.clone()
    for i in range(k):
        words += GOLDEN
        last = degree - (k - i)  # Floyd's j
        upper = (mix(words.clone()) >> 32) & (2**32 - 1)
        drawn = (upper * (last + 1)) >> 32
        taken[i] = torch.where((taken[:i] == drawn).any(0), last, drawn)
    return taken
