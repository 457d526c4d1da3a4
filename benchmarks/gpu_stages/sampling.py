"""Batches drawn and laid out by the GPU, beside those of the host."""

from __future__ import annotations

from functools import partial
from itertools import product
from statistics import median

import numpy as np
import torch

from gnnplan.executor.minibatch.sampler import Sampler
from gnnplan.executor.ranks.recorder import now
from gnnplan.planner.gnn.workload import Workload
from gnnplan.planner.ownership.minibatch import Batches
from gpu_stages import graphs
from gpu_stages.record import Record, Row, Setting

GRAPHS = ((20_000, 1_000_000), (400_000, 8_000_000))
FANOUTS = ((15, 10, 5), (25, 10))
BATCHES = (1024, 8192)


def run(setting: Setting, record: Record) -> None:
    _ = setting.torch_device
    small = ((300, 3_000),), ((3, 2),), (16,)
    for size, fanout, batch in product(*(small if setting.small else (GRAPHS, FANOUTS, BATCHES))):
        what = f"batches of {batch}, fanout {fanout}, {size[0]} vertices"
        record.attempt(what, partial(_drawn, setting, size, fanout, batch))


def _drawn(
    setting: Setting, size: tuple[int, int], fanout: tuple[int, ...], batch: int
) -> list[Row]:
    device, (vertices, edges) = setting.torch_device, size
    graph = graphs.graph(device, vertices, edges, features=8, classes=16)
    layers = len(fanout)
    workload = Workload(model="sage", mode="mini", layers=layers, fanout=fanout, batch=batch)
    batches = Batches(graph, workload, (0,), np.zeros(graph.stats.vertices, np.int32))
    samplers = {
        "host": Sampler(batches, 0, ["mean"] * layers),
        "device": Sampler(batches, 0, ["mean"] * layers, device=device, lays_on_device=True),
    }
    found, shares = list[Row](), {}
    for where, sampler in samplers.items():
        shares[where] = sampler[0].share
        seconds: dict[str, list[float]] = {"draw": [], "lay": [], "all": []}
        drawn = 0
        for step in range(1, 4 if setting.small else 12):
            begin = now()
            made = sampler[step]
            torch.get_device_module(device).synchronize()
            seconds["all"].append(now() - begin)
            for what in ("draw", "lay"):
                seconds[what].append(sum(s.seconds for s in made.spans if s.op == what))
            drawn = sum(part.block.edges for part in made.share.parts)
        found.append(
            {
                "where": where,
                "vertices": vertices,
                "fanout": list(fanout),
                "batch": batch,
                "edges": drawn,
                **{f"{what}_s": median(each) for what, each in seconds.items()},
            }
        )
    same = all(
        np.array_equal(a.source, b.source) and torch.equal(a.block.indices, b.block.indices.cpu())
        for a, b in zip(shares["host"].parts, shares["device"].parts, strict=True)
    )
    wrong = [] if same else ["the device draws or lays out other edges than the host"]
    return [{**row, "equal": same, "wrong": wrong} for row in found]
