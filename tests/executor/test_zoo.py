"""A zoo of users' modules of PyG and DGL: each is carried, and equals itself.

Nothing is compared with us alone. The proof of a module is held against a graph that it has not
seen, and a training on two ranks against torch's own of the module itself (zoo_table.py)."""

import re
from dataclasses import replace

import pytest
import torch
import zoo_table as table
from pairwise import at_night, every

from gnnplan.executor.modules.bind import GraphFields, Small
from gnnplan.executor.modules.prove import prove
from gnnplan.executor.modules.read import with_module
from gnnplan.planner import strategies as planner
from gnnplan.planner.gnn.workload import Workload
from gnnplan.planner.strategies import parse
from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.testing.ranks import Case

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
    "gsplit": "hands its rows to layer 2|no rank knows the moments|adds layer 1 up from parts",
    "p3": "layer 1 must be a sum over feature columns",
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
            assert outcomes[text].answer in ("equal", "runs")


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


@pytest.mark.slow
def test_a_stage_of_several_ranks_may_compute_nothing_before_its_first_layer(graphs):
    """SSGC's module was a traceback under gnnpipe: work that is nothing had no number per chunk."""
    workload = Workload(dtype="float64")
    workload = with_module(workload, table.module_of("zoo SSGC", workload), ())
    problem = Case("", graphs["rough"], workload.model_dump()).problem(2)
    assert parse("gnnpipe(stages=1,chunks=3)").settle(problem).predict(problem).epoch_s > 0
