"""Pictures of finished runs: where the prediction was off, and what training achieved."""

from __future__ import annotations

from collections import Counter

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from gnnplan.planner.evidence.validate import describe_operation, share_of_step, show_error
from gnnplan.planner.vocabulary.units import show_bytes, show_percent, show_time
from gnnplan.report.facts import Absent, Facts
from gnnplan.report.picture import COLOURS, Picture, figure

MOST_OPERATIONS = 8
NO_RUNS = (
    "it needs a finished run; train with `gnnplan run plan.json --out run`, then"
    " `gnnplan report plan.json run`"
)
ACCURACIES = ("val_accuracy", "test_accuracy", "train_accuracy")  # the first that a run has


def errors(facts: Facts) -> Picture:
    """How far predictions of operations are off, as shares of the epoch. Raises Absent."""
    if not facts.runs:
        raise Absent(NO_RUNS)
    most: dict[str, float] = {}
    by_run: list[dict[str, float]] = []
    for one in facts.runs:
        step = one.run.comparison["step"]
        found = {"whole epoch": float(step["predicted_s"] / step["measured_s"] - 1)}
        for row in one.run.comparison["operations"]:
            share = share_of_step(row, step)
            if share is not None:
                found[row["operation"]] = share
                most[row["operation"]] = max(most.get(row["operation"], 0.0), abs(share))
        by_run.append(found)
    names = ["whole epoch", *sorted(most, key=lambda name: -most[name])[:MOST_OPERATIONS]]
    traces = [
        go.Bar(
            name=name,
            orientation="h",
            y=[_label(operation) for operation in names],
            x=[
                None if (share := found.get(operation)) is None else round(100 * share, 3)
                for operation in names
            ],
            marker={"color": COLOURS[i % len(COLOURS)]},
            hovertemplate="%{y}: %{x:+.1f} %<extra>" + name + "</extra>",
        )
        for i, (name, found) in enumerate(zip(run_names(facts), by_run, strict=True))
    ]
    drawn = figure(
        traces,
        120 + len(names) * (14 + 14 * len(traces)),
        barmode="group",
        xaxis={"title": "% of the measured epoch", "fixedrange": True, "zeroline": True},
        yaxis={"autorange": "reversed", "fixedrange": True, "tickfont": {"size": 11}},
        legend={"traceorder": "normal"},
    )
    words = "; ".join(
        f"{name}: epoch {show_percent(found['whole epoch'], sign=True)}"
        for name, found in zip(run_names(facts), by_run, strict=True)
    )
    other = [one.run.folder for one in facts.runs if not one.run.comparison["device"]["equal"]]
    return Picture(
        "errors",
        "Where the prediction was off",
        "Bars to the left are predicted too short, to the right too long, each as a share of the"
        f" measured epoch ({words}). "
        + _diagnosis(facts)
        + (f" {', '.join(other)} ran on another kind of device than planned." if other else ""),
        f"Bars of prediction errors by operation; {words}",
        drawn,
        ["run", "operation", "predicted", "simulated", "measured", "prediction off"],
        [
            [
                name,
                describe_operation(row["operation"]),
                *(
                    "-" if row[f"{source}_s"] is None else show_time(row[f"{source}_s"])
                    for source in ("predicted", "simulated", "measured")
                ),
                "-" if row["predicted_error"] is None else show_error(row["predicted_error"]),
            ]
            for name, one in zip(run_names(facts), facts.runs, strict=True)
            for row in [
                {**one.run.comparison["step"], "operation": "whole epoch"},
                *one.run.comparison["operations"],
            ]
        ],
    )


def losses(facts: Facts) -> Picture:
    """Losses and accuracies by epoch. Raises Absent."""
    if not facts.runs:
        raise Absent(NO_RUNS)
    drawn = make_subplots(rows=2, cols=1, shared_xaxes=True, vertical_spacing=0.08)
    rows, words = [], []
    for i, (name, one) in enumerate(zip(run_names(facts), facts.runs, strict=True)):
        common = {
            "legendgroup": name,
            "mode": "lines+markers",
            "line": {"color": COLOURS[i % len(COLOURS)], "width": 2},
            "marker": {"size": 5},
        }
        epochs = [row["epoch"] for row in one.metrics]
        values = [row["loss"] for row in one.metrics]
        drawn.add_trace(go.Scatter(name=name, x=epochs, y=values, **common), 1, 1)
        kind = next((k for k in ACCURACIES if any(_number(r.get(k)) for r in one.metrics)), "")
        known = [(row["epoch"], row[kind]) for row in one.metrics if _number(row.get(kind))]
        drawn.add_trace(
            go.Scatter(
                name=name,
                x=[epoch for epoch, _ in known],
                y=[value for _, value in known],
                showlegend=False,
                **common,
            ),
            2,
            1,
        )
        last = f"{kind.partition('_')[0]} accuracy {known[-1][1]:.3f}" if known else "no accuracy"
        words.append(f"{name} from {values[0]:.4g} to {values[-1]:.4g}, {last}")
        sent = sum(sum(rank["bytes"].values()) for rank in one.ranks)
        rows.append(
            [
                name,
                one.run.folder,
                str(len(epochs)),
                f"{values[0]:.4g}",
                f"{values[-1]:.4g}",
                last,
                show_time(one.run.measured_s),
                show_bytes(sent),
            ]
        )
    drawn.update_xaxes(fixedrange=True)
    drawn.update_yaxes(fixedrange=True)
    drawn.update_yaxes(title_text="loss", row=1, col=1)
    drawn.update_yaxes(title_text="accuracy", row=2, col=1)
    drawn.update_xaxes(title_text="epoch", row=2, col=1)
    return Picture(
        "losses",
        "What training achieved",
        f"Losses on top, accuracies below, by epoch: {'; '.join(words)}.",
        f"Lines of loss and accuracy by epoch; {'; '.join(words)}",
        figure(list(drawn.data), 500, **drawn.layout.to_plotly_json()),
        ["run", "folder", "epochs", "first loss", "last loss", "at the end", "epoch", "sent"],
        rows,
    )


def run_names(facts: Facts) -> list[str]:
    """A name for each run: its strategy, and its folder where strategies repeat."""
    count = Counter(one.run.strategy for one in facts.runs)
    return [
        one.run.strategy if count[one.run.strategy] == 1 else one.run.folder for one in facts.runs
    ]


def _label(name: str) -> str:
    return name.replace(":f", " forward").replace(":b", " backward")


def _diagnosis(facts: Facts) -> str:
    """What to doubt, of the first run."""
    words = facts.runs[0].run.comparison["diagnosis"].replace("`", "")
    return f"Of {run_names(facts)[0]}, {words}."


def _number(value: object) -> bool:
    return type(value) in (int, float)
