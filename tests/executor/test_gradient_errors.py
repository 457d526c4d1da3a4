"""How far rows and gradients are from the true ones: that of brute force, and how a run says it."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from recursions import Recursion, recursion_of
from torch import Tensor
from trainings import FEW

from gnnplan.executor.launch.run_request import Options, must_be_measurable
from gnnplan.planner.evidence.runs import gradient_error
from gnnplan.planner.strategies import parse
from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.testing.ranks import Case, small

Gradients = dict[str, tuple[Tensor, Tensor]]  # of a parameter, used and exact


@pytest.mark.parametrize("strategy", ["pipegcn", "pipegcn_gf(gamma=0.5)"])
def test_the_staleness_error_is_used_minus_true(run_ranks, graphs, strategy):
    """Of every layer and step, over both ranks, for rows ('f') and gradients ('b')."""
    case = Case(strategy, graphs["rough"], small("gcnii"), epochs=5, staleness_errors=True)
    recursion, result = recursion_of(case, 2), run_ranks(2, [case])[0]
    recursion.losses(case.epochs)
    left = [result.rank(rank)["staleness"] for rank in range(2)]
    assert left[0].keys() == left[1].keys() == recursion.errors.keys()
    for key, steps in recursion.errors.items():
        ours = [sum(rank[key][step][0] for rank in left) for step in range(case.epochs)]
        assert ours == pytest.approx(steps, rel=1e-9), key
        assert min(steps) > 0


def gradients_of(recursion: Recursion, epochs: int) -> list[Gradients]:
    """Per step what its pass leaves in the gradients, and what a pass leaves in which every row is
    fresh and whole, at the same weights and under the same masks. All in one process."""
    found: list[Gradients] = []
    descend = recursion.descend

    def watched(objective: Tensor) -> None:
        weights = list(recursion.w.values())
        exact = recursion.loss(recursion.forward(len(found))[0])
        pairs = zip(
            torch.autograd.grad(objective, weights, retain_graph=True),
            torch.autograd.grad(exact, weights),
            strict=True,
        )
        found.append(dict(zip(recursion.w, pairs, strict=True)))
        descend(objective)

    recursion.descend = watched  # type: ignore[method-assign]
    recursion.losses(epochs)
    return found


@pytest.mark.parametrize(
    ("strategy", "model", "world", "graph", "dropout", "norm"),
    [
        ("pipegcn", "gcn", 2, "rough", 0.0, None),
        ("pipegcn_gf(gamma=0.5)", "sage", 3, "multi", 0.5, None),
        ("pipegcn", "gcn", 4, "sparse", 0.5, None),
        ("pipegcn_gf(gamma=0.5)", "sage", 2, "rough", 0.0, "batch"),
        ("pipegcn", "gcnii", 3, "rough", 0.5, None),
        ("pipegcn(trim=True)", "gcn", 2, "few", 0.5, None),  # the exact pass leaves out the same
        ("graph_parallel(bits=4)", "sage", 2, "rough", 0.5, None),
        ("graph_parallel(narrow=True)", "gcn", 2, "rough", 0.5, None),
    ],
)
def test_the_gradient_error_is_that_of_brute_force(
    run_ranks, graphs, strategy, model, world, graph, dropout, norm
):
    """Of every parameter and step; training goes on the same. It is 0 where nothing is late."""
    how = small(model, dropout=dropout, norm=norm)
    case = Case(strategy, graphs.get(graph, FEW), how, epochs=4, gradient_errors=True)
    expected = gradients_of(recursion_of(case, world), case.epochs)
    result, unmeasured = run_ranks(world, [case, replace(case, gradient_errors=False)])
    assert unmeasured.losses == result.losses and unmeasured.rank(0)["gradient_errors"] == {}
    assert unmeasured.rank(0)["bytes"] == result.rank(0)["bytes"]
    left = result.rank(0)["gradient_errors"]
    assert left == result.rank(world - 1)["gradient_errors"]
    assert set(left) == {"all", *expected[0]}
    for step, gradients in enumerate(expected):
        total = np.zeros(2)
        for name, (used, exact) in gradients.items():
            error, size = left[name][step]
            assert error == pytest.approx((used - exact).norm().item(), rel=1e-8, abs=1e-13), name
            assert size == pytest.approx(exact.norm().item(), rel=1e-8, abs=1e-13), name
            total += np.square([error, size])
        error, size = left["all"][step]
        assert [error, size] == pytest.approx(np.sqrt(total).tolist())
        assert (error == 0) == parse(strategy).exact and size > 0


def test_only_a_strategy_with_a_synchronous_twin_is_measured():
    asked = Options(gradient_errors=True)
    for name in ("graph_parallel", "pipegcn_gf"):
        must_be_measurable(asked, parse(name))
    must_be_measurable(Options(), parse("gnnpipe"))
    with pytest.raises(SpecError, match="is of graph_parallel and pipegcn, and the plan's gnnpipe"):
        must_be_measurable(asked, parse("gnnpipe"))
    # the sum over ranks had begun when the exact pass was made, and both went into one buffer
    with pytest.raises(SpecError, match=r"several buckets \(buckets: 3\).*\"pipegcn\""):
        must_be_measurable(asked, parse("pipegcn(buckets=3)"))
    must_be_measurable(asked, parse("pipegcn(bits=2)"))
    with pytest.raises(SpecError, match=r"rounding too \(bits: 2\); .* use --gradient-errors"):
        must_be_measurable(Options(staleness_errors=True), parse("pipegcn(bits=2)"))


def test_what_a_run_says_is_relative_and_of_the_last_step():
    ranks = [{"gradient_errors": {"all": [[9, 9], [1, 4]], "layers.1.weight": [[0, 1]]}}]
    assert gradient_error(ranks) == {"error": 0.25}
    older = [{"gradient_errors": {"all": [[1, 4, 8]]}}]  # with PipeGCN's bound
    assert gradient_error(older) == {"error": 0.25}
    assert gradient_error([{"gradient_errors": {"all": [[0, 0]]}}]) is None
    assert gradient_error([{"gradient_errors": {}}]) is gradient_error([{}]) is None
