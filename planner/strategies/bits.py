"""Rows between layers, and their gradients, that cross in 8, 4 or 2 bits per number (AdaQP).

    whole     compute  |forward 1|        |forward 2|
              comm               |halo f 2|

    bits 2    compute  |forward 1|pack f 2|        |unpack f 2|forward 2|
              comm                        |halo f 2|

A row of d numbers takes ceil(d bits / 8) + 4 bytes. Every number is rounded at random to one of
2^bits levels between its row's lowest and highest, so that its mean over draws is the number itself
(executor/layers/kernels/few_bits.py). Both passes do it. Evaluation, all-reduces, and the rows at
the ends of pairs (link prediction) are left as they are. Draws are a hash of (seed, step, layer,
way, vertex, column): any number of ranks draws alike for a row, and so does a resumed run.

A layer's sum over neighbours is on average that of its inputs; what ReLU and the loss make of it is
not unbiased. Each number is off by up to one of 2^bits - 1 spacings, which is the price of 2 bits.

With bits='adaptive' rows have 8, 4 or 2 bits, 4 on average: 2 ceil(d / 4) + 4 a row.
Both ends choose them alike, from the ranges of rows that crossed before (few_bits.py).

Source: Wan et al., AdaQP (MLSys 2023), Sec. 3.1 and 3.2. There a program weighs variance against
seconds, so bytes follow from ranges, and rows whose neighbours are all local are computed
meanwhile.
"""

from __future__ import annotations

from dataclasses import replace

from gnnplan.planner.gnn.few_bits import ADAPTIVE, BITS
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies.base import Strategy
from gnnplan.planner.strategies.program.account import Prediction
from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.planner.vocabulary.units import show_bytes, show_time


def check_bits(name: str, bits: int | str | None, problem: Problem, adapts: bool = False) -> None:
    """Raises SpecError if no row crosses in so many bits per number.

    adapts: whether each row may have bits of its own.
    """
    if bits is not None and problem.workload.dtype == "bfloat16":
        raise SpecError(
            f"{name}: few bits are made of float32 rows (bits: {bits!r}, dtype: bfloat16); leave"
            " bits out, or use --dtype float32"
        )
    if bits == ADAPTIVE and not adapts:
        raise SpecError(
            f"{name}: only graph_parallel and pipegcn give each row bits of its own (bits:"
            f" {bits!r}); use bits=4, or graph_parallel(bits={bits!r})"
        )
    if bits is not None and bits not in (*BITS, ADAPTIVE):
        raise SpecError(
            f"{name}: bits per number of a row that crosses are 8, 4 or 2, 'adaptive', or None for"
            f" rows as they are (bits: {bits}); use bits=2"
        )


def sentences(problem: Problem, packed: Strategy | None) -> list[str]:
    """What packing saves and takes, beside the same strategy with whole rows.

    Nothing where rows are whole already.
    """
    if packed is None or packed.knobs()["bits"] is None:
        return []
    whole = replace(packed, bits=None)  # type: ignore[call-arg]  # those that have the knob
    few, all_of = packed.predict(problem), whole.predict(problem)
    packing_s = sum(
        float(seconds)
        for op, seconds in few.by_op.items()
        if op.split(":")[0] in ("pack", "unpack")
    )
    return [
        f"{packed} sends {show_bytes(_rows(few))} of rows and their gradients per epoch, {whole}"
        f" {show_bytes(_rows(all_of))}; to pack and unpack them takes {show_time(packing_s)} of"
        f" {show_time(float(few.epoch_s))}, and {whole} takes {show_time(float(all_of.epoch_s))}"
    ]


def _rows(prediction: Prediction) -> int:
    """Bytes of rows, and of their gradients, per epoch."""
    return sum(prediction.bytes.get(op, 0) for op in ("halo", "pipeline"))
