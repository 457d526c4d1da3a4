"""The verbs' common parts: the app, options, and how answers are printed."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable
from typing import Any

import typer

from gnnplan.cli.options import Source, Verb

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

LACKING = ("features", "labels", "split")  # of a graph's file


def verb(*sources: Source, name: str | None = None, **details: Any) -> Callable[[Any], Any]:
    """Make a function a verb; its **arguments are those of the sources that it has not itself.

    Its docstring is the help, Args that of options. Arguments before * are given by their place.
    """

    def made(function: Callable[..., None]) -> Callable[..., None]:
        own = {"function": staticmethod(function), "sources": sources, "details": details}
        text = inspect.getdoc(function) or ""
        kind = type("Verb", (Verb,), own)
        app.command(name or function.__name__, cls=kind, help=text.partition("\n\nArgs:")[0])(
            lambda: None
        )
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


def show(answer: Any, as_json: bool = False) -> bool:
    """Print an answer on standard output, for people or its document; whether for people."""
    from gnnplan.api.view import WIDTH

    if as_json:
        print_json(answer.document)
    else:
        answer.print(width=None if sys.stdout.isatty() else WIDTH)
    return not as_json
