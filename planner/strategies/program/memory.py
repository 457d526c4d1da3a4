"""Bytes that a rank holds: what stays, and what a step's operations add at its fullest moment.

Each operation of a program says what it holds (`Op.holds`), and the order of operations when. What
stays during a step (features, edges, caches) is no operation's: a family gives it to `on_ranks`,
which adds weights, libraries and machine code.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import takewhile

import numpy as np

from gnnplan.planner.gnn.footprint import COMMUNICATOR, RUNTIME
from gnnplan.planner.gnn.products import shapes
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies.program.program import Op, Program, in_turn
from gnnplan.planner.vocabulary.numbers import Number, largest

Memory = dict[str, np.ndarray]  # use -> bytes per rank [ranks]


def on_ranks(
    problem: Problem,
    program: Program,
    *,
    weights: Number | None = None,
    groups: Iterable[Sequence[int]] = (),
    code: Number | None = None,
    elsewhere: Number = 0.0,
    **stays: Number,
) -> Memory:
    """Bytes per rank by use, at the fullest moment.

    weights: of each rank, if not all of the model's. groups: of ranks that have a communicator of
    their own. code: of products (`machine_code`). elsewhere: the most that set-up or an
    evaluation holds beside weights, edges and caches. stays: other bytes, by use.
    """
    zero, model = np.zeros(problem.ranks), problem.model
    size = (zero + (model.weights if weights is None else weights)) * model.weight_itemsize
    use: Memory = {"parameters": size, "optimizer": problem.workload.beside_a_weight * size}
    use |= {name: zero + nbytes for name, nbytes in stays.items()}
    use["activations"] = use.get("activations", zero) + fullest(problem, program)
    code = machine_code(problem) if code is None else code
    use["buffers"] = use.get("buffers", zero) + code
    training = sum(use.get(name, zero) for name in ("features", "activations", "halo", "buffers"))
    use["buffers"] = use["buffers"] + np.maximum(elsewhere - training, 0.0)
    return use | before_training(problem, groups)


def of_fullest(memory: Memory) -> dict[str, float]:
    """Bytes by use of the rank, or server, that holds most."""
    most = int(np.argmax(sum(memory.values(), np.zeros(1))))
    return {use: float(each[most]) for use, each in memory.items()}


def before_training(problem: Problem, groups: Iterable[Sequence[int]] = ()) -> Memory:
    """Bytes of what is there before a rank trains: libraries, and on GPUs NCCL's communicators.

    Two of these are of all ranks, for sums and for exchanges. groups: of the other ones.
    """
    kind, ranks = problem.cluster.device.kind, problem.ranks
    use = {"runtime": np.full(ranks, RUNTIME[kind])}
    if kind == "cuda" and ranks > 1:
        use["communicators"] = np.full(ranks, 2 * COMMUNICATOR)
        for group in groups:
            use["communicators"][list(group)] += COMMUNICATOR * (1 < len(group) < ranks)
    return use


def machine_code(
    problem: Problem, pieces: float = 1, layers: Iterable[int] = (), rows: float | None = None
) -> float:
    """Bytes of the code that oneDNN makes for products, where it multiplies.

    Of a step, or of some of its layers (0: the encoder). pieces: of so many sizes do a rank's rows
    come. rows: of the largest piece; None: it is like one of a rank's equal shares."""
    model, code = problem.model, problem.cluster.device.code_of(problem.model.itemsize)
    if not code:
        return 0.0
    if rows is None:
        rows = 1.5 * problem.stats.vertices / problem.ranks / pieces
    told = []
    for layer in layers or range(len(model.layers) + 1):
        told += [model.played(layer)] if layer else [model.encodes] if model.encoder else []
        told += [model.decodes] if layer == len(model.layers) and model.decoder else []
    products = [product for each in told for product in each.products]
    return code * shapes(products, model.itemsize, pieces, rows)


def fullest(problem: Problem, program: Program) -> np.ndarray:
    """Bytes that operations hold at each rank's fullest moment [ranks]."""
    steps = ([op.holds() for op in step if op.holds] for step in _steps(program))
    return np.zeros(problem.ranks) + largest(in_turn(step).most for step in steps)


def _steps(program: Program) -> Iterator[Iterable[Op]]:
    """The operations of all known steps, in order, each of which begins with nothing.

    Steps that are alike hold alike, and every operation stands for all of its chunks. Steps that
    overlap are taken as one, which goes on until all that is under way together has been. If they
    are all alike a few are enough: then these, and those of an epoch's end, have been under way.
    """
    known = list(program.known())
    different = dict.fromkeys(known)
    if program.order is None:
        yield from map(program.ops, different)
        return
    if len(different) == 1:
        known = known[: 2 * program.in_flight + 1]
    last = len(known) + program.in_flight - 1
    queued = program.order(lambda t: program.ops(known[t % len(known)]), len(known), last + 2)
    yield (each.op for each in takewhile(lambda each: each.step < last, queued))
