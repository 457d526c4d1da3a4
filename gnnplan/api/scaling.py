"""`scale` plans on several numbers of GPUs and returns a Scale, which says whether to distribute at
all; `offers` does so on several clusters and returns Offers."""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from gnnplan.api import DEFAULT_GRAPH
from gnnplan.api.arguments import AnyCluster, AnyWorkload, Question, typed
from gnnplan.api.planning import counted_columns, epoch_range, wish
from gnnplan.api.view import TextBlock, View
from gnnplan.planner.cluster.spec import Cluster
from gnnplan.planner.decision import plan as documents
from gnnplan.planner.decision.objective import MODES, unit_of
from gnnplan.planner.decision.plan import Answer, describe_question, describe_training
from gnnplan.planner.decision.search import each_of
from gnnplan.planner.decision.sweep import Planned, Scaling, sizes_of
from gnnplan.planner.decision.sweep import scale as scaling
from gnnplan.planner.vocabulary.errors import GnnplanError, Infeasible, SpecError
from gnnplan.planner.vocabulary.files import Json
from gnnplan.planner.vocabulary.progress import Notify, reports_progress, silent
from gnnplan.planner.vocabulary.text import Table, column, table, yes_no
from gnnplan.planner.vocabulary.units import (
    show_bytes,
    show_count,
    show_dollars,
    show_long,
    show_percent,
    show_time,
)


@reports_progress
@typed
def scale(
    graph: Any = DEFAULT_GRAPH,
    cluster: AnyCluster = "local",
    workload: AnyWorkload | None = None,
    *,
    gpus: str | Iterable[int],
    notify: Notify = silent,
    **options: Any,
) -> Scale:
    """Plan on each number of GPUs, and find the best number: whether to distribute at all.

    All other arguments are those of `plan`.

    Args:
        gpus: Numbers of GPUs of the cluster's kind, [1, 2, 4], or '1..64' for 1, 2, 4 .. 64. Up to
            the GPUs of one server are placed on one server; larger numbers take whole servers, also
            more than the cluster has. Each plan uses all of its GPUs.

    Raises:
        SpecError: The input is wrong.
        Infeasible: No strategy fits on any of these numbers of GPUs.

    >>> import gnnplan
    >>> found = gnnplan.scale("flickr", "dgx_a100", gpus=[1, 8], model="gcn", mode="full")
    >>> [row["gpus"] for row in found.rows], found.best in (1, 8)
    ([1, 8], True)
    """
    sizes = sizes_of(gpus)  # report mistakes before the graph is read
    if (ranks := options.get("ranks")) is not None:
        raise SpecError(
            f"--ranks {ranks} asks for one size and --scale {gpus} for several; leave one out"
        )
    question, how, modes = wish(graph, cluster, workload, **options)
    return Scale(question, scaling(question.problem, sizes, how, modes))


@typed
def offers(
    graph: Any,
    clusters: str | Path | Iterable[AnyCluster],
    workload: AnyWorkload | None = None,
    *,
    gpus: str | Iterable[int],
    **options: Any,
) -> Offers:
    """Call `scale` for each of several clusters and find the best: where to train, what to rent.

    A cluster's name or file may set fields, such as the price: 'l4_box?price=0.80'. No two clusters
    may have the same name. All other arguments are those of `scale`. Raises SpecError if the input
    is wrong, Infeasible if no strategy fits on any cluster.

    >>> import gnnplan
    >>> offered = ["l4_box?price=0.80", "dgx_a100?price=2.20"]
    >>> gnnplan.offers("flickr", offered, gpus=[1, 8], objective="cost", mode="full").best
    ('l4_box?price=0.80', 8)
    """
    if isinstance(clusters, str | os.PathLike | Mapping | Cluster):
        clusters = [clusters]
    named = [(_name(one), one) for one in clusters]
    if not named:
        raise SpecError(
            "offers: clusters is empty, and at least one is compared; give names, files or"
            " clusters, as ['l4_box', 'dgx_a100']"
        )
    counts = Counter(name for name, _ in named)
    if repeated := [f"{name} ({count} times)" for name, count in counts.items() if count > 1]:
        raise SpecError(
            f"offers: each cluster needs a name of its own ({', '.join(repeated)}); rename all but"
            " one, or leave them out"
        )
    sizes = gpus if isinstance(gpus, str) else list(gpus)
    for name in ("evidence", "overrides"):  # an iterator would be empty for the second cluster
        if name in options and not isinstance(options[name], Mapping):
            options[name] = list(options[name])
    clusters_of = dict(named)
    scales, refused = each_of(
        clusters_of,
        lambda name: scale(graph, clusters_of[name], workload, gpus=sizes, **options),
        (Infeasible,),
    )
    if not scales:
        raise Infeasible("\n".join(f"{name}: {_in_short(why)}" for name, why in refused.items()))
    return Offers(scales, refused)


def _name(cluster: AnyCluster) -> str:
    if isinstance(cluster, Mapping):
        return str(cluster.get("name"))
    return cluster.name if isinstance(cluster, Cluster) else str(cluster)


class Scale(View):
    """The result of `scale`: `rows`, one per number of GPUs ("size"), and the `best` number."""

    best: int
    """The number of GPUs to use, by the objective."""
    fastest: int
    """The number of GPUs that take the least time."""
    cheapest: int | None
    """The number of GPUs that cost the least; None without a price."""
    slower_from: int | None
    """The first number of GPUs above `fastest` that is slower; None: no number."""
    worse_from: int | None
    """The first number of GPUs above `best` that is worse, by the objective; None: no number."""

    def __init__(self, question: Question, found: Scaling) -> None:
        problem, how, self.notes = question.problem, found.how, question.notes
        self._problem, self._found = problem, found
        self.rows = [_row(found, size) for size in found.sizes]
        """The numbers of every size, one row per size; pandas.DataFrame takes the list."""
        names = ("best", "fastest", "cheapest", "slower_from", "worse_from")
        told = {name: size and size.gpus for name in names for size in [getattr(found, name)]}
        vars(self).update(told)
        self.document: Json = {
            "graph": documents.graph_of(problem),
            "workload": problem.workload.model_dump(mode="json"),
            "cluster": problem.cluster.model_dump(mode="json"),
            "exact": how.exact,
            "strategy": str(how.forced) if how.forced else None,
            **documents.objective_fields(how.objective, found.best.best.problem),
            "rows": self.rows,
            "skipped": [{"gpus": gpus, "reason": reason} for gpus, reason in found.skipped],
            **told,
            "enough": found.enough.gpus,
            "fits_from": found.first.gpus,
            "takes_over": [
                {"gpus": gpus, "from": before, "to": after}
                for gpus, before, after in found.takes_over
            ],
        }

    def blocks(self) -> list[TextBlock]:
        found, workload = self._found, self._problem.workload
        whole = "full graph" if workload.mode == "full" else "workload"
        return [
            describe_question(self.document["graph"], workload, self._problem.cluster),
            _table({"": self}, _marked({"": found})),
            *_sentences(found, self._problem.cluster, self.document["strategy"] or f"the {whole}"),
        ]


class Offers(View):
    """The result of `offers`: a Scale per cluster on which a strategy fits, and the best size."""

    def __init__(self, scales: Mapping[str, Scale], refused: Mapping[str, GnnplanError]) -> None:
        self.scales, self._refused = dict(scales), dict(refused)
        self.notes = tuple(dict.fromkeys(note for one in scales.values() for note in one.notes))
        marked = self._marked = _marked({name: one._found for name, one in scales.items()})
        self.best = marked["best"][0], marked["best"][1].gpus
        """The cluster and the number of GPUs to use, by the objective."""
        self.rows = [
            {"cluster": name, **row} for name, scale in self.scales.items() for row in scale.rows
        ]
        """The numbers of every size of every cluster; pandas.DataFrame takes the list."""
        self.document: Json = {
            "offers": [{"cluster": name, **one.document} for name, one in scales.items()],
            "refused": [{"cluster": name, "reason": str(why)} for name, why in refused.items()],
            **{mark: {"cluster": name, "gpus": size.gpus} for mark, (name, size) in marked.items()},
        }

    def blocks(self) -> list[TextBlock]:
        shown, marked = _short(self.scales), self._marked
        first = next(iter(self.scales.values()))
        lines: list[TextBlock] = [
            describe_training(first.document["graph"], first._problem.workload),
            _table(self.scales, marked),
        ]
        sizes = {(name, size.gpus): size for name, size in marked.values()}
        for place, marks in _by_place(marked).items():
            size, span = sizes[place], first._found.how.objective.span
            gpus = show_count(size.gpus, unit_of(size.best.problem.cluster))
            price = "" if size.dollars is None else f", {show_dollars(size.dollars)}"
            lines.append(
                f"{', '.join(marks)}: {shown[place[0]]}, {gpus} with {size.best.strategy}:"
                f" {show_time(size.time_s)}{price} {span}"
            )
        return lines + [f"{name}: {_in_short(why)}" for name, why in self._refused.items()]


def _marked(found: Mapping[str, Scaling]) -> dict[str, tuple[str, Planned]]:
    """Return the best, the fastest and (if every cluster has a price) the cheapest size of all."""
    best = min(found, key=lambda name: found[name].best.value)
    fastest = min(found, key=lambda name: found[name].fastest.time_s)
    marked = {"best": (best, found[best].best), "fastest": (fastest, found[fastest].fastest)}
    priced = {name: size for name, one in found.items() if (size := one.cheapest)}
    if len(priced) == len(found):
        cheapest = min(priced, key=lambda name: priced[name].dollars or 0.0)
        marked["cheapest"] = cheapest, priced[cheapest]
    return marked


def _in_short(why: GnnplanError) -> str:
    """Return what does not fit, and the smallest change that would make it fit, in words."""
    lines = str(why).splitlines()
    return "; ".join(dict.fromkeys([lines[0].rstrip(":"), lines[-1]]))


def _short(names: Collection[str]) -> dict[str, str]:
    """Map cluster names to names without fields ('?price=..'), if the latter are distinct."""
    heads = {name: name.partition("?")[0] for name in names}
    return {n: head if [*heads.values()].count(head) == 1 else n for n, head in heads.items()}


def _by_place(marked: Mapping[str, tuple[str, Planned]]) -> dict[tuple[str, int], list[str]]:
    """Return the marks of each size, by cluster and number of GPUs."""
    places = defaultdict[tuple[str, int], list[str]](list)
    for mark, (name, size) in marked.items():
        places[name, size.gpus].append(mark)
    return dict(places)


def _table(scales: Mapping[str, Scale], marked: Mapping[str, tuple[str, Planned]]) -> Table:
    """Return the table of sizes; with several clusters, a column names the cluster."""
    several, first = len(scales) > 1, next(iter(scales.values()))
    shown, marks = _short(scales), _by_place(marked)
    unit = unit_of(first._problem.cluster)
    rows = [
        {
            **numbers,
            "cluster": shown[name],
            "recommended": numbers["strategy"] or _lacks(size, numbers["needs_bytes"]),
            "marks": ", ".join(marks.get((name, size.gpus), [])),
        }
        for name, one in scales.items()
        for size, numbers in zip(one._found.sizes, one.rows, strict=True)
    ]
    priced = any(one._problem.cluster.price is not None for one in scales.values())
    of_trainings = first._found.how.objective.epochs_by_mode is not None
    modes = of_trainings or len({row["mode"] for row in rows}) > 1
    over = "the fewest of each cluster" if several else show_count(first._found.first.gpus, unit)
    return table(
        f"speedup over {over}{', exact strategies only' if first.document['exact'] else ''}",
        rows,
        column("cluster") if several else None,
        column(f"{unit}s", "gpus"),
        column("servers"),
        column("on", "mode", MODES.__getitem__) if modes else None,
        column("recommended"),
        column("exact", show=yes_no),
        column("epoch", "epoch_s", show_time),
        ("80 % range", epoch_range),
        column("speedup", show="{:.2f}x".format),
        column("efficiency", show=show_percent),
        column("memory/rank", "memory_bytes", show_bytes),
        column("$" if of_trainings else "$/epoch", "dollars", show_dollars) if priced else None,
        *counted_columns(rows, first.document.get("target_accuracy")),
        column("", "marks"),
    )


def _row(found: Scaling, size: Planned) -> Json:
    """Return the numbers of a size: the row of `Plan.table`, and the speedup over fewer GPUs."""
    problem = size.problem
    mode = problem.workload.mode
    where = {"gpus": size.gpus, "servers": problem.cluster.servers, "mode": mode}
    if size.found is None:
        why = {"reason": str(size.error), "needs_bytes": found.needs_bytes(size)}
        return {**where, "strategy": None, **why}
    priced = {"epoch_dollars": size.best.dollars, "dollars": size.dollars}
    return {
        **where,
        **Answer.of(documents.answer(size.best, size.found.outlook(size.best))).row,
        "speedup": found.speedup(size),
        "efficiency": found.efficiency(size),
        **({} if size.dollars is None else priced),
    }


def _lacks(size: Planned, needs: float | None) -> str:
    """Return what is missing for a strategy to fit, in a few words. needs: `needs_bytes`."""
    room = size.problem.cluster.device.memory
    if needs is None or needs <= room:
        why = str(size.error).splitlines()[0][:80]
        return why if isinstance(size.error, SpecError) else f"nothing fits: {why}"
    return f"nothing fits: needs {show_bytes(needs)} a rank, has {show_bytes(room)}"


def _sentences(found: Scaling, cluster: Cluster, what: str) -> list[str]:
    """Return sentences: the size to use, and where more GPUs are slower or the strategy changes.

    what: the subject of "first fits on": the full graph, or the forced strategy.
    """
    unit, first, fastest = unit_of(cluster), found.first, found.fastest

    def count(gpus: int) -> str:
        return show_count(gpus, unit)

    def more(size: Planned) -> str:
        return f"{count(size.gpus)}{'' if size is found.fitting[-1] else ' and more'} are"

    lines = [_use(found, unit)]
    if found.cheapest and found.cheapest is not fastest:
        lines.append(
            f"cheapest: {count(found.cheapest.gpus)} at"
            f" {show_dollars(found.cheapest.dollars or 0.0)} {found.how.objective.span}; fastest:"
            f" {count(fastest.gpus)} at {show_dollars(fastest.dollars or 0.0)}"
        )
    if found.enough is not fastest:
        slower = show_percent(found.enough.time_s / fastest.time_s - 1, 1)
        lines.append(
            f"nearly as fast as {fastest.gpus}: {count(found.enough.gpus)}, {slower} slower"
        )
    if size := found.slower_from:
        use = f": use {fastest.gpus}" if found.best is fastest else ""
        chance = float((fastest.best.drawn_time_s < size.best.drawn_time_s).mean())
        likely = f"{show_percent(chance)} likely"
        lines.append(f"{more(size)} slower than {fastest.gpus} ({likely}){use}")
    if found.how.objective.of != "time" and (size := found.worse_from):
        lines.append(f"{more(size)} {_worse(found, unit)}")
    if first is not found.sizes[0]:
        lines.append(f"{what} first fits on {count(first.gpus)}")
    lines += [
        f"{after} takes over from {before} at {count(gpus)}"
        for gpus, before, after in found.takes_over
    ]
    lines += [f"skipped {count(gpus)}: {reason}" for gpus, reason in found.skipped]
    each = cluster.gpus_per_server
    if cluster.price is not None and unit == "GPU" and found.sizes[0].gpus < each:
        lines.append(
            f"servers are rented whole: fewer than {each} GPUs cost as much per hour as {each}"
            " (rented one by one: --set gpus_per_server=1)"
        )
    return lines


def _worse(found: Scaling, unit: str) -> str:
    """Return why more GPUs than the recommended number are worse, in words."""
    objective, best, fastest = found.how.objective, found.best, found.fastest
    if objective.of != "value":
        return f"{objective.more} than {best.gpus}"
    if fastest.gpus <= best.gpus:
        return "not worth their price"
    saved = show_long(best.time_s - fastest.time_s)
    return (
        f"not worth their price: {show_count(fastest.gpus, unit)} would save {saved} of"
        f" {show_long(best.time_s)}"
    )


def _use(found: Scaling, unit: str) -> str:
    """Return the number of GPUs to use and the speedup over the fewest, in words."""
    best, first = found.best, found.first
    words = f"use {show_count(best.gpus, unit)}"
    if best.gpus > best.problem.cluster.gpus_per_server:
        words += f" ({show_count(best.problem.cluster.servers, 'server')})"
    modes = {size.problem.workload.mode for size in found.fitting}
    if len(modes) > 1 or found.how.objective.epochs_by_mode is not None:
        words += f" on {MODES[best.problem.workload.mode]}"
    words += f" with {best.best.strategy}: {show_long(best.time_s)} {found.how.objective.span}"
    if found.how.objective.of in ("cost", "energy"):
        words += f", {found.how.objective.show(best.value)}"
    if best is not first:
        words += (
            f", {found.speedup(best):.2f} times as fast as {show_count(first.gpus, unit)}"
            f" (efficiency {show_percent(found.efficiency(best))})"
        )
    elif best.gpus == 1 and len(found.fitting) > 1:
        words += "; do not distribute"
    return words
