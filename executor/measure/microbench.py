"""What one rank measures, in step with all others; here kernels, training steps and the sampler.

As many ranks are busy as there are cores (on GPUs all), so that none shares its core. What sharing
costs is measured apart, by `timeslice_slowdown` and `cold_cache_penalty`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import cache
from statistics import median
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from gnnplan.executor.layers.blocks import features
from gnnplan.executor.layers.kernels import Block, aggregate, attend, dropout, linear
from gnnplan.executor.measure.messages import SIZES, Group, Messages, Sent, usual
from gnnplan.executor.measure.rehearsal import BRIEF, PIECES, Rehearsal
from gnnplan.executor.minibatch.sampler import Sampler
from gnnplan.executor.ranks.machine import device_name
from gnnplan.planner.gnn.workload import Workload
from gnnplan.planner.graph.graph import Graph
from gnnplan.planner.graph.load import load
from gnnplan.planner.ownership.layout import Layout
from gnnplan.planner.ownership.minibatch import Batches

WARM_BYTES = 2**29  # that a rank writes before it times anything: the allocator keeps them
SYNTHETIC = "synthetic:community?vertices={}&edges={}&features={}&classes=16&seed=0"
# Vertices and edges. Rows fit a core's cache, the chip's, or none; graphs with few edges per row
# show what a row costs besides its edges.
GRAPHS = (
    (2_500, 125_000),
    (2_500, 20_000),
    (20_000, 1_000_000),
    (20_000, 160_000),
    (80_000, 800_000),
)
WIDTHS = (16, 64, 256)
# rows, H_in, H_out of matrix products
SHAPES = (
    (10_000, 256, 256),
    (10_000, 128, 256),
    (10_000, 256, 16),
    (5_000, 64, 64),
    (2_500, 512, 512),
)
# Kinds of dense products, and how many of a kind a sample is the time of.
PRODUCTS = {
    f"{kind}{dtype}": products
    for kind, products in (("gemm", 2), ("weight_gradient", 1))
    for dtype in ("", "_bfloat16", "_tf32")
}
TF32 = (8, 0)  # compute capability of the first GPUs that have it
# rows, width; for smaller tensors the framework's own time would dominate
TENSORS = ((5_000, 64), (5_000, 256), (40_000, 256))
# On GPUs, whose L2 would hold the others, and whose processors they would not fill.
LARGE = (400_000, 256)
LARGE_GRAPH, LARGE_SHAPE = (200_000, 2_000_000), (200_000, 256, 256)
SAMPLED = (20_000, 1_000_000)  # one of GRAPHS
LOADED = (80_000, 1_000)  # rows of features that a GPU loads from the server's memory at once
LOADED_WIDTH = 128
# Of a rank's share of a batch, from the seeds outwards. Small batches show what a layer costs
# besides its edges.
SEEDS, FANOUTS = (1024, 64), (5, 10, 15)
BRIEF_STEPS = 300  # in all rounds, of each kind

T = TypeVar("T")
# a shape of a kernel, and seconds of it on several ranks
Sample = tuple[tuple[int, ...], list[float]]


@cache
def _community(vertices: int, edges: int, features: int = 8) -> Graph:
    """Made once, for what aggregates and what samples."""
    graph = load(SYNTHETIC.format(vertices, edges, features))
    assert isinstance(graph, Graph)
    return graph


class Bench(Messages):
    """All benchmarks of one rank."""

    def all(self, notify: Callable[[str], None]) -> dict[str, Any]:
        """Every number, as samples of all ranks (fitting.py reads them)."""
        if self.device.type == "cpu" and self.rank in self.apart:
            # Memory that has just been handed out is several times slower, most of all on virtual
            # machines. A training has written its own after some epochs.
            torch.zeros(WARM_BYTES // 4).fill_(1.0)
        notify("preparing graphs")
        blocks = [self._block(*size) for size in self._with(GRAPHS, LARGE_GRAPH)]
        samplers = [self.open_sampler(seeds) for seeds in SEEDS]
        rehearsals = [Rehearsal(piece, self.device, self.me.backend) for piece in PIECES]
        messages: dict[tuple[str, str], dict[int, list[Sent]]] = {
            (op, where): {}
            for where, groups in self.groups.items()
            for op in ("exchange", "send", "all_reduce")
            if groups
        }
        for group in itertools.chain(*self.groups.values()):
            self.me.groups.of(group)  # all ranks ask for all groups in the same order
            if self.me.backend == "nccl":  # those of `Groups.pair`
                self.me.groups.of(group[:2])
        found: dict[str, Any] = {"name": device_name(self.device), "active": len(self.apart)}
        rounds: list[dict[str, list[Sample]]] = []
        for _ in range(self.rounds):
            rounds.append(self.computation(blocks, rehearsals, samplers, notify))
            for (op, where), sent in messages.items():
                self._round_of_messages(op, where, sent, notify)
        for (op, where), sent in messages.items():
            found[f"{op}.{where}"] = [(size, *usual(of_size)) for size, of_size in sent.items()]
        for kind, samples in rounds[0].items():
            found[kind] = [
                (*shape, usual([one[kind][place][1] for one in rounds]))
                for place, (shape, _) in enumerate(samples)
            ]
        edges = [median(of_ranks) for (of_ranks,) in found.pop("edges")]
        for what in ("draw", "lay"):
            found[what] = [(n, seconds) for n, (seconds,) in zip(edges, found[what], strict=True)]
        if self.apart != self.everyone:
            notify(f"training steps, {len(self.everyone)} ranks")
            step_s = [median(steps) for (steps,) in found["steps"]]
            found["timeslice_slowdown"] = self.timeslice_slowdown(rehearsals, step_s)
            brief = Rehearsal(BRIEF, self.device, self.me.backend)
            found["cold_cache_penalty"] = self.cold_cache_penalty(brief)
        return found

    def _round_of_messages(
        self, op: str, where: str, sent: dict[int, list[Sent]], notify: Callable[[str], None]
    ) -> None:
        groups = self.groups[where]
        if (op, where) == ("exchange", "inter_node"):
            groups = [self.everyone]
        place = "inside servers" if where == "intra_node" else "between servers"
        notify(f"{op}s {place}, {len(groups[0])} ranks")
        self.messages(op, [group[:2] for group in groups] if op == "send" else groups, sent)

    def _with(self, shapes: tuple[T, ...], large: T) -> tuple[T, ...]:
        """What is timed: on a GPU also a large one."""
        return (*shapes, large) if self.device.type == "cuda" else shapes

    def _block(self, vertices: int, edges: int) -> Block:
        """A community graph as the executor lays it out: rows in locality order."""
        graph = _community(vertices, edges)
        indptr, indices = Layout.of_one(graph).block(0, 1)
        return Block(indptr, indices, vertices).mean().to(self.device)

    def computation(
        self,
        blocks: Sequence[Block],
        rehearsals: Sequence[Rehearsal],
        samplers: Sequence[Sampler],
        notify: Callable[[str], None],
    ) -> dict[str, list[Sample]]:
        """A round of all kernels and steps: by kind, for each shape, samples of several ranks."""

        def products(suffix: str, dtype: torch.dtype = torch.float32) -> dict[str, list[Sample]]:
            return {
                f"{product.__name__}{suffix}": [
                    (shape, product(*shape, dtype)) for shape in self._with(SHAPES, LARGE_SHAPE)
                ]
                for product in (self.gemm, self.weight_gradient)
            }

        def gathers(dtype: torch.dtype = torch.float32) -> list[Sample]:
            return [
                ((width, block.n_src, block.edges), self.gather(block, width, dtype))
                for block in blocks
                for width in WIDTHS
            ]

        notify("matrix products")
        found = products("")
        notify("aggregation")
        found["gather"] = gathers()
        if self.dtype == torch.bfloat16:
            notify("products and aggregation in bfloat16")
            found |= products("_bfloat16", torch.bfloat16)
            found["gather_bfloat16"] = gathers(torch.bfloat16)
        if self.device.type == "cuda" and torch.cuda.get_device_capability() >= TF32:
            notify("products in TF32")
            torch.backends.cuda.matmul.allow_tf32 = True
            found |= products("_tf32")
            torch.backends.cuda.matmul.allow_tf32 = False
        sampled = GRAPHS.index(SAMPLED)
        _, sums = found["gather"][sampled * len(WIDTHS)]
        found["attention"] = [((SAMPLED[1],), self.attention(blocks[sampled], sums))]
        notify("element-wise work")
        found["elementwise"] = [
            ((rows * width * 4,), self.elementwise(rows, width))
            for rows, width in self._with(TENSORS, LARGE)
        ]
        found["dropout_hash"] = [((), self.dropout_hash())]
        if self.device.type == "cuda":
            notify("loads from the server's memory")
            found["load"] = [((rows * LOADED_WIDTH * 4,), self.load(rows)) for rows in LOADED]
        notify("the sampler")
        for sampler in samplers:
            for what, samples in self.sampling(sampler).items():
                found.setdefault(what, []).append(((), samples))
        notify("training steps")
        return found | {"steps": [((), [self.step(rehearsal)]) for rehearsal in rehearsals]}

    def gemm(
        self, rows: int, h_in: int, h_out: int, dtype: torch.dtype = torch.float32
    ) -> list[float]:
        """Seconds of a linear layer's forward and of its inputs' gradient: 2 products."""
        x = torch.randn(rows, h_in, device=self.device, dtype=dtype, requires_grad=True)
        weight = torch.randn(h_out, h_in, device=self.device)
        grad = torch.randn(rows, h_out, device=self.device, dtype=dtype)
        return self._time(lambda: torch.autograd.grad(linear(x, weight), x, grad))

    def weight_gradient(
        self, rows: int, h_in: int, h_out: int, dtype: torch.dtype = torch.float32
    ) -> list[float]:
        """Seconds of the gradient of a linear layer's weight: 1 product."""
        x = torch.randn(rows, h_in, device=self.device, dtype=dtype)
        weight = torch.randn(h_out, h_in, device=self.device, requires_grad=True)
        out, grad = linear(x, weight), torch.randn(rows, h_out, device=self.device, dtype=dtype)
        return self._time(lambda: torch.autograd.grad(out, weight, grad, retain_graph=True))

    def gather(self, block: Block, width: int, dtype: torch.dtype = torch.float32) -> list[float]:
        """Seconds of aggregation over a graph, forward and backward."""
        block = block.to(dtype=dtype)
        x = torch.randn(block.n_src, width, device=self.device, dtype=dtype, requires_grad=True)
        grad = torch.randn(block.n_dst, width, device=self.device, dtype=dtype)
        return self._time(lambda: torch.autograd.grad(aggregate(block, x), x, grad))

    def elementwise(self, rows: int, width: int) -> list[float]:
        """Seconds per byte read or written by element-wise work.

        As in an epoch: ReLU, add and ReLU's gradient, over several tensors.
        """
        tensors = [torch.randn(rows, width, device=self.device) for _ in range(6)]

        def work() -> None:
            for a, b in zip(tensors[::2], tensors[1::2], strict=True):
                torch.ops.aten.threshold_backward(torch.relu(a), a + b, 0)

        return self._time(work, divide=3 * (2 + 3 + 3) * tensors[0].nbytes)

    def load(self, rows: int) -> list[float]:
        """Seconds of picking so many rows of features from the server's memory."""
        vertices = max(LOADED)
        stored = _community(vertices, vertices, LOADED_WIDTH)
        picked = np.random.default_rng(0).permutation(vertices)[:rows]
        return self._time(lambda: features(stored, picked, Workload(), self.device))

    def dropout_hash(self) -> list[float]:
        """Seconds per number of dropout, whose mask is a hash."""
        x = torch.randn(*TENSORS[0], device=self.device)
        vertices = torch.arange(TENSORS[0][0], device=self.device)
        return self._time(lambda: dropout(x, 0, 0, 0, vertices, 0.5), divide=x.numel())

    def attention(self, block: Block, sums: Sequence[float]) -> list[float]:
        """Seconds that attention takes beyond its three sums of rows, one of them forward.

        It has one head of the least width, forward and backward. sums: what two of them take.
        """
        rows, width = block.n_src, WIDTHS[0]
        z, of_source, of_reader = (
            torch.randn(shape, device=self.device, requires_grad=True)
            for shape in ((rows, width), rows, rows)
        )
        grad = torch.randn(rows, width, device=self.device)
        both_ways = self._time(
            lambda: torch.autograd.grad(
                attend(block, z, of_source, of_reader), (z, of_source, of_reader), grad
            )
        )
        return [
            max(attention - 1.5 * two, attention / 2)
            for attention, two in zip(both_ways, sums, strict=True)
        ]

    def step(self, rehearsal: Rehearsal) -> float:
        """Seconds of a training step on the slowest rank, for which the others wait."""
        dist.barrier()
        played = rehearsal.play(self.seconds) if self.rank in self.apart else 0.0
        return float(max(self._gather(played)))

    def timeslice_slowdown(
        self, rehearsals: Sequence[Rehearsal], step_s: Sequence[float]
    ) -> list[float]:
        """How many times as long cores are busy with a step when all ranks take turns on them.

        The reference are steps of ranks that have a core each, which take `step_s` [s].
        """
        slowdowns = []
        for rehearsal, seconds in zip(rehearsals, step_s, strict=True):
            steps = max(3, int(self.seconds / self.rounds / seconds))
            rounds = [
                [self._core_s(rehearsal, steps, ranks) for ranks in (self.apart, self.everyone)]
                for _ in range(self.rounds)
            ]
            own, shared = usual(rounds)
            slowdowns.append(shared / own)
        return slowdowns

    def cold_cache_penalty(self, brief: Rehearsal) -> list[float]:
        """Seconds that a core is busy longer with a brief step if its rank has waited before it.

        Of each round: all ranks, which wait for each other before every step, less ranks that have
        a core each and wait for nobody.
        """
        wait, steps = self._exchange(SIZES[0], self.everyone), BRIEF_STEPS // self.rounds
        return [
            self._core_s(brief, steps, self.everyone, wait) - self._core_s(brief, steps, self.apart)
            for _ in range(self.rounds)
        ]

    def _core_s(
        self,
        rehearsal: Rehearsal,
        steps: int,
        among: Group,
        before: Callable[[], Any] = lambda: None,
    ) -> float:
        """Seconds that a core is busy with a rank's step, with all of `among` at work at once."""
        dist.barrier()
        busy = self._gather(rehearsal.core_s(steps, before) if self.rank in among else 0.0)
        return float(median(busy[rank] for rank in among))

    def open_sampler(self, seeds: int) -> Sampler:
        """A sampler whose batches are GraphSAGE's in data parallel."""
        graph = _community(*SAMPLED)
        workload = Workload(
            mode="mini", layers=len(FANOUTS), fanout=FANOUTS, batch=seeds * len(self.places)
        )
        batches = Batches(graph, workload, self.everyone, None, first_varying=1)
        return Sampler(batches, self.rank, ["mean"] * len(FANOUTS))

    def sampling(self, sampler: Sampler) -> dict[str, list[float]]:
        """Seconds that drawing and laying out a batch take, by the executor's own spans.

        `edges` are the batch's, as a number. Of every rank that has a core, medians.
        """
        takes_part = self.rank in self.apart
        seen: dict[str, list[float]] = {"draw": [], "lay": [], "edges": []}
        if takes_part:
            sampler[0]
        dist.barrier()
        end = self._clock() + self.seconds
        for step in itertools.count(1) if takes_part else ():
            self._disturb()
            sampled = sampler[step]
            seen["edges"].append(sum(part.block.edges for part in sampled.share.parts))
            for what in ("draw", "lay"):
                seen[what].append(sum(s.seconds for s in sampled.spans if s.op == what))
            if step >= 3 and self._clock() > end:
                break
        return {
            what: [s for s in self._gather(median(each) if each else None) if s is not None]
            for what, each in seen.items()
        }
