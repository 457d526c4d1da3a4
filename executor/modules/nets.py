"""The Net of any workload: built-in layers, a user's layers, or a user's module."""

from __future__ import annotations

from gnnplan.executor.layers.layer import Layer
from gnnplan.executor.layers.models import Net
from gnnplan.executor.modules.own import made
from gnnplan.executor.modules.read import read_again
from gnnplan.planner.gnn.model import Model
from gnnplan.planner.gnn.workload import Workload


def net_of(shapes: Model, workload: Workload, which: range | None = None) -> Net:
    """Return the layers `which` (None: all): built-in, of the user's class, or of their module."""
    if workload.is_module:
        return read_again(workload).net(shapes, workload, which)
    if workload.model != "own":
        return Net(shapes, workload, which)

    def layer(number: int) -> Layer:
        shape = shapes.layers[number - 1]
        return made(workload, number, shape.h_in, shape.h_out)

    return Net(shapes, workload, which, layer)
