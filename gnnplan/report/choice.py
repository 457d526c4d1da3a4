"""Pictures of the plan's choice (the parts of an epoch, the uses of memory) and of its outcome.

The outcome of finished runs: where the prediction was off, and what training achieved."""

from __future__ import annotations

import textwrap
from collections import Counter
from operator import attrgetter
from statistics import median

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from gnnplan.planner.decision.plan import Answer
from gnnplan.planner.evidence.validate import describe_operation, share_of_step, show_error
from gnnplan.planner.gnn.workload import scores_of
from gnnplan.planner.vocabulary.numbers import grouped
from gnnplan.planner.vocabulary.text import Table, column, table, yes_no
from gnnplan.planner.vocabulary.units import show_bytes, show_percent, show_time
from gnnplan.report.facts import (
    COLOURS,
    COMMUNICATION,
    COMPUTATION,
    MEASURED,
    SIZES,
    TIMES,
    WAITING,
    Absent,
    Facts,
    Picture,
    figure,
    unit_of,
)
from gnnplan.simulator.replay import Replay

MOST_BARS = 10
MOST_LETTERS = 64  # characters above a bar, which fit a phone's screen
PARTS = (
    ("compute_s", "computation", COMPUTATION),
    ("comm_s", "exposed communication", COMMUNICATION),
    ("bubble_s", "waiting", WAITING),
)
FAR = 5  # draw the line of the device's memory if the fullest rank uses more than 1/FAR of it


def epochs(facts: Facts) -> Picture:
    """Draw strategies as stacked bars, the plan's choice on top, with the measured epochs."""
    answers = [facts.document["best"], *facts.document["alternatives"]]
    leaders = [Answer.of(answer) for answer in answers[:MOST_BARS]]
    seconds = [leader.epoch_s for leader in leaders]
    unit, scale = unit_of(max(seconds), TIMES)
    traces: list[go.Bar | go.Scatter] = [
        go.Bar(
            name=name,
            orientation="h",
            y=list(range(len(leaders))),
            x=[leader.predicted[part] * scale for leader in leaders],
            width=0.45,
            marker_color=colour,
            hovertemplate=f"{name} %{{x:.4g}} {unit}<extra></extra>",
        )
        for part, name, colour in PARTS
    ]
    ranges = [leader.range_s for leader in leaders if leader.range_s]
    if len(ranges) == len(leaders):
        both = list(zip(seconds, ranges, strict=True))
        traces[-1].error_x = {
            "symmetric": False,
            "array": [(high - second) * scale for second, (_, high) in both],
            "arrayminus": [(second - low) * scale for second, (low, _) in both],
            "thickness": 2,
        }
    by_strategy = grouped((one.run for one in facts.runs), attrgetter("strategy"))
    measured = {name: median(run.measured_s for run in of) for name, of in by_strategy.items()}
    ran = [place for place, leader in enumerate(leaders) if leader.strategy in measured]
    if ran:
        traces.append(
            go.Scatter(
                name="measured",
                mode="markers",
                y=ran,
                x=[measured[leaders[place].strategy] * scale for place in ran],
                marker={"color": MEASURED, "symbol": "diamond", "size": 10},
                hovertemplate=f"measured %{{x:.4g}} {unit}<extra></extra>",
            )
        )
    drawn = figure(traces, 90 + 48 * len(leaders), barmode="stack")
    drawn.update_xaxes(title_text=f"{unit} of an epoch", rangemode="tozero")
    drawn.update_yaxes(visible=False, range=[len(leaders) - 0.5, -0.8])
    at_left = {"x": 0, "xref": "paper", "xanchor": "left", "showarrow": False, "font_size": 11}
    for place, leader in enumerate(leaders):
        text = _headline(leader, facts.problem.cluster.ranks)
        drawn.add_annotation(text=text, y=place, yshift=19, **at_left)
    see = [f"{leaders[0].strategy} is the plan's choice: {show_time(seconds[0])} per epoch."]
    if len(leaders) > 1:
        ahead = seconds[1] < seconds[0]  # a lossy strategy whose lead is within doubt
        gap = seconds[0] / seconds[1] if ahead else seconds[1] / seconds[0]
        far = f"{show_percent(gap - 1, 1)} {'faster by prediction' if ahead else 'slower'}"
        see.append(f"{leaders[1].strategy} is {far}.")
    if not all(leader.exact for leader in leaders):
        see.append("A star marks lossy strategies: they change the gradient.")
    if len(ranges) == len(leaders):
        see.append("A whisker holds 80 % of what an epoch may take, in doubt about the constants.")
    if ran:
        see.append("A diamond is the median measured epoch.")
    numbers = table(
        "",
        [{**leader.row, "measured": measured.get(leader.strategy)} for leader in leaders],
        column("strategy"),
        column("exact", show=yes_no),
        column("ranks", "gpus"),
        *(column(name, part, show_time) for part, name, _ in PARTS),
        column("epoch", "epoch_s", show_time),
        column("measured", show=show_time),
    )
    return Picture("epochs", " ".join(see), drawn, numbers)


def _headline(leader: Answer, ranks: int) -> str:
    """Return the text above a bar: name, star, epoch, knobs."""
    name, _, knobs = leader.strategy.partition("(")
    on = f"on {leader.gpus} of {ranks} " if leader.gpus < ranks else ""
    head = f"{'' if leader.exact else ' *'} {show_time(leader.epoch_s)} {on}"
    room = max(MOST_LETTERS - len(name + head), 10)
    knobs = textwrap.shorten(knobs[:-1].replace(",", ", "), room, placeholder=" …")
    return f"<b>{name}</b>{head}<i>{knobs}</i>"


def memory(facts: Facts) -> Picture:
    """Draw each rank's memory by use, and the device's memory."""
    uses = {use: per_rank for use, per_rank in facts.candidate.memory.items() if per_rank.any()}
    room, ranks = facts.problem.cluster.device.memory, facts.problem.ranks
    totals = sum(uses.values(), np.zeros(ranks))
    fullest, near = int(totals.argmax()), totals.max() * FAR > room
    unit, scale = unit_of(totals.max(), SIZES)
    traces = [
        go.Bar(
            name=use,
            x=list(range(ranks)),
            y=np.round(per_rank * scale, 4).tolist(),
            marker_color=colour,
            hovertemplate=f"rank %{{x}}: {use} %{{y:.3g}} {unit}<extra></extra>",
        )
        for (use, per_rank), colour in zip(uses.items(), COLOURS, strict=False)
    ]
    drawn = figure(traces, 380, barmode="stack", bargap=0.25)
    drawn.update_xaxes(title_text="rank", dtick=max(1, ranks // 16))
    drawn.update_yaxes(title_text=unit, rangemode="tozero")
    if near:
        drawn.add_hline(y=room * scale, line={"color": MEASURED, "dash": "dash"})
    most = max(uses, key=lambda use: float(uses[use][fullest]))
    see = (
        f"Rank {fullest} is the fullest with {show_bytes(totals[fullest])}, which is"
        f" {show_percent(totals[fullest] / room)} of the device's {show_bytes(room)}"
        f" ({'dashed line' if near else 'beyond the axis'}); most of it is"
        f" {'libraries (runtime)' if most == 'runtime' else most}."
    )
    if facts.same:
        use = facts.same[0].run.comparison["memory"]
        see += (
            f" Of {'tensors' if use['of'] == 'data' else 'the process'} alone"
            f" {show_bytes(use['predicted_bytes'])} are predicted;"
            f" {show_bytes(use['measured_bytes'])} were measured."
        )
    rows = [
        [str(rank), *(show_bytes(use[rank]) for use in (*uses.values(), totals))]
        for rank in range(ranks)
    ]
    numbers = Table("", ["rank", *uses, "together"], rows)
    return Picture("memory", see, drawn, numbers)


# -- outcome ---------------------------------------------------------------------------------------


MOST_OPERATIONS = 8
NO_RUNS = (
    "it needs a finished run; train with `gnnplan run plan.json --out run`, then"
    " `gnnplan report plan.json run`"
)
EPOCH = "whole epoch"


def errors(facts: Facts) -> Picture:
    """Draw the errors of operations' predictions as shares of the epoch. Raises Absent."""
    runs = named_runs(facts)
    shares, rows, most = [], [], {EPOCH: float("inf")}
    for name, one in runs:
        comparison = one.run.comparison
        step = {**comparison["step"], "operation": EPOCH}
        shares.append(share := dict[str, float]())
        for row in (step, *comparison["operations"]):
            off = share_of_step(row, step)
            if off is not None:
                share[row["operation"]] = round(100 * off, 3)
                most[row["operation"]] = max(most.get(row["operation"], 0.0), abs(off))
            rows.append({"run": name, **row})
    order = sorted(most, key=lambda operation: -most[operation])[: MOST_OPERATIONS + 1]
    drawn = figure(
        [
            go.Bar(
                name=name,
                orientation="h",
                y=[op.replace(":f", " forward").replace(":b", " backward") for op in order],
                x=[share.get(op) for op in order],
                marker_color=colour,
                hovertemplate=f"%{{y}}: %{{x:+.1f}} %<extra>{name}</extra>",
            )
            for (name, _), share, colour in zip(runs, shares, COLOURS * 9, strict=False)
        ],
        120 + len(order) * (14 + 14 * len(shares)),
        barmode="group",
    )
    drawn.update_xaxes(title_text="% of the measured epoch", zeroline=True)
    drawn.update_yaxes(autorange="reversed", tickfont_size=11)
    epochs = "; ".join(
        f"{name} {show_percent(one.run.comparison['step']['predicted_error'], sign=True)}"
        for name, one in runs
    )
    see = (
        "Bars to the left are predicted too short, to the right too long, each as a share of the"
        f" measured epoch. Whole epochs are off by: {epochs}. Of {runs[0][0]},"
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
    return Picture("errors", see, drawn, numbers)


def losses(facts: Facts) -> Picture:
    """Draw losses and validation scores per epoch. Raises Absent."""
    drawn = make_subplots(rows=2, cols=1, shared_xaxes=True, vertical_spacing=0.08)
    # all runs of a plan have the same metric; the files of older runs may lack it
    scores = (name for one in facts.runs for name in scores_of(one.metrics[0]) if "val" in name)
    rows, score = [], next(scores, "val_accuracy")
    for (name, one), colour in zip(named_runs(facts), COLOURS * 9, strict=False):
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
    return Picture("losses", see, out, Table("", columns, rows))


def named_runs(facts: Facts) -> list[tuple[str, Replay]]:
    """Return the runs with their names: the strategy or, if several runs have it, the folder.

    Raises Absent if there is no run.
    """
    if not facts.runs:
        raise Absent(NO_RUNS)
    count = Counter(one.run.strategy for one in facts.runs)
    return [
        (one.run.strategy if count[one.run.strategy] == 1 else one.run.folder, one)
        for one in facts.runs
    ]
