"""What models are to a plan: widths, weights and moments by hand; workloads that are no model."""

import pytest

from gnnplan.planner.gnn.model import MASK, Model, describe
from gnnplan.planner.gnn.workload import Workload
from gnnplan.planner.strategies.layerwise.feature_parallel import arranged


def gnn(model: str, *sparse: float, **workload: object) -> Model:
    """Of 40 features and 5 classes, and 16 numbers in between."""
    return describe(Workload(**{"model": model, "hidden": 16, **workload}), 40, 5, *sparse)


def test_a_product_reads_and_writes_rows():
    """Layer 2 of three, 16 -> 16: both ways, and gradients of rows and matrix as much again."""
    model = gnn("gcn")
    assert model.forward(2, 10, 20, 50).gemm_bytes == 10 * (16 + 16) * 4
    assert model.backward(2, 10, 20, 50).gemm_bytes == 2 * 10 * (16 + 16) * 4
    assert gnn("gcn", 2.5).forward(1, 10, 20, 50).gemm_bytes == 0


def test_a_mask_is_made_in_the_forward_pass_alone():
    """What dropout adds forward it adds twice backward, but for the mask's own operations."""
    plain, dropped = gnn("gcn"), gnn("gcn", dropout=0.5)
    for direction, more in (("forward", MASK + 3), ("backward", 2 * 3)):
        without, with_mask = (getattr(one, direction)(2, 10, 20, 50) for one in (plain, dropped))
        assert with_mask.launches - without.launches == more


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_sparse_features_are_multiplied_first(dropout):
    """A row of the matrix per number is gathered, and for its gradient a row of the output's: 40
    columns of which 3 are not zero, 16 hidden, on 10 rows, 20 sources and 50 edges. Nothing is as
    wide as the features, and nothing of them is cached."""
    gcn, sage, gat = (gnn(name, 3.0, dropout=dropout) for name in ("gcn", "sage", "gat"))
    product, transposed = (20 * 3, 16, 40, 20), (20 * 3, 16, 20, 40)
    for model, forward, backward in (
        (gcn, ((50 + 10, 16, 20, 10),), ((50 + 10, 16, 10, 20),)),
        # own rows have a product of their own
        (sage, ((50, 16, 20, 10), (30, 16, 40, 10)), ((50, 16, 10, 20), (30, 16, 10, 40))),
        (gat, ((60, 16, 20, 10),), ((60, 16, 10, 20),) * 2),
    ):
        assert [model.rows(layer).multiplied_first for layer in (1, 2)] == [True, False]
        assert not model.aggregate_cached(1)
        assert model.layers[0].projects_first and model.aggregating_first.layers[0].projects_first
        ahead, back = model.forward(1, 10, 20, 50), model.backward(1, 10, 20, 50)
        assert ahead.flops == back.flops == 0.0
        assert ahead.gathers == (product, *forward) and back.gathers == (transposed, *backward)
    assert gnn("gcn", 3.0, hidden=64, dropout=dropout).layers[0].projects_first  # though it widens
    dense = gnn("gcn", dropout=dropout)
    hashed = [model.forward(1, 10, 20, 50).hash_ops for model in (gcn, dense)]
    assert hashed[0] < hashed[1] or not dropout
    assert gcn.forward(2, 10, 20, 50) == dense.forward(2, 10, 20, 50)
    assert gcn.feature_transit_bytes(10) == 10 * 3 * 2 * 4
    assert dense.feature_transit_bytes(10) == 10 * 40 * 4


def test_own_rows_of_sparse_features_are_sparse_after_an_aggregation_on_columns():
    """Feature parallelism multiplied all 8,415 columns of Coauthor Physics in plans: an epoch of
    0.16 s was promised to take 0.8."""
    by_columns, _ = arranged(gnn("sage", 3.0), alternating=False)
    ahead, back = by_columns.end(1, 10)
    assert ahead.flops == back.flops == 0.0
    assert ahead.gathers == ((30, 16, 40, 10),) and back.gathers == ((30, 16, 10, 40),)


def test_numbers_of_sparse_features_are_looked_up_and_encoded():
    """In the transpose, which every mini-batch makes anew."""
    sampled = {"mode": "mini", "layers": 2, "fanout": (5, 5), "batch": 8}
    mini, full = (gnn("gcn", 3.0, **more).backward(1, 10, 20, 50) for more in (sampled, {}))
    assert (mini.hash_ops, full.hash_ops) == (20 * 3 * 5, 20 * 3)
    assert mini.scattered and not full.scattered
    assert not gnn("gcn", 3.0, **sampled).forward(1, 10, 20, 50).scattered  # frequent columns
    encoding = gnn("gcnii", 3.0)
    assert [encoding.rows(layer).multiplied_first for layer in (0, 1)] == [True, False]
    ahead, back = encoding.encode(10)
    assert ahead.gathers == ((30, 16, 40, 10),) and back.gathers == ((30, 16, 10, 40),)
    assert back.flops == 0.0
    assert encoding.finish(10)[0].flops == 2 * 10 * 16 * 16 and not encoding.finish(10)[0].gathers


def test_what_multiplies_constant_rows_first_aggregates_their_gradient():
    """Its weight gradient needs the projected rows' one; where it aggregates first it does not."""
    for hidden, gathers in ((16, ((60, 16, 10, 20),)), (64, ())):
        assert gnn("gcn", hidden=hidden, dropout=0.5).backward(1, 10, 20, 50).gathers == gathers


def test_batch_norm_stands_between_a_layer_and_a_narrow_exchange():
    for norm, narrows in (("none", True), ("layer", True), ("batch", False)):
        assert gnn("sage", norm=norm).narrows == narrows
