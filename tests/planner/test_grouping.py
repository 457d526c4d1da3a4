"""Where ranks sit, and how many GPUs are worth using."""

from collections import Counter
from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest
from any_wiring import wiring
from asked import changed, on
from examples import examples
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from gnnplan.planner.cluster.cost import Cost
from gnnplan.planner.cluster.placement import proposed, walk
from gnnplan.planner.cluster.places import Places
from gnnplan.planner.cluster.spec import Cluster, Device, Link
from gnnplan.planner.decision import plan
from gnnplan.planner.decision.candidate import placed
from gnnplan.planner.decision.search import search
from gnnplan.planner.gnn.workload import Workload
from gnnplan.planner.graph.graph import Graph
from gnnplan.planner.problem.inputs import apply_overrides
from gnnplan.planner.problem.problem import Problem, with_ranks
from gnnplan.planner.strategies import parse
from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.simulator.player import play
from gnnplan.testing import laws

DEVICE = Device(name="toy", memory=1e12, gemm=1e12, memory_bandwidth=1e12)


def cluster(servers: int, gpus: int, **more: Any) -> Cluster:
    links = {"intra_node": Link(bandwidth=1e9), "inter_node": Link(bandwidth=1e8)}
    return Cluster(servers=servers, gpus_per_server=gpus, **{"device": DEVICE, **links, **more})


PAIRS, ACROSS = [[0, 1], [2, 3], [4, 5], [6, 7]], [[0, 4], [1, 5], [2, 6], [3, 7]]
HALVES = [[0, 1, 2, 3], [4, 5, 6, 7]]
FAST, UPLINK = Link(bandwidth=1e10, latency=2e-6), Link(bandwidth=7e8, latency=5e-6)
BY_HALVES = {"switches": HALVES, "switch": UPLINK}
BY_PAIRS = {"switches": [[0, 1], [2, 3]], "switch": UPLINK}
ODD = [[0, 4, 1], [5], [2, 6], [3, 7]]
EIGHT = {
    "1x8": cluster(1, 8),
    "2x4": cluster(2, 4),
    "4x2": cluster(4, 2),
    "8x1": cluster(8, 1),
    "islands": cluster(1, 8, islands=PAIRS, island=FAST),
    "two islands a server": cluster(2, 4, islands=[[0, 1], [2, 3]], island=FAST),
    "switches": cluster(1, 8, **BY_HALVES),
    "islands across switches": cluster(1, 8, islands=ACROSS, island=FAST, **BY_HALVES),
    "two cards": cluster(2, 4, nics=[[0, 1], [2, 3]]),
    "cards and switches": cluster(2, 4, nics=[[0, 1], [2, 3]], **BY_PAIRS),
    "a card across switches": cluster(2, 4, nics=[[0, 2], [1, 3]], **BY_PAIRS),
    "no two alike": cluster(
        *(1, 8), nics=[[0, 2, 4], [1, 3, 5, 6, 7]], islands=ODD, island=FAST, **BY_HALVES
    ),
}


def traffic(ranks: int, seed: int) -> np.ndarray:
    """Everyone sends to some, and a few pairs are heavy."""
    random = np.random.default_rng(seed)
    some, few = (random.random((ranks, ranks)) < share for share in (0.7, 0.2))
    sent = random.integers(0, 300_000, (ranks, ranks)) * some
    return (sent + random.integers(0, 2_000_000, (ranks, ranks)) * few) * ~np.eye(ranks, dtype=bool)


def by_cost(where: Cluster, placement: tuple[int, ...], sent: np.ndarray) -> float:
    return float(Cost(where, placement).exchange(sent).alone)


def best(where: Cluster, sent: np.ndarray, groups: Sequence[Sequence[int]] = ()) -> tuple[int, ...]:
    """Of the placements that are proposed."""
    every = proposed(where, range(where.ranks), [sent], groups)
    return min(every, key=lambda placement: by_cost(where, placement, sent))


@pytest.mark.parametrize("name", EIGHT)
def test_ranks_stay_in_order_or_sit_where_fewer_bytes_go_far(name):
    """The order of the GPUs comes first. One proposal is no slower than four of five others."""
    where, sent, order = EIGHT[name], traffic(8, 0), tuple(range(8))
    every = proposed(where, order, [sent], ())
    assert every[0] == order and all(sorted(each) == list(order) for each in every)
    assert proposed(where, order, [1e6 * ~np.eye(8, dtype=bool)], ()) == [order]
    random = np.random.default_rng(1)
    others = [tuple(random.permutation(8).tolist()) for _ in range(200)]
    seconds = [by_cost(where, each, sent) for each in others]
    assert by_cost(where, best(where, sent), sent) <= np.quantile(seconds, 0.2) * (1 + 1e-9)


def test_no_other_gpus_are_used_than_those_given():
    gpus = (0, 1, 4, 5)
    every = proposed(EIGHT["2x4"], gpus, [traffic(4, 1)], ())
    assert len(every) > 1 and all(set(each) == set(gpus) for each in every)


@st.composite
def places(draw) -> Cluster:
    """2 to 6 GPUs with any islands, switches and cards, and any links."""
    servers, gpus = draw(st.sampled_from([(1, 4), (2, 2), (4, 1), (1, 5), (1, 6), (2, 3), (3, 2)]))
    return cluster(servers, gpus, **wiring(draw, gpus))


@given(places(), st.booleans(), st.integers(0, 10**6))
@settings(max_examples=examples(40))
def test_groups_stay_together(where, by_server, seed):
    at = Places.of(where, range(where.ranks))
    tied = (at.server if by_server else at.island).tolist()
    assume(len(set(Counter(tied).values())) == 1)
    for placement in proposed(where, range(where.ranks), [traffic(where.ranks, seed)], (), tied):
        homes = {(group, tied[gpu]) for group, gpu in zip(tied, placement, strict=True)}
        assert len(homes) == len(set(tied))


def test_a_walk_leaves_a_place_when_it_has_seen_it():
    assert walk(EIGHT["islands across switches"], range(8)) == [0, 4, 1, 5, 2, 6, 3, 7]
    two = cluster(2, 4, switches=[[0, 2], [1, 3]], switch=UPLINK)
    assert walk(two, range(8)) == [0, 2, 1, 3, 4, 6, 5, 7]


GRAPH = laws.GRAPHS[0]


def problem_of(where: Cluster, graph: Graph = GRAPH, **workload: Any) -> Problem:
    return laws.problem_of(graph, where, **{"model": "sage", "layers": 4, **workload})


def test_groups_follow_the_islands():
    """Switch by switch where islands are; with other bridges the same GPUs get other groups."""
    strategy, seen = parse("gnnpipe(stages=2,chunks=8)"), []
    for islands in (HALVES, [[0, 2, 4, 6], [1, 3, 5, 7]], [[0, 1, 6, 7], [2, 3, 4, 5]]):
        problem = problem_of(cluster(1, 8, islands=islands, island=FAST))
        gpus = placed(problem, strategy).placement or range(8)
        seen.append([set(gpus[:4]), set(gpus[4:])])
        assert sorted(map(sorted, seen[-1])) == sorted(islands)
    assert seen[0] != seen[1] != seen[2]


@pytest.mark.parametrize(
    ("where", "name"),
    [
        *product(
            ("cards and switches", "islands across switches", "two islands a server"),
            ("graph_parallel", "pipegcn", "gnnpipe(stages=2,chunks=4)"),
        ),
        ("two islands a server", "granndis(depth=1)"),
        ("a card across switches", "granndis"),
    ],
)
def test_a_placed_schedule_is_its_prediction(name, where):
    """On every kind of link, with ranks out of order: bytes and seconds are those predicted."""
    problem = problem_of(EIGHT[where]).placed((5, 0, 3, 6, 1, 7, 2, 4))
    strategy = parse(name).settle(problem)
    predicted, schedule = strategy.predict(problem), strategy.schedule(problem, 3)
    assert predicted.bytes_total == sum(predicted.bytes_by_link.values())
    expected = {op: 3 * nbytes for op, nbytes in predicted.bytes.items() if nbytes}
    assert schedule.bytes_by_op() == expected
    alone, contended = (
        play(schedule, problem.cost, contention=c).epoch_s(1) for c in (False, True)
    )
    assert float(predicted.epoch_s) == pytest.approx(contended, rel=strategy.claim)
    assert contended >= alone * (1 - 1e-9)


def test_plans_remember_placement():
    islands = [[0, 2, 4, 6], [1, 3, 5, 7]]
    problem = problem_of(cluster(1, 8, islands=islands, island=FAST))
    found = search(problem, forced=parse("gnnpipe(stages=2,chunks=8)"))
    document = plan.make(found)
    asked, best = plan.question(document), document["best"]
    assert asked.placement == found.best.problem.placement != ()
    assert asked.by_gpu == tuple(np.argsort(asked.placement))
    epoch_s = float(plan.chosen(document).predict(asked).epoch_s)
    assert epoch_s == best["predicted"]["epoch_s"]
    told = "in the order of the GPUs an epoch would be"
    assert any(told in line for line in document["explanation"])
    assert {place["stage"] for place in best["placement"]} == {0, 1}


@pytest.mark.parametrize(
    ("place", "rule"),
    [
        ((0, 0, 9), "rank 0 sits on GPU 9 of server 0, but there are 1 servers of 8 GPUs"),
        ((0, -1, 0), "sits on GPU 0 of server -1"),
        ((0, 0, 1), "a GPU of its own"),
        ((1, 0, 0), "without a gap"),
        ((99, 0, 0), "without a gap"),
        (("0", 0, 0), "best.placement.0.rank: must be a valid integer"),
        ((True, 0, 0), "must be a valid integer"),
        ((), "best.placement.0.rank must be given"),
        (7, "best.placement.0 must be an object"),
        (None, "best.placement must be a list"),
    ],
)
def test_a_placement_edited_by_hand(place, rule):
    problem = problem_of(cluster(1, 8))
    document = plan.make(search(problem, forced=parse("graph_parallel")))
    if place is None:
        document["best"]["placement"] = {}
    else:
        names = ("rank", "server", "gpu")
        fields = dict(zip(names, place, strict=False)) if isinstance(place, tuple) else place
        document["best"]["placement"][0] = fields
    with pytest.raises(SpecError, match=rule):
        plan.question(document)


@pytest.mark.slow
def test_a_small_graph_takes_fewer_gpus_and_a_large_one_all():
    """400 vertices are computed before a message has arrived; on a slow device all are needed."""
    found = search(problem_of(cluster(2, 2), layers=2))
    best, document = found.best, plan.make(found)
    assert best.problem.ranks < 4
    assert document["best"]["gpus"] == best.problem.ranks == len(document["best"]["placement"])
    asked = plan.question(document)
    assert (asked.placement, asked.ranks) == (best.problem.placement, best.problem.ranks)
    [told] = (s for s in document["explanation"] if s.startswith(f"{asked.ranks} of 4 GPU"))
    assert " faster than all" in told
    large = problem_of(cluster(2, 2, device=changed(EIGHT["2x4"], gemm=1e8).device))
    large = on(large, memory_bandwidth=1e8)
    assert search(large).best.problem.ranks == 4
    without_network = on(large, inter_node=Link(bandwidth=1e4))  # all but that
    assert search(without_network, exact=True).best.problem.servers == (0, 0)


@pytest.mark.parametrize(
    ("lists", "rule"),
    [
        ({"islands": [[0, 1], [2]], "island": FAST}, r"4 GPUs \(0 to 3\) once \(missing: 3\)"),
        ({"islands": [[0, 1], [1, 2, 3]], "island": FAST}, r"twice: 1"),
        ({"nics": [[0, 1], [2, 3, 4]]}, r"nics .*not there: 4"),
        ({"switches": [[0, 1, 2, 3], []], "switch": UPLINK}, "switches has an empty list"),
        ({"islands": [[0, 1], [2, 3]]}, "islands is given, so island must be given too"),
        ({"switch": UPLINK}, "switch is given, so switches must be given too"),
    ],
)
def test_impossible_servers(lists, rule):
    with pytest.raises(SpecError, match=rule):
        cluster(2, 4, **lists)


def test_lists_of_gpus_may_be_set():
    told = ["islands=[[0, 1], [2, 3]]", "island.bandwidth=100GB/s"]
    given, _ = apply_overrides(cluster(2, 4), Workload(), told)
    assert given.islands == ((0, 1), (2, 3)) and given.island.bandwidth == 1e11
    # of the last two pydantic told that a tuple is no tuple
    for no_lists in ("0-3", "2", "[0, 1]"):
        with pytest.raises(SpecError, match="islands: must be lists of GPUs such as"):
            apply_overrides(cluster(2, 4), Workload(), [f"islands={no_lists}"])
    # a sweep kept the first GPUs of the lists, and --set refused
    assert apply_overrides(given, Workload(), ["gpus_per_server=2"])[0].islands == ((0, 1),)
    with pytest.raises(SpecError, match="mend the lists or gpus_per_server"):
        apply_overrides(given, Workload(), ["gpus_per_server=8"])
    assert with_ranks(given, 4).islands == ((0, 1),)
    with pytest.raises(SpecError, match=r"islands of cluster .* holds 4; use --ranks 8 or less"):
        with_ranks(changed(given, kind="cpu"), 16)
