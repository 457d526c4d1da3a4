"""What every rank says, as bytes: nothing that comes from a network is unpickled."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist


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
