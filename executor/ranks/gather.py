"""Small values of all ranks, as JSON: nothing that is received from a network is unpickled."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist


def gather_all(own: Any, device: torch.device, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return every rank's value, by place in the group. Values are JSON's.

    device: for the backend's messages. group: None for all ranks.
    """
    return [json.loads(other) for other in _gather(json.dumps(own).encode(), device, group)]


def gather_bytes(own: bytes, device: torch.device) -> list[bytes]:
    """Return every rank's bytes, by rank, on rank 0; an empty list on other ranks."""
    return _gather(own, device, None, to_first=True)


def _gather(
    own: bytes, device: torch.device, group: dist.ProcessGroup | None, to_first: bool = False
) -> list[bytes]:
    world, place = dist.get_world_size(group), dist.get_rank(group)
    sizes = torch.zeros(world, dtype=torch.int64, device=device)
    sizes[place] = len(own)
    dist.all_reduce(sizes, group=group)
    longest = int(sizes.max())
    padded = bytearray(own.ljust(longest, b"\0"))
    message = torch.frombuffer(padded, dtype=torch.uint8).to(device)
    takes = place == 0 or not to_first
    messages = [torch.empty_like(message) for _ in range(world)] if takes else []
    if to_first:
        dist.gather(message, messages if place == 0 else None)
    else:
        dist.all_gather(messages, message, group=group)
    return [
        bytes(other.cpu().numpy())[:size]
        for other, size in zip(messages, sizes.tolist(), strict=False)
    ]
