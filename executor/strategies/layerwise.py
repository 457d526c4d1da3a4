"""A step over a rank's share of the graph or of a batch: layer after layer, forward and backward.

Every layer is a segment of its own: its inputs are leaves, and its backward is called by hand, by a
function that its forward leaves. Halo rows come before a segment, and their gradients go home after
it (halo.py), under the schedule's names (planner/strategies/layerwise/).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import InitVar, dataclass
from functools import cache
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from gnnplan.executor.layers.kernels import (
    backward,
    give_back,
    gradient_of,
    together,
)
from gnnplan.executor.layers.kernels.gpu import triton_kernels
from gnnplan.executor.layers.layer import ColumnLayer, keep, partial_sums
from gnnplan.executor.layers.models import Net
from gnnplan.executor.layers.norms import Moments
from gnnplan.executor.minibatch.share import Part, Share, targets_of
from gnnplan.executor.ranks.comm import Exchange, all_reduce, begin_all_reduce
from gnnplan.executor.ranks.rank import Rank
from gnnplan.executor.ranks.whole import fill
from gnnplan.executor.strategies import base
from gnnplan.executor.strategies.base import Back
from gnnplan.executor.strategies.halo import Halo, RowWeights, halo_of
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies.layerwise.buckets import buckets_of
from gnnplan.planner.strategies.layerwise.exchange import ExchangeOptions
from gnnplan.planner.vocabulary.schedule import Label

T = TypeVar("T")
NOTHING = torch.empty(0)
_Segment = Callable[[], Tensor]  # computes h_l
# what layer 1 or the encoder reads, and on the device what a worker has on the host
_Bring = Callable[[Any], tuple[Tensor, Any]]


@dataclass
class Entered:
    """Rows of h_{l-1} before a layer."""

    leaf: Tensor  # the rank's own [local, H_{l-1}]; empty if these are constant
    outgoing: Tensor  # what the layer exchanges of them: these, or projected ones (narrow layers)
    own: Tensor | None = None  # beside projected rows, a leaf: the destinations' prepared rows
    sums: Tensor | None = None  # batch norm: of the rows that count [2, H_{l-1}]
    moments: Moments | None = None


def unchanged(gradient: Tensor) -> Tensor:
    """The way back from rows to themselves."""
    return gradient


def back_to_leaves(made: Sequence[Tensor], gradient: Tensor, own: Tensor | None) -> None:
    """Backward of what is done to rows before they are exchanged or summed.

    made: what is exchanged and, where `own` is a leaf beside it that layers read too, own rows.
    """
    if own is None or own.grad is None:  # own rows only through the aggregate
        backward(made[:1], [gradient])
    else:
        backward(made, (gradient, own.grad))


@dataclass
class Worker(base.Worker):
    """One rank, with its share of the graph or of a batch."""

    rank: Rank
    problem: Problem
    share: InitVar[Share]
    options: ExchangeOptions
    net: Net
    weights: InitVar[RowWeights | None] = None  # of adaptive rows (halo.py)
    batch: float | None = None  # if the share is of a batch: what its loss is the mean over
    # makes the worker that evaluates, where the share leaves out rows of which evaluation is
    evaluator: Callable[[], Worker] | None = None
    bring: InitVar[_Bring | None] = None  # None: one by one, and features are given later

    def __post_init__(self, share: Share, weights: RowWeights | None, bring: _Bring | None) -> None:
        problem, device, host = self.problem, self.rank.device, torch.device("cpu")
        self.shapes, options = problem.model, self.options
        self.buckets = buckets_of(problem, options.buckets, options.narrow)
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
        picks = {layer: part.picks for layer, part in enumerate(share.parts, 1) if part.picks}
        both = self.own_vertices, self.scored_vertices
        self.features, moved = (bring or one_by_one)(
            (exchanges, picks, blocks, vertices, both, self.targets)
        )
        exchanges, self.picks, self.blocks, self.vertices, both, self.targets = moved
        self.own_vertices, self.scored_vertices = both
        self.scored_by = [self.targets]
        self.plain_halo = Halo(self.rank, exchanges)
        self.halo = halo_of(self.plain_halo, problem, options, self.vertices, weights or {})
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
        return alone and self.problem.repeats and triton_kernels() is not None

    def keep(self, features: Tensor, own: Callable[[], Tensor] | None) -> None:
        """Take features that stay, and aggregate them once if layer 1 always reads the same.

        own: reads those of the rank's destinations again, where they are rows of its own. So they
        are never there beside the aggregate and all that it is made of.
        """
        self.features = features
        if not self.shapes.aggregate_cached(1):
            return
        give_back()  # what was sent
        self.cached = self.net.layer(1).gather(self.blocks[1], features)
        rows = self.blocks[1].n_dst if self.shapes.layers[0].reads_own else 0
        self.features = features[:0].clone() if own and rows else features[:rows].clone()
        del features
        if own and rows:
            self.features = own()

    # -- one step ---------------------------------------------------------------------------------

    def _enter(self, h: Tensor, step: int, layer: int) -> tuple[Entered, Back]:
        """Make h_{l-1} [local, H_{l-1}] the leaf of a layer (L + 1: of the decoder).

        Returns also the way back from what the layer exchanges to the leaf.
        """
        leaf = h.detach().requires_grad_(self.training and layer > self.shapes.first_varying)
        if not (self.options.narrow and self.shapes.narrow_at(layer)):
            norm = self.net.batch_norm(layer) if self.training else None
            sums = norm.sums(self._counted(leaf)) if norm else None
            return Entered(leaf, leaf.detach(), sums=sums), unchanged
        drop = self.drop(step, layer, self.vertices[layer][: leaf.shape[0]])
        net = self.net.layer(layer).during(drop)

        def project() -> tuple[Tensor, Tensor]:
            rows = net.prepare(leaf, drop)
            return net.project(rows), self.blocks[layer].own_rows(rows)

        made, kept = self._kept(project), list[tuple[Tensor, Tensor]]()
        own = made[1].detach().requires_grad_(self.training)
        entered = Entered(leaf, made[0].detach(), own)
        if not self.options.checkpoint:
            kept.append(made)
        del made

        def back(gradient: Tensor) -> Tensor:
            back_to_leaves(kept.pop() if kept else project(), gradient, own)
            return gradient_of(leaf)

        return entered, back

    def _kept(self, compute: Callable[[], T]) -> T:
        """What `compute` returns, with its graph unless backward computes it again (checkpoint)."""
        with torch.set_grad_enabled(self.training and not self.options.checkpoint):
            return compute()

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

    def _layer(self, step: int, layer: int, entered: Entered) -> tuple[Entered, Back]:
        """Forward of one layer -> the next layer's rows.

        The way back leads from the gradient of this rank's rows of h_l as exchanged to that of its
        rows of h_{l-1}, complete with what peers send; if these are constant, nowhere.
        """
        self._moments(step, layer, entered)
        lay_out = None
        if layer > self.shapes.first_varying:
            lay_out = self._current_halo.rows(step, layer, entered.outgoing)
        with self.rank.recorder.span(Label("forward", step, layer=layer), "compute"):
            source = self.features
            if lay_out is not None:
                source = self._laid_out(layer, entered, lay_out())
            lay_out = None  # it has the rows as they were before they were laid out
            segment = self._segment(step, layer, entered, source)
            out = self._kept(segment)
            following, to_leaf = self._enter(out, step, layer + 1)
        # of which backward lets go, one by one
        before, kept = [to_leaf], [] if self.options.checkpoint else [out]
        del out, to_leaf

        def back(gradient: Tensor) -> Tensor:
            with self.rank.recorder.span(Label("backward", step, layer=layer), "compute"):
                gradient = before.pop()(gradient)
                backward([kept.pop() if kept else segment()], [gradient])
            if self.learner is not None:
                self.learner.complete(step, layer)
            if not entered.leaf.requires_grad:
                return gradient
            gradient = gradient_of(source)
            if layer in self.picks:
                gradient = self.picks[layer].home(gradient)
                source.grad = None
            gradient = self._current_halo.home(step, layer, gradient)
            self._moments_home(step, layer, entered, gradient)
            return gradient

        return following, back

    def _laid_out(self, layer: int, entered: Entered, rows: Tensor) -> Tensor:
        """The leaf of all source rows [S, width], of own rows and halo."""
        local, entered.outgoing = len(entered.outgoing), NOTHING  # they are among `rows` now
        if layer in self.picks:
            rows = self.picks[layer].of_rows(rows)
        source = rows.detach().requires_grad_(entered.leaf.requires_grad)
        if entered.own is None:  # no second copy stays
            entered.leaf = source.detach()[:local].requires_grad_(source.requires_grad)
        return source

    def _segment(self, step: int, layer: int, entered: Entered, source: Tensor) -> _Segment:
        """What computes h_l from source rows [S, width], or from constant features."""
        net, relu, cached = self.net.layer(layer), self.net.relu_after(layer), self.cached
        if cached is not None and layer == 1:
            return lambda: net.update(cached, source, source, None, relu)
        block, drop = self.blocks[layer], self.drop(step, layer, self.vertices[layer])
        x0 = self.x0[: block.n_dst] if self.x0 is not None else None
        if (own := entered.own) is not None:
            net = net.during(drop)
            return lambda: net.update(net.gather(block, source), own, own, x0, relu)
        if self._adds_up(layer + 1):
            by_columns = cast(ColumnLayer, net)
            return lambda: partial_sums(by_columns, block, net.prepare(source, drop), keep)
        moments = entered.moments.values if entered.moments else None
        if self._adds_up(layer):
            below = cast(ColumnLayer, self.net.layer(layer - 1))
            ends = self.net.relu_after(layer - 1)
            return lambda: net(block, below.apply(source, ends), drop, x0, relu, moments)
        return lambda: net(block, source, drop, x0, relu, moments)

    def _adds_up(self, layer: int) -> bool:
        """Whether the layer's source rows come as partial sums, without bias and ReLU."""
        return layer in self.picks and self.picks[layer].adds

    def forward(self, step: int) -> tuple[Entered, list[Back]]:
        """Forward of all layers.

        Returns what the decoder reads, whose leaf is h_L [own, H_L], and the ways back.
        """
        self.x0: Tensor | None = None
        entered, backs = Entered(NOTHING, NOTHING), list[Back]()
        if self.net.encoder is not None:
            entered, back = self._encode(step)
            backs.append(back)
        for layer in self.layers:
            entered, back = self._layer(step, layer, entered)
            if self.training:
                backs.append(back)
            del back
        self._moments(step, len(self.layers) + 1, entered)
        return entered, backs

    def _encode(self, step: int) -> tuple[Entered, Back]:
        """The encoder -> layer 1's rows, and the way back from their gradient."""
        with self.rank.recorder.span(Label("encode", step, "f"), "compute"):
            drop = self.drop(step, 0, self.vertices[1][: self.features.shape[0]])
            encoded = self.net.encode(self.features, drop)
            if self.net.initial:
                self.x0 = encoded.detach().requires_grad_(self.training)
            entered, to_leaf = self._enter(encoded, step, 1)

        def back(gradient: Tensor) -> Tensor:
            with self.rank.recorder.span(Label("encode", step, "b"), "compute"):
                gradient = to_leaf(gradient)
                if self.x0 is not None:
                    gradient = gradient + gradient_of(self.x0)
                backward([encoded], [gradient])
            if self.learner is not None:
                self.learner.complete(step, 0)
            return gradient

        return entered, back

    def step(self, step: int) -> tuple[Tensor, Tensor]:
        """Forward and backward of a training step; adds gradients to the parameters' .grad.

        Returns this rank's part of the loss, and its logits [own, C]; with those of fetched ends.
        """
        self.training, self.scored_by = True, [self.targets]
        last, backs = self.forward(step)
        end = len(self.layers) + 1
        # of link prediction also rows of other ranks, at which this rank's pairs end
        last.leaf = self.plain_halo.rows(step, end, last.leaf.detach())().requires_grad_()
        with self.rank.recorder.span(Label("loss", step), "compute"):
            drop = self.drop(step, end, self.scored_vertices)
            moments = last.moments.values if last.moments else None
            logits = self.net.decode(last.leaf, drop, moments)
            loss = self.targets.loss(logits)
            loss.backward()  # type: ignore[no-untyped-call]
        loss, logits = loss.detach(), logits.detach()  # their graphs hold h_L
        gradient = self.plain_halo.home(step, end, gradient_of(last.leaf))
        self._moments_home(step, end, last, gradient)
        del last
        while backs:
            gradient = backs.pop()(gradient)
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
        return self.net.decode(self.forward(step)[0].leaf, drop)

    def drain(self) -> None:
        self.halo.drain()

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint keeps: weights, the next step's stale rows, what a codec carries."""
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
