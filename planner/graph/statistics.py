"""Reads graphs of which only statistics are known: a YAML file, or one that is shipped."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import Any

from gnnplan.planner.graph.graph import MOST_CLASSES, MOST_FEATURES, GraphStats
from gnnplan.planner.vocabulary.files import MOST_SHOWN, Document, Where, read_yaml, suggest
from gnnplan.planner.vocabulary.numbers import SPREAD

DATASETS = Path(__file__).resolve().parent / "datasets"
_REQUIRED = ("vertices", "edges", "features", "classes")
_OF_DIRECTION = ("edges", "batch_spread", "train_popular")


def _lies_in(value: Any, low: float, high: float) -> bool:
    """Whether it is a number in [low, high]."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and low <= value <= high


def _is_pair(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(_lies_in(v, 0, 5) for v in value)


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


# optional fields, which GraphStats describes: the rule for a value, and whether one keeps it
_OPTIONAL: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "train_fraction": (
        "must be a number in (0, 1]",
        lambda value: _lies_in(value, 0, 1) and value > 0,
    ),
    "name": ("must be text", lambda value: isinstance(value, str)),
    "multilabel": ("must be true or false", _is_flag),
    "halo_rows": (
        "must map parts to rows, as {2: 1000, 4: 2500}",
        lambda value: isinstance(value, dict),
    ),
    "spread": (
        "is the standard deviation of log degrees, in [0, 5]",
        lambda value: _lies_in(value, 0, 5),
    ),
    "batch_spread": (
        "are two spreads in [0, 5], of what is drawn and of what is reached",
        lambda value: value is None or _is_pair(value),
    ),
    "train_popular": ("must be true or false", _is_flag),
    "directed": ("must be true or false", _is_flag),
    # fields that are other ones where the edges keep their direction
    "as_directed": (
        f"must map {' or '.join(_OF_DIRECTION)} to values",
        lambda value: isinstance(value, dict) and value.keys() <= set(_OF_DIRECTION),
    ),
}


def datasets() -> list[str]:
    """Names of the well-known graphs whose statistics are shipped."""
    return sorted(path.stem for path in DATASETS.glob("*.yaml"))


def statistics(path: str, directed: bool) -> GraphStats:
    """The statistics in a YAML file. Raises SpecError with file, line and field.

    Required are vertices, edges (directed, of the symmetrised graph), features and classes."""
    document = read_yaml(path)
    data = document.data
    for key in data:
        if key not in (allowed := (*_REQUIRED, *_OPTIONAL)):
            raise document.error((key,), f"unknown field{suggest(str(key), allowed)}")
    for name in ("as_directed", *_OPTIONAL):  # which may bring others
        rule, holds = _OPTIONAL[name]
        if name in data and not holds(data[name]):
            raise document.error((name,), f"{rule}, got {data[name]!r:.{MOST_SHOWN}}")
        if name == "as_directed" and directed:
            data |= data.get(name, {})
    for key in _REQUIRED:
        if key not in data:
            raise document.error(
                (key,), f"missing; a graph of statistics only needs {', '.join(_REQUIRED)}"
            )

    vertices = _whole(document, ("vertices",), data["vertices"], 1, 10**12)
    edges = _whole(document, ("edges",), data["edges"], 0, min(vertices * (vertices - 1), 10**14))
    features = _whole(document, ("features",), data["features"], 1, MOST_FEATURES)
    classes = _whole(document, ("classes",), data["classes"], 0, MOST_CLASSES)
    halo_rows = {
        _whole(document, ("halo_rows", parts), parts, 1, vertices): _whole(
            document, ("halo_rows", parts), rows, 0, vertices * (parts - 1)
        )
        for parts, rows in data.get("halo_rows", {}).items()
    }
    fraction, name = float(data.get("train_fraction", 0.6)), data.get("name", Path(path).stem)
    multilabel, popular = data.get("multilabel", False), data.get("train_popular", False)
    spread, pair = float(data.get("spread", SPREAD)), data.get("batch_spread")
    batch_spread = None if pair is None else (float(pair[0]), float(pair[1]))
    kept = data.get("directed", False) and not directed  # though nobody asks for it
    as_directed = (
        f"{name} is known with its edges' direction only ({edges:,}), and is planned so; made"
        " undirected, as other graphs are, it has up to twice as many, and batches reach more rows",
    )
    directed = directed or kept
    size, halos = (name, vertices, edges, features, classes), sorted(halo_rows.items())
    facts = (*size, fraction, multilabel, halos, directed, spread, batch_spread, popular)
    return GraphStats(
        name=name,
        source=path,
        vertices=vertices,
        edges=edges,
        features=features,
        classes=classes,
        train_vertices=max(1, round(fraction * vertices)),
        multilabel=multilabel,
        hash=blake2b(repr(facts).encode(), digest_size=16).hexdigest(),
        notes=(
            "only statistics of this graph are known: halos are estimated, and nothing can be"
            " trained; give the graph itself (--graph FILE.npz) for both",
            *(as_directed if kept else ()),
        ),
        known=False,
        directed=directed,
        halo_rows=halo_rows,
        spread=spread,
        batch_spread=batch_spread,
        train_popular=popular,
    )


def _whole(document: Document, where: Where, value: Any, low: int, high: int) -> int:
    """The value, if it is a whole number in [low, high]. Raises SpecError otherwise."""
    if not isinstance(value, int) or not _lies_in(value, low, high):
        raise document.error(
            where, f"must be a whole number in [{low:,}, {high:,}], got {str(value)[:MOST_SHOWN]}"
        )
    return value
