"""Peak memory of each rank: what stays during a step, plus the peak of the step's operations.

Each operation of a program knows its bytes (`Op.holds`), and the order of operations tells when
they are allocated and freed. A strategy says what stays: features, edges, caches (`Resident`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

import numpy as np

from gnnplan.planner.gnn.footprint import COMMUNICATOR, RUNTIME, in_turn
from gnnplan.planner.gnn.trace import shapes
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies.program.program import Op, Program, by_group
from gnnplan.planner.vocabulary.numbers import Number

Memory = dict[str, np.ndarray]  # use -> bytes per rank [ranks]
# uses that set-up and evaluation have, or may take, in place of a step's
OF_A_STEP = ("features", "activations", "halo", "copies", "buffers")


@dataclass(frozen=True)
class Resident:
    """What a rank has besides the tensors of a step's operations.

    data: bytes that stay, by use; they add to those of `peak` of the same use.
    code: bytes of machine code (`machine_code`).
    weights: number of weights of each rank; None: all of the model's weights.
    groups: groups of ranks with a communicator of their own.
    elsewhere: peak bytes of set-up or evaluation, without weights, edges and caches.
    """

    data: Memory
    code: Number
    weights: Number | None = None
    groups: Sequence[Sequence[int]] = ()
    elsewhere: Number = 0.0


def peak(problem: Problem, program: Program, resident: Resident) -> Memory:
    """Return each rank's peak bytes, by use.

    runtime: libraries. communicators: buffers of NCCL.
    """
    zero, model, kind = np.zeros(problem.ranks), problem.model, problem.cluster.device.kind
    weights = model.weights if resident.weights is None else resident.weights
    size = (zero + weights) * model.weight_itemsize
    use: Memory = {"parameters": size, "optimizer": problem.workload.state_per_weight * size}
    use |= {name: use.get(name, zero) + nbytes for name, nbytes in resident.data.items()}
    use["activations"] = fullest(problem, program)
    use["buffers"] = use.get("buffers", zero) + resident.code
    training = sum(use.get(name, zero) for name in OF_A_STEP)
    use["buffers"] = use["buffers"] + np.maximum(resident.elsewhere - training, 0.0)
    use["runtime"] = zero + RUNTIME[kind]
    if kind == "cuda" and problem.ranks > 1:
        # two communicators of all ranks, one for all-reduces and one for exchanges
        use["communicators"] = zero + 2 * COMMUNICATOR
        for group in resident.groups:
            use["communicators"][list(group)] += COMMUNICATOR * (1 < len(group) < problem.ranks)
    return use


def on_fullest_rank(memory: Memory) -> dict[str, float]:
    """Return the bytes, by use, of the rank or server with the most bytes."""
    rank = int(np.argmax(sum(memory.values(), np.zeros(1))))
    return {use: float(each[rank]) for use, each in memory.items()}


def machine_code(
    problem: Problem, pieces: float = 1, layers: Iterable[int] = (), rows: float | None = None
) -> float:
    """Return the bytes of machine code that oneDNN generates, where it does matrix products.

    pieces: number of distinct row counts of a rank's products; oneDNN generates code for each.
    layers: those of the products (0: the encoder); empty: all. rows: rows of the largest piece;
    None: 1.5 times a rank's share of the vertices, divided by `pieces`."""
    model, code = problem.model, problem.cluster.device.code_of(problem.model.itemsize)
    if not code:
        return 0.0
    if rows is None:
        rows = 1.5 * problem.stats.vertices / problem.ranks / pieces
    works = []
    for layer in layers or range(len(model.layers) + 1):
        works += (
            [model.layer_record(layer)]
            if layer
            else [model.encoder_record]
            if model.encoder
            else []
        )
        works += [model.decoder_record] if layer == len(model.layers) and model.decoder else []
    products = [product for each in works for product in each.products]
    return code * shapes(products, model.itemsize, pieces, rows)


def fullest(problem: Problem, program: Program) -> np.ndarray:
    """Return the peak bytes of a program's operations on each rank [ranks]."""
    most = np.zeros(problem.ranks)
    for step in _steps(program):
        for ranks, ops in by_group([op for op in step if op.holds]).items():
            at = list(ranks) or slice(None)
            held = in_turn(op.holds() for op in ops if op.holds)
            most[at] = np.maximum(most[at], held.most)
    return most


def _steps(program: Program) -> Iterator[Iterable[Op]]:
    """Yield sequences of operations, before each of which no operation holds memory.

    A sequence is a step, and equal steps are yielded once. An operation stands for all of its
    chunks. Steps that overlap form one sequence, long enough to reach each set of steps that are
    in flight together; if all steps are equal, a few of them and the end of an epoch suffice.
    """
    known = list(program.known())
    distinct = dict.fromkeys(known)
    if program.order is None:
        yield from map(program.ops, distinct)
        return
    if len(distinct) == 1:
        known = known[: 2 * program.in_flight + 1]
    last = len(known) + program.in_flight - 1
    queue = program.order(lambda t: program.ops(known[t % len(known)]), len(known), last + 2)
    yield (each.op for each in takewhile(lambda each: each.step < last, queue))
