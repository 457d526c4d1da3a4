"""What if: the question again at every value of some fields, and where the recommendation changes.

    --sweep servers=1,2,4 --sweep hidden=64,256      every combination, the last field first: 1/64, 1/256, 2/64, ...

A field is one of the cluster's or the workload's, as --set takes it, or `device`: the GPU of another preset or cluster file. Each point
is planned afresh; what a schedule takes when it is played is asked of the caller, since planning knows no virtual time.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

from gnnplan.planner.errors import Infeasible, SpecError
from gnnplan.planner.files import apply_overrides, read_cluster
from gnnplan.planner.job import Job, with_ranks
from gnnplan.planner.search import Candidate, search
from gnnplan.planner.specs import MOST_RANKS, Cluster, Workload
from gnnplan.progress import Tell, silent

MOST_POINTS = 1_000
DEVICE = "device"  # swept as a whole, by the name of a cluster that has it
Playing = Callable[[Candidate], dict[str, float]]  # 'simulated_s' and what else is of interest; nothing where it is too large to play


@dataclass(frozen=True)
class Axis:
    """A field and its values, as people write them."""

    field: str
    values: tuple[str, ...]


def axes(texts: Sequence[str]) -> list[Axis]:
    """['servers=1,2,4', ..]. Raises SpecError."""
    out: list[Axis] = []
    for text in texts:
        field, equals, values = text.partition("=")
        axis = Axis(field.strip(), tuple(value.strip() for value in values.split(",")))
        if not (equals and axis.field and all(axis.values)):
            raise SpecError(f"--sweep {text!r}: write a field and its values, as servers=1,2,4,8 or inter_node.bandwidth=1GB/s,10GB/s")
        if axis.field in [other.field for other in out]:
            raise SpecError(f"--sweep {axis.field} is there twice; give all its values at once, as {axis.field}={values},...")
        if len(set(axis.values)) < len(axis.values):
            raise SpecError(f"--sweep {text!r}: a value is there twice; leave it out")
        out.append(axis)
    points = prod(len(axis.values) for axis in out)
    if points > MOST_POINTS:
        raise SpecError(f"--sweep asks for {points:,} combinations ({' x '.join(str(len(axis.values)) for axis in out)}); at most "
                        f"{MOST_POINTS:,} are planned: leave values out")  # fmt: skip
    return out


def points(swept: Sequence[Axis], base: Job, settings: Sequence[str] = ()) -> list[tuple[dict[str, str], Job]]:
    """Every combination and its question; raises SpecError before anything is planned if one of them is none."""
    out = []
    for values in product(*(axis.values for axis in swept)):
        at = {axis.field: value for axis, value in zip(swept, values, strict=True)}
        cluster, workload = _where(base.cluster, base.workload, settings, at)
        out.append((at, Job(base.stats, base.graph, workload, cluster, base.method)))
    return out


def _where(cluster: Cluster, workload: Workload, settings: Sequence[str], at: dict[str, str]) -> tuple[Cluster, Workload]:
    """The cluster and the workload with the settings, then at this point. Fewer GPUs per server are the first of its lists; more ranks on
    a CPU share its cores."""
    if DEVICE in at:
        other = read_cluster(at[DEVICE])
        price = cluster.price if other.device == cluster.device else other.price
        cluster = cluster.model_copy(update={"device": other.device, "price": price})
    told = at.get("gpus_per_server", "")
    each = int(told) if told.isdecimal() else 0
    if 0 < each * cluster.servers <= MOST_RANKS and (cluster.device.kind == "cpu" or each < cluster.gpus_per_server):
        cluster = with_ranks(cluster, each * cluster.servers)
    here = [f"{field}={value}" for field, value in at.items() if field != DEVICE]
    cluster, workload = apply_overrides(cluster, workload, [*settings, *here])
    for field in ("batch", "fanout"):
        if field in at and workload.mode == "full":
            raise SpecError(f"--sweep {field}: the plan trains on the full graph (mode: full), which has none; add --set mode=mini")
    return cluster, workload


def rows(asked: Iterable[tuple[dict[str, str], Job]], family: str, playing: Playing, tell: Tell = silent) -> list[dict[str, Any]]:
    """A row per point: what is recommended there, and the best of `family`, the plan's own, on all GPUs."""
    out = []
    for at, job in asked:
        where = ", ".join(f"{field}={value}" for field, value in at.items())
        tell(where)
        row: dict[str, Any] = {"at": at, "ranks": job.ranks}
        try:
            found = search(job)
        except Infeasible as error:
            out.append(row | {"best": None, "reason": str(error)})
            continue
        best = found.ranked[0]
        same = next((c for c in found.ranked if c.strategy.name == family and c.job.ranks == job.ranks), None)
        tell(f"{where}: playing {best.strategy}")
        row |= {"best": str(best.strategy), "family": best.strategy.name, "exact": best.strategy.exact, "gpus": best.job.ranks,
                "predicted_s": float(best.predicted.epoch_s), **playing(best), "bytes_total": best.predicted.bytes_total,
                "memory_bytes": best.memory_bytes}  # fmt: skip
        if best.dollars is not None:
            row["epoch_dollars"] = best.dollars
        if same is not None:
            row |= {"plan": str(same.strategy), "plan_predicted_s": float(same.predicted.epoch_s),
                    **{f"plan_{what}": value for what, value in playing(same).items()}}  # fmt: skip
        out.append(row)
    return out


def changes(swept: Sequence[Axis], table: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Where, from one value of a field to its next with the others as they are, another family is recommended; points at which nothing
    fits are passed over."""
    out = []
    for axis in swept:
        last: dict[tuple[tuple[str, str], ...], str] = {}
        for row in table:
            others = tuple((field, value) for field, value in row["at"].items() if field != axis.field)
            if row["best"] is None:
                continue
            before = last.get(others, row["family"])
            if before != row["family"]:
                out.append({"field": axis.field, "value": row["at"][axis.field], "with": dict(others), "from": before, "to": row["family"]})
            last[others] = row["family"]
    return out


def to_csv(swept: Sequence[Axis], table: Sequence[dict[str, Any]]) -> str:
    """A line per point; the swept fields first, then all that some row has."""
    flat = [row["at"] | {key: value for key, value in row.items() if key != "at"} for row in table]
    header = list(dict.fromkeys([*(axis.field for axis in swept), *(key for row in flat for key in row)]))
    out = io.StringIO()
    writer = csv.DictWriter(out, header, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return out.getvalue()
