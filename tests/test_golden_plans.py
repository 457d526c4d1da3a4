"""Golden plans: what every strategy, with every knob that changes bytes, is predicted to take on
every preset, and what is predicted of every printed figure.

Bytes are exact, seconds and memory hold to 1e-9. A change that moves a figure writes the files
anew, in a commit that says why:

    python tests/test_golden_plans.py
"""

import json
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
from nightly import NIGHT, at_night

from gnnplan.papers import published
from gnnplan.papers.figures import predict
from gnnplan.papers.question import Row, Skip
from gnnplan.planner.cluster.spec import PRESETS, Cluster
from gnnplan.planner.decision.candidate import placed
from gnnplan.planner.decision.search import search
from gnnplan.planner.gnn.workload import Workload
from gnnplan.planner.graph.graph import Graph
from gnnplan.planner.graph.load import load
from gnnplan.planner.problem.inputs import read_cluster
from gnnplan.planner.problem.problem import Problem, with_ranks
from gnnplan.planner.strategies import parse
from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.simulator.player import play

FOLDER = Path(__file__).parent / "golden"
PRINTED = FOLDER.parents[1] / "traces" / "published"
GRAPHS = {
    "community": "synthetic:community?vertices=1000&edges=8000&features=60&classes=6&seed=0",
    "reddit": "reddit",
}
MOST_RANKS = 8  # of a graph that is really cut
FULL = Workload(model="sage", layers=4, hidden=32, dropout=0.3)
MINI = Workload(model="sage", layers=2, hidden=32, mode="mini", batch=96, fanout=(4, 3))
OF_FULL = """
    graph_parallel graph_parallel(narrow=True) graph_parallel(checkpoint=True) pipegcn
    pipegcn(narrow=True) pipegcn_f pipegcn_g(gamma=0.5) pipegcn_gf graph_parallel(bits=2)
    pipegcn(bits=4) granndis(depth=0,bits=8) gnnpipe gnnpipe(stages=2,chunks=6)
    gnnpipe(stages=1,chunks=2) gnnpipe(shuffle=False,historical_gradients=True)
    gnnpipe(checkpoint=True) gnnpipe(stages=2,layers_per_stage=(1,3)) granndis granndis(depth=0)
    granndis(depth=1) granndis(narrow=True) granndis(group='island') granndis(max_hop=2,fanout=3)
    granndis(max_hop=1,fanout=5,degrees='local') granndis(batches=2) granndis(batches=None)
    granndis(checkpoint=True) feature_parallel feature_parallel(order='alternating') bns(p=0.3)
    bns(p=0.7,narrow=True,buckets=2) tensor3d tensor3d(x=1) offload(chunks=4)
    offload(chunks=2,trim=True)
"""
OF_MINI = """
    data_parallel data_parallel(prefetch=2) data_parallel(checkpoint=True)
    data_parallel(cache=20000) data_parallel(cache=20000,shared_cache=True,hot='degree')
    data_parallel(features='spread') data_parallel(features='spread',cache=20000)
    data_parallel(structure='spread') data_parallel(structure='spread',structure_cache=4000)
    gsplit gsplit(splitter='edge') gsplit(splitter='random') gsplit(narrow=True)
    gsplit(prefetch=1) gsplit(group='all') gsplit(cache=20000) gsplit(features='spread')
    gsplit(structure='spread') p3 p3(pipelined=True) p3(over='rank') p3(over='rank',copies=2)
    p3(prefetch=2) p3(cache=8000) p3(structure='spread',structure_cache=4000) dnp
    dnp(splitter='random',prefetch=1) snp snp(splitter='random',cache=8000)
"""
STRATEGIES = {"full": OF_FULL.split(), "mini": OF_MINI.split()}
MODELS = {
    "gcn": Workload(model="gcn", layers=3, hidden=24, dropout=0.5),
    "gcn_batch_norm": Workload(model="gcn", layers=3, hidden=24, norm="batch"),
    "sage_layer_norm": Workload(model="sage", layers=3, hidden=24, norm="layer", dtype="float64"),
    "gcnii": Workload(model="gcnii", layers=5, hidden=24, dropout=0.5),
    "gat": Workload(model="gat", layers=3, hidden=24, heads=3, dropout=0.5),
    "resgcn": Workload(model="resgcn", layers=5, hidden=24, dropout=0.2),
    "resgcn_sum": Workload(model="resgcn", layers=5, hidden=24, aggregation="sum", optimizer="sgd"),
    "sgc": Workload(model="sgc", layers=2),
    "gin": Workload(model="gin", layers=3, hidden=24, dropout=0.5),
    "gatv2": Workload(model="gatv2", layers=3, hidden=24, heads=3, dropout=0.5),
}
Question = tuple[str, Callable[[], dict[str, Any]]]  # its name, and what answers it
PLAYED = ("pcie_box", "local", "gnnpipe_a5000")  # on the graph that is really cut
CASES = [(preset.stem, graph) for preset in sorted(PRESETS.glob("*.yaml")) for graph in GRAPHS]
loaded_graph = cache(load)


def problem_of(graph: str, cluster: Cluster, workload: Workload) -> Problem:
    loaded = loaded_graph(GRAPHS[graph])
    known = isinstance(loaded, Graph)
    if known:  # METIS is what takes long
        cluster = with_ranks(cluster, min(cluster.ranks, MOST_RANKS))
    return Problem(loaded.stats if known else loaded, loaded if known else None, workload, cluster)


def preset(name: str) -> Cluster:
    """As shipped: never what `gnnplan measure` found of this machine."""
    return read_cluster(str(PRESETS / f"{name}.yaml"))


def answer(problem: Problem, text: str, simulate: bool = False) -> dict[str, Any]:
    """What is asked of a strategy, JSON-ready; a word where it does not suit the problem."""
    try:
        problem = placed(problem, parse(text))
        strategy = parse(text).settle(problem)
        strategy.check(problem)
    except SpecError:
        return {"strategy": "does not suit"}
    predicted = strategy.predict(problem)
    schedule = strategy.schedule(problem, 2) if simulate else None
    seconds = {"epoch": predicted.epoch_s, "compute": predicted.compute_s, "comm": predicted.comm_s}
    seconds |= {"bubble": predicted.bubble_s}
    seconds |= {f"op {kind}": taken for kind, taken in predicted.by_op.items()} if simulate else {}
    seconds |= {"simulated": play(schedule, problem.cost).end_s} if schedule else {}
    return {
        "strategy": str(strategy),
        **({"placement": list(problem.placement)} if problem.placement else {}),
        "bytes": predicted.bytes,
        "bytes_by_link": predicted.bytes_by_link,
        "setup_bytes": predicted.setup_bytes,
        "seconds": {what: digits(taken) for what, taken in seconds.items() if taken > 1e-12},
        "memory": {
            use: digits(each.max()) for use, each in strategy.memory(problem).items() if each.any()
        },
    }


def digits(value: Any) -> float:
    """Enough of them for a comparison to 1e-9."""
    return float(f"{float(value):.12g}")


def of_preset(name: str, graph: str) -> Iterator[Question]:
    """Every strategy."""
    for mode, workload in (("full", FULL), ("mini", MINI)):
        problem = problem_of(graph, preset(name), workload)
        for text in STRATEGIES[mode]:
            simulate = graph == "community" and name in PLAYED
            yield text, partial(answer, problem, text, simulate)


def ranking(name: str, graph: str) -> dict[str, Any]:
    """Candidates from fastest to slowest, with their epochs."""
    return {
        f"{c.strategy} on {c.problem.ranks}": {"seconds": digits(c.predicted.epoch_s)}
        for c in search(problem_of(graph, preset(name), FULL)).ranked
    }


def of_models() -> Iterator[Question]:
    """Every model under every family, where servers and links differ."""
    cluster = preset("gnnpipe_a5000")
    for model, workload in MODELS.items():
        problem = problem_of("community", cluster, workload)
        for text in (
            *("graph_parallel(narrow=True)", "graph_parallel(checkpoint=True)", "pipegcn_gf"),
            *("gnnpipe", "granndis", "feature_parallel(order='alternating')"),
        ):
            yield f"{model}: {text}", partial(answer, problem, text, simulate=True)
        if workload.norm != "batch":
            mini = workload.model_copy(update=dict(mode="mini", batch=96, layers=2, fanout=(4, 3)))
            problem = problem_of("community", cluster, mini)
            for text in ("data_parallel(features='spread')", "gsplit(narrow=True)", "p3"):
                key = f"{model}, mini-batches: {text}"
                yield key, partial(answer, problem, text, simulate=True)


def of_print() -> Iterator[Question]:
    """Every printed figure: the code of others, and testbeds that are not ours."""
    for file in ("figures", "others"):
        for row in published.read(PRINTED / f"{file}.csv"):
            yield f"{file}:{row['line']} {row['strategy']} {row['metric']}", partial(printed, row)


def printed(row: Row) -> dict[str, Any]:
    try:
        return {"predicted": digits(predict(row))}
    except Skip as why:
        return {"skipped": str(why)}


def all_of(questions: Iterator[Question]) -> dict[str, dict[str, Any]]:
    return {name: answered() for name, answered in questions}


def same_by_day(questions: Iterator[Question], name: str, first: int, every: int) -> None:
    """The answers are the file's: to every so many-th question, at night to all."""
    golden, asked = read(name), list(questions)
    assert [key for key, _ in asked] == list(golden), name
    for key, answered in asked if NIGHT else asked[first % every :: every]:
        same(answered(), golden[key], f"{name}.{key}", 1e-9)


def same(found: Any, golden: Any, where: str, rel: float) -> None:
    """Whole numbers and words are equal, seconds and memory are within `rel`."""
    if isinstance(golden, dict):
        assert list(found) == list(golden), where
        for key, value in golden.items():
            same(found[key], value, f"{where}.{key}", rel)
    elif isinstance(golden, float):
        assert found == pytest.approx(golden, rel=rel, abs=1e-15), where
    else:
        assert found == golden, where


def read(name: str) -> dict[str, Any]:
    return json.loads((FOLDER / f"{name}.json").read_text())


# by day every preset has its turn, on one graph or the other, with a sixteenth of the strategies, so
# that each strategy has a preset; to search takes longest: one preset on each graph
BY_DAY = [CASES[2 * number + number % 2] for number in range(len(CASES) // 2)]


def others_at_night(chosen: list[tuple[str, str]]) -> list[Any]:
    return [c if c in chosen else at_night(*c) for c in CASES]


@pytest.mark.parametrize(("name", "graph"), others_at_night(BY_DAY))
def test_every_strategy_is_predicted_as_ever(name, graph):
    number = CASES.index((name, graph)) // 2
    same_by_day(of_preset(name, graph), f"{name}.{graph}", first=number, every=16)


@pytest.mark.slow
def test_every_model_is_predicted_as_ever():
    """By day every fourth: nine of a model, so that each strategy has every fourth model."""
    same_by_day(of_models(), "models", first=0, every=4)


@pytest.mark.slow
def test_every_printed_figure_is_predicted_as_ever():
    same_by_day(of_print(), "printed", first=0, every=4)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "graph"), others_at_night(BY_DAY[8:16:7]))
def test_every_preset_ranks_as_ever(name, graph):
    same(ranking(name, graph), read("rankings")[name][graph], f"{name}, {graph}", 1e-9)


def write(name: str, answers: dict[str, Any]) -> None:
    """A line per answer, so that a change shows in a diff."""
    lines = ",\n".join(
        f"{json.dumps(key)}: {json.dumps(value, separators=(',', ':'))}"
        for key, value in answers.items()
    )
    (FOLDER / f"{name}.json").write_text("{\n" + lines + "\n}\n")


if __name__ == "__main__":
    for preset_name, graph_name in CASES:
        write(f"{preset_name}.{graph_name}", all_of(of_preset(preset_name, graph_name)))
    write("models", all_of(of_models()))
    write("printed", all_of(of_print()))
    write(
        "rankings",
        {
            name: {graph: ranking(name, graph) for graph in GRAPHS}
            for name in sorted({name for name, _ in CASES})
        },
    )
