"""Studies convergence: does a lossy strategy reach the accuracy of one process?

    python benchmarks/convergence.py VERB [STUDY ...]

    run         trains what is missing, appends to traces/convergence/<study>.csv
    table       prints tables of what is there
    document    writes the tables into docs/reference/convergence.md
    staleness   traces/convergence/staleness.csv: how far stale rows are from true ones
    summary     traces/quoted/convergence.csv and rounding.csv, which a plan quotes
    figures     docs/figures/*.png (pip install matplotlib)

Every run is `gnnplan plan` and `gnnplan run`, as a user would call them. Seeds are paired: variants
with the same seed have the same initial weights and dropout masks. An interrupted study goes on
where it stopped. Test accuracy is that of the epoch with the best validation accuracy. Differences
are per seed, against the study's first variant, with two standard errors.
"""

from __future__ import annotations

import csv
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from statistics import mean, stdev

from commands import words

TRACES = Path(__file__).resolve().parent.parent / "traces" / "convergence"
DATASETS = Path(
    os.environ.get("GNNPLAN_DATASETS", Path(__file__).resolve().parents[2] / "shared" / "datasets")
)
FIELDS = ("variant", "seed", "epoch", "loss", "train_accuracy", "val_accuracy", "test_accuracy")


@dataclass(frozen=True)
class Study:
    """A graph, a workload, and the variants that train it.

    `variants`: name -> (ranks, strategy, more options of `gnnplan plan`). The first is the
    reference.
    """

    graph: str
    workload: tuple[str, ...]
    epochs: int
    seeds: int
    variants: dict[str, tuple[int, str, tuple[str, ...]]]


GCNII = (
    "--model",
    "gcnii",
    "--layers",
    "32",
    "--hidden",
    "64",
    "--set",
    "dropout=0.5",
    "--set",
    "lr=0.001",
)
PIPELINES = {
    "one process": (1, "graph_parallel", ()),
    "pipeline": (2, "gnnpipe(chunks=8)", ()),
    "no shuffle": (2, "gnnpipe(chunks=8,shuffle=False)", ()),
    "historical gradients": (2, "gnnpipe(chunks=8,historical_gradients=True)", ()),
    "moving history": (2, "gnnpipe(chunks=8,period=1)", ()),
}
# Stages compute what one stage with the same chunks computes. So on the larger graph, where only
# the pipeline's tricks are studied, one rank has all stages.
ON_ONE = {
    name: (
        (1, call.replace("gnnpipe(", "gnnpipe(stages=1,"), more)
        if name not in ("one process", "pipeline")
        else (ranks, call, more)
    )
    for name, (ranks, call, more) in PIPELINES.items()
}
SAGE = (
    "--model",
    "sage",
    "--layers",
    "3",
    "--hidden",
    "64",
    "--set",
    "dropout=0.5",
    "--set",
    "lr=0.003",
)
STALE = {
    "one process": (1, "graph_parallel", ()),
    **{
        f"{name}, {parts} parts": (parts, name, ())
        for parts in (2, 4)
        for name in ("pipegcn", "pipegcn_g", "pipegcn_f", "pipegcn_gf")
    },
    **{
        f"pipegcn_gf, gamma {gamma}, 2 parts": (2, f"pipegcn_gf(gamma={gamma})", ())
        for gamma in (0.0, 0.3, 0.5, 0.7)
    },
}
BOUNDARY = {
    "one process": (1, "graph_parallel", ()),
    **{
        f"bns, p {p}, {parts} parts": (parts, f"bns(p={p})", ())
        for parts in (2, 4)
        for p in (0.1, 0.01)
    },
}
FEW_BITS = {
    "one process": (1, "graph_parallel", ()),
    **{
        f"{strategy}, 2 parts": (2, strategy, ())
        for strategy in (
            "graph_parallel(bits=2)",
            "graph_parallel(bits='adaptive')",
            "pipegcn(bits=2)",
            "bns(p=0.1,bits=2)",
        )
    },
}
RESGCN = (
    "--model",
    "resgcn",
    "--layers",
    "28",
    "--hidden",
    "64",
    "--set",
    "dropout=0.5",
    "--set",
    "lr=0.003",
)
SERVERS = ("--set", "servers=2", "--set", "gpus_per_server=1")
SAMPLED = {
    "one process": (1, "graph_parallel", ()),
    **{
        f"{hops} hops, fanout {k}": (2, f"granndis(max_hop={hops},fanout={k})", SERVERS)
        for hops in (1, 2, 3)
        for k in (15, 25)
    },
    "1 hop, fanout 15, random parts": (
        2,
        "granndis(max_hop=1,fanout=15)",
        (*SERVERS, "--partitioner", "random"),
    ),
}
MINI = (
    "--mode",
    "mini",
    "--batch",
    "512",
    "--fanout",
    "10,10,10",
    "--layers",
    "3",
    "--hidden",
    "64",
    "--set",
    "dropout=0.5",
    "--set",
    "lr=0.003",
)
BATCHES = {
    "one process": (1, "data_parallel", ()),
    "data parallel": (2, "data_parallel", ()),
    "gsplit": (2, "gsplit", ()),
    "p3": (2, "p3", ()),
    "p3, pipelined": (2, "p3(pipelined=True)", ()),
}
# It computes what the pipeline with the same chunks computes, so one seed is enough.
HYBRID = {"hybrid": (4, "gnnpipe(stages=2,chunks=8)", ())}
# Seeds of variants that compute what another computes.
FEW = {"hybrid": 1, "data parallel": 1, "gsplit": 1, "p3": 1}
ENOUGH = 3  # seeds that a plan may quote
STUDIES = {
    "gcnii_chameleon": Study("chameleon", GCNII, 600, 10, {**PIPELINES, **HYBRID}),
    "gcnii_squirrel": Study("squirrel", GCNII, 1000, 10, ON_ONE),
    "sage_physics": Study("coauthor_physics", SAGE, 150, 5, STALE),
    "bns_physics": Study("coauthor_physics", SAGE, 150, 3, BOUNDARY),
    "bns_cs": Study("coauthor_cs", SAGE, 150, 3, BOUNDARY),
    "bns_photo": Study("amazon_photo", SAGE, 150, 3, BOUNDARY),
    "bits_photo": Study("amazon_photo", SAGE, 150, 5, FEW_BITS),
    "bits_cs": Study("coauthor_cs", SAGE, 150, 5, FEW_BITS),
    "bits_physics": Study("coauthor_physics", SAGE, 150, 5, FEW_BITS),
    "mini_sage_physics": Study("coauthor_physics", (*MINI, "--model", "sage"), 30, 5, BATCHES),
    "mini_gat_physics": Study("coauthor_physics", (*MINI, "--model", "gat"), 30, 5, BATCHES),
    "resgcn_cs": Study("coauthor_cs", RESGCN, 150, 5, SAMPLED),
}
# Rows in float32 and in bfloat16: file -> graph, model. traces/README.md says what made them.
ROUNDING = {"rounding_tolokers": ("tolokers", "sage"), "rounding_photo": ("amazon_photo", "sage")}


def run(name: str) -> None:
    """Train every (variant, seed) that the study's file does not have yet."""
    study, path = STUDIES[name], TRACES / f"{name}.csv"
    done = {(row["variant"], row["seed"]) for row in _rows(path)} if path.exists() else set()
    for variant, (ranks, strategy, more) in study.variants.items():
        for seed in range(FEW.get(variant, study.seeds)):
            if (variant, str(seed)) not in done:
                print(f"{name}: {variant}, seed {seed}", file=sys.stderr, flush=True)
                _append(path, variant, seed, _train(study, ranks, strategy, more, seed))


def _train(
    study: Study, ranks: int, strategy: str, more: tuple[str, ...], seed: int
) -> list[dict[str, object]]:
    """metrics.jsonl's evaluated epochs of one run."""
    with tempfile.TemporaryDirectory() as scratch:
        plan, out = f"{scratch}/plan.json", f"{scratch}/run"
        question = [
            "--graph",
            str(DATASETS / f"{study.graph}.npz"),
            "--ranks",
            str(ranks),
            "--strategy",
            strategy,
        ]
        _call("plan", *question, *study.workload, *more, "--set", f"seed={seed}", "-o", plan)
        _call(
            "run",
            plan,
            "--epochs",
            str(study.epochs),
            "--eval-every",
            "10",
            "--out",
            out,
            "--timeout",
            "600",
        )
        lines = [json.loads(line) for line in Path(out, "metrics.jsonl").read_text().splitlines()]
        return [line for line in lines if line["test_accuracy"] is not None]


def _call(*arguments: str) -> None:
    command = [sys.executable, "-m", "gnnplan", *arguments]
    subprocess.run(
        command, check=True, capture_output=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )


def _append(path: Path, variant: str, seed: int, lines: list[dict[str, object]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.writer(file)
        if new:
            writer.writerow(FIELDS)
        for line in lines:
            numbers = [f"{float(str(line[field])):.6g}" for field in FIELDS[3:]]
            writer.writerow([variant, seed, line["epoch"], *numbers])


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@dataclass(frozen=True)
class Outcome:
    """One run. Accuracies are in percent.

    `reached` is the epoch in which validation accuracy comes within half a point of the
    reference's best; None if it never does.
    """

    test: float
    loss: float
    best_epoch: int
    reached: int | None


def outcomes(name: str) -> dict[str, dict[str, Outcome]]:
    """variant -> seed -> outcome."""
    runs: dict[str, dict[str, list[dict[str, str]]]] = {}
    for row in _rows(TRACES / f"{name}.csv"):
        runs.setdefault(row["variant"], {}).setdefault(row["seed"], []).append(row)
    reference = next(iter(runs.values()))
    goal = {
        seed: max(float(row["val_accuracy"]) for row in rows) - 0.005
        for seed, rows in reference.items()
    }
    found: dict[str, dict[str, Outcome]] = {}
    for variant, of in runs.items():
        for seed, rows in of.items():
            best = max(rows, key=lambda row: float(row["val_accuracy"]))
            reached = next(
                (
                    int(row["epoch"])
                    for row in rows
                    if float(row["val_accuracy"]) >= goal.get(seed, 2.0)
                ),
                None,
            )
            outcome = Outcome(
                100 * float(best["test_accuracy"]),
                float(rows[-1]["loss"]),
                int(best["epoch"]),
                reached,
            )
            found.setdefault(variant, {})[seed] = outcome
    return found


def table(name: str) -> str:
    """A row per variant: test accuracy and its paired difference to the reference, loss, epochs."""
    if name == "staleness":
        return _staleness_table()
    if not (TRACES / f"{name}.csv").exists():
        return "Not run yet."
    found = outcomes(name)
    first, reference = next(iter(found.items()))
    lines = [
        (
            f"| {name} | seeds | test accuracy [%] | minus {first} [points] | final training loss |"
            " best epoch | epochs to its accuracy |"
        ),
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for variant, of in found.items():
        gaps = _gaps(of, reference)
        cells = [
            _with_error([o.test for o in of.values()]),
            _with_error(gaps),
            _with_error([o.loss for o in of.values()], 4),
            f"{mean(o.best_epoch for o in of.values()):.0f}",
            _reached(of),
        ]
        lines.append(f"| {variant} | {len(of)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _staleness_table(first: int = 101) -> str:
    """Relative errors, mean over the epochs from `first` on."""
    rows = [row for row in _rows(TRACES / "staleness.csv") if int(row["epoch"]) >= first]
    columns = list(dict.fromkeys((row["what"], row["layer"]) for row in rows))
    names = [f"{'rows' if what == 'f' else 'gradients'}, layer {layer}" for what, layer in columns]
    lines = [f"| dropout | strategy | {' | '.join(names)} |", "|--:|---|" + "--:|" * len(columns)]
    for dropout, strategy in dict.fromkeys((row["dropout"], row["strategy"]) for row in rows):
        here = [row for row in rows if (row["dropout"], row["strategy"]) == (dropout, strategy)]
        errors = [
            mean(
                float(row["error"]) / float(row["true"])
                for row in here
                if (row["what"], row["layer"]) == column
            )
            for column in columns
        ]
        lines.append(
            f"| {dropout} | {strategy} | {' | '.join(f'{error:.3f}' for error in errors)} |"
        )
    return "\n".join(lines)


def document() -> None:
    """Put the tables where docs/reference/convergence.md has their marks."""
    path = TRACES.parent.parent / "docs" / "reference" / "convergence.md"
    marked = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.S)
    path.write_text(
        marked.sub(lambda found: f"{found[1]}{table(found[2])}\n{found[3]}", path.read_text())
    )


def _reached(of: dict[str, Outcome]) -> str:
    epochs = [outcome.reached for outcome in of.values() if outcome.reached]
    if not epochs:
        return "never"
    some = "" if len(epochs) == len(of) else f" ({len(epochs)} of {len(of)} seeds)"
    return f"{mean(epochs):.0f}{some}"


def _gaps(of: dict[str, Outcome], reference: dict[str, Outcome]) -> list[float]:
    """Paired differences in test accuracy [points]."""
    return [
        outcome.test - reference[seed].test for seed, outcome in of.items() if seed in reference
    ]


def rounding() -> list[dict[str, str]]:
    """What rows in bfloat16 cost in accuracy, a row per graph, for plans to quote."""
    rows = []
    for name, (graph, model) in ROUNDING.items():
        found = outcomes(name)
        gaps = _gaps(found["bfloat16"], found["float32"])
        rows.append(
            {
                "graph": graph,
                "model": model,
                "seeds": str(len(gaps)),
                "points": f"{mean(gaps):.2f}",
                "two_errors": _two_errors(gaps),
            }
        )
    return rows


def summarise() -> None:
    """Write what variants and rounded rows cost in accuracy and in epochs, for plans to quote.

    Variants of fewer than ENOUGH seeds are left out.
    """
    rounded = rounding()
    path = TRACES.parent.parent / "traces" / "quoted" / "rounding.csv"
    with path.open("w", newline="") as file:
        quoted = csv.DictWriter(file, rounded[0], lineterminator="\n")
        quoted.writeheader()
        quoted.writerows(rounded)
    path = TRACES.parent.parent / "traces" / "quoted" / "convergence.csv"
    path.parent.mkdir(exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(
            [
                "study",
                "graph",
                "model",
                "strategy",
                "ranks",
                "seeds",
                "points",
                "two_errors",
                "epochs_ratio",
            ]
        )
        for name, study in STUDIES.items():
            if not (TRACES / f"{name}.csv").exists():
                continue
            found = outcomes(name)
            reference = next(iter(found.values()))
            for variant, of in list(found.items())[1:]:
                pairs = [(of[seed], reference[seed]) for seed in of if seed in reference]
                if len(pairs) < ENOUGH:
                    continue
                gaps = _gaps(of, reference)
                ratios = [
                    ours.reached / theirs.reached
                    for ours, theirs in pairs
                    if ours.reached and theirs.reached
                ]
                # empty: some seed never gets there
                ratio = f"{mean(ratios):.2f}" if len(ratios) == len(pairs) else ""
                model = study.workload[study.workload.index("--model") + 1]
                ranks, strategy, _ = study.variants[variant]
                writer.writerow(
                    [
                        name,
                        study.graph,
                        model,
                        strategy,
                        ranks,
                        len(gaps),
                        f"{mean(gaps):.2f}",
                        _two_errors(gaps),
                        ratio,
                    ]
                )


def _with_error(values: list[float], digits: int = 2) -> str:
    """Mean and two standard errors."""
    error = f" ± {_two_errors(values, digits)}" if len(values) > 1 else ""
    return f"{mean(values):.{digits}f}{error}"


def _two_errors(values: list[float], digits: int = 2) -> str:
    return f"{2 * stdev(values) / sqrt(len(values)):.{digits}f}"


def staleness(epochs: int = 150) -> None:
    """Write ||used - true|| and ||true|| of halo rows ('f') and gradients ('b'): PipeGCN's Fig. 5.

    Per layer and epoch, of GraphSAGE on Coauthor Physics in 2 parts, with and without smoothing,
    with and without dropout.
    """
    with (TRACES / "staleness.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["strategy", "dropout", "what", "layer", "epoch", "error", "true"])
        for dropout in ("0.5", "0.0"):
            for strategy in ("pipegcn", "pipegcn_gf(gamma=0.5)", "pipegcn_gf"):
                with tempfile.TemporaryDirectory() as scratch:
                    plan, out = f"{scratch}/plan.json", f"{scratch}/run"
                    ask = [
                        "--graph",
                        str(DATASETS / "coauthor_physics.npz"),
                        "--ranks",
                        "2",
                        "--strategy",
                        strategy,
                        *SAGE,
                    ]
                    _call("plan", *ask, "--set", f"dropout={dropout}", "-o", plan)
                    _call(
                        "run",
                        plan,
                        "--epochs",
                        str(epochs),
                        "--out",
                        out,
                        "--timeout",
                        "600",
                        "--staleness-errors",
                    )
                    ranks = [
                        json.loads(Path(out, f"rank{rank}.json").read_text())["staleness"]
                        for rank in range(2)
                    ]
                for key in ranks[0]:
                    what, layer = key.split(":l")
                    for epoch in range(epochs):
                        squares = [sum(rank[key][epoch][i] for rank in ranks) for i in (0, 1)]
                        writer.writerow(
                            [
                                strategy,
                                dropout,
                                what,
                                layer,
                                epoch + 1,
                                *(f"{sqrt(square):.5g}" for square in squares),
                            ]
                        )


def figures() -> None:
    """Draw every study (mean over seeds, two standard errors shaded), and staleness over epochs."""
    import matplotlib.pyplot as plt

    folder = TRACES.parent.parent / "docs" / "figures"
    folder.mkdir(parents=True, exist_ok=True)
    for name, study in STUDIES.items():
        if not (TRACES / f"{name}.csv").exists():
            continue
        rows = _rows(TRACES / f"{name}.csv")
        figure, axes = plt.subplots(1, 2, figsize=(12, 4.5), layout="constrained")
        for variant in study.variants:
            for axis, field, factor in zip(axes, ("loss", "test_accuracy"), (1, 100), strict=True):
                points: dict[int, list[float]] = {}
                for row in rows:
                    if row["variant"] == variant:
                        points.setdefault(int(row["epoch"]), []).append(factor * float(row[field]))
                if not points:
                    continue
                middle = [mean(values) for values in points.values()]
                error = [
                    2 * stdev(values) / sqrt(len(values)) if len(values) > 1 else 0.0
                    for values in points.values()
                ]
                (line,) = axis.plot(list(points), middle, label=variant, lw=1.2)
                low, high = (
                    [m + sign * e for m, e in zip(middle, error, strict=True)] for sign in (-1, 1)
                )
                axis.fill_between(list(points), low, high, color=line.get_color(), alpha=0.12, lw=0)
                axis.set(
                    xlabel="epoch",
                    ylabel={"loss": "training loss", "test_accuracy": "test accuracy [%]"}[field],
                )
        axes[1].legend(fontsize=7)
        figure.suptitle(f"{study.graph}: {' '.join(study.workload[1:6:2])}", fontsize=10)
        figure.savefig(folder / f"{name}.png", dpi=90)
    if (TRACES / "staleness.csv").exists():
        _staleness_figure(folder / "staleness.png")


def _staleness_figure(path: Path) -> None:
    """A column per layer and way, a row per dropout: relative error over epochs."""
    import matplotlib.pyplot as plt

    rows = _rows(TRACES / "staleness.csv")
    columns = list(dict.fromkeys((row["what"], row["layer"]) for row in rows))
    dropouts = list(dict.fromkeys(row["dropout"] for row in rows))
    figure, grid = plt.subplots(
        len(dropouts),
        len(columns),
        figsize=(3.2 * len(columns), 3 * len(dropouts)),
        layout="constrained",
        squeeze=False,
    )
    for axes, dropout in zip(grid, dropouts, strict=True):
        for axis, (what, layer) in zip(axes, columns, strict=True):
            for strategy in dict.fromkeys(row["strategy"] for row in rows):
                key = {"strategy": strategy, "dropout": dropout, "what": what, "layer": layer}
                here = [row for row in rows if key.items() <= row.items()]
                relative = [
                    float(row["error"]) / max(float(row["true"]), 1e-12) for row in here[2:]
                ]
                axis.plot([int(row["epoch"]) for row in here[2:]], relative, label=strategy, lw=1)
            axis.set(
                title=f"{'rows' if what == 'f' else 'gradients'}, layer {layer}, dropout {dropout}",
                yscale="log",
            )
            axis.title.set_fontsize(8)
    grid[0][0].legend(fontsize=7)
    figure.supxlabel("epoch", fontsize=9)
    figure.supylabel("Frobenius norm of stale minus true, over that of true", fontsize=9)
    figure.savefig(path, dpi=90)


if __name__ == "__main__":
    verb, *named = words(__doc__)
    names = named or list(STUDIES)
    if verb in ("run", "table"):
        for name in names:
            run(name) if verb == "run" else print(f"\n{table(name)}")
    else:
        {"summary": summarise, "staleness": staleness, "figures": figures, "document": document}[
            verb
        ]()
