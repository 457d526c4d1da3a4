"""Graph parallel: layer after layer over a Layout, with halo rows exchanged before each.

GraNNDis uses the same worker with a deeper Layout, and mini-batches with a batch's share.

Every layer is a segment of its own: its inputs are leaves, and its backward is called by hand. The
exchanges stand between segments, under the schedule's names (planner/strategies/layerwise/). With
staleness 1 a layer uses what was received one step ago, and sends on the comm lane's thread, from
and into buffers that stay: memory does not depend on how far the lane lags behind. With `bits` what
is sent in training is packed before, and unpacked before its use.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import InitVar, dataclass, field, replace
from typing import TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from gnnplan.executor.layers.blocks import dtype_of, weighted_block
from gnnplan.executor.layers.kernels import (
    Block,
    Mix,
    SparseRows,
    backward,
    pack,
    pack_mixed,
    sent,
    together,
    unpack,
    unpack_mixed,
)
from gnnplan.executor.layers.kernels.gpu import triton_kernels
from gnnplan.executor.layers.layer import ColumnLayer, Drop, keep, partial_sums
from gnnplan.executor.layers.links import LinkTargets
from gnnplan.executor.layers.models import Net
from gnnplan.executor.layers.norms import Moments
from gnnplan.executor.layers.targets import Targets
from gnnplan.executor.minibatch.share import Part, Share, share_of
from gnnplan.executor.modules.nets import net_of
from gnnplan.executor.ranks.comm import Exchange, all_reduce, begin_all_reduce
from gnnplan.executor.ranks.rank import Rank, there
from gnnplan.executor.ranks.whole import fill
from gnnplan.executor.strategies import base
from gnnplan.executor.strategies.constant_rows import ConstantRows, constant_rows
from gnnplan.planner.gnn.few_bits import ADAPTIVE
from gnnplan.planner.graph.streams import ROUNDING
from gnnplan.planner.ownership.layout import Layout
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies import GraphParallel
from gnnplan.planner.strategies.layerwise.buckets import Bucket, buckets_of
from gnnplan.planner.strategies.layerwise.step import ExchangeOptions
from gnnplan.planner.vocabulary.schedule import Label

T = TypeVar("T")


@dataclass
class _Step:
    """What a layer's forward keeps for its backward."""

    leaf: Tensor  # the layer's own input rows [local, H_{l-1}]; empty if these are constant
    # A narrow layer multiplies before the exchange. Own projected rows and own prepared rows:
    projected: tuple[Tensor, Tensor] | None = None
    projection: Callable[[], tuple[Tensor, Tensor]] | None = None  # computes `projected`
    own: Tensor | None = None  # leaf of a narrow layer: the destinations' prepared rows
    source: Tensor | None = None  # leaf: all source rows [S, width]; None if aggregated once
    segment: Callable[[], Tensor] | None = None  # computes `out`
    out: Tensor | None = None  # None if backward computes it again (checkpoint)
    sums: Tensor | None = None  # batch norm: of the rows that count [2, H_{l-1}]
    moments: Moments | None = None


@dataclass
class Picks:
    """Source rows [S, H] that are some of a rank's own rows and halo [T, H], or sums of some."""

    places: Tensor  # of those picked [P]
    there: int  # T
    into: Tensor | None  # the source row that each is added to [P]; None: it is one itself
    rows: int  # S

    @staticmethod
    def of(part: Part) -> Picks | None:
        """Of a part, on the host; None if it reads its own rows and halo as they are."""
        if part.picks is None:
            return None
        into = None if part.into is None else torch.from_numpy(part.into)
        there = part.local + int(part.take.sum())
        return Picks(torch.from_numpy(part.picks), there, into, part.source.size)

    @property
    def adds(self) -> bool:
        """Whether source rows are sums."""
        return self.into is not None

    def of_rows(self, rows: Tensor) -> Tensor:
        """[T, H] -> [S, H]."""
        picked = rows.index_select(0, self.places)
        if self.into is None:
            return picked
        return picked.new_zeros(self.rows, picked.shape[1]).index_add_(0, self.into, picked)

    def home(self, gradient: Tensor) -> Tensor:
        """The gradient of source rows [S, H] -> that of own rows and halo [T, H]."""
        of_picked = gradient if self.into is None else gradient.index_select(0, self.into)
        home = gradient.new_zeros(self.there, gradient.shape[1])
        return home.index_copy_(0, self.places, of_picked)


@dataclass
class Seen:
    """What a measurement has seen of a step's own rows, by layer (gradient_errors.py)."""

    rows: dict[int, Tensor] = field(default_factory=dict)  # h_l [local, H_l]
    gradients: dict[int, Tensor] = field(default_factory=dict)  # of h_l


@dataclass
class Worker(base.Worker):
    """One rank, with its share of the graph or of a batch."""

    rank: Rank
    problem: Problem
    share: InitVar[Share]
    options: ExchangeOptions
    net: Net
    gamma: float = 0.0
    batch: float | None = None  # if the share is of a batch: what its loss is the mean over
    # makes the worker that evaluates, where the share leaves out rows of which evaluation is
    evaluator: Callable[[], Worker] | None = None
    # With staleness: rows and halo gradients under way, by way ('f' or 'b') and layer
    pending: dict[tuple[str, int], Future[Tensor]] = field(default_factory=dict)
    leaving: dict[tuple[str, int], Tensor] = field(default_factory=dict)  # their buffers
    # Adaptive bits: of rows that leave ('out') and come ('in'), by way and layer
    mixes: dict[tuple[str, str, int], Mix] = field(default_factory=dict)
    weights: dict[tuple[str, int], Tensor] = field(default_factory=dict)  # of rows, by end, layer
    # 'f:l2' -> per step ||used - true||^2 and ||true||^2
    errors: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    seen: Seen | None = None  # filled in training steps, if it is there

    def __post_init__(self, share: Share) -> None:
        problem, device = self.problem, self.rank.device
        assert problem.graph is not None
        self.shapes = problem.model
        self.layers = range(1, len(share.parts) + 1)
        self.exchanges: dict[int, Exchange] = {}
        self.silent: dict[int, bool] = {}  # no rank sends anything before this layer
        self.blocks: dict[int, Block] = {}
        # where a layer does not read all of its own rows and halo as they are
        self.picks: dict[int, Picks] = {}
        self.vertices: dict[int, Tensor] = {}
        first_with: dict[int, int] = {}  # by part: the first layer that has it
        host = torch.device("cpu")
        for layer, part in zip(self.layers, share.parts, strict=True):
            twin = first_with.setdefault(id(part), layer)
            if twin == layer:
                self.exchanges[layer] = Exchange(self.rank, part.give, part.take, at=host)
                if (picks := Picks.of(part)) is not None:
                    self.picks[layer] = picks
                self.vertices[layer] = torch.from_numpy(part.source)
                self.blocks[layer] = part.block
            else:
                self.exchanges[layer] = self.exchanges[twin]
                self.vertices[layer] = self.vertices[twin]
                self.blocks[layer] = self.blocks[twin]
            self.silent[layer] = not part.meets
        self.own_vertices = self.scored_vertices = torch.from_numpy(share.own)
        self.ends_meet = share.ends is not None and share.ends.meets
        if share.ends is not None and share.ends.meets:
            self.exchanges[len(self.layers) + 1] = Exchange(
                self.rank, share.ends.give, share.ends.take, at=host
            )
            self.scored_vertices = torch.from_numpy(np.concatenate([share.own, share.ends.away]))
        self.vertices_in_all = share.everyone
        self.targets = targets_of(problem, share, host, self.batch)

        def move(tensors: Sequence[Tensor]) -> list[Tensor]:
            # one by one where all of the graph would be page-locked
            return [t.to(device) for t in tensors] if self.batch is None else sent(tensors, device)

        both = self.own_vertices, self.scored_vertices
        self.exchanges, self.picks, self.blocks, self.vertices, both, self.targets = together(
            (self.exchanges, self.picks, self.blocks, self.vertices, both, self.targets), move
        )
        self.own_vertices, self.scored_vertices = both
        self.scored = self.targets  # to which the last logits belong
        self.arriving = torch.empty(
            self._numbers_to_smooth(), dtype=dtype_of(problem.workload), device=device
        )
        self.features: Tensor | SparseRows = torch.empty(0)  # what layer 1 or the encoder reads
        self.cached: Tensor | None = None
        self.to_sum: Tensor | None = None  # gradient of the sum of all layers' rows

    @property
    def buckets(self) -> list[Bucket]:
        return buckets_of(self.problem, self.options.buckets, self.options.narrow)

    @property
    def replays(self) -> bool:
        """Of one rank on the full graph, where no step draws anything on the host."""
        alone = self.rank.world == 1 and self.rank.device.type == "cuda" and self.batch is None
        workload = self.problem.workload
        draws = workload.task == "link" or isinstance(self.features, SparseRows)
        differs = draws or workload.varies_lr or workload.is_cut
        return alone and not differs and triton_kernels() is not None

    def _numbers_to_smooth(self) -> int:
        """Size of the buffer in which the comm lane receives what is then smoothed.

        Exchanges use it one after the other.
        """
        if not self.options.staleness:
            return 0
        most = 0
        for layer in range(self.shapes.first_varying + 1, len(self.layers) + 1):
            width = self.shapes.exchanged_width(layer, self.options.narrow)
            for way in "fb":
                if self._smooths(way):
                    most = max(most, self.exchanges[layer].rows(way)[1] * width)
        return most

    def _smooths(self, way: str) -> bool:
        return ("f" if way == "f" else "g") in self.options.smoothing

    def keep(self, features: Tensor | SparseRows) -> None:
        """Take features that stay, and aggregate them once if layer 1 always reads the same."""
        self.features = features
        if self.shapes.aggregate_cached(1):
            assert isinstance(self.features, Tensor)
            self.cached = self.net.layer(1).gather(self.blocks[1], self.features)
            reads_own = self.shapes.layers[0].reads_own
            self.features = self.features[: self.blocks[1].n_dst if reads_own else 0].clone()

    # -- one step ---------------------------------------------------------------------------------

    def _drop(self, step: int, layer: int, vertices: Tensor) -> Drop:
        """Dropout of rows of `vertices` [S] before the layer (0: encoder, L + 1: decoder)."""
        p = self.problem.workload.dropout if self.training else 0.0
        epoch = step if self.clock is None else self.clock
        seed = self.problem.workload.seed
        return Drop(p, seed, epoch, layer, vertices, training=self.training)

    def _is_narrow(self, layer: int) -> bool:
        return self.options.narrow and self.shapes.narrow_at(layer)

    def _enter(self, h: Tensor, step: int, layer: int) -> _Step:
        """Make h_{l-1} [local, H_{l-1}] the leaf of a layer (L + 1: of the decoder)."""
        leaf = h.detach().requires_grad_(self.training and layer > self.shapes.first_varying)
        if not self._is_narrow(layer):
            norm = self.net.batch_norm(layer) if self.training else None
            return _Step(leaf, sums=norm.sums(self._counted(leaf)) if norm else None)
        net = self.net.layer(layer)
        drop = self._drop(step, layer, self.vertices[layer][: leaf.shape[0]])
        net = net.during(drop)

        def projection() -> tuple[Tensor, Tensor]:
            rows = net.prepare(leaf, drop)
            return net.project(rows), self.blocks[layer].own_rows(rows)

        return _Step(leaf, self._kept(projection), projection)

    def _kept(self, compute: Callable[[], T]) -> T:
        """What `compute` returns, with its graph unless backward computes it again (checkpoint)."""
        with torch.set_grad_enabled(self.training and not self.options.checkpoint):
            return compute()

    def _outgoing(self, entered: _Step) -> Tensor:
        """The rows that the layer exchanges."""
        return (entered.leaf if entered.projected is None else entered.projected[0]).detach()

    def _halo(
        self,
        step: int,
        layer: int,
        way: str,
        rows: Tensor,
        home: Tensor | None = None,
        into: Tensor | None = None,
        packed: bool = False,
    ) -> Callable[[], Tensor]:
        """A function that sends this rank's rows, and returns those that it receives.

        way: 'f', rows of h: all of them, or `packed` for peers; or 'b', gradients of the halo.
        home: gradient to which received gradients are added. into: buffer for what is received.
        """
        exchange = self.exchanges[layer]
        label = Label("halo", step, way, layer)
        nbytes = self.rank.count(label, exchange.nbytes(rows.shape[1], rows.element_size(), way))

        def swap() -> Tensor:
            with self.rank.span(label, "comm", nbytes):
                outgoing = exchange.pack(rows) if way == "f" and not packed else rows
                received = (exchange.forward if way == "f" else exchange.backward)(outgoing, into)
                if home is not None:
                    exchange.add_home(home, received)
                return received

        return swap

    @property
    def _packs(self) -> bool:
        return self.training and self.options.bits is not None

    def _exchange_packed(self, step: int, layer: int, way: str, rows: Tensor, into: Tensor) -> None:
        """Send rows in few bits per number, and unpack those that come.

        way: 'f', into the last places of the source rows `into`; or 'b', gradients of the halo,
        which are added to that of own rows. With staleness, what was sent one step ago comes.
        """
        packed = self._pack(step, layer, way, rows)
        swap = self._halo(step, layer, way, packed, packed=True)
        if self.options.staleness:
            arrival = self.pending.pop((way, layer), None)
            self.pending[way, layer] = self.rank.submit("comm", swap)
            received = None if arrival is None else arrival.result()
        else:
            received = swap()
        self._unpack(step, layer, way, received, into)

    def _pack(self, step: int, layer: int, way: str, rows: Tensor) -> Tensor:
        """The rows that peers read, or the halo's gradients, as bytes [sends, row_bytes]."""
        exchange, vertices = self.exchanges[layer], self.vertices[layer]
        assert self.options.bits is not None
        with self.rank.span(Label("pack", step, way, layer), "compute"):
            positions = exchange.positions if way == "f" else None
            whose = vertices[positions if way == "f" else slice(len(vertices) - len(rows), None)]
            numbers = ROUNDING, self.problem.workload.seed, step, layer, "fb".index(way)
            if self.options.bits != ADAPTIVE:
                return pack(rows, positions, int(self.options.bits), whose, *numbers)
            packed = pack_mixed(rows, positions, self._mix("out", way, layer), whose, *numbers)
            self._crossed("out", way, layer, packed)
            return packed

    def _unpack(self, step: int, layer: int, way: str, packed: Tensor | None, into: Tensor) -> None:
        """Of `_exchange_packed`; nothing has come in the first step of a stale exchange."""
        exchange = self.exchanges[layer]
        with self.rank.span(Label("unpack", step, way, layer), "compute"):
            if way == "f":
                halo = into[into.shape[0] - exchange.rows("f")[1] :]
                halo.zero_() if packed is None else self._unpacked(packed, way, layer, halo)
            elif packed is not None:
                received = into.new_empty(packed.shape[0], into.shape[1])
                exchange.add_home(into, self._unpacked(packed, way, layer, received))
            if packed is not None and self.options.bits == ADAPTIVE:
                self._crossed("in", way, layer, packed)

    def _unpacked(self, packed: Tensor, way: str, layer: int, into: Tensor) -> Tensor:
        if self.options.bits == ADAPTIVE:
            return unpack_mixed(packed, self._mix("in", way, layer), into)
        assert self.options.bits is not None
        return unpack(packed, int(self.options.bits), into)

    def _mix(self, end: str, way: str, layer: int) -> Mix:
        """The bits of the rows that leave or come next."""
        if (end, way, layer) not in self.mixes:
            sends, receives = self.exchanges[layer].rows(way)
            count = sends if end == "out" else receives
            self.mixes[end, way, layer] = Mix.even(count, self.rank.device)
        return self.mixes[end, way, layer]

    def _crossed(self, end: str, way: str, layer: int, packed: Tensor) -> None:
        """Rows have left or come: sender and receiver choose alike what comes after them."""
        exchange = self.exchanges[layer]
        peers = exchange.gives if (end == "out") == (way == "f") else exchange.take
        weights = self.weights[end, layer] if way == "f" else None
        self.mixes[end, way, layer] = self._mix(end, way, layer).after(packed, peers, weights)

    def _stale(self, layer: int, way: str) -> Tensor | None:
        """What was sent one step ago and is used in this one; None in the first step."""
        arrival = self.pending.pop((way, layer), None)
        return None if arrival is None else arrival.result()

    def _send_for_next(
        self, step: int, layer: int, way: str, rows: Tensor, used: Tensor | None
    ) -> None:
        """Send rows on the comm lane, for the next step to use.

        used: what this step uses, from the exchange one step ago. That exchange is over, however
        far the lane lags behind, so its buffers can be filled again, unless `used` is still needed.
        """
        exchange, key, width = self.exchanges[layer], (way, layer), rows.shape[1]
        sends, receives = exchange.rows(way)
        if key not in self.leaving:
            self.leaving[key] = rows.new_empty(sends, width)
        leaving = (
            exchange.pack(rows, self.leaving[key]) if way == "f" else self.leaving[key].copy_(rows)
        )
        if self._smooths(way):
            into: Tensor | None = self.arriving[: receives * width].view(receives, width)
        else:
            into = None if self.rank.staleness_errors else used
        swap = self._halo(step, layer, way, leaving, into=into, packed=True)
        self.pending[key] = self.rank.submit(
            "comm", lambda: self._smoothed(way, layer, swap(), used)
        )

    def _smoothed(self, way: str, layer: int, received: Tensor, used: Tensor | None) -> Tensor:
        """What the next step uses: what was received, or its moving average.

        With smoothing s_t = gamma s_{t-1} + (1 - gamma) v_t, where v_t is `received` and s_{t-1} is
        what this step has `used`. s_t takes the place of s_{t-1}.
        """
        if self.rank.staleness_errors:
            gap = received if used is None else used - received
            squares = float(gap.double().square().sum()), float(received.double().square().sum())
            self.errors.setdefault(f"{way}:l{layer}", []).append(squares)
        if not self._smooths(way):
            return received
        return received * (1 - self.gamma) if used is None else used.lerp_(received, 1 - self.gamma)

    def _sum(self, label: Label, flat: Tensor) -> None:
        """Sum over ranks, behind the gradients that are being summed."""
        if self.learner is not None and self.learner.under_way:
            begin_all_reduce(self.rank, label, flat, self.reduce_group).result()
        else:
            all_reduce(self.rank, label, flat, self.reduce_group)

    def _complete(self, step: int, layer: int) -> None:
        """The backward pass of a layer (0: of the encoder) is done."""
        if self.learner is not None:
            self.learner.complete(step, layer)

    def _moments(self, step: int, layer: int, entered: _Step) -> None:
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

    def _moments_home(self, step: int, layer: int, entered: _Step, gradient: Tensor) -> None:
        """Add to the gradient of own rows what they get through the moments."""
        if entered.moments is not None:
            self._sum(Label("moments", step, "b", layer), entered.moments.gradient)
            rows = self._counted(entered.leaf)
            entered.moments.add_home(rows, gradient[: len(rows)])

    def _layer(self, step: int, layer: int, entered: _Step) -> _Step:
        """Forward of one layer. Leaves h_l in `entered.out`, and returns the next layer's step."""
        halo, source, stale = None, None, self.options.staleness > 0 and self.training
        self._moments(step, layer, entered)
        meets = layer > self.shapes.first_varying and not self.silent[layer]
        if meets and self._packs:
            rows = self._outgoing(entered)
            source = self._room(layer, rows)
            self._exchange_packed(step, layer, "f", rows, source)
        elif meets and stale:
            halo = self._stale(layer, "f")
        elif meets:
            rows = self._outgoing(entered)
            source = self._room(layer, rows)
            # to write nothing behind own rows would still count as a change of them
            into = None if source is rows else source[rows.shape[0] :]
            self._halo(step, layer, "f", rows, into=into)()
        with self.rank.span(Label("forward", step, layer=layer), "compute"):
            x0 = self.x0[: self.blocks[layer].n_dst] if self.x0 is not None else None
            if layer <= self.shapes.first_varying:
                entered.segment = self._first_segment(step)
            else:
                entered.segment = self._segment(step, layer, entered, source, halo, x0)
                if meets and stale and not self._packs:
                    assert entered.source is not None
                    self._send_for_next(
                        step, layer, "f", entered.source.detach()[: entered.leaf.shape[0]], halo
                    )
            out = self._kept(entered.segment)
            entered.out = None if self.options.checkpoint else out
            if self.seen is not None and self.training:
                self.seen.rows[layer] = out.detach()
            if self.summed is not None:
                self.net.add(layer, self._own(out), self._drop_next(step, layer), self.summed)
                if layer == len(self.layers):
                    out = self.summed
            return self._enter(out, step, layer + 1)

    def _own(self, rows: Tensor) -> Tensor:
        """Those of a layer's rows that the loss is of."""
        return rows[: len(self.own_vertices)]

    def _drop_next(self, step: int, layer: int) -> Drop:
        """Dropout of own rows before the layer that follows."""
        return self._drop(step, layer + 1, self.own_vertices)

    def _first_segment(self, step: int) -> Callable[[], Tensor]:
        """Layer 1 on constant features."""
        net, relu, cached = self.net.layer(1), self.net.relu_after(1), self.cached
        x = cast(Tensor, self.features)  # sparse rows offer what layer 1 asks of a tensor
        if cached is not None:
            return lambda: net.update(cached, x, x, None, relu)
        if self._adds_up(2):
            block, drop = self.blocks[1], self._drop(step, 1, self.vertices[1])
            by_columns = cast(ColumnLayer, net)
            return lambda: partial_sums(by_columns, block, net.prepare(x, drop), keep)
        return lambda: net(self.blocks[1], x, self._drop(step, 1, self.vertices[1]), None, relu)

    def _adds_up(self, layer: int) -> bool:
        """Whether the layer's source rows come as partial sums, without bias and ReLU."""
        return layer in self.picks and self.picks[layer].adds

    def _room(self, layer: int, rows: Tensor) -> Tensor:
        """A buffer for own rows and halo [S, width]; the own rows if there are no others."""
        halo = self.exchanges[layer].rows("f")[1]
        return rows.new_empty(rows.shape[0] + halo, rows.shape[1]) if halo else rows

    def _segment(
        self,
        step: int,
        layer: int,
        entered: _Step,
        source: Tensor | None,
        halo: Tensor | None,
        x0: Tensor | None,
    ) -> Callable[[], Tensor]:
        """Lay out the layer's source rows, and return a function that computes h_l from them.

        source: their buffer if the halo is in its place already. halo: else the stale halo, if any.
        """
        net, block, relu = self.net.layer(layer), self.blocks[layer], self.net.relu_after(layer)
        rows = self._outgoing(entered)
        local, has_arrived = rows.shape[0], source is not None
        if source is None:
            source = self._room(layer, rows)
        if source.shape[0] > local:
            source[:local] = rows
            if not has_arrived:
                source[local:] = 0.0 if halo is None else halo
        if layer in self.picks:
            source = self.picks[layer].of_rows(source)
        source = entered.source = source.detach().requires_grad_(entered.leaf.requires_grad)
        drop = self._drop(step, layer, self.vertices[layer])
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
        self, step: int, layer: int, entered: _Step, above: _Step | None, home: Tensor | None
    ) -> Tensor | None:
        """Backward of one layer.

        home: what this returned for the layer above, or the gradient of h_L. Returns the gradient
        of this rank's rows of h_{l-1} as exchanged, complete with what peers send; None if these
        rows are constant.
        """
        assert entered.segment is not None and home is not None
        with self.rank.span(Label("backward", step, layer=layer), "compute"):
            gradient = self._through_projection(above, home)
            if self.seen is not None:
                self.seen.gradients[layer] = gradient
            out = entered.segment() if entered.out is None else entered.out
            if self.to_sum is not None:
                gradient = self._through_sum(step, layer, out, gradient, self.to_sum)
            backward([out], [gradient])
            del out
            entered.out = entered.segment = None
        self._complete(step, layer)
        if not entered.leaf.requires_grad:
            return None
        assert entered.source is not None and entered.source.grad is not None
        of_all = entered.source.grad
        if layer in self.picks:
            of_all = self.picks[layer].home(of_all)
            entered.source.grad = None
        local = of_all.shape[0] - self.exchanges[layer].rows("f")[1]
        gradient = of_all[:local]
        if not self.silent[layer]:
            far = of_all[local:]
            if self._packs:
                self._exchange_packed(step, layer, "b", far, gradient)
            elif self.options.staleness:
                used = self._stale(layer, "b")
                if used is not None:
                    self.exchanges[layer].add_home(gradient, used)
                self._send_for_next(step, layer, "b", far, used)
            else:
                self._halo(step, layer, "b", far, home=gradient)()
        self._moments_home(step, layer, entered, gradient)
        return gradient

    def _through_sum(
        self, step: int, layer: int, out: Tensor, gradient: Tensor, to_sum: Tensor
    ) -> Tensor:
        """The gradient of h_l by the layer above -> also by the sum of all layers' rows."""
        drop = self._drop_next(step, layer)
        by_sum = self.net.add_backward(layer, self._own(out), drop, to_sum)
        if layer == len(self.layers):
            return by_sum
        self._own(gradient).add_(by_sum)
        return gradient

    def _through_projection(self, above: _Step | None, gradient: Tensor) -> Tensor:
        """The gradient of what the layer above exchanged -> that of its input rows [local, H]."""
        if above is None:
            return gradient
        assert (
            above.projected is not None and above.own is not None and above.projection is not None
        )
        projected = above.projection() if self.options.checkpoint else above.projected
        if above.own.grad is None:  # the layer reads its own rows through the aggregate only
            backward([projected[0]], [gradient])
        else:
            backward(projected, (gradient, above.own.grad))
        above.projected = above.own = above.source = None
        assert above.leaf.grad is not None
        return above.leaf.grad

    def forward(self, step: int) -> tuple[list[_Step], Tensor | None]:
        """Forward of all layers.

        Returns what each keeps, last the decoder, whose leaf is h_L [own, H_L] or the sum of all
        layers' rows; and the encoder's output with its graph, if there is an encoder.
        """
        encoded, self.x0, self.summed = None, None, None
        if self.net.jump:
            own, dtype = len(self.own_vertices), dtype_of(self.problem.workload)
            self.summed = torch.zeros(own, self.net.jumped, dtype=dtype, device=self.rank.device)
        if self.net.encoder is None:
            entered = [_Step(torch.empty(0))]
        else:
            with self.rank.span(Label("encode", step, "f"), "compute"):
                drop = self._drop(step, 0, self.vertices[1][: self.features.shape[0]])
                encoded = self.net.encode(self.features, drop)
                self.x0 = (
                    encoded.detach().requires_grad_(self.training) if self.net.initial else None
                )
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
        self.training, self.scored = True, self.targets
        entered, encoded = self.forward(step)
        last, above = entered.pop(), None
        if self.ends_meet:
            last.leaf = self._fetch_ends(step, last.leaf)
        with self.rank.span(Label("loss", step), "compute"):
            drop = self._drop(step, len(self.layers) + 1, self.scored_vertices)
            moments = last.moments.values if last.moments else None
            logits = self.net.decode(last.leaf, drop, moments)
            loss = self.targets.loss(logits)
            loss.backward()  # type: ignore[no-untyped-call]
        loss, logits = loss.detach(), logits.detach()  # their graphs hold h_L
        gradient = last.leaf.grad
        assert gradient is not None
        if self.ends_meet:
            gradient = self._ends_home(step, gradient)
        self._moments_home(step, len(self.layers) + 1, last, gradient)
        self.to_sum, self.summed = gradient if self.net.jump else None, None
        del last
        for layer in reversed(self.layers):
            gradient = self._backward(step, layer, entered[-1], above, gradient)
            done = entered.pop()
            above = done if done.projected is not None else None
            del done  # and its rows
        if encoded is not None:
            with self.rank.span(Label("encode", step, "b"), "compute"):
                assert gradient is not None
                gradient = self._through_projection(above, gradient)
                backward([encoded], [gradient if self.x0 is None else gradient + self.x0.grad])
            self._complete(step, 0)
        self.to_sum = None
        return loss, logits

    def _fetch_ends(self, step: int, own: Tensor) -> Tensor:
        """Own rows of h_L, then those of other ranks at which this rank's pairs end, as a leaf."""
        rows = own.new_empty(len(self.scored_vertices), own.shape[1])
        rows[: own.shape[0]] = own.detach()
        layer = len(self.layers) + 1
        self._halo(step, layer, "f", own.detach(), into=rows[own.shape[0] :])()
        return rows.requires_grad_()

    def _ends_home(self, step: int, gradient: Tensor) -> Tensor:
        """The gradient of `_fetch_ends`'s rows -> that of own rows, with what peers send."""
        own = len(self.own_vertices)
        home = gradient[:own]
        self._halo(step, len(self.layers) + 1, "b", gradient[own:], home=home)()
        return home

    @torch.no_grad()
    def evaluate(self, step: int) -> Tensor:
        """Logits [own, C] without dropout and without staleness."""
        if self.evaluator is not None:
            whole = self.evaluator()
            self.scored = whole.targets
            return whole.evaluate(step)
        self.training = False
        drop = self._drop(step, len(self.layers) + 1, self.own_vertices)
        return self.net.decode(self.forward(step)[0][-1].leaf, drop)

    def counts(self, logits: Tensor) -> Tensor:
        return self.scored.counts(logits)

    def drain(self) -> None:
        """Wait for exchanges that are under way; what they bring stays for the next step."""
        for future in self.pending.values():
            future.result()

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint keeps: weights, the next step's stale rows, and adaptive bits."""
        return (
            self.trained()
            | {
                f"stale.{way}.{layer}": future.result()
                for (way, layer), future in self.pending.items()
            }
            | {
                f"bits.{end}.{way}.{layer}.{mix.left}": mix.bits
                for (end, way, layer), mix in self.mixes.items()
            }
        )

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Go on from another process's state."""
        fill(self.trained(), state)
        for name, tensor in state.items():
            if name.startswith("stale."):
                way, layer = name.split(".")[1], int(name.split(".")[2])
                self.pending[way, layer] = there(tensor.to(self.rank.device, copy=True))
            elif name.startswith("bits."):
                _, end, way, of_layer, left = name.split(".")
                bits = tensor.to(self.rank.device, copy=True)
                self.mixes[end, way, int(of_layer)] = Mix(bits, int(left))

    def refill(self, step: int) -> None:
        """Repeat a step until its stale rows are those of the weights.

        A pass makes the rows right that one more layer reads, forward and then backward. A moving
        average begins with the last pass's rows: with what came before it would be a share of them.
        """
        if not self.options.staleness:
            return
        learner, self.learner = self.learner, None  # the passes' gradients are of no use
        gamma, self.gamma = self.gamma, 0.0
        weights = {name: tensor.clone() for name, tensor in self.trained().items()}
        for _ in range(2 * len(self.layers)):
            self.step(step)
            self.drain()
        fill(self.trained(), weights)  # batch norm's averages have moved
        self.learner, self.gamma = learner, gamma


def targets_of(
    problem: Problem, share: Share, device: torch.device, total: float | None = None
) -> Targets | LinkTargets:
    """What the loss of a share's rows is of: their labels, or pairs of them.

    total: what it is the mean over (Targets, LinkTargets); None: all training vertices.
    """
    if share.ends is not None:
        rows = share.own.size + share.ends.away.size
        return LinkTargets(share.ends.pairs, rows, share.total)
    assert problem.graph is not None
    return Targets(problem.graph, share.own, problem.workload, device, total)


def open_worker(rank: Rank, problem: Problem, strategy: GraphParallel, first: int) -> Worker:
    """This rank's part of the strategy."""
    layout = problem.layout()
    assert isinstance(layout, Layout)
    make = trimmed_worker_on if strategy.trim else worker_on
    return make(rank, problem, layout, strategy.exchange_options, strategy.gamma)


def worker_on(
    rank: Rank,
    problem: Problem,
    layout: Layout,
    options: ExchangeOptions,
    gamma: float = 0.0,
    degrees: str = "global",
    net: Net | None = None,
) -> Worker:
    """A worker on the full graph, with its features.

    degrees: of the whole graph ('global') or of the rank's layout ('local'). net: weights that it
    shares with another worker.
    """
    net = net or net_of(problem.model, problem.workload).to(rank.device)
    worker = _worker(rank, problem, layout, options, gamma, degrees, net)
    worker.keep(constant_rows(rank, problem, layout))
    return worker


def trimmed_worker_on(
    rank: Rank,
    problem: Problem,
    layout: Layout,
    options: ExchangeOptions,
    gamma: float = 0.0,
    degrees: str = "global",
) -> Worker:
    """A worker on those rows of a layout that training vertices need.

    It evaluates on the whole layout, whose edges are made for each evaluation.
    """
    net, trimmed = net_of(problem.model, problem.workload).to(rank.device), problem.trimmed(layout)
    assert isinstance(trimmed, Layout)
    kept = ConstantRows(rank, problem, layout, net, degrees)

    def on(rows: Layout, options: ExchangeOptions) -> Worker:
        worker = _worker(rank, problem, rows, options, gamma, degrees, net)
        worker.features, worker.cached = kept.on_device(kept.of(rows))
        return worker

    worker = on(trimmed, options)
    worker.evaluator = lambda: on(layout, replace(options, staleness=0, smoothing="", bits=None))
    return worker


def _worker(
    rank: Rank,
    problem: Problem,
    layout: Layout,
    options: ExchangeOptions,
    gamma: float,
    degrees: str,
    net: Net,
) -> Worker:
    """A worker on a layout, without features."""
    share = whole_share(rank, problem, layout, net, degrees)
    worker = Worker(rank, problem, share, options, net, gamma)
    if options.bits == ADAPTIVE:
        worker.weights = variance_weights(worker, layout)
    return worker


def whole_share(rank: Rank, problem: Problem, layout: Layout, net: Net, degrees: str) -> Share:
    """This rank's share of a layout."""
    edges = [net.layer(layer).edges for layer in range(1, problem.workload.layers + 1)]
    return share_of(
        layout,
        rank.rank,
        edges,
        problem.workload,
        layout.degrees(rank.rank) if degrees == "local" else None,
    )


def variance_weights(worker: Worker, layout: Layout) -> dict[tuple[str, int], Tensor]:
    """How much the rounding of each row that crosses counts, float32, by end and layer.

    It is the sum of squares of what its readers multiply the row by. Sender and reader both count
    it, from the reader's edges, so that nothing crosses.
    """
    rank, ranks, found = worker.rank, range(layout.ranks), {}
    device, alike = rank.device, {}
    for layer in worker.layers:
        edges = worker.net.layer(layer).edges
        if layer <= worker.shapes.first_varying or worker.silent[layer]:
            continue
        if (kind := (layout.kind(layer), edges)) not in alike:
            pieces = [_squares(worker.problem, layout, reader, layer, edges) for reader in ranks]
            out = np.concatenate([by_sender[rank.rank] for by_sender in pieces])
            alike[kind] = out, np.concatenate(pieces[rank.rank])
        for end, weights in zip(("out", "in"), alike[kind], strict=True):
            found[end, layer] = torch.from_numpy(weights).to(device)
    return found


def _squares(
    problem: Problem, layout: Layout, reader: int, layer: int, edges: str
) -> list[np.ndarray]:
    """Of a reader's halo before a layer, by sender: sums of squared edge weights."""
    piece, rows = layout.piece(reader, layer), layout.rows(reader, layer)
    source = np.concatenate([layout.rows(reader, layer - 1), piece.halo])
    graph, csr = layout.graph, layout.block(reader, layer)
    block = weighted_block(graph, edges, rows, source, *csr, problem.workload)
    weight = np.ones(block.edges) if block.weight is None else block.weight.double().numpy()
    sums = np.bincount(block.indices.numpy(), weight**2, minlength=source.size)
    squares = sums.astype(np.float32)  # rows that count alike do so whatever the order of sums
    return np.split(squares[piece.local :], np.cumsum(piece.received)[:-1])
