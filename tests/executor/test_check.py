"""`gnnplan check`: the verdict on every strategy, before training."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from calls import ended_well
from safetensors.torch import save_file

import gnnplan
from gnnplan.executor.launch import check as checking
from gnnplan.executor.ranks import activity
from gnnplan.planner.gnn.workload import Workload
from gnnplan.planner.graph.load import load
from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.testing.ranks import meeting


def run(*arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = sys.executable, "-m", "gnnplan", "check", *map(str, arguments)
    return ended_well(*command, cwd=cwd, env=os.environ | {"OMP_NUM_THREADS": "1"})


PROVER = """
import sys
from pathlib import Path
from gnnplan.executor.launch import check
from gnnplan.executor.launch.failure import be_rank
{before}
be_rank(Path(sys.argv[1]), check.work)
"""


@pytest.fixture
def prove(fork_server, tmp_path):
    """prove(question, before='') -> the answer of the ranks that compare, or how they failed."""

    def ask(question: dict[str, Any], before: str = "") -> dict[str, Any]:
        (tmp_path / "question.json").write_text(json.dumps(question))
        (tmp_path / "program.py").write_text(PROVER.format(before=before))
        words = [str(tmp_path / "program.py"), str(tmp_path)]
        _store, env = meeting(checking.RANKS)
        records = activity.begin(tmp_path, checking.RANKS)
        ranks = map(str, range(checking.RANKS))
        programs = [(words, env | {"RANK": rank, "LOCAL_RANK": rank}) for rank in ranks]
        codes = [rank.code for rank in fork_server.run(programs, tmp_path, 100)]
        if any(codes):
            return {"codes": codes, "notes": [json.loads(record.note) for record in records]}
        answer: dict[str, Any] = json.loads((tmp_path / "answer.json").read_text())
        return answer

    return ask


def gin(features: int | None = None) -> dict[str, Any]:
    return checking.asked("gin", {"hidden": 8, "layers": 2}, features, None, Path())


OTHER_RATE = """
from dataclasses import replace
train = check.train
def breaks(rank, problem, strategy, *more):
    if rank.world == 2 and strategy.name == "gsplit":
        work = problem.workload.model_copy(update={"lr": 1.0 + 1e-8})
        problem = replace(problem, workload=work)
    return train(rank, problem, strategy, *more)
check.train = breaks
"""


def test_a_strategy_that_cannot_carry_a_model_or_differs_says_so(prove):
    """Ranks of one strategy train with a rate that is a little larger than the one process's."""
    answer = prove(gin(7), OTHER_RATE)
    found = {each["strategy"]: each for each in answer["strategies"]}
    assert found["p3"]["answer"] == "cannot" and found["p3"]["gap"] is None
    assert "no scatter, transform and apply" in found["p3"]["reason"]
    assert [s for s, each in found.items() if each["answer"] == "equal"] == [
        *("graph_parallel", "graph_parallel(narrow=True)", "graph_parallel(checkpoint=True)"),
        *("graph_parallel(trim=True)", "graph_parallel(buckets=2)", "gnnpipe(stages=2,chunks=1)"),
        *("granndis", "feature_parallel", "offload(chunks=3)", "offload(chunks=2)"),
        *("offload(chunks=2,trim=True)", "data_parallel", "dnp"),
    ]
    assert [s for s, each in found.items() if each["answer"] == "differs"] == ["gsplit"]
    assert found["gsplit"]["gap"] == pytest.approx(1e-8, rel=1e-2)
    assert (answer["graph"]["features"], answer["graph"]["classes"]) == (7, 4)


def test_a_rank_that_fails_says_in_which_strategy(prove):
    fails = """
train = check.train
def breaks(rank, problem, strategy, *more):
    if rank.rank == 1 and strategy.name == "granndis":
        raise ValueError("7")
    return train(rank, problem, strategy, *more)
check.train = breaks
"""
    found = prove(gin(), fails)
    assert found["codes"] == [75, 4]  # the other one's failure follows from it
    assert found["notes"][1]["message"] == "ValueError: 7"
    assert [note["activity"].partition(" ")[0] for note in found["notes"]] == ["granndis"] * 2


def live_sage() -> Any:
    sage = pytest.importorskip("torch_geometric.nn", exc_type=ImportError).SAGEConv
    return pytest.importorskip("zoo").Chain(sage(9, 6), sage(6, 3))


def test_a_live_module_is_compared_at_its_own_widths(prove, tmp_path):
    answer = prove(checking.asked(live_sage(), {}, None, None, tmp_path))
    assert (answer["graph"]["features"], answer["graph"]["classes"]) == (9, 3)
    assert {each["answer"] for each in answer["strategies"]} == {"equal", "lossy"}
    with pytest.raises(SpecError, match="forward fails on a small graph of 12 features"):
        checking.asked(live_sage(), {}, 12, None, tmp_path)


@pytest.mark.nightly
@pytest.mark.processes
def test_python_shows_what_the_command_line_prints(tmp_path):
    found = gnnplan.check(live_sage())
    assert found.ok and found.document["model"] == "Chain"
    assert [row["strategy"] for row in found.table] == [e.strategy for _, e in checking.tried()]
    by_kind = gnnplan.check("gcn", layers=2, hidden=8)
    done = run("gcn", "--layers", 2, "--hidden", 8, cwd=tmp_path)
    assert done.stdout.rstrip() == str(by_kind) == repr(by_kind)
    assert "60 vertices and 400 edges" in done.stdout and "2 CPU ranks" in done.stdout
    assert by_kind._repr_html_().count("<tr>") == 1 + len(checking.tried())


@pytest.mark.parametrize(
    ("off", "answer"), [(0.0, "equal"), (1e-11, "equal"), (1e-8, "differs"), (math.nan, "differs")]
)
def test_a_gradient_that_is_off_is_found(tmp_path, off, answer):
    """Also of a tensor whose gradient is a thousandth of the largest; not where it is rounding."""
    graph = load("synthetic:community?vertices=60&edges=400&features=12&classes=4&seed=0")
    name, workload = "graph_parallel", Workload(layers=2, dtype="float64")
    task = checking.posed(name, graph, workload, ranks=2)
    start = {name: torch.zeros(3, dtype=torch.float64) for name in ("large", "small", "idle")}
    alone = {"large": start["large"] + 1, "small": start["small"] + 1e-3, "idle": start["idle"]}
    found = {"large": alone["large"].clone(), "small": alone["small"] * (1 + off)}
    found |= {"idle": alone["idle"] + 1e-16}
    save_file(found, tmp_path / "weights.safetensors")
    verdict = checking._verdict(name, *task, tmp_path, start, alone)
    assert verdict.answer == answer
    assert answer == "equal" or "small" in verdict.reason
