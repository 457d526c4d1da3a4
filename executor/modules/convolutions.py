"""What the convolutions of PyTorch Geometric and DGL are among our layers.

Each is told by the name of its library and its class, so neither library is imported here. `known`
gives a convolution's kind (Workload.model), its widths, and where our layer has its parameters.
What it may do beyond our layer is not looked at: convert.py proves that ours computes the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from gnnplan.executor.modules.parameters import Where
from gnnplan.planner.gnn.workload import Residual


class NoChain(Exception):
    """The module is no chain of our layers; it is run as it is written."""


@dataclass(frozen=True)
class Convolution:
    """A convolution in our terms."""

    kind: str  # as Workload.model
    h_in: int
    h_out: int
    weights: Mapping[str, Where]  # by the name in the convolution
    heads: int = 0
    middle: int = 0  # GIN: width between its two products
    bias: bool = True
    hops: int = 1  # SGC: layers that it is
    # GCNII
    alpha: float = 0.0
    beta: float = 0.0
    # DGL: what it does itself around its sums
    drops: float = 0.0
    activation: object = None
    splits: bool = False  # the output is [N, heads, width]
    residual: Residual | None = None
    # it weighs a source by its in-degree, so that a directed graph has other weights than ours
    by_in_degree: bool = False


def library(module: nn.Module) -> str:
    """The package that a module's class is from, or the nearest of its base classes that is."""
    for base in type(module).__mro__:
        for name in ("torch_geometric", "dgl"):
            if base.__module__.startswith(f"{name}.nn"):
                return name
    return type(module).__module__.partition(".")[0]


def is_convolution(module: nn.Module) -> bool:
    """Whether a module is of the convolutions of PyG or DGL, known here or not."""
    return any(
        base.__module__.startswith(("torch_geometric.nn.conv", "dgl.nn.pytorch.conv"))
        for base in type(module).__mro__
    )


def known(conv: nn.Module) -> Convolution:
    """A convolution in our terms. Raises NoChain."""
    key = (library(conv), type(conv).__name__)
    if key not in _READ or type(conv).__module__.partition(".")[0] != key[0]:
        raise NoChain
    return _READ[key](conv)


def _plain(conv: Any) -> tuple[int, int]:
    """(in_channels, out_channels) of a PyG convolution."""
    width = conv.in_channels
    if not isinstance(width, int) or width < 1:
        raise NoChain
    return width, conv.out_channels


def _needs_bias(conv: nn.Module, bias: object) -> None:
    if bias is None:
        raise NoChain


def _one_output(conv: Any) -> None:
    if not conv.concat and conv.heads > 1:
        raise NoChain


def _pyg_gcn(conv: Any) -> Convolution:
    weights: dict[str, Where] = {"lin.weight": Where("weight")}
    if conv.bias is not None:
        weights["bias"] = Where("bias")
    return Convolution("gcn", *_plain(conv), weights, bias=conv.bias is not None, by_in_degree=True)


def _pyg_sage(conv: Any) -> Convolution:
    _needs_bias(conv, conv.lin_l.bias)
    weights: dict[str, Where] = {
        "lin_l.weight": Where("weight"),
        "lin_l.bias": Where("bias"),
        "lin_r.weight": Where("weight_self"),
    }
    return Convolution("sage", *_plain(conv), weights)


def _pyg_gat(conv: Any) -> Convolution:
    _needs_bias(conv, conv.bias)
    _one_output(conv)
    h_in, width = _plain(conv)
    weights: dict[str, Where] = {
        "lin.weight": Where("weight"),
        "att_src": Where("attention", "left of each head"),
        "att_dst": Where("attention", "right of each head"),
        "bias": Where("bias"),
    }
    residual = _inner_residual(conv, "res", weights)
    return Convolution(
        "gat", h_in, conv.heads * width, weights, heads=conv.heads, residual=residual
    )


def _inner_residual(
    conv: Any, name: str, weights: dict[str, Where], bias: str = "bias_residual"
) -> Residual | None:
    """What a convolution adds by itself; puts its parameters into `weights`, its bias at `bias`."""
    inner = getattr(conv, name)
    if inner is None:
        return None
    if not hasattr(inner, "weight"):  # DGL's Identity
        return Residual()
    weights[f"{name}.weight"] = Where("weight_residual")
    if inner.bias is not None:
        weights[f"{name}.bias"] = Where(bias)
    return Residual(linear=True, bias=inner.bias is not None and bias == "bias_residual")


def _pyg_gatv2(conv: Any) -> Convolution:
    _needs_bias(conv, conv.bias)
    _one_output(conv)
    h_in, width = _plain(conv)
    weights: dict[str, Where] = {
        "lin_l.weight": Where("weight", "upper half"),
        "lin_l.bias": Where("bias_in", "upper half"),
        "lin_r.weight": Where("weight", "lower half"),
        "lin_r.bias": Where("bias_in", "lower half"),
        "att": Where("attention", "per head"),
        "bias": Where("bias"),
    }
    residual = _inner_residual(conv, "res", weights)
    return Convolution(
        "gatv2", h_in, conv.heads * width, weights, heads=conv.heads, residual=residual
    )


def _dgl_gatv2(conv: Any) -> Convolution:
    _needs_bias(conv, conv.fc_src.bias)
    weights: dict[str, Where] = {
        "fc_src.weight": Where("weight", "upper half"),
        "fc_src.bias": Where("bias_in", "upper half"),
        "fc_dst.weight": Where("weight", "lower half"),
        "fc_dst.bias": Where("bias_in", "lower half"),
        "attn": Where("attention", "per head"),
    }
    return _dgl_attention(conv, "gatv2", weights, False, _inner_residual(conv, "res_fc", weights))


def _gin(conv: Any, inner: str, activation: object = None) -> Convolution:
    """GINConv of either library; `inner` is its attribute with the perceptron."""
    if isinstance(conv.eps, nn.Parameter) or float(conv.eps):
        raise NoChain
    parts = list(getattr(conv, inner).children()) if getattr(conv, inner) is not None else []
    kinds = [type(part) for part in parts]
    if kinds != [nn.Linear, nn.ReLU, nn.Linear] or any(part.bias is None for part in parts[::2]):
        raise NoChain
    first, _, last = parts
    if first.out_features != last.in_features:
        raise NoChain
    weights: dict[str, Where] = {
        f"{inner}.0.weight": Where("weight"),
        f"{inner}.0.bias": Where("bias"),
        f"{inner}.2.weight": Where("weight_out"),
        f"{inner}.2.bias": Where("bias_out"),
    }
    return Convolution(
        "gin",
        first.in_features,
        last.out_features,
        weights,
        middle=first.out_features,
        activation=activation,
    )


def _pyg_gin(conv: Any) -> Convolution:
    return _gin(conv, "nn")


def _dgl_gin(conv: Any) -> Convolution:
    return _gin(conv, "apply_func", conv.activation)


def _pyg_gcn2(conv: Any) -> Convolution:
    weights: dict[str, Where] = {"weight1": Where("weight", "transposed")}
    return Convolution(
        "gcnii",
        conv.channels,
        conv.channels,
        weights,
        alpha=conv.alpha,
        beta=conv.beta,
        by_in_degree=True,
    )


def _sgc_weights(conv: Any, linear: str, hops: int) -> dict[str, Where]:
    """The first layer has the matrix, the last one the bias."""
    weights: dict[str, Where] = {f"{linear}.weight": Where("1.weight")}
    if getattr(conv, linear).bias is not None:
        weights[f"{linear}.bias"] = Where(f"{hops}.bias")
    return weights


def _pyg_sgc(conv: Any) -> Convolution:
    return Convolution(
        "sgc",
        *_plain(conv),
        _sgc_weights(conv, "lin", conv.K),
        bias=conv.lin.bias is not None,
        hops=conv.K,
        by_in_degree=True,
    )


def _dgl_gcn(conv: Any) -> Convolution:
    if conv.weight is None:
        raise NoChain
    weights: dict[str, Where] = {"weight": Where("weight", "transposed")}
    if conv.bias is not None:
        weights["bias"] = Where("bias")
    return Convolution(
        "gcn",
        conv._in_feats,
        conv._out_feats,
        weights,
        bias=conv.bias is not None,
        activation=conv._activation,
    )


def _dgl_sage(conv: Any) -> Convolution:
    _needs_bias(conv, conv.fc_self.bias)
    weights: dict[str, Where] = {
        "fc_neigh.weight": Where("weight"),
        "fc_self.weight": Where("weight_self"),
        "fc_self.bias": Where("bias"),
    }
    return Convolution(
        "sage",
        conv._in_src_feats,
        conv._out_feats,
        weights,
        drops=conv.feat_drop.p,
        activation=conv.activation,
    )


def _dgl_gat(conv: Any) -> Convolution:
    _needs_bias(conv, getattr(conv.res_fc, "bias", None) if conv.bias is None else conv.bias)
    weights: dict[str, Where] = {
        "fc.weight": Where("weight"),
        "attn_l": Where("attention", "left of each head"),
        "attn_r": Where("attention", "right of each head"),
    }
    if conv.bias is not None:
        weights["bias"] = Where("bias")
    # where it multiplies its residual, DGL's one bias is that of the product
    residual = _inner_residual(conv, "res_fc", weights, bias="bias")
    return _dgl_attention(conv, "gat", weights, True, residual)


def _dgl_attention(
    conv: Any, kind: str, weights: Mapping[str, Where], bias: bool, residual: Residual | None
) -> Convolution:
    return Convolution(
        kind,
        conv._in_src_feats,
        conv._num_heads * conv._out_feats,
        weights,
        heads=conv._num_heads,
        bias=bias,
        drops=conv.feat_drop.p,
        activation=conv.activation,
        splits=True,
        residual=residual,
    )


def _dgl_gcn2(conv: Any) -> Convolution:
    weights: dict[str, Where] = {"weight1": Where("weight", "transposed")}
    return Convolution(
        "gcnii",
        conv._in_feats,
        conv._in_feats,
        weights,
        alpha=conv.alpha,
        beta=conv.beta,
        activation=conv._activation,
        by_in_degree=True,
    )


def _dgl_sgc(conv: Any) -> Convolution:
    return Convolution(
        "sgc",
        conv.fc.in_features,
        conv.fc.out_features,
        _sgc_weights(conv, "fc", conv._k),
        bias=conv.fc.bias is not None,
        hops=conv._k,
        by_in_degree=True,
    )


_READ: dict[tuple[str, str], Callable[[Any], Convolution]] = {
    ("torch_geometric", "GCNConv"): _pyg_gcn,
    ("torch_geometric", "SAGEConv"): _pyg_sage,
    ("torch_geometric", "GATConv"): _pyg_gat,
    ("torch_geometric", "GATv2Conv"): _pyg_gatv2,
    ("torch_geometric", "GINConv"): _pyg_gin,
    ("torch_geometric", "GCN2Conv"): _pyg_gcn2,
    ("torch_geometric", "SGConv"): _pyg_sgc,
    ("dgl", "GraphConv"): _dgl_gcn,
    ("dgl", "SAGEConv"): _dgl_sage,
    ("dgl", "GATConv"): _dgl_gat,
    ("dgl", "GATv2Conv"): _dgl_gatv2,
    ("dgl", "GINConv"): _dgl_gin,
    ("dgl", "GCN2Conv"): _dgl_gcn2,
    ("dgl", "SGConv"): _dgl_sgc,
}


def activation_of(function: object) -> str:
    """'' for none and 'relu'. Raises NoChain on another."""
    if function is None:
        return ""
    if (
        isinstance(function, nn.ReLU)
        or function in (F.relu, Tensor.relu)
        or (getattr(function, "__name__", "") == "relu")
    ):
        return "relu"
    raise NoChain
