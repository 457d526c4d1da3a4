"""`gnnplan check`: the verdict on every strategy, before training."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from gnnplan.executor.launch import check as checking

OWN = """
import torch.nn.functional as F
from torch import nn
from dgl.nn import GraphConv

class M(nn.Module):
    def __init__(self, in_feats, out_feats):
        super().__init__()
        self.a, self.b, self.norm = GraphConv(in_feats, 16), GraphConv(16, out_feats), nn.LayerNorm(16)
    def forward(self, g, x):
        return self.b(g, F.dropout(self.norm(self.a(g, x)).relu(), 0.3, self.training))
"""


def run(*arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "gnnplan", "check", *map(str, arguments)],
        cwd=cwd,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
    )


@pytest.mark.processes
@pytest.mark.timeout(110)
def test_a_users_module_has_one_process_gradients_on_every_exact_strategy(tmp_path: Path) -> None:
    pytest.importorskip("dgl", exc_type=ImportError)
    (tmp_path / "model.py").write_text(OWN)
    done = run("model.py:M", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = {each["strategy"]: each for each in json.loads(done.stdout)["strategies"]}
    assert list(found) == [strategy for _, _, strategy in checking.TRIED]
    stale = {"pipegcn", "gnnpipe(stages=2,chunks=3)"}
    for strategy, each in found.items():
        assert each["answer"] == ("lossy" if strategy in stale else "exact"), each
        assert strategy in stale or each["gap"] <= checking.WITHIN


@pytest.mark.nightly
@pytest.mark.processes
@pytest.mark.timeout(110)
def test_a_strategy_that_cannot_carry_a_model_says_what_is_missing(tmp_path: Path) -> None:
    done = run("gin", "--hidden", 8, "--layers", 2, "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = {each["strategy"]: each for each in json.loads(done.stdout)["strategies"]}
    assert found["p3"]["answer"] == "cannot"
    assert "no scatter, transform and apply" in found["p3"]["reason"]
    assert [s for s, each in found.items() if each["answer"] == "exact"] == [
        *("graph_parallel", "graph_parallel(narrow=True)", "graph_parallel(checkpoint=True)"),
        *("granndis", "gnnpipe(stages=2,chunks=1)", "data_parallel", "gsplit"),
    ]


@pytest.mark.processes
@pytest.mark.timeout(60)
def test_a_model_that_is_not_understood_is_bad_input(tmp_path: Path) -> None:
    done = run("absent.py:M", cwd=tmp_path)
    assert done.returncode == 2 and "absent.py: cannot be read" in done.stderr


@pytest.mark.parametrize(("off", "answer"), [(0.0, "exact"), (1e-11, "exact"), (1e-8, "differs")])
def test_a_gradient_that_is_off_is_found(tmp_path: Path, off: float, answer: str) -> None:
    """Also of a tensor whose gradient is a thousandth of the largest; not where it is rounding."""
    task = {
        "graph": "synthetic:community?vertices=60&edges=400&features=12&classes=4&seed=0",
        "servers": 1,
        "strategy": "graph_parallel",
        "workload": {"layers": 2, "dtype": "float64"},
    }
    start = {name: torch.zeros(3, dtype=torch.float64) for name in ("large", "small", "idle")}
    alone = {"large": start["large"] + 1, "small": start["small"] + 1e-3, "idle": start["idle"]}
    found = {
        "large": alone["large"].clone(),
        "small": alone["small"] * (1 + off),
        "idle": alone["idle"] + 1e-16,
    }
    save_file(found, tmp_path / "weights.safetensors")
    verdict = checking._verdict(task, tmp_path, start, alone)
    assert verdict.answer == answer
    assert answer == "exact" or "small" in verdict.reason
