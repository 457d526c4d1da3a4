"""Cuts what a module computes into layers, by what each call reads.

A call is one of these, as running it shows:

    fixed       of parameters and numbers alone
    free        as fixed, with as many equal rows as there are vertices
    structure   of edges and their fields alone
    rows        one row per vertex, made of its own rows or, through edges, of its neighbours'
    inner       of edges and rows: it stands between rows that are read and rows that are made

A layer has three pieces, and the pieces of all layers are numbered:

    layer l:   3 l - 3   prepare  rows: batch norm, and what follows it   (layer 1: everything)
               3 l - 2   gather   over edges
               3 l - 1   update   rows, up to a batch norm

Each value stands in the first piece that can make it. The features are piece 0's. What reads rows
of neighbours is *gathered*, by the next gather; what is then done to rows is done by their owner. A
call that reads, through the edges, only rows of the vertex whose edges they are (as a softmax over
a vertex's edges does) stays in the gather that makes them. Batch norm alone looks at rows of other
vertices; it begins a piece, so that its moments can be summed over all ranks. One that follows
another, or nothing that was gathered, makes a layer that gathers nothing."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
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
    EDGES_OF,
    Node,
    Opaque,
    Recorded,
    Unfit,
    edge_sets_of,
    is_sparse,
    live_nodes,
)

FIXED, FREE, STRUCTURE, ROWS, INNER = "fixed", "free", "structure", "rows", "inner"
BLOCK = Node(None, name="block")  # the edges of the graph or of a part, as a layer is given them
DESTINATIONS = Node(None, name="destinations")  # how many vertices those edges lead to
PREPARE, GATHER, UPDATE = 0, 1, 2
BATCH_NORM = inspect.signature(F.batch_norm)
CLOSE = {torch.float64: 1e-9, torch.float32: 1e-3}  # of two runs of the same on other rows


PAIRS = (
    " whose gradient torch makes of all pairs of vertices; multiply rows by them:"
    " torch.zeros_like(x).index_add(0, edge_index[1], w[:, None] * x[edge_index[0]])"
)


# rows, the edges that they are added up along, and what these weigh
_Sum = tuple[Node, Node, Node | None]


@dataclass
class Piece:
    """Calls that run together, in their order; rows that they are given and make. An update is
    given what its layer's prepare and gather make."""

    nodes: list[Node] = field(default_factory=list)
    given: list[Node] = field(default_factory=list)
    makes: list[Node] = field(default_factory=list)
    # by call: values that nobody needs after it
    frees: dict[Node, list[Node]] = field(default_factory=dict)


@dataclass
class Cut:
    """One layer."""

    prepare: Piece
    gather: Piece
    update: Piece


@dataclass
class Program:
    """A forward in pieces.

    layers: each with its three pieces. ends: batch norm after the last layer, and what follows it;
    or nothing. fields: structure that rows of piece 0 read. drawn: of inner values that are
    dropped, the edge set that they are of. numbers: of all dropouts, in the order of forward."""

    recorded: Recorded
    live: list[Node]
    kind: dict[Node, str]
    layers: list[Cut]
    ends: Piece
    fields: set[Node]
    drawn: dict[Node, Node]
    numbers: dict[Node, int]

    @property
    def output(self) -> Node:
        return self.recorded.output

    @property
    def inputs(self) -> list[Node]:
        """Fields of vertices that layer 1 is given, side by side."""
        return self.layers[0].prepare.given

    @property
    def widths(self) -> list[list[int]]:
        """Numbers per row that each piece makes."""
        pieces = [piece for cut in self.layers for piece in (cut.prepare, cut.update)]
        return [[width_of(node) for node in piece.makes] for piece in pieces]


def width_of(node: Node) -> int:
    """Numbers per row of a value."""
    return int(node.value.narrow(node.dim, 0, 1).numel())


def rows_at(value: Tensor, vertices: int) -> int | None:
    """The dimension in which a tensor has a row per vertex; None: there is none."""
    found = [dim for dim, size in enumerate(value.shape) if size == vertices]
    return found[0] if found[:1] == [0] or len(found) == 1 else None


def cut(
    recorded: Recorded, place: Place, trained: set[str], shared: dict[Hashable, Node]
) -> Program:
    """The layers of a recorded forward.

    place: that of the small graph. trained: names of parameters. shared: structure by its calls,
    which the module's modes have in common. Raises Unfit, with the line."""
    return _Cutter(recorded, place, trained, shared).cut()


class _Cutter:
    """Finds kinds and pieces, by running calls on parts of their rows."""

    def __init__(
        self, recorded: Recorded, place: Place, trained: set[str], shared: dict[Hashable, Node]
    ) -> None:
        self.recorded, self.place, self.n = recorded, place, recorded.vertices
        self.shared = shared
        self.order: dict[Node, float] = {}  # of calls in this mode
        self._merge()
        self.vertices = recorded.inputs["vertices"]
        self.live = live_nodes([recorded.output])
        self.kind: dict[Node, str] = {}
        self.at: dict[Node, int] = {}  # rows and inner values: the first piece that can make them
        self.trained = trained
        self.learned: set[Node] = set()  # of parameters
        self.fields: set[Node] = set()  # structure that rows of piece 0 read
        self.sets = [*self._of_graph, *edge_sets_of(self.live)]
        generator = torch.Generator().manual_seed(5)
        self.part = torch.randperm(self.n, generator=generator)[: self.n // 2].sort().values

    def _merge(self) -> None:
        """Have equal calls be one: not dropout, batch norm, opaque modules, or what rows are put
        into, which would be copied first."""
        first: dict[Node, Node] = {}
        by_call: dict[Hashable, Node] = {}
        inputs = self.recorded.inputs
        inputs |= {name: self.shared.setdefault(name, node) for name, node in inputs.items()}
        live = live_nodes([self.recorded.output, *self.recorded.answers, *self._of_graph])
        of_rows: set[Node] = set()
        for node in live:
            if node.name.startswith("vertex ") or of_rows & {*node.reads}:
                of_rows.add(node)
        changed = {node.reads[0] for node in of_rows if node.changes}
        for node in live:
            node.read_instead(first)
            alone = node.drops or is_batch_norm(node) or isinstance(node.call, Opaque)
            alone = alone or node in changed
            key = node if alone else node.key
            first[node] = by_call.setdefault(key, self.shared.get(key, node))
            self.order.setdefault(first[node], node.index)
        self.recorded.output = first[self.recorded.output]
        self.recorded.answers = {first[node]: told for node, told in self.recorded.answers.items()}

    @property
    def _of_graph(self) -> list[Node]:
        """The edges of a graph of DGL, where calls of its kernels were recorded."""
        inputs = self.recorded.inputs
        return [inputs[EDGES_OF]] if EDGES_OF in inputs else []

    # -- kinds and pieces ------------------------------------------------------------------------

    def classify(self, node: Node) -> None:
        """Find a call's kind, and of rows and inner values the first piece that can make them."""
        if node.call is None:
            is_rows, is_free = node.name.startswith("vertex "), node.name == "vertices"
            self.kind[node] = ROWS if is_rows else FREE if is_free else STRUCTURE
            self.at[node] = 0
            return
        kinds = {self.kind[read] for read in node.reads}
        if not kinds & {ROWS, INNER}:
            is_edges = STRUCTURE in kinds
            if any(read in self.learned for read in node.reads) or set(node.named) & self.trained:
                self.learned.add(node)
            if is_edges and (node in self.learned or node.drops):
                self.kind[node], self.at[node] = INNER, GATHER  # other numbers in every step
            elif is_edges:
                self.kind[node] = STRUCTURE
            elif FREE in kinds:
                alike = self._has_rows(node) and all(
                    torch.equal(rows, rows[:1].expand_as(rows)) for rows in self._rows(node.value)
                )
                self.kind[node] = FREE if alike else STRUCTURE
            else:
                self.kind[node] = FIXED
        elif INNER in kinds or any(
            self.kind[read] == STRUCTURE and not self._is_field(read) for read in node.reads
        ):
            self._through_edges(node)
        else:
            self._row_by_row(node)
        if self.kind[node] == ROWS and isinstance(node.value, Tensor):
            node.dim = rows_at(node.value, self.n) or 0

    def _has_rows(self, node: Node) -> bool:
        """Whether it makes tensors of a row per vertex."""
        found = tensors(node.value)
        return bool(found) and all(
            v.layout == torch.strided and rows_at(v, self.n) is not None for v in found
        )

    def _rows(self, value: Any) -> list[Tensor]:
        """Tensors of a row per vertex, with vertices in the first dimension."""
        return [found.movedim(rows_at(found, self.n) or 0, 0) for found in tensors(value)]

    def _is_field(self, node: Node) -> bool:
        """Structure of numbers per vertex, which may be an input beside the features."""
        return all(
            v.is_floating_point() and rows_at(v, self.n) == 0 for v in tensors(node.value)
        ) and self._has_rows(node)

    def _row_by_row(self, node: Node) -> None:
        rows = [read for read in node.reads if self.kind[read] == ROWS]
        at = max(self.at[read] for read in rows)
        structure = [read for read in node.reads if self.kind[read] == STRUCTURE]
        node.read_instead({read: self._field(read, at) for read in structure})
        self.kind[node] = ROWS
        if is_batch_norm(node):  # a layer begins with one batch norm, and the first with none
            if told_of(node)["running_mean"] is None:
                raise Unfit(
                    "a batch norm without running averages has no moments in evaluation; use"
                    " track_running_stats=True"
                )
            if node.value.ndim != 2 or node.value.shape[0] != self.n:
                raise Unfit(f"batch norm of {list(node.value.shape)}; flatten its rows")
            at += 3 if at % 3 == PREPARE else 2
        else:
            self._must_be_row_by_row(node)
        self.at[node] = at

    def _field(self, node: Node, at: int) -> Node:
        """Structure of numbers per vertex, beside rows of a piece, which the last gather before
        makes of its block; for piece 0 of neighbours, too, whom the whole graph alone knows."""
        if not at:
            self.fields.add(node)
        field = Node(_same, (node,), line=node.line, value=node.value, index=node.index)
        self.kind[field], self.order[field] = ROWS, self.order[node]
        self.at[field] = at - 2 if at and at % 3 == PREPARE else at
        return field

    def _must_be_row_by_row(self, node: Node) -> None:
        if not self._has_rows(node):
            shapes = [list(v.shape) for v in tensors(node.value)]
            raise Unfit(
                f"{node.what} makes {shapes[0] if shapes else 'no rows'} of the rows of all"
                f" {self.n} vertices, as a graph's readout or a norm of all rows does; a row here"
                " is made of its vertex's own and its neighbours'"
            )
        if node.drops:
            return

        def of_part(value: Any) -> Any:
            dim = rows_at(value, self.n) if isinstance(value, Tensor) else None
            return value if dim is None else value.index_select(dim, self.part)

        values = {read: read.value for read in node.reads}
        values |= {
            read: tree_map(of_part, value)
            for read, value in values.items()
            if self.kind[read] in (ROWS, FREE)
        }
        values[self.vertices] = len(self.part)
        try:
            with torch.no_grad():
                found = self.place.call(node, values)
        except Exception as error:
            raise Unfit(
                f"{node.what} fails on the rows of a part of the vertices"
                f" ({str(error).splitlines()[0] if str(error) else type(error).__name__:.120}): it"
                " is given something of all; give it a row of each vertex, and add up rows over"
                " edges, by index_add or torch.sparse.mm"
            ) from error
        for whole, part in zip(tensors(node.value), tensors(found), strict=True):
            dim, expected = rows_at(whole, self.n) or 0, of_part(whole)
            wrong: int | None = 0
            if expected.shape == part.shape:
                wrong = differing(expected.movedim(dim, 0), part.movedim(dim, 0))
            if wrong is not None:
                present = set(self.part.tolist())
                absent = next(v for v in range(self.n) if v not in present)
                raise Unfit(
                    f"{node.what} gives vertex {int(self.part[wrong])} another row when vertex"
                    f" {absent} is absent: it looks at all vertices; use what looks at each row"
                    " alone, or torch.nn.BatchNorm1d"
                )

    def _through_edges(self, node: Node) -> None:
        if is_batch_norm(node):
            raise Unfit("batch norm of edges; normalise rows of vertices instead")
        at = GATHER
        for read in node.reads:
            if self.kind[read] == INNER:
                at = max(at, self.at[read])
            elif self.kind[read] == ROWS:  # what was gathered, only the next gather can read
                made, is_gathered = self.at[read], self.at[read] % 3 == GATHER
                stays = is_gathered and self._reads_own(node, read)
                at = max(at, made if stays else made + 3 if is_gathered else made + 1)
        self.kind[node] = ROWS if self._has_rows(node) else INNER
        self.at[node] = at

    def _reads_own(self, node: Node, read: Node) -> bool:
        """Whether what is made for an edge, or for a vertex, depends on its reader's row alone."""
        owner = self._owner(node)
        if owner is None:
            return False
        touched = torch.zeros(self.n, dtype=torch.bool)
        touched[self.part] = True

        def other(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            changed = value.clone()
            (rows,) = self._rows(changed)
            some = rows[touched]
            rows[touched] = some * 1.5 + 0.7 if value.is_floating_point() else some.flip(0)
            return changed

        values = {each: each.value for each in node.reads}
        values[read] = tree_map(other, read.value)
        with torch.no_grad():
            changed = self.place.call(node, values)
        rows_of = self._rows if self._has_rows(node) else tensors
        for before, after in zip(rows_of(node.value), rows_of(changed), strict=True):
            if before.shape != after.shape or before.shape[:1] != owner.shape:
                return False
            differs = (before != after) & ~((before != before) & (after != after))
            if (differs.flatten(1).any(1) if differs.ndim > 1 else differs)[~touched[owner]].any():
                return False
        return True

    def _owner(self, node: Node) -> Tensor | None:
        """The vertex that each row of a value is for: an edge's reader, or the vertex itself."""
        if self._has_rows(node):
            return torch.arange(self.n)
        edges = self.set_of(node)
        return None if edges is None else edges.value[1]

    def set_of(self, node: Node) -> Node | None:
        """The last edge set before a value that has as many edges as the value has rows."""
        sizes = {v.shape[0] for v in tensors(node.value) if v.ndim}
        found = [
            edges
            for edges in self.sets
            if self.order[edges] < self.order[node] and sizes == {edges.value.shape[1]}
        ]
        return max(found, key=self.order.__getitem__) if found else None

    # -- pieces ----------------------------------------------------------------------------------

    def cut(self) -> Program:
        for node in self.live:
            try:
                self.classify(node)
            except Unfit as unfit:
                raise Unfit(f"{node.place}{unfit}") from None
        self._sum_up()
        kind, output = self.kind, self.recorded.output
        if kind[output] != ROWS or output.value.ndim != 2 or output.dim:
            raise Unfit(
                f"{output.place}forward returns {list(output.value.shape)} of {self.n} vertices;"
                " return a row of logits for each"
            )
        made = self._made()
        if not any(at % 3 == GATHER and self.at[node] for node, at in made.items()):
            raise Unfit("no convolution's rows reach the output; return what they make")
        rows = [node for node in self.live if kind[node] == ROWS]
        end = 3 * self._layers + 1  # after the last piece
        pieces = [Piece() for _ in range(end)]
        for node, at in made.items():
            pieces[at].nodes.append(node)
        needs: dict[Node, set[int]] = {node: set() for node in rows}
        needs[output].add(end)
        for at, piece in enumerate(pieces):
            self._complete(piece)
            self._group(piece)
            for read in {read for node in piece.nodes for read in node.reads}:
                if kind[read] == ROWS and (read.call is None or made[read] != at):
                    needs[read].add(at)
        return self._laid_out(pieces, needs, made)

    def _sum_up(self) -> None:
        """Have sums over edges made by our kernel, which makes no row per edge. Raises Unfit."""
        for node in self.live:
            if self.kind[node] not in (ROWS, INNER) or node.call is None:
                continue
            found: _Sum | None
            if any(is_sparse(value) for value in (node.value, *(r.value for r in node.reads))):
                found = self._product(node)
            elif node.what in ("scatter_add", "index_add") and self.kind[node] == ROWS:
                found = self._sum(node)
            else:
                continue
            if found:  # its edges are grouped where it is known who reads it
                node.call, node.changes, node.kwargs = aggregate, False, {}
                node.args = found
        self.live = live_nodes([self.recorded.output])

    def _group(self, piece: Piece) -> None:
        """Have sums read edges by their readers: by all vertices of a block where others of the
        piece go on with the sum, else by its destinations alone."""
        for node in piece.nodes:
            if node.call is aggregate:
                rows, edges, *weight = node.args
                goes_on = any(node in other.reads for other in piece.nodes)
                if edges.name == "edge_index" and not any(weight) and not goes_on:
                    by = BLOCK
                else:
                    readers = self.vertices if goes_on else DESTINATIONS
                    by = Node(grouped, (edges, readers, self.vertices, *weight))
                    by = self.shared.setdefault(by.key, by)
                self.kind[by] = STRUCTURE
                node.args = (by, rows)

    def _product(self, node: Node) -> _Sum:
        """The sum that a product of a sparse matrix and rows [N, H] is. Raises Unfit of others."""
        if is_sparse(node.value):
            raise Unfit(
                f"{node.place}{node.what} makes a sparse matrix of numbers that are learned,{PAIRS}"
            )
        matrices = [read for read in node.reads if is_sparse(read.value)]
        rows = [read for read in node.reads if self.kind[read] == ROWS]
        is_one = len(node.reads) == 2 and len(matrices) == len(rows) == 1
        if is_one and rows[0].value.ndim == 2 and not rows[0].dim and self.kind[node] == ROWS:
            matrix, read = matrices[0], rows[0]
            added_up = matrix.value.to_dense() @ read.value
            if differing(node.value, added_up) is None:
                return read, *self._entries(matrix)
        raise Unfit(
            f"{node.place}{node.what} of a sparse matrix is no product with rows; multiply,"
            " as torch.sparse.mm(adj, x) does, and add, divide or drop rows"
        )

    def _entries(self, matrix: Node) -> tuple[Node, Node | None]:
        """The edges of a sparse matrix, and what they weigh; None: each 1.

        They are the graph's, if the matrix is transposed and the graph undirected as well."""

        def made(call: Any, *reads: Node) -> Node:
            value = call(*(read.value for read in reads))
            node = Node(call, reads, line=matrix.line, value=value)
            node = self.shared.setdefault(node.key, node)
            self.kind[node] = STRUCTURE
            return node

        edges, found = made(matrix_edges, matrix), self.recorded.inputs.get("edge_index")
        if found is not None:
            for of in (found, made(with_loops, found, self.vertices)):
                if torch.equal(*(keys(e.value, self.n).sort().values for e in (of, edges))):
                    edges = of
        weight = made(numbers, matrix, edges)
        return edges, None if bool((weight.value == 1).all()) else weight

    def _sum(self, node: Node) -> _Sum | None:
        """The sum of rows [N, H] of edges' sources that a call makes in zeros, if it makes one."""
        messages = read = node.reads[-1]
        weight, edges = None, self.set_of(messages)
        if messages.what in ("mul", "multiply") and len(messages.reads) == 2:
            weight, read = sorted(messages.reads, key=lambda each: self.kind[each] == INNER)
        rows = [
            each
            for each in read.reads
            if self.kind[each] == ROWS and isinstance(each.value, Tensor)
            if each.value.ndim == 2 and not each.dim
        ]
        is_picked = read.what in ("index_select", "getitem") and len(read.reads) == 2
        if edges is None or len(rows) != 1 or not is_picked or self.learned & {*node.reads}:
            return None
        source, reader = edges.value
        if not any(torch.equal(each.value, source) for each in read.reads):
            return None
        sent = rows[0].value[source]
        if weight is not None:
            if self.kind[weight] != STRUCTURE or weight.value.shape != (len(source), 1):
                return None
            sent = sent * weight.value
        added_up = torch.zeros_like(rows[0].value).index_add(0, reader, sent)
        return (rows[0], edges, weight) if differing(node.value, added_up) is None else None

    @property
    def _layers(self) -> int:
        """How many there are: a last piece of rows may follow them."""
        return (self.at[self.recorded.output] + 2) // 3

    def _made(self) -> dict[Node, int]:
        """The piece that makes each value of rows."""
        kind, at = self.kind, self.at
        gathered: set[Node] = set()  # rows that a call of the same piece reads through edges
        for node in reversed(self.live):
            is_made = node.call is not None and kind[node] in (ROWS, INNER)
            is_through = any(kind[read] in (STRUCTURE, INNER) for read in node.reads)
            if is_made and (is_through or node in gathered):
                gathered |= {r for r in node.reads if kind[r] == ROWS and at[r] == at[node]}
                gathered.add(node)
        made: dict[Node, int] = {}
        for node in self.live:
            if kind[node] != ROWS or node.call is None:
                continue
            if _is_one_of_several(node) and node.reads[0] in made:
                made[node] = made[node.reads[0]]
            elif at[node] == 0:  # gathered too, if it is made of structure
                reads = [made[read] for read in node.reads if read in made]
                made[node] = max([GATHER if node in gathered else PREPARE, *reads])
            else:
                made[node] = at[node] + (at[node] % 3 == GATHER and node not in gathered)
        self._delay(made)
        return made

    def _delay(self, made: dict[Node, int]) -> None:
        """Move rows to the last update until they are read, if their own inputs are kept until
        then: so they are neither exchanged nor made for the halo."""
        at = made | {node: self.at[node] for node in self.live if self.kind[node] == INNER}
        readers: dict[Node, list[Node]] = {}
        for node in self.live:
            for read in node.reads:
                readers.setdefault(read, []).append(node)
        for node in reversed(self.live):
            if node not in readers or made.get(node, GATHER) % 3 == GATHER or is_batch_norm(node):
                continue
            if _is_one_of_several(node) or not isinstance(node.value, Tensor):
                continue
            first = min(at[reader] for reader in readers[node])
            update = first - (first % 3 == PREPARE)  # the last before
            stay = [
                any(at[reader] >= update - 1 for reader in readers[read] if reader is not node)
                for read in node.reads
                if self.kind[read] == ROWS
            ]
            if update > made[node] and update % 3 == UPDATE and all(stay):
                made[node] = at[node] = update

    def _complete(self, piece: Piece) -> None:
        """Add what the piece's calls read that is no rows: it is made anew wherever it is read."""
        found, todo = set(piece.nodes), list(piece.nodes)
        while todo:
            for read in todo.pop().reads:
                if self.kind[read] in (INNER, FIXED, FREE) and read not in found:
                    found.add(read)
                    todo.append(read)
        piece.nodes = sorted(found, key=lambda node: node.index)

    def _laid_out(
        self, pieces: Sequence[Piece], needs: dict[Node, set[int]], made: dict[Node, int]
    ) -> Program:
        """Say which rows each piece is given, and which it makes: those that later ones read."""

        def alive(at: int) -> list[Node]:
            """Rows made before piece `at` that it or a later one reads; first what it reads."""
            found = [
                node
                for node, reads in needs.items()
                if (node.call is None or made[node] < at) and any(r >= at for r in reads)
            ]
            return sorted(found, key=lambda node: (at not in needs[node], node.index))

        rows = alive(0)
        for at, piece in enumerate(pieces):
            if at % 3 == PREPARE:
                piece.given, piece.makes = rows, alive(at + 1)
                if not piece.nodes:
                    rows[:] = piece.makes  # in one order, so that nothing is moved
            elif at % 3 == GATHER:
                piece.given = [node for node in pieces[at - 1].makes if at in needs[node]]
                piece.makes = [node for node in alive(at + 1) if made.get(node) == at]
            else:
                piece.makes = rows = alive(at + 1)
            piece.frees = frees(piece.nodes, {*piece.makes})
        alike = (FIXED, FREE, STRUCTURE)
        self.shared |= {node.key: node for node in self.live if self.kind[node] in alike}
        drawn = {}
        for node in self.live:
            if node.drops and self.kind[node] == INNER:
                edges = self.set_of(node)
                if edges is None:
                    raise Unfit(f"{node.place}dropout of something that is no rows of edges")
                drawn[node] = edges
        dropping = [node for node in self.recorded.nodes if node.drops]
        return Program(
            self.recorded,
            self.live,
            self.kind,
            [Cut(*pieces[at : at + 3]) for at in range(0, 3 * self._layers, 3)],
            pieces[-1],
            self.fields,
            drawn,
            {node: number for number, node in enumerate(dropping)},
        )


def _same(value: Any) -> Any:
    return value


def _is_one_of_several(node: Node) -> bool:
    """Whether it is a tensor of those that a call makes together, and stays in its piece: rows that
    are handed on are tensors."""
    is_item = node.call is operator.getitem and isinstance(node.args[0], Node)
    return is_item and isinstance(node.args[0].value, (tuple, list))


def is_batch_norm(node: Node) -> bool:
    """Whether it normalises by moments of all rows."""
    return node.call is F.batch_norm


def keep_still(nodes: Iterable[Node], is_training: bool, still: set[Any]) -> None:
    """Have a batch norm that evaluates in training scale each row, in both modes, by moments that
    stay. still: running means of these, which training adds to. Raises Unfit of the converse."""
    for node in nodes:
        if not is_batch_norm(node):
            continue
        told = told_of(node)
        if is_training and not told["training"]:
            still.add(told["running_mean"])
        if told["running_mean"] in still:
            node.call = _scaled
        elif not is_training and told["training"] and told["running_mean"] is not None:
            raise Unfit(
                f"{node.place}a batch norm takes moments of all rows in evaluation too; let eval()"
                " reach it, and give training=self.training"
            )


def _scaled(*args: Any, **kwargs: Any) -> Tensor:
    return F.batch_norm(*args, **kwargs)


def told_of(norm: Node) -> dict[str, Any]:
    """What a call of batch norm is told, by name."""
    call = BATCH_NORM.bind(*norm.args, **norm.kwargs)
    call.apply_defaults()
    return call.arguments


def differing(expected: Tensor, found: Tensor) -> int | None:
    """A row in which two values differ; None if they are equal."""
    if expected.shape != found.shape:
        return 0
    close = CLOSE.get(expected.dtype, 0.0)
    rows = ~torch.isclose(expected, found, rtol=close, atol=close, equal_nan=True)
    wrong = (rows.flatten(1).any(1) if rows.ndim > 1 else rows.reshape(-1)).nonzero()
    return int(wrong[0]) if len(wrong) else None
