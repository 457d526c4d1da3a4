"""What is left to go on with: checkpoints, metrics, folders; what torchrun's `--max-restarts` starts
anew; and trainings that go on on other ranks or with another strategy, as if they had begun there
(with the same ones: trainings.py, resumes)."""

import json
import os
import shutil
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from calls import call, everything, planned, rows_of, srun, turn_a_bit
from nightly import at_night
from safetensors.torch import save_file

from gnnplan.executor import train
from gnnplan.executor.launch.run_request import last_of, must_be_new, must_go_on
from gnnplan.executor.ranks import checkpoint
from gnnplan.executor.ranks.checkpoint import (
    Checkpoints,
    file_of,
    header,
    last_stored,
    resumable,
    stored,
)
from gnnplan.executor.ranks.learner import ModelPart, Optimizer, fill
from gnnplan.executor.ranks.rank import Rank
from gnnplan.executor.train import Metrics
from gnnplan.planner.decision.plan import chosen, question, read
from gnnplan.planner.gnn.workload import Workload
from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.planner.vocabulary.files import folder_lock
from gnnplan.testing.ranks import Case, Ranks, Result
from gnnplan.testing.runs import must_go_on_from_another_plan

GRAPH = "synthetic:community?vertices=300&edges=2400&features=8&classes=4&seed=0"
FULL = {"model": "sage", "layers": 3, "hidden": 6, "dropout": 0.3}


def test_a_rank_has_its_last_checkpoint_when_it_writes_the_next(run_ranks, graphs, monkeypatch):
    """A slow disk was still at epoch 20's when a fast one had 20 and 30: none was in common."""
    fsync, row, there = os.fsync, train._row, dict[int, list[int]]()

    def meet(rank: Rank, problem: Any, epoch: int, *more: Any) -> dict[str, Any]:
        there[epoch + 1] = [*sorted(stored(run_ranks.folder / f"run{run_ranks.runs}/checkpoints"))]
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
    how = "--hidden 8 --set servers=2 --set gpus_per_server=1 --strategy pipegcn"
    plan = planned(tmp_path / "plan.json", "--graph", GRAPH, how)

    def run(job: int, *arguments: str) -> None:
        words, envs = ["-m", "gnnplan", "run", *arguments], enumerate(srun(2, 1, job))
        ranks = [([word.replace("RANK", str(rank)) for word in words], env) for rank, env in envs]
        ended = fork_server.run(ranks, tmp_path)
        assert [rank.code for rank in ended] == [0, 0], ended

    out = str(tmp_path / "serverRANK")
    how = "--epochs 4 --checkpoint-every 2 --eval-every 3"
    run(1, str(plan), "--out", out, *how.split())
    run(2, "--resume", out, "--epochs", "7")
    rows = rows_of(tmp_path / "server0")
    # with the options that it had
    assert [row["epoch"] for row in rows if row["val_accuracy"] is not None] == [3, 4, 6, 7]


@pytest.fixture
def plans(tmp_path):
    """Two of one training: they go on from each other's checkpoints where a user asks for it."""
    return [
        planned(tmp_path / name, "--graph", GRAPH, f"--hidden 8 --ranks 1 --strategy {strategy}")
        for name, strategy in {"one.json": "graph_parallel", "other.json": "granndis"}.items()
    ]


@pytest.fixture
def attempt(tmp_path, fork_server):
    """Be an attempt of a rank that torchrun started; returns its exit code, and what it said."""

    def run(restarts: int, *arguments: str) -> tuple[int, str]:
        env = {
            "RANK": "0",
            "LOCAL_RANK": "0",
            "WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "29500",  # one rank meets nobody there
            "TORCHELASTIC_RESTART_COUNT": str(restarts),
            "CUDA_VISIBLE_DEVICES": "",
        }
        (ended,) = fork_server.run([(["-m", "gnnplan", "run", *arguments], env)], tmp_path)
        return ended.code, ended.stderr

    return run


def test_a_restart_goes_on_with_its_own_run_alone(plans, attempt, tmp_path):
    """The other plan's first attempt was refused, and its second took this one's weights."""
    one, other = map(str, plans)
    out = tmp_path / "run"
    words = ["--out", str(out), "--epochs", "4", "--checkpoint-every", "2"]
    assert attempt(0, one, *words)[0] == 0
    there = everything(out)
    for restarts in (0, 1):
        code, said = attempt(restarts, other, *words)
        assert (code, everything(out)) == (2, there) and "holds a run already" in said
    # as if it had been lost after its checkpoint of epoch 2
    (out / "weights.safetensors").unlink()
    (out / "rank0.json").unlink()
    (out / "checkpoints" / "epoch4.rank0.safetensors").unlink()
    assert attempt(1, one, *words)[0] == 0
    assert [row["epoch"] for row in rows_of(out)] == [1, 2, 3, 4]
    assert (out / "weights.safetensors").read_bytes() == there[out / "weights.safetensors"]


def test_a_restarted_resume_without_a_checkpoint_deletes_nothing(plans, attempt, tmp_path):
    """A disk that was away for a moment cost all epochs: the restart began from the first."""
    out = tmp_path / "run"
    words = ["--epochs", "4", "--checkpoint-every", "2"]
    assert attempt(0, str(plans[0]), "--out", str(out), *words)[0] == 0
    for path in (out / "checkpoints").iterdir():
        os.truncate(path, 8)
    there = everything(out)
    for restarts in (0, 1):
        code, said = attempt(restarts, "--resume", str(out), "--epochs", "6")
        assert (code, everything(out)) == (2, there) and "has no checkpoint that all ranks" in said


def test_checkpoints_alone_are_a_run(tmp_path):
    """Of a server without rank 0. A new run kept these, which are later, and deleted its own."""
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(SpecError, match="holds a run already"):
        must_be_new(tmp_path)


def test_a_plan_that_has_nothing_takes_over_all(plans, attempt, tmp_path):
    one, other = plans
    out = tmp_path / "run"
    words = ["--out", str(out), "--epochs", "4", "--checkpoint-every", "2"]
    assert attempt(0, str(one), *words)[0] == 0
    for plan, of_another in ((one, False), (other, True)):
        document = read(plan)
        last, before = last_of(out, question(document), chosen(document))
        assert last == 4 and (before is not None) == of_another


QUESTION = {"gnnplan": "1", "graph": "abc", "ranks": 2, "strategy": "graph_parallel"}


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
    mine, _ = saved(tmp_path, 0, 10, 20, 30), saved(tmp_path, 1, 10, 20)
    assert stored(mine.folder) == {10: {1}, 20: {0, 1}, 30: {0}}
    assert resumable(tmp_path, [0], QUESTION) == {20: QUESTION, 30: QUESTION}
    assert list(resumable(tmp_path, [0, 1], QUESTION)) == [20]
    mine.go_on(20)
    notes, tensors = mine.load()
    assert notes == {"bytes": {"halo": 20}} and tensors["weight"].item() == 20
    assert list(resumable(tmp_path, [0], QUESTION)) == [20]  # epochs after it are trained again
    assert [
        p.name for p in mine.folder.iterdir() if "tmp" in p.name or p.name.startswith(".")
    ] == []


@pytest.mark.parametrize("left", [0, 7, 8, 100, -1])
def test_a_torn_file_is_as_none(left, tmp_path):
    torn = saved(tmp_path, 0, 10, 20).folder / "epoch20.rank0.safetensors"
    torn.write_bytes(torn.read_bytes()[:left])
    assert list(resumable(tmp_path, [0], QUESTION)) == [10]


@pytest.mark.parametrize("at", [b"halo", -1, -4])
def test_a_damaged_file_is_as_none_and_said(at, tmp_path):
    """A bit that a disk or a copy has turned, in a weight or in a digit of what the rank has counted,
    in the header: the one before counts."""
    damaged = saved(tmp_path, 0, 10, 20).folder / "epoch20.rank0.safetensors"
    told = list[str]()
    turn_a_bit(damaged, at if isinstance(at, int) else damaged.read_bytes().index(at) + 8)
    assert list(resumable(tmp_path, [0], QUESTION, told.append)) == [10]
    assert told == [f"note: {damaged} is damaged; going on without it"]


def test_a_checkpoint_without_a_checksum_is_taken(tmp_path):
    """As those of older versions are."""
    path = saved(tmp_path, 0, 10).folder / "epoch10.rank0.safetensors"
    about = header(path)
    save_file({"weight": torch.ones(1)}, path, {"gnnplan": json.dumps(about)})
    assert "crc32" not in about and list(resumable(tmp_path, [0], QUESTION)) == [10]


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


def test_metrics_with_a_torn_line_go_on_from_the_checkpoint_before(tmp_path):
    """It was refused, although an earlier checkpoint was there; a torn checkpoint never was."""
    told, metrics = list[str](), tmp_path / "metrics.jsonl"
    for rank in range(2):
        saved(tmp_path, rank, 10, 20)
    metrics.write_text('{"epoch": 1}\n' * 19 + '{"epo')
    assert list(resumable(tmp_path, [0], QUESTION, told.append)) == [10]
    note = f"note: {metrics} has 19 epochs; going on without the checkpoint of epoch 20"
    assert told == [note]
    assert list(resumable(tmp_path, [1], QUESTION)) == [10, 20]  # a server may have no metrics
    metrics.write_text('{"epoch": 1}\n' * 9)  # no checkpoint is left: must_go_on refuses
    assert list(resumable(tmp_path, [0], QUESTION)) == [10, 20]


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
        resumable(tmp_path, [0], {**QUESTION, "graph": "d"})
    with pytest.raises(SpecError, match=r"gnnplan '1' there and '2' here"):
        resumable(tmp_path, [0], {**QUESTION, "gnnplan": "2"})
    with pytest.raises(SpecError, match=r"weight is torch.float32 \[1\], this training's .* \[2\]"):
        fill({"weight": torch.zeros(2)}, {"weight": torch.zeros(1)})


def test_a_full_disk_is_told(tmp_path):
    """A folder where the file should be: it cannot be replaced."""
    (tmp_path / "checkpoints" / "epoch10.rank0.safetensors").mkdir(parents=True)
    with pytest.raises(
        SpecError, match=r"cannot be written .*; free the disk, or .* --checkpoint-every 0"
    ):
        saved(tmp_path, 0, 10)


NORMED = {**FULL, "model": "gcn", "norm": "batch"}
MINI = {**FULL, "mode": "mini", "batch": 8, "fanout": (3, 2), "layers": 2}
RATES = {"optimizer": "adamw", "warmup": 5, "schedule": "cosine", "clip": 0.1}
MOMENTUM = {"optimizer": "sgd", "lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}
LAST = 7  # epochs


# strategies and their ranks: of the plan before, and of the one that goes on
CASES = [
    ("graph_parallel", 2, "graph_parallel(narrow=True,buckets=2)", 3, NORMED),
    ("graph_parallel", 2, "graph_parallel", 1, NORMED),
    at_night("graph_parallel", 1, "graph_parallel", 3, NORMED),
    ("graph_parallel", 2, "granndis", 2, {**FULL, "servers": 2}),
    at_night("granndis", 2, "feature_parallel", 3, FULL),
    ("feature_parallel", 3, "gnnpipe(stages=2,chunks=1)", 2, {**FULL, **RATES}),
    ("gnnpipe(stages=2,chunks=1)", 2, "graph_parallel", 3, FULL),
    at_night("gnnpipe(stages=2,chunks=1)", 2, "offload(chunks=3)", 1, FULL),
    at_night("graph_parallel", 2, "gnnpipe(stages=2,chunks=1)", 2, {**FULL, "optimizer": "sgd"}),
    ("data_parallel", 2, "p3", 3, MINI),
    ("p3", 2, "gsplit", 3, {**MINI, **MOMENTUM}),
    at_night("p3", 3, "p3", 2, {**MINI, "model": "gat", "heads": 2}),
    at_night("gsplit", 3, "data_parallel", 2, MINI),
]


def trained(run_ranks: Ranks, world: int, case: Case) -> Result:
    return run_ranks.alone(case) if world == 1 else run_ranks(world, case)


def losses(run: Result) -> torch.Tensor:
    return torch.tensor([row["loss"] for row in run.metrics], dtype=torch.float64)


@pytest.mark.parametrize(("before", "ranks_before", "after", "ranks", "workload"), CASES)
def test_another_plan_goes_on(before, ranks_before, after, ranks, workload, run_ranks, graphs):
    """Broken off after epoch 5 of 2 and 4. Adam's moments go on too: anew they cost percents."""
    workload = dict(workload)
    case = Case(before, graphs["rough"], workload, workload.pop("servers", 1), epochs=5)
    alone = "data_parallel" if workload.get("mode") == "mini" else "graph_parallel"
    unbroken = run_ranks.alone(replace(case, strategy=alone, epochs=LAST))
    broken = trained(run_ranks, ranks_before, replace(case, checkpoint_every=2))
    onwards = replace(case, strategy=after, epochs=LAST, resume=str(broken.out))
    resumed = trained(run_ranks, ranks, onwards)
    torch.testing.assert_close(losses(resumed), losses(unbroken), rtol=1e-5, atol=0)
    assert [row["epoch"] for row in resumed.metrics] == list(range(1, LAST + 1))
    for rank in range(ranks):
        left = resumed.rank(rank)
        assert [(part["until"], part["ranks"]) for part in left["before"]] == [(4, ranks_before)]
        assert left["epochs"] == LAST - 4


def test_another_plan_does_not_go_on_from_an_early_end(run_ranks, graphs):
    """It trained no epoch, and `validate` could read the folder no more."""
    how = {**FULL, "lr": 1e-9, "patience": 1}
    case = Case("graph_parallel", graphs["rough"], how, epochs=6, eval_every=1, checkpoint_every=1)
    out = run_ranks.alone(case).out
    problem, other = case.problem(1), replace(case, strategy="graph_parallel(narrow=True)")
    must_go_on(out, 2, 6, last_of(out, problem, case.settled(problem))[1])
    last, before = last_of(out, problem, other.settled(problem))
    with pytest.raises(SpecError, match=r"ended at epoch 2, 1 epoch after its best .*anew"):
        must_go_on(out, last, 6, before)


def test_a_trace_begins_with_the_plan(run_ranks, graphs):
    """However many epochs another has trained: spans are kept of the first 60 steps."""
    case = Case("graph_parallel", graphs["rough"], FULL, epochs=62, checkpoint_every=62)
    begun = run_ranks.alone(case)
    onwards = replace(case, strategy="graph_parallel(narrow=True)", epochs=63)
    resumed = run_ranks.alone(replace(onwards, resume=str(begun.out)))
    assert {span.step for span in resumed.spans} == {62}


@pytest.mark.parametrize("after", ["pipegcn", "pipegcn_gf(buckets=2,narrow=True)"])
def test_stale_rows_are_made_of_the_weights_that_go_on(after, run_ranks, graphs):
    must_go_on_from_another_plan(run_ranks, after, 3, graphs["rough"], NORMED)


def test_history_is_made_of_the_weights_that_go_on(run_ranks, graphs):
    """Without dropout the loss of the first epoch after it is exact; initial weights' rows are off."""
    case = Case("graph_parallel", graphs["rough"], {**FULL, "dropout": 0.0}, epochs=4)
    unbroken = run_ranks.alone(replace(case, epochs=5))
    broken = run_ranks(3, replace(case, checkpoint_every=2))
    onwards = replace(case, strategy="gnnpipe(stages=2,chunks=4)", epochs=5)
    resumed = run_ranks(2, replace(onwards, resume=str(broken.out)))
    torch.testing.assert_close(losses(resumed), losses(unbroken), rtol=1e-5, atol=0)


def test_both_plans_go_on_until_the_next_has_checkpoints_of_its_own(run_ranks, graphs, tmp_path):
    """Three ranks died in their first epoch: nothing of the two before them is lost, and both can
    go on. Once the three have two checkpoints, nothing is left of those before."""
    case = Case("graph_parallel", graphs["rough"], FULL, epochs=LAST)
    shorter = replace(case, epochs=5, checkpoint_every=2)
    unbroken, broken = run_ranks(2, case), run_ranks(2, shorter)
    died = replace(case, epochs=5, resume=str(broken.out))
    run_ranks(3, died)
    assert last_stored(broken.out, range(3)) == 4
    again = tmp_path / "again"
    shutil.copytree(broken.out, again)
    back = run_ranks(2, replace(case, resume=str(again)))
    assert all(torch.equal(back.weights[name], p) for name, p in unbroken.weights.items())
    assert back.rank(0)["before"] == []
    on = run_ranks(3, replace(died, epochs=LAST, checkpoint_every=1))
    torch.testing.assert_close(losses(on), losses(unbroken), rtol=1e-5, atol=0)
    kept = {path.name for path in (broken.out / "checkpoints").iterdir()}
    assert kept == {f"epoch{epoch}.rank{r}.safetensors" for epoch in (6, 7) for r in range(3)}
    fewer = replace(case, epochs=9, checkpoint_every=1, resume=str(broken.out))
    parts = run_ranks.alone(fewer).rank(0)["before"]
    assert [(part["until"], part["ranks"]) for part in parts] == [(4, 2), (7, 3)]
    kept = {path.name for path in (broken.out / "checkpoints").iterdir()}
    assert kept == {"epoch8.rank0.safetensors", "epoch9.rank0.safetensors"}


@pytest.mark.nightly
def test_torchrun_ranks_go_on_with_another_plan(tmp_path, fork_server):
    """As srun starts them; the plan before is kept, and its options are inherited."""
    out = tmp_path / "run"

    def run(ranks: int, *arguments: str) -> str:
        how = f"--hidden 8 --ranks {ranks} --strategy graph_parallel"
        plan = planned(tmp_path / f"{ranks}.json", "--graph", GRAPH, how)
        command = ["-m", "gnnplan", "run", str(plan), *arguments]
        ended = fork_server.run([(command, env) for env in srun(ranks, ranks, ranks)], tmp_path)
        assert [process.code for process in ended] == [0] * ranks, ended
        return ended[0].stderr

    run(2, "--out", str(out), "--epochs", "4", "--checkpoint-every", "2", "--eval-every", "3")
    said = run(3, "--resume", str(out), "--epochs", "7")
    assert [row["epoch"] for row in rows_of(out) if row["val_accuracy"] is not None] == [3, 4, 6, 7]
    assert json.loads((out / "plan.until4.json").read_text())["best"]["gpus"] == 2
    assert json.loads((out / "plan.json").read_text())["best"]["gpus"] == 3
    told = "graph_parallel on 2 ranks trained until epoch 4; weights and the optimizer's state"
    assert f"note: {told} go on\n" in said
    with pytest.raises(SpecError, match=r"several plans \(graph_parallel on 2 ranks until epoch 4"):
        call("validate", out)


def of_columns(out: Path, *ranks: int, **changed: Any) -> None:
    """Checkpoints of epoch 10 of these ranks, which train columns of a weight and all of a bias."""
    question = {**QUESTION, **changed}
    for rank in ranks:
        net = torch.nn.Linear(4, 3)
        net.weight = torch.nn.Parameter(torch.full((3, 2), float(rank)))
        optimizer = Optimizer(net.parameters(), Workload())
        optimizer.kept["mean"][0].fill_(10.0 + rank)
        columns = {"weight": range(2 * rank, 2 * rank + 2)}
        part = ModelPart(dict(net.named_parameters()), columns, optimizer, {})
        process = Rank(rank, 2, torch.device("cpu"), "gloo")
        checkpoints = Checkpoints(out, rank, 10, question)
        notes, whole = {"before": []}, part.first_columns()
        checkpoints.save(process, 10, part.tensors(), notes, (), whole)
        checkpoints.wait()
        process.close()


def test_a_part_that_is_missing_or_damaged_hands_nothing_over(tmp_path):
    ours = {**QUESTION, "ranks": 3}
    of_columns(tmp_path, 0)
    assert resumable(tmp_path, [2], ours) == {} and last_stored(tmp_path, range(3)) == 0
    of_columns(tmp_path, 1)
    assert list(resumable(tmp_path, [2], ours)) == [10] and last_stored(tmp_path, range(3)) == 10
    of_columns(tmp_path, 1, strategy="granndis")  # of a third plan
    assert resumable(tmp_path, [2], ours) == {}
    of_columns(tmp_path, 1)
    turn_a_bit(tmp_path / "checkpoints" / "epoch10.rank1.safetensors")
    assert resumable(tmp_path, [2], ours) == {}


def test_what_is_saved_twice_is_read_once(tmp_path, monkeypatch):
    """Ranks that train the same weights have the same: the first gives them."""
    of_columns(tmp_path, 0, 1)
    ours = Checkpoints(tmp_path, 0, 10, {**QUESTION, "ranks": 1})
    ours.go_on(10, {**QUESTION})
    read, safe_open = list[str](), checkpoint.safe_open

    def opened(*asked: Any, **how: Any) -> Any:
        file = safe_open(*asked, **how)

        def get_tensor(name: str) -> torch.Tensor:
            read.append(name)
            return file.get_tensor(name)

        return nullcontext(SimpleNamespace(metadata=file.metadata, get_tensor=get_tensor))

    monkeypatch.setattr(checkpoint, "safe_open", opened)
    ours.load_whole(2)
    assert read.count("worker.bias") == read.count("mean.bias") == 1
    assert read.count("worker.weight") == 2
