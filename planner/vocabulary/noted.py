"""What has been found out about arrays that nobody can write to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar
from weakref import ReferenceType, ref

import numpy as np

T = TypeVar("T")


class Noted(Generic[T]):
    """One answer about each array, for as long as the array lives.

    An array that can be written to may change, so about it nothing is noted.

    >>> rows, noted = np.arange(3), Noted[int]()
    >>> noted.answer(rows, lambda: 1), noted.answer(rows, lambda: 2)
    (1, 2)
    >>> rows.setflags(write=False)
    >>> noted.answer(rows, lambda: 3), noted.answer(rows, lambda: 4)
    (3, 3)
    """

    def __init__(self) -> None:
        # by id(); another array may get the id of one that is gone
        self._answers: dict[int, tuple[ReferenceType[np.ndarray[Any, Any]], T]] = {}

    def answer(self, array: np.ndarray[Any, Any], make: Callable[[], T]) -> T:
        """The answer about this array, made when it is first asked."""
        if array.flags.writeable:
            return make()
        noted = self._answers.get(id(array))
        if noted is None or noted[0]() is not array:
            noted = self._answers[id(array)] = ref(array), make()
        return noted[1]
