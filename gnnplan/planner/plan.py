"""plan.json: the question, the answer, the runners-up, and why. A plan says exactly what it was made for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from gnnplan import __version__
from gnnplan.planner import formulas
from gnnplan.planner.errors import Mismatch, SpecError
from gnnplan.planner.files import checked, suggest, write_atomically
from gnnplan.planner.graph import Graph, load
from gnnplan.planner.job import EstimatedLayout, Job
from gnnplan.planner.layout import Layout
from gnnplan.planner.partition import METHODS
from gnnplan.planner.search import Candidate, Found
from gnnplan.planner.specs import Cluster, Workload
from gnnplan.planner.strategies import FAMILIES, GraNNDis, Strategy, named
from gnnplan.planner.strategies.granndis import FANOUT, MAX_HOP
from gnnplan.planner.units import show_bytes, show_time

MAX_PLAN = 64 * 2**20  # [B]


def make(job: Job, found: Found) -> dict[str, Any]:
    """The document of a found plan, JSON-ready."""
    best = found.ranked[0]
    return {
        "gnnplan": __version__,
        "graph": {"source": job.stats.source, "hash": job.stats.hash, "name": job.stats.name, "vertices": job.stats.vertices,
                  "edges": job.stats.edges, "features": job.stats.features, "classes": job.stats.classes,
                  "directed": job.stats.directed, "known": job.stats.known, "notes": list(job.stats.notes)},
        "workload": job.workload.model_dump(mode="json"),
        "cluster": job.cluster.model_dump(mode="json"),
        "partitioner": job.method,
        "best": {**_answer(best), "placement": best.strategy.placement(best.job)},
        "alternatives": [_answer(candidate) for candidate in found.ranked[1:]],
        "rejected": [{"strategy": name, "reason": reason} for name, reason in found.rejected],
        "explanation": explain(job, found),
    }  # fmt: skip


def _answer(candidate: Candidate) -> dict[str, Any]:
    p = candidate.predicted
    return {
        "strategy": {"name": candidate.strategy.name, **candidate.strategy.knobs()},
        "exact": candidate.strategy.exact,
        "gpus": candidate.job.ranks,
        "predicted": {
            "epoch_s": float(p.epoch_s), "compute_s": float(p.compute_s), "comm_s": float(p.comm_s), "bubble_s": float(p.bubble_s),
            "bytes_total": p.bytes_total, "bytes": p.bytes, "bytes_by_link": p.bytes_by_link, "setup_bytes": p.setup_bytes,
            "memory_bytes": candidate.memory_bytes, "memory": candidate.fullest(), "bottleneck": p.bottleneck,
            "by_op": {kind: float(seconds) for kind, seconds in p.by_op.items()},
        },
    }  # fmt: skip


# -- reading -------------------------------------------------------------------------------------------------------------


def read(path: str | Path) -> dict[str, Any]:
    """The document, checked in all that is used of it. Raises SpecError (not a plan) or Mismatch (another version's)."""
    try:
        if Path(path).stat().st_size > MAX_PLAN:
            raise SpecError(f"{path} is larger than {show_bytes(MAX_PLAN)}: not a plan")
        document: dict[str, Any] = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise SpecError(f"{path}: cannot be read ({error.strerror or error}); make one with `gnnplan plan -o {path}`") from error
    except (ValueError, RecursionError) as error:
        raise SpecError(f"{path}: not JSON ({error}); make one with `gnnplan plan -o plan.json`") from error
    fields = ("gnnplan", "graph", "workload", "cluster", "partitioner", "best")
    if missing := [field for field in fields if field not in document] if isinstance(document, dict) else ["all"]:
        raise SpecError(f"{path}: not a plan (missing: {', '.join(missing)}); make one with `gnnplan plan -o plan.json`")
    if document["gnnplan"] != __version__:
        raise Mismatch(f"{path} was made by gnnplan {document['gnnplan']}, this is {__version__}; plan again")
    _inspect(path, document)
    return document


def _inspect(path: str | Path, document: dict[str, Any]) -> None:
    """Raises SpecError naming the file and the field that someone has changed."""
    again = "make it again with `gnnplan plan`"

    def must_be(kind: type, field: str, value: Any) -> None:
        if not isinstance(value, kind):
            raise SpecError(f"{path}: {field} must be {_JSON[kind]}, is {_JSON.get(type(value), 'empty')}; {again}")

    for field in ("graph", "workload", "cluster", "best"):
        must_be(dict, field, document[field])
    must_be(str, "partitioner", document["partitioner"])
    for field in ("source", "hash"):
        must_be(str, f"graph.{field}", document["graph"].get(field))
    must_be(bool, "graph.directed", document["graph"].get("directed"))
    if document["partitioner"] not in METHODS:
        raise SpecError(f"{path}: partitioner {document['partitioner']!r} is unknown{suggest(document['partitioner'], METHODS)}")
    checked(Cluster, document["cluster"], f"{path}: cluster.")
    checked(Workload, document["workload"], f"{path}: workload.")
    try:
        chosen(document)
    except SpecError as error:
        raise SpecError(f"{path}: best.strategy: {error}") from error
    try:
        seats(document)
    except SpecError as error:
        raise SpecError(f"{path}: best.placement: {error}") from error


_JSON: dict[type, str] = {dict: "an object", list: "a list", str: "text", bool: "true or false", int: "a number", float: "a number"}


def question(document: dict[str, Any], cluster: Cluster | None = None, workload: Workload | None = None) -> Job:
    """The job a plan from `read` answers, with its ranks where the plan has put them; perhaps on another cluster (all its GPUs in
    order) or workload. Raises SpecError, Mismatch (the data have changed)."""
    _inspect("plan", document)
    about = document["graph"]
    graph = load(about["source"], about["directed"])
    stats = graph.stats if isinstance(graph, Graph) else graph
    if stats.hash != about["hash"]:
        raise Mismatch(f"the plan was made for other data: {about['source']} hashes to {stats.hash}, the plan says {about['hash']}; "
                       "plan again")
    workload = workload or Workload.model_validate(document["workload"])
    job = Job(stats, graph if isinstance(graph, Graph) else None, workload, cluster or Cluster.model_validate(document["cluster"]),
              document["partitioner"])  # fmt: skip
    return job if cluster else job.seated(seats(document))


def chosen(document: dict[str, Any]) -> Strategy:
    """The recommended strategy of a plan. Raises SpecError."""
    try:
        knobs = dict(document["best"]["strategy"])
        return named(str(knobs.pop("name")), knobs)
    except (KeyError, TypeError, ValueError):
        raise SpecError("must be an object with a name and knobs; make it again with `gnnplan plan`") from None


def seats(document: dict[str, Any]) -> tuple[int, ...]:
    """The GPU of every rank of a plan, counted over all servers. Raises SpecError."""
    cluster, places = document["cluster"], document["best"].get("placement")
    servers, each = int(cluster.get("servers", 1)), int(cluster.get("gpus_per_server", 1))
    again = "make it again with `gnnplan plan`"
    if not isinstance(places, list) or not places:
        raise SpecError(f"must be a list with the rank, server and gpu of every rank; {again}")
    found: dict[int, int] = {}
    for place in places:
        numbers = [place[name] for name in ("rank", "server", "gpu") if type(place.get(name)) is int] if isinstance(place, dict) else []
        if len(numbers) < 3:
            raise SpecError(f"every rank needs whole numbers rank, server and gpu, found {str(place)[:80]}; {again}")
        rank, server, gpu = numbers
        if not (0 <= server < servers and 0 <= gpu < each):
            raise SpecError(f"rank {rank} sits on GPU {gpu} of server {server}, but there are {servers} servers of {each} GPUs, "
                            f"counted from 0; {again}")  # fmt: skip
        if rank in found or server * each + gpu in found.values():
            raise SpecError(f"a rank or a GPU is there twice (rank {rank}, server {server}, GPU {gpu}); {again}")
        found[rank] = server * each + gpu
    if sorted(found) != list(range(len(found))):
        raise SpecError(f"ranks must count from 0 to {len(found) - 1} without a gap; {again}")
    return tuple(found[rank] for rank in range(len(found)))


def write(path: str | Path, document: dict[str, Any]) -> None:
    write_atomically(path, json.dumps(document, indent=1, allow_nan=False) + "\n")


# -- words ---------------------------------------------------------------------------------------------------------------


def explain(job: Job, found: Found) -> list[str]:
    """Sentences: what binds, why each family lost, and GraNNDis' printed conditions beside the measured ones."""
    best = found.ranked[0]
    t = float(best.predicted.epoch_s)
    out = [f"{best.strategy}: {show_time(t)} per epoch; bottleneck: {best.predicted.bottleneck}", *why_these_gpus(job, found)]
    if not job.stats.known:
        out.append("The graph is known by statistics only: halo sizes are those of a random graph, and the plan cannot be run.")
    for family in FAMILIES:
        theirs = [c for c in found.ranked if isinstance(c.strategy, family)]
        if not theirs or isinstance(best.strategy, family):
            continue
        other, p = theirs[0].strategy, theirs[0].predicted
        more = float(p.epoch_s) / t - 1
        parts = {"computation": float(p.compute_s) - float(best.predicted.compute_s),
                 "exposed communication": float(p.comm_s) - float(best.predicted.comm_s),
                 "bubble": float(p.bubble_s) - float(best.predicted.bubble_s)}  # fmt: skip
        worst = max(parts, key=lambda k: parts[k])
        out.append(f"{other} is {more:.0%} slower: {show_time(parts[worst])} more {worst}")
    return out + granndis_conditions(job)


def why_these_gpus(job: Job, found: Found) -> list[str]:
    """How many of them, and where ranks sit if not in the order of their GPUs."""
    best, out = found.ranked[0], []
    t, used = float(best.predicted.epoch_s), best.job.ranks
    other = next((c for c in found.ranked if (c.job.ranks == job.ranks) != (used == job.ranks)), None)
    if other is not None:
        more = float(other.predicted.epoch_s) / t - 1
        if used < job.ranks:
            out.append(f"{used} of {job.ranks} GPUs are faster than all: the graph gives more of them too little to do; on all of them "
                       f"the fastest is {other.strategy}, {more:.0%} slower")  # fmt: skip
        else:
            out.append(f"All {used} GPUs are worth using: on {other.job.ranks} of them the fastest is {other.strategy}, {more:.0%} slower")
    in_order = best.job.seated(tuple(sorted(best.job.cost.seats)))
    if in_order.seats != best.job.seats:
        more = float(best.strategy.predict(in_order).epoch_s) / t - 1
        out.append(f"Ranks sit where their traffic takes the fast links: in the order of the GPUs an epoch would be {more:.0%} slower")
    return out


def granndis_conditions(job: Job) -> list[str]:
    """GraNNDis Eq. 3-9 as printed, and with the measured growth in the place of D^a L and m^a k. Shown, never deciding."""
    servers, gpus, stats = job.cluster.servers, job.cluster.gpus_per_server, job.stats
    if servers == 1:
        return ["GraNNDis: one server, so nothing crosses servers and preloading is plain graph parallel."]
    assert job.cluster.inter_node is not None
    degree = stats.edges / max(stats.vertices, 1)
    width = job.workload.hidden * job.workload.itemsize
    model, layers = job.model, job.workload.layers
    whole = [model.forward(x, stats.vertices, stats.vertices, stats.edges) + model.backward(x, stats.vertices, stats.vertices, stats.edges)
             for x in range(1, layers + 1)]  # fmt: skip
    compute = stats.vertices / float(sum(job.cost.compute_s(work) for work in whole))
    inside = job.cluster.intra_node.bandwidth / (2 * width * max(layers - 1, 1))
    outside = job.cluster.inter_node.bandwidth / gpus / (2 * width * max(layers - 1, 1))
    own = stats.vertices / servers

    def grown(layout: Layout | EstimatedLayout) -> float:
        """Measured growth of a server's part, mean over servers."""
        if isinstance(layout, Layout):
            rows = sum(layout.rows(r, 0).size for r in range(layout.ranks)) / servers
        else:
            rows = float((layout.facts(1).sources - layout.facts(1).sends.sum(0)).sum()) / servers
        return float(formulas.growth_measured(own, max(rows - own, 0.0)))

    measured = grown(job.layout(layers))
    printed = float(formulas.growth_printed(1.75, layers))  # D^a lies in 1.5-2.0
    before = float(formulas.t_previous(stats.vertices, stats.edges, servers, gpus, compute, inside, outside))
    lines = [f"GraNNDis Eq. 3: T_prev = {show_time(before)} (C = {compute:.3g}, B_int = {inside:.3g}, B_ext = {outside:.3g} vertices/s, "
             f"D = {degree:.1f})"]
    for name, growth in ((f"as printed, D^a L = 1.75 x {layers} =", printed), ("measured growth of a server's part,", measured)):
        after = float(formulas.t_preload(stats.vertices, stats.edges, servers, gpus, compute, inside, max(growth, 1e-9)))
        threshold = float(formulas.preload_threshold(growth, degree)) if degree else float("inf")
        in_range = name.startswith("measured") or formulas.preload_in_range(growth, servers, gpus)
        valid = "" if in_range else f" (outside Eq. 5: 1 < {growth:.1f} <= {servers * gpus} fails)"
        wins = compute / outside > threshold
        lines.append(f"GraNNDis Eq. 4, 7 {name} {growth:.2f}: T_preload = {show_time(after)}; C/B_ext = {compute / outside:.3g} "
                     f"{'>' if wins else '<='} {threshold:.3g}: preloading {'wins' if wins else 'loses'}{valid}")  # fmt: skip
    sampling = GraNNDis(max_hop=MAX_HOP, fanout=FANOUT)
    exponent = np.log(1.75) / np.log(degree) if degree > 1 else 0.0
    growth = float(formulas.growth_sampling(MAX_HOP, FANOUT, exponent))
    after = float(formulas.t_sampling(stats.vertices, stats.edges, servers, gpus, compute, inside, growth))
    valid = "" if formulas.sampling_in_range(growth, printed, servers, gpus) else (
        f" (outside Eq. 9: 1 < {growth:.1f} << {printed:.1f} <= {servers * gpus} fails)")
    lines.append(f"GraNNDis Eq. 8 as printed, m^a k = {MAX_HOP}^a x {FANOUT} = {growth:.2f}: T_sampling = {show_time(after)}{valid}")
    growth = grown(sampling.layout(job))
    after = float(formulas.t_preload(stats.vertices, stats.edges, servers, gpus, compute, inside, growth))
    threshold = float(formulas.preload_threshold(growth, degree)) if degree else float("inf")
    wins = compute / outside > threshold
    lines.append(f"With sampling (max_hop {MAX_HOP}, fanout {FANOUT}) the measured growth is {growth:.2f}: Eq. 4 gives {show_time(after)}; "
                 f"C/B_ext = {compute / outside:.3g} {'>' if wins else '<='} {threshold:.3g}: sampling {'wins' if wins else 'loses'}")
    return [*lines, "These conditions are shown, they do not decide: the ranking uses the measured rows of every layer."]
