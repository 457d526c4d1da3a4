"""GraNNDis with islands of GPUs in the place of servers: the same story on other links, placements that
keep an island's ranks on one, and a choice that changes with the topology."""

from collections import Counter
from itertools import pairwise, permutations, product
from typing import Any

import numpy as np
import pytest
from asked import by_statistics
from examples import NIGHT, examples
from hypothesis import given, settings
from hypothesis import strategies as st
from pairwise import at_night, covered

from gnnplan.planner.cluster.cost import Cost
from gnnplan.planner.cluster.placement import proposed
from gnnplan.planner.cluster.spec import Cluster, Link
from gnnplan.planner.decision.candidate import evaluate, placed
from gnnplan.planner.graph.graph import Graph
from gnnplan.planner.graph.load import load
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies import GraNNDis, GraphParallel, parse
from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.planner.vocabulary.schedule import Collective
from gnnplan.simulator.player import play
from gnnplan.testing import laws

GRAPH = laws.GRAPHS[0]
SPARSE = load(
    "synthetic:community?vertices=2000&edges=8000&features=40&classes=5&communities=50&mixing=0.02"
)
LARGE = load(
    "synthetic:community?vertices=4000&edges=40000&features=40&classes=5&communities=40&mixing=0.05"
)
CROSSED, PAIRS = [[0, 2], [1, 3]], [[0, 1], [2, 3]]


def problem_of(
    servers: int,
    islands: list[list[int]],
    graph: Graph = GRAPH,
    intra: float = 1e9,
    island: float = 1e11,
    inter: float = 1e8,
    **workload: Any,
) -> Problem:
    where = laws.cluster(servers, sum(map(len, islands)), inter, intra).model_dump()
    lists = {"islands": islands, "island": Link(bandwidth=island, latency=1e-6)}
    where = Cluster.model_validate(where | lists)
    return laws.problem_of(graph, where, **{"layers": 4, **workload})


def settled(problem: Problem, **knobs: Any) -> GraNNDis:
    strategy = GraNNDis(group="island", **knobs).settle(problem)
    strategy.check(problem)
    return strategy


def told(problem: Problem) -> list[GraNNDis]:
    """Variants that preload in islands."""
    knobs: list[dict[str, Any]] = [{"depth": 1}, {"depth": 2, "narrow": True}, {}]
    knobs += [{"max_hop": 1, "fanout": 2}, {"batches": 3}]
    knobs += [{"max_hop": 2, "fanout": 2, "degrees": "local", "batches": 2}]
    return [settled(problem, **k) for k in knobs]


WIRED = (1, CROSSED), (2, PAIRS), (2, [[0], [1]]), (1, [[0, 4, 1], [3, 2, 5]])


@pytest.mark.parametrize(
    ("servers", "islands", "known"),
    covered(
        [(*where, known) for where in WIRED for known in (True, False)],
        lambda row: {str(row[:2]), row[2]},
    ),
)
def test_closed_form_schedule_and_simulation(servers, islands, known):
    """Bytes by link read off the schedule, by where ends sit; and the time of playing it."""
    problem = problem_of(servers, islands)
    problem = problem if known else by_statistics(problem)
    for strategy in told(problem):
        p, steps = strategy.predict(problem), strategy.steps(problem)
        schedule = strategy.schedule(problem, 3 * steps)
        first = [task for task in schedule.tasks if task.label.step < steps]
        reduced = p.bytes["all_reduce"] // steps
        links = Counter[str]()
        for task in first:
            if isinstance(task.work, Collective):
                for peer, nbytes in task.work.to_peers:
                    links[problem.cost.link_name(task.rank, peer)] += nbytes
        for _ in range(steps):
            links.update(problem.cost.all_reduces.bytes_by_link(reduced, range(problem.ranks)))
        assert +links == p.bytes_by_link, strategy
        assert schedule.bytes_by_op(first) == p.bytes
        assert sum(schedule.bytes_by_op(schedule.setup).values()) == p.setup_bytes > 0
        played = play(schedule, problem.cost).epoch_s(steps)
        assert played == pytest.approx(float(p.epoch_s), rel=strategy.claim)


def test_estimated_batches_of_islands():
    """A batch has its share of an island's training vertices: there are no more batches."""
    problem = by_statistics(problem_of(2, PAIRS))
    mine = problem.stats.train_vertices / 4
    layouts = settled(problem, batches=3).layouts(problem)
    assert [layout.targets for layout in layouts] == [mine / 3] * 3
    settled(problem, batches=int(mine))
    with pytest.raises(SpecError, match=f"fewest on one: {int(mine)}, batches: {int(mine) + 1}"):
        settled(problem, batches=int(mine) + 1)


@given(
    st.sampled_from([GRAPH, SPARSE, laws.GRAPHS[1]]),
    st.sampled_from(["gcn", "sage", "gcnii", "gat"]),
    st.integers(1, 6),
    st.sampled_from([(1, 2), (1, 3), (2, 2), (3, 2)]),
)
@settings(max_examples=examples(15))
def test_more_depth_is_never_more_bytes_between_islands(graph, model, layers, where):
    """Of one GPU, so of one cut: fewer bytes in an epoch, more before it, more rows to compute."""
    islands = [[g] for g in range(where[1])]
    problem = problem_of(where[0], islands, graph, model=model, layers=layers, heads=1)
    strategies = [settled(problem, depth=depth) for depth in range(layers + 1)]
    p = [strategy.predict(problem) for strategy in strategies]
    for shallow, deep in pairwise(p):
        assert deep.bytes_total <= shallow.bytes_total and deep.setup_bytes >= shallow.setup_bytes
    for layer in range(1, layers + 1):
        rows = [strategy.layout(problem).facts(layer).rows for strategy in strategies]
        assert all((deep >= shallow).all() for shallow, deep in pairwise(rows))
    assert "halo" not in p[-1].bytes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "islands"),
    [
        ("granndis(depth=1,group='island')", CROSSED),
        at_night("granndis(depth=1)", PAIRS),
        at_night("granndis(group='island')", PAIRS),
        at_night("granndis(group='island')", CROSSED),
    ],
)
def test_groups_stay_together_and_hardly_a_placement_that_keeps_them_is_faster(strategy, islands):
    """Of 8 GPUs, by the closed form: a link may be busy 2 % longer for fewer bytes in all."""
    problem, chosen = problem_of(2, islands), parse(strategy)
    in_order, found = chosen.settle(problem), placed(problem, chosen)

    def home(there: Problem) -> np.ndarray:
        """The island, or server, that each rank sits on."""
        at = there.cost.places
        return at.island if chosen.group == "island" else at.server

    tied = np.array(in_order.tied(problem))
    assert all(len(set(home(found)[tied == group])) == 1 for group in set(tied.tolist()))
    assert in_order.tied(found) == in_order.tied(problem)
    # the same rows on every rank: only links change
    assert in_order.layout(found) is in_order.layout(problem)
    gpus = [np.flatnonzero(home(problem) == place).tolist() for place in range(len(set(tied)))]
    ranks = np.argsort(tied, kind="stable")  # group after group
    kept = [
        tuple(np.ravel(sits)[np.argsort(ranks)].tolist())
        for order in permutations(gpus)
        for sits in product(*map(permutations, order))
    ][::7]
    assert all(in_order.tied(problem.placed(placement)) == tuple(tied) for placement in kept)
    best = min(float(in_order.predict(problem.placed(placement)).comm_s) for placement in kept)
    found_s, in_order_s = (float(in_order.predict(p).comm_s) for p in (found, problem))
    assert found_s <= in_order_s and found_s == pytest.approx(best, rel=0.02)


def test_groups_that_talk_meet_among_32_gpus():
    """Pairs with heavy traffic, whose members would rather part: islands move as a whole."""
    where = problem_of(8, CROSSED).cluster
    tied = Cost(where).places.island
    friend = np.random.default_rng(2).permutation(16).reshape(8, 2)
    partner = {int(a): int(b) for pair in friend for a, b in (pair, pair[::-1])}
    sent = np.zeros((32, 32))
    for a in range(32):
        sent[a, tied == partner[int(tied[a])]] = 1e6
        sent[a, (a + 1) % 32] += 1e3
    at = Cost(where, proposed(where, range(32), [sent], (), tied.tolist())[-1]).places
    assert all(np.ptp(at.island[tied == group]) == 0 for group in range(16))
    assert all(np.ptp(at.server[np.isin(tied, pair)]) == 0 for pair in friend)


def fastest_s(servers: int, intra: float) -> dict[str, float]:
    """Of what is exact: the best epoch of graph parallel, and of GraNNDis by group."""
    problem, out = problem_of(servers, CROSSED, LARGE, intra=intra, layers=3), {}
    for strategy in (*GraphParallel.candidates(problem), *GraNNDis.candidates(problem)):
        if strategy.exact:
            epoch_s = float(evaluate(placed(problem, strategy), strategy).predicted.epoch_s)
            group = getattr(strategy, "group", "none")
            out[group] = min(epoch_s, out.get(group, epoch_s))
    return out


@pytest.mark.slow
def test_slow_pcie_between_islands_makes_them_preload_and_fast_pcie_does_not():
    """Islands win where halos pass a slow PCIe, and lose where it is as fast as NVLink."""
    if NIGHT:
        slow, fast = fastest_s(1, 1e8), fastest_s(1, 1e11)
        assert set(slow) == set(fast) == {"none", "island"}
        assert slow["island"] < 0.7 * slow["none"] and fast["island"] > fast["none"]
    slow, fast = fastest_s(2, 1e8), fastest_s(2, 1e11)
    assert slow["island"] < 0.8 * min(slow["server"], slow["none"])
    assert fast["server"] < min(fast["island"], fast["none"])


@pytest.mark.parametrize(
    ("servers", "islands", "placement", "groups"),
    [
        (1, CROSSED, (), {"island"}),
        (2, PAIRS, (), {"server", "island"}),
        (2, [[0, 1]], (), {"server"}),
        (1, [[0, 1]], (), set()),
        (1, [[0, 1], [2]], (), set()),
        (2, [[0, 1], [2]], (), {"server"}),
        # fewer GPUs: one island, a GPU of each, three GPUs
        (1, CROSSED, (0, 2), set()),
        (1, CROSSED, (0, 1), {"island"}),
        (1, CROSSED, (0, 1, 2), set()),
    ],
)
def test_what_is_offered(servers, islands, placement, groups):
    problem = problem_of(servers, islands)
    problem = problem.placed(placement) if placement else problem
    assert {strategy.group for strategy in GraNNDis.candidates(problem)} == groups


def test_what_a_plan_says():
    one = problem_of(1, [[0, 1]])
    said = "one server, one island: no row crosses groups, so there is nothing to preload"
    for alone in (one, problem_of(1, CROSSED).placed((0, 2))):
        assert GraNNDis.absent(alone).startswith(said)
    assert "its islands hold 1, 2 GPUs" in GraNNDis.absent(problem_of(1, [[0, 1], [2]]))
    said = "Islands of GPUs may preload too, with group='island'."
    assert GraNNDis.explain(problem_of(1, CROSSED), None)[0].endswith(said)
    assert not any("Islands" in line for line in GraNNDis.explain(one, None))
