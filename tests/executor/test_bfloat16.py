"""Rows in bfloat16, weights in float32. What every strategy must do with such rows stands with its
other claims: bytes and order, resume, memory, the losses of one process."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from gnnplan.executor.layers.kernels import Block, SparseRows, aggregate, linear
from gnnplan.planner.strategies import families, parse
from gnnplan.planner.strategies.base import ROUNDING
from gnnplan.testing.plain import difference
from gnnplan.testing.ranks import Case
from gnnplan.testing.runs import one_process


def case_of(strategy: str, graph: str, **more: Any) -> Case:
    workload = {"model": "sage", "layers": 3, "hidden": 16, "dtype": "bfloat16", **more}
    return Case(strategy, graph, workload, epochs=10, checkpoint_every=5)


@pytest.mark.parametrize(("graph", "features"), [("rough", 1 / 2), ("sparse", 6 / 8)])
def test_half_the_bytes_and_nearly_the_losses_of_float32(graph, features, run_ranks, graphs):
    """Losses to 1 % of float32's; weights and moments are finer. Sparse columns take 4 bytes."""
    rounded = case_of("graph_parallel", graphs[graph])
    half, full = run_ranks(
        2, [rounded, replace(rounded, workload={**rounded.workload, "dtype": "float32"})]
    )
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
    (ranks,), alone = run_ranks(2, [case]), one_process(run_ranks, case)
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
