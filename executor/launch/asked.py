"""A plan that is to be run, and how: the options of `gnnplan run`, which a run keeps in
options.json; and what is refused of the plan's problem, its options and folder.

What the plan asks of this machine is in preflight.py.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from operator import index
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError

from gnnplan.executor.launch.emulation import Emulated
from gnnplan.executor.ranks.checkpoint import (
    Checkpoints,
    fingerprint,
    handed_over,
    must_have_epochs,
    onwards,
    plan_of,
)
from gnnplan.executor.ranks.checkpoint import question as resumed_question
from gnnplan.executor.ranks.meeting import launcher_env
from gnnplan.planner.cluster.spec import Cluster
from gnnplan.planner.decision.plan import chosen, placement, question, read, write
from gnnplan.planner.gnn.workload import Workload
from gnnplan.planner.graph.graph import Graph
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies import GraphParallel, Strategy, parse
from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.planner.vocabulary.files import (
    MOST_SHOWN,
    must_be_folder,
    read_bytes,
    write_atomically,
)

MAX_FILE = 1 << 16  # [B]
MOST = 10**9  # epochs, restarts
LONGEST_S = 10**6  # that a rank waits [s]; torch and Gloo count milliseconds in 32 bits
NOT_INHERITED = ("resume", "restarts", "quiet")  # each call of `gnnplan run` says these anew


@dataclass(frozen=True)
class Options:
    """How a plan is run."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    epochs: Annotated[int, Field(ge=1, le=MOST)] | None = None  # None: the workload's
    eval_every: Annotated[int, Field(ge=0, le=MOST)] = 10
    # that a rank waits for its peers
    timeout_s: Annotated[float, Field(ge=1.0, le=LONGEST_S)] = 30.0
    staleness_errors: bool = False
    gradient_errors: bool = False
    checkpoint_every: Annotated[int, Field(ge=0, le=MOST)] = 10  # epochs; 0: never
    resume: bool = False  # go on from the last checkpoint in the run's folder
    restarts: Annotated[int, Field(ge=0, le=MOST)] = 0  # of all ranks, when one is lost
    # folder of TensorBoard's event files; a resumed run may be called from elsewhere
    tensorboard: Annotated[str, AfterValidator(os.path.abspath)] | None = None
    quiet: bool = False  # no lines about epochs

    @classmethod
    def of(cls, out: Path, given: Mapping[str, Any], resume: bool) -> Options:
        """Combine the options of a command line with those of the run that it resumes.

        A value of None in `given` means that the option was not given. A resumed run then keeps
        its own option, a new run takes the default. Raises SpecError.
        """
        path, earlier = out / "options.json", dict[str, Any]()
        if resume and path.exists():
            earlier = asdict(cls.read(path))
            for name in NOT_INHERITED:
                del earlier[name]
        chosen = {name: value for name, value in given.items() if value is not None}
        try:
            return TypeAdapter(cls).validate_json(
                json.dumps({**earlier, **chosen, "resume": resume}, default=_plain), strict=True
            )
        except ValidationError as error:
            first = error.errors()[0]
            option = str(first["loc"][0]).removesuffix("_s").replace("_", "-")
            rule = first["msg"].replace("Input should be", "must be")
            raise SpecError(f"--{option} {str(first['input'])[:MOST_SHOWN]}: {rule}") from error

    @classmethod
    def read(cls, path: Path) -> Options:
        """The options of a run. Raises SpecError."""
        remedy = "remove it, and give its options again"
        content = read_bytes(path, MAX_FILE, remedy)
        try:
            return TypeAdapter(cls).validate_json(content, strict=True)
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(str(name)[:MOST_SHOWN] for name in first["loc"]) or "the file"
            raise SpecError(
                f"{path} is damaged or of another version ({field}: {first['msg']}); {remedy}"
            ) from error

    def write(self, out: Path) -> None:
        """Keep the options in the run's folder."""
        write_atomically(out / "options.json", json.dumps(asdict(self)))


def _plain(value: Any) -> str | int:
    """A path, or another library's whole number, as JSON has them."""
    return os.fspath(value) if isinstance(value, os.PathLike) else index(value)


@dataclass(frozen=True)
class Asked:
    """A plan that is to be run, and how.

    launched: torchrun or srun has started this process as a rank. emulate: how this machine plays
    the plan's servers; None: it does not. loaded: the plan's problem, where it is there already.
    """

    document: dict[str, Any]
    out: Path
    options: Options
    launched: bool = False
    emulate: Emulated | None = None
    loaded: Problem | None = None

    @cached_property
    def problem(self) -> Problem:
        """Raises SpecError, or Mismatch where the data have changed since."""
        return self.loaded or question(self.document)

    @property
    def cluster(self) -> Cluster:
        return Cluster.model_validate(self.document["cluster"])

    @property
    def workload(self) -> Workload:
        return Workload.model_validate(self.document["workload"])

    @property
    def strategy(self) -> Strategy:
        return chosen(self.document)

    @cached_property
    def settled(self) -> Strategy:
        """The strategy with all its knobs. Raises SpecError where it cannot be trained as asked."""
        strategy = trainable(self.problem, self.strategy)
        must_be_measurable(self.options, strategy)
        must_have_rates(self.options, self.workload)
        return strategy

    @property
    def epochs(self) -> int:
        """Of the whole training."""
        return self.options.epochs or self.workload.epochs

    @cached_property
    def last(self) -> int:
        """The epoch that it goes on from; 0: it begins. Raises SpecError where the folder refuses.

        It is of ranks on this machine alone.
        """
        if not self.options.resume:
            must_be_new(self.out)
            must_be_folder(self.out)
            return 0
        last, of_another = last_of(self.out, self.problem, self.settled)
        must_go_on(self.out, last, self.epochs, of_another=of_another)
        return last

    @property
    def servers(self) -> tuple[int, ...]:
        """The server of every rank, in the order of their GPUs, as launchers count them."""
        each = self.cluster.gpus_per_server
        return tuple(gpu // each for gpu in sorted(placement(self.document)))

    @property
    def env(self) -> dict[str, str]:
        """What says where ranks meet."""
        if self.launched:
            return launcher_env()
        name = "GLOO_SOCKET_IFNAME"
        return {name: os.environ[name]} if name in os.environ else {}

    @property
    def servers_here(self) -> int:
        """Servers of the run: real ones, or played by this machine."""
        planned = len(set(self.servers))
        if not self.launched:
            return 1 if self.emulate is None else planned
        found = self.env.get("GROUP_WORLD_SIZE") or self.env.get("SLURM_STEP_NUM_NODES") or ""
        return int(found) if found.isdecimal() and int(found) else planned

    @property
    def ranks_here(self) -> int:
        """Ranks of the run on this machine."""
        ranks = len(self.servers)
        if not self.launched:
            return ranks
        if self.servers_here != len(set(self.servers)):
            return math.ceil(ranks / self.servers_here)
        return self.servers.count(self.servers[min(int(self.env["RANK"]), ranks - 1)])

    @property
    def predicted(self) -> dict[str, float]:
        """Memory of the fullest rank by use [B]; empty if someone has removed it from the plan."""
        return dict(self.document["best"].get("predicted", {}).get("memory", {}))

    @property
    def host_bytes(self) -> float:
        """Graph data in the fullest server's memory, beside what its ranks fill [B]."""
        return float(self.document["best"].get("predicted", {}).get("host_bytes", 0.0))


def trainable(problem: Problem, strategy: Strategy) -> Strategy:
    """The settled strategy of a plan.

    Raises SpecError where it cannot be trained, or the graph is known by statistics only, or has no
    labels.
    """
    name = problem.stats.name
    if not isinstance(problem.graph, Graph):
        raise SpecError(
            f"the graph {name} is known by statistics only and cannot be trained;"
            " plan with a graph file"
        )
    learns_labels = problem.workload.task == "node"
    if learns_labels and (problem.stats.classes == 0 or problem.stats.train_vertices == 0):
        raise SpecError(
            f"the graph {name} has no labelled training vertices; it can be"
            " planned and simulated, not trained; plan with a graph that has y"
        )
    strategy = strategy.settle(problem)
    strategy.check(problem)
    return strategy


def must_be_measurable(options: Options, strategy: Strategy) -> None:
    """Raise SpecError if the options ask for errors that nothing measures of the strategy.

    Gradients are compared with those of its exact twin, the same worker with exchanges of whole
    rows that are not late (strategies/gradient_errors.py).
    """
    if options.staleness_errors and isinstance(strategy, GraphParallel) and strategy.codec.packs:
        raise SpecError(
            "--staleness-errors compares rows with those one step older, and packed rows differ by"
            f" rounding too (bits: {strategy.bits}); leave it out, or use --gradient-errors"
        )
    if not options.gradient_errors:
        return
    if not isinstance(strategy, GraphParallel):
        raise SpecError(
            f"--gradient-errors is of graph_parallel and pipegcn, and the plan's {strategy} has no"
            " synchronous pass to compare with; leave it out, or choose --strategy pipegcn"
        )
    if strategy.buckets > 1:
        raise SpecError(
            "--gradient-errors compares gradients before ranks add them up, which begins during the"
            f" step with several buckets (buckets: {strategy.buckets}); plan with --strategy"
            f' "{replace(strategy, buckets=1)}", whose numbers are the same'
        )


def must_have_rates(options: Options, workload: Workload) -> None:
    """Raise SpecError if more epochs are asked for than the workload has learning rates for."""
    asked, known = options.epochs or workload.epochs, workload.epochs
    if workload.ends_on_time and asked > known:
        raise SpecError(
            f"--epochs {asked:,}: the plan's {workload.schedule} schedule brings the learning rate"
            f" to 0 in {known:,} epochs; plan with --epochs {asked}, or ask for {known:,} or less"
        )


def must_be_new(out: Path, begun: Mapping[str, Any] | None = None) -> None:
    """Raise SpecError if the folder holds a run already.

    begun: the plan whose run may be there, since an earlier attempt has begun it.
    """
    left_by_runs = ("metrics.jsonl", "rank0.json", "weights.safetensors", "checkpoints")
    if any((out / name).exists() for name in left_by_runs) and not (
        begun is not None and _is_plan_of(out, begun)
    ):
        raise SpecError(
            f"{out} holds a run already; give another --out, go on with it (--resume {out}), or"
            " remove it"
        )


def must_go_on(
    out: Path,
    last: int,
    epochs: int,
    may_begin: bool = False,
    of_another: bool = False,
    logs: bool = True,
) -> None:
    """Raise SpecError if there is no checkpoint to resume from, or nothing left to train.

    last: epoch of the last checkpoint that all ranks have, 0 if there is none. may_begin: whether
    training may begin again from epoch 0. A new run may, and so may ranks that our launcher
    restarts, which has asked for a checkpoint itself; a run that a user resumes may not.
    of_another: the checkpoint is of another plan, after which this one trains an epoch at least.
    logs: this machine has the run's metrics, which must reach as far as the checkpoint.
    """
    if not last and not may_begin:
        raise SpecError(
            f"{out} has no checkpoint that all ranks have finished; they are written every"
            " --checkpoint-every epochs, and another plan needs those of all ranks on every"
            " server's disk. Start anew with another --out"
        )
    if last + of_another > epochs:
        raise SpecError(
            f"{out} has a checkpoint of epoch {last}, but only {epochs} epochs are asked for; use"
            f" --epochs {last + of_another} or more"
        )
    if logs:
        must_have_epochs(out / "metrics.jsonl", last)


def last_of(out: Path, problem: Problem, strategy: Strategy) -> tuple[int, bool]:
    """The last epoch of which all ranks of a run on this machine have a checkpoint; 0: none.

    They are the ranks of this plan, or (True) of another plan of the same training. Raises
    SpecError if a checkpoint belongs to another training, or cannot go on with this plan.
    """
    asked = resumed_question(problem, strategy)
    own = [Checkpoints(out, rank, 0, asked).epochs() for rank in range(problem.ranks)]
    others = handed_over(out, asked)
    return onwards(own, [[(epoch, fingerprint(plan)) for epoch, plan in others.items()]])


def write_run(out: Path, document: dict[str, Any], options: Options, last: int) -> None:
    """Write the plan and the options of a run into its folder.

    The plan before is kept where another goes on from its epoch `last`: its checkpoints go on with
    it until the other has written its own.
    """
    earlier, kept = out / "plan.json", out / f"plan.until{last}.json"
    if last and earlier.is_file() and not kept.exists() and not _is_plan_of(out, document):
        write_atomically(kept, earlier.read_bytes())
    write(out / "plan.json", document)
    options.write(out)


def _is_plan_of(out: Path, document: Mapping[str, Any]) -> bool:
    """Whether the run in the folder is of this plan."""
    plan = out / "plan.json"
    return plan.is_file() and read(plan) == document


def taken_over(before: Mapping[str, Any], strategy: Strategy, last: int) -> str:
    """What a run's next plan takes over, and what it does not, in words.

    before: the `question` of the plan that trained until epoch `last`. strategy: the next one.
    """
    theirs = parse(before["strategy"])
    clauses = [
        f"{plan_of(before)} trained until epoch {last}",
        f"its {theirs.carries} are left behind" if theirs.carries else "",
        "weights and the optimizer's state go on",
        f"{strategy.carries} are made of these weights" if strategy.carries else "",
        "gradients are no longer exact" if theirs.exact and not strategy.exact else "",
    ]
    return "; ".join(filter(None, clauses))
