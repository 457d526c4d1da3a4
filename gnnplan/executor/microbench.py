"""One rank's micro-benchmarks: what it does in step with the others, on every machine that takes part.

Computation is timed with as many ranks busy as there are cores (all, on GPUs): what a core does when none is shared. Messages are timed
inside servers, among the ranks of every server at once, and between servers, among the first rank of each; exchanges between servers
among all ranks, as a training has them: what ranks wait for each other is not more with more peers.
"""

from __future__ import annotations

import itertools
import platform
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from gnnplan.executor.comm import Exchange
from gnnplan.executor.kernels import Block, aggregate, attend, dropout, linear
from gnnplan.executor.rehearsal import BRIEF, PIECES, Rehearsal
from gnnplan.executor.sampler import Sampler
from gnnplan.executor.worker import Rank
from gnnplan.planner.graph import Graph, load
from gnnplan.planner.layout import Layout
from gnnplan.planner.minibatch import Batches
from gnnplan.planner.specs import Workload

SYNTHETIC = "synthetic:community?vertices={}&edges={}&features=8&classes=16&seed=0"
# Vertices, edges: rows fit a core's cache, the chip's, or none; and few edges to a row, to see what a row costs besides
GRAPHS = ((2_500, 125_000), (2_500, 20_000), (20_000, 1_000_000), (20_000, 160_000), (80_000, 800_000))
WIDTHS = (16, 64, 256)
SHAPES = ((10_000, 256, 256), (10_000, 128, 256), (10_000, 256, 16), (5_000, 64, 64), (2_500, 512, 512))  # rows, H_in, H_out
TENSORS = ((5_000, 64), (5_000, 256), (40_000, 256))  # rows, width; the framework's own time would be most of a smaller one's
SAMPLED = (20_000, 1_000_000)  # one of them
SEEDS, FANOUTS = 1024, (5, 10, 15)  # of a rank's share of a batch, from the seeds outwards
SIZES = tuple(2**k for k in range(10, 27))  # messages of 1 KiB to 64 MiB [B]
BESIDE = 2**23  # moved, there and back, beside computation, to see what that loses [B]
LONGEST = 0.3  # times what is spent on a number: what a message may take; larger ones are left out
FEWEST = 6  # sizes that a fit needs, however slow the moment
BRIEF_STEPS = 300  # in all rounds, of each kind
ROW = 64  # numbers in an exchanged row
OTHER = 2**24  # bytes that pass through a rank's cache between two samples
ROUNDS = 3  # in which everything is timed in turn: a machine's pace changes for ten seconds and more
SLOW = 1.15  # times the fastest round: what is slower is of a moment in which others had the machine
HURRY = 0.1  # [s] on a number, below which one round is enough
WARM = 2**29  # bytes that a rank has touched before it times anything: the allocator keeps them

Group = tuple[int, ...]
Sent = tuple[float, float]  # how long an operation of a size took, and core-seconds of a group's ranks [s]


def usual(rounds: Sequence[Sequence[float]], slow: float = np.inf) -> list[float]:
    """The median of several rounds, of each number by itself, without those that were so many times as slow as the fastest.

    >>> usual([[1.0, 2.0], [1.1, 2.0], [1.5, 2.0]]), usual([[1.0], [1.1], [1.5]], slow=1.15)
    ([1.1, 2.0], [1.05])
    """
    return [median(took for took in each if took <= slow * min(each)) for each in zip(*rounds, strict=True)]


@cache
def _community(vertices: int, edges: int) -> Graph:
    """Made once, for what aggregates and what samples."""
    graph = load(SYNTHETIC.format(vertices, edges))
    assert isinstance(graph, Graph)
    return graph


class Bench:
    """The benchmarks of rank `rank`; places[r]: the server of rank r. `cores` that a machine's ranks share (None: a GPU each), and all
    servers are one machine, or not. `seconds` are spent on each number. Every method is called by all ranks together and returns what all
    of them found."""

    def __init__(self, rank: int, places: Sequence[int], device: torch.device, cores: int | None, one_machine: bool, seconds: float
                 ) -> None:  # fmt: skip
        self.rank, self.places, self.device, self.seconds = rank, places, device, seconds
        self.rounds = 1 if seconds < HURRY else ROUNDS
        self.me = Rank(rank, len(places), device, dist.get_backend(), exchange_group=dist.new_group())
        self.other = torch.zeros(OTHER // 4, device=device)
        self.everyone = tuple(range(len(places)))
        members: dict[int, Group] = {server: tuple(r for r in self.everyone if places[r] == server) for server in places}
        machines = [self.everyone] if one_machine else [*members.values()]
        self.apart = tuple(sorted(r for some in machines for r in some[:cores]))  # ranks that have a core each
        self.groups: dict[str, list[Group]] = {"intra_node": [some for some in members.values() if len(some) > 1]}
        if len(members) > 1:
            self.groups["inter_node"] = [tuple(some[0] for some in members.values())]

    def all(self, tell: Callable[[str], None]) -> dict[str, Any]:
        """Every number, as samples of all ranks. Memory that has just been handed out is several times slower, most of all on virtual
        machines, and short benchmarks would see little else: a training has touched its own after some epochs."""
        if self.device.type == "cpu" and self.rank in self.apart:
            torch.zeros(WARM // 4).fill_(1.0)
        tell("preparing graphs")
        blocks = [self._block(*size) for size in GRAPHS]
        rehearsals = [Rehearsal(piece, self.device, self.me.backend) for piece in PIECES]
        messages: dict[tuple[str, str], dict[int, list[Sent]]] = {
            (op, where): {} for where, groups in self.groups.items() for op in ("exchange", "send", "all_reduce") if groups}  # fmt: skip
        for group in itertools.chain(*self.groups.values()):
            self.me.group(group)  # all ranks ask for all of them in the same order
        found: dict[str, Any] = {"name": self._device_name(), "active": len(self.apart)}
        timed: dict[str, list[list[list[float]]]] = {}  # of each number, rounds of a sample per rank
        for _ in range(self.rounds):
            for what, of_each in self.computation(blocks, rehearsals, tell).items():
                for rounds, samples in zip(timed.setdefault(what, [[] for _ in of_each]), of_each, strict=True):
                    rounds.append(samples)
            for (op, where), sent in messages.items():
                groups = [self.everyone] if (op, where) == ("exchange", "inter_node") else self.groups[where]
                tell(f"{op}s {'inside servers' if where == 'intra_node' else 'between servers'}, {len(groups[0])} ranks")
                self.messages(op, [group[:2] for group in groups] if op == "send" else groups, sent)
        for (op, where), sent in messages.items():
            found[f"{op}.{where}"] = [(size, *usual(rounds)) for size, rounds in sent.items()]
        typical = {what: [usual(rounds, SLOW) for rounds in of_each] for what, of_each in timed.items()}
        found["gemm"] = [(*shape, samples) for shape, samples in zip(SHAPES, typical["gemm"], strict=True)]
        found["gather"] = [(width, block.n_src, block.edges, samples) for (block, width), samples in
                           zip(itertools.product(blocks, WIDTHS), typical["gather"], strict=True)]  # fmt: skip
        found["touched"] = [(rows * width * 4, samples) for (rows, width), samples in zip(TENSORS, typical["touched"], strict=True)]
        found |= {"hashed": typical["hashed"][0], "weighed": (SAMPLED[1], typical["weighed"][0]), "steps": typical["steps"]}
        if self.apart != self.everyone:
            tell(f"training steps, {len(self.everyone)} ranks")
            found["crowding"] = self.crowding(rehearsals, [median(steps) for steps in typical["steps"]])
            found["refill"] = self.refill(Rehearsal(BRIEF, self.device, self.me.backend))
        tell("the sampler")
        found["draw"], found["lay"] = self.sampler()
        if self.device.type == "cuda" and self.groups["intra_node"]:
            tell("computation beside transfers")
            found["overlap"] = (BESIDE, self.overlap(BESIDE))
        return found

    def computation(self, blocks: Sequence[Block], rehearsals: Sequence[Rehearsal], tell: Callable[[str], None]
                    ) -> dict[str, list[list[float]]]:  # fmt: skip
        """A round of what computes: of each shape, width, .. samples of several ranks."""
        tell("matrix products")
        found = {"gemm": [self.gemm(*shape) for shape in SHAPES]}
        tell("aggregation")
        found["gather"] = [self.gather(block, width) for block in blocks for width in WIDTHS]
        sampled = GRAPHS.index(SAMPLED)
        found["weighed"] = [self.weighed(blocks[sampled], sums=found["gather"][sampled * len(WIDTHS)])]
        tell("element-wise work")
        found |= {"touched": [self.touched(*shape) for shape in TENSORS], "hashed": [self.hashed()]}
        tell("training steps")
        return found | {"steps": [[self.step(rehearsal)] for rehearsal in rehearsals]}

    def _block(self, vertices: int, edges: int) -> Block:
        """A community graph as the executor lays it out: rows in locality order."""
        graph = _community(vertices, edges)
        layout = Layout(graph, np.zeros(vertices, np.int32), servers=(0,), layers=1, first_varying=1)
        indptr, indices = layout.block(0, 1)
        return Block(indptr, indices, vertices).mean().to(self.device)

    def _device_name(self) -> str:
        if self.device.type == "cuda":
            return torch.cuda.get_device_name(self.device)
        with suppress(OSError):
            for line in Path("/proc/cpuinfo").read_text().splitlines():
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
        return platform.processor() or platform.machine()

    # -- computation -----------------------------------------------------------------------------------------------

    def _clock(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def _disturb(self) -> None:
        """What an epoch does between two uses of the same rows: other data pass through the caches, Gloo's threads fall asleep."""
        self.other.add_(1.0)

    def _time(self, work: Callable[[], Any], divide: int = 1) -> list[float]:
        """Median duration of `work` / divide [s], of a round, on every rank that has a core, all busy with it."""
        mine, takes_part = float("nan"), self.rank in self.apart
        if takes_part:
            work()
        dist.barrier()
        if takes_part:
            samples, end = [], self._clock() + self.seconds / self.rounds
            while not samples or self._clock() < end:
                self._disturb()
                begin = self._clock()
                work()
                samples.append((self._clock() - begin) / divide)
            mine = median(samples)
        everyone = self._gather(mine)
        return [everyone[rank] for rank in self.apart]

    def _gather(self, mine: Any) -> list[Any]:
        of_all: list[Any] = [None] * len(self.places)
        dist.all_gather_object(of_all, mine)
        return of_all

    def gemm(self, rows: int, h_in: int, h_out: int) -> list[float]:
        """Forward and both gradients of a linear layer: 3 products."""
        x, weight = (torch.randn(shape, device=self.device, requires_grad=True) for shape in ((rows, h_in), (h_out, h_in)))
        grad = torch.randn(rows, h_out, device=self.device)
        return self._time(lambda: torch.autograd.grad(linear(x, weight), (x, weight), grad))

    def gather(self, block: Block, width: int) -> list[float]:
        """Aggregation over a graph, forward and backward."""
        x = torch.randn(block.n_src, width, device=self.device, requires_grad=True)
        grad = torch.randn(block.n_dst, width, device=self.device)
        return self._time(lambda: torch.autograd.grad(aggregate(block, x), x, grad))

    def touched(self, rows: int, width: int) -> list[float]:
        """Seconds per byte read or written: relu, add and relu's gradient over several tensors, as in an epoch."""
        tensors = [torch.randn(rows, width, device=self.device) for _ in range(6)]

        def work() -> None:
            for a, b in zip(tensors[::2], tensors[1::2], strict=True):
                torch.ops.aten.threshold_backward(torch.relu(a), a + b, 0)

        return self._time(work, divide=3 * (2 + 3 + 3) * tensors[0].nbytes)

    def hashed(self) -> list[float]:
        """Seconds per number of dropout."""
        x, vertices = torch.randn(*TENSORS[0], device=self.device), torch.arange(TENSORS[0][0], device=self.device)
        return self._time(lambda: dropout(x, 0, 0, 0, vertices, 0.5), divide=x.numel())

    def weighed(self, block: Block, sums: Sequence[float]) -> list[float]:
        """Seconds that attention takes more than its three sums of rows (one forward): one head of the least width, both ways. `sums`:
        what two of them take."""
        rows, width = block.n_src, WIDTHS[0]
        z, of_source, of_reader = (torch.randn(shape, device=self.device, requires_grad=True) for shape in ((rows, width), rows, rows))
        grad = torch.randn(rows, width, device=self.device)
        both = self._time(lambda: torch.autograd.grad(attend(block, z, of_source, of_reader), (z, of_source, of_reader), grad))
        return [max(took - 1.5 * two, took / 2) for took, two in zip(both, sums, strict=True)]

    def step(self, rehearsal: Rehearsal) -> float:
        """Seconds that steps of a training take, as the executor plays them: the slowest rank's, which others wait for."""
        dist.barrier()
        return max(self._gather(rehearsal.play(self.seconds) if self.rank in self.apart else 0.0))

    def crowding(self, rehearsals: Sequence[Rehearsal], took: Sequence[float]) -> list[float]:
        """How many times as long processors work on a step of each training, which took so long, when all ranks take turns on them as when
        each has its own."""
        found = []
        for rehearsal, step in zip(rehearsals, took, strict=True):
            steps = max(3, int(self.seconds / self.rounds / step))
            rounds = [[self._worked(rehearsal, steps, some) for some in (self.apart, self.everyone)] for _ in range(self.rounds)]
            own, shared = usual(rounds)
            found.append(shared / own)
        return found

    def refill(self, brief: Rehearsal) -> list[float]:
        """Seconds that processors work longer on a brief step, of each round, where all ranks have waited for each other before it than
        where each has a processor and waits for nobody."""
        met, steps = self._exchange(SIZES[0], self.everyone), BRIEF_STEPS // self.rounds
        return [self._worked(brief, steps, self.everyone, met) - self._worked(brief, steps, self.apart) for _ in range(self.rounds)]

    def _worked(self, rehearsal: Rehearsal, steps: int, among: Group, before: Callable[[], Any] = lambda: None) -> float:
        """Seconds that a processor works on a step of a rank, all of `among` at once."""
        dist.barrier()
        everyone = self._gather(rehearsal.worked(steps, before) if self.rank in among else 0.0)
        return median(everyone[rank] for rank in among)

    def sampler(self) -> tuple[list[float], list[float]]:
        """Seconds per edge that drawing and laying out take, by the executor's own clock: GraphSAGE's batches in data parallel."""
        graph = _community(*SAMPLED)
        workload = Workload(mode="mini", layers=len(FANOUTS), fanout=FANOUTS, batch=SEEDS * len(self.places))
        sampler = Sampler(Batches(graph, workload, self.everyone, None, first_varying=1), self.rank, ["mean"] * len(FANOUTS))
        seconds: dict[str, list[float]] = {"draw": [], "lay": []}
        if self.rank in self.apart:
            sampler[0]
        dist.barrier()
        end = self._clock() + 2 * self.seconds
        for step in itertools.count(1) if self.rank in self.apart else ():
            self._disturb()
            made = sampler[step]
            edges = sum(part.block.edges for part in made.share.parts)
            for span in made.spans:
                seconds[span.op].append(span.seconds / edges)
            if step >= 3 and self._clock() > end:
                break
        draw, lay = (self._gather(median(seconds[op]) if seconds[op] else None) for op in ("draw", "lay"))
        return [each for each in draw if each is not None], [each for each in lay if each is not None]

    # -- messages --------------------------------------------------------------------------------------------------

    def messages(self, op: str, groups: Sequence[Group], sent: dict[int, list[Sent]]) -> None:
        """A round of the operation at growing sizes, in all groups at once, noted in `sent` by size."""
        mine = next((group for group in groups if self.rank in group), None)
        for size in (*sent,) or SIZES:  # those of the first round
            if op == "exchange" and size * (len(groups[0]) - 1) > SIZES[-1]:
                break
            first = size not in sent
            work: Callable[[], Any] = getattr(self, f"_{op}")(size, mine) if mine else lambda: None
            rounds = sent.setdefault(size, [])
            if first:
                work()
            rounds.append(self._time_messages(work, groups, 1.0 if op == "all_reduce" else 0.5))
            if len(sent) >= FEWEST and first and rounds[0][0] > LONGEST * self.seconds:
                break

    def _time_messages(self, work: Callable[[], Any], groups: Sequence[Group], share: float) -> Sent:
        """What an operation in which ranks wait for each other adds to a loop of computation [s], times `share`: so that it
        has in it what ranks wait for those that come later than usual, as in every layer of a training. And what a group's processors
        worked on it in all [s]."""
        dist.barrier()
        begin = self._clock()
        self._disturb()
        work()
        slowest = max(self._gather(self._clock() - begin))
        rounds = min(60, max(5, int(self.seconds / max(slowest, 1e-5)))) // self.rounds + 1  # equally many on all ranks
        alone = median(self._rounds(self._disturb, min(rounds, 20)))
        dist.barrier()
        busy = 0.0

        def both() -> None:
            nonlocal busy
            self._disturb()
            worked = time.process_time()
            work()
            busy += (time.process_time() - worked) * share

        samples = [max(took - alone, 1e-7) * share for took in self._rounds(both, rounds)]
        of_all = self._gather((samples, busy / rounds))
        took = [np.mean([of_all[rank][0] for rank in group], axis=0) for group in groups]
        return float(np.median(took)), sum(of_all[rank][1] for rank in groups[0])

    def _rounds(self, work: Callable[[], None], rounds: int) -> list[float]:
        took = []
        for _ in range(rounds):
            begin = self._clock()
            work()
            took.append(self._clock() - begin)
        return took

    def _exchange(self, size: int, group: Group) -> Callable[[], None]:
        """Every rank sends `size` bytes of scattered rows to every other, as a halo and its gradient's way home do."""
        rows = max(1, size // (4 * ROW))
        positions = np.random.default_rng(self.rank).permutation(4 * rows)[:rows]
        take = np.array([rows * (peer in group and peer != self.rank) for peer in self.everyone])
        plan = Exchange(self.me, [positions[: take[peer]] for peer in self.everyone], take)
        x = torch.randn(4 * rows, ROW, device=self.device)
        return lambda: plan.add_home(x, plan.backward(plan.forward(plan.pack(x))))

    def _send(self, size: int, group: Group) -> Callable[[], None]:
        """One message between two: half a ping-pong."""
        buffer = torch.ones(size // 4, device=self.device)
        first, second = group
        turns, peer = ((dist.send, dist.recv), second) if self.rank == first else ((dist.recv, dist.send), first)

        def ping_pong() -> None:
            for turn in turns:
                turn(buffer, peer, group=self.me.exchange_group)

        return ping_pong

    def _all_reduce(self, size: int, group: Group) -> Callable[[], Any]:
        buffer = torch.zeros(size // 4, device=self.device)
        return lambda: dist.all_reduce(buffer, group=self.me.group(group))

    def overlap(self, size: int) -> list[float]:
        """Seconds that computation loses while `size` bytes in all go to every other rank of the server and back on the comm lane."""
        group = next(group for group in self.groups["intra_node"] if self.rank in group)
        swap = self._exchange(size // (len(group) - 1), group)
        x, weight = torch.randn(10_000, 256, device=self.device), torch.randn(256, 256, device=self.device)
        alone, beside = [], []
        for _ in range(12):
            for samples in (alone, beside):
                dist.barrier()
                begin = self._clock()
                moving = self.me.submit("comm", swap) if samples is beside else None
                for _ in range(10):  # longer than the transfer
                    linear(x, weight)
                samples.append(self._clock() - begin)
                if moving:
                    moving.result()
        return self._gather(median(beside) - median(alone))
