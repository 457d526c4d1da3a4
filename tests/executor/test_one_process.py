"""One process trains as is written plainly with dense matrices (recursions.py), so that an error
that all ranks share shows too. By day each word, graph and model on the full graph and in batches."""

from collections.abc import Hashable

import numpy as np
import pytest
import torch
from pairwise import covered
from recursions import Recursion, must_score, recursion_of
from torch import Tensor
from trainings import ON_BATCHES, ON_FULL_GRAPHS, Setting, idle, lines, source

from gnnplan.executor.layers.kernels import Shapes
from gnnplan.executor.layers.targets import LinkTargets
from gnnplan.planner.graph.sampling import Pairs, held_out_pairs
from gnnplan.testing.runs import must_have_learnt

TRAININGS = [Setting.of(f"1 1 graph_parallel {line}") for line in lines(ON_FULL_GRAPHS)]
TRAININGS += [Setting.of(f"1 1 data_parallel {line} mini") for line in lines(ON_BATCHES)]
TRAININGS = [setting for setting in TRAININGS if "dtype" not in setting.fields]


def needs(setting: Setting) -> set[Hashable]:
    of = setting.graph, setting.model, setting.dropout > 0, *setting.words
    return {*((setting.strategy, word) for word in of), (setting.model, setting.graph == "sparse")}


def must_rank(recursion: Recursion, row: dict[str, float]) -> None:
    """Of edges that are held out, the area under the curve."""
    for part, name in enumerate(("val", "test")):
        pairs = held_out_pairs(recursion.graph, part, recursion.workload.negatives)
        expected = plain_auc(recursion.answers(), pairs)
        assert row[f"{name}_auc"] == pytest.approx(expected, rel=1e-9)


def plain_auc(rows: Tensor, pairs: Pairs) -> float:
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
        must_rank(recursion, row)
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
