"""Traces in the format that Kineto writes for GPUs, for Holistic Trace Analysis (HTA).

A span becomes a kernel on a stream, with one stream per lane. The kernel of a computation is named
by its label, that of a communication ncclKernel_<label>, and that of a load Memcpy. HTA finds the
kernels of a step by their launches, so every kernel gets an artificial launch at its start. Host
work (sampling) becomes an operator on the CPU. Times are whole microseconds, because HTA drops
fractions."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gnnplan.planner.vocabulary.files import make_folder, write_atomically
from gnnplan.planner.vocabulary.trace import LANES, Span, read_traces

HOST_THREAD = 0
_STEP = re.compile(r":s-?\d+$")  # the step, at the end of a label


def write_for_hta(directory: str | Path, folder: str | Path) -> list[Path]:
    """Convert the traces in `directory` to a file `rank<r>.json` per rank; return their paths.

    `folder` must hold no other .json file, because HTA reads each as a trace. Raises SpecError.
    """
    spans = read_traces(directory)
    ranks = sorted({span.rank for span in spans})
    start = min((span.start for span in spans), default=0.0)
    make_folder(Path(folder))
    paths = []
    for rank in ranks:
        own = sorted((span for span in spans if span.rank == rank), key=lambda span: span.start)
        paths.append(Path(folder) / f"rank{rank}.json")
        document = {
            "schemaVersion": 1,
            "distributedInfo": {"backend": "nccl", "rank": rank, "world_size": len(ranks)},
            "baseTimeNanoseconds": round(start * 1e9),
            "traceEvents": [*_steps(own, start), *_kernels(own, start)],
        }
        # HTA looks for '"rank": 0' with a space
        write_atomically(paths[-1], json.dumps(document, allow_nan=False))
    return paths


def _steps(spans: list[Span], start: float) -> Iterator[dict[str, Any]]:
    """Yield a ProfilerStep per step, which ends where the next step begins; set-up has none."""
    first: dict[int, float] = {}
    for span in spans:
        if span.step >= 0:
            first.setdefault(span.step, span.start)
    ends = [*list(first.values())[1:], max((span.end for span in spans), default=start)]
    for (step, begin), end in zip(first.items(), ends, strict=True):
        event = _event(spans[0].rank, HOST_THREAD, "user_annotation", f"ProfilerStep#{step}")
        yield event | _time(begin, end, start)


def _kernels(spans: list[Span], start: float) -> Iterator[dict[str, Any]]:
    streams = {lane: number for number, lane in enumerate(LANES, 1)}
    for number, span in enumerate(spans, 1):
        name = _STEP.sub("", span.label)
        if span.lane.startswith("host"):
            event = _event(span.rank, HOST_THREAD, "cpu_op", name)
            yield event | _time(span.start, span.end, start)
            continue
        stream = streams.setdefault(span.lane, len(streams) + 1)
        if span.lane == "copy":
            category, name = "gpu_memcpy", f"Memcpy HtoD {name}"
        elif span.lane == "compute":
            category = "kernel"
        else:
            category, name = "kernel", f"ncclKernel_{name}"
        launch = _event(span.rank, HOST_THREAD, "cuda_runtime", "cudaLaunchKernel")
        yield launch | _time(span.start, span.start, start) | {"args": {"correlation": number}}
        args = {"device": span.rank, "stream": stream, "correlation": number, "bytes": span.nbytes}
        kernel = _event(span.rank, stream, category, name)
        yield kernel | _time(span.start, span.end, start) | {"args": args}


def _event(rank: int, thread: int, category: str, name: str) -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "pid": rank, "tid": thread, "args": {}}


def _time(begin: float, end: float, start: float) -> dict[str, int]:
    """Return whole microseconds since `start`; both ends are rounded, so spans stay adjacent."""
    first, last = round((begin - start) * 1e6), round((end - start) * 1e6)
    return {"ts": first, "dur": last - first}
