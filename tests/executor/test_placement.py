"""Ranks sit where the plan has put them: launchers count GPUs, everything else is in the plan; and
an epoch lasts until the slowest is through. Run as a script this file is one rank."""

import os
import sys
import time
from dataclasses import replace
from multiprocessing import connection
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from calls import rows_of

from gnnplan.executor.ranks.rank import stay_on_own_cores
from gnnplan.planner.decision import plan
from gnnplan.planner.decision.candidate import evaluate
from gnnplan.planner.decision.search import SearchResult
from gnnplan.testing import runs
from gnnplan.testing.ranks import SECONDS, Case, Ranks, Result, _train, meeting

RANK = """
import os, sys
from pathlib import Path
import torch.distributed as dist
from gnnplan.executor.train import train
from gnnplan.executor.ranks.rank import leave, open_rank
from gnnplan.planner.decision.plan import chosen, question, read
document = read(Path(sys.argv[1]))
job, strategy = question(document), chosen(document)
rank = open_rank(60.0, job)
sys.stdout.write(f"{os.environ['RANK']} {rank.rank} {dist.get_rank()}\\n")
train(rank, job, strategy, Path(sys.argv[2]), 3, 0)
dist.barrier()
rank.close()
leave(0)
"""


def planned(case: Case, world: int, placement: tuple[int, ...], folder: Path) -> tuple[Path, Any]:
    """A plan of the case with its ranks on these GPUs."""
    problem = case.problem(world).placed(placement)
    candidate = evaluate(problem, case.settled(problem))
    plan.write(folder / "plan.json", plan.make(SearchResult(problem, [candidate])))
    out = folder / "out"
    out.mkdir()
    return out, candidate


def must_be_as_planned(result: Result, in_order: Result, candidate: Any) -> None:
    """The losses of ranks in order; every rank left its own bytes, under its own number."""
    assert result.losses == pytest.approx(in_order.losses, rel=1e-9)
    run = runs.FinishedRun(result)
    run.schedule = candidate.strategy.schedule(candidate.problem, 3)
    assert [left["rank"] for left in run.ranks] == [*range(result.world)]
    runs.test_order_of_operations(run)
    runs.test_bytes_of_every_operation(run)


def test_ranks_that_torchrun_starts(run_ranks, fork_server, graphs, tmp_path):
    """Four processes in the order of GPUs, two servers and stages: rank 0 is not process 0."""
    asked = {"model": "gcn", "layers": 4, "hidden": 8, "dtype": "float64"}
    case = Case("gnnpipe(stages=2,chunks=3)", graphs["rough"], asked, 2, epochs=3)
    out, candidate = planned(case, 4, (2, 0, 3, 1), tmp_path)
    _store, where = meeting(4)  # held until they are done
    (tmp_path / "rank.py").write_text(RANK)
    words = [str(tmp_path / "rank.py"), str(tmp_path / "plan.json"), str(out)]
    env = where | {"CUDA_VISIBLE_DEVICES": ""}
    ended = fork_server.run([(words, env | {"RANK": k, "LOCAL_RANK": k}) for k in "0123"], tmp_path)
    assert [rank.code for rank in ended] == [0] * 4, ended
    assert [rank.stdout.strip() for rank in ended] == ["0 1 1", "1 3 3", "2 0 0", "3 2 2"]
    must_be_as_planned(Result(case, 4, out), run_ranks(4, case), candidate)


DELAY = 0.2  # [s] of rank 1 in every step, after all ranks have met


@pytest.mark.timeout(SECONDS)
def test_an_epochs_seconds_are_those_of_the_slowest_rank(tmp_path, graphs, fork_server):
    """Rank 0 waits for rank 1 outside its step: its own seconds are shorter than the delay."""
    _store, where = meeting(2)
    words, env = [__file__, graphs["rough"], str(tmp_path)], where | {"CUDA_VISIBLE_DEVICES": ""}
    ranks = [(words, env | {"RANK": rank, "LOCAL_RANK": rank}) for rank in "01"]
    ended = fork_server.run(ranks, tmp_path, SECONDS - 10)
    assert [rank.code for rank in ended] == [0, 0], ended
    rows = rows_of(tmp_path)
    assert len(rows) == 3 and all(row["epoch_s"] >= DELAY for row in rows)


def main(graph: str, out: str) -> None:
    import torch

    from gnnplan.executor.ranks import learner
    from gnnplan.executor.ranks.rank import open_rank

    torch.set_num_threads(1)
    rank = open_rank(timeout_s=60)
    if rank.rank == 1:
        descend = learner.Optimizer.step

        def step(self: learner.Optimizer) -> None:
            time.sleep(DELAY)
            descend(self)

        learner.Optimizer.step = step  # type: ignore[method-assign]
    _train(rank, Case("pipegcn", graph, {"layers": 2}, epochs=3), Path(out))
    rank.close()


def test_a_failed_case_ends_its_world_only(tmp_path, graphs, fork_server, monkeypatch):
    ranks = Ranks(fork_server, tmp_path)
    try:
        case = Case("graph_parallel", graphs["rough"], {"layers": 2}, epochs=1)
        with pytest.raises(AssertionError, match="needs a layer per stage"):
            ranks(2, Case("gnnpipe(stages=2)", graphs["rough"], {"layers": 1}))
        assert not ranks.worlds[2, False].processes
        ranks(2, case)
        first = ranks.worlds[2, False].processes
        first[1].kill()
        with pytest.raises(AssertionError, match="rank 1 of 2 failed"):
            first[1].join()
            ranks.worlds[2, False].run(case, tmp_path / "killed")
        assert all(process.exitcode is not None for process in first)
        # who was no longer waited for answered the next case, and sixty tests failed behind one
        ranks(2, case)
        with monkeypatch.context() as patch, pytest.raises(TimeoutError):
            patch.setattr(connection, "wait", Mock(side_effect=TimeoutError))
            ranks(2, case)
        assert ranks(2, replace(case, epochs=2)).losses[1:]
    finally:
        ranks.close()
    assert not any(world.processes for world in ranks.worlds.values())


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="only Linux has it")
def test_gloos_threads_wait_for_their_turn(run_ranks, graphs):
    """Gloo's thread displaced those that held its lock: 1 KB among four ranks took 4 ms."""
    run_ranks(2, Case("graph_parallel", graphs["rough"], {"layers": 2}, epochs=1))
    for process in run_ranks.worlds[2, False].processes:
        threads = list(Path(f"/proc/{process.pid}/task").iterdir())
        assert any("gloo" in (thread / "comm").read_text() for thread in threads)
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


if __name__ == "__main__":
    main(*sys.argv[1:])
    os._exit(0)  # at once: Gloo's threads sometimes abort a regular exit
