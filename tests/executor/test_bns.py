"""Boundary node sampling is plain training whose operator, in every epoch and layer, has the edges
that were drawn between parts and no others, n / k times as heavy."""

import numpy as np
import pytest
import torch
from torch import Tensor

from gnnplan.planner.strategies.layerwise.bns import Sample
from gnnplan.planner.strategies.layerwise.exchange import Crossing
from gnnplan.testing.plain import Plain, Read
from gnnplan.testing.ranks import Case, small
from gnnplan.testing.runs import must_have_learnt

pytestmark = pytest.mark.timeout(110)

SEED = 3


def sampled(plain: Plain, part: np.ndarray, p: float, seed: int, step: int, layer: int) -> Tensor:
    """By how much each edge counts [N, N]."""
    scale = torch.from_numpy((part[:, None] == part[None, :]).astype(float))
    edges = plain.adjacency.numpy() > 0
    for reader in range(part.max() + 1):
        for owner in set(range(part.max() + 1)) - {reader}:
            ids = np.flatnonzero(edges[part == reader].any(0) & (part == owner))
            kept = ids[Sample("vanish", p=p).fresh(ids, Crossing(seed, step, layer, reader))]
            scale[np.ix_(part == reader, kept)] = ids.size / max(kept.size, 1)
    return scale


def reading(plain: Plain, part: np.ndarray, p: float, seed: int, step: int) -> Read:
    def read(layer: int, h: Tensor) -> tuple[Tensor, Tensor]:
        rows = plain.prepare(layer, step, h)
        if not plain.varies(layer):
            return plain.operator, rows
        return plain.operator * sampled(plain, part, p, seed, step, layer), rows

    return read


@pytest.mark.parametrize(
    ("model", "world", "strategy", "p"),
    [
        ("gcn", 2, "bns(p=0.5)", 0.5),
        ("sage", 3, "bns(p=0.3,narrow=True,buckets=2)", 0.3),
        ("gcnii", 3, "bns(p=0.6,checkpoint=True)", 0.6),
        ("gin", 2, "bns(p=0.2)", 0.2),
        ("gcn", 3, "bns(p=0)", 0.0),
    ],
)
def test_it_is_training_on_samples_of_the_boundary(run_ranks, graphs, model, world, strategy, p):
    case = Case(strategy, graphs["rough"], small(model), epochs=4, eval_every=2)
    part, plain, losses = case.problem(world).layout().owner, Plain(case), []
    for step in range(case.epochs):
        logits, _ = plain.forward(step, reading(plain, part, p, SEED, step))
        loss = plain.loss(logits)
        losses.append(loss.item())
        plain.descend(loss)
    must_have_learnt(run_ranks(world, [case])[0], losses, plain.state)


def test_the_whole_boundary_is_graph_parallelism_to_the_bit(run_ranks, graphs):
    of_all, plainly = (
        Case(strategy, graphs["rough"], small("sage"), epochs=3)
        for strategy in ("bns(p=1)", "graph_parallel")
    )
    ours, exact = run_ranks(2, [of_all, plainly])
    assert ours.losses == exact.losses
    assert all(torch.equal(p, exact.weights[name]) for name, p in ours.weights.items())
