"""Tests of a strategy, for a package that adds one.

A test file of the package imports all tests, and defines the strategy's class and page:

    from gnnplan.testing.kit import *
    from my_package import MyStrategy

    FAMILY = MyStrategy
    PAGE = Path(__file__).with_name("README.md")

    def recursion(case, owner): ...

The tests train every strategy in `FAMILY.examples`. PAGE is a text file that contains the drawing
of the first example. A strategy that is not exact needs `recursion`: it computes the case's losses
and weights in one process, from the strategy's equations (plain.py); owner: the rank of each
vertex. The tests of closed form and memory apply to strategies on the full graph only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st

from gnnplan.executor.ranks.machine import allocated
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies import Example, Strategy, families, parse
from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.testing.fixtures import *  # noqa: F403
from gnnplan.testing.laws import (
    LAWS,
    StrategyEvaluation,
    bytes_of_the_schedule_are_those_of_predict,
    drawing_of,
    must_survive_words_and_json,
    problems,
    with_better,
)
from gnnplan.testing.plain import difference
from gnnplan.testing.ranks import SMALL, Case, ForkServer, Ranks
from gnnplan.testing.runs import *  # noqa: F403
from gnnplan.testing.runs import (
    FinishedRun,
    must_be_as_one_process,
    must_fill_as_predicted,
    must_go_on_from_another_plan,
    must_have_learnt,
    must_resume,
    one_process,
)

MINI = {"mode": "mini", "batch": 6, "fanout": (3, 2, 2, 1)}
LARGE = "synthetic:community?vertices=20000&edges=300000&features=64&classes=10"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "example" in metafunc.fixturenames:
        examples = metafunc.module.FAMILY.examples
        names = [example.strategy for example in examples]
        metafunc.parametrize("example", examples, ids=names, scope="module")


@pytest.fixture(scope="module")
def family(request: pytest.FixtureRequest) -> type[Strategy]:
    found: type[Strategy] = request.module.FAMILY
    return found


def case_of(example: Example, graph: str, model: str, **more: Any) -> Case:
    """Return a case that trains the example on a small graph."""
    mini = MINI if parse(example.strategy).mode == "mini" else {}
    return Case(example.strategy, graph, {**SMALL, **mini, "model": model, **more}, example.servers)


# -- what the planner says -------------------------------------------------------------------------


def test_it_is_found_by_its_entry_point(family: type[Strategy]) -> None:
    assert family in families() and type(parse(family.family)) is family


def test_its_knobs_survive_words_and_json(example: Example) -> None:
    must_survive_words_and_json(parse(example.strategy))


def suiting(family: type[Strategy], problem: Problem) -> Iterator[Strategy]:
    """Yield the family's examples that can run the problem."""
    for example in family.examples:
        strategy = parse(example.strategy).settle(problem)
        try:
            strategy.check(problem)
        except SpecError:
            continue
        note(str(strategy))
        yield strategy


NUMBERS = ("intra", "inter", "latency", "gemm", "memory_bandwidth", "launch")


@given(problem=problems(), what=st.sampled_from(NUMBERS), factor=st.floats(1.0, 50.0))
@settings(deadline=None, max_examples=10, derandomize=True)
def test_closed_form_schedule_and_memory_tell_one_story(
    family: type[Strategy], problem: Problem, what: str, factor: float
) -> None:
    for strategy in suiting(family, problem):
        told = StrategyEvaluation(problem, with_better(problem, what, factor), strategy)
        for law in LAWS:
            note(law.__name__)
            law(told)


@given(problem=problems())
@settings(deadline=None, max_examples=5, derandomize=True)
def test_a_graph_known_by_statistics_is_planned(family: type[Strategy], problem: Problem) -> None:
    problem = replace(problem, stats=replace(problem.stats, known=False), graph=None)
    for strategy in suiting(family, problem):
        bytes_of_the_schedule_are_those_of_predict(StrategyEvaluation(problem, problem, strategy))


def test_its_page_has_the_drawing_of_its_program(
    family: type[Strategy], request: pytest.FixtureRequest
) -> None:
    """Draw two ranks, two layers, and one period of steps."""
    first = family.examples[0]
    strategy = parse(first.strategy)
    ranks = max(first.ranks, 2)
    period = strategy.predict(case_of(first, LARGE, "sage").problem(ranks)).period
    drawing = drawing_of(strategy, ranks, 2, period)
    page = request.module.PAGE
    assert drawing in page.read_text(encoding="utf-8"), f"{page} should have\n{drawing}"


# -- what ranks do ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def played(example: Example, run_ranks: Ranks, graphs: dict[str, str]) -> FinishedRun:
    """A run of one period of epochs, and one more epoch."""
    case = case_of(example, graphs["rough"], "gcn")
    problem = case.problem(example.ranks)
    epochs = case.settled(problem).predict(problem).period + 1
    return FinishedRun(run_ranks(example.ranks, replace(case, epochs=epochs, eval_every=1)))


@pytest.mark.parametrize("model", ["gcn", "sage"])
def test_training_is_exact_or_follows_its_recursion(
    example: Example,
    model: str,
    run_ranks: Ranks,
    graphs: dict[str, str],
    request: pytest.FixtureRequest,
) -> None:
    """Compare in float64 to 1e-9, without the random rounding of rows."""
    strategy = parse(example.strategy).with_whole_rows()
    case = case_of(example, graphs["rough"], model, dtype="float64", optimizer="sgd")
    case = replace(case, strategy=str(strategy), epochs=6, eval_every=2)
    if strategy.exact:
        result = run_ranks(example.ranks, case)
        must_be_as_one_process(result, one_process(run_ranks, case), weights=1e-9, losses=1e-9)
        return
    owner = case.problem(example.ranks).layout().owner
    losses, weights = request.module.recursion(case, owner)
    result = must_have_learnt(run_ranks(example.ranks, case), losses, weights)
    # exact training ends at other weights, so the comparison above can fail
    assert difference(result.weights, one_process(run_ranks, case).weights) > 1e-3


def test_a_resumed_run_is_the_unbroken_one(
    example: Example, run_ranks: Ranks, graphs: dict[str, str]
) -> None:
    case = replace(case_of(example, graphs["rough"], "sage"), epochs=5)
    must_resume(run_ranks, run_ranks(example.ranks, case))


def test_what_it_carries_is_made_anew_for_another_plans_weights(
    example: Example, run_ranks: Ranks, graphs: dict[str, str]
) -> None:
    strategy, case = parse(example.strategy), case_of(example, graphs["rough"], "sage")
    if not (strategy.carries and strategy.hands_over) or strategy.codec.packs:
        pytest.skip("it carries nothing that can be made anew exactly")
    how = case.workload
    must_go_on_from_another_plan(run_ranks, case.strategy, example.ranks, case.graph, how)


@pytest.mark.skipif(allocated() is None, reason="the allocator does not tell")
def test_predicted_memory_is_what_a_run_fills(
    example: Example, fork_server: ForkServer, tmp_path: Path
) -> None:
    """Use fresh processes, in which no code for the products' shapes is compiled yet."""
    if parse(example.strategy).mode == "mini":
        pytest.skip("batches differ, and so does what they fill")
    case = case_of(example, LARGE, "sage", layers=3, hidden=128)
    with contextlib.closing(Ranks(fork_server, tmp_path / "ranks", memory=True)) as fresh:
        must_fill_as_predicted(example.ranks, case, fresh)
