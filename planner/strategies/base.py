"""Base class of all strategies: variants, memory, seconds and schedule.

A strategy is a frozen dataclass of knobs and holds no state. Most methods take a `Problem`
(planner/problem/problem.py), which describes the graph, the model and the cluster.

    text -> parse -> settle -> check        choose the open knobs; check them against the problem
                        |
                        +-> program         the operations of all ranks
                             +-> predict    seconds and bytes of an epoch, in closed form
                             +-> schedule   every rank's tasks, for the simulator and the executor
                             +-> traffic    bytes between each two ranks, to place the ranks
                             +-> memory     bytes per rank; `resident`: what stays during a step
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self, TypeVar

import numpy as np

from gnnplan.planner.gnn.rows import Codec
from gnnplan.planner.problem.problem import AnyLayout, Problem
from gnnplan.planner.strategies.program.account import Memory as Memory
from gnnplan.planner.strategies.program.account import (
    Prediction,
    epoch_s,
    on_fullest_rank,
    peak,
    predict,
)
from gnnplan.planner.strategies.program.account import Resident as Resident
from gnnplan.planner.strategies.program.price import setup_s
from gnnplan.planner.strategies.program.program import Program, build_schedule, traffic
from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.planner.vocabulary.files import likeliest
from gnnplan.planner.vocabulary.numbers import Number, PerRank, RankMatrix
from gnnplan.planner.vocabulary.schedule import Schedule
from gnnplan.planner.vocabulary.text import show_knob

T = TypeVar("T")

# uses of memory that are no tensors of the training: libraries, NCCL's buffers, and the server's
# graph data, which counts to a rank that runs on the server's processor
NON_TRAINING_USES = ("runtime", "communicators", "host")
# mode -> the strategies that can train with rounded rows, --dtype (Strategy.rounds_rows)
ROUNDING = {
    "full": "graph_parallel, pipegcn, gnnpipe, granndis, bns, feature_parallel or offload",
    "mini": "data_parallel, gsplit, dnp or snp",
}
Bytes = int  # type of a knob that is a size, written as '2.5GB' or as a number of bytes


@dataclass(frozen=True)
class Example:
    """A variant that `gnnplan check` and the tests train, to check bytes, order and resume."""

    strategy: str
    ranks: int = 2
    servers: int = 1


class Range(NamedTuple):
    """The rule of a knob that is a number, or None."""

    meaning: str
    least: float
    most: float = math.inf

    def __str__(self) -> str:
        to = "or more" if self.most == math.inf else f"to {self.most:,.9g}"
        return f"{self.meaning}, {self.least:,.9g} {to}"


# knob -> the rule of its value: a range, or words, each with its meaning
Rules = Mapping[str, Range | Mapping[str, str]]


def settled(knob: T | None) -> T:
    """Return the value of a knob that `Strategy.settle` has set."""
    assert knob is not None
    return knob


@dataclass(frozen=True)
class Strategy(ABC):
    """A parallel training strategy: a frozen dataclass whose fields are its knobs."""

    family: ClassVar[str]
    mode: ClassVar[str] = "full"  # 'full': trains on the full graph; 'mini': on mini-batches
    # published name of a variant -> the knobs that the name sets
    names: ClassVar[Mapping[str, Mapping[str, object]]] = {}
    allowed: ClassVar[Rules] = {}  # the rules of knobs that do not depend on the problem
    rounds_rows: ClassVar[bool] = False  # whether it can train with rounded rows (ROUNDING)
    # module that trains the strategy, by open_worker(rank, problem, strategy, first) -> Worker
    executor: ClassVar[str]
    examples: ClassVar[tuple[Example, ...]]  # variants that `gnnplan check` and tests train
    # upper bound of |closed form / simulation - 1|; each family says why the two differ
    claim: ClassVar[float]

    @property
    def name(self) -> str:
        """The published name that sets most knobs, of the names whose knobs this variant has."""
        own = vars(self).items()
        matches = [name for name, knobs in self.names.items() if knobs.items() <= own]
        return max(matches, key=lambda name: len(self.names[name]), default=self.family)

    @property
    def exact(self) -> bool:
        """Whether the gradient equals the gradient of a single process; tests compare the two."""
        return True

    @property
    def carries(self) -> str:
        """The state, in words, that ranks carry from step to step besides weights and optimizer.

        '' if there is none. A run that resumes with another plan drops the state and rebuilds it.
        """
        return ""

    @property
    def hands_over(self) -> bool:
        """Whether a run with another plan can resume from weights and optimizer state alone."""
        return True

    @property
    def codec(self) -> Codec:
        """The encoding of the rows that ranks send in every step, from the knob `bits`, if any."""
        return Codec(vars(self).get("bits"))

    def with_whole_rows(self) -> Self:
        """Return the same strategy with rows sent unrounded."""
        return dataclasses.replace(self, **{"bits": None} if self.codec.packs else {})

    def approximates_as(self, other: Strategy) -> bool:
        """Return whether `other` is lossy in the same way as this lossy strategy.

        If it is, runs of `other` are evidence for the convergence of this strategy.
        """
        return False

    @classmethod
    @abstractmethod
    def candidates(cls, problem: Problem) -> Iterator[Strategy]:
        """Yield the variants that a search should evaluate for this problem."""

    @classmethod
    def absent(cls, problem: Problem) -> str:
        """Return why `candidates` is empty for this problem; '': it is empty for every problem."""
        return "no variant suits this problem"

    @classmethod
    def explain(cls, problem: Problem, fastest: Self | None) -> list[str]:
        """Return notes of this family about a problem: its paper's rule of thumb, with numbers.

        fastest: the family's fastest variant on all GPUs; None if no variant fits, or if the user
        asked for another strategy.
        """
        return []

    def settle(self, problem: Problem) -> Self:
        """Return the same strategy with a value for every knob that the user left open."""
        return self

    @property
    def uses_cuda_graph(self) -> bool:
        """Whether a single rank replays its step as one CUDA graph (Problem.uses_cuda_graph)."""
        return False

    def with_less_memory(self) -> Strategy | None:
        """Return a variant that needs less memory and computes more, or None."""
        return None

    @abstractmethod
    def check(self, problem: Problem) -> None:
        """Raise SpecError if the knobs do not suit the problem."""

    def suits(self, problem: Problem) -> bool:
        """Return whether `check` passes."""
        try:
            self.check(problem)
        except SpecError:
            return False
        return True

    def check_mode(self, problem: Problem) -> None:
        """Raise SpecError if the strategy does not support the workload's mode or dtype, or a value
        of a knob is not `allowed`."""
        if self.mode != problem.workload.mode:
            trains_on = {"mini": "mini-batches", "full": "the full graph"}[self.mode]
            raise SpecError(
                f"{self.name} trains on {trains_on}, and the workload asks for mode"
                f" {problem.workload.mode}; use --mode"
                f" {self.mode}{' with --batch and --fanout' if self.mode == 'mini' else ''}"
            )
        precision = problem.workload.precision
        if precision.rounds_rows and not self.rounds_rows:
            raise SpecError(
                f"{self.name} has no rows in {precision.name} (dtype: {precision.name}); use"
                f" {ROUNDING[self.mode]}, or --dtype float32"
            )
        for knob, rule in self.allowed.items():
            self._check_knob(knob, getattr(self, knob), rule)

    def _check_knob(self, knob: str, value: Any, rule: Range | Mapping[str, str]) -> None:
        """Raise SpecError if a knob's value is neither its default nor as its rule says."""
        default = getattr(type(self), knob)
        if value == default:
            return
        if isinstance(rule, Range):
            if value is None or rule.least <= value <= rule.most:  # None: settled later
                return
            says, near = str(rule), ""
        else:
            if value in rule:
                return
            *others, last = (f"{word!r} ({meaning})" for word, meaning in rule.items())
            says, near = f"{', '.join(others)} or {last}", likeliest(value, rule)
        use = near or default
        raise SpecError(
            f"{self.name}: {knob} is {says}, not {value!r};"
            f" {'leave it out' if use is None else f'use {knob}={use!r}'}"
        )

    def check_vertices(self, problem: Problem) -> None:
        """Raise SpecError if there are more ranks than vertices."""
        if problem.ranks > problem.stats.vertices:
            raise SpecError(
                f"{self.family} needs a vertex per rank (vertices: {problem.stats.vertices}, ranks:"
                f" {problem.ranks}); use fewer ranks"
            )

    def steps(self, problem: Problem) -> int:
        """Return the number of optimizer steps per epoch."""
        return 1

    def drawn_steps(self, problem: Problem) -> int | None:
        """Return for how many steps the schedule has exactly the edges that training will draw.

        None if the strategy samples no edges.
        """
        return None

    def partitioned_s(self, problem: Problem) -> float:
        """Return the seconds that it took to partition the graph."""
        return 0.0

    def preparation(self, problem: Problem) -> dict[str, float]:
        """Return the seconds spent once before the first step, by purpose."""
        features_s = setup_s(problem, self.built(problem).setup())
        return {"partitioning": self.partitioned_s(problem), "features": features_s}

    @abstractmethod
    def resident(self, problem: Problem) -> Resident:
        """Return what ranks have in memory besides the tensors of operations."""

    def memory(self, problem: Problem) -> Memory:
        """Return each rank's peak bytes, by use."""
        return peak(problem, self.built(problem), self.resident(problem))

    def fits(self, problem: Problem) -> bool:
        """Return whether the peak memory of every rank fits its device."""
        return self.most_memory(problem) <= problem.cluster.device.memory

    def most_memory(self, problem: Problem) -> float:
        """Return the peak memory of the rank that needs most [B]."""
        return sum(on_fullest_rank(self.memory(problem)).values())

    def host_memory(self, problem: Problem) -> Memory:
        """Return the bytes of graph data in each server's memory, by use [servers]."""
        return {}

    def on_fullest_server(self, problem: Problem) -> dict[str, float]:
        """Return the bytes of graph data in the fullest server's memory, by use."""
        return on_fullest_rank(self.settle(problem).host_memory(problem))

    def fits_servers(self, problem: Problem) -> bool:
        """Return whether the graph data fit in every server's memory."""
        room = problem.cluster.graph_memory
        return room == np.inf or sum(self.on_fullest_server(problem).values()) <= room

    def more_spread(self, problem: Problem) -> Iterator[Self]:
        """Yield variants with less graph data in each server's memory, the fullest first."""
        return iter(())

    @abstractmethod
    def program(self, problem: Problem) -> Program:
        """Return the operations of all ranks, from which all other predictions are computed."""

    def built(self, problem: Problem) -> Program:
        """Return `program(problem)` from a cache that keeps the last program."""
        return problem.cache.get_recent(
            "program", (self, problem), lambda: self.program(problem), most=1
        )

    def predict(self, problem: Problem) -> Prediction:
        """Return bytes and seconds of one epoch, in closed form.

        Broadcasts over clusters: if the cluster's numbers are arrays [problems, 1], the seconds
        are such arrays too.
        """
        problem = problem.with_cuda_graph(self.uses_cuda_graph)
        return problem.cache.get_recent(
            "prediction", (self, problem), lambda: predict(problem, self.built(problem))
        )

    def epoch_s(self, problem: Problem) -> Number:
        """Return the seconds of `predict` alone, which are faster to compute [s]."""
        return epoch_s(problem.with_cuda_graph(self.uses_cuda_graph), self.built(problem))

    def schedule(self, problem: Problem, steps: int) -> Schedule:
        """Return every rank's tasks. The simulator plays them; the executor must do the same."""
        problem = problem.with_cuda_graph(self.uses_cuda_graph)
        return build_schedule(problem, self.program(problem), steps)

    def traffic(self, problem: Problem) -> list[RankMatrix]:
        """Return matrices of the bytes from rank to rank [ranks, ranks], to place the ranks."""
        return traffic(self.built(problem), problem.ranks)

    def tied(self, problem: Problem) -> PerRank:
        """Return each rank's group [ranks] if a group's ranks must share a server or an island.

        Empty if every rank may sit on any GPU.
        """
        return ()

    def layout(self, problem: Problem) -> AnyLayout | None:
        """Return which rank owns and computes which rows, or None if ranks own no vertices."""
        return None

    def role(self, problem: Problem, rank: int) -> dict[str, int]:
        """Return what a rank owns, as the plan file writes it."""
        return {"part": rank}

    def placement(self, problem: Problem) -> list[dict[str, int]]:
        """Return each rank's server and GPU, and what the rank owns."""
        gpus = problem.cluster.gpus_per_server
        return [
            {"rank": rank, "server": gpu // gpus, "gpu": gpu % gpus, **self.role(problem, rank)}
            for rank, gpu in enumerate(problem.cost.placement)
        ]

    def knobs(self) -> dict[str, Any]:
        """Return all knobs by name; sizes in bytes."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        """Return the text that --strategy takes and `parse` reads, without knobs at their defaults.

        Sizes of 1 MB or more have a unit (`show_size`); long lists write repeated numbers as
        '4x8' (`show_list`).
        """
        defaults = {f.name: f.default for f in dataclasses.fields(self)}
        defaults |= self.names.get(self.name, {})  # the name sets these knobs already
        types = {f.name: f.type for f in dataclasses.fields(self)}
        written = ",".join(
            f"{knob}={show_knob(value, str(types[knob]))!r}"
            for knob, value in self.knobs().items()
            if value != defaults[knob]
        )
        return f"{self.name}({written})" if written else self.name
