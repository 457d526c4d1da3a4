"""`gnnplan check`: does every strategy give one process's gradients for a model?"""

from __future__ import annotations

from typing import Annotated

import typer

from gnnplan.cli.common import MODEL_HELP, Json, app, print_json, table


@app.command()
def check(
    model: Annotated[str, typer.Argument(help=MODEL_HELP)],
    features: Annotated[int, typer.Option(min=2, max=10_000, help="Columns of its graph.")] = 12,
    classes: Annotated[int, typer.Option(min=2, max=1000, help="Classes of its graph.")] = 4,
    hidden: Annotated[
        int | None, typer.Option(help="Hidden width, where the model asks for one.")
    ] = None,
    layers: Annotated[
        int | None, typer.Option(help="GNN layers, where the model asks for a number.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Prove for a model that strategies give one process's gradients.

    Before training, on a graph of 60 vertices, in float64, on two ranks of this machine. Says of
    each strategy that cannot carry the model what is missing. Exit code 1 if a gradient differs.
    """
    from gnnplan.executor.launch import check as checking

    fields = {"hidden": hidden, "layers": layers}
    found = checking.check(
        model, features, classes, {name: value for name, value in fields.items() if value}
    )
    differs = [verdict.strategy for verdict in found if verdict.answer == "differs"]
    if as_json:
        print_json({"model": model, "strategies": checking.as_documents(found), "differs": differs})
    else:
        rows = [
            [v.strategy, v.answer, "-" if v.gap is None else f"{v.gap:.0e}", v.reason]
            for v in found
        ]
        table(f"gradients of {model}", ["strategy", "gradient", "off by", "why"], rows)
    if differs:
        raise typer.Exit(1)
