"""Laws over every strategy: closed form, schedule and memory tell one story, and the story bends
the right way.

`problems()` draws what strategies are asked about; `StrategyEvaluation` is what they say, for all
LAWS.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from statistics import median
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

from gnnplan.planner.cluster.scaling import multiplied
from gnnplan.planner.cluster.spec import Cluster, Device, Link
from gnnplan.planner.gnn.kinds import KINDS
from gnnplan.planner.gnn.workload import Workload
from gnnplan.planner.graph.graph import Graph, GraphStats
from gnnplan.planner.graph.load import load
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies import (
    GNNPipe,
    Offload,
    Prediction,
    Strategy,
    Tensor3D,
    named,
    parse,
)
from gnnplan.planner.strategies.layerwise.exchange import CLAIM
from gnnplan.planner.vocabulary.numbers import Group
from gnnplan.planner.vocabulary.schedule import Collective, Ring, Schedule, Send
from gnnplan.simulator.player import TaskGraph, play
from gnnplan.testing.drawing import draw

ROUND = 1e-9  # relative rounding error of a sum of seconds


def community(vertices: int, edges: int, seed: int = 0) -> Graph:
    graph = load(
        f"synthetic:community?vertices={vertices}&edges={edges}&features=40&classes=5&seed={seed}"
    )
    assert isinstance(graph, Graph)
    return graph


def statistics(graph: Graph) -> GraphStats:
    """Return the graph's statistics, as of a graph known by statistics only."""
    return replace(graph.stats, known=False)


# from many edges to none
GRAPHS = (community(400, 6000), community(120, 900, 1), community(60, 100, 2), community(24, 0, 3))


def cluster(
    servers: int = 2,
    gpus: int = 2,
    inter: float = 1e9,
    intra: float = 1e10,
    latency: float = 1e-6,
    **device: Any,
) -> Cluster:
    gpu = Device(
        **{"memory": 1e12, "gemm": 1e11, "memory_bandwidth": 1e11, "launch": 1e-6, **device}
    )
    return Cluster(
        servers=servers,
        gpus_per_server=gpus,
        device=gpu,
        intra_node=Link(bandwidth=intra, latency=latency),
        inter_node=Link(bandwidth=inter, latency=latency),
    )


def problem_of(
    graph: Graph | GraphStats, where: Cluster, method: str = "metis", **workload: Any
) -> Problem:
    asked = Workload(**{"model": "gcn", "hidden": 64, **workload})
    if isinstance(graph, GraphStats):
        return Problem(graph, None, asked, where, method)
    return Problem(graph.stats, graph, asked, where, method)


def log_uniform(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(np.log10(low), np.log10(high)).map(lambda x: float(10**x))


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    gathers = {"gather": {4: 1e9, 64: {1e4: 2e10, 1e6: 5e9}}, "row_latency": 2e-8}
    where = cluster(
        draw(st.integers(1, 3)),
        draw(st.integers(1, 3)),
        inter=draw(log_uniform(1e6, 1e10)),
        intra=draw(log_uniform(1e7, 1e11)),
        latency=draw(log_uniform(1e-7, 1e-3)),
        gemm=draw(log_uniform(1e9, 1e13)),
        memory_bandwidth=draw(log_uniform(1e9, 1e12)),
        launch=draw(log_uniform(1e-7, 1e-4)),
        overlap_tax=draw(st.sampled_from([0.0, 0.4])),
        **draw(st.sampled_from([{}, {**gathers, "row_bandwidth": 5e9}])),
    )
    model = draw(st.sampled_from([*KINDS]))
    norm = None if KINDS[model].instead else draw(st.sampled_from([None, "layer", "batch"]))
    return problem_of(
        draw(st.sampled_from(GRAPHS)),
        where,
        model=model,
        norm=norm,
        heads=1,
        layers=draw(st.integers(1, 6)),
        hidden=draw(st.sampled_from([3, 16, 64])),
        dropout=draw(st.sampled_from([0.0, 0.5])),
        optimizer=draw(st.sampled_from(["adam", "sgd"])),
        dtype=draw(st.sampled_from(["float32", "float64"])),
    )


# -- laws of every strategy ------------------------------------------------------------------------


class StrategyEvaluation:
    """A strategy's prediction and simulation, computed once for all laws, since it takes long.

    faster: the same problem on better hardware."""

    def __init__(self, problem: Problem, faster: Problem, strategy: Strategy) -> None:
        # a step that is one CUDA graph launches less
        both = (each.with_cuda_graph(strategy.uses_cuda_graph) for each in (problem, faster))
        self.problem, self.faster = both
        self.strategy, self.steps = strategy, strategy.steps(self.problem)
        self.predicted = strategy.predict(self.problem)
        self.period = self.predicted.period
        # two periods of epochs after the first epoch are simulated
        self.played_steps = max(6, (2 * self.period + 1) * self.steps)
        self.schedule: Schedule = strategy.schedule(self.problem, self.played_steps)
        self.tasks = TaskGraph(self.schedule, self.problem.cost)
        self.alone, self.contended = (  # simulated without contention for links, and with it
            self.tasks.play(contention) for contention in (False, True)
        )


def alone_simulated_serial(told: StrategyEvaluation) -> None:
    bounds = [told.alone.end_s, told.contended.end_s, told.tasks.serial_s]
    assert all(low <= high * (1 + ROUND) for low, high in pairwise(bounds)), bounds


def closed_form_is_the_simulation_within_the_claim(told: StrategyEvaluation) -> None:
    """Compare every epoch of a period. Transfers of a synchronous step share no link, unless
    gradients are summed in several buckets. A stale step's all-reduce shares links with exchanges:
    its closed form lies between the two simulations and close to the contended one."""
    problem, strategy, buckets = told.problem, told.strategy, getattr(told.strategy, "buckets", 1)
    claim = strategy.claim if buckets == 1 else max(strategy.claim, CLAIM)
    both = (each.epochs_s(told.steps) for each in (told.alone, told.contended))
    alike = [[median(epochs[e :: told.period]) for e in range(told.period)] for epochs in both]
    for e, (alone, contended) in enumerate(zip(*alike, strict=True), 1):  # the first is not there
        closed = float(told.predicted.at(e).epoch_s)
        assert abs(closed / contended - 1) <= claim, (closed, contended)
        if told.strategy.built(problem).lag:
            assert alone * (1 - ROUND) <= closed
            assert buckets > 1 or closed <= contended * (1 + ROUND)
        elif buckets > 1:
            assert alone * (1 - ROUND) <= closed
            assert abs(closed / contended - 1) <= CLAIM, (closed, contended)
        elif isinstance(strategy, Tensor3D):  # concurrent groups share their servers' NICs
            assert alone * (1 - ROUND) <= closed
        elif isinstance(strategy, GNNPipe):  # stages share ports, if members exchange rows
            least = 0.95 if problem.stats.edges else 0.0  # without edges members never meet
            assert alone * least <= closed, (closed, alone)
            assert strategy.members(problem) > 1 or abs(closed / contended - 1) <= 0.05
        else:
            assert abs(closed / alone - 1) <= strategy.claim, (closed, alone)


def parts_of_the_epoch_add_up(told: StrategyEvaluation) -> None:
    for p in (told.predicted, *told.predicted.epochs_of_period):
        assert min(float(p.compute_s), float(p.comm_s), float(p.bubble_s)) >= 0
        assert float(p.compute_s) <= float(p.epoch_s) * (1 + ROUND)
        assert sums(p) == pytest.approx(float(p.epoch_s), rel=1e-9)
        assert p.bottleneck.split(" (")[0] in ("computation", "communication", "waiting")


def better_hardware_is_never_slower(told: StrategyEvaluation) -> None:
    faster, schedule = told.faster, told.schedule
    predicted = float(told.strategy.predict(faster).epoch_s)
    assert predicted <= float(told.predicted.epoch_s) * (1 + ROUND)
    # a schedule holds work and order, no times, so faster hardware does not change it
    assert told.strategy.schedule(faster, told.played_steps) == schedule
    simulated = play(schedule, faster.cost, contention=False).end_s
    assert simulated <= told.alone.end_s * (1 + ROUND)


def bytes_of_the_schedule_are_those_of_predict(told: StrategyEvaluation) -> None:
    """Compare bytes epoch by epoch."""
    steps, schedule = told.steps, told.schedule
    for epoch in range(1, 2 * told.period + 1):
        p = told.predicted.at(epoch)
        assert steady_bytes(schedule, epoch, steps) == p.bytes
        assert sum(p.bytes_by_link.values()) == p.bytes_total
        assert crossing(schedule, told.problem, steps, epoch) == p.bytes_by_link
        counts = [*p.bytes.values(), *p.bytes_by_link.values()]
        assert all(isinstance(n, int) and n > 0 for n in counts)
    assert sum(schedule.bytes_by_op(schedule.setup).values()) == told.predicted.setup_bytes


def every_wait_names_a_task_and_every_rank_has_the_same_meetings(told: StrategyEvaluation) -> None:
    known = {(t.rank, t.label) for t in told.schedule.tasks}
    meetings: dict[Any, set[int]] = {}
    for t in told.schedule.tasks:
        assert all((t.rank, label) in known or label.step < 0 for label in t.after)
        if isinstance(t.work, Collective):
            meetings.setdefault((t.label, t.work.group), set()).add(t.rank)
    assert all(set(group) == ranks for (_, group), ranks in meetings.items())


def memory_is_told_by_rank_and_use(told: StrategyEvaluation) -> None:
    problem, memory = told.problem, told.strategy.memory(told.problem)
    assert all(
        use.shape == (problem.ranks,) and (use >= 0).all() and np.isfinite(use).all()
        for use in memory.values()
    )
    total = sum(memory.values())
    assert (total > memory["parameters"] + memory["optimizer"]).all()
    assert (memory["runtime"] > 0).all()
    # a stage of SGC that only propagates has no weights
    assert ((memory["optimizer"] > 0) == (memory["parameters"] > 0)).all()
    # any: a rank may hold only rows that it hands to other ranks. Offload loads the edges of a
    # chunk with the operations that read them; with recomputation one layer keeps only features
    assert isinstance(told.strategy, Offload) or memory["graph"].any()
    assert memory["activations"].any() or getattr(told.strategy, "checkpoint", False)
    assert memory["parameters"].sum() >= problem.model.weights * problem.model.itemsize


LAWS = (
    alone_simulated_serial,
    closed_form_is_the_simulation_within_the_claim,
    parts_of_the_epoch_add_up,
    better_hardware_is_never_slower,
    bytes_of_the_schedule_are_those_of_predict,
    every_wait_names_a_task_and_every_rank_has_the_same_meetings,
    memory_is_told_by_rank_and_use,
)


# number that improves -> its fields (cluster/scaling.py), if not the device's field of its name
BETTER = {
    "intra": ("intra_node.bandwidth",),
    "inter": ("inter_node.bandwidth",),
    "latency": ("/intra_node.latency", "/inter_node.latency"),
    "launch": ("/device.launch",),
}


def with_better(problem: Problem, what: str, factor: float) -> Problem:
    """Return the problem on hardware with one number `factor` times as good."""
    fields = BETTER.get(what, (f"device.{what}",))
    return replace(problem, cluster=multiplied(problem.cluster, dict.fromkeys(fields, factor)))


def sums(p: Prediction) -> float:
    return float(p.compute_s) + float(p.comm_s) + float(p.bubble_s)


def steady_bytes(schedule: Schedule, epoch: int = 1, steps: int = 1) -> dict[str, int]:
    tasks = (t for t in schedule.tasks if t.label.step // steps == epoch)
    return {op: n for op, n in schedule.bytes_by_op(tasks).items() if n}


def crossing(
    schedule: Schedule, problem: Problem, steps: int = 1, epoch: int = 1
) -> dict[str, int]:
    """Return an epoch's bytes by class of link, from the schedule; steps: per epoch. A ring over
    ranks in order leaves each server once."""
    links, rings = Counter[str](), Counter[tuple[Any, Group]]()
    for task in schedule.tasks:
        work = task.work
        if task.label.step // steps != epoch or not isinstance(work, (Send, Collective)):
            continue
        sent = work.to_peers if isinstance(work, Collective) else [(work.peer, work.nbytes)]
        for peer, nbytes in sent:
            links[problem.cost.link_name(task.rank, peer)] += nbytes
        if isinstance(work, Collective) and isinstance(work.work, Ring):
            rings[task.label, work.group] += work.nbytes
    for (_, group), wire in rings.items():
        visited = len({problem.servers[rank] for rank in group})
        across = wire * visited // len(group) if visited > 1 else 0
        links["inter_node"] += across
        links["intra_node"] += wire - across
    return dict(+links)


# -- words and drawings ----------------------------------------------------------------------------


def must_survive_words_and_json(strategy: Strategy) -> None:
    assert parse(str(strategy)) == strategy
    assert named(strategy.name, json.loads(json.dumps(strategy.knobs()))) == strategy


def drawing_of(strategy: Strategy, world: int, layers: int, steps: int, **what: Any) -> str:
    """Draw some steps on a small graph, with one rank per server."""
    workload: dict[str, Any] = {"layers": layers, "hidden": 8, "mode": strategy.mode}
    if strategy.mode == "mini":
        workload |= {"batch": 16, "fanout": (3,) * layers}
    where = cluster(world, 1, intra=1e9)
    problem = problem_of(community(200, 2000), where, model="sage", **workload)
    return draw(strategy.settle(problem).schedule(problem, steps), **what)
