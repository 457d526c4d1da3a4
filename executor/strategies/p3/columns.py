"""A rank's columns of the features, which it reads for the blocks of all its peers.

They are in its server's memory or in a mapped file. With a planned store the rank caches those of
the rows that are read most often.
"""

from __future__ import annotations

from collections import Counter
from typing import TypeVar

import numpy as np
import torch

from gnnplan.executor.layers.blocks import dtype_of, sparse_rows, take_rows
from gnnplan.executor.layers.copies import staging
from gnnplan.executor.layers.kernels import FeatureRows, on_device, sent
from gnnplan.executor.minibatch.feature_store import by_class, merged
from gnnplan.executor.ranks.rank import Rank
from gnnplan.planner.graph.sampling import Ids
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies.minibatch.feature_store import HIT, HOST, Store
from gnnplan.planner.vocabulary.schedule import Label

T = TypeVar("T")


class Columns:
    """These columns of all vertices; without a `store` none are cached.

    rows: how many rows it has read, by class.
    """

    def __init__(
        self, rank: Rank, problem: Problem, columns: range, store: Store | None = None
    ) -> None:
        self.rank, self.problem, self.columns, self.store = rank, problem, columns, store
        self.rows: Counter[str] = Counter()
        x = problem.data.x
        self.x = x[:, columns.start : columns.stop]
        if isinstance(x, np.ndarray) and not isinstance(x, np.memmap):
            self.x = np.ascontiguousarray(self.x)
        if store is not None:
            self.cached = self._host(store.cached[rank.rank])

    def read(self, ids: Ids, step: int, beside: T, laid: int) -> tuple[FeatureRows, T]:
        """The columns of these vertices [R, columns] on the device, in order.

        `beside`: tensors that are loaded with them, `laid` bytes.
        """
        rank, store = self.rank, self.store
        kind = store.of(rank.rank, ids)[0] if store else np.full(ids.size, HOST)
        if rank.recorder.recording:
            self.rows.update(by_class(kind))
        if store is None:
            return self._load(ids, step, beside, laid)
        hits, in_host = np.flatnonzero(kind == HIT), np.flatnonzero(kind == HOST)
        loaded, there = self._load(ids[in_host], step, beside, laid)
        parts: list[tuple[Ids, FeatureRows]] = [(in_host, loaded)]
        if store.caches:
            with rank.recorder.span(Label("pick", step), "compute"):
                places = torch.from_numpy(store.slot(rank.rank)[ids[hits]].astype(np.int64))
                parts.append((hits, self.cached.index_select(0, *sent([places], rank.device))))
        return merged(parts, ids.size, rank.device), there

    def _load(self, ids: Ids, step: int, beside: T, laid: int) -> tuple[FeatureRows, T]:
        nbytes = int(self.problem.features_bytes(ids, self.columns).sum()) + laid
        with self.rank.recorder.span(Label("load", step), "copy", nbytes):
            return self._host(ids), on_device(beside, self.rank.device)

    def _host(self, ids: Ids) -> FeatureRows:
        workload, device = self.problem.workload, self.rank.device
        if not isinstance(self.x, np.ndarray):
            return sparse_rows(self.x[ids], workload, device)
        rows = np.empty((ids.size, self.x.shape[1]), self.x.dtype)
        if device.type == "cuda":
            out = torch.empty(rows.shape, dtype=dtype_of(workload), device=device)
            staging(device).load(
                out,
                torch.from_numpy(rows).dtype,
                lambda start, stop, into: take_rows(self.x, ids[start:stop], into.numpy()),
            )
            return out
        return torch.from_numpy(take_rows(self.x, ids, rows)).to(device, dtype_of(workload))
