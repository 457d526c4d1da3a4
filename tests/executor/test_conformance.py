"""What ranks do is what the schedule says: the same operations in the same order, with the bytes
that were predicted."""

from __future__ import annotations

from collections.abc import Hashable
from pathlib import Path
from typing import Any

import pytest
from examples import NIGHT
from jumping import jumping
from pairwise import covered

from gnnplan.planner.gnn.workload import Jump
from gnnplan.planner.strategies import families, parse
from gnnplan.planner.vocabulary.trace import (
    recorded_order,
)
from gnnplan.testing.ranks import Case, Ranks
from gnnplan.testing.runs import *  # noqa: F403
from gnnplan.testing.runs import Played

pytestmark = pytest.mark.timeout(110)

EPOCHS = {"full": 3 if NIGHT else 2, "mini": 2}  # of mini-batches several steps each
SETTINGS = [  # ranks, servers, strategy, model (and more of the workload), graph, dropout
    (2, 1, "graph_parallel", "gcn", "rough", 0.0),
    (2, 1, "graph_parallel(narrow=True)", "sage", "rough", 0.5),
    (2, 1, "graph_parallel", "gcnii", "islands", 0.0),  # no halo at all
    (4, 1, "graph_parallel", "gcnii", "islands", 0.5),  # some ranks have nothing to send
    (3, 1, "graph_parallel(narrow=True)", "gcn", "multi", 0.0),
    (2, 1, "pipegcn", "sage", "rough", 0.5),
    (3, 1, "pipegcn", "gcnii", "rough", 0.0),
    (2, 1, "pipegcn_gf(narrow=True)", "gcn", "rough", 0.5),
    (4, 2, "pipegcn", "gcn", "islands", 0.0),
    (2, 1, "gnnpipe", "gcn", "rough", 0.0),
    (3, 1, "gnnpipe(chunks=5,shuffle=False)", "gcnii", "multi", 0.5),
    (4, 2, "gnnpipe(chunks=6,historical_gradients=True,period=1)", "sage", "rough", 0.5),
    (2, 1, "gnnpipe(chunks=1)", "gcnii", "rough", 0.0),
    (4, 1, "gnnpipe(stages=2)", "gcnii", "rough", 0.5),
    (
        4,
        2,
        "gnnpipe(stages=2,chunks=5,historical_gradients=True,period=1,layers_per_stage=(3,1))",
        "gcn",
        "multi",
        0.0,
    ),
    # chunks of which nothing crosses
    (4, 1, "gnnpipe(stages=2,chunks=3,checkpoint=True)", "sage", "islands", 0.0),
    (2, 1, "gnnpipe(stages=1,chunks=3)", "sage", "rough", 0.5),
    (3, 1, "gnnpipe(stages=1,chunks=40)", "gcn", "rough", 0.0),  # chunks smaller than the group
    (2, 2, "granndis", "gcn", "rough", 0.0),
    (3, 3, "granndis(depth=1)", "sage", "rough", 0.5),
    (4, 2, "granndis(depth=0)", "gcn", "rough", 0.0),
    (4, 2, "granndis(depth=1)", "gcnii", "rough", 0.5),
    (4, 2, "granndis(depth=2,narrow=True)", "sage", "rough", 0.0),
    (4, 2, "granndis", "gcnii", "multi", 0.5),
    (2, 2, "granndis(max_hop=1,fanout=2)", "gcn", "rough", 0.5),
    (4, 2, "granndis(max_hop=2,fanout=1,degrees='local')", "sage", "rough", 0.0),
    (4, 2, "granndis(batches=2)", "gcn", "rough", 0.0),  # loads an aggregate
    (4, 2, "granndis(batches=3,narrow=True)", "sage", "rough", 0.5),  # loads rows and their halo
    # loads rows for the encoder
    (3, 3, "granndis(max_hop=1,fanout=2,batches=4)", "gcnii", "multi", 0.5),
    (2, 1, "granndis(batches=2)", "sage", "rough", 0.0),
    (4, 1, "granndis(depth=1,group='island')", "gcn", "rough", 0.5),
    (4, 1, "granndis(group='island',narrow=True)", "sage", "multi", 0.0),
    (4, 2, "granndis(depth=2,group='island')", "gcnii", "rough", 0.0),
    (4, 1, "granndis(max_hop=1,fanout=2,batches=3,group='island')", "gcn", "rough", 0.0),
    (2, 1, "graph_parallel(narrow=True)", "gat", "rough", 0.5),
    (2, 1, "graph_parallel(narrow=True)", "gatv2", "rough", 0.5),
    (4, 1, "gnnpipe(stages=2,chunks=3)", "gatv2", "sparse", 0.0),
    (4, 2, "granndis(depth=1)", "gin", "sparse", 0.5),
    (3, 1, "gnnpipe", "gin", "rough", 0.5),
    (2, 1, "gsplit", "gin mini", "rough", 0.5),
    (2, 1, "data_parallel", "gatv2 mini", "sparse", 0.0),
    # gradients in buckets: beside exchanges, stale ones, and moments; of an encoder; in batches
    (2, 1, "graph_parallel(narrow=True,buckets=4)", "gcn", "rough", 0.0),
    (3, 1, "graph_parallel(buckets=4)", "gcnii", "rough", 0.5),
    (3, 1, "graph_parallel(buckets=3)", "resgcn norm=batch", "rough", 0.5),
    (2, 1, "pipegcn(buckets=4)", "sage norm=batch", "rough", 0.5),
    (4, 2, "granndis(batches=2,buckets=3)", "gcn", "rough", 0.0),
    (2, 1, "bns(p=0.5,buckets=2)", "sgc", "rough", 0.0),
    # packed rows: fresh, stale and sampled ones; of ranks that send none; beside buckets
    (3, 1, "graph_parallel(bits=2,buckets=3)", "gcnii", "rough", 0.5),
    (4, 1, "graph_parallel(bits=4,narrow=True)", "sage", "islands", 0.0),
    (2, 1, "graph_parallel(bits=8,checkpoint=True)", "resgcn norm=batch", "multi", 0.0),
    (2, 1, "pipegcn(bits=2)", "sage", "rough", 0.5),
    (3, 1, "graph_parallel(bits='adaptive')", "gcn", "rough", 0.5),
    (3, 1, "pipegcn(bits=4,narrow=True)", "gcn", "sparse", 0.0),
    (2, 1, "bns(p=0.5,bits=2)", "gcn", "rough", 0.5),
    (4, 2, "granndis(depth=1,bits=2)", "gcn", "rough", 0.5),
    (4, 2, "granndis(batches=2,bits=4)", "sage", "rough", 0.0),
    (4, 1, "gnnpipe(stages=2,chunks=24,bits=2)", "gcnii", "rough", 0.5),  # some hand on nothing
    (2, 1, "data_parallel(prefetch=1,buckets=4)", "sage mini", "rough", 0.5),
    (4, 2, "gsplit(buckets=2)", "gcn mini", "rough", 0.5),
    # rows turned into columns: fewer columns than ranks, no sums in some steps, an encoder, moments
    (4, 1, "feature_parallel", "sage", "multi", 0.0),
    (2, 1, "feature_parallel", "gcnii", "sparse", 0.5),
    (3, 1, "feature_parallel", "gin norm=batch", "rough", 0.5),
    (3, 1, "feature_parallel(order='alternating')", "gcn", "rough", 0.0),
    (4, 2, "feature_parallel(order='alternating')", "gcn", "sparse", 0.5),
    (2, 1, "feature_parallel(order='alternating')", "sgc", "islands", 0.5),
    # tiles of a grid: the sums of layer 1 made in every step, and once; fewer columns than ranks
    (4, 1, "tensor3d(x=2,y=1,z=2)", "gcn", "rough", 0.5),
    (2, 1, "tensor3d(x=2,y=1,z=1)", "sage", "multi", 0.0),
    # moments before layers and the decoder
    (3, 1, "graph_parallel", "resgcn norm=batch", "rough", 0.5),
    (2, 1, "pipegcn", "sage norm=batch", "rough", 0.5),
    (4, 2, "granndis(depth=1)", "resgcn norm=batch aggregation=sum", "multi", 0.0),
    (3, 1, "pipegcn", "sgc", "rough", 0.5),
    (4, 1, "gnnpipe(stages=2,chunks=3,layers_per_stage=(1,3))", "sgc", "rough", 0.0),
    (4, 1, "gnnpipe(chunks=3)", "sgc", "rough", 0.5),  # two stages without weights
    (2, 1, "gnnpipe", "resgcn", "rough", 0.5),
    (2, 1, "graph_parallel(narrow=True)", "sage", "sparse", 0.5),
    (2, 1, "pipegcn", "gat", "sparse", 0.0),
    (4, 2, "granndis(depth=1)", "gcn", "sparse", 0.5),  # preloads and exchanges sparse rows
    (4, 2, "granndis", "gcnii", "sparse", 0.5),
    (4, 2, "granndis(batches=2)", "sage", "sparse", 0.0),  # loads them
    (4, 2, "granndis(batches=2)", "gcnii", "sparse", 0.0),
    (4, 1, "gnnpipe(stages=2,chunks=5)", "sage", "sparse", 0.5),
    (2, 1, "gnnpipe", "gcnii", "sparse", 0.5),
    (2, 1, "data_parallel", "sage mini", "rough", 0.5),
    (3, 1, "data_parallel(prefetch=2)", "gcnii mini batch=7 fanout=full", "sparse", 0.0),
    (2, 1, "gsplit", "gcn mini", "rough", 0.5),
    (3, 1, "gsplit(splitter='random',narrow=True)", "sage mini batch=20 fanout=full", "multi", 0.0),
    (4, 2, "gsplit(splitter='node',prefetch=2,imbalance=0.5)", "gat mini", "rough", 0.0),
    (4, 2, "gsplit(group='all',splitter='edge')", "gcn mini", "sparse", 0.5),
    (2, 1, "p3", "sage mini", "rough", 0.5),
    (4, 2, "p3", "gcn mini", "sparse", 0.0),
    (2, 2, "p3", "gat mini", "rough", 0.5),
    (3, 1, "p3(prefetch=2)", "sage mini batch=7 fanout=full", "multi", 0.0),
    (2, 1, "p3(pipelined=True)", "sage mini", "rough", 0.5),
    (4, 2, "p3(pipelined=True,prefetch=2)", "gcn mini batch=9", "sparse", 0.0),
    (2, 1, "p3(pipelined=True)", "gat mini", "multi", 0.0),
    (2, 2, "p3(pipelined=True)", "sgc mini", "rough", 0.5),
    (2, 1, "p3(pipelined=True)", "gcn mini batch=20", "rough", 0.5),
    (4, 2, "p3(over='rank',copies=2,pipelined=True)", "gat mini", "rough", 0.5),
    # nobody to push to
    (2, 1, "p3(copies=2)", "gat mini", "sparse", 0.0),
    (2, 1, "gsplit(splitter='random')", "resgcn mini batch=9", "islands", 0.0),
    (2, 1, "data_parallel(cache=480,prefetch=1)", "gcn mini", "rough", 0.0),
    (3, 1, "data_parallel(cache=480,shared_cache=True)", "sage mini", "rough", 0.5),
    (
        4,
        2,
        "data_parallel(cache=720,shared_cache=True,features='spread')",
        "gat mini",
        "rough",
        0.0,
    ),
    (
        4,
        2,
        "data_parallel(cache=200,shared_cache=True,features='spread')",
        "gcn mini",
        "sparse",
        0.5,
    ),
    (3, 3, "data_parallel(features='spread',cache=100,hot='degree')", "gcnii mini", "sparse", 0.0),
    (4, 2, "gsplit(cache=240,features='spread')", "gcn mini", "rough", 0.5),
    (
        4,
        2,
        "gsplit(cache=480,features='spread',group='all',hot='degree')",
        "sage mini",
        "sparse",
        0.0,
    ),
    (
        3,
        1,
        "data_parallel(structure='spread',structure_cache=300,prefetch=3)",
        "gcn mini",
        "rough",
        0.5,
    ),
    (4, 2, "p3(pipelined=True,structure='spread')", "sage mini batch=9", "rough", 0.0),
    # link prediction: rows of edges' ends cross where ranks split a batch
    (2, 1, "data_parallel", "sage mini batch=60 task=link negatives=2", "rough", 0.5),
    (2, 1, "gsplit", "gcn mini batch=60 task=link", "rough", 0.5),
    (4, 2, "dnp(group='all',cache=480)", "gat mini", "sparse", 0.5),
    (2, 1, "dnp(prefetch=1)", "gcn mini batch=60 task=link", "rough", 0.5),
    (4, 2, "snp(group='all',cache=480,features='spread')", "gcn mini", "sparse", 0.5),
    (2, 1, "snp(prefetch=1)", "sage mini batch=60 task=link", "rough", 0.5),
    (
        4,
        2,
        "gsplit(splitter='random',narrow=True)",
        "resgcn mini batch=60 task=link",
        "sparse",
        0.0,
    ),
    (2, 1, "p3(pipelined=True)", "sage mini batch=60 task=link", "rough", 0.5),
    (4, 2, "p3(cache=200,prefetch=1)", "gat mini", "rough", 0.0),
    (2, 1, "p3(cache=300,pipelined=True)", "gcn mini", "sparse", 0.5),
    # rows in bfloat16, weights in float32
    (2, 1, "graph_parallel(narrow=True,buckets=2)", "gcn dtype=bfloat16 norm=layer", "rough", 0.5),
    (3, 1, "pipegcn", "gcnii dtype=bfloat16", "multi", 0.5),
    (4, 1, "gnnpipe(stages=2,chunks=3)", "gin dtype=bfloat16", "sparse", 0.5),
    (4, 2, "granndis(batches=2)", "sage dtype=bfloat16", "sparse", 0.5),
    (2, 1, "bns(p=0.5)", "sage dtype=bfloat16", "rough", 0.5),
    (3, 1, "feature_parallel", "gcn dtype=bfloat16", "multi", 0.5),
    (1, 1, "offload(chunks=3)", "sgc dtype=bfloat16", "rough", 0.5),
    (
        4,
        2,
        "data_parallel(cache=480,shared_cache=True,features='spread',prefetch=1)",
        "gcnii mini dtype=bfloat16",
        "sparse",
        0.5,
    ),
    (2, 1, "gsplit(narrow=True)", "gcn mini dtype=bfloat16", "sparse", 0.5),
    (2, 1, "dnp", "sage mini dtype=bfloat16", "multi", 0.5),
    (2, 1, "snp", "sage mini dtype=bfloat16", "sparse", 0.5),
    # chunk by chunk, layer 1 on a constant aggregate, and with edges and attention of its own
    (1, 1, "offload(chunks=4)", "sage", "multi", 0.0),
    (1, 1, "offload(chunks=3)", "gat", "rough", 0.5),
    (2, 1, "offload(chunks=2,trim=True)", "sage", "multi", 0.5),
    (2, 1, "offload(chunks=3)", "gcn norm=batch", "rough", 0.5),
    (4, 2, "offload(chunks=2)", "sage dtype=bfloat16", "multi", 0.0),
    # rows of all layers meet at the end
    (4, 1, "gnnpipe(stages=2,chunks=3)", "sage met=cat", "rough", 0.5),
    (3, 1, "gnnpipe", "gcn met=sum", "rough", 0.0),
    (4, 2, "granndis(depth=1)", "gcn met=sum", "multi", 0.0),
    (2, 1, "gsplit", "gcn mini met=sum-dropped", "rough", 0.5),
    (2, 1, "p3", "sage mini met=cat-dropped", "rough", 0.5),
]
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
    """A strategy with every knob; every value of a knob, of numbers none, one and more; every model,
    world, graph, and other word of a workload; with and without dropout; a family in bfloat16."""
    world, servers, strategy, workload, graph, dropout = setting
    name, _, words = strategy.partition("(")
    parsed, (model, *more) = parse(strategy), workload.split()
    knobs = {
        (knob, min(value, 2) if type(value) in (int, float) else str(value))
        for knob, value in parsed.knobs().items()
        if knob in words
    }
    of_strategy: set[Hashable] = {name, *knobs, *((parsed.family, knob) for knob, _ in knobs)}
    sizes = ("batch=", "fanout=")
    return of_strategy | {
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
def played(
    request: pytest.FixtureRequest, run_ranks: Ranks, graphs: dict[str, str], tmp_path: Path
) -> Played:
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
        if met := workload.pop("met", ""):
            of, _, dropped = met.partition("-")
            jump = Jump(of=of, relu=True, drops=bool(dropped))
            case = jumping(case, tmp_path, (8, 8, 8, 8) if of == "sum" else (8, 10, 4, 6), jump)
        _played[request.param] = Played(run_ranks(world, [case])[0])
    return _played[request.param]


def test_every_family_is_here() -> None:
    assert {type(parse(setting[2])) for setting in SETTINGS} == set(families())
    assert any(getattr(parse(setting[2]), "staleness", 0) for setting in SETTINGS)


@pytest.mark.parametrize(
    "strategy", ["graph_parallel", "graph_parallel(narrow=True)", "pipegcn", "granndis", "gnnpipe"]
)
@pytest.mark.parametrize("model", ["gcn", "gcnii"])
def test_one_rank_sends_nothing(
    run_ranks: Ranks, graphs: dict[str, str], model: str, strategy: str
) -> None:
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
