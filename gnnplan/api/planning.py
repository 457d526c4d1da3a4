"""`plan`: choose a strategy and the GPUs to run it on, with the reasons; returns a Plan."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gnnplan.api import DEFAULT_GRAPH
from gnnplan.api.arguments import (
    AnyCluster,
    AnyPath,
    AnyWorkload,
    Overrides,
    Question,
    ask,
    settings_of,
    several,
    typed,
)
from gnnplan.api.view import Blocks, TextBlock, View, of
from gnnplan.planner.cluster.spec import Cluster
from gnnplan.planner.decision import plan as documents
from gnnplan.planner.decision.choices import ModeComparison, choose, compare
from gnnplan.planner.decision.objective import (
    MODES,
    WORDS,
    Objective,
    Target,
    epochs_by_mode,
    with_fields,
)
from gnnplan.planner.decision.plan import Answer, describe_question, take
from gnnplan.planner.decision.search import Search, SearchResult, one_reason
from gnnplan.planner.evidence.runs import objective_of, trainings
from gnnplan.planner.gnn.workload import Workload
from gnnplan.planner.graph.sampling import count_items
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies import Strategy, parse
from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.planner.vocabulary.files import Json, one_of
from gnnplan.planner.vocabulary.progress import Notify, reports_progress, silent
from gnnplan.planner.vocabulary.text import Table, column, table, yes_no
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

MOST_LEADERS = 8  # rows of the printed table of strategies
PER = ("training", "epoch")


@reports_progress
def plan(
    graph: Any = DEFAULT_GRAPH,
    cluster: AnyCluster = "local",
    workload: AnyWorkload | None = None,
    *,
    exact: bool = False,
    objective: str | None = None,
    per: str | None = None,
    target_accuracy: float | None = None,
    evidence: AnyPath | Iterable[AnyPath] = (),
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
        graph: A file or folder in any format of docs/how-to/bring-your-graph.md, the name of a
            well-known graph, 'synthetic:...', or an object: a DGLGraph, a PyG Data, a networkx
            Graph, a SciPy matrix, an edge_index [2, E]. An object is written to the cache,
            where the ranks read it.
        cluster: A preset, a YAML file, a mapping of fields, or a Cluster. 'local' is this machine.
        workload: A YAML file, a preset, a mapping of fields, or a Workload.
        exact: Consider only strategies that compute the same gradient as one process.
        objective: Quantity to minimize: time, cost (the cluster needs a price), energy (the device
            needs a power), or value: dollars for GPU hours plus dollars for waiting ($20 per hour;
            a GPU without a price counts $2.50 per hour; a run takes five minutes besides its
            epochs). By value, the smallest number of GPUs within 10 % of the best wins.  [default:
            value per training, time per epoch]
        per: What to compare: training (all epochs, on the full graph or on mini-batches, whichever
            is better) or epoch.  [default: training on GPUs, epoch on CPU ranks]
        target_accuracy: Compare the time (or `objective`) to reach this validation accuracy, as
            0.93, instead of an epoch. The number of epochs is read from the runs in `evidence`;
            strategies without such a run are rejected.
        evidence: Folders of runs, or folders that contain folders of runs.
        strategy: Plan this strategy only, as 'gnnpipe(stages=4,chunks=16)'; knobs may be left out.
        ranks: Number of ranks, the same on each server; all on one server if servers=1 is set.
            [default: all, or fewer GPUs where that is faster]
        overrides: Fields of the cluster or workload to change: {'inter_node.bandwidth': '25GB/s'}.
        partitioner: metis (minimizes the edge cut), metis-volume (minimizes halo rows), kaminpar
            (edge cut; needs less time and memory on large graphs; an extra), kaminpar-train (also
            balances training vertices), hash, random, or auto: metis, but kaminpar above 5 million
            edges if it is installed.
        directed: Keep the direction of edges; without it the graph is made undirected.
        features: Features, if the graph's file has none: a .npy, .npz, .pt or text file of
            [vertices, features]; or a number: the width of generated stand-in features.
        labels: Labels, if the graph's file has none: a .npy, .pt or text file, or a .json of
            {"vertex": class}.
        split: Split, if the graph's file has none: a folder, .npz or .pt with train, val and test
            (masks or ids), or a .json of ids.
        task: What to learn: node (class of a vertex), link (whether an edge links two vertices;
            with `mode` mini, a batch holds edges), regression (a number per vertex; a regression
            `loss` or labels with fractions imply it), or none: the graph has no labels, and
            stand-in labels are generated to plan, simulate and run.  [default: node]
        depths: Add to the reasons (`Plan.explain`) the numbers of layers at which another family
            wins, as --explain does; takes as long as several plans.
        notify: Called with progress messages (`gnnplan.progress`).
        fields: Fields of gnnplan.Workload: layers=3, fanout=[15, 10]. model is 'gcn',
            'model.py:MyGNN', or a live torch.nn.Module (training starts from its parameters) or its
            class. dtype='auto' lets the plan choose float32 or bfloat16; with `exact` it is
            float32.

    Raises:
        SpecError: The input is wrong.
        Infeasible: No strategy fits.

    >>> import gnnplan
    >>> found = gnnplan.plan("flickr", "dgx_a100", model="gcn", hidden=16, mode="full", exact=True)
    >>> found.best.exact, found.best.gpus <= 8, len(found.table) == len(found.answers)
    (True, True, True)
    """
    given = {k: v for k, v in locals().items() if k not in ("notify", "depths", "fields")}
    question, how, modes = wish(**given, may_choose_dtype=True, **fields)
    wholes = dict[str, ModeComparison]()  # dtype of rows -> comparison of whole trainings

    def find(problem: Problem) -> SearchResult:
        if how.objective.epochs_by_mode is None:
            return how(problem)
        whole = compare(problem, modes, how.objective.epochs_by_mode, how)
        wholes[problem.workload.dtype] = whole
        return whole.found

    choice = choose(question.problem, find, exact) if question.chooses_dtype else None
    result = choice.found if choice else find(question.problem)
    document = documents.make(result, depths)
    for told in (wholes.get(result.problem.workload.dtype), choice):
        document = told.add_to_plan(document) if told else document
    found = Plan(document, result.problem.placed(documents.placement(document)))
    found.notes = question.notes
    return found


@typed
def wish(
    *about: Any,
    exact: bool = False,
    strategy: str | None = None,
    objective: str | None = None,
    per: str | None = None,
    target_accuracy: float | None = None,
    evidence: AnyPath | Iterable[AnyPath] = (),
    **asked: Any,
) -> tuple[Question, Search, list[str]]:
    """Return the question that `plan`'s arguments describe, its search, and the modes to search.

    Mistakes are reported before the graph is read. Raises SpecError, and Mismatch if another
    version of gnnplan wrote a run in `evidence`.
    """
    forced, folders = None if strategy is None else parse(strategy), several(evidence)
    if objective is not None:
        objective = one_of("--objective", objective, WORDS)
    if per is not None:
        per = one_of("--per", per, PER)
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
    target = None if target_accuracy is None else Target(target_accuracy, trainings(folders))
    question = ask(*about, **asked)
    problem, given = question.problem, question.given
    workload, counted = problem.workload, Objective(objective or "time", target)
    is_gpu = problem.cluster.device.kind != "cpu"
    if (per or ("training" if is_gpu and target is None else "epoch")) == "training":
        epochs = workload.epochs if "epochs" in given else None
        mode = workload.mode if "mode" in given else None
        of_modes = epochs_by_mode(problem.stats.name, epochs, mode)
        counted = Objective(objective or "value", epochs_by_mode=of_modes)
    # the mode that the user set, or the forced strategy's; for links and modules the workload's
    modes = list(MODES) if forced is None else [forced.mode]
    if "mode" in given or workload.task == "link" or workload.module:
        modes = [workload.mode]
    planned = [workload.mode] if counted.epochs_by_mode is None else modes
    items = count_items(workload, problem.stats)
    if modes == ["mini"] and "batch" not in given and 0 < items < workload.batch:
        kind = "edges" if workload.task == "link" else "training vertices"
        all_of = f"a batch has all {items:,} {kind} of {problem.stats.name}, fewer than the"
        note = f"{all_of} default of {workload.batch:,} (--batch)"
        problem = with_fields(problem, batch=items)
        question = replace(question, problem=problem, notes=(*question.notes, note))
    unread = [
        f"--{name.replace('_', '-')} {why}"
        for name, why in workload.unread(sorted(given), planned).items()
    ]
    question = replace(question, notes=(*question.notes, *unread))
    is_cut = problem.graph is not None and problem.graph.cut is not None  # the parts fix the ranks
    may_use_fewer = asked.get("ranks") is None and not is_cut
    return question, Search(exact, forced, may_use_fewer, counted), modes


@typed
def load_plan(path: str | Path, of_any_version: bool = False) -> Plan:
    """Read a plan from a file that `Plan.write` or `gnnplan plan -o` wrote.

    of_any_version: accept a plan of another version; `run` and `preflight` then report it. Raises
    SpecError if the file is not a plan, Mismatch if another version wrote it.
    """
    return Plan(documents.read(path, of_any_version))


class Plan(View):
    """The result of `plan`: `best`, the ranked `answers`, and `document`, the content of plan.json.

    notes: changes made to the graph or model, as 'made undirected', and assumptions on them."""

    notes: tuple[str, ...] = ()

    def __init__(self, document: Json, problem: Problem | None = None) -> None:
        self.document = document  # the content of plan.json
        self.loaded = problem
        """`problem` if its graph is loaded already, else None."""

    def __getstate__(self) -> dict[str, Any]:
        """Return what a pickle holds: a copy reads its graph again."""
        return {**vars(self), "loaded": None}

    @property
    def best(self) -> Answer:
        """The recommended strategy."""
        return Answer.of(self.document["best"])

    @property
    def answers(self) -> list[Answer]:
        """All strategies that fit in memory, the recommended one first."""
        return [Answer.of(a) for a in (self.document["best"], *self.document["alternatives"])]

    @property
    def table(self) -> list[Json]:
        """The numbers of each answer, one row per answer; pandas.DataFrame takes the list."""
        return [answer.row for answer in self.answers]

    @property
    def strategy(self) -> Strategy:
        """The recommended strategy, as the planner's object."""
        return documents.chosen(self.document)

    @property
    def problem(self) -> Problem:
        """The planned problem, with ranks placed on GPUs; a plan from a file loads its graph first.

        Raises SpecError, or Mismatch if the graph has changed since the plan was made.
        """
        if self.loaded is None:
            self.loaded = documents.question(self.document)
        return self.loaded

    @property
    def cluster(self) -> Cluster:
        return Cluster.model_validate(self.document["cluster"])

    @property
    def workload(self) -> Workload:
        return Workload.model_validate(self.document["workload"])

    def write(self, path: str | Path) -> None:
        """Write the plan as JSON, which `load_plan` and the command line read."""
        documents.write(path, self.document)

    def explain(self) -> Blocks:
        """Return all reasons: the placement, the bottleneck, why other strategies lost, and why
        strategies were rejected."""
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
                *(
                    f"- not {one_reason(o['strategy'], o['reason'])}"
                    for o in self.document["rejected"]
                ),
            ]
        )

    @typed
    def choose(self, strategy: str) -> Plan:
        """Return the plan with another of its answers as the best, without planning again.

        strategy: 'NEXT' (the fastest alternative) or a strategy's name in `answers`. Raises
        SpecError.
        """
        document = take(self.document, self.problem, strategy)
        return Plan(document, self.problem.placed(documents.placement(document)))

    @reports_progress
    @typed
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
        """Simulate the schedule in virtual time, optionally on another cluster or with noise.

        Args:
            steps: Epochs to simulate (an epoch on the full graph is one step); the time of an epoch
                is that of the last ones, the steady state.
            overrides: Fields of the cluster or workload to change, as for `plan`.
            jitter: Standard deviation of a lognormal factor of mean 1 on each computation's time.
            stragglers: {3: 2.0}: rank 3 computes twice as long.
            repetitions: Number of simulations with `jitter` or stragglers.
            seed: Seed of `jitter`.
            flows: Give each message of an exchange its own max-min fair share of the links, instead
                of one share to the whole exchange (slower to simulate).
            trace: Folder for a Chrome/Kineto trace per rank (open it with Perfetto). With `jitter`
                or stragglers, the trace shows the first noisy repetition.
            notify: Called with progress messages.

        Raises:
            SpecError: An argument is wrong.
            Infeasible: No variant of the strategy fits the changed cluster.
        """
        from gnnplan.api.simulation import Playing, Simulation
        from gnnplan.planner.decision.sweep import moved, point

        playing = Playing(steps, jitter, stragglers or {}, repetitions, seed)
        plan, strategy, settings = self.problem, self.strategy, settings_of(overrides)
        is_exact = documents.is_exact(self.document) or strategy.exact
        there = point(plan, {}, settings) if settings else plan
        how = Search(is_exact, may_use_fewer=False)
        candidate = moved(there, strategy, plan, how, as_it_is=True)
        return Simulation(candidate, playing, flows, None if trace is None else Path(trace))

    @reports_progress
    @typed
    def sweep(
        self,
        fields: Mapping[str, Any] | Iterable[str],
        *,
        overrides: Overrides = (),
        notify: Notify = silent,
        **playing: Any,
    ) -> Sweep:
        """Plan and simulate every combination of the fields' values, as {'servers': [1, 2, 4]}.

        The values of 'device' are presets, whose GPU is taken; those of 'ranks' are numbers of
        ranks. The other arguments are those of `simulate`. Raises SpecError."""
        from gnnplan.api.simulation import Playing, Sweep

        played = Playing(**playing)
        if "target_accuracy" in self.document:
            raise SpecError(
                "a sweep compares epochs, and this plan trainings to an accuracy (target_accuracy:"
                f" {self.document['target_accuracy']:g}); plan without --target-accuracy to sweep"
            )
        how = Search(documents.is_exact(self.document), objective=objective_of(self.document))
        return Sweep(self.problem, self.strategy, how, fields, played, overrides)

    @typed
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
        """Train the model on ranks of this machine: over NCCL on GPUs, over Gloo on CPUs.

        Args:
            out: Folder for the run's files; it must not hold a run.  [default: a new one in runs/]
            epochs: Number of epochs.  [default: the plan's]
            eval_every: Epochs between evaluations; the last epoch is always evaluated, and with 0
                it is the only one.
            timeout_s: Seconds that a rank waits for its peers before it gives up.
            checkpoint_every: Epochs between checkpoints; 0: none. The last two are kept.
            restarts: How many times at most to restart all ranks from the last checkpoint after a
                rank is lost.
            emulate: Emulate the plan's servers as network namespaces of this Linux machine, with
                NICs of this rate between them: 400Mbit/s, or unshaped (no limit). Needs root.
            staleness_errors: Measure how far stale rows and gradients are from the fresh ones, per
                layer and epoch; written to rank*.json.
            gradient_errors: Measure also how far the weights' gradients are from exact ones, by a
                second pass per epoch (graph_parallel and pipegcn).
            tensorboard: Folder for TensorBoard logs: loss, accuracies, seconds, bytes and memory of
                every epoch.

        Raises:
            SpecError: An option is wrong, or the plan cannot run on this machine.
            LostRank: A rank was lost, and no restart is left.
        """
        given = {name: value for name, value in locals().items() if name not in ("self", "out")}
        return self._train(out, given)

    @reports_progress
    @typed
    def report(
        self, output: str | Path, runs: AnyPath | Iterable[AnyPath] = (), notify: Notify = silent
    ) -> Path:
        """Draw the plan and the measurements of its runs as one HTML page that opens offline.

        Raises SpecError."""
        from gnnplan.report import report

        return report(self.document, [Path(run) for run in several(runs)], Path(output))

    def preflight(
        self,
        out: str | Path | None = None,
        *,
        resume: bool = False,
        **options: Any,
    ) -> Preflight:
        """Check that this machine meets the plan's needs, as `run` does first.

        resume: check a run that resumes in `out`. options: options of `run`. No process is started
        and nothing is written. Raises SpecError."""
        from gnnplan.api.running import Preflight, asked_of
        from gnnplan.executor.launch.preflight import look

        return Preflight(look(asked_of(self.document, self.loaded, out, options, resume)))

    def resume(self, out: str | Path, **options: Any) -> Run:
        """Resume the run in `out` from its last checkpoint, with the run's options. `options` of
        `run` replace the run's; `epochs` may be larger.

        The run may have used another plan of the same graph and workload: this plan's ranks and
        strategy continue with the run's weights and optimizer state. Raises SpecError, LostRank."""
        return self._train(out, options, resume=True)

    def _train(self, out: str | Path | None, given: Mapping[str, Any], resume: bool = False) -> Run:
        from gnnplan.api.running import asked_of, train

        return train(asked_of(self.document, self.loaded, out, given, resume))

    def blocks(self) -> list[TextBlock]:
        return [
            describe_question(self.document["graph"], self.workload, self.cluster),
            *(f"note: {note}" for note in self.notes),
            *(f"{label + ':':8}{line}" for label, line in self.document["summary"].items()),
            _sizes(self.document["sizes"], self.cluster, self.document["objective"])
            if "sizes" in self.document
            else _leaders(self.answers[:MOST_LEADERS], self.cluster, self.document),
        ]


def _leaders(leaders: Sequence[Answer], cluster: Cluster, document: Mapping[str, Any]) -> Table:
    """Return the table of the best answers."""
    rows = [{**leader.predicted, **leader.row} for leader in leaders]

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
        ("80 % range", epoch_range),
        column(least, "chance_fastest", show_percent),
        column("regret", "expected_regret", show_percent),
        column("bytes per epoch", "bytes_by_link", links),
        column("set-up", "setup_bytes", show_bytes),
        column("memory/rank", "memory_bytes", show_bytes),
        column("bottleneck"),
        column("$/epoch", "epoch_dollars", show_dollars) if cluster.price is not None else None,
        *counted_columns(rows, document.get("target_accuracy")),
    )


def epoch_range(row: Mapping[str, Any]) -> str:
    """Return the range that holds 80 % of what an epoch may take; '-' if it is unknown."""
    low, high = row.get("epoch_low_s"), row.get("epoch_high_s")
    return "-" if low is None or high is None else show_range(low, high)


def _sizes(rows: Sequence[Mapping[str, Any]], cluster: Cluster, by: str) -> Table:
    """Return the table of whole trainings, a row per mode and number of GPUs. by: the objective."""
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
    """Return the columns of the objective's quantities: to an accuracy or, if None, per epoch."""
    per = "/epoch" if accuracy is None else f" to {accuracy:g}"
    shown = {
        "epochs_to_accuracy": column(f"epochs{per}", "epochs_to_accuracy", "{:.0f}".format),
        "time_to_accuracy_s": column(f"time{per}", "time_to_accuracy_s", show_time),
        "training_s": column("training", "training_s", show_long),
        "cost": column(f"${per}", "cost", show_dollars) if accuracy is not None else None,
        "energy_j": column(f"energy{per}", "energy_j", show_energy),
    }  # no cost per epoch: with a price, the table has the column $/epoch already
    return [shown[name] for name in shown if any(name in row for row in rows)]
