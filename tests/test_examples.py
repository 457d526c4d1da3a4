"""The examples do what their first lines say, each in an empty folder."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = {  # and a line that each prints
    "plan": "exact gradients cost",
    "what_if": "inter_node.bandwidth swept",
    "train": "of vertices rightly",
    "validate": "order of operations: as scheduled on every rank and lane",
    "offers": "cheapest: ",
}
FOLDER = Path(__file__).resolve().parents[1] / "examples"


@pytest.mark.processes
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs(name: str, tmp_path: Path) -> None:
    if name == "train":
        pytest.importorskip("torch_geometric")
    program = FOLDER / f"{name}.py"
    assert len(program.read_text(encoding="utf-8").splitlines()) < 40
    done = subprocess.run(
        [sys.executable, program],
        cwd=tmp_path,
        env=os.environ | {"GNNPLAN_CACHE": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert EXAMPLES[name] in done.stdout


def test_every_example_is_run() -> None:
    assert {path.stem for path in FOLDER.glob("*.py")} == set(EXAMPLES)
