"""From timed messages to a link: its latency, its bandwidth, and what each size reaches of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.optimize import isotonic_regression, least_squares

from gnnplan.planner.cluster.spec import Link

# Share of the largest message's time that the fit grants its bytes at least. Without it, bandwidth
# would have no bound where times do not grow with the size.
LEAST_WIRE_SHARE = 0.1
# Bytes of a message (or a buffer), duration [s], core-seconds of all ranks that took part.
Sample = tuple[int, float, float]


class Shape(NamedTuple):
    """The messages that an operation on n bytes consists of."""

    latencies: float = 1.0  # messages one after the other
    wire: float = 1.0  # times n: bytes past the busiest rank
    moved: float = 1.0  # times n: bytes in all messages of all ranks
    port: float = 1.0  # ranks that share the port that limits it


ONE_MESSAGE = Shape()


def shapes(places: int, ranks_per_place: int = 1) -> dict[str, Shape]:
    """The shapes of the operations that are measured between places.

    An exchange is among all ranks of each place, a send goes from one to another, and an all-reduce
    is a ring.
    """
    ranks, peers = places * ranks_per_place, (places - 1) * ranks_per_place
    steps = 2 * (places - 1)
    return {
        "exchange": Shape(peers, peers, ranks * peers, ranks_per_place),
        "send": ONE_MESSAGE,
        "all_reduce": Shape(steps, steps / places, steps),
    }


def beyond(samples: Sequence[Sample], inside: Link, shape: Shape, groups: int) -> list[Sample]:
    """Samples of an exchange among all ranks of several servers, less its part inside servers.

    Inside servers, `groups` exchanges of this shape pass the link `inside` at once. Of the duration
    only their latency goes off: their bytes pass other ports at the same time. Of the core-seconds
    goes off all that their bytes take.
    """
    latency, per_byte = inside.latency * shape.latencies, inside.core_s_per_byte * shape.moved
    return [
        (nbytes, max(seconds - latency, 0.1 * seconds), max(core_s - groups * per_byte * nbytes, 0))
        for nbytes, seconds, core_s in samples
    ]


def fit(samples: Sequence[Sample], shape: Shape = ONE_MESSAGE) -> tuple[Link, list[float]]:
    """A link, and its relative errors at the sizes that it was not fitted to.

    Every other size is fitted to, from the first. Latency and bandwidth come from least squares of
    relative errors (alpha-beta). Then each size where the bytes take longer than the latency gets
    the share of the bandwidth that it reaches.

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
    """Latency [s] and bandwidth [B/s], by least squares of relative errors."""

    def errors(logs: np.ndarray) -> np.ndarray:
        predicted = np.exp(logs[0]) + nbytes[fitted] / np.exp(logs[1])
        return np.asarray(np.log(predicted / seconds[fitted]))

    guess = np.log([seconds.min(), nbytes.max() / seconds.max()])
    upper = [np.inf, guess[1] - np.log(LEAST_WIRE_SHARE)]
    logs = least_squares(errors, guess, bounds=(-np.inf, upper), loss="soft_l1", f_scale=0.1).x
    latency, bandwidth = np.exp(logs).tolist()
    return latency, bandwidth
