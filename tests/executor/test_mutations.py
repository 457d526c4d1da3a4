"""Small changes of modules that change what is computed: none is trained as something else.

Each is a sentence of forward, or of what is done to the module before. Either it is carried, and
then its pieces equal the module itself on a graph that they have not seen, or it is refused with a
sentence. What is neither is a fault: another error, or other numbers."""

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from examples import NIGHT
from pairwise import every
from torch import Tensor, nn

from gnnplan.executor.layers.layer import Drop
from gnnplan.executor.modules.bind import Small
from gnnplan.executor.modules.pieces import Pieces
from gnnplan.executor.modules.prove import as_pieces_draw, in_parts
from gnnplan.executor.modules.read import GraphFields, read
from gnnplan.planner.gnn.workload import Workload
from gnnplan.planner.vocabulary.errors import SpecError

FEATURES, CLASSES = 12, 4
SIZES = (60, 97) if NIGHT else (60,)  # of graphs that nobody has looked at
VERTEX = {"pos": ((3,), "<f8", 0)}
EDGE = {"edge_attr": ((5,), "<f8", 0), "edge_weight": ((), "<f8", 0), "other": ((), "<f8", 0)}
SOURCE = """
import itertools
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch_geometric.nn import GATConv, GCNConv, GraphConv, MessagePassing, SAGEConv
from torch_geometric.utils import add_self_loops, degree, scatter, softmax

class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2
    @staticmethod
    def backward(ctx, gradient):
        return gradient * 3

class Noise(Twice):
    @staticmethod
    def forward(ctx, x):
        return x + torch.rand_like(x)

class Pair(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, src, dst):
        ctx.save_for_backward(src, dst)
        return torch.zeros_like(x).index_add(0, dst, x[src]), x * 2
    @staticmethod
    def backward(ctx, gradient, other):
        src, dst = ctx.saved_tensors
        return torch.zeros_like(other).index_add(0, src, gradient[dst]) + 2 * other, None, None

twice = Twice.apply

class M(nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.a, self.b = GraphConv(in_channels, 8), GraphConv(8, out_channels)
        self.c, self.lin, self.norm = GCNConv(8, 8), nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.att = nn.MultiheadAttention(8, 2, batch_first=True)
        self.calls, self.kept = 0, None
        self.register_buffer("seen", torch.zeros(1))
        {more}

    def forward(self, x, edge_index, pos, edge_attr, edge_weight, other):
        src, dst = edge_index
        h = self.a(x, edge_index).relu()
        {body}
        return self.b(h, edge_index)
"""
PLAIN = "h = h + 0"
# what forward does between its two convolutions -> whether it must be carried, or refused (None:
# either will do, if it equals itself)
FORWARD: dict[str, tuple[str, bool | None]] = {
    "nothing": (PLAIN, True),
    "edges backwards": ("h = self.c(h, edge_index.flip(0))", False),
    "edges backwards by hand": ("h = torch.zeros_like(h).index_add_(0, src, h[dst])", False),
    "the first edges": ("h = self.c(h, edge_index[:, :40])", False),
    "half of the edges": ("h = self.c(h, edge_index[:, : edge_index.size(1) // 2])", False),
    "every second edge": ("h = self.c(h, edge_index[:, ::2])", False),
    "edges of heavy weight": ("h = self.c(h, edge_index[:, edge_weight > 0.6])", None),
    "edges to larger ids": ("h = self.c(h, edge_index[:, src < dst])", None),
    "edges of two hops": (
        "h = self.c(h, torch.stack([src, src[torch.randperm(src.numel(), generator=torch.Generator().manual_seed(1))]]))",
        False,
    ),
    "a weight": ("h = self.c(h, edge_index, edge_weight)", True),
    "another weight": ("h = self.c(h, edge_index, other)", True),
    "a weight of mean one": ("h = self.c(h, edge_index, edge_weight / edge_weight.mean())", True),
    "weights sorted": ("h = self.c(h, edge_index, edge_weight.sort().values)", None),
    "the next edge's weight": ("h = self.c(h, edge_index, edge_weight.roll(1))", None),
    "a column of attributes": ("h = self.c(h, edge_index, edge_attr[:, 3])", True),
    "positions": ("h = h * pos.norm(dim=1, keepdim=True)", True),
    "positions from the middle": ("h = h * (pos - pos.mean(0)).norm(dim=1, keepdim=True)", False),
    "softmax over vertices": ("h = h.softmax(0)", False),
    "softmax over columns": ("h = h.softmax(1)", True),
    "softmax over sources": (
        "h = torch.zeros_like(h).index_add_(0, dst, h[src] * softmax(h[src], src))",
        False,
    ),
    "mean of all rows": ("h = h - h.mean(0)", False),
    "the largest of all": ("h = h / h.max()", False),
    "norm of the matrix": ("h = h / h.norm()", False),
    "moments of the batch": ("h = (h - h.mean(0)) / h.std(0)", False),
    "sorted rows": ("h = h.sort(0).values", False),
    "rows in another order": ("h = h.flip(0)", False),
    "the row of the next vertex": ("h = h.roll(1, 0)", False),
    "the row of vertex 0": ("h = h + h[0]", False),
    "rows summed up": ("h = h.cumsum(0)", False),
    "columns summed up": ("h = h.cumsum(1)", True),
    "the largest ten": (
        "h = torch.zeros_like(h).index_copy(0, h[:, 0].topk(10).indices, h[:10])",
        False,
    ),
    "attention of all to all": ("h = (h @ h.t()).softmax(1) @ h", False),
    "the rank of a vertex": ("h = h * torch.arange(h.size(0)).unsqueeze(1)", None),
    "number of vertices": ("h = h / h.size(0)", False),
    "number of vertices less one": ("h = h / (h.size(0) - 1)", None),
    "square root of the number of vertices": ("h = h * h.size(0) ** -0.5", None),
    "number of edges": ("h = h / edge_index.size(1)", None),
    "mean degree": ("h = h * (edge_index.size(1) / x.size(0))", None),
    "number of vertices as a tensor": ("h = h / torch.tensor(float(len(h)))", None),
    "rows as len says it": ("h = h * torch.ones(len(h), 8, dtype=h.dtype)", True),
    "number of vertices as len says it": ("h = h / len(h)", None),
    "number of parameters": ("h = h / self.lin.weight.numel()", True),
    "degree of sources": ("h = h * degree(src, h.size(0)).unsqueeze(1)", True),
    "the largest degree": ("h = h / degree(dst, h.size(0)).max()", None),
    "evaluation of its own": ("h = h if self.training else h * 0.5", True),
    "other edges in evaluation": (
        "h = self.c(h, edge_index) if self.training else self.c(h, edge_index[:, :30])",
        False,
    ),
    "a layer less in evaluation": ("h = self.c(h, edge_index) if self.training else h", False),
    "a sparse matrix": (
        "h = torch.sparse_coo_tensor(edge_index.flip(0), edge_weight, (len(h), len(h))) @ h",
        True,
    ),
    "a sparse matrix of sources": (  # equal to its transpose where edges go both ways
        "h = torch.sparse_coo_tensor(edge_index, other, (len(h), len(h))) @ h",
        True,
    ),
    "a sparse matrix of two hops": (
        "a = torch.sparse_coo_tensor(edge_index.flip(0), other, (len(h), len(h)))\n"
        "h = torch.sparse.mm(torch.sparse.mm(a, a), h)",
        False,
    ),
    "a sparse matrix and half its edges": (
        "a = torch.sparse_coo_tensor(edge_index[:, ::2].flip(0), other[::2], (len(h), len(h)))\n"
        "h = a @ h",
        False,
    ),
    "a sparse matrix over columns": (
        "a = torch.sparse_coo_tensor(edge_index[:, :3] * 0, other[:3], (8, 8))\nh = (a @ h.t()).t()",
        None,
    ),
    "learned numbers in a sparse matrix": (
        "h = torch.sparse_coo_tensor(edge_index.flip(0), other * self.lin.bias[0], (len(h), len(h))) @ h",
        False,
    ),
    "noise": ("h = h + torch.randn_like(h)", False),
    "noise in training": ("h = h + 0.1 * torch.rand(h.shape) if self.training else h", False),
    "noise of numpy": ("h = h + float(np.random.rand())", False),
    "noise of its own generator": (
        "h = h + torch.randn(h.shape, generator=torch.Generator().manual_seed(1))",
        False,
    ),
    "dropout of columns": ("h = F.dropout1d(h, 0.5, self.training)", False),
    "dropout in evaluation": ("h = F.dropout(h, 0.5)", False),
    "dropout": ("h = F.dropout(h, 0.5, self.training)", True),
    "alpha dropout": ("h = F.alpha_dropout(h, 0.5, self.training)", False),
    "a number that its class has kept": ("M.k = getattr(M, 'k', 0) + 1\nh = h * M.k", False),
    "a number that a list has kept": (
        "self.kept = [*(self.kept or []), 1]\nh = h * (1 if len(self.kept) < 99 else 2)",
        False,
    ),
    "the number of its process": ("import os\nh = h * os.getpid()", False),
    "an environment that ranks have": (
        "import os\nh = h * (2 if 'LOCAL_WORLD_SIZE' in os.environ else 1)",
        False,
    ),
    "ranks that meet": (
        "h = h * (2 if torch.distributed.is_initialized() else 1)",
        False,
    ),
    "a number that it has kept": ("self.calls += 1\nh = h * self.calls", False),
    "rows that it has kept": (
        "h = h if self.kept is None else h + self.kept\nself.kept = h.detach()",
        False,
    ),
    "a buffer that it moves": ("self.seen += 1\nh = h * self.seen", False),
    "a buffer that it sets": ("self.seen = self.seen * 0.9 + 1\nh = h * self.seen", False),
    "no gradient": ("with torch.no_grad():\n    h = h * 2", True),
    "detached": ("h = h.detach()", True),
    "half detached": ("h = h + (h * 2).detach()", True),
    "data": ("h.data.mul_(2)", False),
    "x changed in place": ("x.mul_(2)\nh = self.a(x, edge_index).relu()", False),
    "rows changed in place": ("h = h * 1\nh.mul_(2)", True),
    "rows of some vertices in place": ("h = h * 1\nh[h > 1] = 0", None),
    "the first row in place": ("h = h * 1\nh[0] = 0", False),
    "what a gradient needs in place": ("h.mul_(2)", False),
    "columns in place": ("h[:, 2:].mul_(2)", None),
    "a product with a vector": ("h = h * (h @ self.lin.weight[0]).unsqueeze(1)", True),
    "a product of three": (
        "h = torch.einsum('ni,ij,nj->n', h, self.lin.weight, h)[:, None] * h",
        None,
    ),
    "a convolution over columns": ("h = F.avg_pool1d(h.unsqueeze(1), 3, 1, 1).squeeze(1)", None),
    "the largest columns": (
        "h = torch.zeros_like(h).scatter(1, h.topk(3, 1).indices, 1.0) * h",
        None,
    ),
    "some rows": ("h = h[h[:, 0] > 0]", False),
    "rows that are not zero": (
        "h = torch.zeros_like(h).index_copy(0, h.sum(1).nonzero()[:, 0], h[h.sum(1) != 0])",
        None,
    ),
    "whole numbers": ("h = h + h.round().long()", None),
    "less precision": ("h = h + h.half().to(h.dtype)", None),
    "a Fourier transform of columns": ("h = torch.fft.fft(h, dim=1).real", None),
    "distances of vertices": ("h = torch.cdist(h, h) @ h", False),
    "distances to parameters": ("h = torch.cdist(h, self.lin.weight)", None),
    "an inverse": (
        "h = torch.linalg.solve(torch.eye(8, dtype=h.dtype) + h.t() @ h, h.t()).t()",
        False,
    ),
    "attention of columns": (
        "h = F.scaled_dot_product_attention(h[:, None, None], h[:, None, None], h[:, None, None])[:, 0, 0]",
        None,
    ),
    "the unique rows": ("h = torch.unique(h, dim=0)", False),
    "rows by a table": ("h = h + F.embedding(torch.arange(h.size(0)) % 8, self.lin.weight)", None),
    "a clone of a copy": ("h = h.clone().contiguous().type_as(x).to(x.device)", True),
    "an exception": ("raise ValueError('no')", False),
    "an assertion": ("assert h.size(0) == 53", False),
    "another file's graph": ("import scipy.sparse\nh = h + float(scipy.sparse.eye(3).nnz)", None),
    "compiled": ("h = torch.jit.script(nn.ReLU())(h)", None),
    "checkpointed": (
        "import torch.utils.checkpoint as c\nh = c.checkpoint(self.lin, h, use_reentrant=False)",
        None,
    ),
    "autocast": (
        "with torch.autocast('cpu', torch.bfloat16):\n    h = self.lin(h).to(x.dtype)",
        None,
    ),
    "vmap": ("h = torch.vmap(lambda row: row * row.sum())(h)", None),
    "a branch on data": ("h = h * 2 if h.sum() > 0 else h", False),
    "a branch on an item": ("h = h * 2 if h[0, 0].item() > -100 else h", False),
    "a branch on a size": ("h = h * 2 if h.size(0) < 55 else h", False),
    "a branch on parity": ("h = h * 2 if h.size(0) % 2 else h", None),
    "a loop over vertices": ("h = torch.stack([row * 2 for row in h])", False),
    "through numpy": ("h = h + torch.from_numpy(np.tanh(h.detach().numpy()))", False),
    "through a list": ("h = h + torch.tensor(x.tolist())[:, :8]", False),
    "numpy of edges": ("h = self.c(h, torch.from_numpy(edge_index.numpy().copy()))", False),
    "a gradient of its own": ("h = Twice.apply(h)", True),
    "a gradient of its own, kept by a name": ("h = twice(h) + Twice.apply(self.lin.bias)", True),
    "a gradient of its own, of edges": ("h = self.c(h, edge_index, Twice.apply(other))", True),
    "a gradient of its own, of noise": ("h = Noise.apply(h)", False),
    "several rows of one call through edges": (
        "a, b = Pair.apply(h, src, dst)\nh = self.c(a, edge_index) + b",
        True,
    ),
    "several rows of one call, read later": (
        "v, i = h.topk(3, 1)\nh = self.c(self.c(h, edge_index), edge_index).scatter_add(1, i, v)",
        True,
    ),
    "attention over hops": (
        "h = torch.stack([h, self.c(h, edge_index)], 1)\nh = self.att(h, h, h)[0].sum(1)",
        True,
    ),
    "attention of all to all by a module": (
        "h = self.att(h[None], h[None], h[None])[0][0]",
        False,
    ),
    "batch norm": ("h = self.norm(h)", True),
    "batch norm of batches alone": ("h = F.batch_norm(h, None, None, training=True)", False),
    "two batch norms": ("h = self.norm(self.norm(h))", True),
    "a transposed product": ("h = h @ (h.t() @ h)", False),
    "rows as columns": ("h = h.reshape(8, -1).t().contiguous().view(-1, 8)", False),
    "a convolution over vertices": ("h = F.avg_pool1d(h.t().unsqueeze(0), 3, 1, 1)[0].t()", False),
    "dropout of parameters": ("h = h @ F.dropout(self.lin.weight, 0.5, self.training)", True),
    "dropout of one row for all": (
        "h = h * F.dropout(torch.ones(5, dtype=h.dtype), 0.5, self.training).mean()",
        True,
    ),
    "an environment that it changes": (
        "import os\nos.environ['CALLS'] = os.environ.get('CALLS', '') + '.'\n"
        "h = h * (1 if len(os.environ['CALLS']) < 99 else 2)",
        False,
    ),
    "its first rows": (
        "self.kept = h.detach() if self.kept is None else self.kept\nh = h + self.kept",
        False,
    ),
    "a branch on many vertices": ("h = h * 2 if int(h.size(0)) > 999 else h", False),
    "a branch on digits": ("h = h * len(str(h.size(0)))", False),
    "rows by blocks": ("h = torch.cat([c * i for i, c in enumerate(h.split(100), 1)])", False),
    "the first edge of each reader": (
        "first = torch.full((len(h),), dst.numel()).scatter_reduce(0, dst, torch.arange(dst.numel()), 'amin')\n"
        "h = h + h[torch.cat([src, src[:1]])[first]]",
        False,
    ),
    "equal edges that weigh another": (
        "twice = torch.cat([edge_index, edge_index], 1)\n"
        "w = torch.cat([other, degree(src, h.size(0)).to(h.dtype)[src]])\n"
        "h = torch.zeros_like(h).index_add(0, twice[1], w[:, None] * h[twice[0]])",
        True,
    ),
    "a sparse matrix with loops": (
        "loops, _ = add_self_loops(edge_index, num_nodes=len(h))\n"
        "a = torch.sparse_coo_tensor(loops.flip(0), degree(loops[1], len(h))[loops[1]].to(h.dtype), (len(h), len(h)))\n"
        "h = a @ h",
        True,
    ),
    "a function that it patches": (
        "old, F.relu = F.relu, lambda t, inplace=False: old(t) * 2\n"
        "try:\n    h = F.relu(h)\nfinally:\n    F.relu = old",
        False,
    ),
    "a gradient's hook": ("h.register_hook(lambda g: g * 2) if h.requires_grad else None", None),
}
# what is done to the module after it was made
MADE: dict[str, tuple[str, bool | None]] = {
    "another message": ("self.a.message = lambda x_j, edge_weight: x_j * 2", None),
    "a hook after": ("self.a.register_forward_hook(lambda m, i, o: o * 2)", None),
    "a hook before": ("self.a.register_forward_pre_hook(lambda m, i: (i[0] * 2, *i[1:]))", None),
    "a hook of messages": ("self.a.register_message_forward_hook(lambda m, i, o: o * 2)", None),
    "a hook of gradients": ("self.lin.register_full_backward_hook(lambda m, i, o: None)", None),
    "frozen": ("self.a.requires_grad_(False)", True),
    "all is frozen": ("self.requires_grad_(False)", False),
    "max of messages": ("self.a = GraphConv(in_channels, 8, aggr='max')", True),
    "against the edges": ("self.a = GraphConv(in_channels, 8, flow='target_to_source')", False),
    "tied": ("self.c.lin.weight = self.lin.weight", True),
    "weight norm": ("nn.utils.parametrizations.weight_norm(self.a.lin_rel)", True),
    "spectral norm": ("nn.utils.parametrizations.spectral_norm(self.a.lin_rel)", None),
    "another forward": ("old = self.a.forward; self.a.forward = lambda *x: old(*x) * 2", False),
    "a hook of a parameter": ("self.lin.weight.register_hook(lambda g: g.clamp(-1, 1))", False),
    "always in training": ("self.norm.train = lambda mode=True: self.norm", False),
    "never in training": (
        "self.norm.running_mean.normal_(); self.norm.eval().train = lambda mode=True: self.norm",
        True,
    ),
}
SHOWN = "h = self.norm(self.lin(self.c(h, edge_index)))"  # so that a change of any part shows
STEP = "n = [0]\n        def step():\n            n[0] += 1\n            return 1 + n[0] // 99\n        "
# both: what it keeps, and what forward does with it
KEPT: dict[str, tuple[str, str]] = {
    "a cycle": ("self.kept = itertools.cycle([1, 1, 1, 1, 1, 1, 2])", "h = h * next(self.kept)"),
    "a function around a number": (f"{STEP}self.kept = step", "h = h * self.kept()"),
    "a generator of numpy's": (
        "self.kept = np.random.default_rng(1)",
        "h = h * (1 if self.kept.random() < 0.99 else 2)",
    ),
    "a buffer of whole numbers": (
        "del self.kept; self.register_buffer('kept', torch.zeros((), dtype=torch.long))",
        "self.kept += 1\nh = h * (1 + 2 * (self.kept > 99).to(h.dtype))",
    ),
    "a tensor that counts": (
        "self.kept = torch.zeros(())",
        "self.kept = self.kept + 1\nh = h * (1 + 2 * (self.kept > 99).to(h.dtype))",
    ),
    "numpy's number": (
        "self.kept = np.int64(0)",
        "self.kept = self.kept + 1\nh = h * (3 if self.kept > 99 else 1)",
    ),
    "a set that grows": (
        "self.kept = set()",
        "self.kept.add(len(self.kept))\nh = h * (3 if len(self.kept) > 99 else 1)",
    ),
    "a list of tensors that grows": (
        "self.kept = []",
        "self.kept.append(h.detach())\nh = h * (3 if len(self.kept) > 99 else 1)",
    ),
    "a tensor in a list": ("self.kept = [torch.ones(8)]", "h = h * self.kept[0].to(h.dtype)"),
    "a layer in a list": ("self.kept = [nn.Linear(8, 8).double()]", "h = self.kept[0](h)"),
}


NIGHTLY = pytest.mark.nightly


@pytest.fixture(scope="module", autouse=True)
def pyg():
    os.environ.setdefault("DGLBACKEND", "pytorch")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # at import, its own
        pytest.importorskip("torch_geometric", exc_type=ImportError)


def outcome(folder: Path, body: str, more: str, directed: bool) -> str:
    """'carried', if it then is itself, or the words of the refusal."""
    file = folder / "model.py"
    pad = "\n        "
    file.write_text(SOURCE.replace("{more}", more).replace("{body}", body.replace("\n", pad)))
    graph = GraphFields(FEATURES, CLASSES, directed, False, VERTEX, EDGE)
    try:
        user = read(f"{file}:M", Workload(dtype="float64"), graph)
    except SpecError as refused:
        return str(refused)
    assert user.pieces is not None
    for vertices in SIZES:
        assert_is_itself(user.module, user.pieces, vertices, directed)
    return "carried"


def assert_is_itself(module: nn.Module, pieces: Pieces, vertices: int, directed: bool) -> None:
    graph = GraphFields(FEATURES, CLASSES, directed, False, VERTEX, EDGE)
    small = Small(vertices, module, graph)
    for is_training in (True, False):
        mode = pieces.training if is_training else pieces.evaluation
        expected, found = [], []
        for kind, into in (("itself", expected), ("pieces", found)):
            module.train(is_training).zero_grad()
            buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
            values = small.given(torch.float64)
            if kind == "itself":
                with as_pieces_draw(pieces, mode, small.whole, Drop(0.0, 7)):
                    out = pieces.binding.call(module, values)
            else:
                out = in_parts(pieces, small, values, is_training)
            (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
            into += [out.detach().clone(), *gradients(module)]
            with torch.no_grad():
                for name, buffer in module.named_buffers():
                    into += [buffer.clone()] if buffer.is_floating_point() else []
                    buffer.copy_(buffers[name])
        for a, b in zip(expected, found, strict=True):
            torch.testing.assert_close(b, a, rtol=1e-8, atol=1e-8, check_dtype=False)


def gradients(module: nn.Module) -> list[Tensor]:
    return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in module.parameters()]


def assert_is_as_expected(found: str, carried: bool | None) -> None:
    if carried is not None:
        assert (found == "carried") == carried, found
    if found != "carried":
        words = found.partition("M: ")[2]
        assert len(words.split()) > 6 and "Traceback" not in words, found


def by_day(changes: dict[str, tuple[str, bool | None]]) -> list[Any]:
    """The changes as parameters: by day every fourth of those that must be refused, and every fifth of
    those that must be carried."""
    carried = [name for name, (_, carried) in changes.items() if carried]
    refused = [name for name, (_, carried) in changes.items() if carried is False]
    often = {*carried[::5], *refused[::4]}
    return [name if name in often else pytest.param(name, marks=NIGHTLY) for name in changes]


@pytest.mark.slow
@pytest.mark.parametrize("change", by_day(FORWARD))
def test_a_change_of_forward_is_carried_as_it_is_or_refused(change, tmp_path):
    body, carried = FORWARD[change]
    found = outcome(tmp_path, body, "pass", directed=False)
    print(f"{change:40} {found.partition('M: ')[2] or found}")
    assert_is_as_expected(found, carried)


@pytest.mark.slow
@pytest.mark.parametrize("change", by_day(MADE))
def test_a_change_of_the_module_is_carried_as_it_is_or_refused(change, tmp_path):
    more, carried = MADE[change]
    found = outcome(tmp_path, SHOWN, more, directed=False)
    print(f"{change:40} {found.partition('M: ')[2] or found}")
    assert_is_as_expected(found, carried)


@pytest.mark.parametrize("change", every(3, KEPT))
def test_what_is_kept_between_calls_is_refused(change, tmp_path):
    more, body = KEPT[change]
    found = outcome(tmp_path, body, more, directed=False)
    print(f"{change:40} {found.partition('M: ')[2]}")
    assert_is_as_expected(found, carried=False)


@pytest.mark.nightly
@pytest.mark.parametrize("change", FORWARD)
def test_on_edges_one_way_none_is_something_else(change, tmp_path):
    found = outcome(tmp_path, FORWARD[change][0], "pass", directed=True)
    assert_is_as_expected(found, None)
