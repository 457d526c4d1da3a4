"""What is left to go on with: checkpoints, metrics, folders (going on: trainings.py, resumes)."""

import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from calls import planned
from safetensors.torch import save_file
from started import srun

from gnnplan.executor import train
from gnnplan.executor.launch.run_request import must_go_on
from gnnplan.executor.ranks import checkpoint
from gnnplan.executor.ranks.checkpoint import Checkpoints, file_of, header, latest, stored
from gnnplan.executor.ranks.learner import fill
from gnnplan.executor.ranks.rank import Rank
from gnnplan.executor.train import Metrics
from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.planner.vocabulary.files import folder_lock
from gnnplan.testing.ranks import Case

FULL = {"model": "sage", "layers": 3, "hidden": 6, "dropout": 0.3}


def test_a_rank_has_its_last_checkpoint_when_it_writes_the_next(run_ranks, graphs, monkeypatch):
    """A slow disk was still at epoch 20's when a fast one had 20 and 30: none was in common."""
    fsync, row, there = os.fsync, train._row, dict[int, list[int]]()

    def meet(rank: Rank, problem: Any, epoch: int, *more: Any) -> dict[str, Any]:
        there[epoch + 1] = stored(run_ranks.folder / f"run{run_ranks.runs}" / "checkpoints", 0)
        return row(rank, problem, epoch, *more)

    monkeypatch.setattr(checkpoint.os, "fsync", lambda file: (time.sleep(0.1), fsync(file)))
    monkeypatch.setattr(train, "_row", meet)
    run_ranks.alone(Case("graph_parallel", graphs["rough"], FULL, epochs=4, checkpoint_every=1))
    assert there == {1: [], 2: [1], 3: [1, 2], 4: [2, 3]}


def test_a_run_that_is_resumed_at_its_end_keeps_its_peak_of_memory(run_ranks, graphs):
    """The last process trained no epoch; `validate` compared its memory with the prediction."""
    case = Case("graph_parallel", graphs["rough"], FULL, epochs=4, checkpoint_every=2)
    whole = run_ranks.alone(case)
    again = run_ranks.alone(replace(case, resume=str(whole.out)))
    assert len(again.rank(0)["rss_bytes"]) == 4
    # what the run took after its last checkpoint is lost
    about = header(file_of(whole.out / "checkpoints", 4, 0))
    assert about
    for name in ("peak_bytes", "peak_rss_bytes"):
        assert 0 < about["notes"][name] <= again.rank(0)[name]


def test_servers_with_disks_of_their_own_resume_from_these(tmp_path, fork_server):
    """A rank on each of two, as srun starts them: each finds plan and options in its own folder."""
    graph = "synthetic:community?vertices=300&edges=2400&features=8&classes=4&seed=0"
    how = "--hidden 8 --set servers=2 --set gpus_per_server=1 --strategy pipegcn"
    plan = planned(tmp_path / "plan.json", "--graph", graph, how)

    def run(job: int, *arguments: str) -> None:
        words, envs = ["-m", "gnnplan", "run", *arguments], enumerate(srun(2, 1, job))
        ranks = [([word.replace("RANK", str(rank)) for word in words], env) for rank, env in envs]
        ended = fork_server.run(ranks, tmp_path)
        assert [rank.code for rank in ended] == [0, 0], ended

    out = str(tmp_path / "serverRANK")
    how = "--epochs 4 --checkpoint-every 2 --eval-every 3"
    run(1, str(plan), "--out", out, *how.split())
    run(2, "--resume", out, "--epochs", "7")
    told = (tmp_path / "server0" / "metrics.jsonl").read_text()
    rows = [json.loads(line) for line in told.splitlines()]
    # with the options that it had
    assert [row["epoch"] for row in rows if row["val_accuracy"] is not None] == [3, 4, 6, 7]


QUESTION = {"gnnplan": "1", "graph": "abc", "ranks": 2}


def saved(out: Path, rank: int, *epochs: int) -> Checkpoints:
    """Checkpoints of these epochs, of weights that tell them."""
    checkpoints = Checkpoints(out, rank, 10, QUESTION)
    process = Rank(rank, 2, torch.device("cpu"), "gloo")
    for epoch in epochs:
        weights, notes = {"weight": torch.tensor([float(epoch)])}, {"bytes": {"halo": epoch}}
        checkpoints.save(process, epoch, weights, notes, (), {})
    checkpoints.wait()
    process.close()
    return checkpoints


def test_the_last_two_are_kept_and_the_last_of_all_ranks_counts(tmp_path):
    mine, other = saved(tmp_path, 0, 10, 20, 30), saved(tmp_path, 1, 10, 20)
    kept = [stored(tmp_path / "checkpoints", rank) for rank in (0, 1)]
    assert kept == [[20, 30], [10, 20]] and mine.epochs() == [20, 30]
    last = latest([mine.epochs(), other.epochs()])
    assert last == 20
    mine.go_on(last)
    notes, tensors = mine.load(last)
    assert notes == {"bytes": {"halo": 20}} and tensors["weight"].item() == 20
    assert mine.epochs() == [20]  # epochs after it are trained again
    assert [
        p.name for p in mine.folder.iterdir() if "tmp" in p.name or p.name.startswith(".")
    ] == []


@pytest.mark.parametrize("left", [0, 7, 8, 100, -1])
def test_a_torn_file_is_as_none(left, tmp_path):
    checkpoints = saved(tmp_path, 0, 10, 20)
    torn = checkpoints.folder / "epoch20.rank0.safetensors"
    torn.write_bytes(torn.read_bytes()[:left])
    assert checkpoints.epochs() == [10]


@pytest.mark.parametrize("at", [b"halo", -1, -4])
def test_a_damaged_file_is_as_none_and_said(at, tmp_path):
    """A bit that a disk or a copy has turned, in a weight or in a digit of what the rank has counted,
    in the header: the one before counts."""
    checkpoints = saved(tmp_path, 0, 10, 20)
    damaged = checkpoints.folder / "epoch20.rank0.safetensors"
    raw, told = bytearray(damaged.read_bytes()), list[str]()
    raw[at if isinstance(at, int) else raw.index(at) + 8] ^= 1
    damaged.write_bytes(raw)
    assert checkpoints.epochs(told.append) == [10]
    assert told == [f"note: {damaged} is damaged; going on without it"]


def test_a_checkpoint_without_a_checksum_is_taken(tmp_path):
    """As those of older versions are."""
    checkpoints = saved(tmp_path, 0, 10)
    path = checkpoints.folder / "epoch10.rank0.safetensors"
    about = header(path)
    save_file({"weight": torch.ones(1)}, path, {"gnnplan": json.dumps(about)})
    assert "crc32" not in about and checkpoints.epochs() == [10]


def test_metrics_that_another_program_cuts_are_noticed_at_the_next_epoch(tmp_path):
    path = tmp_path / "metrics.jsonl"
    metrics = Metrics(path, 0)
    metrics.append('{"epoch": 1}\n')
    metrics.append('{"epoch": 2}\n')
    os.truncate(path, 5)
    with pytest.raises(SpecError, match=r"has 5 bytes, and this run has written 26"):
        metrics.append('{"epoch": 3}\n')
    metrics.stream.close()


def test_metrics_go_on_after_the_lines_that_count(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"epoch": 1}\n{"epoch": 2}\n{"epo')
    with pytest.raises(SpecError, match="has 2 epochs, but the checkpoint is of epoch 3"):
        Metrics(path, 3)
    metrics = Metrics(path, 1)
    metrics.append('{"epoch": 2, "again": 1}\n')
    metrics.stream.close()
    assert path.read_text() == '{"epoch": 1}\n{"epoch": 2, "again": 1}\n'


def test_metrics_that_lack_epochs_refuse_before_anything_is_removed(tmp_path):
    """The weights of a finished run were gone when its ranks refused."""
    (tmp_path / "metrics.jsonl").write_text('{"epoch": 1}\n')
    with pytest.raises(SpecError, match="has 1 epochs, but the checkpoint is of epoch 2"):
        must_go_on(tmp_path, 2, 4)
    must_go_on(tmp_path, 2, 4, logs=False)  # on a server that has none
    must_go_on(tmp_path, 1, 4)


def test_a_folder_has_one_run_at_a_time(tmp_path):
    """Two that began together ended both, and left metrics that nobody could read."""
    words = tmp_path, "another run trains in", "give another --out"
    again = folder_lock(*words)
    with folder_lock(*words), pytest.raises(SpecError, match="another run trains in"):
        again.__enter__()
    with folder_lock(*words):
        pass


def test_another_training_is_refused(tmp_path):
    saved(tmp_path, 0, 10)
    with pytest.raises(
        SpecError,
        match=r"is of another training \(graph 'abc' there and 'd' here\); resume with a plan of the",
    ):
        Checkpoints(tmp_path, 0, 10, {**QUESTION, "graph": "d"}).epochs()
    with pytest.raises(SpecError, match=r"gnnplan '1' there and '2' here"):
        Checkpoints(tmp_path, 0, 10, {**QUESTION, "gnnplan": "2"}).epochs()
    with pytest.raises(SpecError, match=r"weight is torch.float32 \[1\], this training's .* \[2\]"):
        fill({"weight": torch.zeros(2)}, {"weight": torch.zeros(1)})


def test_a_full_disk_is_told(tmp_path):
    """A folder where the file should be: it cannot be replaced."""
    (tmp_path / "checkpoints" / "epoch10.rank0.safetensors").mkdir(parents=True)
    with pytest.raises(
        SpecError, match=r"cannot be written .*; free the disk, or .* --checkpoint-every 0"
    ):
        saved(tmp_path, 0, 10)
