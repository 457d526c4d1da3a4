"""The choice: every family's candidates, those that fit ranked by their closed form, the others with a reason."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial

import numpy as np

from gnnplan.planner.errors import Infeasible, SpecError
from gnnplan.planner.grouping import fewer, seat
from gnnplan.planner.job import Job
from gnnplan.planner.specs import MOST_RANKS
from gnnplan.planner.strategies import FAMILIES, Strategy
from gnnplan.planner.strategies.strategy import Memory, Prediction
from gnnplan.planner.units import show_bytes
from gnnplan.progress import Tell, silent


@dataclass(frozen=True)
class Candidate:
    """A strategy that fits, with its prediction. Its `job` says on which GPUs its ranks sit."""

    strategy: Strategy
    predicted: Prediction
    memory: Memory
    job: Job

    @property
    def memory_bytes(self) -> float:
        """Of the fullest rank [B]."""
        return float(sum(self.memory.values(), np.zeros(1)).max())

    @property
    def dollars(self) -> float | None:
        """Price of an epoch [$]: of all GPUs of the servers that it uses, if the cluster tells it."""
        price, servers = self.job.cluster.price, len(set(self.job.servers))
        return None if price is None else price * servers * self.job.cluster.gpus_per_server * float(self.predicted.epoch_s) / 3600

    def fullest(self) -> dict[str, float]:
        """Bytes by use on the fullest rank."""
        rank = int(np.argmax(sum(self.memory.values(), np.zeros(1))))
        return {use: float(per_rank[rank]) for use, per_rank in self.memory.items()}


@dataclass(frozen=True)
class Found:
    """Candidates from fastest to slowest; (strategy, reason) of those that cannot be. `forced`: nothing else was asked for."""

    ranked: list[Candidate]
    rejected: list[tuple[str, str]]
    forced: bool = False


def families(job: Job) -> list[type[Strategy]]:
    """Those that train on what the workload asks for."""
    return [family for family in FAMILIES if family.mode == job.workload.mode]


def weigh(job: Job, strategy: Strategy) -> Candidate:
    """Raises SpecError where the knobs do not suit the job, Infeasible where the memory is too small."""
    strategy = strategy.settle(job)
    strategy.check(job)
    candidate = Candidate(strategy, strategy.predict(job), strategy.memory(job), job)
    room = job.cluster.device.memory
    if candidate.memory_bytes > room:
        use, most = max(candidate.fullest().items(), key=lambda item: item[1])
        raise Infeasible(
            f"{strategy} needs {show_bytes(candidate.memory_bytes)} on its fullest rank but a {job.cluster.device.name} has "
            f"{show_bytes(room)}; most of it is {use} ({show_bytes(most)})"
        )
    return candidate


def weigh_thriftily(job: Job, strategy: Strategy) -> Candidate:
    """`weigh`, with less memory and more computation where it would not fit otherwise."""
    try:
        return weigh(job, strategy)
    except Infeasible as error:
        thriftier = strategy.settle(job).thriftier()
        if thriftier is not None:
            with suppress(Infeasible):
                return weigh(job, thriftier)
        raise error


def seated(job: Job, strategy: Strategy) -> Job:
    """The job with its ranks on those of its GPUs where the strategy's traffic is fastest, or in order where that is predicted to be
    faster: seating weighs exchanges one by one, but those of a pipeline's stages are under way together. Raises SpecError (unsuitable)."""
    strategy = strategy.settle(job)
    strategy.check(job)
    gpus = tuple(sorted(job.cost.seats))
    in_order = job.seated(gpus)
    chosen = job.seated(seat(job.cluster, gpus, strategy.traffic(in_order), strategy.tied(in_order)))
    if chosen.seats == in_order.seats:
        return chosen
    return min((chosen, in_order), key=lambda seating: float(strategy.predict(seating).epoch_s))


def search(job: Job, exact: bool = False, forced: Strategy | None = None, may_use_fewer: bool = True, tell: Tell = silent) -> Found:
    """All candidates of all families, or the forced one, on all GPUs; then the fastest on fewer GPUs, where that may win. Raises
    SpecError (forced and unsuitable) or Infeasible (nothing fits)."""
    if forced is not None:
        if exact and not forced.settle(job).exact:
            name = forced.settle(job)
            raise SpecError(f"--exact excludes {name}: it changes the gradient; drop --exact or use graph_parallel or granndis")
        try:
            return Found([weigh(seated(job, forced), forced)], [], forced=True)
        except Infeasible as error:
            raise Infeasible(f"{error}; {smallest_change(job, lambda _: [forced])}") from None
    ranked: list[Candidate] = []
    rejected: list[tuple[str, str]] = []
    for family in families(job):
        tried = 0
        for strategy in family.candidates(job):
            tried += 1
            tell(f"weighing {strategy} on {job.ranks} ranks")
            if exact and not strategy.settle(job).exact:
                rejected.append((str(strategy.settle(job)), "it changes the gradient, and --exact asks for strategies that do not"))
                continue
            try:
                ranked.append(weigh_thriftily(seated(job, strategy), strategy))
            except (SpecError, Infeasible) as error:
                rejected.append((str(strategy.settle(job)), str(error)))
        if not tried:
            rejected.append((family.family, family.absent(job)))
    if not ranked:
        reasons = "\n  ".join(f"{name}: {reason}" for name, reason in rejected)
        raise Infeasible(f"nothing fits:\n  {reasons}\n{smallest_change(job, partial(_thrifty_too, exact=exact))}")
    if may_use_fewer:
        ranked += on_fewer(job, exact, min(float(candidate.predicted.epoch_s) for candidate in ranked), tell)
    ranked.sort(key=lambda candidate: float(candidate.predicted.epoch_s))
    return Found(ranked, rejected)


def on_fewer(job: Job, exact: bool, limit: float, tell: Tell = silent) -> list[Candidate]:
    """The fastest candidate on each choice of fewer GPUs whose computation alone takes less than `limit` [s]. Ranks on a CPU are no
    GPUs: --ranks chooses their number, and they share its cores."""
    found = []
    for gpus in fewer(job.cluster) if job.cluster.device.kind != "cpu" else ():
        if least(job, len(gpus)) >= limit:
            continue
        smaller, fitting = job.seated(gpus), []
        for strategy in _candidates(smaller, exact):
            tell(f"weighing {strategy} on {len(gpus)} of {job.ranks} GPUs")
            with suppress(SpecError, Infeasible):
                fitting.append(weigh_thriftily(seated(smaller, strategy), strategy))
        if fitting:
            found.append(min(fitting, key=lambda candidate: float(candidate.predicted.epoch_s)))
    return found


def least(job: Job, ranks: int) -> float:
    """Seconds of an epoch's computation on so many ranks, were it shared equally and nothing sent."""
    rows, edges = job.stats.vertices / ranks, job.stats.edges / ranks
    layers = range(1, job.workload.layers + 1)
    work = [way(layer, rows, rows, edges) for layer in layers for way in (job.model.forward, job.model.backward)]
    return float(sum(job.cost.compute_s(one) for one in work))


def _candidates(job: Job, exact: bool) -> list[Strategy]:
    return [s for family in families(job) for s in family.candidates(job) if not exact or s.settle(job).exact]


def _thrifty_too(job: Job, exact: bool) -> list[Strategy]:
    return [s for plain in _candidates(job, exact) for s in (plain, plain.settle(job).thriftier()) if s is not None]


def smallest_change(job: Job, options: Callable[[Job], list[Strategy]]) -> str:
    """What would make room for one of `options`: more memory per device, or more servers (estimated from statistics)."""
    words = []
    needs = [(need, str(strategy.settle(job))) for strategy in options(job) if (need := needed(job, strategy)) is not None]
    if needs:
        room = np.ceil(min(needs)[0] / 1e9 * 1.001 * 100) / 100  # [GB]
        words.append(f"--set device.memory={room:g}GB would fit {next(name for need, name in needs if need <= room * 1e9)}")

    @cache
    def with_servers(servers: int) -> str | None:
        """A strategy that fits on so many."""
        cluster = job.cluster.model_copy(update={"servers": servers, "inter_node": job.cluster.inter_node or job.cluster.intra_node})
        if cluster.ranks > min(job.stats.vertices, MOST_RANKS):
            return None
        larger = replace(job, graph=None, method=method, cluster=cluster, seats=(), _layouts={}, _chunks={})
        fitting = (str(s.settle(larger)) for s in options(larger) if (needed(larger, s) or np.inf) <= cluster.device.memory)
        return next(fitting, None)

    method = job.method if job.graph is None else "random"  # no real cut of a graph is worse, so a remedy holds
    few = job.cluster.servers
    many = next((few * factor for factor in (2, 4, 8, 16, 32, 64) if with_servers(few * factor)), 0)
    if many:
        few = many // 2
        while many - few > 1:
            between = (few + many) // 2
            few, many = (few, between) if with_servers(between) else (between, many)
        words.append(f"--set servers={many} ({with_servers(many)}, estimated)")
    if not words:
        return "no memory per device and no number of servers up to 64 times as many would fit"
    return f"the smallest change that would fit: {' or '.join(words)}"


def needed(job: Job, strategy: Strategy) -> float | None:
    """Memory of the fullest rank [B]; None where the strategy does not suit the job."""
    try:
        strategy = strategy.settle(job)
        strategy.check(job)
        return float(sum(strategy.memory(job).values(), np.zeros(1)).max())
    except SpecError:
        return None
