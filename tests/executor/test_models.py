"""Models against dense matrices, and weights that do not depend on who holds them. Layers of DGL and
PyG are trained beside ours in test_user_modules.py."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gnnplan.executor.layers.blocks import weighted_block
from gnnplan.executor.layers.kernels import Block
from gnnplan.executor.layers.layer import keep
from gnnplan.executor.layers.models import BatchNorm, Net
from gnnplan.executor.ranks.learner import Gradients, Optimizer
from gnnplan.planner.gnn.model import describe
from gnnplan.planner.gnn.workload import Workload
from gnnplan.planner.graph.graph import Graph
from gnnplan.testing.plain import Plain
from gnnplan.testing.ranks import Case

MODELS = ("gcn", "sage", "gcnii", "gat", "resgcn", "sgc", "gin", "gatv2")
DTYPES = (torch.float64, torch.float32)
TOLERANCE = {
    torch.float64: {"rtol": 1e-10, "atol": 1e-12},
    torch.float32: {"rtol": 1e-4, "atol": 1e-5},
}


def block_of(graph: Graph, edges: str, dtype: torch.dtype) -> Block:
    """The whole graph with a layer's edge weights, as one rank has it."""
    everything = np.arange(graph.stats.vertices)
    workload = Workload(dtype="float64" if dtype == torch.float64 else "float32")
    return weighted_block(
        graph, edges, everything, everything, graph.indptr, graph.indices, workload
    )


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(
        *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    ).to(dtype)


# -- what layers touch ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_batch_norm_is_torchs(dtype):
    """Rows of three ranks, by hand as the executor does it: outputs, gradients and running moments
    over several steps; then evaluation. The columns' means are far from zero, where a plain sum of
    squares would lose float32's digits."""
    ours, theirs = BatchNorm(5).to(dtype), torch.nn.BatchNorm1d(5).to(dtype)
    ours.weight.data = theirs.weight.data = random(5, dtype=dtype, seed=1)
    for step in range(60):
        x = (
            random(90, 5, dtype=dtype, seed=step) + torch.tensor([0, 1, 10, 100, -300], dtype=dtype)
        ).requires_grad_()
        parts = x.detach().split([50, 0, 40])
        moments = ours.moments(sum(ours.sums(part) for part in parts), 90).requires_grad_()
        if step in (0, 59):
            leaves = [part.clone().requires_grad_() for part in parts]
            gradient = random(90, 5, dtype=dtype, seed=9)
            out = torch.cat([ours(leaf, moments) for leaf in leaves])
            ours.zero_grad()
            out.backward(gradient)
            home = [leaf.grad + ours.home(leaf, moments, moments.grad, 90) for leaf in leaves]
            expected = theirs(x)
            theirs.zero_grad()
            expected.backward(gradient)
            close = (
                {"rtol": 1e-9, "atol": 1e-9}
                if dtype == torch.float64
                else {"rtol": 2e-2, "atol": 2e-2 if step == 0 else 5e-4}
            )
            torch.testing.assert_close(out, expected, **close)
            torch.testing.assert_close(torch.cat(home), x.grad, **close)
            torch.testing.assert_close(
                ours.weight.grad, theirs.weight.grad, rtol=close["rtol"], atol=100 * close["atol"]
            )
        else:
            theirs(x)
    torch.testing.assert_close(ours.running_mean, theirs.running_mean)
    torch.testing.assert_close(
        ours.running_var, theirs.running_var, rtol=1e-3 if dtype == torch.float32 else 1e-12, atol=0
    )
    torch.testing.assert_close(ours(x, None), theirs.eval()(x), rtol=1e-3, atol=1e-3)


# -- the whole model -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("directed", [False, True])
@pytest.mark.parametrize("model", MODELS)
def test_net_is_the_plain_model(graphs, model, directed, dtype):
    """Logits and every weight's gradient."""
    name = "float64" if dtype == torch.float64 else "float32"
    case = Case(
        "graph_parallel",
        graphs["rough"],
        {"model": model, "layers": 4, "hidden": 8, "seed": 5, "dtype": name},
        directed=directed,
    )
    problem, plain = case.problem(1), Plain(case)
    net = Net(problem.model, problem.workload)
    x = torch.tensor(problem.graph.features(), dtype=dtype)
    h = x0 = net.encode(x) if net.encoder else x
    for number in net.which:
        layer = net.layer(number)
        h = layer(block_of(problem.graph, layer.edges, dtype), h, keep, x0, net.relu_after(number))
    logits = net.decode(h)
    expected, _ = plain.forward(None)
    torch.testing.assert_close(logits.double(), expected, **TOLERANCE[dtype])
    gradient = random(*logits.shape, dtype=dtype, seed=9)
    logits.backward(gradient)
    expected.backward(gradient.double())
    for key, parameter in net.named_parameters():
        torch.testing.assert_close(
            parameter.grad.double(), plain.w[key].grad, **TOLERANCE[dtype], msg=key
        )


@given(
    model=st.sampled_from(MODELS),
    layers=st.integers(1, 9),
    cut=st.integers(0, 9),
    seed=st.integers(0, 2**31 - 1),
)
def test_weights_do_not_depend_on_who_holds_them(model, layers, cut, seed):
    """A stage's layers start as they do in the whole model: together the stages have it all, and
    nothing twice."""
    cut = min(cut, layers)
    workload = Workload(model=model, layers=layers, hidden=4, seed=seed)
    shapes = describe(workload, 5, 2)
    whole = Net(shapes, workload).state_dict()
    torch.manual_seed(123)  # torch's own random numbers play no part
    stages = [
        Net(shapes, workload, which).state_dict()
        for which in (range(1, cut + 1), range(cut + 1, layers + 1))
        if which
    ]
    assert sum(len(stage) for stage in stages) == len(whole)
    together = {name: p for stage in stages for name, p in stage.items()}
    assert together.keys() == whole.keys()
    assert all(torch.equal(together[name], whole[name]) for name in whole)
    assert sum(p.numel() for p in whole.values()) == shapes.weights


def test_weights_are_drawn_apart():
    """No two matrices of a model are alike, other seeds give others, and numbers lie within
    Glorot's bound."""
    draws = []
    for seed in (0, 1):
        workload = Workload(model="sage", layers=4, hidden=6, seed=seed)
        for name, p in Net(describe(workload, 6, 6), workload).state_dict().items():
            if p.ndim == 2:
                assert p.abs().max() <= (6 / 12) ** 0.5
                draws.append(p)
            else:
                assert not p.any(), name
    assert len(draws) == 16
    assert not any(torch.equal(a, b) for i, a in enumerate(draws) for b in draws[:i])


@pytest.mark.nightly
@pytest.mark.parametrize(("aggregation", "norm"), [("softmax", "layer"), ("sum", "batch")])
def test_a_model_of_112_layers_trains(run_ranks, graphs, aggregation, norm):
    """ResGCN+ as deep as GraNNDis' deepest."""
    how = {
        "model": "resgcn",
        "layers": 112,
        "hidden": 16,
        "dropout": 0.2,
        "lr": 0.003,
        "aggregation": aggregation,
        "norm": norm,
    }
    losses = run_ranks.alone(Case("graph_parallel", graphs["rough"], how, epochs=8)).losses
    assert np.isfinite(losses).all()
    assert losses[-1] < 0.8 * losses[0] and max(losses[4:]) < losses[0]


@pytest.mark.parametrize(
    ("model", "turned"),
    [
        ("gcn", ["layers.1.weight"]),
        ("sage", ["layers.1.weight", "layers.1.weight_self"]),
        ("gat", ["layers.1.weight"]),
        ("gcnii", ["encoder.weight"]),
        ("resgcn", ["encoder.weight"]),
    ],
)
def test_what_multiplies_sparse_features_lies_column_by_column(model, turned):
    """Every chunk of a pipeline turned the matrix and its gradient anew. The gradient, Adam's
    moments and the sum over ranks lie alike, and numbers are those of dense features."""
    workload = Workload(model=model, layers=3, hidden=4)
    sparse, dense = (Net(describe(workload, 50, 3, nonzeros), workload) for nonzeros in (2.5, 0.0))
    assert [
        name for name, p in sparse.named_parameters() if p.ndim == 2 and not p.is_contiguous()
    ] == turned
    gradients, plain = (Gradients(net.parameters(), (0,)) for net in (sparse, dense))
    how = Workload(lr=0.1)
    adam, theirs = (Optimizer(each.parameters, how) for each in (gradients, plain))
    for (name, p), q, mean in zip(
        sparse.named_parameters(), dense.parameters(), adam.kept["mean"], strict=True
    ):
        assert p.stride() == p.grad.stride() == mean.stride(), name
        assert torch.equal(p, q), name
        q.grad.copy_(random(*q.shape, dtype=torch.float32))
        p.grad.copy_(q.grad)
    # views of the buffer that is summed
    assert torch.equal(gradients.flat.sort().values, plain.flat.sort().values)
    adam.step(), theirs.step()
    assert all(
        torch.equal(p, q) for p, q in zip(sparse.parameters(), dense.parameters(), strict=True)
    )
