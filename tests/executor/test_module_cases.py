"""Modules that people have brought, and what became of them before they were run as written."""

import re
import warnings
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from pairwise import every
from torch import nn
from written import quiet

import gnnplan
from gnnplan.executor.modules.bind import GraphFields, Small
from gnnplan.executor.modules.prove import prove
from gnnplan.executor.modules.read import UserModule, optional, read, read_again
from gnnplan.executor.modules.record import Unfit
from gnnplan.planner.gnn.workload import Workload
from gnnplan.planner.graph.graph import CsrEdges
from gnnplan.planner.vocabulary.errors import SpecError

GRAPH = "synthetic:community?vertices=60&edges=240&features=6&classes=3"
PLAIN = GraphFields(6, 3)
HEAD = """
import torch
from torch import nn
from torch.nn import functional as F
from torch_geometric.nn import GCN2Conv, SAGEConv

class Net(nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.a, self.c = SAGEConv(in_channels, 8), SAGEConv(8, out_channels)
        self.b, self.norm = SAGEConv(8, 8), nn.BatchNorm1d(8)
        self.first, self.last = nn.Linear(in_channels, 8), nn.Linear(8, out_channels)
        self.deep = nn.ModuleList(GCN2Conv(8, ALPHA, THETA, n) for n in (1, 2))
    def forward(self, GIVEN):
        BODY
"""
PARTS = re.compile(r" *(self\.\w+)(?:, (self\.\w+))? = ")


@pytest.fixture(scope="module", autouse=True)
def torch_geometric():
    """Imported here, for the tests that run: its import takes as long as that of torch."""
    pytest.importorskip("torch_geometric", exc_type=ImportError)


def with_body(head: str, body: str, given: str) -> str:
    """The file with this forward, without parts that it does not read: a proof copies them all."""
    above, net = head.split("class Net")
    read = {*re.findall(r"self\.\w+", body)}
    lines = [
        line if not (parts := PARTS.match(line)) or read & {*parts.groups()} else " " * 8 + "pass"
        for line in net.splitlines()
    ]
    forward = "\n".join(lines).replace("BODY", body.replace("\n", "\n        "))
    return f"{above}class Net{forward.replace('GIVEN', given)}\n"


def written(folder: Path, body: str, given: str = "x, edge_index", **numbers: float) -> str:
    numbers = {"ALPHA": 0.1, "THETA": 0.5} | numbers
    source = with_body(HEAD, body.strip(), given)
    for name, value in numbers.items():
        source = source.replace(name, str(value))
    (folder / "model.py").write_text(source)
    return f"{folder / 'model.py'}:Net"


def asked(
    folder: Path,
    body: str,
    given: str = "x, edge_index",
    fields: GraphFields = PLAIN,
    **more: float,
) -> UserModule:
    """The module of this forward; more: numbers of its layers."""
    return read(written(folder, body, given, **more), Workload(), fields)


def test_a_field_is_read_by_its_name(tmp_path):
    """`data.pos` was trained as `data.x`, and a second edge set as the first."""
    body = "return self.c(self.b(F.pad(data.pos, (0, 5)), data.edge_index), data.{})"
    placed = GraphFields(6, 3, vertex={"pos": ((3,), "<f4", 2)})
    user = asked(tmp_path, body.format("edge_index"), "data", placed)
    assert user.pieces and user.pieces.inputs == (("pos", 3),)
    with pytest.raises(SpecError, match="edge_index_2hop"):
        asked(tmp_path, body.format("edge_index_2hop"), "data", placed)


@pytest.mark.parametrize("numbers", every(2, [{"THETA": 0.0}, {"ALPHA": 1.5}]), ids=str)
def test_numbers_that_our_layers_lack_are_the_modules_own(tmp_path, numbers):
    """They ended in a traceback of the workload's rules."""
    user = asked(tmp_path, OURS["no weights of edges"], **numbers)
    assert user.pieces and user.fields["layers"] == 2


PLAN = f"plan --json --graph {GRAPH} --ranks 2 --set gpus_per_server=2 --mode full --model"
TWO = "return self.c(self.norm(self.a(x, edge_index)).relu(), edge_index)"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--mode mini --batch 8 --fanout 2,2", ""),
        ("--mode mini --batch 8 --fanout 2,2,2", "3 numbers, layers: 2"),
        ("--dtype bfloat16", "rows are bfloat16 in gcn, sage"),
    ],
)
def test_a_rule_that_a_module_breaks_is_told_in_a_line(gnnplan, tmp_path, options, words):
    """A fanout of the module's own length was refused; other rules ended in a traceback."""
    done = gnnplan(PLAN, written(tmp_path, TWO), options)
    assert words in done.err
    assert done.code == 2 if words else done.document["workload"]["fanout"] == [2, 2]


def test_what_a_file_prints_is_not_in_the_document(gnnplan, tmp_path):
    model = written(tmp_path, f"print('forward')\n{TWO}")
    file = tmp_path / "model.py"
    file.write_text(f"print('loading my model')\n{file.read_text()}")
    done = gnnplan(PLAN, model)
    assert done.document["workload"]["module"]["cut"] in (True, False)
    assert "loading my model" in done.err and "forward" in done.err


WEIGHTED = GraphFields(6, 3, edge={"edge_weight": ((), "<f4", 0)})
MATRIX = "return self.c(self.a(x, adj_t).relu(), adj_t)"


def test_a_matrix_that_holds_weights_is_not_taken_for_edges_without(tmp_path):
    """PyG's adj_t of a weighted graph was trained as edge_index: without the weights."""
    model = written(tmp_path, MATRIX, given="x, adj_t")
    with pytest.raises(SpecError, match="asks for adj_t, which holds the graph's edge_weight"):
        read(model, Workload(), WEIGHTED)
    assert read(model, Workload(), PLAIN)


def test_lazy_parameters_of_a_plan_in_float64_are_made_again(tmp_path):
    """Ranks made them from rows in float32, with parameters in float64, and ended. A lazy norm's
    buffers could not be copied."""
    model = written(tmp_path, "return self.c(self.b2(self.b1(x, edge_index)).relu(), edge_index)")
    file, lazy = tmp_path / "model.py", "self.b1, self.b2 = SAGEConv(-1, 8), nn.LazyBatchNorm1d()"
    file.write_text(file.read_text().replace("__()", f"__()\n        {lazy}"))
    user = read(model, Workload(dtype="float64"), PLAIN)
    workload = Workload(dtype="float64", module=user.description, **user.fields)
    assert user.pieces is None and read_again(workload)


def test_fields_of_edges_may_pass_a_layer_that_does_not_learn(tmp_path):
    """In float32 it was refused: the proof in float64 took its weights as they were."""
    body = (
        "w, h = self.kept(edge_attr), self.a(x, edge_index).tanh()\n"
        "h = torch.zeros_like(h).index_add(0, edge_index[1], w * h[edge_index[0]])\n"
        "return self.c(h, edge_index)"
    )
    model, file = written(tmp_path, body, "x, edge_index, edge_attr"), tmp_path / "model.py"
    kept = "__()\n        self.kept = nn.Linear(2, 1).requires_grad_(False)"
    file.write_text(file.read_text().replace("__()", kept))
    assert read(model, Workload(), GraphFields(6, 3, edge={"edge_attr": ((2,), "<f4", 0)})).pieces


# a body of forward, or what it is given and a body -> words of the refusal
REFUSED = {
    "rows of its own": (
        "return self.c(self.a(x, edge_index) + torch.ones(600, 8), edge_index)",
        "cannot have a row",
    ),
    "rows of its own beside": (
        "rows = torch.cat([x, self.first.weight.new_ones(600, 2)], 1)\nreturn self.c(rows, edge_index)",
        "that graph has 53 vertices: a module's own tensors cannot have a row",
    ),
    "rows one above the other": (
        "h = self.a(x, edge_index)\nreturn self.last(torch.cat([h, h, h]))",
        r"line 16: cat makes \[159, 8\] of the rows of all 53 vertices",
    ),
    "vertices": (
        "return self.c(self.a(x, edge_index) / float(x.size(0)) ** 0.5, edge_index)",
        "line 15: div of a graph of 1,201 vertices is another call",
    ),
    "over vertices": (  # was trained as if dim were 1
        "return F.log_softmax(self.c(self.a(x, edge_index), edge_index), dim=0)",
        r"line 15: log_softmax gives vertex \d+ another row",
    ),
    # ended in a traceback
    "sparse gradients": (
        "h = F.embedding(torch.zeros_like(x[:, 0]).long(), self.last.weight, sparse=True)\n"
        "return self.c(self.first(x) + h, edge_index)",
        "last.weight has sparse gradients, and ranks add dense ones; leave out sparse=True",
    ),
    # its remedy was missing
    "a mask": (
        "data",
        "return self.a(data.x, data.edge_index)[data.train_mask]",
        "no attribute 'train_mask'.*; data has edge_index, x: .* a row of each vertex, without mask",
    ),
    # was "its output is another when its calls run in pieces", without a line or a remedy
    "readers first": (
        "row, col = edge_index\nh = self.first(x)\n"
        "h = torch.zeros_like(h).scatter_add(0, row[:, None].expand(-1, 8), h[col])\n"
        "return self.last(h)",
        r"line 17: scatter_add adds rows up at edge_index\[0\].* write col, row = edge_index\)",
    ),
    "branch": (
        "if x.sum() > 0:\n    return x\nreturn self.c(self.a(x, edge_index), edge_index)",
        r"line 15: forward asks for the numbers in a tensor \(bool\)",
    ),
    "degree": (
        "most = torch.bincount(edge_index[1]).max().item()\n"
        "return self.c(self.a(x if most > 99 else 2 * x, edge_index), edge_index)",
        r"line 15: forward asks for the numbers in a tensor \(max\)",
    ),
    "width": (
        "return self.c(x, edge_index)",
        r"line 15: forward fails on a small graph of 6 features \(RuntimeError: mat1 and mat2",
    ),
    # "vertex 0 of that graph has no edges" was said of a list's end
    "a list": ("return [self.a(x, edge_index)][1]", r"list index out of range\)$"),
    "without words": (  # a GATConv without edge_dim that is given edge_attr said 'AssertionError' alone
        "assert x.dim() == 3\nreturn self.c(self.a(x, edge_index) + 1, edge_index)",
        r"line 15: .*AssertionError: assert x.dim\(\) == 3",
    ),
    "drops in evaluation": (
        "return self.c(F.dropout(self.a(x, edge_index).relu()), edge_index)",
        "line 15: dropout drops in evaluation too",
    ),
    "drops all": (
        "return self.c(F.dropout(self.a(x, edge_index), 1.0, self.training), edge_index)",
        "line 15: dropout of p=1 leaves nothing; use p < 1",
    ),
    "chosen": (
        "kept = x[edge_index[0], 0] > x[edge_index[1], 0]\n"
        "return self.c(self.a(x, edge_index), edge_index[:, kept])",
        "line 15: forward chooses edges by x of vertices",
    ),
    "turned": (
        "return self.c(torch.tanh(self.a(x, edge_index)), edge_index.flip(0))",
        "from end to start",
    ),
    "turned ends": (
        "row, col = edge_index.flip(0)\nh = self.first(x)\n"
        "return self.last(torch.zeros_like(h).index_add(0, row, h[col]))",
        "line 15: flip makes other edges, the graph's from end to start",
    ),
    "places": (
        "return self.c(self.a(x, edge_index), edge_index[:, ::2])",
        "line 15: getitem makes other edges of a part .* edges by their places",
    ),
    "data": (
        "self.first.weight.data.clamp_(-9, 9)\nreturn self.c(self.first(x), edge_index)",
        "line 15: clamp changes first.weight in place, which would be lost",
    ),
    "operator": (
        "with torch.no_grad():\n    self.first.weight *= 1.0\nreturn self.c(self.first(x), edge_index)",
        "line 16: .* changes first.weight in place, which would be lost",
    ),
    "random": (
        "import random\nh = self.a(x, edge_index)\n"
        "return self.c(h * 0 if random.random() < 1e-9 else h + 1, edge_index)",
        "draws random numbers of Python's or numpy's",
    ),
    "numpy": (
        "import numpy\nh = self.a(x, edge_index)\n"
        "return self.c(h * 0 if numpy.random.rand() < 1e-9 else h + 1, edge_index)",
        "draws random numbers of Python's or numpy's",
    ),
    "counted calls": (
        "self.calls = getattr(self, 'calls', 0) + 1\n"
        "return self.c(self.a(x, edge_index) * (1 if self.calls < 4 else 2), edge_index)",
        "forward changes self.calls from call to call",
    ),
    "counted in a global": (
        "global CALLS\nCALLS = globals().get('CALLS', 0) + 1\n"
        "return self.c(self.a(x, edge_index) * (1 if CALLS < 99 else 2), edge_index)",
        r"forward changes model\.py: CALLS from call to call",
    ),
    # the next three were trained otherwise than by one process, silently
    "kept by training": (
        "h = self.a(x, edge_index)\nif self.training:\n    self.center = h.mean(0).detach()\n"
        "return self.c(h - (0 if self.training else getattr(self, 'center', 0)), edge_index)",
        "keeps something of training that evaluation reads",
    ),
    "kept for others": (  # saved as it had been, since our own layers computed the rest
        "h = self.a(x, edge_index)\nif self.training:\n"
        "    self.norm.running_mean = self.norm.running_mean + h.detach().mean(0)\n"
        "return self.c(h.relu(), edge_index)",
        "its buffer norm.running_mean in training is another",
    ),
    "hook": (
        "h = torch.tanh(self.a(x, edge_index))\nif h.requires_grad:\n"
        "    h.register_hook(lambda g: g.clamp(-50, 50))\nreturn self.c(h, edge_index)",
        "line 17: register_hook changes gradients",
    ),
    "autocast": (
        "with torch.autocast('cpu', dtype=torch.bfloat16):\n    h = self.a(x, edge_index).tanh()\n"
        "return self.c(h.float(), edge_index)",
        "line 16: .*autocast",
    ),
    "unseen numbers of a parameter": (  # no constant, though two graphs have the same
        "with torch._C.DisableTorchFunction():\n    w = self.a.lin_l.bias.detach() * 2\n"
        "return self.c(self.a(x, edge_index).tanh() * w, edge_index)",
        "something that torch does not see makes a tensor in forward itself",
    ),
    "other layers in evaluation": (
        "h = self.a(x, edge_index).tanh()\nh = h if self.training else self.b(h, edge_index)\n"
        "return self.c(h, edge_index)",
        r"forward hands on \d+ numbers per vertex in 2 layers in training, and \d+ .* in 3 layers in",
    ),
    "rank": (
        "import os\nreturn self.c(self.a(x, edge_index), edge_index) * int(os.environ.get('RANK', 7))",
        "it makes other rows in the process of rank 1 of 2 than here",
    ),
    "exit": ("import os\nos._exit(3)", "its process ends with code 3 while forward runs"),
    "abort": ("import os\nos.abort()", "its process ends by SIGABRT while forward runs"),
    "edges as a matrix": (
        "return torch.spmm(edge_index, self.a(x, edge_index))",
        r"line 15: .*it multiplies by edge_index \[2, E\], whose matrix is torch.sparse_coo",
    ),
    "edges of another name": (
        "x, adj",
        "return torch.spmm(adj, self.a(x, adj))",
        r"line 15: .*adj is edge_index \[2, E\] here, whose matrix is torch.sparse_coo_tensor",
    ),
    "legacy matrix": (
        "adj = torch.sparse.FloatTensor(edge_index.flip(0), torch.ones(edge_index.size(1)))\n"
        "return adj @ self.c(self.a(x, edge_index), edge_index)",
        "line 16: a sparse matrix is made by no call of torch's",
    ),
    "dropout of some rows": (
        "h, some = torch.zeros_like(x), x[:, 0] > 0\nh[some] = F.dropout(x[some], 0.5, self.training)\n"
        "return self.c(self.a(h, edge_index), edge_index)",
        "line 16: dropout is given rows of some vertices",
    ),
    "rows of some": (
        "return self.c(self.a(x, edge_index), edge_index)[x[:, 0] > 0]",
        r"forward returns \[\d+, 3\] of 53 vertices",
    ),
    "learned matrix": (
        "h = self.c(self.a(x, edge_index), edge_index)\nw = h[edge_index[0], 0]\n"
        "return torch.sparse_coo_tensor(edge_index.flip(0), w, (len(x), len(x))) @ h",
        "line 17: .* of numbers that are learned, whose gradient torch makes of all pairs",
    ),
    "no product": (
        "adj = torch.sparse_coo_tensor(edge_index.flip(0), x.new_ones(edge_index.size(1)), (len(x), len(x)))\n"
        "h = self.c(self.a(x, edge_index), edge_index)\nreturn torch.sparse.addmm(h, adj, h)",
        "line 17: .* of a sparse matrix is no product with rows",
    ),
    "ids": (
        "h = nn.Embedding(9, 8)(x[:, 0].long())\nreturn self.c(h, edge_index)",
        "line 15: .*features are random numbers there, and no ids",
    ),
    # the features were given twice, a Data as the numbers of graphs
    "two features": (
        "x, edge_index, h",
        "return self.c(x * h.sigmoid(), edge_index)",
        "forward asks for h,",
    ),
    "two sets of edges": (
        "x, edge_index, neg_edge_index",
        "return self.c(x, neg_edge_index)",
        "forward asks for neg_edge_index, .* one set of edges: choose from it by a field of edges",
    ),
    "batch": ("x, edge_index, batch", "return self.c(x, edge_index)", "forward asks for batch"),
    "nothing": ("", "return self.c(X, EDGES)", "forward takes nothing; let it take x and"),
    # the next three were refused in words of something else, or without a line
    "global pool": (
        "batch, h = torch.zeros(x.size(0), dtype=torch.long), self.a(x, edge_index)\n"
        "pool = torch.zeros(int(batch.max()) + 1, 8).index_add(0, batch, h)\n"
        "return self.c(h + pool[batch], edge_index)",
        r"line 16: index_add makes \[1, 8\] of the rows of all 53 vertices",
    ),
    "vertices by degree": (
        "few = (torch.bincount(edge_index[1], minlength=len(x)) < 3).nonzero()[:, 0]\n"
        "h = self.a(x, edge_index)\nreturn self.c(h.index_add(0, few, h[few]), edge_index)",
        r"line 17: its calls of torch fail on parts .* as nonzero\(\) of degrees tells",
    ),
    "chance": (
        "kept = torch.bernoulli(torch.FloatTensor([0.5]))\n"
        "return self.c(self.a(x, edge_index) * kept, edge_index)",
        "line 15: bernoulli draws random numbers",
    ),
    "several values": ("return self.a(x, edge_index), x", "forward returns several values"),
    # was said to fail in the process of rank 1 alone
    "dict": ("return {'x': self.c(self.a(x, edge_index), edge_index)}", "a dict; retu"),
    "no convolution": ("return self.last(self.first(x))", "no convolution's rows reach the output"),
    "classes": ("return self.a(x, edge_index)", "rows of 8 numbers, and the graph has 3 classes"),
    "infinite": ("return self.c(self.a(x, edge_index), edge_index) / 0", "are not finite"),
}
# a whole file -> words of the refusal
NO_MODULE = {
    "nothing": ("", "has no Net"),
    "syntax": ("class Net(", "line 1"),
    "raises": ("\n1 / 0\n", "line 2: "),
    "on meta": (  # ended in a traceback
        "import torch\n"
        "class Net(torch.nn.Linear):\n"
        "    def __init__(self, in_channels, out_channels):\n"
        "        super().__init__(in_channels, out_channels, device='meta')\n"
        "    def forward(self, x, edge_index):\n"
        "        return x[:, :1] + edge_index.max()\n",
        "weight is on the device meta: it has no numbers; use the CPU",
    ),
    "a number": ("Net = 3", "Net is a int; name a torch.nn.Module"),
    "makes a number": ("def Net():\n    return 3", "Net makes a int"),
    "another width": ("def Net(width):\n    pass", "requires width, which we do not know"),
    "a script": (
        "import argparse\nargparse.ArgumentParser().exit(2)\n",
        r"line 2: .*SystemExit: 2\); the file is imported, not",
    ),
}


ONE_WAY = ("readers first", "turned", "turned ends")  # carried if the graph is undirected


@pytest.mark.parametrize("what", REFUSED)
def test_a_refusal_says_what_the_code_does(tmp_path, what):
    *given, body, words = REFUSED[what]
    with pytest.raises(SpecError, match=words) as refused:
        asked(tmp_path, body, *given, fields=GraphFields(6, 3, directed=what in ONE_WAY))
    assert what not in ONE_WAY or asked(tmp_path, body).pieces
    assert str(tmp_path / "model.py") in str(refused.value) and refused.value.exit_code == 2


def test_a_hook_of_calls_gets_what_forward_is_given_by_place(tmp_path):
    """`forward` was called by names, and the hook had none of it."""
    model = written(tmp_path, TWO)
    with (tmp_path / "model.py").open("a") as file:
        file.write(
            "def hooked(in_channels, out_channels):\n    net = Net(in_channels, out_channels)\n"
            "    net.register_forward_pre_hook(lambda _, given: (given[0].tanh(), *given[1:]))\n"
            "    return net\n"
        )
    assert read(f"{model.removesuffix('Net')}hooked", Workload(), PLAIN).pieces


def test_a_convolution_that_needs_the_width_of_a_field_says_so(tmp_path):
    """PNAConv has no attribute 'edge_encoder', it said alone."""
    fields = GraphFields(6, 3, edge={"edge_attr": ((5,), "<f4", 0)})
    body = (
        "from torch_geometric.nn import PNAConv\n"
        "conv = PNAConv(6, 3, ['mean'], ['identity'], torch.ones(3).long())\n"
        "return conv(x, edge_index, edge_attr)"
    )
    with pytest.raises(SpecError, match="that get edge_attr need edge_dim=5"):
        asked(tmp_path, body, "x, edge_index, edge_attr", fields)


def test_turned_edges_have_no_weights_of_their_own(tmp_path):
    """It said that something is not in forward's calls of torch."""
    body = (
        "source, reader = torch.stack([edge_index[1], edge_index[0]])\nh = self.first(x)\n"
        "m = edge_weight[:, None] * h[source]\n"
        "return self.last(torch.zeros_like(h).index_add(0, reader, m))"
    )
    with pytest.raises(SpecError, match="line 15: edges are turned, and numbers of edges"):
        asked(tmp_path, body, "x, edge_index, edge_weight", WEIGHTED)


def test_calls_of_batch_norms_are_counted(tmp_path):
    """Saved weights said that there had been none."""
    body = "h = self.norm(self.norm(self.a(x, edge_index)).relu())\nreturn self.c(h, edge_index)"
    pieces = asked(tmp_path, body).pieces
    assert pieces and pieces.trained({}, 3)["norm.num_batches_tracked"] == 6


def test_what_forward_detaches_is_not_trained(tmp_path):
    """Its gradients were zeros, and weight decay changed what torch leaves as it is."""
    user = asked(tmp_path, "return self.c(self.a(x, edge_index).detach() ** 2, edge_index)")
    assert user.pieces and {*user.pieces.owners} == {*user.module.c.parameters()}


def test_a_file_of_a_package_imports_from_it(tmp_path):
    """A relative import was refused, as repositories with a folder of models have it."""
    package = tmp_path / "project" / "models"
    package.mkdir(parents=True)
    for folder in (package, package.parent):
        (folder / "__init__.py").touch()
    (package.parent / "words.py").write_text("WIDTH = 8\n")
    (package / "layers.py").write_text("from torch_geometric.nn import SAGEConv as Conv\n")
    (package / "net.py").write_text(
        "import torch\nfrom .layers import Conv\nfrom ..words import WIDTH\n"
        "from torch_geometric.nn import Sequential\n"
        "def Net(in_channels, out_channels):\n"
        "    convs = (Conv(in_channels, WIDTH), Conv(WIDTH, out_channels))\n"
        "    return Sequential('x, edge_index', [(c, 'x, edge_index -> x') for c in convs])\n"
    )
    user = read(f"{package / 'net.py'}:Net", Workload(), PLAIN)
    assert user.fields["layers"] == 2
    # a run did not notice that another file had changed, nor did a later plan of the same process
    (package.parent / "words.py").write_text("WIDTH = 9  # more\n")
    with pytest.raises(SpecError, match=r"words\.py has changed since the plan was made"):
        read_again(Workload(module=user.description, **user.fields))
    assert read(f"{package / 'net.py'}:Net", Workload(), PLAIN).fields["hidden"] == 9


def test_a_file_is_read_after_one_with_messages_of_its_own(tmp_path):
    """PyG generates code under the name of the file, and the next file ended in a KeyError."""
    model = written(tmp_path, "return self.c(x, edge_index)")
    with (tmp_path / "model.py").open("a") as file:
        file.write("class Own(SAGEConv):\n    def message(self, x_j):\n        return x_j.cos()\n")
    for _ in range(2):
        assert read(f"{model.removesuffix('Net')}Own", Workload(), PLAIN).pieces


@pytest.mark.parametrize("what", NO_MODULE)
def test_a_file_without_a_module_is_refused_by_name(tmp_path, what):
    (tmp_path / "model.py").write_text(NO_MODULE[what][0])
    with pytest.raises(SpecError, match=NO_MODULE[what][1]) as refused:
        read(f"{tmp_path / 'model.py'}:Net", Workload(), PLAIN)
    assert str(tmp_path / "model.py") in str(refused.value) and refused.value.exit_code == 2


@pytest.mark.parametrize("model", ["model.py", "model.py:", "absent.py:M", "model.pyc:M"])
def test_a_name_that_stands_for_nothing_is_refused(model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    written(tmp_path, TWO)
    with pytest.raises(SpecError, match=r"has no|must read|cannot be read"):
        read(model, Workload(), PLAIN)


# no backend is needed: the usual one takes as long to import as torch
COMPILE = partial(torch.compile, backend="eager")


@pytest.mark.parametrize(
    "compiled",
    [torch.jit.script, partial(torch.jit.trace, example_inputs=torch.ones(4, 6)), COMPILE],
    ids=["script", "trace", "compile"],
)
def test_a_compiled_module_is_refused_in_words(compiled):
    """A scripted one ended in an AttributeError of torch's."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = compiled(nn.Linear(6, 3))
    with pytest.raises(SpecError, match="its forward is compiled, and its calls of torch cannot"):
        read(module, Workload(), PLAIN)


PART = """
def net(in_channels, out_channels):
    net = Net(in_channels, out_channels)
    net.first = HOW(nn.Linear(8, 8)MORE)
    return net
"""


def with_a_part(folder: Path, how: str, more: str = "") -> UserModule:
    """A module of which a part is compiled."""
    written(folder, "return self.c(self.first(self.a(x, edge_index)), edge_index)")
    with (folder / "model.py").open("a") as file:
        file.write(PART.replace("HOW", how).replace("MORE", more))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own
        return read(f"{folder / 'model.py'}:net", Workload(), PLAIN)


@pytest.mark.slow
def test_a_compiled_part_runs_as_it_is_written(tmp_path):
    """torch's compiler followed the calls that note calls, for half a minute, on every rank."""
    assert with_a_part(tmp_path, "torch.compile", ", backend='eager'").pieces
    assert not torch._dynamo.utils.counters["frames"]


def test_a_scripted_part_is_refused_in_words(tmp_path):
    """Its parameters were said to be a file's."""
    with pytest.raises(SpecError, match="first: its forward is compiled, and its calls of torch"):
        with_a_part(tmp_path, "torch.jit.script")


@pytest.mark.slow
def test_a_field_that_makes_forward_fail_is_told(tmp_path):
    """PyG's GAT and PNA take edge_attr, and fail on it if they were made without edge_dim."""
    body = "assert edge_attr is None\nreturn self.c(x, edge_index)"
    fields = GraphFields(6, 3, edge={"edge_attr": ((2,), "<f4", 2)})
    with pytest.raises(SpecError, match="gets the graph's fields as edge_attr, which it could"):
        asked(tmp_path, body, "x, edge_index, edge_attr=None", fields)


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
    assert "dropped 1 self-loop" in plan.notes and "note: made undirected: 3 -> 6" in str(plan)


# what only looks like a call of ours, or is written otherwise: run as it is written
CARRIED = {
    # was taken for a sum without alpha
    "sum with alpha": "h = self.a(x, edge_index).relu()\n"
    "return self.c(torch.add(h, self.b(h, edge_index), alpha=0.5).relu(), edge_index)",
    # our sum over edges was taken for the first three, and the proof refused them in words of
    # something else; the question of the last, about edges alone, for one about rows
    "sums over edges": """
h, (sources, readers) = torch.tanh(self.a(x, edge_index)), edge_index
h = h + torch.zeros_like(h).index_add(0, readers, h[sources], alpha=0.5)
fewer = torch.zeros_like(h[:, 1:]).index_add(0, readers, h[sources, 1:])
h = torch.tanh(h + fewer.sum(1, keepdim=True))
h = (0 * self.first.bias).repeat(h.size(0), 1).index_add(0, readers, h[sources])
n = int(edge_index.max()) + 1
return self.c(torch.zeros(n, 8).index_add(0, readers, torch.tanh(h)[sources]), edge_index)
""",
    # failed in the proof's float64; a sum with a number ended in an IndexError
    "float32 and a number": "h = self.a(x.float(), edge_index) + torch.ones(x.size(0), 8)\n"
    "return self.c(h.relu() + 1, edge_index)",
    # torch does not see these two make a tensor
    "constants": """
import numpy
scale = torch.FloatTensor([0.5, 2.0]).to(x) * torch.from_numpy(numpy.arange(8.0)).to(x)[:2]
return self.c(self.a(x, edge_index).tanh() * scale.repeat(4), edge_index)
""",
    # places of sorted edges were looked up as if they were numbers of edges
    "sorted edges": """
n, (types, order) = x.size(0), torch.sort(edge_index[1] % 2)
ends = torch.searchsorted(types, torch.arange(3))
(sources, readers), scale = edge_index[:, order], torch.bincount(edge_index[0], minlength=n) + 1.0
m = torch.tanh(self.a(x, edge_index))[sources] / scale[sources, None].to(x)
m = torch.where((torch.arange(len(order)) < ends[1])[:, None], m, m.cos())
h, order = torch.zeros(n, 8).to(x).index_add(0, readers, m), torch.argsort(edge_index[1])
degrees = torch.bincount(edge_index[1], minlength=n)
h = torch.segment_reduce(h[edge_index[0, order]], "max", lengths=degrees, initial=0.0)
return self.c(h.cos(), edge_index)
""",
    # vertices in the second dimension and rows that dropout alone makes others were refused;
    # gradients of checkpoints were lost
    "rows": """
from torch.utils.checkpoint import checkpoint
two = F.dropout(torch.stack([self.a(x, edge_index), self.first(x)]), 0.5, self.training)
h = self.b(two[0], edge_index).tanh() + two[1]
for _ in range(2):
    h = self.b(h, edge_index) + self.first(F.dropout(x, 0.5, self.training))
h = checkpoint(self.b, h, edge_index, use_reentrant=True)
h = checkpoint(lambda h: F.dropout(h, 0.5, self.training), h, use_reentrant=False)
return self.c(h, edge_index) + self.last(two.sum(0))
""",
    # "getitem makes [289, 8] of all edges, as a graph's readout does": only edges [2, E] were edges
    "ends apart": """
(row, col), own, h = edge_index, torch.arange(x.size(0)), self.first(x)
matrix = torch.sparse_coo_tensor(edge_index.flip(0), torch.ones_like(col), 2 * own.shape)
degrees = torch.sparse.sum(matrix, 1).to_dense()
for _ in range(2):
    readers, sources = torch.cat([edge_index[1], own]), torch.cat([row, own])
    h = torch.zeros_like(h).index_add(0, readers, F.dropout(h[sources], 0.5, self.training))
    sources, readers = row[degrees[col] > 2], col[degrees[col] > 2]
    h = torch.zeros_like(h).index_add(0, readers, h[sources] / degrees[sources, None])
return self.last(h)
""",
    # what follows the last batch norm was left out, and the proof refused it in words of sizes; its
    # sum in place, which training drops before, was refused for a gradient in evaluation
    "a norm at the end": """
h = F.relu(self.norm(self.b(self.a(x, edge_index).tanh(), edge_index)), inplace=True)
h = F.dropout(h, 0.5, self.training)
h += self.first(x)
return self.last(h)
""",
    # one of them was looked for in vain, and numbers "kept from an earlier call" were blamed
    "two norms of the same rows": "h = self.a(x, edge_index)\n"
    "return self.c(self.norm(h).relu() + self.norm(h), edge_index)",
    # "changes __warningregistry__.version from call to call"
    "a warning": """
import warnings
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    warnings.warn("sparse matrices are in beta")
return self.c(self.a(x, edge_index) ** 2, edge_index)
""",
}
# whose forward is no plain list of calls, and computes what our layers do
OURS = {
    "log_softmax": "return F.log_softmax(self.c(self.a(x, edge_index), edge_index), dim=1)",
    "by name": "return self.c(self.a(x=x, edge_index=edge_index).relu(), edge_index)",
    "no weights of edges": "h = h0 = self.first(x).relu()\n"
    "for conv in self.deep:\n    h = conv(h, h0, edge_index, None).relu()\nreturn self.last(h)",
    "checks and a loop over sizes": """
assert x.dim() == 2 and edge_index.dtype == torch.long and edge_index.size(0) == 2
if x.size(0) == 0:
    return x
for conv in (self.a, self.c):
    x = conv(x.relu() if x.size(1) == 8 else x, edge_index)
return x
""",
    "dropout before ReLU": "F.dropout(x, 0.2, self.training)  # which nobody reads\n"
    "x = F.dropout(self.a(x, edge_index), 0.5, self.training)\n"
    "return self.c(x.relu(), edge_index)",
}


@pytest.mark.parametrize("what", [*CARRIED, *OURS])
def test_what_is_written_otherwise_is_run_as_it_is_written_or_by_our_layers(tmp_path, what):
    user = asked(tmp_path, (CARRIED | OURS)[what])
    assert bool(user.pieces) == (what in CARRIED)
    assert user.pieces or user.fields["model"] in ("sage", "gcnii")


def test_a_model_of_pyg_is_trained_by_our_layers(tmp_path):
    (tmp_path / "model.py").write_text(
        "from torch_geometric.nn import GraphSAGE\n"
        "def Net(in_channels, out_channels):\n"
        "    return GraphSAGE(in_channels, 8, 2, out_channels)\n"
    )
    user = read(f"{tmp_path / 'model.py'}:Net", Workload(), PLAIN)
    assert user.pieces is None and user.fields["model"] == "sage"


def test_a_scripted_function_is_called_as_a_whole(tmp_path):
    """It was told to be put in a module of its own."""
    model = written(tmp_path, "return self.c(gelu(self.a(x, edge_index)), edge_index)")
    with (tmp_path / "model.py").open("a") as file:
        file.write(
            "\n@torch.jit.script\ndef gelu(x):\n    return x * 0.5 * (1.0 + torch.erf(x / 1.41))\n"
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own
        assert read(model, Workload(), PLAIN).pieces


TANH = "return self.c(self.a(x, edge_index).tanh(), edge_index)"
ANEW = """h = self.first(x)
for _ in range(2):
    h = self.b(h, edge_index) + self.first(F.dropout(x, 0.5, self.training))
return self.last(h)"""
TOLD = "line 15: forward reads any of the edges or fields, which is True on"


@pytest.mark.parametrize(
    ("asks", "end", "words"),
    [
        ("edge_index.max() >= len(x)", TANH, ""),
        pytest.param("(edge_index[1] == 0).any()", TANH, TOLD, marks=pytest.mark.nightly),
        ("not self.training and (edge_index[1] == 0).any()", ANEW, TOLD),
    ],
    ids=["alike", "otherwise", "otherwise in evaluation"],
)
def test_a_graph_must_answer_as_those_that_were_looked_at(gnnplan, tmp_path, asks, end, words):
    """A branch on edges is recorded once. One in evaluation alone was once not checked."""
    body = f"if {asks}:\n    x = x * 2\n{end}"
    done = gnnplan(PLAN, written(tmp_path, body))
    assert words in done.err and done.code == (2 if words else 0), done.err


def test_edges_tell_how_many_vertices_there_are_if_the_last_has_some(tmp_path):
    """A module whose self-loops ended before isolated vertices was trained with loops for all."""
    body = (
        "n = int(edge_index.max()) + 1\nloops = torch.arange(n).expand(2, -1)\n"
        "return self.c(torch.tanh(self.a(x, edge_index)), torch.cat([edge_index, loops], 1))"
    )
    pieces = asked(tmp_path, body).pieces
    assert pieces
    pair = np.array([1, 0], dtype=np.int32)
    pieces.structure.must_answer_alike(CsrEdges(np.array([0, 1, 2]), pair), {})
    with pytest.raises(Unfit, match=r"line 15: .* max of the edges or fields, which is 1 on this"):
        pieces.structure.must_answer_alike(CsrEdges(np.array([0, 1, 2, 2]), pair), {})


def test_a_branch_on_fields_of_vertices_is_that_of_the_whole_graph(tmp_path):
    """`if mask.any():` was refused as a branch on rows, the number of types as one in a tensor."""
    body = (
        "h = torch.zeros_like(x)\nfor k in range(int(kind.max()) + 1):\n    some = kind == k\n"
        "    if some.any():\n        h[some] = k * x[some]\nreturn self.c(self.a(h, edge_index), edge_index)"
    )
    fields = GraphFields(6, 3, vertex={"kind": ((), "<i8", 3)})
    pieces = asked(tmp_path, body, "x, edge_index, kind", fields).pieces
    assert pieces
    whole = CsrEdges(np.array([0, 1, 2, 2]), np.array([1, 0], dtype=np.int32))
    pieces.structure.must_answer_alike(whole, {"kind": np.array([0, 1, 2])})
    with pytest.raises(Unfit, match=r"line 16: forward reads max of .* is 1 .* but 2 was expected"):
        pieces.structure.must_answer_alike(whole, {"kind": np.array([0, 1, 1])})
    with pytest.raises(Unfit, match=r"line 18: forward reads any of .* which is False"):
        pieces.structure.must_answer_alike(whole, {"kind": np.array([0, 2, 2])})


def test_what_clamps_make_equal_on_small_graphs_is_the_whole_graphs(tmp_path):
    """Neighbours on other ranks weighed as if they had few edges, and a rank's largest number was
    taken for that of all: trained otherwise than by one process, silently."""
    body = """
src, dst = edge_index
degrees, h = torch.bincount(dst, minlength=len(x)), torch.tanh(self.a(x, edge_index))
weights = (1 / degrees.to(x).clamp(min=20))[src, None]
h = torch.zeros_like(h).index_add(0, dst, weights * h[src])
h = h * torch.stack([degrees, degrees], 1).clamp(min=30).max(0).values[1]
return self.c(torch.tanh(h), edge_index[:, ~(degrees > 20)[src]])
"""
    user = read(written(tmp_path, body), Workload(dtype="float64"), PLAIN)
    small, others = Small(53, user.module, PLAIN), np.arange(1, 53, dtype=np.int32)
    indptr = np.append(0, 52 + np.arange(53))  # all others read the first, which reads them
    small.whole = CsrEdges(indptr, np.concatenate([others, np.zeros_like(others)]))
    assert user.pieces
    prove(user.module, user.pieces, small)


def test_a_width_that_follows_from_the_largest_of_all_is_refused(tmp_path):
    """A rank whose vertices were all of lower types ended in a traceback."""
    fields = GraphFields(6, 3, vertex={"kind": ((), "<i8", 3)})
    body = "return self.c(self.a(x, edge_index), edge_index) + F.one_hot(kind{})"
    with pytest.raises(SpecError, match=r"line 15: one_hot gives .* as one_hot with num_classes"):
        asked(tmp_path, body.format(""), "x, edge_index, kind", fields)
    assert asked(tmp_path, body.format(", 3"), "x, edge_index, kind", fields).pieces


def test_parameters_are_known_by_the_words_of_their_names(tmp_path):
    """pygcn's nfeat, nhid and nclass were not."""
    model = written(
        tmp_path, "return self.c(self.a(feature, edge_index), edge_index)", "feature, edge_index"
    )
    file = tmp_path / "model.py"
    names = file.read_text().replace("in_channels", "nfeat").replace("out_channels", "nclass")
    file.write_text(names.replace("nclass):", "nhid, num_layers, dim_drop, nclass):"))
    user = read(model, Workload(hidden=5), PLAIN)
    made = dict(user.description.arguments)
    assert made == {"nfeat": 6, "nhid": 5, "num_layers": 3, "dim_drop": 0.0, "nclass": 3}
    file.write_text(names.replace("nfeat, nclass", "g, nfeat, nclass"))
    with pytest.raises(SpecError, match=r"requires g, .* take it in forward, as forward\(self, g"):
        read(model, Workload(), PLAIN)


DGL = """
import torch
from torch import nn
from torch.nn import functional as F
from dgl import add_self_loop, function as fn
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

class Twice(nn.Module):
    def forward(self, g, h):
        g.ndata["h"] = h
        for _ in range(2):
            g.update_all(lambda edges: {"m": edges.src["h"]}, lambda nodes: {"h": nodes.mailbox["m"].sum(1)})
        return g.ndata["h"]

class Net(nn.Module):
    def __init__(self, in_feats, out_feats):
        super().__init__()
        self.gat, self.tag = GATConv(in_feats, 4, 2, 0.3, 0.3), TAGConv(8, out_feats, 2)
        self.own = nn.ModuleList([Own(in_feats, in_feats), Own(in_feats, in_feats)])
        self.last, self.norm = nn.Linear(in_feats, out_feats), Normed(in_feats)
        self.lstm = SAGEConv(in_feats, out_feats, "lstm")
        self.mean = SAGEConv(in_feats, out_feats, "mean")
        self.twice = Twice()
    def forward(self, GIVEN):
        BODY
"""
MESSAGES = """
g.ndata["h"] = g.ndata["feat"].tanh()
g.apply_edges(lambda edges: {"e": edges.src["h"] * edges.dst["h"]})
g.update_all(fn.u_mul_e("h", "e", "m"), fn.sum("m", "h"))
return self.last(g.ndata["h"])
""".strip()


LOOPS = ["g = add_self_loop(g)", "import dgl\ng = dgl.add_self_loop(dgl.remove_self_loop(g))"]
LOOPS += ["g = g.remove_self_loop().add_self_loop()"]


@pytest.mark.parametrize(
    ("given", "body", "layers"),
    [
        ("g, x", "return self.tag(g, self.gat(g, x).flatten(1))", 3),
        ("g", MESSAGES, 1),
        ("g, *feats", "return self.mean(g, *feats)", 1),
        (
            "blocks, x",
            "for own, block in zip(self.own, blocks):\n    x = own(block, x)\nreturn self.last(x)",
            2,
        ),
        *(("g, x", f"{made}\nreturn self.mean(g, x)", 1) for made in LOOPS),
    ],
    ids=["dropout inside", "messages in forward", "as Sequential", "blocks of own layers", *LOOPS],
)
def test_dgls_kernels_are_followed(tmp_path, given, body, layers):
    """All were refused but the blocks: there were as many blocks as convolutions of DGL. A
    dgl.nn.Sequential got the graph alone."""
    assert with_dgl(tmp_path, given, body).fields["layers"] == layers


def test_a_convolution_of_dgl_that_multiplies_first_has_its_products_exchanged(tmp_path):
    """It was called as a whole, so ranks sent all features of each neighbour."""
    module = with_dgl(tmp_path, "g, x", "return 1.5 * self.mean(g, x)").description
    assert module.layers[0].counted.gathered == PLAIN.classes < PLAIN.features


@pytest.mark.parametrize(
    ("given", "body", "words"),
    [
        (
            "g, x",
            'g.ndata["h"] = x\nreturn self.last(self.norm(g))',
            r"norm\.norm normalises by moments of all rows in a part",
        ),
        ("g, x", "return self.lstm(g, x)", r"layer 1, in lstm \(SAGEConv\), .* reduce by a"),
        (
            "g, x",
            "return self.last(self.twice(g, x))",
            r"line \d+: twice \(Twice\) is called as a whole, .*\(off by [^:]*\)$",
        ),
        (
            "g, x",
            "import dgl\nwith g.local_scope():\n    g.ndata['h'] = x.tanh()\n"
            "    x = x - dgl.broadcast_nodes(g, dgl.mean_nodes(g, 'h'))\nreturn self.mean(g, x)",
            r"line \d+: SegmentReduce makes \[1, 6\] of all edges or vertices",
        ),
        (
            "g, x",
            "import dgl\nreturn self.mean(dgl.add_self_loop(g), self.mean(g, x) @ self.last.weight)",
            "also reads the graph without the self-loops that it adds; add them first",
        ),
        (
            "g",
            "h = F.dropout(torch.ones(g.num_nodes(), 6), 0.5, self.training)\n"
            "return self.last(self.own[0](g, h))",
            "forward reads no rows of vertices",
        ),
    ],
    ids=["batch norm of mailboxes", "LSTM", "two hops", "readout", "other graph", "MWE_GCN"],
)
def test_what_a_module_of_dgl_does_is_refused_by_name(tmp_path, given, body, words):
    """All but the first were refused in words of something else."""
    with pytest.raises(SpecError, match=words):
        with_dgl(tmp_path, given, body)


def test_a_module_of_dgl_may_return_a_list_of_its_rows(tmp_path):
    """It seemed to fail without self-loops, so its graph got some."""
    pieces = with_dgl(tmp_path, "g, x", "return [1.5 * self.mean(g, x)]").pieces
    assert pieces and not pieces.loops


def with_dgl(folder: Path, given: str, body: str) -> UserModule:
    """A module of DGL; the graph has self-loops, for its layers divide by degrees."""
    quiet("dgl")
    (folder / "model.py").write_text(with_body(DGL, body, given))
    return read(f"{folder / 'model.py'}:Net", Workload(), PLAIN)
