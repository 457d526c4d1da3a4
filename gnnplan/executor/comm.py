"""Rows between ranks: pairwise exchanges whose gradient is the same exchange backwards, and point-to-point messages.

Across a slow link isend/irecv pairs beat all_to_all_single (211 against 356 ms for 10 MB at 400 Mbit/s). NCCL moves
device tensors; Gloo moves host tensors, so device rows are staged through host memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from gnnplan.executor.kernels import Rows, SparseRows
from gnnplan.executor.worker import Rank
from gnnplan.planner.schedule import Collective, Label
from gnnplan.planner.schedule import all_reduce as planned


class Exchange:
    """Who gets which of my rows, and how many rows I get from whom.

    give: per peer the positions of my rows it needs (int64); take: rows I get from each peer [ranks]. Received rows stand
    grouped by peer, as layout.Piece.halo has them. `group`: the ranks that meet, if not all (Rank.group has been asked for it).
    """

    def __init__(self, rank: Rank, give: Sequence[np.ndarray], take: np.ndarray, group: tuple[int, ...] | None = None) -> None:
        self.rank = rank
        self.group = (rank.group(group) if group else None) or rank.exchange_group
        self.take = [int(n) for n in take]
        self.positions = torch.from_numpy(np.concatenate(give).astype(np.int64)).to(rank.device)  # of all peers, one after the other
        self.gives = [len(g) for g in give]

    def pack(self, rows: Rows, into: Tensor | None = None) -> Rows:
        """My rows for all peers, a copy [sum gives, H], in a buffer that is given: the source may be overwritten while they travel."""
        if into is None or isinstance(rows, SparseRows):
            return rows.index_select(0, self.positions)
        return torch.index_select(rows, 0, self.positions, out=into)

    def forward(self, packed: Tensor, into: Tensor | None = None) -> Tensor:
        """Send packed rows, receive my halo [sum take, H], in a buffer that is given. Blocks until both are done."""
        return self._swap(packed, self.gives, self.take, into)

    def forward_sparse(self, packed: SparseRows, lengths: Tensor) -> SparseRows:
        """`forward` of sparse rows; the receiver knows how many numbers each of its halo rows has [sum take]."""
        gives, takes = ([int(part.sum()) for part in of.split(rows)] for of, rows in ((packed.lengths, self.gives), (lengths, self.take)))
        numbers = torch.stack([packed.pattern.columns.to(packed.values.dtype), packed.values], 1)  # columns are below 2^24
        columns, values = self._swap(numbers, gives, takes).unbind(1)
        return SparseRows.of(lengths.to(values.device), columns, values.contiguous(), packed.shape[1])

    def backward(self, halo_gradient: Tensor, into: Tensor | None = None) -> Tensor:
        """Send my halo's gradient home, receive the peers' gradients of the rows I gave [sum gives, H]."""
        return self._swap(halo_gradient, self.take, self.gives, into)

    def add_home(self, gradient: Tensor, received: Tensor) -> None:
        """Add the peers' gradients to my rows' gradient in place."""
        if received.shape[0]:
            gradient.index_add_(0, self.positions, received)

    def _swap(self, outgoing: Tensor, gives: list[int], takes: list[int], into: Tensor | None = None) -> Tensor:
        rank, width = self.rank, outgoing.shape[1]
        staged = rank.staged(outgoing)
        incoming = into if into is not None and into.device == staged.device else staged.new_empty(sum(takes), width)
        outs, ins = staged.split(gives), incoming.split(takes)
        turns = range(1, rank.world)  # peers in turn, so that not all send to rank 0 first
        receives = [(dist.irecv, ins[source], source) for source in ((rank.rank - turn) % rank.world for turn in turns) if takes[source]]
        sends = [(dist.isend, outs[to], to) for to in ((rank.rank + turn) % rank.world for turn in turns) if gives[to]]
        # Receives first: Gloo's word that we are ready to receive would wait behind our own data, and only one way be used at a time
        # (8 MB each way at 400 Mbit/s: 167 instead of 303 ms).
        posts = receives + sends
        if rank.backend == "nccl" and posts:  # together, or one would wait for the other
            handles = dist.batch_isend_irecv([dist.P2POp(post, rows, peer, self.group) for post, rows, peer in posts])
        else:  # a tenth of a millisecond sooner
            handles = [post(rows, peer, self.group) for post, rows, peer in posts]
        for handle in handles:
            handle.wait()
        return rank.unstaged(incoming) if into is None or incoming is into else into.copy_(incoming)

    def rows(self, way: str) -> tuple[int, int]:
        """That this rank sends, and that it receives."""
        ways = sum(self.gives), sum(self.take)
        return ways if way == "f" else ways[::-1]

    def nbytes(self, width: int, itemsize: int, way: str) -> int:
        """Bytes this rank sends."""
        return self.rows(way)[0] * width * itemsize


def send(rank: Rank, rows: Tensor, peer: int) -> None:
    """Blocks until the rows have left."""
    dist.send(rank.staged(rows), peer, group=rank.exchange_group)


class Arrival:
    """A message under way from a peer into a fresh buffer."""

    def __init__(self, rank: Rank, shape: tuple[int, int], dtype: torch.dtype, peer: int) -> None:
        self.rank = rank
        self.buffer = torch.empty(shape, dtype=dtype, device=rank.wire_device)
        self.handle = dist.irecv(self.buffer, peer, group=rank.exchange_group)

    def wait(self) -> Tensor:
        assert self.handle is not None
        self.handle.wait()
        return self.rank.unstaged(self.buffer)


def reduced_bytes(rank: Rank, label: Label, flat: Tensor, group: tuple[int, ...]) -> int:
    """That this rank sends in a ring."""
    task = planned(label, rank.rank, group, flat.numel() * flat.element_size())
    assert isinstance(task.work, Collective)
    return task.work.nbytes


def all_reduce(rank: Rank, label: Label, flat: Tensor, group: tuple[int, ...]) -> None:
    """Sum over the ranks of `group`, in place, as the schedule has it."""
    if len(group) == 1:
        return
    with rank.span(label, "reduce", rank.count(label, reduced_bytes(rank, label, flat, group))):
        wire = rank.staged(flat)
        if flat.numel():  # a stage of layers that only aggregate has none, and they are on no device
            dist.all_reduce(wire, group=rank.group(group))
        if wire is not flat:
            flat.copy_(wire)
