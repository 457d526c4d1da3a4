"""Holistic Trace Analysis opens a run's traces and finds the times that the run recorded.

Its package brings a whole notebook server, so no extra of ours has it; where it is absent these
tests skip. To run them: pip install --no-deps HolisticTraceAnalysis, and pandas, plotly, pydot,
psutil, jsonschema."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from gnnplan.planner.vocabulary.hta import write_for_hta
from gnnplan.planner.vocabulary.trace import Span, read_traces
from gnnplan.testing.ranks import Case, Ranks

pytestmark = [pytest.mark.nightly, pytest.mark.processes]


@pytest.fixture
def hta() -> Iterator[ModuleType]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = pytest.importorskip("hta.trace_analysis", exc_type=ImportError)
        logging.disable(logging.CRITICAL)
        yield module
        logging.disable(logging.NOTSET)


def busy(spans: Iterable[Span], at: np.ndarray) -> np.ndarray:
    """Whether any of the spans runs between each two of the moments."""
    middle = (at[:-1] + at[1:]) / 2
    out = np.zeros(len(middle), bool)
    for span in spans:
        out |= (span.start < middle) & (middle < span.end)
    return out


@pytest.mark.parametrize("strategy", ["pipegcn", "graph_parallel", "gnnpipe(stages=2,chunks=4)"])
def test_hta_finds_what_a_run_recorded(
    hta: ModuleType, run_ranks: Ranks, graphs: dict[str, str], tmp_path: Path, strategy: str
):
    workload = {"model": "sage", "layers": 3, "hidden": 256}
    run = run_ranks(2, [Case(strategy, graphs["rough"], workload)])[0].out
    write_for_hta(run, tmp_path / "hta")
    analysis = hta.TraceAnalysis(trace_dir=str(tmp_path / "hta"), include_last_profiler_step=True)
    found = analysis.get_temporal_breakdown(visualize=False).set_index("rank")
    overlaps = analysis.get_comm_comp_overlap(visualize=False).set_index("rank")
    for rank in range(2):
        spans = [span for span in read_traces(run) if span.rank == rank and span.lane != "host"]
        at = np.unique([moment for span in spans for moment in (span.start, span.end)])
        seconds = np.diff(at)
        computes = busy((span for span in spans if span.lane == "compute"), at)
        moves = busy((span for span in spans if span.lane != "compute"), at)
        ours = {
            "kernel_time": seconds.sum(),
            "compute_time": seconds[computes].sum(),
            "non_compute_time": seconds[moves & ~computes].sum(),
            "idle_time": seconds[~moves & ~computes].sum(),
        }
        for name, expected in ours.items():
            theirs = found.loc[rank, f"{name}(us)"] / 1e6
            assert theirs == pytest.approx(expected, rel=0.01), (name, rank)
        hidden = 100 * seconds[moves & computes].sum() / seconds[moves].sum()
        assert overlaps.loc[rank, "comp_comm_overlap_pctg"] == pytest.approx(hidden, abs=1.0)
