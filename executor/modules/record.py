"""Records what a module's `forward` computes, as the calls of torch that it makes.

The module runs on a small graph, and every call of torch is noted, with what it was given: values
that were computed before, parameters, plain numbers. The notes can be run again on other rows and
other edges. A plain number that is another on a larger graph is a size, of which a value tells it:
the number of vertices, or of edges. What decides a branch must not be computed, so a module
that asks a tensor for its truth or its numbers is refused; so is one that draws random numbers, but
for dropout.

What torch does not see (DGL's kernels, other compiled code) is noted as a call of the innermost
module that did it: an `Opaque`. Where that is not enough, as with dropout in a convolution of DGL
or messages in forward itself, DGL's kernels are noted as calls that read the graph. What Python
asks of edges alone is noted too: the graph that is trained on must answer the same."""

from __future__ import annotations

import itertools
import operator
import pickle
import random
import sys
import traceback
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map

import gnnplan

OURS = str(Path(gnnplan.__file__).resolve().parent)
DROPOUTS = (F.dropout, torch.dropout, torch.dropout_)
# calls that make a tensor of one number, with the type of another
MADE = ("new_zeros", "new_ones", "new_full", "zeros_like", "ones_like", "full_like")
MOST_CALLS = 100_000
UNSEEN = (
    "something that torch does not see makes a tensor in forward itself; put it into a module of"
    " its own, which is given the edges, and keep constants by self.register_buffer, layers in a"
    " torch.nn.ModuleList"
)
IN_PLACE = (
    "forward changes a part of a tensor in place, as x[1:].mul_(2) and PyG's coalesce do; make a"
    " new tensor, as torch.cat and torch.where do, and coalesce edges in the graph's file"
)
NO_MATRIX = "a sparse matrix is made by no call of torch's; make it by torch.sparse_coo_tensor"
NUMBERS_ASKED = (
    "forward asks for the numbers in a tensor ({}), to branch or to compute outside torch; write it"
    " with torch's functions, as torch.where"
)
# calls that make no value
PLAIN = (
    "_set_grad_enabled",
    *("size", "__len__", "numel", "nelement", "dim", "ndimension", "stride"),
)
NUMBERS = (
    "__bool__",
    "__int__",
    "__float__",
    "__index__",
    "__complex__",
    "item",
    "tolist",
    "numpy",
)


class Unfit(Exception):
    """Something of a module that cannot be trained here; says what, and what would fit."""


def _asking(name: str) -> Callable[..., Any]:
    def asked(graph: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(graph, name)(*args, **kwargs)

    asked.__name__ = name
    return asked


# of a graph of DGL, what torch does not see and a part of the graph can be asked as well
ASKED = {name: _asking(name) for name in ("in_degrees", "out_degrees", "all_edges")}
EDGES_OF = "edges of g"


def index_of(graph: Any) -> Any:
    """What DGL's kernels are given of a graph."""
    return graph._graph


def edges_of(graph: Any) -> Tensor:
    """Source and reader of each edge, int64 [2, E]."""
    return torch.stack(graph.all_edges())


@dataclass(eq=False, repr=False)
class Node:
    """A value: a call's, or something that forward is given (`name`)."""

    call: Callable[..., Any] | Opaque | None
    args: tuple[Any, ...] = ()  # with nodes for values, Named for parameters
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""
    line: int = 0  # in the user's file; 0: unknown
    learns: bool = True  # autograd is on
    changes: bool = False  # the value of its first argument, in place
    value: Any = None  # on the small graph
    dim: int = 0  # of a value that has a row per vertex: where they are
    index: float = field(default_factory=itertools.count().__next__)  # in the order of calls

    def __repr__(self) -> str:
        return f"{self.index}: {self.name or self.what}"

    @property
    def place(self) -> str:
        return f"line {self.line}: " if self.line else ""

    @property
    def what(self) -> str:
        """The name of what it calls."""
        if isinstance(self.call, Opaque):
            return self.call.kind
        if isinstance(function := getattr(self.call, "__self__", None), type):
            return function.__name__  # a torch.autograd.Function's `apply`
        return getattr(self.call, "__name__", str(self.call)).strip("_") or self.name

    @property
    def leaves(self) -> list[Any]:
        """Everything that it is given."""
        return leaves_of((self.args, self.kwargs))

    @property
    def reads(self) -> list[Node]:
        """Values that it is given."""
        return [leaf for leaf in self.leaves if isinstance(leaf, Node)]

    def read_instead(self, others: Mapping[Node, Node]) -> None:
        """Have it be given other values."""

        def other(argument: Any) -> Any:
            return others.get(argument, argument) if isinstance(argument, Node) else argument

        self.args, self.kwargs = tree_map(other, (self.args, dict(self.kwargs)))

    @property
    def named(self) -> list[str]:
        """Parameters and buffers that it is given, and those of an Opaque's module."""
        return [leaf.name for leaf in self.leaves if isinstance(leaf, Named)]

    @property
    def key(self) -> Hashable:
        """Equal for calls of the same with the same."""

        def plain(argument: Any) -> Hashable:
            if isinstance(argument, (tuple, list)):
                return type(argument), *map(plain, argument)
            return type(argument), argument  # 1 equals 1.0 and True

        if self.call is None:
            return self.name
        kwargs = [(name, plain(self.kwargs[name])) for name in sorted(self.kwargs)]
        key = self.call, self.learns, plain(self.args), *kwargs
        try:
            hash(key)
        except TypeError:
            return self
        return key

    @property
    def drops(self) -> float:
        """Of dropout that drops: its p."""
        if self.call not in DROPOUTS:
            return 0.0
        p, training, _ = dropout_of(self.args, self.kwargs)
        return p if training else 0.0


@dataclass(frozen=True)
class Opaque:
    """A module that is called as a whole."""

    path: str
    kind: str


class Slice(NamedTuple):
    """A slice, whose ends may be sizes."""

    start: Any
    stop: Any
    step: Any


@dataclass(frozen=True)
class Named:
    """A parameter, a buffer or another tensor of the module, by its name there."""

    name: str


def leaves_of(given: Any) -> list[Any]:
    """What tuples, lists and dictionaries hold. torch's own walk also builds a tree of it, and took
    a quarter of the time that a module is read in."""
    if isinstance(given, Mapping):
        given = tuple(given.values())
    if not isinstance(given, (tuple, list)):
        return [given]
    return [leaf for each in given for leaf in leaves_of(each)]


def dropout_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[float, bool, bool]:
    """(p, whether it drops, in place) of a call of dropout."""
    given = dict(zip(("input", "p", "training", "inplace"), args, strict=False)) | dict(kwargs)
    given.setdefault("training", given.pop("train", True))
    return float(given.get("p", 0.5)), bool(given["training"]), bool(given.get("inplace", False))


@dataclass
class Recorded:
    """All calls of one run of forward, in their order."""

    nodes: list[Node]
    inputs: dict[str, Node]  # by the name that the graph has for it; 'vertices' and EDGES_OF
    output: Node
    # to what Python asked of edges: yes or no, or how many fewer than vertices
    answers: dict[Node, Any] = field(default_factory=dict)

    @property
    def vertices(self) -> int:
        """Of the small graph."""
        found: int = self.inputs["vertices"].value
        return found


class _Unseen(Exception):
    """A tensor that no call of torch made. words: of the refusal, if that was in forward itself."""

    def __init__(self, path: str, words: str = UNSEEN) -> None:
        super().__init__(path)
        self.path, self.words = path, f"line {line}: {words}" if (line := _line()) else words


def record(
    module: nn.Module,
    given: Mapping[str, Any],
    call: Callable[[], Any],
    vertices: int,
    parts: Collection[str] = (),
    by_kernels: bool = False,
) -> Recorded:
    """What `call` computes, which runs the module's forward on what is `given`.

    given: by name, tensors that forward gets. vertices: rows of the small graph, by which a size is
    known. parts: names of those that are noted as one call each, whatever they do. by_kernels:
    whether calls of DGL's kernels are noted, and not of the parts that make them. Raises Unfit with
    the line."""
    opaque, graph = {*parts}, given.get("g")
    as_given = None if graph is None else graph.local_var()
    while True:
        before = _states_outside_torch()
        if as_given is not None:  # without what another try has put into it
            vars(graph).update(vars(as_given.local_var()))
        try:
            recorder = _Recorder(module, given, vertices, opaque, parts, by_kernels)
            with recorder, recorder.calls():
                recorded = recorder.finished(call())
            if before != _states_outside_torch():
                raise Unfit(
                    "forward draws random numbers of Python's or numpy's, which other ranks would"
                    " draw otherwise; only dropout is drawn alike everywhere"
                )
            return recorded
        except _Unseen as unseen:
            if unseen.path in opaque or not unseen.path:
                raise Unfit(unseen.words) from None
            opaque.add(unseen.path)


class _Recorder(TorchFunctionMode):
    def __init__(
        self,
        module: nn.Module,
        given: Mapping[str, Any],
        vertices: int,
        opaque: set[str],
        may_drop: Collection[str],
        by_kernels: bool,
    ) -> None:
        super().__init__()
        self.opaque, self.may_drop = opaque, may_drop
        self.graph: Any = given.get("g")
        self.by_kernels = by_kernels
        self.answers: dict[Node, Any] = {}
        self.nodes: list[Node] = []
        self.of: dict[int, Node] = {}  # by the tensor's id
        self.versions: dict[int, int] = {}
        self.alive: list[Any] = []  # so that ids stay
        self.names = {id(t): name for name, t in tensors_of(module).items()}
        self.learned = {  # names of parameters, by where their numbers are
            parameter.untyped_storage().data_ptr(): name
            for name, parameter in module.named_parameters()
            if parameter.numel()
        }
        self.paths = {id(part): path for path, part in module.named_modules()}
        self.within: list[str] = [""]
        self.is_within_opaque = False
        self.inputs: dict[str, Node] = {}
        for name, value in {**given, "vertices": vertices}.items():
            node = self._node(None, (), {}, name)
            node.value = value
            self.inputs[name] = node
            self._made(node, value)
        if by_kernels:
            self._made(self._node(index_of, (self.inputs["g"],), {}), index_of(self.graph))
            self.inputs[EDGES_OF] = edges = self._node(edges_of, (self.inputs["g"],), {})
            edges.value = edges_of(self.graph)

    # -- calls -----------------------------------------------------------------------------------

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "__get__":
            result = func(*args)  # a tensor, as .T, .data and .grad, or not, as .shape
            is_value = isinstance(result, Tensor)
            return self._made(self._node(func, args, {}), result) if is_value else result
        if name in PLAIN:
            return func(*args, **kwargs)
        if name in NUMBERS:
            return self._answered(func, name, args)
        if name in MADE and (len(args) > 1 or name.endswith("_like")):
            return self._filled(func, name, args, kwargs)
        node = self._node(func, args, kwargs)
        first = args[0] if args and isinstance(args[0], Tensor) else None
        version = None if first is None else first._version
        before = torch.get_rng_state() if func not in DROPOUTS else None
        if func in DROPOUTS:
            p, training, in_place = dropout_of(args, kwargs)
            if training and p >= 1.0:
                raise Unfit(f"{node.place}dropout of p={p:g} leaves nothing; use p < 1")
            rows = args[0] if args else kwargs["input"]
            # what is dropped is decided where it runs
            result = rows.mul_(1.0) if in_place else rows * 1.0
        else:
            result = func(*args, **kwargs)
        if before is not None and not torch.equal(before, torch.get_rng_state()):
            raise Unfit(
                f"{node.place}{node.what} draws random numbers, which other ranks would draw"
                " otherwise; only dropout is drawn alike everywhere: where it has one inside, as"
                " attention and LSTM, give it dropout=0 and drop its rows before"
            )
        if first is not None and first._version != version:
            self._must_not_be_learned(node, first)
            result = first if result is None else result  # of setitem
            node.changes = result is first and id(first) in self.of
        return self._made(node, result)

    def _answered(self, func: Any, name: str, args: tuple[Any, ...]) -> Any:
        """What Python asks of a tensor that is made of edges alone. Raises Unfit of others."""
        node = self._argument(args[0])
        made_of = live_nodes([node]) if isinstance(node, Node) else []
        of_edges = any(each.call is None and each.name != "vertices" for each in made_of)
        if any(each.named or each.name.startswith("vertex ") for each in made_of):
            of_edges = False
        if of_edges and name not in ("tolist", "numpy"):
            self.answers[node] = answer = func(*args)
            return answer
        if of_edges and self.by_kernels:  # DGL sorts edges so for a function of the user's
            raise _Unseen(self.within[-1])
        raise Unfit(NUMBERS_ASKED.format(name.strip("_")))

    def _must_not_be_learned(self, node: Node, tensor: Tensor) -> None:
        """Raise Unfit if what a call changes in place is a parameter, or its `data`."""
        if tensor.layout != torch.strided:
            return
        name = self.learned.get(tensor.untyped_storage().data_ptr())
        if name is not None:
            raise Unfit(
                f"{node.place}{node.what} changes {name} in place, which would be lost; compute"
                " with a new tensor, as a clamped one, and leave parameters to the optimizer"
            )

    def _filled(self, func: Any, name: str, args: tuple[Any, ...], kwargs: Any) -> Any:
        """A tensor of one number, of whose example nothing but its type matters."""
        result = func(*args, **kwargs)
        if name.endswith("_like"):
            shape: Sequence[int] = args[0].size()
        else:
            shape = args[1] if isinstance(args[1], (tuple, list)) else args[1:]
        number = result.flatten()[0].item() if result.numel() else 0
        made = {"dtype": result.dtype, "device": result.device}
        node = self._node(torch.full, (tuple(shape), number), made)
        return self._made(node, result)

    # -- nodes -----------------------------------------------------------------------------------

    def _node(
        self, call: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], name: str = ""
    ) -> Node:
        if len(self.nodes) > MOST_CALLS:
            raise Unfit(f"forward makes more than {MOST_CALLS:,} calls of torch; use fewer layers")
        line = _line()
        # a list may be an argument of a call that changes it, so it is walked now
        node = Node(
            call,
            tree_map(self._argument, args),
            tree_map(self._argument, dict(kwargs)),
            name,
            line,
            torch.is_grad_enabled(),
        )
        self.nodes.append(node)
        return node

    def _argument(self, value: Any) -> Any:
        if isinstance(value, torch.Size):
            return tuple(value)
        if isinstance(value, slice):
            return Slice(*map(self._argument, (value.start, value.stop, value.step)))
        if isinstance(value, Tensor):
            if self._is_seen(value):
                return self.of[id(value)]
            if id(value) in self.names:
                return Named(self.names[id(value)])
            raise _Unseen(self.within[-1], NO_MATRIX if is_sparse(value) else UNSEEN)
        if id(value) in self.of:  # a graph of DGL
            return self.of[id(value)]
        if self.graph is not None and getattr(value, "_graph", None) is self.graph._graph:
            return self.inputs["g"]  # a copy with other rows, as of local_var
        return value

    def _is_seen(self, tensor: Tensor) -> bool:
        """Whether a call made all numbers in a tensor: compiled code may have filled it since."""
        if id(tensor) not in self.of:
            return False
        if tensor.layout != torch.strided:
            return True
        seen = self.of[id(tensor)].value
        if torch.equal(tensor, seen) or bool(((tensor == seen) | (seen != seen)).all()):
            return True
        if tensor._version != self.versions[id(tensor)]:
            raise _Unseen(self.within[-1], IN_PLACE)
        return False

    def _made(self, node: Node, result: Any) -> Any:
        node.value = tree_map(lambda v: v.detach().clone() if isinstance(v, Tensor) else v, result)
        if isinstance(result, Tensor):
            self._tensor(node, result)
        elif isinstance(result, (tuple, list)):
            for i, item in enumerate(result):
                if isinstance(item, Tensor):
                    part = Node(operator.getitem, (node, i), line=node.line, learns=node.learns)
                    self.nodes.append(part)
                    part.value = item.detach().clone()
                    self._tensor(part, item)
        elif not isinstance(result, (int, float, bool, str, torch.dtype, torch.device, type(None))):
            self.of[id(result)] = node
            self.alive.append(result)
        return result

    def _tensor(self, node: Node, tensor: Tensor) -> None:
        self.of[id(tensor)] = node
        self.versions[id(tensor)] = tensor._version
        self.alive.append(tensor)

    @contextmanager
    def calls(self) -> Iterator[None]:
        """Note calls of modules, and of torch.autograd.Function, whose gradients are its own. Not
        of functions that are given more than tensors and numbers, as DGL's are a graph unless calls
        of its kernels are noted, and not of torch's, which bring hooks."""
        original: Any = nn.Module.__call__
        base: Any = torch.autograd.function._SingleLevelFunction  # `apply` may be kept by a name
        script: Any = torch.jit.ScriptFunction
        scripted: Any = script.__call__

        def of_module(part: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return self.called(part, lambda: original(part, *args, **kwargs), args, kwargs)

        def of_function(function: Any, *args: Any) -> Any:
            apply = super(base, function).apply  # type: ignore[misc]
            plain = all(
                isinstance(a, (Tensor, int, float, str, type(None))) or id(a) in self.of
                for a in leaves_of(args)
            )
            is_torchs = function.__module__.startswith("torch.")
            if self.is_within_opaque or is_torchs or not plain:
                return apply(*args)
            return self._whole(function.apply, args, {}, lambda: apply(*args))

        def of_script(function: Any, *args: Any, **kwargs: Any) -> Any:
            if self.is_within_opaque:
                return scripted(function, *args, **kwargs)
            return self._whole(function, args, kwargs, lambda: scripted(function, *args, **kwargs))

        nn.Module.__call__ = of_module  # type: ignore[method-assign]
        base.apply = classmethod(of_function)
        script.__call__ = of_script
        try:
            with self._asked_of_graph() if self.by_kernels else nullcontext():
                yield
        finally:
            nn.Module.__call__ = original  # type: ignore[method-assign]
            del base.apply
            script.__call__ = scripted

    @contextmanager
    def _asked_of_graph(self) -> Iterator[None]:
        """Note what forward asks of a graph of DGL."""
        import dgl

        item = dgl.DGLGraph.__getitem__

        def of_graph(name: str, *args: Any, **kwargs: Any) -> Any:
            of_type = getattr(dgl.DGLGraph, name)

            def run() -> Any:
                return of_type(self.graph, *args, **kwargs)

            if self.is_within_opaque:
                return run()
            return self._whole(ASKED[name], (self.graph, *args), kwargs, run)

        def of_edge_type(graph: Any, key: Any) -> Any:
            """Its edges of a type, which are all: DGL makes a graph of them before it computes."""
            return graph if graph._graph is self.graph._graph else item(graph, key)

        vars(self.graph).update({name: partial(of_graph, name) for name in ASKED})
        dgl.DGLGraph.__getitem__ = of_edge_type
        try:
            yield
        finally:
            dgl.DGLGraph.__getitem__ = item
            for name in ASKED:
                vars(self.graph).pop(name)

    def called(self, part: nn.Module, run: Callable[[], Any], args: Any, kwargs: Any) -> Any:
        """A module's call, as a whole if torch did not see all of it before."""
        path = self.paths.get(id(part))
        if self.is_within_opaque and isinstance(part, _BatchNorm) and part.training:
            raise Unfit(
                f"{path} normalises by moments of all rows in a part that is called as a whole;"
                " take it out of that part"
            )
        if path is None or self.is_within_opaque:
            return run()
        if path not in self.opaque:
            self.within.append(path)
            try:
                result = run()
            finally:
                self.within.pop()
            with torch._C.DisableTorchFunction():
                made = [leaf for leaf in tree_flatten(result)[0] if isinstance(leaf, Tensor)]
                if not all(id(leaf) in self.names or self._is_seen(leaf) for leaf in made):
                    raise _Unseen(path)
            return result
        opaque = Opaque(path, type(part).__name__)
        return self._whole(opaque, args, kwargs, run, path in self.may_drop)

    def _whole(
        self, call: Any, args: Any, kwargs: Any, run: Callable[[], Any], may_drop: bool = False
    ) -> Any:
        """Note a call, and none that it makes."""
        with torch._C.DisableTorchFunction():
            node = self._node(call, args, kwargs)
            before = torch.get_rng_state()
            self.is_within_opaque = True
            try:
                result = run()
            finally:
                self.is_within_opaque = False
            if not may_drop and not torch.equal(before, torch.get_rng_state()):
                raise Unfit(
                    f"{node.place}{node.what} drops inside, where torch does not see it; drop its"
                    " inputs before (torch.nn.functional.dropout)"
                )
            return self._made(node, result)

    def finished(self, output: Any) -> Recorded:
        if isinstance(output, (tuple, list)) and len(output) == 1:
            output = output[0]
        if not isinstance(output, Tensor):
            raise Unfit("forward returns several values; return the logits alone")
        if id(output) in self.names:
            raise Unfit("forward returns a parameter; return rows that it computes")
        with torch._C.DisableTorchFunction():
            if not self._is_seen(output):
                raise _Unseen(self.within[-1])
        return Recorded(self.nodes, self.inputs, self.of[id(output)], self.answers)


def _states_outside_torch() -> bytes:
    """Where Python's and numpy's generators are."""
    return pickle.dumps((random.getstate(), np.random.get_state()))


def number_of(edges: Tensor) -> int:
    return edges.shape[1]


def with_sizes(few: Recorded, many: Recorded) -> Recorded:
    """The calls of a small graph, where a plain number that is another of a large one is a size:
    the number of vertices, or of the edges of a set. Raises Unfit of what else is another."""
    both = [live_nodes([recorded.output, *recorded.answers]) for recorded in (few, many)]
    places = [{node: place for place, node in enumerate(nodes)} for nodes in both]
    inputs = zip(few.inputs.values(), many.inputs.values(), strict=True)
    sets = [pair for pair in inputs if is_edge_set(pair[0].value)]

    def other(node: Node) -> Unfit:
        return Unfit(
            f"{node.place}{node.what} of a graph of {many.vertices:,} vertices is another call"
            f" than of one of {few.vertices}; let nothing depend on the size of the graph"
        )

    def told(mine: Any, its: Any) -> Any:
        if isinstance(mine, Node) and isinstance(its, Node):
            is_same = places[0][mine] == places[1][its]
        elif isinstance(mine, (int, float, str, Named)):
            is_same = repr(mine) == repr(its)
        else:
            is_same = type(mine) is type(its)
        return mine if is_same else size(mine, its)

    def size(mine: Any, its: Any) -> Node:
        if type(mine) is int and (mine, its) == (few.vertices, many.vertices):
            return few.inputs["vertices"]
        for first, second in reversed(sets):
            if type(mine) is int and (mine, its) == (first.value.shape[1], second.value.shape[1]):
                return Node(number_of, (first,), index=node.index - 0.5, value=mine)
        raise other(twin)

    for node, twin in zip(*both, strict=False):
        if (node.what, node.learns) != (twin.what, twin.learns):
            raise other(twin)
        given = (node.args, dict(node.kwargs)), (twin.args, dict(twin.kwargs))
        try:
            node.args, node.kwargs = tree_map(told, *given)
        except ValueError:  # of another structure
            raise other(twin) from None
        sets += [(node, twin)] if is_edge_set(node.value) else []
    if len(both[0]) != len(both[1]):
        raise other(both[1][-1])
    # of numbers Python may know how many vertices there are, or the last of them
    known = {(few.vertices - less, many.vertices - less): less for less in (0, 1)}
    if len(few.answers) != len(many.answers):
        raise other(both[1][-1])
    for (node, mine), its in zip([*few.answers.items()], many.answers.values(), strict=True):
        if not isinstance(mine, bool):
            if (mine, its) not in known:
                raise Unfit(f"{node.place}{NUMBERS_ASKED.format(node.what)}")
            few.answers[node] = known[mine, its]
    return few


def live_nodes(
    outputs: Iterable[Node], reads: Callable[[Node], list[Node]] = lambda node: node.reads
) -> list[Node]:
    """Nodes of which the outputs are made, in their order."""
    live: set[Node] = set()
    todo = [*outputs]
    while todo:
        node = todo.pop()
        if node not in live:
            live.add(node)
            todo += reads(node)
    return sorted(live, key=lambda node: node.index)


def is_sparse(value: Any) -> bool:
    """Whether a value is a sparse matrix."""
    return isinstance(value, Tensor) and value.layout != torch.strided


def is_edge_set(value: Any) -> bool:
    """Whether a value is edges: int64 [2, E] of vertices' ids."""
    return (
        isinstance(value, Tensor)
        and value.dtype == torch.int64
        and value.layout == torch.strided
        and value.ndim == 2
        and value.shape[0] == 2
        and value.shape[1] > 2
    )


def edge_sets_of(nodes: Collection[Node]) -> list[Node]:
    """Those that are edges, and not only places of a sparse matrix's numbers."""
    used = {
        read
        for node in nodes
        if not is_sparse(node.value) and node.call is not number_of
        for read in node.reads
    }
    places = {read for node in nodes for read in node.reads} - used
    return [node for node in nodes if is_edge_set(node.value) and node not in places]


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Parameters, buffers and other tensors of a module and its parts, by name."""
    found: dict[str, Tensor] = {}
    for path, part in module.named_modules():
        prefix = f"{path}." if path else ""
        own = itertools.chain(part._parameters.items(), part._buffers.items(), vars(part).items())
        for name, value in own:
            if isinstance(value, Tensor):
                found.setdefault(f"{prefix}{name}", value)
    return found


def named_in(module: nn.Module) -> Callable[[str], Any]:
    """Tensors and parts of a module, by their names."""
    return {**dict(module.named_modules()), **tensors_of(module)}.__getitem__


def line_of(error: BaseException) -> str:
    """'line 12: ', where the user's code raised; '' if the error says it, or if it is unknown."""
    if str(error).startswith("line "):
        return ""
    steps = traceback.walk_tb(error.__traceback__)
    lines = [line for frame, line in steps if _is_the_users(frame)]
    return f"line {lines[-1]}: " if lines else ""


def _is_the_users(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    generated = f"{frame.f_globals.get('__name__')}_"  # by PyG
    return is_the_users(file) and not Path(file).name.startswith(generated)


def is_the_users(file: str) -> bool:
    """Whether a file of Python is neither a library's nor ours."""
    return not ("site-packages" in file or file.startswith((OURS, "<")) or "/lib/python" in file)


def _line() -> int:
    """The innermost line of forward that is neither a library's nor ours; 0: there is none."""
    for frame, line in traceback.walk_stack(sys._getframe(1)):
        if frame.f_code is record.__code__:
            break
        if _is_the_users(frame):
            return line
    return 0
