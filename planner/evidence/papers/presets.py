"""Presets of papers' testbeds with the constants that were fitted to their printed figures.

A preset file holds datasheet values, from which calibrate.py fits factors. `validate --published`
starts from the files; `plan` takes a preset from here, so that it knows what print has shown.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator

from gnnplan.planner.cluster.spec import PRESETS, Cluster
from gnnplan.planner.problem.inputs import read_cluster


def read_fitted(name: str, model: str) -> tuple[Cluster, str]:
    """A cluster by its preset's name or its file, and a note on what was fitted ('': nothing).

    The factors of a preset's testbed are applied to its numbers, and `provenance` says so. `model`
    is the GNN: one testbed has a factor for GraphSAGE. Files are read as they are.

    Raises SpecError.
    """
    plain = read_cluster(name)
    if name == "local" or not (PRESETS / f"{name}.yaml").exists():
        return plain, ""
    # imported here: SciPy takes long, and most plans need none of it
    from gnnplan.planner.evidence.papers.calibrate import (
        SAME,
        TESTBED_CONSTANTS,
        calibrated,
        kept_factors,
    )

    factors = {
        constant: factor
        for constant, factor in kept_factors().get(SAME.get(name, name), {}).items()
        if constant in TESTBED_CONSTANTS or constant == model
    }
    if not factors:
        return plain, ""
    rows, sources = _origin(SAME.get(name, name))
    fitted = calibrated({"testbed": name, "model": model})
    provenance = dict(plain.provenance)
    for field, ratio in _changed(plain, fitted):
        before = f"{provenance[field]}, " if field in provenance else ""
        provenance[field] = f"{before}x {ratio:.3g} fitted to {rows} printed figures ({sources})"
    told = ", ".join(f"{constant} x {factor:.3g}" for constant, factor in factors.items())
    note = (
        f"{name} has constants fitted to {rows} printed figures ({sources}): {told};"
        f" --cluster {PRESETS / f'{name}.yaml'} plans with datasheet values"
    )
    return fitted.model_copy(update={"provenance": provenance}), note


def _origin(testbed: str) -> tuple[int, str]:
    """How many figures, of which tables, gave a testbed its constants."""
    from gnnplan.planner.evidence.papers.calibrate import FITTED

    with FITTED.open(newline="", encoding="utf-8") as file:
        line = next(line for line in csv.DictReader(file) if line["testbed"] == testbed)
    return int(line["rows"]), line["sources"]


def _changed(plain: Cluster, fitted: Cluster) -> Iterator[tuple[str, float]]:
    """Every number that the factors changed, as a dotted field, and by how much."""
    before, after = plain.model_dump(), fitted.model_dump()
    for part in ("device", "intra_node", "inter_node", "island", "switch", "host", "host_rates"):
        old, new = before[part] or {}, after[part] or {}
        for field, value in new.items():
            known = old.get(field)
            if isinstance(value, float) and isinstance(known, float) and known and value != known:
                yield f"{part}.{field}", value / known
