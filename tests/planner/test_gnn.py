"""What models are to a plan: widths, weights and moments by hand; workloads that are no model."""

import pytest

from gnnplan.planner.gnn.model import MASK, Model, describe
from gnnplan.planner.gnn.workload import Workload
from gnnplan.planner.strategies import parse
from gnnplan.testing.laws import GRAPHS, cluster, problem_of


def gnn(model: str, *sparse: float, **workload: object) -> Model:
    """Of 40 features and 5 classes, and 16 numbers in between."""
    return describe(Workload(**{"model": model, "hidden": 16, **workload}), 40, 5, *sparse)


def test_attention_brings_its_logits():
    """40 -> 16 -> 16 -> 5 with 4, 4 and 1 heads: W, a (two numbers per output) and b."""
    model = gnn("gat")
    assert model.weights == (40 * 16 + 2 * 16 + 16) + (16 * 16 + 2 * 16 + 16) + (16 * 5 + 2 * 5 + 5)
    assert [model.exchanged_width(layer, narrow=False) for layer in (2, 3)] == [16, 16]
    assert [model.exchanged_width(layer, narrow=True) for layer in (2, 3)] == [16, 5 + 1]
    # 16 + 4 is more than 16; features never cross
    assert [model.narrow_at(layer) for layer in (1, 2, 3, 4)] == [False, False, True, False]
    assert not model.aggregate_cached(1)
    assert all(layer.projects_first for layer in model.aggregating_first.layers)
    assert gnn("gat", hidden=3, layers=1).layers[0].heads == 1


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


def test_residual_blocks_and_norms():
    """An encoder, 3 layers of which the first has no norm, a norm and the decoder."""
    model, batch = gnn("resgcn"), gnn("resgcn", norm="batch")
    assert model.norm == "layer" and model.first_varying == 0 and not model.sends_initial
    assert model.weights == (40 * 16 + 16) + 3 * (16 * 16 + 16) + 2 * 2 * 16 + 2 * 16 + (16 * 5 + 5)
    assert model.weights_of(range(1, 3)) + model.weights_of(range(3, 4)) == model.weights
    assert batch.weights == model.weights
    for one, moments in (
        (model, [0, 0, 0, 0]),
        (batch, [0, 32, 32, 32]),
        (gnn("sage", norm="batch"), [0, 32, 32, 0]),
    ):
        assert [one.moments(layer) for layer in (1, 2, 3, 4)] == moments
    assert gnn("gcn", norm="layer").weights == gnn("gcn", norm="none").weights + 2 * 2 * 16


def test_sgc_is_one_matrix_and_one_bias():
    """40 -> 5 -> 5 -> 5: W in the first, b in the last, and each else an aggregation, 5 wide."""
    model, cached, layers = gnn("sgc", dropout=0.5), gnn("sgc"), (1, 2, 3)
    assert model.weights == gnn("sgc", layers=1).weights == 40 * 5 + 5
    weights = [model.weights_of(range(layer, layer + 1)) for layer in layers]
    assert weights == [40 * 5, 0, 5]
    assert not any(model.relu_after(layer) for layer in (0, *layers))
    assert not model.narrows and model.prepares_linearly
    forward, backward, constant = (
        [work(layer, 10, 20, 50) for layer in layers]
        for work in (model.forward, model.backward, cached.forward)
    )
    # a vector of columns at least; features get no gradient
    assert [work.flops for work in forward] == [work.flops for work in backward]
    assert [work.flops for work in forward] == [2 * 20 * 40 * 16, 0, 0]
    assert [work.gathers for work in forward] == [((50 + 10, 5, 20, 10),)] * 3
    assert cached.aggregate_cached(1) and constant[0].flops == 2 * 10 * 40 * 16
    assert constant[0] != forward[0] and constant[1:] == forward[1:]


def test_a_softmax_costs_two_sums():
    one, two = (gnn("resgcn", aggregation=n).forward(2, 10, 20, 30) for n in ("sum", "softmax"))
    assert two.gathers == one.gathers * 2 == ((30, 16, 20, 10),) * 2


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


def test_bytes_of_moments_by_hand():
    """Forward and backward, 2 H numbers in a ring of 4, before layers 2 and 3 and the decoder."""
    asked = {"model": "resgcn", "layers": 3, "hidden": 16, "norm": "batch"}
    problem, alone = (problem_of(GRAPHS[1], cluster(1, ranks), **asked) for ranks in (4, 1))
    strategy = parse("graph_parallel")
    assert strategy.predict(problem).bytes["moments"] == 3 * 2 * (2 * 3) * (2 * 16) * 4
    steps = [strategy.program(each).step(0) for each in (problem, alone)]
    order = [f"{op.op}:{op.direction}:{op.layer}" for op in steps[0]]
    at = {name: order.index(name) for name in order}
    assert at["moments:f:2"] == at["halo:f:2"] - 1 and at["moments:b:2"] == at["halo:b:2"] + 1
    assert order[at["loss::None"] - 1] == "moments:f:4"
    assert order[at["loss::None"] + 1] == "moments:b:4"
    assert not {"moments:f:1", "moments:b:1"} & {*order}
    assert not [op for op in steps[1] if op.op == "moments"]


def test_batch_norm_stands_between_a_layer_and_a_narrow_exchange():
    for norm, narrows in (("none", True), ("layer", True), ("batch", False)):
        assert gnn("sage", norm=norm).narrows == narrows
