"""Choices between searches of one problem: the type of rows (`--dtype auto`), the whole training.

Rows in bfloat16 are lossy, so the rule for lossy strategies holds (candidate.py): they are
recommended if they are surely better than rows in float32, or if nothing fits in float32. With
--exact they are not searched.

The whole training: the best mode (full graph or mini-batches) and number of GPUs, and whether to
distribute at all.

    on              GPUs  training  GPU hours
    the full graph     1   12.58 s    0.00349  use this
    the full graph    16    1.40 s    0.00622  fastest
    mini-batches       1   83.42 s     0.0232

Each mode is searched with the number of epochs that objective.py assumes for it. Between the two
modes the choice is made as between two strategies (search.recommend).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from gnnplan.planner.decision.candidate import SURE_SHARE, Candidate, range_of
from gnnplan.planner.decision.explain import rounded_products, rounding_cost, rounding_runs
from gnnplan.planner.decision.objective import MODES, Epochs, watts, with_fields
from gnnplan.planner.decision.plan import answer
from gnnplan.planner.decision.search import SearchResult, each_of, least_of, recommend
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.vocabulary.errors import Infeasible, SpecError
from gnnplan.planner.vocabulary.files import Json
from gnnplan.planner.vocabulary.numbers import BFLOAT16, FLOAT32
from gnnplan.planner.vocabulary.units import (
    show_bytes,
    show_count,
    show_long,
    show_percent,
    show_time,
)

PLAIN, ROUNDED = FLOAT32.name, BFLOAT16.name
DTYPES = (PLAIN, ROUNDED)


@dataclass(frozen=True)
class Choice:
    """The answers to a question for each type of rows, and the recommended type."""

    chosen: str  # the recommended type
    answers: Mapping[str, SearchResult]  # type -> answer
    refused: Mapping[str, str]  # type without an answer -> reason
    why: str  # reason for the chosen type

    @property
    def found(self) -> SearchResult:
        """The answer with rows of the chosen type."""
        return self.answers[self.chosen]

    @property
    def chance_faster(self) -> float | None:
        """Chance that bfloat16 rows have the better value; None if a type has no answer."""
        if self.refused:
            return None
        return self.answers[ROUNDED].best.chance_faster(self.answers[PLAIN].best)

    @property
    def line(self) -> str:
        """The type and the reason, the epoch and memory with each type, and the cost of rounding,
        in words."""
        words = [f"{self.chosen}, since {self.why}"]
        if not self.refused:
            words += [
                f"{dtype}: {of.best.strategy}, {show_time(of.best.epoch_s)} per epoch,"
                f" {show_bytes(of.best.memory_bytes)} on the fullest rank"
                for dtype, of in self.answers.items()
            ]
        if ROUNDED in self.answers:
            words.append(rounding_cost())
        return "; ".join(words)

    def add_to_plan(self, document: Json) -> Json:
        """Return the plan with the comparison added; `document` is plan.make's of `found`."""
        return {
            **document,
            "dtypes": {
                "chosen": self.chosen,
                "why": self.why,
                "answers": {
                    dtype: answer(found.best, found.outlook(found.best))
                    for dtype, found in self.answers.items()
                },
                "refused": dict(self.refused),
                "chance_bfloat16_faster": self.chance_faster,
                "accuracy": rounding_runs(),
            },
            "summary": {**document["summary"], "dtype": self.line},
            "explanation": [f"--dtype auto chose {self.line}", *document["explanation"]],
        }


def choose(problem: Problem, ask: Callable[[Problem], SearchResult], exact: bool = False) -> Choice:
    """Search a problem with each type of rows, and choose a type.

    ask: the search; exact: the option --exact. Raises SpecError or Infeasible if no type has an
    answer.
    """

    def with_dtype(dtype: str) -> SearchResult:
        if exact and dtype == ROUNDED:
            raise SpecError("--exact leaves out what is lossy, and so rows that are rounded")
        same = problem.workload.dtype == dtype
        return ask(problem if same else with_fields(problem, dtype=dtype))

    answers, refused = each_of(DTYPES, with_dtype)
    if not answers:
        if all(isinstance(error, Infeasible) for error in refused.values()):
            raise Infeasible(f"{refused[ROUNDED]} (rows in {ROUNDED}; {PLAIN} needs more)")
        raise refused[PLAIN]
    reasons = {  # the rule only: without the field before it, and the remedies after it
        dtype: str(error).splitlines()[0].removeprefix("dtype: ").rstrip(":")
        for dtype, error in refused.items()
    }
    if refused:
        [chosen], [(other, reason)] = answers, reasons.items()
        why = f"{other} is refused: {reason}"
    else:
        chosen, why = of_two(answers[PLAIN].best, answers[ROUNDED].best)
    return Choice(chosen, answers, reasons, why)


def of_two(plain: Candidate, rounded: Candidate) -> tuple[str, str]:
    """Return the recommended type of two that fit, and the reason."""
    objective, products = plain.objective, rounded_products(rounded.problem)
    device = rounded.problem.cluster.device
    if device.multiplying(ROUNDED) is device:
        return PLAIN, products  # with an unknown rate, bfloat16 cannot be surely faster
    is_measured = objective.target is not None  # runs have shown the cost of rounding
    chance = rounded.chance_faster(plain)
    is_sure = is_measured or chance >= SURE_SHARE
    choice = ROUNDED if rounded.value < plain.value and is_sure else PLAIN
    gain, loss = plain.value / rounded.value - 1, rounded.value / plain.value - 1
    why = (
        f"{ROUNDED} is {show_percent(max(gain, loss), 1)}"
        f" {objective.less if gain > 0 else objective.more} by prediction, and {objective.less}"
        f" with a chance of {show_percent(chance)}"
    )
    if not is_measured:
        why += f" (what is lossy needs {show_percent(SURE_SHARE)})"
    return choice, why if choice == ROUNDED else f"{why}; {products}"


@dataclass(frozen=True)
class ModeComparison:
    """The answers to a question in each mode."""

    answers: Mapping[str, SearchResult]  # mode -> answer
    refused: Mapping[str, str]  # mode without an answer -> reason

    @property
    def mode(self) -> str:
        """The recommended mode.

        The best of a mode may be worse than the mode's least value by the objective's slack. It is
        compared with the least value of both modes, so that the slack is not applied twice.
        """
        answers = self.answers.values()
        least = min(least_of(found.ranked, comparable=True) for found in answers)
        bests = sorted((found.best for found in answers), key=lambda best: best.value)
        near = [best for best in bests if best.value <= best.objective.slack * least]
        return recommend(near).problem.workload.mode

    @property
    def found(self) -> SearchResult:
        """The answer in the recommended mode."""
        return self.answers[self.mode]

    @property
    def sizes(self) -> list[Candidate]:
        """The recommended candidate in each mode on each number of GPUs that was searched."""
        out = []
        for found in self.answers.values():
            by_gpus: dict[int, list[Candidate]] = {}
            for candidate in found.ranked:
                by_gpus.setdefault(candidate.problem.ranks, []).append(candidate)
            by_gpus[found.best.problem.ranks] = [found.best]
            out += [recommend(by_gpus[gpus]) for gpus in sorted(by_gpus)]
        return out

    @property
    def line(self) -> str:
        """The number of GPUs and the mode to use, with the times of the other choices, in words."""
        best, most = self.found.best, self.found.problem.ranks
        used, device = best.problem.ranks, best.problem.cluster.device
        time = f"{self._epochs_of(best)} in {show_long(best.time_s)}"
        unit = "CPU rank" if device.kind == "cpu" else device.name
        if used == 1:
            words = [f"one {unit} is enough: {time}"]
        else:
            words = [f"use {used} x {unit}: {time}"]
            words += self._against_one(best)
        words += self._against_all(best, most)
        for mode, found in self.answers.items():
            if mode != self.mode:
                other = f"{self._epochs_of(found.best)} would take {show_long(found.best.time_s)}"
                gpus = show_count(found.best.problem.ranks, "GPU")
                words.append(f"{other} on {gpus}" if found.best.problem.ranks != used else other)
        for mode, why in self.refused.items():
            words.append(f"{MODES[mode]} {'is' if mode == 'full' else 'are'} refused: {why}")
        return "; ".join(words)

    def add_to_plan(self, document: Json) -> Json:
        """Return the plan with `sizes` added; `document` is plan.make's of `found`."""
        return {
            **document,
            "sizes": [self._row(candidate) for candidate in self.sizes],
            "summary": {"answer": self.line, **document["summary"]},
        }

    def _epochs_of(self, candidate: Candidate) -> str:
        """Return '50 epochs of the full graph', for example."""
        mode = MODES[candidate.problem.workload.mode]
        return f"{show_count(round(candidate.epochs.usual), 'epoch')} of {mode}"

    def _against_one(self, best: Candidate) -> list[str]:
        """Compare the best with one GPU, in words."""
        on_one = [c for c in self.sizes if c.problem.ranks == 1]
        if not on_one:
            most = self.found.problem.ranks
            fits = best.problem.ranks < most or len(self.found.ranked) > 1
            is_asked = any(c.problem.ranks < most for c in self.sizes)
            return ["one alone has too little memory"] if fits and is_asked else []
        one = min(on_one, key=lambda c: c.value)
        return [f"one alone would take {show_long(one.time_s)} ({one.time_s / best.time_s:.1f}x)"]

    def _against_all(self, best: Candidate, most: int) -> list[str]:
        """Compare the best with all GPUs in the same mode, in words."""
        mode = best.problem.workload.mode
        on_all = [
            c for c in self.sizes if c.problem.ranks == most and c.problem.workload.mode == mode
        ]
        if best.problem.ranks == most or not on_all:
            return []
        saved = best.time_s - on_all[0].time_s
        if saved <= 0:
            return [f"{most} are slower"]
        hours = how_many(gpu_hours(on_all[0]) / gpu_hours(best))
        return [f"{most} would save {show_long(saved)} and take {hours}"]

    def _row(self, candidate: Candidate) -> Json:
        """Return the numbers of a candidate, JSON-ready."""
        problem, epochs = candidate.problem, candidate.epochs
        low, high = range_of(candidate.drawn_time_s, candidate.time_s)
        dollars, power = candidate.dollars, watts(problem)
        return {
            "mode": problem.workload.mode,
            "gpus": problem.ranks,
            "servers": problem.server_count,
            "strategy": str(candidate.strategy),
            "exact": candidate.strategy.exact,
            "epochs": epochs.usual,
            "epoch_s": candidate.epoch_s,
            "training_s": candidate.time_s,
            "training_low_s": low,
            "training_high_s": high,
            "gpu_hours": gpu_hours(candidate),
            **({} if dollars is None else {"dollars": dollars * epochs.usual}),
            **({} if power is None else {"joules": power * candidate.time_s}),
            "memory_bytes": candidate.memory_bytes,
            "recommended": candidate is self.found.best,
        }


def gpu_hours(candidate: Candidate) -> float:
    """Return the hours of all GPUs that train [h]; idle GPUs of rented servers do not count."""
    return candidate.problem.ranks * candidate.time_s / 3600


def how_many(times: float) -> str:
    """Compare GPU hours with those of the answer, in words.

    >>> how_many(1.8), how_many(1.02), how_many(0.9)
    ('1.8 times the GPU hours', 'as many GPU hours', 'fewer GPU hours')
    """
    if times >= 1.05:
        return f"{times:.1f} times the GPU hours"
    return f"{'as many' if times > 0.95 else 'fewer'} GPU hours"


def compare(
    problem: Problem,
    modes: Iterable[str],
    epochs: Mapping[str, Epochs],
    ask: Callable[[Problem], SearchResult],
) -> ModeComparison:
    """Search in each of the modes; `ask` is the search.

    Raises SpecError or Infeasible if no mode has an answer."""
    answers, refused = each_of(
        modes, lambda mode: ask(with_fields(problem, mode=mode, epochs=round(epochs[mode].usual)))
    )
    if not answers:
        if len(refused) == 1 or not all(isinstance(why, Infeasible) for why in refused.values()):
            raise next(iter(refused.values()))
        raise Infeasible("\n".join(f"{MODES[mode]}: {why}" for mode, why in refused.items()))
    return ModeComparison(answers, {mode: _first_reason(str(why)) for mode, why in refused.items()})


def _first_reason(why: str) -> str:
    """The reason of an error in a line: of a list of strategies that do not fit, the first one's.

    >>> _first_reason("nothing fits: too large"), _first_reason("nothing fits:\\n  p3: no")
    ('too large', 'nothing fits: p3: no')
    """
    first, *strategies = why.splitlines()
    if first == "nothing fits:" and strategies:
        return f"{first} {strategies[0].strip()}"
    return first.removeprefix("nothing fits: ")
