"""plan, train and validate: on one rank, and on two and four ranks that share the card.

`references` trains the same on CPU ranks, beside the card's work; the page compares the losses.
NCCL refuses two ranks on one GPU, so those that share it go over Gloo, through host memory; with a
GPU for every rank they go over NCCL."""

from __future__ import annotations

import os
import shutil
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import torch

import gnnplan
from gnnplan.executor.launch.run_request import Options, trainable
from gnnplan.executor.ranks.rank import Rank, open_rank
from gnnplan.executor.train import train
from gnnplan.planner.decision.plan import chosen
from gnnplan.planner.evidence.runs import warm_epochs
from gnnplan.planner.strategies import parse
from gnnplan.planner.vocabulary.errors import Infeasible, SpecError
from gnnplan.planner.vocabulary.trace import overlap, read_traces
from gpu_stages import question
from gpu_stages.clock import whole_s
from gpu_stages.graphs import edge_index
from gpu_stages.peers import examples_epoch
from gpu_stages.record import LeftOut, Record, Row, Setting

# Epochs that are trained; those whose losses must be the CPU's, and how nearly: later ones drift
# apart by rounding. Where rows are rounded, a last bit decides which way.
EPOCHS, SAME = 10, 5
TOLERANCE, TOLERANCE_ROUNDED = 1e-4, 1e-2
FULL = (
    "graph_parallel",
    "graph_parallel(narrow=True)",
    "graph_parallel(checkpoint=True)",
    "graph_parallel(trim=True)",
    "gnnpipe(chunks=4)",
    "bns(p=0.5)",
    "pipegcn",
)
MINI = ("data_parallel", "gsplit", "p3", "p3(pipelined=True)")
SHARED = (
    "graph_parallel",
    "graph_parallel(narrow=True)",
    "graph_parallel(buckets=2)",
    "pipegcn",
    "gnnpipe(chunks=4)",
    "bns(p=0.5)",
    "granndis(depth=1)",
    *MINI,
)
# of these many ranks, the most telling
OF_FOUR = ("graph_parallel(narrow=True)", "pipegcn", "gnnpipe(chunks=4)", "granndis(depth=3)", "p3")
# ranks, strategy, type of rows
FURTHER = (
    (1, "graph_parallel", "bfloat16"),
    (2, "graph_parallel", "bfloat16"),
    (2, "graph_parallel(bits=2)", "float32"),
    (2, "graph_parallel(bits='adaptive')", "float32"),
    (2, "gnnpipe(chunks=4,bits=4)", "float32"),
    (2, "feature_parallel", "float32"),
    (2, "tensor3d(x=1,y=2,z=1)", "float32"),
    (2, "offload(chunks=2)", "float32"),
    (2, "dnp", "float32"),
    (2, "snp", "float32"),
    (4, "tensor3d(x=2,y=1,z=2)", "float32"),
    (4, "offload(chunks=2)", "bfloat16"),
)
# of modules.py, the most telling first
MODULES = ("Gcn", "Sage", "Gat", "SageMax", "Transformer", "Tag", "Gen", "Appnp")
# The share of the memory of graph_parallel's data that there is instead. On a CPU the memory of
# an offload's devices and that of their server are one.
TIGHT, TIGHT_SMALL = 0.6, 0.95


@dataclass(frozen=True)
class Case:
    """A training."""

    strategy: str
    ranks: int = 1
    model: str = "sage"
    dtype: str = "float32"
    tight: bool = False  # in less memory than graph_parallel needs
    module: str = ""  # of modules.py, instead of a model

    def __str__(self) -> str:
        model = f" of {self.module or self.model}" if self.module or self.model != "sage" else ""
        dtype = f" in {self.dtype}" if self.dtype != "float32" else ""
        memory = " in little memory" if self.tight else ""
        ranks = f"{self.ranks} rank{'s' * (self.ranks > 1)}"
        return f"{self.strategy}{model}{dtype}{memory}, {ranks}"

    @property
    def folder(self) -> str:
        """The name with letters, digits, '-' and '_' only."""
        return "".join(each if each.isalnum() or each in "-_" else "-" for each in str(self))


def cases(setting: Setting) -> dict[str, list[Case]]:
    """The trainings of each stage, the most telling first."""
    if setting.small:
        further = [Case("offload(chunks=8)", tight=True), Case("graph_parallel(bits=2)", 2)]
        one = [Case("graph_parallel"), Case("data_parallel")]
        modules = [Case("graph_parallel", module="Gat")]
        return {"one": one, "shared": [Case("pipegcn", 2)], "further": further, "modules": modules}
    models = [Case("graph_parallel", model=model) for model in ("gcn", "gat", "gcnii", "resgcn")]
    return {
        "one": [*map(Case, FULL), *models, *map(Case, MINI[:2])],
        "shared": [Case(each, 2) for each in SHARED] + [Case(each, 4) for each in OF_FOUR],
        "further": [
            Case("offload", tight=True),
            *(Case(strategy, ranks, dtype=dtype) for ranks, strategy, dtype in FURTHER),
        ],
        "modules": [
            *(Case("graph_parallel", module=module) for module in MODULES),
            *(Case("graph_parallel", 2, module=module) for module in MODULES[1:4]),
            Case("data_parallel", module="Sage"),
            Case("offload(chunks=4)", module="Gat"),
            Case("gnnpipe(chunks=4)", 2, module="Gcn"),
        ],
    }


def run(setting: Setting, record: Record) -> None:
    """The cases of the record's stage, on the device."""
    _ = setting.torch_device
    for case in cases(setting)[record.stage]:
        record.attempt(str(case), partial(_trained, setting, case))


def run_references(setting: Setting, record: Record) -> None:
    """Cases on the CPU, several at a time on half of the cores."""
    at_once = max(1, (os.cpu_count() or 1) // 4)  # most are of two ranks
    with ProcessPoolExecutor(at_once, get_context("spawn"), initializer=_stand_back) as pool:
        found = {
            name: pool.submit(guarded_reference, setting, case)
            for stage, of_stage in cases(setting).items()
            for case in of_stage
            if record.asks(name := f"{stage}: {case}")
        }
        for name, reference in found.items():
            record.attempt(name, reference.result)


def _stand_back() -> None:
    """Leave the GPU, and as far as possible the processor, to others."""
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    torch.set_num_threads(1)
    os.nice(10)


def guarded_reference(setting: Setting, case: Case) -> Row:
    """Return a reference, or raise an error that can be pickled: others would end the pool."""
    try:
        return _reference(setting, case)
    except LeftOut:
        raise
    except Exception as error:
        raise RuntimeError(f"{type(error).__name__}: {error}") from None


def _reference(setting: Setting, case: Case) -> Row:
    """The losses of a case on the CPU."""
    plan = planned(setting, case)
    with tempfile.TemporaryDirectory() as folder:
        run = _run(plan, case, Path(folder) / "run", on_cpu=True, epochs=SAME)
        return {
            "case": str(case),
            "losses": [row["loss"] for row in run.metrics],
            "epoch_s": run.document["epoch_s"],
        }


def planned(setting: Setting, case: Case) -> gnnplan.Plan:
    """The plan of a case. Raises LeftOut if it suits no cluster of this device."""
    is_mini = parse(case.strategy).mode == "mini"
    more: dict[str, Any] = {"dtype": case.dtype, **(question.batches(setting) if is_mini else {})}
    if case.model in ("gcnii", "resgcn"):
        more |= {"layers": 4 if setting.small else 8}
    if case.module:
        more |= {"fanout": more["fanout"][:2]} if is_mini else {}  # it has two layers
        workload = question.of_module(case.module, epochs=EPOCHS, **more)
    else:
        workload = question.workload(setting, model=case.model, epochs=EPOCHS, **more)
    servers = 2 if case.strategy.startswith("granndis") else 1
    cluster = question.cluster(setting, case.ranks // servers, servers)
    graph = question.graph(setting)
    if case.tight:
        # without the code of a CPU's products, which offload counts for every chunk
        with_memory = partial(question.cluster, setting, case.ranks, product_code=0.0)
        whole = gnnplan.plan(
            graph, with_memory(), workload, strategy="graph_parallel", ranks=case.ranks
        )
        memory = whole.document["best"]["predicted"]["memory"]
        data = sum(memory.values()) - memory["runtime"]
        share = TIGHT_SMALL if setting.small else TIGHT
        cluster = with_memory(memory=memory["runtime"] + share * data)
    try:
        return gnnplan.plan(graph, cluster, workload, strategy=case.strategy, ranks=case.ranks)
    except (SpecError, Infeasible) as error:
        raise LeftOut(str(error)) from error


def _run(plan: gnnplan.Plan, case: Case, out: Path, on_cpu: bool, epochs: int) -> gnnplan.Run:
    """Train: one rank in this process, where no process group is needed, others in their own."""
    if case.ranks > 1:
        return plan.run(out, epochs=epochs, eval_every=0, checkpoint_every=0, timeout_s=60)
    document = plan.document
    problem, strategy = plan.problem, trainable(plan.problem, chosen(document))
    out.mkdir(parents=True)
    plan.write(out / "plan.json")
    Options(eval_every=0, checkpoint_every=0).write(out)
    rank: Rank = open_rank(on_cpu=on_cpu)
    try:
        train(rank, problem, strategy, out, epochs, 0)
    finally:
        rank.close()
    return gnnplan.Run(out)


def _trained(setting: Setting, case: Case) -> Row:
    """A run beside its prediction; the page adds the same training on the CPU."""
    plan = planned(setting, case)
    out = setting.out / "runs" / case.folder
    shutil.rmtree(out, ignore_errors=True)
    run = _run(plan, case, out, setting.device == "cpu", EPOCHS)
    found = gnnplan.validate(out).document
    memory, bytes_equal, order = found["memory"], found["bytes"]["equal"], found["order"]
    rounds = case.dtype == "bfloat16" or parse(case.strategy).knobs().get("bits") is not None
    wrong = [
        *([] if bytes_equal else ["bytes are not those of the plan"]),
        *([] if order["equal"] else [f"order: {order['first_difference']}"]),
    ]
    declared = None
    if case.tight:
        predicted = plan.document["best"]["predicted"]["memory"]
        declared = plan.problem.cluster.device.memory - predicted["runtime"]
        if setting.device == "cuda" and memory["measured_bytes"] > declared:
            wrong.append(f"{memory['measured_bytes']:.3g} B of the declared {declared:.3g} B")
    exchanged = overlap(read_traces(out)).values()  # hidden and exposed seconds of each rank
    hidden, moved = sum(hidden for hidden, _ in exchanged), sum(map(sum, exchanged))
    return {
        "case": str(case),
        "strategy": str(chosen(plan.document)),
        "ranks": case.ranks,
        "model": case.module or case.model,
        "alone_s": _alone_s(setting, case, plan) if case.module and case.ranks == 1 else None,
        "dtype": case.dtype,
        "backend": run.document["backend"],
        "epoch_s": median(warm_epochs(run.metrics)),
        "one_by_one_s": median(row["epoch_s"] for row in run.metrics[2:5]),
        "predicted_s": found["step"]["predicted_s"],
        "bytes_equal": bytes_equal,
        "bytes": sum(found["bytes"]["counted"].values()),
        "order_equal": order["equal"],
        "memory_bytes": memory["measured_bytes"],
        "predicted_bytes": memory["predicted_bytes"],
        "declared_bytes": declared,
        "losses": [row["loss"] for row in run.metrics],
        "tolerance": TOLERANCE_ROUNDED if rounds else TOLERANCE,
        "diagnosis": found["diagnosis"],
        "overlapped": hidden / moved if moved else None,
        "wrong": wrong,
    }


def _alone_s(setting: Setting, case: Case, plan: gnnplan.Plan) -> float:
    """Seconds of an epoch of the module by itself on this device."""
    from gpu_stages import modules

    problem, device = plan.problem, setting.torch_device
    edges = edge_index(problem.data).to(device)
    make = getattr(modules, case.module)
    module = make(problem.stats.features, problem.stats.classes).to(device)
    epoch = examples_epoch(problem, device, module, lambda x: module(x, edges))
    for _ in range(3):
        epoch()
    return whole_s(device, epoch, setting.small)
