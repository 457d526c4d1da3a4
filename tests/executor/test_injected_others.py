"""Faults (injected.py) in a pipeline and in training by mini-batches."""

from pathlib import Path

import injected
import pytest
from ranks import Case, Ranks
from started import Start

pytestmark = injected.marks


@pytest.mark.parametrize("case", injected.OTHERS, ids=lambda case: case.strategy)
def test_a_training_that_is_hit_again_and_again_is_the_unbroken_one(case: Case, run_ranks: Ranks, start: Start, tmp_path: Path) -> None:
    injected.hit_again_and_again(case, run_ranks, start, tmp_path)
