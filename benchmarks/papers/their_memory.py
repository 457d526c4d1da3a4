"""Memory of PipeGCN's and GraNNDis' code in a step, tensor by tensor: does it fit in a GPU?

Tensors are those of GATECH-EIC/PipeGCN and AIS-SNU/GraNNDis_Artifact (helper/feature_buffer.py,
module/*.py). Brackets give a tensor's rows: a layer's output rows, or its sources (own rows and
halo).

    graph         DGL stores it by edges, by rows and by columns, with int32 ids: 8 bytes per edge
                  each.
    features      PipeGCN keeps its own features, and their neighbours' mean (--use-pp).
    layer         Received rows and their gradients (f_recv, b_recv: halo). Own and halo rows in
                  one buffer (f_buf: sources). Dropout's output and mask (sources). The mean of
                  neighbours (rows). Norm and ReLU: before dropout in GraNNDis' ResGCN+ (sources),
                  after the layer in PipeGCN's GraphSAGE (twice rows).
    linear layer  Dropout's output and mask, norm and ReLU (rows): PipeGCN's last two layers on Yelp
                  (--n-linear 2).
    ends          GraNNDis' encoder keeps only features. Logits, their log-softmax, and the
                  gradients of both.

Nothing is kept per edge: the mean is DGL's copy_u and sum, which makes no messages. The peak is in
the backward pass of the widest layer, with three gradients of its sources. Weights, NCCL's buffers
and the memory of CUDA itself are not counted; presets leave a tenth of the memory for them.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from gnnplan.papers.question import Question, Row
from gnnplan.planner.ownership.estimated_layout import EstimatedLayout
from gnnplan.planner.ownership.layout import Layout
from gnnplan.planner.strategies.layerwise.granndis import GraNNDis

EDGE = 24  # bytes of the graph per edge
DROPOUT = 1.25  # factor on a tensor's bytes: dropout's output, and a mask of 1 byte per number
NO_DROPOUT = ("ogbn-papers100M",)  # PipeGCN Table 3
LINEAR = {"yelp": 2}  # number of PipeGCN's last layers that aggregate nothing
MOST_BATCHES = 1024
# Factor on the counted memory for memory that is not counted (NCCL, a fragmented heap), if a row
# shows it. On GraNNDis' 2080 Ti, 112 layers on Reddit need five batches (Sec. 8.7). Five batches
# count as 6.2 GB and four as 7.3 GB, of 10.6 GB.
UNCOUNTED = {"granndis_2080ti_1gbe": 1.58}


def gave_a_factor(row: Row) -> bool:
    """Return whether a factor in UNCOUNTED was derived from the row."""
    return (
        row["testbed"] in UNCOUNTED
        and row["metric"] == "fits_in_memory"
        and row["strategy"].startswith("granndis")
    )


def fits(case: Question, any_batches: bool) -> bool:
    """Return whether the fullest rank fits its GPU.

    any_batches: GraNNDis reduces its batches until they fit (Sec. 5), so it is enough if some
    number of batches fits.
    """
    problem, strategy = case.problem, case.strategy
    memory = problem.cluster.device.memory
    if not (any_batches and isinstance(strategy, GraNNDis)):
        return needed(case) <= memory
    most = min(MOST_BATCHES, max(1, problem.stats.train_vertices // problem.ranks))
    counts = [2**power for power in range(int(np.log2(most)) + 1)]
    return any(
        needed(replace(case, strategy=replace(strategy, batches=count))) <= memory
        for count in counts
    )


def needed(case: Question) -> float:
    """Return the memory of the fullest rank [B]."""
    problem, strategy = case.problem, case.strategy
    layouts: list[Layout | EstimatedLayout] = [problem.layout()]
    if isinstance(strategy, GraNNDis):
        layouts = list(strategy.layouts(problem)) or [strategy.layout(problem)]
    factor = UNCOUNTED.get(case.row["testbed"], 1.0)
    return factor * max(_counted(case, layout) for layout in layouts)


def _counted(case: Question, layout: Layout | EstimatedLayout) -> float:
    """Return the bytes of the tensors that the module docstring lists [B]."""
    problem, model = case.problem, case.problem.model
    itemsize, layers = model.itemsize, problem.workload.layers
    pipegcn = case.row["paper"] == "pipegcn"
    linear = LINEAR.get(problem.stats.name, 0) if pipegcn else 0
    dropout = 0.0 if pipegcn and problem.stats.name in NO_DROPOUT else DROPOUT
    kept, widest = 0.0, 0.0
    for layer in range(1, layers + 1):
        facts, spec = layout.facts(layer), model.layers[layer - 1]
        rows, sources = float(facts.rows.max()), float(facts.sources.max())
        halo = sources - rows
        if layer == 1:
            kept += EDGE * float(facts.edges.max()) + rows * model.features * itemsize
        if model.encoder:
            kept += ((2 + dropout) * sources + rows + 2 * halo) * spec.h_in * itemsize
        elif layer == 1:  # the features' mean, and dropout of features and mean
            kept += (2 * dropout + 1) * rows * model.features * itemsize
            sources = rows
        elif layer > layers - linear:
            kept += dropout * rows * spec.h_in * itemsize
            sources = rows
        else:
            kept += ((1 + dropout) * sources + rows + 2 * halo) * spec.h_in * itemsize
        if not model.encoder and layer < layers:
            kept += 2 * rows * spec.h_out * itemsize
        widest = max(widest, 3 * sources * spec.h_in * itemsize)
    ends = 4 * rows * model.classes * itemsize
    return kept + ends + widest
