"""Compares on a small graph what strategies make of a model's gradients with one process.

Every strategy takes one step of gradient descent with rate 1, in float64, on two CPU ranks over
Gloo. What the weights have moved by is then the gradient, and it must equal one process's.
Mini-batch strategies take all training vertices as their one batch. A strategy of a single rank
(offload) is trained by rank 0, while rank 1 goes on.

This is the program of a process that `gnnplan.check` starts (gnnplan/api/checking.py). It imports
torch and reads the model once, forks the two ranks, and is the one process itself while they
train. The ranks are two processes and one process group for all strategies. It forks before it has
threads, which is why it is a process of its own: a notebook has threads."""

from __future__ import annotations

import gc
import json
import math
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from importlib import import_module
from multiprocessing import get_context
from multiprocessing.connection import wait
from multiprocessing.context import ForkProcess
from operator import itemgetter
from pathlib import Path
from secrets import token_hex
from typing import Any, NamedTuple, NoReturn

import torch
from safetensors.torch import load_file
from torch import Tensor

from gnnplan.executor.modules.bind import GraphFields
from gnnplan.executor.modules.nets import net_of
from gnnplan.executor.modules.own import names_layer, own_layers
from gnnplan.executor.modules.read import (
    Source,
    read,
    read_again,
    state_of,
    with_module,
)
from gnnplan.executor.ranks.meeting import listen, on_this_machine, store_of_this_machine
from gnnplan.executor.ranks.opening import die_with_parent, leave, open_rank
from gnnplan.executor.ranks.rank import Rank
from gnnplan.executor.train import train
from gnnplan.planner.cluster.spec import Cluster, Device, Link
from gnnplan.planner.gnn.model import describe
from gnnplan.planner.gnn.workload import Workload, is_module
from gnnplan.planner.graph.graph import Graph
from gnnplan.planner.graph.load import load
from gnnplan.planner.problem.inputs import checked
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies import Example, Strategy, families, parse
from gnnplan.planner.vocabulary.errors import GnnplanError, LostRank, SpecError
from gnnplan.planner.vocabulary.files import write_atomically

RANKS = 2
FEATURES, CLASSES = 12, 4  # of the graph, where the model has no widths of its own
STEP = {"optimizer": "sgd", "lr": 1.0, "epochs": 1, "dtype": "float64"}
FAILED = "failed"  # the file of the rank that fails first: its number, and why
SECONDS = 300.0  # after which ranks that do not answer are lost
WITHIN = 1e-9  # of a gradient's largest number
# A gradient this much smaller than the model's largest is rounding: that of a bias before a norm.
ROUNDING = 1e-6
ALONE = {"full": "graph_parallel", "mini": "data_parallel"}


@dataclass(frozen=True)
class Verdict:
    """What a strategy does with the model.

    answer: 'equal' to one process's gradient; 'differs', though the strategy says it is exact;
    'lossy', a strategy that changes the gradient by design, of which nothing is claimed but that
    its step leaves finite weights; or 'cannot' carry the model. gap: the largest difference from
    one process's gradient, as a share of the largest number in a tensor; None of 'cannot'."""

    strategy: str
    answer: str
    gap: float | None
    reason: str


class Task(NamedTuple):
    """A strategy that takes the step."""

    text: str
    problem: Problem
    strategy: Strategy

    @classmethod
    def of(
        cls, text: str, graph: Graph, workload: Workload, ranks: int = 1, servers: int = 1
    ) -> Task:
        """Raises SpecError if the workload does not suit the strategy."""
        cluster = Cluster(
            servers=servers,
            gpus_per_server=ranks // servers,
            device=Device(kind="cpu", memory=64e9, gemm=1e11, memory_bandwidth=1e10),
            intra_node=Link(bandwidth=1e9),
            inter_node=Link(bandwidth=1e9),
        )
        problem = Problem(graph.stats, graph, workload, cluster, "metis")
        strategy = parse(text).settle(problem)
        strategy.check(problem)
        return cls(text, problem, strategy)

    @property
    def mode(self) -> str:
        return self.problem.workload.mode


def main() -> None:
    """Answer the question in the folder that is named: question.json -> answer.json."""
    die_with_parent()
    torch.set_num_threads(1)  # no pool of threads that forks would miss
    gc.disable()  # to look for cycles in what a user's file imports took half a second
    out = Path(sys.argv[1])
    answer: dict[str, Any]
    try:
        answer = _answer(json.loads((out / "question.json").read_text()), out)
    except GnnplanError as error:
        answer = {"error": type(error).__name__, "message": str(error)}
    write_atomically(out / "answer.json", json.dumps(answer))


def tried() -> list[tuple[str, Example]]:
    """What every family gives as examples for so few ranks, with its mode."""
    return [
        (family.mode, example)
        for family in families()
        for example in family.examples
        if example.ranks <= RANKS
    ]


def _answer(question: Mapping[str, Any], out: Path) -> dict[str, Any]:
    """What was compared, and the verdict on each strategy.

    question: `model` as the command line takes it, with `fields` of the Workload that the user has
    set, `features` and `classes` (None: the model's own, else as below); or the `workload` of a
    live module. Raises SpecError where the model itself is not understood, and LostRank."""
    workload, features, classes = _asked(question)
    graph = load(
        f"synthetic:community?vertices=60&edges=400&features={features}&classes={classes}&seed=0"
    )
    assert isinstance(graph, Graph)
    verdicts: dict[int, Verdict] = {}
    tasks: dict[int, Task] = {}
    whole_batch = {"mode": "mini", "batch": graph.stats.train_vertices, "fanout": "full"}
    for number, (mode, example) in enumerate(tried()):
        text, changes = example.strategy, whole_batch if mode == "mini" else {}
        try:
            its = checked(Workload, workload.model_dump() | changes, "", ["mode"])
            task = tasks[number] = Task.of(text, graph, its, example.ranks, example.servers)
            import_module(task.strategy.executor)  # ranks that are forks need not do it again
            (out / str(number)).mkdir()
        except SpecError as error:
            verdicts[number] = Verdict(text, "cannot", None, str(error).removeprefix("mode: "))
    start = _initial(workload, features, classes)
    if workload.is_module:
        for task in tasks.values():  # ranks that are forks need not read the module again
            read_again(task.problem.workload)
    gc.freeze()  # every training begins with a collection
    with _ranks(out, tasks) as ranks:
        alone: dict[str, dict[str, Tensor]] = {}
        for task in tasks.values():
            if task.mode not in alone:
                one = Task.of(ALONE[task.mode], graph, task.problem.workload)
                alone[task.mode] = _alone(one, out / task.mode)
        _wait_for(ranks, out)
    for number, task in tasks.items():
        verdicts[number] = _verdict(task, out / str(number), start, alone[task.mode])
    stats = graph.stats
    return {
        "module": _told(workload),
        "graph": {
            "vertices": stats.vertices,
            "edges": stats.edges,
            "features": features,
            "classes": classes,
        },
        "ranks": RANKS,
        "dtype": "float64",
        "within": WITHIN,
        "strategies": [asdict(verdicts[number]) for number in sorted(verdicts)],
    }


def _told(workload: Workload) -> str:
    """What is trained of a user's module, as was proved; '' of a kind of ours."""
    if workload.is_cut:
        return f"forward, cut in {workload.layers} layers, computes what the module does"
    if workload.is_converted:
        return f"our {workload.model} layers compute what the module does"
    return ""


def _asked(question: Mapping[str, Any]) -> tuple[Workload, int, int]:
    """The workload, and the widths of its graph. Raises SpecError."""
    if "workload" in question:
        workload = Workload.model_validate(question["workload"])
        return workload, workload.own.features, workload.own.classes
    model, fields = question["model"], question["fields"]
    if is_module(model):
        workload = workload_of(model, fields, question["features"], question["classes"])
        return workload, workload.own.features, workload.own.classes
    workload = checked(Workload, {**STEP, **fields, "model": model}, "--", ["model", *fields])
    return workload, question["features"] or FEATURES, question["classes"] or CLASSES


def workload_of(
    model: Source,
    fields: Mapping[str, Any],
    features: int | None,
    classes: int | None,
    folder: Path | None = None,
) -> Workload:
    """The one step of a user's module or layer, on a graph of so many columns and classes.

    features, classes: None are the module's own where it has some, else those of a small graph.
    folder: for the parameters of a live module. Raises SpecError."""
    asked = checked(Workload, {**STEP, **fields}, "--", list(fields))
    own = features is None, classes is None
    if names_layer(model, asked.seed):
        return own_layers(asked, str(model), features or FEATURES, classes or CLASSES)
    graph = GraphFields(features or FEATURES, classes or CLASSES)
    user = read(model, asked, graph, folder, own_widths=own)
    return with_module(asked, user, fields)


def _alone(task: Task, out: Path) -> dict[str, Tensor]:
    """One process's weights after the step."""
    out.mkdir()
    train(Rank(0, 1, torch.device("cpu"), "gloo"), task.problem, task.strategy, out, 1, 0)
    return load_file(out / "weights.safetensors")


def _initial(workload: Workload, features: int, classes: int) -> dict[str, Tensor]:
    """The weights before the step."""
    state = dict(net_of(describe(workload, features, classes), workload).state_dict())
    return state_of(state, workload) if workload.is_module else state


def _verdict(
    task: Task, out: Path, start: Mapping[str, Tensor], alone: Mapping[str, Tensor]
) -> Verdict:
    text, workload = task.text, task.problem.workload
    # a row of a batch that two ranks compute counts twice, as in torch.nn.SyncBatchNorm
    is_synced = workload.mode == "mini" and workload.norm == "batch" and text != "gsplit"
    failed = out / "error.txt"
    if failed.exists():
        return Verdict(text, "cannot", None, failed.read_text())
    found = load_file(out / "weights.safetensors")
    gradients = {name: (alone[name] - start[name]).abs().max().item() for name in start}
    least = max(ROUNDING * max(gradients.values()), sys.float_info.min)
    gaps = {
        name: (found[name] - alone[name]).abs().max().item() / max(size, least)
        for name, size in gradients.items()
    }
    name = max(gaps, key=lambda name: math.inf if math.isnan(gaps[name]) else gaps[name])
    gap = gaps[name]
    if not math.isfinite(gap):
        return Verdict(text, "differs", None, f"{name} is not finite after the step")
    if not task.strategy.exact or is_synced:
        # of a tensor whose gradient is rounding a share says nothing
        gap = max((gaps[name] for name, size in gradients.items() if size >= least), default=gap)
        return Verdict(
            text,
            "lossy",
            gap,
            "batch norm counts a row at every rank that computes it, as SyncBatchNorm does"
            if is_synced and gap > WITHIN
            else "it changes gradients by design; its step ran and left finite weights",
        )
    if gap <= WITHIN:
        return Verdict(text, "equal", gap, f"one process's gradient within {WITHIN:g}")
    return Verdict(
        text, "differs", gap, f"the gradient of {name} is off by more than {WITHIN:g} of it"
    )


@contextmanager
def _ranks(out: Path, tasks: Mapping[int, Task]) -> Iterator[list[ForkProcess]]:
    """The ranks: forks of this process, which must have no threads. None outlives the block."""
    listener = listen()
    env = on_this_machine(listener.getsockname()[1], token_hex(16))
    fork = get_context("fork")
    ranks = [fork.Process(target=_be_rank, args=(rank, env, out, tasks)) for rank in range(RANKS)]
    for process in ranks:
        process.start()
    # where they meet; it has a thread, so it is opened after the forks
    store = store_of_this_machine(listener)
    try:
        yield ranks
    finally:
        for process in ranks:
            process.kill()
            process.join()
        del store


def _wait_for(ranks: Sequence[ForkProcess], out: Path) -> None:
    """Wait until all ranks are done. Raises LostRank, which names the one that ended first."""
    until = time.monotonic() + SECONDS

    def place(rank: int) -> str:
        begun = out / f"rank{rank}"
        return begun.read_text() if begun.exists() else "its start"

    running = {process.sentinel: rank for rank, process in enumerate(ranks)}
    while running:
        ended = wait([*running], until - time.monotonic())
        if not ended:
            silent = min(running.values())
            raise LostRank(
                f"rank {silent} of gnnplan check gave no answer in {SECONDS:g} s, in"
                f" {place(silent)}"
            )
        for process in ranks:
            if process.sentinel in ended:
                process.join()
                del running[process.sentinel]
        codes = {rank: process.exitcode for rank, process in enumerate(ranks) if process.exitcode}
        if codes:  # a rank whose peer is lost fails too: who was killed was first
            rank, code = min(codes.items(), key=itemgetter(1))
            words = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            said = (out / FAILED).read_text() if code > 0 and (out / FAILED).exists() else ""
            if said:
                number, _, words = said.partition(" ")
                rank = int(number)
            raise LostRank(f"rank {rank} of gnnplan check was lost in {place(rank)} ({words})")


def _be_rank(number: int, env: Mapping[str, str], out: Path, tasks: Mapping[int, Task]) -> NoReturn:
    """Be a rank of the fork that calls this: train all tasks, and end."""
    code = 1
    try:
        die_with_parent()
        os.environ |= {
            **env,
            "TORCHELASTIC_RESTART_COUNT": "0",
            "RANK": str(number),
            "LOCAL_RANK": str(number),
            "WORLD_SIZE": str(RANKS),
            "LOCAL_WORLD_SIZE": str(RANKS),
        }
        base = open_rank(timeout_s=60.0, on_cpu=True)
        for task_number, task in tasks.items():
            (out / f"rank{number}").write_text(task.text)
            here = out / str(task_number)
            rank = base.anew()  # what it records is of one training
            if task.problem.ranks == 1:  # of one process, beside which the other rank goes on
                if number:
                    continue
                rank = Rank(0, 1, rank.device, rank.backend)
            try:
                train(rank, task.problem, task.strategy, here, 1, 0)
            except SpecError as error:  # on all ranks alike: what the model lacks
                write_atomically(here / "error.txt", str(error))
        base.close()
        code = 0
    except BaseException as error:
        with suppress(FileExistsError), (out / FAILED).open("x") as first:
            first.write(f"{number} {type(error).__name__}: {error}"[:500])
        traceback.print_exc()
    finally:
        leave(code)
