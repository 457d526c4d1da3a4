"""Copies of many tensors to a GPU at once, which do not block the host.

A copy blocks the host unless its source is page-locked memory. And each copy has a fixed cost, that
of some hundred kilobytes. So all tensors of a step are packed into one piece of page-locked memory,
and copied at once; on the device they are views of one tensor."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

T = TypeVar("T")
ALIGNED = 16  # [B] alignment of packed tensors


def mapped(
    things: T, function: Callable[[Tensor], Tensor], copies: dict[int, Any] | None = None
) -> T:
    """Copy nested dicts, lists, tuples and objects, with `function` applied to their tensors.

    An object that occurs twice is copied once: `copies` maps its id to the copy."""
    copies = {} if copies is None else copies
    result: Any = things
    if isinstance(things, Tensor):
        result = function(things)
    elif isinstance(things, dict):
        result = {name: mapped(each, function, copies) for name, each in things.items()}
    elif isinstance(things, list | tuple):
        result = type(things)(mapped(each, function, copies) for each in things)
    elif not hasattr(things, "__dict__"):
        pass
    elif id(things) in copies:
        result = copies[id(things)]
    else:
        result = copies[id(things)] = copy.copy(things)
        for name, value in vars(things).items():
            if isinstance(value, Tensor):
                setattr(result, name, function(value))
    return cast(T, result)


def together(things: T, move: Callable[[Sequence[Tensor]], Sequence[Tensor]]) -> T:
    """Copy like `mapped`, but pass all distinct tensors to `move` in one call."""
    distinct: dict[int, Tensor] = {}
    mapped(things, lambda tensor: distinct.setdefault(id(tensor), tensor))
    results = dict(zip(distinct, move(list(distinct.values())), strict=True))
    return mapped(things, lambda tensor: results[id(tensor)])


def keep_until_used(stream: Any, *things: Any) -> None:
    """Keep the allocator from reusing the memory of tensors before a stream has used it."""

    def used(tensor: Tensor) -> Tensor:
        if tensor.is_cuda:
            tensor.record_stream(stream)
        return tensor

    mapped(things, used)


def sent(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Copy tensors to a device, to a GPU together; tensors that are already there stay."""
    on_host = [tensor for tensor in tensors if not tensor.is_cuda]
    if device.type != "cuda" or not on_host:
        return [tensor.to(device) for tensor in tensors]
    starts = [0, *accumulate(-(-tensor.nbytes // ALIGNED) * ALIGNED for tensor in on_host)]
    packed = torch.empty(starts.pop(), dtype=torch.uint8, pin_memory=True)
    for start, tensor in zip(starts, on_host, strict=True):
        _view(packed, start, tensor).copy_(tensor)
    arrived = packed.to(device, non_blocking=True)
    moved = (_view(arrived, *place) for place in zip(starts, on_host, strict=True))
    return [tensor if tensor.is_cuda else next(moved) for tensor in tensors]


def _view(packed: Tensor, start: int, like: Tensor) -> Tensor:
    """Return a view of bytes, from `start` on, with the type and shape of `like`."""
    return packed[start : start + like.nbytes].view(like.dtype).view(like.shape)
