"""plan, train and validate: on one rank, and on two and four ranks that share the card.

Losses are compared with the same plan's on CPU ranks. NCCL refuses two ranks on one GPU, so those
that share it go over Gloo, through host memory; with a GPU for every rank they go over NCCL."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

import gnnplan
from gnnplan.executor.launch.checks import trainable
from gnnplan.executor.launch.options import Options
from gnnplan.executor.ranks.rank import Rank, open_rank
from gnnplan.executor.train import train
from gnnplan.planner.decision.plan import chosen
from gnnplan.planner.strategies import parse
from gnnplan.planner.vocabulary.errors import Infeasible, SpecError
from gnnplan.planner.vocabulary.trace import overlap, read_traces
from gpu_stages import question
from gpu_stages.record import LeftOut, Record, Row, Setting

EPOCHS = 20
# Epochs whose losses must be the CPU's, and how nearly; later ones drift apart by rounding. Where
# rows are rounded, a last bit decides which way.
SAME, TOLERANCE, TOLERANCE_ROUNDED = 5, 1e-4, 1e-2
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
OF_FOUR = ("graph_parallel(narrow=True)", "pipegcn", "gnnpipe(chunks=4)", "granndis", "p3")
TRACED = ("graph_parallel", "pipegcn")  # whose traces are kept beside the JSON
# ranks, strategy, type of rows
FURTHER = (
    (1, "graph_parallel", "bfloat16"),
    (1, "offload(chunks=3)", "float32"),
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
FURTHER_SMALL = (
    (1, "offload(chunks=3)", "float32"),
    (2, "graph_parallel(bits=2)", "float32"),
)


def run_one(setting: Setting, record: Record) -> None:
    """One rank, in this process: no process group is needed."""
    device = setting.torch_device
    models = ("sage",) if setting.small else ("sage", "gcn", "gcnii", "gat", "resgcn")
    for strategy in ("graph_parallel", "data_parallel") if setting.small else (*FULL, *MINI):
        record.attempt(f"{strategy}, one rank", partial(_one, setting, device, strategy))
    for model in models[1:]:
        what = f"graph_parallel of {model}, one rank"
        record.attempt(what, partial(_one, setting, device, "graph_parallel", model=model))


def run_shared(setting: Setting, record: Record) -> None:
    """Several ranks, as `gnnplan run` starts them."""
    _ = setting.torch_device
    cases = [(2, strategy) for strategy in SHARED] + [(4, strategy) for strategy in OF_FOUR]
    for ranks, strategy in [(2, "pipegcn")] if setting.small else cases:
        record.attempt(f"{strategy}, {ranks} ranks", partial(_shared, setting, ranks, strategy))


def run_further(setting: Setting, record: Record) -> None:
    """Types of rows and strategies of which neither stage above has any."""
    device = setting.torch_device
    for ranks, strategy, dtype in FURTHER_SMALL if setting.small else FURTHER:
        case = partial(_one, setting, device) if ranks == 1 else partial(_shared, setting, ranks)
        what = f"{strategy} in {dtype}, {ranks} rank{'s' * (ranks > 1)}"
        record.attempt(what, partial(case, strategy, dtype=dtype))


def _plan(
    setting: Setting, strategy: str, ranks: int, model: str = "sage", dtype: str = "float32"
) -> gnnplan.Plan:
    is_mini = parse(strategy).mode == "mini"
    more: dict[str, Any] = {"dtype": dtype, **(question.batches(setting) if is_mini else {})}
    if model in ("gcnii", "resgcn"):
        more |= {"layers": 4 if setting.small else 8}
    servers = 2 if strategy.startswith("granndis") else 1
    cluster = question.cluster(setting, ranks // servers, servers)
    try:
        return gnnplan.plan(
            question.graph(setting),
            cluster,
            question.workload(setting, model=model, epochs=_epochs(setting), **more),
            strategy=strategy,
            ranks=ranks,
        )
    except (SpecError, Infeasible) as error:
        raise LeftOut(str(error)) from error


def _epochs(setting: Setting) -> int:
    return 4 if setting.small else EPOCHS


def _one(
    setting: Setting,
    device: torch.device,
    strategy: str,
    model: str = "sage",
    dtype: str = "float32",
) -> Row:
    plan = _plan(setting, strategy, 1, model, dtype)
    runs = setting.out / "runs"
    name = f"one-{model}-{strategy}-{dtype}"
    folders = [_folder(runs, name), _folder(runs, f"{name}-cpu")]
    for folder, where in zip(folders, (device, torch.device("cpu")), strict=True):
        _train_here(plan, where, folder)
    return {"model": model, "ranks": 1, **_compared(strategy, dtype, *folders)}


def _train_here(plan: gnnplan.Plan, device: torch.device, out: Path) -> None:
    """What a rank of `gnnplan run` does, in this process."""
    document = plan.document
    problem, strategy = trainable(plan.problem, chosen(document))
    plan.write(out / "plan.json")
    Options(eval_every=0, checkpoint_every=0).write(out)
    rank: Rank = open_rank(on_cpu=device.type == "cpu")
    # the device's clock is then read in half of the epochs only
    rank.traced = strategy.steps(problem) * problem.workload.epochs // 2
    try:
        train(rank, problem, strategy, out, problem.workload.epochs, 0)
    finally:
        rank.close()


def _shared(setting: Setting, ranks: int, strategy: str, dtype: str = "float32") -> Row:
    plan = _plan(setting, strategy, ranks, dtype=dtype)
    runs, name = setting.out / "runs", f"{ranks}-{strategy}-{dtype}"
    # a run on the CPU is its own reference
    wheres = {setting.device: name, "cpu": name if setting.device == "cpu" else f"{name}-cpu"}
    for device, each in wheres.items():
        with _devices(device):
            folder = _folder(runs, each, make=False)
            plan.run(folder, eval_every=0, checkpoint_every=0, timeout_s=60)
    folders = [_named(runs, wheres[device]) for device in (setting.device, "cpu")]
    row = {"model": "sage", "ranks": ranks, **_compared(strategy, dtype, *folders)}
    spans = read_traces(folders[0])
    by_rank = overlap(spans).values()
    hidden, exposed = (
        (sum(seconds) for seconds in zip(*by_rank, strict=True)) if by_rank else (0, 0)
    )
    moved = hidden + exposed
    if ranks == 2 and strategy in TRACED and dtype == "float32":
        for path in folders[0].glob("trace.rank*.json"):
            shutil.copy(path, setting.out / f"shared.{strategy}.{path.name}")
    return {**row, "overlapped": hidden / moved if moved else None}


@contextmanager
def _devices(device: str) -> Iterator[None]:
    """Processes that are started inside the with block see no GPU if `device` is 'cpu'."""
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    try:
        yield
    finally:
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
        if before is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = before


def _named(runs: Path, name: str) -> Path:
    """The folder of a run, whose name has letters, digits, '-' and '_' only."""
    letters = (each if each.isalnum() or each in "-_" else "-" for each in name)
    return runs / "".join(letters)


def _folder(runs: Path, name: str, make: bool = True) -> Path:
    """A new folder for a run, or its name where the run makes it."""
    folder = _named(runs, name)
    shutil.rmtree(folder, ignore_errors=True)
    (folder if make else runs).mkdir(parents=True, exist_ok=True)
    return folder


def _compared(strategy: str, dtype: str, on_device: Path, on_cpu: Path) -> Row:
    """A run beside its prediction, and beside the same training on the CPU."""
    found = gnnplan.validate(on_device).document
    run, reference = gnnplan.Run(on_device), gnnplan.Run(on_cpu)
    pairs = [
        (ours["loss"], theirs["loss"])
        for ours, theirs in zip(run.metrics, reference.metrics, strict=True)
    ]
    seconds = [row["epoch_s"] for row in run.metrics][2:]
    memory, bytes_equal, order = found["memory"], found["bytes"]["equal"], found["order"]
    gaps = [abs(ours / theirs - 1) for ours, theirs in pairs]
    off = max(gaps[:SAME])
    rounds = dtype == "bfloat16" or parse(strategy).knobs().get("bits") is not None
    tolerance = TOLERANCE_ROUNDED if rounds else TOLERANCE
    wrong = [
        *([] if bytes_equal else ["bytes are not those of the plan"]),
        *([] if order["equal"] else [f"order: {order['first_difference']}"]),
        *([] if off <= tolerance else [f"losses are up to {off:.1e} off those on the CPU"]),
    ]
    return {
        "strategy": strategy,
        "dtype": dtype,
        "backend": run.document["backend"],
        "epoch_s": median(seconds),
        "epoch_cpu_s": reference.document["epoch_s"],
        "predicted_s": found["step"]["predicted_s"] * found["batches"],
        "bytes_equal": bytes_equal,
        "bytes": sum(found["bytes"]["counted"].values()),
        "order_equal": order["equal"],
        "memory_bytes": memory["measured_bytes"],
        "predicted_bytes": memory["predicted_bytes"],
        "losses_off": off,
        "losses_off_at_end": gaps[-1],
        "loss": pairs[-1][0],
        "diagnosis": found["diagnosis"],
        "wrong": wrong,
    }
