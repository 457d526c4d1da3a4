"""Who sends whom, and over which links: a matrix of ranks, and the cluster as a graph."""

from __future__ import annotations

from dataclasses import dataclass

import networkx as nx
import numpy as np
import plotly.graph_objects as go

from gnnplan.planner.cluster import topology
from gnnplan.planner.cluster.places import Port
from gnnplan.planner.cluster.topology import Node
from gnnplan.planner.decision.search import Candidate
from gnnplan.planner.vocabulary.schedule import Collective, Schedule, Send
from gnnplan.planner.vocabulary.units import show_bytes, show_percent
from gnnplan.report.facts import Absent, Facts
from gnnplan.report.picture import (
    COMMUNICATION,
    COMPUTATION,
    MEASURED,
    SHADES,
    WAITING,
    Picture,
    byte_unit,
    figure,
)

MOST_RANKS = 64  # of the matrix and of the drawing; beyond, servers stand for their ranks
MOST_TOLD = 3  # links in words
MOST_NAMED = 32  # places with their number beside them
MOST_WRITTEN = 4  # ranks whose bytes are written into the fields
# From the idlest: name, busy for at least this share of the epoch, colour, width.
CLASSES = (
    ("idle", 0.0, WAITING, 1),
    ("below 1 % of the epoch", 1e-12, COMPUTATION, 2),
    ("1 % to 10 %", 0.01, COMMUNICATION, 3),
    ("10 % or more", 0.1, MEASURED, 5),
)
# Floors of the drawing, from the bottom; what joins servers is above them.
FLOORS = {"gpu": 0, "island": 1, "switch": 2, "host": 3, "nic": 4, "spine": 6}
JOINS = 5
BESIDE = 0.3  # NICs stand beside their switch, or GPUs' ways to both would be one line
FLOOR_WORDS = {"gpu": "rank", "nic": "NIC", "host": "host"}


@dataclass(frozen=True)
class Load:
    """What an epoch puts on a port."""

    port: Port
    name: str
    nbytes: float
    share: float  # of the epoch in which it is busy


def sent_between(candidate: Candidate, schedule: Schedule) -> np.ndarray:
    """Bytes from rank to rank [ranks, ranks] of a schedule; all-reduces go hop by hop [B]."""
    ranks, cost = schedule.ranks, candidate.problem.cost
    sent = np.zeros((ranks, ranks))
    reduced: dict[tuple[int, ...], int] = {}
    for task in schedule.tasks:
        work = task.work
        if isinstance(work, Send):
            sent[task.rank, work.peer] += work.nbytes
        elif isinstance(work, Collective) and work.op == "all_reduce":
            reduced[work.group] = reduced.get(work.group, 0) + work.nbytes
        elif isinstance(work, Collective):
            for peer, nbytes in work.sent:
                sent[task.rank, peer] += nbytes
    for group, nbytes in reduced.items():
        sent += cost.reduced_between(nbytes, group)
    return sent


def loads(candidate: Candidate, sent: np.ndarray) -> list[Load]:
    """The ports that an epoch's bytes pass, the busiest first."""
    source, target = np.nonzero(sent)
    problem, epoch_s = candidate.problem, float(candidate.predicted.epoch_s)
    found = [
        Load(
            (port, number),
            topology.describe_port(problem.cluster, problem.cost.seats, (port, number)),
            nbytes,
            nbytes / float(kind.link.bandwidth) / epoch_s,
        )
        for kind in problem.cost.loads("exchange", source, target, sent[source, target])
        for port, numbers in kind.bytes_by_port.items()
        for number, nbytes in enumerate(numbers.tolist())
        if nbytes
    ]
    return sorted(found, key=lambda load: (-load.share, load.name))


def matrix(facts: Facts) -> Picture:
    """Bytes of an epoch from rank to rank, or from server to server. Raises Absent."""
    sent = _sent(facts)
    problem = facts.problem
    places, what = np.arange(problem.ranks), "rank"
    if problem.ranks > MOST_RANKS:
        places, what = np.array(problem.servers), "server"
    shown = np.zeros((int(places.max()) + 1,) * 2)
    np.add.at(shown, (places[:, None], places[None, :]), sent)
    unit, scale = byte_unit(shown.max())
    names = [str(place) for place in range(len(shown))]
    written = len(names) <= MOST_WRITTEN
    drawn = figure(
        [
            go.Heatmap(
                x=names,
                y=names,
                z=np.round(shown * scale, 6).tolist(),
                zmin=0,
                colorscale=SHADES,
                colorbar={"title": {"text": unit}, "thickness": 12},
                xgap=1,
                ygap=1,
                text=[[show_bytes(nbytes) if nbytes else "" for nbytes in row] for row in shown],
                texttemplate="%{text}" if written else None,
                hovertemplate=f"{what} %{{y}} to {what} %{{x}}: %{{text}}<extra></extra>",
            )
        ],
        420,
        xaxis={
            "title": f"to {what}",
            "type": "category",
            "fixedrange": True,
            "showgrid": False,
        },
        yaxis={
            "title": f"from {what}",
            "type": "category",
            "fixedrange": True,
            "autorange": "reversed",
            "showgrid": False,
        },
    )
    pairs = sorted(np.argwhere(shown > 0).tolist(), key=lambda pair: -shown[tuple(pair)])
    a, b = pairs[0]
    silent = shown.size - len(shown) - sum(i != j for i, j in pairs)
    return Picture(
        "matrix",
        "Who sends whom",
        f"An epoch sends {show_bytes(sent.sum())}, most of it from {what} {a} to {what} {b}:"
        f" {show_bytes(shown[a, b])}. "
        + (
            f"{silent} of {shown.size - len(shown)} pairs send nothing."
            if silent
            else f"Every {what} sends to every other."
        ),
        f"A matrix of bytes from {what} to {what}; "
        + ", ".join(f"{i} to {j} {show_bytes(shown[i, j])}" for i, j in pairs[:6]),
        drawn,
        [f"from {what}", f"to {what}", "bytes per epoch"],
        [[str(i), str(j), show_bytes(shown[i, j])] for i, j in pairs],
    )


def links(facts: Facts) -> Picture:
    """The cluster as a graph, its links by how long an epoch keeps them busy. Raises Absent."""
    candidate, problem = facts.candidate, facts.problem
    found = loads(candidate, _sent(facts))
    if problem.cluster.ranks > MOST_RANKS:
        raise Absent(f"the cluster has {problem.cluster.ranks:,} GPUs, too many for a drawing")
    graph = _drawable(topology.graph(problem.cluster), problem.cluster.servers)
    place = _places(graph)
    shares = _by_edge(found, problem.cost.seats)
    seated = {gpu: rank for rank, gpu in enumerate(problem.cost.seats)}
    traces = _edges(graph, place, shares)
    names = [_name(node, seated) for node in graph]
    traces.append(
        go.Scatter(
            mode="markers+text",
            x=[place[node][0] for node in graph],
            y=[place[node][1] for node in graph],
            text=[name.rpartition(" ")[2] for name in names] if len(names) <= MOST_NAMED else None,
            textposition=["bottom center" if n[0] == "gpu" else "top center" for n in graph],
            hovertext=names,
            hoverinfo="text",
            marker={
                "size": 14,
                "color": [
                    COMPUTATION if n[0] != "gpu" or n[1] in seated else WAITING for n in graph
                ],
            },
            showlegend=False,
        )
    )
    floors = {place[node][1]: FLOOR_WORDS.get(node[0], node[0]) for node in graph}
    drawn = figure(
        traces,
        90 + 80 * len(floors),
        xaxis={"visible": False, "fixedrange": True},
        yaxis={
            "fixedrange": True,
            "showgrid": False,
            "zeroline": False,
            "range": [-0.5, len(floors) - 0.6],
            "tickvals": list(floors),
            "ticktext": list(floors.values()),
        },
    )
    top = found[:MOST_TOLD]
    return Picture(
        "links",
        "Which links are busy",
        "Links by the share of an epoch that their bytes need at full bandwidth. The busiest: "
        + ", ".join(f"{one.name} ({show_percent(one.share, 1)})" for one in top)
        + ".",
        "The cluster as a graph of GPUs and links; busiest are "
        + ", ".join(f"{one.name} with {show_bytes(one.nbytes)}" for one in top),
        drawn,
        ["link", "bytes per epoch", "busy"],
        [[one.name, show_bytes(one.nbytes), show_percent(one.share, 1)] for one in found],
    )


def _sent(facts: Facts) -> np.ndarray:
    sent = sent_between(facts.candidate, facts.epoch)
    if not sent.any():
        raise Absent("nothing is sent")
    return sent


def _by_edge(found: list[Load], seats: tuple[int, ...]) -> dict[Port, float]:
    """Shares by the ports of the cluster's graph, where GPUs stand for ranks."""
    return {
        (kind, seats[number] if kind.startswith(("gpu", "island")) else number): load.share
        for load in found
        for kind, number in [load.port]
    }


def _drawable(whole: nx.DiGraph, servers: int) -> nx.DiGraph:
    """The graph without places that no port leads to."""
    out = nx.DiGraph(whole)
    linked = {
        node
        for *edge, port in whole.edges(data="port")
        if port is not None
        for node in edge
        if node[0] in ("island", "host")
    }
    out.remove_nodes_from(
        [
            node
            for node in whole
            if (node[0] in ("island", "host") and node not in linked)
            or (node[0] == "nic" and servers == 1)
        ]
    )
    return out


def _places(graph: nx.DiGraph) -> dict[Node, tuple[float, float]]:
    """GPUs side by side, the others in the middle above what they join."""
    floor = {node: FLOORS.get(node[0], JOINS) for node in graph}
    used = sorted(set(floor.values()))
    across: dict[Node, float] = {}
    for node in sorted(graph, key=lambda node: (floor[node], node[1])):
        below = [across[other] for other in graph[node] if floor[other] < floor[node]]
        middle = float(np.mean(below)) if below else float(node[1])
        across[node] = middle + (BESIDE if node[0] == "nic" else 0.0)
    return {node: (across[node], float(used.index(floor[node]))) for node in graph}


def _edges(
    graph: nx.DiGraph, place: dict[Node, tuple[float, float]], shares: dict[Port, float]
) -> list[go.Scatter]:
    """Lines between places, a trace for each class of how busy they are, both ways together."""
    busiest: dict[frozenset[Node], float] = {}
    for a, b, port in graph.edges(data="port"):
        edge = frozenset((a, b))
        busiest[edge] = max(busiest.get(edge, 0.0), shares.get(port, 0.0))
    traces = []
    for i, (name, least, colour, width) in enumerate(CLASSES):
        most = CLASSES[i + 1][1] if i + 1 < len(CLASSES) else np.inf
        x: list[float | None] = []
        y: list[float | None] = []
        for edge, share in busiest.items():
            if least <= share < most:
                (ax, ay), (bx, by) = (place[node] for node in sorted(edge))
                x += [ax, bx, None]
                y += [ay, by, None]
        line = {"color": colour, "width": width}
        if x:
            traces.append(
                go.Scatter(name=name, mode="lines", x=x, y=y, line=line, hoverinfo="skip")
            )
    return traces


def _name(node: Node, seated: dict[int, int]) -> str:
    kind, number = node
    if kind == "gpu":
        return f"rank {seated[number]}" if number in seated else f"GPU {number} free"
    return f"{FLOOR_WORDS.get(kind, kind)} {number}"
