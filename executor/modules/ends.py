"""Makes edge sets of ends that `forward` computes apart, as row[mask] and torch.cat([row, loops]);
and finds the end of edges at which `forward` adds rows up.

What follows a recording knows edges as one tensor [2, E]. A part of the graph has the edges into
its vertices. If the graph is undirected, these are also the edges from its vertices."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Hashable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from gnnplan.executor.modules.record import (
    Node,
    Recorded,
    edge_sets_of,
    is_edge_set,
    is_sparse,
    live_nodes,
)

ADDS = ("scatter", "index_add", "index_reduce", "index_put")
PICKS = ("getitem", "index_select", "masked_select", "cat", "concat", "concatenate", "hstack")


def join_ends(recorded: Recorded) -> Recorded:
    """Stack sources and destinations that equal calls pick or join, of those of an edge set; later
    calls read them from the stack."""
    known = {node for name, node in recorded.inputs.items() if not name.startswith("vertex ")}
    edge_sets = [node for node in known if is_edge_set(node.value)]
    first: dict[Hashable, Node] = {}  # of equal calls that read no rows
    same: dict[Node, Node] = {}
    ends: dict[tuple[Node, int], Node] = {}  # sources (0) and destinations (1) of edge sets
    other: dict[Node, Node] = {}  # the destinations of sources, and the other way round
    stacked: dict[Node, Node] = {}  # ends that later calls read from a stack
    nodes, todo = [], recorded.nodes[::-1]
    while todo:
        nodes.append(node := todo.pop())
        if not stacked.keys().isdisjoint(node.reads):
            node.replace_reads(stacked)
        if node.in_place or not known.issuperset(node.reads):
            continue
        known.add(node)
        edge_sets += [node] if is_edge_set(node.value) else []
        seen = replace(node)
        seen.replace_reads(same)
        same[node] = first.setdefault(seen.key, node)
        value = node.value
        if same[node] is not node or not isinstance(value, Tensor) or is_sparse(value):
            continue
        if (value.ndim, value.dtype) != (1, torch.int64):
            continue
        for edges, at in itertools.product(edge_sets, (0, 1)):
            if torch.equal(value, edges.value[at]):
                same[node] = end = ends.setdefault((edges, at), node)
                if opposite := ends.get((edges, 1 - at)):
                    other |= {end: opposite, opposite: end}
                break
        else:
            if node.what not in PICKS or not seen.reads or seen.reads[0] not in other:
                continue
            is_source = any(seen.reads[0] is ends.get((edges, 0)) for edges in edge_sets)
            seen.replace_reads(other)
            partner = first.get(seen.key, node)
            if partner is node or partner.value.shape != value.shape:
                continue
            pair = (node, partner) if is_source else (partner, node)
            values, place = torch.stack([end.value for end in pair]), (node.line, node.path)
            stack = Node(torch.stack, (pair,), {}, "", *place, value=values)
            items = [Node(operator.getitem, (stack, at), value=values[at]) for at in (0, 1)]
            for after, new in enumerate((stack, *items), 1):
                new.index = node.index + after / 4
            stacked |= dict(zip(pair, items, strict=True))
            nodes.append(stack)
            known.add(stack)
            edge_sets.append(stack)
            todo += items[::-1]
    return replace(recorded, nodes=nodes)


def flip(edges: Tensor) -> Tensor:
    """Return edges from end to start; of a part of an undirected graph, the same edges."""
    return edges.flip(0)


def _is_integer(value: object) -> bool:
    return isinstance(value, Tensor) and value.dtype == torch.int64 and value.ndim > 0


def sums_at(recorded: Recorded) -> Iterator[tuple[Node, int]]:
    """Yield each call that adds rows up at an end of edges, and this end: 0 or 1."""
    live, of_rows = live_nodes([recorded.output]), set[Node]()
    edge_sets = edge_sets_of(live)
    for node in live:
        if not (node.name.startswith("vertex ") or node.tensor_names or of_rows & {*node.reads}):
            continue
        of_rows.add(node)
        if not node.what.startswith(ADDS):
            continue
        places = [read for read in node.reads if _is_integer(read.value)]
        sets = {*live_nodes(places)}.intersection(edge_sets)
        firsts = [at.value[..., None].flatten(1)[:, 0] for at in places]  # of H columns
        for edges, end in itertools.product(sorted(sets, key=lambda s: -s.index), (1, 0)):
            if any(torch.equal(at, edges.value[end]) for at in firsts):
                yield node, end
                break


def read_both_ways(recorded: Recorded) -> Recorded:
    """Let parts of an undirected graph compute sums at edge_index[0].

    `forward` may turn the edges, as PyG's DirGNNConv does. If all sums are at the end 0, as in
    EGNN, parts get the edges from their vertices."""
    if "edge_index" in recorded.inputs and {end for _, end in sums_at(recorded)} == {0}:
        recorded.reader = 0
    edge_sets = edge_sets_of(live_nodes([recorded.output]))
    for first, second in itertools.combinations(edge_sets, 2):
        is_turned = torch.equal(first.value.flip(0), second.value)
        if is_turned and not torch.equal(first.value, second.value):  # as self-loops are
            second.call, second.args, second.kwargs = flip, (first,), {}
    return recorded
