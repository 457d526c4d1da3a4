"""Computes, on a part of the graph, the values that a module derives from edges alone: STRUCTURE.

A part knows the edges into its vertices. Most STRUCTURE follows from these as it does on the whole
graph: a list of sources, a field times two, self-loops. Some does not, as a source's degree. It is
computed once on the whole graph, and the part looks it up: by vertex, or by the pair of vertices
that an edge connects. Values that no layer reads are not kept."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from gnnplan.executor.layers.kernels import Block
from gnnplan.executor.modules.cut import BLOCK, DESTINATIONS, Program, differing
from gnnplan.executor.modules.evaluate import Place, Values, frees, keys, tensors, with_loops
from gnnplan.executor.modules.record import (
    EDGES_OF,
    INNER,
    NUMBERS_ASKED,
    OF_TURNED,
    STRUCTURE,
    Asked,
    Node,
    Recorded,
    Unfit,
    edge_sets_of,
    is_edge_set,
    is_rows,
    is_sparse,
    live_nodes,
)
from gnnplan.executor.modules.rewrite import flip, left_none_out
from gnnplan.planner.graph.graph import CsrEdges

TURNED = (
    "the graph's from end to start, and a part knows the edges into its vertices; leave out what"
    " turns them. A sparse matrix has a row per reader:"
    " torch.sparse_coo_tensor(edge_index.flip(0), values, (x.size(0), x.size(0)))"
)

FAR = 1 << 20  # added to ids, to see whether numbers depend on them


def edge_index_of(whole: CsrEdges) -> Tensor:
    """Return source and destination of each edge, int64 [2, E]."""
    readers = np.repeat(np.arange(whole.vertices), np.diff(whole.indptr))
    return torch.from_numpy(np.stack([whole.indices.astype(np.int64), readers]))


class Table:
    """Numbers of edges [E, ..] that are looked up by pairs of vertices.

    Edges that connect the same pair are told apart by their order."""

    def __init__(self, edges: Tensor, values: Tensor, vertices: int) -> None:
        self.keys, order = keys(edges, vertices).sort(stable=True)
        self.values, self.vertices = values[order], vertices
        self.has_duplicates = bool((self.keys[1:] == self.keys[:-1]).any())

    def at(self, edges: Tensor) -> Tensor:
        """Return the numbers of some edges. Raises Unfit for an edge that the table lacks."""
        wanted = keys(edges, self.vertices)
        places = torch.searchsorted(self.keys, wanted)
        if self.has_duplicates:
            places += _duplicates_before(wanted)
        places.clamp_(max=max(len(self.keys) - 1, 0))
        if len(wanted) and (not len(self.keys) or (self.keys[places] != wanted).any()):
            raise Unfit("it makes edges that the graph lacks; give convolutions the graph's edges")
        return self.values[places]


def _duplicates_before(keys: Tensor) -> Tensor:
    """Return how many equal keys precede each key."""
    ordered, order = keys.sort(stable=True)
    before = torch.arange(len(keys)) - torch.searchsorted(ordered, ordered)
    return before[order.argsort()]


@dataclass
class _Part(Place):
    """A part of a graph, which looks up what only the whole graph determines.

    source [S]: ids of the part's vertices in the whole graph. tables: see Structure.tables_of."""

    structure: Structure = field(kw_only=True)
    source: Tensor = field(kw_only=True)
    tables: Mapping[Node, Any] = field(kw_only=True)

    def call(self, node: Node, values: Mapping[Node, Any], may_overwrite: bool = False) -> Any:
        if node.call is flip:
            return values[node.args[0]]
        if node not in self.structure.whole:
            return super().call(node, values, may_overwrite)
        return self.look_up(node, self.structure.whole[node], self.tables[node], values)

    def look_up(
        self, node: Node, edges: Node | None, table: Any, values: Mapping[Node, Any]
    ) -> Any:
        """Return the part's rows of a value on the whole graph: of edges, of vertices, or all."""
        if edges is not None:
            return table.at(self.source[values[edges]])
        return table[self.source] if self.structure.is_of_vertices(node) else table


@dataclass(eq=False)
class Structure:
    """The STRUCTURE of a module's programs, which were recorded on the same graph.

    answers: Recorded.answers of all modes. place: computes on the host, with the module's tensors.
    dtype: of real numbers. read: the nodes that layers read. nodes: these, and the nodes that they
    are computed from, in the order of calls. whole: the nodes that only the whole graph determines,
    with their edge set. It is None for nodes of vertices, and for one value for all."""

    programs: tuple[Program, ...]
    answers: Mapping[Node, Any]
    place: Place
    dtype: torch.dtype
    whole: dict[Node, Node | None] = field(default_factory=dict)
    tables: WeakKeyDictionary[CsrEdges, Mapping[Node, Any]] = field(
        default_factory=WeakKeyDictionary
    )

    def __post_init__(self) -> None:
        self.read: set[Node] = set()
        self.places: set[Node] = set()  # that are about places of edges in an order of their own
        self.ids: set[Node] = set()  # of vertices, of which a part has positions
        # of vertices, of which a part has its own rows alone, as degrees
        self.partial: set[Node] = set()
        of_neighbours: set[Node] = set()  # from which learned numbers of neighbours are computed
        for program in self.programs:
            self.read |= {node.edges for node in program.live if node.edges is not None}
            self.whole |= dict.fromkeys(program.fields)
            for node in (node for cut in program.layers for node in cut.gather.nodes):
                read = {read for read in node.reads if read.kind == STRUCTURE}
                self.read |= read
                of_neighbours |= read if node.kind == INNER else set()
        self.of_neighbours = of_neighbours
        self.nodes, inputs = live_nodes(self.read), self.small.inputs
        is_dgl = any(node.name == "g" for node in self.nodes)  # a DGL graph has all fields
        self.edges = inputs.get("edge_index", Node(None, name="edge_index"))
        self.fields = {  # of edges, by their names in the graph
            name.removeprefix("edge "): node
            for name, node in inputs.items()
            if name.startswith("edge ") and (is_dgl or node in self.nodes)
        }
        self.whole |= dict.fromkeys(self.fields.values(), self.edges)

    @property
    def small(self) -> Recorded:
        """A recording on the small graph, for its inputs and its size."""
        return self.programs[0].recorded

    @property
    def reads_both_ways(self) -> bool:
        """Whether layers need the edges from their vertices, as an undirected graph has them."""
        return not self.small.reader or any(node.call is flip for node in self.nodes)

    @property
    def edge_sets(self) -> set[Node]:
        """The edge sets by which values of the whole graph are looked up."""
        return {edges for edges in self.whole.values() if edges is not None}

    # -- values ----------------------------------------------------------------------------------

    def inputs_of(
        self,
        whole: CsrEdges,
        edges: Tensor,
        fields: Mapping[str, Tensor],
        source: Tensor | None = None,
        destinations: int = 0,
    ) -> Values:
        """Return the inputs of `forward` that STRUCTURE is computed from.

        fields: the numbers of `self.fields`. source [S]: ids of a part's vertices, which `edges`
        has the positions of; None: the whole graph. destinations: the edges lead to the first of
        the vertices. Raises Unfit if STRUCTURE is computed from rows of vertices."""
        for node in filter(is_rows, self.nodes):
            reader = next((each.place for each in self.nodes if node in each.reads), "")
            raise Unfit(
                f"{reader}forward chooses edges by {node.name.removeprefix('vertex ')} of vertices;"
                " weigh them instead, with 0 for those to leave out, or choose them before, in the"
                " graph's file"
            )
        names = {node.name for node in live_nodes({*self.read, *self.answers})}
        given = inputs_on(whole, edges, fields, names, source)
        inputs = self.small.inputs
        values = {inputs[name]: value for name, value in given.items() if name in inputs}
        return values | {self.edges: edges, DESTINATIONS: destinations}

    @staticmethod
    def _compute(
        wanted: Collection[Node], place: Place, values: Values, given: Collection[Node] = ()
    ) -> Values:
        """Return the wanted values and keep no others; values: the inputs of `forward`.

        given: the nodes that `place` looks up."""
        nodes = live_nodes(wanted, given)
        calls = [node for node in nodes if node.call is not None]
        with torch.no_grad():
            place.run(calls, values, frees(nodes, wanted))
        return {node: values[node] for node in wanted if node is not BLOCK}

    def values_on(self, whole: CsrEdges, wanted: Collection[Node], rows: Values) -> Values:
        """Return values on the whole graph; rows: the fields of vertices that they need."""
        fields = {name: typed(whole.fields[name], self.dtype) for name in self.fields}
        values = self.inputs_of(whole, edge_index_of(whole), fields) | rows
        return self._compute(wanted, self.place, values)

    def on_whole(self, whole: CsrEdges) -> Mapping[Node, Any]:
        """Return, and cache, the tables of the values that only the whole graph determines."""
        if whole not in self.tables:
            wanted = self.whole.keys() | self.edge_sets
            values = self.values_on(whole, wanted, {}) if wanted else {}
            self.tables[whole] = self._tables_of(values, whole.vertices)
        return self.tables[whole]

    def _tables_of(self, values: Values, vertices: int) -> dict[Node, Any]:
        """Return a Table of values of edges, and other values as they are."""
        return {
            node: values[node]
            if edges is None
            else Table(values[edges], values[node][: values[edges].shape[1]], vertices)
            for node, edges in self.whole.items()
        }

    def must_answer_alike(self, whole: CsrEdges, of_vertices: Mapping[str, np.ndarray]) -> None:
        """Raise Asked if `forward` reads another number from a graph than when recorded, and Unfit
        if edges that a mask chooses may then be mistaken for others.

        `forward` was recorded on graphs in which only the first vertex has no edges, and each value
        of a field occurs. of_vertices: the fields of vertices."""
        if not self.answers:
            return
        rows = {
            node: typed(of_vertices[node.name.removeprefix("vertex ")], self.dtype)
            for node in live_nodes(self.answers)
            if is_rows(node)
        }
        values = self.values_on(whole, self.answers, rows)
        for node, found in sorted(values.items(), key=lambda v: v[0].call is not left_none_out):
            if self.answers[node] is None:
                raise Asked(f"{node.place}{NUMBERS_ASKED.format(node.what)}")
            times, number = self.answers[node]
            expected = times * whole.vertices + number if times else number
            if found != expected and node.call is left_none_out:
                raise Unfit(
                    f"{node.place}forward leaves out edges of this graph, and of the graphs that it"
                    " was recorded on none, so it is not known which number of edges later calls"
                    " mean; weigh edges instead, with 0 for those to leave out, or choose them"
                    " before, in the graph's file"
                )
            if found != expected:
                told = found.item() if isinstance(found, Tensor) else found
                raise Asked(
                    f"{node.place}forward reads {node.what} of the edges or fields, which is"
                    f" {told} on this graph, but {expected} was expected, as on the graphs"
                    " that it was recorded on (only their first vertex has no edges, a field has"
                    " each value); use x.size(0) for the number of vertices, and do not branch"
                )

    def of_block(self, block: Block) -> Values:
        """Return the STRUCTURE that layers read on a block, on the block's device."""
        part, values = self._part(block, self.on_whole(block.graph_edges))
        found = self._compute(self.read | self.edge_sets, part, values, self.whole)
        read, device = {n: found[n] for n in self.read & found.keys()}, block.indptr.device
        return {n: v.to(device) if hasattr(v, "to") else v for n, v in read.items()}

    def _part(self, block: Block, tables: Mapping[Node, Any]) -> tuple[_Part, Values]:
        """Return a block as a part of its graph, and the inputs of `forward` on it."""
        source, ends = block.source.cpu(), [block.indices, block.readers]
        edges = torch.stack(ends if self.small.reader else ends[::-1]).long().cpu()
        part = _Part(self.place.named, structure=self, source=source, tables=tables)
        fields = {name: tables[node].at(source[edges]) for name, node in self.fields.items()}
        return part, self.inputs_of(block.graph_edges, edges, fields, source, block.n_dst)

    def is_of_vertices(self, node: Node) -> bool:
        """Whether a value has a row per vertex."""
        value = node.value
        return bool(value.ndim) and value.shape[0] == self.small.vertices

    # -- what only the whole graph determines ------------------------------------------------------

    def find_whole(self, block: Block) -> None:
        """Add to `whole` the values that differ on a part of the small graph. Raises Unfit."""
        n, edges = block.graph_edges.vertices, edge_index_of(block.graph_edges)
        every = {node: node.value for node in (*self.nodes, *self.fields.values())} | {
            self.edges: edges
        }
        tables = self._tables_of(every, n)
        part, values = self._part(block, tables)
        sets: list[Node] = [node for node in self.nodes if node.name == "edge_index"]
        if (of_graph := self.small.inputs.get(EDGES_OF)) is not None:
            sets, values[of_graph] = [of_graph], part.call(of_graph, values)
        self.ids |= {*sets}
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
                    " their places, as argsort tells, or vertices by ids, where a part has others;"
                    " add up rows over edges by index_add, and choose vertices by a mask of all,"
                    " as torch.arange(x.size(0)) % 2 == 0"
                ) from error
            if node in edge_sets:
                sets.append(node)
                self.ids.add(node)
                self._must_be_the_same(node, block, values[node])
            elif (
                node not in tables and isinstance(node.value, Tensor) and not is_sparse(node.value)
            ):
                self._compare(node, values, part, sets, block.n_dst)

    def _must_be_the_same(self, node: Node, block: Block, edges: Tensor) -> None:
        """Raise Unfit if an edge set has other edges into a part's own vertices than the whole."""
        source, n = block.source, block.graph_edges.vertices
        is_own = torch.zeros(n, dtype=torch.bool)
        is_own[source[: block.n_dst]] = True
        if bool((edges >= 0).all()) and bool((edges < len(source)).all()):
            found, expected = (
                keys(each[:, is_own[each[self.small.reader]]], n).sort().values
                for each in (source[edges], node.value)
            )
            if torch.equal(found, expected):
                return
        if turns := next((each for each in live_nodes([node]) if each.call is flip), None):
            raise Unfit(f"{turns.place}{OF_TURNED}")
        given = self.small.inputs.get("edge_index")
        if (
            given is not None
            and torch.isin(keys(given.value.flip(0), n), keys(node.value, n)).all()
        ):
            raise Unfit(f"{node.place}{node.what} makes other edges, {TURNED}")
        raise Unfit(
            f"{node.place}{node.what} makes other edges of a part of the graph than of the"
            " whole, as some edges by their places, or edges that the graph lacks; give"
            " convolutions the edges into each vertex, all of them"
        )

    def _compare(self, node: Node, values: Values, part: _Part, sets: list[Node], own: int) -> None:
        """Add a node, or one that it reads, to `whole` if its rows of a part's own vertices, or of
        the edges into them, differ from the whole graph's."""
        value, n, here = node.value, self.small.vertices, values[node]
        sizes = {n, *(s.value.shape[1] for s in self.nodes if is_edge_set(s.value))}
        # edges whose numbers it may be, the part's own rows, and a table to look up: of each order
        # that edges are in
        views: list[tuple[Node | None, Any, Any]] = [(None, ..., value)]
        if self.is_of_vertices(node):
            views = [(None, slice(0, own), value)]
        elif value.ndim and (found := [s for s in sets if s.value.shape[1] == value.shape[0]]):
            end, near = self.small.reader, {*live_nodes([node])}
            found = [s for s in found if s in near] or found
            views = [(s, values[s][end] < own, Table(s.value, value, n)) for s in found]
        elif sizes & {*value.shape}:
            return  # else it is one value for all, such as a largest weight
        for edges, mine, table in views:
            whole = part.look_up(node, edges, table, values)
            if whole.shape == here.shape and _alike(here[mine], whole[mine], part.source):
                if self._reads_ids(node, values, part):
                    break
                if differing(whole[mine], here[mine]) is not None:
                    self.ids.add(node)
                if self.is_of_vertices(node):
                    is_partial = not _alike(here, whole, part.source)
                    if is_partial or self.partial.difference(self.whole).intersection(node.reads):
                        self.partial.add(node)
                        if node in self.of_neighbours:
                            break
                    return
                if edges is None and _sums_up(node, sizes):
                    break
                if edges is None or not self._reads_others(node, values, part, mine, own):
                    return
                break
        for read in node.reads:  # a part may lack numbers of neighbours, as their degrees
            if edges is not None and read not in self.whole and self._is_real(read):
                self.whole[read] = None
                values[read] = read.value[part.source]
                values[node] = part.call(node, values)
                self._compare(node, values, part, sets, own)
                return
        if self._tells_places(node, {s.value.shape[1] for s in sets}):
            self.places.add(node)
            return
        self.whole[node] = edges
        values[node] = whole

    def _reads_ids(self, node: Node, values: Values, part: _Part) -> bool:
        """Whether numbers depend on vertices' ids, of which a part has positions, though they are
        the whole graph's here, where ids are small: as source < 2000."""
        far = {read: values[read] + FAR for read in self.ids.intersection(node.reads)}
        if not far:
            return False
        with suppress(IndexError, RuntimeError):  # it picks or adds up rows at ids
            here, found = values[node], part.call(node, {**values, **far})
            same = here, here + FAR
            return found.shape == here.shape and None not in [differing(s, found) for s in same]
        return False

    def _reads_others(self, node: Node, values: Values, part: _Part, mine: Any, own: int) -> bool:
        """Whether numbers of edges depend on rows of vertices that a part lacks, though they are
        the whole graph's here, where vertices have few edges: as (degrees > 20)[source]."""
        for read in self.partial.difference(self.whole).intersection(node.reads):
            rows = values[read].clone()
            rows[own:] = rows[own:] * 1.5 + 0.7 if rows.is_floating_point() else rows[own:] ^ 1
            with suppress(IndexError, RuntimeError):  # another number may be no index
                found = part.call(node, {**values, read: rows})
                if differing(values[node][mine], found[mine]) is None:
                    continue
            return True
        return False

    def _tells_places(self, node: Node, counts: Collection[int]) -> bool:
        """Whether a value is an order of edges, as argsort makes it, or follows from one.

        A part has an order of its own edges, and nothing to look up."""
        orders = (node, *node.reads)
        return bool(self.places & {*node.reads}) or any(
            len(value) in counts and torch.equal(value.sort().values, torch.arange(len(value)))
            for each in orders
            for value in tensors(each.value)
            if value.ndim == 1 and value.dtype == torch.int64
        )

    def _is_real(self, node: Node) -> bool:
        """Whether a value is real numbers of vertices, and not their ids."""
        value = node.value
        is_dense = isinstance(value, Tensor) and not is_sparse(value) and value.is_floating_point()
        return is_dense and self.is_of_vertices(node)


def _sums_up(node: Node, sizes: Collection[int]) -> bool:
    """Whether a value may be one for all rows that it is computed from, as their largest; sizes:
    the numbers of vertices and edges."""
    reads = [
        read
        for each in node.reads
        for read in ([each] if isinstance(each.value, Tensor) else each.reads)
    ]
    shapes = [read.value.shape for read in reads if isinstance(read.value, Tensor)]
    return any(node.value.shape in (s[1:], ()) for s in shapes if s and s[0] in sizes)


def _alike(found: Tensor, expected: Tensor, source: Tensor) -> bool:
    """Whether a part found what is expected, or the positions of these ids in `source`."""
    if differing(expected, found) is None:
        return True
    is_id = found.dtype == torch.int64 and found.numel() > 0
    is_id = is_id and bool(found.min() >= 0) and bool(found.max() < len(source))
    return is_id and torch.equal(source[found], expected)


def typed(field: np.ndarray, dtype: torch.dtype) -> Tensor:
    """Return a copy of a field as a tensor; real numbers in the given type."""
    value = torch.from_numpy(np.array(field))
    return value.to(dtype) if value.is_floating_point() else value


def inputs_on(
    whole: CsrEdges,
    edges: Tensor,
    on_edges: Mapping[str, Tensor],
    names: Collection[str],
    source: Tensor | None = None,
) -> dict[str, Any]:
    """Return the inputs of `forward` that follow from edges [2, E], by name; `names` are wanted.

    on_edges: the fields of these edges. If the graph has self-loops, ones follow for them, as
    dgl.add_self_loop writes them. source: see Structure.inputs_of; a part's DGL graph tells the
    whole graph's degrees."""
    vertices = whole.vertices if source is None else len(source)
    if whole.loops:
        on_edges = {
            name: torch.cat([field, field.new_ones((vertices, *field.shape[1:]))])
            for name, field in on_edges.items()
        }
    values: dict[str, Any] = {"edge_index": edges, "vertices": vertices}
    values |= {f"edge {name}": field for name, field in on_edges.items()}
    if "g" in names:
        import dgl

        ends = with_loops(edges, vertices) if whole.loops else edges
        values["g"] = graph = dgl.graph((ends[0], ends[1]), num_nodes=vertices)
        graph.edata.update(on_edges)
        if source is not None:
            ins, outs = (torch.from_numpy(degrees) for degrees in whole.degrees)
            graph.in_degrees = lambda *_, **__: ins[source]
            graph.out_degrees = lambda *_, **__: outs[source]
    return values
