"""GNNPipe: stages of consecutive layers form a pipeline, through which the graph passes in chunks.

Every rank, or group of ranks, is a stage: it has some consecutive layers, for the whole graph. The
graph is cut into chunks, which pass all stages forward and then, in reverse order, backward. A row
that a chunk reads from a later chunk is historical: its values are from an earlier epoch.

    rank = stage * g + member      g ranks form a stage; member i owns sub-chunk i of every chunk
    piece                          layers that a stage does on a chunk without an exchange between
                                   them: all its layers if g = 1, else one layer (0: the encoder)

    pipeline: 3 stages, 4 chunks, one step; f: forward of the stage's layers on a chunk, b: backward
    stage 0  |f0|f1|f2|f3|           |b3|b2|b1|b0|update
    stage 1     |f0|f1|f2|f3|     |b3|b2|b1|b0|update
    stage 2        |f0|f1|f2|f3|b3|b2|b1|b0|update

    hybrid: one chunk in a stage of 2 layers, g = 2; xx: halo exchange in the group
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
                              rows; a user's module also sends rows that later layers read; packed
                              rows are smaller (planner/gnn/rows.py)
    2 b sum_l H_{l-1} halo    hybrid: over layers whose input changes between steps; halo: rows that
                              other members of the group read, in any chunk (Sec. 3.2.3)
    2 (g-1) W b               hybrid: all-reduces of each stage's weights in its group, with at
                              least 4 B for b

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
from functools import partial, reduce
from itertools import accumulate, pairwise
from operator import add
from typing import ClassVar, Literal, Self

import numpy as np

from gnnplan.planner.gnn.model import (
    OpMemory,
    block_bytes,
    decoder_memory,
    keeps,
    layer_memory,
    loss_bytes,
    rowwise_memory,
)
from gnnplan.planner.ownership.layout import ChunkCounts
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies.base import (
    Example,
    Memory,
    Range,
    Resident,
    Rules,
    Strategy,
    settled,
)
from gnnplan.planner.strategies.program.account import machine_code
from gnnplan.planner.strategies.program.program import (
    AllReduce,
    Exchange,
    Message,
    Op,
    Program,
    Receive,
)
from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.planner.vocabulary.numbers import offsets
from gnnplan.planner.vocabulary.schedule import BothPasses, Compute

Piece = tuple[int, ...]  # layers without an exchange between them (0: the encoder)
LOSSY = ("shuffle", "historical_gradients", "period", "bits")  # knobs that change the gradient
MOST_CHUNKS = 100_000
# limit of chunks times pairs of a stage's members; a candidate with more is slow to predict
MOST_PAIRS = 2**20


def chunk_order(seed: int, step: int, chunks: int, shuffle: bool) -> list[int]:
    """Return the order in which all stages process the chunks in a step."""
    if not shuffle:
        return list(range(chunks))
    order: list[int] = np.random.default_rng([seed, step]).permutation(chunks).tolist()
    return order


@dataclass(frozen=True)
class GNNPipe(Strategy):
    """GNNPipe.

    stages: number of stages, each of ranks / stages ranks; None: as many as the layers allow.
    chunks: number of chunks; None: 4 x stages.
    shuffle: draw a new order of chunks in every epoch, the same on all stages.
    historical_gradients: add the previous epoch's gradients at historical rows; False: no gradient
        passes through them.
    period: the paper's alpha: epoch t reads the historical rows of epoch
        alpha * floor((t-1) / alpha); 1: those of the epoch before.
    layers_per_stage: number of layers of each stage; None: divided by cost.
    checkpoint: keep a layer's inputs and gathered rows only, or their sums where aggregation is
        linear and comes first, and recompute the rest in the backward pass.
    bits: 8, 4 or 2 bits per number of a row sent to the next stage; None: rows are not quantized.
    """

    stages: int | None = None
    chunks: int | None = None
    shuffle: bool = True
    historical_gradients: bool = False
    period: int = 23
    layers_per_stage: tuple[int, ...] | None = None
    checkpoint: bool = False
    bits: int | str | None = None

    allowed: ClassVar[Rules] = {
        "stages": Range("a number of stages", 1),
        "chunks": Range("a number of chunks", 1, MOST_CHUNKS),
        "period": Range("the paper's alpha (1: the history is the last epoch's)", 1),
    }
    family = "gnnpipe"
    rounds_rows = True
    executor = "gnnplan.executor.strategies.gnnpipe"
    examples = (
        Example("gnnpipe(stages=2,chunks=1)"),
        Example("gnnpipe(stages=2,chunks=3)"),
        Example("gnnpipe(stages=2,chunks=3,bits=4)"),
    )
    # pipelines: 0.05; members of hybrids contend for ports, and drift apart if they have few rows
    claim = 0.20

    @property
    def exact(self) -> bool:
        return self.chunks == 1 and not self.codec.packs

    @property
    def carries(self) -> str:
        return "" if self.chunks == 1 else "historical rows"

    def approximates_as(self, other: Strategy) -> bool:
        return isinstance(other, GNNPipe) and all(
            getattr(self, knob) == getattr(other, knob) for knob in LOSSY
        )

    @classmethod
    def candidates(cls, problem: Problem) -> Iterator[Strategy]:
        for stages in _fitting(problem)[:0:-1]:
            for chunks in dict.fromkeys((4 * stages, 4 * problem.ranks, 1)):
                if chunks * (problem.ranks // stages) ** 2 <= MOST_PAIRS:
                    yield cls(stages, chunks)

    @classmethod
    def absent(cls, problem: Problem) -> str:
        if problem.ranks == 1:
            return "one rank: a pipeline needs at least two stages"
        return (
            "a pipeline needs two stages or more, each with a layer and equally many ranks "
            f"(layers: {problem.workload.layers}, ranks: {problem.ranks})"
        )

    def settle(self, problem: Problem) -> Self:
        stages = _fitting(problem)[-1] if self.stages is None else self.stages
        chunks = 4 * stages if self.chunks is None else self.chunks
        chosen = replace(self, stages=stages, chunks=chunks)
        if chosen.layers_per_stage is None and chosen.suits(problem):
            seconds = layer_seconds(chosen, problem)
            return replace(chosen, layers_per_stage=balance(seconds, stages))
        return chosen

    def check(self, problem: Problem) -> None:
        self.check_mode(problem)
        self.codec.check(self.name, problem.workload.precision, adapts=False)
        stages, chunks = settled(self.stages), settled(self.chunks)
        per_stage = self.layers_per_stage
        layers, vertices = problem.workload.layers, problem.stats.vertices
        if stages > layers:
            raise SpecError(
                f"gnnpipe needs a layer per stage (layers: {layers}, stages: {stages}); use"
                f" stages <= {layers}"
            )
        if problem.ranks % stages:
            fit = ", ".join(map(str, _fitting(problem)))
            raise SpecError(
                f"gnnpipe gives every stage equally many ranks (stages: {stages}, ranks:"
                f" {problem.ranks}); use stages in {{{fit}}} or --ranks"
                f" {stages * max(1, problem.ranks // stages)}"
            )
        if chunks > vertices:
            raise SpecError(
                f"gnnpipe needs a vertex per chunk (vertices: {vertices}, chunks: {chunks});"
                " use fewer chunks"
            )
        if problem.ranks > vertices * stages:
            raise SpecError(
                f"gnnpipe needs a vertex per rank of a stage (vertices: {vertices}, ranks of a"
                f" stage: {problem.ranks // stages}); use --ranks"
                f" {vertices * stages} or less"
            )
        if per_stage is not None and (
            len(per_stage) != stages or min(per_stage) < 1 or sum(per_stage) != layers
        ):
            raise SpecError(
                f"gnnpipe: layers_per_stage gives each of {stages} stages a layer or more,"
                f" {layers} in all, not {per_stage}; leave it out to have them balanced by cost"
            )
        if per_stage is not None and (tied := _tied_across(problem, per_stage)):
            raise SpecError(
                f"gnnpipe: a stage trains the parameters of its own layers, and layers {tied[0]}"
                f" and {tied[1]} have some in common (layers_per_stage: {per_stage}); use"
                " stages=1, a layers_per_stage that keeps them in one stage, or graph_parallel"
            )
        if problem.model.norm == "batch":
            raise SpecError(
                "gnnpipe: a chunk does not have the rows of other chunks, so batch norm has no"
                " moments of all vertices; use norm=layer, or graph_parallel"
            )
        if self.historical_gradients and not problem.model.prepares_linearly:
            raise SpecError(
                "gnnpipe: historical_gradients would pass through a norm or ReLU at rows that no"
                " longer exist; use historical_gradients=False, or a model without norm"
            )

    def program(self, problem: Problem) -> Program:
        """Return the program from a cache; it does not depend on the placement or the cluster."""
        question = self, problem.ranks, problem.model, problem.workload
        partition = problem.graph, problem.stats, problem.method

        def make() -> Program:
            chunks, seed = settled(self.chunks), problem.workload.seed
            setup = self._setup(problem)
            return Program.of(
                list(_step(self, problem)),
                setup=lambda: setup,
                chunk_order=lambda t: chunk_order(seed, t, chunks, self.shuffle),
            )

        return problem.cache.get_recent("pipeline", (*question, *partition), make)

    def resident(self, problem: Problem) -> Resident:
        """Return what ranks have besides a step's tensors; a stage's members share its rows."""
        stages, g = self.pipeline(problem), self.members(problem)
        data = [stage.data() for stage in stages]
        # oneDNN generates code for each size of a chunk; there are few different sizes
        sizes_of_members = [np.unique(rows) for rows in stages[0].facts.rows.T]
        code = [
            machine_code(problem, sizes.size, sum(stage.pieces, ()), sizes[-1])
            for stage in stages
            for sizes in sizes_of_members
        ]
        pairs = [range(rank, rank + g + 1, g) for rank in range(problem.ranks - g)]
        return Resident(
            {use: np.concatenate([each[use] for each in data]) for use in data[0]},
            weights=np.repeat([stage.weights for stage in stages], g),
            groups=[*(stage.ranks for stage in stages), *pairs],
            code=np.array(code),
        )

    def partitioned_s(self, problem: Problem) -> float:
        if problem.graph is None:
            return 0.0
        return problem.cache.seconds_of(problem.cut(settled(self.chunks), self.members(problem)))

    def preparation(self, problem: Problem) -> dict[str, float]:
        """Return also the seconds of epoch 0: forward, stage after stage."""
        in_all_s = float(self.predict(problem).by_op["forward"]) * settled(self.stages)
        first_pass_s = in_all_s / problem.cost.cores.full_load_slowdown  # one stage at a time
        return super().preparation(problem) | {"first pass": first_pass_s}

    def members(self, problem: Problem) -> int:
        """Return g, the number of ranks of a stage."""
        return problem.ranks // settled(self.stages)

    def pipeline(self, problem: Problem) -> list[Stage]:
        """Return the stages."""
        ends = pairwise(accumulate([1, *settled(self.layers_per_stage)]))
        return [Stage(self, problem, number, range(*each)) for number, each in enumerate(ends)]

    def _setup(self, problem: Problem) -> list[Op]:
        """Return the exchange of constant inputs among the first stage's members, if any."""
        chunks, g = settled(self.chunks), self.members(problem)
        sent = problem.chunks(chunks, g).sends.sum(0)  # rows [g, g]
        if problem.model.first_varying == 0 or not sent.any():
            return []
        if problem.graph is None:
            sent = (sent * problem.model.feature_transit_bytes(1)).round().astype(np.int64)
        else:
            cut = problem.cut(chunks, g)
            received = [  # by each member, from each member [B]
                np.bincount(cut.sub[halo] % g, problem.features_bytes(halo), g)
                for halo in cut.halos
            ]
            sent = np.stack(received, 1)
        return [Op("input_halo", work=Exchange(sent), ranks=tuple(range(g)))]

    def role(self, problem: Problem, rank: int) -> dict[str, int]:
        return {"stage": rank // self.members(problem)}


def _fitting(problem: Problem) -> list[int]:
    """Return the numbers of stages with a layer each and equally many ranks, 1 first."""
    most = min(problem.ranks, problem.workload.layers)
    return [stages for stages in range(1, most + 1) if problem.ranks % stages == 0]


def _tied_across(problem: Problem, per_stage: Sequence[int]) -> tuple[int, int] | None:
    """Return two layers of a user's module that share parameters but not a stage, or None."""
    module = problem.workload.module
    stages = [stage for stage, layers in enumerate(per_stage) for _ in range(layers)]
    for number, layer in enumerate(module.layers if module else (), 1):
        if layer.shares and stages[layer.shares - 1] != stages[number - 1]:
            return layer.shares, number
    return None


Direction = Literal["f", "b"]  # forward, backward
SIGNS: dict[Direction, Literal[1, -1]] = {"f": 1, "b": -1}  # order of chunks and of stages


class Stage:
    """A stage of a pipeline: its ranks and layers, their work, and their memory.

    Layers aggregate before they multiply wherever the model allows, so that a row that several
    chunks read is multiplied once.
    """

    def __init__(self, pipe: GNNPipe, problem: Problem, number: int, layers: range) -> None:
        model, g = problem.model.aggregating_first, pipe.members(problem)
        self.pipe, self.problem, self.number, self.model = pipe, problem, number, model
        self.ranks = tuple(range(number * g, number * g + g))
        self.layers, self.weights = layers, model.weights_of(layers)
        self.is_last = len(model.layers) in layers
        # widths of the rows from the previous stage, and to the next; 0: there is no such stage
        self.received = 0 if layers.start == 1 else self._boundary(layers.start)
        self.sent = 0 if self.is_last else self._boundary(layers.stop)
        # tuples of layers (0: the encoder) without an exchange inside
        own = ((0,) if model.encoder and layers.start == 1 else ()) + tuple(layers)
        self.pieces = [own] if g == 1 else [(layer,) for layer in own]

    def _boundary(self, layer: int) -> int:
        """Return the width of the rows that the previous stage sends to a layer."""
        return self.model.input_width(layer) + self.model.carried

    @property
    def facts(self) -> ChunkCounts:
        """The counts of all chunks."""
        return self.problem.chunks(settled(self.pipe.chunks), len(self.ranks))

    @property
    def kept_rows(self) -> np.ndarray:
        """The number of rows that each member keeps: its own and the halo [g]."""
        return np.asarray((self.facts.rows + self.facts.sends.sum(1)).sum(0), dtype=float)

    @property
    def varying(self) -> list[int]:
        """The layers whose inputs change from step to step."""
        return [layer for layer in self.layers if layer > self.model.first_varying]

    def exchanged(self, piece: Piece) -> int:
        """Return the width of rows exchanged before a piece (backward: after it), or 0."""
        constant = len(self.ranks) == 1 or piece[0] <= self.model.first_varying
        return 0 if constant else self.model.input_width(piece[0])

    # -- work ----------------------------------------------------------------------------------

    def kind_of(self, piece: Piece) -> object:
        """Return a key that is equal for pieces with equal work, of any stage."""
        layers = self.model.layers
        specs = tuple(layers[layer - 1] for layer in piece if layer)
        return piece[0] in (0, 1), len(layers) in piece, len(piece), specs

    def work(self, piece: Piece) -> BothPasses:
        """Return forward and backward work of a piece; arrays over sub-chunks [chunks * g]."""
        rows, model = self.facts.rows.astype(float).ravel(), self.model
        # gives the sums the shape [chunks * g] even if no part computes anything
        parts = [BothPasses(*(Compute(flops=0.0 * rows, itemsize=model.itemsize),) * 2)]
        parts += [self._layer_work(layer) if layer else model.encode(rows) for layer in piece]
        parts += [model.finish(rows)] if len(model.layers) in piece else []
        return reduce(add, parts)

    def _layer_work(self, layer: int) -> BothPasses:
        """Return forward and backward work of one layer."""
        facts, model = self.facts, self.model
        rows, sources, edges = (counts.ravel() for counts in facts.sizes)
        b, spec, width = model.itemsize, model.layers[layer - 1], model.input_width(layer)
        varies = layer > model.first_varying
        projected = sources if spec.projects_first else rows
        forward, backward = model.work(layer, rows, projected, edges, read=sources)
        if self.pipe.checkpoint and varies and layer < len(model.layers):
            keeps_gathered = spec.gathers_linearly and not spec.projects_first
            backward = backward + (replace(forward, gathers=()) if keeps_gathered else forward)
        if not (model.aggregate_cached(layer) or model.rows(layer).multiplied_first):
            # copy the rows that the chunk reads from all rows that the member keeps
            forward = forward + Compute(
                random_rows=((2.0 * sources, width),), launches=1, itemsize=b
            )
        if varies:
            # write the chunk's rows to the mixed rows and to the past rows
            forward = forward + Compute(random_rows=((2.0 * rows, width),), launches=2, itemsize=b)
            # scatter-add the gradients of the rows read to the rows that the member keeps
            scattered = sources - rows
            backward = backward + Compute(
                random_rows=((2.0 * scattered, width),),
                elementwise_bytes=(3.0 * rows + scattered) * width * b,
                launches=3,
                itemsize=b,
            )
        return BothPasses(forward, backward)

    def begin_step(self) -> Compute:
        """Return the work of preparing the historical rows for a step [g].

        Past rows are copied to the mixed rows, after dropout if the layer has it, and the slopes
        become zero; with historical gradients, the late slopes are copied too.
        """
        model, rows, copies = self.model, self.kept_rows, 1 + self.pipe.historical_gradients
        dropped = [model.dropout > 0 and model.layers[each - 1].drops for each in self.varying]
        widths = [model.input_width(each) for each in self.varying]
        passes = [2 * copies * (1 + drops) + 1 for drops in dropped]  # over a row, reads and writes
        return Compute(
            elementwise_bytes=float(np.dot(passes, widths)) * model.itemsize * rows,
            hash_ops=float(np.dot(dropped, widths)) * copies * rows,
            launches=4,
            itemsize=model.itemsize,
        )

    # -- memory --------------------------------------------------------------------------------

    def data(self) -> Memory:
        """Return the bytes of constant inputs, history, receive buffers and edges [g]."""
        model, facts, kept = self.model, self.facts, self.kept_rows
        own, sources, edges = (counts.sum(0) for counts in facts.sizes)
        widths = sum(map(model.input_width, self.varying))
        features, spec = np.zeros(own.size), model.layers[self.layers.start - 1]
        graph = block_bytes(model, spec, own, sources, edges) + 8 * (
            kept + facts.sends.sum(2).sum(0)
        )
        if self.is_last:
            graph = graph + 16 * own  # labels and masks
        if self.number == 0:
            features = np.asarray(model.inputs.stored_bytes(kept if model.first_varying else own))
            if model.rows(1).multiplied_first:  # each chunk has a copy of the rows that it reads
                own_index = model.own_index_bytes(facts.rows)
                features = np.asarray(model.inputs.stored_bytes(facts.sources) + own_index).sum(0)
            elif model.first_varying and model.aggregate_cached(1):
                features = features + model.inputs.stored_bytes(own)
            elif model.first_varying and model.dropout and model.layers[0].drops:
                features = 2 * features  # a copy after this step's dropout
        gradient_row_bytes = self.sent and self.pipe.codec.row_bytes(self.sent, model.itemsize)
        return {
            "features": features,
            # historical rows, the mix of fresh and historical rows that is read, and its gradients
            "history": (3 + self.pipe.historical_gradients) * kept * widths * model.itemsize,
            # buffers for the gradients received from the next stage
            "pipeline": own * gradient_row_bytes,
            "graph": np.asarray(graph),
        }

    def held(self, piece: Piece, is_back: bool) -> OpMemory:
        """Return the memory of a piece on all chunks [g]: what it keeps until backward begins; or,
        in the backward pass, the largest workspace of a chunk, from which on chunks free what they
        kept."""
        kept, workspaces = zip(*map(self._of_chunks, piece), strict=True)
        if is_back:
            return OpMemory(np.max(workspaces, axis=(0, 1)), 0.0)
        return keeps(np.sum(kept, axis=(0, 1)))

    def _of_chunks(self, layer: int) -> tuple[np.ndarray, np.ndarray]:
        """Return what a layer (0: the encoder) keeps of each chunk until backward begins, and its
        workspace in the chunk's backward pass [chunks, g]."""
        model, facts, b = self.model, self.facts, self.model.itemsize
        rows, sources, edges = facts.sizes  # [chunks, g]
        halo_rows = facts.sends.sum(1)
        if layer == 0:
            return np.asarray(rowwise_memory(model.encoder_record, rows).left), 0.0 * rows
        spec, varies = model.layers[layer - 1], layer > model.first_varying
        apart = not model.rows(layer).multiplied_first
        need = layer_memory(model, layer, rows, sources, edges, apart=apart)
        saved, workspace, gradients = need.left, need.most - need.left, 0.0 * rows
        # rows gathered for the layer
        read = rows if spec.gathers_linearly and not spec.projects_first else sources
        if varies:
            saved = saved + rowwise_memory(model.preparation_record(spec), rows + halo_rows).left
            # a copy of own and remote rows, or the layer's inputs saved for recomputation
            checkpoint = rows * (self.pipe.checkpoint and layer > self.layers.start)
            read = read + (rows + halo_rows if halo_rows.any() else checkpoint)
            # gradients of gathered rows and own rows, then of the rows read
            gradients = (2 * rows + sources) * spec.h_in * b
        else:
            read = read * (apart and not model.aggregate_cached(layer))
        kept = saved
        if self.pipe.checkpoint and varies and layer < len(model.layers):
            kept = rows * spec.h_out * b * (layer + 1 == self.layers.stop)
            # on the last stage, backward reuses the memory of the last layer's outputs
            workspace = workspace + saved * (not self.is_last)
        kept, workspace = kept + read * spec.h_in * b, np.maximum(workspace, gradients)
        if layer == self.layers.start and self.received:  # messages of the stage before
            kept = kept + rows * self.received * b
        if layer == len(model.layers):
            stats, logits = self.problem.stats, rows * model.classes * b
            trained = rows * min(1.0, stats.train_vertices / stats.vertices)
            scored = decoder_memory(model, rows)
            kept = kept + scored.left + loss_bytes(model, rows, trained) + logits
            workspace = np.maximum(workspace, scored.most - scored.left)
        if not self.is_last:  # an unpacked message, and copies of its two parts
            copies = self.pipe.codec.packs + bool(model.carried)
            workspace = workspace + rows * self.sent * copies * b
        return np.asarray(kept), np.asarray(workspace)


def _step(pipe: GNNPipe, problem: Problem) -> Iterator[Op]:
    """Yield the operations of a step, stage by stage. Equal pieces of stages share their work.

    prepare history; every chunk forward; every chunk backward, the last chunk first; update

    A chunk:  receive -> [exchange ->] compute ... -> send      forward, from the stage before
              receive -> compute [-> exchange] ... -> send      backward, from the stage after

    With a codec, rows are packed before `send` and unpacked after `receive`.
    """
    stages, b = pipe.pipeline(problem), problem.model.itemsize
    facts, g = stages[0].facts, pipe.members(problem)
    rows = facts.rows.astype(float).ravel()  # of each sub-chunk
    works: dict[object, BothPasses] = {}  # kind of piece -> forward and backward

    def message(stage: Stage, direction: Direction) -> Op:
        """Return the message of a chunk's rows, or of their gradients, to the next stage."""
        sign, width = SIGNS[direction], stage.sent if direction == "f" else stage.received
        sent = Message(facts.rows * pipe.codec.row_bytes(width, b), sign * g)
        return Op("pipeline", direction, work=sent, ranks=stage.ranks, over_chunks=sign)

    def pass_of(stage: Stage, direction: Direction) -> Iterator[Op]:
        """Yield a stage's operations on every chunk in one direction."""
        sign, is_back = SIGNS[direction], direction == "b"
        op = partial(Op, ranks=stage.ranks, over_chunks=sign)
        received, sent = (stage.received, stage.sent)[::sign]
        if received:
            sender = message(stages[stage.number - sign], direction)
            yield op("receive", direction, work=Receive(sender))
            for unpack in pipe.codec.unpack(rows, received, b, added=False):
                yield op("unpack", direction, work=unpack)
        for piece in stage.pieces[::sign]:
            if (kind := stage.kind_of(piece)) not in works:
                works[kind] = stage.work(piece)
            name, layer = ("forward", "backward")[is_back], piece[0] if g > 1 else None
            holds = partial(stage.held, piece, is_back)
            ops = [op(name, layer=layer, work=works[kind][is_back], holds=holds)]
            if row_bytes := stage.exchanged(piece) * b:
                sends = facts.sends.swapaxes(1, 2) if is_back else facts.sends
                ops.insert(0, op("halo", direction, piece[0], work=Exchange(sends, row_bytes)))
            yield from ops[::sign]
        if sent:
            for pack in pipe.codec.pack(rows, sent, b, picked=False):
                yield op("pack", direction, work=pack)
            yield message(stage, direction)

    for stage in stages:
        yield Op("history", work=stage.begin_step(), ranks=stage.ranks)
        yield from pass_of(stage, "f")
        yield from pass_of(stage, "b")
        if g > 1:
            size = stage.weights * problem.model.weight_itemsize
            yield Op("all_reduce", work=AllReduce((size,)), ranks=stage.ranks)
        yield Op("update", work=problem.model.update(stage.weights), ranks=stage.ranks)


# -- layers by cost --------------------------------------------------------------------------------


def layer_seconds(pipe: GNNPipe, problem: Problem) -> list[float]:
    """Return the seconds of each layer, forward and backward, on the mean sub-chunk.

    The seconds include exchanges, and do not depend on the layer's stage.
    """
    whole = Stage(pipe, problem, 0, range(1, len(problem.model.layers) + 1))
    model, cost, sent = whole.model, problem.cost, whole.facts.sends.mean(0)
    seconds = dict[object, float]()  # by the kind of the layer's work
    for layer in whole.layers:
        if (kind := whole.kind_of((layer,))) in seconds:
            continue
        pieces = [(0,), (layer,)] if layer == 1 and model.encoder else [(layer,)]
        works = [work for piece in pieces for work in whole.work(piece)]
        computing = sum(float(np.mean(cost.compute_s(work))) for work in works)
        seconds[kind] = computing * cost.cores.full_load_slowdown
        if (width := whole.exchanged((layer,)) * model.itemsize) and sent.any():
            for rows in (sent, sent.T):
                seconds[kind] += float(cost.exchange(rows * width, whole.ranks).alone)
    return [seconds[whole.kind_of((layer,))] for layer in whole.layers]


def balance(seconds: Sequence[float], stages: int) -> tuple[int, ...]:
    """Return layers per stage, at least one each, with the fastest possible slowest stage.

    Of several such divisions, the division nearest to equal shares is returned.

    >>> balance([1, 1, 1, 1, 1], 2), balance([4, 1, 1, 1, 1], 2)
    ((3, 2), (1, 4))
    """
    before, layers = offsets(seconds), len(seconds)

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
