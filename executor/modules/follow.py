"""Follows a module's `forward` by torch.fx, and says which layers it is.

A module that we can train is a chain. Rows go from convolution to convolution; between two of them
they may get a norm, ReLU and dropout, in this order or with the last two exchanged. GCNII's chain
begins and ends with a Linear, and its convolutions also read the first one's output."""

from __future__ import annotations

import itertools
import operator
import re
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import fx, nn
from torch.nn import functional as F

from gnnplan.executor.modules.convolutions import (
    Convolution,
    Unfit,
    activation_of,
    is_convolution,
    known,
    library,
)

MOST_LAYERS = 1000  # of a loop over a list that forward is given


@dataclass(frozen=True)
class Op:
    """Something that happens to rows between convolutions: 'norm', 'relu', 'drop', 'softmax'."""

    name: str
    module: str = ""  # of a norm: its name in the user's module
    p: float = 0.0  # of dropout


@dataclass(frozen=True)
class Rows:
    """A value of forward: rows of a convolution, of the features or of a Linear."""

    source: str  # its name in the user's module; '': the features
    width: int | None  # None: the features, whose width the first layer says
    ops: tuple[Op, ...] = ()
    heads: int = 0  # [N, heads, .] and not [N, width]


@dataclass(frozen=True)
class Gap:
    """What happens to the inputs of a layer."""

    norm: str  # 'none', 'layer' or 'batch'
    module: str  # the norm's name in the user's module
    relu: bool
    p: float  # of dropout


@dataclass(frozen=True)
class Step:
    """A convolution and what happens to its inputs."""

    name: str  # in the user's module
    convolution: Convolution
    gap: Gap


@dataclass(frozen=True)
class Linear:
    """The Linear before the first convolution or after the last, and what its inputs go through."""

    name: str
    h_in: int
    h_out: int
    gap: Gap


@dataclass(frozen=True)
class Chain:
    """A whole module."""

    steps: tuple[Step, ...]
    encoder: Linear | None
    decoder: Linear | None
    relu_after_encoder: bool
    relu_after_last: bool


class _Tracer(fx.Tracer):
    """Convolutions, norms and torch's modules are single nodes; lists may be looped over."""

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        """Also notes the lines that made it. fx notes them too, if it is asked to, but imports
        torch's compiler for that: a second and more of every rank's start."""
        node = super().create_node(*args, **kwargs)
        lines = [line for line in traceback.extract_stack() if line.filename != __file__]
        node.stack_trace = "".join(traceback.format_list(lines))
        return node

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if isinstance(m, (nn.Sequential, nn.ModuleList)):
            return False
        of_library = ("torch.nn", "torch_geometric.nn.norm", "dgl.nn.pytorch")
        return is_convolution(m) or type(m).__module__.startswith(of_library)

    def iter(self, obj: fx.Proxy) -> Iterator[Any]:
        """A list that forward is given, as a graph per layer: its items, in `zip` with layers."""
        for i in itertools.count():
            if i == MOST_LAYERS:
                raise Unfit(
                    f"a loop over {obj.node.name} never ends where nothing else says how long it"
                    " is; loop over the layers"
                )
            yield obj[i]  # type: ignore[index]


def follow(module: nn.Module) -> Chain:
    """The module's forward as a chain of layers.

    Raises Unfit, with the line of the file where something does not fit."""
    module.train()
    graph = _trace(module)
    module.eval()
    for node in _trace(module).nodes:
        if node.target is F.dropout and _dropout(node)[1]:
            raise Unfit(
                f"{_place(node)}F.dropout drops in evaluation too, unless it is told; write"
                " training=self.training"
            )
    module.train()
    return _Walk(module).walk(graph)


def _trace(module: nn.Module) -> fx.Graph:
    try:
        graph = _Tracer().trace(module)
    except Unfit:
        raise
    except Exception as error:  # whatever the user's forward raises on a stand-in for rows
        words = str(error).strip().splitlines() or [""]
        line = _line_of(error, module)
        raise Unfit(
            f"{line}torch.fx cannot follow forward of {type(module).__name__}"
            f" ({type(error).__name__}: {words[0]:.120}); a forward that it can follow calls"
            " modules and functions, and branches on nothing that is computed"
        ) from error
    for node in reversed(graph.nodes):
        if not node.users and node.op not in ("output", "placeholder"):
            graph.erase_node(node)  # its value is not used
    return graph


def _line_of(error: BaseException, module: nn.Module) -> str:
    """'line 12: ' where forward raised, '' if that is unknown."""
    code = getattr(type(module).forward, "__code__", None)
    found, step = "", error.__traceback__
    while step is not None:
        if code is not None and step.tb_frame.f_code.co_filename == code.co_filename:
            found = f"line {step.tb_lineno}: "
        step = step.tb_next
    return found


def _place(node: fx.Node) -> str:
    """'line 12: ', from the innermost line that is no library's."""
    lines = [
        number
        for path, number in re.findall(r'File "([^"]+)", line (\d+)', node.stack_trace or "")
        if "site-packages" not in path
    ]
    return f"line {lines[-1]}: " if lines else ""


def _dropout(node: fx.Node) -> tuple[float, bool]:
    """(p, whether it drops) of a call of F.dropout(input, p, training, inplace)."""
    values = dict(zip(("input", "p", "training"), node.args, strict=False)) | dict(node.kwargs)
    p: Any = values.get("p", 0.5)
    return float(p), bool(values.get("training", True))


class _Input:
    """What forward is given, or a part of it: features, edges or a graph."""


Value = Rows | _Input


class _Walk:
    """Goes through the nodes of a graph, from the features to the output."""

    def __init__(self, module: nn.Module) -> None:
        self.modules = dict(module.named_modules(remove_duplicate=False))
        self.values: dict[fx.Node, Value] = {}
        self.steps: list[Step] = []
        self.linears: list[Linear] = []
        self.used: set[int] = set()

    def walk(self, graph: fx.Graph) -> Chain:
        for node in graph.nodes:
            try:
                if node.op == "output":
                    return self.finish(node.args[0])
                self.values[node] = self.value(node)
            except Unfit as unfit:
                raise Unfit(f"{_place(node)}{unfit}") from unfit
        raise AssertionError("a graph ends with its output")

    # -- values ----------------------------------------------------------------------------------

    def value(self, node: fx.Node) -> Value:
        if node.op == "placeholder":
            return _Input()
        if node.op == "call_module":
            return self.call_module(node)
        if node.op == "get_attr":
            raise Unfit(f"{node.target} is a parameter of the module itself; put it into a layer")
        target = node.target
        first = node.args[0] if node.args else node.kwargs.get("input")
        if isinstance(first, fx.Node) and isinstance(self.values[first], _Input):
            if target in (getattr, operator.getitem):
                return _Input()
            if node.op == "call_method" and target == "local_var":  # of a DGL graph
                return _Input()
        rows = self.rows(first, str(node.name))
        name = target if isinstance(target, str) else getattr(target, "__name__", str(target))
        if name == "dropout":
            p, drops = _dropout(node)
            return self.then(rows, Op("drop", p=p)) if drops and p else rows
        if name in ("relu", "relu_"):
            return self.then(rows, Op("relu"))
        if name == "log_softmax":
            return self.then(rows, Op("softmax"))
        if name in ("flatten", "mean", "squeeze", "view", "reshape") and rows.heads:
            return self.joined(rows, name, node)
        if name in ("add", "iadd", "add_", "cat", "concat", "concatenate", "stack", "hstack"):
            raise Unfit(
                f"rows of several layers meet here ({name}), and our layers hand their rows to the"
                " next one alone; leave the sum out, or use GCN2Conv, which adds the first rows"
            )
        raise Unfit(
            f"{name} of rows is nothing that our layers do; between convolutions use a norm, ReLU"
            " and dropout"
        )

    def rows(self, argument: object, what: str) -> Rows:
        """The rows that an argument is; what forward was given counts as features."""
        value = self.values.get(argument) if isinstance(argument, fx.Node) else None
        if isinstance(value, Rows):
            return value
        if isinstance(value, _Input):
            return Rows("", None)
        raise Unfit(f"{what} takes no rows; give it the rows of the layer before")

    def then(self, rows: Rows, op: Op) -> Rows:
        return replace(rows, ops=(*rows.ops, op))

    def joined(self, rows: Rows, name: str, node: fx.Node) -> Rows:
        """Rows [N, heads, width] as [N, heads width]; a mean is over one head."""
        if name in ("mean", "squeeze") and rows.heads > 1:
            raise Unfit(
                f"{name} over {rows.heads} heads: our heads lie side by side; use .flatten(1), or"
                " one head"
            )
        sizes = node.args[1:]
        fitting: dict[str, list[Any]] = {
            "view": [(-1, rows.width)],
            "squeeze": [(1,), (-2,)],
            "mean": [(1,), (-2,)],
        }
        fitting |= {"reshape": fitting["view"], "flatten": [(1,)]}
        if tuple(sizes) not in fitting[name]:
            raise Unfit(
                f"{name}{sizes} of rows [N, {rows.heads}, ..] does not put heads side by side;"
                " write .flatten(1)"
            )
        return replace(rows, heads=0)

    # -- modules ---------------------------------------------------------------------------------

    def call_module(self, node: fx.Node) -> Value:
        name = str(node.target)
        module = self.modules[name]
        if is_convolution(module):
            return self.convolve(node, name, module)
        rows = self.rows(node.args[0] if node.args else None, name)
        if isinstance(module, nn.Identity):
            return rows
        if isinstance(module, nn.Dropout):
            return self.then(rows, Op("drop", p=module.p)) if module.p else rows
        if isinstance(module, nn.ReLU):
            return self.then(rows, Op("relu"))
        if isinstance(module, nn.LogSoftmax):
            return self.then(rows, Op("softmax"))
        if isinstance(module, nn.Flatten) and rows.heads:
            return replace(rows, heads=0)
        if isinstance(module, nn.Linear):
            return self.linear(rows, name, module)
        if "Norm" in type(module).__name__:
            self.once(module, name)
            inner, at = norm_in(module, name)
            width = inner.num_features if isinstance(inner, nn.BatchNorm1d) else None
            if isinstance(inner, nn.LayerNorm):
                width = int(inner.normalized_shape[-1])
            _must_fit(rows.width, width, name)
            return self.then(rows, Op("norm", at))
        raise Unfit(
            f"{name} is a {type(module).__name__}, which is none of our layers; between"
            " convolutions use BatchNorm1d, LayerNorm, ReLU and Dropout"
        )

    def once(self, module: nn.Module, name: str) -> None:
        if id(module) in self.used:
            raise Unfit(f"{name} is used twice, and our layers share no weights; make two of it")
        self.used.add(id(module))

    def linear(self, rows: Rows, name: str, module: nn.Linear) -> Rows:
        self.once(module, name)
        if module.bias is None:
            raise Unfit(f"{name} is a Linear without bias, and ours have one; use bias=True")
        if rows.heads:
            raise Unfit(f"{name} reads rows of several heads; write .flatten(1) before it")
        _must_fit(rows.width, module.in_features, name)
        if not self.steps and (rows.source or self.linears):
            raise Unfit(f"{name} is a second Linear before the first convolution; use one")
        if self.steps and rows.source != self.steps[-1].name:
            raise Unfit(f"{name} does not read the last convolution; read that")
        self.linears.append(
            Linear(name, module.in_features, module.out_features, self.gap(rows, name))
        )
        return Rows(name, module.out_features)

    def convolve(self, node: fx.Node, name: str, module: nn.Module) -> Rows:
        self.once(module, name)
        conv = known(module)
        arguments = list(node.args)
        if library(module) == "dgl":  # (graph, rows, ..)
            arguments[:2] = arguments[1::-1]
        allowed = 3 if conv.kind == "gcnii" else 2
        given = [key for key, value in node.kwargs.items() if value is not None]
        if len(arguments) != allowed or given:
            raise Unfit(
                f"{name} is called with {len(arguments)} values"
                f"{''.join(f', {key}' for key in given)}; give it rows and edges"
                f"{' and the initial rows' if allowed == 3 else ''} alone: our graphs have no"
                " weights on edges"
            )
        rows = self.rows(arguments[0], name)
        if rows.heads:
            raise Unfit(f"{name} reads rows of several heads; write .flatten(1) before it")
        if rows.source != (before := self.last()):
            raise Unfit(
                f"{name} reads rows of {rows.source or 'the features'}, not of"
                f" {before or 'the features'}; layers stand one behind the other here"
            )
        _must_fit(rows.width, conv.h_in, name)
        if conv.kind == "gcnii":
            self.reads_initial(arguments[1 if library(module) != "dgl" else 2], name)
        if conv.drops:
            rows = self.then(rows, Op("drop", p=conv.drops))
        self.steps.append(Step(name, conv, self.gap(rows, name)))
        out = Rows(name, conv.h_out, heads=conv.heads if conv.splits else 0)
        return self.then(out, Op("relu")) if activation_of(conv.activation) else out

    def last(self) -> str:
        if self.steps:
            return self.steps[-1].name
        return self.linears[0].name if self.linears else ""

    def reads_initial(self, argument: object, name: str) -> None:
        initial = self.rows(argument, name)
        if not self.linears or initial != Rows(
            self.linears[0].name, self.linears[0].h_out, (Op("relu"),)
        ):
            raise Unfit(
                f"{name} mixes in other rows than ReLU of the first Linear; write x = x0 ="
                " lin(x).relu() before the convolutions"
            )

    def gap(self, rows: Rows, reader: str) -> Gap:
        """What happens to the rows before their reader."""
        norms = [op for op in rows.ops if op.name == "norm"]
        drops = [op for op in rows.ops if op.name == "drop"]
        if any(op.name == "softmax" for op in rows.ops):
            raise Unfit(f"{reader} reads a softmax; put it at the end of the model")
        if len(norms) > 1 or len(drops) > 1:
            what = "norms" if len(norms) > 1 else "dropouts"
            raise Unfit(f"two {what} before {reader}, and our layers have one; leave one out")
        relu = any(op.name == "relu" for op in rows.ops)
        if not norms:
            return Gap("none", "", relu, drops[0].p if drops else 0.0)
        if rows.ops[0].name != "norm" or not relu:
            raise Unfit(
                f"before {reader} our layers do norm, ReLU, dropout in this order, not"
                f" {', '.join(op.name for op in rows.ops)}; reorder them"
            )
        module = self.modules[norms[0].module]
        kind = "batch" if isinstance(module, nn.BatchNorm1d) else "layer"
        return Gap(kind, norms[0].module, relu, drops[0].p if drops else 0.0)

    def finish(self, output: object) -> Chain:
        if not isinstance(output, fx.Node):
            raise Unfit("forward returns several values; return the logits alone")
        rows = self.rows(output, "the output")
        if not self.steps:
            raise Unfit("no convolution of torch_geometric.nn or dgl.nn is called; use one")
        encoder = decoder = None
        after = [linear for linear in self.linears if linear.name == rows.source]
        before = [linear for linear in self.linears if linear not in after]
        if before:
            encoder = before[0]
        if after:
            decoder = after[0]
        elif rows.source != self.steps[-1].name:
            raise Unfit(f"the output is not that of {self.steps[-1].name}; return its rows")
        if rows.heads > 1:
            raise Unfit("the output has several heads; use one in the last layer")
        ops = [op.name for op in rows.ops]
        if any(name != "softmax" for name in ops):
            raise Unfit(
                f"the output is {ops[0]} of the last layer, and our last layer puts out logits;"
                " return these"
            )
        first = self.steps[0].gap.relu if encoder else False
        last = decoder.gap.relu if decoder else False
        return Chain(tuple(self.steps), encoder, decoder, first, last)


def norm_in(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    """torch's norm in a norm of the user's, and its name. Raises Unfit."""
    inner: Any = getattr(module, "module", None)  # PyG's BatchNorm is a wrapper
    if isinstance(inner, nn.BatchNorm1d):
        module, name = inner, f"{name}.module"
    wanted = {"eps": 1e-5}
    if isinstance(module, nn.BatchNorm1d):
        wanted |= {"momentum": 0.1, "affine": True, "track_running_stats": True}
    elif isinstance(module, nn.LayerNorm):
        wanted |= {"elementwise_affine": True}
    else:
        raise Unfit(
            f"{name} is a {type(module).__name__} of {library(module)}; use torch.nn.BatchNorm1d or"
            " torch.nn.LayerNorm"
        )
    for attribute, value in wanted.items():
        if getattr(module, attribute) != value:
            raise Unfit(
                f"{name} has {attribute}={getattr(module, attribute)}, and our norm has"
                f" {attribute}={value}; use that"
            )
    if module.bias is None:
        raise Unfit(f"{name} has no bias, and our norm has one; use bias=True")
    return module, name


def _must_fit(rows: int | None, reads: int | None, name: str) -> None:
    if rows is not None and reads is not None and rows != reads:
        raise Unfit(
            f"{name} reads rows of {reads} numbers, and those before it have {rows}; make the two"
            " equal"
        )
