"""The halo: rows of other ranks that a layer reads, and their gradients' way home.

    what a layer reads [S, H]    own rows | halo, by sender    rows come from their owners
    its gradient       [S, H]    own rows | halo               the halo's goes to them, who add it

What a step reads was sent in the same step (`Halo`), or one step before (`StaleHalo`), beside
computation on the comm lane. That lane reads and fills buffers that stay: memory does not depend on
how far it lags behind. In a `QuantizedHalo` either of the two crosses in few bits per number, and
in an `AdaptiveHalo` each row has its own. An exchange is counted when its step comes to it, and
recorded under the schedule's label.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gnnplan.executor.layers.blocks import dtype_of
from gnnplan.executor.layers.kernels import Mix, pack, pack_mixed, unpack, unpack_mixed
from gnnplan.executor.ranks.comm import Exchange
from gnnplan.executor.ranks.rank import Rank, there
from gnnplan.planner.gnn.few_bits import ADAPTIVE
from gnnplan.planner.graph.streams import ROUNDING
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies.layerwise.step import ExchangeOptions
from gnnplan.planner.vocabulary.schedule import Label

_Key = tuple[str, int]  # way ('f': rows, 'b': gradients) and layer
RowWeights = Mapping[tuple[str, int], Tensor]  # of rows that leave ('out') or come ('in'), by layer


@dataclass
class Halo:
    """Rows cross as they are, in the step that reads them."""

    rank: Rank
    exchanges: Mapping[int, Exchange]  # by layer; a layer that has none reads own rows only
    gamma: float = field(default=0.0, init=False)  # weight of a moving average
    # of stale exchanges: what the next step uses
    pending: dict[_Key, Future[Tensor]] = field(default_factory=dict, init=False)
    # 'f:l2' -> per step ||used - true||^2 and ||true||^2
    errors: dict[str, list[tuple[float, float]]] = field(default_factory=dict, init=False)

    def rows(self, step: int, layer: int, rows: Tensor) -> Callable[[], Tensor]:
        """Exchange rows [local, H] before a layer -> a function that lays out what it reads."""
        return self._fetch(step, layer, rows) if layer in self.exchanges else lambda: rows

    def home(self, step: int, layer: int, gradient: Tensor) -> Tensor:
        """The gradient of what a layer read -> that of own rows, with what other readers send."""
        if layer not in self.exchanges:
            return gradient
        local = len(gradient) - self.exchanges[layer].rows("f")[1]
        own, halo = gradient[:local], gradient[local:]
        self._send_home(step, layer, own, halo)
        return own

    def _fetch(self, step: int, layer: int, rows: Tensor) -> Callable[[], Tensor]:
        source, exchange = self._room(layer, rows), self.exchanges[layer]
        # to write nothing behind own rows would still count as a change of them
        into = None if source is rows else source[len(rows) :]
        with self._recorded(step, layer, "f", rows):
            exchange.forward(exchange.pack(rows), into)
        return lambda: _with_own(source, rows)

    def _send_home(self, step: int, layer: int, own: Tensor, halo: Tensor) -> None:
        exchange = self.exchanges[layer]
        with self._recorded(step, layer, "b", halo):
            exchange.add_home(own, exchange.backward(halo))

    def _room(self, layer: int, rows: Tensor) -> Tensor:
        """A buffer for own rows and halo [S, H]; the own rows if there are no others."""
        halo = self.exchanges[layer].rows("f")[1]
        return rows.new_empty(len(rows) + halo, rows.shape[1]) if halo else rows

    def _recorded(
        self, step: int, layer: int, way: str, rows: Tensor
    ) -> AbstractContextManager[None]:
        """The span of an exchange of such rows, whose bytes are counted now."""
        label, exchange = Label("halo", step, way, layer), self.exchanges[layer]
        nbytes = self.rank.count(label, exchange.nbytes(rows.shape[1], rows.element_size(), way))
        return self.rank.span(label, "comm", nbytes)

    def _crossing(
        self, step: int, layer: int, way: str, leaving: Tensor, into: Tensor | None = None
    ) -> Callable[[], Tensor]:
        """A function that sends packed rows or gradients, and returns those that come."""
        exchange, recorded = self.exchanges[layer], self._recorded(step, layer, way, leaving)

        def cross() -> Tensor:
            with recorded:
                return (exchange.forward if way == "f" else exchange.backward)(leaving, into)

        return cross

    def _arrived(self, way: str, layer: int) -> Tensor | None:
        """What was sent one step ago and is used in this one; None in the first step."""
        arrival = self.pending.pop((way, layer), None)
        return None if arrival is None else arrival.result()

    def drain(self) -> None:
        """Wait for exchanges that are under way; what they bring stays for the next step."""
        for future in self.pending.values():
            future.result()

    def state(self) -> dict[str, Tensor]:
        """What the next step goes on from, by name."""
        return {
            f"stale.{way}.{layer}": future.result() for (way, layer), future in self.pending.items()
        }

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Go on from another process's state."""
        for name, tensor in state.items():
            if name.startswith("stale."):
                _, way, layer = name.split(".")
                self.pending[way, int(layer)] = there(tensor.to(self.rank.device, copy=True))


@dataclass
class StaleHalo(Halo):
    """Rows cross as they are and are used one step later, or a moving average of them."""

    smoothed: str  # ways of which averages are used
    arriving: Tensor  # buffer for what is received and then smoothed, one exchange after the other
    leaving: dict[_Key, Tensor] = field(default_factory=dict, init=False)  # buffers

    def _fetch(self, step: int, layer: int, rows: Tensor) -> Callable[[], Tensor]:
        used = self._arrived("f", layer)

        def lay_out() -> Tensor:
            source = _with_own(self._room(layer, rows), rows)
            if source is not rows:
                source[len(rows) :] = 0.0 if used is None else used
            self._send_for_next(step, layer, "f", rows, used)
            return source

        return lay_out

    def _send_home(self, step: int, layer: int, own: Tensor, halo: Tensor) -> None:
        used = self._arrived("b", layer)
        if used is not None:
            self.exchanges[layer].add_home(own, used)
        self._send_for_next(step, layer, "b", halo, used)

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
        leaving = self.leaving[key]
        leaving = exchange.pack(rows, leaving) if way == "f" else leaving.copy_(rows)
        into = None if self.rank.staleness_errors else used
        if way in self.smoothed:
            into = self.arriving[: receives * width].view(receives, width)
        cross = self._crossing(step, layer, way, leaving, into)
        self.pending[key] = self.rank.submit("comm", lambda: self._next(way, layer, cross(), used))

    def _next(self, way: str, layer: int, received: Tensor, used: Tensor | None) -> Tensor:
        """What the next step uses: what was received, or its moving average.

        With smoothing s_t = gamma s_{t-1} + (1 - gamma) v_t, where v_t is `received` and s_{t-1} is
        what this step has `used`. s_t takes the place of s_{t-1}.
        """
        if self.rank.staleness_errors:
            gap = received if used is None else used - received
            squares = float(gap.double().square().sum()), float(received.double().square().sum())
            self.errors.setdefault(f"{way}:l{layer}", []).append(squares)
        if way not in self.smoothed:
            return received
        return received * (1 - self.gamma) if used is None else used.lerp_(received, 1 - self.gamma)


@dataclass
class QuantizedHalo(Halo):
    """Rows cross in few bits per number, in the step that reads them or one before."""

    vertices: Mapping[int, Tensor]  # whose each layer's source rows are
    seed: int
    stale: bool
    bits: int

    def _fetch(self, step: int, layer: int, rows: Tensor) -> Callable[[], Tensor]:
        source = self._room(layer, rows)
        packed = self._cross_packed(step, layer, "f", rows)
        halo = source[len(source) - self.exchanges[layer].rows("f")[1] :]
        with self.rank.span(Label("unpack", step, "f", layer), "compute"):
            halo.zero_() if packed is None else self._unpack(("f", layer), packed, halo)
        return lambda: _with_own(source, rows)

    def _send_home(self, step: int, layer: int, own: Tensor, halo: Tensor) -> None:
        packed = self._cross_packed(step, layer, "b", halo)
        with self.rank.span(Label("unpack", step, "b", layer), "compute"):
            if packed is not None:
                received = own.new_empty(len(packed), own.shape[1])
                self.exchanges[layer].add_home(own, self._unpack(("b", layer), packed, received))

    def _cross_packed(self, step: int, layer: int, way: str, rows: Tensor) -> Tensor | None:
        """Send the rows that peers read, or the halo's gradients -> what this step uses."""
        vertices = self.vertices[layer]
        numbers = ROUNDING, self.seed, step, layer, "fb".index(way)
        with self.rank.span(Label("pack", step, way, layer), "compute"):
            positions = self.exchanges[layer].positions if way == "f" else None
            whose = vertices[len(vertices) - len(rows) :] if way == "b" else vertices[positions]
            leaving = self._pack((way, layer), rows, positions, whose, *numbers)
        cross = self._crossing(step, layer, way, leaving)
        if not self.stale:
            return cross()
        earlier = self.pending.pop((way, layer), None)
        self.pending[way, layer] = self.rank.submit("comm", cross)
        return None if earlier is None else earlier.result()

    def _pack(
        self, key: _Key, rows: Tensor, positions: Tensor | None, whose: Tensor, *numbers: int
    ) -> Tensor:
        """Some rows as bytes [., row_bytes] (layers/kernels/few_bits.py)."""
        return pack(rows, positions, self.bits, whose, *numbers)

    def _unpack(self, key: _Key, packed: Tensor, into: Tensor) -> Tensor:
        return unpack(packed, self.bits, into)


@dataclass
class AdaptiveHalo(QuantizedHalo):
    """Quantized rows of 4 bits on average, more where rounding counts more (mixed_bits.py).

    Sender and receiver choose alike, from the rows that have crossed.
    """

    weights: RowWeights
    mixes: dict[tuple[str, str, int], Mix] = field(default_factory=dict, init=False)  # by end, key

    def _pack(
        self, key: _Key, rows: Tensor, positions: Tensor | None, whose: Tensor, *numbers: int
    ) -> Tensor:
        packed = pack_mixed(rows, positions, self._mix("out", key), whose, *numbers)
        self._crossed("out", key, packed)
        return packed

    def _unpack(self, key: _Key, packed: Tensor, into: Tensor) -> Tensor:
        rows = unpack_mixed(packed, self._mix("in", key), into)
        self._crossed("in", key, packed)
        return rows

    def _mix(self, end: str, key: _Key) -> Mix:
        """The bits of the rows that leave or come next."""
        sends, receives = self.exchanges[key[1]].rows(key[0])
        count = sends if end == "out" else receives
        return self.mixes.get((end, *key)) or Mix.even(count, self.rank.device)

    def _crossed(self, end: str, key: _Key, packed: Tensor) -> None:
        """Rows have left or come: choose the bits of those after them."""
        (way, layer), exchange = key, self.exchanges[key[1]]
        peers = exchange.gives if (end == "out") == (way == "f") else exchange.take
        weights = self.weights[end, layer] if way == "f" else None
        self.mixes[end, way, layer] = self._mix(end, key).after(packed, peers, weights)

    def state(self) -> dict[str, Tensor]:
        return super().state() | {
            f"bits.{end}.{way}.{layer}.{mix.left}": mix.bits
            for (end, way, layer), mix in self.mixes.items()
        }

    def load(self, state: Mapping[str, Tensor]) -> None:
        super().load(state)
        for name, tensor in state.items():
            if name.startswith("bits."):
                _, end, way, layer, left = name.split(".")
                bits = tensor.to(self.rank.device, copy=True)
                self.mixes[end, way, int(layer)] = Mix(bits, int(left))


def _with_own(source: Tensor, rows: Tensor) -> Tensor:
    """A buffer whose first rows are a rank's own rows, copied unless they are the buffer."""
    if source is not rows:
        source[: len(rows)] = rows
    return source


def halo_of(
    whole: Halo,
    problem: Problem,
    options: ExchangeOptions,
    vertices: Mapping[int, Tensor],  # whose each layer's source rows are
    weights: RowWeights,
) -> Halo:
    """The halo of training, where `whole` is that of evaluation; weights: of adaptive bits."""
    rank, exchanges, model = whole.rank, whole.exchanges, problem.model
    stale = options.staleness > 0
    if options.bits is not None:
        packed = rank, exchanges, vertices, problem.workload.seed, stale
        if options.bits == ADAPTIVE:
            return AdaptiveHalo(*packed, 4, weights)
        return QuantizedHalo(*packed, int(options.bits))
    if not stale:
        return whole
    smoothed = options.smoothing.replace("g", "b")
    sizes = [
        exchanges[layer].rows(way)[1] * model.exchanged_width(layer, options.narrow)
        for layer in exchanges.keys() & vertices.keys()
        if layer > model.first_varying
        for way in smoothed
    ]
    dtype = dtype_of(problem.workload)
    arriving = torch.empty(max(sizes, default=0), dtype=dtype, device=rank.device)
    halo = StaleHalo(rank, exchanges, smoothed, arriving)
    halo.gamma = options.gamma
    return halo
