"""A rank's sampler: the share of every mini-batch, drawn by vertex (planner/sampling.py), alone or together with its group.

    for l = L .. 1    draw l: neighbours of my rows of h_l
                      ids l: tell owners which of their vertices I have reached; hear which of mine the others have (GSplit)
                      my rows of h_{l-1}: those of h_l, then what is new, in order
    lay: a block per layer. Who asked for what is the shuffle index, for the exchanges of both passes

Where the structure is spread (planner/structure.py) it has its share of the adjacency lists, and the draws of others from theirs:

    for l = L .. 1    ask_edges l: tell those who have lists that I lack; hear who lacks mine
                      draw l: neighbours of my rows whose lists I have, and of what I was asked for
                      edges l: neighbours there and back

It runs in the rank itself, or in a process of its own that is ahead by some batches (torch's DataLoader): then samplers talk to each
other over Gloo, beside the ranks. Spans and bytes come along with the share.
"""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property, partial
from multiprocessing.synchronize import Event
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from gnnplan.executor import sampling
from gnnplan.executor.data import weighted_block
from gnnplan.executor.share import Part, Share
from gnnplan.executor.worker import Rank, attempt, die_with_parent, now
from gnnplan.planner.graph import Graph
from gnnplan.planner.job import Job
from gnnplan.planner.minibatch import Batches, shares
from gnnplan.planner.sampling import Ids, draw, key_of, seeds_of, taken
from gnnplan.planner.schedule import Label
from gnnplan.planner.strategies.batchwise import ID, Features, Lists, lists_there
from gnnplan.planner.structure import NEIGHBOUR, Structure, thinned
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
    """Item t is rank `me`'s share of step t. `edges`: kinds of the layers' (models.Layer). `lists`: of what vertices it has some. `device`:
    what draws, if not the host."""

    def __init__(self, batches: Batches, me: int, edges: Sequence[str], timeout_s: float = 30.0, lists: Structure | None = None,
                 device: torch.device | None = None) -> None:  # fmt: skip
        self.graph, self.workload, self.member, self.edges, self.me = batches.graph, batches.workload, batches.member, edges, me
        self.steps, self.groups, self.timeout_s = batches.steps, batches.groups, timeout_s
        self.group = self.groups[me]
        self.peers = [rank for rank, group in enumerate(self.groups) if group == self.group]
        self.place = self.peers.index(me)
        self.number, self._wires = next(_opened), dict[tuple[int, ...], dist.ProcessGroupGloo]()
        self._epoch, self._seeds = -1, list[Ids]()
        self.lists = lists
        if lists is not None:
            self._degrees = degrees(batches.graph)
            self.graph = thinned(batches.graph, lists.keeps(me))
        self._there = None if device is None else sampling.Lists(self.graph, device)

    def _wired(self, among: Sequence[int]) -> dist.ProcessGroupGloo:
        """To these ranks' samplers, of whichever processes: opened by the one that uses it."""
        ranks = tuple(among)
        if ranks not in self._wires:
            limit = timedelta(seconds=self.timeout_s)
            store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=limit)
            mine = dist.PrefixStore(f"sampler {attempt()} {self.number} {ranks}", store)
            self._wires[ranks] = dist.ProcessGroupGloo(mine, ranks.index(self.me), len(ranks), limit)
        return self._wires[ranks]

    @cached_property
    def _degrees(self) -> tuple[np.ndarray, np.ndarray]:
        return degrees(self.graph)

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
        together = self.lists is not None and self.lists.asks
        drawn: list[tuple[Any, ...]] = []  # per layer, last first: rows of h_l and of h_{l-1}, their edges, halo, gives, takes
        began = now()
        for out, fanout in enumerate(w.fanouts):
            layer = w.layers - out
            key = key_of(w.seed, epoch, number, layer)
            if together:
                indptr, columns = self._draw_together(made, rows, fanout, key, Label("draw", step, layer=layer))
            else:
                indptr, columns = self._draw(rows, fanout, key)
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
                    wanted = self._swap(asked, self.peers)
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
        if not splits and not together:
            self._note(made, Label("draw", step), began)
        self._lay(made, step, drawn[::-1])
        return made

    def _draw(self, rows: Ids, fanout: int, key: np.ndarray) -> tuple[Ids, np.ndarray]:
        """(indptr [R+1], neighbours) of vertices whose lists are here."""
        if self.lists is not None:
            away = rows[~self.lists.keeps(self.me)[rows]]
            assert not away.size, f"rank {self.me} has no adjacency lists of vertices {away[:8].tolist()}"
        if self._there is not None:
            return self._there.draw(rows, fanout, key)
        indptr, places = draw(self.graph, rows, fanout, key)
        return indptr, self.graph.indices[places]

    def _draw_together(self, made: Sampled, rows: Ids, fanout: int, key: np.ndarray, label: Label) -> tuple[Ids, np.ndarray]:
        """Of any vertices: from lists that are elsewhere it is drawn there, and here what others ask for. All ranks come here."""
        assert self.lists is not None
        everyone, me = range(len(self.groups)), self.me
        provider, each = self.lists.provider(me, rows), taken(self._degrees[0][rows], fanout)
        order = np.argsort(provider, kind="stable")
        asked = np.split(rows[order], np.cumsum(np.bincount(provider, minlength=len(everyone)))[:-1])
        mine, asked[me] = asked[me], rows[:0]
        with self._span(made, label._replace(op="ask_edges"), ID * (rows.size - mine.size + len(everyone) - 1)):
            wanted = self._swap(asked, everyone)
        began = now()
        wanted[me] = mine
        indptr, columns = self._draw(np.concatenate(wanted), fanout, key)
        found = np.split(columns, indptr[np.cumsum([ids.size for ids in wanted])[:-1]])
        self._note(made, label, began)
        own, found[me] = found[me], columns[:0]
        coming = np.bincount(provider, weights=each, minlength=len(everyone)).astype(np.int64)
        coming[me] = 0
        with self._span(made, label._replace(op="edges"), NEIGHBOUR * (columns.size - own.size)):
            found = self._exchange(found, coming.tolist(), everyone)
        found[me] = own
        indptr, columns = np.concatenate([[0], np.cumsum(each)]), np.empty(each.sum(), columns.dtype)
        each = each[order]  # as they have come
        columns[np.repeat(indptr[order] - np.cumsum(each) + each, each) + np.arange(columns.size)] = np.concatenate(found)
        return indptr, columns

    def _lay(self, made: Sampled, step: int, drawn: Sequence[tuple[Any, ...]]) -> None:
        with self._span(made, Label("lay", step)):
            made.share.parts = [self._part(kind, *layer) for kind, layer in zip(self.edges, drawn, strict=True)]

    def _part(self, edges: str, rows: Ids, below: Ids, indptr: Ids, columns: np.ndarray, halo: Ids, gives: Sequence[Ids],
              takes: np.ndarray) -> Part:  # fmt: skip
        where, source = self._where, np.concatenate([below, halo])
        where[source] = np.arange(source.size, dtype=np.int32)
        block = weighted_block(self.graph, edges, rows, source, indptr, where[columns], self.workload, self._degrees, drawn=True)
        return Part(source, below.size, [where[ids].astype(np.int64) for ids in gives], takes, len(self.peers) > 1, block)

    def _swap(self, asked: Sequence[np.ndarray], among: Sequence[int]) -> list[np.ndarray]:
        """All-to-all among some: how many numbers, then which."""
        counts = torch.tensor([len(ids) for ids in asked])
        coming = torch.empty_like(counts)
        self._wired(among).alltoall_base(coming, counts, [], [], dist.AllToAllOptions()).wait()
        return self._exchange(asked, coming.tolist(), among)

    def _exchange(self, leaving: Sequence[np.ndarray], coming: list[int], among: Sequence[int]) -> list[np.ndarray]:
        """All-to-all of so many numbers."""
        wire = torch.from_numpy(np.concatenate(leaving))
        out = torch.empty(sum(coming), dtype=wire.dtype)
        self._wired(among).alltoall_base(out, wire, coming, [len(part) for part in leaving], dist.AllToAllOptions()).wait()
        return [part.numpy() for part in out.split(coming)]

    def _note(self, made: Sampled, label: Label, began: float, nbytes: int = 0) -> None:
        made.spans.append(Span(str(label), label.op, self.me, "host", began, now(), nbytes, label.step))

    @contextmanager
    def _span(self, made: Sampled, label: Label, nbytes: int = 0) -> Iterator[None]:
        began = now()
        yield
        self._note(made, label, began, nbytes)
        if nbytes:
            made.sent[label.op] = made.sent.get(label.op, 0) + nbytes


def drawing_device(rank: Rank, job: Job, prefetch: int, store: Features | None, lists: Lists | None) -> torch.device | None:
    """The rank's GPU where the cluster says that GPUs sample and the lists fit there; not ahead, since a fork has no CUDA."""
    draws = rank.device.type == "cuda" and not prefetch and lists_there(job, store, lists) == 1.0
    return rank.device if draws else None


def degrees(graph: Graph) -> tuple[np.ndarray, np.ndarray]:
    """In and out [N]."""
    ins = graph.degree
    return ins, np.bincount(graph.indices, minlength=ins.size) if graph.stats.directed else ins


class Arriving:
    """Shares in the order of steps, from the `first` on: made when they are asked for, or ahead by a process of their own."""

    def __init__(self, rank: Rank, sampler: Sampler, prefetch: int, first: int = 0) -> None:
        self.rank, self.sampler, self.prefetch = rank, sampler, prefetch
        self.ahead: Iterator[Sampled] | None = None
        if prefetch:
            gc.collect()
            gc.freeze()  # a fork has none of our threads: it would wait for them for ever if it collected a process group of ours
            forked = multiprocessing.get_context("fork").Event()
            try:
                self.ahead = iter(DataLoader(
                    sampler, batch_size=None, sampler=itertools.count(first), num_workers=1, prefetch_factor=prefetch,
                    multiprocessing_context="fork", worker_init_fn=partial(_begin, forked), pin_memory=rank.device.type == "cuda",
                ))  # fmt: skip
            finally:
                gc.unfreeze()
            # Who forks while another's sampler connects to the store in it has a sampler with the name resolver's lock taken, for ever
            rank.await_all(rank.exchange_group)
            forked.set()

    def next(self, step: int) -> Share:
        rank = self.rank
        if self.ahead is None:
            rank.doing.begin("host", str(Label("draw", step)))
            made = self.sampler[step]
            rank.doing.end("host")
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


def _begin(forked: Event, worker: int) -> None:
    die_with_parent()
    torch.set_num_threads(1)
    forked.wait()
