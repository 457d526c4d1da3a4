"""The pipelined order of P3: what a rank does in each period.

|front k|body k-1|tail k-2|update k-3| in period k, with reduce k-3 beside all of it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

from gnnplan.planner.strategies.p3.slices import DELAY
from gnnplan.planner.strategies.program.program import Op, Order, Queued, Step
from gnnplan.planner.vocabulary.schedule import Label


def period(t: int, epoch: int, steps: int | None = None) -> Iterator[tuple[str, int]]:
    """What a rank does in period t of the pipeline: (phase, batch), one after the other.

    Phases are those of `P3.step` but 'host', which goes before 'front'. `epoch` is the number of
    batches of an epoch, `steps` that of the run, whose last batch ends an epoch too (None: the run
    goes on).

    >>> [f"{phase} {batch}" for phase, batch in period(4, epoch=5)]
    ['reduce 1', 'front 4', 'body 3', 'tail 2', 'body 4', 'update 1']
    """

    def exists(batch: int) -> bool:
        return batch >= 0 and (steps is None or batch < steps)

    def ends_epoch(batch: int) -> bool:
        return (batch + 1) % epoch == 0 or batch + 1 == steps

    order = [
        ("reduce", t - DELAY, True),
        ("front", t, True),
        ("body", t - 1, not ends_epoch(t - 1)),
        ("tail", t - 2, True),
        ("body", t, ends_epoch(t)),  # an epoch's last batch goes through at once
        ("update", t - DELAY, True),
    ]
    return ((phase, batch) for phase, batch, due in order if due and exists(batch))


def pipelined(prefetch: int) -> Order:
    """The order of batches whose samplers may be so many batches ahead."""

    def order(at: Callable[[int], Step], epoch: int, steps: int) -> Iterator[Queued]:
        waits, ended = _Waits(), list[Label]()  # the last computation or load of each period
        under_way: dict[int, dict[str, list[Op]]] = {}  # batch -> phase -> operations
        for t in range(steps + DELAY):
            for phase, batch in period(t, epoch, steps):
                if phase == "front":
                    phases = under_way[batch] = defaultdict(list)
                    for op in at(batch):
                        phases[op.phase].append(op)
                    start = len(ended) - 1 - prefetch  # the period that sampling follows
                    waits.chain[batch] = (ended[start],) if start >= 0 else ()
                    yield from waits.of(batch, phases["host"])
                yield from waits.of(batch, under_way[batch][phase])
            ended += waits.last  # one label

    return order


class _Waits:
    """What operations wait for: the one before them of the same batch, and loads for the rank."""

    def __init__(self) -> None:
        self.chain: dict[int, tuple[Label, ...]] = {}  # what a batch's next operation waits for
        self.last: tuple[Label, ...] = ()  # the rank's last computation or load

    def of(self, batch: int, ops: Sequence[Op]) -> Iterator[Queued]:
        """A batch's operations of one phase."""
        for op in ops:
            label, chain = op.label(batch), self.chain[batch]
            if op.idle:  # it is the wait, and begins at once
                yield Queued(op, batch, ())
                self.chain[batch] = (*chain, label)
            else:
                yield Queued(op, batch, chain + self.last if op.lane == "copy" else chain)
                self.chain[batch] = (label,)
            if op.lane in ("compute", "copy"):
                self.last = (label,)
