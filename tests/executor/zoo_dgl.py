"""Modules of DGL as users write them; zoo.py has those of PyG, and says what a chain is."""

from __future__ import annotations

import dgl
import dgl.function as fn
import dgl.nn.pytorch as dglnn
import torch
import torch.nn as nn
import torch.nn.functional as F
from dgl.nn.functional import edge_softmax
from zoo_entries import needs


class Chain(nn.Module):
    """Layers one after the other, and ReLU between them; heads stand side by side."""

    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, g, x):
        for layer in self.layers[:-1]:
            x = F.relu(layer(g, x).flatten(1))
        return self.layers[-1](g, x).flatten(1)


@needs()
def Convolutions(in_size, out_size):
    return Chain(
        dglnn.GATConv(in_size, 4, 2, residual=True, activation=F.elu),
        dglnn.GATv2Conv(8, 4, 2, share_weights=True),
        dglnn.GINConv(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), learn_eps=False),
        dglnn.TAGConv(8, 8, k=2, activation=F.relu),
        dglnn.SAGEConv(8, 8, "pool", activation=F.relu),
        dglnn.SAGEConv(8, out_size, "gcn"),
    )


@needs("edge_type")
class SortsByType(nn.Module):
    """Products of edges that are sorted by type; a constant of torch.Tensor."""

    def __init__(self, in_feats, out_feats):
        super().__init__()
        self.a = dglnn.RelGraphConv(in_feats, 16, 2, "basis", 2, layer_norm=True, dropout=0.2)
        self.b = dglnn.ChebConv(16, out_feats, 2)

    def forward(self, g, x, edge_type):
        return self.b(g, self.a(g, x, edge_type).relu(), [2.0])


@needs()
def DroppingGAT(in_size, out_size):
    """A kernel of DGL hides what is dropped of the edges."""
    dropping = dglnn.GATConv(in_size, 8, 4, feat_drop=0.6, attn_drop=0.6, activation=F.elu)
    return Chain(dropping, dglnn.GATConv(32, out_size, 1))


class UserGATLayer(nn.Module):
    """The one of DGL's tutorial: functions of edges and of mailboxes."""

    def __init__(self, in_dim, out_dim):
        super().__init__()
        self.fc = nn.Linear(in_dim, out_dim, bias=False)
        self.attn_fc = nn.Linear(2 * out_dim, 1, bias=False)

    def edge_attention(self, edges):
        z2 = torch.cat([edges.src["z"], edges.dst["z"]], dim=1)
        return {"e": F.leaky_relu(self.attn_fc(z2))}

    def message_func(self, edges):
        return {"z": edges.src["z"], "e": edges.data["e"]}

    def reduce_func(self, nodes):
        alpha = F.softmax(nodes.mailbox["e"], dim=1)
        return {"h": torch.sum(alpha * nodes.mailbox["z"], dim=1)}

    def forward(self, g, h):
        with g.local_scope():
            g.ndata["z"] = self.fc(h)
            g.apply_edges(self.edge_attention)
            g.update_all(self.message_func, self.reduce_func)
            return g.ndata.pop("h")


class SoftmaxOfEdges(nn.Module):
    def __init__(self, in_feats, out_feats):
        super().__init__()
        self.fc = nn.Linear(in_feats, out_feats)
        self.l, self.r = nn.Linear(out_feats, 1), nn.Linear(out_feats, 1)

    def forward(self, g, h):
        with g.local_scope():
            h = self.fc(h)
            g.ndata["h"] = h
            g.ndata["l"], g.ndata["r"] = self.l(h), self.r(h)
            g.apply_edges(fn.u_add_v("l", "r", "e"))
            g.edata["a"] = edge_softmax(g, F.leaky_relu(g.edata.pop("e")))
            g.update_all(fn.u_mul_e("h", "a", "m"), fn.sum("m", "out"))
            return g.ndata["out"]


class WeightedConv(nn.Module):
    """Reads a field of edges from the graph."""

    def __init__(self, in_feats, out_feats):
        super().__init__()
        self.linear = nn.Linear(in_feats, out_feats)

    def forward(self, g, h):
        with g.local_scope():
            g.ndata["h"] = self.linear(h)
            g.update_all(fn.u_mul_e("h", "edge_weight", "m"), fn.sum("m", "h"))
            return g.ndata["h"]


@needs("edge_weight")
def HandWritten(in_feats, out_feats):
    return Chain(UserGATLayer(in_feats, 8), SoftmaxOfEdges(8, 8), WeightedConv(8, out_feats))


@needs("edge_attr")
class EdgeAttention(nn.Module):
    """EGATConv refuses vertices that read nobody, and its edges' numbers are handed on."""

    def __init__(self, in_feats, out_feats):
        super().__init__()
        self.a = dglnn.EGATConv(in_feats, 5, 8, 4, 2)
        self.b = dglnn.EdgeGATConv(16, 8, out_feats, 1)

    def forward(self, g, x, edge_attr):
        h, e = self.a(g, x, edge_attr)
        return self.b(g, h.flatten(1).relu(), e.flatten(1).relu()).mean(1)


@needs("edge_attr")
class EdgeGATWithoutLoops(nn.Module):
    def __init__(self, in_feats, out_feats):
        super().__init__()
        self.a = dglnn.EdgeGATConv(in_feats, 5, 8, 2, allow_zero_in_degree=True)
        self.b = dglnn.EdgeGATConv(16, 5, out_feats, 1, allow_zero_in_degree=True)

    def forward(self, g, x, edge_attr):
        return self.b(g, self.a(g, x, edge_attr).flatten(1).relu(), edge_attr).mean(1)


@needs()
class InOneModule(nn.Module):
    """Messages in the forward of the whole model, of rows that the graph has."""

    def __init__(self, in_feats, out_feats):
        super().__init__()
        self.first, self.last = nn.Linear(2 * in_feats, 8), nn.Linear(8, out_feats)

    def forward(self, g):
        h = g.ndata["feat"]
        with g.local_scope():
            g.ndata["h"] = h
            g.update_all(fn.copy_u("h", "m"), fn.mean("m", "n"))
            h = F.dropout(self.first(torch.cat([h, g.ndata["n"]], 1)).relu(), 0.5, self.training)
            g.ndata["h"] = h
            g.update_all(fn.copy_u("h", "m"), fn.sum("m", "h"))
            return self.last(g.ndata["h"])


@needs("edge_weight")
class AddsLoops(nn.Module):
    """Begins as DGL's tutorials prepare their graphs; a mean, weights and dropped edges see it."""

    def __init__(self, in_feats, out_feats):
        super().__init__()
        self.a = dglnn.SAGEConv(in_feats, 8, "mean")
        self.b = dglnn.GATConv(8, out_feats, 1, attn_drop=0.3)

    def forward(self, g, x):
        g = dgl.add_self_loop(dgl.remove_self_loop(g))
        return self.b(g, self.a(g, x, g.edata["edge_weight"]).relu()).flatten(1)


# -- what gnnplan's own layers compute ---------------------------------------------------------------


@needs(ours="sage")
def OurSAGE(in_size, hid_size, out_size):
    first = dglnn.SAGEConv(in_size, 16, "mean", feat_drop=0.25, activation=F.relu)
    return Chain(first, dglnn.SAGEConv(16, out_size, "mean", feat_drop=0.25, bias=False))


@needs(ours="gcn")
class OurGCN(nn.Module):
    """Without ReLU."""

    def __init__(self, in_feats, out_feats):
        super().__init__()
        self.a, self.b = dglnn.GraphConv(in_feats, 20), dglnn.GraphConv(20, out_feats)
        self.drop = nn.Dropout(0.25)

    def forward(self, blocks, x):
        for layer, block in zip((self.a, self.b), blocks):
            x = layer(block, self.drop(x))
        return x


@needs(ours="gat")
def OurGAT(in_feats, out_feats):
    first = dglnn.GATConv(in_feats, 5, 3, feat_drop=0.25, activation=F.relu)
    return Chain(first, dglnn.GATConv(15, out_feats, 1, feat_drop=0.25))


@needs(ours="gcnii")
class OurGCN2(nn.Module):
    def __init__(self, in_feats, out_feats):
        super().__init__()
        self.inp, self.out = nn.Linear(in_feats, 10), nn.Linear(10, out_feats)
        how = {"alpha": 0.3, "lambda_": 0.6, "bias": False, "activation": F.relu}
        self.a, self.b = dglnn.GCN2Conv(10, 1, **how), dglnn.GCN2Conv(10, 2, **how)

    def forward(self, g, x):
        x0 = F.relu(self.inp(x))
        return self.out(self.b(g, self.a(g, x0, x0), x0))


@needs(ours="sgc")
def OurSGC(in_feats, out_feats):
    return Chain(dglnn.SGConv(in_feats, out_feats, k=2))


@needs(ours="gatv2")
def OurGATv2(in_feats, out_feats):
    first = dglnn.GATv2Conv(in_feats, 6, 3, activation=F.relu)
    return Chain(first, dglnn.GATv2Conv(18, out_feats, 1))


@needs(ours="gin")
def OurGIN(in_feats, out_feats):
    one, two = (
        nn.Sequential(nn.Linear(a, 16), nn.ReLU(), nn.Linear(16, b))
        for a, b in ((in_feats, 8), (8, out_feats))
    )
    return Chain(dglnn.GINConv(one, activation=F.relu), dglnn.GINConv(two))
