"""What a module computes of edges alone, on a part of the graph.

A part knows the edges into its vertices. Most of what a module makes of edges, a part makes as the
whole graph does: a list of sources, a field times two, self-loops. Some it cannot, as a source's
degree. That is computed once on the whole graph, and the part looks it up: by vertex, or by the
pair of vertices that an edge links."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from gnnplan.executor.layers.kernels import Block
from gnnplan.executor.modules.cut import Program, differing
from gnnplan.executor.modules.evaluate import Place, Values
from gnnplan.executor.modules.record import Node, Sum, Unfit, is_edge_set
from gnnplan.planner.graph.graph import Whole


def edge_index_of(whole: Whole) -> Tensor:
    """Source and reader of each edge, int64 [2, E]."""
    readers = np.repeat(np.arange(whole.vertices), np.diff(whole.indptr))
    return torch.from_numpy(np.stack([whole.indices.astype(np.int64), readers]))


def keys(edges: Tensor, vertices: int) -> Tensor:
    """A number per edge [E] by which it is known; edges: ids [2, E]."""
    return edges[1] * vertices + edges[0]


class Table:
    """Numbers of edges [E, ..], by pairs of vertices."""

    def __init__(self, edges: Tensor, values: Tensor, vertices: int) -> None:
        self.keys, order = keys(edges, vertices).sort()
        self.values, self.vertices = values[order], vertices
        twice = self.keys[1:] == self.keys[:-1]
        if twice.any() and (self.values[1:] != self.values[:-1])[twice].any():
            raise Unfit("two edges between the same vertices have different numbers; merge them")

    def at(self, edges: Tensor) -> Tensor:
        """Those of some edges."""
        found = keys(edges, self.vertices)
        places = torch.searchsorted(self.keys, found).clamp_(max=max(len(self.keys) - 1, 0))
        if len(found) and (not len(self.keys) or (self.keys[places] != found).any()):
            raise Unfit("it makes edges that the graph lacks; give convolutions the graph's edges")
        return self.values[places]


@dataclass(eq=False)
class Structure:
    """The structure of a program.

    nodes: in their order. whole: those that only the whole graph tells, with the edge set that
    they are of; None: they are of vertices, or one for all."""

    program: Program
    nodes: list[Node]
    whole: dict[Node, Node | None] = field(default_factory=dict)
    tables: WeakKeyDictionary[Whole, Mapping[Node | str, Any]] = field(
        default_factory=WeakKeyDictionary
    )
    blocks: WeakKeyDictionary[Block, Values] = field(default_factory=WeakKeyDictionary)
    sums: WeakKeyDictionary[Block, dict[Sum, Block]] = field(default_factory=WeakKeyDictionary)

    @staticmethod
    def of(program: Program) -> Structure:
        wanted: set[Node] = set(program.fields)
        for cut in program.layers:
            wanted |= set(cut.gather.structure)
        todo = list(wanted)
        while todo:
            node = todo.pop()
            for read in [*node.reads, *node.sizes]:
                if read not in wanted:
                    wanted.add(read)
                    todo.append(read)
        return Structure(program, sorted(wanted, key=lambda node: node.index))

    @property
    def counts(self) -> set[int]:
        """Numbers of edges of its sets."""
        return {node.value.shape[1] for node in self.nodes if is_edge_set(node.value)}

    def given(
        self,
        whole: Whole,
        edges: Tensor,
        fields: Mapping[str, Tensor],
        source: Tensor | None = None,
    ) -> Values:
        """Values of what forward is given of edges, by node.

        source [S]: the vertices that edges link, as a part numbers them; None: it is the whole."""
        values: Values = {}
        for node in self.nodes:
            if node.call is not None:
                continue
            if node.name == "edge_index":
                values[node] = edges
            elif node.name == "g":
                values[node] = dgl_graph(whole, edges, fields, source)
            else:
                values[node] = fields[node.name.removeprefix("edge ")]
        return values

    def values_on(self, whole: Whole, place: Place) -> Values:
        """Values on the whole graph."""
        fields = {n: _typed(whole.fields[n], place.dtype) for n in self.fields_of(whole)}
        values = self.given(whole, edge_index_of(whole), fields)
        somewhere = replace(place, vertices=whole.vertices, device=torch.device("cpu"))
        with torch.no_grad():
            for node in self.nodes:
                if node.call is not None:
                    values[node] = somewhere.call(node, values)
        return values

    def fields_of(self, whole: Whole) -> list[str]:
        """Fields of edges that it is given; a graph of DGL has them all."""
        names = {node.name for node in self.nodes}
        return [name for name in whole.fields if "g" in names or f"edge {name}" in names]

    def on_whole(self, whole: Whole, place: Place) -> Mapping[Node | str, Any]:
        """Tables of what only the whole graph tells, and fields of its vertices."""
        if whole not in self.tables:
            kept: dict[Node | str, Any] = {}
            if self.whole or self.program.fields:
                values = self.values_on(whole, place)
                for node, of in self.whole.items():
                    value = values[node]
                    kept[node] = value if of is None else Table(values[of], value, whole.vertices)
                for node in self.program.fields:
                    kept.setdefault(node, values[node])
            edges = edge_index_of(whole)
            for name in self.fields_of(whole):
                value = _typed(whole.fields[name], place.dtype)
                kept[name] = Table(edges, value, whole.vertices)
            self.tables[whole] = kept
        return self.tables[whole]

    def of_block(self, block: Block, place: Place) -> Values:
        """Values on a block, once."""
        if block not in self.blocks:
            assert block.whole is not None and block.source is not None
            tables = self.on_whole(block.whole, place)
            source = block.source.cpu()
            readers = block.per_edge(torch.arange(block.n_dst, device=block.indptr.device))
            edges = torch.stack([block.indices.long(), readers]).cpu()
            names = self.fields_of(block.whole)
            fields = {name: tables[name].at(source[edges]) for name in names}
            here = replace(place, vertices=block.n_src, device=torch.device("cpu"))
            values = self.given(block.whole, edges, fields, source)
            with torch.no_grad():
                self._run(values, here, source, tables)
            self.blocks[block] = {
                node: _moved(value, place.device) for node, value in values.items()
            }
        return self.blocks[block]

    def block_of(self, of: Sum, block: Block) -> Block:
        """The edges of a sum, of all sources of a block, once; `of_block` knows this already."""
        known = self.sums.setdefault(block, {})
        if of not in known:
            values = self.blocks[block]
            source, reader = (ends.cpu() for ends in values[of.edges])
            order = reader.argsort(stable=True)
            counts = torch.bincount(reader, minlength=block.n_src)
            indptr = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
            weight = None if of.weight is None else values[of.weight].cpu()[order, 0]
            made = Block(indptr.numpy(), source[order].numpy(), block.n_src, weight)
            known[of] = made.to(values[of.edges].device)
        return known[of]

    def _run(
        self, values: Values, place: Place, source: Tensor, tables: Mapping[Node | str, Any]
    ) -> None:
        for node in self.nodes:
            if node.call is None:
                continue
            if node not in self.whole:
                values[node] = place.call(node, values)
                continue
            of, table = self.whole[node], tables[node]
            if of is not None:
                values[node] = table.at(source[values[of]])
            else:
                values[node] = table[source] if self._is_of_vertices(node) else table

    def _is_of_vertices(self, node: Node) -> bool:
        value = node.value
        return bool(value.ndim) and value.shape[0] == self.program.recorded.vertices

    # -- what only the whole graph tells -----------------------------------------------------------

    def look(self, place: Place, whole: Whole, source: Tensor, edges: Tensor, own: int) -> None:
        """Find what a part of the graph cannot tell: where a part makes other numbers.

        The whole graph is the one that was recorded. source [S]: the part's vertices, and those
        that they read; edges: places among these, int64 [2, E]. own: of the part's vertices, the
        first. Raises Unfit."""
        n = whole.vertices
        every = edge_index_of(whole)
        inputs = self.program.recorded.inputs
        fields = {
            name: Table(every, inputs[f"edge {name}"].value, n).at(source[edges])
            for name in self.fields_of(whole)
        }
        values = self.given(whole, edges, fields, source)
        sets: list[Node] = [node for node in self.nodes if node.name == "edge_index"]
        here = replace(place, vertices=len(source))
        for node in self.nodes:
            if node.call is None:
                continue
            if node in self.whole:
                of = self.whole[node]
                values[node] = (
                    Table(of.value, node.value, n).at(source[values[of]])
                    if of is not None
                    else node.value[source]
                    if self._is_of_vertices(node)
                    else node.value
                )
                continue
            try:
                with torch.no_grad():
                    values[node] = here.call(node, values)
            except Unfit:
                raise
            except Exception as error:
                raise Unfit(f"{node.place}{node.what} of edges fails on a part of them") from error
            if is_edge_set(node.value):
                sets.append(node)
                self._must_be_the_same(node, source, values[node], own, n)
                continue
            if not isinstance(node.value, Tensor) or node.value.layout != torch.strided:
                continue
            self._compare(node, values, source, sets, own)

    def _must_be_the_same(
        self, node: Node, source: Tensor, edges: Tensor, own: int, n: int
    ) -> None:
        """Raise Unfit if an edge set has other edges into the part's vertices than in the whole."""
        mine = torch.zeros(n, dtype=torch.bool)
        mine[source[:own]] = True
        ok = bool((edges >= 0).all()) and bool((edges < len(source)).all())
        if ok:
            here = source[edges]
            found = keys(here[:, mine[here[1]]], n).sort().values
            there = keys(node.value[:, mine[node.value[1]]], n).sort().values
            ok = torch.equal(found, there)
        if not ok:
            raise Unfit(
                f"{node.place}{node.what} makes other edges of a part of the graph than of the"
                " whole, as some edges by their places, or edges that the graph lacks; give"
                " convolutions the edges into each vertex, all of them"
            )

    def _compare(
        self, node: Node, values: Values, source: Tensor, sets: list[Node], own: int
    ) -> None:
        """What a part's own vertices, and the edges into them, have must be as in the whole."""
        expected: Tensor
        mine: Any = ...
        value, n = node.value, self.program.recorded.vertices
        if value.ndim and value.shape[0] == n:
            expected, of, mine = value[source], None, slice(0, own)
        elif value.ndim and (found := [s for s in sets if s.value.shape[1] == value.shape[0]]):
            of = found[-1]
            expected = Table(of.value, value, n).at(source[values[of]])
            mine = values[of][1] < own
        elif not {n, *self.counts} & set(value.shape):
            expected, of = value, None  # one for all, as a largest weight
        else:
            return
        whole, found_ = expected, values[node]
        if expected.shape == found_.shape:
            expected, found_ = expected[mine], found_[mine]
        if expected.shape == found_.shape and found_.dtype == torch.int64 and found_.numel():
            is_id = bool(found_.min() >= 0) and bool(found_.max() < len(source))
            if is_id and torch.equal(source[found_], expected):
                return  # ids, of which a part has its own
        if expected.shape != found_.shape or differing(expected, found_) is not None:
            self.whole[node] = of
            values[node] = whole


def _typed(field: np.ndarray, dtype: torch.dtype) -> Tensor:
    """A copy, for the graph's own never changes."""
    value = torch.from_numpy(np.array(field))
    return value.to(dtype) if value.is_floating_point() else value


def _moved(value: Any, device: torch.device) -> Any:
    return value.to(device) if hasattr(value, "to") else value


def dgl_graph(
    whole: Whole, edges: Tensor, fields: Mapping[str, Tensor], source: Tensor | None
) -> Any:
    """A graph of DGL, of edges [2, E]; of a part it says the degrees that vertices have in all."""
    import dgl

    size = whole.vertices if source is None else len(source)
    if whole.loops:
        every = torch.arange(size)
        edges = torch.cat([edges, torch.stack([every, every])], 1)
    graph = dgl.graph((edges[0], edges[1]), num_nodes=size)
    for name, values in fields.items():
        ones = values.new_ones((graph.num_edges() - len(values), *values.shape[1:]))
        graph.edata[name] = torch.cat([values, ones])  # as dgl.add_self_loop does
    if source is not None:
        ins, outs = (torch.from_numpy(degrees) for degrees in whole.degrees)
        graph.in_degrees = lambda *_, **__: ins[source]
        graph.out_degrees = lambda *_, **__: outs[source]
    return graph
