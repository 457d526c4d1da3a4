"""The benchmarks of one rank, in step with all others: kernels, steps, the sampler and messages.

On CPUs as many ranks compute as there are cores, so that no two share a core; on GPUs all do.
Exchanges inside servers run on all servers at once. Exchanges between servers involve all ranks, as
in a training: the time that ranks wait for each other does not grow with the number of peers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from gnnplan.executor.layers.blocks import features
from gnnplan.executor.layers.kernels import Block, aggregate, attend, linear
from gnnplan.executor.layers.layer import Drop
from gnnplan.executor.measure.rehearsal import (
    BATCHES,
    FAR_BATCHES,
    PIECES,
    BatchRehearsal,
    Rehearsal,
)
from gnnplan.executor.ranks.comm import Exchange
from gnnplan.executor.ranks.gather import gather_all
from gnnplan.executor.ranks.machine import device_name
from gnnplan.executor.ranks.rank import Rank
from gnnplan.executor.ranks.recorder import DeviceClock
from gnnplan.planner.cluster.cost import CALLS
from gnnplan.planner.gnn.workload import Workload
from gnnplan.planner.graph.graph import Graph
from gnnplan.planner.graph.load import load
from gnnplan.planner.ownership.layout import Layout
from gnnplan.planner.vocabulary.numbers import Group

WARM_BYTES = 2**29  # written before any timing, so that the allocator holds warm pages
SYNTHETIC = "synthetic:community?vertices={}&edges={}&features={}&classes=16&seed=0"
# Vertices and edges. Few edges per row reveal the cost of a row besides its edges. Caches near a
# core hold most rows of the smallest; rows of the largest exceed the caches of most cores.
GRAPHS = ((20_000, 1_000_000), (20_000, 160_000), (60_000, 900_000), (5_000, 400_000))
WIDTHS = (16, 64, 256)
# Rows in random order, as in a mini-batch: counts of source rows, which take 1 to 100 MB, and bytes
# of a row. OUTPUTS rows are sums of PER_OUTPUT rows each.
SCATTERED, SCATTERED_ROW = (4_000, 20_000, 100_000, 400_000), 256
OUTPUTS, PER_OUTPUT = 20_000, 10
# rows, H_in, H_out of matrix products
SHAPES = (
    (10_000, 256, 256),
    (10_000, 128, 256),
    (10_000, 256, 16),
    (5_000, 64, 64),
    (2_500, 512, 512),
)
PRODUCTS = 3  # per sample: a layer's output, and the gradients of its input and of its weight
TF32 = (8, 0)  # compute capability of the first GPUs with TF32
# Rows, width: six tensors that a large cache holds, and six that none holds, as in an epoch. With
# smaller tensors the framework's overhead would count.
TENSORS = ((5_000, 256), (20_000, 256))
# For GPUs: the sizes above would fit their L2, and would not fill their multiprocessors.
LARGE, LARGE_SHAPE = (400_000, 256), (200_000, 256, 256)
LARGE_GRAPHS = ((200_000, 2_000_000), (200_000, 500_000))
LOADED = (80_000, 1_000)  # feature rows that a GPU loads at once from the server's memory
LOADED_WIDTH = 128

SIZES = tuple(2**k for k in range(10, 27))  # message sizes, 1 KiB to 64 MiB [B]
# If a message takes more than this share of the seconds for a number, larger ones are left out.
LONGEST = 0.3
FEWEST = 6  # sizes that a fit needs, however slow the machine is
ROW = 64  # numbers per exchanged row

# [B] that pass through a rank's cache between two samples; more than a GPU's L2 holds
OTHER_BYTES = {"cpu": 2**24, "cuda": 2**27}
HEAD_START = 10_000_000  # cycles that a GPU idles while the host enqueues samples
TOGETHER = 10  # samples that the host enqueues at once
# All numbers are measured in several rounds, as a machine's speed changes for 10 s and longer.
ROUNDS = 3
HURRY = 0.1  # [s] per number, below which there is only one round

# seconds of an operation, and core-seconds that a group's ranks spend on it
Sent = tuple[float, float]
# shape of a kernel; its seconds on each rank
Sample = tuple[tuple[int, ...], list[float]]


def paces(rounds: Sequence[Mapping[str, Sequence[Sample]]]) -> list[float]:
    """Return the speed of each round over all its kernels, relative to the median round of each.

    >>> paces([{"gemm": [((8,), [2.0]), ((9,), [4.0])]}, {"gemm": [((8,), [1.0]), ((9,), [2.0])]}])
    [0.75, 1.5]
    """
    seconds = np.array(
        [[median(each) for samples in one.values() for _, each in samples] for one in rounds]
    )
    speeds = np.exp(np.log(np.median(seconds, axis=0) / seconds).mean(axis=1))
    return [round(float(speed), 3) for speed in speeds]


def _community(vertices: int, edges: int, features: int = 8) -> Graph:
    """Return the graph for aggregation and sampling."""
    graph = load(SYNTHETIC.format(vertices, edges, features))
    assert isinstance(graph, Graph)
    return graph


class Bench:
    """All benchmarks of one of the measuring ranks.

    All ranks call every method together, and every rank gets the results of all ranks.
    """

    def __init__(
        self,
        me: Rank,
        places: Sequence[int],
        one_machine: bool,
        cores: int,
        seconds: float,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """places: the server of every rank. one_machine: whether one machine emulates all servers.

        cores: of a machine, for all its ranks, before each rank is pinned to a core.

        seconds: spent on each number. dtype: of rows that are measured in addition to float32.
        """
        self.me, self.rank, self.device, self.dtype = me, me.rank, me.device, dtype
        self.places, self.seconds = places, seconds
        self.rounds = 1 if seconds < HURRY else ROUNDS
        device = me.device
        each = None if device.type == "cuda" else cores
        self.other = torch.zeros(OTHER_BYTES[device.type] // 4, device=device)
        self.everyone = tuple(range(len(places)))
        members: dict[int, Group] = {
            server: tuple(r for r in self.everyone if places[r] == server) for server in places
        }
        machines = [self.everyone] if one_machine else [*members.values()]
        # ranks that have a core of their own
        self.apart = tuple(sorted(r for ranks in machines for r in ranks[:each]))
        self.groups: dict[str, list[Group]] = {
            "intra_node": [ranks for ranks in members.values() if len(ranks) > 1]
        }
        if len(members) > 1:
            self.groups["inter_node"] = [self.everyone]

    def _clock(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def _disturb(self) -> None:
        """Do what an epoch does between two uses of the same rows.

        Other data pass through the caches, and Gloo's threads go to sleep.
        """
        self.other.add_(1.0)

    def _time(self, work: Callable[[], Any], divide: int = 1) -> list[float]:
        """Return the median duration of `work` / divide [s], on every rank that has a core.

        All these ranks run `work` at the same time; the other ranks wait.
        """
        duration, takes_part = float("nan"), self.rank in self.apart
        if takes_part:
            work()
        dist.barrier()
        if takes_part:
            samples: list[float] = []
            end = self._clock() + self.seconds / self.rounds
            while not samples or self._clock() < end:
                samples += self._samples(work)
            duration = median(samples) / divide
        durations = gather_all(duration)
        return [durations[rank] for rank in self.apart]

    def _samples(self, work: Callable[[], Any]) -> list[float]:
        """Return durations of `work`; on a GPU of its kernels without launches, as the host
        enqueues them ahead."""
        if self.device.type != "cuda":
            self._disturb()
            return self._durations(work, 1)
        clock, marks = DeviceClock(self.device), []
        torch.cuda._sleep(HEAD_START)  # type: ignore[no-untyped-call]
        for _ in range(TOGETHER):
            self._disturb()
            begin = clock.mark()
            work()
            marks.append((begin, clock.mark()))
        torch.cuda.synchronize()
        return [end.seconds - begin.seconds for begin, end in marks]

    def all(self, notify: Callable[[str], None]) -> dict[str, Any]:
        """Measure every number; return the samples of all ranks, for measure.py."""
        if self.device.type == "cpu" and self.rank in self.apart:
            # Fresh pages are several times slower, most of all on virtual machines. A training
            # reuses its own pages after some epochs.
            torch.zeros(WARM_BYTES // 4).fill_(1.0)
        notify("preparing graphs")
        graphs = LARGE_GRAPHS if self.device.type == "cuda" else GRAPHS
        blocks = [self._block(*size) for size in graphs]
        batches = [BatchRehearsal(piece, self.me) for piece in (BATCHES, FAR_BATCHES)]
        rehearsals = [Rehearsal(piece, self.me) for piece in PIECES]
        messages: dict[str, dict[int, list[Sent]]] = {
            where: {} for where, groups in self.groups.items() if groups
        }
        found: dict[str, Any] = {"name": device_name(self.device), "active": len(self.apart)}
        rounds: list[dict[str, list[Sample]]] = []
        for _ in range(self.rounds):
            rounds.append(self.computation(blocks, rehearsals, batches, notify))
            for where, sent in messages.items():
                place = "inside servers" if where == "intra_node" else "between servers"
                notify(f"exchanges {place}, {len(self.groups[where][0])} ranks")
                self.exchanges(where, sent)
        # rounds that other processes disturb count too: trainings are disturbed as often
        for where, sent in messages.items():
            found[f"exchange.{where}"] = [
                (size, *np.median(times, axis=0).tolist()) for size, times in sent.items()
            ]
        found["paces"] = paces(rounds)
        for kind, samples in rounds[0].items():
            found[kind] = [
                (*shape, np.median([one[kind][place][1] for one in rounds], axis=0).tolist())
                for place, (shape, _) in enumerate(samples)
            ]
        return found

    def _block(self, vertices: int, edges: int) -> Block:
        """Return a community graph's block in the executor's layout: rows in locality order."""
        graph = _community(vertices, edges)
        indptr, indices = Layout.of_one(graph).block(0, 1)
        return Block(indptr, indices, vertices).mean().to(self.device)

    def computation(
        self,
        blocks: Sequence[Block],
        rehearsals: Sequence[Rehearsal],
        batches: Sequence[BatchRehearsal],
        notify: Callable[[str], None],
    ) -> dict[str, list[Sample]]:
        """Run a round of all kernels and steps; return kind -> samples of every shape."""

        cuda = self.device.type == "cuda"

        def products(dtype: torch.dtype = torch.float32) -> list[Sample]:
            sizes = (*SHAPES, LARGE_SHAPE) if cuda else SHAPES
            return [(shape, self.gemm(*shape, dtype)) for shape in sizes]

        def gathers(dtype: torch.dtype = torch.float32) -> list[Sample]:
            return [
                ((width, block.n_src, block.edges), self.gather(block, width, dtype))
                for block in blocks
                for width in WIDTHS
            ]

        notify("matrix products")
        found = {"gemm": products()}
        notify("aggregation")
        found["gather"] = gathers()
        if not cuda:  # a GPU reads rows in any order alike, and hashes while it waits for memory
            found["gather_scattered"] = [((rows,), self.scattered(rows)) for rows in SCATTERED]
            found["hash_rate"] = [((), self.hashing(*TENSORS[0]))]
            found["edge_rate"] = [((), self.attention(blocks[0]))]
        if self.dtype != torch.float32:
            name = str(self.dtype).removeprefix("torch.")
            notify(f"products and aggregation in {name}")
            found[f"gemm_{name}"] = products(self.dtype)
            found[f"gather_{name}"] = gathers(self.dtype)
        if cuda and torch.cuda.get_device_capability() >= TF32:
            notify("products in TF32")
            torch.backends.cuda.matmul.allow_tf32 = True
            found["gemm_tf32"] = products()
            torch.backends.cuda.matmul.allow_tf32 = False
        notify("element-wise work")
        found["elementwise"] = [
            ((), self.elementwise(*size)) for size in ((LARGE,) if cuda else TENSORS)
        ]
        if cuda:
            notify("loads from the server's memory")
            stored = _community(max(LOADED), max(LOADED), LOADED_WIDTH)
            found["load"] = [
                ((rows * LOADED_WIDTH * 4,), self.load(stored, rows)) for rows in LOADED
            ]
        notify("mini-batches")
        near, far = map(self.batches, batches)
        found |= near | {f"far_{what}": far[what] for what in CALLS}
        notify("training steps")
        return found | {"steps": [((), [self.step(rehearsal)]) for rehearsal in rehearsals]}

    def gemm(
        self, rows: int, h_in: int, h_out: int, dtype: torch.dtype = torch.float32
    ) -> list[float]:
        """Return seconds of a linear layer's forward and backward pass: PRODUCTS products."""
        x = torch.randn(rows, h_in, device=self.device, dtype=dtype, requires_grad=True)
        weight = torch.randn(h_out, h_in, device=self.device, requires_grad=True)
        grad = torch.randn(rows, h_out, device=self.device, dtype=dtype)
        return self._time(lambda: torch.autograd.grad(linear(x, weight), (x, weight), grad))

    def gather(self, block: Block, width: int, dtype: torch.dtype = torch.float32) -> list[float]:
        """Return seconds of aggregation over a graph, forward and backward."""
        block = block.mean(dtype)
        x = torch.randn(block.n_src, width, device=self.device, dtype=dtype, requires_grad=True)
        grad = torch.randn(block.n_dst, width, device=self.device, dtype=dtype)
        return self._time(lambda: torch.autograd.grad(aggregate(block, x), x, grad))

    def scattered(self, rows: int) -> list[float]:
        """Return seconds of OUTPUTS sums over PER_OUTPUT random rows each."""
        draw = np.random.default_rng(rows)
        indptr = np.arange(OUTPUTS + 1) * PER_OUTPUT
        block = Block(indptr, draw.integers(0, rows, OUTPUTS * PER_OUTPUT), rows, own=0)
        x = torch.randn(rows, SCATTERED_ROW // 4)
        return self._time(lambda: aggregate(block, x))

    def hashing(self, rows: int, width: int) -> list[float]:
        """Return seconds per number that dropout keeps or drops."""
        x, drop = torch.randn(rows, width), Drop(0.5, 0, 0, 1, torch.arange(rows), training=True)
        return self._time(lambda: drop(x), divide=x.numel())

    def attention(self, block: Block) -> list[float]:
        """Return seconds per attention weight, or its gradient, of one head on narrow rows."""
        z, source = (torch.randn(block.n_src, 1, requires_grad=True) for _ in range(2))
        grad = torch.randn(block.n_dst, 1)

        def work() -> None:
            out = attend(block, z, source, block.own_rows(source))
            torch.autograd.grad(out, (z, source), grad)

        return self._time(work, divide=2 * block.edges)

    def elementwise(self, rows: int, width: int) -> list[float]:
        """Return seconds per byte that element-wise operations read or write.

        They are an epoch's operations: ReLU, addition and ReLU's gradient, over several tensors.
        """
        tensors = [torch.randn(rows, width, device=self.device) for _ in range(6)]

        def work() -> None:
            for a, b in zip(tensors[::2], tensors[1::2], strict=True):
                torch.ops.aten.threshold_backward(torch.relu(a), a + b, 0)

        return self._time(work, divide=3 * (2 + 3 + 3) * tensors[0].nbytes)

    def load(self, stored: Graph, rows: int) -> list[float]:
        """Return seconds of gathering `rows` rows of a graph's features in the server's memory."""
        rows_to_load = np.random.default_rng(0).permutation(stored.stats.vertices)[:rows]
        return self._time(lambda: features(stored, rows_to_load, Workload(), self.device))

    def step(self, rehearsal: Rehearsal) -> float:
        """Return seconds of a training step on the slowest rank, which the others wait for."""
        dist.barrier()
        step_s = rehearsal.play(self.seconds) if self.rank in self.apart else 0.0
        return float(max(gather_all(step_s)))

    def batches(self, rehearsal: BatchRehearsal) -> dict[str, list[Sample]]:
        """Return seconds of drawing a batch, of laying it out and of computing its layers, on every
        rank that has a core; all these ranks train at the same time."""
        dist.barrier()
        own = rehearsal.of_each(self.seconds) if self.rank in self.apart else None
        of_ranks = [each for each in gather_all(own) if each is not None]
        return {what: [((), [each[what] for each in of_ranks])] for what in of_ranks[0]}

    def exchanges(self, where: str, sent: dict[int, list[Sent]]) -> None:
        """Run a round of exchanges of growing sizes, in all groups of a kind at once.

        Adds their durations to `sent`, by size.
        """
        groups = self.groups[where]
        own_group = next(group for group in groups if self.rank in group)
        for size in (*sent,) or SIZES:  # later rounds repeat the sizes of the first
            if size * (len(groups[0]) - 1) > SIZES[-1]:
                break
            is_first = size not in sent
            work = self._exchange(size, own_group)
            rounds = sent.setdefault(size, [])
            if is_first:
                work()
            rounds.append(self._time_messages(work, groups))
            if len(sent) >= FEWEST and is_first and rounds[0][0] > LONGEST * self.seconds:
                break

    def _time_messages(self, work: Callable[[], Any], groups: Sequence[Group]) -> Sent:
        """Return the seconds that one direction of an exchange adds to a loop of computation, and
        the core-seconds that a group's ranks spend on it [s].

        The seconds are a mean over each group's ranks. So they include the time that ranks wait for
        late ranks, as in every layer of a training.
        """
        dist.barrier()
        begin = self._clock()
        self._disturb()
        work()
        slowest = max(gather_all(self._clock() - begin))
        # computed from `slowest`, so equal on all ranks
        rounds = min(60, max(5, int(self.seconds / max(slowest, 1e-5)))) // self.rounds + 1
        idle = median(self._durations(self._disturb, min(rounds, 20)))
        dist.barrier()
        busy = 0.0

        def loop() -> None:
            nonlocal busy
            self._disturb()
            before = time.process_time()
            work()
            busy += (time.process_time() - before) / 2

        samples = [max(duration - idle, 1e-7) / 2 for duration in self._durations(loop, rounds)]
        everyone = gather_all((samples, busy / rounds))
        by_group = [np.mean([everyone[rank][0] for rank in group], axis=0) for group in groups]
        return float(np.median(by_group)), sum(everyone[rank][1] for rank in groups[0])

    def _durations(self, work: Callable[[], object], rounds: int) -> list[float]:
        durations = []
        for _ in range(rounds):
            begin = self._clock()
            work()
            durations.append(self._clock() - begin)
        return durations

    def _exchange(self, size: int, group: Group) -> Callable[[], None]:
        """Return an exchange: each rank sends `size` bytes of rows to every peer, and gradients
        back. The rows are in the order of their vertices, as in a layout."""
        rows = max(1, size // (4 * ROW))
        positions = np.sort(np.random.default_rng(self.rank).permutation(4 * rows)[:rows])
        take = np.array([rows * (peer in group and peer != self.rank) for peer in self.everyone])
        exchange = Exchange(self.me, [positions[: take[peer]] for peer in self.everyone], take)
        x = torch.randn(4 * rows, ROW, device=self.device)
        return lambda: exchange.add_gradient(
            x, exchange.swap("b", exchange.forward(exchange.pack(x)))
        )
