"""What ranks do is what the schedule says: the same operations in the same order, with the bytes
that were predicted."""

from collections.abc import Hashable
from typing import Any

import pytest
from examples import NIGHT
from pairwise import covered

from gnnplan.planner.strategies import families, parse
from gnnplan.planner.vocabulary.trace import (
    recorded_order,
)
from gnnplan.testing.ranks import Case
from gnnplan.testing.runs import *  # noqa: F403
from gnnplan.testing.runs import Played

pytestmark = pytest.mark.timeout(110)

EPOCHS = {"full": 3 if NIGHT else 2, "mini": 2}  # of mini-batches several steps each
SETTINGS_AS_TEXT = """
    # ranks, servers, strategy, graph, dropout, model and more of the workload
    2 1 graph_parallel rough 0.0 gcn
    2 1 graph_parallel(narrow=True) rough 0.5 sage
    2 1 graph_parallel islands 0.0 gcnii  # no halo at all
    4 1 graph_parallel islands 0.5 gcnii  # some ranks have nothing to send
    3 1 graph_parallel(narrow=True) multi 0.0 gcn
    2 1 pipegcn rough 0.5 sage
    3 1 pipegcn rough 0.0 gcnii
    2 1 pipegcn_gf(narrow=True) rough 0.5 gcn
    4 2 pipegcn islands 0.0 gcn
    2 1 gnnpipe rough 0.0 gcn
    3 1 gnnpipe(chunks=5,shuffle=False) multi 0.5 gcnii
    4 2 gnnpipe(chunks=6,historical_gradients=True,period=1) rough 0.5 sage
    2 1 gnnpipe(chunks=1) rough 0.0 gcnii
    4 1 gnnpipe(stages=2) rough 0.5 gcnii
    4 2 gnnpipe(stages=2,chunks=5,historical_gradients=True,period=1,layers_per_stage=(3,1)) multi 0.0 gcn
    # chunks of which nothing crosses
    4 1 gnnpipe(stages=2,chunks=3,checkpoint=True) islands 0.0 sage
    2 1 gnnpipe(stages=1,chunks=3) rough 0.5 sage
    3 1 gnnpipe(stages=1,chunks=40) rough 0.0 gcn  # chunks smaller than the group
    2 2 granndis rough 0.0 gcn
    3 3 granndis(depth=1) rough 0.5 sage
    4 2 granndis(depth=0) rough 0.0 gcn
    4 2 granndis(depth=1) rough 0.5 gcnii
    4 2 granndis(depth=2,narrow=True) rough 0.0 sage
    4 2 granndis multi 0.5 gcnii
    2 2 granndis(max_hop=1,fanout=2) rough 0.5 gcn
    4 2 granndis(max_hop=2,fanout=1,degrees='local') rough 0.0 sage
    4 2 granndis(batches=2) rough 0.0 gcn  # loads an aggregate
    4 2 granndis(batches=3,narrow=True) rough 0.5 sage  # loads rows and their halo
    # loads rows for the encoder
    3 3 granndis(max_hop=1,fanout=2,batches=4) multi 0.5 gcnii
    2 1 granndis(batches=2) rough 0.0 sage
    4 1 granndis(depth=1,group='island') rough 0.5 gcn
    4 1 granndis(group='island',narrow=True) multi 0.0 sage
    4 2 granndis(depth=2,group='island') rough 0.0 gcnii
    4 1 granndis(max_hop=1,fanout=2,batches=3,group='island') rough 0.0 gcn
    2 1 graph_parallel(narrow=True) rough 0.5 gat
    2 1 graph_parallel(narrow=True) rough 0.5 gatv2
    4 1 gnnpipe(stages=2,chunks=3) sparse 0.0 gatv2
    4 2 granndis(depth=1) sparse 0.5 gin
    3 1 gnnpipe rough 0.5 gin
    2 1 gsplit rough 0.5 gin mini
    2 1 data_parallel sparse 0.0 gatv2 mini
    # gradients in buckets: beside exchanges, stale ones, and moments; of an encoder; in batches
    2 1 graph_parallel(narrow=True,buckets=4) rough 0.0 gcn
    3 1 graph_parallel(buckets=4) rough 0.5 gcnii
    3 1 graph_parallel(buckets=3) rough 0.5 resgcn norm=batch
    2 1 pipegcn(buckets=4) rough 0.5 sage norm=batch
    4 2 granndis(batches=2,buckets=3) rough 0.0 gcn
    2 1 bns(p=0.5,buckets=2) rough 0.0 sgc
    # packed rows: fresh, stale and sampled ones; of ranks that send none; beside buckets
    3 1 graph_parallel(bits=2,buckets=3) rough 0.5 gcnii
    4 1 graph_parallel(bits=4,narrow=True) islands 0.0 sage
    2 1 graph_parallel(bits=8,checkpoint=True) multi 0.0 resgcn norm=batch
    2 1 pipegcn(bits=2) rough 0.5 sage
    3 1 graph_parallel(bits='adaptive') rough 0.5 gcn
    3 1 pipegcn(bits=4,narrow=True) sparse 0.0 gcn
    2 1 bns(p=0.5,bits=2) rough 0.5 gcn
    4 2 granndis(depth=1,bits=2) rough 0.5 gcn
    4 2 granndis(batches=2,bits=4) rough 0.0 sage
    4 1 gnnpipe(stages=2,chunks=24,bits=2) rough 0.5 gcnii  # some hand on nothing
    2 1 data_parallel(prefetch=1,buckets=4) rough 0.5 sage mini
    4 2 gsplit(buckets=2) rough 0.5 gcn mini
    # rows turned into columns: fewer columns than ranks, no sums in some steps, an encoder, moments
    4 1 feature_parallel multi 0.0 sage
    2 1 feature_parallel sparse 0.5 gcnii
    3 1 feature_parallel rough 0.5 gin norm=batch
    3 1 feature_parallel(order='alternating') rough 0.0 gcn
    4 2 feature_parallel(order='alternating') sparse 0.5 gcn
    2 1 feature_parallel(order='alternating') islands 0.5 sgc
    # tiles of a grid: the sums of layer 1 made in every step, and once; fewer columns than ranks
    4 1 tensor3d(x=2,y=1,z=2) rough 0.5 gcn
    2 1 tensor3d(x=2,y=1,z=1) multi 0.0 sage
    # moments before layers and the decoder
    3 1 graph_parallel rough 0.5 resgcn norm=batch
    2 1 pipegcn rough 0.5 sage norm=batch
    4 2 granndis(depth=1) multi 0.0 resgcn norm=batch aggregation=sum
    3 1 pipegcn rough 0.5 sgc
    4 1 gnnpipe(stages=2,chunks=3,layers_per_stage=(1,3)) rough 0.0 sgc
    4 1 gnnpipe(chunks=3) rough 0.5 sgc  # two stages without weights
    2 1 gnnpipe rough 0.5 resgcn
    2 1 graph_parallel(narrow=True) sparse 0.5 sage
    2 1 pipegcn sparse 0.0 gat
    4 2 granndis(depth=1) sparse 0.5 gcn  # preloads and exchanges sparse rows
    4 2 granndis sparse 0.5 gcnii
    4 2 granndis(batches=2) sparse 0.0 sage  # loads them
    4 2 granndis(batches=2) sparse 0.0 gcnii
    4 1 gnnpipe(stages=2,chunks=5) sparse 0.5 sage
    2 1 gnnpipe sparse 0.5 gcnii
    2 1 data_parallel rough 0.5 sage mini
    3 1 data_parallel(prefetch=2) sparse 0.0 gcnii mini batch=7 fanout=full
    2 1 gsplit rough 0.5 gcn mini
    3 1 gsplit(splitter='random',narrow=True) multi 0.0 sage mini batch=20 fanout=full
    4 2 gsplit(splitter='node',prefetch=2,imbalance=0.5) rough 0.0 gat mini
    4 2 gsplit(group='all',splitter='edge') sparse 0.5 gcn mini
    2 1 p3 rough 0.5 sage mini
    4 2 p3 sparse 0.0 gcn mini
    2 2 p3 rough 0.5 gat mini
    3 1 p3(prefetch=2) multi 0.0 sage mini batch=7 fanout=full
    2 1 p3(pipelined=True) rough 0.5 sage mini
    4 2 p3(pipelined=True,prefetch=2) sparse 0.0 gcn mini batch=9
    2 1 p3(pipelined=True) multi 0.0 gat mini
    2 2 p3(pipelined=True) rough 0.5 sgc mini
    2 1 p3(pipelined=True) rough 0.5 gcn mini batch=20
    4 2 p3(over='rank',copies=2,pipelined=True) rough 0.5 gat mini
    # nobody to push to
    2 1 p3(copies=2) sparse 0.0 gat mini
    2 1 gsplit(splitter='random') islands 0.0 resgcn mini batch=9
    2 1 data_parallel(cache=480,prefetch=1) rough 0.0 gcn mini
    3 1 data_parallel(cache=480,shared_cache=True) rough 0.5 sage mini
    4 2 data_parallel(cache=720,shared_cache=True,features='spread') rough 0.0 gat mini
    4 2 data_parallel(cache=200,shared_cache=True,features='spread') sparse 0.5 gcn mini
    3 3 data_parallel(features='spread',cache=100,hot='degree') sparse 0.0 gcnii mini
    4 2 gsplit(cache=240,features='spread') rough 0.5 gcn mini
    4 2 gsplit(cache=480,features='spread',group='all',hot='degree') sparse 0.0 sage mini
    3 1 data_parallel(structure='spread',structure_cache=300,prefetch=3) rough 0.5 gcn mini
    4 2 p3(pipelined=True,structure='spread') rough 0.0 sage mini batch=9
    # link prediction: rows of edges' ends cross where ranks split a batch
    2 1 data_parallel rough 0.5 sage mini batch=60 task=link negatives=2
    2 1 gsplit rough 0.5 gcn mini batch=60 task=link
    4 2 dnp(group='all',cache=480) sparse 0.5 gat mini
    2 1 dnp(prefetch=1) rough 0.5 gcn mini batch=60 task=link
    4 2 snp(group='all',cache=480,features='spread') sparse 0.5 gcn mini
    2 1 snp(prefetch=1) rough 0.5 sage mini batch=60 task=link
    4 2 gsplit(splitter='random',narrow=True) sparse 0.0 resgcn mini batch=60 task=link
    2 1 p3(pipelined=True) rough 0.5 sage mini batch=60 task=link
    4 2 p3(cache=200,prefetch=1) rough 0.0 gat mini
    2 1 p3(cache=300,pipelined=True) sparse 0.5 gcn mini
    # rows in bfloat16, weights in float32
    2 1 graph_parallel(narrow=True,buckets=2) rough 0.5 gcn dtype=bfloat16 norm=layer
    3 1 pipegcn multi 0.5 gcnii dtype=bfloat16
    4 1 gnnpipe(stages=2,chunks=3) sparse 0.5 gin dtype=bfloat16
    4 2 granndis(batches=2) sparse 0.5 sage dtype=bfloat16
    2 1 bns(p=0.5) rough 0.5 sage dtype=bfloat16
    3 1 feature_parallel multi 0.5 gcn dtype=bfloat16
    1 1 offload(chunks=3) rough 0.5 sgc dtype=bfloat16
    4 2 data_parallel(cache=480,shared_cache=True,features='spread',prefetch=1) sparse 0.5 gcnii mini dtype=bfloat16
    2 1 gsplit(narrow=True) sparse 0.5 gcn mini dtype=bfloat16
    2 1 dnp multi 0.5 sage mini dtype=bfloat16
    2 1 snp sparse 0.5 sage mini dtype=bfloat16
    # chunk by chunk, layer 1 on a constant aggregate, and with edges and attention of its own
    1 1 offload(chunks=4) multi 0.0 sage
    1 1 offload(chunks=3) rough 0.5 gat
    2 1 offload(chunks=2,trim=True) multi 0.5 sage
    2 1 offload(chunks=3) rough 0.5 gcn norm=batch
    4 2 offload(chunks=2) multi 0.0 sage dtype=bfloat16
"""


def setting(line: str) -> tuple[int, int, str, str, str, float]:
    """Ranks, servers, strategy, model (and more of the workload), graph, dropout."""
    ranks, servers, strategy, graph, dropout, workload = line.partition("  #")[0].split(maxsplit=5)
    return int(ranks), int(servers), strategy, workload.strip(), graph, float(dropout)


LINES = [line.strip() for line in SETTINGS_AS_TEXT.splitlines()]
SETTINGS = [setting(line) for line in LINES if line and not line.startswith("#")]
SETTINGS += [  # of families that have none above: their own examples
    (
        example.ranks,
        example.servers,
        example.strategy,
        "gcn" if family.mode == "full" else "gcn mini",
        "rough",
        0.5,
    )
    for family in families()
    if family not in {type(parse(setting[2])) for setting in SETTINGS}
    for example in family.examples
]


def options(words: list[str]) -> dict[str, Any]:
    """['mini', 'batch=9'] -> {'mode': 'mini', 'batch': '9', 'fanout': (3, 2, 2, 1)}"""
    mini = {"mode": "mini", "batch": 6, "fanout": (3, 2, 2, 1)} if "mini" in words else {}
    return {**mini, **dict(word.split("=") for word in words if word != "mini")}


def needs(setting: tuple[int, int, str, str, str, float]) -> set[Hashable]:
    """Every strategy; every value of a knob, of numbers none, one and more; every model, world,
    graph, and other word of a workload; with and without dropout; a family in bfloat16."""
    world, servers, strategy, workload, graph, dropout = setting
    name, _, words = strategy.partition("(")
    parsed, (model, *more) = parse(strategy), workload.split()
    knobs = {
        (knob, min(value, 2) if type(value) in (int, float) else str(value))
        for knob, value in parsed.knobs().items()
        if knob in words
    }
    sizes = ("batch=", "fanout=")
    return {
        name,
        *knobs,
        model,
        (world, servers),
        graph,
        dropout > 0,
        *(word for word in more if not word.startswith(sizes)),
        *((name, word) for word in more if word.startswith("dtype=")),
    }


_played: dict[tuple, Played] = {}


@pytest.fixture(
    params=covered(SETTINGS, needs, several=False),
    ids=lambda setting: f"{setting[2]}-{setting[3]}-{setting[0]}x{setting[1]}-{setting[4]}",
)
def played(request, run_ranks, graphs, tmp_path):
    """Each setting runs once for all tests."""
    world, servers, strategy, model, graph, dropout = request.param
    if request.param not in _played:
        name, *more = model.split()
        workload = {
            "model": name,
            "layers": 4,
            "hidden": 8,
            "heads": 2,
            "dropout": dropout,
            "seed": 1,
            **options(more),
        }
        # of four ranks
        islands = {1: "[[0, 2], [1, 3]]", 2: "[[0], [1]]"}[servers] if "island'" in strategy else ""
        epochs = EPOCHS[workload.get("mode", "full")]
        case = Case(
            strategy, graphs[graph], workload, servers, epochs=epochs, eval_every=1, islands=islands
        )
        _played[request.param] = Played(run_ranks(world, [case])[0])
    return _played[request.param]


def test_every_family_is_here():
    assert {type(parse(setting[2])) for setting in SETTINGS} == set(families())
    assert any(getattr(parse(setting[2]), "staleness", 0) for setting in SETTINGS)


@pytest.mark.parametrize(
    "strategy", ["graph_parallel", "graph_parallel(narrow=True)", "pipegcn", "granndis", "gnnpipe"]
)
@pytest.mark.parametrize("model", ["gcn", "gcnii"])
def test_one_rank_sends_nothing(run_ranks, graphs, model, strategy):
    """Nor does it record an exchange or an all-reduce; and it trains as one process does."""
    case = Case(
        strategy,
        graphs["rough"],
        {"model": model, "layers": 3, "hidden": 8},
        epochs=2,
        eval_every=1,
    )
    result = run_ranks.alone(case)
    played = Played(result)
    assert result.rank(0)["bytes"] == result.rank(0)["setup_bytes"] == {}
    assert played.prediction.bytes_total == played.prediction.setup_bytes == 0
    assert {span.lane for span in result.spans} == {"compute"}
    assert recorded_order(result.spans, 0, "compute") == [
        str(task.label) for task in played.schedule.tasks
    ]
