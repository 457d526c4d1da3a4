"""A rank's sampler draws its share of every mini-batch, alone or together with its group.

Draws are by vertex (planner/graph/sampling.py), so it does not matter who draws. For layers
l = L .. 1:

    draw l    neighbours of my rows of h_l
    ids l     (GSplit) tell owners which of their vertices I have reached; hear which of mine the
              others have reached. My rows of h_{l-1} are those of h_l, then the new ones, sorted

              (where the first layer alone is split) for l = 2 only. Down to h_1 my rows are all
              that my seeds need; then those that I own of what anyone needs

    lay       a block per layer. Who asked for what tells the exchanges of both passes which rows
              to send

Where adjacency lists are spread over ranks (planner/strategies/minibatch/adjacency_store.py), a
sampler has a share of them. Then

    ask_edges l   ask those who have the lists that I lack; hear who lacks mine
    draw l        neighbours of my rows whose lists I have, and of those that I was asked for
    edges l       neighbours there and back

Where nobody is asked for anything and neighbours are drawn on a GPU, blocks are laid out there, too
(device_sampling.py).

The sampler runs in the rank itself, or in processes of its own (arriving.py). These talk over Gloo
to those of other ranks that make the same batches, beside the ranks. Spans and sent bytes come
along with the share."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import ClassVar, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from gnnplan.executor.layers.blocks import weighted_block
from gnnplan.executor.layers.targets import weight_of
from gnnplan.executor.minibatch import device_sampling as sampling
from gnnplan.executor.minibatch.share import Ends, Part, Picks, Share
from gnnplan.executor.ranks.device_clock import now
from gnnplan.executor.ranks.meeting import join, launcher_env
from gnnplan.executor.ranks.rank import Rank
from gnnplan.planner.graph.graph import Graph
from gnnplan.planner.graph.sampling import (
    Ids,
    Pairs,
    draw,
    fetched,
    items_of,
    key_of,
    pairs_in,
    taken,
)
from gnnplan.planner.ownership.minibatch import Batches, shares
from gnnplan.planner.strategies.minibatch.adjacency_store import NEIGHBOUR, Structure, thinned
from gnnplan.planner.strategies.minibatch.supply import ID, Supply
from gnnplan.planner.vocabulary.numbers import ranges
from gnnplan.planner.vocabulary.schedule import Label
from gnnplan.planner.vocabulary.trace import Span, sampler_lane

_opened = itertools.count()  # samplers of this process: all ranks open them in the same order


@dataclass
class Sampled:
    """A share, and what making it took: spans, and bytes sent by operation."""

    share: Share
    spans: list[Span] = field(default_factory=list)
    sent: dict[str, int] = field(default_factory=dict)


class Drawn(NamedTuple):
    """What was drawn for one layer."""

    rows: Ids  # of h_l, by global id [R]
    below: Ids  # of h_{l-1}: `rows`, then the new ones
    indptr: Ids  # [R + 1]
    columns: NDArray[np.int32]  # global ids of the neighbours drawn, one row's after the other
    meets: bool  # ranks exchange rows before the layer
    halo: Ids  # rows of h_{l-1} that peers send
    gives: Sequence[Ids]  # for each rank, which rows of h_{l-1} it is sent
    takes: NDArray[np.int64]  # halo rows from each rank [ranks]
    reads: Ids | None = None  # sources, if not all of `below` and `halo` in this order


class Sampler:
    """Item t is the share of rank `me` in step t.

    edges: the kind of each layer's edges (executor/layers/layer.py). lists: which ranks have which
    adjacency lists; None: all have all. device: where neighbours are drawn; None: on the host.
    """

    lane = ""  # of its spans, if a thread that loads calls it
    turn, samplers = 0, 1  # of several samplers of a rank, which take turns
    pushes: ClassVar[bool] = False  # other ranks are sent edges that it has drawn

    def __init__(
        self,
        batches: Batches,
        me: int,
        edges: Sequence[str],
        timeout_s: float = 30.0,
        lists: Structure | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.graph, self.workload = batches.graph, batches.workload
        # the member of a group that owns each vertex; empty: each rank is a group of its own
        self.member = np.zeros(0, np.int64) if batches.member is None else batches.member
        self.whole = batches.graph.whole
        self.steps, self.groups, self.split = batches.steps, batches.groups, batches.split
        self.me, self.edges, self.timeout_s, self.lists = me, edges, timeout_s, lists
        self.group = self.groups[me]
        self.peers = [rank for rank, group in enumerate(self.groups) if group == self.group]
        self.place = self.peers.index(me)
        self.number = next(_opened)
        self._process_groups: dict[tuple[int, ...], dist.ProcessGroupGloo] = {}
        self._epoch, self._items = -1, list[Ids]()
        self._degrees = degrees(batches.graph)  # once for all samplers in processes of their own
        if lists is not None:
            self.graph = thinned(batches.graph, lists.keeps(me))
        # scratch [N]: the position of a vertex among a layer's sources
        self._where = np.empty(self.graph.stats.vertices, dtype=np.int32)
        # lists on the device, where neighbours are drawn
        self.device_lists = None if device is None else sampling.Lists(self.graph, device)

    @property
    def lays_there(self) -> bool:
        """Whether blocks are laid out where neighbours are drawn, on the device."""
        alone = len(self.peers) == 1 and self.lists is None and not self.pushes
        return self.device_lists is not None and alone

    def __getitem__(self, step: int) -> Sampled:
        workload, (epoch, number) = self.workload, divmod(step, self.steps)
        splits = len(self.peers) > 1
        asks = self.lists is not None and self.lists.asks
        items, everyone = self._items_of(epoch, number)
        total = (
            everyone.size if workload.task == "link" else weight_of(self.graph, workload, everyone)
        )
        pairs = pairs_in(self.graph, workload, items, epoch, number)
        rows = items if pairs is None else pairs.ends
        if splits:
            rows = rows[self._owns(rows)]
        made = Sampled(Share(rows, everyone.size, total, []))
        if pairs is not None:
            made.share.ends = self._ends(pairs, rows)
        if self.lays_there:
            return self._lay_there(made, step)
        present = np.zeros(self.graph.stats.vertices, dtype=bool)  # vertices whose row I compute
        present[rows] = True
        drawn: list[Drawn] = []  # the last layer first
        began = now()
        for hop, fanout in enumerate(workload.fanouts):
            layer = workload.layers - hop
            key = key_of(workload.seed, epoch, number, layer)
            label = Label("draw", step, layer=layer)
            if asks:
                indptr, columns = self._draw_together(made, rows, fanout, key, label)
            else:
                indptr, columns = self._draw(rows, fanout, key)
            reached, kept, reads = absent(present, [columns]), rows, None
            new, halo = reached, reached[:0]
            gives, takes = [reached[:0]] * len(self.groups), np.zeros(len(self.groups), np.int64)
            meets = splits and (self.split == "all" or (self.split == "first" and layer == 2))
            if meets:
                if self.split == "first":  # owners have all that is needed, not new rows alone
                    reads = reached = np.concatenate([rows, reached])
                    kept = reads[self._owns(reads)]
                    present[:] = False
                    present[kept] = True
                own, asked = self._by_owner(reached)
                self._note(made, label, began)
                wanted = self._swap(made, Label("ids", step, layer=layer), asked, self.peers)
                began = now()
                new, halo = absent(present, [own, *wanted]), np.concatenate(asked)
                for peer, ids, given in zip(self.peers, asked, wanted, strict=True):
                    gives[peer], takes[peer] = given, ids.size
            elif splits:
                self._note(made, label, began)
                began = now()
            present[new] = True
            below = np.concatenate([kept, new])
            drawn.append(Drawn(rows, below, indptr, columns, meets, halo, gives, takes, reads))
            rows = below
        if not splits and not asks:
            self._note(made, Label("draw", step), began)
        self._lay(made, step, drawn[::-1])
        for part in made.share.parts:
            # the rank has it, so that it does not cross with every batch
            vars(part.block).pop("whole", None)
        return made

    def _items_of(self, epoch: int, number: int) -> tuple[Ids, Ids]:
        """The items of a batch that this rank's group shares, and those of all groups."""
        if epoch != self._epoch:
            self._epoch, self._items = epoch, []
            self._items = items_of(self.graph, self.workload, epoch)
        items = self._items[number]
        return shares(items, len(set(self.groups)))[self.group], items

    def _ends(self, pairs: Pairs, own: Ids) -> Ends:
        """Of the group's pairs those that this rank scores; `own` are its rows of h_L.

        All members know all pairs, so nobody has to ask.
        """
        where, ranks = self._where, len(self.groups)
        give, take = [own[:0]] * ranks, np.zeros(ranks, np.int64)
        away = own[:0]
        where[own] = np.arange(own.size, dtype=np.int32)
        if len(self.peers) > 1:
            member = self.member
            for place, peer in enumerate(self.peers):
                wanted = fetched([pairs], member, place)
                if peer == self.me:
                    away = wanted
                give[peer] = where[wanted[member[wanted] == self.place]].astype(np.int64)
            take[self.peers] = np.bincount(member[away], minlength=len(self.peers))
            pairs = pairs.of(member[pairs.heads] == self.place)
            where[away] = own.size + np.arange(away.size, dtype=np.int32)
        places = Pairs(where[pairs.heads].astype(np.int64), where[pairs.tails].astype(np.int64))
        return Ends(places, away, give, take, len(self.peers) > 1)

    def _owns(self, ids: Ids) -> NDArray[np.bool_]:
        """Whether this rank owns each of these vertices, in a group of several ranks."""
        return np.asarray(self.member[ids] == self.place)

    def _by_owner(self, ids: Ids) -> tuple[Ids, list[Ids]]:
        """Vertices that this rank owns, and those of each peer (of itself: none)."""
        owner = self.member[ids]
        by_owner = [ids[owner == place] for place in range(len(self.peers))]
        own, by_owner[self.place] = by_owner[self.place], ids[:0]
        return own, by_owner

    def _draw(
        self, rows: Ids, fanout: int, key: NDArray[np.uint64]
    ) -> tuple[Ids, NDArray[np.int32]]:
        """(indptr [R + 1], neighbours) drawn of vertices whose lists are here."""
        if self.lists is not None:
            away = rows[~self.lists.keeps(self.me)[rows]]
            assert not away.size, (
                f"rank {self.me} has no adjacency lists of vertices {away[:8].tolist()}"
            )
        if self.device_lists is not None:
            return self.device_lists.draw(rows, fanout, key)
        indptr, places = draw(self.graph, rows, fanout, key)
        return indptr, self.graph.indices[places]

    def _draw_together(
        self, made: Sampled, rows: Ids, fanout: int, key: NDArray[np.uint64], label: Label
    ) -> tuple[Ids, NDArray[np.int32]]:
        """`_draw` of any vertices: whoever has a list draws from it. All ranks call it together."""
        assert self.lists is not None
        everyone, me = range(len(self.groups)), self.me
        provider = self.lists.provider(me, rows)
        counts = taken(self._degrees[0][rows], fanout)  # neighbours that each row will have
        order = np.argsort(provider, kind="stable")
        asked = np.split(
            rows[order], np.cumsum(np.bincount(provider, minlength=len(everyone)))[:-1]
        )
        own_rows, asked[me] = asked[me], rows[:0]
        wanted = self._swap(made, label._replace(op="ask_edges"), asked, everyone)
        began = now()
        wanted[me] = own_rows
        indptr, columns = self._draw(np.concatenate(wanted), fanout, key)
        found = np.split(columns, indptr[np.cumsum([ids.size for ids in wanted])[:-1]])
        self._note(made, label, began)
        own, found[me] = found[me], columns[:0]
        takes = np.bincount(provider, weights=counts, minlength=len(everyone)).astype(np.int64)
        takes[me] = 0
        nbytes = NEIGHBOUR * (columns.size - own.size)
        with self._span(made, label._replace(op="edges"), nbytes):
            found = self._exchange(found, takes.tolist(), everyone)
        found[me] = own
        # neighbours stand in the order of providers: move them to that of rows
        indptr = np.concatenate([[0], np.cumsum(counts)])
        columns = np.empty(counts.sum(), columns.dtype)
        columns[ranges(indptr[order], counts[order])] = np.concatenate(found)
        return indptr, columns

    def _lay(self, made: Sampled, step: int, drawn: Sequence[Drawn]) -> None:
        """Make the share's parts of what was drawn for layers 1 .. L."""
        with self._span(made, Label("lay", step)):
            made.share.parts = [
                self._part(kind, layer) for kind, layer in zip(self.edges, drawn, strict=True)
            ]

    def _lay_there(self, made: Sampled, step: int) -> Sampled:
        """Draw and lay out on the device; rows' ids come back, those of layer 1 for all layers."""
        workload, lists, began = self.workload, self.device_lists, now()
        assert lists is not None
        numbers = workload.seed, *divmod(step, self.steps)
        keys = [key_of(*numbers, workload.layers - hop) for hop in range(workload.layers)]
        drawn = lists.drawn(made.share.own, workload.fanouts, keys)
        self._note(made, Label("draw", step), began)
        with self._span(made, Label("lay", step)):
            blocks = [
                lists.laid(kind, each, workload)
                for kind, each in zip(self.edges, drawn, strict=True)
            ]
            there = drawn[0].below.long()
            ids = there.cpu().numpy()
        gives, takes = [ids[:0]] * len(self.groups), np.zeros(len(self.groups), np.int64)
        made.share.parts = [
            Part(ids[:size], size, gives, takes, False, block, ids=there[:size])
            for block in blocks
            for size in [block.n_src]
        ]
        return made

    def _part(self, edges: str, drawn: Drawn) -> Part:
        """One layer's part; edges: their kind."""
        where, source, picks = self._where, np.concatenate([drawn.below, drawn.halo]), None
        where[source] = np.arange(source.size, dtype=np.int32)
        give = [where[ids].astype(np.int64) for ids in drawn.gives]
        if drawn.reads is not None:
            places = torch.from_numpy(where[drawn.reads].astype(np.int64))
            source, picks = drawn.reads, Picks(places, source.size, None, drawn.reads.size)
            where[source] = np.arange(source.size, dtype=np.int32)
        block = weighted_block(
            self.graph,
            edges,
            drawn.rows,
            source,
            drawn.indptr,
            where[drawn.columns],
            self.workload,
            self._degrees,
            drawn=True,
        )
        return Part(source, drawn.below.size, give, drawn.takes, drawn.meets, block, picks)

    def _swap(
        self, made: Sampled, label: Label, asked: Sequence[np.ndarray], among: Sequence[int]
    ) -> list[np.ndarray]:
        """All-to-all among some ranks: how many numbers, then the numbers; a span of each.

        What `asked` has for this rank itself is empty.
        """
        with self._span(made, label._replace(way="n"), ID * (len(among) - 1)):
            counts = [np.array([len(ids)]) for ids in asked]
            received = self._exchange(counts, [1] * len(among), among)
        with self._span(made, label, sum(ids.nbytes for ids in asked)):
            return self._exchange(asked, [int(n[0]) for n in received], among)

    def _push(
        self, made: Sampled, step: int, pushed: Sequence[np.ndarray], among: Sequence[int]
    ) -> list[np.ndarray]:
        """Blocks of a layer for each of some ranks, and what comes from each."""
        place, nothing = among.index(self.me), pushed[0][:0]
        sent = [block if i != place else nothing for i, block in enumerate(pushed)]
        came = self._swap(made, Label("push", step), sent, among)
        came[place] = pushed[place]
        return came

    def _exchange(
        self, parts: Sequence[np.ndarray], takes: list[int], among: Sequence[int]
    ) -> list[np.ndarray]:
        """All-to-all among some ranks: `parts` go to them, `takes` numbers come from each."""
        outgoing = torch.from_numpy(np.concatenate(parts))
        incoming = torch.empty(sum(takes), dtype=outgoing.dtype)
        asked = incoming, outgoing, takes, [len(part) for part in parts], dist.AllToAllOptions()
        self._process_group(among).alltoall_base(*asked).wait()  # type: ignore[attr-defined]
        return [part.numpy() for part in torch.split(incoming, takes)]

    def _process_group(self, among: Sequence[int]) -> dist.ProcessGroupGloo:
        """The group of these ranks' samplers, opened in the process that uses it."""
        ranks = tuple(among)
        if ranks not in self._process_groups:
            limit = timedelta(seconds=self.timeout_s)
            store = join(launcher_env(), limit)
            named = PrefixStore(f"sampler {self.number} {self.turn} {ranks}", store)
            self._process_groups[ranks] = dist.ProcessGroupGloo(
                named, ranks.index(self.me), len(ranks), limit
            )
        return self._process_groups[ranks]

    def _note(self, made: Sampled, label: Label, began: float, nbytes: int = 0) -> None:
        """Record a span that ends now."""
        lane = self.lane or sampler_lane(label.step, self.samplers)
        made.spans.append(
            Span(str(label), label.op, self.me, lane, began, now(), nbytes, label.step)
        )

    @contextmanager
    def _span(self, made: Sampled, label: Label, nbytes: int = 0) -> Iterator[None]:
        began = now()
        yield
        self._note(made, label, began, nbytes)
        if nbytes:
            made.sent[label.op] = made.sent.get(label.op, 0) + nbytes


def absent(present: NDArray[np.bool_], parts: Sequence[np.ndarray]) -> Ids:
    """Vertices of the parts that are not present [N] yet, sorted, each once."""
    among = np.zeros(present.size, dtype=bool)
    for ids in parts:
        among[ids] = True
    return np.flatnonzero(among & ~present)


def drawing_device(rank: Rank, supply: Supply) -> torch.device | None:
    """The rank's GPU if the cluster's GPUs sample and the lists fit there; otherwise None.

    Where samplers are processes of their own the host draws, for a fork has no CUDA.
    """
    inline = supply.lays_there or not supply.prefetch
    draws = rank.device.type == "cuda" and inline and supply.lists_there == 1.0
    return rank.device if draws else None


def degrees(graph: Graph) -> tuple[np.ndarray, np.ndarray]:
    """In-degrees and out-degrees [N]."""
    ins = graph.degree
    return ins, graph.out_degree if graph.stats.directed else ins
