"""A user's module as a chain of our own layers, where these compute the same.

What `follow` takes a module for is a guess. It is proved: on a small graph our layers, with the
module's parameters, must make its output and the gradients of all its parameters, in training and
in evaluation. Dropout multiplies by numbers that tell its place."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from gnnplan.executor.layers.blocks import weighted_of
from gnnplan.executor.layers.layer import Drop
from gnnplan.executor.layers.models import Net
from gnnplan.executor.modules.bind import GraphFields, bound
from gnnplan.executor.modules.convolutions import NoChain
from gnnplan.executor.modules.describe import described, places, widths
from gnnplan.executor.modules.follow import follow
from gnnplan.executor.modules.parameters import Parameters, Places
from gnnplan.executor.modules.prove import Small, given_of, moments_of, needs_loops
from gnnplan.executor.modules.record import DROPOUTS, dropout_of
from gnnplan.planner.gnn.model import describe
from gnnplan.planner.gnn.workload import Module, Workload

VERTICES = 47  # of the graph on which both are compared
WITHIN = 1e-8


@dataclass(frozen=True)
class Converted:
    """What a module is among our layers.

    fields: of a Workload. own: of a Module. places: by the name of each of its parameters and
    buffers, where our Net has it."""

    fields: Mapping[str, Any]
    own: Mapping[str, Any]
    places: Mapping[str, Places]
    features: int
    classes: int


def converted(
    module: nn.Module, graph: GraphFields, own_widths: tuple[bool, bool], proves: bool = True
) -> Converted:
    """The module as our layers. Raises NoChain if they do not compute the same.

    own_widths: as of `read`. proves: False where it was proved before."""
    try:
        chain = follow(copy.deepcopy(module))  # a forward may keep what it is given
        reads, writes = widths(chain)
        features = reads if own_widths[0] else graph.features
        classes = writes if own_widths[1] else graph.classes
        fields, own = described(chain, features, classes)
        found = Converted(fields, own, places(module, chain), features, classes)
        if proves:
            _prove(module, found, graph)
    except Exception as error:  # it is none of these chains, however that shows
        raise NoChain from error
    return found


def _prove(module: nn.Module, found: Converted, graph: GraphFields) -> None:
    """Raise NoChain if our layers compute something else."""
    description = Module(
        file="", name="", sha256="", features=found.features, classes=found.classes, **found.own
    )
    workload = Workload.model_validate(
        {"dtype": "float64", **found.fields, "module": description.model_dump()}
    )
    model = describe(workload, found.features, found.classes)
    net = Net(model, workload)
    with torch.no_grad():  # a parameter that the module lacks, as of a norm without any, is NaN
        for weight in net.parameters():
            weight.fill_(torch.nan)
    state = {
        name: value.detach().to(torch.float64) if value.is_floating_point() else value
        for name, value in module.state_dict().items()
    }
    Parameters(state, found.places).fill(net)
    theirs = copy.deepcopy(module).to(torch.float64)
    has_loops = needs_loops(module)
    small = Small(VERTICES, found.features, {}, {}, graph.directed, has_loops)
    binding = bound(module, ["x"], [])
    values = given_of(binding, small, torch.float64)
    for is_training in (True, False):
        theirs.train(is_training)
        for each in (theirs, net):
            each.zero_grad(set_to_none=True)
        with _Marked(), torch.enable_grad():
            expected = binding.call(theirs, values)
        out = _of_net(net, model, small, workload, is_training)
        if expected.shape != out.shape:
            raise NoChain
        weights = torch.linspace(0.5, 1.5, out.numel(), dtype=torch.float64)
        # log_softmax is part of our loss
        (torch.log_softmax(expected, 1).flatten() * weights).sum().backward()  # type: ignore[no-untyped-call]
        (torch.log_softmax(out, 1).flatten() * weights).sum().backward()  # type: ignore[no-untyped-call]
        _must_be_close(torch.log_softmax(expected, 1), torch.log_softmax(out, 1))
        if graph.multilabel or not torch.allclose(
            expected, torch.log_softmax(expected, 1), rtol=WITHIN, atol=WITHIN
        ):
            _must_be_close(expected, out)
        gradients = {
            name: torch.zeros_like(p) if p.grad is None else p.grad
            for name, p in net.named_parameters()
        }
        # buffers have no gradient, and are compared themselves
        ours = {**dict(net.named_buffers()), **gradients}
        trained = Parameters(
            {n: v for n, v in theirs.state_dict().items() if n in found.places}, found.places
        ).trained(ours)
        named = dict(theirs.named_parameters(remove_duplicate=False))
        for name in found.places:
            parameter = named.get(name)
            if parameter is None:
                if is_training:
                    _must_be_close(theirs.state_dict()[name], trained[name])
                continue
            own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            _must_be_close(own, trained[name])
        if any(name not in found.places and p.grad is not None for name, p in named.items()):
            raise NoChain


def _must_be_close(expected: Tensor, found: Tensor) -> None:
    expected, found = expected.detach(), found.detach()
    largest = max(float(expected.abs().max()) if expected.numel() else 0.0, 1e-3)
    if not torch.allclose(expected, found, rtol=0, atol=WITHIN * largest):
        raise NoChain


def marked(rows: Tensor, p: float) -> Tensor:
    """Rows [n, ..] times numbers that tell the column and the p of a dropout."""
    flat = rows.reshape(rows.shape[0], -1)
    columns = torch.arange(flat.shape[1], dtype=flat.dtype)
    return (flat * (1.0 + p * (columns * 0.618).frac() + 0.1 * p)).view(rows.shape)


class _Marked(TorchFunctionMode):
    """Has dropout mark rows."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in DROPOUTS:
            return func(*args, **kwargs)
        p, training, in_place = dropout_of(args, kwargs)
        rows = args[0] if args else kwargs["input"]
        if not (training and p):
            return rows
        out = marked(rows, p)
        return rows.copy_(out) if in_place else out


@dataclass(frozen=True)
class _Mark(Drop):
    def __call__(self, rows: Any) -> Any:
        return marked(rows, self.p) if self.p else rows


def _of_net(net: Any, model: Any, small: Small, workload: Workload, is_training: bool) -> Tensor:
    """What our layers make of the whole small graph."""
    drop = _Mark(workload.dropout if is_training else 0.0, training=is_training)
    everyone = torch.arange(small.vertices)
    h = initial = small.x
    if net.encoder is not None:
        h = initial = net.encode(h, drop)
    x0 = initial if net.initial else None
    summed: Tensor | None = None

    def moments(layer: int, rows: Tensor) -> Tensor | None:
        norm = net.batch_norm(layer)
        return moments_of(norm, rows) if norm is not None and is_training else None

    for number in range(1, net.total + 1):
        layer = net.layer(number)
        block = weighted_of(small.whole, layer.edges, everyone.numpy(), workload)
        h = layer(block, h, drop, x0, net.relu_after(number), moments(number, h))
        if net.jump:
            added = net.added(number, h, drop)
            summed = added if summed is None else summed + added
    h = h if summed is None else summed
    out: Tensor = net.decode(h, drop, moments(net.total + 1, h))
    return out
