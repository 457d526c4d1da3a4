"""Build a `Graph` from `Parts`: check the arrays, add stand-ins for missing ones, and note both."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import cast

import numpy as np

from gnnplan.planner.graph.fields import EDGE, VERTEX, along, checked
from gnnplan.planner.graph.graph import (
    IDS_REACH,
    MOST_VERTICES,
    Array,
    Cut,
    Features,
    Graph,
    GraphStats,
    finish,
    in_neighbours,
    merging_note,
    must_fit,
)
from gnnplan.planner.graph.labels import Labels, as_mask, read_labels, split_of, stand_in
from gnnplan.planner.graph.npy import must_be_ids
from gnnplan.planner.graph.parts import Extras, Parts, counts_of
from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.planner.vocabulary.units import show_count

STAND_IN_FEATURES = 128
STAND_IN_CLASSES = 16
STAND_IN_LABELS = "STAND-IN LABELS"  # first words of the note on stand-in labels


def must_be_a_graph(parts: Parts, numbers: bool) -> tuple[int, int]:
    """Raise SpecError where `build` would, in less memory; return (vertices, edges).

    parts: whole arrays. numbers: labels are regression targets."""
    (src, _), vertices, _ = _checked_edges(parts)
    _fields(parts, vertices, len(src))
    if parts.y is not None or parts.masks:
        found = read_labels(parts.path, parts.y, vertices, parts.classes, numbers)
        rng, notes = np.random.default_rng(0), list[str]()
        split_of(parts.path, _masks(parts, notes), found, rng, notes, 0)
    return vertices, len(src)


def build(parts: Parts, source: str, extras: Extras, directed: bool) -> Graph:
    """Return the graph of the parts, with a note for everything that was changed or made up.

    parts: whole arrays. Their edges and edge fields are removed from `parts`, since they take as
    much memory as the graph. Raises SpecError that names the array, the rule and the offending
    number."""
    path, notes = parts.path, [*parts.notes]
    (src, dst), vertices, counted = _checked_edges(parts)
    if not counted:
        notes.append("vertex count taken from the highest edge id")
        if first := min(int(src.min()), int(dst.min())):
            notes.append(
                f"no edge has vertex 0: ids begin with {first:,}; if they count from 1, subtract 1"
            )
    vertex_fields, on_edges = _fields(parts, vertices, len(src))
    stand_in_width = (extras.width or STAND_IN_FEATURES) if parts.x is None else 0
    what, nbytes = f"{vertices:,} vertices", vertices * (20.0 + 8 * stand_in_width)
    what += f" with {stand_in_width:,} stand-in features" * (stand_in_width > 0)
    nbytes += (120.0 if on_edges else 60.0) * len(src)
    must_fit(source, what, nbytes + sum(2.0 * field.nbytes for field in on_edges.values()))
    indptr, indices, changes = in_neighbours(src, dst, vertices, directed)
    if not counted and 2 * (bare := _without_edges(src, dst, vertices)) > vertices:
        notes.append(
            f"{bare:,} of {vertices:,} vertices have no edge; if ids have gaps, number the vertices"
            " anew from 0"
        )
    edge_fields, moved = along(on_edges, (src, dst), vertices, directed)
    notes += [*changes, *moved] if len(indices) else [*changes, *moved, "the graph has no edges"]
    parts.edges, parts.edge_fields = [], {}
    del src, dst, on_edges

    rng = np.random.default_rng(extras.seed)
    x = cast("Features | None", parts.x)
    if x is None:
        x = stand_in(indptr, stand_in_width, rng)
        notes.append(
            f"stand-in features: the file has none, so {stand_in_width} made by seed"
            f" {extras.seed} (normal noise, one of log degree)"
        )
    elif extras.width is not None:
        raise SpecError(
            f"{source}: features= is the width of stand-in features, but the file has its own;"
            " drop it"
        )
    else:
        notes += merging_note(x)
    found = read_labels(path, parts.y, vertices, parts.classes, extras.numbers)
    notes += _labels_that_may_mislead(found, parts.classes)
    if found.numbers:
        several = show_count(found.classes, "number")
        notes.append(f"regression: y holds {several} per vertex to predict, no classes")
    if extras.stand_in_labels:
        if found.classes:
            raise SpecError(
                f"{source}: task none makes stand-in labels, but the graph has its own"
                f" ({found.classes:,} classes); drop --task none"
            )
        classes = parts.classes or STAND_IN_CLASSES
        found = found._replace(y=rng.integers(0, classes, vertices), classes=classes)
        notes.append(
            f"{STAND_IN_LABELS}: the graph has none, so {classes} classes were drawn by seed"
            f" {extras.seed}; time, bytes and memory are real, losses and accuracy mean nothing"
        )
    masks = split_of(path, _masks(parts, notes), found, rng, notes, extras.seed)
    cut = None
    if parts.owner is not None:
        owner, sizes = np.ascontiguousarray(parts.owner, np.int32), np.bincount(parts.owner)
        if (empty := np.flatnonzero(sizes == 0)).size:
            raise SpecError(
                f"{path}: part {empty[0]} of {sizes.size} has no vertices; partition it again"
            )
        cut = Cut(sizes.size, "metis", owner, blake2b(owner.data, digest_size=16).hexdigest())
    stats = GraphStats(
        name=Path(path).stem,
        source=source,
        vertices=vertices,
        edges=len(indices),
        features=x.shape[1],
        classes=found.classes,
        train_vertices=int(masks[0].sum()),
        multilabel=found.y.ndim == 2 and not found.numbers,
        numbers=found.numbers,
        hash="",
        notes=tuple(notes),
        directed=directed,
    )
    edges, fields = (indptr, indices), (vertex_fields, edge_fields)
    return finish(Graph(stats, *edges, x, found.y, *masks, (), *fields, cut=cut))


def _without_edges(src: Array, dst: Array, vertices: int) -> int:
    """Count the vertices without any edge."""
    bare = np.ones(vertices, bool)
    bare[src] = bare[dst] = False
    return int(bare.sum())


def _labels_that_may_mislead(found: Labels, classes: int | None) -> Iterator[str]:
    """Yield notes on labels that look wrongly encoded. classes: declared by the source."""
    if found.numbers or not found.classes:
        return
    known = found.y[found.labelled]
    if known.ndim == 1:
        if classes is None and (first := int(known.min())):
            yield f"no vertex has class 0: y begins with {first}; if it counts from 1, subtract 1"
    elif known.shape[1] > 1 and ((known == 0) | (known == 1)).all() and (known.sum(1) == 1).all():
        yield (
            f"y holds {known.shape[1]:,} labels for each vertex, of which exactly one is 1; if each"
            " vertex has one class, save y.argmax(1)"
        )


def _fields(parts: Parts, vertices: int, edges: int) -> tuple[dict[str, Array], dict[str, Array]]:
    """Check and return vertex fields, and edge fields in edge-list order. Raises SpecError."""
    path, on_vertices = parts.path, sorted(parts.vertex_fields.items())
    on_edges = [(n, array) for n, pieces in sorted(parts.edge_fields.items()) for array in pieces]
    return (
        {n: checked(path, VERTEX + n, array, vertices, "vertices") for n, array in on_vertices},
        {n: checked(path, EDGE + n, array, edges, "edges") for n, array in on_edges},
    )


def _masks(parts: Parts, notes: list[str]) -> dict[str, Array]:
    """Return the masks of the parts as booleans [N]."""
    return {name: as_mask(parts.path, name, mask, notes) for name, mask in parts.masks.items()}


def _checked_edges(parts: Parts) -> tuple[tuple[Array, ...], int, str]:
    """Return the edges, the number of vertices, and the arrays that give this number (`count`).

    Raises SpecError for an id beyond the vertices."""
    (edges,) = parts.edges
    vertices, counted = count(parts)
    for name, ids in zip(("src", "dst"), edges, strict=True):
        must_be_ids(parts.path, name, ids, vertices, counted=counted or "the edges")
    return edges, vertices, counted


def count(parts: Parts) -> tuple[int, str]:
    """Return the number of vertices, and the names of the arrays that give it ('': the edges)."""
    counts = counts_of(parts)
    in_edges = (int(ids.max()) + 1 for edges in parts.edges for ids in edges if len(ids))
    vertices = next(iter(counts.values())) if counts else max(in_edges, default=0)
    if vertices < 1:
        raise SpecError(
            f"{parts.path}: {', '.join(counts) or 'src, dst'}: the graph is empty (0 vertices); at"
            " least 1 is needed"
        )
    if vertices > MOST_VERTICES:
        raise SpecError(
            f"{parts.path}: {', '.join(counts) or 'src, dst'}: {vertices:,} vertices; {IDS_REACH}"
        )
    return vertices, " and ".join(counts)
