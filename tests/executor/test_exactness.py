"""Exact strategies: several ranks train to the weights of one process.

One process itself is held against training written plainly with dense matrices (plain.py), so that
an error that all ranks share shows too."""

import itertools

import numpy as np
import pytest
from examples import NIGHT
from pairwise import covered, pairs

from gnnplan.planner.graph.load import load
from gnnplan.planner.strategies import parse
from gnnplan.testing.plain import difference, train_plainly
from gnnplan.testing.ranks import SMALL, Case
from gnnplan.testing.runs import must_have_learnt, must_train_as_one_process, one_process

pytestmark = pytest.mark.timeout(110)
NIGHTLY = pytest.mark.nightly

MODELS = ("gcn", "sage", "gcnii")
GRAPH_PARALLEL = (
    "graph_parallel",
    "graph_parallel(narrow=True)",
    "graph_parallel(narrow=True,checkpoint=True)",
    "graph_parallel(trim=True)",
    "graph_parallel(narrow=True,checkpoint=True,trim=True)",
    "gnnpipe(chunks=1)",
)
GRANNDIS = (
    "granndis(depth=0)",
    "granndis(depth=1)",
    "granndis(depth=1,narrow=True)",
    "granndis(depth=2)",
    "granndis",
    "granndis(depth=2,trim=True)",
)
SETTINGS = [
    *((2, 1, s) for s in GRAPH_PARALLEL),
    *((2, 2, s) for s in GRANNDIS),
    (2, 1, "graph_parallel(narrow=True,checkpoint=True,buckets=3)"),
    (3, 1, "graph_parallel(buckets=4)"),
    (4, 2, "granndis(depth=1,buckets=2)"),
    (2, 1, "feature_parallel"),
    (3, 1, "feature_parallel"),
    (4, 2, "feature_parallel(order='alternating')"),
    *((3, 1, s) for s in GRAPH_PARALLEL),
    (3, 3, "granndis(depth=1)"),
    (4, 1, "gnnpipe(stages=2,chunks=1)"),
    *((4, 1, s) for s in GRAPH_PARALLEL),
    *((4, 2, s) for s in GRANNDIS),
]
NAMES = ("world", "servers", "strategy")


def workload(model: str, **more: object) -> dict[str, object]:
    """4 layers, so that 4 stages have one each; 12 features -> 8 -> 4 classes, so that narrow
    layers exist."""
    return {"model": model, **SMALL, "dropout": 0.0, **more}


# -- one process -----------------------------------------------------------------------------------


ONE_PROCESS = list(
    itertools.product(MODELS, ("rough", "multi"), (False, True), (0.0, 0.5), ("adam", "sgd"))
)


@pytest.mark.parametrize(
    ("model", "graph", "directed", "dropout", "optimizer"),
    covered(ONE_PROCESS, lambda row: pairs(dict(enumerate(row)))),
)
def test_one_process_is_plain_training(
    run_ranks, graphs, model, graph, directed, dropout, optimizer
):
    how = workload(model, dtype="float64", dropout=dropout, optimizer=optimizer)
    case = Case("graph_parallel", graphs[graph], how, directed=directed)
    losses, weights = train_plainly(case)
    must_have_learnt(one_process(run_ranks, case), losses, weights)


def test_the_graphs_are_as_awkward_as_they_claim(graphs):
    rough, directed = load(graphs["rough"]), load(graphs["rough"], directed=True)
    assert (rough.degree == 0).sum() >= 6
    assert any("self-loops" in note for note in rough.stats.notes) and any(
        "duplicate" in note for note in rough.stats.notes
    )
    assert directed.stats.directed and directed.stats.edges < rough.stats.edges
    assert load(graphs["multi"]).stats.multilabel
    case = Case("graph_parallel", graphs["islands"], workload("gcn"))
    for world, silent in ((2, True), (4, False)):
        layout = case.problem(world).layout()
        assert layout.facts(2).sends.any() != silent
        trained = [int(layout.graph.train[layout.own(rank)].sum()) for rank in range(world)]
        assert 0 in trained and sum(trained) > 0


# -- several ranks ---------------------------------------------------------------------------------


# a Latin square: every setting meets every model and every way to train, every model every way
WAYS = ((0.0, "adam"), (0.5, "sgd"), (0.5, "adam"))
TRAININGS = [
    (*setting, model, *WAYS[(number + shift) % len(WAYS)])
    for number, setting in enumerate(SETTINGS)
    for shift, model in enumerate(MODELS)
]


@pytest.mark.parametrize(
    (*NAMES, "model", "dropout", "optimizer"),
    covered(
        TRAININGS,
        # a strategy, its family on each world, a model in each way, and in each order of products
        lambda row: {
            *(row[2], (*row[:2], type(parse(row[2]))), row[3:]),
            "alternating" in row[2] and row[3],
        },
    ),
)
def test_float64_weights(run_ranks, graphs, world, servers, strategy, model, dropout, optimizer):
    how = workload(model, dtype="float64", dropout=dropout, optimizer=optimizer)
    case = Case(strategy, graphs["rough"], how, servers, eval_every=2)
    must_train_as_one_process(run_ranks, world, [case], weights=1e-9, losses=1e-9)


@pytest.mark.parametrize(
    NAMES, covered(SETTINGS, lambda setting: {setting[0], type(parse(setting[2]))})
)
def test_float32_losses(run_ranks, graphs, world, servers, strategy):
    """Weights under plain SGD only, since Adam divides rounding by rounding."""
    model = MODELS[SETTINGS.index((world, servers, strategy)) % len(MODELS)]
    sgd = Case(strategy, graphs["rough"], workload(model, dropout=0.5, optimizer="sgd"), servers)
    must_train_as_one_process(run_ranks, world, [sgd], weights=1e-4, losses=1e-4)
    adam = Case(strategy, graphs["rough"], workload("sage", optimizer="adam", lr=0.01), servers)
    must_train_as_one_process(run_ranks, world, [adam], weights=1.0, losses=1e-4)


ROUNDED = [
    (3, 1, "graph_parallel(narrow=True,checkpoint=True)"),
    (4, 2, "granndis(depth=1)"),
    (2, 1, "bns(p=1)"),
    (3, 1, "feature_parallel"),
    (1, 1, "offload(chunks=4)"),
    (4, 1, "gnnpipe(stages=2,chunks=1)"),
]


@pytest.mark.parametrize(NAMES, ROUNDED)
def test_bfloat16_losses(run_ranks, graphs, world, servers, strategy):
    """Rows that cross are rounded once more: 2^-9 of their value. Where that turns the sign of a
    number before ReLU, a gradient of these few rows changes by some percent, as it does between
    float32 and bfloat16 in one process. PipeGCN's are a fifth off."""
    model = "gcn" if strategy == "offload(chunks=4)" else "gcnii"
    how = workload(model, dtype="bfloat16", dropout=0.5, optimizer="sgd")
    case = Case(strategy, graphs["rough"], how, servers)
    (ranks,), alone = run_ranks(world, [case]), one_process(run_ranks, case)
    assert ranks.losses == pytest.approx(alone.losses, rel=2**-9)
    assert difference(ranks.weights, alone.weights) <= 0.01


def test_columns_that_bfloat16_does_not_hold_cross_whole(run_ranks, graphs, tmp_path):
    """Those above 256 would become even, and gradients go to their neighbours' weights."""
    with np.load(graphs["sparse"]) as file:
        arrays = dict(file)
    arrays["x_indices"], arrays["x_shape"] = 260 + arrays["x_indices"], [60, 300]
    np.savez(tmp_path / "wide.npz", **arrays)
    how = workload("sage", dtype="bfloat16", optimizer="sgd")
    case = Case("graph_parallel", str(tmp_path / "wide.npz"), how)
    (ranks,), alone = run_ranks(2, [case]), one_process(run_ranks, case)
    assert ranks.losses == pytest.approx(alone.losses, rel=2**-9)
    assert difference(ranks.weights, alone.weights) <= 0.01


# several labels, directed edges, an empty halo, parts without training vertices; stages without
# weights
AWKWARD = (
    ("multi", False, "gcnii", "adam"),
    ("rough", True, "gcn", "sgd"),
    ("rough", True, "sage", "adam"),
    ("islands", False, "sage", "sgd"),
    ("multi", True, "sgc", "adam"),
)
SHARED_OUT = [  # three of the five to every setting
    (*setting, *AWKWARD[(number + shift) % len(AWKWARD)])
    for number, setting in enumerate(SETTINGS)
    for shift in (0, 1, 3)
]


@pytest.mark.parametrize(
    (*NAMES, "graph", "directed", "model", "optimizer"),
    covered(SHARED_OUT, lambda row: {row[:2], type(parse(row[2])), row[3:]}),
)
def test_awkward_graphs(
    run_ranks, graphs, world, servers, strategy, graph, directed, model, optimizer
):
    how = workload(model, dtype="float64", dropout=0.5, optimizer=optimizer)
    case = Case(strategy, graphs[graph], how, servers, directed=directed)
    must_train_as_one_process(run_ranks, world, [case], weights=1e-9, losses=1e-9)


# -- sparse features -------------------------------------------------------------------------------


ALL_MODELS = (*MODELS, "gat", "resgcn", "sgc", "gin", "gatv2")


@pytest.mark.parametrize("model", ALL_MODELS)
def test_sparse_features_in_one_process(run_ranks, graphs, model):
    """Training on dense matrices, dropout's masks included. By day each model in one way."""
    # wider than the features: multiplied first all the same
    ways = ((0.0, 8), (0.5, 8), (0.5, 48))
    for dropout, hidden in ways if NIGHT else [ways[ALL_MODELS.index(model) % 3]]:
        case = Case(
            "graph_parallel",
            graphs["sparse"],
            workload(model, dtype="float64", dropout=dropout, hidden=hidden),
        )
        assert case.problem(1).model.inputs.multiplied_first
        losses, weights = train_plainly(case)
        must_have_learnt(one_process(run_ranks, case), losses, weights)


SPARSE = (("sage", 0.5), ("gcn", 0.0), ("gcnii", 0.5))
TWO_EACH = [
    (*setting, *SPARSE[(number + shift) % len(SPARSE)])
    for number, setting in enumerate(SETTINGS)
    for shift in (0, 1)
]


@pytest.mark.parametrize(
    (*NAMES, "model", "dropout"),
    covered(
        TWO_EACH,
        lambda row: {row[0], type(parse(row[2])), row[3:]},
    ),
)
def test_sparse_features_on_ranks(run_ranks, graphs, world, servers, strategy, model, dropout):
    how = workload(model, dtype="float64", dropout=dropout)
    case = Case(strategy, graphs["sparse"], how, servers, eval_every=2)
    must_train_as_one_process(run_ranks, world, [case], weights=1e-9, losses=1e-9)


# -- attention, residual blocks, norms -------------------------------------------------------------

BLOCKS = (
    {"model": "gat"},
    {"model": "sgc"},
    {"model": "resgcn"},
    {"model": "resgcn", "aggregation": "sum", "norm": "batch"},
    {"model": "gcn", "norm": "layer"},
    {"model": "sage", "norm": "batch"},
    {"model": "gat", "heads": 2, "norm": "batch"},
    # Narrower rows are now and then dropped as a whole. With biases of zero ReLU then has to decide
    # on the sign of rounding.
    {"model": "gatv2", "hidden": 32},
    {"model": "gin"},
    {"model": "gin", "norm": "layer"},
)


def idle(how: dict[str, object]) -> tuple[str, ...]:
    """Biases that batch norm takes away again, in every layer whose output it reads."""
    last = 4 if how["model"] == "resgcn" else 3
    return (
        tuple(f"layers.{layer}.bias" for layer in range(1, last + 1))
        if how.get("norm") == "batch"
        else ()
    )


def optimizer_for(how: dict[str, object]) -> str:
    """Adam divides a gradient by its own size, and so turns the rounding of a gradient that is
    almost zero into a step. Batch norm's idle biases have such gradients, and its running means
    follow them; so has GATv2's `bias_in` (1.4e-9 apart on one kind of processor)."""
    return "sgd" if how.get("norm") == "batch" or how["model"] == "gatv2" else "adam"


def block_id(how: dict[str, object]) -> str:
    return "-".join(str(value) for value in how.values())


@pytest.mark.parametrize("how", BLOCKS, ids=block_id)
def test_one_process_is_plain_training_of_blocks(run_ranks, graphs, how):
    """Batch norm's running moments are among the weights. By day each in one of the ways."""
    ways = (("rough", False, 0.0), ("rough", True, 0.5), ("multi", False, 0.5))
    for graph, directed, dropout in ways if NIGHT else [ways[BLOCKS.index(how) % 3]]:
        work = workload(dtype="float64", dropout=dropout, optimizer=optimizer_for(how), **how)
        case = Case("graph_parallel", graphs[graph], work, directed=directed, eval_every=2)
        losses, weights = train_plainly(case)
        must_have_learnt(one_process(run_ranks, case), losses, weights, idle(how))
        assert any("running_var" in name for name in weights) == (how.get("norm") == "batch")


BLOCKS_ON_RANKS = [
    (*setting, how)
    for how in BLOCKS
    for setting in (
        (2, 1, "graph_parallel"),
        (3, 1, "graph_parallel(narrow=True)"),
        (3, 1, "graph_parallel(buckets=4)"),
        (4, 2, "granndis(depth=1)"),
        (2, 2, "granndis"),
        (2, 1, "gnnpipe(chunks=1)"),
        (3, 1, "feature_parallel"),
        (2, 1, "feature_parallel(order='alternating')"),
    )
    if setting[2] != "gnnpipe(chunks=1)" or how.get("norm") != "batch"  # it has no batch norm
    if "feature" not in setting[2] or how["model"] not in ("gat", "gatv2", "resgcn")
]


@pytest.mark.parametrize(
    (*NAMES, "how"),
    covered(
        BLOCKS_ON_RANKS,
        lambda row: {(*row[:2], type(parse(row[2]))), block_id(row[3])},
    ),
    ids=lambda value: block_id(value) if isinstance(value, dict) else str(value),
)
def test_ranks_train_blocks_as_one_process(run_ranks, graphs, world, servers, strategy, how):
    """Attention's logits and batch norm's moments cross, or are made again from rows that do."""
    graph, dropout = ("rough", 0.5) if world < 4 else ("multi", 0.0)
    work = workload(dtype="float64", dropout=dropout, optimizer=optimizer_for(how), **how)
    case = Case(strategy, graphs[graph], work, servers, eval_every=2)
    must_train_as_one_process(run_ranks, world, [case], 1e-9, 1e-9, idle(how))
