"""Predicts printed figures of other people's systems.

    python benchmarks/published.py VERB [FILE.csv]

    fit        constants of the testbeds: traces/quoted/fitted.csv
    table      errors and choices: docs/reference/published-figures.md
    figures    docs/figures/published_*.png

`figures` draws the papers' own figures from predictions, with what they print as points. The file
has the columns of benchmarks/papers/rows.py; by default it is traces/published/figures.csv.
"""

import csv
from collections import defaultdict
from pathlib import Path
from statistics import mean, median

from choices import reliability, score
from commands import words

from gnnplan.papers import calibrate
from gnnplan.papers import mini_batch as mini_batches
from gnnplan.papers.figures import predict
from gnnplan.papers.interpret import question
from gnnplan.papers.published import DIFFERENT, evaluate_rows
from gnnplan.papers.question import Question, Row
from gnnplan.papers.rows import COLUMNS, read
from gnnplan.planner.vocabulary.files import QUOTED

FIGURES = Path(__file__).resolve().parent.parent / "traces" / "published" / "figures.csv"
DOCS = Path(__file__).resolve().parent.parent / "docs"


def fit(path: str) -> None:
    """Fit and write the constants of all testbeds."""
    rows = read(path)
    with open(QUOTED / "fitted.csv", "w", newline="", encoding="utf-8") as file:
        out = csv.writer(file, lineterminator="\n")
        out.writerow(["testbed", "constant", "factor", "rows", "sources", "datasets"])
        for each in calibrate.FITS:
            used = [row for row in rows if each.holds(row)]
            for constant, factor in calibrate.fit_testbed(used, each.constants).items():
                out.writerow(
                    [
                        each.testbed,
                        constant,
                        f"{factor:.4g}",
                        len(used),
                        "; ".join(each.sources),
                        "; ".join(each.datasets),
                    ]
                )
                print(each.testbed, constant, f"{factor:.4g}")


def by_paper(result: dict, everything: bool) -> dict[tuple[str, str], list[float]]:
    """(paper, metric) -> errors; of rows that gave a constant only with `everything`."""
    errors = defaultdict(list)
    for row in result["rows"]:
        if everything or not row["fitted"]:
            errors[row["paper"], row["metric"]].append(abs(row["error"]))
    return errors


def table(path: str) -> None:
    """Write the errors of every paper and metric into the document.

    Once with the constants that are kept, and once each dataset with constants of the others.
    """
    rows = read(path)
    kept, left = (
        evaluate_rows(rows, calibrate.gave_a_constant, calibrate.calibrated),
        calibrate.leave_one_out(rows),
    )
    fitted, out = by_paper(kept, True), by_paper(left, False)
    lines = [
        (
            "| paper | figure | rows | mean error, constants of all rows | rows left out | mean"
            " error, left out | median | largest |"
        ),
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for key in sorted(fitted):
        errors = out.get(key)
        told = (
            f"{len(errors)} | {mean(errors):.1%} | {median(errors):.1%} | {max(errors):.1%}"
            if errors
            else "0 | - | - | -"
        )
        lines.append(
            f"| {key[0]} | {key[1]} | {len(fitted[key])} | {mean(fitted[key]):.1%} | {told} |"
        )
    for name, result in (("constants of all rows", kept), ("left out", left)):
        winner = result["summary"]["winner"]
        lines.append(f"\nThe faster strategy, {name}: right in {winner['right']} of {winner['n']}.")
    worst = sorted(
        (row for row in left["rows"] if not row["fitted"]), key=lambda row: -abs(row["error"])
    )[:12]
    lines += ["", "| worst | printed | predicted |", "|---|---:|---:|"]
    for row in worst:
        what = (
            f"{row['paper']} {row['source']}: {row['strategy']} {row['metric']}, {row['model']} on"
            f" {row['dataset']}"
        )
        lines.append(
            f"| {what}, {row['num_nodes']}x{row['gpus_per_node']} | {float(row['value']):.4g} |"
            f" {row['predicted']:.4g} |"
        )
    lines += ["", *choices(rows)]
    document = DOCS / "reference" / "published-figures.md"
    before, mark, _ = document.read_text().partition("<!-- table -->\n")
    assert mark
    document.write_text(before + mark + "\n".join(lines) + "\n")


def choices(rows: list[Row]) -> list[str]:
    """Markdown: what a plan chooses of the strategies that print compares, and how sure it is."""
    lines = [
        "| paper, testbed | comparisons | right | regret | right, papers' terms |",
        "|---|--:|--:|--:|--:|",
    ]
    scored = score(rows, calibrate.left_out(rows))
    by_testbed = defaultdict(list)
    for choice in scored:
        by_testbed[f"{choice.job[0]}, {choice.job[2]}"].append(choice)
    by_testbed["all"] = scored
    for name, those in by_testbed.items():
        theirs = [choice.regret(choice.by_their_terms) <= DIFFERENT for choice in those]
        regret = mean(choice.regret(choice.chosen) for choice in those)
        lines.append(
            f"| {name} | {len(those)} | {mean(choice.right for choice in those):.0%} |"
            f" {regret:.1%} | {mean(theirs):.0%} |"
        )
    lines += ["", "| chance of being the fastest | strategies | were it |", "|---|--:|--:|"]
    chances = [chance for choice in scored for chance in choice.chances]
    fastest = [s == min(choice.printed) for choice in scored for s in choice.printed]
    lines += [
        f"| {low:.0%} to {high:.0%} | {count} | {share:.0%} |"
        for low, high, count, share in reliability(chances, fastest)
    ]
    return lines


# -- figures --------------------------------------------------------------------------------------


def asked(**told: object) -> Question:
    return question(
        {**dict.fromkeys(COLUMNS, ""), **{name: str(value) for name, value in told.items()}},
        testbeds=calibrate.calibrated,
    )


def breakdown(plt, rows: list[dict[str, str]]) -> None:
    """GNNPipe Sec. 4.6: computation, communication and bubble of an epoch, as shares."""
    names, shares = [], []
    for dataset, hidden in (("squirrel", 1000), ("reddit", 100)):
        for model in ("gcn", "sage", "gcnii"):
            for strategy in ("graph_parallel", "gnnpipe_pipeline", "gnnpipe_hybrid"):
                told = asked(
                    testbed="gnnpipe_a5000",
                    dataset=dataset,
                    model=model,
                    layers=32,
                    hidden=hidden,
                    num_nodes=2,
                    gpus_per_node=4,
                    strategy=strategy,
                ).prediction
                names.append(
                    f"{dataset} {model}\n{strategy.removeprefix('gnnpipe_').replace('_', ' ')}"
                )
                shares.append(
                    [
                        float(part) / float(told.epoch_s)
                        for part in (told.compute_s, told.comm_s, told.bubble_s)
                    ]
                )
    figure, axes = plt.subplots(figsize=(11, 4))
    below = [0.0] * len(names)
    for i, what in enumerate(("computation", "communication", "bubble")):
        axes.bar(names, [share[i] for share in shares], bottom=below, label=what)
        below = [a + share[i] for a, share in zip(below, shares, strict=True)]
    axes.tick_params(axis="x", rotation=90, labelsize=7)
    axes.set(
        ylabel="share of an epoch",
        title=(
            "GNNPipe, 32 layers on 2 x 4 A5000 (printed means: graph parallel 67 % communication, "
            "pipeline 63 / 10 / 27 %)"
        ),
    )
    axes.legend()
    save(figure, "published_gnnpipe")


def over_depth(plt, rows: list[dict[str, str]]) -> None:
    """GraNNDis Table 4 and Sec. 8.2: speedup over graph parallel by depth, on PCIe and NVLink."""
    figure, both = plt.subplots(1, 2, figsize=(11, 4), sharey=True)
    depths = (3, 14, 28, 56, 112)
    for axes, testbed in zip(both, ("granndis_a6000_pcie", "granndis_a6000_nvlink"), strict=True):
        for color, dataset in enumerate(("ogbn-arxiv", "reddit", "ogbn-products")):
            for style, strategy in (("-", "granndis"), (":", "granndis_preload")):
                where = {
                    "paper": "granndis",
                    "testbed": testbed,
                    "dataset": dataset,
                    "model": "resgcn+",
                    "hidden": 64,
                    "num_nodes": 4,
                    "gpus_per_node": 4,
                }
                times = [
                    [
                        asked(**where, layers=depth, strategy=name).prediction.epoch_s
                        for name in ("graph_parallel", strategy)
                    ]
                    for depth in depths
                ]
                axes.plot(
                    depths,
                    [full / own for full, own in times],
                    style,
                    color=f"C{color}",
                    label=f"{dataset}, {'sampled, 1 hop' if strategy == 'granndis' else 'preload'}",
                )
            printed(
                axes,
                rows,
                lambda row, here=testbed, of=dataset: (
                    (
                        row["testbed"],
                        row["dataset"],
                        row["metric"],
                    )
                    == (here, of, "speedup_vs")
                    and row["layers"]
                    and row["hidden"] == "64"
                ),
                "layers",
                color,
            )
        axes.axhline(1, color="gray", linewidth=0.5)
        axes.set(
            xscale="log",
            xlabel="layers",
            title=f"GraNNDis, 4 x 4 A6000, {'NVLink' if 'nvlink' in testbed else 'PCIe'}",
        )
    both[0].set_ylabel("times as fast as graph parallel (dots: printed)")
    both[1].legend(fontsize=7)
    save(figure, "published_granndis")


def over_width(plt, rows: list[dict[str, str]]) -> None:
    """P3 Sec. 5: epoch over hidden width, beside data parallel, whose cost does not depend on
    it."""
    widths = (16, 32, 64, 128, 256, 512, 1024)
    figure, axes = plt.subplots(figsize=(6, 4))
    for color, model in enumerate(("gcn", "sage")):
        for style, strategy in (("-", "p3_push_pull"), (":", "dgl_data_parallel")):
            times = [
                mini_batches.epoch(
                    asked(
                        paper="p3",
                        testbed="p3_p100",
                        dataset="ogbn-products",
                        model=model,
                        layers=2,
                        hidden=width,
                        num_nodes=4,
                        gpus_per_node=4,
                        strategy=strategy,
                        strategy_params='{"batch": 1000, "fanout": [25, 10]}',
                    )
                )
                for width in widths
            ]
            axes.plot(
                widths,
                times,
                style,
                color=f"C{color}",
                label=f"{model}, {strategy.replace('_', ' ')}",
            )
    axes.set(
        xscale="log",
        xlabel="hidden width",
        ylabel="epoch [s]",
        title="P3, ogbn-products, 4 x 4 P100",
    )
    axes.legend(fontsize=7)
    save(figure, "published_p3")


def over_servers(plt, rows: list[dict[str, str]]) -> None:
    """PipeGCN Table 8: speedup over graph parallel by servers and GPUs in them."""
    figure, axes = plt.subplots(figsize=(6, 4))
    for color, gpus in enumerate((2, 3, 4)):
        table8 = [
            row
            for row in rows
            if row["source"].startswith("Table 8")
            and row["strategy"] == "pipegcn"
            and row["gpus_per_node"] == str(gpus)
        ]
        axes.plot(
            [int(row["num_nodes"]) for row in table8],
            [predict(row, calibrate.calibrated) for row in table8],
            color=f"C{color}",
            label=f"{gpus} GPUs per server",
        )
        printed(axes, table8, lambda row: True, "num_nodes", color)
    axes.set(
        xlabel="servers",
        ylabel="times as fast as graph parallel (dots: printed)",
        title="PipeGCN, Reddit, MI60 over 10 Gbit/s",
    )
    axes.legend()
    save(figure, "published_pipegcn")


def printed(axes, rows: list[dict[str, str]], wanted, by: str, color: int) -> None:
    found = [row for row in rows if wanted(row)]
    axes.plot(
        [int(row[by]) for row in found],
        [float(row["value"]) for row in found],
        "o",
        color=f"C{color}",
    )


def save(figure, name: str) -> None:
    figure.tight_layout()
    figure.savefig(DOCS / "figures" / f"{name}.png", dpi=100)


def figures(path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = read(path)
    for draw in (breakdown, over_depth, over_width, over_servers):
        draw(plt, rows)


if __name__ == "__main__":
    verb, *files = words(__doc__)
    {"fit": fit, "table": table, "figures": figures}[verb](*files or [str(FIGURES)])
