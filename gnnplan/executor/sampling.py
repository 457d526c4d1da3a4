"""Neighbour sampling on a device: the same draws as planner/sampling.py, from tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from gnnplan.executor.kernels import GOLDEN, mix
from gnnplan.planner.sampling import key_of as word_of
from gnnplan.planner.specs import ALL


def key_of(seed: int, epoch: int, batch: int, layer: int) -> int:
    """The word that a layer's draws start from, as torch's int64."""
    return int(word_of(seed, epoch, batch, layer).view("int64")[0])


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
