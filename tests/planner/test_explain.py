"""What a plan says about itself is so: each sentence is held against the closed forms, or against
files written here."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from examples import NIGHT

from gnnplan.planner.cluster import scaling
from gnnplan.planner.cluster.doubt import DRAWS
from gnnplan.planner.cluster.spec import Cluster, Device, Link
from gnnplan.planner.decision import explain
from gnnplan.planner.decision.candidate import Candidate
from gnnplan.planner.decision.search import SearchResult, search
from gnnplan.planner.decision.sensitivity import of_depths, sentences
from gnnplan.planner.decision.summary import inputs
from gnnplan.planner.gnn.workload import Workload
from gnnplan.planner.graph import kept, partition
from gnnplan.planner.graph.load import load
from gnnplan.planner.problem.inputs import read_cluster
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies import GraNNDis, parse
from gnnplan.planner.vocabulary import files
from gnnplan.planner.vocabulary.units import show_bytes, show_count

MEASURED = Path(__file__).resolve().parents[2] / "traces" / "measured"
DEVICE = {"memory": "24GB", "gemm": "14TFLOP/s", "memory_bandwidth": "600GB/s"}


def two_servers(gpus: int, intra_node: str, inter_node: str) -> Cluster:
    return Cluster(
        servers=2,
        gpus_per_server=gpus,
        device=DEVICE,
        intra_node={"bandwidth": intra_node},
        inter_node={"bandwidth": inter_node},
    )


def question(inter_node: str = "100MB/s", layers: int = 2) -> Problem:
    graph = load("synthetic:community?vertices=3000&edges=60000&features=32&classes=4")
    cluster = two_servers(1, "10GB/s", inter_node)
    return Problem(graph.stats, graph, Workload(model="gcn", layers=layers, hidden=64), cluster)


def test_what_takes_over_really_takes_over():
    """At the bandwidth that a sentence names, the other family is the fastest; on this side of it, it
    is not."""
    problem = question("5GB/s", layers=8)
    every = search(problem, may_use_fewer=False)
    # exact strategies are recommended in doubt, wherever the others take over from each other
    found = replace(every, ranked=[c for c in every.ranked if not c.strategy.exact])
    told = [s for s in sentences(found) if "between servers (" in s]
    assert told
    for sentence in told:
        factor, winner = re.match(
            r"(?:below|above) ([\d.e+-]+)x .* (\w+)(?:\(.*\))? wins", sentence
        ).groups()

        def first(factor: float) -> str:
            link = problem.cluster.inter_node.model_copy(
                update={"bandwidth": problem.cluster.inter_node.bandwidth * factor}
            )
            there = Problem(
                problem.stats,
                problem.graph,
                problem.workload,
                problem.cluster.model_copy(update={"inter_node": link}),
            )
            predicted = [
                replace(c, predicted=c.strategy.predict(there), problem=there) for c in found.ranked
            ]
            return min(predicted, key=lambda c: float(c.predicted.epoch_s)).strategy.name

        beyond = 0.9 if sentence.startswith("below") else 1.1
        assert first(float(factor) * beyond) == winner != found.best.strategy.name
        assert first(float(factor) / beyond**2) == found.best.strategy.name


@pytest.mark.parametrize("dtype", ["bfloat16", "tf32"])
@pytest.mark.parametrize(
    ("times", "told"),
    [
        (None, "are priced at float32's rate, for this device's own is not known"),
        (0.03, "run at 0.03 of float32's rate here"),
        (16, "run at 16 times float32's rate here"),
    ],
)
def test_a_plan_says_how_fast_rounded_products_are(times, told, dtype):
    """The rate is the device's own for that type."""
    problem = question()
    whole = min(float(c.predicted.epoch_s) for c in search(problem).ranked)
    device = problem.cluster.device
    rate = times and device.gemm * times
    device = device.model_copy(update={f"gemm_{dtype}": rate})
    rounded = replace(
        problem,
        workload=problem.workload.model_copy(update={"dtype": dtype}),
        cluster=problem.cluster.model_copy(update={"device": device}),
    )
    found = search(rounded)
    assert f"{dtype} products {told}" in inputs(rounded)
    assert told in explain.rounded_rows(rounded)[0]
    slower = min(float(c.predicted.epoch_s) for c in found.ranked) > whole
    assert slower == (times == 0.03)


def test_twice_the_link_helps_where_the_link_binds():
    def gain(problem: Problem) -> int:
        told = sentences(search(problem, may_use_fewer=False))
        sentence = next(s for s in told if s.startswith("twice the bandwidth between servers"))
        return int(re.search(r"([+-]\d+) %", sentence).group(1))

    assert gain(question("10MB/s")) < -10
    assert gain(question("100GB/s")) in (-1, 0)


@pytest.mark.nightly
def test_other_depths_change_the_choice_where_they_do():
    """On each side the nearest depth at which another family is recommended, as separate searches
    say; the question has depths of either side, of both, and one beyond a depth that changes
    nothing."""
    graph = load("synthetic:community?vertices=1000&edges=10000&features=256&classes=4")
    cluster = two_servers(2, "1GB/s", "100MB/s")

    def found(layers: int) -> SearchResult:
        workload = Workload(model="gcn", layers=layers, hidden=256)
        return search(Problem(graph.stats, graph, workload, cluster), may_use_fewer=False)

    at = {layers: found(layers) for layers in (1, 2, 4, 8, 16)}
    winners = {layers: each.best.strategy.name for layers, each in at.items()}
    told = []
    for asked in (2, 4, 8):
        sides = (asked // 2, asked // 4), (2 * asked,)
        nearest = [
            next((n for n in side if n in at and winners[n] != winners[asked]), None)
            for side in sides
        ]
        expected = [f"at {show_count(n, 'layer')} {winners[n]} wins" for n in nearest if n]
        assert list(of_depths(at[asked])) == expected
        told.append(nearest)
    assert told == [[None, 4], [2, None], [2, 16]], winners


@pytest.mark.nightly
def test_other_depths_may_use_fewer_gpus_too():
    """The best uses one GPU of four at 2 layers and at 4, where on all four another family would be
    ahead."""
    graph = load("synthetic:community?vertices=1000&edges=10000&features=32&classes=4")
    cluster = two_servers(2, "10GB/s", "1GB/s")

    def found(layers: int, may_use_fewer: bool = True) -> SearchResult:
        return search(
            Problem(graph.stats, graph, Workload(model="gcn", layers=layers, hidden=64), cluster),
            may_use_fewer=may_use_fewer,
        )

    two, four = found(2), found(4).best
    assert (
        two.best.problem.ranks == four.problem.ranks == 1
        and two.best.strategy.name == four.strategy.name
    )
    assert found(4, may_use_fewer=False).best.strategy.name != four.strategy.name
    assert not any(s.startswith("at 4 layers") for s in of_depths(two))


def test_a_forced_strategy_has_not_won_so_no_depth_takes_it_over():
    """GraNNDis wins at 8 layers, and at more: not news about graph parallel."""
    problem = question("2GB/s", layers=8)
    assert search(problem, may_use_fewer=False).best.strategy.name == "granndis"
    found = search(problem, forced=parse("graph_parallel"))
    assert any(s.startswith("twice the bandwidth between servers") for s in sentences(found))
    assert not list(of_depths(found))


def test_close_seconds_are_within_doubt():
    """A runner-up is named as long as it may well be faster, with the chance that it is."""
    found = search(question())
    first, second = found.best, found.others[0]

    def faster_in(share: float) -> list[str]:
        other, draws = replace(second), np.arange(DRAWS)
        factors = np.where(draws < share * DRAWS, 0.9, 1.2)
        vars(other)["drawn_s"] = first.drawn_s * factors
        return explain.within_doubt(replace(found, ranked=[first, other]))

    [line] = faster_in(0.1)
    assert "faster with a chance of 10 %" in line and "gnnplan tune" in line
    assert faster_in(0.04) == []


def test_an_approximation_says_what_was_measured_or_that_it_is_unknown(monkeypatch, tmp_path):
    (tmp_path / "convergence.csv").write_text(
        "study,graph,model,strategy,ranks,seeds,points,two_errors,epochs_ratio\n"
        "a,squirrel,gcnii,gnnpipe(chunks=8),2,10,-0.20,0.50,1.10\nb,physics,sage,pipegcn,2,5,0.10,0.20,\n"
        "b,physics,sage,pipegcn_f(gamma=0.5),2,5,0.30,0.20,\n",
        encoding="utf-8",
    )
    monkeypatch.setattr(files, "QUOTED", tmp_path)
    problem = question()
    assert explain.convergence(parse("graph_parallel"), "gcn") == []
    told = explain.convergence(parse("gnnpipe(stages=2,chunks=4)").settle(problem), "gcnii")[0]
    assert (
        "-0.20 ± 0.50 points" in told
        and "1.10 times the epochs on squirrel with gcnii (2 ranks, 10 seeds)" in told
    )
    assert "unknown times the epochs" in explain.convergence(parse("pipegcn"), "gcn")[0]
    assert "+0.30 ± 0.20 points" in explain.convergence(parse("pipegcn_f(gamma=0.5)"), "gcn")[0]
    # lossy in another way
    for other in ("pipegcn_gf", "pipegcn_f", "gnnpipe(stages=2,shuffle=False)"):
        assert (
            "has not been measured: unknown"
            in explain.convergence(parse(other).settle(problem), "gcn")[0]
        )
    assert (
        "has not been measured: unknown"
        in explain.convergence(parse("granndis(max_hop=1,fanout=15)"), "gcn")[0]
    )


def test_preloading_is_told_by_our_own_prediction():
    """How many rows a server holds and what crosses servers are those of the layouts and of the
    predictions; no time that differs from the epoch's definition is shown."""
    problem = question(layers=3)
    whole = parse("granndis").settle(problem)
    growth, sent = GraNNDis.explain(problem, None)
    layout = problem.layout(3)
    held = sum(layout.rows(rank, 0).size for rank in range(2)) / 2
    assert f"{held / 1500:.2f} times the rows of its part (counted)" in growth
    for strategy in (parse("graph_parallel"), whole):
        nbytes = strategy.predict(problem).bytes_by_link["inter_node"]
        assert f"{strategy}" in sent and show_bytes(nbytes) in sent
    assert "T_p" not in growth + sent


def test_preparation_counts_a_cached_partition_as_when_it_was_made(own_cache):
    problem = question()
    with kept.Stopwatch() as first:
        partition.partition(problem.graph, 7)
    (path,) = own_cache.glob("partitions/*.npz")
    np.savez(path, found=np.load(path)["found"], seconds=12.5)
    with kept.Stopwatch() as again:
        partition.partition(problem.graph, 7)
    assert 0 < first.seconds < 12.5 <= again.seconds
    told = parse("granndis").preparation(problem)
    assert told["features"] > 0


@pytest.mark.slow
def test_a_plan_of_mini_batches_says_where_p3_stops_paying():
    """The formula's break-even at the mean batch's rows, and both sides of it in the table over
    hidden widths."""
    graph = load("synthetic:community?vertices=400&edges=6000&features=64&classes=5&seed=0")
    device = Device(memory=1e12, gemm=1e11, memory_bandwidth=1e11)
    where = Cluster(
        servers=2,
        gpus_per_server=1,
        device=device,
        intra_node=Link(bandwidth=1e10),
        inter_node=Link(bandwidth=1e9),
    )
    problem = Problem(
        graph.stats,
        graph,
        Workload(mode="mini", batch=20, fanout=(4, 3), layers=2, hidden=16),
        where,
    )
    lines = explain.explain(search(problem, may_use_fewer=False), [])
    told = next(line for line in lines if line.startswith("P3 stops paying"))
    facts = [batch.facts(1) for batch in problem.minibatches((0, 1)).first()]
    rows, inputs = sum(f.rows.sum() for f in facts), sum(f.sources.sum() for f in facts)
    even = inputs * 64 / (2 * 2 * rows)
    assert (
        told.startswith(f"P3 stops paying at hidden {even:.0f} (feature rows of 64 numbers;")
        and "16: " in told
        and "512: " in told
    )
    assert any(
        line.startswith("An epoch is ") and "updates of the weights" in line for line in lines
    )
    twice = next(line for line in lines if line.startswith("Sampling each for itself, ranks read "))
    split = problem.minibatches((0, 0), "gsplit", 10).first()
    read = inputs / sum(batch.rows(rank, 0).size for batch in split for rank in (0, 1))
    assert f"ranks read {read:.2f} times" in twice and read > 1


@pytest.mark.parametrize("mode", ["full", "mini"])
def test_what_would_change_a_measured_machines_plan_is_asked_in_one_pass(mode):
    """It ended in a traceback: `gnnplan measure` writes rates by size, and a column of clusters had
    been tried on links and devices of one rate only."""
    graph = load("synthetic:community?vertices=500&edges=4000&features=16&classes=4")
    cluster = read_cluster(str(MEASURED / "2x2_400Mbit.1.yaml"))
    assert cluster.collectives and cluster.device.gather
    workload = Workload(model="gat", layers=2, hidden=16, dropout=0.5, mode=mode, batch=64)
    found = search(Problem(graph.stats, graph, workload, cluster), may_use_fewer=False)
    factors, candidates = np.array([0.25, 4.0]), found.ranked if NIGHT else found.ranked[::9]

    def epoch_s(candidate: Candidate, there: Cluster) -> np.ndarray:
        asked = replace(candidate.problem, cluster=there)
        return np.ravel(candidate.strategy.predict(asked).epoch_s)

    for scaled in (
        scaling.device,
        lambda c, f: scaling.links(c, f, ["inter_node"]),
        lambda c, f: scaling.links(c, f, ["intra_node"]),
    ):
        for candidate in candidates:
            at_once = epoch_s(candidate, scaled(cluster, factors[:, np.newaxis]))
            one_by_one = [epoch_s(candidate, scaled(cluster, factor)) for factor in factors]
            assert np.broadcast_to(at_once, 2) == pytest.approx(np.concatenate(one_by_one))
