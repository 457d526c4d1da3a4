"""The same question with other numbers, or of a graph that is known by its statistics; and answers,
those of print too."""

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np

from gnnplan.papers.published import COLUMNS
from gnnplan.planner.cluster.spec import Cluster, Device
from gnnplan.planner.decision.candidate import Candidate
from gnnplan.planner.decision.search import families
from gnnplan.planner.graph.graph import Graph, in_neighbours
from gnnplan.planner.graph.load import load
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies import Strategy, parse
from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.simulator.player import play


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


def suiting(problem: Problem, forced: str) -> Iterator[Strategy]:
    """Every family's candidates and examples, and those of `forced`, that suit the job."""
    named = [
        *forced.split(),
        *(e.strategy for family in families(problem) for e in family.examples),
    ]
    candidates = [s for family in families(problem) for s in family.candidates(problem)]
    for strategy in dict.fromkeys(s.settle(problem) for s in [*candidates, *map(parse, named)]):
        with suppress(SpecError):
            strategy.check(problem)
            yield strategy


def fullest_bytes(problem: Problem, strategy: Strategy) -> float:
    """What the fullest rank holds [B]."""
    return float(sum(strategy.settle(problem).memory(problem).values()).max())


def graph_of(vertices: int, edges: list[tuple[int, int]], directed: bool = False) -> Graph:
    """A graph of these edges (src, dst), all of whose vertices train."""
    src, dst = np.array(edges, dtype=np.int64).reshape(-1, 2).T
    indptr, indices, _ = in_neighbours(src, dst, vertices, directed)
    like = load(
        f"synthetic:community?vertices={max(vertices, 2)}&edges=0&features=40&classes=1&communities=1"
    )
    sizes = {"vertices": vertices, "edges": len(indices), "train_vertices": vertices}
    words = {"directed": directed, "hash": f"small {vertices} {edges} {directed}"}
    mask = np.ones(vertices, bool)
    arrays = {"train": mask, "val": ~mask, "test": ~mask, "x": np.zeros((vertices, 40), "f4")}
    stats = replace(like.stats, **sizes, **words)
    return replace(like, stats=stats, indptr=indptr, indices=indices, **arrays)


def edges_of(graph: Graph) -> set[tuple[int, int]]:
    """From whom to whom."""
    readers = np.repeat(np.arange(graph.stats.vertices), graph.degree)
    return set(zip(graph.indices.tolist(), readers.tolist(), strict=True))


def epochs_s(problem: Problem, text: str, epochs: int) -> tuple[float, float]:
    """An epoch as predicted, and as so many are played."""
    strategy = parse(text).settle(problem)
    steps = strategy.steps(problem)
    played = play(strategy.schedule(problem, epochs * steps), problem.cost).epoch_s(steps)
    return float(strategy.predict(problem).epoch_s), played


def uniform(vertices: int, edges: int, features: int = 1, classes: int = 1) -> Graph:
    """A graph without structure: one community, no skew."""
    sizes = f"vertices={vertices}&edges={edges}&features={features}&classes={classes}"
    return load(f"synthetic:community?{sizes}&mixing=1&skew=100")


def taking(candidate: Candidate, epoch_s: float) -> Candidate:
    """The candidate as if it had this epoch [s], as doubtful as it is."""
    out = replace(candidate, predicted=replace(candidate.predicted, epoch_s=epoch_s))
    vars(out)["drawn_s"] = candidate.drawn_s * (epoch_s / float(candidate.predicted.epoch_s))
    return out


def printed_row(job: str, **changed: object) -> dict[str, str]:
    """'p3 p3_p100 ogbn-products sage 2x32 4x4 gsplit': paper, testbed, dataset, model, layers x hidden,
    nodes x GPUs of each, strategy; - is not stated."""
    paper, testbed, dataset, model, shape, size, strategy = job.split()
    (layers, hidden), (nodes, gpus) = shape.split("x"), size.split("x")
    named = {"paper": paper, "testbed": testbed, "dataset": dataset, "model": model}
    named |= {"layers": layers, "hidden": hidden, "num_nodes": nodes, "gpus_per_node": gpus}
    named |= {"strategy": strategy, "source": "Table 1", "value": "1", "strategy_params": "{}"}
    told = {name: "" if value == "-" else value for name, value in named.items()} | changed
    texts = {name: json.dumps(v) if isinstance(v, dict) else str(v) for name, v in told.items()}
    return {**dict.fromkeys(COLUMNS, ""), **texts}
