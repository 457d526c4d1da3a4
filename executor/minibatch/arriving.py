"""A rank's shares of batches in the order of steps, made in the rank itself or ahead of it.

With `prefetch` k samplers are processes of their own that take turns: process t mod k makes batch
t, and k batches are made at once. Each is a fork of the rank that is told a step through a pipe and
says a share. A thread of the rank takes a share, and loads it while the rank trains on the one
before. Shares that are laid out on the device are made by that thread instead.
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

import torch

from gnnplan.executor.minibatch.sampler import Sampled, Sampler
from gnnplan.executor.ranks.opening import SCRATCH, die_with_parent
from gnnplan.executor.ranks.rank import Rank
from gnnplan.planner.vocabulary.errors import LostRank
from gnnplan.planner.vocabulary.schedule import Label

LOOK_S = 0.25  # [s] between two looks at a sampler


class Arriving:
    """A rank's shares from step `first` on.

    Without `prefetch` a share is made when `next` is called. With it, `prefetch` processes make
    shares ahead, and a thread calls `load` with a step and its share while the step before is under
    way.
    """

    def __init__(
        self,
        rank: Rank,
        sampler: Sampler,
        prefetch: int,
        first: int = 0,
        load: Callable[[int, Sampled], Sampled] | None = None,
    ) -> None:
        self.rank, self.sampler, self.prefetch, self.load = rank, sampler, prefetch, load
        self.first = first
        self.loading: Future[Sampled] | None = None  # the next one, if there is a `load`
        self.is_receiving = False  # the thread waits for a sampler
        self.processes: Sequence[tuple[BaseProcess, Connection]] = ()  # and the pipe to each
        if prefetch and sampler.lays_there:
            sampler.lane = "copy"
        elif prefetch:
            self.processes = self._fork()

    def _fork(self) -> Sequence[tuple[BaseProcess, Connection]]:
        """Start the samplers' processes, each with its first step."""
        gc.collect()
        # A fork has none of our threads. If it collected a process group of ours it would wait for
        # them for ever: it collects nothing until it has frozen what it inherits (_sample).
        is_collecting = gc.isenabled()
        gc.disable()
        context = multiprocessing.get_context("fork")
        all_forked, processes = context.Event(), []
        try:
            for turn in range(self.prefetch):
                ours, theirs = context.Pipe()
                asked = self.sampler, theirs, all_forked, turn, self.prefetch
                process = context.Process(target=_sample, args=asked, daemon=True)
                process.start()
                theirs.close()
                ours.send(self.first + turn)
                processes.append((process, ours))
        finally:
            if is_collecting:
                gc.enable()
        # A rank that forks while another's sampler connects to the store in this process would
        # copy the name resolver's lock as taken, for ever. So samplers begin when all have forked.
        self.rank.groups.await_all(self.rank.groups.exchanges)
        all_forked.set()
        return processes

    def next(self, step: int) -> Sampled:
        """The share of this step; steps are asked for in order."""
        rank = self.rank
        if not self.prefetch:
            rank.recorder.activity.begin("host", str(Label("draw", step)))
            made = self._whole(self.sampler[step])
            rank.recorder.activity.end("host")
        else:
            with rank.recorder.span(Label("wait", step), "compute"):
                made = self._await(step)
        if rank.recorder.recording:
            for op, nbytes in made.sent.items():
                rank.recorder.sent[op] = rank.recorder.sent.get(op, 0) + nbytes
            if step < rank.recorder.traced:
                rank.recorder.spans += made.spans
        return made

    def _whole(self, made: Sampled) -> Sampled:
        """The same, with what did not cross from the sampler."""
        if self.sampler.workload.is_cut:
            for part in made.share.parts:
                part.block.whole = self.sampler.whole
        return made

    def _await(self, step: int) -> Sampled:
        """The step's share, of which the thread begins to load the next one.

        Raises LostRank if its sampler is lost, or silent for too long."""
        try:
            made = self._come(self.loading or self._begin(step), step)
            self.loading = self._begin(step + 1) if self.load else None
        except BaseException:
            self._kill()
            raise
        return made

    def _begin(self, step: int) -> Future[Sampled]:
        """A step's share, taken and loaded by the thread."""

        def taken() -> Sampled:
            made = self._received(step) if self.processes else self.sampler[step]
            return self.load(step, self._whole(made)) if self.load else self._whole(made)

        return self.rank.lanes.in_thread("load", taken)

    def _come(self, coming: Future[Sampled], step: int) -> Sampled:
        """What the thread has. What counts is how long the rank has waited for a sampler: not for a
        load, nor while it still trained, nor while it was stopped itself."""
        waited, limit = 0.0, self.rank.groups.timeout_s
        while not wait([coming], LOOK_S).done:
            waited = waited + LOOK_S if self.is_receiving else 0.0
            if waited > limit:
                raise self._lost(
                    step,
                    f"has said nothing for {limit:g} s; was it stopped? Batches that take longer"
                    " need a longer --timeout",
                )
        return coming.result()

    def _received(self, step: int) -> Sampled:
        """What the step's sampler says, who begins the next of its turns."""
        process, pipe = self.processes[(step - self.first) % self.prefetch]
        self.is_receiving = True
        try:
            if pipe not in connection.wait([pipe, process.sentinel]):
                raise EOFError("no answer")
            made: Sampled | Exception = pipe.recv()
            if isinstance(made, Exception):
                raise made
            pipe.send(step + self.prefetch)
            return made
        except (ConnectionError, EOFError) as error:
            process.join(LOOK_S)  # a connection may end before its process
            code, said = process.exitcode, f"was lost: {error}"
            if code is not None:
                said = f"was killed by signal: {signal.strsignal(-code)}" if code < 0 else "exited"
            if code == -signal.SIGBUS:
                said += "; a container may need more shared memory (--shm-size)"
            raise self._lost(step, said) from None
        finally:
            self.is_receiving = False

    def _lost(self, step: int, said: str) -> LostRank:
        """What is said of the sampler of this step."""
        turn = (step - self.first) % self.prefetch + 1
        several = f" {turn} of {self.prefetch}" if self.prefetch > 1 else ""
        return LostRank(f"its sampler{several}, a process of its own, {said}")

    def _kill(self) -> None:
        for process, _ in self.processes:
            process.kill()
            process.join()

    def close(self) -> None:
        """End the samplers' processes, when what they make for their peers, too, is done."""
        with suppress(Exception):
            if self.loading is not None:
                self._come(self.loading, self.first)
            for process, pipe in self.processes:
                connection.wait([pipe, process.sentinel], self.rank.groups.timeout_s)
        self._kill()
        self.loading = None


def _sample(
    sampler: Sampler, pipe: Connection, all_forked: Event, turn: int, samplers: int
) -> None:
    """A sampler's process makes the share of every step that it is told."""
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
                said: Sampled | Exception = sampler[step]
            except Exception as error:
                error.add_note(f"in a sampler: {''.join(traceback.format_exception(error))}")
                said = error
            pipe.send(said)
