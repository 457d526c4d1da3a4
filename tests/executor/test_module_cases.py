"""Modules that people have brought, and what became of them before they were run as written."""

import json
import os
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import gnnplan
from gnnplan.cli import app
from gnnplan.executor.modules.bind import GraphFields
from gnnplan.executor.modules.read import UserModule, optional, read, read_again
from gnnplan.executor.modules.record import Unfit
from gnnplan.planner.gnn.workload import Workload
from gnnplan.planner.graph.graph import Whole
from gnnplan.planner.vocabulary.errors import SpecError

GRAPH = "synthetic:community?vertices=60&edges=240&features=6&classes=3"
pytest.importorskip("torch_geometric", exc_type=ImportError)
HEAD = """
import torch
from torch import nn
from torch.nn import functional as F
from torch_geometric.nn import GCN2Conv, SAGEConv

class Net(nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.a, self.b = SAGEConv(in_channels, 8), SAGEConv(8, 8)
        self.c, self.norm = SAGEConv(8, out_channels), nn.BatchNorm1d(8)
        self.first, self.last = nn.Linear(in_channels, 8), nn.Linear(8, out_channels)
        self.deep = nn.ModuleList(GCN2Conv(8, ALPHA, THETA, n) for n in (1, 2))
    def forward(self, GIVEN):
        BODY
"""


def written(folder: Path, body: str, given: str = "x, edge_index", **numbers: float) -> str:
    numbers = {"ALPHA": 0.1, "THETA": 0.5} | numbers
    source = HEAD.replace("BODY", body.replace("\n", "\n        ")).replace("GIVEN", given)
    for name, value in numbers.items():
        source = source.replace(name, str(value))
    (folder / "model.py").write_text(source)
    return f"{folder / 'model.py'}:Net"


def asked(folder: Path, body: str, *words: str, **more: float) -> UserModule:
    """The module; with `words`, what it is given beside x and edge_index."""
    given = GraphFields(6, 3, vertex={word: ((3,), "<f4", 2) for word in words})
    return read(
        written(folder, body, "data" if words else "x, edge_index", **more), Workload(), given
    )


@pytest.mark.slow
def test_a_sum_with_a_number_is_a_sum(tmp_path):
    """It ended in an IndexError, and a sum with alpha was taken for one without."""
    body = "return self.c(self.a(x, edge_index).relu() + 1, edge_index)"
    assert asked(tmp_path, body).pieces
    body = (
        "h = self.a(x, edge_index).relu()\n"
        "return self.c(torch.add(h, self.b(h, edge_index), alpha=0.5).relu(), edge_index)"
    )
    assert asked(tmp_path, body).pieces


def test_log_softmax_over_vertices_is_none_over_classes(tmp_path):
    """It was trained as if dim were 1."""
    body = "return F.log_softmax(self.c(self.a(x, edge_index), edge_index), dim={})"
    assert not asked(tmp_path, body.format(1)).pieces
    with pytest.raises(SpecError, match=r"line 15: log_softmax gives vertex \d+ another row"):
        asked(tmp_path, body.format(0))


def test_a_field_is_read_by_its_name(tmp_path):
    """`data.pos` was trained as `data.x`, and a second edge set as the first."""
    body = "a = SAGEConv(3, 8)\nreturn self.c(self.b(F.pad(data.pos, (0, 5)), data.edge_index), data.{})"
    user = asked(tmp_path, body.replace("a = SAGEConv(3, 8)\n", "").format("edge_index"), "pos")
    assert user.pieces and user.pieces.inputs == (("pos", 3),)
    with pytest.raises(SpecError, match="edge_index_2hop"):
        asked(tmp_path, body.replace("a = SAGEConv(3, 8)\n", "").format("edge_index_2hop"), "pos")


@pytest.mark.slow
@pytest.mark.parametrize("numbers", [{"THETA": 0.0}, {"ALPHA": 1.5}], ids=str)
def test_numbers_that_our_layers_lack_are_the_modules_own(tmp_path, numbers):
    """They ended in a traceback of the workload's rules."""
    body = (
        "h = h0 = self.first(x).relu()\n"
        "for conv in self.deep:\n    h = conv(h, h0, edge_index).relu()\n"
        "return self.last(h)"
    )
    assert not asked(tmp_path, body).pieces
    user = asked(tmp_path, body, **numbers)
    assert user.pieces and user.fields["layers"] == 2


def test_a_dropout_that_leaves_nothing_is_refused(tmp_path):
    body = "return self.c(F.dropout(self.a(x, edge_index), 1.0, self.training), edge_index)"
    with pytest.raises(SpecError, match=r"line 15: dropout of p=1 leaves nothing; use p < 1"):
        asked(tmp_path, body)


TWO = "return self.c(self.norm(self.a(x, edge_index)).relu(), edge_index)"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--mode", "mini", "--batch", "8", "--fanout", "2,2"], ""),
        (["--mode", "mini", "--batch", "8", "--fanout", "2,2,2"], "3 numbers, layers: 2"),
        (["--dtype", "bfloat16"], "rows are bfloat16 in gcn, sage"),
        (["--layers", "3"], "decides layers"),
    ],
    ids=str,
)
def test_a_rule_that_a_module_breaks_is_told_in_a_line(tmp_path, options, words):
    """A fanout of the module's own length was refused with the default's, and other rules ended in
    a traceback."""
    model = written(tmp_path, TWO)
    command = ["plan", "--graph", GRAPH, "--model", model, "--ranks", "2", "--json", *options]
    command += ["--set", "gpus_per_server=2"]
    done = CliRunner().invoke(app, command)
    if words:
        assert isinstance(done.exception, SpecError) and words in str(done.exception)
    else:
        assert json.loads(done.stdout)["workload"]["fanout"] == [2, 2], done.exception


def test_what_a_file_prints_is_not_in_the_document(tmp_path):
    model = written(tmp_path, f"print('forward')\n{TWO}")
    file = tmp_path / "model.py"
    file.write_text(f"print('loading my model')\n{file.read_text()}")
    command = ["plan", "--graph", GRAPH, "--model", model, "--ranks", "2", "--json"]
    done = CliRunner().invoke(app, [*command, "--set", "gpus_per_server=2"])
    assert json.loads(done.stdout)["workload"]["module"]["cut"] in (True, False)
    assert "loading my model" in done.stderr and "forward" in done.stderr


WEIGHTED = GraphFields(6, 3, edge={"edge_weight": ((), "<f4", 0)})
MATRIX = "return self.c(self.a(x, adj_t).relu(), adj_t)"


def test_a_matrix_that_holds_weights_is_not_taken_for_edges_without(tmp_path):
    """PyG's adj_t of a weighted graph was trained as edge_index: without the weights."""
    model = written(tmp_path, MATRIX, given="x, adj_t")
    with pytest.raises(SpecError, match="asks for adj_t, which holds the graph's edge_weight"):
        read(model, Workload(), WEIGHTED)
    assert read(model, Workload(), GraphFields(6, 3))


def test_lazy_parameters_of_a_plan_in_float64_are_made_again(tmp_path):
    """Ranks made them from rows in float32, with parameters in float64, and ended."""
    model = written(tmp_path, "return self.c(self.lazy(x, edge_index).relu(), edge_index)")
    file = tmp_path / "model.py"
    file.write_text(
        file.read_text().replace("self.first,", "self.lazy = SAGEConv(-1, 8)\n        self.first,")
    )
    user = read(model, Workload(dtype="float64"), GraphFields(6, 3))
    workload = Workload(dtype="float64", module=user.description, **user.fields)
    assert read_again(workload)


def test_a_script_that_reads_arguments_is_told_what_to_guard(tmp_path):
    (tmp_path / "model.py").write_text("import argparse\nargparse.ArgumentParser().exit(2)\n")
    with pytest.raises(SpecError, match=r"line 2: .*SystemExit: 2\); the file is imported, not"):
        read(f"{tmp_path / 'model.py'}:Net", Workload(), GraphFields(6, 3))


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (
            "return self.c(self.a(x, edge_index) + torch.ones(600, 8), edge_index)",
            "cannot have a row",
        ),
        (
            "return self.c(self.a(x, edge_index) / float(x.size(0)) ** 0.5, edge_index)",
            "line 15: div of a graph of 1,201 vertices is another call",
        ),
        (
            "kept = x[edge_index[0], 0] > x[edge_index[1], 0]\n"
            "return self.c(self.a(x, edge_index), edge_index[:, kept])",
            "line 15: forward chooses edges by x of vertices",
        ),
        (
            "return self.c(torch.tanh(self.a(x, edge_index)), edge_index.flip(0))",
            "from end to start",
        ),
        (
            "self.first.weight.data.clamp_(-9, 9)\nreturn self.c(self.first(x), edge_index)",
            "line 15: clamp changes first.weight in place, which would be lost",
        ),
        (
            "with torch.no_grad():\n    self.first.weight *= 1.0\nreturn self.c(self.first(x), edge_index)",
            "line 16: .* changes first.weight in place, which would be lost",
        ),
        (
            "import random\nh = self.a(x, edge_index)\n"
            "return self.c(h * 0 if random.random() < 1e-9 else h + 1, edge_index)",
            "draws random numbers of Python's or numpy's",
        ),
        (
            "import numpy\nh = self.a(x, edge_index)\n"
            "return self.c(h * 0 if numpy.random.rand() < 1e-9 else h + 1, edge_index)",
            "draws random numbers of Python's or numpy's",
        ),
        ("return self.c(self.a(x, edge_index), edge_index[:, ::2])", "edges by their places"),
        (
            "self.calls = getattr(self, 'calls', 0) + 1\n"
            "return self.c(self.a(x, edge_index) * (1 if self.calls < 4 else 2), edge_index)",
            "forward changes self.calls from call to call",
        ),
        (
            "global CALLS\nCALLS = globals().get('CALLS', 0) + 1\n"
            "return self.c(self.a(x, edge_index) * (1 if CALLS < 99 else 2), edge_index)",
            r"forward changes model\.py: CALLS from call to call",
        ),
        (
            "import os\nreturn self.c(self.a(x, edge_index), edge_index) * int(os.environ.get('RANK', 7))",
            "it makes other rows in the process of rank 1 of 2 than here",
        ),
        ("import os\nos._exit(3)", "its process ends with code 3 while forward runs"),
        ("import os\nos.abort()", "its process ends by SIGABRT while forward runs"),
        (
            "return torch.spmm(edge_index, self.a(x, edge_index))",
            r"line 15: .*it multiplies by edge_index \[2, E\], whose matrix is torch.sparse_coo",
        ),
        (
            "adj = torch.sparse.FloatTensor(edge_index.flip(0), torch.ones(edge_index.size(1)))\n"
            "return adj @ self.c(self.a(x, edge_index), edge_index)",
            "line 16: a sparse matrix is made by no call of torch's",
        ),
        (
            "h = self.c(self.a(x, edge_index), edge_index)\nw = h[edge_index[0], 0]\n"
            "return torch.sparse_coo_tensor(edge_index.flip(0), w, (len(x), len(x))) @ h",
            "line 17: .* of numbers that are learned, whose gradient torch makes of all pairs",
        ),
        (
            "adj = torch.sparse_coo_tensor(edge_index.flip(0), x.new_ones(edge_index.size(1)), (len(x), len(x)))\n"
            "h = self.c(self.a(x, edge_index), edge_index)\nreturn torch.sparse.addmm(h, adj, h)",
            "line 17: .* of a sparse matrix is no product with rows",
        ),
        (
            "h = nn.Embedding(9, 8)(x[:, 0].long())\nreturn self.c(h, edge_index)",
            "line 15: .*features are random numbers there, and no ids",
        ),
    ],
    ids=[
        "rows of its own",
        "vertices",
        "chosen",
        "turned",
        "data",
        "operator",
        "random",
        "numpy",
        "places",
        "counted calls",
        "counted in a global",
        "rank",
        "exit",
        "abort",
        "edges as a matrix",
        "legacy matrix",
        "learned matrix",
        "no product",
        "ids",
    ],
)
def test_a_refusal_says_what_the_code_does(tmp_path, body, words):
    with pytest.raises(SpecError, match=words):
        asked(tmp_path, body)


@pytest.mark.parametrize("how", ["torch.jit.script", "torch.jit.trace", "torch.compile"])
def test_a_compiled_module_is_refused_in_words(how):
    """A scripted one ended in an AttributeError of torch's."""
    made = nn.Linear(6, 3)
    given = (torch.ones(4, 6),) if how.endswith("trace") else ()
    compiled = {"script": torch.jit.script, "trace": torch.jit.trace, "compile": torch.compile}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = compiled[how.rpartition(".")[2]](made, *given)
    with pytest.raises(SpecError, match="its forward is compiled, and its calls of torch cannot"):
        read(module, Workload(), GraphFields(6, 3))


PART = """
def net(in_channels, out_channels):
    net = Net(in_channels, out_channels)
    net.first = HOW(nn.Linear(8, 8))
    return net
"""


def with_a_part(folder: Path, how: str) -> UserModule:
    """A module of which a part is compiled."""
    written(folder, "return self.c(self.first(self.a(x, edge_index)), edge_index)")
    with (folder / "model.py").open("a") as file:
        file.write(PART.replace("HOW", how))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own
        return read(f"{folder / 'model.py'}:net", Workload(), GraphFields(6, 3))


def test_a_compiled_part_runs_as_it_is_written(tmp_path):
    """torch's compiler followed the calls that note calls, for half a minute, on every rank."""
    assert with_a_part(tmp_path, "torch.compile").pieces
    assert not torch._dynamo.utils.counters["frames"]


def test_a_scripted_part_is_refused_in_words(tmp_path):
    """Its parameters were said to be a file's."""
    with pytest.raises(SpecError, match="first: its forward is compiled, and its calls of torch"):
        with_a_part(tmp_path, "torch.jit.script")


@pytest.mark.slow
def test_a_field_that_forward_could_do_without_is_said_once(tmp_path):
    """forward(x, edge_index, edge_weight=None) got the graph's weights, and nobody was told."""
    body = (
        "h = self.a(x, edge_index) * (1 if w is None else 2)\nreturn self.c(h.tanh(), edge_index)"
    )
    model = written(
        tmp_path, body.replace("w is", "edge_weight is"), "x, edge_index, edge_weight=None"
    )
    user = read(model, Workload(), WEIGHTED)
    assert optional(user) == []  # it asks whether there are some, and computes without them
    body = "return self.c(torch.tanh(self.a(x, edge_index)) * edge_weight.sum(), edge_index)"
    user = read(written(tmp_path, body, "x, edge_index, edge_weight=None"), Workload(), WEIGHTED)
    (note,) = optional(user)
    assert note.startswith("forward of Net gets the graph's edge_weight as edge_weight, which has")


def test_python_says_what_was_done_with_a_graph(tmp_path):
    """gnnplan.plan was silent where the command line said that a graph was made undirected."""
    edges = np.array([[0, 1, 2, 2], [1, 2, 0, 2]])
    plan = gnnplan.plan(edges, "dgx_a100", task="none", features=4, ranks=1)
    assert "dropped 1 self-loops" in plan.notes and "note: made undirected: 3 -> 6" in str(plan)


def test_an_error_without_words_is_told_by_its_code(tmp_path):
    """A GATConv without edge_dim that is given edge_attr said 'AssertionError' alone."""
    body = "assert x.dim() == 3\nreturn self.c(self.a(x, edge_index) + 1, edge_index)"
    with pytest.raises(SpecError, match=r"line 15: .*AssertionError: assert x.dim\(\) == 3"):
        asked(tmp_path, body)


@pytest.mark.parametrize(
    "added",
    [
        "torch.zeros_like(h).index_add(0, edge_index[1], h[edge_index[0]], alpha=0.5)",
        "torch.zeros_like(h[:, 1:]).index_add(0, edge_index[1], h[edge_index[0], 1:])",
        "(0 * self.first.bias).repeat(h.size(0), 1).index_add(0, edge_index[1], h[edge_index[0]])",
    ],
    ids=["alpha", "fewer columns", "into a parameter"],
)
def test_what_only_looks_like_a_sum_is_run_as_it_is_written(tmp_path, added):
    """Our sum was taken for these, and the proof then refused them in words of something else."""
    body = f"h = torch.tanh(self.a(x, edge_index))\nm = {added}\nreturn self.c(h + m.sum(1, keepdim=True), edge_index)"
    assert asked(tmp_path, body).pieces


@pytest.mark.parametrize(
    "body",
    [
        "h = self.a(x.float(), edge_index) + torch.ones(x.size(0), 8)\nreturn self.c(h, edge_index)",
        "h = F.dropout(torch.stack([self.a(x, edge_index), self.first(x)]), 0.5, self.training)\n"
        "return self.c(self.b(h[0], edge_index).tanh() + h[1], edge_index) + self.last(h.sum(0))",
        "h = self.first(x)\nfor _ in range(2):\n"
        "    h = self.b(h, edge_index) + self.first(F.dropout(x, 0.5, self.training))\n"
        "return self.last(h)",
        "from torch.utils.checkpoint import checkpoint\n"
        "h = checkpoint(self.b, self.first(x), edge_index, use_reentrant=True)\n"
        "h = checkpoint(lambda h: F.dropout(h, 0.5, self.training), h, use_reentrant=False)\n"
        "return self.c(h, edge_index)",
        "n = int(edge_index.max()) + 1\nh = torch.tanh(self.a(x, edge_index))\n"
        "return self.c(torch.zeros(n, 8).index_add(0, edge_index[1], h[edge_index[0]]), edge_index)",
    ],
    ids=["float32", "vertices second", "dropped anew", "checkpoint", "counted vertices"],
)
def test_what_is_written_otherwise_is_run_as_it_is_written(tmp_path, body):
    """Numbers in float32 failed in the proof's float64; rows whose vertices are in the second
    dimension, and those that dropout alone makes others, were refused; a checkpoint's gradients
    were lost; a question about edges alone was taken for one about rows."""
    assert asked(tmp_path, body).pieces


def test_a_scripted_function_is_called_as_a_whole(tmp_path):
    """It was told to be put in a module of its own."""
    model = written(tmp_path, "return self.c(gelu(self.a(x, edge_index)), edge_index)")
    with (tmp_path / "model.py").open("a") as file:
        file.write(
            "\n@torch.jit.script\ndef gelu(x):\n    return x * 0.5 * (1.0 + torch.erf(x / 1.41))\n"
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own
        assert read(model, Workload(), GraphFields(6, 3)).pieces


@pytest.mark.parametrize(
    ("asks", "words"),
    [
        ("edge_index.max() >= len(x)", ""),
        ("(edge_index[1] == 0).any()", "line 15: forward reads any of the edges, which is True on"),
    ],
    ids=["alike", "otherwise"],
)
def test_a_graph_must_answer_as_those_that_were_looked_at(tmp_path, asks, words):
    """A branch on edges is recorded once, of random graphs whose vertex 0 reads nobody."""
    body = f"if {asks}:\n    x = x * 2\nreturn self.c(self.a(x, edge_index).tanh(), edge_index)"
    command = ["plan", "--graph", GRAPH, "--model", written(tmp_path, body), "--ranks", "2"]
    done = CliRunner().invoke(app, [*command, "--set", "gpus_per_server=2", "--json"])
    assert (words in str(done.exception)) if words else not done.exception, done.exception


def test_edges_tell_how_many_vertices_there_are_if_the_last_has_some(tmp_path):
    """A module whose self-loops ended before isolated vertices was trained with loops for all."""
    body = (
        "n = int(edge_index.max()) + 1\nloops = torch.arange(n).expand(2, -1)\n"
        "return self.c(torch.tanh(self.a(x, edge_index)), torch.cat([edge_index, loops], 1))"
    )
    pieces = asked(tmp_path, body).pieces
    assert pieces
    pair = np.array([1, 0], dtype=np.int32)
    pieces.structure.must_answer_alike(Whole(np.array([0, 1, 2]), pair), pieces.place)
    with pytest.raises(Unfit, match=r"line 15: .* max of the edges, which is 1 on this graph, but"):
        pieces.structure.must_answer_alike(Whole(np.array([0, 1, 2, 2]), pair), pieces.place)


@pytest.mark.parametrize(
    ("body", "given", "words"),
    [
        ("return self.c(x * h.sigmoid(), edge_index)", "x, edge_index, h", "forward asks for h,"),
        ("return self.c(x, edge_index)", "x, edge_index, batch", "forward asks for batch, and the"),
        (
            "most = torch.bincount(edge_index[1]).max().item()\n"
            "return self.c(self.a(x if most > 99 else 2 * x, edge_index), edge_index)",
            "x, edge_index",
            r"line 15: forward asks for the numbers in a tensor \(max\)",
        ),
        ("return self.c(X, EDGES)", "", "forward takes nothing; let it take x and edge_index"),
        (
            "return {'x': self.c(self.a(x, edge_index), edge_index)}",
            "x, edge_index",
            "a dict; retu",
        ),
        ("return self.c(self.a(x, edge_index), edge_index) / 0", "x, edge_index", "are not finite"),
        (
            "return torch.spmm(adj, self.a(x, adj))",
            "x, adj",
            r"line 15: .*adj is edge_index \[2, E\] here, whose matrix is torch.sparse_coo_tensor",
        ),
    ],
    ids=["two features", "batch", "degree", "nothing", "dict", "infinite", "matrix"],
)
def test_a_refusal_of_what_forward_is_given_and_returns(tmp_path, body, given, words):
    """The features were given twice, a Data as the numbers of graphs, and a dict was said to fail
    in the process of rank 1 alone."""
    with pytest.raises(SpecError, match=words):
        read(written(tmp_path, body, given), Workload(), GraphFields(6, 3))


def test_parameters_are_known_by_the_words_of_their_names(tmp_path):
    """pygcn's nfeat, nhid and nclass were not."""
    model = written(
        tmp_path, "return self.c(self.a(feature, edge_index), edge_index)", "feature, edge_index"
    )
    file = tmp_path / "model.py"
    names = file.read_text().replace("in_channels", "nfeat").replace("out_channels", "nclass")
    file.write_text(names.replace("nclass):", "nhid, num_layers, dim_drop, nclass):"))
    user = read(model, Workload(hidden=5), GraphFields(6, 3))
    made = dict(user.description.arguments)
    assert made == {"nfeat": 6, "nhid": 5, "num_layers": 3, "dim_drop": 0.0, "nclass": 3}
    file.write_text(names.replace("nfeat, nclass", "g, nfeat, nclass"))
    with pytest.raises(
        SpecError, match=r"requires g, .* take it in forward, as forward\(self, g, x"
    ):
        read(model, Workload(), GraphFields(6, 3))


DGL = """
import torch
from torch import nn
from torch.nn import functional as F
from dgl import function as fn
from dgl.nn import GATConv, SAGEConv, TAGConv

class Own(nn.Module):
    def __init__(self, h_in, h_out):
        super().__init__()
        self.linear = nn.Linear(h_in, h_out)
    def forward(self, g, h):
        with g.local_scope():
            norm = g.in_degrees().float().pow(-0.5).unsqueeze(1)
            g.srcdata["h"] = self.linear(h) * norm
            g.update_all(fn.copy_u("h", "m"), fn.mean("m", "h"))
            return F.dropout(g.dstdata["h"] * norm, 0.5, self.training)

class Normed(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.BatchNorm1d(width)
    def forward(self, g):
        g.update_all(lambda edges: {"m": edges.src["h"]}, lambda nodes: {"h": nodes.mailbox["m"].sum(1)})
        return self.norm(g.ndata["h"])

class Net(nn.Module):
    def __init__(self, in_feats, out_feats):
        super().__init__()
        self.gat, self.tag = GATConv(in_feats, 4, 2, 0.3, 0.3), TAGConv(8, out_feats, 2)
        self.own = nn.ModuleList([Own(in_feats, in_feats), Own(in_feats, in_feats)])
        self.last, self.norm = nn.Linear(in_feats, out_feats), Normed(in_feats)
    def forward(self, GIVEN):
        BODY
"""
MESSAGES = """
g.ndata["h"] = g.ndata["feat"].tanh()
g.apply_edges(lambda edges: {"e": edges.src["h"] * edges.dst["h"]})
g.update_all(fn.u_mul_e("h", "e", "m"), fn.sum("m", "h"))
return self.last(g.ndata["h"])
""".strip()


@pytest.mark.parametrize(
    ("given", "body", "layers"),
    [
        ("g, x", "return self.tag(g, self.gat(g, x).flatten(1))", 3),
        ("g", MESSAGES, 1),
        (
            "blocks, x",
            "for own, block in zip(self.own, blocks):\n    x = own(block, x)\nreturn self.last(x)",
            2,
        ),
    ],
    ids=["dropout and hops inside", "messages in forward", "blocks of own layers"],
)
def test_dgls_kernels_are_followed_where_a_part_hides_too_much(tmp_path, given, body, layers):
    """All were refused but the last, of which one layer was trained: it had as many blocks as
    convolutions of DGL."""
    assert with_dgl(tmp_path, given, body).fields["layers"] == layers


def test_a_batch_norm_behind_functions_of_mailboxes_is_refused_by_name(tmp_path):
    body = 'g.ndata["h"] = x\nreturn self.last(self.norm(g))'
    with pytest.raises(SpecError, match=r"norm\.norm normalises by moments of all rows in a part"):
        with_dgl(tmp_path, "g, x", body)


def with_dgl(folder: Path, given: str, body: str) -> UserModule:
    """A module of DGL; the graph has self-loops, for its layers divide by degrees."""
    os.environ.setdefault("DGLBACKEND", "pytorch")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # at import, its own
        pytest.importorskip("dgl", exc_type=ImportError)
    body = body.replace("\n", "\n        ")
    (folder / "model.py").write_text(DGL.replace("GIVEN", given).replace("BODY", body))
    return read(f"{folder / 'model.py'}:Net", Workload(), GraphFields(6, 3))
