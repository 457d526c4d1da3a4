"""The cover of a product has all its pairs, and few rows."""

from itertools import combinations, product

from hypothesis import given
from hypothesis import strategies as st
from pairwise import cover, pairs


def named(row: tuple[int, ...]) -> dict[str, int]:
    return {f"column {number}": value for number, value in enumerate(row)}


@given(st.lists(st.integers(1, 4), min_size=2, max_size=4), st.randoms(use_true_random=False))
def test_every_pair_of_any_row_is_in_a_chosen_row(sizes, random):
    rows = [row for row in product(*map(range, sizes)) if random.random() < 0.7]
    chosen = cover(rows, lambda row: pairs(named(row)))
    assert set(chosen) <= set(rows) and chosen == sorted(chosen)
    for a, b in combinations(range(len(sizes)), 2):
        assert {(row[a], row[b]) for row in chosen} == {(row[a], row[b]) for row in rows}

    assert len(chosen) <= 32 < 4**4
