"""The costs of a step beside its kernels: recording, launches, waits, and what a graph saves.

Whether exchanges overlap computation says the stage `shared`. That PipeGCN's two communicators
cannot wait for each other is a matter of order (Rank.submit), which
tests/executor/test_order_of_messages.py holds; with one GPU there is no second NCCL rank to show it
with."""

from __future__ import annotations

import gzip
import shutil
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch

from gnnplan.executor.ranks.rank import Rank, open_rank
from gnnplan.executor.ranks.recorder import now
from gnnplan.executor.strategies import open_worker
from gnnplan.executor.train import Replay
from gnnplan.planner.gnn.workload import Workload
from gnnplan.planner.graph.load import load
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies import parse
from gpu_stages import question
from gpu_stages.clock import whole_s
from gpu_stages.record import LeftOut, Record, Row, Setting

EPOCHS = 30
# of graphs from launches alone to kernels alone: vertices, edges, hidden
SIZES = ((1_000, 10_000, 64), (20_000, 200_000, 128), (20_000, 1_000_000, 256))
SYNTHETIC = "synthetic:community?vertices={}&edges={}&features=128&classes=16&seed=0"
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")


def run(setting: Setting, record: Record) -> None:
    _ = setting.torch_device
    for size in ((200, 2_000, 8),) if setting.small else SIZES:
        vertices = size[0]
        for strategy in ("graph_parallel", "gnnpipe(chunks=4)"):
            case = partial(_Steps, setting, strategy, *size)
            what = f"{strategy} on {vertices} vertices"
            record.attempt(f"recording, {what}", partial(_recording, setting, case))
            record.attempt(f"launches, {what}", partial(_launches, setting, case))
        case = partial(_Steps, setting, "graph_parallel", *size)
        record.attempt(f"CUDA graph, {vertices} vertices", partial(_graph, setting, case))
    record.attempt("two communicators under way", _two_communicators)


class _Steps:
    """A training of one rank, step by step."""

    def __init__(
        self, setting: Setting, strategy: str, vertices: int, edges: int, hidden: int
    ) -> None:
        graph = load(SYNTHETIC.format(vertices, edges))
        workload = Workload(**question.workload(setting, hidden=hidden))
        problem = Problem(graph.stats, graph, workload, question.cluster(setting, 1))
        settled = parse(strategy).settle(problem)
        self.about = {"strategy": strategy, "vertices": vertices, "edges": edges, "hidden": hidden}
        self.rank: Rank = open_rank(on_cpu=setting.device == "cpu")
        self.worker = open_worker(self.rank, problem, settled)
        self.learner = self.worker.open_learner()
        self.done = 0

    def enqueue(self) -> None:
        """A step, without a wait for its end."""
        self.learner.zero()
        self.worker.step(self.done)
        self.learner.update(self.done)
        self.done += 1

    def __call__(self) -> None:
        self.enqueue()
        self.rank.settle()


def _recording(setting: Setting, make: Callable[[], _Steps]) -> Row:
    """A step with its spans recorded, and without; in turn, for clocks of GPUs change."""
    steps, seconds = make(), {True: list[float](), False: list[float]()}
    steps.rank.recorder.traced = 10**9
    for number in range(6 if setting.small else 2 * EPOCHS):
        steps.rank.recorder.recording = number % 2 == 0
        begin = now()
        steps()
        seconds[steps.rank.recorder.recording].append(now() - begin)
    steps.rank.settle(all_lanes=True)
    recorded, not_recorded = (median(seconds[is_recorded][1:]) for is_recorded in (True, False))
    return {
        "what": "recording",
        **steps.about,
        "recorded_s": recorded,
        "not_recorded_s": not_recorded,
        "spans": len(steps.rank.recorder.spans) / len(seconds[True]),
    }


def _launches(setting: Setting, make: Callable[[], _Steps]) -> Row:
    """Operations, kernels and waits of a step that is not recorded, and how long kernels ran."""
    from torch.profiler import ProfilerActivity, profile

    steps, count = make(), 3
    steps.rank.recorder.recording = False
    for _ in range(3):
        steps()
    on_gpu = setting.device == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities) as found:
        for _ in range(count):
            steps()
    strategy = steps.about["strategy"].split("(")[0]
    path = setting.out / f"streams.{strategy}.{steps.about['vertices']}.json"
    found.export_chrome_trace(str(path))
    with path.open("rb") as plain, gzip.open(f"{path}.gz", "wb") as packed:
        shutil.copyfileobj(plain, packed)
    path.unlink()
    events = {event.key: event for event in found.key_averages()}
    row: Row = {
        "what": "launches",
        **steps.about,
        "step_s": whole_s(steps.worker.rank.device, steps, setting.small),
        "operations": sum(e.count for name, e in events.items() if name.startswith("aten::"))
        / count,
    }
    if on_gpu:
        launched = ("cudaLaunchKernel", "cuLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernelEx")
        row |= {
            "launches": sum(events[name].count for name in launched if name in events) / count,
            # one is the wait for the step's end
            "waits": {name: events[name].count / count for name in WAITS if name in events},
            "kernels_s": sum(_device_us(event) for event in events.values()) / count / 1e6,
        }
    return row


def _device_us(event: Any) -> float:
    """Microseconds that an event's own kernels ran, under the name that this torch has."""
    is_kernel = str(getattr(event, "device_type", "")).endswith("CUDA")
    name = "self_device_time_total"
    return float(getattr(event, name, getattr(event, "self_cuda_time_total", 0.0))) * is_kernel


def _graph(setting: Setting, make: Callable[[], _Steps]) -> Row:
    """A step whose kernels are launched as one, as one rank trains on a small graph."""
    if setting.device != "cuda":
        raise LeftOut("CUDA graphs need a GPU")
    steps = make()
    steps.rank.recorder.recording = False
    eager_s = whole_s(steps.rank.device, steps)
    replay = Replay(steps.worker, steps.enqueue, steps.rank.device)
    return {
        "what": "graph",
        **steps.about,
        "eager_s": eager_s,
        "replayed_s": whole_s(steps.rank.device, partial(replay, 0)),
    }


def _two_communicators() -> None:
    cards = torch.cuda.device_count() if torch.cuda.is_available() else 0
    raise LeftOut(
        f"NCCL needs a GPU for every rank, and here are {cards}; the stage `shared` runs PipeGCN"
        " over NCCL where there are two"
    )
