"""Which candidate is recommended, and how sure that is, from epochs drawn in doubt.

A prediction is wrong for two reasons: constants of the cluster are other than they are said to be
(cluster/doubt.py), and a right cluster is still predicted imperfectly (MISSES). Both are drawn
DRAWS times, the same way for all candidates. In each draw one of them is the fastest; the *regret*
of another is how much longer its epoch takes. The exact candidate with the shortest predicted epoch
is recommended, unless a lossy one is surely faster: what a lossy strategy costs in accuracy is
often unknown (`search.recommend`). Draws choose nothing else: their ranges are lopsided, and regret
depends on which others there are, so a better link could make the choice worse. Where an objective
other than the epoch's time is asked for, its number takes the place of the epoch (objective.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gnnplan.planner.cluster.doubt import normals
from gnnplan.planner.vocabulary.precision import FLOAT32, Precision

Array = NDArray[np.float64]


class Miss(NamedTuple):
    """Standard deviations of log(predicted / true) that right constants leave."""

    shared: float  # by all strategies of a question
    own: float  # by the exact, or the lossy, strategies of a family; of rounded rows by others


# By the kind of device. CPU ranks: from the first 146 blind runs, and 38 later runs lay between
# their 10th and 90th percentile in 92 % (docs/reference/measured-runs.md). GPUs: from printed
# epochs and speedups, left one out (docs/reference/published-figures.md). Of epochs that other
# works print of GPUs on which nothing was measured, 79 % lie there too
# (docs/reference/other-works.md).
MISSES = {"cpu": Miss(0.08, 0.08), "cuda": Miss(0.14, 0.14)}
SURE_SHARE = 0.95  # chance from which on a lossy strategy is surely faster than an exact one
STRATA = 6  # in which a constant is taken to be known (settled_regret)
MARGIN = 0.1  # the range leaves out as many draws at either end
# Chance of being faster than the recommended strategy from which on one is worth a run (`gnnplan
# tune`). On CPU ranks that is a prediction of up to 27 % more: of 373 measured pairs 193 were
# further apart, and none of them came out the other way.
LEAST_CHANCE = 0.01


class Outlook(NamedTuple):
    """A candidate's range, chance and regret over the draws.

    Fastest is what has least of the objective (objective.py), which is the epoch's time by default.
    """

    low_s: float  # of its epoch: 10th percentile [s] (`range_of`)
    high_s: float  # 90th percentile [s]
    chance_fastest: float  # of all candidates
    expected_regret: float  # of choosing it: mean of its number / the least one - 1


class Settled(NamedTuple):
    """A constant of the cluster whose measurement would make the choice surer."""

    constant: str
    regret: float  # the least expected regret when it is known


def missed(kind: str, family: str, exact: bool, precision: Precision = FLOAT32) -> Array:
    """Factors on a predicted epoch by which predictions miss on right constants [DRAWS].

    Rounded rows have kernels of their own, so their predictions are taken to miss on their own,
    as widely as those of float32: no recorded runs have compared both with predictions.
    """
    shared, own = MISSES[kind]
    rounded = f" {precision.name}" if precision.rounds_rows else ""
    by_kind = normals(f"{family} {'exact' if exact else 'lossy'}{rounded}")
    return np.asarray(np.exp(shared * normals("shared") + own * by_kind))


def regrets(drawn: Array) -> Array:
    """The regret of each candidate in each draw, from numbers to minimise [candidates, draws]."""
    return np.asarray(drawn / drawn.min(axis=0) - 1)


def range_of(drawn: Array, predicted: float) -> tuple[float, float]:
    """The 10th and 90th percentile of a number [draws], or the prediction itself, if it is beyond.

    Ranges of constants may be lopsided, and then most draws may be on one side of it.
    """
    low, high = np.quantile(drawn, (MARGIN, 1 - MARGIN))
    return min(float(low), predicted), max(float(high), predicted)


def outlooks(
    predicted_s: Sequence[float], drawn_s: Array, drawn: Array | None = None
) -> list[Outlook]:
    """Return the candidates' outlooks, from epochs and numbers to minimise [candidates, draws].

    Without `drawn` the epochs are minimised.
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
    """The expected regret of the best choice if one constant were known.

    `drawn` [candidates, draws]; `factor` [draws] is what the constant was multiplied by. Draws
    are sorted by it into STRATA. In each of them one half of the draws chooses a candidate, whose
    regret in the other half counts: a constant that tells nothing leaves the regret as it is.
    """
    regret, left = regrets(drawn), 0.0
    for stratum in np.array_split(np.argsort(factor), STRATA):
        halves = stratum[::2], stratum[1::2]
        for half, other in (halves, halves[::-1]):
            chosen = regret[:, half].mean(axis=1).argmin()
            left += float(regret[chosen, other].sum())
    return left / factor.size
