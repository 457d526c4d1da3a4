"""Simulation of a schedule in virtual time.

A task starts when the previous task of its lane, and all tasks that it names in `after`, have
ended. It then takes part in an *activity*, which begins when all of its parties have started:

    computation, load, message    one task
    collective                    a task of each rank of the group; they end together
    Recv                          the task, and the message that it waits for

An activity with a duration is one SimPy event; dependencies need no events."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import pairwise

import simpy

from gnnplan.planner.cluster.cost import Cost
from gnnplan.planner.vocabulary.errors import Deadlock, Mismatch
from gnnplan.planner.vocabulary.numbers import Group, typical
from gnnplan.planner.vocabulary.schedule import (
    Collective,
    Compute,
    Copy,
    Label,
    Recv,
    Sampling,
    Schedule,
    Send,
    Task,
)
from gnnplan.planner.vocabulary.trace import Span
from gnnplan.simulator.network import Demand, Network


@dataclass(frozen=True)
class Timeline:
    """The result of a simulation."""

    schedule: Schedule
    times: list[tuple[float, float]]  # begin and end of each task [s]

    @property
    def spans(self) -> list[Span]:
        """The spans of a trace; `spans[i]` is the schedule's i-th task."""
        return [
            _span(task, *time) for task, time in zip(self.schedule.tasks, self.times, strict=True)
        ]

    @property
    def end_s(self) -> float:
        """The end of the last task [s]."""
        return max((end for _, end in self.times), default=0.0)

    @property
    def step_ends(self) -> dict[int, float]:
        """The end of each step: of its last task, or of its last loss if `by_loss` [s]."""
        ends: dict[int, float] = {}
        for task, (_, end) in zip(self.schedule.tasks, self.times, strict=True):
            if task.label.op == "loss" or not self.schedule.by_loss:
                ends[task.label.step] = max(ends.get(task.label.step, 0.0), end)
        return ends

    def epochs_s(self, steps: int) -> list[float]:
        """Return the durations of epochs of `steps` steps, from end to end [s].

        The first epoch is left out, unless it is the only one.
        """
        by_step = self.step_ends
        ends = [by_step[step] for step in sorted(by_step) if step % steps == steps - 1]
        return [b - a for a, b in pairwise(ends)] if len(ends) > 1 else [self.end_s]

    def epoch_s(self, steps: int, period: int = 1) -> float:
        """Return the duration of an epoch in the steady state: `typical` of `epochs_s` [s].

        The last epoch is left out too, if there are enough others: its operations have no
        contention from a later epoch.
        """
        epochs = self.epochs_s(steps)
        return typical(epochs[:-1] if len(epochs) > period else epochs, period)


def play(
    schedule: Schedule, cost: Cost, *, contention: bool = True, factors: Sequence[float] = ()
) -> Timeline:
    """Simulate a schedule once; see `TaskGraph.play`."""
    return TaskGraph(schedule, cost).play(contention, factors)


# -- the task graph


NOTHING = Demand(0.0, {})


@dataclass(eq=False, slots=True)
class _Activity:
    """Work of one or more tasks, which begins when all have started, and ends them together."""

    needs: int  # number of tasks that it waits for: its own to start, or a sender to end
    threads: int  # that work on it
    demand: Demand = NOTHING  # seconds of ports; empty for a computation on its own cores
    seconds_alone: float = 0.0
    nodes: list[_Node] = field(default_factory=list)
    # set by `TaskGraph.play`: needs that are not met, and the duration [s]
    missing: int = 0
    seconds: float = 0.0

    def end(self, now: float) -> list[_Node | _Activity]:
        """End the tasks; return what needed one of these ends."""
        followers = []
        for node in self.nodes:
            node.end = now
            followers += node.followers
        return followers


@dataclass(eq=False, slots=True)
class _Node:
    """A task, what follows it, and its times [s]."""

    task: Task
    needs: int = 1  # the end of its lane's task before, or the beginning, and those in `task.after`
    missing: int = 0  # needs that are not met
    followers: list[_Node | _Activity] = field(default_factory=list)  # of a Send: the peer's Recv
    start: float = 0.0
    end: float = -1.0  # negative: it has not ended
    activity: _Activity = field(init=False)


class TaskGraph:
    """The tasks of a schedule as nodes, in order, and their activities; played several times.

    Raises Mismatch if the schedule contradicts itself.
    """

    def __init__(self, schedule: Schedule, cost: Cost) -> None:
        self.schedule, self.nodes = schedule, [_Node(task) for task in schedule.tasks]
        self.first: list[_Node | _Activity] = []  # of each lane
        self.activities: list[_Activity] = []
        self._by_label: dict[int, dict[Label, _Node]] = {}  # rank -> label -> node
        self._in_setup = {(task.rank, task.label) for task in schedule.setup}
        last: dict[tuple[int, str], _Node] = {}
        for node in self.nodes:
            rank, label = node.task.rank, node.task.label
            if self._by_label.setdefault(rank, {}).setdefault(label, node) is not node:
                raise Mismatch(
                    f"rank {rank} has two tasks {label}; a label names one task of a rank"
                )
            lane = (rank, node.task.lane)
            (last[lane].followers if lane in last else self.first).append(node)
            last[lane] = node
        for node in self.nodes:
            for _, before in self._before(node):
                node.needs += 1  # a label that is not in the schedule never ends
                if before is not None:
                    before.followers.append(node)
        self._add_activities(cost)

    @property
    def serial_s(self) -> float:
        """An upper bound of the duration: all activities one after the other [s]."""
        return sum(activity.seconds_alone for activity in self.activities)

    def play(self, contention: bool = True, factors: Sequence[float] = ()) -> Timeline:
        """Simulate all tasks of the steps in virtual time; they begin at 0, after `setup`.

        contention: whether transfers that overlap slow each other down. factors: factor of the
        duration of each task that computes (noise.py). Raises Deadlock if tasks wait for ever.
        """
        self._rewind(factors)
        env = simpy.Environment(0.0)
        network = Network(env)

        def end(activity: _Activity, event: object = None) -> None:
            meet(activity.end(env.now))

        def meet(needs: list[_Node | _Activity]) -> None:
            """Meet a need of each of these; start those that have no other, and what follows."""
            now = env.now
            while needs:
                begun = needs.pop()
                begun.missing -= 1
                if begun.missing:
                    continue
                if isinstance(begun, _Node):
                    begun.start = now
                    needs.append(begun.activity)
                elif not begun.seconds:
                    needs += begun.end(now)
                elif contention and begun.demand.busy:
                    factor = begun.seconds / begun.seconds_alone
                    network.start(begun.demand, partial(end, begun), begun.threads, factor)
                else:
                    env.timeout(begun.seconds).callbacks.append(partial(end, begun))

        meet(self.first[::-1])
        env.run()
        self._check_all_ended()
        return Timeline(self.schedule, [(node.start, node.end) for node in self.nodes])

    def _rewind(self, factors: Sequence[float]) -> None:
        """Reset all nodes and activities."""
        for activity in self.activities:
            activity.missing, activity.seconds = activity.needs, activity.seconds_alone
        for node in self.nodes:
            node.missing, node.start, node.end = node.needs, 0.0, -1.0
        for node, factor in zip(self.nodes, factors, strict=bool(factors)):
            if isinstance(node.task.work, (Compute, Sampling)):
                node.activity.seconds *= factor

    def _before(self, node: _Node) -> list[tuple[Label, _Node | None]]:
        """Return the tasks in `after`; None for a label that is not in the schedule. Those of steps
        before the first, and of the set-up, have ended."""
        rank = node.task.rank
        return [
            (label, self._by_label[rank].get(label))
            for label in node.task.after
            if label.step >= 0 and (rank, label) not in self._in_setup
        ]

    def _add_activities(self, cost: Cost) -> None:
        # cached, because steps repeat the same work
        seconds = cache(lambda work: float(cost.seconds(work)))
        message = cache(lambda rank, work: Demand.of(cost.send(rank, work)))
        transfer = cache(lambda work, group: Demand.of(cost.collective(work, group)))
        collectives: dict[tuple[Label, Group], _Activity] = {}
        # ranks whose GPU samples on a lane of its own, so that sampling and training share the GPU
        sampling = {
            node.task.rank
            for node in self.nodes
            if node.task.lane in ("host", "copy") and isinstance(node.task.work, Compute)
        }
        for node in self.nodes:
            rank, work = node.task.rank, node.task.work
            if isinstance(work, Collective):
                if rank not in work.group:
                    raise Mismatch(
                        f"rank {rank} takes part in {node.task.label}, but its group is"
                        f" {work.group}"
                    )
                key = (node.task.label, work.group)
                if key not in collectives:
                    demand, parties = transfer(work.work, work.group), len(work.group)
                    collectives[key] = _Activity(parties, parties, demand, demand.alone)
                activity = collectives[key]
            elif isinstance(work, Send):
                demand = message(rank, work)  # the sender and the receiver work on it
                activity = _Activity(1, 2, demand, demand.alone)
            elif isinstance(work, Recv):
                activity = _Activity(2, 2)  # the receiver and the message
                sender = self._sender(rank, work)
                if sender is not None:
                    sender.followers.append(activity)
            else:
                alone = seconds(work)
                shared = cost.cores.computing(rank, node.task.lane, alone)
                if rank in sampling and isinstance(work, Compute):
                    shared = {("device", rank): alone}
                activity = _Activity(1, 1, Demand(0.0, shared), alone)
            if not activity.nodes:
                self.activities.append(activity)
            activity.nodes.append(node)
            node.activity = activity

    def _sender(self, rank: int, work: Recv) -> _Node | None:
        """Return the Send that a Recv of `rank` names, or None if no such Send goes to `rank`."""
        node = self._by_label.get(work.peer, {}).get(work.of)
        if node is None or not isinstance(node.task.work, Send) or node.task.work.peer != rank:
            return None
        return node

    def _check_all_ended(self) -> None:
        """Raise Deadlock if tasks have not ended.

        The error names the first such task of each lane, and the tasks or ranks that it waits for.
        """
        stuck = [node for node in self.nodes if node.end < 0]
        if not stuck:
            return
        first_of_lane: dict[tuple[int, str], _Node] = {}
        for node in stuck:
            first_of_lane.setdefault((node.task.rank, node.task.lane), node)
        lines = [
            f"  rank {node.task.rank} {node.task.lane} {node.task.label} waits for"
            f" {self._awaited(node)}"
            for node in first_of_lane.values()
        ]
        more = [f"  and {len(lines) - 16} more lanes"] if len(lines) > 16 else []
        raise Deadlock(
            "\n".join(
                [
                    f"{len(stuck)} of {len(self.nodes)} tasks never end; the first of each lane:",
                    *lines[:16],
                    *more,
                ]
            )
        )

    def _awaited(self, node: _Node) -> str:
        """Return the tasks or ranks that a task waits for, in words."""
        task, work = node.task, node.task.work
        if node.missing:
            return ", ".join(
                f"{label}" + ("" if before else " (not in the schedule)")
                for label, before in self._before(node)
                if before is None or before.end < 0
            )
        if isinstance(work, Recv):
            return f"{work.of} from rank {work.peer}" + (
                "" if self._sender(task.rank, work) else " (no such Send in the schedule)"
            )
        assert isinstance(work, Collective)  # nothing else waits once it has started
        present = {member.task.rank for member in node.activity.nodes if not member.missing}
        return "ranks " + ", ".join(str(rank) for rank in work.group if rank not in present)


def _span(task: Task, start: float, end: float) -> Span:
    sent = task.work.nbytes if isinstance(task.work, (Copy, Send, Collective)) else 0
    return Span(
        str(task.label), task.label.op, task.rank, task.lane, start, end, sent, task.label.step
    )
