"""`check`: which strategies give one process's gradients for a model, tried on a small graph."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gnnplan.api.view import View
from gnnplan.planner.vocabulary.table import Table, column, table

if TYPE_CHECKING:
    from gnnplan.executor.modules.read import Source


class Check(View):
    """The gradients of a model under every strategy, and the graph on which they were compared."""

    def __init__(self, document: dict[str, Any]) -> None:
        differs = [one["strategy"] for one in document["strategies"] if one["answer"] == "differs"]
        self.document = {**document, "differs": differs}

    @property
    def ok(self) -> bool:
        """Whether every strategy that says its gradient is exact has one process's."""
        return not self.differs

    @property
    def differs(self) -> list[str]:
        """Strategies that say their gradient is exact, and it is not one process's."""
        return list(self.document["differs"])

    @property
    def table(self) -> list[dict[str, Any]]:
        """A row per strategy; pandas.DataFrame takes it.

        answer: 'equal', 'differs', 'lossy' (by design: `gap` is not judged) or 'cannot' carry the
        model; reason: in words, of 'cannot' what is missing; gap: the largest difference from one
        process's gradient, as a share of the largest number in a tensor."""
        rows: list[dict[str, Any]] = self.document["strategies"]
        return rows

    def blocks(self) -> list[str | Table]:
        found, graph = self.document, self.document["graph"]
        told = found.get("module", "")
        proof = "outputs and gradients, in training and in evaluation, on two small graphs"
        equal = sum(row["answer"] == "equal" for row in self.table)
        return [
            *([f"proved: {told} ({proof})"] if told else []),
            table(
                f"gradients of {found['model']}, beside one process's",
                self.table,
                column("strategy"),
                column("gradient", "answer"),
                column("off by", "gap", "{:.0e}".format),
                column("why", "reason"),
            ),
            f"tried: one step on a generated graph of {graph['vertices']} vertices and"
            f" {graph['edges']} edges ({graph['features']} features, {graph['classes']} classes),"
            f" in {found['dtype']}, on {found['ranks']} CPU ranks over Gloo; equal in {equal} of"
            f" {len(self.table)}",
        ]


def check(
    model: Source, *, features: int | None = None, classes: int | None = None, **fields: Any
) -> Check:
    """Compare every strategy's gradients for a model with one process's, on a small graph.

    One step in float64 on two ranks of this machine.

    Args:
        model: A kind of ours ('gcn'), 'model.py:MyGNN', or a live torch.nn.Module, its class or a
            function that makes one.
        features: Columns of its graph.  [default: the model's own, or 12]
        classes: Classes of its graph.  [default: the model's own, or 4]
        fields: Of the Workload, where the model asks for them (hidden=16).

    Raises:
        SpecError: The model is not understood.
        LostRank: A process that does the work was lost.

    >>> gnnplan.check("gcn", layers=2, hidden=8)  # doctest: +SKIP
    """
    from gnnplan.executor.launch.launcher import compare

    given = {name: value for name, value in fields.items() if value is not None}
    with tempfile.TemporaryDirectory(prefix="gnnplan-check-") as folder:
        out, name = Path(folder), model
        question: dict[str, Any] = {"model": model, "fields": given}
        question |= {"features": features, "classes": classes}
        if not isinstance(model, str):
            from gnnplan.executor.launch.check import workload_of

            name = getattr(model, "__name__", type(model).__name__)
            workload = workload_of(model, given, features, classes, out)
            question = {"workload": workload.model_dump(mode="json")}
        (out / "question.json").write_text(json.dumps(question))
        return Check({"model": name, **compare(out)})
