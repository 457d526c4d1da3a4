"""The same question with other numbers, or of a graph that is known by its statistics."""

from dataclasses import replace
from typing import Any

from gnnplan.planner.cluster.spec import Cluster, Device
from gnnplan.planner.graph.graph import Graph
from gnnplan.planner.graph.load import load
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies import Strategy


def changed(cluster: Cluster, **fields: Any) -> Cluster:
    """The cluster with other values of these fields, its own or its device's."""
    of_device = {name: fields.pop(name) for name in [*fields] if name in Device.model_fields}
    device = cluster.device.model_copy(update=of_device)
    return cluster.model_copy(update={"device": device} | fields)


def on(problem: Problem, **fields: Any) -> Problem:
    """The question on such a cluster."""
    return replace(problem, cluster=changed(problem.cluster, **fields))


def by_statistics(problem: Problem) -> Problem:
    return replace(problem, graph=None, stats=replace(problem.stats, known=False))


def fullest_bytes(problem: Problem, strategy: Strategy) -> float:
    """What the fullest rank holds [B]."""
    return float(sum(strategy.settle(problem).memory(problem).values()).max())


def uniform(vertices: int, edges: int, features: int = 1, classes: int = 1) -> Graph:
    """A graph without structure: one community, no skew."""
    sizes = f"vertices={vertices}&edges={edges}&features={features}&classes={classes}"
    return load(f"synthetic:community?{sizes}&mixing=1&skew=100")
