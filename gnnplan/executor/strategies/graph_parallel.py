"""Graph parallel for real: layer after layer over a Layout, halo rows exchanged before each (GraNNDis: a deeper Layout).

Every layer is a segment of its own: its inputs are leaves, its backward is called by hand, and between segments stand
the exchanges under the schedule's names (planner/strategies/layerwise.py). Staleness 1 uses what was received one step
ago and sends on the comm lane's thread, from and into buffers that stay: memory does not depend on how far the lane lags behind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import InitVar, dataclass, field
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from gnnplan.executor.checkpoint import Resumable, fill
from gnnplan.executor.comm import Exchange, all_reduce
from gnnplan.executor.data import Targets, dtype_of, features, lengths_of, sparse_features
from gnnplan.executor.kernels import Rows, SparseRows, backward, dropout
from gnnplan.executor.models import BatchNorm, Drop, Net
from gnnplan.executor.share import Share, share_of
from gnnplan.executor.worker import Rank, there
from gnnplan.planner.job import Job
from gnnplan.planner.layout import Layout
from gnnplan.planner.schedule import Label
from gnnplan.planner.strategies.layerwise import Manner

T = TypeVar("T")


@dataclass
class _Step:
    """What a layer's forward keeps for its backward."""

    leaf: Tensor  # the layer's own input rows [local, H_{l-1}]; empty where these are constant
    projection: Callable[[], tuple[Tensor, Tensor]] | None = None  # narrow: computes `projected`
    projected: tuple[Tensor, Tensor] | None = None  # narrow: own projected rows and own prepared rows
    source: Tensor | None = None  # leaf: all source rows [S, width]; None where the aggregate is cached
    own: Tensor | None = None  # narrow: leaf, destinations' prepared rows
    segment: Callable[[], Tensor] | None = None  # computes `out`
    out: Tensor | None = None  # None where backward computes it again (checkpoint)
    sums: Tensor | None = None  # batch norm: of own rows [2, H_{l-1}]
    moments: Tensor | None = None  # leaf: of all ranks' rows [2, H_{l-1}]


@dataclass
class Worker(Resumable):
    """Runs the steps of one rank."""

    rank: Rank
    job: Job
    share: InitVar[Share]
    how: Manner
    net: Net
    gamma: float = 0.0
    batch: int | None = None  # training vertices of all ranks where the share is of a batch
    pending: dict[tuple[str, int], Future[Tensor]] = field(default_factory=dict)
    leaving: dict[tuple[str, int], Tensor] = field(default_factory=dict)  # stale: rows and halo gradients on their way, by way and layer
    errors: dict[str, list[tuple[float, float]]] = field(default_factory=dict)  # 'f:l2' -> per step ||used - true||^2 and ||true||^2

    @property
    def reduce_group(self) -> tuple[int, ...]:
        return tuple(range(self.rank.world))

    def __post_init__(self, share: Share) -> None:
        job, device = self.job, self.rank.device
        assert job.graph is not None
        self.shapes = job.model
        self.layers = range(1, len(share.parts) + 1)
        self.exchanges: dict[int, Exchange] = {}
        self.silent: dict[int, bool] = {}  # nobody sends anything before this layer
        self.blocks, self.vertices = {}, {}
        made: dict[int, int] = {}  # layers with the same part
        for layer, part in zip(self.layers, share.parts, strict=True):
            twin = made.setdefault(id(part), layer)
            if twin == layer:
                self.exchanges[layer] = Exchange(self.rank, part.give, part.take)
                self.vertices[layer], self.blocks[layer] = torch.from_numpy(part.source).to(device), part.block.to(device)
            else:
                self.exchanges[layer], self.vertices[layer], self.blocks[layer] = (
                    kept[twin] for kept in (self.exchanges, self.vertices, self.blocks)
                )
            self.silent[layer] = not part.meets
        self.own_vertices = torch.from_numpy(share.own).to(device)
        self.vertices_in_all = share.everyone
        self.targets = Targets(job.graph, share.own, job.workload, device, self.batch)
        self.comes = torch.empty(self._to_smooth(), dtype=dtype_of(job.workload), device=device)
        self.features: Tensor | SparseRows = torch.empty(0)  # what layer 1, or the encoder, reads
        self.cached: Tensor | None = None

    def _to_smooth(self) -> int:
        """Numbers of the buffer that the comm lane receives in what is then smoothed, one exchange after the other."""
        most = 0
        for layer in range(self.shapes.first_varying + 1, len(self.layers) + 1) if self.how.staleness else ():
            rows = [self.exchanges[layer].rows(way)[1] for way in "fb" if self._smooths(way)]
            most = max(most, *(count * self.shapes.exchanged_width(layer, self.how.narrow) for count in rows), 0)
        return most

    def _smooths(self, way: str) -> bool:
        return ("f" if way == "f" else "g") in self.how.smoothing

    def keep(self, features: Tensor | SparseRows) -> None:
        """Features that stay, or layer 1's aggregate of them."""
        self.features = features
        if self.shapes.aggregate_cached(1):
            assert isinstance(self.features, Tensor)
            self.cached = self.net.layer(1).gather(self.blocks[1], self.features)
            reads_own = self.job.workload.model == "sage"
            self.features = self.features[: self.blocks[1].n_dst if reads_own else 0].clone()

    # -- one step ----------------------------------------------------------------------------------------------------

    def _drop(self, step: int, layer: int, vertices: Tensor) -> Drop:
        """Dropout of rows of `vertices` [S] before the layer (0: encoder, L + 1: decoder)."""
        p = self.job.workload.dropout if self.training else 0.0
        return lambda rows: dropout(rows, self.job.workload.seed, step, layer, vertices, p)

    def _is_narrow(self, layer: int) -> bool:
        return self.how.narrow and self.shapes.narrow_at(layer)

    def _enter(self, h: Tensor, step: int, layer: int) -> _Step:
        """h_{l-1} [local, H_{l-1}] becomes the layer's leaf (L + 1: the decoder's); narrow layers multiply before the exchange."""
        leaf = h.detach().requires_grad_(self.training and layer > self.shapes.first_varying)
        if not self._is_narrow(layer):
            norm = self.net.batch_norm(layer) if self.training else None
            return _Step(leaf, sums=norm.sums(leaf[: len(self.own_vertices)]) if norm else None)
        net, drop = self.net.layer(layer), self._drop(step, layer, self.vertices[layer][: leaf.shape[0]])

        def projection() -> tuple[Tensor, Tensor]:
            rows = net.prepare(leaf, drop)
            return net.project(rows), rows[: self.blocks[layer].n_dst]

        return _Step(leaf, projection, self._kept(projection))

    def _kept(self, compute: Callable[[], T]) -> T:
        """What `compute` gives, with the graph that its backward needs; without it where that is computed again (checkpoint)."""
        with torch.set_grad_enabled(self.training and not self.how.checkpoint):
            return compute()

    def _outgoing(self, entered: _Step) -> Tensor:
        return (entered.leaf if entered.projected is None else entered.projected[0]).detach()

    def _halo(self, step: int, layer: int, way: str, rows: Tensor, home: Tensor | None = None, into: Tensor | None = None,
              packed: bool = False) -> Callable[[], Tensor]:  # fmt: skip
        """What sends this rank's rows ('f': all of them, or `packed` for peers) and receives others'; gradients ('b') are added to `home`.
        `into`: the buffer that they fill."""
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

    def _stale(self, layer: int, way: str) -> Tensor | None:
        """What has arrived for this step, sent one step ago; None before anything has."""
        before = self.pending.pop((way, layer), None)
        return None if before is None else before.result()

    def _send_for_next(self, step: int, layer: int, way: str, rows: Tensor, used: Tensor | None) -> None:
        """On its own lane, however far that lags behind: this layer's last ones have left, for what they brought has been `used`, and made
        room. So is there room for what comes, unless that is still needed."""
        exchange, key, width = self.exchanges[layer], (way, layer), rows.shape[1]
        sends, receives = exchange.rows(way)
        if key not in self.leaving:
            self.leaving[key] = rows.new_empty(sends, width)
        leaving = exchange.pack(rows, self.leaving[key]) if way == "f" else self.leaving[key].copy_(rows)
        if self._smooths(way):
            into: Tensor | None = self.comes[: receives * width].view(receives, width)
        else:
            into = None if self.rank.staleness_errors else used
        swap = self._halo(step, layer, way, leaving, into=into, packed=True)
        self.pending[key] = self.rank.submit("comm", lambda: self._smoothed(way, layer, swap(), used))

    def _smoothed(self, way: str, layer: int, received: Tensor, used: Tensor | None) -> Tensor:
        """What the next step uses for what this step has `received`, v_t: s_t = gamma s_{t-1} + (1 - gamma) v_t in the place of s_{t-1},
        which this step has `used`, or v_t itself."""
        if self.rank.staleness_errors:
            gap = received if used is None else used - received
            squares = float(gap.double().square().sum()), float(received.double().square().sum())
            self.errors.setdefault(f"{way}:l{layer}", []).append(squares)
        if not self._smooths(way):
            return received
        return received * (1 - self.gamma) if used is None else used.lerp_(received, 1 - self.gamma)

    def _moments(self, step: int, layer: int, entered: _Step) -> None:
        """Batch norm's moments of h_{l-1}: each vertex counts once, at its owner."""
        norm = self.net.batch_norm(layer)
        if entered.sums is not None and norm is not None:
            all_reduce(self.rank, Label("moments", step, "f", layer), entered.sums, self.reduce_group)
            entered.moments = norm.moments(entered.sums, self.vertices_in_all).requires_grad_()

    def _moments_home(self, step: int, layer: int, entered: _Step, gradient: Tensor) -> None:
        """What own rows get as their share in the moments, added to their `gradient`."""
        if entered.moments is None:
            return
        total, own = entered.moments.grad, len(self.own_vertices)
        assert total is not None
        all_reduce(self.rank, Label("moments", step, "b", layer), total, self.reduce_group)
        gradient[:own] += BatchNorm.home(entered.leaf[:own], entered.moments, total, self.vertices_in_all)

    def _layer(self, step: int, layer: int, entered: _Step) -> _Step:
        """Forward of one layer; the next one's entry. `entered.out` is h_l with its segment's graph."""
        halo, source, stale = None, None, self.how.staleness > 0 and self.training
        self._moments(step, layer, entered)
        meets = layer > self.shapes.first_varying and not self.silent[layer]
        if meets and stale:
            halo = self._stale(layer, "f")
        elif meets:
            rows = self._outgoing(entered)
            source = self._room(layer, rows)
            self._halo(step, layer, "f", rows, into=source[rows.shape[0] :])()
        with self.rank.span(Label("forward", step, layer=layer), "compute"):
            x0 = self.x0[: self.blocks[layer].n_dst] if self.x0 is not None else None
            if layer <= self.shapes.first_varying:
                entered.segment = self._first_segment(step)
            else:
                entered.segment = self._segment(step, layer, entered, source, halo, x0)
                if meets and stale:
                    assert entered.source is not None
                    self._send_for_next(step, layer, "f", entered.source.detach()[: entered.leaf.shape[0]], halo)
            out = self._kept(entered.segment)
            entered.out = None if self.how.checkpoint else out
            return self._enter(out, step, layer + 1)

    def _first_segment(self, step: int) -> Callable[[], Tensor]:
        """Layer 1 on constant features."""
        net, relu, cached, x = self.net.layer(1), self.net.relu_after(1), self.cached, self.features
        if cached is not None:
            return lambda: net.update(cached, x, x, None, relu)
        return lambda: net(self.blocks[1], x, self._drop(step, 1, self.vertices[1]), None, relu)

    def _room(self, layer: int, rows: Tensor) -> Tensor:
        """For all source rows of the layer [S, width], whose own are `rows`; these themselves where there are no others."""
        return rows if self.blocks[layer].n_src == rows.shape[0] else rows.new_empty(self.blocks[layer].n_src, rows.shape[1])

    def _segment(self, step: int, layer: int, entered: _Step, source: Tensor | None, halo: Tensor | None, x0: Tensor | None
                 ) -> Callable[[], Tensor]:  # fmt: skip
        """Lays out the layer's source rows, in `source` where the halo is in its place already; what it returns computes h_l from them."""
        net, block, relu = self.net.layer(layer), self.blocks[layer], self.net.relu_after(layer)
        rows = self._outgoing(entered)
        local, arrived = rows.shape[0], source is not None
        if source is None:
            source = self._room(layer, rows)
        if source.shape[0] > local:
            source[:local] = rows
            if not arrived:
                source[local:] = 0.0 if halo is None else halo
        source = entered.source = source.detach().requires_grad_(entered.leaf.requires_grad)
        if entered.projected is not None:
            own = entered.own = entered.projected[1].detach().requires_grad_(self.training)
            if self.how.checkpoint:
                entered.projected = entered.projected[0][:0], own  # computed again when its turn comes
            return lambda: net.update(net.gather(block, source), own, own, x0, relu)
        moments, drop = entered.moments, self._drop(step, layer, self.vertices[layer])
        entered.leaf = source.detach()[:local].requires_grad_(source.requires_grad)  # one copy of the rows is enough
        return lambda: net(block, source, drop, x0, relu, moments)

    def _backward(self, step: int, layer: int, entered: _Step, above: _Step | None, home: Tensor | None) -> Tensor | None:
        """Backward of one layer -> gradient of this rank's rows of h_{l-1} as exchanged, complete with what peers send home.
        `home` is that of the layer above (or of h_L)."""
        assert entered.segment is not None and home is not None
        with self.rank.span(Label("backward", step, layer=layer), "compute"):
            gradient = self._through_projection(above, home)
            backward([entered.segment() if entered.out is None else entered.out], [gradient])
            entered.out = entered.segment = None
        if not entered.leaf.requires_grad:
            return None
        assert entered.source is not None and entered.source.grad is not None
        local = entered.leaf.shape[0]
        gradient = entered.source.grad[:local]
        if not self.silent[layer]:
            far = entered.source.grad[local:]
            if self.how.staleness:
                used = self._stale(layer, "b")
                if used is not None:
                    self.exchanges[layer].add_home(gradient, used)
                self._send_for_next(step, layer, "b", far, used)
            else:
                self._halo(step, layer, "b", far, home=gradient)()
        self._moments_home(step, layer, entered, gradient)
        return gradient

    def _through_projection(self, above: _Step | None, gradient: Tensor) -> Tensor:
        """The gradient of what the layer above exchanged -> that of its input rows [local, H]."""
        if above is None:
            return gradient
        assert above.projected is not None and above.own is not None and above.projection is not None
        projected = above.projection() if self.how.checkpoint else above.projected
        if above.own.grad is None:  # the layer does not read its own rows but through the aggregate
            backward([projected[0]], [gradient])
        else:
            backward(projected, (gradient, above.own.grad))
        above.projected = above.own = above.source = None
        assert above.leaf.grad is not None
        return above.leaf.grad

    def forward(self, step: int) -> tuple[list[_Step], Tensor | None]:
        """All layers: what each keeps, last the decoder, whose leaf is h_L [own, H_L]; and the encoder's output with its graph."""
        encoded, self.x0 = None, None
        if self.net.encoder is None:
            entered = [_Step(torch.empty(0))]
        else:
            with self.rank.span(Label("encode", step, "f"), "compute"):
                drop = self._drop(step, 0, self.vertices[1][: self.features.shape[0]])
                encoded = self.net.encode(self.features, drop)
                self.x0 = encoded.detach().requires_grad_(self.training) if self.net.initial else None
                entered = [self._enter(encoded, step, 1)]
        for layer in self.layers:
            following = self._layer(step, layer, entered[-1])
            if not self.training:
                entered.clear()
            entered.append(following)
        self._moments(step, len(self.layers) + 1, entered[-1])
        return entered, encoded

    def step(self, step: int) -> tuple[Tensor, Tensor]:
        """Forward and backward of a training step: (this rank's part of the loss, logits [own, C]). Gradients are summed
        into the parameters' .grad."""
        self.training = True
        entered, encoded = self.forward(step)
        last, above = entered.pop(), None
        with self.rank.span(Label("loss", step), "compute"):
            logits = self.net.decode(last.leaf, self._drop(step, len(self.layers) + 1, self.own_vertices), last.moments)
            loss = self.targets.loss(logits)
            loss.backward()
        loss, logits = loss.detach(), logits.detach()  # nothing holds on to h_L
        gradient = last.leaf.grad
        assert gradient is not None
        self._moments_home(step, len(self.layers) + 1, last, gradient)
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
        return loss, logits

    @torch.no_grad()
    def evaluate(self, step: int) -> Tensor:
        """Logits [own, C] without dropout and without staleness."""
        self.training = False
        return self.net.decode(self.forward(step)[0][-1].leaf)

    def counts(self, logits: Tensor) -> Tensor:
        return self.targets.counts(logits)

    def drain(self) -> None:
        """Wait for exchanges still under way; what they bring stays for the next step."""
        for future in self.pending.values():
            future.result()

    def state(self) -> dict[str, Tensor]:
        """Weights, and where rows are stale those that the next step uses."""
        return super().state() | {f"stale.{way}.{layer}": future.result() for (way, layer), future in self.pending.items()}

    def load(self, state: Mapping[str, Tensor]) -> None:
        fill(super().state(), state)
        for name, tensor in state.items():
            if name.startswith("stale."):
                way, layer = name.split(".")[1], int(name.split(".")[2])
                self.pending[way, layer] = there(tensor.to(self.rank.device, copy=True))


def open_worker(rank: Rank, job: Job, layout: Layout, how: Manner, gamma: float = 0.0, degrees: str = "global", net: Net | None = None
                ) -> Worker:  # fmt: skip
    """On the full graph, features in place. `net`: another Worker's weights."""
    net = net or Net(job.model, job.workload).to(rank.device)
    worker = Worker(rank, job, whole_share(rank, job, layout, net, degrees), how, net, gamma)
    worker.keep(constant_rows(rank, job, layout))
    return worker


def whole_share(rank: Rank, job: Job, layout: Layout, net: Net, degrees: str) -> Share:
    edges = [net.layer(layer).edges for layer in range(1, job.workload.layers + 1)]
    return share_of(layout, rank.rank, edges, job.workload, layout.degrees(rank.rank) if degrees == "local" else None)


def constant_rows(rank: Rank, job: Job, layout: Layout) -> Tensor | SparseRows:
    """Features of all rows this rank computes (preload) and, where they are what layer 1 reads, of its halo: [S, F]. Set-up."""
    me = rank.rank
    assert job.graph is not None

    def swap(op: str, exchange: Exchange, rows: Rows, ids: np.ndarray) -> Rows:
        """The rows that come, whose global ids are known."""
        label, packed = Label(op, -1), exchange.pack(rows)
        with rank.span(label, "comm", rank.count(label, packed.nbytes)):
            return exchange.forward(packed) if isinstance(packed, Tensor) else exchange.forward_sparse(packed, lengths_of(job.graph, ids))

    own, local = layout.own(me).size, layout.rows(me, 0).size
    piece, reads_halo = layout.piece(me, 1), job.model.first_varying == 1 and bool(layout.facts(1).sends.any())
    if job.model.nonzeros:
        parts = [sparse_features(job.graph, layout.own(me), job.workload, rank.device)]
        if layout.preloaded().any():
            give, take, order = _preload(layout, me)
            received = swap("preload", Exchange(rank, give, take), parts[0], layout.rows(me, 0)[own:][order])
            parts.append(received.index_select(0, torch.from_numpy(np.argsort(order)).to(rank.device)))
        if reads_halo:
            exchange = Exchange(rank, layout.sent(me, 1), piece.received)
            parts.append(swap("input_halo", exchange, SparseRows.cat(parts), piece.halo))
        return SparseRows.cat(parts)
    x = features(job.graph, layout.own(me), job.workload, rank.device, local - own + (piece.halo.size if reads_halo else 0))
    if layout.preloaded().any():
        give, take, order = _preload(layout, me)
        x[own + torch.from_numpy(order).to(x.device)] = swap("preload", Exchange(rank, give, take), x, layout.rows(me, 0)[own:][order])
    if reads_halo:
        x[local:] = swap("input_halo", Exchange(rank, layout.sent(me, 1), piece.received), x, piece.halo)
    return x


def _preload(layout: Layout, me: int) -> tuple[list[np.ndarray], np.ndarray, np.ndarray]:
    """Set-up exchange: positions of my own rows that each peer computes too, rows I get by owner, and where in my external
    rows each received one belongs."""
    give = []
    place = np.full(layout.graph.stats.vertices, -1, dtype=np.int64)
    place[layout.own(me)] = np.arange(layout.own(me).size)
    for peer in range(layout.ranks):
        wanted = layout.rows(peer, 0)[layout.own(peer).size :]
        wanted = wanted[np.argsort(layout.owner[wanted], kind="stable")]
        mine = wanted[layout.owner[wanted] == me]
        give.append(place[mine])
    external = layout.rows(me, 0)[layout.own(me).size :]
    owner = layout.owner[external]
    return give, np.bincount(owner, minlength=layout.ranks), np.argsort(owner, kind="stable")
