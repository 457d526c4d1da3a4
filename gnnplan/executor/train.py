"""The training loop of one rank: steps under the schedule's names, metrics, evaluation, and what stays on disk."""

from __future__ import annotations

import json
import math
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from safetensors.torch import save
from torch import Tensor

from gnnplan.executor.data import scores
from gnnplan.executor.kernels import Shapes, has_onednn
from gnnplan.executor.learner import Gradients, Learner
from gnnplan.executor.memory import MemoryWatch, resident
from gnnplan.executor.models import Net
from gnnplan.executor.strategies import minibatch, open_worker, p3
from gnnplan.executor.worker import Rank, now
from gnnplan.planner.errors import GnnplanError
from gnnplan.planner.files import write_atomically
from gnnplan.planner.job import Job
from gnnplan.planner.strategies import Strategy
from gnnplan.planner.trace import write_traces

TRACED_EPOCHS = 5  # at least, whatever the steps
WATCHED_EPOCHS = 3  # whose memory is watched; then every buffer has been filled


class Worker(Protocol):
    """What a strategy's executor offers the loop. `counts` is of the rows that step or evaluate has just returned."""

    net: Net
    reduce_group: tuple[int, ...]  # ranks that hold the same weights

    def step(self, step: int) -> tuple[Tensor, Tensor]: ...
    def evaluate(self, step: int) -> Tensor: ...
    def counts(self, logits: Tensor) -> Tensor: ...
    def drain(self) -> None: ...


def train(rank: Rank, job: Job, strategy: Strategy, out: Path | None, epochs: int, eval_every: int = 10,
          report: Callable[[dict[str, Any]], None] = lambda row: None) -> Net:  # fmt: skip
    """All epochs, each of as many steps as the strategy has batches; rank 0 appends a line per epoch to metrics.jsonl as it is finished.
    Raises GnnplanError on a loss that is not finite."""
    with Shapes.varying(strategy.mode == "mini"):
        return _train(rank, job, strategy, out, epochs, eval_every, report)


def _train(rank: Rank, job: Job, strategy: Strategy, out: Path | None, epochs: int, eval_every: int,
           report: Callable[[dict[str, Any]], None]) -> Net:  # fmt: skip
    _use_libraries()
    watch = MemoryWatch(rank.device)
    worker: Worker = open_worker(rank, job, strategy)
    learner = worker.learner if isinstance(worker, p3.Worker) else Learner(
        rank, job.workload, [Gradients(worker.net.parameters(), worker.reduce_group)])  # fmt: skip
    metrics = open(out / "metrics.jsonl", "a", encoding="utf-8") if out and rank.rank == 0 else None  # noqa: SIM115
    setup = {op: sent for op, sent in rank.sent.items() if sent}
    rank.sent.clear()
    steps = strategy.steps(job)
    rank.traced = max(rank.traced, TRACED_EPOCHS * steps)
    grown: list[int] = []  # resident bytes after each epoch
    for epoch in range(epochs):
        sent_before, seconds = sum(rank.sent.values()), 0.0
        loss, counts = torch.zeros((), dtype=torch.float64), torch.zeros(3, 2, dtype=torch.float64)
        for step in range(epoch * steps, (epoch + 1) * steps):
            started = now()
            learner.zero()
            part, logits = worker.step(step)
            learner.update(step)
            seconds += now() - started
            loss, counts = loss + part.cpu(), counts + worker.counts(logits)
            del part, logits
        if epoch == WATCHED_EPOCHS - 1:
            watch.stop()
        tested = torch.full((3, 2), math.nan, dtype=torch.float64)
        if epoch == epochs - 1 or (eval_every and (epoch + 1) % eval_every == 0):
            worker.drain()
            rank.recording = False
            tested = worker.counts(worker.evaluate(step))
            rank.recording = True
        grown.append(resident())
        row = _row(rank, epoch, loss, counts, tested, seconds, sum(rank.sent.values()) - sent_before)
        if not math.isfinite(row["loss"]):
            lower = job.workload.lr / 10
            raise GnnplanError(f"the loss is {row['loss']} in epoch {epoch + 1}; lower the learning rate (--set lr={lower:g})")
        if metrics:
            metrics.write(json.dumps(row) + "\n")
            metrics.flush()  # outlives a lost rank; waiting for the disk as well would look like a lost peer to the others
            report(row)
    learner.finish(epochs * steps)
    worker.drain()
    if isinstance(worker, (minibatch.Worker, p3.Worker)):
        worker.arriving.close()
    if metrics:
        metrics.close()
    if out:
        _leave(rank, out, worker, setup, grown, watch.stop())
    return worker.net


def _use_libraries() -> None:
    """What libraries load when they are first used (backward from a gradient imports sympy) is the process's, not the run's."""
    torch.autograd.backward(torch.zeros(1, requires_grad=True).exp(), torch.zeros(1))
    has_onednn()


def _row(rank: Rank, epoch: int, loss: Tensor, counts: Tensor, tested: Tensor, seconds: float, sent: int) -> dict[str, Any]:
    """A line of metrics.jsonl. `train_accuracy` is that of the training pass (its dropout and staleness on), val and test those
    of an evaluation with the weights that the epoch leaves, None where this epoch has none. Sums over ranks; the epoch ends with its
    last rank."""
    ends = torch.tensor([float(loss)], dtype=torch.float64), torch.tensor([float(sent)], dtype=torch.float64)
    numbers = torch.cat([ends[0], counts.flatten(), tested.flatten(), ends[1]])
    slowest = torch.tensor([seconds], dtype=torch.float64)
    if rank.world > 1:
        numbers, slowest = numbers.to(rank.wire_device), slowest.to(rank.wire_device)
        dist.all_reduce(numbers)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        numbers, slowest = numbers.cpu(), slowest.cpu()
    train = scores(numbers[1:7].view(3, 2))[0]
    evaluated = scores(numbers[7:13].view(3, 2)) if not numbers[7:13].isnan().any() else [None] * 3
    return {"epoch": epoch + 1, "loss": float(numbers[0]), "train_accuracy": train, "val_accuracy": evaluated[1],
            "test_accuracy": evaluated[2], "epoch_s": float(slowest), "bytes": int(numbers[13])}  # fmt: skip


def _leave(rank: Rank, out: Path, worker: Worker, setup: dict[str, int], grown: list[int], peak: int | None) -> None:
    """This rank's trace, counts and memory; the model's final weights from all ranks that hold some."""
    write_traces(out, rank.spans, [rank.rank], rank.world, "measured", rank.backend)
    write_atomically(out / f"rank{rank.rank}.json", json.dumps({
        "rank": rank.rank, "backend": rank.backend, "device": str(rank.device), "epochs": len(grown), "bytes": dict(rank.sent),
        "setup_bytes": setup, "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, "peak_bytes": peak,
        "rss_bytes": grown,
        "staleness": getattr(worker, "errors", {}), "rows": getattr(worker, "rows", {}),
    }))  # fmt: skip
    state = {name: p.detach().cpu().contiguous() for name, p in worker.net.state_dict().items()}
    if len(worker.reduce_group) < rank.world:
        states: list[Any] = [None] * rank.world
        dist.gather_object(state if rank.rank == worker.reduce_group[0] else {}, states if rank.rank == 0 else None)
        state = {name: p for part in states if part for name, p in part.items()}
    if rank.rank == 0:
        write_atomically(out / "weights.safetensors", save(state))
