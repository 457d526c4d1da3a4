"""plan.json: the question, the answer, the runners-up, and why. A plan says exactly what it was made for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gnnplan import __version__
from gnnplan.planner.errors import Mismatch, SpecError
from gnnplan.planner.files import MOST_SHOWN, checked, read_json, suggest, write_atomically
from gnnplan.planner.graph import Graph, load
from gnnplan.planner.job import Job
from gnnplan.planner.partition import METHODS
from gnnplan.planner.search import Candidate, Found
from gnnplan.planner.specs import Cluster, Workload
from gnnplan.planner.strategies import Strategy, named
from gnnplan.progress import Tell, silent

MAX_PLAN = 64 * 2**20  # [B]


def make(job: Job, found: Found, exact: bool = False, tell: Tell = silent) -> dict[str, Any]:
    """The document of a found plan, JSON-ready."""
    from gnnplan.planner.explain import explain  # its libraries take a tenth of a second, and every rank reads plans

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
        "explanation": explain(job, found, exact, tell),
    }  # fmt: skip


def _answer(candidate: Candidate) -> dict[str, Any]:
    p = candidate.predicted
    return {
        "strategy": json.loads(json.dumps({"name": candidate.strategy.name, **candidate.strategy.knobs()})),  # tuples as a file has them
        "exact": candidate.strategy.exact,
        "gpus": candidate.job.ranks,
        "predicted": {
            "epoch_s": float(p.epoch_s), "compute_s": float(p.compute_s), "comm_s": float(p.comm_s), "bubble_s": float(p.bubble_s),
            "bytes_total": p.bytes_total, "bytes": p.bytes, "bytes_by_link": p.bytes_by_link, "setup_bytes": p.setup_bytes,
            "memory_bytes": candidate.memory_bytes, "memory": candidate.fullest(), "bottleneck": p.bottleneck,
            "by_op": {kind: float(seconds) for kind, seconds in p.by_op.items()},
            **({} if candidate.dollars is None else {"epoch_dollars": candidate.dollars}),
        },
    }  # fmt: skip


# -- reading -------------------------------------------------------------------------------------------------------------


def read(path: str | Path) -> dict[str, Any]:
    """The document, checked in all that is used of it. Raises SpecError (not a plan) or Mismatch (another version's)."""
    document: dict[str, Any] = read_json(path, MAX_PLAN, "make one with `gnnplan plan -o plan.json`")
    fields = ("gnnplan", "graph", "workload", "cluster", "partitioner", "best")
    if missing := [field for field in fields if field not in document] if isinstance(document, dict) else ["all"]:
        raise SpecError(f"{path}: not a plan (missing: {', '.join(missing)}); make one with `gnnplan plan -o plan.json`")
    if document["gnnplan"] != __version__:
        raise Mismatch(f"{path} was made by gnnplan {str(document['gnnplan'])[:MOST_SHOWN]}, this is {__version__}; plan again")
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
    cluster, places = Cluster.model_validate(document["cluster"]), document["best"].get("placement")
    servers, each = cluster.servers, cluster.gpus_per_server
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
