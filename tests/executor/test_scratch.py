"""The folder of temporary files that the launcher gives its processes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gnnplan.executor.launch.scratch import scratch

KILLED = """
import os, signal, tempfile
with tempfile.NamedTemporaryFile() as file:
    print(file.name, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.processes
@pytest.mark.timeout(30)
@pytest.mark.parametrize("before", [None, "/var/tmp"])
def test_a_killed_process_leaves_no_temporary_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str | None
) -> None:
    """torch opens some when it finds its sampler lost, and peers may end the rank just then."""
    if before is None:
        monkeypatch.delenv("TMPDIR", raising=False)
    else:
        monkeypatch.setenv("TMPDIR", before)
    with scratch(tmp_path):
        killed = subprocess.run([sys.executable, "-c", KILLED], capture_output=True, text=True)
        left = Path(killed.stdout.strip())
        assert left.exists()
        assert left.parent == (tmp_path / ".scratch").readlink()
    assert not left.parent.exists()
    assert not list(tmp_path.iterdir())
    assert os.environ.get("TMPDIR") == before
