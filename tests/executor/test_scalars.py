"""What TensorBoard, other trackers and the terminal are told of a run."""

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
from calls import planned

from gnnplan.executor.launch import preflight, rank_process
from gnnplan.executor.launch.rank_process import _progress_line, follow
from gnnplan.executor.launch.run_request import Options
from gnnplan.planner.vocabulary.errors import SpecError

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "track-a-run.md"
GRAPH = "synthetic:community?vertices=60&edges=400&features=8&classes=3&seed=0"
TAGS = {"loss": "loss", "accuracy/train": "train_accuracy", "accuracy/val": "val_accuracy"}
TAGS |= {"accuracy/test": "test_accuracy", "epoch/seconds": "epoch_s", "epoch/bytes sent": "bytes"}
TAGS |= {"memory/peak bytes": "peak_memory_bytes"}


@pytest.fixture(scope="module")
def reader():
    return pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")


def test_tensorboard_reads_what_a_run_recorded(reader, tmp_path, monkeypatch):
    """A run of one rank in this process, and its resumption; and the guide's way to follow it."""
    for name, number in {"RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, number)
    plan, out, board = (tmp_path / name for name in ("plan.json", "run", "board"))
    how = "--ranks 1 --hidden 8 --layers 2 --strategy graph_parallel"
    planned(plan, "--graph", GRAPH, how)
    given = {"epochs": 4, "eval_every": 3, "checkpoint_every": 2, "tensorboard": board}
    options = Options.of(out, given, resume=False)
    assert follow(plan, out, options) == 0
    again = Options(6, 3, checkpoint_every=2, tensorboard=str(board), resume=True)
    assert follow(plan, out, again) == 0
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 6 and all(row["peak_memory_bytes"] > 1e6 for row in rows)
    events = reader.EventAccumulator(str(board)).Reload()
    assert set(events.Tags()["scalars"]) == set(TAGS)
    for tag, field in TAGS.items():
        expected = {row["epoch"]: row[field] for row in rows if row[field] is not None}
        found = {event.step: event.value for event in events.Scalars(tag)}
        assert found == pytest.approx(expected), tag
    assert [row["epoch"] for row in rows if row["val_accuracy"] is not None] == [3, 4, 6]

    (code, *_) = re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    followed: dict[str, Any] = {}
    exec(code, followed)
    assert list(followed["epochs"](str(out))) == rows


def test_epochs_after_the_checkpoint_are_written_anew(reader, tmp_path):
    """A rank is lost in epoch 4; all go on from epoch 2."""
    row = dict.fromkeys(rank_process.TAGS, 1.0)
    with rank_process.tensorboard(str(tmp_path), 0) as add:
        for epoch in (1, 2, 3):
            add({**row, "epoch": epoch})
    with rank_process.tensorboard(str(tmp_path), 2) as add:
        add({**row, "epoch": 3, "loss": 2.0})
    events = reader.EventAccumulator(str(tmp_path)).Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(1, 1.0), (2, 1.0), (3, 2.0)]


def test_an_absent_tensorboard_is_named_with_pips_command(monkeypatch):
    monkeypatch.setattr(preflight, "find_spec", lambda _: None)
    with pytest.raises(SpecError, match=r"pip install 'gnnplan\[tensorboard\]'"):
        preflight._installed("board")


def test_the_time_left_does_not_count_set_up(capsys):
    """50 epochs of 16 ms had "320 s left": ranks had taken 6 s to read the graph and the model."""
    report = _progress_line(epochs=100, first=0)
    time.sleep(0.1)  # reading the graph; times 99 epochs it was 10 s
    report(dict.fromkeys(TAGS.values(), 1.0) | {"epoch": 1, "epoch_s": 0.02})
    assert "epoch 1/100" in (said := capsys.readouterr().err) and "2 s left" in said
