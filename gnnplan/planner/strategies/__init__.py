"""One file per family. A new family is one planner file, one executor file, one line here, and tests find it."""

from __future__ import annotations

from dataclasses import fields

from gnnplan.planner.errors import SpecError
from gnnplan.planner.strategies.gnnpipe import GNNPipe
from gnnplan.planner.strategies.granndis import GraNNDis
from gnnplan.planner.strategies.graph_parallel import GraphParallel
from gnnplan.planner.strategies.strategy import Prediction, Strategy, parse_call

FAMILIES: tuple[type[Strategy], ...] = (GraphParallel, GNNPipe, GraNNDis)
NAMES: dict[str, tuple[type[Strategy], dict[str, object]]] = {
    "graph_parallel": (GraphParallel, {}),
    "pipegcn": (GraphParallel, {"staleness": 1}),
    "gnnpipe": (GNNPipe, {}),
    "granndis": (GraNNDis, {}),
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
        kind = bool if "bool" in allowed[knob] else int
        if not (value is None and "None" in allowed[knob]) and (not isinstance(value, kind) or (kind is int and isinstance(value, bool))):
            raise SpecError(f"{name}: {knob} is {allowed[knob]}, not {value!r}")
    return family(**{**preset, **knobs})


def parse(text: str) -> Strategy:
    """As --strategy takes it: 'gnnpipe(stages=4,chunks=16)'. Raises SpecError.

    >>> str(parse("pipegcn")), str(parse("gnnpipe(stages=4, chunks=16, period=23)"))
    ('pipegcn', 'gnnpipe(stages=4,chunks=16)')
    """
    return named(*parse_call(text))


__all__ = ["FAMILIES", "NAMES", "GNNPipe", "GraNNDis", "GraphParallel", "Prediction", "Strategy", "named", "parse"]
