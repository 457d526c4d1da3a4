"""The number of epochs of a training: as --epochs asks, or as similar trainings had in papers.

Epochs of the full graph and of mini-batches are not comparable; whole trainings are. Papers say how
many epochs people trained (traces/quoted/epochs.csv), not how many an accuracy needs: runs show
that (objective.Target).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gnnplan.planner.cluster.doubt import normals
from gnnplan.planner.gnn.workload import Workload
from gnnplan.planner.problem.inputs import checked
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.vocabulary.files import quoted

MODES = {"full": "the full graph", "mini": "mini-batches"}
ENOUGH = 3  # least number of printed trainings from which their spread is estimated


@dataclass(frozen=True)
class Epochs:
    """A number of epochs, with its uncertainty and its source."""

    usual: float
    spread: float  # standard deviation of log(epochs); 0: certain
    source: str  # seeds the draws: equal sources draw equal numbers

    @property
    def drawn(self) -> NDArray[np.float64]:
        """The number of epochs in each draw [DRAWS]; at least 1."""
        factors = np.exp(self.spread * normals(f"epochs {self.source}"))
        return np.maximum(1.0, self.usual * factors)

    @property
    def range(self) -> str:
        """The range that holds 80 % of the draws."""
        return "{:.0f}-{:.0f}".format(*np.quantile(self.drawn, (0.1, 0.9)))

    def __str__(self) -> str:
        """Return '200 (as --epochs asks)' or '500 (160-1600; printed of other graphs)'."""
        low_to_high = f"{self.range}; " if self.spread else ""
        return f"{self.usual:.0f} ({low_to_high}{self.source})"


ONE = Epochs(1.0, 0.0, "an epoch")


def stated(graph: str, asked: int | None, mode: str | None) -> Mapping[str, Epochs]:
    """Return the epochs of each mode for a graph of this name.

    asked: the number of epochs for `mode`, by default for the full graph. The other mode then has
    epochs in the same ratio as in papers.
    """
    printed = {name: _printed(graph, name) for name in MODES}
    if asked is None:
        return printed
    asked_mode = mode or "full"
    ratio, note = asked / printed[asked_mode].usual, f"as many as in print for --epochs {asked}"
    scaled = {
        name: Epochs(max(1.0, round(ratio * each.usual)), each.spread, f"{each.source}, {note}")
        for name, each in printed.items()
    }
    return {**scaled, asked_mode: Epochs(float(asked), 0.0, "as --epochs asks")}


def _printed(graph: str, mode: str) -> Epochs:
    """Return the geometric mean of printed trainings, of the graph itself if there are any."""
    rows = [row for row in quoted("epochs.csv") if row["mode"] == mode]
    own = [row for row in rows if row["graph"] == graph]
    logs, all_logs = (np.log([float(row["epochs"]) for row in of]) for of in (own or rows, rows))
    spread = (logs if logs.size >= ENOUGH else all_logs).std(ddof=1)
    source = f"printed of {MODES[mode]} of {graph if own else 'other graphs'}"
    return Epochs(float(round(np.exp(logs.mean()))), float(spread), source)


def with_fields(problem: Problem, **fields: Any) -> Problem:
    """Return the problem with some fields of its workload replaced. Raises SpecError."""
    changed = problem.workload.model_dump() | fields
    return replace(problem, workload=checked(Workload, changed, "", list(fields)))
