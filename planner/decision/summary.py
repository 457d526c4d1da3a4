"""The lines at the beginning of every plan.

    use       pipegcn(narrow=True) on 8 GPUs; 4 ranks on each of 2 servers, in order; lossy ...
    range     ranges of an epoch, and of the training
    sure      the chance of being fastest, and a measurement that would raise it
    inputs    where the cluster's numbers come from
    tested    the runs that predictions have been compared with
    cost      epoch, memory, bytes, dollars
    close     the runner-up
    change    links, devices and depths with which another family wins

explain.py has all reasons.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

import numpy as np

from gnnplan.planner.decision.candidate import Candidate, evaluate_or_save_memory, range_of
from gnnplan.planner.decision.explain import (
    doubted,
    largest_difference,
    name_beside,
    others_than_best,
    rounded_products,
    within_doubt,
)
from gnnplan.planner.decision.objective import NEAR, ONE, unit_of
from gnnplan.planner.decision.search import SearchResult
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies import GraphParallel
from gnnplan.planner.vocabulary.errors import Infeasible, SpecError
from gnnplan.planner.vocabulary.files import quoted
from gnnplan.planner.vocabulary.units import (
    show_bytes,
    show_count,
    show_dollars,
    show_long,
    show_percent,
    show_range,
    show_time,
)

MOST_CHANGES = 2  # sentences in the line 'change'
NEARLY_FULL = 0.95  # share of a device's memory above which a plan warns
WORTH_SAYING = 0.005  # least reduction of the regret by a measurement that is named
WORTH_LAUNCHING = 1.1  # least ratio of epochs without and with CUDA graphs that is named
MOST_LISTED = 8  # most ranks whose GPUs are listed one by one
LINKS = {"intra_node": "inside servers", "inter_node": "between servers", "island": "over NVLink"}
GENERIC = "generic default"  # the provenance of a machine that nobody has measured
FITTED = "fitted to"  # how the provenance of a fitted constant reads (problem/inputs.py)


def summarise(found: SearchResult, turning_points: Sequence[str]) -> dict[str, str]:
    """Return the lines, keyed by their first word.

    turning_points: the result of `turning_sentences`.
    """
    problem, best = found.problem, found.best
    return {
        "use": recommendation(found),
        "range": ranges(found),
        "sure": certainty(found),
        "inputs": inputs(problem),
        "tested": tested(problem),
        "cost": costs(best) + alone(problem, best),
        "close": rivals(found),
        "change": changes(found, turning_points),
    }


def recommendation(found: SearchResult) -> str:
    """Name the strategy, the number of GPUs and the placement of the ranks."""
    problem, best = found.problem, found.best
    used = best.problem.ranks
    of_all = f"{used} of " if used < problem.ranks else ""
    number = f"{of_all}{show_count(problem.ranks, unit_of(problem.cluster))}"
    gradient = "lossy, not the exact gradient (--exact leaves such strategies out)"
    if best.strategy.exact:
        gradient = "the gradient is exact"
    asked = ", as --strategy asks" if found.forced else ""
    asked = ", as measured" if found.measured else asked
    return f"{best.strategy} on {number}{asked}; {where_ranks_sit(best)}; {gradient}"


def where_ranks_sit(best: Candidate) -> str:
    """Describe the placement of the ranks."""
    each, placement = best.problem.cluster.gpus_per_server, list(best.problem.cost.placement)
    if len(placement) == 1 and best.problem.on_cpu:
        return "alone on its machine"
    if len(placement) == 1:
        return f"on server {placement[0] // each}, GPU {placement[0] % each}"
    if placement == list(range(len(placement))):
        servers = -(-len(placement) // each)
        if servers == 1:
            return "all ranks on one server, in order"
        return f"{show_count(each, 'rank')} on each of {servers} servers, in order"
    if len(placement) > MOST_LISTED:
        servers = len({gpu // each for gpu in placement})
        return f"ranks on {show_count(servers, 'server')}, not in order (--explain lists them)"
    return "placed: " + ", ".join(
        f"rank {rank} on server {gpu // each} GPU {gpu % each}"
        for rank, gpu in enumerate(placement)
    )


def ranges(found: SearchResult) -> str:
    """Return the ranges of an epoch and of the objective's value, and the number of epochs."""
    best, objective = found.best, found.objective
    words = [f"an epoch takes {show_range(*range_of(best.drawn_s, best.epoch_s))}"]
    if best.epochs != ONE:
        low, high = map(show_long, range_of(best.drawn_time_s, best.time_s))
        words.append(f"the training {low} to {high}")
    if objective.of in ("cost", "energy"):
        low, high = (objective.show(value) for value in range_of(best.drawn, best.value))
        words.append(f"{objective.of} {objective.span}: {low} to {high}")
    epochs = f"; epochs: {best.epochs}" if best.epochs != ONE else ""
    return f"{', '.join(words)}, in 80 of 100 cases{epochs}"


def certainty(found: SearchResult) -> str:
    """Say how sure the choice is, and which measurement would make it surer."""
    outlook = found.certainty
    if found.measured:
        return "chosen by runs"
    if len(found.rivals) == 1:
        return "nothing else was compared" if found.forced else "nothing else may be chosen"
    more, least = found.objective.more, found.objective.least
    regret = show_percent(outlook.expected_regret, 1)
    rest = (
        "" if regret == show_percent(0, 1) else f"; expected to be {regret} {more} than the {least}"
    )
    settled = found.settled  # the constant whose measurement would lower the regret most
    if settled and outlook.expected_regret - settled.regret >= WORTH_SAYING:
        rest += f" ({show_percent(settled.regret, 1)} if {settled.constant} were measured)"
    if found.is_smaller:
        return f"the fewest GPUs within {show_percent(NEAR)} of the best value{rest}"
    among = of = ""
    if len(found.rivals) < len(found.ranked):
        of_all = show_percent(found.outlook(found.best).chance_fastest)
        among = "among exact strategies "
        if of_all != show_percent(outlook.chance_fastest):
            of = f" (among all {of_all})"
    chance = show_percent(outlook.chance_fastest)
    return f"{among}the {least} with a chance of {chance}{of}{rest}"


def inputs(problem: Problem) -> str:
    """Say where the numbers come from that the plan depends on."""
    words = [f"sources of the cluster's numbers: {sources(problem.cluster.provenance)}"]
    if problem.workload.precision.rounds:
        words.append(rounded_products(problem))
    if not problem.stats.known:
        counted = ", ".join(map(str, sorted(problem.stats.halo_rows)))
        source = f"halo sizes follow from those counted at {counted} parts"
        if problem.workload.mode == "mini":
            source = "frontiers are estimated from degrees, and are off by a fifth on real graphs"
        elif not counted:
            source = "halo sizes are usual ones"
        words.append(f"the graph is known by statistics only: {source}")
    return "; ".join(words)


def tested(problem: Problem) -> str:
    """Say which runs predictions have been compared with."""
    if not problem.on_cpu:
        return "predictions have been compared with runs on one GPU only"
    if set(problem.cluster.provenance.values()) == {GENERIC}:
        return "this machine has not been measured"
    rows = quoted("measured.csv")
    errors = [abs(float(row["predicted_s"]) / float(row["measured_s"]) - 1) for row in rows]
    return (
        f"{len(errors)} epochs on CPU ranks were predicted before they were run, and were off by"
        f" {show_percent(np.median(errors))} in the median, {show_percent(max(errors))} at most"
    )


def sources(provenance: dict[str, str]) -> str:
    """Count the sources of a cluster's numbers, as '7 datasheet, 3 assumed'."""
    kinds = Counter(
        text[text.index(FITTED) :].partition(" (")[0] if FITTED in text else _kind(text)
        for field, text in provenance.items()
        if "." in field  # fields without a dot, as servers, are no rates
    )
    if not kinds:
        return "unknown"
    words = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
    if set(provenance.values()) == {GENERIC}:
        words += " (`gnnplan measure` replaces them in a minute)"
    return words


def _kind(text: str) -> str:
    """Return the kind of source that a provenance names first.

    >>> _kind("as inside the server: measured 2026-11-25"), _kind("from a colleague")
    ('measured', 'given')
    """
    known = (GENERIC, "datasheet", "printed", "assumed", "measured", "--set")
    return min((kind for kind in known if kind in text), key=text.index, default="given")


def costs(best: Candidate) -> str:
    """List the epoch, the memory of the fullest rank (with a warning if it is nearly full), the
    bytes, and the dollars if the price is known."""
    predicted, device = best.predicted, best.problem.cluster.device
    links = ", ".join(
        f"{show_bytes(sent)} {LINKS.get(link, 'on ' + link)}"
        for link, sent in predicted.bytes_by_link.items()
    )
    words = [
        f"{show_time(best.epoch_s)} per epoch, {predicted.bottleneck}",
        f"{show_bytes(best.memory_bytes)} of {show_bytes(device.memory)} on the fullest rank",
        *nearly_full(best),
        f"sent per epoch: {links or 'nothing'}",
    ]
    if best.host_bytes:
        room = best.problem.cluster.graph_memory
        held = show_bytes(best.host_bytes) + (f" of {show_bytes(room)}" if room < np.inf else "")
        words.insert(2, f"{held} of graph data in the fullest server's memory")
    words += launched_one_by_one(best)
    if best.dollars is not None:
        words.append(f"{show_dollars(best.dollars)} per epoch")
    if best.epochs != ONE:
        words.append(f"{show_long(best.time_s)} {best.objective.span}")
    if best.objective.of in ("cost", "energy"):
        words.append(f"{best.objective.show(best.value)} {best.objective.span}")
    return "; ".join(words)


def launched_one_by_one(best: Candidate) -> list[str]:
    """Say how long an epoch would take at a constant learning rate, if that makes a difference.

    Steps whose learning rate changes are not replayed as CUDA graphs
    (`Problem.uses_cuda_graph`)."""
    problem, asked = best.problem, best.problem.workload
    if not asked.varies_lr:
        return []
    constant = asked.model_copy(update={"warmup": 0, "schedule": "constant"})
    other = Candidate.of(replace(problem, workload=constant), best.strategy)
    ratio = best.epoch_s / other.epoch_s
    if ratio < WORTH_LAUNCHING:
        return []
    return [
        "steps are launched kernel by kernel and not as CUDA graphs, since the learning rate"
        f" changes (warmup: {asked.warmup:,}, schedule: {asked.schedule}); with --set warmup=0"
        f" --set schedule=constant an epoch takes {show_time(other.epoch_s)}, {ratio:.1f}x faster"
    ]


def nearly_full(best: Candidate) -> list[str]:
    """Return a warning if the fullest rank leaves little memory on its device.

    The warning has the error of the prediction at which memory runs out, and an option that plans
    with more room."""
    room = best.problem.cluster.device.memory
    share = best.memory_bytes / room
    if share <= NEARLY_FULL:
        return []
    return [
        f"{show_percent(share)} full: where memory is predicted more than"
        f" {show_percent(1 / share - 1, 1)} too low, training runs out of it; --set"
        f" device.memory={NEARLY_FULL * room / 1e9:.3g}GB plans with room to spare"
    ]


def alone(problem: Problem, best: Candidate) -> str:
    """Say how long one GPU would take on the full graph: whether to distribute at all."""
    on_gpus = not problem.on_cpu and best.objective.epochs_by_mode is None
    if not on_gpus or problem.workload.mode != "full" or best.problem.ranks == 1:
        return ""
    single = problem.placed((int(best.problem.cost.placement[0]),))
    epochs_s = []
    for strategy in GraphParallel.candidates(single):
        with suppress(Infeasible, SpecError):
            epochs_s.append(evaluate_or_save_memory(single, strategy).epoch_s)
    if not epochs_s:
        return "; one GPU has too little memory"
    shortest = min(epochs_s)
    return f"; one GPU alone would take {show_time(shortest)} ({shortest / best.epoch_s:.1f}x)"


def rivals(found: SearchResult) -> str:
    """Name a lossy strategy that is better by prediction, or the runner-up and why it lost.

    Names are complete, as --strategy takes them.
    """
    if found.forced:
        return "nothing else was compared, since --strategy names one"
    best, others = found.best, others_than_best(found)
    if not others:
        return "nothing else fits"
    if others[0].value < best.value:
        return doubted(others[0], best)
    if within_doubt(found):
        why = ": within doubt"
        if found.objective.is_plain:
            why += ", try `gnnplan tune`"
    else:
        why = f" ({largest_difference(others[0], best)})"
    gap, name = others[0].value / best.value - 1, name_beside(others[0], best)
    if gap < 0.0005:
        return f"{name} is as {best.objective.as_good}{why}"
    return f"{name} {show_percent(gap, 1, sign=True)}{why}"


def changes(found: SearchResult, turning_points: Sequence[str]) -> str:
    """Name the links, devices and depths with which another family wins."""
    if len(found.ranked) < 2:
        return "unknown, since only one strategy was compared"
    if found.measured and not turning_points:
        return "not asked, since runs have decided otherwise than predictions would"
    if not turning_points:
        return "not asked of an estimate on so many GPUs"
    wins = [sentence for sentence in turning_points if sentence.endswith("wins")]
    if not wins:
        return "no link or device from an eighth to eight times as fast makes another kind win"
    return "; ".join(wins[:MOST_CHANGES])
