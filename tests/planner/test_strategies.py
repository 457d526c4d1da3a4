"""Laws over every family: closed form, schedule and memory tell one story; of strategies from another
package; and laws of recommendations, held over drawn what-ifs: a graph, a GNN and a cluster, and a
change of the cluster for the better. Their graphs are known by statistics, so that each question
takes a second."""

import sys
from collections.abc import Iterator
from dataclasses import fields, replace
from functools import cache, partial
from itertools import combinations, islice, pairwise
from pathlib import Path
from random import Random
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

import numpy as np
import pytest
import torch
from asked import by_statistics, epochs_s, on, suiting, uniform
from hypothesis import given, note, settings
from hypothesis import strategies as st
from nightly import NIGHT, at_night, covered, examples

import gnnplan
from gnnplan.executor.ranks.rank import Rank
from gnnplan.executor.train import train
from gnnplan.planner import strategies
from gnnplan.planner import strategies as known
from gnnplan.planner.cluster.spec import Cluster
from gnnplan.planner.decision.candidate import SURE_SHARE, placed
from gnnplan.planner.decision.choices import ModeComparison, compare
from gnnplan.planner.decision.explain import explain
from gnnplan.planner.decision.objective import MODES, Objective, epochs_by_mode
from gnnplan.planner.decision.search import SearchResult, families, least_of, search
from gnnplan.planner.gnn.model import COMMUNICATOR
from gnnplan.planner.gnn.workload import Workload
from gnnplan.planner.graph.load import load
from gnnplan.planner.ownership.minibatch import Batches
from gnnplan.planner.problem.inputs import apply_overrides, read_cluster
from gnnplan.planner.problem.problem import Cache, Problem
from gnnplan.planner.strategies import FAMILIES, Strategy, parse
from gnnplan.planner.strategies.gnnpipe import balance
from gnnplan.planner.vocabulary.errors import GnnplanError, Infeasible, SpecError
from gnnplan.planner.vocabulary.schedule import Collective, Send
from gnnplan.simulator.player import play
from gnnplan.testing import laws

STEPS = 4

FORCED = """
graph_parallel graph_parallel(staleness=1) graph_parallel(staleness=1,smoothing='gf',gamma=0.5)
graph_parallel(narrow=True) graph_parallel(narrow=True,buckets=3) graph_parallel(bits='adaptive')
graph_parallel(staleness=1,buckets=4) graph_parallel(narrow=True,buckets=3,bits=2)
graph_parallel(staleness=1,narrow=True,bits=8) granndis granndis(depth=0) granndis(depth=0,bits=4)
granndis(depth=1) granndis(depth=1,buckets=2) granndis(narrow=True) granndis(batches=3)
granndis(max_hop=2,fanout=2,degrees='local',batches=2) offload(chunks=4) gnnpipe gnnpipe(chunks=1)
gnnpipe(chunks=3,shuffle=False) gnnpipe(chunks=7,historical_gradients=True,period=1)
gnnpipe(stages=1,chunks=3) gnnpipe(stages=2,chunks=5)
"""
variants = partial(suiting, forced=FORCED)


def some(law_examples: int = 12) -> Any:
    return settings(max_examples=examples(law_examples))


@pytest.mark.slow
@given(
    laws.problems(),
    st.sampled_from(["intra", "inter", "latency", "gemm", "memory_bandwidth", "launch"]),
    st.floats(1.0, 50.0),
)
@some(10)  # by day two, of which hypothesis takes the simplest first
def test_every_strategy_keeps_all_laws(problem, what, factor):
    faster = laws.with_better(problem, what, factor)
    for strategy in variants(problem):
        told = laws.StrategyEvaluation(problem, faster, strategy)
        for law in laws.LAWS:
            note(f"{law.__name__}: {strategy}")
            law(told)


@pytest.mark.parametrize(
    ("where", "bound"),
    [
        (laws.cluster(2, 3, intra=1e7, inter=4.2e9), 0.02),
        (laws.cluster(2, 3, intra=1e8, inter=1e10), 0.02),
        (laws.cluster(4, 1, inter=1e7), 0.15),
    ],
)
def test_groups_that_sit_alike_do_not_fill_the_same_ports(where, bound):
    """Two stages of members that sit alike, so their exchanges take equally long; but those of
    stage 1 leave by its own GPUs and cards. Charged to stage 0's ports they seemed to pass them
    twice: where these were slow, and so the bound, up to 40 % too slow."""
    problem = laws.problem_of(laws.GRAPHS[0], where, model="gcnii", layers=5, hidden=64)
    predicted, played = epochs_s(problem, "gnnpipe(stages=2,chunks=8)", 6)
    assert predicted == pytest.approx(played, rel=bound)


@pytest.mark.slow
@given(laws.problems())
@some(6)
def test_bytes_of_the_schedule_are_those_of_predict_where_only_statistics_are_known(problem):
    problem = by_statistics(problem)
    chosen = slice(None) if NIGHT else slice(problem.ranks % 3, None, 3)
    for strategy in list(variants(problem))[chosen]:
        note(str(strategy))
        told = laws.StrategyEvaluation(problem, problem, strategy)
        laws.bytes_of_the_schedule_are_those_of_predict(told)


@given(laws.problems())
@some(8)
def test_stale_moves_the_same_bytes_and_is_never_slower(problem):
    """Without contention: a tax beside a transfer is a price that synchronous steps do not pay."""
    problem, told = on(problem, overlap_tax=0.0), []
    for strategy in (known.GraphParallel(), known.GraphParallel(staleness=1)):
        p, schedule = strategy.predict(problem), strategy.schedule(problem, STEPS)
        bytes_ = p.bytes, p.bytes_by_link, laws.steady_bytes(schedule)
        seconds = float(p.epoch_s), play(schedule, problem.cost, contention=False).epoch_s(1)
        told.append((bytes_, seconds))
    (sent, fresh), (again, stale) = told
    assert sent == again
    assert all(late <= now * (1 + laws.ROUND) for late, now in zip(stale, fresh, strict=True))


@given(laws.problems())
@some()
def test_one_rank_sends_nothing(problem):
    alone = on(problem, servers=1, gpus_per_server=1)
    for strategy in variants(alone):
        p, schedule = strategy.predict(alone), strategy.schedule(alone, 2)
        assert (p.bytes, p.bytes_by_link, p.bytes_total, p.setup_bytes) == ({}, {}, 0, 0)
        of_copies = (float(s) for op, s in p.by_op.items() if op.split(":")[0] in ("load", "store"))
        copied_s, close = sum(of_copies), laws.ROUND * float(p.epoch_s)
        if strategy.family == "offload" and alone.cluster.device.kind == "cuda":
            assert -close <= float(p.comm_s) <= copied_s + close  # beside computation
        else:
            assert float(p.comm_s) == pytest.approx(copied_s, abs=close)
        tasks = schedule.tasks + schedule.setup
        assert not [task for task in tasks if isinstance(task.work, (Send, Collective))]
    offered = [family for family in families(alone) if list(family.candidates(alone))]
    assert [family.family for family in offered] == ["graph_parallel"]


@pytest.mark.parametrize("name", ["p3(pipelined=True)", "p3", "data_parallel", "gsplit"])
def test_a_program_makes_no_step_that_nobody_asks_for(name, monkeypatch):
    """Two steps made the operations of all 64 batches: 90 ms in place of 7."""
    mini = {"mode": "mini", "batch": 8, "fanout": (2, 2), "layers": 2}
    problem = laws.problem_of(laws.GRAPHS[0], laws.cluster(2, 2), **mini)
    strategy = parse(name).settle(problem)
    made: list[int] = []
    at = Batches.at
    monkeypatch.setattr(Batches, "at", lambda self, step: made.append(step) or at(self, step))
    strategy.schedule(problem, 2)
    assert set(made) == {0, 1}
    assert len(list(strategy.program(problem).known())) == min(strategy.steps(problem), 64) > 4


def test_pipelines_on_other_clusters_share_a_program():
    """It says what stages do, not how long that takes."""
    problem = laws.problem_of(laws.GRAPHS[0], laws.cluster(2, 4), layers=4)
    others = [
        replace(problem, cluster=laws.cluster(2, 4, inter=1e6, gemm=1e9)),
        problem.placed((7, 6, 5, 4, 3, 2, 1, 0)),
    ]
    strategy = parse("gnnpipe(stages=2,layers_per_stage=(2,2))").settle(problem)
    program = strategy.program(problem)
    for other in others:
        assert strategy.program(other) is program
        apart = replace(other, cache=Cache())
        assert strategy.schedule(apart, 2).tasks == strategy.schedule(problem, 2).tasks


@given(st.lists(st.integers(1, 50) | st.floats(0.01, 50), min_size=1, max_size=9), st.data())
@some(150)
def test_no_other_cut_has_a_faster_slowest_stage(seconds, data):
    stages = data.draw(st.integers(1, len(seconds)))
    best = min(
        max(sum(seconds[a:b]) for a, b in pairwise((0, *inner, len(seconds))))
        for inner in combinations(range(1, len(seconds)), stages - 1)
    )
    cut = balance(seconds, stages)
    ends = np.cumsum([0, *cut]).tolist()
    assert len(cut) == stages and min(cut) >= 1 and ends[-1] == len(seconds)
    assert max(sum(seconds[a:b]) for a, b in pairwise(ends)) <= best * (1 + 1e-6)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_wide_first_layer_gets_company_less_often(ranks):
    """2,000 features into 64 hidden, six layers: by count 3 + 3, by cost fewer in the first."""
    graph = load("synthetic:community?vertices=400&edges=6000&features=2000&classes=5")
    where = laws.cluster(1, ranks, intra=1e12, memory_bandwidth=1e12)
    problem = laws.problem_of(graph, where, layers=6, dropout=0.5)
    by_cost, by_count = (
        known.GNNPipe(2, 8, layers_per_stage=c).settle(problem) for c in (None, (3, 3))
    )
    assert by_cost.layers_per_stage[0] < 3
    assert "layers_per_stage" in str(by_cost) and parse(str(by_cost)) == by_cost
    of_cost, of_count = (epochs_s(problem, str(strategy), 4) for strategy in (by_cost, by_count))
    assert all(cost < 0.95 * count for cost, count in zip(of_cost, of_count, strict=True))


RULES = [rule for family in FAMILIES for rule in family.allowed.values()]
WORDS = [*(word for rule in RULES if isinstance(rule, dict) for word in rule), "adaptive"]
VALUES: dict[type, st.SearchStrategy[Any]] = {int: st.integers(0, 10**31), bool: st.booleans()}
VALUES |= {float: st.floats(0, 1), str: st.sampled_from(WORDS), NoneType: st.none()}
VALUES |= {tuple: st.lists(st.integers(0, 9)).map(tuple)}


def knobs_of(family: type[Strategy]) -> st.SearchStrategy[Strategy]:
    """The family with any values of its knobs' types."""
    hints = get_type_hints(family)

    def any_of(hint: Any) -> st.SearchStrategy[Any]:
        kinds = get_args(hint) if isinstance(hint, UnionType) else [hint]
        return st.one_of(*(VALUES[get_origin(kind) or kind] for kind in kinds))

    return st.builds(family, **{field.name: any_of(hints[field.name]) for field in fields(family)})


@pytest.mark.parametrize("family", FAMILIES)
@given(data=st.data())
def test_knobs_survive_words_and_json(family, data):
    laws.must_survive_words_and_json(data.draw(knobs_of(family)))


def test_sizes_are_written_as_people_write_them():
    """A plan once said gsplit(cache=56862697472)."""
    sizes = {
        10**6: "'1MB'",
        2 * 10**12: "'2TB'",
        999_999: "999999",
        56_862_697_472: "'56.862697472GB'",
    }
    for nbytes, written in sizes.items():
        assert str(known.GSplit(cache=nbytes)) == f"gsplit(cache={written})"


@pytest.mark.parametrize("name", known.names())
def test_a_published_name_is_its_preset(name):
    strategy = parse(name)
    assert strategy == parse(f" {name}() ") == known.named(name, {}) and strategy.name == name
    assert strategy == parse(name.upper().replace("_", "-"))
    assert type(strategy) in FAMILIES


NO_STRATEGY = r"""
gnnpip -> there is no strategy 'gnnpip'; did you mean gnnpipe\? Allowed: graph_parallel, pipegcn, pipegcn_f
gnnpipe(stage=4) -> gnnpipe has no knob 'stage'; its knobs are stages, chunks, shuffle, historical_gradients, period
gnnpipe(stages=4.0) -> gnnpipe: stages is int \| None, not 4.0
gnnpipe(stages='4') -> gnnpipe: stages is int \| None, not '4'
gnnpipe(stages=True) -> gnnpipe: stages is int \| None, not True
gnnpipe(shuffle=1) -> gnnpipe: shuffle is bool, not 1
gnnpipe(period=None) -> gnnpipe: period is int, not None
pipegcn(staleness=None) -> pipegcn: staleness is int, not None
granndis(depth=[1]) -> granndis: depth is int \| None, not \[1\]
gnnpipe(layers_per_stage='4y8') -> layers_per_stage is a list such as
gnnpipe(4) -> is not a family with knobs; write it as
gnnpipe(stages=4 -> is not a family with knobs
gnnpipe(stages=x) -> is not a family with knobs
gnnpipe(**{'stages': 4}) -> is not a family with knobs
gnnpipe(stages=4, stages=2) -> is not a family with knobs
gnnpipe(stages=__import__('os').getpid()) -> is not a family with knobs
 -> is not a family with knobs
"""
ABSURD = ["(" * 10_000, "-" * 100_000 + "1", "\0", "x(a=" + "[" * 150 + "]" * 150 + ")"]
ABSURD += ["x(a={[]: 1})", "x(a=-'b')", "lambda: 0", "x.y(a=1)", "é(a=1)", "x(a=10**10**10)"]
SIZES = ("2.5", "True", "None", "'2'", "'2GB/s'", "'2s'", "'1e999GB'", "'1.2.3GB'")
A_SIZE = "gsplit: cache is a size such as '2GB' or a number of bytes, not"


@pytest.mark.parametrize(
    "row",
    [
        *NO_STRATEGY.strip("\n").splitlines(),
        *(f"gsplit(cache={size}) -> {A_SIZE} {size}" for size in SIZES),
        *(f"{text} -> is not a family|there is no strategy" for text in ABSURD),
    ],
    ids=lambda row: row[:60],
)
def test_words_that_make_no_strategy(row):
    text, words = row.split(" -> ")
    with pytest.raises(SpecError, match=words):
        parse(text)


@given(laws.problems())
@some()
def test_candidates_suit_their_job_and_differ(problem):
    for family in families(problem):
        settled = [s.settle(problem) for s in family.candidates(problem)]
        assert len(set(settled)) == len(settled)
        # which users ask for, and which is for graphs that fit on no GPU otherwise
        assert settled or family.absent(problem) or family in (known.BNS, known.Offload)
        for strategy in settled:
            assert strategy.settle(problem) == strategy
            places = [(place["rank"], place["server"]) for place in strategy.placement(problem)]
            assert places == list(enumerate(problem.servers))


UNIFORM = {share: uniform(2000, share * 2000, 40, 4) for share in (8, 40)}  # mean degree


@pytest.mark.slow
@pytest.mark.parametrize(
    ("degree", "servers", "gpus", "model"),
    covered(
        [
            (degree, *place, model)
            for degree in UNIFORM
            for place in ((1, 4), (2, 1), (2, 3), (4, 2))
            for model in ("gcn", "gcnii")
        ],
        lambda row: {row[0], row[1:3], (row[0], row[3])},
    ),
)
def test_estimates_resemble_a_measured_random_graph(degree, servers, gpus, model):
    """A random cut of a uniform graph is what expected_halo_rows expects, so rows differ by chance
    only (a few per cent of some hundred) and 10 % is generous. A server's region is still cut over
    its GPUs by METIS, which finds fewer halo rows than a random cut even where there is nothing to
    find, so what depends on that stays within a factor of 2 (not at a mean degree of 2 or 3, where
    a random graph is nearly a forest)."""
    asked = {"method": "random", "model": model, "layers": 4, "hidden": 32}
    measured, estimated = (
        laws.problem_of(graph, laws.cluster(servers, gpus), **asked)
        for graph in (UNIFORM[degree], laws.statistics(UNIFORM[degree]))
    )
    by_day = slice(servers * gpus % 5, None, 5)  # shared out
    for strategy in list(variants(estimated))[slice(None) if NIGHT else by_day]:
        within = 0.1 if strategy.family == "graph_parallel" or gpus == 1 else 1.0
        pairs = zip(numbers(strategy, measured), numbers(strategy, estimated), strict=True)
        for real, guess in pairs:
            assert np.isfinite(guess) and (guess > 0) == (real > 0)
            assert real / (1 + within) <= guess <= real * (1 + within), (strategy, real, guess)


def numbers(strategy: Strategy, problem: Problem) -> list[float]:
    p, memory = strategy.predict(problem), strategy.memory(problem)
    most = sum(memory.values()).max()
    return [float(p.epoch_s), float(p.compute_s), p.bytes_total, p.setup_bytes, most]


@pytest.mark.parametrize("edges", [3_000, 30_000, 300_000])
def test_an_estimated_rank_reads_no_more_than_its_server_has(edges):
    stats = replace(laws.GRAPHS[0].stats, vertices=3_000, edges=edges, known=False)
    layout = laws.problem_of(stats, laws.cluster(3, 2), layers=4).layout(2)
    for layer in (1, 2, 3):  # recomputed
        facts = layout.facts(layer)
        has = (facts.sources - facts.sends.sum(0)).reshape(3, 2).sum(1).repeat(2)
        assert (facts.sources <= has + 1).all()  # whole rows: one by rounding


MINI = {"mode": "mini", "batch": 32, "fanout": (3, 3, 3, 3)}


@pytest.mark.parametrize(
    ("text", "servers", "gpus", "communicators"),
    [
        ("graph_parallel", 1, 1, [0]),
        ("graph_parallel", 2, 2, [2, 2, 2, 2]),
        ("gnnpipe(stages=2)", 1, 2, [2, 2]),
        ("gnnpipe(stages=4)", 2, 2, [3, 4, 4, 3]),
        ("gnnpipe(stages=2)", 2, 2, [4, 4, 4, 4]),
        ("p3", 1, 2, [2, 2]),
        ("p3", 2, 2, [4, 4, 4, 4]),
        ("tensor3d(x=2,y=2,z=1)", 2, 2, [4, 4, 4, 4]),
    ],
)
def test_nccl_has_buffers_of_its_own(text, servers, gpus, communicators):
    """For each communicator: sums, exchanges, a stage's neighbours, a grid's axes. Not Gloo."""
    strategy = parse(text)
    more = MINI if strategy.mode == "mini" else {}
    problem = laws.problem_of(laws.GRAPHS[0], laws.cluster(servers, gpus), layers=4, **more)
    use = strategy.settle(problem).memory(problem).get("communicators", np.zeros(1))
    assert (use / COMMUNICATOR).tolist() == communicators
    on_cpu = on(problem, kind="cpu")
    assert "communicators" not in strategy.settle(on_cpu).memory(on_cpu)


EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
PLANNER = """
from __future__ import annotations
from dataclasses import dataclass
from typing import ClassVar, Self
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies import Example, GraphParallel

@dataclass(frozen=True)
class Echo(GraphParallel):
    family: ClassVar[str] = "echo"
    names: ClassVar = {"loud_echo": {"narrow": True}}
    executor: ClassVar[str] = "echo_executor"
    examples: ClassVar = (Example("echo"),)

    @classmethod
    def explain(cls, problem: Problem, fastest: Self | None) -> list[str]:
        return [f"An echo of {problem.stats.vertices} vertices: {fastest}"]
"""
EXECUTOR = """
from gnnplan.executor.strategies.graph_parallel import open_worker as plainly

opened = []

def open_worker(rank, problem, strategy, first):
    opened.append(str(strategy))
    return plainly(rank, problem, strategy, first)
"""


def installed(
    folder: Path, patch: pytest.MonkeyPatch, family: str, point: str, **modules: str
) -> Iterator[Path]:
    """A folder of installed packages, with one of these modules that adds a family."""
    for name, text in modules.items():
        (folder / f"{name}.py").write_text(text)
    about = folder / f"{family}-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {family}\nVersion: 1\n")
    (about / "entry_points.txt").write_text(f"[gnnplan.strategies]\n{family} = {point}\n")
    patch.syspath_prepend(folder)
    strategies.families.cache_clear()
    yield folder
    strategies.families.cache_clear()
    for name in modules:
        sys.modules.pop(name, None)


@pytest.fixture
def install(tmp_path, monkeypatch):
    """The package `echo`."""
    modules = {"echo_planner": PLANNER, "echo_executor": EXECUTOR}
    yield from installed(tmp_path, monkeypatch, "echo", "echo_planner:Echo", **modules)


@pytest.fixture
def delayed(tmp_path, monkeypatch):
    """The package of examples/delayed, whose epochs differ."""
    text = (EXAMPLES / "delayed" / "gnnplan_delayed.py").read_text(encoding="utf-8")
    point = "gnnplan_delayed:Delayed"
    yield from installed(tmp_path, monkeypatch, "delayed", point, gnnplan_delayed=text)


def problem(ranks: int) -> Problem:
    graph = load("synthetic:community?vertices=200&edges=1200&features=8&classes=3&seed=0")
    return laws.problem_of(graph, laws.cluster(1, ranks, intra=1e9, kind="cpu"), layers=2, hidden=8)


def test_it_is_a_candidate_that_explains_itself_and_trains(install):
    """Only families that `decision` knew by name could say anything of their own."""
    found = search(problem(2))
    told = explain(found, turning_points=[])
    assert sum(line.startswith("An echo of 200 vertices: echo") for line in told) == 1
    names = vars(sys.modules[explain.__module__])
    assert not [family.__name__ for family in strategies.FAMILIES if family.__name__ in names]
    assert {"echo", "graph_parallel"} <= {c.strategy.name for c in found.ranked}
    assert strategies.parse("loud_echo").knobs()["narrow"]
    assert str(strategies.parse("echo(narrow=True)")) == "loud_echo"
    alone = problem(1)
    strategy = strategies.parse("echo").settle(alone)
    train(Rank(0, 1, torch.device("cpu"), "gloo"), alone, strategy, None, 2)
    assert sys.modules["echo_executor"].opened == ["echo"]  # type: ignore[attr-defined]


def test_epochs_that_differ_are_told_one_by_one(delayed):
    """A mean of three, rounded, was taken for each of them."""
    graph = "synthetic:community?vertices=200&edges=1200&features=8&classes=3&seed=0"
    fields = {"model": "gcn", "layers": 2, "hidden": 8, "strategy": "delayed(r=3)"}
    plan = gnnplan.plan(graph, "p3_p100?servers=1&gpus_per_server=2", **fields)
    predicted = plan.document["best"]["predicted"]
    each = [sum(epoch["bytes"].values()) for epoch in predicted["period"]]
    assert len(each) == 3 and len(set(each)) > 1
    assert predicted["bytes_total"] == pytest.approx(sum(each) / 3, abs=2)
    seconds = [epoch["epoch_s"] for epoch in predicted["period"]]
    assert predicted["epoch_s"] == pytest.approx(sum(seconds) / 3)
    played = plan.simulate(steps=6)
    told = played.document["epochs"]
    assert [row["epoch"] for row in told] == [2, 3, 4, 5, 6]
    for row in told:
        sent = each[(row["epoch"] - 1) % 3]
        assert row["predicted_bytes"] == row["simulated_bytes"] == sent
        assert row["simulated_s"] == pytest.approx(row["predicted_s"], rel=1e-6)
    assert "epochs differ, and repeat after 3" in str(played)
    assert played.epoch_s == pytest.approx(predicted["epoch_s"], rel=1e-6)
    few = plan.simulate(steps=2).document  # of one epoch alone, and so is the prediction
    assert few["simulated"]["epoch_s"] == pytest.approx(few["predicted"]["epoch_s"], rel=1e-6)
    assert few["predicted"]["bytes"] == few["simulated"]["bytes"]


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("raise ImportError('no numpy')", r"echo of the package echo cannot be loaded \(ImportErr"),
        ("Echo = 3", "is echo_planner:Echo, which is no class of a Strategy"),
        (PLANNER.replace("loud_echo", "pipegcn"), "has a name that is taken: pipegcn"),
        (PLANNER.replace("    executor", "    other"), "names no executor of its own"),
        (
            PLANNER.replace("from __future__ import annotations", "").replace(
                "    examples", "    loud: bool = False\n    examples"
            ),
            "needs 'from __future__ import annotations' in its file",
        ),
    ],
)
def test_a_broken_one_is_named_with_its_package(install, code, words):
    (install / "echo_planner.py").write_text(code)
    with pytest.raises(SpecError, match=words):
        strategies.families()


pytestmark = pytest.mark.timeout(600)

ROUNDING = 1 + 1e-9
QUESTIONS = 4 if NIGHT else 1  # of a seed
MOST_PLAYED = 3_000  # tasks of schedules that are played
GRAPHS = ["flickr", "friendster", "ogbn-arxiv", "ogbn-papers100M", "ogbn-products", "orkut"]
GRAPHS += ["reddit", "squirrel", "yelp"]
CLUSTERS = [(name, servers) for name in ("dgx_a100", "l4_box") for servers in (1, 4)]
CLUSTERS += [("dgx_h100", 2), ("p3_p100", 4), ("perlmutter", 4), ("pipegcn_2080ti", 1)]
CLUSTERS += [("granndis_a6000_pcie", 4), ("gsplit_p3_8xlarge", 1), ("g5.12xlarge", 2)]
MODELS = [{"model": "gcn", "layers": 2}, {"model": "sage", "layers": 3}]
MODELS += [{"model": "gat", "layers": 3}, {"model": "gcnii", "layers": 8}]
# fields of a cluster, and whether more of it is better
BETTER = [(field, True) for field in ("intra_node.bandwidth", "inter_node.bandwidth", "servers")]
BETTER += [(f"device.{field}", True) for field in ("gemm", "memory_bandwidth", "memory")]
BETTER += [("inter_node.latency", False), ("device.launch", False)]

stats_of = cache(load)  # of graphs that are known by statistics


def problem_of(graph: str, cluster: Cluster, workload: Workload) -> Problem:
    return Problem(stats_of(graph), None, workload, cluster)


def value_of(cluster: Cluster, field: str) -> float | None:
    value: object = cluster
    for name in field.split("."):
        value = getattr(value, name, None)
    return value if isinstance(value, (int, float)) else None


def what_ifs(seed: int, mini: bool = False) -> Iterator[tuple[Problem, Problem, str]]:
    """Questions, each with the same on a better cluster, and what is asked and better."""
    random = Random(seed)
    while True:
        (name, servers), graph = random.choice(CLUSTERS), random.choice(GRAPHS)
        fields = random.choice(MODELS) | {"hidden": random.choice([64, 256])}
        if fields["layers"] < 8 and (mini or random.random() < 0.4):
            fields |= {"mode": "mini", "batch": 1024, "fanout": (15, 10, 5)[: fields["layers"]]}
        (field, more), times = random.choice(BETTER), random.choice([1.25, 2, 8])
        workload = Workload.model_validate(fields)
        cluster, _ = apply_overrides(read_cluster(name), workload, [f"servers={servers}"])
        value = value_of(cluster, field)
        if value is None or (field == "servers" and cluster.inter_node is None):
            continue
        changed = 2 * servers if field == "servers" else value * times if more else value / times
        better, _ = apply_overrides(cluster, workload, [f"{field}={changed!r}"])
        asked = f"{graph} on {servers} x {name}, {fields}: {field} {value:g} -> {changed:g}"
        yield problem_of(graph, cluster, workload), problem_of(graph, better, workload), asked


def must_be_consistent(found: SearchResult) -> None:
    """What holds of one answer."""
    best, exact_s = found.best, least_of(found.ranked, comparable=True)
    for candidate, outlook in zip(found.ranked, found.outlooks, strict=True):
        assert outlook.epoch_low_s <= float(candidate.predicted.epoch_s) <= outlook.epoch_high_s
        assert candidate.memory_bytes <= candidate.problem.cluster.device.memory
    assert sum(outlook.chance_fastest for outlook in found.outlooks) == pytest.approx(1)
    if best.objective.slack > 1.0:
        return
    if best.strategy.exact:
        assert best.value == exact_s
    elif np.isfinite(exact_s):
        exact = next(c for c in found.ranked if c.value == exact_s and c.strategy.exact)
        assert best.value < exact_s and best.chance_faster(exact) >= SURE_SHARE


def must_be_as_forced(found: SearchResult) -> None:
    """Who asks for the best strategy by its name is told the same, and it is played so."""
    best = found.best
    asked = best.problem.placed(tuple(sorted(best.problem.cost.placement)))
    alone = search(asked, forced=best.strategy, objective=best.objective).best
    assert alone.value == pytest.approx(best.value, rel=1e-9)
    strategy, there = best.strategy, best.problem.with_cuda_graph(best.strategy.uses_cuda_graph)
    steps = strategy.steps(there)
    schedule = strategy.schedule(there, 2 * steps) if steps == 1 else None
    if schedule is not None and len(schedule.tasks) <= MOST_PLAYED:
        played = play(schedule, there.cost).epoch_s(1)
        assert played == pytest.approx(float(best.predicted.epoch_s), rel=max(strategy.claim, 0.02))


def seeds(by_day: int, by_night: int) -> list[object]:
    nights = (at_night(n) for n in range(by_day, by_night))
    return [*range(by_day), *nights]


@pytest.mark.slow
@pytest.mark.parametrize("seed", seeds(1, 75))
def test_what_is_better_makes_no_recommendation_slower(seed):
    """Six of 102 questions were answered by a slower epoch after a better link or device, up to 44
    %: regret depends on what else there is, and on lopsided ranges. A lossy strategy may give way
    to an exact one that it does not surely beat any more; of each kind the best is never slower."""
    for now, better, asked in islice(what_ifs(seed), QUESTIONS):
        try:
            before = search(now)
        except Infeasible:
            continue
        after = search(better)
        for found in (before, after):
            must_be_consistent(found)
        must_be_as_forced(after)
        for comparable in (True, False):
            least = [least_of(found.ranked, comparable) for found in (before, after)]
            assert least[1] <= least[0] * ROUNDING, (asked, least)
        gives_way = not before.best.strategy.exact and after.best.strategy.exact
        assert gives_way or after.best.value <= before.best.value * ROUNDING, asked


@pytest.mark.slow
@pytest.mark.parametrize("seed", seeds(0, 12))
def test_what_is_better_makes_no_training_worth_less(seed):
    """In both modes and on all sizes compared; fewer GPUs are named where nearly as good."""
    for now, better, asked in islice(what_ifs(1000 + seed, mini=True), QUESTIONS // 2):
        before, after = trained(now), trained(better)
        if before is None:
            continue
        assert after is not None, asked
        least = [min(least_of(f.ranked, True) for f in w.answers.values()) for w in (before, after)]
        assert least[1] <= least[0] * ROUNDING, (asked, least)
        for whole, one in ((before, least[0]), (after, least[1])):
            best = whole.found.best
            assert best.value <= one * best.objective.slack * ROUNDING, asked
            for found in whole.answers.values():
                must_be_consistent(found)
        must_be_as_forced(after.found)


LARGE_MINI = {"mode": "mini", "batch": 4096, "fanout": (10, 5, 3, 3)}
P3 = "p3(over='rank',pipelined=True)"
MEASURED = Path(__file__).parents[2] / "traces" / "measured"
CONTENDED = [  # what was predicted, against what is played, where transfers share ports or cores
    ("+29 %", "ogbn-arxiv", "p3_p100", 4, "gcn", 256, "gnnpipe(stages=4,chunks=4)", {}),
    ("+34 %", "ogbn-products", "granndis_2080ti_1gbe", 2, "gin", 256, "gnnpipe(chunks=4)", {}),
    ("+5 %", "reddit", "granndis_2080ti_1gbe", 4, "gin", 16, "gnnpipe(stages=2,chunks=8)", {}),
    ("-9 %", "ogbn-arxiv", "granndis_a6000_pcie", 2, "gat", 16, P3, LARGE_MINI),
    ("-11 %", "ogbn-products", "l4_box", 1, "gcn", 256, "data_parallel(prefetch=2)", LARGE_MINI),
    ("-9 %", "squirrel", str(MEASURED / "2x2_2Gbit.2.yaml"), 2, "gcn", 128, "pipegcn", {}),
    ("-4 %", "squirrel", str(MEASURED / "1x4.1.yaml"), 1, "gcn", 128, "pipegcn", {}),
]


@pytest.mark.parametrize(
    ("graph", "name", "servers", "model", "hidden", "text", "mini"),
    [pytest.param(*case, id=f"{case[5]} was {off}") for off, *case in CONTENDED],
)
def test_where_transfers_contend_a_plan_is_played(graph, name, servers, model, hidden, text, mini):
    workload = Workload(model=model, layers=4, hidden=hidden, **mini)
    cluster, _ = apply_overrides(read_cluster(name), workload, [f"servers={servers}"])
    problem = placed(problem_of(graph, cluster, workload), parse(text))
    predicted, played = epochs_s(problem, text, 3 if mini else 5)
    assert predicted == pytest.approx(played, rel=0.02)


def trained(problem: Problem) -> ModeComparison | None:
    """The whole training, as a plan asks for it; None where nothing fits."""
    epochs = epochs_by_mode(problem.stats.name, None, None)
    objective = Objective("value", epochs_by_mode=epochs)
    try:
        return compare(problem, MODES, epochs, lambda one: search(one, objective=objective))
    except GnnplanError:
        return None
