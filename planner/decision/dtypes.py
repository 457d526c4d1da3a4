"""Rows in float32 or in bfloat16 (`--dtype auto`): the question asked with both, and one choice.

Rows in bfloat16 are lossy. So they are recommended as a lossy strategy is (recommendation.py): if
they are surely better than rows in float32, or if nothing fits in float32. With --exact they are
not asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from gnnplan.planner.decision.candidate import Candidate
from gnnplan.planner.decision.epochs import with_fields
from gnnplan.planner.decision.explain import rounded_products, rounding_cost, rounding_runs
from gnnplan.planner.decision.plan import answer
from gnnplan.planner.decision.recommendation import SURE_SHARE
from gnnplan.planner.decision.search import SearchResult, each_of
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.vocabulary.errors import Infeasible, SpecError
from gnnplan.planner.vocabulary.precision import BFLOAT16, FLOAT32
from gnnplan.planner.vocabulary.units import show_bytes, show_percent, show_time

PLAIN, ROUNDED = FLOAT32.name, BFLOAT16.name
DTYPES = (PLAIN, ROUNDED)


@dataclass(frozen=True)
class Choice:
    """The answers to a question by the type of its rows, and the type that is recommended."""

    chosen: str  # the type of rows that is recommended
    answers: Mapping[str, SearchResult]
    refused: Mapping[str, str]  # why a type has no answer
    why: str  # this type

    @property
    def found(self) -> SearchResult:
        """The answer with rows of the chosen type."""
        return self.answers[self.chosen]

    @property
    def chance_faster(self) -> float | None:
        """That rows in bfloat16 have less of the objective; None where one type has no answer."""
        if self.refused:
            return None
        return self.answers[ROUNDED].best.chance_faster(self.answers[PLAIN].best)

    @property
    def line(self) -> str:
        """The type and why; of two that fit also what each takes; what rounding costs."""
        words = [f"{self.chosen}, since {self.why}"]
        if not self.refused:
            words += [taken(dtype, found.best) for dtype, found in self.answers.items()]
        if ROUNDED in self.answers:
            words.append(rounding_cost())
        return "; ".join(words)

    def told_in(self, document: dict[str, Any]) -> dict[str, Any]:
        """The plan with what it says of both types; `document`: of `found`, from plan.make."""
        return {
            **document,
            "dtypes": {
                "chosen": self.chosen,
                "why": self.why,
                "answers": {
                    dtype: answer(found, found.best) for dtype, found in self.answers.items()
                },
                "refused": dict(self.refused),
                "chance_bfloat16_faster": self.chance_faster,
                "accuracy": rounding_runs(),
            },
            "summary": {**document["summary"], "dtype": self.line},
            "explanation": [f"--dtype auto chose {self.line}", *document["explanation"]],
        }


def choose(problem: Problem, ask: Callable[[Problem], SearchResult], exact: bool = False) -> Choice:
    """The choice for a problem, whatever the type of its rows.

    ask: the search; exact: what --exact says. Raises SpecError or Infeasible where there is no
    answer with either type.
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
    reasons = {  # the rule, without the field in front, and the candidates and remedies behind
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
    """The type of rows that is recommended of two that fit, and why."""
    objective, products = plain.objective, rounded_products(rounded.problem)
    device = rounded.problem.cluster.device
    if device.multiplying(ROUNDED) is device:
        return PLAIN, products  # nothing is surely faster at a rate that nobody knows
    is_measured = objective.target is not None  # runs have shown what rounding costs
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


def taken(dtype: str, best: Candidate) -> str:
    """Say what the best strategy takes with rows of a type."""
    return (
        f"{dtype}: {best.strategy}, {show_time(best.epoch_s)} per epoch,"
        f" {show_bytes(best.memory_bytes)} on the fullest rank"
    )
