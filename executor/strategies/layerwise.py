"""A step over a rank's share of the graph or of a batch: layer after layer, forward and backward.

Every layer is a segment of its own: its inputs are leaves, and its backward is called by hand.
Halo rows come before a segment, and their gradients go home after it (halo.py), under the
schedule's names (planner/strategies/layerwise/).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import InitVar, dataclass, field
from functools import cache
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from gnnplan.executor.layers.kernels import (
    FeatureRows,
    SparseRows,
    backward,
    give_back,
    gradient_of,
    together,
)
from gnnplan.executor.layers.kernels.gpu import triton_kernels
from gnnplan.executor.layers.layer import ColumnLayer, keep, partial_sums
from gnnplan.executor.layers.models import Net
from gnnplan.executor.layers.norms import Moments
from gnnplan.executor.minibatch.share import Part, Picks, Share, targets_of
from gnnplan.executor.ranks.comm import Exchange, all_reduce, begin_all_reduce
from gnnplan.executor.ranks.rank import Rank
from gnnplan.executor.ranks.whole import fill
from gnnplan.executor.strategies import base
from gnnplan.executor.strategies.halo import Halo, RowWeights, halo_of
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies.layerwise.exchange import ExchangeOptions
from gnnplan.planner.vocabulary.schedule import Label

T = TypeVar("T")
_Segment = Callable[[], Tensor]  # computes h_l
# what layer 1 or the encoder reads, and on the device what a worker has on the host
_Bring = Callable[[Any], tuple[FeatureRows, Any]]


@dataclass
class Entered:
    """What a layer's forward keeps for its backward."""

    leaf: Tensor  # the layer's own input rows [local, H_{l-1}]; empty if these are constant
    # What is made before rows are exchanged (narrow layers), or summed on columns
    # (feature_parallel): projected rows and, where the layer reads them, prepared rows
    projected: tuple[Tensor, ...] | None = None
    projection: Callable[[], tuple[Tensor, ...]] | None = None  # computes `projected` (checkpoint)
    own: Tensor | None = None  # leaf beside `projected`: the destinations' prepared rows
    source: Tensor | None = None  # leaf: all source rows [S, width]; None if aggregated once
    segment: _Segment | None = None  # computes `out`
    out: Tensor | None = None  # None if backward computes it again (checkpoint)
    sums: Tensor | None = None  # batch norm: of the rows that count [2, H_{l-1}]
    moments: Moments | None = None


@dataclass
class Worker(base.Worker):
    """One rank, with its share of the graph or of a batch."""

    rank: Rank
    problem: Problem
    share: InitVar[Share]
    options: ExchangeOptions = field()  # has no default here
    net: Net
    weights: InitVar[RowWeights | None] = None  # of adaptive bits (halo.py)
    batch: float | None = None  # if the share is of a batch: what its loss is the mean over
    # makes the worker that evaluates, where the share leaves out rows of which evaluation is
    evaluator: Callable[[], Worker] | None = None
    bring: InitVar[_Bring | None] = None  # None: one by one, and features are given later

    def __post_init__(self, share: Share, weights: RowWeights | None, bring: _Bring | None) -> None:
        problem, device, host = self.problem, self.rank.device, torch.device("cpu")
        self.shapes = problem.model
        self.layers = range(1, len(share.parts) + 1)

        def by_layer(make: Callable[[Part], T]) -> dict[int, T]:
            """What is made of every layer's part, once where layers are alike."""
            once = cache(make)
            return {layer: once(part) for layer, part in enumerate(share.parts, 1)}

        every = by_layer(lambda part: Exchange(self.rank, part.give, part.take, at=host))
        exchanges = {layer: each for layer, each in every.items() if share.parts[layer - 1].meets}
        self.own_vertices = self.scored_vertices = torch.from_numpy(share.own)
        if share.ends is not None and share.ends.meets:
            exchanges[len(self.layers) + 1] = Exchange(
                self.rank, share.ends.give, share.ends.take, at=host
            )
            self.scored_vertices = torch.from_numpy(np.concatenate([share.own, share.ends.away]))
        self.vertices_in_all = share.everyone
        self.targets = targets_of(problem, share, host, self.batch)

        def one_by_one(things: T) -> tuple[Tensor, T]:  # not all of the graph is page-locked
            moved = together(things, lambda tensors: [t.to(device) for t in tensors])
            return torch.empty(0), moved

        blocks = by_layer(lambda part: part.block)
        vertices = by_layer(lambda part: part.vertices)
        picks = {layer: made for layer, made in by_layer(Picks.of).items() if made}
        both = self.own_vertices, self.scored_vertices
        self.features, moved = (bring or one_by_one)(
            (exchanges, picks, blocks, vertices, both, self.targets)
        )
        exchanges, self.picks, self.blocks, self.vertices, both, self.targets = moved
        self.own_vertices, self.scored_vertices = both
        self.scored_by = [self.targets]
        self.plain_halo = Halo(self.rank, exchanges)
        self.halo = halo_of(self.plain_halo, problem, self.options, self.vertices, weights or {})
        self.errors = self.halo.errors
        self.cached: Tensor | None = None

    @property
    def _current_halo(self) -> Halo:
        """How this pass's rows cross: evaluation's do so whole, in the step that reads them."""
        return self.halo if self.training else self.plain_halo

    @property
    def replays(self) -> bool:
        """Of one rank on the full graph, where no step draws anything on the host."""
        alone = self.rank.world == 1 and self.rank.device.type == "cuda" and self.batch is None
        repeats = self.problem.workload.repeats and not isinstance(self.features, SparseRows)
        return alone and repeats and triton_kernels() is not None

    def keep(self, features: Tensor | SparseRows, own: Callable[[], Tensor] | None) -> None:
        """Take features that stay, and aggregate them once if layer 1 always reads the same.

        own: reads those of the rank's destinations again, where they are rows of its own. So they
        are never there beside the aggregate and all that it is made of.
        """
        self.features = features
        if not self.shapes.aggregate_cached(1):
            return
        assert isinstance(features, Tensor)
        give_back()  # what was sent
        self.cached = self.net.layer(1).gather(self.blocks[1], features)
        rows = self.blocks[1].n_dst if self.shapes.layers[0].reads_own else 0
        self.features = features[:0].clone() if own and rows else features[:rows].clone()
        del features
        if own and rows:
            self.features = own()

    # -- one step ---------------------------------------------------------------------------------

    def _enter(self, h: Tensor, step: int, layer: int) -> Entered:
        """Make h_{l-1} [local, H_{l-1}] the leaf of a layer (L + 1: of the decoder)."""
        leaf = h.detach().requires_grad_(self.training and layer > self.shapes.first_varying)
        if not (self.options.narrow and self.shapes.narrow_at(layer)):
            norm = self.net.batch_norm(layer) if self.training else None
            return Entered(leaf, sums=norm.sums(self._counted(leaf)) if norm else None)
        net = self.net.layer(layer)
        drop = self.drop(step, layer, self.vertices[layer][: leaf.shape[0]])
        net = net.during(drop)

        def projection() -> tuple[Tensor, ...]:
            rows = net.prepare(leaf, drop)
            return net.project(rows), self.blocks[layer].own_rows(rows)

        again = projection if self.options.checkpoint else None
        return Entered(leaf, self._kept(projection), again)

    def _kept(self, compute: Callable[[], T]) -> T:
        """What `compute` returns, with its graph unless backward computes it again (checkpoint)."""
        with torch.set_grad_enabled(self.training and not self.options.checkpoint):
            return compute()

    def _outgoing(self, entered: Entered) -> Tensor:
        """The rows that the layer exchanges."""
        return (entered.leaf if entered.projected is None else entered.projected[0]).detach()

    def _sum(self, label: Label, flat: Tensor) -> None:
        """Sum over ranks, behind the gradients that are being summed."""
        if self.learner is not None and self.learner.under_way:
            begin_all_reduce(self.rank, label, flat, self.reduce_group).result()
        else:
            all_reduce(self.rank, label, flat, self.reduce_group)

    def _moments(self, step: int, layer: int, entered: Entered) -> None:
        """Batch norm's moments of h_{l-1}."""
        norm, sums = self.net.batch_norm(layer), entered.sums
        if sums is None or norm is None:
            return
        count, label = self.vertices_in_all, Label("moments", step, "f", layer)
        if self.batch is None:
            self._sum(label, sums)
        else:  # how many rows a batch has is summed too
            flat = torch.cat([sums.flatten(), sums.new_tensor([len(entered.leaf)])])
            self._sum(label, flat)
            sums, count = flat[:-1].view_as(sums), max(int(flat[-1]), 1)
        entered.moments = Moments.of(norm, sums, count)

    def _counted(self, rows: Tensor) -> Tensor:
        """Rows [local, H] of which batch norm's moments are.

        On the full graph a vertex counts once, at its owner. In a batch a row counts wherever it is
        computed, as in torch.nn.SyncBatchNorm.
        """
        return rows if self.batch is not None else rows[: len(self.own_vertices)]

    def _moments_home(self, step: int, layer: int, entered: Entered, gradient: Tensor) -> None:
        """Add to the gradient of own rows what they get through the moments."""
        if entered.moments is not None:
            self._sum(Label("moments", step, "b", layer), entered.moments.gradient)
            rows = self._counted(entered.leaf)
            entered.moments.add_home(rows, gradient[: len(rows)])

    def _layer(self, step: int, layer: int, entered: Entered) -> Entered:
        """Forward of one layer. Leaves h_l in `entered.out`, and returns the next layer's step."""
        self._moments(step, layer, entered)
        lay_out = None
        if layer > self.shapes.first_varying:
            lay_out = self._current_halo.rows(step, layer, self._outgoing(entered))
        with self.rank.recorder.span(Label("forward", step, layer=layer), "compute"):
            if lay_out is None:
                entered.segment = self._first_segment(step)
            else:
                entered.segment = self._segment(step, layer, entered, lay_out())
            lay_out = None  # it has the rows as they were before they were laid out
            out = self._kept(entered.segment)
            entered.out = None if self.options.checkpoint else out
            return self._enter(out, step, layer + 1)

    def _first_segment(self, step: int) -> _Segment:
        """Layer 1 on constant features."""
        net, relu, cached = self.net.layer(1), self.net.relu_after(1), self.cached
        x = cast(Tensor, self.features)  # sparse rows offer what layer 1 asks of a tensor
        if cached is not None:
            return lambda: net.update(cached, x, x, None, relu)
        block, drop = self.blocks[1], self.drop(step, 1, self.vertices[1])
        if self._adds_up(2):
            by_columns = cast(ColumnLayer, net)
            return lambda: partial_sums(by_columns, block, net.prepare(x, drop), keep)
        return lambda: net(block, x, drop, None, relu)

    def _adds_up(self, layer: int) -> bool:
        """Whether the layer's source rows come as partial sums, without bias and ReLU."""
        return layer in self.picks and self.picks[layer].adds

    def _segment(self, step: int, layer: int, entered: Entered, source: Tensor) -> _Segment:
        """A function that computes h_l from own rows and halo, `source`."""
        net, block, relu = self.net.layer(layer), self.blocks[layer], self.net.relu_after(layer)
        local = len(self._outgoing(entered))
        x0 = self.x0[: block.n_dst] if self.x0 is not None else None
        if layer in self.picks:
            source = self.picks[layer].of_rows(source)
        source = entered.source = source.detach().requires_grad_(entered.leaf.requires_grad)
        drop = self.drop(step, layer, self.vertices[layer])
        if entered.projected is not None:
            net = net.during(drop)
            own = entered.own = entered.projected[1].detach().requires_grad_(self.training)
            if self.options.checkpoint:
                # computed again in the backward pass
                entered.projected = entered.projected[0][:0], own
            return lambda: net.update(net.gather(block, source), own, own, x0, relu)
        moments = entered.moments.values if entered.moments else None
        # the rows are in `source`: no second copy stays
        entered.leaf = source.detach()[:local].requires_grad_(source.requires_grad)
        if self._adds_up(layer):
            below = cast(ColumnLayer, self.net.layer(layer - 1))
            ends = self.net.relu_after(layer - 1)
            return lambda: net(block, below.apply(source, ends), drop, x0, relu, moments)
        return lambda: net(block, source, drop, x0, relu, moments)

    def _backward(
        self, step: int, layer: int, entered: Entered, above: Entered | None, home: Tensor | None
    ) -> Tensor | None:
        """Backward of one layer.

        home: what this returned for the layer above, or the gradient of h_L. Returns the gradient
        of this rank's rows of h_{l-1} as exchanged, complete with what peers send; None if these
        rows are constant.
        """
        assert entered.segment is not None and home is not None
        with self.rank.recorder.span(Label("backward", step, layer=layer), "compute"):
            gradient = self._through_projection(above, home)
            out = entered.segment() if entered.out is None else entered.out
            backward([out], [gradient])
            del out
            entered.out = entered.segment = None
        if self.learner is not None:
            self.learner.complete(step, layer)
        if not entered.leaf.requires_grad:
            return None
        assert entered.source is not None
        of_all = gradient_of(entered.source)
        if layer in self.picks:
            of_all = self.picks[layer].home(of_all)
            entered.source.grad = None
        gradient = self._current_halo.home(step, layer, of_all)
        self._moments_home(step, layer, entered, gradient)
        return gradient

    def _through_projection(self, above: Entered | None, gradient: Tensor) -> Tensor:
        """The gradient of what the layer above exchanged -> that of its input rows [local, H]."""
        if above is None:
            return gradient
        self._project_back(above, gradient)
        return gradient_of(above.leaf)

    @staticmethod
    def _project_back(entered: Entered, gradient: Tensor) -> None:
        """Backward of what is done to rows before they are exchanged."""
        projected = entered.projected if entered.projection is None else entered.projection()
        assert projected
        if entered.own is None or entered.own.grad is None:  # own rows only through the aggregate
            backward(projected[:1], [gradient])
        else:
            backward(projected, (gradient, entered.own.grad))
        entered.projected = entered.own = entered.source = None

    def forward(self, step: int) -> tuple[list[Entered], Tensor | None]:
        """Forward of all layers.

        Returns what each keeps, last the decoder, whose leaf is h_L [own, H_L]; and the encoder's
        output with its graph, if there is an encoder.
        """
        encoded, self.x0 = None, None
        if self.net.encoder is None:
            entered = [Entered(torch.empty(0))]
        else:
            with self.rank.recorder.span(Label("encode", step, "f"), "compute"):
                drop = self.drop(step, 0, self.vertices[1][: self.features.shape[0]])
                encoded = self.net.encode(self.features, drop)
                if self.net.initial:
                    self.x0 = encoded.detach().requires_grad_(self.training)
                entered = [self._enter(encoded, step, 1)]
        for layer in self.layers:
            following = self._layer(step, layer, entered[-1])
            if not self.training:
                entered.clear()
            entered.append(following)
        self._moments(step, len(self.layers) + 1, entered[-1])
        return entered, encoded

    def step(self, step: int) -> tuple[Tensor, Tensor]:
        """Forward and backward of a training step; adds gradients to the parameters' .grad.

        Returns this rank's part of the loss, and its logits [own, C]; with those of fetched ends.
        """
        self.training, self.scored_by = True, [self.targets]
        entered, encoded = self.forward(step)
        end, last, above = len(self.layers) + 1, entered.pop(), None
        # of link prediction also rows of other ranks, at which this rank's pairs end
        last.leaf = self.plain_halo.rows(step, end, last.leaf.detach())().requires_grad_()
        with self.rank.recorder.span(Label("loss", step), "compute"):
            drop = self.drop(step, end, self.scored_vertices)
            moments = last.moments.values if last.moments else None
            logits = self.net.decode(last.leaf, drop, moments)
            loss = self.targets.loss(logits)
            loss.backward()  # type: ignore[no-untyped-call]
        loss, logits = loss.detach(), logits.detach()  # their graphs hold h_L
        gradient: Tensor | None
        gradient = self.plain_halo.home(step, end, gradient_of(last.leaf))
        self._moments_home(step, end, last, gradient)
        del last
        for layer in reversed(self.layers):
            gradient = self._backward(step, layer, entered[-1], above, gradient)
            done = entered.pop()
            above = done if done.projected is not None else None
            del done  # and its rows
        if encoded is not None:
            with self.rank.recorder.span(Label("encode", step, "b"), "compute"):
                assert gradient is not None
                gradient = self._through_projection(above, gradient)
                backward(
                    [encoded], [gradient if self.x0 is None else gradient + gradient_of(self.x0)]
                )
            if self.learner is not None:
                self.learner.complete(step, 0)
        return loss, logits

    @torch.no_grad()
    def evaluate(self, step: int) -> Tensor:
        """Logits [own, C] without dropout and without staleness."""
        if self.evaluator is not None:
            whole = self.evaluator()
            self.scored_by = whole.scored_by
            return whole.evaluate(step)
        self.training = False
        drop = self.drop(step, len(self.layers) + 1, self.own_vertices)
        return self.net.decode(self.forward(step)[0][-1].leaf, drop)

    def drain(self) -> None:
        self.halo.drain()

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint keeps: weights, the next step's stale rows, and adaptive bits."""
        return self.trained() | self.halo.state()

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Go on from another process's state."""
        fill(self.trained(), state)
        self.halo.load(state)

    def refill(self, step: int) -> None:
        """Repeat a step until the rows that it reads of others are those of the weights.

        A pass makes the rows right that one more layer reads, forward and then backward. A moving
        average begins with the last pass's rows: with what came before it would be a share of them.
        """
        policy = self.options.policy
        if not (policy.lags or policy.stays):
            return
        learner, self.learner = self.learner, None  # the passes' gradients are of no use
        self.halo.anew = True
        weights = {name: tensor.clone() for name, tensor in self.trained().items()}
        for _ in range(2 * len(self.layers)):
            self.step(step)
            self.drain()
        fill(self.trained(), weights)  # batch norm's averages have moved
        self.learner, self.halo.anew = learner, False
