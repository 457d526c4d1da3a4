"""Max-min fair rates by definition, for tests of what finds them faster."""

import numpy as np
from scipy.optimize import linprog


def by_linear_programs(fill: np.ndarray, capacity: np.ndarray) -> list[float]:
    """The lowest rate as high as it goes; fix those that cannot have more; repeat.

    fill: what a rate of 1 takes of each port [ports, flows]. capacity: of each port [ports]."""
    n = fill.shape[1]
    fixed: dict[int, float] = {}
    while len(fixed) < n:
        # variables: the rates, and the level that those not fixed have at least
        free = [i for i in range(n) if i not in fixed]
        above = np.hstack([-np.eye(n)[free], np.ones((len(free), 1))])
        limits = np.vstack([np.hstack([fill, np.zeros((len(fill), 1))]), above])
        room = np.append(capacity + 1e-9, np.zeros(len(free)))
        bounds = [(fixed[i], fixed[i]) if i in fixed else (0, None) for i in range(n)] + [(0, None)]
        level = -linprog([0.0] * n + [-1.0], limits, room, bounds=bounds).fun
        floor = [
            bound if i in fixed else (max(0.0, level - 1e-9), None)
            for i, bound in enumerate(bounds[:-1])
        ]
        stuck = [
            i
            for i in free
            if -linprog(-np.eye(n)[i], fill, capacity + 1e-8, bounds=floor).fun <= level + 1e-6
        ]
        assert stuck
        fixed |= dict.fromkeys(stuck, level)
    return [fixed[i] for i in range(n)]
