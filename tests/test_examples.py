"""The examples do what their first lines say, each in an empty folder; every benchmark starts; and
tutorials are true: one command after the other does what the page shows.

In a tutorial a block with a title is that file. In a `console` block a line after `$` is run, and
the lines below it are in what it prints; `...` stands for anything. Blocks without a language are
not run."""

import ast
import os
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import pytest
from calls import ended_well
from nightly import NIGHT

from gnnplan.executor.launch import emulation
from gnnplan.planner.vocabulary.errors import SpecError

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


BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
PROGRAMS = sorted(path for path in BENCHMARKS.glob("*.py") if "__main__" in path.read_text("utf-8"))


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_a_benchmark_says_what_it_is_for(path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(path), "--help"])
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        monkeypatch.setenv(name, "1")  # put back: benchmarks set them
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(path), run_name="__main__")
    assert not end.value.code
    assert f"python benchmarks/{path.name}" in capsys.readouterr().out


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_a_benchmark_imports_what_is_there(path):
    """Inside functions, too: the floor imported a name that had gone, and nothing noticed."""
    for found in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(found, ast.ImportFrom) and (found.module or "").startswith("gnnplan"):
            module = import_module(found.module)
            for name in (alias.name for alias in found.names):
                assert hasattr(module, name) or find_spec(f"{found.module}.{name}"), name


def test_all_benchmarks_are_found():
    assert {"measured", "memory", "spine"} <= {path.stem for path in PROGRAMS}


ROOT = Path(__file__).resolve().parents[1]
TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
BLOCK = re.compile(
    r"^(?P<root><!-- needs root -->\n)?```(?P<language>\w+)(?: title=\"(?P<title>[^\"]+)\")?\n"
    r"(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


class Step(NamedTuple):
    """A file to write, or a command and the lines that it prints."""

    title: str
    text: str
    shown: list[str]
    needs_root: bool


def steps(page: str) -> Iterator[Step]:
    for block in BLOCK.finditer(page):
        if block["title"]:
            yield Step(block["title"], block["text"], [], False)
        elif block["language"] == "console":
            assert block["text"].startswith("$ ")
            lines = block["text"].replace("\\\n", " ")
            for command in re.split(r"^\$ ", lines, flags=re.MULTILINE)[1:]:
                line, _, shown = command.partition("\n")
                yield Step("", line, shown.splitlines(), bool(block["root"]))


def words(line: str) -> str:
    """A line without how wide its columns are."""
    return " ".join(line.split())


def is_among(shown: str, printed: list[str]) -> bool:
    pattern = ".*".join(re.escape(part) for part in words(shown).split("..."))
    return any(re.fullmatch(pattern, words(line)) for line in printed)


def can_play_servers() -> bool:
    try:
        emulation.check()
    except SpecError:
        return False
    return True


@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
@pytest.mark.nightly
@pytest.mark.processes
@pytest.mark.timeout(600)
def test_a_tutorial_does_what_it_shows(page, tmp_path):
    pytest.importorskip("torch_geometric")
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environ = os.environ | {"PATH": programs, "GNNPLAN_CACHE": str(tmp_path / "cache")}
    folder = tmp_path / "empty"
    folder.mkdir()
    ran = 0
    for step in steps(page.read_text(encoding="utf-8")):
        if step.title:
            (folder / step.title).write_text(step.text, encoding="utf-8")
        elif not step.needs_root or can_play_servers():
            result = subprocess.run(
                ["bash", "-c", step.text],
                cwd=folder,
                env=environ,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                check=False,
            )
            assert result.returncode == 0, f"{step.text}\n{result.stdout}"
            lines = result.stdout.splitlines()
            for shown in step.shown:
                assert is_among(shown, lines), f"{step.text}\n{shown!r} is not in\n{result.stdout}"
            ran += 1
    assert ran > 2
