"""`check`: compare each strategy's gradients with one process's, on a small graph."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gnnplan.api.arguments import typed
from gnnplan.api.view import View
from gnnplan.planner.vocabulary.text import Table, column, table

if TYPE_CHECKING:
    from gnnplan.executor.modules.read import Source


class Check(View):
    """The result of `check`: each strategy's gradients compared with those of one process."""

    def __init__(self, document: dict[str, Any]) -> None:
        differs = [one["strategy"] for one in document["strategies"] if one["answer"] == "differs"]
        self.document = {**document, "differs": differs}

    @property
    def ok(self) -> bool:
        """Whether every strategy that claims exact gradients has the gradients of one process."""
        return not self.differs

    @property
    def differs(self) -> list[str]:
        """The strategies that claim exact gradients and compute different ones."""
        return list(self.document["differs"])

    @property
    def table(self) -> list[dict[str, Any]]:
        """The rows of the comparison, one per strategy; pandas.DataFrame takes the list.

        answer: 'equal', 'differs', 'lossy' (inexact by design: `gap` is not judged) or 'cannot'
        (the strategy cannot train the model). reason: the answer in words; for 'cannot', what is
        missing. gap: the largest difference from the gradient of one process, as a share of the
        largest entry of the tensor."""
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


@typed
def check(
    model: Source, *, features: int | None = None, classes: int | None = None, **fields: Any
) -> Check:
    """Compare every strategy's gradients for a model with one process's, on a small graph.

    Each strategy trains one step in float64 on two ranks of this machine.

    Args:
        model: A built-in model ('gcn'), 'model.py:MyGNN', a live torch.nn.Module, its class, or a
            function that returns a module.
        features: Width of the small graph's features.  [default: the model's own, or 12]
        classes: Number of classes in the small graph.  [default: the model's own, or 4]
        fields: Fields of the Workload that the model's constructor takes (hidden=16).

    Raises:
        SpecError: The model cannot be read.
        LostRank: A worker process was lost.

    >>> gnnplan.check("gcn", layers=2, hidden=8)  # doctest: +SKIP
    """
    from gnnplan.executor.launch.check import compare

    given = {name: value for name, value in fields.items() if value is not None}
    name = model if isinstance(model, str) else getattr(model, "__name__", type(model).__name__)
    return Check({"model": name, **compare(model, given, features, classes)})
