"""From timed messages to a link: alpha-beta, and the share of beta that each size reaches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.optimize import isotonic_regression, least_squares

from gnnplan.planner.specs import Link

LEAST_WIRE = 0.1  # of the largest message's time is its bytes', whatever the moment: where times do not grow, bandwidth has no end
Sample = tuple[int, float, float]  # bytes of a message (a buffer), duration [s], core-seconds of all that took part


class Shape(NamedTuple):
    """An operation of n bytes sends `latencies` messages one after the other, `wire` * n bytes in all, past the busiest rank; `moved` * n
    in `messages` by all ranks. So many ranks share the `port` that limits it."""

    latencies: float = 1.0
    wire: float = 1.0
    moved: float = 1.0
    messages: float = 1.0
    port: float = 1.0


ONE = Shape()  # a message


def shapes(places: int, each: int = 1) -> dict[str, Shape]:
    """Of the operations that are measured between so many places: all to all, of the ranks that each place has; one to another; a ring."""
    ranks, peers, ring = places * each, (places - 1) * each, 2 * (places - 1)
    return {"exchange": Shape(peers, peers, ranks * peers, ranks * peers, each), "send": ONE,
            "all_reduce": Shape(ring, ring / places, ring, ring * places)}  # fmt: skip


def beyond(samples: Sequence[Sample], inside: Link, shape: Shape, groups: int) -> list[Sample]:
    """Samples of an exchange among all ranks of several servers, without what those inside servers (of this link and shape, in so many
    groups at once) take of it: their cores' time, and of its own time what they take however small they are, since bytes inside and between
    servers pass other ports at the same time."""
    started = inside.latency * shape.latencies
    return [(n, max(took - started, 0.1 * took), max(busy - groups * (inside.wake * shape.messages + inside.work * n * shape.moved), 0.0))
            for n, took, busy in samples]  # fmt: skip


def fit(samples: Sequence[Sample], shape: Shape = ONE) -> tuple[Link, list[float]]:
    """A link, and how far off it is at the sizes between those that it is fitted to [share].

    Alpha-beta by least squares of relative errors; then the share of beta that each size reaches, where the wire decides.

    >>> sizes = [2**k for k in range(10, 25)]
    >>> link, errors = fit([(n, 1e-4 + n / 1e9, n / 4e9) for n in sizes])
    >>> f"{link.latency:.1e} {link.bandwidth:.1e} {link.work:.1e} {max(errors):.2f}"
    '1.0e-04 1.0e+09 2.5e-10 0.00'
    """
    n, each, busy = (np.array(column, dtype=float) for column in zip(*samples, strict=True))
    message, each = n * shape.wire / shape.latencies, each / shape.latencies
    known = slice(None, None, 2 if len(n) > 3 else 1)

    def seconds(logs: np.ndarray) -> np.ndarray:
        return np.asarray(np.exp(logs[0]) + message[known] / np.exp(logs[1]))

    guess = np.log([each.min(), message.max() / each.max()])
    most = [np.inf, guess[1] - np.log(LEAST_WIRE)]
    alpha, beta = np.exp(least_squares(lambda logs: np.log(seconds(logs) / each[known]), guess, bounds=(-np.inf, most), loss="soft_l1",
                                       f_scale=0.1).x).tolist()  # fmt: skip
    efficiency: dict[float, float] = {}
    decides = message[known] > alpha * beta
    if decides.sum() > 2:
        beyond = isotonic_regression(np.maximum(each[known] - alpha, 0.2 * each[known])[decides]).x
        rates = message[known][decides] / beyond
        beta = float(rates.max())
        efficiency = dict(zip(message[known][decides].tolist(), (rates / beta).round(4).tolist(), strict=True))
    large, small = n >= min(2**20, n.max()), n <= max(2**14, n.min())
    work = float(np.median(busy[large] / (n[large] * shape.moved)))
    wake = float(np.median(np.maximum(busy[small] - work * n[small] * shape.moved, 0.0))) / shape.messages
    link = Link(latency=alpha, bandwidth=beta, efficiency=efficiency, work=work, wake=wake)
    told = link.latency + link.stretched(message) / link.bandwidth
    return link.model_copy(update={"bandwidth": beta * shape.port}), np.abs(told / each - 1)[1::2].tolist()


def beside_cores(link: Link, shape: Shape, groups: int, cores: int) -> Link:
    """The link where the cores' time for its messages is told apart (Link.wake): what was measured with so many groups at once on so many
    cores is latency only beyond that."""
    each = groups * shape.messages / cores / shape.latencies  # messages to a core while one waits for one
    wake = min(link.wake, 0.9 * link.latency / each)
    return link.model_copy(update={"latency": link.latency - wake * each, "wake": wake})
