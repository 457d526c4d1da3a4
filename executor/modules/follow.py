"""Follows a module's `forward` by torch.fx, and says which layers it is.

A module that we can train is a chain. Rows go from convolution to convolution; between two of them
they may get a norm, ReLU and dropout, in this order or with the last two exchanged. To a
convolution's output the rows that it reads may be added (a residual), or a Linear of them. GCNII's
chain begins and ends with a Linear, and its convolutions also read the first one's output. At the
end the rows of all layers may meet: as a sum, or side by side before a Linear."""

from __future__ import annotations

import operator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from torch import fx, nn

from gnnplan.executor.modules.chain import Chain, Gap, Linear, Meeting, Op, Rows, Step
from gnnplan.executor.modules.convolutions import (
    NoChain,
    activation_of,
    is_convolution,
    known,
    library,
)
from gnnplan.executor.modules.meet import are_all, meeting_of
from gnnplan.executor.modules.trace import dropout_of, traced
from gnnplan.planner.gnn.workload import Residual


def follow(module: nn.Module) -> Chain:
    """The module's forward, in training, as a chain of layers: a guess, which convert.py proves.

    Raises NoChain, and whatever forward raises on a stand-in for rows."""
    module.train()
    return _Walk(module).walk(traced(module))


@dataclass(frozen=True)
class _Meet:
    """Rows that are added, or put side by side, and are no residual."""

    of: str  # 'sum' or 'cat'
    terms: tuple[Rows, ...]


@dataclass(frozen=True)
class _Skip:
    """The last layer's residual, which may turn out to be a part of a sum at the end."""

    node: str  # of the sum
    without: Step
    met: _Meet


class _Input:
    """What forward is given, or a part of it: features, edges or a graph."""


Value = Rows | _Input


class _Walk:
    """Goes through the nodes of a graph, from the features to the output."""

    def __init__(self, module: nn.Module) -> None:
        self.modules = dict(module.named_modules(remove_duplicate=False))
        self.values: dict[fx.Node, Value] = {}
        self.steps: list[Step] = []
        self.linears: dict[str, tuple[nn.Linear, Rows]] = {}  # with what they read
        self.encoder: Linear | None = None
        self.head = ""  # whose rows the next convolution reads
        self.layer_of: dict[str, int] = {}  # by the source of rows: the layer whose output they are
        self.meets: dict[str, _Meet] = {}
        self.skip: _Skip | None = None
        self.used: set[int] = set()

    def walk(self, graph: fx.Graph) -> Chain:
        for node in graph.nodes:
            if node.op == "output":
                return self.finish(node.args[0])
            if not node.meta["learns"]:
                raise NoChain
            self.values[node] = self.value(node)
            first = node.args[0] if node.args else None
            if isinstance(first, fx.Node) and self.in_place(node):
                self.values[first] = self.values[node]
        raise AssertionError("a graph ends with its output")

    def in_place(self, node: fx.Node) -> bool:
        """Whether a node changes its first argument, so that who reads this reads the result."""
        if node.op == "call_module":
            return bool(getattr(self.modules[str(node.target)], "inplace", False))
        name = node.target if isinstance(node.target, str) else node.target.__name__
        last = {"relu": 1, "dropout": 3}.get(name)
        given = last is not None and len(node.args) > last and node.args[last]
        return name in ("relu_", "add_", "iadd") or bool(given or node.kwargs.get("inplace"))

    # -- values ----------------------------------------------------------------------------------

    def value(self, node: fx.Node) -> Value:
        if node.op == "placeholder":
            return _Input()
        if node.op == "call_module":
            return self.call_module(node)
        if node.op == "get_attr":
            raise NoChain
        target = node.target
        first = node.args[0] if node.args else node.kwargs.get("input")
        if isinstance(first, fx.Node) and isinstance(self.values[first], _Input):
            if target is operator.getitem and not isinstance(node.args[1], (int, str)):
                raise NoChain
            if target in (getattr, operator.getitem):
                return _Input()
            if node.op == "call_method" and target == "local_var":  # of a DGL graph
                return _Input()
        name = target if isinstance(target, str) else getattr(target, "__name__", str(target))
        if name in ("cat", "concat", "concatenate"):
            given = (*node.args[1:], node.kwargs.get("dim", node.kwargs.get("axis", 0)))
            return self.beside(node, given[0])
        if name in ("add", "iadd", "add_"):
            return self.added(node)
        rows = self.rows(first, str(node.name))
        if name == "dropout":
            p, drops = dropout_of(node)
            return self.then(rows, Op("drop", p=p, mask=node.name)) if drops and p else rows
        if name in ("relu", "relu_"):
            return self.then(rows, Op("relu"))
        if name == "log_softmax":
            return self.then(rows, Op("softmax"))
        if name in ("flatten", "mean", "squeeze", "view", "reshape") and rows.heads:
            return self.joined(rows, name, node)
        raise NoChain

    def rows(self, argument: object, what: str) -> Rows:
        """The rows that an argument is; what forward was given counts as features."""
        value = self.values.get(argument) if isinstance(argument, fx.Node) else None
        if isinstance(value, Rows):
            return value
        if isinstance(value, _Input):
            return Rows("", None)
        raise NoChain

    def then(self, rows: Rows, op: Op) -> Rows:
        return replace(rows, ops=(*rows.ops, op))

    def joined(self, rows: Rows, name: str, node: fx.Node) -> Rows:
        """Rows [N, heads, width] as [N, heads width]; a mean is over one head."""
        if name in ("mean", "squeeze") and rows.heads > 1:
            raise NoChain
        sizes = node.args[1:]
        fitting: dict[str, list[Any]] = {
            "view": [(-1, rows.width)],
            "squeeze": [(1,), (-2,)],
            "mean": [(1,), (-2,)],
        }
        fitting |= {"reshape": fitting["view"], "flatten": [(1,)]}
        if tuple(sizes) not in fitting[name]:
            raise NoChain
        return replace(rows, heads=0)

    def beside(self, node: fx.Node, dim: object) -> Rows:
        """Rows side by side, which a Linear at the end may read."""
        given: Any = node.args[0] if node.args else ()
        given = given if isinstance(given, (list, tuple)) else ()
        terms = [self.values.get(term) for term in given]
        if dim not in (1, -1) or not terms:
            raise NoChain
        return self.met("cat", node, terms)

    def met(self, of: str, node: fx.Node, terms: list[Any]) -> Rows:
        """Rows that meet and are no residual."""
        found: list[Rows] = []
        for term in terms:
            inner = self.meets.get(term.source) if isinstance(term, Rows) else None
            if inner and inner.of == of == "sum" and not term.ops:
                found += inner.terms
            elif isinstance(term, Rows) and term.source in self.layer_of and not term.heads:
                found.append(term)
            else:
                raise NoChain
        self.meets[node.name] = _Meet(of, tuple(found))
        widths = [term.width or 0 for term in found]
        return Rows(node.name, sum(widths) if of == "cat" else widths[0])

    def added(self, node: fx.Node) -> Rows:
        """A sum of rows: a residual, or rows of several layers that are added at the end."""
        numbers = [term for term in node.args if not isinstance(term, fx.Node)]
        terms = [self.values.get(term) for term in node.args if isinstance(term, fx.Node)]
        if numbers == [0] and not node.kwargs:  # as the built-in sum begins
            return self.rows(next(t for t in node.args if isinstance(t, fx.Node)), "a sum")
        try:
            step = self.steps[-1] if self.steps else None
            rows = self.residual(node)
        except NoChain:
            return self.met("sum", node, [] if numbers or node.kwargs else terms)
        assert step is not None
        with suppress(NoChain):
            self.met("sum", node, terms)
            self.skip = _Skip(node.name, step, self.meets.pop(node.name))
        self.layer_of[node.name] = self.layer_of.pop(step.name)
        return rows

    def residual(self, node: fx.Node) -> Rows:
        """The sum of a convolution's rows with those that it reads, or with a Linear of them."""
        terms = [self.values.get(term) for term in node.args if isinstance(term, fx.Node)]
        found = [term for term in terms if isinstance(term, Rows) and term.source == self.head]
        if not self.steps or len(terms) != 2 or node.kwargs or len(found) != 1:
            raise NoChain
        out, step, name = found[0], self.steps[-1], self.steps[-1].name
        other = terms[1] if terms[0] is out else terms[0]
        own = Rows("", None) if isinstance(other, _Input) else other
        assert own is not None
        if step.residual or out.source != name:
            raise NoChain
        if any(op.name != "relu" for op in out.ops) or out.heads:
            raise NoChain
        skip = ""
        if own.source in self.linears and own.source != step.reads.source:
            linear, reads = self.linears[own.source]
            if own.ops:
                raise NoChain
            skip, own = own.source, reads
        inputs = () if step.gap.norm != "none" or not step.gap.relu else (Op("relu"),)
        if own.source != step.reads.source or own.ops not in (step.reads.ops, inputs):
            raise NoChain
        if step.convolution.kind in ("gcnii", "sgc"):
            raise NoChain
        residual = Residual(
            of="prepared" if own.ops == step.reads.ops else "inputs",
            linear=bool(skip),
            bias=bool(skip) and linear.bias is not None,
            after_relu=bool(out.ops),
        )
        self.steps[-1] = replace(step, residual=residual, skip=skip)
        self.head = node.name
        return Rows(node.name, step.convolution.h_out)

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
            return self.then(rows, Op("drop", p=module.p, mask=node.name)) if module.p else rows
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
            at = norm_in(module, name)
            return self.then(rows, Op("norm", at))
        raise NoChain

    def once(self, module: nn.Module, name: str) -> None:
        if id(module) in self.used:
            raise NoChain
        self.used.add(id(module))

    def linear(self, rows: Rows, name: str, module: nn.Linear) -> Rows:
        self.once(module, name)
        if rows.heads:
            raise NoChain
        self.linears[name] = module, rows
        return Rows(name, module.out_features)

    def end(self, name: str) -> Linear:
        """A Linear as encoder or decoder."""
        module, rows = self.linears[name]
        if module.bias is None:
            raise NoChain
        if not self.steps and rows.source:
            raise NoChain
        return Linear(name, module.in_features, module.out_features, self.gap(rows, name))

    def convolve(self, node: fx.Node, name: str, module: nn.Module) -> Rows:
        self.once(module, name)
        conv = known(module)
        arguments = list(node.args)
        if library(module) == "dgl":  # (graph, rows, ..)
            arguments[:2] = arguments[1::-1]
        allowed = 3 if conv.kind == "gcnii" else 2
        given = [key for key, value in node.kwargs.items() if value is not None]
        if len(arguments) != allowed or given:
            raise NoChain
        rows = self.rows(arguments[0], name)
        if rows.heads:
            raise NoChain
        if not self.steps and rows.source in self.linears:
            self.encoder, self.head = self.end(rows.source), rows.source
        if self.skip and rows.source == self.skip.without.name:
            self.take_back(self.skip)
        if rows.source in self.meets:
            raise NoChain
        if rows.source != self.head:
            raise NoChain
        if conv.kind == "gcnii":
            self.reads_initial(arguments[1 if library(module) != "dgl" else 2], name)
        if conv.drops:
            rows = self.then(rows, Op("drop", p=conv.drops, mask=node.name))
        self.steps.append(Step(name, conv, self.gap(rows, name), rows, conv.residual))
        self.head, self.skip = name, None
        self.layer_of[name] = len(self.steps)
        out = Rows(name, conv.h_out, heads=conv.heads if conv.splits else 0)
        return self.then(out, Op("relu")) if activation_of(conv.activation) else out

    def reads_initial(self, argument: object, name: str) -> None:
        initial = self.rows(argument, name)
        first = self.encoder
        if not first or initial != Rows(first.name, first.h_out, (Op("relu"),)):
            raise NoChain

    def gap(self, rows: Rows, reader: str) -> Gap:
        """What happens to the rows before their reader."""
        norms = [op for op in rows.ops if op.name == "norm"]
        drops = [op for op in rows.ops if op.name == "drop"]
        if any(op.name == "softmax" for op in rows.ops):
            raise NoChain
        if len(norms) > 1 or len(drops) > 1:
            raise NoChain
        relu = any(op.name == "relu" for op in rows.ops)
        if not norms:
            return Gap("none", "", relu, drops[0].p if drops else 0.0)
        if rows.ops[0].name != "norm" or not relu:
            raise NoChain
        module = self.modules[norms[0].module]
        kind = "batch" if isinstance(module, nn.BatchNorm1d) else "layer"
        return Gap(kind, norms[0].module, relu, drops[0].p if drops else 0.0)

    def finish(self, output: object) -> Chain:
        if not isinstance(output, fx.Node):
            raise NoChain
        rows = self.rows(output, "the output")
        if not self.steps:
            raise NoChain
        decoder, meeting = None, self.meeting(rows)
        if meeting:
            decoder = self.end(rows.source) if rows.source in self.linears else None
        elif rows.source in self.linears and self.linears[rows.source][1].source == self.head:
            decoder = self.end(rows.source)
        elif rows.source != self.head:
            raise NoChain
        if rows.heads > 1:
            raise NoChain
        ops = [op.name for op in rows.ops]
        if any(name != "softmax" for name in ops):
            raise NoChain
        return Chain(tuple(self.steps), self.encoder, decoder, meeting)

    # -- rows of all layers that meet at the end -------------------------------------------------

    def take_back(self, skip: _Skip) -> None:
        """What was taken for a residual of the last layer is a sum of its own."""
        self.steps[-1], self.head, self.skip = skip.without, skip.without.name, None
        self.meets[skip.node] = skip.met
        self.layer_of[self.head] = self.layer_of.pop(skip.node)

    def meeting(self, output: Rows) -> Meeting | None:
        """How rows of all layers meet before the output; None if they do not."""
        linear, rows = self.linears.get(output.source, (None, output))
        skip, last = self.skip, self.steps[-1].residual
        is_none_of_ours = bool(linear or (last and last.after_relu))
        if skip and rows.source == skip.node and is_none_of_ours and self.are_all(skip.met.terms):
            self.take_back(skip)
        if rows.source not in self.meets:
            return None
        met = self.meets[rows.source]
        if skip and not self.are_all(met.terms):  # with the parts of a sum they may be
            self.take_back(skip)
            parts = {skip.node: skip.met.terms}
            terms = (part for term in met.terms for part in parts.get(term.source, (term,)))
            met = replace(met, terms=tuple(terms))
        if not self.are_all(met.terms):
            raise NoChain
        if met.of == "cat" and not linear:
            raise NoChain
        if linear and rows.ops:
            raise NoChain
        return meeting_of(met.of, met.terms, self.layer_of, self.steps)

    def are_all(self, terms: tuple[Rows, ...]) -> bool:
        """Whether these are the rows of every layer, before the last one's residual if any."""
        skip = self.skip
        layer_of = self.layer_of | ({skip.without.name: len(self.steps)} if skip else {})
        return are_all(terms, layer_of, len(self.steps))


def norm_in(module: nn.Module, name: str) -> str:
    """The name of torch's norm in a norm of the user's. Raises NoChain."""
    inner: Any = getattr(module, "module", None)  # PyG's BatchNorm is a wrapper
    if isinstance(inner, nn.BatchNorm1d):
        module, name = inner, f"{name}.module"
    if not isinstance(module, (nn.BatchNorm1d, nn.LayerNorm)):
        raise NoChain
    return name
