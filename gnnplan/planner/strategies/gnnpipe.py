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

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np

from gnnplan.planner.chunks import ChunkFacts
from gnnplan.planner.cost import Number
from gnnplan.planner.errors import SpecError
from gnnplan.planner.gnn import Model
from gnnplan.planner.grouping import Phase
from gnnplan.planner.job import Job
from gnnplan.planner.schedule import WORKED, Collective, Compute, Label, Recv, Schedule, Send, Task, all_reduce
from gnnplan.planner.strategies import flowshop
from gnnplan.planner.strategies.gnnpipe_memory import memory
from gnnplan.planner.strategies.strategy import Memory, Prediction, Strategy

TRICKS = ("shuffle", "historical_gradients", "period")
MOST_CHUNKS = 100_000
MOST_PAIRS = 2**20  # chunks x pairs of a stage's members that a candidate may have: more would take too long to look at


def chunk_order(seed: int, step: int, chunks: int, shuffle: bool) -> list[int]:
    """The order in which all stages process the chunks in a step."""
    return np.random.default_rng([seed, step]).permutation(chunks).tolist() if shuffle else list(range(chunks))


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
    # pipelines: 0.05; groups inside servers: 0.30, where members of few rows drift apart between exchanges. Groups over servers share
    # cards with each other too
    claim: ClassVar[float] = 0.35

    @property
    def exact(self) -> bool:
        return self.chunks == 1

    def approximates_as(self, other: Strategy) -> bool:
        return isinstance(other, GNNPipe) and all(getattr(self, trick) == getattr(other, trick) for trick in TRICKS)

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
            settled = replace(settled, layers_per_stage=flowshop.balance(flowshop.layer_seconds(settled, job), stages))
        return settled

    def check(self, job: Job) -> None:
        self.must_have_its_mode(job)
        if problem := self._problem(job):
            raise SpecError(problem)

    def _problem(self, job: Job) -> str | None:
        """Rule, numbers and remedy where the knobs do not suit the job."""
        assert self.stages is not None and self.chunks is not None
        layers, vertices, per_stage = job.workload.layers, job.stats.vertices, self.layers_per_stage
        if self.stages < 1 or self.chunks < 1:
            return f"gnnpipe: stages and chunks are at least 1 (stages: {self.stages}, chunks: {self.chunks}); leave them out"
        if self.stages > layers:
            return f"gnnpipe needs a layer per stage (layers: {layers}, stages: {self.stages}); use stages <= {layers}"
        if job.ranks % self.stages:
            fit = ", ".join(str(s) for s in range(1, min(job.ranks, layers) + 1) if job.ranks % s == 0)
            return (f"gnnpipe gives every stage equally many ranks (stages: {self.stages}, ranks: {job.ranks}); "
                    f"use stages in {{{fit}}} or --ranks {self.stages * max(1, job.ranks // self.stages)}")  # fmt: skip
        if self.chunks > MOST_CHUNKS:
            return f"gnnpipe: at most {MOST_CHUNKS:,} chunks are planned (chunks: {self.chunks:,}); use fewer, as 4 per rank"
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
            return f"gnnpipe: period (alpha) is at least 1 (1: the history is the last epoch's), not {self.period}; use 1 or the paper's 23"
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
        kept = np.tile(_floats(np.array(self.kept(job))), len(facts.rows))
        model, width = job.model.aggregating_first, self.exchanged(job, piece)
        b = model.itemsize
        forward = backward = Compute(itemsize=b)
        if width:  # rows are packed, laid out beside the others', prepared; their gradients the same way back
            dropped = taken if model.dropout and model.layers[piece[0] - 1].drops else 0.0
            forward = Compute(touched=(2.0 * given + 2 * rows + 4 * taken) * width * b, launches=4, itemsize=b, worked=dropped * width)
            backward = Compute(touched=(3.0 * given + 2 * rows + 4 * taken + WORKED * dropped) * width * b, launches=4, itemsize=b)
        if 0 in piece:
            forward, backward = model.encode(rows)
        for layer in piece:
            if not layer:
                continue
            projected = sources if model.layers[layer - 1].projects_first else rows
            forward = forward + model.forward(layer, rows, projected, edges, read=sources)
            backward = backward + model.backward(layer, rows, projected, edges, read=sources)
            if self.checkpoint and layer > model.first_varying and layer < len(model.layers):
                again, spec = model.forward(layer, rows, projected, edges, read=sources), model.layers[layer - 1]
                backward = backward + (again if spec.heads or spec.sums > 1 else replace(again, gathers=()))
            wide = model.input_width(layer)
            if not (model.aggregate_cached(layer) or model.reads_sparse(layer)):  # what is read is picked from all that is kept,
                forward = forward + Compute(picked=((sources, wide, kept),), touched=sources * wide * b, launches=1, itemsize=b)
            if layer > model.first_varying:  # its gradients are made and added there, to scattered rows one by one
                scattered = sources - rows
                backward = backward + Compute(picked=((2.0 * scattered, wide, kept),), touched=(3.0 * rows + scattered) * wide * b,
                                              launches=3, itemsize=b)  # fmt: skip
        if len(model.layers) in piece:
            last = model.finish(rows)
            forward, backward = forward + last[0], backward + last[1]
        return forward, backward

    def boundary(self, job: Job, stage: int) -> int:
        """Numbers per row handed from `stage` to the next."""
        model, stages = self.shape(job)
        return model.input_width(stages[stage + 1].start) + (model.layers[0].h_in if model.hands_on_initial else 0)

    def refresh_work(self, job: Job, stage: int, rows: float) -> Compute:
        """At the start of a step a rank's historical rows, its own and those it reads, are laid out for every layer of the stage."""
        model, stages = self.shape(job)
        varying = [model.layers[layer - 1] for layer in stages[stage] if layer > model.first_varying]
        dropped = [spec.h_in for spec in varying if model.dropout and spec.drops]
        if model.dropout and 1 in stages[stage] and not model.encoder and not model.nonzeros:  # sparse rows: by each chunk
            dropped.append(model.features)
        return Compute(touched=float(4 * rows * sum(spec.h_in for spec in varying) * model.itemsize), launches=4, itemsize=model.itemsize,
                       worked=float(rows * sum(dropped)))  # fmt: skip

    def weights(self, job: Job, stage: int) -> int:
        model, stages = self.shape(job)
        return model.weights_of(stages[stage])

    # -- the four answers ------------------------------------------------------------------------------------------

    def predict(self, job: Job) -> Prediction:
        return flowshop.predict(self, job)

    def memory(self, job: Job) -> Memory:
        return memory(self, job)

    def nbytes(self, job: Job) -> tuple[dict[str, int], dict[str, int]]:
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
                add("halo", cost.bytes_by_link(read * crossing, group))
                add("all_reduce", cost.reduced_by_link(2 * (len(group) - 1) * self.weights(job, stage) * b, group))
        return by_op, by_link

    def schedule(self, job: Job, steps: int) -> Schedule:
        assert self.stages is not None and self.chunks is not None
        facts, out = self.facts(job), Schedule(job.ranks, steps)
        out.setup += self.setup(job)
        work: dict[tuple[int, ...], tuple[list[Compute], list[Compute]]] = {}
        for stage in range(self.stages):
            for piece in self.pieces(job, stage):
                both = self.work(job, piece, facts)
                work[piece] = tuple([way.at(i) for i in range(facts.rows.size)] for way in both)  # type: ignore[assignment]
        g, groups = self.members(job), [tuple(self.group(job, stage)) for stage in range(self.stages)]

        @cache
        def exchange(rank: int, chunk: int, way: str, width: int) -> Collective | None:
            """A rank's share of its group's, if there is one, with `width` bytes per row."""
            sends = facts.sends[chunk] if way == "f" else facts.sends[chunk].T
            if not width or not sends.any():
                return None
            group, rows = groups[rank // g], sends[rank % g].tolist()
            return Collective("exchange", group, tuple((peer, n * width) for peer, n in zip(group, rows, strict=True) if n))

        for t in range(steps):
            order = chunk_order(job.workload.seed, t, self.chunks, self.shuffle)
            for rank in range(job.ranks):
                out.tasks += self._step(job, facts, work, exchange, rank, t, order)
        return out

    def _step(self, job: Job, facts: ChunkFacts, work: Mapping[tuple[int, ...], tuple[list[Compute], list[Compute]]],
              exchange: Callable[[int, int, str, int], Collective | None], rank: int, t: int,
              order: list[int]) -> Iterator[Task]:  # fmt: skip
        """One rank's tasks in the order in which it does them."""
        g, b = self.members(job), job.model.itemsize
        stage, member = divmod(rank, g)
        group, pieces = tuple(self.group(job, stage)), [(piece, self.exchanged(job, piece) * b) for piece in self.pieces(job, stage)]
        per_chunk = facts.rows[:, member].tolist()
        done = Label("history", t)
        yield Task(done, rank, "compute", self.refresh_work(job, stage, self.kept(job)[member]))
        waits: tuple[Label, ...] = ()
        for way, op, chunks, ahead in (("f", "forward", order, 1), ("b", "backward", order[::-1], -1)):
            source, target = rank - ahead * g, rank + ahead * g
            onward = self.boundary(job, min(stage, stage + ahead)) * b if 0 <= target < job.ranks else 0  # bytes per row
            for c in chunks:
                rows = per_chunk[c]
                if rows and 0 <= source < job.ranks:
                    arrival = Label("receive", t, way, chunk=c, peer=source)
                    yield Task(arrival, rank, "receive", Recv(source, Label("pipeline", t, way, chunk=c, peer=rank)))
                    waits += (arrival,)
                for piece, width in pieces if way == "f" else pieces[::-1]:
                    crossing, halo = exchange(rank, c, way, width), Label("halo", t, way, piece[0], c)
                    if crossing and way == "f":
                        yield Task(halo, rank, "comm", crossing, (done, *waits))
                        waits = (halo,)
                    done = Label(op, t, layer=piece[0] if g > 1 else None, chunk=c)
                    yield Task(done, rank, "compute", work[piece][way == "b"][c * g + member], waits)
                    waits = ()
                    if crossing and way == "b":
                        yield Task(halo, rank, "comm", crossing, (done,))
                        waits = (halo,)
                if rows and onward:
                    message = Send(target, rows * onward)
                    yield Task(Label("pipeline", t, way, chunk=c, peer=target), rank, "send", message, waits or (done,))
        if g > 1:
            task = all_reduce(Label("all_reduce", t), rank, group, self.weights(job, stage) * b, (done, *waits))
            yield task
            waits = (task.label,)
        yield Task(Label("update", t), rank, "compute", job.model.update(self.weights(job, stage)), waits)

    def setup(self, job: Job) -> list[Task]:
        """The first stage's constant inputs cross once."""
        group, sent = tuple(self.group(job, 0)), self.inputs_sent(job)
        if not sent.any():
            return []
        return [Task(Label("input_halo", -1), rank, "comm", Collective("exchange", group, tuple(
            (peer, int(nbytes)) for peer, nbytes in zip(group, sent[rank], strict=True) if nbytes))) for rank in group]  # fmt: skip

    def inputs_sent(self, job: Job) -> np.ndarray:
        """Bytes of constant inputs that the first stage's members send each other [g, g]."""
        read = self.facts(job).sends.sum(0)
        if job.model.first_varying == 0 or not read.any():
            return np.zeros_like(read)
        if job.graph is None:
            return np.asarray(np.round(job.model.features_moved(read)).astype(np.int64))
        assert self.chunks is not None
        cut, members = job.cut(self.chunks, len(read)), range(len(read))
        halos = [cut.halo(member) for member in members]
        return np.stack([np.bincount(cut.sub[halo] % len(read), job.features_bytes(halo), len(read)) for halo in halos], 1)

    def kept(self, job: Job) -> list[int]:
        """Rows that each member keeps: its own and those of others that it reads."""
        facts = self.facts(job)
        return (facts.rows.sum(0) + facts.sends.sum((0, 1))).tolist()  # type: ignore[no-any-return]

    def preparation(self, job: Job) -> dict[str, float]:
        """Epoch 0 is a forward pass, stage after stage."""
        assert self.stages is not None and self.chunks is not None
        cut = 0.0 if job.graph is None else job.seconds_of(job.cut(self.chunks, self.members(job)))
        return {"partitioning": cut, "first pass": float(self.predict(job).by_op["forward"]) * self.stages}

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


def _floats(counts: np.ndarray) -> Number:
    return counts.astype(float).ravel()
