"""Numbers worked by hand, of places where other tests did not see the code broken on purpose."""

from dataclasses import dataclass
from functools import partial
from math import exp
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from asked import changed

from gnnplan.papers.full_graph import InOrder
from gnnplan.planner.cluster.cost import Cost
from gnnplan.planner.cluster.spec import HOST_RATE, Cluster, Link
from gnnplan.planner.decision.candidate import Candidate
from gnnplan.planner.decision.explain import turning_sentences
from gnnplan.planner.decision.search import SearchResult
from gnnplan.planner.evidence.runs import errors, question_name
from gnnplan.planner.ownership.estimated import EstimatedLayout, Mixing
from gnnplan.planner.ownership.layout import Expansion
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.vocabulary.schedule import Label, Sampling, Schedule, Task
from gnnplan.planner.vocabulary.trace import Span, transfer_times
from gnnplan.simulator.noise import Noise, epochs
from gnnplan.testing.laws import GRAPHS, cluster, problem_of

TWO_SERVERS = cluster(2, 1)


def problem(where: Cluster, **workload: Any) -> Problem:
    return problem_of(GRAPHS[1], where, **workload)


@pytest.mark.parametrize(
    ("servers", "told"), [(2, "sage 3x256, 2x1 at 400 Mbit/s"), (1, "sage 3x256, 1x2")]
)
def test_a_question_names_its_link_in_bits(servers, told):
    """50 MB/s are 400 Mbit/s."""
    where = cluster(servers, 2 // servers, inter=50e6)
    asked = problem(where, model="sage", layers=3, hidden=256)
    assert question_name(asked).endswith(told)


def test_the_95th_percentile_of_three_errors():
    """Errors 0, 0.1 and 0.2: 0.95 of the way from the first to the last is 1.9 steps of two."""
    found = errors([(1.0, 1.0), (1.1, 1.0), (0.8, 1.0)])
    assert found == pytest.approx({"n": 3, "mean": 0.1, "p95": 0.19, "max": 0.2})


@dataclass(frozen=True)
class Timed:
    """A strategy of which nothing but the time is known: of one GB/s, and by the bandwidth."""

    name: str
    fixed_s: float
    sent: float  # [B] between servers
    exact = True
    family = "timed"

    def epoch_s(self, problem: Problem) -> Any:
        link = problem.cluster.inter_node
        assert link
        return self.fixed_s + self.sent / link.bandwidth

    def predict(self, problem: Problem) -> Any:
        return SimpleNamespace(epoch_s=self.epoch_s(problem))

    def __str__(self) -> str:
        return self.name


def test_the_bandwidth_below_which_another_strategy_wins():
    """At 1 GB/s one takes 1 s and the other 1.999 s; at half of it the first takes 2 s."""
    where = changed(TWO_SERVERS, ranges={"inter_node.bandwidth": (1.0, 1.0)})
    asked = problem(where, mode="mini", batch=10, fanout=(2, 2), layers=2)
    candidates = [
        Candidate(strategy, strategy.predict(asked), asked)
        for strategy in (Timed("chatty", 0.0, 1e9), Timed("silent", 1.999, 0.0))
    ]
    assert turning_sentences(SearchResult(asked, candidates))[:2] == [
        "twice the bandwidth between servers: -50 %",
        "below 0.5x of the bandwidth between servers (500.00 MB/s, now 1.00 GB/s) silent wins",
    ]


FIFTH = Mixing(((2, 0.2),))  # a fifth of the edges lead anywhere, the others stay in their part
OF_FOUR = 500 * (1 - exp(-4 / 2))
FIRST = 500 * (1 - exp(-1))  # 1 of a row's 10 edges leads to the other 500 rows


def test_rows_outside_have_their_neighbours_outside_when_surroundings_grow():
    """8 of 10 edges of a row outside stay there, and 2 lead anywhere."""
    layout = EstimatedLayout(1000, 10_000, (0, 1), 2, 0, 2, mixing=FIFTH)
    assert layout.region(1) == pytest.approx(500 + FIRST)
    second = (500 - FIRST) * (1 - exp(-(FIRST * 8 / 500 + FIRST * 2 / 1000)))
    assert layout.region(0) == pytest.approx(500 + FIRST + second)


@pytest.mark.parametrize(
    ("layout", "first", "drawn", "rel"),
    [
        (partial(EstimatedLayout, mixing=FIFTH), FIRST, 5, 0.01),
        # GraNNDis' code samples before it splits, servers share vertices at random
        (partial(InOrder, targets=500.0, metis=FIFTH, drawn=4.0), OF_FOUR, 4, 1e-3),
    ],
    ids=["ours", "granndis"],
)
def test_sampling_finds_most_neighbours_of_rows_outside_outside(layout, first, drawn, rel):
    """From the second hop on 9 of 10 neighbours are outside, of which 5 are drawn."""
    for hops, rows in ((1, first), (2, first + (500 - first) * (1 - exp(-first * drawn / 500)))):
        # all that a server may have: many layers reach it
        of_20 = layout(1000, 10_000, (0, 1), 20, 0, 0, Expansion(hops, 5, 0))
        assert of_20.region(0) - 500 == pytest.approx(rows, rel=rel)


@pytest.mark.parametrize(("straggler", "seconds"), [(0, 3.0), (1, 6.0)])
def test_a_stragglers_sampler_is_slow_too(straggler, seconds):
    """Rank 0 draws for one second, rank 1 for two."""
    schedule = Schedule(2, 1)
    for rank in (0, 1):
        work = Sampling("draw", (rank + 1) * HOST_RATE)
        schedule.tasks.append(Task(Label("draw", 0), rank, "host", work))
    taken = epochs(schedule, Cost(TWO_SERVERS), 1, Noise(stragglers={straggler: 3.0}), 1)
    assert np.allclose(taken, seconds)


def test_a_ring_sends_a_message_per_step():
    """Of 40,000 B, four ranks send 2 (4 - 1) messages of 10,000 B, at what such messages reach."""
    link = Link(bandwidth=1e9, latency=0.0, efficiency={1e3: 0.5, 1e6: 1.0})
    where = changed(cluster(1, 4), intra_node=link, all_reduce="ring")
    reached = 0.5 * 10 ** (np.log10(2) / 3)  # log-log between 1 kB and 1 MB
    seconds = Cost(where).all_reduce(40_000, (0, 1, 2, 3)).alone
    assert seconds == pytest.approx(6 * 10_000 / (1e9 * reached))


def test_loading_to_the_device_is_no_transfer_between_ranks():
    """Two ranks load at once, under one label; each load is its rank's own."""
    spans = [Span("load:s0", "load", rank, "copy", 0.0, 1.0 + rank, 8, 0) for rank in (0, 1)]
    assert transfer_times(spans) == {}
