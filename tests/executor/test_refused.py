"""What a rank says that the system refuses something: memory, files, processes."""

import errno
import os
import resource
from pathlib import Path

import pytest
import torch

from gnnplan.executor.launch import failure
from gnnplan.executor.launch.failure import explain, ran_out
from gnnplan.executor.ranks import machine
from gnnplan.executor.ranks.checkpoint import _unwritable
from gnnplan.executor.ranks.machine import ProcessRoom
from gnnplan.planner.vocabulary.errors import LostRank, SpecError


def test_what_memory_that_ran_out_looks_like():
    with pytest.raises(RuntimeError) as too_much:
        torch.empty(1 << 60)
    assert ran_out(too_much.value) and ran_out(MemoryError()) and ran_out(OSError(errno.ENOMEM, ""))
    assert ran_out(torch.OutOfMemoryError())
    assert not ran_out(RuntimeError("Connection closed by peer"))
    assert not ran_out(OSError(errno.ENOSPC, ""))


def explained(error: Exception, folder: Path) -> tuple[int, str]:
    return explain(error, folder, 0, torch.device("cpu"), {})


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
