"""Converts a user's module to a chain of built-in layers, if these compute the same.

A chain is a sequence of PyG or DGL convolutions that built-in layers compute too. A norm, ReLU and
dropout may precede each convolution; GCNII's chain begins and ends with a Linear. The order of a
module's calls gives a guess of its chain. The guess is proved as pieces are: on a small graph the
built-in layers, with the module's parameters, must compute its output, the gradients of all its
parameters and its buffers, in training and in evaluation mode, with the same dropout masks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from gnnplan.executor.layers.blocks import weighted_of
from gnnplan.executor.layers.layer import Drop
from gnnplan.executor.layers.models import Net
from gnnplan.executor.modules.bind import VERTICES, GraphFields, Small, bound
from gnnplan.executor.modules.prove import (
    Candidate,
    Dropouts,
    moments_of,
    must_compute,
    recorded_of,
    stirred,
)
from gnnplan.executor.modules.record import COUNTER, Named, Node, Recorded, Unfit, live_nodes
from gnnplan.planner.gnn.kinds import KINDS
from gnnplan.planner.gnn.model import Model, describe
from gnnplan.planner.gnn.workload import Module, ModuleLayer, Workload

NO_CHAIN = "it is no chain of built-in layers, and runs as it is written"
SEED = 7  # of dropout in the proof, in which the masks of all layers are alike
# what may stand between a chain's layers: other calls may differ where no small graph shows it, as
# relu6 and torch.where(degrees < 100, ..)
BETWEEN = ("relu", "relu_", "dropout", "log_softmax", "flatten", "view", "reshape", "squeeze")
NORMS: dict[type[nn.Module], str] = {nn.BatchNorm1d: "batch", nn.LayerNorm: "layer"}
# (library, class) -> (kind, as Workload.model; "theirs=ours:view" of each parameter)
CONVOLUTIONS = {
    (library, words[0]): (kind, words[1:])
    for kind, ours in KINDS.items()
    for library, theirs in (("torch_geometric", ours.pyg), ("dgl", ours.dgl))
    if (words := theirs.split())
}


# Views of our tensor in the shape of theirs. A view can be read and written: one table converts
# weights both ways.
VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "": lambda ours: ours,
    "transposed": Tensor.t,
    "heads": lambda ours: ours[None],  # [heads, width] as [1, heads, width]
    # [a_l | a_r] of each head [heads, 2 width] as one of the two [1, heads, width]
    "left": lambda ours: ours.chunk(2, 1)[0][None],
    "right": lambda ours: ours.chunk(2, 1)[1][None],
    # the rows of sources stand above the rows of destinations
    "upper": lambda ours: ours.chunk(2)[0],
    "lower": lambda ours: ours.chunk(2)[1],
}


@dataclass
class Chain:
    """A module as a chain of built-in layers.

    fields: of a Workload. layers: fields of each ModuleLayer. relu: of a Module. places: see
    Parameters. softmax: the module ends with log_softmax, which is part of our loss."""

    fields: dict[str, Any]
    layers: list[dict[str, Any]] = field(default_factory=list)
    relu: bool = True
    places: dict[str, str] = field(default_factory=dict)
    softmax: bool = False

    @property
    def own(self) -> dict[str, Any]:
        """The fields of a Module."""
        return {"layers": tuple(ModuleLayer(**each) for each in self.layers), "relu": self.relu}


@dataclass(frozen=True)
class Parameters:
    """The state_dict that training starts from, and the places of its tensors in a Net.

    places: the user's name -> the Net's name, as "name" or "name:view". A tensor without a place
    takes no part in training."""

    state: Mapping[str, Tensor]
    places: Mapping[str, str]

    def fill(self, net: nn.Module) -> None:
        """Copy these parameters to a Net, except for tensors that it lacks or holds in part.

        A Net that is cut by columns (P3) has smaller tensors, and is filled from a whole Net."""
        ours = net.state_dict()
        for name, place in self.places.items():
            if place.partition(":")[0] in ours:
                mine = _at(place, ours)
                if mine.shape == self.state[name].shape:
                    mine.copy_(self.state[name])

    def net(self, model: Model, workload: Workload, which: range | None) -> Net:
        """Return the built-in layers `which`, with these parameters."""
        net = Net(model, workload, which)
        self.fill(net)
        return net

    def trained(self, ours: Mapping[str, Tensor], steps: int = 0) -> dict[str, Tensor]:
        """Return a Net's weights after so many steps as the state_dict of the user's module."""
        state = {
            name: (
                _at(self.places[name], ours).to(value.dtype) if name in self.places else value
            ).contiguous()
            for name, value in self.state.items()
        }
        for name in state:
            if name.endswith(COUNTER):
                state[name] = state[name] + steps
        return state


def _at(place: str, ours: Mapping[str, Tensor]) -> Tensor:
    """Return the tensor in a place, in the user's shape."""
    name, _, view = place.partition(":")
    return VIEWS[view](ours[name])


def _class_of(part: nn.Module) -> tuple[str, str]:
    """Return library and name of a submodule's class, which differ for a class derived from it."""
    return type(part).__module__.partition(".")[0], type(part).__name__


def parts_of(module: nn.Module) -> list[str]:
    """Return the submodules to record as one call each. Raises Unfit if none is a convolution."""
    parts = dict(module.named_modules())
    if not any(_class_of(part) in CONVOLUTIONS for part in parts.values()):
        raise Unfit(NO_CHAIN)
    kinds = (nn.Linear, *NORMS)
    return [
        n for n, part in parts.items() if _class_of(part) in CONVOLUTIONS or type(part) in kinds
    ]


def converted(module: nn.Module, graph: GraphFields, proves: bool = True) -> Chain:
    """Return the module as a chain. Raises Unfit if built-in layers do not compute the same.

    proves: False where it was proved before."""
    try:
        parts = parts_of(module)
        bound(module, GraphFields(0, 0))  # built-in layers read no fields of a graph
        small = Small(VERTICES[0], module, graph)
        seen, recorded = recorded_of(module, small, True, torch.float64, parts)
        if recorded.answers:
            raise Unfit(NO_CHAIN)  # another graph may give other answers
        chain = _guess(seen, recorded)
        if proves:
            # Unfit if evaluation depends on the graph's size
            recorded_of(module, small, False, torch.float64, parts)
            _prove(module, chain, graph)
    except Exception as error:  # whatever fails, the module is no chain
        raise Unfit(NO_CHAIN) from error
    return chain


def _guess(module: nn.Module, recorded: Recorded) -> Chain:
    """Return the chain that a module seems to be, from the order of its calls."""
    parts, live = dict(module.named_modules()), {*live_nodes([recorded.output])}
    chain = Chain({"dropout": 0.0, "norm": "none"})
    pending: dict[str, Any] = {}
    active: list[bool] = []
    for node in recorded.nodes:
        number, place = len(chain.layers) + 1, ""
        if node not in live:
            continue
        if node.drops:
            pending["drops"], chain.fields["dropout"] = True, node.drops
        if not isinstance(node.call, Named):
            if node.call and node.what not in BETWEEN:
                raise Unfit(NO_CHAIN)
            continue
        part = parts[node.call.name]
        if _class_of(part) in CONVOLUTIONS:
            reads: Tensor = next(  # the first real rows among its arguments
                value
                for value in (read.value for read in node.reads)
                if isinstance(value, Tensor) and value.is_floating_point() and value.ndim == 2
            )
            active += [bool((reads >= 0).all())] * (number > 1)
            _add(chain, pending, node, part, reads)
            pending = {}
            continue
        if type(part) in NORMS:
            pending["norm"] = chain.fields["norm"] = NORMS[type(part)]
            place = f"layers.{number}.norm"
        elif chain.layers:
            place = "decoder"
        else:
            place = "encoder"
        chain.places |= {
            f"{node.call.name}.{name}": f"{place}.{name}"
            for name in part.state_dict()
            if name != COUNTER
        }
    output = recorded.output.value
    chain.relu = not active or any(active)
    chain.softmax = torch.allclose(output, output.log_softmax(1), rtol=1e-9)
    chain.fields |= {"layers": len(chain.layers), "hidden": chain.layers[0]["h_out"]}
    return chain


def _add(chain: Chain, pending: Mapping[str, Any], node: Node, conv: Any, reads: Tensor) -> None:
    """Add a convolution to the chain, as if it had no options that our layer lacks.

    pending: the norm and dropout that precede it."""
    kind, names = CONVOLUTIONS[_class_of(conv)]
    number, state, shapes = len(chain.layers) + 1, conv.state_dict(), {}
    hops = getattr(conv, "K", getattr(conv, "_k", 1)) if kind == "sgc" else 1
    path = node.call.name  # type: ignore[union-attr]
    for theirs, ours in (pair.split("=") for pair in names):
        if theirs in state:
            name = ours.partition(":")[0]
            shapes[name] = state[theirs].shape
            at = number + hops - 1 if name == "bias" else number  # SGC: the last hop adds it
            chain.places[f"{path}.{theirs}"] = f"layers.{at}.{ours}"
    layer = {
        "h_in": reads.shape[1],
        "h_out": node.value.flatten(1).shape[1],  # heads side by side
        "drops": False,
        "bias": kind == "gcnii" or "bias" in shapes,  # GCNII's layer says True
    } | dict(pending)
    fields: dict[str, Any] = {"model": kind}
    if "attention" in shapes:
        fields["heads"] = layer["heads"] = shapes["attention"][1]
    if kind == "gin":
        layer["middle"] = shapes["weight"][0]
    if kind == "gcnii":
        fields |= {"alpha": conv.alpha, "theta": float(f"{math.expm1(conv.beta):.12g}")}
    if hasattr(conv, "feat_drop") and conv.feat_drop.p:  # a DGL convolution drops its inputs
        layer["drops"], chain.fields["dropout"] = True, conv.feat_drop.p
    chain.fields = fields | chain.fields  # the first layer's count
    more = layer | {"h_in": layer["h_out"], "drops": False}
    chain.layers += [layer, *[more] * (hops - 1)]


def _prove(module: nn.Module, chain: Chain, graph: GraphFields) -> None:
    """Raise an error if the chain's layers compute something else, or have more parameters."""
    widths = graph.features, graph.classes
    description = Module(
        file="", name="", sha256="", features=widths[0], classes=widths[1], **chain.own
    )
    workload = Workload.model_validate(
        {"dtype": "float64", **chain.fields, "module": description.model_dump()}
    )
    model = describe(workload, *widths)
    small, module = Small(VERTICES[1], module, graph), stirred(module)
    buffers = {name: each for name, each in module.named_buffers() if each.is_floating_point()}
    named = {**module.state_dict(), **buffers}
    state = {name: named[name].double() for name in (*chain.places, *buffers)}
    parameters = Parameters(state, chain.places)
    placed = {place.partition(":")[0] for place in chain.places.values()}
    if chain.softmax and graph.multilabel:
        raise Unfit(NO_CHAIN)

    def candidate(is_training: bool) -> Candidate:
        net = parameters.net(model, workload, None)
        output = _of_net(net, small, workload, is_training)
        if placed != {*net.state_dict()} or output.shape[1] != graph.classes:
            raise Unfit(NO_CHAIN)
        if chain.softmax:
            output = output.log_softmax(1)

        def tensors() -> Mapping[str, Tensor | None]:
            ours = {n: p if p.grad is None else p.grad for n, p in net.named_parameters()}
            return parameters.trained(ours | dict(net.named_buffers()))

        return output, tensors

    def dropout_mode() -> Dropouts:
        """Return the mode in which the module draws the masks of built-in layers."""
        return Dropouts(lambda rows, p: Drop(p, SEED, vertices=everyone)(rows))

    everyone = torch.arange(small.vertices)
    must_compute(module, small, dropout_mode, candidate, lambda is_training: "")


def _of_net(net: Net, small: Small, workload: Workload, is_training: bool) -> Tensor:
    """Return the output of built-in layers on the whole small graph."""
    p = workload.dropout if is_training else 0.0
    drop = Drop(p, SEED, vertices=torch.arange(small.vertices), training=is_training)
    h = net.encode(torch.from_numpy(small.fields["x"]), drop)
    x0 = h if net.initial else None
    for number in range(1, net.total + 1):
        layer = net.layer(number)
        block = weighted_of(small.whole, layer.edges, workload)
        moments = moments_of(net.batch_norm(number), h, is_training)
        h = layer(block, h, drop, x0, net.relu_after(number), moments)
    moments = moments_of(net.batch_norm(net.total + 1), h, is_training)
    return net.decode(h, drop, moments)
