"""Test cases of a module whose layers' rows meet at the end, without a library that it is from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from gnnplan.executor.layers.models import Net
from gnnplan.executor.modules import live
from gnnplan.executor.modules.parameters import Parameters, Where
from gnnplan.planner.gnn.model import describe
from gnnplan.planner.gnn.workload import Jump, Module, ModuleLayer, Workload
from gnnplan.testing.ranks import Case


def jumping(case: Case, folder: Path, widths: Sequence[int], jump: Jump) -> Case:
    """The case with a module of its kind of layers, which have these widths.

    Its parameters are those that our Net draws."""
    stats = case.problem(case.servers).stats
    given = case.workload | {"layers": len(widths), "hidden": widths[0]}
    heads = given.get("heads", 1) if given["model"] in ("gat", "gatv2") else 0
    layers = tuple(
        ModuleLayer(h_in=h_in, h_out=h_out, heads=heads)
        for h_in, h_out in pairwise([stats.features, *widths])
    )

    def workload(parameters: Parameters) -> Workload:
        file, sha256 = live.keep(parameters, folder, "jumping")
        module = Module(
            file=str(file),
            name="M",
            sha256=sha256,
            features=stats.features,
            classes=stats.classes,
            layers=layers,
            jump=jump,
        )
        return Workload(**given, module=module)

    drawn = workload(Parameters({}, {}))
    state = Net(describe(drawn, stats.features, stats.classes), drawn).state_dict()
    places = {name: (Where(name),) for name in state}
    return replace(case, workload=workload(Parameters(state, places)).model_dump(mode="json"))
