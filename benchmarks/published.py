"""Printed figures: `fit FILE.csv` finds each testbed's constants (gnnplan/traces/fitted.csv), `table FILE.csv` writes docs/published.md.

The file is one in the columns of gnnplan/planner/published.py; it is not part of the project.
"""

import csv
import sys
from collections import defaultdict
from pathlib import Path
from statistics import mean, median

from gnnplan.planner import calibrate
from gnnplan.planner.published import read, score

DOCS = Path(__file__).resolve().parent.parent / "docs"


def fit(path: str) -> None:
    rows = read(path)
    with open(calibrate.FITTED, "w", newline="", encoding="utf-8") as file:
        out = csv.writer(file, lineterminator="\n")
        out.writerow(["testbed", "constant", "factor", "rows", "sources", "datasets"])
        for each in calibrate.FITS:
            used = [row for row in rows if each.holds(row)]
            for constant, factor in calibrate.fit(used, each.constants).items():
                out.writerow([each.testbed, constant, f"{factor:.4g}", len(used), "; ".join(each.sources), "; ".join(each.datasets)])
                print(each.testbed, constant, f"{factor:.4g}")


def by_paper(result: dict, everything: bool) -> dict[tuple[str, str], list[float]]:
    errors = defaultdict(list)
    for row in result["rows"]:
        if everything or not row["fitted"]:
            errors[row["paper"], row["metric"]].append(abs(row["error"]))
    return errors


def table(path: str) -> None:
    """Every paper and metric: with the kept constants, and each dataset with constants of the others."""
    rows = read(path)
    kept, left = (score(rows, calibrate.gave_a_constant, calibrate.calibrated), calibrate.leave_one_out(rows))
    fitted, out = by_paper(kept, True), by_paper(left, False)
    lines = ["| paper | figure | rows | mean error, constants of all rows | rows left out | mean error, left out | median | largest |",
             "|---|---|---:|---:|---:|---:|---:|---:|"]  # fmt: skip
    for key in sorted(fitted):
        errors = out.get(key)
        told = f"{len(errors)} | {mean(errors):.1%} | {median(errors):.1%} | {max(errors):.1%}" if errors else "0 | - | - | -"
        lines.append(f"| {key[0]} | {key[1]} | {len(fitted[key])} | {mean(fitted[key]):.1%} | {told} |")
    for name, result in (("constants of all rows", kept), ("left out", left)):
        winner = result["summary"]["winner"]
        lines.append(f"\nThe faster strategy, {name}: right in {winner['right']} of {winner['n']}.")
    worst = sorted((row for row in left["rows"] if not row["fitted"]), key=lambda row: -abs(row["error"]))[:12]
    lines += ["", "| worst | printed | predicted |", "|---|---:|---:|"]
    for row in worst:
        what = f"{row['paper']} {row['source']}: {row['strategy']} {row['metric']}, {row['model']} on {row['dataset']}"
        lines.append(f"| {what}, {row['num_nodes']}x{row['gpus_per_node']} | {float(row['value']):.4g} | {row['predicted']:.4g} |")
    document = DOCS / "published.md"
    before, mark, _ = document.read_text().partition("<!-- table -->\n")
    assert mark
    document.write_text(before + mark + "\n".join(lines) + "\n")


if __name__ == "__main__":
    {"fit": fit, "table": table}[sys.argv[1]](sys.argv[2])
