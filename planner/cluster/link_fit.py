"""Fit of a link to timed messages: latency, bandwidth, and efficiency by message size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.optimize import isotonic_regression, least_squares

from gnnplan.planner.cluster.spec import Link

# Least share of the largest message's time that the fit attributes to its bytes. Without it, the
# bandwidth would have no upper bound if times do not grow with the size.
LEAST_WIRE_SHARE = 0.1
# Bytes of a message (or buffer), duration [s], core-seconds of all participating ranks.
Sample = tuple[int, float, float]


class Shape(NamedTuple):
    """The messages of an operation on n bytes."""

    latencies: float = 1.0  # number of messages that follow each other
    wire: float = 1.0  # bytes that the busiest rank sends, divided by n
    moved: float = 1.0  # bytes of all messages of all ranks, divided by n
    port: float = 1.0  # ranks that share the limiting port


ONE_MESSAGE = Shape()


def shapes(places: int, ranks_per_place: int = 1) -> dict[str, Shape]:
    """Return the shape of each measured operation among `places` places (GPUs, or servers).

    An exchange is among all ranks of all places, a send is one message from a place to another, and
    an all-reduce is a ring of places.
    """
    ranks, peers = places * ranks_per_place, (places - 1) * ranks_per_place
    steps = 2 * (places - 1)
    return {
        "exchange": Shape(peers, peers, ranks * peers, ranks_per_place),
        "send": ONE_MESSAGE,
        "all_reduce": Shape(steps, steps / places, steps),
    }


def beyond(samples: Sequence[Sample], inside: Link, shape: Shape, groups: int) -> list[Sample]:
    """Subtract the part inside servers from samples of an exchange among all ranks of servers.

    Inside servers, `groups` exchanges of this shape pass the link `inside` at the same time. Only
    their latency is subtracted from the duration, since their bytes pass other ports meanwhile. All
    core-seconds of their bytes are subtracted from the core-seconds.
    """
    latency, per_byte = inside.latency * shape.latencies, inside.core_s_per_byte * shape.moved
    return [
        (nbytes, max(seconds - latency, 0.1 * seconds), max(core_s - groups * per_byte * nbytes, 0))
        for nbytes, seconds, core_s in samples
    ]


def fit(samples: Sequence[Sample], shape: Shape = ONE_MESSAGE) -> tuple[Link, list[float]]:
    """Return a link, and its relative errors at the sizes that it was not fitted to.

    The fit uses every other size, from the first. Latency and bandwidth minimise the squares of
    relative errors (alpha-beta). Then every size whose bytes take longer than the latency gets an
    efficiency, the share of the bandwidth that it reaches.

    >>> sizes = [2**k for k in range(10, 25)]
    >>> link, errors = fit([(n, 1e-4 + n / 1e9, n / 4e9) for n in sizes])
    >>> f"{link.latency:.1e} {link.bandwidth:.1e} {link.core_s_per_byte:.1e} {max(errors):.2f}"
    '1.0e-04 1.0e+09 2.5e-10 0.00'
    """
    n, seconds, core_s = (np.array(column, dtype=float) for column in zip(*samples, strict=True))
    nbytes, each_s = n * shape.wire / shape.latencies, seconds / shape.latencies
    fitted = slice(None, None, 2 if len(n) > 3 else 1)
    latency, bandwidth = _alpha_beta(nbytes, each_s, fitted)
    efficiency: dict[float, float] = {}
    large = nbytes[fitted] > latency * bandwidth
    if large.sum() > 2:
        wire_s = np.maximum(each_s[fitted] - latency, 0.2 * each_s[fitted])[large]
        rates = nbytes[fitted][large] / isotonic_regression(wire_s).x
        bandwidth = float(rates.max())
        shares = (rates / bandwidth).round(4)
        efficiency = dict(zip(nbytes[fitted][large].tolist(), shares.tolist(), strict=True))
    large = n >= min(2**20, n.max())
    link = Link(
        latency=latency,
        bandwidth=bandwidth,
        efficiency=efficiency,
        core_s_per_byte=float(np.median(core_s[large] / (n[large] * shape.moved))),
    )
    predicted = link.latency + link.stretched(nbytes) / link.bandwidth
    return (
        link.model_copy(update={"bandwidth": bandwidth * shape.port}),
        np.abs(predicted / each_s - 1)[1::2].tolist(),
    )


def _alpha_beta(nbytes: np.ndarray, seconds: np.ndarray, fitted: slice) -> tuple[float, float]:
    """Return latency [s] and bandwidth [B/s] with least squares of relative errors."""

    def errors(logs: np.ndarray) -> np.ndarray:
        predicted = np.exp(logs[0]) + nbytes[fitted] / np.exp(logs[1])
        return np.asarray(np.log(predicted / seconds[fitted]))

    guess = np.log([seconds.min(), nbytes.max() / seconds.max()])
    upper = [np.inf, guess[1] - np.log(LEAST_WIRE_SHARE)]
    logs = least_squares(errors, guess, bounds=(-np.inf, upper), loss="soft_l1", f_scale=0.1).x
    latency, bandwidth = np.exp(logs).tolist()
    return latency, bandwidth
