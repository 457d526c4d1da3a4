"""Traces: spans (a task with its start and end), and their files.

The files are Chrome/Kineto JSON, which Perfetto opens. The simulator and the executor write files
of the same format and with the same labels, and validation compares them. An event's `ts` and `dur`
[us] are for viewers; `start_s` and `end_s` in its args are the exact times [s]."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from typing import Literal, NamedTuple

from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.planner.vocabulary.files import (
    Json,
    make_folder,
    numbered,
    read_json,
    write_atomically,
)
from gnnplan.planner.vocabulary.numbers import grouped

# the concurrent lanes of a rank, from top to bottom in a viewer
LANES = ("compute", "comm", "send", "receive", "reduce", "copy", "host")
BELOW = len(LANES), 0  # position of unknown lanes in a viewer (place_of)
LONGEST = 1e12  # latest time in a trace [s]
MOST_SPANS = 250_000  # spans in a rank's file, so that reading it fits into memory (files.py)
MAX_TRACE = 2**27  # size of a rank's file [B]; MOST_SPANS spans take less
_FILE = re.compile(r"trace\.rank(\d+)\.json")


class Span(NamedTuple):
    """One task as it ran. The span of a collective, or of a Recv, includes waiting for peers."""

    label: str  # str(Label), as 'halo:f:l2:s5'
    op: str
    rank: int
    lane: str
    start: float  # [s]
    end: float  # [s]
    nbytes: int = 0  # bytes that this rank sent, or loaded [B]
    step: int = 0

    @property
    def seconds(self) -> float:
        """The duration, including waiting [s]."""
        return self.end - self.start


def sampler_lane(step: int, samplers: int) -> str:
    """Return the lane of a step's sampling, if `samplers` samplers of a rank take turns.

    >>> [sampler_lane(step, samplers=2) for step in range(3)]
    ['host', 'host 2', 'host']
    """
    turn = step % samplers
    return f"host {turn + 1}" if turn else "host"


def place_of(lane: str) -> tuple[int, int]:
    """Return a lane's sort key from top to bottom in a viewer: index in LANES, sampler number."""
    name, _, number = lane.partition(" ")
    known = name in LANES and (number.isdecimal() or not number)
    return (LANES.index(name), int(number or 0)) if known else BELOW


# -- files


def write_traces(
    directory: str | Path,
    spans: Iterable[Span],
    ranks: Collection[int],
    world: int,
    source: Literal["simulated", "measured"],
    backend: str,
) -> None:
    """Write a file `trace.rank<r>.json` for each of `ranks`.

    A file is written completely or not at all. It has the first whole steps, up to MOST_SPANS
    spans. world: the number of ranks of the run. Raises SpecError if a file cannot be written.
    """
    directory = Path(directory)
    make_folder(directory)
    by_rank = grouped(spans, attrgetter("rank"))
    if 0 in ranks:  # remove traces of an earlier run on more ranks
        for rank, path in numbered(directory, _FILE).items():
            if rank >= world:
                path.unlink()
    for rank in ranks:
        document = {
            "schemaVersion": 1,
            "displayTimeUnit": "ms",
            "source": source,
            "distributedInfo": {"backend": backend, "rank": rank, "world_size": world},
            "traceEvents": _events(rank, _first_steps(by_rank.get(rank, [])), source),
        }
        text = json.dumps(document, allow_nan=False, separators=(",", ":"))
        write_atomically(trace_of(directory, rank), text, at_once=True)


def read_traces(directory: str | Path) -> list[Span]:
    """Read all spans of a folder's traces, rank by rank in the order recorded.

    Raises SpecError if the folder does not hold the traces of exactly one run.
    """
    files = numbered(Path(directory), _FILE)
    if not files:
        raise SpecError(
            f"{directory} holds no trace.rank<r>.json; give the folder that `gnnplan simulate` or"
            " `gnnplan run` wrote"
        )
    spans: list[Span] = []
    worlds: dict[int, Path] = {}
    for rank, path in files.items():
        world, own = read_trace(path, rank)
        worlds.setdefault(world, path)
        spans += own
    if len(worlds) > 1:
        raise SpecError(
            "traces of different runs: "
            + ", ".join(f"{path} has world_size {world}" for world, path in worlds.items())
            + "; keep one run per folder"
        )
    if (world := next(iter(worlds))) != len(files) or max(files) >= world:
        missing = next(rank for rank in range(len(files) + 1) if rank not in files)
        raise SpecError(
            f"{directory}: world_size is {world}, but there are {len(files)} traces, and that of"
            f" rank {missing} is missing; record them again"
        )
    return spans


def read_trace(path: Path, rank: int) -> tuple[int, list[Span]]:
    """Read a rank's trace: the number of ranks of the run, and the spans in the order recorded.

    Raises SpecError if the file is not the trace of this rank.
    """
    data = read_json(path, MAX_TRACE, "record it again")
    if not isinstance(data, dict):
        raise SpecError(
            f"{path}: a trace is a JSON object with traceEvents, this is a {type(data).__name__}"
        )
    try:
        info = data["distributedInfo"]
        found, world = int(info["rank"]), int(info["world_size"])
        spans = [_span(rank, event) for event in data["traceEvents"] if event["ph"] == "X"]
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise SpecError(
            f"{path}: distributedInfo or traceEvents lacks or garbles {error}; record it again"
        ) from error
    if found != rank:
        raise SpecError(
            f"{path}: distributedInfo.rank is {found!r}, the file's name says {rank}; do not rename"
            " traces"
        )
    for span in spans:
        if not -LONGEST < span.start <= span.end < LONGEST:
            raise SpecError(
                f"{path}: {span.label} runs from {span.start} s to {span.end} s; a span ends after"
                " it starts"
            )
    return world, spans


def merge_traces(directory: str | Path, path: str | Path) -> None:
    """Write one file with the events of all ranks of a folder; each rank is a process in a viewer.

    Raises SpecError if the folder does not hold the traces of exactly one run, or `path` is one.
    """
    read_traces(directory)
    files = numbered(Path(directory), _FILE).values()
    if Path(path).resolve() in [file.resolve() for file in files]:
        raise SpecError(f"{path}: is read too, and would be lost; give another name")
    documents = [json.loads(file.read_bytes()) for file in files]
    first = documents[0]
    merged = {
        **first,
        "distributedInfo": {
            name: value for name, value in first["distributedInfo"].items() if name != "rank"
        },
        "traceEvents": [event for document in documents for event in document["traceEvents"]],
    }
    write_atomically(path, json.dumps(merged, allow_nan=False, separators=(",", ":")))


def trace_of(directory: Path, rank: int) -> Path:
    """Return the path of a rank's trace."""
    return directory / f"trace.rank{rank}.json"


def _first_steps(spans: list[Span]) -> list[Span]:
    """Return the spans of the first whole steps that have at most MOST_SPANS spans together."""
    counts, total = Counter(span.step for span in spans), 0
    for step in sorted(counts):
        total += counts[step]
        if total > MOST_SPANS:
            return [span for span in spans if span.step < step]
    return spans


def _events(rank: int, spans: list[Span], source: str) -> list[Json]:
    """Return metadata events that name process and threads, then a complete event per span."""
    used = {span.lane for span in spans}
    lanes = sorted(used.union(LANES), key=lambda lane: (place_of(lane), lane))
    thread = {lane: i for i, lane in enumerate(lanes)}
    told = [("process", 0, f"rank {rank} ({source})", rank)]
    told += [("thread", place, lane, place) for lane, place in thread.items() if lane in used]
    events: list[Json] = [
        {"ph": "M", "name": f"{what}_{field}", "pid": rank, "tid": number, "ts": 0, "args": args}
        for what, number, name, place in told
        for field, args in (("name", {"name": name}), ("sort_index", {"sort_index": place}))
    ]
    for span in spans:
        args = {
            "op": span.op,
            "lane": span.lane,
            "step": span.step,
            "bytes": span.nbytes,
            "start_s": span.start,
            "end_s": span.end,
        }
        where = {"cat": span.op, "name": span.label, "pid": rank, "tid": thread[span.lane]}
        when = {"ts": span.start * 1e6, "dur": span.seconds * 1e6}
        events.append({"ph": "X", **where, **when, "args": args})
    return events


def _span(rank: int, event: Json) -> Span:
    args = event["args"]
    when = float(args["start_s"]), float(args["end_s"]), int(args["bytes"]), int(args["step"])
    return Span(str(event["name"]), str(args["op"]), rank, str(args["lane"]), *when)


# -- order, durations and overlap of spans


def recorded_order(spans: Iterable[Span], rank: int, lane: str) -> list[str]:
    """Return the labels of one lane in the order of their starts; ties stay as recorded.

    >>> late, early = Span("b", "b", 0, "compute", 1, 2), Span("a", "a", 0, "compute", 0, 1)
    >>> recorded_order([late, early], 0, "compute")
    ['a', 'b']
    """
    own = [span for span in spans if (span.rank, span.lane) == (rank, lane)]
    return [span.label for span in sorted(own, key=lambda span: (span.start, span.end))]


def transfer_times(spans: Iterable[Span]) -> dict[str, float]:
    """Return the durations of collectives without waiting, by label [s].

    The duration is that of the shortest span among ranks, because the last rank to arrive does not
    wait. A label belongs to a collective if several ranks recorded it and sent bytes under it. A
    point-to-point message is not a collective: sender and receiver use different labels.

    >>> first, last = Span("x", "halo", 0, "comm", 0, 5, 8), Span("x", "halo", 1, "comm", 3, 5, 8)
    >>> transfer_times([first, last, Span("f", "f", 0, "compute", 0, 9)])
    {'x': 2.0}
    """
    # A load involves one rank, though other ranks may have loads of the same label.
    by_label = grouped((span for span in spans if span.lane != "copy"), attrgetter("label"))
    return {
        label: float(min(span.seconds for span in group))
        for label, group in by_label.items()
        if any(span.nbytes for span in group) and len({span.rank for span in group}) > 1
    }


def overlap(spans: Iterable[Span]) -> dict[int, tuple[float, float]]:
    """Return rank -> seconds of its transfers that are (hidden, exposed) [s].

    A transfer is hidden while the rank also computes, and exposed otherwise. A collective counts
    from the arrival of its last rank; the time before that is waiting.

    >>> halos = [Span("x", "halo", 0, "comm", 3, 6, 8), Span("x", "halo", 1, "comm", 1, 6, 8)]
    >>> overlap([Span("f", "f", 0, "compute", 0, 4), *halos])
    {0: (1.0, 2.0), 1: (0.0, 3.0)}
    """
    spans = list(spans)
    durations = transfer_times(spans)
    computing: dict[int, list[tuple[float, float]]] = {}
    moving: dict[int, list[tuple[float, float]]] = {}
    for span in spans:
        if span.lane == "compute":
            computing.setdefault(span.rank, []).append((span.start, span.end))
        elif span.nbytes or span.label in durations:
            begin = max(span.start, span.end - durations.get(span.label, span.seconds))
            moving.setdefault(span.rank, []).append((begin, span.end))
    out = {}
    for rank in sorted(moving):
        transfers, work = moving[rank], computing.get(rank, [])
        exposed = max(0.0, _covered_s([*transfers, *work]) - _covered_s(work))
        out[rank] = (_covered_s(transfers) - exposed, exposed)
    return out


def _covered_s(intervals: Iterable[tuple[float, float]]) -> float:
    """Return the seconds that lie in at least one of the intervals."""
    seconds, until = 0.0, -LONGEST
    for start, end in sorted(intervals):
        seconds += max(0.0, end - max(start, until))
        until = max(until, end)
    return seconds


# -- the format that Kineto writes for GPUs, for Holistic Trace Analysis (HTA)

# A span becomes a kernel on a stream, with one stream per lane. The kernel of a computation is
# named by its label, that of a communication ncclKernel_<label>, and that of a load Memcpy. HTA
# finds the kernels of a step by their launches, so every kernel gets an artificial launch at its
# start. Host work (sampling) becomes an operator on the CPU. Times are whole microseconds, because
# HTA drops fractions.

HOST_THREAD = 0
_STEP = re.compile(r":s-?\d+$")  # the step, at the end of a label


def write_for_hta(directory: str | Path, folder: str | Path) -> list[Path]:
    """Convert the traces in `directory` to a file `rank<r>.json` per rank; return their paths.

    `folder` must hold no other .json file, because HTA reads each as a trace. Raises SpecError.
    """
    spans = read_traces(directory)
    ranks = sorted({span.rank for span in spans})
    origin = min((span.start for span in spans), default=0.0)
    make_folder(Path(folder))
    paths = []
    for rank in ranks:
        own = sorted((span for span in spans if span.rank == rank), key=attrgetter("start"))
        ends = (((time - origin) * 1e6 for time in (span.start, span.end)) for span in own)
        # in whole microseconds; both ends are rounded, so spans stay adjacent
        own = [
            span._replace(start=round(s), end=round(e))
            for span, (s, e) in zip(own, ends, strict=True)
        ]
        paths.append(Path(folder) / f"rank{rank}.json")
        document = {
            "schemaVersion": 1,
            "distributedInfo": {"backend": "nccl", "rank": rank, "world_size": len(ranks)},
            "baseTimeNanoseconds": round(origin * 1e9),
            "traceEvents": [*_steps(own), *_kernels(own)],
        }
        # HTA looks for '"rank": 0' with a space
        write_atomically(paths[-1], json.dumps(document, allow_nan=False))
    return paths


def _steps(spans: list[Span]) -> Iterator[Json]:
    """Yield a ProfilerStep per step, which ends where the next step begins; set-up has none."""
    first: dict[int, float] = {}
    for span in spans:
        if span.step >= 0:
            first.setdefault(span.step, span.start)
    bounds = [*first.values(), max(span.end for span in spans)]
    for step, (begin, end) in zip(first, pairwise(bounds), strict=True):
        whole = spans[0]._replace(start=begin, end=end)
        yield _event(whole, HOST_THREAD, "user_annotation", f"ProfilerStep#{step}")


def _kernels(spans: list[Span]) -> Iterator[Json]:
    streams = {lane: number for number, lane in enumerate(LANES, 1)}
    for number, span in enumerate(spans, 1):
        name = _STEP.sub("", span.label)
        if span.lane.startswith("host"):
            yield _event(span, HOST_THREAD, "cpu_op", name)
            continue
        stream = streams.setdefault(span.lane, len(streams) + 1)
        if span.lane == "copy":
            category, name = "gpu_memcpy", f"Memcpy HtoD {name}"
        elif span.lane == "compute":
            category = "kernel"
        else:
            category, name = "kernel", f"ncclKernel_{name}"
        launch = span._replace(end=span.start)
        yield _event(launch, HOST_THREAD, "cuda_runtime", "cudaLaunchKernel", correlation=number)
        args = {"device": span.rank, "stream": stream, "correlation": number, "bytes": span.nbytes}
        yield _event(span, stream, category, name, **args)


def _event(span: Span, thread: int, category: str, name: str, **args: int) -> Json:
    who = {"ph": "X", "cat": category, "name": name, "pid": span.rank, "tid": thread}
    return {**who, "args": args, "ts": span.start, "dur": span.seconds}
