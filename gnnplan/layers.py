"""The base class and the edge operations with which to write a layer of your own.

    from gnnplan.layers import Layer, aggregate, linear

docs/how-to/bring-your-model.md has an example; `Layer` documents the methods to implement."""

from gnnplan.executor.layers.kernels import (
    Block,
    aggregate,
    attend,
    attend_pairs,
    linear,
    softmax_aggregate,
)
from gnnplan.executor.layers.layer import Layer

__all__ = [
    "Block",
    "Layer",
    "aggregate",
    "attend",
    "attend_pairs",
    "linear",
    "softmax_aggregate",
]
