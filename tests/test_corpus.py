"""Calls of tests/corpus.py obey the law: an answer or a line, in little time and memory."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import corpus
import pytest

CORPUS = Path(corpus.__file__)


@pytest.mark.nightly  # by day test_cli.py has bad calls of all verbs, test_fuzz.py what readers are given
@pytest.mark.processes
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", dict.fromkeys(case.kind for case in corpus.cases()))
def test_no_traceback_no_hang_no_gigabyte(kind, tmp_path):
    """A process runs all of them: its forks must not inherit what pytest has in memory."""
    done = subprocess.run(
        [sys.executable, str(CORPUS), kind],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=890,
    )
    assert done.returncode == 0, done.stderr
    ends = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(ends) == len(corpus.picked([kind])) > 5
    assert [end for end in ends if end["why"]] == []


def test_what_falls_is_noticed(tmp_path):
    """The law itself: each way to fall is one."""
    good = corpus.End(2, 0.1, 10**8, "", "error: no")
    assert good.fell == ""
    for spoilt, why in (
        ({"stderr": "Traceback (most recent call last)\n"}, "traceback"),
        ({"seconds": 11.0}, "hang"),
        ({"peak_bytes": 2 * 10**9}, "memory"),
        ({"code": -11}, "ended by signal 11"),
    ):
        assert replace(good, **spoilt).fell == why
