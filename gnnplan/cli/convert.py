"""`gnnplan convert`: a graph of any format becomes a folder of mapped arrays."""

from __future__ import annotations

from pathlib import Path
from shlex import quote
from typing import Any

from gnnplan.cli.common import LACKING, show, verb
from gnnplan.cli.options import of_function
from gnnplan.planner.vocabulary.progress import say


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

    Every rank opens it without parsing. Large files are read a piece at a time. Nothing is left
    behind if it fails.

    Args:
        source: A file or folder of any format that --graph takes, told by content; or
            synthetic:community?.. and synthetic:rmat?.., which are generated.
        folder: A folder that is not there yet.
        task: Labels are numbers to predict; else what look like classes must be classes.
        trust: Load a pickle, which runs whatever code is in it: only for files of people whom you
            trust.
    """
    from gnnplan.api.view import Blocks
    from gnnplan.planner.graph.formats import Extras, recognise
    from gnnplan.planner.graph.formats import convert as write
    from gnnplan.planner.vocabulary.errors import SpecError
    from gnnplan.planner.vocabulary.progress import progress

    features = lacking["features"]
    if features is not None and features.isdecimal():
        raise SpecError(
            f"--features {features} is a width of stand-in features, which are made when the graph"
            " is loaded, not stored; give a file, or leave it out"
        )
    kind = recognise(source).name
    if task not in (None, "regression"):
        raise SpecError(
            f"--task {task!r:.100}: a folder holds the labels as they are; leave it out, or say"
            " regression, whose labels are numbers"
        )
    extras = Extras(**lacking, numbers=task is not None)
    with progress() as notify:
        notify(f"reading {source} ({kind})")
        vertices, edges, notes = write(source, folder, extras, trust)
    facts = {"format": kind, "folder": str(folder), "vertices": vertices, "edges": edges}
    lines = [
        f"{source} ({kind}): {vertices:,} vertices, {edges:,} edges as they are in the file",
        f"written to {folder}; next: gnnplan plan --graph {quote(str(folder))}",
    ]
    for note in notes if not as_json else ():
        say(f"note: {note}")
    show(Blocks(lines, {"source": source, **facts, "notes": notes}), as_json)
