"""The halo: rows of other ranks that a layer reads, and their gradients' way home.

    what a layer reads [S, H]    own rows | halo, by sender    rows come from their owners
    its gradient       [S, H]    own rows | halo               the halo's goes to them, who add it

A policy says which rows are fresh in a step (planner/strategies/layerwise/exchange.py). They cross
in the step that reads them, and the others stay as they came last, zero before that (`Halo`). Or
all are read one step late, and cross beside computation on the comm lane (`StaleHalo`). That lane
reads and fills buffers that stay: memory does not depend on how far it lags behind. In a
`QuantizedHalo` either of the two crosses in few bits per number (planner/gnn/codec.py). An exchange
is counted when its step comes to it, and recorded under the schedule's label.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from gnnplan.executor.layers.blocks import dtype_of
from gnnplan.executor.layers.kernels import Even, Mix
from gnnplan.executor.ranks.comm import Exchange
from gnnplan.executor.ranks.lanes import completed_future
from gnnplan.executor.ranks.rank import Rank
from gnnplan.planner.gnn.codec import WHOLE, Codec
from gnnplan.planner.graph.sampling import ROUNDING, Ids
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies.layerwise.exchange import FRESH, Crossing, ExchangeOptions, Policy
from gnnplan.planner.vocabulary.schedule import Label

_Key = tuple[str, int]  # way ('f': rows, 'b': gradients) and layer
RowWeights = Mapping[tuple[str, int], Tensor]  # of rows that leave ('out') or come ('in'), by layer


class Fresh(NamedTuple):
    """The rows of a layer that cross in a step."""

    exchange: Exchange
    given: Tensor | None  # their places among the rows that this rank gives; None: all
    taken: Tensor | None  # and in its halo

    def leaving(self, way: str) -> Tensor | None:
        """Places among own rows of those that leave, or among the halo's gradients; None: all."""
        return self.exchange.positions if way == "f" else self.taken


@dataclass
class Halo:
    """Fresh rows cross as they are, in the step that reads them."""

    rank: Rank
    exchanges: Mapping[int, Exchange]  # by layer; a layer that has none reads own rows only
    policy: Policy = FRESH
    vertices: Mapping[int, Tensor] = field(default_factory=dict)  # whose each layer's sources are
    seed: int = 0
    anew: bool = field(default=False, init=False)  # all rows cross, and count as they are
    # rows and gradients that came in earlier steps and are used in the next
    pending: dict[_Key, Future[Tensor]] = field(default_factory=dict, init=False)
    # 'f:l2' -> per step ||used - true||^2 and ||true||^2
    errors: dict[str, list[tuple[float, float]]] = field(default_factory=dict, init=False)
    _parts: dict[tuple[int, int], Fresh] = field(default_factory=dict, init=False)

    def rows(self, step: int, layer: int, rows: Tensor) -> Callable[[], Tensor]:
        """Exchange rows [local, H] before a layer -> a function that lays out what it reads."""
        if layer not in self.exchanges:
            return lambda: rows
        own, count, way = len(rows), self.exchanges[layer].rows("f")[1], "f"
        source = rows.new_empty(own + count, rows.shape[1]) if count else rows
        # to write nothing behind own rows would still count as a change of them
        halo = source[own:] if count else None
        with self._swapped(step, layer, way, rows, None if self.policy.stays else halo) as came:
            used = self._last(step, layer, way, came)
            if halo is not None and used is not halo:
                halo[:] = 0.0 if used is None else used
            self._measure(layer, way, rows, used)

        def lay_out() -> Tensor:
            if count:
                source[:own] = rows
            return source

        return lay_out

    def home(self, step: int, layer: int, gradient: Tensor) -> Tensor:
        """The gradient of what a layer read -> that of own rows, with what other readers send."""
        if layer not in self.exchanges:
            return gradient
        exchange, way = self.exchanges[layer], "b"
        own, halo = gradient.tensor_split([len(gradient) - exchange.rows("f")[1]])
        with self._swapped(step, layer, way, halo) as came:
            used = self._last(step, layer, way, came)
            self._measure(layer, way, halo, used)
            if used is not None:
                exchange.add_home(own, used)
        return own

    def _measure(self, layer: int, way: str, rows: Tensor, used: Tensor | None) -> None:
        """How far rows that stayed are from this step's: all cross once more, and nobody counts."""
        if self.policy.stays and self.rank.staleness_errors:
            whole = self.exchanges[layer]
            leaving = rows.index_select(0, whole.positions) if way == "f" else rows
            self._note(layer, way, used, whole.swap(way, leaving))

    def _note(self, layer: int, way: str, used: Tensor | None, true: Tensor) -> None:
        """An error, of rows that were used (None: zeros) for true ones."""
        gap = true if used is None else used - true
        squares = float(gap.double().square().sum()), float(true.double().square().sum())
        self.errors.setdefault(f"{way}:l{layer}", []).append(squares)

    @contextmanager
    def _swapped(
        self, step: int, layer: int, way: str, rows: Tensor, into: Tensor | None = None
    ) -> Iterator[Tensor | None]:
        """Fresh ones of these rows leave, and those of peers have come, in `into` if given; None in
        the first step of those that lag."""
        fresh = self._fresh(step, layer)
        with self._recorded(step, layer, way, rows):
            if (leaving := fresh.leaving(way)) is not None:
                rows = rows.index_select(0, leaving)
            yield fresh.exchange.swap(way, rows, into)

    def _last(self, step: int, layer: int, way: str, came: Tensor | None) -> Tensor | None:
        """All rows as they came last, of which some have come now."""
        if came is None or not self.policy.stays:
            return came
        key, fresh = (way, layer), self._fresh(step, layer)
        places = fresh.taken if way == "f" else fresh.given
        if places is None:
            kept = came
        elif key in self.pending:
            kept = self.pending[key].result()
        else:
            kept = came.new_zeros(self.exchanges[layer].rows(way)[1], came.shape[1])
        self.pending[key] = completed_future(
            kept if places is None else kept.index_copy_(0, places, came)
        )
        return kept

    def _fresh(self, step: int, layer: int) -> Fresh:
        """The rows that cross."""
        whole, turn = self.exchanges[layer], (step % self.policy.period, layer)
        if not self.policy.stays or self.anew:
            return Fresh(whole, None, None)
        if turn not in self._parts:
            positions, ids = whole.positions.cpu().numpy(), self.vertices[layer].cpu().numpy()
            crossing = Crossing(self.seed, step, layer, self.rank.rank)
            rows = ids, positions, whole.gives, whole.take
            given, taken = fresh_places(self.policy, *rows, crossing)
            give, take = [positions[places] for places in given], np.array([*map(len, taken)])
            both = (torch.from_numpy(np.concatenate(each)) for each in (given, taken))
            places = (each.to(self.rank.device) for each in both)
            self._parts[turn] = Fresh(Exchange(self.rank, give, take), *places)
        return self._parts[turn]

    def _recorded(
        self, step: int, layer: int, way: str, rows: Tensor
    ) -> AbstractContextManager[None]:
        """The span of an exchange of fresh ones of such rows, whose bytes are counted now."""
        return self._fresh(step, layer).exchange.recorded(
            Label("halo", step, way, layer), rows, way
        )

    def _crossing(
        self, step: int, layer: int, way: str, leaving: Tensor, into: Tensor | None = None
    ) -> Callable[[], Tensor]:
        """A function that sends packed rows or gradients, and returns those that come."""
        fresh, recorded = self._fresh(step, layer), self._recorded(step, layer, way, leaving)

        def cross() -> Tensor:
            with recorded:
                return fresh.exchange.swap(way, leaving, into)

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
                self.pending[way, int(layer)] = completed_future(
                    tensor.to(self.rank.device, copy=True)
                )


@dataclass
class StaleHalo(Halo):
    """Rows cross as they are and are used one step later, or a moving average of them."""

    codec: Codec = WHOLE  # which averages are used
    # buffer for what is received and then smoothed, one exchange after the other
    arriving: Tensor = field(default_factory=lambda: torch.empty(0))
    leaving: dict[_Key, Tensor] = field(default_factory=dict, init=False)  # buffers

    @contextmanager
    def _swapped(
        self, step: int, layer: int, way: str, rows: Tensor, into: Tensor | None = None
    ) -> Iterator[Tensor | None]:
        """What came one step ago. Then rows leave on the comm lane, for the next step to use.

        The exchange one step ago is over, however far the lane lags behind, so its buffers can be
        filled again, unless what came is still needed.
        """
        used = self._arrived(way, layer)
        yield used
        exchange, key, width = self.exchanges[layer], (way, layer), rows.shape[1]
        sends, receives = exchange.rows(way)
        if key not in self.leaving:
            self.leaving[key] = rows.new_empty(sends, width)
        leaving = self.leaving[key]
        leaving = exchange.pack(rows, leaving) if way == "f" else leaving.copy_(rows)
        into = None if self.rank.staleness_errors else used
        if way in self.codec.averaged:
            into = self.arriving[: receives * width].view(receives, width)
        cross = self._crossing(step, layer, way, leaving, into)
        self.pending[key] = self.rank.lanes.submit(
            "comm", lambda: self._next(way, layer, cross(), used)
        )

    def _next(self, way: str, layer: int, received: Tensor, used: Tensor | None) -> Tensor:
        """What the next step uses: what was received, or its moving average.

        With smoothing s_t = gamma s_{t-1} + (1 - gamma) v_t, where v_t is `received` and s_{t-1} is
        what this step has `used`. s_t takes the place of s_{t-1}.
        """
        if self.rank.staleness_errors:
            self._note(layer, way, used, received)
        if way not in self.codec.averaged:
            return received
        weight = 1.0 if self.anew else 1 - self.codec.gamma
        return received * weight if used is None else used.lerp_(received, weight)


@dataclass
class QuantizedHalo(Halo):
    """Rows cross in few bits per number, in the step that reads them or one before.

    Adaptive rows have more where rounding counts more (few_bits.py): sender and receiver choose
    alike, from the rows that have crossed.
    """

    codec: Codec = WHOLE
    weights: RowWeights = field(default_factory=dict)
    mixes: dict[tuple[str, str, int], Mix] = field(default_factory=dict, init=False)  # by end, key

    @contextmanager
    def _swapped(
        self, step: int, layer: int, way: str, rows: Tensor, into: Tensor | None = None
    ) -> Iterator[Tensor | None]:
        fresh, key, vertices = self._fresh(step, layer), (way, layer), self.vertices[layer]
        positions = fresh.leaving(way)
        numbers = ROUNDING, self.seed, step, layer, "fb".index(way)
        with self.rank.recorder.span(Label("pack", step, way, layer), "compute"):
            whose = vertices[len(vertices) - len(rows) :] if way == "b" else vertices
            whose = whose if positions is None else whose[positions]
            leaving = self._bits("out", key).pack(rows, positions, whose, *numbers)
            self._crossed("out", key, leaving)
        cross = self._crossing(step, layer, way, leaving)
        packed: Tensor | None
        if self.policy.lags:
            packed = self._arrived(way, layer)
            self.pending[key] = self.rank.lanes.submit("comm", cross)
        else:
            packed = cross()
        with self.rank.recorder.span(Label("unpack", step, way, layer), "compute"):
            if into is None:
                into = rows.new_empty(fresh.exchange.rows(way)[1], rows.shape[1])
            came: Tensor | None = None
            if packed is not None:
                came = self._bits("in", key).unpack(packed, into)
                self._crossed("in", key, packed)
            yield came

    def _bits(self, end: str, key: _Key) -> Even | Mix:
        """How many bits the rows have that leave or come next."""
        if not self.codec.adapts:
            return Even(self.codec.on_average)
        sends, receives = self.exchanges[key[1]].rows(key[0])
        count = sends if end == "out" else receives
        return self.mixes.get((end, *key)) or Mix.even(count, self.rank.device)

    def _crossed(self, end: str, key: _Key, packed: Tensor) -> None:
        """Rows have left or come: choose the bits of those after them."""
        (way, layer), exchange, bits = key, self.exchanges[key[1]], self._bits(end, key)
        if isinstance(bits, Mix):
            peers = exchange.gives if (end == "out") == (way == "f") else exchange.take
            weights = self.weights[end, layer] if way == "f" else None
            self.mixes[end, way, layer] = bits.after(packed, peers, weights)

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


def halo_of(
    whole: Halo,
    problem: Problem,
    options: ExchangeOptions,
    vertices: Mapping[int, Tensor],  # whose each layer's source rows are
    weights: RowWeights,
) -> Halo:
    """The halo of training, where `whole` is that of evaluation; weights: of adaptive rows."""
    rank, exchanges, model = whole.rank, whole.exchanges, problem.model
    policy, codec = options.policy, options.codec
    rows = rank, exchanges, policy, vertices, problem.workload.seed
    if codec.packs:
        return QuantizedHalo(*rows, codec, weights)
    if not policy.lags:
        return whole if policy.whole else Halo(*rows)
    sizes = [
        exchanges[layer].rows(way)[1] * model.exchanged_width(layer, options.narrow)
        for layer in exchanges.keys() & vertices.keys()
        if layer > model.first_varying
        for way in codec.averaged
    ]
    dtype = dtype_of(problem.workload.precision)
    arriving = torch.empty(max(sizes, default=0), dtype=dtype, device=rank.device)
    return StaleHalo(*rows, codec, arriving)


def fresh_places(
    policy: Policy,
    ids: Ids,
    positions: Ids,
    gives: Sequence[int],
    takes: Sequence[int],
    crossing: Crossing,
) -> tuple[list[Ids], list[Ids]]:
    """Which rows of those given to each peer, and taken from each, are fresh: places among all.

    ids: of a layer's sources, the halo last. positions: there, of the rows given. gives, takes: how
    many, by peer. crossing: with this rank as the reader.
    """

    def places(some: Ids, counts: Sequence[int], readers: Sequence[int]) -> list[Ids]:
        parts = zip(pairwise(np.cumsum([0, *counts]).tolist()), readers, strict=True)
        return [
            start + policy.fresh(some[start:end], crossing._replace(reader=reader))
            for (start, end), reader in parts
        ]

    return (
        places(ids[positions], gives, range(len(gives))),
        places(ids[ids.size - sum(takes) :], takes, [crossing.reader] * len(takes)),
    )
