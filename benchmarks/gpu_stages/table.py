"""The page that is made of all stages' JSON."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from gnnplan.planner.vocabulary.units import show_bytes, show_time
from gpu_stages.record import TRAINED, Row

NOTHING = "-"
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
        lines += TABLES[stage](document["rows"])
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
        for is_shown, keys, shown in BRIEF.get(stage, ()):
            groups: dict[str, list[str]] = {}
            for row in document["rows"]:
                if is_shown(row):
                    key = " ".join(str(row[name]) for name in keys)
                    groups.setdefault(key, []).append(shown(row))
            lines += [f"  {key}: {', '.join(cells)}" for key, cells in groups.items()]
        lines += [f"  FAILED {each['what']}: {_line(each['error'])}" for each in document["failed"]]
        lines += [f"  left out {each['what']}: {each['why']}" for each in document["left_out"]]
    return "\n".join(line if len(line) <= WIDEST else f"{line[: WIDEST - 3]}..." for line in lines)


def _line(words: str) -> str:
    """An error in a line: its last words, where it is long."""
    line = " ".join(words.split())
    return line if len(line) <= 300 else f"{line[:100]} .. {line[-196:]}"


def _table(rows: Iterable[Row], columns: dict[str, Callable[[Row], str]]) -> list[str]:
    body = [[show(row) for show in columns.values()] for row in rows]
    if not body:
        return []
    return [
        f"| {' | '.join(columns)} |",
        f"|{'---|' * len(columns)}",
        *(f"| {' | '.join(cells)} |" for cells in body),
    ]


# -- what a cell shows -----------------------------------------------------------------------------


def _text(name: str) -> Callable[[Row], str]:
    return lambda row: NOTHING if row.get(name) is None else str(row[name])


def _seconds(name: str) -> Callable[[Row], str]:
    return lambda row: NOTHING if row.get(name) is None else show_time(row[name])


def _bytes(name: str) -> Callable[[Row], str]:
    return lambda row: NOTHING if row.get(name) is None else show_bytes(row[name])


def _share(name: str) -> Callable[[Row], str]:
    return lambda row: NOTHING if row.get(name) is None else f"{100 * row[name]:.0f} %"


def _rate(name: str, unit: str) -> Callable[[Row], str]:
    return lambda row: NOTHING if row.get(name) is None else f"{row[name] / 1e9:,.1f} G{unit}"


def _number(name: str) -> Callable[[Row], str]:
    return lambda row: NOTHING if row.get(name) is None else f"{row[name]:.3g}"


def _cells(*shown: Callable[[Row], str]) -> Callable[[Row], str]:
    return lambda row: " ".join(cell(row) for cell in shown)


# -- a function per stage --------------------------------------------------------------------------


def _tests(rows: list[Row]) -> list[str]:
    counts = Counter(row["outcome"] for row in rows)
    return _table([dict(counts)], {name: _text(name) for name in ("passed", "failed", "skipped")})


def _kernels(rows: list[Row]) -> list[str]:
    def of(*kernels: str) -> list[Row]:
        return [row for row in rows if row["kernel"] in kernels]

    planned = {"planned": _seconds("predicted_s"), "planner's error": _share("roofline_error")}
    shape = {"rows": _text("rows"), "edges": _text("edges"), "width": _text("width")}
    groups = (
        _table(of("copy"), {"copied": _bytes("bytes"), "rate": _rate("rate", "B/s")}),
        _table(
            of("aggregation"),
            {
                "aggregation by": _text("by"),
                "sources": _text("graph"),
                **shape,
                "type": _text("dtype"),
                "time": _seconds("seconds"),
                "gathered of a copy": _share("gathered_of_copy"),
                "of the roofline": _share("of_roofline"),
                "error": _number("error"),
                "repeats": _text("repeats"),
                **planned,
            },
        ),
        _table(
            of("dropout"),
            {
                "dropout by": _text("by"),
                "rows": _text("rows"),
                "width": _text("width"),
                "type": _text("dtype"),
                "forward": _seconds("forward_s"),
                "both": _seconds("both_s"),
                "a copy": _seconds("floor_s"),
                **planned,
            },
        ),
        _table(
            of("product", "linear"),
            {
                "product": _text("shape"),
                "type": _text("dtype"),
                "pass": _text("pass"),
                "time": _seconds("seconds"),
                "rate": _rate("flops", "FLOP/s"),
                "of the peak": _share("of_peak"),
                **planned,
            },
        ),
        _table(
            of("aggregate", "attend", "attend_pairs", "softmax_aggregate"),
            {
                "over edges": _text("kernel"),
                **shape,
                "forward": _seconds("forward_s"),
                "both": _seconds("both_s"),
                "gathered of a copy": _share("gathered_of_copy"),
                "of the roofline": _share("of_roofline"),
            },
        ),
    )
    return [line for group in groups for line in (*group, "")]


def _measure(rows: list[Row]) -> list[str]:
    names = ("constant", "value", "range", "from")
    return _table(rows, {name: _text(name) for name in names})


def _training(rows: list[Row]) -> list[str]:
    return _table(
        rows,
        {
            "strategy": _text("strategy"),
            "rows": _text("dtype"),
            "model": _text("model"),
            "ranks": _text("ranks"),
            "over": _text("backend"),
            "epoch": _seconds("epoch_s"),
            "predicted": _seconds("predicted_s"),
            "launched one by one": _seconds("one_by_one_s"),
            "the module alone": _seconds("alone_s"),
            "bytes equal": _text("bytes_equal"),
            "order equal": _text("order_equal"),
            "memory": _bytes("memory_bytes"),
            "predicted memory": _bytes("predicted_bytes"),
            "declared": _bytes("declared_bytes"),
            "losses off the CPU's": _number("losses_off"),
            "overlapped": _share("overlapped"),
        },
    )


def _streams(rows: list[Row]) -> list[str]:
    case = {"strategy": _text("strategy"), "vertices": _text("vertices"), "edges": _text("edges")}
    columns: dict[str, dict[str, Callable[[Row], str]]] = {
        "recording": {
            **case,
            "recorded": _seconds("recorded_s"),
            "not recorded": _seconds("not_recorded_s"),
            "spans": _number("spans"),
        },
        "launches": {
            **case,
            "step": _seconds("step_s"),
            "its kernels": _seconds("kernels_s"),
            "launches": _number("launches"),
            "operations": _number("operations"),
            "waits": _text("waits"),
        },
        "graph": {**case, "eager": _seconds("eager_s"), "as a graph": _seconds("replayed_s")},
    }
    groups = (
        _table([row for row in rows if row["what"] == what], shown)
        for what, shown in columns.items()
    )
    return [line for group in groups for line in (*group, "")]


def _sampling(rows: list[Row]) -> list[str]:
    return _table(
        rows,
        {
            "drawn by the": _text("where"),
            "vertices": _text("vertices"),
            "fanout": _text("fanout"),
            "batch": _text("batch"),
            "edges": _text("edges"),
            "draw": _seconds("draw_s"),
            "lay": _seconds("lay_s"),
            "all": _seconds("all_s"),
            "equal": _text("equal"),
        },
    )


def _peers(rows: list[Row]) -> list[str]:
    return _table(
        rows,
        {
            "by": _text("by"),
            "model": _text("model"),
            "vertices": _text("vertices"),
            "edges": _text("edges"),
            "dropout": _text("dropout"),
            "epoch": _seconds("epoch_s"),
            "step": _seconds("step_s"),
            "set up": _seconds("set_up_s"),
            "memory": _bytes("memory_bytes"),
        },
    )


def _references(rows: list[Row]) -> list[str]:
    return _table([{"count": len(rows)}], {"trainings on the CPU": _text("count")})


TABLES: dict[str, Callable[[list[Row]], list[str]]] = {
    "kernels": _kernels,
    "peers": _peers,
    "tests": _tests,
    "one": _training,
    "shared": _training,
    "further": _training,
    "modules": _training,
    "references": _references,
    "measure": _measure,
    "streams": _streams,
    "sampling": _sampling,
}


def _has(name: str) -> Callable[[Row], bool]:
    return lambda row: row.get(name) is not None


Brief = tuple[tuple[Callable[[Row], bool], tuple[str, ...], Callable[[Row], str]], ...]
_TRAINED: Brief = (
    (
        _has("strategy"),
        ("ranks", "model", "dtype"),
        _cells(
            _text("strategy"), _seconds("epoch_s"), _seconds("predicted_s"), _number("losses_off")
        ),
    ),
)
# By stage: which rows are shown, what names a line, and what the line shows of each row
BRIEF: dict[str, Brief] = {
    "kernels": (
        (_has("rate"), ("kernel",), _rate("rate", "B/s")),
        (
            _has("graph"),
            ("graph", "rows", "width", "dtype"),
            _cells(_text("by"), _seconds("seconds"), _share("gathered_of_copy")),
        ),
        (
            _has("floor_s"),
            ("kernel", "width", "dtype"),
            _cells(_text("by"), _seconds("forward_s"), _seconds("both_s"), _seconds("floor_s")),
        ),
        (_has("flops"), ("kernel", "shape"), _cells(_text("dtype"), _rate("flops", "FLOP/s"))),
        (
            lambda row: "both_s" in row and "floor_s" not in row,
            ("rows",),
            _cells(_text("kernel"), _seconds("forward_s"), _seconds("both_s")),
        ),
        (
            _has("roofline_error"),
            ("kernel", "dtype"),
            _cells(lambda row: "planned", _text("width"), _share("roofline_error")),
        ),
    ),
    "peers": (
        (
            _has("epoch_s"),
            ("model", "edges", "dropout"),
            _cells(_text("by"), _seconds("epoch_s"), _bytes("memory_bytes")),
        ),
    ),
    "one": _TRAINED,
    "shared": _TRAINED,
    "further": _TRAINED,
    "modules": _TRAINED,
    "measure": ((_has("range"), ("constant",), _text("value")),),
    "streams": (
        (
            _has("spans"),
            ("what", "strategy"),
            _cells(_text("vertices"), _seconds("recorded_s"), _seconds("not_recorded_s")),
        ),
        (
            _has("step_s"),
            ("what", "strategy"),
            _cells(_text("vertices"), _seconds("step_s"), _seconds("kernels_s"), _text("launches")),
        ),
        (
            _has("eager_s"),
            ("what", "strategy"),
            _cells(_text("vertices"), _seconds("eager_s"), _seconds("replayed_s")),
        ),
    ),
    "sampling": (
        (
            _has("where"),
            ("vertices", "fanout", "batch"),
            _cells(_text("where"), _seconds("all_s")),
        ),
    ),
}
