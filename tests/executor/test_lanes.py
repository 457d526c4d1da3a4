"""Lanes as they are over NCCL: no threads, so every rank begins all messages in its program's
order. Their streams are torch.cpu's here, which do nothing; what they order is tested on GPUs. That
they train the same is in trainings.py (streams)."""

import threading

import pytest
import torch

from gnnplan.executor.ranks.rank import Lanes, backend_of
from gnnplan.executor.train import Replay


def test_lanes_without_threads_work_here_and_now():
    """Two communicators are under way in PipeGCN. Were their operations begun by two threads, each
    of two ranks could wait for the other's operation behind its own."""

    def order(streams: bool) -> list[tuple[str, bool]]:
        lanes, seen = Lanes(torch.device("cpu"), streams), []
        main = threading.current_thread()

        def note(what: str) -> None:
            seen.append((what, threading.current_thread() is main))

        asked = [lanes.submit(lane, lambda lane=lane: note(lane)) for lane in ("comm", "reduce")]
        note("compute")
        for future in asked:
            future.result()
        lanes.close()
        return seen

    assert order(True) == [("comm", True), ("reduce", True), ("compute", True)]
    assert {("comm", False), ("reduce", False)} < set(order(False))


def test_nothing_follows_what_failed_on_a_lane():
    """Memory ran out before a message was sent. The next one went in its place, of another length,
    and Gloo ended the peer, which was then named as the rank that was lost."""
    lanes, done = Lanes(torch.device("cpu"), are_streams=False), []

    def fail() -> None:
        raise MemoryError("the first")

    asked = [lanes.submit("comm", fail), lanes.submit("comm", lambda: done.append("comm"))]
    other = lanes.submit("disk", lambda: done.append("disk"))
    for future in asked:
        with pytest.raises(MemoryError, match="the first"):
            future.result()
    other.result()
    assert done == ["disk"]
    lanes.close()


def test_a_checkpoint_keeps_a_thread():
    """To wait for a disk would look like a lost peer."""
    lanes = Lanes(torch.device("cpu"), are_streams=True)
    thread = lanes.in_thread("disk", threading.current_thread).result()
    assert thread is not threading.main_thread()
    lanes.close()


def test_nccl_needs_a_gpu_of_its_own_for_every_rank_on_all_servers():
    """A launcher may show each process one GPU and call it the first (Slurm's --gpus-per-task)."""
    assert backend_of(["a GPU-1", "a GPU-2", "b GPU-3"]) == "nccl"
    assert backend_of(["a GPU-1", "a GPU-2", "b GPU-3", "b GPU-3"]) == "gloo"


def test_a_step_that_cannot_be_recorded_is_told_its_number_again():
    """The clock stayed where a module could not be recorded: later steps dropped rows of step 0."""

    class Worker:
        clock: torch.Tensor | None = None

    worker = Worker()

    def step() -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(RuntimeError):
        Replay(worker, step, torch.device("cpu"))
    assert worker.clock is None
