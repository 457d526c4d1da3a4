"""The feature store for real: every rank reads its rows of h_0.

Rows come from the rank's cache, its server's memory and other ranks, as
planner/strategies/minibatch/feature_store.py says. Large dense features are one file per server.
Its ranks map the file instead of keeping a copy each: they share its pages, and the system may drop
pages that are not read."""

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
from gnnplan.executor.layers.kernels import SparseRows
from gnnplan.executor.ranks.comm import Exchange
from gnnplan.executor.ranks.rank import Rank
from gnnplan.planner.graph.graph import Graph
from gnnplan.planner.graph.sampling import Ids
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies.minibatch.feature_store import CLASSES, HIT, HOST, Store
from gnnplan.planner.strategies.minibatch.supply import Supply
from gnnplan.planner.vocabulary.files import cache_dir
from gnnplan.planner.vocabulary.schedule import Label

LARGE = 16 << 20  # [B] of features that are worth a file


class FeatureStore:
    """One rank's side of the store.

    rows: how many rows it has read, by class.
    """

    def __init__(self, rank: Rank, supply: Supply) -> None:
        self.rank, self.problem, self.picks_there = rank, supply.problem, supply.picks_there
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
            # of how many rows: row i of the counts goes to rank i, if it may ever be asked
            self.count_exchange = Exchange(
                rank,
                [ids[i : i + 1] if asks[rank.rank, i] else ids[:0] for i in ids],
                asks[:, rank.rank],
            )

    def in_host(self, ids: Ids) -> tuple[Ids, int]:
        """Those of these vertices whose features `load` has to bring, and the bytes of these."""
        if not self.is_plain:
            ids = ids[self.store.of(self.rank.rank, ids)[0] == HOST]
        return ids, int(self.problem.features_bytes(ids, self.columns).sum())

    def load(self, ids: Ids, room: int = 0) -> Tensor:
        """Features of vertices `in_host` on the device; no other rank has a part in it.

        Where these are all that a batch reads, they have `room` more rows, not filled."""
        return self._host(ids, room * self.is_plain)

    def complete(
        self,
        loaded: Tensor,
        ids: Ids,
        step: int,
        room: int = 0,
        there: Tensor | None = None,
    ) -> Tensor:
        """Features [R, F] of these vertices on the device, in order; all ranks call it together.

        `loaded`: what `load` returned. Features have `room` more rows, which are not filled.
        `there`: the ids on the device, if they are. Spans and bytes are recorded under the
        operations of `step`.
        """
        rank, store = self.rank, self.store
        if self.is_plain:
            self._count(np.full(ids.size, HOST))
            return loaded
        if there is not None and self.picks_there:
            return self._picked(loaded, there, step)
        kind, provider = store.of(rank.rank, ids)
        self._count(kind)
        hits = np.flatnonzero(kind == HIT)
        parts: list[tuple[Ids, Tensor]] = [(np.flatnonzero(kind == HOST), loaded)]
        if store.caches:
            with rank.recorder.span(Label("pick", step), "compute"):
                parts.append((hits, self._from_cache(ids[hits])))
        if store.asks.any():
            away = np.flatnonzero(provider != rank.rank)
            away = away[np.argsort(provider[away], kind="stable")]
            parts.append((away, self._from_ranks(ids[away], provider[away], step)))
        rows = _merged(parts, ids.size, rank.device)
        if room:
            rows = torch.cat([rows, rows.new_empty(room, rows.shape[1])])
        return rows

    @cached_property
    def _places(self) -> Tensor:
        """The place of each vertex in the cache [N]; -1: it is not there."""
        return torch.from_numpy(self.store.slot(self.rank.rank)).to(self.rank.device)

    def _picked(self, loaded: Tensor, ids: Tensor, step: int) -> Tensor:
        """`complete`, where the cache has the rows that were not loaded. The host looks up none."""
        with self.rank.recorder.span(Label("pick", step), "compute"):
            place = self._places[ids]
            rows = self.cached.index_select(0, place.clamp(min=0))
            absent_first = place.clamp(max=0).argsort(stable=True)
            rows.index_copy_(0, absent_first[: len(loaded)], loaded)
        self._count(np.repeat([HOST, HIT], [len(loaded), len(ids) - len(loaded)]))
        return rows

    def _from_ranks(self, ids: Ids, provider: NDArray[np.int32], step: int) -> Tensor:
        """Rows that other ranks provide, grouped by them; and rows for those who ask this one."""
        rank = self.rank
        counts = np.bincount(provider, minlength=rank.world)
        wanted = np.zeros(rank.world, np.int64)  # rows that each rank asks of this one
        told, named = (torch.from_numpy(of)[:, None].to(rank.device) for of in (counts, ids))
        received = self.count_exchange.fetch(Label("ask", step, "n"), told)
        rank.settle()  # which hears of lost peers
        wanted[np.flatnonzero(self.count_exchange.take)] = received[:, 0].cpu().numpy()
        asked = _grouped(rank, counts, wanted).fetch(Label("ask", step), named)
        rank.settle()
        gives, rows = _grouped(rank, wanted, counts), self._provide(asked[:, 0].cpu().numpy())
        with rank.recorder.sending(Label("fetch", step), "comm", rows.nbytes):
            return gives.forward(rows, lengths=self.graph.lengths(ids))

    def _fill_cache(self) -> Tensor:
        """The rank's cache: rows of its server's memory, and those that others send it once."""
        rank, store = self.rank, self.store
        ids = store.cached[rank.rank]
        sender = store.sender(rank.rank, ids)
        own = np.flatnonzero(sender == rank.rank)
        parts = [(own, self._host(ids[own]))]
        if store.filled(self.problem).any():
            wanted = [
                rows[store.sender(peer, rows) == rank.rank] if peer != rank.rank else rows[:0]
                for peer, rows in enumerate(store.cached)
            ]
            away = np.flatnonzero(sender != rank.rank)
            away = away[np.argsort(sender[away], kind="stable")]
            takes = np.bincount(sender[away], minlength=rank.world)
            exchange = _grouped(rank, [rows.size for rows in wanted], takes)
            rows = self._host(np.concatenate(wanted))
            with rank.recorder.sending(Label("fill", -1), "comm", rows.nbytes):
                came = exchange.forward(rows, lengths=self.graph.lengths(ids[away]))
            parts.append((away, came))
        return _merged(parts, ids.size, self.rank.device)

    def _host(self, ids: Ids, room: int = 0) -> Tensor:
        """Rows from the server's memory, with `room` more rows."""
        if self.store.home is not None:
            elsewhere = ids[self.store.sender(self.rank.rank, ids) != self.rank.rank]
            assert not elsewhere.size, (
                f"server {self.store.servers[self.rank.rank]} has no features of vertices"
                f" {elsewhere[:8].tolist()}"
            )
        return features(self.graph, ids, self.problem.workload, self.rank.device, room)

    def _from_cache(self, ids: Ids) -> Tensor:
        """Rows that the rank caches."""
        places = self.store.slot(self.rank.rank)[ids].astype(np.int64)
        return self.cached.index_select(0, torch.from_numpy(places).to(self.rank.device))

    def _provide(self, ids: Ids) -> Tensor:
        """Rows for other ranks: those in the cache, the rest from the server's memory."""
        held = self.store.slot(self.rank.rank)[ids] >= 0
        parts = [
            (np.flatnonzero(held), self._from_cache(ids[held])),
            (np.flatnonzero(~held), self._host(ids[~held])),
        ]
        return _merged(parts, ids.size, self.rank.device)

    def _count(self, kind: np.ndarray) -> None:
        """Count rows by class; kind [R] has their places in CLASSES."""
        if self.rank.recorder.recording:
            counts = np.bincount(kind, minlength=len(CLASSES)).tolist()
            self.rows.update(dict(zip(CLASSES, counts, strict=True)))


def _of_columns(graph: Graph, columns: range) -> Graph:
    """The graph with some columns of the features, which lie side by side if they are in memory."""
    x = graph.x[:, columns.start : columns.stop]
    if isinstance(x, np.ndarray) and not isinstance(x, np.memmap):
        x = np.ascontiguousarray(x)
    return replace(graph, x=x, stats=replace(graph.stats, features=len(columns)))


def _grouped(rank: Rank, gives: Sequence[int] | Ids, takes: Ids) -> Exchange:
    """An exchange of so many rows with each rank, which stand one rank's after the other."""
    return Exchange(rank, np.split(np.arange(sum(gives)), np.cumsum(gives)[:-1]), takes)


def _merged(parts: list[tuple[Ids, Tensor]], size: int, device: torch.device) -> Tensor:
    """Rows [size, F] on the device where they are; each part is (places, rows there)."""
    parts = [(places, rows) for places, rows in parts if places.size or not size]
    if len(parts) == 1 or not size:
        return _permuted(*parts[0], device)
    if isinstance(parts[0][1], SparseRows):
        places = np.concatenate([places for places, _ in parts])
        return _permuted(places, torch.cat([rows for _, rows in parts]), device)
    out = parts[0][1].new_empty(size, parts[0][1].shape[1])
    for places, rows in parts:  # on CPUs index_copy_ takes up to three times as long
        out[torch.from_numpy(places).to(device)] = rows
    return out


def _permuted(places: Ids, rows: Tensor, device: torch.device) -> Tensor:
    """Rows [R, F] moved to their places, a permutation of 0 .. R - 1."""
    if np.array_equal(places, np.arange(places.size)):
        return rows
    order = np.empty_like(places)
    order[places] = np.arange(places.size)
    return rows.index_select(0, torch.from_numpy(order).to(device))


# -- features as a file that a server's ranks share -----------------------------------------------


def _share_features(rank: Rank, problem: Problem) -> None:
    """Map the graph's large dense features from a file of the server.

    Nothing happens where every server has one rank, or the features are in a file already.
    """
    graph = problem.data
    x = graph.x
    if (
        not isinstance(x, np.ndarray)
        or isinstance(x, np.memmap)
        or x.nbytes < LARGE
        or len(set(problem.servers)) == rank.world
    ):
        return
    path = cache_dir() / "features" / f"{graph.stats.hash}.npy"
    if problem.servers.index(problem.servers[rank.rank]) == rank.rank:
        write_features(path, graph)
    rank.groups.await_all(rank.groups.exchanges)  # now the file is there, or never will be
    map_features(path, graph)


def write_features(path: Path, graph: Graph) -> None:
    """Write the features to a file, whole or not at all.

    An unwritable or full cache is no error: ranks then keep a copy each.
    """
    assert isinstance(graph.x, np.ndarray)
    if _mapped(path, graph) is not None:
        return
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        # its owner's alone: these are the user's data
        mine, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        try:
            with open(mine, "wb") as stream:
                np.save(stream, graph.x, allow_pickle=False)
            os.replace(temporary, path)
        finally:
            Path(temporary).unlink(missing_ok=True)


def map_features(path: Path, graph: Graph) -> bool:
    """Replace the graph's features by pages of the file -> whether the file was usable."""
    mapped = _mapped(path, graph)
    if mapped is not None:
        object.__setattr__(graph, "x", mapped)  # the same numbers: a Graph stays what it was
    return mapped is not None


def _mapped(path: Path, graph: Graph) -> np.memmap | None:
    """The file's array; None if its shape or type is not that of the graph's features."""
    with contextlib.suppress(OSError, ValueError, EOFError):
        x = np.load(path, mmap_mode="r", allow_pickle=False)
        if isinstance(x, np.memmap) and (x.shape, x.dtype) == (graph.x.shape, graph.x.dtype):
            return x
    return None
