"""The training loop of one rank: steps, metrics, evaluation, checkpoints, and a run's files.

The strategy defines a step (strategies/).
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from safetensors.torch import load, save
from torch import Tensor

from gnnplan.executor.layers.kernels import Shapes, warm_up
from gnnplan.executor.layers.models import Net
from gnnplan.executor.layers.targets import no_counts, scores
from gnnplan.executor.modules.read import read_again, with_structure
from gnnplan.executor.ranks.checkpoint import Checkpoints, must_have_epochs
from gnnplan.executor.ranks.gather import collect
from gnnplan.executor.ranks.learner import (
    WORKER,
    Best,
    ModelPart,
    apart,
    fill,
    named,
    under,
)
from gnnplan.executor.ranks.machine import MemoryWatch, peak, resident
from gnnplan.executor.ranks.rank import Rank
from gnnplan.executor.ranks.recorder import now
from gnnplan.executor.strategies import Worker, open_worker
from gnnplan.planner.gnn.workload import FALLING
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies import Strategy
from gnnplan.planner.vocabulary.errors import GnnplanError, SpecError
from gnnplan.planner.vocabulary.files import Json, write_atomically
from gnnplan.planner.vocabulary.numbers import TF32
from gnnplan.planner.vocabulary.schedule import Label
from gnnplan.planner.vocabulary.trace import MOST_SPANS, read_trace, trace_of, write_traces

if TYPE_CHECKING:
    from gnnplan.executor.strategies.layerwise import GradientErrors

TRACED_EPOCHS = 5  # least number of epochs with spans in the trace
SHARE = 0.25  # largest share of the GPU's memory that a replayed step may fill
WATCHED_EPOCHS = 3  # epochs with a memory watch; by their end every buffer has been filled

Results = tuple[Tensor, Tensor]  # a step's loss, and the metric's counts
Report = Callable[[Json], None]  # receives a line of metrics.jsonl


def train(
    rank: Rank,
    problem: Problem,
    strategy: Strategy,
    out: Path | None,
    epochs: int,
    eval_every: int = 10,
    reports: Sequence[Report] = (),
    checkpoints: Checkpoints | None = None,
) -> Net:
    """Train all epochs from `checkpoints.first` on, and return the model with its final weights.

    Every epoch has as many steps as the strategy has batches. Rank 0 appends a line per epoch to
    metrics.jsonl in `out`, and calls `reports` with it. eval_every: epochs from one evaluation to
    the next; the last epoch is always evaluated. Raises GnnplanError if the loss is not finite.
    """
    torch.backends.cuda.matmul.allow_tf32 = problem.workload.precision == TF32
    with Shapes.varying(strategy.mode == "mini"):
        training = _Training(rank, problem, strategy, out, epochs, checkpoints)
        for epoch in range(training.first, epochs):
            if training.ends:
                training.epochs = epoch
                break
            is_evaluated = epoch == epochs - 1 or (eval_every > 0 and (epoch + 1) % eval_every == 0)
            training.epoch(epoch, is_evaluated, reports)
        return training.finish()


class _Training:
    """One rank's training: worker, optimizer, and records."""

    def __init__(
        self,
        rank: Rank,
        problem: Problem,
        strategy: Strategy,
        out: Path | None,
        epochs: int,
        checkpoints: Checkpoints | None,
    ) -> None:
        # loads cuBLAS, MKL, oneDNN and a user's libraries, whose memory is not to be watched
        warm_up(rank.device)
        if problem.workload.is_module:
            problem = with_structure(problem)
        self.watch = rank.watch = MemoryWatch(rank.device)
        self.rank, self.problem, self.out, self.epochs = rank, problem, out, epochs
        self.checkpoints = checkpoints
        self.steps, self.rounds = strategy.steps(problem), strategy.codec.packs
        self.first = checkpoints.first if checkpoints else 0
        with rank.groups.reading():
            worker = self.worker = open_worker(rank, problem, strategy, self.first * self.steps)
        self.learner = worker.open_learner()
        patience = problem.workload.patience
        self.best = patience and Best(worker.trained(), patience, problem.metric in FALLING)
        self.replay: Replay | None = None
        self.is_repeatable = True  # False once a user's module cannot become a CUDA graph
        self.gradient_errors: GradientErrors | None = None
        if rank.gradient_errors:
            from gnnplan.executor.strategies.layerwise import GradientErrors

            self.gradient_errors = GradientErrors(worker, self.learner.gradients[0])
        self.rows = getattr(worker, "rows", Counter[str]())
        self.errors: dict[str, dict[str, list[Any]]] = {
            "staleness": getattr(worker, "errors", {}),
            "gradient_errors": self.gradient_errors.errors if self.gradient_errors else {},
        }
        self.setup_bytes = {op: sent for op, sent in rank.recorder.sent.items() if sent}
        self.setup_rss_bytes = peak(torch.device("cpu"))
        rank.recorder.sent.clear()
        earlier = self._resume(checkpoints, out) if checkpoints and self.first and out else {}
        # number of epochs that earlier plans have trained
        self.before = int(earlier["before"][-1]["until"]) if earlier.get("before") else 0
        own = max(rank.recorder.traced, TRACED_EPOCHS * self.steps)
        rank.recorder.traced = self.before * self.steps + own
        self.earlier: Mapping[str, Any] = earlier  # the notes of the checkpoint
        self.resident_bytes: list[int] = list(earlier.get("rss_bytes", []))  # after each epoch
        self.spans_on_disk = -1
        self.metrics = (
            Metrics(out / "metrics.jsonl", self.first) if out and rank.rank == 0 else None
        )

    def _resume(self, checkpoints: Checkpoints, out: Path) -> Json:
        """Load weights and records from the checkpoint, and return its notes."""
        if checkpoints.before is not None:
            return self._take_over(checkpoints, checkpoints.before)
        rank = self.rank
        notes, tensors = checkpoints.load()
        self.worker.load(under(WORKER, tensors))
        fill(self.part.tensors(), tensors)
        if self.best:
            self.best.notes = notes["best"]
        rank.recorder.sent.update(notes["bytes"])
        rank.recorder.counted = {Label(*label) for label in notes["counted"]}
        self.rows.update(notes["rows"])
        for name, errors in self.errors.items():
            errors.update(notes[name])
        with suppress(SpecError):  # the trace may be lost with an earlier machine
            rank.recorder.spans = read_trace(trace_of(out, rank.rank), rank.rank)[1][
                : notes["spans"]
            ]
        return notes

    def _take_over(self, checkpoints: Checkpoints, before: Mapping[str, Any]) -> Json:
        """Load the weights of another plan, and return notes that name it.

        Its bytes and spans are not taken over: they are of another strategy, or of other ranks.
        """
        rank, worker = self.rank, self.worker
        notes, whole = checkpoints.load_whole(before["ranks"])
        self.part.take(whole)
        if self.best:
            self.best.notes = notes["best"]
        recording, rank.recorder.recording = rank.recorder.recording, False
        measuring, rank.staleness_errors = rank.staleness_errors, False
        worker.refill(self.first * self.steps - 1)
        rank.recorder.recording, rank.staleness_errors = recording, measuring
        part = {"until": self.first, "strategy": before["strategy"], "ranks": before["ranks"]}
        return {"before": [*notes.get("before", []), part]}

    @property
    def part(self) -> ModelPart:
        """The part of the model that this rank trains, with the best weights so far."""
        best = self.best.weights if self.best else {}
        weights, cut = self.worker.trained(), self.worker.cut
        return ModelPart(weights, cut, self.learner.optimizer, best)

    @property
    def ends(self) -> bool:
        """Whether training stops early, since no better weights are found."""
        return bool(self.best and self.best.ends)

    def epoch(self, epoch: int, is_evaluated: bool, reports: Sequence[Report]) -> None:
        """Train one epoch, then evaluate, append its metrics and write its checkpoint."""
        rank, worker, checkpoints = self.rank, self.worker, self.checkpoints
        rank.recorder.activity.begin("phase", f"epoch {epoch + 1}")
        self.learner.optimizer.lr = self.problem.workload.lr_of(epoch)
        sent_before, seconds = sum(rank.recorder.sent.values()), 0.0
        # on the device until the end of the epoch, so that the host does not wait for steps
        loss = counts = torch.zeros((), dtype=torch.float64)
        tested = None
        for step in range(epoch * self.steps, (epoch + 1) * self.steps):
            started = now()
            if replayed := self._replayed(step):
                part, answers = replayed
                seconds += now() - started
                loss, counts = loss + part, counts + answers
                continue
            self.learner.zero()
            part, logits = worker.step(step)
            if self.gradient_errors:
                rank.settle()
                seconds += now() - started
                self.gradient_errors.measure(step)
                started = now()
            self.learner.update(step)
            seconds += now() - started
            loss, counts = loss + part, counts + self._counts(logits)
            del part, logits
        started = now()
        rank.settle()
        seconds += now() - started
        if epoch == self.first + WATCHED_EPOCHS - 1:
            self.watch.stop()
        is_kept = checkpoints is not None and checkpoints.due(epoch + 1)
        if is_evaluated or is_kept:
            # the time of pending messages counts in this epoch; other epochs need not wait for them
            started = now()
            worker.drain()
            rank.settle()
            seconds += now() - started
        if is_evaluated:
            rank.recorder.activity.begin("phase", f"the evaluation of epoch {epoch + 1}")
            rank.recorder.recording = False
            with self.watch.left_out():  # mini-batches are evaluated on the full graph
                tested = worker.counts(worker.evaluate(step))
            rank.recorder.recording = True
        self.resident_bytes.append(resident())
        if checkpoints and is_kept:
            # Before the ranks meet: no rank may be two checkpoints ahead of another, or they would
            # have none in common.
            rank.recorder.activity.begin("phase", f"the checkpoint before epoch {epoch + 1}")
            checkpoints.wait()
        rank.recorder.activity.begin("phase", f"the metrics of epoch {epoch + 1}")
        sent = sum(rank.recorder.sent.values()) - sent_before
        row, most_spans = _row(rank, self.problem, epoch, loss, counts, tested, seconds, sent)
        # all ranks keep the spans of the same epochs, as many as the fullest trace holds
        fit = MOST_SPANS * (epoch + 1 - self.before) // max(most_spans, 1)
        rank.recorder.traced = min(rank.recorder.traced, (self.before + max(fit, 1)) * self.steps)
        if self.replay is not None:
            row["replayed"] = True
        self._append(row, reports)
        if self.best and is_evaluated:
            self.best.see(epoch + 1, row[f"val_{self.problem.metric}"], worker.trained())
        if is_kept:
            self._keep(epoch)

    def _replayed(self, step: int) -> Results | None:
        """Replay a step as a CUDA graph -> its loss and the metric's counts; None if it is not one.

        The first epochs of a process are not replayed: they are traced, and fill caches."""
        recorded = (max(self.before, self.first) + TRACED_EPOCHS) * self.steps
        if step < recorded or self.gradient_errors or not self.worker.uses_cuda_graph:
            return None

        def enqueue() -> Results:
            self.learner.zero()
            loss, logits = self.worker.step(step)
            self.learner.update(step)
            return loss, self._counts(logits)

        if self.replay is None:
            if not (self.is_repeatable and is_small(self.rank.device)):
                return None
            self.rank.recorder.traced = min(self.rank.recorder.traced, step)
            try:
                self.replay = Replay(self.worker, enqueue, self.rank.device)
            except RuntimeError:
                if not self.problem.workload.is_cut:
                    raise
                # the step has had no effect: torch runs no kernel while it records a graph
                self.is_repeatable = False
                return None
        return self.replay(step)

    def _counts(self, logits: Tensor) -> Tensor:
        """Return the metric's counts of a training step; roc_auc needs all scores of an epoch."""
        if self.problem.metric == "roc_auc":
            return no_counts(self.problem, self.rank.device, training=True)
        return self.worker.counts(logits)

    def _append(self, row: Json, reports: Sequence[Report]) -> None:
        if not math.isfinite(row["loss"]):
            lower = self.problem.workload.lr / 10
            whole = ", or leave out bits, which round rows" if self.rounds else ""
            raise GnnplanError(
                f"the loss is {row['loss']} in epoch {row['epoch']}; lower the learning rate"
                f" (--set lr={lower:g}){whole}"
            )
        if self.metrics:
            self.metrics.append(json.dumps(row) + "\n")
            for report in reports:
                report(row)

    def _keep(self, epoch: int) -> None:
        if not (self.checkpoints and self.out):
            return
        self.rank.recorder.activity.begin("phase", f"the checkpoint of epoch {epoch + 1}")
        self._write_trace(self.out)
        part, tensors = self.part, named(WORKER, self.worker.state())
        counts, recorder = self._all_counts(), self.rank.recorder
        counted = [list(label) for label in recorder.counted]
        notes = {**counts, "counted": counted, "spans": len(recorder.spans)}
        first_on_disk = [self.metrics.stream.fileno()] if self.metrics else []
        tensors |= part.tensors()
        whole = part.first_columns()
        self.checkpoints.save(self.rank, epoch + 1, tensors, notes, first_on_disk, whole)

    def finish(self) -> Net:
        """Finish pending work, and write this rank's files."""
        self.rank.recorder.activity.begin("phase", "the end")
        self.learner.finish(self.epochs * self.steps)
        if self.best and self.best.epoch:
            fill(self.worker.trained(), self.best.weights)
        self.worker.drain()
        self.rank.settle(all_lanes=True)
        self.worker.close()
        if self.checkpoints:
            self.checkpoints.wait()
        if self.metrics:
            self.metrics.stream.close()
        if self.out:
            self._leave(self.out)
        return self.worker.net

    def _leave(self, out: Path) -> None:
        """Write this rank's trace and counts; rank 0 also writes the weights of the whole model."""
        rank, net = self.rank, self.worker.net
        self.watch.stop()
        self._write_trace(out)
        left = {
            "rank": rank.rank,
            "backend": rank.backend,
            "device": str(rank.device),
            "epochs": len(self.resident_bytes),
            "setup_bytes": self.setup_bytes,
            "setup_rss_bytes": self.setup_rss_bytes,
            **self._all_counts(),
        }
        write_atomically(out / f"rank{rank.rank}.json", json.dumps(left))
        weights = apart(net.state_dict())
        group = self.worker.reduce_group
        if len(group) < rank.world:  # other ranks hold other weights
            own = save(weights) if rank.rank == group[0] else b""
            parts = collect(own)
            weights = {name: p for part in parts for name, p in load(part).items()}
        if rank.rank == 0:
            epochs = (self.best and self.best.epoch) or self.epochs
            if self.problem.workload.is_module:  # under the names of the user's own module
                weights = read_again(self.problem.workload).trained(weights, epochs * self.steps)
            write_atomically(out / "weights.safetensors", save(weights))

    def _all_counts(self) -> Json:
        """Return this rank's counts in all epochs, also in those of the process that it resumed."""
        earlier, tensors = self.earlier.get, self.watch.peak()
        return {
            "peak_rss_bytes": max(peak(torch.device("cpu")), earlier("peak_rss_bytes", 0)),
            "peak_bytes": None if tensors is None else max(tensors, earlier("peak_bytes") or 0),
            "bytes": dict(self.rank.recorder.sent),
            "rss_bytes": self.resident_bytes,
            "rows": dict(self.rows),
            **self.errors,
            "before": list(self.earlier.get("before", [])),
            "best": dict(self.best.notes) if self.best else None,
        }

    def _write_trace(self, out: Path) -> None:
        """Write this rank's trace, unless the file on disk already has all spans."""
        rank = self.rank
        if self.spans_on_disk != len(rank.recorder.spans):
            self.spans_on_disk = len(rank.recorder.spans)
            write_traces(
                out, rank.recorder.spans, [rank.rank], rank.world, "measured", rank.backend
            )


def _row(
    rank: Rank,
    problem: Problem,
    epoch: int,
    loss: Tensor,
    counts: Tensor,
    tested: Tensor | None,
    seconds: float,
    sent: int,
) -> tuple[Json, int]:
    """Return a line of metrics.jsonl, from all ranks, and the largest number of spans of a rank.

    Both are the same on all ranks. counts, tested: the metric's counts in the training pass and in
    the evaluation (None: not evaluated). The score of train is of the training pass, with dropout
    and staleness; val and test are scored with the weights at the end of the epoch. `epoch_s` and
    `peak_memory_bytes` are the maximum over ranks.
    """
    few = torch.tensor([float(loss), float(sent)], dtype=torch.float64)
    counted = [counts] if tested is None else [counts, tested]
    numbers = torch.cat([few, *(each.flatten().cpu() for each in counted)])
    largest = torch.tensor(
        [seconds, peak(rank.device), len(rank.recorder.spans)], dtype=torch.float64
    )
    if rank.world > 1:
        numbers, largest = numbers.to(rank.groups.wire_device), largest.to(rank.groups.wire_device)
        dist.all_reduce(numbers)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        numbers, largest = numbers.cpu(), largest.cpu()
    sums = torch.split(numbers[2:], [each.numel() for each in counted])
    found = [scores(problem, n.view(each.shape)) for n, each in zip(sums, counted, strict=True)]
    train, (_, val, test) = found[0][0], [None] * 3 if tested is None else found[1]
    metric = problem.metric
    row = {
        "epoch": epoch + 1,
        "loss": float(numbers[0]),
        f"train_{metric}": train,
        f"val_{metric}": val,
        f"test_{metric}": test,
        "epoch_s": float(largest[0]),
        "bytes": int(numbers[1]),
        "peak_memory_bytes": int(largest[1]),
    }
    return row, int(largest[2])


class Replay:
    """The CUDA graph of the kernels that `step` enqueues, replayed on the same tensors.

    The host launches all of them at once. On a small graph, kernels run for less time than the host
    takes to launch them one by one. A CUDA graph keeps private memory, so a step becomes one only
    if it fills a small share of the GPU's memory (`SHARE`)."""

    def __init__(self, worker: Worker, step: Callable[[], Results], device: torch.device) -> None:
        self.clock = worker.clock = torch.zeros((), dtype=torch.int64, device=device)
        try:
            self.graph = torch.cuda.CUDAGraph()
            # other threads may wait for their streams meanwhile: a checkpoint's does
            with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
                self.results = step()
        finally:
            worker.clock = None  # a step that is not replayed gets its number from the host

    def __call__(self, step: int) -> Results:
        """Replay the step of this number; return its results, which the next replay overwrites."""
        self.clock.fill_(step)
        self.graph.replay()
        return self.results


def is_small(device: torch.device) -> bool:
    """Whether the peak of allocated memory is a small share of the GPU's memory."""
    total = torch.cuda.get_device_properties(device).total_memory
    return torch.cuda.max_memory_allocated(device) < SHARE * total


class Metrics:
    """The file metrics.jsonl, with one line per epoch, opened to append."""

    def __init__(self, path: Path, first: int) -> None:
        """Keep the lines of the first `first` epochs. Raises SpecError if they are missing."""
        self.path = path
        if first or path.exists():
            os.truncate(path, must_have_epochs(path, first))
        self.stream = open(path, "ab")  # noqa: SIM115  until the training's end
        self._size = os.fstat(self.stream.fileno()).st_size  # [B], to detect other writers

    def append(self, line: str) -> None:
        """Append a line. Raises SpecError if it cannot be written or the file was changed."""
        try:
            size = os.stat(self.path).st_size
            self.stream.write(line.encode())
            # Flushed, so that the line outlives a lost rank. Not synced: other ranks would take a
            # rank that waits for the disk for a lost peer.
            self.stream.flush()
        except OSError as error:
            raise SpecError(
                f"{self.path}: cannot be written ({error.strerror}); free the disk or put it back,"
                " and go on with --resume"
            ) from error
        if size != self._size:
            raise SpecError(
                f"{self.path} has {size:,} bytes, and this run has written {self._size:,}: another"
                " program has changed it; put it back and go on with --resume, or start anew with"
                " another --out"
            )
        self._size += len(line.encode())
