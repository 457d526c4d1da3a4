"""Comparison of one finished run with its prediction and its simulation.

`compare` builds the document of `gnnplan validate`. `diagnose` says which part of the prediction is
wrong: the volume (bytes), the cost (seconds of an operation) or the order. `per_operation` computes
seconds from spans, in the same way for simulated and for measured spans. runs.py compares many
runs.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from gnnplan.planner.decision.candidate import Candidate
from gnnplan.planner.evidence.runs import WARM_UP, summed, warm_epochs
from gnnplan.planner.strategies.base import NON_TRAINING_USES, Memory
from gnnplan.planner.strategies.program.account import Prediction
from gnnplan.planner.vocabulary.files import Json
from gnnplan.planner.vocabulary.numbers import typical
from gnnplan.planner.vocabulary.schedule import Schedule
from gnnplan.planner.vocabulary.trace import Span, overlap, place_of, recorded_order, transfer_times
from gnnplan.planner.vocabulary.units import show_percent

TOLERANCE = 0.1  # share of the measured step; smaller errors are not diagnosed
# Operations that only wait, for a message or for the sampler; they have no predicted seconds.
WAITING = ("receive", "wait")
# Operation with a direction -> the data that it moves, in words
MOVED = {
    "halo": "halo rows",
    "input_halo": "halo rows",
    "pipeline": "rows to the next stage",
    "to_columns": "rows, cut into columns",
    "to_rows": "columns, joined to rows",
    "sum_aggregates": "partial sums over edges",
    "sum_outputs": "partial products",
    "sum_inputs": "partial gradients of inputs",
    "gather_weights": "shares of weights",
    "scatter_weights": "shares of weights' gradients",
}
MEASURE = "the machine's pace or its constants; run `gnnplan measure` and plan again"
REPORT = "this is a fault of gnnplan, not of the machine: please report it with the run's folder"

Row = Json  # one operation: its seconds (predicted, simulated, measured) and errors


# -- seconds of each operation ---------------------------------------------------------------------


def operation(label: str) -> str:
    """Return the operation in a label, without layer, chunk, peer and step.

    >>> operation("halo:f:l2:s5"), operation("forward:c3:s0"), operation("update:s1")
    ('halo:f', 'forward', 'update')
    """
    parts = label.split(":")
    return ":".join(parts[: 2 if len(parts) > 1 and parts[1] in ("f", "b") else 1])


def describe_operation(name: str) -> str:
    """Return an operation's name with its explanation.

    >>> describe_operation("halo:f"), describe_operation("encode:b"), describe_operation("loss")
    ('halo:f (halo rows, forward)', 'encode:b (backward)', 'loss')
    """
    op, _, direction = name.partition(":")
    if not direction:
        return name
    words = [MOVED[op]] if op in MOVED else []
    return f"{name} ({', '.join([*words, 'forward' if direction == 'f' else 'backward'])})"


def by_epoch(spans: Iterable[Span], batches: int) -> list[Span]:
    """Return the spans with the epoch as their `step`, without those of an unfinished epoch."""
    spans = list(spans)
    epochs = (max((span.step for span in spans), default=-1) + 1) // batches
    return [
        span._replace(step=span.step // batches)
        for span in spans
        if 0 <= span.step < epochs * batches
    ]


def bytes_by_epoch(schedule: Schedule, batches: int) -> Counter[int]:
    """Return epoch -> bytes that its tasks send [B]."""
    sent = Counter[int]()
    for task in schedule.tasks:
        sent[task.label.step // batches] += sum(schedule.bytes_by_op([task]).values())
    return sent


def per_operation(spans: Iterable[Span], steps: range, period: int = 1) -> dict[str, float]:
    """Return the median seconds of each operation per step [s].

    If steps differ with a period, the seconds are `typical` of a period. A computation's seconds
    are those of the slowest rank. A collective's seconds start when the last rank has joined, so
    the waiting of the other ranks does not count. Operations that only wait are left out. For spans
    of `by_epoch` the seconds are per epoch.
    """
    spans = [span for span in spans if span.step in steps and span.op not in WAITING]
    collective_s = transfer_times(spans)
    collectives = {span.op for span in spans if span.label in collective_s}
    rank_s = defaultdict[tuple[str, int, int], float](float)
    for span in spans:
        if span.op not in collectives:
            rank_s[operation(span.label), span.step, span.rank] += span.seconds
    step_s = defaultdict[tuple[str, int], float](float)
    for (name, step, _), seconds in rank_s.items():
        step_s[name, step] = max(step_s[name, step], seconds)
    step_of = {span.label: span.step for span in spans}
    for label, seconds in collective_s.items():
        step_s[operation(label), step_of[label]] += seconds
    seconds_by_operation = defaultdict[str, list[float]](list)
    for (name, _), seconds in sorted(step_s.items(), key=lambda item: item[0][1]):
        seconds_by_operation[name].append(seconds)
    return {name: typical(values, period) for name, values in seconds_by_operation.items()}


def predicted_per_operation(prediction: Prediction) -> dict[str, float]:
    """Return the closed form's seconds [s], keyed by the names that `per_operation` uses."""
    found = defaultdict[str, float](float)
    for kind, seconds in prediction.by_op.items():
        found[operation(kind)] += float(seconds)
    return dict(found)


def compare_operations(
    prediction: Prediction, simulated: Mapping[str, float], measured: Mapping[str, float]
) -> list[Row]:
    """Return a row for each measured operation, the longest first.

    simulated, measured: operation -> seconds [s].
    """
    predicted = predicted_per_operation(prediction)
    if "pipeline" in predicted:  # the closed form has one number for both directions
        for name in ("pipeline:f", "pipeline:b"):
            predicted.setdefault(name, predicted["pipeline"] / 2)
    return [
        _row(name, predicted.get(name), simulated.get(name), measured[name])
        for name in sorted(measured, key=lambda name: -measured[name])
    ]


def _row(name: str, predicted: float | None, simulated: float | None, measured: float) -> Row:
    def error(seconds: float | None) -> float | None:
        return None if seconds is None or measured <= 0 else seconds / measured - 1

    return {
        "operation": name,
        "predicted_s": predicted,
        "simulated_s": simulated,
        "measured_s": measured,
        "predicted_error": error(predicted),
        "simulated_error": error(simulated),
    }


# -- comparison ------------------------------------------------------------------------------------


def compare(
    candidate: Candidate,
    recorded: Candidate,
    schedule: Schedule,
    simulated: list[Span],
    simulated_epoch_s: float,
    measured: list[Span],
    metrics: list[Json],
    ranks: list[Json],
) -> Json:
    """Return the document of `gnnplan validate`; all times are per epoch.

    candidate: the plan's best, evaluated. recorded: the same candidate, launched like the recorded
    epochs (`Candidate.without_cuda_graphs`); simulated: the spans of simulating `schedule` with it.
    metrics, ranks: the result of `read_run`.

    Times are medians without the warm-up epochs; if epochs differ with a period, means over the
    period of the medians of equal epochs.
    """
    problem, period = candidate.problem, candidate.predicted.period
    batches = candidate.strategy.steps(problem)
    disorder = first_order_difference(schedule, measured, len(metrics) * batches)
    simulated, measured = by_epoch(simulated, batches), by_epoch(measured, batches)
    warm = range(min(WARM_UP, len(metrics) - 1), len(metrics))
    prediction, played = candidate.predicted.over(warm), schedule.steps // batches
    steady = range(min(1, played - 1), played)
    measured_s = typical(warm_epochs(metrics), period)
    step = _row("step", float(prediction.epoch_s), simulated_epoch_s, measured_s)
    seconds = per_operation(simulated, steady, period), per_operation(measured, warm, period)
    rows = compare_operations(recorded.predicted.over(warm), *seconds)
    volume = _compare_bytes(candidate, schedule, batches, metrics, ranks)
    device = _compare_devices(problem.cluster.device.kind, ranks)
    exposed_s, hidden_s = _communication_s(measured, warm)
    simulated_s, _ = _communication_s(simulated, steady)
    return {
        "epochs": len(metrics),
        "batches": batches,
        "device": device,
        "step": step,
        "replayed": recorded is not candidate,
        "operations": rows,
        "exposed": _row("exposed communication", float(prediction.comm_s), simulated_s, exposed_s),
        "hidden_s": hidden_s,
        "sampler_wait_s": _sampler_wait_s(measured, warm),
        "bytes": volume,
        "order": {"equal": disorder is None, "first_difference": disorder},
        "memory": compare_memory(candidate.memory, ranks),
        "rows": dict(summed(ranks, "rows")),
        "diagnosis": diagnose(
            step,
            rows if recorded is candidate else (),
            volume_equal=volume["equal"],
            disorder=disorder,
            same_device=device["equal"],
            unit="step" if batches == 1 else "epoch",
        ),
    }


def _compare_bytes(
    candidate: Candidate, schedule: Schedule, batches: int, metrics: list[Json], ranks: list[Json]
) -> Json:
    """Compare the bytes that all ranks sent, by operation.

    The bytes of every epoch are compared with their prediction. If every epoch draws its own
    batches, the prediction is of the first epoch only; then the run is compared with the schedule,
    as far as the schedule has the batches that were drawn.
    """
    prediction, epochs = candidate.predicted, len(metrics)
    counted, setup_counted = summed(ranks, "bytes"), summed(ranks, "setup_bytes").total()
    predicted = Counter[str]()
    for epoch in range(epochs):
        predicted.update(prediction.at(epoch).bytes)
    drawn = candidate.strategy.drawn_steps(candidate.problem)
    if drawn is None:
        each = [prediction.at(epoch).bytes_total for epoch in range(epochs)]
        recorded = [row.get("bytes", sent) for row, sent in zip(metrics, each, strict=True)]
        compared, equal = epochs, counted == predicted and recorded == each
    else:
        compared = min(epochs, drawn // batches, schedule.steps // batches)
        sent = bytes_by_epoch(schedule, batches)
        equal = all(sent[epoch] == metrics[epoch].get("bytes") for epoch in range(compared))
    return {
        "predicted": dict(predicted),
        "counted": dict(counted),
        "setup_predicted": prediction.setup_bytes,
        "setup_counted": setup_counted,
        "equal": equal and setup_counted == prediction.setup_bytes,
        "epochs": compared,
    }


def _compare_devices(planned: str, ranks: list[Json]) -> Json:
    """Compare the plan's kind of device with the kinds that ranks ran on ('cpu', 'cuda').

    Runs of older versions do not record their device; they count as equal.
    """
    ran_on = sorted({str(rank["device"]).partition(":")[0] for rank in ranks if "device" in rank})
    return {"planned": planned, "ran_on": ran_on, "equal": all(kind == planned for kind in ran_on)}


def rank_bytes(memory: Memory, runtime: bool = False) -> np.ndarray:
    """Return the memory of each rank [ranks] [B]; `runtime`: with the uses NON_TRAINING_USES."""
    uses = [use for name, use in memory.items() if runtime or name not in NON_TRAINING_USES]
    return np.asarray(np.sum(uses, axis=0))


def compare_memory(memory: Memory, ranks: list[Json]) -> Json:
    """Compare the memory of the fullest rank.

    'data' is the memory of tensors and arrays. If the allocator does not count it, the memory of
    the whole process is compared, which includes libraries.
    """
    counted = all(rank["peak_bytes"] is not None for rank in ranks)
    predicted = float(rank_bytes(memory, runtime=not counted).max())
    measured = max(rank["peak_bytes" if counted else "peak_rss_bytes"] for rank in ranks)
    return {
        "of": "data" if counted else "process",
        "predicted_bytes": predicted,
        "measured_bytes": measured,
        "error": predicted / max(measured, 1) - 1,
    }


def _communication_s(spans: Iterable[Span], steps: range) -> tuple[float, float]:
    """Return exposed and hidden seconds of transfers per step, of the rank with the most exposed.

    A rank that waits for its sampler does not compute, so it hides no transfer meanwhile.
    """
    spans = [span for span in spans if span.step in steps and span.op != "wait"]
    count = max(len({span.step for span in spans}), 1)
    hidden, exposed = max(overlap(spans).values(), key=lambda pair: pair[1], default=(0.0, 0.0))
    return exposed / count, hidden / count


def _sampler_wait_s(spans: Iterable[Span], steps: range) -> float:
    """Return the seconds per step of waiting for sampled batches, of the rank that waits most."""
    waited = defaultdict[int, float](float)
    for span in spans:
        if span.step in steps and span.op == "wait":
            waited[span.rank] += span.seconds
    return max(waited.values(), default=0.0) / len(steps)


def first_order_difference(schedule: Schedule, measured: Sequence[Span], steps: int) -> str | None:
    """Describe the first place where a lane's recorded order differs from the schedule's."""
    measured = [span for span in measured if 0 <= span.step < schedule.steps]
    lanes = {*(span.lane for span in measured), *(task.lane for task in schedule.tasks)}
    for rank in range(schedule.ranks):
        for lane in sorted(lanes, key=place_of):
            planned = [
                str(task.label) for task in schedule.lane(rank, lane) if task.label.step < steps
            ]
            recorded = recorded_order(measured, rank, lane)
            for place, (a, b) in enumerate(zip(planned, recorded, strict=False)):
                if a != b:
                    return f"rank {rank}, lane {lane}, place {place}: planned {a}, recorded {b}"
            if len(planned) != len(recorded):
                return (
                    f"rank {rank}, lane {lane}: planned {len(planned)} operations, recorded"
                    f" {len(recorded)}"
                )
    return None


# -- diagnosis -------------------------------------------------------------------------------------


def share_of_step(row: Row, step: Row) -> float | None:
    """Return an operation's error [s] over the measured step [s]; None without a prediction.

    If an operation of 1 % of the step takes twice as long as predicted, the step takes 1 % longer:
    the operation's own relative error (100 %) does not show that.

    >>> share_of_step({"predicted_s": 1.0, "measured_s": 3.0}, {"measured_s": 20.0})
    -0.1
    """
    if row["predicted_s"] is None:
        return None
    return float((row["predicted_s"] - row["measured_s"]) / step["measured_s"])


def show_error(error: float) -> str:
    """Format a relative error; as a factor if the times differ by more than a factor of two.

    >>> show_error(-0.22), show_error(29.0), show_error(-0.75), show_error(-1.0)
    ('-22 %', '30x too long', '4.0x too short', '-100 %')
    """
    ratio = 1 + error
    if ratio <= 0 or 0.5 <= ratio <= 2:
        return show_percent(error, sign=True)
    factor = max(ratio, 1 / ratio)
    return f"{factor:.{0 if factor >= 10 else 1}f}x too {'long' if ratio > 1 else 'short'}"


def diagnose(
    step: Row,
    rows: Sequence[Row],
    *,
    volume_equal: bool,
    disorder: str | None,
    same_device: bool,
    unit: str = "step",
) -> str:
    """Say which part of the prediction has the largest error, and what to do about it."""
    if not volume_equal:
        return f"the bytes counted are not the bytes predicted: the volume is wrong; {REPORT}"
    if disorder:
        return f"operations ran in another order than scheduled: {disorder}; {REPORT}"
    if not same_device:
        return (
            "volume and order are as planned; costs of another kind of device are not judged: plan"
            " for the one that it ran on"
        )
    missed = step["predicted_error"]
    step_fits = abs(missed) <= TOLERANCE
    if not rows:
        off = f"the {unit} is {show_error(missed)} off: {MEASURE}"
        return "the prediction holds" if step_fits else off
    errors = {
        row["operation"]: error for row in rows if (error := share_of_step(row, step)) is not None
    }
    # an operation that is predicted too long does not explain a step that is predicted too short
    blamed = [name for name in errors if step_fits or (errors[name] > 0) == (missed > 0)]
    worst = max(blamed, key=lambda name: abs(errors[name]), default=None)
    if worst is not None and abs(errors[worst]) > TOLERANCE:
        own = next(row["predicted_error"] for row in rows if row["operation"] == worst)
        found = (
            f"the prediction of `{worst}` is off most ({show_error(own)}, that is"
            f" {show_percent(errors[worst], sign=True)} of the {unit}): its cost, not its volume or"
            " order"
        )
        if step_fits:
            return f"{found}; the {unit} itself is {show_percent(missed, sign=True)} off"
        return f"{found}: {MEASURE}"
    others = any(abs(errors[name]) > TOLERANCE for name in errors.keys() - set(blamed))
    off = f"predicted too {'long' if missed > 0 else 'short'}" if others else "off"
    found = f"no operation is {off} by more than {show_percent(TOLERANCE)} of the {unit}"
    if step_fits:
        return f"the prediction holds: {found}"
    together = sum(errors.values())
    if abs(step["simulated_error"]) <= TOLERANCE:
        cause = (
            "the simulation has it right, so the closed form lacks waiting or contention; go by"
            " `gnnplan simulate` for this plan"
        )
    elif abs(together) > TOLERANCE and (together > 0) == (missed > 0):
        cause = f"many are, {show_percent(together, sign=True)} together: {MEASURE}"
    else:
        cause = (
            "doubt its waiting and overlap, not the cost of an operation; the traces in the run's"
            " folder show both (ui.perfetto.dev)"
        )
    return f"{found}, but the {unit} is {show_percent(missed, sign=True)} off: {cause}"
