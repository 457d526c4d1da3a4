"""What a rank is in is in a file while it is in it, and an error knows where it was raised. A rank
whose peer NCCL waits for says so before torch's watchdog ends it; the GPU is fake. What a rank says
that the system refuses something: memory, files, processes. And what TensorBoard reads of a run."""

import errno
import os
import re
import resource
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from calls import planned, rows_of

from gnnplan.executor.launch import failure, preflight, rank_process
from gnnplan.executor.launch.failure import FAILED_WITH_OTHERS, explain, ran_out
from gnnplan.executor.launch.rank_process import _progress_line, follow
from gnnplan.executor.launch.run_request import Options
from gnnplan.executor.ranks import machine
from gnnplan.executor.ranks.activity import (
    SIZE,
    Activity,
    begin,
    forget,
    read,
    seen,
)
from gnnplan.executor.ranks.checkpoint import _unwritable
from gnnplan.executor.ranks.machine import ProcessRoom
from gnnplan.executor.ranks.rank import Rank
from gnnplan.executor.ranks.recorder import HostMark
from gnnplan.planner.vocabulary.errors import LostRank, SpecError
from gnnplan.planner.vocabulary.schedule import Label


def test_the_file_says_what_every_lane_is_in(tmp_path):
    path = seen(tmp_path, 1)
    assert read(path) == ""
    rank = Rank(1, 2, torch.device("cpu"), "gloo")
    rank.recorder.activity = Activity(path)
    assert read(path) == ""
    rank.recorder.activity.begin("phase", "epoch 3")
    with rank.recorder.span(Label("forward", 2, layer=1), "compute"):
        with rank.recorder.span(Label("halo", 2, "f", 2), "comm"):
            assert (
                read(path)
                == str(rank.recorder.activity)
                == "forward:l1:s2 and halo:f:l2:s2 of epoch 3"
            )
        assert read(path) == "forward:l1:s2 of epoch 3"
    # a rank that is killed there had no operation to name
    assert read(path) == "what follows forward:l1:s2 of epoch 3"
    rank.recorder.activity.begin("phase", "epoch 4")
    assert read(path) == "the beginning of epoch 4"
    rank.recorder.activity.begin("phase", "x" * SIZE)  # never into the note's place
    assert set(read(path)) == {"x"} and rank.recorder.activity.note == ""
    forget(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_note_needs_neither_a_disk_nor_a_file(tmp_path):
    """The launcher has made the file, so a rank on a full disk says why it failed."""
    (launcher,) = begin(tmp_path, 1)
    path = seen(tmp_path, 0)
    activity = Activity(path)
    activity.begin("phase", "epoch 3")
    kept = path.stat()
    activity.leave("größer\0" + "x" * SIZE)
    after = path.stat()
    assert (after.st_size, after.st_blocks) == (kept.st_size, kept.st_blocks) and kept.st_blocks > 0
    assert launcher.note.startswith("größer x") and launcher.operation == read(path)
    assert read(path) == "the beginning of epoch 3"
    launcher.leave("the launcher's")
    assert launcher.note == "the launcher's" and read(path) == "the beginning of epoch 3"
    (again,) = begin(tmp_path, 1)  # another attempt
    activity.leave("late")  # of a rank that is still ending
    assert again.note == again.operation == read(path) == ""


def test_an_error_of_a_lane_while_another_went_on(tmp_path):
    rank = Rank(0, 2, torch.device("cpu"), "gloo")
    rank.recorder.activity.begin("phase", "epoch 1")

    def fails() -> None:
        with rank.recorder.span(Label("halo", 0, "f", 2), "comm"):
            raise ZeroDivisionError

    def goes_on() -> None:
        with rank.recorder.span(Label("gradients", 0, "f", 3), "reduce"):
            pass

    failed = rank.lanes.submit("comm", fails)
    failed.exception()
    rank.lanes.submit("reduce", goes_on).result()
    assert str(rank.recorder.activity) == "halo:f:l2:s0 of epoch 1"
    with pytest.raises(ZeroDivisionError) as caught:
        failed.result()
    assert caught.value.__notes__ == ["in halo:f:l2:s0 of epoch 1"]
    rank.close()


@dataclass
class Device:
    """A stream, and a clock whose first `reached` marks the device has come to."""

    reached: int
    ends: float = float("inf")  # when the stream is done
    marks: list[HostMark] = field(default_factory=list)

    def query(self) -> bool:
        return time.monotonic() > self.ends

    def mark(self) -> HostMark:
        self.marks.append(HostMark(0.0, len(self.marks) < self.reached))
        return self.marks[-1]

    def renew(self) -> None:
        pass


def waiting(device: Device, path: Path, patch: pytest.MonkeyPatch) -> Rank:
    """Rank 0 of two, whose host has begun two exchanges, of which the device is in the first."""
    patch.setattr(torch.cuda, "current_stream", lambda device_: device)
    rank = Rank(0, 2, torch.device("cuda", 0), "nccl")
    rank.recorder.activity = Activity(path)
    rank.recorder._clock = device  # type: ignore[assignment]
    rank.recorder.activity.begin("phase", "epoch 3")
    for layer in (1, 2):
        with rank.recorder.span(Label("halo", 7, "f", layer), "comm"):
            pass
    with rank.recorder.span(Label("update", 7), "compute"):
        pass
    return rank


def test_a_rank_is_less_patient_than_torch_and_says_what_it_was_in(tmp_path, monkeypatch):
    rank = waiting(Device(reached=1), tmp_path / "activity", monkeypatch)
    assert rank.groups.patience == 600  # as torch has it
    rank.groups.timeout_s, rank.groups.nccl_least_s = 0.1, 0.2
    assert rank.groups.limit.total_seconds() > rank.groups.patience == 0.2
    with pytest.raises(RuntimeError, match=r"NCCL timed out after 0\.2 s") as caught:
        rank.settle()
    failure = explain(caught.value, str(rank.recorder.activity), rank=rank)
    assert (failure.exit_code, failure.waited_s) == (FAILED_WITH_OTHERS, 0.2)
    assert failure.message == "its peers did not answer (NCCL timed out after 0.2 s)"
    assert failure.activity == read(tmp_path / "activity") == "halo:f:l1:s7 of epoch 3"


def test_a_device_that_is_late_leaves_the_activity_as_the_host_has_it(tmp_path, monkeypatch):
    device = Device(reached=1, ends=time.monotonic() + 0.1)
    waiting(device, tmp_path / "activity", monkeypatch).settle()
    assert read(tmp_path / "activity").startswith("what follows")


def test_over_gloo_the_device_waits_for_nobody(tmp_path, monkeypatch):
    rank = waiting(Device(reached=1), tmp_path / "activity", monkeypatch)
    rank.groups.backend = "gloo"
    synchronized: list[int] = []
    rank.recorder._clock.synchronize = lambda: synchronized.append(1)  # type: ignore[union-attr, attr-defined]
    rank.settle()
    assert synchronized == [1] and rank.groups.patience == rank.groups.timeout_s
    assert rank.groups.limit.total_seconds() == rank.groups.timeout_s


def test_what_memory_that_ran_out_looks_like():
    with pytest.raises(RuntimeError) as too_much:
        torch.empty(1 << 60)
    assert ran_out(too_much.value) and ran_out(MemoryError()) and ran_out(OSError(errno.ENOMEM, ""))
    assert ran_out(torch.OutOfMemoryError())
    # of a rank that starts the plan was said to predict 0 B
    assert "predicts" not in explain(MemoryError(), "start").message
    assert not ran_out(RuntimeError("Connection closed by peer"))
    assert not ran_out(OSError(errno.ENOSPC, ""))


def explained(error: Exception, folder: Path) -> tuple[int, str]:
    told = explain(error, "start", folder / "traceback")
    return told.exit_code, told.message


def test_a_full_disk_is_no_lost_rank(tmp_path):
    """It ended a run with 4, and was tried again (--restarts), unless a checkpoint met it."""
    error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/disk/x")
    code, said = explained(error, tmp_path)
    assert said == "/disk/x: No space left on device; free the disk"
    assert code == _unwritable(tmp_path, error).exit_code == SpecError.exit_code
    gloo = RuntimeError("[enforce fail] write: No space left on device")
    assert explained(gloo, tmp_path)[0] == SpecError.exit_code


def test_no_thread_is_told_as_what_it_is(tmp_path, monkeypatch):
    """It was told as memory that ran out, with the advice to plan a smaller workload."""
    error, few = RuntimeError("can't start new thread"), ProcessRoom(3, "ulimit -u is 90", "allow")
    monkeypatch.setattr(failure, "process_room", lambda: few)
    for refused in (error, BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")):
        code, said = explained(refused, tmp_path)
        assert code == 2 and "limit (ulimit -u is 90): allow" in said
    for room in (None, few._replace(left=5000)):  # so a stack has no room
        monkeypatch.setattr(failure, "process_room", lambda room=room: room)
        code, said = explained(error, tmp_path)
        assert code == LostRank.exit_code and "memory ran out" in said


def test_the_tightest_limit_of_processes(tmp_path, monkeypatch):
    """The user's, and those of the control groups around the process, of both versions."""
    (tmp_path / "own").write_text("8:pids:/job\n4:memory:/m\n0::/pod/container\n")
    for group, most in (
        {"pods": "9", "pod": "100", "pod/container": "max", "pids/job": "70"}
    ).items():
        (tmp_path / group).mkdir(parents=True)
        (tmp_path / group / "pids.max").write_text(f"{most}\n")
        (tmp_path / group / "pids.current").write_text("60\n")
    rooms = list(machine._of_containers(tmp_path / "own", tmp_path))
    assert sorted(room.left for room in rooms) == [10, 40]  # not those of other groups
    assert rooms[0].limit == f"pids.max of {tmp_path}/pids/job is 70"
    assert "docker" in rooms[0].remedy
    monkeypatch.setattr(machine, "_of_containers", lambda: iter(rooms))
    monkeypatch.setattr(machine, "_threads_of_user", lambda: 15)
    monkeypatch.setattr(resource, "getrlimit", lambda what: (20, 20))
    for user, left in ((1000, 5), (0, 10)):  # root has no limit of its own
        monkeypatch.setattr(os, "getuid", lambda user=user: user)
        room = machine.process_room()
        assert room is not None and room.left == left


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts threads in /proc")
def test_threads_of_the_user_are_counted():
    assert machine._threads_of_user() >= len(os.listdir("/proc/self/task"))


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
    planned(plan, "--graph", GRAPH, "--ranks 1 --hidden 8 --layers 2 --strategy graph_parallel")
    given = {"epochs": 4, "eval_every": 3, "checkpoint_every": 2, "tensorboard": board}
    assert follow(plan, out, Options.of(out, given, resume=False)) == 0
    again = Options(6, 3, checkpoint_every=2, tensorboard=str(board), resume=True)
    assert follow(plan, out, again) == 0
    rows = rows_of(out)
    assert len(rows) == 6 and all(row["peak_memory_bytes"] > 1e6 for row in rows)
    events = reader.EventAccumulator(str(board)).Reload()
    assert set(events.Tags()["scalars"]) == set(TAGS)
    for tag, name in TAGS.items():
        expected = {row["epoch"]: row[name] for row in rows if row[name] is not None}
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
