"""What each rank does when, lane by lane: simulated, and measured under it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from gnnplan.planner.evidence.validate import describe_operation, operation
from gnnplan.planner.vocabulary.trace import LANE_ORDER, Span
from gnnplan.planner.vocabulary.units import show_count, show_percent, show_time
from gnnplan.report.facts import Facts
from gnnplan.report.picture import COLOURS, WAITING, Picture, figure, time_unit

MOST_RANKS = 16  # drawn
MOST_MARKS = 8_000  # of a panel, which bounds the size of the page
WAITS = ("receive:f", "receive:b", "receive", "wait")  # operations that only wait
FINENESS = (16_000, 8_000, 4_000, 2_000, 1_000, 500)  # marks that a lane may have at most


@dataclass(frozen=True)
class Window:
    """Some steps of a run: their spans, clipped, with time from 0."""

    name: str  # 'simulated', or the folder of a run
    spans: list[Span]
    seconds: float


@dataclass(frozen=True)
class Mark:
    """One span, or several that follow each other within less than a screen shows."""

    rank: int
    lane: str
    operation: str
    label: str
    start: float
    end: float


def timeline(facts: Facts) -> Picture:
    """The steady state of the plan's strategy, simulated, and of its runs. Raises Absent."""
    steps = 1 if facts.batches == 1 else min(3, facts.batches)
    windows = [steady("simulated", facts.simulated, steps)]
    windows += [steady(one.run.folder, one.measured, steps) for one in facts.same[:1]]
    panels = [marks(window) for window in windows]
    lanes = [sorted({(mark.rank, _order(mark.lane)) for mark in panel}) for panel in panels]
    names = sorted({mark.operation for panel in panels for mark in panel})
    names.sort(key=lambda name: name in WAITS)
    colour = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(names)}
    colour |= dict.fromkeys(WAITS, WAITING)
    unit, scale = time_unit(max(window.seconds for window in windows))
    heights = [18 * len(rows) + 30 for rows in lanes]
    drawn = make_subplots(
        rows=len(panels),
        cols=1,
        shared_xaxes=True,
        row_heights=heights,
        vertical_spacing=30 / (sum(heights) + 30),
    )
    shown: set[str] = set()
    for row, (window, panel, places) in enumerate(zip(windows, panels, lanes, strict=True), 1):
        height = {place: i for i, place in enumerate(places)}
        for name in names:
            own = [mark for mark in panel if mark.operation == name]
            if own:
                lines = _lines(name, own, height, scale, unit, colour[name], name not in shown)
                drawn.add_trace(lines, row, 1)
                shown.add(name)
        drawn.update_yaxes(
            row=row,
            tickvals=list(range(len(places))),
            ticktext=[f"{rank} {LANE_ORDER[lane]}" for rank, lane in places],
            range=[len(places) - 0.5, -1.5],
            tickfont={"size": 10},
            showgrid=False,
            zeroline=False,
            fixedrange=True,
        )
        drawn.add_annotation(
            text=f"<b>{'simulated' if row == 1 else 'measured'}</b> {show_time(window.seconds)}",
            row=row,
            col=1,
            x=0,
            xref="x domain",
            xanchor="left",
            y=-1,
            showarrow=False,
        )
    drawn.update_xaxes(range=[0, max(window.seconds for window in windows) * scale])
    drawn.update_xaxes(title_text=unit, row=len(panels), col=1)
    whole = sum(heights) + 180
    out = figure(list(drawn.data), whole, **drawn.layout.to_plotly_json())
    out.update_layout(
        hovermode="closest",
        dragmode="zoom",
        legend={"y": -60 / (whole - 150), "yanchor": "top"},
    )
    return Picture(
        "timeline",
        "Who does what when",
        _see(facts, windows, steps),
        "; ".join(f"{window.name}: {describe(window)}" for window in windows),
        out,
        ["", "rank", "lane", "operation", "time"],
        [
            [window.name, str(rank), lane, describe_operation(name), show_time(taken)]
            for window in windows
            for (rank, lane, name), taken in totals(window.spans).items()
        ],
    )


def steady(name: str, spans: Iterable[Span], steps: int) -> Window:
    """So many successive steps whose duration is the median of all but the first."""
    spans = list(spans)
    ends: dict[int, float] = {}
    for span in spans:
        ends[span.step] = max(ends.get(span.step, span.end), span.end)
    known = sorted(step for step in ends if step >= 0)
    begin = min((span.start for span in spans if span.step == known[0]), default=0.0)
    bounds = [(ends[a], ends[b]) for a, b in zip(known, known[steps:], strict=False)]
    bounds = bounds[1:] or bounds or [(begin, ends[known[-1]])]  # the first steps warm up
    low, high = sorted(bounds, key=lambda pair: pair[1] - pair[0])[len(bounds) // 2]
    clipped = [
        span._replace(start=max(span.start, low) - low, end=min(span.end, high) - low)
        for span in spans
        if span.start < high and span.end > low
    ]
    return Window(name, clipped, high - low)


def marks(window: Window) -> list[Mark]:
    """The window's spans of the first ranks, thinned until they are few enough."""
    spans = [span for span in window.spans if span.rank < MOST_RANKS and span.lane in LANE_ORDER]
    spans.sort(key=lambda span: (span.rank, span.lane, span.start, span.end))
    found: list[Mark] = []
    for fineness in FINENESS:
        shortest = window.seconds / fineness
        found = [
            mark
            for _, lane in groupby(spans, key=lambda span: (span.rank, span.lane))
            for mark in thinned(lane, shortest)
        ]
        if len(found) <= MOST_MARKS:
            break
    return found


def thinned(lane: Iterable[Span], shortest: float) -> Iterable[Mark]:
    """Marks of one lane, sorted by start; what is shorter than `shortest` joins its neighbour."""
    last, count = None, 0
    for span in lane:
        if last and span.end - last.start < shortest:
            last, count = _joined(last, span, count), count + 1
            continue
        if last:
            yield last
        label = span.label.rsplit(":", 1)[0]
        name = operation(span.label)
        last, count = Mark(span.rank, span.lane, name, label, span.start, span.end), 1
    if last:
        yield last


def _joined(mark: Mark, span: Span, count: int) -> Mark:
    label = f"{count + 1} operations"
    return Mark(mark.rank, mark.lane, mark.operation, label, mark.start, max(mark.end, span.end))


def _lines(
    name: str,
    own: list[Mark],
    height: dict[tuple[int, int], int],
    scale: float,
    unit: str,
    colour: str,
    in_legend: bool,
) -> go.Scatter:
    """An operation's marks as thick lines with gaps between them: one path, quick to draw."""
    x: list[float | None] = []
    y: list[int | None] = []
    text: list[str | None] = []
    for mark in own:
        place = height[mark.rank, _order(mark.lane)]
        x += [_short(mark.start * scale), _short(mark.end * scale), None]
        y += [place, place, None]
        text += [mark.label, mark.label, None]
    return go.Scatter(
        name=_spelt(name),
        legendgroup=name,
        showlegend=in_legend,
        mode="lines",
        x=x,
        y=y,
        text=text,
        line={"width": 12, "color": colour},
        hovertemplate=f"%{{text}}, %{{x:.4g}} {unit}<extra></extra>",
    )


def _spelt(name: str) -> str:
    """An operation for the legend.

    >>> _spelt("halo:f"), _spelt("receive:b"), _spelt("loss")
    ('halo forward', 'receive backward (waits)', 'loss')
    """
    words = name.replace(":f", " forward").replace(":b", " backward")
    return f"{words} (waits)" if name in WAITS else words


def _short(value: float) -> float:
    return float(f"{value:.5g}")


def _order(lane: str) -> int:
    return LANE_ORDER.index(lane)


def totals(spans: Iterable[Span]) -> dict[tuple[int, str, str], float]:
    """Seconds by rank, lane and operation [s]."""
    found: dict[tuple[int, str, str], float] = {}
    for span in spans:
        key = span.rank, span.lane, operation(span.label)
        found[key] = found.get(key, 0.0) + span.seconds
    return dict(sorted(found.items(), key=lambda item: (item[0][0], _order(item[0][1]))))


def describe(window: Window) -> str:
    """How much of the window ranks compute."""
    taken: dict[int, float] = {}
    for span in window.spans:
        busy = span.seconds if span.lane == "compute" else 0.0
        taken[span.rank] = taken.get(span.rank, 0.0) + busy
    shares = np.array(list(taken.values())) / max(window.seconds, 1e-12)
    return (
        f"{show_time(window.seconds)}, in which ranks compute {show_percent(shares.min())} to"
        f" {show_percent(shares.max())} of the time"
    )


def _see(facts: Facts, windows: list[Window], steps: int) -> str:
    unit = "an epoch" if facts.batches == 1 else show_count(steps, "step")
    words = [
        f"The steady state of {unit}, a row per rank and lane; gaps in a compute row are waiting."
        f" Simulated: {describe(windows[0])}."
    ]
    if len(windows) > 1:
        words.append(f"Measured, in {windows[1].name}: {describe(windows[1])}.")
    elif facts.runs:
        words.append(f"No run is of {facts.candidate.strategy}, so nothing measured is below it.")
    if len(facts.same) > 1:
        words.append(f"{len(facts.same)} runs are of this strategy; the first is shown.")
    if facts.problem.ranks > MOST_RANKS:
        words.append(f"The first {MOST_RANKS} of {facts.problem.ranks} ranks are shown.")
    return " ".join([*words, "Drag to zoom, double-click to go back."])
