"""Link prediction: ranks train as one process does, and one process as training written plainly
does; what is measured on held-out edges is what a plain count of comparisons gives."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from test_minibatch_exactness import drawn_operator
from torch import Tensor
from torch.nn import functional as F

from gnnplan.executor.layers.links import compared
from gnnplan.planner.graph.sampling import Pairs, edges_of, frontier, held_out_pairs, pairs_of
from gnnplan.testing.plain import Plain, difference
from gnnplan.testing.ranks import Case, small
from gnnplan.testing.runs import must_have_learnt

pytestmark = pytest.mark.timeout(110)

PARTS = ("train", "val", "test")


def at_night(*split: Any) -> Any:
    return pytest.param(split, marks=pytest.mark.nightly)


SPLITS = [  # ranks, servers, strategy, and more of the workload
    at_night(2, 1, "data_parallel", {}),
    (3, 1, "data_parallel(prefetch=1)", {"model": "gcnii"}),
    at_night(2, 1, "gsplit", {"batch": 30}),
    (3, 1, "dnp(splitter='random')", {"batch": 30}),
    (3, 1, "snp(splitter='random')", {"batch": 30}),
    (4, 2, "gsplit(splitter='random',narrow=True)", {"model": "gcn"}),
    (3, 1, "gsplit(splitter='random',checkpoint=True)", {"model": "resgcn"}),
    (2, 2, "p3", {}),
]


def workload(**more: object) -> dict[str, object]:
    """Three epochs of some batches on `rough`'s edges, the last smaller."""
    links = {"layers": 2, "mode": "mini", "task": "link", "negatives": 2, "batch": 80}
    return small(**{"model": "sage", **links, "fanout": (3, 2), **more})


def plain_loss(rows: Tensor, pairs: Pairs) -> Tensor:
    """GraphSAGE's Eq. 1 pair by pair, over the number of pairs."""
    total = rows.new_zeros(())
    for head, (tail, *negatives) in zip(pairs.heads, pairs.tails, strict=True):
        total = total - F.logsigmoid(rows[head] @ rows[tail])
        for negative in negatives:
            total = total - F.logsigmoid(-(rows[head] @ rows[negative]))
    return total / pairs.tails.size


def plain_auc(rows: Tensor, pairs: Pairs) -> float:
    won = [
        (1.0 if rows[h] @ rows[t] > rows[h] @ rows[n] else 0.5 * float(t == n))
        for h, (t, *negatives) in zip(pairs.heads, pairs.tails, strict=True)
        for n in negatives
    ]
    return sum(won) / len(won)


@pytest.mark.parametrize(
    ("model", "directed", "negatives"), [("sage", False, 2), ("gcn", True, 1), ("resgcn", False, 1)]
)
def test_one_process_is_plain_training(run_ranks, graphs, model, directed, negatives):
    asked = workload(model=model, negatives=negatives)
    case = Case("data_parallel", graphs["rough"], asked, directed=directed, eval_every=1)
    plain, losses, at = Plain(case), [], 0
    w, graph = plain.workload, plain.graph
    for epoch in range(case.epochs):
        total = 0.0
        for number, edges in enumerate(edges_of(graph, w.batch, w.seed, epoch)):
            pairs = pairs_of(graph, edges, negatives, w.seed, epoch, number)
            found = frontier(graph, pairs.ends, w.fanouts, w.seed, epoch, number)
            operators = {layer: drawn_operator(plain, found, layer) for layer in (1, 2)}

            def read(layer: int, h: Tensor, at: int = at, of: dict = operators) -> tuple:
                return of[layer], plain.prepare(layer, at, h)

            loss = plain_loss(plain.forward(at, read)[0], pairs)
            plain.descend(loss)
            total, at = total + loss.item() * edges.size / graph.stats.edges, at + 1
        losses.append(total)
    alone = must_have_learnt(run_ranks.alone(case), losses, plain.state)
    with torch.no_grad():
        rows = plain.forward(None)[0]
    for part, name in enumerate(("val_auc", "test_auc")):
        expected = plain_auc(rows, held_out_pairs(graph, part, negatives))
        assert alone.metrics[-1][name] == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("split", SPLITS, ids=lambda split: f"{split[2]}-{split[0]}x{split[1]}")
def test_ranks_train_as_one_process(run_ranks, graphs, split):
    world, servers, strategy, more = split
    case = Case(strategy, graphs["rough"], workload(**more), servers, eval_every=2)
    (result,) = run_ranks(world, [case])
    alone = run_ranks.alone(replace(case, strategy="data_parallel", servers=1))
    assert difference(result.weights, alone.weights) <= 1e-9
    assert result.losses == pytest.approx(alone.losses, rel=1e-9)
    for found, expected in zip(result.metrics, alone.metrics, strict=True):
        assert [found[f"{p}_auc"] for p in PARTS] == [expected[f"{p}_auc"] for p in PARTS]
        assert "val_accuracy" not in found


def test_training_ranks_unseen_edges(run_ranks, tmp_path):
    """Of communities, whose members link to one another: 0.5 would be no better than chance."""
    graph = "synthetic:community?vertices=400&edges=6000&features=16&classes=4&seed=0"
    asked = workload(dropout=0.0, batch=1000, hidden=16, lr=0.01, fanout="full")
    last = run_ranks.alone(Case("data_parallel", graph, asked, epochs=8)).metrics[-1]
    assert last["val_auc"] > 0.6 and last["test_auc"] > 0.6
    assert last["loss"] < np.log(2)  # of rows that say nothing


def test_a_run_goes_on_as_if_it_had_not_ended(run_ranks, graphs):
    """Batches, negatives and held-out edges are functions of seed, epoch and graph."""
    case = Case("gsplit", graphs["rough"], workload(), checkpoint_every=1, eval_every=1, epochs=3)
    (whole,) = run_ranks(2, [case])
    (part,) = run_ranks(2, [replace(case, epochs=2)])
    (resumed,) = run_ranks(2, [replace(case, resume=str(part.out))])
    assert difference(resumed.weights, whole.weights) == 0.0
    names = ["loss", *(f"{part}_auc" for part in PARTS)]
    assert [[row[n] for n in names] for row in resumed.metrics] == [
        [row[n] for n in names] for row in whole.metrics
    ]


def test_ties_count_half():
    rows = torch.tensor([[1.0], [2.0], [2.0], [3.0], [1.0]])
    pairs = Pairs(np.array([0, 0]), np.array([[1, 2, 4], [1, 3, 3]]))
    assert compared(rows, pairs).tolist() == [1.5, 4.0]
