"""What is found of a user's module: a chain of convolutions, and what happens to rows between."""

from __future__ import annotations

from dataclasses import dataclass

from gnnplan.executor.modules.convolutions import Convolution
from gnnplan.planner.gnn.workload import Residual


@dataclass(frozen=True)
class Op:
    """Something that happens to rows between convolutions: 'norm', 'relu', 'drop', 'softmax'."""

    name: str
    module: str = ""  # of a norm: its name in the user's module
    p: float = 0.0  # of dropout
    mask: str = ""  # of dropout: the node that draws it


@dataclass(frozen=True)
class Rows:
    """A value of forward: rows of a convolution, of the features, of a Linear or of a sum."""

    source: str  # its name in the user's module, of a sum in the graph; '': the features
    width: int | None  # None: the features, whose width the first layer says
    ops: tuple[Op, ...] = ()
    heads: int = 0  # [N, heads, .] and not [N, width]


@dataclass(frozen=True)
class Gap:
    """What happens to the inputs of a layer."""

    norm: str  # 'none', 'layer' or 'batch'
    module: str  # the norm's name in the user's module
    relu: bool
    p: float  # of dropout


@dataclass(frozen=True)
class Step:
    """A convolution and what happens to its inputs."""

    name: str  # in the user's module
    convolution: Convolution
    gap: Gap
    reads: Rows
    residual: Residual | None = None
    skip: str = ""  # of a residual with a product: the Linear's name


@dataclass(frozen=True)
class Linear:
    """The Linear before the first convolution or after the last, and what its inputs go through."""

    name: str
    h_in: int
    h_out: int
    gap: Gap


@dataclass(frozen=True)
class Meeting:
    """Rows of all layers that meet at the end, each as its layer hands them on."""

    of: str  # 'sum' or 'cat'
    layers: tuple[int, ...]  # all of them, in the order in which they lie side by side
    relu: bool  # of the last layer's rows
    p: float  # of the dropout after which they meet: that of the next layer; 0: they meet before


@dataclass(frozen=True)
class Chain:
    """A whole module."""

    steps: tuple[Step, ...]
    encoder: Linear | None
    decoder: Linear | None
    meeting: Meeting | None = None
