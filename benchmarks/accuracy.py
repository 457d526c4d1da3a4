"""How wrong predictions are: plan, run and validate jobs on this machine: `python benchmarks/accuracy.py [--record]`.

Needs `gnnplan measure --ranks 2` first (preset 'local') and an idle machine. Prints a row per job; --record writes them to
traces/accuracy.csv.
"""

from __future__ import annotations

import csv
import json
import platform
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path

RECORD = Path(__file__).resolve().parent.parent / "traces" / "accuracy.csv"
WORKLOADS = (("sage", 256, 0.0), ("gcn", 64, 0.0), ("gcn", 64, 0.5))
SERVERS = ("--set", "servers=2", "--set", "gpus_per_server=1")
STRATEGIES = {"graph_parallel": (), "graph_parallel(narrow=True)": (), "pipegcn": (), "gnnpipe": (), "granndis(depth=1)": SERVERS,
              "granndis": SERVERS}  # fmt: skip


def gnnplan(*arguments: str) -> str:
    return subprocess.run([sys.executable, "-m", "gnnplan", *arguments], check=True, capture_output=True, text=True).stdout


def write(path: Path, rows: list[dict[str, object]]) -> None:
    """A table of measured rows, all with the same columns."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)


def main(record: bool) -> None:
    rows = []
    for model, hidden, dropout in WORKLOADS:
        for strategy, more in STRATEGIES.items():
            with tempfile.TemporaryDirectory() as scratch:
                plan, out = f"{scratch}/plan.json", f"{scratch}/run"
                asked = ("--model", model, "--layers", "3", "--hidden", str(hidden), "--dropout", str(dropout))
                gnnplan("plan", *asked, "--strategy", strategy, *more, "-o", plan)
                gnnplan("run", plan, "--epochs", "25", "--eval-every", "0", "--out", out)
                told = json.loads(gnnplan("validate", out, "--json"))
            step, memory, bare = told["step"], told["memory"], told["exposed"]
            rows.append({
                "date": f"{datetime.now(UTC):%Y-%m-%d}", "hardware": f"{platform.machine()} CPU, 2 ranks over Gloo", "graph": "community",
                "model": model, "hidden": hidden, "dropout": dropout, "strategy": strategy,
                **{f"{kind}_s": f"{step[f'{kind}_s']:.5g}" for kind in ("predicted", "simulated", "measured")},
                "exposed_s": f"{bare['measured_s']:.4g}", "hidden_s": f"{told['hidden_s']:.4g}",
                "memory_predicted_bytes": round(memory["predicted_bytes"]), "memory_measured_bytes": memory["measured_bytes"],
            })  # fmt: skip
            print(f"{model:5s} {hidden:4d} {dropout:3g} {strategy:28s} predicted {1e3 * step['predicted_s']:7.1f} ms, "
                  f"measured {1e3 * step['measured_s']:7.1f} ms ({step['predicted_error']:+.0%}); "
                  f"exposed {1e3 * bare['measured_s']:6.1f} ms, hidden {1e3 * told['hidden_s']:6.1f} ms; memory {memory['error']:+.1%}; "
                  f"bytes equal {told['bytes']['equal']}, order equal {told['order']['equal']}", flush=True)  # fmt: skip
    if record:
        write(RECORD, rows)


if __name__ == "__main__":
    main("--record" in sys.argv[1:])
