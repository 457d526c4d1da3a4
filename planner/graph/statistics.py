"""Reads graphs of which only statistics are known: a YAML file, or one that is shipped."""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path
from typing import Any

from gnnplan.planner.graph.graph import MOST_CLASSES, MOST_FEATURES, GraphStats
from gnnplan.planner.vocabulary.files import MOST_SHOWN, Document, Where, read_yaml, suggest
from gnnplan.planner.vocabulary.numbers import SPREAD

DATASETS = Path(__file__).resolve().parent / "datasets"
_REQUIRED = ("vertices", "edges", "features", "classes")
_OPTIONAL = (
    "train_fraction",
    "name",
    "multilabel",
    "halo_rows",
    "spread",
    "batch_spread",
    "train_popular",
    "directed",
    "as_directed",
)
_OF_DIRECTION = ("edges", "batch_spread", "train_popular")


def datasets() -> list[str]:
    """Names of the well-known graphs whose statistics are shipped."""
    return sorted(path.stem for path in DATASETS.glob("*.yaml"))


def statistics(path: str, directed: bool) -> GraphStats:
    """The statistics in a YAML file. Raises SpecError with file, line and field.

    Required are vertices, edges (directed, of the symmetrised graph), features and classes.
    Optional are the fields _OPTIONAL, which GraphStats describes; but `as_directed` has those that
    are other ones where the edges keep their direction."""
    document = read_yaml(path)
    data = document.data
    for key in data:
        if key not in _REQUIRED + _OPTIONAL:
            raise document.error((key,), f"unknown field{suggest(str(key), _REQUIRED + _OPTIONAL)}")
    if "as_directed" in data:
        others = data["as_directed"]
        if not (isinstance(others, dict) and others.keys() <= set(_OF_DIRECTION)):
            raise document.error(
                ("as_directed",), f"must map {' or '.join(_OF_DIRECTION)} to values, got {others!r}"
            )
        if directed:
            data |= others
    for key in _REQUIRED:
        if key not in data:
            raise document.error(
                (key,), f"missing; a graph of statistics only needs {', '.join(_REQUIRED)}"
            )

    vertices = _whole(document, ("vertices",), data["vertices"], 1, 10**12)
    edges = _whole(document, ("edges",), data["edges"], 0, min(vertices * (vertices - 1), 10**14))
    features = _whole(document, ("features",), data["features"], 1, MOST_FEATURES)
    classes = _whole(document, ("classes",), data["classes"], 0, MOST_CLASSES)
    fraction, name, multilabel = (
        data.get("train_fraction", 0.6),
        data.get("name", Path(path).stem),
        data.get("multilabel", False),
    )
    if (
        isinstance(fraction, bool)
        or not isinstance(fraction, (int, float))
        or not 0 < fraction <= 1
    ):
        raise document.error(("train_fraction",), f"must be a number in (0, 1], got {fraction!r}")
    if not isinstance(name, str):
        raise document.error(("name",), f"must be text, got {name!r}")
    for flag in ("multilabel", "train_popular", "directed"):
        if not isinstance(data.get(flag, False), bool):
            raise document.error((flag,), f"must be true or false, got {data[flag]!r}")
    spread, batch_spread = _spreads(document)
    kept = data.get("directed", False) and not directed  # though nobody asks for it
    as_directed = (
        f"{name} is known with its edges' direction only ({edges:,}), and is planned so; made"
        " undirected, as other graphs are, it has up to twice as many, and batches reach more rows",
    )
    popular, directed = data.get("train_popular", False), directed or data.get("directed", False)
    halo_rows = _halo_rows(document, vertices)
    size = (name, vertices, edges, features, classes)
    halos = sorted(halo_rows.items())
    shape = (directed, spread, batch_spread, popular)
    facts = (*size, float(fraction), multilabel, halos, *shape)
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
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise document.error(
            where, f"must be a whole number in [{low:,}, {high:,}], got {str(value)[:MOST_SHOWN]}"
        )
    return value


def _spreads(document: Document) -> tuple[float, tuple[float, float] | None]:
    """`spread` and `batch_spread` (GraphStats). Raises SpecError."""

    def is_spread(value: Any) -> bool:
        return not isinstance(value, bool) and isinstance(value, (int, float)) and 0 <= value <= 5

    spread = document.data.get("spread", SPREAD)
    if not is_spread(spread):
        raise document.error(
            ("spread",), f"is the standard deviation of log degrees, in [0, 5], got {spread!r}"
        )
    pair = document.data.get("batch_spread")
    if pair is None:
        return float(spread), None
    if not (isinstance(pair, list) and len(pair) == 2 and all(map(is_spread, pair))):
        raise document.error(
            ("batch_spread",),
            f"are two spreads in [0, 5], of what is drawn and of what is reached, got {pair!r}",
        )
    return float(spread), (float(pair[0]), float(pair[1]))


def _halo_rows(document: Document, vertices: int) -> dict[int, int]:
    """`halo_rows` (GraphStats). Raises SpecError."""
    hints = document.data.get("halo_rows", {})
    if not isinstance(hints, dict):
        raise document.error(("halo_rows",), "must map parts to rows, as {2: 1000, 4: 2500}")
    return {
        _whole(document, ("halo_rows", parts), parts, 1, vertices): _whole(
            document, ("halo_rows", parts), rows, 0, vertices * (parts - 1)
        )
        for parts, rows in hints.items()
    }
