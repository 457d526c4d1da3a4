"""Traces: what is written is what is read, viewers can open it, and a broken file says so."""

import json
import re
from pathlib import Path

import pytest
from calls import call, rewritten
from hypothesis import given, settings
from hypothesis import strategies as st
from nightly import examples, text

from gnnplan.planner.evidence.validate import operation, per_operation
from gnnplan.planner.vocabulary import files, trace
from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.planner.vocabulary.trace import (
    Span,
    merge_traces,
    overlap,
    read_traces,
    transfer_times,
    write_for_hta,
    write_traces,
)

SPANS = [
    Span("forward:f:l0:s0", "forward", 0, "compute", 0.0, 0.1, 0, 0),
    Span("halo:f:l1:s0", "halo", 0, "comm", 0.1, 0.4, 800, 0),
    Span("forward:f:l0:s0", "forward", 1, "compute", 0.0, 0.3, 0, 0),
    Span("halo:f:l1:s0", "halo", 1, "comm", 0.3, 0.4, 400, 0),
    Span("sample:s0", "sample", 1, "dataloader", 0.0, 0.05, 0, 0),
]


def write(directory: Path, spans: list[Span] = SPANS, world: int = 2) -> None:
    write_traces(directory, spans, range(world), world, "measured", "gloo")


@pytest.mark.slow
@settings(max_examples=examples(30))
@given(st.lists(st.tuples(st.floats(-1e9, 1e9), st.floats(0, 1e9), st.integers(0, 2), text(5))))
def test_times_survive_to_the_last_bit(tmp_path_factory, drawn):
    spans = [Span(text, "op", rank, "compute", s, s + length) for s, length, rank, text in drawn]
    directory = tmp_path_factory.mktemp("trace")
    write(directory, spans, world=3)
    assert read_traces(directory) == sorted(spans, key=lambda s: s.rank)


def test_the_file_is_what_perfetto_and_kineto_expect(tmp_path):
    write(tmp_path)
    data = json.loads((tmp_path / "trace.rank1.json").read_text())
    assert data["schemaVersion"] == 1
    assert data["distributedInfo"] == {"backend": "gloo", "rank": 1, "world_size": 2}
    assert data["source"] == "measured"
    events = data["traceEvents"]
    assert {e["ph"] for e in events} == {"M", "X"}
    (process,) = (e for e in events if e["name"] == "process_name")
    assert process["args"]["name"] == "rank 1 (measured)"
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    order = {e["tid"]: e["args"]["sort_index"] for e in events if e["name"] == "thread_sort_index"}
    lanes = [names[tid] for tid in sorted(names, key=order.__getitem__)]
    assert lanes == ["compute", "comm", "dataloader"]
    halo = next(e for e in events if e["name"] == "halo:f:l1:s0")
    assert names[halo["tid"]] == "comm"
    assert halo["pid"] == 1
    assert (halo["ts"], halo["dur"]) == pytest.approx((300_000, 100_000))  # [us]
    assert halo["args"]["bytes"] == 400


def test_each_rank_writes_its_own_file_and_leaves_nothing_of_a_run_on_more(tmp_path):
    write(tmp_path, world=4)
    for rank in (1, 0):
        write_traces(tmp_path, SPANS, [rank], 2, "measured", "gloo")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["trace.rank0.json", "trace.rank1.json"]
    assert read_traces(tmp_path) == SPANS


def test_a_failed_write_keeps_the_old_file(tmp_path):
    write(tmp_path)
    with pytest.raises(ValueError, match="JSON compliant"):
        write(tmp_path, [Span("x", "x", 0, "compute", float("nan"), 1.0)])
    assert read_traces(tmp_path) == SPANS
    assert len(list(tmp_path.iterdir())) == 2  # no litter


def test_a_trace_is_no_longer_than_it_can_be_read(tmp_path, monkeypatch):
    """One of 100 MB was written, and refused when it was read: whole steps are kept that fit."""
    monkeypatch.setattr(trace, "MOST_SPANS", 7)
    spans = [Span(f"x:s{n // 3}", "x", 0, "compute", n, n + 1.0, step=n // 3) for n in range(9)]
    write(tmp_path, spans, world=1)
    assert read_traces(tmp_path) == spans[:6]
    monkeypatch.undo()
    share = 1000 / trace.MOST_SPANS
    label = "backward:c12:l31:s123456"
    write(tmp_path, [Span(label, "backward", 0, "compute", 1 / 3, 2 / 3, 10**9, 123456)] * 1000, 1)
    path = tmp_path / "trace.rank0.json"
    assert path.stat().st_size < share * trace.MAX_TRACE
    monkeypatch.setattr(files, "MOST_MEMORY", share * files.MOST_MEMORY)
    files.must_be_readable(path, path.read_bytes(), "")


def change_event(**fields):
    def change(data):
        next(e for e in data["traceEvents"] if e["ph"] == "X")["args"].update(fields)

    return change


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda d: d.clear(), r"trace\.rank1\.json.*'distributedInfo'"),
        (lambda d: d.pop("traceEvents"), "'traceEvents'"),
        (lambda d: d["distributedInfo"].update(rank=0), "name says 1"),
        (lambda d: d["distributedInfo"].update(world_size="two"), "garbles .*two"),
        (lambda d: d["distributedInfo"].update(world_size=3), "different runs"),
        (lambda d: d["traceEvents"][-1].pop("args"), "garbles 'args'"),
        (change_event(bytes="many"), "garbles .*many"),
        (change_event(end_s=-1.0), "ends after it starts"),
        (change_event(start_s=float("nan")), "NaN is not a number"),
        (change_event(end_s=float("inf")), "Infinity is not a number"),
    ],
)
def test_a_broken_file_names_itself_and_what_is_wrong(tmp_path, change, says):
    write(tmp_path)
    with rewritten(tmp_path / "trace.rank1.json") as trace:
        change(trace)
    with pytest.raises(SpecError, match=says):
        read_traces(tmp_path)


def test_missing_ranks_and_empty_folders_are_errors(tmp_path):
    with pytest.raises(SpecError, match="holds no trace"):
        read_traces(tmp_path)
    write(tmp_path, world=3)
    (tmp_path / "trace.rank1.json").unlink()
    with pytest.raises(SpecError, match=r"world_size is 3.*rank 1 is missing"):
        read_traces(tmp_path)


def test_foreign_events_are_skipped(tmp_path):
    foreign = {"ph": "i", "name": "mark", "ts": 3, "pid": 0, "tid": 0}
    write(tmp_path)
    with rewritten(tmp_path / "trace.rank0.json") as trace:
        trace["traceEvents"].append(foreign)
    assert read_traces(tmp_path) == SPANS


def test_overlap_is_what_moves_beside_computation():
    """Two transfers at once count once; waiting for the last rank is neither hidden nor exposed."""
    spans = [
        Span("f:s0", "f", 0, "compute", 0.0, 2.0),
        Span("f:s1", "f", 0, "compute", 5.0, 6.0),
        Span("halo:s0", "halo", 0, "comm", 1.0, 4.0, 8),
        Span("all_reduce:s0", "all_reduce", 0, "reduce", 3.5, 5.5, 8),
        Span("halo:s0", "halo", 1, "comm", 0.0, 4.0, 8),
        Span("receive:s0", "receive", 1, "receive", 4.0, 9.0),
    ]
    assert overlap(spans) == {0: (1.5, 3.0), 1: (0.0, 3.0)}
    assert overlap(spans[:2]) == {}


def test_the_transfer_is_the_shortest_span_of_its_group():
    # forward moves no bytes: not a collective
    assert transfer_times(SPANS) == pytest.approx({"halo:f:l1:s0": 0.1})
    # who sends nothing may still come last
    spans = [Span("x", "halo", 0, "comm", 0.0, 5.0, 8), Span("x", "halo", 1, "comm", 4.0, 5.0, 0)]
    assert transfer_times(spans) == {"x": 1.0}


@pytest.mark.parametrize("op", ["halo:f:l2", "moments:f:l2", "all_reduce", "ids:l1"])
def test_waiting_for_the_last_rank_is_not_part_of_a_transfer(op):
    """Batch norm's moments are an all-reduce: what a rank waits for the others is not theirs."""
    kind = op.split(":")[0]
    spans = [Span(f"{op}:s0", kind, rank, "comm", 3.0 * rank, 5.0, 8) for rank in (0, 1)]
    assert per_operation(spans, range(1)) == {operation(op): 2.0}


SHOWN = [
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
    write_traces(tmp_path / "run", SHOWN, range(2), 2, "measured", "gloo")
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
