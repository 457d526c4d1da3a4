"""Prints the table of docs/how-to/choose-the-objective.md: plans of ten graphs on four clusters.

    python benchmarks/answers.py

Plans are of a GraphSAGE of 3 x 256 with all defaults. A cell has the number of GPUs, the mode and
the time of the training; for several GPUs also the time on one GPU.
"""

from __future__ import annotations

from commands import header, line, words

import gnnplan
from gnnplan.planner.vocabulary.units import show_long

CLUSTERS = {
    "8 L4": "l4_box",
    "64 A100": "dgx_a100?servers=8",
    "16 H100": "dgx_h100?servers=2",
    "16 P100 on 10 Gbit/s": "p3_p100",
}
GRAPHS = (
    "squirrel",
    "flickr",
    "ogbn-arxiv",
    "ogbn-papers100M",
    "reddit",
    "yelp",
    "ogbn-products",
    "orkut",
    "friendster",
    "uk-2006-05",
)


def cell(graph: str, cluster: str) -> str:
    sizes = gnnplan.plan(graph, cluster=cluster, model="sage").document["sizes"]
    best = next(size for size in sizes if size["recommended"])
    text = f"{best['gpus']}, {best['mode']}: {show_long(best['training_s'])}"
    on_one_gpu = [size["training_s"] for size in sizes if size["gpus"] == 1]
    if best["gpus"] == 1 or not on_one_gpu:
        return text
    return f"{text} (1: {show_long(min(on_one_gpu))})"


def main() -> None:
    words(__doc__)
    print(header("graph", *CLUSTERS, left=1 + len(CLUSTERS)))
    for graph in GRAPHS:
        print(line(graph, *(cell(graph, cluster) for cluster in CLUSTERS.values())), flush=True)


if __name__ == "__main__":
    main()
