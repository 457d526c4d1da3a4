"""Messages between ranks on one machine: the receiver copies them out of the sender's memory.

Gloo moves messages through the loopback device, some 100 KB at a time, and each piece wakes a
thread. On two cores, 10 MB each way between two ranks took 9 to 18 ms; copied from memory, 4 to 5
(process_vm_readv of Linux, which MPI libraries use). Ranks tell each other by Unix sockets where a
message is, and when it has been read. Emulated servers are network namespaces, whose sockets do not
reach each other: their messages pass through the emulated NICs."""

from __future__ import annotations

import ctypes
import os
import socket
import struct
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from gnnplan.executor.ranks.gather import gather_all

MESSAGE = struct.Struct("qq")  # where a message is, and its size [B]
DONE, REFUSED = b"d", b"r"  # what a reader answers
PR_SET_PTRACER, ANY_PROCESS = 0x59616D61, ctypes.c_ulong(-1)

_libc = ctypes.CDLL(None, use_errno=True)
_libc.process_vm_readv.restype = ctypes.c_ssize_t


class _Span(ctypes.Structure):
    """A `struct iovec` of Linux."""

    _fields_ = (("address", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


@dataclass(frozen=True)
class _Peer:
    """A rank on this machine: the connection to it, and its process."""

    rank: int
    connection: socket.socket
    process: int

    def tell(self, words: bytes) -> None:
        """Send a few bytes. Raises RuntimeError if the peer is gone."""
        try:
            self.connection.send(words)
        except OSError as error:
            raise RuntimeError(f"Connection to rank {self.rank} is lost: {error}") from error

    def hear(self) -> bytes:
        """Return the peer's next words. Raises RuntimeError if it is gone, or silent too long."""
        try:
            words = self.connection.recv(MESSAGE.size)
        except OSError as error:
            raise RuntimeError(f"Connection to rank {self.rank}: {error}") from error
        if not words:
            raise RuntimeError(f"Connection closed by rank {self.rank}")
        return words

    def offer(self, message: Tensor) -> None:
        """Tell the peer where a message is, which must stay there until the peer answers."""
        self.tell(MESSAGE.pack(message.data_ptr(), message.nbytes))

    def take(self, into: Tensor) -> None:
        """Copy the message that the peer offers. Raises RuntimeError if that fails."""
        address, nbytes = MESSAGE.unpack(self.hear())
        if nbytes != into.nbytes:
            raise RuntimeError(f"rank {self.rank} sends {nbytes} B instead of {into.nbytes} B")
        done = 0
        while done < nbytes:  # Linux copies less than 2 GiB at a time
            ours, theirs = (
                ctypes.byref(_Span(start + done, nbytes - done))
                for start in (into.data_ptr(), address)
            )
            copied = _libc.process_vm_readv(
                self.process, ours, ctypes.c_ulong(1), theirs, ctypes.c_ulong(1), ctypes.c_ulong(0)
            )
            if copied <= 0:
                reason = os.strerror(ctypes.get_errno())
                raise RuntimeError(f"Connection to rank {self.rank}: cannot read it: {reason}")
            done += copied

    def readable(self) -> bool:
        """Whether both processes may read each other's memory. Both call this."""
        word, theirs = torch.ones(1), torch.zeros(1)
        self.offer(word)
        try:
            self.take(theirs)
            self.tell(DONE)
        except RuntimeError:
            self.tell(REFUSED)
        return self.hear() == DONE and bool(theirs)


class Near:
    """The other ranks of a process group that are on this machine."""

    def __init__(self, peers: Mapping[int, _Peer]) -> None:
        self.peers = peers  # by rank, in order

    def swap(self, outs: Mapping[int, Tensor], ins: Mapping[int, Tensor]) -> None:
        """Send contiguous tensors to those ranks that are on this machine, and receive from them.

        Blocks until all are read.
        """
        readers = [self.peers[rank] for rank in outs if rank in self.peers]
        for peer in readers:
            peer.offer(outs[peer.rank])
        for peer in (self.peers[rank] for rank in ins if rank in self.peers):
            peer.take(ins[peer.rank])
            peer.tell(DONE)
        for peer in readers:
            peer.hear()

    def all_reduce(self, flat: Tensor, me: int) -> None:
        """Sum `flat` [n] over this rank, the `me`-th of its group, and all peers, in place.

        Each rank sums a piece. In total it sends what it would send in a ring.
        """
        pieces = flat.tensor_split(len(self.peers) + 1)
        own, others = pieces[me], dict(zip(self.peers, pieces[:me] + pieces[me + 1 :], strict=True))
        received = {peer: torch.empty_like(own) for peer in self.peers}
        self.swap(others, received)
        for each in received.values():
            own += each
        self.swap(dict.fromkeys(self.peers, own), others)


NOBODY = Near({})


def connect(rank: int, group: dist.ProcessGroup | None, timeout_s: float) -> Near:
    """Find the ranks of a Gloo group that are on this machine. All ranks of the group call this.

    group: None for all ranks. timeout_s: of a message [s].
    """
    network = _network()
    if not network:
        gather_all("", group)
        return NOBODY
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind("")  # Linux chooses a name
        listener.listen(dist.get_world_size(group))
        listener.settimeout(timeout_s)
        own = f"{network} {listener.getsockname()[1:].decode()}"
        told = gather_all(own, group)
        everyone = zip(dist.get_process_group_ranks(group), told, strict=True)
        names = {peer: each.split()[1] for peer, each in everyone if each.startswith(network)}
        connections = {}
        for peer in (peer for peer in names if peer > rank):
            connections[peer] = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            connections[peer].connect(f"\0{names[peer]}")
            connections[peer].send(str(rank).encode())
        for _ in (peer for peer in names if peer < rank):
            connection, _ = listener.accept()
            connections[int(connection.recv(MESSAGE.size))] = connection
    peers = []
    for peer, connection in sorted(connections.items()):
        connection.settimeout(timeout_s)
        process = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED)
        peers.append(_Peer(peer, connection, process))
    return Near({peer.rank: peer for peer in peers if peer.readable()})


def _network() -> str:
    """Name the machine's network that this process is in; "" where a sandbox hides it."""
    with suppress(OSError):
        _libc.prctl(PR_SET_PTRACER, ANY_PROCESS, 0, 0, 0)  # for where the Yama module forbids it
        with open("/proc/sys/kernel/random/boot_id") as boot:
            return f"{boot.read().strip()}/{os.stat('/proc/self/ns/net').st_ino}"
    return ""
