"""How far a step's gradient is from the exact one at the same weights, and PipeGCN's bound of it.

After a step the same rank makes another pass with the same weights and dropout masks, whose
exchanges are synchronous. Its gradient is the exact one. Nothing that training uses changes.

The bound follows PipeGCN (ICLR 2022), Lemmas A.6 to A.8, layer by layer and with the constants of
the step, which are smaller than the lemmas' maxima. Z_l = P D h_{l-1} W_l (+ D h_{l-1} W'_l) + b_l
are a layer's rows before the ReLU, D its dropout, M_l the gradient of Z_l, and a the layer's
Lipschitz constant |D| (|P| |W_l| + |W'_l|), with spectral norms. Of stale rows and gradients
|used - true| is F_l and B_l (Frobenius), as `--staleness-errors` records them. Then

    E(Z_l) = a E(h_{l-1}) + |D| |P| |W_l| F_l             E(h_l) = E(Z_l), E(h_0) = 0       (A.6)
    E(M_l) = E(J_l) + K_l                                 E(J_L) = smooth E(h_L)
    E(J_{l-1}) = a E(M_l) + sqrt(readers) B_l                                               (A.7)
    E(G_l) = |D| |P| ((E(h_{l-1}) + F_l) |M_l| + |h_{l-1}| E(M_l))                          (A.8)

bound Frobenius errors; E(G'_l) is the same without |P| and F_l, and a bias has sqrt(N) E(M_l).
`smooth` is that of softmax (1/2) or of the sigmoid (1/4) over the terms of the loss. Readers of a
row are at most M - 1 ranks, each of which sends a gradient of its own. The statement of A.8 has no
term F_l |M_l|, its proof has. K_l stands for the lemma's L_sigma B_J E(Z_l): a ReLU is not smooth,
so no L_sigma exists, and |J_l o change of its derivative| is measured between the two passes. So
the bound says how loose the lemmas are; it does not predict an error."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import scipy.sparse as sp
import torch
from scipy.sparse.linalg import svds
from torch import Tensor

from gnnplan.executor.layers.blocks import weighted_block
from gnnplan.executor.layers.kernels import SparseRows
from gnnplan.executor.ranks.comm import total
from gnnplan.executor.ranks.learner import Gradients
from gnnplan.executor.strategies.layerwise import Seen, Worker
from gnnplan.planner.graph.graph import Graph
from gnnplan.planner.problem.problem import Problem

BOUNDED = ("gcn", "sage")  # models that the lemmas speak of, or that differ by W' only
ALL = "all"  # the gradient of all parameters


@dataclass(frozen=True)
class LayerConstants:
    """What the bound knows of a layer; all of one step."""

    weight: float  # |W|
    weight_self: float  # |W'|; 0 if there is none
    stale_rows: float  # F
    stale_gradients: float  # B
    rows: float  # |D h_{l-1}| at most
    gathered: float  # |P D h_{l-1}| at most
    gradient: float  # |M|
    kinks: float  # K


@dataclass(frozen=True)
class LayerBound:
    """Bounds of the errors of a layer's gradients."""

    weight: float
    weight_self: float
    bias: float


def bounds(
    layers: list[LayerConstants], operator: float, dropped: float, smooth: float, world: int, n: int
) -> list[LayerBound]:
    """The bounds of layers 1 .. L. operator: |P|. dropped: |D|. world: ranks. n: vertices."""
    errors = [0.0]  # E(h_0) .. E(h_L)
    slopes = [dropped * (operator * one.weight + one.weight_self) for one in layers]
    for slope, one in zip(slopes, layers, strict=True):
        errors.append(slope * errors[-1] + dropped * operator * one.weight * one.stale_rows)
    out, above = [], smooth * errors[-1]
    for one, slope, below in reversed(list(zip(layers, slopes, errors[:-1], strict=True))):
        error = above + one.kinks  # E(M_l)
        gathered = dropped * operator * (below + one.stale_rows)
        out.append(
            LayerBound(
                weight=gathered * one.gradient + one.gathered * error,
                weight_self=dropped * below * one.gradient + one.rows * error,
                bias=math.sqrt(n) * error,
            )
        )
        above = slope * error + math.sqrt(world - 1) * one.stale_gradients
    return out[::-1]


class GradientErrors:
    """Measures a graph-parallel worker's gradients.

    `errors`: by parameter, and of all, per step |used - exact|, |exact| and the bound of the first
    (None: the lemmas do not speak of the model, or it is no number). All ranks have the same.
    """

    def __init__(self, worker: Worker, gradients: Gradients) -> None:
        problem, net = worker.problem, worker.net
        self.worker, self.gradients = worker, gradients
        self.errors: dict[str, list[tuple[float, float, float | None]]] = {}
        self.operator: float | None = None
        self.exact: Seen | None = None  # what the other pass has seen
        if _is_bounded(problem, worker):
            self.operator = operator_norm(problem, net.layer(len(worker.layers)).edges)
            worker.seen, self.exact = Seen(), Seen()

    def measure(self, step: int) -> None:
        """After the worker's step, before ranks sum its gradients."""
        worker, rank, flat = self.worker, self.worker.rank, self.gradients.flat
        worker.drain()  # its exchanges and those of the other pass would meet
        used, running = flat.clone(), [buffer.clone() for buffer in worker.net.buffers()]
        flat.zero_()
        rank.recording = False
        kept = worker.halo, worker.learner, worker.seen
        worker.halo, worker.learner, worker.seen = worker.plain_halo, None, self.exact
        worker.step(step)
        worker.halo, worker.learner, worker.seen = kept
        rank.recording = True
        exact = flat.clone()
        flat.copy_(used)
        for buffer, before in zip(worker.net.buffers(), running, strict=True):
            buffer.copy_(before)
        both = total(self.worker.rank, torch.stack([used, exact]))
        bound_of = self._bounds()
        squares, offset = torch.zeros(3, dtype=torch.float64), 0
        for name, parameter in worker.net.named_parameters():
            end = offset + parameter.numel()
            ours, true = both[:, offset:end].double()
            bound = bound_of.get(name, math.nan)
            norms = [float((ours - true).norm()), float(true.norm()), bound]
            squares += torch.tensor(norms, dtype=torch.float64).square()
            self._append(name, norms)
            offset = end
        self._append(ALL, squares.sqrt().tolist())

    def _append(self, name: str, norms: list[float]) -> None:
        """Record |used - exact|, |exact| and the bound; one that is NaN or infinite is none."""
        gap, size, bound = norms
        self.errors.setdefault(name, []).append(
            (gap, size, bound if math.isfinite(bound) else None)
        )

    def _bounds(self) -> dict[str, float]:
        """The bound of every parameter's error, by name; none if there is no bound."""
        if self.operator is None:
            return {}
        worker, problem = self.worker, self.worker.problem
        dropped, found = 1 / (1 - problem.workload.dropout), []
        measured = total(
            self.worker.rank,
            torch.tensor([self._squares(layer) for layer in worker.layers], dtype=torch.float64),
        )
        for layer, norms in zip(worker.layers, measured.sqrt().tolist(), strict=True):
            stale_rows, stale_gradients, below, cached, gradient, kinks = norms
            rows = dropped * below
            is_cached = layer == 1 and worker.cached is not None
            found.append(
                LayerConstants(
                    weight=_spectral(worker, layer, "weight"),
                    weight_self=_spectral(worker, layer, "weight_self"),
                    stale_rows=stale_rows,
                    stale_gradients=stale_gradients,
                    rows=rows,
                    gathered=cached if is_cached else self.operator * rows,
                    gradient=gradient,
                    kinks=kinks,
                )
            )
        n, classes = problem.stats.vertices, problem.stats.classes
        terms = problem.stats.train_vertices
        smooth = 1 / (4 * terms * classes) if problem.stats.multilabel else 1 / (2 * terms)
        each = bounds(found, self.operator, dropped, smooth, worker.rank.world, n)
        return {
            f"layers.{layer}.{name}": getattr(bound, name)
            for layer, bound in zip(worker.layers, each, strict=True)
            for name in ("weight", "weight_self", "bias")
        }

    def _squares(self, layer: int) -> list[float]:
        """This rank's part of the squares of F, B, |h_{l-1}|, |P h_0|, |M| and K."""
        worker, ours, true = self.worker, self.worker.seen, self.exact
        assert ours is not None and true is not None
        stale = [worker.errors.get(f"{way}:l{layer}", [(0.0, 0.0)])[-1][0] for way in "fb"]
        gradient, kinks = ours.gradients[layer].double().square(), 0.0
        if worker.net.relu_after(layer):
            passes = ours.rows[layer] > 0
            kinks = float(gradient[passes != (true.rows[layer] > 0)].sum())
            gradient = gradient * passes
        features, cached = worker.features, worker.cached
        if layer == 1:
            values = features.values if isinstance(features, SparseRows) else features
        else:
            values = true.rows[layer - 1]
        gathered = 0.0 if layer > 1 or cached is None else _square(cached)
        return [*stale, _square(values), gathered, float(gradient.sum()), kinks]


def _square(rows: Tensor) -> float:
    return float(rows.double().square().sum())


def _spectral(worker: Worker, layer: int, name: str) -> float:
    weight = getattr(worker.net.layer(layer), name, None)
    return 0.0 if weight is None else float(torch.linalg.matrix_norm(weight.detach().double(), 2))


def _is_bounded(problem: Problem, worker: Worker) -> bool:
    """Whether the bound speaks of the model: GCN or GraphSAGE, without norms and narrow layers.

    Rows must cross as they are, and the loss be a mean of cross entropies.
    """
    workload = problem.workload
    return (
        workload.model in BOUNDED
        and workload.module is None
        and workload.norm in (None, "none")
        and workload.class_weights is None
        and problem.stats.learned != "numbers"
        and worker.options.bits is None
        and not (worker.options.narrow and any(map(problem.model.narrow_at, worker.layers)))
    )


def operator_norm(problem: Problem, edges: str) -> float:
    """|P|, the spectral norm of what a layer with these `edges` gathers by, on the whole graph."""
    graph = problem.graph
    assert isinstance(graph, Graph)
    n = graph.stats.vertices
    ids = np.arange(n)
    block = weighted_block(graph, edges, ids, ids, graph.indptr, graph.indices, problem.workload)
    weight = np.ones(block.edges) if block.weight is None else block.weight.double().cpu().numpy()
    operator = sp.csr_matrix((weight, block.indices.cpu(), block.indptr.cpu()), shape=(n, n))
    if n < 2:
        return float(operator.sum())
    # weights are positive, so a start of ones is not orthogonal to the first singular vector
    largest = svds(operator, 1, v0=np.ones(n), return_singular_vectors=False)[0]
    return float(largest) * (1 + 1e-9)  # found to rounding, from below
