"""What models are to a plan: widths, weights and moments by hand; workloads that are no model."""

import pytest

from gnnplan.planner.gnn.model import MASK, describe
from gnnplan.planner.gnn.workload import Workload
from gnnplan.planner.graph.load import load
from gnnplan.planner.problem.inputs import apply_overrides, ask_workload, read_cluster
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies import parse
from gnnplan.planner.strategies.layerwise.exchange import ExchangeOptions
from gnnplan.planner.strategies.layerwise.step import step
from gnnplan.planner.vocabulary.errors import SpecError

GRAPH = load("synthetic:community?vertices=120&edges=900&features=40&classes=5")


def problem_of(ranks: int = 4, **workload: object) -> Problem:
    cluster, asked = apply_overrides(
        read_cluster("pipegcn_2080ti"),
        Workload.model_validate(workload),
        [f"gpus_per_server={ranks}"],
    )
    return Problem(GRAPH.stats, GRAPH, asked, cluster)


def test_attention_brings_its_logits():
    """3 layers, 40 -> 16 -> 16 -> 5 with 4, 4 and 1 heads: W, a (two numbers per output) and b. A
    projected row has a logit per head."""
    model = describe(Workload(model="gat", hidden=16), 40, 5)
    assert model.weights == (40 * 16 + 2 * 16 + 16) + (16 * 16 + 2 * 16 + 16) + (16 * 5 + 2 * 5 + 5)
    assert [model.exchanged_width(layer, narrow=False) for layer in (2, 3)] == [16, 16]
    assert [model.exchanged_width(layer, narrow=True) for layer in (2, 3)] == [16, 5 + 1]
    # 16 + 4 is more than 16; features never cross
    assert [model.narrow_at(layer) for layer in (1, 2, 3, 4)] == [False, False, True, False]
    assert not model.aggregate_cached(1) and all(
        layer.projects_first for layer in model.aggregating_first.layers
    )
    assert describe(Workload(model="gat", hidden=3, layers=1), 40, 5).layers[0].heads == 1


def test_a_product_reads_and_writes_rows():
    """Layer 2 of three, 16 -> 16: both ways, and the gradients of rows and of the matrix as much
    again each."""
    model = describe(Workload(model="gcn", hidden=16), 40, 5)
    assert model.forward(2, 10, 20, 50).gemm_bytes == 10 * (16 + 16) * 4
    assert model.backward(2, 10, 20, 50).gemm_bytes == 2 * 10 * (16 + 16) * 4
    # sparse rows: gathered
    assert (
        describe(Workload(model="gcn", hidden=16), 40, 5, 2.5).forward(1, 10, 20, 50).gemm_bytes
        == 0
    )


def test_a_mask_is_made_in_the_forward_pass_alone():
    """What dropout adds forward, it adds twice backward (as everything), but for the mask's own
    operations."""
    more = []
    for direction in ("forward", "backward"):
        without, dropped = (
            getattr(describe(Workload(model="gcn", hidden=16, dropout=p), 40, 5), direction)(
                2, 10, 20, 50
            )
            for p in (0.0, 0.5)
        )
        more.append(dropped.launches - without.launches)
    assert more == [MASK + 3, 2 * 3]


def test_residual_blocks_and_norms():
    """An encoder, 3 layers of which the first has no norm, a norm and the decoder."""
    model = describe(Workload(model="resgcn", hidden=16), 40, 5)
    assert model.norm == "layer" and model.first_varying == 0 and not model.sends_initial
    assert model.weights == (40 * 16 + 16) + 3 * (16 * 16 + 16) + 2 * 2 * 16 + 2 * 16 + (16 * 5 + 5)
    assert model.weights_of(range(1, 3)) + model.weights_of(range(3, 4)) == model.weights
    assert not any(model.moments(layer) for layer in (1, 2, 3, 4))
    batch = describe(Workload(model="resgcn", hidden=16, norm="batch"), 40, 5)
    assert [batch.moments(layer) for layer in (1, 2, 3, 4)] == [
        0,
        32,
        32,
        32,
    ] and batch.weights == model.weights
    assert [
        describe(Workload(model="sage", norm="batch", hidden=16), 40, 5).moments(layer)
        for layer in (1, 2, 3, 4)
    ] == [0, 32, 32, 0]
    bare, normal = (
        describe(Workload(model="gcn", norm=norm, hidden=16), 40, 5).weights
        for norm in ("none", "layer")
    )
    assert normal == bare + 2 * 2 * 16


def test_sgc_is_one_matrix_and_one_bias():
    """3 layers, 40 -> 5 -> 5 -> 5: W in the first, b in the last, and but for these each is an
    aggregation, 5 numbers wide."""
    model = describe(Workload(model="sgc", hidden=16, dropout=0.5), 40, 5)
    assert model.weights == 40 * 5 + 5 and [
        model.weights_of(range(layer, layer + 1)) for layer in (1, 2, 3)
    ] == [40 * 5, 0, 5]
    assert describe(Workload(model="sgc", layers=1), 40, 5).weights == 40 * 5 + 5
    assert (
        not any(model.relu_after(layer) for layer in (0, 1, 2, 3))
        and not model.narrows
        and model.prepares_linearly
    )
    # a vector of columns at least
    assert [model.forward(layer, 10, 20, 50).flops for layer in (1, 2, 3)] == [
        2 * 20 * 40 * 16,
        0,
        0,
    ]
    assert [model.forward(layer, 10, 20, 50).gathers for layer in (1, 2, 3)] == [
        ((50 + 10, 5, 20, 10),)
    ] * 3
    backward = [model.backward(layer, 10, 20, 50) for layer in (1, 2, 3)]
    assert [work.flops for work in backward] == [  # features get no gradient
        2 * 20 * 40 * 16,
        0,
        0,
    ]
    cached = describe(Workload(model="sgc", hidden=16), 40, 5)
    assert cached.aggregate_cached(1) and cached.forward(1, 10, 20, 50).flops == 2 * 10 * 40 * 16
    assert [
        cached.forward(layer, 10, 20, 50) == model.forward(layer, 10, 20, 50) for layer in (1, 2, 3)
    ] == [False, True, True]


def test_a_softmax_costs_two_sums():
    one, two = (
        describe(Workload(model="resgcn", aggregation=name), 40, 5).forward(2, 10, 20, 30).gathers
        for name in ("sum", "softmax")
    )
    assert two == one * 2 == ((30, 256, 20, 10),) * 2


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_sparse_features_are_multiplied_first(dropout):
    """A row of the matrix per number is gathered, and for its gradient a row of the output's: 40
    columns of which 3 are not zero, 16 hidden, on 10 rows, 20 sources and 50 edges. Nothing is as
    wide as the features, and nothing of them is cached."""
    gcn, sage, gat = (
        describe(Workload(model=name, hidden=16, dropout=dropout), 40, 5, 3.0)
        for name in ("gcn", "sage", "gat")
    )
    for model in (gcn, sage, gat):
        assert [model.rows(layer).multiplied_first for layer in (1, 2)] == [True, False]
        assert not model.aggregate_cached(1)
        assert model.layers[0].projects_first and model.aggregating_first.layers[0].projects_first
        forward, backward = model.forward(1, 10, 20, 50), model.backward(1, 10, 20, 50)
        assert forward.flops == backward.flops == 0.0
    assert gcn.forward(1, 10, 20, 50).gathers == ((20 * 3, 16, 40, 20), (50 + 10, 16, 20, 10))
    # transposed
    assert gcn.backward(1, 10, 20, 50).gathers == ((20 * 3, 16, 20, 40), (50 + 10, 16, 10, 20))
    # own rows have a product of their own
    assert sage.forward(1, 10, 20, 50).gathers == (
        (20 * 3, 16, 40, 20),
        (50, 16, 20, 10),
        (10 * 3, 16, 40, 10),
    )
    assert sage.backward(1, 10, 20, 50).gathers == (
        (20 * 3, 16, 20, 40),
        (50, 16, 10, 20),
        (10 * 3, 16, 10, 40),
    )
    assert gat.backward(1, 10, 20, 50).gathers == ((20 * 3, 16, 20, 40), *((60, 16, 10, 20),) * 2)
    # a number is looked up in the transpose, which every mini-batch makes anew
    sampled = Workload(model="gcn", hidden=16, mode="mini", layers=2, fanout=(5, 5), batch=8)
    mini = describe(sampled, 40, 5, 3.0).backward(1, 10, 20, 50)
    full = describe(Workload(model="gcn", hidden=16), 40, 5, 3.0).backward(1, 10, 20, 50)
    assert (mini.hash_ops, full.hash_ops) == (20 * 3 * 3, 20 * 3)
    assert mini.scattered and not full.scattered
    # though it widens
    assert (
        describe(Workload(model="gcn", hidden=64, dropout=dropout), 40, 5, 3.0)
        .layers[0]
        .projects_first
    )
    dense = describe(Workload(model="gcn", hidden=16, dropout=dropout), 40, 5)
    assert (
        gcn.forward(1, 10, 20, 50).hash_ops < dense.forward(1, 10, 20, 50).hash_ops or not dropout
    )
    assert gcn.forward(2, 10, 20, 50) == dense.forward(2, 10, 20, 50)
    encoding = describe(Workload(model="gcnii", hidden=16, dropout=dropout), 40, 5, 3.0)
    assert [encoding.rows(layer).multiplied_first for layer in (0, 1)] == [True, False]
    assert [work.gathers for work in encoding.encode(10)] == [
        ((30, 16, 40, 10),),
        ((30, 16, 10, 40),),
    ]
    assert encoding.encode(10)[1].flops == 0.0
    assert encoding.finish(10)[0].flops == 2 * 10 * 16 * 16 and not encoding.finish(10)[0].gathers
    assert gcn.features_moved(10) == 10 * 3 * 2 * 4 and dense.features_moved(10) == 10 * 40 * 4


def test_what_multiplies_constant_rows_first_aggregates_their_gradient():
    """Layer 1's weight gradient needs that of the projected rows, through the transposed edges;
    where it aggregates first it does not."""
    first, last = (
        describe(Workload(model="gcn", hidden=hidden, dropout=0.5), 40, 5) for hidden in (16, 64)
    )
    assert (
        first.backward(1, 10, 20, 50).gathers == ((60, 16, 10, 20),)
        and last.backward(1, 10, 20, 50).gathers == ()
    )


def test_bytes_of_moments_by_hand():
    """Forward and backward, 2 H numbers in a ring of 4, before layers 2 and 3 and the decoder;
    where halo rows cross after them."""
    problem = problem_of(model="resgcn", hidden=16, norm="batch")
    p = parse("graph_parallel").predict(problem)
    assert p.bytes["moments"] == 3 * 2 * (2 * 3) * (2 * 16) * 4
    order = [
        f"{op.op}:{op.direction}:{op.layer}"
        for op in step(problem, problem.layout(), ExchangeOptions())
    ]
    assert (
        order.index("moments:f:2") == order.index("halo:f:2") - 1
        and order.index("moments:b:2") == order.index("halo:b:2") + 1
    )
    assert (
        order[order.index("loss::None") - 1] == "moments:f:4"
        and order[order.index("loss::None") + 1] == "moments:b:4"
    )
    assert not [op for op in order if "moments" in op and op.endswith(":1")]
    assert not {"moments"} & {
        op.op
        for op in step(
            problem_of(1, model="resgcn", norm="batch"), problem_of(1).layout(), ExchangeOptions()
        )
    }


def test_batch_norm_stands_between_a_layer_and_a_narrow_exchange():
    plain, layer, batch = (
        describe(Workload(model="sage", hidden=16, norm=norm), 40, 5)
        for norm in ("none", "layer", "batch")
    )
    assert [model.narrows for model in (plain, layer, batch)] == [True, True, False]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            {"model": "gat", "hidden": 10},
            r"hidden must be a multiple of gat's heads \(hidden: 10, heads: 4\); use heads=2",
        ),
        ({"model": "gcnii", "norm": "batch"}, "gcnii is defined without a norm .*use norm=none"),
        (
            {"model": "sgc", "norm": "layer"},
            "sgc is defined without a norm .*use norm=none, or gcn",
        ),
        ({"model": "resgcn", "aggregation": "max"}, "--aggregation: must be 'softmax' or 'sum'"),
        ({"norm": "group"}, "--norm: must be 'none', 'layer' or 'batch'"),
        ({"model": "gat", "heads": 0}, "--heads: must be greater"),
    ],
)
def test_what_is_no_model(flags, words):
    with pytest.raises(SpecError, match=words):
        ask_workload(None, flags)
