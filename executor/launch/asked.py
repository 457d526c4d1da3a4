"""A plan that is to be run, and how: its problem, its strategy, and the part that is here."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from gnnplan.executor.launch.checks import (
    last_of,
    must_be_measurable,
    must_be_new,
    must_go_on,
    must_have_rates,
    trainable,
)
from gnnplan.executor.launch.emulation import Emulated
from gnnplan.executor.launch.options import Options
from gnnplan.executor.ranks.meeting import launcher_env
from gnnplan.planner.cluster.spec import Cluster
from gnnplan.planner.decision.plan import chosen, placement, question
from gnnplan.planner.gnn.workload import Workload
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies import Strategy
from gnnplan.planner.vocabulary.files import must_be_folder


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
