"""Values with array fields: they are equal if their numbers are, even in different objects."""

from __future__ import annotations

from dataclasses import fields
from functools import cached_property

import numpy as np


class Content:
    """A hashable wrapper of an array that is not written to again; it compares by content.

    >>> Content(np.arange(3)) == Content(np.arange(3)), Content(np.arange(3)) == Content(np.ones(3))
    (True, False)
    """

    def __init__(self, array: np.ndarray) -> None:
        self.array = array
        sample, rest = array, 0
        if array.size > 64:  # the other arrays are many, and cheaper to hash whole
            sample = array[tuple(slice(None, None, size // 64 + 1) for size in array.shape)]
            rest = array.sum().item()
        self._hash = hash((array.shape, sample.tobytes(), rest))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Content) and (
            self.array is other.array
            or (
                (self.array.dtype, self.array.shape) == (other.array.dtype, other.array.shape)
                and self.array.tobytes() == other.array.tobytes()
            )
        )


class ByContent:
    """The base of frozen dataclasses (`eq=False`) whose fields are arrays, or contain arrays."""

    @cached_property
    def _contents(self) -> tuple[int, tuple[object, ...]]:
        """The hash of all fields' contents, and the contents as hashable values."""
        each = tuple(_content(getattr(self, field.name)) for field in fields(self))  # type: ignore[arg-type]
        return hash(each), each

    def __hash__(self) -> int:
        return self._contents[0]

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other) or self._contents != other._contents:
            return False
        # Equal values share their contents, so the next comparison is by identity.
        self.__dict__["_contents"] = other._contents
        return True


def _content(value: object) -> object:
    if isinstance(value, np.ndarray):
        return Content(value)
    if isinstance(value, dict):
        return frozenset((key, _content(each)) for key, each in value.items())
    return tuple(map(_content, value)) if isinstance(value, tuple) else value
