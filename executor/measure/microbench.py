"""What one rank measures, in step with all others: which benchmarks, in which order, how often."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from gnnplan.executor.measure.computation import (
    GRAPHS,
    LOADED,
    LOADED_WIDTH,
    PRODUCTS,
    SAMPLED,
    SEEDS,
    TENSORS,
    WIDTHS,
    Computation,
)
from gnnplan.executor.measure.messages import Sent
from gnnplan.executor.measure.rehearsal import BRIEF, PIECES, Rehearsal
from gnnplan.executor.measure.timing import usual
from gnnplan.executor.ranks.machine import device_name

__all__ = ["GRAPHS", "TENSORS", "WIDTHS", "Bench"]

OVERLAPPED_BYTES = 2**23  # moved there and back, beside computation
WARM_BYTES = 2**29  # that a rank writes before it times anything: the allocator keeps them


class Bench(Computation):
    """All benchmarks of one rank."""

    def all(self, notify: Callable[[str], None]) -> dict[str, Any]:
        """Every number, as samples of all ranks (fitting.py reads them)."""
        if self.device.type == "cpu" and self.rank in self.apart:
            # Memory that has just been handed out is several times slower, most of all on virtual
            # machines. A training has written its own after some epochs.
            torch.zeros(WARM_BYTES // 4).fill_(1.0)
        notify("preparing graphs")
        blocks = [self._block(*size) for size in self.graphs]
        samplers = [self.open_sampler(seeds) for seeds in SEEDS]
        rehearsals = [Rehearsal(piece, self.device, self.me.backend) for piece in PIECES]
        messages: dict[tuple[str, str], dict[int, list[Sent]]] = {
            (op, where): {}
            for where, groups in self.groups.items()
            for op in ("exchange", "send", "all_reduce")
            if groups
        }
        for group in itertools.chain(*self.groups.values()):
            self.me.group(group)  # all ranks ask for all groups in the same order
            if self.me.backend == "nccl":  # those of `Rank.pair`
                self.me.group(group[:2])
        found: dict[str, Any] = {"name": device_name(self.device), "active": len(self.apart)}
        # by kind and shape, rounds of a sample per rank
        rounds_by_kind: dict[str, list[list[list[float]]]] = {}
        for _ in range(self.rounds):
            for kind, by_shape in self.computation(blocks, rehearsals, samplers, notify).items():
                rounds_by_shape = rounds_by_kind.setdefault(kind, [[] for _ in by_shape])
                for rounds, samples in zip(rounds_by_shape, by_shape, strict=True):
                    rounds.append(samples)
            for (op, where), sent in messages.items():
                self._round_of_messages(op, where, sent, notify)
        for (op, where), sent in messages.items():
            found[f"{op}.{where}"] = [(size, *usual(rounds)) for size, rounds in sent.items()]
        typical = {
            kind: [usual(rounds) for rounds in rounds_by_shape]
            for kind, rounds_by_shape in rounds_by_kind.items()
        }
        for product in (kind for kind in PRODUCTS if kind in typical):
            found[product] = [
                (*shape, samples)
                for shape, samples in zip(self.shapes, typical[product], strict=True)
            ]
        found["gather"] = [
            (width, block.n_src, block.edges, samples)
            for (block, width), samples in zip(
                itertools.product(blocks, WIDTHS), typical["gather"], strict=True
            )
        ]
        if "gather_bfloat16" in typical:
            found["gather_bfloat16"] = typical["gather_bfloat16"]
        found["elementwise"] = [
            (rows * width * 4, samples)
            for (rows, width), samples in zip(self.tensors, typical["elementwise"], strict=True)
        ]
        if "load" in typical:
            found["load"] = [
                (rows * LOADED_WIDTH * 4, samples)
                for rows, samples in zip(LOADED, typical["load"], strict=True)
            ]
        found["dropout_hash"] = typical["dropout_hash"][0]
        found["attention"] = (SAMPLED[1], typical["attention"][0])
        found["steps"] = typical["steps"]
        for what in ("draw", "lay"):
            edges = [median(of_ranks) for of_ranks in typical["edges"]]
            found[what] = list(zip(edges, typical[what], strict=True))
        if self.apart != self.everyone:
            notify(f"training steps, {len(self.everyone)} ranks")
            step_s = [median(steps) for steps in typical["steps"]]
            found["timeslice_slowdown"] = self.timeslice_slowdown(rehearsals, step_s)
            brief = Rehearsal(BRIEF, self.device, self.me.backend)
            found["cold_cache_penalty"] = self.cold_cache_penalty(brief)
        if self.device.type == "cuda" and self.groups["intra_node"]:
            notify("computation beside transfers")
            found["overlap"] = (OVERLAPPED_BYTES, self.overlap(OVERLAPPED_BYTES))
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
