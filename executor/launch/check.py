"""Proves on a small graph that strategies give one process's gradients for a model.

Every strategy takes one step of gradient descent with rate 1, in float64, on two ranks. What the
weights have moved by is then the gradient, and it must equal one process's. Mini-batch strategies
take all training vertices as their one batch. The two ranks are processes that take one strategy
after the other (`main`), so their libraries are imported once."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from gnnplan.executor.layers.models import Net
from gnnplan.executor.layers.own import user_workload
from gnnplan.executor.modules.read import state_of
from gnnplan.executor.ranks.rank import Rank, open_rank
from gnnplan.executor.train import train
from gnnplan.planner.cluster.spec import Cluster, Device, Link
from gnnplan.planner.gnn.model import describe
from gnnplan.planner.gnn.workload import Workload, is_module
from gnnplan.planner.graph.graph import Graph
from gnnplan.planner.graph.load import load
from gnnplan.planner.problem.inputs import checked
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies import Strategy, parse
from gnnplan.planner.vocabulary.errors import GnnplanError, LostRank, SpecError

RANKS = 2
WITHIN = 1e-9  # of a gradient's largest number
# A gradient this much smaller than the model's largest is rounding: that of a bias before a norm.
ROUNDING = 1e-6
# (mode, servers, strategy); each family, and the options that run other code
TRIED = (
    ("full", 1, "graph_parallel"),
    ("full", 1, "graph_parallel(narrow=True)"),
    ("full", 1, "graph_parallel(checkpoint=True)"),
    ("full", 2, "granndis"),
    ("full", 1, "pipegcn"),
    ("full", 1, "gnnpipe(stages=2,chunks=1)"),
    ("full", 1, "gnnpipe(stages=2,chunks=3)"),
    ("mini", 1, "data_parallel"),
    ("mini", 1, "gsplit"),
    ("mini", 1, "p3"),
)
ALONE = {"full": "graph_parallel", "mini": "data_parallel"}


@dataclass(frozen=True)
class Verdict:
    """What a strategy does with the model.

    answer: 'exact', 'differs', 'lossy' (by design, it runs) or 'cannot'. gap: the largest
    difference from one process's gradient, as a share of the largest number in it, of a strategy
    that says it is exact."""

    strategy: str
    answer: str
    gap: float | None
    reason: str


def check(model: str, features: int, classes: int, fields: Mapping[str, Any]) -> list[Verdict]:
    """The verdict on each strategy, for a kind of model or a user's `file.py:Name`.

    fields: of the Workload. Raises SpecError where the model itself is not understood."""
    given = {"optimizer": "sgd", "lr": 1.0, "epochs": 1, "dtype": "float64", **fields}
    if is_module(model):
        asked = checked(Workload, given, "--", list(fields))
        workload = user_workload(asked, model, features, classes, fields)
    else:
        workload = checked(Workload, {**given, "model": model}, "--", ["model", *fields])
    graph = (
        f"synthetic:community?vertices=60&edges=400&features={features}&classes={classes}&seed=0"
    )
    loaded = load(graph)
    assert isinstance(loaded, Graph)
    verdicts: dict[int, Verdict] = {}
    tasks: dict[int, dict[str, Any]] = {}
    for number, (mode, servers, text) in enumerate(TRIED):
        task: dict[str, Any] = {"graph": graph, "servers": servers, "strategy": text}
        try:
            changes: dict[str, Any] = (
                {"mode": mode, "batch": loaded.stats.train_vertices, "fanout": "full"}
                if mode == "mini"
                else {}
            )
            task["workload"] = checked(
                Workload, workload.model_dump() | changes, "", ["mode"]
            ).model_dump(mode="json")
            _settled(task, RANKS)
            tasks[number] = task
        except SpecError as error:
            verdicts[number] = Verdict(text, "cannot", None, str(error).removeprefix("mode: "))
    with tempfile.TemporaryDirectory(prefix="gnnplan-check-") as folder:
        out = Path(folder)
        (out / "tasks.json").write_text(json.dumps(tasks))
        _run(out)
        alone: dict[str, dict[str, Tensor]] = {}
        start = _initial(workload, features, classes)
        for number, task in tasks.items():
            mode = task["workload"]["mode"]
            if mode not in alone:
                alone[mode] = _alone(task, ALONE[mode], out / mode)
            verdicts[number] = _verdict(task, out / str(number), start, alone[mode])
    return [verdicts[number] for number in sorted(verdicts)]


def _settled(task: Mapping[str, Any], ranks: int) -> tuple[Problem, Strategy]:
    """The problem and the strategy of a task. Raises SpecError if they do not suit."""
    graph = load(task["graph"])
    assert isinstance(graph, Graph)
    servers = min(task["servers"], ranks)
    cluster = Cluster(
        servers=servers,
        gpus_per_server=ranks // servers,
        device=Device(kind="cpu", memory=64e9, gemm=1e11, memory_bandwidth=1e10),
        intra_node=Link(bandwidth=1e9),
        inter_node=Link(bandwidth=1e9),
    )
    workload = Workload.model_validate(task["workload"])
    problem = Problem(graph.stats, graph, workload, cluster, "metis")
    strategy = parse(task["strategy"]).settle(problem)
    strategy.check(problem)
    return problem, strategy


def _alone(task: Mapping[str, Any], strategy: str, out: Path) -> dict[str, Tensor]:
    """One process's weights after the step."""
    problem, settled = _settled({**task, "strategy": strategy}, 1)
    out.mkdir()
    train(Rank(0, 1, torch.device("cpu"), "gloo"), problem, settled, out, 1, 0)
    return load_file(out / "weights.safetensors")


def _initial(workload: Workload, features: int, classes: int) -> dict[str, Tensor]:
    """The weights before the step."""
    state = dict(Net(describe(workload, features, classes), workload).state_dict())
    return state_of(state, workload) if workload.is_converted else state


def _verdict(
    task: Mapping[str, Any], out: Path, start: Mapping[str, Tensor], alone: Mapping[str, Tensor]
) -> Verdict:
    _, strategy = _settled(task, RANKS)
    text = task["strategy"]
    failed = out / "error.txt"
    if failed.exists():
        return Verdict(text, "cannot", None, failed.read_text())
    found = load_file(out / "weights.safetensors")
    gradients = {name: (alone[name] - start[name]).abs().max().item() for name in start}
    least = ROUNDING * max(gradients.values())
    gap, name = max(
        ((found[name] - alone[name]).abs().max().item() / max(size, least), name)
        for name, size in gradients.items()
    )
    if not strategy.exact:
        return Verdict(text, "lossy", None, "by design; it runs")
    if gap <= WITHIN:
        return Verdict(text, "exact", gap, f"one process's gradient within {WITHIN:g}")
    return Verdict(
        text, "differs", gap, f"the gradient of {name} is off by more than {WITHIN:g} of it"
    )


def _run(out: Path) -> None:
    """Start the ranks, and wait for them."""
    from gnnplan.executor.launch import agent

    def blame(failures: dict[int, Any]) -> GnnplanError:
        return LostRank(
            f"rank {min(failures)} of gnnplan check was lost; its words stand above this line"
        )

    arguments = ["-P", "-m", "gnnplan.executor", "check", str(out)]
    agent.run(arguments, RANKS, 0, blame, lambda error, left: None)


def main() -> None:
    """Be a rank: train all tasks of the folder that is named."""
    out = Path(sys.argv[1])
    base = open_rank(timeout_s=60.0)
    for number, task in json.loads((out / "tasks.json").read_text()).items():
        here = out / number
        here.mkdir(exist_ok=True)
        problem, strategy = _settled(task, RANKS)
        rank = replace(base, spans=[], sent={})  # what it records is of one training
        try:
            train(rank, problem, strategy, here, 1, 0)
        except SpecError as error:  # on all ranks alike: what the model lacks
            (here / f".rank{base.rank}").write_text(str(error))
            (here / f".rank{base.rank}").replace(here / "error.txt")
    base.close()


def as_documents(verdicts: list[Verdict]) -> list[dict[str, Any]]:
    """The verdicts, JSON-ready."""
    return [asdict(verdict) for verdict in verdicts]
