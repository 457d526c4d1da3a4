"""Another candidate of a plan in the place of the recommended one, without planning anew."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from gnnplan.planner.decision.candidate import Candidate, evaluate, placed
from gnnplan.planner.decision.plan import strategy_of
from gnnplan.planner.decision.search import Search, SearchResult, parts
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies import parse
from gnnplan.planner.vocabulary.errors import Infeasible, SpecError

NEXT = "NEXT"  # the fastest alternative
MOST_NAMED = 8  # candidates in an error


def take(document: dict[str, Any], problem: Problem, text: str) -> dict[str, Any]:
    """The plan with the candidate that `text` names as `best`; what was best is an alternative.

    problem: the plan's question. text: NEXT, or a strategy as the plan prints it; where the plan
    holds it on several numbers of GPUs, the fastest. Raises SpecError where it does not hold it.
    """
    found = _find(document, text)
    if found is document["best"]:
        return document
    # imported here: a run without --strategy does not need it
    from gnnplan.planner.decision.summary import summarise

    strategy, whole = strategy_of(found), problem.placed(())
    # A plan keeps the placement of its best candidate only; others are placed as the search did.
    placed_on = list[Candidate]()
    for choice in [tuple(range(whole.ranks)), *parts(whole.cluster)]:
        if len(choice) == found["gpus"]:
            with suppress(SpecError, Infeasible):
                placed_on.append(evaluate(placed(whole.placed(choice), strategy), strategy))
    if not placed_on:
        raise SpecError(
            f"--strategy {text}: {strategy} does not fit on {found['gpus']} GPUs, though the plan"
            " says so; plan again"
        )
    epoch_s = found["predicted"]["epoch_s"]
    candidate = min(placed_on, key=lambda c: abs(float(c.predicted.epoch_s) - epoch_s))
    alone = SearchResult(whole, [candidate], how=Search(forced=strategy))
    best = {name: value for name, value in document["best"].items() if name != "placement"}
    others = [best, *(one for one in document["alternatives"] if one is not found)]
    compared = {name: value for name, value in document.items() if name != "sizes"}
    return {
        **compared,
        "best": {**found, "placement": strategy.placement(candidate.problem)},
        "alternatives": others,
        "summary": summarise(alone, ()),
        "explanation": [f"--strategy chose it from a plan that recommends {strategy_of(best)}"],
    }


def _find(document: dict[str, Any], text: str) -> dict[str, Any]:
    """The candidate of the plan that `text` names."""
    held: list[dict[str, Any]] = [document["best"], *document.get("alternatives", [])]
    if text == NEXT:
        if len(held) < 2:
            raise SpecError(
                f"--strategy {NEXT}: the plan holds {strategy_of(held[0])} and no alternative; plan"
                " again without --strategy"
            )
        return held[1]
    asked = str(parse(text))
    names = [str(strategy_of(one)) for one in held]
    if asked in names:
        return held[names.index(asked)]
    reasons = {one["strategy"]: one["reason"] for one in document.get("rejected", [])}
    if asked in reasons:
        why = f"the plan rejected it: {reasons[asked]}"
    else:
        why = "the plan did not consider it"
    distinct = list(dict.fromkeys(names))
    more = f" and {len(distinct) - MOST_NAMED} more" if len(distinct) > MOST_NAMED else ""
    raise SpecError(
        f"--strategy {text}: {why}; the plan holds {', '.join(distinct[:MOST_NAMED])}{more}; for"
        f" another strategy plan again: gnnplan plan --strategy '{asked}'"
    )
