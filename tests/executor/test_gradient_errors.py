"""PipeGCN's bound of the gradient's error: the recursion by hand, and the operator's norm. That the
executor's errors are those of brute force, and within the bound, is in test_recursions.py."""

import numpy as np
import pytest

from gnnplan.executor.launch.asked import must_be_measurable
from gnnplan.executor.launch.options import Options
from gnnplan.executor.strategies.gradient_errors import LayerConstants, bounds, operator_norm
from gnnplan.planner.evidence.recorded import gradient_error
from gnnplan.planner.strategies import parse
from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.testing.ranks import Case


def test_two_layers_by_hand() -> None:
    """|P| = 3, |D| = 2, |W_1| = 5, |W_2| = 7, |W'_2| = 11, three ranks."""
    first = LayerConstants(
        weight=5,
        weight_self=0,
        stale_rows=0,
        stale_gradients=0,
        rows=13,
        gathered=17,
        gradient=19,
        kinks=23,
    )
    last = LayerConstants(
        weight=7,
        weight_self=11,
        stale_rows=0.1,
        stale_gradients=0.2,
        rows=29,
        gathered=31,
        gradient=37,
        kinks=0,
    )
    below, above = bounds([first, last], operator=3, dropped=2, smooth=0.5, world=3, n=4)
    of_rows = 2 * 3 * 7 * 0.1  # E(h_2): layer 1 reads nothing stale
    of_last = 0.5 * of_rows  # E(M_2)
    assert above.weight == pytest.approx(2 * 3 * 0.1 * 37 + 31 * of_last)
    assert above.weight_self == pytest.approx(29 * of_last)
    assert above.bias == pytest.approx(2 * of_last)
    of_first = 2 * (3 * 7 + 11) * of_last + 2**0.5 * 0.2 + 23  # E(M_1)
    assert below.weight == pytest.approx(17 * of_first)
    assert below.weight_self == pytest.approx(13 * of_first)
    assert below.bias == pytest.approx(2 * of_first)


def test_errors_of_rows_pass_layers() -> None:
    """Of three equal layers the third reads rows that are off by what the second has read."""
    one = LayerConstants(2, 0, 0.1, 0, 1, 1, 1, 0)
    third = bounds([one, one, one], operator=1, dropped=1, smooth=0.0, world=2, n=1)[2]
    before = 2 * 0.1 + 2 * (2 * 0.1)  # E(h_2) = a E(h_1) + |W| F
    assert third.weight == pytest.approx(before + 0.1)


@pytest.mark.parametrize("model", ["gcn", "sage"])
@pytest.mark.parametrize("directed", [False, True])
def test_the_operators_norm(graphs: dict[str, str], model: str, directed: bool) -> None:
    from gnnplan.testing.plain import Plain

    case = Case("pipegcn", graphs["rough"], {"model": model, "layers": 2}, directed=directed)
    dense = Plain(case).operator.numpy()
    edges = "gcn" if model == "gcn" else "mean"
    norm = operator_norm(case.problem(1), edges)
    assert norm == pytest.approx(np.linalg.norm(dense, 2), rel=1e-6)
    if model == "gcn" and not directed:
        assert norm == pytest.approx(1, rel=1e-6)


def test_only_a_strategy_with_a_synchronous_twin_is_measured() -> None:
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


def test_what_a_run_says_is_relative_and_of_the_last_step() -> None:
    ranks = [
        {"gradient_errors": {"all": [[9, 9, 9], [1, 4, 8]], "layers.1.weight": [[0, 1, None]]}}
    ]
    assert gradient_error(ranks) == {"error": 0.25, "bound": 2}
    assert gradient_error([{"gradient_errors": {"all": [[1, 4, None]]}}])["bound"] is None
    assert gradient_error([{"gradient_errors": {"all": [[0, 0, 0]]}}]) is None
    assert gradient_error([{"gradient_errors": {}}]) is gradient_error([{}]) is None
