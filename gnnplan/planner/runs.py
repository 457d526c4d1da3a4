"""Many runs beside their predictions: errors by operation, whether the ranking was right, and which constants to doubt.

Runs of one *question* (graph, workload, cluster) by several strategies are a ranking. Its regret is what following the prediction cost: the
measured epoch of the strategy predicted to be fastest, beside that of the fastest, minus one. Kendall's tau compares the two orders.
`refit` finds factors on some questions and scores them on the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import mean, median
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import least_squares
from scipy.stats import kendalltau

from gnnplan.planner import scaled
from gnnplan.planner.errors import SpecError
from gnnplan.planner.job import Job
from gnnplan.planner.specs import Cluster
from gnnplan.planner.strategies import Strategy

DOUBT = 0.1  # e times a measured constant is as bad as an epoch missed by a tenth: what runs do not tell stays as it was
WIDEST = 10.0  # a factor beyond this explains nothing
TRANSFERS = ("halo", "pipeline", "all_reduce", "moments", "ids", "push", "pull", "fetch", "ask", "ask_edges", "edges", "logits")


class Planned(NamedTuple):
    """What a run was of, to predict it again."""

    job: Job
    strategy: Strategy


@dataclass(frozen=True)
class Run:
    """One run: what was asked, and what `validate.compare` says of it."""

    folder: str
    question: str  # equal for runs that can be ranked
    name: str  # of the question, for people
    servers: int
    strategy: str
    told: dict[str, Any]
    epochs_s: tuple[float, ...]  # measured, without the first
    planned: Planned | None = None  # where the plan is at hand

    @classmethod
    def of(cls, folder: str, planned: Planned, told: dict[str, Any], metrics: Sequence[dict[str, Any]]) -> Run:
        """`metrics`: of the epochs, of which the first two warm up."""
        job, c = planned.job, planned.job.cluster
        asked = (job.stats.hash, job.workload.model_dump_json(), c.model_dump_json(exclude={"provenance"}), job.method)
        speed = f" at {c.inter_node.bandwidth * 8 / 1e6:.3g} Mbit/s" if c.servers > 1 and c.inter_node else ""
        shape = f"{job.workload.model} {job.workload.layers}x{job.workload.hidden}, {c.servers}x{c.gpus_per_server}{speed}"
        epochs = tuple(float(row["epoch_s"]) for row in metrics[min(2, len(metrics) - 1) :])
        name = f"{job.stats.name.split('?')[0]} {shape}"
        return cls(folder, " ".join(asked), name, c.servers, str(planned.strategy), told, epochs, planned)

    @property
    def measured_s(self) -> float:
        return float(self.told["step"]["measured_s"])


def errors(pairs: Iterable[tuple[float | None, float]]) -> dict[str, float] | None:
    """Of (predicted, measured): how many, and the mean, 95th percentile and largest of abs(predicted / measured - 1); None of none."""
    misses = [abs(told / seen - 1) for told, seen in pairs if told is not None and seen > 0]
    if not misses:
        return None
    return {"n": len(misses), "mean": mean(misses), "p95": float(np.quantile(misses, 0.95)), "max": max(misses)}


def summarise(runs: Sequence[Run]) -> dict[str, Any]:
    """The document of `gnnplan validate` over several runs."""
    def both(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return {way: errors((row[f"{way}_s"], row["measured_s"]) for row in rows) for way in ("predicted", "simulated")}

    by_op: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        for row in run.told["operations"]:
            by_op.setdefault(row["operation"], []).append(row)
    rankings = [ranking(same) for same in _by(runs, lambda run: run.question) if len({run.strategy for run in same}) > 1]
    memory = [run.told["memory"] for run in runs if run.told["memory"]["of"] == "data"]
    return {
        "runs": len(runs), "step": both([run.told["step"] for run in runs]),
        "operations": {op: {**both(rows), "share": sum(row["measured_s"] for row in rows) / sum(run.measured_s for run in runs)}
                       for op, rows in by_op.items()},
        "memory": errors((use["predicted_bytes"], use["measured_bytes"]) for use in memory),
        "bytes_equal": sum(run.told["bytes"]["equal"] for run in runs), "order_equal": sum(run.told["order"]["equal"] for run in runs),
        "noise": noise(runs), "rankings": rankings, "ranking": _all(rankings), "doubt": doubt(runs),
    }  # fmt: skip


def _by(runs: Sequence[Run], key: Callable[[Run], Any]) -> list[list[Run]]:
    """Runs with equal keys together, in their order."""
    groups: dict[Any, list[Run]] = {}
    for run in runs:
        groups.setdefault(key(run), []).append(run)
    return list(groups.values())


def noise(runs: Sequence[Run]) -> float:
    """How far a run's median epoch is from that of the same run again, usually [share]: of repeated runs where there are some, else
    what a median of so many epochs is uncertain by (1.25 standard errors, from the quartiles)."""
    again = [[run.measured_s for run in same] for same in _by(runs, lambda run: (run.question, run.strategy)) if len(same) > 1]
    if again:
        return median(float(np.std(same, ddof=1)) / mean(same) for same in again)

    def alone(epochs: Sequence[float]) -> float:
        low, high = np.quantile(epochs, (0.25, 0.75))
        return float(1.25 * (high - low) / 1.35 / np.sqrt(len(epochs)) / median(epochs))

    return median(alone(run.epochs_s) for run in runs)


def ranking(runs: Sequence[Run]) -> dict[str, Any]:
    """Runs of one question; repeated ones by their median."""
    found = {same[0].strategy: (median(run.told["step"]["predicted_s"] for run in same), median(run.measured_s for run in same))
             for same in _by(runs, lambda run: run.strategy)}  # fmt: skip
    choice, fastest = (min(found, key=lambda name, at=at: found[name][at]) for at in (0, 1))  # type: ignore[misc]
    regret = found[choice][1] / found[fastest][1] - 1
    told, seen = zip(*found.values(), strict=True)
    tau = float(kendalltau(told, seen).statistic) if min(len(set(told)), len(set(seen))) > 1 else None  # alike: there is no order
    return {"question": runs[0].name, "strategies": len(found), "choice": choice, "fastest": fastest, "regret": regret, "tau": tau,
            "right": choice == fastest, "within_noise": regret <= 2 * noise(runs)}  # fmt: skip


def _all(rankings: Sequence[dict[str, Any]]) -> dict[str, float | None] | None:
    """Of all questions together; None of none."""
    if not rankings:
        return None
    taus = [one["tau"] for one in rankings if one["tau"] is not None]
    return {"questions": len(rankings), "tau": mean(taus) if taus else None, "regret": mean(one["regret"] for one in rankings),
            "worst_regret": max(one["regret"] for one in rankings),
            "right": mean(one["right"] or one["within_noise"] for one in rankings)}  # fmt: skip


def doubt(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Constants by how much of all epochs' time they explain away: measured over predicted seconds, and the share of the measured epochs
    that this is off by."""
    kinds: dict[str, list[float]] = {}
    for run in runs:
        for row in run.told["operations"]:
            if row["predicted_s"] is not None:
                moves = row["operation"].split(":")[0] in TRANSFERS
                kind = ("between" if run.servers > 1 else "inside") if moves else "computation"
                told = kinds.setdefault(kind, [0.0, 0.0])
                told[0] += row["predicted_s"]
                told[1] += row["measured_s"]
    total = sum(run.measured_s for run in runs)
    found = [{"constant": kind, "slower": seen / said if said else None, "share": (seen - said) / total}
             for kind, (said, seen) in kinds.items()]  # fmt: skip
    return sorted(found, key=lambda one: -abs(one["share"]))


# -- refit ---------------------------------------------------------------------------------------------------------------

CONSTANTS: dict[str, Callable[[Cluster, float], Cluster]] = {
    "computation": scaled.device,
    "inside": lambda cluster, factor: scaled.messages(cluster, factor, "intra_node"),
    "between": lambda cluster, factor: scaled.messages(cluster, factor, "inter_node") if cluster.inter_node else cluster,
}


def predicted_s(run: Run, factors: dict[str, float]) -> float:
    """The epoch with these constants that many times as fast [s]."""
    assert run.planned
    job, strategy = run.planned
    return float(strategy.predict(replace(job, cluster=_faster(job.cluster, factors))).epoch_s)


def _faster(cluster: Cluster, factors: dict[str, float]) -> Cluster:
    for name, factor in factors.items():
        cluster = CONSTANTS[name](cluster, factor)
    return cluster


def refit(runs: Sequence[Run]) -> tuple[Cluster, dict[str, Any]]:
    """The runs' cluster with constants fitted to every other question's runs, and how both score on the others. Raises SpecError."""
    clusters = {run.planned.job.cluster.model_copy(update={"servers": 1, "gpus_per_server": 1}).model_dump_json(): run.planned.job.cluster
                for run in runs if run.planned}  # fmt: skip
    if len(clusters) > 1:
        raise SpecError(f"--refit needs runs planned on one cluster file, and these were on {len(clusters)}; refit them one by one")
    questions = _by(runs, lambda run: run.question)
    if len(questions) < 2:  # then by runs
        questions = [[run] for run in runs]
    known, held = ([run for some in questions[at::2] for run in some] for at in (0, 1))
    if not held:
        raise SpecError("--refit needs at least 2 runs: some to fit, the others to score")
    names = [name for name in CONSTANTS if name != "between" or any(run.servers > 1 for run in known)]

    def misses(logs: np.ndarray) -> np.ndarray:
        factors = dict(zip(names, np.exp(logs).tolist(), strict=True))
        return np.array([*(np.log(predicted_s(run, factors) / run.measured_s) for run in known), *(DOUBT * logs)])

    logs = least_squares(misses, np.zeros(len(names)), bounds=(-np.log(WIDEST), np.log(WIDEST)), diff_step=1e-3).x
    factors = dict(zip(names, np.exp(logs).tolist(), strict=True))
    cluster = _faster(next(iter(clusters.values())), factors)
    source = f"refit on {len(known)} runs: " + ", ".join(f"{name} x {factor:.3f}" for name, factor in factors.items())
    told = {key: f"{source}; {before}" for key, before in cluster.provenance.items() if not key.startswith("cores")}
    report = {
        "factors": factors, "fitted": [run.folder for run in known], "scored": [run.folder for run in held],
        "before": errors((predicted_s(run, {}), run.measured_s) for run in held),
        "after": errors((predicted_s(run, factors), run.measured_s) for run in held),
    }  # fmt: skip
    return cluster.model_copy(update={"provenance": {**cluster.provenance, **told}}), report


def same_shape(cluster: Cluster, as_in: Cluster) -> Cluster:
    """Other constants for a run's question: the file's numbers, the run's servers and GPUs. Raises SpecError."""
    if cluster.inter_node is None and as_in.servers > 1:
        raise SpecError(f"the run had {as_in.servers} servers, and cluster {cluster.name} has no inter_node link; give one")
    return cluster.model_copy(update={"servers": as_in.servers, "gpus_per_server": as_in.gpus_per_server})
