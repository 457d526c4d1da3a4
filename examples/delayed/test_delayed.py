"""delayed(r): what every strategy is held to, and its recursion written plainly in one process."""

from pathlib import Path

import numpy as np
import pytest
import torch
from gnnplan_delayed import Delayed
from torch import Tensor

from gnnplan.planner.strategies import parse
from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.testing.kit import *  # noqa: F403
from gnnplan.testing.kit import SMALL
from gnnplan.testing.plain import Plain
from gnnplan.testing.ranks import Case, Ranks

FAMILY = Delayed
PAGE = Path(__file__).with_name("README.md")


class Delaying(Plain):
    """Rows of other parts are this step's for fresh vertices, else those of their last fresh step,
    zero before it. The gradients that they get go home at once for fresh vertices, and are added
    again until the next ones come."""

    def __init__(self, case: Case, owner: np.ndarray) -> None:
        super().__init__(case)
        same, n = torch.from_numpy(owner[:, None] == owner[None, :]), len(owner)
        self.edges = torch.cat([self.operator * same, self.operator * ~same], 1)
        layers = [layer for layer in range(1, self.layers + 1) if self.varies(layer)]
        width = case.problem(1).model.input_width
        self.kept = {layer: torch.zeros(n, width(layer), dtype=torch.float64) for layer in layers}
        self.home = {layer: torch.zeros_like(rows) for layer, rows in self.kept.items()}
        far = self.edges[:, n:] != 0  # [reader, row]
        parts = [far[torch.from_numpy(owner == part)].any(0) for part in np.unique(owner)]
        self.readers = torch.stack(parts).sum(0)[:, None]  # other parts that read a row
        self.errors: dict[str, list[float]] = {f"f:l{layer}": [] for layer in layers}

    def loss_at(self, step: int, fresh: Tensor) -> Tensor:
        """The loss of a step, after which the weights have moved."""
        crossed: dict[int, Tensor] = {}

        def read(layer: int, h: Tensor) -> tuple[Tensor, Tensor]:
            if layer not in self.kept:
                return self.operator, self.prepare(layer, step, h)
            crossed[layer] = torch.where(fresh, h, self.kept[layer])
            crossed[layer].retain_grad()
            gap = (crossed[layer] - h).detach()
            self.errors[f"f:l{layer}"].append(float((gap.square() * self.readers).sum()))
            return self.edges, self.prepare(layer, step, h, crossed[layer])

        logits, rows = self.forward(step, read)
        loss = self.loss(logits)
        stays = (rows[layer - 1] * home * ~fresh for layer, home in self.home.items())
        self.descend(loss + sum(each.sum() for each in stays))
        self.kept = {layer: each.detach() for layer, each in crossed.items()}
        for layer, each in crossed.items():
            self.home[layer] = torch.where(fresh, each.grad, self.home[layer])
        return loss


def recursion(case: Case, owner: np.ndarray) -> tuple[list[float], dict[str, Tensor]]:
    plain, r = Delaying(case, owner), parse(case.strategy).knobs()["r"]
    ids = torch.arange(len(owner))[:, None]
    losses = [plain.loss_at(step, ids % r == step % r).item() for step in range(case.epochs)]
    return losses, plain.state


@pytest.mark.parametrize("knobs", ["", ",checkpoint=True", ",bits=4"])
def test_refreshed_in_every_epoch_it_is_graph_parallelism_to_the_bit(
    run_ranks: Ranks, graphs: dict[str, str], knobs: str
) -> None:
    ours, plain = run_ranks(
        3,
        [
            Case(strategy, graphs["rough"], {**SMALL, "model": "sage"})
            for strategy in (f"delayed(r=1{knobs})", f"graph_parallel(staleness=0{knobs})")
        ],
    )
    assert ours.losses == plain.losses and ours.rank(0)["bytes"] == plain.rank(0)["bytes"]
    assert all(torch.equal(p, plain.weights[name]) for name, p in ours.weights.items())


def test_how_far_rows_are_that_stay_is_recorded(run_ranks: Ranks, graphs: dict[str, str]) -> None:
    """Used minus true, of every layer and step over both ranks: --staleness-errors left nothing of
    rows that stay. The rows that cross for it are not counted, and change nothing."""
    fields = {**SMALL, "model": "gcn", "dtype": "float64"}
    case, watched = (
        Case("delayed(r=3)", graphs["rough"], fields, staleness_errors=on) for on in (False, True)
    )
    plain, result = run_ranks(2, [case, watched])
    assert result.losses == plain.losses and result.rank(0)["bytes"] == plain.rank(0)["bytes"]
    left = [result.rank(rank)["staleness"] for rank in range(2)]
    owner = case.problem(2).layout().owner
    delaying, ids = Delaying(case, owner), torch.arange(len(owner))[:, None]
    for step in range(case.epochs):
        delaying.loss_at(step, ids % 3 == step % 3)
    for key, steps in delaying.errors.items():
        ours = [sum(rank[key][step][0] for rank in left) for step in range(case.epochs)]
        assert ours == pytest.approx(steps, rel=1e-9) and min(steps) > 0
        assert all(rank[key.replace("f", "b", 1)][-1][0] > 0 for rank in left)


@pytest.mark.parametrize(
    ("strategy", "words"), [("delayed(r=0)", "r is at least 1"), ("delayed(bits=3)", "8, 4 or 2")]
)
def test_what_does_not_suit_is_refused(graphs: dict[str, str], strategy: str, words: str) -> None:
    case = Case(strategy, graphs["rough"], {**SMALL, "model": "gcn"})
    with pytest.raises(SpecError, match=words):
        case.settled(case.problem(2))
