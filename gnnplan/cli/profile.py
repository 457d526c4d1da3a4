"""`gnnplan profile`: facts of a graph."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from gnnplan.api.defaults import DEFAULT_GRAPH
from gnnplan.cli.common import LACKING, numbers, show, verb
from gnnplan.cli.options import of_function

if TYPE_CHECKING:
    from gnnplan.planner.vocabulary.table import Table


@verb(
    of_function("planning.plan", *LACKING, "partitioner", "directed"),
    task={"metavar": "none"},
)
def profile(
    graph: str = DEFAULT_GRAPH,
    *,
    parts: str = "2,4,8",
    servers: int | None = None,
    hops: int = 3,
    batch: int | None = None,
    fanout: str | None = None,
    layers: int | None = None,
    hidden: int | None = None,
    task: str | None = None,
    as_json: bool = False,
    **reading: Any,
) -> None:
    """Show what partitions of a graph cost: halo rows, cut, balance.

    Per number of parts, with the growth of what layers reach. Facts are cached by content. With
    --batch also of mini-batches: rows and edges that they reach, what ranks do twice, what caches
    hit, what a split sends.

    Args:
        parts: Part counts to look at, as 2,4,8.
        servers: Servers that the parts are spread over; growth is then a server's.
        hops: Hops of a part's growth to report.
        batch: Look at mini-batches of so many seeds too, shared by as many ranks as parts.
        fanout: Neighbours per layer from the seeds outwards, as 15,10 or full.  [default: 10 each]
        layers: GNN layers of the mini-batches.  [default: as many as fanouts, or 3]
        hidden: Hidden width of the rows that a split sends.  [default: 256]
        task: none: the graph has no labels; it is planned, simulated and run on stand-ins.
    """
    from gnnplan.api.view import Blocks
    from gnnplan.planner.graph.load import load, source_of
    from gnnplan.planner.graph.partition import chosen
    from gnnplan.planner.ownership.profile import profile as make_profile
    from gnnplan.planner.problem.inputs import read_workload
    from gnnplan.planner.strategies.minibatch.profile import probe
    from gnnplan.planner.vocabulary.errors import SpecError
    from gnnplan.planner.vocabulary.progress import progress
    from gnnplan.planner.vocabulary.table import column, table

    counts, of_batches = numbers(parts, "--parts"), {"fanout": fanout, "layers": layers}
    of_batches["hidden"] = hidden
    if batch is None and (given := [name for name, value in of_batches.items() if value]):
        raise SpecError(f"--{given[0]} is of mini-batches; say how large they are, as --batch 1024")
    if layers is None and fanout and fanout != "full":
        of_batches["layers"] = len(numbers(fanout, "--fanout"))
    workload = read_workload(None, {"mode": "mini", "batch": batch, **of_batches})
    with progress() as notify:
        notify(f"profiling {graph}")
        method, directed = reading.pop("partitioner"), reading.pop("directed")
        loaded = load(source_of(graph, **reading, task=task), directed)
        method = chosen(method, loaded)
        document = make_profile(loaded, counts, method, servers=servers, hops=hops)
        if batch is not None:
            document["mini"] = probe(loaded, workload, list(dict.fromkeys(counts)), notify)
    about = document["graph"]
    degree = ", ".join(f"{k} {v:g}" for k, v in (about.get("degree") or {}).items())
    facts = table(
        "per part count",
        [{"parts": count, **facts} for count, facts in document["parts"].items()],
        column("parts"),
        column("halo rows", "halo_rows", "{:,.0f}".format),
        column("edges cut", "edge_cut", "{:,.0f}".format),
        column("max/mean rows", "balance", "{:.3f}".format),
        (
            f"growth at 1..{hops} hops",
            lambda of: " ".join(f"{growth:.2f}" for growth in of.get("growth") or []),
        ),
    )
    blocks: list[str | Table] = [
        f"{about['name']}: {about['vertices']:,} vertices, {about['edges']:,} directed edges,"
        f" {about['features']} features, {about['classes']} classes",
        *(f"  note: {note}" for note in about["notes"]),
        *([f"  degree: {degree}"] if degree else []),
        facts,
        *(batches(document["mini"]) if batch is not None else []),
    ]
    show(Blocks(blocks, document), as_json)


def batches(mini: dict[str, Any]) -> list[Table]:
    """The facts of mini-batches that `probe` has found."""
    from gnnplan.planner.strategies.minibatch.profile import HIGH
    from gnnplan.planner.vocabulary.table import column, table
    from gnnplan.planner.vocabulary.units import show_bytes

    def percents(shares: Iterable[float]) -> str:
        return " ".join(f"{100 * share:.0f}" for share in shares) + " %"

    rows, edges, high, whole = mini["rows"], mini["edges"], f"p{HIGH}", "{:,.0f}".format
    known = "estimated" if mini["estimated"] else f"{mini['probed']} of {mini['batches']} looked at"
    reached = [
        {
            "": f"h_{h}",
            "rows": rows["mean"][h],
            "most rows": rows[high][h],
            **({"edges": edges["mean"][h - 1], "most edges": edges[high][h - 1]} if h else {}),
        }
        for h in range(len(rows["mean"]))
    ]
    sizes = table(
        f"mini-batches of {mini['batch']:,} seeds,"
        f" {','.join(map(str, mini['fanouts']))} neighbours ({known})",
        reached,
        column(""),
        column("rows", show=whole),
        column(f"{HIGH} % have at most", "most rows", whole),
        column("edges into them", "edges", whole),
        column(f"{HIGH} % have at most", "most edges", whole),
    )
    shared = [
        {"ranks": count, **of["overlap"], **(of["hits"] or {}), **(of["split"] or {})}
        for count, of in mini["ranks"].items()
    ]
    cached = "/".join(f"{100 * float(share):g}" for share in shared[0].get("frequency", {}))
    overlap = table(
        "shared by ranks",
        shared,
        column("ranks"),
        column("features read", "features", "{:.2f}x".format),
        column("edges", show="{:.2f}x".format),
        column(
            f"cache of {cached} % hits" if cached else "cache hits",
            "frequency",
            lambda hits: percents(hits.values()),
        ),
        column("split: edges cross", "cross_edges", percents),
        column("most/mean", "balance", lambda balance: f"{max(balance):.2f}"),
        column("a pair sends", "bytes", lambda sent: show_bytes(max(map(max, sent)))),
    )
    return [sizes, overlap]
