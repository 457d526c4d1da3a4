"""Printed figures of other people's systems, predicted: one row is one figure, in the columns of COLUMNS.

    row -> Question: a graph (by the statistics of its name, datasets/), a GNN, a testbed (by its name, presets/) and a strategy
        -> the figure, in SI or as a fraction, from the strategy's closed form and memory

A row that the model does not speak of is skipped and says why: other people's baselines, accuracies, summaries over many runs.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import combinations
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
from pydantic import ValidationError

from gnnplan.planner import published_batches as mini_batches
from gnnplan.planner import published_full as full_graph
from gnnplan.planner import published_memory as their_memory
from gnnplan.planner.errors import GnnplanError, Infeasible, SpecError
from gnnplan.planner.files import MOST_SHOWN, PRESETS, from_json, read_bytes, read_cluster, suggest
from gnnplan.planner.graph import Graph, GraphStats, datasets, load
from gnnplan.planner.job import Job, shape
from gnnplan.planner.search import weigh
from gnnplan.planner.specs import MOST_RANKS, Cluster, Workload
from gnnplan.planner.strategies import Strategy, named
from gnnplan.planner.strategies.strategy import Prediction

MAX_CSV = 1 << 26  # [B]
SMALLEST = 1e-20  # of a figure, and one over the largest
LARGEST = 10**12  # of a number among a strategy's parameters
JOB = ("paper", "source", "testbed", "dataset", "model", "layers", "hidden", "num_nodes", "gpus_per_node")
COLUMNS = (*JOB, "strategy", "strategy_params", "metric", "baseline", "value", "unit_as_printed", "note")
# as printed -> the metrics' kinds that it can be of: values are SI already, so a unit of another kind is a mistake
UNITS = {"s": "time", "ms": "time", "min": "time", "B": "bytes or count", "MB": "bytes", "GB": "bytes", "M": "count", "%": "share",
         "x": "ratio", "GPUs": "count", "partitions": "count", "nodes": "count", "epochs": "count", "epochs/s": "rate", "OOM": "fact",
         "runs": "fact", "": "any"}  # fmt: skip
KINDS = {"_time_s": "time", "_bytes": "bytes", "epochs_per_s": "rate", "speedup_vs": "ratio", "_ratio_vs": "ratio", "_pct": "share",
         "_reduction_vs": "ratio", "_ratio": "share", "_fraction_vs": "share", "fits_in_memory": "fact", "min_gpus": "count",
         "min_partitions": "count"}  # fmt: skip
SUMMARIES = ("_min", "_max", "_mean", "_geomean", "_std")
MODELS = {"gcn": "gcn", "sage": "sage", "gcnii": "gcnii", "gat": "gat", "resgcn+": "resgcn", "sgcn": "sgc"}
FULL = {"graph_parallel", "pipegcn", "pipegcn_g", "pipegcn_f", "pipegcn_gf", "gnnpipe_pipeline", "gnnpipe_hybrid", "granndis",
        "granndis_preload", "granndis_eas"}  # fmt: skip
MINI = {"dgl_data_parallel", "quiver", "p3_push_pull", "p3_push_pull_nopipe", "p3star", "gsplit", "gsplit_edge", "gsplit_node",
        "gsplit_rand"}  # fmt: skip
PARAMS = {"alpha", "batch", "cache", "chunks", "chunks_rule", "epochs", "fanout", "feature_copies", "feature_dim", "gamma", "gpus",
          "graph_copies", "group", "heads", "hop", "inflight_minibatches", "max_hop", "micro_batches", "partitioner", "partitions",
          "stages", "updates_per_epoch", "ways"}  # fmt: skip
DIFFERENT = 0.05  # printed times closer than this have no winner

Row = Mapping[str, str]
Testbeds = Callable[[Row], Cluster]  # all of a row's testbed


class Skip(Exception):
    """Why a row is not predicted."""


@dataclass(frozen=True)
class Question:
    job: Job
    strategy: Strategy
    row: Row

    @property
    def prediction(self) -> Prediction:
        return _predicted(self)


def read(path: str | Path) -> list[dict[str, str]]:
    """The rows of a file, with their line numbers as 'line'. Raises SpecError naming file, line and remedy."""
    try:
        with io.StringIO(read_bytes(path, MAX_CSV).decode("utf-8-sig"), newline="") as file:
            reader = csv.DictReader(file)
            header = tuple(reader.fieldnames or ())
            if missing := [name for name in COLUMNS if name not in header]:
                raise SpecError(f"{path}:1: missing columns: {', '.join(missing)}; a file of published figures has {', '.join(COLUMNS)}")
            if unknown := [name for name in header if name not in COLUMNS]:
                raise SpecError(f"{path}:1: unknown columns: {', '.join(unknown)}{suggest(unknown[0], COLUMNS)}")
            rows = [{**{name: row[name] or "" for name in COLUMNS}, "line": str(reader.line_num)} for row in reader]
    except (UnicodeDecodeError, csv.Error) as error:
        raise SpecError(f"{path}: cannot be read ({error})") from error
    for row in rows:
        _inspect(path, row)
    return rows


def _inspect(path: str | Path, row: Row) -> None:
    where = f"{path}:{row['line']}: "
    try:
        value = float(row["value"])
    except ValueError:
        raise SpecError(f"{where}value {row['value'][:MOST_SHOWN]!r} is not a number; write it in SI (seconds, bytes, counts), or as a "
                        "fraction") from None  # fmt: skip
    if not np.isfinite(value):
        raise SpecError(f"{where}value {row['value']!r} is not finite")
    if (value and not SMALLEST <= abs(value) <= 1 / SMALLEST) or (row["metric"] == "slowdown_fraction_vs" and value <= -1):
        raise SpecError(f"{where}value {row['value'][:MOST_SHOWN]!r} of {row['metric'][:MOST_SHOWN]} cannot be; write it in SI")
    unit, kind = row["unit_as_printed"], next((kind for end, kind in KINDS.items() if row["metric"].endswith(end)), "any")
    if unit not in UNITS:
        raise SpecError(f"{where}unit {unit!r} is unknown{suggest(unit, UNITS)}")
    if "any" not in (kind, UNITS[unit]) and kind not in UNITS[unit]:
        raise SpecError(f"{where}{row['metric']} cannot be printed in {unit!r}, a unit of {UNITS[unit]}; give one of {kind}")
    if value <= 0 and kind in ("time", "ratio", "rate") and not row["metric"].startswith(("comm_time_s", "reduce_time_s")):
        raise SpecError(f"{where}{row['metric']} must be above 0, is {row['value']}")
    for field in ("layers", "hidden", "num_nodes", "gpus_per_node"):
        if row[field] and not (len(row[field]) < 7 and row[field].isdecimal() and (int(row[field]) or field == "gpus_per_node")):
            raise SpecError(f"{where}{field} {row[field][:MOST_SHOWN]!r} is not a whole number above 0 (and below a million); leave it "
                            "empty where it is not stated")  # fmt: skip
    params = from_json(f"{where}strategy_params", row["strategy_params"] or "{}", "write it as an object, or leave it empty")
    if not isinstance(params, dict):
        raise SpecError(f"{where}strategy_params is not a JSON object")
    for name, value in params.items():
        if not all(item is None or isinstance(item, str | bool) or (isinstance(item, int | float) and 0 <= item <= LARGEST)
                   for item in (value if isinstance(value, list) else [value])):  # fmt: skip
            raise SpecError(f"{where}strategy_params: {name} must be text or a number in [0, {LARGEST:.0e}], or a list of these, found "
                            f"{str(value)[:MOST_SHOWN]}")  # fmt: skip


def testbed(row: Row) -> Cluster:
    """As its preset says."""
    return read_cluster(row["testbed"])


# -- the question ----------------------------------------------------------------------------------------------------------------


def question(row: Row, strategy: str = "", testbeds: Testbeds = testbed) -> Question:
    """What the row asks, perhaps of its baseline. Raises Skip."""
    name = strategy or row["strategy"]
    params = json.loads(row["strategy_params"] or "{}")
    if name not in FULL | MINI:
        raise Skip(f"{name} is none of our strategies")
    asked_for, row = row, _anywhere(row, params)
    for field in ("testbed", "dataset", "model", "layers", "num_nodes", "gpus_per_node"):
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
    cluster, stats = _testbed(row, testbeds), _graph(row["dataset"])
    if "feature_dim" in params:
        stats = replace(stats, features=int(params["feature_dim"]), hash=f"{stats.hash} {params['feature_dim']}")
    mini = name in MINI
    asked: dict[str, Any] = {"model": MODELS[row["model"]], "layers": int(row["layers"]), "mode": "mini" if mini else "full"}
    if row["hidden"]:
        asked["hidden"] = int(row["hidden"])
    if not mini:
        asked.update(full_graph.workload(row["paper"]))
    if mini:
        if not (params.get("batch") and params.get("fanout")):
            raise Skip("batch or fanout is not stated")
        fanout = params["fanout"]
        if name == "dgl_data_parallel" and params.get("partitioner") == "metis":
            raise Skip("seeds of data_parallel are not of its own part, so METIS changes nothing here")
        asked["batch"] = params["batch"] * (cluster.ranks if mini_batches.by_trainer(row) else 1)
        asked["fanout"] = fanout if fanout == "full" else tuple(fanout) if isinstance(fanout, list) else (fanout,) * asked["layers"]
    if params.get("heads"):
        asked["heads"] = params["heads"]
    try:
        job = Job(stats, None, Workload.model_validate(asked), cluster, str(params.get("partitioner", "metis")))
    except ValidationError as error:
        raise Skip(f"not a workload of ours: {error.errors()[0]['msg']}") from None
    try:
        chosen = (mini_batches.strategy(name, params, job) if mini else _strategy(name, params, job)).settle(job)
        chosen.check(job)
    except (SpecError, ValueError, TypeError) as error:  # or a number that is none
        raise Skip(str(error)) from None
    if mini:
        job = Job(stats, None, job.workload, mini_batches.on_device(name, job, cluster), job.method)
    else:
        job = full_graph.as_theirs(job, row["paper"])
    return Question(job, chosen, asked_for)


def _anywhere(row: Row, params: dict[str, Any]) -> Row:
    """What batches hold is alike on all machines; P3's example of one has a trainer per server."""
    usual = {}
    if row["metric"] in (*mini_batches.SAMPLED, "edges_computed_ratio_vs", "features_loaded_ratio_vs", "cross_edge_ratio"):
        usual = {"testbed": "pcie_box", "model": "sage", "hidden": "256", "num_nodes": "1",
                 "gpus_per_node": str(params.get("micro_batches", 1))}
    elif not row["gpus_per_node"] and row["metric"] == "comm_volume_bytes":
        usual = {"gpus_per_node": "1"}
    return {**row, **{name: value for name, value in usual.items() if not row[name]}}


def _strategy(name: str, params: dict[str, Any], job: Job) -> Strategy:
    if name == "graph_parallel":
        return named(name, {})
    if name.startswith("pipegcn"):
        return named(name, {"gamma": params["gamma"]} if "gamma" in params else {})
    if name.startswith("gnnpipe"):
        stages = int(params.get("stages", job.ranks if name == "gnnpipe_pipeline" else max(1, job.ranks // 2)))
        return named("gnnpipe", {"stages": stages, "chunks": int(params.get("chunks", 4 * job.ranks))})
    if name.startswith("granndis"):
        if name == "granndis_preload":
            return named("granndis", {})
        return named("granndis", {"max_hop": int(params.get("max_hop", 1)), "fanout": int(params.get("fanout", 15)),
                                  "batches": int(params.get("updates_per_epoch", 1))})  # fmt: skip
    raise Skip(f"{name} is none of our strategies")


def _testbed(row: Row, testbeds: Testbeds) -> Cluster:
    if row["testbed"] not in {path.stem for path in PRESETS.glob("*.yaml")}:
        raise Skip(f"testbed {row['testbed']} is none of ours")
    whole = testbeds(row)
    servers, gpus = int(row["num_nodes"]), int(row["gpus_per_node"])
    if not gpus or gpus > whole.gpus_per_server:
        raise Skip(f"{row['testbed']} has {whole.gpus_per_server} GPUs per server, and {gpus} are asked")
    if servers * gpus > MOST_RANKS:
        raise Skip(f"{servers * gpus:,} GPUs are more than can be planned ({MOST_RANKS:,})")
    if servers > 1 and whole.inter_node is None:
        raise Skip(f"{row['testbed']} is one server, and {servers} are asked")
    return whole.model_copy(update=shape(whole, servers, gpus))


@lru_cache(maxsize=64)
def _graph(name: str) -> GraphStats:
    stats = load(name)
    assert not isinstance(stats, Graph)
    return stats


_known: dict[object, Prediction] = {}


def _predicted(asked: Question) -> Prediction:
    """By what is asked, not by who asks: rows of one table ask for the same again and again."""
    job = asked.job
    key = type(job), job.stats.hash, job.workload, job.cluster.model_dump_json(), job.method, asked.strategy
    if key not in _known:
        _known[key] = asked.strategy.predict(job)
    return _known[key]


# -- the figure ------------------------------------------------------------------------------------------------------------------


def predict(row: Row, testbeds: Testbeds = testbed) -> float:
    """The row's figure, on clusters as `testbeds` says them. Raises Skip."""
    metric = row["metric"]
    if metric.endswith(SUMMARIES):
        raise Skip("it summarises many runs")
    if metric in ("fits_in_memory", "min_gpus", "min_partitions"):
        return _feasibility(row, testbeds)
    if metric in RATIOS:
        what, figure = RATIOS[metric]
        if not row["baseline"] or row["baseline"].startswith("any_of:"):
            raise Skip("no one baseline is named")
        own, other = question(row, testbeds=testbeds), question(_of_baseline(row), row["baseline"], testbeds)
        return figure(FIGURES[what](own), FIGURES[what](other))
    if metric not in FIGURES:
        raise Skip(f"{metric} is not predicted")
    return FIGURES[metric](question(row, testbeds=testbeds))


def _of_baseline(row: Row) -> Row:
    """The row as its baseline has it: where that is the same system, without copies. Raises Skip."""
    if row["baseline"] != row["strategy"]:
        return row
    params = json.loads(row["strategy_params"] or "{}")
    same = {name: value for name, value in params.items() if name not in ("feature_copies", "graph_copies")}
    if same == params:
        raise Skip("in what the baseline differs is not stated")
    return {**row, "strategy_params": json.dumps(same)}


def _epoch(asked: Question) -> float:
    return mini_batches.epoch(asked) if asked.job.workload.mode == "mini" else float(asked.prediction.epoch_s)


def _train(asked: Question) -> float:
    epochs = json.loads(asked.row["strategy_params"] or "{}").get("epochs")
    if not isinstance(epochs, int):
        raise Skip("epochs are not stated")
    return _epoch(asked) * epochs


def _comm(asked: Question) -> float:
    """What computation waits for; of a pipeline, whose chunks hide most of it, all that a rank sends, as GNNPipe seems to print it."""
    told = asked.prediction
    return max(float(told.comm_s), float(np.max(told.by_op.get("pipeline", 0.0))))


def _volume(asked: Question) -> float:
    if asked.job.workload.mode == "mini":
        return mini_batches.volume(asked)
    return float(asked.prediction.bytes_total)


def _part(what: str, asked: Question) -> float:
    if asked.row["paper"] not in ("p3", "gsplit"):
        raise Skip("what its paper counts as that is not known here")
    return mini_batches.part(what, asked)


FIGURES: dict[str, Callable[[Question], float]] = {
    "epoch_time_s": _epoch,
    "throughput_epochs_per_s": lambda asked: 1 / _epoch(asked),
    "comm_time_s": _comm,
    "compute_time_s": lambda asked: (_part("compute_time_s", asked) if asked.job.workload.mode == "mini"
                                     else float(asked.prediction.compute_s)),
    "reduce_time_s": full_graph.reduced,
    "comm_ratio": lambda asked: _comm(asked) / _epoch(asked),
    "ext_comm_ratio": lambda asked: full_graph.between_servers(asked) / _epoch(asked),
    "comm_volume_bytes": _volume,
    "train_time_s": _train,
    **{what: partial(_part, what) for what in ("dag_time_s", "copy_time_s", "sample_time_s", "load_time_s", "forward_backward_time_s")},
    "cross_edge_ratio": mini_batches.crossing,
    **{what: partial(mini_batches.sampled, what) for what in mini_batches.SAMPLED},
}
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


def _feasibility(row: Row, testbeds: Testbeds) -> float:
    """fits_in_memory: 1 or 0. min_gpus, min_partitions: the least number of equal parts that fits, of one server's GPUs first, then of
    whole servers; one part is no partition."""
    if row["metric"] == "fits_in_memory":
        return float(_fits(question(row, testbeds=testbeds)))
    whole = testbeds(row) if row["testbed"] else None
    if whole is None:
        raise Skip("testbed is not stated")
    for parts in range(1 + (row["metric"] == "min_partitions"), whole.ranks + 1):
        servers = -(-parts // whole.gpus_per_server)
        split = {**row, "num_nodes": str(servers), "gpus_per_node": str(parts // servers)}
        if (servers == 1 or parts % whole.gpus_per_server == 0) and _fits(question(split, testbeds=testbeds)):
            return float(parts)
    raise Skip("no number of GPUs of the testbed fits")


def _fits(asked: Question) -> bool:
    if asked.row["paper"] in full_graph.PAPERS:
        return their_memory.fits(asked, any_batches="updates_per_epoch" not in json.loads(asked.row["strategy_params"] or "{}"))
    try:
        weigh(asked.job, asked.strategy)
    except Infeasible:
        return False
    return True


# -- the score -------------------------------------------------------------------------------------------------------------------


def gave_a_halo(row: Row) -> bool:
    """Whether a halo in datasets/ was made from the row: Reddit's from GNNPipe Table 4, products' from PipeGCN Tables 2 and 4 (5 parts),
    papers100M's from PipeGCN Table 5; or the spreads of mini-batches: those of GSplit's graphs from its Table 1; or a factor on memory."""
    paper, dataset, strategy, metric = (row[name] for name in ("paper", "dataset", "strategy", "metric"))
    if their_memory.gave_a_factor(row):
        return True
    if paper == "gsplit":
        return metric.startswith(mini_batches.SAMPLED)
    if (paper, dataset) == ("gnnpipe", "reddit"):
        return (strategy, metric) == ("graph_parallel", "comm_volume_bytes")
    if (paper, dataset) == ("pipegcn", "ogbn-products"):
        return strategy == "graph_parallel" and row["gpus_per_node"] == "5" and metric in ("comm_ratio", "throughput_epochs_per_s")
    return (paper, dataset) == ("pipegcn", "ogbn-papers100M") and metric.startswith(("epoch_time", "comm_time"))


def score(rows: Iterable[Row], fitted: Callable[[Row], bool] = gave_a_halo, testbeds: Testbeds = testbed) -> dict[str, Any]:
    """{"rows": each with "predicted", "error" (relative; of facts and shares the difference) and "fitted", "skipped": each with "why",
    "summary": by metric {"n", "mape", "p95", "max"} over rows that nothing was fitted to, and {"winner": {"n", "right"}}}."""
    done: list[dict[str, Any]] = []
    skipped: list[dict[str, Any]] = []
    for row in rows:
        plain = {name: row[name] for name in COLUMNS}
        try:
            predicted = predict(row, testbeds)
        except (Skip, GnnplanError) as error:
            skipped.append({**plain, "why": str(error)})
            continue
        value = float(row["value"])
        relative = value != 0 and not row["metric"].startswith("fits_in") and not row["metric"].endswith(("_ratio", "_fraction_vs"))
        done.append({**plain, "predicted": predicted, "error": predicted / value - 1 if relative else predicted - value,
                     "fitted": fitted(row)})  # fmt: skip
    summary: dict[str, Any] = {}
    for metric in sorted({row["metric"] for row in done}):
        errors = [abs(row["error"]) for row in done if row["metric"] == metric and not row["fitted"]]
        if errors:
            summary[metric] = {"n": len(errors), "mape": mean(errors), "p95": float(np.percentile(errors, 95)), "max": max(errors)}
    return {"rows": done, "skipped": skipped, "summary": {**summary, "winner": _winners(done)}}


def _winners(done: list[dict[str, Any]]) -> dict[str, int]:
    """Of two strategies for one job whose printed times differ: whether the faster one is named."""
    pairs: list[tuple[float, float]] = []  # printed and predicted: how many times as long the second takes
    by_job: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for row in done:
        if row["metric"] == "epoch_time_s":
            by_job.setdefault(tuple(row[name] for name in JOB), []).append(row)
        elif row["metric"] == "speedup_vs":
            pairs.append((float(row["value"]), row["predicted"]))
        elif row["metric"] == "slowdown_fraction_vs":
            pairs.append((1 / (1 + float(row["value"])), 1 / (1 + row["predicted"])))
    for rows in by_job.values():
        for a, b in combinations(rows, 2):
            if a["strategy"] != b["strategy"]:
                pairs.append((float(b["value"]) / float(a["value"]), b["predicted"] / a["predicted"]))
    told = [(printed, predicted) for printed, predicted in pairs if max(printed, 1 / printed) > 1 + DIFFERENT]
    return {"n": len(told), "right": sum((printed - 1) * (predicted - 1) > 0 for printed, predicted in told)}
