"""What a layer of your own is made of: its base class, and the operations over edges.

    from gnnplan.layers import Layer, aggregate, linear

docs/how-to/bring-your-model.md shows one. `Layer` says what its methods get and give."""

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
