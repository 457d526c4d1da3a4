"""Users' modules as files and as live objects: what is read, made, decided, and trained on ranks; and
what they read of a graph's fields. Then a zoo of users' modules of PyG and DGL: each is carried, and
equals itself.

Nothing of the zoo is compared with us alone. The proof of a module is held against a graph that it
has not seen, and a training on two ranks against torch's own of the module itself (zoo_table.py)."""

import importlib
import linecache
import pickle
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zoo_table as table
from nightly import at_night, every
from test_module_cases import written
from torch import nn
from written import quiet
from zoo_table import HERE

import gnnplan
from gnnplan.api.arguments import ask
from gnnplan.executor.minibatch.sampler import Sampler
from gnnplan.executor.minibatch.share_queue import ShareQueue
from gnnplan.executor.modules.bind import GraphFields, Small, bound
from gnnplan.executor.modules.prove import prove
from gnnplan.executor.modules.read import read, read_again, with_module, with_user_model
from gnnplan.executor.modules.record import installed_in, is_the_users
from gnnplan.executor.ranks.rank import Rank
from gnnplan.planner import strategies as planner
from gnnplan.planner.gnn.workload import Workload
from gnnplan.planner.strategies import parse
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


def test_libraries_that_lie_in_any_folder_are_no_files_of_the_users(file, tmp_path, monkeypatch):
    """`pip install --target site` put pydantic there; it was taken for the user's, and an object in it
    raises when it is asked for an attribute. So may one in the user's own file."""
    (tmp_path / "site" / "lib-1.dist-info").mkdir(parents=True)
    recorded = "lib/__init__.py,sha256=4AbN,9\nalone.py,,\n../../bin/lib,,\n"
    (tmp_path / "site" / "lib-1.dist-info" / "RECORD").write_text(recorded)
    found = installed_in([str(tmp_path / "site"), str(tmp_path / "absent"), ""])
    monkeypatch.setattr("gnnplan.executor.modules.record.LIBRARIES", found)
    files = ["lib/__init__.py", "lib/deep/in.py", "alone.py", "library.py", "alone/not.py"]
    users = [is_the_users(str(tmp_path / "site" / name)) for name in files]
    assert users == [False, False, False, True, True]
    file.write_text(f"""{file.read_text()}
class Mute:
    __slots__ = ()
    def __getattr__(self, name):
        raise RuntimeError(name)
kept = Mute(), [Mute()]
""")
    assert read(f"{file}:Net", Workload(), GRAPH).module


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


N = 40
WEIGHTED = {
    "given": "x, edge_index, edge_weight, pos",
    "made": "self.one, self.two = GCNConv(in_channels + 2, 8), GCNConv(8, out_channels)",
    "body": "h = self.one(torch.cat([x, pos], 1), edge_index, edge_weight).relu()\n"
    "return self.two(h, edge_index, edge_weight)",
}
KINDS = {
    "given": "x, edge_index, kind",
    "made": "self.of, self.one = nn.Embedding(6, 4), GCNConv(in_channels + 4, out_channels)",
    "body": "return self.one(torch.cat([x, self.of(kind)], 1), edge_index)",
}
FAR = KINDS | {"body": KINDS["body"].replace("kind", "kind % 6")}


def data_of() -> Any:
    """Edges both ways, in random order; every direction has rows of its own."""
    quiet("torch_geometric")
    draw = np.random.default_rng(3)
    pairs = np.unique(draw.integers(0, N, (90, 2)), axis=0)
    pairs = pairs[pairs[:, 0] < pairs[:, 1]]
    edges = draw.permutation(np.concatenate([pairs, pairs[:, ::-1]]))
    part, count = draw.permutation(N) % 3, len(edges)
    arrays = {
        "x": draw.standard_normal((N, 5)),
        "y": draw.permutation(N) % 4,
        "pos": draw.standard_normal((N, 2)),
        "kind": draw.integers(0, 6, N),
        "edge_index": edges.T.copy(),
        "edge_weight": draw.random(count) + 0.5,
        "edge_attr": draw.standard_normal((count, 3)),
        "edge_type": draw.integers(0, 3, count),
        **{f"{name}_mask": part == i for i, name in enumerate(("train", "val", "test"))},
    }
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    return importlib.import_module("torch_geometric.data").Data(**tensors)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("fields")
    torch.save(data_of(), path / "data.pt")
    written(path, **WEIGHTED)
    return path


def test_a_batch_does_not_carry_the_whole_graph(folder):
    mini = {"dtype": "float64", "mode": "mini", "fanout": "full", "batch": 14}
    asked = Case("data_parallel", str(folder / "data.pt"), mini)
    problem, _ = with_user_model(asked.problem(2), f"{folder / 'model.py'}:Net")
    case = replace(asked, workload=problem.workload.model_dump())
    problem = case.problem(2)
    sampler = Sampler(case.settled(problem).batches(problem), 0, ["one"] * 2)
    assert not any(hasattr(part.block, "graph_edges") for part in sampler[0].share.parts)
    assert problem.graph.edge_fields["edge_weight"].tobytes() not in pickle.dumps(sampler[0])
    share, _ = ShareQueue(Rank(0, 1, torch.device("cpu"), "gloo"), sampler, 0).next(0)
    assert all(part.block.graph_edges is problem.graph.csr_edges for part in share.parts)


def test_what_is_not_read_is_said_once(folder):
    data = str(folder / "data.pt")
    unread = {
        "gcn": "gcn does not read kind, pos, edge_attr, edge_type, edge_weight of data",
        f"{folder / 'model.py'}:Net": "Net does not read kind, edge_attr, edge_type of data",
    }
    for model, note in unread.items():
        question = ask(data, "local", None, model=model)
        assert [said for said in question.notes if "does not read" in said] == [note]


def test_a_field_that_the_graph_lacks_is_named(folder, tmp_path):
    model = written(
        tmp_path, **{name: s.replace("pos", "position") for name, s in WEIGHTED.items()}
    )
    with pytest.raises(SpecError, match=r"asks for position, and the graph has x, edge_index, k"):
        gnnplan.plan(str(folder / "data.pt"), model=model, ranks=2, mode="full")


HOLD = "kind: rows in {} hold whole numbers up to {}, found"


@pytest.mark.parametrize(
    ("model", "dtype", "highest", "said"),
    [
        (KINDS, "float32", 6, "IndexError: index out of range"),  # beyond an embedding
        # in float32 16,777,217 is 16,777,216
        (FAR, "float32", 2**24 + 1, HOLD.format("float32", "16,777,216")),
        (FAR, "float64", 2**53 + 1, HOLD.format("float64", "9,007,199,254,740,992")),
    ],
)
def test_whole_numbers_that_are_too_high_are_refused(tmp_path, model, dtype, highest, said):
    data, model = data_of(), written(tmp_path, **model)
    data.kind[7] = highest
    torch.save(data, tmp_path / "data.pt")
    with pytest.raises(SpecError) as refused:
        gnnplan.plan(str(tmp_path / "data.pt"), model=model, ranks=2, dtype=dtype, mode="full")
    assert said in str(refused.value)


def test_a_parameter_may_name_a_field_of_dgl():
    """Edges' weight is given as edge_weight, and edges' feat is not taken for vertices'."""

    class Module(torch.nn.Module):
        def forward(self, feat: Any, edge_index: Any, edge_weight: Any, edge_feat: Any) -> None: ...

    on_edges = dict.fromkeys(["weight", "feat"], ((), "<f8", 0))
    found = bound(Module(), GraphFields(1, 1, edge=on_edges))
    takes = {"feat": "vertex x", "edge_index": "edge_index"}
    assert dict(found.takes) == takes | {f"edge_{of}": f"edge {of}" for of in ("weight", "feat")}


@pytest.mark.nightly
def test_coras_gat_trains_on_coras_words(tmp_path, run_ranks):
    """1,433 columns, nearly all 0: the layer could not be counted, and the remedy did not help."""
    quiet("dgl")
    rng = np.random.default_rng(0)
    src, dst = rng.integers(0, 80, (2, 400))
    x = (rng.random((80, 1433)) < 0.01).astype(np.float32)
    np.savez(tmp_path / "words.npz", src=src, dst=dst, x=x, y=np.arange(80) % 3)
    case = Case("graph_parallel", str(tmp_path / "words.npz"), {"layers": 2, "dtype": "float64"})
    plain = case.problem(2)
    assert plain.stats.nonzeros
    problem, notes = with_user_model(plain, f"{HERE / 'zoo_dgl.py'}:DroppingGAT")
    assert problem.stats.nonzeros == 0 and "are made dense" in " ".join(notes)
    case = replace(case, workload=problem.workload.model_dump())
    two = run_ranks(2, case)
    assert two.losses == pytest.approx(run_ranks.alone(case).losses, rel=1e-9)


UNSEEN = 89  # vertices of a graph on which no module was looked at
# dropout on edges, fields, messages of its own; PyG and DGL
SAMPLE = ["zoo PointNet", "zoo_dgl EdgeAttention"]
# messages in forward; by day test_mutations.py has the rules, one by one
BY_DAY = ["zoo ScatterInForward", "zoo JumpingLSTM", "zoo TypesOfVertices", "zoo EGNN"]
BY_DAY += ["zoo_dgl InOneModule"]
# who may refuse a module that graph_parallel carries, by family, and why
REFUSALS = {
    "graph_parallel": "one per layer|moments are of all vertices",
    "granndis": "depth lies between|batch norm needs all vertices",
    "gnnpipe": "a layer per stage|have some in common|batch norm has no moments",
    "bns": "a sample stands for all edges",
    "offload": "needs all rows at once|does not keep all layers' rows",
    "feature_parallel": "layer 1 is your own|the rows of all layers meet",
    "tensor3d": "its tiles are those of|has a norm|the rows of all layers meet",
    "gsplit": "hands its rows to layer 2|no rank knows|adds layer 1 up from parts|norm of edges",
    "data_parallel": "a batch norm of edges takes moments of all edges",
    "p3": "layer 1 must be a sum over feature columns|norm of edges",
}
# few bits round a degree to 0, and the module divides by it
DIVERGE = {("zoo PathfinderDiscovery", "pipegcn(bits=8)")}


def verdict(name: str, directed: bool) -> str:
    """'carried', or the words of a refusal. Any other error is a fault, Unfit at last too."""
    entry = table.entry_of(name)
    try:
        user = table.module_of(name, Workload(dtype="float64"), directed)
    except SpecError as refused:
        return str(refused).partition(f" {name.split()[1]}: ")[2]
    if pieces := user.pieces:  # else our own layers are taken
        graph = GraphFields(
            table.FEATURES, table.CLASSES, directed, False, entry.vertex, entry.edge
        )
        prove(user.module, pieces, Small(UNSEEN, user.module, graph))
    return "carried"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("directed", "names"),
    [
        pytest.param(False, BY_DAY, id="some"),
        at_night(False, table.NAMES, id="all"),
        at_night(True, table.NAMES, id="edges one way"),
    ],
)
@pytest.mark.timeout(300)
def test_every_module_is_carried_or_refused_as_it_should_be(directed, names):
    found = {name: verdict(name, directed) for name in names}
    wrong = {}
    for name, said in found.items():
        words = (directed and table.entry_of(name).one_way) or "carried"
        if words not in said:
            wrong[name] = f"{said} (expected: {words})"
    assert not wrong and len(table.NAMES) > 30


def is_as_it_should_be(name: str, strategy: str, outcome: table.Outcome) -> bool:
    if outcome.answer == "refused":
        return bool(re.search(REFUSALS.get(parse(strategy).family, "$^"), outcome.words))
    return outcome.answer in ("equal", "runs") or (name, strategy) in DIVERGE


# by day every name of a strategy trains one of the sample
NAMED = list({parse(text).name: text for text in reversed(table.FAMILIES)}.values())
SHARED_OUT = {name: tuple(NAMED[number :: len(SAMPLE)]) for number, name in enumerate(SAMPLE)}


@pytest.mark.parametrize(
    "asked",
    [
        pytest.param(SHARED_OUT, id="shared out", marks=pytest.mark.timeout(300)),
        pytest.param(
            dict.fromkeys(table.NAMES, table.FAMILIES + table.VARIANTS),
            id="all",
            marks=(pytest.mark.nightly, pytest.mark.timeout(7200)),
        ),
    ],
)
def test_every_family_trains_a_module_as_torch_does(asked, graphs, tmp_path, run_ranks):
    strategies = {text for each in asked.values() for text in each}
    assert {type(parse(text)) for text in strategies} == set(planner.FAMILIES)
    keeper = table.Keeper(graphs["rough"], tmp_path, run_ranks)
    found = {name: keeper.outcomes(name, asked[name]) for name in asked}
    faults = [
        f"{name} by {text}: {outcome}"
        for name, outcomes in found.items()
        for text, outcome in outcomes.items()
        if not is_as_it_should_be(name, text, outcome)
    ]
    assert not faults, "\n".join(faults)
    for outcomes in found.values():
        for text in {"graph_parallel", "data_parallel"} & outcomes.keys():
            assert (
                outcomes[text].answer in ("equal", "runs")
                or "norm of edges" in outcomes[text].words
            )


@pytest.mark.parametrize("name", every(2, table.OURS))  # by day each kind, of one library
def test_our_layers_train_a_module_as_its_own_library_does(name, graphs, tmp_path, run_ranks):
    assert table.module_of(name, Workload()).fields["model"] == table.entry_of(name).ours
    keeper = table.Keeper(graphs["rough"], tmp_path, run_ranks)
    assert keeper.outcomes(name, ["graph_parallel"]) == {"graph_parallel": table.Outcome("equal")}


def test_shared_parameters_are_kept_and_gone_on_with(graphs, run_ranks):
    """A checkpoint of layers that share parameters could not be written."""
    workload = Workload(dtype="float64")
    workload = with_module(workload, table.module_of("zoo SharedLayers", workload), ())
    case = Case("graph_parallel", graphs["rough"], workload.model_dump(), epochs=4)
    unbroken = run_ranks.alone(case)
    half = run_ranks.alone(replace(case, epochs=2, checkpoint_every=2))
    resumed = run_ranks.alone(replace(case, resume=str(half.out)))
    assert resumed.losses == unbroken.losses
    assert all(torch.equal(w, unbroken.weights[name]) for name, w in resumed.weights.items())


def test_rows_that_nothing_learns_from_go_back_as_zeros(graphs, tmp_path, run_ranks):
    """Hops under torch.no_grad had no gradient, of which ranks died; with them all of `check`."""
    keeper = table.Keeper(graphs["rough"], tmp_path, run_ranks)
    strategies = "graph_parallel(narrow=True)", "gnnpipe(stages=2,chunks=3)"
    found = keeper.outcomes("zoo HopsLookedUp", strategies)
    assert [outcome.answer for outcome in found.values()] == ["equal", "runs"], found


@pytest.mark.timeout(90)
def test_a_batch_norm_of_edges_has_the_moments_of_all_ranks_edges(graphs, tmp_path, run_ranks):
    """It was refused, as in EdgeConv's usual MLP. Layers that are computed again have its gradient too."""
    keeper = table.Keeper(graphs["rough"], tmp_path, run_ranks)
    strategies = "graph_parallel(checkpoint=True)", "offload(chunks=2)", "data_parallel"
    found = keeper.outcomes("zoo NormedEdges", strategies)
    assert [outcome.answer for outcome in found.values()] == ["equal", "equal", "refused"], found
    assert "each layer of a batch has edges of its own" in found["data_parallel"].words


@pytest.mark.slow
def test_a_stage_of_several_ranks_may_compute_nothing_before_its_first_layer(graphs):
    """SSGC's module was a traceback under gnnpipe: work that is nothing had no number per chunk."""
    workload = Workload(dtype="float64")
    workload = with_module(workload, table.module_of("zoo SSGC", workload), ())
    problem = Case("", graphs["rough"], workload.model_dump()).problem(2)
    assert parse("gnnpipe(stages=1,chunks=3)").settle(problem).predict(problem).epoch_s > 0
