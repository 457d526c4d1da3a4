"""The search: evaluates the candidates of all families, on all GPUs and on parts of them.

Candidates that fit in memory are ranked by the objective's value of their closed form
(objective.py). `recommend` chooses one of them; candidate.py says how sure the choice is.
Other candidates are rejected with a reason; if none fits, the error says what would
(candidate.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, TypeVar

import numpy as np

from gnnplan.planner import strategies
from gnnplan.planner.cluster.placement import walk
from gnnplan.planner.cluster.scaling import factors
from gnnplan.planner.cluster.spec import Cluster
from gnnplan.planner.decision.candidate import (
    SURE_SHARE,
    Candidate,
    Outlook,
    Settled,
    evaluate,
    evaluate_or_save_memory,
    fitting,
    outlooks,
    placed,
    settled_regret,
    side_by_side,
    smallest_change,
    value_of,
)
from gnnplan.planner.decision.objective import TIME, Objective
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies.base import Strategy
from gnnplan.planner.vocabulary.errors import GnnplanError, Infeasible, SpecError
from gnnplan.planner.vocabulary.numbers import PerRank
from gnnplan.planner.vocabulary.progress import notify
from gnnplan.planner.vocabulary.units import show_count

T = TypeVar("T")
MOST_HALVED = 256  # GPUs up to which `parts` halves both the servers and the GPUs of each server


def families(problem: Problem) -> list[type[Strategy]]:
    """Return the families of strategies for the workload's mode, full-graph or mini-batch."""
    return [family for family in strategies.families() if family.mode == problem.workload.mode]


@dataclass(frozen=True)
class Search:
    """Options of a search: the strategies that may be chosen, and the objective."""

    exact: bool = False  # exact strategies only
    forced: Strategy | None = None  # this strategy only, on all GPUs
    may_use_fewer: bool = True  # also evaluate parts of the GPUs
    objective: Objective = TIME

    def __call__(self, problem: Problem) -> SearchResult:
        """Evaluate all candidates on all GPUs, and on each part of the GPUs that may be better.

        Only the best candidates of a part are kept. Raises SpecError if the forced strategy does
        not suit the problem or the objective lacks numbers, Infeasible if nothing fits.
        """
        self.objective.check(problem)
        if self.forced is not None:
            return SearchResult(problem, [self._evaluate_forced(problem, self.forced)], how=self)
        ranked, rejected = self._on_all(problem)
        ranked += self._on_fewer(problem, ranked)
        if not ranked:
            change = smallest_change(problem, self.options, self._fewer(problem))
            why = "".join(f"\n  {one_reason(name, reason)}" for name, reason in rejected)
            if len(rejected) > 1 and len({reason for _, reason in rejected}) == 1:
                why = f" {rejected[0][1]}"  # common to all, so it is given once
            raise Infeasible(f"nothing fits:{why}\n{change}")
        return SearchResult(problem, sorted(ranked, key=value_of), rejected, self)

    def candidates(self, problem: Problem) -> Iterator[Strategy]:
        """Yield the candidates; a strategy that is evaluated before the next reuses its program."""
        return (
            s
            for family in families(problem)
            for s in family.candidates(problem)
            if not self.exact or s.settle(problem).exact
        )

    def options(self, problem: Problem) -> list[Strategy]:
        """Return the candidates, and for each its variant that recomputes to save memory."""
        if self.forced is not None:
            return [self.forced]
        return [
            s
            for plain in self.candidates(problem)
            for s in (plain, plain.settle(problem).with_less_memory())
            if s is not None
        ]

    def _evaluate_forced(self, problem: Problem, forced: Strategy) -> Candidate:
        """Evaluate the forced strategy. Raises SpecError, Infeasible."""
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
        """Return candidates that fit on all GPUs, and (strategy, reason) of rejected candidates.

        Raises SpecError if the objective lacks numbers.
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
                    on_gpus = placed(problem, strategy)
                    ranked.append(evaluate_or_save_memory(on_gpus, strategy, self.objective))
                except (SpecError, Infeasible) as error:
                    rejected.append((str(strategy.settle(problem)), str(error)))
            if not tried and (why := family.absent(problem)):
                rejected.append((family.family, why))
        return ranked, rejected

    def _fewer(self, problem: Problem) -> list[Problem]:
        """Return the problem on each part of the GPUs that is evaluated.

        Empty on CPUs: --ranks chooses the number of CPU ranks, which share the machine's cores.
        """
        if problem.on_cpu or not self.may_use_fewer:
            return []
        alone = self.objective.epochs_by_mode is not None
        return [problem.placed(gpus) for gpus in parts(problem.cluster, sizes_alone=alone)]

    def _on_fewer(self, problem: Problem, on_all: Sequence[Candidate]) -> list[Candidate]:
        """Return the best candidate on each part of the GPUs that may beat the candidates `on_all`.

        The best exact candidate of a part is returned too if it is recommended, or if it is the
        best of all exact candidates, with which lossy candidates are compared.
        """
        objective, found, exact_ones = self.objective, list[Candidate](), list[Candidate]()
        for smaller in self._fewer(problem):
            waiting = list[Candidate]()
            for strategy in self.candidates(smaller):
                where = f"on {smaller.ranks} of {show_count(problem.ranks, 'GPU')}"
                notify("evaluating candidates", f"{strategy} {where}")
                with suppress(SpecError, Infeasible):
                    waiting.append(Candidate.of(placed(smaller, strategy), strategy, objective))
            best_first = fitting(waiting)
            if least_one := next(best_first, None):
                found.append(least_one)
                exact_ones += islice((c for c in best_first if c.strategy.exact), 1)
        if not found:
            return found
        every = [*on_all, *found, *exact_ones]
        first = min((c for c in every if c.strategy.exact), key=value_of, default=None)
        kept = recommend(every), first
        return found + [c for c in exact_ones if c in kept and c not in found]


EVERYTHING = Search()


@dataclass(frozen=True)
class SearchResult:
    """The ranked candidates, and the recommended one."""

    problem: Problem
    ranked: list[Candidate]  # from best to worst by the objective
    rejected: Sequence[tuple[str, str]] = ()  # (strategy, reason)
    how: Search = EVERYTHING
    measured: Candidate | None = None  # the candidate that runs have shown to be best (tune)
    best: Candidate = field(init=False)  # the recommended candidate (`recommend`)

    def __post_init__(self) -> None:
        object.__setattr__(self, "best", self.measured or recommend(self.ranked))

    @property
    def forced(self) -> bool:
        """Whether the user named one strategy, so that no strategies were compared."""
        return self.how.forced is not None

    @property
    def is_smaller(self) -> bool:
        """Whether the best uses fewer GPUs than a candidate with a slightly better value."""
        if self.forced or self.measured or self.objective.slack == 1.0:
            return False
        return any(c.value < self.best.value and _size(c) > _size(self.best) for c in self.ranked)

    @property
    def objective(self) -> Objective:
        """The objective that ranks the candidates."""
        return self.best.objective

    @property
    def outlooks(self) -> list[Outlook]:
        """The outlook of each candidate among all ranked ones, in the order of `ranked`."""
        return outlooks(self.ranked)

    def outlook(self, candidate: Candidate) -> Outlook:
        """Return the outlook of a candidate among all ranked ones."""
        return self.outlooks[self.ranked.index(candidate)]

    @property
    def rivals(self) -> list[Candidate]:
        """The best candidate, followed by the candidates that were comparable with it.

        Lossy candidates are rivals of a lossy best, or, with a target accuracy, of any best, since
        then the number of epochs that each candidate needs is known.
        """
        best = self.best
        return [best, *(c for c in self.others if c.is_comparable or not best.strategy.exact)]

    @property
    def settled(self) -> Settled | None:
        """The constant of the cluster whose measurement makes the choice among rivals surest.

        None if the choice was not made by predictions.
        """
        doubted = factors(self.best.problem.cluster)
        if len(self.rivals) < 2 or self.measured or not doubted:
            return None
        drawn = side_by_side(self.rivals)
        left = {name: settled_regret(drawn, factor) for name, factor in doubted.items()}
        constant = min(left, key=left.__getitem__)
        return Settled(constant, left[constant])

    @property
    def certainty(self) -> Outlook:
        """The outlook of the best among its rivals."""
        return outlooks(self.rivals)[0]

    @property
    def others(self) -> list[Candidate]:
        """The candidates that are not recommended, from best to worst."""
        best = self.best
        return [candidate for candidate in self.ranked if candidate is not best]


def one_reason(strategy: str, reason: str) -> str:
    """Return why a strategy was rejected; its name stands once, though the reason may begin so.

    >>> one_reason("p3", "p3 needs 2 GB"), one_reason("p3", "it is lossy")
    ('p3: needs 2 GB', 'p3: it is lossy')
    """
    return f"{strategy}: {reason.removeprefix(f'{strategy} ')}"


def recommend(candidates: Sequence[Candidate]) -> Candidate:
    """Return the recommended candidate.

    It has the least value among comparable candidates (known accuracy), or is a lossy candidate
    whose value is surely less. So a change that only improves candidates never worsens the best
    comparable one. If the objective has a slack, the candidate with the fewest GPUs among those
    within the slack is recommended.
    """
    first = min([c for c in candidates if c.is_comparable] or candidates, key=value_of)

    def is_surely_less(c: Candidate) -> bool:
        return c.value < first.value and c.chance_faster(first) >= SURE_SHARE

    best = min(filter(is_surely_less, candidates), key=value_of, default=first)
    if best.objective.slack == 1.0:
        return best
    most = best.value * best.objective.slack
    near = [c for c in candidates if c.value <= most]
    as_good = [c for c in near if c.is_comparable or is_surely_less(c) or c is best]
    return min(as_good, key=lambda c: (_size(c), c is not best, c.value))


def _size(candidate: Candidate) -> tuple[int, int]:
    """Return the numbers of GPUs and servers."""
    return candidate.problem.ranks, len(set(candidate.problem.servers))


def each_of(
    names: Iterable[str],
    ask: Callable[[str], T],
    refusals: tuple[type[GnnplanError], ...] = (SpecError, Infeasible),
) -> tuple[dict[str, T], dict[str, GnnplanError]]:
    """Ask a question for each name; return name -> answer, and name -> error of refused ones."""
    answers, refused = dict[str, T](), dict[str, GnnplanError]()
    for name in names:
        try:
            answers[name] = ask(name)
        except refusals as error:
            refused[name] = error
    return answers, refused


def search(problem: Problem, exact: bool = False, **how: Any) -> SearchResult:
    """Search a problem; `how` has fields of `Search`."""
    return Search(exact, **how)(problem)


def least_of(candidates: Sequence[Candidate], comparable: bool = False) -> float:
    """Return the least value of candidates, or of comparable ones only; inf without any."""
    return min((c.value for c in candidates if c.is_comparable or not comparable), default=np.inf)


def parts(cluster: Cluster, sizes_alone: bool = False) -> list[PerRank]:
    """Return parts of the cluster's GPUs that are worth evaluating, the largest first.

    The number of servers is halved repeatedly, and so are the GPUs of each server (in the order of
    islands); with leaf switches, the servers of one leaf are a part too. Every part of a cluster of
    half the servers is a part of the whole cluster, so more servers never make a plan slower. Above
    MOST_HALVED GPUs only one of the two numbers is halved, to save time. sizes_alone: only part of
    one server, or whole servers, as people rent them.
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
