"""Graphs known by statistics only: a user's YAML file, or one that gnnplan ships."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b
from math import inf
from pathlib import Path
from typing import Any, TypeAlias

from gnnplan.planner.graph.graph import MOST_CLASSES, MOST_FEATURES, GraphStats
from gnnplan.planner.vocabulary.files import MOST_SHOWN, Where, read_yaml, suggest
from gnnplan.planner.vocabulary.numbers import SPREAD

DATASETS = Path(__file__).resolve().parent / "datasets"
_OF_DIRECTION = ("edges", "batch_spread", "near_seed", "train_popular")
Rule: TypeAlias = tuple[str, Callable[[Any], bool]]  # (rule in words, test of a value)


def _lies_in(value: Any, low: float, high: float) -> bool:
    """Whether `value` is a number in [low, high]."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and low <= value <= high


def _whole(low: int, high: int) -> Rule:
    """Return the rule for a whole number in [low, high]."""
    return (
        f"must be a whole number in [{low:,}, {high:,}]",
        lambda value: isinstance(value, int) and _lies_in(value, low, high),
    )


_FLAG: Rule = ("must be true or false", lambda value: isinstance(value, bool))
_REQUIRED: dict[str, Rule] = {
    "vertices": _whole(1, 10**12),
    "edges": _whole(0, 10**14),
    "features": _whole(1, MOST_FEATURES),
    "classes": _whole(0, MOST_CLASSES),
}
_OPTIONAL: dict[str, Rule] = {  # GraphStats explains most of these fields
    "train_fraction": (
        "must be a number in (0, 1]",
        lambda value: _lies_in(value, 0, 1) and value > 0,
    ),
    "name": ("must be text", lambda value: isinstance(value, str)),
    "multilabel": _FLAG,
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
        lambda value: (
            value is None
            or (
                isinstance(value, list)
                and len(value) == 2
                and all(_lies_in(each, 0, 5) for each in value)
            )
        ),
    ),
    "near_seed": ("must be a number of vertices, from 1", lambda value: _lies_in(value, 1, inf)),
    "train_popular": _FLAG,
    "directed": _FLAG,
    # values that replace these fields if the graph is loaded as directed
    "as_directed": (
        f"must map {' or '.join(_OF_DIRECTION)} to values",
        lambda value: isinstance(value, dict) and value.keys() <= set(_OF_DIRECTION),
    ),
}


def datasets() -> list[str]:
    """Return the names of the well-known graphs whose statistics are shipped."""
    return sorted(path.stem for path in DATASETS.glob("*.yaml"))


def statistics(path: str, directed: bool) -> GraphStats:
    """Read the statistics in a YAML file. Raises SpecError with file, line and field.

    Required are vertices, edges (directed, of the symmetrised graph), features and classes."""
    document = read_yaml(path)
    data = document.data
    rules = _REQUIRED | _OPTIONAL

    def check(where: Where, value: Any, rule: Rule) -> None:
        if not rule[1](value):
            raise document.error(where, f"{rule[0]}, got {value!r:.{MOST_SHOWN}}")

    for key in data:
        if key not in rules:
            raise document.error((key,), f"unknown field{suggest(str(key), rules)}")
    for name in ("as_directed", *rules):  # as_directed first: it may replace other fields
        if name in data:
            check((name,), data[name], rules[name])
        if name == "as_directed" and directed:
            data |= data.get(name, {})
    for key in _REQUIRED:
        if key not in data:
            raise document.error(
                (key,), f"missing; a graph of statistics only needs {', '.join(_REQUIRED)}"
            )
    vertices, edges, features, classes = (data[key] for key in _REQUIRED)
    check(("edges",), edges, _whole(0, vertices * (vertices - 1)))
    halo_rows = data.get("halo_rows", {})
    for parts, rows in halo_rows.items():
        check(("halo_rows", parts), parts, _whole(1, vertices))
        check(("halo_rows", parts), rows, _whole(0, vertices * (parts - 1)))
    fraction, name = float(data.get("train_fraction", 0.6)), data.get("name", Path(path).stem)
    multilabel, popular = data.get("multilabel", False), data.get("train_popular", False)
    spread, pair = float(data.get("spread", SPREAD)), data.get("batch_spread")
    batch_spread = None if pair is None else (float(pair[0]), float(pair[1]))
    near = float(data.get("near_seed", inf))
    kept = data.get("directed", False) and not directed  # directed in the file, not by the user
    as_directed = (
        f"{name} is known with its edges' direction only ({edges:,}), and is planned so; made"
        " undirected, as other graphs are, it has up to twice as many, and batches reach more rows",
    )
    directed = directed or kept
    size, halos = (name, vertices, edges, features, classes), sorted(halo_rows.items())
    facts: tuple[object, ...] = (*size, fraction, multilabel, halos, directed, spread, batch_spread)
    facts += (popular, near)[: 1 + (near < inf)]
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
        near_seed=near,
    )
