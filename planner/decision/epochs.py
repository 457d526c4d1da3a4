"""How many epochs a training has: as it is asked for, or as such trainings had in print.

Epochs of the full graph and of mini-batches are not comparable, whole trainings are. Print says
what people trained (traces/quoted/epochs.csv), not what an accuracy needs: runs tell that
(objective.Target).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gnnplan.planner.cluster.doubt import normals
from gnnplan.planner.gnn.workload import Workload
from gnnplan.planner.problem.inputs import checked
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.vocabulary.files import quoted

MODES = {"full": "the full graph", "mini": "mini-batches"}
ENOUGH = 3  # trainings in print that tell how far others are from them


@dataclass(frozen=True)
class Epochs:
    """How many epochs are counted, and who says so."""

    usual: float
    spread: float  # standard deviation of its logarithm; 0: nothing is in doubt
    source: str  # equal ones draw equal numbers

    @cached_property
    def drawn(self) -> NDArray[np.float64]:
        """In each draw [DRAWS]; at least one."""
        factors = np.exp(self.spread * normals(f"epochs {self.source}"))
        return np.maximum(1.0, self.usual * factors)

    @property
    def range(self) -> str:
        """The range that holds 80 % of the draws."""
        return "{:.0f}-{:.0f}".format(*np.quantile(self.drawn, (0.1, 0.9)))

    def __str__(self) -> str:
        """As '200 (as --epochs asks)' or '500 (160-1600; printed of other graphs)'."""
        low_to_high = f"{self.range}; " if self.spread else ""
        return f"{self.usual:.0f} ({low_to_high}{self.source})"


ONE = Epochs(1.0, 0.0, "an epoch")


def stated(graph: str, asked: int | None, mode: str | None) -> Mapping[str, Epochs]:
    """Return the epochs of each mode, of a graph by its name.

    asked: for `mode`; or of the full graph, where mini-batches have as many fewer as in print.
    """
    printed = {name: _printed(graph, name) for name in MODES}
    if asked is None:
        return printed
    given = mode or "full"
    ratio, told = asked / printed[given].usual, f"as many as in print for --epochs {asked}"
    in_print = {
        name: Epochs(max(1.0, round(ratio * one.usual)), one.spread, f"{one.source}, {told}")
        for name, one in printed.items()
    }
    return {**in_print, given: Epochs(float(asked), 0.0, "as --epochs asks")}


def _printed(graph: str, mode: str) -> Epochs:
    rows = [row for row in quoted("epochs.csv") if row["mode"] == mode]
    own = [row for row in rows if row["graph"] == graph]
    logs, all_logs = (np.log([float(row["epochs"]) for row in of]) for of in (own or rows, rows))
    spread = (logs if logs.size >= ENOUGH else all_logs).std(ddof=1)
    source = f"printed of {MODES[mode]} of {graph if own else 'other graphs'}"
    return Epochs(float(round(np.exp(logs.mean()))), float(spread), source)


def with_fields(problem: Problem, **fields: Any) -> Problem:
    """The problem with these fields of its workload. Raises SpecError where they do not suit."""
    changed = problem.workload.model_dump() | fields
    return replace(problem, workload=checked(Workload, changed, "", list(fields)))
