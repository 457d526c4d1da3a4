"""Modules of DGL as users write them; zoo.py has those of PyG."""

from __future__ import annotations

import dgl.function as fn
import dgl.nn.pytorch as dglnn
import torch
import torch.nn as nn
import torch.nn.functional as F
from dgl.nn.functional import edge_softmax
from zoo_entries import needs


@needs()
class CoraGCN(nn.Module):
    def __init__(self, in_size, out_size, hid_size=16):
        super().__init__()
        self.layers = nn.ModuleList()
        self.layers.append(dglnn.GraphConv(in_size, hid_size, activation=F.relu))
        self.layers.append(dglnn.GraphConv(hid_size, out_size))
        self.dropout = nn.Dropout(0.5)

    def forward(self, g, features):
        h = features
        for i, layer in enumerate(self.layers):
            if i != 0:
                h = self.dropout(h)
            h = layer(g, h)
        return h


@needs()
class BlockSAGE(nn.Module):
    def __init__(self, in_size, out_size, hid_size=16):
        super().__init__()
        self.layers = nn.ModuleList()
        self.layers.append(dglnn.SAGEConv(in_size, hid_size, "mean"))
        self.layers.append(dglnn.SAGEConv(hid_size, hid_size, "mean"))
        self.layers.append(dglnn.SAGEConv(hid_size, out_size, "mean"))
        self.dropout = nn.Dropout(0.5)

    def forward(self, blocks, x):
        h = x
        for l, (layer, block) in enumerate(zip(self.layers, blocks)):
            h = layer(block, h)
            if l != len(self.layers) - 1:
                h = F.relu(h)
                h = self.dropout(h)
        return h


@needs()
class CoraGAT(nn.Module):
    def __init__(self, in_size, out_size, hid_size=8):
        super().__init__()
        self.gat_layers = nn.ModuleList()
        self.gat_layers.append(dglnn.GATConv(in_size, hid_size, 4, activation=F.elu))
        self.gat_layers.append(
            dglnn.GATConv(hid_size * 4, out_size, 1, residual=True, activation=None)
        )

    def forward(self, g, inputs):
        h = inputs
        for i, layer in enumerate(self.gat_layers):
            h = layer(g, h)
            if i == 1:
                h = h.mean(1)
            else:
                h = h.flatten(1)
        return h


@needs()
class DroppingGAT(nn.Module):
    def __init__(self, in_size, out_size, hid_size=8):
        super().__init__()
        self.a = dglnn.GATConv(in_size, hid_size, 4, feat_drop=0.6, attn_drop=0.6, activation=F.elu)
        self.b = dglnn.GATConv(hid_size * 4, out_size, 1)

    def forward(self, g, x):
        return self.b(g, self.a(g, x).flatten(1)).mean(1)


@needs()
class GATv2(nn.Module):
    def __init__(self, in_feats, out_feats):
        super().__init__()
        self.a = dglnn.GATv2Conv(in_feats, 6, 3, activation=F.relu, share_weights=True)
        self.b = dglnn.GATv2Conv(18, out_feats, 1)

    def forward(self, g, x):
        return self.b(g, self.a(g, x).flatten(1)).squeeze(1)


@needs()
class Gin(nn.Module):
    def __init__(self, in_feats, out_feats):
        super().__init__()
        self.ginlayers, self.batch_norms = nn.ModuleList(), nn.ModuleList()
        for i in range(2):
            mlp = nn.Sequential(
                nn.Linear(in_feats if i == 0 else 16, 16), nn.ReLU(), nn.Linear(16, 16)
            )
            self.ginlayers.append(dglnn.GINConv(mlp, learn_eps=False))
            self.batch_norms.append(nn.BatchNorm1d(16))
        self.out = nn.Linear(16, out_feats)

    def forward(self, g, h):
        for layer, norm in zip(self.ginlayers, self.batch_norms):
            h = F.relu(norm(layer(g, h)))
        return self.out(h)


@needs()
class Tag(nn.Module):
    def __init__(self, in_feats, out_feats):
        super().__init__()
        self.a, self.b = (
            dglnn.TAGConv(in_feats, 8, k=2, activation=F.relu),
            dglnn.TAGConv(8, out_feats, k=1),
        )

    def forward(self, g, features):
        return self.b(g, self.a(g, features))


@needs()
class SagePool(nn.Module):
    def __init__(self, in_feats, out_feats):
        super().__init__()
        self.a = dglnn.SAGEConv(in_feats, 8, "pool", activation=F.relu)
        self.b = dglnn.SAGEConv(8, out_feats, "gcn")

    def forward(self, graph, feat):
        return self.b(graph, self.a(graph, feat))


class UserSAGEConv(nn.Module):
    """The one of DGL's guide: update_all with built-in functions."""

    def __init__(self, in_feat, out_feat):
        super().__init__()
        self.linear = nn.Linear(in_feat * 2, out_feat)

    def forward(self, g, h):
        with g.local_scope():
            g.ndata["h"] = h
            g.update_all(message_func=fn.copy_u("h", "m"), reduce_func=fn.mean("m", "h_N"))
            h_N = g.ndata["h_N"]
            h_total = torch.cat([h, h_N], dim=1)
            return self.linear(h_total)


@needs()
class UserSAGE(nn.Module):
    def __init__(self, in_feats, num_classes, h_feats=16):
        super().__init__()
        self.conv1, self.conv2 = UserSAGEConv(in_feats, h_feats), UserSAGEConv(h_feats, num_classes)

    def forward(self, g, in_feat):
        return self.conv2(g, F.relu(self.conv1(g, in_feat)))


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
            z = self.fc(h)
            g.ndata["z"] = z
            g.apply_edges(self.edge_attention)
            g.update_all(self.message_func, self.reduce_func)
            return g.ndata.pop("h")


@needs()
class UserGAT(nn.Module):
    def __init__(self, in_dim, out_dim):
        super().__init__()
        self.layer1, self.layer2 = UserGATLayer(in_dim, 8), UserGATLayer(8, out_dim)

    def forward(self, g, h):
        return self.layer2(g, F.elu(self.layer1(g, h)))


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


@needs()
class UserAttention(nn.Module):
    def __init__(self, in_feats, out_feats):
        super().__init__()
        self.a, self.b = SoftmaxOfEdges(in_feats, 8), SoftmaxOfEdges(8, out_feats)

    def forward(self, g, x):
        return self.b(g, F.relu(self.a(g, x)))


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
class UserWeighted(nn.Module):
    def __init__(self, in_feats, out_feats):
        super().__init__()
        self.a, self.b = WeightedConv(in_feats, 8), WeightedConv(8, out_feats)

    def forward(self, g, x):
        return self.b(g, self.a(g, x).relu())


@needs("edge_attr")
class EdgeAttention(nn.Module):
    """EGATConv refuses vertices that read nobody, and its edges' numbers are handed on."""

    def __init__(self, in_feats, out_feats):
        super().__init__()
        self.a = dglnn.EGATConv(in_feats, 5, 8, 4, 2)
        self.b = dglnn.EGATConv(16, 8, out_feats, 4, 1)

    def forward(self, g, x, edge_attr):
        h, e = self.a(g, x, edge_attr)
        return self.b(g, h.flatten(1).relu(), e.flatten(1).relu())[0].mean(1)


@needs("edge_attr")
class EdgeGAT(nn.Module):
    def __init__(self, in_feats, out_feats, allow_zero_in_degree=False):
        super().__init__()
        told = {"allow_zero_in_degree": allow_zero_in_degree}
        self.a = dglnn.EdgeGATConv(in_feats, 5, 8, 2, **told)
        self.b = dglnn.EdgeGATConv(16, 5, out_feats, 1, **told)

    def forward(self, g, x, edge_attr):
        return self.b(g, self.a(g, x, edge_attr).flatten(1).relu(), edge_attr).mean(1)


@needs("edge_attr")
class EdgeGATWithoutLoops(EdgeGAT):
    def __init__(self, in_feats, out_feats):
        super().__init__(in_feats, out_feats, allow_zero_in_degree=True)


class DegreeNormed(nn.Module):
    """GCN of DGL's old tutorial, which divides by degrees by hand."""

    def __init__(self, in_feats, out_feats):
        super().__init__()
        self.linear = nn.Linear(in_feats, out_feats)

    def forward(self, g, h):
        with g.local_scope():
            norm = g.in_degrees().to(h.dtype).clamp(min=1).pow(-0.5).unsqueeze(1)
            g.ndata["h"] = h * norm
            g.update_all(fn.copy_u("h", "m"), fn.sum("m", "h"))
            return self.linear(g.ndata["h"] * norm)


@needs()
class UserGCN(nn.Module):
    def __init__(self, in_feats, out_feats):
        super().__init__()
        self.a, self.b = DegreeNormed(in_feats, 8), DegreeNormed(8, out_feats)

    def forward(self, g, x):
        return self.b(g, self.a(g, x).relu())


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


class OwnConv(nn.Module):
    """Divides by degrees, of which none may be 0."""

    def __init__(self, in_feats, out_feats):
        super().__init__()
        self.linear = nn.Linear(in_feats, out_feats)

    def forward(self, block, h):
        with block.local_scope():
            norm = block.in_degrees().float().pow(-0.5).unsqueeze(1)
            block.srcdata["h"] = self.linear(h) * norm
            block.update_all(fn.copy_u("h", "m"), fn.sum("m", "h"))
            return block.dstdata["h"] * norm


@needs()
class OwnConvsOfBlocks(nn.Module):
    """A block per layer, none of which is a convolution of DGL."""

    def __init__(self, in_feats, out_feats):
        super().__init__()
        self.layers = nn.ModuleList([OwnConv(in_feats, out_feats)])
        self.layers.extend([OwnConv(out_feats, out_feats) for _ in range(2)])

    def forward(self, blocks, x):
        for layer, block in zip(self.layers, blocks):
            x = torch.tanh(layer(block, x))
        return x
