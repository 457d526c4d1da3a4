"""Sampling from tensors draws what the planner's numpy does."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from asked import on
from hypothesis import given
from hypothesis import strategies as st
from test_launches import on_a_gpu

from gnnplan.executor.minibatch import device_sampling as sampling
from gnnplan.executor.minibatch import sampler
from gnnplan.executor.minibatch.sampler import Sampler, drawing_device
from gnnplan.executor.ranks.rank import Rank
from gnnplan.planner.graph import sampling as planned
from gnnplan.planner.graph.load import load
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies import P3, DataParallel
from gnnplan.planner.strategies.layerwise.step import blocks_bytes
from gnnplan.planner.strategies.minibatch.supply import held_by_sampler
from gnnplan.testing.ranks import Case

GRAPH = load("synthetic:community?vertices=300&edges=5000&features=4&classes=3&seed=0")
WORK = {"model": "sage", "layers": 2, "hidden": 8, "mode": "mini", "batch": 6, "fanout": (3, 2)}


def same(vertices: np.ndarray, fanout: int, key: tuple[int, int, int, int], device: str) -> None:
    word = planned.key_of(*key)
    found = sampling.Lists(GRAPH, torch.device(device)).draw(vertices, fanout, word)
    indptr, places = planned.draw(GRAPH, vertices, fanout, word)
    for ours, theirs in zip(found, (indptr, GRAPH.indices[places]), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@given(
    vertices=st.lists(st.integers(0, 299), max_size=60, unique=True),
    fanout=st.sampled_from([1, 2, 5, 17, 1000, planned.ALL]),
    key=st.tuples(*[st.integers(0, 2**31 - 1)] * 4),
)
def test_tensors_draw_what_arrays_draw(vertices, fanout, key):
    same(np.array(vertices, dtype=np.int64), fanout, key, "cpu")


cuda = pytest.param("cuda", marks=pytest.mark.gpu)


@pytest.mark.parametrize("device", [cuda])
def test_a_gpu_draws_what_a_cpu_draws(device):
    same(np.random.default_rng(0).permutation(300), 7, (1, 2, 3, 4), device)


KINDS = ("mean", "gcn", "one", "loop")
ARRAYS = ("indptr", "indices", "weight", "t_indptr", "t_indices", "t_weight", "order")


@pytest.mark.parametrize("fanout", [(3, 2), (1, 40), "full"])
@pytest.mark.parametrize("directed", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("device", ["cpu", cuda])
def test_a_device_lays_out_the_same_blocks(device, kind, directed, fanout, graphs, monkeypatch):
    """To the bit: rows and edges in the same order, weights, and the transpose."""
    work = WORK | {"fanout": fanout, "batch": 9}
    problem = Case("data_parallel", graphs["rough"], work, directed=directed).problem(1)
    batches = DataParallel().batches(problem)
    here, there = (Sampler(batches, 0, [kind] * 2, device=p) for p in (None, torch.device(device)))
    expected = [here[step].share for step in range(batches.steps)]
    monkeypatch.setattr(sampler, "draw", None)  # the host's
    monkeypatch.setattr(sampler, "weighted_block", None)
    for share, other in zip(expected, (there[step].share for step in range(5)), strict=False):
        np.testing.assert_array_equal(share.own, other.own)
        assert (share.everyone, share.total) == (other.everyone, other.total)
        for part, twin in zip(share.parts, other.parts, strict=True):
            np.testing.assert_array_equal(part.source, twin.source)
            np.testing.assert_array_equal(part.source, twin.vertices.cpu())
            sizes = ("n_dst", "n_src", "own", "edges")
            assert [getattr(part.block, size) for size in sizes] == [
                getattr(twin.block, size) for size in sizes
            ]
            for name in ARRAYS:
                one, other_one = getattr(part.block, name), getattr(twin.block, name)
                assert (one is None) == (other_one is None)
                if one is not None:
                    torch.testing.assert_close(other_one.cpu(), one, rtol=0, atol=0)


def on_gpus(graphs: dict[str, str], asked: str, memory: float) -> Problem:
    problem = Case("data_parallel", graphs["rough"], WORK).problem(1)
    return on(problem, kind="cuda", memory=memory, sampler=asked)


def test_gpus_draw_where_the_cluster_says_so_and_lists_fit(graphs):
    def drawing(kind: str, asked: str, memory: float, **how: Any) -> torch.device | None:
        rank, supply = Rank(0, 1, torch.device(kind), "gloo"), DataParallel().supply
        return drawing_device(rank, replace(supply(on_gpus(graphs, asked, memory)), **how))

    assert drawing("cuda", "device", 1e9) == torch.device("cuda")
    assert (
        drawing("cuda", "host", 1e9)
        is drawing("cpu", "device", 1e9)
        is drawing("cuda", "device", 1e3)
        is None
    )
    ahead = {"prefetch": 1, "pushes": True}
    assert drawing("cuda", "device", 1e9, **ahead) is None, "a fork has no CUDA"


def test_a_sampler_on_the_host_takes_none_of_a_gpu(graphs):
    """Its degrees, places and edges were taken for the GPU's: for ogbn-papers100M 2.2 GB."""
    problem = on_gpus(graphs, "host", 1e9)
    for strategy in (DataParallel(), P3(over="rank")):
        known = strategy.batches(problem).first()
        most = np.max([blocks_bytes(problem, batch) for batch in known], axis=0)
        found = strategy.memory(problem)["graph"]
        assert most <= found <= 1.3 * most, strategy


@pytest.mark.parametrize("model", ["sage", "gcn", "gat"])
@pytest.mark.parametrize("fanout", [(5, 15), (12, 9)])
def test_a_sampler_on_a_gpu_holds_what_is_planned(fanout, model, pretend_device):
    """What torch's own sorts take is not seen here."""
    work = WORK | {"fanout": fanout, "batch": 200, "model": model, "heads": 1}
    source = "synthetic:community?vertices=5000&edges=80000&features=4&classes=3&seed=0"
    problem = on_a_gpu(Case("data_parallel", source, work), "device")
    batches = DataParallel().batches(problem)
    edges = [spec.edges for spec in problem.model.layers]
    there = Sampler(batches, 0, edges, device=torch.device("cuda", 0))
    torch.cuda.reset_peak_memory_stats()
    before = pretend_device.live()
    kept = there[0].share
    seen, planned = pretend_device.most - before, float(held_by_sampler(problem, batches.at(0))[0])
    assert 0.7 * planned <= seen <= 1.1 * planned and kept


@pytest.mark.parametrize(
    ("strategy", "memory", "there"),
    [
        (DataParallel(), 1e9, True),
        (P3(over="rank"), 1e9, True),
        (DataParallel(), 1e3, False),
        (DataParallel(prefetch=1), 1e9, True),  # a thread samples
        (P3(over="rank", prefetch=1), 1e9, False),  # a process
    ],
)
def test_lists_take_memory_of_gpus_that_draw(graphs, strategy, memory, there):
    use = {
        asked: strategy.memory(problem := on_gpus(graphs, asked, memory))["graph"]
        for asked in ("device", "host")
    }
    lists = sum(array.nbytes for array in (problem.graph.indptr, problem.graph.indices))
    assert use["device"] - use["host"] == pytest.approx(lists * there)
