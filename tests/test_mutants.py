"""The list of mutants stays true while code moves: `make mutants` applies them. And the cover of a
product has all its pairs, and few rows."""

import sys
from itertools import combinations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mutants import ROOT, main, mutants
from nightly import cover, pairs

KIT = "".join(file.read_text(encoding="utf-8") for file in (ROOT / "gnnplan/testing").glob("*.py"))


def test_there_are_forty_spread_over_all_packages():
    faults = mutants()
    assert len(faults) >= 40 and len({each["name"] for each in faults}) == len(faults)
    parts = {each["file"].partition("/")[0] for each in faults}
    assert parts == {"planner", "simulator", "executor", "gnnplan"}


@pytest.mark.parametrize("mutant", mutants(), ids=lambda each: each["name"])
def test_a_mutants_place_is_there_once(mutant):
    text = (ROOT / mutant["file"]).read_text(encoding="utf-8")
    assert text.count(mutant["old"]) == 1, "the code has moved on: write the mutant anew"
    assert mutant["old"] != mutant["new"]
    for test in mutant["tests"]:  # a name, so that a mutant takes seconds
        path, _, name = test.partition("::")
        name = name.partition("[")[0].rpartition(".")[2]
        stands = (ROOT / path).read_text(encoding="utf-8") + KIT  # whose tests ours import
        assert f"def {name}(" in stands or f" as {name}\n" in stands, test


@pytest.mark.parametrize(("word", "code"), [("--help", 0), ("no fault has this name", 2)])
def test_asking_for_help_runs_no_fault(word, code, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["mutants.py", word])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == code


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
