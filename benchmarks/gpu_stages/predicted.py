"""Predictions of the recorded rows of one H200, by today's code and the preset h200.

They are not blind: the rows were known when the code was changed. Some rows are of older code."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from typing import NamedTuple

import yaml
from commands import TRACES, header, line

from gnnplan.executor.launch.run_request import trainable
from gnnplan.planner.cluster.spec import PRESETS
from gnnplan.planner.decision.plan import chosen
from gnnplan.planner.evidence.validate import rank_bytes
from gnnplan.planner.gnn.workload import Workload
from gnnplan.planner.graph.graph import GraphStats
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies import parse
from gnnplan.planner.vocabulary.units import show_bytes, show_time
from gpu_stages import question, training
from gpu_stages.peers import CLASSES, FEATURES
from gpu_stages.record import TRAINED, Row, Setting

STAGES = (*TRAINED, "peers")
# what `gnnplan measure` assumes of ranks that share the card; nobody has measured their messages
LINK = {"bandwidth": "1GB/s", "latency": "50us"}
PEERS = {
    "ours": "graph_parallel(narrow=True)",
    "ours_batches": "data_parallel",
    "ours_drawn_on_device": "data_parallel",
}


class Predicted(NamedTuple):
    """A recorded row, and what is predicted of it; memory: (recorded, predicted) if recorded."""

    stage: str
    case: str
    epoch: tuple[float, float]  # (recorded, predicted) [s]
    memory: tuple[float, float] | None  # [B]


def recorded() -> dict[tuple[str, str], Row]:
    """Return the last figures of each stage and case; a step that was also replayed as a CUDA graph
    counts with that time."""
    rows = dict[tuple[str, str], Row]()
    for run in json.loads((TRACES / "gpu" / "h200.json").read_text("utf-8"))["runs"]:
        for name, of_stage in run.items():
            stage = name.partition(",")[0]
            for row in of_stage if stage in STAGES else ():
                if stage == "peers":
                    what = f"{row['by']}, {row['model']}, {row['edges']} edges, {row['dropout']}"
                    row = {**row, "case": what, "memory_bytes": None}  # of other trainings too
                key, epoch_s = (stage, row["case"]), row.get("replayed_s") or row["epoch_s"]
                rows[key] = {**rows.get(key, {}), **row, "epoch_s": epoch_s}
    return rows


def predictions() -> Iterator[Predicted]:
    """Predict the recorded rows of the stages, each as its stage plans it."""
    with TemporaryDirectory() as folder:
        setting = Setting(Path(folder), "cuda")
        preset = yaml.safe_load((PRESETS / "h200.yaml").read_text("utf-8"))
        links = {"intra_node": LINK, "inter_node": LINK}
        (setting.out / "cluster.yaml").write_text(json.dumps(preset | links), "utf-8")
        cases = {str(each): each for of in training.cases(setting).values() for each in of}
        for (stage, name), row in recorded().items():
            if stage != "peers":
                plan = training.planned(setting, cases[name])
                problem, strategy = plan.problem, trainable(plan.problem, chosen(plan.document))
            elif row["by"] in PEERS:
                problem = _of_peers(setting, row)
                strategy = parse(PEERS[row["by"]]).settle(problem)
            else:
                continue
            held, needed = row.get("memory_bytes"), rank_bytes(strategy.memory(problem)).max()
            epoch = row["epoch_s"], float(strategy.epoch_s(problem))
            yield Predicted(stage, name, epoch, (held, float(needed)) if held else None)


def _of_peers(setting: Setting, row: Row) -> Problem:
    """Return the problem of one of our rows of the stage peers, by its statistics alone."""
    vertices, model, _, batches = row["vertices"], *row["model"].partition(", ")
    facts = {"name": "drawn", "source": "", "hash": "", "multilabel": False, "known": False}
    facts |= {"features": FEATURES, "classes": CLASSES, "train_vertices": vertices // 2}
    facts["batch_spread"] = 0.0, 0.0  # random neighbours
    more = {"model": model, "dropout": row["dropout"]}
    more |= question.batches(setting) if batches else {}
    cluster = question.cluster(setting, 1)
    if row["by"] == "ours_drawn_on_device":
        cluster = cluster.model_copy(update={"sampler": "device"})
    stats = GraphStats(vertices=vertices, edges=row["edges"], **facts)
    return Problem(stats, None, Workload(**question.workload(setting, **more)), cluster)


def errors(rows: Iterable[Predicted]) -> dict[tuple[str, str], list[float]]:
    """Return the errors of each stage's epochs and memory."""
    found = defaultdict[tuple[str, str], list[float]](list)
    for row in rows:
        for what, pair in (("epoch", row.epoch), ("memory", row.memory)):
            if pair:
                found[row.stage, what].append(pair[1] / pair[0] - 1)
    return found


def page() -> str:
    """Return all rows beside their predictions, and each stage's errors, in Markdown."""
    rows = sorted(predictions(), key=lambda row: STAGES.index(row.stage))
    lines = [f"{__doc__}", header("case", "epoch", "predicted", "", "memory", "predicted", "")]
    for row in rows:
        cells = [f"{row.stage}: {row.case}"]
        for pair, show in ((row.epoch, show_time), (row.memory, show_bytes)):
            cells += [*map(show, pair), f"{pair[1] / pair[0] - 1:+.0%}"] if pair else ["-"] * 3
        lines.append(line(*cells))
    lines += ["", header("stage", "of", "rows", "mean error", "largest", left=2)]
    for key, each in errors(rows).items():
        lines.append(
            line(*key, len(each), f"{mean(map(abs, each)):.1%}", f"{max(each, key=abs):+.0%}")
        )
    return "\n".join(lines)
