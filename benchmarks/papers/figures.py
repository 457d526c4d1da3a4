"""Predicts a printed figure by closed form, in SI units or as a fraction.

FIGURES has the metrics of one strategy, RATIOS the metrics that compare two. full_graph.py,
mini_batch.py and their_memory.py have metrics that a paper counts differently from gnnplan.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial

import numpy as np

from gnnplan.papers import full_graph, mini_batch, their_memory, their_software
from gnnplan.papers.interpret import question, testbed
from gnnplan.papers.question import Question, Row, Skip, Testbeds
from gnnplan.planner.decision.candidate import evaluate
from gnnplan.planner.vocabulary.errors import Infeasible

SUMMARIES = ("_min", "_max", "_mean", "_geomean", "_std")  # endings of metrics over many runs
FEASIBILITY = ("fits_in_memory", "min_gpus", "min_partitions")


def predict(row: Row, testbeds: Testbeds = testbed) -> float:
    """Return the row's figure on the cluster testbeds(row). Raises Skip."""
    metric = row["metric"]
    if metric.endswith(SUMMARIES):
        raise Skip("it summarises many runs")
    if metric in FEASIBILITY:
        return _feasibility(row, testbeds)
    if metric in RATIOS:
        figure, ratio = RATIOS[metric]
        if not row["baseline"] or row["baseline"].startswith("any_of:"):
            raise Skip("no one baseline is named")
        own = question(row, testbeds=testbeds)
        other = question(_row_of_baseline(row), row["baseline"], testbeds)
        return ratio(FIGURES[figure](own), FIGURES[figure](other))
    if metric not in FIGURES:
        raise Skip(f"{metric} is not predicted")
    return FIGURES[metric](question(row, testbeds=testbeds))


def _row_of_baseline(row: Row) -> Row:
    """Return the baseline's row; a system compared with itself has no copies. Raises Skip."""
    if row["baseline"] != row["strategy"]:
        return row
    params = json.loads(row["strategy_params"] or "{}")
    without = {
        name: value
        for name, value in params.items()
        if name not in ("feature_copies", "graph_copies")
    }
    if without == params:
        raise Skip("in what the baseline differs is not stated")
    return {**row, "strategy_params": json.dumps(without)}


# -- figures of one strategy -----------------------------------------------------------------------


def _epoch_s(case: Question) -> float:
    if isinstance(case.problem, their_software.InterpretedProblem):
        return their_software.epoch(case)
    if case.problem.workload.mode == "mini":
        return mini_batch.epoch(case)
    return float(case.prediction.epoch_s)


def _train_s(case: Question) -> float:
    epochs = json.loads(case.row["strategy_params"] or "{}").get("epochs")
    if not isinstance(epochs, int):
        raise Skip("epochs are not stated")
    return _epoch_s(case) * epochs


def _comm_s(case: Question) -> float:
    """Return the seconds of exposed communication.

    For a pipeline, whose chunks hide most communication, it is all that a rank sends, which GNNPipe
    seems to print.
    """
    prediction = case.prediction
    pipeline_s = float(np.max(prediction.by_op.get("pipeline", 0.0)))
    return max(float(prediction.comm_s), pipeline_s)


def _compute_s(case: Question) -> float:
    if case.problem.workload.mode == "mini":
        return _part_s("compute_time_s", case)
    return float(case.prediction.compute_s)


def _part_s(metric: str, case: Question) -> float:
    """Return the seconds of a part of a mini-batch step, as its paper divides it. Raises Skip."""
    if case.row["paper"] not in ("p3", "gsplit"):
        raise Skip("what its paper counts as that is not known here")
    return mini_batch.part(metric, case)


def _volume(case: Question) -> float:
    if case.problem.workload.mode == "mini":
        return mini_batch.volume(case)
    return float(case.prediction.bytes_total)


PARTS = ("dag_time_s", "copy_time_s", "sample_time_s", "load_time_s", "forward_backward_time_s")
FIGURES: dict[str, Callable[[Question], float]] = {
    "epoch_time_s": _epoch_s,
    "throughput_epochs_per_s": lambda case: 1 / _epoch_s(case),
    "comm_time_s": _comm_s,
    "compute_time_s": _compute_s,
    "reduce_time_s": full_graph.reduced,
    "comm_ratio": lambda case: _comm_s(case) / _epoch_s(case),
    "ext_comm_ratio": lambda case: full_graph.between_servers(case) / _epoch_s(case),
    "comm_volume_bytes": _volume,
    "train_time_s": _train_s,
    "cross_edge_ratio": mini_batch.crossing,
    "halo_rows": full_graph.halo,
    **{metric: partial(_part_s, metric) for metric in PARTS},
    **{metric: partial(mini_batch.sampled, metric) for metric in mini_batch.SAMPLED},
}
# metric -> the figure of both strategies, and a function of (strategy's figure, baseline's figure)
RATIOS: dict[str, tuple[str, Callable[[float, float], float]]] = {
    "speedup_vs": ("epoch_time_s", lambda own, other: other / own),
    "epoch_time_ratio_vs": ("epoch_time_s", lambda own, other: own / other),
    "slowdown_fraction_vs": ("epoch_time_s", lambda own, other: own / other - 1),
    "epoch_time_reduction_fraction_vs": ("epoch_time_s", lambda own, other: 1 - own / other),
    "comm_time_ratio_vs": ("comm_time_s", lambda own, other: own / other),
    "comm_time_reduction_vs": ("comm_time_s", lambda own, other: other / own),
    "comm_time_reduction_fraction_vs": ("comm_time_s", lambda own, other: 1 - own / other),
    "edges_computed_ratio_vs": ("edges_computed", lambda own, other: own / other),
    "features_loaded_ratio_vs": ("features_loaded", lambda own, other: own / other),
    "comm_volume_reduction_vs": ("comm_volume_bytes", lambda own, other: other / own),
}


# -- what fits in memory ---------------------------------------------------------------------------


def _feasibility(row: Row, testbeds: Testbeds) -> float:
    """Return 1 or 0 for fits_in_memory; for min_gpus and min_partitions the fewest parts that fit.

    Each part has a GPU. Numbers of parts are those of GPUs of one server, then of whole servers.
    A single part does not count as a partition. Raises Skip.
    """
    if row["metric"] == "fits_in_memory":
        return float(_fits(question(row, testbeds=testbeds)))
    if not row["testbed"]:
        raise Skip("testbed is not stated")
    whole = testbeds(row)
    for parts in range(1 + (row["metric"] == "min_partitions"), whole.ranks + 1):
        servers = -(-parts // whole.gpus_per_server)
        if servers > 1 and parts % whole.gpus_per_server:
            continue
        split = {**row, "num_nodes": str(servers), "gpus_per_node": str(parts // servers)}
        if _fits(question(split, testbeds=testbeds)):
            return float(parts)
    raise Skip("no number of GPUs of the testbed fits")


def _fits(case: Question) -> bool:
    if case.row["paper"] in full_graph.PAPERS:
        params = json.loads(case.row["strategy_params"] or "{}")
        return their_memory.fits(case, any_batches="updates_per_epoch" not in params)
    try:
        evaluate(case.problem, case.strategy)
    except Infeasible:
        return False
    return True
