"""Calls of corpus.py obey the law of test_fuzz.py: an answer or a line, in little time and memory."""

import os
import resource
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import corpus
import pytest
from calls import Answer
from test_fuzz import limits

MEMORY = 1e9  # [B] beside what was there


def ended(case: corpus.Case, folder: Path, gnnplan: Any) -> Answer:
    """How the call ended; one that may become a rank is a program of its own."""
    words = [word.replace("{d}", str(folder)) for word in case.arguments]
    if not case.starts:
        with limits():
            return gnnplan(*map(shlex.quote, words))
    program = [sys.executable, "-m", "gnnplan", *map(os.fsencode, words)]
    env = os.environ | case.env
    done = subprocess.run(program, env=env, capture_output=True, timeout=60, errors="replace")
    return Answer(done.returncode, done.stdout, done.stderr)


@pytest.mark.nightly  # by day test_cli.py has bad calls of all verbs, test_fuzz.py what readers are given
@pytest.mark.processes
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", dict.fromkeys(case.kind for case in corpus.cases()))
def test_no_traceback_no_hang_no_gigabyte(kind, tmp_path, monkeypatch, gnnplan):
    cases = [case for case in corpus.cases() if case.kind == kind]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for case in cases:
        folder = tmp_path / "case"
        folder.mkdir()
        monkeypatch.chdir(folder)
        with monkeypatch.context() as patch:
            for name, value in case.env.items():
                patch.setenv(name, value)
            case.make(folder)
            code, out, err = ended(case, folder, gnnplan)
        assert code in case.codes and "Traceback (most recent" not in out + err, (case, err)
        assert not code or not any((folder / name).exists() for name in case.leaves), case
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before * 1024 < MEMORY, (
            case
        )
        shutil.rmtree(folder)
    assert len(cases) > 5
