"""Calls of tests/corpus.py obey the law: an answer or a line, in little time and memory."""

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
    """By day of each of the PROMPT kinds every 300th call; at night a kind each, all of its calls."""
    kinds = dict.fromkeys(case.kind for case in corpus.cases())
    by_night = [pytest.param([kind], 1, id=kind, marks=pytest.mark.nightly) for kind in kinds]
    return [pytest.param(PROMPT, 300, id="every 300th"), *by_night]


@pytest.mark.processes
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("kinds", "every"), parts())
def test_no_traceback_no_hang_no_gigabyte(kinds, every, tmp_path):
    """A process runs all of them: its forks must not inherit what pytest has in memory."""
    done = subprocess.run(
        [sys.executable, str(CORPUS), "--json", "--every", str(every), *kinds],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=890,
    )
    assert done.returncode == 0, done.stderr
    ends = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(ends) == len(corpus.picked(kinds, every)) > 5
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
