"""A module's forward as a graph of torch.fx."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx, nn

from gnnplan.executor.modules.convolutions import NoChain, is_convolution

MOST_LAYERS = 1000  # of a loop over a list that forward is given


class _Tracer(fx.Tracer):
    """Convolutions, norms and torch's modules are single nodes; lists may be looped over."""

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        node = super().create_node(*args, **kwargs)
        node.meta["learns"] = torch.is_grad_enabled()
        return node

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if isinstance(m, (nn.Sequential, nn.ModuleList)) or type(m).__name__ == "JumpingKnowledge":
            return False
        of_library = ("torch.nn", "torch_geometric.nn.norm", "dgl.nn.pytorch")
        return is_convolution(m) or type(m).__module__.startswith(of_library)

    def iter(self, obj: fx.Proxy) -> Iterator[Any]:
        """A list that forward is given, as a graph per layer: its items, in `zip` with layers."""
        for i in itertools.count():
            if i == MOST_LAYERS:
                raise NoChain
            yield obj[i]  # type: ignore[index]


def traced(module: nn.Module) -> fx.Graph:
    """Raises whatever the user's forward raises on a stand-in for rows."""
    graph = _Tracer().trace(module)
    for node in reversed(graph.nodes):
        if not node.users and node.op not in ("output", "placeholder"):
            graph.erase_node(node)  # its value is not used
    return graph


def dropout_of(node: fx.Node) -> tuple[float, bool]:
    """(p, whether it drops) of a call of F.dropout(input, p, training, inplace)."""
    values = dict(zip(("input", "p", "training"), node.args, strict=False)) | dict(node.kwargs)
    p: Any = values.get("p", 0.5)
    return float(p), bool(values.get("training", True))
