"""Small random graphs, on which a module is followed and proved."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gnnplan.executor.layers.kernels import Block
from gnnplan.executor.modules.bind import GraphFields, bound
from gnnplan.executor.modules.structure import dgl_graph, edge_index_of, typed
from gnnplan.planner.graph.graph import Whole

VERTICES = (53, 78)  # of the graph that a module is followed on, and of another to prove it on
MANY_VERTICES = 1201  # of a graph on which forward must make the same calls
PARTS = 4
EACH = 4  # rows of each whole number, if there are enough


class Small:
    """A random graph of so many vertices, with such fields, of which a module is given some.

    Raises Unfit if it asks for others."""

    def __init__(self, vertices: int, module: nn.Module, graph: GraphFields) -> None:
        draw = np.random.default_rng(vertices)
        dense = draw.random((vertices, vertices)) < 1.5 / vertices
        dense[np.arange(vertices), (np.arange(vertices) + 1) % vertices] = True
        dense[0, :] = False  # a vertex that reads nobody
        if not graph.directed:
            dense[:, 0] = False
            dense |= dense.T
        np.fill_diagonal(dense, False)
        _, sources = np.nonzero(dense)
        indptr = np.concatenate([[0], np.cumsum(dense.sum(1))])
        self.vertices, self.graph, self.binding = vertices, graph, bound(module, graph)
        self.x = torch.from_numpy(draw.standard_normal((vertices, graph.features)))
        self.fields = {name: _drawn(draw, vertices, *shape) for name, shape in graph.vertex.items()}
        on_edges = {name: _drawn(draw, len(sources), *shape) for name, shape in graph.edge.items()}
        # a convolution of DGL may refuse vertices that read nobody: users add self-loops then
        loops = any(hasattr(part, "_allow_zero_in_degree") for part in module.modules())
        self.whole = Whole(indptr, sources.astype(np.int32), on_edges, loops)
        # parts of which none reads all vertices
        self.parts = torch.from_numpy(draw.permutation(vertices)).tensor_split(PARTS)

    def given(self, dtype: torch.dtype) -> dict[str, Any]:
        """What forward is given, by the graph's names."""
        edges = edge_index_of(self.whole)
        on_edges = {name: typed(values, dtype) for name, values in self.whole.fields.items()}
        values: dict[str, Any] = {"vertex x": self.x.to(dtype, copy=True), "edge_index": edges}
        values |= {f"vertex {name}": typed(v, dtype) for name, v in self.fields.items()}
        values |= {f"edge {name}": v for name, v in on_edges.items()}
        if "g" in self.binding.inputs:
            values["g"] = dgl_graph(self.whole, edges, on_edges, None)
        return {name: values[name] for name in self.binding.inputs}


def block_of(whole: Whole, own: Tensor) -> tuple[Block, Tensor]:
    """The edges into some vertices, and the ids of its sources, the vertices first."""
    starts, stops = whole.indptr[own], whole.indptr[own + 1]
    neighbours = np.concatenate([whole.indices[a:b] for a, b in zip(starts, stops, strict=True)])
    others = np.setdiff1d(neighbours, own.numpy())
    source = np.concatenate([own.numpy(), others]).astype(np.int64)
    place = np.zeros(whole.vertices, dtype=np.int32)
    place[source] = np.arange(source.size)
    indptr = np.concatenate([[0], np.cumsum(stops - starts)]).astype(np.int32)
    block = Block(indptr, place[neighbours], source.size)
    block.source, block.whole = torch.from_numpy(source), whole
    return block, block.source


def _drawn(
    draw: np.random.Generator, rows: int, sizes: tuple[int, ...], kind: str, kinds: int
) -> np.ndarray:
    if np.dtype(kind).kind in "iu":
        numbers = draw.integers(0, kinds, (rows, *sizes))
        if EACH * kinds <= rows and np.bincount(numbers.ravel(), minlength=kinds).min() < EACH:
            # a module may take edges of one kind, and none has no size
            numbers = np.resize(draw.permutation(rows) % kinds, (*sizes, rows)).T
        return numbers.reshape(rows, *sizes).astype(kind)
    if np.dtype(kind).kind == "b":
        return draw.random((rows, *sizes)) < 0.5
    return draw.random((rows, *sizes)) + 0.25
