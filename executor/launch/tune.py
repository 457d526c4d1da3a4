"""`gnnplan tune`: runs of the few strategies that are within doubt, and the plan they lead to.

`prospect` selects the strategies and the budget. `tune` runs them by successive halving
(planner/evidence/halving.py), refits the cluster's constants, and makes the plan.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, replace
from itertools import count
from math import ceil, expm1, isfinite
from pathlib import Path
from statistics import median

from gnnplan.executor.launch.launcher import TimeIsUp, begin
from gnnplan.executor.launch.preflight import must_start
from gnnplan.executor.launch.run_request import MOST as MOST_EPOCHS
from gnnplan.executor.launch.run_request import Options, RunRequest, must_be_trainable
from gnnplan.executor.ranks.machine import gpus
from gnnplan.planner.cluster.spec import Cluster
from gnnplan.planner.decision import plan as plans
from gnnplan.planner.decision.candidate import LEAST_CHANCE, Candidate, evaluate
from gnnplan.planner.decision.search import Search, SearchResult
from gnnplan.planner.evidence.halving import (
    WARM_UP,
    Contender,
    Reading,
    Result,
    difference,
    halve,
    least_s,
)
from gnnplan.planner.evidence.runs import Run, objective_of, refit_cluster
from gnnplan.planner.gnn.workload import Workload
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.vocabulary.errors import GnnplanError, LostRank, SpecError
from gnnplan.planner.vocabulary.files import Json
from gnnplan.planner.vocabulary.progress import notify, say
from gnnplan.planner.vocabulary.units import show_count, show_percent, show_time

MOST = 4  # strategies that run
SHARE = 0.1  # share of the predicted training time that tuning may cost


@dataclass(frozen=True)
class Prospect:
    """The plan of a tuning: run `candidates` for `budget_s` seconds at most.

    candidates: the recommended candidate first. why_not: the reason not to run any; else empty.
    """

    candidates: list[Candidate]
    budget_s: float
    budget_epochs: float  # the budget in predicted epochs of the recommended strategy
    why_not: str

    def __str__(self) -> str:
        if self.why_not:
            return f"not tuned: {self.why_not}"
        names = ", ".join(str(candidate.strategy) for candidate in self.candidates)
        return (
            f"tuning takes at most {show_time(self.budget_s)}, as long as"
            f" {self.budget_epochs:.3g} epochs are predicted to take; to run: {names}"
        )


def asked(document: Json) -> SearchResult:
    """Search again for a plan's question, on all GPUs of its cluster and with all evidence of now.

    Raises SpecError.
    """
    objective = objective_of(document)
    problem = plans.question(document).placed(())
    must_be_trainable(problem)
    alternatives = document.get("alternatives", [])
    forced = None if alternatives or document.get("rejected") else plans.chosen(document)
    fewer = any(a.get("gpus", 0) < problem.cluster.ranks for a in [document["best"], *alternatives])
    return Search(plans.is_exact(document), forced, fewer, objective)(problem)


def prospect(found: SearchResult, share: float = SHARE, epochs: int | None = None) -> Prospect:
    """Select the strategies whose predictions are within doubt, and compute the budget.

    The budget is `share` of the predicted seconds of `epochs` epochs (default: the workload's).
    Raises SpecError.
    """
    if not 0 < share <= 1:
        raise SpecError(f"--share {share:g}: a share of the training, above 0 and at most 1")
    best, epochs = found.best, found.problem.workload.epochs if epochs is None else epochs
    if not 1 <= epochs <= MOST_EPOCHS:
        raise SpecError(
            f"--epochs {epochs:,}: a training has 1 to {MOST_EPOCHS:,} epochs; ask for fewer"
        )
    epoch_s = best.epoch_s
    budget_s = share * epochs * epoch_s
    others = [c for c in found.others if c.chance_faster(best) >= LEAST_CHANCE]
    # the fastest strategy of the other kind, exact or lossy, is always included
    rival = next((c for c in others if c.strategy.exact != best.strategy.exact), None)
    others.sort(key=lambda candidate: candidate is not rival)
    within = [best, *others][:MOST]
    contenders = [_contender(candidate) for candidate in within]
    least = [least_s(contenders[:n]) for n in range(2, len(within) + 1)]  # rises
    affordable = 1 + sum(needed_s <= budget_s for needed_s in least)
    why_not = ""
    if found.forced:
        why_not = "nothing else was compared, since --strategy names one"
    elif len(within) == 1:
        why_not = (
            f"no other strategy is faster with a chance of {show_percent(LEAST_CHANCE)} or more"
        )
    elif affordable == 1:
        needed = ceil(least[0] / share / epoch_s)
        why_not = (
            f"training is too short: {show_percent(share)} of {show_count(epochs, 'epoch')} are"
            f" {show_time(budget_s)}, and two strategies need {show_time(least[0])}; it pays from"
            f" {needed:,} epochs on (--epochs), or with a larger --share"
        )
    return Prospect(within[:affordable], budget_s, share * epochs, why_not)


def _contender(candidate: Candidate) -> Contender:
    name, used = str(candidate.strategy), candidate.problem.ranks
    if used < candidate.problem.cluster.ranks:
        name += f" on {used}"
    epoch_s = candidate.epoch_s
    return Contender(name, candidate.is_comparable, epoch_s, candidate.value / epoch_s)


def tune(
    found: SearchResult,
    out: Path,
    share: float = SHARE,
    epochs: int | None = None,
    emulate: float = 0.0,
) -> Json:
    """Run the candidates of `prospect`, and return the plan; the runs' folders are in `out`.

    Its field `tuned` has the measurements, their cost and the refit. Without candidates to run, the
    plan is that of the search, and `tuned` has the reason. Raises SpecError, and LostRank if every
    candidate failed.
    """
    trial = prospect(found, share, epochs)
    budget = {"share": share, "budget_s": trial.budget_s, "budget_epochs": trial.budget_epochs}
    if trial.why_not:
        document = plans.make(found)
        document["summary"]["tuned"] = str(trial)
        return {**document, "tuned": {**budget, "why": trial.why_not, "strategies": []}}
    runs = RunRequest(
        plans.runnable_part(found),
        out,
        Options(checkpoint_every=0),
        emulate=emulate,
        loaded=found.best.problem,
    )
    must_start(runs)
    must_be_this_machine(found.problem, emulate)
    say(str(trial))
    if out.exists() and any(out.iterdir()):
        raise SpecError(f"{out} is not empty; give another --out, or remove it")
    contenders = [_contender(candidate) for candidate in trial.candidates]
    numbers, finished = count(1), list[Run]()

    def turn(index: int, epochs: int, most_s: float) -> Reading:
        """Run a candidate in a folder of its own: 01-graph_parallel, 02-pipegcn. The folder of an
        unfinished run is hidden (.02-pipegcn), so that `gnnplan validate DIR/*` finds finished runs
        only."""
        candidate, start_s = trial.candidates[index], time.monotonic()
        detail = f"{show_count(epochs, 'epoch')}, at most {show_time(most_s)}"
        notify(f"a turn of {candidate.strategy}", detail)
        folder = out / f"{next(numbers):02}-{candidate.strategy.name}"
        how = Search(found.how.exact, candidate.strategy)
        document = plans.runnable_part(SearchResult(candidate.problem, [candidate], how=how))
        rows, failed, is_whole = train_briefly(document, folder, WARM_UP + epochs, most_s, emulate)
        epochs_s = tuple(float(row["epoch_s"]) for row in rows[WARM_UP:])
        if is_whole:
            step = {"predicted_s": candidate.epoch_s, "measured_s": median(epochs_s)}
            finished.append(Run.of(str(folder), candidate, {"step": step}, rows))
        else:
            hidden = folder.with_name(f".{folder.name}")
            folder.rename(hidden)
            failed = failed.replace(str(folder), str(hidden))
        return Reading(() if failed else epochs_s, time.monotonic() - start_s, failed)

    result = halve(contenders, turn, trial.budget_s)
    if result is None:
        words = "\n".join(f"{contender.name}: {contender.failed}" for contender in contenders)
        raise LostRank(f"none of the strategies ran to its end:\n{words}")
    cluster, refit = refitted(found.problem.cluster, finished)
    best = trial.candidates[contenders.index(result.best)]
    found = on_cluster(found, best, cluster)
    document = plans.make(found)
    why = result.why(found.objective)
    words = f"{why}; {show_time(result.spent_s)} of {show_time(trial.budget_s)} spent"
    document["summary"] |= {"close": _close(result), "tuned": words}
    document["explanation"].insert(1, words)
    document["tuned"] = {
        **budget,
        "spent_s": result.spent_s,
        "certain": result.is_certain,
        "why": why,
        "strategies": [
            _evidence(one, trial.candidates[contenders.index(one)], result) for one in result.order
        ],
        "refit": refit,
    }
    return document


def must_be_this_machine(problem: Problem, emulate: float) -> None:
    """Raise SpecError if seconds measured on this machine do not apply to the plan's cluster."""
    servers, kind = len(set(problem.servers)), problem.cluster.device.kind
    if servers > 1 and not emulate:
        raise SpecError(
            f"the plan is for {servers} servers, and tune runs on this machine alone; give"
            " --emulate RATE to emulate them here, or run the plan's strategies there with torchrun"
            " and compare them by `gnnplan validate DIR...`"
        )
    found, each = gpus(), problem.cluster.gpus_per_server
    if kind == "cuda" and found < each:
        raise SpecError(
            f"the plan is for {show_count(each, 'GPU')} per server, and this machine has {found};"
            " make a plan for this machine with gnnplan plan --cluster local"
        )
    if kind == "cpu" and found:
        raise SpecError(
            "the plan is for CPU ranks, and runs on this machine would use its GPUs; set"
            " CUDA_VISIBLE_DEVICES= to tune for the CPU"
        )


def train_briefly(
    document: Json, folder: Path, epochs: int, most_s: float, emulate: float = 0.0
) -> tuple[list[Json], str, bool]:
    """Run a plan's first epochs; return their metrics, the reason of a failure or '', and whether
    all epochs have run within `most_s` seconds.

    A learning-rate schedule that ends on time has the plan's number of epochs, and no more.
    """
    workload, failed, is_whole = Workload.model_validate(document["workload"]), "", False
    epochs = min(epochs, workload.epochs) if workload.ends_on_time else epochs
    options = Options(epochs=epochs, eval_every=0, checkpoint_every=0, quiet=True)
    try:
        begin(RunRequest(document, folder, options, emulate=emulate), most_s)
        is_whole = True
    except TimeIsUp:
        pass
    except GnnplanError as error:
        failed = str(error)
    path = folder / "metrics.jsonl"
    whole = path.read_text().rpartition("\n")[0] if path.exists() else ""
    return [json.loads(line) for line in whole.splitlines()], failed, is_whole


# -- what the runs say -----------------------------------------------------------------------------


def refitted(cluster: Cluster, runs: list[Run]) -> tuple[Cluster, Json | None]:
    """Fit the cluster's constants to half of the runs, if this predicts the other half better.

    Return the cluster, and the report of `refit_cluster` with `kept`; None with too few runs.
    """
    if len(runs) < 2:
        return cluster, None
    fitted, report = refit_cluster(runs)
    better = report["after"]["mean"] < report["before"]["mean"]
    shape = {"servers": cluster.servers, "gpus_per_server": cluster.gpus_per_server}
    return (fitted.model_copy(update=shape) if better else cluster), {**report, "kept": better}


def on_cluster(found: SearchResult, best: Candidate, cluster: Cluster) -> SearchResult:
    """Predict all candidates on the refitted cluster; `best` is the candidate that runs favour."""
    predictions = [
        evaluate(replace(c.problem, cluster=cluster), c.strategy, c.objective) for c in found.ranked
    ]
    measured = next(new for new, c in zip(predictions, found.ranked, strict=True) if c is best)
    ranked = sorted(predictions, key=lambda candidate: candidate.value)
    problem = replace(found.problem, cluster=cluster)
    return replace(found, problem=problem, ranked=ranked, measured=measured)


def _evidence(contender: Contender, candidate: Candidate, result: Result) -> Json:
    """Return the measurements of one strategy, JSON-ready; `worse`: its excess over the best."""
    found = difference(contender, result.best)
    ran, is_best = bool(contender.readings), contender is result.best
    compared = ran and not is_best
    return {
        "strategy": contender.name,
        "exact": candidate.strategy.exact,
        "predicted_s": contender.predicted_s,
        "measured_s": contender.epoch_s if ran else None,
        "worse": expm1(found.more) if compared else None,
        "doubt": expm1(found.doubt) if compared and isfinite(found.doubt) else None,
        "certain": found.is_certain if compared else None,
        "turns": len(contender.readings),
        "epochs": sum(len(reading.epochs_s) + WARM_UP for reading in contender.readings),
        "cost_s": sum(reading.wall_s for reading in contender.readings),
        "failed": contender.failed,
    }


def _close(result: Result) -> str:
    """Return a sentence on how much worse the other strategies were that ran."""
    differences = [
        f"{c.name} {show_percent(expm1(difference(c, result.best).more), 1, sign=True)} measured"
        for c in result.others
    ]
    return "; ".join(differences[:2]) or "nothing else ran to its end"
