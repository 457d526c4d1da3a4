"""Jitter and stragglers: against sampling the same distribution, and their laws on every family."""

from itertools import product

import numpy as np
import pytest

from gnnplan.planner.cluster.cost import Cost
from gnnplan.planner.cluster.spec import Cluster, Device, Link
from gnnplan.planner.graph.load import load
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies import parse
from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.planner.vocabulary.schedule import (
    Collective,
    Compute,
    Label,
    Ring,
    Sampling,
    Schedule,
    Task,
)
from gnnplan.simulator.noise import Noise, epochs, percentiles, stragglers
from gnnplan.simulator.player import play
from gnnplan.testing import laws

DEVICE = Device(memory=1e9, gemm=1e9, memory_bandwidth=1e9, launch=1e-6)
FAMILIES = ["graph_parallel", "pipegcn", "gnnpipe(stages=2,chunks=4)", "gnnpipe(stages=4,chunks=4)"]
FAMILIES += ["granndis(depth=1)", "granndis(batches=2)", "data_parallel"]
FAMILIES += ["data_parallel(prefetch=2)", "gsplit(splitter='random')", "p3"]


def in_step(ranks: int, steps: int, pieces: int = 1) -> tuple[Schedule, Cost]:
    """Everyone computes `pieces` times a second, then all wait for all; nothing else takes time."""
    schedule, group = Schedule(ranks, steps), tuple(range(ranks))
    for step, rank in product(range(steps), group):
        before = (Label("update", step - 1),) if step else ()
        names = [Label("forward", step, chunk=piece) for piece in range(pieces)]
        works = [(name, "compute", Compute(flops=1e9), before) for name in names]
        reduced, meeting = Label("all_reduce", step), Collective(Ring(0), group, rank)
        works.append((reduced, "reduce", meeting, (names[-1],)))
        works.append((Label("update", step), "compute", Compute(), (reduced,)))
        schedule.tasks += [Task(name, rank, *rest) for name, *rest in works]
    link = Link(bandwidth=1e9, latency=0.0)
    return schedule, Cost(Cluster(servers=1, gpus_per_server=ranks, device=DEVICE, intra_node=link))


def question(family: str) -> Problem:
    graph = load("synthetic:community?vertices=300&edges=3000&features=16&classes=4&seed=0")
    mini = {"mode": "mini", "batch": 64, "fanout": (5, 5, 5, 5)}
    # links on which computation is what varies
    where = laws.cluster(2, 2, inter=3e7, intra=1e8, gemm=1e9, memory_bandwidth=1e9)
    more = mini if parse(family).mode == "mini" else {}
    return laws.problem_of(graph, where, "hash", layers=4, hidden=16, **more)


@pytest.mark.parametrize(("ranks", "jitter"), [(1, 0.3), (4, 0.1), (16, 0.5)])
def test_a_synchronous_epoch_takes_the_slowest_of_its_ranks(ranks, jitter):
    """The largest of n lognormals of mean 1, sampled by numpy's own; four standard errors."""
    schedule, cost = in_step(ranks, steps=51)
    seconds = epochs(schedule, cost, 1, Noise(jitter), repetitions=20)
    sigma = np.sqrt(np.log(1 + jitter**2))
    slowest = np.random.default_rng(1).lognormal(-(sigma**2) / 2, sigma, (100_000, ranks)).max(1)
    assert len(seconds) == 1000
    assert seconds.mean() == pytest.approx(slowest.mean(), abs=4 * slowest.std() / np.sqrt(1000))
    told = percentiles(seconds)
    # the quantile lies between two of the samples, binomially far from its rank
    for share, name in ((0.5, "p50_s"), (0.95, "p95_s")):
        away = 4 * np.sqrt(share * (1 - share) / 1000)
        low, high = np.quantile(slowest, (share - away, min(share + away, 1.0)))
        assert low <= told[name] <= high


def test_jitter_averages_out_within_a_rank():
    """100 computations in a row vary a tenth as much as one; without waits they keep their mean."""
    schedule, cost = in_step(1, steps=41, pieces=100)
    seconds = epochs(schedule, cost, 1, Noise(0.4), repetitions=10)
    assert seconds.mean() == pytest.approx(100, rel=4 * 0.04 / 20)
    assert 0.7 < seconds.std() / 4.0 < 1.3


def test_a_straggler_of_a_synchronous_step_is_what_all_wait_for():
    schedule, cost = in_step(4, steps=3, pieces=2)
    assert epochs(schedule, cost, 1, Noise(stragglers={2: 2.5}), 2) == pytest.approx([5.0] * 4)
    assert epochs(schedule, cost, 1, Noise(stragglers={0: 3, 2: 2.5}), 1) == pytest.approx([6] * 2)


@pytest.mark.parametrize("family", FAMILIES)
def test_laws(family):
    problem = question(family)
    strategy = parse(family).settle(problem)
    strategy.check(problem)
    batches = strategy.steps(problem)
    schedule, cost = strategy.schedule(problem, 3 * batches), problem.cost
    plain = play(schedule, cost)
    # nothing injected: the plain simulation to the bit
    for quiet in (Noise(), Noise(seed=7), Noise(stragglers={1: 1.0})):
        assert play(schedule, cost, factors=quiet.factors(schedule, 0)).times == plain.times
    noise = Noise(0.2, seed=1)
    ends = []
    for rank in range(schedule.ranks):  # a straggler on the same draws is never faster
        slow = Noise(0.2, {rank: 3.0}, seed=1)
        ends.append(play(schedule, cost, factors=slow.factors(schedule, 0)).end_s)
        calm_s = play(schedule, cost, factors=noise.factors(schedule, 0)).end_s
        assert ends[-1] >= calm_s * (1 - 1e-9)
    assert max(ends) > plain.end_s
    once, again, other = (epochs(schedule, cost, batches, Noise(0.2, seed=s), 2) for s in (1, 1, 2))
    assert len(once) == 4 and (once == again).all() and (once != other).any()
    assert (once[:2] != once[2:]).any()
    tasks = [task.work for task in schedule.tasks]
    for factor, work in zip(Noise(0.2, {0: 2.0}).factors(schedule, 0), tasks, strict=True):
        assert isinstance(work, (Compute, Sampling)) or factor == 1.0


@pytest.mark.parametrize(
    ("say", "message"),
    [
        (lambda: Noise(-0.1), "in [0, 10], not -0.1; use 0.1"),
        (lambda: Noise(float("nan")), "not nan"),
        (lambda: Noise(stragglers={0: 0.5}), "0=0.5: a rank from 0 on computes 1 to 1e6 times"),
        (lambda: Noise(stragglers={-1: 2.0}), "--straggler -1=2"),
        (lambda: stragglers(["3"]), "--straggler '3': write a rank and how many times as"),
        (lambda: stragglers(["3=2", "3=3"]), "rank 3 is there twice"),
    ],
)
def test_what_is_no_noise(say, message):
    with pytest.raises(SpecError) as error:
        say()
    assert message in str(error.value)
    assert stragglers(["3=2.0", "0 = 1.5"]) == {3: 2.0, 0: 1.5} and stragglers([]) == {}
