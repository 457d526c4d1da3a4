"""Halo exchange: fetch the rows that other ranks own, and return their gradients to the owners.

    source rows of a layer [S, H]    own rows | halo, by sender    owners send the halo rows
    their gradient         [S, H]    own rows | halo               owners add the halo's gradient

A policy says which halo rows are fresh, that is, exchanged in a step
(planner/strategies/layerwise/exchange.py). `Halo` exchanges fresh rows in the step that reads them,
and takes the other rows from a cache, which is zero at first. `StaleHalo` reads rows one step after
their exchange, so the exchange overlaps computation on the comm lane. That lane reads and fills
persistent buffers: memory does not depend on how far it lags behind. `QuantizedHalo` exchanges
either kind in few bits per number (planner/gnn/rows.py). The bytes of an exchange are counted when
the step reaches it, and its span is recorded under the schedule's label.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from gnnplan.executor.layers.blocks import dtype_of
from gnnplan.executor.layers.kernels import MixedWidth, UniformWidth
from gnnplan.executor.ranks.comm import Exchange
from gnnplan.executor.ranks.rank import Rank, completed_future
from gnnplan.planner.gnn.rows import WHOLE, Codec
from gnnplan.planner.graph.sampling import ROUNDING, Ids
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies.layerwise.exchange import FRESH, Crossing, ExchangeOptions, Policy
from gnnplan.planner.vocabulary.schedule import Label

_Key = tuple[str, int]  # direction ('f': rows, 'b': gradients) and layer
# (end, layer) -> weight of each row that is sent (end 'out') or received (end 'in')
RowWeights = Mapping[tuple[str, int], Tensor]


class Fresh(NamedTuple):
    """The rows of a layer that are exchanged in a step."""

    exchange: Exchange  # of fresh rows only
    # places of fresh rows among all rows that this rank sends, and in its halo; None: all are fresh
    sent_places: Tensor | None
    halo_places: Tensor | None

    def sent_positions(self, direction: str) -> Tensor | None:
        """Return which own rows are sent ('f'), or which halo gradients ('b'); None: all."""
        return self.exchange.positions if direction == "f" else self.halo_places


@dataclass
class Halo:
    """Halo exchange of unquantized rows, in the step that reads them."""

    rank: Rank
    exchanges: Mapping[int, Exchange]  # by layer; a layer without an exchange reads own rows only
    policy: Policy = FRESH
    vertices: Mapping[int, Tensor] = field(default_factory=dict)  # layer -> ids of its source rows
    seed: int = 0
    refilling: bool = field(default=False, init=False)  # exchange all rows, and average none
    # rows and gradients received in earlier steps, for use in the next step
    pending: dict[_Key, Future[Tensor]] = field(default_factory=dict, init=False)
    # 'f:l2' -> for each step ||used - true||^2 and ||true||^2
    errors: dict[str, list[tuple[float, float]]] = field(default_factory=dict, init=False)
    # (step within the policy's period, layer) -> fresh rows
    _fresh_rows: dict[tuple[int, int], Fresh] = field(default_factory=dict, init=False)

    def fetch(self, step: int, layer: int, rows: Tensor) -> Callable[[], Tensor]:
        """Exchange rows [local, H] before a layer.

        Returns a function that joins own rows and halo into the layer's source rows [S, H].
        """
        if layer not in self.exchanges:
            return lambda: rows
        own, count, direction = len(rows), self.exchanges[layer].counts("f")[1], "f"
        source = rows.new_empty(own + count, rows.shape[1]) if count else rows
        # Writing an empty halo behind own rows would still bump the version that autograd checks.
        halo = source[own:] if count else None
        with self._exchange_fresh(
            step, layer, direction, rows, None if self.policy.keeps_received else halo
        ) as received:
            used = self._merge_cached(step, layer, direction, received)
            if halo is not None and used is not halo:
                halo[:] = 0.0 if used is None else used
            self._measure(layer, direction, rows, used)

        def join() -> Tensor:
            if count:
                source[:own] = rows
            return source

        return join

    def return_gradients(self, step: int, layer: int, gradient: Tensor) -> Tensor:
        """Return halo gradients to their owners and add the gradients received.

        gradient: of the layer's source rows [S, H]. Returns the gradient of own rows [local, H].
        """
        if layer not in self.exchanges:
            return gradient
        exchange, direction = self.exchanges[layer], "b"
        own, halo = gradient.tensor_split([len(gradient) - exchange.counts("f")[1]])
        with self._exchange_fresh(step, layer, direction, halo) as received:
            used = self._merge_cached(step, layer, direction, received)
            self._measure(layer, direction, halo, used)
            if used is not None:
                exchange.add_gradient(own, used)
        return own

    def _measure(self, layer: int, direction: str, rows: Tensor, used: Tensor | None) -> None:
        """Record the error of cached rows, after one more exchange of all rows (not counted)."""
        if self.policy.keeps_received and self.rank.staleness_errors:
            exchange = self.exchanges[layer]
            outgoing = rows.index_select(0, exchange.positions) if direction == "f" else rows
            self._note(layer, direction, used, exchange.swap(direction, outgoing))

    def _note(self, layer: int, direction: str, used: Tensor | None, true: Tensor) -> None:
        """Record the error of the rows used (None: zeros) against the true rows."""
        gap = true if used is None else used - true
        squares = float(gap.double().square().sum()), float(true.double().square().sum())
        self.errors.setdefault(f"{direction}:l{layer}", []).append(squares)

    @contextmanager
    def _exchange_fresh(
        self, step: int, layer: int, direction: str, rows: Tensor, into: Tensor | None = None
    ) -> Iterator[Tensor | None]:
        """Send this step's fresh rows and yield the rows received from peers, in `into` if given.

        Yields None in the first step of a lagging exchange."""
        fresh, label = self._fresh(step, layer), Label("halo", step, direction, layer)
        with fresh.exchange.recorded(label, rows, direction):
            if (outgoing := fresh.sent_positions(direction)) is not None:
                rows = rows.index_select(0, outgoing)
            yield fresh.exchange.swap(direction, rows, into)

    def _merge_cached(
        self, step: int, layer: int, direction: str, received: Tensor | None
    ) -> Tensor | None:
        """Merge the rows received in this step into the rows cached from earlier steps."""
        if received is None or not self.policy.keeps_received:
            return received
        key, fresh = (direction, layer), self._fresh(step, layer)
        places = fresh.halo_places if direction == "f" else fresh.sent_places
        if places is None:
            cached = received
        elif key in self.pending:
            cached = self.pending[key].result()
        else:
            cached = received.new_zeros(
                self.exchanges[layer].counts(direction)[1], received.shape[1]
            )
        self.pending[key] = completed_future(
            cached if places is None else cached.index_copy_(0, places, received)
        )
        return cached

    def _fresh(self, step: int, layer: int) -> Fresh:
        """Return the rows that are exchanged in this step."""
        exchange, key = self.exchanges[layer], (step % self.policy.period, layer)
        if not self.policy.keeps_received or self.refilling:
            return Fresh(exchange, None, None)
        if key not in self._fresh_rows:
            positions, ids = exchange.positions.cpu().numpy(), self.vertices[layer].cpu().numpy()
            crossing = Crossing(self.seed, step, layer, self.rank.rank)
            rows = ids, positions, exchange.gives, exchange.take
            give, take, *both = fresh_places(self.policy, *rows, crossing)
            places = (torch.from_numpy(each).to(self.rank.device) for each in both)
            self._fresh_rows[key] = Fresh(Exchange(self.rank, give, take), *places)
        return self._fresh_rows[key]

    def _prepare_exchange(
        self, step: int, layer: int, direction: str, outgoing: Tensor, into: Tensor | None = None
    ) -> Callable[[], Tensor]:
        """Return a function that sends packed rows or gradients and returns those received."""
        exchange, label = self._fresh(step, layer).exchange, Label("halo", step, direction, layer)
        recorded = exchange.recorded(label, outgoing, direction)

        def run() -> Tensor:
            with recorded:
                return exchange.swap(direction, outgoing, into)

        return run

    def _pop_pending(self, direction: str, layer: int) -> Tensor | None:
        """Return the rows exchanged one step ago, for use in this step; None in the first step."""
        future = self.pending.pop((direction, layer), None)
        return None if future is None else future.result()

    def drain(self) -> None:
        """Wait for pending exchanges; the rows received stay for the next step."""
        for future in self.pending.values():
            future.result()

    def state(self) -> dict[str, Tensor]:
        """Return the tensors that the next step resumes from, by name."""
        return {
            f"stale.{direction}.{layer}": future.result()
            for (direction, layer), future in self.pending.items()
        }

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Resume from the `state` of another process."""
        for name, tensor in state.items():
            if name.startswith("stale."):
                _, direction, layer = name.split(".")
                self.pending[direction, int(layer)] = completed_future(
                    tensor.to(self.rank.device, copy=True)
                )


@dataclass
class StaleHalo(Halo):
    """Halo exchange of unquantized rows, read one step later; or of their moving averages."""

    codec: Codec = WHOLE  # says whether rows or gradients are averaged (smoothed)
    # receives the rows that are smoothed, for one exchange after the other
    receive_buffer: Tensor = field(default_factory=lambda: torch.empty(0))
    send_buffers: dict[_Key, Tensor] = field(default_factory=dict, init=False)

    @contextmanager
    def _exchange_fresh(
        self, step: int, layer: int, direction: str, rows: Tensor, into: Tensor | None = None
    ) -> Iterator[Tensor | None]:
        """Yield the rows received one step ago, then send rows on the comm lane for the next step.

        By then the exchange of one step ago has ended, however far the lane lags behind, so its
        buffers can be filled again; the received rows only if no later computation needs them.
        """
        used = self._pop_pending(direction, layer)
        yield used
        exchange, key, width = self.exchanges[layer], (direction, layer), rows.shape[1]
        sends, receives = exchange.counts(direction)
        if key not in self.send_buffers:
            self.send_buffers[key] = rows.new_empty(sends, width)
        outgoing = self.send_buffers[key]
        outgoing = exchange.pack(rows, outgoing) if direction == "f" else outgoing.copy_(rows)
        into = None if self.rank.staleness_errors else used
        if direction in self.codec.averaged:
            into = self.receive_buffer[: receives * width].view(receives, width)
        run = self._prepare_exchange(step, layer, direction, outgoing, into)
        self.pending[key] = self.rank.lanes.submit(
            "comm", lambda: self._smooth(direction, layer, run(), used)
        )

    def _smooth(self, direction: str, layer: int, received: Tensor, used: Tensor | None) -> Tensor:
        """Return the rows that the next step uses: those received, or their moving average.

        The average is s_t = gamma s_{t-1} + (1 - gamma) v_t, where v_t is `received` and s_{t-1} is
        `used`, the rows that this step has used. s_t is written in place of s_{t-1}.
        """
        if self.rank.staleness_errors:
            self._note(layer, direction, used, received)
        if direction not in self.codec.averaged:
            return received
        weight = 1.0 if self.refilling else 1 - self.codec.gamma
        return received * weight if used is None else used.lerp_(received, weight)


@dataclass
class QuantizedHalo(Halo):
    """Halo exchange in few bits per number, in the step that reads the rows or one step before.

    An adaptive codec gives more bits to rows whose rounding adds more variance (few_bits.py).
    Sender and receiver make the same choice, from the rows exchanged before.
    """

    codec: Codec = WHOLE
    weights: RowWeights = field(default_factory=dict)
    # (end, direction, layer) -> bits of each row in the next exchange, of an adaptive codec
    mixes: dict[tuple[str, str, int], MixedWidth] = field(default_factory=dict, init=False)

    @contextmanager
    def _exchange_fresh(
        self, step: int, layer: int, direction: str, rows: Tensor, into: Tensor | None = None
    ) -> Iterator[Tensor | None]:
        fresh, key, vertices = self._fresh(step, layer), (direction, layer), self.vertices[layer]
        positions = fresh.sent_positions(direction)
        numbers = ROUNDING, self.seed, step, layer, "fb".index(direction)
        with self.rank.recorder.span(Label("pack", step, direction, layer), "compute"):
            ids = vertices[len(vertices) - len(rows) :] if direction == "b" else vertices
            ids = ids if positions is None else ids[positions]
            outgoing = self._bits("out", key).pack(rows, positions, ids, *numbers)
            self._choose_bits("out", key, outgoing)
        run = self._prepare_exchange(step, layer, direction, outgoing)
        packed: Tensor | None
        if self.policy.lags:
            packed = self._pop_pending(direction, layer)
            self.pending[key] = self.rank.lanes.submit("comm", run)
        else:
            packed = run()
        with self.rank.recorder.span(Label("unpack", step, direction, layer), "compute"):
            if into is None:
                into = rows.new_empty(fresh.exchange.counts(direction)[1], rows.shape[1])
            received: Tensor | None = None
            if packed is not None:
                received = self._bits("in", key).unpack(packed, into)
                self._choose_bits("in", key, packed)
            yield received

    def _bits(self, end: str, key: _Key) -> UniformWidth | MixedWidth:
        """Return the bits of the rows that this end sends or receives next."""
        if not self.codec.adapts:
            return UniformWidth(self.codec.on_average)
        sends, receives = self.exchanges[key[1]].counts(key[0])
        count = sends if end == "out" else receives
        return self.mixes.get((end, *key)) or MixedWidth.even(count, self.rank.device)

    def _choose_bits(self, end: str, key: _Key, packed: Tensor) -> None:
        """Choose the bits of the next exchange from the rows packed in this one."""
        (direction, layer), exchange, bits = key, self.exchanges[key[1]], self._bits(end, key)
        if isinstance(bits, MixedWidth):
            peers = exchange.gives if (end == "out") == (direction == "f") else exchange.take
            weights = self.weights[end, layer] if direction == "f" else None
            self.mixes[end, direction, layer] = bits.after(packed, peers, weights)

    def state(self) -> dict[str, Tensor]:
        return super().state() | {
            f"bits.{end}.{direction}.{layer}.{mix.left}": mix.bits
            for (end, direction, layer), mix in self.mixes.items()
        }

    def load(self, state: Mapping[str, Tensor]) -> None:
        super().load(state)
        for name, tensor in state.items():
            if name.startswith("bits."):
                _, end, direction, layer, left = name.split(".")
                bits = tensor.to(self.rank.device, copy=True)
                self.mixes[end, direction, int(layer)] = MixedWidth(bits, int(left))


def open_halo(
    evaluation: Halo,
    problem: Problem,
    options: ExchangeOptions,
    vertices: Mapping[int, Tensor],  # layer -> ids of its source rows
    weights: RowWeights,
) -> Halo:
    """Return training's halo exchange, given that of evaluation. weights: of an adaptive codec."""
    rank, exchanges, model = evaluation.rank, evaluation.exchanges, problem.model
    policy, codec = options.policy, options.codec
    rows = rank, exchanges, policy, vertices, problem.workload.seed
    if codec.packs:
        return QuantizedHalo(*rows, codec, weights)
    if not policy.lags:
        return evaluation if policy.sends_all else Halo(*rows)
    sizes = [
        exchanges[layer].counts(direction)[1] * model.exchanged_width(layer, options.narrow)
        for layer in exchanges.keys() & vertices.keys()
        if layer > model.first_varying
        for direction in codec.averaged
    ]
    dtype = dtype_of(problem.workload.precision)
    receive_buffer = torch.empty(max(sizes, default=0), dtype=dtype, device=rank.device)
    return StaleHalo(*rows, codec, receive_buffer)


def fresh_places(
    policy: Policy,
    ids: Ids,
    positions: Ids,
    gives: Sequence[int],
    takes: Sequence[int],
    crossing: Crossing,
) -> tuple[list[Ids], Ids, Ids, Ids]:
    """Return the fresh rows: positions of those sent to each peer, the number received from each
    peer, and the places of all these rows among the layer's sent rows, and received rows.

    ids: of the layer's source rows, the halo last. positions: of the sent rows in `ids`. gives,
    takes: number of rows sent to and received from each peer. crossing: with this rank as the
    reader.
    """

    def places(rows: Ids, counts: Sequence[int], readers: Sequence[int]) -> list[Ids]:
        parts = zip(pairwise(np.cumsum([0, *counts]).tolist()), readers, strict=True)
        return [
            start + policy.fresh(rows[start:end], crossing._replace(reader=reader))
            for (start, end), reader in parts
        ]

    sent = places(ids[positions], gives, range(len(gives)))
    received = places(ids[ids.size - sum(takes) :], takes, [crossing.reader] * len(takes))
    return (
        [positions[each] for each in sent],
        np.array([*map(len, received)]),
        np.concatenate(sent),
        np.concatenate(received),
    )
