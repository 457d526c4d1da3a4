"""The layers of a user's module: its own calls of torch, on a part of the graph.

`Pieces` is a module that was followed, in training and in evaluation. A `PieceLayer` is one of its
layers. Rows that are handed from one layer to the next lie side by side in one tensor."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

from gnnplan.executor.layers.kernels import Block, dropout
from gnnplan.executor.layers.layer import Drop, Layer, keep
from gnnplan.executor.layers.models import Net
from gnnplan.executor.layers.norms import BatchNorm
from gnnplan.executor.modules.bind import Bound
from gnnplan.executor.modules.cut import (
    BLOCK,
    FIXED,
    Cut,
    Piece,
    Program,
    is_batch_norm,
    told_of,
    width_of,
)
from gnnplan.executor.modules.evaluate import Place, Values, storages
from gnnplan.executor.modules.record import Named, Node, Opaque, named_in, tensors_of
from gnnplan.executor.modules.structure import Structure
from gnnplan.planner.gnn.model import Model
from gnnplan.planner.gnn.workload import Workload
from gnnplan.planner.graph.graph import Whole

# edges after which fields begin anew where layers are counted: of each kind there are as many in
# every size of layers/count.py
PERIOD = 64
DRAWS = 1 << 16  # before the numbers of a module's dropouts, in a hash where layers have theirs


def pair_ids(source: Tensor, reader: Tensor) -> Tensor:
    """A number per edge, of the global ids of its ends."""
    return (reader << 31) | source


def drawn(rows: Tensor, dim: int, number: int, ids: Tensor, drop: Drop, p: float) -> Tensor:
    """Dropout number `number` of a module, of rows in a dimension that belong to `ids` [n]."""
    turned = rows.movedim(dim, 0)
    flat = turned.reshape(turned.shape[0], -1)
    made = dropout(flat, drop.seed, drop.epoch, DRAWS + number, ids, p)
    return made.view(turned.shape).movedim(0, dim)


@dataclass(eq=False)
class Pieces:
    """A module that was followed."""

    module: nn.Module
    training: Program
    evaluation: Program
    structure: Structure
    dtype: torch.dtype
    loops: bool  # the module's graph has self-loops, as DGL's
    binding: Bound
    by_kernels: bool  # calls of DGL's kernels are among its calls, and not parts that make them
    locals: WeakKeyDictionary[Block, Values] = field(default_factory=WeakKeyDictionary)

    @property
    def layers(self) -> int:
        return len(self.training.layers)

    def layer(self, number: int) -> PieceLayer:
        return PieceLayer(self, number)

    def net(self, shapes: Model, workload: Workload, which: range | None) -> Net:
        """Its layers `which`, of a copy of the module with parameters of its own."""
        own = copy.copy(self)
        own.module = copy.deepcopy(self.module)
        net = Net(shapes, workload, which, own.layer)
        if own.training.ends.nodes and net.total in net.which:
            net.ends = Tail(cast(PieceLayer, net.layer(net.total)))
        return net

    def trained(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A Net's weights as the state_dict of the user's module."""
        named = self.module.state_dict(keep_vars=True)
        state = {name: value.detach().clone() for name, value in named.items()}
        for name, value in weights.items():
            own = name.split(".", 2)[2].replace("/", ".")
            for other in named:
                if own in named and named[other] is named[own]:  # tied weights have several names
                    state[other] = value.clone(memory_format=torch.contiguous_format)
        return state

    @property
    def place(self) -> Place:
        """Where structure, which drops nothing, is computed: with the module's tensors, on the
        host."""
        return Place(named_in(self.module), dtype=self.dtype)

    def local(self, block: Block) -> Values:
        """What layers read of a block's edges, which is made once."""
        if block not in self.locals:
            self.locals[block] = self.structure.of_block(block, self.place)
        return self.locals[block]

    @property
    def owners(self) -> dict[nn.Parameter, list[int]]:
        """The layers that have each trained parameter. The first of them owns it."""
        found: dict[nn.Parameter, list[int]] = {}
        for number in range(1, self.layers + 1):
            for parameter in self.layer(number).parameters():
                found.setdefault(parameter, []).append(number)
        return found

    @property
    def inputs(self) -> tuple[tuple[str, int], ...]:
        """Fields of vertices that layer 1 is given, and their widths."""
        program = self.training
        return tuple((node.name.removeprefix("vertex "), width_of(node)) for node in program.inputs)

    @property
    def reads(self) -> set[str]:
        """What it reads of what it is given."""
        modes = self.training, self.evaluation
        return {node.name for program in modes for node in program.live if node.call is None}

    def width(self, layer: int) -> int:
        """Numbers per row that a layer hands on (0: that layer 1 is given)."""
        program = self.training
        rows = program.inputs if layer == 0 else program.layers[layer - 1].update.makes
        return sum(map(width_of, rows))


def packed(values: Values, nodes: Sequence[Node]) -> Tensor:
    """Rows [n, W] of some nodes' values, side by side."""
    parts = [values[node].movedim(node.dim, 0) for node in nodes]
    flat = [part.reshape(part.shape[0], -1) for part in parts]
    kind = flat[0].dtype if flat[0].is_floating_point() else torch.get_default_dtype()
    flat = [part if part.is_floating_point() else part.to(kind) for part in flat]
    return flat[0] if len(flat) == 1 else torch.cat(flat, 1)


def unpacked(rows: Tensor, nodes: Sequence[Node]) -> Values:
    """The values of nodes that lie side by side in rows [n, W]."""
    if not nodes:
        return {}
    if len(nodes) == 1:
        return {nodes[0]: _shaped(rows, nodes[0])}
    parts = torch.split(rows, [width_of(node) for node in nodes], 1)
    return {node: _shaped(part, node) for node, part in zip(nodes, parts, strict=True)}


def _shaped(rows: Tensor, node: Node) -> Tensor:
    value = node.value
    sizes = value.movedim(node.dim, 0).shape[1:]
    rows = rows.reshape(rows.shape[0], *sizes).movedim(0, node.dim)
    return rows if value.is_floating_point() else rows.to(value.dtype)


class PackedNorm(BatchNorm):
    """The batch norms that a piece begins with, over the columns of the rows that it is given."""

    def __init__(self, layer: PieceLayer, piece: Piece) -> None:
        nn.Module.__init__(self)
        self.of, self.piece = [layer], piece  # in a list: the layer is no part of this module

    def norms_of(self, piece: Piece) -> Iterator[tuple[Node, slice, dict[str, Any]]]:
        """Each batch norm that a piece begins with, its columns, and what it is told."""
        norms, stop = {node.reads[0]: node for node in piece.nodes if is_batch_norm(node)}, 0
        for given in piece.given:
            start, stop = stop, stop + width_of(given)
            if given in norms:
                told = told_of(norms[given])
                tensors = {k: self.of[0].named(v.name) for k, v in told.items() if type(v) is Named}
                yield norms[given], slice(start, stop), told | tensors

    @property
    def shift(self) -> Tensor:
        """Running means [W]; zero of columns that are not normed."""
        means = [(columns, told["running_mean"]) for _, columns, told in self.norms_of(self.piece)]
        shift: Tensor = means[0][1].new_zeros(sum(map(width_of, self.piece.given)))
        for columns, mean in means:
            shift[columns] = mean
        return shift

    def keep(self, mean: Tensor, variance: Tensor) -> None:
        for _, columns, told in self.norms_of(self.piece):
            told["running_mean"].add_(mean[columns], alpha=told["momentum"])
            told["running_var"].lerp_(variance[columns], told["momentum"])

    def normed(self, piece: Piece, values: Values, moments: Tensor | None) -> Values:
        """The values of a piece's batch norms; moments [2, W]; None: the running ones."""
        found: Values = {}
        for node, columns, told in self.norms_of(piece):
            running = told["running_mean"], told["running_var"]
            mean, variance = running if moments is None else moments[:, columns]
            scale = (variance + told["eps"]).rsqrt()
            if told["weight"] is not None:
                scale = told["weight"] * scale
            out = (values[node.reads[0]] - mean) * scale
            found[node] = out if told["bias"] is None else out + told["bias"]
        return found


class PieceLayer(Layer):
    """A layer of a user's module.

    Its parameters have the names of the module's, with / for the dots."""

    linear = False
    reads_whole = True
    drop = keep

    def __init__(self, pieces: Pieces, number: int) -> None:
        super().__init__()
        self.pieces, self.number = pieces, number
        self.edges = "one"
        cut = pieces.training.layers[number - 1]
        self.read = sum(map(width_of, cut.gather.given))
        self.projects_first = self.read < sum(map(width_of, cut.prepare.makes))
        self._take_tensors()
        norms = any(is_batch_norm(node) for node in cut.prepare.nodes)
        self.norm = PackedNorm(self, cut.prepare) if norms else None

    def _take_tensors(self) -> None:
        """Have the parameters and buffers that this layer's calls name."""
        found = tensors_of(self.pieces.module)
        named: set[str] = set()
        modules = dict(self.pieces.module.named_modules())
        for mode in (self.pieces.training, self.pieces.evaluation):
            for piece in self._pieces_of(mode):
                for node in piece.nodes:
                    named |= set(node.named)
                    if isinstance(node.call, Opaque):
                        self.add_module(node.call.path.replace(".", "/"), modules[node.call.path])
        for name in sorted(named):
            own = name.replace(".", "/")
            if isinstance(found[name], nn.Parameter) and found[name].requires_grad:
                self.register_parameter(own, found[name])  # type: ignore[arg-type]
            else:
                self.register_buffer(own, found[name].detach())

    def _pieces_of(self, program: Program) -> list[Piece]:
        cut = program.layers[self.number - 1]
        ends = [program.ends] if self.number == self.pieces.layers else []
        return [cut.prepare, cut.gather, cut.update, *ends]

    def on(self, indptr: np.ndarray, indices: np.ndarray) -> Whole:
        inputs = self.pieces.training.recorded.inputs
        fields = {
            name[5:]: np.resize(node.value.numpy()[:PERIOD], (len(indices), *node.value.shape[1:]))
            for name, node in inputs.items()
            if name.startswith("edge ")
        }
        whole = Whole(indptr, indices, fields, self.pieces.loops)
        self.pieces.structure.on_whole(whole, self.pieces.place)
        return whole

    def possible(self, x: Tensor) -> Tensor:
        """Whole numbers may be ids, of which there is a 0."""
        given = self.pieces.training.layers[self.number - 1].prepare.given
        values = unpacked(x, given)
        whole = [node for node, value in values.items() if not value.is_floating_point()]
        return packed(values | {node: torch.zeros_like(values[node]) for node in whole}, given)

    def named(self, name: str) -> Any:
        """A tensor, or a part that is called as a whole, by its name in the module."""
        return getattr(self, name.replace(".", "/"))

    # -- calls of a strategy -----------------------------------------------------------------------

    def open(self, block: Block) -> int:
        values = [*self.pieces.local(block).values()]
        of_sums = sum(value.nbytes for value in values if isinstance(value, Block))
        return of_sums + sum(storages(values).values())

    def during(self, drop: Drop) -> PieceLayer:
        own = copy.copy(self)  # with this layer's tensors
        own.drop = drop
        return own

    @property
    def mode(self) -> Program:
        return self.pieces.training if self.drop.training else self.pieces.evaluation

    @property
    def cut(self) -> Cut:
        return self.mode.layers[self.number - 1]

    def project(self, rows: Tensor) -> Tensor:
        return rows[:, : self.read]

    def forward(
        self,
        block: Block,
        x: Tensor,
        drop: Drop = keep,
        x0: Tensor | None = None,
        relu: bool = False,
        moments: Tensor | None = None,
    ) -> Tensor:
        during = self.during(drop)
        prepared = during.begun(during.cut.prepare, self.norm, x, moments)
        read = {node: prepared[node] for node in during.cut.gather.given}
        gathered = during.gathered(block, read)
        own = {node: block.own_rows(rows, node.dim) for node, rows in prepared.items()}
        del prepared, read
        return during.updated(own | gathered)

    def _run(
        self,
        piece: Piece,
        values: Values,
        vertices: int,
        like: Tensor,
        ids: Mapping[Node | None, Tensor],
    ) -> Values:
        """What a piece makes of rows of so many vertices, in the type and the place of `like`. ids:
        of the vertices that its rows are of (None), and by edge set of edges, for dropout."""

        def draw(node: Node, value: Tensor, p: float) -> Tensor:
            if not self.drop.training:
                return value
            of = ids[self.mode.drawn.get(node)]
            if self.mode.kind[node] == FIXED:  # of parameters: no rows of vertices
                of = torch.arange(len(value), device=value.device)
            return drawn(value, node.dim, self.mode.numbers[node], of, self.drop, p)

        values[self.mode.recorded.inputs["vertices"]] = vertices
        place = Place(self.named, draw, like.dtype, like.device)
        place.run([node for node in piece.nodes if node not in values], values, piece.frees)
        return {node: values[node] for node in piece.makes}

    def _unpacked(self, rows: Tensor, nodes: Sequence[Node]) -> Values:
        """Prepared rows by node; the features beside what layer 1 has made get no gradient."""
        values = unpacked(rows, nodes)
        if self.number > 1:
            return values
        return {n: v.detach() if n.call is None else v for n, v in values.items()}

    def prepare(self, x: Any, drop: Drop, moments: Tensor | None = None) -> Any:
        during = self.during(drop)
        piece = during.cut.prepare
        return packed(during.begun(piece, self.norm, x, moments), piece.makes) if piece.nodes else x

    def gather(self, block: Block, rows: Tensor) -> Tensor:
        """Rows [S, read] -> what is made of them along edges [R, .]."""
        piece = self.cut.gather
        if not piece.makes:
            return rows.new_empty(block.n_dst, 0)
        return packed(self.gathered(block, self._unpacked(rows, piece.given)), piece.makes)

    def update(self, gathered: Tensor, rows: Any, x: Any, x0: Tensor | None, relu: bool) -> Tensor:
        """What was gathered [R, .] and own prepared rows [R, P] -> what is handed on [R, W]."""
        own = self._unpacked(rows, self.cut.prepare.makes)
        return self.updated(own | unpacked(gathered, self.cut.gather.makes))

    def begun(
        self, piece: Piece, norm: PackedNorm | None, rows: Tensor, moments: Tensor | None
    ) -> Values:
        """What a piece that may begin with batch norms makes of rows [., W]."""
        values = unpacked(rows, piece.given)
        if norm is not None:
            values |= norm.normed(piece, values, moments)
        return self._run(piece, values, len(rows), rows, {None: self.drop.vertices})

    def gathered(self, block: Block, values: Values) -> Values:
        """Prepared rows [S, ..] -> what is made of them along edges [R, ..]."""
        piece, local = self.cut.gather, self.pieces.local(block)
        ids: dict[Node | None, Tensor] = {None: block.source}
        for node in piece.nodes:
            if (edges := self.mode.drawn.get(node)) is not None:
                ids[edges] = pair_ids(*block.source[local[edges]])
        like = next(iter(values.values()), block.source)
        made = self._run(piece, {**local, **values, BLOCK: block}, block.n_src, like, ids)
        return {node: block.own_rows(rows, node.dim) for node, rows in made.items()}

    def updated(self, values: Values) -> Tensor:
        """Own prepared rows [R, ..] and what was gathered [R, ..] -> what is handed on [R, W]."""
        piece = self.cut.update
        node, rows = next(iter(values.items()))
        vertices = rows.shape[node.dim]
        ids: dict[Node | None, Tensor] = {None: self.drop.vertices[:vertices]}
        return packed(self._run(piece, values, vertices, rows, ids), piece.makes)


class Tail:
    """Batch norm after the last layer, and what follows it, with that layer's tensors."""

    def __init__(self, layer: PieceLayer) -> None:
        self.layer, self.norm = layer, PackedNorm(layer, layer.pieces.training.ends)

    def __call__(self, h: Tensor, drop: Drop = keep, moments: Tensor | None = None) -> Tensor:
        """h_L [R, W] -> logits [R, C]."""
        during = self.layer.during(drop)
        piece = during.mode.ends
        return packed(during.begun(piece, self.norm, h, moments), piece.makes)
