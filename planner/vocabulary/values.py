"""Values that hold arrays: they are equal where their numbers are, whichever objects these are."""

from __future__ import annotations

from dataclasses import fields
from functools import cached_property

import numpy as np


class Content:
    """An array as a value; nobody writes to it any more.

    >>> Content(np.arange(3)) == Content(np.arange(3)), Content(np.arange(3)) == Content(np.ones(3))
    (True, False)
    """

    def __init__(self, array: np.ndarray) -> None:
        self.array = array
        some = array[tuple(slice(None, None, size // 64 + 1) for size in array.shape)]
        rest = array.sum().item() if some.size < array.size else 0
        self._hash = hash((array.shape, some.tobytes(), rest))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Content) and (
            self.array is other.array
            or (self.array.dtype == other.array.dtype and np.array_equal(self.array, other.array))
        )


class Value:
    """Base of frozen dataclasses (`eq=False`) whose fields may be arrays, or hold arrays."""

    @cached_property
    def _contents(self) -> tuple[int, tuple[object, ...]]:
        """Those of its fields, and before them their hash."""
        each = tuple(_content(getattr(self, field.name)) for field in fields(self))  # type: ignore[arg-type]
        return hash(each), each

    def __hash__(self) -> int:
        return self._contents[0]

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other) or self._contents != other._contents:
            return False
        self.__dict__["_contents"] = other._contents  # compared once: then they are the same object
        return True


def _content(value: object) -> object:
    if isinstance(value, np.ndarray):
        return Content(value)
    if isinstance(value, dict):
        return frozenset((key, _content(each)) for key, each in value.items())
    return tuple(map(_content, value)) if isinstance(value, tuple) else value
