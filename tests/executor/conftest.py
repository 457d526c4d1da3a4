"""Ranks and graphs that tests of the executor share."""

import os
from pathlib import Path

import a_tenth
import pytest
import torch
from nightly import at_night
from pretend_device import pretend_device as pretend_device

from gnnplan.executor.modules import prove
from gnnplan.testing.fixtures import fork_server as fork_server
from gnnplan.testing.fixtures import graphs as graphs
from gnnplan.testing.fixtures import run_ranks as run_ranks

collect_ignore = ["zoo.py", "zoo_dgl.py"]  # files as users have them

# Without a GPU Triton's kernels are interpreted, which is asked for before they are imported.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Tiny tensors: more threads only wait for each other, and for the ranks beside them."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def tests_are_no_files_of_the_users():
    """What a module keeps from call to call is looked for in all files of the user's that are loaded.
    Here these were all tests: their tables took three fifths of the time that a module is read in."""
    tests, is_the_users = str(Path(__file__).parents[1]), prove.is_the_users

    def is_asked(file: str) -> bool:
        return is_the_users(file) and (not file.startswith(tests) or "zoo" in Path(file).name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prove, "is_the_users", is_asked)
        yield


@pytest.fixture(params=["a tenth", at_night("as they are")])
def sizes(request, tmp_path, monkeypatch):
    """Those of the graphs that ranks measure on."""
    if request.param == "as they are":
        return
    a_tenth.shrink(monkeypatch.setattr)
    folder = tmp_path / "a_tenth"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(Path(a_tenth.__file__).read_text())
    path = os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{path}" if path else str(folder))
