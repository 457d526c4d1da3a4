"""Every call of tests/corpus.py obeys the law: an answer or a line, in little time and memory."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import corpus
import pytest

CORPUS = Path(corpus.__file__)
PROMPT = ("nccl-tests", "topology", "devices and pipes", "YAML", "names", "plan.json", "terminals")


def parts() -> list[object]:
    """A kind each, in which all calls are run by one process."""
    kinds = dict.fromkeys(case.kind for case in corpus.cases())
    return [
        pytest.param(kind, marks=[] if kind in PROMPT else pytest.mark.nightly) for kind in kinds
    ]


@pytest.mark.processes
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", parts())
def test_no_traceback_no_hang_no_gigabyte(kind, tmp_path):
    """A process runs all of a kind: forks of it must not inherit what pytest has in memory."""
    done = subprocess.run(
        [sys.executable, str(CORPUS), "--json", kind],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=890,
    )
    assert done.returncode == 0, done.stderr
    ends = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(ends) == len([case for case in corpus.cases() if case.kind == kind])
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
