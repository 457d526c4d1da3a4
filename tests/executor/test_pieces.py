"""What pieces of a user's module keep, exchange and are given, beside what was counted of them."""

import gc
from pathlib import Path

import numpy as np
import pytest
import torch
from counting import counted
from pairwise import every
from test_module_cases import written

from gnnplan.executor.layers.kernels import Block
from gnnplan.executor.layers.layer import Drop
from gnnplan.executor.modules import make
from gnnplan.executor.modules.bind import GraphFields
from gnnplan.executor.modules.evaluate import Place, frees
from gnnplan.executor.modules.pieces import Pieces
from gnnplan.executor.modules.read import UserModule, read, with_module
from gnnplan.executor.modules.record import Node
from gnnplan.executor.ranks.machine import allocated
from gnnplan.planner.gnn.model import block_bytes as edges_held
from gnnplan.planner.gnn.model import describe, layer_memory
from gnnplan.planner.gnn.workload import Workload
from gnnplan.planner.graph.graph import CsrEdges
from gnnplan.planner.vocabulary.errors import SpecError

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
    workload = with_module(Workload(), user, [])
    model, block = describe(workload, FEATURES, CLASSES), a_block()
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
    pieces = sage[1]
    block, layer = a_block(), pieces.layer(1)
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
    pieces = sage[1]
    assert pieces.widths == [FEATURES, 64, CLASSES]


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
    widths = pieces.widths
    assert widths == [FEATURES, 2 * CLASSES, 2 * CLASSES, 2 * CLASSES, CLASSES]
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
