"""Whether `forward` makes on the user's graph the calls that were recorded on small graphs.

Python may branch on sizes, and on numbers that follow from edges and fields. So `forward` runs on
the user's graph too, and tensors with rows, or computed with parameters, are `Unknown` there: they
have types and sizes alone, and cost nothing. Edges are Unknown at first; masks of them choose all,
half or none. Where this changes a call, or a number is asked for, edges and fields are those of the
user's graph."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import dlpack
from torch.utils._device import _device_constructors
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakTensorKeyDictionary

from gnnplan.executor.modules.bind import (
    MANY_VERTICES,
    VERTICES,
    GraphFields,
    Small,
    copied,
    rows_of,
)
from gnnplan.executor.modules.evaluate import CPU
from gnnplan.executor.modules.prove import plainly
from gnnplan.executor.modules.record import (
    FILLERS,
    MOST_NUMBERS,
    TO_PYTHON,
    Cuts,
    Unfit,
    leaves_of,
    line_now,
    on_meta,
    replaced,
    tensors_of,
)
from gnnplan.planner.graph.graph import Graph


class Limits(NamedTuple):
    """share: of the rows that an unknown mask chooses. most: numbers of a tensor that torch.zeros,
    torch.arange and the like fill; larger ones are unknown."""

    share: float
    most: float = 0.0


class Unknown(Tensor):
    """A tensor with a type and a shape, whose numbers are unknown. torch computes on its device
    meta with it."""

    meta: Tensor
    limits: Limits
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def of(value: Any, limits: Limits) -> Any:
        """Return a tensor as an Unknown, and another value as it is."""
        if not isinstance(value, Tensor):
            return value
        own: Any = Tensor._make_wrapper_subclass(
            Unknown, value.shape, value.stride(), dtype=value.dtype, device=CPU
        )
        own.meta, own.limits = value.to("meta"), limits
        return own

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs, name = {**(kwargs or {})}, func.overloadpacket.__name__
        limits = next(v.limits for v in tree_leaves((args, kwargs)) if isinstance(v, Unknown))
        if name == "nonzero":
            size = int(limits.share * args[0].numel()), args[0].ndim
            return Unknown.of(torch.empty(size, dtype=torch.int64, device="meta"), limits)
        if name.startswith("index") and isinstance(args[1], (list, tuple)):
            args = args[0], [*_places(args[1])], *args[2:]
        kwargs.pop("device", None)
        found = func(*tree_map(_on_meta, args), **tree_map(_on_meta, kwargs))
        if name in FILLERS and found.numel() <= limits.most:  # of a tensor's type and size alone
            like = torch.empty(1, dtype=args[0].dtype).expand(args[0].shape)
            return func(like, *args[1:], **kwargs)
        in_place = name.endswith("_")
        return args[0] if in_place else tree_map(lambda value: Unknown.of(value, limits), found)


def _on_meta(value: Any) -> Any:
    return value.meta if isinstance(value, Unknown) else on_meta(value)


def _places(indices: Any) -> Iterator[Any]:
    """Yield indices with the places that masks choose, instead of masks."""
    for index in indices:
        is_mask = isinstance(index, Tensor) and index.dtype == torch.bool
        yield from index.nonzero().unbind(1) if is_mask else (index,)


@dataclass
class _Call:
    """A torch call: its function, its arguments, and what Python had read before it.

    An argument is a number, a text, or the place of the call that returned this tensor. read: for
    each time that Python asked, a question and its answer. sizes: of the tensors that the call
    returned."""

    name: str
    arguments: list[Any]
    line: int
    read: list[tuple[str, Any]]
    sizes: tuple[int, ...] = ()


class _Calls(TorchFunctionMode):
    """Notes the torch calls of a forward pass; `ended` by its output, not by an error."""

    def __init__(self, module: nn.Module, values: Mapping[str, Any], limits: Limits) -> None:
        super().__init__()
        self.limits = limits
        self.made: list[_Call] = []
        self.read: list[tuple[str, Any]] = []  # since the last call
        self.ended = False
        self.makers: Any = WeakTensorKeyDictionary()
        self.makers.update({value: name for name, value in tensors_of(module).items()})
        self.makers.update({v: name for name, v in values.items() if isinstance(v, Tensor)})

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if name == "__get__":
            name = getattr(func.__self__, "__name__", name)  # of the attribute
        if name in TO_PYTHON and isinstance(args[0], Unknown):
            raise ValueError(f"{name} of unknown numbers")
        arguments = [*map(self.plain, _leaves((args, kwargs)))]  # which the call may change
        result = None
        is_filled = func in _device_constructors()
        if is_filled and not any(isinstance(each, Tensor) for each in leaves_of((args, kwargs))):
            made = func(*args, **{**kwargs, "device": "meta"})
            result = Unknown.of(made, self.limits) if made.numel() > self.limits.most else None
        if result is None:
            result = func(*args, **kwargs)
        tensors = [each for each in tree_leaves(result) if isinstance(each, Tensor)]
        if result is not None and not tensors:
            self.read.append((f"{name.strip('_')} of line {line_now()}", result))
            return result
        for at, tensor in enumerate(tensors):
            self.makers.setdefault(tensor, (len(self.made), at))
        self.note(name, arguments, [size for tensor in tensors for size in tensor.shape])
        return result

    def note(self, name: str, arguments: list[Any], sizes: Iterable[int] = ()) -> None:
        """Add a call."""
        self.made.append(_Call(name, arguments, line_now(), self.read, tuple(sizes)))
        self.read = []

    def plain(self, argument: Any) -> Any:
        """Return an argument as a _Call has it."""
        if not isinstance(argument, Tensor):
            is_plain = isinstance(argument, (int, float, str, torch.dtype, type(None)))
            return argument if is_plain else type(argument).__name__
        with torch._C.DisableTorchFunction():
            if argument in self.makers:
                return self.makers[argument]
            if isinstance(argument, Unknown) or argument.numel() > MOST_NUMBERS:
                return tuple(argument.shape)
            return str(argument.tolist())


def _to_dlpack(tensor: Tensor) -> Any:
    """Hand a tensor's memory to another library, as DGL's kernels, which would read no memory."""
    if isinstance(tensor, Unknown):
        raise ValueError("memory of unknown numbers")
    return torch._C._to_dlpack(tensor)


def _leaves(tree: Any) -> list[Any]:
    """Return leaves of arguments, also of their slices and sizes."""
    found = leaves_of(tree)
    slices = [(at.start, at.stop, at.step) if isinstance(at, slice) else at for at in found]
    return leaves_of(slices)


NOTHING = _Call("nothing", [], 0, [])


def must_call_alike(
    module: nn.Module,
    fields: GraphFields,
    dtype: torch.dtype,
    sizes: tuple[int, int],
    graph: Graph | None,
    refusal: Unfit | None = None,
) -> None:
    """Raise Unfit if `forward` makes other calls on the user's graph than on small graphs.

    sizes: vertices and edges of the graph; graph: None if it is not known. refusal: raised if
    `forward` cannot run on it to the end, as where calls of DGL's kernels need numbers.
    """
    small = Small(VERTICES[0], module, fields)

    def calls(
        values: Mapping[str, Any], vertices: int, is_training: bool, limits: Limits
    ) -> _Calls:
        own = copied(module).train(is_training)
        made = _Calls(own, values, limits)
        with torch.random.fork_rng(devices=[]), torch.no_grad(), plainly(), suppress(Exception):
            with made, Cuts(values, vertices), replaced(dlpack, "to_dlpack", _to_dlpack):
                output = small.binding.call(own, values)
            made.note("return", [made.plain(output)])
            made.ended = True
        return made

    for is_training in (True, False):
        is_decided = False
        if "g" not in small.binding.inputs:
            few, more, *others = (
                calls(_unknown(own.given(dtype), to, limits), to[0], is_training, limits)
                for own, to, limits in (
                    *((own, _sizes(own), Limits(1.0)) for own in (small, small.larger)),
                    *((small, sizes, Limits(share)) for share in (1.0, 0.5, 0.0)),
                )
            )
            if words := _differing(few, more, others[0], small, sizes[0]):
                raise Unfit(words)
            is_decided = all(
                each.ended and not _differing(few, more, each, small, sizes[0]) for each in others
            )
        if graph is None or (is_decided and refusal is None):
            continue
        limits = Limits(1.0, 2.0 * sum(sizes) + 2.0 * MANY_VERTICES**2)
        few, more, many = (
            calls(_with_edges(own, dtype, fields, limits), own.vertices, is_training, limits)
            for own in (small, small.larger, _of_graph(small, graph))
        )
        if words := _differing(few, more, many, small, sizes[0]):
            raise Unfit(words)
        if refusal is not None and not (few.ended and more.ended and many.ended):
            raise refusal


def _sizes(small: Small) -> tuple[int, int]:
    return small.vertices, small.whole.indices.size


def _unknown(values: Mapping[str, Any], sizes: tuple[int, int], limits: Limits) -> dict[str, Any]:
    """Return inputs of `forward` as Unknown; sizes: vertices and edges."""

    def unknown(name: str, value: Tensor) -> Any:
        shape = [*value.shape]
        shape[int(name == "edge_index")] = sizes[not name.startswith("vertex ")]
        return Unknown.of(torch.empty(shape, dtype=value.dtype, device="meta"), limits)

    return {name: unknown(name, value) for name, value in values.items()}


def _of_graph(small: Small, graph: Graph) -> Small:
    """Return the user's graph as one that gives the inputs of `forward`, with features without
    columns."""
    own = copy.copy(small)
    own.whole, own.vertices = graph.csr_edges, graph.csr_edges.vertices
    own.fields = {**graph.vertex_fields, "x": np.empty((own.vertices, 0))}
    return own


def _with_edges(
    small: Small, dtype: torch.dtype, fields: GraphFields, limits: Limits
) -> dict[str, Any]:
    """Return the inputs of `forward` on a graph, with unknown features."""
    values = small.given(dtype)
    features = torch.empty(small.vertices, fields.features, dtype=dtype, device="meta")
    values = {n: Unknown.of(features, limits) if n == "vertex x" else v for n, v in values.items()}
    if "g" in values:
        values["g"].ndata.update(rows_of(values))
    return values


def _differing(few: _Calls, more: _Calls, many: _Calls, small: Small, vertices: int) -> str:
    """Return in words which call on the user's graph differs from those on small graphs; '': none.

    What two small graphs have in common, the user's graph must have too. A number in which they
    differ must be a size, of vertices or of a tensor that was made, on it too."""
    known: dict[tuple[int, int], set[int]] = {(small.vertices, small.larger.vertices): {vertices}}
    read = ""
    together = zip_longest if few.ended and more.ended and many.ended else zip
    for here, larger, there in together(few.made, more.made, many.made):
        here, larger, there = (each or NOTHING for each in (here, larger, there))
        for (question, answer), (_, other) in zip(there.read, here.read, strict=False):
            is_size = other == small.vertices or isinstance(other, torch.Size)
            if answer != other and not is_size:
                read = f" ({question} is {answer} there, and {other} here)"
        alike = zip(here.arguments, larger.arguments, there.arguments, strict=False)
        for first, second, third in alike:
            is_size = first != second and type(first) is type(second) is int
            may_be = known.get((first, second), {third}) if is_size else {first}
            if third not in may_be and (is_size or first == second):
                return _words(here, there, vertices, read)
        if here.name != there.name or len(here.arguments) != len(there.arguments):
            return _words(here, there, vertices, read)
        for each in zip(here.sizes, larger.sizes, there.sizes, strict=False):
            known.setdefault(each[:2], set()).add(each[2])
    return ""


def _words(here: _Call, there: _Call, vertices: int, read: str) -> str:
    """Return a refusal of a call on the user's graph; read: what Python had read before it."""
    line, calls = f"line {there.line}: " if there.line else "", (_told(there), _told(here))
    also = "" if calls[0] != calls[1] else ", of other rows"
    return (
        f"{line}forward calls {calls[0]} on {vertices:,} vertices, and {calls[1]} on small graphs,"
        f" where it was recorded{also}{read}; let it compute the same on any graph, as torch.where"
        " does, or decide before, by an argument of __init__"
    )


def _told(call: _Call) -> str:
    """Return a call with its numbers."""
    numbers = [f"{each:g}" for each in call.arguments if type(each) in (int, float)]
    name = call.name.strip("_")
    return f"{name}({', '.join(numbers)})" if numbers else name
