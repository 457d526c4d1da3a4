"""People who wait are told what for; others are not."""

import io
import sys
import time
from collections.abc import Callable

import pytest

import gnnplan
from gnnplan.executor.measure import measure as measuring
from gnnplan.planner.problem.inputs import read_cluster
from gnnplan.planner.vocabulary.progress import inner_phase, progress, say


def test_a_slow_phase_is_one_line_with_its_seconds_and_a_fast_one_is_none(capsys):
    """'asking what would change the choice: 8 layers ... 4 s' was printed six times."""
    with progress(every_s=0.05) as notify:
        for name in ("graph", "cluster", "workload"):
            notify("reading", name)
            time.sleep(0.03)
        notify("planning")
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(":")[0] for line in lines].count("reading") == 1
    assert all(line.endswith(" s") for line in lines)
    with progress(every_s=30.0) as notify:
        notify("reading")
    assert capsys.readouterr().err == ""


def test_a_part_of_a_phase_is_told_and_timed_apart(capsys):
    """65 of 68 s stood under 'evaluating candidates', and were METIS's."""
    with progress(every_s=0.2) as notify:
        notify("evaluating", "all")
        with inner_phase("partitioning into 8 parts"):
            time.sleep(0.25)
    assert capsys.readouterr().err == "partitioning into 8 parts: 0 s\n"
    with inner_phase("nobody waits"):
        pass


def test_a_terminal_keeps_one_line_that_is_cleared(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    with progress(every_s=0.02) as notify:
        notify("reading", "graph")
        while "graph" not in screen.getvalue():
            time.sleep(0.01)
        before = len(screen.getvalue())
        say("a note")  # it takes the line's place, and stays
        assert "\r\x1b[Ka note\n" in screen.getvalue()[before:]
    told = screen.getvalue()
    assert told.count("\n") == 1 and told.startswith("\r\x1b[Kreading: graph ... 0 s")
    assert told.endswith("\r\x1b[K")


def test_measure_tells_what_it_is_doing_as_other_calls_do(capsys, monkeypatch, tmp_path):
    """`with gnnplan.progress()` said nothing for the minute that `gnnplan.measure` takes."""
    monkeypatch.setenv("GNNPLAN_CACHE", str(tmp_path))

    def of_ranks(ranks: int, notify: Callable[[str], None], *how: object) -> gnnplan.Cluster:
        for what in ("matrix products", "aggregation"):
            notify(what)
        return read_cluster("l4_box")

    monkeypatch.setattr(measuring, "measure", of_ranks)
    with progress(every_s=0.0):
        gnnplan.measure()
    assert capsys.readouterr().err == "matrix products: 0 s\naggregation: 0 s\n"
    heard = list[str]()
    gnnplan.measure(notify=lambda phase, detail="": heard.append(phase))
    assert heard == ["matrix products", "aggregation"]


def test_a_failure_ends_the_telling(capsys):
    with pytest.raises(ValueError, match="broken"), progress(every_s=0.02) as notify:
        notify("reading")
        raise ValueError("broken")
    capsys.readouterr()
    time.sleep(0.1)
    assert capsys.readouterr().err == ""
