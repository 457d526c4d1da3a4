"""Where ranks sit, and how many GPUs are worth using. GraNNDis with islands of GPUs in the place of
servers: the same story on other links, placements that keep an island's ranks on one, and a choice
that changes with the topology. Then its batches: how many, what they load, what they cost."""

import re
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise, permutations, product
from typing import Any

import numpy as np
import pytest
from asked import by_statistics, changed, fullest_bytes, on
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from nightly import NIGHT, at_night, covered, examples
from test_topology import wiring

from gnnplan.planner.cluster.cost import Cost
from gnnplan.planner.cluster.placement import proposed, walk
from gnnplan.planner.cluster.places import Places
from gnnplan.planner.cluster.spec import Cluster, Device, Link
from gnnplan.planner.decision import plan
from gnnplan.planner.decision.candidate import evaluate, placed
from gnnplan.planner.decision.search import search
from gnnplan.planner.gnn.workload import Workload
from gnnplan.planner.graph.graph import Graph
from gnnplan.planner.graph.load import load
from gnnplan.planner.problem.inputs import apply_overrides
from gnnplan.planner.problem.problem import Problem, with_ranks
from gnnplan.planner.strategies import GraNNDis, GraphParallel, parse
from gnnplan.planner.vocabulary.errors import Infeasible, SpecError
from gnnplan.planner.vocabulary.schedule import Collective
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
    problem = problem_of(cluster(1, 8, islands=[[0, 2, 4, 6], [1, 3, 5, 7]], island=FAST))
    found = search(problem, forced=parse("gnnpipe(stages=2,chunks=8)"))
    document = plan.make(found)
    asked, best = plan.question(document), document["best"]
    assert asked.placement == found.best.problem.placement != ()
    assert asked.by_gpu == tuple(np.argsort(asked.placement))
    assert float(plan.chosen(document).predict(asked).epoch_s) == best["predicted"]["epoch_s"]
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
    document = plan.make(search(problem_of(cluster(1, 8)), forced=parse("graph_parallel")))
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


SPARSE = load(
    "synthetic:community?vertices=2000&edges=8000&features=40&classes=5&communities=50&mixing=0.02"
)
LARGE = load(
    "synthetic:community?vertices=4000&edges=40000&features=40&classes=5&communities=40&mixing=0.05"
)
CROSSED, PAIRED = [[0, 2], [1, 3]], [[0, 1], [2, 3]]


def preloading(
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


WIRED = (1, CROSSED), (2, PAIRED), (2, [[0], [1]]), (1, [[0, 4, 1], [3, 2, 5]])


@pytest.mark.parametrize(
    ("servers", "islands", "known"),
    covered(
        [(*where, known) for where in WIRED for known in (True, False)],
        lambda row: {str(row[:2]), row[2]},
    ),
)
def test_closed_form_schedule_and_simulation(servers, islands, known):
    """Bytes by link read off the schedule, by where ends sit; and the time of playing it."""
    problem = preloading(servers, islands)
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
    problem = by_statistics(preloading(2, PAIRED))
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
    problem = preloading(where[0], islands, graph, model=model, layers=layers, heads=1)
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
        at_night("granndis(depth=1)", PAIRED),
        at_night("granndis(group='island')", PAIRED),
        at_night("granndis(group='island')", CROSSED),
    ],
)
def test_groups_stay_together_and_hardly_a_placement_that_keeps_them_is_faster(strategy, islands):
    """Of 8 GPUs, by the closed form: a link may be busy 2 % longer for fewer bytes in all."""
    problem, chosen = preloading(2, islands), parse(strategy)
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
    where = preloading(8, CROSSED).cluster
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
    problem, out = preloading(servers, CROSSED, LARGE, intra=intra, layers=3), {}
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
        (2, PAIRED, (), {"server", "island"}),
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
    problem = preloading(servers, islands)
    problem = problem.placed(placement) if placement else problem
    assert {strategy.group for strategy in GraNNDis.candidates(problem)} == groups


def test_what_a_plan_says():
    one = preloading(1, [[0, 1]])
    said = "one server, one island: no row crosses groups, so there is nothing to preload"
    for alone in (one, preloading(1, CROSSED).placed((0, 2))):
        assert GraNNDis.absent(alone).startswith(said)
    assert "its islands hold 1, 2 GPUs" in GraNNDis.absent(preloading(1, [[0, 1], [2]]))
    said = "Islands of GPUs may preload too, with group='island'."
    assert GraNNDis.explain(preloading(1, CROSSED), None)[0].endswith(said)
    assert not any("Islands" in line for line in GraNNDis.explain(one, None))


def in_batches(
    servers: int = 2, gpus: int = 2, graph: Graph = SPARSE, layers: int = 2, **fields: Any
) -> Problem:
    """Fields are of the workload, and of the cluster or its devices."""
    of_cluster = {name: fields.pop(name) for name in ("memory", "host") if name in fields}
    where = changed(laws.cluster(servers, gpus), **of_cluster)
    return laws.problem_of(graph, where, layers=layers, **fields)


@pytest.mark.parametrize("knobs", [{}, {"max_hop": 1, "fanout": 2}])
def test_the_fewest_batches_that_fit(knobs):
    """As trying 1, 2, 3, ... in turn would find, as long as more batches need less."""
    question = in_batches()
    needs = {b: fullest_bytes(question, GraNNDis(batches=b, **knobs)) for b in range(1, 9)}
    assert all(needs[batches] > needs[batches + 1] for batches in range(1, 5)), needs
    for room in [*(needs[batches] for batches in (1, 2, 5)), 1e12]:
        problem = in_batches(memory=room)
        fewest = next(batches for batches, need in needs.items() if need <= room)
        settled = GraNNDis(batches=None, **knobs).settle(problem)
        assert settled.batches == fewest and settled.exact == (fewest == 1 and not knobs)
        assert settled == settled.settle(problem)
        assert settled == GraNNDis(batches=fewest, **knobs).settle(problem)


def test_many_batches():
    """Memory of more than 31 batches once ended in numpy's ValueError."""
    problem = in_batches()
    few, many = (GraNNDis(batches=n).memory(problem)["activations"] for n in (8, 40))
    assert many.max() < few.max()
    told = by_statistics(problem)  # 80 times the same batch
    one, many = (GraNNDis(batches=n).memory(told) for n in (1, 80))
    assert many["activations"].max() < one["activations"].max()
    assert many["graph"].max() > one["graph"].max()
    assert GraNNDis(batches=80).predict(told).by_op["load"] > 0


def test_search_offers_batches_where_the_whole_does_not_fit():
    room = fullest_bytes(in_batches(), GraNNDis(batches=3))
    found = search(in_batches(memory=room), may_use_fewer=False).ranked
    ours = [c.strategy for c in found if isinstance(c.strategy, GraNNDis)]
    assert 3 in {strategy.batches for strategy in ours if not strategy.sampled}
    assert all(c.memory_bytes <= room for c in found)
    exact = search(in_batches(memory=room * 10), exact=True, may_use_fewer=False).ranked
    assert all(c.strategy.batches == 1 for c in exact if isinstance(c.strategy, GraNNDis))


def test_what_does_not_fit_however_small_the_batches():
    """Libraries are 1.4 GB: no batch is tried. With more room, those that need least are told."""
    assert GraNNDis(batches=None).settle(in_batches(memory=1.3e9)).batches == 1
    problem = in_batches(memory=1.4002e9)
    settled = GraNNDis(batches=None).settle(problem)
    assert fullest_bytes(problem, settled) > 1.4002e9 and fullest_bytes(problem, settled) <= min(
        fullest_bytes(problem, GraNNDis(batches=n)) for n in (1, 2, 4)
    )
    with pytest.raises(Infeasible, match=re.escape(str(settled))):
        search(problem, forced=GraNNDis(batches=None))


def test_batches_take_turns_in_another_order_in_every_epoch():
    problem, strategy = in_batches(), GraNNDis(batches=3)
    turns = [[strategy.turn(problem, 3 * epoch + n) for n in range(3)] for epoch in range(20)]
    assert {tuple(sorted(turn)) for turn in turns} == {(0, 1, 2)}
    assert len(set(map(tuple, turns))) == 6


def test_several_batches_are_launched_kernel_by_kernel():
    """Only the step of the whole graph is a CUDA graph; others were predicted as one launch."""
    problem = on(in_batches(1, 1), launch=1e-3)
    whole, two = (GraNNDis(batches=n).settle(problem).predict(problem) for n in (1, 2))
    assert two.epoch_s > 100 * whole.epoch_s
