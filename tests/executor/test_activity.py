"""What a rank is in is in a file while it is in it, and an error knows where it was raised. A rank
whose peer NCCL waits for says so before torch's watchdog ends it; the GPU is fake."""

import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from gnnplan.executor.launch.failure import FAILED_WITH_OTHERS
from gnnplan.executor.launch.rank_process import _Process
from gnnplan.executor.launch.run_request import Options
from gnnplan.executor.ranks.activity import (
    SIZE,
    Activity,
    begin,
    forget,
    leave,
    read,
    read_note,
    seen,
)
from gnnplan.executor.ranks.rank import Rank
from gnnplan.executor.ranks.recorder import HostMark
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
    assert set(read(path)) == {"x"} and read_note(path) == ""
    forget(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_note_needs_neither_a_disk_nor_a_file(tmp_path):
    """The launcher has made the file, so a rank on a full disk says why it failed."""
    begin(tmp_path, 1)
    path = seen(tmp_path, 0)
    activity = Activity(path)
    activity.begin("phase", "epoch 3")
    kept = path.stat()
    activity.leave("größer\0" + "x" * SIZE)
    after = path.stat()
    assert (after.st_size, after.st_blocks) == (kept.st_size, kept.st_blocks) and kept.st_blocks > 0
    assert read_note(path).startswith("größer x") and read(path) == "the beginning of epoch 3"
    leave(path, "the launcher's")
    assert read_note(path) == "the launcher's" and read(path) == "the beginning of epoch 3"
    begin(tmp_path, 1)  # another attempt
    activity.leave("late")  # of a rank that is still ending
    assert read_note(path) == read(path) == ""


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
    options, activity = Options(timeout_s=0.1), rank.recorder.activity
    process = _Process(tmp_path / "plan.json", tmp_path, options, activity)
    process.rank = rank
    failure = process._failure(caught.value)
    assert (failure.exit_code, failure.waited_s) == (FAILED_WITH_OTHERS, 0.2)
    assert failure.message == "its peers did not answer (NCCL timed out after 0.2 s)"
    assert failure.activity == read(tmp_path / "activity") == "halo:f:l1:s7 of epoch 3"


def test_a_device_that_is_late_leaves_the_activity_as_the_host_has_it(tmp_path, monkeypatch):
    device = Device(reached=1, ends=time.monotonic() + 0.1)
    rank = waiting(device, tmp_path / "activity", monkeypatch)
    rank.settle()
    assert read(tmp_path / "activity").startswith("what follows")


def test_over_gloo_the_device_waits_for_nobody(tmp_path, monkeypatch):
    rank = waiting(Device(reached=1), tmp_path / "activity", monkeypatch)
    rank.communicate_over("gloo")
    synchronized: list[int] = []
    rank.recorder._clock.synchronize = lambda: synchronized.append(1)  # type: ignore[union-attr, attr-defined]
    rank.settle()
    assert synchronized == [1] and rank.groups.patience == rank.groups.timeout_s
    assert rank.groups.limit.total_seconds() == rank.groups.timeout_s
