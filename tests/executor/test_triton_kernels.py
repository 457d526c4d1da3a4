"""Kernels in Triton: interpreted beside torch, compiled for A100 and H100, and on a GPU."""

import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from calls import ended_well
from torch import Tensor

from gnnplan.executor.layers.kernels import Block, attend, attend_pairs, dropout
from gnnplan.executor.layers.kernels.aggregation import aggregate_with_own, sparse_product, spmm
from gnnplan.executor.layers.kernels.hashed_dropout import _threshold

pytest.importorskip("triton", "3.6")
from gnnplan.executor.layers.kernels import triton_kernels as ours

interpreted = pytest.mark.skipif(
    ours.triton.__version__.startswith("3.6"),
    reason="interpreters before 3.7 cannot read NumPy's arrays of one number",
)
DEVICES = [pytest.param("cpu", marks=interpreted), pytest.param("cuda", marks=pytest.mark.gpu)]
on_devices = pytest.mark.parametrize(
    "device", DEVICES[torch.cuda.is_available() :]
)  # where there is a GPU kernels are compiled for it, and nothing is interpreted
DTYPES = (torch.float64, torch.float32, torch.bfloat16)


def at_night(*values: Any) -> Any:
    """Where there is a GPU, by day too."""
    return pytest.param(*values, marks=[] if torch.cuda.is_available() else pytest.mark.nightly)


def each_once(values: Sequence[Any]) -> list[Any]:
    """Every type with every value; by day each of both once."""
    pairs = [
        (dtype, value)
        for shift in range(3)
        for dtype, value in zip(DTYPES, [*values[shift:], *values[:shift]], strict=True)
    ]
    return [*pairs[:3], *(at_night(*pair) for pair in pairs[3:])]


CLOSE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}  # of the largest number


def block_of(n_dst: int, n_src: int, edges: int) -> Block:
    """Rows of random lengths, the last two empty, one of a third of the edges."""
    random = np.random.default_rng(0)
    rows = np.sort(np.append(random.integers(0, n_dst - 2, edges - edges // 3), [1] * (edges // 3)))
    indptr = np.searchsorted(rows, np.arange(n_dst + 1))
    return Block(indptr, random.integers(0, n_src, edges), n_src, random.random(edges))


def near(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    assert found.dtype == dtype and found.shape == expected.shape
    found, expected = (each.detach().double().cpu() for each in (found, expected))
    off = (found - expected).abs().max()
    assert off <= CLOSE[dtype] * expected.abs().max().clamp(min=1.0)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@on_devices
@pytest.mark.parametrize(("dtype", "width"), each_once([1, 64, 300]))
def test_sums_over_edges(device, dtype, width):
    """Weighted, added to other rows, from a slice of wider rows; twice the same to the bit."""
    block = block_of(9, 12, 40)
    x, add = draw(12, width + 3)[:, 3:].to(dtype), draw(5, width, seed=1).to(dtype)
    for weight, more in ((block.weight, None), (None, add), (block.weight, add)):
        csr = (block.indptr, block.indices, None if weight is None else weight.to(dtype))
        wide = None if weight is None else csr[2].double()
        expected = spmm(*csr[:2], wide, x.double())
        if more is not None:
            expected[:5] += add.double()
        given = [None if t is None else t.to(device) for t in (*csr, x, more)]
        found = ours.spmm(*given)
        near(found, expected, dtype)
        assert torch.equal(found, ours.spmm(*given))
    nothing = torch.zeros(4, dtype=torch.int32, device=device)
    assert not ours.spmm(nothing, nothing[:0], None, x.to(device)).any()


@on_devices
@pytest.mark.parametrize(
    ("dtype", "how"), each_once([(64, 6, 0.3), (300, 3, 0.75), (13, 0, 0.5)]), ids=str
)
def test_dropout_is_that_of_cpus_to_the_bit(device, dtype, how):
    width, first, p = how
    if device == "cpu" and dtype == torch.bfloat16 and p == 0.3:
        pytest.skip("the interpreter rounds to bfloat16 towards zero")
    x, vertices = draw(40, width).to(dtype), torch.randint(10**12, (40,))
    scale = 1.0 / (1.0 - p)
    theirs, leaf = (x.clone().to(d).requires_grad_() for d in ("cpu", device))
    expected = dropout(theirs, 5, 2**40, 3, vertices, p, first)
    epoch = torch.tensor(2**40, device=device)
    threshold = _threshold(p)
    there, more = vertices.to(device), (3, first, threshold, scale)
    found = ours.dropout(leaf, there, 5, 2**40, *more)
    assert torch.equal(found.cpu(), expected)
    assert torch.equal(ours.dropout(leaf, there, 5, epoch, *more), found)
    for out in (expected, found):
        out.backward(torch.ones_like(out))
    assert torch.equal(leaf.grad.cpu(), theirs.grad)


def both(
    device: str,
    leaves: Sequence[Tensor],
    plain: Callable[..., Tensor],
    kernel: Callable[..., Tensor],
) -> None:
    """Results and gradients are alike."""
    found = []
    for function, where in ((plain, "cpu"), (kernel, device)):
        own = [leaf.to(where).requires_grad_() for leaf in leaves]
        out = function(*own)
        found.append([out, *torch.autograd.grad(out, own, draw(*out.shape, seed=9).to(out))])
    for expected, ours_ in zip(*found, strict=True):
        near(ours_, expected, leaves[0].dtype)


@pytest.mark.slow
@on_devices
@pytest.mark.parametrize(
    ("dtype", "heads", "width"),
    [
        (torch.float64, 3, 64),
        (torch.float32, 1, 7),
        at_night(torch.float64, 1, 7),
        at_night(torch.float32, 3, 64),
        *(at_night(dtype, 2, 150) for dtype in DTYPES[:2]),
    ],
    ids=str,
)
def test_attention(device, dtype, heads, width):
    block = block_of(9, 12, 40)
    there = block.to(device)
    leaves = [draw(12, heads * width), draw(12, heads, seed=1), draw(9, heads, seed=2)]
    both(
        device,
        [leaf.to(dtype) for leaf in leaves],
        lambda *given: attend(block, *given, 0.3),
        lambda *given: ours.attend(there, *given, 0.3),
    )
    pairs = [draw(12, 2 * heads * width).to(dtype), draw(heads, width, seed=1).to(dtype)]
    both(
        device,
        pairs,
        lambda *given: attend_pairs(block, *given, 0.3),
        lambda *given: ours.attend_pairs(there, *given, 0.3),
    )


@pytest.mark.gpu
def test_a_gpu_takes_them():
    """`spmm` by Triton equals torch.sparse, and own rows' gradient is added where sums are made."""
    block, x = block_of(300, 400, 5000).to("cuda"), draw(400, 100).cuda().requires_grad_()
    weight = block.weight
    assert torch.equal(
        spmm(block.indptr, block.indices, weight, x.detach()),
        ours.spmm(block.indptr, block.indices, weight, x.detach()),
    )
    expected = sparse_product(block.indptr, block.indices, weight, x.detach())
    near(ours.spmm(block.indptr, block.indices, weight, x.detach()), expected, torch.float64)
    sums, own = aggregate_with_own(block, x)
    (sums.sum() + own.sum()).backward()
    there = torch.zeros(400, dtype=torch.float64, device="cuda")
    there.index_add_(0, block.indices.long(), weight)
    there[:300] += 1.0
    near(x.grad[:, 0], there, torch.float64)


COMPILE = """
import re, subprocess, sys, tempfile
from pathlib import Path
import torch, triton
from triton.backends.compiler import GPUTarget
from gnnplan.executor.layers.kernels import triton_kernels as ours
tl, tool = ours.tl, Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
POINTERS = {"indptr": "*i32", "indices": "*i32", "order": "*i32", "vertices": "*i64"}
POINTERS |= {"epoch": "*i64"}
WIDE = ("saved", "inner", "to_logit", "to_vectors")

def registers(kernel, given, warps, arch, x):
    signature, constants, attributes = {}, {}, {}
    for number, name in enumerate(kernel.arg_names):
        if name in given:
            signature[name], constants[(number,)] = "constexpr", given[name]
        elif "stride" in name or name in ("rows", "width_units", "added", "count", "seed", "layer"):
            signature[name] = "i32"
        else:
            signature[name] = POINTERS.get(name, "*fp32" if name in WIDE else x)
            attributes[(number,)] = [["tt.divisibility", 16]]
    source = triton.compiler.ASTSource(kernel, signature, constants, attributes)
    made = triton.compile(source, target=GPUTarget("cuda", arch, 32), options={"num_warps": warps})
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        told = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True)
    together = re.findall(r"ld.global.v(\\d)", made.asm["ptx"])  # words
    return *map(int, re.search(rb"REG:(\\d+) STACK:(\\d+)", told.stdout).groups()), *together

for arch in map(int, sys.argv[1:]):
    for x, dtype in (("*fp32", torch.float32), ("*bf16", torch.bfloat16)):
        of = torch.empty(0, dtype=dtype)
        for unit, columns in ((16, 64), (16, 256), (4, 128)):  # the last: of 100 columns
            edges = ours._edges(columns * dtype.itemsize)
            given = {"UNIT": unit, "COLUMNS": columns, "EDGES": edges, "SUM": tl.float32}
            used, spilled, *together = registers(ours._spmm, given, 1, arch, x)
            print(arch, x, "spmm", columns, used, spilled)
            assert together and int(together[0]) * 4 == min(16, unit * dtype.itemsize), together
        given = {"FIRST": 0, "THRESHOLD": 0, "SCALE": 2.0, "ROWS": 4, "WORDS": 64, "SUM": tl.float32}
        given |= {"WIDTH": 256, "STRIDE": 256}
        print(arch, x, "dropout", 256, *registers(ours._dropout, given, 4, arch, x)[:2])
        for width in (64, 256):
            columns, edges, sums, warps = ours._head_shape(width, of)
            given = {"WIDTH": width, "HEADS": 4, "SLOPE": 0.2, "COLUMNS": columns, "EDGES": edges}
            given |= {"SUM": sums}
            gat, gatv2 = {"vectors": None}, {"source": None, "to_source": None}
            for name, kernel, more in (
                ("gat", ours._attend, gat), ("gat home", ours._attend_home, gat),
                ("gatv2", ours._attend, gatv2), ("gatv2 home", ours._attend_home, gatv2),
                ("gatv2 readers", ours._pairs_home, {}),
            ):
                print(arch, x, name, width, *registers(kernel, given | more, warps, arch, x)[:2])
"""


@pytest.mark.nightly
@pytest.mark.processes
def test_they_compile_for_gpus_without_spills():
    """For an A100 and an H100: registers, and bytes of stack, which are spilled."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    told = ended_well(sys.executable, "-c", COMPILE, "80", "90", within=90, env=env)
    lines = [line.rsplit(" ", 2) for line in told.stdout.splitlines()]
    assert len(lines) >= 16
    assert not [line for line in lines if int(line[1]) > 128 or int(line[2])], told.stdout
