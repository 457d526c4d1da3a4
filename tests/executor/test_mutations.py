"""Small changes of modules that change what is computed: none is trained as something else.

Each is a sentence of forward, or of what is done to the module before. Either it is carried, and
then its pieces equal the module itself on a graph that they have not seen, or it is refused with a
sentence. What is neither is a fault: another error, or other numbers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from examples import NIGHT
from pairwise import every
from torch import Tensor, nn
from written import quiet

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
# what forward does between its two convolutions: its name, whether it must be carried or refused
# (either will do, if it equals itself), and lines of code, between which ;; stands
IN_FORWARD = """
    nothing | carried | h = h + 0
    edges backwards | carried | h = self.c(h, edge_index.flip(0))
    edges backwards by hand | refused | h = torch.zeros_like(h).index_add_(0, src, h[dst])
    the first edges | refused | h = self.c(h, edge_index[:, :40])
    edges of heavy weight | either | h = self.c(h, edge_index[:, edge_weight > 0.6])
    edges to larger ids | either | h = self.c(h, edge_index[:, src < dst])
    edges of two hops | refused | h = self.c(h, torch.stack([src, src[torch.randperm(src.numel(), generator=torch.Generator().manual_seed(1))]]))
    a weight | carried | h = self.c(h, edge_index, edge_weight)
    another weight | carried | h = self.c(h, edge_index, other)
    a weight of mean one | carried | h = self.c(h, edge_index, edge_weight / edge_weight.mean())
    weights sorted | either | h = self.c(h, edge_index, edge_weight.sort().values)
    the next edge's weight | either | h = self.c(h, edge_index, edge_weight.roll(1))
    a column of attributes | carried | h = self.c(h, edge_index, edge_attr[:, 3])
    positions | carried | h = h * pos.norm(dim=1, keepdim=True)
    positions from the middle | refused | h = h * (pos - pos.mean(0)).norm(dim=1, keepdim=True)
    softmax over vertices | refused | h = h.softmax(0)
    softmax over columns | carried | h = h.softmax(1)
    softmax over sources | refused | h = torch.zeros_like(h).index_add_(0, dst, h[src] * softmax(h[src], src))
    mean of all rows | refused | h = h - h.mean(0)
    moments of the batch | refused | h = (h - h.mean(0)) / h.std(0)
    sorted rows | refused | h = h.sort(0).values
    the row of the next vertex | refused | h = h.roll(1, 0)
    the row of vertex 0 | refused | h = h + h[0]
    columns summed up | carried | h = h.cumsum(1)
    the largest ten | refused | h = torch.zeros_like(h).index_copy(0, h[:, 0].topk(10).indices, h[:10])
    attention of all to all | refused | h = (h @ h.t()).softmax(1) @ h
    the rank of a vertex | either | h = h * torch.arange(h.size(0)).unsqueeze(1)
    number of vertices | refused | h = h / h.size(0)
    number of edges | either | h = h / edge_index.size(1)
    mean degree | either | h = h * (edge_index.size(1) / x.size(0))
    rows as len says it | carried | h = h * torch.ones(len(h), 8, dtype=h.dtype)
    number of parameters | carried | h = h / self.lin.weight.numel()
    degree of sources | carried | h = h * degree(src, h.size(0)).unsqueeze(1)
    the largest degree | either | h = h / degree(dst, h.size(0)).max()
    evaluation of its own | carried | h = h if self.training else h * 0.5
    other edges in evaluation | refused | h = self.c(h, edge_index) if self.training else self.c(h, edge_index[:, :30])
    a layer less in evaluation | refused | h = self.c(h, edge_index) if self.training else h
    a sparse matrix | carried | h = torch.sparse_coo_tensor(edge_index.flip(0), edge_weight, (len(h), len(h))) @ h
    a sparse matrix of sources | carried | h = torch.sparse_coo_tensor(edge_index, other, (len(h), len(h))) @ h
    a sparse matrix of two hops | refused | a = torch.sparse_coo_tensor(edge_index.flip(0), other, (len(h), len(h))) ;; h = torch.sparse.mm(torch.sparse.mm(a, a), h)
    a sparse matrix over columns | either | a = torch.sparse_coo_tensor(edge_index[:, :3] * 0, other[:3], (8, 8)) ;; h = (a @ h.t()).t()
    learned numbers in a sparse matrix | refused | h = torch.sparse_coo_tensor(edge_index.flip(0), other * self.lin.bias[0], (len(h), len(h))) @ h
    dropout of columns | refused | h = F.dropout1d(h, 0.5, self.training)
    dropout | carried | h = F.dropout(h, 0.5, self.training)
    alpha dropout | refused | h = F.alpha_dropout(h, 0.5, self.training)
    a number that its class has kept | refused | M.k = getattr(M, 'k', 0) + 1 ;; h = h * M.k
    a number that a list has kept | refused | self.kept = [*(self.kept or []), 1] ;; h = h * (1 if len(self.kept) < 99 else 2)
    an environment that ranks have | refused | import os ;; h = h * (2 if 'LOCAL_WORLD_SIZE' in os.environ else 1)
    ranks that meet | refused | h = h * (2 if torch.distributed.is_initialized() else 1)
    a number that it has kept | refused | self.calls += 1 ;; h = h * self.calls
    rows that it has kept | refused | h = h if self.kept is None else h + self.kept ;; self.kept = h.detach()
    a buffer that it moves | refused | self.seen += 1 ;; h = h * self.seen
    no gradient | carried | with torch.no_grad(): ;;     h = h * 2
    detached | carried | h = h.detach()
    half detached | carried | h = h + (h * 2).detach()
    x changed in place | refused | x.mul_(2) ;; h = self.a(x, edge_index).relu()
    rows changed in place | carried | h = h * 1 ;; h.mul_(2)
    rows of some vertices in place | either | h = h * 1 ;; h[h > 1] = 0
    the first row in place | refused | h = h * 1 ;; h[0] = 0
    what a gradient needs in place | refused | h.mul_(2)
    columns in place | either | h[:, 2:].mul_(2)
    a product with a vector | carried | h = h * (h @ self.lin.weight[0]).unsqueeze(1)
    a product of three | either | h = torch.einsum('ni,ij,nj->n', h, self.lin.weight, h)[:, None] * h
    a convolution over columns | either | h = F.avg_pool1d(h.unsqueeze(1), 3, 1, 1).squeeze(1)
    the largest columns | either | h = torch.zeros_like(h).scatter(1, h.topk(3, 1).indices, 1.0) * h
    rows that are not zero | either | h = torch.zeros_like(h).index_copy(0, h.sum(1).nonzero()[:, 0], h[h.sum(1) != 0])
    whole numbers | either | h = h + h.round().long()
    less precision | either | h = h + h.half().to(h.dtype)
    a Fourier transform of columns | either | h = torch.fft.fft(h, dim=1).real
    distances of vertices | refused | h = torch.cdist(h, h) @ h
    distances to parameters | either | h = torch.cdist(h, self.lin.weight)
    an inverse | refused | h = torch.linalg.solve(torch.eye(8, dtype=h.dtype) + h.t() @ h, h.t()).t()
    attention of columns | either | h = F.scaled_dot_product_attention(h[:, None, None], h[:, None, None], h[:, None, None])[:, 0, 0]
    the unique rows | refused | h = torch.unique(h, dim=0)
    rows by a table | either | h = h + F.embedding(torch.arange(h.size(0)) % 8, self.lin.weight)
    another file's graph | either | import scipy.sparse ;; h = h + float(scipy.sparse.eye(3).nnz)
    compiled | either | h = torch.jit.script(nn.ReLU())(h)
    checkpointed | either | import torch.utils.checkpoint as c ;; h = c.checkpoint(self.lin, h, use_reentrant=False)
    autocast | either | with torch.autocast('cpu', torch.bfloat16): ;;     h = self.lin(h).to(x.dtype)
    vmap | either | h = torch.vmap(lambda row: row * row.sum())(h)
    a branch on a size | refused | h = h * 2 if h.size(0) < 55 else h
    a branch on parity | either | h = h * 2 if h.size(0) % 2 else h
    a loop over vertices | refused | h = torch.stack([row * 2 for row in h])
    through numpy | refused | h = h + torch.from_numpy(np.tanh(h.detach().numpy()))
    through a list | refused | h = h + torch.tensor(x.tolist())[:, :8]
    numpy of edges | refused | h = self.c(h, torch.from_numpy(edge_index.numpy().copy()))
    a gradient of its own | carried | h = Twice.apply(h)
    a gradient of its own, kept by a name | carried | h = twice(h) + Twice.apply(self.lin.bias)
    a gradient of its own, of edges | carried | h = self.c(h, edge_index, Twice.apply(other))
    a gradient of its own, of noise | refused | h = Noise.apply(h)
    several rows of one call through edges | carried | a, b = Pair.apply(h, src, dst) ;; h = self.c(a, edge_index) + b
    several rows of one call, read later | carried | v, i = h.topk(3, 1) ;; h = self.c(self.c(h, edge_index), edge_index).scatter_add(1, i, v)
    attention over hops | carried | h = torch.stack([h, self.c(h, edge_index)], 1) ;; h = self.att(h, h, h)[0].sum(1)
    attention of all to all by a module | refused | h = self.att(h[None], h[None], h[None])[0][0]
    batch norm | carried | h = self.norm(h)
    batch norm of batches alone | refused | h = F.batch_norm(h, None, None, training=True)
    two batch norms | carried | h = self.norm(self.norm(h))
    a transposed product | refused | h = h @ (h.t() @ h)
    rows as columns | refused | h = h.reshape(8, -1).t().contiguous().view(-1, 8)
    a convolution over vertices | refused | h = F.avg_pool1d(h.t().unsqueeze(0), 3, 1, 1)[0].t()
    dropout of parameters | carried | h = h @ F.dropout(self.lin.weight, 0.5, self.training)
    dropout of one row for all | carried | h = h * F.dropout(torch.ones(5, dtype=h.dtype), 0.5, self.training).mean()
    an environment that it changes | refused | import os ;; os.environ['CALLS'] = os.environ.get('CALLS', '') + '.' ;; h = h * (1 if len(os.environ['CALLS']) < 99 else 2)
    its first rows | refused | self.kept = h.detach() if self.kept is None else self.kept ;; h = h + self.kept
    a branch on many vertices | refused | h = h * 2 if int(h.size(0)) > 999 else h
    a branch on digits | refused | h = h * len(str(h.size(0)))
    rows by blocks | refused | h = torch.cat([c * i for i, c in enumerate(h.split(100), 1)])
    the first edge of each reader | refused | first = torch.full((len(h),), dst.numel()).scatter_reduce(0, dst, torch.arange(dst.numel()), 'amin') ;; h = h + h[torch.cat([src, src[:1]])[first]]
    equal edges that weigh another | carried | twice = torch.cat([edge_index, edge_index], 1) ;; w = torch.cat([other, degree(src, h.size(0)).to(h.dtype)[src]]) ;; h = torch.zeros_like(h).index_add(0, twice[1], w[:, None] * h[twice[0]])
    a sparse matrix with loops | carried | loops, _ = add_self_loops(edge_index, num_nodes=len(h)) ;; a = torch.sparse_coo_tensor(loops.flip(0), degree(loops[1], len(h))[loops[1]].to(h.dtype), (len(h), len(h))) ;; h = a @ h
    a function that it patches | refused | old, F.relu = F.relu, lambda t, inplace=False: old(t) * 2 ;; try: ;;     h = F.relu(h) ;; finally: ;;     F.relu = old
    a gradient's hook | either | h.register_hook(lambda g: g * 2) if h.requires_grad else None
"""
# what is done to the module after it was made
WHEN_MADE = """
    another message | either | self.a.message = lambda x_j, edge_weight: x_j * 2
    a hook after | either | self.a.register_forward_hook(lambda m, i, o: o * 2)
    a hook before | either | self.a.register_forward_pre_hook(lambda m, i: (i[0] * 2, *i[1:]))
    a hook of messages | either | self.a.register_message_forward_hook(lambda m, i, o: o * 2)
    a hook of gradients | either | self.lin.register_full_backward_hook(lambda m, i, o: None)
    frozen | carried | self.a.requires_grad_(False)
    all is frozen | refused | self.requires_grad_(False)
    max of messages | carried | self.a = GraphConv(in_channels, 8, aggr='max')
    against the edges | refused | self.a = GraphConv(in_channels, 8, flow='target_to_source')
    tied | carried | self.c.lin.weight = self.lin.weight
    weight norm | carried | nn.utils.parametrizations.weight_norm(self.a.lin_rel)
    spectral norm | either | nn.utils.parametrizations.spectral_norm(self.a.lin_rel)
    another forward | refused | old = self.a.forward; self.a.forward = lambda *x: old(*x) * 2
    a hook of a parameter | refused | self.lin.weight.register_hook(lambda g: g.clamp(-1, 1))
    always in training | refused | self.norm.train = lambda mode=True: self.norm
    never in training | carried | self.norm.running_mean.normal_(); self.norm.eval().train = lambda mode=True: self.norm
"""
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
    quiet("torch_geometric")


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
        expected, found = [], []
        for kind, into in (("itself", expected), ("pieces", found)):
            module.train(is_training).zero_grad()
            buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
            values = small.given(torch.float64)
            if kind == "itself":
                with as_pieces_draw(pieces, small.whole, Drop(0.0, 7)):
                    out = pieces.binding.call(module, values)
            else:
                out = in_parts(pieces, small, is_training)
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


def read_table(text: str) -> dict[str, tuple[str, bool | None]]:
    rows = [line.strip().split(" | ", 2) for line in text.strip().splitlines()]
    may = {"carried": True, "refused": False, "either": None}
    return {name: (code.replace(" ;; ", "\n"), may[word]) for name, word, code in rows}


FORWARD, MADE = read_table(IN_FORWARD), read_table(WHEN_MADE)


def by_day(changes: dict[str, tuple[str, bool | None]]) -> list[Any]:
    """By day every tenth change, beside the rules of test_module_cases.py."""
    carried = [name for name, (_, carried) in changes.items() if carried]
    refused = [name for name, (_, carried) in changes.items() if carried is False]
    often = {*carried[::10], *refused[::10]}
    return [name if name in often else pytest.param(name, marks=NIGHTLY) for name in changes]


@pytest.mark.slow
@pytest.mark.parametrize("change", [*by_day(FORWARD), *by_day(MADE), *every(5, KEPT)])
def test_a_change_is_carried_as_it_is_or_refused(change, tmp_path):
    """What is kept between calls is refused if calls change it."""
    if change in KEPT:
        (more, body), carried = KEPT[change], change == "a tensor in a list"
    else:
        code, carried = (FORWARD | MADE)[change]
        more, body = (code, SHOWN) if change in MADE else ("pass", code)
    found = outcome(tmp_path, body, more, directed=False)
    print(f"{change:40} {found.partition('M: ')[2] or found}")
    assert_is_as_expected(found, carried)


@pytest.mark.nightly
@pytest.mark.parametrize("change", FORWARD)
def test_on_edges_one_way_none_is_something_else(change, tmp_path):
    found = outcome(tmp_path, FORWARD[change][0], "pass", directed=True)
    assert_is_as_expected(found, None)
