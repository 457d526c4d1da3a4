"""Every benchmark starts: it imports what is there, and says what it is for."""

import ast
import runpy
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks"
PROGRAMS = sorted(path for path in FOLDER.glob("*.py") if "__main__" in path.read_text("utf-8"))


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_a_benchmark_says_what_it_is_for(path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(path), "--help"])
    monkeypatch.syspath_prepend(str(FOLDER))
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
