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
from torch.nn import functional as F
from torch.nn.utils.parametrize import is_parametrized

from gnnplan.executor.modules.chain import Chain, Gap, Linear, Meeting, Op, Rows, Step
from gnnplan.executor.modules.convolutions import (
    activation_of,
    is_convolution,
    known,
    library,
)
from gnnplan.executor.modules.meet import are_all, elsewhere, meeting_of
from gnnplan.executor.modules.record import Unfit
from gnnplan.executor.modules.trace import dropout_of, place, traced
from gnnplan.planner.gnn.workload import Residual

# of a torch module, by the names that it keeps them under
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def follow(module: nn.Module) -> Chain:
    """The module's forward as a chain of layers.

    Raises Unfit, with the line of the file where something does not fit."""
    module.train()
    graph = traced(module)
    module.eval()
    for node in traced(module).nodes:
        if node.target is F.dropout and dropout_of(node)[1]:
            raise Unfit(
                f"{place(node)}F.dropout drops in evaluation too, unless it is told; write"
                " training=self.training"
            )
    module.train()
    chain = _Walk(module).walk(graph)
    _must_be_plain(module)
    return chain


def _must_be_plain(module: nn.Module) -> None:
    """Raise Unfit if a part does something that neither its parameters nor `forward` show.

    A strategy trains layers of ours with these parameters, all of them, each for itself."""
    owners: dict[int, str] = {}
    for name, part in module.named_modules():
        what = name or "the module itself"
        if is_parametrized(part):
            raise Unfit(
                f"{what} has a parametrization, which our layers have not; remove it"
                " (torch.nn.utils.parametrize.remove_parametrizations)"
            )
        if any(getattr(part, hooks, None) for hooks in HOOKS):
            raise Unfit(f"{what} has a hook, which no layer of ours calls; remove it")
        for own, parameter in part.named_parameters(prefix=name, recurse=False):
            if not parameter.requires_grad:
                raise Unfit(
                    f"{own} is frozen (requires_grad=False), and all parameters are trained here;"
                    " let it learn"
                )
            if getattr(parameter, "_backward_hooks", None):
                raise Unfit(f"{own} has a hook, which no layer of ours calls; remove it")
            other = owners.setdefault(id(parameter), own)
            if other != own:
                raise Unfit(
                    f"{own} is {other} too, and our layers share no weights; give each its own"
                )


class _Placed(Unfit):
    """An Unfit that names its line."""


@dataclass(frozen=True)
class _Meet:
    """Rows that are added, or put side by side, and are no residual."""

    of: str  # 'sum' or 'cat'
    terms: tuple[Rows, ...]
    unfit: _Placed  # what is said where a convolution reads it


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
            try:
                if node.op == "output":
                    return self.finish(node.args[0])
                if not node.meta["learns"]:
                    raise Unfit("no gradient is recorded here (torch.no_grad); leave that out")
                self.values[node] = self.value(node)
                first = node.args[0] if node.args else None
                if isinstance(first, fx.Node) and self.in_place(node):
                    self.values[first] = self.values[node]
            except _Placed:
                raise
            except Unfit as unfit:
                raise Unfit(f"{place(node)}{unfit}") from unfit
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
            raise Unfit(f"{node.target} is a parameter of the module itself; put it into a layer")
        target = node.target
        first = node.args[0] if node.args else node.kwargs.get("input")
        if isinstance(first, fx.Node) and isinstance(self.values[first], _Input):
            if target is operator.getitem and not isinstance(node.args[1], (int, str)):
                raise Unfit("a part of what forward is given; give convolutions all edges")
            if target in (getattr, operator.getitem):
                return _Input()
            if node.op == "call_method" and target == "local_var":  # of a DGL graph
                return _Input()
        name = target if isinstance(target, str) else getattr(target, "__name__", str(target))
        if name in ("cat", "concat", "concatenate"):
            given = (*node.args[1:], node.kwargs.get("dim", node.kwargs.get("axis", 0)))
            return self.beside(node, name, given[0])
        if name in ("stack", "hstack"):
            raise elsewhere(name)
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

    def beside(self, node: fx.Node, name: str, dim: object) -> Rows:
        """Rows side by side, which a Linear at the end may read."""
        given: Any = node.args[0] if node.args else ()
        given = given if isinstance(given, (list, tuple)) else ()
        terms = [self.values.get(term) for term in given]
        if dim not in (1, -1) or not terms:
            raise elsewhere(name)
        return self.met("cat", node, terms, elsewhere(name))

    def met(self, of: str, node: fx.Node, terms: list[Any], unfit: Unfit) -> Rows:
        """Rows that meet and are no residual. Raises `unfit` if they are not all of layers."""
        found: list[Rows] = []
        for term in terms:
            inner = self.meets.get(term.source) if isinstance(term, Rows) else None
            if inner and inner.of == of == "sum" and not term.ops:
                found += inner.terms
            elif isinstance(term, Rows) and term.source in self.layer_of and not term.heads:
                found.append(term)
            else:
                raise unfit
        self.meets[node.name] = _Meet(of, tuple(found), _Placed(f"{place(node)}{unfit}"))
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
        except Unfit as unfit:
            return self.met("sum", node, [] if numbers or node.kwargs else terms, unfit)
        assert step is not None
        with suppress(Unfit):
            self.met("sum", node, terms, Unfit(""))
            self.skip = _Skip(node.name, step, self.meets.pop(node.name))
        self.layer_of[node.name] = self.layer_of.pop(step.name)
        return rows

    def residual(self, node: fx.Node) -> Rows:
        """The sum of a convolution's rows with those that it reads, or with a Linear of them."""
        terms = [self.values.get(term) for term in node.args if isinstance(term, fx.Node)]
        found = [term for term in terms if isinstance(term, Rows) and term.source == self.head]
        if not self.steps or len(terms) != 2 or node.kwargs or len(found) != 1:
            raise Unfit(
                f"rows meet here that are not a layer's output and its inputs ({node.name}); add to"
                " the rows of a convolution those that it reads, or a Linear of them"
            )
        out, step, name = found[0], self.steps[-1], self.steps[-1].name
        other = terms[1] if terms[0] is out else terms[0]
        own = Rows("", None) if isinstance(other, _Input) else other
        assert own is not None
        if step.residual or out.source != name:
            raise Unfit(f"a second sum after {name}, and our layers have one; leave one out")
        if any(op.name != "relu" for op in out.ops) or out.heads:
            what = "rows of several heads (.flatten(1))" if out.heads else out.ops[0].name
            raise Unfit(f"{what} between {name} and its sum; put that after the sum")
        skip = ""
        if own.source in self.linears and own.source != step.reads.source:
            linear, reads = self.linears[own.source]
            if own.ops:
                raise Unfit(f"{own.ops[0].name} between {own.source} and its sum; leave it out")
            skip, own = own.source, reads
        inputs = () if step.gap.norm != "none" or not step.gap.relu else (Op("relu"),)
        if own.source != step.reads.source or own.ops not in (step.reads.ops, inputs):
            raise Unfit(
                f"{skip or 'the sum'} takes other rows than {name} reads; give it these, before or"
                " after their norm, ReLU and dropout"
            )
        if step.convolution.kind in ("gcnii", "sgc"):
            raise Unfit(f"{name} is of a kind without residuals; leave the sum out")
        width = linear.out_features if skip else own.width
        _must_fit(width, step.convolution.h_out, f"the sum after {name}")
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
        if rows.heads:
            raise Unfit(f"{name} reads rows of several heads; write .flatten(1) before it")
        _must_fit(rows.width, module.in_features, name)
        self.linears[name] = module, rows
        return Rows(name, module.out_features)

    def end(self, name: str) -> Linear:
        """A Linear as encoder or decoder."""
        module, rows = self.linears[name]
        if module.bias is None:
            raise Unfit(f"{name} is a Linear without bias, and ours have one; use bias=True")
        if not self.steps and rows.source:
            raise Unfit(f"{name} is a second Linear before the first convolution; use one")
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
            raise Unfit(
                f"{name} is called with {len(arguments)} values"
                f"{''.join(f', {key}' for key in given)}; give it rows and edges"
                f"{' and the initial rows' if allowed == 3 else ''} alone: our graphs have no"
                " weights on edges"
            )
        rows = self.rows(arguments[0], name)
        if rows.heads:
            raise Unfit(f"{name} reads rows of several heads; write .flatten(1) before it")
        if not self.steps and rows.source in self.linears:
            self.encoder, self.head = self.end(rows.source), rows.source
        if self.skip and rows.source == self.skip.without.name:
            self.take_back(self.skip)
        if rows.source in self.meets:
            raise self.meets[rows.source].unfit
        if rows.source != self.head:
            raise Unfit(
                f"{name} reads rows of {rows.source or 'the features'}, not of"
                f" {self.head or 'the features'}; layers stand one behind the other here"
            )
        _must_fit(rows.width, conv.h_in, name)
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
        decoder, meeting = None, self.meeting(rows)
        if meeting:
            decoder = self.end(rows.source) if rows.source in self.linears else None
        elif rows.source in self.linears and self.linears[rows.source][1].source == self.head:
            decoder = self.end(rows.source)
        elif rows.source != self.head:
            raise Unfit(f"the output is not that of {self.steps[-1].name}; return its rows")
        if rows.heads > 1:
            raise Unfit("the output has several heads; use one in the last layer")
        ops = [op.name for op in rows.ops]
        if any(name != "softmax" for name in ops):
            raise Unfit(
                f"the output is {ops[0]} of the last layer, and our last layer puts out logits;"
                " return these"
            )
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
            raise met.unfit
        if met.of == "cat" and not linear:
            raise Unfit("rows side by side are the output; let a Linear read them")
        if linear and rows.ops:
            raise Unfit(
                f"{rows.ops[0].name} between the rows of all layers and {output.source}; do that to"
                " each layer's rows before they meet"
            )
        try:
            return meeting_of(met.of, met.terms, self.layer_of, self.steps)
        except Unfit as unfit:
            # two layers' rows look like a residual too
            raise met.unfit if met.of == "sum" and len(self.steps) == 2 else unfit from unfit

    def are_all(self, terms: tuple[Rows, ...]) -> bool:
        """Whether these are the rows of every layer, before the last one's residual if any."""
        skip = self.skip
        layer_of = self.layer_of | ({skip.without.name: len(self.steps)} if skip else {})
        return are_all(terms, layer_of, len(self.steps))


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
