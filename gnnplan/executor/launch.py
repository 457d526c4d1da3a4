"""From a plan to ranks: starts local ranks through torch's elastic launcher, or is one that torchrun or Slurm started."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
import uuid
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch

from gnnplan.planner.errors import GnnplanError, LostRank, SpecError
from gnnplan.planner.files import make_folder, write_atomically
from gnnplan.planner.graph import Graph
from gnnplan.planner.job import Job
from gnnplan.planner.plan import chosen, question, read, write
from gnnplan.planner.strategies import Strategy
from gnnplan.planner.units import show_bytes, show_time

FAILED_WITH_OTHERS = 75  # a rank that stopped because its peers did
GRACE = 5  # [s] that a rank has to end when it is told to
LOST_PEER = ("onnection", "ocket", "gloo", "imed out", "NCCL", "peer")  # words of torch.distributed's errors
LEAST_MEMORY = 200e6  # [B] that a process with torch fills


@dataclass(frozen=True)
class Options:
    """How a plan is run."""

    epochs: int | None = None  # None: the workload's
    eval_every: int = 10
    timeout_s: float = 30.0  # that a rank waits for its peers
    staleness_errors: bool = False


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
        raise SpecError(f"{out} holds a run already; give another --out, or remove it")


def must_fit_here(job: Job) -> None:
    """Raises SpecError where this machine cannot hold as many processes."""
    from gnnplan.executor.measure import free_memory

    room = free_memory()
    if job.ranks * LEAST_MEMORY > room:
        raise SpecError(f"the plan is for {job.ranks:,} ranks, but this machine has memory for {int(room / LEAST_MEMORY):,} "
                        f"({show_bytes(room)} free, at least {show_bytes(LEAST_MEMORY)} each); plan again with --ranks, or start it with "
                        "torchrun on several servers")  # fmt: skip


def start(plan: Path, out: Path, options: Options, ranks: Sequence[int]) -> None:
    """Start local ranks, in the order of their GPUs, and wait for them; leaves none behind. Raises LostRank naming the one that failed
    first."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    for note in out.glob("error.rank*.json"):  # of an attempt before this one
        note.unlink()
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=len(ranks), run_id=uuid.uuid4().hex, rdzv_backend="c10d", rdzv_endpoint="127.0.0.1:0",
        max_restarts=0, monitor_interval=0.2, start_method="spawn", local_addr="127.0.0.1",
    )  # fmt: skip
    arguments = ["-m", "gnnplan.executor.launch", str(plan), str(out), json.dumps(asdict(options))]
    _quiet()
    try:
        with _patience(GRACE):
            elastic_launch(config, sys.executable)(*arguments)
    except ChildFailedError as error:
        raise _lost({ranks[process]: failure for process, failure in error.failures.items()}, out, len(ranks), options.timeout_s) from None
    except SignalException as error:
        if error.sigval == signal.SIGINT:
            raise KeyboardInterrupt from None
        raise SystemExit(128 + error.sigval) from None


@contextmanager
def _patience(seconds: int) -> Iterator[None]:
    """Between SIGTERM and SIGKILL; torch's launcher always waits 30 s, whatever shutdown_timeout says."""
    from torch.distributed.elastic.multiprocessing.api import PContext

    close = PContext.close
    PContext.close = lambda self, death_sig=None, timeout=30: close(self, death_sig, min(timeout, seconds))
    try:
        yield
    finally:
        PContext.close = close


def _quiet() -> None:
    import logging

    for name in ("torch.distributed.elastic", "torch.distributed.launcher"):
        logging.getLogger(name).setLevel(logging.CRITICAL)


def _lost(failures: dict[int, Any], out: Path, ranks: int, timeout_s: float) -> GnnplanError:
    """The rank that failed by itself, not those that stopped because it did."""
    def blame(item: tuple[int, Any]) -> tuple[int, int, float]:
        code = item[1].exitcode
        return (code == FAILED_WITH_OTHERS or code == -signal.SIGTERM, code >= 0, item[1].timestamp)

    rank, failure = min(failures.items(), key=blame)
    note = out / f"error.rank{rank}.json"
    said = json.loads(note.read_text()) if note.exists() else {}
    if said.get("exit_code") in (1, 2, 3):
        error = GnnplanError(said["message"])
        error.exit_code = said["exit_code"]
        return error
    code = failure.exitcode
    how = f"killed by {signal.Signals(-code).name}" if code < 0 else said.get("message", f"exit code {code}")
    where = f" in {said['doing']}" if "doing" in said else ""
    lines = (out / "metrics.jsonl").read_text().count("\n") if (out / "metrics.jsonl").exists() else 0
    ended = f"All ranks were stopped; {lines} finished epochs are in {out / 'metrics.jsonl'}"
    notes = {r: json.loads(path.read_text()) for r in range(ranks) if (path := out / f"error.rank{r}.json").exists()}
    waited = next((r for r, note in notes.items() if "imed out" in note["message"]), None)
    if waited is not None and len(notes) < ranks and not said:  # nobody died by itself: someone stopped answering, and was killed at last
        silent = " or ".join(str(r) for r in range(ranks) if r not in notes)
        return LostRank(f"rank {silent} stopped answering: rank {waited} waited {timeout_s:g} s in {notes[waited]['doing']}. {ended}")
    return LostRank(f"rank {rank} was lost{where}: {how}. {ended}")


@dataclass(frozen=True)
class Failure:
    """How a rank ended before its time, as it says itself."""

    exit_code: int
    message: str
    doing: str  # the operation it was in
    rank: int


def work(plan: Path, out: Path, options: Options) -> int:
    """Be one of the ranks that `start` started. Returns the exit code; leaves error.rank<r>.json behind where it fails."""
    failure = _attempt(plan, out, options, new=False)
    if failure is None:
        return 0
    with suppress(GnnplanError):  # a full disk must not hide the failure
        write_atomically(out / f"error.rank{failure.rank}.json", json.dumps(asdict(failure)))
    if failure.exit_code == FAILED_WITH_OTHERS:
        time.sleep(2.0)  # let the launcher see first who failed by itself
    return failure.exit_code


def follow(plan: Path, out: Path, options: Options) -> int:
    """Be the rank that torchrun or srun made of this process, and say on standard error what went wrong. Returns the exit code."""
    failure = _attempt(plan, out, options, new=True)
    if failure is None:
        return 0
    sys.stderr.write(f"error: rank {failure.rank} in {failure.doing}: {failure.message}\n")  # in one piece
    return 4 if failure.exit_code == FAILED_WITH_OTHERS else failure.exit_code


def _attempt(plan: Path, out: Path, options: Options, new: bool) -> Failure | None:
    """Train as one rank, to the end. `new`: nobody has prepared `out` yet."""
    from gnnplan.executor.train import train
    from gnnplan.executor.worker import open_rank

    rank, number = None, int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")))
    try:
        document, job, strategy = prepare(plan)
        number = job.by_gpu[number] if number < job.ranks else number
        if new:
            must_be_new(out)  # rank 0 writes only when all ranks have met, so what is here is another run's
        rank = open_rank(options.timeout_s, job)
        rank.staleness_errors = options.staleness_errors
        if rank.world != job.ranks:
            raise SpecError(f"the plan is for {job.ranks} ranks, but {rank.world} were started; start {job.ranks}, "
                            f"or plan again with --ranks {rank.world}")  # fmt: skip
        make_folder(out)
        if new and rank.rank == 0:
            write(out / "plan.json", document)
        epochs = options.epochs or job.workload.epochs
        train(rank, job, strategy, out, epochs, options.eval_every, _progress(epochs))
        if rank.world > 1:
            torch.distributed.barrier()  # whoever is done first may read what all ranks have left
        rank.close()
        return None
    except GnnplanError as error:
        return Failure(error.exit_code, str(error), rank.doing if rank else "start", number)
    except Exception as error:
        doing = rank.doing if rank else "start"
        if isinstance(error, RuntimeError) and any(word in str(error) for word in LOST_PEER):
            return Failure(FAILED_WITH_OTHERS, f"its peers did not answer ({str(error).splitlines()[0][:200]})", doing, number)
        traceback.print_exc()
        return Failure(4, f"{type(error).__name__}: {error}", doing, number)


def leave(code: int) -> NoReturn:
    """End this process now: Gloo's threads sometimes abort a regular exit."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _progress(epochs: int) -> Any:
    """A line that renews itself on a terminal, else a line now and then; on standard error."""
    started, shown = time.monotonic(), 0.0

    def report(row: dict[str, Any]) -> None:
        nonlocal shown
        last = row["epoch"] == epochs
        if not last and time.monotonic() - shown < (0.1 if sys.stderr.isatty() else 5.0):
            return
        shown = time.monotonic()
        accuracy = "  ".join(f"{k} {row[f'{k}_accuracy']:.3f}" for k in ("train", "val", "test") if row[f"{k}_accuracy"] is not None)
        left = (shown - started) / row["epoch"] * (epochs - row["epoch"])
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


if __name__ == "__main__":
    main()
