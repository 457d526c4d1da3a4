"""Successive halving, on turns made up here: what it certifies, what it spends, what it prefers."""

from collections.abc import Callable
from math import expm1

import numpy as np
import pytest
from examples import NIGHT
from pairwise import at_night

from gnnplan.planner.decision.objective import Objective
from gnnplan.planner.evidence.halving import (
    FIRST,
    MOST_RUNGS,
    START_S,
    WARM_UP,
    Contender,
    Reading,
    difference,
    halve,
    least_s,
)
from gnnplan.planner.vocabulary.units import show_percent


class Machine:
    """Gives contenders with epochs [s] their turns; `noise`: their deviation; `pace`: by turn."""

    def __init__(
        self,
        *epochs_s: float,
        noise: float = 0.01,
        start_s: float = START_S,
        pace: Callable[[int], float] = lambda turn: 1.0,
        failing: dict[int, str] | None = None,
    ) -> None:
        self.epochs_s, self.noise, self.start_s, self.pace = epochs_s, noise, start_s, pace
        self.failing = failing or {}
        self.turns: list[int] = []  # whose it was
        self.random = np.random.default_rng(0)

    def __call__(self, index: int, epochs: int, most_s: float) -> Reading:
        start_s = self.start_s
        self.turns.append(index)
        if index in self.failing:
            return Reading((), start_s, self.failing[index])
        pace = self.pace(len(self.turns)) * self.epochs_s[index]
        seconds = pace * (1 + self.noise * self.random.standard_normal(WARM_UP + epochs))
        in_time = seconds[start_s + np.cumsum(seconds) <= most_s]
        return Reading(tuple(in_time[WARM_UP:].tolist()), min(start_s + seconds.sum(), most_s))


def contenders(*exact: bool, predicted_s: float = 1.0) -> list[Contender]:
    return [Contender("abcdef"[i], one, predicted_s) for i, one in enumerate(exact)]


def test_it_stops_as_soon_as_the_order_is_certain():
    machine = Machine(1.5, 1.0, noise=0.0)
    result = halve(contenders(True, True), machine, 1e6)
    assert (result.best.name, result.is_certain) == ("b", True)
    assert machine.turns == [0, 1, 1, 0] * 2  # rounds in turned order
    turns_s = 4 * (2 + WARM_UP) * 1.5 + 4 * (2 + WARM_UP)
    assert result.spent_s == pytest.approx(8 * START_S + turns_s)
    assert "certainly the fastest: the next, a, was 50 %" in result.why()


@pytest.mark.parametrize(
    "epochs_s",
    [
        # the second was out after four rounds, by 2 %
        pytest.param((1.0, 1.02, 1.3), id="one that was left behind may be as fast"),
        # a run that was unlucky in where its memory lay was 1 % slower in all of its turns
        pytest.param((1.0, 1.01), id="more rounds do not make two equal runs differ"),
    ],
)
def test_what_may_be_as_fast_makes_nothing_certain(epochs_s):
    result = halve(contenders(*[True] * len(epochs_s)), Machine(*epochs_s, noise=0.0), 1e6)
    assert result.best.name == "a" and not result.is_certain


@pytest.mark.parametrize(("spread", "rungs"), [(0.0, 2), (0.3, MOST_RUNGS)])
def test_equals_are_run_until_rounds_tell_nothing_new(spread, rungs):
    """And no order is claimed. On a noisy machine the last rung comes first."""
    random = np.random.default_rng(1)
    pace = lambda turn: float(np.exp(spread * random.standard_normal()))  # noqa: E731
    machine = Machine(1.0, 1.0, noise=0.0, pace=pace)
    result = halve(contenders(True, True), machine, 1e6)
    assert not result.is_certain and len(machine.turns) == 2 * FIRST * 2 ** (rungs - 1)
    assert "not certainly" in result.why()


def test_the_slower_half_is_out_after_a_rung():
    machine = Machine(1.3, 1.02, 1.4, 1.0)
    halve(contenders(True, True, True, True), machine, 1e6)
    assert machine.turns[: 4 * FIRST] == [0, 1, 2, 3, 3, 2, 1, 0] * (FIRST // 2)
    assert set(machine.turns[4 * FIRST :]) == {1, 3}
    # an exact one stays as long as it may be as fast, where halving alone would keep two lossy ones
    machine = Machine(1.03, 1.0, 1.01, 1.02)
    result = halve(contenders(True, False, False, False), machine, 1e6)
    assert set(machine.turns[4 * FIRST :]) == {0, 1, 2}
    assert result.best.name == "a" and result.least.name == "b"


@pytest.mark.parametrize("budget_s", [0.0, 11.0, 30.0, 57.0, 90.0, 200.0])
@pytest.mark.parametrize("true_s", [1.0, 4.0])  # predicted 1 s
@pytest.mark.parametrize("start_s", [0.0, START_S, 4 * START_S])
def test_it_never_costs_more_than_its_share(budget_s, true_s, start_s):
    """However wrong the predictions of epochs and of the start are."""
    machine = Machine(true_s, 1.1 * true_s, start_s=start_s)
    result = halve(contenders(True, False), machine, budget_s)
    assert (result.spent_s if result else 0.0) <= budget_s
    if budget_s < START_S:
        assert not machine.turns


def test_the_least_that_is_asked_for_gives_two_rounds():
    them = contenders(True, False, True)
    machine = Machine(1.0, 0.6, 1.0, noise=0.0)
    result = halve(them, machine, least_s(them))
    assert result.is_certain and machine.turns[:6] == [0, 1, 2, 2, 1, 0]


def test_the_first_round_leaves_time_for_the_second():
    """Runs that start slower than expected took the whole share in one round."""
    them = contenders(True, True, True, True)
    machine = Machine(1.0, 1.4, 1.4, 1.4, start_s=2 * START_S)
    result = halve(them, machine, 1.2 * least_s(them))
    assert machine.turns[:4] == [0, 1, 1, 0] and result.is_certain
    assert [c.name for c in result.order] == ["a", "b", "c", "d"]


@pytest.mark.parametrize(
    ("lossy_s", "best"), [(1.0, "exact"), (0.99, "exact"), (0.9, "lossy"), (1.3, "exact")]
)
def test_an_exact_strategy_is_preferred_within_the_noise(lossy_s, best):
    them = [Contender("exact", True, 1.0), Contender("lossy", False, 0.9)]
    result = halve(them, Machine(1.0, lossy_s, noise=0.05), 400.0)
    assert result.best.name == best
    assert ("it is lossy" in result.why()) == (result.least is not result.best)


def test_what_counts_is_not_only_seconds():
    """Half of the GPUs, which take 1.5 times as long, draw three quarters of the energy."""
    them = [Contender("all", True, 1.0, rate=800.0), Contender("half", True, 1.5, rate=400.0)]
    result = halve(them, Machine(1.0, 1.5, noise=0.0), 1e6)
    assert (result.best.name, result.is_certain) == ("half", True)
    assert result.why(Objective("energy")) == (
        "half is certainly the cheapest in energy: the next, all, was"
        f" 33 % ± {show_percent(expm1(difference(*them).doubt))} dearer in energy"
    )


def test_a_contender_that_fails_is_out_with_its_words():
    them = contenders(True, False, True)
    machine = Machine(1.0, 1.0, 1.5, failing={1: "rank 1 was lost: memory ran out"})
    result = halve(them, machine, 1e6)
    assert result.best.name == "a" and result.order[-1].failed == "rank 1 was lost: memory ran out"
    assert machine.turns.count(1) == 1
    alone = halve(contenders(True, False), Machine(1, 1, failing={0: "lost"}), 1e6)
    assert alone.best.name == "b" and "only one that ran" in alone.why()
    assert halve(contenders(True, True), Machine(1, 1, failing={0: "x", 1: "y"}), 1e6) is None


def test_a_disturbance_in_one_turn_makes_nothing_certain():
    """Others took a third of the machine while b had its first turn."""
    machine = Machine(1.0, 1.0, noise=0.005, pace=lambda turn: 1.3 if turn == 2 else 1.0)
    readings: list[Reading] = []
    for _ in range(FIRST):
        readings += [machine(0, 3, 1e6), machine(1, 3, 1e6)]
        a, b = contenders(True, True)
        a.readings, b.readings = readings[0::2], readings[1::2]
        assert not difference(b, a).is_certain


@pytest.mark.parametrize(("spread", "most"), [at_night(0.02, 0.05), (0.05, 0.1)])
def test_equals_are_seldom_told_apart(spread, most):
    """On a machine whose pace changes so much from turn to turn, with a look after every rung."""
    random = np.random.default_rng(1)

    def told_apart() -> bool:
        machine = Machine(1, 1, pace=lambda turn: float(np.exp(spread * random.standard_normal())))
        return halve(contenders(True, True), machine, 1e6).is_certain

    times = 100 if NIGHT else 20
    assert sum(told_apart() for _ in range(times)) <= times * most
