"""`gnnplan plan`: a question in, plan.json out."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gnnplan.cli.common import DEFAULT_GRAPH, GRAPH_HELP, Directed, Json, Method, Set, app, emit, say, table

if TYPE_CHECKING:
    from gnnplan.planner.job import Job


@app.command()
def plan(
    graph: Annotated[str, typer.Option(help=GRAPH_HELP)] = DEFAULT_GRAPH,
    cluster: Annotated[str, typer.Option(help="A YAML file or a preset: local (this machine, as measured), gnnpipe_a5000, ...")] = "local",
    workload: Annotated[str | None, typer.Option(help="A YAML file with the fields that the options below override.")] = None,
    model: Annotated[str | None, typer.Option(help="gcn, sage, gcnii, gat, resgcn or sgc.")] = None,
    layers: Annotated[int | None, typer.Option(help="GNN layers.")] = None,
    hidden: Annotated[int | None, typer.Option(help="Hidden width.")] = None,
    dropout: Annotated[float | None, typer.Option(help="Dropout before every layer.")] = None,
    mode: Annotated[str | None, typer.Option(help="full (full graph) or mini (mini-batch).")] = None,
    batch: Annotated[int | None, typer.Option(help="Mini-batch size over all ranks together.")] = None,
    fanout: Annotated[str | None, typer.Option(help="Neighbours per layer from the seeds outwards, as 15,10 or full (10 each).")] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same training on any number of ranks.")] = None,
    exact: Annotated[bool, typer.Option("--exact", help="Only strategies that leave the gradient unchanged.")] = False,
    strategy: Annotated[str | None, typer.Option(help="Force one, as 'gnnpipe(stages=4,chunks=16)'; knobs may be left out.")] = None,
    ranks: Annotated[int | None, typer.Option(help="Use this many ranks, equally many per server.")] = None,
    set_: Set = None,
    partitioner: Method = "metis",
    directed: Directed = False,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Where the plan goes (plan.json).")] = None,
    as_json: Json = False,
) -> None:
    """Rank all strategies that fit and recommend one, with its rank placement and the reasons."""
    from gnnplan.planner import plan as plans
    from gnnplan.planner.files import must_be_writable, read_cluster, read_workload
    from gnnplan.planner.search import search
    from gnnplan.planner.strategies import parse
    from gnnplan.progress import progress

    if output:
        must_be_writable(output)
    forced = parse(strategy) if strategy is not None else None
    flags = {"model": model, "layers": layers, "hidden": hidden, "dropout": dropout, "mode": mode, "batch": batch, "fanout": fanout,
             "seed": seed}  # fmt: skip
    with progress() as tell:
        tell(f"reading {graph}")
        job = ask(graph, read_cluster(cluster), read_workload(workload, flags), set_ or [], ranks, partitioner, directed)
    for note in job.stats.notes:
        say(f"note: {note}")
    with progress() as tell:
        found = search(job, exact, forced, may_use_fewer=ranks is None, tell=tell)
        document = plans.make(job, found, exact, tell)
    if output:
        plans.write(output, document)
    if as_json:
        return emit(document)
    show_plan(job, document)
    if output:
        print(f"written to {output}; next: gnnplan simulate {output}, gnnplan run {output}")


def ask(graph: str, cluster: Any, workload: Any, settings: list[str], ranks: int | None, method: str, directed: bool) -> Job:
    """The question, checked."""
    from gnnplan.planner.errors import SpecError
    from gnnplan.planner.files import apply_overrides
    from gnnplan.planner.graph import Graph, datasets, load
    from gnnplan.planner.job import Job, with_ranks
    from gnnplan.planner.partition import METHODS

    if method not in METHODS:
        raise SpecError(f"--partitioner {method!r}: use one of {', '.join(METHODS)}")
    cluster, workload = apply_overrides(cluster, workload, settings)
    cluster = with_ranks(cluster, ranks)
    head, mark, query = graph.partition("?")
    if not head.startswith("synthetic:") and head not in datasets():
        graph = os.path.realpath(head) + mark + query  # a plan is run from other folders too
    loaded = load(graph, directed)
    stats = loaded.stats if isinstance(loaded, Graph) else loaded
    if cluster.ranks > stats.vertices:
        raise SpecError(f"every rank needs a vertex (vertices: {stats.vertices:,}, ranks: {cluster.ranks:,}); "
                        f"use --ranks {stats.vertices} or less")  # fmt: skip
    return Job(stats, loaded if isinstance(loaded, Graph) else None, workload, cluster, method)


def show_plan(job: Job, document: dict[str, Any]) -> None:
    from gnnplan.planner.units import show_bytes, show_dollars, show_time

    w, c = job.workload, job.cluster
    width = job.model.layers[0].h_out  # SGC's is that of the classes
    print(f"{job.stats.name}: {job.stats.vertices:,} vertices, {job.stats.edges:,} edges; {w.model} {w.layers} layers x {width}, "
          f"dropout {w.dropout:g}; {c.name}: {c.servers} servers x {c.gpus_per_server} {c.device.name}")  # fmt: skip
    leaders = [document["best"], *document["alternatives"]][:8]
    rows = []
    for answer in leaders:
        p = answer["predicted"]
        links = ", ".join(f"{k.replace('_node', '')} {show_bytes(v)}" for k, v in p["bytes_by_link"].items()) or "none"
        rows.append([call(answer["strategy"]), "yes" if answer["exact"] else "no", show_time(p["epoch_s"]), links,
                     show_bytes(p["setup_bytes"]), show_bytes(p["memory_bytes"]), p["bottleneck"]])  # fmt: skip
    header = ["strategy", "exact", "epoch", "bytes per epoch", "set-up", "memory/rank", "bottleneck"]
    if any(answer["gpus"] < job.ranks for answer in leaders):
        header.insert(1, "gpus")
        for row, answer in zip(rows, leaders, strict=True):
            row.insert(1, of(answer["gpus"], job.ranks))
    if c.price is not None:
        header.append("$/epoch")
        for row, answer in zip(rows, leaders, strict=True):
            row.append(show_dollars(answer["predicted"]["epoch_dollars"]))
    table("leaders", header, rows)
    places = document["best"]["placement"]
    in_order = [place["server"] * c.gpus_per_server + place["gpu"] for place in places] == list(range(job.ranks))
    on_server: dict[int, list[str]] = {}
    for place in sorted(places, key=lambda place: place["gpu"]):
        on_server.setdefault(place["server"], []).append(str(place["rank"]) + ("" if in_order else f" on GPU {place['gpu']}"))
    print("placement: " + "; ".join(f"server {server}: ranks {', '.join(ranks)}" for server, ranks in sorted(on_server.items())))
    for line in document["explanation"]:
        print(f"- {line}")
    for item in document["rejected"]:
        print(f"- not {item['strategy']}: {item['reason']}")


def of(used: int, ranks: int) -> str:
    """How many of the cluster's GPUs."""
    return f"{used} of {ranks}" if used < ranks else str(ranks)


def call(strategy: dict[str, Any]) -> str:
    """A plan's strategy as --strategy takes it."""
    from gnnplan.planner.strategies import named

    return str(named(strategy["name"], {knob: value for knob, value in strategy.items() if knob != "name"}))
