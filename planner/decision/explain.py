"""The reasons for a plan, as the sentences that `gnnplan plan --explain` prints.

They include the speeds of links and devices, and the numbers of layers, that would change the
choice (`turning_sentences`). summary.py has the few lines at the beginning of every plan.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice

import numpy as np

from gnnplan.planner.cluster import scaling as scaled
from gnnplan.planner.cluster.places import Port, describe_port
from gnnplan.planner.cluster.spec import Cluster
from gnnplan.planner.decision.candidate import SURE_SHARE, Candidate
from gnnplan.planner.decision.objective import ONE, with_fields
from gnnplan.planner.decision.search import SearchResult, recommend
from gnnplan.planner.gnn.workload import ALL
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies import Strategy, families, parse
from gnnplan.planner.vocabulary.errors import GnnplanError
from gnnplan.planner.vocabulary.files import Json, quoted
from gnnplan.planner.vocabulary.numbers import Floats, Number
from gnnplan.planner.vocabulary.progress import notify
from gnnplan.planner.vocabulary.units import show_bytes, show_count, show_percent, show_time

TRY_BOTH = ": run both for a few epochs (gnnplan tune)"


def explain(found: SearchResult, turning_points: Sequence[str]) -> list[str]:
    """Return all reasons, the most important first.

    turning_points: the result of `turning_sentences`.
    """
    problem, best, by = found.problem, found.best, found.objective
    counted = "" if by.is_plain else f"; compared by {by.of} {by.span}: {by.show(best.value)}"
    out = [
        f"{best.strategy}: {show_time(best.epoch_s)} per epoch; bottleneck:"
        f" {best.predicted.bottleneck}{counted}",
        *why_these_gpus(found),
        *tightest(best),
        *rounded_rows(problem),
        *before_the_first_epoch(best),
        *convergence(best.strategy, problem.workload.model),
        *why_not(found),
        *within_doubt(found),
        *turning_points,
    ]
    if problem.workload.mode == "mini":
        out.append(batches_of(problem, best.strategy))
    return out + of_families(found)


# -- the recommendation ------------------------------------------------------------------------


def why_these_gpus(found: SearchResult) -> list[str]:
    """Say whether all GPUs are worth using, and why ranks are not in the order of the GPUs."""
    problem, best, by, out = found.problem, found.best, found.objective, []
    used = best.problem.ranks
    other = next(
        (c for c in found.others if (c.problem.ranks == problem.ranks) != (used == problem.ranks)),
        None,
    )
    if other is not None and (slower := other.value / best.value - 1) >= 0:
        too_little = ": the graph gives more of them too little to do" * by.is_plain
        are = "is" if used == 1 else "are"
        choice = f"{used} of {problem.ranks} GPUs {are} {by.less} than all{too_little}; on all"
        if used == problem.ranks:
            hardly = "" if slower >= 0.005 else "hardly "
            choice = f"All {used} GPUs are {hardly}worth using: on {other.problem.ranks}"
        worse = f"{show_percent(slower)} {by.more}"
        out.append(f"{choice} of them the {by.least} is {other.strategy}, {worse}")
    in_order = best.problem.placed(tuple(sorted(best.problem.cost.placement)))
    if in_order.placement != best.problem.placement:
        in_order_s = float(best.strategy.predict(in_order).epoch_s)
        slower = in_order_s / best.epoch_s - 1
        if slower >= 0.005:  # an exchange hidden behind computation is as fast anywhere
            out.append(
                "Ranks sit where their traffic takes the fast links: in the order of the GPUs an"
                f" epoch would be {show_percent(slower)} slower"
            )
    return out


def tightest(best: Candidate) -> list[str]:
    """Name the port that is busy longest, and the busiest port of every other kind."""
    cost, cluster = best.problem.cost, best.problem.cluster
    busy_s = defaultdict[Port, float](float)
    for sent in best.strategy.traffic(best.problem):
        for port, seconds in cost.exchange(sent).busy.items():
            busy_s[port] += seconds
    busiest_of_kind: dict[str, Port] = {}
    for port in sorted(busy_s, key=lambda port: (-busy_s[port], port)):
        busiest_of_kind.setdefault(port[0].split("_")[0], port)
    if not busiest_of_kind:
        return []
    first, *others = busiest_of_kind.values()
    words = ", ".join(
        f"{describe_port(cluster, cost.placement, port)}:"
        f" {show_percent(busy_s[port] / busy_s[first])} of this time"
        for port in others
    )
    return [
        "Messages between ranks keep"
        f" {describe_port(cluster, cost.placement, first)} busy longest"
        + (f" (other links: {words})" if words else "")
    ]


def rounded_rows(problem: Problem) -> list[str]:
    """Describe rounded rows or products, and their predicted rate; empty without rounding."""
    precision = problem.workload.precision
    if not precision.rounds:
        return []
    cost = [rounding_cost()] if precision.rounds_rows else []
    return ["; ".join([precision.rounds, rounded_products(problem), *cost])]


def rounding_runs() -> list[Json]:
    """Return the measured costs of rounded rows in test accuracy, JSON-ready.

    points: difference from float32, ± two_errors (two standard errors of paired differences), both
    in percentage points.
    """
    kinds = {"graph": str, "model": str, "seeds": int, "points": float, "two_errors": float}
    return [
        {name: kind(row[name]) for name, kind in kinds.items()} for row in quoted("rounding.csv")
    ]


def rounding_cost() -> str:
    """Describe the measured costs of rounded rows."""
    measured = [
        f"{run['points']:+.2f} ± {run['two_errors']:.2f} points on {run['graph']}"
        f" ({run['model']}, {run['seeds']} seeds)"
        for run in rounding_runs()
    ]
    return f"what rounding cost in test accuracy: {', '.join([*measured, 'on this graph unknown'])}"


def rounded_products(problem: Problem) -> str:
    """Compare the device's rate of products in the workload's precision with that of float32."""
    device, dtype = problem.cluster.device, problem.workload.dtype
    own = device.multiplying(dtype)
    if own is device:
        measure = "gnnplan measure" + f" --dtype {dtype}" * problem.workload.precision.rounds_rows
        return (
            f"{dtype} products are priced at float32's rate, for this device's own is not known"
            f" (`{measure}` measures it)"
        )
    ratio = own.gemm / device.gemm
    return (
        f"{dtype} products run at {ratio:.2g} {'of' if ratio < 1 else 'times'} float32's rate here"
    )


def before_the_first_epoch(best: Candidate) -> list[str]:
    """List the seconds of the set-up; those of partitioning are unknown without the graph."""
    seconds = dict(best.strategy.preparation(best.problem))
    if not best.problem.stats.known:
        seconds.pop("partitioning", None)
    parts = [f"{name} {show_time(duration)}" for name, duration in seconds.items()]
    if not best.problem.stats.known:
        parts.append("partitioning unknown")
    return [f"Before the first epoch: {', '.join(parts)}"] if parts else []


def convergence(strategy: Strategy, model: str) -> list[str]:
    """Return the measured cost of a lossy strategy in accuracy and epochs; empty if exact."""
    if strategy.exact:
        return []
    rows = [
        row for row in quoted("convergence.csv") if parse(row["strategy"]).approximates_as(strategy)
    ]
    rows = [row for row in rows if row["model"] == model] or rows
    if not rows:
        return [
            f"{strategy} is lossy; what that costs in epochs to the same accuracy has"
            " not been measured: unknown"
        ]
    measured = dict.fromkeys(
        f"{float(row['points']):+.2f} ± {row['two_errors'] or '?'} points of test accuracy,"
        f" {row['epochs_ratio'] or 'unknown'} times the epochs on {row['graph']} with"
        f" {row['model']} ({row['ranks']} ranks, {row['seeds']} seeds)"
        for row in rows
    )
    return [
        f"{strategy} is lossy. Measured against one process (± two standard errors):"
        f" {'; '.join(measured)}. On this graph: unknown"
    ]


# -- other strategies --------------------------------------------------------------------------


def why_not(found: SearchResult) -> list[str]:
    """Say of every other family how much worse its best candidate is, and in which part."""
    best, out = found.best, []
    for family in families():
        if type(best.strategy) is family:
            continue
        fastest = next((c for c in found.ranked if type(c.strategy) is family), None)
        if fastest is None:
            continue
        slower = fastest.value / best.value - 1
        if slower < 0 and found.measured:
            name = name_beside(fastest, best)
            out.append(f"{name} is faster by prediction, but the choice was measured")
        elif slower < 0:
            out += [doubted(fastest, best)] if fastest is not found.others[0] else []
        else:
            out.append(
                f"{name_beside(fastest, best)} is {show_percent(slower)} {found.objective.more}:"
                f" {largest_difference(fastest, best)}"
            )
    return out


def largest_difference(candidate: Candidate, best: Candidate) -> str:
    """Return the part of the epoch in which a candidate loses most, '1.55 s more computation'.

    If the objective is not the time of an epoch: '1.55 s per epoch, 60 epochs'.
    """
    if not candidate.objective.is_plain:
        epochs = f", {candidate.epochs.usual:.0f} epochs" if candidate.epochs != ONE else ""
        return f"{show_time(candidate.epoch_s)} per epoch{epochs}"
    ours, theirs = best.predicted, candidate.predicted
    parts = {
        "computation": float(theirs.compute_s) - float(ours.compute_s),
        "exposed communication": float(theirs.comm_s) - float(ours.comm_s),
        "waiting": float(theirs.bubble_s) - float(ours.bubble_s),
    }
    worst = max(parts, key=lambda part: parts[part])
    return f"{show_time(parts[worst])} more {worst}"


def doubted(candidate: Candidate, best: Candidate) -> str:
    """Say why a candidate with a better predicted value is not recommended."""
    gain, less = best.value / candidate.value - 1, best.objective.less
    chance, name = show_percent(candidate.chance_faster(best)), name_beside(candidate, best)
    is_larger = candidate.problem.ranks > best.problem.ranks
    if is_larger and candidate.value * best.objective.slack > best.value:
        return (
            f"{name} is {show_percent(gain, 1)} {less}; below"
            f" {show_percent(best.objective.slack - 1)} is not worth more GPUs"
        )
    return (
        f"{name} is {show_percent(gain, 1)} {less} by prediction, within doubt"
        f" ({chance} likely){', and lossy' if not candidate.is_comparable else ''}"
    )


def name_beside(candidate: Candidate, best: Candidate) -> str:
    """Return the candidate's strategy, with the number of GPUs if it is not the best's."""
    used = candidate.problem.ranks
    where = "" if used == best.problem.ranks else f" on {show_count(used, 'GPU')}"
    return f"{candidate.strategy}{where}"


def of_families(found: SearchResult) -> list[str]:
    """Return each family's sentences about the problem, and the savings of its packed rows."""
    problem, out = found.problem, list[str]()
    on_all = [c.strategy for c in found.ranked if c.problem.ranks == problem.ranks]
    for family in families():
        if family.mode == problem.workload.mode:
            fastest = next((strategy for strategy in on_all if type(strategy) is family), None)
            out += packed_rows(problem, fastest) if fastest and fastest.codec.packs else []
            out += family.explain(problem, fastest)
    return list(dict.fromkeys(out))


def packed_rows(problem: Problem, packed: Strategy) -> list[str]:
    """Compare bytes and seconds of packed rows with the same strategy without packing."""
    plain = packed.with_whole_rows()
    with_packing, without = packed.predict(problem), plain.predict(problem)
    packed_bytes, plain_bytes = (
        show_bytes(each.bytes.get("halo", 0) + each.bytes.get("pipeline", 0))
        for each in (with_packing, without)
    )
    by_op = with_packing.by_op
    packing_s = sum(float(by_op[op]) for op in by_op if op.startswith(("pack", "unpack")))
    return [
        f"{packed} sends {packed_bytes} of rows and their gradients per epoch, {plain}"
        f" {plain_bytes}; to pack and unpack them takes {show_time(packing_s)} of"
        f" {show_time(float(with_packing.epoch_s))}, and {plain} takes"
        f" {show_time(float(without.epoch_s))}"
    ]


def others_than_best(found: SearchResult) -> list[Candidate]:
    """Return the other candidates; another placement of the best on as many GPUs is no other."""
    best = str(found.best.strategy), found.best.problem.ranks
    return [c for c in found.others if (str(c.strategy), c.problem.ranks) != best]


def within_doubt(found: SearchResult) -> list[str]:
    """Say whether the runner-up may be better than the recommended strategy; empty if not."""
    others = others_than_best(found)
    if not others or found.measured:
        return []
    first, second = found.best, others[0]
    gap, objective = second.value / first.value - 1, found.objective
    if gap < 0 and second.is_comparable:
        return [doubted(second, first)]
    if gap < 0:
        return [
            f"{doubted(second, first)}; {first.strategy} is exact, and a lossy strategy has to be"
            f" {objective.less} with a chance of {show_percent(SURE_SHARE)}"
        ]
    chance = second.chance_faster(first)
    if chance < 1 - SURE_SHARE:
        return []
    return [
        f"{name_beside(second, first)} is {show_percent(gap, 1)} {objective.more} than"
        f" {first.strategy} by prediction, and {objective.less} with a chance of"
        f" {show_percent(chance)}"
        f"{TRY_BOTH if objective.is_plain else ''}"
    ]


# -- mini-batches ------------------------------------------------------------------------------


def batches_of(problem: Problem, strategy: Strategy) -> str:
    """Say how many updates of the weights an epoch has, and the size of their batches."""
    workload = problem.workload
    fanouts = ", ".join("all" if f == ALL else str(f) for f in workload.fanouts)
    items = "seeds"
    if workload.task == "link":
        items = f"edges and {show_count(workload.negatives, 'negative')} of each,"
    return (
        f"An epoch is {strategy.steps(problem)} updates of the weights, each on a batch of"
        f" {workload.batch:,} {items} with neighbours drawn {fanouts} (from the seeds outwards)"
    )


# -- numbers that would change the choice ----------------------------------------------------------

# The candidates of a search are predicted again with one number of the cluster multiplied, and
# compared by the plan's objective. If an exact strategy is recommended, only exact strategies are
# compared. For other numbers of layers the search is repeated, if all reasons are requested.

REACH = 8  # factors on a bandwidth or the device's speed are between 1 / REACH and REACH
STEPS = 96  # factors from 1 to REACH, 2.2 % apart
ABOVE = np.geomspace(1, REACH, STEPS + 1)[1:]
FACTORS = [2.0, 1.0, *1 / ABOVE, *ABOVE]
MOST_EDGES = 2_000_000  # most edges of a graph for other depths, which need new layouts
MOST_ESTIMATED = 64  # most GPUs if only statistics of the graph are known; more take too long
Scaled = Callable[[Cluster, Number], Cluster]
Best = tuple[list[Candidate], Floats]  # the best rival at each factor, and its value


def turning_sentences(found: SearchResult) -> list[str]:
    """Return the change by doubling each number of the cluster, and where another family wins.

    As 'twice the bandwidth between servers: -18 %', 'below 0.31x of it (..) granndis wins'. Empty
    for statistics on more than MOST_ESTIMATED GPUs, and if runs chose another strategy than
    predictions would.
    """
    best = found.best.problem
    cluster = best.cluster
    if _runs_disagree(found) or (not best.stats.known and cluster.ranks > MOST_ESTIMATED):
        return []
    notify("asking what would change the choice", "links and devices")
    asked = list[tuple[str, Scaled, float | None]]()
    if cluster.servers > 1 and cluster.inter_node:
        bandwidth = cluster.inter_node.bandwidth
        asked.append(("the bandwidth between servers", _links("inter_node"), bandwidth))
    if cluster.gpus_per_server > 1:
        inside = [name for name in ("island", "switch") if getattr(cluster, name)]
        # with several kinds of links there is no single bandwidth to name
        only = None if inside else cluster.intra_node.bandwidth
        asked.append(("the bandwidth inside servers", _links("intra_node", *inside), only))
    asked.append(("the device's speed", scaled.device, None))
    names, scales, bandwidths = zip(*asked, strict=True)
    answers = zip(names, bandwidths, best_at(found, scales), strict=True)
    return [sentence for answer in answers for sentence in _sentences_of(found, *answer)]


def _links(*names: str) -> Scaled:
    return lambda cluster, by: scaled.links(cluster, by, names)


def _sentences_of(
    found: SearchResult, name: str, bandwidth: float | None, at_factors: Best
) -> Iterator[str]:
    """Yield the change by doubling one number, and the factors at which another family wins.

    at_factors: the best at each of FACTORS.
    """
    winners, values = at_factors
    change = values[0] / found.best.value - 1
    yield f"twice {name}: {show_percent(change, sign=True)}"
    _, fastest, *others = winners
    for word, factors, best in (
        ("below", 1 / ABOVE, others[:STEPS]),
        ("above", ABOVE, others[STEPS:]),
    ):
        turns = zip(factors.tolist(), best, strict=True)
        turn = next((t for t in turns if t[1].strategy.name != fastest.strategy.name), None)
        if turn is not None:
            factor, winner = turn
            value = ""
            if bandwidth:
                value = f" ({show_bytes(factor * bandwidth)}/s, now {show_bytes(bandwidth)}/s)"
            digits = 3 if 1 < factor < 1.05 else 2  # 1.02x, not 1x
            yield f"{word} {factor:.{digits}g}x of {name}{value} {winner.strategy} wins"


def best_at(found: SearchResult, scales: Sequence[Scaled]) -> list[Best]:
    """Return, for each number of the cluster, the best rivals if it is times each of FACTORS.

    If the recommended strategy is exact, its rivals are exact. Each rival is predicted once, for
    all numbers and factors.
    """
    columns = np.ones((len(scales), len(scales), len(FACTORS)))
    columns[range(len(scales)), range(len(scales))] = FACTORS

    def all_values(c: Candidate) -> Floats:
        cluster = c.problem.cluster
        for scale, column in zip(scales, columns, strict=True):
            cluster = scale(cluster, column.reshape(-1, 1))
        epoch_s = c.strategy.epoch_s(replace(c.problem, cluster=cluster))
        values = np.ravel(c.objective.value(c.problem, c.strategy, epoch_s))
        return np.broadcast_to(values, columns[0].size).reshape(columns[0].shape)

    values = np.stack([all_values(c) for c in found.rivals], axis=1)  # [scales, rivals, factors]
    return [([found.rivals[i] for i in each.argmin(axis=0)], each.min(axis=0)) for each in values]


def _runs_disagree(found: SearchResult) -> bool:
    """Whether runs chose another strategy than predictions would."""
    return bool(found.measured) and found.measured is not recommend(found.ranked)


def of_depths(found: SearchResult) -> Iterator[str]:
    """Yield the nearest of a half, a quarter and twice the layers at which another family wins.

    As 'at 8 layers granndis wins'. Each number of layers takes a search, so a plan includes these
    sentences only if all reasons are requested. Empty if runs chose another strategy than
    predictions would.
    """
    best = found.best
    problem, layers = best.problem, best.problem.workload.layers
    if (
        _runs_disagree(found)
        or problem.workload.mode == "mini"  # another depth needs other fanouts, which are unknown
        or problem.workload.module  # a user's module has its own depth
        or found.objective.target  # no run shows how many epochs another depth needs
        or found.forced
        or not problem.stats.known
        or problem.stats.edges > MOST_EDGES
    ):
        return

    def winner(count: int) -> str:
        notify("asking what would change the choice", show_count(count, "layer"))
        try:
            return found.how(with_fields(found.problem, layers=count)).best.strategy.name
        except GnnplanError:
            return ""

    for counts in ((layers // 2, layers // 4), (layers * 2,)):
        winners = ((count, winner(count)) for count in counts if count)
        others = ((count, name) for count, name in winners if name not in ("", best.strategy.name))
        for count, name in islice(others, 1):
            yield f"at {show_count(count, 'layer')} {name} wins"
