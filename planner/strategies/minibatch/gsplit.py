"""GSplit: the ranks of a group split one mini-batch.

Every vertex has one owner in the group. Only the owner samples the vertex's neighbours, loads its
features and computes its rows; it sends rows to the ranks that read them. So nothing is sampled,
loaded or computed twice.

    host     |draw 3|ids 3|draw 2|ids 2|draw 1|ids 1|lay|
    copy                                                 |load|
    comm                                                       |halo 1|         |halo 2|
    compute                                                           |forward 1|      |forward 2|

    ids      ranks tell owners which of the owners' vertices the frontier has reached
    load     each owner loads its own rows, once per batch
    halo 1   features; the layers, forward and backward, then run as in graph parallelism

    group      server: split inside, data parallel across (the paper's hybrid)   all: one batch
    splitter   gsplit: METIS on pre-sampled weights   node: vertex weights only   edge: METIS
               without pre-sampling   random
    imbalance  load above the mean that METIS may give an owner; if larger, fewer edges cross owners
    features   everywhere: in every server's memory   spread: each row in one server's memory, the
               owner's server if one group has all ranks
    cache      each GPU caches the hottest of its own rows, which are then not loaded
    structure  everywhere: lists with every sampler   spread: each list with the vertex's owner, the
               only rank that samples the vertex; no further messages are needed

With split='first' (APT's DNP) only layer 1 is split, and the other layers are data parallel. A rank
samples for its own seeds down to h_1, and requests rows of h_1 from their owners. Owners sample
these rows' neighbours, read all of their features and compute layer 1, once for all requests:

    host     |draw 3|draw 2|ids 2|draw 1|lay|
    copy                                     |load|
    comm                                                     |halo 2|
    compute                                        |forward 1|      |forward 2|

With split='source' (APT's SNP) layer 1 is split by its sources. A rank samples everything for its
own seeds, and pushes layer 1's edges to the owners of their sources. Owners read their own features
and sum them over these edges; readers add up the partial sums, with bias and ReLU, before layer 2:

    host     |draw 3|draw 2|draw 1|push|lay|
    copy                                    |load|
    comm                                                    |halo 2|
    compute                                       |forward 1|      |forward 2|

The positions found during sampling (the shuffle index) serve the exchanges of both passes.

Exact: the gradient of one process on the same batch.

Bytes per batch, for r_l remote rows in layer l's frontier, M ranks and W weights of b bytes:

    sum_{l=0..L-1} r_l H_l b    forward; the same for l >= 1 backward
    8                           per id, and per peer and layer for the number of ids
    2 r_1 H_1 b + 8 r_1         instead of these with split='first'; r_1: all remote rows that a
                                rank needs, even if it needed them in another layer
    2 p H_1 b + 4 (2 p + e)     instead of these with split='source', and 12 per peer: p partial
                                sums of e edges that a rank needs of other ranks
    2 (M-1) W b                 all-reduce
    2 r_L H_L b                 link prediction: rows of h_L of endpoints of edges that another rank
                                scores, and their gradients

Link prediction (graph/sampling.py): the owner of an edge's first vertex computes the edge's loss.
The rows of the other endpoints are exchanged as for a layer L + 1.

Sources: GSplit (arXiv 2303.13775), Sec. 3-5; DNP and SNP of APT (PPoPP 2025,
github.com/kaihaoma/APT).

See also layerwise/step.py for the layers; planner/graph/partition.py for owners;
executor/strategies/minibatch.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import numpy as np

from gnnplan.planner.gnn.kinds import KINDS
from gnnplan.planner.graph.partition import EPOCHS, FINEST, IMBALANCE, LOOSEST, SPLITTERS
from gnnplan.planner.ownership.minibatch import Batches
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies.base import Bytes, Example, Range, Rules, Strategy
from gnnplan.planner.strategies.minibatch.adjacency_store import Lists, owned
from gnnplan.planner.strategies.minibatch.on_batches import OnRows, variants, with_one_sampler
from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.planner.vocabulary.numbers import PerRank, numbered

# models whose layer 1 is a sum over sources, followed by bias and ReLU
SUMS = [name for name, kind in KINDS.items() if kind.by_columns and kind.linear]


@dataclass(frozen=True)
class GSplit(OnRows):
    """GSplit.

    split: split 'all' layers, or only the 'first' by destinations (dnp) or by 'source' (snp).
    splitter: the method that assigns vertices to owners.
    presample: epochs of pre-sampling, for splitters and caches that need it.
    imbalance: load that METIS may give an owner above the mean, as a share of the mean.
    group: the ranks that split a batch, of a 'server' or 'all'.
    narrow, checkpoint, buckets: as in graph parallelism.
    prefetch, cache, hot, features: as in data parallelism, for the rows that a rank owns.
    structure: lists are with every sampler ('everywhere') or with the vertex's owner ('spread').
    """

    splitter: str = "gsplit"
    presample: int = EPOCHS
    group: str = "server"
    narrow: bool = False
    prefetch: int = 0
    checkpoint: bool = False
    cache: Bytes = 0
    hot: str = "frequency"
    features: str = "everywhere"
    structure: str = "everywhere"
    imbalance: float = IMBALANCE
    buckets: int = 1
    split: str = "all"

    allowed: ClassVar[Rules] = {
        **OnRows.allowed,
        "split": {
            "all": "layers",
            "first": "layer alone, by destinations: dnp",
            "source": "rows of the first layer: snp",
        },
        "splitter": SPLITTERS,
        "group": {"server": "split inside, data parallel across", "all": "one batch"},
        "presample": Range("a number of epochs, all drawn before training", 1, 1000),
        "imbalance": Range(
            "the share of the mean load that an owner may have beyond it", FINEST, LOOSEST
        ),
    }
    family = "gsplit"
    names: ClassVar[Mapping[str, Mapping[str, object]]] = {
        "dnp": {"split": "first"},
        "snp": {"split": "source"},
    }
    examples = (Example("gsplit"), Example("dnp"), Example("snp"))

    @classmethod
    def candidates(cls, problem: Problem) -> Iterator[Strategy]:
        if problem.ranks > 1:
            servers = problem.server_count
            if servers == 1:
                groups: tuple[str, ...] = ("server",)
            else:  # groups by server need servers with several ranks
                groups = ("server", "all") if servers < problem.ranks else ("all",)
            for group in groups:
                for narrow in (False, True) if problem.model.narrows else (False,):
                    plain = with_one_sampler(problem, cls(group=group, narrow=narrow))
                    yield from variants(problem, plain)

    @classmethod
    def absent(cls, problem: Problem) -> str:
        return "one rank: a batch is split over several ranks"

    @classmethod
    def explain(cls, problem: Problem, fastest: Self | None) -> list[str]:
        """Return a note on the rows and edges that splitting saves over data parallelism.

        The ratios are those of GSplit's Table 1, counted in the first batches.
        """
        if fastest is None:
            return []

        unsplit = problem.minibatches(tuple(range(problem.ranks)))
        pairs = zip(unsplit.first(), fastest.batches(problem).first(), strict=False)
        totals = [[batch.totals() for batch in pair] for pair in pairs]
        counts = [[(rows[0], sum(edges)) for rows, edges in pair] for pair in totals]
        (rows, edges), (shared_rows, shared_edges) = np.sum(counts, axis=0).tolist()
        return [
            f"Sampling each for itself, ranks read {rows / max(shared_rows, 1):.2f} times the rows"
            f" of features that they read splitting a batch ({fastest}), and compute"
            f" {edges / max(shared_edges, 1):.2f} times the edges"
        ]

    def check(self, problem: Problem) -> None:
        super().check(problem)
        if self.split != "all":
            self._check_layer_1(problem)
        if len(set(Counter(self.groups(problem)).values())) > 1:
            raise SpecError(
                "gsplit: every server splits its batch over equally many ranks; use group='all', or"
                " as many of each server"
            )

    def _check_layer_1(self, problem: Problem) -> None:
        """Raise SpecError if layer 1 cannot be split without the other layers."""
        name, by_source = self.name, self.split == "source"
        if problem.workload.layers < 2:
            raise SpecError(
                f"{name} splits layer 1 and hands its rows to layer 2 (layers: 1); use gsplit, or"
                " --layers 2"
            )
        if problem.model.first_varying == 0:
            raise SpecError(
                f"{name} splits a layer 1 that reads features, and that of"
                f" {problem.workload.called} reads an encoder's output; use gsplit, which splits"
                " any layer"
            )
        if by_source and problem.workload.norm == "batch":
            raise SpecError(
                f"{name} sends partial sums of rows of h_1, so no rank knows the moments of whole"
                " rows (norm: batch); use norm=layer, or gsplit"
            )
        if problem.graph is None:
            raise SpecError(
                f"{name} needs a graph's edges, but only statistics of {problem.stats.name} are"
                " known; use gsplit, or --graph with a file"
            )
        if self.narrow:
            raise SpecError(
                f"{name} exchanges rows of h_1 after layer 1, so layer 2 cannot multiply before the"
                " exchange (narrow: True); use narrow=False"
            )
        read = "lists" if by_source else "features and lists"
        for knob in ("structure",) if by_source else ("features", "structure"):
            if getattr(self, knob) == "spread":
                raise SpecError(
                    f"{name}'s ranks read {read} of each other's vertices ({knob}: spread); use"
                    f" {knob}='everywhere', or gsplit"
                )
        why = ""  # layer 1 is no sum over its sources, followed by `apply`
        if problem.model.layers[0].heads:
            why = "weighs an edge by all edges of its row (attention)"
        elif problem.workload.model not in SUMS:
            why = f"is no plain sum (those of {', '.join(SUMS)} are)"
        if by_source and why:
            raise SpecError(
                f"snp adds layer 1 up from parts, and that of {problem.workload.called} {why}; use"
                " dnp, which computes a row of layer 1 at one rank"
            )

    def groups(self, problem: Problem) -> PerRank:
        """Return the group of each rank [ranks]; groups are numbered in the order of ranks."""
        return numbered(problem.servers) if self.group == "server" else (0,) * problem.ranks

    def tied(self, problem: Problem) -> PerRank:
        return self.groups(problem) if self.group == "server" else ()

    def batches(self, problem: Problem) -> Batches:
        return problem.minibatches(
            self.groups(problem), self.splitter, self.presample, self.imbalance, self.split
        )

    def lists(self, problem: Problem) -> Lists | None:
        return owned(self.batches(problem), self.structure)

    def preparation(self, problem: Problem) -> dict[str, float]:
        return {
            "pre-sampling and splitting": problem.cache.seconds_of(self.batches(problem)),
            **super().preparation(problem),
        }

    def more_spread(self, problem: Problem) -> Iterator[Self]:
        if problem.server_count > 1 and self.split != "first":
            if self.features == "everywhere":
                yield replace(self, features="spread")
            # if a group is a server, spread lists would all be in that server's memory
            if self.structure == "everywhere" and self.group == "all" and self.split == "all":
                yield replace(self, features="spread", structure="spread")
