"""The recommendation: the fastest candidate, but an exact one unless a lossy one is surely faster.

What a lossy strategy costs in accuracy is often unknown. So it has to be faster by more than
predictions of such differences are wrong by (SURE_GAIN).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

# The predicted gain, exact epoch / lossy epoch - 1, from which on it can be believed. In 146 blind
# runs (docs/reference/measured-runs.md) 126 pairs of a lossy and an exact strategy for the same
# question were predicted in favour of the lossy one. Of the 86 pairs predicted further apart than
# this, 95 % came out so; of the 40 others 55 %, which is a toss-up. `sure_gain`
# (planner/evidence/runs.py) computes it from such runs.
SURE_GAIN = 0.112
SURE_SHARE = 0.95  # of pairs that come out as predicted
# No pair of any two strategies that were predicted further apart came out the other way: of 373
# pairs 193 were. Closer ones are worth a run (`gnnplan tune`).
DOUBT = 0.271
UNKNOWN_DOUBT = 1.0  # where no prediction on such devices has been compared with a run


def recommended(epoch_s: NDArray[np.float64], exact: Sequence[bool]) -> NDArray[np.intp]:
    """The candidate that is recommended in every case.

    `epoch_s` [candidates, cases], `exact` [candidates].

    >>> recommended(np.array([[1.0, 1.0], [1.05, 1.5], [1.1, 9.0]]), [False, True, True]).tolist()
    [1, 0]
    """
    fastest = epoch_s.argmin(axis=0)
    exact_s = np.where(np.asarray(exact)[:, np.newaxis], epoch_s, np.inf)
    is_sure = exact_s.min(axis=0) > (1 + SURE_GAIN) * epoch_s.min(axis=0)
    chosen: NDArray[np.intp] = np.where(is_sure, fastest, exact_s.argmin(axis=0))
    return chosen
