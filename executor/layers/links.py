"""The loss of link prediction, and the AUC of edges that are not trained on.

    z_v                    v's row of the last layer
    s(u, v) = z_u . z_v    the score of a pair

    loss = 1 / (B (1 + Q)) sum over edges (u, v) of a batch
               [ -log sigma(s(u, v)) - sum_q log sigma(-s(u, n_q)) ]

This is GraphSAGE's unsupervised loss (Hamilton et al. 2017, Eq. 1) with edges for the pairs that
meet on random walks, Q negatives drawn uniformly for the expectation, and the mean over pairs. It
is the binary cross entropy of all pairs that DGL's and PyG's examples of link prediction use.

AUC is the probability that an edge scores higher than a pair that is none. It is estimated from
(edge, negative) comparisons: each edge is compared with its own negatives, and a tie counts half.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from gnnplan.executor.layers.kernels import sent
from gnnplan.planner.graph.sampling import Pairs

AT_ONCE = 1 << 20  # numbers gathered at a time where no gradient is needed


def scores(rows: Tensor, heads: Tensor, tails: Tensor) -> Tensor:
    """Return scores [B, 1 + Q] of pairs of rows [R, H]; heads and tails index them (`Pairs`)."""
    head_rows, tail_rows = rows.index_select(0, heads), rows.index_select(0, tails.flatten())
    return torch.bmm(tail_rows.view(*tails.shape, -1), head_rows.unsqueeze(2)).squeeze(2)


def _count_right(pair_scores: Tensor) -> Tensor:
    """Count right comparisons of edges with their negatives, and all comparisons, float64 [2].

    A tie counts half.
    """
    margin = pair_scores[:, :1] - pair_scores[:, 1:]
    right = (margin > 0).sum(dtype=torch.float64) + (margin == 0).sum(dtype=torch.float64) / 2
    return torch.stack([right, torch.full_like(right, margin.numel())])


class LinkTargets:
    """Pairs of rows for link prediction: their loss, and counts of comparisons.

    pairs: indexes of rows. size: number of rows. total: edges of all ranks' batches, over which the
    loss is a mean.
    """

    def __init__(self, pairs: Pairs, size: int, total: float) -> None:
        self.heads, self.tails = torch.from_numpy(pairs.heads), torch.from_numpy(pairs.tails)
        self.size, self.total = size, total

    def loss(self, rows: Tensor) -> Tensor:
        """Return this rank's summand of the mean loss over the pairs of all `total` edges."""
        if not len(self.heads):
            return rows.sum() * 0.0
        pair_scores = scores(rows, self.heads, self.tails)
        is_edge = torch.zeros_like(pair_scores)
        is_edge[:, 0] = 1.0
        total = self.total * pair_scores.shape[1]
        return F.binary_cross_entropy_with_logits(pair_scores, is_edge, reduction="sum") / total

    def counts(self, rows: Tensor) -> Tensor:
        """Count the batch's right and total comparisons, as those of train, float64 [3, 2, 1]."""
        out = rows.new_zeros(3, 2, 1, dtype=torch.float64)
        if len(self.heads):
            out[0, :, 0] = _count_right(scores(rows, self.heads, self.tails))
        return out


@torch.no_grad()
def compared(rows: Tensor, pairs: Pairs) -> Tensor:
    """Count how often edges score higher than their negatives, and all comparisons, float64 [2]."""
    out = rows.new_zeros(2, dtype=torch.float64)
    step = max(1, AT_ONCE // max(pairs.tails.shape[1] * rows.shape[1], 1))
    for start in range(0, pairs.heads.size, step):
        piece = slice(start, start + step)
        places = [torch.from_numpy(ids[piece]) for ids in (pairs.heads, pairs.tails)]
        out += _count_right(scores(rows, *sent(places, rows.device)))
    return out
