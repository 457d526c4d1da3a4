"""Ranks and graphs that tests of the executor share."""

import os
from pathlib import Path

import a_tenth
import pytest
import torch

from gnnplan.testing.fixtures import fork_server as fork_server
from gnnplan.testing.fixtures import graphs as graphs
from gnnplan.testing.fixtures import run_ranks as run_ranks

collect_ignore = ["zoo.py", "zoo_dgl.py"]  # files as users have them

# Without a GPU Triton's kernels are interpreted, which is asked for before they are imported.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Tiny tensors: more threads only wait for each other, and for the ranks beside them."""
    torch.set_num_threads(1)


@pytest.fixture(params=["a tenth", pytest.param("as they are", marks=pytest.mark.nightly)])
def sizes(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the graphs that ranks measure on."""
    if request.param == "as they are":
        return
    a_tenth.shrink(monkeypatch.setattr)
    folder = tmp_path / "a_tenth"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(Path(a_tenth.__file__).read_text())
    path = os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{path}" if path else str(folder))
