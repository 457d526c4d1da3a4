"""GraNNDis: a server recomputes rows of other servers instead of receiving them in every step.

Before the first step each server preloads the features `depth` hops around its part of the graph.
In the first `depth` layers it also computes the hidden rows of these surroundings, so servers never
send each other these rows. Inside a server the enlarged graph is partitioned over the server's
GPUs, which exchange halos as in graph parallelism.

    2 servers x 1 GPU, 3 layers, depth 2 (full preload)
    setup    |preload: features 3 hops around|
    compute  |forward 1 on own + 2 hops|forward 2 on own + 1 hop|forward 3 on own|loss| ..
    comm      nothing between servers
    reduce                                                                             |all_reduce|

    depth 1
    setup    |preload: features 2 hops around|
    compute  |forward 1 on own + 1 hop|forward 2 on own| . . . |forward 3 on own|loss| ..
    comm                                               |halo 3|
    reduce                                                                             |all_reduce|

    expansion-aware sampling, max_hop 1 and fanout 15: the same timeline on fewer rows
    setup    |preload: features of sampled rows, 1 hop around|
    compute  |forward 1 on own + sampled|forward 2 on own + sampled|forward 3 on own|loss| ..

    cooperative batching, batches 2 (R): two steps per epoch, each for half of the training vertices
    setup    |preload| to the server's memory, not to its GPUs
    copy     |load|                               |load|          features of the batch only
    compute        |1|2|3|loss|3|2|1|     |update|      |1|2|3|loss|3|2|1|     |update|
    reduce                           |all_r|                              |all_r|

Depth 0 is graph parallelism, depth L the paper's full preload. The best depth depends on links and
graph: more depth means fewer bytes between servers, and more computation. With sampling, a server
has only a sample of the rows outside its own part, drawn once before training, and all edges among
its rows; the loss is over its own rows only. A batch has whole neighbourhoods; a server fetches the
batch and then splits it over its GPUs. With one batch (R = 1) nothing is loaded.

`group` is the set of GPUs that preloads together: the server, as in the paper, or the island of
GPUs with a fast link between them (NVLink bridges). With islands, recomputed rows are not sent over
PCIe either, and preloading makes sense on a single server too:

    1 server, islands {0, 2} and {1, 3}, group 'island', 2 layers
    GPU 0, 2   |preload|forward 1 on half of own + 1 hop| halo 2 on NVLink |forward 2| ..
    GPU 1, 3   |preload|forward 1 on half of own + 1 hop| halo 2 on NVLink |forward 2| ..
    PCIe        features                                              all_reduce, once per island

Exact without sampling, with one batch and unquantized rows, for every depth: each server's copy of
a row gets the gradients of that server's readers, and the all-reduce sums the weight gradients of
all copies. Sampling removes edges between servers; batches are mini-batches (the gradient of the
batch's mean loss).

Bytes per epoch: as graph parallelism, but layers l <= depth + 1 exchange halos inside groups only
(for depth 0 everywhere), plus 2 (M-1) W b per batch; preloaded features are sent once, before the
first step. Source: GraNNDis (PACT 2024), Sec. 4.1-4.4, Alg. 1. The paper's Eq. 3-9 are not used, as
they leave out links inside servers and much of an epoch: plans use the counted rows of every layer.

Memory: `resident` (features, halo rows, edges) and `Holds` (activations) in step.py of this folder,
which also has the operations. Seconds: ../program. Recomputed rows: planner/ownership/layout.py.
Training: executor/strategies/granndis.py.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import numpy as np

from gnnplan.planner.graph.sampling import BATCH_ORDER
from gnnplan.planner.ownership.estimated import EstimatedLayout
from gnnplan.planner.ownership.layout import Expansion
from gnnplan.planner.problem.problem import AnyLayout, Problem
from gnnplan.planner.strategies.base import Example, Range, Rules, Strategy, settled
from gnnplan.planner.strategies.layerwise.exchange import pays
from gnnplan.planner.strategies.layerwise.graph_parallel import GraphParallel, OnParts, check_trim
from gnnplan.planner.strategies.layerwise.step import Batches
from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.planner.vocabulary.numbers import PerRank, numbered
from gnnplan.planner.vocabulary.units import show_bytes

MOST = 10_000  # the largest max_hop, and the most batches
MAX_HOP, FANOUT = 1, 15  # defaults of the paper, Sec. 4.3
# uses of memory that do not depend on the number of batches
SHARED = ("parameters", "optimizer", "runtime", "communicators")


@dataclass(frozen=True)
class GraNNDis(OnParts):
    """GraNNDis.

    depth: number of hidden layers that a group recomputes for its surroundings; None: all (full
        preload).
    narrow: exchange rows before or after the multiplication, whichever are narrower.
    max_hop (m), fanout (k): expansion-aware sampling of k neighbours up to m hops away; None: no
        sampling. If only one is given, the other gets its default.
    degrees: the degree by which a layer divides: in the whole graph ('global') or among the rows of
        the group ('local').
    batches: number R of cooperative batches; None: the fewest that fit the memory.
    checkpoint, buckets, bits: as in graph parallelism.
    group: the GPUs that preload and batch together, of a 'server' or of an 'island'.
    trim: leave out rows as in graph parallelism; several batches always do.
    """

    depth: int | None = None
    narrow: bool = False
    max_hop: int | None = None
    fanout: int | None = None
    degrees: str = "global"
    batches: int | None = 1
    checkpoint: bool = False
    group: str = "server"
    trim: bool = False
    buckets: int = 1
    bits: int | str | None = None

    allowed: ClassVar[Rules] = {
        "max_hop": Range("a number of hops", 1, MOST),
        "fanout": Range("a number of neighbours", 1),
        "batches": Range("a number of batches", 1, MOST),
        "degrees": {"global": "of the whole graph", "local": "among a group's rows"},
        "group": {"server": "a server preloads as one", "island": "an island does"},
    }
    family = "granndis"
    executor = "gnnplan.executor.strategies.granndis"
    examples = (Example("granndis", servers=2),)
    claim = 1e-6

    @property
    def sampled(self) -> bool:
        return self.max_hop is not None or self.fanout is not None

    @property
    def uses_cuda_graph(self) -> bool:
        return self.batches == 1  # steps on several batches differ

    @property
    def exact(self) -> bool:
        return not self.sampled and self.batches == 1 and super().exact

    def approximates_as(self, other: Strategy) -> bool:
        def lossy(strategy: GraNNDis) -> tuple[object, ...]:
            return strategy.sampled, strategy.batches == 1, strategy.codec

        return isinstance(other, GraNNDis) and lossy(self) == lossy(other)

    @classmethod
    def candidates(cls, problem: Problem) -> Iterator[Strategy]:
        servers, islands = (len(set(numbers.tolist())) for numbers in problem.cost.places[:2])
        preload = problem.cluster.islands and islands > servers and len(_sizes(problem)) == 1
        for group in ["server"] * (servers > 1) + ["island"] * bool(preload):
            variants = list(cls._variants(problem, group))
            yield from variants
            layers = problem.workload.layers
            plain = cls(group=group, trim=problem.needs_few_rows)
            if pays(problem, plain, replace(plain, buckets=layers)):
                whole = (variant for variant in variants if variant.batches == 1)
                yield from (replace(variant, buckets=layers) for variant in whole)

    @classmethod
    def _variants(cls, problem: Problem, group: str) -> Iterator[GraNNDis]:
        narrowing = problem.model.narrows
        deepest = problem.workload.layers - problem.model.first_varying
        trim = problem.needs_few_rows
        for depth in range(1, min(deepest, 5)):
            yield cls(depth, group=group, trim=trim)
            if narrowing:
                yield cls(depth, narrow=True, group=group, trim=trim)
        yield cls(group=group)  # exact; a search adds checkpoint=True if it does not fit
        if trim:
            yield cls(group=group, trim=True)
        in_batches = cls(batches=None, group=group, trim=trim)
        if in_batches.settle(problem).batches != 1:
            yield in_batches
        sampled = replace(in_batches, max_hop=MAX_HOP, fanout=FANOUT)
        yield sampled
        # A batch computes only the rows that its training vertices need, so two batches may be
        # faster than the whole graph even if the whole graph fits.
        for open_batches in (in_batches, sampled):
            two = replace(open_batches, batches=2, trim=False)
            if open_batches.settle(problem).batches == 1 and two.settle(problem).suits(problem):
                yield two

    @classmethod
    def absent(cls, problem: Problem) -> str:
        sizes = _sizes(problem)
        if problem.cluster.islands and len(sizes) > 1:
            return (
                f"one server, and its islands hold {', '.join(map(str, sizes))} GPUs: islands"
                " preload where they are equally large; with group='server' it would be plain"
                " graph parallel"
            )
        has, groups = "one server", "servers"
        if problem.cluster.islands:
            has, groups = "one server, one island", "groups"
        return (
            f"{has}: no row crosses {groups}, so there is nothing to preload and it would be"
            " plain graph parallel"
        )

    @classmethod
    def explain(cls, problem: Problem, fastest: Self | None) -> list[str]:
        """Return notes on the memory that preloading costs, and on the bytes that it saves."""
        if problem.cluster.servers == 1:
            islands = " Islands of GPUs may preload too, with group='island'."
            return [
                "One server: nothing crosses servers, so preloading a server's surroundings would"
                f" be plain graph parallel.{islands if len(problem.cluster.islands) > 1 else ''}"
            ]
        whole, sampled = cls().settle(problem), cls(max_hop=MAX_HOP, fanout=FANOUT).settle(problem)
        source = "estimated" if problem.graph is None else "counted"
        plain = GraphParallel()
        plain_sent, whole_sent = (
            show_bytes(each.predict(problem).bytes_by_link.get("inter_node", 0))
            for each in (plain, whole)
        )
        return [
            f"A server that preloads the {problem.workload.layers} hops around its part ({whole})"
            f" holds {_growth(problem, whole):.2f} times the rows of its part ({source}); with rows"
            f" drawn ({sampled}) {_growth(problem, sampled):.2f} times",
            f"Between servers an epoch of {plain} on all GPUs would send {plain_sent}, of {whole}"
            f" {whole_sent}",
        ]

    def settle(self, problem: Problem) -> Self:
        values: dict[str, Any] = {"depth": problem.workload.layers}
        if self.sampled:
            values |= {"max_hop": MAX_HOP, "fanout": FANOUT}
        still_open = {knob: n for knob, n in values.items() if getattr(self, knob) is None}
        chosen = replace(self, **still_open)
        if self.batches is not None:
            return chosen
        # cached, because a search settles the same strategy for many placements
        device = problem.cluster.device
        key = (chosen, self.tied(problem), problem.workload, device.kind, device.memory)
        batches = problem.cache.get(
            ("fewest that fit", *key, problem.graph, problem.stats, problem.method),
            lambda: chosen._fewest_that_fit(problem),
        )
        # several batches leave out rows without `trim`
        return replace(chosen, batches=batches, trim=self.trim and batches == 1)

    def _fewest_that_fit(self, problem: Problem) -> int:
        """Return the smallest number of batches R that fits, or else the R with least memory.

        R is doubled while memory shrinks, and then found by bisection.
        """
        room = problem.cluster.device.memory

        def need(batches: int) -> float:
            return replace(self, batches=batches).most_memory(problem)

        # if the strategy does not suit the problem, the caller's own check raises the error
        if not self.suits(problem) or problem.workload.norm == "batch":
            return 1
        needs = {1: need(1)}  # batches -> bytes
        if needs[1] <= room:
            return 1
        whole = replace(self, batches=1).memory(problem)
        if sum(whole[use].max() for use in SHARED if use in whole) > room:
            return 1
        before = last = 1
        most = self._targets(problem)
        while needs[last] > room and needs[last] == min(needs.values()) and last < most:
            before, last = last, min(2 * last, most)
            needs[last] = need(last)
        if needs[last] > room:
            return min(needs, key=needs.__getitem__)
        return bisect_left(range(last), True, before + 1, key=lambda n: need(n) <= room)

    def _targets(self, problem: Problem) -> int:
        """Return the smallest number of training vertices that a group has."""
        layout, groups = self.layout(problem), self.tied(problem)
        if isinstance(layout, EstimatedLayout):
            return int(problem.stats.train_vertices // len(set(groups)))
        group_of = np.asarray(groups)[layout.owner]
        return min(int(layout.graph.train[group_of == group].sum()) for group in set(groups))

    def check(self, problem: Problem) -> None:
        super().check(problem)
        layers = problem.workload.layers
        deepest = layers - problem.model.first_varying
        self._check_group(problem)
        if self.depth is not None and not 0 <= self.depth <= layers:
            raise SpecError(
                f"granndis: depth lies between 0 (plain halo) and the layers ({layers}, full"
                f" preload), not {self.depth}"
            )
        if self.degrees == "local" and not self.sampled:
            raise SpecError(
                f"granndis: without sampling a {self.group}'s rows have all their neighbours, so"
                " degrees are global; use degrees='local' with max_hop and fanout"
            )
        if (self.sampled or self.batches != 1) and self.depth is not None and self.depth < deepest:
            group = {"server": "a server", "island": "an island"}[self.group]
            reason = (
                f"sampling leaves {group} rows of its own graph"
                if self.sampled
                else f"batches are fetched for {group} as a whole"
            )
            raise SpecError(
                f"granndis: {reason}, so no hidden row may cross {self.group}s (depth:"
                f" {self.depth}, layers: {layers}); leave depth out"
            )
        if self.trim:
            check_trim(problem, self.family)
        if self.batches is not None and self.batches > 1:
            if self.trim:
                raise SpecError(
                    "granndis: several batches always leave out the rows that they do not need"
                    f" (trim: True, batches: {self.batches}); use trim=False"
                )
            if problem.workload.norm == "batch":
                raise SpecError(
                    f"granndis: batch norm needs all vertices at once (batches: {self.batches});"
                    " use norm=layer or batches=1"
                )
            if self.batches > (targets := self._targets(problem)):
                raise SpecError(
                    f"granndis needs a training vertex per batch on every {self.group} (fewest on"
                    f" one: {targets}, batches: {self.batches}); use"
                    f" batches={max(targets, 1)}{' or less' if targets > 1 else ''}"
                )

    def _check_group(self, problem: Problem) -> None:
        if self.group == "island":
            cluster = problem.cluster
            if not cluster.islands:
                raise SpecError(
                    "granndis: group='island' needs islands, GPUs with a fast link between them,"
                    f" and cluster {cluster.name} names none (GPUs per server:"
                    f" {cluster.gpus_per_server}); use group='server', or give it islands and"
                    " island"
                )
            if len(sizes := _sizes(problem)) > 1:
                raise SpecError(
                    "granndis: islands preload equal shares of the graph, so they must be equally"
                    f" large (GPUs used of an island of cluster {cluster.name}:"
                    f" {', '.join(map(str, sizes))}); use group='server'"
                )

    def layout(self, problem: Problem) -> AnyLayout:
        """Return which rows each rank computes, receives and preloads."""
        expansion, layers = None, problem.workload.layers
        if self.sampled:
            hops, fanout = settled(self.max_hop), settled(self.fanout)
            expansion = Expansion(hops, fanout, problem.workload.seed)
        elif self.steps(problem) > 1 and layers == problem.model.first_varying:
            # there is no hidden row to recompute: only features are preloaded
            expansion = Expansion(layers, problem.stats.vertices, problem.workload.seed)
        return problem.layout(
            layers if self.depth is None else self.depth, expansion, self.tied(problem)
        )

    def layouts(self, problem: Problem) -> Batches:
        """Return the layouts of an epoch's batches; with R = 1 the trimmed layout, if any."""
        layout = self.layout(problem)
        if self.batches in (None, 1):
            return (problem.trimmed(layout),) if self.trim else ()
        return problem.batches(layout, self.steps(problem))

    def steps(self, problem: Problem) -> int:
        return self.batches or 1

    def tied(self, problem: Problem) -> PerRank:
        """Return the group of each rank.

        Groups are numbered in the order of ranks, so the result does not depend on which server or
        island a group is placed on.
        """
        places = problem.cost.places
        return numbered((places.island if self.group == "island" else places.server).tolist())

    def turn(self, problem: Problem, step: int) -> int:
        """Return the batch of a step; each epoch has all batches, in a new order."""
        epoch, place = divmod(step, self.steps(problem))
        random = np.random.default_rng((BATCH_ORDER, problem.workload.seed, epoch))
        return int(random.permutation(self.steps(problem))[place])


def _sizes(problem: Problem) -> list[int]:
    """Return the distinct numbers of GPUs that the problem uses per island."""
    return sorted(set(np.bincount(problem.cost.places.island).tolist()) - {0})


# -- notes for the user ----------------------------------------------------------------------------


def _growth(problem: Problem, strategy: GraNNDis) -> float:
    """Return the rows that a server holds divided by the rows of its part, a mean over servers."""
    layout, servers = strategy.layout(problem), problem.cluster.servers
    own, held = problem.stats.vertices / servers, float(layout.row_counts(0).sum()) / servers
    return 1 + max(held - own, 0.0) / own
