"""A plan that is to be run, and the options of `gnnplan run`, which a run stores in options.json.
Also the checks of the plan's problem, of the options, and of the run's folder.

preflight.py compares the plan with this machine.
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
from shlex import quote
from typing import Annotated, Any

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError

from gnnplan.executor.ranks.checkpoint import (
    file_of,
    header,
    must_have_epochs,
    plan_of,
    resumable,
)
from gnnplan.executor.ranks.checkpoint import question as resumed_question
from gnnplan.executor.ranks.learner import is_over
from gnnplan.executor.ranks.rendezvous import launcher_env
from gnnplan.planner.cluster.spec import Cluster
from gnnplan.planner.decision.plan import chosen, placement, question, read, write
from gnnplan.planner.gnn.workload import Workload
from gnnplan.planner.graph.graph import Graph
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies import GraphParallel, Strategy, parse
from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.planner.vocabulary.files import (
    MOST_SHOWN,
    Json,
    must_be_folder,
    read_bytes,
    write_atomically,
)
from gnnplan.planner.vocabulary.numbers import PerRank
from gnnplan.planner.vocabulary.units import show_count

MAX_FILE = 1 << 16  # [B] of options.json
MOST = 10**9  # largest number of epochs, or restarts
LONGEST_S = 10**6  # [s] that a rank waits at most; torch and Gloo count milliseconds in 32 bits
NOT_INHERITED = ("resume", "restarts", "quiet")  # a resumed run does not take these over


@dataclass(frozen=True)
class Options:
    """The options of `gnnplan run`."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    epochs: Annotated[int, Field(ge=1, le=MOST)] | None = None  # None: as the workload says
    eval_every: Annotated[int, Field(ge=0, le=MOST)] = 10
    # [s] that a rank waits for its peers
    timeout_s: Annotated[float, Field(ge=1.0, le=LONGEST_S)] = 30.0
    staleness_errors: bool = False
    gradient_errors: bool = False
    checkpoint_every: Annotated[int, Field(ge=0, le=MOST)] = 10  # period in epochs; 0: never
    resume: bool = False  # continue from the last checkpoint in the run's folder
    restarts: Annotated[int, Field(ge=0, le=MOST)] = 0  # restarts of all ranks, after one is lost
    # folder of TensorBoard's event files; absolute, as a resumed run may start in another folder
    tensorboard: Annotated[str, AfterValidator(os.path.abspath)] | None = None
    quiet: bool = False  # report no epochs

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
        """Read the options of a run. Raises SpecError."""
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
        """Write the options into the run's folder."""
        write_atomically(out / "options.json", json.dumps(asdict(self)))


def _plain(value: Any) -> str | int:
    """Return a path as str and a whole number of another library as int, for JSON."""
    return os.fspath(value) if isinstance(value, os.PathLike) else index(value)


@dataclass(frozen=True)
class RunRequest:
    """A plan that is to be run, with its folder and options.

    launched: torchrun or srun started this process as a rank. emulate: rate of emulated servers'
    NICs [B/s]; inf: as fast as the machine; 0: no emulation. loaded: the plan's problem, if it is
    already in memory.
    """

    document: Json
    out: Path
    options: Options
    launched: bool = False
    emulate: float = 0.0
    loaded: Problem | None = None

    @cached_property
    def problem(self) -> Problem:
        """The plan's problem. Raises SpecError, or Mismatch if the data have changed since."""
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
        """The strategy with all knobs set. Raises SpecError if it cannot be trained as asked."""
        strategy = trainable(self.problem, self.strategy)
        must_be_measurable(self.options, strategy)
        must_have_rates(self.options, self.workload)
        return strategy

    @property
    def epochs(self) -> int:
        """Epochs of the whole training."""
        return self.options.epochs or self.workload.epochs

    @property
    def last(self) -> int:
        """The epoch to continue from, 0 for a new run. Raises SpecError if the folder refuses.

        For runs whose ranks are all on this machine.
        """
        if not self.options.resume:
            must_be_new(self.out)
            must_be_folder(self.out)
            return 0
        last, before = last_of(self.out, self.problem, self.settled)
        must_go_on(self.out, last, self.epochs, before)
        return last

    @property
    def servers(self) -> PerRank:
        """The server of every rank, in the order of the ranks' GPUs, as launchers number ranks."""
        each = self.cluster.gpus_per_server
        return tuple(gpu // each for gpu in sorted(placement(self.document)))

    @property
    def env(self) -> dict[str, str]:
        """The environment variables that say where ranks meet."""
        if self.launched:
            return launcher_env()
        name = "GLOO_SOCKET_IFNAME"
        return {name: os.environ[name]} if name in os.environ else {}

    @property
    def servers_here(self) -> int:
        """Number of servers of the run: real ones, or emulated by this machine."""
        planned = len(set(self.servers))
        if not self.launched:
            return planned if self.emulate else 1
        found = self.env.get("GROUP_WORLD_SIZE") or self.env.get("SLURM_STEP_NUM_NODES") or ""
        return int(found) if found.isdecimal() and int(found) else planned

    @property
    def ranks_here(self) -> int:
        """Number of the run's ranks on this machine."""
        ranks = len(self.servers)
        if not self.launched:
            return ranks
        if self.servers_here != len(set(self.servers)):
            return math.ceil(ranks / self.servers_here)
        return self.servers.count(self.servers[min(int(self.env["RANK"]), ranks - 1)])

    @property
    def predicted(self) -> dict[str, float]:
        """Memory of the fullest rank by use [B]; empty if a user has removed it from the plan."""
        return dict(self.document["best"].get("predicted", {}).get("memory", {}))

    @property
    def host_bytes(self) -> float:
        """Graph data in the fullest server's memory, apart from its ranks' memory [B]."""
        return float(self.document["best"].get("predicted", {}).get("host_bytes", 0.0))


def trainable(problem: Problem, strategy: Strategy) -> Strategy:
    """Return a strategy with all knobs set. Raises SpecError if it cannot be trained."""
    must_be_trainable(problem)
    strategy = strategy.settle(problem)
    strategy.check(problem)
    return strategy


def must_be_trainable(problem: Problem) -> None:
    """Raise SpecError for a graph that is known by statistics only, or without labels."""
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


def must_be_measurable(options: Options, strategy: Strategy) -> None:
    """Raise SpecError if the options ask for errors that this strategy cannot measure.

    Gradients are compared with those of the strategy's exact twin: the same worker, with exchanges
    of fresh whole rows (strategies/layerwise.py).
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
    """Raise SpecError if the learning-rate schedule has fewer epochs than the options ask for."""
    asked, known = options.epochs or workload.epochs, workload.epochs
    if workload.ends_on_time and asked > known:
        raise SpecError(
            f"--epochs {asked:,}: the plan's {workload.schedule} schedule brings the learning rate"
            f" to 0 in {known:,} epochs; plan with --epochs {asked}, or ask for {known:,} or less"
        )


def must_be_new(out: Path, begun: Mapping[str, Any] | None = None) -> None:
    """Raise SpecError if the folder already holds a run.

    begun: a plan whose run may be in the folder, as an earlier attempt has begun it.
    """
    left_by_runs = ("metrics.jsonl", "rank0.json", "weights.safetensors", "checkpoints")
    if any((out / name).exists() for name in left_by_runs) and not (
        begun is not None and _is_plan_of(out, begun)
    ):
        raise SpecError(
            f"{out} holds a run already; give another --out, go on with it (--resume"
            f" {quote(str(out))}), or remove it"
        )


def must_go_on(
    out: Path,
    last: int,
    epochs: int,
    before: Json | None = None,
    may_begin: bool = False,
    logs: bool = True,
) -> None:
    """Raise SpecError if there is no checkpoint to resume from, or nothing left to train.

    last: epoch of the last checkpoint that all ranks have, 0 if there is none. before: the other
    plan that wrote it, if another; then this plan trains at least one epoch. may_begin: whether
    training may begin from epoch 0. A new run may. So may ranks that our launcher restarts, as the
    launcher has checked for a checkpoint; a run that a user resumes may not. logs: whether this
    machine has the run's metrics, which must reach the checkpoint's epoch.
    """
    if not last and not may_begin:
        raise SpecError(
            f"{out} has no checkpoint that all ranks have finished; they are written every"
            " --checkpoint-every epochs, and another plan needs those of all ranks on every"
            " server's disk. Start anew with another --out"
        )
    least = last + (before is not None)
    if least > epochs:
        raise SpecError(
            f"{out} has a checkpoint of epoch {last}, but only {epochs} epochs are asked for; use"
            f" --epochs {least} or more"
        )
    written = header(file_of(out / "checkpoints", last, 0), checked=False) if before else None
    patience = before and before["workload.patience"]
    if written and patience and is_over(written["notes"]["best"], patience):
        raise SpecError(
            f"{out} ended at epoch {last}, {show_count(patience, 'epoch')} after its best"
            f" (patience={patience}), so another plan has nothing left to train; start anew with"
            " another --out"
        )
    if logs:
        must_have_epochs(out / "metrics.jsonl", last)


def last_of(out: Path, problem: Problem, strategy: Strategy) -> tuple[int, Json | None]:
    """Return the last epoch whose checkpoint all ranks have on this machine, 0 without one.

    Also return the `question` of the plan that wrote it, if it is another plan of the same
    training. Raises SpecError if a checkpoint belongs to another training, or this plan cannot
    continue from it.
    """
    asked = resumed_question(problem, strategy)
    found = resumable(out, range(problem.ranks), asked)
    last = max(found, default=0)
    return last, None if found.get(last, asked) == asked else found[last]


def write_run(out: Path, document: Json, options: Options, last: int) -> None:
    """Write the plan and the options of a run into its folder.

    If this plan continues another plan from epoch `last`, the other plan is kept: its checkpoints
    are needed until this plan has written its first.
    """
    earlier, kept = out / "plan.json", out / f"plan.until{last}.json"
    if last and earlier.is_file() and not kept.exists() and not _is_plan_of(out, document):
        write_atomically(kept, earlier.read_bytes())
    write(out / "plan.json", document)
    options.write(out)


def _is_plan_of(out: Path, document: Mapping[str, Any]) -> bool:
    """Whether the folder holds a run of this plan."""
    plan = out / "plan.json"
    return plan.is_file() and read(plan) == document


def taken_over(before: Mapping[str, Any], strategy: Strategy, last: int) -> str:
    """Return a sentence on what a run takes over from its previous plan, and what it does not.

    before: the `question` of the plan that trained until epoch `last`. strategy: of the next plan.
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
