"""Play a schedule in virtual time.

A task starts when the one before it in its lane and all that it names in `after` have ended. What it then takes part in
is an *act*: a computation or a message has one member, a collective as many as its group, and begins when the last of
them has come; a Recv waits for the message. One SimPy event per act that takes time, none for a dependency.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise

import simpy

from gnnplan.planner.cost import Cost, Transfer
from gnnplan.planner.errors import Deadlock, Mismatch
from gnnplan.planner.schedule import Collective, Compute, Host, Label, Load, Recv, Schedule, Send, Task
from gnnplan.planner.trace import Span
from gnnplan.simulator.network import Network


@dataclass(frozen=True)
class Played:
    """When each of the schedule's tasks ran: begin and end [s]."""

    tasks: list[Task]
    times: list[tuple[float, float]]

    @cached_property
    def spans(self) -> list[Span]:
        """`spans[i]` is what became of the schedule's i-th task."""
        return [_span(task, *time) for task, time in zip(self.tasks, self.times, strict=True)]

    @property
    def end_s(self) -> float:
        """When all has ended [s]."""
        return max((end for _, end in self.times), default=0.0)

    @cached_property
    def _ends(self) -> dict[int, float]:
        ends: dict[int, float] = {}
        for task, (_, end) in zip(self.tasks, self.times, strict=True):
            ends[task.label.step] = max(ends.get(task.label.step, 0.0), end)
        return ends

    def step_end(self, step: int) -> float:
        """When the last task of a step has ended [s]."""
        return self._ends[step]

    def epochs_s(self, steps: int) -> list[float]:
        """From one end of an epoch of so many steps to the next [s]; of one epoch, its end."""
        ends = [self._ends[step] for step in sorted(self._ends) if step % steps == steps - 1]
        return [b - a for a, b in pairwise(ends)] if len(ends) > 1 else [self.end_s]

    def epoch_s(self, steps: int) -> float:
        """Duration of an epoch of so many steps in the steady state: the median of `epochs_s` [s]."""
        return statistics.median(self.epochs_s(steps))

    @property
    def step_s(self) -> float:
        """Duration of a step in the steady state [s]."""
        return self.epoch_s(1)


def play(schedule: Schedule, cost: Cost, *, contention: bool = True, factors: Sequence[float] = (), score: Score | None = None) -> Played:
    """All tasks of the steps (`setup` is over) in virtual time, starting at 0. Raises Deadlock when tasks wait for ever. `factors`: how
    many times as long the i-th task computes (noise.py). `score`: theirs, where they are played several times."""
    score = score or Score(schedule, cost)
    score.rewind(factors)
    env = simpy.Environment(0.0)
    network = Network(env)

    def end(act: _Act) -> None:
        go([act], [])

    def alone(act: _Act) -> None:
        env.timeout(act.seconds).callbacks.append(lambda _: end(act))

    def go(acts: list[_Act], ready: list[_Node]) -> None:
        """End these acts, start what is ready, and so on until only time can tell."""
        now = env.now
        while acts or ready:
            while acts:
                for node in acts.pop().members:
                    node.end = now
                    for act in node.heard_by:
                        act.absent -= 1
                        if not act.absent:
                            acts.append(act)
                    for later in node.then:
                        later.waits -= 1
                        if not later.waits:
                            ready.append(later)
            while ready:
                node = ready.pop()
                node.start = now
                act = node.act
                act.absent -= 1
                if act.absent:
                    continue
                if not act.seconds:
                    acts.append(act)
                elif contention and act.transfer is not None:
                    network.start(_as_long(act), partial(end, act), act.threads)
                else:
                    alone(act)

    go([], [node for node in reversed(score.nodes) if not node.waits])
    env.run()
    score.check_all_ended()
    return Played(schedule.tasks, [(node.start, node.end) for node in score.nodes])


def critical_path(schedule: Schedule, cost: Cost, score: Score | None = None) -> float:
    """The longest path through lanes, `after`, messages and meetings, each task at its duration alone [s]: a lower bound."""
    score = score or Score(schedule, cost)
    score.rewind()
    ready = [node for node in score.nodes if not node.waits]
    while ready:
        node = ready.pop()
        acts = [node.act]
        node.act.begin = max(node.act.begin, node.start)
        while acts:
            act = acts.pop()
            act.absent -= 1
            if act.absent:
                continue
            end = act.begin + act.seconds
            for member in act.members:
                member.end = end
                for heard in member.heard_by:
                    heard.begin = max(heard.begin, end)
                    acts.append(heard)
                for later in member.then:
                    later.start = max(later.start, end)
                    later.waits -= 1
                    if not later.waits:
                        ready.append(later)
    score.check_all_ended()
    return max((node.end for node in score.nodes), default=0.0)


def serial(schedule: Schedule, cost: Cost, score: Score | None = None) -> float:
    """One thing at a time, each collective once [s]: an upper bound."""
    return sum(act.alone for act in (score or Score(schedule, cost)).acts)


# -- the schedule, ready to be played ------------------------------------------------------------------------------------


class _Act:
    """Begins when nobody is `absent`; its members end together."""

    __slots__ = ("absent", "alone", "awaited", "begin", "members", "seconds", "threads", "transfer")

    def __init__(self, awaited: int, alone: float = 0.0, transfer: Transfer | None = None) -> None:
        self.absent = self.awaited = awaited
        self.begin = 0.0  # [s], kept by critical_path
        self.members: list[_Node] = []
        self.seconds = self.alone = alone
        self.threads = awaited  # a rank's each
        self.transfer = transfer


class _Node:
    """A task, and who waits for it."""

    __slots__ = ("act", "earlier", "end", "heard_by", "start", "task", "then", "waits")
    act: _Act

    def __init__(self, task: Task) -> None:
        self.task = task
        self.earlier = 0  # tasks of this rank that it waits for
        self.waits = 0  # those of them that have not ended
        self.then: list[_Node] = []
        self.heard_by: tuple[_Act, ...] = ()  # the peer's Recv of this Send
        self.start = 0.0
        self.end = -1.0  # not yet


class Score:
    """Nodes in the schedule's order and the acts they take part in."""

    def __init__(self, schedule: Schedule, cost: Cost) -> None:
        self.nodes = [_Node(task) for task in schedule.tasks]
        self.acts: list[_Act] = []
        self.by_label: dict[int, dict[Label, _Node]] = {}
        self.before = {(task.rank, task.label) for task in schedule.setup}  # done when the steps begin
        last: dict[tuple[int, str], _Node] = {}
        for node in self.nodes:
            rank, label = node.task.rank, node.task.label
            if self.by_label.setdefault(rank, {}).setdefault(label, node) is not node:
                raise Mismatch(f"rank {rank} has two tasks {label}; a label names one task of a rank")
            lane = (rank, node.task.lane)
            if lane in last:
                last[lane].then.append(node)
                node.earlier = 1
            last[lane] = node
        self._add_waits()
        self._add_acts(cost)

    def rewind(self, factors: Sequence[float] = ()) -> None:
        """Nothing has begun; the i-th task, if it computes, will take so many times as long."""
        for node in self.nodes:
            node.waits, node.start, node.end = node.earlier, 0.0, -1.0
        for act in self.acts:
            act.absent, act.begin, act.seconds = act.awaited, 0.0, act.alone
        for node, factor in zip(self.nodes, factors, strict=bool(factors)):
            if isinstance(node.task.work, (Compute, Host)):
                node.act.seconds = node.act.alone * factor

    def _add_waits(self) -> None:
        for node in self.nodes:
            rank = node.task.rank
            known = self.by_label[rank]
            for label in node.task.after:
                if label.step < 0:
                    continue
                earlier = known.get(label)
                if earlier is not None:
                    earlier.then.append(node)
                elif (rank, label) in self.before:
                    continue
                node.earlier += 1  # on what is not in the schedule: for ever

    def _add_acts(self, cost: Cost) -> None:
        """Steps repeat, with the same work (the same object, mostly): each is asked for once."""
        def at_work(node: _Node, seconds: float) -> _Act:
            return _Act(1, seconds, cost.computing(node.task.rank, node.task.lane, seconds))

        seconds: dict[int, float] = {}
        sends: dict[tuple[int, Send], Transfer] = {}
        meetings: dict[tuple[Label, tuple[int, ...]], _Act] = {}
        for node in self.nodes:
            rank, work = node.task.rank, node.task.work
            if isinstance(work, Compute):
                if id(work) not in seconds:
                    seconds[id(work)] = float(cost.compute_s(work))
                act = at_work(node, seconds[id(work)])
            elif isinstance(work, Load):
                act = at_work(node, float(cost.load_s(work.nbytes)))
            elif isinstance(work, Host):
                act = at_work(node, float(cost.host_s(work.what, work.edges)))
            elif isinstance(work, Send):
                if (rank, work) not in sends:
                    sends[rank, work] = _plain(cost.send(rank, work))
                transfer = sends[rank, work]
                act = _Act(1, transfer.alone, transfer)
                act.threads = 2  # the receiver's too
            elif isinstance(work, Recv):
                act = _Act(2)  # the receiver and the message
                sender = self.sender(rank, work)
                if sender is not None:
                    sender.heard_by += (act,)
            else:
                key = (node.task.label, work.group)
                if key not in meetings:
                    meetings[key] = _Act(len(work.group))
                act = meetings[key]
                if rank not in work.group:
                    raise Mismatch(f"rank {rank} takes part in {node.task.label}, but its group is {work.group}")
            if not act.members:
                self.acts.append(act)
            act.members.append(node)
            node.act = act
        transfers: dict[tuple[tuple[int, Collective], ...], Transfer] = {}
        again: dict[tuple[int, ...], Transfer] = {}  # the same objects: faster than to compare them
        for act in meetings.values():
            parts = {n.task.rank: n.task.work for n in act.members if isinstance(n.task.work, Collective)}
            same = tuple(map(id, parts.values()))
            if same not in again:
                shares = tuple(parts.items())
                if shares not in transfers:
                    transfers[shares] = _plain(cost.collective(parts))
                again[same] = transfers[shares]
            act.transfer = again[same]
            act.alone = act.transfer.alone

    def sender(self, rank: int, work: Recv) -> _Node | None:
        """The Send that a Recv of `rank` names, if there is one and it goes there."""
        node = self.by_label.get(work.peer, {}).get(work.of)
        return node if node is not None and isinstance(node.task.work, Send) and node.task.work.peer == rank else None

    def check_all_ended(self) -> None:
        """Raises Deadlock: names the first stuck task of each lane and what it waits for."""
        stuck = [node for node in self.nodes if node.end < 0]
        if not stuck:
            return
        heads: dict[tuple[int, str], _Node] = {}
        for node in stuck:
            heads.setdefault((node.task.rank, node.task.lane), node)
        lines = [f"  rank {n.task.rank} {n.task.lane} {n.task.label} waits for {self._awaited(n)}" for n in heads.values()]
        more = [f"  and {len(lines) - 16} more lanes"] if len(lines) > 16 else []
        raise Deadlock("\n".join([f"{len(stuck)} of {len(self.nodes)} tasks never end; the first of each lane:", *lines[:16], *more]))

    def _awaited(self, node: _Node) -> str:
        task, work = node.task, node.task.work
        if node.waits:
            known = self.by_label[task.rank]
            awaited = [label for label in task.after if label.step >= 0 and (task.rank, label) not in self.before]
            return ", ".join(f"{label}" + ("" if label in known else " (not in the schedule)")
                             for label in awaited if label not in known or known[label].end < 0)  # fmt: skip
        if isinstance(work, Recv):
            return f"{work.of} from rank {work.peer}" + ("" if self.sender(task.rank, work) else " (no such Send in the schedule)")
        assert isinstance(work, Collective)  # nothing else waits once it has started
        come = {n.task.rank for n in node.act.members if not n.waits}
        return "ranks " + ", ".join(str(rank) for rank in work.group if rank not in come)


def _as_long(act: _Act) -> Transfer:
    """Its transfer; of a computation that takes longer this time, longer."""
    assert act.transfer is not None
    if act.seconds == act.alone:
        return act.transfer
    return Transfer(act.transfer.latency, {port: seconds * act.seconds / act.alone for port, seconds in act.transfer.busy.items()})


def _plain(transfer: Transfer) -> Transfer:
    """Python's own floats: numpy's are several times slower one by one."""
    return Transfer(float(transfer.latency), {port: float(seconds) for port, seconds in transfer.busy.items()})


def _span(task: Task, start: float, end: float) -> Span:
    sent = task.work.nbytes if isinstance(task.work, (Load, Send, Collective)) else 0
    return Span(str(task.label), task.label.op, task.rank, task.lane, start, end, sent, task.label.step)
