"""Runs recorded calls on other rows and other edges, and reads edges off sparse matrices.

A product with a sparse matrix adds up a row of each column that the matrix has a number for, times
that number: it is a sum over edges from columns to rows."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from gnnplan.executor.layers.kernels import Block
from gnnplan.executor.modules.record import Named, Node, Slice, dropout_of

CPU = torch.device("cpu")
Values = dict[Node, Any]
Draw = Callable[[Node, Tensor, float], Tensor]  # (call of dropout, rows, p) -> rows


@dataclass
class Place:
    """Where calls run: on which device, with which tensors, submodules and dropout masks.

    named: returns the module's tensor or submodule of a name. draw: drops rows."""

    named: Callable[[str], Any]
    draw: Draw = lambda node, rows, p: rows
    device: torch.device = CPU

    def run(
        self, nodes: Sequence[Node], values: Values, frees: Mapping[Node, Sequence[Node]]
    ) -> None:
        """Compute nodes in their order and add their values to `values`.

        frees: the nodes whose values are no longer needed after a call."""
        inputs: dict[StorageWeakRef, int] = {}
        if any(node.in_place for node in nodes):
            inputs = storages([*values.values()])
        for node in nodes:
            freed, may_overwrite = frees.get(node, ()), False
            if node.in_place:  # only if no other value shares the storage
                kept = inputs | storages([v for each, v in values.items() if each not in freed])
                may_overwrite = not kept.keys() & storages(values.get(node.reads[0]))
            values[node] = self.call(node, values, may_overwrite)
            for each in freed:
                values.pop(each, None)

    def call(self, node: Node, values: Mapping[Node, Any], may_overwrite: bool = False) -> Any:
        """Return the value of one call. may_overwrite: it may change its first argument."""
        # tree_map over the arguments would take as long as many a call
        args = tuple(self._argument(argument, values) for argument in node.args)
        kwargs = {name: self._argument(value, values) for name, value in node.kwargs.items()}
        if node.drops:
            return self.draw(node, *dropout_of(args, kwargs)[:2])
        if node.in_place and not may_overwrite:
            args = (args[0].clone(), *args[1:])
        function = self._argument(node.call, values)
        with nullcontext() if node.has_grad else torch.no_grad():
            result = function(*args, **kwargs)
        return args[0] if result is None else result

    def _argument(self, argument: Any, values: Mapping[Node, Any]) -> Any:
        # a method: a recursive function inside `call` would keep all values alive in a cycle
        if isinstance(argument, Node):
            return values[argument]
        if isinstance(argument, Named):
            return self.named(argument.name)
        if isinstance(argument, torch.device):
            return self.device
        if isinstance(argument, Slice):
            return slice(*(self._argument(each, values) for each in argument))
        if isinstance(argument, (tuple, list)):
            return type(argument)(self._argument(each, values) for each in argument)
        return argument


def tensors(value: Any) -> list[Tensor]:
    """Return all tensors in a value."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def storages(values: Any) -> dict[StorageWeakRef, int]:
    """Return the storages of the values' tensors, and their sizes [B].

    A weak reference frees the memory and stays unique, where a new storage may have the address of
    a freed one."""
    dense = [tensor for tensor in tensors(values) if tensor.layout == torch.strided]
    found = [tensor.untyped_storage() for tensor in dense]
    return {StorageWeakRef(s): s.nbytes() for s in found}  # type: ignore[no-untyped-call]


def frees(nodes: Iterable[Node], keep: Collection[Node]) -> dict[Node, list[Node]]:
    """Return, for each call, the values that no later call reads, except those to keep."""
    last: dict[Node, Node] = {}
    for node in nodes:
        last |= dict.fromkeys([node, *node.reads], node)
    found: dict[Node, list[Node]] = {}
    for value, node in last.items():
        if value not in keep:
            found.setdefault(node, []).append(value)
    return found


def grouped(
    edges: Tensor, end: int, readers: int, vertices: int, weight: Tensor | None = None
) -> Block:
    """Return the Block of the edges [2, E] that the first `readers` vertices read.

    end: the end of an edge whose vertex reads the other. weight: [E, 1]."""
    order = edges[end].argsort(stable=True)
    indptr = torch.zeros(readers + 1, dtype=torch.int32)
    indptr[1:] = torch.bincount(edges[end], minlength=vertices)[:readers].cumsum(0)
    order = order[: indptr[-1]]
    weight = None if weight is None else weight[order, 0]
    return Block(indptr.numpy(), edges[1 - end][order].int().numpy(), vertices, weight)


def matrix_edges(matrix: Tensor) -> Tensor:
    """Return the edges [2, E] of a sparse matrix: from the column to the row of each number."""
    return _coalesced(matrix).indices().flip(0)


def numbers(matrix: Tensor, edges: Tensor) -> Tensor:
    """Return a sparse matrix's numbers at some edges [E, 1]; 0 where it stores none."""
    matrix = _coalesced(matrix)
    stored, wanted = (keys(some, len(matrix)) for some in (matrix.indices().flip(0), edges))
    if not len(stored):
        return matrix.values().new_zeros(len(wanted), 1)
    places = torch.searchsorted(stored, wanted).clamp_(max=len(stored) - 1)
    return (matrix.values()[places] * (stored[places] == wanted))[:, None]


def with_loops(edges: Tensor, vertices: int) -> Tensor:
    """Return the edges, followed by a self-loop per vertex."""
    every = torch.arange(vertices)
    return torch.cat([edges, torch.stack([every, every])], 1)


def keys(edges: Tensor, vertices: int) -> Tensor:
    """Return a number per edge [E], unique per pair of ids, in the order of a matrix's entries."""
    return edges[1] * vertices + edges[0]


def _coalesced(matrix: Tensor) -> Tensor:
    return (matrix if matrix.layout == torch.sparse_coo else matrix.to_sparse()).coalesce()
