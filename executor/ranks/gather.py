"""What all ranks say, gathered: nothing that is received from a network is unpickled."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist


def gather_all(own: Any, device: torch.device, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return every rank's small value, by place in the group. Values are JSON's.

    device: for the backend's messages. group: None for all ranks.
    """
    said = json.dumps(own).encode()
    sizes = _sizes(said, device, group)
    message = _message(said.ljust(max(sizes)), device)  # JSON may be followed by blanks
    messages = [torch.empty_like(message) for _ in sizes]
    dist.all_gather(messages, message, group=group)
    return [json.loads(_bytes(other)) for other in messages]


def collect(own: bytes, device: torch.device) -> Iterator[bytes]:
    """Yield on rank 0 the bytes of each rank that has any, one after the other; elsewhere nothing.

    All ranks iterate over it to its end.
    """
    me = dist.get_rank()
    for rank, size in enumerate(_sizes(own, device)):
        if size and rank == me == 0:
            yield own
        elif size and rank == me:
            _exchange(dist.isend, _message(own, device), 0)
        elif size and me == 0:
            message = torch.empty(size, dtype=torch.uint8, device=device)
            _exchange(dist.irecv, message, rank)
            yield _bytes(message)


def _exchange(op: Callable[..., Any], message: torch.Tensor, peer: int) -> None:
    """Send or receive one message, as a batch: over NCCL torch warns of messages outside one."""
    for work in dist.batch_isend_irecv([dist.P2POp(op, message, peer)]):
        work.wait()


def _sizes(own: bytes, device: torch.device, group: dist.ProcessGroup | None = None) -> list[int]:
    """Return the number of every rank's bytes, by place in the group."""
    sizes = torch.zeros(dist.get_world_size(group), dtype=torch.int64, device=device)
    sizes[dist.get_rank(group)] = len(own)
    dist.all_reduce(sizes, group=group)
    return list(map(int, sizes))


def _message(own: bytes, device: torch.device) -> torch.Tensor:
    return torch.frombuffer(bytearray(own), dtype=torch.uint8).to(device)


def _bytes(message: torch.Tensor) -> bytes:
    return bytes(message.cpu().numpy())
