"""Cuts the calls of a recorded `forward` into layers, by what each call reads.

A node is of one of these kinds, which running its call shows:

    FIXED       computed from parameters and plain numbers alone
    FREE        as FIXED, with as many equal rows as there are vertices
    STRUCTURE   computed from edges and their fields alone
    ROWS        one row per vertex, computed from own rows or, through edges, from neighbours' rows
    CHOSEN      computed from own rows: some vertices' rows, as x[mask], or several rows per vertex
    INNER       computed from edges and rows: a step between the rows read and the rows computed

A layer has three pieces. The pieces of all layers are numbered:

    layer l:   3 l - 3   prepare  row-wise: batch norm, and what follows it   (layer 1: everything)
               3 l - 2   gather   over edges
               3 l - 1   update   row-wise, up to a batch norm

Each value belongs to the first piece that can compute it; the features belong to piece 0. A call
that reads neighbours' rows belongs to the next gather, and the owner of a vertex computes what
follows row by row. A call that reads, through edges, only rows of these edges' destinations (as a
softmax over a vertex's edges does) stays in the gather that computes these rows. Batch norm alone
reads rows of other vertices row-wise: it begins a piece, so that its moments can be summed over all
ranks. A batch norm that follows another one, or precedes all gathers, begins a layer that gathers
nothing."""

from __future__ import annotations

import operator
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from gnnplan.executor.layers.kernels import aggregate
from gnnplan.executor.modules.evaluate import (
    Place,
    frees,
    grouped,
    keys,
    matrix_edges,
    numbers,
    tensors,
    with_loops,
)
from gnnplan.executor.modules.record import (
    CHOSEN,
    FIXED,
    FREE,
    INNER,
    ROWS,
    STRUCTURE,
    Node,
    Recorded,
    Unfit,
    edge_sets_of,
    is_edge_set,
    is_end,
    is_rows,
    is_sparse,
    leaves_of,
    live_nodes,
    masks_of,
)
from gnnplan.executor.modules.rewrite import (
    edge_scale,
    edge_sums,
    is_batch_norm,
    merge_equal_calls,
    norm_arguments,
    norm_edges,
)

# the edges that a layer receives as a Block, and how many vertices these edges lead to
BLOCK = Node(None, name="block", kind=STRUCTURE)
DESTINATIONS = Node(None, name="destinations", kind=STRUCTURE)
PREPARE, GATHER, UPDATE = 0, 1, 2
OWN = (ROWS, CHOSEN)  # computed row by row
CLOSE = {torch.float64: 1e-9, torch.float32: 1e-3}  # tolerance of two runs on other rows
MANY = 1 << 16  # times as many vertices and edges, to find calls that pick some by their places
PAIRS = (
    " whose gradient torch makes of all pairs of vertices; multiply rows by weights w of"
    " the edges, 0 for those to leave out:"
    " torch.zeros_like(x).index_add(0, edge_index[1], w[:, None] * x[edge_index[0]])"
)

# a weighted sum over edges: rows, edge set, weights
_Sum = tuple[Node, Node, Node | None]


@dataclass
class Piece:
    """Calls that run together.

    inputs, outputs: the rows that the piece reads and returns; an update reads what its layer's
    prepare and gather return. frees: the values that no later call reads, by call."""

    nodes: list[Node] = field(default_factory=list)  # in the order of calls
    inputs: list[Node] = field(default_factory=list)
    outputs: list[Node] = field(default_factory=list)
    frees: dict[Node, list[Node]] = field(default_factory=dict)


@dataclass
class LayerPieces:
    """The three pieces of a layer."""

    prepare: Piece
    gather: Piece
    update: Piece


@dataclass
class Program:
    """A `forward` cut into layers.

    live: the nodes that the output is computed from. ends: batch norm after the last layer, and the
    calls that follow it. fields: STRUCTURE of a row per vertex that piece 0 reads beside rows."""

    recorded: Recorded
    live: list[Node]
    layers: list[LayerPieces]
    ends: Piece
    fields: set[Node]

    @property
    def inputs(self) -> list[Node]:
        """The fields of vertices that layer 1 reads, side by side."""
        return self.layers[0].prepare.inputs

    @property
    def widths(self) -> list[list[int]]:
        """The numbers per row of each value that a prepare or an update returns."""
        pieces = [piece for cut in self.layers for piece in (cut.prepare, cut.update)]
        return [[width_of(node) for node in piece.outputs] for piece in pieces]


def width_of(node: Node) -> int:
    """Return the numbers per row of a value."""
    return int(node.value.narrow(node.dim, 0, 1).numel())


def rows_at(value: Tensor, vertices: int) -> int | None:
    """Return the dimension in which a tensor has a row per vertex; None: there is none."""
    found = [dim for dim, size in enumerate(value.shape) if size == vertices]
    return found[0] if found[:1] == [0] or len(found) == 1 else None


class Cutter:
    """Finds the kinds and pieces of nodes by running calls on some of their rows.

    place: runs calls on the small graph. trained: names of trained parameters. shared: nodes by
    Node.key that training and evaluation have in common, to which this mode's nodes are added."""

    def __init__(
        self, recorded: Recorded, place: Place, trained: set[str], shared: dict[Hashable, Node]
    ) -> None:
        self.recorded, self.place, self.n = recorded, place, recorded.vertices
        self.shared, self.trained = shared, trained
        inputs = recorded.inputs
        inputs |= {name: shared.setdefault(name, node) for name, node in inputs.items()}
        self.order = merge_equal_calls(recorded, shared)  # in this mode
        self.vertices = recorded.inputs["vertices"]
        self.live = live_nodes([recorded.output])
        self.learned: set[Node] = set()  # computed from trained parameters
        self.fields: set[Node] = set()  # Program.fields
        self.edge_sets = [*recorded.edges_of_graph, *edge_sets_of(self.live)]
        generator = torch.Generator().manual_seed(5)
        self.part = torch.randperm(self.n, generator=generator)[: self.n // 2].sort().values

    # -- kinds and pieces ------------------------------------------------------------------------

    def classify(self, node: Node) -> None:
        """Set a node's kind and, for ROWS and INNER, the first piece that can compute it."""
        kinds = {read.kind for read in node.reads}
        if node.call is None:
            is_free = node.name == "vertices"
            node.kind = ROWS if is_rows(node) else FREE if is_free else STRUCTURE
            node.piece = 0
        elif kinds & {ROWS, CHOSEN, INNER}:
            through = [r for r in node.reads if r.kind == STRUCTURE and not self._is_field(r)]
            needs_all = node.drops or is_batch_norm(node)
            has_several = CHOSEN in kinds and needs_all and self._has_several(node)
            if CHOSEN in kinds and (INNER in kinds or through or (needs_all and not has_several)):
                raise Unfit(
                    f"{node.what} is given rows of some vertices, or several rows of each, where it"
                    " needs one of each; make that first, as out[mask] = rows,"
                    " torch.where(mask[:, None], rows, others) and .view(n, -1) do"
                )
            if INNER in kinds or through:
                self._through_edges(node)
            else:
                if has_several and is_batch_norm(node):
                    self._norm_several(node)
                self._row_by_row(node)
        else:
            if {*node.reads} & self.learned or {*node.tensor_names} & self.trained:
                self.learned.add(node)
            if STRUCTURE in kinds and is_batch_norm(node):
                of_rows = self._is_field(node.reads[0])
                self._row_by_row(node) if of_rows else self._through_edges(node)
            elif STRUCTURE in kinds and (node in self.learned or node.drops):
                node.kind, node.piece = INNER, GATHER  # other numbers in every step
            elif STRUCTURE in kinds or (FREE in kinds and not self._is_free(node)):
                node.kind = STRUCTURE
            else:
                node.kind = FREE if FREE in kinds else FIXED
        if node.kind == ROWS and isinstance(node.value, Tensor):
            node.dim = rows_at(node.value, self.n) or 0
        if node.kind == INNER and (is_edge_set(node.value) or is_end(node.value)):
            masks = [
                r for r in node.reads if isinstance(r.value, Tensor) and r.value.dtype == torch.bool
            ]
            if any(each.drops for each in live_nodes(masks)):
                raise Unfit(
                    f"{node.what} leaves out edges by dropout, and none is left out where forward"
                    " is recorded; weigh them, to drop whole ones, by"
                    " F.dropout(torch.ones(number, 1), p, self.training)"
                )
        if node.kind == INNER and node.drops:
            node.edges = self.edge_set_of(node)
            if node.edges is None:
                raise Unfit("dropout of something that is no rows of edges")
        if node.call is not None and node.kind != FIXED:
            self._must_pick_no_places(node)

    def _must_pick_no_places(self, node: Node) -> None:
        """Raise Unfit if a call picks rows up to a place, as h[:2000] does where there are more.

        It runs without numbers, on MANY times as many vertices and edges."""
        numbers = [n for n in leaves_of((node.args, node.kwargs)) if type(n) is int and n > self.n]
        if not numbers:
            return
        picks = node
        if node.what == "setitem":  # what it changes
            picks = replace(node, call=operator.getitem, args=node.args[:2], in_place=False)
            picks.value = self.place.call(picks, {read: read.value for read in picks.reads})
        sizes = {self.n, *(edges.value.shape[1] for edges in self.edge_sets)}
        chosen = (each.value for each in (node, *node.reads) if each.kind == CHOSEN)
        sizes |= {value.shape[0] for value in tensors([*chosen])}

        def empty(value: Any, times: int = MANY) -> Any:
            """Return an empty tensor of so many times its rows, or so many times a size."""
            if not isinstance(value, Tensor):
                return value * times if type(value) is int else value
            shape = [*value.shape]
            for dim in [dim for dim, size in enumerate(shape) if size in sizes][:1]:
                shape[dim] *= times
            return torch.empty(shape, dtype=value.dtype, device="meta")

        def many(read: Node) -> Any:
            return tree_map(partial(empty, times=1 if read.kind == FIXED else MANY), read.value)

        place = Place(lambda name: empty(self.place.named(name), 1), device=torch.device("meta"))
        try:
            found = place.call(picks, {read: many(read) for read in picks.reads})
        except Exception:  # numbers tell how many there are
            return
        both = ([each.shape for each in tensors(value)] for value in (found, many(picks)))
        if operator.ne(*both):
            raise Unfit(
                f"{node.what} picks rows by their places ({', '.join(map(str, numbers))}), and a"
                " rank has other rows there; choose vertices by a field, as kind == 0, or by their"
                " ids, as torch.arange(x.size(0)) < 2000, in torch.where or as a mask, and cut rows"
                " into chunks, to save memory, by x.split(2000)"
            )

    def _is_free(self, node: Node) -> bool:
        """Whether a value has equal rows, or is a multiple of the number of vertices."""
        return type(node.value) is int or (
            self._has_rows(node)
            and all(torch.equal(rows, rows[:1].expand_as(rows)) for rows in self._rows(node.value))
        )

    def _has_rows(self, node: Node) -> bool:
        """Whether all tensors of a value have a row per vertex, and there are some."""
        found = tensors(node.value)
        return bool(found) and all(
            v.layout == torch.strided and rows_at(v, self.n) is not None for v in found
        )

    def _rows(self, value: Any) -> list[Tensor]:
        """Return a value's tensors with the vertices in the first dimension."""
        return [found.movedim(rows_at(found, self.n) or 0, 0) for found in tensors(value)]

    def _is_field(self, node: Node) -> bool:
        """Whether STRUCTURE is real numbers per vertex, which can be read as rows."""
        return all(
            v.is_floating_point() and rows_at(v, self.n) == 0 for v in tensors(node.value)
        ) and self._has_rows(node)

    def _row_by_row(self, node: Node) -> None:
        piece = max((read.piece for read in node.reads if read.kind in OWN), default=0)
        structure = [read for read in node.reads if read.kind == STRUCTURE]
        node.replace_reads({read: self._as_rows(read, piece) for read in structure})
        node.kind = ROWS
        if is_batch_norm(node):  # it begins a layer, but not the first one
            self._must_be_normed_by_columns(node, node.value.shape[0] == self.n)
            piece = self._after_norm(piece)
        elif not self._has_rows(node) and self._is_vertex_by_vertex(node):
            node.kind = CHOSEN
        else:
            self._must_be_row_by_row(node)
        node.piece = piece

    def _as_rows(self, node: Node, piece: int) -> Node:
        """Return STRUCTURE of a row per vertex as ROWS that a piece can read.

        The gather before the piece computes it on its block. Piece 0 reads it for neighbours too,
        of which only the whole graph knows it."""
        if not piece:
            self.fields.add(node)
        rows = Node(_same, (node,), line=node.line, value=node.value, index=node.index, kind=ROWS)
        self.order[rows] = self.order[node]
        rows.piece = piece - 2 if piece and piece % 3 == PREPARE else piece
        return rows

    def _must_be_row_by_row(self, node: Node) -> None:
        """Raise Unfit if a vertex's row changes when only some vertices are present."""
        if not self._has_rows(node):
            shapes = [list(v.shape) for v in tensors(node.value)]
            raise Unfit(
                f"{node.what} makes {shapes[0] if shapes else 'no rows'} of the rows of all"
                f" {self.n} vertices, as a graph's readout or a norm of all rows does; a row here"
                " is made of its vertex's own and its neighbours': norm by torch.nn.LayerNorm or"
                " torch.nn.BatchNorm1d"
            )
        if node.drops:
            return

        parts = [self.part]
        for value in (value for read in node.reads for value in tensors(read.value)):
            if value.dtype == torch.int64 and value.shape == (self.n,):
                parts += [(value < value.max()).nonzero()[:, 0]]  # one_hot looks at the largest
        for part in parts:
            if len(part):
                self._must_equal_alone(node, part)

    def _must_equal_alone(self, node: Node, part: Tensor) -> None:
        """Raise Unfit if a call makes other rows where only a part of the vertices is present."""
        try:
            found = self._alone(node, part)
        except Exception as error:
            raise Unfit(
                f"{node.what} fails on the rows of a part of the vertices"
                f" ({str(error).splitlines()[0] if str(error) else type(error).__name__:.120}): it"
                " is given something of all; give it a row of each vertex, and add up rows over"
                " edges, by index_add or torch.sparse.mm"
            ) from error
        for whole, alone in zip(tensors(node.value), tensors(found), strict=True):
            dim, expected = rows_at(whole, self.n) or 0, self._rows_of(whole, part)
            wrong: int | None = 0
            if expected.shape == alone.shape:
                wrong = differing(expected.movedim(dim, 0), alone.movedim(dim, 0))
            if wrong is not None:
                present = set(part.tolist())
                absent = next(v for v in range(self.n) if v not in present)
                raise Unfit(
                    f"{node.what} gives vertex {int(part[wrong])} another row when vertex"
                    f" {absent} is absent: it looks at all vertices; use what looks at each row"
                    " alone, as one_hot with num_classes, or torch.nn.BatchNorm1d"
                )

    def _rows_of(self, value: Any, some: Tensor) -> Any:
        """Return the rows of some vertices, of a tensor with a row per vertex."""
        dim = rows_at(value, self.n) if isinstance(value, Tensor) else None
        return value if dim is None else value.index_select(dim, some)

    def _alone(self, node: Node, some: Tensor) -> Any:
        """Return the value of a row-wise call where only some vertices are present."""
        values: dict[Node, Any] = {self.vertices: len(some)}
        for read in (read for read in node.reads if read is not self.vertices):
            values[read] = read.value
            if read.kind == CHOSEN or type(read.value) is int:
                values[read] = self._alone(read, some)
            elif read.kind in (ROWS, FREE):
                values[read] = tree_map(lambda value: self._rows_of(value, some), read.value)
        with torch.no_grad():
            return self.place.call(node, values)

    def _is_vertex_by_vertex(self, node: Node) -> bool:
        """Whether a value is what each vertex alone makes of its rows, one after the other; or the
        ids of the vertices that make something."""
        try:
            alone = [tensors(self._alone(node, v)) for v in torch.arange(self.n)[:, None]]
            parts = list(zip(*alone, strict=True))
            joined = list(map(torch.cat, parts))
        except (RuntimeError, LookupError, ValueError):
            return False
        ids = torch.arange(self.n).repeat_interleave(torch.tensor([len(p) for p in parts[0]]))
        return all(
            differing(value, each) is None
            or (value.dtype == torch.int64 and torch.equal(value.flatten(), ids))
            for value, each in zip(tensors(node.value), joined, strict=True)
        )

    def _has_several(self, node: Node) -> bool:
        """Whether a call reads as many rows of each vertex, one vertex after the other."""
        rows = node.reads[0]
        each = {len(self._alone(rows, vertex)) for vertex in torch.arange(self.n)[:, None]}
        return each == {len(rows.value) / self.n}

    def _through_edges(self, node: Node) -> None:
        if is_batch_norm(node):
            self._norm_several(node)
        node.piece = GATHER
        for read in node.reads:
            piece = read.piece if read.kind in (ROWS, INNER) else 0
            if read.kind == ROWS and piece % 3 != GATHER:
                piece += 1
            elif read.kind == ROWS and not self._reads_own(node, read):
                piece += 3  # gathered rows of neighbours must be exchanged first
            node.piece = max(node.piece, piece)
        node.kind = ROWS if self._has_rows(node) else INNER

    @staticmethod
    def _must_be_normed_by_columns(node: Node, has_rows: bool) -> None:
        if norm_arguments(node)["running_mean"] is None:
            raise Unfit(
                "a batch norm without running averages has no moments in evaluation; use"
                " track_running_stats=True"
            )
        if len(node.reads) > 1:
            raise Unfit(
                "a batch norm whose weights are computed; multiply its rows by them instead"
            )
        if node.value.ndim != 2 or not has_rows:
            raise Unfit(f"batch norm of {list(node.value.shape)}; flatten its rows")

    def _norm_several(self, node: Node) -> None:
        """Let a batch norm of edges, or of several rows of each vertex, read a row of the vertex,
        which another batch norm makes of the sums over the edges into it, or over its rows."""
        given, end = node.reads[0], self.recorded.reader
        edges = None if given.kind == CHOSEN else self.edge_set_of(node)
        self._must_be_normed_by_columns(node, given.kind == CHOSEN or edges is not None)
        arguments = norm_arguments(node)
        sums = replace(node, call=edge_sums, args=(given, edges, end, self.vertices), kwargs={})
        scale = replace(node, call=edge_scale, args=(sums,), kwargs=arguments)
        del arguments["input"]
        for new, index in ((sums, 0.2), (scale, 0.1)):
            new.kind, new.index, self.order[new] = ROWS, node.index - index, self.order[node]
        sums.value = node.value.new_ones(self.n, 2 * node.value.shape[1] + 1)
        names = [arguments[name] for name in ("running_mean", "running_var", "weight")]
        mean, variance, weight = (each and self.place.named(each.name) for each in names)
        if arguments["training"]:
            mean, variance = given.value.mean(0), given.value.var(0, unbiased=False)
        scale.value = edge_scale(sums.value, mean, variance, weight, arguments["eps"]).detach()
        sums.piece = max(given.piece, 0 if edges is None else GATHER)
        scale.piece = self._after_norm(sums.piece)
        node.call, node.kwargs = norm_edges, {}
        node.args = (given, scale, edges, end, arguments["bias"])

    @staticmethod
    def _after_norm(piece: int) -> int:
        """Return the piece that begins with a batch norm of rows from a piece."""
        return piece + (3 if piece % 3 == PREPARE else 2)

    def _reads_own(self, node: Node, read: Node) -> bool:
        """Whether the value of an edge, or vertex, depends on the row of its destination alone."""
        if self._has_rows(node):
            owner = torch.arange(self.n)
        elif (edges := self.edge_set_of(node)) is not None:
            owner = edges.value[self.recorded.reader]
        else:
            return False
        touched = torch.zeros(self.n, dtype=torch.bool)
        touched[self.part] = True

        def changed(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            copy = value.clone()
            (rows,) = self._rows(copy)
            some = rows[touched]
            rows[touched] = some * 1.5 + 0.7 if value.is_floating_point() else some.flip(0)
            return copy

        values = {each: each.value for each in node.reads} | {read: tree_map(changed, read.value)}
        with torch.no_grad():
            found = self.place.call(node, values)
        rows_of = self._rows if self._has_rows(node) else tensors
        for before, after in zip(rows_of(node.value), rows_of(found), strict=True):
            if before.shape != after.shape or before.shape[:1] != owner.shape:
                return False
            differs = (before != after) & ~((before != before) & (after != after))
            if (differs.flatten(1).any(1) if differs.ndim > 1 else differs)[~touched[owner]].any():
                return False
        return True

    def edge_set_of(self, node: Node) -> Node | None:
        """Return the last edge set before a value that has as many edges as the value has rows.

        Of several, those are preferred that it is computed from without rows of vertices."""
        sizes = {v.shape[0] for v in tensors(node.value) if v.ndim}
        found = [
            edges
            for edges in self.edge_sets
            if self.order[edges] < self.order[node] and sizes == {edges.value.shape[1]}
        ]
        if len(found) > 1:
            rows = {each for each in self.live if each.kind == ROWS and each is not node}
            near = {*live_nodes([node], rows)}
            found = [edges for edges in found if edges in near] or found
        return max(found, key=self.order.__getitem__, default=None)

    # -- sums over edges -------------------------------------------------------------------------

    def _sum_by_kernel(self) -> None:
        """Replace calls that sum rows over edges by our kernel, which needs no row per edge.

        Raises Unfit if a sparse matrix is in no such call."""
        for node in self.live:
            if node.kind not in (ROWS, INNER) or node.call is None:
                continue
            matrices = [read for read in node.reads if is_sparse(read.value)]
            if is_sparse(node.value):
                chosen = any(mask.kind in (*OWN, INNER) for mask in masks_of(node))
                which = (
                    "edges that rows of vertices choose"
                    if chosen
                    else "numbers that are learned or dropped"
                )
                raise Unfit(f"{node.place}{node.what} makes a sparse matrix of {which},{PAIRS}")
            found = None
            if node.kind == ROWS:
                found = self._product(node, matrices) if matrices else self._scatter(node)
            if found and self._is_sum(node, *found):  # `_group` adds the Block
                node.call, node.in_place, node.args, node.kwargs = aggregate, False, found, {}
            elif matrices:
                raise Unfit(
                    f"{node.place}{node.what} of a sparse matrix is no product with rows; multiply,"
                    " as torch.sparse.mm(adj, x) does, and add, divide or drop rows"
                )
        self.live = live_nodes([self.recorded.output])

    def _ends(self, edges: Node) -> tuple[Tensor, Tensor]:
        """Return the sources and readers of an edge set."""
        ends, reader = edges.value, self.recorded.reader
        return ends[1 - reader], ends[reader]

    def _is_sum(self, node: Node, rows: Node, edges: Node, weight: Node | None) -> bool:
        if not rows.value.is_floating_point():  # which the kernel needs
            return False
        source, reader = self._ends(edges)
        sent = rows.value[source]
        if weight is not None:
            sent = sent * weight.value
        added = torch.zeros_like(rows.value).index_add(0, reader, sent)
        return differing(node.value, added) is None

    def _product(self, node: Node, matrices: Sequence[Node]) -> _Sum | None:
        """Return the sum that a product of a sparse matrix and rows [N, H] may be.

        The edges are the graph's where equal: also if an undirected graph's matrix is transposed.
        """
        rows = self._rows_2d(node)
        if len(node.reads) != 2 or not len(matrices) == len(rows) == 1:
            return None
        matrix = matrices[0]
        if matrix.value.shape != (self.n, self.n):
            return None

        def structure(call: Any, *reads: Node) -> Node:
            value = call(*(read.value for read in reads))
            new = Node(call, reads, line=matrix.line, value=value, kind=STRUCTURE)
            return self.shared.setdefault(new.key, new)

        if not self.recorded.reader:
            matrix = structure(torch.t, matrix)
        edges, given = structure(matrix_edges, matrix), self.recorded.inputs.get("edge_index")
        if given is not None:
            for same in (given, structure(with_loops, given, self.vertices)):
                if torch.equal(*(keys(e.value, self.n).sort().values for e in (same, edges))):
                    edges = same
        weight = structure(numbers, matrix, edges)
        is_plain = bool((weight.value == 1).all()) and not masks_of(matrix)
        return rows[0], edges, None if is_plain else weight

    def _scatter(self, node: Node) -> _Sum | None:
        """Return the sum that a call may compute which scatters rows [N, H] of edges' sources."""
        if node.what not in ("scatter_add", "index_add") or self.learned & {*node.reads}:
            return None
        messages = read = node.reads[-1]
        weight, edges = None, self.edge_set_of(messages)
        if messages.what in ("mul", "multiply") and len(messages.reads) == 2:
            weight, read = sorted(messages.reads, key=lambda each: each.kind == INNER)
        rows, is_indexed = self._rows_2d(read), read.what in ("index_select", "getitem")
        if edges is None or len(rows) != 1 or not is_indexed or len(read.reads) != 2:
            return None
        source, _ = self._ends(edges)
        if not any(torch.equal(each.value, source) for each in read.reads):
            return None
        indices = [each for each in (*node.reads, *read.reads) if each.kind == STRUCTURE]
        if any(masks_of(index) - masks_of(edges) for index in indices):
            return None  # all of the edges, but of this graph alone
        if weight is None or (weight.kind == STRUCTURE and weight.value.shape == (len(source), 1)):
            return rows[0], edges, weight
        return None

    @staticmethod
    def _rows_2d(node: Node) -> list[Node]:
        """Return the rows [N, H] that a call reads."""
        rows = [r for r in node.reads if r.kind == ROWS and isinstance(r.value, Tensor)]
        return [read for read in rows if read.value.ndim == 2 and not read.dim]

    def _group(self, piece: Piece) -> None:
        """Give sums the Block of their edges, by destination.

        The destinations are all vertices of the layer's block if other calls of the piece read the
        sum, else the block's destinations alone."""
        for node in piece.nodes:
            if node.call is aggregate:
                rows, edges, *weight = node.args
                is_read = any(node in other.reads for other in piece.nodes)
                if edges.name == "edge_index" and not any(weight) and not is_read:
                    block = BLOCK
                else:
                    readers = self.vertices if is_read else DESTINATIONS
                    given = (edges, self.recorded.reader, readers, self.vertices, *weight)
                    block = Node(grouped, given, kind=STRUCTURE)
                    block = self.shared.setdefault(block.key, block)
                node.args = (block, rows)

    # -- pieces ----------------------------------------------------------------------------------

    def cut(self) -> Program:
        """Cut the recorded `forward` into layers. Raises Unfit with the line."""
        for node in self.live:
            try:
                self.classify(node)
            except Unfit as unfit:
                raise Unfit(f"{node.place}{unfit}") from None
        self._sum_by_kernel()
        output = self.recorded.output
        if not any(node.kind == ROWS and node.call is None for node in self.live):
            raise Unfit(
                "forward reads no rows of vertices: its output follows from edges and parameters"
                " alone; begin with x, or with a field of vertices, instead of torch.ones"
            )
        if output.kind != ROWS or output.value.ndim != 2 or output.dim:
            raise Unfit(
                f"{output.place}forward returns {list(output.value.shape)} of {self.n} vertices;"
                " return a row of logits for each"
            )
        self._assign_pieces()
        computed = [n for n in self.live if n.kind == ROWS and n.call is not None]
        if not any(n.runs_in % 3 == GATHER and n.piece for n in computed):
            raise Unfit(
                "no convolution's rows reach the output; return what they make. Where no row is"
                " made of others, ranks have nothing to exchange, and torch alone trains the module"
            )
        layers = (output.piece + 2) // 3
        end = 3 * layers + 1  # the number of pieces: one follows the last layer's
        pieces = [Piece([n for n in computed if n.runs_in == at]) for at in range(end)]
        readers: dict[Node, set[int]] = {n: set() for n in self.live if n.kind == ROWS}
        readers[output].add(end)
        handed = {node for node in self.live if node.kind in (ROWS, STRUCTURE)}
        for at, piece in enumerate(pieces):
            given = handed - {*piece.nodes}  # each piece computes nodes of other kinds anew
            piece.nodes = [n for n in live_nodes(piece.nodes, given) if n not in given]
            self._group(piece)
            for read in {read for node in piece.nodes for read in node.reads}:
                if read.kind == ROWS and (read.call is None or read.runs_in != at):
                    readers[read].add(at)
        self._hand_on(pieces, readers)
        alike = (FIXED, FREE, STRUCTURE)
        self.shared |= {node.key: node for node in self.live if node.kind in alike}
        by_layer = [LayerPieces(*pieces[at : at + 3]) for at in range(0, 3 * layers, 3)]
        return Program(self.recorded, self.live, by_layer, pieces[-1], self.fields)

    def _assign_pieces(self) -> None:
        """Set the piece in which each value of ROWS is computed (`runs_in`)."""
        gathered: set[Node] = set()  # values that a call of the same piece reads through edges
        for node in reversed(self.live):
            is_computed = node.call is not None and node.kind in (*OWN, INNER)
            is_through = any(read.kind in (STRUCTURE, INNER) for read in node.reads)
            if is_computed and (is_through or node in gathered):
                gathered |= {r for r in node.reads if r.kind in OWN and r.piece == node.piece}
                gathered.add(node)
        for node in self.live:
            node.runs_in = node.piece
            if node.kind not in OWN or node.call is None:
                continue
            if _is_one_of_several(node) and node.reads[0].kind == ROWS:
                node.runs_in = node.reads[0].runs_in
            elif node.piece == 0:  # if it is computed from STRUCTURE, it is gathered too
                reads = [r.runs_in for r in node.reads if r.kind in OWN and r.call is not None]
                node.runs_in = max([GATHER if node in gathered else PREPARE, *reads])
            elif node.piece % 3 == GATHER and node not in gathered:
                node.runs_in += 1
        self._delay()

    def _delay(self) -> None:
        """Move values to the last update before they are read, if their inputs are kept until then.

        So they are neither exchanged nor computed for halo rows."""
        readers: dict[Node, list[Node]] = {}
        for node in self.live:
            for read in node.reads:
                readers.setdefault(read, []).append(node)
        for node in reversed(self.live):
            is_computed = node.kind == ROWS and node.call is not None
            stays = is_batch_norm(node) or _is_one_of_several(node) or node.runs_in % 3 == GATHER
            if not (node in readers and is_computed and isinstance(node.value, Tensor)) or stays:
                continue
            first = min(reader.runs_in for reader in readers[node])
            update = first - (first % 3 == PREPARE)  # the last one before `first`
            are_kept = [
                any(each.runs_in >= update - 1 for each in readers[read] if each is not node)
                for read in node.reads
                if read.kind in OWN
            ]
            if update > node.runs_in and update % 3 == UPDATE and all(are_kept):
                node.runs_in = update

    def _hand_on(self, pieces: Sequence[Piece], readers: dict[Node, set[int]]) -> None:
        """Set the rows that each piece reads, and returns because later pieces read them."""

        def alive(at: int) -> list[Node]:
            """Return rows from before piece `at` that it or a later one reads; first its own."""
            found = [
                node
                for node, reads in readers.items()
                if (node.call is None or node.runs_in < at) and any(r >= at for r in reads)
            ]
            return sorted(found, key=lambda node: (at not in readers[node], node.index))

        rows = alive(0)
        for at, piece in enumerate(pieces):
            if at % 3 == PREPARE:
                piece.inputs, piece.outputs = rows, alive(at + 1)
                if not piece.nodes:
                    rows[:] = piece.outputs  # in the same order, so that no rows are copied
            elif at % 3 == GATHER:
                piece.inputs = [node for node in pieces[at - 1].outputs if at in readers[node]]
                piece.outputs = [n for n in alive(at + 1) if n.call is not None and n.runs_in == at]
            else:
                piece.outputs = rows = alive(at + 1)
            piece.frees = frees(piece.nodes, {*piece.outputs})


def _same(value: Any) -> Any:
    return value


def _is_one_of_several(node: Node) -> bool:
    """Whether a node picks one of several tensors that a call returns.

    It stays in the call's piece: rows are handed on as single tensors."""
    is_item = node.call is operator.getitem and isinstance(node.args[0], Node)
    return is_item and isinstance(node.args[0].value, (tuple, list))


def differing(expected: Tensor, found: Tensor) -> int | None:
    """Return a row in which two tensors differ; None if they are equal."""
    if (expected.shape, expected.dtype) != (found.shape, found.dtype):
        return 0
    close = CLOSE.get(expected.dtype, 0.0)
    rows = ~torch.isclose(expected, found, rtol=close, atol=close, equal_nan=True)
    wrong = (rows.flatten(1).any(1) if rows.ndim > 1 else rows.reshape(-1)).nonzero()
    return int(wrong[0]) if len(wrong) else None
