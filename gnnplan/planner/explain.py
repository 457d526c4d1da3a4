"""Why a plan says what it says: what binds, why the others lost, what would change the choice, what an approximation costs."""

from __future__ import annotations

import csv
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import median

import numpy as np

from gnnplan.planner import formulas
from gnnplan.planner.errors import Infeasible
from gnnplan.planner.estimate import EstimatedLayout
from gnnplan.planner.graph import Graph
from gnnplan.planner.job import Job
from gnnplan.planner.layout import Layout
from gnnplan.planner.places import Port
from gnnplan.planner.search import Candidate, Found, search
from gnnplan.planner.sensitivity import sentences
from gnnplan.planner.specs import ALL
from gnnplan.planner.strategies import FAMILIES, GraNNDis, GSplit, Strategy, parse
from gnnplan.planner.strategies.granndis import FANOUT, MAX_HOP
from gnnplan.planner.topology import told
from gnnplan.planner.units import show_bytes, show_time
from gnnplan.progress import Tell, silent

HIDDEN = (16, 32, 64, 128, 256, 512)  # as in P3's Fig. 15
TRACES = Path(__file__).resolve().parent.parent / "traces"  # what we have measured: who, on what, when


def explain(job: Job, found: Found, exact: bool, tell: Tell = silent) -> list[str]:
    """Sentences, the most important first."""
    best = found.ranked[0]
    t = float(best.predicted.epoch_s)
    out = [f"{best.strategy}: {show_time(t)} per epoch; bottleneck: {best.predicted.bottleneck}", *why_these_gpus(job, found),
           *tightest(best)]  # fmt: skip
    if not job.stats.known:
        counted = ", ".join(map(str, sorted(job.stats.halo_rows)))
        what = ("frontiers are estimated from degrees, and are off by a fifth on real graphs" if job.workload.mode == "mini" else
                f"halo sizes follow from those counted at {counted} parts" if counted else "halo sizes are usual ones")
        out.append(f"The graph is known by statistics only: {what}, and the plan cannot be run.")
    parts = best.strategy.preparation(best.job)
    if parts:
        out.append(f"Before the first epoch: {', '.join(f'{name} {show_time(seconds)}' for name, seconds in parts.items())}")
    out += convergence(best.strategy, job.workload.model)
    out += why_not(found)
    out += within_noise(found)
    if job.stats.known:
        out += sentences(found, exact, tell)
    if job.workload.mode == "full":
        return out + granndis_conditions(job)
    out += [batches_of(job, best.strategy), *done_twice(job, found), *p3_conditions(job)]
    return out if found.forced else out + full_graph(job, best, exact, tell)


def tightest(best: Candidate) -> list[str]:
    """The busiest link of what its ranks send each other, and the busiest of every other kind."""
    cost = best.job.cost
    busy: dict[Port, float] = {}
    for sent, times in best.strategy.traffic(best.job):
        for port, seconds in cost.exchange(sent).busy.items():
            busy[port] = busy.get(port, 0.0) + times * float(seconds)
    kinds: dict[str, Port] = {}
    for port in sorted(busy, key=lambda port: (-busy[port], port)):
        kinds.setdefault(port[0].split("_")[0], port)
    if not kinds:
        return []
    first, *others = kinds.values()
    words = [f"{told(best.job.cluster, cost.seats, port)}: {busy[port] / busy[first]:.0%} of that" for port in others]
    return [f"What ranks send each other keeps {told(best.job.cluster, cost.seats, first)} busy longest"
            + (f" (of other links {', '.join(words)})" if words else "")]  # fmt: skip


def batches_of(job: Job, strategy: Strategy) -> str:
    fanouts = ", ".join("all" if f == ALL else str(f) for f in job.workload.fanouts)
    return (f"An epoch is {strategy.steps(job)} updates of the weights, each on a batch of {job.workload.batch:,} seeds with neighbours "
            f"drawn {fanouts} (from the seeds outwards)")  # fmt: skip


def full_graph(job: Job, best: Candidate, exact: bool, tell: Tell) -> list[str]:
    """The same GNN on the full graph, on one scale: time per epoch."""
    tell("weighing the full graph beside mini-batches")
    whole = replace(job, workload=job.workload.model_copy(update={"mode": "full"}), _layouts={}, _batches={}, _mini={})
    try:
        other = search(whole, exact, may_use_fewer=False).ranked[0]
    except Infeasible:
        return ["The full graph does not fit: only mini-batches train this"]
    ratio = float(other.predicted.epoch_s) / float(best.predicted.epoch_s)
    return [f"On the full graph {other.strategy} takes {show_time(float(other.predicted.epoch_s))} per epoch, {ratio:.2g} times as "
            "long, for one update; in how many epochs either reaches the same accuracy depends on the graph: unknown"]


def done_twice(job: Job, found: Found) -> list[str]:
    """What ranks that sample each for themselves read and compute more than those that split a batch; as GSplit Table 1."""
    split = next((c.strategy for c in found.ranked if isinstance(c.strategy, GSplit) and c.job.ranks == job.ranks), None)
    if split is None:
        return []
    pairs = zip(job.minibatches(tuple(range(job.ranks))).first(), split.batches(job).first(), strict=False)
    counts = [[(int(batch.row_counts(0).sum()), sum(int(batch.facts(layer).edges.sum()) for layer in range(1, job.workload.layers + 1)))
               for batch in pair] for pair in pairs]  # fmt: skip
    (rows, edges), (shared_rows, shared_edges) = np.sum(counts, axis=0).tolist()
    return [f"Sampling each for itself, ranks read {rows / max(shared_rows, 1):.2f} times the rows of features that they read splitting a "
            f"batch ({split}), and compute {edges / max(shared_edges, 1):.2f} times the edges"]


def p3_conditions(job: Job) -> list[str]:
    """Where P3's partial sums are smaller than the features that spreading them over servers would fetch, from the mean batch; as P3
    Fig. 15. Shown, not deciding."""
    slices = len(set(job.servers)) if len(set(job.servers)) > 1 else job.ranks
    if slices == 1 or not isinstance(job.graph, Graph):
        return []
    batches = job.minibatches(tuple(range(job.ranks))).first()
    rows, inputs = np.mean([(batch.facts(1).rows.sum(), batch.facts(1).sources.sum()) for batch in batches], axis=0).tolist()
    b = job.model.itemsize
    width = max(1, round(job.model.features_moved(1.0) / b))  # numbers of a row in transit
    even = float(formulas.p3_break_even(slices, inputs, rows, width))
    fetched = float(formulas.remote_feature_bytes(slices, inputs, width, b))
    table = ", ".join(f"{hidden}: {show_bytes(float(formulas.p3_bytes(slices, rows, hidden, b)))}" for hidden in HIDDEN)
    name = "hidden" if job.model.layers[0].h_out == job.workload.hidden else "classes"  # which makes layer 1's rows as wide as they are
    return [f"P3 stops paying at {name} {even:.0f} (feature rows of {width} numbers; {rows:,.0f} rows of layer 1, "
            f"{inputs:,.0f} inputs a batch, columns on {slices}): by {name}, partial sums take {table} per batch; features spread so would "
            f"fetch {show_bytes(fetched)}"]


def why_not(found: Found) -> list[str]:
    """For every family that lost: by how much, and to what."""
    best, out = found.ranked[0], []
    for family in FAMILIES:
        theirs = [c for c in found.ranked if isinstance(c.strategy, family)]
        if not theirs or isinstance(best.strategy, family):
            continue
        other, p = theirs[0].strategy, theirs[0].predicted
        more = float(p.epoch_s) / float(best.predicted.epoch_s) - 1
        parts = {"computation": float(p.compute_s) - float(best.predicted.compute_s),
                 "exposed communication": float(p.comm_s) - float(best.predicted.comm_s),
                 "bubble": float(p.bubble_s) - float(best.predicted.bubble_s)}  # fmt: skip
        worst = max(parts, key=lambda k: parts[k])
        out.append(f"{other} is {more:.0%} slower: {show_time(parts[worst])} more {worst}")
    return out


def within_noise(found: Found) -> list[str]:
    """Whether the first two are closer than our predictions have been to measured steps."""
    off = prediction_error()
    if len(found.ranked) < 2 or off is None:
        return []
    first, second = found.ranked[:2]
    gap = float(second.predicted.epoch_s) / float(first.predicted.epoch_s) - 1
    if gap >= off:
        return []
    return [f"{first.strategy} and {second.strategy} differ by {gap:.1%}, less than predictions were off when measured (median {off:.0%}): "
            "run both for a few epochs"]  # fmt: skip


@cache
def prediction_error() -> float | None:
    """Median |predicted / measured - 1| of the epochs in traces/measured.csv."""
    rows = _rows("measured.csv")
    return median(abs(float(row["predicted_s"]) / float(row["measured_s"]) - 1) for row in rows) if rows else None


def convergence(strategy: Strategy, model: str) -> list[str]:
    """What an approximation cost in accuracy and epochs where it was measured; nothing to say of an exact strategy."""
    if strategy.exact:
        return []
    rows = [row for row in _rows("convergence.csv") if parse(row["strategy"]).approximates_as(strategy)]
    rows = [row for row in rows if row["model"] == model] or rows
    if not rows:
        return [f"{strategy} changes the gradient; what that costs in epochs to the same accuracy has not been measured: unknown"]
    told = [f"{float(row['points']):+.2f} ± {row['two_errors'] or '?'} points of test accuracy, {row['epochs_ratio'] or 'unknown'} times "
            f"the epochs on {row['graph']} with {row['model']} ({row['ranks']} ranks, {row['seeds']} seeds)" for row in rows]  # fmt: skip
    return [f"{strategy} changes the gradient. Measured against one process (± two standard errors): {'; '.join(told)}. On this graph: "
            "unknown"]


@cache
def _rows(name: str) -> list[dict[str, str]]:
    path = TRACES / name
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def why_these_gpus(job: Job, found: Found) -> list[str]:
    """How many of them, and where ranks sit if not in the order of their GPUs."""
    best, out = found.ranked[0], []
    t, used = float(best.predicted.epoch_s), best.job.ranks
    other = next((c for c in found.ranked if (c.job.ranks == job.ranks) != (used == job.ranks)), None)
    if other is not None:
        more = float(other.predicted.epoch_s) / t - 1
        if used < job.ranks:
            out.append(f"{used} of {job.ranks} GPUs are faster than all: the graph gives more of them too little to do; on all of them "
                       f"the fastest is {other.strategy}, {more:.0%} slower")  # fmt: skip
        else:
            out.append(f"All {used} GPUs are worth using: on {other.job.ranks} of them the fastest is {other.strategy}, {more:.0%} slower")
    in_order = best.job.seated(tuple(sorted(best.job.cost.seats)))
    if in_order.seats != best.job.seats:
        more = float(best.strategy.predict(in_order).epoch_s) / t - 1
        if more >= 0.005:  # a stale exchange may be hidden wherever its ranks sit
            out.append(f"Ranks sit where their traffic takes the fast links: in the order of the GPUs an epoch would be {more:.0%} slower")
    return out


def granndis_conditions(job: Job) -> list[str]:
    """GraNNDis Eq. 3-9 as printed, and with the measured growth in the place of D^a L and m^a k. Shown, never deciding."""
    servers, gpus, stats = job.cluster.servers, job.cluster.gpus_per_server, job.stats
    if servers == 1:
        islands = " But islands may preload, which those conditions do not know." if len(job.cluster.islands) > 1 else ""
        return [f"GraNNDis: one server, so nothing crosses servers and preloading is plain graph parallel.{islands}"]
    assert job.cluster.inter_node is not None
    degree = stats.edges / max(stats.vertices, 1)
    width = job.workload.hidden * job.workload.itemsize
    model, layers = job.model, job.workload.layers
    whole = [model.forward(x, stats.vertices, stats.vertices, stats.edges) + model.backward(x, stats.vertices, stats.vertices, stats.edges)
             for x in range(1, layers + 1)]  # fmt: skip
    compute = stats.vertices / float(sum(job.cost.compute_s(work) for work in whole))
    inside = job.cluster.intra_node.bandwidth / (2 * width * max(layers - 1, 1))
    outside = job.cluster.inter_node.bandwidth / gpus / (2 * width * max(layers - 1, 1))
    own = stats.vertices / servers

    def grown(layout: Layout | EstimatedLayout) -> float:
        """Measured growth of a server's part, mean over servers."""
        if isinstance(layout, Layout):
            rows = sum(layout.rows(r, 0).size for r in range(layout.ranks)) / servers
        else:
            rows = float((layout.facts(1).sources - layout.facts(1).taken).sum()) / servers
        return float(formulas.growth_measured(own, max(rows - own, 0.0)))

    measured = grown(job.layout(layers))
    printed = float(formulas.growth_printed(1.75, layers))  # D^a lies in 1.5-2.0
    before = float(formulas.t_previous(stats.vertices, stats.edges, servers, gpus, compute, inside, outside))
    lines = [f"GraNNDis Eq. 3: T_prev = {show_time(before)} (C = {compute:.3g}, B_int = {inside:.3g}, B_ext = {outside:.3g} vertices/s, "
             f"D = {degree:.1f})"]
    for name, growth in ((f"as printed, D^a L = 1.75 x {layers} =", printed), ("measured growth of a server's part,", measured)):
        after = float(formulas.t_preload(stats.vertices, stats.edges, servers, gpus, compute, inside, max(growth, 1e-9)))
        threshold = float(formulas.preload_threshold(growth, degree)) if degree else float("inf")
        in_range = name.startswith("measured") or formulas.preload_in_range(growth, servers, gpus)
        valid = "" if in_range else f" (outside Eq. 5: 1 < {growth:.1f} <= {servers * gpus} fails)"
        wins = compute / outside > threshold
        lines.append(f"GraNNDis Eq. 4, 7 {name} {growth:.2f}: T_preload = {show_time(after)}; C/B_ext = {compute / outside:.3g} "
                     f"{'>' if wins else '<='} {threshold:.3g}: preloading {'wins' if wins else 'loses'}{valid}")  # fmt: skip
    sampling = GraNNDis(max_hop=MAX_HOP, fanout=FANOUT)
    exponent = np.log(1.75) / np.log(degree) if degree > 1 else 0.0
    growth = float(formulas.growth_sampling(MAX_HOP, FANOUT, exponent))
    after = float(formulas.t_sampling(stats.vertices, stats.edges, servers, gpus, compute, inside, growth))
    valid = "" if formulas.sampling_in_range(growth, printed, servers, gpus) else (
        f" (outside Eq. 9: 1 < {growth:.1f} << {printed:.1f} <= {servers * gpus} fails)")
    lines.append(f"GraNNDis Eq. 8 as printed, m^a k = {MAX_HOP}^a x {FANOUT} = {growth:.2f}: T_sampling = {show_time(after)}{valid}")
    growth = grown(sampling.layout(job))
    after = float(formulas.t_preload(stats.vertices, stats.edges, servers, gpus, compute, inside, growth))
    threshold = float(formulas.preload_threshold(growth, degree)) if degree else float("inf")
    wins = compute / outside > threshold
    lines.append(f"With sampling (max_hop {MAX_HOP}, fanout {FANOUT}) the measured growth is {growth:.2f}: Eq. 4 gives {show_time(after)}; "
                 f"C/B_ext = {compute / outside:.3g} {'>' if wins else '<='} {threshold:.3g}: sampling {'wins' if wins else 'loses'}")
    return [*lines, "These conditions are shown, they do not decide: the ranking uses the measured rows of every layer."]
