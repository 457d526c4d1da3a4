"""Pictures of finished runs: where the prediction was off, and what training achieved."""

from __future__ import annotations

from collections import Counter

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from gnnplan.planner.evidence.validate import describe_operation, share_of_step, show_error
from gnnplan.planner.gnn.workload import scores_of
from gnnplan.planner.vocabulary.table import Table, column, table
from gnnplan.planner.vocabulary.units import show_percent, show_time
from gnnplan.report.facts import Absent, Facts
from gnnplan.report.picture import COLOURS, Picture, figure

MOST_OPERATIONS = 8
NO_RUNS = (
    "it needs a finished run; train with `gnnplan run plan.json --out run`, then"
    " `gnnplan report plan.json run`"
)
EPOCH = "whole epoch"


def errors(facts: Facts) -> Picture:
    """Draw the errors of operations' predictions as shares of the epoch. Raises Absent."""
    names = run_names(facts)
    traces, rows, most = [], [], {EPOCH: float("inf")}
    for name, one, colour in zip(names, facts.runs, COLOURS * 9, strict=False):
        comparison = one.run.comparison
        step = {**comparison["step"], "operation": EPOCH}
        share = {}
        for row in (step, *comparison["operations"]):
            off = share_of_step(row, step)
            if off is not None:
                share[row["operation"]] = round(100 * off, 3)
                most[row["operation"]] = max(most.get(row["operation"], 0.0), abs(off))
            rows.append({"run": name, **row})
        hover = f"%{{y}}: %{{x:+.1f}} %<extra>{name}</extra>"
        traces.append((name, share, colour, hover))
    order = sorted(most, key=lambda operation: -most[operation])[: MOST_OPERATIONS + 1]
    drawn = figure(
        [
            go.Bar(
                name=name,
                orientation="h",
                y=[op.replace(":f", " forward").replace(":b", " backward") for op in order],
                x=[share.get(op) for op in order],
                marker_color=colour,
                hovertemplate=hover,
            )
            for name, share, colour, hover in traces
        ],
        120 + len(order) * (14 + 14 * len(traces)),
        barmode="group",
    )
    drawn.update_xaxes(title_text="% of the measured epoch", zeroline=True)
    drawn.update_yaxes(autorange="reversed", tickfont_size=11)
    epochs = "; ".join(
        f"{name} {show_percent(one.run.comparison['step']['predicted_error'], sign=True)}"
        for name, one in zip(names, facts.runs, strict=True)
    )
    see = (
        "Bars to the left are predicted too short, to the right too long, each as a share of the"
        f" measured epoch. Whole epochs are off by: {epochs}. Of {names[0]},"
        f" {facts.runs[0].run.comparison['diagnosis']}."
    )
    other = [one.run.folder for one in facts.runs if not one.run.comparison["device"]["equal"]]
    if other:
        see += f" On another kind of device than planned: {', '.join(other)}."
    numbers = table(
        "",
        rows,
        column("run"),
        column("operation", show=describe_operation),
        *(column(what, f"{what}_s", show_time) for what in ("predicted", "simulated", "measured")),
        column("prediction off", "predicted_error", show_error),
    )
    return Picture("errors", "Where the prediction was off", see, drawn, numbers)


def losses(facts: Facts) -> Picture:
    """Draw losses and validation scores per epoch. Raises Absent."""
    names = run_names(facts)
    drawn = make_subplots(rows=2, cols=1, shared_xaxes=True, vertical_spacing=0.08)
    # all runs of a plan have the same metric; the files of older runs may lack it
    scores = (name for one in facts.runs for name in scores_of(one.metrics[0]) if "val" in name)
    rows, score = [], next(scores, "val_accuracy")
    for name, one, colour in zip(names, facts.runs, COLOURS * 9, strict=False):
        known = [r for r in one.metrics if isinstance(r.get(score), float)]
        for row, field, lines in ((1, "loss", one.metrics), (2, score, known)):
            drawn.add_trace(
                go.Scatter(
                    name=name,
                    legendgroup=name,
                    showlegend=row == 1,
                    mode="lines+markers",
                    x=[line["epoch"] for line in lines],
                    y=[line[field] for line in lines],
                    line={"color": colour, "width": 2},
                    marker_size=5,
                ),
                row,
                1,
            )
        first, last = one.metrics[0]["loss"], one.metrics[-1]["loss"]
        accuracy = f"{known[-1][score]:.3f}" if known else "-"
        rows.append([name, str(len(one.metrics)), f"{first:.4g}", f"{last:.4g}", accuracy])
    what, out = score.removeprefix("val_"), figure(drawn, 500)
    out.update_yaxes(title_text="loss", row=1, col=1)
    out.update_yaxes(title_text=f"validation {what}", row=2, col=1)
    out.update_xaxes(title_text="epoch", row=2, col=1)
    told = "; ".join(f"{row[0]} ends at loss {row[3]} and {what} {row[4]}" for row in rows)
    see = f"Losses on top, validation {what} below, by epoch: {told}."
    columns = ["run", "epochs", "first loss", "last loss", f"validation {what}"]
    return Picture("losses", "What training achieved", see, out, Table("", columns, rows))


def run_names(facts: Facts) -> list[str]:
    """Return a name per run: the strategy or, if several runs have the same strategy, the folder.

    Raises Absent if there is no run.
    """
    if not facts.runs:
        raise Absent(NO_RUNS)
    count = Counter(one.run.strategy for one in facts.runs)
    return [
        one.run.strategy if count[one.run.strategy] == 1 else one.run.folder for one in facts.runs
    ]
