"""Rows that cross in few bits: training follows plain training in which what other parts read, and
the gradient that they send home, is rounded by the same draws."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from crossing import Adapting, by_reader, crossed, reading, rounded, uniform
from test_bns import sampled
from torch import Tensor

from gnnplan.planner.strategies import parse
from gnnplan.testing.plain import Plain
from gnnplan.testing.ranks import Case, small
from gnnplan.testing.runs import must_have_learnt

pytestmark = pytest.mark.timeout(110)

SEED = 3


@pytest.mark.parametrize(
    ("model", "world", "servers", "strategy"),
    [
        ("gcn", 2, 1, "graph_parallel(bits=2)"),
        pytest.param("sage", 3, 1, "graph_parallel(bits=4,buckets=2)", marks=pytest.mark.nightly),
        ("gcnii", 3, 1, "graph_parallel(bits=8,checkpoint=True)"),
        pytest.param("gat", 2, 1, "graph_parallel(bits=4)", marks=pytest.mark.nightly),
        ("gin", 3, 3, "granndis(depth=0,bits=2)"),
        pytest.param("sage", 2, 1, "bns(p=0.5,bits=2)", marks=pytest.mark.nightly),
        ("gcn", 3, 1, "bns(p=0.3,bits=4)"),
        ("sage", 3, 1, "graph_parallel(bits='adaptive')"),
    ],
)
def test_it_is_training_on_rounded_rows(run_ranks, graphs, model, world, servers, strategy):
    case = Case(strategy, graphs["rough"], small(model), epochs=4, eval_every=2, servers=servers)
    if "adaptive" in strategy:  # bits are chosen twice
        case = replace(case, epochs=13)
    asked, problem = parse(strategy), case.problem(world)
    part, plain, losses = problem.layout().owner, Plain(replace(case, servers=1)), []
    bits = Adapting(plain, part) if asked.bits == "adaptive" else asked.bits
    for step in range(case.epochs):
        scale = partial(sampled, plain, part, getattr(asked, "p", 1.0), SEED, step)
        logits, _ = plain.forward(step, reading(plain, part, bits, step, scale))
        loss = plain.loss(logits)
        losses.append(loss.item())
        plain.descend(loss)
    must_have_learnt(run_ranks(world, [case])[0], losses, plain.state)


def late(
    plain: Plain, operator: Tensor, step: int, old: dict[int, list[Tensor]], layer: int, h: Tensor
) -> tuple[Tensor, Tensor]:
    """This step's own rows, and old ones for each reader."""
    if layer not in old:
        return plain.operator, plain.prepare(layer, step, h)
    return operator, plain.prepare(layer, step, h, *old[layer])


@pytest.mark.parametrize(
    ("model", "world", "bits"), [("gcn", 2, 2), ("sage", 3, 4), ("gcn", 3, "adaptive")]
)
def test_stale_rows_are_rounded_when_they_leave(run_ranks, graphs, model, world, bits):
    """PipeGCN's recursion (test_recursions.py): what is rounded in a step is used in the next."""
    strategy = f"pipegcn(bits={bits!r})"
    epochs = 13 if bits == "adaptive" else 4
    case = Case(strategy, graphs["rough"], small(model), epochs=epochs, eval_every=2)
    part, plain, losses = case.problem(world).layout().owner, Plain(case), []
    layers, n, parts = (2, 3, 4), len(case.problem(1).graph.y), range(world)
    home = {layer: torch.zeros(n, 8, dtype=torch.float64) for layer in layers}
    sent = {layer: [home[layer] for _ in parts] for layer in layers}
    adapting = Adapting(plain, part)

    def over(rows: Tensor, step: int, layer: int, direction: str, reader: int) -> Tensor:
        u = uniform(rows, SEED, step, layer, direction)
        if bits == "adaptive":
            return adapting.rounded(rows, u, reader, layer, direction)
        return rounded(rows, int(bits), u)

    operator = by_reader(plain.operator, part)
    for step in range(case.epochs):
        old = {layer: [rows.clone().requires_grad_() for rows in sent[layer]] for layer in layers}
        reads = partial(late, plain, operator, step, old)
        logits, rows = plain.forward(step, reads)
        loss = plain.loss(logits)
        losses.append(loss.item())
        plain.descend(loss + sum((rows[layer - 1] * home[layer]).sum() for layer in layers))
        for layer in layers:
            sent[layer] = [over(rows[layer - 1], step, layer, "f", reader) for reader in parts]
            grads = [over(old[layer][reader].grad, step, layer, "b", reader) for reader in parts]
            home[layer] = sum(grads)
    must_have_learnt(run_ranks(world, [case])[0], losses, plain.state)


def test_narrow_rounds_projected_rows(run_ranks, graphs):
    """GCN, whose last layer alone shrinks its rows: of it x W crosses."""
    strategy = "graph_parallel(bits=4,narrow=True)"
    case = Case(strategy, graphs["rough"], small("gcn"), epochs=4)
    part, plain, losses, last = case.problem(3).layout().owner, Plain(case), [], 4
    for step in range(case.epochs):
        _, rows = plain.forward(step, reading(plain, part, 4, step))
        own = plain.drop(rows[last - 1], step, last) @ plain.w[f"layers.{last}.weight"].T
        far = [crossed(own, 4, SEED, step, last) for _ in range(3)]
        gathered = by_reader(plain.operator, part) @ torch.cat([own, *far])
        loss = plain.loss(gathered + plain.w[f"layers.{last}.bias"])
        losses.append(loss.item())
        plain.descend(loss)
    must_have_learnt(run_ranks(3, [case])[0], losses, plain.state)


def test_the_gradient_error_is_that_of_rounding(run_ranks, graphs):
    """Against a pass with whole rows at the same weights; training goes on as if nobody measured."""
    case = Case(
        "graph_parallel(bits=4)", graphs["rough"], small("sage"), epochs=3, gradient_errors=True
    )
    part, plain = case.problem(2).layout().owner, Plain(case)
    result, unmeasured = run_ranks(2, [case, replace(case, gradient_errors=False)])
    assert unmeasured.losses == result.losses
    for step, (error, size) in enumerate(result.rank(0)["gradient_errors"]["all"]):
        loss = plain.loss(plain.forward(step, reading(plain, part, 4, step))[0])
        weights = list(plain.w.values())
        used = torch.autograd.grad(loss, weights, retain_graph=True)
        exact = torch.autograd.grad(plain.loss(plain.forward(step)[0]), weights)
        gaps = [(ours - true).norm() for ours, true in zip(used, exact, strict=True)]
        assert error == pytest.approx(torch.stack(gaps).norm().item(), rel=1e-8)
        assert size == pytest.approx(torch.stack([g.norm() for g in exact]).norm().item(), rel=1e-8)
        assert error > 1e-3 * size
        plain.descend(loss)
