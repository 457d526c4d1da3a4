"""Generates graphs of communities with power-law degrees."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gnnplan.planner.graph.graph import Array, Graph, GraphStats, finish, in_neighbours, must_fit
from gnnplan.planner.graph.masks import random_split
from gnnplan.planner.vocabulary.errors import SpecError

# name -> default, lowest, highest; if the default is an int, the parameter must be one
Ranges = Mapping[str, tuple[float, float, float]]
COMMUNITY: Ranges = {
    "vertices": (20_000, 2, 100_000_000),
    "edges": (1_000_000, 0, 2_000_000_000),
    "features": (128, 1, 100_000),
    "classes": (16, 1, 100_000),
    "seed": (0, 0, 2**31 - 1),
    "communities": (0, 0, 1_000_000),
    "mixing": (0.2, 0.0, 1.0),
    "skew": (2.5, 1.5, 100.0),
    "noise": (1.0, 0.0, 100.0),
    "label_noise": (0.05, 0.0, 1.0),
    "train": (0.6, 0.0, 1.0),
}


def community(source: str, given: Mapping[str, Any]) -> Graph:
    """A graph of communities, undirected, with the parameters COMMUNITY.

    Features hint at a vertex's class, and its neighbours hint more. Vertex ids are shuffled, so
    that only a partitioner that reads the edges finds the communities.

    mixing: the share of edges drawn without regard to communities. skew: the exponent of the degree
    distribution. noise: standard deviation of features around a class mean of length 1.
    label_noise: the share of labels drawn at random. train: the share of training vertices, at
    least one; half of the others validate, half test. Raises SpecError for sizes that do not
    fit."""
    vertices, edges, classes = given["vertices"], given["edges"], given["classes"]
    communities = given["communities"] or classes
    if edges > vertices * (vertices - 1):
        raise SpecError(
            f"{source}: edges must be at most vertices * (vertices - 1) ="
            f" {vertices * (vertices - 1):,}, got {edges:,}"
        )
    if not classes <= communities <= vertices:
        raise SpecError(
            f"{source}: needs classes <= communities <= vertices, got {classes:,}, {communities:,},"
            f" {vertices:,}"
        )
    must_fit(source, "the graph", 60.0 * edges + vertices * (100.0 + 8 * given["features"]))
    rng = np.random.default_rng(given["seed"])
    # ids of a community are contiguous while edges are drawn, and shuffled after that
    community = np.arange(vertices) * communities // vertices
    pairs, filled = _pairs(rng, community, edges // 2, given["mixing"], given["skew"])
    new_id = rng.permutation(vertices)
    a, b = new_id[pairs // vertices], new_id[pairs % vertices]
    indptr, indices, _ = in_neighbours(
        np.concatenate([a, b]), np.concatenate([b, a]), vertices, directed=True
    )

    label = np.empty(vertices, np.int64)
    label[new_id] = community % classes
    means = rng.standard_normal((classes, given["features"]), dtype=np.float32)
    means /= np.linalg.norm(means, axis=1, keepdims=True)
    x = rng.standard_normal((vertices, given["features"]), dtype=np.float32)
    x *= np.float32(given["noise"])
    x += means[label]
    y = np.where(
        rng.random(vertices) < given["label_noise"], rng.integers(0, classes, vertices), label
    )
    train = max(given["train"], 1 / vertices)
    masks = random_split(np.ones(vertices, bool), rng, train)
    notes = ["a generated graph, not data: its classes and parts are easier than real ones"] + (
        [f"{filled:,} edges drawn uniformly: the communities were full"] if filled else []
    )
    stats = GraphStats(
        name="community",
        source=source,
        vertices=vertices,
        edges=len(indices),
        features=given["features"],
        classes=classes,
        train_vertices=int(masks[0].sum()),
        multilabel=False,
        hash="",
        notes=tuple(notes),
    )
    return finish(Graph(stats, indptr, indices, x, y, *masks))


def _pairs(
    rng: np.random.Generator, community: Array, count: int, mixing: float, skew: float
) -> tuple[NDArray[np.int64], int]:
    """`count` distinct pairs i < j as i * N + j, and the number of edges drawn uniformly.

    Both ends are drawn by weight. The second is from the community of the first, except in a share
    `mixing`. Edges are drawn uniformly where communities are full."""
    n = len(community)
    weight = (1 - rng.random(n)) ** (-1 / (skew - 1))
    # capped, so that no hub is connected to everything
    cumulative = np.concatenate([[0.0], np.cumsum(np.minimum(weight, 50 * weight.mean()))])
    first = np.searchsorted(community, np.arange(community[-1] + 1))
    bounds = cumulative[np.append(first, n)]
    pairs = np.empty(0, np.int64)
    for _ in range(8):
        if len(pairs) >= count:
            break
        draws = int(1.15 * (count - len(pairs))) + 64
        a = _pick(rng, cumulative, np.zeros(draws), np.full(draws, cumulative[-1]))
        anywhere = rng.random(draws) < mixing
        low, high = bounds[community[a]], bounds[community[a] + 1]
        b = _pick(
            rng, cumulative, np.where(anywhere, 0.0, low), np.where(anywhere, cumulative[-1], high)
        )
        pairs = _add(pairs, a, b, n)
    filled = 0
    if len(pairs) < count:
        drawn = len(pairs)
        # so dense that drawing would take forever: draw from a list of the missing pairs
        if n * (n - 1) // 2 <= 8 * count:
            i, j = np.triu_indices(n, 1)
            missing = np.setdiff1d(i.astype(np.int64) * n + j, pairs, assume_unique=True)
            pairs = np.concatenate([pairs, rng.choice(missing, count - len(pairs), replace=False)])
        while len(pairs) < count:
            draws = 2 * (count - len(pairs)) + 64
            pairs = _add(pairs, rng.integers(0, n, draws), rng.integers(0, n, draws), n)
        filled = 2 * (count - drawn)
    return pairs[rng.permutation(len(pairs))[:count]] if len(pairs) > count else pairs, filled


def _pick(
    rng: np.random.Generator, cumulative: Array, low: Array, high: Array
) -> NDArray[np.int64]:
    """Vertices drawn by weight, each from an interval [low, high) of the cumulative weight."""
    drawn = low + rng.random(len(low)) * (high - low)
    vertices = np.searchsorted(cumulative, drawn, side="right") - 1
    return np.asarray(np.minimum(vertices, len(cumulative) - 2))  # rounding may reach the end


def _add(pairs: NDArray[np.int64], a: Array, b: Array, n: int) -> NDArray[np.int64]:
    """The distinct pairs, with those of a and b that are no self-loop; sorted."""
    keys = (np.minimum(a, b) * n + np.maximum(a, b))[a != b]
    keys = np.sort(np.concatenate([pairs, keys]))  # np.unique hashes, which is slower here
    return keys[np.concatenate([[True], keys[1:] != keys[:-1]])] if len(keys) else keys
