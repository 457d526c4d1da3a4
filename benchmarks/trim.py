"""Times training with few labels, with and without `trim` (leave out rows that no label needs).

    python benchmarks/trim.py DATASETS NAME..

NAME: a graph in the folder DATASETS, such as ogbn_arxiv; a graph without features gets 128 made-up
columns. 1, 5 and 10 % of the vertices train, on two ranks, with and without trim in turn. Prints a
table: epochs (medians over all rounds), the measured and the predicted speedup by trim, and the
largest relative difference of the losses. Asserts nothing.
"""

from __future__ import annotations

import sys
import tempfile
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
from commands import header, in_turn, line, plan, train, words

SHARES = (0.01, 0.05, 0.1)
STRATEGIES = ("graph_parallel", "graph_parallel(trim=True)")
MODEL = {"model": "sage", "layers": 3, "hidden": 128, "dropout": 0, "ranks": 2}
ROUNDS, EPOCHS, WARM = 2, 8, 2


def few_labels(source: Path, share: float, path: Path) -> None:
    """Write the graph with a random share of training vertices; the rest are for validation."""
    with np.load(source) as file:
        arrays = dict(file)
    vertices = arrays["y"].shape[0]
    order = np.random.default_rng(0).permutation(vertices)
    train = np.zeros(vertices, dtype=bool)
    train[order[: round(share * vertices)]] = True
    masks = {"train_mask": train, "val_mask": ~train, "test_mask": np.zeros_like(train)}
    np.savez(path, **(arrays | masks))


def row(name: str, graph: Path, share: float, folder: Path) -> str:
    """Train and return a row of the table."""
    with np.load(graph) as file:
        has_own = bool({"x", "x_data", "x_indices"} & set(file))
    question = {"graph": graph, **MODEL, "features": None if has_own else 128}
    plans = {strategy: folder / f"{name}.{share}.{strategy}.json" for strategy in STRATEGIES}
    predicted = [plan(path, **question, strategy=strategy) for strategy, path in plans.items()]

    def trained(path: Path) -> list[dict[str, float]]:
        return train(path, Path(tempfile.mkdtemp(dir=folder)) / "run", epochs=EPOCHS)

    runs = in_turn({strategy: partial(trained, path) for strategy, path in plans.items()}, ROUNDS)
    whole_s, trimmed_s = (
        median(epoch["epoch_s"] for run in of for epoch in run[WARM:-1]) for of in runs.values()
    )
    losses = ([epoch["loss"] for epoch in of[-1]] for of in runs.values())
    apart = max(abs(b / a - 1) for a, b in zip(*losses, strict=True))
    faster = predicted[0]["best"]["epoch_s"] / predicted[1]["best"]["epoch_s"]
    seconds = (f"{1000 * whole_s:.0f} ms", f"{1000 * trimmed_s:.0f} ms")
    times = (f"{whole_s / trimmed_s:.2f}", f"{faster:.2f}")
    return line(name, f"{share:.0%}", *seconds, *times, f"{apart:.0e}")


def main() -> None:
    datasets, *names = words(__doc__)
    if not names:
        sys.exit(__doc__)
    columns = ("training vertices", "all rows", "trim", "faster", "predicted", "losses apart")
    print(header("graph", *columns))
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            for share in SHARES:
                graph = Path(folder) / f"{name}.{share}.npz"
                few_labels(Path(datasets) / f"{name}.npz", share, graph)
                print(row(name, graph, share, Path(folder)), flush=True)


if __name__ == "__main__":
    main()
