"""A schedule as text: lanes over time, each task as wide as its name.

    compute  |forward 1|        |forward 2|loss|backward 2|        |backward 1|
    comm               |halo 2 f|                         |halo 2 b|

A task begins when its lane is free and all tasks that it waits for have ended. The drawing shows
the order of tasks, not seconds. The strategies' pages show such drawings (tests/test_documents.py).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import product

from gnnplan.planner.vocabulary.schedule import Label, Recv, Schedule, Task

LANES = ("setup", "host", "copy", "compute", "comm", "reduce", "send", "receive")
WIDTH = 110  # characters per line; later tasks are not drawn


def draw(schedule: Schedule, ranks: Sequence[int] = (0,), lanes: Sequence[str] = LANES) -> str:
    """Return the drawing of these lanes of these ranks, without idle lanes.

    Tasks of other lanes take no time.
    """
    rows: dict[tuple[int, str], str] = {}
    ended: dict[tuple[int, Label], int] = {}  # task -> column of its end
    tasks = [(task, "setup") for task in schedule.setup] + [(t, t.lane) for t in schedule.tasks]
    drawn = {(task.rank, task.label) for task, _ in tasks}
    while tasks:
        later: list[tuple[Task, str]] = []  # tasks that wait for another task
        held: set[tuple[int, str]] = set()  # (rank, lane) of the tasks in `later`
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
    """Return the tasks of a lane that end within WIDTH columns.

    >>> _cut("|f 1|" + " " * WIDTH + "|f 2|")
    '|f 1|'
    """
    return re.sub(r" +\|$", "", row[: row.rfind("|", 0, WIDTH) + 1])


def _name(label: Label) -> str:
    """Return a task's name, as 'halo 2 f', or 'f3' for chunk 3."""
    if label.chunk is not None:
        return f"{label.op[0]}{label.chunk}"
    return " ".join(str(part) for part in (label.op, label.layer, label.direction) if part)
