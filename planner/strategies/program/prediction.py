"""What is predicted of an epoch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from gnnplan.planner.vocabulary.numbers import Number
from gnnplan.planner.vocabulary.units import show_percent


@dataclass(frozen=True)
class Prediction:
    """One epoch in steady state, without contention between operations that overlap.

    Bytes are sums over all ranks; each byte is counted once, where it is sent. Seconds are arrays
    [problems, 1] where the cluster's numbers are. Where epochs differ it is their mean, in whole
    bytes, and has each of a period.
    """

    epoch_s: Number
    compute_s: Number  # of the busiest rank
    comm_s: Number  # exposed: not hidden behind computation
    bubble_s: Number  # waiting for slower ranks, or for chunks (account.py)
    bytes: dict[str, int]  # by operation
    bytes_by_link: dict[str, int]  # by intra_node, inter_node, island
    setup_bytes: int
    # operation kind -> seconds of its slowest rank
    by_op: dict[str, Number] = field(default_factory=dict)
    of_period: tuple[Prediction, ...] = ()  # its epochs, if they differ

    @property
    def period(self) -> int:
        """Epochs after which they repeat."""
        return max(len(self.of_period), 1)

    def at(self, epoch: int) -> Prediction:
        """That of an epoch, counted from 0."""
        return self.of_period[epoch % self.period] if self.of_period else self

    def over(self, epochs: range) -> Prediction:
        """The mean of some epochs: of no more than a period."""
        return mean([self.at(epoch) for epoch in epochs[: self.period]])

    @property
    def bytes_total(self) -> int:
        return sum(self.bytes.values())

    @property
    def bottleneck(self) -> str:
        """The largest share of the epoch, in words."""
        shares = {
            "computation": self.compute_s,
            "communication": self.comm_s,
            "waiting": self.bubble_s,
        }
        largest = max(shares, key=lambda k: float(shares[k]))
        share = float(shares[largest]) / max(float(self.epoch_s), 1e-12)
        return f"{largest} ({show_percent(share)})"


def mean(epochs: Sequence[Prediction]) -> Prediction:
    """The mean of the epochs of a period; of one, itself."""
    if len(epochs) == 1:
        return epochs[0]
    sent = [{op: nbytes for op, nbytes in each.bytes.items() if nbytes} for each in epochs]
    each = [replace(epoch, bytes=of_op) for epoch, of_op in zip(epochs, sent, strict=True)]
    return replace(in_all(each, 1, len(each)), of_period=tuple(each))


def in_all(epochs: Sequence[Prediction], times: int, of: int) -> Prediction:
    """`times / of` as much as these epochs take together, in whole bytes."""
    sums = dict[str, Any]()
    for name in ("epoch_s", "compute_s", "comm_s", "bubble_s"):
        sums[name] = sum(getattr(each, name) for each in epochs) * times / of
    for name in ("bytes", "bytes_by_link", "by_op"):
        added = Counter[str]()
        for each in epochs:
            for key, number in getattr(each, name).items():
                added[key] += number
        sums[name] = {key: number * times / of for key, number in added.items()}
        if name != "by_op":
            sums[name] = {key: round(nbytes) for key, nbytes in sums[name].items()}
    return replace(epochs[0], **sums)
