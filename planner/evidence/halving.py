"""Successive halving: finds the best of a few strategies by short runs within a budget of seconds.

    rung 1   A B C D   D C B A   A B C D   D C B A     rounds of turns, each in reverse order
    rung 2   C A   A C   C A   A C                     the better half continues
    rung 3   A C   C A   ...                           for as many rounds as all rungs before

A turn is a run of a few seconds of epochs. Every strategy has one turn in each round, so a slow
phase of the machine, which lasts minutes, affects all strategies equally. The best strategy has the
least value of the plan's objective. The competition ends when the order is certain or the budget is
used up. This file only decides: the caller passes `measure`, which runs a turn
(executor/launch/tune.py); tests pass made-up times.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import ceil, expm1, hypot, log
from statistics import mean, median
from typing import NamedTuple

import numpy as np
from scipy.special import ndtri, stdtrit

from gnnplan.planner.decision.objective import TIME, Objective
from gnnplan.planner.vocabulary.units import show_percent

TURN_S = 2.0  # least duration of a turn's epochs [s]; a turn has at least one epoch
WARM_UP = 1  # first epochs of a turn, not compared: caches are cold, and no message is in flight
FIRST = 4  # rounds of the first rung
MOST_RUNGS = 5
FEWEST = 2  # rounds before anything is certain, since a disturbance can spoil one round
START_S = 8.0  # assumed duration of a run before its first epoch [s], until one is measured
NOISE = 0.03  # expected standard deviation of a turn's median epoch, as a share
PRIOR = 2  # number of rounds that NOISE weighs as much as
LUCK = 0.01  # standard deviation between equal runs of any length (their memory layout), as a share
ENOUGH = 1.2  # rounds end when the doubt is below ENOUGH times the doubt caused by LUCK
# The test is repeated after every rung; with 0.98, tuning finds a difference between two equal
# strategies in at most one of ten cases.
CONFIDENCE = 0.98


class Reading(NamedTuple):
    """The measurements of a turn."""

    epochs_s: tuple[float, ...]  # seconds of epochs without warm-up [s]
    wall_s: float  # duration of the turn, in the first turn with the start of the run [s]
    failed: str = ""  # error message if the run failed


# (index of the contender, epochs after the warm-up, most seconds for the turn) -> Reading
Measure = Callable[[int, int, float], Reading]


@dataclass(eq=False)
class Contender:
    """A strategy in the competition, and its turns so far."""

    name: str
    comparable: bool  # its accuracy is known, so it need not be certainly the best
    predicted_s: float  # predicted epoch [s]
    rate: float = 1.0  # the objective's value per second of its epochs
    readings: list[Reading] = field(default_factory=list)  # one per round
    failed: str = ""  # error message of its run

    @property
    def epoch_s(self) -> float:
        """Median of all measured epochs; the prediction before the first turn [s]."""
        epochs_s = [s for reading in self.readings for s in reading.epochs_s]
        return median(epochs_s) if epochs_s else self.predicted_s


class Difference(NamedTuple):
    """The difference between two contenders' values of the objective, as log(ratio)."""

    more: float  # estimate; positive: the first contender is worse
    doubt: float  # half the width of the confidence interval
    luck: float  # part of `doubt` that more rounds do not reduce

    @property
    def is_certain(self) -> bool:
        return self.more > self.doubt

    @property
    def is_settled(self) -> bool:
        """Whether more rounds would not change the result."""
        return self.is_certain or self.doubt < ENOUGH * self.luck


def difference(contender: Contender, leader: Contender) -> Difference:
    """Test whether `contender` is worse than `leader`, by a t-test on the rounds of both.

    Every round has one sample, log(ratio) of the two medians, each times its rate. A few samples do
    not show their spread, so it is combined with a prior (NOISE of both), which weighs as much as
    PRIOR rounds. The interval is that of Student's t at CONFIDENCE, widened by the LUCK of the two
    runs, which more rounds do not reduce. Nothing is certain before FEWEST rounds.
    """
    pairs = list(zip(contender.readings, leader.readings, strict=False))
    if not pairs:
        return Difference(0.0, np.inf, 0.0)
    rates = contender.rate / leader.rate
    logs = [log(median(a.epochs_s) / median(b.epochs_s) * rates) for a, b in pairs]
    if len(logs) < FEWEST:
        return Difference(mean(logs), np.inf, 0.0)
    freedom = PRIOR + len(logs) - 1
    spread = sum((sample - mean(logs)) ** 2 for sample in logs)
    deviation = ((PRIOR * 2 * NOISE**2 + spread) / freedom / len(logs)) ** 0.5
    tail = (1 + CONFIDENCE) / 2
    by_rounds, by_luck = stdtrit(freedom, tail) * deviation, ndtri(tail) * 2**0.5 * LUCK
    return Difference(mean(logs), hypot(by_rounds, by_luck), by_luck)


@dataclass(frozen=True)
class Result:
    """The result of the competition."""

    best: Contender  # recommended
    least: Contender  # with the least measured value
    order: list[Contender]  # best, others of the last rung, of earlier rungs, those not run
    spent_s: float

    @property
    def is_certain(self) -> bool:
        """Whether all other contenders that ran are certainly worse than the best."""
        return all(difference(c, self.best).is_certain for c in self.others)

    @property
    def others(self) -> list[Contender]:
        """The contenders that ran without failure, except the best."""
        return [c for c in self.order if c.readings and not c.failed and c is not self.best]

    def why(self, objective: Objective = TIME) -> str:
        """Return the reason for the choice, in a sentence with the objective's words."""
        if not self.others:
            return f"{self.best.name} is the only one that ran"
        if self.least is not self.best:
            return (
                f"{self.least.name} was {_gap(self.best, self.least)} {objective.less}, which is"
                f" not certain, and it is lossy: {self.best.name} is exact"
            )
        second = self.others[0]
        gap = f"the next, {second.name}, was {_gap(second, self.best)} {objective.more}"
        if self.is_certain:
            return f"{self.best.name} is certainly the {objective.least}: {gap}"
        return f"{self.best.name} was the {objective.least}, not certainly: {gap}"


def _gap(worse: Contender, better: Contender) -> str:
    """Return how much worse the first contender is, as '12 % ± 3 %'."""
    found = difference(worse, better)
    doubt = f" ± {show_percent(expm1(found.doubt))}" if np.isfinite(found.doubt) else ""
    return f"{show_percent(expm1(found.more))}{doubt}"


def halve(contenders: Sequence[Contender], measure: Measure, budget_s: float) -> Result | None:
    """Measure contenders in turns until the best is certain, or the budget is used up.

    A turn starts only if it is expected to fit into the rest of the budget, which `measure`
    receives. If time is short, the first round skips contenders so that a second round fits. A
    contender that fails is out. After a rung, the worse half is out, and so are contenders that are
    certainly worse than the best; the best comparable contender stays as long as it may be as good.
    The competition ends when more rounds would not change the result. Return None if none has run.
    """
    spent_s, start_s = 0.0, START_S
    alive, rounds = list(contenders), 0
    for rung in range(MOST_RUNGS):
        for _ in range(FIRST if rung == 0 else rounds):
            ran: list[Contender] = []
            for contender in alive[::-1] if rounds % 2 else alive:
                is_new = not contender.readings
                # a third and a fourth contender must leave time for a second round
                again = [*ran, contender] if is_new and len(ran) >= FEWEST else []
                needed_s = sum(_turn_s(each, start_s) for each in (contender, *again))
                if spent_s + needed_s > budget_s and again:
                    continue
                if spent_s + needed_s > budget_s:
                    measured = [each for each in alive if each.readings and not each.failed]
                    return _result(contenders, measured, spent_s)
                epochs = _turn_epochs(contender)
                reading = measure(contenders.index(contender), epochs, budget_s - spent_s)
                spent_s += reading.wall_s
                contender.failed = reading.failed
                if not reading.epochs_s:
                    continue
                contender.readings.append(reading)
                if is_new:
                    in_epochs_s = sum(reading.epochs_s) + WARM_UP * contender.epoch_s
                    start_s = max(0.0, reading.wall_s - in_epochs_s)
                if not reading.failed:
                    ran.append(contender)
            rounds += 1
            alive = sorted(ran, key=contenders.index)
            if spent_s >= budget_s:
                return _result(contenders, alive, spent_s)
        alive = _survivors(alive)
        ordered = _in_order(alive)
        if all(difference(c, ordered[0]).is_settled for c in ordered[1:]):
            break
    return _result(contenders, alive, spent_s)


def least_s(contenders: Sequence[Contender]) -> float:
    """Return the predicted seconds of FEWEST rounds, the least that can be certain [s]."""
    return sum(FEWEST * _turn_s(contender, START_S) for contender in contenders)


def _turn_epochs(contender: Contender) -> int:
    """Return the epochs of a turn after its warm-up."""
    return max(1, ceil(TURN_S / contender.epoch_s))


def _turn_s(contender: Contender, start_s: float) -> float:
    """Return the expected duration of a turn [s]."""
    return start_s + (WARM_UP + _turn_epochs(contender)) * contender.epoch_s


def _in_order(contenders: Sequence[Contender]) -> list[Contender]:
    """Sort contenders from best to worst, by the rounds that all of them ran."""
    rounds = min((len(contender.readings) for contender in contenders), default=0)

    def level(contender: Contender) -> float:
        if not rounds:
            return log(contender.epoch_s * contender.rate)
        medians = [median(reading.epochs_s) for reading in contender.readings[:rounds]]
        return mean(log(epoch_s * contender.rate) for epoch_s in medians)

    return sorted(contenders, key=level)


def _survivors(alive: Sequence[Contender]) -> list[Contender]:
    """Return the contenders that continue in the next rung, in the same order."""
    if not alive:
        return []
    ordered = _in_order(alive)
    possible = [c for c in ordered if c is ordered[0] or not difference(c, ordered[0]).is_certain]
    kept = possible[: max(2, ceil(len(alive) / 2))]
    kept += [c for c in possible if c.comparable][:1]
    return [contender for contender in alive if contender in kept]


def _result(
    contenders: Sequence[Contender], alive: Sequence[Contender], spent_s: float
) -> Result | None:
    """Choose the best of the last rung, or a comparable contender that may be as good."""
    last = _in_order([contender for contender in alive if contender.readings])
    if not last:
        return None
    best = least = last[0]
    if not least.comparable:
        as_good = (c for c in last if c.comparable and not difference(c, least).is_certain)
        best = next(as_good, least)

    def place(contender: Contender) -> tuple[bool, bool, bool, float]:
        ran = bool(contender.readings) and not contender.failed
        more = difference(contender, best).more
        return contender is not best, not ran, contender not in last, more

    return Result(best, least, sorted(contenders, key=place), spent_s)
