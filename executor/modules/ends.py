"""Makes edge sets of ends that `forward` computes apart, as row[mask] and torch.cat([row, loops]).

What follows a recording knows edges as one tensor [2, E]."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Hashable
from dataclasses import replace

import torch
from torch import Tensor

from gnnplan.executor.modules.record import Node, Recorded, is_edge_set, is_sparse

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
