"""The queue of a rank's shares of batches, sampled in the rank itself or in processes ahead of it.

With `prefetch` k, k sampler processes alternate: process t mod k samples batch t, so k batches are
sampled at once. Each process is a fork of the rank that receives a step's number through a pipe and
sends a share. A thread of the rank receives a share and loads it, while the rank trains on the
share before. If blocks are laid out on the device, this thread samples instead of processes.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from multiprocessing import connection
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Generic, TypeVar

import torch

from gnnplan.executor.minibatch.sampler import Sampled, Sampler
from gnnplan.executor.minibatch.share import Share
from gnnplan.executor.ranks.rank import SCRATCH, Rank, die_with_parent
from gnnplan.planner.vocabulary.errors import LostRank
from gnnplan.planner.vocabulary.schedule import Label

LOOK_S = 0.25  # [s] between two checks of a sampler
T = TypeVar("T")
Arrival = tuple[Sampled, T | None]  # a share, and what `load` returned if it was called


class ShareQueue(Generic[T]):
    """The queue of a rank's shares from step `first` on.

    Without `prefetch`, `next` samples a share. With it, `prefetch` processes sample ahead, and a
    thread calls `load` with a step and its share while the rank trains on the step before.
    """

    def __init__(
        self,
        rank: Rank,
        sampler: Sampler,
        prefetch: int,
        first: int = 0,
        load: Callable[[int, Sampled], T] | None = None,
    ) -> None:
        self.rank, self.sampler, self.prefetch, self.load = rank, sampler, prefetch, load
        self.first = first
        self.loading: Future[Arrival[T]] | None = None  # the next share, if `load` is given
        self.is_receiving = False  # the thread waits for a sampler
        self.processes: Sequence[tuple[BaseProcess, Connection]] = ()  # samplers, with their pipes
        if prefetch and sampler.lays_on_device:
            sampler.lane = "copy"
        elif prefetch:
            self.processes = self._fork()

    def _fork(self) -> Sequence[tuple[BaseProcess, Connection]]:
        """Start the samplers' processes, each with its first step."""
        gc.collect()
        # A fork has none of this process's threads. If it garbage-collected an inherited process
        # group, it would wait for them for ever. So it collects nothing before gc.freeze (_sample).
        is_collecting = gc.isenabled()
        gc.disable()
        context = multiprocessing.get_context("fork")
        all_forked, processes = context.Event(), []
        try:
            for turn in range(self.prefetch):
                rank_end, sampler_end = context.Pipe()
                arguments = self.sampler, sampler_end, all_forked, turn, self.prefetch
                process = context.Process(target=_sample, args=arguments, daemon=True)
                process.start()
                sampler_end.close()
                rank_end.send(self.first + turn)
                processes.append((process, rank_end))
        finally:
            if is_collecting:
                gc.enable()
        # A rank that forks while another rank's sampler connects to the store in this process would
        # copy the name resolver's lock in a locked state. So samplers start when all have forked.
        self.rank.groups.await_all(self.rank.groups.exchanges)
        all_forked.set()
        return processes

    def next(self, step: int) -> tuple[Share, T | None]:
        """Return the share of a step, and the result of `load` if it was called for the share.

        Call it for steps in order.
        """
        rank, loaded = self.rank, None
        if not self.prefetch:
            rank.recorder.activity.begin("host", str(Label("draw", step)))
            sampled = self._add_structure(self.sampler[step])
            rank.recorder.activity.end("host")
        else:
            with rank.recorder.span(Label("wait", step), "compute"):
                sampled, loaded = self._await(step)
        if rank.recorder.recording:
            for op, nbytes in sampled.sent.items():
                rank.recorder.sent[op] = rank.recorder.sent.get(op, 0) + nbytes
            if step < rank.recorder.traced:
                rank.recorder.spans += sampled.spans
        return sampled.share, loaded

    def _add_structure(self, sampled: Sampled) -> Sampled:
        """Set the blocks' graph structure, which a sampler process does not send."""
        if self.sampler.workload.is_cut:
            for part in sampled.share.parts:
                part.block.graph_edges = self.sampler.whole
        return sampled

    def _await(self, step: int) -> Arrival[T]:
        """Wait for the step's share, then let the thread start to load the next share.

        Raises LostRank if the sampler is lost, or silent for too long."""
        try:
            arrived = self._wait_for(self.loading or self._start_load(step), step)
            self.loading = self._start_load(step + 1) if self.load else None
        except BaseException:
            self._kill()
            raise
        return arrived

    def _start_load(self, step: int) -> Future[Arrival[T]]:
        """Let the thread receive and load a step's share."""

        def receive_and_load() -> Arrival[T]:
            sampled = self._receive(step) if self.processes else self.sampler[step]
            sampled = self._add_structure(sampled)
            return sampled, self.load(step, sampled) if self.load else None

        return self.rank.lanes.in_thread("load", receive_and_load)

    def _wait_for(self, future: Future[Arrival[T]], step: int) -> Arrival[T]:
        """Wait for the thread's share. Raises LostRank after the timeout.

        Only time in which this rank waits for a sampler counts: not a load, nor time in which the
        rank still trained or was itself stopped.
        """
        waited, limit = 0.0, self.rank.groups.timeout_s
        while not wait([future], LOOK_S).done:
            waited = waited + LOOK_S if self.is_receiving else 0.0
            if waited > limit:
                raise self._lost(
                    step,
                    f"has said nothing for {limit:g} s; was it stopped? Batches that take longer"
                    " need a longer --timeout",
                )
        return future.result()

    def _receive(self, step: int) -> Sampled:
        """Receive the step's share from its sampler process, and send it its next step."""
        process, pipe = self.processes[(step - self.first) % self.prefetch]
        self.is_receiving = True
        try:
            if pipe not in connection.wait([pipe, process.sentinel]):
                raise EOFError("no answer")
            sampled: Sampled | Exception = pipe.recv()
            if isinstance(sampled, Exception):
                raise sampled
            pipe.send(step + self.prefetch)
            return sampled
        except (ConnectionError, EOFError) as error:
            process.join(LOOK_S)  # a connection may end before its process
            code, reason = process.exitcode, f"was lost: {error}"
            if code is not None:
                reason = (
                    f"was killed by signal: {signal.strsignal(-code)}" if code < 0 else "exited"
                )
            if code == -signal.SIGBUS:
                reason += "; a container may need more shared memory (--shm-size)"
            raise self._lost(step, reason) from None
        finally:
            self.is_receiving = False

    def _lost(self, step: int, reason: str) -> LostRank:
        """Return an error that names this step's sampler."""
        turn = (step - self.first) % self.prefetch + 1
        number = f" {turn} of {self.prefetch}" if self.prefetch > 1 else ""
        return LostRank(f"its sampler{number}, a process of its own, {reason}")

    def _kill(self) -> None:
        for process, _ in self.processes:
            process.kill()
            process.join()

    def close(self) -> None:
        """End the sampler processes, after the batches that they sample together with peers."""
        with suppress(Exception):
            if self.loading is not None:
                self._wait_for(self.loading, self.first)
            for process, pipe in self.processes:
                connection.wait([pipe, process.sentinel], self.rank.groups.timeout_s)
        self._kill()
        self.loading = None


def _sample(
    sampler: Sampler, pipe: Connection, all_forked: Event, turn: int, samplers: int
) -> None:
    """Sample, in a sampler process, the share of every step received through the pipe."""
    gc.freeze()
    gc.enable()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    die_with_parent()
    if os.path.isdir(scratch := os.environ.get(SCRATCH, "")):
        Path(scratch, str(os.getpid())).touch()
    torch.set_num_threads(1)
    sampler.turn, sampler.samplers = turn, samplers
    all_forked.wait()
    with suppress(EOFError, BrokenPipeError, KeyboardInterrupt):
        while True:
            step = pipe.recv()
            try:
                answer: Sampled | Exception = sampler[step]
            except Exception as error:
                error.add_note(f"in a sampler: {''.join(traceback.format_exception(error))}")
                answer = error
            pipe.send(answer)
