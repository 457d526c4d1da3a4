"""What every strategy answers: its variants, its memory, its seconds and its schedule.

A strategy is a frozen dataclass of knobs. It holds no state. Every question is asked together with
a `Problem` (planner/problem/problem.py), which knows the graph, the model and the cluster.

    text -> parse -> settle -> check        which knobs, and whether they suit the problem
                        |
                        +-> memory          bytes per rank
                        +-> program         what ranks do
                             +-> predict    seconds and bytes of an epoch, in closed form
                             +-> schedule   every rank's tasks, for the simulator and the executor
                             +-> traffic    who sends whom, for placing the ranks
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self, TypeVar

from gnnplan.planner.gnn.codec import Codec
from gnnplan.planner.ownership.estimated_layout import EstimatedLayout
from gnnplan.planner.ownership.layout import Layout
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies.program.account import Prediction, predict
from gnnplan.planner.strategies.program.memory import Memory as Memory
from gnnplan.planner.strategies.program.memory import of_fullest
from gnnplan.planner.strategies.program.program import Program, traffic
from gnnplan.planner.strategies.program.schedule import build_schedule
from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.planner.vocabulary.knobs import show_knob
from gnnplan.planner.vocabulary.outer import Pairs
from gnnplan.planner.vocabulary.schedule import Schedule

T = TypeVar("T")

# uses that are not of what ranks train with: libraries, NCCL's buffers, and a server's data in the
# memory of a rank on its processor
BESIDE_TRAINING = ("runtime", "communicators", "host")
# by mode, who trains with rounded rows (Strategy.rounds_rows)
ROUNDING = {
    "full": "graph_parallel, pipegcn, gnnpipe, granndis, bns, feature_parallel or offload",
    "mini": "data_parallel, gsplit, dnp or snp",
}
Bytes = int  # a knob that is a size: written as '2.5GB', or as a number of bytes


@dataclass(frozen=True)
class Example:
    """A variant that `gnnplan check` and the tests train: bytes, order, resume."""

    strategy: str
    ranks: int = 2
    servers: int = 1


def settled(knob: T | None) -> T:
    """A knob's value, once `Strategy.settle` has chosen what was left out."""
    assert knob is not None
    return knob


@dataclass(frozen=True)
class Strategy(ABC):
    """A parallel training strategy: a frozen dataclass whose fields are its knobs."""

    family: ClassVar[str]
    mode: ClassVar[str] = "full"  # what it trains on: the 'full' graph, or 'mini'-batches
    # published names of variants, and the knobs that each sets
    names: ClassVar[Mapping[str, Mapping[str, object]]] = {}
    rounds_rows: ClassVar[bool] = False  # whether its rows may be rounded; see ROUNDING
    # the module that trains it; it has open_worker(rank, problem, strategy, first) -> Worker
    executor: ClassVar[str]
    examples: ClassVar[tuple[Example, ...]]  # variants that `gnnplan check` and tests train
    # |closed form / simulation - 1| stays below this; each family says why they differ
    claim: ClassVar[float]

    @property
    def name(self) -> str:
        """The most specific published name whose knobs this variant has."""
        own = vars(self).items()
        suiting = [name for name, knobs in self.names.items() if knobs.items() <= own]
        return max(suiting, key=lambda name: len(self.names[name]), default=self.family)

    @property
    def exact(self) -> bool:
        """Whether the gradient is the one that a single process computes. Tests hold it to this."""
        return True

    @property
    def carries(self) -> str:
        """What ranks carry from step to step besides weights and the optimizer's state.

        '': nothing. A run that goes on with another plan leaves it behind, and makes it anew.
        """
        return ""

    @property
    def hands_over(self) -> bool:
        """Whether another plan can go on from weights and the optimizer's state alone."""
        return True

    @property
    def codec(self) -> Codec:
        """How rows are written that cross in every step: as the knob `bits` says, if it has one."""
        return Codec(vars(self).get("bits"))

    def with_whole_rows(self) -> Self:
        """The same, whose rows cross as they are."""
        return dataclasses.replace(self, **{"bits": None} if self.codec.packs else {})

    def approximates_as(self, other: Strategy) -> bool:
        """Whether `other` is lossy in the same way; asked of lossy strategies.

        If so, what is known of the other's convergence holds for this strategy too.
        """
        return False

    @classmethod
    @abstractmethod
    def candidates(cls, problem: Problem) -> Iterator[Strategy]:
        """The variants that a search should evaluate for this problem."""

    @classmethod
    def absent(cls, problem: Problem) -> str:
        """Why `candidates` is empty for this problem; '': the family is never a candidate."""
        return "no variant suits this problem"

    @classmethod
    def explain(cls, problem: Problem, fastest: Self | None) -> list[str]:
        """Sentences that only this family can say about a problem: its paper's rule, with numbers.

        `fastest` is its fastest variant on all GPUs; None if none fits or another was asked for.
        """
        return []

    def settle(self, problem: Problem) -> Strategy:
        """The same strategy with every open knob filled in."""
        return self

    @property
    def replays(self) -> bool:
        """Whether one rank launches a step at once (Problem.replays)."""
        return False

    def with_less_memory(self) -> Strategy | None:
        """A variant that needs less memory and computes more; None if there is none."""
        return None

    @abstractmethod
    def check(self, problem: Problem) -> None:
        """Raises SpecError if the knobs do not suit the problem."""

    def suits(self, problem: Problem) -> bool:
        """Whether `check` has nothing to say."""
        try:
            self.check(problem)
        except SpecError:
            return False
        return True

    def check_mode(self, problem: Problem) -> None:
        """Raises SpecError if the workload asks for another mode of training, or type of rows."""
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

    def check_vertices(self, problem: Problem) -> None:
        """Raises SpecError if there are more ranks than vertices to own."""
        if problem.ranks > problem.stats.vertices:
            raise SpecError(
                f"{self.family} needs a vertex per rank (vertices: {problem.stats.vertices}, ranks:"
                f" {problem.ranks}); use fewer ranks"
            )

    def steps(self, problem: Problem) -> int:
        """Optimizer steps per epoch."""
        return 1

    def drawn_steps(self, problem: Problem) -> int | None:
        """How many steps of the schedule have exactly the edges that training will draw.

        None where no step draws edges.
        """
        return None

    @abstractmethod
    def preparation(self, problem: Problem) -> dict[str, float]:
        """Seconds spent once before the first step, by what they are spent on."""

    @abstractmethod
    def memory(self, problem: Problem) -> Memory:
        """Bytes per rank by use, at the fullest moment."""

    def fits(self, problem: Problem) -> bool:
        """Whether the fullest rank's device holds what it has to."""
        return self.most_memory(problem) <= problem.cluster.device.memory

    def most_memory(self, problem: Problem) -> float:
        """Bytes on the fullest rank, at its fullest moment."""
        return sum(of_fullest(self.memory(problem)).values())

    def host_memory(self, problem: Problem) -> Memory:
        """Bytes of graph data in each server's memory by use [servers]."""
        return {}

    def more_spread(self, problem: Problem) -> Iterator[Self]:
        """Variants with less graph data in a server's memory, those that spread least first."""
        return iter(())

    @abstractmethod
    def program(self, problem: Problem) -> Program:
        """What ranks do, operation by operation; the next three are read from it, and `memory`."""

    def built(self, problem: Problem) -> Program:
        """`program(problem)`, built once for those that read it one after the other."""
        return problem.known.recent(
            "program", (self, problem), lambda: self.program(problem), most=1
        )

    def predict(self, problem: Problem) -> Prediction:
        """One epoch in closed form.

        Broadcasts over clusters: where the cluster's numbers are arrays [problems, 1], so are the
        seconds.
        """
        problem = problem.launching(self.replays)
        return problem.known.recent(
            "prediction", (self, problem), lambda: predict(problem, self.built(problem))
        )

    def schedule(self, problem: Problem, steps: int) -> Schedule:
        """Every rank's tasks. The simulator plays them; the executor is held to them."""
        problem = problem.launching(self.replays)
        return build_schedule(problem, self.program(problem), steps)

    def traffic(self, problem: Problem) -> list[Pairs]:
        """Bytes that ranks send each other [ranks, ranks], from which their placement follows."""
        return traffic(self.built(problem), problem.ranks)

    def tied(self, problem: Problem) -> tuple[int, ...]:
        """The group of each rank [ranks], if groups must share a server or an island.

        Empty: every rank may sit anywhere.
        """
        return ()

    def layout(self, problem: Problem) -> Layout | EstimatedLayout | None:
        """Which rank owns and computes which rows; None: ranks own no vertices."""
        return None

    def role(self, problem: Problem, rank: int) -> dict[str, int]:
        """What a rank owns, for the plan."""
        return {"part": rank}

    def placement(self, problem: Problem) -> list[dict[str, int]]:
        """Where each rank sits and what it owns."""
        gpus = problem.cluster.gpus_per_server
        return [
            {"rank": rank, "server": gpu // gpus, "gpu": gpu % gpus, **self.role(problem, rank)}
            for rank, gpu in enumerate(problem.cost.placement)
        ]

    def knobs(self) -> dict[str, Any]:
        """All knobs by name; sizes in bytes."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        """As --strategy takes it, without knobs at their defaults; `parse` gives back the same.

        Sizes of 1 MB or more are printed with a unit (`show_size`), long lists by what repeats
        (`show_list`).
        """
        defaults = {f.name: f.default for f in dataclasses.fields(self)}
        defaults |= self.names.get(self.name, {})  # the name says these already
        types = {f.name: f.type for f in dataclasses.fields(self)}
        written = ",".join(
            f"{knob}={show_knob(value, str(types[knob]))!r}"
            for knob, value in self.knobs().items()
            if value != defaults[knob]
        )
        return f"{self.name}({written})" if written else self.name
