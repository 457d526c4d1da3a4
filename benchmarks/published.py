"""Predicts printed figures of other people's systems.

    python benchmarks/published.py VERB [FILE.csv]

    fit        fit constants of the testbeds: traces/quoted/fitted.csv
    table      errors and choices: docs/reference/published-figures.md
    software   constants of software, without each of the other works: traces/quoted/software.csv
    others     works that gave no constant: docs/reference/other-works.md
    figures    docs/figures/published_*.png

`figures` redraws figures of the papers from predictions, with printed values as points. The file
has the columns of benchmarks/papers/published.py. Its default is traces/published/figures.csv, and
traces/published/others.csv for `software` and `others`.
"""

from collections import defaultdict
from itertools import combinations, product
from statistics import mean, median

import commands
from choices import chances_table, score
from commands import header, line, words, write

from gnnplan.papers import calibrate, their_software
from gnnplan.papers import mini_batch as mini_batches
from gnnplan.papers.figures import predict, question
from gnnplan.papers.published import COLUMNS, DIFFERENT, JOB, evaluate_rows, is_inside, read
from gnnplan.papers.question import Question, Row, params_of
from gnnplan.planner.strategies import parse
from gnnplan.planner.vocabulary.files import QUOTED

PRINTED = commands.TRACES / "published"
DOCS = commands.ROOT / "docs"


def fit(path: str) -> None:
    """Fit and write the constants of all testbeds."""
    rows, found = read(path), []
    for each in calibrate.FITS:
        used = [row for row in rows if each.holds(row)]
        for constant, factor in calibrate.fit_testbed(used, each.constants).items():
            found.append(
                {
                    "testbed": each.testbed,
                    "constant": constant,
                    "factor": f"{factor:.4g}",
                    "rows": len(used),
                    "sources": "; ".join(each.sources),
                    "datasets": "; ".join(each.datasets),
                }
            )
            print(each.testbed, constant, f"{factor:.4g}")
    write(QUOTED / "fitted.csv", found)


def software(path: str) -> None:
    """Fit and write the constants of software, without each people's works and of all works."""
    rows = [row for row in read(path) if row["testbed"]]
    without = {
        works[0]: calibrate.fit_software([row for row in rows if row["paper"] not in works])
        for works in (*their_software.WORKS, ("nobody",))
    }
    found = [
        {"constant": name, **{work: f"{of[name]:.3g}" for work, of in without.items()}}
        for name in their_software.CONSTANTS
    ]
    print(*found, sep="\n")
    write(QUOTED / "software.csv", found)


def by_paper(result: dict, everything: bool) -> dict[tuple[str, str], list[float]]:
    """Return (paper, metric) -> errors; rows that gave a constant count only with `everything`."""
    errors = defaultdict(list)
    for row in result["rows"]:
        if everything or not row["fitted"]:
            errors[row["paper"], row["metric"]].append(abs(row["error"]))
    return errors


def table(path: str) -> None:
    """Write the errors of every paper and metric into the document.

    Errors are with the constants in use, and with constants fitted to the other datasets.
    """
    rows = read(path)
    in_use = evaluate_rows(rows, calibrate.gave_a_constant, calibrate.calibrated)
    left = calibrate.leave_one_out(rows)
    fitted, out = by_paper(in_use, True), by_paper(left, False)
    columns = ("rows", "mean error, constants of all rows", "rows left out", "mean error, left out")
    lines = [
        f"{line('paper', 'figure', *columns, 'median', 'largest')}",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for key in sorted(fitted):
        errors = out.get(key, [])
        cells = [f"{of(errors):.1%}" for of in (mean, median, max)] if errors else ["-"] * 3
        mean_s = f"{mean(fitted[key]):.1%}"
        lines.append(line(*key, len(fitted[key]), mean_s, len(errors), *cells))
    for name, result in (("constants of all rows", in_use), ("left out", left)):
        winner = result["summary"]["winner"]
        lines.append(f"\nThe faster strategy, {name}: right in {winner['right']} of {winner['n']}.")
    worst = sorted(
        (row for row in left["rows"] if not row["fitted"]), key=lambda row: -abs(row["error"])
    )[:12]
    lines += ["", "| worst | printed | predicted |", "|---|---:|---:|"]
    for row in worst:
        what = (
            f"{row['paper']} {row['source']}: {row['strategy']} {row['metric']}, {row['model']} on"
            f" {row['dataset']}, {row['num_nodes']}x{row['gpus_per_node']}"
        )
        lines.append(line(what, f"{float(row['value']):.4g}", f"{row['predicted']:.4g}"))
    lines += ["", *choices(rows)]
    fill("published-figures.md", lines)


def fill(name: str, lines: list[str]) -> None:
    """Replace the text below the document's mark by these Markdown lines."""
    document = DOCS / "reference" / name
    before, mark, _ = document.read_text().partition("<!-- table -->\n")
    assert mark
    document.write_text(before + mark + "\n".join(lines) + "\n")


def others(path: str) -> None:
    """Write all figures of works to which no preset was fitted into the document, with sums."""
    found = evaluate_rows(read(path))
    epochs = [row for row in found["rows"] if "kind" in row]
    by_kind, by_work = defaultdict(list), defaultdict(list)
    for row in epochs:
        by_kind[row["kind"]].append(row)
        by_work[f"{row['paper']}, {row['kind']}"].append(row)
    lines = [header("epochs", "rows", "median error", "in the range for 80 %")]
    for name, rows in [*sorted(by_kind.items()), ("all", epochs), *sorted(by_work.items())]:
        off = median(abs(row["error"]) for row in rows)
        lines.append(line(name, len(rows), f"{off:.0%}", f"{mean(map(is_inside, rows)):.0%}"))
    scaling, winner = found["scaling"], found["summary"]["winner"]
    lines += [
        f"\nEpochs over those on fewer GPUs: {scaling['median']:.0%} off in the median of"
        f" {scaling['n']}.\n\nThe faster strategy: right in {winner['right']} of {winner['n']}.\n",
        header("what differs between the two", "pairs", "the faster is named rightly"),
        *(line(what, len(right), sum(right)) for what, right in sorted(rivals(epochs).items())),
        "",
        header(*PRINTED_OF, "predicted", "error", "in range", left=3),
    ]
    for row in found["rows"]:
        inside = ("yes" if is_inside(row) else "no") if "kind" in row else ""
        cells = f"{row['predicted']:.4g}", f"{row['error']:+.0%}", inside
        lines.append(line(*printed_of(row), *cells))
    lines += ["\nNot predicted:\n", header(*PRINTED_OF, "why", left=3)]
    lines += [line(*printed_of(row), row["why"]) for row in found["skipped"]]
    fill("other-works.md", lines)


def rivals(epochs: list[dict]) -> dict[str, list[bool]]:
    """Return, by the knobs in which two systems of one job differ: was the faster predicted?"""
    by_job = defaultdict(list)
    for row in epochs:
        by_job[tuple(row[name] for name in JOB)].append(row)
    right = defaultdict(list)
    for a, b in (pair for rows in by_job.values() for pair in combinations(rows, 2)):
        printed = float(b["value"]) / float(a["value"])
        systems = [
            {
                **parse(row["strategy"]).knobs(),
                "sampler": params.get("sampler"),
                "software": params.get("software"),
            }
            for row in (a, b)
            for params in [params_of(row)]
        ]
        differ = [
            name for name in systems[0] if systems[0][name] != systems[1][name] and name != "hot"
        ]
        if differ and max(printed, 1 / printed) > 1 + DIFFERENT:
            right[", ".join(differ)].append((printed - 1) * (b["predicted"] - a["predicted"]) > 0)
    return right


PRINTED_OF = "work, source", "what", "figure", "printed"


def printed_of(row: dict) -> tuple[str, ...]:
    """Return the cells of a figure (PRINTED_OF): work and source, case, metric, value."""
    sizes = f"{row['num_nodes']}x{row['gpus_per_node']}"
    where = f" on {sizes} {row['testbed'] or 'of a machine that is not stated'}" * (sizes != "x")
    sampler = params_of(row).get("sampler")
    samples = f", sampler on the {sampler}" if sampler else ""
    of = f"{row['model'] or 'batches'}, {row['dataset']}{where}: `{row['strategy']}`{samples}"
    return f"{row['paper']}: {row['source']}", of, row["metric"], f"{float(row['value']):.4g}"


def choices(rows: list[Row]) -> list[str]:
    """Return Markdown lines: a plan's choices among strategies compared in print, and chances."""
    lines = [header("paper, testbed", "comparisons", "right", "regret", "right, papers' terms")]
    scored = score(rows, calibrate.left_out(rows))
    by_testbed = defaultdict(list)
    for choice in scored:
        by_testbed[f"{choice.job[0]}, {choice.job[2]}"].append(choice)
    by_testbed["all"] = scored
    for name, testbed_choices in by_testbed.items():
        theirs = [choice.regret(choice.by_their_terms) <= DIFFERENT for choice in testbed_choices]
        regret = mean(choice.regret(choice.chosen) for choice in testbed_choices)
        right = mean(choice.right for choice in testbed_choices)
        shares = (f"{right:.0%}", f"{regret:.1%}", f"{mean(theirs):.0%}")
        lines.append(line(name, len(testbed_choices), *shares))
    chances = [chance for choice in scored for chance in choice.chances]
    fastest = [s == min(choice.printed) for choice in scored for s in choice.printed]
    return [*lines, "", *chances_table(chances, fastest)]


# -- figures --------------------------------------------------------------------------------------


def question_on(testbed: str, servers: int, strategy: str, **columns: object) -> Question:
    """Return the question of a strategy on a testbed's servers with four GPUs each."""
    columns |= {"testbed": testbed, "num_nodes": servers, "gpus_per_node": 4, "strategy": strategy}
    row = {**dict.fromkeys(COLUMNS, ""), **{name: str(value) for name, value in columns.items()}}
    return question(row, testbeds=calibrate.calibrated)


def breakdown(plt, rows: list[dict[str, str]]) -> None:
    """Draw GNNPipe Sec. 4.6: shares of computation, communication and bubble in an epoch."""
    names, shares = [], []
    for (dataset, hidden), model, strategy in product(
        (("squirrel", 1000), ("reddit", 100)),
        ("gcn", "sage", "gcnii"),
        ("graph_parallel", "gnnpipe_pipeline", "gnnpipe_hybrid"),
    ):
        what = {"dataset": dataset, "model": model, "layers": 32, "hidden": hidden}
        prediction = question_on("gnnpipe_a5000", 2, strategy, **what).prediction
        name = strategy.removeprefix("gnnpipe_").replace("_", " ")
        names.append(f"{dataset} {model}\n{name}")
        parts = prediction.compute_s, prediction.comm_s, prediction.bubble_s
        shares.append([float(part) / float(prediction.epoch_s) for part in parts])
    figure, axes = plt.subplots(figsize=(11, 4))
    below = [0.0] * len(names)
    for what, of in zip(
        ("computation", "communication", "bubble"), zip(*shares, strict=True), strict=True
    ):
        axes.bar(names, of, bottom=below, label=what)
        below = [a + share for a, share in zip(below, of, strict=True)]
    axes.tick_params(axis="x", rotation=90, labelsize=7)
    axes.set_ylabel("share of an epoch")
    axes.set_title(
        "GNNPipe, 32 layers on 2 x 4 A5000 (printed means: graph parallel 67 % communication, "
        "pipeline 63 / 10 / 27 %)"
    )
    axes.legend()
    save(figure, "published_gnnpipe")


def over_depth(plt, rows: list[dict[str, str]]) -> None:
    """Draw GraNNDis Table 4, Sec. 8.2: speedup over graph parallel by depth, PCIe and NVLink."""
    figure, both = plt.subplots(1, 2, figsize=(11, 4), sharey=True)
    depths = (3, 14, 28, 56, 112)
    for axes, link in zip(both, ("PCIe", "NVLink"), strict=True):
        testbed = f"granndis_a6000_{link.lower()}"
        for color, dataset in enumerate(("ogbn-arxiv", "reddit", "ogbn-products")):
            what = {"paper": "granndis", "dataset": dataset, "model": "resgcn+", "hidden": 64}

            def epochs_s(strategy: str, testbed=testbed, what=what) -> list[float]:
                return [
                    question_on(testbed, 4, strategy, **what, layers=depth).prediction.epoch_s
                    for depth in depths
                ]

            full = epochs_s("graph_parallel")
            for style, strategy, name in (
                ("-", "granndis", "sampled, 1 hop"),
                (":", "granndis_preload", "preload"),
            ):
                times = [a / b for a, b in zip(full, epochs_s(strategy), strict=True)]
                axes.plot(depths, times, style, color=f"C{color}", label=f"{dataset}, {name}")
            wanted = {"testbed": testbed, "dataset": dataset, "metric": "speedup_vs"}
            wanted |= {"hidden": "64"}
            here = [row for row in rows if wanted.items() <= row.items() and row["layers"]]
            printed(axes, here, "layers", color)
        axes.axhline(1, color="gray", linewidth=0.5)
        axes.set(xscale="log", xlabel="layers", title=f"GraNNDis, 4 x 4 A6000, {link}")
    both[0].set_ylabel("times as fast as graph parallel (dots: printed)")
    both[1].legend(fontsize=7)
    save(figure, "published_granndis")


def over_width(plt, rows: list[dict[str, str]]) -> None:
    """Draw P3 Sec. 5: epochs by hidden width, on which data parallel's traffic does not depend."""
    widths = (16, 32, 64, 128, 256, 512, 1024)
    figure, axes = plt.subplots(figsize=(6, 4))
    batches = {"strategy_params": '{"batch": 1000, "fanout": [25, 10]}', "paper": "p3"}
    for color, model in enumerate(("gcn", "sage")):
        what = {**batches, "dataset": "ogbn-products", "model": model, "layers": 2}
        for style, strategy in (("-", "p3_push_pull"), (":", "dgl_data_parallel")):
            questions = (
                question_on("p3_p100", 4, strategy, **what, hidden=width) for width in widths
            )
            times, name = map(mini_batches.epoch, questions), strategy.replace("_", " ")
            axes.plot(widths, list(times), style, color=f"C{color}", label=f"{model}, {name}")
    axes.set(xscale="log", xlabel="hidden width", ylabel="epoch [s]")
    axes.set_title("P3, ogbn-products, 4 x 4 P100")
    axes.legend(fontsize=7)
    save(figure, "published_p3")


def over_servers(plt, rows: list[dict[str, str]]) -> None:
    """Draw PipeGCN Table 8: speedup over graph parallel by servers and GPUs per server."""
    figure, axes = plt.subplots(figsize=(6, 4))
    for color, gpus in enumerate((2, 3, 4)):
        wanted = {"strategy": "pipegcn", "gpus_per_node": str(gpus)}.items()
        here = [r for r in rows if r["source"].startswith("Table 8") and wanted <= r.items()]
        servers = [int(row["num_nodes"]) for row in here]
        times = [predict(row, calibrate.calibrated) for row in here]
        axes.plot(servers, times, color=f"C{color}", label=f"{gpus} GPUs per server")
        printed(axes, here, "num_nodes", color)
    axes.set(xlabel="servers", ylabel="times as fast as graph parallel (dots: printed)")
    axes.set_title("PipeGCN, Reddit, MI60 over 10 Gbit/s")
    axes.legend()
    save(figure, "published_pipegcn")


def printed(axes, rows: list[dict[str, str]], by: str, color: int) -> None:
    values = [float(row["value"]) for row in rows]
    axes.plot([int(row[by]) for row in rows], values, "o", color=f"C{color}")


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
    usual = PRINTED / ("others.csv" if verb in ("software", "others") else "figures.csv")
    verbs = {"fit": fit, "software": software, "table": table, "others": others}
    verbs |= {"figures": figures}
    verbs[verb](*files or [str(usual)])
