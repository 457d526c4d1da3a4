"""Successive halving: which of a few strategies is fastest, from short runs within a budget.

    rung 1   A B C D   5 epochs each, 2 of them to warm up
    rung 2   C A       8 epochs: the faster half goes on, in reverse order
    rung 3   A C       14 epochs, and so on until the order is certain or the budget is used up

The file decides only: `measure` does the runs (executor/launch/tune.py), or a test makes them up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import ceil, expm1, log
from statistics import mean, median
from typing import NamedTuple

import numpy as np
from scipy.stats import t as student

from gnnplan.planner.evidence.runs import WARM_UP, median_error
from gnnplan.planner.vocabulary.units import show_percent

FIRST = 3  # epochs of a run in the first rung, after those that warm up; twice as many in the next
MOST_RUNGS = 5
FEWEST_RUNGS = 2  # before anything is certain: one disturbance spoils one rung
START_S = 8.0  # [s] of a run before its first epoch, until a run has shown it
NOISE = 0.03  # by which medians of equal runs differ; 1.8 % on a machine that nobody else uses
PRIOR_RUNGS = 2  # that the expected spread between rungs counts for, beside the observed one
CONFIDENCE = (
    0.98  # it is asked after every rung: of equal runs 1 in 10 are called different at most
)


class Reading(NamedTuple):
    """What a run has measured."""

    epochs_s: tuple[float, ...]  # without those that warm up
    wall_s: float  # from its start to its end
    failed: str = ""  # why it did not finish, in the words of its error


# (contender, epochs after warming up, most seconds that it may take) -> Reading
Measure = Callable[[int, int, float], Reading]


@dataclass(eq=False)
class Contender:
    """A strategy in the competition, and its runs so far, one per rung that it took part in."""

    name: str
    exact: bool
    predicted_s: float
    readings: list[Reading] = field(default_factory=list)
    failed: str = ""

    @property
    def epoch_s(self) -> float:
        """Median seconds of all its epochs; the prediction before the first."""
        epochs_s = [s for reading in self.readings for s in reading.epochs_s]
        return median(epochs_s) if epochs_s else self.predicted_s


class Difference(NamedTuple):
    """By how much one contender is slower than another, as log(seconds / seconds)."""

    slower: float
    doubt: float  # half the width of the confidence interval

    @property
    def is_certain(self) -> bool:
        return self.slower > self.doubt


def difference(contender: Contender, leader: Contender) -> Difference:
    """How certain it is that `contender` is slower than `leader`: a t-test on the rungs of both.

    Every rung gives one number, the log of the ratio of the two medians: runs of a rung follow
    each other, so a change of the machine's pace meets both, and rungs alternate their order. Of a
    few numbers the spread is unknown, so it is mixed with an expected one, which counts for
    PRIOR_RUNGS rungs: the error of the medians, as the epochs within the runs show it, and NOISE
    between runs. The interval is that of Student's t at CONFIDENCE. Nothing is certain before
    FEWEST_RUNGS.
    """
    pairs = list(zip(contender.readings, leader.readings, strict=False))
    if not pairs:
        return Difference(0.0, np.inf)
    logs = [log(median(a.epochs_s) / median(b.epochs_s)) for a, b in pairs]
    expected = mean(
        median_error(a.epochs_s) ** 2 + median_error(b.epochs_s) ** 2 + 2 * NOISE**2
        for a, b in pairs
    )
    freedom = PRIOR_RUNGS + len(logs) - 1
    spread = sum((one - mean(logs)) ** 2 for one in logs)
    variance = (PRIOR_RUNGS * expected + spread) / freedom
    doubt = float(student.ppf((1 + CONFIDENCE) / 2, freedom)) * (variance / len(logs)) ** 0.5
    return Difference(mean(logs), doubt if len(logs) >= FEWEST_RUNGS else np.inf)


@dataclass(frozen=True)
class Result:
    """How the competition ended.

    `fastest` had the shortest epochs, and `best` is recommended. In `order` the best comes first,
    then the others of the last rung, those that were out before, and those that did not run.
    """

    best: Contender
    fastest: Contender
    order: list[Contender]
    spent_s: float

    @property
    def is_certain(self) -> bool:
        """Whether all that went beyond the first rungs are certainly slower than the best."""
        went_on = [c for c in self.others if len(c.readings) >= FEWEST_RUNGS]
        return all(difference(c, self.best).is_certain for c in went_on or self.others)

    @property
    def others(self) -> list[Contender]:
        """Those that ran and are not the best."""
        return [c for c in self.order if c.readings and not c.failed and c is not self.best]

    def why(self) -> str:
        """The reason for the choice, in a sentence."""
        if not self.others:
            return f"{self.best.name} is the only one that ran to its end"
        if self.fastest is not self.best:
            return (
                f"{self.fastest.name} was {_gap(self.best, self.fastest)} faster, which is not"
                f" certain, and it is lossy: {self.best.name} is exact"
            )
        second = self.others[0]
        gap = f"the next, {second.name}, was {_gap(second, self.best)} slower"
        if self.is_certain:
            return f"{self.best.name} is certainly the fastest: {gap}"
        return f"{self.best.name} was the fastest, not certainly: {gap}"


def _gap(slower: Contender, faster: Contender) -> str:
    """By how much, with its doubt, as '12 % ± 3 %'."""
    found = difference(slower, faster)
    doubt = f" ± {show_percent(expm1(found.doubt))}" if np.isfinite(found.doubt) else ""
    return f"{show_percent(expm1(found.slower))}{doubt}"


def halve(contenders: Sequence[Contender], measure: Measure, budget_s: float) -> Result | None:
    """Measure the contenders until it is certain which is fastest, or the budget is used up.

    A rung starts only if its runs are expected to fit what is left of the budget, and a run is told
    how much that is. The first rung leaves contenders out rather than the second rung. A contender
    that fails is out. After a rung the slower half is out, and all that are certainly slower than
    the fastest; the fastest exact one stays while it may be as fast. None: none has run.
    """
    spent_s, start_s, alive = 0.0, START_S, list(contenders)
    for rung in range(MOST_RUNGS):
        epochs = _affordable(alive[:2] if rung == 0 else alive, rung, start_s, budget_s - spent_s)
        if epochs < FIRST or (rung and len(alive) < 2):
            break
        ran: list[Contender] = []
        for contender in alive if rung % 2 == 0 else alive[::-1]:
            two_more_s = _run_s([contender, *alive[:2]], FIRST, start_s)
            is_too_many = rung == 0 and len(ran) >= 2 and spent_s + two_more_s > budget_s
            if spent_s >= budget_s or is_too_many:
                break
            reading = measure(contenders.index(contender), epochs, budget_s - spent_s)
            spent_s += reading.wall_s
            contender.failed = reading.failed
            if reading.epochs_s:
                ran.append(contender)
                contender.readings.append(reading)
                start_s = reading.wall_s - sum(reading.epochs_s) - WARM_UP * contender.epoch_s
        alive = [contender for contender in alive if contender.readings and not contender.failed]
        if spent_s >= budget_s:
            break
        alive = _survivors(alive)
    return _result(contenders, alive, spent_s)


def least_s(contenders: Sequence[Contender]) -> float:
    """Seconds of the fewest rungs that can make anything certain, as predicted."""
    first, second = contenders, contenders[: _half(len(contenders))]
    return _run_s(first, FIRST, START_S) + _run_s(second, 2 * FIRST, START_S)


def _run_s(contenders: Sequence[Contender], epochs: int, start_s: float) -> float:
    """Expected seconds of a run of each, with so many epochs after those that warm up."""
    return sum(max(start_s, 0.0) + (WARM_UP + epochs) * c.epoch_s for c in contenders)


def _affordable(contenders: Sequence[Contender], rung: int, start_s: float, left_s: float) -> int:
    """How many epochs after warming up a run of a rung may have, so that all fit in time."""
    spare_s = left_s - _run_s(contenders, 0, start_s)
    most = FIRST * 2**rung
    return min(most, int(spare_s / sum(c.epoch_s for c in contenders))) if contenders else 0


def _half(count: int) -> int:
    return max(2, ceil(count / 2))


def _by_speed(contenders: Sequence[Contender]) -> list[Contender]:
    """From fastest to slowest in the rungs that all of them ran."""
    rungs = min((len(contender.readings) for contender in contenders), default=0)

    def level(contender: Contender) -> float:
        if not rungs:
            return log(contender.epoch_s)
        return mean(log(median(reading.epochs_s)) for reading in contender.readings[:rungs])

    return sorted(contenders, key=level)


def _survivors(alive: Sequence[Contender]) -> list[Contender]:
    """Those that go on to the next rung, in their order before."""
    if not alive:
        return []
    ordered = _by_speed(alive)
    possible = [c for c in ordered if c is ordered[0] or not difference(c, ordered[0]).is_certain]
    kept = possible[: _half(len(alive))]
    kept += [c for c in possible if c.exact][:1]
    return [contender for contender in alive if contender in kept]


def _result(
    contenders: Sequence[Contender], alive: Sequence[Contender], spent_s: float
) -> Result | None:
    """The fastest of those of the last rung, or an exact one that may be as fast."""
    last = _by_speed([contender for contender in alive if contender.readings])
    if not last:
        return None
    best = fastest = last[0]
    if not fastest.exact:
        may_be_as_fast = (c for c in last if c.exact and not difference(c, fastest).is_certain)
        best = next(may_be_as_fast, fastest)

    def place(contender: Contender) -> tuple[bool, bool, bool, float]:
        ran = bool(contender.readings) and not contender.failed
        slower = difference(contender, best).slower
        return contender is not best, not ran, contender not in last, slower

    return Result(best, fastest, sorted(contenders, key=place), spent_s)
