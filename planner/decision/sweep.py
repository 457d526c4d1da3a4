"""What if: plan again at every combination of swept values, and see where the choice changes.

    --sweep servers=1,2,4 --sweep hidden=64,256
    every combination, the last field first: 1/64, 1/256, 2/64, ...

A field is one of the cluster or the workload, as --set takes it, or `device`: the GPU of another
preset or cluster file. The planner knows no virtual time, so the caller says how a recommendation
is played (`Playing`).
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
from gnnplan.planner.problem.inputs import apply_overrides, read_cluster
from gnnplan.planner.problem.problem import Problem, with_ranks
from gnnplan.planner.strategies import Strategy
from gnnplan.planner.vocabulary.errors import GnnplanError, Infeasible, SpecError
from gnnplan.planner.vocabulary.progress import notify

Axes = dict[str, tuple[str, ...]]
MOST_POINTS = 1_000
DEVICE = "device"  # swept as a whole, by the name of a cluster that has it
# gives 'simulated_s' and other columns of a row; empty where the schedule is too large to play
Playing = Callable[[Candidate], dict[str, float]]


def axes(texts: Sequence[str]) -> Axes:
    """The fields of texts such as 'servers=1,2,4', each with its values.

    Raises SpecError.
    """
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
    """Every combination of values, and the problem there; `read` gives the cluster of a device.

    Raises SpecError if any of them is not valid, so that nothing is planned in vain.
    """
    ats = [dict(zip(swept, values, strict=True)) for values in product(*swept.values())]
    return [(at, point(base, at, settings, read)) for at in ats]


def point(
    base: Problem,
    at: Mapping[str, str],
    settings: Sequence[str] = (),
    read: Callable[[str], Cluster] = read_cluster,
) -> Problem:
    """The problem with the settings applied, and then the values of this point.

    Fewer GPUs per server are the first ones of the cluster's lists (islands, switches, NICs). More
    ranks on a CPU share its cores. Raises SpecError.
    """
    cluster = base.cluster
    if DEVICE in at:
        other = read(at[DEVICE])
        price = cluster.price if other.device == cluster.device else other.price
        cluster = cluster.model_copy(update={"device": other.device, "price": price})
    text = at.get("gpus_per_server", "")
    each = int(text) if text.isdecimal() and text.isascii() and len(text) < 10 else 0
    if 0 < each * cluster.servers <= MOST_RANKS and (
        cluster.device.kind == "cpu" or each < cluster.gpus_per_server
    ):
        cluster = with_ranks(cluster, each * cluster.servers)
    values = [f"{field}={value}" for field, value in at.items() if field != DEVICE]
    try:
        cluster, workload = apply_overrides(cluster, base.workload, [*settings, *values])
    except SpecError as error:
        swept = "|".join(map(re.escape, at))
        raise SpecError(re.sub(rf"(?m)^--set (?=({swept})\b)", "--sweep ", str(error))) from error
    for field in ("batch", "fanout"):
        if field in at and workload.mode == "full":
            raise SpecError(
                f"--sweep {field}: the plan trains on the full graph (mode: full), which has none;"
                " add --set mode=mini"
            )
    return Problem(base.stats, base.graph, workload, cluster, base.method)


class Planned(NamedTuple):
    """A point that was planned: what was found there, or why nothing was."""

    at: dict[str, str]
    problem: Problem
    found: SearchResult | None
    error: GnnplanError | None = None


def planned(asked: Iterable[tuple[dict[str, str], Problem]], how: Search) -> Iterator[Planned]:
    """The decision at every point, one after the other.

    A strategy that is forced may suit some points only, and so may a lossy strategy's run."""
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
    """The best variant of the strategy's family on all GPUs, an exact one of an exact one.

    Of a family of which plans propose none (bns) it is the strategy itself. `ask` is the search.
    Raises Infeasible where none fits, SpecError where its knobs do not suit.
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


def rows(
    asked: Iterable[tuple[dict[str, str], Problem]],
    strategy: Strategy,
    ranks: int,
    playing: Playing,
    how: Search = EVERYTHING,
) -> list[dict[str, Any]]:
    """A row per point: what is recommended there, and the plan's strategy of so many ranks.

    On another number of ranks that is `moved`.
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
            if problem.ranks == ranks:
                same = evaluate(placed(problem, strategy), strategy)
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
    """Where another strategy is recommended at the next value of a field, the others unchanged.

    'from' and 'to' are families where these differ, else variants of one. Points at which nothing
    fits are passed over.
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
                told = "best" if before["family"] == row["family"] else "family"
                out.append(
                    {
                        "field": field,
                        "value": row["at"][field],
                        "with": dict(others),
                        "from": before[told],
                        "to": row[told],
                    }
                )
            last[others] = row
    return out


def to_csv(swept: Iterable[str], table: Sequence[dict[str, Any]]) -> str:
    """A line per point: the swept fields, then every column that some row has."""
    flat = [row["at"] | {key: value for key, value in row.items() if key != "at"} for row in table]
    header = dict.fromkeys([*swept, *(key for row in flat for key in row)])
    out = io.StringIO()
    writer = csv.DictWriter(out, list(header), restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return out.getvalue()
