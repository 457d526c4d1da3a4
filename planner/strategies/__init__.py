"""The strategies: what each does to bytes, memory and seconds of a training epoch.

    base.py         what every strategy answers; how strategies are written and read as text
    layerwise/      full graph, layer by layer: graph parallelism and PipeGCN, GraNNDis
    gnnpipe/        full graph, layers in a pipeline: GNNPipe
    minibatch/      mini-batches: data parallelism, GSplit; where features and adjacency lists are
    p3/             mini-batches with layer 1 on feature columns: P3

This room imports vocabulary, cluster, gnn, graph, ownership and problem. A new family is one file
here, one file in executor/strategies, and one line in NAMES; tests find it there.
"""

from __future__ import annotations

from dataclasses import fields

from gnnplan.planner.strategies.base import Prediction as Prediction
from gnnplan.planner.strategies.base import Strategy as Strategy
from gnnplan.planner.strategies.base import parse_call, read_list, read_size
from gnnplan.planner.strategies.gnnpipe.gnnpipe import GNNPipe as GNNPipe
from gnnplan.planner.strategies.layerwise.granndis import GraNNDis as GraNNDis
from gnnplan.planner.strategies.layerwise.graph_parallel import GraphParallel as GraphParallel
from gnnplan.planner.strategies.minibatch.data_parallel import DataParallel as DataParallel
from gnnplan.planner.strategies.minibatch.gsplit import GSplit as GSplit
from gnnplan.planner.strategies.p3.p3 import P3 as P3
from gnnplan.planner.vocabulary.errors import SpecError

# published name -> its family, and the knobs that the name sets
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
FAMILIES: tuple[type[Strategy], ...] = tuple(dict.fromkeys(family for family, _ in NAMES.values()))


def named(name: str, knobs: dict[str, object]) -> Strategy:
    """The strategy of a published name with these knobs, as plan.json writes them.

    Raises SpecError if the name or a knob is unknown, or a value has the wrong type.
    """
    if name not in NAMES:
        raise SpecError(f"there is no strategy {name!r}; use one of {', '.join(NAMES)}")
    family, preset = NAMES[name]
    annotations = {f.name: str(f.type) for f in fields(family)}
    values = dict(preset)
    for knob, value in knobs.items():
        if knob not in annotations:
            raise SpecError(f"{name} has no knob {knob!r}; its knobs are {', '.join(annotations)}")
        if annotations[knob] == "Bytes":
            if (size := read_size(value)) is None:
                raise SpecError(
                    f"{name}: {knob} is a size such as '2GB' or a number of bytes, not {value!r}"
                )
            values[knob] = size
        elif annotations[knob].startswith("tuple") and isinstance(value, str):
            if (numbers := read_list(value)) is None:
                raise SpecError(
                    f"{name}: {knob} is a list such as (2, 1) or '4x8' (eight times 4), not"
                    f" {value!r:.80}"
                )
            values[knob] = numbers
        elif not _suits(value, annotations[knob]):
            raise SpecError(f"{name}: {knob} is {annotations[knob]}, not {value!r}")
        else:  # JSON has lists where knobs are tuples
            values[knob] = tuple(value) if isinstance(value, list) else value
    return family(**values)


def _suits(value: object, annotation: str) -> bool:
    """Whether a value fits a knob's annotation, such as 'int | None' or 'tuple[int, ...]'.

    >>> _suits(3, "float"), _suits(True, "int"), _suits(None, "int | None")
    (True, False, True)
    >>> _suits([1, 2], "tuple[int, ...] | None")
    True
    """
    if value is None:
        return "None" in annotation
    kind = annotation.split(" | ")[0]
    if kind.startswith("tuple"):
        return isinstance(value, (list, tuple)) and all(type(item) is int for item in value)
    return type(value).__name__ == kind or (kind == "float" and type(value) is int)


def parse(text: str) -> Strategy:
    """The strategy that a text such as 'gnnpipe(stages=4,chunks=16)' names. Raises SpecError.

    `parse(str(strategy)) == strategy` holds for every strategy.

    >>> str(parse("pipegcn")), str(parse("gnnpipe(stages=4, chunks=16, period=23)"))
    ('pipegcn', 'gnnpipe(stages=4,chunks=16)')
    >>> parse("gsplit(cache='2.5GB')").knobs()["cache"]
    2500000000
    """
    return named(*parse_call(text))
