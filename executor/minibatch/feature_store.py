"""The feature store: every rank reads its rows of h_0.

Rows are read from the rank's cache, its server's memory, or other ranks, as defined in
planner/strategies/minibatch/feature_store.py. A server's large dense features are one file, which
its ranks map into memory: they share pages, and the system may drop pages that are not read."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gnnplan.executor.layers.blocks import features
from gnnplan.executor.layers.kernels import SparseRows, cat
from gnnplan.executor.ranks.comm import Exchange
from gnnplan.executor.ranks.rank import Rank
from gnnplan.planner.graph.graph import Graph
from gnnplan.planner.graph.sampling import Ids
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies.minibatch.feature_store import HIT, HOST, SOURCES, Store
from gnnplan.planner.strategies.minibatch.supply import Supply
from gnnplan.planner.vocabulary.files import cache_dir
from gnnplan.planner.vocabulary.numbers import split
from gnnplan.planner.vocabulary.schedule import Label

LARGE = 16 << 20  # [B] least size of features that are mapped from a file


class FeatureStore:
    """One rank's part of the store.

    rows: source (SOURCES) -> number of rows read.
    """

    def __init__(self, rank: Rank, supply: Supply) -> None:
        self.rank, self.problem, self.picks_on_device = rank, supply.problem, supply.picks_there
        assert isinstance(supply.store, Store)
        self.store, self.graph, self.rows = supply.store, self.problem.data, Counter[str]()
        self.columns = self.store.slices[rank.rank].columns
        if len(self.columns) == self.problem.model.features:
            _share_features(rank, self.problem)
        else:
            self.graph = _of_columns(self.graph, self.columns)
        asks, ids, self.is_plain = self.store.asks, np.arange(rank.world), supply.is_plain
        if not self.is_plain:
            self.cached = self._fill_cache()
            # sends each rank the number of rows that it is asked for, if it is ever asked
            self.count_exchange = Exchange(
                rank,
                [ids[i : i + 1] if asks[rank.rank, i] else ids[:0] for i in ids],
                asks[:, rank.rank],
            )

    def in_host(self, ids: Ids) -> tuple[Ids, int]:
        """Select the vertices whose features `load` reads from host memory -> (ids, bytes)."""
        if not self.is_plain:
            ids = ids[self.store.of(self.rank.rank, ids)[0] == HOST]
        return ids, int(self.problem.features_bytes(ids, self.columns).sum())

    def load(self, ids: Ids, room: int = 0) -> Tensor:
        """Load features of the vertices `in_host` to the device, without other ranks.

        If they are all features of a batch, `room` uninitialised rows follow."""
        return self._host(ids, room * self.is_plain)

    def complete(
        self,
        loaded: Tensor,
        ids: Ids,
        step: int,
        room: int = 0,
        device_ids: Tensor | None = None,
    ) -> Tensor:
        """Return features [R, F] of vertices on the device, in order. All ranks call it together.

        loaded: the result of `load`. room: number of uninitialised rows to append. device_ids:
        `ids` on the device, if they are there. Spans and bytes are recorded for `step`.
        """
        rank, store = self.rank, self.store
        if self.is_plain:
            self._count(np.full(ids.size, HOST))
            return loaded
        if device_ids is not None and self.picks_on_device:
            return self._pick_by_device(loaded, device_ids, step)
        kind, provider = store.of(rank.rank, ids)
        self._count(kind)
        hits = np.flatnonzero(kind == HIT)
        parts: list[tuple[Ids, Tensor]] = [(np.flatnonzero(kind == HOST), loaded)]
        if store.caches:
            with rank.recorder.span(Label("pick", step), "compute"):
                parts.append((hits, self._from_cache(ids[hits])))
        if store.asks.any():
            remote = np.flatnonzero(provider != rank.rank)
            remote = remote[np.argsort(provider[remote], kind="stable")]
            parts.append((remote, self._from_ranks(ids[remote], provider[remote], step)))
        rows = _merge(parts, ids.size, rank.device)
        if room:
            rows = cat([rows, rows.new_empty(room, rows.shape[1])])
        return rows

    @cached_property
    def _places(self) -> Tensor:
        """Vertex -> its place in the cache [N]; -1: not cached."""
        return torch.from_numpy(self.store.slot(self.rank.rank)).to(self.rank.device)

    def _pick_by_device(self, loaded: Tensor, ids: Tensor, step: int) -> Tensor:
        """Merge loaded rows with cached rows, without look-ups on the host.

        It is for batches whose other rows are all in this rank's cache.
        """
        with self.rank.recorder.span(Label("pick", step), "compute"):
            places = self._places[ids]
            rows = self.cached.index_select(0, places.clamp(min=0))
            uncached_first = places.clamp(max=0).argsort(stable=True)
            rows.index_copy_(0, uncached_first[: len(loaded)], loaded)
        self._count(np.repeat([HOST, HIT], [len(loaded), len(ids) - len(loaded)]))
        return rows

    def _from_ranks(self, ids: Ids, provider: NDArray[np.int32], step: int) -> Tensor:
        """Fetch rows from the ranks that provide them, and send rows to the ranks that ask."""
        rank = self.rank
        counts = np.bincount(provider, minlength=rank.world)
        requests = np.zeros(rank.world, np.int64)  # number of rows that each rank asks for
        own_counts, own_ids = (
            torch.from_numpy(numbers)[:, None].to(rank.device) for numbers in (counts, ids)
        )
        received = self.count_exchange.fetch(Label("ask", step, "n"), own_counts)
        rank.settle()  # notices lost peers
        requests[np.flatnonzero(self.count_exchange.take)] = received[:, 0].cpu().numpy()
        ids_asked = _make_exchange(rank, counts, requests).fetch(Label("ask", step), own_ids)
        rank.settle()
        exchange, rows = (
            _make_exchange(rank, requests, counts),
            self._provide(ids_asked[:, 0].cpu().numpy()),
        )
        with rank.recorder.sending(Label("fetch", step), "comm", rows.nbytes):
            return exchange.forward(rows, lengths=self.graph.lengths(ids))

    def _fill_cache(self) -> Tensor:
        """Fill the rank's cache from its server's memory, and with rows that other ranks send."""
        rank, store = self.rank, self.store
        ids = store.cached[rank.rank]
        sender = store.sender(rank.rank, ids)
        own = np.flatnonzero(sender == rank.rank)
        parts = [(own, self._host(ids[own]))]
        if store.filled(self.problem).any():
            requests = [
                rows[store.sender(peer, rows) == rank.rank] if peer != rank.rank else rows[:0]
                for peer, rows in enumerate(store.cached)
            ]
            remote = np.flatnonzero(sender != rank.rank)
            remote = remote[np.argsort(sender[remote], kind="stable")]
            takes = np.bincount(sender[remote], minlength=rank.world)
            exchange = _make_exchange(rank, [rows.size for rows in requests], takes)
            rows = self._host(np.concatenate(requests))
            with rank.recorder.sending(Label("fill", -1), "comm", rows.nbytes):
                received = exchange.forward(rows, lengths=self.graph.lengths(ids[remote]))
            parts.append((remote, received))
        return _merge(parts, ids.size, self.rank.device)

    def _host(self, ids: Ids, room: int = 0) -> Tensor:
        """Load rows from the server's memory, and append `room` uninitialised rows."""
        if self.store.home is not None:
            remote = ids[self.store.sender(self.rank.rank, ids) != self.rank.rank]
            assert not remote.size, (
                f"server {self.store.servers[self.rank.rank]} has no features of vertices"
                f" {remote[:8].tolist()}"
            )
        return features(self.graph, ids, self.problem.workload, self.rank.device, room)

    def _from_cache(self, ids: Ids) -> Tensor:
        """Gather rows from the rank's cache."""
        places = self.store.slot(self.rank.rank)[ids].astype(np.int64)
        return self.cached.index_select(0, torch.from_numpy(places).to(self.rank.device))

    def _provide(self, ids: Ids) -> Tensor:
        """Gather rows for other ranks, from the cache or else from the server's memory."""
        is_cached = self.store.slot(self.rank.rank)[ids] >= 0
        parts = [
            (np.flatnonzero(is_cached), self._from_cache(ids[is_cached])),
            (np.flatnonzero(~is_cached), self._host(ids[~is_cached])),
        ]
        return _merge(parts, ids.size, self.rank.device)

    def _count(self, kind: np.ndarray) -> None:
        """Count rows by source. kind [R]: indices into SOURCES."""
        if self.rank.recorder.recording:
            counts = np.bincount(kind, minlength=len(SOURCES)).tolist()
            self.rows.update(dict(zip(SOURCES, counts, strict=True)))


def _of_columns(graph: Graph, columns: range) -> Graph:
    """Return the graph with some columns of the features, contiguous if they are in memory."""
    x = graph.x[:, columns.start : columns.stop]
    if isinstance(x, np.ndarray) and not isinstance(x, np.memmap):
        x = np.ascontiguousarray(x)
    return replace(graph, x=x, stats=replace(graph.stats, features=len(columns)))


def _make_exchange(rank: Rank, gives: Sequence[int] | Ids, takes: Ids) -> Exchange:
    """Make an exchange of the given numbers of rows, which are grouped by rank at both ends."""
    return Exchange(rank, split(np.arange(sum(gives)), gives), takes)


def _merge(parts: list[tuple[Ids, Tensor]], size: int, device: torch.device) -> Tensor:
    """Merge parts, each (places, rows at these places), into rows [size, F] on the device."""
    parts = [(places, rows) for places, rows in parts if places.size or not size]
    if len(parts) == 1 or not size:
        return _permute(*parts[0], device)
    if isinstance(parts[0][1], SparseRows):
        places = np.concatenate([places for places, _ in parts])
        return _permute(places, cat([rows for _, rows in parts]), device)
    out = parts[0][1].new_empty(size, parts[0][1].shape[1])
    for places, rows in parts:  # on CPUs index_copy_ takes up to three times as long
        out[torch.from_numpy(places).to(device)] = rows
    return out


def _permute(places: Ids, rows: Tensor, device: torch.device) -> Tensor:
    """Move rows [R, F] to their places, a permutation of 0 .. R - 1."""
    if np.array_equal(places, np.arange(places.size)):
        return rows
    order = np.empty_like(places)
    order[places] = np.arange(places.size)
    return rows.index_select(0, torch.from_numpy(order).to(device))


# -- features as a file that a server's ranks share -----------------------------------------------


def _share_features(rank: Rank, problem: Problem) -> None:
    """Map the graph's large dense features from a file of the server.

    Does nothing if every server has one rank, or the features are already mapped.
    """
    graph = problem.data
    if (
        not isinstance(graph.x, np.ndarray)
        or isinstance(graph.x, np.memmap)
        or graph.x.nbytes < LARGE
        or len(set(problem.servers)) == rank.world
    ):
        return
    path = cache_dir() / "features" / f"{graph.stats.hash}.npy"
    if problem.servers.index(problem.servers[rank.rank]) == rank.rank:
        write_features(path, graph)
    rank.groups.await_all(rank.groups.exchanges)  # by now the file is complete, or never will be
    # frees the rank's own copy, which the watch on its memory did not count when it began
    with rank.in_server_memory():
        map_features(path, graph)


def write_features(path: Path, graph: Graph) -> None:
    """Write the features to a file, atomically.

    An unwritable or full cache is no error: every rank then keeps its own copy.
    """
    assert isinstance(graph.x, np.ndarray)
    if _mapped(path, graph) is not None:
        return
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        # readable by the user only: mkstemp's permissions
        descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        try:
            with open(descriptor, "wb") as stream:
                np.save(stream, graph.x, allow_pickle=False)
            os.replace(temporary, path)
        finally:
            Path(temporary).unlink(missing_ok=True)


def map_features(path: Path, graph: Graph) -> bool:
    """Replace the graph's features by the mapped file; return whether the file was usable."""
    mapped = _mapped(path, graph)
    if mapped is not None:
        object.__setattr__(graph, "x", mapped)  # equal values, so the frozen Graph stays valid
    return mapped is not None


def _mapped(path: Path, graph: Graph) -> np.memmap | None:
    """Map the file; None if its shape or type differs from the graph's features."""
    with contextlib.suppress(OSError, ValueError, EOFError):
        x = np.load(path, mmap_mode="r", allow_pickle=False)
        if isinstance(x, np.memmap) and (x.shape, x.dtype) == (graph.x.shape, graph.x.dtype):
            return x
    return None
