"""Uncertainty of a recommendation: chances, ranges and regrets over draws of predicted epochs.

A prediction is wrong for two reasons: constants of the cluster differ from their given values
(cluster/scaling.py), and the model has an error even with the right constants (MISSES). Both errors
are drawn DRAWS times, with the same draws for all candidates. In each draw one candidate is the
fastest; the *regret* of another candidate is how much longer its epoch takes, as a share.

The exact candidate with the shortest predicted epoch is recommended, unless a lossy candidate is
surely faster, because the loss of accuracy is often unknown (`search.recommend`). Draws decide
nothing else: ranges are asymmetric, and regret depends on which candidates there are, so a faster
link could make the choice worse. For objectives other than time, the objective's value takes the
place of the epoch (objective.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gnnplan.planner.cluster.scaling import normals
from gnnplan.planner.vocabulary.numbers import FLOAT32, Precision

Array = NDArray[np.float64]


class Miss(NamedTuple):
    """Standard deviations of log(predicted / true) with the right constants."""

    shared: float  # of an error that all strategies of a question share
    # of an error that a family's exact strategies share, or its lossy ones; rounded rows have
    # errors of their own
    own: float


# Keyed by kind of device. CPU ranks: from the first 146 blind runs; of 38 later runs 92 % lay
# between the 10th and the 90th percentile (docs/reference/measured-runs.md). GPUs: from printed
# epochs and speedups, with leave-one-out (docs/reference/published-figures.md). Of the epochs that
# other papers print for GPUs that nobody measured, 79 % lie in that range
# (docs/reference/other-works.md).
MISSES = {"cpu": Miss(0.08, 0.08), "cuda": Miss(0.14, 0.14)}
SURE_SHARE = 0.95  # least chance with which a lossy strategy counts as surely faster
STRATA = 6  # bins of a constant, inside which the constant counts as known (settled_regret)
MARGIN = 0.1  # share of draws below a range, and above it
# Least chance of being faster than the recommended strategy with which a strategy is worth a run
# (`gnnplan tune`). On CPU ranks it corresponds to a prediction of up to 27 % more: of 373 measured
# pairs 193 were further apart, and in none of these was the order reversed.
LEAST_CHANCE = 0.01


class Outlook(NamedTuple):
    """A candidate's range, chance and regret over the draws.

    The fastest candidate is the one with the least value of the objective (objective.py).
    """

    low_s: float  # 10th percentile of the epoch [s] (`range_of`)
    high_s: float  # 90th percentile of the epoch [s]
    chance_fastest: float  # share of draws in which the candidate is the fastest
    expected_regret: float  # mean over draws of value / least value - 1


class Settled(NamedTuple):
    """A constant of the cluster whose measurement would make the choice surer."""

    constant: str
    regret: float  # the least expected regret once the constant is known


def missed(kind: str, family: str, exact: bool, precision: Precision = FLOAT32) -> Array:
    """Return factors on a predicted epoch, draws of the model's error [DRAWS].

    Rounded rows have kernels of their own, so the errors of their predictions are independent, with
    the spread of float32: no recorded runs have compared both precisions with predictions.
    """
    shared, own = MISSES[kind]
    rounded = f" {precision.name}" if precision.rounds_rows else ""
    by_kind = normals(f"{family} {'exact' if exact else 'lossy'}{rounded}")
    return np.asarray(np.exp(shared * normals("shared") + own * by_kind))


def regrets(drawn: Array) -> Array:
    """Return regrets from values to minimise (both [candidates, draws])."""
    return np.asarray(drawn / drawn.min(axis=0) - 1)


def range_of(drawn: Array, predicted: float) -> tuple[float, float]:
    """Return the 10th and 90th percentile of draws, extended to include the prediction.

    Ranges of constants may be asymmetric, so most draws may be on one side of the prediction.
    """
    low, high = np.quantile(drawn, (MARGIN, 1 - MARGIN))
    return min(float(low), predicted), max(float(high), predicted)


def outlooks(
    predicted_s: Sequence[float], drawn_s: Array, drawn: Array | None = None
) -> list[Outlook]:
    """Return the candidates' outlooks.

    predicted_s: epochs [candidates]; drawn_s: epochs in each draw [candidates, draws]; drawn: the
    values to minimise [candidates, draws], by default the epochs.
    """
    drawn = drawn_s if drawn is None else drawn
    chances = np.bincount(drawn.argmin(axis=0), minlength=len(drawn)) / drawn.shape[1]
    regret = regrets(drawn).mean(axis=1)
    return [
        Outlook(*range_of(epochs, predicted), float(chance), float(expected))
        for predicted, epochs, chance, expected in zip(
            predicted_s, drawn_s, chances, regret, strict=True
        )
    ]


def settled_regret(drawn: Array, factor: Array) -> float:
    """Return the expected regret of the best choice if one constant were known.

    `drawn` [candidates, draws] are values to minimise; `factor` [draws] multiplies the constant.
    Draws are sorted by the factor into STRATA. In each stratum one half of the draws chooses a
    candidate, and its regret in the other half counts. So a constant without influence leaves the
    expected regret as it is.
    """
    regret, left = regrets(drawn), 0.0
    for stratum in np.array_split(np.argsort(factor), STRATA):
        halves = stratum[::2], stratum[1::2]
        for half, other in (halves, halves[::-1]):
            chosen = regret[:, half].mean(axis=1).argmin()
            left += float(regret[chosen, other].sum())
    return left / factor.size
