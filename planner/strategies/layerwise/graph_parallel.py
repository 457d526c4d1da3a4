"""Graph parallelism: every rank owns a part of the graph, and receives halo rows before each layer.

A rank computes the rows of its own part. Before layer l it receives the halo: the rows of h_{l-1}
that its vertices' neighbours in other parts have. After layer l's backward pass it sends their
gradients back. With staleness 1 it is PipeGCN, which overlaps these exchanges with computation.

    staleness 0, one step
    compute  |forward 1|. . . |forward 2|loss|backward 2|. . . . |backward 1|. . . . . . |update|
    comm               |halo 2|                         |halo 2 b|
    reduce                                                                  |all_reduce|

    staleness 1 (PipeGCN): step t + 1 uses the halo rows and halo gradients of step t
    compute  |forward 1|forward 2|loss|backward 2|backward 1|. . . . . |update|forward 1|forward 2|
    comm               |halo 2 f . . . . . . .|halo 2 b . . . . .                       ^ waits for
    reduce                                                  |all_reduce|          halo 2 f of step t

    norm=batch: all-reduces of the moments of a layer's inputs (2 H numbers), and of their gradients
    compute  |forward 1|. . . . . . . . |forward 2|loss|backward 2|. . . . . . . . . . |backward 1|
    comm                         |halo 2|                          |halo 2 b|
    reduce             |moments 2|                                          |moments 2 b|

A model with an encoder (GCNII) begins with `encode`, and its layer 1 has a halo in every step too.
Weights are never stale. `smoothing` (PipeGCN-F, -G, -GF) replaces a received value v_t by
s_t = gamma s_{t-1} + (1 - gamma) v_t, s_0 = 0, for each halo row and layer: for rows ('f'), for
gradients ('g') or for both ('gf'). It sends the same bytes and keeps one more buffer.

With several `buckets`, all-reduces of gradients overlap with the backward pass (exchange.py). With
`bits`, rows and gradients are sent packed, with stochastic rounding (planner/gnn/rows.py).

`narrow` multiplies before the exchange if a layer makes its rows narrower, so that ranks send
min(H_{l-1}, H_l) numbers per row. This is exact without staleness. With staleness it is our own
variant: halo rows lag together with the weights by which they were multiplied.

`trim` leaves out of each layer the rows on which no training vertex depends in later layers (PyG's
trim_to_layer); the loss does not depend on them either. Evaluation needs all rows: features stay in
the server's memory, and blocks are built for each evaluation.

    training vertices 1 % of the graph, 3 layers
    all rows   |forward 1 on 100 %|forward 2 on 100 %|forward 3 on 100 %|loss| ..
    trim       |forward 1 on  60 %|forward 2 on  10 %|forward 3 on   1 %|loss| ..

Exact with staleness 0 and unquantized rows; otherwise the gradient is an approximation.

Bytes per epoch, for halos B_i of parts i = 1 .. M, numbers of b bytes and W weights:

    2 b sum_{l=2..L} H_{l-1} sum_i |B_i|  +  2 (M-1) W b

Packed rows have fewer bytes. If rows are rounded (--dtype), the first b is 2; that of weights stays
4.

The halo of the features is sent once, before the first step. Source: PipeGCN (ICLR 2022), Alg. 1
and Sec. 3.4; GNNPipe (arXiv 2308.10087), Sec. 2, for the baseline.

`OnParts` is the base class of strategies that differ in their `policy` only: which halo rows they
send. All other methods are computed from the policy and the knobs. A strategy of another package
derives from `OnParts` as graph_parallel and bns do.

See also exchange.py (policies) and step.py (operations and memory) in this folder; account.py
(bytes and seconds) and program.py (tasks) in ../program; planner/ownership/layout.py for parts and
halos; executor/strategies/graph_parallel.py, which reads the same options.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import numpy as np

from gnnplan.planner.gnn.model import block_bytes
from gnnplan.planner.gnn.rows import Codec
from gnnplan.planner.problem.problem import AnyLayout, Problem
from gnnplan.planner.strategies.base import Example, Range, Resident, Rules, Strategy
from gnnplan.planner.strategies.layerwise.exchange import (
    FRESH,
    ExchangeOptions,
    Policy,
    check_buckets,
    pays,
)
from gnnplan.planner.strategies.layerwise.step import Batches, resident, setup, step
from gnnplan.planner.strategies.program.program import Op, Program
from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.planner.vocabulary.schedule import Compute
from gnnplan.planner.vocabulary.units import show_percent

# To select a layer's edges (executor/layers/kernels/block.py, Block.among): number of kernels, and
# bytes read and written per edge. Row, position and weight of an edge are gathered, in both
# directions.
LAUNCHES, LAID = 30, 230.0


class OnParts(Strategy):
    """A strategy whose ranks own parts of the graph and exchange halo rows."""

    rounds_rows = True
    adapts = False  # whether the executor supports the adaptive codec (gnn/rows.py)

    @property
    def policy(self) -> Policy:
        """Which halo rows ranks send in a step, and the state of the others."""
        return FRESH

    @property
    def exchange_options(self) -> ExchangeOptions:
        """The options by which layers exchange rows."""
        return ExchangeOptions.of(self, self.policy)

    @property
    def exact(self) -> bool:
        options = self.exchange_options
        return options.policy.sends_all and not options.policy.lags and not options.codec.packs

    @property
    def uses_cuda_graph(self) -> bool:
        return True

    @property
    def carries(self) -> str:
        policy, carried = self.exchange_options.policy, list[str]()
        if policy.lags:
            carried.append("halo rows and gradients of the step before")
        if policy.keeps_received:
            carried.append("halo rows and gradients as last received")
        if self.codec.carries:
            carried.append(self.codec.carries)
        return " and ".join(carried)

    def approximates_as(self, other: Strategy) -> bool:
        def lossy(options: ExchangeOptions) -> ExchangeOptions:
            return replace(options, narrow=False, checkpoint=False, buckets=1)

        mine = lossy(self.exchange_options)
        return isinstance(other, type(self)) and mine == lossy(other.exchange_options)

    @classmethod
    def candidates(cls, problem: Problem) -> Iterator[Strategy]:
        """Yield nothing: the effect on accuracy is unknown, so only users choose the strategy."""
        return iter(())

    @classmethod
    def absent(cls, problem: Problem) -> str:
        return ""

    def with_less_memory(self) -> Strategy | None:
        if "checkpoint" not in self.knobs() or self.exchange_options.checkpoint:
            return None
        return replace(self, checkpoint=True)  # type: ignore[call-arg]  # a knob, as checked above

    def check(self, problem: Problem) -> None:
        options = self.exchange_options
        self.check_mode(problem)
        for number, layer in enumerate(problem.model.layers if options.policy.vanishes else (), 1):
            softmax = layer.heads or layer.sums > 1
            if softmax or (layer.counted and not layer.counted.linear):
                raise SpecError(
                    f"{self.family}: a sample stands for all edges only in a weighted sum over"
                    f" them, and layer {number} of {problem.workload.called} has"
                    f" {'a softmax' if softmax else 'none'}; use graph_parallel or pipegcn, or"
                    " another model"
                )
        check_buckets(self.name, problem, options.buckets)
        options.codec.check(self.name, problem.workload.precision, self.adapts)
        self.check_vertices(problem)

    def layout(self, problem: Problem) -> AnyLayout:
        return problem.layout()

    def layouts(self, problem: Problem) -> Batches:
        """Return the layouts of an epoch's batches, or of trimmed rows; (): the whole layout."""
        return ()

    def turn(self, problem: Problem, step: int) -> int:
        """Return the number of the batch that a step trains on."""
        return 0

    def partitioned_s(self, problem: Problem) -> float:
        return problem.cache.seconds_of(self.layout(problem))

    def resident(self, problem: Problem) -> Resident:
        options = self.exchange_options
        stays = resident(problem, self.layout(problem), options, self.layouts(problem))
        if options.policy.vanishes:
            stays.data["graph"] += _cut_blocks(problem, options)
        return stays

    def program(self, problem: Problem) -> Program:
        rows, options, batches = self.layout(problem), self.exchange_options, self.layouts(problem)
        layouts, period = batches or (rows,), options.policy.period  # estimated batches are equal
        loads = len(batches) > 1  # a step begins by loading its batch's constant rows
        program = Program(
            lambda: [(each, t) for t in range(period) for each in layouts],
            len(layouts),
            lambda t: (layouts[self.turn(problem, t)], t % period),
            lambda name: list(step(problem, name[0], options, loads=loads, at=name[1])),
            lambda: setup(problem, rows),
            int(options.policy.lags),
            period=period,
        )
        laid = list(_exchanging_layers(problem)) if options.policy.vanishes else []
        if not laid:
            return program
        edges = sum((rows.facts(layer).edges for layer in laid), np.zeros(problem.ranks))
        work = Compute(elementwise_bytes=LAID * edges, launches=LAUNCHES * len(laid))
        lay = Op("lay", work=work)  # at the begin of each step
        return replace(program, ops=lambda name: [lay, *program.ops(name)])


# -- rows that vanish ------------------------------------------------------------------------------


def _cut_blocks(problem: Problem, options: ExchangeOptions) -> np.ndarray:
    """Return the bytes of a step's blocks, which exist besides the full blocks [ranks]."""
    model, total = problem.model, np.zeros(problem.ranks)
    for layer in _exchanging_layers(problem):
        f, spec = options.facts(problem, problem.layout(), layer), model.layers[layer - 1]
        # sampled edges have weights, even if the layer's own edges have none
        weights = 2 * model.itemsize * f.edges * (not spec.weighs_edges)
        total = total + block_bytes(model, spec, *f.sizes) + weights
    return total


def _exchanging_layers(problem: Problem) -> Iterator[int]:
    """Yield the layers before which ranks exchange rows in every step."""
    for layer in range(problem.model.first_varying + 1, problem.workload.layers + 1):
        if problem.layout().exchanges_rows(layer):
            yield layer


GAMMA = 0.95  # PipeGCN, Sec. 3.4


@dataclass(frozen=True)
class GraphParallel(OnParts):
    """Graph parallelism (staleness 0) and PipeGCN (staleness 1).

    staleness: steps by which halo rows and gradients lag, 0 or 1.
    narrow: exchange rows before or after the multiplication, whichever are narrower.
    smoothing: average stale rows ('f'), gradients ('g') or both ('gf') over steps.
    gamma: weight of earlier steps in `smoothing`, in [0, 1).
    checkpoint: keep a layer's inputs only, and recompute the layer in the backward pass.
    trim: leave out of each layer the rows that no training vertex needs.
    buckets: number of all-reduces of gradients per step; several overlap with backward.
    bits: 8, 4 or 2 bits per number of a row that is sent between layers; 'adaptive': 8, 4 or 2 for
        each row, in as many bytes as 4; None: rows are not quantized.
    """

    staleness: int = 0
    narrow: bool = False
    smoothing: str = ""
    gamma: float = GAMMA
    checkpoint: bool = False
    trim: bool = False
    buckets: int = 1
    bits: int | str | None = None

    family = "graph_parallel"
    names: ClassVar[Mapping[str, Mapping[str, object]]] = {
        "pipegcn": {"staleness": 1},
        "pipegcn_f": {"staleness": 1, "smoothing": "f"},
        "pipegcn_g": {"staleness": 1, "smoothing": "g"},
        "pipegcn_gf": {"staleness": 1, "smoothing": "gf"},
    }
    allowed: ClassVar[Rules] = {
        "staleness": Range("the steps by which rows lag (0: exact, 1: PipeGCN)", 0, 1),
        "smoothing": {"": "none", "f": "rows", "g": "gradients", "gf": "both"},
    }
    adapts = True
    executor = "gnnplan.executor.strategies.graph_parallel"
    examples = (
        Example("graph_parallel"),
        Example("graph_parallel(narrow=True)"),
        Example("graph_parallel(checkpoint=True)"),
        Example("graph_parallel(trim=True)"),
        Example("graph_parallel(buckets=2)"),
        Example("graph_parallel(bits=2)"),
        Example("pipegcn"),
        Example("pipegcn(bits=4)"),
    )
    # synchronous: exact; stale: transfers contend for ports, and on a CPU for cores
    claim = 0.12

    @classmethod
    def candidates(cls, problem: Problem) -> Iterator[Strategy]:
        trim, layers = problem.needs_few_rows, problem.workload.layers
        variants = [cls(), *([cls(trim=True)] if trim else [])]
        if problem.ranks > 1:
            if problem.model.narrows:
                variants += [cls(narrow=True, trim=trim), cls(staleness=1, narrow=True, trim=trim)]
            variants.append(cls(staleness=1, trim=trim))
            # as fast; may converge better
            variants.append(cls(staleness=1, smoothing="gf", trim=trim))
        yield from variants
        if pays(problem, cls(trim=trim), cls(trim=trim, buckets=layers)):
            yield from (replace(variant, buckets=layers) for variant in variants)

    @classmethod
    def explain(cls, problem: Problem, fastest: Self | None) -> list[str]:
        if not problem.needs_few_rows:
            return []
        trained = problem.stats.train_vertices / problem.stats.vertices
        source = "estimated" if problem.graph is None else "counted"
        return [
            f"{show_percent(trained, 1)} of the vertices train; they need"
            f" {show_percent(problem.needed_share)} of all layers' rows ({source}), and trim leaves"
            " out the other rows",
        ]

    def check(self, problem: Problem) -> None:
        self.check_mode(problem)
        if self.smoothing and not self.staleness:
            raise SpecError(
                "graph_parallel: only stale rows are smoothed; use staleness=1 with smoothing, as"
                " pipegcn_gf does"
            )
        if self.gamma != GAMMA and not self.smoothing:
            raise SpecError(
                f"{self.name}: gamma is the weight of smoothing, and smoothing is off (gamma:"
                f" {self.gamma:g}); use pipegcn_gf(gamma={self.gamma:g})"
            )
        if not 0 <= self.gamma < 1:
            raise SpecError(
                "pipegcn: gamma lies in [0, 1) (0: no smoothing, 1 would never use what is"
                f" received), not {self.gamma:g}; use 0.95, or 0.5 where the model overfits"
            )
        if self.trim:
            check_trim(problem, self.family)
        super().check(problem)

    @property
    def codec(self) -> Codec:
        return Codec(self.bits, self.smoothing, self.gamma)

    @property
    def policy(self) -> Policy:
        return Policy("lag" if self.staleness else "stay")

    def layouts(self, problem: Problem) -> Batches:
        return (problem.trimmed(problem.layout()),) if self.trim else ()


def check_trim(problem: Problem, family: str) -> None:
    """Raise SpecError if the loss depends on rows that no training vertex needs (batch norm)."""
    if problem.workload.norm == "batch":
        raise SpecError(
            f"{family}: batch norm's moments are of all vertices, so trim can leave no"
            " vertex out (trim: True, norm: batch); use norm=layer or trim=False"
        )
