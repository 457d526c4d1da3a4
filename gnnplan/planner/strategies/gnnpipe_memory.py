"""What a rank of a pipeline fills: a stage holds its layers only, but for all vertices, and the history of each of its layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from gnnplan.planner.footprint import RUNTIME, Footprint, Moments, Prepared, Product, block, footprint, kernels, loss
from gnnplan.planner.job import Job
from gnnplan.planner.strategies.strategy import Memory

if TYPE_CHECKING:
    from gnnplan.planner.strategies.gnnpipe import GNNPipe


def memory(pipe: GNNPipe, job: Job) -> Memory:
    """A stage holds its layers only, but for all vertices, and the history of each of its layers; its members share the rows. It is
    fullest when backward begins, with all that autograd keeps of all chunks."""
    assert pipe.stages is not None
    model, b, g = job.model, job.model.itemsize, pipe.members(job)
    kept = np.array(pipe.kept(job), dtype=float)
    uses = ("parameters", "optimizer", "features", "activations", "history", "pipeline", "graph", "buffers")
    use: Memory = {name: np.zeros(job.ranks) for name in uses}
    alike: dict[object, Footprint] = {}
    for s in range(pipe.stages):
        at = slice(s * g, s * g + g)
        layers = pipe.shape(job)[1][s]
        use["parameters"][at] = pipe.weights(job, s) * b
        use["optimizer"][at] = (3 if job.workload.optimizer == "adam" else 1) * pipe.weights(job, s) * b
        varying = sum(model.input_width(layer) for layer in layers if layer > model.first_varying)
        use["history"][at] = (3 + pipe.historical_gradients) * kept * varying * b  # past, mixed and slope
        use["features"][at], use["graph"][at] = _constant(pipe, job, s)
        m = _moments(pipe, job, s, alike)
        use["activations"][at], use["buffers"][at] = m.activations, m.buffers
        if s + 1 < pipe.stages:
            use["pipeline"][at] = pipe.facts(job).rows.sum(0) * pipe.boundary(job, s) * b  # buffers for what comes back
    use["runtime"] = np.full(job.ranks, RUNTIME[job.cluster.device.kind])
    return use


def _constant(pipe: GNNPipe, job: Job, stage: int) -> tuple[np.ndarray, np.ndarray]:
    """Features and edges [B] of a stage's members."""
    model, stages = pipe.shape(job)
    facts, kept = pipe.facts(job), np.array(pipe.kept(job), dtype=float)
    own, edges, sources = (numbers.astype(float).sum(0) for numbers in (facts.rows, facts.edges, facts.sources))
    kind, spec = job.workload.model, model.layers[stages[stage].start - 1]
    graph = block(kind, model, spec, own, sources, edges) + 8 * (kept + facts.sends.sum((0, 2)))
    if stage == len(stages) - 1:
        graph = graph + 16 * own  # labels and masks
    if stage:
        return np.zeros(own.size), graph
    features = model.features_held(kept if model.first_varying else own)
    if model.reads_sparse(1):  # what each chunk reads
        features = model.features_held(facts.sources, facts.numbers).sum(0)
        if kind == "sage":
            features = features + model.features_sorted(facts.rows).sum(0)
    elif model.reads_sparse(0):  # each chunk its rows
        features = features + 4 * len(facts.rows) * model.features
    elif model.first_varying and model.aggregate_cached(1):
        features = features + model.features_held(own)
    elif model.first_varying and model.dropout:
        features = 2 * features  # dropped anew in every step
    return features, graph


def _moments(pipe: GNNPipe, job: Job, stage: int, alike: dict[object, Footprint]) -> Moments:
    """A training step of a stage as executor/strategies/gnnpipe.py does it; arrays over its members. Layers that are alike share
    their numbers."""
    model, stages = pipe.shape(job)
    facts, b, kind, layers = pipe.facts(job), model.itemsize, job.workload.model, stages[stage]
    rows, edges, sources, taken = (a.astype(float) for a in (facts.rows, facts.edges, facts.sources, facts.sends.sum(1)))
    meets = np.asarray(facts.sends.any((1, 2), keepdims=True))[:, 0]  # [K, 1]: chunks whose members exchange rows
    own = rows.sum(0)
    m = Moments(own.size)
    products: list[Product] = []
    beside = np.zeros(own.size)  # the most that a chunk's backward pass takes on top
    if stage:
        m.keep(own * (pipe.boundary(job, stage - 1) + model.hands_on_initial * model.layers[0].h_in) * b)  # messages; initial rows
    elif model.encoder:
        dropped = own * (model.nonzeros or model.features) * b * (model.dropout > 0 and model.hands_on_initial)
        m.keep(dropped, own * model.encoder[1] * b)
        if not model.nonzeros:
            products.append(Product(rows, *model.encoder, False, ("bias relu",) if model.relu_after(0) else ("bias",)))
    for layer in layers:
        spec, sparse, varies = model.layers[layer - 1], model.reads_sparse(layer), layer > model.first_varying
        key = (spec, varies, model.relu_after(layer))
        if key not in alike:
            alike[key] = footprint(kind, model, layer, rows, sources, edges, apart=not sparse)
        need, linear = alike[key], not (spec.heads or spec.projects_first or kind == "resgcn")
        products += need.products
        out = (rows * spec.h_out * b).sum(0)
        read = (rows if linear else sources) * spec.h_in * b
        if not varies:
            m.keep(need.kept.sum(0), 0.0 if sparse or model.aggregate_cached(layer) else read.sum(0))
            beside = np.maximum(beside, (need.backward - need.kept).max(0))
            continue
        made = Prepared.of(model, spec, rows + taken)
        x = made.rows * meets  # own and others' rows side by side
        m.keep(x.sum(0), read.sum(0))
        if pipe.checkpoint and layer < len(model.layers):
            m.keep(out)
            if layer + 1 in layers:
                m.free((rows * spec.h_out * b * meets).sum(0))  # the next layer has them beside others'
            again = (need.kept + made.saved + made.dropped) * (layers[-1] != len(model.layers))  # else in the last layer's place
        else:
            m.keep(need.kept.sum(0), (made.saved + made.dropped).sum(0))
            again = 0.0 * rows
        spread = (2 * rows + sources) * spec.h_in * b  # gradients of gathered and own rows, then of the rows read
        passed = (2 + 2 * meets) * made.rows  # through what prepared them
        beside = np.max([beside, (again + need.backward - need.kept).max(0), spread.max(0), passed.max(0)], axis=0)
    if layers[-1] == len(model.layers):
        trained = rows * min(1.0, job.stats.train_vertices / job.stats.vertices)
        most = loss(model, rows, trained)[1]
        m.keep(most.sum(0) - (trained * model.classes * b).sum(0), (rows * model.classes * b).sum(0))
        products += [Product(rows, *model.decoder)] if model.decoder else []
    m.at(beside)
    if job.cluster.device.kind == "cpu" and b == 4:
        m.buffers = m.buffers + kernels(dict.fromkeys(products), own.size)
    return m

