"""Who sends whom, and over which links: a matrix of ranks, and the cluster as a graph."""

from __future__ import annotations

import re
from collections import Counter
from typing import NamedTuple

import numpy as np
import plotly.graph_objects as go

from gnnplan.planner.cluster import topology
from gnnplan.planner.cluster.fabric import Node
from gnnplan.planner.cluster.places import Port
from gnnplan.planner.cluster.spec import Cluster
from gnnplan.planner.decision.candidate import Candidate
from gnnplan.planner.vocabulary.schedule import Collective, Schedule, Send
from gnnplan.planner.vocabulary.table import Table
from gnnplan.planner.vocabulary.units import show_bytes, show_percent
from gnnplan.report.facts import Absent, Facts
from gnnplan.report.picture import (
    COMMUNICATION,
    COMPUTATION,
    MEASURED,
    SIZES,
    WAITING,
    Picture,
    categories,
    figure,
    path,
    unit_of,
)

MOST_RANKS = 64  # of the matrix and of the drawing; beyond, servers stand for their ranks
EVEN = 1.01  # pairs that differ by less send the same
MOST_TOLD = 3  # links in words
MOST_NAMED = 32  # places with their number beside them
MOST_WRITTEN = 4  # ranks whose bytes are written into the fields
# from the idlest: name, the least and the most share of the epoch, colour, width
CLASSES = (
    ("idle", 0.0, 1e-12, WAITING, 1),
    ("below 1 % of the epoch", 1e-12, 0.01, COMPUTATION, 2),
    ("1 % to 10 % of the epoch", 0.01, 0.1, COMMUNICATION, 3),
    ("10 % of the epoch or more", 0.1, np.inf, MEASURED, 5),
)
# floors of the drawing, from the bottom; what else joins servers is on floor JOINS
FLOORS = {"gpu": 0, "island": 1, "switch": 2, "host": 3, "nic": 4, "spine": 6}
JOINS = 5
BESIDE = 0.3  # NICs stand beside their switch, or GPUs' ways to both would be one line
WORDS = {"gpu": "rank", "nic": "NIC"}


class Load(NamedTuple):
    """The load of an epoch on a port."""

    port: Port
    name: str
    nbytes: float
    share: float  # of the epoch that the bytes need at the port's bandwidth


def sent_between(candidate: Candidate, schedule: Schedule) -> np.ndarray:
    """Bytes from rank to rank [ranks, ranks] of a schedule; all-reduces go hop by hop [B]."""
    sent = np.zeros((schedule.ranks, schedule.ranks))
    reduced = Counter[tuple[int, ...]]()
    for task in schedule.tasks:
        work = task.work
        if isinstance(work, Send):
            sent[task.rank, work.peer] += work.nbytes
        elif isinstance(work, Collective) and work.op == "all_reduce":
            reduced[work.group] += work.nbytes
        elif isinstance(work, Collective):
            for peer, nbytes in work.sent:
                sent[task.rank, peer] += nbytes
    for group, nbytes in reduced.items():
        sent += candidate.problem.cost.all_reduces.between(nbytes, group)
    return sent


def loads(candidate: Candidate, sent: np.ndarray) -> list[Load]:
    """The ports that an epoch's bytes pass, the busiest first."""
    source, target = np.nonzero(sent)
    problem, epoch_s = candidate.problem, float(candidate.predicted.epoch_s)
    placement = problem.cost.placement
    rank_of = {f"GPU {gpu}": f"rank {rank}" for rank, gpu in enumerate(placement)}
    found = [
        Load(
            (port, number),
            re.sub(
                r"GPU \d+",  # as the drawing has them; and ranks may be CPUs
                lambda gpu: rank_of.get(gpu[0], gpu[0]),
                topology.describe_port(problem.cluster, placement, (port, number)),
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
    """Bytes of an epoch from rank to rank, or from server to server. Raises Absent."""
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
    drawn = figure([field], 420)
    categories(drawn, f"to {what}", f"from {what}", autorange="reversed")
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
    """The cluster as a graph, its links by how long an epoch keeps them busy. Raises Absent."""
    cluster, placement = facts.problem.cluster, facts.problem.cost.placement
    found = loads(facts.candidate, _sent(facts))
    if cluster.ranks > MOST_RANKS:
        raise Absent(f"the cluster has {cluster.ranks:,} GPUs, too many for a drawing")
    busy = {
        (kind, placement[number] if kind.startswith(("gpu", "island")) else number): load.share
        for load in found
        for kind, number in [load.port]
    }
    shares = _edges(cluster, busy)
    place = _places({node for edge in shares for node in edge}, shares)
    traces = []
    for name, least, most, colour, width in CLASSES:
        edges = [sorted(edge) for edge, share in shares.items() if least <= share < most]
        x, y = path([(*place[a], *place[b]) for a, b in edges])
        how = {"mode": "lines", "line": {"color": colour, "width": width}, "hoverinfo": "skip"}
        if edges:
            traces.append(go.Scatter(name=name, x=x, y=y, **how))
    rank_of = {("gpu", gpu): f"rank {rank}" for rank, gpu in enumerate(placement)}
    rank_of |= {node: "GPU free" for node in place if node[0] == "gpu" and node not in rank_of}
    names = [rank_of.get(node, f"{WORDS.get(node[0], node[0])} {node[1]}") for node in place]
    traces.append(
        go.Scatter(
            mode="markers+text",
            x=[x for x, _ in place.values()],
            y=[y for _, y in place.values()],
            text=[name.split()[1] for name in names] if len(names) <= MOST_NAMED else None,
            textposition=["bottom center" if n[0] == "gpu" else "top center" for n in place],
            hovertext=names,
            hoverinfo="text",
            marker={"size": 14, "color": [WAITING if "free" in n else COMPUTATION for n in names]},
            showlegend=False,
        )
    )
    floors = {y: WORDS.get(node[0], node[0]) for node, (_, y) in place.items()}
    drawn = figure(traces, 90 + 80 * len(floors)).update_xaxes(visible=False)
    drawn.update_yaxes(
        showgrid=False,
        zeroline=False,
        range=[-0.5, len(floors) - 0.6],
        tickvals=list(floors),
        ticktext=list(floors.values()),
    )
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


def _edges(cluster: Cluster, busy: dict[Port, float]) -> dict[frozenset[Node], float]:
    """The links of the cluster, and the share of the epoch that the busier direction is busy.

    A way that has no port of its own is drawn only if it leads to a NIC that is in use.
    """
    shares: dict[frozenset[Node], float] = {}
    for a, b, port in topology.edges(cluster):
        to_nic = "nic" in (a[0], b[0])
        if (to_nic and cluster.servers > 1) or (port is not None and not to_nic):
            edge = frozenset((a, b))
            shares[edge] = max(shares.get(edge, 0.0), busy.get(port, 0.0) if port else 0.0)
    return shares


def _places(
    nodes: set[Node], edges: dict[frozenset[Node], float]
) -> dict[Node, tuple[float, float]]:
    """GPUs side by side, the others in the middle above what they join."""
    floor = {node: FLOORS.get(node[0], JOINS) for node in nodes}
    used = sorted(set(floor.values()))
    place: dict[Node, tuple[float, float]] = {}
    for node in sorted(nodes, key=lambda node: (floor[node], node[0], node[1])):
        joined = {other for edge in edges if node in edge for other in edge}
        below = [place[other][0] for other in joined if floor[other] < floor[node]]
        middle = float(np.mean(below)) if below else float(node[1])
        across = middle + (BESIDE if node[0] == "nic" else 0.0)
        place[node] = across, float(used.index(floor[node]))
    return place
