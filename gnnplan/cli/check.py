"""`gnnplan check`: does every strategy give one process's gradients for a model?"""

from __future__ import annotations

from typing import Annotated

import typer

from gnnplan.cli.common import MODEL_HELP, Json, app, print_json, show


@app.command()
def check(
    model: Annotated[str, typer.Argument(help=MODEL_HELP)],
    features: Annotated[
        int | None,
        typer.Option(
            min=2, max=10_000, help="Columns of its graph.  [default: the model's own, or 12]"
        ),
    ] = None,
    classes: Annotated[
        int | None,
        typer.Option(
            min=2, max=1000, help="Classes of its graph.  [default: the model's own, or 4]"
        ),
    ] = None,
    hidden: Annotated[
        int | None, typer.Option(help="Hidden width, where the model asks for one.")
    ] = None,
    layers: Annotated[
        int | None, typer.Option(help="GNN layers, where the model asks for a number.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Compare each strategy's gradients with one process's.

    Before training: one step on a graph of 60 vertices, in float64, on two CPU ranks of this
    machine. Says of each strategy that cannot carry the model what is missing. Exit code 1 if a
    gradient differs.
    """
    from gnnplan.api.checking import check as compare

    found = compare(model, features=features, classes=classes, hidden=hidden, layers=layers)
    if as_json:
        print_json({**found.document, "differs": found.differs})
    else:
        show(found)
    if not found.ok:
        raise typer.Exit(1)
