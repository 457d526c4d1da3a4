"""Devices with the server's memory: bytes by sets, when a plan uses it, and what it refuses."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from asked import changed, on

from gnnplan.planner.cluster.spec import Link
from gnnplan.planner.decision.explain import explain
from gnnplan.planner.decision.search import search
from gnnplan.planner.gnn.model import RUNTIME
from gnnplan.planner.graph.graph import Graph
from gnnplan.planner.graph.load import load
from gnnplan.planner.ownership.layout import Layout
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies import GraphParallel, Offload, parse
from gnnplan.planner.strategies.layerwise.offload import ChunkedStep
from gnnplan.planner.strategies.program import account as program_memory
from gnnplan.planner.vocabulary.errors import Infeasible, SpecError
from gnnplan.simulator.player import play
from gnnplan.testing import laws

GRAPH = load("synthetic:community?vertices=3000&edges=20000&features=24&classes=5&seed=0")


def problem_of(
    memory: float = 1e9, gpus: int = 1, kind: str = "cuda", known: bool = True, **more: Any
) -> Problem:
    """`memory`: of a device, beside its runtime."""
    device = {"kind": kind, "memory": RUNTIME[kind] + memory, "gemm": 1e12, "launch": 8e-6}
    where = changed(laws.cluster(1, gpus, **device), host=more.pop("host", None))
    asked = {"model": "sage", "layers": 3, "hidden": 16, "dropout": 0.5, **more}
    problem = laws.problem_of(GRAPH, where, **asked)
    return problem if known else replace(problem, graph=None)


def needed(problem: Problem, text: str) -> float:
    """Bytes beside the runtime's."""
    use = parse(text).memory(problem)
    return float(sum(use.values(), -use["runtime"]).max())


def reads(graph: Graph, rows: np.ndarray) -> set[int]:
    """These rows and their neighbours."""
    return set(rows).union(*(graph.indices[graph.indptr[v] : graph.indptr[v + 1]] for v in rows))


def test_bytes_are_those_of_the_rows_that_chunks_read():
    """GraphSAGE: edges in both directions with places (12) and two weights (8), ends of offsets,
    ids of the rows read (8); labels (8) and the places of those trained on (8)."""
    problem, chunks = problem_of(), 4
    chunk, widths, loaded, stored = problem.chunk_of(chunks), (24, 16, 16, 5), 0, 0
    for c in range(chunks):
        rows = np.flatnonzero(chunk == c)
        edges, read = int(GRAPH.degree[rows].sum()), len(reads(GRAPH, rows))
        block = 20 * edges + 4 * (len(rows) + 1 + read + 1) + 8 * read
        for layer in (1, 2, 3):
            loaded += block + 4 * read * widths[layer - 1]
            stored += 4 * len(rows) * widths[layer]
            if layer < 3:
                loaded += block + 4 * read * widths[layer - 1] + 4 * len(rows) * widths[layer]
            if layer > 1:
                stored += 4 * read * widths[layer - 1]
        loaded += 8 * len(rows) + 8 * int(GRAPH.train[rows].sum())
    assert Offload(chunks).moved(problem) == (loaded, stored)


def test_bytes_of_several_ranks_are_those_of_the_rows_that_others_have():
    """Rows of h_1 and h_2 cross for every chunk that reads them: h_1 in a forward pass, once more
    in the backward pass, and as gradients; h_2, before the last layer, twice. What crosses is
    loaded where it is, and its gradient stored there."""
    problem, chunks, ranks = problem_of(gpus=3), 4, 3
    layout = problem.chunked(chunks)
    chunk = layout.owner
    crossing = np.zeros((ranks, ranks), dtype=int)  # from, to
    for c in range(ranks * chunks):
        for rank in chunk[list(reads(layout.graph, np.flatnonzero(chunk == c)))] // chunks:
            crossing[rank, c // chunks] += rank != c // chunks
    ops, row = Offload(chunks).built(problem).step(0), 4 * 16
    for op, direction, layer, rows in (
        ("halo", "f", 2, crossing),
        ("halo_again", "b", 2, crossing),
        ("halo", "b", 2, crossing.T),
        ("halo", "f", 3, crossing),
        ("halo", "b", 3, crossing.T),
    ):
        alike = [o for o in ops if (o.op, o.direction, o.layer) == (op, direction, layer)]
        assert (sum(np.asarray(o.work.nbytes) for o in alike) == row * rows).all()
    predicted = Offload(chunks).predict(problem)
    assert predicted.bytes["halo"] + predicted.bytes["halo_again"] == 5 * row * crossing.sum()
    # a chunk's own loads and stores are those of a chunk of one rank, wherever its rows are
    count = ranks * chunks
    as_one = ChunkedStep(problem_of(), Layout(layout.graph, chunk, (0,) * count, 3, 1))
    several = ChunkedStep(problem, layout)
    for direction, layer in (("f", 2), ("b", 2), ("f", 3)):
        total = sum(float(as_one.part(layer, c).loaded(direction)[0]) for c in range(count))
        assert sum(several.part(layer, c).loaded(direction).sum() for c in range(chunks)) == total


def test_an_estimate_is_near_the_count():
    counted, estimated = (Offload(4).moved(problem_of(known=known)) for known in (True, False))
    assert estimated == pytest.approx(counted, rel=0.3)


def test_an_estimate_for_several_ranks_is_near_the_count():
    """From the halos of as many parts as there are ranks, and chunks."""
    counted = problem_of(gpus=3)
    layouts = {parts: problem_of(gpus=parts).layout() for parts in (3, 12)}
    halos = {parts: layout.facts(2).received_rows.sum() for parts, layout in layouts.items()}
    estimated = replace(counted, graph=None, stats=replace(counted.stats, halo_rows=halos))
    assert Offload(4).moved(estimated) == pytest.approx(Offload(4).moved(counted), rel=0.2)
    told, crossing = (Offload(4).predict(p).bytes["halo"] for p in (estimated, counted))
    assert told == pytest.approx(crossing, rel=0.3)


def seconds(chunks: int, rate: float, **more: Any) -> float:
    host = Link(bandwidth=rate, latency=0.0)
    return float(Offload(chunks).predict(problem_of(host=host, **more)).epoch_s)


def test_copies_of_other_chunks_take_no_time_beside_computation():
    """But a load begins each layer's pass, and a store ends it."""
    copied_s = sum(Offload(8).moved(problem_of())) / 1e8
    computed_s = seconds(8, 1e14)
    slow = seconds(8, 1e8)
    assert copied_s < slow < copied_s + computed_s, "the slower lane is never idle for long"
    assert 0 < slow - copied_s < 0.3 * computed_s
    problem = problem_of().with_cuda_graph(Offload().uses_cuda_graph)
    played = play(Offload(8).schedule(problem, 4), problem.cost, contention=False)
    assert played.epoch_s(1) == pytest.approx(float(Offload(8).predict(problem).epoch_s))


def test_a_plan_uses_it_where_nothing_else_fits():
    problem = problem_of(memory=needed(problem_of(), "graph_parallel(checkpoint=True)") / 2)
    found = search(problem)
    chosen = found.best.strategy
    assert isinstance(chosen, Offload) and chosen.chunks
    assert found.best.memory_bytes <= problem.cluster.device.memory
    fewer = needed(problem, str(Offload(chosen.chunks // 2)))
    assert fewer > problem.cluster.device.memory - RUNTIME["cuda"]
    assert any("in a server's memory" in line for line in explain(found, []))


@pytest.mark.slow
def test_it_takes_all_gpus_that_have_too_little_memory_together_where_they_are_faster(monkeypatch):
    # one GPU has none, and this graph is small
    monkeypatch.setattr(program_memory, "COMMUNICATOR", 0.0)
    least = needed(problem_of(gpus=4), "graph_parallel(checkpoint=True)")
    problem = problem_of(memory=0.9 * least, gpus=4)
    slow = on(problem, intra_node=Link(bandwidth=1e6), host=Link(bandwidth=1e10))
    for asked, ranks in ((problem, 4), (slow, 1)):
        best = search(asked).best
        assert isinstance(best.strategy, Offload) and best.problem.ranks == ranks


def test_few_training_vertices_are_trained_on_few_rows():
    """All rows passed the devices: a cliff of 41 times between 8 and 16 GPUs."""
    whole = problem_of(host=Link(bandwidth=1e8, latency=0.0))
    train = np.arange(GRAPH.stats.vertices) < 30
    graph = replace(whole.graph, train=train, stats=replace(GRAPH.stats, train_vertices=30))
    asked = replace(whole, graph=graph, stats=graph.stats)
    all_rows, few = Offload(4), Offload(4, trim=True)
    assert sum(few.moved(asked)) < 0.5 * sum(all_rows.moved(asked))
    assert few.predict(asked).epoch_s < 0.7 * all_rows.predict(asked).epoch_s
    room = RUNTIME["cuda"] + needed(asked, "graph_parallel(checkpoint=True,trim=True)") / 2
    found = search(on(asked, memory=room)).best
    assert isinstance(found.strategy, Offload) and found.strategy.trim
    assert found.memory_bytes <= room
    # the edges of an evaluation are there too, but not its gradients
    held = [sum(float(use.max()) for use in s.host_memory(asked).values()) for s in (few, all_rows)]
    assert held[1] < held[0] < 2 * held[1]


@pytest.mark.parametrize("gpus", [1, 4])
def test_it_is_no_candidate_where_graph_parallelism_fits(gpus):
    problem = problem_of(gpus=gpus)
    names = {type(c.strategy) for c in search(problem).ranked}
    assert GraphParallel in names and Offload not in names
    assert Offload.absent(problem) == ""


def test_cpu_ranks_have_no_other_memory_unless_the_cluster_says_so():
    """A CPU rank's memory holds what a server's would."""
    least = needed(problem_of(kind="cpu"), "graph_parallel(checkpoint=True)")
    problem = problem_of(memory=least / 2, kind="cpu")
    with pytest.raises(Infeasible, match=r"offload\(chunks=8\) needs 302.07 MB"):
        search(problem, forced=Offload(8))
    assert isinstance(search(on(problem, host_memory=1e9)).best.strategy, Offload)


@pytest.mark.slow
def test_a_servers_memory_has_an_end():
    problem = problem_of(memory=needed(problem_of(), "graph_parallel(checkpoint=True)") / 2)
    with pytest.raises(Infeasible, match=r"offload\(chunks=\d+\) has .* --set host_memory="):
        search(on(problem, host_memory=1e4), forced=Offload())


@pytest.mark.parametrize(("gpus", "chunks", "most"), [(1, 4000, 1024), (4, 400, 256)])
def test_chunks_have_an_end(gpus, chunks, most):
    problem, many = problem_of(gpus=gpus), Offload(chunks)
    with pytest.raises(SpecError, match=rf"\(chunks: {chunks}, ranks: {gpus}\); use chunks={most}"):
        many.settle(problem).check(problem)
