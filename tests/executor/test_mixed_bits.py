"""Rows of 8, 4 or 2 bits in the bytes of 4: what arrives, and which bits suit which ranges."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from gnnplan.executor.layers.count import Noted, Notes
from gnnplan.executor.layers.kernels import (
    Mix,
    few_bits,
    mix,
    pack,
    pack_mixed,
    unpack,
    unpack_mixed,
)
from gnnplan.executor.layers.kernels.hashed_dropout import GOLDEN
from gnnplan.executor.layers.kernels.mixed_bits import PERIOD, assigned
from gnnplan.planner.gnn import few_bits as planned

RANGES = st.lists(st.floats(0, 1e6), min_size=0, max_size=7)


def variance(ranges: torch.Tensor, bits: torch.Tensor) -> float:
    return float((ranges / (2.0 ** bits.double() - 1)).square().sum())


@settings(max_examples=examples(100))
@given(RANGES, RANGES)
def test_no_bits_in_as_many_bytes_have_less_variance(one: list[float], other: list[float]) -> None:
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


@pytest.mark.parametrize("width", [1, 6, 7, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_row_arrives_as_it_does_among_rows_of_its_bits(width: int, dtype: torch.dtype) -> None:
    rows, ids = torch.randn(50, width, dtype=dtype), torch.randperm(50)[:30]
    bits = torch.tensor([8, 2, 2, 4, 2, 8, 2, 4, 4, 4] * 3, dtype=torch.uint8)
    packed = pack_mixed(rows, ids, Mix(bits, 1), ids, 5, 2)
    assert packed.shape == (30, planned.row_bytes(width, rows.element_size(), planned.ADAPTIVE))
    # a peer's rows end where its bytes do: ten rows alone have the bytes that they have among all
    first = pack_mixed(rows, ids[:10], Mix(bits[:10], 1), ids[:10], 5, 2)
    assert (packed[:10] == first).all()
    arrived = unpack_mixed(packed, Mix(bits, 1), torch.empty(30, width, dtype=dtype))
    for each in planned.BITS:
        alone = unpack(pack(rows, ids, each, ids, 5, 2), each, torch.empty(30, width, dtype=dtype))
        assert (arrived[bits == each] == alone[bits == each]).all()


def test_both_ends_choose_from_what_crossed() -> None:
    """Wide rows rise after the first exchange, and bits stay for ten."""
    rows = torch.ones(12, 8) * torch.linspace(0, 1, 8)
    rows[:2] *= 100
    ids, even = torch.arange(12), Mix.even(12, torch.device("cpu"))
    packed = pack_mixed(rows, None, even, ids, 0)
    chosen = even.after(packed, [6, 6])
    assert chosen.bits.tolist() == [8, 8, 2, 2, 2, 2] + [4] * 6
    again = pack_mixed(rows.flip(0), None, chosen, ids, 1)
    for _ in range(PERIOD - 1):
        chosen = chosen.after(again, [6, 6])
        assert chosen.bits[:6].tolist() == [8, 8, 2, 2, 2, 2]
    assert chosen.after(again, [6, 6]).bits[6:].tolist() == [2, 2, 2, 2, 8, 8]


def test_its_work_is_what_torch_counts() -> None:
    """Bytes that element-wise operations read and write, without the hash and rows' ways to places."""
    width, count = 256, 1000
    rows, ids = torch.randn(count, width), torch.arange(count)
    bits = torch.tensor([8, 2, 2, 4, 4, 4] * 200, dtype=torch.uint8)[:count]
    bits[-4:] = 4
    chosen, noted, hashed, fetched = Mix(bits, 1), Noted(), Noted(), Noted()
    with Notes(noted).during("forward"):
        packed = pack_mixed(rows, None, chosen, ids, 0)
    with Notes(hashed).during("forward"):
        mix(ids[:, None] + torch.arange(1, width // 4 + 1) * GOLDEN)
    ours = planned.pack(count, width, 4, planned.ADAPTIVE, picked=False).elementwise_bytes
    counted = noted.forward.elementwise_bytes - hashed.forward.elementwise_bytes
    into = torch.empty_like(rows)
    with Notes(fetched).during("forward"):
        unpack_mixed(packed, chosen, into)
    also = planned.unpack(count, width, 4, planned.ADAPTIVE, added=False).elementwise_bytes
    picked, arranged = 4 * width * count * planned.PICKED, 4 * width * count * planned.SORTED
    assert ours - picked == pytest.approx(counted, rel=0.05)
    assert also - arranged == pytest.approx(fetched.forward.elementwise_bytes, rel=0.05)
    assert few_bits.AT_ONCE == planned.AT_ONCE
