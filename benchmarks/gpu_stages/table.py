"""The page that is made of all stages' JSON."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from gnnplan.planner.vocabulary.units import show_bytes, show_time
from gpu_stages.record import TRAINED, Row

WIDEST = 250  # characters of a line of the digest


def documents(out: Path) -> dict[str, dict[str, Any]]:
    """The document of every stage that has left one; trainings are compared with references."""
    paths = {stage: out / f"{stage}.json" for stage in TABLES}
    found = {
        stage: json.loads(path.read_text("utf-8")) for stage, path in paths.items() if path.exists()
    }
    references = {row["case"]: row for row in found.get("references", {}).get("rows", ())}
    for stage in found.keys() & TRAINED:
        for case, wrong in compare(found[stage]["rows"], references):
            found[stage]["failed"].append({"what": case, "error": wrong, "trace": ""})
    return found


def compare(rows: Iterable[Row], references: Mapping[str, Row]) -> Iterator[tuple[str, str]]:
    """Note in rows how far losses are from the CPU's, where those are there.

    Yields a case and words where that is too far.
    """
    for row in rows:
        if (reference := references.get(row["case"])) is None:
            continue
        pairs = zip(row["losses"], reference["losses"], strict=False)
        off = max(abs(ours / theirs - 1) for ours, theirs in pairs)
        row |= {"losses_off": off, "epoch_cpu_s": reference["epoch_s"]}
        if not off <= row["tolerance"]:  # nor is a loss a number
            yield row["case"], f"losses are up to {off:.1e} off those on the CPU"


def is_result(found: dict[str, dict[str, Any]]) -> bool:
    """Whether all of it ran on a GPU, at full size."""
    return bool(found) and all(
        not each["small"] and each.get("about", {}).get("device") == "cuda"
        for stage, each in found.items()
        if stage != "references"
    )


def page(found: dict[str, dict[str, Any]]) -> str:
    """The page, in Markdown."""
    where = next((each["about"] for each in found.values() if "about" in each), {})
    title = "On a GPU" if is_result(found) else "A rehearsal: no results"
    lines = [f"# {title}", "", _machine(where), ""]
    lines.append("Made by `make gpu`; [how to run it](how-to/run-on-a-gpu.md) says what is what.")
    for stage, document in found.items():
        state = "" if document["ended"] else ", broken off"
        lines += ["", f"## {stage}", "", f"{document['seconds']:.0f} s{state}.", ""]
        lines += tables(stage, document["rows"])
        for kind, key in (("Failed", "failed"), ("Left out", "left_out")):
            if document[key]:
                reason = "error" if key == "failed" else "why"
                lines += ["", f"{kind}:", ""]
                lines += [f"- {each['what']}: {_line(each[reason])}" for each in document[key]]
    return "\n".join(lines) + "\n"


def _machine(where: Row) -> str:
    words = [str(where.get("name", "unknown device"))]
    words += [f"torch {where.get('torch')}", f"Python {where.get('python')}"]
    words += [f"{name.upper()} {where[name]}" for name in ("cuda", "nccl") if where.get(name)]
    return ", ".join(words) + "."


def digest(found: dict[str, dict[str, Any]]) -> str:
    """The most telling figures, few enough for the end of a log: the most telling are last."""
    lines = list[str]()
    for stage in [stage for stage in reversed(TABLES) if stage in found]:
        document = found[stage]
        counts = Counter(row.get("outcome", "rows") for row in document["rows"])
        told = ", ".join(f"{count} {what}" for what, count in counts.items())
        lines += ["", f"{stage}, {document['seconds']:.0f} s: {told}"]
        for has, keys, shown in BRIEF.get(stage, ()):
            groups: dict[str, list[str]] = {}
            for row in document["rows"]:
                if all(row.get(name) is not None for name in has):
                    key = " ".join(str(row.get(name, name)) for name in keys)
                    groups.setdefault(key, []).append(" ".join(cell(row, name) for name in shown))
            lines += [f"  {key}: {', '.join(cells)}" for key, cells in groups.items()]
        lines += [f"  FAILED {each['what']}: {_line(each['error'])}" for each in document["failed"]]
        lines += [f"  left out {each['what']}: {each['why']}" for each in document["left_out"]]
    return "\n".join(line if len(line) <= WIDEST else f"{line[: WIDEST - 3]}..." for line in lines)


def _line(words: str) -> str:
    """An error in a line: its last words, where it is long."""
    line = " ".join(words.split())
    return line if len(line) <= 300 else f"{line[:100]} .. {line[-196:]}"


def tables(stage: str, rows: list[Row]) -> list[str]:
    """A stage's tables, in Markdown; those without a row are left out."""
    if stage == "tests":
        rows = [dict(Counter(row["outcome"] for row in rows))]
    elif stage == "references":
        rows = [{"count": len(rows)}]
    lines = list[str]()
    for (by, *values), columns in TABLES[stage]:
        shown = [row for row in rows if not values or row[by] in values]
        if shown:
            lines += [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
        for row in shown:
            lines.append(f"| {' | '.join(cell(row, name) for name in columns.values())} |")
        lines.append("")
    return lines[:-1]


SHARES = ("gathered_of_copy", "of_roofline", "roofline_error", "of_peak", "overlapped")
NUMBERS = ("error", "losses_off", "spans", "launches", "operations")
RATES = {"rate": "B/s", "flops": "FLOP/s"}


def cell(row: Row, name: str) -> str:
    """A figure of a row as its name says: seconds, bytes, a share, a rate or a number."""
    value = row.get(name)
    if value is None:
        return "-"
    if name in SHARES:
        return f"{100 * value:.0f} %"
    if name in RATES:
        return f"{value / 1e9:,.1f} G{RATES[name]}"
    if name in NUMBERS:
        return f"{value:.3g}"
    if name.endswith(("_s", "seconds")):
        return show_time(value)
    return show_bytes(value) if name.endswith("bytes") else _short(value)


def _short(value: Any) -> str:
    """A value in few digits, also in a table of rates by width and size."""
    if isinstance(value, dict):
        return ", ".join(
            f"{key}: ({_short(each)})" if isinstance(each, dict) else f"{key}: {_short(each)}"
            for key, each in value.items()
        )
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _same(*names: str) -> dict[str, str]:
    """Columns that are called as their figures are."""
    return dict(zip(names, names, strict=True))


ALL = ("",)
SHAPE, CASE = _same("rows", "edges", "width"), _same("strategy", "vertices", "edges")
TYPE, BOTH = {"type": "dtype"}, {"forward": "forward_s", "both": "both_s"}
PLANNED = {"planned": "predicted_s", "planner's error": "roofline_error"}
OF_COPY = {"gathered of a copy": "gathered_of_copy", "of the roofline": "of_roofline"}
ATTENTION = ("aggregate", "attend", "attend_pairs", "softmax_aggregate")
# a figure and the values of it that a table shows; and the table's columns: title -> figure
Tables = list[tuple[tuple[str, ...], dict[str, str]]]
TRAINED_TABLES: Tables = [
    (
        ALL,
        {
            "strategy": "strategy",
            "rows": "dtype",
            **_same("model", "ranks"),
            "over": "backend",
            "epoch": "epoch_s",
            "predicted": "predicted_s",
            "launched one by one": "one_by_one_s",
            "the module alone": "alone_s",
            "bytes equal": "bytes_equal",
            "order equal": "order_equal",
            "memory": "memory_bytes",
            "predicted memory": "predicted_bytes",
            "declared": "declared_bytes",
            "losses off the CPU's": "losses_off",
            "overlapped": "overlapped",
        },
    )
]
TABLES: dict[str, Tables] = {
    "kernels": [
        (("kernel", "copy"), {"copied": "bytes", "rate": "rate"}),
        (
            ("kernel", "aggregation"),
            {"aggregation by": "by", "sources": "graph", **SHAPE, **TYPE, "time": "seconds"}
            | {**OF_COPY, **_same("error", "repeats"), **PLANNED},
        ),
        (
            ("kernel", "dropout"),
            {"dropout by": "by", **_same("rows", "width"), **TYPE, **BOTH, "a copy": "floor_s"}
            | PLANNED,
        ),
        (
            ("kernel", "product", "linear"),
            {"product": "shape", **TYPE, "pass": "pass", "time": "seconds", "rate": "flops"}
            | {"of the peak": "of_peak", **PLANNED},
        ),
        (("kernel", *ATTENTION), {"over edges": "kernel", **SHAPE, **BOTH, **OF_COPY}),
    ],
    "peers": [
        (
            ALL,
            _same("by", "model", "vertices", "edges", "dropout")
            | {
                "epoch": "epoch_s",
                "step": "step_s",
                "set up": "set_up_s",
                "memory": "memory_bytes",
            },
        )
    ],
    "tests": [(ALL, _same("passed", "failed", "skipped"))],
    **dict.fromkeys(TRAINED, TRAINED_TABLES),
    "references": [(ALL, {"trainings on the CPU": "count"})],
    "measure": [(ALL, _same("constant", "value", "range", "from"))],
    "streams": [
        (
            ("what", "recording"),
            {**CASE, "recorded": "recorded_s", "not recorded": "not_recorded_s", "spans": "spans"},
        ),
        (
            ("what", "launches"),
            {**CASE, "step": "step_s", "its kernels": "kernels_s"}
            | _same("launches", "operations", "waits"),
        ),
        (("what", "graph"), {**CASE, "eager": "eager_s", "as a graph": "replayed_s"}),
    ],
    "sampling": [
        (
            ALL,
            {"drawn by the": "where", **_same("vertices", "fanout", "batch", "edges")}
            | {"draw": "draw_s", "lay": "lay_s", "all": "all_s", "equal": "equal"},
        )
    ],
}
# figures that a row must have to be shown, those that name its line, and those that are shown
Brief = list[tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]]
TRAINED_BRIEF: Brief = [
    (
        ("strategy",),
        ("ranks", "model", "dtype"),
        ("strategy", "epoch_s", "predicted_s", "losses_off"),
    )
]
BRIEF: dict[str, Brief] = {
    "kernels": [
        (("rate",), ("kernel",), ("rate",)),
        (("graph",), ("graph", "rows", "width", "dtype"), ("by", "seconds", "gathered_of_copy")),
        (("floor_s",), ("kernel", "width", "dtype"), ("by", "forward_s", "both_s", "floor_s")),
        (("flops",), ("kernel", "shape"), ("dtype", "flops")),
        (("edges", "forward_s"), ("rows",), ("kernel", "forward_s", "both_s")),
        (("roofline_error",), ("kernel", "dtype", "planned"), ("width", "roofline_error")),
    ],
    "peers": [(("epoch_s",), ("model", "edges", "dropout"), ("by", "epoch_s", "memory_bytes"))],
    **dict.fromkeys(TRAINED, TRAINED_BRIEF),
    "measure": [(("range",), ("constant",), ("value",))],
    "streams": [
        (("spans",), ("what", "strategy"), ("vertices", "recorded_s", "not_recorded_s")),
        (("step_s",), ("what", "strategy"), ("vertices", "step_s", "kernels_s", "launches")),
        (("eager_s",), ("what", "strategy"), ("vertices", "eager_s", "replayed_s")),
    ],
    "sampling": [(("where",), ("vertices", "fanout", "batch"), ("where", "all_s"))],
}
