"""What tests of several packages share: real graphs, a cache apart, and which tests run when."""

import gc
import multiprocessing.process
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from calls import Answer, spelt, starting
from hypothesis import settings
from nightly import NIGHT, examples

from gnnplan.cli import main

# Machines are busy, so no test is on time. By day examples are the same everywhere. At night they
# are new ones each time; those that fail are printed as a line to put above the
# test (reproduce_failure), and kept in .hypothesis, from where the next night tries them first.
# By day the same: pytest --hypothesis-profile=explore
settings.register_profile("steady", deadline=None, derandomize=True, max_examples=examples(100))
settings.register_profile("explore", deadline=None, print_blob=True, max_examples=examples(100))
settings.load_profile("explore" if NIGHT else "steady")

# fixtures that start processes
STARTERS = {"start", "started", "run_ranks", "fork_server", "trained", "nvidia_smi"}


@cache
def without_gpu() -> bool:
    import torch  # as tests do that are marked so

    return not torch.cuda.is_available()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test that uses a fixture of STARTERS starts processes, and so does one on a GPU: Triton's
    compiler. Of a test with several cases all but the first of those by day run `again`."""
    begun = set[str]()
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        if "gpu" in marks:
            item.add_marker(pytest.mark.skipif(without_gpu(), reason="needs a CUDA device"))
        if "gpu" in marks or STARTERS.intersection(getattr(item, "fixturenames", ())):
            item.add_marker("processes")
        test = item.nodeid.partition("[")[0]
        if test in begun:
            item.add_marker("again")
        elif "nightly" not in marks:
            begun.add(test)


def pytest_configure() -> None:
    """Of what is imported and collected nothing is garbage."""
    gc.disable()


def pytest_collection_finish() -> None:
    """As in `gnnplan` (cli/__init__.py): the collector took a fifth of the planning tests' time."""
    gc.freeze()
    gc.set_threshold(10_000)
    gc.enable()


@pytest.fixture(autouse=True)
def no_processes(request, monkeypatch):
    """Only tests that are marked so start processes: `make quick` does without them."""
    if request.node.get_closest_marker("processes"):
        return

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("starts a process: mark it with pytest.mark.processes")

    monkeypatch.setattr(subprocess.Popen, "__init__", refuse)
    monkeypatch.setattr(multiprocessing.process.BaseProcess, "start", refuse)


@pytest.fixture
def dataset():
    """dataset('squirrel') -> path of the real graph; skips where it is absent.

    Looks in $GNNPLAN_DATASETS, else in shared/datasets beside the repository or one of its parents.
    """

    def find(name: str) -> str:
        own = os.environ.get("GNNPLAN_DATASETS")
        folders = (
            [Path(own)]
            if own
            else [parent / "shared" / "datasets" for parent in Path(__file__).resolve().parents[1:]]
        )
        for folder in folders:
            if (folder / f"{name}.npz").is_file():
                return str(folder / f"{name}.npz")
        pytest.skip(f"real graph {name}.npz not found; set GNNPLAN_DATASETS to the folder of it")

    return find


@pytest.fixture(scope="session", autouse=True)
def shared_cache(tmp_path_factory):
    """One cache for all tests of a session, other workers' too: METIS cuts a graph once. It is not
    the user's, for what `gnnplan measure` has found of this machine is none of their business, nor
    are its GPUs: 'local' is of two CPU ranks."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GNNPLAN_CACHE", str(folder / "cache"))
        patch.setattr(os, "fsync", lambda _: None)  # no test cuts the power
        if shutil.which("nvidia-smi"):
            without = tmp_path_factory.mktemp("without_gpus")
            (without / "nvidia-smi").write_text("#!/bin/sh\nexit 1\n")
            (without / "nvidia-smi").chmod(0o755)
            patch.setenv("PATH", str(without), prepend=os.pathsep)
        yield


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    """An empty cache, for tests of what is kept there."""
    folder = tmp_path / "own_cache"
    folder.mkdir()
    monkeypatch.setenv("GNNPLAN_CACHE", str(folder))
    return folder


@pytest.fixture
def gnnplan(monkeypatch, capsys):
    """gnnplan("plan --json -o", path, ...) in this process; text is several words, as in a shell."""

    def call(*words: object) -> Answer:
        monkeypatch.setattr(sys, "argv", ["gnnplan", *spelt(words)])
        # or the program's name is that of `python -m pytest`
        monkeypatch.setattr(sys.modules["__main__"], "__package__", None)
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            main()
        return Answer(end.value.code, *capsys.readouterr())

    return call


@pytest.fixture
def start(tmp_path):
    """start(plan, ...) begins a `gnnplan run`; what is left of it after the test fails the test."""
    yield from starting(tmp_path)
