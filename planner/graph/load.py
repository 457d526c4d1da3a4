"""Loading of a graph by name: a file, a folder, a generator, or statistics.

Statistics are those of a user's YAML file, or of one that gnnplan ships."""

from __future__ import annotations

import dataclasses
import os
from hashlib import blake2b
from math import inf
from os import PathLike
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias
from urllib.parse import quote, urlencode

from pydantic import Field

from gnnplan.planner.graph import formats
from gnnplan.planner.graph.generator import asked, is_generated, parameters
from gnnplan.planner.graph.graph import MOST_CLASSES, MOST_FEATURES, Graph, GraphStats
from gnnplan.planner.graph.part_folder import DESCRIPTION, read_parts
from gnnplan.planner.graph.parts import STAND_IN_FEATURES
from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.planner.vocabulary.files import MOST_SHOWN, Where, read_yaml, suggest
from gnnplan.planner.vocabulary.numbers import SPREAD
from gnnplan.planner.vocabulary.spec import Spec, read_as

# -- graphs known by statistics only ---------------------------------------------------------------


DATASETS = Path(__file__).resolve().parent / "datasets"
Spread: TypeAlias = Annotated[float, Field(ge=0, le=5)]


class _Statistics(Spec):
    """The fields of a YAML file of statistics; GraphStats explains most of them."""

    vertices: int = Field(ge=1, le=10**12)
    edges: int = Field(ge=0, le=10**14)  # directed, of the symmetrised graph
    features: int = Field(ge=1, le=MOST_FEATURES)
    classes: int = Field(ge=0, le=MOST_CLASSES)
    train_fraction: float = Field(0.6, gt=0, le=1)
    name: str = ""
    multilabel: bool = False
    halo_rows: dict[int, int] = Field({})
    spread: Spread = SPREAD
    batch_spread: tuple[Spread, Spread] | None = None
    near_seed: float = Field(inf, ge=1)
    train_popular: bool = False
    directed: bool = False
    as_directed: dict[Literal["edges", "batch_spread", "near_seed", "train_popular"], Any] = Field(
        {}, description="values that replace these fields if the graph is loaded as directed"
    )


def datasets() -> list[str]:
    """Return the names of the well-known graphs whose statistics are shipped."""
    return sorted(path.stem for path in DATASETS.glob("*.yaml"))


def statistics(path: str, directed: bool) -> GraphStats:
    """Read the statistics in a YAML file. Raises SpecError with file, line and field."""
    document = read_yaml(path)
    told = read_as(_Statistics, document.data, document)
    if directed:
        told = read_as(_Statistics, document.data | told.as_directed, document)

    def must_be_below(where: Where, number: int, most: int, least: int = 0) -> None:
        if not least <= number <= most:
            rule = f"must be a whole number in [{least:,}, {most:,}], got {number:,}"
            raise document.error(where, rule)

    vertices, edges, near = told.vertices, told.edges, told.near_seed
    must_be_below(("edges",), edges, vertices * (vertices - 1))
    for parts, rows in told.halo_rows.items():
        must_be_below(("halo_rows", parts), parts, vertices, least=1)
        must_be_below(("halo_rows", parts), rows, vertices * (parts - 1))
    name, kept = told.name or Path(path).stem, told.directed and not directed
    notes = [
        "only statistics of this graph are known: halos are estimated, and nothing can be trained;"
        " give the graph itself (--graph FILE.npz) for both"
    ]
    if kept:  # directed in the file, not by the user
        notes.append(
            f"{name} is known with its edges' direction only ({edges:,}), and is planned so; made"
            " undirected, as other graphs are, it has up to twice as many, and batches reach more"
            " rows"
        )
    sizes = name, vertices, edges, told.features, told.classes, told.train_fraction
    halos = sorted(told.halo_rows.items())
    facts = *sizes, told.multilabel, halos, directed or kept, told.spread, told.batch_spread
    digest = repr((*facts, told.train_popular, *([near] if near < inf else [])))
    return GraphStats(
        name=name,
        source=path,
        train_vertices=max(1, round(told.train_fraction * vertices)),
        hash=blake2b(digest.encode(), digest_size=16).hexdigest(),
        notes=tuple(notes),
        known=False,
        directed=directed or kept,
        **told.model_dump(exclude={"name", "train_fraction", "directed", "as_directed"}),
    )


# -- graphs by name --------------------------------------------------------------------------------


FILE_OPTIONS = ("features", "labels", "split")  # parameters that name additional files
LONGEST_SOURCE = 4400  # characters: a path of up to 4096, and parameters


class _Options(Spec):
    """The parameters of a file or a folder; `features` may be a file's name instead."""

    features: int = Field(STAND_IN_FEATURES, ge=1, le=MOST_FEATURES)
    labels: str | None = None
    split: str | None = None
    task: Literal["none", "regression"] | None = None
    seed: int = Field(0, ge=0, le=2**31 - 1)


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
    if empty := [name for name, value in given.items() if not value]:
        raise SpecError(f"{source}: {empty[0]} has no value; give one or leave it out")
    is_width = given.get("features", "").lstrip("+-").isdecimal()
    features = None if is_width else given.pop("features", None)
    asked_for = read_as(_Options, given, f"{source}: ")
    extras = formats.Extras(
        *(features, asked_for.labels, asked_for.split),
        numbers=asked_for.task == "regression",
        width=asked_for.features if is_width else None,
        stand_in_labels=asked_for.task == "none",
        seed=asked_for.seed,
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
    return asked(source)[1].model_dump(include={"vertices", "features", "classes"})


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
    features: str | int | PathLike[str] | None = None,
    labels: str | PathLike[str] | None = None,
    split: str | PathLike[str] | None = None,
    task: str | None = None,
) -> str:
    """Return the name for `load` of a graph with options; files become absolute paths.

    features: a file, or the width of stand-in features."""
    given = {"features": features, "labels": labels, "split": split, "task": task}
    words = {name: str(value) for name, value in given.items() if value is not None}
    for name in FILE_OPTIONS:
        if name in words and not (name == "features" and words[name].isdecimal()):
            words[name] = os.path.realpath(words[name])
    if not words:
        return graph
    return f"{graph}{'&' if '?' in graph else '?'}{urlencode(words, quote_via=quote, safe='/')}"
