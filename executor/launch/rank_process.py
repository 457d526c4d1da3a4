"""One rank's process: from a plan to trained weights, or to an exit code and a message.

`gnnplan run` starts such processes itself (`work`), or torchrun or srun does (`follow`).
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from torch.distributed import Store  # type: ignore[attr-defined]

from gnnplan.executor.launch.blame import FAILED_WITH_OTHERS, Failure
from gnnplan.executor.launch.checks import (
    choose,
    must_be_measurable,
    must_be_new,
    must_go_on,
    must_have_rates,
    prepare,
    taken_over,
    write_run,
)
from gnnplan.executor.launch.options import Options
from gnnplan.executor.launch.out_of_memory import (
    REMEDY,
    account,
    found,
    no_more_processes,
    ran_out,
)
from gnnplan.executor.launch.preflight import Asked, can_meet, must_start, predicted_memory
from gnnplan.executor.launch.roll_call import roll_call
from gnnplan.executor.launch.scalars import Scalars
from gnnplan.executor.launch.together import begin_together
from gnnplan.executor.ranks import activity, turns
from gnnplan.executor.ranks.checkpoint import Checkpoints, handed_over, onwards, question
from gnnplan.executor.ranks.rank import (
    Rank,
    as_torchrun_has_it,
    attempt,
    die_with_parent,
    hosts_the_store,
    open_rank,
    store_of_all,
)
from gnnplan.planner.decision.plan import read
from gnnplan.planner.gnn.workload import show_scores
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies import Strategy
from gnnplan.planner.vocabulary.errors import GnnplanError, SpecError
from gnnplan.planner.vocabulary.files import make_folder, refusal, remedy_of, write_atomically
from gnnplan.planner.vocabulary.progress import say
from gnnplan.planner.vocabulary.units import show_time

# parts of the messages with which torch.distributed says that a peer is gone
LOST_PEER = ("onnection", "ocket", "gloo", "imed out", "NCCL", "peer")
HEAD_START = 2.0  # [s] in which the launcher sees the rank that failed by itself before its peers
FOREIGN_TEXT = 200  # characters of another library's message that are shown


def work(plan: Path, out: Path, options: Options) -> int:
    """Be one of the ranks that `launcher.start` started.

    Returns the exit code. If the rank fails it leaves a note for the launcher.
    """
    process = _Process(plan, out, options, prepared=True)
    failure = process.run()
    if failure is None:
        return 0
    with suppress(OSError, MemoryError):  # it may have failed before it knew its place in the plan
        activity.leave(activity.seen(out, process.number), failure.note)
    with suppress(MemoryError):
        process.activity.leave(failure.note)
    if failure.exit_code == FAILED_WITH_OTHERS:
        time.sleep(HEAD_START)
    return failure.exit_code


def follow(plan: Path, out: Path, options: Options, choice: str | None = None) -> int:
    """Be the rank that torchrun or srun made of this process.

    choice: another candidate of the plan than its best. Returns the exit code. If the rank fails
    it says why on standard error.
    """
    process = _Process(plan, out, options, prepared=False, choice=choice)
    failure = process.run()
    if failure is None:
        return 0
    host = socket.gethostname()
    where = host if failure.server is None else f"server {failure.server}, {host}"
    message = f"error: rank {failure.rank} ({where}) in {failure.activity}: {failure.message}"
    if process.rank is not None and process.hosts:
        message += roll_call(process.rank, failure, process.servers, process.hosts, out)
    say(message)
    return 4 if failure.exit_code == FAILED_WITH_OTHERS else failure.exit_code


class _Ready(NamedTuple):
    """What a rank has before it meets the others."""

    document: dict[str, Any]
    problem: Problem
    strategy: Strategy
    checkpoints: Checkpoints
    stored: list[int]  # epochs of which it has a checkpoint
    others: dict[int, dict[str, Any]]  # those of all ranks of another plan, and its `question`
    differs: list[str]  # what its server has that the plan was not made for


class _Process:
    """One attempt of a rank to train, and what is known when it fails."""

    def __init__(
        self, plan: Path, out: Path, options: Options, prepared: bool, choice: str | None = None
    ) -> None:
        """prepared: the launcher has made `out` and written the plan and the options there."""
        self.plan, self.out, self.options, self.prepared = plan, out, options, prepared
        self.choice = choice
        self.resumes = options.resume or attempt() != "0"
        self.restarted = attempt() != "0"
        self.number = int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")))
        self.server: int | None = None  # not known before the plan has been read
        self.servers: tuple[int, ...] = ()
        self.hosts: list[str] = []  # by rank, once all ranks have met
        self.activity = activity.Activity()  # of this process alone, until its place is known
        self.rank: Rank | None = None
        self.predicted: dict[str, float] = {}

    def run(self) -> Failure | None:
        """Train to the end; None, or how that failed."""
        try:
            self._train()
            return None
        except GnnplanError as error:
            return self._failure(error.exit_code, str(error), str(self.activity))
        except Exception as error:
            return self._unexpected(error)

    def _train(self) -> None:
        from gnnplan.executor.train import train  # the launcher's own process does not need it

        self.activity.begin("phase", "start")
        ready, store = (self._get_ready(), None) if self.prepared else self._get_ready_together()
        problem, checkpoints = ready.problem, ready.checkpoints
        rank = self.rank = open_rank(self.options.timeout_s, problem, store=store)
        rank.gradient_errors, rank.activity = self.options.gradient_errors, self.activity
        # what bounds the one is the other
        rank.staleness_errors = self.options.staleness_errors or rank.gradient_errors
        epochs = self.options.epochs or problem.workload.epochs
        first = self._agree(problem, checkpoints, ready.stored, ready.others, epochs)
        make_folder(self.out)
        # every server may have a disk of its own
        if not self.prepared and os.environ.get("LOCAL_RANK", "0") == "0":
            write_run(self.out, ready.document, self.options, first)
        if checkpoints.before is not None and rank.rank == 0:
            say(f"note: {taken_over(checkpoints.before, ready.strategy, first)}")
        self.activity.begin("phase", "set-up")
        with _reports(epochs, first, self.options, rank.rank) as report:
            train(
                rank,
                problem,
                ready.strategy,
                self.out,
                epochs,
                self.options.eval_every,
                report,
                checkpoints,
                self._may_train,
            )
        # The first rank that ends may read what all ranks have left. Not torch's barrier, which
        # would have to guess this rank's GPU.
        rank.await_all(None)
        rank.settle()
        rank.close()

    def _get_ready(self) -> _Ready:
        """Read the plan and the graph, and what there is to go on from; look at this machine."""
        differs: list[str] = []
        if self.prepared:
            document, problem, strategy = prepare(self.plan)
        else:
            document, loaded = choose(read(self.plan, of_any_version=True), self.choice)
            if not self.options.resume:
                # ranks write only after all of them have met, so what is here is another run's,
                # or of an earlier attempt
                must_be_new(self.out, document if self.restarted else None)
            asked = Asked(document, self.out, self.options, launched=True, loaded=loaded)
            differs = [str(row) for row in must_start(asked)]
            problem, strategy = asked.problem, asked.settled
        must_be_measurable(self.options, strategy)
        must_have_rates(self.options, problem.workload)
        self._take_place(document, problem)
        every, training = self.options.checkpoint_every, question(problem, strategy)
        checkpoints = Checkpoints(self.out, self.number, every, training)
        # reads all of its files, which takes longer than peers may wait if they are large
        stored = checkpoints.found() if self.resumes else []
        others = handed_over(self.out, training) if self.resumes else {}
        return _Ready(document, problem, strategy, checkpoints, stored, others, differs)

    def _get_ready_together(self) -> tuple[_Ready, Store | None]:
        """`_get_ready` of all ranks, or an error of all; also the store where they have met."""
        env, ready, refused = as_torchrun_has_it(), None, None
        is_alone = env["WORLD_SIZE"] == "1"
        try:
            ready = self._get_ready()
        except GnnplanError as error:
            if is_alone or not can_meet():
                raise
            refused = error
        store = None if is_alone else store_of_all(self.options.timeout_s)
        differs = ready.differs if ready else []
        if store is not None:
            differs = begin_together(store, env, refused, differs, hosts_the_store(env))
        assert ready is not None  # else it was refused
        for line in differs:
            say(f"note: {line}")
        return ready, store

    def _may_train(self, epoch: int) -> bool:
        """Whether an epoch, counted from 0, is to be trained."""
        if not self.options.turns:
            return True
        self.activity.begin("phase", f"waiting for its turn, epoch {epoch + 1}")
        return turns.may_train(self.out, epoch)

    def _take_place(self, document: dict[str, Any], problem: Problem) -> None:
        """Find out which rank of the plan this process is, and open its activity file."""
        self.predicted, self.servers = predicted_memory(document), tuple(problem.servers)
        if self.number < problem.ranks:
            self.number = problem.by_gpu[self.number]
            self.server = problem.servers[self.number]
        if self.prepared:
            make_folder(self.out)
            self.activity = activity.Activity(activity.seen(self.out, self.number))
            self.activity.begin("phase", "start")

    def _agree(
        self,
        problem: Problem,
        checkpoints: Checkpoints,
        stored: list[int],
        others: Mapping[int, dict[str, Any]],
        epochs: int,
    ) -> int:
        """Compare facts with all ranks; return the epoch that all go on from (0: the beginning).

        stored: epochs of which this rank has a checkpoint. others: those of which it has the
        checkpoints of all ranks of another plan, and that plan's `question`.
        """
        from gnnplan.executor.launch.agreement import agree, facts

        rank, options = self.rank, self.options
        assert rank is not None
        mine = facts(checkpoints.question, asdict(options), stored, others)
        everyone = agree(rank, problem, mine, self.predicted)
        self.hosts = [other["host"] for other in everyone]
        last, of_another = onwards(
            (other["checkpoints"] for other in everyone),
            ([(epoch, plan) for epoch, plan in other["handed_over"]] for other in everyone),
        )
        if self.resumes:
            # the launcher, if it has prepared this, has seen a checkpoint, on the disk of all ranks
            may_begin = self.prepared or not options.resume
            logs = rank.rank == 0
            must_go_on(self.out, last, epochs, may_begin, of_another, logs)
            checkpoints.go_on(last, others[last] if of_another else None)
            # a finished run that is to have more epochs has left these
            for path in self.out.glob("rank*.json"):  # of more ranks, too
                number = path.stem.removeprefix("rank")
                if number.isdecimal() and int(number) % rank.world == rank.rank:
                    path.unlink(missing_ok=True)
            (self.out / "weights.safetensors").unlink(missing_ok=True)
        return last

    def _failure(self, exit_code: int, message: str, where: str) -> Failure:
        return Failure(exit_code, message, where, self.number, self.server)

    def _unexpected(self, error: Exception) -> Failure:
        """Memory that ran out, a system that refuses, a peer that is gone, or a bug."""
        # spans add a note to what passes them: their lane may do other work by now
        spans = getattr(error, "__notes__", [])
        where = spans[0].removeprefix("in ") if spans else str(self.activity)
        reason = _own_words(error)
        if limit := no_more_processes(error):
            return self._failure(SpecError.exit_code, limit, where)
        if ran_out(error):
            device = self.rank.device if self.rank else torch.device("cpu")
            if not self.predicted:
                with suppress(GnnplanError, MemoryError):
                    self.predicted = predicted_memory(read(self.plan))
            said = f"memory ran out ({reason or type(error).__name__})"
            lines = [said, account(self.predicted), found(device), REMEDY]
            return self._failure(4, "\n".join(lines), where)
        if (refused := refusal(error)) is not None:
            remedy = remedy_of(refused)
            where_to = f"{refused.filename}: " if refused.filename else ""
            # a library's words have more than the system's: NCCL's name the memory that it lacks
            said = (refused.strerror if error is refused else None) or reason
            if "/dev/shm" in reason:
                remedy = "give the container more shared memory (--shm-size)"
            # as a file of ours that cannot be written (cannot_write): a restart would end the same
            return self._failure(SpecError.exit_code, f"{where_to}{said}; {remedy}", where)
        if isinstance(error, torch.distributed.DistError) or (
            isinstance(error, RuntimeError) and any(part in str(error) for part in LOST_PEER)
        ):
            message = f"its peers did not answer ({reason})"
            waited_s = self.rank.patience if self.rank else self.options.timeout_s
            return replace(self._failure(FAILED_WITH_OTHERS, message, where), waited_s=waited_s)
        return self._failure(4, f"{_describe(error)} ({self._keep_traceback(error)})", where)

    def _keep_traceback(self, error: Exception) -> str:
        """Where the traceback of a bug is, in words."""
        path = self.out / f"traceback.rank{self.number}.txt"
        try:
            make_folder(self.out)
            write_atomically(path, "".join(traceback.format_exception(error)), at_once=True)
        except GnnplanError as unwritable:
            return f"its traceback is lost: {unwritable}"
        return f"traceback in {path}"


def _own_words(error: Exception) -> str:
    """What an error of another library says, in a line.

    torch's DataLoader puts a sampler's traceback before the sampler's own words.
    """
    lines = str(error).strip().splitlines() or [""]
    return lines[-1 if "Original Traceback" in str(error) else 0][:FOREIGN_TEXT]


def _describe(error: Exception) -> str:
    """An error in a line; one without words by the place that raised it."""
    if str(error):
        return f"{type(error).__name__}: {error}"
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return type(error).__name__
    last = frames[-1]
    place = f"{last.name} ({Path(last.filename).name}, line {last.lineno})"
    return f"{type(error).__name__}, raised without a message in {place}"


def leave(code: int) -> NoReturn:
    """End this process now: Gloo's threads sometimes abort a regular exit."""
    with suppress(OSError, ValueError):  # nobody reads them any more
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


@contextmanager
def _reports(
    epochs: int, first: int, options: Options, rank: int
) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Tells the user of epochs on standard error, and TensorBoard where it is asked for."""
    line = (lambda row: None) if options.quiet else _progress_line(epochs, first)
    if options.tensorboard is None or rank != 0:
        yield line
        return
    with closing(Scalars(options.tensorboard, first)) as scalars:

        def report(row: dict[str, Any]) -> None:
            line(row)
            scalars.add(row)

        yield report


def _progress_line(epochs: int, first: int) -> Callable[[dict[str, Any]], None]:
    """Reports epochs on standard error: one line that renews itself on a terminal, else a few.

    first: epochs that an earlier process has trained.
    """
    started: float | None = None  # of the first epoch: set-up says nothing about those to come
    shown = 0.0

    def report(row: dict[str, Any]) -> None:
        nonlocal shown, started
        if started is None:
            started = time.monotonic() - row["epoch_s"]
        renews = sys.stderr.isatty()
        is_last = row["epoch"] == epochs
        if not is_last and time.monotonic() - shown < (0.1 if renews else 5.0):
            return
        shown = time.monotonic()
        scores = show_scores(row)
        left_s = (shown - started) / (row["epoch"] - first) * (epochs - row["epoch"])
        line = (
            f"epoch {row['epoch']}/{epochs}  loss {row['loss']:.4f}  {scores} "
            f" this epoch {show_time(row['epoch_s'])}, {left_s:.0f} s left"
        )
        say(line, end="" if renews and not is_last else "\n")

    return report


def main() -> None:
    """`python -m gnnplan.executor launch PLAN OUT OPTIONS`."""
    warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta state", UserWarning)
    plan, out, options = sys.argv[1:]
    # the launcher answers Ctrl-C; ranks end without a traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    die_with_parent()
    leave(work(Path(plan), Path(out), Options(**json.loads(options))))
