"""A rank's share of the graph as tensors: features, and a layer's edges with weights."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import numpy as np
import torch
from torch import Tensor

from gnnplan.executor.layers.copies import staging
from gnnplan.executor.layers.kernels import Block, SparseRows
from gnnplan.planner.gnn.workload import Workload
from gnnplan.planner.graph.graph import CsrEdges, Graph
from gnnplan.planner.graph.sampling import Ids
from gnnplan.planner.vocabulary.numbers import Precision, runs

AT_ONCE = 1 << 19  # feature values, or edge weights, that are converted at a time


def dtype_of(precision: Precision) -> torch.dtype:
    """Return the torch type of a precision."""
    dtype: torch.dtype = getattr(torch, precision.torch)
    return dtype


def features(
    graph: Graph, rows: Ids, workload: Workload, device: torch.device, room: int = 0
) -> Tensor:
    """Return features of `rows` [rows + room, F]; the last `room` rows are uninitialised.

    Dense rows are converted in pieces, so memory never holds them twice. A copy to a GPU is queued,
    but not finished, when this function returns (copies.py).
    """
    if not graph.stats.dense:
        return SparseRows.of_csr(graph.x[rows], dtype_of(workload.precision), room).to(device)
    width, x = graph.stats.features, graph.x
    stored = torch.float64 if x.dtype == np.float64 else torch.float32
    out = torch.empty(rows.size + room, width, dtype=dtype_of(workload.precision), device=device)

    def gather(start: int, stop: int, into: Tensor) -> None:
        piece, numbers = rows[start:stop], into.numpy()
        if isinstance(x, np.ndarray):
            take_rows(x, piece, numbers)
        else:
            numbers[:] = graph.features(piece)

    if device.type == "cuda":
        staging(device).load(out[: rows.size], stored, gather)
        return out
    for start in range(0, rows.size, step := max(1, AT_ONCE // max(width, 1))):
        piece = out[start : min(start + step, rows.size)]
        numbers = piece if out.dtype == stored else torch.empty(piece.shape, dtype=stored)
        gather(start, start + len(piece), numbers)
        piece.copy_(numbers)
    return out


def take_rows(x: np.ndarray, rows: Ids, out: np.ndarray) -> None:
    """Copy rows of x into `out`. `rows` are not checked."""
    if x.flags.c_contiguous:
        # with mode='raise' numpy would copy twice, to check for indices out of range
        np.take(x, rows, axis=0, out=out, mode="clip")
    else:  # some columns of a mapped file: np.take would read all of x first
        out[:] = x[rows]


def weighted_block(
    graph: Graph,
    edges: str,
    dst: Ids,
    src: Ids,
    indptr: np.ndarray,
    indices: np.ndarray,
    workload: Workload,
    degrees: tuple[np.ndarray, np.ndarray] | None = None,
    drawn: bool = False,
    part: tuple[int, np.ndarray] | None = None,
) -> Block:
    """Build a Block with the self edges and weights that a layer's `edges` require (Layer.edges).

    dst [R] and src [S] are global ids; src begins with dst. indptr [R + 1] and indices [E] are the
    CSR over dst, with positions in src.

    degrees: in- and out-degrees [N] for the weights; None: those of the whole graph.
    drawn: the edges are a random sample. 'mean' averages over the drawn edges, and 'gcn' multiplies
    by degree / drawn edges, so that both are unbiased estimates of the sum over all edges.
    part: the edges are some of the drawn edges. (own, taken): only the first `own` vertices of dst
    are in src, and have their self edges here; taken [R]: drawn edges of each row in total.

    Raises ValueError on another kind of `edges`.
    """
    if edges not in ("gcn", "mean", "one", "loop"):
        raise ValueError(f"a layer's edges are 'gcn', 'mean', 'one' or 'loop', not {edges!r}")
    own, taken = part or (dst.size, np.diff(indptr))
    if edges in ("gcn", "loop"):  # self edges come last in every row
        indices = np.insert(indices, indptr[1 : own + 1], np.arange(own, dtype=indices.dtype))
        indptr = indptr + np.minimum(np.arange(dst.size + 1), own)
    # int32 indptr: with int64 scipy would sort indices of 8 bytes
    block = Block(indptr.astype(np.int32), indices, src.size, own=own)
    if edges in ("one", "loop"):
        if workload.is_cut:
            block.source = torch.from_numpy(src.astype(np.int64))
            if not drawn:  # a sampler process does not send the whole graph with its batches
                block.graph_edges = graph.csr_edges
        return block
    ins, outs = _degrees(graph, dst, src) if degrees is None else (degrees[0][dst], degrees[1][src])
    return weighed(block, edges, workload, ins, outs, taken if drawn else None)


def weighed(
    block: Block,
    edges: str,
    workload: Workload,
    ins: np.ndarray,
    outs: np.ndarray,
    taken: np.ndarray | None = None,
) -> Block:
    """Return the block with the edge weights of 'gcn' or 'mean'.

    ins [R] and outs [S]: degrees of destinations and sources. taken [R]: drawn edges of each row;
    None: all edges are present."""
    count = np.maximum(ins if taken is None else taken, 1)
    if edges == "mean":
        row_weights = torch.from_numpy(1.0 / count).to(dtype_of(workload.precision))
        return block.weighted(block.per_edge(row_weights))
    degree = block.indptr.diff()
    d_in, d_out, edges_per_drawn, ids = map(
        torch.from_numpy, (ins + 1.0, outs + 1.0, ins / count, np.arange(block.n_dst))
    )
    weights = torch.empty(block.edges, dtype=dtype_of(workload.precision))
    for rows in runs(degree.numpy(), AT_ONCE):
        span = slice(int(block.indptr[rows.start]), int(block.indptr[rows.stop]))
        src, dst = block.indices[span], ids[rows].repeat_interleave(degree[rows])
        weight = d_in.index_select(0, dst).mul_(d_out.index_select(0, src)).sqrt_().reciprocal_()
        if taken is not None:
            # graphs have no self edges, so this is the added one, which is always present
            is_self = (src == dst) & (dst < block.own)
            weight *= edges_per_drawn.index_select(0, dst).masked_fill_(is_self, 1.0)
        weights[span] = weight
    return block.weighted(weights)


def weighted_of(whole: CsrEdges, edges: str, workload: Workload) -> Block:
    """Build the Block of all edges of a graph, to which layers add self-loops themselves."""
    every, nothing = np.arange(whole.vertices), cast(Graph, None)
    arguments = whole.indptr, whole.indices, workload, replace(whole, loops=False).degrees
    return weighted_block(nothing, edges, every, every, *arguments)


def tile(
    graph: Graph, edges: str, dst: Ids, src: Ids, workload: Workload, device: torch.device
) -> Block:
    """Build the Block of edges ('gcn' or 'mean') from `src` to `dst`, global ids in any order."""
    assert edges in ("gcn", "mean"), edges
    place = np.full(graph.stats.vertices, -1, dtype=np.int32)
    place[src] = np.arange(src.size, dtype=np.int32)
    rows = graph.adjacency[dst]
    reader, columns = np.repeat(np.arange(dst.size), np.diff(rows.indptr)), place[rows.indices]
    reader, columns = reader[columns >= 0], columns[columns >= 0]
    if edges == "gcn":
        to_self = np.flatnonzero(place[dst] >= 0)
        reader = np.append(reader, to_self)
        columns = np.append(columns, place[dst[to_self]])
    order = np.argsort(reader, kind="stable")
    indptr = np.searchsorted(reader[order], np.arange(dst.size + 1))
    block = Block(indptr, columns[order], src.size, own=0)
    return weighed(block, edges, workload, *_degrees(graph, dst, src)).to(device)


def _degrees(graph: Graph, dst: Ids, src: Ids) -> tuple[np.ndarray, np.ndarray]:
    """Return in-degrees of destinations and out-degrees of sources."""
    outs = graph.out_degree[src] if graph.stats.directed else graph.degree_of(src)
    return graph.degree_of(dst), outs
