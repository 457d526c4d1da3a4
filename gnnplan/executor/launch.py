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
from pathlib import Path
from typing import Any

import torch

from gnnplan.planner.errors import GnnplanError, LostRank, SpecError
from gnnplan.planner.graph import Graph
from gnnplan.planner.job import Job
from gnnplan.planner.plan import chosen, question, read
from gnnplan.planner.strategies import Strategy
from gnnplan.planner.units import show_time

FAILED_WITH_OTHERS = 75  # a rank that stopped because its peers did


def prepare(plan: Path) -> tuple[dict[str, Any], Job, Strategy]:
    """The plan, checked against its data and against training at all. Raises SpecError, Mismatch."""
    document = read(plan)
    job = question(document)
    if not isinstance(job.graph, Graph):
        raise SpecError(f"{plan}: the graph {job.stats.name} is known by statistics only and cannot be trained; plan with a graph file")
    if job.stats.classes == 0 or job.stats.train_vertices == 0:
        raise SpecError(f"{plan}: the graph {job.stats.name} has no labelled training vertices; it can be planned and simulated, not trained")
    strategy = chosen(document).settle(job)
    strategy.check(job)
    return document, job, strategy


def started_by_launcher() -> bool:
    """torchrun or srun has started this very process as one of several ranks."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ or int(os.environ.get("SLURM_NTASKS", "1")) > 1


def start(plan: Path, out: Path, epochs: int, eval_every: int, timeout_s: float, ranks: int) -> None:
    """Start `ranks` local ranks and wait for them. Raises LostRank naming the one that failed first."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=ranks, run_id=uuid.uuid4().hex, rdzv_backend="c10d", rdzv_endpoint="127.0.0.1:0",
        max_restarts=0, monitor_interval=0.2, start_method="spawn", local_addr="127.0.0.1",
    )  # fmt: skip
    arguments = ["-m", "gnnplan.executor.launch", str(plan), str(out), str(epochs), str(eval_every), str(timeout_s)]
    _quiet()
    try:
        elastic_launch(config, sys.executable)(*arguments)
    except ChildFailedError as error:
        raise _lost(error.failures, out) from None


def _quiet() -> None:
    import logging

    for name in ("torch.distributed.elastic", "torch.distributed.launcher"):
        logging.getLogger(name).setLevel(logging.CRITICAL)


def _lost(failures: dict[int, Any], out: Path) -> GnnplanError:
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
    how = f"killed by {signal.Signals(-failure.exitcode).name}" if failure.exitcode < 0 else said.get("message", f"exit code {failure.exitcode}")
    where = f" in {said['doing']}" if "doing" in said else ""
    lines = (out / "metrics.jsonl").read_text().count("\n") if (out / "metrics.jsonl").exists() else 0
    return LostRank(f"rank {rank} was lost{where}: {how}. All ranks were stopped; {lines} finished epochs are in {out / 'metrics.jsonl'}")


def work(plan: Path, out: Path, epochs: int, eval_every: int, timeout_s: float) -> int:
    """Be one rank, to the end. Returns the exit code; leaves error.rank<r>.json behind where it fails."""
    from gnnplan.executor.train import train
    from gnnplan.executor.worker import open_rank

    rank = None
    try:
        _, job, strategy = prepare(plan)
        rank = open_rank(timeout_s=timeout_s)
        if rank.world != job.ranks:
            raise SpecError(f"the plan is for {job.ranks} ranks, but {rank.world} were started; plan again with --ranks {rank.world}")
        train(rank, job, strategy, out, epochs, eval_every, _progress(epochs))
        rank.close()
        return 0
    except GnnplanError as error:
        _note(out, rank, error.exit_code, str(error))
        return error.exit_code
    except Exception as error:
        lost = isinstance(error, (torch.distributed.DistBackendError, RuntimeError)) and any(
            word in str(error) for word in ("onnection", "Socket", "socket", "gloo", "timed out", "Timed out", "NCCL", "peer")
        )
        if lost:
            message = f"its peers did not answer ({str(error).splitlines()[0][:200]})"
            _note(out, rank, 4, message)
            time.sleep(2.0)  # let the launcher see first who failed by itself
            return FAILED_WITH_OTHERS
        traceback.print_exc()
        _note(out, rank, 4, f"{type(error).__name__}: {error}")
        return 4


def _note(out: Path, rank: Any, code: int, message: str) -> None:
    number = rank.rank if rank else int(os.environ.get("RANK", "0"))
    doing = rank.doing if rank else "start"
    (out / f"error.rank{number}.json").write_text(json.dumps({"exit_code": code, "message": message, "doing": doing}))


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
        print(f"\r\x1b[K{line}" if sys.stderr.isatty() else line, end="" if sys.stderr.isatty() and not last else "\n", file=sys.stderr, flush=True)

    return report


def main() -> None:
    warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta state", UserWarning)
    plan, out, epochs, eval_every, timeout = sys.argv[1:]
    code = work(Path(plan), Path(out), int(epochs), int(eval_every), float(timeout))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # Gloo's threads sometimes abort a regular exit


if __name__ == "__main__":
    main()
