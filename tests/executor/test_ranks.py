"""The harness itself: a rank that fails says why, nothing stays behind, and the next case runs."""

from pathlib import Path

import pytest
from ranks import Case, Ranks


@pytest.mark.timeout(110)
def test_a_failed_case_ends_its_world_only(tmp_path: Path, graphs: dict[str, str]) -> None:
    ranks = Ranks(tmp_path)
    try:
        case = Case("graph_parallel", graphs["rough"], {"layers": 2}, epochs=1)
        with pytest.raises(AssertionError, match="needs a layer per stage"):
            ranks(2, [Case("gnnpipe(stages=2)", graphs["rough"], {"layers": 1})])
        assert not ranks.worlds[2, False].processes
        ranks(2, [case])
        first = ranks.worlds[2, False].processes
        first[1].kill()
        with pytest.raises(AssertionError, match="rank 1 of 2 failed"):
            first[1].wait()
            ranks.worlds[2, False].run(case, tmp_path / "killed")
        assert all(process.poll() is not None for process in first)
    finally:
        ranks.close()
    assert not any(world.processes for world in ranks.worlds.values())
