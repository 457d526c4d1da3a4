"""What is predicted of an epoch."""

from __future__ import annotations

from dataclasses import dataclass, field

from gnnplan.planner.vocabulary.numbers import Number
from gnnplan.planner.vocabulary.units import show_percent


@dataclass(frozen=True)
class Prediction:
    """One epoch in steady state, without contention between operations that overlap.

    Bytes are sums over all ranks; each byte is counted once, where it is sent. Seconds are arrays
    [problems, 1] where the cluster's numbers are.
    """

    epoch_s: Number
    compute_s: Number  # of the busiest rank
    comm_s: Number  # exposed: not hidden behind computation
    bubble_s: Number  # waiting: the rest of the epoch; 0 where steps overlap (it is in comm_s)
    bytes: dict[str, int]  # by operation
    bytes_by_link: dict[str, int]  # by intra_node, inter_node, island
    setup_bytes: int
    # operation kind -> seconds of its slowest rank
    by_op: dict[str, Number] = field(default_factory=dict)

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
