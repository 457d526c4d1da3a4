"""The hot operations of a GNN. Strategies, layers and benchmarks import them from this package.

On CPUs torch's default kernels are up to twice as slow as the best, so each operation selects the
faster one: a public operation, or a private one that is probed at run time.

Open
    block.py           for `Block`: the edges of a layer, in CSR, with their transpose
    aggregation.py     for `aggregate`: weighted sums over edges, and their gradient
    attention.py       for `softmax_aggregate`, `attend`, `attend_pairs`: softmax over edges
    rows.py            for `SparseRows`: features of which most are zero
    matmul.py          for `linear`, `linear_sum`, `Shapes`, `warm_up`: products by MKL or oneDNN
    hashed_dropout.py  for `dropout`: masks that are a hash of (seed, epoch, layer, vertex, column)
    few_bits.py        for `UniformWidth`, `MixedWidth`: packed rows with stochastic rounding
    triton_kernels.py  for sums over edges, attention and dropout on GPUs
    page_locked.py     for `sent`, `together`: copies to a GPU that do not block the host
    runtime.py         for typed autograd calls, `backward`, the allocator's settings, and
                       `triton_kernels`: whether Triton works on this GPU

Shapes: R destination rows, S source rows, E edges, Z stored values of rows, H values per row
(H_in and H_out for a linear layer)."""

from gnnplan.executor.layers.kernels.aggregation import (
    aggregate,
    aggregate_transposed,
    aggregate_with_own,
)
from gnnplan.executor.layers.kernels.attention import attend, attend_pairs, softmax_aggregate
from gnnplan.executor.layers.kernels.block import Block
from gnnplan.executor.layers.kernels.few_bits import MixedWidth, UniformWidth
from gnnplan.executor.layers.kernels.hashed_dropout import GOLDEN, dropout, dropout_mask, mix
from gnnplan.executor.layers.kernels.matmul import (
    Shapes,
    code_of,
    linear,
    linear_sum,
    product_codes,
    warm_up,
    weight_gradient,
)
from gnnplan.executor.layers.kernels.page_locked import (
    keep_until_used,
    mapped,
    sent,
    together,
)
from gnnplan.executor.layers.kernels.rows import SparseRows, cat
from gnnplan.executor.layers.kernels.runtime import (
    Root,
    backward,
    collecting,
    gradient_of,
    keep_allocator,
    pin_no_more_than_asked,
    release_memory,
    root_of,
)

__all__ = [
    "GOLDEN",
    "Block",
    "MixedWidth",
    "Root",
    "Shapes",
    "SparseRows",
    "UniformWidth",
    "aggregate",
    "aggregate_transposed",
    "aggregate_with_own",
    "attend",
    "attend_pairs",
    "backward",
    "cat",
    "code_of",
    "collecting",
    "dropout",
    "dropout_mask",
    "gradient_of",
    "keep_allocator",
    "keep_until_used",
    "linear",
    "linear_sum",
    "mapped",
    "mix",
    "pin_no_more_than_asked",
    "product_codes",
    "release_memory",
    "root_of",
    "sent",
    "softmax_aggregate",
    "together",
    "warm_up",
    "weight_gradient",
]
