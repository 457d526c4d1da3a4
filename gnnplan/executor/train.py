"""The training loop of one rank: steps under the schedule's names, metrics, evaluation, and what stays on disk."""

from __future__ import annotations

import json
import math
import resource
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, TextIO

import torch
import torch.distributed as dist
from safetensors.torch import save
from torch import Tensor

from gnnplan.executor.checkpoint import Checkpoints, fill, named, under
from gnnplan.executor.data import scores
from gnnplan.executor.kernels import Shapes, has_onednn
from gnnplan.executor.learner import Gradients, Learner
from gnnplan.executor.memory import MemoryWatch, resident
from gnnplan.executor.models import Net
from gnnplan.executor.strategies import minibatch, open_worker, p3
from gnnplan.executor.worker import Rank, now
from gnnplan.planner.errors import GnnplanError, SpecError
from gnnplan.planner.files import read_bytes, write_atomically
from gnnplan.planner.job import Job
from gnnplan.planner.schedule import Label
from gnnplan.planner.strategies import Strategy
from gnnplan.planner.trace import read_trace, trace_of, write_traces
from gnnplan.planner.validate import MAX_METRICS

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
    def state(self) -> dict[str, Tensor]: ...
    def load(self, state: Mapping[str, Tensor]) -> None: ...


def train(rank: Rank, job: Job, strategy: Strategy, out: Path | None, epochs: int, eval_every: int = 10,
          report: Callable[[dict[str, Any]], None] = lambda row: None, checkpoints: Checkpoints | None = None) -> Net:  # fmt: skip
    """All epochs from `checkpoints.first` on, each of as many steps as the strategy has batches; rank 0 appends a line per epoch to
    metrics.jsonl as it is finished. Raises GnnplanError on a loss that is not finite."""
    with Shapes.varying(strategy.mode == "mini"):
        return _train(rank, job, strategy, out, epochs, eval_every, report, checkpoints)


def _train(rank: Rank, job: Job, strategy: Strategy, out: Path | None, epochs: int, eval_every: int,
           report: Callable[[dict[str, Any]], None], checkpoints: Checkpoints | None) -> Net:  # fmt: skip
    has_onednn()  # what oneDNN loads when it is first used is the process's, not the run's
    watch = MemoryWatch(rank.device)
    steps, first = strategy.steps(job), checkpoints.first if checkpoints else 0
    worker: Worker = open_worker(rank, job, strategy, first * steps)
    learner = worker.learner if isinstance(worker, p3.Worker) else Learner(
        rank, job.workload, [Gradients(worker.net.parameters(), worker.reduce_group)])  # fmt: skip
    setup = {op: sent for op, sent in rank.sent.items() if sent}
    rank.sent.clear()
    rank.traced = max(rank.traced, TRACED_EPOCHS * steps)
    earlier = _go_on(rank, worker, learner, checkpoints, out) if checkpoints and out and first else None
    record = _Record(rank, worker, earlier or {})
    metrics = _open_metrics(out / "metrics.jsonl", first) if out and rank.rank == 0 else None
    for epoch in range(first, epochs):
        rank.doing.begin("phase", f"epoch {epoch + 1}")
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
        if epoch == first + WATCHED_EPOCHS - 1:
            watch.stop()
        tested = torch.full((3, 2), math.nan, dtype=torch.float64)
        evaluates = epoch == epochs - 1 or (eval_every and (epoch + 1) % eval_every == 0)
        kept = checkpoints is not None and checkpoints.due(epoch + 1)
        if evaluates or kept:  # what is on its way is of this epoch, and the next need not wait for it
            started = now()
            worker.drain()
            seconds += now() - started
        if evaluates:
            rank.doing.begin("phase", f"the evaluation of epoch {epoch + 1}")
            rank.recording = False
            tested = worker.counts(worker.evaluate(step))
            rank.recording = True
        record.grown.append(resident())
        if checkpoints and kept:  # before ranks meet: none may be two ahead of another, which would leave them without one in common
            rank.doing.begin("phase", f"the checkpoint before epoch {epoch + 1}")
            checkpoints.wait()
        rank.doing.begin("phase", f"the metrics of epoch {epoch + 1}")
        row = _row(rank, epoch, loss, counts, tested, seconds, sum(rank.sent.values()) - sent_before)
        if not math.isfinite(row["loss"]):
            lower = job.workload.lr / 10
            raise GnnplanError(f"the loss is {row['loss']} in epoch {epoch + 1}; lower the learning rate (--set lr={lower:g})")
        if metrics:
            metrics.write(json.dumps(row) + "\n")
            metrics.flush()  # outlives a lost rank; waiting for the disk as well would look like a lost peer to the others
            report(row)
        if checkpoints and kept and out:
            rank.doing.begin("phase", f"the checkpoint of epoch {epoch + 1}")
            record.trace(out)
            tensors = named("worker", worker.state()) | named("optimizer", learner.optimizer.state())
            checkpoints.save(rank, epoch + 1, tensors, record.notes(), [metrics.fileno()] if metrics else [])
    rank.doing.begin("phase", "the end")
    learner.finish(epochs * steps)
    worker.drain()
    if isinstance(worker, (minibatch.Worker, p3.Worker)):
        worker.arriving.close()
    if checkpoints:
        checkpoints.wait()
    if metrics:
        metrics.close()
    if out:
        _leave(rank, out, worker, setup, record, watch.stop())
    return worker.net


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


class _Record:
    """What a rank has counted in all epochs, those before its process began (`earlier`: their notes) included."""

    def __init__(self, rank: Rank, worker: Worker, earlier: Mapping[str, Any]) -> None:
        self.rank, self.worker, self.earlier = rank, worker, earlier
        self.grown: list[int] = list(earlier.get("rss_bytes", []))  # resident bytes after each epoch
        self.traced = -1  # spans in the trace on disk

    def counts(self) -> dict[str, Any]:
        before, errors = self.earlier.get("staleness", {}), getattr(self.worker, "errors", {})
        rows = Counter(self.earlier.get("rows", {}))
        rows.update(getattr(self.worker, "rows", {}))
        return {"bytes": dict(self.rank.sent), "rss_bytes": self.grown, "rows": dict(rows),
                "staleness": {at: [*before.get(at, []), *errors.get(at, [])] for at in {**before, **errors}}}  # fmt: skip

    def notes(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {**self.counts(), "counted": [list(label) for label in self.rank.counted], "spans": len(self.rank.spans)}

    def trace(self, out: Path) -> None:
        """On disk, where it is not yet."""
        if self.traced != len(self.rank.spans):
            self.traced = len(self.rank.spans)
            write_traces(out, self.rank.spans, [self.rank.rank], self.rank.world, "measured", self.rank.backend)


def _go_on(rank: Rank, worker: Worker, learner: Learner, checkpoints: Checkpoints, out: Path) -> dict[str, Any]:
    """Make of this process what the one was that left the checkpoint -> its notes."""
    notes, tensors = checkpoints.load(checkpoints.first)
    worker.load(under("worker", tensors))
    fill(learner.optimizer.state(), under("optimizer", tensors))
    rank.sent.update(notes["bytes"])
    rank.counted = {Label(*label) for label in notes["counted"]}
    with suppress(SpecError):  # a trace lost with its machine is no reason not to train
        rank.spans = read_trace(trace_of(out, rank.rank), rank.rank)[1][: notes["spans"]]
    return notes


def _open_metrics(path: Path, first: int) -> TextIO:
    """To append to, after the lines of the `first` epochs. Raises SpecError where they are not there."""
    if not path.exists() and not first:
        return open(path, "x", encoding="utf-8")
    text = read_bytes(path, MAX_METRICS).decode("utf-8", "replace") if path.exists() else ""
    lines = [line for line in text.splitlines(True) if line.endswith("\n")]
    if len(lines) < first:
        raise SpecError(f"{path} has {len(lines)} epochs, but the checkpoint is of epoch {first}; put it back, or start anew with "
                        "another --out")  # fmt: skip
    write_atomically(path, "".join(lines[:first]))
    return open(path, "a", encoding="utf-8")


def _leave(rank: Rank, out: Path, worker: Worker, setup: dict[str, int], record: _Record, peak: int | None) -> None:
    """This rank's trace, counts and memory; the model's final weights from all ranks that hold some."""
    record.trace(out)
    write_atomically(out / f"rank{rank.rank}.json", json.dumps({
        "rank": rank.rank, "backend": rank.backend, "device": str(rank.device), "epochs": len(record.grown), "setup_bytes": setup,
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, "peak_bytes": peak, **record.counts(),
    }))  # fmt: skip
    state = {name: p.detach().cpu().contiguous() for name, p in worker.net.state_dict().items()}
    if len(worker.reduce_group) < rank.world:
        states: list[Any] = [None] * rank.world
        dist.gather_object(state if rank.rank == worker.reduce_group[0] else {}, states if rank.rank == 0 else None)
        state = {name: p for part in states if part for name, p in part.items()}
    if rank.rank == 0:
        write_atomically(out / "weights.safetensors", save(state))
