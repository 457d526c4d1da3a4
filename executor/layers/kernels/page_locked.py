"""Tensors that cross to a GPU together, while the host goes on.

The host waits for a copy unless the memory that it comes from is page-locked. And each copy costs
as much as some hundred kilobytes. So what a step needs is put into one piece of page-locked memory,
which crosses at once; on the device its tensors are views of one."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

T = TypeVar("T")
ALIGNED = 16  # [B] where a tensor begins


def mapped(
    things: T, function: Callable[[Tensor], Tensor], copies: dict[int, Any] | None = None
) -> T:
    """Objects in dicts, lists and tuples, copied with what a function makes of their tensors.

    What is among them twice is copied once: `copies` has it by its id."""
    copies = {} if copies is None else copies
    made: Any = things
    if isinstance(things, Tensor):
        made = function(things)
    elif isinstance(things, dict):
        made = {name: mapped(each, function, copies) for name, each in things.items()}
    elif isinstance(things, list | tuple):
        made = type(things)(mapped(each, function, copies) for each in things)
    elif not hasattr(things, "__dict__"):
        pass
    elif id(things) in copies:
        made = copies[id(things)]
    else:
        made = copies[id(things)] = copy.copy(things)
        for name, value in vars(things).items():
            if isinstance(value, Tensor):
                setattr(made, name, function(value))
    return cast(T, made)


def together(things: T, move: Callable[[Sequence[Tensor]], Sequence[Tensor]]) -> T:
    """`mapped`, where all tensors, each of them once, are moved together."""
    found: dict[int, Tensor] = {}
    mapped(things, lambda tensor: found.setdefault(id(tensor), tensor))
    moved = dict(zip(found, move(list(found.values())), strict=True))
    return mapped(things, lambda tensor: moved[id(tensor)])


def keep_until_used(stream: Any, *things: Any) -> None:
    """Keep memory of tensors, as in `mapped`, from being handed out before a stream has used it."""

    def used(tensor: Tensor) -> Tensor:
        if tensor.is_cuda:
            tensor.record_stream(stream)
        return tensor

    mapped(things, used)


def on_device(things: T, device: torch.device) -> T:
    """Objects on a device, in one copy."""
    return together(things, lambda tensors: sent(tensors, device))


def pinned(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies in one piece of page-locked memory."""
    sizes = [-(-tensor.nbytes // ALIGNED) * ALIGNED for tensor in tensors]
    ends = [0, *accumulate(sizes)]
    room = torch.empty(ends[-1], dtype=torch.uint8, pin_memory=True)
    return [
        _at(room, start, tensor).copy_(tensor)
        for start, tensor in zip(ends[:-1], tensors, strict=True)
    ]


def _at(room: Tensor, start: int, like: Tensor) -> Tensor:
    """The place of a tensor in bytes."""
    return room[start : start + like.nbytes].view(like.dtype).view(like.shape)


def sent(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """The tensors on a device; those that are there stay.

    A GPU is sent whole pieces of page-locked memory: those that `pinned` has made, and one more for
    the tensors that are in none.
    """
    if device.type != "cuda":
        return [tensor.to(device) for tensor in tensors]
    on_host = [tensor for tensor in tensors if not tensor.is_cuda]
    moved = iter(_sent(on_host, device) if on_host else ())
    return [tensor if tensor.is_cuda else next(moved) for tensor in tensors]


def _sent(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Tensors of the host on a GPU."""
    loose = iter(pinned([tensor for tensor in tensors if not tensor.is_pinned()]))
    here = [tensor if tensor.is_pinned() else next(loose) for tensor in tensors]
    there: dict[int, Tensor] = {}
    for tensor in here:
        piece = tensor.untyped_storage()
        if piece.data_ptr() not in there:
            room = torch.empty(0, dtype=torch.uint8).set_(piece)
            there[piece.data_ptr()] = room.to(device, non_blocking=True)
    return [
        _at(
            there[tensor.untyped_storage().data_ptr()],
            int(tensor.storage_offset()) * tensor.itemsize,
            tensor,
        )
        for tensor in here
    ]
