"""A training goes on on other ranks, or with another strategy, as if it had begun there."""

import json
import shutil
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from calls import call, planned
from pairwise import at_night
from started import srun

from gnnplan.executor.ranks import checkpoint
from gnnplan.executor.ranks.checkpoint import Checkpoints, handed_over, last_stored
from gnnplan.executor.ranks.learner import ModelPart, Optimizer
from gnnplan.executor.ranks.rank import Rank
from gnnplan.planner.gnn.workload import Workload
from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.testing.ranks import Case, Ranks, Result
from gnnplan.testing.runs import must_go_on_from_another_plan

FULL = {"model": "sage", "layers": 3, "hidden": 6, "dropout": 0.3}
NORMED = {**FULL, "model": "gcn", "norm": "batch"}
MINI = {**FULL, "mode": "mini", "batch": 8, "fanout": (3, 2), "layers": 2}
RATES = {"optimizer": "adamw", "warmup": 5, "schedule": "cosine", "clip": 0.1}
MOMENTUM = {"optimizer": "sgd", "lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}
LAST = 7  # epochs


# strategies and their ranks: of the plan before, and of the one that goes on
CASES = [
    ("graph_parallel", 2, "graph_parallel(narrow=True,buckets=2)", 3, NORMED),
    ("graph_parallel", 2, "graph_parallel", 1, NORMED),
    at_night("graph_parallel", 1, "graph_parallel", 3, NORMED),
    ("graph_parallel", 2, "granndis", 2, {**FULL, "servers": 2}),
    at_night("granndis", 2, "feature_parallel", 3, FULL),
    ("feature_parallel", 3, "gnnpipe(stages=2,chunks=1)", 2, {**FULL, **RATES}),
    ("gnnpipe(stages=2,chunks=1)", 2, "graph_parallel", 3, FULL),
    at_night("gnnpipe(stages=2,chunks=1)", 2, "offload(chunks=3)", 1, FULL),
    at_night("graph_parallel", 2, "gnnpipe(stages=2,chunks=1)", 2, {**FULL, "optimizer": "sgd"}),
    ("data_parallel", 2, "p3", 3, MINI),
    ("p3", 2, "gsplit", 3, {**MINI, **MOMENTUM}),
    at_night("p3", 3, "p3", 2, {**MINI, "model": "gat", "heads": 2}),
    at_night("gsplit", 3, "data_parallel", 2, MINI),
]


def trained(run_ranks: Ranks, world: int, case: Case) -> Result:
    return run_ranks.alone(case) if world == 1 else run_ranks(world, [case])[0]


def losses(run: Result) -> torch.Tensor:
    return torch.tensor([row["loss"] for row in run.metrics], dtype=torch.float64)


@pytest.mark.parametrize(("before", "ranks_before", "after", "ranks", "workload"), CASES)
def test_another_plan_goes_on(before, ranks_before, after, ranks, workload, run_ranks, graphs):
    """Broken off after epoch 5 of 2 and 4. Adam's moments go on too: anew they cost percents."""
    workload = dict(workload)
    case = Case(before, graphs["rough"], workload, workload.pop("servers", 1), epochs=5)
    alone = "data_parallel" if workload.get("mode") == "mini" else "graph_parallel"
    unbroken = run_ranks.alone(replace(case, strategy=alone, epochs=LAST))
    broken = trained(run_ranks, ranks_before, replace(case, checkpoint_every=2))
    onwards = replace(case, strategy=after, epochs=LAST, resume=str(broken.out))
    resumed = trained(run_ranks, ranks, onwards)
    torch.testing.assert_close(losses(resumed), losses(unbroken), rtol=1e-5, atol=0)
    assert [row["epoch"] for row in resumed.metrics] == list(range(1, LAST + 1))
    for rank in range(ranks):
        left = resumed.rank(rank)
        assert [(part["until"], part["ranks"]) for part in left["before"]] == [(4, ranks_before)]
        assert left["epochs"] == LAST - 4


def test_a_trace_begins_with_the_plan(run_ranks, graphs):
    """However many epochs another has trained: spans are kept of the first 60 steps."""
    case = Case("graph_parallel", graphs["rough"], FULL, epochs=62, checkpoint_every=62)
    begun = run_ranks.alone(case)
    onwards = replace(case, strategy="graph_parallel(narrow=True)", epochs=63)
    resumed = run_ranks.alone(replace(onwards, resume=str(begun.out)))
    assert {span.step for span in resumed.spans} == {62}


@pytest.mark.parametrize("after", ["pipegcn", "pipegcn_gf(buckets=2,narrow=True)"])
def test_stale_rows_are_made_of_the_weights_that_go_on(after, run_ranks, graphs):
    must_go_on_from_another_plan(run_ranks, after, 3, graphs["rough"], NORMED)


def test_history_is_made_of_the_weights_that_go_on(run_ranks, graphs):
    """Without dropout the loss of the first epoch after it is exact; initial weights' rows are off."""
    case = Case("graph_parallel", graphs["rough"], {**FULL, "dropout": 0.0}, epochs=4)
    unbroken = run_ranks.alone(replace(case, epochs=5))
    broken = run_ranks(3, [replace(case, checkpoint_every=2)])[0]
    onwards = replace(case, strategy="gnnpipe(stages=2,chunks=4)", epochs=5)
    resumed = run_ranks(2, [replace(onwards, resume=str(broken.out))])[0]
    torch.testing.assert_close(losses(resumed), losses(unbroken), rtol=1e-5, atol=0)


def test_both_plans_go_on_until_the_next_has_checkpoints_of_its_own(run_ranks, graphs, tmp_path):
    """Three ranks died in their first epoch: nothing of the two before them is lost, and both can
    go on. Once the three have two checkpoints, nothing is left of those before."""
    case = Case("graph_parallel", graphs["rough"], FULL, epochs=LAST)
    unbroken, broken = run_ranks(2, [case, replace(case, epochs=5, checkpoint_every=2)])
    died = replace(case, epochs=5, resume=str(broken.out))
    run_ranks(3, [died])
    assert last_stored(broken.out, range(3)) == 4
    again = tmp_path / "again"
    shutil.copytree(broken.out, again)
    back = run_ranks(2, [replace(case, resume=str(again))])[0]
    assert all(torch.equal(back.weights[name], p) for name, p in unbroken.weights.items())
    assert back.rank(0)["before"] == []
    on = run_ranks(3, [replace(died, epochs=LAST, checkpoint_every=1)])[0]
    torch.testing.assert_close(losses(on), losses(unbroken), rtol=1e-5, atol=0)
    kept = {path.name for path in (broken.out / "checkpoints").iterdir()}
    assert kept == {f"epoch{epoch}.rank{r}.safetensors" for epoch in (6, 7) for r in range(3)}
    fewer = replace(case, epochs=9, checkpoint_every=1, resume=str(broken.out))
    parts = run_ranks.alone(fewer).rank(0)["before"]
    assert [(part["until"], part["ranks"]) for part in parts] == [(4, 2), (7, 3)]
    kept = {path.name for path in (broken.out / "checkpoints").iterdir()}
    assert kept == {"epoch8.rank0.safetensors", "epoch9.rank0.safetensors"}


@pytest.mark.nightly
def test_torchrun_ranks_go_on_with_another_plan(tmp_path, fork_server):
    """As srun starts them; the plan before is kept, and its options are inherited."""
    graph = "synthetic:community?vertices=300&edges=2400&features=8&classes=4&seed=0"
    out = tmp_path / "run"

    def run(ranks: int, *arguments: str) -> str:
        how = f"--hidden 8 --ranks {ranks} --strategy graph_parallel"
        plan = planned(tmp_path / f"{ranks}.json", "--graph", graph, how)
        command = ["-m", "gnnplan", "run", str(plan), *arguments]
        ended = fork_server.run([(command, env) for env in srun(ranks, ranks, ranks)], tmp_path)
        assert [process.code for process in ended] == [0] * ranks, ended
        return ended[0].stderr

    run(2, "--out", str(out), "--epochs", "4", "--checkpoint-every", "2", "--eval-every", "3")
    said = run(3, "--resume", str(out), "--epochs", "7")
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["epoch"] for row in rows if row["val_accuracy"] is not None] == [3, 4, 6, 7]
    assert json.loads((out / "plan.until4.json").read_text())["best"]["gpus"] == 2
    assert json.loads((out / "plan.json").read_text())["best"]["gpus"] == 3
    told = "graph_parallel on 2 ranks trained until epoch 4; weights and the optimizer's state"
    assert f"note: {told} go on\n" in said
    with pytest.raises(SpecError, match=r"several plans \(graph_parallel on 2 ranks until epoch 4"):
        call("validate", out)


QUESTION = {"gnnplan": "1", "graph": "abc", "ranks": 2, "strategy": "graph_parallel"}


def saved(out: Path, *ranks: int, **changed: Any) -> None:
    """Checkpoints of epoch 10 of these ranks, which train columns of a weight and all of a bias."""
    question = {**QUESTION, **changed}
    for rank in ranks:
        net = torch.nn.Linear(4, 3)
        net.weight = torch.nn.Parameter(torch.full((3, 2), float(rank)))
        optimizer = Optimizer(net.parameters(), Workload())
        optimizer.kept["mean"][0].fill_(10.0 + rank)
        columns = {"weight": range(2 * rank, 2 * rank + 2)}
        part = ModelPart(dict(net.named_parameters()), columns, optimizer, {})
        process = Rank(rank, 2, torch.device("cpu"), "gloo")
        checkpoints = Checkpoints(out, rank, 10, question)
        notes, whole = {"before": []}, part.first_columns()
        checkpoints.save(process, 10, part.tensors(), notes, (), whole)
        checkpoints.wait()
        process.close()


def test_a_part_that_is_missing_or_damaged_hands_nothing_over(tmp_path):
    ours = {**QUESTION, "ranks": 3}
    saved(tmp_path, 0)
    assert handed_over(tmp_path, ours) == {} and last_stored(tmp_path, range(3)) == 0
    saved(tmp_path, 1)
    assert list(handed_over(tmp_path, ours)) == [10] and last_stored(tmp_path, range(3)) == 10
    saved(tmp_path, 1, strategy="granndis")  # of a third plan
    assert handed_over(tmp_path, ours) == {}
    saved(tmp_path, 1)
    path = tmp_path / "checkpoints" / "epoch10.rank1.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    assert handed_over(tmp_path, ours) == {}


def test_what_is_saved_twice_is_read_once(tmp_path, monkeypatch):
    """Ranks that train the same weights have the same: the first gives them."""
    saved(tmp_path, 0, 1)
    ours = Checkpoints(tmp_path, 0, 10, {**QUESTION, "ranks": 1})
    ours.go_on(10, {**QUESTION})
    read, safe_open = list[str](), checkpoint.safe_open

    def opened(*asked: Any, **how: Any) -> Any:
        file = safe_open(*asked, **how)

        def get_tensor(name: str) -> torch.Tensor:
            read.append(name)
            return file.get_tensor(name)

        return nullcontext(SimpleNamespace(metadata=file.metadata, get_tensor=get_tensor))

    monkeypatch.setattr(checkpoint, "safe_open", opened)
    ours.load_whole(2)
    assert read.count("worker.bias") == read.count("mean.bias") == 1
    assert read.count("worker.weight") == 2
