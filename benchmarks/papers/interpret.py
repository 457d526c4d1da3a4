"""Converts the row of a printed figure into a Question: graph, GNN, testbed and strategy.

The graph is known by its statistics (planner/graph/datasets/). The testbed is a preset, a cloud's
server, or a file in testbeds/. The strategy is the name of a system, or a strategy of gnnplan with
knobs, such as `data_parallel(prefetch=1)`. Rows outside the model are skipped; Skip has the reason.
full_graph.py and mini_batch.py have the differences of other people's code.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from gnnplan.papers import full_graph, mini_batch, their_software
from gnnplan.papers.question import Params, Question, Row, Skip, Testbeds
from gnnplan.papers.their_passes import TheirProblem
from gnnplan.planner.cluster import clouds
from gnnplan.planner.cluster.spec import MOST_RANKS, PRESETS, Cluster
from gnnplan.planner.gnn.workload import Workload
from gnnplan.planner.graph.graph import Graph, GraphStats
from gnnplan.planner.graph.load import datasets, load
from gnnplan.planner.problem.inputs import read_cluster
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies import Strategy, named, parse
from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.planner.vocabulary.files import suggest

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


def _testbeds() -> set[str]:
    files = [*PRESETS.glob("*.yaml"), *TESTBEDS.glob("*.yaml")]
    return {file.stem for file in files} | set(clouds.names())


def question(row: Row, strategy: str = "", testbeds: Testbeds = testbed) -> Question:
    """Return the row's question; strategy: another one, such as the baseline. Raises Skip."""
    name = strategy or row["strategy"]
    params = json.loads(row["strategy_params"] or "{}")
    mode = _mode(name)
    stated = _with_usual_machine(row, params)
    _check_stated(stated, name, params)
    cluster = _part_of_testbed(stated, testbeds)
    stats = _statistics(stated["dataset"], both_ways=bool(params.get("undirected")))
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
        chosen = _strategy(name, params, problem).settle(problem)
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


def _strategy(name: str, params: Params, problem: Problem) -> Strategy:
    if name not in SYSTEMS:
        return parse(name)
    ours, knobs = SYSTEMS[name]
    return named(ours, knobs(params, problem))


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
    if row["testbed"] not in _testbeds():
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


def _statistics(name: str, both_ways: bool) -> GraphStats:
    stats = load(name, directed=name in DIRECTED and not both_ways)
    assert not isinstance(stats, Graph)
    return stats


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
