"""Copies beside computation: buffers are filled again when what was in them has left, and offload's
chunks come and go in the order of the plan. Streams are a fake that is as late as it may be; what a
GPU makes of them is tested in test_gpu.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from asked import on
from torch import Tensor

from gnnplan.executor.layers.copies import Staging
from gnnplan.executor.ranks.rank import Rank
from gnnplan.executor.strategies import open_worker
from gnnplan.planner.vocabulary.trace import recorded_order
from gnnplan.testing.ranks import Case

CPU = torch.device("cpu")


class Late:
    """torch.cuda's streams, whose work is done when somebody waits for it, and no earlier."""

    def __init__(self) -> None:
        self.own = self.here = self.Stream()

    class Stream:
        def __init__(self) -> None:
            self.work: list[Callable[[], None]] = []

        def run(self, to: int) -> None:
            for place in range(to):
                work, self.work[place] = self.work[place], lambda: None
                work()

        def wait_stream(self, other: Late.Stream) -> None:
            to = len(other.work)
            self.work.append(lambda: other.run(to))

    class Event:
        stream: Late.Stream | None = None

        def record(self, stream: Late.Stream) -> None:
            self.stream, self.place = stream, len(stream.work)

        def synchronize(self) -> None:
            if self.stream:
                self.stream.run(self.place)

    def current_stream(self, device: torch.device) -> Late.Stream:
        return self.here

    @contextmanager
    def stream(self, stream: Late.Stream) -> Iterator[None]:
        before, self.here = self.here, stream
        yield
        self.here = before


@pytest.fixture
def late(monkeypatch):
    """Copies that need not wait are late."""
    module, copy = Late(), Tensor.copy_

    def copy_(into: Tensor, rows: Tensor, non_blocking: bool = False) -> Tensor:
        if non_blocking and module.here is not module.own:
            module.here.work.append(lambda: copy(into, rows))
            return into
        return copy(into, rows)

    monkeypatch.setattr(Tensor, "copy_", copy_)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    return module


@pytest.mark.parametrize("rows", [0, 1, 5, 64, 203])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_scattered_rows_come_and_go_through_two_buffers(late, rows, dtype):
    """13 rows to a buffer, which three threads fill; those of features are converted there."""
    staging = Staging(CPU, size=13 * 7 * 8)
    staging.threads = 3
    kept = torch.arange(300 * 7).view(300, 7).to(dtype)
    places = torch.randperm(300, generator=torch.Generator().manual_seed(rows))[:rows]
    for of_host in {dtype, torch.float32}:
        into = torch.zeros(rows, 7, dtype=dtype)

        def gather(start: int, stop: int, buffer: Tensor) -> None:
            buffer[:] = kept[places[start:stop]]

        staging.load(into, of_host, gather)
        assert not into[-1:].any(), "the host waited"
        late.own.run(len(late.own.work))
        assert into.equal(kept[places].to(of_host).to(dtype))

    def scatter(start: int, stop: int, buffer: Tensor) -> None:
        kept[places[start:stop]] = buffer

    expected = kept.index_copy(0, places, -into)
    late.own.work.append(into.neg_)  # it is computed by then
    staging.store(into, scatter)
    assert kept.equal(expected)


@pytest.mark.parametrize("model", ["sage", "gcn", "sgc"])
def test_chunks_whose_copies_go_beside_computation(model):
    """The same numbers, and the order that is planned for GPUs."""
    graph = "synthetic:community?vertices=600&edges=3000&features=24&classes=5"
    case = Case("offload(chunks=4)", graph, dict(model=model, layers=3, hidden=8, dropout=0.5))
    if model == "sgc":  # its first aggregate is constant
        case = replace(case, workload={**case.workload, "dropout": 0.0})
    problem = case.problem(1)
    found: list[Any] = []
    for beside in (False, True):
        rank = Rank(0, 1, CPU, "gloo")
        worker: Any = open_worker(rank, problem, case.settled(problem))
        worker.overlaps_copies = beside
        losses = [worker.step(step)[0] for step in range(2)]
        rank.recorder.recording = False
        logits = worker.evaluate(1).clone()
        found.append([*losses, logits, *(p.grad for p in worker.net.parameters())])
        order = recorded_order(rank.recorder.spans, 0, "copy")
        rank.close()
        kind = "cuda" if beside else "cpu"
        planned = on(problem, kind=kind)
        schedule = case.settled(planned).schedule(planned, 2)
        assert order == [str(task.label) for task in schedule.lane(0, "copy")]
    assert all(a.equal(b) for a, b in zip(*found, strict=True))
