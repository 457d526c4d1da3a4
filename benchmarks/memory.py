"""Compares the predicted memory of every rank with the measured memory.

    python benchmarks/memory.py DATASETS [--record] [GRAPH ...]

Plans and runs deep and sparse problems on this machine. DATASETS is a folder with squirrel.npz,
chameleon.npz, coauthor_physics.npz and coauthor_cs.npz. Prints a row per rank, for the named graphs
(default: all); --record adds the rows to traces/memory.csv. The memory of a run does not depend on
the machine's speed.
"""

from __future__ import annotations

import json
import platform
import tempfile
from datetime import UTC, datetime
from pathlib import Path

import commands
from commands import plan, train, words, write

from gnnplan.planner.decision.plan import chosen, question, read
from gnnplan.planner.evidence.validate import rank_bytes

RECORD = commands.TRACES / "memory.csv"
SERVERS = {"set": ["servers=2", "gpus_per_server=1"]}
SQUIRREL, CHAMELEON = ("squirrel", "gcnii", 32), ("chameleon", "gcnii", 32)
PHYSICS, CS = ("coauthor_physics", "sage", 3), ("coauthor_cs", "resgcn", 28)
JOBS = [
    *(
        (*graph, strategy, ranks, {})
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
    *((*PHYSICS, strategy, 2, {}) for strategy in ("graph_parallel", "pipegcn_gf", "gnnpipe")),
    (*PHYSICS, "pipegcn", 4, {}),
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
        settings = {"model": model, "layers": layers, "hidden": 64, "strategy": strategy}
        with tempfile.TemporaryDirectory() as scratch:
            path, out, source = f"{scratch}/plan.json", f"{scratch}/run", datasets / f"{graph}.npz"
            plan(path, graph=source, **settings, dropout=0.5, ranks=ranks, **more)
            train(path, out, epochs=4)
            document = read(path)
            predicted = rank_bytes(chosen(document).memory(question(document)))
            left = [json.loads(Path(out, f"rank{rank}.json").read_text()) for rank in range(ranks)]
        for rank in range(ranks):
            measured = left[rank]["peak_bytes"]
            rows.append(
                {
                    "date": f"{datetime.now(UTC):%Y-%m-%d}",
                    "hardware": f"{platform.machine()} CPU, Gloo",
                    "graph": graph,
                    **settings,
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
        others = [row for row in commands.rows(RECORD) if graphs and row["graph"] not in graphs]
        write(RECORD, [*others, *rows])


if __name__ == "__main__":
    folder, *named = words(__doc__)
    main(Path(folder), "--record" in named, [word for word in named if word != "--record"])
