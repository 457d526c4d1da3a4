"""Users' modules as files and as live objects: what is read, made, decided, and trained on ranks."""

import linecache
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo_table as table
from test_module_cases import written
from torch import nn
from written import quiet

from gnnplan.executor.modules.bind import GraphFields
from gnnplan.executor.modules.read import read, read_again, with_module, with_user_model
from gnnplan.planner.gnn.workload import Workload
from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.testing.ranks import Case

WIDTHS = FEATURES, CLASSES = table.FEATURES, table.CLASSES
GRAPH = GraphFields(*WIDTHS)


SAGE = "return self.c(F.dropout(self.a(x, edge_index).relu(), 0.25, self.training), edge_index)"
MESSAGES = """
from torch_geometric.nn import MessagePassing
class Twice(MessagePassing):
    def __init__(self, h_in, h_out):
        super().__init__(aggr="max")
        self.lin = nn.Linear(h_in, h_out)
    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=self.lin(x))
    def message(self, x_i, x_j):
        return 2 * x_j - x_i
"""
OTHER = (
    "return self.c(F.dropout(F.elu(self.twice(x, edge_index)), 0.25, self.training), edge_index)"
)


@pytest.fixture(scope="module", autouse=True)
def libraries():
    quiet("torch_geometric")


@pytest.fixture
def file(tmp_path):
    """Of GraphSAGE, which our own layers train."""
    return Path(written(tmp_path, SAGE).removesuffix(":Net"))


def live(folder: Path, body: str = SAGE, **how: str) -> Any:
    """The class Net, which no file has, as a notebook's cell makes it."""
    cell: dict[str, Any] = {"__name__": "__main__"}
    file = Path(written(folder, body, **how).removesuffix(":Net"))
    exec(compile(file.read_text(), str(file), "exec"), cell)
    linecache.getlines(str(file))
    file.unlink()
    return cell["Net"]


@pytest.mark.processes
@pytest.mark.timeout(90)
@pytest.mark.parametrize("by_ours", [True, False])
def test_two_ranks_train_a_live_module(by_ours, tmp_path, graphs, run_ranks):
    """From its parameters, of an earlier training, as torch does; and it is left as it was."""
    other = {"body": OTHER, "made": "self.twice = Twice(in_channels, 8)", "after": MESSAGES}
    module = live(tmp_path, **({} if by_ours else other))(*WIDTHS).eval()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.01)
    before = {key: value.clone() for key, value in module.state_dict().items()}
    assert bool(table.module_of(module, Workload()).pieces) != by_ours
    keeper = table.Keeper(graphs["rough"], tmp_path, run_ranks)
    outcome = keeper.outcomes(module, ["graph_parallel"])["graph_parallel"]
    assert outcome.answer == "equal" and not module.training, outcome
    torch.testing.assert_close(module.state_dict(), before, rtol=0, atol=0)


def test_a_module_that_a_file_makes_itself_is_the_same_in_every_rank(file):
    """Its parameters are random numbers from the time at which the file is executed. Those of numpy
    were other ones in each process."""
    text = f"{file.read_text()}\nmade = Net({FEATURES}, {CLASSES})\n"
    file.write_text(f"{text}import numpy\nmade.a.lin_l.bias.data += float(numpy.random.rand())\n")
    first, second = (read(f"{file}:made", Workload(seed=3), GRAPH).module for _ in range(2))
    torch.testing.assert_close(first.state_dict(), second.state_dict(), rtol=0, atol=0)


def test_a_live_class_is_made_with_the_graphs_widths_from_the_seed(file, tmp_path):
    workload = Workload(seed=7)
    by_file = read(f"{file}:Net", workload, GRAPH)
    by_class = read(live(tmp_path), workload, GRAPH, tmp_path)
    torch.testing.assert_close(by_class.module.state_dict(), by_file.module.state_dict())
    assert by_class.fields == by_file.fields
    with pytest.raises(
        SpecError, match=r"^Net: line \d+: forward fails on a small graph of 12 features"
    ):
        read(live(tmp_path)(9, CLASSES), workload, GRAPH, tmp_path)
    with pytest.raises(SpecError, match=r"^M requires width, which we do not know"):

        def M(width: int) -> nn.Module:
            raise AssertionError

        read(M, workload, GRAPH, tmp_path)


def test_a_live_modules_file_that_is_gone_or_damaged_is_refused(tmp_path):
    user = read(live(tmp_path)(*WIDTHS), Workload(), GRAPH, tmp_path)
    workload = with_module(Workload(), user, ())
    file = Path(user.description.file)
    assert file.parent == tmp_path and user.description.sha256.startswith(
        file.stem.partition("-")[2]
    )
    file.write_bytes(file.read_bytes()[:-8] + bytes(8))
    with pytest.raises(SpecError, match="has changed since the plan was made"):
        read_again(workload)
    file.unlink()
    with pytest.raises(SpecError, match=r"cannot be read .No such file or directory.; plan again"):
        read_again(workload)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "directed", "is_cut"),
    [("zoo OurSGC", False, False), ("zoo OurSGC", True, True), ("zoo_dgl OurGCN", True, False)],
)
def test_on_a_directed_graph_in_degrees_are_not_out_degrees(name, directed, is_cut):
    """PyG's norm takes in-degrees of both ends, our layers and DGL's the out-degree of the source."""
    assert bool(table.module_of(name, Workload(), directed).pieces) == is_cut


def test_a_default_that_a_module_is_made_with_is_said(file, graphs):
    """A class that requires hidden_channels got 256 without a word."""
    head = "in_channels, hidden_channels, out_channels):"
    text = (
        file.read_text()
        .replace("8", "hidden_channels")
        .replace("in_channels, out_channels):", head)
    )
    file.write_text(text)
    problem = Case("graph_parallel", graphs["rough"], {}).problem(2)
    wide, notes = with_user_model(problem, f"{file}:Net")
    assert notes == [
        "Net is made with hidden_channels=256, the default, since it requires one and none was"
        " given; --set hidden=.. gives another"
    ]
    assert wide.workload.hidden == 256
    given = replace(problem, workload=problem.workload.model_copy(update={"hidden": 24}))
    narrow, notes = with_user_model(given, f"{file}:Net", ["hidden"])
    assert (narrow.workload.hidden, notes) == (24, [])
    # --heads, which no parameter takes, did nothing either
    file.write_text(text.replace(head, "in_channels, out_channels, hidden_channels=16):"))
    wide = with_user_model(replace(given, workload=Workload(heads=8)), f"{file}:Net", ["heads"])
    assert [note.split(":")[0] for note in wide[1]] == ["--heads has no effect"]


def test_what_the_module_decides_cannot_be_set_otherwise(file):
    user = read(f"{file}:Net", Workload(hidden=8), GRAPH)
    workload = with_module(Workload(hidden=8), user, ["hidden"])
    with pytest.raises(SpecError, match=r"decides hidden .hidden: 64, the module's: 8.; leave"):
        with_module(Workload(hidden=64), user, ["hidden"])
    assert (workload.model, workload.layers, workload.dropout) == ("sage", 2, 0.25)
    assert workload.module
    assert [layer.drops for layer in workload.module.layers] == [False, True]
    with pytest.raises(SpecError, match="decides layers"):
        Workload(**{**workload.model_dump(), "layers": 3})


@pytest.mark.slow
def test_a_workload_file_names_a_module_that_stands_beside_it(
    tmp_path, graphs, monkeypatch, gnnplan
):
    """It plans as --model does, from any folder; what the file sets the module must have."""
    folder, elsewhere = tmp_path / "conf", tmp_path / "elsewhere"
    folder.mkdir()
    elsewhere.mkdir()
    written(folder, SAGE)
    (folder / "workload.yaml").write_text("model: model.py:Net\nhidden: 8\nlr: 0.5\n")
    monkeypatch.chdir(elsewhere)
    common = "plan --json --mode full --ranks 2 --set gpus_per_server=2 --graph", graphs["rough"]
    by_file = gnnplan(*common, "--workload ../conf/workload.yaml").document
    by_option = gnnplan(*common, "--model ../conf/model.py:Net --set lr=0.5").document
    assert by_file["workload"] == by_option["workload"]
    assert by_file["workload"]["module"]["file"] == str(folder / "model.py")
    kept = gnnplan(*common, "--workload ../conf/workload.yaml --model gcn").document
    assert (kept["workload"]["model"], kept["workload"]["module"]) == ("gcn", None)


READS = """
import sys
from gnnplan.executor.modules.bind import GraphFields
from gnnplan.executor.modules.read import read
from gnnplan.planner.gnn.workload import Workload
read(sys.argv[1], Workload(), GraphFields(8, 4))
assert "torch._inductor" not in sys.modules
"""


def test_a_module_is_read_without_torchs_compiler(tmp_path, fork_server):
    """It was imported to say from which line a node is: every rank started a second later."""
    quiet("dgl")
    (tmp_path / "program.py").write_text(READS)
    words = [str(tmp_path / "program.py"), f"{table.HERE / 'zoo_dgl.py'}:OurGCN"]
    (ended,) = fork_server.run([(words, {"DGLBACKEND": "pytorch"})], tmp_path)
    assert ended.code == 0, ended.stderr


@pytest.mark.parametrize(("picks", "repeats"), [("self.places", True), ("self.mask", False)])
def test_a_module_whose_layers_wait_for_the_host_is_no_cuda_graph(tmp_path, picks, repeats):
    """To read where a mask is true a GPU's host waits, which a CUDA graph cannot; a place it need
    not know. Dropout waits for nothing. And a NaN in the file, which differs from itself, had kept
    the module from training as if its calls changed it."""
    kept = "torch.arange(8) % 2 == 0", "torch.arange(0, 8, 2)"
    made = "self.second, self.limit = SAGEConv(4, out_channels), UNKNOWN[0]; "
    made += "self.register_buffer('mask', {}); self.register_buffer('places', {})".format(*kept)
    body = f"h = F.dropout(F.silu(self.a(x, edge_index)), 0.5, self.training)[:, {picks}]\n"
    model = written(
        tmp_path,
        f"{body}return self.second(h, edge_index)",
        made=made,
        after="UNKNOWN = [float('nan')]",
    )
    workload = with_module(Workload(), read(model, Workload(), GRAPH), ())
    assert workload.is_cut and workload.repeats == repeats
