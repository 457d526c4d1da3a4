"""Gradients that ranks add up in buckets, beside the backward pass.

    one bucket   compute  |backward 3|backward 2|backward 1|. . . . . . |update|
                 reduce                                    |all_reduce. |

    buckets 3    compute  |backward 3|backward 2|backward 1|. . . |update|
                 reduce              |all_r. 3|  |all_r. 2||a. 1. |

A bucket has the weights of neighbouring layers. Its all-reduce begins when the backward pass has
made the gradient of all of them, and the update waits for all buckets. The numbers are those of one
bucket, to rounding; the bytes are the same. What is exposed is what the last bucket takes, and what
the wire could not carry before; every bucket pays the latency of an all-reduce.

Source: Li et al., PyTorch Distributed (VLDB 2020), Sec. 3.2.3, whose buckets have a size instead of
a number: 25 MB, which is more than all weights of most GNNs.
"""

from __future__ import annotations

from typing import NamedTuple

from gnnplan.planner.gnn.model import Model
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies.base import Strategy
from gnnplan.planner.vocabulary.errors import SpecError

# |closed form / simulation - 1| of a synchronous step with several buckets stays below this. All
# ranks' exchanges share ports with all-reduces, and the closed form takes them for one.
CLAIM = 0.03
# Candidates have buckets where these save this share of an epoch or more. Otherwise a search would
# evaluate twice as many candidates for gains that nobody notices.
GAIN = 0.02


class Bucket(NamedTuple):
    """Neighbouring layers whose gradients are added up together."""

    layers: range  # the encoder goes with layer 1, the decoder with the last one
    weights: int
    after: int  # the layer whose backward pass completes their gradients; 0: the encoder's does


def buckets_of(problem: Problem, count: int, narrow: bool) -> list[Bucket]:
    """At most so many buckets of nearly equal size, in the order in which they are complete.

    None if there is nothing to add up, or with a count of 1: that is done after the backward pass.

    A layer goes into the bucket in which its middle lies, if all weights, from the last layer on,
    are cut into `count` equal pieces; a piece may have no middle, and then is no bucket. With
    `narrow`, a layer's projection is done with the layer before, and so is its backward pass.
    """
    model, runs, passed = problem.model, dict[int, range](), 0
    if problem.ranks == 1 or count == 1:
        return []
    for layer in range(len(model.layers), 0, -1):
        if weights := model.weights_of(range(layer, layer + 1)):
            piece = (2 * passed + weights) * count // (2 * model.weights)
            last = runs[piece].stop if piece in runs else layer + 1
            runs[piece] = range(layer, last)
            passed += weights
    return [
        Bucket(layers, model.weights_of(layers), _completed_by(model, layers.start, narrow))
        for layers in runs.values()
    ]


def _completed_by(model: Model, layer: int, narrow: bool) -> int:
    if layer == 1 and model.encoder:
        return 0
    return layer - 1 if narrow and model.narrow_at(layer) else layer


def check_buckets(name: str, problem: Problem, count: int) -> None:
    """Raises SpecError if the model has no such number of buckets."""
    layers = problem.workload.layers
    if not 1 <= count <= layers:
        raise SpecError(
            f"{name}: buckets is a number of all-reduces per step, from 1 to one per layer"
            f" (buckets: {count}, layers: {layers}); use buckets={min(max(count, 1), layers)}"
        )


def pays(problem: Problem, plain: Strategy, several: Strategy) -> bool:
    """Whether a search should evaluate variants with buckets.

    It asks of one: `plain` with one bucket, and `several` that is the same with more. These can
    hide all-reduces, and save no more than these take.
    """
    layers = problem.workload.layers
    if not several.suits(problem) or len(buckets_of(problem, layers, narrow=False)) < 2:
        return False
    before = plain.predict(problem)
    most = (1 - GAIN) * float(before.epoch_s)
    if float(before.epoch_s - before.by_op["all_reduce"]) > most:
        return False
    return float(several.predict(problem).epoch_s) <= most
