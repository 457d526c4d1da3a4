"""The sampler of a rank draws its share of every mini-batch, alone or together with its group.

Random numbers follow from the vertex (planner/graph/sampling.py), so any rank draws the same
neighbours. For layers l = L .. 1 the sampler does:

    draw l    draw neighbours of own rows of h_l
    ids l     (GSplit) send the ids of neighbours to their owners, and receive the own vertices that
              peers have drawn. Own rows of h_{l-1} are the rows of h_l, then new vertices, sorted

              With split='first', ids are sent for l = 2 only. Own rows of h_1 are then the rows
              that the group needs and this rank owns.

    lay       lay out a block per layer. The ids received say which rows the exchanges of the
              forward and backward pass send

If adjacency lists are spread over ranks, samplers ask each other to draw
(planner/strategies/minibatch/adjacency_store.py).

If no sampler asks another and neighbours are drawn on a GPU, blocks are laid out there, too
(device_sampling.py).

The sampler runs in the rank itself, or in separate processes (share_queue.py), which communicate
over Gloo with samplers of other ranks for the same batches. Spans and sent bytes are returned with
the share."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from gnnplan.executor.layers.blocks import weighted_block
from gnnplan.executor.layers.kernels import Block
from gnnplan.executor.layers.targets import weight_of
from gnnplan.executor.minibatch import device_sampling as sampling
from gnnplan.executor.minibatch.share import Ends, Part, Share
from gnnplan.executor.ranks.rank import Rank
from gnnplan.executor.ranks.recorder import now
from gnnplan.executor.ranks.rendezvous import join, launcher_env
from gnnplan.planner.graph.sampling import (
    Ids,
    Pairs,
    draw,
    fetched,
    key_of,
    pairs_in,
    taken,
)
from gnnplan.planner.ownership.minibatch import PUSHED, Batches
from gnnplan.planner.strategies.minibatch.adjacency_store import Structure, thinned
from gnnplan.planner.strategies.minibatch.supply import Supply
from gnnplan.planner.vocabulary.numbers import Bools, Group, Ints, offsets, ranges, split
from gnnplan.planner.vocabulary.schedule import Label
from gnnplan.planner.vocabulary.trace import Span, sampler_lane

# A sort takes less time than a pass over the graph's vertices with fewer ids than their 16th part.
SORTED = 16
_opened = itertools.count()  # numbers samplers: all ranks open them in the same order


@dataclass
class Sampled:
    """A share, with the spans and the bytes sent, by operation, of sampling it."""

    share: Share
    spans: list[Span] = field(default_factory=list)
    sent: dict[str, int] = field(default_factory=dict)


class Drawn(NamedTuple):
    """The neighbours drawn for one layer."""

    rows: Ids  # global ids of own rows of h_l [R]
    below: Ids  # global ids of own rows of h_{l-1}: `rows`, then new vertices
    indptr: Ids  # [R + 1]
    columns: NDArray[np.int32]  # global ids of the neighbours drawn, row after row
    exchanges_rows: bool  # ranks exchange rows before the layer
    halo: Ids  # global ids of rows of h_{l-1} that peers send
    gives: Sequence[Ids]  # for each rank, global ids of own rows of h_{l-1} to send
    takes: Ints  # number of halo rows from each rank [ranks]
    reads: Ids | None = None  # source rows, unless they are `below`, then `halo`


class Sampler:
    """The sequence of the shares of rank `me`: item t is the share of step t.

    edges: the kind of each layer's edges (executor/layers/layer.py). lists: the ranks that hold
    each adjacency list; None: every rank holds all. device: draws neighbours; None: the host draws.
    lays_on_device: the device also lays out blocks, which needs no data of other ranks.
    """

    lane = ""  # of the spans, if a thread of the rank calls the sampler
    turn, samplers = 0, 1  # this sampler's number, among the samplers of a rank that alternate

    def __init__(
        self,
        batches: Batches,
        me: int,
        edges: Sequence[str],
        timeout_s: float = 30.0,
        lists: Structure | None = None,
        device: torch.device | None = None,
        lays_on_device: bool = False,
    ) -> None:
        self.graph, self.workload = batches.graph, batches.workload
        self.member, self.whole = batches.member, batches.graph.csr_edges
        self.steps, self.groups, self.split = batches.steps, batches.groups, batches.split
        self.me, self.edges, self.timeout_s, self.lists = me, edges, timeout_s, lists
        self.group = self.groups[me]
        self.peers = [rank for rank, group in enumerate(self.groups) if group == self.group]
        self.place = self.peers.index(me)
        self.number = next(_opened)
        self._process_groups: dict[Group, dist.ProcessGroupGloo] = {}
        self.items_in, ins = batches.items_in, batches.graph.degree
        # before the fork: sampler processes share them
        self._degrees = ins, batches.graph.out_degree if batches.graph.stats.directed else ins
        if lists is not None:
            self.graph = thinned(batches.graph, lists.keeps(me))
        # workspaces [N]: the position of a vertex among a layer's sources; whether a row of the
        # vertex is here (false between batches)
        self._index = np.empty(self.graph.stats.vertices, dtype=np.int32)
        self._present = np.zeros(self._index.size, dtype=bool)
        # adjacency lists on the device that draws neighbours
        self.device_graph = None if device is None else sampling.DeviceGraph(self.graph, device)
        self.lays_on_device = lays_on_device

    def __getitem__(self, step: int) -> Sampled:
        workload, (epoch, number) = self.workload, divmod(step, self.steps)
        is_shared = len(self.peers) > 1
        asks = self.lists is not None and not is_shared  # owners have their lists
        all_items = self.items_in(epoch)[number]
        items = np.array_split(all_items, len(set(self.groups)))[self.group]
        total = weight_of(self.graph, workload, all_items)
        pairs = pairs_in(self.graph, workload, items, epoch, number)
        rows = items if pairs is None else pairs.ends
        if is_shared:
            rows = rows[self._owns(rows)]
        sampled = Sampled(Share(rows, all_items.size, total, []))
        if pairs is not None:
            sampled.share.ends = self._ends(pairs, rows)
        if self.lays_on_device:
            return self._lay_on_device(sampled, step)
        present = self._present
        present[rows] = True
        drawn: list[Drawn] = []  # the last layer first
        began = now()
        for hop, fanout in enumerate(workload.fanouts):
            layer = workload.layers - hop
            key = key_of(workload.seed, epoch, number, layer)
            label = Label("draw", step, layer=layer)
            if asks:
                indptr, columns = self._draw_together(sampled, rows, fanout, key, label)
            else:
                indptr, columns = self._draw(rows, fanout, key)
            neighbours, kept, reads = missing(present, [columns]), rows, None
            new, halo = neighbours, neighbours[:0]
            gives, takes = [neighbours[:0]] * len(self.groups), np.zeros(len(self.groups), np.int64)
            meets = is_shared and (self.split == "all" or (self.split == "first" and layer == 2))
            if meets:
                if self.split == "first":  # owners compute all rows that are needed, old and new
                    reads = neighbours = np.concatenate([rows, neighbours])
                    kept = reads[self._owns(reads)]
                    present[rows] = False
                    present[kept] = True
                owner = self.member[neighbours]
                asked = [neighbours[owner == place] for place in range(len(self.peers))]
                self._record(sampled, label, began)
                wanted = self._all_to_all(
                    sampled, Label("ids", step, layer=layer), asked, self.peers
                )
                began = now()
                new = missing(present, wanted)
                asked[self.place] = wanted[self.place] = neighbours[:0]
                halo = np.concatenate(asked)
                for peer, ids, given in zip(self.peers, asked, wanted, strict=True):
                    gives[peer], takes[peer] = given, ids.size
            elif is_shared:
                self._record(sampled, label, began)
                began = now()
            present[new] = True
            below = np.concatenate([kept, new])
            drawn.append(Drawn(rows, below, indptr, columns, meets, halo, gives, takes, reads))
            rows = below
        present[rows] = False
        if not is_shared and not asks:
            self._record(sampled, Label("draw", step), began)
        self._lay(sampled, step, drawn[::-1])
        return sampled

    def _ends(self, pairs: Pairs, own: Ids) -> Ends:
        """Select the group's pairs that this rank scores. own: ids of its rows of h_L.

        All members know all pairs, so they need not communicate.
        """
        index, ranks = self._index, len(self.groups)
        give, take = [own[:0]] * ranks, np.zeros(ranks, np.int64)
        remote = own[:0]
        index[own] = np.arange(own.size, dtype=np.int32)
        if len(self.peers) > 1:
            member = self.member
            for place, peer in enumerate(self.peers):
                wanted = fetched([pairs], member, place)
                if peer == self.me:
                    remote = wanted
                give[peer] = index[wanted[member[wanted] == self.place]].astype(np.int64)
            take[self.peers] = np.bincount(member[remote], minlength=len(self.peers))
            pairs = pairs.of(member[pairs.heads] == self.place)
            index[remote] = own.size + np.arange(remote.size, dtype=np.int32)
        places = Pairs(index[pairs.heads].astype(np.int64), index[pairs.tails].astype(np.int64))
        return Ends(places, remote, give, take, len(self.peers) > 1)

    def _owns(self, ids: Ids) -> Bools:
        """Whether this rank owns each of these vertices, in a group of several ranks."""
        return np.asarray(self.member[ids] == self.place)

    def _draw(
        self, rows: Ids, fanout: int, key: NDArray[np.uint64]
    ) -> tuple[Ids, NDArray[np.int32]]:
        """Draw neighbours of vertices whose lists are here -> (indptr [R + 1], neighbours)."""
        if self.lists is not None:
            remote = rows[~self.lists.keeps(self.me)[rows]]
            assert not remote.size, (
                f"rank {self.me} has no adjacency lists of vertices {remote[:8].tolist()}"
            )
        if self.device_graph is not None:
            return self.device_graph.draw(rows, fanout, key)
        indptr, places = draw(self.graph, rows, fanout, key)
        return indptr, self.graph.indices[places]

    def _draw_together(
        self, sampled: Sampled, rows: Ids, fanout: int, key: NDArray[np.uint64], label: Label
    ) -> tuple[Ids, NDArray[np.int32]]:
        """Draw neighbours of any vertices, by the ranks with their lists. All ranks call it."""
        assert self.lists is not None
        everyone = range(len(self.groups))
        provider = self.lists.provider(self.me, rows)
        counts = taken(self._degrees[0][rows], fanout)  # neighbours to be drawn of each row
        order = np.argsort(provider, kind="stable")
        asked = split(rows[order], np.bincount(provider, minlength=len(everyone)))
        wanted = self._all_to_all(sampled, label._replace(op="ask_edges"), asked, everyone)
        began = now()
        indptr, columns = self._draw(np.concatenate(wanted), fanout, key)
        found = np.split(columns, indptr[np.cumsum([ids.size for ids in wanted])[:-1]])
        self._record(sampled, label, began)
        takes = np.bincount(provider, weights=counts, minlength=len(everyone)).astype(np.int64)
        found = self._exchange(sampled, label._replace(op="edges"), found, takes.tolist(), everyone)
        # neighbours are in the order of providers: move them to the order of rows
        indptr = offsets(counts)
        columns = np.empty(counts.sum(), columns.dtype)
        columns[ranges(indptr[order], counts[order])] = np.concatenate(found)
        return indptr, columns

    def _lay(self, sampled: Sampled, step: int, drawn: Sequence[Drawn]) -> None:
        """Make the share's parts from the neighbours drawn for layers 1 .. L."""
        with self._span(sampled, Label("lay", step)):
            sampled.share.parts = [
                self._part(kind, layer) for kind, layer in zip(self.edges, drawn, strict=True)
            ]

    def _lay_on_device(self, sampled: Sampled, step: int) -> Sampled:
        """Draw and lay out on the device, and copy ids of rows to the host.

        Layer 1's source rows begin with the source rows of every other layer.
        """
        workload, graph, began = self.workload, self.device_graph, now()
        assert graph is not None
        batch = workload.seed, *divmod(step, self.steps)
        keys = [key_of(*batch, workload.layers - hop) for hop in range(workload.layers)]
        drawn = graph.draw_layers(sampled.share.own, workload.fanouts, keys)
        self._record(sampled, Label("draw", step), began)
        with self._span(sampled, Label("lay", step)):
            blocks = [
                graph.lay_block(kind, each, workload)
                for kind, each in zip(self.edges, drawn, strict=True)
            ]
            device_ids = drawn[0].below.long()
            ids = device_ids.cpu().numpy()
        gives, takes = [ids[:0]] * len(self.groups), np.zeros(len(self.groups), np.int64)
        sampled.share.parts = [
            Part(ids[:size], size, gives, takes, False, block, ids=device_ids[:size])
            for block in blocks
            for size in [block.n_src]
        ]
        return sampled

    def _part(self, edges: str, drawn: Drawn) -> Part:
        """Make one layer's part. edges: their kind."""
        index, source, selection = self._index, np.concatenate([drawn.below, drawn.halo]), None
        index[source] = np.arange(source.size, dtype=np.int32)
        give = [index[ids].astype(np.int64) for ids in drawn.gives]
        if drawn.reads is not None:
            selection = Block(np.arange(drawn.reads.size + 1), index[drawn.reads], source.size)
            source = drawn.reads
            index[source] = np.arange(source.size, dtype=np.int32)
        # no name holds the drawn columns while the block is made
        block = weighted_block(
            self.graph,
            edges,
            drawn.rows,
            source,
            drawn.indptr,
            index[drawn.columns],
            self.workload,
            self._degrees,
            drawn=True,
        )
        return Part(
            source, drawn.below.size, give, drawn.takes, drawn.exchanges_rows, block, selection
        )

    def _all_to_all(
        self, sampled: Sampled, label: Label, asked: Sequence[np.ndarray], ranks: Sequence[int]
    ) -> list[np.ndarray]:
        """Run an all-to-all of counts, then of numbers, among some ranks."""
        counts, ones = [np.array([len(ids)]) for ids in asked], [1] * len(ranks)
        received = self._exchange(sampled, label._replace(direction="n"), counts, ones, ranks)
        return self._exchange(sampled, label, asked, [int(n[0]) for n in received], ranks)

    def _exchange(
        self,
        sampled: Sampled,
        label: Label,
        parts: Sequence[np.ndarray],
        takes: list[int],
        ranks: Sequence[int],
    ) -> list[np.ndarray]:
        """Run an all-to-all among some ranks, with a span.

        parts: numbers for each rank; this rank's own are returned to it, and are no traffic.
        takes: how many numbers each rank sends here.
        """
        outgoing = torch.from_numpy(np.concatenate(parts))
        incoming = torch.empty(sum(takes), dtype=outgoing.dtype)
        asked = incoming, outgoing, takes, [len(part) for part in parts], dist.AllToAllOptions()
        nbytes = outgoing.nbytes - parts[ranks.index(self.me)].nbytes
        with self._span(sampled, label, nbytes):
            self._process_group(ranks).alltoall_base(*asked).wait()  # type: ignore[attr-defined]
        return [part.numpy() for part in torch.split(incoming, takes)]

    def _process_group(self, among: Sequence[int]) -> dist.ProcessGroupGloo:
        """Return the group of these ranks' samplers; open it in the process that uses it."""
        ranks = tuple(among)
        if ranks not in self._process_groups:
            limit = timedelta(seconds=self.timeout_s)
            store = join(launcher_env(), limit)
            named = PrefixStore(f"sampler {self.number} {self.turn} {ranks}", store)
            self._process_groups[ranks] = dist.ProcessGroupGloo(
                named, ranks.index(self.me), len(ranks), limit
            )
        return self._process_groups[ranks]

    def _record(self, sampled: Sampled, label: Label, began: float, nbytes: int = 0) -> None:
        """Record a span that ends now."""
        lane = self.lane or sampler_lane(label.step, self.samplers)
        sampled.spans.append(
            Span(str(label), label.op, self.me, lane, began, now(), nbytes, label.step)
        )

    @contextmanager
    def _span(self, sampled: Sampled, label: Label, nbytes: int = 0) -> Iterator[None]:
        began = now()
        yield
        self._record(sampled, label, began, nbytes)
        if nbytes:
            sampled.sent[label.op] = sampled.sent.get(label.op, 0) + nbytes


def missing(present: Bools, parts: Sequence[np.ndarray]) -> Ids:
    """Return the distinct vertices of the parts that are not `present` [N], sorted."""
    ids = np.concatenate(parts)
    if present.size > SORTED * ids.size:
        new = np.sort(ids[~present[ids]]).astype(np.int64)
        return new[np.diff(new, prepend=-1) > 0]
    found = np.zeros(present.size, dtype=bool)
    found[ids] = True
    return np.flatnonzero(found & ~present)


def drawing_device(rank: Rank, supply: Supply) -> torch.device | None:
    """Return the rank's GPU if it draws neighbours; None: the host draws."""
    return rank.device if rank.device.type == "cuda" and supply.draws_there else None


class SourceSampler(Sampler):
    """A sampler that pushes layer 1's edges to their sources' owners."""

    def _lay(self, sampled: Sampled, step: int, drawn: Sequence[Drawn]) -> None:
        if len(self.peers) == 1:
            super()._lay(sampled, step, drawn)
            return
        first, second, *above = drawn
        wanted, messages = self._split_edges(first)
        received = self._all_to_all(sampled, Label("push", step), messages, self.peers)
        with self._span(sampled, Label("lay", step)):
            asked = [block[PUSHED:][: block[0]].astype(np.int64) for block in received]
            sums, rows = self._sum_part(first, received)
            sampled.share.parts = [
                sums,
                self._read_sums(second, rows, asked, wanted),
                *(
                    self._part(kind, layer)
                    for kind, layer in zip(self.edges[2:], above, strict=True)
                ),
            ]

    def _split_edges(self, first: Drawn) -> tuple[list[Ids], list[np.ndarray]]:
        """Split layer 1's edges by the sources' owners.

        Returns, by owner, the places of the rows with edges there, and a message: the number of
        rows, their ids, the number of edges of each row, and the sources of these edges.
        """
        reader = np.repeat(np.arange(first.rows.size), np.diff(first.indptr))
        row_owner, edge_owner = self.member[first.rows], self.member[first.columns]
        wanted, messages = [], []
        for place in range(len(self.peers)):
            mask = edge_owner == place
            counts = np.bincount(reader[mask], minlength=first.rows.size)
            rows = np.flatnonzero((counts > 0) | (row_owner == place))
            parts = [[rows.size], first.rows[rows], counts[rows], first.columns[mask]]
            wanted.append(rows)
            messages.append(np.concatenate(parts).astype(np.int32))
        return wanted, messages

    def _sum_part(self, first: Drawn, received: Sequence[np.ndarray]) -> tuple[Part, Ids]:
        """Make layer 1's part over own sources -> the part, ids of its rows (own rows first)."""
        parts = [np.split(block[PUSHED:], [block[0], 2 * block[0]]) for block in received]
        ids, counts, columns = (np.concatenate(field) for field in zip(*parts, strict=True))
        # all ranks that need a row have drawn the same edges of it
        rows, first_of = np.unique(ids.astype(np.int64), return_index=True)
        is_own = self._owns(rows)
        order = np.concatenate([np.flatnonzero(is_own), np.flatnonzero(~is_own)])
        rows, first_of, own = rows[order], first_of[order], int(is_own.sum())
        ends, lengths = np.cumsum(counts), counts[first_of]
        indptr = offsets(lengths)
        columns = columns[ranges(ends[first_of] - lengths, lengths)]
        self._present[rows[:own]] = True
        source = np.concatenate([rows[:own], missing(self._present, [columns])])
        self._present[rows[:own]] = False
        self._index[source] = np.arange(source.size, dtype=np.int32)
        part = own, taken(self._degrees[0][rows], self.workload.fanouts[-1])
        laid = rows, source, indptr, self._index[columns], self.workload, self._degrees
        block = weighted_block(self.graph, self.edges[0], *laid, drawn=True, part=part)
        return Part(source, source.size, first.gives, first.takes, False, block), rows

    def _read_sums(
        self, second: Drawn, rows: Ids, asked: Sequence[Ids], wanted: Sequence[Ids]
    ) -> Part:
        """Make layer 2's part. Its sources add up partial sums of `rows`, here and on peers."""
        part, index = self._part(self.edges[1], second), self._index
        index[rows] = np.arange(rows.size, dtype=np.int32)
        give, take = list(second.gives), second.takes.copy()
        places, ends = [], rows.size
        for peer, ids, readers in zip(self.peers, asked, wanted, strict=True):
            if peer == self.me:
                places.append(index[ids].astype(np.int64))
                continue
            give[peer], take[peer] = index[ids].astype(np.int64), readers.size
            places.append(np.arange(ends, ends + readers.size))
            ends += readers.size
        part.local, part.give, part.take, part.exchanges_rows = rows.size, give, take, True
        into = np.concatenate(wanted)
        counts = np.bincount(into, minlength=part.source.size)
        order = np.argsort(into, kind="stable")
        indptr = offsets(counts)
        part.selection, part.adds = Block(indptr, np.concatenate(places)[order], ends), True
        return part
