"""What a step allocates on a GPU, counted as torch's allocator would on a device that does not exist
(pretend_device.py), beside what plans say."""

import json
from pathlib import Path

import pytest
from pretend_device import CUDA, Device, pretend_device
from ranks import Case

from gnnplan.executor.ranks.rank import Rank
from gnnplan.executor.train import train

__all__ = ["pretend_device"]

GRAPH = "synthetic:community?vertices=1500&edges=60000&features=64&classes=16&seed=0"
NIGHTLY = pytest.mark.nightly


@pytest.mark.parametrize(
    ("strategy", "model"),
    [
        ("graph_parallel", "sage"),
        ("graph_parallel", "gcn"),
        ("graph_parallel", "gat"),
        ("graph_parallel", "gatv2"),
        pytest.param("graph_parallel", "gin", marks=NIGHTLY),
        pytest.param("graph_parallel", "sgc", marks=NIGHTLY),
        pytest.param("graph_parallel", "gcnii", marks=NIGHTLY),
        pytest.param("graph_parallel", "resgcn", marks=NIGHTLY),
        pytest.param("graph_parallel(narrow=True)", "sage", marks=NIGHTLY),
        pytest.param("graph_parallel(trim=True)", "sage", marks=NIGHTLY),
        ("gnnpipe(chunks=4)", "sage"),
        ("data_parallel", "sage"),
    ],
)
def test_a_plan_says_what_a_gpu_allocates(
    pretend_device: Device, tmp_path: Path, strategy: str, model: str
) -> None:
    batches = {"mode": "mini", "batch": 400, "fanout": (10, 10, 5)}
    layers = 8 if model in ("gcnii", "resgcn") else 3
    workload = {"model": model, "layers": layers, "hidden": 128, "dropout": 0.5, "seed": 3}
    workload |= batches if strategy == "data_parallel" else {}
    case = Case(strategy, GRAPH, workload, epochs=3, device="cuda")
    problem = case.problem(1)
    settled = case.settled(problem)
    train(Rank(0, 1, CUDA, "nccl", streams=True), problem, settled, tmp_path, 3, eval_every=0)
    uses = settled.memory(problem)
    predicted = sum(float(max(of_ranks)) for use, of_ranks in uses.items() if use != "runtime")
    counted = json.loads((tmp_path / "rank0.json").read_text())["peak_bytes"]
    assert predicted == pytest.approx(counted, rel=0.05), pretend_device.at_most.most_common(12)
