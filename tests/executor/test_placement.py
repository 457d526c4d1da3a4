"""Ranks sit where the plan has put them: launchers count GPUs, everything else is in the plan."""

from pathlib import Path
from typing import Any

import pytest

from gnnplan.planner.decision import plan
from gnnplan.planner.decision.candidate import evaluate
from gnnplan.planner.decision.search import SearchResult
from gnnplan.testing import runs
from gnnplan.testing.ranks import Case, Result, meeting

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
    ranks = [(words, env | {"RANK": k, "LOCAL_RANK": k}) for k in "0123"]
    ended = fork_server.run(ranks, tmp_path)
    assert [rank.code for rank in ended] == [0] * 4, ended
    assert [rank.stdout.strip() for rank in ended] == ["0 1 1", "1 3 3", "2 0 0", "3 2 2"]
    must_be_as_planned(Result(case, 4, out), run_ranks(4, [case])[0], candidate)
