"""How much a test tries: at night all of a product of settings, and new examples of hypothesis; every
time every two values together, and a fifth of the examples."""

import os
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any, TypeVar

import pytest
from hypothesis import strategies as st

T = TypeVar("T")
NIGHT = "GNNPLAN_NIGHT" in os.environ  # set by `make nightly`
BY_DAY = 'aZ09 é\u2028😀"\\\n\0'


def examples(most: int) -> int:
    return most if NIGHT else -(-most // 5)


def text(most: int) -> st.SearchStrategy[str]:
    """By day of few characters: the table of all of them takes seconds to make."""
    return st.text(st.characters(codec="utf-8") if NIGHT else BY_DAY, max_size=most)


def pairs(values: Mapping[Any, Hashable]) -> set[Hashable]:
    """Every two of a setting's values, with their names.

    >>> sorted(pairs({"a": 1, "b": 2, "c": 3}))
    [(('a', 1), ('b', 2)), (('a', 1), ('c', 3)), (('b', 2), ('c', 3))]
    """
    return set(combinations(values.items(), 2))


def cover(
    rows: Sequence[T],
    needs: Callable[[T], Iterable[Hashable]],
    cost: Callable[[T], float] = lambda row: 1,
) -> list[T]:
    """Few of the rows, in their order, that have together every need that any row has.

    Greedy: the row with most needs that are still open, for its cost, comes next, of equals the first;
    then those leave whose needs others have, dear ones first.

    >>> cover(["ab", "abc", "d"], set)
    ['abc', 'd']
    """
    has = [set(needs(row)) for row in rows]
    left, chosen = set().union(*has), set[int]()
    while left:
        best = max(
            range(len(rows)),
            key=lambda number: (len(has[number] & left) / cost(rows[number]), -number),
        )
        chosen.add(best)
        left -= has[best]
    for number in sorted(chosen, key=lambda number: (-cost(rows[number]), number)):
        if has[number] <= set().union(*(has[other] for other in chosen - {number})):
            chosen.remove(number)
    return [row for number, row in enumerate(rows) if number in chosen]


def at_night(*values: Any, **more: Any) -> Any:
    """A case of a test that runs by night."""
    return pytest.param(*values, **more, marks=pytest.mark.nightly)


def every(number: int, rows: Iterable[Any]) -> list[Any]:
    """Every so many-th row runs every time, the others at night."""
    return [row if place % number == 0 else at_night(row) for place, row in enumerate(rows)]


def covered(
    rows: Sequence[Any], needs: Callable[[Any], Iterable[Hashable]], several: bool = True
) -> list[Any]:
    """The rows as parameters of a test: a cover of them runs every time, the others at night.

    `several`: a row's values are as many parameters; else it is one, as for a fixture."""
    chosen = [id(row) for row in cover(rows, needs)]
    of = [row if several and isinstance(row, tuple) else (row,) for row in rows]
    return [r if id(r) in chosen else at_night(*o) for r, o in zip(rows, of, strict=True)]
