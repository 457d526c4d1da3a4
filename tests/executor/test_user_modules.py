"""Users' modules of PyG and DGL: recorded, trained by us, and loaded into the other library.

Every module is compared with its own library's forward and torch's own training, in float64."""

import json
import os
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pairwise import every
from torch import Tensor, nn
from torch.nn import functional as F
from typer.testing import CliRunner

from gnnplan.cli import app
from gnnplan.executor.layers.models import Net
from gnnplan.executor.modules.bind import GraphFields
from gnnplan.executor.modules.convert import Parameters
from gnnplan.executor.modules.make import loaded as kept
from gnnplan.executor.modules.nets import net_of
from gnnplan.executor.modules.read import (
    UserModule,
    read,
    read_again,
    with_module,
    with_user_module,
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
PYG = """
import torch
import torch.nn.functional as F
from torch import nn
from torch_geometric.nn import BatchNorm, GATConv, GATv2Conv, GCN2Conv, GCNConv, GINConv, JumpingKnowledge, SAGEConv, SGConv
"""
DGL = """
import torch
import torch.nn.functional as F
from torch import nn
from dgl.nn import *
"""
# A module per convolution and way to write a forward; {p} is dropout's.
MODULES = {
    "pyg sage": f"""{PYG}
class M(nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.convs = nn.ModuleList([SAGEConv(in_channels, 16), SAGEConv(16, 8), SAGEConv(8, out_channels)])
    def forward(self, x, edge_index):
        for i, conv in enumerate(self.convs):
            x = conv(x, edge_index)
            if i + 1 < len(self.convs):
                x = F.dropout(x.relu(), p={{p}}, training=self.training)
        return x
""",
    "pyg gcn, batch norm": f"""{PYG}
class M(nn.Module):
    def __init__(self, num_features, num_classes, hidden_channels=16):
        super().__init__()
        self.conv1 = GCNConv(num_features, hidden_channels)
        self.norm = BatchNorm(hidden_channels)
        self.conv2 = GCNConv(hidden_channels, num_classes, bias=False)
        self.drop = nn.Dropout({{p}})
    def forward(self, data):
        x, edge_index = data.x, data.edge_index
        x = self.conv1(self.drop(x), edge_index)
        x = F.relu(self.norm(x))
        return F.log_softmax(self.conv2(self.drop(x), edge_index), dim=1)
""",
    "pyg gat": f"""{PYG}
class M(nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.first = GATConv(in_channels, 6, heads=3)
        self.norm = nn.LayerNorm(18)
        self.last = GATConv(18, out_channels, heads=1, concat=False)
    def forward(self, x, edge_index):
        x = torch.relu(self.norm(self.first(x, edge_index)))
        return self.last(F.dropout(x, {{p}}, self.training), edge_index)
""",
    "pyg gcn2": f"""{PYG}
class M(nn.Module):
    def __init__(self, in_channels, out_channels, hidden=10, layers=3):
        super().__init__()
        self.lins = nn.ModuleList([nn.Linear(in_channels, hidden), nn.Linear(hidden, out_channels)])
        self.convs = nn.ModuleList([GCN2Conv(hidden, 0.2, 0.7, i + 1) for i in range(layers)])
    def forward(self, x, edge_index):
        x = F.dropout(x, {{p}}, training=self.training)
        x = x_0 = self.lins[0](x).relu()
        for conv in self.convs:
            x = conv(F.dropout(x, {{p}}, training=self.training), x_0, edge_index).relu()
        return self.lins[1](F.dropout(x, {{p}}, training=self.training))
""",
    "pyg sgc": f"""{PYG}
class M(nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.conv = SGConv(in_channels, out_channels, K=3)
        self.p = {{p}}
    def forward(self, x, edge_index):
        return self.conv(F.dropout(x, self.p, self.training), edge_index)
""",
    "pyg gatv2": f"""{PYG}
class M(nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.a, self.b = GATv2Conv(in_channels, 6, heads=3), GATv2Conv(18, out_channels)
    def forward(self, x, edge_index):
        x = self.a(F.dropout(x, {{p}}, self.training), edge_index).relu()
        return self.b(x, edge_index)
""",
    "pyg gin": f"""{PYG}
def net(*widths):
    a, b, c = widths
    return nn.Sequential(nn.Linear(a, b), nn.ReLU(), nn.Linear(b, c))
class M(nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.a, self.b = GINConv(net(in_channels, 9, 14)), GINConv(net(14, 20, out_channels))
        self.norm = BatchNorm(14)
    def forward(self, x, edge_index):
        x = self.norm(self.a(x, edge_index)).relu()
        return self.b(F.dropout(x, {{p}}, self.training), edge_index)
""",
    "dgl gatv2": f"""{DGL}
class M(nn.Module):
    def __init__(self, in_feats, out_feats):
        super().__init__()
        self.a = GATv2Conv(in_feats, 6, 3, activation=F.relu)
        self.b = GATv2Conv(18, out_feats, 1)
    def forward(self, g, x):
        return self.b(g, self.a(g, x).flatten(1)).squeeze(1)
""",
    "dgl gin": f"""{DGL}
class M(nn.Module):
    def __init__(self, in_feats, out_feats):
        super().__init__()
        self.a = GINConv(nn.Sequential(nn.Linear(in_feats, 16), nn.ReLU(), nn.Linear(16, 8)), activation=F.relu)
        self.b = GINConv(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, out_feats)))
    def forward(self, g, x):
        return self.b(g, self.a(g, x))
""",
    "dgl sage": f"""{DGL}
class M(nn.Module):
    def __init__(self, in_size, hid_size, out_size):
        super().__init__()
        self.layers = nn.ModuleList([SAGEConv(in_size, 16, "mean", feat_drop={{p}}, activation=F.relu)])
        self.layers.append(SAGEConv(16, out_size, "mean", feat_drop={{p}}, bias=False))
    def forward(self, g, x):
        for layer in self.layers:
            x = layer(g, x)
        return x
""",
    "dgl gcn, no ReLU": f"""{DGL}
class M(nn.Module):
    def __init__(self, in_feats, out_feats):
        super().__init__()
        self.a, self.b = GraphConv(in_feats, 20), GraphConv(20, out_feats)
        self.drop = nn.Dropout({{p}})
    def forward(self, blocks, x):
        for layer, block in zip((self.a, self.b), blocks):
            x = layer(block, self.drop(x))
        return x
""",
    "dgl gat": f"""{DGL}
class M(nn.Module):
    def __init__(self, in_feats, out_feats):
        super().__init__()
        self.layers = nn.ModuleList([GATConv(in_feats, 5, 3, feat_drop={{p}}, activation=F.relu)])
        self.layers.append(GATConv(15, out_feats, 1, feat_drop={{p}}))
    def forward(self, g, x):
        h = self.layers[0](g, x).flatten(1)
        return self.layers[1](g, h).mean(1)
""",
    "dgl gcn2": f"""{DGL}
class M(nn.Module):
    def __init__(self, in_feats, out_feats):
        super().__init__()
        self.inp, self.out = nn.Linear(in_feats, 10), nn.Linear(10, out_feats)
        self.a = GCN2Conv(10, 1, alpha=0.3, lambda_=0.6, bias=False, activation=F.relu)
        self.b = GCN2Conv(10, 2, alpha=0.3, lambda_=0.6, bias=False, activation=F.relu)
    def forward(self, g, x):
        x0 = F.relu(self.inp(x))
        return self.out(self.b(g, self.a(g, x0, x0), x0))
""",
    "dgl sgc": f"""{DGL}
class M(nn.Module):
    def __init__(self, in_feats, out_feats):
        super().__init__()
        self.conv = SGConv(in_feats, out_feats, k=2)
    def forward(self, g, x):
        return self.conv(g, x)
""",
}
LOOPED = ("gcn", "gat", "gcn2", "sgc", "gatv2")  # those of DGL are for graphs with self loops


@pytest.fixture(scope="module", autouse=True)
def libraries():
    os.environ.setdefault("DGLBACKEND", "pytorch")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # at import, their own
        pytest.importorskip("dgl", exc_type=ImportError)
        pytest.importorskip("torch_geometric", exc_type=ImportError)


def workload_of(file: Path, graph: Graph, directed: bool = False, **more: Any) -> Workload:
    workload = Workload(dtype="float64", lr=0.05, **more)
    fields = GraphFields(graph.stats.features, graph.stats.classes, directed)
    user = read(f"{file}:M", workload, fields)
    return with_module(workload, user, more)


def case_of(
    tmp_path: Path, name: str, graph: str, p: float, strategy: str = "graph_parallel", **more: Any
) -> Case:
    file = tmp_path / "model.py"
    file.write_text(MODULES[name].replace("{p}", str(p)))
    workload = workload_of(file, loaded(graph), **more)
    return Case(strategy, graph, workload.model_dump(), epochs=3)


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


class _Data:
    def __init__(self, x: Tensor, edge_index: Tensor) -> None:
        self.x, self.edge_index = x, edge_index


def theirs(name: str, module: nn.Module, graph: Graph) -> Tensor:
    """The module's own logits."""
    x, edges = torch.from_numpy(graph.features().astype(np.float64)), edges_of(name, graph)
    if name == "pyg gcn, batch norm":
        out = module(_Data(x, edges))
    elif name.startswith("pyg"):
        out = module(x, edges)
    else:
        out = module([edges] * 2 if "no ReLU" in name else edges, x)
    assert isinstance(out, Tensor)
    return out


def made(case: Case) -> UserModule:
    workload = Workload(**case.workload)
    assert workload.module
    return read(f"{workload.module.file}:M", workload, GRAPH)


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
    case = case_of(tmp_path, name, graphs["rough"], 0.0)
    graph, user = loaded(graphs["rough"]), made(case)
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
    state = {
        key: value
        for key, value in module.state_dict().items()
        if not key.endswith("num_batches_tracked")
    }
    for key, value in state.items():
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
    exec(MODULES[name].replace("{p}", "0.25"), cell)
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
    problem, _ = with_user_module(problem, module, folder=tmp_path)
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
    problem, _ = with_user_module(problem, module, folder=tmp_path)
    assert problem.workload.is_cut
    case = Case("graph_parallel", graphs["rough"], problem.workload.model_dump(), epochs=3)
    (result,) = run_ranks(2, [case])
    assert result.losses == pytest.approx(run_ranks.alone(case).losses, rel=1e-9)
    before = {key: value.clone() for key, value in module.state_dict().items()}
    module.double().load_state_dict(result.weights)
    assert all((result.weights[key] - value).abs().max() > 1e-3 for key, value in before.items())


def test_a_module_that_a_file_makes_itself_is_the_same_in_every_rank(tmp_path):
    """Its parameters are random numbers from the time at which the file is executed."""
    source = MODULES["pyg sage"].replace("{p}", "0.0")
    (tmp_path / "model.py").write_text(f"{source}\nmade = M({FEATURES}, {CLASSES})\n")
    first, second = (
        read(f"{tmp_path / 'model.py'}:made", Workload(seed=3), GRAPH).module for _ in range(2)
    )
    torch.testing.assert_close(first.state_dict(), second.state_dict(), rtol=0, atol=0)


def test_a_live_class_is_made_with_the_graphs_widths_from_the_seed(tmp_path, graphs):
    (tmp_path / "model.py").write_text(MODULES["pyg sage"].replace("{p}", "0.25"))
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


# -- what is refused -------------------------------------------------------------------------------

FRAME = """
class M(nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.a, self.b = GCNConv(in_channels, 8), GCNConv(8, out_channels)
        {more}
    def forward(self, x, edge_index):
        {body}
"""


def frame(body: str, more: str = "pass", before: str = PYG) -> str:
    return before + FRAME.format(
        more=more.replace("\n", "\n        "), body=body.replace("\n", "\n        ")
    )


JUMPING = """
y1 = self.a(x, edge_index)
h1 = y1.relu()
h2 = self.b(h1, edge_index).relu()
h3 = self.c(h2, edge_index).relu()
"""


def jumping(end: str, more: str = "pass") -> str:
    """A module of three layers with this end."""
    layers = "self.b, self.c, self.lin = GCNConv(8, 8), GCNConv(8, 8), nn.Linear(8, out_channels)"
    return frame(JUMPING.strip() + f"\n{end}", f"{layers}\n{more}")


PLAIN = "return self.b(self.a(x, edge_index).relu(), edge_index)"
REFUSED = {
    "nothing": ("", "has no M"),
    "syntax": ("class M(", "line 1"),
    "raises": ("\n1 / 0\n", "line 2: "),
    "no module": ("M = 3", "M is a int; name a torch.nn.Module"),
    "no module made": ("def M():\n    return 3", "M makes a int"),
    "unknown argument": ("def M(width):\n    pass", "requires width, which we do not know"),
    "branch": (
        frame(f"if x.sum() > 0:\n    return x\n{PLAIN}"),
        "line 13: forward asks for the numbers in a tensor (bool)",
    ),
    "width": (
        frame(PLAIN, "self.b = GCNConv(9, out_channels)"),
        "line 13: forward fails on a small graph of 12 features (RuntimeError: mat1 and mat2",
    ),
    "classes": (frame(PLAIN, "self.b = GCNConv(8, 7)"), "the graph has 4 classes"),
    "own convolution": (
        PYG
        + "from torch_geometric.nn import MessagePassing\n"
        + "class Own(MessagePassing):\n    def forward(self, x, e):\n"
        + "        return self.propagate(e, x=x)\n"
        + FRAME.format(more="self.a = Own()", body=PLAIN),
        "line 17: forward fails on a small graph",
    ),
    "drops in evaluation": (
        frame("return self.b(F.dropout(self.a(x, edge_index).relu()), edge_index)"),
        "line 13: dropout drops in evaluation too",
    ),
    "some edges": (
        frame("return self.b(self.a(x, edge_index[:, :9]).relu(), edge_index)"),
        "line 13: getitem makes other edges of a part of the graph than of the whole",
    ),
    "several values": (frame("return self.a(x, edge_index), x"), "forward returns several values"),
    "no convolution": (frame("return x"), "no convolution's rows reach the output"),
    "rows one above the other": (
        jumping("return self.lin(torch.cat([h1, h2, h3]))"),
        "line 18: cat makes [159, 8] of the rows of all 53 vertices",
    ),
    "rows side by side": (
        jumping("return torch.cat([h1, h2, h3], 1)"),
        "forward writes rows of 24 numbers, and the graph has 4 classes",
    ),
}
# whose forward is no plain list of calls, and computes what our layers do
CHAINS = {
    "lazy": frame(PLAIN, "self.a = GCNConv(-1, 8)"),
    "a model of PyG": PYG
    + "from torch_geometric.nn import GraphSAGE\n"
    + "def M(in_channels, out_channels):\n"
    + "    return GraphSAGE(in_channels, 8, 2, out_channels)\n",
    "by name": frame(PLAIN.replace("self.a(x, edge_index)", "self.a(x=x, edge_index=edge_index)")),
    "no weights of edges": frame(
        PLAIN.replace("self.a(x, edge_index)", "self.a(x, edge_index, None)")
    ),
    "a loop over sizes": frame(
        "for conv in (self.a, self.b):\n    x = conv(x.relu() if x.size(1) == 8 else x, edge_index)\n"
        "assert x.dim() == 2\nreturn x"
    ),
    "dropout before ReLU": frame(
        "F.dropout(x, 0.2, self.training)  # which nobody reads\n"
        "x = F.dropout(self.a(x, edge_index), 0.5, self.training)\n"
        "return self.b(x.relu(), edge_index)"
    ),
}


@pytest.mark.parametrize("what", every(2, REFUSED))
def test_what_cannot_be_trained_is_refused_by_name(what, tmp_path):
    source, words = REFUSED[what]
    file = tmp_path / "model.py"
    file.write_text(source)
    with pytest.raises(SpecError) as refused:
        read(f"{file}:M", Workload(), GRAPH)
    assert str(file) in str(refused.value) and words in str(refused.value)
    assert refused.value.exit_code == 2


@pytest.mark.parametrize("what", every(2, CHAINS))
def test_what_our_layers_compute_they_do_however_it_is_written(what, tmp_path):
    file = tmp_path / "model.py"
    file.write_text(CHAINS[what])
    user = read(f"{file}:M", Workload(), GRAPH)
    assert user.pieces is None and user.fields["model"] in ("gcn", "sage")


@pytest.mark.parametrize("model", ["model.py", "model.py:", "absent.py:M", "model.pyc:M"])
def test_a_name_that_stands_for_nothing_is_refused(model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.py").write_text(frame(PLAIN))
    with pytest.raises(SpecError, match=r"has no|must read|cannot be read"):
        read(model, Workload(), GRAPH)


@pytest.mark.slow
def test_on_a_directed_graph_in_degrees_are_not_out_degrees(tmp_path, graphs):
    """PyG's norm takes in-degrees of both ends, our layers the out-degree of the source."""
    file = tmp_path / "model.py"
    file.write_text(MODULES["pyg sgc"].replace("{p}", "0.0"))
    graph = loaded(graphs["rough"])
    assert workload_of(file, graph, directed=False).is_converted
    assert workload_of(file, graph, directed=True).is_cut
    file.write_text(MODULES["dgl gcn, no ReLU"].replace("{p}", "0.0"))
    assert workload_of(file, graph, directed=True).is_converted  # as DGL's GraphConv


def test_a_default_that_a_module_is_made_with_is_said(tmp_path, graphs):
    """A class that requires hidden_channels got 256 without a word."""
    file = tmp_path / "model.py"
    file.write_text(f"""{PYG}
class M(nn.Module):
    def __init__(self, in_channels, hidden_channels, out_channels):
        super().__init__()
        self.a = SAGEConv(in_channels, hidden_channels)
        self.b = SAGEConv(hidden_channels, out_channels)
    def forward(self, x, edge_index):
        return self.b(self.a(x, edge_index).relu(), edge_index)
""")
    problem = Case("graph_parallel", graphs["rough"], {}).problem(2)
    wide, notes = with_user_module(problem, f"{file}:M")
    assert notes == [
        "M is made with hidden_channels=256, the default, since it requires one and none was"
        " given; --set hidden=.. gives another"
    ]
    assert wide.workload.hidden == 256
    given = replace(problem, workload=problem.workload.model_copy(update={"hidden": 24}))
    narrow, notes = with_user_module(given, f"{file}:M", ["hidden"])
    assert (narrow.workload.hidden, notes) == (24, [])


def test_what_the_module_decides_cannot_be_set_otherwise(tmp_path, graphs):
    file = tmp_path / "model.py"
    file.write_text(MODULES["pyg sage"].replace("{p}", "0.5"))
    graph = loaded(graphs["rough"])
    with pytest.raises(SpecError, match=r"decides hidden .hidden: 64, the module's: 16.; leave"):
        workload_of(file, graph, hidden=64)
    workload = workload_of(file, graph, hidden=16)
    assert (workload.model, workload.layers, workload.dropout) == ("sage", 3, 0.5)
    assert workload.module
    assert [layer.drops for layer in workload.module.layers] == [False, True, True]
    with pytest.raises(ValueError, match="decides layers"):
        Workload(**{**workload.model_dump(), "layers": 2})


def test_a_file_that_has_changed_since_the_plan_is_not_trained(tmp_path, graphs, run_ranks):
    case = case_of(tmp_path, "pyg sage", graphs["rough"], 0.125)
    with open(tmp_path / "model.py", "a") as file:
        file.write("# more\n")
    with pytest.raises(SpecError, match="has changed since the plan was made"):
        run_ranks.alone(case)


def planned(*words: object) -> dict[str, Any]:
    """The plan that the command line makes for these options."""
    done = CliRunner().invoke(app, ["plan", "--json", *map(str, words)], catch_exceptions=False)
    document: dict[str, Any] = json.loads(done.stdout)
    return document


@pytest.mark.slow
def test_a_workload_file_names_a_module_that_stands_beside_it(tmp_path, graphs, monkeypatch):
    """It plans as --model does, from any folder; what the file sets the module must have."""
    folder, elsewhere = tmp_path / "conf", tmp_path / "elsewhere"
    folder.mkdir()
    elsewhere.mkdir()
    (folder / "model.py").write_text(MODULES["pyg sage"].replace("{p}", "0.25"))
    (folder / "workload.yaml").write_text("model: model.py:M\nhidden: 16\nlr: 0.5\n")
    monkeypatch.chdir(elsewhere)
    common = ("--graph", graphs["rough"], "--ranks", 2, "--set", "gpus_per_server=2")
    by_file = planned(*common, "--workload", "../conf/workload.yaml")
    by_option = planned(*common, "--model", "../conf/model.py:M", "--set", "lr=0.5")
    assert by_file["workload"] == by_option["workload"]
    assert by_file["workload"]["module"]["file"] == str(folder / "model.py")
    kept = planned(*common, "--workload", "../conf/workload.yaml", "--model", "gcn")
    assert (kept["workload"]["model"], kept["workload"]["module"]) == ("gcn", None)
    (folder / "workload.yaml").write_text("model: model.py:M\nhidden: 64\n")
    with pytest.raises(SpecError, match=r"decides hidden .hidden: 64, the module's: 16.; leave"):
        planned(*common, "--workload", "../conf/workload.yaml")


READS = """
import sys
from gnnplan.executor.modules.bind import GraphFields
from gnnplan.executor.modules.read import read
from gnnplan.planner.gnn.workload import Workload
read(sys.argv[1] + ":M", Workload(), GraphFields(8, 4))
assert "torch._inductor" not in sys.modules
"""
OWN = """
from dgl.nn import GraphConv
from torch import nn

class M(nn.Module):
    def __init__(self, in_feats, out_feats):
        super().__init__()
        self.a = GraphConv(in_feats, out_feats)

    def forward(self, g, x):
        return self.a(g, x)
"""


def test_a_module_is_read_without_torchs_compiler(tmp_path, fork_server):
    """It was imported to say from which line a node is: every rank started a second later."""
    pytest.importorskip("dgl", exc_type=ImportError)
    (tmp_path / "model.py").write_text(OWN)
    (tmp_path / "program.py").write_text(READS)
    words = [str(tmp_path / "program.py"), str(tmp_path / "model.py")]
    (ended,) = fork_server.run([(words, {})], tmp_path)
    assert ended.code == 0, ended.stderr


@pytest.mark.parametrize(("picks", "repeats"), [("self.places", True), ("self.mask", False)])
def test_a_module_whose_layers_wait_for_the_host_is_no_cuda_graph(tmp_path, picks, repeats):
    """To read where a mask is true a GPU's host waits, which a CUDA graph cannot; a place it need
    not know. Dropout waits for nothing."""
    path = tmp_path / "net.py"
    path.write_text(f"""{PYG}
class Net(nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.first, self.second = GCNConv(in_channels, 8), GCNConv(4, out_channels)
        self.register_buffer("mask", torch.arange(8) % 2 == 0)
        self.register_buffer("places", torch.arange(0, 8, 2))

    def forward(self, x, edge_index):
        h = F.dropout(F.silu(self.first(x, edge_index)), 0.5, self.training)
        return self.second(h[:, {picks}], edge_index)
""")
    workload = with_module(Workload(), read(f"{path}:Net", Workload(), GRAPH), ())
    assert workload.is_cut and workload.repeats == repeats


def test_what_is_no_number_does_not_change_from_call_to_call(tmp_path):
    """A NaN in any file of the user's kept every module from training: it differs from itself."""
    path = tmp_path / "net.py"
    path.write_text(f"""{PYG}
UNKNOWN = [float("nan")]
class Net(nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.conv, self.limit = GCNConv(in_channels, out_channels), UNKNOWN[0]

    def forward(self, x, edge_index):
        return F.silu(self.conv(x, edge_index))
""")
    assert with_module(Workload(), read(f"{path}:Net", Workload(), GRAPH), ()).is_cut
