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
    follow_from,
    is_edge_set,
    is_end,
    is_rows,
    live_nodes,
)

ADDS = ("scatter", "index_add", "index_reduce", "index_put")
PICKS = ("getitem", "index_select", "masked_select", "cat", "concat", "concatenate", "hstack")


def join_ends(recorded: Recorded) -> None:
    """Stack sources and destinations that two calls pick or join alike, of those of an edge set;
    later calls read them from the stack. No two calls are equal."""
    edge_sets = [node for node in recorded.inputs.values() if is_edge_set(node.value)]
    ends: dict[Node, tuple[Node, int]] = {}  # nodes that are the sources (0) or destinations (1)
    picks: dict[Hashable, Node] = {}
    joined: dict[Node, Node] = {}  # ends that later calls read from a stack
    live = live_nodes([recorded.output, *recorded.answers])
    of_rows = follow_from(live, is_rows)
    for node in live:
        node.replace_reads(joined)
        if node.in_place or node in of_rows:
            continue
        edge_sets += [node] if is_edge_set(node.value) else []
        if not is_end(value := node.value):
            continue
        places = itertools.product(edge_sets, (0, 1))
        if place := next((p for p in places if torch.equal(value, p[0].value[p[1]])), None):
            ends[node] = place
        elif node.what in PICKS and node.reads and node.reads[0] in ends:
            own, opposite = replace(node), replace(node)
            of = {read: ends[read] for read in node.reads if read in ends}
            own.replace_reads(of)
            opposite.replace_reads({read: (edges, 1 - at) for read, (edges, at) in of.items()})
            picks[own.key], other = node, picks.get(opposite.key)
            if other is None or other.value.shape != value.shape:
                continue
            pair = (other, node) if ends[node.reads[0]][1] else (node, other)
            values = torch.stack([end.value for end in pair])
            stack = Node(torch.stack, (pair,), {}, "", node.line, node.path, value=values)
            stack.index = node.index + 0.25
            edge_sets.append(stack)
            for at, end in enumerate(pair):
                joined[end] = item = Node(operator.getitem, (stack, at), value=end.value)
                item.index, ends[item] = stack.index + 0.25, (stack, at)


def flip(edges: Tensor) -> Tensor:
    """Return edges from end to start; of a part of an undirected graph, the same edges."""
    return edges.flip(0)


def _is_integer(value: object) -> bool:
    return isinstance(value, Tensor) and value.dtype == torch.int64 and value.ndim > 0


def sums_at(recorded: Recorded) -> Iterator[tuple[Node, int]]:
    """Yield each call that adds rows up at an end of edges, and this end: 0 or 1."""
    live = live_nodes([recorded.output])
    edge_sets = edge_sets_of(live)
    of_rows = follow_from(live, lambda node: is_rows(node) or bool(node.tensor_names))
    for node in live:
        if node not in of_rows or not node.what.startswith(ADDS):
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
