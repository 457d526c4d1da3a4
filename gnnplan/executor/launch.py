"""From a plan to ranks: starts local ranks through torch's elastic launcher, or is one that torchrun or Slurm started."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, NoReturn

import torch
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from gnnplan.executor import doing
from gnnplan.executor.blame import FAILED_WITH_OTHERS, Failure, blame, forget, note
from gnnplan.executor.starved import REMEDY, account, found, killings, ran_out
from gnnplan.planner.errors import GnnplanError, SpecError
from gnnplan.planner.files import MOST_SHOWN, make_folder, read_bytes, write_atomically
from gnnplan.planner.graph import Graph
from gnnplan.planner.job import Job
from gnnplan.planner.plan import chosen, question, read, write
from gnnplan.planner.strategies import Strategy
from gnnplan.planner.units import show_bytes, show_time

LOST_PEER = ("onnection", "ocket", "gloo", "imed out", "NCCL", "peer")  # words of torch.distributed's errors
MAX_OPTIONS = 1 << 16  # [B]
MOST = 10**9  # epochs, restarts, seconds
LEAST_MEMORY = 200e6  # [B] that a process with torch fills


@dataclass(frozen=True)
class Options:
    """How a plan is run."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    epochs: Annotated[int, Field(ge=1, le=MOST)] | None = None  # None: the workload's
    eval_every: Annotated[int, Field(ge=0, le=MOST)] = 10
    timeout_s: Annotated[float, Field(ge=1.0, le=MOST)] = 30.0  # that a rank waits for its peers
    staleness_errors: bool = False
    checkpoint_every: Annotated[int, Field(ge=0, le=MOST)] = 10  # epochs; 0: never
    resume: bool = False  # go on from the last checkpoint in the run's folder
    restarts: Annotated[int, Field(ge=0, le=MOST)] = 0  # of all ranks, when one is lost

    @classmethod
    def of(cls, out: Path, given: Mapping[str, Any], resume: bool) -> Options:
        """Those given (None: not), the rest as the run has them that is to be gone on with, or by default. Raises SpecError."""
        path, before = out / "options.json", {}
        if resume and path.exists():
            remedy = "remove it, and give its options again"
            written = read_bytes(path, MAX_OPTIONS, remedy)
            try:
                told = TypeAdapter(cls).validate_json(written, strict=True)
            except ValidationError as error:
                first = error.errors()[0]
                what = ".".join(str(name)[:MOST_SHOWN] for name in first["loc"]) or "the file"
                raise SpecError(f"{path} is damaged ({what}: {first['msg']}); {remedy}") from error
            before = {name: value for name, value in asdict(told).items() if name not in ("resume", "restarts")}
        return cls(**before | {name: value for name, value in given.items() if value is not None}, resume=resume)

    def write(self, out: Path) -> None:
        write_atomically(out / "options.json", json.dumps(asdict(self)))


@dataclass(frozen=True)
class Emulated:
    """Servers played by this machine, with cards of `rate` [B/s]; None: unshaped."""

    rate: float | None


def prepare(plan: Path) -> tuple[dict[str, Any], Job, Strategy]:
    """The plan, checked against its data and against training at all. Raises SpecError, Mismatch."""
    document = read(plan)
    job = question(document)
    if not isinstance(job.graph, Graph):
        raise SpecError(f"{plan}: the graph {job.stats.name} is known by statistics only and cannot be trained; plan with a graph file")
    if job.stats.classes == 0 or job.stats.train_vertices == 0:
        raise SpecError(f"{plan}: the graph {job.stats.name} has no labelled training vertices; it can be planned and simulated, "
                        "not trained; plan with a graph that has y")
    strategy = chosen(document).settle(job)
    strategy.check(job)
    return document, job, strategy


def filled(document: Mapping[str, Any]) -> dict[str, float]:
    """Memory of the fullest rank by use [B], as a plan predicts it; empty where someone has cut it out."""
    return dict(document["best"].get("predicted", {}).get("memory", {}))


def started_by_launcher() -> bool:
    """torchrun or srun has started this very process as one of several ranks; a batch script around them has not."""
    env = os.environ
    if "RANK" not in env or "WORLD_SIZE" not in env:
        return env.get("SLURM_STEP_NUM_TASKS", "1") != "1"
    if not (env["RANK"].isdecimal() and env["WORLD_SIZE"].isdecimal() and int(env["RANK"]) < int(env["WORLD_SIZE"])):
        raise SpecError(f"RANK is {env['RANK']!r} and WORLD_SIZE {env['WORLD_SIZE']!r}: not a rank of so many; use torchrun, or unset both")
    if absent := [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in env]:
        raise SpecError(f"RANK and WORLD_SIZE are set, but {' and '.join(absent)} not; start ranks with torchrun, or unset both")
    return True


def must_be_new(out: Path) -> None:
    """Raises SpecError where a run has left something."""
    if any((out / name).exists() for name in ("metrics.jsonl", "rank0.json", "weights.safetensors")):
        raise SpecError(f"{out} holds a run already; give another --out, go on with it (--resume {out}), or remove it")


def must_go_on(out: Path, last: int, epochs: int, restarted: bool = False) -> None:
    """Raises SpecError where there is no checkpoint to go on from, or nothing left to do. `restarted`: from none is from the beginning."""
    if not last and not restarted:
        raise SpecError(f"{out} has no checkpoint that all ranks have finished; they are written every --checkpoint-every epochs. "
                        "Start anew with another --out")  # fmt: skip
    if last > epochs:
        raise SpecError(f"{out} has a checkpoint of epoch {last}, but only {epochs} epochs are asked for; use --epochs {last} or more")


def last_of(out: Path, job: Job, strategy: Strategy) -> int:
    """The last checkpoint of all ranks of a run on this machine; 0: none. Raises SpecError where it is of another training."""
    from gnnplan.executor.checkpoint import Checkpoints, latest, question

    asked = question(job, strategy)
    return latest(Checkpoints(out, rank, 0, asked).epochs() for rank in range(job.ranks))


def must_fit_here(job: Job) -> None:
    """Raises SpecError where this machine cannot hold as many processes."""
    from gnnplan.executor.memory import free_memory

    room = free_memory()
    if job.ranks * LEAST_MEMORY > room:
        raise SpecError(f"the plan is for {job.ranks:,} ranks, but this machine has memory for {int(room / LEAST_MEMORY):,} "
                        f"({show_bytes(room)} free, at least {show_bytes(LEAST_MEMORY)} each); plan again with --ranks, or start it with "
                        "torchrun on several servers")  # fmt: skip


def start(plan: Path, out: Path, options: Options, job: Job, emulate: Emulated | None = None) -> None:
    """Start local ranks, in the order of their GPUs, and wait for them; leaves none behind. `emulate`: servers are namespaces (lab.py).
    Raises LostRank naming the one that failed first, when no restart is left."""
    from gnnplan.executor import agent, lab

    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    forget(out)
    ranks, killed, predicted = job.by_gpu, killings(), filled(read(plan))

    def whose(failures: dict[int, Any]) -> GnnplanError:
        starved = f"{account(predicted)}\n{REMEDY}" if killings() > killed else ""
        return blame({ranks[process]: failure for process, failure in failures.items()}, out, job.servers, options.timeout_s, starved)

    def again(error: GnnplanError, left: int) -> None:
        from gnnplan.executor.checkpoint import latest, stored

        forget(out)
        last = latest(stored(out, ranks).values())
        where = f"epoch {last}" if last else "the beginning"
        sys.stderr.write(f"{error}\nstarting all ranks anew from {where} (restarts left after this one: {left - 1})\n")

    arguments = ["-m", "gnnplan.executor", "launch", str(plan), str(out), json.dumps(asdict(options))]
    try:
        if emulate is None:
            agent.run(arguments, len(ranks), options.restarts, whose, again)
        else:
            places = [job.servers[rank] for rank in ranks]
            lab.run(arguments, job.cluster.servers, places, emulate.rate, options.restarts, whose, again)
    finally:
        doing.forget(out)


def work(plan: Path, out: Path, options: Options) -> int:
    """Be one of the ranks that `start` started. Returns the exit code; leaves error.rank<r>.json behind where it fails."""
    failure = _attempt(plan, out, options, new=False)
    if failure is None:
        return 0
    with suppress(OSError):  # a full disk must not hide the failure
        note(out, failure)
    if failure.exit_code == FAILED_WITH_OTHERS:
        time.sleep(2.0)  # let the launcher see first who failed by itself
    return failure.exit_code


def follow(plan: Path, out: Path, options: Options) -> int:
    """Be the rank that torchrun or srun made of this process, and say on standard error what went wrong. Returns the exit code."""
    failure = _attempt(plan, out, options, new=True)
    if failure is None:
        return 0
    where = socket.gethostname() if failure.server is None else f"server {failure.server}, {socket.gethostname()}"
    sys.stderr.write(f"error: rank {failure.rank} ({where}) in {failure.doing}: {failure.message}\n")  # in one piece
    return 4 if failure.exit_code == FAILED_WITH_OTHERS else failure.exit_code


def _attempt(plan: Path, out: Path, options: Options, new: bool) -> Failure | None:
    """Train as one rank, to the end. `new`: nobody has prepared `out` yet."""
    from gnnplan.executor.checkpoint import Checkpoints, latest, question
    from gnnplan.executor.preflight import agree, facts, must_meet
    from gnnplan.executor.train import train
    from gnnplan.executor.worker import attempt, open_rank

    at, rank, number = doing.Doing(), None, int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")))
    restarted = attempt() != "0"
    server: int | None = None
    predicted: dict[str, float] = {}
    try:
        at.begin("phase", "start")
        document, job, strategy = prepare(plan)
        predicted = filled(document)
        if number < job.ranks:
            number = job.by_gpu[number]
            server = job.servers[number]
        if new and not (options.resume or restarted):
            must_be_new(out)  # rank 0 writes only when all ranks have met, so what is here is another run's
        if not new:
            make_folder(out)
            at = doing.Doing(doing.seen(out, number))
            at.begin("phase", "start")
        must_meet()
        rank = open_rank(options.timeout_s, job)
        rank.staleness_errors, rank.doing = options.staleness_errors, at
        if rank.world != job.ranks:
            raise SpecError(f"the plan is for {job.ranks} ranks, but {rank.world} were started; start {job.ranks}, "
                            f"or plan again with --ranks {rank.world}")  # fmt: skip
        checkpoints = Checkpoints(out, rank.rank, options.checkpoint_every, question(job, strategy))
        mine = facts(checkpoints.question, asdict(options), checkpoints.epochs() if options.resume or restarted else [])
        epochs, last = options.epochs or job.workload.epochs, latest(each["checkpoints"] for each in agree(rank, job, mine, predicted))
        if options.resume or restarted:
            must_go_on(out, last, epochs, restarted)
            checkpoints.go_on(last)
            for name in (f"rank{rank.rank}.json", "weights.safetensors"):  # of a run that was done, and is to have more epochs
                (out / name).unlink(missing_ok=True)
        make_folder(out)
        if new and os.environ.get("LOCAL_RANK", "0") == "0":  # on every server, which may have a disk of its own
            write(out / "plan.json", document)
            options.write(out)
        at.begin("phase", "set-up")
        train(rank, job, strategy, out, epochs, options.eval_every, _progress(epochs, last), checkpoints)
        if rank.world > 1:
            torch.distributed.barrier()  # whoever is done first may read what all ranks have left
        rank.close()
        return None
    except GnnplanError as error:
        return Failure(error.exit_code, str(error), str(at), number, server)
    except Exception as error:
        where = error.__notes__[0].removeprefix("in ") if hasattr(error, "__notes__") else str(at)
        if ran_out(error):
            device = rank.device if rank else torch.device("cpu")
            with suppress(GnnplanError, MemoryError):
                predicted = predicted or filled(read(plan))
            said = f"memory ran out ({str(error).splitlines()[0][:200] if str(error) else type(error).__name__})"
            return Failure(4, "\n".join([said, account(predicted), found(device), REMEDY]), where, number, server)
        if isinstance(error, torch.distributed.DistError) or (isinstance(error, RuntimeError) and any(w in str(error) for w in LOST_PEER)):
            return Failure(FAILED_WITH_OTHERS, f"its peers did not answer ({str(error).splitlines()[0][:200]})", where, number, server)
        traceback.print_exc()
        return Failure(4, f"{type(error).__name__}: {error}", where, number, server)


def leave(code: int) -> NoReturn:
    """End this process now: Gloo's threads sometimes abort a regular exit."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _progress(epochs: int, first: int) -> Any:
    """A line that renews itself on a terminal, else a line now and then; on standard error."""
    started, shown = time.monotonic(), 0.0

    def report(row: dict[str, Any]) -> None:
        nonlocal shown
        last = row["epoch"] == epochs
        if not last and time.monotonic() - shown < (0.1 if sys.stderr.isatty() else 5.0):
            return
        shown = time.monotonic()
        accuracy = "  ".join(f"{k} {row[f'{k}_accuracy']:.3f}" for k in ("train", "val", "test") if row[f"{k}_accuracy"] is not None)
        left = (shown - started) / (row["epoch"] - first) * (epochs - row["epoch"])
        line = f"epoch {row['epoch']}/{epochs}  loss {row['loss']:.4f}  {accuracy}  {show_time(row['epoch_s'])}/epoch  {left:.0f} s left"
        renew = sys.stderr.isatty()
        print(f"\r\x1b[K{line}" if renew else line, end="" if renew and not last else "\n", file=sys.stderr, flush=True)

    return report


def main() -> None:
    warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta state", UserWarning)
    from gnnplan.executor.worker import die_with_parent

    plan, out, options = sys.argv[1:]
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C is the launcher's to answer; ranks end without a traceback
    die_with_parent()
    leave(work(Path(plan), Path(out), Options(**json.loads(options))))
