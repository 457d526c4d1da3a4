"""`gnnplan partition`: a graph becomes a folder of parts, of which each rank reads its own."""

from __future__ import annotations

from pathlib import Path
from shlex import quote
from typing import Any

from gnnplan.cli.common import LACKING, show, verb
from gnnplan.cli.options import of_function
from gnnplan.planner.vocabulary.progress import say


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

    `plan` takes it as --graph. A rank then reads the rows, edges and halo of its own part. Nothing
    of that name is there before all of it is written; the same command goes on where another was
    broken off.

    Args:
        graph: A graph of any format that --graph takes, told by content.
        parts: How many parts: one for each rank.
        output: A folder that is not there yet.
        seed: Of the partitioner.
        task: none: the graph has no labels, and gets stand-ins; regression: its labels are numbers
            to predict.
    """
    from gnnplan.api.view import Blocks
    from gnnplan.planner.graph.arrays import must_be_new
    from gnnplan.planner.graph.graph import Graph
    from gnnplan.planner.graph.load import load, source_of
    from gnnplan.planner.graph.partition import chosen
    from gnnplan.planner.graph.partition import partition as assign
    from gnnplan.planner.ownership.parts import write_parts
    from gnnplan.planner.vocabulary.errors import SpecError
    from gnnplan.planner.vocabulary.progress import progress

    must_be_new(output)
    if task in ("node", "link"):
        raise SpecError(
            f"--task {task} is what a plan trains, of any folder of parts; leave it out here, and"
            " give it to gnnplan plan"
        )
    method, directed = reading.pop("partitioner"), reading.pop("directed")
    with progress() as notify:
        notify(f"reading {graph}")
        found = load(source_of(graph, **reading, task=task), directed)
        notify(f"partitioning it into {parts}")
        method = chosen(method, found)
        owner = assign(found, parts, method, seed)
        if not isinstance(found, Graph):
            raise SpecError(f"{graph}: known by statistics only; give the graph itself")
        about = write_parts(found, owner, method, seed, output, notify)
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
        f" edges, in {parts:,} parts by {method}",
        f"a part has {_between(about.vertices)} vertices, {_between(about.edges)} edges and"
        f" {_between(about.halo)} halo rows",
        f"written to {output}; next: gnnplan plan --graph {name}",
    ]
    for note in notes if not as_json else ():
        say(f"note: {note}")
    show(Blocks(lines, {"source": graph, **facts, "notes": notes}), as_json)


def _between(counts: list[int]) -> str:
    """The least and the most of some counts."""
    least, most = min(counts), max(counts)
    return f"{least:,}" if least == most else f"{least:,} to {most:,}"
