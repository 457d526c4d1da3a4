"""Modules as PyG's users write them, which gnnplan cuts in pieces and trains as they are."""

from __future__ import annotations

import torch_geometric.nn as pyg
from torch import Tensor, nn
from torch.nn import functional as F

HIDDEN, HEADS = 64, 4


class Two(nn.Module):
    """Two convolutions, with dropout between them."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        h = F.dropout(F.elu(self.first(x, edge_index)), 0.5, self.training)
        out: Tensor = self.second(h, edge_index)
        return out


def Gcn(in_channels: int, out_channels: int) -> nn.Module:
    return Two(pyg.GCNConv(in_channels, HIDDEN), pyg.GCNConv(HIDDEN, out_channels))


def Sage(in_channels: int, out_channels: int) -> nn.Module:
    return Two(pyg.SAGEConv(in_channels, HIDDEN), pyg.SAGEConv(HIDDEN, out_channels))


def SageMax(in_channels: int, out_channels: int) -> nn.Module:
    return Two(
        pyg.SAGEConv(in_channels, HIDDEN, aggr="max"),
        pyg.SAGEConv(HIDDEN, out_channels, aggr="max"),
    )


def Gat(in_channels: int, out_channels: int) -> nn.Module:
    first = pyg.GATConv(in_channels, HIDDEN // HEADS, heads=HEADS, dropout=0.2)
    return Two(first, pyg.GATConv(HIDDEN, out_channels))


def Transformer(in_channels: int, out_channels: int) -> nn.Module:
    first = pyg.TransformerConv(in_channels, HIDDEN // HEADS, heads=HEADS)
    return Two(first, pyg.TransformerConv(HIDDEN, out_channels))


def Tag(in_channels: int, out_channels: int) -> nn.Module:
    return Two(pyg.TAGConv(in_channels, HIDDEN, K=2), pyg.TAGConv(HIDDEN, out_channels, K=2))


def Gen(in_channels: int, out_channels: int) -> nn.Module:
    return Two(pyg.GENConv(in_channels, HIDDEN), pyg.GENConv(HIDDEN, out_channels))


class Appnp(nn.Module):
    """Predict, then propagate (Gasteiger et al. 2019)."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(in_channels, HIDDEN), nn.Linear(HIDDEN, out_channels)
        self.propagation = pyg.APPNP(4, 0.1)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        h = F.dropout(self.first(x).relu(), 0.5, self.training)
        out: Tensor = self.propagation(self.second(h), edge_index)
        return out
