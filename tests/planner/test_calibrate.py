"""Constants of other people's testbeds are found again, and never from what is then scored."""

import csv
from functools import partial

import numpy as np
import printed_rows
import pytest
from pairwise import at_night

from gnnplan.papers import calibrate
from gnnplan.papers.calibrate import FITS, MOST, Fit, fit_testbed, scaled
from gnnplan.papers.figures import predict
from gnnplan.papers.question import Row
from gnnplan.planner.problem.inputs import CONSTANTS, read_cluster
from gnnplan.planner.vocabulary.files import QUOTED

TRUE = {"gemm": 0.5, "links": 0.25, "sage": 0.8}


def figure(
    dataset: str, model: str, strategy: str, metric: str, factors: dict[str, float]
) -> dict[str, str]:
    """What would be printed if these were the testbed's constants."""
    job = f"made-up gnnpipe_a5000 {dataset} {model} 8x1000 2x4 {strategy}"
    row = printed_rows.row(job, metric=metric)
    return {**row, "value": str(predict(row, partial(scaled, factors=factors)))}


def table(dataset: str, factors: dict[str, float]) -> list[dict[str, str]]:
    return [
        figure(dataset, model, strategy, metric, factors)
        for model in ("gcn", "sage")
        for strategy in ("graph_parallel", "gnnpipe_pipeline")
        for metric in ("epoch_time_s", "comm_time_s")
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("width", "rel"),
    [
        at_night(1, 0.08),
        at_night(2, 0.02),
        (np.inf, 0.005),
    ],
)
def test_known_constants_are_found_again(width, rel, monkeypatch):
    """Exactly, where nothing is believed before; else what these eight figures say stays said (they
    tell products' rate and GraphSAGE's badly apart), and it matters little how much was
    believed."""
    monkeypatch.setattr(calibrate, "WIDTH", width * calibrate.WIDTH)
    rows = table("flickr", TRUE)
    found = fit_testbed(rows, tuple(TRUE))
    again = [predict(row, partial(scaled, factors=found)) for row in rows]
    assert again == pytest.approx([float(row["value"]) for row in rows], rel=rel)
    assert width < np.inf or found == pytest.approx(TRUE, rel=rel)


def test_without_rows_constants_are_what_presets_say():
    row = figure("flickr", "gcn", "graph_parallel", "epoch_time_s", {})
    for rows in ([], [{**row, "dataset": "unheard-of"}]):
        assert fit_testbed(rows, ("device", "links")) == {"device": 1.0, "links": 1.0}
    assert calibrate.calibrated({**row, "testbed": "dgx_a100"}) == read_cluster("dgx_a100")
    assert calibrate.calibrated(row) != read_cluster("gnnpipe_a5000")


def test_rows_that_the_model_predicts_alike_weigh_as_one():
    """Two figures that no constant can meet both; one of them printed thrice is still one."""
    quick, slow = (
        figure("flickr", "gcn", "graph_parallel", metric, {"links": factor})
        for metric, factor in (("epoch_time_s", 1.0), ("comm_time_s", 0.1))
    )
    throughput = str(1 / float(quick["value"]))
    another = {**quick, "metric": "throughput_epochs_per_s", "value": throughput}
    once, often, twice = (
        fit_testbed([*rows, slow], ("links",))["links"]
        for rows in ([quick], [quick] * 3, [quick, another])
    )
    assert 0.1 < once < 1 and often == pytest.approx(once) and twice > once


def test_what_is_believed_pulls_as_far_as_it_says(monkeypatch):
    """A figure proportional to its constant, four times too long: log 4 as WIDTH^2 to MISS^2."""
    slow = {"device": 0.25, "links": 0.25, "launch": 4.0}
    row = figure("flickr", "gcn", "graph_parallel", "epoch_time_s", slow)
    monkeypatch.setitem(CONSTANTS, "all", (*CONSTANTS["code"], *CONSTANTS["links"]))
    believed = calibrate.WIDTH**2 / (calibrate.WIDTH**2 + calibrate.MISS**2)
    found = fit_testbed([row], ("all",))["all"]
    assert np.log(found) / np.log(0.25) == pytest.approx(believed, rel=0.02)


def test_what_rows_do_not_tell_stays_as_it_was():
    """A ratio of times says nothing of a factor that both have (but for latencies)."""
    own, other = (
        figure("flickr", "gcn", name, "epoch_time_s", TRUE)
        for name in ("gnnpipe_pipeline", "graph_parallel")
    )
    ratio = str(float(other["value"]) / float(own["value"]))
    speedup = {**own, "metric": "speedup_vs", "baseline": "graph_parallel", "value": ratio}
    found = fit_testbed([speedup], ("device", "links", "launch"))
    assert found["device"] * found["links"] / found["launch"] == pytest.approx(1.0, rel=0.1)


@pytest.mark.nightly
def test_what_is_left_out_gives_nothing(monkeypatch):
    """Each graph is scored with the other's constants: lies about its own rows change nothing."""
    slow = {name: factor / 2 for name, factor in TRUE.items()}
    rows = table("flickr", TRUE) + table("squirrel", slow)
    asked = ("Table 1",), ("flickr", "squirrel"), calibrate.TIMES
    monkeypatch.setattr(calibrate, "FITS", (Fit("gnnpipe_a5000", tuple(TRUE), *asked),))

    def scored(result: dict, dataset: str) -> list[float]:
        return [row["predicted"] for row in result["rows"] if row["dataset"] == dataset]

    told = calibrate.leave_one_out(rows)
    assert not any(row["fitted"] for row in told["rows"])
    errors = [row["error"] for row in told["rows"] if row["dataset"] == "flickr"]
    assert errors != pytest.approx([0.0] * 8, abs=0.1)
    wanted = [predict(row, partial(scaled, factors=slow)) for row in rows[:8]]
    assert scored(told, "flickr") == pytest.approx(wanted, rel=0.1)
    lies = [{**row, "value": str(3 * float(row["value"]))} for row in rows[:8]] + rows[8:]
    again = scored(calibrate.leave_one_out(lies), "flickr")
    assert again == pytest.approx(scored(told, "flickr"), rel=1e-9)


@pytest.mark.parametrize("each", FITS, ids=lambda each: each.testbed)
def test_kept_constants_are_few_and_say_their_rows(each):
    with open(QUOTED / "fitted.csv", newline="", encoding="utf-8") as file:
        lines = [line for line in csv.DictReader(file) if line["testbed"] == each.testbed]
    assert [line["constant"] for line in lines] == list(each.constants) and len(lines) <= MOST
    # more figures than constants
    assert all(int(line["rows"]) > len(each.constants) for line in lines)
    assert all(line["datasets"].split("; ") == list(each.datasets) for line in lines)


@pytest.mark.parametrize("name", CONSTANTS)
def test_a_faster_testbed_is_never_slower(name):
    """Of a launch or an overlap's tax more is slower; all else is a rate."""
    row: Row = figure("flickr", "gcn", "graph_parallel", "epoch_time_s", {})
    usual, more = (predict(row, partial(scaled, factors={name: factor})) for factor in (1.0, 2.0))
    assert usual == pytest.approx(float(row["value"]))
    assert more <= usual if name not in ("launch", "tax") else more >= usual
