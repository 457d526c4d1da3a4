"""Verbs for graphs: `convert` writes any format as arrays to memory-map, `partition` writes a part
for each rank, and `profile` shows what partitions cost."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterable
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

from gnnplan.api import DEFAULT_GRAPH
from gnnplan.cli.common import LACKING, numbers, of_function, say_notes, show, verb
from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.planner.vocabulary.progress import notify

if TYPE_CHECKING:
    from gnnplan.planner.vocabulary.files import Json
    from gnnplan.planner.vocabulary.text import Table


@verb(
    of_function("planning.plan", *LACKING),
    source={"metavar": "SRC"},
    folder={"metavar": "DEST"},
    task={"metavar": "regression"},
)
def convert(
    source: str,
    folder: Path,
    *,
    task: str | None = None,
    trust: bool = False,
    as_json: bool = False,
    **lacking: Any,
) -> None:
    """Turn a graph of any format into a folder of .npy arrays.

    Every rank opens the folder without parsing. Large files are read piece by piece. If convert
    fails, it leaves no folder behind.

    Args:
        source: A file or folder of any format that --graph takes, recognised by content; or
            synthetic:community?.. or synthetic:rmat?.., a graph to generate.
        folder: A new folder to write.
        task: regression: labels are numbers to predict, even if they look like classes.
        trust: Load a pickle, which runs any code in it: only for files from people whom you trust.
    """
    from gnnplan.api.view import Blocks
    from gnnplan.planner.graph.formats import Extras, recognise
    from gnnplan.planner.graph.formats import convert as write
    from gnnplan.planner.graph.load import well_known

    features = lacking["features"]
    if features is not None and features.isdecimal():
        raise SpecError(
            f"--features {features} is a width of stand-in features, which are made when the graph"
            " is loaded, not stored; give a file, or leave it out"
        )
    if well_known(source):
        raise SpecError(
            f"{source} is known by statistics only, so there is nothing to convert; give the"
            " graph's own file or folder"
        )
    kind = recognise(source).name
    if task not in (None, "regression"):
        raise SpecError(
            f"--task {task!r:.100}: a folder holds the labels as they are; leave it out, or say"
            " regression, whose labels are numbers"
        )
    extras = Extras(**lacking, numbers=task is not None)
    notify(f"reading {source} ({kind})")
    vertices, edges, notes = write(source, folder, extras, trust)
    facts = {"format": kind, "folder": str(folder), "vertices": vertices, "edges": edges}
    lines = [
        f"{source} ({kind}): {vertices:,} vertices, {edges:,} edges as they are in the file",
        f"written to {folder}; next: gnnplan plan --graph {quote(str(folder))}",
    ]
    say_notes(() if as_json else notes)
    show(Blocks(lines, {"source": source, **facts, "notes": notes}), as_json)


@verb(
    of_function("planning.plan", *LACKING, "partitioner", "directed"),
    graph={"metavar": "GRAPH"},
    parts={"flags": ("-k", "--parts"), "min": 1},
    output={"metavar": "PARTS"},
    seed={"min": 0},
    task={"metavar": "none|regression"},
)
def partition(
    graph: str,
    *,
    parts: int,
    output: Path,
    seed: int = 0,
    task: str | None = None,
    as_json: bool = False,
    **reading: Any,
) -> None:
    """Cut a graph into a folder of parts, one per rank.

    `plan` takes the folder as --graph; each rank then reads only the rows, edges and halo of its
    own part. The folder appears when all parts are written; after an interruption, the same command
    continues.

    Args:
        graph: A graph of any format that --graph takes, recognised by content.
        parts: Number of parts, one for each rank.
        output: A new folder to write.
        seed: Seed of the partitioner.
        task: none: the graph has no labels, and stand-in labels are generated; regression: the
            labels are numbers to predict.
    """
    from gnnplan.api.view import Blocks
    from gnnplan.planner.graph.arrays import must_be_new
    from gnnplan.planner.graph.graph import Graph
    from gnnplan.planner.graph.partition import partition as assign
    from gnnplan.planner.ownership.parts import write_parts
    from gnnplan.planner.vocabulary.units import show_count

    must_be_new(output)
    if task in ("node", "link"):
        raise SpecError(
            f"--task {task} is what a plan trains, of any folder of parts; leave it out here, and"
            " give it to gnnplan plan"
        )
    notify(f"reading {graph}")
    found, method = _loaded(graph, task, **reading)
    notify(f"partitioning it into {parts}")
    owner = assign(found, parts, method, seed)
    assert isinstance(found, Graph)  # statistics have no parts
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:  # so that a message says which files are kept
        about = write_parts(found, owner, method, seed, output)
    finally:
        signal.signal(signal.SIGTERM, before)
    notes, name = list(found.stats.notes), quote(str(output))
    facts = {
        "folder": str(output),
        "hash": found.stats.hash,
        "parts": parts,
        "partitioner": method,
        "seed": seed,
        "halo_rows": about.halo,
        "vertices": about.vertices,
        "edges": about.edges,
    }
    lines = [
        f"{found.stats.name}: {found.stats.vertices:,} vertices, {found.stats.edges:,} directed"
        f" edges, in {show_count(parts, 'part')} by {method}",
        f"a part has {_between(about.vertices)} vertices, {_between(about.edges)} edges and"
        f" {_between(about.halo)} halo rows",
        f"written to {output}; next: gnnplan plan --graph {name}",
    ]
    say_notes(() if as_json else notes)
    show(Blocks(lines, {"source": graph, **facts, "notes": notes}), as_json)


def _between(counts: list[int]) -> str:
    """Return the range of the counts in words."""
    least, most = min(counts), max(counts)
    return f"{least:,}" if least == most else f"{least:,} to {most:,}"


@verb(
    of_function("planning.plan", *LACKING, "partitioner", "directed"),
    graph={"metavar": "GRAPH"},
    task={"metavar": "none"},
)
def profile(
    graph: str = DEFAULT_GRAPH,
    *,
    parts: str = "2,4,8",
    servers: int | None = None,
    hops: int = 3,
    batch: int | None = None,
    fanout: str | None = None,
    layers: int | None = None,
    hidden: int | None = None,
    task: str | None = None,
    as_json: bool = False,
    **reading: Any,
) -> None:
    """Show what partitions of a graph cost: halo rows, cut, balance.

    The table has a row per number of parts, with the growth of a part by hops: the vertices within
    so many hops over its own. Results are cached by the graph's content. --batch adds facts of
    mini-batches: the rows and edges that they reach, the work that ranks do twice, the hit rates of
    feature caches, and the bytes that split batches send.

    Args:
        parts: Numbers of parts to profile, as 2,4,8.
        servers: Number of servers that hold the parts; the growth is then per server.
        hops: Largest number of hops to report the growth for.
        batch: Also profile mini-batches of this many seeds, shared by as many ranks as parts.
        fanout: Neighbours per layer from the seeds outwards, as 15,10 or full.  [default: 10 each]
        layers: GNN layers of the mini-batches.  [default: the number of fan-outs, or 3]
        hidden: Hidden width of the rows that a split batch sends.  [default: 256]
        task: none: the graph has no labels, and stand-in labels are generated.
    """
    from gnnplan.api.view import Blocks, TextBlock
    from gnnplan.planner.ownership.profile import profile as make_profile
    from gnnplan.planner.problem.inputs import ask_workload
    from gnnplan.planner.strategies.minibatch.profile import probe
    from gnnplan.planner.vocabulary.text import column, table

    counts, of_batches = numbers(parts, "--parts"), {"fanout": fanout, "layers": layers}
    of_batches["hidden"] = hidden
    if batch is None and (given := [name for name, value in of_batches.items() if value]):
        raise SpecError(f"--{given[0]} is of mini-batches; say how large they are, as --batch 1024")
    if layers is None and fanout and fanout != "full":
        of_batches["layers"] = len(numbers(fanout, "--fanout"))
    workload = ask_workload(None, {"mode": "mini", "batch": batch, **of_batches}).workload
    notify(f"profiling {graph}")
    loaded, method = _loaded(graph, task, **reading)
    document = make_profile(loaded, counts, method, servers=servers, hops=hops)
    if batch is not None:
        document["mini"] = probe(loaded, workload, list(dict.fromkeys(counts)))
    about = document["graph"]
    degree = ", ".join(f"{k} {v:g}" for k, v in (about.get("degree") or {}).items())
    facts = table(
        "per part count",
        [{"parts": count, **facts} for count, facts in document["parts"].items()],
        column("parts"),
        column("halo rows", "halo_rows", "{:,.0f}".format),
        column("edges cut", "edge_cut", "{:,.0f}".format),
        column("max/mean rows", "balance", "{:.3f}".format),
        (
            f"growth at 1..{hops} hops",
            lambda of: " ".join(f"{growth:.2f}" for growth in of.get("growth") or []),
        ),
    )
    blocks: list[TextBlock] = [
        f"{about['name']}: {about['vertices']:,} vertices, {about['edges']:,} directed edges,"
        f" {about['features']} features, {about['classes']} classes",
        *(f"  note: {note}" for note in about["notes"]),
        *([f"  degree: {degree}"] if degree else []),
        facts,
        *(batches(document["mini"]) if batch is not None else []),
    ]
    show(Blocks(blocks, document), as_json)


def batches(mini: Json) -> list[Table]:
    """Return the tables of the facts of mini-batches that `probe` measured."""
    from gnnplan.planner.strategies.minibatch.profile import HIGH
    from gnnplan.planner.vocabulary.text import Table, column, table
    from gnnplan.planner.vocabulary.units import show_bytes

    def percents(shares: Iterable[float]) -> str:
        return " ".join(f"{100 * share:.0f}" for share in shares) + " %"

    def cells(counts: Json, at: int) -> list[str]:
        """Return the mean and the high count of rows or edges as text; '-' for edges into h_0."""
        return [f"{counts[of][at]:,.0f}" if at >= 0 else "-" for of in ("mean", f"p{HIGH}")]

    known = "estimated" if mini["estimated"] else f"{mini['probed']} of {mini['batches']} looked at"
    most = f"{HIGH} % have at most"
    sizes = Table(
        f"mini-batches of {mini['batch']:,} seeds,"
        f" {','.join(map(str, mini['fanouts']))} neighbours ({known})",
        ["", "rows", most, "edges into them", most],
        [
            [f"h_{h}", *cells(mini["rows"], h), *cells(mini["edges"], h - 1)]
            for h in range(len(mini["rows"]["mean"]))
        ],
    )
    shared = [
        {"ranks": count, **of["overlap"], **(of["hits"] or {}), **(of["split"] or {})}
        for count, of in mini["ranks"].items()
    ]
    cached = "/".join(f"{100 * float(share):g}" for share in shared[0].get("frequency", {}))
    overlap = table(
        "shared by ranks",
        shared,
        column("ranks"),
        column("features read", "features", "{:.2f}x".format),
        column("edges", show="{:.2f}x".format),
        column(
            f"cache of {cached} % hits" if cached else "cache hits",
            "frequency",
            lambda hits: percents(hits.values()),
        ),
        column("split: edges cross", "cross_edges", percents),
        column("most/mean", "balance", lambda balance: f"{max(balance):.2f}"),
        column("a pair sends", "bytes", lambda sent: show_bytes(max(map(max, sent)))),
    )
    return [sizes, overlap]


def _loaded(
    graph: str, task: str | None, *, partitioner: str, directed: bool, **lacking: str | None
) -> tuple[Any, str]:
    """Return the graph, or its statistics, and the partitioner to use. Raises SpecError."""
    from gnnplan.planner.graph.load import load, source_of
    from gnnplan.planner.graph.partition import chosen

    found = load(source_of(graph, **lacking, task=task), directed)
    return found, chosen(partitioner, found)
