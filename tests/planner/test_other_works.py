"""Printed figures of works that gave no constant: what a row says, and how rows are summed up."""

import json
import re
from collections import Counter
from pathlib import Path

import pytest

from gnnplan.papers import calibrate, interpret
from gnnplan.papers.figures import predict
from gnnplan.papers.interpret import TESTBEDS, question
from gnnplan.papers.published import GAVE_A_WIDTH, evaluate_rows, is_inside
from gnnplan.papers.question import Skip
from gnnplan.papers.rows import COLUMNS, read
from gnnplan.planner.cluster.doubt import range_of
from gnnplan.planner.problem.inputs import read_cluster
from gnnplan.planner.strategies import parse

PRINTED = Path(__file__).resolve().parents[2] / "traces" / "published"
ROWS = read(PRINTED / "others.csv")


def row(**changed: object) -> dict[str, str]:
    """GraphSAGE on ogbn-products, sampled by a V100."""
    plain: dict[str, object] = {
        "paper": "some work",
        "source": "Table 1",
        "testbed": "p3.16xlarge",
        "dataset": "ogbn-products",
        "model": "sage",
        "layers": 2,
        "hidden": 256,
        "num_nodes": 1,
        "gpus_per_node": 1,
        "strategy": "data_parallel",
        "strategy_params": {"batch": 1000, "fanout": [10, 25], "sampler": "host"},
        "metric": "epoch_time_s",
        "value": 2.0,
        "unit_as_printed": "s",
    }
    told = plain | changed
    told["strategy_params"] = json.dumps(told["strategy_params"])
    return {name: str(told.get(name, "")) for name in COLUMNS}


def test_rows_say_where_they_are_printed():
    """A commit or an address, so that anybody finds the figure again; and who ran what."""
    for each in ROWS:
        assert re.search(r"@[0-9a-f]{9,40}:\S|https://\S+/pull/\d|arXiv \d{4}\.\d", each["source"])
        assert each["note"], each["line"]
    assert len({each["paper"] for each in ROWS}) >= 10
    assert len({tuple(each[name] for name in COLUMNS) for each in ROWS}) == len(ROWS)


def test_nothing_is_fitted_to_them():
    """Their testbeds are as datasheets say, and no fit takes a row of theirs."""
    for each in ROWS:
        assert not calibrate.gave_a_constant(each), each["line"]
        if each["testbed"]:
            assert calibrate.calibrated(each) == interpret.testbed(each)


def test_what_is_not_stated_is_not_predicted():
    found = evaluate_rows(ROWS)
    assert len(found["rows"]) + len(found["skipped"]) == len(ROWS)
    assert {each["why"] for each in found["skipped"]} == {"testbed is not stated"}
    assert len(found["rows"]) >= 120
    kinds = Counter(each["kind"] for each in found["rows"] if "kind" in each)
    assert {kind: told["n"] for kind, told in found["kinds"].items()} == dict(kinds)
    assert all(0 < each["low_s"] <= each["high_s"] for each in found["rows"] if "kind" in each)


def test_ranges_hold_what_they_say_of_works_that_did_not_give_them():
    """80 % are aimed at, of epochs on machines that nothing is known of."""
    epochs = [each for each in evaluate_rows(ROWS)["rows"] if "kind" in each]
    apart = [is_inside(each) for each in epochs if each["paper"] not in GAVE_A_WIDTH]
    assert len(apart) > 70 and 0.7 <= sum(apart) / len(apart) <= 0.9


@pytest.mark.parametrize("file", sorted(TESTBEDS.glob("*.yaml")), ids=lambda file: file.stem)
def test_machines_that_only_print_speaks_of_say_where_numbers_come_from(file: Path):
    cluster = read_cluster(str(file))
    assert cluster.name == file.stem and any(each["testbed"] == file.stem for each in ROWS)
    for constant in ("device.gemm", "device.memory_bandwidth", "intra_node.bandwidth"):
        assert range_of(cluster, constant) in ((0.4, 1.2), (0.5, 2.0)), constant


def test_a_strategy_may_be_written_as_ours():
    text = "data_parallel(prefetch=1,cache='100MB',hot='degree')"
    asked = question(row(strategy=text))
    assert asked.strategy == parse(text) and asked.problem.cluster.sampler == "host"
    on_gpu = {"batch": 1000, "fanout": [10, 25], "sampler": "device"}
    assert question(row(strategy_params=on_gpu)).problem.cluster.sampler == "device"
    full = question(row(strategy="graph_parallel", strategy_params={"norm": "batch"}))
    assert full.problem.workload.mode == "full" and full.problem.workload.norm == "batch"
    for told, why in (
        ({"strategy": "data_parallel(prefetch=1,hops=2)"}, "none of our strategies"),
        ({"strategy_params": on_gpu | {"sampler": "disk"}}, "on host or device, not on disk"),
        ({"testbed": "rtx3090/../../x"}, "none of ours"),
    ):
        with pytest.raises(Skip, match=why):
            predict(row(**told))


def test_a_batch_is_a_gpus():
    """All but GSplit state what each GPU takes: on four of them a step has four times as much."""
    four = question(row(gpus_per_node=4)).problem
    assert (four.workload.batch, four.ranks) == (4000, 4)


def test_layers_may_aggregate_before_they_multiply():
    """On 602 features and 16 hidden numbers it is 602 / 16 times as much to gather, nearly."""
    usual = row(strategy="graph_parallel", dataset="reddit", hidden=16, strategy_params={})
    wide = {**usual, "strategy_params": '{"aggregates_first": 1, "dropout": 0.5}'}
    narrow = {**usual, "strategy_params": '{"dropout": 0.5}'}
    assert 4 < predict(wide) / predict(narrow) < 602 / 16


def test_epochs_are_summed_up_by_kind_and_by_gpus():
    """Two GPUs take a third longer in print than halves of one GPU's epoch, as predicted: the error
    of scaling is a third, whatever the error of both is."""
    one, two = row(), row(gpus_per_node=2)
    one["value"], two["value"] = str(predict(one) / 1000), str(predict(two) / 750)
    found = evaluate_rows([one, two])
    assert found["scaling"] == {"n": 1, "median": pytest.approx(1 / 4)}
    kinds = found["kinds"]
    assert kinds["mini-batches, one GPU"] == {
        "n": 1,
        "median": pytest.approx(999),
        "ranges": 1,
        "in_range": 0,
    }
    assert kinds["mini-batches, several GPUs"]["median"] == pytest.approx(749)
    one["value"] = str(predict(one))
    assert evaluate_rows([one])["kinds"]["mini-batches, one GPU"]["in_range"] == 1
    gave = {**one, "paper": GAVE_A_WIDTH[0]}
    assert "in_range" not in evaluate_rows([gave])["kinds"]["mini-batches, one GPU"]


def test_samplers_are_rivals():
    """The same strategy whose sampler is elsewhere: print may say that one of them is faster."""
    host, device = (
        row(
            dataset="ogbn-papers100M",
            strategy_params={"batch": 1000, "fanout": [10, 25], "sampler": place},
        )
        for place in ("host", "device")
    )
    faster = predict(device) < predict(host)
    host["value"], device["value"] = ("3", "2") if faster else ("2", "3")
    assert evaluate_rows([host, device])["summary"]["winner"] == {"n": 1, "right": 1}
