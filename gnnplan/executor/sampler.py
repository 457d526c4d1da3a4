"""A rank's sampler: the share of every mini-batch, drawn by vertex (planner/sampling.py), alone or together with its group.

    for l = L .. 1    draw l: neighbours of my rows of h_l
                      ids l: tell owners which of their vertices I have reached; hear which of mine the others have (GSplit)
                      my rows of h_{l-1}: those of h_l, then what is new, in order
    lay: a block per layer. Who asked for what is the shuffle index, for the exchanges of both passes

It runs in the rank itself, or in a process of its own that is ahead by some batches (torch's DataLoader): then samplers talk to each
other over Gloo, beside the ranks. Spans and bytes come along with the share.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from gnnplan.executor.data import weighted_block
from gnnplan.executor.share import Part, Share
from gnnplan.executor.worker import Rank, die_with_parent, now
from gnnplan.planner.minibatch import Batches, shares
from gnnplan.planner.sampling import Ids, draw, key_of, seeds_of
from gnnplan.planner.schedule import Label
from gnnplan.planner.strategies.batchwise import ID
from gnnplan.planner.trace import Span

_opened = itertools.count()  # samplers of this process: all ranks open them in the same order


@dataclass
class Sampled:
    """A share, and what making it took: spans, and bytes sent by operation."""

    share: Share
    spans: list[Span] = field(default_factory=list)
    sent: dict[str, int] = field(default_factory=dict)

    def pin_memory(self) -> Sampled:
        """In page-locked memory, for a copy to a GPU that goes on beside computation (DataLoader calls it)."""
        for part in self.share.parts:
            part.block = part.block.pinned()
        return self


class Sampler(Dataset[Sampled]):
    """Item t is rank `me`'s share of step t. `edges`: kinds of the layers' (models.Layer)."""

    def __init__(self, batches: Batches, me: int, edges: Sequence[str], timeout_s: float = 30.0) -> None:
        self.graph, self.workload, self.member, self.edges, self.me = batches.graph, batches.workload, batches.member, edges, me
        self.steps, self.groups, self.timeout_s = batches.steps, batches.groups, timeout_s
        self.group = self.groups[me]
        self.peers = [rank for rank, group in enumerate(self.groups) if group == self.group]
        self.place = self.peers.index(me)
        self.number, self.wired = next(_opened), self.peers
        self._epoch, self._seeds = -1, list[Ids]()

    @cached_property
    def _wires(self) -> dist.ProcessGroupGloo:
        """To the samplers of those `wired`, of whichever processes: opened by the one that uses it."""
        limit = timedelta(seconds=self.timeout_s)
        store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=limit)
        return dist.ProcessGroupGloo(dist.PrefixStore(f"sampler {self.number} {self.wired[0]}", store), self.wired.index(self.me),
                                     len(self.wired), limit)  # fmt: skip

    @cached_property
    def _degrees(self) -> tuple[np.ndarray, np.ndarray]:
        """In and out [N]."""
        ins = self.graph.degree
        return ins, np.bincount(self.graph.indices, minlength=ins.size) if self.graph.stats.directed else ins

    @cached_property
    def _where(self) -> np.ndarray:
        """Scratch [N]: the position of a vertex among a layer's sources."""
        return np.empty(self.graph.stats.vertices, dtype=np.int32)

    def __getitem__(self, step: int) -> Sampled:
        w, graph, (epoch, number) = self.workload, self.graph, divmod(step, self.steps)
        if epoch != self._epoch:
            self._epoch, self._seeds = epoch, seeds_of(graph, w.batch, w.seed, epoch)
        made = Sampled(Share(np.zeros(0, np.int64), self._seeds[number].size, []))
        seeds = shares(self._seeds[number], len(set(self.groups)))[self.group]
        splits = len(self.peers) > 1
        rows = seeds[self.member[seeds] == self.place] if splits and self.member is not None else seeds
        made.share.own = rows
        here = np.zeros(graph.stats.vertices, dtype=bool)
        here[rows] = True
        drawn: list[tuple[Any, ...]] = []  # per layer, last first: rows of h_l and of h_{l-1}, their edges, halo, gives, takes
        began = now()
        for out, fanout in enumerate(w.fanouts):
            layer = w.layers - out
            indptr, places = draw(graph, rows, fanout, key_of(w.seed, epoch, number, layer))
            columns = graph.indices[places]
            near = np.zeros(here.size, dtype=bool)
            near[columns] = True
            reached = np.flatnonzero(near & ~here)
            halo, gives, takes = reached[:0], [reached[:0]] * len(self.groups), np.zeros(len(self.groups), np.int64)
            if splits:
                assert self.member is not None
                owner = self.member[reached]
                asked = [reached[owner == place] if place != self.place else reached[:0] for place in range(len(self.peers))]
                mine = reached[owner == self.place]
                self._note(made, Label("draw", step, layer=layer), began)
                with self._span(made, Label("ids", step, layer=layer), ID * (sum(map(len, asked)) + len(self.peers) - 1)):
                    wanted = self._swap(asked)
                began = now()
                near[:] = False
                for ids in (mine, *wanted):
                    near[ids] = True
                new = np.flatnonzero(near & ~here)
                halo = np.concatenate(asked)
                for peer, ids, theirs in zip(self.peers, asked, wanted, strict=True):
                    gives[peer], takes[peer] = theirs, ids.size
            else:
                new = reached
            here[new] = True
            below = np.concatenate([rows, new])
            drawn.append((rows, below, indptr, columns, halo, gives, takes))
            rows = below
        if not splits:
            self._note(made, Label("draw", step), began)
        self._lay(made, step, drawn[::-1])
        return made

    def _lay(self, made: Sampled, step: int, drawn: Sequence[tuple[Any, ...]]) -> None:
        with self._span(made, Label("lay", step)):
            made.share.parts = [self._part(kind, *layer) for kind, layer in zip(self.edges, drawn, strict=True)]

    def _part(self, edges: str, rows: Ids, below: Ids, indptr: Ids, columns: np.ndarray, halo: Ids, gives: Sequence[Ids],
              takes: np.ndarray) -> Part:  # fmt: skip
        where, source = self._where, np.concatenate([below, halo])
        where[source] = np.arange(source.size, dtype=np.int32)
        block = weighted_block(self.graph, edges, rows, source, indptr, where[columns], self.workload, self._degrees, drawn=True)
        return Part(source, below.size, [where[ids].astype(np.int64) for ids in gives], takes, len(self.peers) > 1, block)

    def _swap(self, asked: Sequence[np.ndarray]) -> list[np.ndarray]:
        """All-to-all among those wired: how many numbers, then which."""
        counts = torch.tensor([len(ids) for ids in asked])
        coming = torch.empty_like(counts)
        options = dist.AllToAllOptions()
        self._wires.alltoall_base(coming, counts, [], [], options).wait()
        took = coming.tolist()
        leaving = torch.from_numpy(np.concatenate(asked))
        out = torch.empty(sum(took), dtype=leaving.dtype)
        self._wires.alltoall_base(out, leaving, took, counts.tolist(), options).wait()
        return [ids.numpy() for ids in out.split(took)]

    def _note(self, made: Sampled, label: Label, began: float, nbytes: int = 0) -> None:
        made.spans.append(Span(str(label), label.op, self.me, "host", began, now(), nbytes, label.step))

    @contextmanager
    def _span(self, made: Sampled, label: Label, nbytes: int = 0) -> Iterator[None]:
        began = now()
        yield
        self._note(made, label, began, nbytes)
        if nbytes:
            made.sent[label.op] = made.sent.get(label.op, 0) + nbytes


class Arriving:
    """Shares in the order of steps: made when they are asked for, or ahead by a process of their own."""

    def __init__(self, rank: Rank, sampler: Sampler, prefetch: int) -> None:
        self.rank, self.sampler, self.prefetch = rank, sampler, prefetch
        self.ahead: Iterator[Sampled] | None = None
        if prefetch:
            self.ahead = iter(DataLoader(
                sampler, batch_size=None, sampler=itertools.count(), num_workers=1, prefetch_factor=prefetch,
                multiprocessing_context="fork", worker_init_fn=_begin, pin_memory=rank.device.type == "cuda",
            ))  # fmt: skip

    def next(self, step: int) -> Share:
        rank = self.rank
        if self.ahead is None:
            rank.doing = str(Label("draw", step))
            made = self.sampler[step]
        else:
            with rank.span(Label("wait", step), "compute"):
                made = next(self.ahead)
        if rank.recording:
            for op, nbytes in made.sent.items():
                rank.sent[op] = rank.sent.get(op, 0) + nbytes
            if step < rank.traced:
                rank.spans += made.spans
        return made.share

    def close(self) -> None:
        """The sampler's process ends too."""
        self.ahead = None


def _begin(worker: int) -> None:
    die_with_parent()
    torch.set_num_threads(1)
