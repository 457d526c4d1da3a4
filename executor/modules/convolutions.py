"""What the convolutions of PyTorch Geometric and DGL are among our layers.

Each is told by the name of its library and its class, so neither library is imported here. What it
does beyond our layer is not looked at: convert.py proves that ours computes the same."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from gnnplan.executor.modules.parameters import Where
from gnnplan.planner.gnn.kinds import KINDS, Residual

# by library and class: its kind as Workload.model, and where ours has its parameters
CONVOLUTIONS = {
    (library, words[0]): (kind, words[1:])
    for kind, ours in KINDS.items()
    for library, theirs in (("torch_geometric", ours.pyg), ("dgl", ours.dgl))
    if (words := theirs.split())
}


@dataclass(frozen=True)
class Convolution:
    """A convolution in our terms."""

    kind: str  # as Workload.model
    weights: Mapping[str, Where]  # by the name in the convolution
    layer: Mapping[str, int]  # fields of a ModuleLayer
    fields: Mapping[str, float]  # of a Workload, if it is the first layer
    hops: int  # SGC: layers that it is
    drops: float  # DGL: p of the dropout of its inputs
    residual: Residual | None  # that it adds itself


def is_known(part: nn.Module) -> bool:
    """Whether it is one of these convolutions, and no class that is derived from one."""
    return _class_of(part) in CONVOLUTIONS


def _class_of(part: nn.Module) -> tuple[str, str]:
    """Its library and its name."""
    return type(part).__module__.partition(".")[0], type(part).__name__


def known(conv: Any) -> Convolution:
    """A convolution in our terms."""
    kind, names = CONVOLUTIONS[_class_of(conv)]
    state, weights = conv.state_dict(), {}
    for theirs, ours in (pair.split("=") for pair in names):
        name, _, view = ours.partition(":")
        if theirs in state:
            weights[theirs] = Where(name, view or "whole")
    shapes = {where.name: state[name].shape for name, where in weights.items()}
    residual = None
    if "weight_residual" in shapes:
        residual = Residual(linear=True, bias="bias_residual" in shapes)
    elif type(getattr(conv, "res_fc", None)).__name__ == "Identity":
        residual = Residual()
    fields: dict[str, float] = {}
    layer = {"bias": kind == "gcnii" or "bias" in shapes}  # which is said to have one
    if "attention" in shapes:
        fields["heads"] = layer["heads"] = shapes["attention"][1]
    if kind == "gin":
        layer["middle"] = shapes["weight"][0]
    if kind == "gcnii":
        fields = {"alpha": conv.alpha, "theta": float(f"{math.expm1(conv.beta):.12g}")}
    return Convolution(
        kind,
        weights,
        layer,
        fields,
        hops=getattr(conv, "K", getattr(conv, "_k", 1)) if kind == "sgc" else 1,
        drops=conv.feat_drop.p if hasattr(conv, "feat_drop") else 0.0,
        residual=residual,
    )
