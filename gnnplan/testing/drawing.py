"""A schedule as text: lanes over time, each task as wide as its name.

    compute  |forward 1|        |forward 2|loss|backward 2|        |backward 1|
    comm               |halo 2 f|                         |halo 2 b|

A task begins when its lane is free and all that it waits for has ended. The drawing shows what
follows what, and no seconds. Strategies' pages have theirs from here (tests/test_drawings.py).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import product

from gnnplan.planner.vocabulary.schedule import Label, Recv, Schedule, Task

LANES = ("setup", "host", "copy", "compute", "comm", "reduce", "send", "receive")
WIDTH = 110  # columns, beyond which nothing is drawn


def draw(schedule: Schedule, ranks: Sequence[int] = (0,), lanes: Sequence[str] = LANES) -> str:
    """These lanes of these ranks, without those that are idle.

    Tasks of other lanes take no time.
    """
    rows: dict[tuple[int, str], str] = {}
    ended: dict[tuple[int, Label], int] = {}  # columns
    tasks = [(task, "setup") for task in schedule.setup] + [(t, t.lane) for t in schedule.tasks]
    drawn = {(task.rank, task.label) for task, _ in tasks}
    while tasks:
        later: list[tuple[Task, str]] = []  # wait for another rank
        held: set[tuple[int, str]] = set()  # their lanes
        for task, lane in tasks:
            row = task.rank, lane
            waits = [(task.rank, label) for label in task.after]
            if isinstance(task.work, Recv):
                waits.append((task.work.peer, task.work.of))
            waits = [each for each in waits if each in drawn]  # no step before the first
            if row in held or any(each not in ended for each in waits):
                held.add(row)
                later.append((task, lane))
                continue
            begin = max([len(rows.get(row, "|")) - 1, *(ended[each] for each in waits)])
            name = f"{_name(task.label)}|" if lane in lanes else ""
            rows[row] = rows.get(row, "")[:begin].ljust(begin) + "|" + name
            ended[task.rank, task.label] = begin + len(name)
        assert len(later) < len(tasks), "tasks wait for one another"
        tasks = later
    heads = {
        (rank, lane): f"rank {rank}  {lane}  " if len(ranks) > 1 else f"{lane}  "
        for rank, lane in product(ranks, lanes)
        if _cut(rows.get((rank, lane), ""))
    }
    widest = max(map(len, heads.values()))
    return "\n".join(f"{head:{widest}}{_cut(rows[row])}" for row, head in heads.items())


def _cut(row: str) -> str:
    """The tasks of a lane that end within WIDTH columns.

    >>> _cut("|f 1|" + " " * WIDTH + "|f 2|")
    '|f 1|'
    """
    return re.sub(r" +\|$", "", row[: row.rfind("|", 0, WIDTH) + 1])


def _name(label: Label) -> str:
    """Such as 'halo 2 f', or 'f3' with chunk 3."""
    if label.chunk is not None:
        return f"{label.op[0]}{label.chunk}"
    return " ".join(str(part) for part in (label.op, label.layer, label.direction) if part)
