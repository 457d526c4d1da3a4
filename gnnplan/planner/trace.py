"""What happened when, on which rank and lane: spans, and their files in Chrome/Kineto JSON, which Perfetto opens.

The simulator and the executor write the same files under the same labels; validation subtracts them. Chrome's
microseconds are for people: `start_s` and `end_s` in an event's args hold the times exactly.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any, Literal, NamedTuple

from gnnplan.planner.errors import SpecError
from gnnplan.planner.files import make_folder, read_json

LANE_ORDER = ("compute", "comm", "send", "receive", "reduce", "copy", "host")  # top to bottom in the viewer: what matters first
LONGEST = 1e12  # [s]
MAX_TRACE = 1 << 30  # [B]; some million spans
_FILE = re.compile(r"trace\.rank(\d+)\.json")


class Span(NamedTuple):
    """One task as it happened. A collective's or a Recv's span contains its waiting."""

    label: str  # str(Label), as 'halo:f:l2:s5'
    op: str
    rank: int
    lane: str
    start: float  # [s]
    end: float  # [s]
    nbytes: int = 0  # [B] that this rank sent, or loaded
    step: int = 0

    @property
    def seconds(self) -> float:
        return self.end - self.start


# -- files -------------------------------------------------------------------------------------------------------------


def write_traces(directory: str | Path, spans: Iterable[Span], ranks: Iterable[int], world: int,
                 source: Literal["simulated", "measured"], backend: str) -> list[Path]:  # fmt: skip
    """One `trace.rank<r>.json` for each of `ranks`, each written whole or not at all; the paths."""
    directory = Path(directory)
    make_folder(directory)
    by_rank: dict[int, list[Span]] = {rank: [] for rank in ranks}
    for span in spans:
        if span.rank in by_rank:
            by_rank[span.rank].append(span)
    if 0 in by_rank:  # an older run on more ranks must not be read as part of this one
        for rank, path in _files(directory).items():
            if rank >= world:
                path.unlink()
    paths = []
    for rank, own in by_rank.items():
        paths.append(trace_of(directory, rank))
        info = {"backend": backend, "rank": rank, "world_size": world}
        _replace(paths[-1], {"schemaVersion": 1, "displayTimeUnit": "ms", "source": source, "distributedInfo": info,
                             "traceEvents": _events(rank, own, source)})  # fmt: skip
    return paths


def read_traces(directory: str | Path) -> list[Span]:
    """All ranks' spans, rank by rank in the order recorded."""
    files = _files(Path(directory))
    if not files:
        raise SpecError(f"{directory} holds no trace.rank<r>.json; give the folder that `gnnplan simulate` or `gnnplan run` wrote")
    spans: list[Span] = []
    worlds: dict[int, Path] = {}
    for rank, path in sorted(files.items()):
        world, own = read_trace(path, rank)
        worlds.setdefault(world, path)
        spans += own
    if len(worlds) > 1:
        raise SpecError("traces of different runs: " + ", ".join(f"{path} has world_size {world}" for world, path in worlds.items())
                        + "; keep one run per folder")  # fmt: skip
    if (world := next(iter(worlds))) != len(files) or max(files) >= world:
        missing = next(rank for rank in range(len(files) + 1) if rank not in files)
        raise SpecError(f"{directory}: world_size is {world}, but there are {len(files)} traces, and that of rank {missing} is missing; "
                        "record them again")  # fmt: skip
    return spans


def read_trace(path: Path, rank: int) -> tuple[int, list[Span]]:
    """How many ranks there were, and this one's spans in the order recorded."""
    data = _load(path)
    try:
        info = data["distributedInfo"]
        found, world = int(info["rank"]), int(info["world_size"])
        events = [e for e in data["traceEvents"] if e["ph"] == "X"]
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise SpecError(f"{path}: distributedInfo or traceEvents lacks or garbles {error}; record it again") from error
    if found != rank:
        raise SpecError(f"{path}: distributedInfo.rank is {found!r}, the file's name says {rank}; do not rename traces")
    return world, [_span(path, rank, i, event) for i, event in enumerate(events)]


def trace_of(directory: Path, rank: int) -> Path:
    return directory / f"trace.rank{rank}.json"


def _files(directory: Path) -> dict[int, Path]:
    """Rank -> its trace."""
    return {int(match[1]): path for path in directory.glob("trace.rank*.json") if (match := _FILE.fullmatch(path.name))}


def _events(rank: int, spans: list[Span], source: str) -> list[dict[str, Any]]:
    """Names for the process and its threads, then a complete event ('X') per span."""
    lanes = [*LANE_ORDER, *sorted({s.lane for s in spans} - set(LANE_ORDER))]
    thread = {lane: i for i, lane in enumerate(lanes)}
    used = {s.lane for s in spans}
    events = [_name(rank, 0, "process_name", {"name": f"rank {rank} ({source})"})]
    events.append(_name(rank, 0, "process_sort_index", {"sort_index": rank}))
    for lane in lanes:
        if lane in used:
            events.append(_name(rank, thread[lane], "thread_name", {"name": lane}))
            events.append(_name(rank, thread[lane], "thread_sort_index", {"sort_index": thread[lane]}))
    for s in spans:
        args = {"op": s.op, "lane": s.lane, "step": s.step, "bytes": s.nbytes, "start_s": s.start, "end_s": s.end}
        events.append({"ph": "X", "cat": s.op, "name": s.label, "pid": rank, "tid": thread[s.lane],
                       "ts": s.start * 1e6, "dur": s.seconds * 1e6, "args": args})  # fmt: skip
    return events


def _name(rank: int, thread: int, name: str, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": rank, "tid": thread, "ts": 0, "args": args}


def _replace(path: Path, data: dict[str, Any]) -> None:
    """Write beside, then rename: a reader sees the old file or the new one, never half of it."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        beside.write_text(json.dumps(data, allow_nan=False, separators=(",", ":")), encoding="utf-8")
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def _load(path: Path) -> dict[str, Any]:
    data = read_json(path, MAX_TRACE, "record it again")
    if not isinstance(data, dict):
        raise SpecError(f"{path}: a trace is a JSON object with traceEvents, this is a {type(data).__name__}")
    return data


def _span(path: Path, rank: int, index: int, event: dict[str, Any]) -> Span:
    try:
        args = event["args"]
        span = Span(str(event["name"]), str(args["op"]), rank, str(args["lane"]), float(args["start_s"]), float(args["end_s"]),
                    int(args["bytes"]), int(args["step"]))  # fmt: skip
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise SpecError(f"{path}: span {index} of traceEvents lacks or garbles {error}; record it again") from error
    if not -LONGEST < span.start <= span.end < LONGEST:
        raise SpecError(f"{path}: span {index} ({span.label}) runs from {span.start} s to {span.end} s; a span ends after it starts")
    return span


# -- questions -----------------------------------------------------------------------------------------------------------


def recorded_order(spans: Iterable[Span], rank: int, lane: str) -> list[str]:
    """Labels of one lane in the order they started (ties: as recorded).

    >>> recorded_order([Span("b", "b", 0, "compute", 1, 2), Span("a", "a", 0, "compute", 0, 1)], 0, "compute")
    ['a', 'b']
    """
    return [s.label for s in sorted((s for s in spans if (s.rank, s.lane) == (rank, lane)), key=lambda s: (s.start, s.end))]


def transfer_times(spans: Iterable[Span], ops: Collection[str] | None = None) -> dict[str, float]:
    """Label -> duration of the collective itself [s]: its shortest span among ranks, for the last to come does not wait.

    A collective is a label that several ranks recorded and under which bytes moved; `ops` narrows it further. The two
    ends of a message are no collective: they go by labels of their own.

    >>> transfer_times([Span("x", "halo", 0, "comm", 0, 5, 8), Span("x", "halo", 1, "comm", 3, 5, 8), Span("f", "f", 0, "compute", 0, 9)])
    {'x': 2.0}
    """
    groups: dict[str, list[Span]] = {}
    for s in spans:
        if (ops is None or s.op in ops) and s.lane != "copy":  # a load is its rank's own
            groups.setdefault(s.label, []).append(s)
    return {label: float(min(s.seconds for s in group)) for label, group in groups.items()
            if any(s.nbytes for s in group) and len({s.rank for s in group}) > 1}  # fmt: skip


def overlap(spans: Iterable[Span]) -> dict[int, tuple[float, float]]:
    """Rank -> seconds of its transfers that are hidden (it computes meanwhile) and exposed (it does not) [s]. A collective
    counts from when its last rank has come: what is before is waiting.

    >>> overlap([Span("f", "f", 0, "compute", 0, 4), Span("x", "halo", 0, "comm", 3, 6, 8), Span("x", "halo", 1, "comm", 1, 6, 8)])
    {0: (1.0, 2.0), 1: (0.0, 3.0)}
    """
    spans = list(spans)
    alone = transfer_times(spans)
    computing: dict[int, list[tuple[float, float]]] = {}
    moving: dict[int, list[tuple[float, float]]] = {}
    for s in spans:
        if s.lane == "compute":
            computing.setdefault(s.rank, []).append((s.start, s.end))
        elif s.nbytes or s.label in alone:
            moving.setdefault(s.rank, []).append((max(s.start, s.end - alone.get(s.label, s.seconds)), s.end))
    found = {}
    for rank, intervals in moving.items():
        at_work = _merged(computing.get(rank, []))
        total, hidden, first = 0.0, 0.0, 0
        for start, end in _merged(intervals):
            total += end - start
            while first < len(at_work) and at_work[first][1] <= start:
                first += 1
            for a, b in at_work[first:]:
                if a >= end:
                    break
                hidden += min(b, end) - max(a, start)
        found[rank] = (hidden, total - hidden)
    return dict(sorted(found.items()))


def _merged(intervals: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Their union, in order."""
    out: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if out and start <= out[-1][1]:
            out[-1] = out[-1][0], max(out[-1][1], end)
        else:
            out.append((start, end))
    return out
