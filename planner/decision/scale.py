"""The decision on increasing numbers of GPUs of the same kind: whether to distribute at all.

    --scale 1..16 on servers of 8 GPUs
    1 of 8, 2 of 8, 4 of 8, 8 of 8 GPUs of one server; 16 GPUs of two servers

Ranks that fit on one server sit there, island by island, and the whole server is rented. More ranks
fill whole servers, possibly more than the cluster file has. Each size is a point of a sweep
(sweep.py) at which all GPUs are used.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from gnnplan.planner.cluster.placement import walk
from gnnplan.planner.cluster.spec import MOST_RANKS
from gnnplan.planner.decision.candidate import Candidate, least_needed
from gnnplan.planner.decision.objective import NEAR, with_fields
from gnnplan.planner.decision.search import EVERYTHING, Search, SearchResult
from gnnplan.planner.decision.sweep import planned, point
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.vocabulary.errors import GnnplanError, Infeasible, SpecError


@dataclass(frozen=True)
class Size:
    """A number of GPUs, and the recommendation on them."""

    gpus: int
    servers: int
    mode: str  # 'full' graph or 'mini'-batches
    found: SearchResult | None
    error: GnnplanError | None = None  # the reason why `found` is None
    needs_bytes: float | None = None  # least device memory in which a strategy would fit [B]

    @property
    def best(self) -> Candidate:
        """The recommended candidate; only valid if something fits."""
        assert self.found is not None
        return self.found.best

    @property
    def time_s(self) -> float:
        """Predicted time of an epoch, or of all epochs to the target accuracy [s]."""
        return self.best.time_s

    @property
    def dollars(self) -> float | None:
        """Price of `time_s` [$]; None if the cluster has no price."""
        per_epoch = self.best.dollars
        return None if per_epoch is None else per_epoch * self.best.epochs.usual


@dataclass(frozen=True)
class Scaling:
    """The recommendations at all sizes; a strategy fits at one size at least."""

    sizes: Sequence[Size]  # from fewest GPUs to most
    skipped: Sequence[tuple[int, str]]  # numbers of GPUs that the cluster cannot have, and why
    how: Search = EVERYTHING

    @property
    def fitting(self) -> list[Size]:
        """Sizes on which a strategy fits."""
        return [size for size in self.sizes if size.found]

    @property
    def first(self) -> Size:
        """The size with the fewest GPUs on which a strategy fits, the base of speedups."""
        return self.fitting[0]

    @property
    def fastest(self) -> Size:
        """The size with the least time; among equal ones the smallest."""
        return min(self.fitting, key=lambda size: size.time_s)

    @property
    def cheapest(self) -> Size | None:
        """The size with the least cost; among equal ones the fastest. None without a price."""
        priced = [size for size in self.fitting if size.dollars is not None]
        return min(priced, key=lambda size: (size.dollars, size.time_s), default=None)

    @property
    def best(self) -> Size:
        """The recommended size: the least value, or the smallest within the objective's slack.

        Among equal values the fastest size wins."""
        least = min(self.fitting, key=lambda size: (size.best.value, size.time_s))
        most = least.best.value * self.how.objective.slack
        return next((s for s in self.fitting if s.best.value < most), least)

    @property
    def slower_from(self) -> Size | None:
        """The first size above the fastest that is slower than the fastest; None without one."""
        return self._from(self.fastest, lambda size: size.time_s)

    @property
    def worse_from(self) -> Size | None:
        """The first size above the best with a worse value; None without one."""
        return self._from(self.best, lambda size: size.best.value)

    def _from(self, least: Size, measure: Callable[[Size], float]) -> Size | None:
        larger = (size for size in self.fitting if size.gpus > least.gpus)
        return next((size for size in larger if measure(size) > measure(least)), None)

    @property
    def enough(self) -> Size:
        """The smallest size whose time is within NEAR of the fastest size's."""
        return next(s for s in self.fitting if s.time_s <= (1 + NEAR) * self.fastest.time_s)

    @property
    def takes_over(self) -> list[tuple[int, str, str]]:
        """Sizes at which the recommended strategy changes: (GPUs, from, to)."""
        pairs = (
            (size.gpus, before.best.strategy, size.best.strategy)
            for before, size in pairwise(self.fitting)
        )
        return [
            (gpus, str(a), str(b)) if a.name == b.name else (gpus, a.name, b.name)
            for gpus, a, b in pairs
            if str(a) != str(b)
        ]

    def speedup(self, size: Size) -> float:
        """Return the time of the first size divided by that of `size`."""
        return self.first.time_s / size.time_s

    def efficiency(self, size: Size) -> float:
        """Return the speedup divided by the ratio of the numbers of GPUs."""
        return self.speedup(size) * self.first.gpus / size.gpus


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
            asked += [({"gpus": str(count)}, problem_of(each, count)) for each in problems]
        except SpecError as error:
            skipped.append((count, str(error)))
    if not asked:
        raise SpecError("; ".join(f"--scale {count}: {reason}" for count, reason in skipped))
    sizes: list[Size] = []
    for _, problem, found, refusal in planned(asked, how):
        needs = None if found else least_needed(problem, how.options(problem))
        servers, mode = problem.cluster.servers, problem.workload.mode
        size = Size(problem.ranks, servers, mode, found, refusal, needs)
        if sizes and sizes[-1].gpus == size.gpus:  # in the other mode
            size = better(sizes.pop(), size)
        sizes.append(size)
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
    if objective.stated is not None:
        out = []
        for mode in modes or (base.workload.mode,):
            with suppress(SpecError):
                epochs = round(objective.stated[mode].usual)
                out.append(with_fields(base, mode=mode, epochs=epochs))
        return out
    other = with_fields(base, mode="mini" if base.workload.mode == "full" else "full")
    is_covered = objective.target is not None and objective.target.tells_of(other)
    return [base, other] if is_covered and how.forced is None else [base]


def better(one: Size, other: Size) -> Size:
    """Return the size at which something fits; if both do, the one with the lesser value."""
    if one.found is None or other.found is None:
        return one if other.found is None else other
    return min(one, other, key=lambda size: size.best.value)
