"""Modules of PyG as users write them: architectures of its examples, of papers, of the forum.

Convolutions of which each asks the same of gnnplan stand in one chain; a module of its own has a
rule of its own. An entry says which fields of a graph its module needs, and the words of its
refusal where no part of a graph can compute what it computes. Files that gnnplan reads have nothing
but modules; so this is one. Those of DGL are in zoo_dgl.py."""

from __future__ import annotations

import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from torch import nn
from torch_geometric import utils
from zoo_entries import needs


class Chain(nn.Module):
    """Convolutions one after the other, an activation and dropout between them."""

    def __init__(self, *convs):
        super().__init__()
        self.convs = nn.ModuleList(convs)

    def forward(self, x, edge_index):
        return self.through(x, edge_index)

    def through(self, x, *edges):
        for conv in self.convs[:-1]:
            x = F.dropout(conv(x, *edges).relu(), p=0.5, training=self.training)
        return self.convs[-1](x, *edges)


class ChainOfAttributes(Chain):
    def forward(self, x, edge_index, edge_attr):
        return self.through(x, edge_index, edge_attr)


class ChainOfWeights(Chain):
    def forward(self, x, edge_index, edge_weight=None):
        return self.through(x, edge_index, edge_weight)


@needs()
def Aggregations(in_channels, out_channels):
    return Chain(
        pyg.SAGEConv(in_channels, 8, aggr="max", project=True),
        pyg.SAGEConv(8, 8, aggr=["mean", "max", "std"]),
        pyg.SAGEConv(8, 8, aggr="softmax", aggr_kwargs={"learn": True}),
        pyg.SAGEConv(8, 8, aggr="powermean", aggr_kwargs={"learn": False}),
        pyg.SAGEConv(8, out_channels, aggr="add", root_weight=False, normalize=True),
    )


@needs()
def NormedSums(in_channels, out_channels):
    """By degrees, one of which drops entries of the normed adjacency."""
    return Chain(
        pyg.GCNConv(in_channels, 8, improved=True, bias=False),
        pyg.GCNConv(8, 8, add_self_loops=False),
        pyg.APPNP(K=2, alpha=0.1, dropout=0.4),
        pyg.ChebConv(8, 8, K=3),
        pyg.MixHopConv(8, 4, powers=[0, 1, 3]),
        pyg.TAGConv(12, 8, K=2, normalize=False),
        pyg.SGConv(8, out_channels, K=2),
    )


@needs()
def Messages(in_channels, out_channels):
    """Functions of both ends of an edge, attention among them."""
    degrees = torch.tensor([1, 3, 8, 9, 12, 9, 6, 3, 2])
    scalers = ["identity", "amplification", "attenuation"]
    ends = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 8))
    return Chain(
        pyg.EdgeConv(nn.Sequential(nn.Linear(2 * in_channels, 8), nn.ReLU()), aggr="max"),
        pyg.EdgeConv(ends),
        pyg.PNAConv(8, 8, ["mean", "min", "max", "std"], scalers, degrees, towers=2, pre_layers=1),
        pyg.GATConv(8, 4, heads=2, dropout=0.6),
        pyg.GENConv(8, 8, aggr="powermean", msg_norm=True, learn_msg_scale=True),
        pyg.GeneralConv(8, out_channels, attention=True, l2_normalize=True),
    )


@needs("edge_weight")
def Weighted(in_channels, out_channels):
    ends = pyg.GCNConv(in_channels, 8), pyg.GCNConv(8, out_channels)
    return ChainOfWeights(ends[0], pyg.TAGConv(8, 8, K=2), pyg.APPNP(2, 0.2), ends[1])


@needs("edge_attr")
def Attributes(in_channels, out_channels):
    by_edge = nn.Sequential(nn.Linear(5, 9), nn.ReLU(), nn.Linear(9, 64))
    return ChainOfAttributes(
        pyg.GATv2Conv(in_channels, 4, heads=2, edge_dim=5, dropout=0.2),
        pyg.GATConv(8, 8, edge_dim=5, fill_value="mean"),
        pyg.GINEConv(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), train_eps=True, edge_dim=5),
        pyg.TransformerConv(8, 4, 2, beta=True, dropout=0.3, edge_dim=5),
        pyg.GENConv(8, 8, aggr="softmax", learn_t=True, num_layers=2, norm="layer", edge_dim=5),
        pyg.NNConv(8, 8, by_edge, aggr="mean"),
        pyg.CGConv(8, dim=5),
        pyg.GMMConv(8, 8, dim=5, kernel_size=3, separate_gaussians=True),
        pyg.TransformerConv(8, out_channels, 2, concat=False, edge_dim=5),
    )


@needs("edge_attr")
def PathfinderDiscovery(in_channels, out_channels):
    """Degrees are sums of learned weights."""
    return ChainOfAttributes(
        pyg.PDNConv(in_channels, 16, edge_dim=5, hidden_channels=6),
        pyg.PDNConv(16, out_channels, edge_dim=5, hidden_channels=6, normalize=False),
    )


@needs("edge_type")
class Relations(Chain):
    """Each type of edges has its weights."""

    def __init__(self, in_channels, out_channels):
        super().__init__(
            pyg.RGCNConv(in_channels, 16, num_relations=2, num_bases=3),
            pyg.RGCNConv(16, 16, 2),
            pyg.FastRGCNConv(16, out_channels, 2, num_bases=2, aggr="add"),
        )

    def forward(self, x, edge_index, edge_type):
        return self.through(x, edge_index, edge_type)


@needs("pos")
class PointNet(nn.Module):
    """Positions of vertices, and their differences along edges."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.conv1 = pyg.PointNetConv(nn.Linear(in_channels + 3, 16), nn.Linear(16, 16))
        self.conv2 = pyg.PointNetConv(nn.Linear(16 + 3, out_channels))

    def forward(self, x, pos, edge_index):
        return self.conv2(self.conv1(x, pos, edge_index).relu(), pos, edge_index)


@needs()
class NormedEncoder(nn.Module):
    """Batch norms before the first convolution, of the features too, and two after it, before which
    a bias has a gradient of nothing but rounding."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.norm0, self.lin0 = nn.BatchNorm1d(in_channels), nn.Linear(in_channels, 8)
        self.norm1, self.conv1 = nn.BatchNorm1d(8), pyg.SAGEConv(8, 8)
        self.norm2, self.lin2 = nn.BatchNorm1d(8), nn.Linear(8, 8)
        self.norm3 = nn.BatchNorm1d(8, eps=1e-3, momentum=0.3, affine=False)
        self.conv2 = pyg.SAGEConv(8, out_channels)

    def forward(self, x, edge_index):
        h = self.norm1(self.lin0(self.norm0(x))).relu()
        h = self.norm2(self.conv1(h, edge_index)).relu()
        h = self.norm3(h + self.lin2(h)).relu()
        return self.conv2(F.dropout(h, 0.3, self.training), edge_index)


@needs()
def SSGC(in_channels, out_channels):
    """Nothing is computed before its first layer."""
    return Chain(pyg.SSGConv(in_channels, out_channels, alpha=0.1, K=3))


@needs()
class FirstRowsAgain(nn.Module):
    """GCNII and FAGCN: the rows of the first layer are read in all, whose own are added on."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.lin1, self.lin2 = nn.Linear(in_channels, 16), nn.Linear(16, out_channels)
        self.convs = nn.ModuleList(
            pyg.GCN2Conv(16, 0.1, 0.5, layer + 1, shared_weights=False) for layer in range(2)
        )
        self.convs.append(pyg.FAConv(16, eps=0.3, dropout=0.4))

    def forward(self, x, edge_index):
        x = F.dropout(x, 0.6, training=self.training)
        x = x_0 = self.lin1(x).relu()
        for conv in self.convs:
            x = (conv(F.dropout(x, 0.6, self.training), x_0, edge_index) + x).relu()
        return self.lin2(x)


@needs()
class GatedUpdates(nn.Module):
    """A GRU, whose vertices are in the second dimension."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.lin, self.out = nn.Linear(in_channels, 6), nn.Linear(6, out_channels)
        self.conv, self.gru = pyg.SAGEConv(6, 6), nn.GRU(6, 6)

    def forward(self, x, edge_index):
        h = self.lin(x).relu().unsqueeze(0)
        out = h
        for _ in range(2):
            out, h = self.gru(self.conv(out.squeeze(0), edge_index).relu().unsqueeze(0), h)
        return self.out(out.squeeze(0))


@needs("edge_attr")
def ReadyGAT(in_channels, out_channels):
    """A model of PyG, which hands attributes of edges on."""
    return pyg.GAT(
        in_channels, 16, 2, out_channels, heads=4, v2=True, edge_dim=5, dropout=0.1, jk="lstm"
    )


@needs()
def JumpingLSTM(in_channels, out_channels):
    """All layers' rows, which an LSTM weighs: one whose memory oneDNN rounds most."""
    return pyg.GraphSAGE(in_channels, 6, 3, out_channels, dropout=0.5, jk="lstm")


@needs()
def InSequence(in_channels, out_channels):
    """No class, and a function among its layers."""
    return pyg.Sequential(
        "x, edge_index",
        [
            (nn.Dropout(p=0.5), "x -> x"),
            (pyg.GCNConv(in_channels, 16), "x, edge_index -> x1"),
            nn.ReLU(inplace=True),
            (pyg.GCNConv(16, 16), "x1, edge_index -> x2"),
            nn.ReLU(inplace=True),
            (lambda x1, x2: [x1, x2], "x1, x2 -> xs"),
            (pyg.JumpingKnowledge("cat", 16, num_layers=2), "xs -> x"),
            nn.Linear(32, out_channels),
        ],
    )


class GatedMessages(pyg.MessagePassing):
    """Attention by hand in two propagations, of which the second is edge-updated."""

    def __init__(self, width):
        super().__init__(aggr="mean", node_dim=0)
        self.gate, self.att = nn.Linear(2 * width, 2), nn.Parameter(torch.randn(1, 2, width // 2))

    def forward(self, x, edge_index):
        gates = self.edge_updater(edge_index, x=x)
        return self.propagate(edge_index, x=x.view(len(x), 2, -1), gates=gates).flatten(1)

    def edge_update(self, x_i, x_j):
        return torch.sigmoid(self.gate(torch.cat([x_i, x_i - x_j], dim=1)))

    def message(self, x_i, x_j, gates, index, ptr, size_i):
        alpha = gates + ((x_i + x_j) * self.att).sum(dim=-1)
        alpha = utils.softmax(F.leaky_relu(alpha, 0.2), index, ptr, size_i)
        return x_j * F.dropout(alpha, p=0.3, training=self.training).unsqueeze(-1)

    def update(self, aggr_out):
        return F.elu(aggr_out)


@needs()
class GatesOfEdges(nn.Module):
    """A layer of two propagations is used twice."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.lin1, self.lin2 = nn.Linear(in_channels, 16), nn.Linear(16, out_channels)
        self.conv = GatedMessages(16)

    def forward(self, x, edge_index):
        x = self.lin1(x).tanh()
        x = x + self.conv(x, edge_index)
        return self.lin2(self.conv(x, edge_index))


@needs("edge_attr")
class NormedEdges(nn.Module):
    """Batch norms of rows of edges, of fields alone, and twice in an MLP; one of vertices between."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.of_fields = nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, in_channels))
        self.gine = pyg.GINEConv(nn.Linear(in_channels, 8))
        self.edge_conv = pyg.EdgeConv(pyg.MLP([16, 6, 6, 8], plain_last=True), aggr="mean")
        self.norm, self.last = pyg.BatchNorm(8), nn.Linear(8, out_channels)

    def forward(self, x, edge_index, edge_attr):
        h = self.norm(self.gine(x, edge_index, self.of_fields(edge_attr))).relu()
        return self.last(self.edge_conv(h, edge_index).relu())


@needs()
class ScatterInForward(nn.Module):
    """Means of neighbours by index_add, scatter_add and PyG's scatter."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.own, self.others = nn.Linear(in_channels, 16), nn.Linear(in_channels, 16)
        self.out = nn.Linear(16, out_channels)

    def forward(self, x, edge_index):
        src, dst = edge_index[0], edge_index[1]
        messages = self.others(x)[src]
        summed = torch.zeros(x.size(0), 16, dtype=x.dtype, device=x.device)
        summed.index_add_(0, dst, messages)
        count = torch.zeros(x.size(0), dtype=x.dtype).scatter_add_(
            0, dst, torch.ones_like(dst, dtype=x.dtype)
        )
        h = torch.relu(self.own(x) + summed / count.clamp(min=1).unsqueeze(-1))
        return self.out(h + utils.scatter(h[src], dst, dim=0, dim_size=h.shape[0], reduce="mean"))


class CoordinatesLayer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.edge = nn.Sequential(nn.Linear(2 * width + 6, 8), nn.SiLU(), nn.Linear(8, 8))
        self.own, self.move = nn.Linear(width + 8, width), nn.Linear(8, 1, bias=False)

    def forward(self, h, edge_index, coord, edge_attr):
        row, col = edge_index
        gap = coord[row] - coord[col]
        far = gap.pow(2).sum(1, keepdim=True)
        m = self.edge(torch.cat([h[row], h[col], far, edge_attr], 1))
        coord = coord + utils.scatter(gap * self.move(m), row, 0, coord.size(0), "mean")
        m = torch.zeros(h.size(0), 8, dtype=h.dtype).index_add(0, row, m)
        return h + self.own(torch.cat([h, m], 1)), coord


@needs("pos", "edge_attr", one_way="adds rows up at edge_index[0]")
class EGNN(nn.Module):
    """Sums at the edges' first ends, whose attributes differ both ways."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.inp, self.out = nn.Linear(in_channels, 8), nn.Linear(8, out_channels)
        self.layers = nn.ModuleList([CoordinatesLayer(8), CoordinatesLayer(8)])

    def forward(self, x, edge_index, pos, edge_attr):
        h = self.inp(x)
        for layer in self.layers:
            h, pos = layer(h, edge_index, pos, edge_attr)
        return self.out(h)


@needs(one_way="from end to start")
def BothWays(in_channels, out_channels):
    convs = pyg.SAGEConv(in_channels, 8), pyg.GATConv(8, out_channels)
    return Chain(*map(pyg.DirGNNConv, convs))


@needs()
class SharedLayers(nn.Module):
    """A layer twice, whose checkpoint could not be written; a weight of two names, which was saved
    under one."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.inp, self.out = nn.Linear(in_channels, 16), nn.Linear(16, out_channels)
        self.conv, self.one, self.two = pyg.SAGEConv(16, 16), *(pyg.GCNConv(16, 16) for _ in "12")
        self.two.lin.weight = self.one.lin.weight

    def forward(self, x, edge_index):
        x = self.inp(x)
        for conv in (self.conv, self.conv, self.one):
            x = F.dropout(conv(x, edge_index).relu(), 0.3, self.training)
        return self.out(self.two(x, edge_index))


@needs()
def FrozenGates(in_channels, out_channels):
    """A layer that is shared and frozen."""
    conv = pyg.GatedGraphConv(16, num_layers=3)
    conv.rnn.requires_grad_(False)
    return Chain(conv, pyg.SAGEConv(16, out_channels))


@needs()
class WithBuffers(nn.Module):
    """Buffers, parametrized weights and norms of each vertex's row."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.register_buffer("mean", torch.linspace(-1, 1, in_channels))
        self.register_buffer("scale", torch.full((1,), 0.5), persistent=False)
        self.inp = nn.utils.parametrizations.weight_norm(nn.Linear(in_channels, 16))
        self.conv1, self.conv2 = pyg.GraphConv(16, 16), pyg.GraphConv(16, 16)
        self.norm, self.act = pyg.LayerNorm(16, mode="node"), nn.PReLU(16)
        self.out = nn.utils.parametrizations.weight_norm(nn.Linear(16, out_channels), dim=None)

    def forward(self, x, edge_index):
        x = self.inp((x - self.mean) * self.scale).relu()
        x = self.act(self.norm(self.conv1(x, edge_index)))
        return self.out(self.conv2(x, edge_index))


@needs()
class Bernstein(nn.Module):
    """BernNet: its loops come twice, for they weigh differently in L and in 2 I - L."""

    def __init__(self, in_channels, out_channels, K=2):
        super().__init__()
        self.lin, self.temp = nn.Linear(in_channels, out_channels), nn.Parameter(torch.ones(K + 1))
        self.conv = pyg.GraphConv(out_channels, out_channels, bias=False)

    def forward(self, x, edge_index):
        x = self.lin(x)
        low, weight = utils.get_laplacian(edge_index, None, "sym", x.dtype, x.size(0))
        high, other = utils.add_self_loops(low, -weight, fill_value=2.0, num_nodes=x.size(0))
        out = self.temp[0] * x
        for temp in self.temp[1:]:
            x = self.conv(x, high, other)
            out = out + temp * self.conv(x, low, weight)
        return out


@needs()
class AdaptiveChannels(nn.Module):
    """ACM-GNN: low pass, high pass and identity, by a normed matrix with loops."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.lins = nn.ModuleList([nn.Linear(in_channels, 8) for _ in range(3)])
        self.gates = nn.ParameterList([torch.ones(8, 1) for _ in range(3)])
        self.out = pyg.GCNConv(8, out_channels)

    def forward(self, x, edge_index):
        loops, _ = utils.add_self_loops(edge_index, num_nodes=x.size(0))
        scale = utils.degree(loops[1], x.size(0), x.dtype).rsqrt()
        weight, size = scale[loops[0]] * scale[loops[1]], (x.size(0), x.size(0))
        adj = torch.sparse_coo_tensor(loops.flip(0), weight, size)
        low, high, own = (lin(x) for lin in self.lins)
        passed = [torch.spmm(adj, low).relu(), (high - torch.spmm(adj, high)).relu(), own.relu()]
        gate = torch.cat([h @ g for h, g in zip(passed, self.gates)], 1).sigmoid().softmax(1)
        h = sum(gate[:, i : i + 1] * h for i, h in enumerate(passed))
        return self.out(h, edge_index)


@needs()
class ScaledFeatures(nn.Module):
    """Divides features by degrees before neighbours read them, a layer's rows after."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.first, self.last = nn.Linear(in_channels, 8), pyg.SAGEConv(8, out_channels)

    def forward(self, x, edge_index):
        source, reader = edge_index
        scale = utils.degree(source, x.size(0), x.dtype).clamp(min=1).rsqrt()[:, None]
        h = F.dropout(self.first(x) * scale, 0.5, self.training)
        h = torch.zeros_like(h).index_add(0, reader, h[source]) * scale
        return self.last(h.relu() + x[:, :8], edge_index)


@needs()
class HopsLookedUp(nn.Module):
    """SIGN in forward: what neighbours' features are is no matter of learning."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.lins = nn.ModuleList([nn.Linear(in_channels, 6) for _ in range(3)])
        self.out, self.conv = nn.Linear(18, out_channels), pyg.SimpleConv(aggr="mean")

    def forward(self, x, edge_index):
        hops = [x]
        with torch.no_grad():
            for _ in range(2):
                hops.append(self.conv(hops[-1], edge_index))
        return self.out(torch.cat([lin(h) for lin, h in zip(self.lins, hops)], 1).relu())


@needs("batch")
class TypesOfVertices(nn.Module):
    """A Linear per type of vertex, on its own rows; rows of heads one below the other."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.first = nn.ModuleList([nn.Linear(in_channels, 8) for _ in range(2)])
        self.second = nn.ModuleList([nn.Linear(8, out_channels) for _ in range(2)])
        self.head = nn.Linear(4, 4)
        self.conv1, self.conv2 = pyg.GraphConv(8, 8), pyg.GraphConv(8, 8)

    def forward(self, x, edge_index, batch):
        h = torch.empty(x.size(0), 8)
        for kind, lin in enumerate(self.first):
            h[batch == kind] = lin(x[batch == kind]).relu()
        h = self.head(self.conv1(h, edge_index).view(-1, 4)).tanh().view(-1, 8)
        h = self.conv2(h, edge_index)
        out = h.new_zeros(x.size(0), self.second[0].out_features)
        for kind in range(int(batch.max()) + 1):
            lin = self.second[kind]
            if (batch == kind).any():
                ids = (batch == kind).nonzero(as_tuple=True)[0]
                out[ids] += lin(h[ids]) + x[ids, :1]
        return out


# -- what gnnplan's own layers compute: a convolution each, and ways to write a forward ------------


@needs(ours="sage")
def OurSAGE(in_channels, out_channels):
    return Chain(pyg.SAGEConv(in_channels, 16), pyg.SAGEConv(16, 8), pyg.SAGEConv(8, out_channels))


@needs(ours="gcn")
class OurGCN(nn.Module):
    def __init__(self, num_features, num_classes, hidden_channels=16):
        super().__init__()
        self.conv1, self.drop = pyg.GCNConv(num_features, hidden_channels), nn.Dropout(0.25)
        self.norm = pyg.BatchNorm(hidden_channels)
        self.conv2 = pyg.GCNConv(hidden_channels, num_classes, bias=False)

    def forward(self, data):
        x, edge_index = data.x, data.edge_index
        x = F.relu(self.norm(self.conv1(self.drop(x), edge_index)))
        return F.log_softmax(self.conv2(self.drop(x), edge_index), dim=1)


@needs(ours="gat")
class OurGAT(nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.first, self.norm = pyg.GATConv(in_channels, 6, heads=3), nn.LayerNorm(18)
        self.last = pyg.GATConv(18, out_channels, heads=1, concat=False)

    def forward(self, x, edge_index):
        x = torch.relu(self.norm(self.first(x, edge_index)))
        return self.last(F.dropout(x, 0.25, self.training), edge_index)


@needs(ours="gcnii")
class OurGCN2(nn.Module):
    def __init__(self, in_channels, out_channels, hidden=10, layers=3):
        super().__init__()
        self.lins = nn.ModuleList([nn.Linear(in_channels, hidden), nn.Linear(hidden, out_channels)])
        self.convs = nn.ModuleList([pyg.GCN2Conv(hidden, 0.2, 0.7, i + 1) for i in range(layers)])

    def forward(self, x, edge_index):
        x = x_0 = self.lins[0](F.dropout(x, 0.25, self.training)).relu()
        for conv in self.convs:
            x = conv(F.dropout(x, 0.25, self.training), x_0, edge_index).relu()
        return self.lins[1](F.dropout(x, 0.25, self.training))


@needs(ours="sgc")
class OurSGC(nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.conv = pyg.SGConv(in_channels, out_channels, K=3)

    def forward(self, x, edge_index):
        return self.conv(F.dropout(x, 0.25, self.training), edge_index)


@needs(ours="gatv2")
def OurGATv2(in_channels, out_channels):
    return Chain(pyg.GATv2Conv(in_channels, 6, heads=3), pyg.GATv2Conv(18, out_channels))


@needs(ours="gin")
class OurGIN(nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.a = pyg.GINConv(nn.Sequential(nn.Linear(in_channels, 9), nn.ReLU(), nn.Linear(9, 14)))
        self.b = pyg.GINConv(nn.Sequential(nn.Linear(14, 9), nn.ReLU(), nn.Linear(9, out_channels)))
        self.norm = pyg.BatchNorm(14)

    def forward(self, x, edge_index):
        return self.b(self.norm(self.a(x, edge_index)).relu(), edge_index)
