"""Buckets: all-reduces of some layers' gradients that overlap with the backward pass.

    one bucket   compute  |backward 3|backward 2|backward 1|. . . . . . |update|
                 reduce                                    |all_reduce. |

    buckets 3    compute  |backward 3|backward 2|backward 1|. . . |update|
                 reduce              |all_r. 3|  |all_r. 2||a. 1. |

A bucket has the weights of neighbouring layers. Its all-reduce begins when the backward pass has
computed all gradients of the bucket, and the update waits for all buckets. Several buckets give the
same sums as one, to rounding, and send the same bytes. Exposed are the last bucket, and earlier
buckets that are not finished by then; every bucket pays the latency of an all-reduce.

Source: Li et al., PyTorch Distributed (VLDB 2020), Sec. 3.2.3. There buckets are given by their
size instead of their number: 25 MB, which is more than all weights of most GNNs.
"""

from __future__ import annotations

from typing import NamedTuple

from gnnplan.planner.gnn.model import Model
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies.base import Strategy
from gnnplan.planner.vocabulary.errors import SpecError

# Upper bound of |closed form / simulation - 1| for a synchronous step with several buckets.
# Exchanges contend with all-reduces for ports; the closed form takes all ranks' exchanges as one.
CLAIM = 0.03
# A search tries buckets if they save at least this share of an epoch. Otherwise it would evaluate
# twice as many candidates for gains that nobody notices.
GAIN = 0.02


class Bucket(NamedTuple):
    """Neighbouring layers whose gradients are summed in one all-reduce."""

    layers: range  # layer 1 includes the encoder, the last layer the decoder
    weights: int  # number of weights
    after: int  # the layer whose backward pass completes the gradients; 0: the encoder


def buckets_of(problem: Problem, count: int, narrow: bool) -> list[Bucket]:
    """Return at most `count` buckets of nearly equal size, in the order of their completion.

    The list is empty on one rank, or if `count` is 1: the only all-reduce follows backward.

    All weights, from the last layer on, are divided into `count` equal pieces, and a layer belongs
    to the piece that contains its middle; a piece without layers is no bucket. If `narrow`, forward
    and backward of a layer's projection are done with the layer before.
    """
    model, runs, weights_before = problem.model, dict[int, range](), 0
    if problem.ranks == 1 or count == 1:
        return []
    for layer in range(len(model.layers), 0, -1):
        if weights := model.weights_of(range(layer, layer + 1)):
            piece = (2 * weights_before + weights) * count // (2 * model.weights)
            last = runs[piece].stop if piece in runs else layer + 1
            runs[piece] = range(layer, last)
            weights_before += weights
    return [
        Bucket(layers, model.weights_of(layers), _completed_by(model, layers.start, narrow))
        for layers in runs.values()
    ]


def _completed_by(model: Model, layer: int, narrow: bool) -> int:
    if layer == 1 and model.encoder:
        return 0
    return layer - 1 if narrow and model.narrow_at(layer) else layer


def check_buckets(name: str, problem: Problem, count: int) -> None:
    """Raise SpecError if the number of buckets is not between 1 and the number of layers."""
    layers = problem.workload.layers
    if not 1 <= count <= layers:
        raise SpecError(
            f"{name}: buckets is a number of all-reduces per step, from 1 to one per layer"
            f" (buckets: {count}, layers: {layers}); use buckets={min(max(count, 1), layers)}"
        )


def pays(problem: Problem, plain: Strategy, several: Strategy) -> bool:
    """Return whether a search should evaluate variants with several buckets.

    plain: a strategy with one bucket; several: the same strategy with more buckets.
    """
    if not several.suits(problem):
        return False
    most = (1 - GAIN) * float(plain.predict(problem).epoch_s)
    return float(several.predict(problem).epoch_s) <= most
