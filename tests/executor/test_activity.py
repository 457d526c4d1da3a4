"""What a rank is in is in a file while it is in it, and an error knows where it was raised."""

import pytest
import torch

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
