"""Whether PipeGCN's and GraNNDis' code fits in a GPU: what it keeps in a step, tensor by tensor (GATECH-EIC/PipeGCN and
AIS-SNU/GraNNDis_Artifact: helper/feature_buffer.py, module/*.py).

    graph            DGL has it by edges, by rows and by columns, 32-bit ids: 8 bytes per edge each
    features         PipeGCN's own beside their neighbours' mean (--use-pp)
    layer            exchanged rows as they came and their gradients (f_recv, b_recv: halo), own and halo rows in one (f_buf: sources);
                     dropout's output and mask (sources), the mean of neighbours (rows). Before dropout, GraNNDis' ResGCN+ has norm and
                     ReLU (sources); after the layer, PipeGCN's GraphSAGE has them (two more: rows)
    linear layer     dropout's output and mask, norm and ReLU (rows): PipeGCN's last two on Yelp (--n-linear 2)
    ends             GraNNDis' encoder: nothing but features. Logits, their log-softmax and both gradients

Nothing is kept per edge: the mean is DGL's copy_u and sum, which makes no messages. The fullest moment is the backward pass of the widest
layer, with three gradients of its sources. Weights, NCCL's buffers and what CUDA itself needs are not counted: presets leave a tenth of
the memory for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from gnnplan.planner.estimate import EstimatedLayout
from gnnplan.planner.layout import Layout
from gnnplan.planner.strategies.granndis import GraNNDis

if TYPE_CHECKING:
    from gnnplan.planner.published import Question

EDGE = 24  # [B]
DROPOUT = 1.25  # its output, and a mask of a byte for a number's four
NO_DROPOUT = ("ogbn-papers100M",)  # PipeGCN Table 3
LINEAR = {"yelp": 2}  # last layers that aggregate nothing
MOST_BATCHES = 1024
# What NCCL, a fragmented heap and all that is not counted add, where a row says it: on GraNNDis' 2080 Ti 112 layers on Reddit need five
# batches (Sec. 8.7), which are counted as 6.2 GB where four are 7.3, of 10.6.
BESIDE = {"granndis_2080ti_1gbe": 1.58}


def gave_a_factor(row: Mapping[str, str]) -> bool:
    return row["testbed"] in BESIDE and row["metric"] == "fits_in_memory" and row["strategy"].startswith("granndis")


def fits(asked: Question, any_batches: bool) -> bool:
    """In `any_batches` as many as it takes, for GraNNDis, which makes them smaller until they fit (Sec. 5)."""
    room = asked.job.cluster.device.memory
    if not (any_batches and isinstance(asked.strategy, GraNNDis)):
        return needed(asked) <= room
    counts = 2 ** np.arange(int(np.log2(min(MOST_BATCHES, max(1, asked.job.stats.train_vertices // asked.job.ranks)))) + 1)
    return any(needed(replace(asked, strategy=replace(asked.strategy, batches=int(count)))) <= room for count in counts)


def needed(asked: Question) -> float:
    """Bytes of the fullest rank."""
    job, strategy = asked.job, asked.strategy
    layouts: list[Layout | EstimatedLayout] = [job.layout()]
    if isinstance(strategy, GraNNDis):
        layouts = list(strategy.layouts(job)) or [strategy.layout(job)]
    return BESIDE.get(asked.row["testbed"], 1.0) * max(_of(asked, layout) for layout in layouts)


def _of(asked: Question, layout: Layout | EstimatedLayout) -> float:
    job, model = asked.job, asked.job.model
    layers, b = job.workload.layers, model.itemsize
    linear = LINEAR.get(job.stats.name, 0) if asked.row["paper"] == "pipegcn" else 0
    dropped = 0.0 if asked.row["paper"] == "pipegcn" and job.stats.name in NO_DROPOUT else DROPOUT
    kept, widest = 0.0, 0.0
    for layer in range(1, layers + 1):
        facts, spec = layout.facts(layer), model.layers[layer - 1]
        rows, sources = float(facts.rows.max()), float(facts.sources.max())
        halo = sources - rows
        if layer == 1:
            kept += EDGE * float(facts.edges.max()) + rows * model.features * b
        if model.encoder:
            kept += ((2 + dropped) * sources + rows + 2 * halo) * spec.h_in * b
        elif layer == 1:
            kept += (2 * dropped + 1) * rows * model.features * b  # its mean, and dropout of both
            sources = rows
        elif layer > layers - linear:
            kept += dropped * rows * spec.h_in * b
            sources = rows
        else:
            kept += ((1 + dropped) * sources + rows + 2 * halo) * spec.h_in * b
        if not model.encoder and layer < layers:
            kept += 2 * rows * spec.h_out * b
        widest = max(widest, 3 * sources * spec.h_in * b)
    return kept + 4 * rows * model.classes * b + widest
