"""What the verbs share: the app, common options, and how answers are printed."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gnnplan.cli.options import Options, Verb, of_function

if TYPE_CHECKING:
    from gnnplan.api.view import View
    from gnnplan.planner.vocabulary.table import Table

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help=(
        "Which parallel strategy to train a graph neural network with on your cluster: plan it,"
        " simulate it, run it, and see how wrong the prediction was.\n\nStart with: gnnplan plan -o"
        " plan.json && gnnplan simulate plan.json && gnnplan run plan.json --out run && gnnplan"
        " validate run\n\nExit codes: 0 done, 1 a check failed, 2 bad input, 3 nothing fits, 4 a"
        " rank was lost."
    ),
)

GRAPH_HELP = (
    "a .npz, a folder of .npy, a file or folder of DGL, PyG, OGB, GraphBolt, GraphSAINT, SciPy,"
    " NetworkX (GraphML), MatrixMarket or an edge list (CSV, TSV, Parquet),"
    " synthetic:community?vertices=..&edges=..&features=..&classes=..&seed=.., a .yaml of"
    " statistics, or the name of a well-known graph, of which only statistics are here (reddit)"
)
Json = Annotated[
    bool,
    typer.Option("--json", help="One JSON document on standard output and nothing else there."),
]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="Override a field of the cluster or workload: servers=16; inter_node is the link"
        " between servers, intra_node the one inside: inter_node.bandwidth=25GB/s.",
    ),
]
LACKING = ("features", "labels", "split")  # of a graph's file
PlanFile = Annotated[Path, typer.Argument(metavar="PLAN", help="A plan.json.")]


def of_plan(*only: str) -> Options:
    """Options for the arguments of gnnplan.plan, or for these of them."""
    return of_function(
        "planning.plan",
        only,
        features={"metavar": "FILE|WIDTH"},
        labels={"metavar": "FILE"},
        split={"metavar": "PATH"},
        task={"metavar": "node|link|regression|none"},
        target_accuracy={"metavar": "SHARE"},
    )


def verb(*sources: Options, name: str | None = None) -> Callable[[Any], Any]:
    """Make a function a verb; its **arguments are options of the sources that it has not itself."""

    def made(function: Callable[..., None]) -> Callable[..., None]:
        kind = type("Verb", (Verb,), {"function": staticmethod(function), "sources": sources})
        app.command(name or function.__name__, cls=kind, help=function.__doc__)(lambda: None)
        return function

    return made


def print_json(document: dict[str, Any]) -> None:
    """Print a JSON document on standard output."""
    print(json.dumps(document, indent=1, allow_nan=False))


def numbers(text: str, option: str) -> list[int]:
    """The whole numbers of an option such as '2,4,8'.

    Raises SpecError.
    """
    from gnnplan.planner.vocabulary.errors import SpecError
    from gnnplan.planner.vocabulary.units import number_of

    try:
        return [int(number_of(part)) for part in text.split(",")]
    except ValueError:
        raise SpecError(
            f"{option} {text!r:.80} is not a list of whole numbers; write it as 2,4,8"
        ) from None


def show(answer: View) -> None:
    """Print an answer for people on standard output."""
    answer.print(width=_width())


def show_table(shown: Table) -> None:
    """Print a table for people on standard output."""
    from gnnplan.api.view import print_table

    print_table(shown, None, _width())


def _width() -> int | None:
    """Columns of a line; None: as many as the terminal has."""
    from gnnplan.api.view import WIDTH

    return None if sys.stdout.isatty() else WIDTH
