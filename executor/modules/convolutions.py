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
from gnnplan.planner.gnn.workload import Residual

# By library and class: its kind as Workload.model, and where ours has its parameters, as
# "theirs=ours:view"; the view of ours (parameters.VIEWS) has their shape. It may lack some of them.
CONVOLUTIONS = {
    "torch_geometric": {
        "GCNConv": ("gcn", "lin.weight=weight bias=bias"),
        "SAGEConv": ("sage", "lin_l.weight=weight lin_l.bias=bias lin_r.weight=weight_self"),
        "GATConv": (
            "gat",
            "lin.weight=weight att_src=attention:left att_dst=attention:right bias=bias"
            " res.weight=weight_residual",
        ),
        "GATv2Conv": (
            "gatv2",
            "lin_l.weight=weight:upper lin_l.bias=bias_in:upper lin_r.weight=weight:lower"
            " lin_r.bias=bias_in:lower att=attention:heads bias=bias res.weight=weight_residual",
        ),
        "GINConv": (
            "gin",
            "nn.0.weight=weight nn.0.bias=bias nn.2.weight=weight_out nn.2.bias=bias_out",
        ),
        "GCN2Conv": ("gcnii", "weight1=weight:transposed"),
        "SGConv": ("sgc", "lin.weight=weight lin.bias=bias"),
    },
    "dgl": {
        "GraphConv": ("gcn", "weight=weight:transposed bias=bias"),
        "SAGEConv": ("sage", "fc_neigh.weight=weight fc_self.weight=weight_self fc_self.bias=bias"),
        # where it multiplies its residual, it has no other bias
        "GATConv": (
            "gat",
            "fc.weight=weight attn_l=attention:left attn_r=attention:right bias=bias"
            " res_fc.weight=weight_residual res_fc.bias=bias",
        ),
        "GATv2Conv": (
            "gatv2",
            "fc_src.weight=weight:upper fc_src.bias=bias_in:upper fc_dst.weight=weight:lower"
            " fc_dst.bias=bias_in:lower attn=attention:heads"
            " res_fc.weight=weight_residual res_fc.bias=bias_residual",
        ),
        "GINConv": (
            "gin",
            "apply_func.0.weight=weight apply_func.0.bias=bias"
            " apply_func.2.weight=weight_out apply_func.2.bias=bias_out",
        ),
        "GCN2Conv": ("gcnii", "weight1=weight:transposed"),
        "SGConv": ("sgc", "fc.weight=weight fc.bias=bias"),
    },
}


@dataclass(frozen=True)
class Convolution:
    """A convolution in our terms."""

    kind: str  # as Workload.model
    weights: Mapping[str, Where]  # by the name in the convolution
    heads: int
    middle: int  # GIN: width between its two products
    hops: int  # SGC: layers that it is
    alpha: float  # GCNII
    theta: float  # GCNII, if it is the first layer
    drops: float  # DGL: p of the dropout of its inputs
    residual: Residual | None  # that it adds itself

    @property
    def bias(self) -> bool:
        """Whether it has one, as a GCNII that has none is said to."""
        return self.kind == "gcnii" or any(at.name == "bias" for at in self.weights.values())


def is_known(part: nn.Module) -> bool:
    """Whether it is one of these convolutions, and no class that is derived from one."""
    library = type(part).__module__.partition(".")[0]
    return type(part).__name__ in CONVOLUTIONS.get(library, {})


def known(conv: Any) -> Convolution:
    """A convolution in our terms."""
    kind, names = CONVOLUTIONS[type(conv).__module__.partition(".")[0]][type(conv).__name__]
    state, weights = conv.state_dict(), {}
    for theirs, ours in (pair.split("=") for pair in names.split()):
        name, _, view = ours.partition(":")
        if theirs in state:
            weights[theirs] = Where(name, view or "whole")
    shapes = {where.name: state[name].shape for name, where in weights.items()}
    residual = None
    if "weight_residual" in shapes:
        residual = Residual(linear=True, bias="bias_residual" in shapes)
    elif type(getattr(conv, "res_fc", None)).__name__ == "Identity":
        residual = Residual()
    return Convolution(
        kind,
        weights,
        heads=shapes["attention"][1] if "attention" in shapes else 0,
        middle=shapes["weight"][0] if kind == "gin" else 0,
        hops=getattr(conv, "K", getattr(conv, "_k", 1)) if kind == "sgc" else 1,
        alpha=conv.alpha if kind == "gcnii" else 0.0,
        theta=float(f"{math.expm1(conv.beta):.12g}") if kind == "gcnii" else 0.0,
        drops=conv.feat_drop.p if hasattr(conv, "feat_drop") else 0.0,
        residual=residual,
    )
