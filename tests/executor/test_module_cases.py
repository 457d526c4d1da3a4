"""Modules that people have brought, and what became of them before they were run as written."""

import re
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from nightly import every
from torch import nn
from written import quiet

import gnnplan as package
from gnnplan.executor.modules.bind import GraphFields, Small
from gnnplan.executor.modules.prove import prove
from gnnplan.executor.modules.read import UserModule, optional, read, read_again, with_user_model
from gnnplan.executor.modules.record import Unfit
from gnnplan.planner.gnn.workload import Workload
from gnnplan.planner.graph.graph import CsrEdges
from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.testing.ranks import Case

GRAPH = "synthetic:community?vertices=60&edges=240&features=6&classes=3"
PLAIN = GraphFields(6, 3)
# sizes of a row, numpy's type, how many whole numbers there are
ON_EDGES = {"edge_weight": ((), "<f4", 0), "edge_attr": ((5,), "<f4", 0)}
ON_VERTICES = {"pos": ((3,), "<f4", 2), "kind": ((), "<i8", 3)}
HEAD = """
import torch
from torch import nn
from torch.nn import functional as F
from torch_geometric.nn import APPNP, ChebConv, GATConv, GCN2Conv, GCNConv, PNAConv, SAGEConv, TAGConv, TransformerConv

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


def written(
    folder: Path,
    body: str,
    given: str = "x, edge_index",
    made: str = "",
    after: str = "",
    **numbers: float,
) -> str:
    """made: more parts of the module; after: what follows it in the file."""
    numbers = {"ALPHA": 0.1, "THETA": 0.5} | numbers
    source = with_body(HEAD, body.strip(), given).replace("__()", f"__(); {made}") + after
    for name, value in numbers.items():
        source = source.replace(name, str(value))
    (folder / "model.py").write_text(source)
    return f"{folder / 'model.py'}:Net"


def graph_with(*names: str, directed: bool = False) -> GraphFields:
    """A graph that has these fields."""
    edge, vertex = ({n: of[n] for n in names if n in of} for of in (ON_EDGES, ON_VERTICES))
    return GraphFields(6, 3, directed, vertex=vertex, edge=edge)


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
    """`data.pos` was trained as `data.x`."""
    body = "return self.c(self.b(F.pad(data.pos, (0, 5)), data.edge_index), data.edge_index)"
    user = asked(tmp_path, body, "data", graph_with("pos"))
    assert user.pieces and user.pieces.inputs == (("pos", 3),)


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


def test_lazy_parameters_of_a_plan_in_float64_are_made_again(tmp_path):
    """Ranks made them from rows in float32, with parameters in float64, and ended. A lazy norm's
    buffers could not be copied."""
    body = "return self.c(self.b2(self.b1(x, edge_index)).relu(), edge_index)"
    lazy = "self.b1, self.b2 = SAGEConv(-1, 8), nn.LazyBatchNorm1d()"
    user = read(written(tmp_path, body, made=lazy), Workload(dtype="float64"), PLAIN)
    workload = Workload(dtype="float64", module=user.description, **user.fields)
    assert user.pieces is None and read_again(workload)


def test_fields_of_edges_may_pass_a_layer_that_does_not_learn(tmp_path):
    """In float32 it was refused: the proof in float64 took its weights as they were."""
    body = (
        "w, h = self.kept(edge_attr), self.a(x, edge_index).tanh()\n"
        "h = torch.zeros_like(h).index_add(0, edge_index[1], w * h[edge_index[0]])\n"
        "return self.c(h, edge_index)"
    )
    kept = "self.kept = nn.Linear(5, 1).requires_grad_(False)"
    model = written(tmp_path, body, "x, edge_index, edge_attr", kept)
    assert read(model, Workload(), graph_with("edge_attr")).pieces


@pytest.mark.parametrize(
    ("branch", "calls"),
    [
        ("h = h.tanh() if len(x) > 1600 else h.relu()", "tanh on 2,000 vertices, and relu"),
        ("h = h * (0.5 if edge_index.size(1) > 9000 else 2.0)", r"mul\(0.5\) .*, and mul\(2\)"),
    ],
)
def test_a_branch_on_the_size_of_the_graph_is_refused_where_it_is_taken(tmp_path, branch, calls):
    """It was recorded as graphs of 1,201 vertices and fewer take it."""
    lines = ["h = self.a(x, edge_index)", branch, "return self.c(h, edge_index)"]
    model = written(tmp_path, "\n".join(lines))
    small, large = (
        Case("graph_parallel", GRAPH.replace("=60&edges=240", sizes)).problem(2)
        for sizes in ("=60&edges=240", "=2000&edges=10000")
    )
    assert with_user_model(small, model)[0].workload.is_module
    with pytest.raises(SpecError, match=f"Net: line 16: forward calls {calls}"):
        with_user_model(large, model)


def table_of(text: str, *names: str) -> Any:
    """A row is a case, whose name comes first; ;; stands between lines of code."""
    rows = [row.replace(" ;; ", "\n").split("|") for row in text.strip().splitlines()]
    cases = [[cell.strip() for cell in cells] for cells in rows]
    return pytest.mark.parametrize(names, [pytest.param(*of, id=name) for name, *of in cases])


# what forward is given | fields of the graph | words of the refusal | forward, ;; between its lines;
# test_mutations.py has refusals of what is computed
REFUSED = r"""
    a mask | data | | no attribute 'train_mask'.*; data has edge_index, x: .* a row of each vertex, without mask | return self.a(data.x, data.edge_index)[data.train_mask]
    readers first | x, edge_index | one way | line 17: scatter_add adds rows up at edge_index\[0\].* write col, row = edge_index\) | row, col = edge_index ;; h = self.first(x) ;; h = torch.zeros_like(h).scatter_add(0, row[:, None].expand(-1, 8), h[col]) ;; return self.last(h)
    turned | x, edge_index | one way | from end to start | return self.c(torch.tanh(self.a(x, edge_index)), edge_index.flip(0))
    turned ends | x, edge_index | one way | line 15: flip makes other edges, the graph's from end to start | row, col = edge_index.flip(0) ;; h = self.first(x) ;; return self.last(torch.zeros_like(h).index_add(0, row, h[col]))
    turned with weights | x, edge_index, edge_weight | edge_weight | line 15: edges are turned, and numbers of edges | source, reader = torch.stack([edge_index[1], edge_index[0]]) ;; h = self.first(x) ;; m = edge_weight[:, None] * h[source] ;; return self.last(torch.zeros_like(h).index_add(0, reader, m))
    kept for others, our own layers | x, edge_index | | its buffer norm.running_mean in training is another | h = self.a(x, edge_index) ;; if self.training: ;;     self.norm.running_mean = self.norm.running_mean + h.detach().mean(0) ;; return self.c(h.relu(), edge_index)
    rows by a place | x, edge_index | | line 15: getitem picks rows by their places \(2000\), | h = torch.cat([self.first(x[:2000]), self.first(-x[2000:])]) ;; return self.c(h, edge_index)
    edges by a place | x, edge_index | | line 15: getitem picks rows by their places \(100000\), | return self.c(self.a(x, edge_index[:, :100000]).tanh(), edge_index)
    edges of another name | x, adj | | line 15: .*adj is edge_index \[2, E\] here, whose matrix is torch.sparse_coo_tensor | return torch.spmm(adj, self.a(x, adj))
    rows of a few ends | x, edge_index | | edges lead from all vertices to all, .* as conv\(\(x, x\), edge_index\) | return self.c(self.b((self.first(x), self.first(x[:30])), edge_index), edge_index)
    two features | x, edge_index, h | | forward asks for h, | return self.c(x * h.sigmoid(), edge_index)
    two sets of edges | x, edge_index, neg_edge_index | | forward asks for neg_edge_index, .* one set of edges: choose from it by a field of edges | return self.c(x, neg_edge_index)
    two sets of edges of data | data | pos | edge_index_2hop | return self.c(self.b(F.pad(data.pos, (0, 5)), data.edge_index), data.edge_index_2hop)
    weights in a matrix | x, adj_t | edge_weight | asks for adj_t, which holds the graph's edge_weight | return self.c(self.a(x, adj_t).relu(), adj_t)
    batch | x, edge_index, batch | | forward asks for batch | return self.c(x, edge_index)
    nothing | | | forward takes nothing; let it take x and | return self.c(X, EDGES)
    a field without its width | x, edge_index, edge_attr | edge_attr | that get edge_attr need edge_dim=5 | conv = PNAConv(6, 3, ['mean'], ['identity'], torch.ones(3).long()) ;; return conv(x, edge_index, edge_attr)
    a field that fails | x, edge_index, edge_attr=None | edge_attr | gets the graph's fields as edge_attr, which it could | assert edge_attr is None ;; return self.c(x, edge_index)
"""
# words of the refusal | a whole file
NO_MODULE = r"""
    nothing | has no Net |
    syntax | line 1 | class Net(
    raises | line 2: | # a comment ;; 1 / 0
    on meta | weight is on the device meta: it has no numbers; use the CPU | import torch ;; class Net(torch.nn.Linear): ;;     def __init__(self, in_channels, out_channels): ;;         super().__init__(in_channels, out_channels, device='meta') ;;     def forward(self, x, edge_index): ;;         return x[:, :1] + edge_index.max()
    a number | Net is a int; name a torch.nn.Module | Net = 3
    makes a number | Net makes a int | def Net(): ;;     return 3
    another width | requires width, which we do not know | def Net(width): ;;     pass
    a script | line 2: .*SystemExit: 2\); the file is imported, not | import argparse ;; argparse.ArgumentParser().exit(2)
"""


@table_of(REFUSED, "given", "fields", "words", "body")
def test_a_refusal_says_what_the_code_does(tmp_path, given, fields, words, body):
    """Edges one way: what is refused of these is carried if the graph is undirected."""
    one_way = fields == "one way"
    with pytest.raises(SpecError, match=words) as refused:
        asked(tmp_path, body, given, graph_with(*fields.split(), directed=one_way))
    assert not one_way or asked(tmp_path, body).pieces
    assert str(tmp_path / "model.py") in str(refused.value) and refused.value.exit_code == 2


def test_a_matrix_of_a_graph_without_weights_is_its_edges(tmp_path):
    assert asked(tmp_path, "return self.c(self.a(x, adj_t).relu(), adj_t)", "x, adj_t")


def test_a_hook_of_calls_gets_what_forward_is_given_by_place(tmp_path):
    """`forward` was called by names, and the hook had none of it."""
    hook = "self.register_forward_pre_hook(lambda _, given: (given[0].tanh(), *given[1:]))"
    assert read(written(tmp_path, TWO, made=hook), Workload(), PLAIN).pieces


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
    own = "class Own(SAGEConv):\n    def message(self, x_j):\n        return x_j.cos()\n"
    model = written(tmp_path, "return self.c(x, edge_index)", after=own).replace(":Net", ":Own")
    for _ in range(2):
        assert read(model, Workload(), PLAIN).pieces


@table_of(NO_MODULE, "words", "source")
def test_a_file_without_a_module_is_refused_by_name(tmp_path, words, source):
    file = tmp_path / "model.py"
    file.write_text(source)
    with pytest.raises(SpecError, match=words) as refused:
        read(f"{file}:Net", Workload(), PLAIN)
    assert str(file) in str(refused.value) and refused.value.exit_code == 2


@pytest.mark.parametrize("model", ["model.py", "model.py:", "absent.py:M", "model.pyc:M"])
def test_a_name_that_stands_for_nothing_is_refused(model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    written(tmp_path, TWO)
    with pytest.raises(SpecError, match=r"has no|must read|cannot be read"):
        read(model, Workload(), PLAIN)


# no backend is needed: the usual one takes as long to import as torch
COMPILE = partial(torch.compile, backend="eager")


@pytest.mark.filterwarnings("ignore")  # torch's own
@pytest.mark.parametrize(
    "compiled",
    [
        torch.jit.script,
        partial(torch.jit.trace, example_inputs=torch.ones(4, 6)),
        COMPILE,
        lambda part: nn.Sequential(torch.jit.script(part)),
    ],
    ids=["script", "trace", "compile", "a part of a module"],
)
def test_a_compiled_module_is_refused_in_words(compiled):
    """A scripted one ended in an AttributeError of torch's. A part's parameters were said to be a
    file's."""
    with pytest.raises(SpecError, match="its forward is compiled, and its calls of torch cannot"):
        read(compiled(nn.Linear(6, 3)), Workload(), PLAIN)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's own
def test_a_compiled_part_runs_as_it_is_written(tmp_path):
    """torch's compiler followed the calls that note calls, for half a minute, on every rank."""
    part = "self.part = torch.compile(nn.Linear(8, 8), backend='eager')"
    body = "return self.c(self.part(self.a(x, edge_index)), edge_index)"
    assert read(written(tmp_path, body, made=part), Workload(), PLAIN).pieces
    assert not torch._dynamo.utils.counters["frames"]


@pytest.mark.parametrize(
    ("reads", "notes"), [("(1 if edge_weight is None else 2)", 0), ("edge_weight.sum()", 1)]
)
def test_a_field_that_forward_could_do_without_is_said_once(tmp_path, reads, notes):
    """forward(x, edge_index, edge_weight=None) got the graph's weights, and nobody was told. If it
    asks whether there are some, it computes without them."""
    body = f"return self.c((self.a(x, edge_index) * {reads}).tanh(), edge_index)"
    given = "x, edge_index, edge_weight=None"
    found = optional(asked(tmp_path, body, given, graph_with("edge_weight")))
    told = "forward of Net gets the graph's edge_weight as edge_weight, which has"
    assert [note.startswith(told) for note in found] == [True] * notes


def test_a_convolution_per_kind_of_edges_is_told_of_many_kinds(tmp_path):
    """It was refused in words of sizes."""
    body = "h = self.a(x, edge_index)\nfor kind in range(90):\n    some = edge_index[:, edge_type == kind]\n"
    body += "    h = h + torch.ones(some.size(1) + 1).to(x).sum()\nreturn self.c(h, edge_index)"
    fields = GraphFields(6, 3, edge={"edge_type": ((), "<i8", 90)})
    with pytest.raises(SpecError, match=r"edge_type has 90 kinds, and .* as FastRGCNConv does$"):
        asked(tmp_path, body, "x, edge_index, edge_type", fields)


# by our layers, or as it is written, and a forward that is no plain list of calls; the first three were
# taken for a sum without alpha, a ReLU and nothing; the fourth would be a chain without its last call
GUESSED = r"""
    sum with alpha | as written | h = self.a(x, edge_index).relu() ;; return self.c(torch.add(h, self.b(h, edge_index), alpha=0.5).relu(), edge_index)
    a clamp that small graphs do not show | as written | return self.c(F.hardtanh(self.a(x, edge_index), 0, 99), edge_index)
    a mask that small graphs do not show | as written | h = self.a(x, edge_index).relu() ;; many = torch.bincount(edge_index[1], minlength=len(x)) > 99 ;; return self.c(torch.where(many[:, None], -h, h), edge_index)
    a ReLU at the end | as written | return self.c(self.a(x, edge_index).relu(), edge_index).relu()
    log_softmax | sage | return F.log_softmax(self.c(self.a(x, edge_index), edge_index), dim=1)
    by name | sage | return self.c(self.a(x=x, edge_index=edge_index).relu(), edge_index)
    no weights of edges | gcnii | h = h0 = self.first(x).relu() ;; for conv in self.deep: ;;     h = conv(h, h0, edge_index, None).relu() ;; return self.last(h)
    checks and a loop over sizes | sage | assert x.dim() == 2 and edge_index.dtype == torch.long and edge_index.size(0) == 2 ;; if x.size(0) == 0: ;;     return x ;; for conv in (self.a, self.c): ;;     x = conv(x.relu() if x.size(1) == 8 else x, edge_index) ;; return x
    dropout before ReLU | sage | F.dropout(x, 0.2, self.training)  # which nobody reads ;; x = F.dropout(self.a(x, edge_index), 0.5, self.training) ;; return self.c(x.relu(), edge_index)
"""


@table_of(GUESSED, "kind", "body")
def test_what_is_written_otherwise_is_run_as_it_is_written_or_by_our_layers(tmp_path, kind, body):
    user = asked(tmp_path, body)
    assert ("as written" if user.pieces else user.fields["model"]) == kind


@pytest.mark.parametrize("numbers", every(2, [{"THETA": 0.0}, {"ALPHA": 1.5}]), ids=str)
def test_numbers_that_our_layers_lack_are_the_modules_own(tmp_path, numbers):
    """They ended in a traceback of the workload's rules."""
    body = "h = x0 = self.first(x).relu()\nfor conv in self.deep:\n    h = conv(h, x0, edge_index).relu()\n"
    user = asked(tmp_path, f"{body}return self.last(h)", **numbers)
    assert user.pieces and user.fields["layers"] == 2


def test_a_model_of_pyg_is_trained_by_our_layers(tmp_path):
    (tmp_path / "model.py").write_text(
        "from torch_geometric.nn import GraphSAGE\n"
        "def Net(in_channels, out_channels):\n"
        "    return GraphSAGE(in_channels, 8, 2, out_channels)\n"
    )
    user = read(f"{tmp_path / 'model.py'}:Net", Workload(), PLAIN)
    assert user.pieces is None and user.fields["model"] == "sage"


@pytest.mark.filterwarnings("ignore")  # torch's own
def test_a_scripted_function_is_called_as_a_whole(tmp_path):
    """It was told to be put in a module of its own."""
    gelu = "\n@torch.jit.script\ndef gelu(x):\n    return x * 0.5 * (1.0 + torch.erf(x / 1.41))\n"
    body = "return self.c(gelu(self.a(x, edge_index)), edge_index)"
    assert read(written(tmp_path, body, after=gelu), Workload(), PLAIN).pieces


TANH = "return self.c(self.a(x, edge_index).tanh(), edge_index)"
ANEW = """h = self.first(x)
for _ in range(2):
    h = self.b(h, edge_index) + self.first(F.dropout(x, 0.5, self.training))
return self.last(h)"""
TOLD = (
    r"line 16: .* mul\(2\) on 60 vertices, and (linear|getitem).* \(bool of line 15 is True there,"
    " and False"
)


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
    assert re.search(words, done.err) and done.code == (2 if words else 0), done.err


# what is told of a ring, on which Python does otherwise than on small graphs | forward's first lines
BRANCHES = r"""
    numel | mul\(3\) on 60 .* mul\(2\) on .* \(numel of line 16 is 60 there, and 52 here | x = 2 * x if contains_isolated_nodes(edge_index, len(x)) else 3 * x
    bool | mul\(3\) on 60 .* mul\(2\) on .* \(bool of line 16 is False there, and True here | x = 2 * x if (degree(edge_index[1], len(x)) == 0).any() else 3 * x
    equal | equal of line 16 is True there, and False here | x = 2 * x if torch.equal(edge_index[0].unique(), torch.arange(len(x))) else 3 * x
    other rows | of other rows \(numel of line 17 is 60 | a, b = 2 * x, 3 * x ;; x = a if contains_isolated_nodes(edge_index, len(x)) else b
    print | | _ = None if (degree(edge_index[1], len(x)) == 0).any() else print("all have edges")
"""


@table_of(BRANCHES, "told", "does")
def test_a_branch_on_the_graph_is_taken_as_on_the_graph(tmp_path, told, does):
    """A branch on how many vertices have edges was taken as on small graphs, of which one has none:
    trained as something else, silently. What is the same on both branches was refused."""
    vertices = np.arange(60)
    imports = "from torch_geometric.utils import contains_isolated_nodes, degree"
    model = written(tmp_path, f"{imports}\n{does}\n{TANH}")

    def plan(ring: np.ndarray) -> object:
        ends = ring, np.roll(ring, 1)
        of_graph = {"x": np.ones((60, 6), np.float32), "y": vertices % 3}
        edges = np.hstack([np.stack(ends), np.stack(ends[::-1])])
        np.savez(file := str(tmp_path / "ring.npz"), edge_index=edges, **of_graph)
        return package.plan(file, model=model, ranks=2, overrides=["gpus_per_server=2"])

    with pytest.raises(SpecError, match=told) if told else nullcontext():
        plan(vertices)
    plan(vertices[:-1])


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
    pieces = asked(tmp_path, body, "x, edge_index, kind", graph_with("kind")).pieces
    assert pieces
    whole = CsrEdges(np.array([0, 1, 2, 2]), np.array([1, 0], dtype=np.int32))
    pieces.structure.must_answer_alike(whole, {"kind": np.array([0, 1, 2])})
    with pytest.raises(Unfit, match=r"line 16: forward reads max of .* is 1 .* but 2 was expected"):
        pieces.structure.must_answer_alike(whole, {"kind": np.array([0, 1, 1])})
    with pytest.raises(Unfit, match=r"line 18: forward reads any of .* which is False"):
        pieces.structure.must_answer_alike(whole, {"kind": np.array([0, 2, 2])})


def test_parameters_are_known_by_the_words_of_their_names(tmp_path):
    """pygcn's nfeat, nhid and nclass were not."""
    model = written(
        tmp_path, "return self.c(self.a(feature, edge_index), edge_index)", "feature, edge_index"
    )
    file = tmp_path / "model.py"
    names = file.read_text().replace("in_channels", "nfeat").replace("out_channels", "nclass")
    file.write_text(names.replace("nclass):", "nhid, num_layers, dim_drop, nclass):"))
    made = dict(read(model, Workload(hidden=5), PLAIN).description.arguments)
    assert made == {"nfeat": 6, "nhid": 5, "num_layers": 3, "dim_drop": 0.0, "nclass": 3}
    file.write_text(names.replace("nfeat, nclass", "g, nfeat, nclass"))
    with pytest.raises(SpecError, match=r"requires g, .* take it in forward, as forward\(self, g"):
        read(model, Workload(), PLAIN)


OTHERS = np.arange(1, 97, dtype=np.int32)  # all read the first, which reads them
STAR = CsrEdges(np.append(0, 96 + np.arange(97)), np.append(OTHERS, np.zeros_like(OTHERS)))


def must_be_proved_on_a_star(model: str) -> None:
    user = read(model, Workload(dtype="float64"), PLAIN)
    small = Small(97, user.module, PLAIN)
    small.whole = STAR
    assert user.pieces
    prove(user.module, user.pieces, small)


def test_what_clamps_make_equal_on_small_graphs_is_the_whole_graphs(tmp_path):
    """Neighbours on other ranks weighed as if they had few edges, a rank's largest number was taken
    for that of all, its positions for ids, and edges that a mask leaves out for edges: trained
    otherwise than by one process, silently. Learned numbers of degrees were refused."""
    body = """
src, dst = edge_index
degrees, h = torch.bincount(dst, minlength=len(x)), torch.tanh(self.a(x, edge_index))
weights = (1 / degrees.to(x).clamp(min=20))[src, None]
h = torch.zeros_like(h).index_add(0, dst, weights * h[src])
h = h * torch.stack([degrees, degrees], 1).clamp(min=30).max(0).values[1]
h = torch.where((torch.arange(len(x)) < 90)[:, None], h, h.cos())
some = (degrees < 30)[src]
h = h + torch.zeros_like(h).index_add(0, dst[some], h[src[some]])
chosen = edge_index[:, some]
ones = torch.ones(chosen.size(1)).to(x)
h = h + torch.sparse_coo_tensor(chosen.flip(0), ones, (len(x), len(x))) @ h
learned = F.embedding(degrees.clamp(max=7), self.first.weight)[src, :1] * (src < 80)[:, None]
h = h + torch.zeros_like(h).index_add(0, dst, learned * h[src])
return self.c(torch.tanh(h), edge_index[:, ~(degrees > 20)[src]])
"""
    must_be_proved_on_a_star(written(tmp_path, body))


def test_edges_that_a_mask_leaves_out_on_larger_graphs_alone_are_known_or_refused(tmp_path):
    """A rank crashed in its first step: it counted all edges where the module counts the chosen."""
    chosen = "edge_index[:, {}]\nreturn self.c(self.a(x, edge_index).tanh(), chosen)"
    by_degree = "few = torch.bincount(edge_index[1], minlength=len(x)) < 50\nchosen = "
    asked(tmp_path, by_degree + chosen.format("few[edge_index[0]]"))
    must_be_proved_on_a_star(f"{tmp_path / 'model.py'}:Net")
    by_weight, given = "chosen = " + chosen.format("edge_weight < 99"), "x, edge_index, edge_weight"
    pieces = asked(tmp_path, by_weight, given, graph_with("edge_weight")).pieces
    assert pieces
    weights = np.ones(len(STAR.indices), dtype=np.float32)
    pieces.structure.must_answer_alike(replace(STAR, fields={"edge_weight": weights}), {})
    weights[7] = 100
    with pytest.raises(Unfit, match="line 15: forward leaves out edges of this graph, and of the"):
        pieces.structure.must_answer_alike(replace(STAR, fields={"edge_weight": weights}), {})


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
# what forward is given | its layers, or words of the refusal | forward
OF_DGL = r"""
    dropout and hops inside | g, x | 3 | return self.tag(g, self.gat(g, x).flatten(1))
    messages in forward | g | 1 | g.ndata["h"] = g.ndata["feat"].tanh() ;; g.apply_edges(lambda edges: {"e": edges.src["h"] * edges.dst["h"]}) ;; g.update_all(fn.u_mul_e("h", "e", "m"), fn.sum("m", "h")) ;; return self.last(g.ndata["h"])
    as Sequential | g, *feats | 1 | return self.mean(g, *feats)
    blocks of own layers | blocks, x | 2 | for own, block in zip(self.own, blocks): ;;     x = own(block, x) ;; return self.last(x)
    loops by a function | g, x | 1 | g = add_self_loop(g) ;; return self.mean(g, x)
    loops by DGL's name | g, x | 1 | import dgl ;; g = dgl.add_self_loop(dgl.remove_self_loop(g)) ;; return self.mean(g, x)
    loops by a method | g, x | 1 | g = g.remove_self_loop().add_self_loop() ;; return self.mean(g, x)
    batch norm of mailboxes | g, x | norm\.norm normalises by moments of all rows in a part .* see all of \w+; | g.ndata["h"] = x ;; return self.last(self.norm(g))
    LSTM | g, x | layer 1, in lstm \(SAGEConv\), .* reduce by a | return self.lstm(g, x)
    two hops | g, x | line \d+: twice \(Twice\) is called as a whole, .*\(off by [^:]*\)$ | return self.last(self.twice(g, x))
    readout | g, x | line \d+: SegmentReduce makes \[1, 6\] of all edges or vertices | import dgl ;; with g.local_scope(): ;;     g.ndata['h'] = x.tanh() ;;     x = x - dgl.broadcast_nodes(g, dgl.mean_nodes(g, 'h')) ;; return self.mean(g, x)
    turned edges | g, x | 1 | rows = F.relu(self.mean(g.reverse(), x)) @ self.last.weight ;; return self.last(rows) + self.mean(g, x)
    turned edges with fields | g, x | line \d+: edges are turned, and numbers of edges | import dgl ;; return self.mean(dgl.reverse(g, copy_edata=True), x)
    two-hop graph | g, x | line \d+: forward makes a graph of its own, as to_bidirected | import dgl ;; return self.mean(dgl.khop_graph(g, 2), x)
    edges both ways | g, x | line \d+: forward makes a graph of its own, as to_bidirected | import dgl ;; return self.mean(dgl.to_bidirected(g), x)
    other graph | g, x | also reads the graph without the self-loops that it adds; add them first | import dgl ;; return self.mean(dgl.add_self_loop(g), self.mean(g, x) @ self.last.weight)
    MWE_GCN | g | forward reads no rows of vertices | h = F.dropout(torch.ones(g.num_nodes(), 6), 0.5, self.training) ;; return self.last(self.own[0](g, h))
"""


@table_of(OF_DGL, "given", "told", "body")
def test_dgls_kernels_are_followed_or_refused_by_name(tmp_path, given, told, body):
    """There were once as many blocks as convolutions of DGL, and all else was refused in words of
    something else."""
    if told.isdigit():
        assert with_dgl(tmp_path, given, body).fields["layers"] == int(told)
        return
    with pytest.raises(SpecError, match=told):
        with_dgl(tmp_path, given, body)


def test_a_convolution_of_dgl_that_multiplies_first_has_its_products_exchanged(tmp_path):
    """It was called as a whole, so ranks sent all features of each neighbour."""
    module = with_dgl(tmp_path, "g, x", "return 1.5 * self.mean(g, x)").description
    assert module.layers[0].counted.gathered == PLAIN.classes < PLAIN.features


def test_a_module_of_dgl_may_return_a_list_of_its_rows(tmp_path):
    """It seemed to fail without self-loops, so its graph got some."""
    pieces = with_dgl(tmp_path, "g, x", "return [1.5 * self.mean(g, x)]").pieces
    assert pieces and not pieces.loops


def with_dgl(folder: Path, given: str, body: str) -> UserModule:
    """A module of DGL; the graph has self-loops, for its layers divide by degrees."""
    quiet("dgl")
    (folder / "model.py").write_text(with_body(DGL, body, given))
    return read(f"{folder / 'model.py'}:Net", Workload(), PLAIN)
