"""Predicted, simulated and measured side by side, and which layer of knowledge is wrong: volume, cost or schedule."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from gnnplan.planner.errors import SpecError
from gnnplan.planner.files import from_json, read_bytes, read_json
from gnnplan.planner.schedule import Schedule
from gnnplan.planner.strategies.strategy import Memory, Prediction
from gnnplan.planner.trace import LANE_ORDER, LONGEST, Span, overlap, recorded_order, transfer_times

MAX_METRICS, MAX_RANK = 1 << 28, 1 << 28  # [B]
_RANK = re.compile(r"rank(\d+)\.json")
# all ranks meet: the transfer is the shortest span of the group
TRANSFERS = ("halo", "moments", "all_reduce", "preload", "input_halo", "ask", "fetch", "fill", "ask_edges", "edges")


def operation(label: str) -> str:
    """'halo:f:l2:s5' -> 'halo:f': what errors are averaged over.

    >>> operation("halo:f:l2:s5"), operation("forward:c3:s0"), operation("update:s1")
    ('halo:f', 'forward', 'update')
    """
    parts = label.split(":")
    return ":".join(parts[: 2 if len(parts) > 1 and parts[1] in ("f", "b") else 1])


def by_epoch(spans: Iterable[Span], batches: int) -> list[Span]:
    """The spans of whole epochs of so many steps, their `step` the epoch."""
    spans = list(spans)
    whole = (max((span.step for span in spans), default=-1) + 1) // batches
    return [span._replace(step=span.step // batches) for span in spans if 0 <= span.step < whole * batches]


def per_operation(spans: Iterable[Span], steps: range) -> dict[str, float]:
    """Operation -> seconds per step (per epoch where spans are `by_epoch`): of its slowest rank; for transfers where all ranks meet,
    without the waiting. Median over steps."""
    rank_sum: dict[tuple[str, int, int], float] = {}
    spans = [span for span in spans if span.step in steps]
    step_of = {span.label: span.step for span in spans}
    for span in spans:
        name = operation(span.label)
        if span.op not in TRANSFERS and span.op != "receive":  # all waiting; what moved is in the peer's send
            rank_sum[name, span.step, span.rank] = rank_sum.get((name, span.step, span.rank), 0.0) + span.seconds
    by_step: dict[tuple[str, int], float] = {}
    for (name, step, _), seconds in rank_sum.items():
        by_step[name, step] = max(by_step.get((name, step), 0.0), seconds)
    for label, seconds in transfer_times(spans, TRANSFERS).items():
        where = operation(label), step_of[label]
        by_step[where] = by_step.get(where, 0.0) + seconds
    out: dict[str, list[float]] = {}
    for (name, _), seconds in by_step.items():
        out.setdefault(name, []).append(seconds)
    return {name: median(values) for name, values in out.items()}


def predicted_per_operation(prediction: Prediction) -> dict[str, float]:
    """The closed form's seconds by the same operations."""
    out: dict[str, float] = {}
    for kind, seconds in prediction.by_op.items():
        out[operation(kind)] = out.get(operation(kind), 0.0) + float(seconds)
    return out


def read_run(directory: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """metrics.jsonl and rank*.json of a run. Raises SpecError."""
    make = f"make one with `gnnplan run plan.json --out {directory}`"
    try:
        path = directory / "metrics.jsonl"
        metrics = [from_json(path, line, make) for line in read_bytes(path, MAX_METRICS, make).splitlines()]
        files = {int(match[1]): path for path in directory.iterdir() if (match := _RANK.fullmatch(path.name))}
        ranks = [read_json(path, MAX_RANK, make) for _, path in sorted(files.items())]
    except SpecError as error:
        raise SpecError(f"{directory} is not a finished run ({error})") from error
    except OSError as error:
        raise SpecError(f"{directory} is not a finished run ({error.strerror}); {make}") from error
    if not metrics or not ranks:
        raise SpecError(f"{directory} is not a finished run (no {'rank*.json' if metrics else 'epoch in metrics.jsonl'}); {make}")
    for row in metrics:
        if not (isinstance(row, dict) and all(type(row.get(k)) in (int, float) for k in ("epoch", "loss", "epoch_s"))
                and 0 < row["epoch_s"] < LONGEST):
            raise SpecError(f"{directory}/metrics.jsonl: every line needs numbers epoch, loss and epoch_s (above 0), found "
                            f"{str(row)[:100]}; {make}")  # fmt: skip
    for rank in ranks:
        if not (isinstance(rank, dict) and all(_counts(rank.get(k, {} if k == "rows" else None)) for k in ("bytes", "setup_bytes", "rows"))
                and _count(rank.get("peak_rss_bytes")) and "peak_bytes" in rank and _count(rank["peak_bytes"] or 0)):
            raise SpecError(f"{directory}: a rank*.json needs bytes and setup_bytes by operation, peak_rss_bytes and peak_bytes; {make}")
    return metrics, ranks


def rows_by_class(ranks: Iterable[dict[str, Any]]) -> dict[str, int]:
    """What all ranks of a run have read from the feature store (planner/store.py); empty where a strategy has none."""
    rows: dict[str, int] = {}
    for rank in ranks:
        for kind, count in rank.get("rows", {}).items():
            rows[kind] = rows.get(kind, 0) + count
    return rows


def show_rows(rows: dict[str, int]) -> str:
    """In words, classes without a row left out.

    >>> show_rows({"hit": 30, "peer": 0, "host": 70})
    'hit 30 %, host 70 %'
    """
    return ", ".join(f"{kind} {count / sum(rows.values()):.0%}".replace("%", " %") for kind, count in rows.items() if count)


def _counts(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_count, value.values()))


def _count(value: Any) -> bool:
    return type(value) is int and value >= 0


def compare(prediction: Prediction, memory: Memory, simulated: list[Span], simulated_step_s: float, schedule: Schedule,
            measured: list[Span], metrics: list[dict[str, Any]], ranks: list[dict[str, Any]],
            batches: int = 1, drawn: int | None = None) -> dict[str, Any]:  # fmt: skip
    """The document of `gnnplan validate`, per epoch of `batches` steps: rows per operation, the step, bytes, order, memory, and a
    verdict in words. `drawn`: of a strategy whose steps differ, for how many the schedule is what training drew."""
    epochs = len(metrics)
    warm = range(min(2, epochs - 1), epochs)  # the first steps allocate and build caches
    disorder = _disorder(schedule, measured, epochs * batches)
    compared = epochs if drawn is None else min(epochs, drawn // batches, schedule.steps // batches)  # epochs, byte for byte
    scheduled = [sum(schedule.bytes_by_op(t for t in schedule.tasks if t.label.step // batches == e).values())
                 for e in range(0 if drawn is None else compared)]  # fmt: skip
    simulated, measured = by_epoch(simulated, batches), by_epoch(measured, batches)
    played_epochs = schedule.steps // batches
    steady = range(min(1, played_epochs - 1), played_epochs)
    rows = beside(prediction, per_operation(simulated, steady), per_operation(measured, warm))
    step = _row("step", float(prediction.epoch_s), simulated_step_s, median(m["epoch_s"] for m in metrics[warm.start :]))
    counted: dict[str, int] = {}
    once = 0
    for rank in ranks:
        once += sum(rank["setup_bytes"].values())
        for op, nbytes in rank["bytes"].items():
            counted[op] = counted.get(op, 0) + nbytes
    expected = {op: nbytes * epochs for op, nbytes in prediction.bytes.items()}
    of_epochs = counted == expected if drawn is None else scheduled == [row.get("bytes") for row in metrics[:compared]]
    volume = of_epochs and once == prediction.setup_bytes
    open_s, hidden_s = _exposed(measured, warm)
    exposed = _row("exposed communication", float(prediction.comm_s), _exposed(simulated, steady)[0], open_s)
    return {
        "epochs": epochs, "step": step, "operations": rows, "exposed": exposed, "hidden_s": hidden_s,
        "bytes": {"predicted": expected, "counted": counted, "setup_predicted": prediction.setup_bytes, "setup_counted": once,
                  "equal": volume, "epochs": compared},
        "order": {"equal": disorder is None, "first_difference": disorder},
        "memory": _memory(memory, ranks), "rows": rows_by_class(ranks),
        "wrong": _wrong(volume, disorder, step, rows),
    }  # fmt: skip


def beside(prediction: Prediction, played: Mapping[str, float], seen: Mapping[str, float]) -> list[dict[str, Any]]:
    """Each operation that was `seen`, the longest first, beside what was predicted and `played` of it [s]."""
    told = predicted_per_operation(prediction)
    told.setdefault("pipeline:f", told.get("pipeline", 0.0) / 2)
    told.setdefault("pipeline:b", told.get("pipeline", 0.0) / 2)
    return [_row(name, told.get(name), played.get(name), seen[name]) for name in sorted(seen, key=lambda name: -seen[name])]


def fullest(memory: Memory, runtime: bool) -> float:
    """Of the fullest rank [B], with the libraries or without."""
    return float(np.max(np.sum([use for name, use in memory.items() if name != "runtime" or runtime], axis=0)))


def _memory(memory: Memory, ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Of the fullest rank: tensors and arrays where the allocator tells, else all pages with the runtime's."""
    told = all(rank["peak_bytes"] is not None for rank in ranks)
    predicted = fullest(memory, runtime=not told)
    measured = max(rank["peak_bytes" if told else "peak_rss_bytes"] for rank in ranks)
    return {"of": "data" if told else "process", "predicted_bytes": predicted, "measured_bytes": measured,
            "error": predicted / max(measured, 1) - 1}  # fmt: skip


def _exposed(spans: Iterable[Span], steps: range) -> tuple[float, float]:
    """Seconds per step of transfers beside which the rank does not compute, and does: of the rank where most are exposed."""
    spans = [span for span in spans if span.step in steps]
    count = max(len({span.step for span in spans}), 1)
    hidden, exposed = max(overlap(spans).values(), key=lambda pair: pair[1], default=(0.0, 0.0))
    return exposed / count, hidden / count


def _row(name: str, predicted: float | None, simulated: float | None, measured: float) -> dict[str, Any]:
    def error(value: float | None) -> float | None:
        return None if value is None or measured <= 0 else value / measured - 1

    return {"operation": name, "predicted_s": predicted, "simulated_s": simulated, "measured_s": measured,
            "predicted_error": error(predicted), "simulated_error": error(simulated)}  # fmt: skip


def _disorder(schedule: Schedule, measured: list[Span], steps: int) -> str | None:
    """The first place where a lane's recorded order is not the schedule's."""
    for rank in range(schedule.ranks):
        for lane in LANE_ORDER:
            planned = [str(task.label) for task in schedule.lane(rank, lane) if task.label.step < steps]
            recorded = recorded_order([s for s in measured if 0 <= s.step < schedule.steps], rank, lane)
            for place, (a, b) in enumerate(zip(planned, recorded, strict=False)):
                if a != b:
                    return f"rank {rank}, lane {lane}, place {place}: planned {a}, recorded {b}"
            if len(planned) != len(recorded):
                return f"rank {rank}, lane {lane}: planned {len(planned)} operations, recorded {len(recorded)}"
    return None


def _wrong(volume: bool, disorder: str | None, step: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """Which layer of knowledge to doubt first."""
    if not volume:
        return "volume: the bytes counted are not the bytes predicted"
    if disorder:
        return f"schedule: {disorder}"
    gaps = [(abs((row["simulated_s"] or 0.0) - row["measured_s"]), row) for row in rows]
    explained = sum((row["simulated_s"] or 0.0) - row["measured_s"] for row in rows)
    missed = step["simulated_s"] - step["measured_s"]
    if abs(missed) <= 0.1 * step["measured_s"]:
        return "nothing by more than 10 % of the step"
    gap, row = max(gaps, key=lambda pair: pair[0], default=(0.0, {}))
    if row and gap >= 0.3 * abs(missed) and explained * missed > 0:
        return f"cost: {row['operation']} was simulated {row['simulated_s'] or 0:.4f} s and measured {row['measured_s']:.4f} s per step"
    return f"schedule: operations fit, but the step was simulated {step['simulated_s']:.4f} s and measured {step['measured_s']:.4f} s"
