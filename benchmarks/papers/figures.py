"""Predicts a printed figure by closed form, in SI units or as a fraction.

First a row becomes a Question: graph, GNN, testbed and strategy. The graph is known by its
statistics (planner/graph/datasets/). The testbed is a preset, a cloud's server, or a file in
testbeds/. The strategy is the name of a system, or a strategy of gnnplan with knobs, such as
`data_parallel(prefetch=1)`. Rows outside the model are skipped; Skip has the reason.

FIGURES has the metrics of one strategy, RATIOS the metrics that compare two. full_graph.py and
mini_batch.py have the differences of other people's code, and metrics that a paper counts
differently from gnnplan."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from gnnplan.papers import full_graph, mini_batch, their_software
from gnnplan.papers.question import Params, Question, Row, Skip, Testbeds, TheirProblem, params_of
from gnnplan.planner.cluster import machines
from gnnplan.planner.cluster.spec import MOST_RANKS, PRESETS, Cluster
from gnnplan.planner.decision.candidate import evaluate
from gnnplan.planner.gnn.workload import Workload
from gnnplan.planner.graph.graph import Graph
from gnnplan.planner.graph.load import datasets, load
from gnnplan.planner.problem.inputs import read_cluster
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies import named, parse
from gnnplan.planner.vocabulary.errors import Infeasible, SpecError
from gnnplan.planner.vocabulary.files import suggest

# -- questions -------------------------------------------------------------------------------------


# names of models in the file -> gnnplan's names
MODELS = {
    **{name: name for name in ("gcn", "sage", "gcnii", "gat", "gin")},
    **{"resgcn+": "resgcn", "sgcn": "sgc"},
}
SYSTEMS = full_graph.SYSTEMS | mini_batch.SYSTEMS
TESTBEDS = Path(__file__).with_name("testbeds")  # machines that are no presets
# Parameters of strategies that the model uses, or may ignore.
PARAMS = {
    *("aggregates_first", "alpha", "batch", "cache", "chunks", "chunks_rule", "dropout", "epochs"),
    *("fanout", "feature_bytes", "feature_copies", "feature_dim", "gamma", "gpus", "graph_copies"),
    *("group", "heads", "hop", "inflight_minibatches", "last_heads", "max_hop", "micro_batches"),
    *("most_neighbours", "norm", "partitioner", "partitions", "reads", "sampler", "software"),
    *("stages", "undirected", "updates_per_epoch", "ways", "workers"),
}
DIRECTED = ("ogbn-papers100M",)  # all papers print 1.6 billion edges: each citation counts once
REQUIRED = ("testbed", "dataset", "model", "layers", "num_nodes", "gpus_per_node")
# metrics of batches and parts, which do not depend on the machine
OF_BATCHES = (
    *(*mini_batch.SAMPLED, "cross_edge_ratio", "halo_rows"),
    *("edges_computed_ratio_vs", "features_loaded_ratio_vs"),
)


@cache
def _read(name: str) -> Cluster:
    """Read a testbed; cached, because a fit reads it hundreds of times, and parsing is slow."""
    own = TESTBEDS / f"{name}.yaml"
    return read_cluster(str(own) if own in TESTBEDS.iterdir() else name)


def whole(row: Row) -> Cluster:
    """Return the row's whole testbed, as in its file."""
    return _read(row["testbed"])


def testbed(row: Row) -> Cluster:
    """Return the row's whole testbed with the rates of the row's software."""
    return their_software.cluster_of(whole(row), row)


def question(row: Row, strategy: str = "", testbeds: Testbeds = testbed) -> Question:
    """Return the row's question; strategy: another one, such as the baseline. Raises Skip."""
    name = strategy or row["strategy"]
    params = params_of(row)
    mode = _mode(name)
    stated = _with_usual_machine(row, params)
    _check_stated(stated, name, params)
    cluster = _part_of_testbed(stated, testbeds)
    graph = stated["dataset"]
    stats = load(graph, directed=graph in DIRECTED and not params.get("undirected"))
    assert not isinstance(stats, Graph)
    if "sampler" in params:
        cluster = cluster.model_copy(update={"sampler": params["sampler"]})
    if "feature_dim" in params:
        width = int(params["feature_dim"])
        stats = replace(stats, features=width, hash=f"{stats.hash} {params['feature_dim']}")
    try:
        workload = Workload.model_validate(_workload(stated, mode, name, params, cluster))
        method, first = str(params.get("partitioner", "metis")), params.get("aggregates_first")
        theirs = TheirProblem(stats, None, workload, cluster, method, aggregates_first=bool(first))
        problem: Problem = their_software.as_theirs(theirs, params)
    except ValidationError as error:
        raise Skip(f"not a workload of ours: {error.errors()[0]['msg']}") from None
    try:
        if name in SYSTEMS:
            ours, knobs = SYSTEMS[name]
            chosen = named(ours, knobs(params, problem)).settle(problem)
        else:
            chosen = parse(name).settle(problem)
        chosen.check(problem)
    except (SpecError, ValueError, TypeError) as error:  # such as a knob that is not a number
        raise Skip(str(error)) from None
    if mode == "mini":
        problem = mini_batch.as_theirs(problem, name)
    else:
        problem = full_graph.as_theirs(problem, stated["paper"])
    return Question(problem, chosen, row)


def _mode(name: str) -> str:
    """Return 'full' or 'mini': what a strategy trains on. Raises Skip."""
    if name in SYSTEMS:
        return "full" if name in full_graph.SYSTEMS else "mini"
    try:
        return parse(name).mode
    except SpecError:
        raise Skip(f"{name} is none of our strategies") from None


def _with_usual_machine(row: Row, params: Params) -> Row:
    """Return the row with a default machine, if it states none and its metric depends on none.

    P3's example of a mini-batch has one trainer per server.
    """
    usual: dict[str, str] = {}
    if row["metric"] in OF_BATCHES:
        usual = {
            "testbed": "pcie_box",
            "model": "sage",
            "hidden": "256",
            "num_nodes": "1",
            "gpus_per_node": str(params.get("micro_batches", 1)),
        }
    elif not row["gpus_per_node"] and row["metric"] == "comm_volume_bytes":
        usual = {"gpus_per_node": "1"}
    return {**row, **{name: value for name, value in usual.items() if not row[name]}}


def _check_stated(row: Row, name: str, params: Params) -> None:
    """Raise Skip if the row lacks a required field, or has a value that the model lacks."""
    for field in REQUIRED:
        if not row[field]:
            raise Skip(f"{field} is not stated")
    if row["model"] not in MODELS:
        raise Skip(f"model {row['model']} is none of ours")
    if not row["hidden"] and row["model"] != "sgcn":
        raise Skip("hidden is not stated")
    if not row["hidden"] and name.startswith("p3") and row["metric"] != "dag_time_s":
        raise Skip("hidden is not stated, and so wide are the partial sums that P3 sends")
    if row["dataset"] not in datasets():
        raise Skip(f"no statistics of {row['dataset']} here{suggest(row['dataset'], datasets())}")
    if unknown := [param for param in params if param not in PARAMS]:
        raise Skip(f"{unknown[0]} (strategy_params) is nothing that we know")
    if params.get("software", "dgl") not in their_software.PROGRAMS:
        raise Skip(f"{params['software']} is no software that we know")
    if params.get("sampler", "host") not in ("host", "device"):
        raise Skip(f"the sampler is on host or device, not on {params['sampler']}")


def _part_of_testbed(row: Row, testbeds: Testbeds) -> Cluster:
    """Return the testbed with the numbers of servers and GPUs that the row uses. Raises Skip."""
    files = [*PRESETS.glob("*.yaml"), *TESTBEDS.glob("*.yaml")]
    if row["testbed"] not in {*(file.stem for file in files), *machines.instance_types()}:
        raise Skip(f"testbed {row['testbed']} is none of ours")
    every = testbeds(row)
    servers, gpus = int(row["num_nodes"]), int(row["gpus_per_node"])
    if not gpus or gpus > every.gpus_per_server:
        each = every.gpus_per_server
        raise Skip(f"{row['testbed']} has {each} GPUs per server, and {gpus} are asked")
    if servers * gpus > MOST_RANKS:
        raise Skip(f"{servers * gpus:,} GPUs are more than can be planned ({MOST_RANKS:,})")
    if servers > 1 and every.inter_node is None:
        raise Skip(f"{row['testbed']} is one server, and {servers} are asked")
    return every.shaped(servers, gpus)


def _workload(row: Row, mode: str, name: str, params: Params, cluster: Cluster) -> dict[str, Any]:
    """Return the fields of the Workload that the row states. Raises Skip."""
    layers = int(row["layers"])
    fields: dict[str, Any] = {"model": MODELS[row["model"]], "layers": layers}
    if row["hidden"]:
        fields["hidden"] = int(row["hidden"])
    fields |= {field: params[field] for field in ("heads", "norm", "dropout") if params.get(field)}
    if mode == "full":
        return {**fields, "mode": "full", **full_graph.WORKLOADS.get(row["paper"], {})}
    if not (params.get("batch") and params.get("fanout")):
        raise Skip("batch or fanout is not stated")
    if name == "dgl_data_parallel" and params.get("partitioner") == "metis":
        raise Skip("seeds of data_parallel are not of its own part, so METIS changes nothing here")
    # GSplit states the batch of all GPUs, other papers that of one trainer.
    trainers = 1 if row["paper"] == "gsplit" else cluster.ranks
    fanout = params["fanout"]
    if isinstance(fanout, list):
        fanout = tuple(fanout)
    elif fanout != "full":
        fanout = (fanout,) * layers
    return {**fields, "mode": "mini", "batch": params["batch"] * trainers, "fanout": fanout}


# -- figures ---------------------------------------------------------------------------------------


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
    params = params_of(row)
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
    epochs = params_of(case.row).get("epochs")
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
        return full_graph.fits(case, "updates_per_epoch" not in params_of(case.row))
    try:
        evaluate(case.problem, case.strategy)
    except Infeasible:
        return False
    return True
