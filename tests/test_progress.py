"""People who wait are told what for; others are not."""

import time

import pytest

from gnnplan.planner.vocabulary.progress import progress


def test_slow_work_is_told_and_fast_work_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    with progress(every_s=0.05) as notify:
        notify("reading a large graph")
        time.sleep(0.3)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) >= 2
    assert all(line.startswith("reading a large graph ... ") for line in lines)
    with progress(every_s=30.0) as notify:
        notify("reading a small graph")
    assert capsys.readouterr().err == ""


def test_a_failure_ends_the_telling(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="broken"), progress(every_s=0.02) as notify:
        notify("reading")
        raise ValueError("broken")
    capsys.readouterr()
    time.sleep(0.1)
    assert capsys.readouterr().err == ""
