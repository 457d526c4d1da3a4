"""What runs ranks on this machine: `Plan.run` and `Plan.preflight`, `check` and `measure`.

`Plan.run` trains and returns a Run, the folder of the run's files; `Plan.preflight` checks this
machine first and returns a table. `check` compares each strategy's gradients with one process's, on
a small graph. `measure` describes this machine, or servers emulated on it, as a Cluster."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from math import inf
from pathlib import Path
from shlex import quote
from statistics import median
from typing import TYPE_CHECKING, Any

from gnnplan.api.arguments import typed
from gnnplan.api.view import TextBlock, View
from gnnplan.planner.cluster.spec import Cluster
from gnnplan.planner.evidence.runs import (
    gradient_error,
    read_run,
    show_rows,
    summed,
    trained_before,
)
from gnnplan.planner.gnn.workload import scores_of, show_scores
from gnnplan.planner.graph.parts import STAND_IN_LABELS
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.planner.vocabulary.files import Json, cache_dir, must_be_writable, write_atomically
from gnnplan.planner.vocabulary.progress import Notify, reports_progress, say, silent
from gnnplan.planner.vocabulary.text import Table, column, table
from gnnplan.planner.vocabulary.units import kind, quantity, show_bytes, show_count, show_time

if TYPE_CHECKING:
    from gnnplan.api.validation import Validation
    from gnnplan.executor.launch.preflight import Row
    from gnnplan.executor.launch.run_request import RunRequest
    from gnnplan.executor.modules.read import Source

SLOWEST_NIC, FASTEST_NIC = 1e5, 1.25e11  # limits of an emulated NIC's rate [B/s]
KEPT = "local.yaml"  # file of the preset 'local', in the cache


class Run(View):
    """A finished run, read from its folder; usable wherever the folder's path is."""

    def __init__(self, out: str | Path) -> None:
        self.out = Path(out)
        self.metrics, self._ranks = read_run(self.out)
        """The lines of metrics.jsonl, one row per epoch; pandas.DataFrame takes the list."""

    def __fspath__(self) -> str:
        return str(self.out)

    @property
    def weights(self) -> Path:
        """The trained parameters, as safetensors."""
        return self.out / "weights.safetensors"

    @property
    def document(self) -> Json:
        """The document that `gnnplan run --json` prints."""
        metrics, ranks = self.metrics, self._ranks
        own = metrics[trained_before(ranks) :]  # epochs of the ranks whose files are in the folder
        last = metrics[-1]
        return {
            "out": str(self.out),
            "epochs": len(metrics),
            "first_loss": metrics[0]["loss"],
            "loss": last["loss"],
            **{name: last[name] for name in scores_of(last)},
            "best": ranks[0].get("best"),  # the best epoch, if the workload stops early (patience)
            "epoch_s": median(m["epoch_s"] for m in own[min(2, len(own) - 1) :]),
            "backend": ranks[0]["backend"],
            "bytes": {op: sent // len(own) for op, sent in summed(ranks, "bytes").items()},
            "setup_bytes": summed(ranks, "setup_bytes").total(),
            "peak_rss_bytes": [rank["peak_rss_bytes"] for rank in ranks],
            "peak_bytes": [rank["peak_bytes"] for rank in ranks],
            "rows": dict(summed(ranks, "rows")),
            "gradient_error": gradient_error(ranks),
        }

    def validate(self) -> Validation:
        """Compare predicted, simulated and measured times, bytes, memory and order.

        Raises SpecError.
        """
        from gnnplan.api.validation import Validation

        return Validation(self.out)

    def blocks(self) -> list[str]:
        result = self.document
        scores = show_scores(result)
        sent = ", ".join(f"{k} {show_bytes(v)}" for k, v in result["bytes"].items()) or "nothing"
        lines = [
            f"{show_count(result['epochs'], 'epoch')}, loss {result['first_loss']:.4f} ->"
            f" {result['loss']:.4f}  {scores}",
            f"median epoch {show_time(result['epoch_s'])}"
            f"{' (without the first two)' * (result['epochs'] > 2)}; sent per epoch:"
            f" {sent}; peak memory {show_bytes(max(result['peak_rss_bytes']))} per process",
        ]
        if (best := result["best"]) and best["epoch"]:
            name = next(name for name in scores_of(result) if name.startswith("val_"))
            said = f"weights are of epoch {best['epoch']}, the best by {name} ({best['score']:.3f})"
            lines.insert(1, said)
        if result["rows"]:
            lines.append(f"rows of features: {show_rows(result['rows'])}")
        if found := result["gradient_error"]:
            lines.append(f"the last gradient is off by {found['error']:.3g} of the exact one")
        if trained_before(self._ranks):  # resumed from another plan: no one prediction covers it
            return [*lines, f"in {self.out}"]
        return [*lines, f"in {self.out}; next: gnnplan validate {quote(str(self.out))}"]


class Preflight(View):
    """The comparison of a plan's needs with this machine: one row per check, with a verdict."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = rows

    @property
    def stops(self) -> bool:
        """Whether a check would stop the run."""
        return any(row.verdict == "stops" for row in self.rows)

    @property
    def document(self) -> Json:
        """The document that `gnnplan run --dry-run --json` prints."""
        return {"stops": self.stops, "rows": [row.document for row in self.rows]}

    def blocks(self) -> list[TextBlock]:
        counts = Counter(row.verdict for row in self.rows)
        if self.stops:
            last = f"{show_count(counts['stops'], 'line')} would stop the run"
        elif counts["differs"]:
            last = f"it would run; {show_count(counts['differs'], 'line')} would be printed first"
        else:
            last = "it would run as planned"
        rows = [
            [row.what, row.planned, row.here, ": ".join(filter(None, (row.verdict, row.says)))]
            for row in self.rows
        ]
        return [Table("", ["", "the plan", "here", "verdict"], rows, left=4), last]


def asked_of(
    document: Json,
    problem: Problem | None,
    out: str | Path | None,
    given: Mapping[str, Any],
    resume: bool = False,
) -> RunRequest:
    """Return a plan with the options of its run, which `look` (executor/launch) and `train` take.

    problem: the plan's problem, if its graph is loaded. out: the run's folder; None: a new one in
    runs/. given: options (executor/launch/run_request.py) and `emulate`; an unset option is None.
    resume: resume the run in `out`. Raises SpecError."""
    from gnnplan.executor.launch.launcher import new_folder
    from gnnplan.executor.launch.run_request import Options, RunRequest

    rate = rate_of(given.get("emulate"))
    kept = {name: value for name, value in given.items() if name != "emulate"}
    options = Options.of(Path(out or ""), kept, resume)
    graph = document["graph"].get("name", "graph").split("?")[0]
    name = f"{graph}-{document['best']['strategy']['name']}".replace(":", "-").replace("/", "-")
    folder = new_folder(name) if out is None else Path(out)
    return RunRequest(document, folder, options, emulate=rate, loaded=problem)


def train(asked: RunRequest) -> Run:
    """Start a plan's ranks on this machine, and wait until they end.

    Raises SpecError, and LostRank if a rank is lost and no restart is left."""
    from gnnplan.executor.launch.failure import kept
    from gnnplan.executor.launch.launcher import begin
    from gnnplan.executor.launch.preflight import must_start

    for row in must_start(asked):
        say(f"note: {row}")
    problem, strategy, out, last = asked.problem, asked.settled, asked.out, asked.last
    onwards = f" after {last}" if last else ""
    say(
        f"training {problem.stats.name} with {strategy} on {show_count(problem.ranks, 'rank')},"
        f" {show_count(asked.epochs, 'epoch')}{onwards}, into {out}"
    )
    stand_in = [note for note in problem.stats.notes if note.startswith(STAND_IN_LABELS)]
    for note in stand_in:
        say(f"note: {note}")
    try:
        begin(asked)
    except (KeyboardInterrupt, SystemExit):
        say(f"note: {kept(out, problem.by_gpu)}")
        raise
    for note in stand_in:
        say(f"note: {note}")
    return Run(out)


def rate_of(text: str | None) -> float:
    """Return the rate of an emulated NIC [B/s]; inf for 'unshaped', 0 for None.

    Raises SpecError.
    """
    if text is None or text == "unshaped":
        return inf if text else 0.0
    rate = 0.0
    with suppress(ValueError):
        rate = quantity(text) if kind(text) == "B/s" else 0.0
    if not SLOWEST_NIC <= rate <= FASTEST_NIC:
        raise SpecError(
            f"--emulate {text!r:.80} is not a rate such as 400Mbit/s or 50MB/s, from 0.8Mbit/s to"
            " 1Tbit/s, nor 'unshaped'"
        )
    return rate


# -- check -----------------------------------------------------------------------------------------


class Check(View):
    """The result of `check`: each strategy's gradients compared with those of one process."""

    def __init__(self, document: Json) -> None:
        differs = [one["strategy"] for one in document["strategies"] if one["answer"] == "differs"]
        self.document = {**document, "differs": differs}

    @property
    def ok(self) -> bool:
        """Whether every strategy that claims exact gradients has the gradients of one process."""
        return not self.differs

    @property
    def differs(self) -> list[str]:
        """The strategies that claim exact gradients and compute different ones."""
        return list(self.document["differs"])

    @property
    def table(self) -> list[Json]:
        """The rows of the comparison, one per strategy; pandas.DataFrame takes the list.

        answer: 'equal', 'differs', 'lossy' (inexact by design: `gap` is not judged) or 'cannot'
        (the strategy cannot train the model). reason: the answer in words; for 'cannot', what is
        missing. gap: the largest difference from the gradient of one process, as a share of the
        largest entry of the tensor."""
        rows: list[Json] = self.document["strategies"]
        return rows

    def blocks(self) -> list[TextBlock]:
        found, graph = self.document, self.document["graph"]
        told = found.get("module", "")
        proof = "outputs and gradients, in training and in evaluation, on two small graphs"
        equal = sum(row["answer"] == "equal" for row in self.table)
        return [
            *([f"proved: {told} ({proof})"] if told else []),
            table(
                f"gradients of {found['model']}, beside one process's",
                self.table,
                column("strategy"),
                column("gradient", "answer"),
                column("off by", "gap", "{:.0e}".format),
                column("why", "reason"),
            ),
            f"tried: one step on a generated graph of {graph['vertices']} vertices and"
            f" {graph['edges']} edges ({graph['features']} features, {graph['classes']} classes),"
            f" in {found['dtype']}, on {found['ranks']} CPU ranks over Gloo; equal in {equal} of"
            f" {len(self.table)}",
        ]


@typed
def check(
    model: Source, *, features: int | None = None, classes: int | None = None, **fields: Any
) -> Check:
    """Compare every strategy's gradients for a model with one process's, on a small graph.

    Each strategy trains one step in float64 on two ranks of this machine.

    Args:
        model: A built-in model ('gcn'), 'model.py:MyGNN', a live torch.nn.Module, its class, or a
            function that returns a module.
        features: Width of the small graph's features.  [default: the model's own, or 12]
        classes: Number of classes in the small graph.  [default: the model's own, or 4]
        fields: Fields of the Workload that the model's constructor takes (hidden=16).

    Raises:
        SpecError: The model cannot be read.
        LostRank: A worker process was lost.

    >>> gnnplan.check("gcn", layers=2, hidden=8)  # doctest: +SKIP
    """
    from gnnplan.executor.launch.check import compare

    given = {name: value for name, value in fields.items() if value is not None}
    name = model if isinstance(model, str) else getattr(model, "__name__", type(model).__name__)
    return Check({"model": name, **compare(model, given, features, classes)})


# -- measure ---------------------------------------------------------------------------------------


@reports_progress
@typed
def measure(
    ranks: int = 2,
    *,
    servers: int = 1,
    emulate: str = "unshaped",
    seconds: float = 0.2,
    dtype: str = "float32",
    output: str | Path | None = None,
    notify: Notify = silent,
) -> Cluster:
    """Measure this machine with all ranks active; takes a minute or two.

    The result for one server is also kept as the preset 'local'.

    Args:
        ranks: Ranks per server; all of them are active at once.
        servers: Number of servers. More than one are emulated on this machine, which needs root.
        emulate: Rate of each emulated server's NIC, as 400Mbit/s, or unshaped (no limit).
        seconds: Seconds spent on each of about a hundred measurements.
        dtype: bfloat16 also measures matrix products and aggregation of bfloat16 rows, for `gnnplan
            plan --dtype bfloat16`. A CPU without AVX-512 BF16 or AMX needs minutes for them.
        output: YAML file to write the cluster to.
        notify: Called with progress messages.

    Raises:
        SpecError: An argument is wrong.
        LostRank: A rank was lost.
    """
    from gnnplan.executor.measure.measure import measure as measured_by_ranks
    from gnnplan.planner.vocabulary.progress import notify as tell

    if output:
        must_be_writable(Path(output))
    found = measured_by_ranks(ranks, tell, servers, rate_of(emulate), seconds, dtype)
    keep(found, Path(output) if output else None, local=servers == 1)
    return found


def keep(cluster: Cluster, output: Path | None, local: bool) -> None:
    """Write the cluster to `output` if given, and as the preset 'local' if `local` is set."""
    text = cluster.to_yaml()
    if output:  # first, for the cache may not be writable
        write_atomically(output, text)
    if local:
        write_atomically(cache_dir() / KEPT, text, parents=True)
