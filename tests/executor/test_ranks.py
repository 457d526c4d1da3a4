"""The harness itself: a rank that fails says why, nothing stays behind, and the next case runs."""

import os
from pathlib import Path

import pytest

from gnnplan.testing.ranks import Case, ForkServer, Ranks


@pytest.mark.timeout(110)
def test_a_failed_case_ends_its_world_only(
    tmp_path: Path, graphs: dict[str, str], fork_server: ForkServer
) -> None:
    ranks = Ranks(fork_server, tmp_path)
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


@pytest.mark.timeout(110)
@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="only Linux has it")
def test_gloos_threads_wait_for_their_turn(run_ranks: Ranks, graphs: dict[str, str]) -> None:
    """Gloo's own thread displaced those that held its lock and span on it: an exchange of 1 KB
    among four ranks on two cores took 4 ms."""
    run_ranks(2, [Case("graph_parallel", graphs["rough"], {"layers": 2}, epochs=1)])
    for process in run_ranks.worlds[2, False].processes:
        threads = list(Path(f"/proc/{process.pid}/task").iterdir())
        assert any((thread / "comm").read_text().startswith("gloo") for thread in threads)
        assert {os.sched_getscheduler(int(thread.name)) for thread in threads} == {os.SCHED_BATCH}
