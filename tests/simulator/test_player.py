"""The player on schedules small enough to draw, then its laws on random ones; jitter and stragglers
against sampling the same distribution."""

from collections import Counter, defaultdict
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gnnplan.planner.cluster.cost import Cost
from gnnplan.planner.cluster.spec import Cluster, Device, Link
from gnnplan.planner.graph.load import load
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies import parse
from gnnplan.planner.vocabulary.errors import Deadlock, Mismatch, SpecError
from gnnplan.planner.vocabulary.schedule import (
    Collective,
    Compute,
    Exchange,
    Label,
    Recv,
    Ring,
    Sampling,
    Schedule,
    Send,
    Task,
    Work,
)
from gnnplan.simulator.noise import Noise, epochs, percentiles, stragglers
from gnnplan.simulator.player import TaskGraph, Timeline, play
from gnnplan.testing import laws


def cluster(servers: int = 1, gpus: int = 8, latency: float = 0.0, speed: float = 1.0) -> Cost:
    """1e9 flop/s and 1 MB/s, so that `s(2)` and `mb(2)` take 2 s."""
    device = Device(memory=1e9, gemm=1e9, memory_bandwidth=1e9)
    link = Link.model_construct(bandwidth=1e6 * speed, latency=latency / speed)
    of = {"device": device, "intra_node": link, "inter_node": link}
    return Cost(Cluster(servers=servers, gpus_per_server=gpus, **of))


def s(seconds: float) -> Compute:
    return Compute(flops=seconds * 1e9)


def mb(megabytes: float) -> int:
    return int(megabytes * 1e6)


def label(op: str, step: int = 0, **place: int) -> Label:
    return Label(op, step, **place)


def drawn(played: Timeline, rank: int, lane: str) -> str:
    """A character per second: the chunk, else the op's first letter; blank: nothing."""
    line = [" "] * round(played.end_s)
    for span in played.spans:
        if (span.rank, span.lane) == (rank, lane):
            name = next((p[1:] for p in span.label.split(":")[1:] if p[0] == "c"), span.op[0])
            line[round(span.start) : round(span.end)] = name * (round(span.end) - round(span.start))
    return "".join(line).rstrip()


def schedule(tasks: list[Task], ranks: int = 8, steps: int = 1) -> Schedule:
    return Schedule(ranks, steps, tasks, [])


def pipeline(stages: int, chunks: int, seconds: float) -> Schedule:
    tasks = []
    for chunk in range(chunks):
        for stage in range(stages):
            got = label("arrive", chunk=chunk)
            forward = label("forward", chunk=chunk)
            sent = label("pipeline", chunk=chunk)
            if stage:
                tasks.append(Task(got, stage, "copy", Recv(stage - 1, sent)))
            tasks.append(Task(forward, stage, "compute", s(1), (got,) if stage else ()))
            if stage < stages - 1:
                tasks.append(Task(sent, stage, "comm", Send(stage + 1, mb(seconds)), (forward,)))
    return schedule(tasks)


def test_a_pipeline_whose_messages_take_time():
    played = play(pipeline(stages=3, chunks=4, seconds=1), cluster())
    lanes = [drawn(played, rank, lane) for rank in range(3) for lane in ("compute", "comm")]
    assert lanes == ["0123", " 0123", "  0123", "   0123", "    0123", ""]


def stale(staleness: int, steps: int = 4) -> Schedule:
    """1 s of computation on what was exchanged (2 s) `staleness` steps ago."""
    tasks = []
    work = Exchange(mb(2) * np.array([[0, 1], [1, 0]]))
    for step, rank in product(range(steps), range(2)):
        halo, read = label("halo", step), label("halo", step - staleness)
        tasks.append(Task(halo, rank, "comm", Collective(work, (0, 1), rank)))
        tasks.append(Task(label("forward", step), rank, "compute", s(1), (read,)))
    return schedule(tasks, steps=steps)


def test_steps_end_and_take_time():
    """The first step fills the lanes: 3 s, then one each 2 s."""
    played = play(stale(0), cluster())
    assert played.step_ends == {0: 3.0, 1: 5.0, 2: 7.0, 3: 9.0}
    assert played.epoch_s(1) == 2.0
    assert [play(stale(0, steps=steps), cluster()).epoch_s(1) for steps in (1, 2)] == [3.0, 2.0]


def test_where_updates_come_behind_later_steps_a_step_ends_with_its_loss():
    """A run's last updates wait for nothing: the last of three epochs seemed half shorter."""
    tasks = [Task(Label(op, s), 0, op, Compute()) for s in range(3) for op in ("loss", "update")]
    times = [(0.0, end) for end in (1.0, 7.0, 3.0, 8.0, 5.0, 8.5)]
    by_loss = Schedule(1, 3, tasks, by_loss=True)
    assert Timeline(by_loss, times).step_ends == {0: 1.0, 1: 3.0, 2: 5.0}
    assert Timeline(Schedule(1, 3, tasks), times).step_ends == {0: 7.0, 1: 8.0, 2: 8.5}


def test_a_long_chain_of_nothing_needs_no_stack():
    names = [label("nothing", step) for step in range(-1, 5_000)]
    lanes = ("host", "copy") * 2_500
    tasks = [
        Task(name, 0, lane, s(0), (before,))
        for (before, name), lane in zip(pairwise(names), lanes, strict=True)
    ]
    assert play(schedule(tasks, steps=5_000), cluster()).end_s == 0.0


def test_equal_collectives_are_priced_once(monkeypatch):
    asked = []
    price = Cost.collective
    monkeypatch.setattr(Cost, "collective", lambda cost, *of: asked.append(of) or price(cost, *of))
    play(stale(0, steps=50), cluster())
    assert len(asked) == 1


def on(rank: int, op: str, work: Work, *after: str, lane: str = "comm") -> Task:
    return Task(label(op), rank, lane, work, tuple(map(label, after)))


BOTH = Exchange(np.array([[0, 8], [8, 0]]))
TO_1, TO_0 = Collective(BOTH, (0, 1), 0), Collective(BOTH, (0, 1), 1)
OF_THREE = Collective(Exchange(np.zeros((3, 3), int)), (0, 1, 2), 1)
STUCK = {
    "a label of another rank does not count": (
        [on(1, "halo", s(1)), on(0, "forward", s(1), "halo", lane="compute")],
        ["1 of 2 tasks", "rank 0 compute forward:s0 waits for halo:s0 (not in the schedule)"],
    ),
    "two lanes wait for each other": (
        [
            on(0, "a", s(1), "x", lane="compute"),
            on(0, "b", s(1), lane="compute"),
            on(0, "x", s(1), "b"),
        ],
        ["3 of 3 tasks", "rank 0 compute a:s0 waits for x:s0", "rank 0 comm x:s0 waits for b:s0"],
    ),
    "it was sent to another": (
        [on(1, "sent", Send(2, 8)), on(0, "got", Recv(1, label("sent")))],
        ["1 of 2 tasks", "sent:s0 from rank 1 (no such Send in the schedule)"],
    ),
    "both receive before they send": (
        [on(rank, "got", Recv(1 - rank, label("sent"))) for rank in range(2)]
        + [on(rank, "sent", Send(1 - rank, 8)) for rank in range(2)],
        ["4 of 4"]
        + [f"rank {r} comm got:s0 waits for sent:s0 from rank {1 - r}" for r in range(2)],
    ),
    "they disagree on the group": (
        [on(0, "halo", TO_1), on(1, "halo", OF_THREE)],
        ["rank 0 comm halo:s0 waits for ranks 1", "rank 1 comm halo:s0 waits for ranks 0, 2"],
    ),
    "they come in different orders": (
        [on(0, "a", TO_1), on(0, "b", TO_1), on(1, "b", TO_0), on(1, "a", TO_0)],
        ["4 of 4", "rank 0 comm a:s0 waits for ranks 1", "rank 1 comm b:s0 waits for ranks 0"],
    ),
}


@pytest.mark.parametrize("why", STUCK)
def test_who_waits_for_ever_is_named(why):
    tasks, says = STUCK[why]
    with pytest.raises(Deadlock) as caught:
        play(schedule(tasks), cluster())
    for words in says:
        assert words in str(caught.value)


def test_a_long_list_of_the_stuck_is_cut():
    tasks = [Task(label("f"), rank, "compute", s(1), (label("x"),)) for rank in range(40)]
    with pytest.raises(Deadlock, match="and 24 more lanes") as caught:
        play(schedule(tasks, ranks=40), cluster(gpus=40))
    assert str(caught.value).count("\n") == 17


@pytest.mark.parametrize(
    ("tasks", "says"),
    [
        (
            [Task(label("forward"), 0, lane, s(1)) for lane in ("compute", "comm")],
            "rank 0 has two tasks forward:s0",
        ),
        ([Task(label("halo"), 2, "comm", TO_1)], r"rank 2 .* group is \(0, 1\)"),
    ],
)
def test_labels_name_one_task_of_a_rank_and_members_alone_come_to_a_collective(tasks, says):
    with pytest.raises(Mismatch, match=says):
        play(schedule(tasks), cluster())


RANKS, LANES = 4, ("compute", "comm", "reduce")


@st.composite
def schedules(draw) -> Schedule:
    """Any order of work that some global order could execute, so nothing waits for ever."""
    tasks: list[Task] = []
    known: dict[int, list[Label]] = defaultdict(list)
    steps = draw(st.integers(1, 3))

    def add(rank: int, name: Label, work) -> None:
        after = draw(st.lists(st.sampled_from(known[rank]), max_size=2)) if known[rank] else []
        lane = draw(st.sampled_from(LANES))
        tasks.append(Task(name, rank, lane, work, (*after, Label("halo", -1))))
        known[rank].append(name)

    ranks, sizes = st.integers(0, RANKS - 1), st.sampled_from([0, 1, 2, 3])
    for step in range(steps):
        for i in range(draw(st.integers(1, 8))):
            kind = draw(st.sampled_from(["compute", "send", "exchange", "all_reduce"]))
            name = Label(kind, step, chunk=i)
            if kind == "compute":
                add(draw(ranks), name, s(draw(sizes)))
            elif kind == "send":
                source = draw(ranks)
                target = draw(ranks.filter(lambda r, source=source: r != source))
                add(source, name, Send(target, mb(draw(sizes))))
                add(target, Label("arrive", step, chunk=i), Recv(source, name))
            else:
                group = tuple(sorted(draw(st.sets(ranks, min_size=1))))
                size = mb(draw(sizes))
                pairs = [[mb(draw(sizes)) * (a != b) for b in group] for a in group]
                work = Exchange(np.array(pairs)) if kind == "exchange" else Ring(size)
                for i, rank in enumerate(group):
                    add(rank, name, Collective(work, group, i))
    tasks.sort(key=lambda t: t.rank)  # ranks write their parts alone
    return schedule(tasks, RANKS, steps)


costs = st.builds(cluster, st.just(2), st.just(2), st.sampled_from([0.0, 0.25, 0.3]))


@given(schedules(), costs)
def test_alone_simulated_serial(asked, cost):
    tasks = TaskGraph(asked, cost)
    simulated = tasks.play().end_s
    assert tasks.play(contention=False).end_s <= simulated * (1 + 1e-9)
    assert simulated <= tasks.serial_s * (1 + 1e-9)


@given(schedules(), st.sampled_from([1.0, 1.5, 2.0, 10.0]))
def test_a_faster_network_is_never_slower_without_contention(asked, speed):
    slow, fast = (TaskGraph(asked, cluster(2, 2, 0.3, times)) for times in (1.0, speed))
    ends = [tasks.play(contention=False).end_s for tasks in (fast, slow)]
    assert ends[0] <= ends[1] * (1 + 1e-9)
    assert fast.serial_s <= slow.serial_s * (1 + 1e-9)


@given(schedules(), costs, st.booleans())
def test_every_span_keeps_every_rule(task_graph, cost, contention):
    """The semantics once more, as a checker."""
    spans = play(task_graph, cost, contention=contention).spans
    placed = [(str(t.label), t.rank, t.lane) for t in task_graph.tasks]
    assert [(x.label, x.rank, x.lane) for x in spans] == placed
    at = {(t.rank, t.label): span for t, span in zip(task_graph.tasks, spans, strict=True)}
    lane_free: dict[tuple[int, str], float] = defaultdict(float)
    for task, span in zip(task_graph.tasks, spans, strict=True):
        waits = [
            lane_free[task.rank, task.lane],
            *(at[task.rank, name].end for name in task.after if name.step >= 0),
        ]
        assert span.start == max(waits)  # as soon as it may, and no sooner
        lane_free[task.rank, task.lane] = span.end
        work = task.work
        if isinstance(work, Compute):
            assert span.seconds == pytest.approx(cost.compute_s(work))
        elif isinstance(work, Recv):
            assert span.end == max(span.start, at[work.peer, work.of].end)
        elif isinstance(work, Send):
            assert span.seconds >= cost.send(task.rank, work).alone - 1e-9
        else:
            group = [at[rank, task.label] for rank in work.group]
            assert {member.end for member in group} == {span.end}
            shortest = min(member.seconds for member in group)
            alone = cost.collective(work.work, work.group).alone
            assert shortest >= alone - 1e-9
            assert contention or shortest == pytest.approx(alone)


@given(schedules(), costs)
def test_no_byte_is_lost_no_port_overfull_and_equal_runs_are_equal_to_a_bit(task_graph, cost):
    played = play(task_graph, cost)
    assert play(task_graph, cost).spans == played.spans
    moved = Counter[str]()
    for span in played.spans:
        moved[span.op] += span.nbytes
    assert +moved == +Counter(task_graph.bytes_by_op())
    busy: dict[tuple[str, int], float] = defaultdict(float)
    meetings = {t.label: t.work for t in task_graph.tasks if isinstance(t.work, Collective)}
    transfers = [cost.collective(part.work, part.group) for part in meetings.values()]
    transfers += [cost.send(t.rank, t.work) for t in task_graph.tasks if isinstance(t.work, Send)]
    for transfer in transfers:
        for port, seconds in transfer.busy.items():
            busy[port] += seconds
    assert max(busy.values(), default=0.0) <= played.end_s + 1e-9


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
    seconds = epochs(TaskGraph(schedule, cost), 1, Noise(jitter), repetitions=20)
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
    seconds = epochs(TaskGraph(schedule, cost), 1, Noise(0.4), repetitions=10)
    assert seconds.mean() == pytest.approx(100, rel=4 * 0.04 / 20)
    assert 0.7 < seconds.std() / 4.0 < 1.3


def test_a_straggler_of_a_synchronous_step_is_what_all_wait_for():
    tasks = TaskGraph(*in_step(4, steps=3, pieces=2))
    assert epochs(tasks, 1, Noise(stragglers={2: 2.5}), 2) == pytest.approx([5.0] * 4)
    assert epochs(tasks, 1, Noise(stragglers={0: 3, 2: 2.5}), 1) == pytest.approx([6] * 2)


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
    once, again, other = (
        epochs(TaskGraph(schedule, cost), batches, Noise(0.2, seed=s), 2) for s in (1, 1, 2)
    )
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
