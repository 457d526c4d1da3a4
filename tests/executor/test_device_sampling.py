"""Sampling from tensors draws what the planner's numpy does."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gnnplan.executor.minibatch import device_sampling as sampling
from gnnplan.executor.minibatch import sampler
from gnnplan.executor.minibatch.sampler import Sampler, drawing_device
from gnnplan.executor.ranks.rank import Rank
from gnnplan.planner.graph import sampling as planned
from gnnplan.planner.graph.graph import Graph
from gnnplan.planner.graph.load import load
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies import P3, DataParallel, Strategy
from gnnplan.testing.ranks import Case

GRAPH = load("synthetic:community?vertices=300&edges=5000&features=4&classes=3&seed=0")
assert isinstance(GRAPH, Graph)
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
def test_tensors_draw_what_arrays_draw(
    vertices: list[int], fanout: int, key: tuple[int, int, int, int]
) -> None:
    same(np.array(vertices, dtype=np.int64), fanout, key, "cpu")


cuda = pytest.param(
    "cuda",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    ],
)


@pytest.mark.parametrize("device", [cuda])
def test_a_gpu_draws_what_a_cpu_draws(device: str) -> None:
    same(np.random.default_rng(0).permutation(300), 7, (1, 2, 3, 4), device)


@pytest.mark.parametrize("device", ["cpu", cuda])
def test_a_sampler_that_draws_there_makes_the_same_shares(
    device: str, graphs: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = Case("data_parallel", graphs["rough"], WORK).problem(1)
    here, there = (
        Sampler(DataParallel().batches(problem), 0, ["mean", "gcn"], device=place)
        for place in (None, torch.device(device))
    )
    expected = [here[step].share for step in range(5)]
    monkeypatch.setattr(sampler, "draw", None)  # the host's
    for share, other in zip(expected, (there[step].share for step in range(5)), strict=True):
        np.testing.assert_array_equal(share.own, other.own)
        for part, twin in zip(share.parts, other.parts, strict=True):
            np.testing.assert_array_equal(part.source, twin.source)
            for name in ("indptr", "indices", "weight"):
                torch.testing.assert_close(
                    getattr(part.block, name), getattr(twin.block, name), rtol=0, atol=0
                )


def on_gpus(graphs: dict[str, str], asked: str, memory: float) -> Problem:
    problem = Case("data_parallel", graphs["rough"], WORK).problem(1)
    device = problem.cluster.device.model_copy(update={"kind": "cuda", "memory": memory})
    return replace(
        problem, cluster=problem.cluster.model_copy(update={"sampler": asked, "device": device})
    )


def test_gpus_draw_where_the_cluster_says_so_and_lists_fit(graphs: dict[str, str]) -> None:
    def drawing(kind: str, asked: str, memory: float, prefetch: int = 0) -> torch.device | None:
        return drawing_device(
            Rank(0, 1, torch.device(kind), "gloo"),
            on_gpus(graphs, asked, memory),
            prefetch,
            None,
            None,
        )

    assert drawing("cuda", "device", 1e9) == torch.device("cuda")
    assert (
        drawing("cuda", "host", 1e9)
        is drawing("cpu", "device", 1e9)
        is drawing("cuda", "device", 1e3)
        is None
    )
    assert drawing("cuda", "device", 1e9, prefetch=1) is None, "a fork has no CUDA"


@pytest.mark.parametrize(
    ("strategy", "memory", "there"),
    [
        (DataParallel(), 1e9, True),
        (P3(over="rank"), 1e9, True),
        (DataParallel(), 1e3, False),
        (DataParallel(prefetch=1), 1e9, False),
    ],
)
def test_lists_take_memory_of_gpus_that_draw(
    graphs: dict[str, str], strategy: Strategy, memory: float, there: bool
) -> None:
    use = {
        asked: strategy.memory(problem := on_gpus(graphs, asked, memory))["graph"]
        for asked in ("device", "host")
    }
    lists = sum(array.nbytes for array in (problem.graph.indptr, problem.graph.indices))
    assert use["device"] - use["host"] == pytest.approx(lists * there)
