"""The process of one rank: from a plan to trained weights, or to an exit code and a message.

`gnnplan run` starts such processes itself (`work`), or torchrun or srun does (`follow`).
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed import HashStore, Store  # type: ignore[attr-defined]
from torch.distributed.elastic.utils.store import synchronize

from gnnplan import __version__
from gnnplan.executor.launch.failure import Failure, error_of, explain, name_of, roll_call
from gnnplan.executor.launch.preflight import SLACK, must_meet, must_start
from gnnplan.executor.launch.run_request import (
    Options,
    RunRequest,
    must_be_new,
    must_go_on,
    taken_over,
    write_run,
)
from gnnplan.executor.ranks.activity import Activity
from gnnplan.executor.ranks.checkpoint import Checkpoints, fingerprint, question, resumable
from gnnplan.executor.ranks.rank import READING_LEAST_S, Rank, backend_of, connect, place_rank
from gnnplan.executor.ranks.rendezvous import attempt, launcher_env, store_of_all
from gnnplan.planner.decision import plan as documents
from gnnplan.planner.gnn.workload import scores_of, show_scores
from gnnplan.planner.vocabulary.errors import GnnplanError, Infeasible, LostRank, Mismatch
from gnnplan.planner.vocabulary.files import Json, make_folder
from gnnplan.planner.vocabulary.progress import say
from gnnplan.planner.vocabulary.units import show_bytes, show_time

# field of metrics.jsonl -> tag in TensorBoard; scores have the tag METRIC/SPLIT
TAGS = {
    "loss": "loss",
    "epoch_s": "epoch/seconds",
    "bytes": "epoch/bytes sent",
    "peak_memory_bytes": "memory/peak bytes",
}
MUST_AGREE = ("gnnplan", "torch", "data", "plan", "options")
SHOWN = 4  # differing ranks that a message lists
Found = Mapping[str, Any]  # a rank's message before training; JSON values
WITHIN = 5  # [s] after which TensorBoard sees an epoch


class Ready(NamedTuple):
    """A rank's state before it meets the others."""

    asked: RunRequest
    checkpoints: Checkpoints
    stored: dict[int, Json]  # epoch that this rank can resume from -> `question` of its writer
    differs: list[str]  # where this server differs from the one that the plan was made for


class Agreement(NamedTuple):
    """The conclusion of all ranks before training."""

    hosts: list[str]  # name of every rank's host
    last: int  # the epoch that all ranks continue from; 0: they begin
    differs: list[str]  # where servers differ from those that the plan was made for


def refusal(process: int, error: GnnplanError) -> Found:
    """Return the message of a process that cannot train."""
    return {
        "rank": process,
        "host": socket.gethostname(),
        "refused": str(error),
        "exit_code": error.exit_code,
    }


def found(rank: Rank, ready: Ready) -> Found:
    """Return the message of a rank that can train: what all ranks must agree on, and its resources.

    Graph and version are fields of their own, so that an error can name them; the rest of the
    training's question is one fingerprint. preflight.py has checked host memory. The memory of a
    GPU is asked for here, as another process that asks would occupy some of it.
    """
    problem, predicted = ready.asked.problem, ready.asked.predicted
    question = ready.checkpoints.question
    asked = {name: value for name, value in question.items() if name not in ("gnnplan", "graph")}
    needs = communicators = free = 0.0
    if rank.device.type == "cuda":
        free = float(torch.cuda.mem_get_info(rank.device)[0])
        if problem.cluster.device.kind == "cuda":
            communicators = predicted.get("communicators", 0.0)
            # the CUDA context is allocated already
            needs = sum(predicted.values()) - communicators - predicted.get("runtime", 0.0)
    return {
        "rank": rank.rank,
        "server": problem.servers[rank.rank],
        "host": socket.gethostname(),
        "gnnplan": __version__,
        "torch": torch.__version__,
        "data": question["graph"],
        "plan": fingerprint(asked),
        "options": json.dumps(asdict(ready.asked.options), sort_keys=True),
        "checkpoints": [[epoch, fingerprint(plan)] for epoch, plan in ready.stored.items()],
        "differs": ready.differs,
        "device": str(rank.device),
        "card": rank.card,  # a launcher may call every rank's GPU cuda:0
        "needs": needs,  # [B] of GPU memory that the rank has yet to allocate
        "communicators": communicators,  # [B] in addition, if the backend is NCCL
        "free": free,  # [B] of GPU memory
    }


def agree(store: Store, env: Mapping[str, str], own: Found) -> Agreement:
    """Exchange this rank's message with all ranks. Raises what `compare` raises, on all ranks."""
    process, world = int(env.get("RANK", "0")), int(env.get("WORLD_SIZE", "1"))
    message = json.dumps(own).encode()
    # a rank reads the graph before, which may take it longer than another
    timeout_s = max(store.timeout.total_seconds(), READING_LEAST_S)  # type: ignore[attr-defined]
    messages = synchronize(store, message, process, world, "found", timeout_s)
    return compare([json.loads(words) for words in messages])


def compare(messages: Sequence[Found]) -> Agreement:
    """Return the conclusion from the messages of all ranks.

    Raises Mismatch if they would train different things, Infeasible if the predicted memory does
    not fit their GPUs, and the error of a rank that refuses.
    """
    if refusing := [rank for rank in messages if "refused" in rank]:
        said: dict[tuple[str, str], str] = {}  # ranks of one server report the same reason once
        for rank in refusing:
            why, host = rank["refused"], rank["host"]
            said.setdefault((host, why), f"rank {rank['rank']} ({host}) cannot train: {why}")
        raise error_of("\n".join(said.values()), refusing[0]["exit_code"])
    messages = sorted(messages, key=lambda rank: rank["rank"])
    first = messages[0]
    for name in MUST_AGREE:
        if differing := [rank for rank in messages if rank[name] != first[name]]:
            who = ", ".join(
                name_of(rank["rank"], rank["server"], rank["host"]) for rank in differing[:SHOWN]
            )
            raise Mismatch(
                f"ranks differ in {name}: {who} has {differing[0][name]}, rank 0 {first[name]};"
                " give all the same plan file, options and versions"
            )
    over_nccl = backend_of([rank["card"] for rank in messages]) == "nccl"
    by_place: dict[tuple[str, str, str], list[Found]] = {}
    for rank in messages:
        by_place.setdefault((rank["host"], rank["device"], rank["card"]), []).append(rank)
    for (host, device, _), here in by_place.items():
        needs = sum(rank["needs"] + over_nccl * rank["communicators"] for rank in here)
        free = min(rank["free"] for rank in here)
        if needs > SLACK * free:
            raise Infeasible(
                f"{len(here)} ranks need {show_bytes(needs)} more on {host} {device}, where"
                f" {show_bytes(free)} are free; stop the processes that fill it, or plan again for"
                " more servers or a smaller workload"
            )
    # of one plan: ranks with disks of their own may have an epoch of different ones
    common = set.intersection(*(set(map(tuple, rank["checkpoints"])) for rank in messages))
    last, _ = max(common, default=(0, ""))
    # each difference once, with the servers' names unless all servers have it
    hosts, differs = [rank["host"] for rank in messages], []
    for line in dict.fromkeys(line for rank in messages for line in rank["differs"]):
        there = dict.fromkeys(rank["host"] for rank in messages if line in rank["differs"])
        differs.append(line if there.keys() == set(hosts) else f"{line} ({', '.join(there)})")
    return Agreement(hosts, last, differs)


# -- the process -----------------------------------------------------------------------------------


def work(out: Path, activity: Activity) -> Failure | None:
    """Be one of the ranks that `launcher.begin` started for the run in this folder."""
    warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta state", UserWarning)
    options = Options.read(out / "options.json")
    return _Process(out / "plan.json", out, options, activity).run()


def follow(plan: Path, out: Path, options: Options, choice: str | None = None) -> int:
    """Be the rank that torchrun or srun started as this process.

    choice: the candidate of the plan to train; None: the best. Returns the exit code. If the rank
    fails, it prints the reason to standard error.
    """
    process = _Process(plan, out, options, choice=choice)
    failure = process.run()
    if failure is None:
        return 0
    host = socket.gethostname()
    where = host if process.server is None else f"server {process.server}, {host}"
    message = f"error: rank {process.number} ({where}) in {failure.activity}: {failure.message}"
    say(message + process.roll_call(failure))
    return LostRank.exit_code if failure.is_consequence else failure.exit_code


class _Process:
    """One attempt of a rank to train, with the state that an error message needs."""

    def __init__(
        self,
        plan: Path,
        out: Path,
        options: Options,
        activity: Activity | None = None,
        choice: str | None = None,
    ) -> None:
        """activity: of a rank of our launcher, which has written the plan and the options into
        `out`."""
        self.plan, self.out, self.options, self.choice = plan, out, options, choice
        self.prepared, self.activity = activity is not None, activity or Activity()
        self.restarted = attempt(os.environ) != "0"
        self.resumes = options.resume or self.restarted
        self.number = int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")))
        self.server: int | None = None  # known once the plan has been read
        # what this rank knows of the others: nothing before all ranks have met
        self.roll_call: Callable[[Failure], str] = lambda failure: ""
        self.rank: Rank | None = None
        self.predicted: dict[str, float] = {}

    def run(self) -> Failure | None:
        """Train to the end; return None, or the failure."""
        try:
            self._train()
            return None
        except Exception as error:
            if not self.predicted:  # memory may run out while the graph is read
                with suppress(GnnplanError, MemoryError):
                    plan = documents.read(self.plan)
                    self.predicted = RunRequest(plan, self.out, self.options).predicted
            path = self.out / f"traceback.rank{self.number}.txt"
            return explain(error, str(self.activity), path, self.rank, self.predicted)

    def _train(self) -> None:
        self.activity.begin("phase", "start")
        env, options = launcher_env(), self.options
        is_alone = env.get("WORLD_SIZE", "1") == "1"
        try:
            ready = self._get_ready()
        except GnnplanError as error:
            if not (self.prepared or is_alone):
                with suppress(GnnplanError):  # no connection, or the same refusal comes back
                    must_meet()
                    agree(store_of_all(options.timeout_s), env, refusal(self.number, error))
            raise
        from gnnplan.executor.train import train  # only ranks need it, the launcher does not

        asked, checkpoints, problem = ready.asked, ready.checkpoints, ready.asked.problem
        rank = self.rank = place_rank(options.timeout_s, problem)
        own = found(rank, ready)
        store: Store = HashStore() if is_alone else store_of_all(options.timeout_s)
        agreed = agree(store, env, own)
        if not is_alone:
            connect(rank, store)
        hosts = agreed.hosts
        names = list(map(name_of, range(rank.world), problem.servers, hosts))
        here = [other for other, host in enumerate(hosts) if host == hosts[rank.rank]]
        self.roll_call = partial(roll_call, store, rank.rank, names, here, self.out)
        if env.get("RANK", "0") == "0":
            for line in agreed.differs:
                say(f"note: {line}")
        rank.gradient_errors, rank.recorder.activity = options.gradient_errors, self.activity
        # staleness errors bound gradient errors, so they are recorded with them
        rank.staleness_errors = options.staleness_errors or rank.gradient_errors
        epochs, first = asked.epochs, agreed.last
        if self.resumes:
            self._resume(ready, epochs, agreed)
        make_folder(self.out)
        # per server, as each may have a disk of its own
        if not self.prepared and env.get("LOCAL_RANK", "0") == "0":
            write_run(self.out, asked.document, options, first)
        if checkpoints.before is not None and rank.rank == 0:
            say(f"note: {taken_over(checkpoints.before, asked.settled, first)}")
        self.activity.begin("phase", "set-up")
        with ExitStack() as stack:
            reports = [] if options.quiet else [_progress_line(epochs, first)]
            if options.tensorboard and rank.rank == 0:
                reports.append(stack.enter_context(tensorboard(options.tensorboard, first)))
            train(
                rank,
                problem,
                asked.settled,
                self.out,
                epochs,
                options.eval_every,
                reports,
                checkpoints,
            )
        # All ranks must have written before one ends and its caller reads their files. Not torch's
        # barrier, which would have to guess this rank's GPU.
        rank.groups.await_all(None)
        rank.settle()
        rank.close()

    def _get_ready(self) -> Ready:
        """Read the plan, the graph and the checkpoints, and check this machine."""
        out, options = self.out, self.options
        document, loaded = documents.read(self.plan, of_any_version=True), None
        if self.choice is not None:
            from gnnplan.planner.decision.plan import take  # rarely needed

            problem = documents.question(document)
            document = take(document, problem, self.choice)
            loaded = problem.placed(documents.placement(document))
        asked = RunRequest(document, out, options, launched=not self.prepared, loaded=loaded)
        self.predicted = asked.predicted
        differs: list[str] = []
        if not self.prepared:
            if not options.resume:
                # ranks write only after all have met, so a run in `out` is another one, or an
                # earlier attempt of this one
                must_be_new(out, document if self.restarted else None)
            differs = [str(row) for row in must_start(asked)]
        training = question(asked.problem, asked.settled)
        if self.number < asked.problem.ranks:  # maps the launcher's number to the plan's rank
            self.number = asked.problem.by_gpu[self.number]
            self.server = asked.problem.servers[self.number]
        checkpoints = Checkpoints(out, self.number, options.checkpoint_every, training)
        # before ranks meet: reading large files may take longer than peers wait
        stored = resumable(out, [self.number], training, say) if self.resumes else {}
        return Ready(asked, checkpoints, stored, differs)

    def _resume(self, ready: Ready, epochs: int, agreed: Agreement) -> None:
        """Continue from the epoch that all ranks have agreed on. Raises SpecError."""
        assert self.rank is not None
        # our launcher has checked for a checkpoint, as all ranks share its disk
        may_begin = self.prepared or not self.options.resume
        last, out, rank, writer = agreed.last, self.out, self.rank, ready.stored.get(agreed.last)
        before = None if writer == ready.checkpoints.question else writer
        must_go_on(out, last, epochs, before, may_begin, logs=rank.rank == 0)
        ready.checkpoints.go_on(last, before)
        # a finished run that continues for more epochs has left these files
        for path in out.glob("rank*.json"):  # an earlier plan may have had more ranks
            number = path.stem.removeprefix("rank")
            if number.isdecimal() and int(number) % rank.world == rank.rank:
                path.unlink(missing_ok=True)
        (out / "weights.safetensors").unlink(missing_ok=True)


def _progress_line(epochs: int, first: int) -> Callable[[Json], None]:
    """Return a function that reports epochs on standard error: on a terminal in one line that it
    overwrites, else in a line every 5 s.

    first: epochs that an earlier process has trained.
    """
    started: float | None = None  # start of the first epoch: set-up does not predict later epochs
    shown = 0.0

    def report(row: Json) -> None:
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


@contextmanager
def tensorboard(folder: str, first: int) -> Iterator[Callable[[Json], None]]:
    """Yield a function that writes a row of metrics.jsonl into an event file of TensorBoard.

    first: epochs that an earlier process has trained; TensorBoard hides its later epochs. Raises
    SpecError if the folder cannot be made.
    """
    from torch.utils.tensorboard import SummaryWriter  # its import takes 0.5 s

    make_folder(Path(folder))
    purged = first + 1 if first else None
    with SummaryWriter(folder, purge_step=purged, flush_secs=WITHIN) as writer:

        def add(row: Json) -> None:  # epochs without evaluation have no scores on val and test
            parts = {name: name.partition("_") for name in scores_of(row)}
            scores = {name: f"{metric}/{part}" for name, (part, _, metric) in parts.items()}
            for field, tag in (TAGS | scores).items():
                if row.get(field) is not None:
                    writer.add_scalar(tag, row[field], row["epoch"])

        yield add
