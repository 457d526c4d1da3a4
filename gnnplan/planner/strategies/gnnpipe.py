"""GNNPipe: layers in a pipeline, the graph in chunks. A stage owns consecutive layers of the whole graph.

    pipeline: 3 stages, 4 chunks, one step
    stage 0  |f0|f1|f2|f3|                    |b3|b2|b1|b0|update
    stage 1     |f0|f1|f2|f3|              |b3|b2|b1|b0|update
    stage 2        |f0|f1|f2|f3|b3|b2|b1|b0|update           f: forward of the stage's layers on a chunk, b: backward

    hybrid: a stage is a group of g ranks (rank = stage * g + member); a chunk in a stage of 2 layers, g = 2
    member 0  receive|  |f l1|  |f l2|send      receive|b l2|  |b l1|  |send       member i owns sub-chunk i of every chunk
    member 1  receive|xx|f l1|xx|f l2|send      receive|b l2|xx|b l1|xx|send       xx: halo exchange within the group
                                                                         ... after the last chunk: all-reduce within the group, update

A chunk's neighbours in chunks that this step has already processed (its own included) are fresh, the others historical.
Backward runs in reverse order, so every fresh row has its whole gradient before it is passed on. In the hybrid a member keeps
the rows of others that its own rows read. Such a row crosses once per layer, when its own chunk is processed, to stay until it
does so again; and its gradient goes home when backward comes to that chunk. So a remote row is fresh or historical exactly
when a local one would be, and the hybrid computes what the pipeline with the same chunks computes.
Three tricks, each with its switch: `shuffle` (a new order of chunks every epoch, the same on all stages),
`historical_gradients` (off: no gradient through historical rows; on: the previous epoch's are added), and `period`
alpha (epoch t uses the embeddings of epoch alpha * floor((t-1)/alpha); 1 is off). Epoch 0 is an evaluation pass with
the initial weights. Where the paper is silent: GCNII's encoder output is a hidden row like any other, so it may be historical
in layer 1; with shuffling, historical gradients follow what was read in the step before; K is 4 x stages or 4 x GPUs in the hybrid;
stages get layers by cost, so that the slowest is as fast as can be (first and last layers differ from the others).

Bytes per epoch: 2 (stages-1) N H b, twice for GCNII, which hands its initial residual on: no factor L. In the hybrid also
2 b sum_l H_l halo(group) over layers whose input varies, and 2 (g-1) W b (formulas.hybrid_bytes); halo(group) are the rows that any
other member reads, in whichever chunk: counting neighbours inside the chunk only gives two thirds of what is printed.
Paper: GNNPipe (arXiv 2308.10087) Alg. 1, Sec. 3.2.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np

from gnnplan.planner.chunks import ChunkFacts
from gnnplan.planner.cost import Cost, Number, Port, Transfer
from gnnplan.planner.errors import SpecError
from gnnplan.planner.footprint import Footprint, Moments, Prepared, Product, block, footprint, kernels, loss
from gnnplan.planner.gnn import Model
from gnnplan.planner.grouping import Phase
from gnnplan.planner.job import Job
from gnnplan.planner.schedule import Collective, Compute, Label, Recv, Schedule, Send, Task, all_reduce
from gnnplan.planner.strategies.layerwise import RUNTIME
from gnnplan.planner.strategies.strategy import Memory, Prediction, Strategy

MOST_PAIRS = 2**20  # chunks x pairs of a stage's members that a candidate may have: more would take too long to look at


def chunk_order(seed: int, step: int, chunks: int, shuffle: bool) -> list[int]:
    """The order in which all stages process the chunks in a step."""
    return np.random.default_rng([seed, step]).permutation(chunks).tolist() if shuffle else list(range(chunks))


def balance(seconds: Sequence[float], stages: int) -> tuple[int, ...]:
    """Layers per stage, at least one each, such that the slowest stage is as fast as can be; beyond that, near even shares.

    >>> balance([1, 1, 1, 1, 1], 2), balance([4, 1, 1, 1, 1], 2)
    ((3, 2), (1, 4))
    """
    total, layers = np.concatenate([[0.0], np.cumsum(seconds)]), len(seconds)

    def starts(limit: float) -> list[int]:
        """Where each stage begins if all stages, from the last on, are as long as the limit allows."""
        out = [layers]
        for stage in reversed(range(stages)):
            out.append(max(int(np.searchsorted(total, total[out[-1]] - limit)), stage))
        return out[::-1]

    low, high = max(seconds) * (1 - 1e-9), float(total[-1]) * (1 + 1e-9)
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if starts(middle)[0] == 0 else (middle, high)
    limit = high * (1 + 1e-9)
    earliest, ends = starts(limit), [0]
    for stage in range(1, stages):
        reach = min(int(np.searchsorted(total, total[ends[-1]] + limit, side="right")) - 1, layers - (stages - stage))
        even = int(np.searchsorted(total, total[-1] * stage / stages * (1 - 1e-9)))
        ends.append(min(max(even, earliest[stage], ends[-1] + 1), reach))
    return tuple(b - a for a, b in pairwise([*ends, layers]))


Alone = tuple[Number, Number]  # begin and end of each chunk (last axis) in a stage that never waits [s]


@dataclass(frozen=True)
class GNNPipe(Strategy):
    """stages: ranks / stages ranks form one (None: as many stages as layers allow). chunks: None is 4 x stages.
    layers_per_stage: None is by cost. checkpoint: keep a layer's inputs and what it read from neighbours only, and compute the rest
    again in the backward pass (the gathered rows stay, so that aggregation is not repeated)."""

    stages: int | None = None
    chunks: int | None = None
    shuffle: bool = True
    historical_gradients: bool = False
    period: int = 23
    layers_per_stage: tuple[int, ...] | None = None
    checkpoint: bool = False

    family: ClassVar[str] = "gnnpipe"
    claim: ClassVar[float] = 0.35  # pipelines: 0.05, groups inside servers: 0.25. Groups over servers share cards with each other

    @property
    def exact(self) -> bool:
        return self.chunks == 1

    @classmethod
    def candidates(cls, job: Job) -> Iterator[Strategy]:
        for stages in range(min(job.ranks, job.workload.layers), 1, -1):
            members, rest = divmod(job.ranks, stages)
            if not rest:
                for chunks in dict.fromkeys((4 * stages, 4 * job.ranks, 1)):
                    if chunks * members**2 <= MOST_PAIRS:
                        yield cls(stages, chunks)

    @classmethod
    def absent(cls, job: Job) -> str:
        if job.ranks == 1:
            return "one rank: a pipeline needs at least two stages"
        return (f"a pipeline needs two stages or more, each with a layer and equally many ranks "
                f"(layers: {job.workload.layers}, ranks: {job.ranks})")  # fmt: skip

    def settle(self, job: Job) -> GNNPipe:
        layers, stages = job.workload.layers, self.stages
        if stages is None:
            stages = next(s for s in range(min(job.ranks, layers), 0, -1) if job.ranks % s == 0)
        settled = replace(self, stages=stages, chunks=4 * stages if self.chunks is None else self.chunks)
        if settled.layers_per_stage is None and settled._problem(job) is None:
            settled = replace(settled, layers_per_stage=balance(settled.layer_seconds(job), stages))
        return settled

    def check(self, job: Job) -> None:
        if problem := self._problem(job):
            raise SpecError(problem)

    def _problem(self, job: Job) -> str | None:
        """Rule, numbers and remedy where the knobs do not suit the job."""
        assert self.stages is not None and self.chunks is not None
        layers, vertices, per_stage = job.workload.layers, job.stats.vertices, self.layers_per_stage
        if self.stages < 1 or self.chunks < 1:
            return f"gnnpipe: stages and chunks are at least 1 (stages: {self.stages}, chunks: {self.chunks})"
        if self.stages > layers:
            return f"gnnpipe needs a layer per stage (layers: {layers}, stages: {self.stages}); use stages <= {layers}"
        if job.ranks % self.stages:
            fit = ", ".join(str(s) for s in range(1, min(job.ranks, layers) + 1) if job.ranks % s == 0)
            return (f"gnnpipe gives every stage equally many ranks (stages: {self.stages}, ranks: {job.ranks}); "
                    f"use stages in {{{fit}}} or --ranks {self.stages * max(1, job.ranks // self.stages)}")  # fmt: skip
        if self.chunks > vertices:
            return f"gnnpipe needs a vertex per chunk (vertices: {vertices}, chunks: {self.chunks}); use fewer chunks"
        if job.ranks > vertices * self.stages:
            return (f"gnnpipe needs a vertex per rank of a stage (vertices: {vertices}, ranks of a stage: {job.ranks // self.stages}); "
                    f"use --ranks {vertices * self.stages} or less")  # fmt: skip
        if per_stage is not None and (len(per_stage) != self.stages or min(per_stage) < 1 or sum(per_stage) != layers):
            return (f"gnnpipe: layers_per_stage gives each of {self.stages} stages a layer or more, {layers} in all, "
                    f"not {per_stage}; leave it out to have them balanced by cost")  # fmt: skip
        if job.model.norm == "batch":
            return "gnnpipe: a chunk does not know the others' rows, so batch norm has no moments of all vertices; use norm=layer"
        if self.historical_gradients and not job.model.prepares_linearly:
            return ("gnnpipe: historical_gradients would pass through a norm or ReLU at rows that are gone; use "
                    "historical_gradients=False, or a model without norm")  # fmt: skip
        if self.period < 1:
            return f"gnnpipe: period (alpha) is at least 1 (1: no fixing of the history), not {self.period}"
        return None

    # -- who does what ---------------------------------------------------------------------------------------------

    def members(self, job: Job) -> int:
        """g, the ranks of a stage."""
        assert self.stages is not None
        return job.ranks // self.stages

    def group(self, job: Job, stage: int) -> range:
        """The ranks of a stage."""
        g = self.members(job)
        return range(stage * g, stage * g + g)

    def facts(self, job: Job) -> ChunkFacts:
        assert self.chunks is not None
        return job.chunks(self.chunks, self.members(job))

    def shape(self, job: Job) -> tuple[Model, list[range]]:
        """The model (rows are aggregated before they are multiplied: each row is computed once) and each stage's layers (1-based)."""
        assert self.layers_per_stage is not None
        ends = np.cumsum([1, *self.layers_per_stage]).tolist()
        return job.model.aggregating_first, [range(a, b) for a, b in pairwise(ends)]

    def pieces(self, job: Job, stage: int) -> list[tuple[int, ...]]:
        """What a stage does with a chunk at a stretch: all its layers, or one after the other where exchanges come between. 0: encoder."""
        model, stages = self.shape(job)
        layers = ((0,) if model.encoder and stage == 0 else ()) + tuple(stages[stage])
        return [layers] if self.members(job) == 1 else [(layer,) for layer in layers]

    def exchanged(self, job: Job, piece: tuple[int, ...]) -> int:
        """Numbers per row that cross within the group before (and after, backward) the piece; 0: none do."""
        model = job.model.aggregating_first
        return model.input_width(piece[0]) if self.members(job) > 1 and piece[0] > model.first_varying else 0

    # -- work ------------------------------------------------------------------------------------------------------

    def work(self, job: Job, piece: tuple[int, ...], facts: ChunkFacts) -> tuple[Compute, Compute]:
        """Forward and backward of a piece; arrays over sub-chunks [K g]."""
        rows, edges, sources = _floats(facts.rows), _floats(facts.edges), _floats(facts.sources)
        given, taken = _floats(facts.sends.sum(2)), _floats(facts.sends.sum(1))
        model, width = job.model.aggregating_first, self.exchanged(job, piece)
        b = model.itemsize
        forward = backward = Compute(itemsize=b)
        if width:  # rows are packed, laid out beside the others', prepared; their gradients the same way back
            dropped = 6 * taken if model.dropout else 0
            forward = Compute(touched=(2.0 * given + 2 * rows + 4 * taken + dropped) * width * b, launches=4, itemsize=b)
            backward = Compute(touched=(3.0 * given + 2 * rows + 4 * taken + dropped) * width * b, launches=4, itemsize=b)
        if 0 in piece:
            forward, backward = model.encode(rows)
        for layer in piece:
            if not layer:
                continue
            projected = sources if model.layers[layer - 1].projects_first else rows
            forward = forward + model.forward(layer, rows, projected, edges)
            backward = backward + model.backward(layer, rows, projected, edges)
            if self.checkpoint and layer > model.first_varying and layer < len(model.layers):
                again, spec = model.forward(layer, rows, projected, edges), model.layers[layer - 1]
                backward = backward + (again if spec.heads or spec.sums > 1 else replace(again, gathers=()))
            if not (model.aggregate_cached(layer) or model.reads_sparse(layer)):  # what is read is gathered, its gradients scattered
                forward = forward + Compute(touched=2.0 * sources * model.input_width(layer) * b, launches=1, itemsize=b)
            if layer > model.first_varying:
                backward = backward + Compute(touched=3.0 * sources * model.input_width(layer) * b, launches=2, itemsize=b)
        if len(model.layers) in piece:
            last = model.finish(rows)
            forward, backward = forward + last[0], backward + last[1]
        return forward, backward

    def layer_seconds(self, job: Job) -> list[float]:
        """Forward and backward of each layer on the mean sub-chunk, its exchanges included (alike in all stages) [s]."""
        model, facts = job.model.aggregating_first, self.facts(job)
        sums = [float(a.sum()) / facts.rows.size for a in (facts.rows, facts.edges, facts.sources, facts.numbers, facts.sends)]
        mean = ChunkFacts(*(np.full((1,) * axes, one) for axes, one in zip((2, 2, 2, 2, 3), sums, strict=True)))
        group, sent = self.group(job, 0), facts.sends.mean(0)
        alike: dict[object, float] = {}
        out = []
        for layer in range(1, len(model.layers) + 1):
            key = (layer == 1, layer == len(model.layers), model.layers[layer - 1])
            if key not in alike:
                pieces = [(0,), (layer,)] if layer == 1 and model.encoder else [(layer,)]
                works = [work for piece in pieces for work in self.work(job, piece, mean)]
                width = self.exchanged(job, (layer,)) * model.itemsize
                moving = [job.cost.exchange(way * width, group).alone for way in (sent, sent.T)] if width and sent.any() else []
                alike[key] = float(sum(np.sum(job.cost.compute_s(work)) for work in works) + sum(moving))
            out.append(alike[key])
        return out

    def boundary(self, job: Job, stage: int) -> int:
        """Numbers per row handed from `stage` to the next."""
        model, stages = self.shape(job)
        return model.input_width(stages[stage + 1].start) + (model.layers[0].h_in if model.hands_on_initial else 0)

    def refresh_work(self, job: Job, stage: int, rows: float) -> Compute:
        """At the start of a step a rank's historical rows, its own and those it reads, are laid out for every layer of the stage."""
        model, stages = self.shape(job)
        widths = sum(model.input_width(layer) for layer in stages[stage] if layer > model.first_varying)
        factor = 4 + (6 if model.dropout else 0)
        dropped = model.dropout and 1 in stages[stage] and not model.encoder and not model.nonzeros  # sparse rows: by each chunk
        inputs = 6 * model.features if dropped else 0
        return Compute(touched=float(rows * (factor * widths + inputs) * model.itemsize), launches=4, itemsize=model.itemsize)

    def weights(self, job: Job, stage: int) -> int:
        model, stages = self.shape(job)
        return model.weights_of(stages[stage])

    # -- the four answers ------------------------------------------------------------------------------------------

    def predict(self, job: Job) -> Prediction:
        """A flow shop: chunk k leaves a stage or link when it has arrived, its predecessor has left and its own work is
        done; in the hybrid that is the slowest member's between one exchange and the next. For equal chunks this is
        (K + stages - 1) slots forward and as many backward. Chunks in METIS' order. What passes a port bounds it from below."""
        assert self.stages is not None and self.chunks is not None
        cost, k, b, ranks = job.cost, self.chunks, job.model.itemsize, range(self.stages)
        ways = self._ways(job)
        kept = max(self._kept(job))
        refresh = [cost.compute_s(self.refresh_work(job, s, kept)) for s in ranks]
        update = [cost.compute_s(job.model.update(self.weights(job, s))) for s in ranks]
        reduced = [cost.all_reduce(self.weights(job, s) * b, self.group(job, s)) for s in ranks]
        sent = [self._handed_on(job, s) for s in ranks[:-1]]
        links = [transfer.alone for transfer in sent]  # seconds of the mean chunk to the next stage
        ready: Number = np.zeros(k)  # when each chunk reaches the stage
        ends: list[Number] = []
        for stage in ranks:
            alone = _alone(ways["f"][stage].chunks)
            ready, end = _through(ready, alone, refresh[stage], links[stage] if stage + 1 < self.stages else None)
            ends.append(end)
        ready = np.zeros(k)
        for stage in reversed(ranks):
            alone = _alone(ways["b"][stage].chunks[..., ::-1])
            ready, ends[stage] = _through(ready, alone, ends[stage], links[stage - 1] if stage else None)
        epoch = reduce(np.maximum, [ends[s] + reduced[s].alone + update[s] for s in ranks])
        ports: dict[Port, Number] = {}  # seconds that each is busy
        for busy, times in [(t.busy, 1) for t in reduced] + [(t.busy, 2 * k) for t in sent] + [(w.busy, 1) for w in ways["f"] + ways["b"]]:
            for port, seconds in busy.items():
                ports[port] = ports.get(port, 0.0) + times * seconds
        epoch = reduce(np.maximum, ports.values(), epoch)
        busy_s = reduce(np.maximum, [_largest(ways["f"][s].members + ways["b"][s].members) + refresh[s] + update[s] for s in ranks])
        exchanged = {way: [w.exchanged for w in ways[way]] for way in ways}
        # the first chunk's way through the pipeline, twice; the rest hides behind computation, and so may some of this
        moving = 2.0 * sum(links) + reduce(np.maximum, [f + b + r.alone for f, b, r in zip(*exchanged.values(), reduced, strict=True)])
        moving = np.minimum(moving, np.maximum(epoch - busy_s, 0.0))
        by_op = {op: reduce(np.maximum, [_largest(w.members) for w in ways[way]]) for op, way in (("forward", "f"), ("backward", "b"))}
        by_op["pipeline"] = 2 * k * reduce(np.maximum, links, 0.0)
        if self.members(job) > 1:
            by_op |= {f"halo:{way}": sum(seconds) for way, seconds in exchanged.items()}
            by_op["all_reduce"] = reduce(np.maximum, [transfer.alone for transfer in reduced])
        nbytes, by_link = self._bytes(job)
        once = sum(task.work.nbytes for task in self._setup(job) if isinstance(task.work, Collective))
        return Prediction(epoch, busy_s, moving, np.maximum(epoch - busy_s - moving, 0.0), nbytes, by_link, once, by_op)

    def _ways(self, job: Job) -> dict[str, list[_Way]]:
        """Every stage forward ('f') and backward ('b'), were it never to wait. Pieces that are alike share their work, and groups
        that sit alike their exchanges."""
        assert self.stages is not None
        model, facts, g, cost = job.model.aggregating_first, self.facts(job), self.members(job), job.cost
        computed: dict[object, tuple[Number, Number]] = {}
        moved: dict[object, dict[str, tuple[Number, Number, Transfer]]] = {}
        out: dict[str, list[_Way]] = {"f": [], "b": []}
        for stage in range(self.stages):
            group, pieces = self.group(job, stage), self.pieces(job, stage)
            at = [np.unique(place[list(group)], return_inverse=True)[1] for place in cost.places]
            alike = tuple(np.concatenate(at).tolist())
            if g > 1 and alike not in moved:
                moved[alike] = {way: _exchanges(cost, facts.sends if way == "f" else facts.sends.transpose(0, 2, 1), group) for way in "fb"}
            for number, way in enumerate("fb"):
                chunks: Number = 0.0
                members: Number = 0.0
                exchanged: Number = 0.0
                width = 0
                for piece in pieces:
                    specs = tuple(model.layers[layer - 1] for layer in piece if layer)
                    key = (piece[0] in (0, 1), len(model.layers) in piece, len(piece), specs)
                    if key not in computed:
                        forward, backward = (cost.compute_s(work) for work in self.work(job, piece, facts))
                        computed[key] = forward, backward
                    each = computed[key][number]
                    each = np.reshape(each, (*np.shape(each)[:-1], *facts.rows.shape))
                    chunks, members = chunks + each.max(-1), members + each.sum(-2)
                    if crossing := self.exchanged(job, piece) * model.itemsize:
                        latency, second, _ = moved[alike][way]
                        seconds = latency + crossing * second
                        chunks, exchanged, width = chunks + seconds, exchanged + _sum(seconds), width + crossing
                busy = {port: seconds * width for port, seconds in moved[alike][way][2].busy.items()} if width else {}
                out[way].append(_Way(chunks, members, exchanged, busy))
        return out

    def _handed_on(self, job: Job, stage: int) -> Transfer:
        """The mean chunk from a stage to the next, member to member at once; an empty sub-chunk is not sent."""
        g, row, rows = self.members(job), self.boundary(job, stage) * job.model.itemsize, self.facts(job).rows
        busy: dict[Port, Number] = {}
        latency: Number = 0.0
        for rank, mean, sent in zip(self.group(job, stage), rows.mean(0), (rows > 0).mean(0), strict=True):
            one = job.cost.send(rank, Send(rank + g, round(mean * row)))
            latency = np.maximum(latency, one.latency * sent)
            for port, seconds in one.busy.items():
                busy[port] = busy.get(port, 0.0) + seconds
        return Transfer(latency, busy)

    def _bytes(self, job: Job) -> tuple[dict[str, int], dict[str, int]]:
        """By operation and by class of link."""
        assert self.stages is not None
        facts, b, cost = self.facts(job), job.model.itemsize, job.cost
        by_op: dict[str, int] = {}
        by_link: dict[str, int] = {}

        def add(op: str, links: Mapping[Any, int]) -> None:
            for where, nbytes in links.items():
                if nbytes:
                    by_op[op], by_link[where] = by_op.get(op, 0) + nbytes, by_link.get(where, 0) + nbytes

        read = facts.sends.sum(0)
        for stage in range(self.stages):
            group = self.group(job, stage)
            if stage + 1 < self.stages:
                row = 2 * self.boundary(job, stage) * b
                for rank, rows in zip(group, facts.rows.sum(0).tolist(), strict=True):
                    add("pipeline", {cost.placement(rank, rank + len(group)): rows * row})
            if len(group) > 1:
                crossing = 2 * b * sum(self.exchanged(job, piece) for piece in self.pieces(job, stage))
                for i, j in np.argwhere(read):
                    add("halo", {cost.placement(group[i], group[j]): int(read[i, j]) * crossing})
                add("all_reduce", cost.ring_by_link(2 * (len(group) - 1) * self.weights(job, stage) * b, group))
        return by_op, by_link

    def schedule(self, job: Job, steps: int) -> Schedule:
        assert self.stages is not None and self.chunks is not None
        facts, out = self.facts(job), Schedule(job.ranks, steps)
        out.setup += self._setup(job)
        work: dict[tuple[int, ...], tuple[list[Compute], list[Compute]]] = {}
        for stage in range(self.stages):
            for piece in self.pieces(job, stage):
                both = self.work(job, piece, facts)
                work[piece] = tuple([_at(way, i) for i in range(facts.rows.size)] for way in both)  # type: ignore[assignment]
        for t in range(steps):
            order = chunk_order(job.workload.seed, t, self.chunks, self.shuffle)
            for rank in range(job.ranks):
                out.tasks += self._step(job, facts, work, rank, t, order)
        return out

    def _step(self, job: Job, facts: ChunkFacts, work: Mapping[tuple[int, ...], tuple[list[Compute], list[Compute]]], rank: int, t: int,
              order: list[int]) -> Iterator[Task]:  # fmt: skip
        """One rank's tasks in the order in which it does them."""
        g, b = self.members(job), job.model.itemsize
        stage, member = divmod(rank, g)
        group, pieces = tuple(self.group(job, stage)), self.pieces(job, stage)
        done = Label("history", t)
        yield Task(done, rank, "compute", self.refresh_work(job, stage, self._kept(job)[member]))
        waits: tuple[Label, ...] = ()
        for way, op, chunks, ahead in (("f", "forward", order, 1), ("b", "backward", order[::-1], -1)):
            source, target = rank - ahead * g, rank + ahead * g
            for c in chunks:
                rows, sends = int(facts.rows[c, member]), facts.sends[c] if way == "f" else facts.sends[c].T
                if rows and 0 <= source < job.ranks:
                    arrival = Label("receive", t, way, chunk=c, peer=source)
                    yield Task(arrival, rank, "receive", Recv(source, Label("pipeline", t, way, chunk=c, peer=rank)))
                    waits += (arrival,)
                for piece in pieces if way == "f" else pieces[::-1]:
                    width = self.exchanged(job, piece) * b if sends.any() else 0
                    sent = tuple((group[j], int(sends[member, j]) * width) for j in range(g) if sends[member, j])
                    halo = Label("halo", t, way, piece[0], c)
                    if width and way == "f":
                        yield Task(halo, rank, "comm", Collective("exchange", group, sent), (done, *waits))
                        waits = (halo,)
                    done = Label(op, t, layer=piece[0] if g > 1 else None, chunk=c)
                    yield Task(done, rank, "compute", work[piece][way == "b"][c * g + member], waits)
                    waits = ()
                    if width and way == "b":
                        yield Task(halo, rank, "comm", Collective("exchange", group, sent), (done,))
                        waits = (halo,)
                if rows and 0 <= target < job.ranks:
                    nbytes = rows * self.boundary(job, min(stage, stage + ahead)) * b
                    yield Task(Label("pipeline", t, way, chunk=c, peer=target), rank, "send", Send(target, nbytes), waits or (done,))
        if g > 1:
            task = all_reduce(Label("all_reduce", t), rank, group, self.weights(job, stage) * b, (done, *waits))
            yield task
            waits = (task.label,)
        yield Task(Label("update", t), rank, "compute", job.model.update(self.weights(job, stage)), waits)

    def _setup(self, job: Job) -> list[Task]:
        """The first stage's constant inputs cross once."""
        group, read = tuple(self.group(job, 0)), self.facts(job).sends.sum(0)
        if job.model.first_varying == 0 or not read.any():
            return []
        if job.graph is None:
            read = np.round(job.model.features_moved(read)).astype(np.int64)
        else:
            assert self.chunks is not None
            cut = job.cut(self.chunks, len(group))
            halos = [cut.halo(member) for member in range(len(group))]
            read = np.stack([np.bincount(cut.sub[halo] % len(group), job.features_bytes(halo), len(group)) for halo in halos], 1)
        return [Task(Label("input_halo", -1), rank, "comm", Collective("exchange", group, tuple(
            (peer, int(nbytes)) for peer, nbytes in zip(group, read[rank], strict=True) if nbytes))) for rank in group]  # fmt: skip

    def _kept(self, job: Job) -> list[int]:
        """Rows that each member keeps: its own and those of others that it reads."""
        facts = self.facts(job)
        return (facts.rows.sum(0) + facts.sends.sum((0, 1))).tolist()  # type: ignore[no-any-return]

    def preparation(self, job: Job) -> dict[str, float]:
        """Epoch 0 is a forward pass, stage after stage."""
        assert self.stages is not None and self.chunks is not None
        cut = 0.0 if job.graph is None else job.seconds_of(job.cut(self.chunks, self.members(job)))
        return {"partitioning": cut, "first pass": float(self.predict(job).by_op["forward"]) * self.stages}

    def memory(self, job: Job) -> Memory:
        """A stage holds its layers only, but for all vertices, and the history of each of its layers; its members share the rows. It is
        fullest when backward begins, with all that autograd keeps of all chunks."""
        assert self.stages is not None
        model, b, g = job.model, job.model.itemsize, self.members(job)
        kept = np.array(self._kept(job), dtype=float)
        uses = ("parameters", "optimizer", "features", "activations", "history", "pipeline", "graph", "buffers")
        use: Memory = {name: np.zeros(job.ranks) for name in uses}
        alike: dict[object, Footprint] = {}
        for s in range(self.stages):
            at = slice(s * g, s * g + g)
            layers = self.shape(job)[1][s]
            use["parameters"][at] = self.weights(job, s) * b
            use["optimizer"][at] = (3 if job.workload.optimizer == "adam" else 1) * self.weights(job, s) * b
            varying = sum(model.input_width(layer) for layer in layers if layer > model.first_varying)
            use["history"][at] = (3 + self.historical_gradients) * kept * varying * b  # past, mixed and slope
            use["features"][at], use["graph"][at] = self._constant(job, s)
            m = self._moments(job, s, alike)
            use["activations"][at], use["buffers"][at] = m.activations, m.buffers
            if s + 1 < self.stages:
                use["pipeline"][at] = self.facts(job).rows.sum(0) * self.boundary(job, s) * b  # buffers for what comes back
        use["runtime"] = np.full(job.ranks, RUNTIME[job.cluster.device.kind])
        return use

    def _constant(self, job: Job, stage: int) -> tuple[np.ndarray, np.ndarray]:
        """Features and edges [B] of a stage's members."""
        model, stages = self.shape(job)
        facts, kept = self.facts(job), np.array(self._kept(job), dtype=float)
        own, edges, sources = (numbers.astype(float).sum(0) for numbers in (facts.rows, facts.edges, facts.sources))
        kind, spec = job.workload.model, model.layers[stages[stage].start - 1]
        graph = block(kind, model, spec, own, sources, edges) + 8 * (kept + facts.sends.sum((0, 2)))
        if stage == len(stages) - 1:
            graph = graph + 16 * own  # labels and masks
        if stage:
            return np.zeros(own.size), graph
        features = model.features_held(kept if model.first_varying else own)
        if model.reads_sparse(1):  # what each chunk reads
            features = model.features_held(facts.sources, facts.numbers).sum(0)
            if kind == "sage":
                features = features + model.features_sorted(facts.rows).sum(0)
        elif model.reads_sparse(0):  # each chunk its rows
            features = features + 4 * len(facts.rows) * model.features
        elif model.first_varying and model.aggregate_cached(1):
            features = features + model.features_held(own)
        elif model.first_varying and model.dropout:
            features = 2 * features  # dropped anew in every step
        return features, graph

    def _moments(self, job: Job, stage: int, alike: dict[object, Footprint]) -> Moments:
        """A training step of a stage as executor/strategies/gnnpipe.py does it; arrays over its members. Layers that are alike share
        their numbers."""
        model, stages = self.shape(job)
        facts, b, kind, layers = self.facts(job), model.itemsize, job.workload.model, stages[stage]
        rows, edges, sources, taken = (a.astype(float) for a in (facts.rows, facts.edges, facts.sources, facts.sends.sum(1)))
        meets = np.asarray(facts.sends.any((1, 2), keepdims=True))[:, 0]  # [K, 1]: chunks whose members exchange rows
        own = rows.sum(0)
        m = Moments(own.size)
        products: list[Product] = []
        beside = np.zeros(own.size)  # the most that a chunk's backward pass takes on top
        if stage:
            m.keep(own * (self.boundary(job, stage - 1) + model.hands_on_initial * model.layers[0].h_in) * b)  # messages; initial rows
        elif model.encoder:
            dropped = own * (model.nonzeros or model.features) * b * (model.dropout > 0 and model.hands_on_initial)
            m.keep(dropped, own * model.encoder[1] * b)
            if not model.nonzeros:
                products.append(Product(rows, *model.encoder, False, ("bias relu",) if model.relu_after(0) else ("bias",)))
        for layer in layers:
            spec, sparse, varies = model.layers[layer - 1], model.reads_sparse(layer), layer > model.first_varying
            key = (spec, varies, model.relu_after(layer))
            if key not in alike:
                alike[key] = footprint(kind, model, layer, rows, sources, edges, apart=not sparse)
            need, linear = alike[key], not (spec.heads or spec.projects_first or kind == "resgcn")
            products += need.products
            out = (rows * spec.h_out * b).sum(0)
            read = (rows if linear else sources) * spec.h_in * b
            if not varies:
                m.keep(need.kept.sum(0), 0.0 if sparse or model.aggregate_cached(layer) else read.sum(0))
                beside = np.maximum(beside, (need.backward - need.kept).max(0))
                continue
            made = Prepared.of(model, spec, rows + taken)
            x = made.rows * meets  # own and others' rows side by side
            m.keep(x.sum(0), read.sum(0))
            if self.checkpoint and layer < len(model.layers):
                m.keep(out)
                if layer + 1 in layers:
                    m.free((rows * spec.h_out * b * meets).sum(0))  # the next layer has them beside others'
                again = (need.kept + made.saved + made.dropped) * (layers[-1] != len(model.layers))  # else in the last layer's place
            else:
                m.keep(need.kept.sum(0), (made.saved + made.dropped).sum(0))
                again = 0.0 * rows
            spread = (2 * rows + sources) * spec.h_in * b  # gradients of gathered and own rows, then of the rows read
            passed = (2 + 2 * meets) * made.rows  # through what prepared them
            beside = np.max([beside, (again + need.backward - need.kept).max(0), spread.max(0), passed.max(0)], axis=0)
        if layers[-1] == len(model.layers):
            trained = rows * min(1.0, job.stats.train_vertices / job.stats.vertices)
            most = loss(model, rows, trained)[1]
            m.keep(most.sum(0) - (trained * model.classes * b).sum(0), (rows * model.classes * b).sum(0))
            products += [Product(rows, *model.decoder)] if model.decoder else []
        m.at(beside)
        if job.cluster.device.kind == "cpu" and b == 4:
            m.buffers = m.buffers + kernels(dict.fromkeys(products), own.size)
        return m

    def traffic(self, job: Job) -> list[Phase]:
        """Of the mean chunk and layer: halo exchanges inside all groups, rows handed on member to member; and the groups' rings."""
        assert self.stages is not None and self.chunks is not None
        g, b, facts = self.members(job), job.model.itemsize, self.facts(job)
        halo, onward, rings = np.zeros((3, job.ranks, job.ranks))
        often = 0
        for stage in range(self.stages):
            group = np.array(self.group(job, stage))
            if crossing := [numbers for piece in self.pieces(job, stage) if (numbers := self.exchanged(job, piece))]:
                halo[np.ix_(group, group)] = facts.sends.mean(0) * b * sum(crossing) / len(crossing)
                often = max(often, len(crossing))
            if stage + 1 < self.stages:
                onward[group, group + g] = facts.rows.mean(0) * b * self.boundary(job, stage)
            if g > 1:
                rings[group, np.roll(group, -1)] = 2 * (g - 1) / g * b * self.weights(job, stage)
        both = [(halo, self.chunks * often), (onward, self.chunks)]
        return [*(Phase(sent, times) for way, times in both for sent in (way, way.T)), Phase(rings, 1)]

    def role(self, job: Job, rank: int) -> dict[str, int]:
        return {"stage": rank // self.members(job)}


@dataclass(frozen=True)
class _Way:
    """A stage's forward or backward over all chunks."""

    chunks: Number  # seconds of each chunk [.., K], exchanges included
    members: Number  # computation of each member [.., g]
    exchanged: Number  # exchanges
    busy: Mapping[Port, Number]  # by them


def _exchanges(cost: Cost, sends: np.ndarray, group: range) -> tuple[Number, Number, Transfer]:
    """Per chunk [.., K] the latency of its exchange and the seconds for one byte per row; and of all chunks together."""
    each = [cost.exchange(rows, group) for rows in sends]
    latency, alone = ([t.latency for t in each], [t.alone - t.latency for t in each])
    return _columns(latency), _columns(alone), cost.exchange(sends.sum(0), group)


def _columns(values: list[Number]) -> Number:
    """Numbers, or arrays [jobs, 1], side by side."""
    return np.concatenate(np.broadcast_arrays(*values), axis=-1) if any(map(np.ndim, values)) else np.array(values)


def _floats(counts: np.ndarray) -> Number:
    return counts.astype(float).ravel()


def _at(work: Compute, i: int) -> Compute:
    def pick(value: Any) -> float:
        return float(value[i]) if np.ndim(value) else float(value)

    return Compute(pick(work.flops), tuple((pick(rows), width) for rows, width in work.gathers), pick(work.touched), work.launches,
                   work.itemsize)  # fmt: skip


def _alone(seconds: Number) -> Alone:
    end = np.cumsum(seconds, axis=-1)
    return end - seconds, end


def _through(ready: Number, alone: Alone, start: Number, link: Number | None) -> tuple[Number, Number]:
    """Chunks in order through one stage, free from `start` on, and its link: (arrival at the next, end of the stage).

    Chunk k ends after the largest delay of a chunk j <= k.
    """
    begin, end = alone
    ends = np.maximum.accumulate(np.maximum(ready, start) - begin, axis=-1) + end
    if link is not None:
        sent = np.arange(1, np.shape(end)[-1] + 1) * link
        ready = np.maximum.accumulate(ends - (sent - link), axis=-1) + sent
    return ready, _last(ends)


def _last(values: Number) -> Number:
    return values[..., -1:] if np.ndim(values) > 1 else values[-1]


def _sum(values: Number) -> Number:
    return values.sum(-1, keepdims=values.ndim > 1)


def _largest(values: Number) -> Number:
    return values.max(-1, keepdims=values.ndim > 1)
