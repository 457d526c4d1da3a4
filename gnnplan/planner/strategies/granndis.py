"""GraNNDis: hidden rows of the first `depth` layers never cross servers; each server recomputes them for its surroundings.

    2 servers x 1 GPU, 3 layers, depth 2 (full preload)          depth 1
    setup    |preload: features 3 hops around|                   2 hops around
    compute  |forward 1 on own + 2 hops|forward 2 on own + 1 hop|forward 3 on own|loss|...     forward 2 on own only,
    comm     (nothing between servers)                                                         so halo 3 crosses
    reduce                                                                        |all_reduce|

    expansion-aware sampling, max_hop 1 and fanout 15: the same timeline on fewer rows. Outside its own part a server has
    only rows drawn once before training, and all edges among the rows it has; loss and gradients of its own rows only
    setup    |preload: features of the rows drawn, 1 hop around|
    compute  |forward 1 on its rows|forward 2 on its rows|forward 3 on own|loss|...

    cooperative batching, batches 2 (R): an epoch is two steps, each on what half of a server's training vertices need
    setup    |preload|                                            to the server's memory, not to its GPUs
    copy     |load|                               |load|          features of the batch, dropped after it
    compute         |1|2|3|loss|3|2|1|     |update|     |1|2|3|loss|3|2|1|     |update|
    reduce                            |all_reduce|                        |all_reduce|

Depth 0 is plain graph parallel, depth L the paper's full preload; every depth gives the exact gradient: each server's
copy of a row gets the gradient of that server's readers, and the all-reduce adds the copies' weight gradients. Inside
a server the enlarged graph is cut over its GPUs, which exchange halos as usual. The best depth depends on links and
graph: more depth, fewer bytes between servers, more computation. Sampling cuts edges between servers (another gradient);
batches are mini-batches with whole neighbourhoods (the gradient of the batch's mean loss), fetched for a server as a whole
and then split over its GPUs. With R = 1 nothing is loaded: it is the preload above, operation by operation.

`group` says what preloads as one: the server, as in the paper, or the island of GPUs with a fast link between them (NVLink bridges).
Then everything above holds with islands in the place of servers: no recomputed row crosses PCIe either, and on one server too there
is something to preload. Between islands features pass once, at set-up, on intra_node links; halos inside pass on island links.

    1 server, islands {0, 2} and {1, 3}, group 'island', 2 layers
    GPU 0, 2   |preload|forward 1 on half of own + 1 hop| halo 2 on NVLink |forward 2 on half of own|loss| ...
    GPU 1, 3   |preload|forward 1 on half of own + 1 hop| halo 2 on NVLink |forward 2 on half of own|loss| ...
    PCIe        features                                                              all_reduce: its ring enters each island once
Paper: GraNNDis (PACT 2024) Sec. 4.1-4.4, Alg. 1; its Eq. 3-9 are in formulas.py, shown by a plan and not deciding it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from gnnplan.planner.errors import SpecError
from gnnplan.planner.estimate import EstimatedLayout
from gnnplan.planner.grouping import Phase
from gnnplan.planner.job import Job
from gnnplan.planner.layout import Expansion, Layout
from gnnplan.planner.schedule import Schedule
from gnnplan.planner.strategies import layerwise, layerwise_memory
from gnnplan.planner.strategies.layerwise import Batches, Manner
from gnnplan.planner.strategies.strategy import Memory, Prediction, Strategy

MOST = 10_000  # hops, and batches
MAX_HOP, FANOUT = 1, 15  # the paper's defaults, Sec. 4.3
DEGREES = ("global", "local")
GROUPS = ("server", "island")
SHARED = ("parameters", "optimizer", "runtime")  # what no batch makes smaller
BATCH_ORDER = 3  # its own stream of random numbers beside those in layout.py


@dataclass(frozen=True)
class GraNNDis(Strategy):
    """depth: hidden layers that a group recomputes for its surroundings; None is all (the paper's preload).
    max_hop (m), fanout (k): of expansion-aware sampling; None is none; one of them given brings the other's default.
    degrees: what a layer divides by, a vertex's degree in the whole graph ('global') or among its group's rows ('local').
    batches: R of cooperative batching; None is the fewest that fit the memory. checkpoint: as in graph parallel.
    group: what preloads and batches as one, the 'server' or the 'island'."""

    depth: int | None = None
    narrow: bool = False
    max_hop: int | None = None
    fanout: int | None = None
    degrees: str = "global"
    batches: int | None = 1
    checkpoint: bool = False
    group: str = "server"

    family: ClassVar[str] = "granndis"
    claim: ClassVar[float] = 1e-6

    @property
    def sampled(self) -> bool:
        return self.max_hop is not None or self.fanout is not None

    @property
    def exact(self) -> bool:
        return not self.sampled and self.batches == 1

    def approximates_as(self, other: Strategy) -> bool:
        return isinstance(other, GraNNDis) and self.sampled == other.sampled and (self.batches == 1) == (other.batches == 1)

    @classmethod
    def candidates(cls, job: Job) -> Iterator[Strategy]:
        narrowing = job.model.narrows
        deepest = job.workload.layers - job.model.first_varying
        for group in _worth_it(job):
            for depth in range(1, min(deepest, 5)):
                yield cls(depth, group=group)
                if narrowing:
                    yield cls(depth, narrow=True, group=group)
            yield cls(group=group)  # whole, if need be with checkpoints: exact
            in_batches = cls(batches=None, group=group)
            if in_batches.settle(job).batches != 1:
                yield in_batches
            yield cls(max_hop=MAX_HOP, fanout=FANOUT, batches=None, group=group)

    @classmethod
    def absent(cls, job: Job) -> str:
        sizes = _sizes(job)
        if job.cluster.islands and len(sizes) > 1:
            return (f"one server, and its islands hold {', '.join(map(str, sizes))} GPUs: islands preload where they are equally large; "
                    "with group='server' it would be plain graph parallel")  # fmt: skip
        what, crosses = ("one server, one island", "groups") if job.cluster.islands else ("one server", "servers")
        return f"{what}: no row crosses {crosses}, so there is nothing to preload and it would be plain graph parallel"

    def settle(self, job: Job) -> GraNNDis:
        out = replace(self, depth=job.workload.layers if self.depth is None else self.depth)
        if self.sampled:
            out = replace(out, max_hop=MAX_HOP if self.max_hop is None else self.max_hop,
                          fanout=FANOUT if self.fanout is None else self.fanout)  # fmt: skip
        if self.batches is not None:
            return out
        key = (out, self.tied(job), job.workload, job.cluster.device.memory)  # asked for several times, at every seating
        if key not in job._fewest:
            job._fewest[key] = out._fewest_that_fit(job)
        return replace(out, batches=job._fewest[key])

    def _fewest_that_fit(self, job: Job) -> int:
        """The smallest R whose memory fits: doubled while that helps, then narrowed down. Where none fits, the one that needs least."""
        room = job.cluster.device.memory

        def need(batches: int) -> float:
            return float(sum(replace(self, batches=batches).memory(job).values(), np.zeros(1)).max())

        try:
            self.check(job)
        except SpecError:  # to be said by who asks for it
            return 1
        whole = replace(self, batches=1).memory(job)
        tried = {1: float(sum(whole.values(), np.zeros(1)).max())}
        if tried[1] <= room or job.workload.norm == "batch" or sum(whole[use].max() for use in SHARED) > room:
            return 1
        few, many, most = 1, 1, self._targets(job)
        while tried[many] > room and tried[many] <= tried[few] and many < most:
            few, many = many, min(2 * many, most)
            tried[many] = need(many)
        if tried[many] > room:
            return min(tried, key=lambda batches: (tried[batches], batches))
        while many - few > 1:
            between = (few + many) // 2
            tried[between] = need(between)
            few, many = (few, between) if tried[between] <= room else (between, many)
        return many

    def _targets(self, job: Job) -> int:
        """Training vertices of the group that has fewest."""
        layout, groups = self.layout(job), self.tied(job)
        if isinstance(layout, EstimatedLayout):
            return int(job.stats.train_vertices // len(set(groups)))
        assert job.graph is not None
        group_of = np.asarray(groups)[layout.owner]
        return min(int(job.graph.train[group_of == group].sum()) for group in set(groups))

    def thriftier(self) -> Strategy | None:
        return None if self.checkpoint else replace(self, checkpoint=True)

    def check(self, job: Job) -> None:
        self.must_have_its_mode(job)
        layers, deepest = job.workload.layers, job.workload.layers - job.model.first_varying
        self._check_group(job)
        if self.depth is not None and not 0 <= self.depth <= layers:
            raise SpecError(
                f"granndis: depth lies between 0 (plain halo) and the layers ({layers}, full preload), not {self.depth}"
            )
        for knob, value, least in (("max_hop", self.max_hop, MAX_HOP), ("fanout", self.fanout, FANOUT), ("batches", self.batches, 1)):
            if value is not None and value < 1:
                raise SpecError(f"granndis: {knob} is at least 1, not {value}; use {knob}={least}, or leave it out")
            if value is not None and value > MOST and knob != "fanout":
                raise SpecError(f"granndis: {knob} is at most {MOST:,}, not {value:,}; use {knob}={least}, or leave it out")
        if self.degrees not in DEGREES:
            raise SpecError(f"granndis: degrees is 'global' (of the whole graph) or 'local' (among a {self.group}'s rows), "
                            f"not {self.degrees!r}")  # fmt: skip
        if self.degrees == "local" and not self.sampled:
            raise SpecError(f"granndis: without sampling a {self.group}'s rows have all their neighbours, so degrees are global; "
                            "use degrees='local' with max_hop and fanout")  # fmt: skip
        if (self.sampled or self.batches != 1) and self.depth is not None and self.depth < deepest:
            one = {"server": "a server", "island": "an island"}[self.group]
            what = f"sampling leaves {one} rows of its own graph" if self.sampled else f"batches are fetched for {one} as a whole"
            raise SpecError(f"granndis: {what}, so no hidden row may cross {self.group}s (depth: {self.depth}, layers: {layers}); "
                            "leave depth out")  # fmt: skip
        if job.ranks > job.stats.vertices:
            raise SpecError(f"granndis needs a vertex per rank (vertices: {job.stats.vertices}, ranks: {job.ranks}); use fewer ranks")
        if self.batches is not None and self.batches > 1:
            if job.workload.norm == "batch":
                raise SpecError(f"granndis: batch norm needs all vertices at once (batches: {self.batches}); use norm=layer or batches=1")
            if self.batches > (targets := self._targets(job)):
                raise SpecError(f"granndis needs a training vertex per batch on every {self.group} (fewest on one: {targets}, batches: "
                                f"{self.batches}); use batches={max(targets, 1)}{' or less' if targets > 1 else ''}")  # fmt: skip

    def _check_group(self, job: Job) -> None:
        if self.group not in GROUPS:
            raise SpecError(f"granndis: group is 'server' or 'island' (what preloads as one), not {self.group!r}")
        if self.group == "island":
            where = f"cluster {job.cluster.name}"
            if not job.cluster.islands:
                raise SpecError(f"granndis: group='island' needs islands, GPUs with a fast link between them, and {where} names none "
                                f"(GPUs per server: {job.cluster.gpus_per_server}); use group='server', or give it islands and island")
            if len(sizes := _sizes(job)) > 1:
                raise SpecError("granndis: islands preload equal shares of the graph, so they must be equally large (GPUs used of an "
                                f"island of {where}: {', '.join(map(str, sizes))}); use group='server'")  # fmt: skip

    @property
    def manner(self) -> Manner:
        return Manner(self.narrow, checkpoint=self.checkpoint)

    def layout(self, job: Job) -> Layout | EstimatedLayout:
        expansion, layers = None, job.workload.layers
        if self.sampled:
            assert self.max_hop is not None and self.fanout is not None
            expansion = Expansion(self.max_hop, self.fanout, job.workload.seed)
        elif self.steps(job) > 1 and layers == job.model.first_varying:  # no hidden row to recompute: features alone are preloaded
            expansion = Expansion(layers, job.stats.vertices, job.workload.seed)
        return job.layout(layers if self.depth is None else self.depth, expansion, self.tied(job))

    def layouts(self, job: Job) -> Batches:
        """Of the batches; none with R = 1."""
        return () if self.batches in (None, 1) else job.batches(self.layout(job), self.steps(job))

    def steps(self, job: Job) -> int:
        return self.batches or 1

    def preparation(self, job: Job) -> dict[str, float]:
        return layerwise.preparation(job, self.layout(job))

    def memory(self, job: Job) -> Memory:
        """Of several batches the largest fills the device; their edges stay there, their features do not."""
        return layerwise_memory.memory(job, self.layout(job), self.manner, self.layouts(job))

    def predict(self, job: Job) -> Prediction:
        return layerwise.predict(job, self.layout(job), self.manner, self.layouts(job))

    def schedule(self, job: Job, steps: int) -> Schedule:
        return layerwise.schedule(job, self.layout(job), self.manner, steps, self.layouts(job), lambda step: self.turn(job, step))

    def traffic(self, job: Job) -> list[Phase]:
        layouts = self.layouts(job) or (self.layout(job),)
        often = Counter(map(id, layouts))  # estimated batches are all the same one
        return [Phase(sent, times * often[key]) for key, layout in {id(layout): layout for layout in layouts}.items()
                for sent, times in layerwise.traffic(job, layout, self.manner)]  # fmt: skip

    def tied(self, job: Job) -> tuple[int, ...]:
        """Groups are counted as ranks meet them, so that it does not matter which server or island one of them has."""
        at = job.cost.places
        where = (at.island if self.group == "island" else at.server).tolist()
        number = {place: i for i, place in enumerate(dict.fromkeys(where))}
        return tuple(number[place] for place in where)

    def turn(self, job: Job, step: int) -> int:
        """The batch whose turn it is: all of them in every epoch, each time in another order."""
        epoch, place = divmod(step, self.steps(job))
        return int(np.random.default_rng((BATCH_ORDER, job.workload.seed, epoch)).permutation(self.steps(job))[place])


def _worth_it(job: Job) -> list[str]:
    """The groups of which there are several, and not the same ones twice."""
    servers, islands = (len(set(numbers.tolist())) for numbers in job.cost.places[:2])
    out = ["server"] if servers > 1 else []
    return [*out, "island"] if job.cluster.islands and islands > servers and len(_sizes(job)) == 1 else out


def _sizes(job: Job) -> list[int]:
    """How many GPUs of an island the job uses, each number once."""
    return sorted(set(np.bincount(job.cost.places.island).tolist()) - {0})
