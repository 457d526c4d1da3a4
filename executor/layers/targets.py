"""Training targets of some rows (labels or numbers), their loss, and metrics.

Metrics are sums over rows and ranks. Most metrics count a numerator ("part") and a denominator
("whole"), for each of K classes or for all together (K = 1). The score is the mean of part / whole
over the classes whose whole is not 0:

    accuracy    right answers / answers
    f1_micro    2 TP / (2 TP + FP + FN), of all classes together
    f1_macro    2 TP / (2 TP + FP + FN), of each class
    mae         sum of |error| / numbers
    auc         right comparisons / comparisons, of links (`LinkTargets.compared`)

roc_auc ranks all vertices of all ranks, so its counts are a table of all vertices' scores.
"""

from __future__ import annotations

import copy

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from gnnplan.executor.layers.blocks import dtype_of
from gnnplan.executor.layers.kernels import sent
from gnnplan.planner.gnn.workload import BALANCED, Workload
from gnnplan.planner.graph.graph import Graph
from gnnplan.planner.graph.sampling import Ids, Pairs
from gnnplan.planner.problem.problem import Problem


def class_weights(graph: Graph, workload: Workload) -> np.ndarray | None:
    """Return the weight of each class in the loss [C]; None if all weigh 1.

    'balanced': the training vertices of each class have the same total weight, 1 on average.
    """
    if workload.class_weights is None:
        return None
    if workload.class_weights != BALANCED:
        return np.array(workload.class_weights)
    counts = np.bincount(graph.y[graph.train], minlength=graph.stats.classes)
    return np.asarray(counts.sum() / (np.count_nonzero(counts) * np.maximum(counts, 1)))


def weight_of(graph: Graph, workload: Workload, rows: Ids | None = None) -> float:
    """Return the divisor of the mean loss: the sum of the training vertices' class weights.

    rows: ids of the training vertices to sum over; None: all. Without weights each counts 1.
    """
    weights = class_weights(graph, workload)
    if weights is None:
        return graph.stats.train_vertices if rows is None else rows.size
    return float(weights[graph.y[graph.train if rows is None else rows]].sum())


class Targets:
    """Targets of some rows, split into training, validation and test; the loss and the counts."""

    def __init__(
        self,
        graph: Graph,
        rows: Ids,
        workload: Workload,
        device: torch.device,
        total: float | None = None,
    ) -> None:
        """total: divisor of the loss (`weight_of`); None: that of the graph's training vertices."""
        self.learned, self.vertices = graph.stats.learned, graph.stats.vertices
        self.metric, self.is_mae = workload.metric_of(self.learned), workload.loss == "mae"
        self.dtype = dtype_of(workload.precision.weights)
        y = torch.from_numpy(np.array(graph.y[rows]))
        if self.learned == "numbers":
            y = y.view(len(y), *y.shape[1:] or (1,))  # a rank may have no rows
        self.y = y.to(device, torch.int64 if self.learned == "label" else self.dtype)
        parts = np.stack([mask[rows] for mask in (graph.train, graph.val, graph.test)])
        self.train = torch.from_numpy(np.flatnonzero(parts[0])).to(device)
        if self.learned == "label":
            parts &= y.numpy() >= 0
        if self.learned == "numbers":
            parts &= ~np.isnan(y.numpy()).any(1)
        self.parts = torch.from_numpy(parts).to(device)  # which rows count for each split [3, R]
        total = weight_of(graph, workload) if total is None else total
        self.total = total or 1.0  # classes of a mini-batch may all weigh 0
        self.weights = self.rows = None
        if (weights := class_weights(graph, workload)) is not None:
            self.weights = torch.from_numpy(weights).to(device, self.dtype)
        if self.metric == "roc_auc":
            self.rows = torch.from_numpy(rows.astype(np.int64)).to(device)

    @property
    def size(self) -> int:
        """Number of rows."""
        return len(self.y)

    def to_train_on(self, device: torch.device) -> Targets:
        """Return a copy whose loss is computed on a device."""
        out = copy.copy(self)
        out.y, out.train = self.y.to(device, copy=True), self.train.to(device, copy=True)
        out.weights = None if self.weights is None else self.weights.to(device)
        return out

    def loss(self, outputs: Tensor) -> Tensor:
        """Return this rank's summand of the mean loss over all training vertices."""
        if not self.train.numel():
            return outputs.sum().to(self.dtype) * 0.0
        chosen, y = outputs, self.y
        if self.train.numel() < self.size:
            chosen, y = (rows.index_select(0, self.train) for rows in (chosen, y))
        chosen = chosen.to(self.dtype)
        if self.learned == "label":
            return F.cross_entropy(chosen, y, self.weights, reduction="sum") / self.total
        if self.learned == "labels":
            summed = F.binary_cross_entropy_with_logits(chosen, y, reduction="sum")
        else:
            summed = (F.l1_loss if self.is_mae else F.mse_loss)(chosen, y, reduction="sum")
        return summed / (self.total * y.shape[1])

    def counts(self, outputs: Tensor) -> Tensor:
        """Return the metric's parts and wholes on train, val and test, float64 [3, 2, K].

        For roc_auc return scores of all vertices [N, C], which are 0 except in this object's rows.
        """
        if self.rows is not None:
            values = outputs.double().softmax(1) if self.learned == "label" else outputs.double()
            return values.new_zeros(self.vertices, values.shape[1]).index_copy_(
                0, self.rows, values
            )
        if self.metric == "f1_macro":
            return self._of_each_class(outputs)
        if self.metric == "mae":
            part = (outputs.double() - self.y).abs().sum(1).nan_to_num()
            whole = torch.full_like(part, self.y.shape[1])
        elif self.metric == "f1_micro":
            positive, true = outputs > 0, self.y > 0.5
            part = 2 * (positive & true).sum(1, dtype=torch.int32)
            whole = positive.sum(1, dtype=torch.int32) + true.sum(1, dtype=torch.int32)
        else:
            part = outputs.argmax(1) == self.y
            whole = torch.ones_like(part)
        both = self.parts[:, None] * torch.stack([part, whole])
        return both.sum(2, dtype=torch.float64)[:, :, None]

    def _of_each_class(self, outputs: Tensor) -> Tensor:
        """Return 2 TP and 2 TP + FP + FN of each class [3, 2, C]."""
        if self.learned == "label":
            predicted, y = outputs.argmax(1), self.y.clamp(min=0)
            hits = self.parts & (predicted == y)
            nothing = outputs.new_zeros(3, outputs.shape[1], dtype=torch.float64)
            both, true, positive = (
                nothing.index_add(1, which, rows.double())
                for which, rows in ((y, hits), (y, self.parts), (predicted, self.parts))
            )
        else:
            is_positive, is_true = outputs > 0, self.y > 0.5
            both, true, positive = (
                torch.stack([(mask & part[:, None]).sum(0).double() for part in self.parts])
                for mask in (is_positive & is_true, is_true, is_positive)
            )
        return torch.stack([2 * both, true + positive], 1)


def no_counts(problem: Problem, device: torch.device, training: bool = False) -> Tensor:
    """Return zero counts. training: of a training step, in which roc_auc counts no scores."""
    shape: tuple[int, ...] = 3, 2, problem.stats.classes if problem.metric == "f1_macro" else 1
    if problem.metric == "roc_auc" and not training:
        shape = problem.stats.vertices, problem.stats.classes
    return torch.zeros(shape, dtype=torch.float64, device=device)


def scores(problem: Problem, counts: Tensor) -> list[float | None]:
    """Return scores on train, val and test from the counts of all ranks; None without rows."""
    if counts.dim() == 3:
        return ratios(counts)
    return roc_auc(counts.numpy(), problem.data)


def ratios(counts: Tensor) -> list[float | None]:
    """Return means of part / whole on train, val and test from counts [3, 2, K].

    >>> ratios(torch.tensor([[[3.0], [4.0]], [[0.0], [0.0]], [[0.0], [2.0]]]))
    [0.75, None, 0.0]
    """
    out: list[float | None] = []
    for part, whole in counts:
        counted = whole > 0
        out.append(float((part[counted] / whole[counted]).mean()) if counted.any() else None)
    return out


def roc_auc(values: np.ndarray, graph: Graph) -> list[float | None]:
    """Return ROC-AUC on train, val and test: the mean over classes, from scores [N, C].

    ROC-AUC of a class is the probability that a vertex of the class scores higher than a vertex of
    another class; a tie counts half. A class is left out if a split has none of its vertices, or
    only its vertices.
    """
    y = graph.y
    belongs = y[:, None] == np.arange(graph.stats.classes) if y.ndim == 1 else y > 0.5
    out: list[float | None] = []
    for mask in (graph.train, graph.val, graph.test):
        rows = np.flatnonzero(mask & (y >= 0) if y.ndim == 1 else mask)
        counted = np.flatnonzero(belongs[rows].any(0) & ~belongs[rows].all(0))
        if not counted.size:
            out.append(None)
            continue
        true = belongs[np.ix_(rows, counted)]
        places, p = np.apply_along_axis(_ranks, 0, values[np.ix_(rows, counted)]), true.sum(0)
        above = (places * true).sum(0) - p * (p + 1) / 2
        out.append(float((above / (p * (rows.size - p))).mean()))
    return out


def _ranks(scores: np.ndarray) -> np.ndarray:
    """Return places from 1 on, which equal scores share. (To import scipy.stats takes a second.)"""
    _, values, counts = np.unique(scores, return_inverse=True, return_counts=True)
    return (counts.cumsum() - (counts - 1) / 2)[values]


# -- link prediction -------------------------------------------------------------------------------

#     z_v                    v's row of the last layer
#     s(u, v) = z_u . z_v    the score of a pair
#
#     loss = 1 / (B (1 + Q)) sum over edges (u, v) of a batch
#                [ -log sigma(s(u, v)) - sum_q log sigma(-s(u, n_q)) ]
#
# This is GraphSAGE's unsupervised loss (Hamilton et al. 2017, Eq. 1) with edges for the pairs that
# meet on random walks, Q negatives drawn uniformly for the expectation, and the mean over pairs. It
# is the binary cross entropy of all pairs that DGL's and PyG's examples of link prediction use.
#
# AUC is the probability that an edge scores higher than a pair that is none. It is estimated from
# (edge, negative) comparisons: each edge is compared with its own negatives, and a tie counts half.

AT_ONCE = 1 << 20  # numbers gathered at a time where no gradient is needed


def scores_of_pairs(rows: Tensor, heads: Tensor, tails: Tensor) -> Tensor:
    """Return scores [B, 1 + Q] of pairs of rows [R, H]; heads and tails index them (`Pairs`)."""
    head_rows, tail_rows = rows.index_select(0, heads), rows.index_select(0, tails.flatten())
    return torch.bmm(tail_rows.view(*tails.shape, -1), head_rows.unsqueeze(2)).squeeze(2)


class LinkTargets:
    """Pairs of rows for link prediction: their loss, and counts of comparisons.

    pairs: indexes of rows. size: number of rows. total: edges of all ranks' batches, over which the
    loss is a mean.
    """

    def __init__(self, pairs: Pairs, size: int, total: float) -> None:
        self.heads, self.tails = torch.from_numpy(pairs.heads), torch.from_numpy(pairs.tails)
        self.size, self.total = size, total

    def loss(self, rows: Tensor) -> Tensor:
        """Return this rank's summand of the mean loss over the pairs of all `total` edges."""
        if not len(self.heads):
            return rows.sum() * 0.0
        pair_scores = scores_of_pairs(rows, self.heads, self.tails)
        is_edge = torch.zeros_like(pair_scores)
        is_edge[:, 0] = 1.0
        total = self.total * pair_scores.shape[1]
        return F.binary_cross_entropy_with_logits(pair_scores, is_edge, reduction="sum") / total

    def counts(self, rows: Tensor) -> Tensor:
        """Count the batch's right and total comparisons, as those of train, float64 [3, 2, 1]."""
        return F.pad(self.compared(rows)[None, :, None], (0, 0, 0, 0, 0, 2))

    @torch.no_grad()
    def compared(self, rows: Tensor) -> Tensor:
        """Count how often edges score higher than their negatives, and all comparisons, float64
        [2]. A tie counts half."""
        out = rows.new_zeros(2, dtype=torch.float64)
        step = max(1, AT_ONCE // max(self.tails.shape[1] * rows.shape[1], 1))
        for start in range(0, len(self.heads), step):
            places = [ids[start : start + step] for ids in (self.heads, self.tails)]
            pair_scores = scores_of_pairs(rows, *sent(places, rows.device))
            margin = pair_scores[:, :1] - pair_scores[:, 1:]
            right = (margin > 0).sum(dtype=torch.float64) + (margin == 0).sum() / 2
            out += torch.stack([right, torch.full_like(right, margin.numel())])
        return out
