"""Runs recorded calls on other rows and other edges, and reads edges off sparse matrices.

A product with a sparse matrix adds up a row of each column that the matrix has a number for, times
that number: it is a sum over edges from columns to rows."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from gnnplan.executor.layers.kernels import Block
from gnnplan.executor.modules.record import Named, Node, Opaque, Slice

CPU = torch.device("cpu")
Values = dict[Node, Any]
Draw = Callable[[Node, Tensor, float], Tensor]  # dropout of a value, with its p


@dataclass
class Place:
    """Where calls run: what the module has by a name, tensors or parts of it; how dropout draws."""

    named: Callable[[str], Any]
    draw: Draw = lambda node, rows, p: rows
    dtype: torch.dtype = torch.float32
    device: torch.device = CPU

    def run(
        self, nodes: Sequence[Node], values: Values, frees: Mapping[Node, Sequence[Node]]
    ) -> None:
        """Add to `values` those of nodes, in their order; frees: after which ones go."""
        given: dict[int, int] = {}
        if any(node.changes for node in nodes):
            given = storages([*values.values()])
        for node in nodes:
            gone, may_change = frees.get(node, ()), False
            if node.changes:  # in place, if nobody else has these numbers
                kept = given | storages([v for each, v in values.items() if each not in gone])
                may_change = not kept.keys() & storages(values.get(node.reads[0]))
            values[node] = self.call(node, values, may_change)
            for freed in gone:
                values.pop(freed, None)

    def call(self, node: Node, values: Mapping[Node, Any], may_change: bool = False) -> Any:
        """The value of one call, of those that it reads; may_change: the first, in place."""
        # torch's own walk of arguments takes as long as many a call
        args = tuple(self._given(argument, values) for argument in node.args)
        kwargs = {name: self._given(given, values) for name, given in node.kwargs.items()}
        if p := node.drops:
            return self.draw(node, args[0] if args else kwargs["input"], p)
        if node.changes and not may_change:
            args = (args[0].clone(), *args[1:])
        function: Any = node.call
        if isinstance(node.call, Opaque):
            function = self.named(node.call.path)
        if node.learns:
            result = function(*args, **kwargs)
        else:
            with torch.no_grad():
                result = function(*args, **kwargs)
        return args[0] if result is None else result

    def _given(self, argument: Any, values: Mapping[Node, Any]) -> Any:
        # not a function in `call`: one that calls itself would hold all values in a cycle
        if isinstance(argument, Node):
            return values[argument]
        if isinstance(argument, Named):
            return self.named(argument.name)
        if isinstance(argument, torch.device):
            return self.device
        if isinstance(argument, Slice):
            return slice(*(self._given(each, values) for each in argument))
        if isinstance(argument, (tuple, list)):
            return type(argument)(self._given(each, values) for each in argument)
        return argument


def tensors(value: Any) -> list[Tensor]:
    """All tensors in a value."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def storages(values: Any) -> dict[int, int]:
    """Where the numbers of values' tensors are, and how many bytes there."""
    dense = [tensor for tensor in tensors(values) if tensor.layout == torch.strided]
    found = [tensor.untyped_storage() for tensor in dense]
    return {storage.data_ptr(): storage.nbytes() for storage in found}


def frees(
    nodes: Iterable[Node],
    keep: Collection[Node],
    reads: Callable[[Node], list[Node]] = lambda node: node.reads,
) -> dict[Node, list[Node]]:
    """By call: the values that no later one reads, but for those to keep."""
    last: dict[Node, Node] = {}
    for node in nodes:
        last |= dict.fromkeys([node, *reads(node)], node)
    found: dict[Node, list[Node]] = {}
    for value, node in last.items():
        if value not in keep:
            found.setdefault(node, []).append(value)
    return found


def grouped(edges: Tensor, readers: int, vertices: int, weight: Tensor | None = None) -> Block:
    """Edges [2, E] into the first `readers` vertices, by these, and what they weigh [E, 1]."""
    order = edges[1].argsort(stable=True)
    indptr = torch.zeros(readers + 1, dtype=torch.int32)
    indptr[1:] = torch.bincount(edges[1], minlength=vertices)[:readers].cumsum(0)
    order = order[: indptr[-1]]
    weight = None if weight is None else weight[order, 0]
    return Block(indptr.numpy(), edges[0][order].int().numpy(), vertices, weight)


def matrix_edges(matrix: Tensor) -> Tensor:
    """Edges [2, E] from columns to rows, where the matrix has a number."""
    return _coalesced(matrix).indices().flip(0)


def numbers(matrix: Tensor, edges: Tensor) -> Tensor:
    """What the matrix has at some edges [E, 1]; 0 where it has nothing."""
    matrix = _coalesced(matrix)
    found, wanted = (keys(some, len(matrix)) for some in (matrix.indices().flip(0), edges))
    if not len(found):
        return matrix.values().new_zeros(len(wanted), 1)
    places = torch.searchsorted(found, wanted).clamp_(max=len(found) - 1)
    return (matrix.values()[places] * (found[places] == wanted))[:, None]


def with_loops(edges: Tensor, vertices: int) -> Tensor:
    """The edges, and then one from each vertex to itself."""
    every = torch.arange(vertices)
    return torch.cat([edges, torch.stack([every, every])], 1)


def keys(edges: Tensor, vertices: int) -> Tensor:
    """A number per edge [E] by which it is known, in the order of a matrix; edges: ids [2, E]."""
    return edges[1] * vertices + edges[0]


def _coalesced(matrix: Tensor) -> Tensor:
    return (matrix if matrix.layout == torch.sparse_coo else matrix.to_sparse()).coalesce()
