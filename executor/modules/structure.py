"""What a module computes of edges alone, on a part of the graph.

A part knows the edges into its vertices. Most of what a module makes of edges, a part makes as the
whole graph does: a list of sources, a field times two, self-loops. Some it cannot, as a source's
degree. That is computed once on the whole graph, and the part looks it up: by vertex, or by the
pair of vertices that an edge links. No value stays that no layer reads."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from gnnplan.executor.layers.kernels import Block
from gnnplan.executor.modules.cut import (
    BLOCK,
    DESTINATIONS,
    STRUCTURE,
    Program,
    differing,
)
from gnnplan.executor.modules.evaluate import Place, Values, frees, keys, with_loops
from gnnplan.executor.modules.record import (
    EDGES_OF,
    Node,
    Unfit,
    edge_sets_of,
    is_edge_set,
    is_sparse,
    live_nodes,
)
from gnnplan.planner.graph.graph import Whole


def edge_index_of(whole: Whole) -> Tensor:
    """Source and reader of each edge, int64 [2, E]."""
    readers = np.repeat(np.arange(whole.vertices), np.diff(whole.indptr))
    return torch.from_numpy(np.stack([whole.indices.astype(np.int64), readers]))


TURNED = (
    "the graph's from end to start, and a part knows the edges into its vertices; leave out what"
    " turns them. A sparse matrix has a row per reader:"
    " torch.sparse_coo_tensor(edge_index.flip(0), values, (x.size(0), x.size(0)))"
)


def edges_in(block: Block) -> Tensor:
    """Source and reader of each edge of a block, among its sources, int64 [2, E]."""
    return torch.stack([block.indices, block.readers]).long()


class Table:
    """Numbers of edges [E, ..], by pairs of vertices, and of equal edges by their order."""

    def __init__(self, edges: Tensor, values: Tensor, vertices: int) -> None:
        self.keys, order = keys(edges, vertices).sort(stable=True)
        self.values, self.vertices = values[order], vertices
        self.has_equal = bool((self.keys[1:] == self.keys[:-1]).any())

    def at(self, edges: Tensor) -> Tensor:
        """Those of some edges."""
        found = keys(edges, self.vertices)
        places = torch.searchsorted(self.keys, found)
        if self.has_equal:
            places += _equal_before(found)
        places.clamp_(max=max(len(self.keys) - 1, 0))
        if len(found) and (not len(self.keys) or (self.keys[places] != found).any()):
            raise Unfit("it makes edges that the graph lacks; give convolutions the graph's edges")
        return self.values[places]


def _equal_before(keys: Tensor) -> Tensor:
    """How many equal ones come before each."""
    ordered, order = keys.sort(stable=True)
    before = torch.arange(len(keys)) - torch.searchsorted(ordered, ordered)
    return before[order.argsort()]


@dataclass
class _Part(Place):
    """A part of a graph: what only the whole tells, it looks up. source [S]: its vertices there."""

    structure: Structure = field(kw_only=True)
    source: Tensor = field(kw_only=True)
    tables: Mapping[Node, Any] = field(kw_only=True)

    def call(self, node: Node, values: Mapping[Node, Any], may_change: bool = False) -> Any:
        if node not in self.structure.whole:
            return super().call(node, values, may_change)
        return self.at(node, self.structure.whole[node], self.tables[node], values)

    def at(self, node: Node, of: Node | None, table: Any, values: Mapping[Node, Any]) -> Any:
        """What a part has of a value on the whole graph: of edges of a set, of vertices, or all."""
        if of is not None:
            return table.at(self.source[values[of]])
        return table[self.source] if self.structure.is_of_vertices(node) else table


@dataclass(eq=False)
class Structure:
    """The structure of a module's programs, which were recorded on the same graph.

    read: what layers read of it. nodes: that, and what it is made of, in the order of calls. whole:
    those of them that only the whole graph tells, with the edge set that they are of; None: they
    are of vertices, or one for all."""

    programs: tuple[Program, ...]
    whole: dict[Node, Node | None] = field(default_factory=dict)
    tables: WeakKeyDictionary[Whole, Mapping[Node, Any]] = field(default_factory=WeakKeyDictionary)

    def __post_init__(self) -> None:
        self.read: set[Node] = set()
        for program in self.programs:
            self.read |= {*program.drawn.values()}
            self.whole |= dict.fromkeys(program.fields)
            for node in (node for cut in program.layers for node in cut.gather.nodes):
                self.read |= {read for read in node.reads if program.kind[read] == STRUCTURE}
        self.answers = {n: told for p in self.programs for n, told in p.recorded.answers.items()}
        self.nodes, inputs = live_nodes(self.read), self.small.inputs
        is_dgl = any(node.name == "g" for node in self.nodes)  # whose graph has all fields
        self.edges = inputs.get("edge_index", Node(None, name="edge_index"))
        self.fields = [  # of edges
            node
            for name, node in inputs.items()
            if name.startswith("edge ") and (is_dgl or node in self.nodes)
        ]
        self.whole |= dict.fromkeys(self.fields, self.edges)

    @property
    def small(self) -> Any:
        """What was recorded."""
        return self.programs[0].recorded

    # -- values ----------------------------------------------------------------------------------

    def given(
        self,
        whole: Whole,
        edges: Tensor,
        field: Callable[[Node], Tensor],
        source: Tensor | None = None,
        destinations: int = 0,
    ) -> Values:
        """Values of what forward is given of edges, by node.

        field: the numbers of a field. source [S]: the vertices that edges link, as a part numbers
        them; None: it is the whole. destinations: those that edges lead to, the first of them."""
        values: Values = {self.edges: edges, DESTINATIONS: destinations}
        size = whole.vertices if source is None else len(source)
        values |= {node: beside_loops(whole, field(node), size) for node in self.fields}
        for node in live_nodes({*self.read, *self.answers}):
            if node.name == "vertices":
                values[node] = whole.vertices if source is None else len(source)
            elif node.name == "g":
                fields = {node.name.removeprefix("edge "): values[node] for node in self.fields}
                values[node] = dgl_graph(whole, edges, fields, source)
            elif node.name.startswith("vertex "):
                raise Unfit(self._chosen_by(node))
        return values

    def _chosen_by(self, rows: Node) -> str:
        """That edges are made of rows of vertices, which are known only where a layer runs."""
        name = rows.name.removeprefix("vertex ")
        place = next((node.place for node in self.nodes if rows in node.reads), "")
        return (
            f"{place}forward chooses edges by {name} of vertices; weigh them instead, with 0 for"
            " those to leave out, or choose them before, in the graph's file"
        )

    def _wanted(
        self,
        wanted: Collection[Node],
        place: Place,
        values: Values,
        reads: Callable[[Node], list[Node]] = lambda node: node.reads,
    ) -> Values:
        """Compute some, and keep nothing else; values: of what forward is given."""
        nodes = live_nodes(wanted, reads)
        with torch.no_grad():
            place.run(
                [node for node in nodes if node.call is not None],
                values,
                frees(nodes, wanted, reads),
            )
        return {node: values[node] for node in wanted if node is not BLOCK}

    def values_on(self, whole: Whole, place: Place, wanted: Collection[Node]) -> Values:
        """Values on the whole graph."""

        def field(node: Node) -> Tensor:
            return typed(whole.fields[node.name.removeprefix("edge ")], place.dtype)

        return self._wanted(wanted, place, self.given(whole, edge_index_of(whole), field))

    def on_whole(self, whole: Whole, place: Place) -> Mapping[Node, Any]:
        """Tables of what only the whole graph tells."""
        if whole not in self.tables:
            wanted = {*self.whole} | {of for of in self.whole.values() if of is not None}
            values = self.values_on(whole, place, wanted) if wanted else {}
            self.tables[whole] = self._as_tables(values, whole.vertices)
        return self.tables[whole]

    def _as_tables(self, values: Values, vertices: int) -> dict[Node, Any]:
        """What a part looks up of values on the whole graph."""
        return {
            node: values[node]
            if of is None
            else Table(values[of], values[node][: values[of].shape[1]], vertices)
            for node, of in self.whole.items()
        }

    def must_answer_alike(self, whole: Whole, place: Place) -> None:
        """Raise Unfit if `forward` reads another value from a graph's edges than when recorded.

        `forward` was recorded on graphs in which only the first vertex has no edges."""
        if not self.answers:
            return
        for node, found in self.values_on(whole, place, self.answers).items():
            told = self.answers[node]
            told = told if isinstance(told, bool) else whole.vertices - told
            if found != told:
                raise Unfit(
                    f"{node.place}forward reads {node.what} of the edges, which is {found.item()}"
                    f" on this graph, but {told} was expected, as on the graphs that it was"
                    " recorded on (only their first vertex has no edges); use x.size(0) for the"
                    " number of vertices, and do not branch on edges"
                )

    def of_block(self, block: Block, place: Place) -> Values:
        """What layers read on a block."""
        part, values = self._opened(block, place, self.on_whole(block.whole, place))
        found, device = self._wanted(self.read, part, values, self._looks_up), block.indptr.device
        return {n: v.to(device) if hasattr(v, "to") else v for n, v in found.items()}

    def _opened(
        self, block: Block, place: Place, tables: Mapping[Node, Any]
    ) -> tuple[_Part, Values]:
        """A block as a part of its graph, and what forward is given there."""
        source, edges = block.source.cpu(), edges_in(block).cpu()
        part = _Part(
            place.named,
            place.draw,
            place.dtype,
            structure=self,
            source=source,
            tables=tables,
        )

        def field(node: Node) -> Tensor:
            found: Tensor = tables[node].at(source[edges])
            return found

        return part, self.given(block.whole, edges, field, source, block.n_dst)

    def _looks_up(self, node: Node) -> list[Node]:
        """What a value reads on a block."""
        if node not in self.whole:
            return node.reads
        of = self.whole[node]
        return [] if of is None else [of]

    def is_of_vertices(self, node: Node) -> bool:
        """Whether it has a row per vertex."""
        value = node.value
        return bool(value.ndim) and value.shape[0] == self.small.vertices

    def _has_numbers(self, node: Node) -> bool:
        """Whether it is numbers of vertices, and not their ids."""
        value = node.value
        is_dense = isinstance(value, Tensor) and not is_sparse(value) and value.is_floating_point()
        return is_dense and self.is_of_vertices(node)

    # -- what only the whole graph tells -----------------------------------------------------------

    def look(self, place: Place, block: Block) -> None:
        """Find what a part of the graph that was recorded cannot tell: where it makes other
        numbers. Raises Unfit."""
        n, edges = block.whole.vertices, edge_index_of(block.whole)
        every = {node: node.value for node in (*self.nodes, *self.fields)} | {self.edges: edges}
        tables = self._as_tables(every, n)
        part, values = self._opened(block, place, tables)
        sets: list[Node] = [node for node in self.nodes if node.name == "edge_index"]
        if (of_graph := self.small.inputs.get(EDGES_OF)) is not None:
            sets, values[of_graph] = [of_graph], part.call(of_graph, values)
        edge_sets = {edges for program in self.programs for edges in edge_sets_of(program.live)}
        for node in self.nodes:
            if node.call is None:
                continue
            try:
                with torch.no_grad():
                    values[node] = part.call(node, values)
            except Unfit:
                raise
            except Exception as error:
                raise Unfit(
                    f"{node.place}{node.what} of edges fails on a part of them: it may read them by"
                    " their places, as argsort tells; add up rows over edges by index_add"
                ) from error
            if node in edge_sets:
                sets.append(node)
                self._must_be_the_same(node, block.source, values[node], block.n_dst, n)
            elif (
                node not in tables and isinstance(node.value, Tensor) and not is_sparse(node.value)
            ):
                self._compare(node, values, part, sets, block.n_dst)

    def _are_turned(self, edges: Tensor, n: int) -> bool:
        """Whether edges are the graph's, from end to start."""
        given = self.small.inputs.get("edge_index")
        return given is not None and bool(
            torch.isin(keys(given.value.flip(0), n), keys(edges, n)).all()
        )

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
            if self._are_turned(node.value, n):
                raise Unfit(f"{node.place}{node.what} makes other edges, {TURNED}")
            raise Unfit(
                f"{node.place}{node.what} makes other edges of a part of the graph than of the"
                " whole, as some edges by their places, or edges that the graph lacks; give"
                " convolutions the edges into each vertex, all of them"
            )

    def _compare(self, node: Node, values: Values, part: _Part, sets: list[Node], own: int) -> None:
        """What a part's own vertices, and the edges into them, have must be as in the whole."""
        value, n, table, of = node.value, self.small.vertices, node.value, None
        mine: Any = ...
        if self.is_of_vertices(node):
            mine = slice(0, own)
        elif value.ndim and (found := [s for s in sets if s.value.shape[1] == value.shape[0]]):
            of = found[-1]
            mine, table = values[of][1] < own, Table(of.value, value, n)
        elif {n, *(s.value.shape[1] for s in self.nodes if is_edge_set(s.value))} & {*value.shape}:
            return  # else it is one for all, as a largest weight
        whole, here = part.at(node, of, table, values), values[node]
        if whole.shape == here.shape:
            expected, ours = whole[mine], here[mine]
            if differing(expected, ours) is None or _are_ids(ours, expected, part.source):
                return
        for read in node.reads:  # of neighbours, as their degrees, a part knows less
            if of is not None and read not in self.whole and self._has_numbers(read):
                self.whole[read] = None
                values[read] = read.value[part.source]
                values[node] = part.call(node, values)
                self._compare(node, values, part, sets, own)
                return
        self.whole[node] = of
        values[node] = whole


def _are_ids(found: Tensor, expected: Tensor, source: Tensor) -> bool:
    """Whether they are ids of vertices, of which a part has its own."""
    is_id = found.dtype == torch.int64 and found.numel() > 0
    is_id = is_id and bool(found.min() >= 0) and bool(found.max() < len(source))
    return is_id and torch.equal(source[found], expected)


def typed(field: np.ndarray, dtype: torch.dtype) -> Tensor:
    """A copy, for the graph's own never changes."""
    value = torch.from_numpy(np.array(field))
    return value.to(dtype) if value.is_floating_point() else value


def beside_loops(whole: Whole, field: Tensor, vertices: int) -> Tensor:
    """A field of edges, with ones for the self-loops that a graph of DGL has then, as
    dgl.add_self_loop writes them."""
    if not whole.loops:
        return field
    return torch.cat([field, field.new_ones((vertices, *field.shape[1:]))])


def dgl_graph(
    whole: Whole, edges: Tensor, fields: Mapping[str, Tensor], source: Tensor | None = None
) -> Any:
    """A graph of DGL, of edges [2, E]; of a part it says the degrees that vertices have in all."""
    import dgl

    size = whole.vertices if source is None else len(source)
    if whole.loops:
        edges = with_loops(edges, size)
    graph = dgl.graph((edges[0], edges[1]), num_nodes=size)
    graph.edata.update(fields)
    if source is not None:
        ins, outs = (torch.from_numpy(degrees) for degrees in whole.degrees)
        graph.in_degrees = lambda *_, **__: ins[source]
        graph.out_degrees = lambda *_, **__: outs[source]
    return graph
