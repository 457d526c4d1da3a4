"""Trains with few labels, with and without the rows that no training vertex needs (trim).

    python benchmarks/trim.py DATASETS NAME..

NAME: a graph of the folder DATASETS, as ogbn_arxiv; 128 features are made up where it has none. Of
each, 1, 5 and 10 % of the vertices train, and two ranks train both ways in turn. Prints a table:
epochs (medians of all rounds), how many times faster trim is as measured and as predicted, and how
far losses are apart. Asserts nothing.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from statistics import median

import numpy as np
from commands import gnnplan, words

SHARES = (0.01, 0.05, 0.1)
STRATEGIES = ("graph_parallel", "graph_parallel(trim=True)")
MODEL = ("--model", "sage", "--layers", "3", "--hidden", "128", "--dropout", "0")
ROUNDS, EPOCHS, WARM = 2, 8, 2


def few_labels(source: Path, share: float, path: Path) -> None:
    """Write the graph with so many training vertices, drawn by seed 0, and no others labelled."""
    with np.load(source) as file:
        arrays = dict(file)
    vertices = arrays["y"].shape[0]
    order = np.random.default_rng(0).permutation(vertices)
    train = np.zeros(vertices, dtype=bool)
    train[order[: round(share * vertices)]] = True
    masks = {"train_mask": train, "val_mask": ~train, "test_mask": np.zeros_like(train)}
    np.savez(path, **(arrays | masks))


def row(name: str, graph: Path, share: float, folder: Path) -> str:
    """A line of the table."""
    with np.load(graph) as file:
        made_up = () if {"x", "x_data", "x_indices"} & set(file) else ("--features", "128")
    plans = [folder / f"{name}.{share}.{number}.json" for number in range(len(STRATEGIES))]
    for strategy, plan in zip(STRATEGIES, plans, strict=True):
        asked = ("--graph", str(graph), *made_up, *MODEL, "--ranks", "2", "--strategy", strategy)
        gnnplan("plan", *asked, "-o", str(plan))
    epochs: list[list[float]] = [[], []]
    losses: list[list[float]] = [[], []]
    for turn in range(ROUNDS):
        for number, plan in enumerate(plans):
            out = folder / f"{plan.stem}.{turn}"
            gnnplan(
                "run", str(plan), "--epochs", str(EPOCHS), "--eval-every", "0", "--out", str(out)
            )
            lines = [json.loads(line) for line in (out / "metrics.jsonl").open(encoding="utf-8")]
            epochs[number] += [line["epoch_s"] for line in lines[WARM:-1]]
            losses[number] = [line["loss"] for line in lines]
    whole_s, trimmed_s = map(median, epochs)
    predicted = [json.loads(plan.read_text())["best"]["epoch_s"] for plan in plans]
    apart = max(abs(b / a - 1) for a, b in zip(*losses, strict=True))
    return (
        f"| {name} | {share:.0%} | {1000 * whole_s:.0f} ms | {1000 * trimmed_s:.0f} ms |"
        f" {whole_s / trimmed_s:.2f} | {predicted[0] / predicted[1]:.2f} | {apart:.0e} |"
    )


def main() -> None:
    datasets, *names = words(__doc__)
    if not names:
        sys.exit(__doc__)
    print("| graph | training vertices | all rows | trim | faster | predicted | losses apart |")
    print("|---|--:|--:|--:|--:|--:|--:|")
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            for share in SHARES:
                graph = Path(folder) / f"{name}.{share}.npz"
                few_labels(Path(datasets) / f"{name}.npz", share, graph)
                print(row(name, graph, share, Path(folder)), flush=True)


if __name__ == "__main__":
    main()
