"""The search: all candidates of all families, on all GPUs and on parts of them.

Candidates that fit are ranked by their closed form; recommendation.py says which is recommended,
and how sure that is.
The others are rejected with a reason; where none fits, the error says what would.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from heapq import heapify, heappop, heappush
from itertools import islice
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gnnplan.planner import strategies
from gnnplan.planner.cluster.doubt import DRAWS, drawn, factors
from gnnplan.planner.cluster.placement import best_placement, walk
from gnnplan.planner.cluster.spec import MOST_RANKS, Cluster
from gnnplan.planner.decision.recommendation import (
    Outlook,
    Settled,
    missed,
    outlooks,
    recommended,
    settled_regret,
)
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies.base import Memory, Strategy
from gnnplan.planner.strategies.minibatch.host_memory import fits, fullest
from gnnplan.planner.strategies.program.prediction import Prediction
from gnnplan.planner.vocabulary.errors import Infeasible, SpecError
from gnnplan.planner.vocabulary.progress import Notify, silent
from gnnplan.planner.vocabulary.units import show_bytes, show_count

# Candidates that are predicted to be slower than the fastest exact one by more than this factor are
# not recommended in any doubt, and their epochs need not be drawn.
FAR = 4.0
MOST_HALVED = 256  # GPUs of which parts with fewer servers and fewer GPUs on each are evaluated


@dataclass(frozen=True, eq=False)
class Candidate:
    """A strategy that fits, with its prediction; `problem.placement` has the GPUs of its ranks."""

    strategy: Strategy
    predicted: Prediction
    memory: Memory
    problem: Problem

    @property
    def memory_bytes(self) -> float:
        """Memory of the fullest rank [B]."""
        return float(sum(self.memory.values(), np.zeros(1)).max())

    @cached_property
    def host_bytes(self) -> float:
        """Graph data in the fullest server's memory [B]; 0 where a rank's memory includes it."""
        if self.problem.cluster.device.kind == "cpu":
            return 0.0
        return sum(fullest(self.problem, self.strategy).values())

    @property
    def dollars(self) -> float | None:
        """Price of an epoch [$], where the cluster has a price; servers are rented whole."""
        cluster = self.problem.cluster
        if cluster.price is None:
            return None
        rented = len(set(self.problem.servers)) * cluster.gpus_per_server
        return cluster.price * rented * float(self.predicted.epoch_s) / 3600

    @cached_property
    def drawn_s(self) -> NDArray[np.float64]:
        """Its epoch in each draw of what is not known for sure (recommendation.py) [DRAWS] [s]."""
        problem, cluster, strategy = self.problem, self.problem.cluster, self.strategy
        known, name = problem.known, cluster.model_dump_json()
        doubted = known.recent(("drawn", name), lambda: drawn(cluster))
        # the same for all candidates on these GPUs, which share what all-reduces take there
        there = known.last(
            "problem in doubt",
            id(problem),  # which the answer keeps
            lambda: (problem, replace(problem, cluster=doubted)),
        )[1]
        epoch_s = strategy.predict(there).epoch_s
        misses = missed(cluster.device.kind, strategy.family, strategy.exact)
        return np.broadcast_to(np.ravel(epoch_s), DRAWS) * misses

    def chance_faster(self, other: Candidate) -> float:
        """The share of draws in which its epoch is shorter than the other's."""
        return float((self.drawn_s < other.drawn_s).mean())

    def fullest(self) -> dict[str, float]:
        """Memory by use on the fullest rank [B]."""
        rank = int(np.argmax(sum(self.memory.values(), np.zeros(1))))
        return {use: float(per_rank[rank]) for use, per_rank in self.memory.items()}


@dataclass(frozen=True)
class SearchResult:
    """Candidates from fastest to slowest, and (strategy, reason) of those that were rejected.

    `forced`: one strategy was asked for, and nothing was compared. `measured`: the candidate that
    runs have shown to be best (`gnnplan tune`).
    """

    ranked: list[Candidate]
    rejected: list[tuple[str, str]]
    forced: bool = False
    measured: Candidate | None = None

    @cached_property
    def best(self) -> Candidate:
        """The candidate that is recommended (recommendation.py)."""
        return self.measured or recommend(self.ranked)

    @cached_property
    def outlooks(self) -> list[Outlook]:
        """How sure the ranking is: of each candidate, in the order of `ranked`."""
        return outlooks(_side_by_side(self.ranked))

    def outlook(self, candidate: Candidate) -> Outlook:
        """How sure it is that a candidate is the right choice."""
        return next(
            outlook
            for other, outlook in zip(self.ranked, self.outlooks, strict=True)
            if other is candidate
        )

    @cached_property
    def rivals(self) -> list[Candidate]:
        """What the best was chosen from, the best first: if it is exact, exact candidates."""
        best = self.best
        return [best, *(c for c in self.others if c.strategy.exact or not best.strategy.exact)]

    @cached_property
    def settled(self) -> Settled | None:
        """The constant of the cluster that would make the choice among rivals surest.

        None if nothing was chosen by prediction.
        """
        doubted = factors(self.best.problem.cluster)
        if len(self.rivals) < 2 or self.measured or not doubted:
            return None
        drawn_s = _side_by_side(self.rivals)
        left = {name: settled_regret(drawn_s, factor) for name, factor in doubted.items()}
        constant = min(left, key=left.__getitem__)
        return Settled(constant, left[constant])

    @cached_property
    def certainty(self) -> Outlook:
        """How sure it is that the best is the right choice among its rivals."""
        return outlooks(_side_by_side(self.rivals))[0]

    @property
    def others(self) -> list[Candidate]:
        """The candidates that are not recommended, from fastest to slowest."""
        best = self.best
        return [candidate for candidate in self.ranked if candidate is not best]

    @property
    def passed_over(self) -> list[Candidate]:
        """Candidates that are predicted to be faster than the best."""
        best_s = float(self.best.predicted.epoch_s)
        return [c for c in self.others if float(c.predicted.epoch_s) < best_s]


def _side_by_side(candidates: Sequence[Candidate]) -> NDArray[np.float64]:
    """The candidates' epochs in each draw [candidates, DRAWS] [s]."""
    return np.stack([candidate.drawn_s for candidate in candidates])


def recommend(candidates: Sequence[Candidate]) -> Candidate:
    """The candidate that is recommended of these."""
    of_exact = [float(c.predicted.epoch_s) for c in candidates if c.strategy.exact]
    far_s = FAR * min(of_exact or [float(c.predicted.epoch_s) for c in candidates])
    near = [c for c in candidates if float(c.predicted.epoch_s) <= far_s]
    if len(near) == 1:
        return near[0]
    return near[recommended(_side_by_side(near), [c.strategy.exact for c in near])]


def families(problem: Problem) -> list[type[Strategy]]:
    """The families that train on the full graph, or on mini-batches, as the workload asks."""
    return [family for family in strategies.families() if family.mode == problem.workload.mode]


def evaluate(
    problem: Problem, strategy: Strategy, predicted: Prediction | None = None
) -> Candidate:
    """The strategy's prediction, unless it is `predicted` already, and memory on its GPUs.

    Raises SpecError where its knobs do not suit the problem, Infeasible where it does not fit.
    """
    strategy = strategy.settle(problem)
    strategy.check(problem)
    check_host_memory(problem, strategy)
    predicted = predicted or strategy.predict(problem)
    candidate = Candidate(strategy, predicted, strategy.memory(problem), problem)
    room = problem.cluster.device.memory
    if candidate.memory_bytes > room:
        use, most = max(candidate.fullest().items(), key=lambda item: item[1])
        raise Infeasible(
            f"{strategy} needs {show_bytes(candidate.memory_bytes)} on its fullest rank but a"
            f" {problem.cluster.device.name} has {show_bytes(room)}; most of it is {use}"
            f" ({show_bytes(most)})"
        )
    return candidate


def check_host_memory(problem: Problem, strategy: Strategy) -> None:
    """Raises Infeasible where servers' memories cannot hold the strategy's graph data."""
    room = problem.cluster.graph_room
    if room == np.inf or fits(problem, strategy):
        return
    held = fullest(problem, strategy)
    by_use = ", ".join(f"{use}: {show_bytes(nbytes)}" for use, nbytes in held.items())
    less = next((s for s in strategy.more_spread(problem) if fits(problem, s)), None)
    raise Infeasible(
        f"{strategy} has {show_bytes(sum(held.values()))} of the graph in a server's memory"
        f" ({by_use}) but there is {show_bytes(room)} (host_memory); use"
        f" {f'{less} or ' if less else ''}--set host_memory={gigabytes(sum(held.values()))}"
    )


def gigabytes(nbytes: float) -> str:
    """A size for --set, rounded up so that it suffices."""
    return f"{np.ceil(nbytes / 1e9 * 1.001 * 100) / 100:g}GB"


def evaluate_or_save_memory(problem: Problem, strategy: Strategy) -> Candidate:
    """`evaluate`, with less memory and more computation where it would not fit otherwise."""
    try:
        return evaluate(problem, strategy)
    except Infeasible as error:
        with_less_memory = strategy.settle(problem).with_less_memory()
        if with_less_memory is not None:
            with suppress(Infeasible):
                return evaluate(problem, with_less_memory)
        raise error


def placed(problem: Problem, strategy: Strategy, limit_s: float = np.inf) -> Problem:
    """The problem with its ranks on those of its GPUs where the strategy's traffic is fastest.

    Ranks stay in order where that is predicted to be faster: `best_placement` adds up exchanges one
    by one, but the stages of a pipeline exchange at the same time. They also do where computation
    and waiting alone take `limit_s` [s], for then no placement wins. Raises SpecError.
    """
    strategy = strategy.settle(problem)
    strategy.check(problem)
    gpus = tuple(sorted(problem.cost.placement))
    in_order = problem.placed(gpus)
    if limit_s < np.inf:
        predicted = strategy.predict(in_order)
        if float(predicted.epoch_s - predicted.comm_s) >= limit_s:
            return in_order
    chosen = problem.placed(
        best_placement(problem.cluster, gpus, strategy.traffic(in_order), strategy.tied(in_order))
    )
    if chosen.placement == in_order.placement:
        return in_order
    return min((chosen, in_order), key=lambda there: float(strategy.predict(there).epoch_s))


def search(
    problem: Problem,
    exact: bool = False,
    forced: Strategy | None = None,
    may_use_fewer: bool = True,
    notify: Notify = silent,
) -> SearchResult:
    """All candidates of all families on all GPUs, and the fastest on each part that may win.

    With `forced` only that strategy, on all GPUs. Raises SpecError where the forced strategy does
    not suit the problem, Infeasible where nothing fits.
    """
    if forced is not None:
        if exact and not forced.settle(problem).exact:
            always = {"full": "graph_parallel or granndis", "mini": "data_parallel or gsplit"}
            raise SpecError(
                f"--exact excludes {forced.settle(problem)}: it is lossy; drop --exact or use"
                f" {always[forced.mode]}"
            )
        try:
            return SearchResult([evaluate(placed(problem, forced), forced)], [], forced=True)
        except Infeasible as error:
            raise Infeasible(f"{error}; {smallest_change(problem, lambda _: [forced])}") from None
    ranked: list[Candidate] = []
    rejected: list[tuple[str, str]] = []
    for family in families(problem):
        tried = 0
        for strategy in family.candidates(problem):
            tried += 1
            notify("evaluating candidates", f"{strategy} on {show_count(problem.ranks, 'rank')}")
            if exact and not strategy.settle(problem).exact:
                rejected.append(
                    (
                        str(strategy.settle(problem)),
                        "it is lossy, and --exact asks for exact strategies",
                    )
                )
                continue
            try:
                ranked.append(evaluate_or_save_memory(placed(problem, strategy), strategy))
            except (SpecError, Infeasible) as error:
                rejected.append((str(strategy.settle(problem)), str(error)))
        if not tried and (why := family.absent(problem)):
            rejected.append((family.family, why))
    if not ranked:
        reasons = "\n  ".join(f"{name}: {reason}" for name, reason in rejected)
        raise Infeasible(
            f"nothing fits:\n  {reasons}\n"
            f"{smallest_change(problem, partial(_and_with_less_memory, exact=exact))}"
        )
    if may_use_fewer:
        ranked += on_fewer(problem, exact, ranked, notify)
    ranked.sort(key=lambda candidate: float(candidate.predicted.epoch_s))
    return SearchResult(ranked, rejected)


def on_fewer(
    problem: Problem, exact: bool, on_all: Sequence[Candidate], notify: Notify = silent
) -> list[Candidate]:
    """The fastest candidate on each part of the GPUs that may beat those `on_all` GPUs.

    The fastest exact one of a part is there too if it is recommended. Ranks on a CPU are no GPUs:
    --ranks chooses their number, and they share its cores.
    """
    found: list[Candidate] = []
    if problem.cluster.device.kind == "cpu":
        return found
    limit = fastest_s(on_all)
    exact_ones: list[Candidate] = []
    for gpus in parts(problem.cluster):
        if least(problem, len(gpus), exact) >= limit:
            continue
        smaller, waiting = problem.placed(gpus), list[_Waiting]()
        limits = {kind: fastest_s([*on_all, *found, *exact_ones], kind) for kind in (True, False)}
        for number, strategy in enumerate(_candidates(smaller, exact)):
            notify(
                "evaluating candidates",
                f"{strategy} on {len(gpus)} of {show_count(problem.ranks, 'GPU')}",
            )
            with suppress(SpecError, Infeasible):
                there = placed(smaller, strategy, limits[strategy.settle(smaller).exact])
                waiting.append(_Waiting.of(number, there, strategy))
        fitting = _fitting(waiting)
        if fastest := next(fitting, None):
            found.append(fastest)
            exact_ones += islice((c for c in fitting if c.strategy.exact), 1)
            limit = min(limit, float(fastest.predicted.epoch_s))
    best = recommend([*on_all, *found, *exact_ones])
    return found + [candidate for candidate in exact_ones if candidate is best]


class _Waiting(NamedTuple):
    """A strategy of which it is not known yet whether it fits; smaller if it is faster."""

    epoch_s: float
    number: int  # its place among the candidates
    problem: Problem
    strategy: Strategy
    predicted: Prediction

    @classmethod
    def of(cls, number: int, problem: Problem, strategy: Strategy) -> _Waiting:
        strategy = strategy.settle(problem)
        predicted = strategy.predict(problem)
        return cls(float(predicted.epoch_s), number, problem, strategy, predicted)


def _fitting(waiting: list[_Waiting]) -> Iterator[Candidate]:
    """Those that fit, from fastest to slowest; a caller that needs a few asks no other's memory.

    One that does not fit waits again with less memory and more computation.
    """
    heapify(waiting)
    while waiting:
        one = heappop(waiting)
        try:
            yield evaluate(one.problem, one.strategy, one.predicted)
        except Infeasible:
            with_less_memory = one.strategy.with_less_memory()
            if with_less_memory is not None:
                with suppress(SpecError):
                    heappush(waiting, _Waiting.of(one.number, one.problem, with_less_memory))


def fastest_s(candidates: Sequence[Candidate], exact: bool = False) -> float:
    """The shortest predicted epoch [s], or that of an exact candidate; infinite without any."""
    return min(
        (float(c.predicted.epoch_s) for c in candidates if c.strategy.exact or not exact),
        default=np.inf,
    )


def parts(cluster: Cluster) -> list[tuple[int, ...]]:
    """Fewer GPUs that are worth evaluating, the most first.

    Servers are halved again and again, and so are the GPUs of each server (in the order of their
    islands); behind leaves, the servers of one leaf too. A cluster of half the servers has no part
    that the whole cluster lacks, so a plan is never slower for more servers. Of clusters of more
    than MOST_HALVED GPUs only one of the two is halved, to save time.
    """
    each = cluster.gpus_per_server
    path = walk(cluster, range(each))
    server_counts = set(_halvings(cluster.servers))
    if cluster.fabric and 1 < cluster.fabric.below < cluster.servers:
        server_counts.add(cluster.fabric.below)
    out = [
        tuple(server * each + gpu for server in range(servers) for gpu in sorted(path[:gpus]))
        for servers in server_counts
        for gpus in _halvings(each)
        if cluster.ranks <= MOST_HALVED or gpus == each or servers in (1, cluster.servers)
    ]
    return sorted({gpus for gpus in out if len(gpus) < cluster.ranks}, key=lambda g: (-len(g), g))


def _halvings(count: int) -> list[int]:
    return [count >> times for times in range(count.bit_length())]


def least(problem: Problem, ranks: int, exact: bool = False) -> float:
    """A bound for the epoch [s]: its computation shared equally by so many ranks, nothing sent.

    An exact epoch computes all rows. Batches (GraNNDis) compute no fewer rows than training
    vertices need together.
    """
    if problem.workload.mode == "full" and not exact:
        alone = problem.placed((0,))
        [needed_rows] = alone.batches(alone.layout(), 1)
        facts = [needed_rows.facts(layer) for layer in range(1, problem.workload.layers + 1)]
        counts = [(float(f.rows.sum()) / ranks, float(f.edges.sum()) / ranks) for f in facts]
    else:
        rows, edges = problem.stats.vertices / ranks, problem.stats.edges / ranks
        counts = [(rows, edges)] * problem.workload.layers
    work = [
        way(layer, rows, rows, edges)
        for layer, (rows, edges) in enumerate(counts, 1)
        for way in (problem.model.forward, problem.model.backward)
    ]
    return float(sum(problem.cost.compute_s(one) for one in work))


def _candidates(problem: Problem, exact: bool) -> list[Strategy]:
    return [
        s
        for family in families(problem)
        for s in family.candidates(problem)
        if not exact or s.settle(problem).exact
    ]


def _and_with_less_memory(problem: Problem, exact: bool) -> list[Strategy]:
    return [
        s
        for plain in _candidates(problem, exact)
        for s in (plain, plain.settle(problem).with_less_memory())
        if s is not None
    ]


def smallest_change(problem: Problem, options: Callable[[Problem], list[Strategy]]) -> str:
    """How much memory per device or server, or how many servers, would make room for an option.

    Servers are estimated from the graph's statistics.
    """
    words = []
    needs = needs_of(problem, options(problem))
    room, host_room = problem.cluster.device.memory, problem.cluster.graph_room
    if larger_gpu := [(need, name) for need, host, name in needs if host <= host_room]:
        words.append(_enough("device.memory", larger_gpu))
    if larger_host := [
        (host, name) for need, host, name in needs if need <= room and host > host_room
    ]:
        words.append(_enough("host_memory", larger_host))
    if needs and not words:
        need, host, name = min(needs)
        words.append(
            f"--set device.memory={gigabytes(need)} --set host_memory={gigabytes(host)} would fit"
            f" {name}"
        )

    @cache
    def with_servers(servers: int) -> str | None:
        """A strategy that fits on so many servers."""
        cluster = problem.cluster.model_copy(
            update={
                "servers": servers,
                "inter_node": problem.cluster.inter_node or problem.cluster.intra_node,
            }
        )
        if cluster.ranks > min(problem.stats.vertices, MOST_RANKS):
            return None
        larger = replace(
            problem,
            graph=None,
            method=method,
            cluster=cluster,
            placement=(),
        )
        fitting = (
            str(s.settle(larger))
            for s in options(larger)
            if (both := needed(larger, s)) is not None
            and both[0] <= cluster.device.memory
            and both[1] <= cluster.graph_room
        )
        return next(fitting, None)

    # no real cut of a graph is worse than a random one, so the proposed number suffices
    method = problem.method if problem.graph is None else "random"
    few = problem.cluster.servers
    many = next((few * factor for factor in (2, 4, 8, 16, 32, 64) if with_servers(few * factor)), 0)
    if many:
        few = many // 2
        while many - few > 1:
            between = (few + many) // 2
            few, many = (few, between) if with_servers(between) else (between, many)
        words.append(f"--set servers={many} ({with_servers(many)}, estimated)")
    if not words:
        return "no memory per device and no number of servers up to 64 times as many would fit"
    return f"the smallest change that would fit: {' or '.join(words)}"


def _enough(field: str, needs: list[tuple[float, str]]) -> str:
    """The least of a memory that suffices for one of (bytes, strategy)."""
    least = gigabytes(min(needs)[0])
    name = next(name for need, name in needs if need <= float(least.removesuffix("GB")) * 1e9)
    return f"--set {field}={least} would fit {name}"


def needs_of(problem: Problem, options: Sequence[Strategy]) -> list[tuple[float, float, str]]:
    """What `needed` says of every option that suits the problem, and the option's name."""
    return [
        (*both, str(strategy.settle(problem)))
        for strategy in options
        if (both := needed(problem, strategy)) is not None
    ]


def least_needed(
    problem: Problem, exact: bool = False, forced: Strategy | None = None
) -> float | None:
    """The least memory [B] in which a strategy fits, or `forced`; None where none suits."""
    options = [forced] if forced else _and_with_less_memory(problem, exact)
    return min((need for need, *_ in needs_of(problem, options)), default=None)


def needed(problem: Problem, strategy: Strategy) -> tuple[float, float] | None:
    """Memory of the fullest rank, and of the fullest server for graph data where it is limited [B].

    None where the strategy does not suit the problem.
    """
    try:
        strategy = strategy.settle(problem)
        strategy.check(problem)
        on_rank = float(sum(strategy.memory(problem).values(), np.zeros(1)).max())
        limited = problem.cluster.graph_room < np.inf
        return on_rank, sum(fullest(problem, strategy).values()) if limited else 0.0
    except SpecError:
        return None
