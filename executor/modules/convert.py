"""A user's module as a chain of our own layers, where these compute the same.

What `chain_of` takes a module for is a guess. It is proved as pieces are: on a small graph our
layers, with the module's parameters, must make its output, the gradients of all its parameters and
its buffers, in training and in evaluation, with the same dropout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gnnplan.executor.layers.blocks import weighted_of
from gnnplan.executor.layers.layer import Drop
from gnnplan.executor.layers.models import Net
from gnnplan.executor.modules.bind import GraphFields, bound
from gnnplan.executor.modules.chain import Chain, NoChain, chain_of, parts_of
from gnnplan.executor.modules.describe import described, places
from gnnplan.executor.modules.parameters import Parameters, Places, cast
from gnnplan.executor.modules.prove import (
    Dropouts,
    Tried,
    gradients_of,
    moments_of,
    must_compute,
    recorded_of,
)
from gnnplan.executor.modules.small import VERTICES, Small
from gnnplan.planner.gnn.model import describe
from gnnplan.planner.gnn.workload import Module, Workload

SEED = 7  # of dropout in the proof


class Converted(NamedTuple):
    """What a module is among our layers.

    fields: of a Workload. own: of a Module. places: by the name of each of its parameters and
    buffers, where our Net has it."""

    fields: Mapping[str, Any]
    own: Mapping[str, Any]
    places: Mapping[str, Places]


def converted(module: nn.Module, graph: GraphFields, proves: bool = True) -> Converted:
    """The module as our layers. Raises NoChain if they do not compute the same.

    proves: False where it was proved before."""
    try:
        parts = parts_of(module)
        bound(module, GraphFields(0, 0))  # ranks know no other fields of a graph
        small = Small(VERTICES[0], module, graph)
        chain = chain_of(*recorded_of(module, small, True, torch.float64, parts))
        found = Converted(*described(chain), places(chain))
        if proves:
            _prove(module, chain, found, graph)
    except Exception as error:  # it is none of these chains, however that shows
        raise NoChain from error
    return found


def _prove(module: nn.Module, chain: Chain, found: Converted, graph: GraphFields) -> None:
    """Raise an error if our layers compute something else, or learn more."""
    widths = graph.features, graph.classes
    description = Module(
        file="", name="", sha256="", features=widths[0], classes=widths[1], **found.own
    )
    workload = Workload.model_validate(
        {"dtype": "float64", **found.fields, "module": description.model_dump()}
    )
    model = describe(workload, *widths)
    small = Small(VERTICES[1], module, graph)
    state = {name: value for name, value in module.state_dict().items() if name in found.places}
    parameters = Parameters(cast(state, torch.float64), found.places)
    placed = {where.name for several in found.places.values() for where in several}
    if chain.softmax and graph.multilabel:
        raise NoChain

    def tried(values: Mapping[str, Any], is_training: bool) -> Tried:
        net = Net(model, workload)
        parameters.fill(net)
        output = _of_net(net, small, workload, is_training)
        if placed != {*net.state_dict()} or output.shape[1] != graph.classes:
            raise NoChain
        if chain.softmax:  # which is part of our loss
            output = output.log_softmax(1)

        def tensors() -> Mapping[str, Tensor | None]:
            ours = {n: g for n, g in gradients_of(net).items() if g is not None}
            return parameters.trained(ours | dict(net.named_buffers()))

        return output, tensors

    def shared() -> Dropouts:
        """Has a module's own dropout draw as that of our layers does."""
        layers = iter(chain.drawn)
        return Dropouts(lambda rows, p: Drop(p, SEED, 0, next(layers), everyone)(rows))

    everyone = torch.arange(small.vertices)
    must_compute(module, small, shared, tried)


def _of_net(net: Net, small: Small, workload: Workload, is_training: bool) -> Tensor:
    """What our layers make of the whole small graph."""
    everyone = torch.arange(small.vertices)
    p = workload.dropout if is_training else 0.0
    drops = [Drop(p, SEED, 0, n, everyone, training=is_training) for n in range(net.total + 2)]

    def moments(layer: int, rows: Tensor) -> Tensor | None:
        norm = net.batch_norm(layer)
        return moments_of(norm, rows) if norm is not None and is_training else None

    h = small.x if net.encoder is None else net.encode(small.x, drops[0])
    x0 = h if net.initial else None
    met = []
    for number in range(1, net.total + 1):
        layer = net.layer(number)
        block = weighted_of(small.whole, layer.edges, everyone.numpy(), workload)
        relu = net.relu_after(number)
        h = layer(block, h, drops[number], x0, relu, moments(number, h))
        if net.jump:
            met.append(net.added(number, h, drops[number + 1]))
    h = torch.stack(met).sum(0) if met else h
    return net.decode(h, drops[net.total + 1], moments(net.total + 1, h))
