"""What ranks do is what the schedule says: the same operations in the same order, with the bytes
that were predicted. And what they train is what one process does, or the paper's recursion.

Each line of trainings.py is trained once for all tests. One process trains as is written plainly with
dense matrices (recursions.py), so that an error that all ranks share shows too."""

from collections.abc import Hashable
from typing import Any

import numpy as np
import pytest
import torch
from nightly import NIGHT, at_night, cover, covered
from recursions import Batches, must_score, recursion_of
from torch import Tensor
from trainings import ON_BATCHES, ON_FULL_GRAPHS, SETTINGS, Setting, idle, lines, source

from gnnplan.executor.layers.kernels import Shapes
from gnnplan.executor.layers.targets import LinkTargets
from gnnplan.planner.graph.load import load
from gnnplan.planner.graph.sampling import Pairs, held_out_pairs
from gnnplan.planner.strategies import families, parse
from gnnplan.testing.plain import difference
from gnnplan.testing.ranks import Case, Ranks, Result
from gnnplan.testing.runs import *  # noqa: F403
from gnnplan.testing.runs import (
    FinishedRun,
    must_be_as_one_process,
    must_have_learnt,
    must_resume,
    one_process,
)

NEAR = {"float64": (1e-9, 1e-9), "float32": (1e-4, 1e-4)}  # weights, losses
BY_DAY = cover(SETTINGS, Setting.needs, lambda setting: 1.5 + setting.world)


def by_day(settings: list[Setting]) -> list[Any]:
    """The settings of a test. By day the others are not even collected: they are three thousand."""
    asked = [setting for setting in settings if NIGHT or setting in BY_DAY]
    return [setting if setting in BY_DAY else at_night(setting) for setting in asked]


@pytest.fixture(scope="module")
def sources(graphs, tmp_path_factory):
    """sources('rough/parts') -> the path of the graph."""
    folder = tmp_path_factory.mktemp("sources")
    return lambda name: source(name, graphs, folder)


_trained: dict[str, Result] = {}


def trained(setting: Setting, run_ranks: Ranks, sources: Any) -> Result:
    """Trained once for all tests."""
    if str(setting) not in _trained:
        _trained[str(setting)] = run_ranks(setting.world, setting.case(sources))
    return _trained[str(setting)]


_played: dict[str, FinishedRun] = {}


@pytest.fixture(params=by_day(SETTINGS), ids=str)
def played(request, run_ranks, sources):
    setting = request.param
    if str(setting) not in _played:
        _played[str(setting)] = FinishedRun(trained(setting, run_ranks, sources))
        _played[str(setting)].setting = setting
    return _played[str(setting)]


def test_every_family_is_here():
    assert {type(parse(setting.strategy)) for setting in SETTINGS} == set(families())
    assert any(getattr(parse(setting.strategy), "staleness", 0) for setting in SETTINGS)


def test_they_train_what_one_process_or_the_recursion_does(played, run_ranks, sources):
    """Losses, weights and scores. PipeGCN's rows in bfloat16 are a fifth off, and compared with none."""
    setting, result = played.setting, played.result
    case, twin = result.case, setting.twin
    if twin:
        plain = trained(twin, run_ranks, sources)
        assert (result.losses, result.scores) == (plain.losses, plain.scores)
        assert all(torch.equal(result.weights[name], p) for name, p in plain.weights.items())
    if "uncompared" in setting.words:
        return
    strategy = case.settled(case.problem(setting.world))
    dtype = case.workload["dtype"]
    if dtype == "bfloat16":
        if strategy.exact:
            must_be_near_in_bfloat16(result, one_process(run_ranks, case))
    elif strategy.exact:
        weights, losses = NEAR[dtype]
        must_be_as_one_process(result, one_process(run_ranks, case), weights, losses, idle(case))
    else:
        must_follow_its_recursion(result, run_ranks)


def must_be_near_in_bfloat16(result: Result, alone: Result) -> None:
    """Rows that cross are rounded once more: 2^-9 of their value. Where that turns the sign of a
    number before ReLU, a gradient of these few rows changes by some percent, as it does between
    float32 and bfloat16 in one process; GCNII's residuals keep it below one."""
    assert result.losses == pytest.approx(alone.losses, rel=2**-9)
    if result.case.workload["model"] == "gcnii" and "mode" not in result.case.workload:
        assert difference(result.weights, alone.weights) <= 0.01


def must_follow_its_recursion(result: Result, run_ranks: Ranks) -> None:
    """And not exact training. A pipeline's batches are under way when it evaluates: no scores."""
    case = result.case
    recursion = recursion_of(case, result.world)
    losses = recursion.losses(case.epochs)
    # what is late is normalised with other moments, so that biases before these do move; what is
    # rounded before it is moves them by a millionth
    unmoved = () if getattr(recursion, "sent", None) else idle(case)
    weights, expected = result.weights, dict(recursion.state)
    if case.settled(case.problem(result.world)).codec.packs:
        for name in unmoved:
            assert (weights.pop(name) - expected.pop(name)).abs().max() <= 1e-9, name
        unmoved = ()
    assert result.losses == pytest.approx(losses, rel=1e-9)
    assert difference(weights, expected, unmoved) <= 1e-9
    if not isinstance(recursion, Batches):
        must_score(recursion, result.metrics[-1], case.problem(result.world).metric)
    if "islands" not in case.graph and "trim=True" not in case.strategy:
        exact = one_process(run_ranks, case).weights
        assert difference(weights, {name: exact[name] for name in weights}, unmoved) > 1e-3


@pytest.mark.parametrize(
    "played",
    by_day([setting for setting in SETTINGS if "resumes" in setting.words]),
    indirect=True,
    ids=str,
)
def test_broken_off_and_resumed_is_unbroken(played, run_ranks):
    """Broken off an epoch after its last checkpoint: that epoch is trained again."""
    must_resume(run_ranks, played.result)


def test_batch_norm_of_rows_that_two_ranks_compute_counts_them_twice(run_ranks, sources):
    """As SyncBatchNorm does; gsplit computes every row at one rank, as one process does."""
    case = Setting.of("2 1 data_parallel rough 0.5 gcn mini norm=batch").case(sources)
    losses = run_ranks(2, case).losses
    assert losses != pytest.approx(one_process(run_ranks, case).losses, rel=1e-6)


def test_the_graphs_are_as_awkward_as_they_claim(graphs):
    rough, directed = load(graphs["rough"]), load(graphs["rough"], directed=True)
    assert (rough.degree == 0).sum() >= 6
    assert all(any(w in note for note in rough.stats.notes) for w in ("self-loops", "duplicate"))
    assert directed.stats.directed and directed.stats.edges < rough.stats.edges
    assert load(graphs["multi"]).stats.multilabel
    case = Case("graph_parallel", graphs["islands"], {"layers": 4})
    for world, silent in ((2, True), (4, False)):
        layout = case.problem(world).layout()
        assert layout.facts(2).sends.any() != silent
        there = [int(layout.graph.train[layout.own(rank)].sum()) for rank in range(world)]
        assert 0 in there and sum(there) > 0


TRAININGS = [Setting.of(f"1 1 graph_parallel {line}") for line in lines(ON_FULL_GRAPHS)]
TRAININGS += [Setting.of(f"1 1 data_parallel {line} mini") for line in lines(ON_BATCHES)]
TRAININGS = [setting for setting in TRAININGS if "dtype" not in setting.fields]


def needs(setting: Setting) -> set[Hashable]:
    of = setting.graph, setting.model, setting.dropout > 0, *setting.words
    return {*((setting.strategy, word) for word in of), (setting.model, setting.graph == "sparse")}


def plain_auc(rows: Tensor, pairs: Pairs) -> float:
    """Of edges that are held out, the area under the curve."""
    won = [
        (1.0 if rows[h] @ rows[t] > rows[h] @ rows[n] else 0.5 * float(t == n))
        for h, (t, *negatives) in zip(pairs.heads, pairs.tails, strict=True)
        for n in negatives
    ]
    return sum(won) / len(won)


@pytest.mark.parametrize("setting", covered(TRAININGS, needs, several=False), ids=str)
def test_one_process_is_plain_training(setting, run_ranks, graphs, tmp_path):
    """Batch norm's running moments are among the weights."""
    case = setting.case(lambda name: source(name, graphs, tmp_path))
    recursion, result = recursion_of(case, 1), run_ranks.alone(case)
    must_have_learnt(result, recursion.losses(case.epochs), recursion.state, idle(case))
    row, metric = result.metrics[-1], case.problem(1).metric
    if metric == "auc":
        for part, name in enumerate(("val_auc", "test_auc")):
            pairs = held_out_pairs(recursion.graph, part, recursion.workload.negatives)
            assert row[name] == pytest.approx(plain_auc(recursion.answers(), pairs), rel=1e-9)
    else:
        must_score(recursion, row, metric)
    # no step puts all scores together
    assert (row[f"train_{metric}"] is None) == (metric == "roc_auc")
    # it outlived the run once, and who multiplied after it in this process got other roundings
    assert not Shapes.vary


def test_ties_count_half():
    rows = torch.tensor([[1.0], [2.0], [2.0], [3.0], [1.0]])
    pairs = Pairs(np.array([0, 0]), np.array([[1, 2, 4], [1, 3, 3]]))
    assert LinkTargets(pairs, 5, 2).compared(rows).tolist() == [1.5, 4.0]
