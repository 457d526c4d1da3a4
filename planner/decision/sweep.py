"""A sweep: plan at every combination of values of some fields, and see where the choice changes.

    --sweep servers=1,2,4 --sweep hidden=64,256
    every combination, the last field first: 1/64, 1/256, 2/64, ...

A field is one of the cluster or the workload, as --set takes it; `device`: the GPU of another
preset or cluster file; or `ranks`: a number of ranks, as --ranks takes it. The planner does not
import the simulator, so the caller passes a function that simulates a candidate (`Playing`).
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import product
from math import prod
from typing import Any, NamedTuple

from gnnplan.planner.cluster.spec import MOST_RANKS, Cluster
from gnnplan.planner.decision.candidate import Candidate, evaluate, placed
from gnnplan.planner.decision.search import EVERYTHING, Refusals, Search, SearchResult
from gnnplan.planner.gnn.fields import READ_WITH
from gnnplan.planner.problem.inputs import apply_overrides, read_cluster
from gnnplan.planner.problem.problem import Problem, with_ranks
from gnnplan.planner.strategies import Strategy
from gnnplan.planner.vocabulary.errors import GnnplanError, Infeasible, SpecError
from gnnplan.planner.vocabulary.progress import notify
from gnnplan.planner.vocabulary.units import number_of

Axes = dict[str, tuple[str, ...]]
MOST_POINTS = 1_000
DEVICE = "device"  # swept as a whole, by the name of a cluster with the device
RANKS = "ranks"
# returns 'simulated_s' and other columns of a row; empty if the schedule is too large to simulate
Playing = Callable[[Candidate], dict[str, float]]


def axes(texts: Sequence[str]) -> Axes:
    """Parse texts such as 'servers=1,2,4' to fields with their values. Raises SpecError."""
    out: Axes = {}
    for text in texts:
        field, equals, listed = text.partition("=")
        field, values = field.strip(), tuple(value.strip() for value in listed.split(","))
        if not (equals and field and all(values)):
            raise SpecError(
                f"--sweep {text!r}: write a field and its values, as servers=1,2,4,8 or"
                " inter_node.bandwidth=1GB/s,10GB/s"
            )
        if field in out:
            raise SpecError(
                f"--sweep {field} is there twice; give all its values at once, as"
                f" {field}={listed},..."
            )
        if len(set(values)) < len(values):
            raise SpecError(f"--sweep {text!r}: a value is there twice; leave it out")
        out[field] = values
    counts = [len(values) for values in out.values()]
    if prod(counts) > MOST_POINTS:
        raise SpecError(
            f"--sweep asks for {prod(counts):,} combinations ({' x '.join(map(str, counts))}); at"
            f" most {MOST_POINTS:,} are planned: leave values out"
        )
    return out


def points(
    swept: Axes,
    base: Problem,
    settings: Sequence[str] = (),
    read: Callable[[str], Cluster] = read_cluster,
) -> list[tuple[dict[str, str], Problem]]:
    """Return every combination of values, with its problem.

    read: returns the cluster that has a swept device. Raises SpecError if any combination is not
    valid, before the first is planned.
    """
    ats = [dict(zip(swept, values, strict=True)) for values in product(*swept.values())]
    return [(at, point(base, at, settings, read)) for at in ats]


def point(
    base: Problem,
    at: Mapping[str, str],
    settings: Sequence[str] = (),
    read: Callable[[str], Cluster] = read_cluster,
) -> Problem:
    """Return the problem with the settings applied, and then the values of this point.

    More CPU ranks per server share its cores. Raises SpecError.
    """
    cluster = base.cluster
    if DEVICE in at:
        other = read(at[DEVICE])
        price = cluster.price if other.device == cluster.device else other.price
        cluster = cluster.model_copy(update={"device": other.device, "price": price})
    text = at.get("gpus_per_server", "")
    each = int(text) if text.isdecimal() and text.isascii() and len(text) < 10 else 0
    if 0 < each * cluster.servers <= MOST_RANKS and cluster.device.kind == "cpu":
        cluster = with_ranks(cluster, each * cluster.servers)
    values = [f"{field}={value}" for field, value in at.items() if field not in (DEVICE, RANKS)]
    try:
        cluster, workload = apply_overrides(cluster, base.workload, [*settings, *values])
    except SpecError as error:
        if not at:
            raise
        swept = "|".join(map(re.escape, at))
        raise SpecError(re.sub(rf"(?m)^--set (?=({swept})\b)", "--sweep ", str(error))) from error
    if RANKS in at:
        try:
            cluster = with_ranks(cluster, int(number_of(at[RANKS])))
        except ValueError:
            raise SpecError(
                f"--sweep ranks={at[RANKS]}: must be whole numbers, as ranks=1,2,4"
            ) from None
    alone = () if at else [setting.partition("=")[0].strip() for setting in settings]
    for field, why in workload.unread([*at, *alone]).items():
        read_with, (value, *_) = READ_WITH[field]
        if read_with not in at:  # else the field is read at another point
            raise SpecError(
                f"--{'sweep' if at else 'set'} {field} {why}; add --set {read_with}={value}"
            )
    return Problem(base.stats, base.graph, workload, cluster, base.method)


class Planned(NamedTuple):
    """A planned point of a sweep."""

    at: dict[str, str]  # field -> value
    problem: Problem
    found: SearchResult | None
    error: GnnplanError | None = None  # the reason why `found` is None


def planned(asked: Iterable[tuple[dict[str, str], Problem]], how: Search) -> Iterator[Planned]:
    """Plan every point, one after the other.

    A forced strategy, or the evidence of a target accuracy, may suit some points only: then a
    SpecError is the result of a point."""
    refusals: Refusals = (Infeasible,)
    if how.forced or how.objective.target:
        refusals = (Infeasible, SpecError)
    for at, problem in asked:
        notify("planning", ", ".join(f"{field}={value}" for field, value in at.items()))
        try:
            yield Planned(at, problem, how(problem))
        except refusals as error:
            yield Planned(at, problem, None, error)


def moved(
    strategy: Strategy, problem: Problem, ask: Callable[[Problem], SearchResult]
) -> Candidate:
    """Return the best variant of the strategy's family on all GPUs; exact if the strategy is.

    For a family of which plans propose no variant (bns), it is the strategy itself. `ask` is the
    search. Raises Infeasible if no variant fits, SpecError if the strategy's knobs do not suit.
    """
    if next(iter(type(strategy).candidates(problem)), None) is None:
        return evaluate(placed(problem, strategy), strategy)
    found = ask(problem)
    for c in found.ranked:
        is_alike = c.strategy.name == strategy.name and c.strategy.exact >= strategy.exact
        if is_alike and c.problem.ranks == problem.ranks:
            return c
    reasons = (reason for name, reason in found.rejected if name.startswith(strategy.name))
    raise Infeasible(f"{strategy.name} cannot run there: {next(reasons, 'no variant fits')}")


def on_same_gpus(problem: Problem, plan: Problem) -> Problem:
    """Return the problem on the GPUs of a plan, if both have as many servers of as many GPUs."""
    shapes = {(c.servers, c.gpus_per_server) for c in (problem.cluster, plan.cluster)}
    return problem.placed(plan.placement) if len(shapes) == 1 else problem


def rows(
    asked: Iterable[tuple[dict[str, str], Problem]],
    strategy: Strategy,
    plan: Problem,
    playing: Playing,
    how: Search = EVERYTHING,
) -> list[dict[str, Any]]:
    """Return a row per point, with its recommendation and with the plan's strategy on that point.

    The plan's strategy is for as many ranks as `plan` has; on another number of ranks a variant
    takes its place (`moved`).
    """
    out = []
    for at, problem, found, error in planned(asked, how):
        row: dict[str, Any] = {"at": at, "ranks": problem.ranks}
        if found is None:
            out.append(row | {"best": None, "reason": str(error)})
            continue
        best = found.best
        same = None
        with suppress(Infeasible, SpecError):
            here = on_same_gpus(problem, plan)
            if here.ranks == plan.ranks:
                same = evaluate(placed(here, strategy), strategy)
            else:
                same = moved(strategy, problem, lambda _, found=found: found)  # type: ignore[misc]
        notify("playing", f"{best.strategy} on {best.problem.ranks}")
        row |= {
            "best": str(best.strategy),
            "family": best.strategy.name,
            "exact": best.strategy.exact,
            "gpus": best.problem.ranks,
            "predicted_s": best.epoch_s,
            **playing(best),
            "bytes_total": best.predicted.bytes_total,
            "memory_bytes": best.memory_bytes,
        }
        if best.dollars is not None:
            row["epoch_dollars"] = best.dollars
        if same is not None:
            row |= {
                "plan": str(same.strategy),
                "plan_predicted_s": same.epoch_s,
                **{f"plan_{what}": value for what, value in playing(same).items()},
            }
        out.append(row)
    return out


def changes(swept: Iterable[str], table: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the values of a field at which the recommendation changes, with other fields fixed.

    'from' and 'to' are families, or variants if the family is the same. Points at which nothing
    fits are skipped.
    """
    out = []
    for field in swept:
        last: dict[tuple[tuple[str, str], ...], dict[str, Any]] = {}
        for row in table:
            if row["best"] is None:
                continue
            others = tuple(item for item in row["at"].items() if item[0] != field)
            before = last.get(others, row)
            if before["best"] != row["best"]:
                column = "best" if before["family"] == row["family"] else "family"
                out.append(
                    {
                        "field": field,
                        "value": row["at"][field],
                        "with": dict(others),
                        "from": before[column],
                        "to": row[column],
                    }
                )
            last[others] = row
    return out


def to_csv(swept: Iterable[str], table: Sequence[dict[str, Any]]) -> str:
    """Return a CSV line per point: the swept fields, then every column that some row has."""
    flat = [row["at"] | {key: value for key, value in row.items() if key != "at"} for row in table]
    header = dict.fromkeys([*swept, *(key for row in flat for key in row)])
    out = io.StringIO()
    writer = csv.DictWriter(out, list(header), restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return out.getvalue()
