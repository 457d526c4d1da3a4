"""A rank's share of the graph as tensors: features, labels, and blocks with a layer's edge weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from gnnplan.executor.kernels import Block, SparseRows
from gnnplan.planner.graph import Graph
from gnnplan.planner.specs import Workload

AT_ONCE = 1 << 19  # numbers made dense together


def dtype_of(workload: Workload) -> torch.dtype:
    return torch.float64 if workload.dtype == "float64" else torch.float32


def features(graph: Graph, rows: np.ndarray, workload: Workload, device: torch.device, room: int = 0) -> Tensor:
    """Dense features [rows + room, F], the last `room` rows yet to be filled. A few rows at a time: they are never there twice."""
    width = graph.stats.features
    out = torch.empty(rows.size + room, width, dtype=dtype_of(workload), device=device)
    for start in range(0, rows.size, step := max(1, AT_ONCE // max(width, 1))):
        some = rows[start : start + step]
        out[start : start + some.size] = torch.from_numpy(graph.features(some))
    return out


def sparse_features(graph: Graph, rows: np.ndarray, workload: Workload, device: torch.device) -> SparseRows:
    """Features [rows, F] of a graph whose features are sparse."""
    return sparse_rows(graph.x[rows], workload, device)


def sparse_rows(x: Any, workload: Workload, device: torch.device) -> SparseRows:
    """Those of a scipy CSR matrix."""
    columns, values = torch.from_numpy(np.array(x.indices)), torch.from_numpy(np.array(x.data)).to(dtype_of(workload))
    return SparseRows.of(torch.from_numpy(np.diff(x.indptr).astype(np.int64)), columns, values, x.shape[1]).to(device)


def lengths_of(graph: Graph, rows: np.ndarray) -> Tensor:
    """Numbers in each of these rows of sparse features: part of the structure, which every rank knows. int64 [rows]."""
    return torch.from_numpy(graph.lengths[rows])


def weighted_block(
    graph: Graph, edges: str, dst: np.ndarray, src: np.ndarray, indptr: np.ndarray, indices: np.ndarray, workload: Workload,
    degrees: tuple[np.ndarray, np.ndarray] | None = None, drawn: bool = False,
) -> Block:  # fmt: skip
    """A Block with the self edges and weights that a layer's `edges` asks for (models.Layer), from degrees in the whole graph or
    others (in and out, [N]). Of edges `drawn` at random each stands for all of its row that were not: a mean is over those drawn,
    and 'gcn' multiplies by degree / drawn, so that either is on average what the whole row would give.

    dst [R], src [S]: global ids of rows (dst are the first of src); CSR over dst with positions in src.
    """
    if edges not in ("gcn", "mean", "one", "loop"):
        raise ValueError(f"a layer's edges are 'gcn', 'mean', 'one' or 'loop', not {edges!r}")
    degree, taken = np.diff(graph.indptr) if degrees is None else degrees[0], np.diff(indptr)
    if edges in ("gcn", "loop"):  # self edges come last in every row
        indices = np.insert(indices, indptr[1:], np.arange(dst.size, dtype=indices.dtype))
        indptr = indptr + np.arange(dst.size + 1)
    indptr = indptr.astype(np.int32)  # with int64 scipy would sort indices of 8 bytes
    if edges in ("one", "loop"):
        return Block(indptr, indices, src.size)
    each = np.diff(indptr)
    dtype = np.float64 if workload.dtype == "float64" else np.float32
    if edges == "mean":
        weight = np.repeat((1.0 / np.maximum(taken if drawn else degree[dst], 1)).astype(dtype), each)
    else:
        reader = np.repeat(np.arange(dst.size, dtype=np.int32), each)
        if degrees is not None:
            out_degree = degrees[1]
        else:
            out_degree = np.bincount(graph.indices, minlength=degree.size) if graph.stats.directed else degree
        weight = 1.0 / np.sqrt((degree[dst] + 1.0)[reader] * (out_degree[src] + 1.0)[indices])
        if drawn:
            itself = indices == reader  # a vertex has no other edge to itself
            weight *= np.where(itself, 1.0, (degree[dst] / np.maximum(taken, 1))[reader])
    return Block(indptr, indices, src.size, weight.astype(dtype, copy=False))


class Targets:
    """Labels and masks of some rows, and what is counted on them."""

    def __init__(self, graph: Graph, rows: np.ndarray, workload: Workload, device: torch.device, total: int | None = None) -> None:
        """total: training vertices that the loss is the mean over; None: all of the graph."""
        self.multilabel = graph.stats.multilabel
        y = torch.from_numpy(np.array(graph.y[rows]))
        self.y = y.to(device, dtype_of(workload) if self.multilabel else torch.int64)
        self.masks = [torch.from_numpy(np.flatnonzero(mask[rows])).to(device) for mask in (graph.train, graph.val, graph.test)]
        self.total = graph.stats.train_vertices if total is None else total

    def loss(self, logits: Tensor) -> Tensor:
        """This rank's part of the mean loss over all training vertices (of the graph, or of a batch)."""
        train = self.masks[0]
        if not train.numel():
            return logits.sum() * 0.0
        chosen, y = logits.index_select(0, train), self.y.index_select(0, train)
        if self.multilabel:
            return F.binary_cross_entropy_with_logits(chosen, y, reduction="sum") / (self.total * y.shape[1])
        return F.cross_entropy(chosen, y, reduction="sum") / self.total

    def counts(self, logits: Tensor) -> Tensor:
        """Right answers on train, val and test, and how many there are: float64 [3, 3] of (2 TP or right, FP + FN or wrong).

        Accuracy is right / (right + wrong); for several labels the same fraction is F1-micro.
        """
        out = torch.zeros(3, 2, dtype=torch.float64)
        for i, rows in enumerate(self.masks):
            if not rows.numel():
                continue
            answer, y = logits.index_select(0, rows), self.y.index_select(0, rows)
            if self.multilabel:
                positive, true = answer > 0, y > 0.5
                out[i, 0], out[i, 1] = 2 * (positive & true).sum(), (positive ^ true).sum()
            else:
                labelled = y >= 0
                right = ((answer.argmax(1) == y) & labelled).sum()
                out[i, 0], out[i, 1] = right, labelled.sum() - right
        return out


def counts_of(scored: Sequence[Targets], logits: Tensor) -> Tensor:
    """What is counted on rows of several targets, one after the other."""
    shares = logits.split([len(targets.y) for targets in scored])
    return sum((targets.counts(share) for targets, share in zip(scored, shares, strict=True)), torch.zeros(3, 2))


def scores(counts: Tensor) -> list[float | None]:
    """Accuracy (F1-micro) on train, val and test; None where there are no rows."""
    return [float(right / (right + wrong)) if right + wrong else None for right, wrong in counts.tolist()]
