"""What the verbs share: the app, common options, and how answers are printed."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable
from inspect import Parameter
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

if TYPE_CHECKING:
    from gnnplan.api.view import View

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
MODEL_HELP = (
    "gcn, sage, gcnii, gat, gatv2, gin, resgcn or sgc; or your own module of torch_geometric.nn or"
    " dgl.nn convolutions, as model.py:MyGNN, or layer, as layer.py:MyLayer. That file is executed,"
    " here and by every rank."
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
Method = Annotated[
    str,
    typer.Option(
        "--partitioner", help="metis (edge cut), metis-volume (halo rows), hash or random."
    ),
]
Features = Annotated[
    str | None,
    typer.Option(
        metavar="FILE|WIDTH",
        help="Features that --graph's file lacks: a .npy, sparse .npz, .pt or text of [vertices,"
        " features]; or the width of stand-ins.",
    ),
]
Labels = Annotated[
    str | None,
    typer.Option(metavar="FILE", help="Labels that the file lacks: a .npy, .pt or text."),
]
Split = Annotated[
    str | None,
    typer.Option(
        metavar="PATH",
        help="The split that the file lacks: a folder, .npz or .pt with train, val and test (masks"
        " or ids), or a .json of ids.",
    ),
]
Task = Annotated[
    str | None,
    typer.Option(
        metavar="none",
        help="none: the graph has no labels; it is planned, simulated and run on stand-ins.",
    ),
]
Directed = Annotated[
    bool,
    typer.Option(
        "--directed", help="Keep the edges' direction; otherwise graphs are made undirected."
    ),
]


TRAINING = {  # fields of a workload, and their options' help
    "epochs": ("INTEGER", "That a run trains.  [default: 50]"),
    "optimizer": ("adam|adamw|sgd", "As torch.optim has them.  [default: adam]"),
    "lr": ("FLOAT", "Learning rate.  [default: 0.01]"),
    "weight_decay": ("FLOAT", "Of the optimizer.  [default: 0.01 for adamw, else 0]"),
    "momentum": ("FLOAT", "Of sgd.  [default: 0]"),
    "warmup": ("EPOCHS", "First epochs, in which the learning rate rises to --lr.  [default: 0]"),
    "schedule": (
        "constant|step|cosine",
        "How it falls after these: times --gamma every --step-size epochs, or along half a cosine"
        " to 0 at the end of --epochs.  [default: constant]",
    ),
    "step_size": ("EPOCHS", "Of --schedule step.  [default: 30]"),
    "gamma": ("FLOAT", "Of --schedule step.  [default: 0.1]"),
    "clip": (
        "NORM",
        "Shorten longer gradients of all ranks' parameters to this.  [default: never]",
    ),
    "patience": (
        "EPOCHS",
        "End after so many without a better score of validation, with the best epoch's weights. "
        " [default: train all epochs]",
    ),
    "class_weights": (
        "balanced|NUMBERS",
        "What classes count in the loss, as 1,2.5.  [default: 1]",
    ),
    "loss": ("mse|mae", "Of numbers (regression).  [default: mse]"),
    "metric": (
        "NAME",
        "What is measured: accuracy, f1_macro or roc_auc; with several labels per vertex f1_micro,"
        " f1_macro or roc_auc; of numbers mae.  [default: the first of these]",
    ),
}
Command = TypeVar("Command", bound=Callable[..., None])


def with_training(command: Command) -> Command:
    """The command, with an option for each field of TRAINING in place of its `**training`."""
    signature = inspect.signature(command, eval_str=True)
    *others, training = signature.parameters.values()
    assert training.kind is Parameter.VAR_KEYWORD
    annotations = {
        name: Annotated[str | None, typer.Option(metavar=metavar, help=text)]
        for name, (metavar, text) in TRAINING.items()
    }
    options = [
        Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
        for name, annotation in annotations.items()
    ]
    command.__signature__ = signature.replace(parameters=[*others, *options])  # type: ignore[attr-defined]
    command.__annotations__.update(annotations)
    return command


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


def table(title: str, columns: list[str], rows: list[list[str]]) -> None:
    """Print a table for people on standard output."""
    from gnnplan.api.view import Table, print_table

    print_table(Table(title, columns, rows), None, _width())


def _width() -> int | None:
    """Columns of a line; None: as many as the terminal has."""
    from gnnplan.api.view import WIDTH

    return None if sys.stdout.isatty() else WIDTH
