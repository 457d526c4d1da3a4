"""The choice between float32 and bfloat16 rows (`--dtype auto`): a search with each, and a choice.

Rows in bfloat16 are lossy, so the rule for lossy strategies holds (recommendation.py): they are
recommended if they are surely better than rows in float32, or if nothing fits in float32. With
--exact they are not searched.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from gnnplan.planner.decision.candidate import Candidate
from gnnplan.planner.decision.explain import rounded_products, rounding_cost, rounding_runs
from gnnplan.planner.decision.objective import with_fields
from gnnplan.planner.decision.plan import answer
from gnnplan.planner.decision.recommendation import SURE_SHARE
from gnnplan.planner.decision.search import SearchResult, each_of
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.vocabulary.errors import Infeasible, SpecError
from gnnplan.planner.vocabulary.numbers import BFLOAT16, FLOAT32
from gnnplan.planner.vocabulary.units import show_bytes, show_percent, show_time

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

    def add_to_plan(self, document: dict[str, Any]) -> dict[str, Any]:
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
