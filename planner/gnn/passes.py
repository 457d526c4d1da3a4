"""How often a layer's element-wise operations read or write a number, in passes over its tensors.

Element-wise is all but products with a matrix and gathers over edges. The executor's layers
(executor/layers) do what stands here, by torch's own count (tests/executor/test_work_counts.py).
What is a kind's own is a row of numbers (`Kind`); the rest all kinds have in common.

    forward    prepare [S, H_in] | project [S, H_out] | gather | update [R, H_out]
    backward   from right to left; rows that are constant get no gradient

R rows are written, S rows are read. Other people's code does other work
(benchmarks/papers/their_passes.py)."""

from __future__ import annotations

from typing import NamedTuple

Both = tuple[float, float]  # of the forward and of the backward pass

# of inputs that are activated, by their norm
ACTIVATE: dict[str, Both] = {"none": (2, 3), "layer": (4, 6), "batch": (6, 15)}
MOMENTS: Both = (6, 9)  # of a rank's own inputs: batch norm's sums, and their gradient
# Of dropout's gradient: on CPUs by a mask, which has a byte per number and is made by hash_ops;
# GPUs make it again in passing.
MASKED, MASKED_IN_PASSING = 6.25, 2.0
BIAS: Both = (2, 1)
RELU: Both = (2, 3)
SUM = 3  # of two tensors
COPY = 2  # of rows into place: a product's gradients are made block by block
# Of the gradient of rows that are the first R of S, [R, H_in] and [S, H_in]: it is put among zeros
# and added to that of the sources.
AMONG = (1, 1 + SUM)


class Passes(NamedTuple):
    """Passes over each of a layer's tensors."""

    outputs: float = 0.0  # [R, H_out]
    inputs: float = 0.0  # [S, H_in]
    projected: float = 0.0  # [S, H_out]
    pairs: float = 0.0  # [E, H_out]


class Kind(NamedTuple):
    """What a kind of layer does besides what all do."""

    forward: Passes = Passes()
    backward: Passes = Passes()
    project: Both = (0, 0)  # of projected rows, with their logits
    own: int = 0  # how often it reads the destinations' own rows
    # It ends in a product, wherever it aggregates; others do where they aggregate first. What ends
    # in a product has its bias in it.
    multiplies_last: bool = False
    fuses: bool = True  # its last product has ReLU in it, too
    # Kernels on a GPU, without those of dropout and norm (tests/executor/test_launches.py).
    launches: tuple[int, int] = (6, 6)


GCN = Kind()
SAGE = Kind(Passes(SUM), own=1, multiplies_last=True, fuses=False, launches=(8, 8))
GIN = Kind(multiplies_last=True, launches=(10, 11))
# two mixtures; their gradients are four products and a sum, and the initial rows' is put among
# those of others and added
GCNII = Kind(Passes(2 * SUM), Passes(4 * 2 + SUM + 2 + SUM), fuses=False, launches=(10, 12))
# logits beside z; z and what is summed are copied, head by head
GAT = Kind(Passes(5, 0, 2), Passes(13, 0, 8), (5, 7), launches=(15, 21))
GATV2 = Kind(Passes(2, 0, 2, 6), Passes(9, 0, 6, 10.5), (0, 1), launches=(8, 15))
PAIRS_GATHERED = 2.0  # of GATv2's rows, once more in its backward pass on GPUs
# ResGCN+'s first layer has ReLU in its messages. The others add their inputs to their outputs.
GEN_FIRST = Kind(Passes(SUM, 2 + RELU[0]), Passes(0, RELU[1]), own=1, fuses=False, launches=(9, 8))
GEN = Kind(Passes(2 * SUM, 2), own=2, fuses=False, launches=(9, 8))


def with_softmax(kind: Kind) -> Kind:
    """The kind with its messages weighted by a softmax."""
    forward, backward = kind.forward, kind.backward
    return kind._replace(
        launches=(kind.launches[0] + 6, kind.launches[1] + 2),
        forward=forward._replace(outputs=forward.outputs + 6.5, inputs=forward.inputs + 12),
        backward=backward._replace(outputs=backward.outputs + 6, inputs=backward.inputs + 11),
    )
