"""Compares the memory that every rank is predicted to need with what it needs.

    python benchmarks/memory.py DATASETS [--record] [GRAPH ...]

Plans and runs deep and sparse problems on this machine. DATASETS is a folder with squirrel.npz,
chameleon.npz, coauthor_physics.npz and coauthor_cs.npz. Prints a row per rank, for the graphs named
(default: all); --record adds the rows to traces/memory.csv. What a run fills does not depend on the
machine's speed.
"""

from __future__ import annotations

import csv
import json
import platform
import tempfile
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
from commands import gnnplan, words, write

from gnnplan.planner.decision.plan import chosen, question, read
from gnnplan.planner.strategies.base import BESIDE_TRAINING

RECORD = Path(__file__).resolve().parent.parent / "traces" / "memory.csv"
SERVERS = ("--set", "servers=2", "--set", "gpus_per_server=1")
SQUIRREL, CHAMELEON = ("squirrel", "gcnii", 32), ("chameleon", "gcnii", 32)
PHYSICS, CS = ("coauthor_physics", "sage", 3), ("coauthor_cs", "resgcn", 28)
JOBS = [
    *(
        (*graph, strategy, ranks, ())
        for graph in (SQUIRREL, CHAMELEON)
        for ranks in (2, 4)
        for strategy in (
            "graph_parallel",
            "graph_parallel(checkpoint=True)",
            "pipegcn",
            "pipegcn_gf",
            "gnnpipe" if ranks == 2 else "gnnpipe(stages=2)",
        )
    ),
    *((*PHYSICS, strategy, 2, ()) for strategy in ("graph_parallel", "pipegcn_gf", "gnnpipe")),
    (*PHYSICS, "pipegcn", 4, ()),
    *(
        (*CS, strategy, 2, SERVERS)
        for strategy in ("granndis(max_hop=1,fanout=15)", "granndis(batches=2)")
    ),
]


def main(datasets: Path, record: bool, graphs: list[str]) -> None:
    rows: list[dict[str, object]] = []
    for graph, model, layers, strategy, ranks, more in JOBS:
        if graphs and graph not in graphs:
            continue
        with tempfile.TemporaryDirectory() as scratch:
            plan, out = f"{scratch}/plan.json", Path(scratch) / "run"
            asked = (
                "--model",
                model,
                "--layers",
                str(layers),
                "--hidden",
                "64",
                "--dropout",
                "0.5",
                "--ranks",
                str(ranks),
                *more,
            )
            gnnplan(
                "plan",
                "--graph",
                str(datasets / f"{graph}.npz"),
                *asked,
                "--strategy",
                strategy,
                "-o",
                plan,
            )
            gnnplan("run", plan, "--epochs", "4", "--eval-every", "0", "--out", str(out))
            document = read(Path(plan))
            use = chosen(document).memory(question(document))
            predicted = np.sum(
                [nbytes for what, nbytes in use.items() if what not in BESIDE_TRAINING], axis=0
            )
            for rank in range(ranks):
                measured = json.loads((out / f"rank{rank}.json").read_text())["peak_bytes"]
                rows.append(
                    {
                        "date": f"{datetime.now(UTC):%Y-%m-%d}",
                        "hardware": f"{platform.machine()} CPU, Gloo",
                        "graph": graph,
                        "model": model,
                        "layers": layers,
                        "hidden": 64,
                        "strategy": strategy,
                        "ranks": ranks,
                        "rank": rank,
                        "predicted_bytes": round(predicted[rank]),
                        "measured_bytes": measured,
                    }
                )
                print(
                    f"{graph:16s} {model:6s} {layers:2d} {strategy:32s} rank {rank} of {ranks}:"
                    f" predicted {predicted[rank] / 1e6:7.1f} MB, measured {measured / 1e6:7.1f} MB"
                    f" ({predicted[rank] / measured - 1:+.1%})",
                    flush=True,
                )
    if record:
        with RECORD.open(newline="") as file:
            write(
                RECORD,
                [row for row in csv.DictReader(file) if graphs and row["graph"] not in graphs]
                + rows,
            )


if __name__ == "__main__":
    folder, *named = words(__doc__)
    main(Path(folder), "--record" in named, [word for word in named if word != "--record"])
