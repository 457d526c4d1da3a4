"""`gnnplan check`, `gnnplan presets`, `gnnplan plan` and `gnnplan simulate`.

The first compares each strategy's gradients for a model with one process's. The second lists the
names that `plan` knows. The third plans the training of a GNN on a graph and a cluster, and writes
plan.json. The fourth simulates a plan in virtual time, with noise, or on other clusters."""

from __future__ import annotations

from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

import typer

from gnnplan.api import DEFAULT_GRAPH
from gnnplan.cli.common import of_fields, of_function, of_model, say_notes, show, verb
from gnnplan.planner.vocabulary.errors import SpecError

if TYPE_CHECKING:
    from gnnplan.planner.problem.problem import Problem


@verb(
    of_model,
    of_function("running.check"),
    model={"metavar": "MODEL"},
    features={"min": 2, "max": 10_000, "metavar": "<int>"},
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
    from gnnplan.api.running import check as compare

    found = compare(**question, hidden=hidden, layers=layers)
    show(found, as_json)
    if not found.ok:
        raise typer.Exit(1)


@verb()
def presets(*, as_json: bool = False) -> None:
    """List the clusters, graphs, models and strategies known by name."""
    from gnnplan.api.view import Blocks
    from gnnplan.planner.cluster.machines import instance_types
    from gnnplan.planner.cluster.spec import PRESETS
    from gnnplan.planner.gnn.kinds import KINDS
    from gnnplan.planner.gnn.workload import WORKLOADS
    from gnnplan.planner.graph.load import datasets
    from gnnplan.planner.problem.inputs import names_in
    from gnnplan.planner.strategies import names

    known = {
        "cluster": [*names_in(PRESETS), *instance_types()],
        "graph": datasets(),
        "workload": names_in(WORKLOADS),
        "model": [*KINDS],
        "strategy": [*names()],
    }
    lines = [f"--{option}: {', '.join(words)}" for option, words in known.items()]
    show(Blocks(lines, known), as_json)


# -- plan ------------------------------------------------------------------------------------------


@verb(
    of_function("planning.plan"),
    of_fields,
    cluster={"metavar": "FILE|PRESET"},
    scale={"metavar": "GPUS"},
    evidence={"metavar": "DIR"},
    report={"metavar": "FILE"},
    per={"metavar": "training|epoch"},
    target_accuracy={"metavar": "SHARE"},
    task={"metavar": "node|link|regression|none"},
)
def plan(
    *,
    graph: str = DEFAULT_GRAPH,
    cluster: list[str] | None = None,
    workload: str | None = None,
    set_: list[str] | None = None,
    output: Path | None = None,
    scale: str | None = None,
    evidence: list[Path] | None = None,
    depths: bool = False,
    report: Path | None = None,
    as_json: bool = False,
    **given: Any,
) -> None:
    """Say whether to distribute at all, and which strategy to use.

    On GPUs, plan compares whole trainings: on one GPU, on several and on all, on the full graph and
    on mini-batches (--mode restricts it to one), for --epochs epochs or as many as published
    trainings took. It recommends more GPUs if they are worth their price (--objective value). On
    CPU ranks, or with --per epoch, it compares epochs, of the full graph unless --mode mini is set.

    --scale 1..64 also plans on more GPUs than the cluster has. --cluster 'l4_box?price=0.80'
    --cluster 'dgx_a100?price=2.20' --scale 1..16 compares clusters that you may rent.

    Args:
        cluster: A YAML file or a preset, such as dgx_a100 (`gnnplan presets` lists them).
            'dgx_a100?price=2.20&servers=4' changes fields. local is this machine as `gnnplan
            measure` measured it, or generic numbers if it has not. With --scale, give several to
            compare them.  [default: local]
        workload: A YAML file of workload fields, or a preset: the training of a paper, such as
            pipegcn_reddit. The options below override its fields.
        output: File to write the plan to; without it no plan is written.
        scale: Plan on several numbers of GPUs, and say which is best: 1..64 for 1, 2, 4 .. 64, or a
            list, 1,2,4,8. More servers than the cluster has are allowed.
        evidence: Folder of a run, or a folder that contains runs; may be given again. Runs of one
            exact strategy, with any seed and number of ranks, count for all exact strategies.
        depths: Print all reasons: the bottleneck, why other strategies lost or were rejected, and
            the numbers of layers at which another family wins (takes as long as several plans).
        report: File to draw the plan in as an HTML page; `gnnplan report` adds runs'
            measurements.
    """
    from gnnplan.api import planning, scaling
    from gnnplan.planner.vocabulary.files import must_be_writable

    clusters = list(dict.fromkeys(cluster or ["local"]))
    _must_go_together(scale, clusters, {"-o": output, "--report": report, "--explain": depths})
    if output:
        must_be_writable(output)
    if report:
        from gnnplan.report import must_have_plotly

        must_be_writable(report)
        must_have_plotly()
    given |= {"overrides": set_ or [], "evidence": evidence or []}
    if scale is not None:
        where: Any = clusters if clusters[1:] else clusters[0]
        ask = scaling.offers if clusters[1:] else scaling.scale
        scaled = ask(graph, where, workload, gpus=scale, **given)
        say_notes(scaled.notes)
        show(scaled, as_json)
        return
    found = planning.plan(graph, clusters[0], workload, depths=depths, **given)
    say_notes(found.notes)
    found.notes = ()
    if output:
        found.write(output)
    if report:
        found.report(report)
    if not show(found, as_json):
        return
    if depths:
        show(found.explain())
    else:
        rejected = found.document["rejected"]
        print(
            f"--explain prints all reasons, the placement, and what was rejected ({len(rejected)})"
        )
    show_next(output, found.problem)
    if report:
        print(f"drawn in {report}; open it with a browser")


def _must_go_together(scale: str | None, clusters: list[str], of_a_plan: dict[str, object]) -> None:
    """Raise SpecError for several clusters without --scale, and for options of a plan with it."""
    if scale is None and len(clusters) > 1:
        raise SpecError(
            f"--cluster {clusters[1]}: several clusters are compared by numbers of GPUs; add"
            " --scale, as --scale 1..64, or name one"
        )
    given = [option for option, value in of_a_plan.items() if value]
    if scale is not None and given:
        raise SpecError(
            f"--scale compares sizes and makes no plan for {', '.join(given)}; leave"
            f" {'it' if len(given) == 1 else 'them'} out, then plan the size you choose with"
            " --ranks or --set servers="
        )


def show_next(path: Path | None, problem: Problem) -> None:
    """Print where the plan is and which commands take it, or why it cannot be run."""
    learns_links = problem.workload.task == "link"
    trainable = problem.stats.known and (learns_links or problem.stats.classes > 0)
    if path is None:
        print("not written; to simulate or run it, add -o plan.json")
    else:
        name = quote(str(path))
        onwards = f", gnnplan run {name}" if trainable else ""
        print(f"written to {path}; next: gnnplan simulate {name}{onwards}")
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


# -- simulate --------------------------------------------------------------------------------------


@verb(
    of_function("planning.Plan.simulate"),
    straggler={"metavar": "RANK=FACTOR"},
    sweep={"metavar": "FIELD=VALUES"},
    csv={"metavar": "FILE"},
    steps={"min": 1},
    repetitions={"min": 1, "max": 100_000},
    seed={"min": 0},
)
def simulate(
    plan_file: Path,
    *,
    straggler: list[str] | None = None,
    sweep: list[str] | None = None,
    csv: Path | None = None,
    set_: list[str] | None = None,
    as_json: bool = False,
    **playing: Any,
) -> None:
    """Simulate a plan in virtual time, also on another cluster.

    --jitter and --straggler add noise. --sweep plans and simulates for several values of a field,
    and says where the recommendation changes.

    Args:
        straggler: 3=2.0: rank 3 computes twice as long; may be given again.
        sweep: A field and the values to try, as servers=1,2,4,8, ranks=1,2,4 or
            device=dgx_a100,p3_p100 (the GPU of a preset or file). Given again, every combination is
            tried.
        csv: File to write the rows of --sweep to.
    """
    from gnnplan.api.planning import load_plan
    from gnnplan.api.simulation import Simulation, Sweep
    from gnnplan.planner.vocabulary.files import must_be_writable
    from gnnplan.simulator.noise import stragglers

    slow = stragglers(straggler or [])
    plan = load_plan(plan_file)
    if csv is not None and sweep is None:
        raise SpecError("--csv writes what a sweep finds; give it one, as --sweep servers=1,2,4")
    alone = "trace" if playing["trace"] else "flows"
    if sweep is not None and playing[alone]:
        raise SpecError(
            f"--{alone} is of one simulation, and --sweep plays many; leave one of them out"
        )
    if csv:
        must_be_writable(csv)
    playing |= {"overrides": set_ or [], "stragglers": slow}
    found: Simulation | Sweep
    if sweep is None:
        found = plan.simulate(**playing)
    else:
        del playing["flows"], playing["trace"]
        found = plan.sweep(sweep, **playing)
    if csv and isinstance(found, Sweep):
        found.to_csv(csv)
    if show(found, as_json) and csv:
        print(f"written to {csv}")
