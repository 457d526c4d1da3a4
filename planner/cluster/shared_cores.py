"""Ranks on a CPU that share the cores of their machine; ranks on GPUs share none.

A machine's c cores are shared fairly, as an operating system does it (processor sharing):

    k ranks at work     each has min(1, c / k) of a core
    k > c               they also take turns: each computes TURNS times as long, for caches are
                        another's
    a message           is copied by the cores at both ends, beside the ranks that compute

In terms of ports the cores of a machine are one more port, ('cores', machine). It is busy for a
second when all cores are busy for a second."""

from __future__ import annotations

import numpy as np

from gnnplan.planner.cluster.places import Port
from gnnplan.planner.cluster.spec import Cluster, Link
from gnnplan.planner.vocabulary.numbers import Number, slowest

# The port 'cores' needs a bandwidth, but cores have none: they copy so many bytes per second, and
# each byte so often that the product is right. Any number would do [B/s].
COPY_RATE = 1e9
COPYING = Link(bandwidth=COPY_RATE, latency=0.0)
# Measured were 1.02 to 1.14 of four ranks on two cores (traces/measured).
TURNS = 1.1


class SharedCores:
    """What ranks that share cores lose to each other.

    count: cores of each machine; None if ranks share none. machines: the machine of each rank
    [ranks].
    """

    def __init__(self, cluster: Cluster, machines: np.ndarray) -> None:
        self.cluster, self.machines = cluster, machines
        self.count = cluster.cores if cluster.device.kind == "cpu" else None
        self.ranks_by_machine = np.bincount(machines)
        most_ranks, cores = int(self.ranks_by_machine.max()), self.count or np.inf
        take_turns = most_ranks > cores
        # Share of its machine's cores that a computing rank keeps busy. It counts the time that
        # ranks lose by taking turns, so it may exceed 1 / cores.
        self.core_share = (TURNS if take_turns else 1.0) / cores
        # How many times as long a rank computes while all ranks compute.
        self.full_load_slowdown = max(1.0, float(most_ranks) * self.core_share)

    def all_done_s(self, seconds: Number) -> Number:
        """When the last rank has computed, if all begin at once [s].

        `seconds` is what each would take alone [.., ranks]. Ranks end one after the other; those
        that are left share the cores.
        """
        if self.full_load_slowdown == 1.0:
            return slowest(seconds)
        by_rank = self._by_rank(seconds)
        out: Number = 0.0
        for machine in set(self.machines.tolist()):
            ends = np.sort(by_rank[..., self.machines == machine], axis=-1)
            ranks_left = np.arange(ends.shape[-1], 0, -1)
            steps = np.diff(ends, axis=-1, prepend=0.0) * np.maximum(
                1.0, ranks_left * self.core_share
            )
            out = np.maximum(out, steps.sum(-1, keepdims=np.ndim(seconds) > 1))
        return out

    def core_busy_s(self, seconds: Number) -> dict[str, np.ndarray]:
        """How long each machine's cores are busy while its ranks compute [.., ranks] [s]."""
        if not self.count:
            return {}
        busy = self._by_rank(seconds) * self.core_share
        machines = range(self.ranks_by_machine.size)
        return {
            "cores": np.stack([busy[..., self.machines == each].sum(-1) for each in machines], -1)
        }

    def computing(self, rank: int, lane: str, seconds: float) -> dict[Port, float]:
        """Ports that a rank's computation shares with what overlaps it, and for how long [s]."""
        if not self.count:
            return {}
        cores = ("cores", int(self.machines[rank]))
        return {(f"lane {lane}", rank): seconds, cores: seconds * self.core_share}

    def copying(self, own: Link) -> tuple[Link, float] | None:
        """How cores copy what crosses a link, and a message's bytes on them at either end, per
        byte; None if they do not."""
        if not (self.count and own.core_s_per_byte):
            return None
        # half at either end
        return COPYING, own.core_s_per_byte * COPY_RATE / (2 * self.count)

    def _by_rank(self, seconds: Number) -> np.ndarray:
        """The same for every rank, if one number is given [.., ranks]."""
        return np.broadcast_to(seconds, (*np.shape(seconds)[:-1], self.machines.size))
