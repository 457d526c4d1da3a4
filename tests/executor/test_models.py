"""Batch norm, optimizers and learning rates against torch's, and how weights begin and lie. Rows that
are rounded: in bfloat16, with weights in float32; and to 8, 4 or 2 bits in the bytes of 4. What
every strategy must do with such rows stands with its other claims: bytes and order, resume, memory,
the losses of one process."""

import math
import warnings
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR, StepLR
from torch.utils._python_dispatch import TorchDispatchMode

from gnnplan.executor.layers.count import Notes
from gnnplan.executor.layers.kernels import (
    Block,
    MixedWidth,
    SparseRows,
    UniformWidth,
    aggregate,
    few_bits,
    linear,
)
from gnnplan.executor.layers.kernels.few_bits import PERIOD, assigned
from gnnplan.executor.layers.kernels.hashed_dropout import GOLDEN, mix
from gnnplan.executor.layers.models import BatchNorm, Net
from gnnplan.executor.ranks.learner import Gradients, Optimizer
from gnnplan.planner.gnn import rows as planned
from gnnplan.planner.gnn.model import describe
from gnnplan.planner.gnn.rows import ADAPTIVE, Codec
from gnnplan.planner.gnn.workload import Workload
from gnnplan.planner.strategies import families, parse
from gnnplan.planner.strategies.base import ROUNDING
from gnnplan.testing.plain import difference
from gnnplan.testing.ranks import Case
from gnnplan.testing.runs import one_process


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


@pytest.mark.parametrize("kind", ["adam", "adamw"])
def test_torch_gets_no_weights_by_column_which_it_would_copy(kind):
    class Seen(TorchDispatchMode):
        by_row: bool | None = None

        def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
            if "fused" in str(operation):
                self.by_row = all(t.is_contiguous() for tensors in args[:4] for t in tensors)
            return operation(*args, **kwargs or {})

    weight = torch.nn.Parameter(torch.randn(40, 30).t())
    optimizer = Optimizer([weight], Workload(optimizer=kind))
    weight.grad = torch.randn_like(weight)
    with Seen() as seen:
        optimizer.step()
    assert seen.by_row


@pytest.mark.parametrize("warmup", [0, 1, 4])
@pytest.mark.parametrize("schedule", ["constant", "step", "cosine"])
def test_learning_rates_are_those_of_torch(schedule, warmup):
    epochs = 15
    how = Workload(lr=0.3, warmup=warmup, schedule=schedule, step_size=3, gamma=0.5, epochs=epochs)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.3)
    later = {
        "constant": lambda: LinearLR(optimizer, 1.0, 1.0),
        "step": lambda: StepLR(optimizer, 3, 0.5),
        "cosine": lambda: CosineAnnealingLR(optimizer, epochs - warmup),
    }[schedule]()
    if warmup:
        rises = LinearLR(optimizer, 1 / warmup, 1.0, total_iters=max(warmup - 1, 1))
        later = SequentialLR(optimizer, [rises, later], [warmup])
    rates = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # SequentialLR calls its parts as torch advises against
        for _ in range(epochs):
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            later.step()
    assert [how.lr_of(epoch) for epoch in range(epochs)] == pytest.approx(rates, rel=1e-12)
    assert how.varies_lr == (len({round(rate, 12) for rate in rates}) > 1)


def test_a_step_does_not_import_the_compiler(tmp_path, fork_server):
    program = tmp_path / "program.py"
    program.write_text(
        "import sys, torch; from gnnplan.executor.ranks.learner import Optimizer; "
        "from gnnplan.planner.gnn.workload import Workload; "
        "p = torch.zeros(2, requires_grad=True); p.grad = torch.ones(2); "
        "[Optimizer([p], Workload(optimizer=kind)).step() for kind in ('adam', 'adamw', 'sgd')];"
        " sys.exit('torch._dynamo' in sys.modules)"
    )
    (ended,) = fork_server.run([([str(program)], {})], tmp_path)
    assert ended.code == 0, ended.stderr


def case_of(strategy: str, graph: str, **more: Any) -> Case:
    workload = {"model": "sage", "layers": 3, "hidden": 16, "dtype": "bfloat16", **more}
    return Case(strategy, graph, workload, epochs=10, checkpoint_every=5)


@pytest.mark.parametrize(("graph", "features"), [("rough", 1 / 2), ("sparse", 6 / 8)])
def test_half_the_bytes_and_nearly_the_losses_of_float32(graph, features, run_ranks, graphs):
    """Losses to 1 % of float32's; weights and moments are finer. Sparse columns take 4 bytes."""
    rounded = case_of("graph_parallel", graphs[graph])
    whole = replace(rounded, workload={**rounded.workload, "dtype": "float32"})
    half, full = run_ranks(2, rounded), run_ranks(2, whole)
    assert half.losses == pytest.approx(full.losses, rel=0.01) and half.losses != full.losses
    for ours, theirs in ((half.rank(rank), full.rank(rank)) for rank in range(2)):
        assert 2 * ours["bytes"]["halo"] == theirs["bytes"]["halo"]
        assert ours["bytes"]["all_reduce"] == theirs["bytes"]["all_reduce"]
        assert ours["setup_bytes"].keys() == theirs["setup_bytes"].keys() == {"input_halo"}
        once = ours["setup_bytes"]["input_halo"], theirs["setup_bytes"]["input_halo"]
        assert once[0] == features * once[1] > 0
    files = [half.out / "weights.safetensors", *half.out.glob("checkpoints/*.safetensors")]
    assert len(files) > 1
    for file in files:
        assert {tensor.dtype for tensor in load_file(file).values()} == {torch.float32}, file
    assert all(not torch.equal(w, w.bfloat16().float()) for w in half.weights.values())


def test_columns_that_bfloat16_does_not_hold_cross_whole(run_ranks, graphs, tmp_path):
    """Those above 256 would become even, and gradients go to their neighbours' weights."""
    with np.load(graphs["sparse"]) as file:
        arrays = dict(file)
    arrays["x_indices"], arrays["x_shape"] = 260 + arrays["x_indices"], [60, 300]
    np.savez(tmp_path / "wide.npz", **arrays)
    case = case_of("graph_parallel", str(tmp_path / "wide.npz"), optimizer="sgd")
    ranks, alone = run_ranks(2, case), one_process(run_ranks, case)
    assert ranks.losses == pytest.approx(alone.losses, rel=2**-9)
    assert difference(ranks.weights, alone.weights) <= 0.01


def test_sums_of_rows_and_gradients_of_weights_are_rounded_once():
    """1003 ones added up in bfloat16 would stay at 256. The nearest number of 8 bits is 1004."""
    rows = 1003
    block = Block(np.array([0, rows]), np.arange(rows), rows)
    x = torch.ones(rows, 8, dtype=torch.bfloat16, requires_grad=True)
    for edges in (block, block.weighted(torch.ones(rows, dtype=torch.bfloat16))):
        assert aggregate(edges, x).tolist() == [[1004.0] * 8]
    weight, bias = torch.ones(4, 8, requires_grad=True), torch.zeros(4, requires_grad=True)
    linear(x, weight, bias).sum().backward()
    assert weight.grad is not None and weight.grad.unique().tolist() == [1004.0]
    assert bias.grad is not None and bias.grad.unique().tolist() == [1004.0]


def test_products_of_sparse_rows_are_rounded_once():
    """Forward over a row's numbers, backward over a column's. A weight's gradient is float32."""
    n = 1003
    row = SparseRows.of(torch.tensor([n]), torch.arange(n), torch.ones(n).bfloat16(), n)
    column = SparseRows.of(torch.ones(n).int(), torch.zeros(n), torch.ones(n).bfloat16(), 1)
    assert linear(row, torch.ones(4, n)).tolist() == [[1004.0] * 4]
    weight = torch.ones(4, 1, requires_grad=True)
    out = linear(column, weight)
    out.sum().backward()
    assert weight.grad is not None and weight.grad.tolist() == [[1004.0]] * 4
    assert (out.dtype, weight.grad.dtype) == (torch.bfloat16, torch.float32)


def test_rows_take_half_the_memory_and_weights_all_of_it(graphs):
    half = case_of("graph_parallel", graphs["rough"])
    full = replace(half, workload={**half.workload, "dtype": "float32"})
    rounded, whole = (c.settled(p).memory(p) for c in (half, full) for p in [c.problem(2)])
    weights = half.problem(2).model.weights
    assert set(rounded["parameters"]) == set(whole["parameters"]) == {4 * weights}
    assert set(rounded["optimizer"]) == set(whole["optimizer"]) == {12 * weights}
    assert (2 * rounded["features"] == whole["features"]).all()
    assert (rounded["activations"] < whole["activations"]).all()


def test_refusals_name_those_that_have_such_rows():
    for mode, named in ROUNDING.items():
        told = {type(parse(name)) for name in named.replace(" or ", ", ").split(", ")}
        ours = {family for family in families() if family.__module__.startswith("gnnplan.")}
        assert told == {one for one in ours if one.mode == mode and one.rounds_rows}


BITS = (8, 4, 2)


def crossed(rows: torch.Tensor, bits: int, *numbers: int) -> torch.Tensor:
    """The rows as they arrive."""
    packed = UniformWidth(bits).pack(rows, None, torch.arange(len(rows)), *numbers)
    return UniformWidth(bits).unpack(packed, torch.empty_like(rows))


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("shift", [0.0, -7.3, 100.3])
def test_the_mean_over_draws_is_the_number(bits, shift):
    """Over 4,000 draws, of 100 vertices in 40 steps, within five standard errors of it, or of what 20
    draws add, for a number may be so near to a level that no draw leaves it. The lowest and highest
    are no exception: a parameter that is rounded the wrong way would clamp them."""
    torch.manual_seed(0)  # else in one run of sixty to the nearest is down, in all six rows
    rows, draws = torch.randn(6, 33, dtype=torch.float64) + shift, 4000
    vertices = rows.repeat(100, 1)
    arrived = torch.cat([crossed(vertices, bits, step) for step in range(draws // 100)])
    arrived = arrived.view(draws, *rows.shape)
    off, error = (arrived.mean(0) - rows).abs(), arrived.std(0) / draws**0.5
    spacing = (rows.amax(1) - rows.amin(1) + 0.01 * abs(shift)) / (2**bits - 1)
    assert (off <= 5 * error + 20 / draws * spacing[:, None]).all()
    assert (error > 0).float().mean() > 0.9


@pytest.mark.parametrize("bits", BITS)
def test_zeros_and_rows_of_one_number_lose_nothing(bits):
    """Nor do rows of numbers too small for a spacing of their own; zeros behind ReLU stay zeros."""
    rows = torch.randn(50, 20).relu()
    rows[:3] = torch.tensor([0.0, 1.0, -0.375])[:, None]
    arrived = crossed(rows, bits, 1)
    assert (arrived[:3] == rows[:3]).all() and (arrived[rows == 0] == 0).all()
    assert (crossed(torch.full((2, 5), 1e-40), bits, 1) < 1e-37).all()


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_that_has_diverged_says_so(bits, bad):
    rows = torch.ones(3, 8)
    rows[1, 4] = bad
    assert crossed(rows, bits, 0).isfinite().all(1).tolist() == [True, False, True]


def test_draws_are_the_vertexs_among_many_as_among_few():
    rows = torch.randn(70_000, 9)
    few = torch.randperm(len(rows))[:100]
    assert len(rows) * 9 > planned.AT_ONCE
    whole = UniformWidth(2).pack(rows, None, torch.arange(len(rows)), 5, 2)
    assert (UniformWidth(2).pack(rows, few, few, 5, 2) == whole[few]).all()


OWN = torch.tensor([8, 2, 2, 4, 4, 4] * 166 + [4] * 4, dtype=torch.uint8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("codec", "width_of"),
    [*((Codec(bits), UniformWidth(bits)) for bits in BITS), (Codec(ADAPTIVE), MixedWidth(OWN, 1))],
    ids=str,
)
def test_its_work_is_what_torch_counts(codec, width_of, dtype):
    """Element-wise bytes, without the hash, picking rows, and rows' ways back to their places."""
    width, count = 256, 1000
    rows, ids = torch.randn(count, width, dtype=dtype), torch.arange(count)
    item, packing, hashing, unpacking = rows.element_size(), Notes(), Notes(), Notes()
    with packing.during("forward"):
        packed = width_of.pack(rows, None, ids, 0)
    with hashing.during("forward"):
        mix(ids[:, None] + torch.arange(1, width // 4 + 1) * GOLDEN)
    with unpacking.during("forward"):
        width_of.unpack(packed, torch.empty_like(rows))
    counted = [notes.forward.elementwise_bytes for notes in (packing, hashing, unpacking)]
    (work,) = codec.pack(count, width, item, picked=False)
    assert work.elementwise_bytes == pytest.approx(counted[0] - counted[1], rel=0.05)
    (work,) = codec.unpack(count, width, item, added=False)
    arranged = item * width * count * planned.SORTED * isinstance(width_of, MixedWidth)
    assert work.elementwise_bytes - arranged == pytest.approx(counted[2], rel=0.05)
    assert few_bits.AT_ONCE == planned.AT_ONCE


RANGES = st.lists(st.floats(0, 1e6), min_size=0, max_size=7)


def variance(ranges: torch.Tensor, bits: torch.Tensor) -> float:
    return float((ranges / (2.0 ** bits.double() - 1)).square().sum())


@given(RANGES, RANGES)
def test_no_bits_in_as_many_bytes_have_less_variance(one, other):
    """Among all of a peer's rows, so not 4 for all either; and every peer's rows fill its bytes."""
    ranges = torch.tensor(one + other, dtype=torch.float64)
    bits = assigned(ranges, [len(one), len(other)])
    for of_peer, chosen in zip(
        ranges.split([len(one), len(other)]), bits.split([len(one), len(other)]), strict=True
    ):
        assert int(chosen.long().sum()) == 4 * len(chosen)
        least = min(
            variance(of_peer, torch.tensor(options))
            for options in product(planned.BITS, repeat=len(chosen))
            if sum(options) <= 4 * len(chosen)
        )
        assert variance(of_peer, chosen) <= least * (1 + 1e-9)


def test_both_ends_choose_from_what_crossed():
    """Wide rows rise after the first exchange, and bits stay for ten."""
    rows = torch.ones(12, 8) * torch.linspace(0, 1, 8)
    rows[:2] *= 100
    ids, even = torch.arange(12), MixedWidth.even(12, torch.device("cpu"))
    packed = even.pack(rows, None, ids, 0)
    chosen = even.after(packed, [6, 6])
    assert chosen.bits.tolist() == [8, 8, 2, 2, 2, 2] + [4] * 6
    again = chosen.pack(rows.flip(0), None, ids, 1)
    for _ in range(PERIOD - 1):
        chosen = chosen.after(again, [6, 6])
        assert chosen.bits[:6].tolist() == [8, 8, 2, 2, 2, 2]
    assert chosen.after(again, [6, 6]).bits[6:].tolist() == [2, 2, 2, 2, 8, 8]
