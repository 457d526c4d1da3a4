"""Live modules of PyG whose layers' rows meet at the end, as workloads of test cases."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from ranks import Case
from torch import Tensor, nn
from torch.nn import functional as F

from gnnplan.executor.modules.read import with_user_module


def jumping(case: Case, folder: Path, kind: str, widths: list[int], of: str, p: float) -> Case:
    """The case with a module of `kind` convolutions of these widths.

    of: 'sum', 'cat', or either with ' dropped': rows meet after the dropout of rate p."""
    from torch_geometric import nn as pyg

    how, dropped = of.split()[0], "dropped" in of
    problem = case.problem(1)
    features, classes = problem.stats.features, problem.stats.classes

    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            conv: Any = {"gcn": pyg.GCNConv, "sage": pyg.SAGEConv, "gat": pyg.GATConv}[kind]
            pairs = zip([features, *widths], widths, strict=False)
            self.convs = nn.ModuleList(conv(*pair) for pair in pairs)
            self.end = nn.Linear(sum(widths) if how == "cat" else widths[0], classes)

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            met = []
            for conv in self.convs:
                h = conv(x, edge_index).relu()
                x = F.dropout(h, p, self.training)
                met.append(x if dropped else h)
            rows: Tensor = torch.cat(met, 1) if how == "cat" else sum(met)  # type: ignore[assignment]
            return self.end(rows)

    torch.manual_seed(case.workload.get("seed", 0))
    problem = with_user_module(problem, M(), folder=folder)
    return replace(case, workload=problem.workload.model_dump())
