"""What all ranks say, gathered: nothing that is received from a network is unpickled."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist


def gather_all(own: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return every rank's small value, a JSON one, by place in the group. group: None for all."""
    said = json.dumps(own).encode()
    sizes = _sizes(said, group)
    message = _message(said.ljust(max(sizes)), group)  # JSON may be followed by blanks
    messages = [torch.empty_like(message) for _ in sizes]
    dist.all_gather(messages, message, group=group)
    return [json.loads(_bytes(other)) for other in messages]


def collect(own: bytes) -> Iterator[bytes]:
    """Yield on rank 0 the bytes of each rank that has any, one after the other; elsewhere nothing.

    All ranks iterate over it to its end.
    """
    me = dist.get_rank()
    for rank, size in enumerate(_sizes(own)):
        if size and rank == me == 0:
            yield own
        elif size and rank == me:
            _exchange(dist.isend, _message(own), 0)
        elif size and me == 0:
            message = _message(bytes(size))
            _exchange(dist.irecv, message, rank)
            yield _bytes(message)


def _exchange(op: Callable[..., Any], message: torch.Tensor, peer: int) -> None:
    """Send or receive one message, as a batch: over NCCL torch warns of messages outside one."""
    for work in dist.batch_isend_irecv([dist.P2POp(op, message, peer)]):
        work.wait()


def _sizes(own: bytes, group: dist.ProcessGroup | None = None) -> list[int]:
    """Return the number of every rank's bytes, by place in the group."""
    sizes = torch.zeros(dist.get_world_size(group), dtype=torch.int64, device=_device(group))
    sizes[dist.get_rank(group)] = len(own)
    dist.all_reduce(sizes, group=group)
    return list(map(int, sizes))


def _device(group: dist.ProcessGroup | None) -> str:
    """Return the device whose tensors the group's backend sends."""
    return "cuda" if dist.get_backend(group) == "nccl" else "cpu"


def _message(own: bytes, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    return torch.frombuffer(bytearray(own), dtype=torch.uint8).to(_device(group))


def _bytes(message: torch.Tensor) -> bytes:
    return bytes(message.cpu().numpy())
