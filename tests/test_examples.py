"""The examples do what their first lines say, each in an empty folder."""

import os
import runpy
import shutil
import sys
from pathlib import Path

import pytest
from calls import ended_well
from examples import NIGHT

EXAMPLES = {  # and a line that each prints
    "plan": "exact gradients cost",
    "what_if": "inter_node.bandwidth swept",
    "train": "of vertices rightly",
    "validate": "order of operations: as scheduled on every rank and lane",
    "offers": "cheapest: ",
}
FOLDER = Path(__file__).resolve().parents[1] / "examples"


def test_an_example_runs_in_this_process(tmp_path, own_cache, monkeypatch, capsys):
    """What the others call is tested in test_api.py every time."""
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(FOLDER / "plan.py"), run_name="__main__")
    assert EXAMPLES["plan"] in capsys.readouterr().out


@pytest.mark.nightly
@pytest.mark.processes
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs(name, tmp_path):
    if name == "train":
        pytest.importorskip("torch_geometric")
    program = FOLDER / f"{name}.py"
    assert len(program.read_text(encoding="utf-8").splitlines()) < 40
    env = os.environ | {"GNNPLAN_CACHE": str(tmp_path / "cache")}
    assert EXAMPLES[name] in ended_well(sys.executable, program, cwd=tmp_path, env=env).stdout


@pytest.mark.processes
@pytest.mark.timeout(300)
def test_a_package_runs_the_kit_on_its_strategy(tmp_path):
    """`delayed`, installed with its entry point: all tests of the kit; by day some."""
    package, site = FOLDER / "delayed", tmp_path / "site"
    assert len((package / "gnnplan_delayed.py").read_text(encoding="utf-8").splitlines()) <= 80
    copy = shutil.copytree(package, tmp_path / "delayed")  # a build leaves files behind
    install = ["pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--target"]
    path = f"{site}{os.pathsep}{FOLDER.parent}"
    env = os.environ | {"PYTHONPATH": path, "GNNPLAN_CACHE": str(tmp_path / "cache")}
    env["OMP_NUM_THREADS"] = "1"
    options = ["-q", "-p", "no:cacheprovider", "--rootdir", str(copy), "-W", "error"]
    by_day = "(entry_point or words or story or page or recursion) and not bits and not checkpoint"
    options += [] if NIGHT else ["-k", by_day]
    for command in ([*install, str(site), str(copy)], ["pytest", *options, str(copy)]):
        ended_well(sys.executable, "-m", *command, within=280, cwd=copy, env=env)


def test_every_example_is_run():
    assert {path.stem for path in FOLDER.glob("*.py")} == set(EXAMPLES)
