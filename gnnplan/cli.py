"""The one front door. Every verb imports what it needs when it is called, so that --help is instant."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

if TYPE_CHECKING:
    from gnnplan.planner.job import Job
    from gnnplan.planner.runs import Run

app = typer.Typer(
    no_args_is_help=True, add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False,
    help="Which parallel strategy to train a graph neural network with on your cluster: plan it, simulate it, run it, and see how "
    "wrong the prediction was.\n\nStart with: gnnplan plan -o plan.json && gnnplan simulate plan.json && gnnplan run plan.json --out run "
    "&& gnnplan validate run\n\nExit codes: 0 done, 1 a check failed, 2 bad input, 3 nothing fits, 4 a rank was lost.",
)  # fmt: skip

DEFAULT_GRAPH = "synthetic:community?vertices=20000&edges=1000000&features=128&classes=16&seed=0"
MOST_TASKS = 4_000_000  # that a simulation may have: a few GB and minutes
GRAPH_HELP = ("a .npz, a folder of .npy, synthetic:community?vertices=..&edges=..&features=..&classes=..&seed=.., a .yaml of statistics, "
              "or the name of a well-known graph, of which only statistics are here (reddit)")  # fmt: skip
Json = Annotated[bool, typer.Option("--json", help="One JSON document on standard output and nothing else there.")]
Set = Annotated[list[str] | None, typer.Option("--set", help="Override a cluster or workload field: servers=16, intra_node.latency=5us.")]
Method = Annotated[str, typer.Option("--partitioner", help="metis (edge cut), metis-volume (halo rows), hash or random.")]
Directed = Annotated[bool, typer.Option("--directed", help="Keep the edges' direction; otherwise graphs are made undirected.")]


def say(line: str = "") -> None:
    """To people, on standard error."""
    print(line, file=sys.stderr)


def emit(document: dict[str, Any]) -> None:
    print(json.dumps(document, indent=1, allow_nan=False))


def numbers(text: str, what: str) -> list[int]:
    from gnnplan.planner.errors import SpecError

    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise SpecError(f"{what} {text!r} is not a list of whole numbers; write it as 2,4,8") from None


def table(title: str, columns: list[str], rows: list[list[str]]) -> None:
    """A table for people on standard output."""
    from rich.console import Console
    from rich.table import Table

    view = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for i, column in enumerate(columns):
        view.add_column(column, justify="left" if i == 0 else "right", overflow="fold")
    for row in rows:
        view.add_row(*row)
    Console(width=None if sys.stdout.isatty() else 140, soft_wrap=False).print(view)


@app.command()
def profile(
    graph: Annotated[str, typer.Argument(help=GRAPH_HELP)] = DEFAULT_GRAPH,
    parts: Annotated[str, typer.Option(help="Part counts to look at, as 2,4,8.")] = "2,4,8",
    partitioner: Method = "metis",
    servers: Annotated[int | None, typer.Option(help="Servers that the parts are spread over; growth is then a server's.")] = None,
    hops: Annotated[int, typer.Option(help="How many hops of a part's growth to report.")] = 3,
    batch: Annotated[int | None, typer.Option(help="Look at mini-batches of so many seeds too, shared by as many ranks as parts.")] = None,
    fanout: Annotated[str | None, typer.Option(help="Neighbours per layer from the seeds outwards, as 15,10 or full (10 each).")] = None,
    layers: Annotated[int | None, typer.Option(help="GNN layers of the mini-batches; default: as many as fanouts, or 3.")] = None,
    hidden: Annotated[int | None, typer.Option(help="Hidden width of the rows that a split sends (256).")] = None,
    directed: Directed = False,
    as_json: Json = False,
) -> None:
    """Facts of a graph that a plan needs: halo rows, cut, balance and growth per part count. Cached by content.

    With --batch also of mini-batches: rows and edges that they reach, what ranks do twice, what caches hit, what a split sends.
    """
    from gnnplan.planner.errors import SpecError
    from gnnplan.planner.files import read_workload
    from gnnplan.planner.graph import load
    from gnnplan.planner.probe import probe
    from gnnplan.planner.profile import profile as make_profile
    from gnnplan.progress import progress

    counts = numbers(parts, "--parts")
    if batch is None and (given := [name for name, value in (("fanout", fanout), ("layers", layers), ("hidden", hidden)) if value]):
        raise SpecError(f"--{given[0]} is of mini-batches; say how large they are, as --batch 1024")
    if layers is None and fanout and fanout != "full":
        layers = len(numbers(fanout, "--fanout"))
    workload = read_workload(None, {"mode": "mini", "batch": batch, "fanout": fanout, "layers": layers, "hidden": hidden})
    with progress() as tell:
        tell(f"profiling {graph}")
        loaded = load(graph, directed)
        document = make_profile(loaded, counts, partitioner, servers=servers, hops=hops)
        if batch is not None:
            document["mini"] = probe(loaded, workload, list(dict.fromkeys(counts)), tell)
    if as_json:
        return emit(document)
    about = document["graph"]
    print(f"{about['name']}: {about['vertices']:,} vertices, {about['edges']:,} directed edges, {about['features']} features, "
          f"{about['classes']} classes")  # fmt: skip
    for note in about["notes"]:
        print(f"  note: {note}")
    if degree := about.get("degree"):
        print("  degree: " + ", ".join(f"{k} {v:g}" for k, v in degree.items()))
    rows = []
    for count, facts in document["parts"].items():
        growth = " ".join(f"{g:.2f}" for g in facts.get("growth") or [])
        cut = f"{facts['edge_cut']:,.0f}" if facts.get("edge_cut") is not None else "-"
        rows.append([count, f"{facts['halo_rows']:,.0f}", cut, f"{facts['balance']:.3f}" if facts.get("balance") else "-", growth])
    table("per part count", ["parts", "halo rows", "edges cut", "max/mean rows", f"growth at 1..{hops} hops"], rows)
    if batch is not None:
        show_batches(document["mini"])


def show_batches(mini: dict[str, Any]) -> None:
    """What `probe` has found."""
    from gnnplan.planner.probe import HIGH
    from gnnplan.planner.units import show_bytes

    rows, edges, ways = mini["rows"], mini["edges"], ("mean", f"p{HIGH}")
    known = "estimated" if mini["estimated"] else f"{mini['probed']} of {mini['batches']} looked at"
    title = f"mini-batches of {mini['batch']:,} seeds, {','.join(map(str, mini['fanouts']))} neighbours ({known})"
    lines = [[f"h_{h}", *(f"{rows[way][h]:,.0f}" for way in ways), *(f"{edges[way][h - 1]:,.0f}" if h else "-" for way in ways)]
             for h in range(len(rows["mean"]))]  # fmt: skip
    table(title, ["", "rows", f"{HIGH} % have at most", "edges into them", f"{HIGH} % have at most"], lines)
    lines, cached = [], ""
    for count, of in mini["ranks"].items():
        line = [count, *(f"{of['overlap'][what]:.2f}x" for what in ("features", "edges"))]
        if of["hits"]:
            cached = " of " + "/".join(f"{100 * float(share):g}" for share in of["hits"]["frequency"]) + " %"
            line.append(" ".join(f"{100 * hit:.0f}" for hit in of["hits"]["frequency"].values()) + " %")
        if split := of["split"]:
            line += [" ".join(f"{100 * share:.0f}" for share in split["cross_edges"]) + " %", f"{max(split['balance']):.2f}",
                     show_bytes(max(map(max, split["bytes"])))]  # fmt: skip
        lines.append([*line, *["-"] * (7 - len(line))])
    columns = ["ranks", "features read", "edges", f"cache{cached} hits", "split: edges cross", "most/mean", "a pair sends"]
    table("shared by ranks", columns, lines)


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
        graph = str(Path(head).resolve()) + mark + query  # a plan is run from other folders too
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


@app.command()
def simulate(
    plan_file: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan.json.")],
    steps: Annotated[int, typer.Option(min=1, help="Steps to play (epochs, if of several batches); the epoch is their steady state.")] = 3,
    sweep: Annotated[list[str] | None, typer.Option(help="What if: a field and its values, as servers=1,2,4,8 or device=dgx_a100,p3_p100 "
                                                    "(the GPU of a preset or file); several: every combination.")] = None,
    csv: Annotated[Path | None, typer.Option("--csv", metavar="FILE", help="Write what --sweep finds here too.")] = None,
    jitter: Annotated[float, typer.Option(help="Lognormal factors on every computation: their standard deviation, mean 1.")] = 0.0,
    straggler: Annotated[list[str] | None, typer.Option(help="3=2.0: rank 3 computes twice as long; may be given again.")] = None,
    repetitions: Annotated[int, typer.Option(min=1, max=100_000, help="How often to play with --jitter or --straggler.")] = 20,
    seed: Annotated[int, typer.Option(min=0, help="Of --jitter.")] = 0,
    flows: Annotated[bool, typer.Option("--flows", help="Each message of an exchange has its own max-min fair share of the links, rather "
                                        "than all of them one (slower to play).")] = False,
    set_: Set = None,
    trace: Annotated[Path | None, typer.Option(help="Write a Chrome/Kineto trace per rank here (open it with Perfetto).")] = None,
    as_json: Json = False,
) -> None:
    """Play a plan's schedule in virtual time, perhaps on another cluster, with jitter or stragglers; sweep fields and see where the
    recommendation changes."""
    from gnnplan.planner.errors import SpecError
    from gnnplan.planner.files import apply_overrides, make_folder
    from gnnplan.planner.job import Job
    from gnnplan.planner.plan import chosen, question, read
    from gnnplan.planner.search import seated
    from gnnplan.planner.trace import write_traces
    from gnnplan.planner.units import show_bytes, show_time
    from gnnplan.planner.validate import by_epoch, per_operation, predicted_per_operation
    from gnnplan.progress import progress
    from gnnplan.simulator.flows import ByFlows
    from gnnplan.simulator.noise import Noise, epochs, percentiles, stragglers
    from gnnplan.simulator.player import Score, critical_path, play, serial

    slow = stragglers(straggler or [])
    noise = Noise(jitter, slow, seed) if jitter or slow else None
    document = read(plan_file)
    base = question(document)
    strategy = chosen(document)
    if sweep is not None:
        if trace or flows:
            raise SpecError(f"--{'trace' if trace else 'flows'} is of one simulation, and --sweep plays many; leave one of them out")
        return show_sweep(base, strategy, sweep, set_ or [], steps, noise, repetitions, csv, as_json)
    if csv is not None:
        raise SpecError("--csv writes what a sweep finds; give it one, as --sweep servers=1,2,4")
    cluster, workload = apply_overrides(base.cluster, base.workload, set_ or [])
    job = base
    if set_:
        kept = (cluster.servers, cluster.gpus_per_server) == (base.cluster.servers, base.cluster.gpus_per_server)
        job = Job(base.stats, base.graph, workload, cluster, base.method, base.seats if kept else ())
    strategy = refit(strategy, job) if job.ranks != base.ranks else strategy.settle(job)
    strategy.check(job)
    if job.cluster != base.cluster:
        job = seated(job, strategy)
    must_be_there(slow, job.ranks)
    batches = strategy.steps(job)
    schedule = strategy.schedule(job, batches)
    tasks, plays = len(schedule.tasks), repetitions if noise else 1
    if tasks * steps * plays > MOST_TASKS:
        most = max(1, MOST_TASKS // tasks)
        less = f"--steps {most}" if not noise else f"--steps {min(steps, max(most // 2, 1))} --repetitions {max(most // steps, 1)}"
        times = f" {plays:,} times" if noise else ""
        raise SpecError(f"--steps {steps:,} of {tasks:,} tasks each{times} are more than {MOST_TASKS:,} tasks; use {less} or less")
    if trace:
        make_folder(trace)
    with progress() as tell:
        tell(f"writing {strategy}'s schedule")
        prediction, schedule = strategy.predict(job), schedule if steps == 1 else strategy.schedule(job, steps * batches)
        tell(f"playing {len(schedule.tasks):,} tasks")
        cost = ByFlows.like(job.cost) if flows else job.cost
        score = Score(schedule, cost)
        played = play(schedule, cost, score=score)
        path, alone = critical_path(schedule, cost, score), serial(schedule, cost, score)
        if noise:
            tell(f"playing {len(schedule.tasks):,} tasks {repetitions:,} times")
            noisy = epochs(schedule, cost, batches, noise, repetitions, score)
    last = [task for task in schedule.tasks if task.label.step >= schedule.steps - batches]
    if trace:
        write_traces(trace, played.spans, range(schedule.ranks), schedule.ranks, "simulated", "simulator")
    result = {
        "strategy": {"name": strategy.name, **strategy.knobs()}, "ranks": job.ranks, "steps": schedule.steps, "tasks": len(schedule.tasks),
        "simulated": {"epoch_s": played.epoch_s(batches), "end_s": played.end_s, "critical_path_s": path, "serial_s": alone,
                      "bytes": schedule.bytes_by_op(last),
                      "operations": per_operation(by_epoch(played.spans, batches), range(min(1, steps - 1), steps))},
        "predicted": {"epoch_s": float(prediction.epoch_s), "bytes": prediction.bytes, "operations": predicted_per_operation(prediction)},
        "trace": str(trace) if trace else None,
    }  # fmt: skip
    if noise:
        result["noise"] = {"jitter": noise.jitter, "stragglers": {str(rank): times for rank, times in slow.items()}, "seed": seed,
                           "repetitions": repetitions, "epochs": len(noisy), **percentiles(noisy)}  # fmt: skip
    if as_json:
        return emit(result)
    print(f"{strategy} on {job.cluster.name} ({job.cluster.servers} x {job.cluster.gpus_per_server}), {schedule.steps} steps, "
          f"{len(schedule.tasks):,} tasks")  # fmt: skip
    print(f"epoch simulated {show_time(played.epoch_s(batches))}, predicted {show_time(float(prediction.epoch_s))}; "
          f"{', '.join(f'{k} {show_bytes(v)}' for k, v in prediction.bytes.items()) or 'nothing sent'}")  # fmt: skip
    if noise:
        found = result["noise"]
        print(f"with {told_noise(noise)} P50 {show_time(found['p50_s'])}, P95 {show_time(found['p95_s'])} "
              f"({found['epochs']:,} epochs in {repetitions:,} repetitions)")  # fmt: skip
    told = result["predicted"]["operations"]
    longest = sorted(result["simulated"]["operations"].items(), key=lambda item: -item[1])
    rows = [[name, show_time(seconds), show_time(told[name]) if name in told else "-"] for name, seconds in longest]
    table("seconds per step (slowest rank)", ["operation", "simulated", "predicted"], rows)
    if trace:
        print(f"traces in {trace}; open them at ui.perfetto.dev")


def refit(strategy: Any, job: Job) -> Any:
    """The same family where the number of ranks has changed: its best variant there."""
    from gnnplan.planner.search import search

    found = search(job, may_use_fewer=False)
    same = [c.strategy for c in found.ranked if c.strategy.name == strategy.name]
    if same:
        return same[0]
    from gnnplan.planner.errors import Infeasible

    reasons = [reason for name, reason in found.rejected if name.startswith(strategy.name)]
    raise Infeasible(f"{strategy.name} cannot run there: {reasons[0] if reasons else 'no variant fits'}")


def must_be_there(slow: Mapping[int, float], ranks: int) -> None:
    from gnnplan.planner.errors import SpecError

    for rank in slow:
        if rank >= ranks:
            raise SpecError(f"--straggler {rank}={slow[rank]:g}: there is no rank {rank} (ranks: {ranks}, counted from 0); use rank "
                            f"{ranks - 1} or less")  # fmt: skip


def told_noise(noise: Any) -> str:
    """In words."""
    words = [f"jitter {noise.jitter:g}"] if noise.jitter else []
    return " and ".join([*words, *(f"rank {rank} {times:g} times as slow" for rank, times in noise.stragglers.items())])


def show_sweep(base: Job, strategy: Any, sweep: list[str], settings: list[str], steps: int, noise: Any, repetitions: int, csv: Path | None,
               as_json: bool) -> None:  # fmt: skip
    """A row per combination of values: the recommendation there and the plan's family."""
    from gnnplan.planner.files import must_be_writable, write_atomically
    from gnnplan.planner.sweep import axes, changes, points, rows, to_csv
    from gnnplan.planner.units import show_bytes, show_dollars, show_time
    from gnnplan.progress import progress
    from gnnplan.simulator.noise import epochs, percentiles
    from gnnplan.simulator.player import Score, play

    def playing(candidate: Any) -> dict[str, float]:
        batches = candidate.strategy.steps(candidate.job)
        once = candidate.strategy.schedule(candidate.job, batches)
        if len(once.tasks) * steps * (repetitions if noise else 1) > MOST_TASKS:
            return {}
        schedule = candidate.strategy.schedule(candidate.job, steps * batches)
        score = Score(schedule, candidate.job.cost)
        out = {"simulated_s": play(schedule, candidate.job.cost, score=score).epoch_s(batches)}
        return out | (percentiles(epochs(schedule, candidate.job.cost, batches, noise, repetitions, score)) if noise else {})

    if csv:
        must_be_writable(csv)
    swept = axes(sweep)
    asked = points(swept, base, settings)
    for _, job in asked:
        must_be_there(noise.stragglers if noise else {}, job.ranks)
    with progress() as tell:
        found = rows(asked, strategy.name, playing, tell)
    turns = changes(swept, found)
    if csv:
        write_atomically(csv, to_csv(swept, found))
    if as_json:
        return emit({"sweep": {axis.field: axis.values for axis in swept}, "strategy": strategy.name, "rows": found, "changes": turns})

    def shown(row: dict[str, Any], key: str, show: Callable[[float], str]) -> str:
        return show(row[key]) if key in row else "-"

    columns: list[tuple[str, str, Callable[[float], str]]] = [
        ("predicted", "predicted_s", show_time), ("simulated", "simulated_s", show_time),
        *([("P50", "p50_s", show_time), ("P95", "p95_s", show_time)] if noise else []), ("bytes", "bytes_total", show_bytes),
        *([("$/epoch", "epoch_dollars", show_dollars)] if any("epoch_dollars" in row for row in found) else []),
        (f"{strategy.name} simulated", "plan_simulated_s", show_time)]  # fmt: skip
    fields = [axis.field for axis in swept]
    table(f"{', '.join(fields)} swept", [*fields, "ranks", "recommended", *(column for column, _, _ in columns)], [
        [*row["at"].values(), of(row["gpus"], row["ranks"]) if row["best"] else str(row["ranks"]), row["best"] or "nothing fits",
         *(shown(row, key, show) for _, key, show in columns)] for row in found])  # fmt: skip
    for turn in turns:
        others = ", ".join(f"{field}={value}" for field, value in turn["with"].items())
        print(f"the recommendation changes from {turn['from']} to {turn['to']} at {turn['field']}={turn['value']}"
              f"{f' (with {others})' if others else ''}")  # fmt: skip
    if not turns:
        print("the recommendation does not change over these values")
    if csv:
        print(f"written to {csv}")


@app.command()
def run(
    plan_file: Annotated[Path | None, typer.Argument(metavar="PLAN", help="A plan.json; with --resume the run's own.")] = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="Epochs; default: the workload's.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for all it leaves; must not hold a run. Default: one in runs/.")] = None,
    eval_every: Annotated[int | None, typer.Option(min=0, help="Evaluate every so many epochs and at the end (10; 0: at the end).")] = None,
    timeout: Annotated[float | None, typer.Option(min=1.0, help="Seconds a rank waits for its peers before it gives up (30).")] = None,
    checkpoint_every: Annotated[int | None, typer.Option(min=0, help="Epochs between checkpoints (10; 0: none); two are kept.")] = None,
    resume: Annotated[Path | None, typer.Option(metavar="DIR", help="Go on with the run in this folder from its last checkpoint, with its "
                                                "plan and options; --epochs may ask for more.")] = None,
    restarts: Annotated[int, typer.Option(min=0, max=1000, help="Start all ranks anew from the last checkpoint when one is lost, so many "
                                          "times at most.")] = 0,
    emulate: Annotated[str | None, typer.Option(metavar="RATE", help="The plan's servers as network namespaces of this Linux machine, "
                                                "with cards of so much between them: 400Mbit/s, or unshaped. Needs root.")] = None,
    staleness_errors: Annotated[bool, typer.Option("--staleness-errors", help="Measure how far stale rows and gradients are from the "
                                                   "true ones, per layer and epoch, into rank*.json.")] = False,
    as_json: Json = False,
) -> None:
    """Train for real: NCCL on GPUs, Gloo elsewhere. Starts its own local ranks, or is one when torchrun or Slurm started it.

    A run that was broken off: gnnplan run --resume DIR. Under torchrun restarts are torchrun's (--max-restarts 3), and go on from the
    last checkpoint too.
    """
    from gnnplan.executor import launch
    from gnnplan.planner import plan as plans
    from gnnplan.planner.errors import SpecError
    from gnnplan.planner.files import make_folder

    if resume is not None and out is not None:
        raise SpecError("--out is of a new run, and --resume goes on in the folder of one; leave one of them out")
    if resume is not None:
        out, plan_file = resume, plan_file or resume / "plan.json"
    if plan_file is None:
        raise SpecError("run takes a PLAN (`gnnplan plan -o plan.json` makes one), or --resume DIR")
    options = launch.Options.of(out or Path(), {
        "epochs": epochs, "eval_every": eval_every, "timeout_s": timeout, "checkpoint_every": checkpoint_every,
        "staleness_errors": staleness_errors or None}, resume is not None)  # fmt: skip
    if launch.started_by_launcher():
        if restarts:
            raise SpecError("ranks that torchrun or srun has started are started anew by it; use torchrun --max-restarts, not --restarts")
        if out is None:
            raise SpecError("--out is needed when torchrun or srun starts the ranks, so that all of them write to one folder")
        code = launch.follow(plan_file, out, options)
        if code == 0 and os.environ.get("RANK", "0") == "0":
            show_run(out, as_json)
        launch.leave(code)
    servers = None if emulate is None else launch.Emulated(rate_of(emulate))
    document, job, strategy = launch.prepare(plan_file)
    if out is None:
        stem = f"{job.stats.name.split('?')[0].replace(':', '-').replace('/', '-')}-{strategy.name}"
        out = next(p for n in range(1, 10_000) if not (p := Path("runs") / f"{stem}-{n}").exists())
    number, last = options.epochs or job.workload.epochs, 0
    if resume is None:
        launch.must_be_new(out)
    else:
        last = launch.last_of(out, job, strategy)
        launch.must_go_on(out, last, number)
    launch.must_fit_here(job)
    strategy.schedule(job, 1)  # partitions are made once, here, and read by the ranks
    make_folder(out)
    plans.write(out / "plan.json", document)
    options.write(out)
    onwards = f" after {last}" if last else ""
    say(f"training {job.stats.name} with {strategy} on {job.ranks} ranks, {number} epochs{onwards}, into {out}")
    launch.start(out / "plan.json", out, replace(options, restarts=restarts), job, servers)
    show_run(out, as_json)


def rate_of(text: str) -> float | None:
    """Of an emulated card [B/s]; None: unshaped. Raises SpecError."""
    from gnnplan.planner.errors import SpecError
    from gnnplan.planner.units import kind, quantity

    if text == "unshaped":
        return None
    if kind(text) != "B/s":
        raise SpecError(f"--emulate {text!r} is not a rate such as 400Mbit/s or 50MB/s, nor 'unshaped'")
    return quantity(text)


def show_run(out: Path, as_json: bool) -> None:
    """What a finished run left behind."""
    from gnnplan.planner.units import show_bytes, show_time
    from gnnplan.planner.validate import show_rows

    result = summary(out)
    if as_json:
        return emit(result)
    scores = "  ".join(f"{k} {result[f'{k}_accuracy']:.3f}" for k in ("train", "val", "test") if result[f"{k}_accuracy"] is not None)
    sent = ", ".join(f"{k} {show_bytes(v)}" for k, v in result["bytes"].items()) or "nothing"
    print(f"{result['epochs']} epochs, loss {result['first_loss']:.4f} -> {result['loss']:.4f}  {scores}")
    print(f"epoch {show_time(result['epoch_s'])} (median); sent per epoch: {sent}; "
          f"peak memory {show_bytes(max(result['peak_rss_bytes']))} per rank")  # fmt: skip
    if result["rows"]:
        print(f"rows of features: {show_rows(result['rows'])}")
    print(f"in {out}; next: gnnplan validate {out}")


def summary(out: Path) -> dict[str, Any]:
    """What a run left behind, in one document."""
    from statistics import median

    from gnnplan.planner.validate import read_run, rows_by_class

    metrics, ranks = read_run(out)
    sent: dict[str, int] = {}
    for rank in ranks:
        for op, nbytes in rank["bytes"].items():
            sent[op] = sent.get(op, 0) + nbytes
    last = metrics[-1]
    return {
        "out": str(out), "epochs": len(metrics), "first_loss": metrics[0]["loss"], "loss": last["loss"],
        **{f"{k}_accuracy": last[f"{k}_accuracy"] for k in ("train", "val", "test")},
        "epoch_s": median(m["epoch_s"] for m in metrics[min(2, len(metrics) - 1) :]), "backend": ranks[0]["backend"],
        "bytes": {op: nbytes // len(metrics) for op, nbytes in sent.items()},
        "setup_bytes": sum(sum(rank["setup_bytes"].values()) for rank in ranks),
        "peak_rss_bytes": [rank["peak_rss_bytes"] for rank in ranks], "peak_bytes": [rank["peak_bytes"] for rank in ranks],
        "rows": rows_by_class(ranks),
    }  # fmt: skip


def show_published(path: Path, left_out: bool, as_json: bool) -> None:
    """Errors by metric, winners, and why rows are skipped."""
    from collections import Counter

    from gnnplan.planner.calibrate import calibrated, gave_a_constant, leave_one_out
    from gnnplan.planner.published import read, score
    from gnnplan.progress import progress

    rows = read(path)
    with progress() as tell:
        tell(f"predicting {len(rows):,} figures")
        result = leave_one_out(rows) if left_out else score(rows, gave_a_constant, calibrated)
    if as_json:
        return emit(result)
    summary = dict(result["summary"])
    winner = summary.pop("winner")
    table(f"{len(result['rows'])} of {len(rows)} figures predicted", ["metric", "rows", "mean error", "95 % have at most", "largest"], [
        [metric, str(of["n"]), *(f"{of[what]:.1%}" for what in ("mape", "p95", "max"))] for metric, of in summary.items()])  # fmt: skip
    print(f"the faster of two strategies is named rightly in {winner['right']} of {winner['n']} comparisons that differ by more than 5 %")
    for (paper, why), count in Counter((row["paper"], row["why"]) for row in result["skipped"]).most_common():
        print(f"- {count} of {paper} skipped: {why}")


@app.command()
def validate(
    directories: Annotated[list[Path] | None, typer.Argument(metavar="[DIR]...", help="Folders of finished runs.")] = None,
    published: Annotated[Path | None, typer.Option(help="In their place: a .csv of printed figures to predict.")] = None,
    leave_one_out: Annotated[bool, typer.Option(help="Of --published: find constants anew without each dataset in turn.")] = False,
    cluster: Annotated[str | None, typer.Option(help="Predict with this cluster file's constants, not the plans'.")] = None,
    refit: Annotated[Path | None, typer.Option(metavar="FILE", help="Fit the cluster's constants to some of the runs, score them on the "
                                               "others, and write the cluster file.")] = None,
    as_json: Json = False,
) -> None:
    """Predicted, simulated and measured side by side, and which layer of knowledge is wrong. Exit 1 if bytes or order differ.

    Of several runs: errors by operation, how right the ranking of strategies was (Kendall's tau, regret) and which constants to doubt.
    With --published FILE.csv: the figures that others have printed, as far as the model speaks of them, beside its own.
    """
    from gnnplan.planner.errors import SpecError
    from gnnplan.planner.files import must_be_writable

    if (not directories) == (published is None):
        raise SpecError("validate takes the folders of runs, or --published FILE.csv")
    if leave_one_out and published is None:
        raise SpecError("--leave-one-out goes with --published FILE.csv")
    if published is not None:
        if cluster or refit:
            raise SpecError("--cluster and --refit go with folders of runs")
        return show_published(published, leave_one_out, as_json)
    assert directories is not None
    if refit:
        must_be_writable(refit)
        if len(directories) < 2:
            raise SpecError("--refit needs at least 2 runs: some to fit, the others to score")
    if len(directories) > 1:
        return show_runs(directories, cluster, refit, as_json)
    run = examine(directories[0], cluster)
    assert run.planned
    strategy = run.planned.strategy
    result = {**run.told, "strategy": {"name": strategy.name, **strategy.knobs()}}
    if as_json:
        emit(result)
    else:
        show_examined(run.strategy, result)
    if not (result["bytes"]["equal"] and result["order"]["equal"]):
        raise typer.Exit(1)


def examine(directory: Path, cluster: str | None = None) -> Run:
    """A run beside its prediction and simulation, perhaps with another cluster's constants. Raises SpecError."""
    from dataclasses import replace

    from gnnplan.planner.files import read_cluster
    from gnnplan.planner.plan import chosen, question, read
    from gnnplan.planner.runs import Planned, Run, same_shape
    from gnnplan.planner.search import weigh
    from gnnplan.planner.trace import read_traces
    from gnnplan.planner.validate import compare, read_run
    from gnnplan.simulator.player import play

    metrics, ranks = read_run(directory)
    traces = read_traces(directory)
    document = read(directory / "plan.json")
    job = question(document)
    if cluster:
        job = replace(job, cluster=same_shape(read_cluster(cluster), job.cluster))
    candidate = weigh(job, chosen(document))
    batches = candidate.strategy.steps(job)
    schedule = candidate.strategy.schedule(job, min(len(metrics), 5) * batches)
    played = play(schedule, job.cost)
    told = compare(candidate.predicted, candidate.memory, played.spans, played.epoch_s(batches), schedule, traces, metrics, ranks,
                   batches, candidate.strategy.drawn_steps(job))  # fmt: skip
    return Run.of(str(directory), Planned(job, candidate.strategy), told, metrics)


def show_examined(strategy: str, result: dict[str, Any]) -> None:
    """One run for people."""
    from gnnplan.planner.units import show_bytes, show_time
    from gnnplan.planner.validate import show_rows

    def seconds(value: float | None) -> str:
        return "-" if value is None else show_time(value)

    def percent(value: float | None) -> str:
        return "-" if value is None else f"{value:+.0%}"

    epochs = result["epochs"]
    columns = ["operation", "predicted", "simulated", "measured", "predicted error", "simulated error"]
    table(f"{strategy}, {epochs} epochs", columns, [
        [r["operation"], seconds(r["predicted_s"]), seconds(r["simulated_s"]), seconds(r["measured_s"]), percent(r["predicted_error"]),
         percent(r["simulated_error"])] for r in [result["step"], result["exposed"], *result["operations"]]])  # fmt: skip
    sizes = result["bytes"]
    verdict = "equal" if sizes["equal"] else "DIFFERENT"
    if sizes["epochs"] < epochs:
        verdict = f"{verdict} in the {sizes['epochs']} epochs whose batches are known; the prediction is of the first"
    print(f"bytes: counted {sum(sizes['counted'].values()):,}, predicted {sum(sizes['predicted'].values()):,}; "
          f"set-up {sizes['setup_counted']:,} and {sizes['setup_predicted']:,}: {verdict}")  # fmt: skip
    print(f"communication hidden behind computation: {seconds(result['hidden_s'])} per step")
    print(f"order of operations: {result['order']['first_difference'] or 'as scheduled on every rank and lane'}")
    memory = result["memory"]
    whose = "rank" if memory["of"] == "data" else "process"
    print(f"memory of the fullest {whose}: predicted {show_bytes(memory['predicted_bytes'])}, "
          f"measured peak {show_bytes(memory['measured_bytes'])} ({memory['error']:+.0%})")  # fmt: skip
    if result["rows"]:
        print(f"rows of features: {show_rows(result['rows'])}")
    print(f"wrong: {result['wrong']}")


def show_runs(directories: list[Path], cluster: str | None, refitted: Path | None, as_json: bool) -> None:
    """Several runs together."""
    import yaml

    from gnnplan.planner.files import write_atomically
    from gnnplan.planner.runs import refit, summarise
    from gnnplan.progress import progress

    runs = []
    with progress() as tell:
        for directory in directories:
            tell(f"comparing {directory}")
            runs.append(examine(directory, cluster))
        result = summarise(runs)
        if refitted:
            tell("refitting")
            found, result["refit"] = refit(runs)
            write_atomically(refitted, yaml.safe_dump(found.model_dump(mode="json"), sort_keys=False))
    if as_json:
        emit(result)
    else:
        def told(of: dict[str, float] | None) -> list[str]:
            return ["-", "-", "-"] if of is None else [f"{of[what]:.1%}" for what in ("mean", "p95", "max")]

        rows = {"step": {**result["step"], "share": 1.0}, **dict(sorted(result["operations"].items(), key=lambda item: -item[1]["share"]))}
        columns = ["operation", "of the step", *(f"{way}: {what}" for way in ("predicted", "simulated") for what in ("mean", "p95", "max"))]
        table(f"{len(runs)} runs, errors", columns, [
            [name, f"{row['share']:.0%}", *told(row["predicted"]), *told(row["simulated"])] for name, row in rows.items()])  # fmt: skip
        if memory := result["memory"]:
            print(f"memory of the fullest rank: {memory['mean']:.1%} off on average, at most {memory['max']:.1%}")
        print(f"bytes as predicted in {result['bytes_equal']} of {len(runs)} runs, order as scheduled in {result['order_equal']}; a run's "
              f"median epoch comes out again within {result['noise']:.1%}")  # fmt: skip
        if result["rankings"]:
            table("choices", ["question", "strategies", "tau", "chosen", "fastest", "regret"], [
                [one["question"], str(one["strategies"]), f"{one['tau']:.2f}", one["choice"], one["fastest"], f"{one['regret']:.1%}"]
                for one in result["rankings"]])  # fmt: skip
            ranked = result["ranking"]
            print(f"the choice was right, or within noise, in {ranked['right']:.0%} of {ranked['questions']} questions; regret "
                  f"{ranked['regret']:.1%} on average, tau {ranked['tau']:.2f}")  # fmt: skip
        for one in result["doubt"]:
            if one["slower"]:
                print(f"{one['constant']}: {one['slower']:.2f} times as long as predicted, {abs(one['share']):.1%} of the epochs")
        if fitted := result.get("refit"):
            factors = ", ".join(f"{name} x {factor:.2f}" for name, factor in fitted["factors"].items())
            print(f"refit on {len(fitted['fitted'])} runs ({factors}); the other {len(fitted['scored'])} were "
                  f"{fitted['before']['mean']:.1%} off and are {fitted['after']['mean']:.1%} off; written to {refitted}")  # fmt: skip
    if result["bytes_equal"] < len(runs) or result["order_equal"] < len(runs):
        raise typer.Exit(1)


@app.command()
def measure(
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Where the cluster file goes; also kept as preset 'local'.")] = None,
    ranks: Annotated[int, typer.Option(min=1, max=1024, help="Ranks active at once, per server.")] = 2,
    servers: Annotated[int, typer.Option(min=1, max=200, help="Servers; several are emulated on this machine.")] = 1,
    emulate: Annotated[str, typer.Option(metavar="RATE", help="What an emulated server's card moves: 400Mbit/s.")] = "unshaped",
    seconds: Annotated[float, typer.Option(min=0.01, max=60, help="Spent on each of some hundred numbers.")] = 0.25,
    as_json: Json = False,
) -> None:
    """Micro-benchmarks with all ranks active: the numbers that a plan uses, each with its provenance.

    Of this machine, of servers emulated on it (--servers 2 --emulate 400Mbit/s; needs root), or, started by torchrun or srun, of real ones.
    """
    import yaml

    from gnnplan.executor import launch
    from gnnplan.executor import measure as measuring
    from gnnplan.planner.files import cache_dir, must_be_writable, write_atomically

    if output:
        must_be_writable(output)
    rate = rate_of(emulate)
    if launch.started_by_launcher():
        first = os.environ.get("RANK", os.environ.get("SLURM_PROCID")) == "0"
        cluster = measuring.measure_as_rank(say if first else lambda what: None, seconds)
        if cluster is None:  # rank 0 has it
            launch.leave(0)
    else:
        cluster = measuring.measure(ranks, say, servers, rate, seconds)
    text = yaml.safe_dump(cluster.model_dump(mode="json"), sort_keys=False)
    here = cluster.servers == 1
    if here:
        write_atomically(cache_dir() / "local.yaml", text, parents=True)
    if output:
        write_atomically(output, text)
    if as_json:
        emit(cluster.model_dump(mode="json"))
    else:
        print(text, end="")
    kept = [f"kept as preset 'local' in {cache_dir() / 'local.yaml'}"] * here + [f"written to {output}"] * bool(output)
    say(" and ".join(kept) or "kept nowhere; -o FILE writes it")
    if launch.started_by_launcher():
        launch.leave(0)


def main() -> NoReturn:
    """Errors that a user can mend are a line, not a traceback; the exit code says whose turn it is."""
    from gnnplan.planner.errors import GnnplanError

    code: Any = 1
    try:
        code = app(standalone_mode=False)
        sys.stdout.flush()
    except GnnplanError as error:
        code = fail(str(error), error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        code = 130
    except BrokenPipeError:  # `gnnplan plan | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except Exception as error:
        if not hasattr(error, "format_message") or not hasattr(error, "show"):
            raise
        if "--json" in sys.argv[1:]:
            emit({"error": error.format_message(), "exit_code": 2})
        error.show()  # typer's, of a wrong option: with the verb's usage, on standard error
        code = 2
    if code == 130:
        fail("interrupted", 130)
    sys.exit(code if isinstance(code, int) else 0)


def fail(message: str, code: int) -> int:
    """Say it to people, and to programs that asked for JSON."""
    if "--json" in sys.argv[1:]:
        emit({"error": message, "exit_code": code})
    say(f"error: {message}")
    return code


if __name__ == "__main__":
    main()
