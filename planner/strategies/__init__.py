"""Parallel training strategies: the bytes, memory and seconds that each needs for an epoch.

    base.py         Strategy, the base class
    program/        a program lists the operations of all ranks; bytes, seconds, memory and tasks
                    are computed from the list
    layerwise/      full graph, layer by layer: graph parallelism and PipeGCN, GraNNDis, offload
    gnnpipe.py      full graph, layers in a pipeline: GNNPipe
    minibatch/      mini-batches: data parallelism, GSplit, P3; places of features and lists

docs/explanation/cost-model.md says which file computes which use of memory. The memory of servers
is in minibatch/on_batches.py and layerwise/offload.py.

This package imports vocabulary, cluster, gnn, graph, ownership and problem. A new family needs one
file here, one file in executor/strategies, and its class in FAMILIES; tests read FAMILIES. Another
package adds a family by an entry point of the group gnnplan.strategies (docs/how-to/extend.md).
"""

from __future__ import annotations

from dataclasses import fields
from functools import cache
from importlib.metadata import entry_points

from gnnplan.planner.strategies.base import Example as Example
from gnnplan.planner.strategies.base import Strategy as Strategy
from gnnplan.planner.strategies.gnnpipe import GNNPipe as GNNPipe
from gnnplan.planner.strategies.layerwise.bns import BNS as BNS
from gnnplan.planner.strategies.layerwise.exchange import Crossing as Crossing
from gnnplan.planner.strategies.layerwise.exchange import ExchangeOptions as ExchangeOptions
from gnnplan.planner.strategies.layerwise.exchange import Policy as Policy
from gnnplan.planner.strategies.layerwise.feature_parallel import (
    FeatureParallel as FeatureParallel,
)
from gnnplan.planner.strategies.layerwise.granndis import GraNNDis as GraNNDis
from gnnplan.planner.strategies.layerwise.graph_parallel import GraphParallel as GraphParallel
from gnnplan.planner.strategies.layerwise.graph_parallel import OnParts as OnParts
from gnnplan.planner.strategies.layerwise.offload import Offload as Offload
from gnnplan.planner.strategies.layerwise.tensor3d import Tensor3D as Tensor3D
from gnnplan.planner.strategies.minibatch.data_parallel import DataParallel as DataParallel
from gnnplan.planner.strategies.minibatch.gsplit import GSplit as GSplit
from gnnplan.planner.strategies.minibatch.p3 import P3 as P3
from gnnplan.planner.strategies.program.account import Prediction as Prediction
from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.planner.vocabulary.files import meant, suggest
from gnnplan.planner.vocabulary.text import parse_call, read_list, read_size

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
# published name -> its family, and the knobs that the name sets
Names = dict[str, tuple[type[Strategy], dict[str, object]]]
ENTRY_POINTS = "gnnplan.strategies"  # group of entry points, each: family name = module:Class


@cache
def families() -> tuple[type[Strategy], ...]:
    """Return FAMILIES, then the families of installed packages in the order of their names.

    Raises SpecError if a package's family cannot be loaded or breaks a rule.
    """
    found = list(FAMILIES)
    for point in sorted(entry_points(group=ENTRY_POINTS), key=lambda point: point.name):
        subject = (
            f"the strategy {point.name} of the package {point.dist.name if point.dist else ''}"
        )
        try:
            family = point.load()
        except Exception as error:
            raise SpecError(
                f"{subject} cannot be loaded ({type(error).__name__}: {error}); fix or uninstall it"
            ) from error
        if not (isinstance(family, type) and issubclass(family, Strategy)):
            raise SpecError(f"{subject} is {point.value}, which is no class of a Strategy")
        if not all(isinstance(knob.type, str) for knob in fields(family)):
            raise SpecError(f"{subject} needs 'from __future__ import annotations' in its file")
        if "executor" not in vars(family):  # else it would train as the class that it derives from
            raise SpecError(f"{subject} names no executor of its own (Strategy.executor)")
        used_names = {name for other in found for name in [other.family, *other.names]}
        if duplicates := used_names & {family.family, *family.names}:
            raise SpecError(f"{subject} has a name that is taken: {', '.join(sorted(duplicates))}")
        found.append(family)
    return tuple(found)


def names() -> Names:
    """Return a dict: published name -> its family, and the knobs that the name sets.

    Raises SpecError as `families` does.
    """
    return _names(families())


def _names(families: tuple[type[Strategy], ...]) -> Names:
    return {
        name: (family, dict(knobs))
        for family in families
        for name, knobs in {family.family: {}, **family.names}.items()
    }


OWN_NAMES = _names(FAMILIES)  # read first, because a search for packages takes 0.05 s per rank


def named(name: str, knobs: dict[str, object]) -> Strategy:
    """Return the strategy with a published name and these knobs, written as in plan.json.

    Raises SpecError if the name or a knob is unknown, or a value has the wrong type.
    """
    known = OWN_NAMES if meant(str(name), OWN_NAMES) in OWN_NAMES else names()
    if (found := meant(str(name), known)) not in known:
        raise SpecError(f"there is no strategy {name!r:.100}{suggest(name, known)}")
    family, preset = known[found]
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
    """Return whether a value fits a knob's annotation, such as 'int | None' or 'tuple[int, ...]'.

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
    """Return the strategy that a text such as 'gnnpipe(stages=4,chunks=16)' describes.

    `parse(str(strategy)) == strategy` holds for every strategy. Raises SpecError.

    >>> str(parse("pipegcn")), str(parse("gnnpipe(stages=4, chunks=16, period=23)"))
    ('pipegcn', 'gnnpipe(stages=4,chunks=16)')
    >>> parse("gsplit(cache='2.5GB')").knobs()["cache"]
    2500000000
    """
    return named(*parse_call(text))
