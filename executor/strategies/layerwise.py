"""A training step over a rank's share of the graph or of a batch, layer after layer.

Each layer is an autograd segment, which begins at its inputs, and its forward pass returns a
function that runs its backward pass. Halo rows are received before the segment's forward, and their
gradients return to the owners after its backward (halo.py). Spans have the schedule's labels
(planner/strategies/layerwise/).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import InitVar, dataclass
from functools import partial
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from gnnplan.executor.layers.kernels import (
    Root,
    aggregate,
    aggregate_transposed,
    backward,
    collecting,
    gradient_of,
    root_of,
    together,
)
from gnnplan.executor.layers.kernels.runtime import triton_kernels
from gnnplan.executor.layers.layer import ColumnLayer, no_dropout, partial_sums
from gnnplan.executor.layers.models import Moments, Net
from gnnplan.executor.minibatch.share import Share, targets_of
from gnnplan.executor.ranks.comm import Exchange, all_reduce, begin_all_reduce, total
from gnnplan.executor.ranks.learner import Gradients, fill
from gnnplan.executor.ranks.rank import Rank
from gnnplan.executor.strategies import base
from gnnplan.executor.strategies.base import NOTHING, Backward
from gnnplan.executor.strategies.halo import Halo, RowWeights, open_halo
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies.layerwise.exchange import ExchangeOptions, buckets_of
from gnnplan.planner.vocabulary.schedule import Label

T = TypeVar("T")
# the worker's tensors on the host -> the features that layer 1 or the encoder reads, and the
# worker's tensors on the device
_Transfer = Callable[[Any], tuple[Tensor, Any]]


@dataclass
class LayerInput:
    """A rank's rows of h_{l-1} before layer l."""

    # own rows [local, H_{l-1}]; empty if they are constant, or once the layer has its source rows
    leaf: Tensor
    outgoing: Tensor  # the rows that are exchanged: own rows, or their projection (narrow layers)
    own: Tensor | None = None  # of narrow layers, a leaf: the destinations' prepared rows
    sums: Tensor | None = None  # batch norm: sums over own rows [2, H_{l-1}] (BatchNorm.sums)
    moments: Moments | None = None  # batch norm: over the rows of all ranks


def _segment(
    compute: Callable[[Tensor, Tensor | None], Tensor],
    source: Tensor,
    own: Tensor | None,
    varies: bool,
) -> tuple[Tensor, Callable[[], Tensor]]:
    """Compute a layer from its source rows, and from own rows if it reads them in place; return
    also a function that returns the gradient of the source rows."""
    source, to_source = collecting(source, varies)
    if own is None:
        return compute(source, None), to_source
    rows, (own, to_own) = len(own), collecting(own, varies)

    def to_both() -> Tensor:
        gradient = to_source()
        gradient[:rows] += to_own()
        return gradient

    return compute(source, own), to_both


def backward_prepared(outputs: Sequence[Root], gradient: Tensor, own: Tensor | None) -> None:
    """Run the backward pass of what prepares rows for an exchange or a sum.

    outputs: the rows exchanged and, if `own` is given, the own prepared rows. own: the leaf from
    which layers read the own prepared rows. gradient: of the rows exchanged.
    """
    if own is None or own.grad is None:  # layers read own rows only through the aggregate
        backward(outputs[:1], [gradient])
    else:
        backward(outputs, (gradient, own.grad))


@dataclass
class Worker(base.Worker):
    """A rank that trains on its share of the graph or of a batch."""

    rank: Rank
    problem: Problem
    share: InitVar[Share]
    options: ExchangeOptions
    net: Net
    weights: InitVar[RowWeights | None] = None  # of rows in an adaptive codec (halo.py)
    batch: float | None = None  # of a batch: divisor of its summed loss; None: full graph
    # makes a worker for evaluation, if the share lacks rows that evaluation scores
    evaluator: Callable[[], Worker] | None = None
    # None: tensors are copied one by one, and the caller sets `features` later
    transfer: InitVar[_Transfer | None] = None

    def __post_init__(
        self, share: Share, weights: RowWeights | None, transfer: _Transfer | None
    ) -> None:
        problem, device, host = self.problem, self.rank.device, torch.device("cpu")
        self.model, options = problem.model, self.options
        self.buckets = buckets_of(problem, options.buckets, options.narrow)
        self.layers = range(1, len(share.parts) + 1)

        parts = dict(enumerate(share.parts, 1))  # layers may share a part, and what is made of it
        made = {
            part: (Exchange(self.rank, part.give, part.take, device=host), part.vertices)
            for part in dict.fromkeys(share.parts)
        }
        exchanges = {n: made[part][0] for n, part in parts.items() if part.exchanges_rows}
        self.own_vertices = self.scored_vertices = torch.from_numpy(share.own)
        if share.ends is not None and share.ends.exchanges_rows:
            exchanges[len(self.layers) + 1] = Exchange(
                self.rank, share.ends.give, share.ends.take, device=host
            )
            self.scored_vertices = torch.from_numpy(np.concatenate([share.own, share.ends.remote]))
        self.vertices_in_all = share.everyone
        self.targets = targets_of(problem, share, host, self.batch)

        def transfer_each(value: T) -> tuple[Tensor, T]:  # copied at once, all would be page-locked
            moved = together(value, lambda tensors: [t.to(device) for t in tensors])
            return torch.empty(0), moved

        blocks = {n: part.block for n, part in parts.items()}
        vertices = {n: made[part][1] for n, part in parts.items()}
        selections = {n: part.selection for n, part in parts.items() if part.selection}
        # layers that receive partial sums of their source rows, before bias and ReLU
        self.adds = {n for n, part in parts.items() if part.adds}
        both = self.own_vertices, self.scored_vertices
        self.features, moved = (transfer or transfer_each)(
            (exchanges, selections, blocks, vertices, both, self.targets)
        )
        exchanges, self.selections, self.blocks, self.vertices, both, self.targets = moved
        self.own_vertices, self.scored_vertices = both
        self.scorers = [self.targets]
        self.plain_halo = Halo(self.rank, exchanges)
        self.halo = open_halo(self.plain_halo, problem, options, self.vertices, weights or {})
        self.errors = self.halo.errors
        self.cached: Tensor | None = None

    @property
    def _current_halo(self) -> Halo:
        """The halo exchange of this pass; evaluation exchanges all rows, whole and fresh."""
        return self.halo if self.training else self.plain_halo

    @property
    def uses_cuda_graph(self) -> bool:
        """Whether one rank trains on the full graph, and no step draws numbers on the host."""
        single = self.rank.world == 1 and self.rank.device.type == "cuda" and self.batch is None
        return single and self.problem.repeats and triton_kernels() is not None

    # -- one step ---------------------------------------------------------------------------------

    def _make_input(self, h: Tensor, step: int, layer: int) -> tuple[LayerInput, Backward]:
        """Make h_{l-1} [local, H_{l-1}] the input of a layer (L + 1: of the decoder).

        Returns also the backward function from the rows that the layer exchanges to the leaf.
        """
        leaf = h.detach().requires_grad_(self.training and layer > self.model.first_varying)
        if not (self.options.narrow and self.model.narrow_at(layer)):
            norm = self.net.batch_norm(layer) if self.training else None
            sums = norm.sums(self._moment_rows(leaf)) if norm else None
            return LayerInput(leaf, leaf.detach(), sums=sums), lambda gradient: gradient
        drop = self.drop(step, layer, self.vertices[layer][: leaf.shape[0]])
        net = self.net.layer(layer).during(drop)

        def project() -> tuple[Tensor, Tensor]:
            rows = net.prepare(leaf, drop)
            return net.project(rows), self.blocks[layer].own_rows(rows)

        outputs, saved = self._compute(project), list[list[Root]]()
        own = outputs[1].detach().requires_grad_(self.training)
        inputs = LayerInput(leaf, outputs[0].detach(), own)
        if not self.options.checkpoint:
            saved.append([*map(root_of, outputs)])
        del outputs

        def back(gradient: Tensor) -> Tensor:
            backward_prepared(saved.pop() if saved else project(), gradient, own)
            return gradient_of(leaf)

        return inputs, back

    def _compute(self, compute: Callable[[], T]) -> T:
        """Call `compute`, with an autograd graph unless the backward pass recomputes it."""
        with torch.set_grad_enabled(self.training and not self.options.checkpoint):
            return compute()

    def _all_reduce(self, label: Label, flat: Tensor) -> None:
        """Sum over ranks, in order after all-reduces of gradients that are still running."""
        if self.learner is not None and self.learner.pending:
            begin_all_reduce(self.rank, label, flat, self.reduce_group).result()
        else:
            all_reduce(self.rank, label, flat, self.reduce_group)

    def _reduce_moments(self, step: int, layer: int, inputs: LayerInput) -> None:
        """Set batch norm's moments of h_{l-1} from the sums of all ranks."""
        norm, sums = self.net.batch_norm(layer), inputs.sums
        if sums is None or norm is None:
            return
        label, rows = Label("moments", step, "f", layer), len(inputs.leaf)
        if self.batch is not None and self.rank.world > 1:  # no rank knows a batch's rows in all
            flat = torch.cat([sums.flatten(), sums.new_tensor([rows])])
            self._all_reduce(label, flat)
            sums, rows = flat[:-1].view_as(sums), int(flat[-1])
        else:
            self._all_reduce(label, sums)
        count = self.vertices_in_all if self.batch is None else max(rows, 1)
        inputs.moments = Moments.of(norm, sums, count)

    def _moment_rows(self, rows: Tensor) -> Tensor:
        """Select the rows [local, H] that count in batch norm's moments.

        On the full graph a vertex counts once, at its owner. In a batch a row counts wherever it is
        computed, as in torch.nn.SyncBatchNorm.
        """
        return rows if self.batch is not None else rows[: len(self.own_vertices)]

    def _add_moment_grad(self, step: int, layer: int, inputs: LayerInput, gradient: Tensor) -> None:
        """Add the gradient through batch norm's moments to the gradient of own rows."""
        if inputs.moments is not None:
            self._all_reduce(Label("moments", step, "b", layer), inputs.moments.gradient)
            rows = self._moment_rows(inputs.leaf)
            inputs.moments.add_gradient(rows, gradient[: len(rows)])

    def _run_layer(self, step: int, layer: int, inputs: LayerInput) -> tuple[LayerInput, Backward]:
        """Run one layer forward; return the next layer's input and the backward function.

        That function takes the gradient of the rows of h_l that are exchanged. It returns the
        gradient of own rows of h_{l-1}, with peers' contributions added, unless they are constant.
        """
        self._reduce_moments(step, layer, inputs)
        join_halo, varies = None, layer > self.model.first_varying
        if varies:
            join_halo = self._current_halo.fetch(step, layer, inputs.outgoing)
        with self.computing("forward", step, layer=layer):
            source, own = self.features, None
            if join_halo is not None:
                own = self._own_in_place(layer, inputs.outgoing)
                source = self._join_source(layer, inputs, join_halo())
            join_halo = None  # it holds own rows, which `source` has
            compute = self._layer_function(step, layer, inputs)
            segment = partial(_segment, compute, source, own, varies)
            out, to_source = self._compute(segment)
            next_inputs, to_leaf = self._make_input(out, step, layer + 1)
        # lists, from which the backward pass drops references as early as it can
        recompute = segment if self.options.checkpoint else None
        pending_backward, saved = [to_leaf], [] if recompute else [(root_of(out), to_source)]
        del out, to_leaf, to_source, source, own, segment

        def back(gradient: Tensor) -> Tensor:
            with self.computing("backward", step, layer=layer):
                gradient = pending_backward.pop()(gradient)
                root, to_source = recompute() if recompute else saved.pop()
                backward([root], [gradient])
                del root  # rows, if recomputed
                if varies:
                    gradient = to_source()
                    if layer in self.selections:
                        gradient = aggregate_transposed(self.selections[layer], gradient)
            if self.learner is not None:
                self.learner.complete(step, layer)
            if not varies:
                return gradient
            gradient = self._current_halo.return_gradients(step, layer, gradient)
            self._add_moment_grad(step, layer, inputs, gradient)
            return gradient

        return next_inputs, back

    def _own_in_place(self, layer: int, rows: Tensor) -> Tensor | None:
        """Return the destinations' own rows, if the layer multiplies them where they are: its copy
        of own and received rows is then freed after the forward pass."""
        if not self.training or self.options.checkpoint or layer in self.selections:
            return None  # nothing keeps the copy, or recomputation does, or own rows are sums
        exchange = self.plain_halo.exchanges.get(layer)
        copies = exchange is not None and exchange.counts("f")[1] > 0
        narrow = self.options.narrow and self.model.narrow_at(layer)
        in_place = copies and self.model.own_in_place(layer) and not narrow
        return rows[: self.blocks[layer].n_dst] if in_place else None

    def _join_source(self, layer: int, inputs: LayerInput, rows: Tensor) -> Tensor:
        """Return all source rows [S, width] from own rows and halo; `inputs` keeps own rows only
        for batch norm, which reads them once more."""
        local, inputs.outgoing = len(inputs.outgoing), NOTHING
        if layer in self.selections:
            rows = aggregate(self.selections[layer], rows)
        own = rows[:local] if inputs.own is None else inputs.leaf
        inputs.leaf = own if inputs.moments else NOTHING
        return rows

    def _layer_function(
        self, step: int, layer: int, inputs: LayerInput
    ) -> Callable[[Tensor, Tensor | None], Tensor]:
        """Return the function that computes h_l from source rows [S, width] or features, and from
        own rows [R, width] if the layer reads them in place."""
        net, relu, cached = self.net.layer(layer), self.net.relu_after(layer), self.cached
        if cached is not None and layer == 1:
            return lambda source, _: net.update(cached, source, source, None, relu)
        block, drop = self.blocks[layer], self.drop(step, layer, self.vertices[layer])
        x0 = self.x0[: block.n_dst] if self.x0 is not None else None
        if (own := inputs.own) is not None:
            net = net.during(drop)
            return lambda source, _: net.update(net.gather(block, source), own, own, x0, relu)
        if layer + 1 in self.adds:
            by_columns = cast(ColumnLayer, net)
            return lambda source, _: partial_sums(
                by_columns, block, net.prepare(source, drop), no_dropout
            )
        moments = inputs.moments.values if inputs.moments else None
        if layer in self.adds:
            below = cast(ColumnLayer, self.net.layer(layer - 1))
            relu_below = self.net.relu_after(layer - 1)
            return lambda source, _: net(
                block, below.apply(source, relu_below), drop, x0, relu, moments
            )

        def compute(source: Tensor, own: Tensor | None) -> Tensor:
            if own is None:
                return cast(Tensor, net(block, source, drop, x0, relu, moments))
            return net.update(net.gather(block, source), own, own, x0, relu)

        return compute

    def forward(self, step: int) -> tuple[LayerInput, list[Backward]]:
        """Run all layers forward.

        Returns the decoder's input, with leaf h_L [own, H_L], and the layers' backward functions.
        """
        self.x0: Tensor | None = None
        inputs, backs = LayerInput(NOTHING, NOTHING), list[Backward]()
        if self.net.encoder is not None:
            inputs, back = self._encode(step)
            backs.append(back)
        for layer in self.layers:
            inputs, back = self._run_layer(step, layer, inputs)
            if self.training:
                backs.append(back)
            del back
        self._reduce_moments(step, len(self.layers) + 1, inputs)
        return inputs, backs

    def _encode(self, step: int) -> tuple[LayerInput, Backward]:
        """Run the encoder; return layer 1's input and the encoder's backward function."""
        with self.computing("encode", step, "f"):
            drop = self.drop(step, 0, self.vertices[1][: self.features.shape[0]])
            encoded = self.net.encode(self.features, drop)
            if self.net.initial:
                self.x0 = encoded.detach().requires_grad_(self.training)
            inputs, to_leaf = self._make_input(encoded, step, 1)

        def back(gradient: Tensor) -> Tensor:
            with self.computing("encode", step, "b"):
                gradient = to_leaf(gradient)
                if self.x0 is not None:
                    gradient = gradient + gradient_of(self.x0)
                backward([encoded], [gradient])
            if self.learner is not None:
                self.learner.complete(step, 0)
            return gradient

        return inputs, back

    def step(self, step: int) -> tuple[Tensor, Tensor]:
        """Run forward and backward of a training step, and add to the parameters' .grad.

        Returns this rank's part of the loss, and its logits [own, C]; of link prediction, also
        the logits of pairs' ends that other ranks own.
        """
        self.training, self.scorers = True, [self.targets]
        last, backs = self.forward(step)
        end = len(self.layers) + 1
        # link prediction: fetch the other ends of this rank's pairs
        last.leaf = self.plain_halo.fetch(step, end, last.leaf.detach())().requires_grad_()
        with self.computing("loss", step):
            drop = self.drop(step, end, self.scored_vertices)
            moments = last.moments.values if last.moments else None
            logits = self.net.decode(last.leaf, drop, moments)
            loss = self.targets.loss(logits)
            loss.backward()  # type: ignore[no-untyped-call]
        loss, logits = loss.detach(), logits.detach()  # their graphs hold h_L
        gradient = self.plain_halo.return_gradients(step, end, gradient_of(last.leaf))
        self._add_moment_grad(step, end, last, gradient)
        del last
        while backs:
            gradient = backs.pop()(gradient)
        return loss, logits

    @torch.no_grad()
    def evaluate(self, step: int) -> Tensor:
        """Return logits [own, C] without dropout and without staleness."""
        if self.evaluator is not None:
            worker = self.evaluator()
            self.scorers = worker.scorers
            return worker.evaluate(step)
        self.training = False
        drop = self.drop(step, len(self.layers) + 1, self.own_vertices)
        return self.net.decode(self.forward(step)[0].leaf, drop)

    def drain(self) -> None:
        self.halo.drain()

    def state(self) -> dict[str, Tensor]:
        """Return a checkpoint's tensors: weights, the next step's stale rows, a codec's state."""
        return self.trained() | self.halo.state()

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Resume from the `state` of another process."""
        fill(self.trained(), state)
        self.halo.load(state)

    def refill(self, step: int) -> None:
        """Repeat a step until all stale rows are those of the current weights.

        Each pass makes the stale rows of one more layer right, first forward, then backward. Moving
        averages start from the last pass's rows, not from a mixture with earlier passes' rows.
        """
        policy = self.options.policy
        if not (policy.lags or policy.keeps_received):
            return
        learner, self.learner = self.learner, None  # gradients of these passes are not used
        self.halo.refilling = True
        weights = {name: tensor.detach().clone() for name, tensor in self.trained().items()}
        for _ in range(2 * len(self.layers)):
            self.step(step)
            self.drain()
        fill(self.trained(), weights)  # the passes have moved batch norm's running moments
        self.learner, self.halo.refilling = learner, False


# -- errors of a step's gradient

# After a step, the ranks make a second pass with the same weights and dropout masks, but with
# synchronous exchanges of whole rows. Its gradient is exact. The pass leaves training unchanged.

ALL = "all"  # the gradient of all parameters


class GradientErrors:
    """Gradient errors of a graph-parallel worker.

    errors: parameter's name, or 'all' -> for each step |used - exact| and |exact|; the same on
    all ranks.
    """

    def __init__(self, worker: base.Worker, gradients: Gradients) -> None:
        assert isinstance(worker, Worker)  # launch/run_request.py refuses others
        self.worker, self.gradients = worker, gradients
        self.errors: dict[str, list[tuple[float, float]]] = {}

    def measure(self, step: int) -> None:
        """Measure a step's gradient. Call it after the step, before its gradient is all-reduced."""
        worker, rank, flat = self.worker, self.worker.rank, self.gradients.flat
        worker.drain()  # pending exchanges would mix with those of the second pass
        used, running = flat.clone(), [buffer.clone() for buffer in worker.net.buffers()]
        flat.zero_()
        rank.recorder.recording = False
        saved = worker.halo, worker.learner
        worker.halo, worker.learner = worker.plain_halo, None
        worker.step(step)
        worker.halo, worker.learner = saved
        rank.recorder.recording = True
        gradients = total(rank, torch.stack([used, flat])).double()
        flat.copy_(used)
        for buffer, before in zip(worker.net.buffers(), running, strict=True):
            buffer.copy_(before)
        gap, exact = gradients[0] - gradients[1], gradients[1]
        sizes = {name: each.numel() for name, each in worker.net.named_parameters()}
        parts = (torch.split(numbers, [*sizes.values()]) for numbers in (gap, exact))
        for name, error, true in [*zip(sizes, *parts, strict=True), (ALL, gap, exact)]:
            self.errors.setdefault(name, []).append((float(error.norm()), float(true.norm())))
