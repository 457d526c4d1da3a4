"""Users' modules of PyG and DGL against their own library and torch's own training, in float64."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from written import quiet

from gnnplan.executor.layers.models import Net
from gnnplan.executor.modules.bind import GraphFields
from gnnplan.executor.modules.convert import Parameters
from gnnplan.executor.modules.make import loaded as kept
from gnnplan.executor.modules.read import (
    UserModule,
    net_of,
    read,
    read_again,
    with_module,
    with_user_model,
)
from gnnplan.executor.ranks.rank import Rank
from gnnplan.executor.strategies.graph_parallel import worker_on
from gnnplan.planner.gnn.workload import Workload
from gnnplan.planner.graph.graph import Graph
from gnnplan.planner.graph.load import load
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies.layerwise.exchange import ExchangeOptions
from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.testing.ranks import Case

FEATURES, CLASSES = 12, 4  # of the graph `rough`
GRAPH = GraphFields(FEATURES, CLASSES)
HEAD = """
import torch
import torch.nn.functional as F
from torch import nn
"""
PYG = f"""{HEAD}
from torch_geometric.nn import BatchNorm, GATConv, GATv2Conv, GCN2Conv, GCNConv, GINConv, SAGEConv, SGConv
"""
DGL = f"{HEAD}from dgl.nn import *\n"


def module(library: str, layers: str, body: str, given: str, made: str) -> str:
    """The source of a module M that has these layers, and this as its forward."""
    return f"""{library}
class M(nn.Module):
    def __init__(self, {made}):
        super().__init__()
        {indented(layers)}
    def forward(self, {given}):
        {indented(body)}
"""


def indented(lines: str) -> str:
    return lines.strip().replace("\n", "\n        ")


def of_pyg(
    layers: str, body: str, given: str = "x, edge_index", made: str = "in_channels, out_channels"
) -> str:
    return module(PYG, layers, body, given, made)


def of_dgl(layers: str, body: str, given: str = "g, x", made: str = "in_feats, out_feats") -> str:
    return module(DGL, layers, body, given, made)


# A module per convolution and way to write a forward
MODULES = {
    "pyg sage": of_pyg(
        "self.convs = nn.ModuleList([SAGEConv(in_channels, 16), SAGEConv(16, 8), SAGEConv(8, out_channels)])",
        """
for i, conv in enumerate(self.convs):
    x = conv(x, edge_index)
    if i + 1 < len(self.convs):
        x = F.dropout(x.relu(), p=DROPOUT, training=self.training)
return x
""",
    ),
    "pyg gcn, batch norm": of_pyg(
        """
self.conv1, self.norm = GCNConv(num_features, hidden_channels), BatchNorm(hidden_channels)
self.conv2, self.drop = GCNConv(hidden_channels, num_classes, bias=False), nn.Dropout(DROPOUT)
""",
        """
x, edge_index = data.x, data.edge_index
x = self.conv1(self.drop(x), edge_index)
x = F.relu(self.norm(x))
return F.log_softmax(self.conv2(self.drop(x), edge_index), dim=1)
""",
        "data",
        "num_features, num_classes, hidden_channels=16",
    ),
    "pyg gat": of_pyg(
        """
self.first, self.norm = GATConv(in_channels, 6, heads=3), nn.LayerNorm(18)
self.last = GATConv(18, out_channels, heads=1, concat=False)
""",
        """
x = torch.relu(self.norm(self.first(x, edge_index)))
return self.last(F.dropout(x, DROPOUT, self.training), edge_index)
""",
    ),
    "pyg gcn2": of_pyg(
        """
self.lins = nn.ModuleList([nn.Linear(in_channels, hidden), nn.Linear(hidden, out_channels)])
self.convs = nn.ModuleList([GCN2Conv(hidden, 0.2, 0.7, i + 1) for i in range(layers)])
""",
        """
x = F.dropout(x, DROPOUT, training=self.training)
x = x_0 = self.lins[0](x).relu()
for conv in self.convs:
    x = conv(F.dropout(x, DROPOUT, training=self.training), x_0, edge_index).relu()
return self.lins[1](F.dropout(x, DROPOUT, training=self.training))
""",
        made="in_channels, out_channels, hidden=10, layers=3",
    ),
    "pyg sgc": of_pyg(
        "self.conv, self.p = SGConv(in_channels, out_channels, K=3), DROPOUT",
        "return self.conv(F.dropout(x, self.p, self.training), edge_index)",
    ),
    "pyg gatv2": of_pyg(
        "self.a, self.b = GATv2Conv(in_channels, 6, heads=3), GATv2Conv(18, out_channels)",
        """
x = self.a(F.dropout(x, DROPOUT, self.training), edge_index).relu()
return self.b(x, edge_index)
""",
    ),
    "pyg gin": of_pyg(
        """
self.a = GINConv(nn.Sequential(nn.Linear(in_channels, 9), nn.ReLU(), nn.Linear(9, 14)))
self.b = GINConv(nn.Sequential(nn.Linear(14, 20), nn.ReLU(), nn.Linear(20, out_channels)))
self.norm = BatchNorm(14)
""",
        """
x = self.norm(self.a(x, edge_index)).relu()
return self.b(F.dropout(x, DROPOUT, self.training), edge_index)
""",
    ),
    "dgl gatv2": of_dgl(
        "self.a, self.b = GATv2Conv(in_feats, 6, 3, activation=F.relu), GATv2Conv(18, out_feats, 1)",
        "return self.b(g, self.a(g, x).flatten(1)).squeeze(1)",
    ),
    "dgl gin": of_dgl(
        """
one, two = (nn.Sequential(nn.Linear(a, 16), nn.ReLU(), nn.Linear(16, b)) for a, b in ((in_feats, 8), (8, out_feats)))
self.a, self.b = GINConv(one, activation=F.relu), GINConv(two)
""",
        "return self.b(g, self.a(g, x))",
    ),
    "dgl sage": of_dgl(
        """
self.layers = nn.ModuleList([SAGEConv(in_size, 16, "mean", feat_drop=DROPOUT, activation=F.relu)])
self.layers.append(SAGEConv(16, out_size, "mean", feat_drop=DROPOUT, bias=False))
""",
        """
for layer in self.layers:
    x = layer(g, x)
return x
""",
        made="in_size, hid_size, out_size",
    ),
    "dgl gcn, no ReLU": of_dgl(
        "self.a, self.b, self.drop = GraphConv(in_feats, 20), GraphConv(20, out_feats), nn.Dropout(DROPOUT)",
        """
for layer, block in zip((self.a, self.b), blocks):
    x = layer(block, self.drop(x))
return x
""",
        "blocks, x",
    ),
    "dgl gat": of_dgl(
        """
self.layers = nn.ModuleList([GATConv(in_feats, 5, 3, feat_drop=DROPOUT, activation=F.relu)])
self.layers.append(GATConv(15, out_feats, 1, feat_drop=DROPOUT))
""",
        """
h = self.layers[0](g, x).flatten(1)
return self.layers[1](g, h).mean(1)
""",
    ),
    "dgl gcn2": of_dgl(
        """
self.inp, self.out = nn.Linear(in_feats, 10), nn.Linear(10, out_feats)
how = {"alpha": 0.3, "lambda_": 0.6, "bias": False, "activation": F.relu}
self.a, self.b = GCN2Conv(10, 1, **how), GCN2Conv(10, 2, **how)
""",
        """
x0 = F.relu(self.inp(x))
return self.out(self.b(g, self.a(g, x0, x0), x0))
""",
    ),
    "dgl sgc": of_dgl("self.conv = SGConv(in_feats, out_feats, k=2)", "return self.conv(g, x)"),
}


def source(name: str, p: float) -> str:
    """That of a module which drops with this probability."""
    return MODULES[name].replace("DROPOUT", str(p))


LOOPED = ("gcn", "gat", "gcn2", "sgc", "gatv2")  # those of DGL are for graphs with self loops


@pytest.fixture(scope="module", autouse=True)
def libraries():
    quiet("dgl")
    quiet("torch_geometric")


def asked(
    file: Path, graph: Graph, directed: bool = False, **more: Any
) -> tuple[UserModule, Workload]:
    """The module of a file, and the workload that trains it."""
    workload = Workload(dtype="float64", lr=0.05, **more)
    fields = GraphFields(graph.stats.features, graph.stats.classes, directed)
    user = read(f"{file}:M", workload, fields)
    return user, with_module(workload, user, more)


def case_of(tmp_path: Path, name: str, graph: str, p: float) -> tuple[UserModule, Case]:
    file = tmp_path / "model.py"
    file.write_text(source(name, p))
    user, workload = asked(file, loaded(graph))
    return user, Case("graph_parallel", graph, workload.model_dump(), epochs=3)


def loaded(path: str) -> Graph:
    graph = load(path)
    assert isinstance(graph, Graph)
    return graph


def edges_of(name: str, graph: Graph) -> Any:
    """The graph as the module's library wants it, as arguments before or after the features."""
    dst = torch.from_numpy(np.repeat(np.arange(graph.stats.vertices), graph.degree))
    src = torch.from_numpy(graph.indices.astype(np.int64))
    if name.startswith("pyg"):
        return torch.stack([src, dst])
    import dgl

    found = dgl.graph((src, dst), num_nodes=graph.stats.vertices)
    return dgl.add_self_loop(found) if name.split()[1].strip(",") in LOOPED else found


def theirs(name: str, module: nn.Module, graph: Graph) -> Tensor:
    """The module's own logits."""
    x, edges = torch.from_numpy(graph.features().astype(np.float64)), edges_of(name, graph)
    if name == "pyg gcn, batch norm":
        out = module(SimpleNamespace(x=x, edge_index=edges))
    elif name.startswith("pyg"):
        out = module(x, edges)
    else:
        out = module([edges] * 2 if "no ReLU" in name else edges, x)
    assert isinstance(out, Tensor)
    return out


def ours(case: Case, user: UserModule, state: dict[str, Tensor]) -> Tensor:
    """Our logits in one process, with this state_dict of the user's module."""
    problem = case.problem(1)
    net = net_of(problem.model, problem.workload)
    Parameters(state, user.trained.places).fill(net)
    return logits_of(net, problem)


def logits_of(net: Net, problem: Problem) -> Tensor:
    """Our logits of all vertices, in one process."""
    rank, layout = Rank(0, 1, torch.device("cpu"), "gloo"), problem.layout()
    rows = worker_on(rank, problem, layout, ExchangeOptions(), net=net).evaluate(0)
    logits = torch.empty_like(rows)
    logits[torch.from_numpy(layout.own(0))] = rows
    return logits


# every kind that both libraries have is read by day from one of them
BY_DAY = (
    "pyg sage",
    "pyg gcn, batch norm",
    "pyg gat",
    "dgl gcn2",
    "dgl sgc",
    "dgl gatv2",
    "dgl gin",
)


@pytest.mark.parametrize(
    "name",
    [name if name in BY_DAY else pytest.param(name, marks=pytest.mark.nightly) for name in MODULES],
)
def test_a_module_trains_here_as_in_its_own_library(name, tmp_path, graphs, run_ranks):
    """Three steps of Adam from the module's own parameters give those of torch, norms included."""
    user, case = case_of(tmp_path, name, graphs["rough"], 0.0)
    graph = loaded(graphs["rough"])
    module = user.module
    optimizer = torch.optim.Adam(module.parameters(), lr=0.05)
    train, y = torch.from_numpy(np.array(graph.train)), torch.from_numpy(np.array(graph.y))
    losses = []
    for _ in range(case.epochs):
        loss = F.cross_entropy(theirs(name, module, graph)[train], y[train])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    result = run_ranks.alone(case)
    assert result.losses == pytest.approx(losses, rel=1e-9)
    numbers = sum(parameter.numel() for parameter in module.parameters())
    assert case.problem(1).model.weights == numbers
    for key, value in module.state_dict().items():  # with the count of a batch norm's calls
        if name == "pyg gcn, batch norm" and key == "conv1.bias":
            continue  # moved by nothing but rounding: the norm takes it away
        torch.testing.assert_close(result.weights[key], value, rtol=1e-7, atol=1e-9)
    module.load_state_dict(result.weights)
    with torch.no_grad():
        logits = theirs(name, module.eval(), graph)
    mine = ours(case, user, result.weights)
    if name == "pyg gcn, batch norm":
        mine = mine.log_softmax(1)
    torch.testing.assert_close(mine, logits, rtol=1e-9, atol=1e-9)


def live(name: str) -> Any:
    """The class M, which no file has, as a notebook's cell makes it."""
    cell: dict[str, Any] = {}
    exec(source(name, 0.25), cell)
    return cell["M"]


@pytest.mark.processes
@pytest.mark.timeout(90)
@pytest.mark.parametrize(
    "name",
    [
        "pyg gatv2",
        pytest.param("pyg gcn, batch norm", marks=pytest.mark.nightly),
        pytest.param("dgl gat", marks=pytest.mark.nightly),
    ],
)
def test_two_ranks_train_a_live_module_of_a_notebook(name, tmp_path, graphs, run_ranks):
    """They start from its parameters, have none of its code, and it evaluates what they leave."""
    graph = loaded(graphs["rough"])
    module = live(name)(FEATURES, CLASSES).eval()
    with torch.no_grad():
        for parameter in module.parameters():  # as of an earlier training
            parameter.add_(0.01)
    before = {key: value.clone() for key, value in module.state_dict().items()}
    problem = Case("graph_parallel", graphs["rough"], {"dtype": "float64", "lr": 0.05}).problem(2)
    problem, _ = with_user_model(problem, module, folder=tmp_path)
    assert not module.training and all(value.isfinite().all() for value in before.values())
    torch.testing.assert_close(module.state_dict(), before, rtol=0, atol=0)

    case = Case("graph_parallel", graphs["rough"], problem.workload.model_dump(), epochs=3)
    (result,) = run_ranks(2, [case])
    assert result.losses == pytest.approx(run_ranks.alone(case).losses, rel=1e-9)
    start = kept(Path(problem.workload.module.file).read_bytes())
    torch.testing.assert_close(start.state, {k: v.to(start.state[k]) for k, v in before.items()})
    module.double().load_state_dict(result.weights)
    with torch.no_grad():
        logits = theirs(name, module, graph)
    net = net_of(problem.model, problem.workload)
    Parameters(result.weights, start.places).fill(net)
    mine = logits_of(net, case.problem(1))
    torch.testing.assert_close(
        mine.log_softmax(1) if "batch norm" in name else mine, logits, rtol=1e-5, atol=1e-5
    )
    module.load_state_dict(before)
    with torch.no_grad():
        assert (theirs(name, module, graph) - logits).abs().max() > 0.1  # it has learnt something


LIVE = """
import torch
from torch import nn
from torch.nn import functional as F
from torch_geometric.nn import GCNConv, MessagePassing
class Twice(MessagePassing):
    def __init__(self, h_in, h_out):
        super().__init__(aggr="max")
        self.lin = nn.Linear(h_in, h_out)
    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=self.lin(x))
    def message(self, x_i, x_j):
        return 2 * x_j - x_i
class M(nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.a, self.b = Twice(in_channels, 8), GCNConv(8, out_channels)
    def forward(self, x, edge_index):
        h = F.dropout(F.elu(self.a(x, edge_index)), 0.25, self.training)
        return self.b(h, edge_index)
"""


@pytest.mark.processes
@pytest.mark.timeout(90)
def test_two_ranks_train_a_live_module_as_it_is_written(tmp_path, graphs, run_ranks):
    """No file has its class. Ranks have its code and its parameters from a file of ours."""
    cell: dict[str, Any] = {"__name__": "__main__"}
    file = tmp_path / "cell.py"
    file.write_text(LIVE)
    exec(compile(LIVE, str(file), "exec"), cell)
    import linecache

    linecache.getlines(str(file))
    module = cell["M"](FEATURES, CLASSES)
    problem = Case("graph_parallel", graphs["rough"], {"dtype": "float64", "lr": 0.05}).problem(2)
    problem, _ = with_user_model(problem, module, folder=tmp_path)
    assert problem.workload.is_cut
    case = Case("graph_parallel", graphs["rough"], problem.workload.model_dump(), epochs=3)
    (result,) = run_ranks(2, [case])
    assert result.losses == pytest.approx(run_ranks.alone(case).losses, rel=1e-9)
    before = {key: value.clone() for key, value in module.state_dict().items()}
    module.double().load_state_dict(result.weights)
    assert all((result.weights[key] - value).abs().max() > 1e-3 for key, value in before.items())


def test_a_module_that_a_file_makes_itself_is_the_same_in_every_rank(tmp_path):
    """Its parameters are random numbers from the time at which the file is executed."""
    code = source("pyg sage", 0.0)
    (tmp_path / "model.py").write_text(f"{code}\nmade = M({FEATURES}, {CLASSES})\n")
    first, second = (
        read(f"{tmp_path / 'model.py'}:made", Workload(seed=3), GRAPH).module for _ in range(2)
    )
    torch.testing.assert_close(first.state_dict(), second.state_dict(), rtol=0, atol=0)


def test_a_live_class_is_made_with_the_graphs_widths_from_the_seed(tmp_path, graphs):
    (tmp_path / "model.py").write_text(source("pyg sage", 0.25))
    workload = Workload(seed=7)
    by_file = read(f"{tmp_path / 'model.py'}:M", workload, GRAPH)
    by_class = read(live("pyg sage"), workload, GRAPH, tmp_path)
    torch.testing.assert_close(by_class.module.state_dict(), by_file.module.state_dict())
    assert by_class.fields == by_file.fields
    with pytest.raises(SpecError, match=r"^M: forward fails on a small graph of 12 features"):
        read(live("pyg sgc")(9, CLASSES), workload, GRAPH, tmp_path)
    with pytest.raises(SpecError, match=r"^M requires width, which we do not know"):

        def M(width: int) -> nn.Module:
            raise AssertionError

        read(M, workload, GRAPH, tmp_path)


def test_a_live_modules_file_that_is_gone_or_damaged_is_refused(tmp_path):
    user = read(live("pyg sage")(FEATURES, CLASSES), Workload(), GRAPH, tmp_path)
    workload = with_module(Workload(), user, ())
    file = Path(user.description.file)
    assert file.parent == tmp_path and user.description.sha256.startswith(file.stem[2:])
    file.write_bytes(file.read_bytes()[:-8] + bytes(8))
    with pytest.raises(SpecError, match="has changed since the plan was made"):
        read_again(workload)
    file.unlink()
    with pytest.raises(SpecError, match=r"cannot be read .No such file or directory.; plan again"):
        read_again(workload)


@pytest.mark.slow
def test_on_a_directed_graph_in_degrees_are_not_out_degrees(tmp_path, graphs):
    """PyG's norm takes in-degrees of both ends, our layers the out-degree of the source."""
    file = tmp_path / "model.py"
    file.write_text(source("pyg sgc", 0.0))
    graph = loaded(graphs["rough"])
    assert asked(file, graph, directed=False)[1].is_converted
    assert asked(file, graph, directed=True)[1].is_cut
    file.write_text(source("dgl gcn, no ReLU", 0.0))
    assert asked(file, graph, directed=True)[1].is_converted  # as DGL's GraphConv


def test_a_default_that_a_module_is_made_with_is_said(tmp_path, graphs):
    """A class that requires hidden_channels got 256 without a word."""
    file = tmp_path / "model.py"
    file.write_text(
        of_pyg(
            "self.a = SAGEConv(in_channels, hidden_channels)\nself.b = SAGEConv(hidden_channels, out_channels)",
            "return self.b(self.a(x, edge_index).relu(), edge_index)",
            made="in_channels, hidden_channels, out_channels",
        )
    )
    problem = Case("graph_parallel", graphs["rough"], {}).problem(2)
    wide, notes = with_user_model(problem, f"{file}:M")
    assert notes == [
        "M is made with hidden_channels=256, the default, since it requires one and none was"
        " given; --set hidden=.. gives another"
    ]
    assert wide.workload.hidden == 256
    given = replace(problem, workload=problem.workload.model_copy(update={"hidden": 24}))
    narrow, notes = with_user_model(given, f"{file}:M", ["hidden"])
    assert (narrow.workload.hidden, notes) == (24, [])
    # --heads, which no parameter takes, did nothing either
    text = file.read_text()
    head = "in_channels, hidden_channels, out_channels"
    assert head in text
    file.write_text(text.replace(head, "in_channels, out_channels, hidden_channels=16", 1))
    wide = with_user_model(replace(given, workload=Workload(heads=8)), f"{file}:M", ["heads"])
    assert [note.split(":")[0] for note in wide[1]] == ["--heads has no effect"]


def test_what_the_module_decides_cannot_be_set_otherwise(tmp_path, graphs):
    file = tmp_path / "model.py"
    file.write_text(source("pyg sage", 0.5))
    graph = loaded(graphs["rough"])
    user, workload = asked(file, graph, hidden=16)
    with pytest.raises(SpecError, match=r"decides hidden .hidden: 64, the module's: 16.; leave"):
        with_module(Workload(hidden=64), user, ["hidden"])
    assert (workload.model, workload.layers, workload.dropout) == ("sage", 3, 0.5)
    assert workload.module
    assert [layer.drops for layer in workload.module.layers] == [False, True, True]
    with pytest.raises(SpecError, match="decides layers"):
        Workload(**{**workload.model_dump(), "layers": 2})


def test_a_file_that_has_changed_since_the_plan_is_not_trained(tmp_path, graphs, run_ranks):
    _, case = case_of(tmp_path, "pyg sage", graphs["rough"], 0.125)
    with open(tmp_path / "model.py", "a") as file:
        file.write("# more\n")
    with pytest.raises(SpecError, match="has changed since the plan was made"):
        run_ranks.alone(case)


@pytest.mark.slow
def test_a_workload_file_names_a_module_that_stands_beside_it(
    tmp_path, graphs, monkeypatch, gnnplan
):
    """It plans as --model does, from any folder; what the file sets the module must have."""
    folder, elsewhere = tmp_path / "conf", tmp_path / "elsewhere"
    folder.mkdir()
    elsewhere.mkdir()
    (folder / "model.py").write_text(source("pyg sage", 0.25))
    (folder / "workload.yaml").write_text("model: model.py:M\nhidden: 16\nlr: 0.5\n")
    monkeypatch.chdir(elsewhere)
    common = "plan --json --mode full --ranks 2 --set gpus_per_server=2 --graph", graphs["rough"]
    by_file = gnnplan(*common, "--workload ../conf/workload.yaml").document
    by_option = gnnplan(*common, "--model ../conf/model.py:M --set lr=0.5").document
    assert by_file["workload"] == by_option["workload"]
    assert by_file["workload"]["module"]["file"] == str(folder / "model.py")
    kept = gnnplan(*common, "--workload ../conf/workload.yaml --model gcn").document
    assert (kept["workload"]["model"], kept["workload"]["module"]) == ("gcn", None)


READS = """
import sys
from gnnplan.executor.modules.bind import GraphFields
from gnnplan.executor.modules.read import read
from gnnplan.planner.gnn.workload import Workload
read(sys.argv[1] + ":M", Workload(), GraphFields(8, 4))
assert "torch._inductor" not in sys.modules
"""


def test_a_module_is_read_without_torchs_compiler(tmp_path, fork_server):
    """It was imported to say from which line a node is: every rank started a second later."""
    pytest.importorskip("dgl", exc_type=ImportError)
    source = of_dgl("self.a = GraphConv(in_feats, out_feats)", "return self.a(g, x)")
    (tmp_path / "model.py").write_text(source)
    (tmp_path / "program.py").write_text(READS)
    words = [str(tmp_path / "program.py"), str(tmp_path / "model.py")]
    (ended,) = fork_server.run([(words, {})], tmp_path)
    assert ended.code == 0, ended.stderr


@pytest.mark.parametrize(("picks", "repeats"), [("self.places", True), ("self.mask", False)])
def test_a_module_whose_layers_wait_for_the_host_is_no_cuda_graph(tmp_path, picks, repeats):
    """To read where a mask is true a GPU's host waits, which a CUDA graph cannot; a place it need
    not know. Dropout waits for nothing. And a NaN in the file, which differs from itself, had kept
    the module from training as if its calls changed it."""
    path = tmp_path / "net.py"
    layers = """
self.first, self.second, self.limit = GCNConv(in_channels, 8), GCNConv(4, out_channels), UNKNOWN[0]
self.register_buffer("mask", torch.arange(8) % 2 == 0)
self.register_buffer("places", torch.arange(0, 8, 2))
"""
    body = f"""
h = F.dropout(F.silu(self.first(x, edge_index)), 0.5, self.training)
return self.second(h[:, {picks}], edge_index)
"""
    path.write_text(f"UNKNOWN = [float('nan')]\n{of_pyg(layers, body)}")
    workload = with_module(Workload(), read(f"{path}:M", Workload(), GRAPH), ())
    assert workload.is_cut and workload.repeats == repeats
