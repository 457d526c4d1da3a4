"""Seconds of computation: a roofline for each kind of work on a device, and shared cores of CPUs.

CPU ranks that share the cores of their machine are slower; GPU ranks share no cores. A machine
shares its c cores fairly among ranks, as an operating system does (processor sharing):

    k ranks at work     each rank has min(1, c / k) of a core
    k > c               ranks take turns, and each computes TURNS times as long, because it finds
                        the data of other ranks in the caches
    a message           is copied by the cores at both ends, while ranks compute

The cores of a machine are one more port, ('cores', machine). A second of the port stands for a
second in which all cores are busy. Other transfers are in ports.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from scipy.special import ndtr, ndtri

from gnnplan.planner.cluster.places import Port
from gnnplan.planner.cluster.spec import Cluster, Device, Link
from gnnplan.planner.vocabulary.numbers import Number, slowest
from gnnplan.planner.vocabulary.schedule import EDGE_ACCESSES, HASH_BYTES, Compute

# Bytes of a row that a warp reads at once, before it goes on to the next row, in an aggregation on
# a GPU (GE-SpMM, SC 2020) [B].
WARP_LINE = 128
# Bytes that a GPU moves at least, for a number at a random address: a quarter of a cache line [B].
SECTOR = 32
# A cache that the whole device shares is read so many times as fast as memory: 2.4 on V100, 2.2 on
# P100, 4.0 on T4 (Jia et al. 2018, 2019).
CACHE_SPEEDUP = 3.0
# On a CPU core, random row access costs three times sequential access, where `gather_scattered` was
# not measured.
RANDOM_ACCESS_SLOWDOWN = 3.0
# On a CPU core, gathers from randomly ordered rows take 1.25 to 1.8 times as long as gathers from
# rows in an order that keeps neighbours near each other, if the cache holds most rows. The latter
# order alone is measured in cluster files without `gather_scattered`.
SCATTERED_SLOWDOWN = 1.5


class Curve(NamedTuple):
    """Rates measured at some sizes, interpolated log-log between these sizes.

    For n clusters at once, `log_rates` is [n, sizes], and a rate at one size is a column [n, 1].
    """

    log_sizes: np.ndarray  # [sizes]
    log_rates: np.ndarray  # [sizes] or [n, sizes]

    @classmethod
    def of(cls, rates: Mapping[float, Number]) -> Curve:
        """Return the curve of a mapping size -> rate."""
        sizes = sorted(rates)
        columns = [np.log(rates[size]) for size in sizes]
        return cls(np.log(sizes), np.hstack(columns) if np.ndim(columns[0]) else np.array(columns))

    def log_rate(self, size: Number) -> Number:
        """Return the logarithm of the rate at a size, constant outside the measured sizes."""
        log_size = np.log(size)
        if self.log_rates.ndim == 1:
            out: Number = np.interp(log_size, self.log_sizes, self.log_rates)
            return out
        rows = [np.interp(log_size, self.log_sizes, rates) for rates in self.log_rates]
        return np.reshape(rows, (len(rows), -1))


class Roofline:
    """The seconds that work takes on a device, by its rates."""

    def __init__(
        self,
        device: Device,
        degree_spread: float,
        exchange_bandwidth: Number,
        call_s: Number = np.inf,
    ) -> None:
        self.device = device
        # a framework operation outside autograd, which takes no longer than one inside [s]
        self.call_s: Number = np.minimum(call_s, device.launch)
        self.degree_spread = degree_spread  # standard deviation of a degree's logarithm
        self.exchange_bandwidth = exchange_bandwidth  # of transfers that overlap computation [B/s]
        # logarithms of the row widths at which aggregation was measured, and a curve per width
        self._log_widths = np.log(sorted(device.gather))
        self._gather_curves = [Curve.of(device.gather[width]) for width in sorted(device.gather)]
        self._scattered = Curve.of(device.gather_scattered) if device.gather_scattered else None
        # rate of reading rows at random places that no cache holds [B/s]
        self.random_rate: Number = device.memory_bandwidth / RANDOM_ACCESS_SLOWDOWN
        if device.kind == "cuda":  # it hides latency by many reads in flight at once
            self.random_rate = device.memory_bandwidth
        elif self._scattered is not None:
            self.random_rate = np.exp(self._scattered.log_rate(np.inf))

    def compute_s(self, work: Compute) -> Number:
        """Return the duration of a piece of work on a device that does nothing else [s].

        The duration is the sum over kinds of work, each limited by arithmetic or by memory, plus a
        fixed time per framework operation.
        """
        device, bandwidth = self.device, self.device.memory_bandwidth
        multiplying = work.flops / device.gemm
        moved = device.product_bandwidth
        reading = work.gemm_bytes / (bandwidth if moved is None else moved)
        # On a GPU some warps compute while others wait for memory; a CPU core does one at a time.
        on_gpu = device.kind == "cuda"
        seconds: Number = np.maximum(multiplying, reading) if on_gpu else multiplying + reading
        seconds = seconds + work.elementwise_bytes / bandwidth
        seconds = seconds + work.launches * device.launch + work.calls * self.call_s
        hashes, edges = device.hash_rate, device.edge_rate
        hashes = bandwidth / HASH_BYTES if hashes is None else hashes
        edges = bandwidth / (EDGE_ACCESSES * work.itemsize) if edges is None else edges
        seconds = seconds + work.hash_ops / hashes + work.attention_edges / edges
        for rows, width, distinct, outputs in work.gathers:
            row_bytes, distinct = width * work.itemsize, np.maximum(distinct, 1.0)
            # bytes of a row that are read before the next row [B]
            at_once = row_bytes if self._gather_curves else min(row_bytes, WARP_LINE)
            rate = self.gather_rate(width, distinct * at_once, rows / distinct)
            if work.scattered and not on_gpu:
                rate = self._scattered_rate(rate, distinct * row_bytes)
            rate = rate * device.gathering(work.itemsize)
            seconds = seconds + rows * row_bytes / rate
            seconds = seconds + outputs * (
                device.row_latency
                + (0.0 if device.row_bandwidth is None else row_bytes / device.row_bandwidth)
            )
        for rows, width in work.random_rows:
            seconds = seconds + rows * width * work.itemsize / self.random_rate
        if work.of_batch and not on_gpu:
            seconds = seconds * device.batch_slowdown
        return seconds + work.overlapped_bytes * device.overlap_tax / self.exchange_bandwidth

    def _scattered_rate(self, in_order: Number, source_bytes: Number) -> Number:
        """Return the rate of an aggregation from rows in random order [B of gathered rows/s], which
        is at most the rate `in_order`."""
        if self._scattered is None:
            return in_order / SCATTERED_SLOWDOWN
        return np.minimum(np.exp(self._scattered.log_rate(source_bytes)), in_order)

    def gather_rate(self, width: int, source_bytes: Number = np.inf, reads: Number = 1.0) -> Number:
        """Return the rate of an aggregation [B of gathered rows/s].

        `width` is the row width [numbers], `source_bytes` the size of all source rows [B], and
        `reads` the average number of reads of each source row. Measured rates are interpolated
        log-log between the measured widths and sizes, and constant outside them.

        Without measurements, the rate is a roofline of memory and cache. The cache holds the rows
        that are read most. A row is read as often as its vertex has edges, and degrees are assumed
        to be lognormal with spread s. A cache that holds the share c of the rows then serves

            share(c) = Phi(s + Phi^-1(c))

        of all reads (the Lorenz curve of a lognormal; c = 1 serves all reads). Memory serves the
        remaining reads, and the first read of every row.
        """
        device = self.device
        if self._gather_curves:
            curves = self._gather_curves
            places = np.arange(len(curves))
            place = float(np.interp(np.log(max(width, 1)), self._log_widths, places))
            below, above = int(place), place % 1
            log_rate: Number = 0.0
            for i, weight in ((below, 1 - above), (below + 1, above)):
                if weight:
                    log_rate = log_rate + weight * curves[i].log_rate(source_bytes)
            measured: Number = np.exp(log_rate)
            return measured
        if not device.cache:
            return device.memory_bandwidth / 2
        cached = np.clip(device.cache / source_bytes, 1e-12, 1.0)
        missed = np.maximum(
            1.0 - ndtr(self.degree_spread + ndtri(cached)), 1.0 / np.maximum(reads, 1.0)
        )
        rate: Number = device.memory_bandwidth / np.maximum(missed, 1.0 / CACHE_SPEEDUP)
        return rate


# -- ranks that share cores ------------------------------------------------------------------------


# Cores as a link. Its bandwidth is arbitrary: `copying` multiplies bytes by it, so that the seconds
# are right.
COPYING = Link(bandwidth=1e9, latency=0.0)
# Four ranks on two cores took 1.02 to 1.14 times as long (traces/measured).
TURNS = 1.1


class SharedCores:
    """The slowdown of ranks that share the cores of machines.

    count: cores of each machine; None on GPUs, where ranks share none. machines: the machine of
    each rank [ranks].
    """

    def __init__(self, cluster: Cluster, machines: np.ndarray) -> None:
        self.machines = machines
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

    def copying(self, own: Link) -> float:
        """Return the bytes on the link COPYING per byte sent on the link `own`, at either end; 0 if
        cores do not copy its messages."""
        # half of the core-seconds are the sender's, half the receiver's
        return own.core_s_per_byte * COPYING.bandwidth / (2 * self.count) if self.count else 0.0

    def _by_rank(self, seconds: Number) -> np.ndarray:
        """Broadcast seconds to all ranks [.., ranks]."""
        return np.broadcast_to(seconds, (*np.shape(seconds)[:-1], self.machines.size))
