"""`gnnplan check`: compare each strategy's gradients for a model with one process's."""

from __future__ import annotations

from typing import Any

import typer

from gnnplan.cli.common import of_function, of_model, show, verb


@verb(
    of_model,
    of_function("checking.check"),
    features={"min": 2, "max": 10_000, "metavar": None},
    classes={"min": 2, "max": 1000},
)
def check(
    *, hidden: int | None = None, layers: int | None = None, as_json: bool = False, **question: Any
) -> None:
    """Compare each strategy's gradients with one process's.

    Use it before training. Each strategy runs one step on a graph of 60 vertices, in float64, on
    two CPU ranks of this machine. For a strategy that cannot train the model, the table says what
    is missing. Exit code 1 if a gradient differs.

    Args:
        hidden: Hidden width, if the model's constructor takes one.
        layers: Number of GNN layers, if the model's constructor takes it.
    """
    from gnnplan.api.checking import check as compare

    found = compare(**question, hidden=hidden, layers=layers)
    show(found, as_json)
    if not found.ok:
        raise typer.Exit(1)
