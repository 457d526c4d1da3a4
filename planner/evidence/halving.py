"""Which of a few strategies is best, by turns: successive halving within a budget of seconds.

    rung 1   A B C D   D C B A   A B C D   D C B A     rounds of turns, each in reverse order
    rung 2   C A   A C   C A   A C                     the faster half goes on
    rung 3   A C   C A   ...                           for as many rounds as all before

A turn is a run of a few seconds of epochs. Every strategy takes one in each round, so a machine
whose pace changes in minutes is equally slow for all. The best has the shortest epochs, or the
least of what else the plan's objective counts of them. It ends when the order is certain or the
budget is used up. The file decides only: `measure` gives the turns (executor/launch/tune.py), or a
test makes them up.
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

TURN_S = 2.0  # [s] of a turn's epochs, at least; one epoch where that takes longer
WARM_UP = 1  # epochs before them, not compared: caches are cold, and no message is under way
FIRST = 4  # rounds of the first rung
MOST_RUNGS = 5
FEWEST = 2  # rounds before anything is certain: one disturbance spoils one round
START_S = 8.0  # [s] of a run before its first epoch, until a run has shown it
NOISE = 0.03  # of the median of a turn: standard deviation
PRIOR = 2  # rounds that NOISE counts for, beside the spread observed
LUCK = 0.01  # of a run, however long it is: where its memory happens to lie; standard deviation
ENOUGH = 1.2  # times the doubt by luck alone: rounds end there
# asked after every rung: two equal runs are called different at most once in ten tunings
CONFIDENCE = 0.98


class Reading(NamedTuple):
    """The measurements of a turn."""

    epochs_s: tuple[float, ...]  # without those that warm up
    wall_s: float  # of the turn, and of the run's start if it is the first
    failed: str = ""  # why the run ended, in the words of its error


# (contender, epochs after warming up, most seconds that they may take) -> Reading
Measure = Callable[[int, int, float], Reading]


@dataclass(eq=False)
class Contender:
    """A strategy in the competition, and its turns so far, one per round.

    comparable: it may be recommended without being certainly the best. rate: what the objective
    counts of a second of its epochs.
    """

    name: str
    comparable: bool
    predicted_s: float
    rate: float = 1.0
    readings: list[Reading] = field(default_factory=list)
    failed: str = ""

    @property
    def epoch_s(self) -> float:
        """Median seconds of all its epochs; the prediction before the first."""
        epochs_s = [s for reading in self.readings for s in reading.epochs_s]
        return median(epochs_s) if epochs_s else self.predicted_s


class Difference(NamedTuple):
    """By how much more the objective counts of one contender than of another, as log(ratio)."""

    more: float
    doubt: float  # half the width of the confidence interval
    luck: float  # what of it more rounds do not lessen

    @property
    def is_certain(self) -> bool:
        return self.more > self.doubt

    @property
    def is_settled(self) -> bool:
        """Whether more rounds would tell nothing new."""
        return self.is_certain or self.doubt < ENOUGH * self.luck


def difference(contender: Contender, leader: Contender) -> Difference:
    """How certain it is that `contender` is worse than `leader`: a t-test on the rounds of both.

    Every round gives one number, the log of the ratio of the two medians, each times its rate. Of a
    few numbers the spread is unknown, so it is mixed with an expected one (NOISE of both), which
    counts for PRIOR rounds. The interval is that of Student's t at CONFIDENCE. More rounds do not
    lessen the LUCK of the two runs, which widens it. Nothing is certain before FEWEST rounds.
    """
    pairs = list(zip(contender.readings, leader.readings, strict=False))
    if not pairs:
        return Difference(0.0, np.inf, 0.0)
    rates = contender.rate / leader.rate
    logs = [log(median(a.epochs_s) / median(b.epochs_s) * rates) for a, b in pairs]
    if len(logs) < FEWEST:
        return Difference(mean(logs), np.inf, 0.0)
    freedom = PRIOR + len(logs) - 1
    spread = sum((one - mean(logs)) ** 2 for one in logs)
    deviation = ((PRIOR * 2 * NOISE**2 + spread) / freedom / len(logs)) ** 0.5
    tail = (1 + CONFIDENCE) / 2
    by_rounds, by_luck = stdtrit(freedom, tail) * deviation, ndtri(tail) * 2**0.5 * LUCK
    return Difference(mean(logs), hypot(by_rounds, by_luck), by_luck)


@dataclass(frozen=True)
class Result:
    """How the competition ended.

    `least` had least of what counts, and `best` is recommended. In `order` the best comes first,
    then the others of the last rung, those that were out before, and those that did not run.
    """

    best: Contender
    least: Contender
    order: list[Contender]
    spent_s: float

    @property
    def is_certain(self) -> bool:
        """Whether all others that ran are certainly worse than the best."""
        return all(difference(c, self.best).is_certain for c in self.others)

    @property
    def others(self) -> list[Contender]:
        """Those that ran and are not the best."""
        return [c for c in self.order if c.readings and not c.failed and c is not self.best]

    def why(self, objective: Objective = TIME) -> str:
        """The reason for the choice, in a sentence with the objective's words."""
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
    """By how much, with its doubt, as '12 % ± 3 %'."""
    found = difference(worse, better)
    doubt = f" ± {show_percent(expm1(found.doubt))}" if np.isfinite(found.doubt) else ""
    return f"{show_percent(expm1(found.more))}{doubt}"


def halve(contenders: Sequence[Contender], measure: Measure, budget_s: float) -> Result | None:
    """Give the contenders turns until it is certain which is best, or the budget is used up.

    A turn begins only if it is expected to fit what is left of the budget, and is told how much
    that is. If time is short, the first round skips contenders so that a second one fits. A
    contender that fails is out. After a rung the worse half is out, and all that are certainly
    worse than the best; the best comparable one stays while it may be as good. It ends where more
    rounds would tell nothing new. None: none has run.
    """
    spent_s, start_s = 0.0, START_S
    alive, rounds = list(contenders), 0
    for rung in range(MOST_RUNGS):
        for _ in range(FIRST if rung == 0 else rounds):
            ran: list[Contender] = []
            for contender in alive[::-1] if rounds % 2 else alive:
                is_new = not contender.readings
                # a third and a fourth must leave time for a second round
                again = [*ran, contender] if is_new and len(ran) >= FEWEST else []
                needed_s = sum(_turn_s(one, start_s) for one in (contender, *again))
                if spent_s + needed_s > budget_s and again:
                    continue
                if spent_s + needed_s > budget_s:
                    known = [one for one in alive if one.readings and not one.failed]
                    return _result(contenders, known, spent_s)
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
    """Seconds of the fewest rounds that can make anything certain, as predicted."""
    return sum(FEWEST * _turn_s(contender, START_S) for contender in contenders)


def _turn_epochs(contender: Contender) -> int:
    """Epochs of a turn, after those that warm up."""
    return max(1, ceil(TURN_S / contender.epoch_s))


def _turn_s(contender: Contender, start_s: float) -> float:
    """Expected seconds of a turn."""
    return start_s + (WARM_UP + _turn_epochs(contender)) * contender.epoch_s


def _in_order(contenders: Sequence[Contender]) -> list[Contender]:
    """From best to worst in the rounds that all of them ran."""
    rounds = min((len(contender.readings) for contender in contenders), default=0)

    def level(contender: Contender) -> float:
        if not rounds:
            return log(contender.epoch_s * contender.rate)
        medians = [median(reading.epochs_s) for reading in contender.readings[:rounds]]
        return mean(log(epoch_s * contender.rate) for epoch_s in medians)

    return sorted(contenders, key=level)


def _survivors(alive: Sequence[Contender]) -> list[Contender]:
    """Those that go on to the next rung, in their order before."""
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
    """The best of those of the last rung, or a comparable one that may be as good."""
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
