"""Optimizers, learning rates, clipping, losses, metrics and early stopping: on any ranks they are
those of one process of torch (plain.py)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from plain import Plain, difference, train_plainly, trained
from ranks import Case, Ranks
from test_minibatch_exactness import train_plainly_in_batches

from gnnplan.planner.gnn.workload import PARTS

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
    {"class_weights": "balanced"},
    {"class_weights": (0.5, 2.0, 0.0, 1.5)},
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
    return str(how.get("optimizer", how.get("class_weights")))


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


# -- metrics ---------------------------------------------------------------------------------------


def f1(said: np.ndarray, true: np.ndarray) -> float:
    tp, wrong = (said & true).sum(), (said ^ true).sum()
    return 2 * tp / (2 * tp + wrong)


def f1_of_each(said: np.ndarray, true: np.ndarray) -> float:
    found = [f1(a, b) for a, b in zip(said.T, true.T, strict=True) if a.any() or b.any()]
    return sum(found) / len(found)


def auc_of_each(scores: np.ndarray, true: np.ndarray) -> float:
    """Every vertex of a class with every other."""
    found = []
    for of_class, is_of in zip(scores.T, true.T, strict=True):
        if is_of.any() and not is_of.all():
            lead = of_class[is_of][:, None] - of_class[~is_of]
            found.append(((lead > 0) + (lead == 0) / 2).mean())
    return sum(found) / len(found)


def measured(metric: str, logits: torch.Tensor, y: np.ndarray) -> float:
    """The metric by its definition."""
    several = y.ndim == 2
    true = y > 0 if several else y[:, None] == np.arange(logits.shape[1])
    if metric == "roc_auc":
        return auc_of_each((logits if several else logits.softmax(1)).numpy(), true)
    highest = np.eye(logits.shape[1], dtype=bool)[logits.argmax(1).numpy()]
    said = (logits > 0).numpy() if several else highest
    return {"accuracy": lambda a, b: (a & b).any(1).mean(), "f1_micro": f1}.get(metric, f1_of_each)(
        said, true
    )


METRICS = [
    ("rough", None, "accuracy"),
    ("rough", "f1_macro", "f1_macro"),
    ("rough", "roc_auc", "roc_auc"),
    ("multi", None, "f1_micro"),
    ("multi", "f1_macro", "f1_macro"),
    ("multi", "roc_auc", "roc_auc"),
]


@pytest.mark.parametrize(("graph", "asked", "metric"), METRICS)
def test_metrics_are_counted_over_all_ranks(
    run_ranks: Ranks, graphs: dict[str, str], graph: str, asked: str | None, metric: str
) -> None:
    how = {**FULL, "model": "sage", "dropout": 0.0, "metric": asked}
    case = Case("graph_parallel", graphs[graph], how, epochs=4, eval_every=2)
    plain = Plain(case)
    trained(plain, case.epochs)
    with torch.no_grad():
        logits = plain.forward(None)[0]
    plans = [plan for plan in ON_FULL_GRAPHS if plan[0] < 4]
    for world, servers, strategy in [*plans, (2, 2, "granndis(batches=1)")]:
        (run,) = run_ranks(world, [replace(case, strategy=strategy, servers=servers)])
        first, _, _, last = run.metrics
        for part in ("val", "test"):
            mask = np.array(getattr(plain.graph, part))
            expected = measured(metric, logits[torch.from_numpy(mask)], plain.graph.y[mask])
            assert first[f"{part}_{metric}"] is None
            assert last[f"{part}_{metric}"] == pytest.approx(expected, rel=1e-9), strategy
        # of the pass before; no step puts all scores together
        assert (last[f"train_{metric}"] is None) == (metric == "roc_auc")


@pytest.mark.parametrize(("graph", "asked", "metric"), METRICS)
def test_metrics_of_batches_are_those_of_one_process(
    run_ranks: Ranks, graphs: dict[str, str], graph: str, asked: str | None, metric: str
) -> None:
    case = Case("data_parallel", graphs[graph], {**MINI, "model": "sage", "metric": asked})
    alone = run_ranks.alone(case).metrics[-1]
    for world, servers, strategy in ON_BATCHES:
        (run,) = run_ranks(world, [replace(case, strategy=strategy, servers=servers)])
        for part in PARTS[metric == "roc_auc" :]:
            name = f"{part}_{metric}"
            assert run.metrics[-1][name] == pytest.approx(alone[name], rel=1e-9), strategy
