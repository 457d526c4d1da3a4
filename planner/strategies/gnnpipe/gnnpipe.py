"""GNNPipe: stages of consecutive layers form a pipeline, through which the graph passes in chunks.

Every rank, or group of ranks, is a stage: it has some consecutive layers, for the whole graph. The
graph is cut into chunks, which pass all stages forward and then, in reverse order, backward. A row
that a chunk reads from a later chunk is historical: its values are from an earlier epoch.

    pipeline: 3 stages, 4 chunks, one step; f: forward of the stage's layers on a chunk, b: backward
    stage 0  |f0|f1|f2|f3|                    |b3|b2|b1|b0|update
    stage 1     |f0|f1|f2|f3|              |b3|b2|b1|b0|update
    stage 2        |f0|f1|f2|f3|b3|b2|b1|b0|update

    hybrid: a stage is a group of g ranks (rank = stage * g + member), and member i owns sub-chunk i
    of every chunk; below, one chunk in a stage of 2 layers, g = 2; xx: halo exchange in the group
    member 0  receive|  |f l1|  |f l2|send      receive|b l2|  |b l1|  |send
    member 1  receive|xx|f l1|xx|f l2|send      receive|b l2|xx|b l1|xx|send
              after the last chunk: all-reduce in the group, update

Fresh and historical rows: rows of the current chunk, and of chunks that this step has already
processed, are fresh; all other rows are historical. Because backward runs in reverse order, the
gradient of a fresh row is complete before it is passed on to the previous layer.

Hybrid: a member keeps copies of the remote rows that its own rows read. A remote row is received
once per layer, when the chunk of that row is processed; the row's gradient is sent to the owner
when backward reaches that chunk. A remote row is thus fresh exactly when a local row would be, and
the hybrid computes the same numbers as the pipeline with the same chunks.

Three options, each with a knob:

    shuffle                 a new order of chunks in every epoch, the same on all stages
    historical_gradients    True: the previous epoch's gradients are added at historical rows;
                            False: no gradient passes through them
    period (alpha)          epoch t reads the embeddings of epoch alpha * floor((t-1) / alpha);
                            1 is off

Epoch 0 is an evaluation pass with the initial weights. Our choices where the paper is silent:

    GCNII's encoder output is a hidden row like any other, so layer 1 may read historical ones.
    With shuffling, historical gradients belong to the rows that the previous step read.
    There are 4 x stages chunks by default.
    Layers are divided by cost, so that the slowest stage is as fast as possible.

Exact only with one chunk and whole rows; otherwise historical rows, or packed rows between
stages, approximate the gradient.

Bytes per epoch, for N vertices, rows of H numbers of b bytes, g ranks per stage and W weights of
all stages:

    2 (stages-1) N H b        chunks between stages; twice that for GCNII, which also sends initial
                              rows; a model that sums its layers' rows also sends the sum; packed
                              rows are smaller (planner/gnn/rows.py)
    2 b sum_l H_{l-1} halo    hybrid: over layers whose input changes between steps; halo: rows that
                              other members of the group read, in any chunk (Sec. 3.2.3)
    2 (g-1) W b               hybrid: all-reduces of each stage's weights in its group

Without groups no term has a factor L. Source: GNNPipe (arXiv 2308.10087), Alg. 1 and Sec. 3.2.
(A halo of neighbours inside the same chunk only would give two thirds of the printed bytes.)

docs/strategies/gnnpipe.md says which files to read next, in which order.

Memory: a stage has its own layers only, but for all vertices, and the history of each layer's rows.
Nothing is freed before backward begins, so memory peaks there: at the tensors that autograd saves
for all chunks, plus the workspace of the largest chunk's backward pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Literal

import numpy as np

from gnnplan.planner.gnn.model import (
    OpMemory,
    block,
    decoded,
    footprint,
    keeps,
    loss_itself,
    rowwise,
)
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies.base import Memory, Resident, settled
from gnnplan.planner.strategies.gnnpipe.pipeline import Pipeline, chunk_order
from gnnplan.planner.strategies.program.memory import machine_code
from gnnplan.planner.strategies.program.program import (
    AllReduce,
    Exchange,
    Message,
    Op,
    Program,
    Receive,
)
from gnnplan.planner.vocabulary.schedule import Compute

Direction = Literal["f", "b"]  # forward, backward
SIGNS: dict[Direction, Literal[1, -1]] = {"f": 1, "b": -1}  # order of chunks and of stages


@dataclass(frozen=True)
class GNNPipe(Pipeline):
    """The strategy: a `Pipeline` with its operations and memory."""

    def settle(self, problem: Problem) -> GNNPipe:
        layers, stages = problem.workload.layers, self.stages
        if stages is None:
            stages = next(
                s for s in range(min(problem.ranks, layers), 0, -1) if problem.ranks % s == 0
            )
        chosen = replace(
            self, stages=stages, chunks=4 * stages if self.chunks is None else self.chunks
        )
        if chosen.layers_per_stage is None and chosen.suits(problem):
            seconds = layer_seconds(chosen, problem)
            return replace(chosen, layers_per_stage=balance(seconds, stages))
        return chosen

    def program(self, problem: Problem) -> Program:
        """Return the program from a cache; it does not depend on the placement or the cluster."""
        question = self, problem.ranks, problem.model, problem.workload
        partition = problem.graph, problem.stats, problem.method

        def make() -> Program:
            chunks, seed, inputs = (
                settled(self.chunks),
                problem.workload.seed,
                self.inputs_sent(problem),
            )
            first = tuple(self.group(problem, 0))
            setup = [Op("input_halo", work=Exchange(inputs), ranks=first)] * bool(inputs.any())
            return Program.of(
                list(_step(self, problem)),
                setup=lambda: setup,
                chunks=lambda t: chunk_order(seed, t, chunks, self.shuffle),
            )

        return problem.cache.get_recent("pipeline", (*question, *partition), make)

    def resident(self, problem: Problem) -> Resident:
        return resident(self, problem)

    def partitioned_s(self, problem: Problem) -> float:
        if problem.graph is None:
            return 0.0
        return problem.seconds_of(problem.cut(settled(self.chunks), self.members(problem)))

    def preparation(self, problem: Problem) -> dict[str, float]:
        """Return also the seconds of epoch 0: forward, stage after stage."""
        in_all_s = float(self.predict(problem).by_op["forward"]) * settled(self.stages)
        first_pass_s = in_all_s / problem.cost.cores.full_load_slowdown  # one stage at a time
        return super().preparation(problem) | {"first pass": first_pass_s}


def _step(pipe: Pipeline, problem: Problem) -> Iterator[Op]:
    """Yield the operations of a step, stage by stage. Equal pieces of stages share their work.

    refresh history; every chunk forward; every chunk backward, the last chunk first; update

    A chunk:  receive -> [exchange ->] compute ... -> send      forward, from the stage before
              receive -> compute [-> exchange] ... -> send      backward, from the stage after

    With a codec, rows are packed before `send` and unpacked after `receive`.
    """
    g, b, facts = pipe.members(problem), problem.model.itemsize, pipe.facts(problem)
    last = settled(pipe.stages) - 1
    rows = facts.rows.astype(float).ravel()  # of each sub-chunk
    works: dict[object, tuple[Compute, Compute]] = {}  # kind of piece -> forward and backward

    def message(stage: int, direction: Direction) -> Op:
        """Return the message of a chunk's rows, or of their gradients, to the next stage."""
        ranks, below = tuple(pipe.group(problem, stage)), stage - (direction == "b")
        width = pipe.boundary(problem, below)
        sent = Message(facts.rows * pipe.codec.row_bytes(width, b), SIGNS[direction] * g)
        return Op("pipeline", direction, work=sent, ranks=ranks, chunks=SIGNS[direction])

    def pass_of(stage: int, direction: Direction) -> Iterator[Op]:
        """Yield a stage's operations on every chunk in one direction."""
        sign, is_back = SIGNS[direction], direction == "b"
        op = partial(Op, ranks=tuple(pipe.group(problem, stage)), chunks=sign)
        if 0 <= stage - sign <= last:
            yield op("receive", direction, work=Receive(message(stage - sign, direction)))
            width = pipe.boundary(problem, stage - (not is_back))
            for unpack in pipe.codec.unpack(rows, width, b, added=False):
                yield op("unpack", direction, work=unpack)
        for piece in pipe.pieces(problem, stage)[::sign]:
            if (kind := pipe.kind_of(problem, piece)) not in works:
                works[kind] = pipe.work(problem, piece, facts)
            name, layer = ("forward", "backward")[is_back], piece[0] if g > 1 else None
            holds = partial(held, pipe, problem, stage, piece, is_back)
            ops = [op(name, layer=layer, work=works[kind][is_back], holds=holds)]
            if row_bytes := pipe.exchanged(problem, piece) * b:
                sends = facts.sends.swapaxes(1, 2) if is_back else facts.sends
                ops.insert(0, op("halo", direction, piece[0], work=Exchange(sends, row_bytes)))
            yield from ops[::sign]
        if 0 <= stage + sign <= last:
            width = pipe.boundary(problem, stage - is_back)
            for pack in pipe.codec.pack(rows, width, b, picked=False):
                yield op("pack", direction, work=pack)
            yield message(stage, direction)

    for stage in range(last + 1):
        ranks, weights = tuple(pipe.group(problem, stage)), pipe.weights(problem, stage)
        yield Op("history", work=Compute(launches=4, itemsize=b), ranks=ranks)
        yield from pass_of(stage, "f")
        yield from pass_of(stage, "b")
        if g > 1:
            size = weights * problem.model.weight_itemsize
            yield Op("all_reduce", work=AllReduce((size,)), ranks=ranks)
        yield Op("update", work=problem.model.update(weights), ranks=ranks)


# -- layers by cost --------------------------------------------------------------------------------


def layer_seconds(pipe: Pipeline, problem: Problem) -> list[float]:
    """Return the seconds of each layer, forward and backward, on the mean sub-chunk.

    The seconds include exchanges, and do not depend on the layer's stage.
    """
    model, facts, cost = problem.model.aggregating_first, pipe.facts(problem), problem.cost
    group, sent = pipe.group(problem, 0), facts.sends.mean(0)

    def seconds_of(layer: int) -> float:
        pieces = [(0,), (layer,)] if layer == 1 and model.encoder else [(layer,)]
        works = [work for piece in pieces for work in pipe.work(problem, piece, facts)]
        computing = sum(float(np.mean(cost.compute_s(work))) for work in works)
        width = pipe.exchanged(problem, (layer,)) * model.itemsize
        matrices = (sent, sent.T) if width and sent.any() else ()
        exchanging = sum(float(cost.exchange(rows * width, group).alone) for rows in matrices)
        return computing * cost.cores.full_load_slowdown + exchanging

    kinds = [pipe.kind_of(problem, (layer,)) for layer in range(1, len(model.layers) + 1)]
    seconds_by_kind = {kind: seconds_of(kinds.index(kind) + 1) for kind in {*kinds}}
    return [seconds_by_kind[kind] for kind in kinds]


def balance(seconds: Sequence[float], stages: int) -> tuple[int, ...]:
    """Return layers per stage, at least one each, with the fastest possible slowest stage.

    Of several such divisions, the division nearest to equal shares is returned.

    >>> balance([1, 1, 1, 1, 1], 2), balance([4, 1, 1, 1, 1], 2)
    ((3, 2), (1, 4))
    """
    before, layers = np.concatenate([[0.0], np.cumsum(seconds)]), len(seconds)

    def latest_fill(limit: float) -> list[int]:
        """Return each stage's first layer if stages, from the last on, fill `limit` seconds."""
        starts = [layers]
        for stage in reversed(range(stages)):
            starts.append(max(int(np.searchsorted(before, before[starts[-1]] - limit)), stage))
        return starts[::-1]

    # bisect the smallest limit with which the first stage begins at layer 0
    low, high = max(seconds) * (1 - 1e-9), float(before[-1]) * (1 + 1e-9)
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if latest_fill(middle)[0] == 0 else (middle, high)
    limit = high * (1 + 1e-9)
    earliest, ends = latest_fill(limit), [0]
    for stage in range(1, stages):
        furthest = min(
            int(np.searchsorted(before, before[ends[-1]] + limit, side="right")) - 1,
            layers - (stages - stage),
        )
        even = int(np.searchsorted(before, before[-1] * stage / stages * (1 - 1e-9)))
        ends.append(min(max(even, earliest[stage], ends[-1] + 1), furthest))
    return tuple(b - a for a, b in pairwise([*ends, layers]))


# -- data that stays from step to step -------------------------------------------------------------


def resident(pipe: Pipeline, problem: Problem) -> Resident:
    """Return what ranks have besides a step's tensors; a stage's members share its rows."""
    stages = range(settled(pipe.stages))
    data = [_data(pipe, problem, stage) for stage in stages]
    weights = [pipe.weights(problem, stage) for stage in stages]
    return Resident(
        {use: np.concatenate([each[use] for each in data]) for use in data[0]},
        weights=np.repeat(weights, pipe.members(problem)),
        groups=pipe.groups(problem),
        code=np.concatenate([_code(pipe, problem, stage) for stage in stages]),
    )


def _code(pipe: Pipeline, problem: Problem, stage: int) -> list[float]:
    """Return the bytes of machine code of a stage's members [g].

    oneDNN generates code for each size of a chunk; there are few different sizes."""
    layers = [layer for piece in pipe.pieces(problem, stage) for layer in piece]
    sizes_of_members = map(np.unique, pipe.facts(problem).rows.T)
    return [machine_code(problem, sizes.size, layers, sizes[-1]) for sizes in sizes_of_members]


def _data(pipe: Pipeline, problem: Problem, stage: int) -> Memory:
    """Return the bytes of constant inputs, history, receive buffers and edges of a stage [g]."""
    model, stages = pipe.shape(problem)
    facts, kept = pipe.facts(problem), np.array(pipe.kept(problem), dtype=float)
    own, edges, sources = (
        numbers.astype(float).sum(0) for numbers in (facts.rows, facts.edges, facts.sources)
    )
    varying = [model.input_width(each) for each in stages[stage] if each > model.first_varying]
    features, spec = np.zeros(own.size), model.layers[stages[stage].start - 1]
    graph = block(model, spec, own, sources, edges) + 8 * (kept + facts.sends.sum(2).sum(0))
    received = 0  # bytes per row
    if stage == len(stages) - 1:
        graph = graph + 16 * own  # labels and masks
    else:
        received = pipe.codec.row_bytes(pipe.boundary(problem, stage), model.itemsize)
    if stage == 0:
        features = np.asarray(model.inputs.stored_bytes(kept if model.first_varying else own))
        if model.rows(1).multiplied_first:  # each chunk has a copy of the rows that it reads
            by_chunk = model.inputs.stored_bytes(facts.sources) + model.own_index_bytes(facts.rows)
            features = np.asarray(by_chunk).sum(0)
        elif model.first_varying and model.aggregate_cached(1):
            features = features + model.inputs.stored_bytes(own)
        elif model.first_varying and model.dropout and model.layers[0].drops:
            features = 2 * features  # a copy after this step's dropout
    return {
        "features": features,
        # historical rows, the mix of fresh and historical rows that is read, and its gradients
        "history": (3 + pipe.historical_gradients) * kept * sum(varying) * model.itemsize,
        # buffers for the gradients received from the next stage
        "pipeline": own * received,
        "graph": np.asarray(graph),
    }


# -- memory of a step's operations -----------------------------------------------------------------


def held(
    pipe: Pipeline, problem: Problem, stage: int, piece: tuple[int, ...], is_back: bool
) -> OpMemory:
    """Return the memory of a piece on all chunks [g]: what it keeps until backward begins; or, in
    the backward pass, the largest workspace of a chunk, from which on chunks free what they kept.
    """
    each = [_of_chunks(pipe, problem, stage, layer) for layer in piece]
    if is_back:
        return OpMemory(np.max([np.asarray(layer.most) for layer in each], axis=(0, 1)), 0.0)
    return keeps(np.sum([np.asarray(layer.left) for layer in each], axis=(0, 1)))


def _of_chunks(pipe: Pipeline, problem: Problem, stage: int, layer: int) -> OpMemory:
    """Return what a layer (0: the encoder) keeps of each chunk until backward begins (`left`), and
    its workspace in the chunk's backward pass (`most`) [chunks, g]."""
    model, stages = pipe.shape(problem)
    layers, is_last, b = stages[stage], stage + 1 == len(stages), model.itemsize
    facts = pipe.facts(problem)
    rows, edges, sources, received = (
        counts.astype(float)
        for counts in (facts.rows, facts.edges, facts.sources, facts.sends.sum(1))
    )  # [chunks, g]
    if layer == 0:
        return OpMemory(0.0 * rows, rowwise(model.encoder_record, rows).left)
    spec, varies = model.layers[layer - 1], layer > model.first_varying
    apart = not model.rows(layer).multiplied_first
    need = footprint(model, layer, rows, sources, edges, apart=apart)
    saved, workspace, gradients = need.left, need.most - need.left, 0.0 * rows
    # rows gathered for the layer
    read = rows if spec.gathers_linearly and not spec.projects_first else sources
    if varies:
        saved = saved + rowwise(model.preparation_record(spec), rows + received).left
        # a copy of own and remote rows, or the layer's inputs saved for recomputation
        checkpoint = rows * (pipe.checkpoint and layer > layers.start)
        read = read + np.where(received.any(1, keepdims=True), rows + received, checkpoint)
        # gradients of gathered rows and own rows, then of the rows read
        gradients = (2 * rows + sources) * spec.h_in * b
    else:
        read = read * (apart and not model.aggregate_cached(layer))
    kept = saved
    if pipe.checkpoint and varies and layer < len(model.layers):
        kept = rows * spec.h_out * b * (layer + 1 == layers.stop)
        # on the last stage, backward reuses the memory of the last layer's outputs
        workspace = workspace + saved * (not is_last)
    kept, workspace = kept + read * spec.h_in * b, np.maximum(workspace, gradients)
    if layer == layers.start and stage:  # messages of the stage before
        kept = kept + rows * pipe.boundary(problem, stage - 1) * b
    if layer == len(model.layers):
        stats, logits = problem.stats, rows * model.classes * b
        trained = rows * min(1.0, stats.train_vertices / stats.vertices)
        scored = decoded(model, rows)
        kept = kept + scored.left + loss_itself(model, rows, trained) + logits
        workspace = np.maximum(workspace, scored.most - scored.left)
    if not is_last:  # an unpacked message, and copies of its two parts
        copies = pipe.codec.packs + bool(model.carried)
        workspace = workspace + rows * pipe.boundary(problem, stage) * copies * b
    return OpMemory(workspace, kept)
