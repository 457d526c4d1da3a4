"""Early stopping, on any ranks as in one process of torch (plain.py); what is kept of each weight; what
is refused; and errors of stale gradients. Optimizers, learning rates, losses and metrics are in
trainings.py."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from nightly import NIGHT, every
from recursions import Recursion, measured, recursion_of
from torch import Tensor
from trainings import FEW, source

from gnnplan.executor.launch.run_request import Options, must_be_measurable, must_have_rates
from gnnplan.executor.ranks.checkpoint import question
from gnnplan.executor.ranks.learner import Optimizer
from gnnplan.planner.evidence.runs import gradient_error
from gnnplan.planner.gnn.workload import Workload
from gnnplan.planner.strategies import parse
from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.testing.plain import difference
from gnnplan.testing.ranks import Case, small

FULL = {"layers": 3, "hidden": 8, "dropout": 0.3, "seed": 3, "dtype": "float64", "epochs": 5}
MINI = {**FULL, "mode": "mini", "batch": 8, "layers": 2, "fanout": (3, 2)}
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


def test_the_smallest_error_is_the_best(run_ranks, graphs, tmp_path):
    how = {**FULL, "model": "sage", "lr": 0.05, "patience": 2}
    case = Case("graph_parallel", source("one", graphs, tmp_path), how, epochs=20, eval_every=1)
    run = run_ranks(2, case)
    errors = [row["val_mae"] for row in run.metrics]
    assert run.rank(0)["best"]["epoch"] == 1 + int(np.argmin(errors)) == len(errors) - 2


PATIENCE = {"lr": 0.03, "weight_decay": 0.02, "patience": 3, "epochs": 30}


def train_patiently(case: Case) -> tuple[int, int, dict[str, Any]]:
    """The best epoch, the last, and the weights of the best."""
    plain, best, found = Recursion(case), (-1.0, 0), {}
    val = np.array(plain.graph.val)
    for epoch in range(case.epochs):
        plain.epoch(epoch)
        score = measured("accuracy", plain.answers()[torch.from_numpy(val)], plain.graph.y[val])
        if score > best[0]:
            best = score, epoch + 1
            found = {name: tensor.detach().clone() for name, tensor in plain.state.items()}
        if epoch + 1 - best[1] >= plain.workload.patience:
            break
    return best[1], epoch + 1, found


def patient(graphs: dict[str, str], **more: Any) -> Case:
    how = {**FULL, "model": "sage", **PATIENCE, **more}
    return Case("graph_parallel", graphs["rough"], how, epochs=30, eval_every=1)


STOPPED = [{}, {"model": "gcn", "norm": "batch", "optimizer": "sgd", "lr": 0.1}]


@pytest.mark.parametrize("more", STOPPED)
def test_the_best_weights_by_validation_are_left(run_ranks, graphs, more):
    case = patient(graphs, **more)
    best, last, weights = train_patiently(case)
    assert best > 1 and last < 30
    idle = tuple(f"layers.{layer}.bias" for layer in (1, 2)) if more else ()
    third = slice(None) if NIGHT else slice(STOPPED.index(more), None, 3)  # by day
    for world, servers, strategy in ON_FULL_GRAPHS[third]:
        if more and ("tensor3d" in strategy or "gnnpipe" in strategy):
            continue  # they have no batch norm
        run = run_ranks(world, replace(case, strategy=strategy, servers=servers))
        assert len(run.metrics) == last, strategy
        assert [run.rank(rank)["best"]["epoch"] for rank in range(world)] == [best] * world
        assert run.rank(0)["best"]["score"] == run.metrics[best - 1]["val_accuracy"]
        assert difference(run.weights, weights, idle) <= 1e-9, strategy


@pytest.mark.parametrize(
    "strategy", every(2, ["gnnpipe(stages=2,chunks=4)", "tensor3d(x=1,y=2,z=1)"])
)
def test_a_resumed_run_remembers_its_best(run_ranks, graphs, strategy):
    """It ends where the unbroken one does, to the bit. Resumed once more it trains no more."""
    case = replace(patient(graphs), strategy=strategy)
    unbroken = run_ranks(2, case)
    last, best = len(unbroken.metrics), unbroken.rank(0)["best"]["epoch"]
    assert 1 < best < last - 1
    broken = run_ranks(2, replace(case, epochs=last - 1, checkpoint_every=1))
    again = replace(case, checkpoint_every=1, resume=str(broken.out))
    for _ in range(2):
        resumed = run_ranks(2, again)
        assert len(resumed.metrics) == last
        assert resumed.rank(0)["best"] == unbroken.rank(0)["best"]
        assert all(torch.equal(resumed.weights[n], p) for n, p in unbroken.weights.items())


def test_another_plan_takes_over_the_best(run_ranks, graphs):
    case = patient(graphs)
    best, last, weights = train_patiently(case)
    broken = run_ranks(2, replace(case, epochs=best + 1, checkpoint_every=1))
    onwards = replace(case, strategy="gnnpipe(stages=2,chunks=1)", resume=str(broken.out))
    resumed = run_ranks(2, onwards)
    assert len(resumed.metrics) == last and resumed.rank(0)["best"]["epoch"] == best
    assert difference(resumed.weights, weights) <= 1e-9


@pytest.mark.parametrize(
    ("how", "state"),
    [
        ({"optimizer": "sgd"}, 0),
        ({"optimizer": "sgd", "momentum": 0.9}, 1),
        ({"optimizer": "adamw"}, 2),
        ({"optimizer": "adam", "patience": 1}, 3),
    ],
    ids=str,
)
def test_plans_count_what_is_kept_of_each_weight(graphs, how, state):
    """Beside its gradient."""
    for plans, kind in ((ON_FULL_GRAPHS, FULL), (ON_BATCHES, MINI)):
        for world, servers, strategy in plans:
            case = Case(strategy, graphs["rough"], {**kind, "model": "sage"}, servers)
            held = []
            for more in ({"optimizer": "sgd"}, how):
                asked = replace(case, workload=case.workload | more).problem(world)
                held.append(case.settled(asked).memory(asked)["optimizer"])
            assert held[1] == pytest.approx(held[0] * (1 + state)), strategy
    kept = Optimizer([torch.nn.Parameter(torch.zeros(3, 5))], Workload(**how)).kept.values()
    assert sum(e.numel() for (e,) in kept if e.dim()) == 15 * (state - ("patience" in how))


@pytest.mark.parametrize(
    ("graph", "how", "words"),
    [
        ("multi", {"metric": "accuracy"}, "are several labels per vertex; use f1_micro or f1_"),
        ("rough", {"metric": "mae"}, "are one class per vertex; use accuracy or f1_macro"),
        ("rough", {"loss": "mse"}, "loss=mse needs numbers as targets, and .* of rough are one"),
        ("multi", {"class_weights": "balanced"}, "need one class per vertex, and the targets of"),
        ("rough", {"class_weights": (1.0, 2.0)}, r"\(2 numbers, classes of rough: 4\)"),
        ("rough", {"class_weights": (0.0,) * 4}, r"all weigh 0 \(of 4 classes\); give one of"),
    ],
)
def test_what_does_not_suit_the_targets_is_refused(graphs, graph, how, words):
    with pytest.raises(SpecError, match=words):
        Case("graph_parallel", graphs[graph], how).problem(1)


def test_a_batch_of_classes_that_weigh_nothing_has_no_loss(run_ranks, graphs):
    """Its loss was 0 / 0, which ended the run."""
    how = {"mode": "mini", "layers": 1, "batch": 1, "class_weights": (0.0, 0.0, 0.0, 1.0)}
    run = run_ranks.alone(Case("data_parallel", graphs["rough"], how, epochs=2))
    assert np.isfinite(run.losses).all()


def test_a_cosine_has_no_more_epochs_than_planned():
    cosine = Workload(schedule="cosine", epochs=20)
    must_have_rates(Options(epochs=20), cosine)
    must_have_rates(Options(epochs=30), Workload(epochs=20))
    with pytest.raises(SpecError, match="in 20 epochs; plan with --epochs 30"):
        must_have_rates(Options(epochs=30), cosine)


def test_a_cosine_of_other_epochs_is_another_training(graphs):
    """Of a constant rate more epochs are the same training."""
    for schedule, same in (("cosine", False), ("step", True)):
        asked = []
        for epochs in (20, 30):
            how = {"schedule": schedule, "epochs": epochs}
            problem = Case("graph_parallel", graphs["rough"], how).problem(1)
            asked.append(question(problem, parse("graph_parallel")))
        assert (asked[0] == asked[1]) == same


Gradients = dict[str, tuple[Tensor, Tensor]]  # of a parameter, used and exact


@pytest.mark.parametrize("strategy", ["pipegcn", "pipegcn_gf(gamma=0.5)"])
def test_the_staleness_error_is_used_minus_true(run_ranks, graphs, strategy):
    """Of every layer and step, over both ranks, for rows ('f') and gradients ('b')."""
    case = Case(strategy, graphs["rough"], small("gcnii"), epochs=5, staleness_errors=True)
    recursion, result = recursion_of(case, 2), run_ranks(2, case)
    recursion.losses(case.epochs)
    left = [result.rank(rank)["staleness"] for rank in range(2)]
    assert left[0].keys() == left[1].keys() == recursion.errors.keys()
    for key, steps in recursion.errors.items():
        ours = [sum(rank[key][step][0] for rank in left) for step in range(case.epochs)]
        assert ours == pytest.approx(steps, rel=1e-9), key
        assert min(steps) > 0


def gradients_of(recursion: Recursion, epochs: int) -> list[Gradients]:
    """Per step what its pass leaves in the gradients, and what a pass leaves in which every row is
    fresh and whole, at the same weights and under the same masks. All in one process."""
    found: list[Gradients] = []
    descend = recursion.descend

    def watched(objective: Tensor) -> None:
        weights = list(recursion.w.values())
        exact = recursion.loss(recursion.forward(len(found))[0])
        pairs = zip(
            torch.autograd.grad(objective, weights, retain_graph=True),
            torch.autograd.grad(exact, weights),
            strict=True,
        )
        found.append(dict(zip(recursion.w, pairs, strict=True)))
        descend(objective)

    recursion.descend = watched  # type: ignore[method-assign]
    recursion.losses(epochs)
    return found


@pytest.mark.parametrize(
    ("strategy", "model", "world", "graph", "dropout", "norm"),
    [
        ("pipegcn", "gcn", 2, "rough", 0.0, None),
        ("pipegcn_gf(gamma=0.5)", "sage", 3, "multi", 0.5, None),
        ("pipegcn", "gcn", 4, "sparse", 0.5, None),
        ("pipegcn_gf(gamma=0.5)", "sage", 2, "rough", 0.0, "batch"),
        ("pipegcn", "gcnii", 3, "rough", 0.5, None),
        ("pipegcn(trim=True)", "gcn", 2, "few", 0.5, None),  # the exact pass leaves out the same
        ("graph_parallel(bits=4)", "sage", 2, "rough", 0.5, None),
        ("graph_parallel(narrow=True)", "gcn", 2, "rough", 0.5, None),
    ],
)
def test_the_gradient_error_is_that_of_brute_force(
    run_ranks, graphs, strategy, model, world, graph, dropout, norm
):
    """Of every parameter and step; training goes on the same. It is 0 where nothing is late."""
    how = small(model, dropout=dropout, norm=norm)
    case = Case(strategy, graphs.get(graph, FEW), how, epochs=4, gradient_errors=True)
    expected = gradients_of(recursion_of(case, world), case.epochs)
    result, unmeasured = (
        run_ranks(world, replace(case, gradient_errors=asked)) for asked in (True, False)
    )
    assert unmeasured.losses == result.losses and unmeasured.rank(0)["gradient_errors"] == {}
    assert unmeasured.rank(0)["bytes"] == result.rank(0)["bytes"]
    left = result.rank(0)["gradient_errors"]
    assert left == result.rank(world - 1)["gradient_errors"]
    assert set(left) == {"all", *expected[0]}
    for step, gradients in enumerate(expected):
        total = np.zeros(2)
        for name, (used, exact) in gradients.items():
            error, size = left[name][step]
            assert error == pytest.approx((used - exact).norm().item(), rel=1e-8, abs=1e-13), name
            assert size == pytest.approx(exact.norm().item(), rel=1e-8, abs=1e-13), name
            total += np.square([error, size])
        error, size = left["all"][step]
        assert [error, size] == pytest.approx(np.sqrt(total).tolist())
        assert (error == 0) == parse(strategy).exact and size > 0


def test_only_a_strategy_with_a_synchronous_twin_is_measured():
    asked = Options(gradient_errors=True)
    for name in ("graph_parallel", "pipegcn_gf"):
        must_be_measurable(asked, parse(name))
    must_be_measurable(Options(), parse("gnnpipe"))
    with pytest.raises(SpecError, match="is of graph_parallel and pipegcn, and the plan's gnnpipe"):
        must_be_measurable(asked, parse("gnnpipe"))
    # the sum over ranks had begun when the exact pass was made, and both went into one buffer
    with pytest.raises(SpecError, match=r"several buckets \(buckets: 3\).*\"pipegcn\""):
        must_be_measurable(asked, parse("pipegcn(buckets=3)"))
    must_be_measurable(asked, parse("pipegcn(bits=2)"))
    with pytest.raises(SpecError, match=r"rounding too \(bits: 2\); .* use --gradient-errors"):
        must_be_measurable(Options(staleness_errors=True), parse("pipegcn(bits=2)"))


def test_what_a_run_says_is_relative_and_of_the_last_step():
    ranks = [{"gradient_errors": {"all": [[9, 9], [1, 4]], "layers.1.weight": [[0, 1]]}}]
    assert gradient_error(ranks) == {"error": 0.25}
    older = [{"gradient_errors": {"all": [[1, 4, 8]]}}]  # with PipeGCN's bound
    assert gradient_error(older) == {"error": 0.25}
    assert gradient_error([{"gradient_errors": {"all": [[0, 0]]}}]) is None
    assert gradient_error([{"gradient_errors": {}}]) is gradient_error([{}]) is None
