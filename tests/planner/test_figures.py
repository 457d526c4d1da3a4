"""Printed figures, row by row: what is asked, predicted, skipped, and how a file may be wrong."""

import csv
import json
from pathlib import Path

import printed_rows
import pytest

from gnnplan.papers.figures import predict, question
from gnnplan.papers.published import COLUMNS, evaluate_rows, read
from gnnplan.papers.question import Skip
from gnnplan.planner.graph.graph import GraphStats
from gnnplan.planner.graph.load import datasets, load
from gnnplan.planner.strategies import GNNPipe, GraphParallel
from gnnplan.planner.vocabulary.errors import SpecError

PARALLEL = {"strategy": "graph_parallel", "strategy_params": ""}
TIME = {"metric": "epoch_time_s", "unit_as_printed": "s"}
PIPELINE = '{"alpha": 23, "chunks": 32, "group": 1, "stages": 8}'


def row(**changed: object) -> dict[str, str]:
    """A cell of GNNPipe Table 4: GCN, 32 layers of 1000, on Squirrel."""
    job = "gnnpipe gnnpipe_a5000 squirrel gcn 32x1000 2x4 gnnpipe_pipeline"
    plain = {"strategy_params": PIPELINE, "metric": "comm_volume_bytes", "value": 289910292}
    return printed_rows.row(
        job, **({"unit_as_printed": "GB", "source": "Table 4"} | plain | changed)
    )


def file_of(tmp_path: Path, *rows: dict[str, str], columns: tuple[str, ...] = COLUMNS) -> Path:
    path = tmp_path / "figures.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    return path


def test_a_row_asks_for_its_testbed_and_strategy():
    asked = question(row())
    assert asked.strategy == GNNPipe(stages=8, chunks=32).settle(asked.problem)
    assert asked.problem.ranks == 8
    assert asked.problem.stats.name == "squirrel" and asked.problem.workload.hidden == 1000
    fewer = question(row(**PARALLEL, num_nodes=1, gpus_per_node=2))
    assert fewer.strategy == GraphParallel() and fewer.problem.servers == (0, 0)


def test_ratios_are_of_the_two_strategies():
    parallel, pipeline = predict(row(**TIME, **PARALLEL)), predict(row(**TIME))
    against = {"baseline": "graph_parallel", "value": 0.1}
    speedup = row(metric="speedup_vs", unit_as_printed="x", **against)
    slowdown = row(metric="slowdown_fraction_vs", unit_as_printed="%", **against)
    assert predict(speedup) == pytest.approx(parallel / pipeline)
    assert predict(slowdown) == pytest.approx(pipeline / parallel - 1)


def test_feasibility_is_the_memory_models():
    """GraphSAGE of 4 layers of 1024 on Reddit."""
    job = {"dataset": "reddit", "model": "sage", "layers": 4, "hidden": 1024, "num_nodes": 1}
    job |= PARALLEL | {"testbed": "pipegcn_2080ti", "value": 1}
    fits = job | {"metric": "fits_in_memory", "unit_as_printed": "runs"}
    parts = {"metric": "min_partitions", "unit_as_printed": "partitions", "gpus_per_node": ""}
    least = int(predict(row(**job | parts)))
    assert least >= 2
    assert predict(row(**fits, gpus_per_node=least)) == 1.0
    assert predict(row(**fits, gpus_per_node=least - 1)) == 0.0


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"dataset": "mag240m"}, "no statistics of mag240m"),
        ({"model": "rgcn"}, "model rgcn is none of ours"),
        ({"testbed": "moon"}, "testbed moon is none of ours"),
        ({"metric": "speedup_vs", "baseline": "any_of:roc|cagnet"}, "no one baseline"),
        ({"strategy_params": '{"stages": 3}'}, "stages"),
        ({"strategy_params": '{"stage": 8}'}, "stage .strategy_params. is nothing that we know"),
        (
            {"strategy": "dgl_data_parallel", "strategy_params": '{"batch": "a", "fanout": 5}'},
            "not a workload of ours",
        ),
        ({"gpus_per_node": 9}, "has 4 GPUs per server, and 9 are asked"),
    ],
)
def test_what_the_model_does_not_speak_of_is_skipped(changed, why):
    with pytest.raises(Skip, match=why.replace("|", r"\|")):
        predict(row(**changed))


def test_the_score_leaves_out_what_was_fitted(tmp_path):
    given = row(), row(model="sage", value=2 * 289910292), row(strategy="roc")
    told = evaluate_rows(read(file_of(tmp_path, *given)), fitted=lambda one: one["model"] == "sage")
    assert json.loads(json.dumps(told)) == told
    assert [one["fitted"] for one in told["rows"]] == [False, True]
    assert told["skipped"][0]["why"] == "roc is none of our strategies"
    volume = told["summary"]["comm_volume_bytes"]
    assert volume["n"] == 1 and volume["max"] < 0.01
    assert told["rows"][1]["error"] == pytest.approx(-0.5, abs=0.01)


def winner(tmp_path: Path, *rows: dict[str, str]) -> tuple[int, int]:
    """Comparisons of printed times, and those that are predicted so."""
    told = evaluate_rows(read(file_of(tmp_path, *rows)))["summary"]["winner"]
    return told["n"], told["right"]


def test_a_winner_counts_where_printed_times_differ(tmp_path):
    parallel, pipeline = row(**TIME, **PARALLEL, value=1), row(**TIME, value=1.04)
    assert winner(tmp_path, parallel, pipeline) == (0, 0)
    as_predicted, other = ("2", "0.5") if predict(pipeline) > predict(parallel) else ("0.5", "2")
    assert winner(tmp_path, parallel, {**pipeline, "value": as_predicted}) == (1, 1)
    assert winner(tmp_path, parallel, {**pipeline, "value": other}) == (1, 0)


def test_a_predicted_tie_names_no_winner(tmp_path):
    """On one GPU there is nothing to hide."""
    alone = row(**TIME, **PARALLEL, value=1, num_nodes=1, gpus_per_node=1)
    twin = {**alone, "strategy": "pipegcn", "value": "2"}
    assert predict(twin) == predict(alone)
    assert winner(tmp_path, alone, twin) == winner(tmp_path, twin, alone) == (1, 0)


@pytest.mark.parametrize(
    ("changed", "rule"),
    [
        ({"value": "fast"}, r"figures.csv:2: value 'fast' is not a number; write it in SI"),
        ({"value": "nan"}, "is not finite"),
        ({"unit_as_printed": "fortnights"}, "unit 'fortnights' is unknown"),
        (
            {"unit_as_printed": "s"},
            "comm_volume_bytes cannot be printed in 's', .*; give one of bytes",
        ),
        ({"strategy_params": "{"}, "strategy_params: not JSON"),
        ({"strategy_params": "[1]"}, "strategy_params is not a JSON object"),
        ({"layers": "3.0"}, r"layers '3.0' is not a whole number above 0 .*; leave it empty"),
        ({"num_nodes": "0"}, "num_nodes '0' is not a whole number above 0"),
        (
            {"metric": "speedup_vs", "unit_as_printed": "x", "value": "0"},
            "speedup_vs must be above 0, is 0",
        ),
    ],
)
def test_a_wrong_row_is_named(tmp_path, changed, rule):
    with pytest.raises(SpecError, match=rule):
        read(file_of(tmp_path, row(**changed)))


def test_what_excel_writes(tmp_path):
    path = file_of(tmp_path, row())
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert len(read(path)) == 1


def test_other_columns_are_refused(tmp_path):
    with pytest.raises(SpecError, match=r"figures.csv:1: missing columns: testbed; a file"):
        read(file_of(tmp_path, row(), columns=tuple(name for name in COLUMNS if name != "testbed")))
    with pytest.raises(SpecError, match=r"figures.csv:1: unknown .* did you mean metric"):
        read(file_of(tmp_path, row(), columns=(*COLUMNS, "metrics")))
    with pytest.raises(SpecError, match="cannot be read"):
        read(tmp_path / "absent.csv")


@pytest.mark.parametrize("name", datasets())
def test_well_known_graphs_have_statistics(name):
    stats = load(name)
    assert isinstance(stats, GraphStats) and not stats.known
    assert stats.name == stats.source == name
