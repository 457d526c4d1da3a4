"""What a plan says about itself is so: each sentence against closed forms, or files from here."""

import re
from dataclasses import replace
from functools import cache
from itertools import product

import numpy as np
import pytest
from asked import on, taking
from pairwise import covered

import gnnplan
from gnnplan.planner.cluster.scaling import DRAWS
from gnnplan.planner.cluster.spec import Cluster
from gnnplan.planner.decision import explain
from gnnplan.planner.decision.explain import of_depths, turning_sentences
from gnnplan.planner.decision.search import SearchResult, search
from gnnplan.planner.decision.summary import inputs
from gnnplan.planner.graph import disk_cache, partition
from gnnplan.planner.graph.load import load
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies import GraNNDis, parse
from gnnplan.planner.vocabulary import files
from gnnplan.planner.vocabulary.units import show_bytes, show_count, show_time
from gnnplan.testing.laws import cluster, problem_of


def two_servers(gpus: int, intra_node: float, inter_node: float) -> Cluster:
    rates = {"memory": 24e9, "gemm": 14e12, "memory_bandwidth": 600e9, "launch": 8e-6}
    return cluster(2, gpus, inter_node, intra_node, latency=5e-6, **rates)


@cache
def question(inter_node: float = 1e8, layers: int = 2) -> Problem:
    graph = load("synthetic:community?vertices=3000&edges=60000&features=32&classes=4")
    return problem_of(graph, two_servers(1, 1e10, inter_node), layers=layers)


def test_what_takes_over_really_takes_over():
    """Beyond the bandwidth that a sentence names the other is the fastest, and not before."""
    problem = question(5e9, layers=8)
    every = search(problem, may_use_fewer=False)
    # exact strategies are recommended in doubt, wherever the others take over from each other
    found = replace(every, ranked=[c for c in every.ranked if not c.strategy.exact])
    told = [s for s in turning_sentences(found) if "between servers (" in s]
    assert told

    def first(factor: float) -> str:
        link = problem.cluster.inter_node
        bandwidth = link.bandwidth * factor
        there = on(problem, inter_node=link.model_copy(update={"bandwidth": bandwidth}))
        every = [c.strategy for c in found.ranked]
        return min(every, key=lambda strategy: float(strategy.predict(there).epoch_s)).name

    for sentence in told:
        factor, winner = re.match(r"\w+ ([\d.e+-]+)x .* (\w+)(?:\(.*\))? wins", sentence).groups()
        beyond = 0.9 if sentence.startswith("below") else 1.1
        assert first(float(factor) * beyond) == winner != found.best.strategy.name
        assert first(float(factor) / beyond**2) == found.best.strategy.name


RATES = {None: "are priced at float32's rate, for this device's own is not known"}
RATES |= {0.03: "run at 0.03 of float32's rate here", 16: "run at 16 times float32's rate here"}


@pytest.mark.parametrize(
    ("dtype", "times"), covered(list(product(("bfloat16", "tf32"), RATES)), set)
)
def test_a_plan_says_how_fast_rounded_products_are(dtype, times):
    """The rate is the device's own for that type."""
    problem = question()
    rate = times and problem.cluster.device.gemm * times
    asked = problem.workload.model_copy(update={"dtype": dtype})
    rounded = on(replace(problem, workload=asked), **{f"gemm_{dtype}": rate})
    assert f"{dtype} products {RATES[times]}" in inputs(rounded)
    assert RATES[times] in explain.rounded_rows(rounded)[0]
    whole_s, rounded_s = (search(p).ranked[0].predicted.epoch_s for p in (problem, rounded))
    assert (rounded_s > whole_s) == (times == 0.03)


def test_twice_the_link_helps_where_the_link_binds():
    def gain(problem: Problem) -> int:
        told = turning_sentences(search(problem, may_use_fewer=False))
        sentence = next(s for s in told if s.startswith("twice the bandwidth between servers"))
        return int(re.search(r"([+-]\d+) %", sentence).group(1))

    assert gain(question(1e7)) < -10
    assert gain(question(1e11)) in (-1, 0)


def of_depth(layers: int, inter: float, hidden: int, may_use_fewer: bool = True) -> SearchResult:
    """On two servers of two, between which links are a tenth as fast as in them."""
    graph = load(f"synthetic:community?vertices=1000&edges=10000&features={hidden}&classes=4")
    where = two_servers(2, 10 * inter, inter)
    asked = problem_of(graph, where, layers=layers, hidden=max(hidden, 64))
    return search(asked, may_use_fewer=may_use_fewer)


@pytest.mark.nightly
def test_other_depths_change_the_choice_where_they_do():
    """On each side the nearest depth that changes the family, as separate searches say."""
    at = {layers: of_depth(layers, 1e8, 256, may_use_fewer=False) for layers in (1, 2, 4, 8, 16)}
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
    """The best uses one GPU of four at 2 and 4 layers; on all four another would be ahead."""
    two, four = (of_depth(layers, 1e9, 32) for layers in (2, 4))
    assert two.best.problem.ranks == four.best.problem.ranks == 1
    assert two.best.strategy.name == four.best.strategy.name
    on_all = of_depth(4, 1e9, 32, may_use_fewer=False)
    assert on_all.best.strategy.name != four.best.strategy.name
    assert not any(s.startswith("at 4 layers") for s in of_depths(two))


def test_a_forced_strategy_has_not_won_so_no_depth_takes_it_over():
    """GraNNDis wins at 8 layers, and at more: not news about graph parallel."""
    problem = question(2e9, layers=8)
    assert search(problem, may_use_fewer=False).best.strategy.name == "granndis"
    found = search(problem, forced=parse("graph_parallel"))
    twice = "twice the bandwidth between servers"
    assert any(sentence.startswith(twice) for sentence in turning_sentences(found))
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
    # a plan was in doubt between a strategy and itself, in another place or on other GPUs
    second = replace(first)
    assert faster_in(0.1) == []
    second = replace(first, problem=found.problem)
    assert faster_in(0.1)[0].startswith(f"{first.strategy} on 2 GPUs is")
    assert " on 2 GPUs is " in explain.why_not(found)[-1]
    # all GPUs were worth using for 0 %
    for times, worth in ((1.002, "hardly worth"), (1.2, "are worth")):
        longer = taking(first, times * first.epoch_s)
        assert worth in explain.why_these_gpus(replace(found, ranked=[second, longer]))[0]


def test_one_gpu_alone_takes_as_long_as_a_plan_of_one_gpu():
    """It was without trim, and took 1.7 times as long."""
    asked = {"mode": "full", "per": "epoch", "objective": "time"}
    one = gnnplan.plan("cora", "dgx_a100?servers=1&gpus_per_server=1", **asked)
    two = gnnplan.plan("cora", "dgx_a100?servers=1&gpus_per_server=2", strategy="pipegcn", **asked)
    alone = f"one GPU alone would take {show_time(one.best.epoch_s)} ("
    assert alone in two.document["summary"]["cost"]


TABLE = """study,graph,model,strategy,ranks,seeds,points,two_errors,epochs_ratio
a,squirrel,gcnii,gnnpipe(chunks=8),2,10,-0.20,0.50,1.10
b,physics,sage,pipegcn,2,5,0.10,0.20,
b,physics,sage,pipegcn_f(gamma=0.5),2,5,0.30,0.20,
"""
PIPE = "gnnpipe(stages=2,chunks=4)"
UNKNOWN = "has not been measured: unknown"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (PIPE, "-0.20 ± 0.50 points"),
        (PIPE, "1.10 times the epochs on squirrel with gcnii (2 ranks, 10 seeds)"),
        ("pipegcn", "unknown times the epochs"),
        ("pipegcn_f(gamma=0.5)", "+0.30 ± 0.20 points"),
        # lossy in another way
        ("pipegcn_gf", UNKNOWN),
        ("pipegcn_f", UNKNOWN),
        ("gnnpipe(stages=2,shuffle=False)", UNKNOWN),
        ("granndis(max_hop=1,fanout=15)", UNKNOWN),
    ],
)
def test_an_approximation_says_what_was_measured_or_is_unknown(text, words, monkeypatch, tmp_path):
    (tmp_path / "convergence.csv").write_text(TABLE, encoding="utf-8")
    monkeypatch.setattr(files, "QUOTED", tmp_path)
    assert explain.convergence(parse("graph_parallel"), "gcn") == []
    assert words in explain.convergence(parse(text).settle(question()), "gcnii")[0]


def test_preloading_is_told_by_our_own_prediction():
    """Rows of a server and rows that cross are the layouts'; no time differs from the epoch's."""
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
    problem = replace(question())
    with disk_cache.Stopwatch() as first:
        partition.partition(problem.graph, 7)
    (path,) = own_cache.glob("partitions/*.npz")
    np.savez(path, found=np.load(path)["found"], seconds=12.5)
    with disk_cache.Stopwatch() as again:
        partition.partition(problem.graph, 7)
    assert 0 < first.seconds < 12.5 <= again.seconds
    assert parse("granndis").preparation(problem)["features"] > 0


@pytest.mark.slow
def test_a_plan_of_mini_batches_says_where_p3_stops_paying():
    """The formula's break-even at the mean batch's rows, and both sides of it in the table."""
    graph = load("synthetic:community?vertices=400&edges=6000&features=64&classes=5&seed=0")
    asked = {"model": "sage", "mode": "mini", "batch": 60, "fanout": (4, 3), "hidden": 16}
    problem = problem_of(graph, cluster(2, 1, launch=8e-6), layers=2, **asked)
    lines = explain.explain(search(problem, may_use_fewer=False), [])

    def line(start: str) -> str:
        return next(line for line in lines if line.startswith(start))

    facts = [batch.facts(1) for batch in problem.minibatches((0, 1)).first()]
    rows, inputs = sum(f.rows.sum() for f in facts), sum(f.sources.sum() for f in facts)
    even = inputs * 64 / (2 * 2 * rows)
    told = line(f"P3 stops paying at hidden {even:.0f} (feature rows of 64 numbers;")
    assert "16: " in told and "512: " in told
    assert "updates of the weights" in line("An epoch is ")
    split = problem.minibatches((0, 0), "gsplit", 10).first()
    read = inputs / sum(batch.rows(rank, 0).size for batch in split for rank in (0, 1))
    assert read > 1
    assert f"ranks read {read:.2f} times" in line("Sampling each for itself, ranks read ")
