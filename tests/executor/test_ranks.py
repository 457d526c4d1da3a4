"""The harness itself: a rank that fails says why, nothing stays behind, and the next case runs."""

import os
from dataclasses import replace
from multiprocessing import connection
from pathlib import Path
from unittest.mock import Mock

import pytest

from gnnplan.executor.ranks.rank import stay_on_own_cores
from gnnplan.testing.ranks import Case, Ranks


def test_a_failed_case_ends_its_world_only(tmp_path, graphs, fork_server, monkeypatch):
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
            first[1].join()
            ranks.worlds[2, False].run(case, tmp_path / "killed")
        assert all(process.exitcode is not None for process in first)
        # who was no longer waited for answered the next case, and sixty tests failed behind one
        ranks(2, [case])
        with monkeypatch.context() as patch, pytest.raises(TimeoutError):
            patch.setattr(connection, "wait", Mock(side_effect=TimeoutError))
            ranks(2, [case])
        assert ranks(2, [replace(case, epochs=2)])[0].losses[1:]
    finally:
        ranks.close()
    assert not any(world.processes for world in ranks.worlds.values())


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="only Linux has it")
def test_gloos_threads_wait_for_their_turn(run_ranks, graphs):
    """Gloo's thread displaced those that held its lock: 1 KB among four ranks took 4 ms."""
    run_ranks(2, [Case("graph_parallel", graphs["rough"], {"layers": 2}, epochs=1)])
    for process in run_ranks.worlds[2, False].processes:
        threads = list(Path(f"/proc/{process.pid}/task").iterdir())
        assert any((thread / "comm").read_text().startswith("gloo") for thread in threads)
        assert {os.sched_getscheduler(int(thread.name)) for thread in threads} == {os.SCHED_BATCH}


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs Linux")
@pytest.mark.parametrize("launcher", ["TORCHELASTIC_RUN_ID", "SLURM_JOB_ID"])
def test_ranks_of_torchs_agent_stay_on_cores_of_their_own(launcher):
    """The kernel put both of two ranks on one core, and a step of 7.7 ms took 9.3."""
    cores = os.sched_getaffinity(0)

    def of_rank(rank: int, ranks: int) -> set[int]:
        env = {launcher: "1", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks)}
        try:
            stay_on_own_cores(env)
            return os.sched_getaffinity(0)
        finally:
            os.sched_setaffinity(0, cores)

    shares = [of_rank(rank, len(cores)) for rank in range(len(cores))]
    if launcher == "TORCHELASTIC_RUN_ID":
        assert set().union(*shares) == cores and {len(share) for share in shares} == {1}
    else:  # srun may have given each rank its own
        assert shares == [cores] * len(cores)
    fewer = max(len(cores) - 1, 1)  # one of them has two
    assert set().union(*(of_rank(rank, fewer) for rank in range(fewer))) == cores
    assert of_rank(0, 1) == of_rank(len(cores), len(cores) + 1) == cores
