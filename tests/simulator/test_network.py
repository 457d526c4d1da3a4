"""The network's shares by hand and by max-min, and its ends against a plain loop."""

import random

import pytest
import simpy
from hypothesis import given
from hypothesis import strategies as st

from gnnplan.simulator.network import Demand, Network, max_min

A, B, C, D = (("nic_out", i) for i in range(4))


def ends(*starts: tuple[float, Demand], threads: tuple[int, ...] = ()) -> list[float]:
    """When transfers that start at these times, by so many threads each (one), end [s]."""
    env = simpy.Environment()
    network = Network(env)
    over = [float("nan")] * len(starts)

    def done(i):
        assert over[i] != over[i], "a transfer ends once"
        over[i] = env.now

    for i, (start, transfer) in enumerate(starts):
        env.timeout(start).callbacks.append(
            lambda _, i=i, transfer=transfer: network.start(
                transfer, lambda: done(i), threads[i] if threads else 1
            )
        )
    env.run()
    assert not any(network._users.values())
    return over


def load(*, after: float = 0.0, latency: float = 0.0, **seconds: float) -> tuple[float, Demand]:
    """A transfer that starts after so long, and is busy at ports for so long."""
    return after, Demand(latency, {globals()[port]: took for port, took in seconds.items()})


def test_without_bytes_a_transfer_takes_its_latency():
    assert ends(load(after=1.0, latency=0.5), load(after=1.0, A=0.0)) == [1.5, 1.0]


def test_three_over_two_ports():
    """A is full at 1/2; of B the second then fills 1/4, and the third gets 3/4."""
    assert max_min([{A: 1.0}, {A: 1.0, B: 0.5}, {B: 1.0}]) == pytest.approx([1 / 2, 1 / 2, 3 / 4])


def test_threads_have_equally_much_of_a_core_but_not_of_a_wire():
    """Three of four threads are the first's; on a wire it is one of two, whoever takes part."""
    for port, expected in ((("cores", 0), [4.0, 6.0]), (A, [6.0, 6.0])):
        both = [(0, Demand(0, {port: 3.0}))] * 2
        assert ends(*both, threads=(3, 1)) == expected


@st.composite
def demands(draw, flows: int = 5, ports: int = 4) -> list[dict]:
    """Seconds per port; sixteenths, so that ties happen."""
    seconds = st.integers(1, 16).map(lambda k: k / 16)
    busy = st.dictionaries(st.sampled_from([A, B, C, D][:ports]), seconds, min_size=1)
    return draw(st.lists(busy, min_size=1, max_size=flows))


def scaled(busy: dict) -> dict:
    return {port: s / max(busy.values()) for port, s in busy.items()}


@given(demands(flows=20), st.lists(st.integers(1, 64).map(lambda k: k / 16), min_size=20))
def test_everyone_has_a_bottleneck(busy, weights):
    """No port is overfull, and everyone is among the fastest, by weight, on some full port."""
    shares = [scaled(b) for b in busy]
    rates = max_min(shares, weights[: len(shares)])
    users = {p: [i for i, s in enumerate(shares) if p in s] for p in (A, B, C, D)}
    filled = {p: sum(rates[i] * shares[i][p] for i in users[p]) for p in users}
    assert max(filled.values()) <= 1 + 1e-12
    for i, share in enumerate(shares):
        level = rates[i] / weights[i]
        assert any(
            filled[p] > 1 - 1e-9 and level >= max(rates[j] / weights[j] for j in users[p]) - 1e-9
            for p in share
        )


def by_plain_loop(starts: list[tuple[float, Demand]]) -> list[float]:
    """All rates anew at every event."""
    wait = {i: start + transfer.latency for i, (start, transfer) in enumerate(starts)}
    left: dict[int, float] = {}
    over, now = [0.0] * len(starts), 0.0
    while wait or left:
        for i in [i for i in wait if wait[i] <= now]:
            del wait[i]
            left[i] = max(starts[i][1].busy.values(), default=0.0)
        for i in [i for i in left if left[i] <= 1e-9]:
            del left[i]
            over[i] = now
        going = list(left)
        rates = dict(zip(going, max_min([scaled(starts[i][1].busy) for i in going]), strict=True))
        after = min(
            [left[i] / rates[i] for i in going] + [at - now for at in wait.values()], default=0.0
        )
        for i in going:
            left[i] -= rates[i] * after
        now += after
    return over


@st.composite
def arrivals(draw) -> list[tuple[float, Demand]]:
    times = st.integers(0, 8).map(lambda k: k / 4)
    return [(draw(times), Demand(draw(times), busy)) for busy in draw(demands(flows=10))]


@given(arrivals())
def test_the_network_equals_a_plain_loop(starts):
    assert ends(*starts) == pytest.approx(by_plain_loop(starts), abs=1e-7)


def test_a_thousand_odd_numbers_late_in_time_all_end():
    """Times near 1e6 s swallow the last bits of short transfers: nothing may hang or be lost."""
    random.seed(0)
    starts = []
    for _ in range(300):
        latency, late = random.choice([0.0, 1e-7 / 3]), 1e6 + random.random() * 1e-3
        starts.append((late, Demand(latency, {p: 10 ** random.uniform(-15, -3) for p in (A, B)})))
        far = {C: 10 ** random.uniform(-12, 3), D: 10 ** random.uniform(-300, -200)}
        starts.append((0.0, Demand(1 / 3, far)))
    assert all(end >= start for end, (start, _) in zip(ends(*starts), starts, strict=True))
