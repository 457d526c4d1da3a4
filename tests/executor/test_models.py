"""Batch norm against torch's, and how weights begin and lie."""

import pytest
import torch
from torch import Tensor

from gnnplan.executor.layers.models import BatchNorm, Net
from gnnplan.executor.ranks.learner import Gradients, Optimizer
from gnnplan.planner.gnn.model import describe
from gnnplan.planner.gnn.workload import Workload


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_batch_norm_is_torchs(dtype):
    """Rows of three ranks, by hand as the executor does it: outputs, gradients and running moments.
    The columns' means are far from zero, where a plain sum of squares would lose float32's
    digits."""
    ours, theirs = BatchNorm(5).to(dtype), torch.nn.BatchNorm1d(5).to(dtype)
    ours.weight.data = theirs.weight.data = random(5, dtype=dtype, seed=1)
    close = {"rtol": 1e-9, "atol": 1e-9} if dtype == torch.float64 else {"rtol": 2e-2, "atol": 2e-2}
    for step in range(60):
        x = random(90, 5, dtype=dtype, seed=step) + torch.tensor([0, 1, 10, 100, -300], dtype=dtype)
        x.requires_grad_()
        leaves = [part.clone().requires_grad_() for part in x.detach().split([50, 0, 40])]
        moments = ours.moments(sum(ours.sums(part.detach()) for part in leaves), 90)
        moments.requires_grad_()
        out, expected = torch.cat([ours(leaf, moments) for leaf in leaves]), theirs(x)
        if step == 0:
            gradient = random(90, 5, dtype=dtype, seed=9)
            out.backward(gradient)
            expected.backward(gradient)
            home = [leaf.grad + ours.home(leaf, moments, moments.grad, 90) for leaf in leaves]
            torch.testing.assert_close(torch.cat(home), x.grad, **close)
            of_weights = close | {"atol": 100 * close["atol"]}
            torch.testing.assert_close(ours.weight.grad, theirs.weight.grad, **of_weights)
        torch.testing.assert_close(out, expected, **close)
    torch.testing.assert_close(ours.running_mean, theirs.running_mean)
    of_squares = {"rtol": 1e-3 if dtype == torch.float32 else 1e-12, "atol": 0}
    torch.testing.assert_close(ours.running_var, theirs.running_var, **of_squares)
    torch.testing.assert_close(ours(x, None), theirs.eval()(x), rtol=1e-3, atol=1e-3)


def test_weights_are_drawn_apart():
    """No two matrices are alike, other seeds give others, and all lie within Glorot's bound."""
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
    """Every chunk turned the matrix and its gradient anew. Numbers are those of dense features."""
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
    assert all(map(torch.equal, sparse.parameters(), dense.parameters()))
