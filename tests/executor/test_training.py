"""Optimizers, learning rates, clipping, losses and early stopping: on any ranks they are those of
one process of torch (plain.py)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from plain import difference, train_plainly
from ranks import Case, Ranks
from test_minibatch_exactness import train_plainly_in_batches

pytestmark = pytest.mark.timeout(110)

FULL = {"layers": 3, "hidden": 8, "dropout": 0.3, "seed": 3, "dtype": "float64", "epochs": 5}
MINI = {**FULL, "mode": "mini", "batch": 8, "layers": 2, "fanout": (3, 2)}
# the gradients of these graphs are some tenths long, so that both lengths clip some steps
HOW = [
    {"optimizer": "adamw", "lr": 0.05, "warmup": 2, "schedule": "cosine", "clip": 0.3},
    {
        **{"optimizer": "sgd", "lr": 0.2, "momentum": 0.9, "weight_decay": 0.05, "clip": 0.1},
        **{"schedule": "step", "step_size": 2, "gamma": 0.3},
    },
    {"optimizer": "adam", "lr": 0.05, "weight_decay": 0.1, "warmup": 3},
]
ON_FULL_GRAPHS = [
    (1, 1, "graph_parallel"),
    (2, 1, "graph_parallel(buckets=3)"),
    (2, 1, "gnnpipe(stages=2,chunks=1)"),
    (4, 1, "gnnpipe(stages=2,chunks=1)"),
    (2, 1, "tensor3d(x=1,y=2,z=1)"),
    (4, 1, "tensor3d(x=2,y=1,z=2)"),
    (2, 2, "granndis(depth=1)"),
    (2, 1, "feature_parallel"),
    (1, 1, "offload(chunks=3)"),
]
ON_BATCHES = [(2, 1, "data_parallel"), (2, 1, "gsplit"), (2, 1, "p3"), (4, 2, "p3(copies=2)")]


def name(how: dict[str, Any]) -> str:
    return str(how.get("optimizer", "-".join(how)))


@pytest.mark.parametrize("how", HOW, ids=name)
def test_full_graphs_train_as_torch_does(
    run_ranks: Ranks, graphs: dict[str, str], how: dict[str, Any]
) -> None:
    """SGC's first stage has no weights."""
    for world, servers, strategy in ON_FULL_GRAPHS:
        model = "sgc" if "gnnpipe" in strategy else "sage"
        case = Case(strategy, graphs["rough"], {**FULL, "model": model, **how}, epochs=5)
        losses, weights = train_plainly(case)
        (ranks,) = run_ranks(world, [replace(case, servers=servers)])
        assert ranks.losses == pytest.approx(losses, rel=1e-9), str(case)
        assert difference(ranks.weights, weights) <= 1e-9, str(case)


@pytest.mark.parametrize("how", HOW, ids=name)
def test_mini_batches_train_as_torch_does(
    run_ranks: Ranks, graphs: dict[str, str], how: dict[str, Any]
) -> None:
    for world, servers, strategy in ON_BATCHES:
        case = Case(strategy, graphs["rough"], {**MINI, "model": "sage", **how}, epochs=4)
        losses, weights = train_plainly_in_batches(case)
        (ranks,) = run_ranks(world, [replace(case, servers=servers)])
        assert ranks.losses == pytest.approx(losses, rel=1e-9), str(case)
        assert difference(ranks.weights, weights) <= 1e-9, str(case)
