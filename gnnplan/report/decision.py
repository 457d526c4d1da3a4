"""Pictures of the choice: what epochs are made of, what memory holds, where it flips."""

from __future__ import annotations

import textwrap

import numpy as np
import plotly.graph_objects as go

from gnnplan.planner.decision.summary import doubt
from gnnplan.planner.strategies import NAMES
from gnnplan.planner.vocabulary.units import show_bytes, show_count, show_percent, show_time
from gnnplan.report.facts import FACTORS, Facts, Leader
from gnnplan.report.picture import (
    COLOURS,
    COMMUNICATION,
    COMPUTATION,
    DOUBT,
    MEASURED,
    WAITING,
    Picture,
    byte_unit,
    figure,
    time_unit,
)

MOST_BARS = 10
MOST_LETTERS = 64  # above a bar: the width of a phone
PARTS = (
    ("compute_s", "computation", COMPUTATION),
    ("comm_s", "exposed communication", COMMUNICATION),
    ("bubble_s", "waiting", WAITING),
)
FAR = 5  # the device's memory is drawn where the fullest rank has more than 1/FAR of it


def epochs(facts: Facts) -> Picture:
    """Strategies as stacked bars, the fastest on top; measured epochs beside them."""
    leaders, error = facts.leaders[:MOST_BARS], doubt(facts.problem.cluster)
    places = list(range(len(leaders)))
    seconds = [float(leader.predicted["epoch_s"]) for leader in leaders]
    unit, scale = time_unit(max(seconds))
    traces = [
        go.Bar(
            name=name,
            orientation="h",
            y=places,
            x=[float(leader.predicted[part]) * scale for leader in leaders],
            width=0.45,
            marker={"color": colour},
            customdata=[leader.name for leader in leaders],
            hovertemplate=f"%{{customdata}}<br>{name} %{{x:.4g}} {unit}<extra></extra>",
        )
        for part, name, colour in PARTS
    ]
    if error is not None:
        traces[-1].error_x = {
            "type": "data",
            "array": [second * error * scale for second in seconds],
            "thickness": 2,
            "color": DOUBT,
        }
    measured = _measured(facts)
    if ran := [(i, measured[one.name]) for i, one in enumerate(leaders) if one.name in measured]:
        traces.append(
            go.Scatter(
                name="measured",
                mode="markers",
                y=[i for i, _ in ran],
                x=[taken * scale for _, taken in ran],
                marker={"color": MEASURED, "symbol": "diamond", "size": 10},
                hovertemplate=f"measured %{{x:.4g}} {unit}<extra></extra>",
            )
        )
    drawn = figure(
        traces,
        90 + 48 * len(leaders),
        barmode="stack",
        xaxis={"title": f"{unit} of an epoch", "rangemode": "tozero", "fixedrange": True},
        yaxis={
            "showticklabels": False,
            "fixedrange": True,
            "zeroline": False,
            "showgrid": False,
            "range": [len(leaders) - 0.5, -0.8],
        },
        legend={"traceorder": "normal"},
    )
    for i, leader in enumerate(leaders):
        drawn.add_annotation(
            text=_headline(leader, facts.problem.cluster.ranks),
            x=0,
            xref="paper",
            xanchor="left",
            y=i,
            yshift=19,
            showarrow=False,
            align="left",
            font={"size": 11},
        )
    best = leaders[0]
    rows = [
        [
            leader.name,
            "yes" if leader.exact else "no",
            str(leader.gpus),
            *(show_time(float(leader.predicted[part])) for part, _, _ in PARTS),
            show_time(second),
            show_time(measured[leader.name]) if leader.name in measured else "-",
            show_bytes(float(leader.predicted["memory_bytes"])),
        ]
        for leader, second in zip(leaders, seconds, strict=True)
    ]
    return Picture(
        "epochs",
        "What an epoch is made of",
        f"{best.name} is the fastest with {show_time(seconds[0])} per epoch"
        + _runner_up(leaders, seconds)
        + (" A star marks strategies that change the gradient." if _inexact(leaders) else "")
        + _words_of_doubt(error)
        + (" A diamond is the median measured epoch." if ran else ""),
        "Stacked bars of predicted epochs: "
        + "; ".join(f"{row[0]} {row[6]}, of which computation {row[3]}" for row in rows[:4]),
        drawn,
        [
            "strategy",
            "exact",
            "ranks",
            *(name for _, name, _ in PARTS),
            "epoch",
            "measured",
            "memory",
        ],
        rows,
    )


def _measured(facts: Facts) -> dict[str, float]:
    """The median epoch of each strategy that was run [s]."""
    found: dict[str, list[float]] = {}
    for one in facts.runs:
        found.setdefault(one.run.strategy, []).append(one.run.measured_s)
    return {strategy: float(np.median(taken)) for strategy, taken in found.items()}


def _headline(leader: Leader, ranks: int) -> str:
    """The line above a bar: name, star, epoch, knobs."""
    name, _, knobs = leader.name.partition("(")
    on = f"on {leader.gpus} of {ranks} " if leader.gpus < ranks else ""
    taken = show_time(float(leader.predicted["epoch_s"]))
    star = "" if leader.exact else " *"
    room = max(MOST_LETTERS - len(f"{name}{star} {taken} {on}"), 10)
    rest = textwrap.shorten(knobs[:-1].replace(",", ", "), room, placeholder=" …")
    return f"<b>{name}</b>{star} {taken} {on}<i>{rest}</i>"


def _runner_up(leaders: list[Leader], seconds: list[float]) -> str:
    if len(leaders) < 2:
        return "; nothing else was compared."
    gap = show_percent(seconds[1] / seconds[0] - 1, 1, sign=True)
    return f"; {leaders[1].name} follows with {gap}."


def _inexact(leaders: list[Leader]) -> bool:
    return not all(leader.exact for leader in leaders)


def _words_of_doubt(error: float | None) -> str:
    if error is None:
        return " How wrong predictions are on such machines has not been measured."
    return (
        f" The whisker is the median error of measured runs, {show_percent(error)}: strategies"
        " whose whiskers overlap are too close to tell."
    )


def memory(facts: Facts) -> Picture:
    """Memory by use of every rank, against the device's."""
    uses = {use: per_rank for use, per_rank in facts.candidate.memory.items() if per_rank.any()}
    room, ranks = facts.problem.cluster.device.memory, facts.problem.ranks
    totals = sum(uses.values(), np.zeros(ranks))
    fullest = int(totals.argmax())
    unit, scale = byte_unit(totals.max())
    traces = [
        go.Bar(
            name=use,
            x=list(range(ranks)),
            y=np.round(per_rank * scale, 4).tolist(),
            marker={"color": colour},
            hovertemplate=f"rank %{{x}}: {use} %{{y:.3g}} {unit}<extra></extra>",
        )
        for (use, per_rank), colour in zip(uses.items(), COLOURS, strict=False)
    ]
    near = totals.max() * FAR > room
    drawn = figure(
        traces,
        380,
        barmode="stack",
        bargap=0.25,
        xaxis={"title": "rank", "fixedrange": True, "dtick": max(1, ranks // 16)},
        yaxis={"title": unit, "fixedrange": True, "rangemode": "tozero"},
        legend={"traceorder": "normal"},
    )
    if near:
        drawn.add_hline(y=room * scale, line={"color": MEASURED, "dash": "dash"})
    most = max(uses, key=lambda use: float(uses[use][fullest]))
    return Picture(
        "memory",
        "What memory holds",
        f"Rank {fullest} is the fullest with {show_bytes(totals[fullest])}, which is"
        f" {show_percent(totals[fullest] / room)} of the device's {show_bytes(room)}"
        + (" (dashed line)" if near else " (beyond the axis)")
        + f"; most of it is {'libraries (runtime)' if most == 'runtime' else most}."
        + _measured_memory(facts),
        f"Stacked bars of memory by use for {show_count(ranks, 'rank')}; the fullest rank has "
        + ", ".join(f"{use} {show_bytes(uses[use][fullest])}" for use in uses),
        drawn,
        ["rank", *uses, "together"],
        [
            [
                str(rank),
                *(show_bytes(per_rank[rank]) for per_rank in uses.values()),
                show_bytes(totals[rank]),
            ]
            for rank in range(ranks)
        ],
    )


def _measured_memory(facts: Facts) -> str:
    """Predicted and measured memory of the first run of the plan's strategy, in words."""
    for one in facts.same:
        use = one.run.comparison["memory"]
        of = "tensors" if use["of"] == "data" else "the process"
        return (
            f" Of {of} alone {show_bytes(use['predicted_bytes'])} are predicted;"
            f" {show_bytes(use['measured_bytes'])} were measured."
        )
    return ""


def flips(facts: Facts) -> Picture:
    """Which strategy wins by the link's bandwidth and the hidden width. Raises Absent."""
    found = facts.flips
    columns = [f"{show_bytes(bandwidth)}/s" for bandwidth in found.bandwidths]
    widths = [str(width) for width in found.widths]
    names = [[winner.strategy.name for winner in row] for row in found.winners]
    full = [row or ["nothing fits"] * len(columns) for row in names]
    kinds = [name for name in (*NAMES, "nothing fits") if any(name in row for row in full)]
    colour = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate((*NAMES, "nothing fits"))}
    steps = [
        [place, colour[name]]
        for i, name in enumerate(kinds)
        for place in (i / len(kinds), (i + 1) / len(kinds))
    ]
    told = [
        [f"{w.strategy}<br>{show_time(s)}" for w, s in zip(winners, taken, strict=True)]
        or ["nothing fits"] * len(columns)
        for winners, taken in zip(found.winners, found.seconds, strict=True)
    ]
    drawn = figure(
        [
            go.Heatmap(
                x=columns,
                y=widths,
                z=[[kinds.index(name) for name in row] for row in full],
                zmin=-0.5,
                zmax=len(kinds) - 0.5,
                colorscale=steps,
                showscale=False,
                xgap=2,
                ygap=2,
                text=[[name.replace("_", "<br>") for name in row] for row in full],
                texttemplate="%{text}",
                textfont={"size": 11},
                customdata=told,
                hovertemplate="%{x}, hidden %{y}<br>%{customdata}<extra></extra>",
            )
        ],
        110 + 56 * len(widths),
        xaxis={
            "type": "category",
            "fixedrange": True,
            "showgrid": False,
            "title": f"bandwidth {found.link}",
        },
        yaxis={
            "type": "category",
            "fixedrange": True,
            "showgrid": False,
            "title": "hidden width",
        },
    )
    here = len(FACTORS) // 2, widths.index(str(facts.problem.workload.hidden))
    box = {"x0": here[0] - 0.44, "x1": here[0] + 0.44, "y0": here[1] - 0.4, "y1": here[1] + 0.4}
    drawn.add_shape(type="rect", **box, line={"color": "#ffffff", "width": 3})
    now = full[here[1]][here[0]]
    others = [kind for kind in kinds if kind != now]
    return Picture(
        "flips",
        "Where the answer flips",
        (
            f"{' and '.join(others)} {'win' if len(others) > 1 else 'wins'} in fields of another"
            " colour"
            if others
            else f"{now} wins everywhere in this grid"
        )
        + ". The framed field is this plan's cluster and width; rows are planned anew, and along a"
        " row only the link changes."
        + (f" There is one row: {found.shrunk}." if found.shrunk else ""),
        "The winner by bandwidth and hidden width: "
        + "; ".join(
            f"width {width}: {', '.join(dict.fromkeys(row))}"
            for width, row in zip(widths, full, strict=True)
        ),
        drawn,
        ["hidden width", *columns],
        [
            [width, *(cell.replace("<br>", ", ") for cell in row)]
            for width, row in zip(widths, told, strict=True)
        ],
    )
