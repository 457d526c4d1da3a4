"""Reference models and training: dense matrices, autograd, one process.

The code uses nothing of the executor but the initial weights (so that runs can be compared) and the
dropout mask, which is part of the specification: a function of seed, epoch, layer and vertex.
All tensors are float64; a tensor of rows has all N vertices."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from gnnplan.executor.layers.kernels import dropout_mask
from gnnplan.executor.modules.read import net_of
from gnnplan.planner.gnn.workload import Workload
from gnnplan.testing.ranks import Case

# layer, h_{l-1} [N, H] -> (operator [N, S]: weight of each of S source rows for each of N readers;
# prepared source rows [S, H], the rows of the N vertices first)
Read = Callable[[int, Tensor], tuple[Tensor, Tensor]]


class Plain:
    """A case's graph, weights and parameters as dense float64."""

    def __init__(self, case: Case) -> None:
        problem = case.problem(1)
        self.graph = problem.graph
        self.workload = Workload(**(case.workload | {"dtype": "float64"}))
        self.layers, self.model = self.workload.layers, self.workload.model
        net = net_of(problem.model, self.workload)
        self.w = {name: p.detach().clone().requires_grad_() for name, p in net.named_parameters()}
        self.running = {name: value.clone() for name, value in net.named_buffers()}  # batch norm's
        self.norm = self.workload.norm or ("layer" if self.model == "resgcn" else "none")
        n = self.graph.stats.vertices
        adjacency = self.graph.adjacency.toarray().astype(np.float64)
        self.adjacency = torch.from_numpy(adjacency)  # row v reads column u
        if self.model == "sage":
            self.operator = self.adjacency / self.adjacency.sum(1, keepdim=True).clamp(min=1)
        elif self.model == "resgcn":
            self.operator = self.adjacency
        else:
            self.operator = self.adjacency + torch.eye(n, dtype=torch.float64)
            if self.model != "gin":
                sources, readers = self.operator.sum(0), self.operator.sum(1)
                self.operator = self.operator / (readers[:, None] * sources[None, :]).sqrt()
        self.x = torch.from_numpy(self.graph.features().astype(np.float64))
        y = torch.from_numpy(np.array(self.graph.y))
        self.train = torch.from_numpy(np.array(self.graph.train))
        self.y = y[self.train] if self.graph.stats.learned == "label" else y[self.train].double()
        how = self.workload
        kind, options = {
            "sgd": (torch.optim.SGD, {"momentum": how.momentum}),
            "adam": (torch.optim.Adam, {}),
            "adamw": (torch.optim.AdamW, {}),
        }[how.optimizer]
        if how.weight_decay is not None:
            options["weight_decay"] = how.weight_decay
        self.optimizer = kind(self.w.values(), lr=how.lr, **options)

    # -- forward ----------------------------------------------------------------------------------

    def drop(self, h: Tensor, step: int | None, layer: int) -> Tensor:
        """Apply dropout before layer `layer` (0: encoder, layers + 1: decoder), except in
        evaluation (step None), in ResGCN+ before the first activation, in SGC beyond layer 1."""
        p, seed = self.workload.dropout, self.workload.seed
        never = {"resgcn": layer < 2, "sgc": layer > 1}.get(self.model, False)
        if step is None or not p or never:
            return h
        return h * dropout_mask(seed, step, layer, torch.arange(len(h)), h.shape[1], p) / (1 - p)

    def prepare(self, layer: int, step: int | None, h: Tensor, *older: Tensor) -> Tensor:
        """Normalise, activate and drop out rows [N, H] for layer `layer`; batch norm normalises the
        older rows with the moments of h."""
        activates = layer > 1 and (
            self.model == "resgcn" or (self.norm != "none" and layer <= self.layers)
        )
        out = []
        for rows in (h, *older):
            if activates and self.norm != "none":
                at = f"layers.{layer}.norm" if layer <= self.layers else "norm"
                weight, bias = self.w[f"{at}.weight"], self.w[f"{at}.bias"]
                if self.norm == "layer":
                    rows = F.layer_norm(rows, rows.shape[1:], weight, bias)
                elif step is None or rows is h:
                    mean, var = (self.running[f"{at}.running_{of}"] for of in ("mean", "var"))
                    rows = F.batch_norm(rows, mean, var, weight, bias, step is not None)
                else:
                    deviation = (h.var(0, unbiased=False) + 1e-5).sqrt()
                    rows = (rows - h.mean(0)) / deviation * weight + bias
            out.append(self.drop(rows.relu() if activates else rows, step, layer))
        return torch.cat(out)

    def encode(self, step: int | None) -> tuple[Tensor, Tensor | None]:
        """Return h_0, and the initial rows x0 if the model has them."""
        if self.model not in ("gcnii", "resgcn"):
            return self.x, None
        h = self.drop(self.x, step, 0) @ self.w["encoder.weight"].T + self.w["encoder.bias"]
        return (h, None) if self.model == "resgcn" else (h.relu(), h.relu())

    def gather(self, layer: int, operator: Tensor, rows: Tensor) -> Tensor:
        """Aggregate prepared rows [S, H] with the operator [N, S] into [N, .]."""
        if self.model == "resgcn":
            messages = rows.relu() + 1e-7
            if self.workload.aggregation == "sum":
                return operator @ messages
            weight = messages.exp() * (operator > 0)[:, :, None]  # [N, S, H]
            reads = (operator > 0).any(1, keepdim=True)
            return (weight * messages).sum(1) / weight.sum(1).where(reads, 1.0)
        if self.model in ("gat", "gatv2"):
            vectors = self.w[f"layers.{layer}.attention"]
            products = rows @ self.w[f"layers.{layer}.weight"].T

            def by_head(numbers: Tensor) -> Tensor:
                """Return numbers [S, heads * width] as [heads, S, width]."""
                return numbers.view(len(rows), len(vectors), -1).transpose(0, 1)

            if self.model == "gat":
                z = by_head(products)
                of_source, of_reader = (z @ half[:, :, None] for half in vectors.chunk(2, 1))
                sums = of_reader[:, : len(operator)] + of_source.transpose(1, 2)
                logits = F.leaky_relu(sums, 0.2)  # [heads, N, S]
            else:
                products = products + self.w[f"layers.{layer}.bias_in"]
                z, r = map(by_head, products.chunk(2, 1))
                sums = r[:, : len(operator), None] + z[:, None]  # [heads, N, S, width]
                logits = (F.leaky_relu(sums, 0.2) * vectors[:, None, None]).sum(3)
            weight = logits.masked_fill(operator == 0, -torch.inf).softmax(2)
            return (weight @ z).transpose(0, 1).flatten(1)
        return operator @ rows

    def update(
        self, layer: int, gathered: Tensor, own: Tensor, h: Tensor, x0: Tensor | None
    ) -> Tensor:
        """Return the layer's output; gathered: aggregated rows, own: the vertices' prepared rows,
        h: the layer's inputs."""
        if self.model == "sgc":
            out = gathered @ self.w["layers.1.weight"].T if layer == 1 else gathered
            return out + self.w[f"layers.{layer}.bias"] if layer == self.layers else out
        w = self.w[f"layers.{layer}.weight"]
        if self.model == "gcnii":
            beta = math.log(self.workload.theta / layer + 1)
            assert x0 is not None
            mixed = (1 - self.workload.alpha) * gathered + self.workload.alpha * x0
            return ((1 - beta) * mixed + beta * mixed @ w.T).relu()
        bias = self.w[f"layers.{layer}.bias"]
        if self.model == "resgcn":
            return (gathered + own) @ w.T + bias + (h if layer > 1 else 0.0)
        out = (gathered if self.model in ("gat", "gatv2") else gathered @ w.T) + bias
        if self.model == "gin":
            w_out, bias_out = (self.w[f"layers.{layer}.{name}_out"] for name in ("weight", "bias"))
            out = out.relu() @ w_out.T + bias_out
        if self.model == "sage":
            out = out + own @ self.w[f"layers.{layer}.weight_self"].T
        return out.relu() if layer < self.layers and self.norm == "none" else out

    def decode(self, h: Tensor, step: int | None) -> Tensor:
        if self.model not in ("gcnii", "resgcn"):
            return h
        prepared = self.prepare(self.layers + 1, step, h)
        return prepared @ self.w["decoder.weight"].T + self.w["decoder.bias"]

    def enter(
        self, layer: int, step: int | None, h: Tensor, x0: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the layer's h_{l-1} and initial rows; a subclass may replace them."""
        return h, x0

    def forward(self, step: int | None, read: Read | None = None) -> tuple[Tensor, list[Tensor]]:
        """Return logits and [h_0 .. h_L]; read: supplies other source rows than this step's."""
        h, x0 = self.encode(step)
        rows = []
        for layer in range(1, self.layers + 1):
            h, x0 = self.enter(layer, step, h, x0)
            rows.append(h)
            operator, sources = (
                read(layer, h) if read else (self.operator, self.prepare(layer, step, h))
            )
            h = self.update(layer, self.gather(layer, operator, sources), sources[: len(h)], h, x0)
        rows.append(h)
        return self.decode(h, step), rows

    def varies(self, layer: int) -> bool:
        """Whether the layer's input changes from epoch to epoch; features do not change."""
        return layer > 1 or self.model in ("gcnii", "resgcn")

    @property
    def state(self) -> dict[str, Tensor]:
        """The weights, and batch norm's running moments."""
        return self.w | self.running

    # -- training ---------------------------------------------------------------------------------

    def loss(self, logits: Tensor) -> Tensor:
        return self.loss_of(logits[self.train], self.y)

    def loss_of(self, logits: Tensor, y: Tensor) -> Tensor:
        if self.graph.stats.numbers:
            return (F.l1_loss if self.workload.loss == "mae" else F.mse_loss)(logits, y.double())
        if self.graph.stats.multilabel:
            return F.binary_cross_entropy_with_logits(logits, y.double())
        weight: Any = self.workload.class_weights
        if weight == "balanced":
            counts = self.y.bincount(minlength=self.graph.stats.classes).double()
            weight = (len(self.y) / int((counts > 0).sum()) / counts).tolist()
        weights = None if weight is None else torch.tensor(weight, dtype=torch.float64)
        return F.cross_entropy(logits, y, weights)

    def begin(self, epoch: int) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = self.workload.lr_of(epoch)

    def descend(self, objective: Tensor) -> None:
        self.optimizer.zero_grad()
        objective.backward()  # type: ignore[no-untyped-call]
        if self.workload.clip:
            torch.nn.utils.clip_grad_norm_(self.w.values(), self.workload.clip)
        self.optimizer.step()


def difference(ours: dict[str, Any], theirs: dict[str, Any], idle: tuple[str, ...] = ()) -> float:
    """Return the largest difference of any weight, relative to the largest number of its tensor.
    idle: weights that only rounding changes, as a bias before batch norm, which cancels it."""
    assert ours.keys() == theirs.keys()
    worst = 0.0
    for name, reference in theirs.items():
        gap = (ours[name].double() - reference.double()).abs().max().item()
        scale = reference.abs().max().item()
        assert math.isfinite(gap), name
        if name in idle:
            assert max(scale, gap) < 1e-6, name
            continue
        assert scale > 0, name  # a weight that never moved from zero would compare nothing
        worst = max(worst, gap / scale)
    return worst
