"""The search: all candidates of all families, on all GPUs and on parts of them.

Candidates that fit are ranked by what the objective makes of their closed form (objective.py);
recommendation.py says which is recommended, and how sure that is.
The others are rejected with a reason; where none fits, the error says what would (room.py).
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from gnnplan.planner import strategies
from gnnplan.planner.cluster.doubt import factors
from gnnplan.planner.cluster.placement import walk
from gnnplan.planner.cluster.spec import Cluster
from gnnplan.planner.decision.candidate import Candidate, evaluate, evaluate_or_save_memory, placed
from gnnplan.planner.decision.objective import TIME, Objective
from gnnplan.planner.decision.recommendation import (
    SURE_SHARE,
    Outlook,
    Settled,
    outlooks,
    settled_regret,
)
from gnnplan.planner.decision.room import smallest_change
from gnnplan.planner.ownership.estimated_layout import EstimatedLayout
from gnnplan.planner.ownership.layout import Layout
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies.base import Strategy
from gnnplan.planner.vocabulary.errors import GnnplanError, Infeasible, SpecError
from gnnplan.planner.vocabulary.progress import notify
from gnnplan.planner.vocabulary.units import show_count

T = TypeVar("T")
Refusals = tuple[type[GnnplanError], ...]
MOST_HALVED = 256  # GPUs of which parts with fewer servers and fewer GPUs on each are evaluated


def families(problem: Problem) -> list[type[Strategy]]:
    """The families that train on the full graph, or on mini-batches, as the workload asks."""
    return [family for family in strategies.families() if family.mode == problem.workload.mode]


@dataclass(frozen=True)
class Search:
    """How a problem is searched: what may be chosen, and by what it is compared."""

    exact: bool = False  # exact strategies only
    forced: Strategy | None = None  # this strategy only, on all GPUs
    may_use_fewer: bool = True
    objective: Objective = TIME

    def __call__(self, problem: Problem) -> SearchResult:
        """All candidates of all families on all GPUs, and the best on each part that may win.

        Raises SpecError where the forced strategy does not suit the problem or the objective lacks
        numbers, Infeasible where nothing fits.
        """
        self.objective.check(problem)
        if self.forced is not None:
            return SearchResult(problem, [self._alone(problem, self.forced)], how=self)
        ranked, rejected = self._on_all(problem)
        if self.may_use_fewer:
            ranked += self._on_fewer(problem, ranked)
        if not ranked:
            change = smallest_change(problem, self.options)
            raise Infeasible(f"nothing fits:{_reasons(rejected)}\n{change}")
        return SearchResult(problem, sorted(ranked, key=_value), rejected, self)

    def candidates(self, problem: Problem) -> Iterator[Strategy]:
        """One by one: who evaluates one before it asks for the next finds its program built."""
        return (
            s
            for family in families(problem)
            for s in family.candidates(problem)
            if not self.exact or s.settle(problem).exact
        )

    def options(self, problem: Problem) -> list[Strategy]:
        """What may be chosen: the candidates, and each with less memory and more computation."""
        if self.forced is not None:
            return [self.forced]
        return [
            s
            for plain in self.candidates(problem)
            for s in (plain, plain.settle(problem).with_less_memory())
            if s is not None
        ]

    def _alone(self, problem: Problem, forced: Strategy) -> Candidate:
        """The forced strategy. Raises SpecError, Infeasible."""
        if self.objective.target:
            self.objective.target.must_cover(problem, [forced])
        if self.exact and not forced.settle(problem).exact:
            always = {"full": "graph_parallel or granndis", "mini": "data_parallel or gsplit"}
            raise SpecError(
                f"--exact excludes {forced.settle(problem)}: it is lossy; drop --exact or use"
                f" {always[forced.mode]}"
            )
        try:
            return evaluate(placed(problem, forced), forced, self.objective)
        except Infeasible as error:
            raise Infeasible(f"{error}; {smallest_change(problem, self.options)}") from None

    def _on_all(self, problem: Problem) -> tuple[list[Candidate], list[tuple[str, str]]]:
        """The candidates that fit on all GPUs; and the others, each with the reason.

        Raises SpecError where the objective lacks numbers.
        """
        if self.objective.target:
            self.objective.target.must_cover(problem, self.candidates(problem))
        ranked, rejected = list[Candidate](), list[tuple[str, str]]()
        for family in families(problem):
            tried = 0
            for strategy in family.candidates(problem):
                tried += 1
                where = show_count(problem.ranks, "rank")
                notify("evaluating candidates", f"{strategy} on {where}")
                try:
                    if self.exact and not strategy.settle(problem).exact:
                        raise SpecError("it is lossy, and --exact asks for exact strategies")
                    there = placed(problem, strategy)
                    ranked.append(evaluate_or_save_memory(there, strategy, self.objective))
                except (SpecError, Infeasible) as error:
                    rejected.append((str(strategy.settle(problem)), str(error)))
            if not tried and (why := family.absent(problem)):
                rejected.append((family.family, why))
        return ranked, rejected

    def _on_fewer(self, problem: Problem, on_all: Sequence[Candidate]) -> list[Candidate]:
        """The best candidate on each part of the GPUs that may beat those `on_all` GPUs.

        The best exact one of a part is there too if it is recommended, or the best of all exact
        ones, by which lossy ones are judged. Ranks on a CPU are no GPUs: --ranks chooses their
        number, and they share its cores.
        """
        objective, found, exact_ones = self.objective, list[Candidate](), list[Candidate]()
        if problem.cluster.device.kind == "cpu":
            return found
        for gpus in parts(problem.cluster, sizes_alone=objective.stated is not None):
            smaller, waiting = problem.placed(gpus), list[Candidate]()
            is_told = objective.stated is not None and len(gpus) == 1  # whether to distribute
            known = [*on_all, *found, *exact_ones]
            limits = {kind: least_of(known, kind) for kind in (True, False)}
            limit = objective.slack * (limits[True] if np.isfinite(limits[True]) else limits[False])
            if not is_told and objective.at_least(smaller, bound_s(problem, len(gpus))) >= limit:
                continue
            for strategy in self.candidates(smaller):
                where = f"on {len(gpus)} of {show_count(problem.ranks, 'GPU')}"
                notify("evaluating candidates", f"{strategy} {where}")
                with suppress(SpecError, Infeasible):
                    settled = strategy.settle(smaller)
                    limit_s = objective.longest(smaller, settled, limits[settled.exact])
                    there = placed(smaller, strategy, limit_s)
                    waiting.append(Candidate.of(there, strategy, objective))
            fitting = _fitting(waiting)
            if least_one := next(fitting, None):
                found.append(least_one)
                exact_ones += islice((c for c in fitting if c.strategy.exact), 1)
        if not found:
            return found
        every = [*on_all, *found, *exact_ones]
        first = min((c for c in every if c.strategy.exact), key=_value, default=None)
        kept = recommend(every), first
        return found + [c for c in exact_ones if c in kept and c not in found]


EVERYTHING = Search()


@dataclass(frozen=True)
class SearchResult:
    """Candidates from best to worst by the objective, and (strategy, reason) of rejected ones.

    `measured`: the candidate that runs have shown to be best (`gnnplan tune`).
    """

    problem: Problem
    ranked: list[Candidate]
    rejected: Sequence[tuple[str, str]] = ()
    how: Search = EVERYTHING
    measured: Candidate | None = None

    @property
    def forced(self) -> bool:
        """Whether one strategy was asked for, and nothing was compared."""
        return self.how.forced is not None

    @cached_property
    def best(self) -> Candidate:
        """The candidate that is recommended (recommendation.py)."""
        return self.measured or recommend(self.ranked)

    @property
    def is_smaller(self) -> bool:
        """Whether the best is chosen for its size, among those that are nearly as good."""
        if self.forced or self.measured or self.objective.slack == 1.0:
            return False
        return any(c.value < self.best.value and _size(c) > _size(self.best) for c in self.ranked)

    @property
    def objective(self) -> Objective:
        """The objective that all candidates are compared by."""
        return self.best.objective

    @cached_property
    def outlooks(self) -> list[Outlook]:
        """How sure the ranking is: of each candidate, in the order of `ranked`."""
        return _outlooks(self.ranked)

    def outlook(self, candidate: Candidate) -> Outlook:
        """How sure it is that a candidate is the right choice."""
        return self.outlooks[self.ranked.index(candidate)]

    @property
    def rivals(self) -> list[Candidate]:
        """The candidates that the best was chosen from, the best first: if it is exact, exact ones.

        With a target accuracy all of them, for then it is known how many epochs each needs.
        """
        best = self.best
        return [best, *(c for c in self.others if c.is_comparable or not best.strategy.exact)]

    @property
    def settled(self) -> Settled | None:
        """The constant of the cluster that would make the choice among rivals surest.

        None if nothing was chosen by prediction.
        """
        doubted = factors(self.best.problem.cluster)
        if len(self.rivals) < 2 or self.measured or not doubted:
            return None
        drawn = _side_by_side(self.rivals)
        left = {name: settled_regret(drawn, factor) for name, factor in doubted.items()}
        constant = min(left, key=left.__getitem__)
        return Settled(constant, left[constant])

    @property
    def certainty(self) -> Outlook:
        """How sure it is that the best is the right choice among its rivals."""
        return _outlooks(self.rivals)[0]

    @property
    def others(self) -> list[Candidate]:
        """The candidates that are not recommended, from best to worst."""
        best = self.best
        return [candidate for candidate in self.ranked if candidate is not best]


def _reasons(rejected: Sequence[tuple[str, str]]) -> str:
    """Why strategies were rejected, a line each; what several have in common alone is said once."""
    if len(rejected) > 1 and len({reason for _, reason in rejected}) == 1:
        return f" {rejected[0][1]}"
    return "".join(f"\n  {name}: {reason}" for name, reason in rejected)


def _side_by_side(candidates: Sequence[Candidate]) -> NDArray[np.float64]:
    """The candidates' numbers to minimise in each draw [candidates, DRAWS]."""
    return np.stack([candidate.drawn for candidate in candidates])


def _outlooks(candidates: Sequence[Candidate]) -> list[Outlook]:
    drawn_s = np.stack([candidate.drawn_s for candidate in candidates])
    return outlooks([c.epoch_s for c in candidates], drawn_s, _side_by_side(candidates))


def recommend(candidates: Sequence[Candidate]) -> Candidate:
    """The candidate that is recommended of these.

    It has the least of the objective among comparable ones, or less than that for sure. So what
    only makes candidates better never makes the best comparable one worse. With an objective's
    slack the smallest of those that are nearly as good is chosen.
    """
    first = min([c for c in candidates if c.is_comparable] or candidates, key=_value)

    def is_surely_less(c: Candidate) -> bool:
        return c.value < first.value and c.chance_faster(first) >= SURE_SHARE

    best = min(filter(is_surely_less, candidates), key=_value, default=first)
    if best.objective.slack == 1.0:
        return best
    most = best.value * best.objective.slack
    near = [c for c in candidates if c.value <= most]
    as_good = [c for c in near if c.is_comparable or is_surely_less(c) or c is best]
    return min(as_good, key=lambda c: (_size(c), c is not best, c.value))


def _size(candidate: Candidate) -> tuple[int, int]:
    """GPUs and servers."""
    return candidate.problem.ranks, len(set(candidate.problem.servers))


def each_of(
    names: Iterable[str], ask: Callable[[str], T], refusals: Refusals = (SpecError, Infeasible)
) -> tuple[dict[str, T], dict[str, GnnplanError]]:
    """The answers of several questions by their names, and why the others have none."""
    answers, refused = dict[str, T](), dict[str, GnnplanError]()
    for name in names:
        try:
            answers[name] = ask(name)
        except refusals as error:
            refused[name] = error
    return answers, refused


def search(problem: Problem, exact: bool = False, **how: Any) -> SearchResult:
    """Search a problem: `how` names fields of `Search`."""
    return Search(exact, **how)(problem)


def _fitting(waiting: list[Candidate]) -> Iterator[Candidate]:
    """Those that fit, the best first; a caller that needs a few asks no other's memory.

    One that does not fit waits again with less memory and more computation.
    """
    waiting.sort(key=_value)
    while waiting:
        one = waiting.pop(0)
        try:
            yield one.that_fits()
        except Infeasible:
            with_less_memory = one.strategy.with_less_memory()
            if with_less_memory is not None:
                with suppress(SpecError):
                    again = Candidate.of(one.problem, with_less_memory, one.objective)
                    insort(waiting, again, key=_value)


def _value(candidate: Candidate) -> float:
    return candidate.value


def least_of(candidates: Sequence[Candidate], comparable: bool = False) -> float:
    """The least number of candidates, or of comparable ones; infinite without any."""
    return min((c.value for c in candidates if c.is_comparable or not comparable), default=np.inf)


def parts(cluster: Cluster, sizes_alone: bool = False) -> list[tuple[int, ...]]:
    """Fewer GPUs that are worth evaluating, the most first.

    Servers are halved again and again, and so are the GPUs of each server (in the order of their
    islands); behind leaves, the servers of one leaf too. A cluster of half the servers has no part
    that the whole cluster lacks, so a plan is never slower for more servers. Of clusters of more
    than MOST_HALVED GPUs only one of the two is halved, to save time. sizes_alone: the GPUs of one
    server are halved, and beyond there are whole servers, as people rent them.
    """
    each = cluster.gpus_per_server
    path = walk(cluster, range(each))
    server_counts = set(_halvings(cluster.servers))
    if cluster.fabric and 1 < cluster.fabric.below < cluster.servers:
        server_counts.add(cluster.fabric.below)
    both = not sizes_alone and cluster.ranks <= MOST_HALVED
    either = cluster.servers if not sizes_alone else 1
    out = {
        tuple(server * each + gpu for server in range(servers) for gpu in sorted(path[:gpus]))
        for servers in server_counts
        for gpus in _halvings(each)
        if both or gpus == each or servers in (1, either)
    }
    return sorted((gpus for gpus in out if len(gpus) < cluster.ranks), key=lambda g: (-len(g), g))


def _halvings(count: int) -> list[int]:
    return [count >> times for times in range(count.bit_length())]


def bound_s(problem: Problem, ranks: int) -> float:
    """No epoch is shorter [s]: its computation shared equally by so many ranks, and nothing sent.

    Ranks compute no fewer rows together than one rank would alone, which computes what training
    vertices need: of the graph, or of every batch.
    """
    alone, share = problem.placed((0,)), 1.0 / ranks
    if problem.workload.mode == "mini":
        batches = alone.minibatches((0,))
        steps: Sequence[Layout | EstimatedLayout] = batches.first()
        share *= batches.steps / len(steps)  # known ones stand for all
    elif problem.workload.norm == "batch":
        steps = [alone.layout()]
    else:
        steps = alone.batches(alone.layout(), 1)
    work = []
    for layer in range(1, problem.workload.layers + 1):
        facts = [step.facts(layer) for step in steps]
        rows = share * sum(float(f.rows.sum()) for f in facts)
        edges = share * sum(float(f.edges.sum()) for f in facts)
        for way in (problem.model.forward, problem.model.backward):
            work.append(way(layer, rows, rows, edges))
    return float(sum(problem.cost.compute_s(one) for one in work))
