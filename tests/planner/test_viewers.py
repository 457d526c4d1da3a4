"""Traces as viewers take them: all ranks in one file, and kernels for Holistic Trace Analysis."""

import json
import re

import pytest
from calls import call

from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.planner.vocabulary.trace import Span, merge_traces, write_for_hta, write_traces

SPANS = [
    Span("halo:f:l0:s-1", "halo", 0, "comm", 9.0, 9.5, 80, -1),
    Span("forward:f:l1:s0", "forward", 0, "compute", 10.0, 10.25, 0, 0),
    Span("halo:f:l2:s0", "halo", 0, "comm", 10.1, 10.4, 800, 0),
    Span("load:s1", "load", 0, "copy", 10.4, 10.5, 64, 1),
    Span("sample:s1", "sample", 0, "host", 10.3, 10.4, 0, 1),
    Span("forward:f:l1:s1", "forward", 0, "compute", 10.5, 11.0, 0, 1),
    Span("forward:f:l1:s0", "forward", 1, "compute", 10.0, 10.4, 0, 0),
]


@pytest.fixture
def traces(tmp_path):
    write_traces(tmp_path / "run", SPANS, range(2), 2, "measured", "gloo")
    return tmp_path / "run"


def test_one_file_holds_every_event_of_every_rank(traces, tmp_path):
    with pytest.raises(SpecError, match=r"rank0\.json: is read too, and would be lost"):
        merge_traces(traces, traces / "trace.rank0.json")
    merge_traces(traces, tmp_path / "all.json")
    merged = json.loads((tmp_path / "all.json").read_text())
    ranks = [json.loads((traces / f"trace.rank{rank}.json").read_text()) for rank in range(2)]
    assert merged["traceEvents"] == ranks[0]["traceEvents"] + ranks[1]["traceEvents"]
    assert merged["distributedInfo"] == {"backend": "gloo", "world_size": 2}
    assert {event["pid"] for event in merged["traceEvents"]} == {0, 1}  # a process per rank
    (traces / "trace.rank1.json").unlink()
    with pytest.raises(SpecError, match="rank 1 is missing"):
        merge_traces(traces, tmp_path / "part.json")
    assert not (tmp_path / "part.json").exists()


def test_spans_become_kernels_on_streams(traces, tmp_path):
    first, second = write_for_hta(traces, tmp_path / "hta")
    told = re.search(r'"rank":\s+(\d+)', second.read_text())  # as HTA looks for it
    assert told and told[1] == "1"
    events = json.loads(first.read_text())["traceEvents"]
    on_streams = [e for e in events if "stream" in e["args"]]
    assert [(e["name"], e["cat"], e["ts"], e["dur"]) for e in on_streams] == [
        ("ncclKernel_halo:f:l0", "kernel", 0, 500_000),
        ("forward:f:l1", "kernel", 1_000_000, 250_000),
        ("ncclKernel_halo:f:l2", "kernel", 1_100_000, 300_000),
        ("Memcpy HtoD load", "gpu_memcpy", 1_400_000, 100_000),
        ("forward:f:l1", "kernel", 1_500_000, 500_000),
    ]
    streams = [e["args"]["stream"] for e in on_streams]
    assert streams[0] == streams[2] and streams[1] == streams[4] and len(set(streams)) == 3
    assert min(streams) > 0
    launches = {e["args"]["correlation"]: e for e in events if e["cat"] == "cuda_runtime"}
    for kernel in on_streams:
        assert launches[kernel["args"]["correlation"]]["ts"] == kernel["ts"]
    steps = [(e["name"], e["ts"], e["dur"]) for e in events if e["cat"] == "user_annotation"]
    assert steps == [("ProfilerStep#0", 1_000_000, 300_000), ("ProfilerStep#1", 1_300_000, 700_000)]
    assert [e["name"] for e in events if e["cat"] == "cpu_op"] == ["sample"]


def test_the_verb(traces, tmp_path, capsys):
    call("trace", traces, "-o", tmp_path / "all.json")
    assert "https://ui.perfetto.dev" in capsys.readouterr().out
    call("trace", traces, "--for hta --json -o", tmp_path / "hta")
    assert json.loads(capsys.readouterr().out)["written"] == str(tmp_path / "hta")
    assert {p.name for p in (tmp_path / "hta").iterdir()} == {"rank0.json", "rank1.json"}
    with pytest.raises(SpecError, match="already there"):
        call("trace", traces, "--for hta -o", tmp_path / "hta")
    with pytest.raises(SpecError, match="did you mean hta"):
        call("trace", traces, "--for htta -o", tmp_path / "hta")
