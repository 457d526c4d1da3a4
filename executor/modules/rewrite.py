"""Rewrites a recording, for cut.py.

    with_sizes         numbers that differ on a larger graph become sizes
    merge_equal_calls  equal calls become one
    join_ends          ends of edges that `forward` computes apart, as row[mask] and
                       torch.cat([row, loops]), become edge sets
    read_both_ways     turned edges of an undirected graph become its edges
    freeze_norms       batch norms by running moments become row-wise
    edge_sums, edge_moments, edge_scale, norm_edges
                       the calls that replace a batch norm of edges

What follows a recording knows edges as one tensor [2, E]. A part of the graph has the edges into
its vertices. If the graph is undirected, these are also the edges from its vertices."""

from __future__ import annotations

import inspect
import itertools
import operator
from collections.abc import Hashable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_map

from gnnplan.executor.modules.evaluate import Place
from gnnplan.executor.modules.record import (
    NUMBERS_ASKED,
    Named,
    Node,
    Recorded,
    Unfit,
    edge_sets_of,
    follow_from,
    is_edge_set,
    is_end,
    is_rows,
    live_nodes,
    masks_of,
    number_of,
)

ADDS = ("scatter", "index_add", "index_reduce", "index_put")
PICKS = ("getitem", "index_select", "masked_select", "cat", "concat", "concatenate", "hstack")
BATCH_NORM = inspect.signature(F.batch_norm)


def rewritten(small: Recorded, large: Recorded, is_directed: bool, place: Place) -> Recorded:
    """Return the recording on a small graph, rewritten, with sizes from one on a large graph.

    place: runs calls on the small graph. Raises Unfit if something else of the two differs."""
    recorded = with_sizes(small, large)
    merge_equal_calls(recorded, {})
    join_ends(recorded)
    return recorded if is_directed else read_both_ways(recorded, place)


def with_sizes(small: Recorded, large: Recorded) -> Recorded:
    """Replace numbers that differ between a small and a large graph by sizes; return `small`.

    A size is the number of vertices, or of edges of an edge set. Raises Unfit if something else
    differs."""
    # Python may read the number of vertices, the last vertex's id, or one number of both graphs
    known = {(small.vertices - less, large.vertices - less): (1, -less) for less in (0, 1)}
    pairs = zip([*small.answers.items()], large.answers.values(), strict=False)
    for (node, first), second in pairs:
        is_known = first == second or (first, second) in known
        small.answers[node] = known.get((first, second), (0, first)) if is_known else None
    unknown = (node for node, answer in small.answers.items() if answer is None)
    both = [live_nodes([recorded.output, *recorded.answers]) for recorded in (small, large)]
    inputs = zip(small.inputs.values(), large.inputs.values(), strict=True)
    twins = dict(inputs) | dict(zip(*both, strict=False))
    counts: dict[tuple[int, int], Node] = {}  # edges of both graphs -> an edge set, or else an end
    rivals: dict[tuple[int, int], list[Node]] = {}  # other edge sets of the same number, by masks
    assumed: dict[Hashable, Node] = {}

    def unequal(node: Node) -> Unfit:
        if asked := next(unknown, None):
            return Unfit(f"{asked.place}{NUMBERS_ASKED.format(asked.what)}")
        return Unfit(
            f"{node.place}{node.what} of a graph of {large.vertices:,} vertices is another call"
            f" than of one of {small.vertices}; let nothing depend on the size of the graph"
        )

    def argument(first: Any, second: Any) -> Any:
        """Return an argument of the small graph's call, or the size that it is."""
        if isinstance(first, Node) and isinstance(second, Node):
            is_same = twins.get(first) is second
        elif isinstance(first, (int, float, str, Named)):
            is_same = repr(first) == repr(second)
        else:
            is_same = type(first) is type(second)
        if is_same:
            return first
        if type(first) is type(second) is int:
            times, rest = divmod(first, small.vertices)
            if (second, rest) == (times * large.vertices, 0):  # several rows of each vertex
                size = small.inputs["vertices"]
                several = Node(operator.mul, (size, times), index=node.index - 0.5, value=first)
                return size if times == 1 else several
            if edges := counts.get((first, second)):
                for rival in rivals.get((first, second), ()):
                    as_many = Node(left_none_out, (rival, edges), line=edges.line, path=edges.path)
                    assumed[as_many.key] = as_many
                return Node(number_of, (edges,), index=node.index - 0.5, value=first)
            if not any(answer is None for answer in small.answers.values()):
                raise Unfit(
                    f"{twin.place}{twin.what} is given {second} on a graph of {large.vertices:,}"
                    f" vertices, and {first} on one of {small.vertices}, which is no number of"
                    " vertices or edges: as where vertices are chosen and numbered anew (subgraph,"
                    " relabel_nodes); keep all vertices, and choose by torch.where(mask[:, None],"
                    " rows, others), or by edge_index[:, mask[edge_index[0]]]"
                )
        raise unequal(twin)

    for node, twin in twins.items():
        if (node.what, node.has_grad) != (twin.what, twin.has_grad):
            raise unequal(twin)
        arguments = (node.args, dict(node.kwargs)), (twin.args, dict(twin.kwargs))
        try:
            node.args, node.kwargs = tree_map(argument, *arguments)
        except ValueError:  # the arguments are nested otherwise
            raise unequal(twin) from None
        if is_edge_set(node.value) or is_edge_set(twin.value):  # small graphs may have none
            size = number_of(node.value), number_of(twin.value)
            if size in counts and masks_of(counts[size]) != masks_of(node):
                rivals.setdefault(size, []).append(counts[size])
            counts[size] = node
        elif is_end(node.value):
            counts.setdefault((number_of(node.value), number_of(twin.value)), node)
    if len(both[0]) != len(both[1]):
        raise unequal(both[1][-1])
    if len(small.answers) != len(large.answers):
        raise unequal(both[1][-1])
    small.answers |= dict.fromkeys(assumed.values(), (0, True))
    return small


def left_none_out(edges: Tensor, chosen: Tensor) -> Tensor:
    """Return whether an edge set that a mask chooses has as many edges as another one."""
    return torch.tensor(number_of(edges) == number_of(chosen))


def merge_equal_calls(recorded: Recorded, shared: Mapping[Hashable, Node]) -> dict[Node, float]:
    """Replace equal calls by the first of them; return the place of each in the order of calls.

    shared: nodes of another recording that replace equal ones, by Node.key. Dropout, batch norm and
    submodules stay apart. So does a value that a later call changes in place by rows: it would be
    copied first."""
    first: dict[Node, Node] = {}
    by_key: dict[Hashable, Node] = {}
    order: dict[Node, float] = {}
    live = live_nodes([recorded.output, *recorded.answers, *recorded.edges_of_graph])
    changed = {node.reads[0] for node in follow_from(live, is_rows) if node.in_place}
    for node in live:
        node.replace_reads(first)
        is_apart = node.drops or is_batch_norm(node) or isinstance(node.call, Named)
        key = node if is_apart or node in changed else node.key
        first[node] = by_key.setdefault(key, shared.get(key, node))
        order.setdefault(first[node], node.index)
    recorded.output = first[recorded.output]
    recorded.answers = {first[node]: answer for node, answer in recorded.answers.items()}
    return order


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
        masks = masks_of(node)
        whole = [edges for edges in edge_sets if not (masks and masks - masks_of(edges))]
        places = itertools.product(whole, (0, 1))
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
        near = [*places]  # whole numbers that these follow from, up to edge sets
        for each in near:
            reads = [] if each in edge_sets else each.reads
            reads = [read for read in reads if read not in near]
            near += [r for r in reads if _is_integer(r.value) or isinstance(r.value, tuple)]
        sets = {*near}.intersection(edge_sets)
        firsts = [at.value[..., None].flatten(1)[:, 0] for at in places]  # of H columns
        for edges, end in itertools.product(sorted(sets, key=lambda s: -s.index), (1, 0)):
            if any(torch.equal(at, edges.value[end]) for at in firsts):
                yield node, end
                break


def read_both_ways(recorded: Recorded, place: Place) -> Recorded:
    """Let parts of an undirected graph compute sums at edge_index[0].

    `forward` may turn the edges, as PyG's DirGNNConv does. If all sums are at the end 0, as in
    EGNN, parts get the edges from their vertices. If only some are, what they add up is rewritten
    with sources and destinations exchanged."""
    sums = [*sums_at(recorded)]
    if "edge_index" in recorded.inputs and {end for _, end in sums} == {0}:
        recorded.reader = 0
    elif {end for _, end in sums} == {0, 1}:
        _turn(recorded, [node for node, end in sums if end == 0], place)
    edge_sets = edge_sets_of(live_nodes([recorded.output]))
    for first, second in itertools.combinations(edge_sets, 2):
        if (
            torch.equal(first.value.flip(0), second.value)
            and not torch.equal(first.value, second.value)  # as self-loops are
            and masks_of(second) <= masks_of(first)
        ):
            second.call, second.args, second.kwargs = flip, (first,), {}
    return recorded


def _turn(recorded: Recorded, sums: Iterable[Node], place: Place) -> None:
    """Exchange sources and destinations in what sums add up, where the sums stay equal.

    On an undirected graph they do, unless messages read features of edges."""
    of_edges = follow_from(live_nodes(sums), lambda node: is_edge_set(node.value))
    twins: dict[Node, Node] = {}

    def called(node: Node) -> Node:
        """Return the call with the twins of what it reads."""
        new = replace(node)
        new.replace_reads({read: twin(read) for read in node.reads})
        new.value = place.call(new, {read: read.value for read in new.reads})
        return new

    def twin(node: Node) -> Node:
        if node not in twins:
            sizes = node.value.shape[:1] if isinstance(node.value, Tensor) else ()
            is_of_edges = node in of_edges and sizes not in ((), (recorded.vertices,))
            twins[node] = turned(node) if is_of_edges else node
        return twins[node]

    def turned(node: Node) -> Node:
        if node.drops or node.in_place or is_edge_set(node.value) or is_batch_norm(node):
            raise ValueError("one mask per edge, edges as a whole, or running averages")
        if node.what == "getitem" and node.args[1] in (0, 1):
            edges, end = node.args
            if is_edge_set(edges.value) or any(is_edge_set(read.value) for read in edges.reads):
                return replace(node, args=(edges, 1 - end), value=edges.value[1 - end])
        return called(node)

    for node in sums:
        with suppress(Exception):  # whatever fails, the sum stays as it is
            new = called(node)
            if torch.allclose(new.value, node.value, 1e-3, 1e-3):
                node.args, node.kwargs = new.args, new.kwargs


def is_batch_norm(node: Node) -> bool:
    """Whether a call needs moments of all rows."""
    return node.call in (F.batch_norm, edge_scale)


def _owners(rows: Tensor, edges: Tensor | None, end: int, vertices: int) -> Tensor:
    """Return the vertex of each row: where its edge ends; of no edges, each has as many rows."""
    if edges is not None:
        return edges[end]
    every = torch.arange(vertices, device=rows.device)
    return every.repeat_interleave(len(rows) // max(vertices, 1))


def edge_sums(rows: Tensor, edges: Tensor | None, end: int, vertices: int) -> Tensor:
    """Return for each vertex the sums, over edges that end there, of rows [E, H], their squares,
    and 1: [N, 2 H + 1]. A batch norm of edges follows from the means of these over all vertices."""
    each = torch.cat([rows, rows.square(), rows.new_ones(len(rows), 1)], 1)
    owners = _owners(rows, edges, end, vertices)
    return each.new_zeros(vertices, each.shape[1]).index_add(0, owners, each)


def edge_moments(means: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean [H] and variance [H] of all edges' rows, and the number of edges per vertex.

    means [2 H + 1]: of edge_sums, over all vertices. All are 0 if the graph has no edges.

    >>> edge_moments(torch.tensor([3.0, 5.0, 2.0])), edge_moments(torch.zeros(3))[0]
    ((tensor([1.5000]), tensor([0.2500]), tensor(2.)), tensor([0.]))
    """
    width = len(means) // 2
    mean, square = means[: 2 * width].view(2, width) / means[-1].clamp(min=1e-30)
    return mean, (square - mean * mean).clamp(min=0.0), means[-1]


def scale_of(variance: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Return the factor of rows that a batch norm has centred [H]."""
    scale = (variance + eps).rsqrt()
    return scale if weight is None else weight * scale


def centred(rows: Tensor, mean: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """Return a batch norm's outputs: rows minus the mean, times the scale, plus the bias."""
    out = (rows - mean) * scale
    return out if bias is None else out + bias


def edge_scale(
    sums: Tensor, mean: Tensor, variance: Tensor, weight: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """Return a batch norm's mean and scale of edges, side by side for each vertex [N, 2 H]."""
    return torch.cat([mean, scale_of(variance, weight, eps)]).expand(len(sums), -1)


def norm_edges(
    rows: Tensor, scales: Tensor, edges: Tensor | None, end: int, bias: Tensor | None
) -> Tensor:
    """Normalise rows of edges [E, H], by the rows of edge_scale of the vertices where they end."""
    mean, scale = scales[_owners(rows, edges, end, len(scales))].chunk(2, 1)
    return centred(rows, mean, scale, bias)


def freeze_norms(nodes: Iterable[Node], is_training: bool, frozen: set[Any]) -> None:
    """Make batch norms row-wise that use running moments in training.

    frozen: the running means of these norms; training adds to it, evaluation reads it. Raises Unfit
    if a batch norm uses moments of all rows in evaluation."""
    for node in nodes:
        if not is_batch_norm(node):
            continue
        arguments = norm_arguments(node)
        if is_training and not arguments["training"]:
            frozen.add(arguments["running_mean"])
        if arguments["running_mean"] in frozen:
            node.call = _frozen_norm
        elif not is_training and arguments["training"] and arguments["running_mean"] is not None:
            raise Unfit(
                f"{node.place}a batch norm takes moments of all rows in evaluation too; let eval()"
                " reach it, and give training=self.training"
            )


def _frozen_norm(*args: Any, **kwargs: Any) -> Tensor:
    return F.batch_norm(*args, **kwargs)


def norm_arguments(norm: Node) -> dict[str, Any]:
    """Return the arguments of a call of batch norm by name, with defaults."""
    call = BATCH_NORM.bind(*norm.args, **norm.kwargs)
    call.apply_defaults()
    return call.arguments
