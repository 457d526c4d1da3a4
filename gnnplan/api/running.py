"""`Plan.run`: training for real; the answer is a Run, a folder with all that training left.

`Plan.preflight`: what is looked at before; the answer is a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from shlex import quote
from statistics import median
from typing import TYPE_CHECKING, Any

from gnnplan.api.view import View
from gnnplan.planner.evidence.recorded import (
    gradient_error,
    read_run,
    rows_by_class,
    show_rows,
    trained_before,
)
from gnnplan.planner.gnn.workload import scores_of, show_scores
from gnnplan.planner.graph.build import STAND_IN_LABELS
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.planner.vocabulary.progress import say
from gnnplan.planner.vocabulary.table import Table
from gnnplan.planner.vocabulary.units import kind, quantity, show_bytes, show_count, show_time

if TYPE_CHECKING:
    from gnnplan.api.validation import Validation
    from gnnplan.executor.launch.asked import Asked
    from gnnplan.executor.launch.preflight import Row

SLOWEST_NIC, FASTEST_NIC = 1e5, 1.25e11  # that are emulated [B/s]


class Run(View):
    """A finished run, by its folder; usable wherever a path of the folder is."""

    def __init__(self, out: str | Path) -> None:
        self.out = Path(out)
        self._metrics, self._ranks = read_run(self.out)

    def __fspath__(self) -> str:
        return str(self.out)

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl: a row per epoch; pandas.DataFrame takes it."""
        return self._metrics

    @property
    def weights(self) -> Path:
        """The trained parameters, as safetensors."""
        return self.out / "weights.safetensors"

    @property
    def document(self) -> dict[str, Any]:
        """The document that `gnnplan run --json` prints."""
        metrics, ranks = self._metrics, self._ranks
        own = metrics[trained_before(ranks) :]  # by the ranks that have left their files
        sent: dict[str, int] = {}
        for rank in ranks:
            for op, nbytes in rank["bytes"].items():
                sent[op] = sent.get(op, 0) + nbytes
        last = metrics[-1]
        return {
            "out": str(self.out),
            "epochs": len(metrics),
            "first_loss": metrics[0]["loss"],
            "loss": last["loss"],
            **{name: last[name] for name in scores_of(last)},
            "best": ranks[0].get("best"),  # where the workload has patience
            "epoch_s": median(m["epoch_s"] for m in own[min(2, len(own) - 1) :]),
            "backend": ranks[0]["backend"],
            "bytes": {op: nbytes // len(own) for op, nbytes in sent.items()},
            "setup_bytes": sum(sum(rank["setup_bytes"].values()) for rank in ranks),
            "peak_rss_bytes": [rank["peak_rss_bytes"] for rank in ranks],
            "peak_bytes": [rank["peak_bytes"] for rank in ranks],
            "rows": rows_by_class(ranks),
            "gradient_error": gradient_error(ranks),
        }

    def validate(self) -> Validation:
        """Compare what was predicted, simulated and measured.

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
        if trained_before(self._ranks):  # no plan's prediction is of all of it
            return [*lines, f"in {self.out}"]
        return [*lines, f"in {self.out}; next: gnnplan validate {quote(str(self.out))}"]


class Preflight(View):
    """The needs of a plan beside this machine: a row per check, and its verdict."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = rows

    @property
    def stops(self) -> bool:
        """Whether something here keeps the plan from being run."""
        return any(row.verdict == "stops" for row in self.rows)

    @property
    def document(self) -> dict[str, Any]:
        """The document that `gnnplan run --dry-run --json` prints."""
        return {"stops": self.stops, "rows": [row.document for row in self.rows]}

    def blocks(self) -> list[str | Table]:
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
    document: dict[str, Any],
    problem: Problem | None,
    out: str | Path | None,
    given: Mapping[str, Any],
    resume: bool = False,
) -> Asked:
    """A plan that is to be run, and how; `preflight` and `train` take it.

    problem: the plan's, where its graph has been read. out: None: a new folder in runs/. given:
    options (executor/launch/asked.py) and `emulate`; None where one was not given. resume: go on
    in `out`. Raises SpecError."""
    from gnnplan.executor.launch import launcher as launch

    rate = given.get("emulate")
    servers = None if rate is None else launch.Emulated(rate_of(rate))
    kept = {name: value for name, value in given.items() if name != "emulate"}
    options = launch.Options.of(Path(out or ""), kept, resume)
    graph = document["graph"].get("name", "graph").split("?")[0]
    name = f"{graph}-{document['best']['strategy']['name']}".replace(":", "-").replace("/", "-")
    folder = launch.new_folder(name) if out is None else Path(out)
    return launch.Asked(document, folder, options, emulate=servers, loaded=problem)


def preflight(asked: Asked) -> Preflight:
    """Check what `train` checks before it starts a process."""
    from gnnplan.executor.launch import launcher as launch

    return Preflight(launch.look(asked))


def train(asked: Asked) -> Run:
    """Start a plan's ranks on this machine, and wait for them.

    Raises SpecError, and LostRank when no restart is left."""
    from gnnplan.executor.launch import launcher as launch

    for row in launch.must_start(asked):
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
    launch.begin(asked)
    for note in stand_in:
        say(f"note: {note}")
    return Run(out)


def rate_of(text: str) -> float | None:
    """The rate of an emulated NIC [B/s]; None for 'unshaped'.

    Raises SpecError.
    """
    if text == "unshaped":
        return None
    rate = 0.0
    with suppress(ValueError):
        rate = quantity(text) if kind(text) == "B/s" else 0.0
    if not SLOWEST_NIC <= rate <= FASTEST_NIC:
        raise SpecError(
            f"--emulate {text!r:.80} is not a rate such as 400Mbit/s or 50MB/s, from 0.8Mbit/s to"
            " 1Tbit/s, nor 'unshaped'"
        )
    return rate
