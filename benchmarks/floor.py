"""Prints the floor of an exact epoch: the least time of its products, aggregations and messages.

    python benchmarks/floor.py [STRATEGY] [RANKS]

Ranks measure rates at the same time, one thread each, and the fastest of several rounds counts:
float32 products at the best of three shapes, by torch and by the executor, aggregation on the
strategy's own blocks at each width that the strategy aggregates, and 8 MB in both directions. The
floor is the counted work of a step at these rates, on the rank with most work. `spine.py`
compares epochs with their floor.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from commands import words

GRAPH = "synthetic:community?vertices=20000&edges=1000000&features=128&classes=16&seed=0"
HIDDEN, LAYERS, LR = 256, 3, 0.01
MODEL = {"model": "sage", "layers": LAYERS, "hidden": HIDDEN}
SHAPES = ((1024, 1024, 1024), (4000, 512, 512), (2000, 256, 256))
MESSAGE = 8 << 20  # [B]
ROUNDS = 7


def problem_of(ranks: int) -> Any:
    """Return the problem of the timed training; its cluster's rates are arbitrary and unused."""
    from gnnplan.planner.cluster.spec import Cluster, Device, Link
    from gnnplan.planner.gnn.workload import Workload
    from gnnplan.planner.graph.graph import Graph
    from gnnplan.planner.graph.load import load
    from gnnplan.planner.problem.problem import Problem

    graph = load(GRAPH)
    assert isinstance(graph, Graph)
    anywhere = Cluster(
        gpus_per_server=ranks,
        device=Device(kind="cpu", memory=64e9, gemm=1e11, memory_bandwidth=1e10),
        intra_node=Link(bandwidth=1e9),
    )
    workload = Workload(**MODEL, lr=LR)
    return Problem(graph.stats, graph, workload, anywhere)


def floor(strategy: str, ranks: int) -> dict[str, float]:
    """Return the floor of an epoch [s]: {'products_s', 'aggregation_s', 'wire_s'}."""
    with tempfile.TemporaryDirectory() as folder:
        started = [
            subprocess.Popen(
                [sys.executable, __file__, "rank", strategy, str(ranks), str(rank), folder],
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(ranks)
        ]
        found = [json.loads(process.communicate()[0]) for process in started]
    return max(found, key=lambda each: sum(each.values()))


def as_rank(strategy: str, ranks: int, number: int, folder: str) -> dict[str, float]:
    """Run one of the processes of `floor`, and return this rank's floor."""
    import torch
    import torch.distributed as dist

    from gnnplan.executor.layers.kernels import linear
    from gnnplan.executor.layers.kernels.aggregation import aggregate, aggregate_transposed
    from gnnplan.executor.minibatch.share import share_of
    from gnnplan.executor.modules.read import net_of
    from gnnplan.executor.ranks.comm import swap
    from gnnplan.executor.ranks.rank import Rank
    from gnnplan.planner.ownership.layout import Layout
    from gnnplan.planner.strategies import parse
    from gnnplan.planner.strategies.program.program import AllReduce, Exchange
    from gnnplan.planner.vocabulary.schedule import Compute

    torch.set_num_threads(1)
    problem = problem_of(ranks)
    settled = parse(strategy).settle(problem)
    rank = Rank(number, ranks, torch.device("cpu"), "gloo")
    if ranks > 1:
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/store", rank=number, world_size=ranks
        )
        rank.groups.meet(None)

    def fastest(work: Callable[[], object]) -> float:
        """Return the seconds of the fastest round; all ranks work at the same time."""
        seconds = []
        for _ in range(ROUNDS):
            rank.groups.await_all(None)
            begin = time.perf_counter()
            work()
            seconds.append(time.perf_counter() - begin)
        return min(seconds)

    def flop_rate(shape: tuple[int, int, int]) -> float:
        rows, inner, columns = shape
        a, b = torch.randn(rows, inner), torch.randn(columns, inner)
        by_torch, by_ours = fastest(lambda: a @ b.t()), fastest(lambda: linear(a, b))
        return 2 * rows * inner * columns / min(by_torch, by_ours)

    peak = max(map(flop_rate, SHAPES))
    layout = problem.layout()
    assert isinstance(layout, Layout)
    net = net_of(problem.model, problem.workload)
    block = share_of(layout, number, net.edges, problem.workload).parts[-1].block
    per_row: dict[tuple[str, int], float] = {}

    def row_s(op: str, width: int) -> float:
        """Return the time per row read by an aggregation of `width` columns [s]."""
        if (op, width) not in per_row:
            forward = op == "forward"
            x = torch.randn(block.n_src if forward else block.n_dst, width)
            kernel = aggregate if forward else aggregate_transposed
            with torch.no_grad():
                per_row[op, width] = fastest(lambda: kernel(block, x)) / block.edges
        return per_row[op, width]

    products = aggregation = nbytes = 0.0
    for op in settled.built(problem).step(0):
        if isinstance(op.work, Compute):
            mine = op.work.at(number)
            products += float(mine.flops) / peak
            aggregation += sum(float(g.rows) * row_s(op.op, g.width) for g in mine.gathers)
        elif isinstance(op.work, Exchange):
            sent = op.work.nbytes
            nbytes += float(max(sent[number].sum(), sent[:, number].sum()))
        elif isinstance(op.work, AllReduce):
            nbytes += 2 * (ranks - 1) / ranks * op.work.sizes[0]
    wire = 0.0
    if ranks > 1:
        outs, ins = (
            [torch.zeros((MESSAGE // 4 // (ranks - 1)) * (peer != number)) for peer in range(ranks)]
            for _ in range(2)
        )
        wire = nbytes * fastest(lambda: swap(rank, outs, ins)) / MESSAGE
        dist.destroy_process_group()
    return {"products_s": products, "aggregation_s": aggregation, "wire_s": wire}


def shown(found: Mapping[str, float]) -> str:
    """Return the floor in words.

    >>> shown({"products_s": 0.1, "aggregation_s": 0.05, "wire_s": 0.01})
    '0.160 s: products 0.100, aggregation 0.050, wire 0.010'
    """
    parts = ", ".join(f"{name.removesuffix('_s')} {value:.3f}" for name, value in found.items())
    return f"{sum(found.values()):.3f} s: {parts}"


def main() -> None:
    given = words(__doc__)
    sys.path.insert(1, str(Path(__file__).resolve().parent.parent))
    if given[:1] == ["rank"]:
        print(json.dumps(as_rank(given[1], int(given[2]), int(given[3]), given[4])))
        return
    strategy, ranks = (*given, *("graph_parallel(narrow=True)", "2")[len(given) :])[:2]
    print(f"{strategy}, {ranks} rank(s): {shown(floor(strategy, int(ranks)))}")


if __name__ == "__main__":
    main()
