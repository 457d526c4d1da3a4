"""Draws a plan's candidates: computation, exposed communication and waiting of their epochs.

    gnnplan plan --graph ogbn-products --cluster granndis_a6000_pcie -o plan.json
    python benchmarks/decision.py plan.json docs/figures/decision.png

Needs matplotlib (`pip install gnnplan[figures]`).
"""

import json
from pathlib import Path

from commands import words

from gnnplan.planner.decision.plan import Answer
from gnnplan.planner.vocabulary.units import show_bytes, show_time

PARTS = {
    "compute_s": ("computation", "#4c78a8"),
    "comm_s": ("exposed communication", "#f58518"),
    "bubble_s": ("waiting", "#bbbbbb"),
}
MOST = 8  # candidates shown


def main(source: str, target: str) -> None:
    import matplotlib.pyplot as plt

    plan = json.loads(Path(source).read_text())
    candidates = [plan["best"], *plan["alternatives"]][:MOST][::-1]
    figure, axes = plt.subplots(figsize=(10, 0.55 * len(candidates) + 1.4))
    for row, candidate in enumerate(candidates):
        predicted, left = candidate["predicted"], 0.0
        for part, (_, colour) in PARTS.items():
            axes.barh(row, predicted[part], left=left, color=colour, height=0.65)
            left += predicted[part]
        memory = show_bytes(predicted["memory_bytes"])
        axes.text(
            left,
            row,
            f"  {show_time(predicted['epoch_s'])}, {memory} per rank",
            va="center",
            fontsize=9,
        )
    names = [f"{Answer.of(each).strategy}{'' if each['exact'] else ' *'}" for each in candidates]
    axes.set_yticks(range(len(candidates)), names, fontsize=9)
    axes.get_yticklabels()[-1].set_fontweight("bold")
    axes.set_xlim(0, 1.5 * max(each["predicted"]["epoch_s"] for each in candidates))
    axes.set_xlabel("seconds of an epoch, predicted")
    axes.set_title(
        f"{plan['graph']['name']} on {plan['cluster']['name']}   (* lossy)",
        loc="left",
        fontsize=11,
    )
    axes.legend(
        [plt.Rectangle((0, 0), 1, 1, color=colour) for _, colour in PARTS.values()],
        [name for name, _ in PARTS.values()],
        loc="upper right",
        fontsize=9,
        frameon=False,
    )
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(target, dpi=110)


if __name__ == "__main__":
    main(*words(__doc__))
