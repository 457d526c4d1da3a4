"""Studies convergence: does a lossy strategy reach the accuracy of one process?

    python benchmarks/convergence.py VERB [STUDY ...]

    run         train missing variants, append to traces/convergence/<study>.csv
    table       print tables of the rows
    document    write the tables into docs/reference/convergence.md
    staleness   write traces/convergence/staleness.csv: differences of stale and true rows
    summary     write traces/quoted/convergence.csv and rounding.csv, which plans quote
    figures     draw docs/figures/*.png (pip install matplotlib)

Every run is a `gnnplan plan` and a `gnnplan run`, as a user would call them. Seeds are paired:
variants with the same seed have the same initial weights and dropout masks. An interrupted study
continues where it stopped. Test accuracy is that of the epoch with the best validation accuracy.
Differences are per seed, to the study's first variant, with two standard errors.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from commands import DATASETS, ROOT, header, line, plan, rows, train, words, write
from commands import TRACES as ALL_TRACES

TRACES, QUOTED = ALL_TRACES / "convergence", ALL_TRACES / "quoted"
FIELDS = ("loss", "train_accuracy", "val_accuracy", "test_accuracy")
Variants = dict[str, tuple[int, str, dict[str, Any]]]


@dataclass(frozen=True)
class Study:
    """A graph, a workload, and the variants that train it.

    variants: name -> (ranks, strategy, more options of `gnnplan plan`). The first variant is the
    reference.
    """

    graph: str
    workload: dict[str, Any]
    epochs: int
    seeds: int
    variants: Variants


def on_parts(ranks: int, *strategies: str) -> Variants:
    """Return variants: the strategies on `ranks` ranks, with a part of the graph per rank."""
    return {f"{strategy}, {ranks} parts": (ranks, strategy, {}) for strategy in strategies}


GCNII = {"model": "gcnii", "layers": 32, "hidden": 64, "dropout": 0.5, "lr": 0.001}
SAGE = {"model": "sage", "layers": 3, "hidden": 64, "dropout": 0.5, "lr": 0.003}
RESGCN = {**SAGE, "model": "resgcn", "layers": 28}
MINI = {**SAGE, "mode": "mini", "batch": 512, "fanout": "10,10,10"}
ONE: Variants = {"one process": (1, "graph_parallel", {})}
PIPELINES: Variants = {
    **ONE,
    "pipeline": (2, "gnnpipe(chunks=8)", {}),
    "no shuffle": (2, "gnnpipe(chunks=8,shuffle=False)", {}),
    "historical gradients": (2, "gnnpipe(chunks=8,historical_gradients=True)", {}),
    "moving history": (2, "gnnpipe(chunks=8,period=1)", {}),
}
# Several stages compute the same as one stage with the same chunks. So on the larger graph, where
# only the pipeline's tricks are studied, one rank has all layers.
TRICKS = ("no shuffle", "historical gradients", "moving history")
ON_ONE = PIPELINES | {
    name: (1, PIPELINES[name][1].replace("gnnpipe(", "gnnpipe(stages=1,"), {}) for name in TRICKS
}
SMOOTHED = ("pipegcn", "pipegcn_g", "pipegcn_f", "pipegcn_gf")
STALE: Variants = {
    **ONE,
    **on_parts(2, *SMOOTHED),
    **on_parts(4, *SMOOTHED),
    **{
        f"pipegcn_gf, gamma {gamma}, 2 parts": (2, f"pipegcn_gf(gamma={gamma})", {})
        for gamma in (0.0, 0.3, 0.5, 0.7)
    },
}
BOUNDARY: Variants = {
    **ONE,
    **{
        f"bns, p {p}, {parts} parts": (parts, f"bns(p={p})", {})
        for parts in (2, 4)
        for p in (0.1, 0.01)
    },
}
ROUNDED = ("graph_parallel(bits=2)", "graph_parallel(bits='adaptive')", "pipegcn(bits=2)")
FEW_BITS = ONE | on_parts(2, *ROUNDED, "bns(p=0.1,bits=2)")
SERVERS = {"set": ["servers=2", "gpus_per_server=1"]}
SAMPLED: Variants = {
    **ONE,
    **{
        f"{hops} hops, fanout {k}": (2, f"granndis(max_hop={hops},fanout={k})", SERVERS)
        for hops in (1, 2, 3)
        for k in (15, 25)
    },
    "1 hop, fanout 15, random parts": (
        2,
        "granndis(max_hop=1,fanout=15)",
        {**SERVERS, "partitioner": "random"},
    ),
}
BATCHES: Variants = {
    "one process": (1, "data_parallel", {}),
    "data parallel": (2, "data_parallel", {}),
    "gsplit": (2, "gsplit", {}),
    "p3": (2, "p3", {}),
    "p3, pipelined": (2, "p3(pipelined=True)", {}),
}
# The hybrid computes the same as the pipeline with the same chunks, so one seed is enough.
HYBRID: Variants = {"hybrid": (4, "gnnpipe(stages=2,chunks=8)", {})}
# number of seeds of variants that compute the same as another variant
FEW = {"hybrid": 1, "data parallel": 1, "gsplit": 1, "p3": 1}
ENOUGH = 3  # fewest seeds of a variant that a plan quotes
STUDIES = {
    "gcnii_chameleon": Study("chameleon", GCNII, 600, 10, PIPELINES | HYBRID),
    "gcnii_squirrel": Study("squirrel", GCNII, 1000, 10, ON_ONE),
    "sage_physics": Study("coauthor_physics", SAGE, 150, 5, STALE),
    "bns_physics": Study("coauthor_physics", SAGE, 150, 3, BOUNDARY),
    "bns_cs": Study("coauthor_cs", SAGE, 150, 3, BOUNDARY),
    "bns_photo": Study("amazon_photo", SAGE, 150, 3, BOUNDARY),
    "bits_photo": Study("amazon_photo", SAGE, 150, 5, FEW_BITS),
    "bits_cs": Study("coauthor_cs", SAGE, 150, 5, FEW_BITS),
    "bits_physics": Study("coauthor_physics", SAGE, 150, 5, FEW_BITS),
    "mini_sage_physics": Study("coauthor_physics", MINI, 30, 5, BATCHES),
    "mini_gat_physics": Study("coauthor_physics", {**MINI, "model": "gat"}, 30, 5, BATCHES),
    "resgcn_cs": Study("coauthor_cs", RESGCN, 150, 5, SAMPLED),
}
# Rows in float32 and in bfloat16: file -> graph, model. traces/README.md says how they were made.
ROUNDING = {"rounding_tolokers": ("tolokers", "sage"), "rounding_photo": ("amazon_photo", "sage")}


def run(name: str) -> None:
    """Train every (variant, seed) that the study's file lacks."""
    study, path = STUDIES[name], TRACES / f"{name}.csv"
    done = {(row["variant"], row["seed"]) for row in rows(path)}
    for variant, (ranks, strategy, more) in study.variants.items():
        for seed in range(FEW.get(variant, study.seeds)):
            if (variant, str(seed)) in done:
                continue
            print(f"{name}: {variant}, seed {seed}", file=sys.stderr, flush=True)
            question = {
                **study.workload,
                "seed": seed,
                "ranks": ranks,
                "strategy": strategy,
                **more,
            }
            with tempfile.TemporaryDirectory() as scratch:
                epochs = trained(scratch, study.graph, question, epochs=study.epochs, eval_every=10)
            found = [
                {"variant": variant, "seed": seed, "epoch": epoch["epoch"]}
                | {field: f"{float(epoch[field]):.6g}" for field in FIELDS}
                for epoch in epochs
                if epoch["test_accuracy"] is not None
            ]
            write(path, found, "a")


def trained(
    folder: str, graph: str, question: dict[str, Any], **options: object
) -> list[dict[str, Any]]:
    """Plan and train in folder/run, and return the run's epochs."""
    plan(f"{folder}/plan.json", graph=DATASETS / f"{graph}.npz", **question)
    return train(f"{folder}/plan.json", f"{folder}/run", timeout=600, **options)


@dataclass(frozen=True)
class Outcome:
    """The result of one run. Accuracies are in percent.

    reached: the epoch in which the validation accuracy is first within half a point of the
    reference's best; None if it never is.
    """

    test: float
    loss: float
    best_epoch: int
    reached: int | None


Outcomes = dict[str, Outcome]  # seed -> outcome


def outcomes(name: str) -> dict[str, Outcomes]:
    """Return variant -> seed -> outcome; empty if the study has not run."""
    runs: dict[str, dict[str, list[dict[str, str]]]] = {}
    for row in rows(TRACES / f"{name}.csv"):
        runs.setdefault(row["variant"], {}).setdefault(row["seed"], []).append(row)

    def outcome(epochs: list[dict[str, str]], goal: float) -> Outcome:
        best = max(epochs, key=_validation)
        reached = (int(row["epoch"]) for row in epochs if _validation(row) >= goal)
        accuracy, loss = 100 * float(best["test_accuracy"]), float(epochs[-1]["loss"])
        return Outcome(accuracy, loss, int(best["epoch"]), next(reached, None))

    reference = next(iter(runs.values()), {})
    goals = {seed: max(map(_validation, epochs)) - 0.005 for seed, epochs in reference.items()}
    return {
        variant: {seed: outcome(epochs, goals.get(seed, 2.0)) for seed, epochs in of.items()}
        for variant, of in runs.items()
    }


def _validation(row: dict[str, str]) -> float:
    return float(row["val_accuracy"])


def table(name: str) -> str:
    """Return a study's table: per variant accuracy, difference to the reference, loss, epochs."""
    if name == "staleness":
        return _staleness_table()
    found = outcomes(name)
    if not found:
        return "Not run yet."
    first, reference = next(iter(found.items()))
    columns = ("test accuracy [%]", f"minus {first} [points]", "final training loss", "best epoch")
    lines = [header(name, "seeds", *columns, "epochs to its accuracy")]
    for variant, of in found.items():
        lines.append(
            line(
                variant,
                len(of),
                _with_error([o.test for o in of.values()]),
                _with_error(_gaps(of, reference)),
                _with_error([o.loss for o in of.values()], 4),
                f"{mean(o.best_epoch for o in of.values()):.0f}",
                _reached(of),
            )
        )
    return "\n".join(lines)


def _staleness_table(first: int = 101) -> str:
    """Return the table of relative errors, as means over the epochs from `first` on."""
    late = [row for row in rows(TRACES / "staleness.csv") if int(row["epoch"]) >= first]
    columns = list(dict.fromkeys((row["what"], row["layer"]) for row in late))
    names = [f"{'rows' if what == 'f' else 'gradients'}, layer {layer}" for what, layer in columns]
    lines = [f"{line('dropout', 'strategy', *names)}\n|--:|---|{'--:|' * len(columns)}"]
    for case in dict.fromkeys((row["dropout"], row["strategy"]) for row in late):
        errors = dict[tuple[str, str], list[float]]()
        for row in late:
            if (row["dropout"], row["strategy"]) == case:
                relative = float(row["error"]) / float(row["true"])
                errors.setdefault((row["what"], row["layer"]), []).append(relative)
        lines.append(line(*case, *(f"{mean(errors[column]):.3f}" for column in columns)))
    return "\n".join(lines)


def document() -> None:
    """Write the tables between their marks in docs/reference/convergence.md."""
    path = ROOT / "docs" / "reference" / "convergence.md"
    marked = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.S)
    path.write_text(
        marked.sub(lambda found: f"{found[1]}{table(found[2])}\n{found[3]}", path.read_text())
    )


def _reached(of: Outcomes) -> str:
    epochs = [outcome.reached for outcome in of.values() if outcome.reached]
    if not epochs:
        return "never"
    some = "" if len(epochs) == len(of) else f" ({len(epochs)} of {len(of)} seeds)"
    return f"{mean(epochs):.0f}{some}"


def _gaps(of: Outcomes, reference: Outcomes) -> list[float]:
    """Return the paired differences in test accuracy [points]."""
    return [of[seed].test - reference[seed].test for seed in of if seed in reference]


def _quoted_gaps(of: Outcomes, reference: Outcomes) -> dict[str, str]:
    gaps = _gaps(of, reference)
    return {
        "seeds": str(len(gaps)),
        "points": f"{mean(gaps):.2f}",
        "two_errors": _two_errors(gaps),
    }


def rounding() -> list[dict[str, str]]:
    """Return the accuracy that rows in bfloat16 cost, a row per graph, for plans to quote."""
    found = {name: outcomes(name) for name in ROUNDING}
    return [
        {"graph": graph, "model": model}
        | _quoted_gaps(found[name]["bfloat16"], found[name]["float32"])
        for name, (graph, model) in ROUNDING.items()
    ]


def summarise() -> None:
    """Write the costs of variants and of rounded rows in accuracy and epochs, for plans to quote.

    Variants with fewer than ENOUGH seeds are left out.
    """
    write(QUOTED / "rounding.csv", rounding())
    found: list[dict[str, object]] = []
    for name, study in STUDIES.items():
        (_, reference), *others = outcomes(name).items() or [("", {})]
        for variant, of in others:
            pairs = [(of[seed], reference[seed]) for seed in of if seed in reference]
            if len(pairs) < ENOUGH:
                continue
            ratios = [
                ours.reached / theirs.reached
                for ours, theirs in pairs
                if ours.reached and theirs.reached
            ]
            ranks, strategy, _ = study.variants[variant]
            found.append(
                {
                    "study": name,
                    "graph": study.graph,
                    "model": study.workload["model"],
                    "strategy": strategy,
                    "ranks": ranks,
                    **_quoted_gaps(of, reference),
                    # empty: some seed never reaches the reference's accuracy
                    "epochs_ratio": f"{mean(ratios):.2f}" if len(ratios) == len(pairs) else "",
                }
            )
    write(QUOTED / "convergence.csv", found)


def _with_error(values: list[float], digits: int = 2) -> str:
    """Return the mean and two standard errors, as text."""
    error = f" ± {_two_errors(values, digits)}" if len(values) > 1 else ""
    return f"{mean(values):.{digits}f}{error}"


def _two_errors(values: list[float], digits: int = 2) -> str:
    return f"{2 * stdev(values) / sqrt(len(values)):.{digits}f}"


def staleness(epochs: int = 150) -> None:
    """Write ||used - true|| and ||true|| of halo rows ('f') and gradients ('b'): PipeGCN's Fig. 5.

    There is a row per layer and epoch of GraphSAGE on Coauthor Physics in 2 parts, with and without
    smoothing, with and without dropout.
    """
    found: list[dict[str, object]] = []
    for dropout in ("0.5", "0.0"):
        for strategy in ("pipegcn", "pipegcn_gf(gamma=0.5)", "pipegcn_gf"):
            question = {**SAGE, "dropout": dropout, "ranks": 2, "strategy": strategy}
            with tempfile.TemporaryDirectory() as scratch:
                trained(scratch, "coauthor_physics", question, epochs=epochs, staleness_errors=True)
                ranks = [
                    json.loads(Path(scratch, "run", f"rank{rank}.json").read_text())["staleness"]
                    for rank in range(2)
                ]
            for key in ranks[0]:
                what, layer = key.split(":l")
                for epoch in range(epochs):
                    squares = [sum(rank[key][epoch][i] for rank in ranks) for i in (0, 1)]
                    error, true = (f"{sqrt(square):.5g}" for square in squares)
                    row = {"strategy": strategy, "dropout": dropout, "what": what, "layer": layer}
                    found.append({**row, "epoch": epoch + 1, "error": error, "true": true})
    write(TRACES / "staleness.csv", found)


def figures() -> None:
    """Draw each study (mean over seeds, two standard errors shaded), and staleness over epochs."""
    import matplotlib.pyplot as plt

    folder = ROOT / "docs" / "figures"
    for name, study in STUDIES.items():
        found = rows(TRACES / f"{name}.csv")
        if not found:
            continue
        figure, axes = plt.subplots(1, 2, figsize=(12, 4.5), layout="constrained")
        fields = ("loss", "training loss", 1), ("test_accuracy", "test accuracy [%]", 100)
        for axis, (field, label, factor) in zip(axes, fields, strict=True):
            for variant in study.variants:
                points: dict[int, list[float]] = {}
                for row in found:
                    if row["variant"] == variant:
                        points.setdefault(int(row["epoch"]), []).append(factor * float(row[field]))
                middle = [mean(values) for values in points.values()]
                errors = [
                    2 * stdev(values) / sqrt(len(values)) if len(values) > 1 else 0.0
                    for values in points.values()
                ]
                (drawn,) = axis.plot(list(points), middle, label=variant, lw=1.2)
                low, high = (
                    [m + sign * e for m, e in zip(middle, errors, strict=True)] for sign in (-1, 1)
                )
                axis.fill_between(
                    list(points), low, high, color=drawn.get_color(), alpha=0.12, lw=0
                )
            axis.set(xlabel="epoch", ylabel=label)
        axes[1].legend(fontsize=7)
        model, layers, hidden, *_ = study.workload.values()
        figure.suptitle(f"{study.graph}: {model} {layers} {hidden}", fontsize=10)
        figure.savefig(folder / f"{name}.png", dpi=90)
    _staleness_figure(folder / "staleness.png")


def _staleness_figure(path: Path) -> None:
    """Draw relative errors over epochs: a column per layer and direction, a row per dropout."""
    import matplotlib.pyplot as plt

    found = rows(TRACES / "staleness.csv")
    columns = list(dict.fromkeys((row["what"], row["layer"]) for row in found))
    dropouts = list(dict.fromkeys(row["dropout"] for row in found))
    size = 3.2 * len(columns), 3 * len(dropouts)
    figure, grid = plt.subplots(
        len(dropouts), len(columns), figsize=size, layout="constrained", squeeze=False
    )
    for axes, dropout in zip(grid, dropouts, strict=True):
        for axis, (what, layer) in zip(axes, columns, strict=True):
            for strategy in dict.fromkeys(row["strategy"] for row in found):
                key = {"strategy": strategy, "dropout": dropout, "what": what, "layer": layer}
                here = [row for row in found if key.items() <= row.items()][2:]
                errors = [float(row["error"]) / max(float(row["true"]), 1e-12) for row in here]
                axis.plot([int(row["epoch"]) for row in here], errors, label=strategy, lw=1)
            of = "rows" if what == "f" else "gradients"
            axis.set(yscale="log")
            axis.set_title(f"{of}, layer {layer}, dropout {dropout}", fontsize=8)
    grid[0][0].legend(fontsize=7)
    figure.supxlabel("epoch", fontsize=9)
    figure.supylabel("Frobenius norm of stale minus true, over that of true", fontsize=9)
    figure.savefig(path, dpi=90)


if __name__ == "__main__":
    verb, *named = words(__doc__)
    os.environ["OMP_NUM_THREADS"] = "1"
    if verb in ("run", "table"):
        for name in named or STUDIES:
            run(name) if verb == "run" else print(f"\n{table(name)}")
    else:
        {"summary": summarise, "staleness": staleness, "figures": figures, "document": document}[
            verb
        ]()
