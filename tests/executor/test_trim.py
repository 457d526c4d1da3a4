"""`trim`: strategies that leave out rows which no training vertex needs train as with all rows."""

from dataclasses import replace

import pytest

from gnnplan.testing.ranks import Case, small
from gnnplan.testing.runs import must_have_learnt

pytestmark = pytest.mark.timeout(110)

FEW = "synthetic:community?vertices=400&edges=1200&features=12&classes=4&train=0.03"
CASES = [
    ("graph_parallel(trim=True)", "sage", {}),
    ("graph_parallel(narrow=True,trim=True)", "gat", {"heads": 2}),
    ("graph_parallel(checkpoint=True,trim=True)", "gcnii", {}),
    ("pipegcn(trim=True)", "sage", {}),
    ("pipegcn_gf(narrow=True,trim=True)", "gcn", {"norm": "layer"}),
    ("granndis(depth=1,trim=True)", "gcn", {"dropout": 0.5}),
    ("granndis(trim=True)", "gin", {}),
    ("granndis(max_hop=1,fanout=2,degrees='local',trim=True)", "gcn", {}),
]


def with_all_rows(strategy: str) -> str:
    return strategy.replace(",trim=True", "").replace("(trim=True)", "")


@pytest.mark.parametrize(("strategy", "model", "fields"), CASES)
def test_rows_that_are_left_out_do_not_matter(run_ranks, strategy, model, fields):
    """Losses, weights and all accuracies, also where halo rows are stale or smoothed."""
    workload = small(model, **{"layers": 3, "dropout": 0.0, **fields})
    trimmed = Case(strategy, FEW, workload, servers=2, epochs=4, eval_every=2)
    whole = replace(trimmed, strategy=with_all_rows(strategy))
    ours, theirs = run_ranks(4, [trimmed, whole])
    must_have_learnt(ours, theirs.losses, theirs.weights)
    assert ours.scores == pytest.approx(theirs.scores, abs=1e-12)
    problem = trimmed.problem(4)
    layout = trimmed.settled(problem).layout(problem)
    fewer, all_rows = problem.trimmed(layout), layout
    assert (
        fewer.row_counts(3).sum() == 12 < fewer.row_counts(1).sum() < all_rows.row_counts(1).sum()
    )


def test_gradients_are_as_far_from_exact_ones(run_ranks):
    """The exact pass that they are compared with leaves out the same rows."""
    workload = {"model": "gcn", "layers": 3, "hidden": 8, "dtype": "float64"}
    trimmed = Case("pipegcn(trim=True)", FEW, workload, gradient_errors=True)
    ours, theirs = run_ranks(2, [trimmed, replace(trimmed, strategy="pipegcn")])
    found, expected = (result.rank(0)["gradient_errors"]["all"] for result in (ours, theirs))
    assert len(found) == 3 and found[1][0] > 0
    for mine, other in zip(found, expected, strict=True):
        assert mine[:2] == pytest.approx(other[:2], rel=1e-8)
