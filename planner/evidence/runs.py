"""Finished runs: their files, and the comparison of many runs with their predictions."""

from __future__ import annotations

import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path
from shlex import quote
from statistics import mean, median
from typing import Annotated, Any, Required

import numpy as np
from pydantic import Field, Strict, TypeAdapter, ValidationError
from typing_extensions import TypedDict  # pydantic reads typing's from Python 3.12 on

from gnnplan.planner.cluster import scaling as scaled
from gnnplan.planner.cluster.spec import Cluster
from gnnplan.planner.decision import plan as plans
from gnnplan.planner.decision.candidate import Candidate
from gnnplan.planner.decision.objective import Epochs, Objective, Target, Training
from gnnplan.planner.gnn.workload import FALLING, Workload, scores_of
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.planner.vocabulary.files import (
    Json,
    from_json,
    must_be_readable,
    numbered,
    read_bytes,
    read_json,
)
from gnnplan.planner.vocabulary.numbers import grouped
from gnnplan.planner.vocabulary.progress import say
from gnnplan.planner.vocabulary.trace import LONGEST
from gnnplan.planner.vocabulary.units import show_count, show_percent

# -- files of a run --------------------------------------------------------------------------------


MAX_METRICS, MAX_RANK = 1 << 27, 1 << 26  # [B]
WARM_UP = 2  # first epochs, which are not compared: they allocate memory and fill caches
_RANK_FILE = re.compile(r"rank(\d+)\.json")
Count = Annotated[int, Strict(), Field(ge=0)]
Number = Annotated[float, Strict()]
Size = Annotated[Number, Field(ge=0, allow_inf_nan=False)]


class _Part(TypedDict):
    """A part of a run that another plan trained."""

    until: Count  # last epoch of the part
    ranks: Count
    strategy: str


class _Rank(TypedDict, total=False):
    """The fields of a rank*.json that are read; runs of older versions lack the optional ones."""

    bytes: Required[dict[str, Count]]
    setup_bytes: Required[dict[str, Count]]
    peak_rss_bytes: Required[Count]
    peak_bytes: Required[Count | None]
    rows: dict[str, Count]
    epochs: Count  # without those that another plan trained
    before: list[_Part]
    # (|used - exact|, |exact|) per step; older versions add PipeGCN's bound of the first number
    gradient_errors: dict[
        str,
        Annotated[list[tuple[Size, Size] | tuple[Size, Size, Size | None]], Field(min_length=1)],
    ]


class _Epoch(TypedDict):
    """The fields of a line of metrics.jsonl that are read."""

    epoch: Number
    loss: Number
    epoch_s: Annotated[Number, Field(gt=0, lt=LONGEST)]


_RANK, _EPOCH = TypeAdapter(_Rank), TypeAdapter(_Epoch)


def read_run(directory: Path) -> tuple[list[Json], list[Json]]:
    """Read the lines of metrics.jsonl and the rank*.json of a finished run. Raises SpecError."""
    make = f"make one with `gnnplan run plan.json --out {quote(str(directory))}`"
    try:
        path = directory / "metrics.jsonl"
        metrics = epochs_in(path, make)
        files = numbered(directory, _RANK_FILE).values()
        ranks = [read_json(path, MAX_RANK, make) for path in files]
    except SpecError as error:
        raise SpecError(f"{directory} is not a finished run ({error})") from error
    if not metrics or not ranks:
        missing = "rank*.json" if metrics else "epoch in metrics.jsonl"
        raise SpecError(f"{directory} is not a finished run (no {missing}); {make}")
    for row in metrics:
        if not _is(_EPOCH, row):
            raise SpecError(
                f"{directory}/metrics.jsonl: every line needs numbers epoch, loss and epoch_s"
                f" (above 0), found {str(row)[:100]}; {make}"
            )
    for rank in ranks:
        if not _is(_RANK, rank) or trained_before([rank]) >= len(metrics):
            raise SpecError(
                f"{directory}: a rank*.json needs bytes and setup_bytes by operation,"
                f" peak_rss_bytes and peak_bytes; {make}"
            )
        epochs = len(metrics) - trained_before([rank])
        if (counted := rank.get("epochs", epochs)) != epochs:
            raise SpecError(
                f"{directory}/metrics.jsonl has {epochs:,} epochs of this plan, and a rank*.json"
                f" counted {counted:,}; put it back, or train again from a checkpoint (`gnnplan run"
                f" --resume {quote(str(directory))}`)"
            )
    return metrics, ranks


def warm_epochs(metrics: Sequence[Mapping[str, Any]]) -> list[float]:
    """Return the seconds of the epochs that are comparable with predictions [s].

    Warm-up epochs are left out. If steps were replayed as a CUDA graph in some epochs, only these
    epochs count, without the first of them, which captures the graph.
    """
    warm = metrics[min(WARM_UP, len(metrics) - 1) :]
    replayed = [row for row in warm if row.get("replayed")][1:]
    return [float(row["epoch_s"]) for row in replayed or warm]


def trained_before(ranks: Sequence[Mapping[str, Any]]) -> int:
    """Return the number of epochs of a run that earlier plans trained."""
    before = ranks[0].get("before", [])
    return int(before[-1]["until"]) if before else 0


def must_be_of_one_plan(directory: Path, ranks: Sequence[Mapping[str, Any]]) -> None:
    """Raise SpecError if several plans trained a run."""
    if not trained_before(ranks):
        return
    parts = ", ".join(
        f"{part['strategy']} on {show_count(part['ranks'], 'rank')} until epoch {part['until']}"
        for part in ranks[0]["before"]
    )
    raise SpecError(
        f"{directory} was trained with several plans ({parts}, then that of its plan.json), and a"
        " run is compared with one; train some epochs with that alone (`gnnplan run"
        f" {directory}/plan.json --epochs 10`)"
    )


def epochs_in(path: Path, make: str) -> list[Any]:
    """Parse metrics.jsonl, a line per epoch; a note says if an incomplete last line is left out.

    Raises SpecError."""
    raw = read_bytes(path, MAX_METRICS, make)
    *whole, last = raw.split(b"\n")
    must_be_readable(path, raw, make)
    rows = [from_json(path, line, make) for line in whole]
    if last:
        try:
            rows.append(from_json(path, last, make))
        except SpecError:
            say(f"note: {path}: its last line is cut off; it is read without that")
    return rows


def _is(kind: TypeAdapter[Any], document: object) -> bool:
    try:
        kind.validate_python(document)
    except ValidationError:
        return False
    return True


def gradient_error(ranks: Sequence[Json]) -> dict[str, float] | None:
    """Return the relative error of the last step's gradient.

    None if the run has not measured it (`gnnplan run --gradient-errors`).
    """
    # the errors are equal on all ranks
    for error, size, *_ in ranks[0].get("gradient_errors", {}).get("all", [])[-1:]:
        if size:
            return {"error": error / size}
    return None


def summed(ranks: Iterable[Mapping[str, Any]], field: str) -> Counter[str]:
    """Return the sums over all ranks of a field's counts, by name; empty if no rank has the field.

    bytes, setup_bytes: bytes sent, by operation [B]. rows: feature rows that were read, by the
    place where they were stored, as 'hit' (in the cache), 'peer' and 'host'
    (planner/strategies/minibatch/feature_store.py)."""
    counts = Counter[str]()
    for rank in ranks:
        counts.update(rank.get(field, {}))
    return counts


def show_rows(rows: dict[str, int]) -> str:
    """Format the shares of the rows; places without rows are left out.

    >>> show_rows({"hit": 30, "peer": 0, "host": 70})
    'hit 30 %, host 70 %'
    """
    total = sum(rows.values())
    return ", ".join(
        f"{place} {show_percent(count / total)}" for place, count in rows.items() if count
    )


# -- accuracies ------------------------------------------------------------------------------------

# The validation accuracy over epochs is the evidence for a target accuracy (decision/objective.py).

MAKE = "make one with `gnnplan run plan.json --out runs/one`"
PLAN, METRICS = "plan.json", "metrics.jsonl"  # files in a run's folder
_EARLIER_PLAN = re.compile(r"plan\.until(\d+)\.json")  # a plan that trained the run until an epoch


def objective_of(document: Json) -> Objective:
    """Return the objective of a plan; the runs that are its evidence are read again.

    Raises SpecError if a run is missing, and Mismatch if another version made a run's plan.
    """
    of, accuracy = document.get("objective", "time"), document.get("target_accuracy")
    if "epochs" in document:
        epochs = {mode: Epochs(**of_mode) for mode, of_mode in document["epochs"].items()}
        return Objective(of, epochs_by_mode=epochs)
    if accuracy is None:
        return Objective(of)
    return Objective(of, Target(accuracy, trainings(document["evidence"])))


def trainings(paths: Iterable[str | os.PathLike[str]]) -> list[Training]:
    """Read the runs, finished or not, that evaluated an accuracy.

    paths: folders of runs, or folders that contain folders of runs. Raises SpecError if a folder
    has no run, or a run cannot be read, and Mismatch if another version made a run's plan.
    """
    folders = [folder for path in paths for folder in _runs(Path(path))]
    read = [_training(folder) for folder in dict.fromkeys(folders)]
    return [training for training in read if training.accuracies]


def _runs(path: Path) -> list[Path]:
    """Return the folder itself if it is a run's, else the runs' folders in it."""
    if _is_run(path):
        return [path]
    found = sorted(folder for folder in path.iterdir() if _is_run(folder)) if path.is_dir() else []
    if not found:
        raise SpecError(
            f"--evidence {path}: neither a run's folder (with {PLAN} and {METRICS}) nor a folder"
            f" that holds one; {MAKE}"
        )
    return found


def _is_run(folder: Path) -> bool:
    return all((folder / name).is_file() for name in (PLAN, METRICS))


def _training(folder: Path) -> Training:
    """Read a run's folder; only the epochs that its first plan trained count."""
    path, earlier = folder / METRICS, numbered(folder, _EARLIER_PLAN).items()
    epochs, plan = next(iter(earlier), (None, folder / PLAN))  # no earlier plan: all epochs count
    document = plans.read(plan)
    return Training(
        str(folder),
        document["graph"]["hash"],
        Workload.model_validate(document["workload"]),
        plans.chosen(document),
        len(plans.placement(document)),
        tuple(_accuracies(path, epochs_in(path, MAKE)[:epochs])),
    )


def _accuracies(path: Path, rows: list[Any]) -> Iterator[tuple[int, float]]:
    """Yield (epoch, validation score) of the epochs that were evaluated. Raises SpecError."""
    last = 0
    for row in rows:
        epoch = row.get("epoch") if isinstance(row, dict) else None
        if type(epoch) is not int or epoch <= last:
            raise SpecError(
                f"{path}: every line needs an epoch that counts up from 1, found {str(row)[:100]};"
                f" {MAKE}"
            )
        last = epoch
        for name in scores_of(row):
            if name.startswith("val_") and isinstance(accuracy := row[name], float):
                if name.removeprefix("val_") in FALLING:
                    raise SpecError(
                        f"{path}: {name} falls in training, and --target-accuracy is what a score"
                        " rises to; leave this run out"
                    )
                yield epoch, accuracy


# -- comparison of many runs -----------------------------------------------------------------------

# `summarise` builds the document of `gnnplan validate` over several runs: errors by operation,
# rankings of strategies, and the constants with the largest errors. Runs of several strategies on
# the same graph, workload and cluster answer one *question*, and form a ranking. The *regret* of a
# ranking is the measured epoch of the strategy that was predicted to be fastest, divided by that of
# the fastest strategy, minus one. Kendall's tau compares the predicted order with the measured
# order.
#
# `refit_cluster` fits factors to some questions, and scores them on the other questions.
# validate.py compares one run.


# Weight of the prior in a refit: a factor of e on a constant costs as much as an error of 10 % on
# an epoch, so a constant on which no run depends does not change.
PRIOR_WEIGHT = 0.1
LARGEST_FACTOR = 10.0  # bound of a refitted factor; larger errors have other causes


@dataclass(frozen=True)
class Compared:
    """A run with the comparison to its prediction."""

    folder: str
    question: str  # key of `question_of`: runs with equal keys can be ranked
    name: str  # name of the question (`question_name`)
    servers: int
    strategy: str
    comparison: Json  # result of `validate.compare`
    epochs_s: tuple[float, ...]  # measured epochs without warm-up [s]

    @property
    def measured_s(self) -> float:
        """Median of the measured epochs [s]."""
        return float(self.comparison["step"]["measured_s"])


@dataclass(frozen=True)
class Run(Compared):
    """A run with its plan, so that it can be predicted again."""

    planned: Candidate

    @classmethod
    def of(cls, folder: str, planned: Candidate, comparison: Json, metrics: Sequence[Json]) -> Run:
        """Create a run from its comparison and the lines of metrics.jsonl (one per epoch)."""
        problem, strategy = planned.problem, str(planned.strategy)
        asked = question_of(problem), question_name(problem), problem.cluster.servers
        return cls(folder, *asked, strategy, comparison, tuple(warm_epochs(metrics)), planned)


def question_of(problem: Problem) -> str:
    """Return a key that is equal for problems with the same graph, workload, cluster, partitioner.

    Strategies of runs with the same key can be ranked."""
    cluster = problem.cluster.model_dump_json(exclude={"provenance"})
    return f"{problem.stats.hash} {problem.workload.model_dump_json()} {cluster} {problem.method}"


def question_name(problem: Problem) -> str:
    """Name graph, model and cluster, as 'reddit sage 3x256, 2x4 at 400 Mbit/s'."""
    cluster, workload = problem.cluster, problem.workload
    link = ""
    if cluster.servers > 1 and cluster.inter_node:
        link = f" at {cluster.inter_node.bandwidth * 8 / 1e6:.3g} Mbit/s"
    graph = problem.stats.name.split("?")[0]
    model = f"{workload.model} {workload.layers}x{workload.hidden}"
    return f"{graph} {model}, {cluster.servers}x{cluster.gpus_per_server}{link}"


def errors(pairs: Iterable[tuple[float | None, float]]) -> dict[str, float] | None:
    """Return the number, mean, 95th percentile and maximum of abs(predicted / measured - 1).

    pairs: (predicted, measured). Pairs without a prediction are left out; None if none is left.

    >>> errors([(1.5, 1.0), (None, 1.0)])
    {'n': 1, 'mean': 0.5, 'p95': 0.5, 'max': 0.5}
    """
    found = [abs(a / b - 1) for a, b in pairs if a is not None and b > 0]
    if not found:
        return None
    p95 = float(np.quantile(found, 0.95))
    return {"n": len(found), "mean": mean(found), "p95": p95, "max": max(found)}


def summarise(runs: Sequence[Compared]) -> Json:
    """Return the document of `gnnplan validate` over several runs."""
    rows = (row for run in runs for row in run.comparison["operations"])
    by_operation: dict[str, list[Json]] = grouped(rows, itemgetter("operation"))
    rankings = [
        ranking(same)
        for same in grouped(runs, lambda run: run.question).values()
        if len({run.strategy for run in same}) > 1
    ]
    measured_s = sum(run.measured_s for run in runs)
    # other runs have measured the memory of the whole process only
    memory = [run.comparison["memory"] for run in runs if run.comparison["memory"]["of"] == "data"]
    return {
        "runs": len(runs),
        "other_device": [
            run.folder for run in runs if not run.comparison.get("device", {"equal": True})["equal"]
        ],
        "step": _errors_by_source([run.comparison["step"] for run in runs]),
        "operations": {
            operation: {
                **_errors_by_source(rows),
                "share": sum(row["measured_s"] for row in rows) / measured_s,
            }
            for operation, rows in by_operation.items()
        },
        "memory": errors((use["predicted_bytes"], use["measured_bytes"]) for use in memory),
        "bytes_equal": sum(run.comparison["bytes"]["equal"] for run in runs),
        "order_equal": sum(run.comparison["order"]["equal"] for run in runs),
        "noise": noise(runs),
        "rankings": rankings,
        "ranking": _all_rankings(rankings),
        "doubt": doubt(runs),
    }


def _errors_by_source(rows: Sequence[Json]) -> dict[str, dict[str, float] | None]:
    return {
        source: errors((row[f"{source}_s"], row["measured_s"]) for row in rows)
        for source in ("predicted", "simulated")
    }


# -- rankings --------------------------------------------------------------------------------------


def noise(runs: Sequence[Compared]) -> float:
    """Return the typical variation of the median epoch between equal runs, as a share of it.

    With repeated runs, it is the median of their standard deviation / mean; without, the median of
    `median_error`.
    """
    repeated = [
        [run.measured_s for run in same]
        for same in grouped(runs, lambda run: (run.question, run.strategy)).values()
        if len(same) > 1
    ]
    if repeated:
        return median(float(np.std(same, ddof=1)) / mean(same) for same in repeated)

    return median(median_error(run.epochs_s) for run in runs)


def median_error(epochs_s: Sequence[float]) -> float:
    """Return the standard error of the median of a run's epochs, as a share of the median.

    It is 1.25 standard errors of the mean; the standard deviation is estimated as the interquartile
    range / 1.35.
    """
    low, high = np.quantile(epochs_s, (0.25, 0.75))
    deviation = (high - low) / 1.35
    return float(1.25 * deviation / np.sqrt(len(epochs_s)) / median(epochs_s))


def ranking(runs: Sequence[Compared]) -> Json:
    """Compare the predicted with the measured order of one question's strategies.

    A strategy with several runs counts with its medians. `tau` is None if all predictions, or all
    measurements, are equal.
    """
    predicted, measured = (
        {
            same[0].strategy: median(run.comparison["step"][seconds] for run in same)
            for same in grouped(runs, lambda run: run.strategy).values()
        }
        for seconds in ("predicted_s", "measured_s")
    )
    choice = min(predicted, key=predicted.__getitem__)
    fastest = min(measured, key=measured.__getitem__)
    regret = measured[choice] / measured[fastest] - 1
    tau = None
    if min(len(set(predicted.values())), len(set(measured.values()))) > 1:
        from scipy.stats import kendalltau  # here: it takes a second, and simulate does not rank

        tau = float(kendalltau(list(predicted.values()), list(measured.values())).statistic)
    return {
        "question": runs[0].name,
        "strategies": len(measured),
        "choice": choice,
        "fastest": fastest,
        "regret": regret,
        "tau": tau,
        "right": choice == fastest,
        "within_noise": regret <= 2 * noise(runs),
    }


def _all_rankings(rankings: Sequence[Json]) -> dict[str, float | None] | None:
    """Return the means over all rankings; None without any."""
    if not rankings:
        return None
    taus = [each["tau"] for each in rankings if each["tau"] is not None]
    return {
        "questions": len(rankings),
        "tau": mean(taus) if taus else None,
        "regret": mean(each["regret"] for each in rankings),
        "worst_regret": max(each["regret"] for each in rankings),
        "right": mean(each["right"] or each["within_noise"] for each in rankings),
    }


def doubt(runs: Sequence[Compared]) -> list[Json]:
    """Return the kinds of constants by their share in the errors of epochs, the largest first.

    A kind is 'computation', or the links 'inside' or 'between' servers. `slower` is measured /
    predicted seconds of the operations that depend on the kind (None: nothing was predicted), and
    `share` is measured - predicted seconds over the sum of all measured epochs.
    """
    predicted_s, measured_s = defaultdict[str, float](float), defaultdict[str, float](float)
    for run in runs:
        link = "between" if run.servers > 1 else "inside"
        sent = run.comparison["bytes"]["predicted"]  # by operation
        for row in run.comparison["operations"]:
            if row["predicted_s"] is not None:
                kind = link if row["operation"].split(":")[0] in sent else "computation"
                predicted_s[kind] += row["predicted_s"]
                measured_s[kind] += row["measured_s"]
    total_s = sum(run.measured_s for run in runs)
    found = [
        {
            "constant": kind,
            "slower": measured_s[kind] / predicted_s[kind] if predicted_s[kind] else None,
            "share": (measured_s[kind] - predicted_s[kind]) / total_s,
        }
        for kind in predicted_s
    ]
    return sorted(found, key=lambda each: -abs(each["share"]))


# -- refit -----------------------------------------------------------------------------------------

# Kind of constants -> function that makes them faster by a factor in a cluster
SPEEDS: dict[str, Callable[[Cluster, float], Cluster]] = {
    "computation": scaled.device,
    "inside": lambda cluster, factor: scaled.messages(cluster, factor, "intra_node"),
    "between": lambda cluster, factor: (
        scaled.messages(cluster, factor, "inter_node") if cluster.inter_node else cluster
    ),
}


def predicted_s(run: Run, factors: dict[str, float]) -> float:
    """Predict the run's epoch on its cluster with SPEEDS multiplied by `factors` [s]."""
    problem = run.planned.problem
    faster = replace(problem, cluster=_faster(problem.cluster, factors))
    return float(run.planned.strategy.predict(faster).epoch_s)


def _faster(cluster: Cluster, factors: dict[str, float]) -> Cluster:
    for name, factor in factors.items():
        cluster = SPEEDS[name](cluster, factor)
    return cluster


def refit_cluster(runs: Sequence[Run]) -> tuple[Cluster, Json]:
    """Return the runs' cluster with its SPEEDS fitted to half of the questions, and a report.

    The report has the factors, and the errors before and after on the runs that were not fitted.
    The fit minimises the squares of log(predicted / measured) of each run, and of PRIOR_WEIGHT
    log(factor) of each speed. Raises SpecError if there are too few runs, or several cluster files.
    """
    cluster = _only_cluster(runs)
    questions = list(grouped(runs, lambda run: run.question).values())
    if len(questions) < 2:
        questions = [[run] for run in runs]
    fitted = [run for same in questions[0::2] for run in same]
    scored = [run for same in questions[1::2] for run in same]
    if not scored:
        raise SpecError("--refit needs at least 2 runs: some to fit, the others to score")
    factors = _fitted_factors(fitted)
    source = f"refit on {len(fitted)} runs: " + ", ".join(
        f"{name} x {factor:.3f}" for name, factor in factors.items()
    )
    provenance = {
        field: before if field.startswith("cores") else f"{source}; {before}"
        for field, before in cluster.provenance.items()
    }
    report = {
        "factors": factors,
        "fitted": [run.folder for run in fitted],
        "scored": [run.folder for run in scored],
        "before": errors((predicted_s(run, {}), run.measured_s) for run in scored),
        "after": errors((predicted_s(run, factors), run.measured_s) for run in scored),
    }
    return _faster(cluster, factors).model_copy(update={"provenance": provenance}), report


def _only_cluster(runs: Sequence[Run]) -> Cluster:
    """Return the cluster of all runs, which may differ in servers and GPUs. Raises SpecError."""
    clusters = {
        run.planned.problem.cluster.model_copy(
            update={"servers": 1, "gpus_per_server": 1}
        ).model_dump_json(): run.planned.problem.cluster
        for run in runs
    }
    if len(clusters) > 1:
        raise SpecError(
            f"--refit needs runs planned on one cluster file, and these were on {len(clusters)};"
            " refit them one by one"
        )
    return next(iter(clusters.values()))


def _fitted_factors(runs: Sequence[Run]) -> dict[str, float]:
    """Fit a factor for each of SPEEDS that the runs depend on."""
    several_servers = any(run.servers > 1 for run in runs)
    names = [name for name in SPEEDS if name != "between" or several_servers]

    def misses(factors: dict[str, float]) -> list[float]:
        return [np.log(predicted_s(run, factors) / run.measured_s) for run in runs]

    return scaled.fitted(names, misses, PRIOR_WEIGHT, LARGEST_FACTOR)


def same_shape(cluster: Cluster, as_in: Cluster) -> Cluster:
    """Return `cluster` with the numbers of servers and GPUs of `as_in`. Raises SpecError."""
    if cluster.inter_node is None and as_in.servers > 1:
        raise SpecError(
            f"the run had {as_in.servers} servers, and cluster {cluster.name} has no inter_node"
            " link; give one"
        )
    return cluster.shaped(as_in.servers, as_in.gpus_per_server)
