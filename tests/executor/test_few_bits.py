"""Rows of 8, 4 or 2 bits in the bytes of 4: bytes, the mean over draws, and which bits suit."""

import math
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gnnplan.executor.layers.count import Noted, Notes
from gnnplan.executor.layers.kernels import MixedWidth, UniformWidth, few_bits
from gnnplan.executor.layers.kernels.few_bits import PERIOD, assigned
from gnnplan.executor.layers.kernels.hashed_dropout import GOLDEN, mix
from gnnplan.planner.gnn import rows as planned
from gnnplan.planner.gnn.rows import ADAPTIVE, Codec

BITS = (8, 4, 2)


def crossed(rows: torch.Tensor, bits: int, *numbers: int) -> torch.Tensor:
    """The rows as they arrive."""
    packed = UniformWidth(bits).pack(rows, None, torch.arange(len(rows)), *numbers)
    return UniformWidth(bits).unpack(packed, torch.empty_like(rows))


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("shift", [0.0, -7.3, 100.3])
def test_the_mean_over_draws_is_the_number(bits, shift):
    """Over 4,000 draws, of 100 vertices in 40 steps, within five standard errors of it, or of what 20
    draws add, for a number may be so near to a level that no draw leaves it. The lowest and highest
    are no exception: a parameter that is rounded the wrong way would clamp them."""
    torch.manual_seed(0)  # else in one run of sixty to the nearest is down, in all six rows
    rows, draws = torch.randn(6, 33, dtype=torch.float64) + shift, 4000
    vertices = rows.repeat(100, 1)
    arrived = torch.cat([crossed(vertices, bits, step) for step in range(draws // 100)])
    arrived = arrived.view(draws, *rows.shape)
    off, error = (arrived.mean(0) - rows).abs(), arrived.std(0) / draws**0.5
    spacing = (rows.amax(1) - rows.amin(1) + 0.01 * abs(shift)) / (2**bits - 1)
    assert (off <= 5 * error + 20 / draws * spacing[:, None]).all()
    assert (error > 0).float().mean() > 0.9


@pytest.mark.parametrize("bits", BITS)
def test_zeros_and_rows_of_one_number_lose_nothing(bits):
    """Nor do rows of numbers too small for a spacing of their own; zeros behind ReLU stay zeros."""
    rows = torch.randn(50, 20).relu()
    rows[:3] = torch.tensor([0.0, 1.0, -0.375])[:, None]
    arrived = crossed(rows, bits, 1)
    assert (arrived[:3] == rows[:3]).all() and (arrived[rows == 0] == 0).all()
    assert (crossed(torch.full((2, 5), 1e-40), bits, 1) < 1e-37).all()


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_that_has_diverged_says_so(bits, bad):
    rows = torch.ones(3, 8)
    rows[1, 4] = bad
    finite = crossed(rows, bits, 0).isfinite().all(1)
    assert finite.tolist() == [True, False, True]


def test_draws_are_the_vertexs_among_many_as_among_few():
    rows = torch.randn(70_000, 9)
    few = torch.randperm(len(rows))[:100]
    assert len(rows) * 9 > planned.AT_ONCE
    whole = UniformWidth(2).pack(rows, None, torch.arange(len(rows)), 5, 2)
    assert (UniformWidth(2).pack(rows, few, few, 5, 2) == whole[few]).all()


OWN = torch.tensor([8, 2, 2, 4, 4, 4] * 166 + [4] * 4, dtype=torch.uint8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("codec", "width_of"),
    [*((Codec(bits), UniformWidth(bits)) for bits in BITS), (Codec(ADAPTIVE), MixedWidth(OWN, 1))],
    ids=str,
)
def test_its_work_is_what_torch_counts(codec, width_of, dtype):
    """Element-wise bytes, without the hash, picking rows, and rows' ways back to their places."""
    width, count = 256, 1000
    rows, ids = torch.randn(count, width, dtype=dtype), torch.arange(count)
    item, packing, hashing, unpacking = rows.element_size(), Noted(), Noted(), Noted()
    with Notes(packing).during("forward"):
        packed = width_of.pack(rows, None, ids, 0)
    with Notes(hashing).during("forward"):
        mix(ids[:, None] + torch.arange(1, width // 4 + 1) * GOLDEN)
    with Notes(unpacking).during("forward"):
        width_of.unpack(packed, torch.empty_like(rows))
    counted = [noted.forward.elementwise_bytes for noted in (packing, hashing, unpacking)]
    (work,) = codec.pack(count, width, item, picked=False)
    assert work.elementwise_bytes == pytest.approx(counted[0] - counted[1], rel=0.05)
    (work,) = codec.unpack(count, width, item, added=False)
    arranged = item * width * count * planned.SORTED * isinstance(width_of, MixedWidth)
    assert work.elementwise_bytes - arranged == pytest.approx(counted[2], rel=0.05)
    assert few_bits.AT_ONCE == planned.AT_ONCE


RANGES = st.lists(st.floats(0, 1e6), min_size=0, max_size=7)


def variance(ranges: torch.Tensor, bits: torch.Tensor) -> float:
    return float((ranges / (2.0 ** bits.double() - 1)).square().sum())


@given(RANGES, RANGES)
def test_no_bits_in_as_many_bytes_have_less_variance(one, other):
    """Among all of a peer's rows, so not 4 for all either; and every peer's rows fill its bytes."""
    ranges = torch.tensor(one + other, dtype=torch.float64)
    bits = assigned(ranges, [len(one), len(other)])
    for of_peer, chosen in zip(
        ranges.split([len(one), len(other)]), bits.split([len(one), len(other)]), strict=True
    ):
        assert int(chosen.long().sum()) == 4 * len(chosen)
        least = min(
            variance(of_peer, torch.tensor(options))
            for options in product(planned.BITS, repeat=len(chosen))
            if sum(options) <= 4 * len(chosen)
        )
        assert variance(of_peer, chosen) <= least * (1 + 1e-9)


def test_both_ends_choose_from_what_crossed():
    """Wide rows rise after the first exchange, and bits stay for ten."""
    rows = torch.ones(12, 8) * torch.linspace(0, 1, 8)
    rows[:2] *= 100
    ids, even = torch.arange(12), MixedWidth.even(12, torch.device("cpu"))
    packed = even.pack(rows, None, ids, 0)
    chosen = even.after(packed, [6, 6])
    assert chosen.bits.tolist() == [8, 8, 2, 2, 2, 2] + [4] * 6
    again = chosen.pack(rows.flip(0), None, ids, 1)
    for _ in range(PERIOD - 1):
        chosen = chosen.after(again, [6, 6])
        assert chosen.bits[:6].tolist() == [8, 8, 2, 2, 2, 2]
    assert chosen.after(again, [6, 6]).bits[6:].tolist() == [2, 2, 2, 2, 8, 8]
