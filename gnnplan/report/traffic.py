"""Pictures of traffic: the bytes between each pair of ranks, and the busiest links."""

from __future__ import annotations

import re
from collections import Counter
from typing import NamedTuple

import numpy as np
import plotly.graph_objects as go

from gnnplan.planner.cluster.places import Port, describe_port
from gnnplan.planner.decision.candidate import Candidate
from gnnplan.planner.vocabulary.schedule import Collective, Ring, Schedule, Send
from gnnplan.planner.vocabulary.table import Table
from gnnplan.planner.vocabulary.units import show_bytes, show_percent
from gnnplan.report.facts import Absent, Facts
from gnnplan.report.picture import COMMUNICATION, SIZES, Picture, figure, unit_of

MOST_RANKS = 64  # with more ranks, the matrix has a row per server
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
    reduced = Counter[tuple[int, ...]]()
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
    what = "rank" if problem.ranks <= MOST_RANKS else "server"
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
    return Picture("matrix", "Who sends whom", see, drawn, Table("", columns, rows))


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
    return Picture("links", "Which links are busy", see, drawn, Table("", columns, rows))


def _sent(facts: Facts) -> np.ndarray:
    sent = sent_between(facts.candidate, facts.epoch)
    if not sent.any():
        raise Absent("nothing is sent")
    return sent
