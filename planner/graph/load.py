"""Loading of a graph by name: a file, a folder, a generator, or statistics.

Statistics are those of a user's YAML file, or of one that gnnplan ships."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from hashlib import blake2b
from math import inf
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import quote, urlencode

from gnnplan.planner.graph import formats
from gnnplan.planner.graph.generator import Ranges, asked, is_generated, numbers, parameters
from gnnplan.planner.graph.graph import MOST_CLASSES, MOST_FEATURES, Graph, GraphStats
from gnnplan.planner.graph.part_folder import DESCRIPTION, read_parts
from gnnplan.planner.graph.parts import STAND_IN_FEATURES
from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.planner.vocabulary.files import MOST_SHOWN, Where, read_yaml, suggest
from gnnplan.planner.vocabulary.numbers import SPREAD

# -- graphs known by statistics only ---------------------------------------------------------------


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


# -- graphs by name --------------------------------------------------------------------------------


FILE_OPTIONS = ("features", "labels", "split")  # parameters that name additional files
LONGEST_SOURCE = 4400  # characters: a path of up to 4096, and parameters


def load(source: str, directed: bool = False) -> Graph | GraphStats:
    """Return the graph, or the statistics, that the name `source` means.

    'file.npz[?features=500&seed=0]'           arrays; width and seed of stand-in features
    'folder[?...]'                             one .npy per array; features stay on disk
    'file or folder[?...]'                     a format of another library (formats/)
    'folder'                                   parts, as gnnplan partition writes them
    'synthetic:community?vertices=20000&...'   generated; or synthetic:rmat
    'file.yaml'                                statistics only
    'reddit'                                   statistics of a well-known graph

    Files and folders also take '?features=FILE&labels=FILE&split=FILE', which add missing arrays,
    '?task=none', which makes stand-in labels, and '?task=regression': y holds numbers to predict.

    The graph is made undirected unless `directed`; self-loops and duplicate edges are dropped; the
    graph's notes list the changes. Raises SpecError that names the file, the array, the rule and
    the offending number."""
    if len(source) > LONGEST_SOURCE:
        raise SpecError(
            f"{source[:MOST_SHOWN]}...: a graph's name has at most {LONGEST_SOURCE:,} characters,"
            f" this one {len(source):,}; shorten it"
        )
    if "\0" in source:
        raise SpecError(f"{source}: a graph's name holds no zero byte; leave it out")
    head, _, query = source.partition("?")
    if is_generated(source):
        return formats.read(source, source, formats.NONE, directed)
    if (known := well_known(head)) and not query:
        stats = dataclasses.replace(
            statistics(str(DATASETS / f"{known}.yaml"), directed), source=known
        )
        if not os.path.lexists(head):
            return stats
        said = f"{head} is the well-known graph, of which statistics are read; what lies here is"
        return dataclasses.replace(stats, notes=(*stats.notes, f"{said} ./{head}"))
    suffix = Path(head).suffix.lower()
    if suffix in (".yaml", ".yml") or (known and not os.path.lexists(head)):
        if query:
            into = f"a copy of {DATASETS / known}.yaml" if known else head
            raise SpecError(
                f"{source}: statistics take no parameters; leave them out, or write sizes into"
                f" {into}"
            )
        return statistics(head, directed)
    if suffix == ".npz" and not os.path.lexists(head):
        raise SpecError(f"{source}: no such file")
    if not os.path.lexists(head):
        is_path = os.path.dirname(head) not in ("", os.getcwd()) or suffix
        raise SpecError(
            f"{source}: there is no such file or folder; a graph is a .npz file, a folder of .npy"
            " files, another library's file or folder, a .yaml file of statistics,"
            " synthetic:community?vertices=...&edges=..., or the name of a well-known graph"
            + ("" if is_path else suggest(Path(head).name, datasets()))
        )
    if os.path.exists(head) and not os.path.isdir(head) and not os.path.isfile(head):
        raise SpecError(f"{source}: is a pipe, a socket or a device; give a graph's file or folder")
    if os.path.isfile(os.path.join(head, DESCRIPTION)):
        if query:
            raise SpecError(
                f"{source}: a folder of parts holds all that it was written with and takes no"
                " parameters; give them to gnnplan partition"
            )
        return read_parts(head, source, directed)
    given = parameters(source, query)
    words = {
        name: given.pop(name)
        for name in (*FILE_OPTIONS, "task")
        if name in given and not (name == "features" and given[name].lstrip("+-").isdecimal())
    }
    if empty := [name for name, value in words.items() if not value]:
        raise SpecError(f"{source}: {empty[0]} has no value; give one or leave it out")
    task = words.pop("task", None)
    if task not in (None, "none", "regression"):
        raise SpecError(
            f"{source}: task must be none, which makes stand-in labels, regression, node or link,"
            f" got {task[:MOST_SHOWN]!r}; use one of them, or leave it out"
        )
    ranges: Ranges = {"features": (STAND_IN_FEATURES, 1, MOST_FEATURES), "seed": (0, 0, 2**31 - 1)}
    widths = numbers(source, given, ranges, (*FILE_OPTIONS, "task", "seed"))
    extras = formats.Extras(
        **words,
        numbers=task == "regression",
        width=widths["features"] if "features" in given else None,
        stand_in_labels=task == "none",
        seed=widths["seed"],
    )
    return formats.read(head, source, extras, directed)


def declared(source: str) -> dict[str, int]:
    """Return the sizes that the name of a generated graph declares; empty for other graphs.

    Raises SpecError.

    >>> declared("synthetic:community?vertices=60&edges=240&classes=3")
    {'vertices': 60, 'features': 128, 'classes': 3}
    """
    if not is_generated(source):
        return {}
    return {name: asked(source)[1][name] for name in ("vertices", "features", "classes")}


def well_known(name: str) -> str | None:
    """Return the shipped name of a well-known graph, ignoring case; None for other names.

    >>> well_known("REDDIT"), well_known("ogbn-papers100m"), well_known("g.npz")
    ('reddit', 'ogbn-papers100M', None)
    """
    if os.path.exists(name):  # a local file or folder wins, unless the case matches exactly
        return name if name in datasets() else None
    return next((known for known in datasets() if known.lower() == name.lower()), None)


def source_of(
    graph: str,
    features: str | None = None,
    labels: str | None = None,
    split: str | None = None,
    task: str | None = None,
) -> str:
    """Return the name for `load` of a graph with options; files become absolute paths.

    features: a file, or the width of stand-in features."""
    given = {"features": features, "labels": labels, "split": split, "task": task}
    words = {name: value for name, value in given.items() if value is not None}
    for name in FILE_OPTIONS:
        if name in words and not (name == "features" and words[name].isdecimal()):
            words[name] = os.path.realpath(words[name])
    if not words:
        return graph
    return f"{graph}{'&' if '?' in graph else '?'}{urlencode(words, quote_via=quote, safe='/')}"
