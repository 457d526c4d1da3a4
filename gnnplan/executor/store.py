"""The feature store for real: every rank's own rows of h_0, from its cache, its server's memory and other ranks.

Large dense features are one file per server, which its ranks map instead of keeping a copy each: the same pages for all of them, and
the system may drop those that are not read.
"""

from __future__ import annotations

import contextlib
import secrets
from collections import Counter
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from gnnplan.executor.comm import Exchange
from gnnplan.executor.data import dtype_of, features, lengths_of, sparse_features
from gnnplan.executor.kernels import Rows, SparseRows
from gnnplan.executor.worker import Rank
from gnnplan.planner.files import cache_dir
from gnnplan.planner.graph import Graph
from gnnplan.planner.job import Job
from gnnplan.planner.sampling import Ids
from gnnplan.planner.schedule import Label
from gnnplan.planner.store import CLASSES, HIT, HOST, Store
from gnnplan.planner.strategies.batchwise import ID

LARGE = 16 << 20  # [B] of features that are worth a file


class FeatureStore:
    """One rank's side of the store. `rows`: how many it has had, by class."""

    def __init__(self, rank: Rank, job: Job, store: Store | None) -> None:
        assert job.graph is not None
        self.rank, self.job, self.graph, self.store = rank, job, job.graph, store
        self.rows: Counter[str] = Counter()
        _share_features(rank, job)
        if store is not None:
            self.cached = self._fill(store)
            asks = store.asks
            me = np.arange(rank.world)
            self.tell = Exchange(rank, [me[i : i + 1] if asks[rank.rank, i] else me[:0] for i in me], asks[:, rank.rank])
            self.meets = bool(asks.any())

    def read(self, ids: Ids, step: int, room: int = 0) -> Rows:
        """Features [R, F] of these vertices on the device, as this step loads them; dense ones have `room` more rows, yet to be filled. All
        ranks come here."""
        rank, store = self.rank, self.store
        if store is None:
            self._count(np.full(ids.size, HOST))
            with rank.span(Label("load", step), "copy", int(self.job.features_bytes(ids).sum())):
                return self._host(ids, room)
        kind, provider = store.of(rank.rank, ids)
        self._count(kind)
        hits, mine = np.flatnonzero(kind == HIT), np.flatnonzero(kind == HOST)
        parts: list[tuple[np.ndarray, Rows]] = []
        with rank.span(Label("load", step), "copy", int(self.job.features_bytes(ids[mine]).sum())):
            parts.append((mine, self._host(ids[mine])))
        if any(rows.size for rows in store.cached):
            with rank.span(Label("pick", step), "compute"):
                parts.append((hits, self._picked(ids[hits])))
        if self.meets:
            away = np.flatnonzero(provider != rank.rank)
            away = away[np.argsort(provider[away], kind="stable")]
            parts.append((away, self._fetched(ids[away], provider[away], step)))
        rows = self._together(parts, ids.size)
        return torch.cat([rows, rows.new_empty(room, rows.shape[1])]) if room and isinstance(rows, Tensor) else rows

    def _fetched(self, ids: Ids, provider: np.ndarray, step: int) -> Rows:
        """Rows that other ranks provide, grouped by them."""
        rank = self.rank
        counts = np.bincount(provider, minlength=rank.world)
        label = Label("ask", step)
        with rank.span(label, "comm", rank.count(label, ID * (ids.size + sum(self.tell.gives)))):
            wanted = np.zeros(rank.world, np.int64)  # by each
            told = self.tell.forward(self.tell.pack(torch.from_numpy(counts)[:, None].to(rank.device)))
            wanted[np.flatnonzero(self.tell.take)] = told[:, 0].cpu().numpy()
            asks = Exchange(rank, np.split(np.arange(ids.size), np.cumsum(counts)[:-1]), wanted)
            theirs = asks.forward(asks.pack(torch.from_numpy(ids)[:, None].to(rank.device)))[:, 0].cpu().numpy()
        gives = Exchange(rank, np.split(np.arange(theirs.size), np.cumsum(wanted)[:-1]), counts)
        rows = self._provided(theirs)
        label = Label("fetch", step)
        with rank.span(label, "comm", rank.count(label, rows.nbytes)):
            return self._exchanged(gives, rows, ids)

    def _exchanged(self, exchange: Exchange, rows: Rows, ids: Ids) -> Rows:
        """What comes in exchange for `rows`: those of `ids`."""
        if isinstance(rows, Tensor):
            return exchange.forward(rows)
        return exchange.forward_sparse(rows, lengths_of(self.graph, ids))

    def _fill(self, store: Store) -> Rows:
        """The rank's cache: rows of its server's memory, and those that others send it once."""
        rank, label = self.rank, Label("fill", -1)
        ids = store.cached[rank.rank]
        sender = store.sender(rank.rank, ids)
        mine = np.flatnonzero(sender == rank.rank)
        parts = [(mine, self._host(ids[mine]))]
        if store.filled(self.job).any():
            of = [rows[store.sender(peer, rows) == rank.rank] if peer != rank.rank else rows[:0] for peer, rows in enumerate(store.cached)]
            away = np.flatnonzero(sender != rank.rank)
            away = away[np.argsort(sender[away], kind="stable")]
            ends = np.cumsum([len(rows) for rows in of])
            exchange = Exchange(rank, np.split(np.arange(ends[-1]), ends[:-1]), np.bincount(sender[away], minlength=rank.world))
            rows = self._host(np.concatenate(of))
            with rank.span(label, "comm", rank.count(label, rows.nbytes)):
                parts.append((away, self._exchanged(exchange, rows, ids[away])))
        return self._together(parts, ids.size)

    # -- pieces ------------------------------------------------------------------------------------------------------

    def _host(self, ids: Ids, room: int = 0) -> Rows:
        """From the server's memory, dense ones with room for more."""
        if self.store is not None and self.store.home is not None:
            elsewhere = ids[self.store.sender(self.rank.rank, ids) != self.rank.rank]
            assert not elsewhere.size, f"server {self.store.servers[self.rank.rank]} has no features of vertices {elsewhere[:8].tolist()}"
        if self.job.model.nonzeros:
            return sparse_features(self.graph, ids, self.job.workload, self.rank.device)
        return features(self.graph, ids, self.job.workload, self.rank.device, room)

    def _picked(self, ids: Ids) -> Rows:
        """From the rank's cache."""
        assert self.store is not None
        return self.cached.index_select(0, torch.from_numpy(self.store.slot(self.rank.rank)[ids].astype(np.int64)).to(self.rank.device))

    def _provided(self, ids: Ids) -> Rows:
        """For others: what the rank caches, the rest from its server's memory."""
        assert self.store is not None
        held = self.store.slot(self.rank.rank)[ids] >= 0
        places = np.flatnonzero(held), np.flatnonzero(~held)
        return self._together([(places[0], self._picked(ids[held])), (places[1], self._host(ids[~held]))], ids.size)

    def _together(self, parts: list[tuple[np.ndarray, Rows]], size: int) -> Rows:
        """Rows [size, F] of which each part has those at its places."""
        parts = [(places, rows) for places, rows in parts if places.size or not size]
        if len(parts) == 1 or not size:
            return self._in_order(*parts[0])
        if isinstance(parts[0][1], Tensor):
            out = torch.empty(size, self.job.model.features, dtype=dtype_of(self.job.workload), device=self.rank.device)
            for places, rows in parts:
                out.index_copy_(0, torch.from_numpy(places).to(self.rank.device), rows)
            return out
        return self._in_order(np.concatenate([places for places, _ in parts]), SparseRows.cat([rows for _, rows in parts]))

    def _in_order(self, places: np.ndarray, rows: Rows) -> Rows:
        """Rows that stand at these places, which are all there are."""
        if np.array_equal(places, np.arange(places.size)):
            return rows
        order = np.empty_like(places)
        order[places] = np.arange(places.size)
        return rows.index_select(0, torch.from_numpy(order).to(self.rank.device))

    def _count(self, kind: np.ndarray) -> None:
        if self.rank.recording:
            self.rows.update({CLASSES[i]: int(n) for i, n in enumerate(np.bincount(kind, minlength=len(CLASSES)))})


# -- memory that a server's ranks share ----------------------------------------------------------------------------------


def _share_features(rank: Rank, job: Job) -> None:
    """Let the graph's large dense features be those of the server's file, where a server has several ranks and they are not in one yet."""
    graph = job.graph
    assert graph is not None
    x = graph.x
    if not isinstance(x, np.ndarray) or isinstance(x, np.memmap) or x.nbytes < LARGE or len(set(job.servers)) == rank.world:
        return
    path = cache_dir() / "features" / f"{graph.stats.hash}.npy"
    if job.servers.index(job.servers[rank.rank]) == rank.rank:
        write_features(path, graph)
    dist.all_reduce(torch.zeros(1, device=rank.wire_device), group=rank.exchange_group)  # the file is there, or will not be
    map_features(path, graph)


def write_features(path: Path, graph: Graph) -> None:
    """Whole or not at all; a closed or full cache costs memory, not the answer."""
    assert isinstance(graph.x, np.ndarray)
    if _mapped(path, graph) is not None:
        return
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(temporary, "xb") as stream:
                np.save(stream, graph.x, allow_pickle=False)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


def map_features(path: Path, graph: Graph) -> bool:
    """Whether the graph's features are now pages of the file: this process's copy is gone then."""
    mapped = _mapped(path, graph)
    if mapped is not None:
        object.__setattr__(graph, "x", mapped)  # the same numbers: a Graph stays what it was
    return mapped is not None


def _mapped(path: Path, graph: Graph) -> np.memmap | None:
    """The file's array, if it has the graph's features by its name, shape and type; a shorter one cannot be mapped."""
    with contextlib.suppress(OSError, ValueError, EOFError):
        x = np.load(path, mmap_mode="r", allow_pickle=False)
        if isinstance(x, np.memmap) and (x.shape, x.dtype) == (graph.x.shape, graph.x.dtype):
            return x
    return None
