"""One file per family. A new family is one planner file, one executor file, one line here, and tests find it."""

from __future__ import annotations

from dataclasses import fields

from gnnplan.planner.errors import SpecError
from gnnplan.planner.strategies.data_parallel import DataParallel
from gnnplan.planner.strategies.gnnpipe import GNNPipe
from gnnplan.planner.strategies.granndis import GraNNDis
from gnnplan.planner.strategies.graph_parallel import GraphParallel
from gnnplan.planner.strategies.gsplit import GSplit
from gnnplan.planner.strategies.p3 import P3
from gnnplan.planner.strategies.strategy import Prediction, Strategy, parse_call

FAMILIES: tuple[type[Strategy], ...] = (GraphParallel, GNNPipe, GraNNDis, DataParallel, GSplit, P3)
NAMES: dict[str, tuple[type[Strategy], dict[str, object]]] = {
    "graph_parallel": (GraphParallel, {}),
    "pipegcn": (GraphParallel, {"staleness": 1}),
    "pipegcn_f": (GraphParallel, {"staleness": 1, "smoothing": "f"}),
    "pipegcn_g": (GraphParallel, {"staleness": 1, "smoothing": "g"}),
    "pipegcn_gf": (GraphParallel, {"staleness": 1, "smoothing": "gf"}),
    "gnnpipe": (GNNPipe, {}),
    "granndis": (GraNNDis, {}),
    "data_parallel": (DataParallel, {}),
    "gsplit": (GSplit, {}),
    "p3": (P3, {}),
}


def named(name: str, knobs: dict[str, object]) -> Strategy:
    """A family by its published name with knobs. Raises SpecError."""
    if name not in NAMES:
        raise SpecError(f"there is no strategy {name!r}; use one of {', '.join(NAMES)}")
    family, preset = NAMES[name]
    allowed = {f.name: str(f.type) for f in fields(family)}
    for knob, value in knobs.items():
        if knob not in allowed:
            raise SpecError(f"{name} has no knob {knob!r}; its knobs are {', '.join(allowed)}")
        if not _suits(value, allowed[knob]):
            raise SpecError(f"{name}: {knob} is {allowed[knob]}, not {value!r}")
    # plan.json has lists where knobs are tuples
    return family(**{**preset, **{knob: tuple(value) if isinstance(value, list) else value for knob, value in knobs.items()}})


def _suits(value: object, annotation: str) -> bool:
    """Whether a knob annotated so ('int | None', 'tuple[int, ...]', ...) takes the value.

    >>> _suits(3, "float"), _suits(True, "int"), _suits(None, "int | None"), _suits([1, 2], "tuple[int, ...] | None")
    (True, False, True, True)
    """
    if value is None:
        return "None" in annotation
    kind = annotation.split(" | ")[0]
    if kind.startswith("tuple"):
        return isinstance(value, (list, tuple)) and all(type(item) is int for item in value)
    return type(value).__name__ == kind or (kind == "float" and type(value) is int)


def parse(text: str) -> Strategy:
    """As --strategy takes it: 'gnnpipe(stages=4,chunks=16)'. Raises SpecError.

    >>> str(parse("pipegcn")), str(parse("gnnpipe(stages=4, chunks=16, period=23)"))
    ('pipegcn', 'gnnpipe(stages=4,chunks=16)')
    """
    return named(*parse_call(text))


__all__ = ["FAMILIES", "NAMES", "P3", "DataParallel", "GNNPipe", "GSplit", "GraNNDis", "GraphParallel", "Prediction", "Strategy", "named",
           "parse"]  # fmt: skip
