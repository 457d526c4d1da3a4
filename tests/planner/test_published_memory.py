"""Memory of PipeGCN's and GraNNDis' code: counted by hand, and the printed facts."""

from typing import Any

import pytest
from printed_rows import row

from gnnplan.papers.figures import predict
from gnnplan.papers.interpret import question
from gnnplan.papers.their_memory import EDGE, UNCOUNTED, fits, gave_a_factor, needed

ASKED = {"metric": "fits_in_memory", "strategy_params": ""}
PIPEGCN = row("pipegcn pipegcn_2080ti ogbn-products sage 3x128 1x5 graph_parallel", **ASKED)
GRANNDIS = row("granndis granndis_a6000_pcie reddit resgcn+ 112x256 4x4 graph_parallel", **ASKED)


def bytes_of(row: dict[str, str], **more: Any) -> float:
    return needed(question({**row, **more}))


def rows_of(more: dict[str, str]) -> tuple[float, float, float]:
    """Rows, sources and edges of the first rank."""
    facts = question({**PIPEGCN, **more}).problem.layout().facts(2)
    return float(facts.rows[0]), float(facts.sources[0]), float(facts.edges[0])


def test_pipegcns_tensors_by_hand():
    """Three layers on products in five parts: features, their mean, two of 128 and 47 classes."""
    (n, s, e), mask = rows_of({}), 0.25
    # own and mean; dropout's output and mask of both
    features = 2 * n * 100 + 2 * n * 100 * (1 + mask)
    one = 2 * n * 128  # the input of norm, the output of ReLU
    # all rows, dropout of them, mean, what came in and its gradients
    two = s * 128 * (1 + 1 + mask) + n * 128 + 2 * (s - n) * 128
    numbers = features + 2 * (one + two) + 4 * n * 47 + max(3 * s * 128, 3 * n * 100)
    assert bytes_of(PIPEGCN) == pytest.approx(24 * e + 4 * numbers, rel=1e-6)
    assert EDGE == 3 * 2 * 4


@pytest.mark.parametrize(
    ("dataset", "layers", "hidden", "testbed", "parts"),
    [
        ("reddit", "4", "256", "pipegcn_2080ti", 2),
        ("ogbn-products", "3", "128", "pipegcn_2080ti", 3),
        ("ogbn-papers100M", "3", "48", "pipegcn_mi60", 32),
    ],
)
def test_pipegcns_least_partitions(dataset, layers, hidden, testbed, parts):
    """Sec. 4."""
    asked = {"dataset": dataset, "layers": layers, "hidden": hidden, "testbed": testbed}
    asked |= {"num_nodes": "", "gpus_per_node": "", "metric": "min_partitions"}
    assert predict({**PIPEGCN, **asked}) == parts


def in_batches(row: dict[str, str], count: int) -> dict[str, str]:
    params = f'{{"updates_per_epoch": {count}}}'
    return row | {"strategy": "granndis", "strategy_params": params}


def test_granndis_takes_as_many_batches_as_it_needs():
    """Sec. 5 and 8.7: 112 layers on eight 2080 Ti fit in five batches, not in one."""
    small = {**GRANNDIS, "testbed": "granndis_2080ti_1gbe", "num_nodes": "2", "hidden": "64"}
    one, five = (question(in_batches(small, count)) for count in (1, 5))
    assert not fits(one, any_batches=False) and fits(one, any_batches=True)
    assert fits(five, any_batches=False)
    preloaded = {**small, "strategy": "granndis"}
    assert predict(small) == 0.0 and predict(preloaded) == 1.0
    assert gave_a_factor(preloaded)
    assert not gave_a_factor(small) and not gave_a_factor(GRANNDIS)
    assert UNCOUNTED["granndis_2080ti_1gbe"] > 1
