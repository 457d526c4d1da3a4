"""A module's forward as a graph of torch.fx, and where its nodes stand in the user's file."""

from __future__ import annotations

import itertools
import re
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

import gnnplan
from gnnplan.executor.modules.convolutions import is_convolution
from gnnplan.executor.modules.record import Unfit

OURS = str(Path(gnnplan.__file__).parent)
MOST_LAYERS = 1000  # of a loop over a list that forward is given


class _Tracer(fx.Tracer):
    """Convolutions, norms and torch's modules are single nodes; lists may be looped over."""

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        """Also notes the lines that made it. fx notes them too, if it is asked to, but imports
        torch's compiler for that: a second and more of every rank's start."""
        node = super().create_node(*args, **kwargs)
        node.meta["learns"] = torch.is_grad_enabled()
        lines = [line for line in traceback.extract_stack() if line.filename != __file__]
        node.stack_trace = "".join(traceback.format_list(lines))
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
                raise Unfit(
                    f"a loop over {obj.node.name} never ends where nothing else says how long it"
                    " is; loop over the layers"
                )
            yield obj[i]  # type: ignore[index]


def traced(module: nn.Module) -> fx.Graph:
    try:
        graph = _Tracer().trace(module)
    except Unfit:
        raise
    except Exception as error:  # whatever the user's forward raises on a stand-in for rows
        words = f"{type(error).__name__}: {error}".strip(": \n").splitlines()[0]
        line = _line_of(error, module)
        raise Unfit(
            f"{line}torch.fx cannot follow forward of {type(module).__name__}"
            f" ({words:.150}); a forward that it can follow calls"
            " modules and functions, and branches on nothing that is computed"
        ) from error
    for node in reversed(graph.nodes):
        if not node.users and node.op not in ("output", "placeholder"):
            graph.erase_node(node)  # its value is not used
    return graph


def _line_of(error: BaseException, module: nn.Module) -> str:
    """'line 12: ' where forward raised, '' if that is unknown or in a library."""
    code = getattr(type(module).forward, "__code__", None)
    found, step = "", error.__traceback__
    while step is not None:
        file = step.tb_frame.f_code.co_filename
        if code is not None and file == code.co_filename and "site-packages" not in file:
            found = f"line {step.tb_lineno}: "
        step = step.tb_next
    return found


def place(node: fx.Node) -> str:
    """'line 12: ', from the innermost line that is neither a library's nor ours.

    An output is where it was computed: its own node is made after forward has returned."""
    if node.op == "output":
        computed = node.args[0]
        return place(computed) if isinstance(computed, fx.Node) else ""
    lines = [
        number
        for path, number in re.findall(r'File "([^"]+)", line (\d+)', node.stack_trace or "")
        if "site-packages" not in path and not path.startswith(OURS)
    ]
    return f"line {lines[-1]}: " if lines else ""


def dropout_of(node: fx.Node) -> tuple[float, bool]:
    """(p, whether it drops) of a call of F.dropout(input, p, training, inplace)."""
    values = dict(zip(("input", "p", "training"), node.args, strict=False)) | dict(node.kwargs)
    p: Any = values.get("p", 0.5)
    return float(p), bool(values.get("training", True))
