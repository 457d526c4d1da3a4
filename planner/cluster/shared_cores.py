"""Slowdown of CPU ranks that share the cores of their machine. GPU ranks share no cores.

A machine shares its c cores fairly among ranks, as an operating system does (processor sharing):

    k ranks at work     each rank has min(1, c / k) of a core
    k > c               ranks take turns, and each computes TURNS times as long, because it finds
                        the data of other ranks in the caches
    a message           is copied by the cores at both ends, while ranks compute

The cores of a machine are one more port, ('cores', machine). A second of the port stands for a
second in which all cores are busy."""

from __future__ import annotations

import numpy as np

from gnnplan.planner.cluster.places import Port
from gnnplan.planner.cluster.spec import Cluster, Link
from gnnplan.planner.vocabulary.numbers import Number, slowest

# The port 'cores' needs a bandwidth, but cores have none. The value is arbitrary [B/s]: `copying`
# multiplies the bytes by it, so that the seconds are right.
COPY_RATE = 1e9
COPYING = Link(bandwidth=COPY_RATE, latency=0.0)
# Four ranks on two cores took 1.02 to 1.14 times as long (traces/measured).
TURNS = 1.1


class SharedCores:
    """The slowdown of ranks that share the cores of machines.

    count: cores of each machine; None on GPUs, where ranks share none. machines: the machine of
    each rank [ranks].
    """

    def __init__(self, cluster: Cluster, machines: np.ndarray) -> None:
        self.cluster, self.machines = cluster, machines
        self.count = cluster.cores if cluster.device.kind == "cpu" else None
        self.ranks_by_machine = np.bincount(machines)
        most_ranks, cores = int(self.ranks_by_machine.max()), self.count or np.inf
        take_turns = most_ranks > cores
        # Share of a machine's cores that a computing rank keeps busy. It includes the time that
        # ranks lose by taking turns, so it may exceed 1 / cores.
        self.core_share = (TURNS if take_turns else 1.0) / cores
        # Share of the cores that are busy while all ranks compute, more than 1 if they take turns.
        self.load = float(most_ranks) * self.core_share
        # Factor on a rank's seconds while all ranks compute.
        self.full_load_slowdown = max(1.0, self.load)

    def last_rank_done_s(self, seconds: Number) -> Number:
        """Return the time at which the last rank has computed, if all ranks start at time 0 [s].

        `seconds` is the time of each rank on a core of its own [.., ranks]. Ranks end one after the
        other; the remaining ranks share the cores.
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
        """Return the seconds for which ranks' computation keeps cores busy [.., machines] [s].

        seconds: the time of each rank on a core of its own [.., ranks].
        """
        if not self.count:
            return {}
        busy = self._by_rank(seconds) * self.core_share
        machines = range(self.ranks_by_machine.size)
        return {
            "cores": np.stack([busy[..., self.machines == each].sum(-1) for each in machines], -1)
        }

    def computing(self, rank: int, lane: str, seconds: float) -> dict[Port, float]:
        """Return the busy seconds of the ports that a rank's computation uses: lane and cores."""
        if not self.count:
            return {}
        cores = ("cores", int(self.machines[rank]))
        return {(f"lane {lane}", rank): seconds, cores: seconds * self.core_share}

    def copying(self, own: Link) -> tuple[Link, float] | None:
        """Return the cores as a link, and the bytes on that link per byte sent, at either end.

        Return None if cores do not copy the messages of the link `own`.
        """
        if not (self.count and own.core_s_per_byte):
            return None
        # half of the core-seconds are the sender's, half the receiver's
        return COPYING, own.core_s_per_byte * COPY_RATE / (2 * self.count)

    def _by_rank(self, seconds: Number) -> np.ndarray:
        """Broadcast seconds to all ranks [.., ranks]."""
        return np.broadcast_to(seconds, (*np.shape(seconds)[:-1], self.machines.size))
