"""P3 with a pipeline trains on weights exactly three updates old. Without it trains as one process does
(test_minibatch_exactness.py)."""

from dataclasses import replace

import pytest
import torch
from pairwise import covered
from test_minibatch_exactness import batches_of, workload
from torch import Tensor

from gnnplan.planner.strategies import parse
from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.testing.plain import Plain
from gnnplan.testing.ranks import Case
from gnnplan.testing.runs import must_have_learnt

pytestmark = pytest.mark.timeout(110)


def train_with_a_delay_of_three(case: Case) -> tuple[list[float], dict[str, Tensor]]:
    """w_{t+1} = w_t - lr grad f_t(w_{t-3}), the first four batches on the initial weights; losses
    as each batch saw them."""
    plain, losses, total = Plain(replace(case, servers=1)), [], 0.0
    history = [[p.detach().clone() for p in plain.w.values()]]  # w_0, w_1, ..
    for step, (share, loss_of, last) in enumerate(batches_of(plain, case.epochs)):
        plain.begin(len(losses))
        latest = [p.detach().clone() for p in plain.w.values()]
        for p, old in zip(plain.w.values(), history[max(0, step - 3)], strict=True):
            p.data.copy_(old)
        loss = loss_of()
        total += loss.item() * share
        gradients = torch.autograd.grad(loss, list(plain.w.values()))
        for p, now in zip(plain.w.values(), latest, strict=True):
            p.data.copy_(now)
        plain.optimizer.zero_grad()
        for p, gradient in zip(plain.w.values(), gradients, strict=True):
            p.grad = gradient
        plain.optimizer.step()
        history.append([p.detach().clone() for p in plain.w.values()])
        if last:
            losses.append(total)
            total = 0.0
    return losses, plain.state


@pytest.mark.parametrize(
    ("model", "world", "servers", "copies"),
    covered(
        [
            *[
                (model, *ranks, 1)
                for model in ("gcn", "sage", "gat", "sgc")
                for ranks in ((2, 1), (4, 2))
            ],
            ("gat", 4, 4, 2),
            ("sage", 2, 1, 2),
        ],
        lambda row: {row[0], row[1:]},
    ),
)
def test_the_pipeline_is_the_recursion(run_ranks, graphs, model, world, servers, copies):
    """Every model with both optimizers and graphs."""
    optimizer, graph = (("sgd", "rough"), ("adam", "sparse"))[
        (servers + (model in ("gcn", "gat"))) % 2
    ]
    case = Case(
        f"p3(pipelined=True,copies={copies})",
        graphs[graph],
        workload(model, dropout=0.5, optimizer=optimizer, lr=0.02, schedule="step", step_size=1),
        servers,
        epochs=4,
        eval_every=1,
    )
    losses, weights = train_with_a_delay_of_three(case)
    must_have_learnt(run_ranks(world, [case])[0], losses, weights)


def test_a_kind_that_is_no_sum_over_columns_is_named(graphs):
    with pytest.raises(
        SpecError,
        match="that of resgcn reads an encoder's output: it has no scatter, transform and apply",
    ):
        other = Case("p3", graphs["rough"], workload("resgcn")).problem(2)
        parse("p3").settle(other).check(other)
