"""`gnnplan plan`: a question in, plan.json out."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gnnplan.cli.common import (
    DEFAULT_GRAPH,
    GRAPH_HELP,
    MODEL_HELP,
    Directed,
    Features,
    Json,
    Labels,
    Method,
    Set,
    Split,
    Task,
    app,
    emit,
    say,
    table,
)

if TYPE_CHECKING:
    from gnnplan.planner.cluster.spec import Cluster
    from gnnplan.planner.gnn.workload import Workload
    from gnnplan.planner.problem.problem import Problem

MOST_LEADERS = 8  # rows of the table


@app.command()
def plan(
    graph: Annotated[str, typer.Option(help=GRAPH_HELP)] = DEFAULT_GRAPH,
    features: Features = None,
    labels: Labels = None,
    split: Split = None,
    task: Task = None,
    cluster: Annotated[
        str,
        typer.Option(
            help="A YAML file or a preset, such as dgx_a100; local is this machine as `gnnplan"
            " measure` found it, and generic numbers before that."
        ),
    ] = "local",
    workload: Annotated[
        str | None,
        typer.Option(help="A YAML file with the fields that the options below override."),
    ] = None,
    model: Annotated[str | None, typer.Option(help=f"{MODEL_HELP}  [default: sage]")] = None,
    layers: Annotated[int | None, typer.Option(help="GNN layers.  [default: 3]")] = None,
    hidden: Annotated[int | None, typer.Option(help="Hidden width.  [default: 256]")] = None,
    dropout: Annotated[
        float | None, typer.Option(help="Dropout before every layer.  [default: 0]")
    ] = None,
    mode: Annotated[
        str | None, typer.Option(help="full (full graph) or mini (mini-batch).  [default: full]")
    ] = None,
    batch: Annotated[
        int | None, typer.Option(help="Mini-batch size over all ranks together.  [default: 1024]")
    ] = None,
    fanout: Annotated[
        str | None,
        typer.Option(
            help="Neighbours per layer from the seeds outwards, as 15,10 or full. "
            " [default: 10 each]"
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            help="With an exact strategy, the same seed trains the same on any number of ranks."
            "  [default: 0]"
        ),
    ] = None,
    exact: Annotated[
        bool, typer.Option("--exact", help="Only strategies that leave the gradient unchanged.")
    ] = False,
    strategy: Annotated[
        str | None,
        typer.Option(help="Force one, as 'gnnpipe(stages=4,chunks=16)'; knobs may be left out."),
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option(help="Use this many ranks, equally many per server.  [default: all]"),
    ] = None,
    set_: Set = None,
    partitioner: Method = "metis",
    directed: Directed = False,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="Write the plan here; without it none is written."),
    ] = None,
    explain: Annotated[
        bool,
        typer.Option(
            "--explain",
            help="Print all reasons: what binds, why the others lost, what was rejected.",
        ),
    ] = False,
    report: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Draw the plan as a page too; `gnnplan report` adds what runs measured.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Rank the strategies that fit and recommend one, with its rank placement and the reasons.

    Ranks those that train on the full graph; with --mode mini those that train on mini-batches. The
    two are not compared, for they need different numbers of epochs.
    """
    from gnnplan.planner.decision import plan as plans
    from gnnplan.planner.decision.search import search
    from gnnplan.planner.evidence.papers.presets import read_fitted
    from gnnplan.planner.graph.load import source_of
    from gnnplan.planner.problem.inputs import apply_overrides, read_workload
    from gnnplan.planner.problem.problem import with_ranks
    from gnnplan.planner.strategies import parse
    from gnnplan.planner.vocabulary.files import must_be_writable
    from gnnplan.planner.vocabulary.progress import progress

    if output:
        must_be_writable(output)
    if report:
        from gnnplan.report.page import must_have_plotly

        must_be_writable(report)
        must_have_plotly()
    forced = parse(strategy) if strategy is not None else None
    flags = {
        "model": model,
        "layers": layers,
        "hidden": hidden,
        "dropout": dropout,
        "mode": mode,
        "batch": batch,
        "fanout": fanout,
        "seed": seed,
    }
    with progress() as notify:
        notify(f"reading {graph}")
        module = model if model and ".py" in model else None
        asked = read_workload(workload, flags | {"model": None if module else model})
        machine, fitted = read_fitted(cluster, asked.model)
        graph = source_of(graph, features, labels, split, task)
        settings = set_ or []
        problem = ask(graph, machine, asked, settings, ranks, partitioner, directed)
        if module:
            notify(f"reading {module}")
            given = [name for name, value in flags.items() if value is not None]
            given += [setting.partition("=")[0].strip() for setting in settings]
            problem = with_user_module(problem, module, given)
            if problem.workload.model != asked.model:  # constants of a testbed may be its own
                machine, fitted = read_fitted(cluster, problem.workload.model)
                machine, _ = apply_overrides(machine, asked, settings)
                problem = replace(problem, cluster=with_ranks(machine, ranks))
    for note in [*problem.stats.notes, *([fitted] if fitted else [])]:
        say(f"note: {note}")
    with progress() as notify:
        found = search(problem, exact, forced, may_use_fewer=ranks is None, notify=notify)
        document = plans.make(problem, found, exact, notify)
    if output:
        plans.write(output, document)
    if report:
        from gnnplan.report import report as write_report

        with progress() as notify:
            write_report(document, output=report, notify=notify)
    if as_json:
        return emit(document)
    show_plan(problem, document, explain)
    show_next(output, problem)
    if report:
        print(f"drawn in {report}; open it with a browser")


def ask(
    graph: str,
    cluster: Cluster,
    workload: Workload,
    settings: list[str],
    ranks: int | None,
    method: str,
    directed: bool,
) -> Problem:
    """The problem that the options describe.

    Raises SpecError.
    """
    from gnnplan.planner.graph.graph import Graph
    from gnnplan.planner.graph.load import load, well_known
    from gnnplan.planner.graph.partition import METHODS
    from gnnplan.planner.problem.inputs import apply_overrides
    from gnnplan.planner.problem.problem import Problem, with_ranks
    from gnnplan.planner.vocabulary.errors import SpecError

    if method not in METHODS:
        raise SpecError(f"--partitioner {method!r}: use one of {', '.join(METHODS)}")
    cluster, workload = apply_overrides(cluster, workload, settings)
    cluster = with_ranks(cluster, ranks)
    head, mark, query = graph.partition("?")
    if not head.startswith("synthetic:") and not well_known(head):
        graph = os.path.realpath(head) + mark + query  # a plan may be run from another folder
    loaded = load(graph, directed)
    stats = loaded.stats if isinstance(loaded, Graph) else loaded
    if cluster.ranks > stats.vertices:
        raise SpecError(
            f"every rank needs a vertex (vertices: {stats.vertices:,}, ranks: {cluster.ranks:,}); "
            f"use --ranks {stats.vertices} or less"
        )
    return Problem(stats, loaded if isinstance(loaded, Graph) else None, workload, cluster, method)


def with_user_module(problem: Problem, module: str, given: list[str]) -> Problem:
    """The problem with the user's module as its model; `given` are the fields that they set.

    Raises SpecError.
    """
    from gnnplan.executor.modules.read import must_suit, read, with_module

    user = read(module, problem.workload, problem.stats.features, problem.stats.classes)
    must_suit(user, problem.stats.directed)
    return replace(problem, workload=with_module(problem.workload, user, given))


def show_plan(problem: Problem, document: dict[str, Any], explain: bool) -> None:
    """The question, the answer in five lines, and the leaders; with `explain` all reasons too."""
    from gnnplan.planner.vocabulary.units import show_count

    workload, cluster = problem.workload, problem.cluster
    width = problem.model.layers[0].h_out  # SGC's is the number of classes
    print(
        f"{problem.stats.name}: {problem.stats.vertices:,} vertices, {problem.stats.edges:,} edges;"
        f" {workload.module.name + ', ' if workload.module else ''}{workload.model}"
        f" {show_count(workload.layers, 'layer')} x {width}, dropout {workload.dropout:g};"
        f" {cluster.name}: {show_count(cluster.servers, 'server')} x {cluster.gpus_per_server}"
        f" {cluster.device.name}"
    )
    for label, line in document["summary"].items():
        print(f"{label + ':':8}{line}")
    show_leaders(problem, document)
    if explain:
        show_reasons(problem, document)
    else:
        print(
            f"--explain prints {show_count(len(document['explanation']), 'reason')}, the placement,"
            f" and what was rejected ({len(document['rejected'])})"
        )


def show_leaders(problem: Problem, document: dict[str, Any]) -> None:
    """The table of the fastest candidates."""
    from gnnplan.planner.vocabulary.units import show_bytes, show_dollars, show_time

    leaders = [document["best"], *document["alternatives"]][:MOST_LEADERS]
    columns = [
        "strategy",
        "exact",
        "epoch",
        "bytes per epoch",
        "set-up",
        "memory/rank",
        "bottleneck",
    ]
    rows = []
    for answer in leaders:
        predicted = answer["predicted"]
        sent = predicted["bytes_by_link"].items()
        links = ", ".join(f"{k.replace('_node', '')} {show_bytes(v)}" for k, v in sent)
        rows.append(
            [
                call(answer["strategy"]),
                "yes" if answer["exact"] else "no",
                show_time(predicted["epoch_s"]),
                links or "none",
                show_bytes(predicted["setup_bytes"]),
                show_bytes(predicted["memory_bytes"]),
                predicted["bottleneck"],
            ]
        )
    if any(answer["gpus"] < problem.ranks for answer in leaders):
        columns.insert(1, "gpus")
        for row, answer in zip(rows, leaders, strict=True):
            row.insert(1, of(answer["gpus"], problem.ranks))
    if problem.cluster.price is not None:
        columns.append("$/epoch")
        for row, answer in zip(rows, leaders, strict=True):
            row.append(show_dollars(answer["predicted"]["epoch_dollars"]))
    table("leaders", columns, rows)


def show_reasons(problem: Problem, document: dict[str, Any]) -> None:
    """Placement, explanation, and why strategies were rejected."""
    places = document["best"]["placement"]
    each = problem.cluster.gpus_per_server
    gpus = [place["server"] * each + place["gpu"] for place in places]
    in_order = gpus == list(range(problem.ranks))
    on_server: dict[int, list[str]] = {}
    for place in sorted(places, key=lambda place: int(place["gpu"])):
        on_server.setdefault(place["server"], []).append(
            str(place["rank"]) + ("" if in_order else f" on GPU {place['gpu']}")
        )
    servers = [f"server {server}: ranks {', '.join(r)}" for server, r in sorted(on_server.items())]
    print(f"placement: {'; '.join(servers)}")
    for line in document["explanation"]:
        print(f"- {line}")
    for item in document["rejected"]:
        print(f"- not {item['strategy']}: {item['reason']}")


def show_next(path: Path | None, problem: Problem) -> None:
    """Where the plan is, and what it is good for."""
    trainable = problem.stats.known and problem.stats.classes > 0
    if path is None:
        print("not written; to simulate or run it, add -o plan.json")
    elif trainable:
        print(f"written to {path}; next: gnnplan simulate {path}, gnnplan run {path}")
    else:
        print(f"written to {path}; next: gnnplan simulate {path}")
    if not problem.stats.known:
        print(
            f"this plan cannot be run: of {problem.stats.name} only statistics are known; to train,"
            " plan again with the graph itself (--graph FILE or FOLDER)"
        )
    elif not trainable:
        print(
            "this plan cannot be run: the graph has no labels; to train, plan again with --labels"
            " FILE, or with --task none on stand-in labels"
        )


def of(used: int, ranks: int) -> str:
    """How many of the cluster's GPUs.

    >>> of(4, 8), of(8, 8)
    ('4 of 8', '8')
    """
    return f"{used} of {ranks}" if used < ranks else str(ranks)


def call(strategy: dict[str, Any]) -> str:
    """A plan's strategy as --strategy takes it."""
    from gnnplan.planner.strategies import named

    return str(
        named(strategy["name"], {knob: value for knob, value in strategy.items() if knob != "name"})
    )
