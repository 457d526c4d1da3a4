"""The strategies: what each does to bytes, memory and seconds of a training epoch.

    base.py         what every strategy answers
    program/        what ranks do, written once; bytes, seconds and tasks are read from it
    layerwise/      full graph, layer by layer: graph parallelism and PipeGCN, GraNNDis, offload
    gnnpipe/        full graph, layers in a pipeline: GNNPipe
    minibatch/      mini-batches: data parallelism, GSplit; where features and adjacency lists are
    p3/             mini-batches with layer 1 on feature columns: P3

Where a figure of memory comes from, by its use:

    parameters, optimizer, runtime    program/memory.py
    communicators                     program/memory.py
    activations, and what operations need besides (in buffers)
        of a layer itself             planner/gnn/footprint.py
        around it                     FOLDER/memory.py; layerwise/chunked.py (offload),
                                      layerwise/columns.py, layerwise/tiles.py (tensor3d)
    what stays (features, graph ..)   `memory` in FOLDER/memory.py, or beside the knobs
    a server's                        minibatch/host_memory.py, layerwise/offload.py

This room imports vocabulary, cluster, gnn, graph, ownership and problem. A new family is one file
here, one file in executor/strategies, and its class in FAMILIES; tests find it there. A package of
somebody else's adds one by an entry point of the group gnnplan.strategies (docs/how-to/extend.md).
"""

from __future__ import annotations

from dataclasses import fields
from functools import cache
from importlib.metadata import entry_points

from gnnplan.planner.strategies.base import Example as Example
from gnnplan.planner.strategies.base import Strategy as Strategy
from gnnplan.planner.strategies.gnnpipe.gnnpipe import GNNPipe as GNNPipe
from gnnplan.planner.strategies.layerwise.bns import BNS as BNS
from gnnplan.planner.strategies.layerwise.exchange import Crossing as Crossing
from gnnplan.planner.strategies.layerwise.exchange import ExchangeOptions as ExchangeOptions
from gnnplan.planner.strategies.layerwise.exchange import Policy as Policy
from gnnplan.planner.strategies.layerwise.feature_parallel import (
    FeatureParallel as FeatureParallel,
)
from gnnplan.planner.strategies.layerwise.granndis import GraNNDis as GraNNDis
from gnnplan.planner.strategies.layerwise.graph_parallel import GraphParallel as GraphParallel
from gnnplan.planner.strategies.layerwise.offload import Offload as Offload
from gnnplan.planner.strategies.layerwise.on_parts import OnParts as OnParts
from gnnplan.planner.strategies.layerwise.tensor3d import Tensor3D as Tensor3D
from gnnplan.planner.strategies.minibatch.data_parallel import DataParallel as DataParallel
from gnnplan.planner.strategies.minibatch.gsplit import GSplit as GSplit
from gnnplan.planner.strategies.p3.p3 import P3 as P3
from gnnplan.planner.strategies.program.account import Prediction as Prediction
from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.planner.vocabulary.knobs import parse_call, read_list, read_size

FAMILIES: tuple[type[Strategy], ...] = (
    GraphParallel,
    GNNPipe,
    GraNNDis,
    BNS,
    FeatureParallel,
    Tensor3D,
    Offload,
    DataParallel,
    GSplit,
    P3,
)
ENTRY_POINTS = "gnnplan.strategies"  # of installed packages: a family's name = module:Class


@cache
def families() -> tuple[type[Strategy], ...]:
    """Ours, then those of installed packages by their names. Raises SpecError."""
    found = list(FAMILIES)
    for point in sorted(entry_points(group=ENTRY_POINTS), key=lambda point: point.name):
        whose = f"the strategy {point.name} of the package {point.dist.name if point.dist else ''}"
        try:
            family = point.load()
        except Exception as error:
            raise SpecError(
                f"{whose} cannot be loaded ({type(error).__name__}: {error}); mend or uninstall it"
            ) from error
        if not (isinstance(family, type) and issubclass(family, Strategy)):
            raise SpecError(f"{whose} is {point.value}, which is no class of a Strategy")
        if not all(isinstance(knob.type, str) for knob in fields(family)):
            raise SpecError(f"{whose} needs 'from __future__ import annotations' in its file")
        if "executor" not in vars(family):  # else it would train as the class that it derives from
            raise SpecError(f"{whose} names no executor of its own (Strategy.executor)")
        taken = {name for other in found for name in [other.family, *other.names]}
        if twice := taken & {family.family, *family.names}:
            raise SpecError(f"{whose} has a name that is taken: {', '.join(sorted(twice))}")
        found.append(family)
    return tuple(found)


def names() -> dict[str, tuple[type[Strategy], dict[str, object]]]:
    """Published name -> its family, and the knobs that the name sets. Raises SpecError."""
    return _names(families())


def _names(
    families: tuple[type[Strategy], ...],
) -> dict[str, tuple[type[Strategy], dict[str, object]]]:
    return {
        name: (family, dict(knobs))
        for family in families
        for name, knobs in {family.family: {}, **family.names}.items()
    }


OWN_NAMES = _names(FAMILIES)  # to look for packages takes a rank's start a twentieth of a second


def named(name: str, knobs: dict[str, object]) -> Strategy:
    """The strategy of a published name with these knobs, as plan.json writes them.

    Raises SpecError if the name or a knob is unknown, or a value has the wrong type.
    """
    if name not in OWN_NAMES and name not in names():
        raise SpecError(f"there is no strategy {name!r}; use one of {', '.join(names())}")
    family, preset = OWN_NAMES.get(name) or names()[name]
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
    kinds = annotation.split(" | ")
    if kinds[0].startswith("tuple"):
        return isinstance(value, (list, tuple)) and all(type(item) is int for item in value)
    return type(value).__name__ in kinds or (kinds[0] == "float" and type(value) is int)


def parse(text: str) -> Strategy:
    """The strategy that a text such as 'gnnpipe(stages=4,chunks=16)' names. Raises SpecError.

    `parse(str(strategy)) == strategy` holds for every strategy.

    >>> str(parse("pipegcn")), str(parse("gnnpipe(stages=4, chunks=16, period=23)"))
    ('pipegcn', 'gnnpipe(stages=4,chunks=16)')
    >>> parse("gsplit(cache='2.5GB')").knobs()["cache"]
    2500000000
    """
    return named(*parse_call(text))
