"""A candidate: a strategy on some GPUs, what it is predicted to take, and how sure that is.

A prediction is wrong for two reasons: constants of the cluster differ from their given values
(cluster/scaling.py), and the model has an error even with the right constants (MISSES). Both errors
are drawn DRAWS times, with the same draws for all candidates. In each draw one candidate is the
fastest; the *regret* of another candidate is how much longer its epoch takes, as a share.

The exact candidate with the shortest predicted epoch is recommended, unless a lossy candidate is
surely faster, because the loss of accuracy is often unknown (`search.recommend`). Draws decide
nothing else: ranges are asymmetric, and regret depends on which candidates there are, so a faster
link could make the choice worse. For objectives other than time, the objective's value takes the
place of the epoch (objective.py).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from gnnplan.planner.cluster.placement import proposed
from gnnplan.planner.cluster.scaling import DRAWS, drawn, normals
from gnnplan.planner.cluster.spec import MOST_PAIRED, MOST_RANKS
from gnnplan.planner.decision.objective import TIME, Epochs, Objective, dollars_per_second
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies.base import Memory, Strategy
from gnnplan.planner.strategies.program.account import Prediction, on_fullest_rank, predict
from gnnplan.planner.vocabulary.errors import Infeasible, SpecError
from gnnplan.planner.vocabulary.numbers import FLOAT32, Floats, Precision
from gnnplan.planner.vocabulary.units import show_bytes

value_of = attrgetter("value")  # of a candidate


class Miss(NamedTuple):
    """Standard deviations of log(predicted / true) with the right constants."""

    shared: float  # of an error that all strategies of a question share
    # of an error that a family's exact strategies share, or its lossy ones; rounded rows have
    # errors of their own
    own: float


# Keyed by kind of device. CPU ranks: from the first 146 blind runs; of 38 later runs 92 % lay
# between the 10th and the 90th percentile (docs/reference/measured-runs.md). GPUs: from printed
# epochs and speedups, with leave-one-out (docs/reference/published-figures.md). Of the epochs that
# other papers print for GPUs that nobody measured, 79 % lie in that range
# (docs/reference/other-works.md).
MISSES = {"cpu": Miss(0.08, 0.08), "cuda": Miss(0.14, 0.14)}
SURE_SHARE = 0.95  # least chance with which a lossy strategy counts as surely faster
STRATA = 6  # bins of a constant, inside which the constant counts as known (settled_regret)
MARGIN = 0.1  # share of draws below a range, and above it
# Least chance of being faster than the recommended strategy with which a strategy is worth a run
# (`gnnplan tune`). On CPU ranks it corresponds to a prediction of up to 27 % more: of 373 measured
# pairs 193 were further apart, and in none of these was the order reversed.
LEAST_CHANCE = 0.01


class Outlook(NamedTuple):
    """A candidate's range, chance and regret over the draws.

    The fastest candidate is the one with the least value of the objective (objective.py).
    """

    epoch_low_s: float  # 10th percentile of the epoch [s] (`range_of`)
    epoch_high_s: float  # 90th percentile of the epoch [s]
    chance_fastest: float  # share of draws in which the candidate is the fastest
    expected_regret: float  # mean over draws of value / least value - 1


class Settled(NamedTuple):
    """A constant of the cluster whose measurement would make the choice surer."""

    constant: str
    regret: float  # the least expected regret once the constant is known


def missed(kind: str, family: str, exact: bool, precision: Precision = FLOAT32) -> Floats:
    """Return factors on a predicted epoch, draws of the model's error [DRAWS].

    Rounded rows have kernels of their own, so the errors of their predictions are independent, with
    the spread of float32: no recorded runs have compared both precisions with predictions.
    """
    shared, own = MISSES[kind]
    rounded = f" {precision.name}" if precision.rounds_rows else ""
    by_kind = normals(f"{family} {'exact' if exact else 'lossy'}{rounded}")
    return np.asarray(np.exp(shared * normals("shared") + own * by_kind))


def regrets(drawn: Floats) -> Floats:
    """Return regrets from values to minimise (both [candidates, draws])."""
    return np.asarray(drawn / drawn.min(axis=0) - 1)


def range_of(drawn: Floats, predicted: float) -> tuple[float, float]:
    """Return the 10th and 90th percentile of draws, extended to include the prediction.

    Ranges of constants may be asymmetric, so most draws may be on one side of the prediction.
    """
    low, high = np.quantile(drawn, (MARGIN, 1 - MARGIN))
    return min(float(low), predicted), max(float(high), predicted)


def settled_regret(drawn: Floats, factor: Floats) -> float:
    """Return the expected regret of the best choice if one constant were known.

    `drawn` [candidates, draws] are values to minimise; `factor` [draws] multiplies the constant.
    Draws are sorted by the factor into STRATA. In each stratum one half of the draws chooses a
    candidate, and its regret in the other half counts. So a constant without influence leaves the
    expected regret as it is.
    """
    regret, left = regrets(drawn), 0.0
    for stratum in np.array_split(np.argsort(factor), STRATA):
        halves = stratum[::2], stratum[1::2]
        for half, other in (halves, halves[::-1]):
            chosen = regret[:, half].mean(axis=1).argmin()
            left += float(regret[chosen, other].sum())
    return left / factor.size


@dataclass(frozen=True, eq=False)
class Candidate:
    """A strategy with its prediction."""

    strategy: Strategy
    predicted: Prediction
    problem: Problem  # `problem.placement` has the GPU of each rank
    objective: Objective = TIME

    @classmethod
    def of(cls, problem: Problem, strategy: Strategy, objective: Objective = TIME) -> Candidate:
        """Predict a strategy, whether or not it fits in memory.

        Raises SpecError if the strategy's knobs do not suit the problem, or if no run shows in how
        many epochs it reaches the target accuracy.
        """
        strategy = strategy.settle(problem)
        strategy.check(problem)
        problem = problem.with_cuda_graph(strategy.uses_cuda_graph)
        if (target := objective.target) and not target.epochs(problem, strategy):
            raise SpecError(target.why_not(problem, strategy))
        return cls(strategy, strategy.predict(problem), problem, objective)

    def without_cuda_graphs(self) -> Candidate:
        """Return the candidate predicted without CUDA graphs, which recorded epochs do not use."""
        problem = replace(self.problem, replayed=False)
        predicted = predict(problem, self.strategy.built(problem))
        return replace(self, predicted=predicted, problem=problem)

    @cached_property
    def memory(self) -> Memory:
        """Use of memory -> bytes per rank."""
        return self.strategy.memory(self.problem)

    @property
    def epoch_s(self) -> float:
        """The predicted epoch [s]."""
        return float(self.predicted.epoch_s)

    @property
    def value(self) -> float:
        """The quantity that the objective minimises: by default the predicted epoch [s]."""
        return float(self.objective.value(self.problem, self.strategy, self.epoch_s))

    @property
    def drawn(self) -> Floats:
        """`value` in each draw of the uncertain constants and predictions [DRAWS]."""
        return self.objective.drawn(self.problem, self.strategy, self.drawn_s)

    @property
    def epochs(self) -> Epochs:
        """The epochs that the objective counts: of a training, to the target accuracy, or ONE."""
        return self.objective.epochs(self.problem, self.strategy)

    @property
    def time_s(self) -> float:
        """The predicted time of all epochs that the objective counts [s]."""
        return self.epoch_s * self.epochs.usual

    @property
    def drawn_time_s(self) -> Floats:
        """`time_s` in each draw [DRAWS] [s]."""
        return self.drawn_s * self.epochs.drawn

    @property
    def is_comparable(self) -> bool:
        """Whether the accuracy is known: the strategy is exact, or its runs reached the target."""
        return self.strategy.exact or self.objective.target is not None

    @property
    def memory_bytes(self) -> float:
        """Memory of the fullest rank [B]."""
        return sum(self.fullest().values())

    @property
    def host_bytes(self) -> float:
        """Graph data in the fullest server's memory [B]; 0 on CPUs, where `memory` includes it."""
        if self.problem.on_cpu:
            return 0.0
        return sum(self.strategy.on_fullest_server(self.problem).values())

    @property
    def dollars(self) -> float | None:
        """Price of an epoch [$]; None without a price; servers are rented whole."""
        per_second = dollars_per_second(self.problem)
        return None if per_second is None else per_second * self.epoch_s

    @cached_property
    def drawn_s(self) -> Floats:
        """The epoch in each draw of the uncertain constants and predictions [DRAWS] [s].

        Draws are described at the begin of this file."""
        problem, cluster, strategy = self.problem, self.problem.cluster, self.strategy
        cache, name = problem.cache, cluster.model_dump_json()
        clusters = cache.get_recent("drawn", name, lambda: drawn(cluster))
        # all candidates on these GPUs share one problem, and so the costs of its all-reduces
        doubted = cache.get_recent(
            "in doubt", problem, lambda: replace(problem, cluster=clusters), most=1
        )
        epoch_s = strategy.epoch_s(doubted)
        precision = problem.workload.precision
        misses = missed(cluster.device.kind, strategy.family, strategy.exact, precision)
        return np.broadcast_to(np.ravel(epoch_s), DRAWS) * misses

    def chance_faster(self, other: Candidate) -> float:
        """Return the share of draws in which this candidate's `value` is below the other's."""
        return float((self.drawn < other.drawn).mean())

    def fullest(self) -> dict[str, float]:
        """Return use -> bytes on the fullest rank [B]."""
        return on_fullest_rank(self.memory)

    def must_fit(self) -> None:
        """Raise Infeasible if a server or a device has too little memory."""
        problem, strategy, device = self.problem, self.strategy, self.problem.cluster.device
        if not strategy.fits_servers(problem):
            room, held = problem.cluster.graph_memory, strategy.on_fullest_server(problem)
            by_use = ", ".join(f"{use}: {show_bytes(nbytes)}" for use, nbytes in held.items())
            most, spread = sum(held.values()), strategy.more_spread(problem)
            less = next((f"{each} or " for each in spread if each.fits_servers(problem)), "")
            raise Infeasible(
                f"{strategy} has {show_bytes(most)} of the graph in a server's memory ({by_use})"
                f" but there is {show_bytes(room)} (host_memory); use {less}--set"
                f" host_memory={_gigabytes(most):g}GB"
            )
        uses = self.fullest()
        if (needed := sum(uses.values())) > device.memory:
            use = max(uses, key=uses.__getitem__)
            raise Infeasible(
                f"{strategy} needs {show_bytes(needed)} on its fullest rank but a {device.name} has"
                f" {show_bytes(device.memory)}; most of it is {use} ({show_bytes(uses[use])})"
            )


def side_by_side(candidates: Sequence[Candidate]) -> Floats:
    """Return the candidates' values in each draw [candidates, DRAWS]."""
    return np.stack([candidate.drawn for candidate in candidates])


def outlooks(candidates: Sequence[Candidate]) -> list[Outlook]:
    """Return each candidate's outlook among these."""
    drawn = side_by_side(candidates)
    chances = np.bincount(drawn.argmin(axis=0), minlength=len(drawn)) / drawn.shape[1]
    return [
        Outlook(*range_of(candidate.drawn_s, candidate.epoch_s), float(chance), float(regret))
        for candidate, chance, regret in zip(
            candidates, chances, regrets(drawn).mean(axis=1), strict=True
        )
    ]


def evaluate(problem: Problem, strategy: Strategy, objective: Objective = TIME) -> Candidate:
    """Predict a strategy, and check that it fits in memory. Raises SpecError, Infeasible."""
    candidate = Candidate.of(problem, strategy, objective)
    candidate.must_fit()
    return candidate


def fitting(waiting: list[Candidate]) -> Iterator[Candidate]:
    """Yield the candidates that fit in memory, the best first.

    Memory is computed only as far as the caller iterates. A candidate that does not fit is replaced
    by its variant that recomputes to save memory.
    """
    waiting.sort(key=value_of)
    while waiting:
        first = waiting.pop(0)
        try:
            first.must_fit()
            yield first
        except Infeasible:
            with_less_memory = first.strategy.with_less_memory()
            if with_less_memory is not None:
                with suppress(SpecError):
                    variant = Candidate.of(first.problem, with_less_memory, first.objective)
                    insort(waiting, variant, key=value_of)


def evaluate_or_save_memory(
    problem: Problem, strategy: Strategy, objective: Objective = TIME
) -> Candidate:
    """Evaluate a strategy; if it does not fit, its variant that recomputes to save memory."""
    plain = Candidate.of(problem, strategy, objective)
    return next(fitting([plain]), None) or evaluate(problem, strategy, objective)  # which raises


def placed(problem: Problem, strategy: Strategy) -> Problem:
    """Return the problem with its ranks placed for the strategy's traffic.

    Of the `proposed` placements it has the one with the shortest predicted epoch. Raises SpecError.
    """
    strategy = strategy.settle(problem)
    strategy.check(problem)
    gpus = tuple(sorted(problem.cost.placement))
    in_order = problem.placed(gpus)
    if len(gpus) == 1:
        return in_order
    sent = strategy.traffic(in_order) if len(gpus) <= MOST_PAIRED else []
    groups = strategy.built(in_order).groups
    _, *others = proposed(problem.cluster, gpus, sent, groups, strategy.tied(in_order))
    best, best_s = in_order, np.inf if not others else float(strategy.predict(in_order).epoch_s)
    for placement in others:
        moved = problem.placed(placement)
        if (epoch_s := float(strategy.epoch_s(moved))) < best_s * (1 - 1e-9):
            best, best_s = moved, epoch_s
    return best


# -- the memory or servers that would suffice ------------------------------------------------------

# If nothing fits: --set device.memory=12.1GB would fit granndis on 2 of 4 GPUs or --set servers=4
# (graph_parallel, estimated)


def _gigabytes(nbytes: float) -> float:
    """Return a size for --set [GB], rounded up so that it suffices."""
    return float(np.ceil(nbytes / 1e9 * 1.001 * 100) / 100)


class Need(NamedTuple):
    """The memory that a strategy needs [B]."""

    device: float  # on the fullest rank
    server: float  # for graph data in the fullest server; 0 if that memory is not limited
    name: str  # of the strategy, and of the part of the GPUs


def needs(problem: Problem, options: Iterable[Strategy]) -> Iterator[Need]:
    """Yield the needs of each option that suits the problem."""
    limited, gpus = problem.cluster.graph_memory < np.inf, problem.cluster.ranks
    where = f" on {problem.ranks} of {gpus} GPUs" if problem.ranks < gpus else ""
    for option in options:
        with suppress(SpecError):
            strategy = option.settle(problem)
            strategy.check(problem)
            on_server = sum(strategy.on_fullest_server(problem).values()) if limited else 0.0
            yield Need(strategy.most_memory(problem), on_server, f"{strategy}{where}")


def least_needed(problem: Problem, options: Iterable[Strategy]) -> float | None:
    """Return the least memory of a device [B] in which an option fits; None if none suits.

    Options whose graph data fit in the servers' memory take precedence.
    """
    found = list(needs(problem, options))
    on_servers = [need.device for need in found if need.server <= problem.cluster.graph_memory]
    return min(on_servers or [need.device for need in found], default=None)


def smallest_change(
    problem: Problem,
    options: Callable[[Problem], Sequence[Strategy]],
    on_fewer: Iterable[Problem] = (),
) -> str:
    """Return the memory per device or server, or the servers, with which an option would fit.

    on_fewer: the problem on parts of the GPUs, which may do with less memory. The number of servers
    is estimated from the graph's statistics.
    """
    places = problem, *on_fewer
    words, found = [], [need for part in places for need in needs(part, options(part))]
    room, server_room = problem.cluster.device.memory, problem.cluster.graph_memory
    if larger_gpu := [(need.device, need.name) for need in found if need.server <= server_room]:
        words.append(_enough("device.memory", larger_gpu))
    if larger_server := [
        (need.server, need.name)
        for need in found
        if need.device <= room and need.server > server_room
    ]:
        words.append(_enough("host_memory", larger_server))
    if found and not words:
        need = min(found)
        words.append(
            f"--set device.memory={_gigabytes(need.device):g}GB"
            f" --set host_memory={_gigabytes(need.server):g}GB would fit {need.name}"
        )

    def with_servers(servers: int) -> str | None:
        """Return the name of a strategy that fits on this number of servers."""
        inter_node = problem.cluster.inter_node or problem.cluster.intra_node
        cluster = problem.cluster.model_copy(update={"servers": servers, "inter_node": inter_node})
        most = MOST_PAIRED if problem.graph else MOST_RANKS
        if cluster.ranks > min(problem.stats.vertices, most):
            return None
        larger = replace(problem, graph=None, method=method, cluster=cluster, placement=())
        fitting = (
            need.name
            for need in needs(larger, options(larger))
            if need.device <= room and need.server <= server_room
        )
        return next(fitting, None)

    # no real partition of a graph is worse than a random one, so the proposed number suffices
    method = problem.method if problem.graph is None else "random"
    doubled = (problem.cluster.servers << times for times in range(1, 7))
    if enough := next(filter(with_servers, doubled), 0):
        between = range(enough // 2 + 1, enough)
        least = enough // 2 + 1 + bisect_left(between, True, key=lambda n: bool(with_servers(n)))
        words.append(f"--set servers={least} ({with_servers(least)}, estimated)")
    if not words and not found:
        return "more memory would not help"
    if not words:
        return "no memory per device and no number of servers up to 64 times as many would fit"
    return f"the smallest change that would fit: {' or '.join(words)}"


def _enough(field: str, sizes: list[tuple[float, str]]) -> str:
    """Return the --set of the least size in `sizes`, which are (bytes, strategy)."""
    least = _gigabytes(min(sizes)[0])
    name = next(name for size, name in sizes if size <= least * 1e9)
    return f"--set {field}={least:g}GB would fit {name}"
