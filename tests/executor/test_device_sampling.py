"""Sampling from tensors draws what the planner's numpy does."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gnnplan.executor import sampling
from gnnplan.planner import sampling as planned
from gnnplan.planner.graph import Graph, load

GRAPH = load("synthetic:community?vertices=300&edges=5000&features=4&classes=3&seed=0")
assert isinstance(GRAPH, Graph)


def same(vertices: np.ndarray, fanout: int, key: tuple[int, int, int, int], device: str) -> None:
    indptr = torch.tensor(GRAPH.indptr, device=device)
    found = sampling.draw(indptr, torch.from_numpy(vertices).to(device), fanout, sampling.key_of(*key))
    expected = planned.draw(GRAPH, vertices, fanout, planned.key_of(*key))
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(ours.cpu().numpy(), theirs)


@given(vertices=st.lists(st.integers(0, 299), max_size=60, unique=True), fanout=st.sampled_from([1, 2, 5, 17, 1000, planned.ALL]),
       key=st.tuples(*[st.integers(0, 2**31 - 1)] * 4))  # fmt: skip
def test_tensors_draw_what_arrays_draw(vertices: list[int], fanout: int, key: tuple[int, int, int, int]) -> None:
    same(np.array(vertices, dtype=np.int64), fanout, key, "cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_draws_what_a_cpu_draws() -> None:
    same(np.random.default_rng(0).permutation(300), 7, (1, 2, 3, 4), "cuda")
