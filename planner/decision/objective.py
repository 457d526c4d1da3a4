"""The objective: the quantity that a plan minimises. Only this file computes it from an epoch.

    time     seconds                                                    [s]
    cost     seconds x price x GPUs of the rented servers               [$]
    energy   seconds x power x GPUs that train                          [J]
    value    seconds x (price x GPUs + worth of an hour of waiting)     [$]

The seconds are those of one epoch, of a whole training (`Epochs`; always for value), or of all
epochs to a target accuracy. Epochs of the full graph and of mini-batches are not comparable; whole
trainings are. A training has as many epochs as --epochs asks, or as similar trainings had in papers
(traces/quoted/epochs.csv). Papers say how many epochs people trained, not how many an accuracy
needs. Only runs show that (`Target`). All exact strategies compute the same numbers, so a run of
one of them holds for all; a lossy strategy needs runs of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from shlex import quote
from typing import Any

import numpy as np

from gnnplan.planner.cluster.scaling import factors_of, normals
from gnnplan.planner.cluster.spec import Cluster
from gnnplan.planner.gnn.workload import Workload
from gnnplan.planner.problem.inputs import checked
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies.base import Strategy
from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.planner.vocabulary.files import quoted, suggest
from gnnplan.planner.vocabulary.numbers import Floats, Number
from gnnplan.planner.vocabulary.units import show_count, show_dollars, show_energy, show_time

# -- epochs ----------------------------------------------------------------------------------------


MODES = {"full": "the full graph", "mini": "mini-batches"}
ENOUGH = 3  # least number of printed trainings from which their spread is estimated


@dataclass(frozen=True)
class Epochs:
    """A number of epochs, with its uncertainty and its source."""

    usual: float
    spread: float  # standard deviation of log(epochs); 0: certain
    source: str  # seeds the draws: equal sources draw equal numbers

    @property
    def drawn(self) -> Floats:
        """The number of epochs in each draw [DRAWS]; at least 1."""
        factors = np.exp(self.spread * normals(f"epochs {self.source}"))
        return np.maximum(1.0, self.usual * factors)

    @property
    def range(self) -> str:
        """The range that holds 80 % of the draws."""
        return "{:.0f}-{:.0f}".format(*np.quantile(self.drawn, (0.1, 0.9)))

    def __str__(self) -> str:
        """Return '200 (as --epochs asks)' or '500 (160-1600; printed of other graphs)'."""
        low_to_high = f"{self.range}; " if self.spread else ""
        return f"{self.usual:.0f} ({low_to_high}{self.source})"


ONE = Epochs(1.0, 0.0, "an epoch")


def epochs_by_mode(graph: str, asked: int | None, mode: str | None) -> Mapping[str, Epochs]:
    """Return the epochs of each mode for a graph of this name.

    asked: the number of epochs for `mode`, by default for the full graph. The other mode then has
    epochs in the same ratio as in papers.
    """
    printed = {name: _printed(graph, name) for name in MODES}
    if asked is None:
        return printed
    asked_mode = mode or "full"
    ratio, note = asked / printed[asked_mode].usual, f"as many as in print for --epochs {asked}"
    scaled = {
        name: Epochs(max(1.0, round(ratio * each.usual)), each.spread, f"{each.source}, {note}")
        for name, each in printed.items()
    }
    return {**scaled, asked_mode: Epochs(float(asked), 0.0, "as --epochs asks")}


def _printed(graph: str, mode: str) -> Epochs:
    """Return the geometric mean of printed trainings, of the graph itself if there are any."""
    rows = [row for row in quoted("epochs.csv") if row["mode"] == mode]
    own = [row for row in rows if row["graph"] == graph]
    logs, all_logs = (np.log([float(row["epochs"]) for row in of]) for of in (own or rows, rows))
    spread = (logs if logs.size >= ENOUGH else all_logs).std(ddof=1)
    source = f"printed of {MODES[mode]} of {graph if own else 'other graphs'}"
    return Epochs(float(round(np.exp(logs.mean()))), float(spread), source)


def with_fields(problem: Problem, **fields: Any) -> Problem:
    """Return the problem with some fields of its workload replaced. Raises SpecError."""
    changed = problem.workload.model_dump() | fields
    return replace(problem, workload=checked(Workload, changed, "", list(fields)))


# -- the objective ---------------------------------------------------------------------------------


# objective -> words for the best, better, worse and equally good
WORDS = {
    "value": ("best value", "better", "worse", "good"),
    "time": ("fastest", "faster", "slower", "fast"),
    "cost": ("cheapest", "cheaper", "dearer", "cheap"),
    "energy": tuple(f"{word} in energy" for word in ("cheapest", "cheaper", "dearer", "cheap")),
}
# Standard deviation of log(epochs to an accuracy) over seeds, before runs show it. In the studies
# of traces/convergence, 0.5 to 5 points below the best accuracy, its median is 0.13, and 0.17 over
# the studies whose evaluations were frequent enough to distinguish seeds.
SEED_SPREAD = 0.15
PRIOR = 2  # number of runs that SEED_SPREAD weighs as much as
# Constants of the objective value, chosen by us and not measured.
WAITING = 20.0  # worth of an hour of waiting [$/h]
USUAL_PRICE = 2.5  # price of a GPU if the cluster has none [$/h]
START_S = 300.0  # time of a run besides its epochs: somebody starts it, data are read, .. [s]
NEAR = 0.1  # share by which a recommendation of fewer GPUs may be worse than the best value


@dataclass(frozen=True)
class Training:
    """A run, and its validation accuracy at the epochs that were evaluated."""

    folder: str
    graph: str  # hash of the graph
    workload: Workload
    strategy: Strategy
    ranks: int
    accuracies: Sequence[tuple[int, float]]  # (epoch, accuracy), from the first to the last

    def reached(self, accuracy: float) -> tuple[int, int] | None:
        """Return the last evaluated epoch below the accuracy, and the first that reached it.

        Return None if no epoch reached it.
        """
        before = 0
        for epoch, seen in self.accuracies:
            if seen >= accuracy:
                return before, epoch
            before = epoch
        return None

    @property
    def best(self) -> float:
        """The highest accuracy."""
        return max(accuracy for _, accuracy in self.accuracies)


@dataclass(frozen=True)
class EpochsOfRuns(Epochs):
    """The number of epochs to the target accuracy, from runs with different seeds.

    Strategies that compute the same numbers have the same `source`, and so the same draws."""

    runs: int

    @classmethod
    def of(cls, reached: Sequence[tuple[int, int]], source: str) -> EpochsOfRuns:
        """Estimate the number from the epochs (before, at) between which each run reached it.

        `usual`, the median, is the geometric mean over runs of the middle between the two epochs.
        The spread over seeds comes from the runs, with SEED_SPREAD as a prior of PRIOR runs. The
        error of the mean of n runs is 1 / sqrt(n) of that spread. Between two evaluations, the true
        epoch is uniformly distributed.
        """
        befores, ats = np.array(reached, dtype=float).T
        middles = (befores + 1 + ats) / 2
        logs, runs = np.log(middles), len(reached)
        squares = PRIOR * SEED_SPREAD**2 + ((logs - logs.mean()) ** 2).sum()
        of_seeds = squares / (PRIOR + runs - 1) * (1 + 1 / runs)
        gaps = (ats - befores - 1) / middles
        spread = np.sqrt(of_seeds + (gaps**2).mean() / 12)
        return cls(float(np.exp(logs.mean())), float(spread), source, runs)

    def __str__(self) -> str:
        """Return '56 (48-65 in 80 % of trainings), from 3 runs', for example."""
        runs = show_count(self.runs, "run")
        note = ", so how far seeds differ is assumed" if self.runs == 1 else ""
        return f"{self.usual:.0f} ({self.range} in 80 % of trainings), from {runs}{note}"


@dataclass(frozen=True)
class Target:
    """A validation accuracy, and the runs that show in how many epochs it is reached."""

    accuracy: float
    trainings: Sequence[Training]

    def of_question(self, problem: Problem) -> list[Training]:
        """Return the runs on the same graph with the same model and options, of any seed."""
        asked = _options(problem.workload)
        return [
            training
            for training in self.trainings
            if training.graph == problem.stats.hash and _options(training.workload) == asked
        ]

    def tells_of(self, problem: Problem) -> bool:
        """Whether runs show in how many epochs exact strategies reach the accuracy."""
        exact = [run for run in self.of_question(problem) if run.strategy.exact]
        return bool(self._reached(exact))

    def like(self, problem: Problem, strategy: Strategy) -> list[Training]:
        """Return the runs that computed what the strategy computes, or are lossy in the same way.

        A lossy strategy's errors depend on the number of parts, so runs of lossy strategies must
        have the same number of ranks.
        """
        return [
            training
            for training in self.of_question(problem)
            if training.strategy.exact == strategy.exact
            and (
                strategy.exact
                or (training.ranks == problem.ranks and strategy.approximates_as(training.strategy))
            )
        ]

    def epochs(self, problem: Problem, strategy: Strategy) -> Epochs | None:
        """Return the number of epochs that the strategy needs; None if runs do not show it.

        A run that ended early, before the slowest other run reached the accuracy, is ignored. If a
        run trained as long and did not reach it, runs do not always reach the accuracy: None.
        """
        like = self.like(problem, strategy)
        reached = self._reached(like)
        if not reached:
            return None
        first_name = min(str(run.strategy) for run in like)
        name = "exact" if strategy.exact else f"{first_name} on {problem.ranks}"
        return EpochsOfRuns.of(reached, f"{problem.workload.mode} {name}")

    def _reached(self, like: Sequence[Training]) -> list[tuple[int, int]]:
        """Return (before, at) of the longest run of each seed; empty if runs do not show it."""
        runs = {run.workload.seed: run for run in sorted(like, key=_length)}
        reached = [span for run in runs.values() if (span := run.reached(self.accuracy))]
        slowest = max((at for _, at in reached), default=0)
        late = (run for run in runs.values() if not run.reached(self.accuracy))
        return [] if any(_length(run) >= slowest for run in late) else reached

    def why_not(self, problem: Problem, strategy: Strategy) -> str:
        """Return why `epochs` is None for the strategy."""
        runs = self.like(problem, strategy)
        ranks = show_count(problem.ranks, "rank")
        which = "an exact strategy" if strategy.exact else f"it on {ranks}"
        number, best = "no run given", ""
        if runs:
            number = f"{show_count(len(runs), 'run')} given"
            best = f" in each of them (best accuracy {max(run.best for run in runs):.3f})"
        return (
            f"not covered: {number} of {which} shows in how many epochs it reaches a validation"
            f" accuracy of {self.accuracy:g}{best}"
        )

    def must_cover(self, problem: Problem, strategies: Iterable[Strategy]) -> None:
        """Raise SpecError, with a run that would help, if runs cover none of the strategies."""
        asked = [strategy.settle(problem) for strategy in strategies]
        if any(self.epochs(problem, strategy) for strategy in asked):
            return
        rule = f"--target-accuracy {self.accuracy:g}: no run shows in how many epochs it is reached"
        if not problem.stats.known:
            raise SpecError(
                f"{rule}, and none can, since only statistics of {problem.stats.name} are known;"
                " give the graph itself (--graph FILE or FOLDER), or leave --target-accuracy out"
            )
        matching = self.of_question(problem)
        found = [f"{show_count(len(self.trainings), 'run')} given"]
        if others := len(self.trainings) - len(matching):
            found.append(f"{others} of another graph, model or options")
        if matching:
            best = max(matching, key=lambda run: run.best)
            found.append(
                f"the best accuracy is {best.best:.4f}, in {best.folder} ({best.strategy} on"
                f" {show_count(best.ranks, 'rank')})"
            )
        runs = [run for strategy in asked for run in self.like(problem, strategy)]
        behind = [run for run in runs if not run.reached(self.accuracy)]
        if last := max(behind, key=_length, default=None):
            remedy = f"gnnplan run --resume {quote(str(last.folder))} --epochs {2 * _length(last)}"
        else:
            is_exact = any(strategy.exact for strategy in asked)
            option = "--exact" if is_exact else f"--strategy '{asked[0]}'"
            remedy = (
                f"gnnplan plan {option} -o first.json (with your other options), gnnplan run"
                f" first.json --epochs {problem.workload.epochs} --eval-every 5 --out runs/first"
            )
        raise SpecError(
            f"{rule} ({', '.join(found)}). This would tell: {remedy}; then plan again with"
            " --evidence and the run's folder. A run of an exact strategy, on any number of ranks,"
            " counts for all exact ones; a lossy one needs a run of its own (gnnplan run"
            " --strategy)"
        )


def _options(workload: Workload) -> str:
    """Return the fields that decide how accuracy grows with epochs, without the seed."""
    other = {"seed", "batch", "fanout", "patience"}
    other |= set() if workload.ends_on_time else {"epochs"}
    always = workload.model_dump_json(exclude=other)
    return always if workload.mode == "full" else f"{always} {workload.batch} {workload.fanouts}"


def _length(training: Training) -> int:
    """Return the last epoch that was evaluated."""
    return training.accuracies[-1][0]


@dataclass(frozen=True)
class Objective:
    """The quantity to minimise, per epoch, to the target accuracy, or of a whole training."""

    of: str = "time"  # a key of WORDS
    target: Target | None = None
    epochs_by_mode: Mapping[str, Epochs] | None = None  # mode -> epochs of a whole training

    def __post_init__(self) -> None:
        if self.of not in WORDS:
            raise SpecError(f"--objective {self.of!r} is unknown{suggest(self.of, WORDS)}")

    @property
    def is_plain(self) -> bool:
        """Whether the objective is the time of an epoch."""
        return self.of == "time" and self.target is None and self.epochs_by_mode is None

    def check(self, problem: Problem) -> None:
        """Raise SpecError if the cluster lacks the price or the power."""
        cluster = problem.cluster
        if self.of == "cost" and cluster.price is None:
            raise SpecError(
                f"--objective cost needs the price of a GPU and hour, and {cluster.name} has none;"
                " add it, as --set price=2.50, or of one of several clusters as CLUSTER?price=2.50"
            )
        if self.of == "energy" and cluster.device.power is None:
            raise SpecError(
                f"--objective energy needs the power of a {unit_of(cluster)}, and {cluster.name}"
                " has none; add it, as --set device.power=300W"
            )

    def epochs(self, problem: Problem, strategy: Strategy) -> Epochs:
        """Return the number of epochs that the objective counts."""
        if self.epochs_by_mode is not None:
            return self.epochs_by_mode[problem.workload.mode]
        return (self.target and self.target.epochs(problem, strategy)) or ONE

    def value(self, problem: Problem, strategy: Strategy, epoch_s: Number) -> Number:
        """Return the objective's value for an epoch of `epoch_s` [s] on the problem's GPUs."""
        return self._counted(problem, epoch_s * self.epochs(problem, strategy).usual)

    def drawn(self, problem: Problem, strategy: Strategy, epochs_s: Floats) -> Floats:
        """Return the value in each draw [DRAWS], from the epoch in each draw [DRAWS] [s]."""
        out = self._counted(problem, epochs_s * self.epochs(problem, strategy).drawn)
        if self.of == "energy":
            out = out * factors_of(problem.cluster, "device.power")
        return np.asarray(out)

    def _counted(self, problem: Problem, seconds: Number) -> Number:
        """Return the value of a training that takes `seconds` on the problem's GPUs."""
        if self.of == "value":
            price = problem.cluster.price or USUAL_PRICE
            return (seconds + START_S) * (WAITING + gpus_taken(problem) * price) / 3600
        if self.of == "time":
            return seconds
        per_second = {"cost": dollars_per_second, "energy": watts}[self.of](problem)
        assert per_second is not None, "check(problem) comes first"
        return seconds * per_second

    def show(self, value: float) -> str:
        """Format a value with its unit."""
        return {"time": show_time, "energy": show_energy}.get(self.of, show_dollars)(value)

    @property
    def span(self) -> str:
        """The part of a training that the value is of, in words."""
        if self.epochs_by_mode is not None:
            return "to the end"
        return f"to an accuracy of {self.target.accuracy:g}" if self.target else "per epoch"

    @property
    def slack(self) -> float:
        """Factor on the least value, within which fewer GPUs are recommended."""
        return 1 + NEAR if self.of == "value" else 1.0

    least = property(lambda self: WORDS[self.of][0], doc="The word for the best.")
    less = property(lambda self: WORDS[self.of][1], doc="The word for better.")
    more = property(lambda self: WORDS[self.of][2], doc="The word for worse.")
    as_good = property(lambda self: WORDS[self.of][3], doc="The word for equally good.")


TIME = Objective()


def unit_of(cluster: Cluster) -> str:
    """Return what a rank of the cluster trains on, in words: 'CPU rank' or 'GPU'."""
    return "CPU rank" if cluster.device.kind == "cpu" else "GPU"


def dollars_per_second(problem: Problem) -> float | None:
    """Return the price of the problem's servers [$/s], rented whole; None without a price."""
    cluster = problem.cluster
    if cluster.price is None:
        return None
    return cluster.price * gpus_taken(problem) / 3600


def gpus_taken(problem: Problem) -> int:
    """Return the number of occupied GPUs: with a price, all GPUs of the servers used."""
    if problem.cluster.price is None:
        return problem.ranks
    return problem.server_count * problem.cluster.gpus_per_server


def watts(problem: Problem) -> float | None:
    """Return the power of the GPUs that train [W]; None if the cluster file has none."""
    power = problem.cluster.device.power
    return None if power is None else power * problem.ranks
