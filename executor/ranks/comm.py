"""Communication: exchanges of rows, all-to-alls of columns, point-to-point messages, all-reduces.

The gradient of an exchange is the same exchange in the other direction. Over a slow link isend and
irecv pairs beat all_to_all_single (211 against 356 ms for 10 MB at 400 Mbit/s). NCCL moves device
tensors. Gloo moves host tensors, so rows on a device are staged through host memory. CPU ranks on
one machine exchange rows without Gloo (near.py)."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from gnnplan.executor.layers.kernels import SparseRows
from gnnplan.executor.ranks.rank import Rank, completed_future
from gnnplan.planner.vocabulary.numbers import Group
from gnnplan.planner.vocabulary.schedule import Collective, Label, Ring


class Exchange:
    """An all-to-all of rows: the rows that this rank sends to and receives from each peer.

    give: for each peer, positions of the own rows that it needs (int64). take: number of rows
    received from each peer [ranks]. Received rows are grouped by peer, as in layout.RankLayer.halo.
    group: the ranks that take part, if not all; call `Groups.of` for it before. at: the device of
    the own rows, if not the rank's device.
    """

    def __init__(
        self,
        rank: Rank,
        give: Sequence[np.ndarray],
        take: np.ndarray,
        group: Group | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.rank = rank
        self.group = (rank.groups.of(group) if group else None) or rank.groups.exchanges
        self.take = [int(n) for n in take]
        # all peers' positions, concatenated
        positions = torch.from_numpy(np.concatenate(give).astype(np.int64))
        self.positions = positions.to(device or rank.device)
        self.gives = [len(positions) for positions in give]

    @classmethod
    def of_ids(
        cls,
        rank: Rank,
        wanted: Sequence[np.ndarray],
        owner: np.ndarray,
        own: np.ndarray,
        device: torch.device | None = None,
    ) -> Exchange:
        """Make an exchange from ids: rank i receives the rows of the vertices wanted[i].

        owner: the rank of each vertex [N]. own: ids of this rank's rows. Received rows are grouped
        by owner; rows of an owner have the order of `wanted`.
        """
        place = np.empty(owner.size, dtype=np.int64)
        place[own] = np.arange(own.size)
        give = [place[ids[owner[ids] == rank.rank]] for ids in wanted]
        take = np.bincount(owner[wanted[rank.rank]], minlength=rank.world)
        return cls(rank, give, take, device=device)

    def pack(self, rows: Tensor, into: Tensor | None = None) -> Tensor:
        """Copy the rows for all peers [sum gives, H], into a buffer if given.

        The source may then be overwritten.
        """
        if into is None:
            return rows.index_select(0, self.positions)
        return torch.index_select(rows, 0, self.positions, out=into)

    def swap(self, direction: str, rows: Tensor, into: Tensor | None = None) -> Tensor:
        """Send packed rows and receive the halo [sum take, H] (direction 'f'); or send the halo's
        gradient to the owners and receive that of the rows sent [sum gives, H] (direction 'b').

        into: the buffer to receive in. Blocks until both are done.
        """
        ends = (self.gives, self.take) if direction == "f" else (self.take, self.gives)
        return self._swap(rows, *ends, into)

    def forward(
        self, packed: Tensor, into: Tensor | None = None, lengths: np.ndarray | None = None
    ) -> Tensor:
        """Send packed rows and receive the halo, dense (`swap`) or compressed.

        lengths: of features, the number of stored values of each halo row [sum take]. All ranks
        know it (Graph.lengths), so it is not sent.
        """
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
        """Pack and exchange rows under a label -> the halo (`forward`)."""
        packed = self.pack(rows)
        with self.rank.recorder.sending(label, "comm", packed.nbytes):
            return self.forward(packed, into, lengths)

    def fill(self, label: Label, rows: Tensor, start: int, lengths: np.ndarray) -> None:
        """Fetch the halo of features into `rows` from row `start` on."""
        halo = rows[start:]
        received = self.fetch(label, rows, halo, lengths)
        if received is not halo:
            rows[start:] = received

    def add_gradient(self, gradient: Tensor, received: Tensor) -> None:
        """Add the gradients received from readers to the gradient of own rows, in place."""
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

    def counts(self, direction: str) -> tuple[int, int]:
        """Return how many rows this rank sends and receives, forward ('f') or backward ('b')."""
        counts = sum(self.gives), sum(self.take)
        return counts if direction == "f" else counts[::-1]

    def recorded(self, label: Label, rows: Tensor, direction: str) -> AbstractContextManager[None]:
        """Return the span of an exchange of rows as wide as `rows`; count its bytes now."""
        nbytes = self.counts(direction)[0] * rows.shape[1] * rows.element_size()
        return self.rank.recorder.sending(label, "comm", nbytes)


def swap(
    rank: Rank,
    outs: Sequence[Tensor],
    ins: Sequence[Tensor],
    group: dist.ProcessGroup | None = None,
    among: Sequence[int] | None = None,
) -> None:
    """Send outs[j] to each peer j, and receive from each peer i in ins[i].

    All tensors are contiguous and on the backend's device (`Rank.staged`). Empty tensors are not
    sent. Blocks until all messages are done. among: the ranks that i and j number; None: all.
    """
    ranks = among or range(rank.world)
    me, count = ranks.index(rank.rank), len(ranks)
    distances = range(1, count)  # every rank begins with another peer: not all with rank 0
    sources = [(me - distance) % count for distance in distances]
    receivers = [(me + distance) % count for distance in distances]
    takes = {ranks[i]: ins[i] for i in sources if ins[i].numel()}
    gives = {ranks[i]: outs[i] for i in receivers if outs[i].numel()}
    near = rank.groups.near(group)
    # Receives first. Otherwise Gloo's ready-to-receive message would wait behind this rank's own
    # data, and only one direction would be used at a time (8 MB each way at 400 Mbit/s: 303 ms
    # instead of 167).
    handles = begin(
        [
            dist.P2POp(op, rows, peer, group)
            for op, messages in ((dist.irecv, takes), (dist.isend, gives))
            for peer, rows in messages.items()
            if peer not in near.peers
        ]
    )
    near.swap(gives, takes)
    await_messages(rank, handles)


def begin(posts: list[dist.P2POp]) -> list[dist.Work]:
    """Start messages of a group, in one batch: over NCCL one message would wait for the other, and
    torch would make a new communicator for a single message."""
    return dist.batch_isend_irecv(posts) if posts else []


def await_messages(rank: Rank, handles: Sequence[dist.Work]) -> None:
    """Wait for messages that have been started. Raises RuntimeError after the timeout over Gloo."""
    for handle in handles:
        if rank.backend == "nccl":  # with a timeout, the host would wait too
            handle.wait()
        else:  # the timeout of the group is the one it was made with
            handle.wait(rank.groups.limit)


class ColumnExchange:
    """An all-to-all that turns the rows of a group's ranks into columns of all rows, and back.

    rows, columns: the rows, and the columns of a row, that each rank of the group has. group: None
    for all ranks. A rank's rows are [R, W], its columns [N, C]. `split` and `join` copy on the
    rank's device; `to_columns` and `to_rows` communicate.
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

    def split(self, rows: Tensor) -> list[Tensor]:
        """Split rows [R, W] into one piece per peer, of the peer's columns [R, C of the peer]."""
        return [rows[:, columns].contiguous() for columns in self.columns]

    def to_columns(self, label: Label, pieces: Sequence[Tensor]) -> Tensor:
        """Exchange pieces of own rows, one per peer, for own columns of all rows [N, C]."""
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
        """Exchange own columns of all rows [N, C] for pieces of own rows [R, C of the peer]."""
        rank, me = self.rank, self.me
        if len(self.group) == 1:
            return [columns]
        own = columns[self.rows[me]]
        with rank.recorder.sending(label, "comm", columns.nbytes - own.nbytes):
            staged = rank.staged(columns)
            own = staged[self.rows[me]]
            pieces = [
                own if peer == me else own.new_empty(len(own), theirs.stop - theirs.start)
                for peer, theirs in enumerate(self.columns)
            ]
            outs = [staged[rows] for rows in self.rows]
            swap(rank, outs, pieces, rank.groups.exchanges, self.group)
            return pieces

    def join(self, pieces: Sequence[Tensor]) -> Tensor:
        """Join the pieces that `to_rows` returns -> own rows [R, W]."""
        return self.rank.unstaged(torch.cat(list(pieces), 1) if len(pieces) > 1 else pieces[0])


def send(rank: Rank, rows: Tensor, peer: int) -> None:
    """Send rows to a peer of `Groups.open_pairs`; block until the buffer can be used again."""
    message = dist.P2POp(dist.isend, rank.staged(rows), peer, rank.groups.pair(peer))
    await_messages(rank, begin([message]))


class PendingReceive:
    """A pending receive from a peer of `Groups.open_pairs`, in a new buffer.

    An empty message is not sent.
    """

    def __init__(self, rank: Rank, shape: tuple[int, int], dtype: torch.dtype, peer: int) -> None:
        self.rank = rank
        self.buffer = torch.empty(shape, dtype=dtype, device=rank.groups.wire_device)
        message = dist.P2POp(dist.irecv, self.buffer, peer, rank.groups.pair(peer))
        self.handles = begin([message] if self.buffer.numel() else [])

    def wait(self) -> Tensor:
        """Wait for the message, and return it on the rank's device."""
        await_messages(self.rank, self.handles)
        return self.rank.unstaged(self.buffer)


def reduced_bytes(rank: Rank, flat: Tensor, group: Group) -> int:
    """Return the bytes that this rank sends in an all-reduce, as in the schedule (a ring)."""
    size = flat.numel() * flat.element_size()
    return Collective(Ring(size), group, group.index(rank.rank)).nbytes


def all_reduce(rank: Rank, label: Label, flat: Tensor, group: Group) -> None:
    """Sum `flat` over the ranks of `group`, in place."""
    if len(group) == 1:
        return
    with rank.recorder.sending(label, "reduce", reduced_bytes(rank, flat, group)):
        # a pipeline stage whose layers only aggregate has an empty gradient, which is on no device
        if not flat.numel():
            return
        wire, of = rank.staged(flat), rank.groups.of(group)
        near = rank.groups.near(of)
        # lanes may reduce at the same time: only Gloo keeps their messages apart
        alone = threading.current_thread() is threading.main_thread()
        if alone and len(near.peers) == len(group) - 1:
            near.all_reduce(wire.view(-1), group.index(rank.rank))
        else:
            dist.all_reduce(wire, group=of)
        if wire is not flat:
            flat.copy_(wire)


def total(rank: Rank, numbers: Tensor) -> Tensor:
    """Return the sum of all ranks' numbers, without recording a span or bytes."""
    if rank.world == 1:
        return numbers
    wire = rank.staged(numbers)
    dist.all_reduce(wire)
    return rank.unstaged(wire)


def begin_all_reduce(rank: Rank, label: Label, flat: Tensor, group: Group) -> Future[None]:
    """Start an all-reduce of `flat` over the ranks of `group`, in place.

    It overlaps the rank's next operations; the lane 'reduce' waits for its end. It starts on the
    step's own thread, so that all ranks start all-reduces and exchanges in the same order, which
    NCCL requires when two communicators are active.
    """
    if len(group) == 1:
        return completed_future(None)
    recorded = rank.recorder.sending(label, "reduce", reduced_bytes(rank, flat, group))
    wire = rank.staged(flat)
    work = dist.all_reduce(wire, group=rank.groups.of(group), async_op=True)

    def end() -> None:
        with recorded:
            work.wait()
            if wire is not flat:
                flat.copy_(wire)

    return rank.lanes.submit("reduce", end)
