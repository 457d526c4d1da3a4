"""The folder of temporary files that the launcher gives its processes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gnnplan.executor.launch.launcher import scratch

KILLED = """
import os, signal, tempfile
with tempfile.NamedTemporaryFile() as file:
    print(file.name, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.processes
@pytest.mark.timeout(30)
def test_a_killed_process_leaves_no_temporary_files(tmp_path):
    """torch opens some when it finds its sampler lost, and peers may end the rank just then."""
    with scratch(tmp_path) as folder:
        env = os.environ | {"TMPDIR": str(folder)}
        command = [sys.executable, "-c", KILLED]
        killed = subprocess.run(command, capture_output=True, text=True, env=env)
        left = Path(killed.stdout.strip())
        assert left.exists()
        assert left.parent == (tmp_path / ".scratch").readlink()
    assert not left.parent.exists()
    assert not list(tmp_path.iterdir())
