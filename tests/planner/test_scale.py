"""Should I distribute at all: a row per number of GPUs is a plan of its own."""

from dataclasses import replace
from itertools import permutations, product

import pytest
from asked import on
from examples import NIGHT
from pairwise import at_night, covered

from gnnplan.planner.decision.objective import Objective
from gnnplan.planner.decision.plan import make
from gnnplan.planner.decision.search import Search, search
from gnnplan.planner.decision.summary import NEARLY_FULL, nearly_full
from gnnplan.planner.decision.sweep import Scaling, problem_of, scale, sizes_of
from gnnplan.planner.gnn.workload import Workload
from gnnplan.planner.graph.load import load
from gnnplan.planner.problem.inputs import apply_overrides, read_cluster
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies import parse
from gnnplan.planner.vocabulary.errors import Infeasible, SpecError


def question(
    graph: str = "flickr", cluster: str = "dgx_a100", *settings: str, **workload: object
) -> Problem:
    stats = load(graph)
    asked = Workload.model_validate({"layers": 2} | workload)
    there, asked = apply_overrides(read_cluster(cluster), asked, settings)
    return Problem(stats, None, asked, there)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        *(("0", "from 1 to 8,192, got 0"), ("-2,4", "got -2"), ("1..9000", "got 9000")),
        ("many", "write numbers of GPUs as a range that doubles, 1..64"),
        *(("1,,2", "as a range"), ("", "as a range"), ("8..4", "write 4..8")),
        *(([], "got none"), ([2, 0.5], "got 0.5"), ([True], "got True")),
    ],
)
def test_a_wrong_number_is_told_with_what_to_write(asked, said):
    assert sizes_of("3..20") == [3, 6, 12, 20] and sizes_of("5..5") == [5]
    assert sizes_of("1..64")[-1] == 64 and sizes_of(" 8, 1,8") == [1, 8]
    with pytest.raises(SpecError, match=said):
        sizes_of(asked)


@pytest.mark.parametrize(("gpus", "servers"), [(1, 1), (3, 1), (8, 1), (16, 2), (64, 8)])
def test_gpus_are_on_one_server_while_they_fit_there_and_then_on_whole_ones(gpus, servers):
    base = question()  # 2 servers x 8
    there = problem_of(base, gpus)
    assert (there.ranks, there.cluster.servers, there.cluster.gpus_per_server) == (gpus, servers, 8)
    # GPUs of an island first
    islands = question("flickr", "gsplit_p3_8xlarge")
    assert len(set(problem_of(islands, 2).servers)) == 1
    with pytest.raises(SpecError, match="are whole servers: 8 or 16"):
        problem_of(base, 12)


def test_fewer_ranks_on_a_cpu_have_more_of_its_cores():
    base = question("flickr", "local")
    assert problem_of(base, 1).cluster.gpus_per_server == 1
    assert problem_of(base, 4).cluster.servers == 2


@pytest.mark.parametrize("exact", [True, at_night(False)])
def test_a_row_is_what_a_search_finds_there(exact):
    """The cluster as it is in its file is one of the sizes."""
    base = question("reddit", "dgx_a100")
    found = scale(base, [1, 4, 16], Search(exact))
    for size in found.sizes:
        there = base if size.gpus == 16 else problem_of(base, size.gpus)
        expected = search(there, exact, may_use_fewer=False).best
        assert str(size.best.strategy) == str(expected.strategy)
        assert size.time_s == float(expected.predicted.epoch_s)
        assert size.best.memory_bytes == expected.memory_bytes
        assert size.best.problem.ranks == size.gpus
        assert size.best.strategy.exact or not exact


@pytest.mark.parametrize(
    ("objective", "graph"), covered([*product(("time", "cost"), ("flickr", "reddit"))], set)
)
def test_the_best_size_is_never_worse_than_any(graph, objective):
    base = question(graph, "dgx_a100", "price=2.5", hidden=16)
    counts = [1, 2, 8, 32] if NIGHT else [1, 8, 32]
    found = scale(base, counts, Search(objective=Objective(objective)))
    assert found.fastest.time_s == min(size.time_s for size in found.sizes)
    assert found.cheapest.best.dollars == min(size.best.dollars for size in found.sizes)
    assert found.best is (found.fastest if objective == "time" else found.cheapest)
    assert found.enough.gpus <= found.fastest.gpus


def test_more_gpus_are_slower_on_a_small_graph_and_faster_on_a_large_one():
    base = question("squirrel", "granndis_2080ti_1gbe", hidden=16)
    small = scale(base, [1, 2, 4, 8, 16])
    epochs = {size.gpus: size.time_s for size in small.sizes}
    assert small.fastest.gpus == min(epochs, key=epochs.__getitem__)
    # one GPU launches all kernels of a step as one
    assert small.slower_from is not None and small.slower_from.gpus == 2
    assert all(epochs[gpus] > small.fastest.time_s for gpus in (2, 4, 8, 16))
    assert small.fastest.best.chance_faster(small.sizes[-1].best) == 1
    assert small.fastest.best.chance_faster(small.fastest.best) == 0
    assert scale(question("reddit", "dgx_a100"), [1, 8]).slower_from is None
    _, *several = small.sizes
    assert Scaling(several, ()).takes_over == [(8, "graph_parallel", "granndis")]
    assert Scaling(several[1:2], ()).takes_over == []


def test_the_fastest_size_and_those_near_it_in_any_order():
    base = question("reddit", "granndis_2080ti_1gbe", layers=3)
    sizes = scale(base, [2, 8, 16, 32], Search(forced=parse("graph_parallel"))).sizes
    assert len({size.time_s for size in sizes}) == 4
    for order in permutations(sizes):
        pairs = zip(order, sizes, strict=True)
        found = Scaling([replace(size, problem=at.problem) for size, at in pairs], ())
        times = {size.gpus: size.time_s for size in found.sizes}
        fastest = min(times, key=times.__getitem__)
        near = [gpus for gpus in times if times[gpus] <= 1.1 * times[fastest]]
        assert found.enough.gpus == min(near)
        slower = [gpus for gpus in times if gpus > fastest]
        assert (found.slower_from.gpus if found.slower_from else None) == min(slower, default=None)


def test_speedup_is_over_the_fewest_gpus_that_fit():
    found = scale(question("reddit", "dgx_a100"), [2, 4, 16])
    first = found.sizes[0]
    assert found.first is first and found.speedup(first) == found.efficiency(first) == 1
    for size in found.sizes:
        assert found.speedup(size) == pytest.approx(first.time_s / size.time_s)
        assert found.efficiency(size) == pytest.approx(found.speedup(size) * 2 / size.gpus)


@pytest.mark.slow
def test_where_nothing_fits_it_says_how_much_memory_would():
    # with too little memory in a server to train chunk by chunk
    base = question("ogbn-papers100M", "l4_box", "host_memory=1GB", layers=3)
    asked = Search(exact=True, forced=parse("graph_parallel"))
    found = scale(base, [4, 64], asked)
    small, large = found.sizes
    assert small.found is None and isinstance(small.error, Infeasible)
    needed = found.needs_bytes(small)
    assert needed > base.cluster.device.memory
    # that much memory is enough, and a byte in a thousand less is not
    roomy, tight = (problem_of(on(base, memory=s * needed), 4) for s in (1.001, 0.999))
    assert search(roomy, exact=True, forced=asked.forced).best
    with pytest.raises(Infeasible):
        search(tight, exact=True, forced=asked.forced)
    assert large.found and found.first is large and found.fitting == [large]
    with pytest.raises(Infeasible, match="nothing fits on any of 1, 4 GPUs; on 4: graph_parallel"):
        scale(base, [1, 4], asked)


def test_a_strategy_may_suit_some_sizes_only():
    found = scale(question(), [1, 2, 8], Search(forced=parse("gnnpipe(stages=2)")))
    assert isinstance(found.sizes[0].error, SpecError) and found.first.gpus == 2
    with pytest.raises(SpecError, match="--exact excludes pipegcn"):
        scale(question(), [2, 4], Search(exact=True, forced=parse("pipegcn")))


def test_numbers_that_cannot_be_had_are_skipped():
    found = scale(question(), [1, 12, 16])
    assert [size.gpus for size in found.sizes] == [1, 16]
    [(gpus, reason)] = found.skipped
    assert gpus == 12 and "8 or 16" in reason
    with pytest.raises(SpecError, match="--scale 12: more than a server's 8 GPUs"):
        scale(question(), [12])


def test_costs_need_a_price_and_servers_are_rented_whole():
    with pytest.raises(SpecError, match=r"--objective cost needs the price .* --set price=2.50"):
        scale(question(), [1], Search(objective=Objective("cost")))
    found = scale(question("flickr", "dgx_a100", "price=3.6"), [1, 8])
    for size in found.sizes:
        assert size.best.dollars == pytest.approx(8 * 0.001 * size.time_s)
    assert scale(question(), [1]).cheapest is None


@pytest.mark.parametrize(("more", "warns"), [(0.001, True), (-0.001, False)])
def test_a_plan_warns_where_the_fullest_rank_is_nearly_full(more, warns):
    base, forced = question("reddit", "dgx_a100"), parse("graph_parallel")
    needed = search(base, forced=forced).best.memory_bytes
    found = search(on(base, memory=needed / (NEARLY_FULL + more)), forced=forced)
    assert bool(nearly_full(found.best)) == warns
    assert ("% full: " in make(found)["summary"]["cost"]) == warns
