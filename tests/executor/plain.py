"""The three models and their training written plainly: dense matrices, autograd, one process.

Nothing of the executor is used but the initial weights (so that runs can be compared) and the dropout mask, which is part
of the specification: a function of seed, epoch, layer and vertex. Everything is float64; rows are all N vertices.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from ranks import Case
from torch import Tensor
from torch.nn import functional as F

from gnnplan.executor.kernels import dropout_mask
from gnnplan.executor.models import Net
from gnnplan.planner.specs import Workload

Aggregate = Callable[[int, Tensor], Tensor]  # layer, h_{l-1} [N, H] before dropout -> aggregated [N, H]


class Plain:
    """A case's graph, weights and parameters as dense float64."""

    def __init__(self, case: Case) -> None:
        job = case.job(1)
        self.graph, self.workload = job.graph, Workload(**(case.workload | {"dtype": "float64"}))
        self.layers, self.model = self.workload.layers, self.workload.model
        self.w = {name: p.detach().clone().requires_grad_() for name, p in Net(job.model, self.workload).named_parameters()}
        n = self.graph.stats.vertices
        adjacency = np.zeros((n, n))
        for v in range(n):
            adjacency[v, self.graph.indices[self.graph.indptr[v] : self.graph.indptr[v + 1]]] = 1.0
        self.adjacency = torch.from_numpy(adjacency)  # row v reads column u
        if self.model == "sage":
            self.operator = self.adjacency / self.adjacency.sum(1, keepdim=True).clamp(min=1)
        else:
            looped = self.adjacency + torch.eye(n, dtype=torch.float64)
            self.operator = looped / (looped.sum(1)[:, None] * looped.sum(0)[None, :]).sqrt()
        self.x = torch.from_numpy(self.graph.features().astype(np.float64))
        y = torch.from_numpy(np.array(self.graph.y))
        self.train = torch.from_numpy(np.array(self.graph.train))
        self.y = y[self.train].double() if self.graph.stats.multilabel else y[self.train]
        kind = torch.optim.SGD if self.workload.optimizer == "sgd" else torch.optim.Adam
        self.optimizer = kind(self.w.values(), lr=self.workload.lr)

    # -- forward -----------------------------------------------------------------------------------------------------

    def drop(self, h: Tensor, step: int | None, layer: int) -> Tensor:
        """Dropout before layer `layer` (0: encoder, layers + 1: decoder); none where step is None (evaluation)."""
        p = self.workload.dropout
        if step is None or not p:
            return h
        return h * dropout_mask(self.workload.seed, step, layer, torch.arange(len(h)), h.shape[1], p) / (1 - p)

    def encode(self, step: int | None) -> tuple[Tensor, Tensor | None]:
        """(h_0, initial rows x0)."""
        if self.model != "gcnii":
            return self.x, None
        h = (self.drop(self.x, step, 0) @ self.w["encoder.weight"].T + self.w["encoder.bias"]).relu()
        return h, h

    def update(self, layer: int, aggregated: Tensor, own: Tensor, x0: Tensor | None) -> Tensor:
        """aggregated and own are after dropout."""
        w = self.w[f"layers.{layer}.weight"]
        if self.model == "gcnii":
            beta = math.log(self.workload.theta / layer + 1)
            mixed = (1 - self.workload.alpha) * aggregated + self.workload.alpha * x0
            return ((1 - beta) * mixed + beta * mixed @ w.T).relu()
        out = aggregated @ w.T + self.w[f"layers.{layer}.bias"]
        if self.model == "sage":
            out = out + own @ self.w[f"layers.{layer}.weight_self"].T
        return out.relu() if layer < self.layers else out

    def decode(self, h: Tensor, step: int | None) -> Tensor:
        if self.model != "gcnii":
            return h
        return self.drop(h, step, self.layers + 1) @ self.w["decoder.weight"].T + self.w["decoder.bias"]

    def forward(self, step: int | None, aggregate: Aggregate | None = None) -> tuple[Tensor, list[Tensor]]:
        """(logits, [h_0 .. h_L]). `aggregate` replaces the plain product with the operator."""
        h, x0 = self.encode(step)
        rows = [h]
        for layer in range(1, self.layers + 1):
            own = self.drop(h, step, layer)
            aggregated = self.operator @ own if aggregate is None else aggregate(layer, h)
            h = self.update(layer, aggregated, own, x0)
            rows.append(h)
        return self.decode(h, step), rows

    def varies(self, layer: int) -> bool:
        """Whether layer l's input changes from epoch to epoch: features do not."""
        return layer > 1 or self.model == "gcnii"

    # -- training ----------------------------------------------------------------------------------------------------

    def loss(self, logits: Tensor) -> Tensor:
        if self.graph.stats.multilabel:
            return F.binary_cross_entropy_with_logits(logits[self.train], self.y)
        return F.cross_entropy(logits[self.train], self.y)

    def descend(self, objective: Tensor) -> None:
        self.optimizer.zero_grad()
        objective.backward()
        self.optimizer.step()


def train_plainly(case: Case) -> tuple[list[float], dict[str, Tensor]]:
    """Ordinary full-batch training: (losses, weights)."""
    plain, losses = Plain(case), []
    for step in range(case.epochs):
        loss = plain.loss(plain.forward(step)[0])
        losses.append(loss.item())
        plain.descend(loss)
    return losses, plain.w


def difference(ours: dict[str, Any], theirs: dict[str, Any]) -> float:
    """Largest difference of any weight, relative to the largest number of its tensor."""
    assert ours.keys() == theirs.keys()
    worst = 0.0
    for name, reference in theirs.items():
        gap, scale = (ours[name].double() - reference.double()).abs().max().item(), reference.abs().max().item()
        assert math.isfinite(gap) and scale > 0, name  # a weight that never moved from zero would compare nothing
        worst = max(worst, gap / scale)
    return worst
