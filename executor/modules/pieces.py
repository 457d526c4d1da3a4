"""The layers of a user's module: its own torch calls, on a part of the graph.

`Pieces` is a module that was recorded and cut, in training and in evaluation mode. `PieceLayer` is
one of its layers. The values that a layer hands to the next lie side by side in one tensor of rows.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

from gnnplan.executor.layers.kernels import Block, dropout
from gnnplan.executor.layers.layer import Drop, Layer, no_dropout
from gnnplan.executor.layers.models import BatchNorm, Net
from gnnplan.executor.modules.bind import Bound
from gnnplan.executor.modules.cut import (
    BLOCK,
    LayerPieces,
    Piece,
    Program,
    width_of,
)
from gnnplan.executor.modules.evaluate import Place, Values, grouped, storages
from gnnplan.executor.modules.record import FIXED, Named, Node, tensors_of
from gnnplan.executor.modules.rewrite import (
    centred,
    edge_moments,
    edge_scale,
    is_batch_norm,
    norm_arguments,
    scale_of,
)
from gnnplan.executor.modules.structure import Structure, edge_index_of
from gnnplan.planner.gnn.model import Model
from gnnplan.planner.gnn.workload import Workload
from gnnplan.planner.graph.graph import CsrEdges

# layers/count.py counts layers on graphs whose fields repeat after so many edges: these graphs have
# as many edges of each kind, whatever their size
PERIOD = 64
DRAWS = 1 << 16  # a module's dropouts hash DRAWS + number, where built-in layers hash their number


def pair_ids(source: Tensor, reader: Tensor) -> Tensor:
    """Return a number per edge, from the global ids of source and destination."""
    return (reader << 31) | source


def drawn(rows: Tensor, node: Node, ids: Tensor, drop: Drop, p: float) -> Tensor:
    """Drop rows as the call of dropout `node` does; the mask of a row follows from its id [n].

    An id may have several rows."""
    by_row = rows.movedim(node.dim, 0)
    flat = by_row.reshape(len(ids), by_row.numel() // max(len(ids), 1))
    dropped = dropout(flat, drop.seed, drop.epoch, DRAWS + node.number, ids, p)
    return dropped.view(by_row.shape).movedim(0, node.dim)


@dataclass(eq=False)
class Pieces:
    """A module that was recorded and cut into pieces.

    differs: how evaluation has other layers than training, if it has; it then runs training's,
    which `prove` compares with it. calls: how often `forward` calls each batch norm, by the name of
    the buffer that counts them."""

    module: nn.Module
    training: Program
    evaluation: Program
    differs: str
    structure: Structure
    loops: bool  # the DGL graph that the module receives has self-loops
    binding: Bound
    calls: Mapping[str, int]
    locals: WeakKeyDictionary[Block, Values] = field(default_factory=WeakKeyDictionary)

    @property
    def layers(self) -> int:
        return len(self.training.layers)

    def layer(self, number: int) -> PieceLayer:
        return PieceLayer(self, number)

    def net(self, model: Model, workload: Workload, which: range | None) -> Net:
        """Return the layers `which`, with the tensors of a new copy of the module."""
        own = replace(self, module=copy.deepcopy(self.module))
        return Net(model, workload, which, own.layer)

    def trained(self, weights: Mapping[str, Tensor], steps: int = 0) -> dict[str, Tensor]:
        """Return a Net's weights after so many steps as the state_dict of the user's module."""
        named = self.module.state_dict(keep_vars=True)
        state = {name: value.detach().clone() for name, value in named.items()}
        for name, value in weights.items():
            own = name.split(".", 2)[2].replace("/", ".")
            for other in named:
                if own in named and named[other] is named[own]:  # tied weights have several names
                    state[other] = value.clone(memory_format=torch.contiguous_format)
        for name, calls in self.calls.items():
            state[name] += calls * steps
        return state

    def local(self, block: Block) -> Values:
        """Return, and cache, the STRUCTURE that layers read on a block."""
        if block not in self.locals:
            self.locals[block] = self.structure.of_block(block)
        return self.locals[block]

    @property
    def owners(self) -> dict[nn.Parameter, list[int]]:
        """The numbers of the layers that read each trained parameter; the first one owns it."""
        found: dict[nn.Parameter, list[int]] = {}
        for number in range(1, self.layers + 1):
            for parameter in self.layer(number).parameters():
                found.setdefault(parameter, []).append(number)
        return found

    @property
    def inputs(self) -> tuple[tuple[str, int], ...]:
        """The fields of vertices that layer 1 reads, and their widths."""
        program = self.training
        return tuple((node.name.removeprefix("vertex "), width_of(node)) for node in program.inputs)

    @property
    def reads(self) -> set[str]:
        """The names of the inputs of `forward` that the output depends on."""
        modes = self.training, self.evaluation
        return {node.name for program in modes for node in program.live if node.call is None}

    @property
    def widths(self) -> list[int]:
        """The numbers per row that layer 1 receives, and those that each layer hands on."""
        rows = self.training.inputs, *(cut.update.outputs for cut in self.training.layers)
        return [sum(map(width_of, nodes)) for nodes in rows]


def packed(values: Values, nodes: Sequence[Node]) -> Tensor:
    """Return rows [n, W] that hold the values of some nodes side by side."""
    parts = [values[node].movedim(node.dim, 0) for node in nodes]
    flat = [part.flatten(1) if part.ndim > 1 else part[:, None] for part in parts]
    kind = flat[0].dtype if flat[0].is_floating_point() else torch.get_default_dtype()
    flat = [part if part.is_floating_point() else part.to(kind) for part in flat]
    return flat[0] if len(flat) == 1 else torch.cat(flat, 1)


def unpacked(rows: Tensor, nodes: Sequence[Node]) -> Values:
    """Return the values of the nodes that lie side by side in rows [n, W]."""
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
    """The batch norms that a piece begins with, over columns of the piece's rows [., W]."""

    def __init__(self, layer: PieceLayer, piece: Piece) -> None:
        nn.Module.__init__(self)
        self.named, self.piece = layer.named, piece

    def norms_of(self, piece: Piece) -> Iterator[tuple[Node, slice, dict[str, Any]]]:
        """Yield each batch norm that a piece begins with, its columns, and its arguments."""
        columns: dict[Node, slice] = {}
        stop = 0
        for given in piece.inputs:
            start, stop = stop, stop + width_of(given)
            columns[given] = slice(start, stop)
        for norm in filter(is_batch_norm, piece.nodes):
            arguments = norm_arguments(norm)
            named = {k: v.name for k, v in arguments.items() if isinstance(v, Named)}
            tensors = {k: self.named(name) for k, name in named.items()}
            yield norm, columns[norm.reads[0]], arguments | tensors

    @property
    def shift(self) -> Tensor:
        """Running means [W]; zero for columns without a batch norm, and for sums over edges."""
        norms = [*self.norms_of(self.piece)]
        mean: Tensor = norms[0][2]["running_mean"]
        shift = mean.new_zeros(sum(map(width_of, self.piece.inputs)))
        for node, columns, norm in norms:
            if node.call is not edge_scale:
                shift[columns] = norm["running_mean"]
        return shift

    def keep(self, mean: Tensor, variance: Tensor, count: int) -> None:
        shift = self.shift  # of the last of several norms of the same rows
        for node, columns, norm in self.norms_of(self.piece):
            own_mean, own_variance = mean[columns] + shift[columns], variance[columns]
            rows = own_mean.new_full((), count)
            if node.call is edge_scale:
                own_mean, own_variance, edges = edge_moments(own_mean)
                rows *= edges
            norm["running_mean"].lerp_(own_mean, norm["momentum"])
            unbiased = own_variance * (rows / (rows - 1.0).clamp(min=1.0))
            norm["running_var"].lerp_(unbiased, norm["momentum"])

    def normed(self, piece: Piece, values: Values, moments: Tensor | None) -> Values:
        """Return the values of a piece's batch norms; moments [2, W]; None: the running ones."""
        found: Values = {}
        for node, columns, norm in self.norms_of(piece):
            running = norm["running_mean"], norm["running_var"]
            mean, variance = running if moments is None else moments[:, columns]
            rows, weight, eps = values[node.reads[0]], norm["weight"], norm["eps"]
            if node.call is not edge_scale:
                found[node] = centred(rows, mean, scale_of(variance, weight, eps), norm["bias"])
                continue
            if moments is not None:
                mean, variance, _ = edge_moments(mean)
            found[node] = edge_scale(rows, mean, variance, weight, eps)
        return found


class PieceLayer(Layer):
    """A layer of a user's module.

    Its parameters have the module's names, with / for the dots."""

    linear = False
    reads_whole = True
    drop = no_dropout

    def __init__(self, pieces: Pieces, number: int) -> None:
        super().__init__()
        self.pieces, self.number = pieces, number
        self.edges = "one"
        cut = pieces.training.layers[number - 1]
        self.read = sum(map(width_of, cut.gather.inputs))
        self.projects_first = self.read < sum(map(width_of, cut.prepare.outputs))
        self._register_tensors()
        norms = any(is_batch_norm(node) for node in cut.prepare.nodes)
        self.norm = PackedNorm(self, cut.prepare) if norms else None
        ends = pieces.training.ends if number == pieces.layers else Piece()
        self.norm_after = PackedNorm(self, ends) if ends.nodes else None

    def _register_tensors(self) -> None:
        """Register the module's tensors and submodules that this layer's calls read."""
        tensors, modules = tensors_of(self.pieces.module), dict(self.pieces.module.named_modules())
        names: set[str] = set()
        for program in (self.pieces.training, self.pieces.evaluation):
            cut = program.layers[self.number - 1]
            ends = program.ends.nodes if self.number == self.pieces.layers else []
            for node in (*cut.prepare.nodes, *cut.gather.nodes, *cut.update.nodes, *ends):
                names |= set(node.tensor_names)
                if isinstance(node.call, Named):
                    self.add_module(node.call.name.replace(".", "/"), modules[node.call.name])
        for name in sorted(names):
            own, tensor = name.replace(".", "/"), tensors[name]
            if isinstance(tensor, nn.Parameter) and tensor.requires_grad:
                self.register_parameter(own, tensor)
            else:
                self.register_buffer(own, tensor.detach())

    def on(self, indptr: np.ndarray, indices: np.ndarray) -> CsrEdges:
        if self.pieces.structure.reads_both_ways:
            edges, n = edge_index_of(CsrEdges(indptr, indices)), len(indptr) - 1
            block = grouped(torch.cat([edges, edges.flip(0)], 1), 1, n, n)
            indptr, indices = block.indptr.numpy(), block.indices.numpy()
        inputs = self.pieces.training.recorded.inputs
        fields = {
            name[5:]: np.resize(node.value.numpy()[:PERIOD], (len(indices), *node.value.shape[1:]))
            for name, node in inputs.items()
            if name.startswith("edge ")
        }
        whole = CsrEdges(indptr, indices, fields, self.pieces.loops)
        self.pieces.structure.on_whole(whole)
        return whole

    def possible(self, x: Tensor) -> Tensor:
        """Return x with zeros for integers, which may be ids: any table has a row 0."""
        given = self.pieces.training.layers[self.number - 1].prepare.inputs
        values = unpacked(x, given)
        integers = [node for node, value in values.items() if not value.is_floating_point()]
        return packed(values | {node: torch.zeros_like(values[node]) for node in integers}, given)

    def named(self, name: str) -> Any:
        """Return a tensor or a submodule by its name in the user's module."""
        return getattr(self, name.replace(".", "/"))

    # -- methods that strategies call --------------------------------------------------------------

    def open(self, block: Block) -> int:
        values = [*self.pieces.local(block).values()]
        of_sums = sum(value.nbytes for value in values if isinstance(value, Block))
        return of_sums + sum(storages(values).values())

    def during(self, drop: Drop) -> PieceLayer:
        layer = copy.copy(self)  # with the same tensors
        layer.drop = drop
        return layer

    @property
    def mode(self) -> Program:
        return self.pieces.training if self.drop.training else self.pieces.evaluation

    @property
    def cut(self) -> LayerPieces:
        return self.mode.layers[self.number - 1]

    def project(self, rows: Tensor) -> Tensor:
        return rows[:, : self.read]

    def forward(
        self,
        block: Block,
        x: Tensor,
        drop: Drop = no_dropout,
        x0: Tensor | None = None,
        relu: bool = False,
        moments: Tensor | None = None,
    ) -> Tensor:
        """Compute x [S, W] -> [R, W], without packing the rows between the pieces."""
        during = self.during(drop)
        prepared = during.begin(during.cut.prepare, self.norm, x, moments)
        read = {node: prepared[node] for node in during.cut.gather.inputs}
        gathered = during.gather_values(block, read)
        own = {node: block.own_rows(rows, node.dim) for node, rows in prepared.items()}
        del prepared, read
        return during.update_values(own | gathered)

    def _run(
        self,
        piece: Piece,
        values: Values,
        vertices: int,
        like: Tensor,
        ids: Mapping[Node | None, Tensor],
    ) -> Values:
        """Return what a piece computes from rows of so many vertices; like: their type and device.

        ids, for dropout: of the vertices (None), and of the edges of each edge set. The user's
        calls do not run without rows, on which view(n, -1) fails."""
        if not vertices:
            return {node: self._no_rows(node, like) for node in piece.outputs}

        def draw(node: Node, value: Tensor, p: float) -> Tensor:
            if not self.drop.training:
                return value
            row_ids = ids[node.edges]
            if node.kind == FIXED:  # computed from parameters: no rows of vertices
                row_ids = torch.arange(len(value), device=value.device)
            return drawn(value, node, row_ids, self.drop, p)

        values[self.mode.recorded.inputs["vertices"]] = vertices
        place = Place(self.named, draw, like.device)
        place.run([node for node in piece.nodes if node not in values], values, piece.frees)
        return {node: values[node] for node in piece.outputs}

    def _no_rows(self, node: Node, like: Tensor) -> Tensor:
        """Return a value of no vertices, whose gradients of all parameters are zero."""
        sizes = [0 if dim == node.dim else size for dim, size in enumerate(node.value.shape)]
        return torch.cat([each.flatten()[:0] for each in (like, *self.parameters())]).view(sizes)

    def _unpacked(self, rows: Tensor, nodes: Sequence[Node]) -> Values:
        """Return prepared rows by node; features among what layer 1 prepares get no gradient."""
        values = unpacked(rows, nodes)
        if self.number > 1:
            return values
        return {n: v.detach() if n.call is None else v for n, v in values.items()}

    def prepare(self, x: Any, drop: Drop, moments: Tensor | None = None) -> Any:
        during = self.during(drop)
        piece = during.cut.prepare
        if not piece.nodes:
            return x
        return packed(during.begin(piece, self.norm, x, moments), piece.outputs)

    def gather(self, block: Block, rows: Tensor) -> Tensor:
        """Compute rows [S, read] -> [R, .] over edges."""
        piece = self.cut.gather
        if not piece.outputs:
            return rows.new_empty(block.n_dst, 0)
        return packed(self.gather_values(block, self._unpacked(rows, piece.inputs)), piece.outputs)

    def update(self, gathered: Tensor, rows: Any, x: Any, x0: Tensor | None, relu: bool) -> Tensor:
        """Compute gathered rows [R, .] and own prepared rows [R, P] -> [R, W]."""
        own = self._unpacked(rows, self.cut.prepare.outputs)
        return self.update_values(own | unpacked(gathered, self.cut.gather.outputs))

    def begin(
        self, piece: Piece, norm: PackedNorm | None, rows: Tensor, moments: Tensor | None
    ) -> Values:
        """Return what a piece computes from rows [., W]; it may begin with batch norms."""
        values = unpacked(rows, piece.inputs)
        if norm is not None:
            values |= norm.normed(piece, values, moments)
        return self._run(piece, values, len(rows), rows, {None: self.drop.vertices})

    def gather_values(self, block: Block, values: Values) -> Values:
        """Return what the gather computes from prepared rows [S, ..], for destinations [R, ..]."""
        piece, local = self.cut.gather, self.pieces.local(block)
        ids: dict[Node | None, Tensor] = {None: block.source}
        for edges in (node.edges for node in piece.nodes if node.edges is not None):
            ids[edges] = pair_ids(*block.source[local[edges]])
        like = next(iter(values.values()), block.source)
        found = self._run(piece, {**local, **values, BLOCK: block}, block.n_src, like, ids)
        return {node: block.own_rows(rows, node.dim) for node, rows in found.items()}

    def update_values(self, values: Values) -> Tensor:
        """Return the layer's output [R, W] from own prepared rows and gathered rows [R, ..]."""
        piece = self.cut.update
        node, rows = next(iter(values.items()))
        vertices = rows.shape[node.dim]
        ids: dict[Node | None, Tensor] = {None: self.drop.vertices[:vertices]}
        return packed(self._run(piece, values, vertices, rows, ids), piece.outputs)

    def finish(self, h: Tensor, drop: Drop, moments: Tensor | None = None) -> Tensor:
        """Compute h_L [R, W] -> logits [R, C], by the calls from a batch norm on that follows."""
        if self.norm_after is None:
            return h
        during = self.during(drop)
        piece = during.mode.ends
        return packed(during.begin(piece, self.norm_after, h, moments), piece.outputs)
