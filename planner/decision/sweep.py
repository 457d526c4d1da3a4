"""A sweep: plan at every combination of values of some fields, and see where the choice changes.

    --sweep servers=1,2,4 --sweep hidden=64,256
    every combination, the last field first: 1/64, 1/256, 2/64, ...

A field is one of the cluster or the workload, as --set takes it; `device`: the GPU of another
preset or cluster file; or `ranks`: a number of ranks, as --ranks takes it. The planner does not
import the simulator, so the caller passes a function that simulates a candidate (`Playing`).

A scale is a sweep over increasing numbers of GPUs of the same kind, all in use: whether to
distribute at all.

    --scale 1..16 on servers of 8 GPUs
    1 of 8, 2 of 8, 4 of 8, 8 of 8 GPUs of one server; 16 GPUs of two servers

Ranks that fit on one server sit there, island by island, and the whole server is rented. More ranks
fill whole servers, possibly more than the cluster file has.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from math import prod

import numpy as np

from gnnplan.planner.cluster.placement import walk
from gnnplan.planner.cluster.spec import MOST_RANKS, Cluster
from gnnplan.planner.decision.candidate import Candidate, evaluate, least_needed, placed
from gnnplan.planner.decision.objective import NEAR, with_fields
from gnnplan.planner.decision.search import EVERYTHING, Search, SearchResult
from gnnplan.planner.gnn.fields import READ_WITH
from gnnplan.planner.problem.inputs import apply_overrides, read_cluster
from gnnplan.planner.problem.problem import Problem, with_ranks
from gnnplan.planner.strategies import Strategy
from gnnplan.planner.vocabulary.errors import GnnplanError, Infeasible, SpecError
from gnnplan.planner.vocabulary.files import Json
from gnnplan.planner.vocabulary.progress import notify
from gnnplan.planner.vocabulary.units import number_of

Axes = dict[str, tuple[str, ...]]
MOST_POINTS = 1_000
Point = tuple[dict[str, str], Problem]  # field -> value, and the problem there
DEVICE = "device"  # swept as a whole, by the name of a cluster with the device
RANKS = "ranks"
# returns 'simulated_s' and other columns of a row; empty if the schedule is too large to simulate
Playing = Callable[[Candidate], dict[str, float]]


def axes(texts: Sequence[str]) -> Axes:
    """Parse texts such as 'servers=1,2,4' to fields with their values. Raises SpecError."""
    out: Axes = {}
    for text in texts or [""]:
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
) -> list[Point]:
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


@dataclass(frozen=True)
class Planned:
    """A planned point of a sweep or of a scale."""

    at: dict[str, str]  # field -> value
    problem: Problem
    found: SearchResult | None
    error: GnnplanError | None = None  # the reason why `found` is None

    @property
    def best(self) -> Candidate:
        """The recommended candidate; only valid if something fits."""
        assert self.found is not None
        return self.found.best

    @property
    def value(self) -> float:
        """The objective's value of the recommended candidate; inf if nothing fits."""
        return self.best.value if self.found else np.inf

    @property
    def gpus(self) -> int:
        """The number of GPUs of the problem."""
        return self.problem.ranks

    @property
    def time_s(self) -> float:
        """Predicted time of an epoch, or of all epochs to the target accuracy [s]."""
        return self.best.time_s

    @property
    def dollars(self) -> float | None:
        """Price of `time_s` [$]; None if the cluster has no price."""
        per_epoch = self.best.dollars
        return None if per_epoch is None else per_epoch * self.best.epochs.usual


def planned(asked: Iterable[Point], how: Search) -> Iterator[Planned]:
    """Plan every point, one after the other.

    A forced strategy, or the evidence of a target accuracy, may suit some points only: then a
    SpecError is the result of a point."""
    may_not_suit = how.forced or how.objective.target
    refusals = (Infeasible, SpecError) if may_not_suit else (Infeasible,)
    for at, problem in asked:
        notify("planning", ", ".join(f"{field}={value}" for field, value in at.items()))
        try:
            yield Planned(at, problem, how(problem))
        except refusals as error:
            yield Planned(at, problem, None, error)


def moved(
    problem: Problem,
    strategy: Strategy,
    plan: Problem,
    ask: Callable[[Problem], SearchResult],
    as_it_is: bool = False,
) -> Candidate:
    """Return a plan's strategy on another problem.

    plan: the plan's problem. If both have as many servers of as many GPUs, the ranks stay on the
    plan's GPUs. On another number of ranks, the search `ask` finds the best variant of the
    strategy's family on all GPUs; the variant is exact if the strategy is. A family of which plans
    propose no variant (bns) keeps the strategy itself. as_it_is: as many ranks need not fit, and
    are placed again only on another cluster.

    Raises Infeasible if nothing fits, SpecError if the strategy's knobs do not suit.
    """
    shapes = {(c.servers, c.gpus_per_server) for c in (problem.cluster, plan.cluster)}
    if len(shapes) == 1:
        problem = problem.placed(plan.placement)
    if problem.ranks == plan.ranks and as_it_is:
        here = problem if problem.cluster == plan.cluster else placed(problem, strategy)
        return Candidate.of(here, strategy)
    is_proposed = next(iter(type(strategy).candidates(problem)), None) is not None
    if problem.ranks == plan.ranks or not is_proposed:
        return evaluate(placed(problem, strategy), strategy)
    found = ask(problem)
    for c in found.ranked:
        is_alike = c.strategy.name == strategy.name and c.strategy.exact >= strategy.exact
        if is_alike and c.problem.ranks == problem.ranks:
            return c
    reasons = (reason for name, reason in found.rejected if name.startswith(strategy.name))
    raise Infeasible(f"{strategy.name} cannot run there: {next(reasons, 'no variant fits')}")


def rows(
    asked: Iterable[Point],
    strategy: Strategy,
    plan: Problem,
    playing: Playing,
    how: Search = EVERYTHING,
) -> list[Json]:
    """Return a row per point, with its recommendation and with the plan's strategy on that point.

    `plan` is the plan's problem (`moved`).
    """
    out = []
    for one in planned(asked, how):
        row: Json = {"at": one.at, "ranks": one.gpus}
        out.append(row)
        found = one.found
        if found is None:
            row |= {"best": None, "reason": str(one.error)}
            continue
        best = found.best
        notify("playing", f"{best.strategy} on {best.problem.ranks}")
        row |= {
            **row_of(one.at, best),
            "exact": best.strategy.exact,
            "gpus": best.problem.ranks,
            "predicted_s": best.epoch_s,
            **playing(best),
            "bytes_total": best.predicted.bytes_total,
            "memory_bytes": best.memory_bytes,
        }
        if best.dollars is not None:
            row["epoch_dollars"] = best.dollars
        with suppress(Infeasible, SpecError):
            same = moved(one.problem, strategy, plan, lambda _, found=found: found)  # type: ignore[misc]
            row |= {
                "plan": str(same.strategy),
                "plan_predicted_s": same.epoch_s,
                **{f"plan_{what}": value for what, value in playing(same).items()},
            }
    return out


def row_of(at: dict[str, str], best: Candidate) -> Json:
    """Return the part of a row that `changes` reads."""
    return {"at": at, "best": str(best.strategy), "family": best.strategy.name}


def changes(swept: Iterable[str], table: Sequence[Json]) -> list[Json]:
    """Return the values of a field at which the recommendation changes, with other fields fixed.

    'from' and 'to' are families, or variants if the family is the same. Points at which nothing
    fits are skipped.
    """
    out = []
    for field in swept:
        last: dict[tuple[tuple[str, str], ...], Json] = {}
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


def to_csv(swept: Iterable[str], table: Sequence[Json]) -> str:
    """Return a CSV line per point: the swept fields, then every column that some row has."""
    flat = [row["at"] | {key: value for key, value in row.items() if key != "at"} for row in table]
    header = dict.fromkeys([*swept, *(key for row in flat for key in row)])
    out = io.StringIO()
    writer = csv.DictWriter(out, list(header), restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return out.getvalue()


@dataclass(frozen=True)
class Scaling:
    """The recommendations at all sizes; a strategy fits at one size at least."""

    sizes: Sequence[Planned]  # from fewest GPUs to most
    skipped: Sequence[tuple[int, str]]  # numbers of GPUs that the cluster cannot have, and why
    how: Search = EVERYTHING

    @property
    def fitting(self) -> list[Planned]:
        """Sizes on which a strategy fits."""
        return [size for size in self.sizes if size.found]

    @property
    def first(self) -> Planned:
        """The size with the fewest GPUs on which a strategy fits, the base of speedups."""
        return self.fitting[0]

    @property
    def fastest(self) -> Planned:
        """The size with the least time; among equal ones the smallest."""
        return min(self.fitting, key=lambda size: size.time_s)

    @property
    def cheapest(self) -> Planned | None:
        """The size with the least cost; among equal ones the fastest. None without a price."""
        priced = [size for size in self.fitting if size.dollars is not None]
        return min(priced, key=lambda size: (size.dollars, size.time_s), default=None)

    @property
    def best(self) -> Planned:
        """The recommended size: the least value, or the smallest within the objective's slack.

        Among equal values the fastest size wins."""
        least = min(self.fitting, key=lambda size: (size.value, size.time_s))
        most = least.value * self.how.objective.slack
        return next((size for size in self.fitting if size.value < most), least)

    @property
    def slower_from(self) -> Planned | None:
        """The first size above the fastest that is slower than the fastest; None without one."""
        return self._from(self.fastest, lambda size: size.time_s)

    @property
    def worse_from(self) -> Planned | None:
        """The first size above the best with a worse value; None without one."""
        return self._from(self.best, lambda size: size.value)

    def _from(self, least: Planned, measure: Callable[[Planned], float]) -> Planned | None:
        larger = (size for size in self.fitting if size.gpus > least.gpus)
        return next((size for size in larger if measure(size) > measure(least)), None)

    @property
    def enough(self) -> Planned:
        """The smallest size whose time is within NEAR of the fastest size's."""
        return next(s for s in self.fitting if s.time_s <= (1 + NEAR) * self.fastest.time_s)

    @property
    def takes_over(self) -> list[tuple[int, str, str]]:
        """Sizes at which the recommended strategy changes: (GPUs, from, to)."""
        turns = changes(["gpus"], [row_of(size.at, size.best) for size in self.fitting])
        return [(int(turn["value"]), turn["from"], turn["to"]) for turn in turns]

    def speedup(self, size: Planned) -> float:
        """Return the time of the first size divided by that of `size`."""
        return self.first.time_s / size.time_s

    def efficiency(self, size: Planned) -> float:
        """Return the speedup divided by the ratio of the numbers of GPUs."""
        return self.speedup(size) * self.first.gpus / size.gpus

    def needs_bytes(self, size: Planned) -> float | None:
        """Return the least device memory in which a strategy would fit [B]; None if none suits."""
        return least_needed(size.problem, self.how.options(size.problem))


def sizes_of(asked: str | Iterable[int]) -> list[int]:
    """Parse numbers of GPUs from a list, or from text: '1,2,4' lists them, '4..64' doubles.

    A range includes its end. Raises SpecError.

    >>> sizes_of("4..32"), sizes_of("1..6"), sizes_of("8,1"), sizes_of([2, 4])
    ([4, 8, 16, 32], [1, 2, 4, 6], [1, 8], [2, 4])
    """
    if not isinstance(asked, str):
        found = [int(gpus) if isinstance(gpus, np.integer) else gpus for gpus in asked]
    elif ends := re.fullmatch(r"\s*(-?[0-9]{1,9})\s*\.\.\s*(-?[0-9]{1,9})\s*", asked):
        first, last = int(ends[1]), int(ends[2])
        if first > last:
            raise SpecError(
                f"--scale {asked}: a range runs from fewer GPUs to more; write {last}..{first}"
            )
        doubled = [first << times for times in range(13) if first << times < last]
        found = [*doubled, last] if first > 0 else [first]
    elif re.fullmatch(r"\s*-?[0-9]{1,9}\s*(,\s*-?[0-9]{1,9}\s*)*", asked):
        found = [int(part) for part in asked.split(",")]
    else:
        raise SpecError(
            f"--scale {asked!r:.80}: write numbers of GPUs as a range that doubles, 1..64, or as a"
            " list, 1,2,4,8"
        )
    wrong = [gpus for gpus in found if type(gpus) is not int or not 1 <= gpus <= MOST_RANKS]
    if not found or wrong:
        listed = ", ".join(map(str, wrong)) or "none"
        raise SpecError(
            f"--scale: numbers of GPUs are whole numbers from 1 to {MOST_RANKS:,}, got {listed};"
            " write 1..64 or 1,2,4,8"
        )
    return sorted(set(found))


def problem_of(base: Problem, gpus: int) -> Problem:
    """Return the problem on `gpus` GPUs of the cluster's kind.

    More CPU ranks share the cores of their server. Raises SpecError for a number that the cluster
    cannot have.
    """
    cluster = base.cluster
    each = cluster.gpus_per_server
    if gpus > each and gpus % each:
        raise SpecError(
            f"more than a server's {each} GPUs are whole servers: {gpus - gpus % each} or"
            f" {gpus - gpus % each + each}"
        )
    if gpus > base.stats.vertices:
        raise SpecError(f"every rank needs a vertex (vertices: {base.stats.vertices:,})")
    at = {"servers": str(max(1, gpus // each))}
    if gpus < each and cluster.device.kind == "cpu":
        at["gpus_per_server"] = str(gpus)
    problem = point(base, at)
    if gpus == problem.ranks:
        return problem
    return problem.placed(tuple(sorted(walk(problem.cluster, range(each))[:gpus])))


def scale(
    base: Problem,
    gpus: Sequence[int],
    how: Search = EVERYTHING,
    modes: Sequence[str] = (),
) -> Scaling:
    """Plan on each number of GPUs, with all of them in use.

    modes: for whole trainings, the modes of which each size keeps the better. With a target
    accuracy that runs reached on the full graph and on mini-batches, both modes are compared too.

    Raises SpecError if price, power, evidence or the forced strategy are wrong, or if the cluster
    can have none of the numbers; Infeasible if nothing fits at any size.
    """
    how.objective.check(base)
    how, problems = replace(how, may_use_fewer=False), in_modes(base, how, modes)
    asked, skipped = [], []
    for count in gpus:
        try:
            asked.append([({"gpus": str(count)}, problem_of(each, count)) for each in problems])
        except SpecError as error:
            skipped.append((count, str(error)))
    if not asked:
        raise SpecError("; ".join(f"--scale {count}: {reason}" for count, reason in skipped))
    sizes = [min(planned(in_mode, how), key=lambda one: one.value) for in_mode in asked]
    if not any(size.found for size in sizes):
        most = sizes[-1]
        if isinstance(most.error, SpecError):  # a forced strategy that suits no such problem
            raise most.error
        listed = ", ".join(str(size.gpus) for size in sizes)
        raise Infeasible(f"nothing fits on any of {listed} GPUs; on {most.gpus}: {most.error}")
    return Scaling(sizes, skipped, how)


def in_modes(base: Problem, how: Search, modes: Sequence[str] = ()) -> list[Problem]:
    """Return the problem in each mode of a whole training, or in each mode that runs cover.

    Epochs of the two modes are not comparable, but times of trainings or to an accuracy are.
    """
    objective = how.objective
    if objective.epochs_by_mode is not None:
        out = []
        for mode in modes or (base.workload.mode,):
            with suppress(SpecError):
                epochs = round(objective.epochs_by_mode[mode].usual)
                out.append(with_fields(base, mode=mode, epochs=epochs))
        return out
    other = with_fields(base, mode="mini" if base.workload.mode == "full" else "full")
    is_covered = objective.target is not None and objective.target.tells_of(other)
    return [base, other] if is_covered and how.forced is None else [base]
