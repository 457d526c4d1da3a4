"""Forty questions, ten graphs on four clusters, and what an engineer of the field would answer.

    python benchmarks/answers.py docs/reference/answers.md

A GraphSAGE of three layers of 256 is asked about, with all defaults. The engineer's answers were
written down before ours were looked at; each says the mode, the most GPUs and why.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from commands import words

import gnnplan
from gnnplan.planner.vocabulary.units import show_long

CLUSTERS = ("g5.12xlarge", "p3.16xlarge?servers=2", "p4d.24xlarge?servers=4", "p5.48xlarge")
EITHER = ("full", "mini")


@dataclass(frozen=True)
class Expected:
    """An engineer's answer: modes that are right, the most GPUs that are sensible, and why."""

    modes: tuple[str, ...]
    most: int
    why: str


EXPECTED = {
    "squirrel": Expected(EITHER, 1, "5 thousand vertices train in seconds anywhere"),
    "flickr": Expected(EITHER, 1, "89 thousand vertices: a minute on one GPU"),
    "ogbn-arxiv": Expected(EITHER, 1, "OGB's own example trains it on one GPU of 11 GB in minutes"),
    "yelp": Expected(EITHER, 8, "14 million edges: minutes on one GPU"),
    "reddit": Expected(EITHER, 8, "115 million edges are minutes on one GPU of 16 GB"),
    "ogbn-products": Expected(
        EITHER, 8, "full graph on 40 GB or several GPUs, or mini-batches on one"
    ),
    "orkut": Expected(EITHER, 32, "features of 6 GB and 234 million edges: a server"),
    "ogbn-papers100M": Expected(
        ("mini",), 32, "1.2 % of the vertices are trained on: mini-batches"
    ),
    "friendster": Expected(EITHER, 32, "65 million vertices: a server with mini-batches, or all"),
    "facebook-darwini": Expected(("mini",), 32, "10 billion edges: only batches fit"),
}


@dataclass(frozen=True)
class Asked:
    """A question, its answer, and how long we took for it."""

    graph: str
    cluster: str
    answer: str
    gpus: int
    mode: str
    one_gpu_s: float | None  # a training on one GPU [s]; None where it does not fit
    took_s: float

    @property
    def as_expected(self) -> bool:
        expected = EXPECTED[self.graph]
        return self.mode in expected.modes and self.gpus <= expected.most


def ask(graph: str, cluster: str) -> Asked:
    begin = time.process_time()
    document = gnnplan.plan(graph, cluster=cluster, model="sage").document
    took = time.process_time() - begin
    sizes = document["sizes"]
    best = next(size for size in sizes if size["recommended"])
    alone = [size["training_s"] for size in sizes if size["gpus"] == 1]
    return Asked(
        graph,
        cluster,
        document["summary"]["answer"],
        best["gpus"],
        best["mode"],
        min(alone, default=None),
        took,
    )


def lines(asked: list[Asked]) -> Iterator[str]:
    right = sum(one.as_expected for one in asked)
    yield "# Forty questions\n"
    yield (
        f"`python benchmarks/answers.py` asks about ten graphs on four clusters, GraphSAGE 3 x 256,"
        f" all defaults. {right} of {len(asked)} answers are as an engineer of the field would"
        f" expect; the others are marked. The engineer's column was written first.\n"
    )
    for graph, expected in EXPECTED.items():
        modes = " or ".join(
            {"full": "full graph", "mini": "mini-batches"}[m] for m in expected.modes
        )
        gpus = "one GPU" if expected.most == 1 else f"at most {expected.most} GPUs"
        yield f"## {graph}\n\nExpected: {modes}, {gpus}; {expected.why}.\n"
        yield "| cluster | answer | one GPU | |\n|---|---|--:|---|"
        for one in asked:
            if one.graph == graph:
                alone = "does not fit" if one.one_gpu_s is None else show_long(one.one_gpu_s)
                mark = "" if one.as_expected else "not as expected"
                yield f"| {one.cluster} | {one.answer} | {alone} | {mark} |"
        yield ""


def main(target: str) -> None:
    asked = []
    for graph in EXPECTED:
        for cluster in CLUSTERS:
            asked.append(ask(graph, cluster))
            print(f"{graph:18} {cluster:24} {asked[-1].took_s:5.1f} s  {asked[-1].answer}")
    Path(target).write_text("\n".join(lines(asked)), encoding="utf-8")
    large = [one for one in asked if one.gpus > 8 and (one.one_gpu_s or 600) < 600]
    print(f"above 8 GPUs where one trains in under ten minutes: {len(large)}")


if __name__ == "__main__":
    main(*words(__doc__))
