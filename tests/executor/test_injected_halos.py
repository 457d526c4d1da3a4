"""Faults (injected.py) in trainings that exchange halos of the full graph."""

from pathlib import Path

import injected
import pytest
from ranks import Case, Ranks
from started import Start

pytestmark = injected.marks


def test_they_are_fifty() -> None:
    faults = [fault for case in injected.CASES for fault in injected.chain(case)]
    assert len(faults) == len(set(faults)) == 50
    assert {fault.phase for fault in faults} == set(injected.PHASES)


@pytest.mark.parametrize("case", injected.HALOS, ids=lambda case: case.strategy)
def test_a_training_that_is_hit_again_and_again_is_the_unbroken_one(case: Case, run_ranks: Ranks, start: Start, tmp_path: Path) -> None:
    injected.hit_again_and_again(case, run_ranks, start, tmp_path)
