"""What every strategy answers: which variants, how much memory, how long, and the score."""

from __future__ import annotations

import ast
import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from gnnplan.planner.cost import Number
from gnnplan.planner.errors import SpecError
from gnnplan.planner.grouping import Phase
from gnnplan.planner.job import Job
from gnnplan.planner.schedule import Schedule

Memory = dict[str, np.ndarray]  # use -> bytes per rank [ranks]


@dataclass(frozen=True)
class Prediction:
    """Closed form of one epoch in steady state. Bytes are sums over all ranks, each counted where it is sent."""

    epoch_s: Number
    compute_s: Number  # of the busiest rank
    comm_s: Number  # exposed: not hidden behind computation
    bubble_s: Number  # waiting for other stages
    bytes: dict[str, int]  # by operation
    bytes_by_link: dict[str, int]  # intra_node, inter_node
    setup_bytes: int
    by_op: dict[str, Number] = field(default_factory=dict)  # operation kind -> seconds of its slowest rank

    @property
    def bytes_total(self) -> int:
        return sum(self.bytes.values())

    @property
    def bottleneck(self) -> str:
        """The largest share of the epoch, in words."""
        shares = {"computation": self.compute_s, "communication": self.comm_s, "pipeline bubble": self.bubble_s}
        largest = max(shares, key=lambda k: float(shares[k]))
        return f"{largest} ({float(shares[largest]) / max(float(self.epoch_s), 1e-12):.0%})"


@dataclass(frozen=True)
class Strategy(ABC):
    """A frozen dataclass of knobs."""

    family: ClassVar[str]
    mode: ClassVar[str] = "full"  # what it trains on: the full graph, or 'mini'-batches
    claim: ClassVar[float]  # |closed form / simulation - 1| stays below this; contention plays a role only where transfers overlap

    @property
    def name(self) -> str:
        """Its published name: variants are knob values."""
        return self.family

    @property
    @abstractmethod
    def exact(self) -> bool:
        """Whether it leaves the gradient as one process computes it. A claim: tests hold it."""

    @abstractmethod
    def approximates_as(self, other: Strategy) -> bool:
        """Whether the other changes the gradient in the same way, so that what is known of its convergence holds for this one."""

    @classmethod
    @abstractmethod
    def candidates(cls, job: Job) -> Iterator[Strategy]:
        """Variants worth weighing for this job."""

    @classmethod
    def absent(cls, job: Job) -> str:
        """Why `candidates` is empty for this job."""
        return "no variant suits this job"

    def settle(self, job: Job) -> Strategy:
        """The same with every knob left open filled in."""
        return self

    def thriftier(self) -> Strategy | None:
        """The same with less memory and more computation, for where it does not fit; None if there is no such thing."""
        return None

    @abstractmethod
    def check(self, job: Job) -> None:
        """Raises SpecError where the knobs do not suit the job."""

    def must_have_its_mode(self, job: Job) -> None:
        """Raises SpecError where the workload asks for another."""
        if self.mode != job.workload.mode:
            what, other = {"mini": "mini-batches", "full": "the full graph"}[self.mode], job.workload.mode
            raise SpecError(f"{self.name} trains on {what}, and the workload asks for mode {other}; use --mode {self.mode}"
                            f"{' with --batch and --fanout' if self.mode == 'mini' else ''}")  # fmt: skip

    def steps(self, job: Job) -> int:
        """Optimizer steps per epoch: batches."""
        return 1

    def drawn_steps(self, job: Job) -> int | None:
        """Where every step draws other edges: for how many its schedule has those that training draws."""
        return None

    @abstractmethod
    def preparation(self, job: Job) -> dict[str, float]:
        """What comes before the first step, once [s]: partitioning here, then set-up on the ranks."""

    @abstractmethod
    def memory(self, job: Job) -> Memory:
        """Bytes per rank by use."""

    @abstractmethod
    def predict(self, job: Job) -> Prediction:
        """Closed form; broadcasts over a cluster whose numbers are arrays [jobs, 1]."""

    @abstractmethod
    def schedule(self, job: Job, steps: int) -> Schedule:
        """What the simulator plays and the executor must do."""

    def traffic(self, job: Job) -> list[Phase]:
        """What its ranks send each other in a step: where they sit follows from it. None: where they sit is given by their order."""
        return []

    def tied(self, job: Job) -> tuple[int, ...]:
        """The group of each rank, where what it does follows from sharing a server or an island with the others; they stay together."""
        return ()

    def role(self, job: Job, rank: int) -> dict[str, int]:
        """What a rank owns."""
        return {"part": rank}

    def placement(self, job: Job) -> list[dict[str, int]]:
        """Where each rank sits and what it owns."""
        each = job.cluster.gpus_per_server
        return [{"rank": rank, "server": gpu // each, "gpu": gpu % each, **self.role(job, rank)} for rank, gpu in enumerate(job.cost.seats)]

    def knobs(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @property
    def implied(self) -> dict[str, Any]:
        """Knobs that the name says already."""
        return {}

    def __str__(self) -> str:
        """As --strategy takes it, without knobs at their defaults."""
        usual = {f.name: f.default for f in dataclasses.fields(self)} | self.implied
        told = ",".join(f"{knob}={value!r}" for knob, value in self.knobs().items() if value != usual[knob])
        return f"{self.name}({told})" if told else self.name


def parse_call(text: str) -> tuple[str, dict[str, Any]]:
    """'gnnpipe(stages=4,chunks=16)' -> ('gnnpipe', {'stages': 4, 'chunks': 16}). Literals only. Raises SpecError.

    >>> parse_call("gnnpipe(stages=4, shuffle=False)")
    ('gnnpipe', {'stages': 4, 'shuffle': False})
    >>> parse_call("granndis")
    ('granndis', {})
    """
    try:
        node = ast.parse(text.strip(), mode="eval").body
        if isinstance(node, ast.Name):
            return node.id, {}
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.args:
            knobs = {k.arg: ast.literal_eval(k.value) for k in node.keywords if k.arg}
            if len(knobs) == len(node.keywords):  # no **, no knob twice
                return node.func.id, knobs
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):  # the last: parentheses too deep
        pass
    raise SpecError(f"--strategy {text!r:.200} is not a family with knobs; write it as 'gnnpipe(stages=4,chunks=16)'")
