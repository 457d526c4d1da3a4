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
    return [json.loads(other) for other in gather_bytes(json.dumps(own).encode(), device, group)]


def gather_bytes(
    own: bytes, device: torch.device, group: dist.ProcessGroup | None = None
) -> list[bytes]:
    """Return every rank's bytes, by place in the group."""
    sizes = torch.zeros(dist.get_world_size(group), dtype=torch.int64, device=device)
    sizes[dist.get_rank(group)] = len(own)
    dist.all_reduce(sizes, group=group)
    padded = bytearray(own.ljust(int(sizes.max()), b"\0"))
    message = torch.frombuffer(padded, dtype=torch.uint8).to(device)
    messages = [torch.empty_like(message) for _ in sizes]
    dist.all_gather(messages, message, group=group)
    return [
        bytes(other.cpu().numpy())[:size]
        for other, size in zip(messages, sizes.tolist(), strict=True)
    ]
