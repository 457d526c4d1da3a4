"""What is not known for sure: ranges, clusters drawn from them. And what a plan says of that and
of all else is so: each sentence against closed forms, or files from here."""

import re
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from asked import changed, on, taking
from hypothesis import example, given
from hypothesis import strategies as st
from nightly import NIGHT, at_night, covered
from pydantic import ValidationError

import gnnplan
from gnnplan.planner.cluster import scaling as doubt
from gnnplan.planner.cluster.scaling import DRAWS
from gnnplan.planner.cluster.spec import PRESETS, Cluster
from gnnplan.planner.decision import explain, plan
from gnnplan.planner.decision.candidate import outlooks, regrets, settled_regret
from gnnplan.planner.decision.explain import of_depths, turning_sentences
from gnnplan.planner.decision.search import SearchResult, search
from gnnplan.planner.decision.summary import inputs
from gnnplan.planner.gnn.workload import Workload
from gnnplan.planner.graph import disk_cache, partition
from gnnplan.planner.graph.load import load
from gnnplan.planner.problem.inputs import apply_overrides, read_cluster
from gnnplan.planner.problem.problem import Problem, with_ranks
from gnnplan.planner.strategies import GraNNDis, parse
from gnnplan.planner.vocabulary import files
from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.planner.vocabulary.units import show_bytes, show_count, show_time
from gnnplan.testing.laws import GRAPHS, cluster, problem_of

MEASURED = Path(__file__).resolve().parents[2] / "traces" / "measured" / "2x2_400Mbit.3.yaml"


def reddit(cluster: Cluster, **workload: object) -> Problem:
    asked = {"model": "gcn", "layers": 3, "hidden": 128} | workload
    return Problem(load("reddit"), None, Workload(**asked), cluster)


def preset(name: str) -> Cluster:
    return read_cluster(str(MEASURED if name == "measured" else PRESETS / f"{name}.yaml"))


def overridden(cluster: Cluster, setting: str) -> Cluster:
    return apply_overrides(cluster, Workload(), [setting])[0]


def test_a_constant_is_as_doubtful_as_its_source():
    """Measured numbers are known best, datasheets are rarely reached, a what-if is certain."""
    a100 = preset("dgx_a100")
    assert doubt.range_of(preset("measured"), "device.gemm") == doubt.RANGES["measured"]
    assert doubt.range_of(a100, "device.gemm") == doubt.RANGES["datasheet"]
    assert doubt.range_of(a100, "device.launch") == doubt.RANGES["assumed"]
    drawn = doubt.drawn(a100).device  # in bfloat16 too
    assert drawn.gemm_bfloat16 == pytest.approx(16 * drawn.gemm)
    # rates of samplers were certain: what a cluster's file did not say was not drawn
    cluster = preset("l4_box")
    assert "host_rates" not in cluster.provenance
    rates = np.ravel(doubt.drawn(cluster).host_rates["draw"]) / cluster.host_rates["draw"]
    low, high = doubt.UNSAID
    assert np.quantile(rates, [0.1, 0.9]) == pytest.approx([low, high], rel=0.02)


@pytest.mark.parametrize(
    ("given", "constant"),
    [
        ("device.gemm=5TFLOP/s", "device.gemm"),
        ("inter_node.bandwidth=3GB/s", "inter_node.bandwidth"),
        ("collectives.exchange.inter_node.bandwidth=3GB/s", "collectives.exchange.inter_node"),
        ("host_rates.draw=1e7", "host_rates"),
    ],
)
def test_what_is_set_by_hand_is_in_no_doubt(given, constant):
    """A what-if is about this number, whatever range `measure` has found for the one before."""
    measured = changed(preset("l4_box"), ranges={constant: (0.5, 2.0)})
    asked = overridden(measured, given)
    assert doubt.range_of(measured, constant) == (0.5, 2.0)
    assert doubt.range_of(asked, constant) == (1.0, 1.0) and constant not in doubt.factors(asked)


@given(st.floats(0.05, 1.0), st.floats(1.0, 20.0))
@example(1 - 2**-53, 1.0)
def test_a_tenth_of_the_draws_is_below_a_range_and_a_tenth_above(low, high):
    cluster = changed(preset("l4_box"), ranges={"device.gemm": (low, high)})
    factor = doubt.factors(cluster).get("device.gemm", np.ones(doubt.DRAWS))
    margin = 1 / doubt.DRAWS
    # of a range a few roundings wide several draws are its very end
    assert np.mean(factor < low) <= 0.1 * (low < 1) + margin
    assert np.mean(factor > high) <= 0.1 * (high > 1) + margin
    assert min(np.mean(factor <= low), np.mean(factor >= high)) >= 0.1 - margin
    assert np.median(factor) == pytest.approx(1.0, rel=0.05 * max(1 / low, high))


STRATEGIES = """
    graph_parallel(narrow=True,buckets=2) graph_parallel(bits=2) pipegcn pipegcn_gf(buckets=2) bns
    gnnpipe(stages=2) gnnpipe(stages=1,chunks=2,checkpoint=True) granndis granndis(batches=2)
    granndis(max_hop=1,fanout=5) offload feature_parallel tensor3d
    data_parallel(prefetch=1) data_parallel(cache='1MB',shared_cache=True,structure='spread')
    gsplit gsplit(group='all',prefetch=1) p3 p3(pipelined=True)
"""
OF_EDGES = " dnp snp"  # which statistics do not have


@pytest.mark.parametrize("name", ["dgx_a100", "measured", at_night("p3_p100"), at_night("l4_box")])
def test_a_draw_is_a_cluster_of_these_constants(name):
    """Many clusters are priced at once; each alone gives the same epoch and parts of it. `gnnplan
    measure` writes rates by size, of which asking so once ended in a traceback. By day every second
    strategy on a cluster, the others on the next."""
    by_statistics = name in ("dgx_a100", "p3_p100")
    texts = (STRATEGIES + OF_EDGES * (not by_statistics)).split()
    graph = load("reddit") if by_statistics else GRAPHS[1]
    model, draws = "gcn" if by_statistics else "sage", doubt.drawn(preset(name))
    for text in texts if NIGHT else texts[by_statistics::2]:
        asked = {"model": model, "mode": parse(text).mode, "layers": 3, "batch": 60, "dropout": 0.5}
        problem = problem_of(graph, with_ranks(preset(name), 4), **asked)
        settled = parse(text).settle(problem)
        settled.check(problem)
        together = settled.predict(replace(problem, cluster=with_ranks(draws, 4)))
        for draw in (0, doubt.DRAWS - 1):
            there = one(with_ranks(draws, 4), draw)
            alone = settled.predict(replace(problem, cluster=there))
            assert (together.bytes, together.bytes_by_link) == (alone.bytes, alone.bytes_by_link)
            assert together.by_op.keys() == alone.by_op.keys()
            close = {"rel": 1e-9, "abs": 1e-9 * float(alone.epoch_s)}
            for found, told in (
                *((getattr(together, part), getattr(alone, part)) for part in PARTS),
                *((seconds, alone.by_op[op]) for op, seconds in together.by_op.items()),
            ):
                # what depends on no constant may stay a scalar
                of_draw = np.ravel(found)[draw] if np.ndim(found) == 2 else found
                assert np.max(of_draw) == pytest.approx(np.max(told), **close), text


PARTS = ("epoch_s", "compute_s", "comm_s", "bubble_s")
TIMES = ("launch", "latency", "overlap_tax")  # more of these takes longer; all others are rates


@pytest.mark.parametrize(
    ("name", "moved"),
    [("dgx_a100", 10), at_night("p3_p100", 8), at_night("l4_box", 6), ("measured", 9)],
)
def test_a_better_constant_is_never_slower(name, moved):
    """Each constant was drawn in the other direction once, and no test noticed."""
    certain = {constant: (1.0, 1.0) for constant in doubt.constants(preset(name))}
    moving = set()
    for constant in certain:
        doubted = changed(preset(name), ranges={**certain, constant: (0.5, 2.0)})
        draws, factors = doubt.drawn(doubted), doubt.factors(doubted)
        assert list(factors) == [constant]
        better = np.argsort(factors[constant])
        better = better[::-1] if constant.endswith(TIMES) else better
        for text in ("graph_parallel", "pipegcn", "gnnpipe(stages=2)", "offload", "data_parallel"):
            problem = reddit(doubted, model="sage", mode=parse(text).mode)
            strategy = parse(text).settle(problem)
            epochs = np.ravel(strategy.predict(replace(problem, cluster=draws)).epoch_s)
            if epochs.size > 1 and np.ptp(epochs) > 1e-12:
                assert np.all(np.diff(epochs[better]) < 1e-12), (constant, text)
                moving.add(constant)
    assert len(moving) >= moved, moving


def test_a_drawn_device_has_better_rates_and_longer_times_together():
    """A number that another constant scales is scaled as that one, not against it."""
    cluster = changed(preset("measured"), row_latency=1e-6)
    draws, factors = doubt.drawn(cluster), doubt.factors(cluster)
    gather = factors["device.gather"]
    assert np.allclose(np.ravel(draws.device.row_latency) * gather, 1e-6)
    for work, rate in cluster.host_rates.items():
        assert np.allclose(np.ravel(draws.host_rates[work]), rate * factors["host_rates"])
    for name, link in cluster.collectives.items():
        speed = factors[f"collectives.{name}"]
        assert np.allclose(np.ravel(draws.collectives[name].latency) * speed, link.latency)


def one(draws: Cluster, index: int) -> Cluster:
    """One of several clusters: each number instead of its column."""

    def pick(value: object) -> object:
        if isinstance(value, np.ndarray):
            return float(value[index, 0])
        if isinstance(value, dict):
            return {key: pick(inner) for key, inner in value.items()}
        if hasattr(value, "model_copy"):
            fields = type(value).model_fields
            return value.model_copy(update={f: pick(getattr(value, f)) for f in fields})
        return value

    return pick(draws)


@pytest.mark.parametrize(
    ("ranges", "told"),
    [
        ({"device.gemm": [1.5, 0.5]}, "factors low <= 1 <= high around the value (low: 1.5"),
        ({"device.gemm": [1.1, 1.5]}, "as [0.8, 1.25]"),
        ({"device.gem": [0.5, 1.5]}, "no constant 'device.gem'; did you mean device.gemm?"),
        ({"device.gemm": [0.0, 1.5]}, "greater than 0"),
        ({"device.gemm": [0.5]}, "Field required"),
    ],
)
def test_ranges_that_are_none_are_refused(ranges, told):
    with pytest.raises(ValidationError) as error:
        Cluster.model_validate({**preset("l4_box").model_dump(), "ranges": ranges})
    assert told in str(error.value)
    with pytest.raises(SpecError):
        overridden(preset("l4_box"), "ranges.device=[2, 1]")


def test_regret_and_chance_are_those_of_the_draws():
    drawn_s = np.array([[1.0, 1.0, 1.0, 1.0], [0.5, 2.0, 2.0, 2.0], [4.0, 4.0, 4.0, 0.5]])

    def looks(*predicted_s):
        pairs = zip(predicted_s, drawn_s, strict=True)
        return outlooks([SimpleNamespace(epoch_s=s, drawn_s=of, drawn=of) for s, of in pairs])

    first, second, third = looks(1.0, 2.0, 3.0)
    assert third.epoch_low_s < 3.0 < third.epoch_high_s
    assert looks(1.0, 2.0, 5.0)[2].epoch_high_s == 5.0  # where no draw is
    assert [o.chance_fastest for o in (first, second, third)] == [0.5, 0.25, 0.25]
    assert first.expected_regret == pytest.approx((1 + 0 + 0 + 1) / 4)
    assert second.expected_regret == pytest.approx((0 + 1 + 1 + 3) / 4)


def test_a_constant_that_decides_leaves_no_regret_and_one_that_tells_nothing_all_of_it():
    factor = doubt.normals("a constant that decides")
    other = doubt.normals("another")
    drawn_s = np.stack([np.ones(doubt.DRAWS), np.exp(factor)])
    now = regrets(drawn_s).mean(axis=1).min()
    assert settled_regret(drawn_s, factor) < 0.2 * now
    assert settled_regret(drawn_s, other) == pytest.approx(now, rel=0.15)


def test_every_answer_of_a_plan_says_how_sure_it_is():
    problem = reddit(with_ranks(preset("dgx_a100"), 4))
    found = search(problem)
    document = plan.make(found)
    answers = [document["best"], *document["alternatives"]]
    assert len(answers) > 5
    for answer in answers:
        assert answer["epoch_s"] == answer["predicted"]["epoch_s"]
        assert answer["epoch_low_s"] < answer["epoch_s"] < answer["epoch_high_s"]
        assert answer["expected_regret"] >= 0
    assert sum(answer["chance_fastest"] for answer in answers) == pytest.approx(1)
    again = search(problem).ranked  # no luck in it
    assert [str(c.strategy) for c in again] == [str(c.strategy) for c in found.ranked]
    assert all((c.drawn_s == o.drawn_s).all() for c, o in zip(again, found.ranked, strict=True))


def test_a_measurement_is_named_that_would_settle_the_choice():
    """The link between servers decides between strategies that send much and little over it."""
    doubted = {"inter_node.bandwidth": (0.05, 1.1)}
    found = search(reddit(changed(preset("dgx_a100"), ranges=doubted)))
    assert found.settled and found.settled.constant == "inter_node.bandwidth"
    assert found.settled.regret < found.certainty.expected_regret / 1.5
    said = plan.make(found)["summary"]["sure"]
    assert "slower than the fastest (" in said and "if inter_node.bandwidth were measured)" in said


def test_a_certain_choice_has_no_regret():
    """It said "another may be better by 0.0 % on average"."""
    certain = search(reddit(preset("granndis_2080ti_1gbe")))
    assert certain.certainty.expected_regret == 0 and len(certain.rivals) > 1
    said = plan.make(certain)["summary"]["sure"]
    sure = r"among exact strategies the fastest with a chance of 100 % \(among all \d+ %\)"
    assert re.fullmatch(sure, said)


def test_gpus_of_which_nothing_is_known_are_doubted_more():
    """A datasheet says less of how long an epoch takes than a measurement does."""
    plain = preset("dgx_a100")
    measured = dict.fromkeys(doubt.constants(plain), "measured 2026-11-27")
    widths = [
        np.log(search(reddit(cluster), forced=parse("graph_parallel")).best.drawn_s).std()
        for cluster in (plain, changed(plain, provenance=measured))
    ]
    assert widths[0] > 1.5 * widths[1]


def test_what_is_certain_does_not_vary():
    """With every constant set by hand only the misses of predictions are left."""
    cluster = preset("dgx_a100")
    certain = {name: (1.0, 1.0) for name in doubt.constants(cluster)}
    problem = reddit(changed(cluster, ranges=certain))
    assert doubt.factors(problem.cluster) == {}
    found = search(problem, forced=parse("graph_parallel"))
    plain = float(found.best.predicted.epoch_s)
    assert np.median(found.best.drawn_s) == pytest.approx(plain, rel=0.05)
    assert found.settled is None and found.outlooks[0].chance_fastest == 1.0


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
    assert of_depth(4, 1e9, 32, may_use_fewer=False).best.strategy.name != four.best.strategy.name
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
