"""Graph data in servers' memories: counted as read, and more memory makes no plan slower; the
memory of ranks, which is read from a program; and devices with the server's memory: bytes by sets,
and when a plan uses it."""

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from asked import changed, on
from calls import raising
from nightly import NIGHT, at_night, covered

from gnnplan.planner.cluster.spec import Cluster, Device, Link
from gnnplan.planner.decision import plan
from gnnplan.planner.decision.candidate import evaluate
from gnnplan.planner.decision.explain import explain
from gnnplan.planner.decision.search import families, recommend, search
from gnnplan.planner.gnn.model import RUNTIME, OpMemory, in_turn, keeps
from gnnplan.planner.gnn.workload import Workload
from gnnplan.planner.graph.graph import Graph
from gnnplan.planner.graph.load import load
from gnnplan.planner.problem.inputs import overridden, read_cluster, read_fitted
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies import (
    P3,
    DataParallel,
    GraphParallel,
    GSplit,
    Offload,
    Strategy,
    parse,
)
from gnnplan.planner.strategies import gnnpipe as of_stages
from gnnplan.planner.strategies.layerwise import offload as of_chunks
from gnnplan.planner.strategies.layerwise import step as of_layers
from gnnplan.planner.strategies.layerwise import tensor3d as of_tiles
from gnnplan.planner.strategies.minibatch import p3 as of_columns
from gnnplan.planner.strategies.minibatch.adjacency_store import thinned
from gnnplan.planner.strategies.minibatch.feature_store import HOST
from gnnplan.planner.strategies.minibatch.on_batches import fitting
from gnnplan.planner.strategies.minibatch.p3 import pipelined
from gnnplan.planner.strategies.program import account as program_memory
from gnnplan.planner.strategies.program.account import fullest
from gnnplan.planner.strategies.program.program import Op, Program
from gnnplan.planner.vocabulary.errors import Infeasible, SpecError
from gnnplan.planner.vocabulary.schedule import Compute
from gnnplan.simulator.player import play
from gnnplan.testing import laws
from gnnplan.testing.laws import GRAPHS, cluster

GRAPH = load("synthetic:community?vertices=40000&edges=400000&features=40&classes=5&seed=0")
ALL_ROWS = 40_000 * 40 * 4  # [B]
OFFSETS_AND_DEGREES = 8 * 40_001 + 8 * (1 + GRAPH.stats.directed) * 40_000  # [B]
ALL_LISTS = 4 * GRAPH.stats.edges + OFFSETS_AND_DEGREES  # [B]


def problem_of(
    servers: int = 2, gpus: int = 2, host_memory: float | None = None, **more: Any
) -> Problem:
    kind, known = more.pop("kind", "cuda"), more.pop("known", True)
    device = {"kind": kind, "memory": 1e12, "gemm": 1e12, "memory_bandwidth": 1e11}
    links = {"intra_node": Link(bandwidth=1e10), "inter_node": Link(bandwidth=1e9, latency=5e-5)}
    of = {"device": Device(**device), **links, "host_memory": host_memory}
    cluster = Cluster(servers=servers, gpus_per_server=gpus, **of)
    asked = {"mode": "mini", "layers": 2, "hidden": 16, "batch": 4000, "fanout": (4, 3), **more}
    graph = GRAPH if known else None
    return Problem(GRAPH.stats, graph, Workload(**asked), cluster, "random")


def printed(graph: str, hidden: int = 32, **settings: str) -> Problem:
    """P3's testbed, where its Table 4 was printed."""
    stats = load(graph, directed=graph == "ogbn-papers100M")  # as its print counts edges
    asked = {"layers": 2, "hidden": hidden, "mode": "mini", "batch": 1000, "fanout": (25, 10)}
    return Problem(stats, None, Workload(**asked), overridden(read_cluster("p3_p100"), settings))


READING = """
data_parallel data_parallel(features='spread') data_parallel(structure='spread') p3
data_parallel(features='spread',structure='spread',structure_cache=200000)
gsplit(group='server',splitter='random',features='spread',structure='spread')
gsplit(group='all',splitter='random',features='spread',structure='spread')
p3(copies=2,structure='spread') p3(over='rank',copies=2,structure='spread',structure_cache=100000)
"""


@pytest.mark.parametrize("text", READING.split())
def test_a_server_has_what_its_ranks_read_from_it(text):
    """The rows, columns and lists that stores and samplers of the executor take from there."""
    problem = problem_of(4, 2)
    strategy = parse(text).settle(problem)
    held, lists = strategy.host_memory(problem), strategy.lists(problem)
    everyone = np.arange(40_000)
    for server in range(4):
        ranks = [rank for rank in range(8) if problem.servers[rank] == server]
        if isinstance(strategy, P3):
            columns = {c for rank in ranks for c in strategy.slices(problem)[rank].columns}
            features = GRAPH.x[:, sorted(columns)].nbytes
        else:
            store = strategy.store(problem)
            read = np.any([store.of(rank, everyone)[0] == HOST for rank in ranks], axis=0)
            if "all" in text and store.home is not None:  # ranks of a group read what they own only
                read = store.home == server
            features = read.sum() * 40 * 4
        assert held["features"][server] == features
        kept = np.any([lists.keeps(rank) for rank in ranks], axis=0) if lists else everyone >= 0
        part = thinned(GRAPH, kept)
        neighbours = part.indices.astype(np.int32).nbytes + part.indptr.astype(np.int64).nbytes
        assert held["lists"][server] == neighbours + OFFSETS_AND_DEGREES - 8 * 40_001


@pytest.mark.parametrize("known", [True, False])
def test_everything_everywhere_and_spread_by_hand(known):
    problem = problem_of(4, 2, known=known)
    everywhere = DataParallel().on_fullest_server(problem)
    assert everywhere == {"features": ALL_ROWS, "lists": ALL_LISTS}
    spread = DataParallel(features="spread", structure="spread").on_fullest_server(problem)
    assert spread["features"] == pytest.approx(ALL_ROWS / 4, rel=0.01)
    assert spread["lists"] == pytest.approx(GRAPH.stats.edges + OFFSETS_AND_DEGREES, rel=0.01)
    assert P3(copies=2).on_fullest_server(problem)["features"] == ALL_ROWS / 2
    one = on(problem, servers=1)
    assert DataParallel(features="spread", structure="spread").on_fullest_server(one) == everywhere


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("strategy", [DataParallel(), P3(), GSplit(splitter="random")])
def test_batches_that_wait_are_in_the_servers_memory(strategy, known):
    """As many as are made at once, of all ranks of a server. They were nowhere."""
    problem = problem_of(2, 4, known=known)
    in_line, one, three = (replace(strategy, prefetch=k).host_memory(problem) for k in (0, 1, 3))
    assert "batches" not in in_line and one["batches"].shape == (2,)
    assert one["lists"].tolist() == in_line["lists"].tolist()
    assert three["batches"] == pytest.approx(3 * one["batches"])
    edges = max(
        sum(int(batch.sampled(layer).sum()) for layer in (1, 2))
        for batch in strategy.batches(problem).first()
    )
    places = 8 * (4 + 2) * 40_000
    assert 4 * edges < one["batches"].sum() - places < 200 * edges
    with pytest.raises(Infeasible, match=r"batches: .*host_memory\); use"):
        evaluate(problem_of(2, 4, 1e9, known=known), replace(strategy, prefetch=1000))


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("servers", [1, 2, 4])
def test_spreading_never_needs_more_memory(servers, known):
    problem = problem_of(servers, 2, known=known)
    plain: list[Strategy] = [DataParallel(), P3(), GSplit(splitter="random", group="all")]
    for strategy in plain:
        most = sum(strategy.on_fullest_server(problem).values())
        variants = list(strategy.more_spread(problem))
        assert bool(variants) == (servers > 1)
        for variant in (*variants, replace(strategy, structure="spread")):
            assert sum(variant.on_fullest_server(problem).values()) <= most * (1 + 1e-12)
    for copies in (1, 2) if servers == 4 else ():
        more = P3(copies=2 * copies).on_fullest_server(problem)["features"]
        assert P3(copies=copies).on_fullest_server(problem)["features"] == more / 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("graph", "rooms"),
    [
        at_night("ogbn-papers100M", (20e9, 60e9, 397e9)),
        ("facebook-darwini", (20e9, 397e9)),
        at_night("known", (2.7e6, 6e6, 1e7)),
    ],
)
def test_more_host_memory_is_never_slower(graph, rooms):
    problem = problem_of(4, 2) if graph == "known" else printed(graph)
    epochs = []
    for room in rooms:
        found = search(on(problem, host_memory=room), may_use_fewer=NIGHT and graph != "known")
        epochs.append(float(found.ranked[0].predicted.epoch_s))
    assert epochs == sorted(epochs, reverse=True)
    assert epochs[0] > epochs[-1] * (1.0 if graph == "known" else 1.1)


def test_candidates_spread_no_more_than_memory_asks():
    room = ALL_ROWS + ALL_LISTS
    waiting = DataParallel(prefetch=1).on_fullest_server(problem_of(4, 2))["batches"]
    for host_memory, strategy in (
        (None, DataParallel()),
        (room, DataParallel()),
        (room - 1, DataParallel(features="spread")),
        (ALL_ROWS / 4 * 1.02 + ALL_LISTS, DataParallel(features="spread")),
    ):
        assert fitting(problem_of(4, 2, host_memory), DataParallel()) == strategy
        ahead = problem_of(4, 2, host_memory and host_memory + waiting)
        assert next(DataParallel.candidates(ahead)) == replace(strategy, prefetch=1)
    tight = problem_of(4, 2, room := ALL_ROWS / 4 * 1.02 + 0.9 * ALL_LISTS)
    both = fitting(tight, DataParallel())
    assert (both.features, both.structure) == ("spread", "spread")
    left = room - sum(replace(both, structure_cache=0).on_fullest_server(tight).values())
    assert both.structure_cache == int(left) > 0  # caches fill what is left
    assert sum(both.on_fullest_server(tight).values()) <= room


def test_copies_of_columns_are_proposed_where_memory_is_known():
    def copies(servers: int, gpus: int, host_memory: float | None = None) -> set[int]:
        problem = problem_of(servers, gpus, known=False)
        if host_memory:
            host_memory += P3(prefetch=1).on_fullest_server(problem)["batches"]
            problem = problem_of(servers, gpus, host_memory, known=False)
        return {s.copies for s in P3.candidates(problem) if isinstance(s, P3)}

    assert copies(4, 2) == {1}
    assert copies(4, 2, ALL_ROWS + ALL_LISTS) == {1, 2}  # 4: data parallelism
    assert copies(4, 2, ALL_ROWS / 3 + ALL_LISTS) == {1, 2}  # with lists spread
    assert copies(4, 2, ALL_ROWS / 3 + ALL_LISTS / 2) == {1}
    assert copies(6, 1, ALL_ROWS + ALL_LISTS) == {1, 2, 3}


def test_on_cpus_graph_data_is_in_the_ranks_memory():
    problem = problem_of(2, 2, 1e6, kind="cpu")
    assert problem.cluster.graph_memory == np.inf
    assert evaluate(problem, DataParallel()).host_bytes == 0


LARGE = ["ogbn-products", "ogbn-papers100M", "facebook-darwini", "uk-2006-05", "uk-union"]


@pytest.mark.parametrize(("graph", "hidden"), covered(list(product(LARGE, (32, 512))), set))
def test_p3_is_recommended_over_distdgl_at_narrow_layers_only(graph, hidden):
    """P3's Table 4 and Fig. 15, on the constants that its figures gave."""
    stats, (cluster, _) = load(graph), read_fitted("p3_p100", "sage")
    asked = {"layers": 2, "hidden": hidden, "mode": "mini", "batch": 16_000, "fanout": (25, 10)}
    problem = Problem(stats, None, Workload(**asked), cluster)
    printed: list[Strategy] = [DataParallel(features="spread", structure="spread")]
    printed += [P3(structure="spread"), P3(structure="spread", pipelined=True)]
    best = recommend([evaluate(problem, strategy) for strategy in printed])
    assert isinstance(best.strategy, P3 if hidden == 32 else DataParallel)


@pytest.mark.slow
def test_a_strategy_that_does_not_fit_says_what_would():
    problem = printed("ogbn-papers100M", host_memory="32GB")
    with pytest.raises(Infeasible) as refused:
        search(problem, forced=DataParallel())
    rule = (
        "data_parallel has 65.99 GB of the graph in a server's memory (features: 56.86 GB, lists:"
    )
    rule += " 9.13 GB) but there is 32.00 GB (host_memory); use data_parallel(features='spread') or"
    rule += " --set host_memory=66.06GB; the smallest change that would fit: --set"
    assert str(refused.value).startswith(f"{rule} host_memory=66.06GB would fit data_parallel")
    assert search(printed("ogbn-papers100M", host_memory="66.06GB"), forced=DataParallel()).best
    with pytest.raises(Infeasible, match=r"(?s)nothing fits.*--set host_memory=[\d.]+GB would fit"):
        search(printed("facebook-darwini", host_memory="10GB"))


@pytest.mark.parametrize(
    ("memory", "told"),
    [
        (32e9, "of 32.00 GB of graph data in the fullest server's memory"),
        (None, "; 23.34 GB of graph data in the fullest server's memory"),
    ],
)
def test_plans_tell_graph_data_in_servers(memory, told):
    problem = on(printed("ogbn-papers100M"), host_memory=memory)
    made = plan.make(search(problem, forced=P3(pipelined=True)))
    assert made["best"]["predicted"]["host_bytes"] == pytest.approx(23.3e9, rel=0.01)
    assert told in made["summary"]["cost"]


TWO = laws.problem_of(GRAPHS[1], cluster(1, 2))
MINI = laws.problem_of(GRAPHS[1], cluster(2, 1), mode="mini", batch=20, fanout=(3, 3), layers=2)


def test_each_rank_is_fullest_at_a_moment_of_its_own():
    first, second = np.array([3.0, 1.0]), np.array([4.0, 0.0])
    moments = [keeps(first), OpMemory(np.array([1.0, 10.0]), 0.0), keeps(second)]
    moments += [OpMemory(0.0, -first)]
    most, left = in_turn(moments)
    assert np.array([most, left]).tolist() == [[7, 11], [4, 0]]
    steps = [Op("forward", work=Compute(), holds=lambda: keeps(first))], []
    program = replace(Program.of([]), known=lambda: [0, 1, 0], ops=steps.__getitem__)
    assert fullest(TWO, program).tolist() == [3, 1]  # a step begins with nothing
    # each stage of a pipeline has operations of its own
    held = [
        (rank, lambda size=size: keeps(np.array([size])))
        for rank, size in zip((0, 1, 0), (2.0, 5.0, 1.0), strict=True)
    ]
    of_stages = [Op("forward", work=Compute(), ranks=(rank,), holds=of) for rank, of in held]
    assert fullest(TWO, Program.of(of_stages)).tolist() == [3, 5]


def test_steps_under_way_together_are_held_together():
    """Every batch keeps 1 byte from its front to its tail, two periods later."""
    step = [
        Op("forward", work=Compute(), phase="front", holds=lambda: keeps(1.0)),
        Op("loss", work=Compute(), phase="body"),
        Op("backward", work=Compute(), phase="tail", holds=lambda: OpMemory(0.0, -1.0)),
    ]
    program = Program.of(step, order=pipelined, in_flight=3)
    program = replace(program, known=lambda: [0] * 5, steps=5)
    assert fullest(TWO, program).tolist() == [3, 3]
    assert fullest(TWO, replace(program, order=None, in_flight=1)).tolist() == [1, 1]


@pytest.mark.parametrize("problem", [TWO, MINI], ids=["full", "mini"])
def test_nothing_of_memory_is_computed_until_it_is_asked(problem, monkeypatch):
    computed = raising(AssertionError())
    for room in (of_layers, of_chunks, of_stages, of_columns):
        monkeypatch.setattr(room, "layer_memory", computed)
    monkeypatch.setattr(of_tiles, "keeps", computed)
    for example in (example for family in families(problem) for example in family.examples):
        strategy = parse(example.strategy).settle(problem)
        strategy.predict(problem)
        with pytest.raises(AssertionError):
            strategy.memory(problem)


@pytest.mark.parametrize("chunks", [4, 8])
def test_a_pipeline_has_code_for_the_sizes_that_chunks_have(chunks):
    """Squirrel's 16 chunks have five sizes; a share of them was counted, a fifth too much."""

    def code(chunks: int, method: str) -> list[float]:
        plain, compiled = (
            laws.problem_of(GRAPHS[0], cluster(1, 2, product_code=size), method, layers=2)
            for size in (0.0, 1e6)
        )
        pipe = parse(f"gnnpipe(chunks={chunks},layers_per_stage=(1,1))").settle(plain)
        buffers = [pipe.memory(problem)["buffers"] for problem in (compiled, plain)]
        return (buffers[0] - buffers[1]).tolist()

    assert code(chunks, "random") == pytest.approx(code(1, "random"))
    sizes = np.unique(laws.problem_of(GRAPHS[0], cluster(1, 2)).chunks(chunks).rows).size
    assert code(chunks, "metis") == pytest.approx(np.multiply(sizes, code(1, "random")))


def test_code_does_not_grow_with_the_chunks_of_offload():
    """A kernel per size of a chunk was counted: 160 MB of 24 chunks, whose rows took 26."""
    problem = laws.problem_of(GRAPHS[0], cluster(1, 1, kind="cpu", product_code=1e6), layers=2)
    code = {float(Offload(chunks).memory(problem)["buffers"][0]) for chunks in (2, 8, 32)}
    assert len(code) == 1 and 0 < code.pop() < 40e6


def test_a_program_is_built_once_for_its_readers(monkeypatch):
    built: list[Strategy] = []
    program = GraphParallel.program

    def counted(strategy: GraphParallel, problem: object) -> Program:
        built.append(strategy)
        return program(strategy, problem)

    monkeypatch.setattr(GraphParallel, "program", counted)
    one, other = GraphParallel(), GraphParallel(narrow=True)
    problem = replace(TWO)
    one.traffic(problem), one.predict(problem), one.memory(problem)
    assert built == [one]
    other.predict(problem), one.memory(problem), one.memory(replace(problem))
    assert built == [one, other, one, one]


SMALL = load("synthetic:community?vertices=3000&edges=20000&features=24&classes=5&seed=0")


def on_device(
    memory: float = 1e9, gpus: int = 1, kind: str = "cuda", known: bool = True, **more: Any
) -> Problem:
    """`memory`: of a device, beside its runtime."""
    device = {"kind": kind, "memory": RUNTIME[kind] + memory, "gemm": 1e12, "launch": 8e-6}
    where = changed(laws.cluster(1, gpus, **device), host=more.pop("host", None))
    asked = {"model": "sage", "layers": 3, "hidden": 16, "dropout": 0.5, **more}
    problem = laws.problem_of(SMALL, where, **asked)
    return problem if known else replace(problem, graph=None)


def needed(problem: Problem, text: str) -> float:
    """Bytes beside the runtime's."""
    use = parse(text).memory(problem)
    return float(sum(use.values(), -use["runtime"]).max())


def reads(graph: Graph, rows: np.ndarray) -> set[int]:
    """These rows and their neighbours."""
    return set(rows).union(*(graph.indices[graph.indptr[v] : graph.indptr[v + 1]] for v in rows))


def test_bytes_are_those_of_the_rows_that_chunks_read():
    """GraphSAGE: edges in both directions with places (12) and two weights (8), ends of offsets,
    ids of the rows read (8); labels (8) and the places of those trained on (8)."""
    problem, chunks = on_device(), 4
    chunk, widths, loaded, stored = problem.chunk_of(chunks), (24, 16, 16, 5), 0, 0
    for c in range(chunks):
        rows = np.flatnonzero(chunk == c)
        edges, read = int(SMALL.degree[rows].sum()), len(reads(SMALL, rows))
        block = 20 * edges + 4 * (len(rows) + 1 + read + 1) + 8 * read
        for layer in (1, 2, 3):
            loaded += block + 4 * read * widths[layer - 1]
            stored += 4 * len(rows) * widths[layer]
            if layer < 3:
                loaded += block + 4 * read * widths[layer - 1] + 4 * len(rows) * widths[layer]
            if layer > 1:
                stored += 4 * read * widths[layer - 1]
        loaded += 8 * len(rows) + 8 * int(SMALL.train[rows].sum())
    assert Offload(chunks).moved(problem) == (loaded, stored)


def test_an_estimate_is_near_the_count():
    counted, estimated = (Offload(4).moved(on_device(known=known)) for known in (True, False))
    assert estimated == pytest.approx(counted, rel=0.3)


def test_an_estimate_for_several_ranks_is_near_the_count():
    """From the halos of as many parts as there are ranks, and chunks."""
    counted = on_device(gpus=3)
    layouts = {parts: on_device(gpus=parts).layout() for parts in (3, 12)}
    halos = {parts: layout.facts(2).received_rows.sum() for parts, layout in layouts.items()}
    estimated = replace(counted, graph=None, stats=replace(counted.stats, halo_rows=halos))
    assert Offload(4).moved(estimated) == pytest.approx(Offload(4).moved(counted), rel=0.2)
    told, crossing = (Offload(4).predict(p).bytes["halo"] for p in (estimated, counted))
    assert told == pytest.approx(crossing, rel=0.3)


def seconds(chunks: int, rate: float, **more: Any) -> float:
    host = Link(bandwidth=rate, latency=0.0)
    return float(Offload(chunks).predict(on_device(host=host, **more)).epoch_s)


def test_copies_of_other_chunks_take_no_time_beside_computation():
    """But a load begins each layer's pass, and a store ends it."""
    copied_s = sum(Offload(8).moved(on_device())) / 1e8
    computed_s = seconds(8, 1e14)
    slow = seconds(8, 1e8)
    assert copied_s < slow < copied_s + computed_s, "the slower lane is never idle for long"
    assert 0 < slow - copied_s < 0.3 * computed_s
    problem = on_device().with_cuda_graph(Offload().uses_cuda_graph)
    played = play(Offload(8).schedule(problem, 4), problem.cost, contention=False)
    assert played.epoch_s(1) == pytest.approx(float(Offload(8).predict(problem).epoch_s))


def test_a_plan_uses_it_where_nothing_else_fits():
    problem = on_device(memory=needed(on_device(), "graph_parallel(checkpoint=True)") / 2)
    found = search(problem)
    chosen = found.best.strategy
    assert isinstance(chosen, Offload) and chosen.chunks
    assert found.best.memory_bytes <= problem.cluster.device.memory
    fewer = Offload(chosen.chunks // 2)
    saves = float(fewer.predict(problem).epoch_s) > found.best.epoch_s
    assert saves or needed(problem, str(fewer)) > problem.cluster.device.memory - RUNTIME["cuda"]
    assert any("in a server's memory" in line for line in explain(found, []))


@pytest.mark.parametrize("known", [True, False])
def test_more_chunks_than_must_be_overlap_more_copies(known):
    """A single chunk, which fitted, was loaded before it was computed: two chunks were 11 % faster."""
    wide: dict[str, Any] = {"hidden": 256, "known": known, "host": Link(bandwidth=2e9, latency=0.0)}
    room = needed(on_device(**wide), "offload(chunks=1)")
    alike = on_device(room + 1.0, **wide)
    one, two = (float(Offload(chunks).predict(alike).epoch_s) for chunks in (1, 2))
    assert Offload().settle(alike).chunks == 2 and two < 0.91 * one
    if not known:  # more chunks have more ids of rows in the server's memory
        least = sum(Offload(1).on_fullest_server(alike).values())
        assert Offload().settle(on(alike, host_memory=least + 1.0)).chunks == 1
    # copies through a link that is never waited for overlap with nothing
    assert Offload().settle(on(alike, host=Link(bandwidth=1e14, latency=0.0))).chunks == 1
    assert Offload().settle(on_device(1e9, kind="cpu")).chunks == 1


@pytest.mark.slow
def test_it_takes_all_gpus_that_have_too_little_memory_together_where_they_are_faster(monkeypatch):
    # one GPU has none, and this graph is small
    monkeypatch.setattr(program_memory, "COMMUNICATOR", 0.0)
    least = needed(on_device(gpus=4), "graph_parallel(checkpoint=True)")
    problem = on_device(memory=0.9 * least, gpus=4)
    slow = on(problem, intra_node=Link(bandwidth=1e6), host=Link(bandwidth=1e10))
    for asked, ranks in ((problem, 4), (slow, 1)):
        best = search(asked).best
        assert isinstance(best.strategy, Offload) and best.problem.ranks == ranks


def test_few_training_vertices_are_trained_on_few_rows():
    """All rows passed the devices: a cliff of 41 times between 8 and 16 GPUs."""
    whole = on_device(host=Link(bandwidth=1e8, latency=0.0))
    train = np.arange(SMALL.stats.vertices) < 30
    graph = replace(whole.graph, train=train, stats=replace(SMALL.stats, train_vertices=30))
    asked = replace(whole, graph=graph, stats=graph.stats)
    all_rows, few = Offload(4), Offload(4, trim=True)
    assert sum(few.moved(asked)) < 0.5 * sum(all_rows.moved(asked))
    assert few.predict(asked).epoch_s < 0.7 * all_rows.predict(asked).epoch_s
    room = RUNTIME["cuda"] + needed(asked, "graph_parallel(checkpoint=True,trim=True)") / 2
    found = search(on(asked, memory=room)).best
    assert isinstance(found.strategy, Offload) and found.strategy.trim
    assert found.memory_bytes <= room
    # the edges of an evaluation are there too, but not its gradients
    held = [sum(float(use.max()) for use in s.host_memory(asked).values()) for s in (few, all_rows)]
    assert held[1] < held[0] < 2 * held[1]


@pytest.mark.parametrize("gpus", [1, 4])
def test_it_is_no_candidate_where_graph_parallelism_fits(gpus):
    problem = on_device(gpus=gpus)
    names = {type(c.strategy) for c in search(problem).ranked}
    assert GraphParallel in names and Offload not in names
    assert Offload.absent(problem) == ""


def test_cpu_ranks_have_no_other_memory_unless_the_cluster_says_so():
    """A CPU rank's memory holds what a server's would."""
    least = needed(on_device(kind="cpu"), "graph_parallel(checkpoint=True)")
    problem = on_device(memory=least / 2, kind="cpu")
    with pytest.raises(Infeasible, match=r"offload\(chunks=8\) needs 302.07 MB"):
        search(problem, forced=Offload(8))
    assert isinstance(search(on(problem, host_memory=1e9)).best.strategy, Offload)


@pytest.mark.slow
def test_a_servers_memory_has_an_end():
    problem = on_device(memory=needed(on_device(), "graph_parallel(checkpoint=True)") / 2)
    with pytest.raises(Infeasible, match=r"offload\(chunks=\d+\) has .* --set host_memory="):
        search(on(problem, host_memory=1e4), forced=Offload())


@pytest.mark.parametrize(("gpus", "chunks", "most"), [(1, 4000, 1024), (4, 400, 256)])
def test_chunks_have_an_end(gpus, chunks, most):
    problem, many = on_device(gpus=gpus), Offload(chunks)
    with pytest.raises(SpecError, match=rf"\(chunks: {chunks}, ranks: {gpus}\); use chunks={most}"):
        many.settle(problem).check(problem)
