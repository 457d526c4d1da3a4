"""The operations of one mini-batch, for data parallelism and GSplit: sample, load, then the layers.

    each rank samples for itself (data parallelism)
    host     |draw|lay|
    copy               |load|
    compute                 |forward 1 .. L|loss|backward L .. 1|            |update|
    reduce                                                       |all_reduce|

    groups that split a batch (GSplit)
    host     |draw L|ids L|draw L-1|ids L-1| .. |lay|
    copy                                             |load|
    comm                                                  |halo 1 (features)|  then graph parallel

    draw     sample a layer's edges
    ids      tell owners how many of their vertices the frontier has reached (8 bytes per peer),
             and then which (8 bytes each)
    push     if layer 1 is split by sources: send its edges to the owners of their sources (4 bytes
             per number)
    lay      lay out edges as blocks
    load     copy rows of features to the device; to a GPU also the blocks
    wait     with `prefetch` k, a batch is loaded during the training of the previous batch, and k
             samplers of the rank prepare the next k batches, one each; the rank's time of waiting

If a GPU samples for itself, `draw` and `lay` are its computation (device_sampler.py), edges stay on
the GPU, and `load` copies features to it and the ids of rows back.

With a feature store (feature_store.py) `load` copies the rows that are in the server's memory and
in no cache. More operations follow:

    compute        |pick|                rows of the GPU's own cache
    copy      |load|
    comm                |ask|fetch|      rows that other ranks provide, asked for by id: how many
                                         (8 bytes per rank), then which (8 bytes each)

With spread adjacency lists (adjacency_store.py) samplers ask each other for neighbours, layer by
layer. layerwise/step.py has the operations of the layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

import numpy as np

from gnnplan.planner.ownership.minibatch import MiniBatch
from gnnplan.planner.strategies.layerwise import step as layerwise
from gnnplan.planner.strategies.layerwise.exchange import ExchangeOptions
from gnnplan.planner.strategies.minibatch.adjacency_store import NEIGHBOUR
from gnnplan.planner.strategies.minibatch.device_sampler import sampled
from gnnplan.planner.strategies.minibatch.supply import Supply, sized_exchange
from gnnplan.planner.strategies.program.program import Op, Program
from gnnplan.planner.vocabulary.outer import Outer
from gnnplan.planner.vocabulary.schedule import Compute

# Edges that are laid out in the time in which one is split off for its owner, and put in its place
# there. The partial sums are put in theirs. From 15 runs on six graphs on an AMD EPYC, 2026-11-29.
RELAID = 2
# Edges that are drawn in the time in which a row of the frontier is found its owner and its place
# among the owner's rows. From seven graphs, as above.
OWNED = 0.75


def step(supply: Supply, batch: MiniBatch, options: ExchangeOptions) -> Iterator[Op]:
    """Yield the operations of one step, in order."""
    problem, splits = supply.problem, batch.splits
    layers = range(1, problem.workload.layers + 1)
    facts = [batch.facts(layer) for layer in layers]
    all_edges = np.sum([f.edges for f in facts], axis=0)
    # whether a GPU's sampling is counted as computation; clusters may have a measured rate instead
    is_counted = supply.lays_there and not problem.cluster.device_sampler_rates
    if is_counted:
        # one thread samples a batch and then loads it
        lane: Literal["host", "copy"] = "copy" if supply.prefetch else "host"
        yield from sampled(problem, batch, lane)
        yield from supply.reading(all_edges, ahead=lane)
    elif not splits:
        yield from supply.drawing(batch, all_edges)
    peers = Outer.of(batch.servers, True, 1)
    for layer in reversed(layers) if splits else ():
        drawn, asks = batch.sampled(layer), batch.asks(layer)
        yield supply.sampled("draw", drawn + OWNED * asks * batch.facts(layer).sources, layer)
        yield from supply.reading(drawn, layer)
        if asks:
            yield from sized_exchange(
                "ids", batch.facts(layer).returned, peers, layer=layer, ahead="host"
            )
    if batch.pushed is not None:
        yield from sized_exchange("push", batch.pushed, peers, ahead="host", itemsize=NEIGHBOUR)
    if not is_counted:
        relaid = 0 if batch.pushed is None else RELAID * batch.sampled(1)
        yield supply.laying([f.edges for f in facts], relaid)
    yield Op("load", work=supply.copied(batch, facts), ahead="copy" if supply.prefetch else "")
    if supply.prefetch:
        # no time if the batch is loaded already
        yield Op("wait", work=Compute(), idle=True)
    yield from supply.gathered(batch)
    if batch.exchanges_rows(1) and problem.model.first_varying == 1:
        halo = layerwise.send_features(problem, batch, facts[0].sends, "halo")
        yield replace(halo, direction="f", layer=1)
    yield from layerwise.step(problem, batch, options, scored=batch.scored)


def program(supply: Supply, options: ExchangeOptions) -> Program:
    """Return the program, with a step for each mini-batch."""
    batches, prefetch = supply.batches, supply.prefetch
    return Program(
        batches.first,
        batches.steps,
        batches.at,
        lambda batch: list(step(supply, batch, options)),
        supply.fill,
        # the batch being loaded, and `prefetch` batches being sampled; a GPU samples and loads one
        lead=min(prefetch, 1) if supply.lays_there else prefetch and prefetch + 1,
        samplers=supply.samplers,
    )
