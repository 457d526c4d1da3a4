"""Choices scored against print: what is compared with what, and that plans name what print found."""

from pathlib import Path

import numpy as np
import printed_rows
import pytest
from choices import Choice, comparisons, reliability, score
from pairwise import at_night

from gnnplan.papers import calibrate
from gnnplan.papers.published import read
from gnnplan.papers.question import Row

FIGURES = Path(__file__).resolve().parents[2] / "traces" / "published" / "figures.csv"
PRINTED = read(str(FIGURES))


def row(strategy: str, value: float, metric: str = "epoch_time_s", baseline: str = "") -> Row:
    job = f"gnnpipe gnnpipe_a5000 reddit gcn 32x100 2x4 {strategy}"
    told = {"metric": metric, "baseline": baseline, "value": value}
    return printed_rows.row(job, **told, source="", strategy_params="")


def test_epochs_of_a_job_are_compared_and_a_speedup_with_its_baseline():
    epochs = [row("graph_parallel", 0.87), row("gnnpipe_pipeline", 0.36), row("pipegcn", 0.5)]
    speedup = row("gnnpipe_hybrid", 2.0, "speedup_vs", "graph_parallel")
    alone = row("gnnpipe_hybrid", 3.0, "comm_time_s")
    job, ratio = comparisons([*epochs, speedup, alone])
    assert [(r["strategy"], value) for r, value in job] == [
        ("graph_parallel", 0.87),
        ("gnnpipe_pipeline", 0.36),
        ("pipegcn", 0.5),
    ]
    assert [(r["strategy"], value) for r, value in ratio] == [
        ("gnnpipe_hybrid", 1.0),
        ("graph_parallel", 2.0),
    ]
    assert comparisons(epochs[:1]) == []


def test_reddit_in_32_layers_is_a_pipeline_s():
    """On datasheet numbers a plan named PipeGCN, where print gains 2.4 times by GNNPipe."""
    rows = [row("graph_parallel", 0.87), row("gnnpipe_pipeline", 0.36), row("pipegcn", 0.5)]
    [choice] = score(rows, calibrate.calibrated)
    assert choice.strategies[choice.chosen] == "gnnpipe_pipeline" and choice.right
    assert choice.chances[choice.chosen] > 0.5


def test_regret_is_of_the_printed_epochs():
    choice = Choice(("job",), ("a", "b"), (1.3, 1.0), (1.0, 2.0), (2.0, 1.0), (0.9, 0.1))
    assert (choice.chosen, choice.by_their_terms, choice.right) == (0, 1, False)
    assert choice.regret(choice.chosen) == pytest.approx(0.3) and choice.regret(1) == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "paper",
    ["gnnpipe", *(at_night(name) for name in ("pipegcn", "gsplit"))],
)
def test_plans_name_what_print_found(paper):
    """With the constants that plans use; docs/reference/published-figures.md leaves them out."""
    scored = score([r for r in PRINTED if r["paper"] == paper], calibrate.calibrated)
    assert len(scored) >= 6
    assert np.mean([choice.right for choice in scored]) >= 0.9
    assert np.mean([choice.regret(choice.chosen) for choice in scored]) <= 0.05
    sure = [
        (chance, printed == min(choice.printed))
        for choice in scored
        for chance, printed in zip(choice.chances, choice.printed, strict=True)
    ]
    for low, _, _, came in reliability(*zip(*sure, strict=True), bins=2):
        assert came >= 0.75 if low >= 0.5 else came <= 0.25
