"""What pieces of a user's module keep, exchange and are given, beside what was counted of them; and
layers of the user's own, as docs/how-to/bring-your-model.md shows one: counted, and trained."""

import gc
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from counting import counted
from nightly import at_night, every
from test_module_cases import written

from gnnplan.executor.layers.kernels import Block
from gnnplan.executor.layers.layer import Drop
from gnnplan.executor.modules import make
from gnnplan.executor.modules.bind import GraphFields
from gnnplan.executor.modules.evaluate import Place, frees
from gnnplan.executor.modules.pieces import Pieces
from gnnplan.executor.modules.read import (
    UserModule,
    class_in,
    net_of,
    read,
    with_module,
    with_user_model,
)
from gnnplan.executor.modules.record import Node
from gnnplan.executor.ranks.machine import allocated
from gnnplan.planner.gnn.layer import MAXIMUM
from gnnplan.planner.gnn.model import block_bytes as edges_held
from gnnplan.planner.gnn.model import describe, layer_memory, structure_work
from gnnplan.planner.gnn.workload import Workload
from gnnplan.planner.graph.formats import convert
from gnnplan.planner.graph.graph import CsrEdges
from gnnplan.planner.graph.load import load
from gnnplan.planner.problem.inputs import read_cluster
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies import parse
from gnnplan.planner.strategies.minibatch.supply import OPENING
from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.testing import runs
from gnnplan.testing.ranks import Case

SMALL = "synthetic:community?vertices=300&edges=3000&features=64&classes=16&seed=0"
ROWS, SOURCES, EDGES, FEATURES, CLASSES = 3_000, 4_500, 45_000, 64, 16
GRAPH = GraphFields(FEATURES, CLASSES)
MODULES = {
    "gcn": "GCNConv(64, 64), GCNConv(64, 16)",
    "sage": "SAGEConv(64, 64), SAGEConv(64, 16)",
    "gat": "GATConv(64, 16, heads=4, dropout=0.2), GATConv(64, 16)",
    "sage max": "SAGEConv(64, 64, aggr='max'), SAGEConv(64, 16, aggr='max')",
    "transformer": "TransformerConv(64, 16, heads=4), TransformerConv(64, 16)",
    "cheb": "ChebConv(64, 64, K=2), ChebConv(64, 16, K=2)",
    "tag": "TAGConv(64, 32, K=2), TAGConv(32, 16, K=2)",
}
TWO = """
h = F.dropout(F.elu(self.one(x, edge_index)), 0.5, self.training)
return self.two(h, edge_index)
"""


def module(folder: Path, made: str, body: str = TWO) -> tuple[UserModule, Pieces]:
    user = read(written(folder, body, made=f"self.one, self.two = {made}"), Workload(), GRAPH)
    assert user.pieces is not None
    return user, user.pieces


@pytest.fixture(scope="module", params=every(3, MODULES))
def of_a_kind(request, tmp_path_factory):
    """A module of each kind, read once for all tests."""
    return module(tmp_path_factory.mktemp("module"), MODULES[request.param])


@pytest.fixture(scope="module")
def sage(tmp_path_factory):
    return module(tmp_path_factory.mktemp("sage"), MODULES["sage"])


@pytest.fixture(scope="module")
def appnp(tmp_path_factory):
    """Its steps have first rows that all read again."""
    body = "return self.two(self.one(x), edge_index)"
    return module(tmp_path_factory.mktemp("appnp"), "nn.Linear(64, 16), APPNP(4, 0.1)", body)


def a_block() -> Block:
    """Random edges, of a part of a graph whose other vertices read nobody."""
    draw = np.random.default_rng(3)
    pairs = np.unique(draw.integers(0, [ROWS, SOURCES - ROWS], (EDGES, 2)), axis=0)
    indptr = np.concatenate([[0], np.bincount(pairs[:, 0], minlength=ROWS).cumsum()])
    indices = (ROWS + pairs[:, 1]).astype(np.int32)
    block = Block(indptr, indices, SOURCES)
    nobody = np.full(SOURCES - ROWS, len(indices))
    block.source, block.graph_edges = (
        torch.arange(SOURCES),
        CsrEdges(np.append(indptr, nobody), indices),
    )
    return block


@pytest.mark.slow
def test_memory_of_a_layer_is_what_torch_allocates(of_a_kind):
    """What a module made of edges was in no plan: a GCN's rank held 99 MB, 25 were predicted."""
    user, pieces = of_a_kind
    model, block = describe(with_module(Workload(), user, []), FEATURES, CLASSES), a_block()
    indices = 64 * SOURCES  # that operations make for themselves
    pieces.local(block)
    for number in range(1, pieces.layers + 1):
        layer, spec = pieces.layer(number), model.layers[number - 1]
        for parameter in layer.parameters():
            parameter.grad = torch.zeros_like(parameter)
        x = torch.randn(SOURCES, spec.h_in, requires_grad=number > 1)
        drop = Drop(layer=number, vertices=torch.arange(SOURCES))

        def forward(layer=layer, x=x, drop=drop) -> torch.Tensor:  # type: ignore[no-untyped-def]
            return layer(block, x, drop)

        out = forward()
        out.backward(gradient := torch.ones_like(out))
        x.grad = out = None
        need = layer_memory(model, number, ROWS, SOURCES, block.edges)
        out, kept, _ = counted(forward)
        _, _, most = counted(lambda out=out, by=gradient: out.backward(by))
        assert kept == pytest.approx(float(need.left), rel=0.02), number
        assert kept + most == pytest.approx(float(need.most), rel=0.1, abs=indices), number


def test_what_differs_on_a_gpu_is_counted_there(tmp_path):
    """On an H200 maxima over edges took twice the predicted time and a sixth less memory; offload
    took thrice its time, for the host made the tensors of edges anew with every chunk."""
    core = describe(with_module(Workload(), module(tmp_path, MODULES["sage max"])[0], []), 64, 16)
    gpu, sizes = replace(core, on_gpu=True), (float(ROWS), float(SOURCES), float(EDGES))
    both = zip(core.work(2, *sizes), gpu.work(2, *sizes), strict=True)
    forward, backward = (there.elementwise_bytes - here.elementwise_bytes for here, there in both)
    assert (forward, backward) == (pytest.approx(MAXIMUM * EDGES), 0.0)
    held = [layer_memory(model, 2, *sizes).most for model in (core, gpu)]
    assert held[0] - held[1] == pytest.approx(4 * 64 * EDGES, rel=0.05)  # of truths as numbers

    made, calls = structure_work(gpu, gpu.layers[1], *sizes)
    assert made > 8 * EDGES and calls > 0  # indices of edges are written
    assert structure_work(core, core.layers[1], *sizes) == (0.0, 0)
    of_batches = [replace(model, resamples=True) for model in (core, gpu)]
    more = [
        batches.work(2, *sizes).forward.launches - model.work(2, *sizes).forward.launches
        for batches, model in zip(of_batches, (core, gpu), strict=True)
    ]
    assert more == [calls, 0]


@pytest.mark.parametrize(
    ("strategy", "more", "calls"),
    [
        ("offload(chunks=2)", {}, 0),
        ("data_parallel", {"mode": "mini", "batch": 32}, OPENING["cuda"]),
    ],
)
def test_a_gpus_host_makes_tensors_of_edges_with_each_load(strategy, more, calls, tmp_path):
    user, graph = module(tmp_path, MODULES["gat"])[0], load(SMALL)
    workload = with_module(Workload(**more), user, [])
    problem = Problem(graph.stats, graph, workload, read_cluster("h200"))
    settled = parse(strategy).settle(problem)
    loads = [t.work for t in settled.schedule(problem, 1).tasks if t.label.op == "load"]
    assert loads and all(each.calls > calls and each.packed > 0 for each in loads)


@pytest.mark.slow
@pytest.mark.skipif(allocated() is None, reason="the allocator does not tell")
def test_memory_of_edges_is_what_stays(of_a_kind):
    user, pieces = of_a_kind
    model, block = describe(with_module(Workload(), user, []), FEATURES, CLASSES), a_block()
    pieces.structure.on_whole(block.graph_edges)
    gc.collect()
    before = allocated()
    pieces.local(block)
    gc.collect()
    grown = allocated() - before
    with_edges = edges_held(model, model.layers[0], ROWS, SOURCES, block.edges)
    bare = block.edges * 12 + 4 * (ROWS + SOURCES) + 8 * SOURCES
    assert grown == pytest.approx(float(with_edges) - bare, rel=0.02, abs=50_000)


@pytest.mark.slow
def test_a_step_leaves_nothing_behind(sage):
    """A function that calls itself held all values of a step, until Python looked for cycles."""
    block, layer = a_block(), sage[1].layer(1)
    x, drop = torch.randn(SOURCES, FEATURES), Drop(vertices=torch.arange(SOURCES))
    layer(block, x, drop)
    gc.collect()
    gc.disable()
    try:
        before = allocated()
        for _ in range(3):
            layer(block, x, drop).sum().backward()
        assert allocated() - before < ROWS * FEATURES * 4
    finally:
        gc.enable()


def test_only_memory_that_somebody_holds_is_copied_before_it_is_changed():
    """Rows at a freed input's address were copied: calls differed by block, and no plan came."""
    addresses = []

    def negated(rows: torch.Tensor) -> torch.Tensor:
        addresses.append((made := -rows).data_ptr())
        return made

    given = Node(None, name="given")
    first = Node(negated, (given,))
    second = Node(negated, (first,))
    changed = Node(torch.Tensor.add_, (second, 1.0), in_place=True)
    # so many rows that the allocator gives the freed address to the next ones
    values, calls = {given: torch.ones(10_000_000)}, [first, second, changed]
    place = Place(dict[str, torch.Tensor]().__getitem__)
    place.run(calls, values, frees(calls, [changed]))
    assert values[changed].data_ptr() == addresses[1]
    held = torch.ones(1000)
    place.run([changed], {second: held}, {})
    assert (held == 1).all()


@pytest.mark.slow
def test_only_rows_that_neighbours_read_are_exchanged(sage):
    """SAGE's product of a vertex's own row is made by that vertex's rank alone."""
    assert sage[1].widths == [FEATURES, 64, CLASSES]


@pytest.mark.slow
def test_rows_that_only_their_vertex_reads_later_stay(appnp):
    """APPNP's first rows were exchanged before each of its steps; `narrow` was for our kinds alone."""
    model = describe(with_module(Workload(), appnp[0], []), FEATURES, CLASSES)
    assert [model.exchanged_width(layer, narrow=False) for layer in (2, 3, 4)] == 3 * [2 * CLASSES]
    assert [model.exchanged_width(layer, narrow=True) for layer in (2, 3, 4)] == 3 * [CLASSES]


FEW = """
h = self.one(x, edge_index)
gate = self.two(h).squeeze().sigmoid()
return self.out(h.view(h.size(0), 2, -1).flatten(1) * gate.unsqueeze(-1))
"""


def test_a_rank_may_have_one_row_or_none(tmp_path):
    """A traceback, as an epoch ends whose last batch has few seeds: squeeze() took the row away."""
    parts = "SAGEConv(64, 8), nn.Linear(8, 1); self.out = nn.Linear(8, 16)"
    _, pieces = module(tmp_path, parts, FEW)
    seeded = torch.Generator().manual_seed(
        0
    )  # some rows are off by more than 1e-5 of a small number
    layer, x = pieces.layer(1), torch.randn(2, FEATURES, generator=seeded)
    expected = pieces.module.eval()(x, torch.tensor([[1], [0]]))
    whole = CsrEdges(np.array([0, 1, 1]), np.array([1], np.int32))
    for rows, block in enumerate((Block([0], [], 0), Block([0, 1], [1], 2))):
        block.source, block.graph_edges = torch.arange(2 * rows), whole
        out = layer(block, x[: 2 * rows])
        layer.zero_grad()  # that of counting
        assert torch.allclose(out, expected[:rows]) and out.shape == (rows, CLASSES)
        out.sum().backward()
        assert all(bool(each.grad.any()) == bool(rows) for each in layer.parameters())


@pytest.mark.slow
def test_equal_calls_are_made_once(appnp):
    """APPNP makes alpha times its first rows in every step of its own."""
    pieces = appnp[1]
    assert pieces.widths == [FEATURES, 2 * CLASSES, 2 * CLASSES, 2 * CLASSES, CLASSES]
    names = [node.what for node in pieces.structure.nodes]
    assert names.count("cat") == 1  # edges with self-loops, of four steps and of both modes


WAYS = {
    "time.sleep(100)": r"line \d+: forward on a graph of 53 vertices takes more than 1 s",
    "[1 for _ in iter(int, 1)]": r"line \d+: forward on a graph of 53 vertices takes more than 1 s",
    "torch.ones(10_000_000_000)": r"line \d+: it allocates more than 4 GB",
    "sys.exit(3)": r"line \d+: forward fails on a small graph of 64 features \(SystemExit: 3\)",
    "input()": r"line \d+: forward fails on a small graph",
}


@pytest.mark.slow
@pytest.mark.parametrize("does", WAYS)
def test_a_forward_that_does_not_come_back_is_refused(does, tmp_path, monkeypatch):
    monkeypatch.setattr(make, "FORWARD_SECONDS", 1.0)
    with pytest.raises(SpecError, match=WAYS[does]):
        module(tmp_path, MODULES["gcn"], f"import sys, time\nh = {does}\n{TWO}")
    monkeypatch.setattr(make, "MAKING_SECONDS", 1.0)
    if "sleep" in does:
        with pytest.raises(SpecError, match=r"line \d+: Net\(64, 16\) .*takes more than 1 s"):
            module(tmp_path, f"1, 2; import time; {does}")


ROUGH_FEATURES, ROUGH_CLASSES = 12, 4  # of the graph `rough`
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
    return with_module(asked, read(model, asked, GraphFields(features, classes)), ())


def workload_of(tmp_path: Path, code: str, name: str = "M", **more: Any) -> Workload:
    file = tmp_path / "layer.py"
    file.write_text(code)
    asked = Workload(**{"layers": 3, "hidden": 16, "dtype": "float64", **more})
    return own_layers(asked, f"{file}:{name}", ROUGH_FEATURES, ROUGH_CLASSES)


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
    both = (model.work(layer, *block) for model in (theirs, ours))
    for found, stated in zip(*both, strict=True):
        assert found.flops == stated.flops
        assert found.gathers == stated.gathers
        assert found.gemm_bytes == pytest.approx(stated.gemm_bytes, rel=0.05)
    counted_memory, stated_memory = (layer_memory(model, layer, *block) for model in (theirs, ours))
    assert counted_memory.left == stated_memory.left
    if layer > 1:  # of constant inputs the formula allows for more than comes
        assert counted_memory.most == pytest.approx(stated_memory.most, rel=0.05)


def test_p3_cuts_the_work_of_layer_1_by_columns(tmp_path):
    """A quarter of the columns: what halves say of it is what that many columns are counted at."""
    whole = workload_of(tmp_path, EXAMPLE, "Contrast", hidden=64)
    file = f"{tmp_path / 'layer.py'}:Contrast"
    wide, narrow = (own_layers(whole, file, width, ROUGH_CLASSES) for width in (256, 64))
    sliced, counted = describe(wide, 64, ROUGH_CLASSES), describe(narrow, 64, ROUGH_CLASSES)
    block = 1000.0, 1500.0, 20000.0
    both = (model.work(1, *block) for model in (sliced, counted))
    for of_slice, of_count in zip(*both, strict=True):
        assert of_slice.flops == pytest.approx(of_count.flops)
        assert of_slice.gathers == of_count.gathers
        assert of_slice.elementwise_bytes == pytest.approx(of_count.elementwise_bytes, rel=1e-6)


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
    both = (model.work(2, *block) for model in (normed, unnormed))
    for more, less in zip(*both, strict=True):  # all rows are read and written, at least
        assert more.elementwise_bytes - less.elementwise_bytes > 2 * 1500 * 16 * 8


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
    model = describe(workload_of(tmp_path, ATTENDING, hidden=64), ROUGH_FEATURES, ROUGH_CLASSES)
    rows, edges = 1000.0, 20000.0
    gathers = model.work(2, rows, 1500.0, edges).backward.gathers
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
    result = run_ranks(2, case)
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
    workload = workload_of(tmp_path, EXAMPLE, "Contrast")
    (tmp_path / "layer.py").write_text(EXAMPLE.replace("0.5", "0.4"))
    class_in.cache_clear()  # a rank is a process of its own
    with pytest.raises(SpecError, match=r"has changed since the plan was made; plan again"):
        net_of(describe(workload, ROUGH_FEATURES, ROUGH_CLASSES), workload)


def test_a_live_layer_is_refused(graphs):
    from gnnplan.layers import Layer

    problem = Case("graph_parallel", graphs["rough"]).problem(2)
    with pytest.raises(SpecError, match=r"name the file that it is in, as 'layer.py:Layer'"):
        with_user_model(problem, Layer)
