"""GNNPipe: layers in a pipeline, the graph in chunks. A stage owns consecutive layers of the whole graph.

    3 stages, 4 chunks, one step
    stage 0  |f0|f1|f2|f3|                    |b3|b2|b1|b0|update
    stage 1     |f0|f1|f2|f3|              |b3|b2|b1|b0|update
    stage 2        |f0|f1|f2|f3|b3|b2|b1|b0|update           f: forward of the stage's layers on a chunk, b: backward

A chunk's neighbours in chunks that this step has already processed (its own included) are fresh, the others
historical. Backward runs in reverse order, so every fresh row has its whole gradient before it is passed on.
Three tricks, each with its switch: `shuffle` (a new order of chunks every epoch, the same on all stages),
`historical_gradients` (off: no gradient through historical rows; on: the previous epoch's are added), and `period`
alpha (epoch t uses the embeddings of epoch alpha * floor((t-1)/alpha); 1 is off). Epoch 0 is an evaluation pass with
the initial weights. Where the paper is silent: GCNII's encoder output is a hidden row like any other, so it may be historical
in layer 1; with shuffling, historical gradients follow what was read in the step before.

Bytes per epoch: 2 (stages-1) N H b, twice for GCNII, which hands its initial residual on. No factor L.
Paper: GNNPipe (arXiv 2308.10087) Alg. 1, Sec. 3.2.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import reduce
from itertools import pairwise
from typing import ClassVar

import numpy as np

from gnnplan.planner.cost import Number
from gnnplan.planner.errors import SpecError
from gnnplan.planner.gnn import Model
from gnnplan.planner.job import ChunkFacts, Job
from gnnplan.planner.schedule import Compute, Label, Recv, Schedule, Send, Task
from gnnplan.planner.strategies.layerwise import RUNTIME
from gnnplan.planner.strategies.strategy import Memory, Prediction, Strategy


def chunk_order(seed: int, step: int, chunks: int, shuffle: bool) -> list[int]:
    """The order in which all stages process the chunks in a step."""
    return np.random.default_rng([seed, step]).permutation(chunks).tolist() if shuffle else list(range(chunks))


def stage_layers(layers: int, stages: int) -> list[range]:
    """Consecutive layers (1-based) of each stage, as equal in number as can be.

    >>> stage_layers(5, 2)
    [range(1, 4), range(4, 6)]
    """
    bounds = [-(-layers * s // stages) for s in range(stages + 1)]
    return [range(a + 1, b + 1) for a, b in pairwise(bounds)]


Alone = tuple[Number, Number]  # begin and end of each chunk (last axis) in a stage that never waits [s]


@dataclass(frozen=True)
class GNNPipe(Strategy):
    """stages: one per rank (None: all ranks). chunks: None is 4 x stages."""

    stages: int | None = None
    chunks: int | None = None
    shuffle: bool = True
    historical_gradients: bool = False
    period: int = 23

    family: ClassVar[str] = "gnnpipe"
    claim: ClassVar[float] = 0.15  # the mean chunk on links, METIS' order instead of a shuffled one

    @property
    def exact(self) -> bool:
        return self.chunks == 1

    @classmethod
    def candidates(cls, job: Job) -> Iterator[Strategy]:
        stages = job.ranks
        if stages > 1:
            for chunks in (4 * stages, 2 * stages, 8 * stages, 1):
                yield cls(stages, chunks)

    @classmethod
    def absent(cls, job: Job) -> str:
        return "one rank: a pipeline needs at least two stages"

    def settle(self, job: Job) -> GNNPipe:
        stages = job.ranks if self.stages is None else self.stages
        return replace(self, stages=stages, chunks=4 * stages if self.chunks is None else self.chunks)

    def check(self, job: Job) -> None:
        assert self.stages is not None and self.chunks is not None
        if self.stages < 1 or self.chunks < 1:
            raise SpecError(f"gnnpipe: stages and chunks are at least 1 (stages: {self.stages}, chunks: {self.chunks})")
        if self.stages > job.workload.layers:
            raise SpecError(
                f"gnnpipe needs a layer per stage (layers: {job.workload.layers}, stages: {self.stages}); "
                f"use stages <= {job.workload.layers}"
            )
        if self.stages != job.ranks:
            raise SpecError(f"gnnpipe puts one stage on every rank (stages: {self.stages}, ranks: {job.ranks}); use --ranks {self.stages}")
        if self.chunks > job.stats.vertices:
            raise SpecError(f"gnnpipe needs a vertex per chunk (vertices: {job.stats.vertices}, chunks: {self.chunks}); use fewer chunks")
        if self.period < 1:
            raise SpecError(f"gnnpipe: period (alpha) is at least 1 (1: no fixing of the history), not {self.period}")

    # -- work ------------------------------------------------------------------------------------------------------

    def shape(self, job: Job) -> tuple[Model, list[range]]:
        """The model (rows are aggregated before they are multiplied: each row is computed once) and each stage's layers."""
        assert self.stages is not None
        return job.model.aggregating_first, stage_layers(job.workload.layers, self.stages)

    def stage_work(self, job: Job, stage: int, rows: Number, edges: Number, sources: Number) -> tuple[Compute, Compute]:
        """Forward and backward work of a stage on a chunk."""
        model, stages = self.shape(job)
        layers, b = stages[stage], model.itemsize
        forward = backward = Compute(itemsize=b)
        if 1 in layers and model.encoder:
            forward, backward = model.encode(rows)
        for layer in layers:
            forward = forward + model.forward(layer, rows, rows, edges)
            backward = backward + model.backward(layer, rows, rows, edges)
            if not model.aggregate_cached(layer):  # the rows read are gathered, and their gradients scattered
                forward = forward + Compute(touched=2.0 * sources * model.input_width(layer) * b, launches=1, itemsize=b)
            if layer > model.first_varying:
                backward = backward + Compute(touched=3.0 * sources * model.input_width(layer) * b, launches=2, itemsize=b)
        if len(model.layers) in layers:
            last = model.finish(rows)
            forward, backward = forward + last[0], backward + last[1]
        return forward, backward

    def boundary(self, job: Job, stage: int) -> int:
        """Numbers per row handed from `stage` to the next."""
        model, stages = self.shape(job)
        return model.input_width(stages[stage + 1].start) + (model.layers[0].h_in if model.hands_on_initial else 0)

    def refresh_work(self, job: Job, stage: int) -> Compute:
        """At the start of a step the historical rows are laid out for every layer of the stage."""
        model, stages = self.shape(job)
        widths = sum(model.input_width(layer) for layer in stages[stage] if layer > model.first_varying)
        factor = 4 + (6 if model.dropout else 0)
        inputs = 6 * model.features if model.dropout and 1 in stages[stage] and not model.encoder else 0
        return Compute(touched=float(job.stats.vertices * (factor * widths + inputs) * model.itemsize), launches=4, itemsize=model.itemsize)

    # -- the four answers ------------------------------------------------------------------------------------------

    def predict(self, job: Job) -> Prediction:
        """A flow shop: chunk k leaves a stage or link when it has arrived, its predecessor has left and its own work is
        done. For equal chunks this is (K + stages - 1) slots forward and as many backward. Chunks in METIS' order."""
        assert self.stages is not None and self.chunks is not None
        cost, k, facts, b = job.cost, self.chunks, job.chunks(self.chunks), job.model.itemsize
        forward, backward = self._unhindered(job, facts)
        fixed = [[cost.compute_s(work) for work in (self.refresh_work(job, s), job.model.update(self._weights(job, s)))]
                 for s in range(self.stages)]  # fmt: skip
        links: list[Number] = []  # seconds of the mean chunk to the next stage
        equal: dict[object, Number] = {}
        bytes_by_link: dict[str, int] = {}
        for stage in range(self.stages - 1):
            where, row = cost.placement(stage, stage + 1), self.boundary(job, stage) * b
            if (where, row) not in equal:
                equal[where, row] = cost.send(stage, Send(stage + 1, round(job.stats.vertices / k * row))).alone
            links.append(equal[where, row])
            bytes_by_link[where] = bytes_by_link.get(where, 0) + 2 * job.stats.vertices * row
        ready: Number = np.zeros(k)  # when each chunk reaches the stage
        ends: list[Number] = []
        for stage in range(self.stages):
            ready, end = _through(ready, forward[stage], fixed[stage][0], links[stage] if stage + 1 < self.stages else None)
            ends.append(end)
        ready = np.zeros(k)
        for stage in reversed(range(self.stages)):
            ready, ends[stage] = _through(ready, backward[stage], ends[stage], links[stage - 1] if stage else None)
        epoch = reduce(np.maximum, [end + fixed[s][1] for s, end in enumerate(ends)])
        slowest = [[_last(end) for _, end in way] for way in (forward, backward)]
        busy = reduce(np.maximum, [f + w + sum(more) for f, w, more in zip(*slowest, fixed, strict=True)])
        # the first chunk's way through the pipeline, twice; the rest hides behind computation, and so may some of this
        moving = np.minimum(2.0 * sum(links), np.maximum(epoch - busy, 0.0))
        total = sum(bytes_by_link.values())
        by_op = {op: reduce(np.maximum, seconds) for op, seconds in zip(("forward", "backward"), slowest, strict=True)}
        by_op["pipeline"] = 2 * k * reduce(np.maximum, links, 0.0)
        bubble = np.maximum(epoch - busy - moving, 0.0)
        return Prediction(epoch, busy, moving, bubble, {"pipeline": total} if total else {}, bytes_by_link, 0, by_op)

    def _unhindered(self, job: Job, facts: ChunkFacts) -> tuple[list[Alone], list[Alone]]:
        """Forward and backward (last chunk first) of every stage, were it never to wait. Stages of equal layers share theirs."""
        model, stages = self.shape(job)
        rows, edges, sources = (np.asarray(a, dtype=float) for a in (facts.rows, facts.edges, facts.sources))
        found: dict[object, tuple[Alone, Alone]] = {}
        out = []
        for stage, layers in enumerate(stages):
            key = (1 in layers, len(model.layers) in layers, *(model.layers[layer - 1] for layer in layers))
            if key not in found:
                forward, backward = (job.cost.compute_s(work) for work in self.stage_work(job, stage, rows, edges, sources))
                found[key] = _alone(forward), _alone(backward[..., ::-1])
            out.append(found[key])
        return [f for f, _ in out], [b for _, b in out]

    def _weights(self, job: Job, stage: int) -> int:
        model, stages = self.shape(job)
        return model.weights_of(stages[stage])

    def schedule(self, job: Job, steps: int) -> Schedule:
        assert self.stages is not None and self.chunks is not None
        facts, out = job.chunks(self.chunks), Schedule(self.stages, steps)
        work = [
            [self.stage_work(job, s, float(facts.rows[c]), float(facts.edges[c]), float(facts.sources[c])) for c in range(self.chunks)]
            for s in range(self.stages)
        ]
        last = self.stages - 1
        for t in range(steps):
            order = chunk_order(job.workload.seed, t, self.chunks, self.shuffle)
            for s in range(self.stages):
                out.tasks.append(Task(Label("history", t), s, "compute", self.refresh_work(job, s)))
                ways = (("f", "forward", order, s - 1, s + 1), ("b", "backward", order[::-1], s + 1, s - 1))
                for way, op, chunks, before, behind in ways:
                    for c in chunks:
                        waits: tuple[Label, ...] = ()
                        if 0 <= before <= last:
                            arrival = Label("receive", t, way, chunk=c, peer=before)
                            of = Label("pipeline", t, way, chunk=c, peer=s)
                            out.tasks.append(Task(arrival, s, "receive", Recv(before, of)))
                            waits = (arrival,)
                        done = Label(op, t, chunk=c)
                        out.tasks.append(Task(done, s, "compute", work[s][c][way == "b"], waits))
                        if 0 <= behind <= last:
                            width = self.boundary(job, min(s, behind))
                            nbytes = round(facts.rows[c] * width * job.model.itemsize)
                            onward = Label("pipeline", t, way, chunk=c, peer=behind)
                            out.tasks.append(Task(onward, s, "comm", Send(behind, nbytes), (done,)))
                out.tasks.append(Task(Label("update", t), s, "compute", job.model.update(self._weights(job, s))))
        return out

    def memory(self, job: Job) -> Memory:
        """A stage holds its layers only, but for all vertices, and the history of each of its layers."""
        assert self.stages is not None and self.chunks is not None
        model, stages = self.shape(job)
        n, e, b = job.stats.vertices, job.stats.edges, model.itemsize
        facts = job.chunks(self.chunks)
        uses = ("parameters", "optimizer", "features", "activations", "history", "pipeline", "graph")
        use: Memory = {name: np.zeros(self.stages) for name in uses}
        for s, layers in enumerate(stages):
            weights = model.weights_of(layers) * b
            use["parameters"][s] = weights
            use["optimizer"][s] = (3 if job.workload.optimizer == "adam" else 1) * weights
            use["graph"][s] = 16.0 * (e + n) + 8.0 * facts.sources.sum()
            for layer in layers:
                spec = model.layers[layer - 1]
                kept = n * (2 * spec.h_in + spec.h_out)
                if layer <= model.first_varying:
                    use["features"][s] += n * spec.h_in * b
                else:
                    use["history"][s] += 3 * n * spec.h_in * b  # historical rows, this step's rows, gradients
                    kept += n * spec.h_in * (1 if model.dropout else 0)
                use["activations"][s] += kept * b
            if 1 in layers and model.encoder:
                use["features"][s] += n * model.features * b
            if s + 1 < self.stages:
                use["pipeline"][s] += 2 * n * self.boundary(job, s) * b
        use["runtime"] = np.full(self.stages, RUNTIME[job.cluster.device.kind])
        return use

    def placement(self, job: Job) -> list[dict[str, int]]:
        return [{"rank": r, "server": s, "gpu": r % job.cluster.gpus_per_server, "stage": r} for r, s in enumerate(job.servers)]


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
