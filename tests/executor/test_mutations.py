"""Small changes of modules that change what is computed: none is trained as something else.

Each is a sentence of forward, or of what is done to the module before. Either it is carried, and
then its pieces equal the module itself on a graph that they have not seen, or it is refused with a
sentence. What is neither is a fault: another error, or other numbers."""

import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from nightly import NIGHT, at_night
from written import quiet

from gnnplan.executor.modules.bind import Small
from gnnplan.executor.modules.prove import prove
from gnnplan.executor.modules.read import GraphFields, read
from gnnplan.planner.gnn.workload import Workload
from gnnplan.planner.vocabulary.errors import SpecError

FEATURES, CLASSES = 12, 4
SIZES = (60, 97) if NIGHT else (60,)  # of graphs that nobody has looked at
VERTEX = {"pos": ((3,), "<f8", 0), "kind": ((), "<i8", 3)}
EDGE = {"edge_attr": ((5,), "<f8", 0), "edge_weight": ((), "<f8", 0), "other": ((), "<f8", 0)}
SOURCE = """
import itertools
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch_geometric.nn import BatchNorm, EdgeConv, GCNConv, GraphConv, GraphSizeNorm, InstanceNorm, SAGEConv
from torch_geometric.utils import add_self_loops, degree, dropout_edge, softmax

class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2
    @staticmethod
    def backward(ctx, gradient):
        return gradient * 3

class Clipped(Twice):
    @staticmethod
    def backward(ctx, gradient):
        return gradient.clamp(-1e-3, 1e-3)

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

    def forward(self, x, edge_index, pos, kind, edge_attr, edge_weight, other):
        src, dst = edge_index
        h = self.a(x, edge_index).relu()
        {body}
        return self.b(h, edge_index)
"""
# what forward does between its two convolutions: its name, whether it must be carried or refused
# (either will do, if it equals itself; in words that are given: by day too), and lines of code,
# between which ;; stands; the first is line 1
IN_FORWARD = r"""
    nothing | carried | h = h + 0
    edges backwards | carried | h = self.c(h, edge_index.flip(0))
    edges backwards by hand | carried by day | few = torch.bincount(src, minlength=len(h)).clamp(min=1)[src, None] ;; h = torch.zeros_like(h).index_add_(0, src, self.lin(h)[dst].tanh() / few)
    edges backwards, with their weights | adds rows up at edge_index\[0\] | h = torch.zeros_like(h).index_add_(0, src, other[:, None] * h[dst])
    edges backwards, dropped | adds rows up at edge_index\[0\] | h = torch.zeros_like(h).index_add_(0, src, F.dropout(h[dst], 0.5, self.training))
    the first edges | line 1: getitem makes other edges of a part .* edges by their places | h = self.c(h, edge_index[:, :40])
    edges of heavy weight | either | h = self.c(h, edge_index[:, edge_weight > 0.6])
    edges to larger ids | either | h = self.c(h, edge_index[:, src < dst])
    edges of two hops | refused | h = self.c(h, torch.stack([src, src[torch.randperm(src.numel(), generator=torch.Generator().manual_seed(1))]]))
    a weight | carried | h = self.c(h, edge_index, edge_weight)
    a weight of mean one | carried | h = self.c(h, edge_index, edge_weight / edge_weight.mean())
    weights sorted | either | h = self.c(h, edge_index, edge_weight.sort().values)
    a column of attributes | carried | h = self.c(h, edge_index, edge_attr[:, 3])
    positions | carried | h = h * pos.norm(dim=1, keepdim=True)
    softmax over vertices | line 1: softmax gives vertex \d+ another row | h = h.softmax(0)
    softmax over columns | carried | h = h.softmax(1)
    softmax over sources | refused | h = torch.zeros_like(h).index_add_(0, dst, h[src] * softmax(h[src], src))
    mean of all rows | refused | h = h - h.mean(0)
    sorted rows | refused | h = h.sort(0).values
    the row of the next vertex | refused | h = h.roll(1, 0)
    the row of vertex 0 | refused | h = h + h[0]
    columns summed up | carried | h = h.cumsum(1)
    the largest ten | refused | h = torch.zeros_like(h).index_copy(0, h[:, 0].topk(10).indices, h[:10])
    attention of all to all | refused | h = (h @ h.t()).softmax(1) @ h
    the rank of a vertex | either | h = h * torch.arange(h.size(0)).unsqueeze(1)
    number of vertices | line 1: div of a graph of 1,201 vertices is another call | h = h / float(x.size(0)) ** 0.5
    number of edges | either | h = h / edge_index.size(1)
    rows as len says it | carried | h = h * torch.ones(len(h), 8, dtype=h.dtype)
    number of parameters | carried | h = h / self.lin.weight.numel()
    degree of sources | carried | h = h * degree(src, h.size(0)).unsqueeze(1)
    the largest degree | either | h = h / degree(dst, h.size(0)).max()
    evaluation of its own | carried | h = h if self.training else h * 0.5
    other edges in evaluation | refused | h = self.c(h, edge_index) if self.training else self.c(h, edge_index[:, :30])
    a layer less in evaluation | forward hands on \d+ numbers per vertex in 3 layers in training, and \d+ .* in 2 layers in | h = self.c(h, edge_index) if self.training else h
    a sparse matrix | carried | h = torch.sparse_coo_tensor(edge_index.flip(0), edge_weight, (len(h), len(h))) @ h
    a sparse matrix of sources | carried | h = torch.sparse_coo_tensor(edge_index, other, (len(h), len(h))) @ h
    a sparse matrix of two hops | refused | a = torch.sparse_coo_tensor(edge_index.flip(0), other, (len(h), len(h))) ;; h = torch.sparse.mm(torch.sparse.mm(a, a), h)
    a sparse matrix over columns | either | a = torch.sparse_coo_tensor(edge_index[:, :3] * 0, other[:3], (8, 8)) ;; h = (a @ h.t()).t()
    learned numbers in a sparse matrix | line 1: .* of numbers that are learned or dropped, whose gradient torch makes of all pairs | h = torch.sparse_coo_tensor(edge_index.flip(0), other * self.lin.bias[0], (len(h), len(h))) @ h
    chosen edges in a sparse matrix | line 2: .* of edges that rows of vertices choose, .*; multiply rows by weights w of the edges, 0 for | some = edge_index[:, x[src, 0] > 0.5] ;; h = torch.sparse_coo_tensor(some.flip(0), torch.ones(some.size(1)).to(x), (len(h), len(h))) @ h
    a relabelled subgraph | line 2: full is given 1202 on .* no number of vertices or edges: .*relabel_nodes.; keep all vertices | from torch_geometric.utils import subgraph ;; few, _ = subgraph(degree(dst, len(x)) > 1, edge_index, relabel_nodes=True, num_nodes=len(x)) ;; h = h + self.c(h, few)
    a dense matrix | line 2: .* in place in to_dense_adj, .*leave that function out.* torch.sparse_coo_tensor | from torch_geometric.utils import to_dense_adj ;; h = to_dense_adj(edge_index, max_num_nodes=len(h))[0] @ h
    dropout of whole edges | line 1: getitem leaves out edges by dropout, .*; weigh them, to drop whole ones, by F.dropout | h = self.c(h, edge_index[:, F.dropout(torch.ones(src.numel()), 0.3, self.training) > 0])
    dropout of columns | refused | h = F.dropout1d(h, 0.5, self.training)
    a number that its class has kept | refused | M.k = getattr(M, 'k', 0) + 1 ;; h = h * M.k
    a number that a list has kept | refused | self.kept = [*(self.kept or []), 1] ;; h = h * (1 if len(self.kept) < 99 else 2)
    an environment that ranks have | refused | import os ;; h = h * (2 if 'LOCAL_WORLD_SIZE' in os.environ else 1)
    ranks that meet | refused | h = h * (2 if torch.distributed.is_initialized() else 1)
    a number that it has kept | its second call on a graph makes other rows than its first | self.calls += 1 ;; h = h * self.calls
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
    attention of columns | either | h = F.scaled_dot_product_attention(h[:, None, None], h[:, None, None], h[:, None, None])[:, 0, 0]
    the unique rows | refused | h = torch.unique(h, dim=0)
    rows by a table | either | h = h + F.embedding(torch.arange(h.size(0)) % 8, self.lin.weight)
    another file's graph | either | import scipy.sparse ;; h = h + float(scipy.sparse.eye(3).nnz)
    compiled | either | h = torch.jit.script(nn.ReLU())(h)
    autocast | line 2: .*autocast | with torch.autocast('cpu', torch.bfloat16): ;;     h = self.lin(h).to(x.dtype)
    vmap | either | h = torch.vmap(lambda row: row * row.sum())(h)
    a branch on a size | refused | h = h * 2 if h.size(0) < 55 else h
    a loop over vertices | refused | h = torch.stack([row * 2 for row in h])
    through numpy | refused | h = h + torch.from_numpy(np.tanh(h.detach().numpy()))
    through a list | refused | h = h + torch.tensor(x.tolist())[:, :8]
    numpy of edges | refused | h = self.c(h, torch.from_numpy(edge_index.numpy().copy()))
    a gradient of its own | carried | h = Twice.apply(h)
    a gradient of its own, kept by a name | carried | h = twice(h) + Twice.apply(self.lin.bias)
    a gradient of its own, of edges | carried | h = self.c(h, edge_index, Twice.apply(other))
    a gradient of its own, clipped | line 1: Clipped makes a gradient of its own, which must be linear.*its gradient of a\.lin_root | h = h + self.c(Clipped.apply(self.a.lin_root(x)), edge_index)
    a gradient of its own, of noise | refused | h = Noise.apply(h)
    several rows of one call through edges | carried | a, b = Pair.apply(h, src, dst) ;; h = self.c(a, edge_index) + b
    several rows of one call, read later | carried | v, i = h.topk(3, 1) ;; h = self.c(self.c(h, edge_index), edge_index).scatter_add(1, i, v)
    attention over hops | carried | h = torch.stack([h, self.c(h, edge_index)], 1) ;; h = self.att(h, h, h)[0].sum(1)
    attention of all to all by a module | refused | h = self.att(h[None], h[None], h[None])[0][0]
    batch norm of batches alone | refused | h = F.batch_norm(h, None, None, training=True)
    two batch norms | carried | h = self.norm(self.norm(h))
    a transposed product | refused | h = h @ (h.t() @ h)
    rows as columns | refused | h = h.reshape(8, -1).t().contiguous().view(-1, 8)
    a convolution over vertices | refused | h = F.avg_pool1d(h.t().unsqueeze(0), 3, 1, 1)[0].t()
    dropout of parameters | carried | h = h @ F.dropout(self.lin.weight, 0.5, self.training)
    dropout of one row for all | carried | h = h * F.dropout(torch.ones(5, dtype=h.dtype), 0.5, self.training).mean()
    an environment that it changes | refused | import os ;; os.environ['CALLS'] = os.environ.get('CALLS', '') + '.' ;; h = h * (1 if len(os.environ['CALLS']) < 99 else 2)
    a branch on many vertices | refused | h = h * 2 if int(h.size(0)) > 999 else h
    rows in chunks | carried | h = torch.cat([F.dropout(self.lin(c), 0.5, self.training) for c in h.split(20)])
    rows in one chunk | carried | h = torch.cat([self.lin(c) for c in torch.split(h, 100000)])
    edges in chunks | carried | m = torch.cat([self.lin(c) for c in h[src].chunk(3)]) ;; h = torch.zeros_like(h).index_add(0, dst, m)
    a mean of chunks | line 1: split cuts rows into chunks, and forward makes other rows where there are more or fewer | h = torch.cat([c - c.mean() for c in h.split(100000)])
    halves of the rows | line 1: .*not enough values to unpack.* split columns alone, by dim=1 | a, b = h.chunk(2) ;; h = torch.cat([b, a])
    rows by blocks | refused | h = torch.cat([c * i for i, c in enumerate(h.split(100), 1)])
    the first edge of each reader | refused | first = torch.full((len(h),), dst.numel()).scatter_reduce(0, dst, torch.arange(dst.numel()), 'amin') ;; h = h + h[torch.cat([src, src[:1]])[first]]
    equal edges that weigh another | carried | twice = torch.cat([edge_index, edge_index], 1) ;; w = torch.cat([other, degree(src, h.size(0)).to(h.dtype)[src]]) ;; h = torch.zeros_like(h).index_add(0, twice[1], w[:, None] * h[twice[0]])
    a sparse matrix with loops | carried | loops, _ = add_self_loops(edge_index, num_nodes=len(h)) ;; a = torch.sparse_coo_tensor(loops.flip(0), degree(loops[1], len(h))[loops[1]].to(h.dtype), (len(h), len(h))) ;; h = a @ h
    a function that it patches | refused | old, F.relu = F.relu, lambda t, inplace=False: old(t) * 2 ;; try: ;;     h = F.relu(h) ;; finally: ;;     F.relu = old
    a gradient's hook | line 1: register_hook changes gradients | h.register_hook(lambda g: g * 2) if h.requires_grad else None
    rows of its own | cannot have a row | h = h + torch.ones(600, 8)
    rows of its own beside | that graph has 53 vertices: a module's own tensors cannot have a row | h = torch.cat([h, self.lin.weight.new_ones(600, 2)], 1)
    rows one above the other | line 1: cat makes \[159, 8\] of the rows of all 53 vertices | return self.lin(torch.cat([h, h, h]))
    sparse gradients | lin.weight has sparse gradients, and ranks add dense ones; leave out sparse=True | h = h + F.embedding(torch.zeros_like(h[:, 0]).long(), self.lin.weight, sparse=True)
    a branch on rows | line 1: forward asks for the numbers in a tensor \(bool\) | h = h * 2 if x.sum() > 0 else h
    a comparison of rows | line 1: forward asks for the numbers in a tensor \(allclose\) | h = h * 2 if torch.allclose(h, h + 1) else h
    a branch on degrees | line 1: forward asks for the numbers in a tensor \(max\) | most = torch.bincount(dst).max().item() ;; h = h if most > 50 else h * 2
    a wrong width | line 1: forward fails on a small graph of 12 features \(RuntimeError: mat1 and mat2 | h = self.lin(x)
    beyond a list's end | line 1: .*list index out of range\)$ | h = [h][1]
    an assertion without words | line 1: .*AssertionError: assert x.dim\(\) == 3 | assert x.dim() == 3
    dropout in evaluation | line 1: dropout drops in evaluation too | h = F.dropout(h)
    dropout of all | line 1: dropout of p=1 leaves nothing; use p < 1 | h = F.dropout(h, 1.0, self.training)
    dropout of some rows | line 2: dropout is given rows of some vertices | k, some = torch.zeros_like(x), x[:, 0] > 0 ;; k[some] = F.dropout(x[some], 0.5, self.training) ;; h = self.a(k, edge_index)
    edges by rows | line 1: forward chooses edges by x of vertices | kept = x[src, 0] > x[dst, 0] ;; return self.b(h, edge_index[:, kept])
    a weight's data | line 1: clamp changes lin.weight in place, which would be lost | self.lin.weight.data.clamp_(-9, 9) ;; h = self.lin(h)
    a weight in place | line 2: .* changes lin.weight in place, which would be lost | with torch.no_grad(): ;;     self.lin.weight *= 1.0 ;; h = self.lin(h)
    Python's random numbers | draws random numbers of Python's or numpy's | import random ;; h = h * 0 if random.random() < 1e-9 else h
    numpy's random numbers | draws random numbers of Python's or numpy's | h = h * 0 if np.random.rand() < 1e-9 else h
    calls that it has counted | forward changes self.calls from call to call | self.calls += 1 ;; h = h * (1 if self.calls < 4 else 2)
    calls that a global has counted | forward changes model\.py: CALLS from call to call | global CALLS ;; CALLS = globals().get('CALLS', 0) + 1 ;; h = h * (1 if CALLS < 99 else 2)
    kept by training | keeps something of training that evaluation reads | if self.training: ;;     self.kept = h.mean(0).detach() ;; h = h if self.training or self.kept is None else h - self.kept
    numbers that torch does not see | something that torch does not see makes a tensor in forward itself | with torch._C.DisableTorchFunction(): ;;     w = self.a.lin_rel.bias.detach() * 2 ;; h = h * w
    an environment that tells the rank | it makes other rows in the process of rank 1 of 2 than here | import os ;; h = h * int(os.environ.get('RANK', 7))
    an end of the process | its process ends with code 3 while forward runs | import os ;; os._exit(3)
    a signal that ends the process | its process ends by SIGABRT while forward runs | import os ;; os.abort()
    edges as a matrix | line 1: .*it multiplies by edge_index \[2, E\], whose matrix is torch.sparse_coo | h = torch.spmm(edge_index, h)
    a matrix of an old constructor | line 1: a sparse matrix is made by no call of torch's | h = torch.sparse.FloatTensor(edge_index.flip(0), torch.ones(edge_index.size(1))) @ h
    a sparse matrix in no product | line 2: .* of a sparse matrix is no product with rows | a = torch.sparse_coo_tensor(edge_index.flip(0), other, (len(h), len(h))) ;; h = torch.sparse.addmm(h, a, h)
    ids among features | line 1: .*features are random numbers there, and no ids | h = nn.Embedding(9, 8)(x[:, 0].long())
    a width by the largest of all | line 1: one_hot gives .* as one_hot with num_classes | h = h + F.one_hot(kind).sum(1, keepdim=True)
    a width that is given | carried | h = h + F.one_hot(kind, 3).sum(1, keepdim=True)
    rows of some | forward returns \[\d+, 4\] of 53 vertices | return self.b(h, edge_index)[x[:, 0] > 0]
    a pool of all rows | line 2: index_add makes \[1, 8\] of the rows of all 53 vertices | batch = torch.zeros(x.size(0), dtype=torch.long) ;; h = h + torch.zeros(int(batch.max()) + 1, 8).to(h).index_add(0, batch, h)[batch]
    vertices by degree | line 2: its calls of torch fail on parts .* as nonzero\(\) of degrees tells | few = (torch.bincount(dst, minlength=len(x)) < 9).nonzero()[:, 0] ;; h = h.index_add(0, few, h[few])
    chance | line 1: bernoulli draws random numbers | h = h * torch.bernoulli(torch.FloatTensor([0.5])).to(h)
    autograd asked for | makes other rows in evaluation where autograd is off | h = h if torch.is_grad_enabled() else -h
    a momentum that changes | forward changes self.norm.momentum from call to call | self.norm.momentum *= 0.9 ;; h = self.norm(h)
    numpy's array of a weight | line 1: forward asks for the numbers in a tensor \(array\) | h = h * torch.tensor(np.tanh(np.asarray(self.lin.bias.detach())))
    a gradient kept in training | carried by day | h = h * 1.0 ;; if self.training: ;;     h.retain_grad()
    weighed sums of whole numbers | carried by day | kinds = F.one_hot(kind, 3)[src] * other[:, None] ;; h = h + torch.zeros(len(x), 3).to(h).index_add(0, dst, kinds).sum(1, keepdim=True)
    a table by degree | carried by day | h = h + F.one_hot(torch.bincount(dst, minlength=len(x)), 64).to(h)[:, 2:3]
    several values | forward returns several values | return h, x
    a dict | a dict; retu | return {'x': h}
    no convolution | no convolution's rows reach the output | return self.lin(x[:, :8])[:, :4]
    no class per column | rows of 8 numbers, and the graph has 4 classes | return h
    infinite rows | are not finite | h = h / 0
    dropped edges | random | e, _ = dropout_edge(edge_index, p=0.2, training=self.training) ;; h = self.c(h, e)
    sums over edges, one with alpha | carried by day | h = h + torch.zeros_like(h).index_add(0, dst, h[src], alpha=0.5) ;; fewer = torch.zeros_like(h[:, 1:]).index_add(0, dst, h[src, 1:]) ;; h = torch.tanh(h + fewer.sum(1, keepdim=True)) ;; h = (0 * self.lin.bias).repeat(h.size(0), 1).index_add(0, dst, h[src]) ;; h = torch.zeros(int(edge_index.max()) + 1, 8).index_add(0, dst, torch.tanh(h)[src])
    numbers of float32 | carried by day | h = self.a(x.float(), edge_index) + torch.ones(x.size(0), 8) + 1
    constants that torch does not see made | carried by day | h = h * (torch.FloatTensor([0.5, 2.0]).to(x) * torch.from_numpy(np.arange(8.0)).to(x)[:2]).repeat(4)
    sorted edges | carried by day | types, order = torch.sort(dst % 2) ;; ends = torch.searchsorted(types, torch.arange(3)) ;; scale = torch.bincount(src, minlength=x.size(0)) + 1.0 ;; m = torch.tanh(h)[src[order]] / scale[src[order], None].to(x) ;; m = torch.where((torch.arange(len(order)) < ends[1])[:, None], m, m.cos()) ;; h = torch.zeros(x.size(0), 8).to(x).index_add(0, dst[order], m)
    segments of edges | carried by day | order, degrees = torch.argsort(dst), torch.bincount(dst, minlength=x.size(0)) ;; h = torch.segment_reduce(h[src[order]], "max", lengths=degrees, initial=0.0).cos()
    several rows of each vertex | carried by day | t = torch.cat([h, self.c(h, edge_index)], 1).view(2 * len(h), 8) ;; t = F.dropout(self.norm(self.lin(t)).relu(), 0.5, self.training) ;; h = h + t.view(len(h), -1, 8).amax(1)
    as many rows as a field says | no rows of edges | ids = torch.arange(len(h)).repeat_interleave(kind + 1) ;; h = torch.zeros_like(h).index_add(0, ids, F.dropout(h[ids].tanh(), 0.5, self.training))
    vertices in the second dimension | carried by day | two = F.dropout(torch.stack([h, self.lin(h)]), 0.5, self.training) ;; h = self.c(two[0], edge_index).tanh() + two[1] + two.sum(0)
    rows that dropout alone makes others | carried by day | k = h ;; for _ in range(2): ;;     h = self.c(h, edge_index) + self.lin(F.dropout(k, 0.5, self.training))
    checkpoints, also of dropout | carried by day | import torch.utils.checkpoint as c ;; h = c.checkpoint(self.c, h, edge_index, use_reentrant=True) ;; h = c.checkpoint(lambda h: F.dropout(h, 0.5, self.training), h, use_reentrant=False)
    ends apart from edges | carried by day | matrix = torch.sparse_coo_tensor(edge_index.flip(0), torch.ones_like(dst), (len(x), len(x))) ;; degrees, own = torch.sparse.sum(matrix, 1).to_dense(), torch.arange(len(x)) ;; for _ in range(2): ;;     reads, sends = torch.cat([dst, own]), torch.cat([src, own]) ;;     h = torch.zeros_like(h).index_add(0, reads, F.dropout(h[sends], 0.5, self.training)) ;;     some = degrees[dst] > 2 ;;     h = torch.zeros_like(h).index_add(0, dst[some], h[src[some]] / degrees[src[some], None])
    a norm at the end, and a sum in place | carried by day | h = F.relu(self.norm(self.c(h, edge_index)), inplace=True) ;; h = F.dropout(h, 0.5, self.training) ;; h += self.lin(x[:, :8])
    two norms of the same rows | carried by day | h = self.norm(h).relu() + self.norm(h)
    a warning | carried by day | import warnings ;; with warnings.catch_warnings(): ;;     warnings.simplefilter("ignore") ;;     warnings.warn("sparse matrices are in beta") ;; h = h ** 2
"""
# what is done to the module after it was made
WHEN_MADE = r"""
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
    medians, which PyG lacks of nobody | index out of range | self.a = SAGEConv(in_channels, 8, aggr='median')
    an LSTM of neighbours | numbered in reverse | self.a = SAGEConv(in_channels, 8, aggr='lstm')
    a norm of edges | carried by day | self.a = EdgeConv(nn.Sequential(nn.Linear(24, 8), nn.BatchNorm1d(8)))
    a norm of heads of edges | batch norm of \[\d+, 2, 4\]; flatten its rows | self.a = EdgeConv(nn.Sequential(nn.Linear(24, 8), nn.Unflatten(1, (2, 4)), nn.BatchNorm1d(2), nn.Flatten()))
    a norm of the batch | track_running_stats=True | self.norm = BatchNorm(8, track_running_stats=False)
    a norm of cumulative momentum | asks for the numbers in a tensor | self.norm = nn.BatchNorm1d(8, momentum=None)
    a norm of the instance | looks at all vertices | self.norm = InstanceNorm(8)
    a norm by the graph's size | carried by day | self.norm = GraphSizeNorm()
    never in training | carried | self.norm.running_mean.normal_(); self.norm.eval().train = lambda mode=True: self.norm
"""
SHOWN = "h = self.norm(self.lin(self.c(h, edge_index)))"  # so that a change of any part shows
# what the module keeps, and what forward does with it
KEPT = r"""
    a cycle | refused | self.kept = itertools.cycle([1, 1, 1, 1, 1, 1, 2]) | h = h * next(self.kept)
    a function around a number | refused | n = [0] ;; def step(): ;;     n[0] += 1 ;;     return 1 + n[0] // 99 ;; self.kept = step | h = h * self.kept()
    a generator of numpy's | refused | self.kept = np.random.default_rng(1) | h = h * (1 if self.kept.random() < 0.99 else 2)
    a buffer of whole numbers | refused | del self.kept; self.register_buffer('kept', torch.zeros((), dtype=torch.long)) | self.kept += 1 ;; h = h * (1 + 2 * (self.kept > 99).to(h.dtype))
    a tensor that counts | refused | self.kept = torch.zeros(()) | self.kept = self.kept + 1 ;; h = h * (1 + 2 * (self.kept > 99).to(h.dtype))
    numpy's number | refused | self.kept = np.int64(0) | self.kept = self.kept + 1 ;; h = h * (3 if self.kept > 99 else 1)
    a set that grows | refused | self.kept = set() | self.kept.add(len(self.kept)) ;; h = h * (3 if len(self.kept) > 99 else 1)
    a tensor in a list | carried | self.kept = [torch.ones(8)] | h = h * self.kept[0].to(h.dtype)
    a counter in a namespace | forward changes self.kept from call to call | import argparse; self.kept = argparse.Namespace(n=0) | self.kept.n += 1 ;; h = h * (3 if self.kept.n > 99 else 1)
    an array that counts | forward changes self.kept from call to call | self.kept = np.zeros(1) | self.kept += 1 ;; h = h * (3 if self.kept[0] > 99 else 1)
    a schedule with a lambda | forward changes self.kept.last_epoch from call to call | self.kept = torch.optim.lr_scheduler.LambdaLR(torch.optim.SGD([nn.Parameter(torch.ones(1))], 1.0), lambda t: 1.0) | self.kept.last_epoch += 1 ;; h = h * (3 if self.kept.last_epoch > 99 else 1)
    gates of 0 | adds rows up at edge_index\[0\] | self.kept = nn.ParameterList([torch.zeros(()), torch.zeros(())]) | w = softmax(other * (h[src] * h[dst]).sum(1), src, num_nodes=len(h)) ;; h = self.kept[0] * (h + self.kept[1] * torch.zeros_like(h).index_add(0, dst, w[:, None] * h[src]))
    as many columns as small graphs have rows | carried by day | self.kept = nn.ModuleList([nn.Linear(8, 53), SAGEConv(53, 8)]) | h = self.kept[1](self.kept[0](h).relu(), edge_index)
    a softmax over sources | carried by day | self.kept = None | w = softmax((h[src] * h[dst]).sum(1), src, num_nodes=len(h)) ;; h = torch.zeros_like(h).index_add(0, dst, w[:, None] * h[src])
    a layer in a list | refused | self.kept = [nn.Linear(8, 8).double()] | h = self.kept[0](h)
"""


class Change(NamedTuple):
    outcome: str  # carried, refused, either, or words of the refusal
    more: str  # after the module's own parts are made
    body: str


def read_table(text: str, then: str = "") -> dict[str, Change]:
    """Of changes in forward, or of what is made if something follows in forward."""
    found = {}
    for row in text.strip().splitlines():
        name, outcome, *code = row.replace(" ;; ", "\n").strip().split(" | ")
        found[name] = Change(outcome, *(code if code[1:] else ["pass", *code]))
        if then and not code[1:]:
            found[name] = Change(outcome, code[0], then)
    return found


FORWARD, MADE, KEEPING = read_table(IN_FORWARD), read_table(WHEN_MADE, SHOWN), read_table(KEPT)
FIRST = SOURCE[: SOURCE.index("{body}")].count("\n") + 1  # the line of forward's own code


@pytest.fixture(scope="module", autouse=True)
def pyg():
    quiet("torch_geometric")


def outcome(folder: Path, change: Change, directed: bool) -> str:
    """'carried', if it then is itself, or the words of the refusal."""
    file = folder / "model.py"
    more, body = (code.replace("\n", "\n        ") for code in (change.more, change.body))
    file.write_text(SOURCE.replace("{body}", body).replace("{more}", more))
    graph = GraphFields(FEATURES, CLASSES, directed, False, VERTEX, EDGE)
    try:
        user = read(f"{file}:M", Workload(dtype="float64"), graph)
    except SpecError as refused:
        place, _, words = str(refused).partition(": M: ")
        assert place == str(file) and refused.exit_code == 2
        return words
    assert user.pieces is not None
    for vertices in SIZES:
        prove(user.module, user.pieces, Small(vertices, user.module, graph))
    return "carried"


def must_be(expected: str, found: str) -> None:
    if found == "carried":
        assert expected.startswith(("carried", "either"))
        return
    assert not expected.startswith("carried"), found
    assert len(found.split()) > 6 and "Traceback" not in found, found
    if expected not in ("refused", "either"):
        words = re.sub(r"line (\d+)", lambda at: f"line {int(at[1]) + FIRST - 1}", expected)
        assert re.search(words, found), found


def by_day(changes: dict[str, Change]) -> list[Any]:
    """By day those of which more is told, and every tenth of the others."""
    often = {name for name, change in changes.items() if " " in change.outcome}
    for word in ("carried", "refused"):
        often |= {*[name for name, change in changes.items() if change.outcome == word][::10]}
    return [name if name in often else at_night(name) for name in changes]


@pytest.mark.slow
@pytest.mark.parametrize("change", [*by_day(FORWARD), *by_day(MADE), *by_day(KEEPING)])
def test_a_change_is_carried_as_it_is_or_refused(change, tmp_path):
    """What is kept between calls is refused if calls change it."""
    asked = (FORWARD | MADE | KEEPING)[change]
    must_be(asked.outcome, outcome(tmp_path, asked, directed=False))


@pytest.mark.nightly
@pytest.mark.parametrize("change", FORWARD)
def test_on_edges_one_way_none_is_something_else(change, tmp_path):
    must_be("either", outcome(tmp_path, FORWARD[change], directed=True))
