"""Layers of the user's own, as docs/how-to/bring-your-model.md shows one: counted, and trained."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pairwise import at_night

from gnnplan.executor.modules import read
from gnnplan.executor.modules.bind import GraphFields
from gnnplan.executor.modules.read import with_module, with_user_model
from gnnplan.planner.gnn.model import Model, describe, layer_memory
from gnnplan.planner.gnn.workload import Workload
from gnnplan.planner.graph.formats import convert
from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.testing import runs
from gnnplan.testing.ranks import Case

FEATURES, CLASSES = 12, 4  # of the graph `rough`
PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "bring-your-model.md"
EXAMPLE = next(
    code
    for code in re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    if "class Contrast(Layer)" in code
)
HEAD = """
import torch
from torch import nn
from gnnplan.executor.layers.kernels import linear_sum
from gnnplan.layers import Layer, aggregate, attend

class M(Layer):
    edges, projects_first, linear = "mean", False, True
    def __init__(self, h_in, h_out):
        super().__init__()
"""
LOOP = HEAD.replace('"mean", False, True', '"loop", True, False')
GRAPHSAGE = f"""{HEAD}        self.near = nn.Parameter(torch.randn(h_out, h_in))
        self.own = nn.Parameter(torch.randn(h_out, h_in))
        self.bias = nn.Parameter(torch.zeros(h_out))
    def update(self, gathered, rows, x, x0, relu):
        return linear_sum([(rows, self.own), (gathered, self.near)], self.bias, relu)
"""


def own_layers(asked: Workload, model: str, features: int, classes: int) -> Workload:
    return with_module(asked, read.read(model, asked, GraphFields(features, classes)), ())


def workload_of(tmp_path: Path, code: str, name: str = "M", **more: Any) -> Workload:
    file = tmp_path / "layer.py"
    file.write_text(code)
    asked = Workload(**{"layers": 3, "hidden": 16, "dtype": "float64", **more})
    return own_layers(asked, f"{file}:{name}", FEATURES, CLASSES)


@pytest.mark.parametrize("layer", [1, 2])
def test_graphsage_is_counted_as_its_formulas_say(layer, tmp_path):
    """Products, gathers, weights, and what is kept are the same; the temporaries are near."""
    wide = {"layers": 3, "hidden": 64, "dropout": 0.5, "mode": "mini"}
    file = tmp_path / "layer.py"
    file.write_text(GRAPHSAGE)
    theirs = describe(own_layers(Workload(**wide), f"{file}:M", 32, 64), 32, 64)
    ours = describe(Workload(model="sage", **wide), 32, 64)
    assert theirs.weights == ours.weights
    block = 1000.0, 1500.0, 20000.0
    for way in (Model.forward, Model.backward):
        counted, stated = way(theirs, layer, *block), way(ours, layer, *block)
        assert counted.flops == stated.flops
        assert counted.gathers == stated.gathers
        assert counted.gemm_bytes == pytest.approx(stated.gemm_bytes, rel=0.05)
    counted_memory, stated_memory = (layer_memory(model, layer, *block) for model in (theirs, ours))
    assert counted_memory.left == stated_memory.left
    if layer > 1:  # of constant inputs the formula allows for more than comes
        assert counted_memory.most == pytest.approx(stated_memory.most, rel=0.05)


def test_p3_cuts_the_work_of_layer_1_by_columns(tmp_path):
    """A quarter of the columns: what halves say of it is what that many columns are counted at."""
    whole = workload_of(tmp_path, EXAMPLE, "Contrast", hidden=64)
    file = f"{tmp_path / 'layer.py'}:Contrast"
    wide, narrow = (own_layers(whole, file, width, CLASSES) for width in (256, 64))
    sliced, counted = describe(wide, 64, CLASSES), describe(narrow, 64, CLASSES)
    block = 1000.0, 1500.0, 20000.0
    for way in (Model.forward, Model.backward):
        of_slice, of_count = way(sliced, 1, *block), way(counted, 1, *block)
        assert of_slice.flops == pytest.approx(of_count.flops)
        assert of_slice.gathers == of_count.gathers
        assert way(sliced, 1, *block).elementwise_bytes == pytest.approx(
            way(counted, 1, *block).elementwise_bytes, rel=1e-6
        )


NORMING = f"""{HEAD}        self.norm, self.lin = nn.LayerNorm(h_in), nn.Linear(h_in, h_out)
    def prepare(self, x, drop):
        return drop(self.norm(x))
    def update(self, gathered, rows, x, x0, relu):
        out = self.lin(gathered + rows)
        return out.relu() if relu else out
"""


def test_what_a_layer_does_to_its_inputs_is_counted_both_ways(tmp_path):
    plain = NORMING.replace("drop(self.norm(x))", "drop(x)")
    normed, unnormed = (describe(workload_of(tmp_path, c), 12, 4) for c in (NORMING, plain))
    block = 1000.0, 1500.0, 20000.0
    for way in (Model.forward, Model.backward):
        more = way(normed, 2, *block).elementwise_bytes - way(unnormed, 2, *block).elementwise_bytes
        assert more > 2 * 1500 * 16 * 8  # all rows are read and written, at least


ATTENDING = f"""{LOOP}        self.lin, self.weigh = nn.Linear(h_in, h_out), nn.Linear(h_out, 2)
    def project(self, rows):
        z = self.lin(rows)
        return torch.cat([z, self.weigh(z)], 1)
    def gather(self, block, rows):
        return attend(block, rows[:, :-2], rows[:, -2], rows[: block.n_dst, -1])
    def update(self, gathered, rows, x, x0, relu):
        return gathered.relu() if relu else gathered
"""


def test_attention_of_a_layers_own_is_counted(tmp_path):
    """Its backward pass makes a sparse tensor of the edges, at which counting ended in an error."""
    model = describe(workload_of(tmp_path, ATTENDING, hidden=64), FEATURES, CLASSES)
    rows, edges = 1000.0, 20000.0
    gathers = model.backward(2, rows, 1500.0, edges).gathers
    assert [gather.rows for gather in gathers if gather.width == 64] == [edges + rows] * 2


RUNS = [(1, "graph_parallel", {}), (2, "granndis", {}), (1, "gnnpipe(stages=2,chunks=1)", {})]
RUNS += [(1, "data_parallel", {"mode": "mini", "batch": 20, "fanout": "full"})]
RUNS += [(1, "p3", {"mode": "mini", "batch": 20, "fanout": "full"})]


@pytest.mark.parametrize(("servers", "strategy", "more"), RUNS)
@pytest.mark.parametrize("code", ["Contrast", at_night("M")])
def test_two_ranks_train_it_as_one_does(code, servers, strategy, more, tmp_path, graphs, run_ranks):
    """Equal losses, and the bytes that were predicted."""
    if strategy == "p3" and code == "M":
        pytest.skip("without P3's calls; refused below")
    workload = workload_of(
        tmp_path, {"Contrast": EXAMPLE, "M": ATTENDING}[code], code, dropout=0.25, lr=0.05, **more
    )
    case = Case(strategy, graphs["rough"], workload.model_dump(), servers=servers)
    (result,) = run_ranks(2, [case])
    alone = replace(case, strategy="data_parallel" if more else "graph_parallel", servers=1)
    assert result.losses == pytest.approx(run_ranks.alone(alone).losses, rel=1e-9)
    runs.test_bytes_of_every_operation(runs.FinishedRun(result))


LINEAR = "        self.lin = nn.Linear(h_in, h_out)\n"
UPDATE = LINEAR + "    def update(self, gathered, rows, x, x0, relu):\n        return "
REFUSED = {
    "all pairs of rows": (
        HEAD + UPDATE + "self.lin((rows @ rows.T) @ gathered)\n",
        "not linear in rows, sources and edges",
    ),
    "edges that we do not have": (
        HEAD.replace("mean", "row") + UPDATE + "self.lin(gathered)\n",
        "edges must be one of 'gcn', 'mean', 'one', 'loop', not 'row'",
    ),
    "no update": (HEAD + LINEAR, "has no update"),
    "a wrong width": (
        HEAD + UPDATE + "self.lin(x)[:, :12] + gathered\n",
        r"12 -> 16 numbers returns shape \[64, 12\] for 64 rows, not \[64, 16\]",
    ),
    "its own error": (HEAD + UPDATE + "self.lni(gathered)\n", "layer 1 .*AttributeError.*lni"),
    "P3's calls that give another output": (
        EXAMPLE.replace("class Contrast", "class M").replace("return x\n", "return 2 * x\n"),
        "give another output than gather and update; make them equal",
    ),
    "an argument unknown": (HEAD.replace("h_out", "depth"), "requires depth"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_planned_is_refused(what, tmp_path):
    code, words = REFUSED[what]
    with pytest.raises(SpecError, match=words):
        workload_of(tmp_path, code)


def test_p3_says_what_a_layer_lacks(tmp_path, graphs):
    workload = workload_of(tmp_path, ATTENDING, mode="mini", batch=16, fanout="full")
    case = Case("p3", graphs["rough"], workload.model_dump())
    with pytest.raises(SpecError, match=r"give it by_columns, scatter, transform and apply"):
        case.settled(case.problem(2))


def test_sparse_features_are_refused(tmp_path, graphs):
    (tmp_path / "layer.py").write_text(EXAMPLE)
    problem = Case("graph_parallel", graphs["sparse"]).problem(2)
    layers = f"{tmp_path / 'layer.py'}:Contrast"
    with pytest.raises(SpecError, match=r"sparse.*save x dense.*gnnplan convert"):
        with_user_model(problem, layers)
    # as it says: conversion alone keeps features sparse, and so does a .npz of dense ones
    with np.load(graphs["sparse"]) as arrays:
        held = {name: arrays[name] for name in arrays.files if not name.startswith("x_")}
    dense = np.asarray(problem.data.x.toarray())
    np.savez(tmp_path / "dense.npz", x=dense, **held)
    convert(str(tmp_path / "dense.npz"), tmp_path / "graph")
    problem = Case("graph_parallel", str(tmp_path / "graph")).problem(2)
    assert with_user_model(problem, layers)[0].workload.model == "own"


def test_a_norm_is_the_layers_own_affair(tmp_path):
    with pytest.raises(SpecError, match=r"norms in its prepare or update.*leave norm out"):
        workload_of(tmp_path, EXAMPLE, "Contrast", norm="batch")


def test_the_kind_alone_is_no_model():
    with pytest.raises(SpecError, match=r"model=FILE\.py:MyLayer"):
        Workload(model="own")


def test_a_file_that_has_changed_since_the_plan_is_not_trained(tmp_path):
    from gnnplan.executor.modules.read import net_of

    workload = workload_of(tmp_path, EXAMPLE, "Contrast")
    (tmp_path / "layer.py").write_text(EXAMPLE.replace("0.5", "0.4"))
    read.class_in.cache_clear()  # a rank is a process of its own
    with pytest.raises(SpecError, match=r"has changed since the plan was made; plan again"):
        net_of(describe(workload, FEATURES, CLASSES), workload)


def test_a_live_layer_is_refused(graphs):
    from gnnplan.layers import Layer

    problem = Case("graph_parallel", graphs["rough"]).problem(2)
    with pytest.raises(SpecError, match=r"name the file that it is in, as 'layer.py:Layer'"):
        with_user_model(problem, Layer)
