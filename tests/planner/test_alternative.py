"""Another candidate of a plan takes the place of the best, and errors name what the plan holds."""

import copy

import pytest

from gnnplan.planner.cluster.spec import Cluster
from gnnplan.planner.decision.candidate import evaluate
from gnnplan.planner.decision.plan import make, placement, question, strategy_of, take
from gnnplan.planner.decision.search import search
from gnnplan.planner.gnn.workload import Workload
from gnnplan.planner.graph.load import load
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies import parse
from gnnplan.planner.vocabulary.errors import SpecError

GRAPH = "synthetic:community?vertices=80&edges=600&features=16&classes=4&seed=0"
# Islands that are not in the order of the GPUs, and links so slow that fewer GPUs compete.
CLUSTER = {
    "servers": 2,
    "gpus_per_server": 4,
    "device": {"memory": "24GB", "gemm": "10TFLOP/s", "memory_bandwidth": "500GB/s"},
    "intra_node": {"bandwidth": "2GB/s", "latency": "20us"},
    "islands": [[0, 2], [1, 3]],
    "island": {"bandwidth": "200GB/s", "latency": "5us"},
    "inter_node": {"bandwidth": "1GB/s", "latency": "20us"},
}


@pytest.fixture(scope="module")
def planned():
    graph = load(GRAPH)
    problem = Problem(graph.stats, graph, Workload(layers=2, hidden=16), Cluster(**CLUSTER))
    return make(search(problem)), problem


@pytest.mark.slow
def test_every_alternative_keeps_its_prediction_and_gets_a_placement(planned):
    """Those on fewer GPUs too, of which a plan does not keep the placement."""
    document, problem = planned
    before = copy.deepcopy(document)
    assert len({one["gpus"] for one in document["alternatives"]}) > 1
    for one in document["alternatives"]:
        name = str(strategy_of(one))
        first = next(a for a in document["alternatives"] if str(strategy_of(a)) == name)
        if first is not one or name == str(strategy_of(document["best"])):
            continue  # of several of a name the fastest is chosen
        chosen = take(document, problem, name)
        assert {k: v for k, v in chosen["best"].items() if k != "placement"} == one
        assert len(placement(chosen)) == one["gpus"]
        again = evaluate(question(chosen), strategy_of(one))  # as validate does
        assert again.predicted.epoch_s == pytest.approx(one["predicted"]["epoch_s"], rel=1e-9)
        assert name in chosen["summary"]["use"]
        assert len(chosen["alternatives"]) == len(document["alternatives"])
        assert all("placement" not in other for other in chosen["alternatives"])
    assert document == before


def test_next_is_the_second_and_the_way_back(planned):
    document, problem = planned
    second = take(document, problem, "NEXT")
    assert second["best"]["strategy"] == document["alternatives"][0]["strategy"]
    assert take(document, problem, str(strategy_of(document["best"]))) is document
    back = take(second, question(second), "NEXT")
    assert back["best"] == document["best"] and back["alternatives"] == document["alternatives"]


def test_errors_name_what_the_plan_holds(planned):
    document, problem = planned
    best = str(strategy_of(document["best"]))
    with pytest.raises(SpecError) as error:
        take(document, problem, "gnnpipe(stages=2,chunks=77)")
    assert "did not consider it; the plan holds" in str(error.value) and best in str(error.value)
    assert "gnnplan plan --strategy 'gnnpipe(stages=2,chunks=77)'" in str(error.value)
    refused = {**document, "rejected": [{"strategy": "gnnpipe(chunks=77)", "reason": "too many"}]}
    with pytest.raises(SpecError, match="the plan rejected it: too many; the plan holds"):
        take(refused, problem, "gnnpipe(chunks=77)")
    forced = make(search(problem, forced=parse("graph_parallel")))
    with pytest.raises(SpecError, match="holds graph_parallel and no alternative"):
        take(forced, problem, "NEXT")
