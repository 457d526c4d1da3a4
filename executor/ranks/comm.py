"""Rows between ranks: exchanges, rows turned into columns, point-to-point messages, the all-reduce.

The gradient of an exchange is the same exchange backwards. Across a slow link isend/irecv pairs
beat all_to_all_single (211 against 356 ms for 10 MB at 400 Mbit/s). NCCL moves device tensors. Gloo
moves host tensors, so rows on a device are staged through host memory. What every rank says is
gathered as bytes: nothing that comes from a network is unpickled."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from gnnplan.executor.layers.kernels import SparseRows
from gnnplan.executor.ranks.lanes import completed_future
from gnnplan.executor.ranks.rank import Rank
from gnnplan.planner.vocabulary.schedule import Collective, Label, Ring

# isend or irecv, a tensor and a peer
_Post = tuple[
    Callable[[Tensor, int, dist.ProcessGroup | None], dist.Work | None],
    Tensor,
    int,
]


class Exchange:
    """Which of this rank's rows each peer gets, and how many rows come from each peer.

    give: for each peer the positions of the rows that it needs (int64). take: rows that come from
    each peer [ranks]. Received rows are grouped by peer, as in layout.Piece.halo. group: the ranks
    that take part, if not all; `Groups.of` must have been called for it. at: where the rows are
    that are given, if not on the rank's device.
    """

    def __init__(
        self,
        rank: Rank,
        give: Sequence[np.ndarray],
        take: np.ndarray,
        group: tuple[int, ...] | None = None,
        at: torch.device | None = None,
    ) -> None:
        self.rank = rank
        self.group = (rank.groups.of(group) if group else None) or rank.groups.exchanges
        self.take = [int(n) for n in take]
        # of all peers, one after the other
        positions = torch.from_numpy(np.concatenate(give).astype(np.int64))
        self.positions = positions.to(at or rank.device)
        self.gives = [len(positions) for positions in give]

    @classmethod
    def of_ids(
        cls,
        rank: Rank,
        wanted: Sequence[np.ndarray],
        owner: np.ndarray,
        own: np.ndarray,
        at: torch.device | None = None,
    ) -> Exchange:
        """Rows of vertices, each of which one rank has: wanted[i] are the ids of what rank i wants.

        owner: the rank of each vertex [N]. own: ids of this rank's rows. What comes is grouped by
        owner, in the order of the ids.
        """
        place = np.empty(owner.size, dtype=np.int64)
        place[own] = np.arange(own.size)
        give = [place[ids[owner[ids] == rank.rank]] for ids in wanted]
        take = np.bincount(owner[wanted[rank.rank]], minlength=rank.world)
        return cls(rank, give, take, at=at)

    def pack(self, rows: Tensor, into: Tensor | None = None) -> Tensor:
        """A copy of the rows for all peers [sum gives, H]; the source may then be overwritten.

        `into`: the buffer for the copy.
        """
        if into is None:
            return rows.index_select(0, self.positions)
        return torch.index_select(rows, 0, self.positions, out=into)

    def swap(self, way: str, rows: Tensor, into: Tensor | None = None) -> Tensor:
        """Send packed rows and receive the halo [sum take, H] (way 'f'); or send the halo's
        gradient home and receive that of the rows given [sum gives, H] ('b'); in `into` if given.

        Blocks until both are done.
        """
        ends = (self.gives, self.take) if way == "f" else (self.take, self.gives)
        return self._swap(rows, *ends, into)

    def forward(
        self, packed: Tensor, into: Tensor | None = None, lengths: np.ndarray | None = None
    ) -> Tensor:
        """`swap` of packed rows for the halo. Features need `lengths` [sum take], the numbers that
        each row of the halo stores: all ranks know them (Graph.lengths), so they are not sent."""
        if isinstance(packed, SparseRows):
            assert lengths is not None
            return packed.swapped(self._swap, self.gives, self.take, torch.from_numpy(lengths))
        return self.swap("f", packed, into)

    def fetch(
        self,
        label: Label,
        rows: Tensor,
        into: Tensor | None = None,
        lengths: np.ndarray | None = None,
    ) -> Tensor:
        """Exchange rows, recorded under a label -> the halo (`forward`)."""
        packed = self.pack(rows)
        with self.rank.recorder.sending(label, "comm", packed.nbytes):
            return self.forward(packed, into, lengths)

    def fill(self, label: Label, rows: Tensor, start: int, lengths: np.ndarray) -> None:
        """`fetch` the halo of features into the rows from `start` on."""
        room = rows[start:]
        came = self.fetch(label, rows, room, lengths)
        if came is not room:
            rows[start:] = came

    def add_home(self, gradient: Tensor, received: Tensor) -> None:
        """Add what came home to the gradient of this rank's rows, in place."""
        if received.shape[0]:
            gradient.index_add_(0, self.positions, received)

    def _swap(
        self, outgoing: Tensor, gives: list[int], takes: list[int], into: Tensor | None = None
    ) -> Tensor:
        rank, width = self.rank, outgoing.shape[1]
        staged = rank.staged(outgoing)
        incoming = (
            into
            if into is not None and into.device == staged.device
            else staged.new_empty(sum(takes), width)
        )
        swap(rank, torch.split(staged, gives), torch.split(incoming, takes), self.group)
        return rank.unstaged(incoming) if into is None or incoming is into else into.copy_(incoming)

    def rows(self, way: str) -> tuple[int, int]:
        """Rows that this rank sends, and that it receives; way 'f' is forward, 'b' backward."""
        ways = sum(self.gives), sum(self.take)
        return ways if way == "f" else ways[::-1]

    def nbytes(self, rows: Tensor, way: str) -> int:
        """Bytes that this rank sends, of rows as wide as these."""
        return self.rows(way)[0] * rows.shape[1] * rows.element_size()

    def recorded(self, label: Label, rows: Tensor, way: str) -> AbstractContextManager[None]:
        """The span of an exchange of such rows, whose bytes are counted now."""
        return self.rank.recorder.sending(label, "comm", self.nbytes(rows, way))


def swap(
    rank: Rank,
    outs: Sequence[Tensor],
    ins: Sequence[Tensor],
    group: dist.ProcessGroup | None = None,
    among: Sequence[int] | None = None,
) -> None:
    """Send outs[j] to each peer j, and fill ins[i] with what each peer i sends.

    All are contiguous and where messages are (`Rank.staged`). Nothing is sent that is empty. Blocks
    until all is done. among: the ranks whose places i and j are; None: all.
    """
    ranks = among or range(rank.world)
    me, count = ranks.index(rank.rank), len(ranks)
    distances = range(1, count)  # peers in turn, so that not all send to rank 0 first
    sources = [(me - distance) % count for distance in distances]
    receivers = [(me + distance) % count for distance in distances]
    # Receives first. Otherwise Gloo's message that we are ready to receive would wait behind our
    # own data, and only one direction be used at a time (8 MB each way at 400 Mbit/s: 167 instead
    # of 303 ms).
    posts: list[_Post]
    posts = [(dist.irecv, ins[i], ranks[i]) for i in sources if ins[i].numel()]
    posts += [(dist.isend, outs[i], ranks[i]) for i in receivers if outs[i].numel()]
    for handle in begin(rank, posts, group):
        handle.wait()


def begin(
    rank: Rank, posts: Sequence[_Post], group: dist.ProcessGroup | None
) -> Sequence[dist.Work]:
    """Begin messages of a group.

    Over NCCL they are one batch: otherwise one would wait for the other, and torch would make a
    communicator of its own for a single one. Over Gloo they are not, which is a tenth of a
    millisecond faster.
    """
    if rank.backend == "nccl":
        batch = [dist.P2POp(op, rows, peer, group) for op, rows, peer in posts]
        return dist.batch_isend_irecv(batch) if batch else ()
    handles = [op(rows, peer, group) for op, rows, peer in posts]
    return [handle for handle in handles if handle is not None]  # all ranks are in the group


class Turn:
    """Rows of some ranks into columns of all their rows, and back.

    rows, columns: which of all rows, and of a row's numbers, each rank of the group has; None: all
    ranks. A rank's rows are [R, W], its columns [N, C]. `pieces` and `together` copy, on the rank's
    device; `to_columns` and `to_rows` move.
    """

    def __init__(
        self,
        rank: Rank,
        rows: Sequence[slice],
        columns: Sequence[slice],
        group: Sequence[int] | None = None,
    ) -> None:
        self.rank, self.rows, self.columns = rank, rows, columns
        self.group = group or range(rank.world)
        self.me = self.group.index(rank.rank)

    def pieces(self, rows: Tensor) -> list[Tensor]:
        """[R, W] -> per peer the columns that it has [R, C of the peer]."""
        return [rows[:, columns].contiguous() for columns in self.columns]

    def to_columns(self, label: Label, pieces: Sequence[Tensor]) -> Tensor:
        """Per peer its columns of own rows -> own columns of all rows [N, C]."""
        rank, me = self.rank, self.me
        if len(self.group) == 1:
            return pieces[0]
        sent = sum(piece.nbytes for piece in pieces) - pieces[me].nbytes
        with rank.recorder.sending(label, "comm", sent):
            staged = [rank.staged(piece) for piece in pieces]
            columns = staged[me].new_empty(self.rows[-1].stop, staged[me].shape[1])
            columns[self.rows[me]] = staged[me]
            ins = [columns[rows] for rows in self.rows]
            swap(rank, staged, ins, rank.groups.exchanges, self.group)
            return rank.unstaged(columns)

    def to_rows(self, label: Label, columns: Tensor) -> list[Tensor]:
        """Own columns of all rows [N, C] -> per peer its columns of own rows [R, C of the peer]."""
        rank, me = self.rank, self.me
        if len(self.group) == 1:
            return [columns]
        own = columns[self.rows[me]]
        with rank.recorder.sending(label, "comm", columns.nbytes - own.nbytes):
            staged = rank.staged(columns)
            own = staged[self.rows[me]]
            pieces = [
                own if peer == me else own.new_empty(len(own), of_peer.stop - of_peer.start)
                for peer, of_peer in enumerate(self.columns)
            ]
            outs = [staged[rows] for rows in self.rows]
            swap(rank, outs, pieces, rank.groups.exchanges, self.group)
            return pieces

    def together(self, pieces: Sequence[Tensor]) -> Tensor:
        """What `to_rows` gave -> [R, W]."""
        return self.rank.unstaged(torch.cat(list(pieces), 1) if len(pieces) > 1 else pieces[0])


def send(rank: Rank, rows: Tensor, peer: int) -> None:
    """Send rows to a peer of `Groups.open_pairs`; blocks until they have left."""
    for handle in begin(rank, [(dist.isend, rank.staged(rows), peer)], rank.groups.pair(peer)):
        handle.wait()


class Arrival:
    """A message that a peer of `Groups.open_pairs` will send, received in a buffer of its own.

    An empty one is not sent.
    """

    def __init__(self, rank: Rank, shape: tuple[int, int], dtype: torch.dtype, peer: int) -> None:
        self.rank = rank
        self.buffer = torch.empty(shape, dtype=dtype, device=rank.groups.wire_device)
        posts: list[_Post] = [(dist.irecv, self.buffer, peer)] if self.buffer.numel() else []
        self.handles = begin(rank, posts, rank.groups.pair(peer))

    def wait(self) -> Tensor:
        """The message, on the rank's device."""
        for handle in self.handles:
            handle.wait()
        return self.rank.unstaged(self.buffer)


def reduced_bytes(rank: Rank, flat: Tensor, group: tuple[int, ...]) -> int:
    """Bytes that this rank sends in an all-reduce, as the schedule counts them (a ring)."""
    size = flat.numel() * flat.element_size()
    return Collective(Ring(size), group, group.index(rank.rank)).nbytes


def all_reduce(rank: Rank, label: Label, flat: Tensor, group: tuple[int, ...]) -> None:
    """Sum `flat` over the ranks of `group`, in place."""
    if len(group) == 1:
        return
    with rank.recorder.sending(label, "reduce", reduced_bytes(rank, flat, group)):
        wire = rank.staged(flat)
        # a stage whose layers only aggregate has no gradients, and they are on no device
        if flat.numel():
            dist.all_reduce(wire, group=rank.groups.of(group))
        if wire is not flat:
            flat.copy_(wire)


def total(rank: Rank, numbers: Tensor) -> Tensor:
    """The sum of all ranks' numbers, which is not recorded."""
    if rank.world == 1:
        return numbers
    wire = rank.staged(numbers)
    dist.all_reduce(wire)
    return rank.unstaged(wire)


def begin_all_reduce(
    rank: Rank, label: Label, flat: Tensor, group: tuple[int, ...]
) -> Future[None]:
    """Begin to sum `flat` over the ranks of `group`, in place, beside what the rank does next.

    It begins here, on the step's own thread, so that all ranks begin all-reduces and exchanges in
    one order; NCCL asks for that where two communicators are under way. The lane 'reduce' waits
    for its end.
    """
    if len(group) == 1:
        return completed_future(None)
    recorded = rank.recorder.sending(label, "reduce", reduced_bytes(rank, flat, group))
    wire = rank.staged(flat)
    under_way = dist.all_reduce(wire, group=rank.groups.of(group), async_op=True)

    def end() -> None:
        with recorded:
            under_way.wait()
            if wire is not flat:
                flat.copy_(wire)

    return rank.lanes.submit("reduce", end)


def gather_all(own: Any, device: torch.device) -> list[Any]:
    """Every rank's value, by rank; each is of JSON's kinds. device: where messages may lie."""
    return [json.loads(other) for other in _gather(json.dumps(own).encode(), device)]


def gather_bytes(own: bytes, device: torch.device) -> list[bytes]:
    """Every rank's bytes, by rank, on rank 0; on the others nothing."""
    return _gather(own, device, to_first=True)


def _gather(own: bytes, device: torch.device, to_first: bool = False) -> list[bytes]:
    world, is_first = dist.get_world_size(), dist.get_rank() == 0
    sizes = torch.zeros(world, dtype=torch.int64, device=device)
    sizes[dist.get_rank()] = len(own)
    dist.all_reduce(sizes)
    longest = int(sizes.max())
    padded = bytearray(own.ljust(longest, b"\0"))
    message = torch.frombuffer(padded, dtype=torch.uint8).to(device)
    takes = is_first or not to_first
    messages = [torch.empty_like(message) for _ in range(world)] if takes else []
    if to_first:
        dist.gather(message, messages if is_first else None)
    else:
        dist.all_gather(messages, message)
    return [
        bytes(other.cpu().numpy())[:size]
        for other, size in zip(messages, sizes.tolist(), strict=False)
    ]
