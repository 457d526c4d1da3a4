"""Pictures of an epoch: the operations of each rank over time, and the traffic between ranks.

Operations have one row per lane, simulated, and measured below. Traffic is the bytes between each
pair of ranks, and the busiest links."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from gnnplan.planner.cluster.places import Port, describe_port
from gnnplan.planner.decision.candidate import Candidate
from gnnplan.planner.evidence.validate import MOVED, describe_operation, operation
from gnnplan.planner.evidence.validate import WAITING as WAITS
from gnnplan.planner.vocabulary.numbers import Group
from gnnplan.planner.vocabulary.schedule import Collective, Ring, Schedule, Send
from gnnplan.planner.vocabulary.text import Table
from gnnplan.planner.vocabulary.trace import BELOW, Span, place_of
from gnnplan.planner.vocabulary.units import show_bytes, show_count, show_percent, show_time
from gnnplan.report.facts import (
    COLOURS,
    COMMUNICATION,
    SIZES,
    TIMES,
    WAITING,
    Absent,
    Facts,
    Picture,
    figure,
    unit_of,
)

MOST_RANKS = 16  # most ranks to draw
MOST_MARKS = 8_000  # most marks per panel, to bound the size of the page
# lane or operation -> explanation below the picture
TERMS = {
    "comm": "exchanges between ranks",
    "reduce": "sums of gradients over ranks",
    "copy": "copies to the device",
    "host": "sampling",
    **MOVED,
    "halo": "rows of neighbours that other ranks hold",
}


@dataclass(frozen=True)
class Window:
    """The clipped spans of some steps, with times from 0; a span's `op` is the operation."""

    name: str  # 'simulated', or the folder of a run
    spans: list[Span]
    seconds: float

    @property
    def computing(self) -> str:
        """The window's duration and the share of it in which ranks compute, in words."""
        ranks = {span.rank for span in self.spans}
        busy = [
            sum(s.seconds for s in self.spans if (s.rank, s.lane) == (rank, "compute"))
            for rank in ranks
        ]
        shares = dict.fromkeys(show_percent(one / self.seconds) for one in (min(busy), max(busy)))
        return f"{show_time(self.seconds)}, of which ranks compute {' to '.join(shares)}"


def timeline(facts: Facts) -> Picture:
    """Draw the steady state of the plan's strategy, simulated and measured. Raises Absent."""
    steps = 1 if facts.batches == 1 else min(3, facts.batches)
    simulated = steady("simulated", facts.simulated, steps)
    if simulated is None:
        raise Absent("the simulated steps take no time")
    measured = (steady(one.run.folder, one.measured, steps) for one in facts.same[:1])
    windows = [simulated, *filter(None, measured)]
    panels = [marks(window) for window in windows]
    names = _by_lane(mark for panel in panels for mark in panel)
    colours = {op: WAITING if _waits(op) else c for op, c in zip(names, COLOURS * 9, strict=False)}
    longest = max(window.seconds for window in windows)
    unit, scale = unit_of(longest, TIMES)
    lanes = [
        sorted({(m.rank, m.lane) for m in panel}, key=lambda own: (own[0], place_of(own[1])))
        for panel in panels
    ]
    heights = [18 * len(places) + 30 for places in lanes]
    drawn = make_subplots(
        rows=len(panels),
        shared_xaxes=True,
        row_heights=heights,
        vertical_spacing=30 / (sum(heights) + 30),
    )
    shown: set[str] = set()
    for row, (window, panel, places) in enumerate(zip(windows, panels, lanes, strict=True), 1):
        for op in names:
            if own := [mark for mark in panel if mark.op == op]:
                lines = _lines(own, places, scale, unit, colours[op])
                drawn.add_trace(lines.update(showlegend=op not in shown), row, 1)
                shown.add(op)
        drawn.update_yaxes(
            row=row,
            tickvals=list(range(len(places))),
            ticktext=[f"rank {rank} {lane}" for rank, lane in places],
            range=[len(places) - 0.5, -1.5],
            tickfont_size=10,
            showgrid=False,
            zeroline=False,
        )
        title = f"<b>{'simulated' if row == 1 else 'measured'}</b> {show_time(window.seconds)}"
        at_left = {"x": 0, "xref": "x domain", "xanchor": "left", "showarrow": False}
        drawn.add_annotation(text=title, row=row, col=1, y=-1, **at_left)
    whole = sum(heights) + 180
    out = figure(drawn, whole, dragmode="zoom", legend={"y": -60 / (whole - 150), "yanchor": "top"})
    out.update_xaxes(fixedrange=False, range=[0, longest * scale])
    out.update_xaxes(title_text=unit, row=len(panels), col=1)
    columns = ["", "rank", "lane", "operation", "time"]
    rows = [
        [window.name, str(rank), lane, describe_operation(op), show_time(taken)]
        for window in windows
        for (rank, lane, op), taken in totals(window).items()
    ]
    see = _see(facts, windows, steps)
    return Picture("timeline", see, out, Table("", columns, rows))


def steady(name: str, spans: Iterable[Span], steps: int) -> Window | None:
    """Return the window of `steps` successive steps with the median duration, the first steps left
    out; None if no span has a duration."""
    spans = [span._replace(op=operation(span.label)) for span in spans if span.step >= 0]
    ends: dict[int, float] = {}
    for span in spans:
        ends[span.step] = max(ends.get(span.step, span.end), span.end)
    if not ends:
        return None
    known = sorted(ends)
    bounds = [(ends[a], ends[b]) for a, b in zip(known, known[steps:], strict=False)]
    whole = (min(span.start for span in spans), ends[known[-1]])
    bounds = bounds[1:] or bounds or [whole]  # the first steps warm up
    low, high = sorted(bounds, key=lambda pair: pair[1] - pair[0])[len(bounds) // 2]
    clipped = [
        span._replace(start=max(span.start, low) - low, end=min(span.end, high) - low)
        for span in spans
        if span.start < high and span.end > low
    ]
    return Window(name, clipped, high - low) if high > low else None


def marks(window: Window) -> list[Span]:
    """Return the first ranks' spans, with short spans joined until at most MOST_MARKS remain."""
    spans = [
        span for span in window.spans if span.rank < MOST_RANKS and place_of(span.lane) < BELOW
    ]
    spans.sort(key=lambda span: (span.rank, span.lane, span.start, span.end))
    lanes = [list(lane) for _, lane in groupby(spans, key=lambda span: (span.rank, span.lane))]
    shortest = window.seconds / 16_000
    while len(found := [m for lane in lanes for m in thinned(lane, shortest)]) > MOST_MARKS:
        shortest *= 2
    return found


def thinned(lane: Iterable[Span], shortest: float) -> Iterator[Span]:
    """Yield the spans of one lane (sorted by start), labelled without the step; join spans that lie
    within `shortest` seconds."""
    last, count = None, 0
    for span in lane:
        if last and span.end - last.start < shortest:
            count += 1
            last = last._replace(label=f"{count} operations", end=max(last.end, span.end))
            continue
        if last:
            yield last
        last, count = span._replace(label=span.label.rsplit(":", 1)[0]), 1
    if last:
        yield last


def _lines(
    own: list[Span], places: list[tuple[int, str]], scale: float, unit: str, colour: str
) -> Any:
    """Return an operation's marks as one path of thick lines with gaps, which is quick to draw."""
    height = {place: i for i, place in enumerate(places)}
    name = own[0].op
    return go.Scatter(
        name=name.replace(":f", " forward").replace(":b", " backward") + " (waits)" * _waits(name),
        legendgroup=name,
        mode="lines",
        x=[x and float(f"{x * scale:.5g}") for m in own for x in (m.start, m.end, None)],
        y=[y for m in own for y in (height[m.rank, m.lane],) * 2 + (None,)],
        text=[text for m in own for text in (m.label, m.label, None)],
        line={"width": 12, "color": colour},
        hovertemplate=f"%{{text}}, %{{x:.4g}} {unit}<extra></extra>",
    )


def _by_lane(marks: Iterable[Span]) -> list[str]:
    """Return operations in the legend's order: by lane, then by time; waiting last."""
    first: dict[str, tuple[bool, tuple[int, int], float]] = {}
    for mark in marks:
        key = _waits(mark.op), place_of(mark.lane), mark.start
        first[mark.op] = min(first.get(mark.op, key), key)
    return sorted(first, key=lambda op: first[op])


def _waits(name: str) -> bool:
    return name.partition(":")[0] in WAITS


def totals(window: Window) -> dict[tuple[int, str, str], float]:
    """Return (rank, lane, operation) -> seconds [s]."""
    found = defaultdict[tuple[int, str, str], float](float)
    for span in window.spans:
        found[span.rank, span.lane, span.op] += span.seconds
    return dict(sorted(found.items()))


def _see(facts: Facts, windows: list[Window], steps: int) -> str:
    unit = "an epoch" if facts.batches == 1 else show_count(steps, "step")
    words = [
        f"The steady state of {unit}. A rank has a row per lane, and its lanes work side by side;"
        " gaps in its compute row are waiting.",
        f"Simulated: {windows[0].computing}.",
    ]
    used = {word for span in windows[0].spans for word in (span.lane, span.op.partition(":")[0])}
    terms = [f"{term}, {meaning}" for term, meaning in TERMS.items() if term in used]
    if terms:
        words.insert(1, f"Names: {'; '.join(terms)}.")
    for window in windows[1:]:
        words.append(f"Measured, in {window.name}: {window.computing}.")
    if facts.same and not windows[1:]:
        words.append(f"{facts.same[0].run.folder} has recorded no step.")
    elif facts.runs and not facts.same:
        words.append(f"No run is of {facts.candidate.strategy}, so nothing measured is below it.")
    if len(facts.same) > 1:
        words.append(f"{len(facts.same)} runs are of this strategy; the first is shown.")
    if facts.problem.ranks > MOST_RANKS:
        words.append(f"The first {MOST_RANKS} of {facts.problem.ranks} ranks are shown.")
    return " ".join([*words, "Drag to zoom, double-click to go back."])


# -- traffic ---------------------------------------------------------------------------------------


MOST_PLACES = 64  # with more ranks, the matrix has a row per server
EVEN = 1.01  # pairs whose bytes differ by less than this factor count as equal
MOST_TOLD = 3  # links named in the caption
MOST_LINKS = 24  # links to draw
MOST_WRITTEN = 4  # with more rows, bytes are not written into the cells


class Load(NamedTuple):
    """The bytes that an epoch sends through a port."""

    port: Port
    name: str
    nbytes: float
    share: float  # time of the bytes at the port's bandwidth, as a share of the epoch


def sent_between(candidate: Candidate, schedule: Schedule) -> np.ndarray:
    """Return a schedule's bytes from rank to rank [ranks, ranks] [B]; all-reduces hop by hop."""
    sent = np.zeros((schedule.ranks, schedule.ranks))
    reduced = Counter[Group]()
    for task in schedule.tasks:
        work = task.work
        if isinstance(work, Send):
            sent[task.rank, work.peer] += work.nbytes
        elif isinstance(work, Collective) and isinstance(work.work, Ring):
            reduced[work.group] += work.nbytes
        elif isinstance(work, Collective):
            for peer, nbytes in work.to_peers:
                sent[task.rank, peer] += nbytes
    for group, nbytes in reduced.items():
        sent += candidate.problem.cost.all_reduces.between(nbytes, group)
    return sent


def loads(candidate: Candidate, sent: np.ndarray) -> list[Load]:
    """Return the load of each port that an epoch sends through, the busiest first."""
    source, target = np.nonzero(sent)
    problem, epoch_s = candidate.problem, candidate.epoch_s
    placement = problem.cost.placement
    rank_of = {f"GPU {gpu}": f"rank {rank}" for rank, gpu in enumerate(placement)}
    found = [
        Load(
            (port, number),
            re.sub(
                r"GPU \d+",  # the picture names ranks, which may be CPUs
                lambda gpu: rank_of.get(gpu[0], gpu[0]),
                describe_port(problem.cluster, placement, (port, number)),
            ),
            nbytes,
            nbytes / float(kind.link.bandwidth) / epoch_s,
        )
        for kind in problem.cost.ports.loads("exchange", source, target, sent[source, target])
        for port, numbers in kind.bytes_by_port.items()
        for number, nbytes in enumerate(numbers.tolist())
        if nbytes
    ]
    return sorted(found, key=lambda load: (-load.share, load.name))


def matrix(facts: Facts) -> Picture:
    """Draw an epoch's bytes from rank to rank, or from server to server. Raises Absent."""
    sent, problem = _sent(facts), facts.problem
    what = "rank" if problem.ranks <= MOST_PLACES else "server"
    places = np.arange(problem.ranks) if what == "rank" else np.array(problem.servers)
    shown = np.zeros((int(places.max()) + 1,) * 2)
    np.add.at(shown, (places[:, None], places[None, :]), sent)
    unit, scale = unit_of(shown.max(), SIZES)
    names = [str(place) for place in range(len(shown))]
    field = go.Heatmap(
        x=names,
        y=names,
        z=np.round(shown * scale, 6).tolist(),
        zmin=0,
        colorbar={"title_text": unit, "thickness": 12},
        xgap=1,
        ygap=1,
        text=[[show_bytes(nbytes) for nbytes in row] for row in shown],
        texttemplate="%{text}" if len(names) <= MOST_WRITTEN else None,
        hovertemplate=f"{what} %{{y}} to {what} %{{x}}: %{{text}}<extra></extra>",
    )
    drawn = figure([field], 420, margin_t=8)
    names_not_numbers = {"type": "category", "showgrid": False}
    drawn.update_xaxes(title_text=f"to {what}", **names_not_numbers)
    drawn.update_yaxes(title_text=f"from {what}", autorange="reversed", **names_not_numbers)
    pairs = sorted(np.argwhere(shown > 0).tolist(), key=lambda pair: -shown[tuple(pair)])
    a, b = pairs[0]
    all_pairs = shown.size - len(shown)
    talking = sum(i != j for i, j in pairs)
    most, least = (shown[tuple(pair)] for pair in (pairs[0], pairs[-1]))
    see = f"An epoch sends {show_bytes(sent.sum())}. {talking} of {all_pairs} pairs send something"
    if most <= least * EVEN:
        see += f", {show_bytes(most)} each."
    else:
        see += f"; the most, {show_bytes(most)}, goes from {what} {a} to {what} {b}."
    columns = [f"from {what}", f"to {what}", "bytes per epoch"]
    rows = [[str(i), str(j), show_bytes(shown[i, j])] for i, j in pairs]
    return Picture("matrix", see, drawn, Table("", columns, rows))


def links(facts: Facts) -> Picture:
    """Draw the share of an epoch that each link is busy, the busiest first. Raises Absent."""
    found = loads(facts.candidate, _sent(facts))
    shown = found[:MOST_LINKS]
    bars = go.Bar(
        orientation="h",
        y=[one.name for one in shown],
        x=[100 * one.share for one in shown],
        marker_color=COMMUNICATION,
        hovertemplate="%{y}: %{x:.3g} %<extra></extra>",
    )
    drawn = figure([bars], 90 + 22 * len(shown))
    drawn.update_xaxes(title_text="% of the epoch", rangemode="tozero")
    drawn.update_yaxes(autorange="reversed", tickfont_size=11)
    top = ", ".join(f"{one.name} ({show_percent(one.share, 1)})" for one in found[:MOST_TOLD])
    see = (
        "Links by the share of an epoch that their bytes need at full bandwidth. The busiest:"
        f" {top}."
    )
    rows = [[one.name, show_bytes(one.nbytes), show_percent(one.share, 1)] for one in found]
    columns = ["link", "bytes per epoch", "busy"]
    return Picture("links", see, drawn, Table("", columns, rows))


def _sent(facts: Facts) -> np.ndarray:
    sent = sent_between(facts.candidate, facts.epoch)
    if not sent.any():
        raise Absent("nothing is sent")
    return sent
