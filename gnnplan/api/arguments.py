"""Arguments of the API's functions, checked by the functions' annotations.

An argument of a wrong type raises the same error everywhere, instead of an error from deep inside;
numbers of NumPy and PyTorch become Python's numbers."""

from __future__ import annotations

import inspect
import operator
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import wraps
from numbers import Real
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, ParamSpec, TypeVar, get_args, get_origin

import numpy as np

from gnnplan.planner.vocabulary.errors import SpecError

P = ParamSpec("P")
T = TypeVar("T")
WORDS: dict[type, str] = {
    bool: "True or False",
    int: "a whole number",
    float: "a number",
    str: "text",
    os.PathLike: "a path",
    Path: "a path",
    Mapping: "a mapping",
    Iterable: "several values",
    Sequence: "several values",
}


def typed(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function: it raises SpecError for arguments of other types than annotated."""
    parameters = inspect.signature(function).parameters
    by_place = [name for name, one in parameters.items() if one.kind is one.POSITIONAL_OR_KEYWORD]

    def kinds(name: str) -> tuple[Any, ...]:
        """Return an argument's types; `Any` without an annotation that exists at run time."""
        try:
            found = eval(parameters[name].annotation, vars(sys.modules[function.__module__]))
        except (KeyError, NameError, TypeError):
            return (Any,)
        return get_args(found) if isinstance(found, UnionType) else (found,)

    def read(name: str, value: object) -> Any:
        return value_of(name, value, *kinds(name))

    @wraps(function)
    def called(*args: P.args, **options: P.kwargs) -> T:
        first = [read(name, value) for name, value in zip(by_place, args, strict=False)]
        by_name = {name: read(name, value) for name, value in options.items()}
        return function(*first, *args[len(first) :], **by_name)  # type: ignore[arg-type]

    return called


def value_of(name: str, value: object, *kinds: Any) -> Any:
    """Return a value as the first of the types that it has. Raises SpecError if it has none.

    >>> value_of("ranks", np.int64(2), int), value_of("exact", 1, bool), value_of("lr", 1, float)
    (2, True, 1.0)
    """
    plain = [get_origin(kind) or kind for kind in kinds]
    if Any in plain or (value is None and NoneType in plain):
        return value
    for kind in plain:
        if (found := _as(kind, value)) is not None:
            return found
    words = dict.fromkeys(WORDS.get(kind, kind.__name__) for kind in plain if kind is not NoneType)
    remedy = "; save it with numpy.save, and name the file" if hasattr(value, "shape") else ""
    raise SpecError(f"{name} must be {' or '.join(words)}, not {value!r:.80}{remedy}")


def _as(kind: Any, value: Any) -> Any:
    """Return the value as this type; None if it is of another."""
    is_truth = isinstance(value, bool | np.bool_)
    if kind is bool:
        is_flag = is_truth or (isinstance(value, int | np.integer) and value in (0, 1))
        return bool(value) if is_flag else None
    if kind is int:
        with suppress(TypeError):  # a tensor of fractions has __index__ too
            return None if is_truth else operator.index(value)
        return None
    if kind is float:
        return float(value) if isinstance(value, Real) and not is_truth else None
    is_protocol = getattr(kind, "_is_protocol", False)
    return value if is_protocol or isinstance(value, kind) else None
