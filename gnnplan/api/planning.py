"""`plan`: which strategy, on which GPUs, and why; the answer is a Plan."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gnnplan.api.asking import Overrides, Question, ask, several
from gnnplan.api.defaults import DEFAULT_GRAPH
from gnnplan.api.view import Blocks, View, of
from gnnplan.planner.cluster.spec import Cluster
from gnnplan.planner.decision import plan as documents
from gnnplan.planner.decision.answer import Answer, describe_question, take
from gnnplan.planner.decision.epochs import MODES, stated
from gnnplan.planner.decision.objective import WORDS, Objective, Target
from gnnplan.planner.decision.search import Search, SearchResult
from gnnplan.planner.decision.whole import Whole, compare
from gnnplan.planner.evidence.accuracy import objective_of, trainings
from gnnplan.planner.gnn.workload import Workload
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies import Strategy, parse
from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.planner.vocabulary.progress import Notify, silent, tells
from gnnplan.planner.vocabulary.table import Table, column, table, yes_no
from gnnplan.planner.vocabulary.units import (
    show_bytes,
    show_dollars,
    show_energy,
    show_long,
    show_percent,
    show_range,
    show_time,
)

if TYPE_CHECKING:
    from gnnplan.api.running import Preflight, Run
    from gnnplan.api.simulation import Simulation, Sweep

MOST_LEADERS = 8  # rows of the table
PER = ("training", "epoch")


@tells
def plan(
    graph: Any = DEFAULT_GRAPH,
    cluster: str | Path | Mapping[str, Any] | Cluster = "local",
    workload: str | Path | Mapping[str, Any] | Workload | None = None,
    *,
    exact: bool = False,
    objective: str | None = None,
    per: str | None = None,
    target_accuracy: float | None = None,
    evidence: Iterable[str | os.PathLike[str]] = (),
    strategy: str | None = None,
    ranks: int | None = None,
    overrides: Overrides = (),
    partitioner: str = "auto",
    directed: bool = False,
    features: str | None = None,
    labels: str | None = None,
    split: str | None = None,
    task: str | None = None,
    depths: bool = False,
    notify: Notify = silent,
    **fields: Any,
) -> Plan:
    """Rank the strategies that fit, and recommend one with its rank placement and the reasons.

    Args:
        graph: A file or folder of any format that docs/how-to/bring-your-graph.md names, the name
            of a well-known graph, 'synthetic:...', or an object: a DGLGraph, a PyG Data, a networkx
            Graph, a SciPy sparse matrix, an edge_index [2, E]. Objects are written to the cache,
            where ranks read them.
        cluster: A preset, a YAML file, a mapping of fields, or a Cluster. 'local' is this machine.
        workload: A YAML file, a preset, a mapping of fields, or a Workload.
        exact: Only strategies that compute the gradient of one process.
        objective: What the best has least of: time, cost (needs a price), energy (needs the
            device's power), or value: dollars of GPUs and of waiting, for more GPUs only where they
            are worth it (an hour of waiting counts $20, a GPU without a price $2.50; a run takes
            five minutes besides its epochs); of sizes within 10 % the smallest.  [default: value of
            a training, time of an epoch]
        per: training (all its epochs, on the full graph or on mini-batches, whichever is better) or
            epoch.  [default: training on GPUs, epoch on CPU ranks]
        target_accuracy: Compare until this validation accuracy instead of per epoch, as 0.93; how
            many epochs that takes is read from `evidence`. Strategies that no run tells of are
            rejected.
        evidence: Folders of runs, or folders that hold such.
        strategy: Force one, as 'gnnpipe(stages=4,chunks=16)'; knobs may be left out.
        ranks: Use this many ranks, equally many per server; on one where servers=1 is set.
            [default: all, or fewer GPUs where that is faster]
        overrides: Fields of cluster or workload: {'inter_node.bandwidth': '25GB/s'}.
        partitioner: metis (edge cut), metis-volume (halo rows), kaminpar (edge cut, of large graphs
            in less time and memory; an extra), kaminpar-train (and training vertices even), hash,
            random, or auto: metis, of more than 5 million edges kaminpar where it is installed.
        directed: Keep the edges' direction; otherwise graphs are made undirected.
        features: Features that the graph's file lacks: a .npy, sparse .npz, .pt or text of
            [vertices, features]; or the width of stand-ins.
        labels: Labels that the file lacks: a .npy, .pt, text, or a .json of {"vertex": class}.
        split: The split that the file lacks: a folder, .npz or .pt with train, val and test (masks
            or ids), or a .json of ids.
        task: What is learned: node (labels of vertices), link (which vertices an edge links; with
            `mode` mini, a batch is of edges), regression (numbers of vertices: as `loss` says too,
            and labels with fractions), or none: the graph has no labels, and is planned, simulated
            and run on stand-ins.  [default: node]
        depths: Among the reasons (`Plan.explain`) say at which other numbers of layers another
            family wins, as --explain does; that takes as long as several plans.
        notify: Is told what is being done (`gnnplan.progress`).
        fields: Of the workload, as gnnplan.Workload has them: layers=3, fanout=[15, 10]. model is
            'gcn', 'model.py:MyGNN', or a live torch.nn.Module or its class, whose parameters
            training starts from. dtype='auto' leaves float32 or bfloat16 to the plan; with `exact`
            rows are float32.

    Raises:
        SpecError: The input is wrong.
        Infeasible: Nothing fits.

    >>> import gnnplan
    >>> found = gnnplan.plan("flickr", "dgx_a100", model="gcn", hidden=16, layers=2, exact=True)
    >>> found.best.exact, found.best.gpus <= 8, len(found.table) == len(found.answers)
    (True, True, True)
    """
    given = {k: v for k, v in locals().items() if k not in ("notify", "depths", "fields")}
    question, how, modes = wish(**given, may_choose_dtype=True, **fields)
    wholes = dict[str, Whole]()  # by the type of rows

    def find(problem: Problem) -> SearchResult:
        if how.objective.stated is None:
            return how(problem)
        whole = compare(problem, modes, how.objective.stated, how)
        wholes[problem.workload.dtype] = whole
        return whole.found

    choice = None
    if question.chooses_dtype:
        # imported here: it takes a tenth of a second, which a run need not wait
        from gnnplan.planner.decision.dtypes import choose

        choice = choose(question.problem, find, exact)
    result = choice.found if choice else find(question.problem)
    document = documents.make(result, depths)
    for told in (wholes.get(result.problem.workload.dtype), choice):
        document = told.add_to_plan(document) if told else document
    found = Plan(document, result.problem.placed(documents.placement(document)))
    found.notes = question.notes
    return found


def wish(
    *about: Any,
    exact: bool = False,
    strategy: str | None = None,
    objective: str | None = None,
    per: str | None = None,
    target_accuracy: float | None = None,
    evidence: Iterable[str | os.PathLike[str]] = (),
    **asked: Any,
) -> tuple[Question, Search, list[str]]:
    """The question that the arguments of `plan` describe, how it is searched, and in which modes.

    A mistake is told before a graph is read. Raises SpecError, and Mismatch where another version
    made a run that is evidence.
    """
    forced, folders = None if strategy is None else parse(strategy), several(evidence)
    if objective is not None:
        Objective(objective)
    if per not in (None, *PER):
        raise SpecError(f"--per {per!r}: must be training or epoch")
    if target_accuracy is None and folders:
        raise SpecError(
            f"--evidence {folders[0]}: runs tell in how many epochs an accuracy is reached; say"
            " which, as --target-accuracy 0.93"
        )
    if target_accuracy is None and objective == "value" and per == "epoch":
        raise SpecError(
            "--objective value weighs a whole training against the GPUs that it takes; leave"
            " --per epoch out, or use time, cost or energy"
        )
    if target_accuracy is not None and per is not None:
        raise SpecError(
            f"--per {per} and --target-accuracy {target_accuracy:g} both say how many epochs count;"
            " leave one out"
        )
    if target_accuracy is not None and not 0 < target_accuracy < 1:
        raise SpecError(
            f"--target-accuracy {target_accuracy:g}: a share of right answers, above 0 and below 1;"
            " write 0.93 for 93 %"
        )
    target = None
    if target_accuracy is not None:
        target = Target(target_accuracy, trainings(folders))

    question = ask(*about, **asked)
    problem, given = question.problem, question.given
    workload, counted = problem.workload, Objective(objective or "time", target)
    is_gpu = problem.cluster.device.kind != "cpu"
    if (per or ("training" if is_gpu and target is None else "epoch")) == "training":
        epochs = workload.epochs if "epochs" in given else None
        mode = workload.mode if "mode" in given else None
        of_modes = stated(problem.stats.name, epochs, mode)
        counted = Objective(objective or "value", stated=of_modes)
    # that which is named, or the forced strategy's; of links and of modules the workload's
    modes = list(MODES) if forced is None else [forced.mode]
    if "mode" in given or workload.task == "link" or workload.module:
        modes = [workload.mode]
    is_cut = problem.graph is not None and problem.graph.cut is not None  # there is a part per rank
    may_use_fewer = asked.get("ranks") is None and not is_cut
    return question, Search(exact, forced, may_use_fewer, counted), modes


def load_plan(path: str | Path, of_any_version: bool = False) -> Plan:
    """The plan of a file that `Plan.write` or `gnnplan plan -o` made.

    of_any_version: leave it to `run` and `preflight` to say that another version made it. Raises
    SpecError where it is not a plan, Mismatch where another version made it.
    """
    return Plan(documents.read(path, of_any_version))


class Plan(View):
    """The answer to `plan`: `best`, the ranked `answers`, and all that plan.json holds.

    notes: what was done with the graph and the model, as 'made undirected', and assumed of them."""

    notes: tuple[str, ...] = ()

    def __init__(self, document: dict[str, Any], problem: Problem | None = None) -> None:
        self.document = document  # of plan.json
        self._problem = problem

    @property
    def best(self) -> Answer:
        """The recommended strategy."""
        return Answer.of(self.document["best"])

    @property
    def answers(self) -> list[Answer]:
        """All strategies that fit, the recommended one first."""
        return [Answer.of(a) for a in (self.document["best"], *self.document["alternatives"])]

    @property
    def table(self) -> list[dict[str, Any]]:
        """A row of numbers per answer; pandas.DataFrame takes it."""
        return [answer.row for answer in self.answers]

    @property
    def strategy(self) -> Strategy:
        """The recommended strategy, as the planner knows it."""
        return documents.chosen(self.document)

    @property
    def problem(self) -> Problem:
        """The question, with ranks on the GPUs of the plan; a plan from a file loads its graph.

        Raises SpecError, or Mismatch where the data have changed since.
        """
        if self._problem is None:
            self._problem = documents.question(self.document)
        return self._problem

    @property
    def loaded(self) -> Problem | None:
        """`problem`, where its graph has been read already."""
        return self._problem

    @property
    def cluster(self) -> Cluster:
        return Cluster.model_validate(self.document["cluster"])

    @property
    def workload(self) -> Workload:
        return Workload.model_validate(self.document["workload"])

    def write(self, path: str | Path) -> None:
        """Write plan.json, which the command line takes too."""
        documents.write(path, self.document)

    def explain(self) -> Blocks:
        """All reasons: the placement, what binds, why others lost, what was rejected."""
        cluster, on_server = self.cluster, defaultdict[int, list[str]](list)
        places, each = self.document["best"]["placement"], cluster.gpus_per_server
        gpus = [place["server"] * each + place["gpu"] for place in places]
        in_order = gpus == list(range(cluster.ranks))
        for place in sorted(places, key=lambda place: int(place["gpu"])):
            where = "" if in_order else f" on GPU {place['gpu']}"
            on_server[place["server"]].append(f"{place['rank']}{where}")
        servers = (
            f"server {server}: rank{'s' * (len(r) > 1)} {', '.join(r)}"
            for server, r in sorted(on_server.items())
        )
        return Blocks(
            [
                f"placement: {'; '.join(servers)}",
                *(f"- {line}" for line in self.document["explanation"]),
                *(f"- not {o['strategy']}: {o['reason']}" for o in self.document["rejected"]),
            ]
        )

    def choose(self, strategy: str) -> Plan:
        """The plan with another of its answers as the best, without planning anew.

        strategy: 'NEXT', the fastest alternative, or one as `answers` name it. Raises SpecError.
        """
        document = take(self.document, self.problem, strategy)
        return Plan(document, self.problem.placed(documents.placement(document)))

    @tells
    def simulate(
        self,
        *,
        steps: int = 3,
        overrides: Overrides = (),
        jitter: float = 0.0,
        stragglers: Mapping[int, float] | None = None,
        repetitions: int = 20,
        seed: int = 0,
        flows: bool = False,
        trace: str | Path | None = None,
        notify: Notify = silent,
    ) -> Simulation:
        """Play the schedule in virtual time, perhaps on another cluster or with noise.

        Args:
            steps: Epochs to play (a full graph: a step each); the last ones are the steady state.
            overrides: Fields of cluster or workload, as of `plan`.
            jitter: Lognormal factors on every computation: their standard deviation, mean 1.
            stragglers: {3: 2.0}: rank 3 computes twice as long.
            repetitions: How often to play with `jitter` or stragglers.
            seed: Of `jitter`.
            flows: Each message of an exchange has its own max-min fair share of the links, rather
                than all of them one (slower to play).
            trace: Write a Chrome/Kineto trace per rank here (open it with Perfetto); with `jitter`
                or stragglers of the first disturbed repetition.
            notify: Is told what is being done.

        Raises:
            SpecError: An argument is wrong.
            Infeasible: The strategy's family fits on no such cluster.
        """
        from gnnplan.api.simulation import Playing, Simulation

        playing = Playing(steps, jitter, stragglers or {}, repetitions, seed)
        folder = None if trace is None else Path(trace)
        exact, strategy = documents.is_exact(self.document), self.strategy
        return Simulation(self.problem, strategy, exact, playing, overrides, flows, folder)

    @tells
    def sweep(
        self,
        fields: Mapping[str, Iterable[object]] | Sequence[str],
        *,
        overrides: Overrides = (),
        notify: Notify = silent,
        **playing: Any,
    ) -> Sweep:
        """Plan and play every combination of values, as {'servers': [1, 2, 4]}.

        'device' takes the GPUs of presets. The other arguments are those of `simulate`. Raises
        SpecError."""
        from gnnplan.api.simulation import Playing, Sweep

        played = Playing(**playing)
        if "target_accuracy" in self.document:
            raise SpecError(
                "a sweep compares epochs, and this plan trainings to an accuracy (target_accuracy:"
                f" {self.document['target_accuracy']:g}); plan without --target-accuracy to sweep"
            )
        how = Search(documents.is_exact(self.document), objective=objective_of(self.document))
        return Sweep(self.problem, self.strategy, how, fields, played, overrides)

    def run(
        self,
        out: str | Path | None = None,
        *,
        epochs: int | None = None,
        eval_every: int = 10,
        timeout_s: float = 30.0,
        checkpoint_every: int = 10,
        restarts: int = 0,
        emulate: str | None = None,
        staleness_errors: bool = False,
        gradient_errors: bool = False,
        tensorboard: str | Path | None = None,
    ) -> Run:
        """Train for real on ranks of this machine: NCCL on GPUs, Gloo elsewhere.

        Args:
            out: Folder for all it leaves; must not hold a run.  [default: a new one in runs/]
            epochs: Epochs.  [default: the plan's]
            eval_every: Evaluate every so many epochs, and at the end; 0: at the end.
            timeout_s: Seconds a rank waits for its peers before it gives up.
            checkpoint_every: Epochs between checkpoints; 0: none; two are kept.
            restarts: Start all ranks anew from the last checkpoint when one is lost, so many times
                at most.
            emulate: The plan's servers as network namespaces of this Linux machine, with NICs of
                this rate between them: 400Mbit/s, or unshaped. Needs root.
            staleness_errors: Measure how far stale rows and gradients are from the true ones, per
                layer and epoch, into rank*.json.
            gradient_errors: Measure also how far the weights' gradients are from exact ones, by a
                second pass per epoch (graph_parallel and pipegcn).
            tensorboard: Write loss, accuracies, seconds, bytes and memory of every epoch for
                TensorBoard here.

        Raises:
            SpecError: An option is wrong, or the plan cannot be run here.
            LostRank: A rank was lost, and no restart is left.
        """
        given = {name: value for name, value in locals().items() if name not in ("self", "out")}
        return self._train(out, given)

    @tells
    def report(
        self,
        output: str | Path,
        runs: Sequence[str | os.PathLike[str]] = (),
        notify: Notify = silent,
    ) -> Path:
        """Draw the plan, and what runs of it measured, as one HTML page that opens offline.

        Raises SpecError."""
        from gnnplan.report import report

        return report(self.document, [Path(run) for run in runs], Path(output))

    def preflight(
        self,
        out: str | Path | None = None,
        *,
        resume: bool = False,
        **options: Any,
    ) -> Preflight:
        """Compare the plan's needs with this machine, as `run` does first.

        resume: of a run that goes on in `out`. options: those of `run`. No process is started and
        nothing is written. Raises SpecError."""
        from gnnplan.api.running import asked_of, preflight

        return preflight(asked_of(self.document, self.loaded, out, options, resume))

    def resume(self, out: str | Path, **options: Any) -> Run:
        """Go on with the run in `out` from its last checkpoint, with its options and those of `run`
        that are given; `epochs` may ask for more.

        The run may have begun with another plan of the same graph and workload: weights and the
        optimizer's state go on, on this plan's ranks and with its strategy. Raises SpecError,
        LostRank."""
        return self._train(out, options, resume=True)

    def _train(self, out: str | Path | None, given: Mapping[str, Any], resume: bool = False) -> Run:
        from gnnplan.api.running import asked_of, train

        return train(asked_of(self.document, self.loaded, out, given, resume))

    def blocks(self) -> list[str | Table]:
        return [
            describe_question(self.document["graph"], self.workload, self.cluster),
            *(f"note: {note}" for note in self.notes),
            *(f"{label + ':':8}{line}" for label, line in self.document["summary"].items()),
            _sizes(self.document["sizes"], self.cluster, self.document["objective"])
            if "sizes" in self.document
            else _leaders(self.answers[:MOST_LEADERS], self.cluster, self.document),
        ]


def _leaders(leaders: Sequence[Answer], cluster: Cluster, document: Mapping[str, Any]) -> Table:
    """The best answers."""
    rows = [{**leader.predicted, **leader.row} for leader in leaders]

    def spread(row: Mapping[str, Any]) -> str:
        low, high = row["epoch_low_s"], row["epoch_high_s"]
        return "-" if low is None or high is None else show_range(low, high)

    def links(sent: Mapping[str, int]) -> str:
        shown = (f"{k.replace('_node', '')} {show_bytes(v)}" for k, v in sent.items())
        return ", ".join(shown) or "none"

    fewer = any(leader.gpus < cluster.ranks for leader in leaders)
    least = WORDS[document.get("objective", "time")][0].split()[0]
    return table(
        "leaders",
        rows,
        column("strategy"),
        column("gpus", show=lambda gpus: of(gpus, cluster.ranks)) if fewer else None,
        column("exact", show=yes_no),
        column("epoch", "epoch_s", show_time),
        ("80 % range", spread),
        column(least, "chance_fastest", show_percent),
        column("regret", "expected_regret", show_percent),
        column("bytes per epoch", "bytes_by_link", links),
        column("set-up", "setup_bytes", show_bytes),
        column("memory/rank", "memory_bytes", show_bytes),
        column("bottleneck"),
        column("$/epoch", "epoch_dollars", show_dollars) if cluster.price is not None else None,
        *counted_columns(rows, document.get("target_accuracy")),
    )


def _sizes(rows: Sequence[Mapping[str, Any]], cluster: Cluster, by: str) -> Table:
    """A row for each mode and number of GPUs: what the whole training takes, and where the knee is.

    by: the objective."""
    unit = "rank" if cluster.device.kind == "cpu" else "GPU"
    least = {
        name: min(rows, key=lambda row: row[name])
        for name in ("training_s", "dollars", *(["joules"] if by == "energy" else []))
        if all(name in row for row in rows)
    }
    words = {"training_s": "fastest", "dollars": "cheapest", "joules": "least energy"}

    def spread(low: float, high: float) -> str:
        return f"{show_long(low)} to {show_long(high)}"

    def marks(row: Mapping[str, Any]) -> str:
        own = [words[name] for name, one in least.items() if one is row]
        return ", ".join([*(["use this"] if row["recommended"] else []), *own])

    return table(
        "the whole training",
        rows,
        column("on", "mode", MODES.__getitem__),
        column(f"{unit}s", "gpus"),
        column("training", "training_s", show_long),
        ("80 % range", lambda row: spread(row["training_low_s"], row["training_high_s"])),
        column(f"{unit} hours", "gpu_hours", "{:.3g}".format),
        column("$", "dollars", show_dollars) if "dollars" in least else None,
        column("energy", "joules", show_energy) if by == "energy" else None,
        column("epoch", "epoch_s", show_time),
        column("memory/rank", "memory_bytes", show_bytes),
        column("exact", show=yes_no),
        column("strategy"),
        ("", marks),
    )


def counted_columns(rows: Sequence[Mapping[str, Any]], accuracy: float | None) -> list[Any]:
    """Columns of what the objective counts; accuracy: to which; None: of an epoch."""
    per = "/epoch" if accuracy is None else f" to {accuracy:g}"
    shown = {
        "epochs_to_accuracy": column(f"epochs{per}", "epochs_to_accuracy", "{:.0f}".format),
        "time_to_accuracy_s": column(f"time{per}", "time_to_accuracy_s", show_time),
        "training_s": column("training", "training_s", show_long),
        "cost": column(f"${per}", "cost", show_dollars) if accuracy is not None else None,
        "energy_j": column(f"energy{per}", "energy_j", show_energy),
    }  # where there are prices, a table has dollars per epoch anyway
    return [shown[name] for name in shown if any(name in row for row in rows)]
