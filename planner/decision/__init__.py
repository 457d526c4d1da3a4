"""The decision: which strategy to use, where its ranks sit, and why.

    candidate.py       a strategy with its prediction, and whether it fits in memory; the memory or
                       servers with which it would
    search.py          evaluates all candidates, and ranks them
    recommendation.py  draws of uncertain predictions: chances, ranges and regrets
    dtypes.py          float32 or rounded rows (--dtype auto)
    modes.py           the whole training, full-graph and mini-batch, on all numbers of GPUs
    summary.py         the lines at the beginning of a plan
    explain.py         all reasons for a plan; the links, devices and depths that would change the
                       choice
    sweep.py           the decision at many values of some fields
    scale.py           the decision on increasing numbers of GPUs: whether to distribute at all
    objective.py       the quantity to minimise: time, cost, energy or value; how many epochs a
                       training has
    plan.py            writes and reads plan.json; a strategy of a plan with its numbers; replaces a
                       plan's best (--strategy)

The room may import every room of the planner except evidence/.
"""
