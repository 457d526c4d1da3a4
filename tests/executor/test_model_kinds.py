"""Every model that we read or have: planned, trained on two ranks as planned, and its weights used.

A row per model kind. The whole table, in Markdown:

    pytest tests/executor/test_model_kinds.py -m "nightly or not nightly" -s
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from examples import NIGHT
from test_own_layers import EXAMPLE
from test_user_modules import MODULES, asked, libraries, loaded, logits_of, ours, source, theirs

import gnnplan
from gnnplan.executor.modules.read import net_of
from gnnplan.planner.vocabulary.units import show_bytes
from gnnplan.testing.ranks import Case, Ranks

__all__ = ["libraries"]  # a fixture of all tests here

# by day a tenth: memory, which only the table shows, is then mostly Python's own
SIZE = "vertices=20000&edges=160000" if NIGHT else "vertices=2000&edges=16000"
GRAPH = f"synthetic:community?{SIZE}&features=12&classes=4&seed=0"
EPOCHS = 2
KINDS = ("gcn", "sage", "gcnii", "gat", "gatv2", "gin", "resgcn", "sgc")
COLUMNS = (
    *("model", "from", "planned", "bytes per epoch", "predicted"),
    *("memory", "predicted", "logits off by"),
)
# some of every run; the rest by night
OFTEN = {"pyg sage"}


@pytest.fixture(scope="module")
def watched(tmp_path_factory, fork_server):
    """As `run_ranks`, of ranks whose memory is looked at often enough to see its peak: by night."""
    ranks = Ranks(fork_server, tmp_path_factory.mktemp("watched"), memory=NIGHT)
    if NIGHT:
        ranks(2, [Case("graph_parallel", GRAPH, epochs=1)])  # what only a process's first run fills
    yield ranks
    ranks.close()


@pytest.fixture(scope="module")
def table():
    """The rows so far; printed at the end."""
    rows: list[list[str]] = []
    yield rows
    lines = [COLUMNS, ["---"] * 3 + ["--:"] * 5, *rows]
    print("\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines))


def model_of(name: str, tmp_path: Path) -> dict[str, Any]:
    """Fields of a workload that name the model."""
    if name in KINDS:
        return {"model": name, "layers": 3, "hidden": 16, "dropout": 0.25}
    if name == "own layer":
        (tmp_path / "layer.py").write_text(EXAMPLE)
        return {"model": f"{tmp_path / 'layer.py'}:Contrast", "layers": 3, "hidden": 16}
    (tmp_path / "model.py").write_text(source(name, 0.25))
    return {"model": f"{tmp_path / 'model.py'}:M"}


@pytest.mark.processes
@pytest.mark.timeout(90)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in OFTEN else pytest.mark.nightly)
        for name in (*MODULES, *KINDS, "own layer")
    ],
)
def test_a_model_is_planned_trained_as_planned_and_used(name, tmp_path, watched, table):
    cluster = {
        "gpus_per_server": 2,
        "device": {
            "kind": "cpu",
            "memory": "4GB",
            "gemm": "40GFLOP/s",
            "memory_bandwidth": "6GB/s",
        },
        "intra_node": {"bandwidth": "1GB/s"},
    }
    plan = gnnplan.plan(
        GRAPH,
        cluster,
        {"dtype": "float64", "lr": 0.05},
        ranks=2,
        exact=True,
        **model_of(name, tmp_path),
    )
    case = Case(plan.best.strategy, GRAPH, plan.workload.model_dump(), epochs=EPOCHS)
    (result,) = watched(2, [case])
    alone = watched.alone(Case("graph_parallel", GRAPH, case.workload, epochs=EPOCHS))
    assert result.losses == pytest.approx(alone.losses, rel=1e-9)

    plan.write(result.out / "plan.json")
    found = gnnplan.validate(result.out).document
    sent, memory = found["bytes"], found["memory"]
    assert sent["equal"] and found["order"]["equal"]
    assert sum(sent["counted"].values()) > 0

    if name in MODULES:
        graph = loaded(GRAPH)
        user, _ = asked(Path(case.workload["module"]["file"]), graph)
        module, mine = user.module.eval(), ours(case, user, result.weights)
        before = theirs(name, module, graph).detach()
        module.load_state_dict(result.weights)
        with torch.no_grad():
            logits = theirs(name, module, graph)
        assert (logits - before).abs().max() > 0.01  # it has learnt something
        library, _, rest = name.partition(" ")
        of = {"pyg": "PyG", "dgl": "DGL"}[library], rest
        if name == "pyg gcn, batch norm":
            mine = mine.log_softmax(1)
    else:
        problem = case.problem(1)
        nets = [net_of(problem.model, problem.workload) for _ in range(2)]
        for net, run in zip(nets, (result, alone), strict=True):
            net.load_state_dict(run.weights)
        mine, logits = (logits_of(net, problem) for net in nets)
        of = "gnnplan", name
    torch.testing.assert_close(mine, logits, rtol=1e-5, atol=1e-5)
    table.append(
        [
            *reversed(of),
            f"`{plan.best.strategy}`",
            f"{sum(sent['counted'].values()):,}",
            f"{sum(sent['predicted'].values()):,}",
            show_bytes(memory["measured_bytes"]),
            show_bytes(memory["predicted_bytes"]),
            f"{(mine - logits).abs().max().item():.0e}",
        ]
    )
