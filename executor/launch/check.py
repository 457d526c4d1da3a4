"""`gnnplan check`: a comparison of all strategies' gradients with those of one process.

On a small graph, with a user's model, every strategy takes one step of gradient descent with rate
1, in float64, on two CPU ranks over Gloo. The change of the weights is then the gradient, and must
equal the gradient of one process. Mini-batch strategies take all training vertices as one batch. A
strategy of a single rank (offload) trains on rank 0, while rank 1 moves on.

`work` is the program of the ranks that `compare` starts. All strategies share one process group."""

from __future__ import annotations

import gc
import json
import math
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from gnnplan.executor.launch.launcher import unwound_by_signals
from gnnplan.executor.modules.bind import GraphFields
from gnnplan.executor.modules.read import (
    Source,
    net_of,
    read,
    read_again,
    with_module,
)
from gnnplan.executor.ranks.activity import Activity
from gnnplan.executor.ranks.rank import Rank, open_rank
from gnnplan.executor.train import train
from gnnplan.planner.cluster.spec import Cluster, Device, Link
from gnnplan.planner.gnn.model import describe
from gnnplan.planner.gnn.workload import Workload, is_module
from gnnplan.planner.graph.graph import Graph
from gnnplan.planner.graph.load import load
from gnnplan.planner.problem.inputs import checked
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies import Example, Strategy, families, parse
from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.planner.vocabulary.files import Json, write_atomically

RANKS = 2
FEATURES, CLASSES = 12, 4  # the graph's widths, unless the model fixes them
STEP = {"optimizer": "sgd", "lr": 1.0, "epochs": 1, "dtype": "float64"}
SECONDS = 60.0  # after which a peer that does not answer counts as lost
WITHIN = 1e-9  # tolerance, relative to a gradient's largest number
# A tensor whose gradient is this much smaller than the largest of the model has rounding errors
# only: a bias before a norm, for instance.
ROUNDING = 1e-6
ALONE = {"full": "graph_parallel", "mini": "data_parallel"}  # mode -> strategy of one process


@dataclass(frozen=True)
class Verdict:
    """The result of one strategy.

    answer: 'equal' to one process's gradient; 'differs', although the strategy claims to be exact;
    'lossy', if the strategy changes the gradient by design: its step only has to leave finite
    weights; or 'cannot' run the model. gap: the largest difference from one process's gradient,
    relative to the largest number in a tensor; None for 'cannot'."""

    strategy: str
    answer: str
    gap: float | None
    reason: str


def posed(
    text: str, graph: Graph, workload: Workload, ranks: int = 1, servers: int = 1
) -> tuple[Problem, Strategy]:
    """Return a strategy with the problem on which it takes the step.

    Raises SpecError if the workload does not suit the strategy."""
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
    return problem, strategy


def tried() -> list[tuple[str, Example]]:
    """Return the examples of all strategies that run on so few ranks, with their modes."""
    return [
        (family.mode, example)
        for family in families()
        for example in family.examples
        if example.ranks <= RANKS
    ]


def compare(
    model: Source, fields: Mapping[str, Any], features: int | None, classes: int | None
) -> Json:
    """Return the settings of the comparison and a verdict on each strategy, from two ranks on this
    machine. Parameters: see `asked`. Raises SpecError, LostRank."""
    from gnnplan.executor.launch import agent  # its import takes 1 s, and ranks do without it

    with unwound_by_signals() as unwind, TemporaryDirectory(prefix="gnnplan-check-") as folder:
        out = Path(folder)
        question = asked(model, fields, features, classes, out)
        (out / "question.json").write_text(json.dumps(question))
        names = [f"rank {rank} of gnnplan check" for rank in range(RANKS)]
        watched = agent.Watched(out, names, SECONDS, unwind, lambda: "No strategy was judged")
        agent.run(["check", folder], watched, [0] * RANKS, (), {})
        answer: Json = json.loads((out / "answer.json").read_text())
        return answer


def asked(
    model: Source,
    fields: Mapping[str, Any],
    features: int | None,
    classes: int | None,
    folder: Path,
) -> Json:
    """Return what ranks compare: the workload of one step, and its graph's features and classes.

    fields: of the Workload that the user has set. features, classes: None: the model's own, or the
    defaults above. folder: for the parameters of a live module. Raises SpecError."""
    widths = features or FEATURES, classes or CLASSES
    if isinstance(model, str) and not is_module(model):
        workload = checked(Workload, {**STEP, **fields, "model": model}, "--", ["model", *fields])
    else:
        workload = checked(Workload, {**STEP, **fields}, "--", list(fields))
        graph = GraphFields(*widths, own=(features is None, classes is None))
        workload = with_module(workload, read(model, workload, graph, folder), fields)
        widths = workload.own.features, workload.own.classes
    return {
        "workload": workload.model_dump(mode="json"),
        "features": widths[0],
        "classes": widths[1],
    }


def work(out: Path, activity: Activity) -> None:
    """Train all strategies as one of two ranks; rank 0 writes answer.json.

    The folder's question.json holds what `asked` returns; answer.json, what `compare` does."""
    os.dup2(2, 1)  # prints of a user's file go to standard error
    question = json.loads((out / "question.json").read_text())
    workload = Workload.model_validate(question["workload"])
    features, classes = question["features"], question["classes"]
    graph = load(
        f"synthetic:community?vertices=60&edges=400&features={features}&classes={classes}&seed=0"
    )
    assert isinstance(graph, Graph)
    base = open_rank(timeout_s=SECONDS, on_cpu=True)
    base.recorder.activity = activity
    start = dict(net_of(describe(workload, features, classes), workload).state_dict())
    if workload.is_module:
        start = read_again(workload).trained(start)
    gc.freeze()  # every training begins with a garbage collection, which this makes cheap
    whole_batch = {"mode": "mini", "batch": graph.stats.train_vertices, "fanout": "full"}
    exact: dict[str, dict[str, Tensor]] = {}
    verdicts = []
    for number, (mode, example) in enumerate(tried()):
        text, changes = example.strategy, whole_batch if mode == "mini" else {}
        activity.begin("phase", "")
        activity.begin("strategy", text)
        here = out / str(number)
        rank = base.anew()  # a rank records one training only
        if example.ranks == 1:
            rank = Rank(0, 1, base.device, base.backend)
            if base.rank:  # rank 0 trains alone, this rank moves on
                continue
        try:
            mode_workload = checked(Workload, workload.model_dump() | changes, "", ["mode"])
            task = posed(text, graph, mode_workload, example.ranks, example.servers)
            here.mkdir(exist_ok=True)
            train(rank, *task, here, 1, 0)
        except SpecError as error:  # the same on all ranks: the strategy cannot run the model
            verdicts.append(Verdict(text, "cannot", None, str(error).removeprefix("mode: ")))
            continue
        if mode not in exact:  # on both ranks, so that they open their samplers in the same order
            alone, folder = posed(ALONE[mode], graph, mode_workload), out / f"{mode}{base.rank}"
            folder.mkdir()
            train(Rank(0, 1, base.device, base.backend), *alone, folder, 1, 0)
            exact[mode] = load_file(folder / "weights.safetensors")
        if base.rank == 0:
            verdicts.append(_verdict(text, *task, here, start, exact[mode]))
    base.close()
    if base.rank:
        return
    stats = graph.stats
    found = {
        "module": _proved(workload),
        "graph": {
            "vertices": stats.vertices,
            "edges": stats.edges,
            "features": features,
            "classes": classes,
        },
        "ranks": RANKS,
        "dtype": "float64",
        "within": WITHIN,
        "strategies": [asdict(verdict) for verdict in verdicts],
    }
    write_atomically(out / "answer.json", json.dumps(found))


def _proved(workload: Workload) -> str:
    """Return what was proved of a user's module when it was read; '' for a built-in model."""
    if workload.is_cut:
        return f"forward, cut in {workload.layers} layers, computes what the module does"
    if workload.is_converted:
        return f"our {workload.model} layers compute what the module does"
    return ""


def _verdict(
    text: str,
    problem: Problem,
    strategy: Strategy,
    out: Path,
    start: Mapping[str, Tensor],
    exact: Mapping[str, Tensor],
) -> Verdict:
    workload = problem.workload
    # each rank that computes a row of a batch counts it in batch norm, as torch.nn.SyncBatchNorm
    is_synced = workload.mode == "mini" and workload.norm == "batch" and text != "gsplit"
    found = load_file(out / "weights.safetensors")
    gradients = {name: (exact[name] - start[name]).abs().max().item() for name in start}
    least = max(ROUNDING * max(gradients.values()), sys.float_info.min)
    gaps = {
        name: (found[name] - exact[name]).abs().max().item() / max(size, least)
        for name, size in gradients.items()
    }
    name = max(gaps, key=lambda name: math.inf if math.isnan(gaps[name]) else gaps[name])
    gap = gaps[name]
    if not math.isfinite(gap):
        return Verdict(text, "differs", None, f"{name} is not finite after the step")
    if not strategy.exact or is_synced:
        # leave out tensors whose gradient is rounding: a relative difference says nothing of them
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
