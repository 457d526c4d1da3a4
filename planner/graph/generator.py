"""Graph generators: communities with power-law degrees, and R-MAT.

A generator returns `Parts`: `load` checks them like a file's, and `convert` writes them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias
from urllib.parse import unquote

import numpy as np
from pydantic import Field, field_validator

from gnnplan.planner.graph.data import MASKS, random_split
from gnnplan.planner.graph.graph import AT_ONCE, Array, must_fit
from gnnplan.planner.graph.parts import Blocks, Parts
from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.planner.vocabulary.files import MOST_SHOWN, suggest
from gnnplan.planner.vocabulary.numbers import Ints, offsets
from gnnplan.planner.vocabulary.spec import Spec, read_as

# (labels before noise [N], blocks of edges, notes)
Drawn: TypeAlias = tuple[Array, Blocks, list[str]]
DRAWN_AT_ONCE = AT_ONCE // 8  # R-MAT edges per block


class Sizes(Spec):
    """The parameters of all generators."""

    vertices: int = Field(20_000, ge=2, le=100_000_000)
    edges: int = Field(1_000_000, ge=0, le=2_000_000_000)
    features: int = Field(128, ge=1, le=100_000)
    classes: int = Field(16, ge=1, le=100_000)
    seed: int = Field(0, ge=0, le=2**31 - 1)
    noise: float = Field(1.0, ge=0, le=100)
    label_noise: float = Field(0.05, ge=0, le=1)
    train: float = Field(0.6, ge=0, le=1)

    @field_validator("*", mode="before")
    @classmethod
    def _has_no_underscore(cls, value: object) -> object:
        """Refuse the text 6_0, which pydantic reads as 60."""
        if "_" in str(value):
            raise ValueError(f"must be a number in the digits 0 to 9, as 2, not {value!r:.80}")
        return value


class Community(Sizes):
    communities: int = Field(0, ge=0, le=1_000_000)
    mixing: float = Field(0.2, ge=0, le=1)
    skew: float = Field(2.5, ge=1.5, le=100)


class RMat(Sizes):
    a: float = Field(0.57, ge=0, le=1)
    b: float = Field(0.19, ge=0, le=1)
    c: float = Field(0.19, ge=0, le=1)


def is_generated(source: str) -> bool:
    """Whether the name of a graph is that of a generated one."""
    return source.startswith("synthetic:")


def generated(source: str) -> Parts:
    """Generate the graph of a name like 'synthetic:community?vertices=20000&seed=1'.

    In all generated graphs features are weak evidence of a vertex's class, and neighbours add
    evidence. Vertex ids are shuffled. noise: standard deviation of features around a class mean of
    length 1. label_noise: the share of labels drawn at random. train: the share of training
    vertices, at least one vertex; the others are half validation, half test. Raises SpecError."""
    kind, given = asked(source)
    rng = np.random.default_rng(given.seed)
    label, edges, notes = GENERATORS[kind][1](source, given, rng)
    vertices, classes = len(label), given.classes
    means = rng.standard_normal((classes, given.features), dtype=np.float32)
    means /= np.linalg.norm(means, axis=1, keepdims=True)

    def rows(rng: np.random.Generator, step: int) -> Iterator[Array]:
        """Yield blocks of `step` feature rows, each row drawn around the mean of its class."""
        for start in range(0, vertices, step):
            here = label[start : start + step]
            x = rng.standard_normal((len(here), means.shape[1]), dtype=np.float32)
            x *= np.float32(given.noise)
            x += means[here]
            yield x

    step = max(1, AT_ONCE // means[0].nbytes)
    if kind == "rmat":  # drawn while read, from a separate stream of random numbers
        x: Any = rows(rng.spawn(1)[0], step)
    else:
        x = next(rows(rng, vertices))
    noisy = rng.random(vertices) < given.label_noise
    y = np.where(noisy, rng.integers(0, classes, vertices), label)
    split = random_split(np.ones(vertices, bool), rng, max(given.train, 1 / vertices))
    masks = dict(zip(MASKS, split, strict=True))
    told = "a generated graph, not data: its classes and parts are easier than real ones"
    return Parts(kind, edges, vertices, classes, x, y, masks, [told, *notes])


def asked(source: str) -> tuple[str, Sizes]:
    """Return the generator's name and parameters from a graph's name. Raises SpecError."""
    head, _, query = source.partition("?")
    kind = head.removeprefix("synthetic:")
    if kind not in GENERATORS:
        raise SpecError(f"{source}: unknown generator {kind!r}{suggest(kind, GENERATORS)}")
    given = parameters(source, query)
    if "task" in given:
        raise SpecError(
            f"{source}: task={given['task'][:MOST_SHOWN]} is of graphs in files, and a generated"
            " graph has labels of classes; leave --task out"
        )
    return kind, read_as(GENERATORS[kind][0], given, f"{source}: ")


def community(source: str, given: Community, rng: np.random.Generator) -> Drawn:
    """Draw an undirected graph of communities, with the parameters Community.

    Only a partitioner that reads the edges finds the communities. mixing: the share of edges drawn
    regardless of communities. skew: the exponent of the degree distribution. Raises SpecError for
    sizes that contradict each other or exceed memory."""
    vertices, edges, classes = given.vertices, given.edges, given.classes
    communities = given.communities or classes
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
    must_fit(source, "the graph", 60.0 * edges + vertices * (100.0 + 8 * given.features))
    # ids of a community are contiguous while edges are drawn, and shuffled after that
    community = np.arange(vertices) * communities // vertices
    pairs, filled = _pairs(rng, community, edges // 2, given.mixing, given.skew)
    new_id = rng.permutation(vertices)
    a, b = new_id[pairs // vertices], new_id[pairs % vertices]
    label = np.empty(vertices, np.int64)
    label[new_id] = community % classes
    notes = [f"{filled:,} edges drawn uniformly: the communities were full"] if filled else []
    return label, iter([(np.concatenate([a, b]), np.concatenate([b, a]))]), notes


def rmat(source: str, given: RMat, rng: np.random.Generator) -> Drawn:
    """Draw an R-MAT graph (Chakrabarti, Zhan, Faloutsos 2004), with the parameters RMat.

    Each edge descends level by level into a quadrant of the adjacency matrix, with probabilities
    a, b, c and 1 - a - b - c, down to a single cell. An edge is drawn once for both directions;
    self-loops and duplicates, which hubs have, are dropped when the graph is read. Edges are drawn
    block by block, so that `convert` can write graphs larger than memory. Raises SpecError if
    a + b + c exceed 1."""
    if (together := given.a + given.b + given.c) > 1:
        raise SpecError(f"{source}: a + b + c must be at most 1, are {together:g}; lower one")
    vertices = given.vertices
    must_fit(source, "the graph's vertices", 120.0 * vertices)
    new_id = rng.permutation(vertices).astype(np.int32)
    label = np.empty(vertices, np.int64)
    label[new_id] = np.arange(vertices) * given.classes // vertices
    return label, _cells(given, new_id), []


# name -> its parameters, and the function that draws the graph
GENERATORS: dict[str, tuple[type[Sizes], Callable[[str, Any, np.random.Generator], Drawn]]] = {
    "community": (Community, community),
    "rmat": (RMat, rmat),
}


def _cells(given: RMat, new_id: Array) -> Blocks:
    """Yield blocks of R-MAT edges (src, dst), equal on any number of cores (a seed per block)."""
    count, vertices = given.edges // 2, len(new_id)
    levels = (vertices - 1).bit_length()
    a, ab, abc = np.cumsum([given.a, given.b, given.c])

    def drawn(piece: int) -> tuple[Array, ...]:
        rng = np.random.default_rng([given.seed, piece])
        ends = np.zeros((2, min(DRAWN_AT_ONCE, count - piece * DRAWN_AT_ONCE)), np.int64)
        for _ in range(levels):
            quarter = rng.random(ends.shape[1], dtype=np.float32)
            ends *= 2
            ends[0] += quarter >= ab
            ends[1] += ((quarter >= a) & (quarter < ab)) | (quarter >= abc)
        ends = ends * vertices >> levels  # scale ids below 2**levels to ids below `vertices`
        return new_id[ends[0]], new_id[ends[1]]

    pieces, threads = -(-count // DRAWN_AT_ONCE), os.cpu_count() or 1
    with ThreadPoolExecutor(threads) as pool:
        for start in range(0, pieces, threads):
            yield from pool.map(drawn, range(start, min(start + threads, pieces)))


def _pairs(
    rng: np.random.Generator, community: Array, count: int, mixing: float, skew: float
) -> tuple[Ints, int]:
    """Draw `count` distinct pairs i < j as i * N + j; return also the number drawn uniformly.

    Both ends are drawn by weight. The second end is from the first end's community, except in a
    share `mixing` of pairs. If communities are full, the remaining pairs are drawn uniformly."""
    n = len(community)
    weight = (1 - rng.random(n)) ** (-1 / (skew - 1))
    # capped, so that no hub is connected to everything
    cumulative = offsets(np.minimum(weight, 50 * weight.mean()))
    first = np.searchsorted(community, np.arange(community[-1] + 1))
    bounds = cumulative[np.append(first, n)]

    def pick(low: Array | float, high: Array | float, draws: int) -> Ints:
        """Draw vertices by weight, each from an interval [low, high) of the cumulative weight."""
        drawn = low + rng.random(draws) * (high - low)
        vertices = np.searchsorted(cumulative, drawn, side="right") - 1
        return np.minimum(vertices, n - 1)  # rounding may give n

    def add(a: Array, b: Array) -> Ints:
        """Return the sorted distinct `pairs` with the pairs (a, b) added, except self-loops."""
        keys = (np.minimum(a, b) * n + np.maximum(a, b))[a != b]
        keys = np.sort(np.concatenate([pairs, keys]))  # np.unique hashes, which is slower here
        return keys[np.diff(keys, prepend=-1) > 0]

    pairs = np.empty(0, np.int64)
    for _ in range(8):
        if len(pairs) >= count:
            break
        draws = int(1.15 * (count - len(pairs))) + 64
        a = pick(0.0, cumulative[-1], draws)
        anywhere = rng.random(draws) < mixing
        low = np.where(anywhere, 0.0, bounds[community[a]])
        high = np.where(anywhere, cumulative[-1], bounds[community[a] + 1])
        pairs = add(a, pick(low, high, draws))
    filled = 0
    if len(pairs) < count:
        drawn = len(pairs)
        # nearly complete graph: draw from the list of missing pairs, random tries would rarely hit
        if n * (n - 1) // 2 <= 8 * count:
            i, j = np.triu_indices(n, 1)
            missing = np.setdiff1d(i.astype(np.int64) * n + j, pairs, assume_unique=True)
            pairs = np.concatenate([pairs, rng.choice(missing, count - len(pairs), replace=False)])
        while len(pairs) < count:
            draws = 2 * (count - len(pairs)) + 64
            pairs = add(rng.integers(0, n, draws), rng.integers(0, n, draws))
        filled = 2 * (count - drawn)
    return pairs[rng.permutation(len(pairs))[:count]] if len(pairs) > count else pairs, filled


def parameters(source: str, query: str) -> dict[str, str]:
    """Parse the parameters 'a=1&b=2'. Raises SpecError."""
    pairs = [pair.partition("=") for pair in query.split("&")] if query else []
    if not all(mark for _, mark, _ in pairs):
        raise SpecError(f"{source}: parameters must read name=value&name=value, got {query!r}")
    found = {unquote(name): unquote(value) for name, _, value in pairs}
    if len(found) < len(pairs):
        raise SpecError(f"{source}: a parameter is given twice; keep one")
    return found
