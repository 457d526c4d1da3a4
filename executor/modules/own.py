"""The Net of any workload, and models of layers that the user wrote: a layers.Layer in a file.

`with_user_model` counts the work of the layers (layers/count.py) and adds it to the workload, which
is then planned. Each rank makes the layers again from the file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gnnplan.executor.layers.blocks import dtype_of
from gnnplan.executor.layers.count import Unmeasured, count, must_sum_columns
from gnnplan.executor.layers.layer import EDGES, Layer
from gnnplan.executor.layers.models import Net
from gnnplan.executor.modules.make import as_planned, in_file, make, source_of
from gnnplan.executor.modules.read import Source, read_again, with_user_module
from gnnplan.planner.gnn.model import Model
from gnnplan.planner.gnn.workload import Module, ModuleLayer, Workload
from gnnplan.planner.graph.fields import unread_by
from gnnplan.planner.problem.inputs import checked
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.vocabulary.errors import SpecError


def with_user_model(
    problem: Problem,
    model: Source,
    given: Iterable[str] = (),
    folder: Path | None = None,
    more: Mapping[str, Any] | None = None,
) -> tuple[Problem, list[str]]:
    """Return the problem with the user's model, and notes.

    The model is a torch module, or a class of layers.Layer: `FILE.py:NAME`, of which the workload's
    `layers` and `hidden` give the number and the width. model, given, folder, more: see
    modules.read.with_user_module. Raises SpecError."""
    if not names_layer(model, problem.workload.seed):
        return with_user_module(problem, model, given, folder, more)
    stats = problem.stats
    if why := problem.model.inputs.why_unsummed:
        raise SpecError(f"{model}: a layer of your own reads whole rows, and of {stats.name} {why}")
    workload = own_layers(problem.workload, str(model), stats.features, stats.classes)
    if more:
        workload = checked(Workload, workload.model_dump() | dict(more), "--", [*more])
    return replace(problem, workload=workload), unread_by(str(model), problem.graph)


def names_layer(model: Source, seed: int) -> bool:
    """Whether a model is `FILE.py:NAME` of a class of layers. Raises SpecError for a live one."""
    if not isinstance(model, str):
        kind = model if isinstance(model, type) else type(model)
        if issubclass(kind, Layer):
            raise SpecError(
                f"every rank makes its own {kind.__name__}; name the file that it is in, as"
                f" 'layer.py:{kind.__name__}'"
            )
        return False
    file, name, _ = source_of(model)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        found = in_file(file, name)
    return isinstance(found, type) and issubclass(found, Layer)


def own_layers(workload: Workload, model: str, features: int, classes: int) -> Workload:
    """Return the workload with layers of the user's class and their work. Raises SpecError."""
    if workload.norm not in (None, "none"):
        raise SpecError(
            f"norm: {model} is a layer of your own, which norms in its prepare or update (norm:"
            f" {workload.norm}); leave norm out"
        )
    file, name, sha256 = source_of(model)
    module = Module(
        file=str(file),
        name=name,
        sha256=sha256,
        features=features,
        classes=max(classes, 1),
        layers=tuple(
            ModuleLayer(h_in=h_in, h_out=h_out)
            for h_in, h_out in pairwise(
                [features, *[workload.hidden] * (workload.layers - 1), max(classes, 1)]
            )
        ),
    )
    given = workload.model_dump() | {"module": module.model_dump()}
    asked = Workload.model_validate(
        given | {"model": "own", "norm": "none", "hidden": module.layers[0].h_out}
    )
    counted: dict[tuple[int, int, bool, bool], ModuleLayer] = {}
    layers = []
    for number, shape in enumerate(module.layers, 1):
        varies, relu = number > 1, number < len(module.layers)
        key = shape.h_in, shape.h_out, varies, relu
        if key not in counted:
            counted[key] = _counted(asked, number, shape, varies, relu)
        layers.append(counted[key])
    return asked.model_copy(update={"module": module.model_copy(update={"layers": tuple(layers)})})


def _counted(
    workload: Workload, number: int, shape: ModuleLayer, varies: bool, relu: bool
) -> ModuleLayer:
    """Return a layer of this shape with its counted work. Raises SpecError."""
    dtype = dtype_of(workload.precision.weights)
    where = f"{workload.own.file}: {workload.own.name}"
    layer = made(workload, number, shape.h_in, shape.h_out).to(dtype)
    _must_be_whole(layer, where)
    cut = shape.h_in // 2 if number == 1 and _has_calls_of_p3(layer) else 0
    try:
        found = count(layer, shape.h_in, shape.h_out, relu, varies, dtype)
        half = None
        if cut:
            must_sum_columns(layer, shape.h_in, shape.h_out, relu, dtype)
            sliced = made(workload, number, cut, shape.h_out).to(dtype)
            half = count(sliced, cut, shape.h_out, relu, varies, dtype)
    except Unmeasured as error:
        raise SpecError(f"{where}: {error}") from error
    except Exception as error:
        words = (str(error).strip().splitlines() or [""])[0]
        raise SpecError(
            f"{where}: layer {number} of {shape.h_in} -> {shape.h_out} numbers fails on a small"
            f" block ({type(error).__name__}: {words:.200})"
        ) from error
    return shape.model_copy(update={"counted": found, "half": half})


def _must_be_whole(layer: Layer, where: str) -> None:
    """Raise SpecError if the class lacks an attribute or method that every layer needs."""
    edges = getattr(layer, "edges", None)
    if edges not in EDGES:
        raise SpecError(
            f"{where}: edges must be one of {', '.join(map(repr, EDGES))}, not {edges!r}"
        )
    called = ["update", *(["project"] if layer.projects_first else [])]
    missing = [name for name in called if getattr(type(layer), name) is getattr(Layer, name)]
    if missing:
        raise SpecError(
            f"{where} has no {' and no '.join(missing)}; docs/how-to/bring-your-model.md shows a"
            " layer of your own"
        )


def _has_calls_of_p3(layer: Layer) -> bool:
    """Whether the class has the methods of layers.ColumnLayer."""
    has = [getattr(type(layer), name, None) for name in ("scatter", "transform", "apply")]
    return bool(layer.by_columns) and not {None, nn.Module.apply} & {*has}


def made(workload: Workload, number: int, h_in: int, h_out: int) -> Layer:
    """Make layer `number` of the user's class, with random numbers from (seed, number).

    Raises SpecError if the file has changed since the plan."""
    module = workload.own
    file = Path(module.file)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(workload.seed * 1_000_003 + number)
        layer, _ = make(
            class_in(file, module.name, module.sha256), module.name, file, workload, h_in, h_out
        )
    if not isinstance(layer, Layer):
        raise SpecError(f"{file}: {module.name} makes a {type(layer).__name__}, and no Layer")
    return layer


@lru_cache(maxsize=2)
def class_in(file: Path, name: str, sha256: str) -> object:
    """Return the class in a file. Raises SpecError if the file's SHA-256 is another one."""
    as_planned(file, sha256)
    return in_file(file, name)


def net_of(shapes: Model, workload: Workload, which: range | None = None) -> Net:
    """Return the layers `which` (None: all): built-in, of the user's class, or of their module."""
    if workload.is_module:
        return read_again(workload).net(shapes, workload, which)
    if workload.model != "own":
        return Net(shapes, workload, which)

    def layer(number: int) -> Layer:
        shape = shapes.layers[number - 1]
        return made(workload, number, shape.h_in, shape.h_out)

    return Net(shapes, workload, which, layer)
