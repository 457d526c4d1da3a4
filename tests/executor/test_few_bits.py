"""Rows in few bits: bytes, the mean over many draws, and numbers that are no use."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gnnplan.executor.layers.count import Noted, Notes
from gnnplan.executor.layers.kernels import few_bits, pack, unpack
from gnnplan.executor.layers.kernels.hashed_dropout import GOLDEN, mix
from gnnplan.planner.gnn import few_bits as planned

BITS = (8, 4, 2)


def crossed(rows: torch.Tensor, bits: int, *numbers: int) -> torch.Tensor:
    """The rows as they arrive."""
    packed = pack(rows, None, bits, torch.arange(len(rows)), *numbers)
    return unpack(packed, bits, torch.empty_like(rows))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@settings(deadline=None, max_examples=60)
@given(
    st.integers(0, 5),
    st.integers(1, 40),
    st.sampled_from(BITS),
    st.sampled_from([1e-30, 1.0, 1e30]),
    st.sampled_from([0.0, 1.0, -300.0]),
)
def test_no_number_is_off_by_more_than_the_spacing(
    dtype: torch.dtype, count: int, width: int, bits: int, size: float, shift: float
) -> None:
    """Which is the row's range over 2^bits - 1, and what bfloat16 (8 digits) adds to it: of the
    lowest number, and twice of the spacing."""
    rows = (torch.randn(count, width, dtype=dtype) + shift) * size
    packed = pack(rows, None, bits, torch.arange(count), 0)
    assert packed.shape == (count, planned.row_bytes(width, rows.element_size(), bits))
    off = (unpack(packed, bits, torch.empty_like(rows)) - rows).abs()
    if count:
        low, high = rows.amin(1, keepdim=True), rows.amax(1, keepdim=True)
        spacing = (high - low + low.abs() / 128) / (2**bits - 1) * (1 + 2 / 128)
        assert (off <= spacing + 1e-6 * rows.abs() + 1e-37).all()


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("shift", [0.0, -7.3, 100.3])
def test_the_mean_over_draws_is_the_number(bits: int, shift: float) -> None:
    """Over 4,000 draws, of 100 vertices in 40 steps, within five standard errors of it, or of what 20
    draws add, for a number may be so near to a level that no draw leaves it. The lowest and highest
    are no exception: a parameter that is rounded the wrong way would clamp them."""
    rows, draws = torch.randn(6, 33, dtype=torch.float64) + shift, 4000
    vertices = rows.repeat(100, 1)
    arrived = torch.cat([crossed(vertices, bits, step) for step in range(draws // 100)])
    arrived = arrived.view(draws, *rows.shape)
    off, error = (arrived.mean(0) - rows).abs(), arrived.std(0) / draws**0.5
    spacing = (rows.amax(1) - rows.amin(1) + 0.01 * abs(shift)) / (2**bits - 1)
    assert (off <= 5 * error + 20 / draws * spacing[:, None]).all()
    assert (error > 0).float().mean() > 0.9


@pytest.mark.parametrize("bits", BITS)
def test_zeros_and_rows_of_one_number_lose_nothing(bits: int) -> None:
    """Nor do rows of numbers too small for a spacing of their own; zeros behind ReLU stay zeros."""
    rows = torch.randn(50, 20).relu()
    rows[:3] = torch.tensor([0.0, 1.0, -0.375])[:, None]
    arrived = crossed(rows, bits, 1)
    assert (arrived[:3] == rows[:3]).all() and (arrived[rows == 0] == 0).all()
    assert (crossed(torch.full((2, 5), 1e-40), bits, 1) < 1e-37).all()


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_that_has_diverged_says_so(bits: int, bad: float) -> None:
    rows = torch.ones(3, 8)
    rows[1, 4] = bad
    finite = crossed(rows, bits, 0).isfinite().all(1)
    assert finite.tolist() == [True, False, True]


def test_draws_are_the_vertexs_whoever_packs() -> None:
    """In any order, among others, and in parts; another step, layer, way or vertex draws anew."""
    rows = torch.randn(70_000, 9)
    ids = torch.randperm(len(rows))
    whole = pack(rows, None, 2, torch.arange(len(rows)), 5, 2)
    assert (pack(rows, ids, 2, ids, 5, 2) == whole[ids]).all()
    assert len(rows) * 9 > planned.AT_ONCE
    few = ids[:100]
    assert (pack(rows, few, 2, few, 5, 2) == whole[few]).all()
    for vertices, numbers in ((few, (5, 3)), (few, (6, 2)), (few + 1, (5, 2))):
        other = pack(rows, few, 2, vertices, *numbers) == whole[few]
        assert 0.01 < other[:, :-4].float().mean() < 0.5 and other[:, -4:].all()


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_its_work_is_what_torch_counts(bits: int, dtype: torch.dtype) -> None:
    """Bytes that element-wise operations read and write, without the hash and picking rows."""
    width, count = 256, 1000
    rows, ids = torch.randn(count, width, dtype=dtype), torch.arange(count)
    item = rows.element_size()
    noted, hashed = Noted(), Noted()
    with Notes(noted).during("forward"):
        packed = pack(rows, None, bits, ids, 0)
    with Notes(hashed).during("forward"):
        mix(ids[:, None] + torch.arange(1, width // 4 + 1) * GOLDEN)
    ours = planned.pack(count, width, item, bits, picked=False).elementwise_bytes
    counted = noted.forward.elementwise_bytes - hashed.forward.elementwise_bytes
    assert ours == pytest.approx(counted, rel=0.05)
    noted, into = Noted(), torch.empty_like(rows)
    with Notes(noted).during("forward"):
        unpack(packed, bits, into)
    ours = planned.unpack(count, width, item, bits, added=False).elementwise_bytes
    assert ours == pytest.approx(noted.forward.elementwise_bytes, rel=0.05)
    assert few_bits.AT_ONCE == planned.AT_ONCE
