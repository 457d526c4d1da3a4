"""Rows in bfloat16: half the bytes cross and are kept; weights and their sums stay float32."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from ranks import Case, Ranks
from safetensors.torch import load_file
from test_resume import same

from gnnplan.planner.gnn.workload import Workload
from gnnplan.planner.strategies import parse
from gnnplan.planner.vocabulary.errors import SpecError

pytestmark = pytest.mark.timeout(110)


def case_of(strategy: str, graph: str, **more: Any) -> Case:
    workload = {"model": "sage", "layers": 3, "hidden": 16, "dtype": "bfloat16", **more}
    return Case(strategy, graph, workload, epochs=10, checkpoint_every=5)


@pytest.mark.parametrize(
    ("strategy", "workload", "off"),
    [
        ("graph_parallel(buckets=2)", {"model": "gcn", "dropout": 0.5}, 0.002),
        ("graph_parallel(narrow=True)", {"norm": "layer"}, 0.01),
        ("graph_parallel(checkpoint=True)", {"model": "gcnii"}, 0.002),
        ("graph_parallel(trim=True)", {"model": "gin", "lr": 0.001}, 0.01),
        ("pipegcn", {"model": "sgc"}, 0.002),
    ],
)
def test_half_the_bytes_and_nearly_the_losses(
    run_ranks: Ranks, graphs: dict[str, str], strategy: str, workload: dict[str, Any], off: float
) -> None:
    """Losses of ten epochs are within `off` of those of float32."""
    rounded = case_of(strategy, graphs["rough"], **workload)
    whole = replace(rounded, workload={**rounded.workload, "dtype": "float32"})
    half, full = run_ranks(2, [rounded, whole])
    assert half.losses == pytest.approx(full.losses, rel=off) and half.losses != full.losses
    problem = rounded.problem(2)
    predicted = rounded.settled(problem).predict(problem)
    counted = [half.rank(rank)["bytes"] for rank in range(2)]
    by_op = {op: sum(rank[op] for rank in counted) for op in ("halo", "all_reduce")}
    assert by_op == {op: predicted.bytes[op] * rounded.epochs for op in by_op}
    setup = sum(sum(half.rank(rank)["setup_bytes"].values()) for rank in range(2))
    assert setup == predicted.setup_bytes
    for rank in range(2):
        theirs = full.rank(rank)["bytes"]
        assert (2 * counted[rank]["halo"], counted[rank]["all_reduce"]) == (
            theirs["halo"],
            theirs["all_reduce"],
        )


def test_weights_and_the_optimizers_state_are_float32(
    run_ranks: Ranks, graphs: dict[str, str]
) -> None:
    (result,) = run_ranks(2, [case_of("graph_parallel", graphs["rough"])])
    files = [result.out / "weights.safetensors", *result.out.glob("checkpoints/*.safetensors")]
    assert len(files) > 1
    for file in files:
        assert {tensor.dtype for tensor in load_file(file).values()} == {torch.float32}, file
    finer = [w for w in result.weights.values() if not torch.equal(w, w.bfloat16().float())]
    assert len(finer) == len(result.weights)  # none is a rounded one


def test_rows_take_half_the_memory_and_weights_all_of_it(graphs: dict[str, str]) -> None:
    half = case_of("graph_parallel", graphs["rough"])
    full = replace(half, workload={**half.workload, "dtype": "float32"})
    (rounded, whole) = (
        case.settled(problem).memory(problem)
        for case in (half, full)
        for problem in [case.problem(2)]
    )
    weights = half.problem(2).model.weights
    assert set(rounded["parameters"]) == set(whole["parameters"]) == {4 * weights}
    assert set(rounded["optimizer"]) == set(whole["optimizer"]) == {12 * weights}
    assert (2 * rounded["features"] == whole["features"]).all()
    assert (rounded["activations"] < whole["activations"]).all()


def test_a_resumed_run_is_an_unbroken_one(run_ranks: Ranks, graphs: dict[str, str]) -> None:
    """Stale rows, which a checkpoint keeps, are bfloat16."""
    case = replace(case_of("pipegcn", graphs["rough"], dropout=0.5), epochs=7, checkpoint_every=0)
    unbroken, broken = run_ranks(2, [case, replace(case, epochs=5, checkpoint_every=2)])
    (resumed,) = run_ranks(2, [replace(case, resume=str(broken.out))])
    same(resumed, unbroken)


@pytest.mark.parametrize(
    ("more", "refusal"),
    [
        ({"model": "gat"}, "attention sums exponentials"),
        ({"model": "gcn", "norm": "batch"}, "batch norm sums all vertices"),
    ],
)
def test_models_that_sum_much_are_refused(more: dict[str, Any], refusal: str) -> None:
    with pytest.raises(ValidationError, match=refusal):
        Workload(dtype="bfloat16", **more)


@pytest.mark.parametrize(
    ("strategy", "graph", "refusal"),
    [
        ("gnnpipe", "rough", "gnnpipe has no rows in bfloat16"),
        ("graph_parallel(bits=4)", "rough", "are made of float32 rows"),
        ("pipegcn_gf", "rough", "are made of float32 rows"),
        ("graph_parallel", "sparse", "sparse features"),
    ],
)
def test_what_has_no_such_rows_is_refused(
    graphs: dict[str, str], strategy: str, graph: str, refusal: str
) -> None:
    problem = case_of(strategy, graphs[graph]).problem(2)
    with pytest.raises(SpecError, match=refusal):
        parse(strategy).settle(problem).check(problem)
