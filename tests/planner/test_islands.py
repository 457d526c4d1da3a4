"""GraNNDis with islands of GPUs in the place of servers: the same story on other links, placements that
keep an island's ranks on one, and a choice that changes with the topology."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise, permutations, product
from typing import Any

import numpy as np
import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from gnnplan.planner.cluster.cost import Cost
from gnnplan.planner.cluster.placement import proposed
from gnnplan.planner.cluster.spec import Cluster, Device, Link
from gnnplan.planner.decision.candidate import evaluate, placed
from gnnplan.planner.decision.search import search
from gnnplan.planner.gnn.workload import Workload
from gnnplan.planner.graph.graph import Graph, in_neighbours
from gnnplan.planner.graph.load import load
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies import GraNNDis, GraphParallel, Prediction, parse
from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.planner.vocabulary.schedule import Collective
from gnnplan.simulator.player import play


def community(vertices: int, edges: int, **more: Any) -> Graph:
    words = "".join(f"&{name}={value}" for name, value in more.items())
    graph = load(
        f"synthetic:community?vertices={vertices}&edges={edges}&features=40&classes=5{words}"
    )
    return graph


GRAPH = community(400, 6000)
SPARSE = community(2000, 8000, communities=50, mixing=0.02)
LARGE = community(4000, 40_000, communities=40, mixing=0.05)
CROSSED, PAIRS, HALVES = [[0, 2], [1, 3]], [[0, 1], [2, 3]], [[0, 1, 2, 3], [4, 5, 6, 7]]


def problem_of(
    servers: int,
    islands: list[list[int]],
    graph: Graph = GRAPH,
    intra: float = 1e9,
    island: float = 1e11,
    inter: float = 1e8,
    compute: float = 1e11,
    **workload: Any,
) -> Problem:
    device = Device(memory=1e12, gemm=compute, memory_bandwidth=compute, launch=1e-6)
    links = {"intra_node": intra, "inter_node": inter, "island": island}
    where = Cluster(
        servers=servers,
        gpus_per_server=sum(map(len, islands)),
        device=device,
        islands=islands,
        **{name: Link(bandwidth=bandwidth, latency=1e-6) for name, bandwidth in links.items()},
    )
    return Problem(
        graph.stats,
        graph,
        Workload(**{"model": "gcn", "layers": 4, "hidden": 64, **workload}),
        where,
    )


def settled(problem: Problem, **knobs: Any) -> GraNNDis:
    strategy = GraNNDis(group="island", **knobs).settle(problem)
    strategy.check(problem)
    return strategy


def told(problem: Problem) -> list[GraNNDis]:
    """Variants that preload in islands."""
    knobs: list[dict[str, Any]] = [
        {"depth": 1},
        {"depth": 2, "narrow": True},
        {},
        {"max_hop": 1, "fanout": 2},
        {"batches": 3},
        {"max_hop": 2, "fanout": 2, "degrees": "local", "batches": 2},
    ]
    return [settled(problem, **k) for k in knobs]


# -- one story -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("servers", "islands"), [(1, CROSSED), (2, PAIRS), (2, [[0], [1]]), (1, [[0, 4, 1], [3, 2, 5]])]
)
@pytest.mark.parametrize("known", [True, False])
def test_closed_form_schedule_and_simulation(servers, islands, known):
    """Bytes by link read off the schedule, each from where its two ends sit; and the time of
    playing it."""
    problem = problem_of(servers, islands)
    if not known:
        problem = replace(problem, stats=replace(problem.stats, known=False), graph=None)
    for strategy in told(problem):
        p, steps = strategy.predict(problem), strategy.steps(problem)
        schedule = strategy.schedule(problem, 3 * steps)
        links: Counter[str] = Counter()
        for task in schedule.tasks:
            if task.label.step < steps and isinstance(task.work, Collective):
                for peer, nbytes in task.work.to_peers:
                    links[problem.cost.link_name(task.rank, peer)] += nbytes
        for _ in range(steps):
            links.update(
                problem.cost.all_reduces.bytes_by_link(
                    p.bytes["all_reduce"] // steps, range(problem.ranks)
                )
            )
        assert p.bytes_by_link == {where: nbytes for where, nbytes in links.items() if nbytes}, (
            strategy
        )
        assert schedule.bytes_by_op(t for t in schedule.tasks if t.label.step < steps) == p.bytes
        assert sum(schedule.bytes_by_op(schedule.setup).values()) == p.setup_bytes > 0
        assert play(schedule, problem.cost).epoch_s(steps) == pytest.approx(
            float(p.epoch_s), rel=strategy.claim
        )


@pytest.mark.parametrize("knobs", [{}, {"max_hop": 1, "fanout": 3}, {"batches": 2}])
def test_only_gradients_leave_an_island(knobs):
    """Halos stay on island links: what passes PCIe and the network is the ring, which leaves every
    island once. The server's way round, halos do pass PCIe."""
    problem = problem_of(2, CROSSED)
    p = settled(problem, **knobs).predict(problem)
    ring = problem.cost.all_reduces.bytes_by_link(p.bytes["all_reduce"], range(8))
    assert {where: n for where, n in p.bytes_by_link.items() if where != "island"} == {
        w: n for w, n in ring.items() if w != "island"
    }
    assert p.bytes_by_link["island"] == ring["island"] + p.bytes["halo"]
    of_servers = GraNNDis(**knobs).settle(problem).predict(problem)
    assert of_servers.bytes_by_link["intra_node"] > 2 * p.bytes_by_link["intra_node"]


def test_an_island_of_one_gpu_is_a_server_of_one():
    """Two servers of two such islands compute, hold and exchange what four servers of one GPU do,
    on other links."""
    islands = problem_of(2, [[0], [1]])
    alone = islands.cluster.model_copy(
        update={"servers": 4, "gpus_per_server": 1, "islands": (), "island": None}
    )
    servers = replace(islands, cluster=alone)
    for strategy in told(islands):
        other = replace(strategy, group="server")
        ours, theirs = strategy.predict(islands), other.predict(servers)
        assert (ours.bytes, ours.setup_bytes, ours.compute_s) == (
            theirs.bytes,
            theirs.setup_bytes,
            theirs.compute_s,
        )
        assert set(ours.bytes_by_link) == {"intra_node", "inter_node"} and set(
            theirs.bytes_by_link
        ) == {"inter_node"}
        memory = other.memory(servers)
        assert all(
            np.array_equal(nbytes, memory[use]) for use, nbytes in strategy.memory(islands).items()
        )


def test_the_fewest_batches_that_fit_an_island():
    question = problem_of(1, CROSSED, SPARSE, layers=2)

    def need(batches: int) -> float:
        return float(
            sum(settled(question, batches=batches).memory(question).values(), np.zeros(1)).max()
        )

    room = need(3)
    assert need(2) > room
    device = question.cluster.device.model_copy(update={"memory": room})
    tight = replace(question, cluster=question.cluster.model_copy(update={"device": device}))
    assert settled(tight, batches=None).batches == 3
    candidates = [
        c.strategy
        for c in search(tight, may_use_fewer=False).ranked
        if isinstance(c.strategy, GraNNDis)
    ]
    assert any(c.group == "island" and c.batches == 3 and not c.sampled for c in candidates)


def test_estimated_batches_of_islands():
    """Of a graph known by statistics only: a batch has its share of an island's training vertices,
    and there are no more batches."""
    known = problem_of(2, PAIRS)
    problem = replace(known, stats=replace(known.stats, known=False), graph=None)
    mine = problem.stats.train_vertices / 4
    assert [layout.targets for layout in settled(problem, batches=3).layouts(problem)] == [
        mine / 3
    ] * 3
    settled(problem, batches=int(mine))
    with pytest.raises(SpecError, match=f"fewest on one: {int(mine)}, batches: {int(mine) + 1}"):
        settled(problem, batches=int(mine) + 1)


@given(
    st.sampled_from([GRAPH, SPARSE, community(120, 900, seed=1)]),
    st.sampled_from(["gcn", "sage", "gcnii", "gat"]),
    st.integers(1, 6),
    st.sampled_from([(1, 2), (1, 3), (2, 2), (3, 2)]),
)
@settings(deadline=None, max_examples=examples(15))
def test_more_depth_is_never_more_bytes_between_islands(graph, model, layers, where):
    """Of one GPU, so that the cut is the same at every depth: fewer bytes in an epoch, more before
    the first, more rows to compute."""
    problem = problem_of(
        where[0], [[g] for g in range(where[1])], graph, model=model, layers=layers, heads=1
    )
    strategies = [settled(problem, depth=depth) for depth in range(layers + 1)]
    p = [strategy.predict(problem) for strategy in strategies]
    for shallow, deep in pairwise(p):
        assert deep.bytes_total <= shallow.bytes_total and deep.setup_bytes >= shallow.setup_bytes
    for layer in range(1, layers + 1):
        rows = [strategy.layout(problem).facts(layer).rows for strategy in strategies]
        assert all((deep >= shallow).all() for shallow, deep in pairwise(rows))
    assert "halo" not in p[-1].bytes


# -- placement -------------------------------------------------------------------------------------


def places(problem: Problem, group: str) -> list[set[int]]:
    """The islands, or servers, that the ranks of each group sit on."""
    at, tied = problem.cost.places, GraNNDis(group=group).tied(problem)
    where = at.island if group == "island" else at.server
    return [
        {int(where[rank]) for rank in range(problem.ranks) if tied[rank] == number}
        for number in sorted(set(tied))
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "islands"),
    [
        ("granndis(depth=1,group='island')", CROSSED),
        pytest.param("granndis(depth=1)", PAIRS, marks=pytest.mark.nightly),
        pytest.param("granndis(group='island')", PAIRS, marks=pytest.mark.nightly),
        pytest.param("granndis(group='island')", CROSSED, marks=pytest.mark.nightly),
    ],
)
def test_groups_stay_together_and_hardly_a_placement_that_keeps_them_is_faster(strategy, islands):
    """Placements of 8 GPUs in which the same ranks share an island (a server), weighed by the closed
    form itself. Bytes take the shortest way in all, so one link may be busy 2 % longer."""
    problem, chosen = problem_of(2, islands, inter=1e8), parse(strategy)
    in_order = chosen.settle(problem)
    found = placed(problem, chosen)
    assert all(len(place) == 1 for place in places(found, chosen.group))
    assert in_order.tied(found) == in_order.tied(problem)
    # the same rows on every rank: only links change
    assert in_order.layout(found) is in_order.layout(problem)
    tied, at = in_order.tied(problem), problem.cost.places
    home = at.island if chosen.group == "island" else at.server
    gpus = [np.flatnonzero(home == place).tolist() for place in range(len(set(tied)))]
    ranks = np.argsort(tied, kind="stable")  # group after group
    kept = [
        tuple(np.ravel(sits)[np.argsort(ranks)].tolist())
        for order in permutations(gpus)
        for sits in product(*map(permutations, order))
    ][::7]
    assert all(in_order.tied(problem.placed(placement)) == tied for placement in kept)
    best = min(float(in_order.predict(problem.placed(placement)).comm_s) for placement in kept)
    found_s, in_order_s = (float(in_order.predict(p).comm_s) for p in (found, problem))
    assert found_s <= in_order_s and found_s == pytest.approx(best, rel=0.02)


def test_islands_that_read_each_other_share_a_server():
    """Four islands, two and two of them with much in common, in an order that parts them: the
    placement brings them together."""
    parts = np.repeat(np.arange(4), 100)
    random = np.random.default_rng(0)
    src, dst = random.integers(0, 400, (2, 20_000))
    near = (parts[src] == parts[dst]) | (
        (parts[src] + parts[dst] == 3) & (random.random(src.size) < 0.2)
    )
    indptr, indices, _ = in_neighbours(src[near], dst[near], 400, directed=False)
    graph = replace(
        GRAPH,
        stats=replace(GRAPH.stats, edges=indices.size, hash="two pairs"),
        indptr=indptr,
        indices=indices,
    )
    problem, strategy = problem_of(2, PAIRS, graph), parse("granndis(depth=1,group='island')")
    layout = strategy.layout(problem)
    sends = np.add.reduceat(
        np.add.reduceat(layout.facts(4).sends, range(0, 8, 2), 0), range(0, 8, 2), 1
    )
    friends = {
        frozenset((group, int(np.argmax(sends[group] * (np.arange(4) != group)))))
        for group in range(4)
    }
    found = placed(problem, strategy)
    tied, servers = strategy.tied(found), found.servers
    sharing = {
        frozenset(tied[rank] for rank in range(8) if servers[rank] == server) for server in (0, 1)
    }
    assert len(friends) == 2 and sharing == friends
    every = [
        strategy.predict(
            problem.placed(tuple(np.ravel([PAIR[i] for i in order]).tolist()))
        ).bytes_by_link["inter_node"]
        for PAIR in [((0, 1), (2, 3), (4, 5), (6, 7))]
        for order in permutations(range(4))
    ]
    assert strategy.predict(found).bytes_by_link["inter_node"] == min(every) < max(every)


def test_groups_that_talk_meet_among_32_gpus():
    """Pairs of islands with heavy traffic between them, and members that would rather be elsewhere:
    islands move as a whole until every pair has a server."""
    where = problem_of(8, CROSSED, inter=1e8).cluster
    tied = Cost(where).places.island
    friend = np.random.default_rng(2).permutation(16).reshape(8, 2)
    partner = {int(a): int(b) for pair in friend for a, b in (pair, pair[::-1])}
    sent = np.zeros((32, 32))
    for a in range(32):
        sent[a, tied == partner[int(tied[a])]] = 1e6
        sent[a, (a + 1) % 32] += 1e3
    placement = proposed(where, range(32), [sent], (), tied.tolist())[-1]
    at = Cost(where, placement).places
    assert all(
        len({int(at.island[rank]) for rank in np.flatnonzero(tied == group)}) == 1
        for group in range(16)
    )
    assert all(
        len({int(at.server[rank]) for rank in np.flatnonzero(np.isin(tied, pair))}) == 1
        for pair in friend
    )


# -- the choice ------------------------------------------------------------------------------------


def fastest(problem: Problem) -> dict[str, Prediction]:
    """Of what is exact: the best prediction of graph parallel, and of GraNNDis by group."""
    out: dict[str, Prediction] = {}
    for strategy in (*GraphParallel.candidates(problem), *GraNNDis.candidates(problem)):
        if strategy.exact:
            predicted = evaluate(placed(problem, strategy), strategy).predicted
            group = getattr(strategy, "group", "none")
            out[group] = min(predicted, out.get(group, predicted), key=lambda p: float(p.epoch_s))
    return out


@pytest.mark.slow
def test_slow_pcie_between_islands_makes_them_preload_and_fast_pcie_does_not():
    """One server. Then two: islands beat servers where halos would pass a slow PCIe, and lose where
    it is as fast as NVLink."""
    slow, fast = (
        fastest(problem_of(1, CROSSED, LARGE, intra=intra, layers=3)) for intra in (1e8, 1e11)
    )
    assert set(slow) == set(fast) == {"none", "island"}
    assert float(slow["island"].epoch_s) < 0.7 * float(slow["none"].epoch_s)
    assert float(fast["island"].epoch_s) > float(fast["none"].epoch_s)
    slow, fast = (
        fastest(problem_of(2, CROSSED, LARGE, intra=intra, layers=3)) for intra in (1e8, 1e11)
    )
    assert float(slow["island"].epoch_s) < 0.8 * min(
        float(slow["server"].epoch_s), float(slow["none"].epoch_s)
    )
    assert float(fast["server"].epoch_s) < min(
        float(fast["island"].epoch_s), float(fast["none"].epoch_s)
    )


@pytest.mark.parametrize(
    ("servers", "islands", "groups"),
    [
        (1, CROSSED, {"island"}),
        (2, PAIRS, {"server", "island"}),
        (2, [[0, 1]], {"server"}),
        (1, [[0, 1]], set()),
        (1, [[0, 1], [2]], set()),
        (2, [[0, 1], [2]], {"server"}),
    ],
)
def test_what_is_offered(servers, islands, groups):
    assert {
        s.group
        for s in GraNNDis.candidates(problem_of(servers, islands))
        if isinstance(s, GraNNDis)
    } == groups


def test_half_of_every_island_and_one_island_are_offered_what_they_have():
    """Fewer GPUs: of [[0, 2], [1, 3]] one island, a GPU of each, three GPUs."""
    problem = problem_of(1, CROSSED)
    for placement, groups in (((0, 2), set()), ((0, 1), {"island"}), ((0, 1, 2), set())):
        some = problem.placed(placement)
        assert {s.group for s in GraNNDis.candidates(some) if isinstance(s, GraNNDis)} == groups, (
            placement
        )
    assert GraNNDis.absent(problem.placed((0, 2))).startswith(
        "one server, one island: no row crosses"
    )


# -- words -----------------------------------------------------------------------------------------


def test_what_a_plan_says():
    one = problem_of(1, [[0, 1]])
    assert GraNNDis.absent(one).startswith(
        "one server, one island: no row crosses groups, so there is nothing to preload"
    )
    assert "its islands hold 1, 2 GPUs" in GraNNDis.absent(problem_of(1, [[0, 1], [2]]))
    assert parse(str(GraNNDis(2, group="island"))) == GraNNDis(2, group="island")
    assert GraNNDis.explain(problem_of(1, CROSSED), None)[0].endswith(
        "Islands of GPUs may preload too, with group='island'."
    )
    assert not any("Islands" in line for line in GraNNDis.explain(one, None))
