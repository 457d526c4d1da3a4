"""Of which strategies the gradient's error is measured, and how a run says it. That the executor's
errors are those of brute force is in test_recursions.py."""

import pytest

from gnnplan.executor.launch.asked import Options, must_be_measurable
from gnnplan.planner.evidence.recorded import gradient_error
from gnnplan.planner.strategies import parse
from gnnplan.planner.vocabulary.errors import SpecError


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
